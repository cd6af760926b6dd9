"""Checks of the arguments of estimators."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Optional, Union

import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow.estimator._run_config import RunConfig

__all__ = ["check_steps", "checked_listeners", "config_with_directory"]


def config_with_directory(
    config: Optional[RunConfig], model_dir: Union[str, os.PathLike[str], None]
) -> RunConfig:
    """Returns a RunConfig with a model directory.

    Args:
      config: a RunConfig, or None for the default.
      model_dir: a directory, or None for the model directory of the RunConfig or, if it has none, a
        temporary directory.

    Returns:
      a RunConfig.

    Raises:
      TypeError: `config` is not a RunConfig.
      ValueError: the path is empty, or differs from that of the RunConfig.
    """
    if config is None:
        config = RunConfig()
    if not isinstance(config, RunConfig):
        raise TypeError(f"config should be a RunConfig, but is {config!r}")
    if model_dir is not None and not os.fspath(model_dir):
        raise ValueError("model_dir is empty; leave it out, or name a directory")
    given = None if model_dir is None else os.fspath(model_dir)
    if given is not None and config.model_dir not in (None, given):
        raise ValueError(
            f"model_dir is {given!r}, but the RunConfig says {config.model_dir!r}: let them be the "
            "same, or leave one out"
        )
    directory = given or config.model_dir
    if directory is None:
        directory = tempfile.mkdtemp()
        tf.logging.warning("No model_dir: checkpoints go to the temporary %s.", directory)
    return config.replace(model_dir=directory)


def check_steps(called: str, **counts: Optional[int]) -> None:
    """Checks `steps` and `max_steps`: at most one may be given.

    Args:
      called: the name of the method, for error messages.
      **counts: the numbers of steps, by argument name.

    Raises:
      ValueError: a number is not positive, or both are given.
    """
    given = {name: count for name, count in counts.items() if count is not None}
    for name, count in given.items():
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count <= 0:
            raise ValueError(
                f"{called}: {name} is {count!r}; it should be a whole number of 1 or more, or None"
            )
    if len(given) > 1:
        raise ValueError(
            f"{called}: steps is {counts['steps']} and max_steps is {counts['max_steps']}: give "
            "steps to go on from where training stands, or max_steps to train to that step"
        )


def checked_listeners(
    listeners: Optional[Sequence[tf.train.CheckpointSaverListener]],
) -> tuple[tf.train.CheckpointSaverListener, ...]:
    """Returns listeners as a tuple.

    Args:
      listeners: tf.train.CheckpointSaverListeners, or None.

    Returns:
      a tuple.

    Raises:
      TypeError: one of them is not a CheckpointSaverListener.
    """
    listeners = tuple(listeners or ())
    for listener in listeners:
        if not isinstance(listener, tf.train.CheckpointSaverListener):
            raise TypeError(
                "saving_listeners should hold tf.train.CheckpointSaverListeners, but one is of "
                f"type {type(listener).__name__}"
            )
    return listeners
