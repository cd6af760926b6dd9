"""Weights of a model's attention layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.transformer import attention

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = ["attention_params", "params_arguments"]


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
        query, memory = [mtf.Dimension("heads", num_heads)], []
    else:
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
