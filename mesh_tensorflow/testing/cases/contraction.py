"""Cases that sum: products, reductions, convolutions and pooling, Fourier transforms."""

import numpy as np
from scipy import special

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.cases.table import (
    ALL,
    FLOATS,
    WIDE,
    case,
    convolved,
    dim,
    dims,
    shape,
)

__all__ = ["CASES"]


def _einsum(name, inputs, equation, output=None, reduced=None, **kwargs):
    output = None if output is None else shape(output)
    reduced = None if reduced is None else dims(reduced)
    return case(
        f"einsum_{name}",
        inputs,
        lambda *xs: mtf.einsum(xs, output_shape=output, reduced_dims=reduced),
        lambda *xs: np.einsum(equation, *xs),
        **kwargs,
    )


_PRODUCTS = [
    case("matmul", "a b, b c", mtf.matmul, lambda x, y: x @ y, dtypes=ALL),
    case("matmul_output_shape", "a b, b c",
         lambda x, y: mtf.matmul(x, y, output_shape=shape("c a")), lambda x, y: (x @ y).T),
    case("matmul_reduced_dims", "a b, b c",
         lambda x, y: mtf.matmul(x, y, reduced_dims=dims("b")), lambda x, y: x @ y),
    _einsum("default", "a b, b c", "ab,bc->ac", dtypes=ALL),
    _einsum("default_two_shared", "a b c, b c d", "abc,bcd->ad"),
    _einsum("output", "a b, b c", "ab,bc->ca", "c a", dtypes=ALL),
    _einsum("output_keeps_shared", "a b, b c", "ab,bc->bca", "b c a"),
    _einsum("batched", "n a b, n b c", "nab,nbc->nac", "n a c"),
    _einsum("reduced", "a b, b c", "ab,bc->ac", None, "b"),
    _einsum("reduced_more", "a b, b c", "ab,bc->c", None, "a b"),
    _einsum("reduced_none", "a b, b c", "ab,bc->abc", None, ""),
    _einsum("both", "a b, b c", "ab,bc->ca", "c a", "b"),
    _einsum("summed_out", "a b, c", "ab,c->bc", "b c", dtypes=ALL),
    _einsum("summed_out_of_each", "a b, c d", "ab,cd->bd", "b d"),
    _einsum("outer", "a, b", "a,b->ba", "b a"),
    _einsum("elementwise", "a b, a b", "ab,ab->ab", "a b"),
    _einsum("dot", "a b, a b", "ab,ab->", ""),
    # As in attention from a single position; of large matrices it is one product of a batch.
    _einsum("row_times_matrix", "n a:64 b:64, n a:64", "nab,na->nb", "n b:64", dtypes=ALL),
    _einsum("row_times_transposed", "n b:64, n a:64 b:64", "nb,nab->na", "n a:64", dtypes=FLOATS),
    _einsum("row_times_matrix_turned", "n b, a n b", "nb,anb->na", "n a"),
    _einsum("vector_times_matrix", "a b, b", "ab,b->a", "a"),
    _einsum("three", "a b, b c, c d", "ab,bc,cd->ad", dtypes=ALL),
    _einsum("three_shared", "a b, a b c, c b", "ab,abc,cb->a", "a"),
    _einsum("three_one_scalar", "a b, b, ", "ab,b,->a", "a"),
    _einsum("one_transposed", "a b c", "abc->cab", "c a b"),
    _einsum("one_reduced", "a b c", "abc->ca", "c a", dtypes=ALL),
    _einsum("four", "n a, a b, b c, n c", "na,ab,bc,nc->n", "n"),
    case("einsum_broadcast_output", "a b, b c",
         lambda x, y: mtf.einsum([x, y], output_shape=shape("d a c")),
         lambda x, y: np.broadcast_to(x @ y, (8, 8, 24)), dtypes=ALL),
    case("einsum_broadcast_middle", "a b",
         lambda x: mtf.einsum([x], output_shape=shape("a d")),
         lambda x: np.broadcast_to(x.sum(1)[:, None], (8, 8))),
    case("einsum_same_twice", "a b", lambda x: mtf.einsum([x, x], output_shape=shape("a")),
         lambda x: (x * x).sum(1)),
    case("feed_forward", "n a b, b c, c d",
         lambda x, v, w: mtf.einsum([mtf.relu(mtf.einsum([x, v], shape("n a c"))), w],
                                    shape("n a d")),
         lambda x, v, w: np.maximum(x @ v, 0) @ w),
    case("attention", "n a b, n g b, n g c",
         lambda q, k, v: mtf.einsum(
             [mtf.softmax(mtf.einsum([q, k], shape("n a g")) * 0.25, dims("g")[0]), v],
             shape("n a c")),
         lambda q, k, v: np.einsum("nag,ngc->nac", special.softmax(q @ k.swapaxes(1, 2) * 0.25, -1), v)),
]


