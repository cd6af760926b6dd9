"""Clipping, accumulation and averages, in every front end and layout."""

import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import simd_mesh_impl
from mesh_tensorflow.auto_mtf._space import Storing
from mesh_tensorflow.auto_mtf.objective import ResidentMemory
from mesh_tensorflow.testing import harness

optimize = mtf.optimize
CPUS = [f"/cpu:{i}" for i in range(4)]
BATCH, IN, HIDDEN = mtf.Dimension("batch", 8), mtf.Dimension("in", 4), mtf.Dimension("hidden", 6)
DATA = np.random.RandomState(0).randn(8, 4).astype(np.float32)
KERNEL = np.random.RandomState(1).randn(4, 6).astype(np.float32)
WEIGHTS = np.array([1, 1, 0, 1, 0, 0, 0, 1], np.float32)


def implementation(mesh_shape, layout):
    size = mtf.convert_to_shape(mesh_shape).size
    return mtf.placement_mesh_impl.PlacementMeshImpl(mesh_shape, layout, [""] * size)


def evaluated(build, mesh_shape="rows:2,cols:2", layout="batch:rows,hidden:cols", simd=False):
    """Returns the values of the Tensors that a function of a Mesh returns, in a session."""
    with tf.Graph().as_default(), harness.session() as session:

        def program():
            mesh = mtf.Mesh(mtf.Graph(), "mesh")
            ys = build(mesh)
            if simd:
                impl = simd_mesh_impl.SimdMeshImpl(mesh_shape, layout)
            else:
                impl = implementation(mesh_shape, layout)
            lowering = mtf.Lowering(mesh.graph, {mesh: impl})
            before.append(None if simd else lowering.copy_masters_to_slices())
            return [lowering.export_to_tf_tensor(y) for y in ys]

        before = []
        exported = simd_mesh_impl.replicate(program, devices=CPUS) if simd else program()
        session.run(tf.global_variables_initializer())
        if before[0] is not None:
            session.run(before[0])
        return session.run(exported)


def batch_of(x):
    """Returns the batch dimension, which is smaller in a microbatch."""
    return next(d for d in x.shape if d.name == "batch")


def loss_fn(x):
    w = mtf.get_variable(x.mesh, "w", [IN, HIDDEN], initializer=tf.constant_initializer(KERNEL))
    mtf.get_variable(x.mesh, "unused", [IN])
    return mtf.reduce_mean(mtf.square(mtf.tanh(mtf.einsum([x, w], [batch_of(x), HIDDEN]))))


def data(mesh):
    return mtf.import_tf_tensor(mesh, tf.constant(DATA), [BATCH, IN])


def accumulated(mesh, count, fn=loss_fn):
    result = optimize.accumulate_gradients(fn, data(mesh), BATCH, count)
    assert [v.name for v in result.variables] == ["w", "unused"]
    assert result.grads[1] is None
    return [result.loss, result.grads[0]]


def expected():
    y = np.tanh(DATA @ KERNEL)
    dy = 2 * y * (1 - y**2) / y.size
    return np.mean(y**2), DATA.T @ dy


@pytest.mark.parametrize("simd", [False, True], ids=["placement", "simd"])
@pytest.mark.parametrize("count", [1, 4])
def test_accumulation(count, simd):
    found = evaluated(lambda mesh: accumulated(mesh, count), simd=simd)
    for value, wanted in zip(found, expected()):
        np.testing.assert_allclose(value, wanted, rtol=1e-6, atol=1e-7)


def test_accumulation_eagerly_and_in_a_function():
    def lowered():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        ys = accumulated(mesh, 2)
        lowering = mtf.Lowering(mesh.graph, {mesh: implementation("rows:2", "batch:rows")})
        return [lowering.export_to_tf_tensor(y) for y in ys]

    for run in (lowered, mtf.function(lowered)):
        for value, wanted in zip(run(), expected()):
            np.testing.assert_allclose(value, wanted, rtol=1e-6, atol=1e-7)


def test_accumulation_with_weights():
    """The quotient of totals, where microbatches have different weights."""

    def weighted(inputs):
        x, weights, scale = inputs["x"], inputs["weights"], inputs["scale"]
        w = mtf.get_variable(x.mesh, "w", [IN, HIDDEN], initializer=tf.constant_initializer(KERNEL))
        losses = mtf.reduce_mean(
            mtf.square(mtf.einsum([x, w], [batch_of(x), HIDDEN])), reduced_dim=HIDDEN
        )
        return mtf.reduce_sum(losses * weights) * scale, mtf.reduce_sum(weights)

    def build(mesh):
        inputs = {
            "x": data(mesh),
            "weights": mtf.import_tf_tensor(mesh, tf.constant(WEIGHTS), [BATCH]),
            "scale": mtf.constant(mesh, 3.0),
        }
        result = optimize.accumulate_gradients(weighted, inputs, BATCH, 4)
        return [result.loss, *result.grads]

    loss, grad = evaluated(build)
    y = DATA @ KERNEL
    np.testing.assert_allclose(
        loss, 3 * np.sum(np.mean(y**2, -1) * WEIGHTS) / WEIGHTS.sum(), rtol=1e-5
    )
    dy = 3 * 2 * y * WEIGHTS[:, None] / 6 / WEIGHTS.sum()
    np.testing.assert_allclose(grad, DATA.T @ dy, rtol=1e-5, atol=1e-6)


