"""Cases of Fourier transforms."""

import numpy as np

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.cases.table import WIDE, case, dim, dims

__all__ = ["CASES"]


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


CASES = [
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
    case("fftn_of_four", "w n k s/complex", lambda x: _signal.fftn(x, dims("w n k s")),
         lambda x: _fft.fftn(x), thorough=False),
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
