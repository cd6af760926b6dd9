"""Training: microbatches, determinism, printing and summaries."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.test_utils import NumpyConverter
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.harness import Placing

BATCH, IN, OUT = mtf.Dimension("batch", 16), mtf.Dimension("in", 8), mtf.Dimension("out", 4)
PLACINGS = [
    Placing("x:1", ""),
    Placing("x:4", "batch:x"),
    Placing("x:2,y:2", "batch:x,out:y"),
    Placing("x:2,y:2", "batch:x,in:y", apart=True),
]


def model(features):
    w = mtf.get_variable(
        features["x"].mesh, "w", [IN, OUT], initializer=tf.random_normal_initializer(stddev=0.3)
    )
    y = mtf.tanh(mtf.einsum([features["x"], w], output_shape=features["x"].shape - IN + OUT))
    error = mtf.square(y - features["t"])
    return {
        "loss": mtf.reduce_sum(error),
        "y": y,
        "rows": mtf.reduce_sum(error, reduced_dim=OUT),
        "columns": mtf.reduce_sum(error, output_shape=[OUT]),
    }


def features_on(mesh):
    rng = np.random.RandomState(0)
    data = {
        "x": (rng.normal(size=[16, 8]), [BATCH, IN]),
        "t": (rng.normal(size=[16, 4]), [BATCH, OUT]),
    }
    return {
        key: mtf.import_tf_tensor(mesh, value.astype(np.float32), dims)
        for key, (value, dims) in data.items()
    }


def run(build, placing, steps=1):
    """Returns the values of what `build` makes, in a program with a seed."""
    with tf.Graph().as_default():
        tf.set_random_seed(4)
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        tensors, updates = build(mesh)
        with harness.separate_memories() if placing.apart else tf.name_scope(""):
            lowering = mtf.Lowering(graph, {mesh: placing.impl()})
            exports = [lowering.export_to_tf_tensor(t) for t in tensors]
            train = [lowering.lowered_operation(op) for op in updates]
            copies = [lowering.copy_masters_to_slices(), lowering.copy_slices_to_masters()]
        with harness.session() as session:
            session.run(tf.global_variables_initializer())
            session.run(copies[0])
            values = [session.run([exports, train])[0] for _ in range(steps)]
            session.run(copies[1])
            return values, session.run(tf.global_variables())


def whole(mesh):
    outputs = model(features_on(mesh))
    [grad] = mtf.gradients([outputs["loss"]], [v.value for v in mesh.graph.trainable_variables])
    return [grad, *outputs.values()], []


@pytest.mark.slow_but(4)
@pytest.mark.parametrize("placing", PLACINGS)
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_serialize_training_step(splits, placing):
    def serialized(mesh):
        grads, outputs = mtf.serialize_training_step(features_on(mesh), model, BATCH, splits)
        assert list(outputs) == ["loss", "y", "rows", "columns"]
        assert outputs["y"].shape == mtf.Shape([BATCH, OUT])
        return [*grads, *outputs.values()], []

    [expected], _ = run(whole, PLACINGS[0])
    [values], _ = run(serialized, placing)
    for value, e in zip(values, expected, strict=True):
        harness.assert_close(value, e, 1e-5)


def test_a_microbatch_is_the_inner_index():
    """Number i has the rows i, i + splits, ...; which matters if the model mixes rows."""

    def mixing(features):
        out = model(features)
        first = mtf.Dimension("batch", 4)
        return {"loss": out["loss"], "first": mtf.slice(features["x"], 0, 1, first.name)}

    def serialized(mesh):
        _, outputs = mtf.serialize_training_step(features_on(mesh), mixing, BATCH, 4)
        return [outputs["first"]], []

    [[value]], _ = run(serialized, PLACINGS[0])
    x = np.random.RandomState(0).normal(size=[16, 8])
    # The first row of each microbatch is one of rows 0 .. 3; they are summed, not a batch.
    np.testing.assert_allclose(value[0], x[:4].sum(0), rtol=1e-5)


def test_booleans_of_microbatches():
    """Those of examples become those of the batch."""

    def with_signs(features):
        out = model(features)
        return {"loss": out["loss"], "positive": mtf.greater(features["x"], 0.0)}

    def serialized(mesh):
        features = features_on(mesh)
        _, outputs = mtf.serialize_training_step(features, with_signs, BATCH, 4)
        assert outputs["positive"].dtype == tf.bool
        return [mtf.to_int32(outputs["positive"]), features["x"]], []

    [[positive, x]], _ = run(serialized, PLACINGS[0])
    np.testing.assert_array_equal(positive, x > 0)


def training(mesh):
    features = features_on(mesh)
    noisy = {**features, "x": mtf.dropout(features["x"], rate=0.2)}
    loss = model(noisy)["loss"] * (1 / 64)
    variables = mesh.graph.trainable_variables
    grads = mtf.gradients([loss], [v.value for v in variables])
    return [loss], [mtf.assign_sub(v, g * 0.5) for v, g in zip(variables, grads)]


@pytest.mark.parametrize("placing", PLACINGS)
def test_three_runs_end_equal_to_the_bit(placing):
    results = [run(training, placing, steps=5) for _ in range(3)]
    losses, variables = results[0]
    assert losses[-1][0] < losses[0][0]
    for other_losses, other_variables in results[1:]:
        np.testing.assert_array_equal(other_losses, losses)
        np.testing.assert_array_equal(other_variables, variables)


def test_training_is_the_same_in_all_layouts():
    losses, variables = run(training, PLACINGS[0], steps=5)
    for placing in PLACINGS[1:]:
        other_losses, other_variables = run(training, placing, steps=5)
        np.testing.assert_allclose(other_losses, losses, rtol=1e-5)
        np.testing.assert_allclose(other_variables, variables, rtol=1e-4, atol=1e-6)


# -- printing and summaries


def test_print(capfd, tf_graph):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    x = mtf.import_tf_tensor(mesh, tf.constant([1.5, 2.5, 3.5, 4.5]), "a:4")
    y = mtf.Print(x * 2.0, [x, mtf.reduce_sum(x)], "values: ", summarize=9) + 1.0
    [dx] = mtf.gradients([y], [x])
    lowering = mtf.Lowering(graph, {mesh: Placing("x:2", "a:x").impl()})
    with harness.session() as session:
        value, grad = session.run([lowering.export_to_tf_tensor(t) for t in (y, dx)])
    np.testing.assert_array_equal(value, [4, 6, 8, 10])
    np.testing.assert_array_equal(grad, [2, 2, 2, 2])
    # The slice of the first processor, and the sum over all of them.
    assert "values: [1.5 2.5][12]" in capfd.readouterr().err


def test_print_in_a_loop_that_sums(capfd, tf_graph):
    """What is printed is summed over processors there, so no partial sum is left for the loop."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.import_tf_tensor(mesh, tf.constant([1.5, 2.5, 3.5, 4.5]), "a:4")

    def body(i):
        total = mtf.reduce_sum(x)
        return [mtf.Print(i + 1.0, [total], "total: "), total]

    _, y = mtf.while_loop(
        lambda i: mtf.less(i, 2.0), body, [mtf.constant(mesh, 0.0)], has_accumulators=True
    )
    lowering = mtf.Lowering(mesh.graph, {mesh: Placing("x:2", "a:x").impl()})
    with harness.session() as session:
        assert session.run(lowering.export_to_tf_tensor(y)) == 24.0
    assert "total: [12]" in capfd.readouterr().err


