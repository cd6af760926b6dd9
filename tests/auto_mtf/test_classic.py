"""Schedules, peaks and optima are those of the classic release, for the same operations."""

import pytest
from helpers.auto_mtf.program_graphs import CLASSIC, classic_program

from mesh_tensorflow import auto_mtf
from mesh_tensorflow.auto_mtf.layout_optimizer import LayoutOptimizer
from mesh_tensorflow.auto_mtf.memory_estimator import MemoryEstimator

MODELS = sorted(name for name in CLASSIC if "four" in CLASSIC[name])
# The models, and of the others every fourth one, are in the short run.
NAMES = [
    pytest.param(name, marks=[] if name in MODELS or i % 4 == 0 else [pytest.mark.slow])
    for i, name in enumerate(sorted(CLASSIC))
]


@pytest.mark.parametrize("name", NAMES)
def test_schedules(name):
    graph, outputs, facts = classic_program(name)
    estimator = MemoryEstimator(graph, "", outputs)
    interface = estimator.get_graph_interface()
    assert auto_mtf.scheduler.minimize_peak_memory(interface, "LIST") == facts["schedule"]
    assert LayoutOptimizer(estimator, scheduler_alg="NAIVE").evaluate_layout("") == facts["naive"]


@pytest.mark.parametrize("name", NAMES)
def test_peaks_and_optimum(name):
    graph, outputs, facts = classic_program(name)
    for mesh_shape, theirs in facts["meshes"].items():
        estimator = MemoryEstimator(graph, mesh_shape, outputs)
        validator = estimator.get_layout_validator()
        valid = sorted(
            f"{d}:{m}"
            for d in validator.splittable_mtf_dimension_names
            for m in validator.mesh_dimension_name_to_size
            if validator.is_valid_assignment(d, m)
        )
        assert valid == theirs["valid"]
        optimizer = LayoutOptimizer(estimator)
        peaks = {text: optimizer.evaluate_layout(text) for text in theirs["peaks"]}
        assert peaks == theirs["peaks"]
        layout = optimizer.solve()
        assert optimizer.evaluate_layout(layout) == theirs["peak"], (mesh_shape, layout)
        assert layout.count(":") == theirs["layout"].count(":")


@pytest.mark.parametrize("name", MODELS)
def test_mesh_shape(name):
    graph, outputs, facts = classic_program(name)
    layout, mesh_shape = auto_mtf.layout_and_mesh_shape(graph, 4, outputs)
    pairs, sizes = facts["four"]
    peaks = []
    for rules, shape in [(layout, mesh_shape), (pairs, None)]:
        shape = shape or [(f"mesh_{i}", size) for i, size in enumerate(sizes)]
        text = ";".join(f"{d}:{m}" for d, m in (rules if shape is not mesh_shape else rules._pairs))
        optimizer = LayoutOptimizer(MemoryEstimator(graph, shape, outputs))
        peaks.append(optimizer.evaluate_layout(text))
    assert peaks[0] == peaks[1]
    assert mesh_shape.to_integer_list == sizes
