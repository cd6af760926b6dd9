"""Cases of attention: as layers, and by blocks."""

import functools

import numpy as np
import tensorflow.compat.v1 as tf
from scipy import special

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.cases.table import FLOATS, case, dim, dims, given

__all__ = ["CASES", "attend", "causal", "hide"]


_LAYERS = mtf.layers
# What masks of the layers add, as a case compares these with `hide`.
_HIDDEN = -1e9
_KV_AND_HEADS = dims("kv:4 heads:4")
_QKVO = "qkvo:4 heads:4 io:8 kv:4"


def _with_weights(weights, fn, *args, **kwargs):
    """Calls a layer with an input of the case in place of its variable, qkvo."""
    # Halved, as logits of larger weights would leave a softmax with one position and no slope.
    return given(lambda: fn(*args, **kwargs), qkvo=weights * 0.5)


# -- in NumPy; positions are the last axis but one, and weights are [heads, io, kv]


def _softmax(x, extra=-np.inf):
    # The extra logit is one more term of the sum, of whose quotient nothing is attended to.
    return np.exp(x - np.logaddexp(special.logsumexp(x, -1, keepdims=True), extra))


def attend(q, k, v, bias=0.0, extra=-np.inf, soft_cap=None):
    """Returns attention to values, in NumPy."""
    logits = q @ np.swapaxes(k, -1, -2)
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    return _softmax(logits + bias, extra) @ v


def _project(x, w):
    return np.einsum("...li,hik->...hlk", x, w)


def _output(o, w):
    return np.einsum("...hlk,hik->...li", o, w)


def _qkv(x, memory, qkvo):
    wq, wk, wv, wo = qkvo * 0.5
    return _project(x, wq), _project(memory, wk), _project(memory, wv), wo


def _multihead(x, memory, qkvo, bias=0.0, extra=-np.inf):
    q, k, v, wo = _qkv(x, memory, qkvo)
    return _output(attend(q, k, v, bias, extra), wo)


def hide(condition):
    """Returns what is added to logits to hide positions."""
    return np.where(condition, _HIDDEN, 0.0)


def causal(n):
    """Returns the mask of later positions."""
    return hide(np.arange(n)[:, None] < np.arange(n))


def _padded(a, before, after=0, axis=-2):
    widths = [(0, 0)] * a.ndim
    widths[axis] = (before, after)
    return np.pad(a, widths)


def _one_step(x, prev_k, prev_v, qkvo, place, replace, visible):
    """Returns (y, k, v) of a decoding step that writes to one index of the cache."""
    q, k, v, wo = _qkv(x[:, None], x[:, None], qkvo)
    unchanged = np.arange(prev_k.shape[-2]) != place if replace else np.ones(prev_k.shape[-2])
    written = (np.arange(prev_k.shape[-2]) == place).astype(float)
    new_k = prev_k * unchanged[:, None] + k * written[:, None]
    new_v = prev_v * unchanged[:, None] + v * written[:, None]
    return [_output(attend(q, new_k, new_v, hide(~visible)), wo)[:, 0], new_k, new_v]


