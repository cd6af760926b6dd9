"""Checkpoints of monitored sessions, saved in one layout and restored in another."""

import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.harness import Placing

A, B = mtf.Dimension("a", 8), mtf.Dimension("b", 16)
SAVED = {
    "u": np.arange(8.0, dtype=np.float32),
    "v": -np.arange(8.0, dtype=np.float32),
    "scope/matrix": np.arange(128.0, dtype=np.float32).reshape(8, 16),
}
PLACINGS = [
    Placing("x:1", ""),
    Placing("x:4", "a:x"),
    Placing("x:2,y:4", "a:x,b:y"),
    Placing("x:2,y:2", "b:x", apart=True),
]


def train(placing, directory, steps, initial):
    """Runs until global step `steps` under hooks; returns the values at the end, by name.

    Each step adds 1 to every variable.
    """
    with tf.Graph().as_default(), harness.separate_memories():
        step = tf.train.get_or_create_global_step()
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        variables = {
            name: mtf.get_variable(
                mesh,
                name,
                [A, B][: value.ndim],
                initializer=tf.constant_initializer(value if initial else -99.0),
            )
            for name, value in SAVED.items()
        }
        updates = [mtf.assign_add(v, mtf.ones_like(v)) for v in variables.values()]
        lowering = mtf.Lowering(graph, {mesh: placing.impl()})
        train_op = tf.group(
            tf.assign_add(step, 1), *[lowering.lowered_operation(op) for op in updates]
        )
        exports = {n: lowering.export_to_tf_tensor(v) for n, v in variables.items()}
        saver = tf.train.Saver(tf.global_variables(), sharded=True, max_to_keep=10)
        tf.add_to_collection(tf.GraphKeys.SAVERS, saver)
        hooks = [
            mtf.MtfRestoreHook(lowering),
            tf.train.CheckpointSaverHook(
                directory,
                save_steps=1000,
                saver=saver,
                listeners=[mtf.MtfCheckpointSaverListener(lowering)],
            ),
        ]
        config = tf.ConfigProto(device_count={"CPU": harness.CPUS})
        with tf.train.MonitoredTrainingSession(
            checkpoint_dir=directory,
            hooks=hooks,
            save_checkpoint_secs=None,
            save_summaries_steps=None,
            log_step_count_steps=None,
            config=config,
        ) as session:
            while session.run(step) < steps:
                session.run(train_op)
            return session.run(exports)


@pytest.mark.slow
@pytest.mark.parametrize("saved_in", PLACINGS)
def test_saved_in_one_layout_and_restored_in_another(saved_in, tmp_path):
    directory = str(tmp_path)
    values = train(saved_in, directory, 3, initial=True)
    for name, value in SAVED.items():
        np.testing.assert_array_equal(values[name], value + 3)
    reader = tf.train.load_checkpoint(directory)
    names = set(reader.get_variable_to_shape_map())
    assert names == {*SAVED, "global_step"}  # masters alone, under their names
    for name, value in SAVED.items():
        np.testing.assert_array_equal(reader.get_tensor(name), value + 3)
    done = 3
    for placing in PLACINGS:
        done += 2
        values = train(placing, directory, done, initial=False)
        for name, value in SAVED.items():
            np.testing.assert_array_equal(values[name], value + done)
    assert os.path.exists(os.path.join(directory, f"model.ckpt-{done}.index"))