_FNS = {
    "sum": (mtf.reduce_sum, np.sum, "", ALL),
    "mean": (mtf.reduce_mean, np.mean, "", FLOATS),
    # At ties there is no derivative that finite differences could find; see reduce_max_ties.
    "max": (mtf.reduce_max, np.max, "distinct", ALL),
    "min": (mtf.reduce_min, np.min, "distinct", ALL),
    "all": (mtf.reduce_all, np.all, "mostly", ("float32",)),
    "any": (mtf.reduce_any, np.any, "bool", ("float32",)),
}


def _reductions(name):
    fn, oracle, kind, dtypes = _FNS[name]
    inputs = [f"a b s/{kind}"]
    return [
        case(f"reduce_{name}_dim", inputs, lambda x: fn(x, reduced_dim=dim("b")),
             lambda x: oracle(x, 1), dtypes=dtypes),
        case(f"reduce_{name}_output_shape", inputs, lambda x: fn(x, output_shape=shape("s a")),
             lambda x: oracle(x, 1).T, dtypes=dtypes),
        case(f"reduce_{name}_both", inputs,
             lambda x: fn(x, reduced_dim=dim("a"), output_shape=shape("b s")),
             lambda x: oracle(x, 0)),
        case(f"reduce_{name}_to_scalar", inputs, fn, oracle, dtypes=dtypes),
        case(f"reduce_{name}_permuted_only", inputs,
             lambda x: fn(x, output_shape=shape("s b a")), lambda x: np.transpose(x, (2, 1, 0))),
    ]


_TRUTH = [
    case("reduce_all_of_numbers", "a k b/int", lambda x: mtf.reduce_all(x, reduced_dim=dim("k")),
         lambda x: np.all(x, 1)),
    case("reduce_any_of_numbers", "a k b/int",
         lambda x: mtf.reduce_any(mtf.minimum(x, 0), reduced_dim=dim("k")),
         lambda x: np.any(x < 0, 1)),
]


def _logsumexp_extra(x, e):
    # log(sum of exp(x) + exp(e)): the extra logit is one more element.
    return np.logaddexp(special.logsumexp(x, 1), e)


def _log_softmax(x, axis):
    # Not scipy's, which take a maximum, and so fail along dimensions of size 0.
    return x - special.logsumexp(x, axis, keepdims=True)


_SOFTMAX = [
    case(f"{fn.__name__}_{d}", "a b s",
         lambda x, fn=fn, d=d: fn(x, dim(d)),
         lambda x, oracle=oracle, axis=axis: oracle(x, axis), dtypes=FLOATS)
    for fn, oracle in [
        (mtf.softmax, lambda x, axis: np.exp(_log_softmax(x, axis))),
        (mtf.log_softmax, _log_softmax),
    ]
    for axis, d in enumerate(["a", "b"])
]

_TOP = [
    case(f"top_{k}_of_{d}", "a b s/distinct",
         lambda x, k=k, d=d: mtf.top_k(x, dim(d), mtf.Dimension("top", k)),
         lambda x, k=k, axis=axis: _top_k(x, axis, k))
    for k in (1, 3, 6) for axis, d in enumerate(["a", "b"])
]


def _top_k(x, axis, k):
    x = np.moveaxis(x, axis, -1)
    # Stable, so that equal elements stay in the order of their indices.
    order = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    return [np.take_along_axis(x, order, -1), order.astype(np.int32)]


