"""Logical meshes on TPUs: as the classic release lays them, and what it cannot lay."""

import itertools
import json
import pathlib
import sys

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from tensorflow.python.tpu import device_assignment as device_assignment_lib
from tensorflow.python.tpu import topology as topology_lib

from mesh_tensorflow import Shape
from mesh_tensorflow._mesh import tpu_topology
from mesh_tensorflow.simd_mesh_impl import (
    HierarchicalTiling,
    auto_logical_to_physical_tpu,
    physical_shape_3d_from_topology_proto_4d,
)

FIXTURES = json.loads(
    (pathlib.Path(__file__).parents[1] / "oracle/fixtures/topology.json").read_text()
)
FAILED = (str, dict)  # what the classic returns or raises where it fails


def device_assignment(sizes, order):
    """Returns an assignment of one replica to each chip of a topology [x, y, z, 1]."""
    x, y, z, _ = sizes
    chips = [[i, j, k, 0] for k in range(z) for j in range(y) for i in range(x)]
    topology = topology_lib.Topology(mesh_shape=sizes, device_coordinates=np.array([chips]))
    return device_assignment_lib.DeviceAssignment(topology, np.array([[chips[i]] for i in order]))


def laid(case, return_coordinates):
    order = case["order"]
    with flagsaver.flagsaver(fold_xy=case["fold_xy"], logical_cores_per_chip=case["cores"]):
        return auto_logical_to_physical_tpu(
            case["logical"],
            case["physical"],
            return_coordinates,
            order and device_assignment(case["physical"], order),
        )


def name(case):
    return " ".join(str(v) for k, v in case.items() if k in ("logical", "physical", "fold_xy"))


def test_automatic_as_the_classic():
    compared = 0
    for case in FIXTURES["automatic"]:
        if not isinstance(case["coordinates"], FAILED):
            assert laid(case, True) == [tuple(c) for c in case["coordinates"]], name(case)
            compared += 1
        if not isinstance(case["numbers"], FAILED):
            assert laid(case, False) == case["numbers"], name(case)
            compared += 1
    assert compared > 800


def needs_an_assignment(case):
    return "device_assignment unset" in str(case["numbers"])


@pytest.mark.parametrize(
    "case", [c for c in FIXTURES["automatic"] if "same product" in str(c["numbers"])], ids=name
)
def test_products_differ(case):
    with pytest.raises(ValueError, match=r"same product; physical_shape=\[8\] has 8, logical_sh"):
        laid(case, True)


def test_where_the_classic_fails():
    """Every processor gets a place, in order where no tiles fit."""
    seen = 0
    for case in FIXTURES["automatic"]:
        if "same product" in str(case["numbers"]):
            continue
        if isinstance(case["coordinates"], FAILED):
            coordinates = laid(case, True)
            assert len(set(coordinates)) == len(coordinates) == np.prod(case["physical"])
            assert all(isinstance(c, tuple) for c in coordinates)
            seen += 1
        if isinstance(case["numbers"], FAILED) and not needs_an_assignment(case):
            assert sorted(laid(case, False)) == list(range(int(np.prod(case["physical"]))))
            seen += 1
    assert seen > 20


@pytest.mark.parametrize(
    "physical, cores", [([4, 4, 1], 2), ([3, 2, 1], 1), ([4, 4], 2), ([2, 2, 2, 2, 2], 2)]
)
def test_order_is_kept(physical, cores):
    n = int(np.prod(physical))
    with flagsaver.flagsaver(logical_cores_per_chip=cores):
        assert auto_logical_to_physical_tpu([n], physical) == list(range(n))
        assert auto_logical_to_physical_tpu([n], physical, True) == list(
            itertools.product(*map(range, physical))
        )


def test_more_logical_dimensions_than_chips():
    """The cores of a chip are shared by two dimensions, which the classic cannot."""
    with flagsaver.flagsaver(logical_cores_per_chip=4):
        assert auto_logical_to_physical_tpu([2, 2, 2], [2, 1, 4]) == list(range(8))
        assert auto_logical_to_physical_tpu([8, 2], [2, 2, 4], True)[:6] == [
            (0, 0, 0),
            (0, 0, 1),
            (0, 0, 2),
            (0, 0, 3),
            (0, 1, 0),
            (0, 1, 1),
        ]


def test_an_assignment_is_needed():
    with flagsaver.flagsaver(logical_cores_per_chip=1):
        with pytest.raises(ValueError, match=r"assignment unset. Give the device_assignment"):
            auto_logical_to_physical_tpu([4], [2, 2, 1])
        with pytest.raises(ValueError, match=r"4 chips .*its 3 replicas are on 3 chips"):
            auto_logical_to_physical_tpu(
                [4], [2, 2, 1], False, device_assignment([2, 2, 1, 1], [0, 1, 2])
            )


