"""Beginning with weights, evaluating and predicting with them, and arguments given by mistake."""

import inspect
import os

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from helpers.train import linear

import mesh_tensorflow as mtf
from mesh_tensorflow.checkpoint import CheckpointError

PLACES = {
    "plain": {},
    "split": {"mesh_shape": "rows:2,cols:2", "layout": "batch:rows,in:cols"},
    "simd": {"mesh_shape": "rows:2", "layout": "batch:rows", "simd": True, "zero": 3},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with averages of weights, its directory, and the losses of the one that goes on."""
    directory = str(tmp_path_factory.mktemp("run[1]"))
    small = {name: array[:7] for name, array in linear.DATA.items()}
    result = linear.fit(3, directory=directory, average=0.5, eval_data=small)
    return directory, result, small


def loss_of(variables, rows):
    y = rows["x"] @ variables["linear/kernel"] + variables["linear/bias"]
    return np.mean(np.square(y - rows["y"]))


def without_dropout(mesh, features):
    return linear.model_fn(mesh, features, False)


@pytest.mark.slow_but(3)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["directory", "path", "arrays"])
def test_weights_to_begin_with(kind, place, trained):
    """The first loss is that of these weights; steps, slots and averages begin anew."""
    directory, result, _ = trained
    given = {"directory": directory, "path": result.checkpoint, "arrays": result.variables}[kind]
    arguments = {"model_fn": without_dropout, "average": 0.5, **PLACES[place]}
    begun = linear.fit(1, init_checkpoint=given, **arguments)
    first = {name: array[:4] for name, array in linear.DATA.items()}
    assert begun.losses[0] == pytest.approx(loss_of(result.variables, first), rel=1e-5)
    assert begun.step == 1
    # After one step the average is between the weights before and after it.
    for name in ("linear/kernel", "linear/bias"):
        mean = (result.variables[name] + begun.variables[name]) / 2
        average = begun.variables[f"{name}/ExponentialMovingAverage"]
        np.testing.assert_allclose(average, mean, rtol=1e-4, atol=1e-6)


def test_a_run_that_goes_on_ignores_them(trained, tmp_path):
    _, result, _ = trained
    first = linear.fit(1, directory=str(tmp_path))
    again = linear.fit(2, directory=str(tmp_path), init_checkpoint=result.variables)
    assert again.history[0]["step"] == 2
    np.testing.assert_allclose(again.losses, linear.fit(2).losses[1:], rtol=1e-6)
    assert first.losses != linear.fit(1, init_checkpoint=result.variables).losses


def scoped(mesh, features):
    with tf.variable_scope("new"):
        return linear.model_fn(mesh, features, False)


def test_names_that_differ(trained, tmp_path):
    directory, result, _ = trained
    first = {name: array[:4] for name, array in linear.DATA.items()}
    expected = pytest.approx(loss_of(result.variables, first), rel=1e-5)
    names = {"new/linear/kernel": "linear/kernel", "new/linear/bias": "linear/bias"}
    for given in (names, lambda name: name.removeprefix("new/")):
        begun = linear.fit(1, model_fn=scoped, init_checkpoint=(directory, given))
        assert begun.losses[0] == expected
    with pytest.raises(ValueError, match=r"none of the model's weights is there.*give a pair"):
        linear.fit(1, model_fn=scoped, init_checkpoint=directory)
    part = (directory, {**names, "new/linear/bias": None})
    begun = linear.fit(1, model_fn=scoped, init_checkpoint=part)
    kernel = {"linear/kernel": result.variables["linear/kernel"], "linear/bias": np.zeros(2, "f")}
    assert begun.losses[0] == pytest.approx(loss_of(kernel, first), rel=1e-5)
    with pytest.raises(
        ValueError, match=r"strict asks for the same[\s\S]*In the checkpoint only \(1\)"
    ) as e:
        linear.fit(1, model_fn=scoped, init_checkpoint=part, init_strict=True)
    assert "linear/bias" in str(e.value)
    linear.fit(1, init_checkpoint=directory, init_strict=True)
    with pytest.raises(
        ValueError, match="names old, which the model does not have; it has linear/"
    ):
        linear.fit(1, init_checkpoint=(directory, {"old": "linear/bias"}))
    with pytest.raises(ValueError, match=r"fit: init_checkpoint: there is no checkpoint in .*none"):
        linear.fit(1, init_checkpoint=str(tmp_path))
    with pytest.raises(ValueError, match="is the path of a checkpoint or of its directory, arrays"):
        linear.fit(1, init_checkpoint={"linear/bias": "other"})
    shape = {"linear/kernel": np.zeros([6, 3], np.float32)}
    with pytest.raises(
        ValueError, match=r"kernel has shape \[6, 3\], but linear/kernel in the mod"
    ):
        linear.fit(1, init_checkpoint=shape)


def test_variables_that_are_not_trained_are_weights_too():
    def model_fn(mesh, features):
        shift = mtf.get_variable(mesh, "shift", [], trainable=False)
        return linear.model_fn(mesh, features, False)["loss"] * 0.0 + shift

    begun = linear.fit(
        1,
        model_fn=model_fn,
        init_checkpoint={"shift": np.float32(7), "linear/bias": np.ones(2, "f")},
    )
    assert begun.losses == [7.0]


def test_a_step_function(trained):
    directory, result, _ = trained

    def program(features):
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        named = {n: mtf.import_tf_tensor(mesh, x, linear.DIMS[n]) for n, x in features.items()}
        loss = without_dropout(mesh, named)["loss"]
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:1", "", ["cpu:0"])
        return mtf.Lowering(graph, {mesh: impl}).export_to_tf_tensor(loss)

    begun = linear.fit(1, model_fn=mtf.function(program), optimizer=None, init_checkpoint=directory)
    first = {name: array[:4] for name, array in linear.DATA.items()}
    assert begun.losses[0] == pytest.approx(loss_of(result.variables, first), rel=1e-5)
    store = mtf.VariableStore()
    with pytest.raises(ValueError, match="the store of this step function has none yet"):
        linear.fit(1, model_fn=program, optimizer=None, store=store, init_checkpoint=directory)


# -- evaluate and predict


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("place", PLACES)
def test_evaluations_are_those_of_the_run(place, trained):
    directory, result, small = trained
    arguments = {"dims": linear.DIMS, "average": 0.5, **PLACES[place]}
    found = mtf.train.evaluate(linear.model_fn, small, directory=directory, **arguments)
    expected = {n: v for n, v in result.evaluations[-1].items() if n != "step"}
    assert found == pytest.approx(expected, rel=1e-5)
    del arguments["average"]
    last = mtf.train.evaluate(linear.model_fn, small, directory=result.variables, **arguments)
    assert last["loss"] == pytest.approx(loss_of(result.variables, small), rel=1e-5)


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("place", PLACES)
def test_predictions_are_in_the_order_of_the_data(place, trained):
    directory, result, small = trained
    dims = linear.DIMS["x"]

    def model_fn(mesh, x, training):
        assert training is False
        y = mtf.layers.dense(x, [linear.OUT], reduced_dims=[linear.IN], name="linear")
        turned = mtf.transpose(y, [linear.OUT, y.shape[0]])
        return {"y": y, "turned/y": turned, "first": mtf.gather(y, 0, linear.OUT)}

    expected = small["x"] @ result.variables["linear/kernel"] + result.variables["linear/bias"]
    for data in (small["x"], list(small["x"]), tf.data.Dataset.from_tensor_slices(small["x"])):
        found = mtf.train.predict(model_fn, data, directory=directory, dims=dims, **PLACES[place])
        assert list(found) == ["y", "turned/y", "first"]
        np.testing.assert_allclose(found["y"], expected, rtol=1e-5)
        np.testing.assert_array_equal(found["turned/y"], found["y"])
        np.testing.assert_array_equal(found["first"], found["y"][:, 0])
    pair = mtf.train.predict(
        lambda mesh, x: (model_fn(mesh, x, False)["y"], x),
        small["x"][:2],
        directory=directory,
        dims=dims,
    )
    np.testing.assert_allclose(pair[0], expected[:2], rtol=1e-5)
    np.testing.assert_array_equal(pair[1], small["x"][:2])


def test_arrays_of_other_dtypes_and_shapes(trained):
    """Arrays become what the variables are, as at the beginning of a training."""
    _, result, small = trained
    given = {"dims": linear.DIMS, **PLACES["split"]}
    for dtype, tolerance in ((np.float64, 1e-5), (tf.bfloat16.as_numpy_dtype, 0.02)):
        arrays = {name: array.astype(dtype) for name, array in result.variables.items()}
        found = mtf.train.evaluate(linear.model_fn, small, directory=arrays, **given)
        assert found["loss"] == pytest.approx(loss_of(result.variables, small), rel=tolerance)
    arrays = {"linear/kernel": np.zeros([6, 3], "f"), "other": np.zeros(1, "f")}
    text = (
        r"\(arrays\) is not of this program[\s\S]*Missing .*\n *linear/bias \[2\]"
        r"[\s\S]*linear/kernel: .*\[6, 3\] in the file, .*\[6, 2\] in the program[\s\S]*other \[1\]"
    )
    with pytest.raises(CheckpointError, match=text):
        mtf.train.evaluate(linear.model_fn, small, directory=arrays, **given)


def test_a_saved_model_predicts_the_same(trained, tmp_path):
    directory, result, small = trained
    path, dims = str(tmp_path / "made" / "model"), {"x": linear.DIMS["x"], "n": [linear.BATCH]}

    def model_fn(mesh, features):
        y = mtf.layers.dense(features["x"], [linear.OUT], reduced_dims=[linear.IN], name="linear")
        return y, features["n"] + 1

    data = {"x": small["x"], "n": np.arange(7, dtype=np.int32)}
    given = {"directory": directory, "dims": dims}
    assert mtf.train.export(model_fn, data, path, average=0.5, **given) is None
    serve = tf2.saved_model.load(path).signatures["serving_default"]
    expected = mtf.train.predict(model_fn, data, average=0.5, **given)
    for rows in (1, 3, 4):
        fed = {name: tf2.constant(array[:rows]) for name, array in data.items()}
        found = serve(**fed)
        assert sorted(found) == ["output_0", "output_1"]
        np.testing.assert_allclose(found["output_0"], expected[0][:rows], rtol=1e-5)
        np.testing.assert_array_equal(found["output_1"], expected[1][:rows])
    text = "at most 4 rows at a time, and as many of each"
    for wrong in ({"x": 5, "n": 5}, {"x": 3, "n": 2}):
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            serve(**{name: tf2.constant(data[name][:n]) for name, n in wrong.items()})
    with pytest.raises(ValueError, match=r"there is something at .*model already"):
        mtf.train.export(model_fn, data, path, **given)
    with pytest.raises(CheckpointError, match="is not of this program"):
        lost = {"linear/kernel": result.variables["linear/kernel"]}
        mtf.train.export(model_fn, data, str(tmp_path / "b"), directory=lost, dims=dims)
    with pytest.raises(ValueError, match="export: the data have no rows"):
        none = {name: array[:0] for name, array in data.items()}
        mtf.train.export(model_fn, none, str(tmp_path / "b"), **given)
    assert sorted(os.listdir(tmp_path)) == ["made"] and os.listdir(tmp_path / "made") == ["model"]


def _predict(model_fn=lambda mesh, x: x, data=linear.DATA["x"], **arguments):
    arguments = {"directory": {"a": np.zeros(1)}, "dims": linear.DIMS["x"], **arguments}
    return mtf.train.predict(model_fn, data, **arguments)


def test_what_predictions_cannot_be(trained, tmp_path):
    directory, _, _ = trained
    with pytest.raises(
        ValueError, match=r"loss of the model function has the dimensions \[\].*eval"
    ):
        _predict(lambda mesh, x: {"loss": mtf.reduce_sum(x)})
    with pytest.raises(ValueError, match="should return mtf Tensors, but output is 3"):
        _predict(lambda mesh, x: 3)
    with pytest.raises(ValueError, match="predict: directory is where the weights are"):
        _predict(directory=None)
    with pytest.raises(ValueError, match="predict: directory: there is no checkpoint in"):
        _predict(directory=str(tmp_path))
    with pytest.raises(ValueError, match="predict: dims is missing"):
        _predict(dims=None)
    with pytest.raises(ValueError, match="predict: the data have no rows"):
        _predict(data=linear.DATA["x"][:0])
    with pytest.raises(
        CheckpointError, match=r"is not of this program[\s\S]*other/kernel \[6, 2\]"
    ):
        _predict(
            lambda mesh, x: mtf.layers.dense(
                x, [linear.OUT], reduced_dims=[linear.IN], name="other"
            ),
            directory=directory,
        )


# -- arguments

MISTAKES = {
    "epochs": ({"epochs": 3}, TypeError, r"no argument 'epochs': .*steps = epochs \* \(rows // b"),
    "batch_size": ({"batch_size": 32}, TypeError, "the size of a batch is that of the first dim"),
    "two": (
        {"epochs": 3, "batch_size": 2},
        TypeError,
        "'epochs': .*; and none 'batch_size': the si",
    ),
    "typo": ({"directry": "a"}, TypeError, "no argument 'directry'; did you mean directory?"),
    "rate": ({"learning_rate": "0.1"}, TypeError, "number or a function .* but is '0.1', a str"),
    "class": (
        {"callbacks": [mtf.train.EarlyStopping]},
        TypeError,
        r"among the callbacks is none. Make an object of it: EarlyStopping\(\)",
    ),
    "function": ({"callbacks": [print]}, TypeError, "Derive its class from mtf.train.Callback, w"),
    "no list": ({"callbacks": mtf.train.JsonLinesLog()}, TypeError, "callbacks is a list of call"),
    "negative": ({"seed": -1}, ValueError, r"seed is None or an integer from 0 .*, but is -1"),
    "fraction": ({"seed": 0.5}, ValueError, r"seed is None or an integer from 0 .*, but is 0.5"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_arguments_given_by_mistake(case):
    given, error, text = MISTAKES[case]
    if "learning_rate" in given:
        given = {**given, "optimizer": mtf.optimize.SgdOptimizer}
    with pytest.raises(error, match=text):
        linear.fit(1, **given)
    if "epochs" in given:
        with pytest.raises(error, match="evaluate" if case == "typo" else text):
            mtf.train.evaluate(linear.model_fn, linear.DATA, **given)


def test_what_is_right_is_as_before():
    assert list(inspect.signature(mtf.train.fit).parameters)[:3] == ["model_fn", "data", "steps"]
    rates = [0.1, np.float32(0.1), tf.constant(0.1), lambda step: 0.1]
    losses = [
        linear.fit(2, optimizer=mtf.optimize.SgdOptimizer, learning_rate=rate).losses
        for rate in rates
    ]
    for found in losses[1:]:
        np.testing.assert_allclose(found, losses[0], rtol=1e-6)