_REDUCTIONS = [c for name in _FNS for c in _reductions(name)] + _TRUTH + _SOFTMAX + _TOP + [
    case("reduce_max_ties", "a b/ties", lambda x: mtf.reduce_max(x, reduced_dim=dim("b")),
         lambda x: x.max(1),
         # Each of several largest elements has the whole gradient.
         surrogate=lambda x, at: (x * (at[0] == at[0].max(1, keepdims=True))).sum(1)),
    case("reduce_first_bool", "a b/bool", lambda x: mtf.reduce_first(x, dim("b")),
         lambda x: x[:, 0], thorough=False),
    case("reduce_first", "a b s", lambda x: mtf.reduce_first(x, dim("b")), lambda x: x[:, 0],
         dtypes=ALL),
    case("reduce_sum_one_dimension", "b", lambda x: mtf.reduce_sum(x, reduced_dim=dim("b")),
         np.sum),
    case("sin_of_sum", "a b", lambda x: mtf.sin(mtf.reduce_sum(x, reduced_dim=dim("b"))),
         lambda x: np.sin(x.sum(1))),
    case("softplus_of_einsum", "a b, b c", lambda x, y: mtf.softplus(mtf.einsum([x, y])),
         lambda x, y: np.logaddexp(x @ y, 0)),
    case("variance", "a b", lambda x: mtf.reduce_mean(
        mtf.square(x - mtf.reduce_mean(x, output_shape=shape("a"))), output_shape=shape("a")),
        lambda x: x.var(1)),
    case("sum_used_twice", "a b",
         lambda x: (lambda y: [mtf.exp(y * 0.1) + y, mtf.reduce_sum(y)])(
             mtf.reduce_sum(x, output_shape=shape("b"))),
         lambda x: [np.exp(x.sum(0) * 0.1) + x.sum(0), x.sum()]),
    case("logsumexp", "a b", lambda x: mtf.reduce_logsumexp(x, dim("b")),
         lambda x: special.logsumexp(x, 1), dtypes=FLOATS),
    case("logsumexp_large", "a b", lambda x: mtf.reduce_logsumexp(x * 100.0, dim("b")),
         lambda x: special.logsumexp(x * 100, 1)),
    case("logsumexp_extra_number", "a b",
         lambda x: mtf.reduce_logsumexp(x, dim("b"), extra_logit=0.5),
         lambda x: _logsumexp_extra(x, 0.5)),
    case("logsumexp_extra_tensor", "a b, a",
         lambda x, e: mtf.reduce_logsumexp(x, dim("b"), extra_logit=e), _logsumexp_extra,
         grads=(0,)),
    case("softmax_extra_number", "a b", lambda x: mtf.softmax(x, dim("b"), extra_logit=0.0),
         lambda x: np.exp(x - _logsumexp_extra(x, 0.0)[:, None])),
    case("log_softmax_extra_tensor", "a b, a",
         lambda x, e: mtf.log_softmax(x, dim("b"), extra_logit=e),
         lambda x, e: x - _logsumexp_extra(x, e)[:, None], grads=(0,)),
    case("top_k_ties", "a b/ties", lambda x: mtf.top_k(x, dim("b"), mtf.Dimension("top", 5)),
         lambda x: _top_k(x, 1, 5), grads=()),
    case("top_1", "a b/distinct", lambda x: mtf.top_1(x, dim("b")),
         lambda x: [x.max(1), x.argmax(1)]),
    case("top_1_ties", "a b/ties", lambda x: mtf.top_1(x, dim("b")),
         lambda x: [x.max(1), x.argmax(1)], grads=()),
    case("argmax", "a b/distinct", lambda x: mtf.argmax(x, dim("a")), lambda x: x.argmax(0),
         dtypes=ALL),
    case("argmax_of_monotonic", "a b",
         lambda x: [mtf.argmax(y, dim("b")) for y in (mtf.relu(-mtf.abs(x)), mtf.sign(x))],
         lambda x: [np.zeros(x.shape[:1]), np.sign(x).argmax(1)], grads=()),
    case("nth_largest", "a b/distinct",
         lambda x: [mtf.nth_largest_element(x, n, dim("b")) for n in (0, 2)],
         lambda x: [np.sort(x, 1)[:, -1], np.sort(x, 1)[:, -3]]),
    case("nth_smallest", "a b/distinct",
         lambda x: [mtf.nth_smallest_element(x, n, dim("b")) for n in (0, 3)],
         lambda x: [np.sort(x, 1)[:, 0], np.sort(x, 1)[:, 3]]),
    case("broadcast", "b", lambda x: mtf.broadcast(x, shape("a b c")),
         lambda x: np.broadcast_to(x[None, :, None], (8, 16, 24)), dtypes=ALL),
    case("broadcast_permuted", "a b", lambda x: mtf.broadcast(x, shape("b s a")),
         lambda x: np.broadcast_to(x.T[:, None, :], (16, 4, 8)), dtypes=ALL),
    case("broadcast_scalar", "", lambda x: mtf.broadcast(x, shape("a b")),
         lambda x: np.broadcast_to(x, (8, 16))),
    case("broadcast_lazy", "a b",
         lambda x: mtf.broadcast(mtf.reduce_sum(x, output_shape=shape("b")), shape("c b")),
         lambda x: np.broadcast_to(x.sum(0), (24, 16))),
]


