"""Writes how the classic release lays logical meshes on TPUs, to fixtures/topology.json.

Run with the oracle's Python (see README.md):  python -m oracle.make_topology
"""

import itertools
import json
import os
import random

import classic_shim  # noqa: F401  (first: makes the classic importable)
import numpy as np
from absl import flags
from tensorflow.python.tpu import device_assignment as device_assignment_lib
from tensorflow.python.tpu import topology as topology_lib

from mesh_tensorflow import simd_mesh_impl

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fixtures", "topology.json")


def factorings(n, length):
    """Yields all lists of `length` sizes whose product is n."""
    if length == 1:
        yield [n]
        return
    for d in range(1, n + 1):
        if n % d == 0:
            for rest in factorings(n // d, length - 1):
                yield [d, *rest]


def device_assignment(sizes, order):
    """Returns an assignment of one replica to each chip of a topology [x, y, z, 1]."""
    x, y, z, _ = sizes
    chips = [[i, j, k, 0] for k in range(z) for j in range(y) for i in range(x)]
    topology = topology_lib.Topology(mesh_shape=sizes, device_coordinates=np.array([chips]))
    return device_assignment_lib.DeviceAssignment(topology, np.array([[chips[i]] for i in order]))


def attempt(fn, *args, **kwargs):
    try:
        result = fn(*args, **kwargs)
    except Exception as e:
        return {"error": type(e).__name__, "message": str(e)}
    return "a function" if callable(result) else result


def set_flags(case):
    flags.FLAGS.fold_xy = case["fold_xy"]
    flags.FLAGS.logical_cores_per_chip = case["cores"]


def laid(logical, physical, cores=None, fold_xy=False, order=None):
    """Returns a case of auto_logical_to_physical_tpu with its results."""
    case = {
        "logical": logical,
        "physical": physical,
        "fold_xy": fold_xy,
        "order": order,
        "cores": physical[-1] if cores is None else cores,
    }
    set_flags(case)
    assignment = None if order is None else device_assignment(physical, order)
    for key, as_coordinates in (("numbers", False), ("coordinates", True)):
        case[key] = attempt(
            simd_mesh_impl.auto_logical_to_physical_tpu,
            logical,
            physical,
            as_coordinates,
            assignment,
        )
    return case


def automatic():
    sizes = (1, 2, 4, 8)
    for x, y, cores in itertools.product(sizes, sizes, (1, 2)):
        if x * y * cores > 32:
            continue
        for length in (1, 2, 3):
            for logical in factorings(x * y * cores, length):
                yield laid(logical, [x, y, cores])
    for logical in ([64], [8, 8], [4, 16], [2, 32], [2, 2, 16], [2, 4, 8], [2, 2, 2, 8]):
        for physical in ([4, 8, 2], [8, 4, 2], [16, 2, 2], [2, 16, 2], [4, 4, 4]):
            yield laid(logical, physical)
    for physical in ([2, 2, 2, 2], [4, 4, 1, 2], [1, 2, 4, 2], [2, 4, 2, 1], [3, 2, 2, 1]):
        n = int(np.prod(physical))
        for logical, fold_xy in itertools.product(([n], [n // 4, 4], [2, n // 4, 2]), (0, 1)):
            yield laid(logical, physical, fold_xy=bool(fold_xy))
    # What keeps its order, and what fails.
    yield laid([6], [3, 2, 1])
    yield laid([6, 4], [4, 3, 2])
    yield laid([4, 3], [2, 2, 3])
    yield laid([6, 2], [2, 2, 3])
    yield laid([4, 4], [4, 4])
    yield laid([4], [4])
    yield laid([32], [2, 2, 2, 2, 2])
    yield laid([16], [4, 4, 1], cores=2)
    yield laid([4, 8], [4, 4, 2], cores=1)
    yield laid([4, 2], [2, 1, 4])
    yield laid([1], [1, 1, 1])
    yield laid([4], [8])


def with_assignments():
    rng = random.Random(0)
    for physical in ([2, 2, 1, 1], [4, 2, 1, 1], [2, 4, 2, 1], [1, 2, 4, 1], [3, 2, 1, 1]):
        n = int(np.prod(physical))
        for fold_xy, shuffled in itertools.product((False, True), (False, True)):
            order = list(range(n))
            if shuffled:
                rng.shuffle(order)
            for logical in ([n], [2, n // 2]):
                yield laid(logical, physical, fold_xy=fold_xy, order=order)


def folded():
    rng = random.Random(1)
    shapes = [[4, 4, 1, 2], [8, 16, 1, 2], [2, 3, 4, 2], [4, 4, 2]]
    shapes += [[rng.choice([1, 2, 3, 4, 8]) for _ in range(4)] for _ in range(10)]
    for shape, fold_xy in itertools.product(shapes, (False, True)):
        case = {"physical": shape, "fold_xy": fold_xy, "cores": 2}
        set_flags(case)
        case["result"] = attempt(simd_mesh_impl.physical_shape_3d_from_topology_proto_4d, shape)
        yield case


def tiled():
    rng = random.Random(2)
    cases = [
        ([["a", [4, 4]]], [4, 4]),
        ([["a", [3, 3]]], [3, 3]),
        ([["a", [4, 1]]], [4, 1]),
        ([["a", [4]]], [4]),
        ([["a", None]], [4, 4]),
        ([["a", None], ["b", [2, 2]]], [4, 4]),
        ([["a", None], ["b", [3, 1]]], [4, 4]),
        ([["a", [2, 2]]], [2, 4]),
        ([["a", [2, 2]], ["b", None]], [4, 4]),
        ([["a", [2, 2]]], [2, 2, 1]),
        ([], [2, 2]),
        ([["a", [2, 2, 1]]], [2, 2]),
    ]
    for _ in range(60):
        axes, levels = rng.choice([1, 2, 2, 3, 4]), rng.choice([1, 2, 3])
        counts = [[rng.choice([1, 1, 2, 2, 3, 4]) for _ in range(axes)] for _ in range(levels)]
        physical = [int(n) for n in np.prod(counts, axis=0)]
        if np.prod(physical) <= 64:
            cases.append(([[name, c] for name, c in zip("abc", counts)], physical))
    for spec, physical in cases:
        tiling = attempt(simd_mesh_impl.HierarchicalTiling, spec, physical)
        case = {"spec": spec, "physical": physical}
        if isinstance(tiling, dict):
            case["result"] = tiling
        else:
            case["mesh_shape"] = [[d.name, d.size] for d in tiling.mesh_shape]
            case["logical_to_physical"] = tiling.logical_to_physical
        yield case


def main():
    flags.FLAGS(["make_topology"])
    fixtures = {
        "automatic": [*automatic(), *with_assignments()],
        "folded": list(folded()),
        "tiled": list(tiled()),
    }
    with open(PATH, "w") as f:
        # A line for each case.
        parts = (
            f'"{name}": [\n'
            + ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
            + "\n]"
            for name, cases in fixtures.items()
        )
        f.write("{\n" + ",\n".join(parts) + "\n}\n")
    print({name: len(cases) for name, cases in fixtures.items()})


if __name__ == "__main__":
    main()
