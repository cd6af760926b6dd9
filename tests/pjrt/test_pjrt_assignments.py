"""What a step on devices of JAX does besides its results."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.train import effects

import mesh_tensorflow as mtf


def _in_function(feature, micro):
    @mtf.pjrt.function(mesh_shape="rows:2,cols:2", layout="batch:rows,d:cols")
    def step(data):
        return effects.program(feature, data, mtf.pjrt.mesh_impl, micro)[1]

    for batch in effects.DATA:
        step(batch)
    return {name: np.asarray(step.store.value(name)) for name in step.store.names}


def _in_fit(feature, micro):
    return effects.in_fit(feature, "pjrt", micro)


@pytest.mark.slow_but(2)
@pytest.mark.parametrize("micro", [False, True], ids=["whole", "microbatches"])
@pytest.mark.parametrize("front", [_in_function, _in_fit])
@pytest.mark.parametrize("feature", effects.FEATURES)
def test_assignments_are_part_of_a_step(feature, front, micro):
    found = front(feature, micro)
    for name, value in effects.expected(feature, micro).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_summaries_and_evaluations():
    def model(mesh, x):
        count = effects.state(mesh, "count")
        mtf.assign(count, count + 1.0)
        mtf.scalar_summary("mean", mtf.reduce_mean(x))
        return effects.loss_of(mesh, x) * 0.0 + count

    result = effects.fitted(model, "pjrt", eval_data=effects.DATA.reshape(-1, 4))
    assert result.losses == [0.0, 1.0] and result.final["eval_loss"] == 2.0
    means = effects.DATA.mean((1, 2))
    np.testing.assert_allclose([r["mean"] for r in result.history], means, rtol=1e-5)


@pytest.mark.parametrize("inside", [False, True], ids=["captured", "read inside"])
def test_a_step_reads_the_global_step_before_its_increment(inside, tf_graph):
    with tf.variable_scope("", use_resource=True):
        step = tf.train.get_or_create_global_step()
    rate = tf.cast(step.read_value(), tf.float32)
    made = []

    def program():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        value = tf.cast(step.read_value(), tf.float32) if inside else rate
        used = effects.state(mesh, "used")
        mtf.assign(used, 1.0 * mtf.import_fully_replicated(mesh, value, mtf.Shape([])))
        made.append(mtf.Lowering(mesh.graph, {mesh: mtf.GspmdMeshImpl("rows:2", "")}))
        return made[-1].effects

    done = mtf.pjrt.in_session(program)
    increment = tf.assign_add(step, 1)
    reads = [op for op in increment.op.control_inputs if op.type == "ReadVariableOp"]
    assert reads
    used = next(v for v in tf.global_variables() if v.op.name == "used").read_value()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for number in range(3):
            session.run([*done, increment])
            assert session.run(used) == number
