"""A loop that alternates between training and evaluation."""

from __future__ import annotations

import collections
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, Optional

import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow._progress import Progress
from mesh_tensorflow.experimental import unet
from mesh_tensorflow.experimental.model_executor._flags import FLAGS
from mesh_tensorflow.experimental.model_executor._model import Model

__all__ = ["main", "train_and_eval"]

Scores = dict[str, float]


class _Means:
    """Accumulates means of scores over steps."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = collections.defaultdict(list)

    def add(self, scores: Scores) -> None:
        for name, value in scores.items():
            self._values[name].append(float(value))

    def take(self) -> Scores:
        """Returns the means and resets them."""
        means = {name: float(np.mean(values)) for name, values in self._values.items()}
        self._values.clear()
        return means


def _train(model: Model, step: int, stop: int, directory: str, progress: Progress) -> Scores:
    """Trains to a step; returns the mean scores over the steps."""
    means = _Means()
    while step < stop:
        scores = model.run()["scores"]
        means.add(scores)
        step += 1
        progress.update(loss=scores["loss"])
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
    """Checks the flags that loops count with.

    Raises:
      ValueError: a flag is not positive.
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
    """Alternates between training and evaluation of a U-Net, as configured by flags.

    Evaluation restores the checkpoints of training from --checkpoint_dir, or from a temporary
    directory if the flag is empty. Training resumes from the latest checkpoint there. With
    --use_tpu, all processors of --mesh_shape run one program, on the TPU of the session or, without
    one, on logical CPUs or GPUs. Without --use_tpu, operations are placed on CPUs or GPUs. The
    optimizer is Adafactor; its learning rate, relative to the scale of each weight, is --lr,
    multiplied by --lr_drop_rate every --lr_drop_steps.

    Args:
      report: called after each evaluation with the step, the mean scores of training since the last
        evaluation, and the scores of the evaluation; logs them by default.

    Returns:
      The scores of the last evaluation by name; empty if training was complete already.

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
            with Progress(total, "train", start=step, leave=step < total) as progress:
                while step < total:
                    stop = (step // length + 1) * length
                    trained = _train(training, step, stop, directory, progress)
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


def main(_: Sequence[str]) -> None:
    """Calls `train_and_eval`.

    Args:
      _: the remaining command-line arguments.
    """
    train_and_eval()
