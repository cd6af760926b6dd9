"""train_and_evaluate: a training that is evaluated at its checkpoints, and its two specs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow.estimator._cluster import in_cluster
from mesh_tensorflow.estimator._estimator import Estimator
from mesh_tensorflow.estimator._running.checkpoints import saved_step
from mesh_tensorflow.estimator._running.model import check_input_fn
from mesh_tensorflow.estimator._serving.exporters import Exporter
from mesh_tensorflow.estimator._spec import check_hooks


class _TrainFields(NamedTuple):
    input_fn: Callable[..., Any]
    max_steps: Optional[int]
    hooks: tuple[Any, ...]
    saving_listeners: tuple[Any, ...]


class TrainSpec(_TrainFields):
    """The training of `train_and_evaluate`: its input, length and hooks."""

    def __new__(
        cls,
        input_fn: Callable[..., Any],
        max_steps: Optional[int] = None,
        hooks: Optional[Sequence[tf.train.SessionRunHook]] = None,
        saving_listeners: Optional[Sequence[tf.train.CheckpointSaverListener]] = None,
    ) -> TrainSpec:
        """Creates an instance.

        Args:
          input_fn: returns features and labels.
          max_steps: the global step at which to stop, or None to train until the data ends.
          hooks: tf.train.SessionRunHooks of the session.
          saving_listeners: tf.train.CheckpointSaverListeners.

        Returns:
          a TrainSpec.

        Raises:
          TypeError: `input_fn` is not a function, or a hook is not a SessionRunHook.
          ValueError: `max_steps` is not positive.
        """
        check_input_fn(input_fn, "TrainSpec")
        _check_number("TrainSpec", "max_steps", max_steps, 1)
        return super().__new__(
            cls, input_fn, max_steps, check_hooks(hooks, "hooks"), tuple(saving_listeners or ())
        )


class _EvalFields(NamedTuple):
    input_fn: Callable[..., Any]
    steps: Optional[int]
    name: Optional[str]
    hooks: tuple[Any, ...]
    exporters: tuple[Any, ...]
    start_delay_secs: float
    throttle_secs: float


class EvalSpec(_EvalFields):
    """The evaluation of `train_and_evaluate`: its input, frequency and exporters."""

    def __new__(
        cls,
        input_fn: Callable[..., Any],
        steps: Optional[int] = 100,
        name: Optional[str] = None,
        hooks: Optional[Sequence[tf.train.SessionRunHook]] = None,
        exporters: Union[Exporter, Sequence[Exporter], None] = None,
        start_delay_secs: float = 120,
        throttle_secs: float = 600,
    ) -> EvalSpec:
        """Creates an instance.

        Args:
          input_fn: returns features and labels.
          steps: the number of batches, or None to evaluate until the data ends.
          name: the name of the evaluation, if there are several.
          hooks: tf.train.SessionRunHooks of the session.
          exporters: an Exporter, or a sequence of them.
          start_delay_secs: the initial delay of an evaluator in a separate process; ignored if
            training and evaluation share a process.
          throttle_secs: the minimum time between the starts of evaluations.

        Returns:
          an EvalSpec.

        Raises:
          TypeError: `input_fn` is not a function, a hook is not a SessionRunHook, or an exporter is
            not an Exporter.
          ValueError: a number is too small, or two exporters have the same name.
        """
        check_input_fn(input_fn, "EvalSpec")
        _check_number("EvalSpec", "steps", steps, 1)
        _check_number("EvalSpec", "start_delay_secs", start_delay_secs, 0)
        _check_number("EvalSpec", "throttle_secs", throttle_secs, 0)
        if name is not None and not isinstance(name, str):
            raise TypeError(f"EvalSpec: name is {name!r}; it should be a string")
        return super().__new__(
            cls,
            input_fn,
            steps,
            name,
            check_hooks(hooks, "hooks"),
            _checked_exporters(exporters),
            start_delay_secs,
            throttle_secs,
        )


def _check_number(called: str, name: str, value: Optional[float], least: int) -> None:
    if value is not None and (isinstance(value, bool) or not value >= least):
        raise ValueError(f"{called}: {name} is {value!r}; it should be {least} or more")


def _checked_exporters(
    exporters: Union[Exporter, Sequence[Exporter], None],
) -> tuple[Exporter, ...]:
    if exporters is None:
        return ()
    found = (exporters,) if isinstance(exporters, Exporter) else tuple(exporters)
    for exporter in found:
        if not isinstance(exporter, Exporter):
            raise TypeError(
                f"EvalSpec: exporters should be Exporters, but one is of type "
                f"{type(exporter).__name__}"
            )
    names = [exporter.name for exporter in found]
    for name in names:
        if not name or names.count(name) > 1:
            raise ValueError(
                f"EvalSpec: the exporters are called {', '.join(map(repr, names))}: each needs a "
                "name of its own, which is that of its directory"
            )
    return found


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> Optional[tuple[dict[str, Any], list[Any]]]:
    """Trains, and evaluates the checkpoints of the training, including the last one.

    Each checkpoint is evaluated, unless the last evaluation started less than `throttle_secs`
    before. Exporters write to the directory "export" of the model directory.

    Args:
      estimator: an Estimator.
      train_spec: a TrainSpec.
      eval_spec: an EvalSpec.

    Returns:
      (metrics, results of the exporters) of the last evaluation; None if training was complete
      already.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: no checkpoints are saved, or TF_CONFIG describes several processes.
    """
    for name, value, kind in [
        ("estimator", estimator, Estimator),
        ("train_spec", train_spec, TrainSpec),
        ("eval_spec", eval_spec, EvalSpec),
    ]:
        if not isinstance(value, kind):
            raise TypeError(
                f"train_and_evaluate: {name} should be of type {kind.__name__}, but is {value!r}"
            )
    config = estimator.config
    several = config.num_worker_replicas + config.num_ps_replicas > 1
    if config.task_type == "evaluator" or (several and not in_cluster()):
        raise ValueError(
            f"train_and_evaluate runs in one process, but TF_CONFIG makes this {config.task_type} "
            f"{config.task_id} of several: let the chief drive the others' devices by "
            "estimator.run_cluster, or call estimator.train in the chief and the workers, and "
            "estimator.evaluate in the evaluator"
        )
    if not (config.save_checkpoints_steps or config.save_checkpoints_secs):
        raise ValueError(
            "train_and_evaluate evaluates checkpoints, but none are saved: set "
            "save_checkpoints_steps or save_checkpoints_secs of the RunConfig"
        )
    start = saved_step(estimator.model_dir) or 0
    if train_spec.max_steps is not None and start >= train_spec.max_steps:
        tf.logging.info("Training has ended before: step %d of %d", start, train_spec.max_steps)
        return None
    evaluator = _Evaluator(estimator, eval_spec, train_spec.max_steps)
    estimator.train(
        train_spec.input_fn,
        hooks=train_spec.hooks,
        max_steps=train_spec.max_steps,
        saving_listeners=[*train_spec.saving_listeners, evaluator],
    )
    return evaluator.result


class _Evaluator(tf.train.CheckpointSaverListener):
    """Evaluates and exports after checkpoints."""

    def __init__(self, estimator: Estimator, eval_spec: EvalSpec, max_steps: Optional[int]) -> None:
        self._estimator = estimator
        self._spec = eval_spec
        self._max_steps = max_steps
        self._last_start: Optional[float] = None
        self._last_step: Optional[int] = None
        self._is_first_save = True
        self.result: Optional[tuple[dict[str, Any], list[Any]]] = None

    def after_save(self, session: tf.Session, global_step_value: int) -> None:
        """Evaluates a checkpoint, except the one before the first step."""
        # A saver saves as soon as a session is created, before anything new has been learned.
        if self._is_first_save:
            self._is_first_save = False
            return
        due = self._last_start is None or (
            time.monotonic() - self._last_start >= self._spec.throttle_secs
        )
        if due:
            self._evaluate(global_step_value)

    def end(self, session: tf.Session, global_step_value: int) -> None:
        """Evaluates the last checkpoint."""
        # Also a checkpoint that was evaluated, if exporters were not told that it was the last.
        if self._last_step != global_step_value or not self._was_final(global_step_value):
            self._evaluate(global_step_value, is_the_end=True)

    def _was_final(self, step: int) -> bool:
        return self._max_steps is not None and step >= self._max_steps

    def _evaluate(self, step: int, is_the_end: bool = False) -> None:
        self._last_start, self._last_step = time.monotonic(), step
        path = self._estimator.latest_checkpoint()
        metrics = self._estimator.evaluate(
            self._spec.input_fn,
            steps=self._spec.steps,
            hooks=self._spec.hooks,
            checkpoint_path=path,
            name=self._spec.name,
        )
        final = is_the_end or self._was_final(step)
        directory = os.path.join(self._estimator.model_dir, "export")
        exported = [
            exporter.export(
                self._estimator, os.path.join(directory, exporter.name), path, metrics, final
            )
            for exporter in self._spec.exporters
        ]
        self.result = (metrics, exported)
