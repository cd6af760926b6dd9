"""What attention layers share: weights, biases of relative positions, states of decoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Optional

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.layers import _masks
from mesh_tensorflow.layers._masks import Buckets
from mesh_tensorflow.ops._movement.gather import write_at
from mesh_tensorflow.transformer import attention
from mesh_tensorflow.transformer.transformer._context import Context, memory_length_of

# -- weights, and biases of relative positions


# All larger distances share one bucket.
MAX_DISTANCE = 128


def check_type(
    what: str, relative_attention_type: Optional[str], kinds: Sequence[Optional[str]]
) -> None:
    """Checks that a type of relative attention is supported.

    Raises:
      ValueError: it is not.
    """
    if relative_attention_type not in kinds:
        raise ValueError(
            f'{what}: unrecognized relative_attention_type "{relative_attention_type}"; it is one '
            f"of {', '.join(map(str, kinds))}"
        )


def in_ring(layer: Any, context: Context, instead: Mapping[str, str]) -> bool:
    """Returns whether parts of keys and values may be passed around.

    Then no Tensor may have the length of queries and that of the memory.

    Args:
      layer: a layer.
      context: the Context of this call of the model: its mode, positions, states and losses.
      instead: the types of relative attention whose biases have both, and what to use instead.

    Raises:
      ValueError: the layer has such a bias.
    """
    kwargs = getattr(layer, "attention_kwargs", {})  # layers of other kinds have none
    # A step has one query: no parts of queries wait for parts of the memory to come around.
    if not kwargs.get("ring") or context.mode == "incremental":
        return False
    kind = layer.relative_attention_type
    if kind in instead:
        raise ValueError(
            f"{type(layer).__name__}: relative_attention_type={kind!r} makes a bias of "
            f"{context.length_dim.name} times memory_length, and ring={kwargs['ring']!r} is for "
            f"lengths that are too long for it. Use relative_attention_type={instead[kind]}, or "
            "leave ring out of attention_kwargs"
        )
    return True


def relative_position_bucket(
    relative_position: mtf.Tensor,
    bidirectional: bool = True,
    num_buckets: int = 32,
    max_distance: int = MAX_DISTANCE,
) -> mtf.Tensor:
    """Returns the bucket of each relative position.

    Half of the buckets hold one distance each; the sizes of the others grow logarithmically up to
    `max_distance`. If `bidirectional`, each direction has half of all buckets; otherwise memory
    positions after the query share the bucket of distance 0.

    Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text
    transformer" (2020), section 2.1.

    Args:
      relative_position: an int32 Tensor, position in the memory minus that of the query.
      bidirectional: a bool.
      num_buckets: an integer.
      max_distance: an integer.

    Returns:
      An int32 Tensor of the shape of `relative_position`, from 0 to `num_buckets` - 1.
    """
    return _masks.bucketed(relative_position, Buckets(num_buckets, bidirectional, max_distance))


def shared_bias_values(
    context: Context,
    name: str,
    heads_dims: list[mtf.Dimension],
    buckets_dim: mtf.Dimension,
    cache_key: Optional[Hashable],
) -> mtf.Tensor:
    """Returns the variable that holds a bias for each head and bucket.

    Args:
      context: the Context of this call of the model: its mode, positions, states and losses.
      name: a string.
      heads_dims: a list of Dimensions.
      buckets_dim: a Dimension.
      cache_key: a key under which layers share the variable in `context.cache`; None if it is not
        shared.
    """
    # The variable has the scope of the first layer that asks for it; later ones find it here.
    if cache_key is not None and cache_key in context.cache:
        return context.cache[cache_key]
    values = mtf.get_variable(
        context.mesh,
        name,
        mtf.Shape([*context.model.ensemble_dims, *heads_dims, buckets_dim]),
        dtype=context.variable_dtype,
    )
    if cache_key is not None:
        context.cache[cache_key] = values
    return values


def alibi(
    context: Context,
    heads_dims: list[mtf.Dimension],
    here: mtf.Tensor,
    there: mtf.Tensor,
    both: bool,
) -> _masks.Distances:
    """Returns the bias of minus the distance, times a slope for each head.

    Press et al., "Train short, test long: attention with linear biases" (2022).

    Args:
      context: the Context of this call of the model: its mode, positions, states and losses.
      heads_dims: the Dimensions of heads.
      here: the positions of queries, an int32 Tensor.
      there: those of the memory.
      both: whether queries see later positions.
    """
    # A bucket for each distance, so that it is a bias of buckets as others are.
    length = there.shape.dims[-1].size
    buckets_dim = mtf.Dimension("buckets", 2 * length if both else length)
    distance = np.arange(buckets_dim.size) % length
    sizes = [d.size for d in heads_dims]
    values = -np.multiply.outer(_slopes(math.prod(sizes)).reshape(sizes), distance)
    shape = mtf.Shape([*heads_dims, buckets_dim])
    slopes = mtf.constant(context.mesh, values.astype(np.float32), shape, tf.float32)
    return _masks.Distances(Buckets(buckets_dim.size, both, 0), slopes, buckets_dim, here, there)


def _slopes(heads: int) -> np.ndarray:
    # 2^(-8 i / n) for i = 1..n, where n is a power of 2; other numbers of heads have those of the
    # next smaller power, and then every second one of twice as many.
    n = 2 ** int(math.log2(heads))
    first = 2.0 ** (-8.0 / n * np.arange(1, n + 1))
    between = 2.0 ** (-4.0 / n * np.arange(1, 2 * n, 2))
    return np.concatenate([first, between[: heads - n]])


def params_arguments(
    context: Context, kv_dim: mtf.Dimension, num_heads: int, num_memory_heads: int = 0
) -> dict[str, Any]:
    """Returns the dimensions of attention weights, as arguments of `AttentionParams`.

    Args:
      context: the Context of this call of the model: its mode, positions, states and losses.
      kv_dim: a Dimension.
      num_heads: an integer.
      num_memory_heads: how many heads keys and values have, a divisor of `num_heads`; if 0, as many
        as `num_heads`.

    Raises:
      ValueError: `num_memory_heads` does not divide `num_heads`.
    """
    if num_memory_heads and num_heads % num_memory_heads:
        raise ValueError(
            f"attention: num_memory_heads={num_memory_heads} must divide num_heads={num_heads}, so "
            "that as many queries share each head of the memory"
        )
    if not num_memory_heads:
        query = memory = [mtf.Dimension("heads", num_heads)]
    elif num_memory_heads == 1:
        # One head for all queries (Shazeer, "Fast transformer decoding", 2019).
        query, memory = [mtf.Dimension("heads", num_heads)], []
    else:
        # Queries of one memory head are a dimension of their own, which keys and values lack, so
        # nothing has to be repeated (Ainslie et al., "GQA", 2023).
        memory = [mtf.Dimension("heads", num_memory_heads)]
        query = [*memory, mtf.Dimension("query_heads", num_heads // num_memory_heads)]
    model_dim = context.model.model_dim
    return {
        "query_input_dim": model_dim,
        "memory_input_dim": model_dim,
        "output_dim": model_dim,
        "key_dim": kv_dim,
        "value_dim": kv_dim,
        "query_heads_dims": query,
        "memory_heads_dims": memory,
        "variable_dtype": context.variable_dtype,
        "ensemble_dim": context.model.ensemble_dim,
    }


def attention_params(
    context: Context,
    kv_dim: mtf.Dimension,
    num_heads: int,
    num_memory_heads: int = 0,
    shared_kv: bool = False,
    no_query: bool = False,
    combine_dims: bool = True,
    keep_query_heads_dims: bool = False,
    fold_scaling_into_initializer: bool = True,
) -> attention.AttentionParams:
    """Returns the weights of an attention layer.

    Args:
      context: the Context of this call of the model: its mode, positions, states and losses.
      kv_dim: a Dimension, of queries, keys and values.
      num_heads: an integer.
      num_memory_heads: how many heads keys and values have, a divisor of `num_heads`; 1 for
        multi-query attention (Shazeer, "Fast transformer decoding", 2019), 0 for `num_heads`.
      shared_kv: whether values are the keys.
      no_query: whether there are no queries.
      combine_dims: whether heads and channels are one dimension of the weights.
      keep_query_heads_dims: whether the output keeps its heads.
      fold_scaling_into_initializer: whether initial values, rather than queries, are scaled.

    Raises:
      ValueError: `num_memory_heads` does not divide `num_heads`, or the options do not fit.
    """
    return attention.AttentionParams(
        context.mesh,
        **params_arguments(context, kv_dim, num_heads, num_memory_heads),
        shared_kv=shared_kv,
        no_query=no_query,
        combine_dims=combine_dims,
        keep_query_heads_dims=keep_query_heads_dims,
        fold_scaling_into_initializer=fold_scaling_into_initializer,
    )


# -- states of decoding


def next_to_channels(x: mtf.Tensor, length_dim: mtf.Dimension) -> mtf.Tensor:
    """Transposes keys or values so that length and channels come last, in this order.

    Attention is then one matrix product for each head.

    Args:
      x: a Tensor with dimensions [batch..., length_dim, heads..., channels].
      length_dim: a Dimension.
    """
    *front, channels = [d for d in x.shape if d != length_dim]
    ordered = [*front, length_dim, channels]
    return x if x.shape.dims == ordered else mtf.transpose(x, mtf.Shape(ordered))


def updated_states(
    context: Context,
    new: Sequence[mtf.Tensor],
    dim: mtf.Dimension,
    position: Optional[mtf.Tensor] = None,
) -> list[mtf.Tensor]:
    """Writes the current position into the next states, and records them.

    Args:
      context: a Context in mode "incremental".
      new: Tensors, without `dim`.
      dim: a Dimension of the states.
      position: where to write; the Context's position if None.

    Returns:
      A list of Tensors, the new states.
    """
    # A window of the last positions would be overwritten too early by several new ones.
    several = "states_of_positions" if position is None else "get_states"
    position = context.position if position is None else position
    assert position is not None
    old = getattr(context, several, context.get_states)(len(new))  # a user's context has the latter
    # Written before attention reads them, since a position also sees itself.
    states = [write_at(state, x, position, dim) for state, x in zip(old, new, strict=True)]
    context.record_new_states(states)
    return states


def states_so_far(
    context: Context,
    new: list[mtf.Tensor],
    dim: mtf.Dimension,
    keep: Optional[Callable[[mtf.Tensor, mtf.Dimension], mtf.Tensor]] = None,
) -> list[mtf.Tensor]:
    """Returns states of all positions so far, and records them when decoding.

    Args:
      context: the Context of this call of the model: its mode, positions, states and losses.
      new: Tensors of all positions; in mode "incremental" of one, without `dim`.
      dim: the Dimension of positions.
      keep: a function of a Tensor and `dim` that returns the form in which the first part stores
        it; None to store it as it is.
    """
    if context.mode == "incremental":
        return updated_states(context, new, dim)
    if context.mode == "first_part":
        states_kept = new if keep is None else [keep(x, dim) for x in new]
        length = getattr(context, "states_length", None)  # which a user's context may lack
        if length is not None:
            missing = length - context.length_dim.size
            states_kept = [mtf.pad(x, [0, missing], dim.name) for x in states_kept]
        context.record_new_states(states_kept)
    return new


def constant_states(
    context: Context,
    memory: Callable[[Any], mtf.Tensor],
    make: Callable[[mtf.Tensor], Sequence[mtf.Tensor]],
    keep: Optional[Callable[[mtf.Tensor, mtf.Dimension], mtf.Tensor]] = None,
) -> tuple[Any, ...]:
    """Returns a projection of the encoder's output; incremental decoding reuses the first part's.

    Args:
      context: a Context of a decoder.
      memory: a function of the Context that returns the encoder's output, a Tensor with
        dimensions [batch..., memory_length, d_model]; not called in mode "incremental".
      make: a function of the encoder's output that returns Tensors.
      keep: a function of one of these Tensors and the Dimension memory_length that returns the form
        in which it is stored; None to store it as it is.

    Returns:
      A tuple of the Tensors, and the Dimension of the memory's positions.
    """
    # Before anything else is called: its operations would be in the loop, and run in each step.
    if context.mode == "incremental":
        return context.get_constant_state()
    encoded = memory(context)
    states, memory_length = make(encoded), memory_length_of(encoded)
    if context.mode == "first_part":
        # Only what is kept is transposed, as it is read in each step.
        recorded = states if keep is None else [keep(state, memory_length) for state in states]
        context.record_constant_state((*recorded, memory_length))
    return (*states, memory_length)
