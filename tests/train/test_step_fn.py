"""mtf.train.fit with a step function: @mtf.function, plain eager code, a session."""

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from helpers.train import linear

import mesh_tensorflow as mtf


def program(features, training, layout="batch:rows"):
    """Builds and lowers one step of the linear model; returns its loss."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    arrays = {n: mtf.import_tf_tensor(mesh, features[n], d) for n, d in linear.DIMS.items()}
    loss = linear.model_fn(mesh, arrays, training)["loss"]
    updates = []
    if training:
        grads = mtf.gradients([loss], [v.value for v in graph.trainable_variables])
        optimizer = mtf.optimize.MomentumOptimizer(0.05, 0.9)
        updates = optimizer.apply_grads(grads, graph.trainable_variables)
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("rows:2", layout, ["cpu:0"] * 2)
    lowering = mtf.Lowering(graph, {mesh: impl})
    done = [lowering.lowered_operation(op) for op in updates]
    with tf.control_dependencies([op for op in done if op is not None]):
        return tf.identity(lowering.export_to_tf_tensor(loss))


def compiled(layout="batch:rows"):
    """Returns a training and an evaluation function with one store."""

    @mtf.function
    def step_fn(features):
        return {"loss": program(features, True, layout)}

    @tf2.function(autograph=False)
    def eval_fn(features):
        with step_fn.store.scope():
            return program(features, False, layout)

    return step_fn, eval_fn


def fit(steps, step_fn, **arguments):
    return linear.fit(steps, model_fn=step_fn, optimizer=None, **arguments)


@pytest.mark.slow
def test_compiled(tmp_path):
    """The same numbers as with a model function, and exact after a resume in another layout."""
    step_fn, eval_fn = compiled()
    small = {name: array[:8] for name, array in linear.DATA.items()}
    whole = fit(6, step_fn, eval_fn=eval_fn, eval_data=small)
    np.testing.assert_allclose(whole.losses, linear.fit(6).losses, rtol=1e-5)
    np.testing.assert_allclose(
        whole.evaluations[-1]["loss"],
        linear.fit(6, eval_data=small).evaluations[-1]["loss"],
        rtol=1e-5,
    )
    fit(3, compiled()[0], directory=str(tmp_path))
    rest = fit(6, compiled("in:rows")[0], directory=str(tmp_path))
    np.testing.assert_allclose(rest.losses, whole.losses[3:], rtol=1e-5)
    names = [name for name, _ in tf.train.list_variables(rest.checkpoint)]
    assert names == sorted(linear.fit(1).variables)
    by_model = linear.fit(7, directory=str(tmp_path))
    assert [record["step"] for record in by_model.history] == [7]


def test_eager(tmp_path):
    store = mtf.VariableStore()

    def step_fn(features):
        with store.scope():
            return program(features, True)

    whole = fit(4, step_fn, store=store)
    assert whole.losses[-1] < whole.losses[0]
    store = mtf.VariableStore()
    fit(2, step_fn, store=store, directory=str(tmp_path))
    store = mtf.VariableStore()
    rest = fit(4, step_fn, store=store, directory=str(tmp_path))
    assert rest.losses == whole.losses[2:]


@pytest.mark.parametrize("kind", ["dataset", "list"])
def test_examples_that_are_numbers(kind):
    data = tf2.data.Dataset.range(1, 4) if kind == "dataset" else [1, 2, 3]
    step_fn = mtf.function(lambda i: tf.cast(i, tf.float32))
    result = mtf.train.fit(
        step_fn, data, 5, eval_data=data, eval_fn=step_fn, progress=False, log_every=1
    )
    assert result.losses == [1, 2, 3, 1, 2] and result.evaluations[-1]["loss"] == 2


@pytest.mark.parametrize("name", ["ExponentialMovingAverage", "mean_of_weights"])
def test_averages_begin_as_the_weights_that_are_loaded(name):
    average = mtf.optimize.ExponentialMovingAverage(0.75, name=name)

    @mtf.function
    def step_fn(features):
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        w = mtf.get_variable(mesh, "w", "d:2")
        variables = graph.trainable_variables
        updates = mtf.optimize.SgdOptimizer(1.0).apply_grads([mtf.ones_like(w)], variables)
        average.apply(variables, after=updates)
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("", "", ["cpu:0"])
        return mtf.Lowering(graph, {mesh: impl}).export_to_tf_tensor(mtf.reduce_sum(w))

    given = {"w": np.array([3.0, 5.0], np.float32)}
    result = mtf.train.fit(step_fn, [1.0], 1, init_checkpoint=given, progress=False)
    found = result.variables
    np.testing.assert_allclose(found["w"], [2.0, 4.0])
    np.testing.assert_allclose(found[f"w/{name}"], [2.75, 4.75])


def test_what_the_store_tracks_is_saved(tmp_path):
    """Variables of TensorFlow beside those of the program, but not another number of steps."""

    def counting():
        step_fn, _ = compiled()
        examples = tf2.Variable(0.0, name="examples")
        step_fn.store.track(examples)
        step_fn.store.track(tf.train.get_or_create_global_step())

        def counted(features):
            examples.assign_add(len(features["x"]))
            return step_fn(features)

        return counted, {"store": step_fn.store, "directory": str(tmp_path)}

    step_fn, arguments = counting()
    result = fit(2, step_fn, **arguments)
    rows = linear.DIMS["x"][0].size
    assert result.variables["examples"] == 2 * rows and "global_step" not in result.variables
    step_fn, arguments = counting()
    assert fit(3, step_fn, **arguments).variables["examples"] == 3 * rows
    saved = tf.train.load_checkpoint(str(tmp_path))
    assert saved.get_tensor("examples") == 3 * rows and saved.get_tensor("global_step") == 3


def test_a_session_of_the_user_gets_arrays():
    """In a graph: nothing is added to it by a step."""
    store = mtf.VariableStore()
    with tf.Graph().as_default() as graph, tf.Session() as session:
        x = tf.placeholder(tf.float32, [4, 6])
        loss = tf.reduce_mean(x)
        before = len(graph.get_operations())

        def step_fn(features):
            return session.run(loss, {x: features["x"]})

        result = fit(3, step_fn, store=store, log_every=1)
        assert len(result.losses) == 3
        assert len(graph.get_operations()) == before


def test_errors():
    step_fn, _ = compiled()
    with pytest.raises(ValueError, match=r"give fit\(eval_fn=...\), a function of a batch"):
        fit(1, step_fn, eval_data=linear.DATA)
    with pytest.raises(ValueError, match="loss of the step function has the shape"):
        fit(1, lambda features: features["x"], store=mtf.VariableStore())
