"""A few convolutions and poolings; the tests of the layers cover the rest."""

import numpy as np

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.cases.table import case

__all__ = ["CASES"]


def _conv(x, f, stride=1):
    """X [n, h, w, i], f [fh, fw, i, o]; no padding."""
    fh, fw = f.shape[:2]
    windows = np.lib.stride_tricks.sliding_window_view(x, (fh, fw), axis=(1, 2))
    return np.einsum("nhwiab,abio->nhwo", windows[:, ::stride, ::stride], f)


def _same(x, f):
    return _conv(np.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)]), f)


def _pooled(x, fn):
    n, h, w, c = x.shape
    return fn(x.reshape(n, h // 2, 2, w // 2, 2, c), (2, 4))


_FILTER = "fh:3 fw:3 d f"


def _pool(kind):
    return lambda x: mtf.PoolOperation(x, (2, 2), (2, 2), kind).outputs[0]


CASES = [
    case("conv2d_same", f"n h w d, {_FILTER}",
         lambda x, f: mtf.Conv2dOperation(x, f, [1, 1, 1, 1], "SAME").outputs[0], _same,
         tolerance=3e-5),
    case("conv2d_valid", f"n h w:5 d, {_FILTER}",
         lambda x, f: mtf.Conv2dOperation(x, f, [1, 1, 1, 1], "VALID").outputs[0], _conv,
         tolerance=3e-5),
    case("conv2d_stride", f"n h:7 w:7 d, {_FILTER}",
         lambda x, f: mtf.Conv2dOperation(x, f, [1, 2, 2, 1], "VALID").outputs[0],
         lambda x, f: _conv(x, f, 2), tolerance=3e-5),
    case("conv2d_by_einsum", "n h w d, fh:1 fw:1 d f",
         lambda x, f: mtf.Conv2dOperation(x, f, [1, 1, 1, 1], "SAME").outputs[0], _conv,
         tolerance=3e-5),
    case("max_pool", "n h w d/distinct", _pool("MAX_2D"), lambda x: _pooled(x, np.max)),
    case("avg_pool", "n h w d", _pool("AVG_2D"), lambda x: _pooled(x, np.mean)),
]
