"""Splits attention over a mesh dimension that the layout uses for other tensors only."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Optional

import mesh_tensorflow.ops_with_redefined_builtins as mtf

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = ["maybe_reshape_attention_input_for_2d_sharding", "names_lent", "split_again"]

# By graph: names of the layout that attention was split by, which make them names of the program.
_lent: weakref.WeakKeyDictionary[mtf.Graph, set[str]] = weakref.WeakKeyDictionary()
_Split = tuple[mtf.Dimension, list[mtf.Dimension]]


def _parts(layout: mtf.LayoutRules, mesh_shape: mtf.Shape, dim: mtf.Dimension) -> int:
    axis = layout.tensor_dimension_to_mesh_axis(dim, mesh_shape)
    return 1 if axis is None else mesh_shape[axis].size


def _idle_names(
    layout: mtf.LayoutRules, mesh_shape: mtf.Shape, dims: Iterable[mtf.Dimension]
) -> Iterable[tuple[str, int]]:
    """Yields (name of a tensor dimension, number of slices) for each unused mesh dimension."""
    dims = list(dims)
    names = {d.name for d in dims}
    used = {layout.tensor_dimension_to_mesh_axis(d, mesh_shape) for d in dims}
    for axis, mesh_dim in enumerate(mesh_shape.dims):
        if axis in used or mesh_dim.size == 1:
            continue
        # Sorted, since the order of a set varies and equal programs should make equal graphs.
        rules = layout.mesh_dimension_name_to_tensor_dimension_names(mesh_dim.name)
        for name in sorted(set(rules) - names)[:1]:
            yield name, mesh_dim.size


def find_split(
    context: Context, tensors: Sequence[mtf.Tensor], unsplittable_dims: Sequence[mtf.Dimension]
) -> Optional[_Split]:
    """Returns a dimension of all tensors and the two dimensions that replace it, or None.

    Args:
      context: a Context or None.
      tensors: Tensors, the first two of which are queries and keys.
      unsplittable_dims: Dimensions that are not split.
    """
    model: Any = getattr(context, "model", None)
    if getattr(model, "layout", None) is None or getattr(model, "mesh_shape", None) is None:
        return None
    layout = mtf.convert_to_layout_rules(model.layout)
    mesh_shape: Any = mtf.convert_to_shape(model.mesh_shape)
    q, k = tensors[:2]
    dims = [d for t in tensors for d in t.shape]
    for name, parts in _idle_names(layout, mesh_shape, dims):
        for dim in q.shape:
            if dim not in k.shape or dim in unsplittable_dims:
                continue
            outer = _parts(layout, mesh_shape, dim)
            if dim.size % (outer * parts) == 0:
                inner = mtf.Dimension(name, dim.size // outer)
                _lent.setdefault(q.graph, set()).add(name)
                return dim, [mtf.Dimension(dim.name, outer), inner]
    return None


def names_lent(graph: mtf.Graph) -> set[str]:
    """Returns the names of a layout that attention in a graph was split by."""
    return set(_lent.get(graph, ()))


def split_again(x: Optional[mtf.Tensor], split: Optional[_Split]) -> Optional[mtf.Tensor]:
    """Returns `x` with the dimension of a split replaced, if it has that dimension."""
    if x is None or split is None or split[0] not in x.shape:
        return x
    return mtf.replace_dimensions(x, *split)


def maybe_reshape_attention_input_for_2d_sharding(
    context: Context,
    q: mtf.Tensor,
    k: mtf.Tensor,
    v: mtf.Tensor,
    bias: Optional[mtf.Tensor],
    unsplittable_dims: Sequence[mtf.Dimension],
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor, Optional[mtf.Tensor]]:
    """Splits attention over a mesh dimension by which the layout splits other tensors only.

    With the layout "batch:x,d_ff:y" all processors along y would repeat the same work. So the first
    dimension that queries and keys share and that is divisible, usually the batch, becomes two, the
    second of which has a name that the layout splits over y. Results are the same.

    Args:
      context: a Context, whose model knows its layout and mesh shape; or None.
      q: a Tensor with dimensions [batch..., length, heads..., d_kv].
      k: a Tensor with dimensions [batch..., memory_length, heads..., d_kv].
      v: a Tensor with dimensions [batch..., memory_length, heads..., d_kv].
      bias: a Tensor or None.
      unsplittable_dims: Dimensions that are not replaced.

    Returns:
      A tuple (q, k, v, bias), reshaped or unchanged.
    """
    split = find_split(context, [q, k, v], unsplittable_dims)
    return tuple(split_again(x, split) for x in (q, k, v, bias))  # type: ignore[return-value]
