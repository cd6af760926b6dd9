"""Layers other than attention, with inputs in place of their variables."""

import numpy as np
import tensorflow.compat.v1 as tf
from scipy import special

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.cases.table import FLOATS, case, convolved, dim, dims, given

__all__ = ["CASES"]

_LAYERS = mtf.layers


# -- dense


def _dense(x, w, b, *args, **kwargs):
    return given(lambda: _LAYERS.dense(x, *args, **kwargs), kernel=w, bias=b)


def _experts(x, w, b):
    a, _, c = x.shape.dims
    return _dense(x, w, b, [dim("g")], reduced_dims=[c], expert_dims=[a])


def _product(x, w, v, b, u):
    def layer():
        return _LAYERS.dense_product(x, dims("b"), dim("g"), ["sigmoid", None])

    return given(layer, kernel=[w, v], bias=[b, u])


def _dense_relu_dense(x, wi, wo):
    return given(lambda: _LAYERS.dense_relu_dense(x, dim("g"), True), kernel=[wi, wo])


def _np_dense_relu_dense(x, wi, wo):
    return np.maximum(x @ wi, 0.0) @ wo


_DENSE = [
    case("dense", "a b, b g, g", lambda x, w, b: _dense(x, w, b, dim("g"), reduced_dims=dims("b")),
         lambda x, w, b: x @ w + b, dtypes=FLOATS),
    case("dense_two_dims", "a w s, w s g, g",
         lambda x, w, b: _dense(x, w, b, dims("g"), reduced_dims=dims("w s"),
                                activation=[mtf.sigmoid, mtf.square]),
         lambda x, w, b: special.expit(np.einsum("aws,wsg->ag", x, w) + b) ** 2, tolerance=3e-5),
    # A kernel has no two dimensions of one name, so that of the input gets another.
    case("dense_same_dim", "a b, _b:16 b, b",
         lambda x, w, b: _dense(x, w, b, dims("b"), reduced_dims=dims("b")),
         lambda x, w, b: x @ w + b),
    case("dense_experts", "a b c, a c g, a g", _experts,
         lambda x, w, b: np.einsum("abc,acg->abg", x, w) + b[:, None]),
    case("dense_product", "a b, b g, b g, g, g", _product,
         lambda x, w, v, b, u: special.expit(x @ w + b) * (x @ v + u)),
    case("dense_relu_dense", "a b, b g, g b", _dense_relu_dense, _np_dense_relu_dense),
]


# -- normalization


def _layer_norm(x, scale, bias):
    return given(lambda: _LAYERS.layer_norm(x, dim("b"), 1e-3),
                  layer_norm_scale=scale, layer_norm_bias=bias)


def _np_normal(x, axes):
    centered = x - x.mean(axes, keepdims=True)
    return centered / np.sqrt((centered**2).mean(axes, keepdims=True) + 1e-3)


def _batch_norm(**kwargs):
    def layer(x, scale, bias):
        y, updates = given(
            lambda: _LAYERS.batch_norm(x, True, 0.9, 1e-3, **kwargs),
            batch_norm_scale=scale, batch_norm_bias=bias,
        )
        # The updates subtract (1 - momentum) (average - statistic of the batch) from the average.
        return [y, *(u.variables[0].value - 10.0 * u.inputs[0] for u in updates)]

    return layer


def _np_batch_norm(axes):
    def layer(x, scale, bias):
        at = (slice(None), None) if axes == 1 else ()
        return [_np_normal(x, axes) * scale[at] + bias[at], x.mean(axes), x.var(axes)]

    return layer


def _batch_norm_by_averages(x, scale, bias, mean, variance):
    y, _ = given(
        lambda: _LAYERS.batch_norm(x, False, 0.9, 1e-3), batch_norm_scale=scale,
        batch_norm_bias=bias, bn_moving_mean=mean, bn_moving_variance=variance,
    )
    return y


def _np_corr(x):
    return np.corrcoef(np.moveaxis(x, 1, 0).reshape(x.shape[1], -1))


