"""Training."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow import estimator as mtf_estimator
from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._paths import readable
from mesh_tensorflow.transformer.utils._data.batching import Lengths
from mesh_tensorflow.transformer.utils._data.data import call_dataset_fn, in_vocabulary
from mesh_tensorflow.transformer.utils._data.features import model_features
from mesh_tensorflow.transformer.utils._data.vocabularies import (
    inputs_vocabulary,
    targets_vocabulary,
)
from mesh_tensorflow.transformer.utils._training.checkpoints import get_step_from_checkpoint_path
from mesh_tensorflow.transformer.utils._training.train_step import training_for

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.dataset._features import Vocabularies

__all__ = ["train_model"]

_INPUT_NAME = "input.ckpt"
_INPUT_STATE = "checkpoint_input"


class _InputCheckpoints(tf.train.SessionRunHook):
    """Saves the state of the input pipeline with each checkpoint, and restores it."""

    def __init__(self, model_dir: str) -> None:
        self._model_dir = model_dir
        self._iterator: Any = None
        self._saver: Any = None

    def follow(self, dataset: tf.data.Dataset) -> Any:
        """Returns the next batch of a data set, whose iterator is then saved with checkpoints."""
        self._iterator = tf.data.make_initializable_iterator(dataset)
        return self._iterator.get_next()

    def begin(self) -> None:
        """Creates the saver before the graph is finalized."""
        if self._saver is None:
            state = tf.data.experimental.make_saveable_from_iterator(self._iterator)
            self._saver = tf.train.Saver([state], max_to_keep=None)

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Starts the pipeline, at its state at the step of the model if that was saved."""
        del coord
        session.run(self._iterator.initializer)
        step = session.run(tf.train.get_global_step(session.graph))
        path = os.path.join(self._model_dir, f"{_INPUT_NAME}-{step}")
        if step and tf.io.gfile.exists(f"{path}.index"):
            self._saver.restore(session, readable(path))
            tf.logging.info("The input pipeline goes on from %s", path)
        elif step:
            tf.logging.warning("There is no %s: the input pipeline starts anew", path)

    def save(self, session: tf.Session, step: int) -> None:
        """Saves the state of the pipeline."""
        self._saver.save(
            session,
            os.path.join(self._model_dir, _INPUT_NAME),
            global_step=step,
            latest_filename=_INPUT_STATE,
        )


class _InputListener(tf.train.CheckpointSaverListener):
    """Saves the state of the input pipeline whenever the model is saved."""

    def __init__(self, input_checkpoints: _InputCheckpoints) -> None:
        self._input_checkpoints = input_checkpoints

    def after_save(self, session: tf.Session, global_step_value: int) -> None:
        """Saves."""
        self._input_checkpoints.save(session, global_step_value)


def _seen_batches(model_dir: str, init_step: int) -> int:
    """Returns the number of batches seen by a training that began at a step."""
    latest = checkpoint_files.latest(model_dir)
    step = get_step_from_checkpoint_path(latest) if latest else init_step
    return max(step - init_step, 0)


def _vocab_sizes(vocabulary: Vocabularies) -> Mapping[str, int]:
    return {
        "inputs": inputs_vocabulary(vocabulary).vocab_size,
        "targets": targets_vocabulary(vocabulary).vocab_size,
    }


def train_model(
    estimator: mtf_estimator.tpu.TPUEstimator,
    vocabulary: Vocabularies,
    sequence_length: Lengths,
    batch_size: int,
    train_dataset_fn: Callable[..., tf.data.Dataset],
    train_steps: int,
    ensemble_inputs: Optional[int],
    dataset_split: str = "train",
    skip_seen_data: bool = False,
    seen_data_init_step: int = 0,
    checkpoint_input_pipeline: bool = False,
) -> None:
    """Trains a model to a step.

    Args:
      estimator: what `get_estimator` returns.
      vocabulary: a Vocabulary, or a pair of them.
      sequence_length: an integer, or a dictionary of them by feature.
      batch_size: the number of sequences in a batch.
      train_dataset_fn: a function of `sequence_length`, `vocabulary` and `dataset_split` that
        returns a Dataset of dictionaries of padded features.
      train_steps: the step to train to.
      ensemble_inputs: the number of ensemble members, if each gets different inputs, which
        multiplies the number of sequences in a batch; all members get the same inputs if None.
      dataset_split: such as "train".
      skip_seen_data: whether resumed training skips the batches that it has seen.
      seen_data_init_step: the step at which that training began.
      checkpoint_input_pipeline: whether to save the state of the input pipeline with checkpoints,
        and resume from it.
    """
    rows = batch_size * (ensemble_inputs or 1)
    input_checkpoints = None
    if checkpoint_input_pipeline:
        input_checkpoints = _InputCheckpoints(estimator.model_dir)

    def input_fn(params: object = None) -> Any:
        del params
        dataset = call_dataset_fn(
            train_dataset_fn, "train_dataset_fn", sequence_length, vocabulary, dataset_split
        )
        dataset = in_vocabulary(dataset.map(model_features), _vocab_sizes(vocabulary))
        dataset = dataset.repeat().batch(rows, drop_remainder=True)
        if skip_seen_data:
            seen = _seen_batches(estimator.model_dir, seen_data_init_step)
            tf.logging.info("Skipping %d batches", seen)
            dataset = dataset.skip(seen)
        dataset = dataset.prefetch(tf.data.AUTOTUNE)
        return dataset if input_checkpoints is None else input_checkpoints.follow(dataset)

    hooks, listeners = [], []
    if input_checkpoints is not None:
        hooks, listeners = [input_checkpoints], [_InputListener(input_checkpoints)]
    with training_for(train_steps):
        estimator.train(
            input_fn=input_fn, max_steps=train_steps, hooks=hooks, saving_listeners=listeners
        )
