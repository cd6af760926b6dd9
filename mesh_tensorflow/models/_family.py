"""What a family of models is: how its config.json becomes a model, and its weights' two names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.transformer import transformer
from mesh_tensorflow.transformer.transformer import Unitransformer

# By Hugging Face's names of activations: functions of the language, or their names.
ACTIVATIONS: dict[str, Any] = {
    "gelu": functools.partial(mtf.gelu, approximate=False),
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "silu": "silu",
}


class Weight(NamedTuple):
    """A weight, by both names.

    Attributes:
      ours: the name of the variable.
      dims: the names of its dimensions, in the variable's order, as in "d_model heads d_kv".
      theirs: Hugging Face's name. With "{}" in it, there is a tensor for each index of the first
        dimension of `stored`, such as one for each expert.
      stored: the axes of the tensors in the file's order. Dimensions that are one axis there are
        joined by "*", as in "heads*d_kv d_model". Weights that lie behind each other in one tensor
        are in brackets, as in "[heads*d_kv|heads*d_kv|heads*d_kv] d_model", or for each head, as
        in "heads*[d_kv|d_kv|d_kv] d_model".
      part: which of the weights in brackets it is.
    """

    ours: str
    dims: str
    theirs: str
    stored: str
    part: int = 0


def vector(ours: str, theirs: str, dims: str = "d_model") -> Weight:
    """Returns a Weight that files have as one axis: a bias, or the scale of a norm.

    Args:
      ours: the name of the variable.
      theirs: Hugging Face's name.
      dims: the names of its dimensions, joined by "*".
    """
    return Weight(ours, dims.replace("*", " "), theirs, dims)


def kernel(
    ours: str,
    theirs: str,
    inputs: str,
    outputs: Union[str, Sequence[str]],
    part: int = 0,
    transposed: bool = True,
) -> Weight:
    """Returns the Weight of a dense layer.

    Args:
      ours: the name of the variable, [inputs..., outputs...].
      theirs: Hugging Face's name.
      inputs: the names of the input's dimensions, joined by "*".
      outputs: the same of the output; a list, for several layers in one tensor.
      part: which of these it is.
      transposed: whether files have [outputs, inputs], as PyTorch, which computes x W^T.
    """
    several = [outputs] if isinstance(outputs, str) else outputs
    axis = several[0] if len(several) == 1 else f"[{'|'.join(several)}]"
    stored = f"{axis} {inputs}" if transposed else f"{inputs} {axis}"
    return Weight(ours, f"{inputs} {several[part]}".replace("*", " "), theirs, stored, part)


class Form(NamedTuple):
    """A model of a family, as its config.json says.

    Attributes:
      model: a function of a LayoutRules and a mesh Shape that returns the Unitransformer.
      weights: its Weights.
      sizes: the sizes of the dimensions that the Weights name.
      prefix: how Hugging Face's names begin, or do not begin in some folders.
      ignored: a regular expression of names that folders may have beside the weights: masks and
        tables that are computed, and second copies.
    """

    model: Callable[[Any, Any], Unitransformer]
    weights: Sequence[Weight]
    sizes: Mapping[str, int]
    prefix: str = ""
    ignored: str = r"(?!)"


class Config:
    """The fields of a config.json, for a family to read; errors name the file's folder."""

    def __init__(self, path: str, fields: Mapping[str, Any]) -> None:
        self.path = path
        self._fields = dict(fields)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a field, or the default if it is missing or null.

        Args:
          name: its name.
          default: any value.
        """
        value = self._fields.get(name)
        return default if value is None else value

    def number(self, name: str, default: Optional[int] = None) -> int:
        """Returns a field that is a positive integer.

        Args:
          name: its name.
          default: what it is if it is missing; None for an error.

        Raises:
          ValueError: it is missing, or is something else.
        """
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{self.path}: config.json has {name}={value!r}, no positive integer")
        return value

    def activation(self, name: str, default: str) -> Any:
        """Returns the function that a field names, as feed-forward layers take it.

        Args:
          name: the name of the field.
          default: the activation that is meant if it is missing.

        Raises:
          ValueError: it is not known.
        """
        activation = self.get(name, default)
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"{self.path}: config.json has {name}={activation!r}, which is none of "
                f"{', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[activation]

    def must_be(self, name: str, expected: Any) -> None:
        """Checks a field of which the family knows one value.

        Args:
          name: its name.
          expected: the value, which is also meant if the field is missing.

        Raises:
          ValueError: it has another value.
        """
        value = self.get(name, expected)
        if value != expected:
            raise ValueError(
                f"{self.path}: config.json has {name}={value!r}, which is not known for this "
                f"family: only {name}={expected!r} is"
            )


def decoder(
    layers: Sequence[Any],
    blocks: int,
    norm: Callable[..., Any],
    sizes: Mapping[str, int],
    max_length: int,
    tied: bool,
    learned_positions: bool,
    layout: Any,
    mesh_shape: Any,
) -> Unitransformer:
    """Returns a language model whose layers are normalized before, with a residual around each.

    Args:
      layers: those of a block, as `make_layer_stack` takes them.
      blocks: the number of blocks.
      norm: a sublayer.
      sizes: the sizes of dimensions: those of "vocab" and "d_model" are read.
      max_length: how many positions it has.
      tied: whether the logits are of the embedding's variable.
      learned_positions: whether each position has a vector.
      layout: LayoutRules.
      mesh_shape: a Shape.
    """
    around = [norm, transformer.sublayer_call_layer, transformer.sublayer_residual]
    stack = functools.partial(
        transformer.LayerStack,
        sublayers_initial=[],
        sublayers_per_layer=around,
        sublayers_final=[norm],
    )
    return Unitransformer(
        transformer.make_layer_stack(layers=layers, layer_stack_cls=stack, num_layers=blocks),
        d_model=sizes["d_model"],
        input_vocab_size=sizes["vocab"],
        output_vocab_size=sizes["vocab"],
        autoregressive=True,
        max_length=max_length,
        shared_embedding_and_softmax_weights=tied,
        positional_embedding=learned_positions,
        vocab_divisor=1,
        z_loss=0.0,
        vocab_embedding_cls=transformer.UnscaledVocabEmbedding,
        layout=layout,
        mesh_shape=mesh_shape,
    )


_SHOWN = 6


def few(names: Sequence[str]) -> str:
    """Returns the first of some names, and how many more there are.

    Args:
      names: a list of strings.
    """
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
