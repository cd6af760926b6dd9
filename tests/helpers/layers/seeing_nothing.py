"""Attention in each of its forms, of which some queries see nothing; and what NumPy says."""

import functools

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import attention as A

BATCH, LENGTH, HEADS, CHANNELS = 2, 8, 2, 4
SCALES = (1.0, 100.0, 1e4)
BLIND = 3  # the query of row 0 that sees nothing; of row 1, none sees anything
IDS = np.array([[1, 1, 1, 1, 2, 2, 2, 2]] * BATCH, "int32")
SEEING = np.array([[1, 1, 1, 9, 2, 2, 2, 2], [9] * 8], "int32")
SEEN = np.tri(LENGTH, dtype=bool) & (SEEING[:, :, None] == IDS[:, None])


@functools.cache
def arrays():
    """Queries, keys, values, and the gradient of the result."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=[BATCH, LENGTH, HEADS, CHANNELS]).astype("f") for _ in range(4)]


def expected(scale, extra=False):
    """Returns the result, and the gradients of queries, keys and values."""
    q, k, v, dy = (x.astype("float64") for x in arrays())
    q = q * scale
    logits = np.where(SEEN[:, None], np.einsum("blhd,bmhd->bhlm", q, k), -np.inf)
    sees = SEEN.any(-1)[:, None, :, None]
    logits = np.where(sees, logits, 0.0)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    if extra:
        weights = np.where(sees, weights, 0.0)
    y = np.einsum("bhlm,bmhd->blhd", weights, v)
    dp = np.einsum("blhd,bmhd->bhlm", dy, v)
    ds = np.where(sees, weights * (dp - (weights * dp).sum(-1, keepdims=True)), 0.0)
    return [
        y,
        np.einsum("bhlm,bmhd->blhd", ds, k),
        np.einsum("bhlm,blhd->bmhd", ds, q),
        np.einsum("bhlm,blhd->bmhd", weights, dy),
    ]


def _visible(given):
    ids = [given(SEEING, "batch length"), given(IDS, "batch memory")]
    positions = [given(np.arange(LENGTH, dtype="int32"), d) for d in ("length", "memory")]
    return [("equal", *ids), ("greater_equal", *positions)]


def _mask(given, dtype, hidden=-1e9):
    """A mask of each comparison, which are added."""
    (_, *ids), (_, *positions) = _visible(given)
    found = [
        mtf.cwise(lambda x: tf.where_v2(x, 0.0, hidden), [seen], output_dtype=tf.float32)
        for seen in (mtf.equal(*ids), mtf.greater_equal(*positions))
    ]
    return mtf.cast(found[0] + found[1], dtype)


def _whole(given, *args, hidden=-1e9, **options):
    return A.attention(*args, _mask(given, args[0].dtype, hidden), **options)


def _narrow(given, *args, **options):
    """A mask in float16, of the comparisons together."""
    seen = mtf.logical_and(*(f(*x) for f, (_, *x) in zip(_COMPARED, _visible(given))))
    mask = A.visibility_mask_to_attention_bias(seen, tf.float16)
    return A.attention(*args, mask, **options)


def _blocked(given, q, k, v, *dims, **options):
    return mtf.layers.blocked_attention(
        q, k, v, *dims, visible=_visible(given), block_sizes=(4, 4), **options
    )


def _layers(given, q, k, v, memory, channels, _):
    q, k, v = (
        mtf.transpose(x, [x.shape.dims[i] for i in (0, 2, 1, 3)]) for x in (q, k, v)
    )  # fmt: skip
    y = mtf.layers.dot_product_attention(q, k, v, _mask(given, q.dtype), is_training=True)
    return mtf.transpose(y, [y.shape.dims[i] for i in (0, 2, 1, 3)])


_COMPARED = (mtf.equal, mtf.greater_equal)
FORMS = {
    "layers": _layers,
    "whole": functools.partial(_whole, blocked=False),
    "infinite": functools.partial(_whole, blocked=False, hidden=-np.inf),
    "mask_in_blocks": functools.partial(_whole, blocked=True),
    "blocks": _blocked,
    "ring": functools.partial(_blocked, ring=True),
    "contiguous": functools.partial(_blocked, ring="contiguous"),
}
OF_FLOAT16 = {
    "narrow_mask": functools.partial(_narrow, blocked=False),
    "narrow_mask_in_blocks": functools.partial(_narrow, blocked=True),
}
OF_RING = ("blocks", "ring", "contiguous")


def results(mesh, form, scale, dtype=tf.float32, **options):
    """Returns the result of a form of attention, and the gradients of queries, keys and values."""

    def given(x, names):
        dims = [mtf.Dimension(name, n) for name, n in zip(names.split(), x.shape, strict=True)]
        return mtf.import_tf_tensor(mesh, tf.constant(x), mtf.Shape(dims))

    q, k, v, dy = arrays()
    rows, columns = "batch length heads d_kv", "batch memory heads d_kv"
    xs = [given(q * np.float32(scale), rows), given(k, columns), given(v, columns)]
    xs, dy = [mtf.cast(x, dtype) for x in xs], mtf.cast(given(dy, rows), dtype)
    memory, channels = xs[1].shape.dims[1], xs[1].shape.dims[3]
    y = {**FORMS, **OF_FLOAT16}[form](given, *xs, memory, channels, channels, **options)
    found = [y, *mtf.gradients([y], xs, [dy])]
    return [mtf.cast(x, tf.float32) for x in found]


def check(found, scale, what="", dtype=tf.float32):
    """Compares with what NumPy says; of what sees nothing, to rounding of the values alone."""
    fine = 1e-5 if dtype == tf.float32 else 2e-2
    coarse = max(fine, 1e-6 * scale) if dtype == tf.float32 else 0.05
    y, dq, dk, dv = (np.asarray(x, "float64") for x in found)
    wanted = expected(scale)
    assert all(np.isfinite(x).all() for x in (y, dq, dk, dv)), what
    for at in (0, BLIND), (1, slice(None)):
        np.testing.assert_allclose(y[at], wanted[0][at], rtol=fine, atol=fine, err_msg=what)
        np.testing.assert_array_equal(dq[at], 0.0, err_msg=what)
    np.testing.assert_array_equal(dk[1], 0.0, err_msg=what)
    np.testing.assert_allclose(dv[1], wanted[3][1], rtol=fine, atol=fine, err_msg=what)
    if dtype == tf.float32 or scale == 1.0:
        sizes = (1.0, 1.0, scale, 1.0)  # of what rounds, though softmaxes be flat
        for x, w, size in zip((y, dq, dk, dv), wanted, sizes):
            np.testing.assert_allclose(x, w, rtol=coarse, atol=coarse * size, err_msg=what)
