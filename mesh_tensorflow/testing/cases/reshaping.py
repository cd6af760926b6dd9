"""Reshapes: merging, splitting, relabeling, transposing, renaming."""

import numpy as np

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.cases.table import ALL, FLOATS, case, dim, dims, shape

__all__ = ["CASES"]


def _reshape(name, inputs, new, **kwargs):
    new = shape(new)
    sizes = new.to_integer_list
    return case(f"reshape_{name}", inputs, lambda x: mtf.reshape(x, new) * 2,
                lambda x: x.reshape(sizes) * 2, **kwargs)


CASES = [
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
