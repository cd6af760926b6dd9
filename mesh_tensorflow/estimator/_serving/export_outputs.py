"""Outputs of exported models, by kind of signature."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow.estimator._modes import DEFAULT_SIGNATURE, ModeKeys

__all__ = [
    "ClassificationOutput",
    "EvalOutput",
    "ExportOutput",
    "PredictOutput",
    "RegressionOutput",
    "complete_export_outputs",
]


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
        found = ", ".join(f"{name}: {x.dtype.name}" for name, x in receiver_tensors.items())
        raise ValueError(
            f"a {kind} signature takes one string tensor of serialized tf.train.Examples, but the "
            f"receiver has {found}: use build_parsing_serving_input_receiver_fn, or a PredictOutput"
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
        metrics: Optional[Mapping[str, tuple[tf.Tensor, tf.Operation]]] = None,
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
    if not given and given is not None and not isinstance(given, Mapping):
        raise TypeError(f"export_outputs should be a dict, but is {given!r}")
    outputs: Any = given or {DEFAULT_SIGNATURE: PredictOutput(predictions)}
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
        outputs[DEFAULT_SIGNATURE] = next(iter(outputs.values()))
    elif DEFAULT_SIGNATURE not in outputs:
        raise ValueError(
            f"export_outputs has {', '.join(map(repr, outputs))}, but none of them is the default: "
            f"give one of them also as {DEFAULT_SIGNATURE!r}"
        )
    return outputs
