"""Handwritten digits, as programs for tf.estimator and Mesh TensorFlow were written.

Only the import of `tf_estimator` is not as it was.
"""

import os
import sys

import tensorflow.compat.v1 as tf
from absl import app, flags

import mesh_tensorflow as mtf
from mesh_tensorflow import estimator as tf_estimator  # was: from tensorflow.compat.v1 import ...

sys.path.append(
    os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..", "examples")
)
import mnist_dataset as dataset

flags.DEFINE_string(
    "data_dir", "", "Directory of the MNIST files; if empty, scikit-learn's digits."
)
flags.DEFINE_string("model_dir", "/tmp/mnist_model", "Directory of checkpoints.")
flags.DEFINE_integer("batch_size", 200, "Examples in a step.")
flags.DEFINE_integer("hidden_size", 512, "Size of the hidden layers.")
flags.DEFINE_integer("train_epochs", 40, "Epochs of training.")
flags.DEFINE_integer("epochs_between_evals", 1, "Epochs from one evaluation to the next.")
flags.DEFINE_integer("eval_steps", 0, "Batches of an evaluation; 0 for all.")
flags.DEFINE_string("mesh_shape", "b1:2;b2:2", "Mesh dimensions and their sizes.")
flags.DEFINE_string("layout", "row_blocks:b1;col_blocks:b2", "Layout rules.")
FLAGS = flags.FLAGS


def mnist_model(image, labels, mesh):
    """Returns (logits, loss) of images [batch, 784] and labels [batch] or None."""
    batch_dim = mtf.Dimension("batch", FLAGS.batch_size)
    row_blocks = mtf.Dimension("row_blocks", 4)
    col_blocks = mtf.Dimension("col_blocks", 4)
    rows = mtf.Dimension("rows_size", 7)
    cols = mtf.Dimension("cols_size", 7)
    channel = mtf.Dimension("one_channel", 1)
    classes = mtf.Dimension("classes", 10)
    hidden1 = mtf.Dimension("hidden1", FLAGS.hidden_size)
    hidden2 = mtf.Dimension("hidden2", FLAGS.hidden_size)

    x = mtf.import_tf_tensor(
        mesh,
        tf.reshape(image, [FLAGS.batch_size, 4, 7, 4, 7, 1]),
        mtf.Shape([batch_dim, row_blocks, rows, col_blocks, cols, channel]),
    )
    x = mtf.transpose(x, [batch_dim, row_blocks, col_blocks, rows, cols, channel])
    filters = mtf.Dimension("filters", 4)
    x = mtf.relu(
        mtf.layers.conv2d_with_blocks(
            x,
            filters,
            filter_size=[3, 3],
            strides=[1, 1],
            padding="SAME",
            h_blocks_dim=row_blocks,
            w_blocks_dim=col_blocks,
            name="conv0",
        )
    )
    x = mtf.reduce_mean(x, reduced_dim=filters)
    h = mtf.layers.dense(
        x, hidden1, reduced_dims=x.shape.dims[-4:], activation=mtf.relu, name="hidden1"
    )
    h = mtf.layers.dense(h, hidden2, reduced_dims=[hidden1], activation=mtf.relu, name="hidden2")
    logits = mtf.layers.dense(h, classes, reduced_dims=[hidden2], name="logits")
    if labels is None:
        return logits, None
    labels = mtf.import_tf_tensor(
        mesh, tf.reshape(labels, [FLAGS.batch_size]), mtf.Shape([batch_dim])
    )
    loss = mtf.layers.softmax_cross_entropy_with_logits(
        logits, mtf.one_hot(labels, classes), classes
    )
    return logits, mtf.reduce_mean(loss)


