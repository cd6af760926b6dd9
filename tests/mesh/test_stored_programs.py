"""Random programs train alike in every stored layout, and go on from each other's checkpoints."""

import random

import pytest
import tensorflow.compat.v1 as tf
from helpers import random_programs
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import mesh_tensorflow as mtf
from mesh_tensorflow.testing import harness

MESHES = ["x:2", "x:3", "x:4", "x:2,y:2", "x:2,y:3", "x:1,y:4", "x:2,y:1,z:2"]
INSTRUCTION = st.tuples(
    st.integers(0, len(random_programs.OPS) - 1),
    st.integers(0, 3),
    st.integers(0, 15),
    st.integers(0, 31),
)
PHASES = [Phase.generate, Phase.shrink]
PROGRAMS = given(
    st.lists(INSTRUCTION, min_size=4, max_size=12),
    st.sampled_from(sorted(random_programs.OPTIMIZERS)),
    st.lists(st.integers(0, 10**6), min_size=2, max_size=2),
)


def stored_options(mesh, draw):
    """Returns how variables are stored, drawn at random."""
    names = mtf.convert_to_shape(mesh).dimension_names
    options = {}
    if draw.random() < 0.8:
        options = {"zero": draw.choice([1, 2, 3]), "zero_axis": draw.choice(names)}
    if not options or draw.random() < 0.3:
        dims = draw.sample(random_programs.DIMS[1:4], draw.choice([1, 2]))
        options["variable_layout"] = ",".join(f"{d.name}:{draw.choice(names)}" for d in dims)
    return options


def train(instructions, optimizer, seed=None, restore=None, save=None):
    """Trains for one step; whole on one processor, or somewhere at random.

    Returns:
      (where it was, the values of the program, and of variables by name).
    """
    with tf.Graph().as_default():
        tf.set_random_seed(17)
        draw = random.Random(seed)
        program = random_programs.Program(instructions, optimizer=optimizer)
        builder, targets, updates = random_programs.build(program)
        mesh, layout, options = "", {}, {}
        if seed is not None:
            mesh = draw.choice(MESHES)
            layout = harness.random_layout(builder.graph, mesh, seed)
            options = stored_options(mesh, draw)
        size = mtf.convert_to_shape(mesh).size
        impl = mtf.placement_mesh_impl.PlacementMeshImpl(
            mesh, layout, [""] * size, merge="none", **options
        )
        lowering = mtf.Lowering(builder.graph, {builder.mesh: impl})
        exports = [lowering.export_to_tf_tensor(t) for t in targets]
        steps = tf.group([lowering.lowered_operation(op) for op in updates])
        counted, predicted = harness.counted_and_predicted(lowering, targets)
        assert counted == predicted, (mesh, layout, options)
        saver = tf.train.Saver()
        with harness.session() as session:
            session.run(tf.global_variables_initializer())
            if restore:
                saver.restore(session, restore)
            values = session.run([exports, steps])[0]
            if save:
                saver.save(session, save)
            after = session.run({v.op.name: v for v in tf.global_variables()})
            return (mesh, layout, options), values, after


@random_programs.unless_refused
def check(instructions, optimizer, seeds, directory):
    """The first step in one stored layout, and the second, from its checkpoint, in another."""
    whole, found = f"{directory}/whole", f"{directory}/found"
    expected = [
        train(instructions, optimizer, save=whole),
        train(instructions, optimizer, restore=whole),
    ]
    first = train(instructions, optimizer, seeds[0], save=found)
    second = train(instructions, optimizer, seeds[1], restore=found)
    for (place, values, after), (_, expected_values, expected_after) in zip(
        [first, second], expected
    ):
        assert after.keys() == expected_after.keys()
        for i, (value, e) in enumerate(zip(values, expected_values, strict=True)):
            harness.assert_close(value, e, 1e-4, f"{place}, target {i}")
        for name, e in expected_after.items():
            harness.assert_close(after[name], e, 1e-5, f"{place}, {name}")


@pytest.mark.slow
@settings(max_examples=3, phases=PHASES)
@PROGRAMS
def test_some_programs(tmp_path_factory, instructions, optimizer, seeds):
    check(instructions, optimizer, seeds, tmp_path_factory.mktemp("programs"))


@pytest.mark.every
@pytest.mark.slow
@settings(max_examples=25, phases=PHASES)
@PROGRAMS
def test_any_program(tmp_path_factory, instructions, optimizer, seeds):
    check(instructions, optimizer, seeds, tmp_path_factory.mktemp("programs"))
