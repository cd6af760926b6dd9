"""Estimator: trains, evaluates, predicts and exports a model function; and train_and_evaluate."""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union

import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import check_whole
from mesh_tensorflow._core.graph import Graph
from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._watching import recorded_lowerings
from mesh_tensorflow.checkpoint import load_global_step
from mesh_tensorflow.estimator._model import (
    Model,
    as_warm_start_settings,
    call_input_fn,
    call_model_fn,
    check_input_fn,
    check_model_fn,
)
from mesh_tensorflow.estimator._run import (
    Request,
    graph_of_step,
    open_steps,
    run_evaluation,
    run_prediction,
    run_training,
)
from mesh_tensorflow.estimator._run_config import RunConfig, check_number
from mesh_tensorflow.estimator._spec import ModeKeys, check_hooks
from mesh_tensorflow.estimator.export import Exporter, ExportSettings, export_all
from mesh_tensorflow.estimator.processes import in_cluster

if TYPE_CHECKING:
    from mesh_tensorflow.estimator._model import WarmStartSettings


def config_with_directory(
    config: Optional[RunConfig], model_dir: Union[str, os.PathLike[str], None]
) -> RunConfig:
    """Returns a RunConfig with a model directory.

    Args:
      config: a RunConfig, or None for the default.
      model_dir: a directory, or None for the model directory of the RunConfig or, if it has none, a
        temporary directory.

    Returns:
      a RunConfig.

    Raises:
      TypeError: `config` is not a RunConfig.
      ValueError: the path is empty, or differs from that of the RunConfig.
    """
    if config is None:
        config = RunConfig()
    if not isinstance(config, RunConfig):
        raise TypeError(f"config should be a RunConfig, but is {config!r}")
    if model_dir is not None and not os.fspath(model_dir):
        raise ValueError("model_dir is empty; leave it out, or name a directory")
    own = None if model_dir is None else os.fspath(model_dir)
    if own is not None and config.model_dir not in (None, own):
        raise ValueError(
            f"model_dir is {own!r}, but the RunConfig says {config.model_dir!r}: let them be the "
            "same, or leave one out"
        )
    directory = own or config.model_dir
    if directory is None:
        directory = tempfile.mkdtemp()
        tf.logging.warning("No model_dir: checkpoints go to the temporary %s.", directory)
    # Not set in the caller's RunConfig, with which another estimator may be made.
    return config.replace(model_dir=directory)


def check_steps(called: str, **counts: Optional[int]) -> None:
    """Checks `steps` and `max_steps`: at most one may be given.

    Args:
      called: the name of the method, for error messages.
      **counts: the numbers of steps, by argument name.

    Raises:
      ValueError: a number is not positive, or both are given.
    """
    limits = {name: count for name, count in counts.items() if count is not None}
    for name, count in limits.items():
        check_whole(called, name, count, ", or None")
    if len(limits) > 1:
        raise ValueError(
            f"{called}: steps is {counts['steps']} and max_steps is {counts['max_steps']}: give "
            "steps to go on from where training stands, or max_steps to train to that step"
        )