def model_fn(features, labels, mode, params):
    """Builds the model for one of the three modes."""
    del params
    tf.logging.info("features = %s labels = %s mode = %s", features, labels, mode)
    global_step = tf.train.get_global_step()
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "my_mesh")
    logits, loss = mnist_model(features, labels, mesh)
    mesh_shape = mtf.convert_to_shape(FLAGS.mesh_shape)
    layout_rules = mtf.convert_to_layout_rules(FLAGS.layout)
    mesh_impl = mtf.placement_mesh_impl.PlacementMeshImpl(
        mesh_shape, layout_rules, ["cpu:0"] * mesh_shape.size
    )

    if mode == tf_estimator.ModeKeys.TRAIN:
        var_grads = mtf.gradients([loss], [v.outputs[0] for v in graph.trainable_variables])
        optimizer = mtf.optimize.AdafactorOptimizer()
        update_ops = optimizer.apply_grads(var_grads, graph.trainable_variables)

    lowering = mtf.Lowering(graph, {mesh: mesh_impl})
    restore_hook = mtf.MtfRestoreHook(lowering)
    tf_logits = lowering.export_to_tf_tensor(logits)
    if mode != tf_estimator.ModeKeys.PREDICT:
        tf_loss = lowering.export_to_tf_tensor(loss)
        tf.summary.scalar("cross_entropy", tf_loss)

    if mode == tf_estimator.ModeKeys.TRAIN:
        tf_update_ops = [lowering.lowered_operation(op) for op in update_ops]
        tf_update_ops.append(tf.assign_add(global_step, 1))
        train_op = tf.group(tf_update_ops)
        saver = tf.train.Saver(
            tf.global_variables(),
            sharded=True,
            max_to_keep=10,
            keep_checkpoint_every_n_hours=2,
            defer_build=False,
            save_relative_paths=True,
        )
        tf.add_to_collection(tf.GraphKeys.SAVERS, saver)
        saver_listener = mtf.MtfCheckpointSaverListener(lowering)
        saver_hook = tf.train.CheckpointSaverHook(
            FLAGS.model_dir, save_steps=1000, saver=saver, listeners=[saver_listener]
        )
        accuracy = tf.metrics.accuracy(labels=labels, predictions=tf.argmax(tf_logits, axis=1))
        tf.identity(tf_loss, "cross_entropy")
        tf.identity(accuracy[1], name="train_accuracy")
        tf.summary.scalar("train_accuracy", accuracy[1])
        return tf_estimator.EstimatorSpec(
            tf_estimator.ModeKeys.TRAIN,
            loss=tf_loss,
            train_op=train_op,
            training_chief_hooks=[restore_hook, saver_hook],
        )

    if mode == tf_estimator.ModeKeys.PREDICT:
        predictions = {
            "classes": tf.argmax(tf_logits, axis=1),
            "probabilities": tf.nn.softmax(tf_logits),
        }
        return tf_estimator.EstimatorSpec(
            mode=tf_estimator.ModeKeys.PREDICT,
            predictions=predictions,
            prediction_hooks=[restore_hook],
            export_outputs={"classify": tf_estimator.export.PredictOutput(predictions)},
        )

    return tf_estimator.EstimatorSpec(
        mode=tf_estimator.ModeKeys.EVAL,
        loss=tf_loss,
        evaluation_hooks=[restore_hook],
        eval_metric_ops={
            "accuracy": tf.metrics.accuracy(
                labels=labels, predictions=tf.argmax(tf_logits, axis=1)
            ),
        },
    )


def run_mnist():
    """Trains and evaluates in turn; then predicts some test images."""
    mnist_classifier = tf_estimator.Estimator(model_fn=model_fn, model_dir=FLAGS.model_dir)

    def train_input_fn():
        ds = dataset.train(FLAGS.data_dir).cache().shuffle(buffer_size=50000, seed=1)
        ds = ds.batch(FLAGS.batch_size, drop_remainder=True)
        return ds.repeat(FLAGS.epochs_between_evals)

    def eval_input_fn():
        ds = dataset.test(FLAGS.data_dir).batch(FLAGS.batch_size, drop_remainder=True)
        return tf.data.make_one_shot_iterator(ds).get_next()

    logging_hook = tf.train.LoggingTensorHook(
        tensors={"accuracy": "train_accuracy"}, every_n_iter=100
    )
    for _ in range(FLAGS.train_epochs // FLAGS.epochs_between_evals):
        mnist_classifier.train(input_fn=train_input_fn, hooks=[logging_hook])
        eval_results = mnist_classifier.evaluate(
            input_fn=eval_input_fn, steps=FLAGS.eval_steps or None
        )
        print(f"\nEvaluation results:\n\t{eval_results}\n")
    right = [int(p["classes"]) for p in mnist_classifier.predict(input_fn=eval_input_fn)]
    print("predicted", len(right))


def main(_):
    run_mnist()


if __name__ == "__main__":
    tf.disable_v2_behavior()
    tf.logging.set_verbosity(tf.logging.INFO)
    app.run(main)
