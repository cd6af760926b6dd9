"""Dimensions and shapes: algebra, conversions, strings."""

import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow._core.shape import broadcast_shape

D, S = mtf.Dimension, mtf.Shape
A, B, C = D("a", 2), D("b", 3), D("c", 4)


def test_dimension():
    assert A == D("a", 2) == ("a", 2)
    assert A != D("a", 3) and A != D("z", 2)
    assert A.name == "a" and A.size == 2
    assert sorted([B, A]) == [A, B] and {A: 1}[D("a", 2)] == 1
    assert mtf.convert_to_dimension(None) is None
    assert mtf.convert_to_dimension(("a", 2)) == A
    assert isinstance(mtf.convert_to_dimension(("a", 2)), D)


@pytest.mark.parametrize(
    "x",
    [
        S([A, B]),
        [A, B],
        "a:2,b:3",
        [("a", 2), ("b", 3)],
        "a:2;b:3",
        " a:2  b:3 ",
        "a:2. b:3",
        (A, B),
    ],
)
def test_convert_to_shape(x):
    assert mtf.convert_to_shape(x) == S([A, B])


def test_sizes_that_are_filled_in_later():
    """A program's own placeholders, which are no sizes yet."""
    wanted = [mtf.Dimension("a", 2), mtf.Dimension("rest", -1), mtf.Dimension("b", None)]
    assert [d.size for d in wanted] == [2, -1, None] and wanted[1] == ("rest", -1)
    for d, words in zip(wanted[1:], ("cannot have the size -1", "could not convert")):
        for use in (lambda d=d: mtf.Shape([d]), lambda d=d: mtf.convert_to_dimension(d)):
            with pytest.raises(ValueError, match=words):
                use()
    assert mtf.Shape([d._replace(size=3) if d.size in (-1, None) else d for d in wanted]).size == 18


def test_dimensions_without_those_that_come_twice():
    a, b = mtf.Dimension("a", 2), mtf.Dimension("b", 3)
    once = dict.fromkeys([a, b, a])
    assert mtf.convert_to_shape(once) == mtf.Shape(once) == mtf.Shape([a, b])
    assert mtf.zeros(mtf.Mesh(mtf.Graph(), "mesh"), once).shape == mtf.Shape([a, b])
    with pytest.raises(TypeError, match=r"\(dict\) is no shape"):
        mtf.convert_to_shape({"a": 2})


def test_properties():
    s = S([A, B, C])
    assert s.dims == [A, B, C] and s.dims is not s.dims
    assert s.ndims == len(s) == 3 and s.size == 24
    assert s.dimension_names == ["a", "b", "c"] and s.to_integer_list == [2, 3, 4]
    assert s.to_string == repr(s) == "Shape[a=2, b=3, c=4]"
    assert S([]).size == 1 and S([]).to_string == "Shape[]"
    assert mtf.convert_to_shape(None) is None


def test_sequence():
    s = S([A, B, C])
    assert list(s) == [A, B, C] and s[0] == A and s[1:] == [B, C] and s[-1] == C
    assert A in s and D("a", 3) not in s
    assert s == S([A, B, C]) and s != S([B, A, C]) and s != [A, B, C]
    with pytest.raises(TypeError):
        hash(s)


# (expression, value)
ALGEBRA = [
    (lambda: S([A]) + S([B]), S([A, B])),
    (lambda: S([A]) + B, S([A, B])),
    (lambda: S([A]) + [B, C], S([A, B, C])),
    (lambda: A + S([B]), S([A, B])),
    (lambda: [A, B] + S([C]), S([A, B, C])),
    (lambda: S([A, B, C]) - B, S([A, C])),
    (lambda: S([A, B, C]) - [A, C], S([B])),
    (lambda: S([A, B]) - S([C]), S([A, B])),
    (lambda: S([A, B]) - [C], S([A, B])),
    (lambda: S([A, B]) - None, S([A, B])),
    (lambda: S([A, B]).rename_dimension("a", "z"), S([D("z", 2), B])),
    (lambda: S([A, B]).resize_dimension("b", 7), S([A, D("b", 7)])),
    (lambda: S([A, D("a", 5)]).rename_dimension("a", "z"), S([D("z", 2), D("z", 5)])),
    (lambda: mtf.combined_dimension([A, B]), D("a", 6)),
    (lambda: mtf.combined_dimension([A, B], "z"), D("z", 6)),
    (lambda: mtf.anonymous_shape([A, B]), S([D("_anonymous_0", 2), D("_anonymous_1", 3)])),
    (lambda: S([A, B]).get_dim_by_name("b"), B),
    (lambda: S([A, B, C]).cumprod, [1, 2, 6]),
    (lambda: mtf.list_product([2, 3, 4]), 24),
    (lambda: mtf.list_product([]), 1),
    (lambda: mtf.transpose_list_of_lists([[1, 2], [3, 4]]), [[1, 3], [2, 4]]),
    (lambda: mtf.is_subsequence([A, C], [A, B, C]), True),
    (lambda: mtf.is_subsequence([C, A], [A, B, C]), False),
    (lambda: mtf.is_subsequence([], []), True),
]


@pytest.mark.parametrize("expression, value", ALGEBRA)
def test_algebra(expression, value):
    assert expression() == value


def test_algebra_errors():
    with pytest.raises(ValueError, match=r"Shape\[a=2, b=3\] has no c=4"):
        S([A, B]) - C
    with pytest.raises(TypeError, match=r"taken away are Dimensions, .*get_dim_by_name\('a'\)"):
        S([A, B]) - "a"
    with pytest.raises(TypeError):
        S([A]) + (B, C)
    with pytest.raises(ValueError, match="'z' not found"):
        S([A]).resize_dimension("z", 1)


def test_cumprod_to_tensor_axis():
    s = S([A, D("one", 1), B])
    assert s.cumprod == [1, 2, 2]
    assert s.cumprod_to_tensor_axis(2) == 2  # the last such axis
    assert s.cumprod_to_tensor_axis(1) == 0
    assert s.cumprod_to_tensor_axis(6) is None


@pytest.mark.parametrize(
    "first, second, expected",
    [
        ([A, B], [B], [A, B]),
        ([B], [A, B], [A, B]),
        ([A, C], [A, B, C], [A, B, C]),
        ([A, B], [B, C], [A, B, C]),
        ([B, A], [A, B], [B, A]),
        ([], [A], [A]),
        ([A, B], [D("a", 5)], [A, B, D("a", 5)]),
    ],
)
def test_broadcast_shape(first, second, expected):
    assert broadcast_shape(S(first), S(second), None) == S(expected)


def test_verify_no_new_dims():
    mtf.verify_no_new_dims([S([A]), S([B])], S([B, A]))
    with pytest.raises(ValueError, match="c=4"):
        mtf.verify_no_new_dims([S([A])], S([A, C]))
