"""Cases that move elements: reshapes, joins, shifts, indices."""

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.cases.table import ALL, FLOATS, case, dim, dims, shape

__all__ = ["CASES"]


def _reshape(name, inputs, new, **kwargs):
    new = shape(new)
    sizes = new.to_integer_list
    return case(f"reshape_{name}", inputs, lambda x: mtf.reshape(x, new) * 2,
                lambda x: x.reshape(sizes) * 2, **kwargs)


_RESHAPES = [
    # Each of these is another way for a layout: dimensions stay whole, are cut, or have to be gathered.
    _reshape("merge", "a b s", "p:128 s", dtypes=ALL),
    _reshape("merge_all", "a b s", "p:512"),
    _reshape("merge_keeps_first_name", "a b s", "a:128 s"),
    _reshape("split", "p:128 s", "a b s", dtypes=ALL),
    _reshape("split_keeps_name", "a:128 s", "a b s"),
    _reshape("split_inner_keeps_name", "b:128 s", "a b s"),
    _reshape("relabel", "a b", "b:8 a:16"),
    _reshape("relabel_equal_sizes", "a d", "d a"),
    _reshape("relabel_three", "a d f", "f a d"),
    _reshape("other_boundaries", "a b c", "b:16 p:24 q:8"),
    _reshape("other_boundaries_same_name", "a:8 b:16", "a:32 b:4"),
    _reshape("with_ones", "a b", "a o:1 b z:1"),
    _reshape("rename", "a b", "p:8 b"),
    _reshape("rename_last", "a b", "a p:16", dtypes=ALL),
    _reshape("to_scalar_like", "o:1", ""),
    case("rename_dimension", "a b", lambda x: mtf.rename_dimension(x, "b", "c") * 2,
         lambda x: x * 2, dtypes=ALL),
    case("transpose_2d", "a b", lambda x: mtf.transpose(x, shape("b a")), np.transpose,
         dtypes=ALL),
    case("transpose_3d", "a b s", lambda x: mtf.transpose(x, shape("s a b")),
         lambda x: x.transpose(2, 0, 1), dtypes=ALL),
    case("replace_one_by_two", "a b s",
         lambda x: mtf.replace_dimensions(x, dim("b"), dims("p:4 q:4")) * 3,
         lambda x: x.reshape(8, 4, 4, 4) * 3),
    case("replace_two_by_one", "a b s",
         lambda x: mtf.replace_dimensions(x, dims("a b"), dim("p:128")) * 3,
         lambda x: x.reshape(128, 4) * 3),
    case("anonymize", "a b", lambda x: mtf.anonymize(x) * 3, lambda x: x * 3),
    case("reshape_lazy_sum", "a b c",
         lambda x: mtf.sin(
             mtf.reshape(mtf.reduce_sum(x, output_shape=shape("b c")), shape("c:16 p:24"))),
         lambda x: np.sin(x.sum(0))),
    case("reshape_lazy_merge", "n a b, b c",
         lambda x, w: mtf.tanh(mtf.reshape(mtf.einsum([x, w], shape("n a c")), shape("p:64 c"))),
         lambda x, w: np.tanh((x @ w).reshape(64, 24))),
    case("split_sum", "a b",
         lambda x: mtf.sin(mtf.rename_dimension(mtf.reduce_sum(x, reduced_dim=dim("a")), "b", "p")),
         lambda x: np.sin(x.sum(0)), dtypes=FLOATS),
    case("rename_lazy_and_used", "a b", lambda x: (lambda s: [
        mtf.sin(mtf.rename_dimension(s, "b", "p")), mtf.sin(s)])(
            mtf.reduce_sum(x, reduced_dim=dim("a"))), lambda x: [np.sin(x.sum(0))] * 2),
    case("split_sum_of_two_dims", "a b s, a c b",
         lambda x, w: mtf.tanh(mtf.reshape(mtf.einsum([x, w], shape("s c")), shape("p:4 q:24"))),
         lambda x, w: np.tanh(np.einsum("abs,acb->sc", x, w))),
    case("reshape_there_and_back", "a b",
         lambda x: mtf.reshape(mtf.sin(mtf.reshape(x, shape("b:8 a:16"))), shape("a b")),
         np.sin),
    case("split_heads", "n a g, g b c",
         lambda x, w: mtf.reshape(mtf.einsum([x, w], shape("n a b c")), shape("n a p:384")),
         lambda x, w: np.einsum("nag,gbc->nabc", x, w).reshape(8, 8, 384)),
]


