"""Model: the functions and settings of an estimator that its training loops use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._paths import readable
from mesh_tensorflow._processes.processes import several_of_jax
from mesh_tensorflow.checkpoint import Saver
from mesh_tensorflow.estimator._cluster.run_cluster import own_device, session_creator_for
from mesh_tensorflow.estimator._running.checkpoints import (
    find_checkpoint,
    has_other_source,
    no_checkpoint_error,
    warm_start,
)
from mesh_tensorflow.estimator._running.inputs import Inputs, make_inputs

if TYPE_CHECKING:
    from mesh_tensorflow.estimator._run_config import RunConfig
    from mesh_tensorflow.estimator._running.checkpoints import WarmStartSettings
    from mesh_tensorflow.estimator._spec import EstimatorSpec

__all__ = ["Model", "as_spec", "make_global_step", "session_creator"]


def make_global_step(graph: tf.Graph) -> tf.Variable:
    """Creates the global step, a variable to which programs of several processors can assign.

    Args:
      graph: the tf graph.
    """
    with tf.variable_scope(tf.get_variable_scope(), use_resource=True):
        return tf.train.create_global_step(graph)


class Model(NamedTuple):
    """The functions and settings of an estimator that its loops use."""

    call_model_fn: Callable[[object, object, str], Any]
    call_input_fn: Callable[[Callable[..., Any], str], Any]
    config: RunConfig
    model_dir: str
    warm_start_from: Optional[WarmStartSettings] = None

    def _device(self) -> str:
        # None would disable a device_fn.
        return own_device(self.config) or ""

    def inputs(
        self, input_fn: Callable[..., Any], mode: str, features_only: bool = False
    ) -> Inputs:
        """Returns features and labels in the default graph.

        Args:
          input_fn: returns features and labels.
          mode: a ModeKeys value.
          features_only: whether to drop the labels.

        Returns:
          Inputs.
        """
        with tf.device(self._device()), tf.device("/cpu:0"):
            return make_inputs(self.call_input_fn(input_fn, mode), features_only)

    def spec(self, inputs: Inputs, mode: str) -> EstimatorSpec:
        """Calls the model function with inputs.

        Args:
          inputs: the features and labels.
          mode: a ModeKeys value.

        Returns:
          an EstimatorSpec.
        """
        with tf.device(self._device()):
            spec = self.call_model_fn(inputs.features, inputs.labels, mode)
        return as_spec(spec, mode)


def as_spec(spec: EstimatorSpec, mode: str) -> EstimatorSpec:
    """Checks the result of a model function.

    Args:
      spec: the result.
      mode: the mode of the call.

    Returns:
      an EstimatorSpec.

    Raises:
      ValueError: `spec` is not an EstimatorSpec, or has another mode.
    """
    if not hasattr(spec, "training_chief_hooks"):
        raise ValueError(
            f"model_fn returned {spec!r} in mode {mode!r}; it should return an EstimatorSpec"
        )
    if spec.mode != mode:
        raise ValueError(
            f"model_fn was called with mode {mode!r}, but returned an EstimatorSpec of mode "
            f"{spec.mode!r}: pass mode on, as in EstimatorSpec(mode, ...)"
        )
    return spec


def session_creator(
    model: Model, spec: EstimatorSpec, checkpoint_path: Optional[str], called: str
) -> tf.train.SessionCreator:
    """Returns a session creator that restores a checkpoint.

    Args:
      model: the model.
      spec: the EstimatorSpec, in the default graph.
      checkpoint_path: a checkpoint, or None for the latest one.
      called: the name of the method, for error messages.

    Returns:
      a SessionCreator.

    Raises:
      ValueError: there is no checkpoint.
    """
    path = find_checkpoint(model.model_dir, checkpoint_path, called)
    if path is None and model.warm_start_from is not None:
        warm_start(model.warm_start_from)
    elif path is None and not has_other_source(spec.scaffold):
        raise no_checkpoint_error(model.model_dir, called)
    if several_of_jax() and not (spec.scaffold.saver or tf.get_collection(tf.GraphKeys.SAVERS)):
        # Each process reads what its devices need; TensorFlow's own saver reads whole variables.
        saver = Saver(sharded=True, allow_empty=True, defer_build=True)
        tf.add_to_collection(tf.GraphKeys.SAVERS, saver)
    return session_creator_for(
        model.config,
        spec.scaffold,
        evaluation=True,
        checkpoint_filename_with_path=path and readable(path),
    )
