"""Self-attention that exchanges positions for heads, so that each processor has all positions.

Jacobs et al., "DeepSpeed Ulysses" (2023): where the length is split, an all-to-all gives each
processor all positions of some heads; after attention another one takes them back.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Optional

import mesh_tensorflow.ops_with_redefined_builtins as mtf

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = ["ALL_TO_ALL", "by_heads", "by_positions", "check_layout", "matched", "of_heads"]

ALL_TO_ALL = "all_to_all"  # the attention_func
_HEADS, _SPLIT_HEADS = "heads", "attention_heads"
_WHOLE_LENGTH = "attention_length"
# What a Context has of each position.
_OF_POSITIONS = ("position", "sequence_id", "subsequence_id", "read_priority", "write_priority")


def _renamed(x: mtf.Tensor, names: dict[str, str]) -> mtf.Tensor:
    dims = [mtf.Dimension(names.get(d.name, d.name), d.size) for d in x.shape.dims]
    return mtf.reshape(x, mtf.Shape(dims))


def by_heads(x: mtf.Tensor, context: Context, length_name: str) -> mtf.Tensor:
    """Exchanges positions for heads: one all-to-all, if both are split.

    Args:
      x: keys or values, with the Context's length.
      context: a Context.
      length_name: what the length is called afterwards, which no rule should split.
    """
    return _renamed(x, {context.length_dim.name: length_name, _HEADS: _SPLIT_HEADS})


def by_positions(x: mtf.Tensor, context: Context) -> mtf.Tensor:
    """Exchanges heads for positions: back from `by_heads`."""
    return _renamed(x, {_WHOLE_LENGTH: context.length_dim.name, _SPLIT_HEADS: _HEADS})


def of_heads(context: Context) -> Context:
    """Returns a Context with the length that attention has, for masks, biases and losses."""
    made = copy.copy(context)
    made.length_dim = mtf.Dimension(_WHOLE_LENGTH, context.length_dim.size)
    made.exchanged_length_dim = context.length_dim
    for name in _OF_POSITIONS:
        value = getattr(context, name, None)
        if isinstance(value, mtf.Tensor):
            setattr(made, name, _renamed(value, {context.length_dim.name: _WHOLE_LENGTH}))
    return made


def matched(x: mtf.Tensor, context: Context) -> mtf.Tensor:
    """Returns `x` with positions exchanged for heads if a Context is one of `of_heads`.

    Variables keep the names of their dimensions, so it is their values that are exchanged.
    """
    length_dim = getattr(context, "exchanged_length_dim", None)  # a user's own class may lack it
    if length_dim is None:
        return x
    return _renamed(x, {length_dim.name: context.length_dim.name, _HEADS: _SPLIT_HEADS})


def check_layout(what: str, context: Context, heads_dim: mtf.Dimension) -> None:
    """Checks that heads can be exchanged for positions, if the model knows its layout.

    Args:
      what: the name of the layer.
      context: a Context.
      heads_dim: the Dimension of heads of queries and, but for a single one, of keys and values.

    Raises:
      ValueError: the length is split and heads are not, or their number is not divisible.
    """
    layout = getattr(context.model, "layout", None)
    mesh_shape: Any = getattr(context.model, "mesh_shape", None)
    if layout is None or mesh_shape is None:
        return
    rules, mesh_shape = mtf.convert_to_layout_rules(layout), mtf.convert_to_shape(mesh_shape)

    def axis(name: str) -> Optional[mtf.Dimension]:
        # Of a size that every mesh dimension divides: what they do not divide is told below.
        dim = mtf.Dimension(name, mesh_shape.size)
        found = rules.tensor_dimension_to_mesh_axis(dim, mesh_shape)
        return None if found is None else mesh_shape[found]

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
