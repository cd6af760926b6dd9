"""What a model function returns in its modes: an EstimatorSpec, with the outputs of an export."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf


class ModeKeys:
    """The values of `mode`: training, evaluation, or prediction."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"  # as in tf.estimator


STANDARD_MODES = (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT)
DEFAULT_SIGNATURE = "serving_default"


# -- outputs of exported models


class ExportOutput(abc.ABC):
    """The outputs of one signature of an exported model."""

    @abc.abstractmethod
    def as_signature_def(self, receiver_tensors: Mapping[str, tf.Tensor]) -> Any:
        """Returns the signature.

        Args:
          receiver_tensors: the input tensors by name.

        Returns:
          a SignatureDef.

        Raises:
          ValueError: the inputs do not fit this kind of signature.
        """


def _one_string_input(receiver_tensors: Mapping[str, tf.Tensor], kind: str) -> tf.Tensor:
    tensors = list(receiver_tensors.values())
    if len(tensors) != 1 or tensors[0].dtype != tf.string:
        inputs = ", ".join(f"{name}: {x.dtype.name}" for name, x in receiver_tensors.items())
        raise ValueError(
            f"a {kind} signature takes one string tensor of serialized tf.train.Examples, but the "
            f"receiver has {inputs}: use build_parsing_serving_input_receiver_fn, or a "
            "PredictOutput"
        )
    return tensors[0]


class ClassificationOutput(ExportOutput):
    """The outputs of a classification: scores, classes, or both."""

    def __init__(
        self, scores: Optional[tf.Tensor] = None, classes: Optional[tf.Tensor] = None
    ) -> None:
        """Creates a ClassificationOutput.

        Args:
          scores: floats [batch, classes], or None.
          classes: strings [batch, classes], or None.

        Raises:
          ValueError: neither is given, or one has the wrong dtype.
        """
        if scores is None and classes is None:
            raise ValueError("ClassificationOutput: give scores=, classes= or both")
        if scores is not None and not (tf.is_tensor(scores) and scores.dtype.is_floating):
            raise ValueError(f"ClassificationOutput: scores should be floats, but are {scores!r}")
        if classes is not None and not (tf.is_tensor(classes) and classes.dtype == tf.string):
            raise ValueError(
                f"ClassificationOutput: classes should be strings, but are {classes!r}: "
                "tf.as_string makes them so"
            )
        self._scores, self._classes = scores, classes

    @property
    def scores(self) -> Optional[tf.Tensor]:
        """The scores, or None."""
        return self._scores

    @property
    def classes(self) -> Optional[tf.Tensor]:
        """The classes, or None."""
        return self._classes

    def as_signature_def(self, receiver_tensors: Mapping[str, tf.Tensor]) -> Any:
        """Returns a classification signature.

        Args:
          receiver_tensors: a dict with one string tensor.

        Returns:
          a SignatureDef.

        Raises:
          ValueError: the input is not one string tensor.
        """
        examples = _one_string_input(receiver_tensors, "classification")
        return tf.saved_model.signature_def_utils.classification_signature_def(
            examples, self._classes, self._scores
        )


class RegressionOutput(ExportOutput):
    """The output of a regression: one value for each example."""

    def __init__(self, value: tf.Tensor) -> None:
        """Creates a RegressionOutput.

        Args:
          value: floats [batch] or [batch, 1].

        Raises:
          ValueError: `value` is not floating.
        """
        if not (tf.is_tensor(value) and value.dtype.is_floating):
            raise ValueError(f"RegressionOutput: value should be floats, but is {value!r}")
        self._value = value

    @property
    def value(self) -> tf.Tensor:
        """The value."""
        return self._value

    def as_signature_def(self, receiver_tensors: Mapping[str, tf.Tensor]) -> Any:
        """Returns a regression signature.

        Args:
          receiver_tensors: a dict with one string tensor.

        Returns:
          a SignatureDef.

        Raises:
          ValueError: the input is not one string tensor.
        """
        examples = _one_string_input(receiver_tensors, "regression")
        return tf.saved_model.signature_def_utils.regression_signature_def(examples, self._value)


def _as_dict(
    outputs: Union[tf.Tensor, Mapping[str, tf.Tensor]], default: str
) -> dict[str, tf.Tensor]:
    return dict(outputs) if isinstance(outputs, Mapping) else {default: outputs}


class PredictOutput(ExportOutput):
    """The outputs of a prediction: any tensors by name."""

    def __init__(self, outputs: Union[tf.Tensor, Mapping[str, tf.Tensor]]) -> None:
        """Creates a PredictOutput.

        Args:
          outputs: a dict of tensors; a single tensor is named "output".

        Raises:
          ValueError: a name is not a string, or a value is not a tensor.
        """
        self._outputs = _as_dict(outputs, "output")
        for name, value in self._outputs.items():
            if not isinstance(name, str):
                raise ValueError(f"PredictOutput: the name {name!r} should be a string")
            if not tf.is_tensor(value):
                raise ValueError(f"PredictOutput: {name!r} should be a tensor, but is {value!r}")

    @property
    def outputs(self) -> dict[str, tf.Tensor]:
        """The tensors by name."""
        return self._outputs

    def as_signature_def(self, receiver_tensors: Mapping[str, tf.Tensor]) -> Any:
        """Returns a prediction signature.

        Args:
          receiver_tensors: the input tensors by name.

        Returns:
          a SignatureDef.
        """
        return tf.saved_model.signature_def_utils.predict_signature_def(
            dict(receiver_tensors), self._outputs
        )


