"""Attention that exchanges positions for heads, so that each processor has all positions.

Jacobs et al., "DeepSpeed Ulysses" (2023): where the length is split, an all-to-all gives each
processor all positions of some heads; after attention another one takes them back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional

import mesh_tensorflow.ops_with_redefined_builtins as mtf

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = [
    "ALL_TO_ALL",
    "by_heads",
    "by_positions",
    "check_layout",
    "check_memory_layout",
    "matched",
    "memory_name",
    "of_heads",
]

ALL_TO_ALL = "all_to_all"  # the attention_func
_HEADS, _SPLIT_HEADS = "heads", "attention_heads"
_WHOLE_LENGTH = "attention_length"
_MEMORY, _WHOLE_MEMORY = "memory_length", "attention_memory_length"
# What a Context has of each position, of the sequence or of the encoder's.
_OF_POSITIONS = (
    *("position", "sequence_id", "subsequence_id", "read_priority", "write_priority"),
    "encoder_sequence_id",
)


def _renamed(x: mtf.Tensor, names: dict[str, str]) -> mtf.Tensor:
    dims = [mtf.Dimension(names.get(d.name, d.name), d.size) for d in x.shape.dims]
    return mtf.reshape(x, mtf.Shape(dims))


def by_heads(x: mtf.Tensor, length_name: str) -> mtf.Tensor:
    """Exchanges positions for heads: one all-to-all, if both are split.

    Args:
      x: keys or values.
      length_name: the name of their positions.
    """
    return _renamed(x, {length_name: _WHOLE_MEMORY, _HEADS: _SPLIT_HEADS})


def memory_name(context: Context) -> str:
    """Returns what the positions of the memory are called in attention."""
    exchanged = getattr(context, "exchanged_length_dim", None)  # a user's own class may lack it
    return _MEMORY if exchanged is None else _WHOLE_MEMORY


def by_positions(x: mtf.Tensor, context: Context) -> mtf.Tensor:
    """Exchanges heads for positions: back from `by_heads`."""
    return _renamed(x, {_WHOLE_LENGTH: context.length_dim.name, _SPLIT_HEADS: _HEADS})


def of_heads(context: Context) -> Context:
    """Returns a Context with the length that attention has, for masks, biases and losses."""
    made = copy.copy(context)
    # The whole length has a name that no rule splits, while heads get one that a rule may split.
    made.length_dim = mtf.Dimension(_WHOLE_LENGTH, context.length_dim.size)
    made.exchanged_length_dim = context.length_dim
    for name in _OF_POSITIONS:
        value = getattr(context, name, None)
        if isinstance(value, mtf.Tensor):
            names = {context.length_dim.name: _WHOLE_LENGTH, _MEMORY: _WHOLE_MEMORY}
            setattr(made, name, _renamed(value, names))
    return made


def matched(x: mtf.Tensor, context: Context) -> mtf.Tensor:
    """Returns `x` with positions exchanged for heads if a Context is one of `of_heads`.

    Variables keep the names of their dimensions, so it is their values that are exchanged.
    """
    length_dim = getattr(context, "exchanged_length_dim", None)  # a user's own class may lack it
    if length_dim is None:
        return x
    return _renamed(x, {length_dim.name: context.length_dim.name, _HEADS: _SPLIT_HEADS})


def _axes(context: Context) -> Optional[Callable[[str], Optional[mtf.Dimension]]]:
    """Returns a function of a name, the mesh dimension that splits it; None if none is known."""
    layout = getattr(context.model, "layout", None)
    mesh_shape: Any = getattr(context.model, "mesh_shape", None)
    if layout is None or mesh_shape is None:
        return None
    rules, mesh_shape = mtf.convert_to_layout_rules(layout), mtf.convert_to_shape(mesh_shape)

    def axis(name: str) -> Optional[mtf.Dimension]:
        # Of a size that every mesh dimension divides: what they do not divide is told elsewhere.
        dim = mtf.Dimension(name, mesh_shape.size)
        found = rules.tensor_dimension_to_mesh_axis(dim, mesh_shape)
        return None if found is None else mesh_shape[found]

    return axis


def check_memory_layout(what: str, context: Context) -> None:
    """Checks that the first part of decoding, which exchanges nothing, has room for its logits.

    Args:
      what: the name of the layer.
      context: the Context of this call of the model: its mode, positions, states and losses.

    Raises:
      ValueError: the length and the memory are split over one mesh dimension.
    """
    axis = _axes(context)
    over = axis and axis(_MEMORY)
    if axis and over and over == axis(context.length_dim.name):
        raise ValueError(
            f"{what}: attention_func={ALL_TO_ALL!r} exchanges nothing in decoding, whose logits "
            f"are {context.length_dim.name} times {_MEMORY}, and the layout splits both over "
            f"{over.name}. Decode with a layout without {_MEMORY}:{over.name}, such as heads:"
            f"{over.name}"
        )


def check_layout(what: str, context: Context, heads_dim: mtf.Dimension) -> None:
    """Checks that heads can be exchanged for positions, if the model knows its layout.

    Args:
      what: the name of the layer.
      context: the Context of this call of the model: its mode, positions, states and losses.
      heads_dim: the Dimension of heads of queries and, but for a single one, of keys and values.

    Raises:
      ValueError: the length is split and heads are not, or their number is not divisible.
    """
    axis = _axes(context)
    if axis is None:
        return
    by_length, by_heads = axis(context.length_dim.name), axis(_SPLIT_HEADS)
    if by_length is not None and by_heads is None:
        raise ValueError(
            f"{what}: attention_func={ALL_TO_ALL!r} exchanges parts of the length, which the "
            f"layout splits over {by_length.name}, for heads, which it does not split; add the "
            f"rule {_SPLIT_HEADS}:{by_length.name}"
        )
    if by_heads is not None and heads_dim.size % by_heads.size:
        raise ValueError(
            f"{what}: attention_func={ALL_TO_ALL!r} splits {_SPLIT_HEADS}={heads_dim.size} over "
            f"{by_heads.name}={by_heads.size}, which does not divide it. Take a multiple of "
            f"{by_heads.size} heads (num_heads, and num_memory_heads if it is above 1), or "
            'attention_kwargs={"ring": True}, for which any number will do'
        )
