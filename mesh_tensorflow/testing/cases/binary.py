"""Binary elementwise functions with every form of broadcasting, and with numbers."""

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.cases.table import ALL, FLOATS, INT, case, on, shape

__all__ = ["CASES"]

# name -> (dimensions of both inputs, of the output, output_shape as given)
_FORMS = {
    "same": ("a b", "a b", "a b", None),
    "suffix": ("a b", "b", "a b", None),
    "prefix": ("a b", "a", "a b", None),
    "subset_first": ("b", "a b c", "a b c", None),
    "middle": ("a c", "a b c", "a b c", None),
    "crossed": ("a b", "b c", "a b c", None),
    "disjoint": ("a", "b", "a b", None),
    "permuted": ("a b", "b a", "a b", None),
    "scalar": ("a b", "", "a b", None),
    "scalar_first": ("", "a b", "a b", None),
    "output_given": ("a b", "b", "b a", "b a"),
    "output_larger": ("a b", "b", "c b a", "c b a"),
    "output_from_disjoint": ("a", "c", "c b a", "c b a"),
}


def _form_case(fn, oracle, form, kind="", second="", **kwargs):
    left, right, out, given = _FORMS[form]
    given = None if given is None else shape(given)
    return case(
        f"{fn.__name__}_{form}",
        [f"{left}/{kind}", f"{right}/{second or kind}"],
        lambda x, y: fn(x, y, output_shape=given),
        on(oracle, left, right, out),
        # Additions may be delayed as partial sums; other functions all lower in the same way.
        thorough=fn is mtf.add or form == "crossed",
        **kwargs,
    )


def _numbers(x):
    """Returns an array of the shape of a Tensor or of an array."""
    sizes = getattr(x.shape, "to_integer_list", x.shape)
    return np.linspace(-1.0, 1.0, x.size).reshape(sizes).round(3)


_COMPARISONS = [
    (mtf.less, np.less),
    (mtf.less_equal, np.less_equal),
    (mtf.greater, np.greater),
    (mtf.greater_equal, np.greater_equal),
    (mtf.equal, np.equal),
    (mtf.not_equal, np.not_equal),
]

_ARITHMETIC = (
    [_form_case(mtf.add, np.add, f, dtypes=ALL) for f in _FORMS]
    + [_form_case(mtf.multiply, np.multiply, f, dtypes=ALL) for f in _FORMS]
    + [_form_case(mtf.sub, np.subtract, f) for f in _FORMS]
    + [_form_case(mtf.maximum, np.maximum, f) for f in _FORMS]
    + [_form_case(mtf.minimum, np.minimum, f) for f in ("same", "suffix", "crossed", "scalar")]
    + [_form_case(mtf.divide, np.divide, f, "", "positive")
       for f in ("same", "suffix", "crossed", "scalar_first", "output_larger")]
    + [_form_case(mtf.floordiv, np.floor_divide, f, "int", "divisor")
       for f in ("same", "suffix", "crossed")]
    + [_form_case(mtf.mod, np.mod, f, "int", "divisor") for f in ("same", "suffix", "crossed")]
    + [_form_case(fn, oracle, f, "ties", dtypes=("float32", "int32"), grads=())
       for fn, oracle in _COMPARISONS for f in ("suffix", "crossed")]
    + [_form_case(fn, oracle, f, "bool")
       for fn, oracle in [(mtf.logical_and, np.logical_and), (mtf.logical_or, np.logical_or)]
       for f in ("same", "crossed", "output_larger")]
)