def test_print_in_a_loop_of_eager_code(capfd):
    """In each iteration, in those of a loop within a loop too, and not for the gradient."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    zero, x = mtf.constant(mesh, 0, dtype=tf.int32), mtf.ones(mesh, "a:4")

    def twice(message, body, x):
        def printing(i, x):
            return [i + 1, body(mtf.Print(x, [mtf.reduce_sum(x)], message))]

        return mtf.while_loop(lambda i, _: mtf.less(i, 2), printing, [zero, x])[1]

    y = twice("outer: ", lambda x: twice("inner: ", lambda x: x * 2.0, x), x)
    [dx] = mtf.gradients([y], [x])
    lowering = mtf.Lowering(mesh.graph, {mesh: Placing("x:2", "a:x").impl()})
    assert lowering.export_to_tf_tensor(dx).numpy().tolist() == [16.0] * 4
    err = capfd.readouterr().err
    assert [err.count(f"outer: [{n}]") for n in (4, 16)] == [1, 1]
    assert [err.count(f"inner: [{n}]") for n in (4, 8, 16, 32)] == [1, 1, 1, 1]


def test_print_of_what_follows_an_assignment(tf_graph):
    """With checks, assignments come last, and then what is computed of them."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    v = mtf.get_variable(mesh, "v", "a:4", initializer=tf.zeros_initializer())
    after = mtf.depend(v + 1.0, [mtf.assign(v, v + 1.0)])
    y = mtf.Print(mtf.zeros(mesh, "a:4"), [after], "after: ")
    with mtf.debug.nan_checks():
        lowering = mtf.Lowering(mesh.graph, {mesh: Placing("x:2", "a:x").impl()})
    assert lowering.export_to_tf_tensor(y).shape == [4]


