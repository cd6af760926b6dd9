"""Reversible layers: the gradients of plain ones, without keeping what they compute."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.memory import peak_bytes
from helpers.world import World

import mesh_tensorflow as mtf

BATCH, D, H = mtf.Dimension("batch", 16), mtf.Dimension("d", 8), mtf.Dimension("h", 32)
reversible = mtf.layers.reversible_half_residual_and_swap


class Network:
    """A network of reversible layers with dropout, and its gradients."""

    def __init__(self, recompute, num_layers=4, batch=BATCH, h=H, uses_last_only=False):
        self.h = h
        self.graph = mtf.Graph()
        self.mesh = mtf.Mesh(self.graph, "mesh")
        value = np.random.RandomState(0).normal(size=[batch.size, D.size]).astype("float32")
        self.x = mtf.import_tf_tensor(self.mesh, tf.constant(value), mtf.Shape([batch, D]))
        self.start = len(self.graph.operations)
        state = (self.x, None, self.x * 0.5, None)
        for i in range(num_layers):
            state = reversible(*state, self.layer(i), recompute)
        self.outputs = (state[0], state[2])
        y = state[2] if uses_last_only else state[0] + 2.0 * state[2]
        self.loss = mtf.reduce_mean(mtf.square(y))
        self.end = len(self.graph.operations)
        self.variables = [v.value for v in self.graph.trainable_variables]
        self.grads = mtf.gradients([self.loss], [self.x, *self.variables])

    def layer(self, i):
        def f(x):
            y = mtf.layers.dense(x, self.h, reduced_dims=[D], activation=mtf.tanh, name=f"in{i}")
            y = mtf.dropout(y, True, keep_prob=0.9)
            return mtf.layers.dense(y, D, reduced_dims=[self.h], name=f"out{i}")

        return f

    @property
    def forward(self):
        return self.graph.operations[self.start : self.end]

    @property
    def backward(self):
        return self.graph.operations[self.end :]

    def run(self, mesh_shape="", layout="", metadata=None, fetch=lambda x: x):
        size = mtf.convert_to_shape(mesh_shape).size
        impl = mtf.placement_mesh_impl.PlacementMeshImpl(mesh_shape, layout, [""] * size)
        lowering = mtf.Lowering(self.graph, {self.mesh: impl})
        fetches = [fetch(lowering.export_to_tf_tensor(t)) for t in [self.loss, *self.grads]]
        options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
        with tf.Session(config=tf.ConfigProto(inter_op_parallelism_threads=1)) as session:
            session.run(tf.global_variables_initializer())
            session.run(lowering.copy_masters_to_slices())
            if metadata is None:
                return session.run(fetches)
            return session.run(fetches, options=options, run_metadata=metadata)


def values(recompute, *args, **kwargs):
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        return Network(recompute, **kwargs).run(*args)


@pytest.mark.slow
@pytest.mark.parametrize("uses_last_only", [False, True])
@pytest.mark.parametrize(
    "mesh_shape, layout", [("", ""), ("x:2", "h:x"), ("x:2,y:2", "batch:x,h:y")]
)
def test_same_gradients(mesh_shape, layout, uses_last_only):
    """Also of variables that the layers make, with the same dropout in both computations."""
    plain = values(False, uses_last_only=uses_last_only)
    found = values(True, mesh_shape, layout, uses_last_only=uses_last_only)
    assert len(found) == len(plain) == 2 + 4 * 4
    for a, b in zip(found, plain):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


def test_a_loss_in_the_middle(tf_graph):
    """Where no later step gives its inputs back, a step takes its outputs as they are."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    shape = mtf.Shape([mtf.Dimension("d", 4)])
    x = mtf.import_tf_tensor(mesh, tf.constant([0.1, -0.5, 0.3, 2.0]), shape)
    first = reversible(x, None, x * 2.0, None, mtf.tanh)
    second = reversible(*first, mtf.sin)
    plain = (x * 2.0, x + mtf.tanh(x * 2.0))
    plain = (plain[1], plain[0] + mtf.sin(plain[1]))
    losses = [
        (mtf.square(first[2]), mtf.square(plain[0])),
        (mtf.square(first[2]) * second[0], mtf.square(plain[0]) * plain[0]),
        (mtf.square(second[2]), mtf.square(plain[1])),
    ]
    results = [mtf.gradients([y], [x])[0] for pair in losses for y in pair]
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("", "", [""])
    lowering = mtf.Lowering(graph, {mesh: impl})
    with tf.Session() as session:
        found = session.run([lowering.export_to_tf_tensor(t) for t in results])
    for a, b in zip(found[::2], found[1::2]):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_gradient_uses_outputs_of_the_last_step_only(tf_graph):
    """Of the activations; random values and variables are used again."""
    network = Network(True)
    random = [op for op in network.forward if isinstance(op, mtf.RandomOperation)]
    assert len(random) == 4
    known = [op for op in network.forward if isinstance(op, (mtf.RandomOperation, mtf.Variable))]
    activations = {y for op in network.forward if op not in known for y in op.outputs}
    used = {x for op in network.backward for x in op.inputs} & activations
    last = network.outputs[0].operation
    loss = network.forward[network.forward.index(last) :]
    assert used <= {*last.inputs[-4:], *(y for op in loss for y in op.outputs)}
    again = [op.original for op in network.backward if op.original]
    assert {op.name for op in again} >= {op.name for op in network.forward if "tanh" in op.name}


