"""Checkpoints that are damaged, or of another program: what is said, and that nothing changes."""

import os
import re
import resource

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow._core import errors
from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow.checkpoint import CheckpointError, Saver, check_checkpoint
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.harness import Placing

SPLIT = Placing("x:2,y:2", "a:x,b:y", apart=True)


def new_session():
    return tf.Session(config=tf.ConfigProto(device_count={"CPU": harness.CPUS}))


def build(sizes, names=("u", "v"), value=1.0):
    """A program of matrices in slices; returns their values."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    values = [
        mtf.get_variable(
            mesh, name, list(zip("ab", sizes)), initializer=tf.constant_initializer(value)
        )
        for name in names
    ]
    lowering = mtf.Lowering(graph, {mesh: SPLIT.impl()}, autostack=False)
    return [lowering.export_to_tf_tensor(v) for v in values]


@pytest.fixture
def saved(tmp_path):
    """The paths of two checkpoints in one directory."""
    with tf.Graph().as_default(), harness.separate_memories(), new_session() as session:
        build((8, 16), value=7.0)
        saver = Saver(sharded=True)
        session.run(tf.global_variables_initializer())
        return [saver.save(session, str(tmp_path / "model"), step) for step in (10, 20)]


def restore(path, sizes=(8, 16), names=("u", "v"), **kwargs):
    """Restores a checkpoint over values of 1; returns the error, and the values then."""
    with tf.Graph().as_default(), harness.separate_memories(), new_session() as session:
        values = build(sizes, names)
        saver = Saver(**kwargs)
        session.run(tf.global_variables_initializer())
        error = None
        try:
            saver.restore(session, path)
        except CheckpointError as e:
            error = str(e)
        return error, session.run(values)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_good_one_is_restored(saved, sharded):
    error, values = restore(saved[-1], sharded=sharded)
    assert error is None
    for value in values:
        np.testing.assert_array_equal(value, np.full((8, 16), 7.0))


def cut(path):
    data = next(path.parent.glob(f"{path.name}.data-*"))
    data.write_bytes(data.read_bytes()[:100])


def overwrite(path):
    data = next(path.parent.glob(f"{path.name}.data-*"))
    content = bytearray(data.read_bytes())
    content[40:48] = b"\xff" * 8
    data.write_bytes(content)


def cut_index(path):
    index = path.parent / f"{path.name}.index"
    index.write_bytes(index.read_bytes()[:20])


def lose_data(path):
    next(path.parent.glob(f"{path.name}.data-*")).unlink()


def lose_index(path):
    (path.parent / f"{path.name}.index").unlink()


DAMAGE = {
    cut: (
        r"the data of checkpoint .*model-20 is damaged or cut short \(.*no variable was changed",
        r"Variables that cannot be read \(\d\):\n    [uv]",
    ),
    overwrite: (
        r"the data of checkpoint .*model-20 is damaged or cut short \(.*",
        r"Variables that cannot be read \(\d\):\n    [uv]",
    ),
    cut_index: (r"model-20.index cannot be read: ", "Other checkpoints in .*: model-10"),
    lose_data: (
        r"model-20 has not all of its data files: model-20.data-.* is missing",
        "Other checkpoints in .*: model-10",
    ),
    lose_index: (r"there is no checkpoint .*model-20", "Checkpoints in .*: model-10"),
}


@pytest.mark.slow_but(3)
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("sharded", [False, True])
def test_damage(saved, damage, sharded, tmp_path):
    damage(tmp_path / "model-20")
    error, values = restore(saved[-1], sharded=sharded)
    for pattern in DAMAGE[damage]:
        assert re.search(pattern, error), error
    for value in values:
        np.testing.assert_array_equal(value, np.ones((8, 16)))
    assert restore(saved[0])[0] is None


@pytest.mark.parametrize(
    "sizes, names, expected",
    [
        (
            (8, 16),
            ("u", "w"),
            "Missing in the file (1):\n    w [8, 16]\n  In the file only (1):\n    v [8, 16]\n",
        ),
        (
            (16, 8),
            ("u", "v"),
            "Of another shape or dtype (2):\n"
            "    u: float32 [8, 16] in the file, float32 [16, 8] in the program\n",
        ),
    ],
)
def test_of_another_program(saved, sizes, names, expected):
    error, values = restore(saved[-1], sizes, names)
    assert error.startswith(f"checkpoint {saved[-1]} is not of this program; no variable was")
    assert expected in error
    for value in values:
        np.testing.assert_array_equal(value, np.ones(sizes))


def test_of_another_dtype(saved):
    text = re.escape("u: float32 [8, 16] in the file, float64 [8, 16] in the program")
    with tf.Graph().as_default(), pytest.raises(CheckpointError, match=text):
        check_checkpoint(saved[-1], [tf.get_variable("u", [8, 16], tf.float64)])


@pytest.mark.slow
def test_lists_are_cut_and_directories_named(saved, tmp_path):
    error, _ = restore(saved[-1], names=[f"n{i}" for i in range(20)])
    assert "Missing in the file (20):" in error and "... and 8 more" in error
    with pytest.raises(CheckpointError, match=r"There is no directory '.*nowhere'"):
        check_checkpoint(str(tmp_path / "nowhere" / "model-1"), {})
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"There is no other in .*empty"):
        check_checkpoint(str(tmp_path / "empty" / "model-1"), {})


def test_a_folder_that_may_not_be_listed(saved, tmp_path, monkeypatch):
    """Files are found by their names, and what is wrong is said all the same."""

    def refused(path):
        raise tf.errors.PermissionDeniedError(None, None, f"{path}; Permission denied")

    monkeypatch.setattr(tf.io.gfile, "listdir", refused)
    assert restore(saved[1])[0] is None
    error, values = restore(saved[1], sizes=(8, 8))
    assert "is not of this program" in error
    os.remove(saved[0] + ".data-00000-of-00001")
    error, _ = restore(saved[0])
    assert "model-10.data-00000-of-00001 is missing" in error
    assert f"{tmp_path} does not let this user see" in error
    with pytest.raises(ValueError, match=r"there is no checkpoint at .*model-9\. Give the path"):
        checkpoint_files.find(str(tmp_path / "model-9"), "restore")


def test_what_a_saver_wants(saved):
    with tf.Graph().as_default(), harness.separate_memories(), new_session() as session:
        u, _ = build((8, 16), ("u", "w"))
        by_name = {v.op.name: v for v in tf.global_variables()}
        check_checkpoint(saved[-1], [by_name["u"]])
        Saver([by_name["u"]]).restore(session, saved[-1])
        np.testing.assert_array_equal(session.run(u), np.full((8, 16), 7.0))
        Saver({"v": by_name["w"]}).restore(session, saved[-1])
        with pytest.raises(CheckpointError, match=r"Missing in the file \(1\):\n    x \[8, 16\]"):
            Saver({"x": by_name["w"]}).restore(session, saved[-1])


def test_files_of_a_save_that_was_killed_do_not_spoil_the_next_one(saved, tmp_path):
    """A save of four devices, killed before it was named, then one of a single device."""
    with tf.Graph().as_default(), new_session() as session:
        for i in range(4):
            with tf.device(f"/cpu:{i}"):
                tf.get_variable(f"part{i}", [2])
        session.run(tf.global_variables_initializer())
        Saver(sharded=True).save(session, str(tmp_path / "model"), 20)
    (tmp_path / "model-20.index").unlink()
    with tf.Graph().as_default(), harness.separate_memories(), new_session() as session:
        build((8, 16), value=5.0)
        session.run(tf.global_variables_initializer())
        Saver().save(session, str(tmp_path / "model"), 20)
    names = os.listdir(tmp_path)
    assert sum("model-20.data-" in name for name in names) == 5, "no files were left over"
    error, values = restore(saved[-1])
    assert error is None
    for value in values:
        np.testing.assert_array_equal(value, np.full((8, 16), 5.0))
    lost = tmp_path / "model-20.data-00000-of-00001"
    lost.unlink()
    error, _ = restore(saved[-1])
    assert f"{saved[-1]} has not all of its data files: {lost.name} is missing" in error


@pytest.mark.parametrize(
    "path, text",
    [
        (
            None,
            r"restore: save_path is None: .*latest_checkpoint returns None where there is none yet",
        ),
        ("", r"restore: save_path is '', .*name a checkpoint"),
        (7, r"restore: save_path should be a path, .* but is 7"),
    ],
)
def test_a_path_that_is_none(path, text):
    error, values = restore(path)
    assert re.match(text, error), error
    np.testing.assert_array_equal(values[0], np.ones((8, 16)))


def test_the_reason_of_damage_is_said(saved, tmp_path):
    cut(tmp_path / "model-20")
    error, _ = restore(saved[-1])
    assert "Graph execution error" not in error
    assert "cut short (Read less bytes than requested); no" in error


@pytest.mark.parametrize("sharded", [False, True])
def test_a_full_disk_is_said_and_nothing_half_written_stays(saved, sharded, tmp_path):
    """As on a full disk, files cannot grow beyond some size."""
    before = sorted(os.listdir(tmp_path))
    with tf.Graph().as_default(), harness.separate_memories(), new_session() as session:
        build((80, 1600))
        saver = Saver(sharded=sharded)
        session.run(tf.global_variables_initializer())
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        try:
            with pytest.raises(CheckpointError) as raised:
                saver.save(session, str(tmp_path / "model"), 30)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    text = str(raised.value)
    assert re.match(
        r"checkpoint .*model-30 could not be written: .*model-30.*; File too large\. "
        r"The checkpoints before it are as they were\. .*model-20",
        text,
    ), text
    assert "Graph execution error" not in text
    assert sorted(os.listdir(tmp_path)) == before
    assert restore(saved[-1])[0] is None


def test_nan_is_said_once(tmp_path, monkeypatch):
    monkeypatch.setattr(errors, "_told", set())
    with tf.Graph().as_default(), harness.separate_memories(), new_session() as session:
        build((8, 16), value=float("nan"))
        session.run(tf.global_variables_initializer())
        path = Saver().save(session, str(tmp_path / "model"), 1)
    with pytest.warns(mtf.MeshTensorFlowWarning) as found:
        error, values = restore(path)
        restore(path)
    assert error is None and np.isnan(values[0]).all()
    [text] = [str(w.message) for w in found if w.category is mtf.MeshTensorFlowWarning]
    assert re.match(
        r"checkpoint .*model-1 has values that are not numbers \(NaN\) in 2 of 2 "
        r"variables: u, v\. ",
        text,
    ), text
    with mtf.strict(), pytest.raises(ValueError, match="not numbers"):
        restore(path)
