"""Training and evaluation in turns."""

from __future__ import annotations

import collections
import tempfile
from collections.abc import Callable
from typing import Any, Optional

import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow.experimental import unet
from mesh_tensorflow.experimental.model_executor._flags import FLAGS
from mesh_tensorflow.experimental.model_executor._model import Model

__all__ = ["main", "train_and_eval"]

Scores = dict[str, float]


class _Means:
    """Means of scores over steps."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = collections.defaultdict(list)

    def add(self, scores: Scores) -> None:
        for name, value in scores.items():
            self._values[name].append(float(value))

    def take(self) -> Scores:
        """Returns the means, and begins anew."""
        means = {name: float(np.mean(values)) for name, values in self._values.items()}
        self._values.clear()
        return means


def _train(model: Model, step: int, stop: int, directory: str) -> Scores:
    """Trains to a step; returns the means of the scores on the way."""
    means = _Means()
    while step < stop:
        means.add(model.run()["scores"])
        step += 1
        if step % FLAGS.save_checkpoints_steps == 0 or step == stop:
            model.save(directory)
    return means.take()


def _evaluate(model: Model, directory: str) -> Scores:
    """Evaluates the latest checkpoint; returns mean scores, and Dice coefficients over all."""
    model.restore(directory)
    means, processor = _Means(), unet.PostProcessor()
    if FLAGS.pred_output_dir:
        tf.io.gfile.makedirs(FLAGS.pred_output_dir)
    for _ in range(FLAGS.num_eval_iterations_per_loop):
        found = model.run()
        means.add(found["scores"])
        processor.record(
            [*found["record"], found["scores"]["loss"], found["step"]], FLAGS.pred_output_dir
        )
    return {**means.take(), **processor.finish()}


def _write(writer: Optional[tf.summary.FileWriter], step: int, kind: str, scores: Scores) -> None:
    if writer is None:
        return
    values = [
        tf.Summary.Value(tag=f"{kind}/{name}", simple_value=value) for name, value in scores.items()
    ]
    writer.add_summary(tf.Summary(value=values), step)
    writer.flush()


def _log(step: int, trained: Scores, evaluated: Scores) -> None:
    tf.logging.info("Step %d: training %s; evaluation %s", step, trained, evaluated)


def _check_flags() -> None:
    """Checks numbers that loops divide by or end with.

    Raises:
      ValueError: one is not positive.
    """
    for flag in (
        "num_training_loops",
        "num_train_iterations_per_loop",
        "num_eval_iterations_per_loop",
        "save_checkpoints_steps",
    ):
        if getattr(FLAGS, flag) < 1:
            raise ValueError(f"--{flag}={getattr(FLAGS, flag)} must be 1 at least")


def train_and_eval(report: Callable[[int, Scores, Scores], Any] = _log) -> Scores:
    """Trains and evaluates a U-Net in turns, as the flags say.

    Weights go from one to the other by checkpoints, which training goes on from, too, if it was
    ended: in --checkpoint_dir, else in a directory that is deleted at the end. With --use_tpu all
    processors of --mesh_shape run one program, on the session's TPU or, without one, on logical
    CPUs or GPUs. Without --use_tpu operations are placed on CPUs or GPUs. Weights are trained by
    Adafactor; the learning rate, relative to their size, is --lr, multiplied by --lr_drop_rate
    every --lr_drop_steps.

    Args:
      report: is called after each evaluation with the step, mean scores of training since the last
        one, and scores of the evaluation; logs them if it is not given.

    Returns:
      The scores of the last evaluation, by name; none if training had reached its end before.

    Raises:
      ValueError: flags do not fit each other, or name no files.
    """
    _check_flags()
    scores: Scores = {}
    with tempfile.TemporaryDirectory() as scratch:
        directory = FLAGS.checkpoint_dir or scratch
        folder = FLAGS.summary_dir or FLAGS.checkpoint_dir
        writer = None
        if FLAGS.write_summary and folder:
            with tf.Graph().as_default():
                writer = tf.summary.FileWriter(folder)
        training, evaluating = Model("train"), Model("eval")
        try:
            step = training.restore(directory)
            length = FLAGS.num_train_iterations_per_loop
            total = FLAGS.num_training_loops * length
            while step < total:
                stop = (step // length + 1) * length
                trained = _train(training, step, stop, directory)
                step = stop
                scores = _evaluate(evaluating, directory)
                _write(writer, step, "train", trained)
                _write(writer, step, "eval", scores)
                report(step, trained, scores)
        finally:
            training.close()
            evaluating.close()
            if writer is not None:
                writer.close()
    return scores


def main(_: Any) -> None:
    """Calls `train_and_eval`.

    Args:
      _: what is left of the command line.
    """
    train_and_eval()
