"""Beginning with weights of a checkpoint: what is loaded, what is told, what is an error."""

import logging

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.bert._training import load_initial_checkpoint
from mesh_tensorflow.checkpoint import choose_initial
from mesh_tensorflow.transformer.convert import write_checkpoint

V = np.ones(2, np.float32)


@pytest.fixture
def lines():
    """What is logged."""
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    tf.get_logger().addHandler(handler)
    tf.logging.set_verbosity(tf.logging.INFO)
    yield found
    tf.get_logger().removeHandler(handler)


def model(*names, shape=(2,)):
    """Variables of a graph; those with a slash at the end are not trained."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    dims = [mtf.Dimension(f"d{i}", n) for i, n in enumerate(shape)]
    for name in names:
        mtf.get_variable(mesh, name.rstrip("/"), dims, trainable=not name.endswith("/"))
    return {v.name: v.get_master() for v in graph.all_variables}


# The variables of the checkpoint, those of the model, and what is said of each side; with
# `strict`, whether that is an error.
CASES = {
    "the same": (["a", "b"], ["a", "b"], [], False),
    "a slot there": (["a", "b", "b_slot_v", "a/adam_m"], ["a", "b"], [], False),
    "of another optimizer": (["a", "a_slot_mine", "its/a/mean"], ["a"], [], False),
    "a slot here": (["a"], ["a", "a_slot_v/"], ["In the model only (1):", "a_slot_v"], False),
    "a weight there": (["a", "other/b"], ["a"], ["In the checkpoint only (1):", "other/b"], True),
    "a weight here": (["a"], ["a", "new"], ["In the model only (1):", "new"], True),
    "both": (["a", "x/c"], ["a", "y/c"], ["In the model only", "y/c", "only (1):", "x/c"], True),
}


@pytest.mark.parametrize("case", CASES)
def test_both_lists_are_logged(case, lines, tmp_path):
    there, here, said, is_wrong = CASES[case]
    path = write_checkpoint(dict.fromkeys(there, V), str(tmp_path), 7)
    with tf.Graph().as_default():
        variables = model(*here)
        trained = [v.op.name for v in tf.trainable_variables()]
        found = choose_initial("init_checkpoint", path, variables, trained)
        assert sorted(found) == sorted(set(there) & set(here))
        [line] = [line for line in lines if "Initializing" in line]
        assert line.startswith(f"Initializing {len(found)} variables from {path}")
        assert all(text in line for text in said)
        assert said or "only" not in line
        if is_wrong:
            with pytest.raises(ValueError, match="strict asks for the same"):
                choose_initial("init_checkpoint", path, variables, trained, strict=True)
        else:
            assert choose_initial("init_checkpoint", path, variables, trained, strict=True) == found


def test_none_in_common(tmp_path):
    """Also if only the global step or slots are in both."""
    path = write_checkpoint({"x": V, "a_slot_v": V}, str(tmp_path), 7)
    with tf.Graph().as_default():
        variables = {**model("a", "a_slot_v/"), "global_step": tf.train.create_global_step()}
        with pytest.raises(
            ValueError, match=r"none of the model's weights is there[\s\S]*only \(1\)"
        ):
            choose_initial("init_checkpoint", path, variables, ["a"])
        with pytest.raises(
            ValueError, match=r"init_checkpoint: .* has none of the model's variables"
        ):
            load_initial_checkpoint(path)


def test_another_shape(tmp_path):
    path = write_checkpoint({"a": V, "b": V}, str(tmp_path), 7)
    with tf.Graph().as_default():
        variables = model("a", "b", shape=(2, 3))
        with pytest.raises(
            ValueError, match=r"a has shape \[2\], but a in the model has \[2, 3\] \(1"
        ):
            choose_initial("init_checkpoint", path, variables, variables)


def test_bert_begins_with_a_directory(lines, tmp_path):
    write_checkpoint({"a": V, "b": V, "adam_m": V}, str(tmp_path), 7)
    with tf.Graph().as_default(), tf.Session() as session:
        a = model("a", "new")["a"]
        load_initial_checkpoint(str(tmp_path))
        session.run(tf.global_variables_initializer())
        np.testing.assert_array_equal(session.run(a), V)
        assert any("In the model only (1)" in line and "new" in line for line in lines)
        with pytest.raises(ValueError, match="strict asks for the same"):
            load_initial_checkpoint(str(tmp_path), strict=True)
