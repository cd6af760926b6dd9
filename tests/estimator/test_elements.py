"""Datasets that end: between steps, in silence, and with no step begun for nothing."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers import processes

from mesh_tensorflow import estimator
from mesh_tensorflow._elements import Elements

ENDING = """
import tensorflow.compat.v1 as tf
import mesh_tensorflow as mtf
from mesh_tensorflow import estimator

def model_fn(features, labels, mode):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    batch, d = mtf.Dimension("batch", 4), mtf.Dimension("d", 8)
    x = mtf.import_tf_tensor(mesh, features, [batch, d])
    y = mtf.layers.dense(x, [mtf.Dimension("out", 8)], reduced_dims=[d], name="layer")
    loss = mtf.reduce_mean(mtf.square(y))
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(
        "rows:2,cols:2", "batch:rows,out:cols", [f"cpu:{i}" for i in range(4)])
    lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    step = tf.assign_add(tf.train.get_global_step(), 1)
    return estimator.EstimatorSpec(mode, loss=lowering.export_to_tf_tensor(loss), train_op=step)

def data():
    return tf.data.Dataset.from_tensors(tf.ones([4, 8])).repeat(5)

config = estimator.RunConfig(session_config=tf.ConfigProto(device_count={"CPU": 4}))
model = estimator.Estimator(model_fn, config=config)
model.train(data)
print(model.evaluate(data)["global_step"], model.latest_checkpoint()[-12:])
"""


@pytest.mark.slow
def test_the_end_of_a_dataset_cancels_nothing():
    # TensorFlow has read the level in processes that are forked with it imported.
    done = processes.python("-c", ENDING, TF_CPP_MIN_LOG_LEVEL="0")
    assert done.stdout == "5 model.ckpt-5\n"
    said = [line for line in done.stderr.splitlines() if "rendezvous" in line or "OUT_OF" in line]
    assert said == []


def test_elements_of_any_structure_can_be_read_again(tf_graph):
    def element(n):
        rows = tf.RaggedTensor.from_row_lengths(tf.range(n), [n])
        return {"n": n, "sparse": tf.sparse.from_dense([n, 0])}, rows

    elements = Elements(tf.data.Dataset.range(1, 3, output_type=tf.int32).map(element))
    features, rows = elements.current
    fetches = features["n"] * 10, tf.sparse.to_dense(features["sparse"]), rows.to_tensor()
    with tf.Session() as session:
        for _ in "ab":
            session.run(elements.initializer)
            found = []
            while elements.advance(session):
                first, second = (session.run(fetches) for _ in "ab")
                for a, b in zip(first, second):
                    np.testing.assert_array_equal(a, b)
                found.append([x.tolist() for x in first])
            assert found == [[10, [1, 0], [[0]]], [20, [2, 0], [[0, 1]]]]
        assert not elements.advance(session)


def counting_model(features, labels, mode):
    """Counts the steps that began, and reads its features before the first one."""
    step, begun = tf.train.get_global_step(), tf.get_variable("begun", [], tf.int32)

    class ReadsFirst(tf.train.SessionRunHook):
        seen = None

        def after_create_session(self, session, coord):
            ReadsFirst.seen = session.run(features)

    counting_model.hook = ReadsFirst
    train = tf.group(step.assign_add(1), begun.assign_add(1))
    return estimator.EstimatorSpec(
        mode, loss=tf.cast(features, tf.float32), train_op=train, training_hooks=[ReadsFirst()]
    )


def test_hooks_may_read_the_first_element_and_no_step_begins_without_one(tmp_path):
    model = estimator.Estimator(counting_model, str(tmp_path))
    model.train(lambda: tf.data.Dataset.range(7, 10))
    assert counting_model.hook.seen == 7
    assert model.get_variable_value("begun") == model.get_variable_value("global_step") == 3


def test_errors_of_a_dataset_are_told(tmp_path):
    model = estimator.Estimator(counting_model, str(tmp_path))

    def broken():
        numbers = tf.data.Dataset.range(4)
        return numbers.map(
            lambda n: tf.debugging.check_numerics(1.0 / tf.cast(2 - n, tf.float32), "third")
        )

    with pytest.raises(tf.errors.InvalidArgumentError, match="third"):
        model.train(broken)
