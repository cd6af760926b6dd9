"""Masks and relative position biases of self-attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.layers._attention import masks
from mesh_tensorflow.layers._attention.visibility import Buckets
from mesh_tensorflow.transformer import attention
from mesh_tensorflow.transformer.attention import _all_to_all
from mesh_tensorflow.transformer.transformer_layers._attention import relative as _relative

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context
    from mesh_tensorflow.transformer.transformer_layers._attention.self_attention import (
        SelfAttention,
    )

__all__ = ["query_position", "self_attention_bias"]


def query_position(context: Context) -> mtf.Tensor:
    """Returns the positions of queries."""
    if context.position is None:
        return mtf.range(context.mesh, context.length_dim, tf.int32)
    return context.position


def _all_of(conditions: Sequence[mtf.Tensor]) -> Optional[mtf.Tensor]:
    found = None
    for condition in conditions:
        found = condition if found is None else mtf.logical_and(found, condition)
    return found


def _conditions(
    layer: SelfAttention, context: Context, memory_position: mtf.Tensor
) -> list[tuple[str, Any, mtf.Tensor]]:
    """Returns what has to be true of ids of queries and of the memory where attention is seen."""
    found: list[tuple[str, Any, mtf.Tensor]] = []
    here = query_position(context)
    smallest, largest = layer.min_relative_position(context), layer.max_relative_position(context)
    if smallest is not None:
        found.append(("less_equal", here + smallest, memory_position))
    if largest is not None:
        found.append(("greater_equal", here + largest, memory_position))
    if context.write_priority is not None:
        written = layer.rename_length_to_memory_length(context.write_priority, context)
        found.append(("greater_equal", context.read_priority, written))
    sequence_id = context.sequence_id if context.subsequence_id is None else context.subsequence_id
    if isinstance(sequence_id, mtf.Tensor) and context.length_dim in sequence_id.shape:
        memory = layer.rename_length_to_memory_length(sequence_id, context)
        found.append(("equal", sequence_id, memory))
    return found


def _hidden(
    layer: SelfAttention,
    context: Context,
    relative_position: mtf.Tensor,
    memory_position: mtf.Tensor,
    num_prompts: int,
) -> Optional[mtf.Tensor]:
    """Returns the mask: -1e9 where attention is masked, 0 elsewhere; None if nothing is."""
    conditions: list[mtf.Tensor] = []
    smallest, largest = layer.min_relative_position(context), layer.max_relative_position(context)
    if smallest is not None:
        conditions.append(mtf.greater_equal(relative_position, smallest))
    if largest is not None:
        conditions.append(mtf.less_equal(relative_position, largest))
    ids = _conditions(layer, context, memory_position)
    # The first ones are those of relative positions, which are there already, and with the
    # prompts subtracted.
    conditions += [masks.COMPARISONS[name](x, y) for name, x, y in ids[len(conditions) :]]
    visible = _all_of(conditions)
    if visible is None:
        return None
    hidden = attention.visibility_mask_to_attention_bias(visible, context.activation_dtype)
    if num_prompts:
        return mtf.pad(hidden, [num_prompts, 0], layer.memory_length(context).name)
    return masks.made_of(hidden, ids)


def _distances(
    layer: SelfAttention,
    context: Context,
    here: mtf.Tensor,
    there: mtf.Tensor,
    heads_dims: list[mtf.Dimension],
    q: Optional[mtf.Tensor],
) -> Optional[masks.Distances]:
    """Returns what the bias of relative positions is made of; None without relative attention."""
    kind = layer.relative_attention_type
    if kind is None:
        return None
    buckets_dim = mtf.Dimension("buckets", layer.relative_attention_num_buckets)
    if kind == "contextual":
        assert q is not None
        values = layers.dense(
            q,
            buckets_dim,
            reduced_dims=[layer.kv_dim],
            expert_dims=[*context.model.ensemble_dims, *heads_dims],
            use_bias=False,
            variable_dtype=context.variable_dtype,
            name="relative_attention_ak",
        )
    else:
        bounds = (layer.min_relative_position(context), layer.max_relative_position(context))
        values = _relative.shared_bias_values(
            context,
            "relative_attention_bias",
            heads_dims,
            buckets_dim,
            ("self_attention_bias", *bounds, tuple(heads_dims)) if kind == "bias_shared" else None,
        )
    both = not context.model.fully_autoregressive
    buckets = Buckets(buckets_dim.size, both, _relative.MAX_DISTANCE)
    values = _all_to_all.matched(values, context)
    return masks.Distances(buckets, values, buckets_dim, here, there)


# In rings, a bias that depends on the query has the length and the memory.
_NOT_IN_RINGS = {"contextual": "'bias_shared' or 'bias'"}


def self_attention_bias(
    layer: SelfAttention,
    context: Context,
    memory_position: mtf.Tensor,
    x: mtf.Tensor,
    heads_dims: list[mtf.Dimension],
    q: Optional[mtf.Tensor],
    with_prompts: bool,
) -> Optional[mtf.Tensor]:
    """Returns the attention bias; see `SelfAttention.compute_bias`."""
    memory_length = memory_position.shape.dims[-1]
    num_prompts = memory_length.size - context.length_dim.size if with_prompts else 0
    here = query_position(context)
    if _relative.in_ring(layer, context, _NOT_IN_RINGS) and not num_prompts:
        visible = _conditions(layer, context, memory_position)
        far = _distances(layer, context, here, memory_position, heads_dims, q)
        distances = [] if far is None else [far]
        if not visible and not distances:
            return None
        return masks.stand_in(context.mesh, visible, context.activation_dtype, distances)
    there = memory_position - num_prompts if num_prompts else memory_position
    relative_position = there - here
    hidden = _hidden(layer, context, relative_position, memory_position, num_prompts)
    far = _distances(layer, context, here, there, heads_dims, q)
    if far is None:
        return hidden
    near = masks.of_buckets(
        far.values, masks.bucketed(relative_position, far.buckets), far.buckets_dim, memory_length
    )
    # Values that depend on the query have the size of the bias.
    by_distance = layer.relative_attention_type != "contextual"
    distances = [far] if by_distance else []
    rest = None if by_distance else near
    if hidden is None:
        return masks.made_of(near, (), rest, distances) if by_distance else near
    order = [*x.shape.dims[:-1], *heads_dims, memory_length]
    known = [d for d in order if d in near.shape or d in hidden.shape]
    others = [d for d in near.shape.dims + hidden.shape.dims if d not in known]
    bias = mtf.add(near, hidden, output_shape=mtf.Shape([*dict.fromkeys(others), *known]))
    if hidden.made_of is None:
        return masks.made_of(bias, (), hidden, distances) if by_distance else bias
    return masks.made_of(bias, hidden.made_of.visible, rest, distances)