# Names of TensorFlow's, which it has in no public module.
_METHODS = {
    ModeKeys.EVAL: "tensorflow/supervised/eval",
    ModeKeys.TRAIN: "tensorflow/supervised/training",
}


class EvalOutput(ExportOutput):
    """The loss, predictions and metrics of a model that is exported for evaluation or training."""

    def __init__(
        self,
        loss: Optional[tf.Tensor] = None,
        predictions: Union[tf.Tensor, Mapping[str, tf.Tensor], None] = None,
        metrics: Optional[Mapping[str, tuple[tf.Tensor, Union[tf.Tensor, tf.Operation]]]] = None,
        mode: str = ModeKeys.EVAL,
    ) -> None:
        """Creates an EvalOutput.

        Args:
          loss: a tensor, or None.
          predictions: a tensor or a dict of tensors, or None.
          metrics: a dict of (value, update operation), or None.
          mode: ModeKeys.EVAL or ModeKeys.TRAIN.
        """
        self.loss = loss
        self.predictions = None if predictions is None else _as_dict(predictions, "predictions")
        self.metrics = metrics
        self._mode = mode

    def as_signature_def(self, receiver_tensors: Mapping[str, tf.Tensor]) -> Any:
        """Returns the signature, with outputs "loss", "predictions/…" and "metrics/…".

        Args:
          receiver_tensors: the input tensors by name.

        Returns:
          a SignatureDef.
        """
        outputs = {} if self.loss is None else {"loss": self.loss}
        for name, value in (self.predictions or {}).items():
            outputs["predictions" if name == "predictions" else f"predictions/{name}"] = value
        for name, (value, update) in (self.metrics or {}).items():
            outputs[f"metrics/{name}/value"] = tf.convert_to_tensor(value)
            if isinstance(update, tf.Operation):  # a signature has tensors alone
                with tf.control_dependencies([update]):
                    update = tf.identity(outputs[f"metrics/{name}/value"])
            outputs[f"metrics/{name}/update_op"] = tf.convert_to_tensor(update)
        info = tf.saved_model.build_tensor_info
        return tf.saved_model.build_signature_def(
            inputs={name: info(x) for name, x in receiver_tensors.items()},
            outputs={name: info(x) for name, x in outputs.items()},
            method_name=_METHODS[self._mode],
        )


def complete_export_outputs(
    given: Optional[Mapping[str, Any]],
    predictions: Union[tf.Tensor, Mapping[str, tf.Tensor]],
    mode: str,
) -> Optional[dict[str, Any]]:
    """Returns export outputs, with a default signature.

    Args:
      given: the export outputs of the model function, or None to export all predictions.
      predictions: the predictions.
      mode: the mode.

    Returns:
      a dict, or None in modes other than prediction.

    Raises:
      TypeError: `given` is not a dict of ExportOutputs.
      ValueError: there are several outputs, and none is the default.
    """
    if mode != ModeKeys.PREDICT:
        return None if given is None else dict(given)
    outputs: Any = given
    if given is None or given == {}:
        outputs = {DEFAULT_SIGNATURE: PredictOutput(predictions)}
    if not isinstance(outputs, Mapping):
        raise TypeError(
            f"export_outputs should be a dict of ExportOutputs, but is of type "
            f"{type(outputs).__name__}"
        )
    for name, value in outputs.items():
        if not isinstance(value, ExportOutput):
            raise TypeError(
                f"{name!r} in export_outputs is of type {type(value).__name__}; it should be an "
                "ExportOutput, such as estimator.export.PredictOutput(tensors)"
            )
    outputs = dict(outputs)
    if len(outputs) == 1:
        # Under both names, as a request that names no signature is for the default.
        outputs[DEFAULT_SIGNATURE] = next(iter(outputs.values()))
    elif DEFAULT_SIGNATURE not in outputs:
        raise ValueError(
            f"export_outputs has {', '.join(map(repr, outputs))}, but none of them is the default: "
            f"give one of them also as {DEFAULT_SIGNATURE!r}"
        )
    return outputs


# -- the spec


# A class of its own, since the body of a NamedTuple may not define the `__new__` that checks.
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
        fields = checked_fields(
            "EstimatorSpec",
            mode,
            predictions,
            loss,
            train_op,
            training_chief_hooks=training_chief_hooks,
            training_hooks=training_hooks,
            evaluation_hooks=evaluation_hooks,
            prediction_hooks=prediction_hooks,
        )
        if scaffold is not None and not isinstance(scaffold, tf.train.Scaffold):
            raise TypeError(
                f"scaffold should be a tf.train.Scaffold, but is of type {type(scaffold).__name__}"
            )
        return super().__new__(
            cls,
            **fields,
            eval_metric_ops=_checked_metrics(eval_metric_ops),
            export_outputs=complete_export_outputs(export_outputs, fields["predictions"], mode),
            scaffold=tf.train.Scaffold() if scaffold is None else scaffold,
        )


