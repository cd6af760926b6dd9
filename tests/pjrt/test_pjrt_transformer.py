"""Transformers on devices of JAX: training with dropout, and decoding."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.pjrt import placed
from helpers.transformer.decoding_models import VOCAB, language_model

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import transformer

MESH = "rows:2,cols:2"
LAYOUTS = [
    "batch:rows,heads:cols,d_ff:cols,vocab:cols",
    pytest.param("batch:rows,d_model:cols", marks=pytest.mark.slow),
]
IDS = np.random.RandomState(0).randint(1, VOCAB, (4, 8)).astype("int32")
SHAPE = mtf.Shape([("batch", 4), ("length", 8)])


def training(make_impl):
    """Returns a step of Adafactor of a function of ids and the number of the step."""

    def step(ids, number):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        targets = mtf.import_tf_tensor(mesh, ids, SHAPE)
        inputs = transformer.autoregressive_inputs(targets)
        with mtf.utils.counted_steps(number):
            _, loss = language_model("attention").call_simple(inputs, targets, True, mode="train")
            variables = mesh.graph.trainable_variables
            grads = mtf.gradients([loss], [v.value for v in variables])
            optimizer = mtf.optimize.AdafactorOptimizer(learning_rate=0.05)
            updates = optimizer.apply_grads(grads, variables)
        lowering = mtf.Lowering(mesh.graph, {mesh: make_impl()})
        value = lowering.export_to_tf_tensor(loss)
        with tf.control_dependencies([lowering.lowered_operation(op) for op in updates]):
            return tf.identity(value)

    return step


def decoding(make_impl, **kwargs):
    """Returns a function of ids that continues them."""

    def decode(ids):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        partial = mtf.import_tf_tensor(mesh, ids, SHAPE)
        found = language_model("attention").sample_autoregressive(partial, **kwargs)
        return mtf.Lowering(mesh.graph, {mesh: make_impl()}).export_to_tf_tensor(found)

    return decode


@pytest.mark.slow
@pytest.mark.slips  # not all names of a layout are in each program
@pytest.mark.parametrize("layout", LAYOUTS)
def test_trains_and_decodes_as_on_placed_devices(layout):
    on_jax = mtf.pjrt.function(mesh_shape=MESH, layout=layout)
    tf.random.set_seed(2)
    expected_step = mtf.function(training(lambda: placed(MESH, layout)))
    expected = [float(expected_step(IDS, np.int64(i))) for i in range(4)]
    tf.random.set_seed(2)
    step = on_jax(training(mtf.pjrt.mesh_impl))
    found = [float(step(IDS, np.int64(i))) for i in range(4)]
    assert expected[-1] < expected[0]
    np.testing.assert_allclose(found, expected, rtol=2e-4)

    on_jax = mtf.pjrt.function(mesh_shape=MESH, layout=layout, store=step.store)
    prefix = IDS * (np.arange(8) < 3)
    continued = np.asarray(on_jax(decoding(mtf.pjrt.mesh_impl, temperature=0.0))(prefix))
    np.testing.assert_array_equal(continued[:, :3], prefix[:, :3])
    expected_decode = mtf.function(decoding(lambda: placed(MESH, layout), temperature=0.0))
    expected_decode(prefix)
    for name in expected_decode.store.names:
        expected_decode.store.assign(name, step.store.value(name))
    np.testing.assert_array_equal(continued, expected_decode(prefix))