def test_rings_are_rings():
    """One logical dimension on an even torus: each processor is next to the one before."""
    with flagsaver.flagsaver(logical_cores_per_chip=1):
        for rows, columns in itertools.product((2, 4, 8), (2, 4, 8)):
            ring = auto_logical_to_physical_tpu([rows * columns], [rows, columns, 1], True)
            for a, b in zip(ring, ring[1:] + ring[:1]):
                assert sum(abs(i - j) for i, j in zip(a, b)) == 1


def test_folded():
    for case in FIXTURES["folded"]:
        with flagsaver.flagsaver(fold_xy=case["fold_xy"]):
            if isinstance(case["result"], dict):
                with pytest.raises(ValueError, match=r"4d shape \[x, y, z, core\]; got \[4, 4, 2"):
                    physical_shape_3d_from_topology_proto_4d(case["physical"])
            else:
                assert physical_shape_3d_from_topology_proto_4d(case["physical"]) == case["result"]


def test_tiled_as_the_classic():
    compared = 0
    for case in FIXTURES["tiled"]:
        if "result" in case:
            continue
        for kind in (list, tuple):
            tiling = HierarchicalTiling(
                [kind(pair) for pair in case["spec"]], kind(case["physical"])
            )
            assert [list(d) for d in tiling.mesh_shape] == case["mesh_shape"]
            assert tiling.logical_to_physical == case["logical_to_physical"], case
        compared += 1
    assert compared > 40


@pytest.mark.parametrize(
    "spec, physical, text",
    [
        ([["a", None], ["b", [3, 1]]], [4, 4], r"wrong size: .*products=\[3, 4\]\. Along each"),
        ([["a", [2, 2]]], [2, 4], r"physical_shape=\[2, 4\] products=\[2, 2\]"),
        ([["a", [2, 2]], ["b", None]], [2, 2], "only the first tile counts of a spec can be None"),
        ([["a", [2, 2, 2]]], [2, 2], r"products=\[2, 2, 2\]"),
        ([], [2, 2], r"products=\[1, 1\]"),
    ],
)
def test_tiles_that_do_not_fit(spec, physical, text):
    with pytest.raises(ValueError, match=text):
        HierarchicalTiling(spec, physical)


def test_missing_tile_counts_are_one():
    tiling = HierarchicalTiling([["a", [2, 2]]], [2, 2, 1])
    assert tiling.mesh_shape == Shape([("a", 4)]) and tiling.logical_to_physical == [0, 1, 3, 2]
    tiling = HierarchicalTiling([["a", [2]], ["b", [1, 2, 1]]], [2, 2])
    assert tiling.logical_to_physical == [0, 1, 2, 3]


def test_spec_to_mesh_shape():
    to_shape = HierarchicalTiling.spec_to_mesh_shape
    assert to_shape([["a", None], ["b", [2, 2]]], 16) == Shape([("a", 4), ("b", 4)])
    assert to_shape([["a", [2, 2, 1]]], 4) == Shape([("a", 4)])
    with pytest.raises(ValueError, match=r"has 4, num_processors=8. Change its tile counts"):
        to_shape([["a", [2, 2]]], 8)


def test_flags():
    help_text = flags.FLAGS.module_help("mesh_tensorflow.simd_mesh_impl")
    assert "--[no]fold_xy" in help_text and "--logical_cores_per_chip" in help_text
    assert flags.FLAGS["fold_xy"].default is False
    assert flags.FLAGS["logical_cores_per_chip"].default == 2


@pytest.fixture
def others(monkeypatch):
    """Flags of a script that has a flag of our name and was not parsed yet."""
    own = flags.FlagValues()
    flags.DEFINE_integer("logical_cores_per_chip", 4, "", flag_values=own)
    monkeypatch.setattr(flags, "FLAGS", own)
    monkeypatch.setattr(
        sys, "argv", ["script", "--logical_cores_per_chip=1", "--fold_xy", "-x", "--unknown"]
    )
    tpu_topology._define_flags(own)
    return own


def test_flags_before_the_command_line_is_parsed(others):
    assert tpu_topology.flag_value("logical_cores_per_chip") == 1
    assert tpu_topology.flag_value("fold_xy") is True
    assert not others.is_parsed() and others["logical_cores_per_chip"].value == 4


def test_flags_set_or_parsed(others):
    others.logical_cores_per_chip = 8
    assert tpu_topology.flag_value("logical_cores_per_chip") == 8
    others(["script"])
    assert tpu_topology.flag_value("logical_cores_per_chip") == 8
    assert tpu_topology.flag_value("fold_xy") is False


def test_shapes_of_topologies():
    """Their integers are NumPy's."""
    shape = np.array([2, 2, 1, 2], np.int32)
    expected = auto_logical_to_physical_tpu([4, 2], [2, 2, 1, 2])
    assert auto_logical_to_physical_tpu(np.array([4, 2]), shape) == expected