class Estimator:
    """Trains, evaluates and exports a model, and predicts with it.

    Each method builds the model in a new graph, and restores the latest checkpoint of the model
    directory.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: Union[str, os.PathLike[str], None] = None,
        config: Optional[RunConfig] = None,
        params: object = None,
        warm_start_from: Union[str, os.PathLike[str], WarmStartSettings, None] = None,
    ) -> None:
        """Creates an Estimator.

        Args:
          model_fn: a function that returns an EstimatorSpec. It takes `features` and optionally
            `labels`, `mode`, `params` and `config`, as keyword arguments.
          model_dir: the directory of checkpoints and summaries; that of `config` by default, or a
            temporary directory if `config` has none.
          config: a RunConfig.
          params: hyperparameters, usually a dict; `model_fn` gets a copy.
          warm_start_from: a path or a WarmStartSettings, from which variables are initialized if
            the model directory has no checkpoint.

        Raises:
          TypeError: `config` is not a RunConfig, or `model_fn` is not a function.
          ValueError: `model_fn` takes unknown arguments, or the model directories differ.
        """
        check_model_fn(model_fn)
        self._config = config_with_directory(config, model_dir)
        self._model_dir = str(self._config.model_dir)
        self._model_fn = model_fn
        # A copy: what the caller changes afterwards would change the model of later calls.
        self._params = copy.deepcopy({} if params is None else params)
        self._warm_start_from = as_warm_start_settings(warm_start_from)

    @property
    def model_dir(self) -> str:
        """The model directory."""
        return self._model_dir

    @property
    def config(self) -> RunConfig:
        """A copy of the RunConfig."""
        return copy.deepcopy(self._config)

    @property
    def params(self) -> Any:
        """A copy of the hyperparameters."""
        return copy.deepcopy(self._params)

    @property
    def model_fn(self) -> Callable[..., Any]:
        """The model function, as a function of features, labels, mode and config."""
        return self._call_model_fn

    def get_variable_value(self, name: str) -> np.ndarray:
        """Returns the value of a variable in the latest checkpoint.

        Args:
          name: the name of the variable.

        Returns:
          an array.

        Raises:
          ValueError: there is no checkpoint, or it does not have the variable.
        """
        reader = checkpoint_files.open_reader(self._checkpoint_that_is_needed("get_variable_value"))
        if not reader.has_tensor(name):
            names = ", ".join(sorted(reader.get_variable_to_shape_map()))
            raise ValueError(f"get_variable_value: there is no {name!r}; there are {names}")
        return reader.get_tensor(name)

    def get_variable_names(self) -> list[str]:
        """Returns the names of all variables of the latest checkpoint.

        Returns:
          strings.

        Raises:
          ValueError: there is no checkpoint.
        """
        path = self._checkpoint_that_is_needed("get_variable_names")
        return sorted(checkpoint_files.open_reader(path).get_variable_to_shape_map())

    def latest_checkpoint(self) -> Optional[str]:
        """Returns the latest checkpoint.

        Returns:
          a path, or None.
        """
        return checkpoint_files.latest(self._model_dir)

    def eval_dir(self, name: Optional[str] = None) -> str:
        """Returns the directory of the summaries of an evaluation.

        Args:
          name: the name of the evaluation.

        Returns:
          a path.
        """
        return os.path.join(self._model_dir, f"eval_{name}" if name else "eval")

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Optional[Sequence[tf.train.SessionRunHook]] = None,
        steps: Optional[int] = None,
        max_steps: Optional[int] = None,
        saving_listeners: Optional[Sequence[tf.train.CheckpointSaverListener]] = None,
    ) -> Estimator:
        """Trains the model, from the latest checkpoint if there is one.

        After SIGTERM or SIGINT, training finishes the current step, saves a checkpoint and ends. If
        the loss is NaN, the variables are saved in the directory "nan" of the model directory.

        Args:
          input_fn: returns a tf.data.Dataset of (features, labels), or these as tensors.
          hooks: tf.train.SessionRunHooks of the session.
          steps: the number of steps to train.
          max_steps: the global step at which to stop; if it has been reached, nothing is done.
          saving_listeners: tf.train.CheckpointSaverListeners.

        Returns:
          the estimator.

        Raises:
          ValueError: `steps` and `max_steps` are both given, or not positive.
          NanLossError: the loss is NaN; it is a tf.train.NanLossDuringTrainingError.
          SystemExit: SIGTERM was received; the exit code is 143.
          KeyboardInterrupt: SIGINT was received.
        """
        self._check_devices(ModeKeys.TRAIN, "train")
        check_input_fn(input_fn, "train")
        check_steps("train", steps=steps, max_steps=max_steps)
        hooks = check_hooks(hooks, "hooks")
        kind = tf.train.CheckpointSaverListener
        listeners = check_hooks(saving_listeners, "saving_listeners", kind)
        # From the checkpoint and not from a graph: for a training that is done, none is built.
        start = load_global_step(self._model_dir)
        if max_steps is not None and max_steps <= start:
            tf.logging.info("Skipping training: step %d has been reached and saved.", max_steps)
            return self
        request = Request(
            hooks=hooks,
            saving_listeners=listeners,
            steps=steps,
            max_steps=max_steps,
            last_step=start + steps if steps is not None else max_steps,
            # A training that goes on has weights of its own.
            warm_start_from=None if self.latest_checkpoint() else self._warm_start_from,
        )
        run_training(self._model(), input_fn, request)
        return self

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: Optional[int] = None,
        hooks: Optional[Sequence[tf.train.SessionRunHook]] = None,
        checkpoint_path: Optional[str] = None,
        name: Optional[str] = None,
    ) -> dict[str, Any]:
        """Evaluates the model, and writes the metrics as summaries.

        Args:
          input_fn: returns a tf.data.Dataset of (features, labels), or these as tensors.
          steps: the number of batches, or None to evaluate until the data ends.
          hooks: tf.train.SessionRunHooks of the session.
          checkpoint_path: a checkpoint; the latest one by default.
          name: the name of the evaluation, if there are several; see `eval_dir`.

        Returns:
          the metrics by name, with "loss", the mean over batches, and "global_step".

        Raises:
          ValueError: there is no checkpoint, or no data.
        """
        self._check_devices(ModeKeys.EVAL, "evaluate")
        check_input_fn(input_fn, "evaluate")
        check_steps("evaluate", steps=steps)
        hooks = check_hooks(hooks, "hooks")
        return run_evaluation(
            self._model(), input_fn, steps, hooks, checkpoint_path, self.eval_dir(name)
        )

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Union[str, Sequence[str], None] = None,
        hooks: Optional[Sequence[tf.train.SessionRunHook]] = None,
        checkpoint_path: Optional[str] = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Yields predictions until the data ends.

        Runs nothing before the first prediction is requested.

        Args:
          input_fn: returns a tf.data.Dataset of features or (features, labels), or tensors.
          predict_keys: names of predictions, or None for all.
          hooks: tf.train.SessionRunHooks of the session.
          checkpoint_path: a checkpoint; the latest one by default.
          yield_single_examples: whether to split batches into examples.

        Returns:
          an iterator of dicts of arrays, or of arrays if the model predicts one tensor.

        Raises:
          ValueError: there is no checkpoint, a name is unknown, or batches cannot be split.
        """
        # Here and not in the generator, which would raise errors only when it is first read.
        self._check_devices(ModeKeys.PREDICT, "predict")
        check_input_fn(input_fn, "predict")
        hooks = check_hooks(hooks, "hooks")
        return run_prediction(
            self._model(), input_fn, predict_keys, hooks, checkpoint_path, yield_single_examples
        )

    def export_saved_model(
        self,
        export_dir_base: Union[str, bytes, os.PathLike[str]],
        serving_input_receiver_fn: Callable[[], Any],
        assets_extra: Optional[Mapping[str, str]] = None,
        as_text: bool = False,
        checkpoint_path: Optional[str] = None,
        experimental_mode: str = ModeKeys.PREDICT,
        *,
        rows_at_a_time: Optional[int] = None,
    ) -> bytes:
        """Writes a SavedModel.

        Args:
          export_dir_base: a directory; the model is written to a new timestamped subdirectory.
          serving_input_receiver_fn: returns a ServingInputReceiver.
          assets_extra: files to add, by their paths within the directory "assets.extra".
          as_text: whether to write text instead of binary protobufs.
          checkpoint_path: a checkpoint; the latest one by default.
          experimental_mode: the mode in which to export the model, a ModeKeys value.
          rows_at_a_time: the number of rows that the model function computes at a time, as the
            receiver gives them; the exported model then takes any number, and computes them in
            pieces. None exports the model function as it is. Only for predictions.

        Returns:
          the new directory, as bytes.

        Raises:
          ValueError: there is no checkpoint, or no signature fits the receiver; or, with
            `rows_at_a_time`, an input or an output of a signature has not so many rows.
        """
        receiver_fns = {experimental_mode: serving_input_receiver_fn}
        settings = ExportSettings(
            receiver_fns, assets_extra, as_text, checkpoint_path, rows_at_a_time=rows_at_a_time
        )
        return export_all(self._exported_model(), export_dir_base, settings)

    def export_savedmodel(
        self,
        export_dir_base: Union[str, bytes, os.PathLike[str]],
        serving_input_receiver_fn: Callable[[], Any],
        assets_extra: Optional[Mapping[str, str]] = None,
        as_text: bool = False,
        checkpoint_path: Optional[str] = None,
        strip_default_attrs: bool = False,
    ) -> bytes:
        """Writes a SavedModel; an older name of `export_saved_model`.

        Args:
          export_dir_base: a directory; the model is written to a new timestamped subdirectory.
          serving_input_receiver_fn: returns a ServingInputReceiver.
          assets_extra: files to add, by their paths within the directory "assets.extra".
          as_text: whether to write text instead of binary protobufs.
          checkpoint_path: a checkpoint; the latest one by default.
          strip_default_attrs: whether to omit attributes with default values, for older readers.

        Returns:
          the new directory, as bytes.
        """
        receiver_fns = {ModeKeys.PREDICT: serving_input_receiver_fn}
        settings = ExportSettings(
            receiver_fns, assets_extra, as_text, checkpoint_path, strip_default_attrs
        )
        return export_all(self._exported_model(), export_dir_base, settings)

    def experimental_export_all_saved_models(
        self,
        export_dir_base: Union[str, bytes, os.PathLike[str]],
        input_receiver_fn_map: Mapping[str, Callable[[], Any]],
        assets_extra: Optional[Mapping[str, str]] = None,
        as_text: bool = False,
        checkpoint_path: Optional[str] = None,
    ) -> bytes:
        """Writes a SavedModel with a graph for each of several modes.

        Args:
          export_dir_base: a directory; the model is written to a new timestamped subdirectory.
          input_receiver_fn_map: functions that return a receiver, by mode.
          assets_extra: files to add, by their paths within the directory "assets.extra".
          as_text: whether to write text instead of binary protobufs.
          checkpoint_path: a checkpoint; the latest one by default.

        Returns:
          the new directory, as bytes.

        Raises:
          ValueError: there is no checkpoint, or no signature fits the receiver.
        """
        settings = ExportSettings(input_receiver_fn_map, assets_extra, as_text, checkpoint_path)
        return export_all(self._exported_model(), export_dir_base, settings)

    # -- overridden by other estimators

    def _check_devices(self, mode: str, called: str) -> None:
        """Checks that there are devices, before anything is done by a method of this name."""

    def _call_model_fn(self, features: object, labels: object, mode: str, config: RunConfig) -> Any:
        return call_model_fn(self._model_fn, features, labels, mode, self.params, config)

    def _call_input_fn(self, input_fn: Callable[..., Any], mode: str) -> Any:
        return call_input_fn(input_fn, mode, self.params, self.config)

    def _model(self) -> Model:
        config = self.config
        return Model(
            call_model_fn=lambda features, labels, mode: self._call_model_fn(
                features, labels, mode, config
            ),
            call_input_fn=self._call_input_fn,
            config=config,
            model_dir=self._model_dir,
            warm_start_from=self._warm_start_from,
        )

    def _exported_model(self) -> Model:
        return self._model()

    def _checkpoint_that_is_needed(self, called: str) -> str:
        path = self.latest_checkpoint()
        if path is None:
            raise ValueError(f"{called}: there is no checkpoint in {self._model_dir}: train first")
        return path


