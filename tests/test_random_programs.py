"""Random programs give the same outputs, gradients and updates in every layout."""

import pytest
import tensorflow.compat.v1 as tf
from helpers import random_programs
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import mesh_tensorflow as mtf
from mesh_tensorflow._core.cost import Cost
from mesh_tensorflow._core.pending import walk
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.harness import Placing

SHAPES = [
    "x:1",
    "x:2",
    "x:3",
    "x:4",
    "x:6",
    "x:8",
    "x:2,y:2",
    "x:2,y:3",
    "x:3,y:2",
    "x:2,y:4",
    "x:4,y:2",
    "x:1,y:4",
    "x:2,y:2,z:2",
    "x:2,y:1,z:3",
]

INSTRUCTION = st.tuples(
    st.integers(0, len(random_programs.OPS) - 1),
    st.integers(0, 3),
    st.integers(0, 15),
    st.integers(0, 31),
)


def run(instructions, mesh, layout_seed, recompute=False, **kind):
    """Returns the values of a program after one training step, and the placing."""
    with tf.Graph().as_default():
        tf.set_random_seed(17)
        builder, targets, updates = random_programs.build(instructions, recompute)
        layout = harness.random_layout(builder.graph, mesh, layout_seed) if mesh else {}
        placing = Placing(mesh, harness.layout_text(layout, mesh), **kind)
        with harness.separate_memories() if placing.apart else tf.name_scope(""):
            impl = placing.impl()
            lowering = mtf.Lowering(builder.graph, {builder.mesh: impl})
            exports = [lowering.export_to_tf_tensor(t) for t in targets]
            train = tf.group([lowering.lowered_operation(op) for op in updates])
            to_slices = lowering.copy_masters_to_slices()
            to_masters = lowering.copy_slices_to_masters()
        predicted = harness.collectives_of(walk(builder.graph.operations, impl, targets).costs)
        counted = harness.collectives_of(
            (kind, Cost(collectives=(c,))) for kind, _, c in lowering.collectives
        )
        assert counted == predicted, placing
        with harness.session() as session:
            session.run(tf.global_variables_initializer())
            session.run(to_slices)
            values = session.run([exports, train])[0]
            session.run(to_masters)
            return placing, values + session.run(tf.global_variables())


PHASES = [Phase.generate, Phase.shrink]
IN_LAYOUTS = given(
    st.lists(INSTRUCTION, min_size=10, max_size=20),
    st.sampled_from(SHAPES),
    st.sampled_from(SHAPES),
    st.integers(0, 10**6),
)
RECOMPUTED = given(
    st.lists(INSTRUCTION, min_size=4, max_size=12), st.sampled_from(SHAPES), st.integers(0, 10**6)
)


def check_layouts(instructions, first_mesh, second_mesh, seed):
    _, expected = run(instructions, "", 0)
    kinds = [
        {"merge": ["none", "memory"][seed % 2]},
        {"apart": True, "merge": "device", "pairs": seed % 3 == 0},
    ]
    for mesh, kind in zip((first_mesh, second_mesh), kinds):
        placing, values = run(instructions, mesh, seed, **kind)
        assert len(values) == len(expected)
        for i, (value, e) in enumerate(zip(values, expected)):
            harness.assert_close(value, e, 1e-4, f"{placing}, target {i}")


def check_recomputed(instructions, mesh, seed):
    """Values that are computed again for a gradient are the same, and so are the gradients."""
    _, expected = run(instructions, "", 0)
    for place in ("", mesh):
        placing, values = run(instructions, place, seed, recompute=True)
        assert len(values) == len(expected)
        for i, (value, e) in enumerate(zip(values, expected)):
            harness.assert_close(value, e, 1e-4, f"{placing}, target {i}")


test_some_layouts = settings(max_examples=5, phases=PHASES)(IN_LAYOUTS(check_layouts))
test_some_recomputed = settings(max_examples=3, phases=PHASES)(RECOMPUTED(check_recomputed))


@pytest.mark.slow
@settings(max_examples=20, phases=PHASES)
@IN_LAYOUTS
def test_any_layout(instructions, first_mesh, second_mesh, seed):
    check_layouts(instructions, first_mesh, second_mesh, seed)


@pytest.mark.slow
@settings(max_examples=8, phases=PHASES)
@RECOMPUTED
def test_recomputed(instructions, mesh, seed):
    check_recomputed(instructions, mesh, seed)