def test_accumulation_takes_less_memory(tf_graph):
    def peak(count):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        batch, d = mtf.Dimension("batch", 256), mtf.Dimension("d", 8)

        def fn(x):
            for i in range(4):
                out = mtf.Dimension(f"d{i}", 16)
                x = mtf.tanh(mtf.layers.dense(x, [out], x.shape.dims[1:], name=f"layer{count}_{i}"))
            return mtf.reduce_mean(mtf.square(x))

        result = optimize.accumulate_gradients(fn, mtf.zeros(mesh, [batch, d]), batch, count)
        outputs, plain = [result.loss, *result.grads], Storing(mtf.Shape([]), None)
        return ResidentMemory(mesh.graph.operations, outputs, frozenset(), plain).peak({})

    assert peak(8) < peak(1) / 2


NORMS = {
    "clipped": (1.0, 1.0),
    "kept": (100.0, 1.0),
    "zero": (1.0, 0.0),
    "infinite": (1.0, np.inf),
    "nan": (1.0, np.nan),
    "measured": (np.inf, 1.0),
}


@pytest.mark.parametrize("name", NORMS)
def test_clipping(name):
    """The same as TensorFlow's, in split layouts and in bfloat16."""
    bound, factor = NORMS[name]

    def build(mesh):
        x = mtf.import_tf_tensor(mesh, tf.constant(DATA * np.float32(factor)), [BATCH, IN])
        y = mtf.import_tf_tensor(mesh, tf.constant(KERNEL), [IN, HIDDEN]) * float(factor != 0)
        grads, norm = optimize.clip_by_global_norm([x, None, y, mtf.to_bfloat16(y)], bound)
        assert grads[1] is None and grads[3].dtype == tf.bfloat16
        return [norm, grads[0], grads[2], mtf.to_float(grads[3])]

    with np.errstate(invalid="ignore"):
        arrays = [DATA * np.float32(factor), KERNEL * np.float32(factor != 0)]
    short = tf.cast(tf.cast(arrays[1], tf.bfloat16), tf.float32)
    # TensorFlow multiplies by the bound, which is to be finite.
    finite = min(bound, 1e30)
    wanted, norm = tf.clip_by_global_norm([tf.constant(a) for a in arrays] + [short], finite)
    found = evaluated(build)
    np.testing.assert_allclose(found[0], norm, rtol=1e-5)
    for value, one in zip(found[1:3], wanted):
        np.testing.assert_allclose(value, one, rtol=1e-5, equal_nan=True)
    np.testing.assert_allclose(found[3], wanted[2], rtol=1e-2, equal_nan=True)


class Averaged:
    """A training step that doubles a variable, and averages it."""

    def __init__(self, average, initializer=None, dtype=tf.float32):
        self.graph = mtf.Graph()
        self.mesh = mtf.Mesh(self.graph, "mesh")
        initializer = initializer or tf.constant_initializer(KERNEL)
        w = mtf.get_variable(self.mesh, "w", [IN, HIDDEN], dtype=dtype, initializer=initializer)
        self.variables = [w.operation]
        self.updates = [mtf.assign_add(w, mtf.to_float(w))]
        self.updates += average.apply(self.variables, after=self.updates)
        self.average = average.average(w.operation)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_averages_in_a_session(dtype, tmp_path):
    average = optimize.ExponentialMovingAverage(0.75)
    dtype = mtf.VariableDType(tf.float32, tf.float32, tf.as_dtype(dtype))
    kernel = KERNEL if dtype.activation_dtype == tf.float32 else KERNEL.round(1)
    with tf.Graph().as_default(), harness.session() as session:
        training = Averaged(average, tf.constant_initializer(kernel), dtype)
        swaps = average.swap(training.variables)
        impl = implementation("rows:2,cols:2", "in:rows,hidden:cols")
        lowering = mtf.Lowering(training.graph, {training.mesh: impl})
        train = [lowering.lowered_operation(op) for op in training.updates]
        swap = [lowering.lowered_operation(op) for op in swaps]
        w, mean = (v.get_master().read_value() for v in training.graph.all_variables)
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        start = session.run(w)
        np.testing.assert_array_equal(session.run(mean), start)
        wanted, value = start, start
        for _ in range(3):
            session.run(train)
            value = session.run(w)
            wanted = 0.75 * wanted + 0.25 * value
            np.testing.assert_allclose(session.run(mean), wanted, rtol=1e-6)
        session.run(swap)
        np.testing.assert_allclose(session.run(w), wanted, rtol=1e-6)
        np.testing.assert_array_equal(session.run(mean), value)
        session.run(swap)
        np.testing.assert_array_equal(session.run(w), value)
        path = mtf.checkpoint.Saver().save(session, str(tmp_path / "model"))
    assert [name for name, _ in tf.train.list_variables(path)] == [
        "w",
        "w/ExponentialMovingAverage",
    ]
    with tf.Graph().as_default(), harness.session() as session:
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        w = mtf.get_variable(mesh, "w", [IN, HIDDEN])
        named = average.variables_to_restore(mesh.graph)
        assert list(named) == ["w/ExponentialMovingAverage"]
        mtf.Lowering(mesh.graph, {mesh: implementation("all:2", "hidden:all")})
        mtf.checkpoint.Saver(named).restore(session, path)
        value = session.run(w.operation.get_master().read_value())
    np.testing.assert_allclose(value, wanted, rtol=1e-6)