# -- train_and_evaluate


class _TrainFields(NamedTuple):
    input_fn: Callable[..., Any]
    max_steps: Optional[int]
    hooks: tuple[Any, ...]
    saving_listeners: tuple[Any, ...]


def step_of_training(estimator: Estimator, input_fn: Callable[..., Any]) -> Graph:
    """Returns the mtf Graph of a training step; see `graph_of_step`.

    Args:
      estimator: an Estimator.
      input_fn: that of `Estimator.train`.
    """
    return graph_of_step(estimator._model(), input_fn)


@contextlib.contextmanager
def steps_to_look_at(
    estimator: Estimator, input_fn: Callable[..., Any]
) -> Iterator[Callable[[], Any]]:
    """Opens what does a training step in each call, from initial values; nothing is saved.

    Args:
      estimator: an Estimator.
      input_fn: that of `Estimator.train`.
    """
    with recorded_lowerings(), open_steps(estimator._model(), input_fn) as step:
        yield step


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
          TypeError: `input_fn` is not a function, or a hook or a listener is none.
          ValueError: `max_steps` is not positive.
        """
        check_input_fn(input_fn, "TrainSpec")
        check_number("TrainSpec", "max_steps", max_steps, 1)
        hooks = check_hooks(hooks, "hooks")
        kind = tf.train.CheckpointSaverListener
        listeners = check_hooks(saving_listeners, "saving_listeners", kind)
        return super().__new__(cls, input_fn, max_steps, hooks, listeners)


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
        check_number("EvalSpec", "steps", steps, 1)
        check_number("EvalSpec", "start_delay_secs", start_delay_secs, 0)
        check_number("EvalSpec", "throttle_secs", throttle_secs, 0)
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


def _checked_exporters(
    exporters: Union[Exporter, Sequence[Exporter], None],
) -> tuple[Exporter, ...]:
    if exporters is None:
        return ()
    checked = (exporters,) if isinstance(exporters, Exporter) else tuple(exporters)
    for exporter in checked:
        if not isinstance(exporter, Exporter):
            raise TypeError(
                f"EvalSpec: exporters should be Exporters, but one is of type "
                f"{type(exporter).__name__}"
            )
    names = [exporter.name for exporter in checked]
    for name in names:
        if not name or names.count(name) > 1:
            raise ValueError(
                f"EvalSpec: the exporters are called {', '.join(map(repr, names))}: each needs a "
                "name of its own, which is that of its directory"
            )
    return checked


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> Optional[tuple[dict[str, Any], list[Any]]]:
    """Trains, and evaluates the checkpoints of the training, including the last one.

    Each checkpoint is evaluated, unless the last evaluation started less than `throttle_secs`
    before. Exporters write to the directory "export" of the model directory.

    Args:
      estimator: an Estimator.
      train_spec: a TrainSpec.
      eval_spec: an EvalSpec.

    Returns:
      (metrics, results of the exporters) of the last evaluation; None if training was complete
      already.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: no checkpoints are saved, or TF_CONFIG describes several processes.
    """
    for name, value, kind in [
        ("estimator", estimator, Estimator),
        ("train_spec", train_spec, TrainSpec),
        ("eval_spec", eval_spec, EvalSpec),
    ]:
        if not isinstance(value, kind):
            raise TypeError(
                f"train_and_evaluate: {name} should be of type {kind.__name__}, but is {value!r}"
            )
    config = estimator.config
    several = config.num_worker_replicas + config.num_ps_replicas > 1
    # Within `run_cluster`, the other processes serve this one, which trains and evaluates alone.
    if config.task_type == "evaluator" or (several and not in_cluster()):
        raise ValueError(
            f"train_and_evaluate runs in one process, but TF_CONFIG makes this {config.task_type} "
            f"{config.task_id} of several: let the chief drive the others' devices by "
            "estimator.run_cluster, or call estimator.train in the chief and the workers, and "
            "estimator.evaluate in the evaluator"
        )
    start = load_global_step(estimator.model_dir)
    if train_spec.max_steps is not None and start >= train_spec.max_steps:
        tf.logging.info("Training has ended before: step %d of %d", start, train_spec.max_steps)
        return None
    evaluator = _Evaluator(estimator, eval_spec, train_spec.max_steps)
    estimator.train(
        train_spec.input_fn,
        hooks=train_spec.hooks,
        max_steps=train_spec.max_steps,
        # The evaluator is last: the others hear of a checkpoint before it is evaluated.
        saving_listeners=[*train_spec.saving_listeners, evaluator],
    )
    return evaluator.result


class _Evaluator(tf.train.CheckpointSaverListener):
    """Evaluates and exports after checkpoints."""

    def __init__(self, estimator: Estimator, eval_spec: EvalSpec, max_steps: Optional[int]) -> None:
        self._estimator = estimator
        self._spec = eval_spec
        self._max_steps = max_steps
        self._last_start: Optional[float] = None
        self._last_step: Optional[int] = None
        self._is_first_save = True
        self.result: Optional[tuple[dict[str, Any], list[Any]]] = None

    def after_save(self, session: tf.Session, global_step_value: int) -> None:
        """Evaluates a checkpoint, except the one before the first step."""
        # A saver saves as soon as a session is created, before anything new has been learned.
        if self._is_first_save:
            self._is_first_save = False
            return
        due = self._last_start is None or (
            time.monotonic() - self._last_start >= self._spec.throttle_secs
        )
        if due:
            self._evaluate(global_step_value)

    def end(self, session: tf.Session, global_step_value: int) -> None:
        """Evaluates the last checkpoint."""
        # Also a checkpoint that was evaluated, if exporters were not told that it was the last.
        if self._last_step != global_step_value or not self._was_final(global_step_value):
            self._evaluate(global_step_value, is_the_end=True)

    def _was_final(self, step: int) -> bool:
        return self._max_steps is not None and step >= self._max_steps

    def _evaluate(self, step: int, is_the_end: bool = False) -> None:
        # Before the evaluation: throttle_secs counts from one start to the next.
        self._last_start, self._last_step = time.monotonic(), step
        # One path for all, so that exporters write the checkpoint that was measured.
        path = self._estimator.latest_checkpoint()
        metrics = self._estimator.evaluate(
            self._spec.input_fn,
            steps=self._spec.steps,
            hooks=self._spec.hooks,
            checkpoint_path=path,
            name=self._spec.name,
        )
        final = is_the_end or self._was_final(step)
        directory = os.path.join(self._estimator.model_dir, "export")
        exported = [
            exporter.export(
                self._estimator, os.path.join(directory, exporter.name), path, metrics, final
            )
            for exporter in self._spec.exporters
        ]
        self.result = (metrics, exported)
