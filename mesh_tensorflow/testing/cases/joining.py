"""Concat, split, stack, unstack, slice and pad."""

import numpy as np

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.cases.table import ALL, case, dim

__all__ = ["CASES"]

CASES = [
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
    case("pad_one_side", "a b", lambda x: mtf.pad(x, [0, 5], "a"),
         lambda x: np.pad(x, [(0, 5), (0, 0)])),
    case("slice_of_pad", "a b", lambda x: mtf.slice(mtf.pad(x, [4, 4], "b"), 2, 20, "b"),
         lambda x: np.pad(x, [(0, 0), (2, 2)])),
]
