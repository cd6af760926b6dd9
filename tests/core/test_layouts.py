"""Layout rules, tensor layouts, processor numbers."""

import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow._core.errors import mesh_shapes_that_fit
from mesh_tensorflow._core.layout import shifted_sources

MESH = mtf.convert_to_shape("x:2,y:4")
A, B, C = mtf.Dimension("a", 8), mtf.Dimension("b", 12), mtf.Dimension("c", 3)


@pytest.mark.slips
@pytest.mark.parametrize(
    "rules",
    [
        "a:x,b:y",
        "a:x;b:y",
        " b:y a:x",
        [("a", "x"), ("b", "y")],
        {("a", "x"), ("b", "y")},
        mtf.LayoutRules([("b", "y"), ("a", "x")]),
        "a:x,b:y,a:x",
        "a:x,b:y,q:z",
    ],
)
def test_tensor_layout(rules):
    rules = mtf.convert_to_layout_rules(rules)
    layout = rules.tensor_layout([C, B, A], MESH)
    assert layout == mtf.TensorLayout([None, 1, 0])
    assert rules.tensor_layout([A], "y:2").is_fully_replicated
    assert rules.tensor_dimension_to_mesh_axis(B, MESH) == 1
    assert rules.tensor_dimension_to_mesh_axis(C, MESH) is None


def test_rules():
    rules = mtf.convert_to_layout_rules("b:y,a:x,c:y,d:z")
    assert repr(rules) == "LayoutRules{a:x, b:y, c:y, d:z}"
    assert rules.mesh_dimension_name_to_tensor_dimension_names("y") == ["b", "c"]
    assert rules.mesh_dimension_name_to_tensor_dimension_names("q") == []
    assert rules.unknown_mesh_dimensions(MESH) == ["z"]
    assert mtf.convert_to_layout_rules(rules) is rules
    for empty in ("", [], {}):
        assert repr(mtf.convert_to_layout_rules(empty)) == "LayoutRules{}"


def test_tensor_layout_object():
    layout = mtf.TensorLayout([None, 1, 0])
    assert layout.tensor_axis_to_mesh_axis == (None, 1, 0)
    assert layout.mesh_axis_to_tensor_axis(3) == (2, 1, None)
    assert not layout.is_fully_replicated and mtf.TensorLayout([None]).is_fully_replicated
    assert list(layout) == [None, 1, 0] and layout[1] == 1 and len(layout) == 3
    assert layout != mtf.TensorLayout([None, 1]) and layout != (None, 1, 0)
    assert repr(layout) == "TensorLayout(None, 1, 0)"
    with pytest.raises(TypeError):
        hash(layout)


def test_sizes_of_parts():
    assert mtf.tensor_dim_to_mesh_dim_size("a:y", "x:2,y:4", A) == 4
    assert mtf.tensor_dim_to_mesh_dim_size("b:y", "x:2,y:4", A) == 1
    assert mtf.tensor_dim_to_size_per_split("a:y", "x:2,y:4", A) == 2
    assert mtf.tensor_dim_to_size_per_split("", "x:2,y:4", A) == 8


def test_processor_numbers_are_row_major():
    mesh = mtf.convert_to_shape("x:2,y:3,z:4")
    for pnum, expected in enumerate(np.ndindex(2, 3, 4)):
        assert tuple(mtf.pnum_to_processor_coordinates(mesh, pnum)) == expected
        assert mtf.processor_coordinates_to_pnum(mesh, expected) == pnum


@pytest.mark.parametrize("group_dims", [[], [0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]])
def test_processor_groups(group_dims):
    mesh = mtf.convert_to_shape("x:2,y:3,z:4")
    numbers = np.arange(24).reshape(2, 3, 4)
    others = [d for d in range(3) if d not in group_dims]
    size = int(np.prod([numbers.shape[d] for d in group_dims]))
    expected = numbers.transpose(others + group_dims).reshape(-1, size)
    groups = mtf.processor_groups(mesh, group_dims)
    assert groups == expected.tolist()
    for number, group in enumerate(groups):
        assert {mtf.pnum_to_group(mesh, group_dims, p) for p in group} == {number}


@pytest.mark.parametrize(
    "size, offset, wrap, expected",
    [
        (4, 1, False, [None, 0, 1, 2]),
        (4, 1, True, [3, 0, 1, 2]),
        (4, -1, False, [1, 2, 3, None]),
        (4, -6, True, [2, 3, 0, 1]),
        (4, 9, False, [None] * 4),
        (3, 0, False, [0, 1, 2]),
    ],
)
def test_shifted_sources(size, offset, wrap, expected):
    assert shifted_sources(size, offset, wrap) == expected


def test_mesh_shapes_that_fit():
    assert mesh_shapes_that_fit(mtf.convert_to_shape("x:2,y:4").dims, 6) == [
        "x:2,y:3",
        "x:1,y:6",
        "x:3,y:2",
        "x:6,y:1",
    ]
    assert mesh_shapes_that_fit([], 6) == []
    assert len(mesh_shapes_that_fit(mtf.convert_to_shape("x:2,y:4,z:8").dims, 64)) == 8
