"""Hooks that stop training early by the metrics of evaluations; a receiver for evaluations."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._paths import escaped
from mesh_tensorflow.estimator._model import STEP_DONE
from mesh_tensorflow.estimator.export import (
    build_raw_supervised_input_receiver_fn,
    is_better,
)
from mesh_tensorflow.estimator.summaries import scalars_of_steps

if TYPE_CHECKING:
    from mesh_tensorflow.estimator._estimator import Estimator

__all__ = [
    "build_raw_supervised_input_receiver_fn",
    "make_early_stopping_hook",
    "stop_if_higher_hook",
    "stop_if_lower_hook",
    "stop_if_no_decrease_hook",
    "stop_if_no_increase_hook",
]


def read_eval_metrics(eval_dir: str) -> dict[int, dict[str, float]]:
    """Reads the metrics of evaluations from their summaries.

    Args:
      eval_dir: the directory of the summaries.

    Returns:
      a dict from step, in order, to metrics by name.
    """
    return scalars_of_steps(os.path.join(escaped(eval_dir), "*.tfevents.*"))


class _StopHook(tf.train.SessionRunHook):
    """Calls a function at intervals, and stops training when it returns true."""

    def __init__(
        self,
        should_stop_fn: Callable[[], bool],
        every_secs: Optional[float],
        every_steps: Optional[int],
    ) -> None:
        self._should_stop_fn = should_stop_fn
        self._timer = tf.train.SecondOrStepTimer(every_secs=every_secs, every_steps=every_steps)
        self._step: Any = None

    def begin(self) -> None:
        """Finds the tensor of the global step after each step, or the global step itself."""
        graph = tf.get_default_graph()
        try:
            self._step = graph.get_tensor_by_name(f"{STEP_DONE}:0")
        except KeyError:
            # In a loop of the user's own, no such tensor has been made.
            self._step = tf.train.get_global_step()

    def before_run(
        self, run_context: tf.train.SessionRunContext
    ) -> Optional[tf.train.SessionRunArgs]:
        """Fetches the global step."""
        return tf.train.SessionRunArgs(self._step)

    def after_run(
        self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues
    ) -> None:
        """Requests a stop if the interval has passed and the function returns true."""
        step = run_values.results
        if not self._timer.should_trigger_for_step(step):
            return
        self._timer.update_last_triggered_step(step)
        if self._should_stop_fn():
            tf.logging.info("Early stopping at step %d", step)
            run_context.request_stop()


def make_early_stopping_hook(
    estimator: Estimator,
    should_stop_fn: Callable[[], bool],
    run_every_secs: Optional[float] = 60,
    run_every_steps: Optional[int] = None,
) -> tf.train.SessionRunHook:
    """Returns a hook that stops training when a function returns true.

    Args:
      estimator: an Estimator.
      should_stop_fn: returns whether to stop.
      run_every_secs: seconds between calls, or None.
      run_every_steps: steps between calls, or None.

    Returns:
      a hook.

    Raises:
      TypeError: `should_stop_fn` is not a function.
      ValueError: not exactly one of `run_every_secs` and `run_every_steps` is given.
    """
    if not callable(should_stop_fn):
        raise TypeError(f"should_stop_fn should be a function, but is {should_stop_fn!r}")
    if (run_every_secs is None) == (run_every_steps is None):
        raise ValueError(
            f"run_every_secs is {run_every_secs} and run_every_steps is {run_every_steps}: give "
            "one of them, and None for the other"
        )
    return _StopHook(should_stop_fn, run_every_secs, run_every_steps)


# Evaluations of one metric: their steps, in order, and values.
_Values = list[tuple[int, float]]


def _has_passed(values: _Values, threshold: float, beyond: Callable[[float, float], bool]) -> bool:
    """Whether any value is beyond the threshold."""
    return any(beyond(value, threshold) for _, value in values)


def _is_stale(values: _Values, most_steps: int, mode: str) -> bool:
    """Whether the best value is `most_steps` old; the first of equal values is the best."""
    best_step, best = values[0]
    for step, value in values:
        if is_better(value, best, mode):
            best_step, best = step, value
    return values[-1][0] - best_step >= most_steps


def _hook_of_metrics(
    should_stop: Callable[[_Values], bool],
    estimator: Estimator,
    metric_name: str,
    eval_dir: Optional[str],
    min_steps: int,
    run_every_secs: Optional[float],
    run_every_steps: Optional[int],
) -> tf.train.SessionRunHook:
    directory = eval_dir or estimator.eval_dir()

    def should_stop_fn() -> bool:
        # Read anew each time, as the evaluations may be another process's.
        values = [
            (step, metrics[metric_name])
            for step, metrics in read_eval_metrics(directory).items()
            if metric_name in metrics and step >= min_steps
        ]
        return bool(values) and should_stop(values)

    return make_early_stopping_hook(estimator, should_stop_fn, run_every_secs, run_every_steps)


def stop_if_higher_hook(
    estimator: Estimator,
    metric_name: str,
    threshold: float,
    eval_dir: Optional[str] = None,
    min_steps: int = 0,
    run_every_secs: Optional[float] = 60,
    run_every_steps: Optional[int] = None,
) -> tf.train.SessionRunHook:
    """Returns a hook that stops training once a metric is above a threshold.

    Args:
      estimator: an Estimator.
      metric_name: the name of the metric.
      threshold: the threshold.
      eval_dir: the directory of evaluation summaries; `estimator.eval_dir()` by default.
      min_steps: evaluations before this step are ignored.
      run_every_secs: seconds between checks, or None.
      run_every_steps: steps between checks, or None.

    Returns:
      a hook.
    """
    should_stop = functools.partial(_has_passed, threshold=threshold, beyond=operator.gt)
    return _hook_of_metrics(
        should_stop, estimator, metric_name, eval_dir, min_steps, run_every_secs, run_every_steps
    )


def stop_if_lower_hook(
    estimator: Estimator,
    metric_name: str,
    threshold: float,
    eval_dir: Optional[str] = None,
    min_steps: int = 0,
    run_every_secs: Optional[float] = 60,
    run_every_steps: Optional[int] = None,
) -> tf.train.SessionRunHook:
    """Returns a hook that stops training once a metric is below a threshold.

    Args:
      estimator: an Estimator.
      metric_name: the name of the metric.
      threshold: the threshold.
      eval_dir: the directory of evaluation summaries; `estimator.eval_dir()` by default.
      min_steps: evaluations before this step are ignored.
      run_every_secs: seconds between checks, or None.
      run_every_steps: steps between checks, or None.

    Returns:
      a hook.
    """
    should_stop = functools.partial(_has_passed, threshold=threshold, beyond=operator.lt)
    return _hook_of_metrics(
        should_stop, estimator, metric_name, eval_dir, min_steps, run_every_secs, run_every_steps
    )


def stop_if_no_increase_hook(
    estimator: Estimator,
    metric_name: str,
    max_steps_without_increase: int,
    eval_dir: Optional[str] = None,
    min_steps: int = 0,
    run_every_secs: Optional[float] = 60,
    run_every_steps: Optional[int] = None,
) -> tf.train.SessionRunHook:
    """Returns a hook that stops training once a metric has not increased for some steps.

    Args:
      estimator: an Estimator.
      metric_name: the name of the metric.
      max_steps_without_increase: the number of steps between the best and the last evaluation.
      eval_dir: the directory of evaluation summaries; `estimator.eval_dir()` by default.
      min_steps: evaluations before this step are ignored.
      run_every_secs: seconds between checks, or None.
      run_every_steps: steps between checks, or None.

    Returns:
      a hook.
    """
    should_stop = functools.partial(_is_stale, most_steps=max_steps_without_increase, mode="max")
    return _hook_of_metrics(
        should_stop, estimator, metric_name, eval_dir, min_steps, run_every_secs, run_every_steps
    )


def stop_if_no_decrease_hook(
    estimator: Estimator,
    metric_name: str,
    max_steps_without_decrease: int,
    eval_dir: Optional[str] = None,
    min_steps: int = 0,
    run_every_secs: Optional[float] = 60,
    run_every_steps: Optional[int] = None,
) -> tf.train.SessionRunHook:
    """Returns a hook that stops training once a metric has not decreased for some steps.

    Args:
      estimator: an Estimator.
      metric_name: the name of the metric.
      max_steps_without_decrease: the number of steps between the best and the last evaluation.
      eval_dir: the directory of evaluation summaries; `estimator.eval_dir()` by default.
      min_steps: evaluations before this step are ignored.
      run_every_secs: seconds between checks, or None.
      run_every_steps: steps between checks, or None.

    Returns:
      a hook.
    """
    should_stop = functools.partial(_is_stale, most_steps=max_steps_without_decrease, mode="min")
    return _hook_of_metrics(
        should_stop, estimator, metric_name, eval_dir, min_steps, run_every_secs, run_every_steps
    )
