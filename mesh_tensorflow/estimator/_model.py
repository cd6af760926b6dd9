"""A call of a model function: its inputs, arguments, random seeds, and values of variables."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, TypeVar, Union

import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow import checkpoint
from mesh_tensorflow._calls import arguments_of, takes
from mesh_tensorflow._elements import Elements
from mesh_tensorflow._mesh.step_inputs import ancestors
from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._paths import readable
from mesh_tensorflow._processes.processes import several_of_jax
from mesh_tensorflow.checkpoint import Saver
from mesh_tensorflow.estimator.processes import own_device, session_creator_for

if TYPE_CHECKING:
    from mesh_tensorflow.estimator._run_config import RunConfig
    from mesh_tensorflow.estimator._spec import EstimatorSpec


Used = TypeVar("Used")

# -- values of variables: checkpoints and warm starts


class _WarmStartFields(NamedTuple):
    ckpt_to_initialize_from: str
    vars_to_warm_start: Any
    var_name_to_vocab_info: Any
    var_name_to_prev_var_name: Any


class WarmStartSettings(_WarmStartFields):
    """Which variables are initialized from a checkpoint of another model."""

    def __new__(
        cls,
        ckpt_to_initialize_from: str,
        vars_to_warm_start: Union[str, list[str], None] = ".*",
        var_name_to_vocab_info: Optional[Mapping[str, Any]] = None,
        var_name_to_prev_var_name: Optional[Mapping[str, str]] = None,
    ) -> WarmStartSettings:
        """Creates an instance.

        Args:
          ckpt_to_initialize_from: a checkpoint, or a directory of checkpoints.
          vars_to_warm_start: a regular expression for names of trainable variables, a list of
            regular expressions for names of any variables, or None for no variables.
          var_name_to_vocab_info: must be empty: vocabularies are not remapped.
          var_name_to_prev_var_name: names in the checkpoint that differ, by the name of the
            variable.

        Returns:
          a WarmStartSettings.

        Raises:
          ValueError: the path is empty, or vocabularies are given.
        """
        if not ckpt_to_initialize_from:
            raise ValueError("WarmStartSettings: ckpt_to_initialize_from is empty; name a path")
        if var_name_to_vocab_info:
            raise ValueError(
                "WarmStartSettings: var_name_to_vocab_info should be empty: embeddings are not "
                "remapped from one vocabulary to another. Leave these variables out by "
                "vars_to_warm_start, and give them an initializer"
            )
        return super().__new__(
            cls,
            os.fspath(ckpt_to_initialize_from),
            vars_to_warm_start,
            dict(var_name_to_vocab_info or {}),
            dict(var_name_to_prev_var_name or {}),
        )


def as_warm_start_settings(
    given: Union[str, os.PathLike[str], WarmStartSettings, None],
) -> Optional[WarmStartSettings]:
    """Converts the argument `warm_start_from` of an estimator to WarmStartSettings.

    Args:
      given: None, a path, or a WarmStartSettings.

    Returns:
      a WarmStartSettings, or None.

    Raises:
      ValueError: the path is empty.
      TypeError: `given` has another type.
    """
    if given is None or isinstance(given, WarmStartSettings):
        return given
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(
            f"warm_start_from should be a path or a WarmStartSettings, but is {given!r}"
        )
    path = os.fspath(given)
    if tf.io.gfile.exists(os.path.join(path, "saved_model.pb")):
        # A SavedModel has its variables in a checkpoint of this name.
        path = os.path.join(path, "variables", "variables")
    return WarmStartSettings(ckpt_to_initialize_from=path)


def warm_start(settings: WarmStartSettings) -> list[str]:
    """Has variables of the default graph initialized from a checkpoint.

    Args:
      settings: the checkpoint and the variables.

    Returns:
      the names of the variables.

    Raises:
      ValueError: there is no checkpoint, or it does not have all variables.
    """
    path = checkpoint_files.find(settings.ckpt_to_initialize_from, "warm start")
    saved = checkpoint_files.open_reader(path).get_variable_to_shape_map()
    variables = {v.op.name: v for v in _chosen(settings.vars_to_warm_start)}
    names = {name: settings.var_name_to_prev_var_name.get(name, name) for name in variables}
    lacking = sorted(old for old in names.values() if old not in saved)
    if lacking:
        raise ValueError(
            f"warm start from {path}: it has no {', '.join(lacking)}; it has "
            f"{', '.join(sorted(saved))}. Choose variables by vars_to_warm_start, or say what they "
            "are called there by var_name_to_prev_var_name"
        )
    if not names and settings.vars_to_warm_start is not None:
        raise ValueError(
            f"warm start from {path}: vars_to_warm_start={settings.vars_to_warm_start!r} is the "
            "name of no variable of the model, so that it would begin with random weights"
        )
    # Two variables may have one name there, as what was one weight.
    pairs = [(old, variables[new]) for new, old in names.items()]
    if pairs:
        # For its comparison of shapes and its log of what is left over.
        checkpoint.choose_initial("warm start", path, dict(pairs), names.values())
    checkpoint.init_from_checkpoint(path, pairs)
    return sorted(names)


def _chosen(patterns: Union[str, list[str], None]) -> list[Any]:
    """Returns variables of the default graph; for mtf variables, their masters."""
    if patterns is None:
        return []
    whole = tf.global_variables()
    if isinstance(patterns, str):
        trainable = {v.op.name for v in tf.trainable_variables()}
        whole, patterns = [v for v in whole if v.op.name in trainable], [patterns]
    # As in TensorFlow, a pattern is matched at the beginning of a name and need not reach its end.
    # There the name ends in ":0"; a pattern may end where either form does.
    return [v for v in whole if any(re.match(p, n) for p in patterns for n in (v.name, v.op.name))]


def find_checkpoint(model_dir: str, checkpoint_path: Optional[str], called: str) -> Optional[str]:
    """Returns the checkpoint to evaluate, predict or export from.

    Args:
      model_dir: the model directory.
      checkpoint_path: the checkpoint that the caller gave, or None.
      called: the name of the method, for error messages.

    Returns:
      a path, or None if the directory has no checkpoint.

    Raises:
      ValueError: there is no checkpoint at `checkpoint_path`.
    """
    if checkpoint_path is None:
        return checkpoint_files.latest(model_dir)
    checkpoint_path = os.fspath(checkpoint_path)
    if not checkpoint_files.exists(checkpoint_path):
        latest = checkpoint_files.latest(model_dir)
        raise ValueError(
            f"{called}: there is no checkpoint at checkpoint_path={checkpoint_path!r}; the latest "
            f"in the model directory is {latest}"
        )
    return checkpoint_path


def with_latest(
    path: Optional[str], latest_of: Optional[str], use: Callable[[Any], Used]
) -> tuple[Used, Optional[str]]:
    """Uses a checkpoint; or a later one, if it was deleted meanwhile.

    Training that goes on elsewhere deletes a checkpoint when it has saved others.

    Args:
      path: the checkpoint, or None.
      latest_of: the directory of which it is the latest; None for one that was asked for.
      use: a function of the path.

    Returns:
      (the result of the function, the path).
    """
    while True:
        try:
            return use(path), path
        # Any error: what a missing file leads to depends on what reads it, and where it is.
        except Exception:
            if latest_of is None or path is None or checkpoint_files.exists(path):
                raise
            newer = checkpoint_files.latest(latest_of)
            # The same checkpoint would fail again, without an end.
            if newer in (None, path):
                raise
            path = newer


def has_other_source(scaffold: tf.train.Scaffold) -> bool:
    """Returns whether variables of the default graph get values other than by initializers.

    Args:
      scaffold: the Scaffold of the model.

    Returns:
      whether the scaffold has its own initialization, a variable is initialized from another
      checkpoint (tf.train.init_from_checkpoint), or there is no trainable variable.
    """
    if scaffold.init_fn is not None or scaffold.init_op is not None:
        return True
    # Initial values from a checkpoint leave no other trace in a graph than the reading of its file.
    # A saver reads files, too, but not for what initializes variables.
    before = ancestors(v.initializer for v in tf.global_variables())
    if any(op.type == "RestoreV2" for op in before):
        return True
    # A model without weights computes the same, whether it was trained or not.
    return not tf.trainable_variables()


# -- random numbers

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
        # With a default: initial values may be random too, and are made without a feed.
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
        # Read and not counted from 0: training may go on from a checkpoint, or in another session.
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


# -- inputs


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
        # The element that came with the session is that of the first step.
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


def features_and_labels(returned: object) -> tuple[Any, Any]:
    """Returns what an input function gives, or an element of its dataset, as a pair.

    Args:
      returned: (features, labels) or features.

    Returns:
      (features, labels); labels are None if there are none.

    Raises:
      ValueError: there are no features, or a tuple does not have two elements.
    """
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
    return features, labels


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
    # The class of tf.data in tensorflow.compat.v1 is a subclass of this one.
    may_end = isinstance(returned, tf2.data.Dataset)
    if may_end:
        elements = Elements(returned)
        hooks.append(ElementsHook(elements))
        returned = elements.current
    features, labels = features_and_labels(returned)
    # Queues of TensorFlow 1 end by the same error as datasets.
    may_end = may_end or bool(tf.get_collection(tf.GraphKeys.QUEUE_RUNNERS))
    return Inputs(features, None if features_only else labels, hooks, may_end)


# -- calls

MODEL_FN_ARGUMENTS = ("features", "labels", "mode", "params", "config")


def function_name(function: Callable[..., Any]) -> str:
    """Returns the name of a function, for error messages.

    Args:
      function: a callable.

    Returns:
      a string.
    """
    # What functools.partial returns has no name.
    return getattr(function, "__name__", None) or repr(function)


def _required_besides(known: Collection[str], function: Callable[..., Any]) -> list[str]:
    """Returns the arguments that a function needs, without those that are known."""
    return [
        f"{p.name} by position" if p.kind is p.POSITIONAL_ONLY else p.name
        for p in inspect.signature(function).parameters.values()
        if (p.name not in known or p.kind is p.POSITIONAL_ONLY)
        and p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]


def check_model_fn(model_fn: Callable[..., Any]) -> None:
    """Checks the signature of a model function.

    Args:
      model_fn: a model function.

    Raises:
      TypeError: `model_fn` is not callable.
      ValueError: `model_fn` takes no features, or an unknown argument.
    """
    if not callable(model_fn):
        raise TypeError(
            f"model_fn should be a function of features, labels, mode, params, but is {model_fn!r}"
        )
    if not takes(model_fn, "features"):
        raise ValueError(
            f"model_fn {function_name(model_fn)} takes no argument `features`: it is called by "
            f"names, and may take {', '.join(MODEL_FN_ARGUMENTS)}"
        )
    if unknown := _required_besides(MODEL_FN_ARGUMENTS, model_fn):
        raise ValueError(
            f"model_fn {function_name(model_fn)} takes {', '.join(unknown)}, but is given only "
            f"{', '.join(MODEL_FN_ARGUMENTS)}: put what else it needs into params, or give it a "
            "default"
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
    chosen = arguments_of(model_fn, {"mode": mode, "params": params, "config": config})
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
    arguments: Mapping[str, Any] = {
        "mode": mode,
        "params": params,
        "config": config,
        # For functions that were written for tf.distribute, whose strategies RunConfig refuses.
        "input_context": None,
    }
    if unknown := _required_besides(arguments, input_fn):
        raise ValueError(
            f"input_fn {function_name(input_fn)} needs {', '.join(unknown)}, but is given only "
            "mode, params and config: bind what else it needs, by functools.partial for example"
        )
    return input_fn(**arguments_of(input_fn, arguments))


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


def begin_program(config: RunConfig) -> tf.Variable:
    """Begins a program in the default tf graph, before any function of the user.

    Args:
      config: the RunConfig, which has the seed.

    Returns:
      The global step, a variable to which programs of several processors can assign.
    """
    # Operations take the graph's seed when they are made.
    tf.set_random_seed(config.effective_seed)
    # One that a model function makes need not be a resource.
    with tf.variable_scope(tf.get_variable_scope(), use_resource=True):
        return tf.train.create_global_step()


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

        Raises:
          ValueError: it returns something else, or a spec of another mode.
        """
        with tf.device(self._device()):
            spec = self.call_model_fn(inputs.features, inputs.labels, mode)
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
    # As training would begin: without a checkpoint, the weights are those of the warm start.
    if path is None and model.warm_start_from is not None:
        warm_start(model.warm_start_from)
    elif path is None and not has_other_source(spec.scaffold):
        raise ValueError(
            f"{called}: there is no checkpoint in {model.model_dir}, so the variables would have "
            "initial values. Train first, or pass checkpoint_path=, or let model_fn fill them by "
            "tf.train.init_from_checkpoint or by the init_fn of a Scaffold"
        )
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


@dataclasses.dataclass(eq=False, repr=False)
class RestoringSessionCreator(tf.train.SessionCreator):
    """Restores a checkpoint: the one that was asked for, or the latest.

    Attributes:
      restoring: returns a session creator for a checkpoint.
      path: the checkpoint, or None if values come from elsewhere.
      latest_of: the directory of which it is the latest; None for one that was asked for.
    """

    restoring: Callable[[Optional[str]], tf.train.SessionCreator]
    path: Optional[str]
    latest_of: Optional[str]

    def create_session(self) -> tf.Session:
        """Creates a session with the values of the checkpoint."""
        # The path is kept, as results are reported for the checkpoint that they were computed with.
        session, self.path = with_latest(
            self.path, self.latest_of, lambda path: self.restoring(path).create_session()
        )
        return session