_NORMALIZATION = [
    case("layer_norm", "a b, b, b", _layer_norm,
         lambda x, s, b: _np_normal(x, -1) * s + b, tolerance=3e-5),
    case("batch_norm", "a s b, b, b", _batch_norm(), _np_batch_norm((0, 1)), tolerance=3e-5),
    case("batch_norm_inner", "a s b, a b, a b",
         _batch_norm(dims_idx_start=1, dims_idx_end=2), _np_batch_norm(1), tolerance=3e-5),
    case("batch_norm_by_averages", "a s b, b, b, b, b/positive", _batch_norm_by_averages,
         lambda x, s, b, m, v: (x - m) / np.sqrt(v + 1e-3) * s + b),
    case("corr", "a b d", lambda x: _LAYERS.corr(x, dim("b")), _np_corr, tolerance=3e-5),
]


# -- losses and regularization


def _np_cross_entropy(logits, probs, z_loss=0.0):
    log_z = special.logsumexp(logits, -1)
    # -sum of p log softmax(x), and z_loss * log(Z)^2, where Z is the sum of exp(x).
    return -((logits - log_z[..., None]) * probs).sum(-1) + z_loss * log_z**2


def _cross_entropy(name, targets, z_loss):
    def layer(x, t):
        return _LAYERS.softmax_cross_entropy_with_logits(x, t, dim("b"), z_loss)

    def oracle(x, t):
        return _np_cross_entropy(x, np.eye(16)[t] if t.ndim == 1 else t, z_loss)

    return case(f"cross_entropy_{name}", ["a b", targets], layer, oracle)


_LOSSES = [
    _cross_entropy("hard", "a/below16", 0.0),
    _cross_entropy("hard_z_loss", "a/below16", 0.1),
    case("cross_entropy_of_vocabulary_first", "b a c, c a/below16",
         lambda x, t: _LAYERS.softmax_cross_entropy_with_logits(x, t, dim("b")),
         lambda x, t: _np_cross_entropy(np.moveaxis(x, 0, -1), np.eye(16)[t.T])),
    # Targets that are no class have a row of zeros, in place of a one.
    case("cross_entropy_beyond", "a b, a/below40",
         lambda x, t: _LAYERS.softmax_cross_entropy_with_logits(x, t, dim("b"), 0.1),
         lambda x, t: _np_cross_entropy(x, np.eye(40)[t][:, :16], 0.1)),
    _cross_entropy("soft", "a b/positive", 0.0),
    _cross_entropy("soft_z_loss", "a b/positive", 0.1),
    case("sigmoid_cross_entropy", "a b, a b", _LAYERS.sigmoid_cross_entropy_with_logits,
         lambda x, t: np.log1p(np.exp(x)) - x * t, dtypes=FLOATS),
    case("weights_nonzero", "a b/below3", _LAYERS.weights_nonzero,
         lambda ids: (ids != 0).astype(float), grads=()),
    case("clip_activation_gradient", "a b", lambda x: _LAYERS.clip_activation_gradient(x, 1e6),
         lambda x: x),
    case("multiplicative_jitter_of_0", "a b", lambda x: _LAYERS.multiplicative_jitter(x, 0),
         lambda x: x),
]


# -- embedding


def _embedding(ids, w):
    return given(
        lambda: _LAYERS.embedding(ids, dim("b"), dim("d"), mtf.VariableDType()), embedding=w
    )


_EMBEDDING = [case("embedding", "a s/below16, b d", _embedding, lambda ids, w: w[ids])]


# -- convolution


def _kernel(fn, *args, **kwargs):
    return lambda x, k: given(lambda: fn(x, *args, **kwargs), kernel=k)


def _spread(f, rates):
    """A filter with zeros between its entries."""
    rank = len(rates)
    y = np.zeros([*((n - 1) * r + 1 for n, r in zip(f.shape, rates)), *f.shape[rank:]])
    y[tuple(slice(None, None, r) for r in rates)] = f
    return y


