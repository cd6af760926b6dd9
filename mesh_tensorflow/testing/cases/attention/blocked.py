"""Attention by blocks, whose sizes do not divide the lengths."""

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.cases.attention.layers import attend, causal, hide
from mesh_tensorflow.testing.cases.table import FLOATS, case

__all__ = ["CASES"]


def _blocked(q, k, v, bias=None, **kwargs):
    memory = next(d for d in k.shape if d.name == "memory")
    return mtf.layers.blocked_attention(
        q, k, v, memory, k.shape.dims[-1], v.shape.dims[-1], bias, **kwargs
    )


def _positions(q, k):
    return [mtf.range(q.mesh, d, tf.int32) for x in (q, k) for d in x.shape if d.name in _LENGTHS]


_LENGTHS = ("length", "memory")


def _ring(q, k, v, bias, ids, memory_ids):
    """Causal attention within segments, whose memory is passed around."""
    visible = [("greater_equal", *_positions(q, k)), ("equal", ids, memory_ids)]
    return _blocked(q, k, v, bias, visible=visible, block_sizes=(3, 4), extra_logit=0.5, ring=True)


def _ring_expected(q, k, v, bias, ids, memory_ids):
    hidden = hide(ids[:, None, :, None] != memory_ids[:, None, None])
    return attend(q, k, v, bias[:, :, None] + hidden + causal(8), extra=0.5)


def _causal_with_bias(q, k, v, bias):
    seen = ("greater_equal", *_positions(q, k))
    return _blocked(q, k, v, bias, visible=[seen], block_sizes=(3, 4))


def _one_head_of_keys(q, k, v, bias, ids, memory_ids):
    return _blocked(
        q, k, v, bias, visible=[("equal", ids, memory_ids)], extra_logit=0.5, block_sizes=(4, 8)
    )


def _one_head_expected(q, k, v, bias, ids, memory_ids):
    q, bias = np.moveaxis(q, 2, 1), bias[:, :, None]
    hidden = hide(ids[:, None, :, None] != memory_ids[:, None, None])
    y = attend(q, k[:, None], v[:, None], bias + hidden, extra=0.5)
    return np.moveaxis(y, 1, 2)


CASES = [
    case("attention_blocked_causal",
         "batch:4 heads:4 length:8 k, batch:4 heads:4 memory:8 k, batch:4 heads:4 memory:8 channels:2, "
         "heads:4 length:8 memory:8", _causal_with_bias,
         lambda q, k, v, b: attend(q, k, v, b + causal(8)), dtypes=FLOATS),
    case("attention_ring",
         "batch:4 heads:4 length:8 k, batch:4 heads:4 memory:8 k, batch:4 heads:4 memory:8 channels:2, "
         "batch:4 heads:4 memory:8, batch:4 length:8/below2, batch:4 memory:8/below2",
         _ring, _ring_expected, dtypes=FLOATS, alike=[("length", "memory")]),
    case("attention_blocked_one_head_of_keys",
         "batch:4 length:8 heads:4 k, batch:4 memory:16 k, batch:4 memory:16 channels:4, "
         "batch:4 heads:4 memory:16, batch:4 length:8/below2, batch:4 memory:16/below2",
         _one_head_of_keys, _one_head_expected),
]  # fmt: skip
