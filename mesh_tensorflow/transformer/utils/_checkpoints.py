"""Checkpoints of a model: which of them to use, and their steps."""

from __future__ import annotations

import operator
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Optional, Union

import gin
import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow.transformer.utils._settings import MODULE

Steps = Union[int, str, Sequence[int], None]
LATEST = -1
_POLL_SECONDS = 1.0


def get_step_from_checkpoint_path(checkpoint_path: str) -> int:
    """Returns the step in the name of a checkpoint.

    Args:
      checkpoint_path: a path with "model.ckpt-<step>" in it.

    Returns:
      An integer.

    Raises:
      ValueError: there is no step in it.
    """
    match = re.search(r"model\.ckpt-(\d+)", checkpoint_path)
    if match is None:
        raise ValueError(
            f"Invalid checkpoint path {checkpoint_path}: it should have 'model.ckpt-<step>' in it"
        )
    return int(match.group(1))


def _path(model_dir: str, step: int) -> str:
    return os.path.join(model_dir, f"model.ckpt-{step}")


def _saved_steps(model_dir: str) -> list[int]:
    return [
        get_step_from_checkpoint_path(os.path.basename(p))
        for p in checkpoint_files.numbered(model_dir)
    ]


def _latest(model_dir: str) -> list[str]:
    path = checkpoint_files.latest(model_dir)
    if path is None:
        raise ValueError(f"get_checkpoint_iterator: No checkpoint files found in {model_dir}")
    return [path]


def _chosen(steps: Iterable[int], model_dir: str, find_closest: bool) -> list[str]:
    """Returns the checkpoints at or nearest to the given steps, in order and without duplicates."""
    steps = list(steps)
    if not steps:
        return []
    saved = _saved_steps(model_dir)
    if not saved:
        raise ValueError(f"get_checkpoint_iterator: No checkpoint files found in {model_dir}")
    if find_closest:
        # Of two at the same distance, the earlier one.
        found = {min(saved, key=lambda s: (abs(s - step), s)) for step in steps}
        for step in sorted(set(steps) - found):
            tf.logging.info("No checkpoint at step %d: using the nearest one.", step)
    else:
        found = set(steps) & set(saved)
    if not found:
        raise ValueError(
            f"You asked for checkpoints '{steps}' but none were found; {model_dir} has those of "
            f"steps {', '.join(map(str, saved))}"
        )
    return [_path(model_dir, step) for step in sorted(found)]


def _new_ones(model_dir: str, skip_until: int, stop_after: Optional[int]) -> Iterator[str]:
    """Yields each checkpoint as soon as it is written."""
    if checkpoint_files.latest(model_dir) is None:
        tf.logging.info(
            "Waiting for the first checkpoint in %s: a training that writes there makes one%s. "
            "Ctrl-C ends this",
            model_dir,
            "" if stop_after is None else f"; ends at that of step {stop_after}",
        )
    path = None
    while True:
        before, path = path, checkpoint_files.latest(model_dir)
        if path is None or path == before:
            time.sleep(_POLL_SECONDS)
            continue
        step = get_step_from_checkpoint_path(path)
        if step > skip_until:
            yield path
        if stop_after is not None and step >= stop_after:
            return


@gin.configurable(module=MODULE)
def get_checkpoint_iterator(
    checkpoint_step: Steps,
    model_dir: str,
    skip_until: int = 0,
    stop_after: Optional[int] = None,
    find_closest: bool = True,
) -> Iterable[str]:
    """Returns paths of checkpoints.

    Args:
      checkpoint_step: a step or a list of steps; "all" for all existing checkpoints, in order; -1
        for the latest; None for the latest and all later ones, as they are written.
      model_dir: the directory of the checkpoints.
      skip_until: with "all" and None, skips checkpoints up to this step.
      stop_after: with None, stops after the first checkpoint at this step or a later one.
      find_closest: whether to take the checkpoint nearest to a step if there is none at that step.

    Returns:
      An iterable of strings.

    Raises:
      ValueError: there is no such checkpoint, or `checkpoint_step` is none of these.
    """
    if model_dir is None:
        raise ValueError("get_checkpoint_iterator: model_dir is None; give the directory")
    if checkpoint_step is None:
        return _new_ones(model_dir, skip_until, stop_after)
    if isinstance(checkpoint_step, str) and checkpoint_step == "all":
        return iter([_path(model_dir, s) for s in _saved_steps(model_dir) if s > skip_until])
    # NumPy's integers are steps too; its arrays also have an index, and are lists of steps.
    if hasattr(checkpoint_step, "__index__") and not np.ndim(checkpoint_step):
        step = operator.index(checkpoint_step)
        return _latest(model_dir) if step == LATEST else _chosen([step], model_dir, find_closest)
    if isinstance(checkpoint_step, (str, float)):
        raise ValueError(
            f"get_checkpoint_iterator: checkpoint_step={checkpoint_step!r} should be a step, a "
            "list of steps, 'all', -1 for the latest, or None for each new one"
        )
    steps: Any = checkpoint_step
    return _chosen(map(int, steps), model_dir, find_closest)
