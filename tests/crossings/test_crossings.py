"""Features in each front end on each mesh implementation: the numbers of an unsplit session."""

import functools
import pickle
import re
import tempfile

import pytest
from helpers.crossings.features import FEATURES
from helpers.crossings.front_ends import FRONT_ENDS
from helpers.crossings.table import CELLS, MESHES, compare, run
from helpers.mesh.launching import run_script

from mesh_tensorflow.testing.harness import WHOLE

# On these, cells take turns in the short run.
QUICK = ["one device", "merged", "SIMD", "logical CPUs"]


def marks(cell):
    """Returns the marks of a cell: one mesh of every fourth pair of a feature and a front end is in
    the short run, one of every third pair in the slow one, and the others run with --all.

    Compiled steps are in the short run elsewhere.
    """
    i, j = list(FEATURES).index(cell.feature), list(FRONT_ENDS).index(cell.front_end)
    every = [c.mesh for c in CELLS if c[:2] == cell[:2] and c.kind != "dash"]
    if cell.front_end.startswith("compiled"):
        is_quick = False
    elif cell.front_end in ("utils.run", "pjrt.function") or cell.mesh == "pjrt":
        is_quick = i % 12 == 0 and cell.mesh in ("SIMD", "pjrt")
    else:
        meshes = [mesh for mesh in every if mesh in QUICK]
        is_quick = (i + j) % 4 == 0 and meshes[(i // 2 + j) % len(meshes)] == cell.mesh
    if is_quick:
        return []
    is_slow = (2 * i + j) % 3 == 0 and every[(i + j) % len(every)] == cell.mesh
    return [pytest.mark.slow if is_slow else pytest.mark.every]


def params(kind):
    return [
        pytest.param(cell, id=str(cell), marks=marks(cell))
        for cell in CELLS
        if cell.kind == kind and cell.mesh != "processes"
    ]


@functools.cache
def expected(feature, front_end):
    return run(feature, front_end, WHOLE, plain=True)


@pytest.mark.slow_but(6)
@pytest.mark.slow("*utils.run*", "nan_checks-fit*")
@pytest.mark.parametrize("cell", params("test"))
def test_results(cell):
    own = FEATURES[cell.feature].is_random or cell.front_end == "utils.run"
    # With XLA, `fit` draws the same values.
    front_end = cell.front_end.removeprefix("compiled ") if own else "session"
    wanted = expected(cell.feature, front_end)
    compare(cell, run(cell.feature, cell.front_end, MESHES[cell.mesh]), wanted)


@pytest.mark.slow("*utils.run*", "nan_checks_of_a_NaN*")
@pytest.mark.parametrize("cell", params("error"))
def test_errors(cell):
    with pytest.raises(Exception) as caught:
        run(cell.feature, cell.front_end, MESHES[cell.mesh])
    assert re.search(cell.text, str(caught.value), re.S), str(caught.value)


IN_PROCESSES = [cell for cell in CELLS if cell.mesh == "processes" and cell.kind != "dash"]


@functools.cache
def of_processes(front_end):
    """Returns what each of two processes found for all features: outcomes, or texts of errors."""
    names = [cell.feature for cell in IN_PROCESSES if cell.front_end == front_end]
    extra = ["--show_all", *(["--runtime", "pjrt"] if front_end == "pjrt.function" else [])]
    with tempfile.TemporaryDirectory() as folder:
        done = run_script(
            folder,
            2,
            folder,
            front_end,
            *names,
            extra=extra,
            script="crossings_worker.py",
            timeout=1800,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found = []
        for index in range(2):
            with open(f"{folder}/found-{index}", "rb") as file:
                found.append(pickle.load(file))
    return found


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=str(cell), marks=getattr(pytest.mark, mark))
        for cell in IN_PROCESSES
        for mark in ["slow" if cell.front_end == "fit" else "every"]
    ],
)
def test_in_processes(cell):
    """What both processes have; only one of them prints, and records summaries."""
    for index, outcomes in enumerate(of_processes(cell.front_end)):
        found = outcomes[cell.feature]
        if cell.kind == "error":
            assert re.search(cell.text, str(found), re.S), found
            continue
        assert not isinstance(found, str), found
        feature = FEATURES[cell.feature]
        wanted = expected(cell.feature, cell.front_end if feature.is_random else "session")
        compare(cell, found, wanted, checks=index == 0)
