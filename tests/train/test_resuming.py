"""What fit goes on from: damaged checkpoints, lists that are gone, weights that are not numbers."""

import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.train import linear

import mesh_tensorflow as mtf
from mesh_tensorflow.checkpoint import CheckpointError, fault_of, last_good


def _session(steps, directory, **arguments):
    return linear.fit(steps, directory=directory, save_every=1, **arguments)


def _simd(steps, directory, **arguments):
    return _session(
        steps, directory, mesh_shape="rows:2", layout="batch:rows", simd=True, **arguments
    )


def _step_function(steps, directory, **arguments):
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("rows:2", "batch:rows", ["cpu:0"] * 2)

    @mtf.function
    def step_fn(features):
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        named = {
            name: mtf.import_tf_tensor(mesh, x, linear.DIMS[name]) for name, x in features.items()
        }
        loss = linear.model_fn(mesh, named, False)["loss"]
        variables = graph.trainable_variables
        grads = mtf.gradients([loss], [v.value for v in variables])
        updates = mtf.optimize.SgdOptimizer(0.05).apply_grads(grads, variables)
        lowering = mtf.Lowering(graph, {mesh: impl})
        with tf.control_dependencies([lowering.lowered_operation(op) for op in updates]):
            return tf.identity(lowering.export_to_tf_tensor(loss))

    return linear.fit(
        steps, model_fn=step_fn, optimizer=None, directory=directory, save_every=1, **arguments
    )


ENGINES = {"session": _session, "simd": _simd, "step function": _step_function}


def _data(directory, step):
    [name] = [f for f in os.listdir(directory) if f.startswith(f"model.ckpt-{step}.data-00000")]
    return os.path.join(directory, name)


def _flip(path):
    with open(path, "r+b") as file:
        content = bytearray(file.read())
        content[:8] = bytes(255 - byte for byte in content[:8])
        file.seek(0)
        file.write(content)


# What happens to the last checkpoint, and how the error says so.
DAMAGES = {
    "data cut": lambda d: open(_data(d, 4), "r+b").truncate(3),
    "data empty": lambda d: open(_data(d, 4), "r+b").truncate(0),
    "data of other bytes": lambda d: _flip(_data(d, 4)),
    "data missing": lambda d: os.remove(_data(d, 4)),
    "index cut": lambda d: open(f"{d}/model.ckpt-4.index", "r+b").truncate(30),
    "index empty": lambda d: open(f"{d}/model.ckpt-4.index", "r+b").truncate(0),
    "index missing": lambda d: os.remove(f"{d}/model.ckpt-4.index"),
}


def _content(directory):
    return {
        name: open(os.path.join(directory, name), "rb").read() for name in os.listdir(directory)
    }


CASES = [(d, "session") for d in DAMAGES] + [("index cut", "simd"), ("data cut", "step function")]


@pytest.mark.slow_but(1)
@pytest.mark.parametrize(("damage", "engine"), CASES)
def test_a_damaged_last_checkpoint(damage, engine, tmp_path):
    """It is named, and the last whole one, which is gone on from only if that is asked for."""
    fit, directory = ENGINES[engine], str(tmp_path / "run")
    expected = fit(6, str(tmp_path / "whole"))
    fit(4, directory)
    DAMAGES[damage](directory)
    before = _content(directory)
    with pytest.raises(CheckpointError, match=r"model\.ckpt-4[\s\S]*model\.ckpt-3") as e:
        fit(6, directory)
    assert "last_good" in str(e.value) and str(e.value).startswith("fit: the last checkpoint of")
    assert _content(directory) == before
    again = fit(6, directory, resume="last_good")
    assert again.history[0]["step"] == 4 and again.checkpoint.endswith("model.ckpt-6")
    assert again.losses == expected.losses[3:]
    assert last_good(directory) == again.checkpoint
    assert fit(7, directory).history[0]["step"] == 7


LISTS = {
    "empty": b"",
    "cut": b"model_checkpoint_pa",
    "of other text": b"garbage{{{",
    "of bytes": b"\x00\xff\xfe\x80",
    "missing": None,
}


@pytest.mark.slow_but(2)
@pytest.mark.parametrize(
    ("content", "engine"), [*((c, "session") for c in LISTS), ("empty", "step function")]
)
def test_a_list_of_checkpoints_that_cannot_be_read(content, engine, tmp_path, capsys):
    """The directory is looked at: nothing begins anew over checkpoints that are there."""
    fit, directory = ENGINES[engine], str(tmp_path)
    fit(4, directory)
    path = os.path.join(directory, "checkpoint")
    os.remove(path)
    if LISTS[content] is not None:
        with open(path, "wb") as file:
            file.write(LISTS[content])
    again = fit(6, directory, progress=True)
    assert again.history[0]["step"] == 5
    assert "is missing or cut; the checkpoint there of most steps is" in capsys.readouterr().err
    assert tf.train.latest_checkpoint(directory) == again.checkpoint


def test_an_earlier_checkpoint_that_the_list_names(tmp_path):
    directory = str(tmp_path)
    _session(4, directory)
    tf.train.update_checkpoint_state(directory, os.path.join(directory, "model.ckpt-2"))
    assert _session(4, directory).history[0]["step"] == 3


