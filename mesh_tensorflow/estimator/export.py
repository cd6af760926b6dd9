"""Inputs and outputs of exported models: receivers of inputs, and kinds of signatures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow.estimator._spec import (
    ClassificationOutput,
    EvalOutput,
    ExportOutput,
    PredictOutput,
    RegressionOutput,
)

__all__ = [
    "ClassificationOutput",
    "EvalOutput",
    "ExportOutput",
    "PredictOutput",
    "RegressionOutput",
    "ServingInputReceiver",
    "TensorServingInputReceiver",
    "build_parsing_serving_input_receiver_fn",
    "build_raw_serving_input_receiver_fn",
]

_ONE_FEATURE = "feature"
_ONE_LABEL = "label"
_ONE_RECEIVER = "input"
_EXAMPLES = "examples"


class _ReceiverFields(NamedTuple):
    features: Any
    receiver_tensors: dict[str, Any]
    receiver_tensors_alternatives: Optional[dict[str, dict[str, Any]]]


class ServingInputReceiver(_ReceiverFields):
    """Features by name, and the placeholders from which they are computed."""

    def __new__(
        cls,
        features: Union[tf.Tensor, Mapping[str, tf.Tensor]],
        receiver_tensors: Union[tf.Tensor, Mapping[str, tf.Tensor]],
        receiver_tensors_alternatives: Optional[Mapping[str, Any]] = None,
    ) -> ServingInputReceiver:
        """Creates an instance.

        Args:
          features: a dict of tensors; a single tensor is named "feature".
          receiver_tensors: a dict of tensors to feed; a single tensor is named "input".
          receiver_tensors_alternatives: by name, other dicts of tensors that can be fed instead,
            at later places in the graph.

        Returns:
          a ServingInputReceiver.

        Raises:
          ValueError: a name is not a string, or a value is not a tensor.
        """
        return super().__new__(
            cls,
            _checked("features", features, _ONE_FEATURE),
            _checked("receiver_tensors", receiver_tensors, _ONE_RECEIVER),
            _checked_alternatives(receiver_tensors_alternatives),
        )


class TensorServingInputReceiver(_ReceiverFields):
    """A ServingInputReceiver for model functions whose features are one tensor."""

    def __new__(
        cls,
        features: Union[tf.Tensor, Mapping[str, tf.Tensor]],
        receiver_tensors: Union[tf.Tensor, Mapping[str, tf.Tensor]],
        receiver_tensors_alternatives: Optional[Mapping[str, Any]] = None,
    ) -> TensorServingInputReceiver:
        """Creates an instance.

        Args:
          features: a tensor.
          receiver_tensors: a dict of tensors to feed; a single tensor is named "input".
          receiver_tensors_alternatives: by name, other dicts of tensors that can be fed instead.

        Returns:
          a TensorServingInputReceiver.

        Raises:
          ValueError: `features` is not one tensor.
        """
        if isinstance(features, Mapping):
            raise ValueError(
                "TensorServingInputReceiver: features should be one tensor, but are a dict: use "
                "ServingInputReceiver"
            )
        _checked("features", features, _ONE_FEATURE)
        return super().__new__(
            cls,
            features,
            _checked("receiver_tensors", receiver_tensors, _ONE_RECEIVER),
            _checked_alternatives(receiver_tensors_alternatives),
        )


class SupervisedInputReceiver(NamedTuple):
    """Features and labels by name, and the placeholders from which they are computed."""

    features: Any
    labels: Any
    receiver_tensors: dict[str, Any]
    receiver_tensors_alternatives: None = None


def _checked(
    argument: str, tensors: Union[tf.Tensor, Mapping[str, tf.Tensor], None], default: str
) -> dict[str, Any]:
    if tensors is None:
        raise ValueError(f"{argument} is None; it should be a dict of tensors")
    by_name = dict(tensors) if isinstance(tensors, Mapping) else {default: tensors}
    for name, tensor in by_name.items():
        if not isinstance(name, str):
            raise ValueError(f"{argument}: the name {name!r} should be a string")
        if not (tf.is_tensor(tensor) or isinstance(tensor, tf.SparseTensor)):
            raise ValueError(f"{argument}: {name!r} should be a tensor, but is {tensor!r}")
    return by_name


def _checked_alternatives(
    alternatives: Optional[Mapping[str, Any]],
) -> Optional[dict[str, dict[str, Any]]]:
    if alternatives is None:
        return None
    if not isinstance(alternatives, Mapping):
        raise ValueError(
            f"receiver_tensors_alternatives should be a dict of dicts, but is {alternatives!r}"
        )
    return {
        name: _checked(f"receiver_tensors_alternatives[{name!r}]", tensors, _ONE_RECEIVER)
        for name, tensors in alternatives.items()
    }


def build_parsing_serving_input_receiver_fn(
    feature_spec: Mapping[str, Any], default_batch_size: Optional[int] = None
) -> Callable[[], ServingInputReceiver]:
    """Returns a serving input receiver function for serialized tf.train.Examples.

    Args:
      feature_spec: features by name, as for tf.io.parse_example.
      default_batch_size: the batch size, or None for any.

    Returns:
      a function that returns a ServingInputReceiver.
    """

    def serving_input_receiver_fn() -> ServingInputReceiver:
        """Creates a placeholder of serialized examples and parses it."""
        examples = tf.placeholder(tf.string, [default_batch_size], name="input_example_tensor")
        features = tf.io.parse_example(examples, feature_spec)
        return ServingInputReceiver(features, {_EXAMPLES: examples})

    return serving_input_receiver_fn


def _placeholders(tensors: Mapping[str, Any], batch_size: Optional[int]) -> dict[str, tf.Tensor]:
    made = {}
    for name, tensor in tensors.items():
        shape = tf.TensorShape(tensor.shape).as_list()
        # A scalar has no batch dimension to leave open.
        if shape:
            shape[0] = batch_size
        made[name] = tf.placeholder(tf.as_dtype(tensor.dtype), shape, name=name)
    return made


def build_raw_serving_input_receiver_fn(
    features: Mapping[str, Any], default_batch_size: Optional[int] = None
) -> Callable[[], ServingInputReceiver]:
    """Returns a serving input receiver function for features that are fed directly.

    Args:
      features: tensors by name, with the shapes and dtypes of the placeholders.
      default_batch_size: the batch size, or None for any.

    Returns:
      a function that returns a ServingInputReceiver.
    """

    def serving_input_receiver_fn() -> ServingInputReceiver:
        """Creates a placeholder for each feature."""
        made = _placeholders(features, default_batch_size)
        return ServingInputReceiver(made, made)

    return serving_input_receiver_fn


def build_raw_supervised_input_receiver_fn(
    features: Union[tf.Tensor, Mapping[str, tf.Tensor]],
    labels: Union[tf.Tensor, Mapping[str, tf.Tensor]],
    default_batch_size: Optional[int] = None,
) -> Callable[[], SupervisedInputReceiver]:
    """Returns an input receiver function for models exported for evaluation or training.

    Args:
      features: tensors by name, with the shapes and dtypes of the placeholders; or one tensor.
      labels: labels in the same form.
      default_batch_size: the batch size, or None for any.

    Returns:
      a function that returns a SupervisedInputReceiver.

    Raises:
      ValueError: a feature and a label have the same name.
    """
    by_name = [
        x if isinstance(x, Mapping) else {name: x}
        for x, name in [(features, _ONE_FEATURE), (labels, _ONE_LABEL)]
    ]
    both = sorted(set(by_name[0]) & set(by_name[1]))
    if both:
        raise ValueError(f"features and labels are both called {', '.join(both)}: rename them")

    def supervised_input_receiver_fn() -> SupervisedInputReceiver:
        """Creates a placeholder for each feature and each label."""
        made = [_placeholders(x, default_batch_size) for x in by_name]
        # A single tensor was for a model function that takes one, without a dict around it.
        given = [
            x if isinstance(original, Mapping) else next(iter(x.values()))
            for x, original in zip(made, [features, labels])
        ]
        return SupervisedInputReceiver(given[0], given[1], {**made[0], **made[1]})

    return supervised_input_receiver_fn
