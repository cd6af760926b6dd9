"""TrainSpec and EvalSpec: the arguments of `train_and_evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow.estimator._running.call import check_input_fn
from mesh_tensorflow.estimator._serving.exporters import Exporter
from mesh_tensorflow.estimator._spec import check_hooks

__all__ = ["EvalSpec", "TrainSpec"]


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