def test_scalar_summaries(tf_graph):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    x = mtf.import_tf_tensor(mesh, tf.constant([1.0, 2.0]), "a:2")
    with tf.variable_scope("train"):
        op = mtf.scalar_summary("loss", mtf.reduce_sum(x))
        mtf.scalar_summary("loss", mtf.reduce_max(x))
    assert isinstance(op, mtf.Operation) and op.name == "train/loss"
    mtf.Lowering(graph, {mesh: Placing("x:2", "a:x").impl()})
    collected = tf.get_collection(mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY)
    assert [name for name, _ in collected] == ["train/loss", "train/loss_1"]
    with harness.session() as session:
        assert session.run([value for _, value in collected]) == [3.0, 2.0]
    fn, args = mtf.utils.create_host_call("/tmp")
    assert callable(fn) and [a.shape.as_list() for a in args] == [[1], [1], [1]]
    mtf.utils.remove_summaries()
    assert tf.get_collection(mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY) == []
    assert mtf.utils.create_host_call("/tmp") is None


# -- utilities


def test_balanced_variable_placer(tf_graph):
    placer = mtf.utils.BalancedVariablePlacer(["cpu:0", "cpu:1", "cpu:2"], [0, 100, 0])
    with tf.device(placer.device_function):
        devices = [tf.get_variable(f"v{i}", [n]).device for i, n in enumerate([10, 30, 10, 6, 5])]
    # Bytes at first 0, 100, 0; the least loaded one takes the next variable.
    assert [d[-1] for d in devices] == ["0", "2", "0", "0", "1"]
    with pytest.raises(ValueError, match="3 devices, 1 numbers"):
        mtf.utils.BalancedVariablePlacer(["a", "b", "c"], [0])


def test_masters_are_placed_by_the_mesh(tf_graph):
    placer = mtf.utils.BalancedVariablePlacer(["cpu:0", "cpu:1"])
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh", variable_placer=placer)
    devices = [mtf.get_variable(mesh, f"v{i}", "a:8").operation.master_device for i in range(4)]
    assert sorted(d[-1] for d in devices) == ["0", "0", "1", "1"]


def test_numpy_converter(tf_graph):
    converter = NumpyConverter()
    array = np.arange(6).reshape(2, 3)
    x = converter.convert_np_array_to_mtf_tensor(array, dim_names=["a", "b"], dtype=tf.float32)
    assert x.shape == mtf.convert_to_shape("a:2,b:3") and x.dtype == tf.float32
    assert converter.convert_np_array_to_mtf_tensor(array).shape == mtf.convert_to_shape(
        "dim0:2,dim1:3"
    )
    w = mtf.get_variable(converter.mesh, "w", "b:3", initializer=tf.constant_initializer(2.0))
    np.testing.assert_array_equal(converter.convert_mtf_tensor_to_np_array(x * w), array * 2)
    lowering, tensor = converter.convert_mtf_tensor_to_tf_tensor(x * 3.0)
    assert isinstance(lowering, mtf.Lowering) and converter.graph is x.graph
    np.testing.assert_array_equal(converter.session.run(tensor), array * 3)


def test_outside_all_rewrites(tf_graph):
    with tf.control_dependencies([tf.no_op()]), mtf.utils.outside_all_rewrites():
        assert tf.constant(1).op.control_inputs == []
