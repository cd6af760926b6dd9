"""Shifts along split and whole dimensions, and halos."""

import numpy as np

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.cases.table import ALL, case, dim

__all__ = ["CASES"]

_OFFSETS = [0, 1, -1, 2, 3, -5, 8, -8, 15, 16, -16, 19, -40]


def _shift(x, offset, axis, wrap):
    if wrap:
        return np.roll(x, offset, axis)
    n = x.shape[axis]
    out = np.zeros_like(x)
    source = np.arange(n) - offset
    inside = (source >= 0) & (source < n)
    moved = np.moveaxis(out, axis, 0)
    moved[inside] = np.moveaxis(x, axis, 0)[source[inside]]
    return out


def _dynamic(x, offsets, wrap):
    return np.stack([_shift(row, int(o), 0, wrap) for row, o in zip(x, offsets)])


def _halo(x, size, wrap, left_only=False):
    """Exchanges halos of blocks along axis 1, with their elements along axis 2."""
    a, blocks, w = x.shape
    flat = x.reshape(a, blocks * w)
    outside = [(0, 0), (size, size)]
    padded = np.pad(flat, outside, mode="wrap") if wrap else np.pad(flat, outside)
    width = w + size if left_only else w + 2 * size
    return np.stack([padded[:, i * w : i * w + width] for i in range(blocks)], 1)


def _halo_case(size, wrap, left_only):
    fn = mtf.left_halo_exchange if left_only else mtf.halo_exchange
    name = f"{fn.__name__}_{size}{'_wrap' if wrap else ''}"
    return case(name, "s n w", lambda x: fn(x, dim("n"), dim("w"), size, wrap=wrap) * 2,
                lambda x: _halo(x, size, wrap, left_only) * 2)


def _one_block(x, size, wrap, left_only=False):
    return _halo(x[:, None], size, wrap, left_only)[:, 0]


CASES = [
    case(f"shift_{o}{'_wrap' if wrap else ''}", "s b",
         lambda x, o=o, wrap=wrap: mtf.shift(x, o, dim("b"), wrap),
         lambda x, o=o, wrap=wrap: _shift(x, o, 1, wrap), dtypes=ALL if o == 3 else ("float32",))
    for o in _OFFSETS for wrap in (True, False)
] + [
    case("shift_first_dim", "b s", lambda x: mtf.shift(x, -3, dim("b"), wrap=True),
         lambda x: np.roll(x, -3, 0)),
    case("shift_lazy", "a b", lambda x: mtf.shift(
        mtf.reduce_sum(x, output_shape=mtf.Shape([dim("b")])), 2, dim("b"), wrap=False),
        lambda x: _shift(x.sum(0), 2, 0, False)),
    case("dynamic_shift", "a b, a/int", lambda x, o: mtf.dynamic_shift(x, o, dim("b"), wrap=False),
         lambda x, o: _dynamic(x, o, False)),
    case("dynamic_shift_wrap", "a b, a/int",
         lambda x, o: mtf.dynamic_shift(x, o, dim("b"), wrap=True),
         lambda x, o: _dynamic(x, o, True)),
    case("dynamic_shift_scalar_tensor", "a b, /int",
         lambda x, o: mtf.dynamic_shift(x, o, dim("b"), wrap=True),
         lambda x, o: np.roll(x, int(o), 1)),
    case("dynamic_shift_number", "a b", lambda x: mtf.dynamic_shift(x, 3, dim("b"), wrap=False),
         lambda x: _shift(x, 3, 1, False)),
    case("halo_one_block", "s w", lambda x: mtf.halo_exchange(x, None, dim("w"), 3) * 2,
         lambda x: _one_block(x, 3, False) * 2),
    case("halo_one_block_wrap", "s w",
         lambda x: mtf.halo_exchange(x, None, dim("w"), 3, wrap=True) * 2,
         lambda x: _one_block(x, 3, True) * 2),
    case("left_halo_one_block", "s w", lambda x: mtf.left_halo_exchange(x, None, dim("w"), 6) * 2,
         lambda x: _one_block(x, 6, False, True) * 2),
] + [
    _halo_case(size, wrap, left_only)
    for size in (1, 4, 9) for wrap in (True, False) for left_only in (True, False)
]