_JOINS = [
    case("concat", "a b, a b:4, a b:6", lambda *xs: mtf.concat(xs, "b") * 2,
         lambda *xs: np.concatenate(xs, 1) * 2, dtypes=ALL),
    case("concat_first_dim", "a b, a:3 b", lambda *xs: mtf.concat(xs, "a"),
         lambda *xs: np.concatenate(xs, 0)),
    case("concat_one", "a b", lambda x: mtf.concat([x], "b") * 2, lambda x: x * 2),
    case("concat_same_twice", "a b", lambda x: mtf.concat([x, x * 2], "b"),
         lambda x: np.concatenate([x, 2 * x], 1)),
    case("split_equal", "a b", lambda x: mtf.split(x, dim("b"), 4), lambda x: np.split(x, 4, 1),
         dtypes=ALL),
    case("split_sizes", "a b", lambda x: mtf.split(x, dim("b"), [3, 5, 8]),
         lambda x: np.split(x, [3, 8], 1)),
    case("split_partly_used", "a b", lambda x: mtf.split(x, dim("b"), 4)[2] * 3,
         lambda x: x[:, 8:12] * 3),
    case("split_into_one", "a b", lambda x: mtf.split(x, dim("b"), 1)[0] * 3, lambda x: 3 * x),
    case("stack_first", "a b, a b, a b", lambda *xs: mtf.stack(xs, "new"),
         lambda *xs: np.stack(xs), dtypes=ALL),
    case("stack_middle", "a b, a b", lambda *xs: mtf.stack(xs, "new", axis=1),
         lambda *xs: np.stack(xs, 1)),
    case("stack_last", "a b, a b", lambda *xs: mtf.stack(xs, "new", axis=2),
         lambda *xs: np.stack(xs, 2)),
    case("stack_one", "a", lambda x: mtf.stack([x], "new"), lambda x: x[None]),
    case("unstack_first", "k a b", lambda x: mtf.unstack(x, dim("k")), list, dtypes=ALL),
    case("unstack_last", "a b k", lambda x: mtf.unstack(x, dim("k")),
         lambda x: list(np.moveaxis(x, 2, 0))),
    case("unstack_partly_used", "a k b", lambda x: mtf.exp(mtf.unstack(x, dim("k"))[1]),
         lambda x: np.exp(x[:, 1])),
    case("unstack_and_stack", "a k b",
         lambda x: mtf.stack(mtf.unstack(x, dim("k"))[::-1], "k", axis=1), lambda x: x[:, ::-1]),
    case("slice", "a b", lambda x: mtf.slice(x, 3, 7, "b"), lambda x: x[:, 3:10], dtypes=ALL),
    case("slice_whole", "a b", lambda x: mtf.slice(x, 0, 8, "a") * 2, lambda x: x * 2),
    case("slice_to_end", "a b", lambda x: mtf.slice(x, 5, 11, "b"), lambda x: x[:, 5:]),
    case("pad", "a b", lambda x: mtf.pad(x, [2, 3], "b"), lambda x: np.pad(x, [(0, 0), (2, 3)]),
         dtypes=ALL),
    case("pad_reflect", "a b", lambda x: mtf.pad(x, [3, 2], "b", mode="reflect"),
         lambda x: np.pad(x, [(0, 0), (3, 2)], mode="reflect")),
    case("pad_edge", "a b", lambda x: mtf.pad(x, [2, 6], "a", mode="edge"),
         lambda x: np.pad(x, [(2, 6), (0, 0)], mode="edge"), dtypes=ALL),
    case("slice_strided", "a b", lambda x: mtf.slice(x, 1, 4, "b", stride=3),
         lambda x: x[:, 1:11:3], dtypes=ALL),
    case("slice_strided_to_end", "a b s", lambda x: mtf.slice(x, 0, -1, "a", stride=2),
         lambda x: x[::2]),
    case("reverse", "a b s", lambda x: mtf.reverse(x, dim("b")), lambda x: x[:, ::-1], dtypes=ALL),
    case("sort", "a b/distinct", lambda x: mtf.sort(x, dim("b")), lambda x: np.sort(x, 1)),
    case("sort_descending", "a b/distinct", lambda x: mtf.sort(x, dim("a"), descending=True),
         lambda x: -np.sort(-x, 0)),
    case("argsort", "a b/ties", lambda x: mtf.argsort(x, dim("b")),
         lambda x: np.argsort(x, 1, kind="stable"), grads=()),
    case("pad_one_side", "a b", lambda x: mtf.pad(x, [0, 5], "a"),
         lambda x: np.pad(x, [(0, 5), (0, 0)])),
    # A slice of more than the padding, beginning in it.
    case("slice_of_pad", "a b", lambda x: mtf.slice(mtf.pad(x, [4, 4], "b"), 2, 20, "b"),
         lambda x: np.pad(x, [(0, 0), (2, 2)])),
]


