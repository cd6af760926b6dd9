"""Attention of one position in incremental decoding, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow.layers._attention.attention import (
    dot_product_attention,
    multihead_attention_vars,
    project,
)
from mesh_tensorflow.layers._attention.masks import hidden_where

__all__ = [
    "masked_local_attention_1d_incremental",
    "multihead_encdec_attention_incremental",
    "multihead_self_attention_incremental",
]


def _check_state(what: str, query: mtf.Tensor, prev_k: mtf.Tensor, prev_v: mtf.Tensor) -> None:
    batch = query.shape.dims[:-1]
    for t in (prev_k, prev_v):
        if len(t.shape) < 3 or set(t.shape.dims[:-3]) != set(batch) or t.shape != prev_k.shape:
            raise ValueError(
                f"{what}: keys {prev_k.shape} and values {prev_v.shape} must both be "
                f"[{dims_text(batch)}, heads, memory_length, kv], with the batch dimensions of the "
                f"query {query.name} {query.shape}"
            )


def _as_step(mesh: mtf.Mesh, step_num: Union[int, mtf.Tensor]) -> mtf.Tensor:
    if isinstance(step_num, mtf.Tensor):
        return step_num
    return mtf.constant(mesh, step_num, dtype=tf.int32)


def _placed(new: mtf.Tensor, here: mtf.Tensor, state: mtf.Tensor) -> mtf.Tensor:
    """Returns keys or values of one position at its index in the cache, and 0 elsewhere."""
    return mtf.multiply(new, here, output_shape=state.shape)


@leaves_no_node
def multihead_self_attention_incremental(
    query_antecedent: mtf.Tensor,
    prev_k: mtf.Tensor,
    prev_v: mtf.Tensor,
    step_num: Union[int, mtf.Tensor],
    master_dtype: tf.DType,
    slice_dtype: tf.DType,
    name: Optional[str] = "multihead_attention",
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
    """Attends from one position to itself and to the positions before it.

    >>> x = mtf.ones(mesh, "batch:2,d_model:8")
    >>> memory = mtf.zeros(mesh, "batch:2,heads:2,memory_length:5,kv:4")
    >>> step = mtf.constant(mesh, 0, dtype=tf.int32)
    >>> f32 = tf.float32
    >>> y, k, v = mtf.layers.multihead_self_attention_incremental(x, memory, memory, step, f32, f32)
    >>> print(y.shape, k.shape == memory.shape)
    Shape[batch=2, d_model=8] True

    Args:
      query_antecedent: a Tensor with dimensions [batch..., io].
      prev_k: cached keys, a Tensor with dimensions [batch..., heads, memory_length, kv] that is 0
        from the current position on.
      prev_v: cached values, a Tensor of the same shape.
      step_num: the current position, an int32 Tensor or a number.
      master_dtype: a dtype.
      slice_dtype: a dtype.
      name: a string, the variable scope; variables are those of `multihead_attention`.

    Returns:
      A tuple (y, k, v): a Tensor of the shape of `query_antecedent`, and the cached keys and
      values, extended by those of the current position.

    Raises:
      ValueError: the shapes do not match.
    """
    x = query_antecedent
    _check_state("multihead_self_attention_incremental", x, prev_k, prev_v)
    heads, memory_length, kv_channels = prev_k.shape.dims[-3:]
    with tf.variable_scope(name, default_name="multihead_attention"):
        wq, wk, wv, wo = multihead_attention_vars(
            x.mesh, heads, x.shape.dims[-1], kv_channels, master_dtype, slice_dtype, x.dtype
        )
        step = _as_step(x.mesh, step_num)
        here = mtf.one_hot(step, memory_length, dtype=x.dtype)

        def written(previous: mtf.Tensor, w: mtf.Tensor) -> mtf.Tensor:
            # An addition to zeros instead of an assignment: the cache is a loop variable that a
            # layout may split, also along the memory.
            return previous + _placed(project(x, w, heads, kv_channels, 0), here, previous)

        q = project(x, wq, heads, kv_channels, 0)
        k, v = written(prev_k, wk), written(prev_v, wv)
        later = mtf.less(step, mtf.range(x.mesh, memory_length, tf.int32))
        o = dot_product_attention(q, k, v, hidden_where(later, x.dtype), False)
        return mtf.einsum([o, wo], output_shape=x.shape), k, v


@leaves_no_node
def multihead_encdec_attention_incremental(
    query_antecedent: mtf.Tensor,
    wq: mtf.Tensor,
    wo: mtf.Tensor,
    k: mtf.Tensor,
    v: mtf.Tensor,
    mask: Optional[mtf.Tensor],
    name: Optional[str] = "multihead_attention",
) -> mtf.Tensor:
    """Attends from one position to the keys and values of an encoder.

    >>> x = mtf.ones(mesh, "batch:2,d_model:8")
    >>> wq = wo = mtf.ones(mesh, "heads:2,d_model:8,kv:4")
    >>> k = v = mtf.ones(mesh, "batch:2,heads:2,memory_length:5,kv:4")
    >>> mask = mtf.zeros(mesh, "batch:2,memory_length:5")
    >>> print(mtf.layers.multihead_encdec_attention_incremental(x, wq, wo, k, v, mask).shape)
    Shape[batch=2, d_model=8]

    Args:
      query_antecedent: a Tensor with dimensions [batch..., io].
      wq: a Tensor of shape [heads, io, kv], the first of `multihead_attention_params`.
      wo: a Tensor of shape [heads, io, kv], the last of them.
      k: keys, a Tensor with dimensions [..., heads, memory_length, kv].
      v: values, a Tensor of the same shape.
      mask: a Tensor that is added to the logits [batch..., heads, memory_length], or None.
      name: a string, the variable scope.

    Returns:
      A Tensor of the shape of `query_antecedent`.

    Raises:
      ValueError: the dimensions do not match.
    """
    x = query_antecedent
    if len(k.shape) < 3 or set(wq.shape) != {k.shape.dims[-3], x.shape.dims[-1], k.shape.dims[-1]}:
        raise ValueError(
            f"multihead_encdec_attention_incremental: keys {k.shape} must be [..., heads, "
            f"memory_length, kv], the query {x.shape} [..., io], and the weights {wq.shape} "
            "[heads, io, kv]"
        )
    with tf.variable_scope(name, default_name="multihead_attention"):
        q = project(x, wq, k.shape.dims[-3], k.shape.dims[-1], 0)
        o = dot_product_attention(q, k, v, mask, False)
        return mtf.einsum([o, wo], output_shape=x.shape)


@leaves_no_node
def masked_local_attention_1d_incremental(
    x: mtf.Tensor,
    prev_k: mtf.Tensor,
    prev_v: mtf.Tensor,
    step_num: Union[int, mtf.Tensor],
    master_dtype: Optional[tf.DType] = None,
    slice_dtype: Optional[tf.DType] = None,
    params: Optional[Sequence[mtf.Tensor]] = None,
    name: Optional[str] = None,
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
    """Attends from one position to itself and to a window of positions before it.

    Keys and values of the window are cached in a ring buffer, in which the current position
    overwrites the one that leaves the window. Unused entries count as positions with keys and
    values 0, as in `masked_local_attention_1d`; the results agree if its window size equals its
    block length.

    >>> x = mtf.ones(mesh, "batch:2,d_model:8")
    >>> memory = mtf.zeros(mesh, "batch:2,heads:2,memory_length:4,kv:4")
    >>> step = mtf.constant(mesh, 0, dtype=tf.int32)
    >>> f32 = tf.float32
    >>> attend = mtf.layers.masked_local_attention_1d_incremental
    >>> y, k, v = attend(x, memory, memory, step, f32, f32)
    >>> print(y.shape)
    Shape[batch=2, d_model=8]

    Args:
      x: a Tensor with dimensions [batch..., io].
      prev_k: cached keys, a Tensor with dimensions [batch..., heads, window, kv], initially 0.
      prev_v: cached values, a Tensor of the same shape.
      step_num: the current position, an int32 Tensor or a number.
      master_dtype: a dtype; float32 if None.
      slice_dtype: a dtype; `master_dtype` if None.
      params: four weights as returned by `multihead_attention_params`; variables if None.
      name: a string, the variable scope; "masked_local_attention_1d" if None.

    Returns:
      A tuple (y, k, v): a Tensor of the shape of `x`, and the updated keys and values.

    Raises:
      ValueError: the shapes do not match.
    """
    _check_state("masked_local_attention_1d_incremental", x, prev_k, prev_v)
    heads, window, kv_channels = prev_k.shape.dims[-3:]
    with tf.variable_scope(name, default_name="masked_local_attention_1d"):
        wq, wk, wv, wo = params or multihead_attention_vars(
            x.mesh, heads, x.shape.dims[-1], kv_channels, master_dtype, slice_dtype, x.dtype
        )
        # The order of entries does not matter to attention without positions, so the oldest is
        # replaced where it lies.
        here = mtf.one_hot(mtf.mod(_as_step(x.mesh, step_num), window.size), window, dtype=x.dtype)

        def replaced(previous: mtf.Tensor, w: mtf.Tensor) -> mtf.Tensor:
            new = _placed(project(x, w, heads, kv_channels, 0), here, previous)
            return previous * (1.0 - here) + new

        k, v = replaced(prev_k, wk), replaced(prev_v, wv)
        q = project(x, wq, heads, kv_channels, 0)
        o = dot_product_attention(q, k, v, None, False)
        return mtf.einsum([o, wo], output_shape=x.shape), k, v
