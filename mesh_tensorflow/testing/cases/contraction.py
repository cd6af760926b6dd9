"""Einsum and matmul in all forms."""

import numpy as np

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.cases.table import ALL, FLOATS, case, dims, shape

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


CASES = [
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
         lambda q, k, v: np.einsum("nag,ngc->nac", _softmax(q @ k.swapaxes(1, 2) * 0.25), v)),
]


def _softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
