"""Random operations, dropout, and sampling from logits."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.errors import WrongTypeError, dims_text, is_real, slip
from mesh_tensorflow._core.graph import Mesh, leaves_no_node
from mesh_tensorflow._core.operation import Operation, Tensor
from mesh_tensorflow._core.shape import Dimension, ShapeLike, convert_to_shape
from mesh_tensorflow._mesh import random_values
from mesh_tensorflow._mesh.random_values import program_seed

__all__ = [
    "RandomOperation",
    "dropout",
    "random_normal",
    "random_uniform",
    "sample_with_temperature",
]


class RandomOperation(Operation):
    """Random values that depend on the seed and on the program, not on the layout."""

    takes_padding = True

    def __init__(self, mesh: Mesh, shape: ShapeLike, tf_fn: Callable, **kwargs: Any):
        """Creates the operation.

        Args:
          mesh: a Mesh.
          shape: a Shape.
          tf_fn: a function of a shape, such as tf.random.uniform.
          **kwargs: keyword arguments of `tf_fn`.
        """
        dtype = tf.as_dtype(kwargs.get("dtype", tf.float32))
        if dtype.is_complex:
            raise WrongTypeError(
                f"random values of dtype {dtype.name}: of complex numbers the parts are random. "
                "Write mtf.complex(mtf.random_normal(...), mtf.random_normal(...))"
            )
        if random_values.is_known(tf_fn):
            random_values.check_arguments(tf_fn, kwargs)
        super().__init__([], mesh=mesh, name=kwargs.get("name") or "random")
        self._tf_fn = tf_fn
        self._kwargs = {key: value for key, value in kwargs.items() if key != "name"}
        # A seed where only the program has one: the same number in each build of a program.
        self._number = self.graph.next_random_operation()
        self._outputs = [Tensor(self, convert_to_shape(shape), dtype)]

    def key(self) -> Optional[tf.Tensor]:
        """Returns its key if its seed is a tf scalar; None for one that is drawn."""
        seed = self._kwargs.get("seed")
        return random_values.key_of(seed, self._number) if tf.is_tensor(seed) else None

    def seed(self) -> Optional[int]:
        """Returns its seed; None if neither the operation nor the program has one."""
        # Without any seed, it is None: each run of the program draws other values.
        own = self._kwargs.get("seed")
        return self._number if own is None and program_seed() is not None else own

    def lower(self, lowering: mtf.Lowering) -> None:
        """Makes each slice of a random tensor that does not depend on the layout."""
        mesh_impl, y = lowering.mesh_impl(self), self.outputs[0]
        kwargs = dict(self._kwargs)
        if mesh_impl.takes_random_keys:
            if self in lowering.random_keys and random_values.is_known(self._tf_fn):
                # In a loop: derived from one that was drawn outside, and from the iteration.
                kwargs["key"] = lowering.random_keys[self]
            elif (key := self.key()) is not None:
                kwargs["key"] = key
        if (seed := self.seed()) is not None:
            kwargs["seed"] = seed
        lowering.set_tensor_lowering(y, mesh_impl.random(y.shape, self._tf_fn, kwargs))


def _random(mesh: Mesh, shape: ShapeLike, tf_fn: Callable, **kwargs: Any) -> Tensor:
    # Layers of a pipeline are built once for all stages, each of which draws values of its own.
    if isinstance(mesh, Mesh) and mesh.graph.stages is not None:
        return mesh.graph.stages.random(convert_to_shape(shape), tf_fn, **kwargs)
    return RandomOperation(mesh, shape, tf_fn, **kwargs).outputs[0]


def random_uniform(mesh: Mesh, shape: ShapeLike, **kwargs: object) -> Tensor:
    """Returns uniform random values.

    For a given seed (`tf.set_random_seed`, `tf.random.set_seed` or the argument) the values are
    the same under every mesh and layout, and in every process.

    >>> x = mtf.random_uniform(mesh, "d:1000", minval=1.0, maxval=2.0)
    >>> print(x.shape, 1.4 < mtf.reduce_mean(x).numpy() < 1.6)
    Shape[d=1000] True

    Args:
      mesh: a Mesh.
      shape: a Shape.
      **kwargs: minval, maxval, dtype, seed and name, as for tf.random.uniform. With an integer
        tf scalar as seed, the values are the same in each run, and in each program of equal
        random operations.
    """
    return _random(mesh, shape, tf.random.uniform, **kwargs)


def random_normal(mesh: Mesh, shape: ShapeLike, **kwargs: object) -> Tensor:
    """Returns normally distributed random values; see `random_uniform`.

    >>> x = mtf.random_normal(mesh, "d:1000", stddev=2.0)
    >>> print(x.shape, abs(mtf.reduce_mean(x).numpy()) < 0.5)
    Shape[d=1000] True

    Args:
      mesh: a Mesh.
      shape: a Shape.
      **kwargs: mean, stddev, dtype, seed and name, as for tf.random.normal.
    """
    return _random(mesh, shape, tf.random.normal, **kwargs)


def _dropout_arguments(
    is_training: Union[bool, float, None],
    keep_prob: Union[float, tf.Tensor, None],
    rate: Union[float, tf.Tensor, None],
) -> tuple[bool, Union[float, tf.Tensor]]:
    """Returns (is_training, keep_prob) from the current or the earlier form of the arguments."""
    flag = isinstance(is_training, bool)
    # In Python a bool is an int too, and True does not stand for a keep_prob of 1.
    number = isinstance(is_training, (int, float)) and not flag
    if isinstance(is_training, float) or (number and keep_prob is None and rate is None):
        # Before 0.1.19 the second argument was keep_prob.
        if keep_prob is not None or rate is not None:
            raise ValueError(
                f"dropout: exactly one of keep_prob and rate should be set, but besides "
                f"{is_training!r} in the second place, keep_prob={keep_prob!r}, rate={rate!r}"
            )
        is_training, keep_prob = True, is_training
    if (keep_prob is None) == (rate is None):
        raise ValueError(
            f"dropout: exactly one of keep_prob and rate should be set, got "
            f"keep_prob={keep_prob!r}, rate={rate!r}; write mtf.dropout(x, is_training, rate=0.1)"
        )
    if keep_prob is None:
        assert rate is not None  # one of the two is given
        keep_prob = 1.0 - rate
    if isinstance(keep_prob, numbers.Real) and not 0.0 < float(keep_prob) <= 1.0:
        raise ValueError(f"dropout: keep_prob must be above 0 and at most 1, got {keep_prob!r}")
    return True if is_training is None else bool(is_training), keep_prob


def drops(rate: Union[float, tf.Tensor, None]) -> bool:
    """Returns whether dropout with a rate may change a value; a tf scalar is not known yet.

    Args:
      rate: the share of elements that are dropped; None as 0.
    """
    return tf.is_tensor(rate) or bool(rate)


@leaves_no_node
def dropout(
    x: Tensor,
    is_training: Union[bool, float, None] = None,
    keep_prob: Union[float, tf.Tensor, None] = None,
    rate: Union[float, tf.Tensor, None] = None,
    noise_shape: Optional[ShapeLike] = None,
    name: Optional[str] = None,
) -> Tensor:
    """Sets random elements of `x` to 0, and scales up the others by 1 / keep_prob.

    `mtf.dropout(x, keep_prob)` and `mtf.dropout(x, rate=rate)`, the forms before release 0.1.19,
    imply `is_training=True`.

    >>> x = mtf.ones(mesh, "d:1000")
    >>> y = mtf.dropout(x, is_training=True, rate=0.5)
    >>> print(sorted(set(y.numpy().tolist())))
    [0.0, 2.0]
    >>> print(mtf.dropout(x, is_training=False, rate=0.5) is x)
    True

    Args:
      x: a floating Tensor.
      is_training: a bool; `x` itself is returned if it is false.
      keep_prob: the probability that an element is kept; a number or a tf scalar.
      rate: 1 - keep_prob; exactly one of the two is given.
      noise_shape: a Shape that may lack dimensions of `x`; the mask is broadcast along these.
      name: a string or None.

    Raises:
      ValueError: not exactly one of `keep_prob` and `rate` is given, or it is out of range.
    """
    is_training, keep_prob = _dropout_arguments(is_training, keep_prob, rate)
    # A tf scalar is not known yet: it gets a mask, also where it turns out to be 1.
    if not is_training or (isinstance(keep_prob, numbers.Real) and keep_prob == 1.0):
        return x
    noise_shape = x.shape if noise_shape is None else convert_to_shape(noise_shape)
    unknown = [d for d in noise_shape if d not in x.shape]
    if unknown:
        raise ValueError(
            f"dropout: noise_shape {noise_shape} has {dims_text(unknown)}, which {x.name} "
            f"{x.shape} lacks; it may only leave out dimensions, along which the noise is shared"
        )
    if not x.dtype.is_floating:
        slip(
            f"dropout: {x.name} {x.shape} is {x.dtype.name}: elements become 0, but the rest "
            f"cannot be scaled by 1 / {keep_prob}. Use mtf.to_float on it, or mtf.where to mask it",
            key=f"dropout of {x.dtype.name}",
        )
    with tf.variable_scope(name, default_name="dropout"):
        mask = _random(
            x.mesh, noise_shape, random_values.keep_mask, keep_prob=keep_prob, dtype=x.dtype
        )
        # The mask is 0 or 1 / keep_prob, so one product both drops and scales.
        return x * mask


@leaves_no_node
def sample_with_temperature(
    logits: Tensor,
    dim: Dimension,
    temperature: Union[float, Tensor] = 1.0,
    name: Optional[str] = None,
    seed: Union[int, tf.Tensor, None] = None,
) -> Tensor:
    """Samples indices from the softmax of logits / temperature, with the Gumbel trick.

    >>> logits = mtf.constant(mesh, [0.0, 100.0, 0.0], "vocab:3")
    >>> print(mtf.sample_with_temperature(logits, mtf.Dimension("vocab", 3)).numpy())
    1

    Args:
      logits: a Tensor with dimensions [..., dim, ...].
      dim: the Dimension of the choices.
      temperature: a number; 0.0 for the argmax. Or a scalar Tensor, above 0.
      name: a string or None.
      seed: an int, or an integer tf scalar, as of `random_uniform`; or None.

    Returns:
      An int32 Tensor without `dim`.

    Raises:
      ValueError: the temperature is below 0.
    """
    if is_real(temperature) and temperature < 0.0:
        raise ValueError(
            f"sample_with_temperature: temperature={temperature!r} must be 0.0, for the argmax, or "
            "above: below it, the least likely would be drawn most often"
        )
    # The limit of small temperatures, without the noise, which would be multiplied by 0.
    if not isinstance(temperature, Tensor) and temperature == 0.0:
        return mtf.argmax(logits, dim, name=name)
    tiny = 1e-9  # avoids the logarithm of 0
    u = random_uniform(
        logits.mesh, logits.shape, minval=tiny, maxval=1.0, dtype=tf.float32, seed=seed
    )
    # The argmax of logits plus Gumbel noise is a sample of their softmax: it needs no
    # normalization, and in a layout that splits the choices no more than an argmax does.
    # In float32, also of bfloat16 logits: in that many sums would tie, and argmax takes the first.
    gumbel = mtf.negative(mtf.log(mtf.negative(mtf.log(u))))
    # argmax(logits / t + g) = argmax(logits + t * g), which divides by no small t.
    noisy = mtf.cast(logits, tf.float32) + gumbel * temperature
    return mtf.argmax(noisy, dim, name=name)
