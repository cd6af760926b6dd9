"""SimdMeshImpl as tpu.replicate builds it: operations, variables, and a training step on XLA's CPUs."""

import itertools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import xla_cpu_replicas

import mesh_tensorflow as mtf
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl

BATCH, WIDTH, HIDDEN = 8, 16, 32
DATA = np.random.RandomState(0).randn(BATCH, WIDTH).astype(np.float32)
L2P = [0, 3, 5, 6, 1, 7, 2, 4]
MESH, LAYOUT = "x:2,y:4", "batch:x,hidden:y"
OPTIMIZERS = {
    "adam": lambda: mtf.optimize.AdamWeightDecayOptimizer(0.01),
    "sgd": lambda: mtf.optimize.SgdOptimizer(0.1),
}


def device_assignment(replicas=8):
    """Returns an assignment of cores of a TPU of 2 x 2 chips with two cores each."""
    cores = np.array(list(itertools.product(range(2), range(2), range(1), range(2))))
    topology = tf.tpu.experimental.Topology(
        mesh_shape=[2, 2, 1, 2], device_coordinates=cores[None])
    return tf.tpu.experimental.DeviceAssignment(topology, cores[:replicas, None])


def network(make_impl, x, keep_prob, optimizer):
    """Returns (loss, training operation, Lowering) of a step of a small network."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, d = mtf.Dimension("batch", BATCH), mtf.Dimension("width", WIDTH)
    x = mtf.import_tf_tensor(mesh, x, [batch, d])
    h = mtf.layers.layer_norm(x, d)
    h = mtf.layers.dense(
        h, [mtf.Dimension("hidden", HIDDEN)], reduced_dims=[d], activation=mtf.relu, name="in")
    h = mtf.dropout(h, True, keep_prob=keep_prob)
    y = x + mtf.layers.dense(h, [d], reduced_dims=h.shape.dims[-1:], name="out")
    loss = mtf.reduce_mean(mtf.square(y - mtf.sin(x)))
    variables = graph.trainable_variables
    grads = mtf.gradients([loss], [v.value for v in variables])
    updates = OPTIMIZERS[optimizer]().apply_grads(grads, variables)
    lowering = mtf.Lowering(graph, {mesh: make_impl()})
    train = tf.group([lowering.lowered_operation(op) for op in updates])
    return lowering.export_to_tf_tensor(loss), train, lowering


def simd(**options):
    return SimdMeshImpl(MESH, LAYOUT, device_assignment=device_assignment(), **options)


class Step:
    """A training step, as a function for a Program."""

    def __init__(self, keep_prob, optimizer="adam", **options):
        self.arguments = keep_prob, optimizer
        self.options = options
        self.lowering = None

    def __call__(self, x):
        tf.set_random_seed(3)
        loss, train, self.lowering = network(
            lambda: simd(**self.options), x, *self.arguments)
        with tf.control_dependencies([train]):
            return tf.identity(loss)

    def start(self):
        """Returns what initializes masters and slices."""
        return [tf.global_variables_initializer(), self.lowering.copy_masters_to_slices()]


def placed(keep_prob, optimizer="adam"):
    """Returns (loss, weights by name after the step)."""
    with tf.Graph().as_default(), tf.Session() as session:
        tf.set_random_seed(3)
        loss, train, _ = network(
            lambda: PlacementMeshImpl("x:1", "", [""]), tf.constant(DATA), keep_prob, optimizer)
        session.run(tf.global_variables_initializer())
        loss, _ = session.run([loss, train])
        return loss, session.run({v.op.name: v for v in tf.global_variables()})


def build(fn):
    """Returns the graph of a function as tpu.replicate builds it for 8 cores."""
    with tf.Graph().as_default() as graph:
        tf.tpu.replicate(fn, [[DATA]] * 8, device_assignment=device_assignment())
    return graph


def inside(op):
    return "_tpu_replicate" in op.node_def.attr


# -- a training step


@pytest.mark.parametrize("keep_prob, optimizer, l2p", [
    (1.0, "sgd", None), (0.75, "adam", L2P)])
def test_a_training_step_is_that_of_placement(keep_prob, optimizer, l2p):
    pytest.importorskip("jax")
    step = Step(keep_prob, optimizer, logical_to_physical=l2p)
    program = xla_cpu_replicas.Program(
        lambda x: step(x), [[DATA]] * 8, device_assignment=device_assignment(), start=step.start)
    [results] = xla_cpu_replicas.run([program])
    loss, weights = placed(keep_prob, optimizer)
    np.testing.assert_allclose([own[0] for own in results], loss, rtol=1e-5)
    with program.session_after(results) as session:
        session.run(step.lowering.copy_slices_to_masters())
        found = session.run({v.op.name: v for v in tf.global_variables()})
    assert sorted(found) == sorted(weights)
    for name, value in found.items():
        np.testing.assert_allclose(value, weights[name], rtol=1e-4, atol=1e-5, err_msg=name)
