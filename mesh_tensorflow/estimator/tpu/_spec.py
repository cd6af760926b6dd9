"""TPUEstimatorSpec: the result of the model function of a TPUEstimator."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow.estimator._modes import STANDARD_MODES, ModeKeys
from mesh_tensorflow.estimator._spec import EstimatorSpec, check_hooks, check_loss

__all__ = ["HostCallHook", "TPUEstimatorSpec", "as_estimator_spec"]


# (a function that builds operations on the host, the tensors of a step that are its arguments).
HostFunction = tuple[Callable[..., Any], Union[Sequence[tf.Tensor], Mapping[str, tf.Tensor]]]


class HostCallHook(tf.train.SessionRunHook):
    """Runs the operations of the host call with training steps."""

    def __init__(self, operations: object, every_n_steps: int = 1) -> None:
        """Creates a HostCallHook.

        Args:
          operations: the result of the host call.
          every_n_steps: steps between runs of the operations.
        """
        self._operations = operations
        self._every = every_n_steps
        self._count = 0

    def before_run(
        self, run_context: tf.train.SessionRunContext
    ) -> Optional[tf.train.SessionRunArgs]:
        """Fetches the operations, if they are due.

        Args:
          run_context: ignored.

        Returns:
          SessionRunArgs.
        """
        self._count += 1
        if self._count % self._every:
            return None
        return tf.train.SessionRunArgs(self._operations)


class _Fields(NamedTuple):
    mode: str
    predictions: Any
    loss: Optional[tf.Tensor]
    train_op: Any
    eval_metrics: Any
    export_outputs: Optional[dict[str, Any]]
    scaffold_fn: Optional[Callable[[], Any]]
    host_call: Any
    training_hooks: tuple[Any, ...]
    evaluation_hooks: tuple[Any, ...]
    prediction_hooks: tuple[Any, ...]


class TPUEstimatorSpec(_Fields):
    """The operations of a model, with host operations separate."""

    def __new__(
        cls,
        mode: str,
        predictions: Union[tf.Tensor, Mapping[str, tf.Tensor], None] = None,
        loss: Optional[tf.Tensor] = None,
        train_op: Union[tf.Operation, tf.Tensor, None] = None,
        eval_metrics: Optional[HostFunction] = None,
        export_outputs: Optional[Mapping[str, Any]] = None,
        scaffold_fn: Optional[Callable[[], Any]] = None,
        host_call: Optional[HostFunction] = None,
        training_hooks: Optional[Sequence[tf.train.SessionRunHook]] = None,
        evaluation_hooks: Optional[Sequence[tf.train.SessionRunHook]] = None,
        prediction_hooks: Optional[Sequence[tf.train.SessionRunHook]] = None,
    ) -> TPUEstimatorSpec:
        """Creates a spec and checks it for its mode.

        Args:
          mode: a ModeKeys value.
          predictions: a dict of tensors.
          loss: a scalar tensor.
          train_op: the operation of one step.
          eval_metrics: (function, tensors). The function takes the tensors, a list or a dict, and
            returns a dict of (value, update operation).
          export_outputs: a dict of ExportOutputs.
          scaffold_fn: returns a tf.train.Scaffold.
          host_call: (function, tensors). The function takes the tensors, and returns operations
            to run in each step.
          training_hooks: hooks in training.
          evaluation_hooks: hooks in evaluation.
          prediction_hooks: hooks in prediction.

        Returns:
          a TPUEstimatorSpec.

        Raises:
          ValueError: an argument that the mode requires is missing, or has the wrong form.
          TypeError: an argument has the wrong type.
        """
        if mode not in STANDARD_MODES:
            raise ValueError(f"TPUEstimatorSpec: mode is {mode!r}; it should be a ModeKeys value")
        _check_call("eval_metrics", eval_metrics)
        _check_call("host_call", host_call)
        if scaffold_fn is not None and not callable(scaffold_fn):
            raise TypeError(
                f"TPUEstimatorSpec: scaffold_fn should be a function, but is {scaffold_fn!r}"
            )
        if mode == ModeKeys.TRAIN and train_op is None:
            raise ValueError("TPUEstimatorSpec for mode 'train' has no train_op: give train_op=")
        if mode == ModeKeys.PREDICT and predictions is None:
            raise ValueError(
                "TPUEstimatorSpec for mode 'infer' has no predictions: give predictions=, a dict "
                "of tf tensors"
            )
        return super().__new__(
            cls,
            mode=mode,
            predictions={} if predictions is None else predictions,
            loss=check_loss(loss, mode in (ModeKeys.TRAIN, ModeKeys.EVAL), mode),
            train_op=train_op,
            eval_metrics=eval_metrics,
            export_outputs=None if export_outputs is None else dict(export_outputs),
            scaffold_fn=scaffold_fn,
            host_call=host_call,
            training_hooks=check_hooks(training_hooks, "training_hooks"),
            evaluation_hooks=check_hooks(evaluation_hooks, "evaluation_hooks"),
            prediction_hooks=check_hooks(prediction_hooks, "prediction_hooks"),
        )

    def as_estimator_spec(self) -> EstimatorSpec:
        """Converts to an EstimatorSpec; calls the functions.

        Returns:
          an EstimatorSpec.
        """
        return as_estimator_spec(self)


def _check_call(name: str, pair: Optional[HostFunction]) -> None:
    if pair is None:
        return
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not callable(pair[0]):
        raise ValueError(
            f"TPUEstimatorSpec: {name} should be a pair (function, tensors), but is {pair!r}"
        )
    function, tensors = pair
    if isinstance(tensors, Mapping):
        return
    if not isinstance(tensors, (tuple, list)):
        raise ValueError(
            f"TPUEstimatorSpec: the tensors of {name} should be a list or a dict, but are "
            f"{tensors!r}"
        )
    try:
        inspect.signature(function).bind(*tensors)
    except TypeError as error:
        raise ValueError(
            f"TPUEstimatorSpec: the function of {name} cannot take {len(tensors)} tensors: {error}"
        ) from error


def _call(pair: HostFunction) -> Any:
    function, tensors = pair
    return function(**tensors) if isinstance(tensors, Mapping) else function(*tensors)


def as_estimator_spec(spec: TPUEstimatorSpec, host_call_every_n_steps: int = 1) -> EstimatorSpec:
    """Converts a TPUEstimatorSpec to an EstimatorSpec; calls its functions.

    Args:
      spec: a TPUEstimatorSpec.
      host_call_every_n_steps: steps between host calls.

    Returns:
      an EstimatorSpec.

    Raises:
      ValueError: the function of `eval_metrics` does not return a dict.
    """
    hooks: list[Any] = []
    if spec.host_call is not None:
        operations = _call(spec.host_call)
        if operations is not None:
            hooks.append(HostCallHook(operations, host_call_every_n_steps))
    metrics = None
    if spec.mode == ModeKeys.EVAL and spec.eval_metrics is not None:
        metrics = _call(spec.eval_metrics)
        if not isinstance(metrics, Mapping):
            raise ValueError(
                "TPUEstimatorSpec: the function of eval_metrics should return a dict of (value, "
                f"update operation), but returned {metrics!r}"
            )
    scaffold = spec.scaffold_fn() if spec.scaffold_fn is not None else None
    return EstimatorSpec(
        mode=spec.mode,
        predictions=spec.predictions,
        loss=spec.loss,
        train_op=spec.train_op,
        eval_metric_ops=metrics,
        export_outputs=spec.export_outputs,
        scaffold=scaffold,
        training_hooks=[*spec.training_hooks, *hooks],
        evaluation_hooks=[*spec.evaluation_hooks, *hooks],
        prediction_hooks=[*spec.prediction_hooks, *hooks],
    )