def _np_transposed(x, f, strides, same=True):
    """The transpose: x [n, spatial..., o], f [window..., i, o]; result [n, spatial..., i]."""
    rank = f.ndim - 2
    sizes = x.shape[1:-1]
    full = [(n - 1) * s + max(k, s) for n, s, k in zip(sizes, strides, f.shape)]
    y = np.zeros([x.shape[0], *full, f.shape[-2]])
    # y[s n + k] += f[k] x[n], for each position k of the window.
    for at in np.ndindex(*f.shape[:rank]):
        places = [slice(k, k + (n - 1) * s + 1, s) for k, n, s in zip(at, sizes, strides)]
        y[(slice(None), *places)] += np.einsum("n...o,io->n...i", x, f[at])
    if same:
        for axis, (n, s, k) in enumerate(zip(sizes, strides, f.shape), 1):
            # Of the results, SAME keeps n s, and drops half of the others at the beginning.
            skipped = max(k - s, 0) // 2
            y = np.take(y, range(skipped, skipped + n * s), axis)
    return y


def _joined(x, rank):
    """Joins blocks: from [n, blocks..., pixels..., c] to [n, pixels of the whole image..., c]."""
    blocks, pixels = x.shape[1 : 1 + rank], x.shape[1 + rank : -1]
    order = [0, *(1 + a + rank * b for a in range(rank) for b in range(2)), 2 * rank + 1]
    return x.transpose(order).reshape(
        [x.shape[0], *(b * p for b, p in zip(blocks, pixels)), x.shape[-1]]
    )