def _local(x, qkvo, window, block):
    """A position attends to less than a block length, and to `window` positions before its block."""
    n = x.shape[-2]
    q, k, v, wo = _qkv(x, x, qkvo)
    at, memory = np.arange(n)[:, None], np.arange(-window, n)
    seen = (memory <= at) & (memory > at - block) & (memory >= at // block * block - window)
    # Before the beginning are zeros, which take their share in the softmax.
    k, v = _padded(k, window), _padded(v, window)
    return _output(attend(q, k, v, hide(~seen)), wo)


def _neighbors(a, axis, masked):
    """Extends blocks of an array [blocks, ...] by their neighbors along `axis`."""
    n = a.shape[0]
    # Beyond the border are zeros, which attention without a mask sees.
    margins = _padded(a, 1, 1, axis=0)
    parts = [margins[:n], a] if masked else [margins[:n], a, margins[2:]]
    return np.concatenate(parts, axis)


def _blocks(x, qkvo, masked):
    """X is [batch, blocks, w, io]."""
    q, k, v, wo = _qkv(x, x, qkvo)
    k, v = (np.moveaxis(_neighbors(np.moveaxis(t, 1, 0), -2, masked), 0, 1) for t in (k, v))
    w = x.shape[-2]
    bias = hide(np.arange(w)[:, None] + w < np.arange(2 * w)) if masked else 0.0
    return _output(attend(q, k, v, bias), wo)


def _around(a, masked):
    """Extends blocks of an array [h_blocks, w_blocks, h, w, ...] by those around them."""
    a = _neighbors(a, 2, masked)
    # Of what has margins of rows already: so it has the corners, too.
    return np.moveaxis(_neighbors(np.moveaxis(a, 1, 0), 3, masked), 0, 1)


def _blocks_2d(x, qkvo, masked):
    """X is [h_blocks, w_blocks, h, w, io]."""
    wq, wk, wv, wo = qkvo * 0.5
    h, w = x.shape[-3:-1]
    q = np.einsum("abrci,hik->abhrck", x, wq)
    k, v = (_around(np.einsum("...i,hik->...hk", x, m), masked) for m in (wk, wv))
    logits = np.einsum("abhrck,abmnhk->abhrcmn", q, k)
    if not masked:
        # As in release 0.1.21: logits are summed over rows, and the softmax is over columns.
        weights = np.broadcast_to(_softmax(logits.sum(-2))[..., None, :], logits.shape)
    else:
        rows, columns = np.arange(-h, h)[:, None], np.arange(-w, w)
        later = np.arange(h * w).reshape(h, w, 1, 1) < rows * w + columns
        logits = logits + hide(later & (rows >= 0) & (columns >= 0))
        weights = _softmax(logits.reshape(*logits.shape[:-2], -1)).reshape(logits.shape)
    return np.einsum("abhrcmn,abmnhk,hik->abrci", weights, v, wo)


# -- the layers


def _layer(fn, *args, weights, **kwargs):
    return _with_weights(weights, getattr(_LAYERS, fn), *args, **kwargs)


def _self_causal(x, weights):
    positions = mtf.range(x.mesh, x.shape.dims[-2], tf.int32)
    mask = mtf.cast(_LAYERS.attention_mask_autoregressive(positions), x.dtype)
    return _layer("multihead_attention", x, None, mask, *_KV_AND_HEADS, True, weights=weights)


def _from_padded(x, memory, ids, weights):
    mask = _LAYERS.attention_mask_ignore_padding(ids)
    return _layer("multihead_attention", x, memory, mask, *_KV_AND_HEADS, True, weights=weights)


def _compressed(x, qkvo, factor, masked):
    n = x.shape[1]
    memory = x.reshape(x.shape[0], n // factor, factor, -1).mean(2)
    # A query sees a mean once the last of its positions is not later.
    last = np.arange(n // factor) * factor + factor - 1
    bias = hide(np.arange(n)[:, None] < last) if masked else 0.0
    return _multihead(x, memory, qkvo, bias, 0.0)


_LINE = f"batch:4 length:16 io:8, {_QKVO}"
_STEP = "batch:4 io:8, batch:4 heads:4 {m}:8 kv:4, batch:4 heads:4 {m}:8 kv:4, " + _QKVO

_WHOLE = [
    case("attention_masks", "batch:4 length:8/below3, batch:4 length:4/below3",
         lambda i, j: [_LAYERS.attention_mask_ignore_padding(i),
                       _LAYERS.attention_mask_autoregressive(i),
                       _LAYERS.attention_mask_same_segment(i, j)],
         lambda i, j: [hide(i == 0), hide(i[:, :, None] < i[:, None]),
                       hide(i[:, :, None] != j[:, None])]),
    case("attention_dot_product",
         "batch:4 heads:4 length:8 k, batch:4 heads:4 memory:8 k, batch:4 heads:4 memory:8 channels:4, "
         "length:8 memory:8", lambda q, k, v, b: _LAYERS.dot_product_attention(q, k, v, b, True),
         attend),
    case("attention_extra_logit", "batch:4 length:8 k, batch:4 memory:8 k",
         lambda q, k: _LAYERS.dot_product_attention(q, k, k, None, True, extra_logit=1.0),
         lambda q, k: attend(q, k, k, extra=1.0)),
    case("attention_self_causal", f"batch:4 length:8 io:8, {_QKVO}", _self_causal,
         lambda x, w: _multihead(x, x, w, causal(8)), dtypes=FLOATS),
    case("attention_from_padded", "batch:4 length:4 io:8, batch:4 memory_length:8 io:8, "
         "batch:4 length:8/below3, " + _QKVO, _from_padded,
         lambda x, m, ids, w: _multihead(x, m, w, hide(ids == 0)[:, None, None])),
    case("attention_step", _STEP.format(m="memory_length") + ", /below8",
         lambda x, k, v, w, n: _layer("multihead_self_attention_incremental", x, k, v, n,
                                      tf.float32, tf.float32, weights=w),
         lambda x, k, v, w, n: _one_step(x, k, v, w, n, False, np.arange(8) <= n)),
    case("attention_local_step", _STEP.format(m="window") + ", /below30",
         lambda x, k, v, w, n: _layer("masked_local_attention_1d_incremental", x, k, v, n, weights=w),
         lambda x, k, v, w, n: _one_step(x, k, v, w, n % 8, True, np.arange(8) >= 0)),
    case("attention_encdec_step", "batch:4 io:8, heads:4 io:8 kv:4, heads:4 io:8 kv:4, "
         "batch:4 heads:4 memory_length:8 kv:4, batch:4 memory_length:8",
         lambda x, wq, wo, k, b: _LAYERS.multihead_encdec_attention_incremental(x, wq, wo, k, k, b),
         lambda x, wq, wo, k, b: _output(
             attend(_project(x[:, None], wq), k, k, b[:, None, None]), wo)[:, 0]),
    case("compress_mean", "a length:16 e", lambda x: _LAYERS.compress_mean(x, x.shape.dims[1], 4),
         lambda x: x.reshape(8, 4, 4, 16).mean(2)),
    *(case(f"attention_compressed_by_{factor}{end}", _LINE,
           lambda x, w, factor=factor, masked=masked: _layer(
               "multihead_self_attention_memory_compressed", x, masked, factor, *_KV_AND_HEADS,
               True, weights=w),
           lambda x, w, factor=factor, masked=masked: _compressed(x, w, factor, masked))
      for factor, masked, end in [(2, True, "_masked"), (4, False, "")]),
    *(case(f"attention_local_{window}_in_blocks_of_{block}", _LINE,
           lambda x, w, window=window, length=length: _layer(
               "masked_local_attention_1d", x, *_KV_AND_HEADS, True, window,
               length_per_split=length, weights=w),
           lambda x, w, window=window, block=block: _local(x, w, window, block))
      for window, length, block in [(4, 4, 4), (3, 8, 8), (5, None, 16)]),
    *(case(name + ("_masked" if masked else ""), inputs,
           lambda x, w, fn=fn, masked=masked: _layer(
               fn, x, *_KV_AND_HEADS, True, mask_right=masked, weights=w),
           lambda x, w, oracle=oracle, masked=masked: oracle(x, w, masked))
      for name, inputs, fn, oracle in [
          ("attention_blocks", f"batch:4 blocks:4 w:4 io:8, {_QKVO}",
           "local_self_attention_spatial_blocks", _blocks),
          ("attention_blocks_2d",
           f"h_blocks:2 w_blocks:4 h:2 w:3 io:4, {_QKVO.replace('io:8', 'io:4')}",
           "local_2d_self_attention_spatial_blocks", _blocks_2d)]
      for masked in (False, True)),
    case("attention_halo_one_block", "a w c:2", lambda x: list(
        _LAYERS.local_1d_halo_exchange(x * 2, x * 3, None, dim("w"), True)),
        lambda x: [_padded(x * k, 4) for k in (2, 3)]),
    case("attention_halo_2d_one_block", "h w a", lambda x: list(
        _LAYERS.local_2d_halo_exchange(x * 2, x * 3, None, dim("h"), None, dim("w"), False)),
        lambda x: [_padded(_padded(x * k, 6, 6, 0), 4, 4, 1) for k in (2, 3)]),
]


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


def _causal_with_bias(q, k, v, bias, **kwargs):
    seen = ("greater_equal", *_positions(q, k))
    return _blocked(q, k, v, bias, visible=[seen], block_sizes=(3, 4), **kwargs)


def _one_head_of_keys(q, k, v, bias, ids, memory_ids):
    return _blocked(
        q, k, v, bias, visible=[("equal", ids, memory_ids)], extra_logit=0.5, block_sizes=(4, 8)
    )


def _one_head_expected(q, k, v, bias, ids, memory_ids):
    q, bias = np.moveaxis(q, 2, 1), bias[:, :, None]
    hidden = hide(ids[:, None, :, None] != memory_ids[:, None, None])
    y = attend(q, k[:, None], v[:, None], bias + hidden, extra=0.5)
    return np.moveaxis(y, 1, 2)


_BLOCKED = [
    case("attention_blocked_causal",
         "batch:4 heads:4 length:8 k, batch:4 heads:4 memory:8 k, batch:4 heads:4 memory:8 channels:2, "
         "heads:4 length:8 memory:8", _causal_with_bias,
         lambda q, k, v, b: attend(q, k, v, b + causal(8)), dtypes=FLOATS),
    case("attention_blocked_soft_cap",
         "batch:4 heads:4 length:8 k, batch:4 heads:4 memory:8 k, batch:4 heads:4 memory:8 channels:2, "
         "heads:4 length:8 memory:8", functools.partial(_causal_with_bias, soft_cap=1.5),
         lambda q, k, v, b: attend(q, k, v, b + causal(8), soft_cap=1.5), dtypes=FLOATS),
    case("attention_ring_soft_cap",
         "batch:4 length:8 k, batch:4 memory:8 k, batch:4 memory:8 channels:2, batch:4 memory:8",
         functools.partial(_causal_with_bias, soft_cap=1.5, ring=True),
         lambda q, k, v, b: attend(q, k, v, b[:, None] + causal(8), soft_cap=1.5),
         alike=[("length", "memory")]),
    case("attention_ring",
         "batch:4 heads:4 length:8 k, batch:4 heads:4 memory:8 k, batch:4 heads:4 memory:8 channels:2, "
         "batch:4 heads:4 memory:8, batch:4 length:8/below2, batch:4 memory:8/below2",
         _ring, _ring_expected, dtypes=FLOATS, alike=[("length", "memory")]),
    case("attention_blocked_one_head_of_keys",
         "batch:4 length:8 heads:4 k, batch:4 memory:16 k, batch:4 memory:16 channels:4, "
         "batch:4 heads:4 memory:16, batch:4 length:8/below2, batch:4 memory:16/below2",
         _one_head_of_keys, _one_head_expected),
]  # fmt: skip


CASES = [*_WHOLE, *_BLOCKED]
