"""Weights of a model's attention layers, and relative position biases."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, Optional

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.layers import _masks
from mesh_tensorflow.layers._visibility import Buckets
from mesh_tensorflow.transformer import attention

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context


# All larger distances share one bucket.
MAX_DISTANCE = 128


def check_type(
    what: str, relative_attention_type: Optional[str], kinds: tuple[Optional[str], ...]
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


def bucket_values(
    values: mtf.Tensor, buckets: mtf.Tensor, buckets_dim: mtf.Dimension, memory_dim: mtf.Dimension
) -> mtf.Tensor:
    """Looks up the values of buckets.

    Args:
      values: a Tensor with dimensions [..., heads..., buckets_dim].
      buckets: an integer Tensor with the dimension `memory_dim`.
      buckets_dim: a Dimension.
      memory_dim: a Dimension.

    Returns:
      A Tensor whose dimensions are those of both, `memory_dim` last.
    """
    return _masks.of_buckets(values, buckets, buckets_dim, memory_dim)


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