# Along b, of size 16: within a slice, by whole slices, over several of them, and beyond the end.
_OFFSETS = [0, 1, -1, 2, 3, -5, 8, -8, 15, 16, -16, 19, -40]


def _shift(x, offset, axis, wrap):
    if wrap:
        return np.roll(x, offset, axis)
    n = x.shape[axis]
    out = np.zeros_like(x)
    # shifted[i] = x[i - offset] where there is such an element, else 0.
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
    # Blocks in a row are one line, of which each takes a window that is wider than itself.
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


_SHIFTS = [
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
    case("dynamic_shift_bool", "a b/bool, a/int",
         lambda x, o: mtf.dynamic_shift(x, o, dim("b"), wrap=True),
         lambda x, o: np.stack([np.roll(r, n) for r, n in zip(x, o)]), thorough=False),
    case("dynamic_shift_wrap", "a b, a/int",
         lambda x, o: mtf.dynamic_shift(x, o, dim("b"), wrap=True),
         lambda x, o: _dynamic(x, o, True)),
    # One offset for all rows, known only when the program runs.
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


def _one_hot(indices, depth, on_value=1.0, off_value=0.0):
    hit = indices[..., None] == np.arange(depth)
    return np.where(hit, on_value, off_value)


def _gather(weights, indices):
    """Gathers entries of axis 0 of the weights; zeros where the index is out of range."""
    inside = (indices >= 0) & (indices < weights.shape[0])
    # NumPy would count negative indices from the end.
    rows = weights[np.where(inside, indices, 0)]
    return rows * inside.reshape(inside.shape + (1,) * (weights.ndim - 1))


def _entries(weights, indices, out):
    """Gathers as the operation for large tables does."""
    # Called by itself: mtf.gather takes it for tables that are larger than those of cases.
    return mtf.GatherOperation(weights, indices, dim("b"), shape(out)).outputs[0]


def _row_sums(rows, indices):
    """Adds rows to the entries of their indices; those out of range are left out."""
    table = np.zeros((16, *rows.shape[indices.ndim:]), rows.dtype)
    inside = (indices >= 0) & (indices < len(table))
    # Of several rows with one index, `table[indices] += rows` would add only the last.
    np.add.at(table, indices[inside], rows[inside])
    return table


def _add_rows(rows, indices, table):
    """Adds rows as the gradient of a gather from a large table does."""
    # The rows are an input like others here, so that also the gradient of this gradient is tried.
    return mtf.GatherGradientOperation(rows, indices, dim("b"), shape(table)).outputs[0]


def _exclusive(x):
    return np.cumsum(x, 1) - x


_INDICES = [
    case("one_hot", "a/below20", lambda i: mtf.one_hot(i, dim("b")), lambda i: _one_hot(i, 16)),
    case("one_hot_values", "a f/int",
         lambda i: mtf.one_hot(i, dim("b"), on_value=3, off_value=-1, dtype=tf.int32),
         lambda i: _one_hot(i, 16, 3, -1)),
    case("gather", "b c, a/below16", lambda w, i: mtf.gather(w, i, dim("b")), _gather, dtypes=ALL),
    case("gather_out_of_range", "b c, a f/int", lambda w, i: mtf.gather(w, i, dim("b")), _gather),
    case("gather_beyond", "b c, a/below40", lambda w, i: mtf.gather(w, i, dim("b")), _gather),
    case("gather_number", "b c", lambda w: mtf.gather(w, 5, dim("b")), lambda w: w[5]),
    case("gather_last_dim", "a b, f/below16", lambda w, i: mtf.gather(w, i, dim("b")),
         lambda w, i: _gather(w.T, i)),
    case("gather_output_shape", "b c, a/below16",
         lambda w, i: mtf.gather(w, i, dim("b"), output_shape=shape("c a")),
         lambda w, i: _gather(w, i).T),
    case("gather_shared_dims", "a b c, a f/below16", lambda w, i: mtf.gather(w, i, dim("b")),
         lambda w, i: np.stack([_gather(x, j) for x, j in zip(w, i)])),
    case("gather_bool", "b c/bool, a/int", lambda w, i: mtf.gather(w, i, dim("b")),
         lambda w, i: _gather(w.astype(int), i) != 0),
    case("gather_entries", "b c, a f/below16", lambda w, i: _entries(w, i, "a f c"), _gather,
         dtypes=FLOATS),
    case("gather_entries_out_of_range", "b c, a/int", lambda w, i: _entries(w, i, "a c"), _gather),
    case("gather_entries_beyond", "b c, a/below40", lambda w, i: _entries(w, i, "c a"),
         lambda w, i: _gather(w, i).T),
    case("gather_entries_last", "a b, f/below16", lambda w, i: _entries(w, i, "f a"),
         lambda w, i: _gather(w.T, i)),
    case("gather_entries_inner", "a b s, f/below16", lambda w, i: _entries(w, i, "a f s"),
         lambda w, i: _gather(w.swapaxes(0, 1), i).swapaxes(0, 1)),
    case("gather_entries_number", "b c", lambda w: _entries(
        w, mtf.constant(w.mesh, 5, dtype=tf.int32), "c"), lambda w: w[5]),
    case("row_sums", "a f c, a f/below16", lambda y, i: _add_rows(y, i, "b c"), _row_sums,
         dtypes=FLOATS),
    case("row_sums_out_of_range", "a c, a/int", lambda y, i: _add_rows(y, i, "b c"), _row_sums),
    case("row_sums_beyond", "c a, a/below40", lambda y, i: _add_rows(y, i, "c b"),
         lambda y, i: _row_sums(y.T, i).T),
    case("row_sums_added", "b c, a f c, a f/below16, g c, g/below40",
         lambda t, y, i, z, j: t + _add_rows(y, i, "b c") + _add_rows(z, j, "b c"),
         lambda t, y, i, z, j: t + _row_sums(y, i) + _row_sums(z, j)),
    case("row_sums_added_to_products", "a b, a c, a c, a/below16",
         lambda x, w, y, i: mtf.square(
             _add_rows(y, i, "b c") + mtf.einsum([x, w], shape("b c"))),
         lambda x, w, y, i: np.square(x.T @ w + _row_sums(y, i))),
    case("row_sums_inner", "a f s, f/below16", lambda y, i: _add_rows(y, i, "a b s"),
         lambda y, i: _row_sums(y.swapaxes(0, 1), i).swapaxes(0, 1)),
    case("row_sums_number", "c", lambda y: _add_rows(
        y, mtf.constant(y.mesh, 5, dtype=tf.int32), "b c"),
         lambda y: np.where(np.arange(16)[:, None] == 5, y, 0)),
    case("cumsum", "a b s", lambda x: mtf.cumsum(x, dim("b")), lambda x: np.cumsum(x, 1),
         dtypes=ALL),
    case("cumsum_exclusive", "a b s", lambda x: mtf.cumsum(x, dim("b"), exclusive=True),
         _exclusive),
    case("range_added", "a b", lambda x: x + mtf.range(x.mesh, dim("b"), tf.float32),
         lambda x: x + np.arange(16)),
    case("range_int", "a/int", lambda x: [
        mtf.range(x.mesh, dim("c"), tf.int32), mtf.range(x.mesh, dim("a"), tf.int64)],
        lambda x: [np.arange(24), np.arange(8)]),
    case("causal_mask", "a g", lambda x: mtf.where(
        mtf.less_equal(*(mtf.range(x.mesh, dim(n), tf.int32) for n in "ga")),
        x, 0.0, output_shape=x.shape),
        lambda x: np.tril(x)),
    case("pool_tensor_1d", "a b s", lambda x: mtf.pool_tensor_1d(x, dim("b"), pool_size=2),
         lambda x: x.reshape(8, 8, 2, 4).mean(2)),
    case("pool_tensor_1d_max", "a b s/distinct",
         lambda x: mtf.pool_tensor_1d(x, dim("b"), mtf.reduce_max, pool_size=4),
         lambda x: x.reshape(8, 4, 4, 4).max(2)),
    case("stride_tensor_1d", "a b s", lambda x: mtf.stride_tensor_1d(x, dim("b"), pool_size=4),
         lambda x: x[:, ::4]),
]


CASES = [*_RESHAPES, *_JOINS, *_SHIFTS, *_INDICES]