def test_without_recomputation_inner_values_are_used(tf_graph):
    network = Network(False)
    tanh = {y for op in network.forward if "tanh" in op.name for y in op.outputs}
    assert len(tanh) == 4
    assert tanh <= {x for op in network.backward for x in op.inputs}
    assert not any(op.original for op in network.backward)


def gradients_inside(around):
    """Returns the gradients of a reversible network within another construct."""
    with tf.Graph().as_default():
        tf.set_random_seed(2)
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        value = tf.constant(np.linspace(-1.0, 1.0, 128, dtype="float32").reshape(16, 8))
        x = mtf.import_tf_tensor(mesh, value, mtf.Shape([BATCH, D]))

        def network(x, recompute=True):
            state = (x, None, x * 0.5, None)
            for i in range(3):

                def f(y, i=i):
                    return mtf.layers.dense(mtf.tanh(y), [D], reduced_dims=[D], name=f"layer{i}")

                state = reversible(*state, f, recompute)
            return mtf.reduce_sum(state[0] * state[2])

        grads = around(graph, network, x)
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("", "", [""])
        lowering = mtf.Lowering(graph, {mesh: impl})
        fetches = [lowering.export_to_tf_tensor(g) for g in grads]
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(lowering.copy_masters_to_slices())
            return session.run(fetches)


def differentiated(graph, loss):
    return mtf.gradients([loss], [v.value for v in graph.trainable_variables])


INSIDE = {
    "microbatches": lambda graph, network, x: mtf.serialize_training_step(
        {"x": x}, lambda features: {"loss": network(features["x"])}, BATCH, 4
    )[0],
    "recompute_grad": lambda graph, network, x: differentiated(
        graph, mtf.recompute_grad(network, [x])
    ),
}


@pytest.mark.parametrize("name", INSIDE)
def test_inside_of(name):
    found = gradients_inside(INSIDE[name])
    plain = gradients_inside(lambda graph, network, x: differentiated(graph, network(x, False)))
    assert len(found) == len(plain) == 6
    for a, b in zip(found, plain):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


def peak(recompute, num_layers):
    with tf.Graph().as_default():
        network = Network(
            recompute, num_layers, mtf.Dimension("batch", 256), mtf.Dimension("h", 512)
        )
        metadata = tf.RunMetadata()
        network.run(metadata=metadata, fetch=tf.reduce_sum)
        return peak_bytes(metadata)


@pytest.mark.slow
def test_memory_does_not_grow_with_depth():
    """What TensorFlow allocates, in a run: nothing is kept but outputs and dropout masks."""
    inner = 256 * 512 * 4
    growth = {recompute: peak(recompute, 8) - peak(recompute, 2) for recompute in (False, True)}
    assert growth[False] > 6 * 1.9 * inner  # at least tanh and its dropped-out form
    assert growth[True] < growth[False] / 2


ERRORS = {
    "shapes": (
        lambda w: reversible(w.x, None, w.y, None, mtf.tanh),
        "x1 and x2 must have one shape",
    ),
    "dtypes": (
        lambda w: reversible(w.x, None, mtf.to_bfloat16(w.x), None, mtf.tanh),
        "one dtype.*bfloat16",
    ),
    "function": (
        lambda w: reversible(w.x, None, w.x, None, lambda x: mtf.reduce_sum(x)),
        r"x1 and f\(x2\) must have one shape.*Shape\[\]",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name, tf_graph):
    call, text = ERRORS[name]
    with pytest.raises(ValueError, match=text):
        call(World())
