"""Random programs, with a training step, are the same partitioned by XLA as on one device."""

import random

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from helpers import random_programs
from helpers.random_programs import Program, placing_of

import mesh_tensorflow as mtf
from mesh_tensorflow.testing import harness

MESHES = ["x:2,y:2", "x:8", "x:2,y:2,z:2", "x:3,y:2"]


def some_instructions(seed):
    """Returns the instructions of a program."""
    choose, ops = random.Random(seed), len(random_programs.OPS)
    numbers = (ops, 4, 16, 32)
    return [tuple(choose.randrange(n) for n in numbers) for _ in range(choose.randint(3, 12))]


def results(decorate, make_impl, program):
    """Returns the targets of two steps, and the variables after them."""

    @decorate
    def step():
        builder, targets, updates = random_programs.build(program)
        lowering = mtf.Lowering(builder.graph, {builder.mesh: make_impl()})
        exports = [lowering.export_to_tf_tensor(t) for t in targets]
        with tf.control_dependencies([lowering.lowered_operation(op) for op in updates]):
            return [tf.identity(x) for x in exports]

    tf2.random.set_seed(17)
    found = [np.asarray(x) for _ in range(2) for x in step()]
    return found + [step.store.value(name).numpy() for name in sorted(step.store.names)]


def check(seed):
    program, mesh = Program(some_instructions(seed)), MESHES[seed % len(MESHES)]
    layout = placing_of(program, mesh, seed).layout
    whole = mtf.placement_mesh_impl.PlacementMeshImpl("x:1", "", [""])
    expected = results(mtf.function, lambda: whole, program)
    on_jax = mtf.pjrt.function(mesh_shape=mesh, layout=layout)
    found = results(on_jax, mtf.pjrt.mesh_impl, program)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        harness.assert_close(ours, theirs, 1e-4, f"{seed} in {layout!r} of {mesh}, {number}")


# Convolutions of which several devices compute equal products, and whose kernel has parts.
KERNEL_IN_PARTS = Program(
    [(40, 1, 2, 23), (10, 0, 8, 25), (43, 2, 14, 8), (17, 2, 11, 24), (45, 0, 12, 10)]
    + [(41, 3, 13, 17), (53, 1, 1, 2), (51, 2, 1, 12)]
)


@pytest.mark.slips
@pytest.mark.parametrize("layout, zero", [("b:x", 1), ("", 3)])
def test_the_gradient_of_a_kernel_that_is_stored_in_parts(layout, zero):
    """XLA added up the copies, as it split convolutions otherwise than the layout says."""
    placing = harness.Placing("x:2,z:2", layout, pjrt=True, zero=zero, zero_axis="x")
    random_programs.check(KERNEL_IN_PARTS, placing, random_programs.run(KERNEL_IN_PARTS))


@pytest.mark.slow
@pytest.mark.slips
@pytest.mark.parametrize("seed", range(4))
def test_some(seed):
    check(seed)


@pytest.mark.slow
@pytest.mark.slips
def test_more():
    """But for what is not offered, as the gradient of a loop of unknown length."""
    refused = 0
    for seed in range(4, 16):
        try:
            check(seed)
        except ValueError as e:
            assert random_programs.is_refused(e), str(e)
            refused += 1
    assert refused < 6
