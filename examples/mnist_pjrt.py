"""Trains the MNIST example on devices of JAX: `python examples/mnist.py --mesh_impl=pjrt`.

Checkpoints are those of the other mesh implementations, and training resumes from either.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import mnist_report
import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf


class Model(NamedTuple):
    """The functions of mnist.py that make the network, its updates and its batches."""

    logits_and_loss: Callable[..., Any]
    training: Callable[..., Any]
    train_input: Callable[..., Any]
    test_input: Callable[..., Any]


def make_devices(number: int) -> None:
    """Makes JAX show as many CPUs, if they are its devices and it has made none yet."""
    try:
        jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError:
        return  # the devices there are must do


def functions(model: Model, options: Any, total: int) -> tuple[Any, Any]:
    """Returns the training step and the test of a batch, which share their variables."""
    store = mtf.pjrt.ArrayStore()
    on_mesh = mtf.pjrt.function(mesh_shape=options.mesh_shape, layout=options.layout, store=store)

    @on_mesh
    def train_step(images: tf.Tensor, labels: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        mesh, impl = mtf.Mesh(mtf.Graph(), "mnist"), mtf.pjrt.mesh_impl()
        with mtf.utils.counted_steps(step):
            _, loss = model.logits_and_loss(mesh, impl, images, labels, options)
            updates = model.training(loss, options, total)
        lowering = mtf.Lowering(mesh.graph, {mesh: impl})
        for update in updates:
            lowering.lowered_operation(update)
        return lowering.export_to_tf_tensor(loss)

    @on_mesh
    def right(images: tf.Tensor, labels: tf.Tensor, counted: tf.Tensor) -> tf.Tensor:
        mesh, impl = mtf.Mesh(mtf.Graph(), "mnist"), mtf.pjrt.mesh_impl()
        logits, _ = model.logits_and_loss(mesh, impl, images, labels, options)
        lowering = mtf.Lowering(mesh.graph, {mesh: impl})
        found = tf.argmax(lowering.export_to_tf_tensor(logits), 1, tf.int32)
        return tf.reduce_sum(counted * tf.cast(found == labels, tf.float32))

    return train_step, right


def train(
    model: Model, data: Any, options: Any, model_dir: str, start: int
) -> list[mnist_report.Epoch]:
    """Trains up to --train_epochs and returns the result of each epoch; see mnist.train."""
    tf.compat.v1.enable_v2_behavior()
    tf.random.set_seed(options.seed)
    make_devices(mtf.convert_to_shape(options.mesh_shape).size)
    steps = len(data.train_images) // options.batch_size
    total = steps * options.train_epochs
    train_step, right = functions(model, options, total)
    store, losses = train_step.store, mnist_report.Losses("")

    def test() -> float:
        batches = model.test_input(data, options).take(options.eval_steps or -1)
        results = [
            (float(right(x["images"], labels, x["counted"])), float(np.sum(x["counted"])))
            for x, labels in batches.as_numpy_iterator()
        ]
        return sum(n for n, _ in results) / sum(n for _, n in results)

    epochs = options.train_epochs, options.epochs_between_evals
    report = mnist_report.Report(steps, *epochs, losses, test)
    counter = tf.Variable(start, dtype=tf.int64, name="global_step")
    store.track(counter)
    batches = model.train_input(data, options, start).take(max(0, total - start))
    saver = None
    for step, (x, labels) in enumerate(batches.as_numpy_iterator(), start):
        if saver is None:
            train_step.make_variables(x["images"], labels, np.int64(step))
            print(f"{store!r}\nCommunication of a training step, by XLA:")
            for collective in train_step.lower(x["images"], labels, np.int64(step)).collectives():
                print(f"  {collective}", flush=True)
            saver = mtf.checkpoint.Saver(store.masters, save_relative_paths=True)
            if start:
                saver.restore(None, tf.train.latest_checkpoint(model_dir))
        losses.values.append(float(train_step(x["images"], labels, np.int64(step))))
        if (step + 1) % steps == 0:
            counter.assign(step + 1)
            saver.save(None, os.path.join(model_dir, "model.ckpt"), global_step=step + 1)
            report.after_save(None, step + 1)
    return report.history
