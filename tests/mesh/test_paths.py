"""Directories whose names TensorFlow takes for patterns: all of the package finds what is there."""

import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.train import linear

import mesh_tensorflow as mtf
from mesh_tensorflow import estimator
from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._paths import escaped, new_directory, readable, write_whole
from mesh_tensorflow.checkpoint import Saver, check_checkpoint, fault_of, last_good
from mesh_tensorflow.transformer import convert
from mesh_tensorflow.transformer.utils import get_checkpoint_iterator

NAMES = ["lr[0.1]", "a*b", "what?", "back\\slash", "[!x]", "{1,2}", "open["]
SHAPE = mtf.Shape([("d", 2)])


def variable(value):
    w = mtf.get_variable(
        mtf.Mesh(mtf.Graph(), "mesh"), "w", SHAPE, initializer=tf.constant_initializer(value)
    )
    return w.operation.get_master()


@pytest.fixture(params=NAMES)
def directory(request, tmp_path):
    """A directory, beside one that it matches as a pattern, and that is to stay as it is."""
    for other in ("lr0", "lr.", "a-b", "whatx", "backslash", "a"):
        (tmp_path / other).mkdir()
        for ending in (".index", ".data-00000-of-00001", ".meta"):
            (tmp_path / other / f"model.ckpt-1{ending}").write_text("another's")
    yield str(tmp_path / request.param)
    for other in ("lr0", "lr.", "a-b", "whatx", "backslash", "a"):
        assert len(os.listdir(tmp_path / other)) == 3


def test_savers_in_sessions_and_eager_code(directory):
    """Old checkpoints go, and only those; all else reads what is there."""
    os.mkdir(directory)
    path = os.path.join(directory, "model.ckpt")
    with tf.Graph().as_default(), tf.Session() as session:
        master = variable(3.0)
        saver = Saver([master], sharded=True, max_to_keep=2)
        session.run(tf.global_variables_initializer())
        for step in (1, 2, 3):
            last = saver.save(session, path, global_step=step)
        session.run(master.assign([0.0, 0.0]))
        saver.restore(session, last)
        assert session.run(master).tolist() == [3.0, 3.0]
        saver.recover_last_checkpoints(saver.last_checkpoints)
        assert [os.path.basename(p) for p in saver.last_checkpoints] == [
            "model.ckpt-2",
            os.path.basename(last),
        ]
    assert {name.split(".")[1] for name in os.listdir(directory) if "." in name} == {
        "ckpt-2",
        "ckpt-3",
    }
    with tf.Graph().as_default(), tf.Session() as session:
        master = variable(0.0)
        mtf.checkpoint.init_from_checkpoint(directory, {"w": master})
        session.run(tf.global_variables_initializer())
        assert session.run(master).tolist() == [3.0, 3.0]
    master = variable(0.0)
    Saver([master]).restore(None, last)
    check_checkpoint(last, [master], read=True)
    assert master.numpy().tolist() == [3.0, 3.0] and not fault_of(last)
    assert (
        checkpoint_files.latest(directory)
        == last
        == last_good(directory)
        == checkpoint_files.find(directory, "")
    )


@pytest.mark.slow
@pytest.mark.parametrize("directory", NAMES[:2], indirect=True)
def test_fit(directory):
    """It resumes, keeps as many as asked, and writes nothing elsewhere."""
    arguments = {"directory": directory, "save_every": 1, "keep": 2, "eval_data": linear.DATA}
    linear.fit(3, **arguments)
    again = linear.fit(5, **arguments, logdir=os.path.join(directory, "logs[1]"))
    assert [record["step"] for record in again.history] == [4, 5]
    assert [os.path.basename(p) for p in checkpoint_files.numbered(directory)] == [
        "model.ckpt-4",
        "model.ckpt-5",
    ]
    data = [f for f in os.listdir(directory) if f.startswith("model.ckpt-5.data-00000")]
    open(os.path.join(directory, data[0]), "r+b").truncate(1)
    assert linear.fit(6, **arguments, resume="last_good").history[0]["step"] == 5


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("directory", NAMES[:2], indirect=True)
def test_estimators(directory):
    def model_fn(features, labels, mode, params):
        with tf.variable_scope("", reuse=tf.AUTO_REUSE):
            w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
        loss = tf.square(w - tf.reduce_mean(features))
        train = tf.train.GradientDescentOptimizer(0.5).minimize(loss, tf.train.get_global_step())
        return estimator.EstimatorSpec(
            mode, loss=loss, train_op=train, predictions={"w": tf.expand_dims(w, 0)}
        )

    def input_fn(params):
        return tf.data.Dataset.from_tensors(np.ones(4, np.float32)).repeat(8)

    config = estimator.RunConfig(save_checkpoints_steps=1, keep_checkpoint_max=2)
    made = estimator.Estimator(model_fn, directory, config, params={})
    made.train(input_fn, max_steps=3)
    made.train(input_fn, max_steps=4)
    assert made.get_variable_value("global_step") == 4 and "w" in made.get_variable_names()
    assert made.evaluate(input_fn, steps=1)["global_step"] == 4
    assert next(made.predict(input_fn))["w"] == pytest.approx(1.0)
    other = estimator.Estimator(model_fn, directory + "-2", config, {}, warm_start_from=directory)
    other.train(input_fn, max_steps=1)
    assert other.get_variable_value("w") == pytest.approx(1.0)
    steps = get_checkpoint_iterator("all", directory)
    assert [os.path.basename(p) for p in steps] == ["model.ckpt-3", "model.ckpt-4"]
    assert list(get_checkpoint_iterator(None, directory, stop_after=4)) == [
        made.latest_checkpoint()
    ]


def test_conversion_and_files_of_text(directory):
    written = convert.write_checkpoint({"w": np.ones(2, np.float32)}, directory, 7)
    assert checkpoint_files.open_reader(written).get_tensor("global_step") == 7
    np.testing.assert_array_equal(convert.read_checkpoint(directory)["w"], [1.0, 1.0])
    file = os.path.join(directory, "lines[0].txt")
    with open(file, "w") as f:
        f.write("a\n")
    assert checkpoint_files.matching(file) == [file]
    assert [
        os.path.basename(f)
        for f in checkpoint_files.matching(os.path.join(escaped(directory), "l*.txt"))
    ] == ["lines[0].txt"]


def test_names_of_checkpoints_with_brackets(tmp_path):
    """Links to the files of a checkpoint that is written anew are those of the new files."""
    for value in (1.0, 2.0):
        path = Saver([variable(value)]).save(None, str(tmp_path / "model[1].ckpt"))
        master = variable(0.0)
        Saver([master]).restore(None, path)
        assert master.numpy().tolist() == [value, value]
    assert "[" not in readable(path) and readable(str(tmp_path)) == str(tmp_path)
    assert readable("gs://bucket/a[1]/model.ckpt") == "gs://bucket/a[1]/model.ckpt"


def test_files_and_directories_that_are_whole_or_not_there(directory):
    """A reader finds the old text or the new one; a directory that failed can be written anew."""
    os.mkdir(directory)
    file, made = os.path.join(directory, "file"), os.path.join(directory, "made")
    for text in ("old", "newer"):
        write_whole(file, text)
        with open(file) as f:
            assert f.read() == text
    assert os.listdir(directory) == ["file"]

    def write(fails):
        with new_directory(made, f"{made}.temp"):
            os.mkdir(f"{made}.temp")  # as a builder of SavedModels, it wants none there
            if fails:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(True)
    assert os.listdir(directory) == ["file"]
    write(False)
    assert sorted(os.listdir(directory)) == ["file", "made"]