def checked_fields(
    what: str, mode: str, predictions: Any, loss: Any, train_op: Any, **hooks: Any
) -> dict[str, Any]:
    """Returns the fields that every spec has, checked for its mode.

    Args:
      what: the class of the spec, for errors.
      mode: a ModeKeys value.
      predictions: what the model function gives, or None.
      loss: the same.
      train_op: the same.
      **hooks: hooks by the name of their argument.

    Returns:
      a dict: predictions, a tensor or a dict of tensors; the loss of shape [] or None; the
      operation of a step or None; tuples of hooks.

    Raises:
      ValueError: the mode is unknown, or requires what is missing.
      TypeError: an argument has the wrong type.
    """
    if mode not in STANDARD_MODES:
        raise ValueError(
            f"{what}: mode is {mode!r}; it should be one of ModeKeys.TRAIN "
            f"({ModeKeys.TRAIN!r}), ModeKeys.EVAL ({ModeKeys.EVAL!r}), ModeKeys.PREDICT "
            f"({ModeKeys.PREDICT!r})"
        )
    return {
        "mode": mode,
        "loss": _checked_loss(what, loss, mode),
        "predictions": _checked_predictions(what, predictions, mode),
        "train_op": _checked_train_op(what, train_op, mode),
        **{name: check_hooks(given, name) for name, given in hooks.items()},
    }


def _checked_loss(what: str, loss: Optional[tf.Tensor], mode: str) -> Optional[tf.Tensor]:
    if loss is None:
        if mode in (ModeKeys.TRAIN, ModeKeys.EVAL):
            raise ValueError(
                f"{what} for mode {mode!r} has no loss: give loss=, a scalar tf tensor such "
                "as lowering.export_to_tf_tensor(loss)"
            )
        return None
    if hasattr(loss, "mesh") and not tf.is_tensor(loss):
        raise TypeError(
            f"{what}: loss is {loss!r}, a tensor of a mesh; give what "
            "lowering.export_to_tf_tensor(loss) returns"
        )
    loss = tf.convert_to_tensor(loss)
    # Of an unknown number, the reshape below fails in the step unless it is 1.
    if loss.shape.num_elements() not in (1, None):
        raise ValueError(
            f"{what}: loss has shape {loss.shape}, but should be a scalar: reduce it, with "
            "tf.reduce_mean for example"
        )
    return loss if loss.shape.rank == 0 else tf.reshape(loss, [])


def _checked_train_op(
    what: str, train_op: Union[tf.Operation, tf.Tensor, None], mode: str
) -> Union[tf.Operation, tf.Tensor, None]:
    if train_op is None:
        if mode == ModeKeys.TRAIN:
            raise ValueError(
                f"{what} for mode {mode!r} has no train_op: give train_op=, the operation "
                "of one step, such as tf.group of the lowered updates and "
                "tf.assign_add(global_step, 1)"
            )
        return None
    if isinstance(train_op, tf.Operation) or tf.is_tensor(train_op):
        return train_op
    # An assignment of a resource variable returns a variable to read; the step is its operation.
    if hasattr(train_op, "op"):
        return train_op.op
    raise TypeError(
        f"{what}: train_op is of type {type(train_op).__name__}; it should be a "
        "tf.Operation or a tensor: several operations go into one by tf.group(*operations)"
    )


def _checked_predictions(
    what: str, predictions: Union[tf.Tensor, Mapping[str, tf.Tensor], None], mode: str
) -> Any:
    if predictions is None:
        if mode == ModeKeys.PREDICT:
            raise ValueError(
                f"{what} for mode {mode!r} has no predictions: give predictions=, a tf "
                "tensor or a dict of tf tensors"
            )
        return {}
    by_name = predictions if isinstance(predictions, Mapping) else {"predictions": predictions}
    for name, value in by_name.items():
        if not tf.is_tensor(value) and not isinstance(value, (tf.Variable, tf.SparseTensor)):
            raise TypeError(
                f"{what}: {name!r} in predictions is of type {type(value).__name__}; it "
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
    hooks: Optional[Iterable[Any]], name: str, kind: type = tf.train.SessionRunHook
) -> tuple[Any, ...]:
    """Returns hooks or listeners as a tuple.

    Args:
      hooks: objects of a class of tf.train, or None.
      name: the name of the argument, for error messages.
      kind: the class.

    Returns:
      a tuple.

    Raises:
      TypeError: one of them is not of the class.
    """
    hooks = () if hooks is None else tuple(hooks)
    for hook in hooks:
        if not isinstance(hook, kind):
            raise TypeError(
                f"{name} should hold tf.train.{kind.__name__}s, but one is of type "
                f"{type(hook).__name__}"
            )
    return hooks
