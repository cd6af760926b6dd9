"""Checkpoints that a thread writes while steps go on, and the one that is the best."""

import json
import os
import resource
import sys
import threading
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.train import linear

import mesh_tensorflow as mtf
from mesh_tensorflow.checkpoint import CheckpointError
from mesh_tensorflow.train._saving import InThisThread, _Saving

WIDE, OUT = mtf.Dimension("in", 6), mtf.Dimension("wide", 20000)


class Saved(mtf.train.Callback):
    """Notes the checkpoints that it is told of, and the variables after each step."""

    def __init__(self):
        self.paths, self.variables = [], {}

    def on_step(self, run, values):
        self.variables[run.step] = {n: v.copy() for n, v in run.variables().items()}

    def on_checkpoint(self, run, path):
        assert run.checkpoint == path == tf.train.latest_checkpoint(run.directory)
        self.paths.append(path)


def wide(mesh, features):
    """A model whose checkpoints take longer to write than a step."""
    y = mtf.layers.dense(features["x"], [OUT], reduced_dims=[WIDE], name="linear")
    return mtf.reduce_mean(mtf.square(y - mtf.reduce_sum(features["y"])))


def step_function():
    """Returns the same as a step function."""
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("rows:2", "wide:rows", ["cpu:0"] * 2)

    @mtf.function
    def step_fn(features):
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        named = {n: mtf.import_tf_tensor(mesh, x, linear.DIMS[n]) for n, x in features.items()}
        loss = wide(mesh, named)
        variables = graph.trainable_variables
        grads = mtf.gradients([loss], [v.value for v in variables])
        updates = mtf.optimize.SgdOptimizer(0.05).apply_grads(grads, variables)
        lowering = mtf.Lowering(graph, {mesh: impl})
        with tf.control_dependencies([lowering.lowered_operation(op) for op in updates]):
            return tf.identity(lowering.export_to_tf_tensor(loss))

    return {"model_fn": step_fn, "optimizer": None}


SPLIT = {"mesh_shape": "rows:2", "layout": "wide:rows"}
ENGINES = {
    "whole": lambda: {},
    "split": lambda: SPLIT,
    "devices": lambda: {**SPLIT, "devices": ["cpu:0", "cpu:1"]},
    "zero": lambda: {**SPLIT, "layout": "batch:rows", "zero": 3},
    "simd": lambda: {**SPLIT, "simd": True},
    "pjrt": lambda: {"mesh_impl": "pjrt"},
    "step function": step_function,
}


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("engine", ENGINES)
def test_steps_that_go_on_do_not_change_what_is_saved(engine, tmp_path):
    saved = Saved()
    arguments = {"model_fn": wide, **ENGINES[engine]()}
    result = linear.fit(
        12,
        directory=str(tmp_path),
        save_every=3,
        save_in_background=True,
        callbacks=[saved],
        **arguments,
    )
    assert [os.path.basename(p) for p in saved.paths] == [f"model.ckpt-{n}" for n in (3, 6, 9, 12)]
    assert result.checkpoint == saved.paths[-1]
    for path in saved.paths:
        values = saved.variables[int(path.rpartition("-")[2])]
        for name, value in values.items():
            np.testing.assert_array_equal(tf.train.load_variable(path, name), value)


@pytest.mark.skipif(sys.platform != "linux", reason="others have no priorities of threads")
def test_steps_come_before_a_thread_that_writes():
    """From when the variables are read: until then the program waits for it."""

    def priority():
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    with tf.Graph().as_default(), tf.Session() as session:
        thread = tf.numpy_function(threading.get_native_id, [], tf.int64)

        def write(when_read):
            before = priority()
            when_read()
            # Operations that write are run by this thread, and not by one of the session's.
            assert InThisThread(session).run(thread) == threading.get_native_id()
            return f"{before} {priority()}"

        usual = priority()
        assert _Saving(write).path() == f"{usual} 19"
        assert priority() == usual