# -- convolutions


# (name, image, filter, stride, padding, zeros on each side)
_CONV2D = [
    ("same", "n h w d", "fh:3 fw:3 d f", 1, "SAME", 1),
    ("valid", "n h w:5 d", "fh:3 fw:3 d f", 1, "VALID", 0),
    ("stride", "n h:7 w:7 d", "fh:3 fw:3 d f", 2, "VALID", 0),
    ("by_einsum", "n h w d", "fh:1 fw:1 d f", 1, "SAME", 0),
]

_CONVOLUTIONS = [
    case(f"conv2d_{name}", [image, kernel],
         lambda x, f, s=s, how=how: mtf.Conv2dOperation(x, f, [1, s, s, 1], how).outputs[0],
         lambda x, f, s=s, n=n: convolved(x, f, (s, s), [(n, n), (n, n)]), tolerance=3e-5)
    for name, image, kernel, s, how, n in _CONV2D
] + [
    case(f"{name}_pool", f"n h w d/{kind}",
         lambda x, name=name: mtf.PoolOperation(
             x, (2, 2), (2, 2), f"{name.upper()}_2D").outputs[0],
         lambda x, fn=fn: fn(x.reshape(8, 3, 2, 2, 2, 8), (2, 4)))
    for name, kind, fn in [("max", "distinct", np.max), ("avg", "", np.mean)]
]


# -- Fourier transforms


_fft = np.fft
_signal = mtf.signal


def _smooth(x):
    """Multiplies the frequencies of x by a real function of them, there and back again."""
    k = _signal.fftn(x, dims("a s"), dims("k:8 l:4"))
    square = _signal.fftfreq(x.mesh, dim("k:8")) * _signal.fftfreq(x.mesh, dim("l:4"))
    weights = mtf.cast(mtf.exp(square * -3.0), x.dtype)
    return _signal.ifftn(k * weights, dims("k:8 l:4"), dims("a s"))


def _smooth_oracle(x):
    weights = np.exp(-3 * np.outer(_fft.fftfreq(8), _fft.fftfreq(4)))
    return _fft.ifftn(_fft.fftn(x, axes=[0, 2]) * weights[:, None], axes=[0, 2])


def _there_and_back(x, d, new):
    """Halves the squares of the frequencies of a real signal; its dimension gets a new name."""
    y = _signal.rfft(x, d)
    return _signal.irfft(y * 0.5 * y, y.shape.get_dim_by_name(f"{d.name}_frequency"), new)


def _there_and_back_oracle(x, axis):
    y = _fft.rfft(x, axis=axis)
    return _fft.irfft(y * 0.5 * y, x.shape[axis], axis)