def test_averages_begin_as_random_values(tf_graph):
    """Without a seed of the program, too; also in a SIMD program, where they are averaged."""
    average = optimize.ExponentialMovingAverage(0.5)
    made = []

    def program():
        made.append(Averaged(average, tf.random_normal_initializer()))
        impl = simd_mesh_impl.SimdMeshImpl("rows:2,cols:2", "in:rows,hidden:cols")
        lowering = mtf.Lowering(made[0].graph, {made[0].mesh: impl})
        return tf.group([lowering.lowered_operation(op) for op in made[0].updates])

    train = simd_mesh_impl.replicate(program, devices=CPUS)
    w, mean = (v.get_master().read_value() for v in made[0].graph.all_variables)
    with harness.session() as session:
        session.run(tf.global_variables_initializer())
        start = session.run(w)
        np.testing.assert_array_equal(session.run(mean), start)
        session.run(train)
        np.testing.assert_allclose(session.run(w), 2 * start, rtol=1e-6)
        np.testing.assert_allclose(session.run(mean), 1.5 * start, rtol=1e-6)


@pytest.mark.parametrize("is_function", [False, True], ids=["eager", "function"])
def test_averages_without_sessions(is_function):
    average = optimize.ExponentialMovingAverage(0.9, num_updates=lambda step: 0)
    store = mtf.VariableStore()

    def step():
        with store.scope():
            training = Averaged(average)
            impl = implementation("rows:2", "in:rows")
            lowering = mtf.Lowering(training.graph, {training.mesh: impl})
            made = [lowering.lowered_operation(op) for op in training.updates]
            with tf.control_dependencies([op for op in made if op is not None]):
                return tf.constant(0)

    run = tf.function(step, autograph=False) if is_function else step
    wanted, value = KERNEL, KERNEL
    for _ in range(2):
        run()
        value = 2 * value
        wanted = 0.1 * wanted + 0.9 * value  # (1 + 0) / (10 + 0) is less than 0.9
        if is_function:
            np.testing.assert_allclose(store.value("w/ExponentialMovingAverage"), wanted, rtol=1e-6)
    np.testing.assert_allclose(store.value("w/ExponentialMovingAverage"), wanted, rtol=1e-6)
    with average.averaged(store):
        np.testing.assert_allclose(store.value("w"), wanted, rtol=1e-6)
    np.testing.assert_array_equal(store.value("w"), value)


def wrong_loss(x):
    return mtf.square(x)


ERRORS = {
    "divisor": (
        lambda mesh: optimize.accumulate_gradients(loss_fn, data(mesh), BATCH, 3),
        "batch=8 is not divisible by num_microbatches=3; choose a divisor of 8",
    ),
    "no_batch": (
        lambda mesh: optimize.accumulate_gradients(loss_fn, mtf.zeros(mesh, [IN]), BATCH, 2),
        r"no input has the dimension batch=8; they are of Shape\[in=4\]",
    ),
    "no_tensor": (
        lambda mesh: optimize.accumulate_gradients(loss_fn, DATA, BATCH, 2),
        "inputs must be an mtf.Tensor, or a list or dictionary of them",
    ),
    "no_scalar": (
        lambda mesh: optimize.accumulate_gradients(wrong_loss, data(mesh), BATCH, 2),
        "loss_fn must return a scalar Tensor, or two: .* mtf.reduce_mean makes one",
    ),
    "no_gradient": (
        lambda mesh: optimize.clip_by_global_norm([None], 1.0),
        "none of the 1 gradients is a Tensor; does the loss depend on the variables?",
    ),
    "no_list": (
        lambda mesh: optimize.global_norm(data(mesh)),
        "global_norm: give a list of mtf.Tensors, not",
    ),
    "bound": (
        lambda mesh: optimize.clip_by_global_norm([data(mesh)], 0.0),
        "max_norm must be above 0, not 0.0",
    ),
    "decay": (
        lambda mesh: optimize.ExponentialMovingAverage(999),
        "decay must be between 0 and 1, not 999; 0.999 averages",
    ),
    "no_average": (
        lambda mesh: (
            optimize.ExponentialMovingAverage(0.9).averaged(mtf.VariableStore()).__enter__()
        ),
        "no variable of the store has an average '<var>/ExponentialMovingAverage'",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name, tf_graph):
    call, text = ERRORS[name]
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    data(mesh)
    with pytest.raises(ValueError, match=re.compile(text, re.DOTALL)):
        call(mesh)
    assert len(mesh.graph.operations) <= 3