@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_that_fails(in_background, tmp_path):
    """As on a full disk; the error is that of a save at once, and the checkpoint before it stays."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    steps = []

    class Full(mtf.train.Callback):
        def on_step(self, run, values):
            steps.append(run.step)
            if run.step == 4:
                end = time.monotonic() + 60
                while not tf.train.latest_checkpoint(str(tmp_path)) and time.monotonic() < end:
                    time.sleep(0.01)  # which a thread may still write
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))

    try:
        with pytest.raises(
            CheckpointError, match=r"model\.ckpt-4 could not be written: .* too large"
        ):
            linear.fit(
                9,
                model_fn=wide,
                directory=str(tmp_path),
                save_every=2,
                save_in_background=in_background,
                callbacks=[Full()],
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert 4 <= steps[-1] <= (6 if in_background else 4)
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("model.ckpt-2")


def test_an_error_of_a_later_step_waits_for_what_is_being_saved(tmp_path):
    class Failing(Saved):
        def on_step(self, run, values):
            if run.step == 3:
                raise RuntimeError("on purpose")

    saved = Failing()
    with pytest.raises(RuntimeError, match="on purpose"):
        linear.fit(
            9, directory=str(tmp_path), save_every=2, save_in_background=True, callbacks=[saved]
        )
    assert saved.paths == [tf.train.latest_checkpoint(str(tmp_path))]
    assert saved.paths[0].endswith("model.ckpt-2")


# -- the best one


def falling(mesh, features):
    """A weight that falls by 1 in each step, from 3; the loss of an evaluation is its distance to 0."""
    w = mtf.get_variable(mesh, "w", "q:1", initializer=tf.constant_initializer(3.0))
    return mtf.reduce_sum(w) + 0.0 * mtf.reduce_mean(features["x"])


def distance(mesh, features):
    """Evaluates it."""
    w = mtf.get_variable(mesh, "w", "q:1")
    return {
        "loss": mtf.reduce_sum(mtf.abs(w)) + 0.0 * mtf.reduce_mean(features["x"]),
        "weight": mtf.reduce_sum(w),
        "nan": mtf.reduce_sum(mtf.log(w - 0.5)),
    }


def fall(steps, directory, **arguments):
    return linear.fit(
        steps,
        directory=str(directory),
        **{
            "model_fn": falling,
            "eval_fn": distance,
            "eval_data": {name: array[:4] for name, array in linear.DATA.items()},
            "eval_every": 1,
            "optimizer": mtf.optimize.SgdOptimizer(1.0),
            "save_every": 100,
            "keep": 2,
            "keep_best": "loss",
            **arguments,
        },
    )


def there(directory):
    """Returns the steps of the checkpoints in a directory, which are those that are listed."""
    found = [os.path.basename(p) for p in mtf._mesh.variables.checkpoint_files.numbered(directory)]
    state = tf.train.get_checkpoint_state(str(directory))
    assert sorted(map(os.path.basename, state.all_model_checkpoint_paths)) == sorted(found)
    return [int(name.rpartition("-")[2]) for name in found]


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("in_background", [True, False])
def test_the_best_checkpoint_stays(in_background, tmp_path):
    arguments = {"save_every": 2, "save_in_background": in_background}
    result = fall(4, tmp_path, **arguments)
    assert result.best == str(tmp_path / "model.ckpt-3") and result.step == 4
    again = fall(9, tmp_path, **arguments)
    assert again.best == result.best and there(tmp_path) == [3, 8, 9]
    used = mtf.train.evaluate(distance, linear.DATA, directory=again.best, dims=linear.DIMS)
    assert used["loss"] == 0.0

    def weight(mesh, x):
        return mtf.get_variable(mesh, "w", "q:1") + 0.0 * x

    shown = mtf.train.predict(weight, linear.DATA["x"], directory=again.best, dims=linear.DIMS["x"])
    assert not shown.any()


@pytest.mark.slow
def test_which_values_are_better(tmp_path):
    assert fall(3, tmp_path / "max", keep_best="weight:max").best.endswith("model.ckpt-1")
    assert fall(3, tmp_path / "min", keep_best="weight:min").best.endswith("model.ckpt-3")
    # The logarithm is NaN from step 3 on.
    assert fall(4, tmp_path / "nan", keep_best="nan:min").best.endswith("model.ckpt-2")
    assert fall(3, tmp_path / "none", keep_best="nan:min", eval_every=3).best is None


def test_evaluations_after_the_checkpoint_that_a_run_goes_on_from_do_not_count(tmp_path):
    """As a run leaves them that is killed before its best checkpoint is listed."""
    fall(2, tmp_path)
    known = json.loads((tmp_path / "best.json").read_text())
    assert known == {"min loss": [[1, 2.0, "model.ckpt-1"], [2, 1.0, "model.ckpt-2"]]}
    tf.train.update_checkpoint_state(str(tmp_path), str(tmp_path / "model.ckpt-1"))
    result = fall(2, tmp_path)
    assert result.best.endswith("model.ckpt-2")
    assert json.loads((tmp_path / "best.json").read_text()) == known
    assert fall(1, tmp_path, resume=False).best.endswith("model.ckpt-1")


def test_arguments_of_keep_best(tmp_path):
    for given in ("accuracy", "loss:least", ":max", 3):
        with pytest.raises(ValueError, match=r'keep_best is "loss", whose least .* but is'):
            fall(1, tmp_path, keep_best=given)
    with pytest.raises(ValueError, match="give fit directory and eval_data"):
        fall(1, tmp_path, eval_data=None)
    with pytest.raises(ValueError, match="fit: keep_best: an evaluation has no 'f1', only loss, w"):
        fall(1, tmp_path, keep_best="f1:max")