def test_checkpoints_of_which_none_is_whole(tmp_path):
    directory = str(tmp_path)
    _session(2, directory)
    for step in (1, 2):
        open(_data(directory, step), "r+b").truncate(3)
    with pytest.raises(CheckpointError, match="None there is whole: begin anew with resume=False"):
        _session(4, directory)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole: model.ckpt-1, model"):
        _session(4, directory, resume="last_good")
    assert _session(3, directory, resume=False).history[0]["step"] == 1
    assert _session(1, str(tmp_path / "new"), resume="last_good").step == 1
    with pytest.raises(ValueError, match="resume is True, False or 'last_good', but is 'last'"):
        _session(4, directory, resume="last")


def test_a_checkpoint_of_another_model_is_not_called_damaged(tmp_path):
    linear.fit(1, directory=str(tmp_path))
    with pytest.raises(CheckpointError, match="is not of this program") as e:
        linear.fit(2, directory=str(tmp_path), optimizer=mtf.optimize.AdamWOptimizer(0.1))
    assert "last_good" not in str(e.value)


# -- weights that are not numbers


def _to_nan(mesh, features):
    """Two steps take z from 2 to 0, where the slope of the root is infinite, times 0."""
    z = mtf.get_variable(mesh, "z", "q:2", initializer=tf.constant_initializer(2.0))
    return mtf.reduce_mean(features["x"]) + mtf.reduce_sum(mtf.sqrt(mtf.square(z)))


def _to_infinity(mesh, features):
    """In the third step the slope, times the learning rate, is no float32 any more."""
    z = mtf.get_variable(mesh, "z", "q:2", initializer=tf.zeros_initializer())
    factor = tf.where(mtf.utils.steps_done() >= 2, 3e38, 0.0)
    slope = mtf.import_fully_replicated(mesh, factor, mtf.Shape([]), "slope")
    added = mtf.reduce_sum((z - mtf.stop_gradient(z)) * slope)
    return mtf.reduce_mean(features["x"]) + added


SPLIT = {"mesh_shape": "rows:2", "layout": "q:rows", "simd": True}


@pytest.mark.parametrize(
    ("model_fn", "rate", "place"),
    [
        (_to_nan, 1.0, {}),
        (_to_nan, 1.0, SPLIT),
        (_to_nan, 1.0, {"save_in_background": True}),
        (_to_infinity, 9, {}),
    ],
)
def test_weights_that_are_not_numbers_are_not_saved(model_fn, rate, place, tmp_path):
    """The last checkpoint stays, though one is kept."""
    arguments = {
        "model_fn": model_fn,
        "optimizer": mtf.optimize.SgdOptimizer(rate),
        "directory": str(tmp_path),
        "save_every": 1,
        "keep": 1,
        **place,
    }
    with pytest.raises(mtf.train.NotANumberError, match=r"after step 3, whose loss was a.*, z are"):
        linear.fit(5, **arguments)
    path = str(tmp_path / "model.ckpt-2")
    assert tf.train.latest_checkpoint(str(tmp_path)) == path == last_good(str(tmp_path))
    assert not fault_of(path) and not any("-3" in name for name in os.listdir(tmp_path))


def test_weights_of_a_step_function(tmp_path):
    store = mtf.VariableStore()
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:1", "", ["cpu:0"])

    def step_fn(x):
        with store.scope():
            graph = mtf.Graph()
            mesh = mtf.Mesh(graph, "mesh")
            z = mtf.get_variable(mesh, "z", "q:2", initializer=tf.zeros_initializer())
            done = mtf.assign(z, z + (np.inf if x[0, 0] > 2 else 1.0))
            mtf.Lowering(graph, {mesh: impl}).lowered_operation(done)
        return 0.5

    data = np.arange(16, dtype=np.float32).reshape(4, 4, 1)
    with pytest.raises(mtf.train.NotANumberError, match=r"after step 2, .*, z are not numbers"):
        mtf.train.fit(
            step_fn,
            list(data),
            3,
            dims="batch:4,x:1",
            store=store,
            directory=str(tmp_path),
            save_every=1,
            keep=1,
            progress=False,
        )
    assert last_good(str(tmp_path)).endswith("model.ckpt-1")


def test_values_that_are_no_weights_may_be_infinite(tmp_path):
    def model_fn(mesh, features):
        mtf.get_variable(
            mesh, "least", [], initializer=tf.constant_initializer(np.inf), trainable=False
        )
        return linear.model_fn(mesh, features, False)

    assert linear.fit(2, model_fn=model_fn, directory=str(tmp_path)).step == 2


# -- directories that cannot be written


@pytest.mark.parametrize("argument", ["directory", "logdir"])
@pytest.mark.parametrize("engine", [_session, _step_function])
def test_a_directory_that_cannot_be_written_is_told_before_the_first_step(
    engine, argument, tmp_path
):
    (tmp_path / "file").write_text("")
    steps = []

    class Count(mtf.train.Callback):
        def on_step(self, run, values):
            steps.append(run.step)

    places = {"directory": None, argument: str(tmp_path / "file" / "run")}
    with pytest.raises(ValueError, match=f"{argument} .*file/run' cannot be written: .*another"):
        engine(3, callbacks=[Count()], **places)
    assert steps == []


def test_a_finished_run_is_evaluated_where_nothing_can_be_written(tmp_path):
    """Nothing is written there, so that it need not be possible."""
    linear.fit(2, directory=str(tmp_path))
    before = sorted(os.listdir(tmp_path))
    result = linear.fit(2, directory=str(tmp_path), eval_data=linear.DATA)
    assert len(result.evaluations) == 1 and sorted(os.listdir(tmp_path)) == before
