"""A call of a model function: its inputs, arguments, random seeds and graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._elements import Elements
from mesh_tensorflow._mesh.variables.checkpoint_files import exists, latest
from mesh_tensorflow._paths import readable
from mesh_tensorflow._processes.processes import several_of_jax
from mesh_tensorflow.checkpoint import Saver
from mesh_tensorflow.estimator._cluster import own_device, session_creator_for
from mesh_tensorflow.estimator._running.checkpoints import (
    find_checkpoint,
    has_other_source,
    no_checkpoint_error,
    warm_start,
)

if TYPE_CHECKING:
    from mesh_tensorflow.estimator._run_config import RunConfig
    from mesh_tensorflow.estimator._running.checkpoints import WarmStartSettings
    from mesh_tensorflow.estimator._spec import EstimatorSpec


STEP_DONE = "step_done"  # name of the tensor of the global step after the training operation


class RandomStepHook(tf.train.SessionRunHook):
    """Feeds the number of completed steps, which seeds random values of the next step.

    The global step itself may be read before or after the training operation increments it.
    """

    def __init__(self) -> None:
        """Creates a RandomStepHook, before the model function is called.

        Attributes:
          step: the number of completed steps, a tf.Tensor.
        """
        self.step = tf.placeholder_with_default(
            tf.zeros([], tf.int64), [], name="steps_done_for_random"
        )
        self._number: Any = None
        self._done = 0

    def follow(self, number: tf.Tensor) -> RandomStepHook:
        """Sets the tensor of the global step; returns itself.

        Args:
          number: a tf.Tensor, the global step after each step.
        """
        self._number = number
        return self

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Reads the global step.

        Args:
          session: the new session, restored.
          coord: ignored.
        """
        self._done = int(session.run(tf.train.get_global_step()))

    def before_run(
        self, run_context: tf.train.SessionRunContext
    ) -> Optional[tf.train.SessionRunArgs]:
        """Feeds the step.

        Args:
          run_context: ignored.
        """
        return tf.train.SessionRunArgs(self._number, feed_dict={self.step: self._done})

    def after_run(
        self, run_context: tf.train.SessionRunContext, run_values: tf.train.SessionRunValues
    ) -> None:
        """Records the completed step.

        Args:
          run_context: ignored.
          run_values: the global step.
        """
        self._done = int(run_values.results)


