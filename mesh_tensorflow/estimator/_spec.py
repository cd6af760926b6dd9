"""EstimatorSpec: the result of a model function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow.estimator._modes import STANDARD_MODES, ModeKeys
from mesh_tensorflow.estimator._serving.export_outputs import complete_export_outputs

__all__ = ["EstimatorSpec", "check_hooks", "check_loss", "check_scaffold"]


class _Fields(NamedTuple):
    mode: str
    predictions: Any
    loss: Optional[tf.Tensor]
    train_op: Any
    eval_metric_ops: dict[str, Any]
    export_outputs: Optional[dict[str, Any]]
    training_chief_hooks: tuple[Any, ...]
    training_hooks: tuple[Any, ...]
    scaffold: tf.train.Scaffold
    evaluation_hooks: tuple[Any, ...]
    prediction_hooks: tuple[Any, ...]


class EstimatorSpec(_Fields):
    """The operations of a model, and the setup of its session.

    Training requires `loss` and `train_op`, evaluation `loss`, and prediction `predictions`.
    """

    def __new__(
        cls,
        mode: str,
        predictions: Union[tf.Tensor, Mapping[str, tf.Tensor], None] = None,
        loss: Optional[tf.Tensor] = None,
        train_op: Union[tf.Operation, tf.Tensor, None] = None,
        eval_metric_ops: Optional[Mapping[str, Any]] = None,
        export_outputs: Optional[Mapping[str, Any]] = None,
        training_chief_hooks: Optional[Sequence[tf.train.SessionRunHook]] = None,
        training_hooks: Optional[Sequence[tf.train.SessionRunHook]] = None,
        scaffold: Optional[tf.train.Scaffold] = None,
        evaluation_hooks: Optional[Sequence[tf.train.SessionRunHook]] = None,
        prediction_hooks: Optional[Sequence[tf.train.SessionRunHook]] = None,
    ) -> EstimatorSpec:
        """Creates a spec and checks it for its mode.

        Args:
          mode: a ModeKeys value.
          predictions: a tensor, or a dict of tensors.
          loss: a scalar tensor, or a tensor with one element.
          train_op: the operation of one step; it also has to increment the global step.
          eval_metric_ops: a dict of (value, update operation), as returned by `tf.metrics`.
          export_outputs: a dict of ExportOutputs. "serving_default" is the default signature; a
            single output is the default under any name.
          training_chief_hooks: hooks in training, only in the chief.
          training_hooks: hooks in training.
          scaffold: a tf.train.Scaffold.
          evaluation_hooks: hooks in evaluation.
          prediction_hooks: hooks in prediction.

        Returns:
          an EstimatorSpec.

        Raises:
          ValueError: an argument that the mode requires is missing, or has the wrong shape.
          TypeError: an argument has the wrong type.
        """
        _check_mode(mode)
        loss = check_loss(loss, required=mode in (ModeKeys.TRAIN, ModeKeys.EVAL), mode=mode)
        hooks = {
            "training_chief_hooks": training_chief_hooks,
            "training_hooks": training_hooks,
            "evaluation_hooks": evaluation_hooks,
            "prediction_hooks": prediction_hooks,
        }
        predictions = _checked_predictions(predictions, mode)
        return super().__new__(
            cls,
            mode=mode,
            predictions=predictions,
            loss=loss,
            train_op=_checked_train_op(train_op, mode),
            eval_metric_ops=_checked_metrics(eval_metric_ops),
            export_outputs=complete_export_outputs(export_outputs, predictions, mode),
            scaffold=check_scaffold(scaffold),
            **{name: check_hooks(given, name) for name, given in hooks.items()},
        )


def _check_mode(mode: str) -> None:
    if mode not in STANDARD_MODES:
        known = ", ".join(f"ModeKeys.{m} ({getattr(ModeKeys, m)!r})" for m in _mode_names())
        raise ValueError(f"EstimatorSpec: mode is {mode!r}; it should be one of {known}")


def _mode_names() -> list[str]:
    return ["TRAIN", "EVAL", "PREDICT"]


def check_loss(loss: Optional[tf.Tensor], required: bool, mode: str) -> Optional[tf.Tensor]:
    """Converts a loss to a scalar tensor.

    Args:
      loss: the loss of the model function, or None.
      required: whether None is an error.
      mode: the mode, for error messages.

    Returns:
      a tensor of shape [], or None.

    Raises:
      ValueError: the loss is required but None, or has more than one element.
    """
    if loss is None:
        if required:
            raise ValueError(
                f"EstimatorSpec for mode {mode!r} has no loss: give loss=, a scalar tf tensor such "
                "as lowering.export_to_tf_tensor(loss)"
            )
        return None
    if hasattr(loss, "mesh") and not tf.is_tensor(loss):
        raise TypeError(
            f"EstimatorSpec: loss is {loss!r}, a tensor of a mesh; give what "
            "lowering.export_to_tf_tensor(loss) returns"
        )
    loss = tf.convert_to_tensor(loss)
    if loss.shape.num_elements() not in (1, None):
        raise ValueError(
            f"EstimatorSpec: loss has shape {loss.shape}, but should be a scalar: reduce it, with "
            "tf.reduce_mean for example"
        )
    return loss if loss.shape.rank == 0 else tf.reshape(loss, [])


def _checked_train_op(train_op: Union[tf.Operation, tf.Tensor, None], mode: str) -> Any:
    if train_op is None:
        if mode == ModeKeys.TRAIN:
            raise ValueError(
                f"EstimatorSpec for mode {mode!r} has no train_op: give train_op=, the operation "
                "of one step, such as tf.group of the lowered updates and "
                "tf.assign_add(global_step, 1)"
            )
        return None
    if isinstance(train_op, tf.Operation) or tf.is_tensor(train_op):
        return train_op
    if hasattr(train_op, "op"):
        return train_op.op
    raise TypeError(
        f"EstimatorSpec: train_op is of type {type(train_op).__name__}; it should be a "
        "tf.Operation or a tensor: several operations go into one by tf.group(*operations)"
    )


def _checked_predictions(
    predictions: Union[tf.Tensor, Mapping[str, tf.Tensor], None], mode: str
) -> Any:
    if predictions is None:
        if mode == ModeKeys.PREDICT:
            raise ValueError(
                f"EstimatorSpec for mode {mode!r} has no predictions: give predictions=, a tf "
                "tensor or a dict of tf tensors"
            )
        return {}
    by_name = predictions if isinstance(predictions, Mapping) else {"predictions": predictions}
    for name, value in by_name.items():
        if not tf.is_tensor(value) and not isinstance(value, (tf.Variable, tf.SparseTensor)):
            raise TypeError(
                f"EstimatorSpec: {name!r} in predictions is of type {type(value).__name__}; it "
                "should be a tf tensor (of a tensor of a mesh: what "
                "lowering.export_to_tf_tensor returns)"
            )
    return predictions


def _checked_metrics(metrics: Optional[Mapping[str, Any]]) -> dict[str, Any]:
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(
            "EstimatorSpec: eval_metric_ops should be a dict of (value, update operation), but is "
            f"of type {type(metrics).__name__}"
        )
    for name, metric in metrics.items():
        if not (isinstance(metric, tuple) and len(metric) == 2):
            raise TypeError(
                f"EstimatorSpec: {name!r} in eval_metric_ops is {metric!r}; it should be a pair "
                "(value, update operation), as tf.metrics.mean(x) returns"
            )
    return dict(metrics)


def check_hooks(
    hooks: Optional[Iterable[tf.train.SessionRunHook]], name: str
) -> tuple[tf.train.SessionRunHook, ...]:
    """Returns hooks as a tuple.

    Args:
      hooks: tf.train.SessionRunHooks, or None.
      name: the name of the argument, for error messages.

    Returns:
      a tuple.

    Raises:
      TypeError: one of them is not a SessionRunHook.
    """
    hooks = () if hooks is None else tuple(hooks)
    for hook in hooks:
        if not isinstance(hook, tf.train.SessionRunHook):
            raise TypeError(
                f"{name} should hold tf.train.SessionRunHooks, but one is of type "
                f"{type(hook).__name__}"
            )
    return hooks


def check_scaffold(scaffold: Optional[tf.train.Scaffold]) -> tf.train.Scaffold:
    """Returns a scaffold; creates one if it is None.

    Args:
      scaffold: a tf.train.Scaffold, or None.

    Returns:
      a tf.train.Scaffold.

    Raises:
      TypeError: `scaffold` has another type.
    """
    if scaffold is None:
        return tf.train.Scaffold()
    if not isinstance(scaffold, tf.train.Scaffold):
        raise TypeError(
            f"scaffold should be a tf.train.Scaffold, but is of type {type(scaffold).__name__}"
        )
    return scaffold
