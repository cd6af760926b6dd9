"""Rotary positions: channels of queries and keys, turned by angles that grow with the position."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import gin
import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import dims_text, is_flag, is_real
from mesh_tensorflow._core.operation import check_fractions

# -- frequencies of longer sequences than a model was trained for
#
# Each function takes the frequencies, the base and the numbers of a scaling, and returns the new
# frequencies, in radians a position, and a factor of sines and cosines.

_Scaled = tuple[np.ndarray, float]
# A number of positions; a Tensor where the program computes it, as in steps of decoding.
Length = Union[int, mtf.Tensor, None]

_LENGTH = "original_max_position_embeddings"  # the length of training


def _linear(frequencies: np.ndarray, base: float, numbers: Mapping[str, Any]) -> _Scaled:
    # Position interpolation (Chen et al., 2023): all positions as if they were nearer.
    return frequencies / numbers["factor"], 1.0


def _ntk(frequencies: np.ndarray, base: float, numbers: Mapping[str, Any]) -> _Scaled:
    # The base for which the lowest frequency is divided by the factor, and the highest stays 1.
    size = 2 * len(frequencies)
    stretched = numbers["factor"] ** (np.arange(0, size, 2) / (size - 2))
    return frequencies / stretched, 1.0


def _llama3(frequencies: np.ndarray, base: float, numbers: Mapping[str, Any]) -> _Scaled:
    # Waves that fit often into the length of training stay, those that do not fit are stretched,
    # and between the two shares are mixed (Llama team, "The Llama 3 herd of models", 2024).
    low, high = numbers["low_freq_factor"], numbers["high_freq_factor"]
    turns = numbers[_LENGTH] * frequencies / (2 * math.pi)
    unscaled = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (unscaled + (1.0 - unscaled) / numbers["factor"]), 1.0


def _yarn(frequencies: np.ndarray, base: float, numbers: Mapping[str, Any]) -> _Scaled:
    # Peng et al., "YaRN: efficient context window extension of large language models" (2023).
    half, length = len(frequencies), numbers[_LENGTH]

    def channel_of(turns: float) -> float:
        """Returns the channel, a fraction, whose wave turns so often in the length of training."""
        return half * math.log(length / (turns * 2 * math.pi)) / math.log(base)

    low, high = channel_of(numbers.get("beta_fast", 32)), channel_of(numbers.get("beta_slow", 1))
    if numbers.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    width = high - low or 0.001  # no division by 0
    unscaled = 1.0 - np.clip((np.arange(half) - low) / width, 0.0, 1.0)
    factor = numbers["factor"]
    # Longer sequences spread attention: sharper logits make up for it (equation 22).
    attention = numbers.get("attention_factor")
    if attention is None:
        attention = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return frequencies * (unscaled + (1.0 - unscaled) / factor), attention


def _dynamic(frequencies: np.ndarray, base: float, numbers: Mapping[str, Any]) -> _Scaled:
    # As far as a sequence is longer than those of training: with n times the positions, the factor
    # is 1 + factor * (n - 1).
    grown = max(1.0, (numbers["length"] or 0) / numbers[_LENGTH]) - 1.0
    return _ntk(frequencies, base, {"factor": 1.0 + numbers["factor"] * grown})


def _longrope(frequencies: np.ndarray, base: float, numbers: Mapping[str, Any]) -> _Scaled:
    # Each frequency has a divisor that was searched for; Ding et al., "LongRoPE: extending LLM
    # context window beyond 2 million tokens" (2024).
    original, length = numbers[_LENGTH], numbers["length"]
    name = "long_factor" if length is not None and length > original else "short_factor"
    divisors = np.asarray(numbers[name], np.float64)
    if divisors.shape != frequencies.shape:
        raise ValueError(
            f"RotaryEmbedding: {name} has the shape {list(divisors.shape)}, but there are "
            f"{len(frequencies)} frequencies, one for each pair of channels"
        )
    attention, factor = numbers.get("attention_factor"), numbers.get("factor", 1.0)
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return frequencies / divisors, attention


# By the name of the type: the function, the numbers that it needs, and those that it may have.
_SCALINGS: dict[str, tuple[Callable[..., _Scaled], list[str], list[str]]] = {
    "linear": (_linear, ["factor"], []),
    "ntk": (_ntk, ["factor"], []),
    "dynamic": (_dynamic, ["factor", _LENGTH], []),
    "llama3": (_llama3, ["factor", "low_freq_factor", "high_freq_factor", _LENGTH], []),
    "yarn": (
        _yarn,
        ["factor", _LENGTH],
        ["beta_fast", "beta_slow", "attention_factor", "truncate"],
    ),
    "longrope": (
        _longrope,
        ["short_factor", "long_factor", _LENGTH],
        ["factor", "attention_factor"],
    ),
}


_LISTS = ("short_factor", "long_factor")


def _is_number(value: object) -> bool:
    """Returns whether a value is a finite number above 0."""
    return is_real(value) and 0 < value < math.inf


class Turns(NamedTuple):
    """What channels at some positions are multiplied by, Tensors with dimensions [..., channels].

    Attributes:
      cosine: for the channels themselves.
      shares: for the other ones of pairs, by how far these are shifted.
    """

    cosine: mtf.Tensor
    shares: Mapping[int, mtf.Tensor]


@gin.configurable(module="mesh_tensorflow.layers")
class RotaryEmbedding:
    """Turns pairs of channels by angles that are proportional to the position.

    The product of a query and a key then depends on the distance of their positions alone. Su et
    al., "RoFormer: enhanced transformer with rotary position embedding" (2021).

    >>> x = mtf.ones(mesh, "length:3,d_kv:2")
    >>> position = mtf.range(mesh, mtf.Dimension("length", 3), tf.int32)
    >>> rotary = mtf.layers.RotaryEmbedding()
    >>> print(rotary(x, position, mtf.Dimension("d_kv", 2)).numpy().round(2))
    [[ 1.    1.  ]
     [-0.3   1.38]
     [-1.33  0.49]]
    """

    def __init__(
        self,
        base: float = 10000.0,
        fraction: float = 1.0,
        interleaved: bool = False,
        scaling: Optional[Mapping[str, Any]] = None,
    ) -> None:
        """Creates it.

        Args:
          base: the pair i of n turns by base ** (-i / n) radians a position.
          fraction: the share of the channels that are turned, the first ones.
          interleaved: whether a pair are neighbors, as in GPT-J, rather than channels that are half
            of the turned ones apart, as in GPT-NeoX and Llama.
          scaling: how longer sequences than those of training are reached, as in `rope_scaling` of
            Hugging Face's configurations: "rope_type", one of "linear", "ntk" (a larger base),
            "dynamic" (the same, by how long the sequence is), "llama3", "yarn" and "longrope", and
            its numbers, such as {"rope_type": "linear", "factor": 4.0}. None for no scaling.

        Raises:
          ValueError: the scaling is of an unknown type, or lacks numbers; or a number is out of
            range.
        """
        if not _is_number(fraction) or fraction > 1.0:
            raise ValueError(
                f"RotaryEmbedding: fraction={fraction!r} must be a number above 0 and at most 1"
            )
        if not _is_number(base) or base <= 1.0:
            raise ValueError(f"RotaryEmbedding: base={base!r} must be a number larger than 1")
        self.base = base
        self.fraction = fraction
        self.interleaved = interleaved
        # Files say null where they mean that a number is not there.
        self.scaling = {name: x for name, x in (scaling or {}).items() if x is not None}
        kind = self.scaling.pop("rope_type", None) or self.scaling.pop("type", None)
        self.scaling.pop("type", None)
        self.scaling_type = None if kind == "default" else kind
        self._check_scaling()

    def _check_scaling(self) -> None:
        kind, settings = self.scaling_type, set(self.scaling)
        if kind is not None and not (isinstance(kind, str) and kind in _SCALINGS):
            raise ValueError(
                f"RotaryEmbedding: the scaling {kind!r} is none of {', '.join(_SCALINGS)}; "
                "scaling=None leaves frequencies as they are"
            )
        _, needed, further = _SCALINGS[kind] if kind else (None, [], [])
        allowed = [*needed, *further]
        missing = [name for name in needed if name not in settings]
        unknown = sorted(settings - {*allowed})
        if missing or unknown:
            raise ValueError(
                f"RotaryEmbedding: the scaling {kind!r} has "
                f"{', '.join(sorted(settings)) or 'no numbers'}, but takes "
                f"{', '.join(allowed) or 'none'}: "
                + "; ".join(
                    f"{what} {', '.join(names)}"
                    for what, names in (("add", missing), ("leave out", unknown))
                    if names
                )
            )
        self._check_numbers()

    def _check_numbers(self) -> None:
        # NaN and the like would make all logits NaN, without a word.
        for name, value in self.scaling.items():
            is_list = name in _LISTS and isinstance(value, (Sequence, np.ndarray))
            values = list(value) if is_list else [value]
            is_right, kind = all(map(_is_number, values)), "above 0, and finite"
            if name == "truncate":
                is_right, kind = is_flag(value), "true or false"
            if not is_right:
                raise ValueError(
                    f"RotaryEmbedding: {name}={value!r} of the scaling {self.scaling_type!r} must "
                    f"be {kind}"
                )
        low, high = (self.scaling.get(f"{name}_freq_factor") for name in ("low", "high"))
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"RotaryEmbedding: low_freq_factor={low!r} of the scaling {self.scaling_type!r} "
                f"must be below high_freq_factor={high!r}"
            )

    def follows_length(self, length: int) -> bool:
        """Returns whether the frequencies differ by how many of so many positions there are.

        Args:
          length: the most positions that the program has.
        """
        return self.scaling_type == "dynamic" and length > self.scaling[_LENGTH]

    def frequencies(self, size: int, *, length: Optional[int] = None) -> tuple[np.ndarray, float]:
        """Returns the radians a position of each pair, and the factor of sines and cosines.

        Args:
          size: the number of channels that are turned, an even number.
          length: how many positions there are, for "dynamic" and "longrope"; None for few.

        Returns:
          (a float64 array of size / 2, a number, 1.0 unless the scaling says otherwise).
        """
        plain = self.base ** -(np.arange(0, size, 2) / size)
        if self.scaling_type is None:
            return plain, 1.0
        scaled, _, _ = _SCALINGS[self.scaling_type]
        return scaled(plain, self.base, {**self.scaling, "length": length})

    def __call__(
        self,
        x: mtf.Tensor,
        position: mtf.Tensor,
        dim: mtf.Dimension,
        *,
        length: Length = None,
    ) -> mtf.Tensor:
        """Returns queries or keys, turned.

        Args:
          x: a floating-point Tensor with dimensions [..., dim].
          position: an integer Tensor with dimensions of `x`, from 0.
          dim: the Dimension of the channels of `x`.
          length: how many positions the program has, in decoding those of all steps; with the
            scaling "dynamic" also an int32 scalar, those up to this step. "dynamic" and "longrope"
            have other frequencies for more than `original_max_position_embeddings`; None for few.

        Returns:
          A Tensor of the shape and dtype of `x`.

        Raises:
          ValueError: the number of channels that are turned is odd, or the dimensions do not fit.
        """
        self._turned(dim)
        check_fractions("RotaryEmbedding", [x])
        if dim not in x.shape or any(d not in x.shape for d in position.shape):
            raise ValueError(
                f"RotaryEmbedding: {x.name} {x.shape} must have {dims_text([dim])} and the "
                f"dimensions of the positions, {position.name} {position.shape}"
            )
        return self.turned(x, dim, self.turns(position, dim, x.dtype, length=length))

    def turns(
        self,
        position: mtf.Tensor,
        dim: mtf.Dimension,
        dtype: tf.DType,
        *,
        length: Length = None,
    ) -> Turns:
        """Returns what queries and keys at positions are multiplied by.

        Args:
          position: an integer Tensor, from 0.
          dim: the Dimension of the channels.
          dtype: that of queries and keys.
          length: how many positions the program has, as for a call.

        Raises:
          ValueError: the number of channels that are turned is odd.
        """
        turned = self._turned(dim)
        apart = 1 if self.interleaved else turned // 2
        number = np.arange(dim.size)
        # Channels of no pair are turned by an angle of 0.
        inside = number < turned
        first = inside & (number // apart % 2 == 0)
        pair = number // 2 if self.interleaved else number % apart
        static_length = None if isinstance(length, mtf.Tensor) else length
        frequencies, factor = self.frequencies(turned, length=static_length)
        radians = np.where(inside, frequencies[np.where(inside, pair, 0)], 0.0)
        # In float32, since bfloat16 has no 257; the tables are small.
        angle = mtf.to_float(position) * self._of_channels(position, radians, dim)
        if isinstance(length, mtf.Tensor):
            # As `_dynamic` does, whose divisors are powers of one number.
            ratio = mtf.to_float(length) / float(self.scaling[_LENGTH])
            grown = 1.0 + self.scaling["factor"] * (mtf.maximum(ratio, 1.0) - 1.0)
            powers = self._of_channels(position, pair / max(1, turned / 2 - 1), dim)
            angle *= mtf.exp(-mtf.log(grown) * powers)
        cosine = mtf.cos(angle) * self._of_channels(position, np.where(inside, factor, 1.0), dim)
        sine = mtf.sin(angle) * factor
        # (a, b) becomes (a cos - b sin, b cos + a sin). The other one of a pair comes by a shift,
        # which layouts may split; a first channel finds it behind, a second one before it.
        signs = {-apart: -1.0 * first, apart: 1.0 * (inside & ~first)}
        if 2 * apart == dim.size:
            signs = {apart: signs[-apart] + signs[apart]}  # the same by both ways around
        shares = {
            offset: mtf.cast(sine * self._of_channels(position, sign, dim), dtype)
            for offset, sign in signs.items()
        }
        return Turns(mtf.cast(cosine, dtype), shares)

    def key(self, dim: mtf.Dimension, *, length: Length = None) -> Hashable:
        """Returns what `turns` depends on besides positions and the dtype.

        Args:
          dim: the Dimension of the channels.
          length: how many positions the program has, as for a call.
        """
        turned = self._turned(dim)
        computed = length if isinstance(length, mtf.Tensor) else None
        static_length = None if isinstance(length, mtf.Tensor) else length
        frequencies, factor = self.frequencies(turned, length=static_length)
        # By value: each layer of a model may have an object of its own.
        return dim, turned, self.interleaved, frequencies.tobytes(), factor, computed

    def turned(self, x: mtf.Tensor, dim: mtf.Dimension, turns: Turns) -> mtf.Tensor:
        """Returns queries or keys, turned.

        Args:
          x: a floating-point Tensor with dimensions [..., dim].
          dim: the Dimension of its channels.
          turns: what `turns` returns for the positions of `x`.
        """
        y = mtf.multiply(x, turns.cosine, output_shape=x.shape)
        for offset, share in turns.shares.items():
            other = mtf.shift(x, offset, dim, wrap=True)
            y += mtf.multiply(other, share, output_shape=x.shape)
        return y

    def turned_channels(self, size: int) -> int:
        """Returns how many of so many channels are turned."""
        # 2 / 98 of 98 are 2, and in floats a little less.
        return int(size * self.fraction + 1e-6)

    def _turned(self, dim: mtf.Dimension) -> int:
        turned = self.turned_channels(dim.size)
        if turned % 2 or not turned:
            raise ValueError(
                f"RotaryEmbedding: {turned} channels of {dims_text([dim])} (fraction="
                f"{self.fraction}) make no pairs; their number must be even"
            )
        return turned

    @staticmethod
    def _of_channels(x: mtf.Tensor, values: np.ndarray, dim: mtf.Dimension) -> mtf.Tensor:
        return mtf.constant(x.mesh, values.astype(np.float32), [dim], tf.float32)