def _cut(x, blocks):
    rank = len(blocks)
    sizes = [n for b, p in zip(blocks, x.shape[1:]) for n in (b, p // b)]
    order = [0, *range(1, 2 * rank, 2), *range(2, 2 * rank + 1, 2), 2 * rank + 1]
    return x.reshape([x.shape[0], *sizes, x.shape[-1]]).transpose(order)


def _np_blocks(fn):
    return lambda x, f: _cut(fn(_joined(x, 2), f), x.shape[1:3])


def _np_blocks3d(fn):
    """Blocks along depth and height; the width is one block."""
    def layer(x, f):
        n, v, w, h, k, t, d = x.shape
        return _cut(fn(_joined(x.reshape(n, v, w, 1, h, k, t, d), 3), f), (v, w, 1))[:, :, :, 0]

    return layer


def _blocks(fn, *args, **kwargs):
    """A layer on blocks, with the two blocks dimensions in the second and third place."""
    def layer(x, k):
        names = ("h_blocks_dim", "w_blocks_dim") if "2d" in fn.__name__ else ("d_blocks_dim", "h_blocks_dim")
        blocks = dict(zip(names, x.shape.dims[1:3]))
        return given(lambda: fn(x, *args, **blocks, **kwargs), kernel=k)

    return layer


def _separable(x, depth, point, bias, last, **kwargs):
    """The filter of the first position is `depth`, of shape [in]; that of the second is twice it."""
    weights = [depth, depth * 2.0]
    def layer():
        return _LAYERS.separable_conv1d(x, dim("f"), -1, 0, kernel_depth_weights=weights, **kwargs)

    return given(layer, kernel=point, bias=[bias, last])


def _np_separable(x, depth, point, bias, last, dilation=1):
    before = np.pad(x, [(0, 0), (dilation, 0), (0, 0)])[:, :-dilation]
    return (before * depth + x * 2.0 * depth + bias) @ point + last


_OUT = dim("f")
_IMAGE, _BLOCKS = "n h w d", "n v:2 w:4 h:4 k:4 d"
_ONE = [(1, 1), (1, 1)]
_CONVOLUTION = [
    case("conv2d", f"{_IMAGE}, fh:3 fw:3 d f", _kernel(_LAYERS.conv2d, _OUT),
         lambda x, f: convolved(x, f, (1, 1), _ONE), tolerance=3e-5),
    case("conv3d", "n h:4 w k:2 d, fd:3 fh:1 fw:2 d f", _kernel(_LAYERS.conv3d, _OUT, (3, 1, 2)),
         lambda x, f: convolved(x, f, (1, 1, 1), [(1, 1), (0, 0), (0, 1)]), tolerance=3e-5),
    case("conv1d", "n h d, fh:1 fw:3 d f", _kernel(_LAYERS.conv1d, _OUT),
         lambda x, f: convolved(x, f[0], (1,), [(1, 1)]), tolerance=3e-5),
    case("conv1d_stride", "n h d, fh:1 fw:2 d f", _kernel(_LAYERS.conv1d, _OUT, 2, 2),
         lambda x, f: convolved(x, f[0], (2,), [(0, 0)]), tolerance=3e-5),
    case("separable_conv1d", "n b d, d, d f, d, f", _separable, _np_separable),
    case("separable_conv1d_dilated", "n b d, d, d f, d, f",
         lambda *xs: _separable(*xs, dilation=3), lambda *xs: _np_separable(*xs, dilation=3)),
    case("conv2d_dilated", f"{_IMAGE}, fh:2 fw:3 d f",
         _kernel(_LAYERS.conv2d, _OUT, (2, 3), dilations=(3, 1)),
         lambda x, f: convolved(x, _spread(f, (3, 1)), (1, 1), [(1, 2), (1, 1)]), tolerance=3e-5),
    case("conv3d_dilated", "n h:4 w k:3 d, fd:2 fh:1 fw:2 d f",
         _kernel(_LAYERS.conv3d, _OUT, (2, 1, 2), (1, 2, 1), "VALID", dilations=(2, 5, 2)),
         lambda x, f: convolved(x, _spread(f, (2, 1, 2)), (1, 2, 1), [(0, 0)] * 3), tolerance=3e-5),
    case("conv1d_dilated", "n h d, fh:1 fw:3 d f", _kernel(_LAYERS.conv1d, _OUT, dilation=2),
         lambda x, f: convolved(x, _spread(f[0], (2,)), (1,), [(2, 2)]), tolerance=3e-5),
    case("conv2d_with_blocks", f"{_BLOCKS}, fh:3 fw:5 d f",
         _blocks(_LAYERS.conv2d_with_blocks, _OUT, (3, 5)),
         _np_blocks(lambda x, f: convolved(x, f, (1, 1), [(1, 1), (2, 2)])), tolerance=3e-5),
    case("conv3d_with_blocks", "n v:2 w:2 h:2 k:2 t:3 d:2, fd:3 fh:2 fw:3 d:2 f:2",
         _blocks(_LAYERS.conv3d_with_blocks, dim("f:2"), (3, 2, 3)),
         _np_blocks3d(lambda x, f: convolved(x, f, (1, 1, 1), [(1, 1), (0, 1), (1, 1)])),
         tolerance=3e-5),
    case("conv2d_transpose", f"{_IMAGE}, fh:2 fw:2 f d", _kernel(_LAYERS.conv2d_transpose, _OUT),
         lambda x, f: _np_transposed(x, f, (2, 2)), tolerance=3e-5),
    case("conv2d_transpose_wide", f"{_IMAGE}, fh:5 fw:1 f d",
         _kernel(_LAYERS.conv2d_transpose, _OUT, (5, 1), (2, 3)),
         lambda x, f: _np_transposed(x, f, (2, 3)), tolerance=3e-5),
    case("conv2d_transpose_valid", f"{_IMAGE}, fh:3 fw:2 f d",
         _kernel(_LAYERS.conv2d_transpose, _OUT, (3, 2), (2, 2), "VALID"),
         lambda x, f: _np_transposed(x, f, (2, 2), same=False), tolerance=3e-5),
    case("conv3d_transpose", "n h:2 w:2 t:3 d:2, fd:2 fh:2 fw:2 f:4 d:2",
         _kernel(_LAYERS.conv3d_transpose, dim("f:4")),
         lambda x, f: _np_transposed(x, f, (2, 2, 2)), tolerance=3e-5),
    *(
        case(f"conv2d_transpose_with_blocks_{k}_{s}", f"{_BLOCKS}, fh:{k} fw:{j} f d",
             _blocks(_LAYERS.conv2d_transpose_with_blocks, _OUT, (k, j), (s, r)),
             _np_blocks(lambda x, f, s=s, r=r: _np_transposed(x, f, (s, r))), tolerance=3e-5)
        for k, j, s, r in [(2, 2, 2, 2), (4, 4, 2, 2), (3, 5, 1, 2), (7, 2, 3, 2), (9, 1, 1, 2)]
    ),
    case("conv3d_transpose_with_blocks", "n v:2 w:2 h:2 k:2 t:3 d:2, fd:4 fh:2 fw:3 f:2 d:2",
         _blocks(_LAYERS.conv3d_transpose_with_blocks, dim("f:2"), (4, 2, 3), (2, 2, 1)),
         _np_blocks3d(lambda x, f: _np_transposed(x, f, (2, 2, 1))), tolerance=3e-5),
    case("max_pool2d", "n h w d/distinct", _LAYERS.max_pool2d,
         lambda x: x.reshape(8, 3, 2, 2, 2, 8).max((2, 4))),
    case("avg_pool3d", "n h w:2 t:4 d", lambda x: _LAYERS.avg_pool3d(x, (3, 1, 2)),
         lambda x: x.reshape(8, 2, 3, 2, 1, 2, 2, 8).mean((2, 4, 6))),
]


# -- reversible


def _reversible(recompute):
    def layer(x, y, w, v):
        state = (x, None, y, None)
        for weights in (w, v, w):
            state = _LAYERS.reversible_half_residual_and_swap(
                *state, lambda t, weights=weights: mtf.tanh(t * weights), recompute
            )
        return [state[0], state[2]]

    return layer


def _np_reversible(x, y, w, v):
    for weights in (w, v, w):
        x, y = y, x + np.tanh(y * weights)
    return [x, y]


_REVERSIBLE = [
    case(f"reversible_{recompute}", "a b, a b, b, b", _reversible(recompute), _np_reversible)
    for recompute in (True, False)
]


# -- rotary positions


_SCALINGS = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 3.0},
    "ntk": {"rope_type": "ntk", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 200},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 3},
}