# (name, on a tensor, on an array, kind, dtypes)
_NUMBERS = [
    ("x+2", lambda x: x + 2, lambda x: x + 2, "", ALL),
    ("2+x", lambda x: 2 + x, lambda x: 2 + x, "", ALL),
    ("x-2", lambda x: x - 2, lambda x: x - 2, "", ALL),
    ("2-x", lambda x: 2 - x, lambda x: 2 - x, "", ALL),
    ("x*2", lambda x: x * 2, lambda x: x * 2, "", ALL),
    ("2*x", lambda x: 2 * x, lambda x: 2 * x, "", ALL),
    ("x/2", lambda x: x / 2, lambda x: x / 2, "", FLOATS),
    ("2/x", lambda x: 2 / x, lambda x: 2 / x, "positive", FLOATS),
    ("-x", lambda x: -x, lambda x: -x, "", ALL),
    ("x//3", lambda x: x // 3, lambda x: x // 3, "", INT),
    ("7//x", lambda x: 7 // x, lambda x: 7 // x, "positive", INT),
    ("x%3", lambda x: x % 3, lambda x: x % 3, "", INT),
    ("7%x", lambda x: 7 % x, lambda x: 7 % x, "positive", INT),
    ("add(2,x)", lambda x: mtf.add(2.0, x), lambda x: 2 + x, "", FLOATS),
    ("sub(2,x)", lambda x: mtf.sub(2.0, x), lambda x: 2 - x, "", FLOATS),
    ("multiply(2,x)", lambda x: mtf.multiply(2.0, x), lambda x: 2 * x, "", FLOATS),
    ("divide(2,x)", lambda x: mtf.divide(2.0, x), lambda x: 2 / x, "positive", FLOATS),
    ("maximum(x,0.5)", lambda x: mtf.maximum(x, 0.5), lambda x: np.maximum(x, 0.5), "", FLOATS),
    ("minimum(0.5,x)", lambda x: mtf.minimum(0.5, x), lambda x: np.minimum(0.5, x), "", FLOATS),
    ("x+numpy", lambda x: x + np.float32(1.5), lambda x: x + 1.5, "", FLOATS),
    ("x*tf", lambda x: x * tf.constant(1.5), lambda x: x * 1.5, "", ("float32",)),
    ("x+tf", lambda x: x + tf.constant(1.5), lambda x: x + 1.5, "", ("float32",)),
    ("add_n", lambda x: mtf.add_n([x, x * 2, x * 3]), lambda x: 6 * x, "", ALL),
    ("not_equal(x,1)", lambda x: mtf.not_equal(x, 1), lambda x: x != 1, "", INT),
]

CASES = (
    _ARITHMETIC
    + [case(name, [f"a b/{kind}"], build, oracle, dtypes=dtypes, thorough=name == "x+2")
       for name, build, oracle, kind, dtypes in _NUMBERS]
    + [
        case("sub_unsigned", "a b/below200, b/below200",
             lambda x, y: mtf.to_int32(mtf.cast(x, tf.uint8) - mtf.cast(y, tf.uint8)),
             lambda x, y: (x - y) % 256),
        case("array_of_its_shape", "a b", lambda x: _numbers(x) * x - _numbers(x),
             lambda x: x * _numbers(x) - _numbers(x)),
        case("maximum_ties", "a b/ties, b/ties", mtf.maximum, on(np.maximum, "a b", "b", "a b"),
             surrogate=lambda x, y, at: np.where(at[0] >= at[1], x, 0) + np.where(
                 at[1] > at[0], y, 0)),
        case("minimum_ties", "a b/ties, b/ties", mtf.minimum, on(np.minimum, "a b", "b", "a b"),
             surrogate=lambda x, y, at: np.where(at[0] <= at[1], x, 0) + np.where(
                 at[1] < at[0], y, 0)),
        case("maximum_of_itself", "a b", lambda x: mtf.maximum(x, x) * mtf.minimum(x, x),
             lambda x: x * x),
        case("where", "a b/bool, a b, b", mtf.where, on(np.where, "a b", "a b", "b", "a b")),
        case("where_mask_smaller", "b/bool, a b, a b", mtf.where,
             on(np.where, "b", "a b", "a b", "a b")),
        case("where_output_given", "b/bool, a, c",
             lambda m, x, y: mtf.where(m, x, y, output_shape=shape("c b a")),
             on(np.where, "b", "a", "c", "c b a")),
        case("where_number", "a b/bool, a b", lambda m, x: mtf.where(m, x, 3.0),
             lambda m, x: np.where(m, x, 3.0)),
        case("where_zero", "a b/bool, a b", lambda m, x: mtf.where(m, x, 0),
             lambda m, x: np.where(m, x, 0)),
        case("binary_op_with_broadcasting", "a b/away, b/away",
             lambda x, y: mtf.binary_op_with_broadcasting(tf.atan2, x, y),
             on(np.arctan2, "a b", "b", "a b"), grads=()),
        case("binary_op_number", "a b", lambda x: mtf.binary_op_with_broadcasting(tf.pow, x, 2.0),
             np.square, grads=()),
        case("sum_of_lazy_sums", "a b, a c",
             lambda x, y: mtf.reduce_sum(x, output_shape=shape("b"))
             + mtf.reduce_sum(mtf.reshape(y, shape("a c")) * 2.0, output_shape=shape("c")),
             lambda x, y: x.sum(0)[:, None] + 2 * y.sum(0)[None, :]),
        case("sum_of_like_lazy_sums", "a b, a b",
             lambda x, y: mtf.reduce_sum(x, output_shape=shape("b"))
             + mtf.reduce_sum(y, output_shape=shape("b")),
             lambda x, y: (x + y).sum(0)),
    ]
)