def _frequencies(x):
    n, v = dims("n v")
    return [
        x * _signal.fftfreq(x.mesh, n, 0.5),
        _signal.fftshift(_signal.fftfreq(x.mesh, n)) * 2.0,
        _signal.fftfreq(x.mesh, v) * 2.0,
        _signal.rfftfreq(x.mesh, n, 0.25),
        _signal.rfftfreq(x.mesh, v, new_dim=dim("w:3")),
    ]


_TRANSFORMS = [
    case("fft", "a s/complex", lambda x: _signal.fft(x, dim("a")), lambda x: _fft.fft(x, axis=0),
         dtypes=WIDE),
    case("fft_last_of_three", "a v s/complex", lambda x: _signal.fft(x, dim("s"), dim("k:4")),
         lambda x: _fft.fft(x, axis=2)),
    case("fft_alone", "a/complex", lambda x: _signal.fft(x, dim("a")) * 2.0,
         lambda x: _fft.fft(x) * 2),
    case("ifft", "s a/complex", lambda x: _signal.ifft(x, dim("a"), dim("k:8")),
         lambda x: _fft.ifft(x, axis=1), dtypes=WIDE),
    case("fft_of_sum", "a b s/complex",
         lambda x: _signal.fft(mtf.reduce_sum(x, reduced_dim=dim("b")), dim("a")),
         lambda x: _fft.fft(x.sum(1), axis=0)),
    case("rfft", "a s", lambda x: _signal.rfft(x, dim("a")), lambda x: _fft.rfft(x, axis=0),
         dtypes=WIDE),
    case("rfft_odd", "s v a", lambda x: _signal.rfft(x, dim("v"), dim("k:3")),
         lambda x: _fft.rfft(x, axis=1)),
    case("irfft", "h:5 s/complex", lambda x: _signal.irfft(x, dim("h:5"), dim("a")),
         lambda x: _fft.irfft(x, 8, 0), dtypes=WIDE),
    case("irfft_odd", "s k/complex", lambda x: _signal.irfft(x, dim("k"), dim("v")),
         lambda x: _fft.irfft(x, 5, 1)),
    case("rfft_there_and_back", "a s", lambda x: _there_and_back(x, dim("a"), dim("d")),
         lambda x: _there_and_back_oracle(x, 0)),
    case("fft3d", "a n s/complex", lambda x: _signal.fft3d(x, dims("a n s")),
         lambda x: _fft.fftn(x)),
    case("fft3d_renamed", "e a n s/complex",
         lambda x: _signal.fft3d(x, dims("a n s"), dims("f d w")),
         lambda x: _fft.fftn(x, axes=[1, 2, 3]), dtypes=WIDE, thorough=False),
    case("ifft3d", "a n s/complex", lambda x: _signal.ifft3d(x, dims("s a n"), dims("w d f")),
         lambda x: _fft.ifftn(x)),
    # TensorFlow's functions transform up to three dimensions at once.
    case("fftn_of_four", "w n k s/complex", lambda x: _signal.fftn(x, dims("w n k s")),
         lambda x: _fft.fftn(x), thorough=False),
    # v has a size that no mesh divides: it is padded where it is split for the time of a transform.
    case("fft_padded", "a v n/complex", lambda x: _signal.fftn(x, dims("a n")),
         lambda x: _fft.fftn(x, axes=[0, 2])),
    case("fft_smooth", "a v s/complex", _smooth, _smooth_oracle),
    case("fft_frequencies", "n s", _frequencies,
         lambda x: [x * _fft.fftfreq(8, 0.5)[:, None], _fft.fftshift(_fft.fftfreq(8)) * 2,
                    _fft.fftfreq(5) * 2, _fft.rfftfreq(8, 0.25), _fft.rfftfreq(5)]),
    case("fftshift", "a v/complex", lambda x: [_signal.fftshift(x), _signal.fftshift(x, dim("v"))],
         lambda x: [_fft.fftshift(x), _fft.fftshift(x, 1)]),
    case("ifftshift", "a v/complex",
         lambda x: [_signal.ifftshift(x), _signal.ifftshift(x, dims("a"))],
         lambda x: [_fft.ifftshift(x), _fft.ifftshift(x, 0)]),
]


CASES = [*_PRODUCTS, *_REDUCTIONS, *_CONVOLUTIONS, *_TRANSFORMS]
