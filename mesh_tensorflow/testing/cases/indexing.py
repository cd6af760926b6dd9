"""One-hot, gather, cumulative sums, ranges, and pooling along one dimension."""

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.cases.table import ALL, FLOATS, case, dim, shape

__all__ = ["CASES"]


def _one_hot(indices, depth, on_value=1.0, off_value=0.0):
    hit = indices[..., None] == np.arange(depth)
    return np.where(hit, on_value, off_value)


def _gather(weights, indices):
    """Gathers entries of axis 0 of the weights; zeros where the index is out of range."""
    inside = (indices >= 0) & (indices < weights.shape[0])
    taken = weights[np.where(inside, indices, 0)]
    return taken * inside.reshape(inside.shape + (1,) * (weights.ndim - 1))


def _entries(weights, indices, out):
    """Gathers as the operation for large tables does."""
    return mtf.GatherOperation(weights, indices, dim("b"), shape(out)).outputs[0]


def _row_sums(rows, indices, size=16):
    """Adds rows to the entries of their indices; those out of range are left out."""
    table = np.zeros((size, *rows.shape[indices.ndim:]), rows.dtype)
    inside = (indices >= 0) & (indices < size)
    np.add.at(table, indices[inside], rows[inside])
    return table


def _add_rows(rows, indices, table):
    """Adds rows as the gradient of a gather from a large table does."""
    return mtf.GatherGradientOperation(rows, indices, dim("b"), shape(table)).outputs[0]


def _exclusive(x):
    return np.cumsum(x, 1) - x


CASES = [
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
