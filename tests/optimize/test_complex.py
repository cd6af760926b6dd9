"""Complex variables: descent in every layout, checkpoints of one layout in another, clipping."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow._core.errors import WrongTypeError
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate
from mesh_tensorflow.testing import harness

A, B = mtf.convert_to_shape("a:8,b:4").dims
RNG = np.random.default_rng(0)
TARGET = (RNG.normal(size=[8, 4]) + 1j * RNG.normal(size=[8, 4])).astype(np.complex64)
RATE, SCALE = 0.05, 0.3


def expected(steps):
    """Returns the losses of descent, in NumPy."""
    v, losses = np.ones([8, 4], complex), []
    for _ in range(steps):
        off = SCALE * np.fft.fft(v, axis=0) - TARGET
        losses.append(np.sum(np.abs(off) ** 2))
        v = v - RATE * 2 * SCALE * 8 * np.fft.ifft(off, axis=0)
    return losses


def losses(layout, steps, simd=False, save=None, restore=None):
    """Fits the Fourier transform of a variable to the target."""
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        v = mtf.get_variable(mesh, "v", [A, B], tf.complex64, initializer=tf.ones_initializer())
        off = mtf.signal.fft(v, A) * SCALE - mtf.import_tf_tensor(mesh, tf.constant(TARGET), [A, B])
        loss = mtf.reduce_sum(mtf.square(mtf.abs(off)))
        variables = mesh.graph.trainable_variables
        grads = mtf.gradients([loss], [x.value for x in variables])
        updates = mtf.optimize.SgdOptimizer(RATE).apply_grads(grads, variables)
        copies = []

        def program():
            impl = placing.impl()
            assert isinstance(impl, SimdMeshImpl) == simd
            lowering = mtf.Lowering(mesh.graph, {mesh: impl})
            copies[:] = [lowering.copy_masters_to_slices(), lowering.copy_slices_to_masters()]
            step = tf.group([lowering.lowered_operation(op) for op in updates])
            return [lowering.export_to_tf_tensor(loss), step]

        placing = harness.Placing("x:2,y:2", layout, simd=simd)
        fetches = replicate(program, devices=placing.cpus) if simd else program()
        saver = tf.train.Saver()
        with harness.session() as session:
            session.run(tf.global_variables_initializer())
            if restore:
                saver.restore(session, restore)
            session.run(copies[0])
            found = [session.run(fetches)[0] for _ in range(steps)]
            if save:
                session.run(copies[1])
                saver.save(session, save, write_meta_graph=False)
        return found


@pytest.mark.parametrize("layout, simd", [("a:x,b:y", False), ("a:x,b:y", True)])
def test_descent(layout, simd):
    np.testing.assert_allclose(losses(layout, 3, simd), expected(3), rtol=1e-5)


def test_checkpoint_in_another_layout(tmp_path):
    path = str(tmp_path / "model.ckpt")
    losses("a:x", 2, save=path)
    np.testing.assert_allclose(losses("b:y", 2, True, restore=path), expected(4)[2:], rtol=1e-5)


def test_clipping():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    z = mtf.constant(mesh, 3 + 4j, "d:4", tf.complex64)
    [clipped], norm = mtf.optimize.clip_by_global_norm([z], 1.0)
    assert norm.numpy() == 10
    np.testing.assert_allclose(clipped.numpy(), np.full(4, 0.3 + 0.4j), rtol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_microbatches(weighted):
    """Gradients of |v x|^2, summed over four microbatches."""
    data = RNG.normal(size=[8, 4]).astype(np.float32)
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.import_tf_tensor(mesh, data, [A, B])

    def loss_fn(x):
        v = mtf.get_variable(mesh, "v", [B], tf.complex64, initializer=tf.ones_initializer()) * 1j
        total = mtf.reduce_sum(mtf.square(mtf.abs(v * mtf.cast(x, tf.complex64))))
        return (total, mtf.constant(mesh, 2.0)) if weighted else total

    with mtf.VariableStore().scope():
        result = mtf.optimize.accumulate_gradients(loss_fn, x, A, num_microbatches=4)
        weight = 8 if weighted else 1  # a sum without a weight is the batch's
        np.testing.assert_allclose(
            result.grads[0].numpy(), 2 * np.square(data).sum(0) / weight, rtol=1e-5
        )
        assert result.grads[0].dtype == tf.complex64


@pytest.mark.parametrize(
    "optimizer",
    [
        mtf.optimize.AdafactorOptimizer(learning_rate=0.1),
        mtf.optimize.AdamWeightDecayOptimizer(0.1),
        mtf.optimize.AdamWOptimizer(0.1),
        mtf.optimize.LionOptimizer(0.1),
        mtf.optimize.SgdOptimizer(0.1, momentum=0.9),
    ],
)
def test_rules_of_real_numbers(optimizer):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    v = mtf.get_variable(mesh, "v", [A], tf.complex64)
    text = (
        rf"^{type(optimizer).__name__} has a rule for real numbers, and variable 'v' is "
        r"complex64. Make variables of the two parts, which mtf.complex joins, or .*SgdOptimizer, without momentum$"
    )
    with pytest.raises(WrongTypeError, match=text):
        optimizer.apply_grads([mtf.ones_like(v)], mesh.graph.trainable_variables)