class ElementsHook(tf.train.SessionRunHook):
    """Fetches an element of a dataset before each step, and ends the loop if there is none."""

    def __init__(self, elements: Elements) -> None:
        """Creates an ElementsHook.

        Args:
          elements: the elements of the dataset.
        """
        self._elements = elements
        self._is_new = self._has_element = False

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Fetches the first element, which hooks after this one may read.

        Args:
          session: the new session.
          coord: ignored.
        """
        session.run(self._elements.initializer)
        # In a session that replaces a failed one as well. The step that follows must not fetch
        # another.
        self._has_element, self._is_new = self._elements.advance(session), True

    def before_run(self, run_context: tf.train.SessionRunContext) -> None:
        """Fetches an element.

        Args:
          run_context: the context of the step.

        Raises:
          OutOfRangeError: there is none; monitored sessions then end without an error.
        """
        if not self._is_new:
            self._has_element = self._elements.advance(run_context.session)
        self._is_new = False
        if not self._has_element:
            raise tf.errors.OutOfRangeError(None, None, "the dataset has no more elements")


class Inputs(NamedTuple):
    """Features and labels as tensors, the hooks they need, and whether the data may end."""

    features: Any
    labels: Any
    hooks: list[tf.train.SessionRunHook]
    may_end: bool


def is_dataset(value: object) -> bool:
    """Returns whether a value is a tf.data.Dataset.

    Args:
      value: anything.

    Returns:
      a bool.
    """
    return isinstance(value, (tf2.data.Dataset, tf.data.Dataset))


def make_inputs(returned: object, features_only: bool = False) -> Inputs:
    """Returns the features and labels of a step.

    Args:
      returned: the result of an input function: a dataset, (features, labels) or features.
      features_only: whether to drop the labels.

    Returns:
      Inputs.

    Raises:
      ValueError: there are no features, or a tuple does not have two elements.
    """
    hooks: list[tf.train.SessionRunHook] = []
    may_end = is_dataset(returned)
    if may_end:
        elements = Elements(returned)
        hooks.append(ElementsHook(elements))
        returned = elements.current
    # A named tuple is a structure of features, and no pair of them and labels.
    if isinstance(returned, (list, tuple)) and not hasattr(returned, "_fields"):
        if len(returned) != 2:
            raise ValueError(
                f"input_fn gives a tuple of {len(returned)}; it should give (features, labels) or "
                "features alone, where each of them may be a dict: {'x': x, 'y': y}"
            )
        features, labels = returned
    else:
        features, labels = returned, None
    if features is None or (isinstance(features, dict) and not features):
        raise ValueError(
            f"input_fn gives no features (but {features!r}): it should return a tf.data.Dataset, "
            "(features, labels) or features"
        )
    # Queues of TensorFlow 1 end by the same error as datasets.
    may_end = may_end or bool(tf.get_collection(tf.GraphKeys.QUEUE_RUNNERS))
    return Inputs(features, None if features_only else labels, hooks, may_end)


MODEL_FN_ARGUMENTS = ("features", "labels", "mode", "params", "config")


def function_name(function: Callable[..., Any]) -> str:
    """Returns the name of a function, for error messages.

    Args:
      function: a callable.

    Returns:
      a string.
    """
    return getattr(function, "__name__", None) or repr(function)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def takes(function: Callable[..., Any], name: str) -> bool:
    """Returns whether a function takes an argument with a given name.

    Args:
      function: a callable.
      name: the name of the argument.

    Returns:
      a bool.
    """
    return any(
        p.kind is p.VAR_KEYWORD or (p.name == name and p.kind is not p.VAR_POSITIONAL)
        for p in _parameters(function)
    )


def check_model_fn(model_fn: Callable[..., Any], known: Iterable[str] = MODEL_FN_ARGUMENTS) -> None:
    """Checks the signature of a model function.

    Args:
      model_fn: a model function.
      known: the names of the arguments that are available.

    Raises:
      TypeError: `model_fn` is not callable.
      ValueError: `model_fn` takes no features, or an unknown argument.
    """
    if not callable(model_fn):
        raise TypeError(
            f"model_fn should be a function of features, labels, mode, params, but is {model_fn!r}"
        )
    known = tuple(known)
    if not takes(model_fn, "features"):
        raise ValueError(
            f"model_fn {function_name(model_fn)} takes no argument `features`: it is called by "
            f"names, and may take {', '.join(known)}"
        )
    unknown = [
        p.name
        for p in _parameters(model_fn)
        if p.name not in known
        and p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    if unknown:
        raise ValueError(
            f"model_fn {function_name(model_fn)} takes {', '.join(unknown)}, but is given only "
            f"{', '.join(known)}: put what else it needs into params, or give it a default"
        )


def call_model_fn(
    model_fn: Callable[..., Any],
    features: object,
    labels: object,
    mode: str,
    params: object,
    config: object,
) -> Any:
    """Calls a model function with the arguments that it takes.

    Args:
      model_fn: a function of some of features, labels, mode, params and config.
      features: the features.
      labels: the labels, or None.
      mode: a ModeKeys value.
      params: the hyperparameters.
      config: the RunConfig.

    Returns:
      the result of the function.

    Raises:
      ValueError: there are labels, but `model_fn` does not take any.
    """
    name = function_name(model_fn)
    given = {"mode": mode, "params": params, "config": config}
    chosen = {key: value for key, value in given.items() if takes(model_fn, key)}
    if takes(model_fn, "labels"):
        chosen["labels"] = labels
    elif labels is not None:
        raise ValueError(
            f"model_fn {name} takes no argument `labels`, but input_fn returns labels in mode "
            f"{mode!r}: add the argument, or let input_fn return features alone"
        )
    return model_fn(features=features, **chosen)


def call_input_fn(input_fn: Callable[..., Any], mode: str, params: object, config: object) -> Any:
    """Calls an input function with the arguments that it takes.

    Args:
      input_fn: a function of some of mode, params and config.
      mode: a ModeKeys value.
      params: the hyperparameters.
      config: the RunConfig.

    Returns:
      the result of the function.

    Raises:
      ValueError: `input_fn` requires another argument.
    """
    given: Mapping[str, Any] = {
        "mode": mode,
        "params": params,
        "config": config,
        "input_context": None,
    }
    unknown = [
        p.name
        for p in _parameters(input_fn)
        if p.name not in given
        and p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    if unknown:
        raise ValueError(
            f"input_fn {function_name(input_fn)} needs {', '.join(unknown)}, but is given only "
            "mode, params and config: bind what else it needs, by functools.partial for example"
        )
    chosen = {key: value for key, value in given.items() if takes(input_fn, key)}
    return input_fn(**chosen)


def check_input_fn(input_fn: Callable[..., Any], called: str) -> None:
    """Checks that an input function is callable.

    Args:
      input_fn: the input function.
      called: the name of the method that takes it, for error messages.

    Raises:
      TypeError: `input_fn` is not callable.
    """
    if not callable(input_fn):
        raise TypeError(
            f"{called}: input_fn should be a function that returns a tf.data.Dataset or (features, "
            f"labels), but is {input_fn!r}: give the function, not what it returns"
        )


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
        # Datasets and their iterators run on CPUs only; the device of the process says on whose.
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
) -> RestoringSessionCreator:
    """Returns a session creator that restores a checkpoint.

    Args:
      model: the model.
      spec: the EstimatorSpec, in the default graph.
      checkpoint_path: a checkpoint, or None for the latest one.
      called: the name of the method, for error messages.

    Returns:
      a RestoringSessionCreator.

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

    def restoring(path: Optional[str]) -> tf.train.SessionCreator:
        return session_creator_for(
            model.config,
            spec.scaffold,
            evaluation=True,
            checkpoint_filename_with_path=path and readable(path),
        )

    latest_of = model.model_dir if checkpoint_path is None else None
    return RestoringSessionCreator(restoring, path, latest_of)


class RestoringSessionCreator(tf.train.SessionCreator):
    """Restores a checkpoint: the one that was asked for, or the latest.

    Attributes:
      path: the checkpoint, or None if values come from elsewhere.
    """

    def __init__(
        self,
        restoring: Callable[[Optional[str]], tf.train.SessionCreator],
        path: Optional[str],
        latest_of: Optional[str],
    ):
        """Creates an instance.

        Args:
          restoring: returns a session creator for a checkpoint.
          path: the checkpoint.
          latest_of: the directory of which it is the latest; None for one that was asked for.
        """
        self._restoring = restoring
        self.path = path
        self._latest_of = latest_of

    def create_session(self) -> tf.Session:
        """Creates a session with the values of the checkpoint."""
        while True:
            try:
                return self._restoring(self.path).create_session()
            except Exception:
                # Training that goes on elsewhere deletes a checkpoint when it has saved others.
                if self._latest_of is None or self.path is None or exists(self.path):
                    raise
                path = latest(self._latest_of)
                if path in (None, self.path):
                    raise
                self.path = path