def _rotary(**kwargs):
    def layer(x):
        _, length, d = x.shape.dims
        position = mtf.range(x.mesh, length, tf.int32) * 3
        rotary = _LAYERS.RotaryEmbedding(**kwargs)
        if not rotary.follows_length(3 * length.size):
            return rotary(x, position, d)
        return rotary(x, position, d, length=mtf.reduce_max(position, output_shape=[]) + 1)

    return layer


def _np_rotary(x, fraction=1.0, interleaved=False, **kwargs):
    """Complex numbers turned by one number for each position and pair."""
    n = int(x.shape[-1] * fraction)
    rotary = _LAYERS.RotaryEmbedding(**kwargs)
    frequencies, factor = rotary.frequencies(n, length=3 * (x.shape[1] - 1) + 1)
    turn = np.exp(1j * 3 * np.arange(x.shape[1])[:, None] * frequencies) * factor
    first, second = (slice(0, n, 2), slice(1, n, 2)) if interleaved else (
        slice(0, n // 2), slice(n // 2, n))
    y, z = x.copy(), (x[..., first] + 1j * x[..., second]) * turn
    y[..., first], y[..., second] = z.real, z.imag
    return y


_ROTARY = [
    case(f"rotary_{name}", "a b d", _rotary(**options), lambda x, o=options: _np_rotary(x, **o),
         dtypes=FLOATS)
    for name, options in [
        *((name, {"scaling": scaling}) for name, scaling in _SCALINGS.items()),
        ("interleaved", {"interleaved": True}),
        ("partial", {"fraction": 0.5, "base": 100.0}),
        ("partial_interleaved", {"fraction": 0.5, "interleaved": True}),
    ]
]

CASES = [*_DENSE, *_ROTARY, *_NORMALIZATION, *_LOSSES, *_EMBEDDING, *_CONVOLUTION, *_REVERSIBLE]

