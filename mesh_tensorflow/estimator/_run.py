"""Training, evaluation and prediction: a model function in a graph, and the loop of its session."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union

import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.graph import Graph
from mesh_tensorflow._mesh.random_values import keys_by_step
from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._progress import duration
from mesh_tensorflow._stop_signals import StopSignals
from mesh_tensorflow._watching import recorded_lowerings, told_to_user
from mesh_tensorflow.checkpoint import Saver, check_checkpoint
from mesh_tensorflow.estimator import summaries
from mesh_tensorflow.estimator._hooks import (
    NanLossHook,
    OtherWriterListener,
    ProgressHook,
    SaverHook,
    StopAfterBatches,
    SummaryWritersHook,
    savers_last,
)
from mesh_tensorflow.estimator._model import (
    STEP_DONE,
    Model,
    RandomStepHook,
    WarmStartSettings,
    begin_program,
    find_checkpoint,
    session_creator,
    warm_start,
)
from mesh_tensorflow.estimator._spec import ModeKeys
from mesh_tensorflow.estimator.processes import in_cluster, session_creator_for
from mesh_tensorflow.utils import counted_steps

if TYPE_CHECKING:
    from mesh_tensorflow.estimator._run_config import RunConfig
    from mesh_tensorflow.estimator._spec import EstimatorSpec


# -- training


class Request(NamedTuple):
    """The settings of a call of `Estimator.train`."""

    hooks: tuple[tf.train.SessionRunHook, ...]
    saving_listeners: tuple[tf.train.CheckpointSaverListener, ...]
    steps: Optional[int]
    max_steps: Optional[int]
    last_step: Optional[int]  # the last step, for progress reports
    warm_start_from: Optional[WarmStartSettings]


class _Step(NamedTuple):
    """The fetches of each step."""

    train_op: Union[tf.Operation, tf.Tensor]
    loss: tf.Tensor
    number: tf.Tensor


def run_training(model: Model, input_fn: Callable[..., Any], request: Request) -> None:
    """Trains a model.

    Args:
      model: the model.
      input_fn: returns features and labels.
      request: the steps and hooks.

    Raises:
      SystemExit: SIGTERM was received.
      KeyboardInterrupt: SIGINT was received.
    """
    config = model.config
    signals = StopSignals(_say_that_it_stops)
    with tf.Graph().as_default(), signals, tf.device(device_fn(config)):
        spec, step, step_hook, input_hooks = _training_program(model, input_fn)
        # The model function has made the variables, and no session has initialized them yet.
        if request.warm_start_from:
            names = warm_start(request.warm_start_from)
            tf.logging.info("Warm start of %d variables: %s", len(names), ", ".join(names))
        _add_saver(spec, config)
        _check_checkpoint(spec, model.model_dir)
        hooks = [step_hook, *_hooks(model, spec, step, request, input_hooks)]
        progress = next(h for h in hooks if isinstance(h, ProgressHook))
        try:
            number = _loop(model, spec, step, hooks, signals)
        finally:
            progress.close(stopped=True)  # no more than an end that came before
        saved = checkpoint_files.latest(model.model_dir)
        if signals.received is not None:
            outcome = f"the latest checkpoint is {saved}" if saved else "nothing was saved"
            text = f"training stopped by {signals.received.name} after step {number}; {outcome}"
            tf.logging.warning("%s", text)
            raise signals.error(text)


class _TrainingProgram(NamedTuple):
    """What a session needs to train.

    Attributes:
      spec: what the model function returned.
      step: what a step fetches.
      step_hook: tells random operations the number of the step.
      input_hooks: those of the inputs.
    """

    spec: EstimatorSpec
    step: _Step
    step_hook: tf.train.SessionRunHook
    input_hooks: list[tf.train.SessionRunHook]


def _training_program(model: Model, input_fn: Callable[..., Any]) -> _TrainingProgram:
    """Builds the program of a training step in the default tf graph."""
    global_step = begin_program(model.config)
    inputs = model.inputs(input_fn, ModeKeys.TRAIN)
    # Before the model function, whose random operations and rates take this for the step.
    random_step = RandomStepHook()
    with keys_by_step(random_step.step), counted_steps(random_step.step):
        spec = model.spec(inputs, ModeKeys.TRAIN)
    step = _step(spec, global_step)
    return _TrainingProgram(spec, step, random_step.follow(step.number), inputs.hooks)


@contextlib.contextmanager
def open_steps(model: Model, input_fn: Callable[..., Any]) -> Iterator[Callable[[], Any]]:
    """Opens what does a training step in each call, from initial values; nothing is saved.

    Args:
      model: the model, whose hooks that save are left out.
      input_fn: returns features and labels.
    """
    config = model.config
    with tf.Graph().as_default(), tf.device(device_fn(config)):
        spec, step, step_hook, input_hooks = _training_program(model, input_fn)
        own = [*spec.training_chief_hooks, *spec.training_hooks]
        saving = (tf.train.CheckpointSaverHook, tf.train.SummarySaverHook)
        hooks = [step_hook, *input_hooks, *(h for h in own if not isinstance(h, saving))]
        creator = session_creator_for(config, spec.scaffold)
        with tf.train.MonitoredSession(creator, hooks) as session:
            yield lambda: session.run(step)


def graph_of_step(model: Model, input_fn: Callable[..., Any]) -> Graph:
    """Returns the mtf Graph of a training step; nothing is run.

    Args:
      model: the model, whose function makes a Lowering.
      input_fn: returns features and labels.

    Raises:
      ValueError: it makes none.
    """
    with tf.Graph().as_default(), recorded_lowerings() as lowerings:
        _training_program(model, input_fn)
    if not lowerings:
        raise ValueError("model_fn makes no mtf.Lowering in training: no layout splits its program")
    return lowerings[-1].graph


def _say_that_it_stops(number: signal.Signals) -> None:
    tf.logging.warning(
        "%s: training stops after this step and saves. A second signal stops it at once.",
        number.name,
    )


def device_fn(config: RunConfig) -> Optional[Callable[[tf.Operation], str]]:
    """Returns the device function of a training graph.

    Args:
      config: a RunConfig.

    Returns:
      the `device_fn` of the RunConfig; a device function that places variables on parameter
      servers, if there are any; or None.
    """
    # Within run_cluster, the mesh places variables on the devices of all processes.
    if config.device_fn is not None or not config.num_ps_replicas or in_cluster():
        return config.device_fn
    worker = f"/job:{config.task_type}/task:{config.task_id}"
    return tf.train.replica_device_setter(
        ps_tasks=config.num_ps_replicas,
        worker_device=worker,
        merge_devices=True,
        cluster=config.cluster_spec,
    )


def _step(spec: EstimatorSpec, global_step: tf.Variable) -> _Step:
    # A model function may have its own summary of this name, which a second one would double.
    if "loss" not in [x.op.name for x in tf.get_collection(tf.GraphKeys.SUMMARIES)]:
        tf.summary.scalar("loss", spec.loss)
    # The training operation increments the global step, and a read beside it might be early or
    # late.
    with tf.control_dependencies([spec.train_op]):
        number = tf.identity(global_step.read_value(), name=STEP_DONE)
    return _Step(spec.train_op, spec.loss, number)


def _add_saver(spec: EstimatorSpec, config: RunConfig) -> None:
    """Adds a saver for the Scaffold, unless the model function created one."""
    if spec.scaffold.saver is None and not tf.get_collection(tf.GraphKeys.SAVERS):
        tf.add_to_collection(
            tf.GraphKeys.SAVERS,
            # Built with the session, as hooks may add variables in `begin`; with relative paths, so
            # that the directory can be moved.
            Saver(
                sharded=True,
                max_to_keep=config.keep_checkpoint_max,
                keep_checkpoint_every_n_hours=config.keep_checkpoint_every_n_hours,
                defer_build=True,
                save_relative_paths=True,
            ),
        )


def _check_checkpoint(spec: EstimatorSpec, model_dir: str) -> None:
    """Checks that a checkpoint in the model directory fits the model.

    Raises:
      CheckpointError: it is damaged, or variables are missing or have other shapes.
    """
    path = checkpoint_files.latest(model_dir)
    others = [] if path else checkpoint_files.numbered(model_dir)
    if others:
        tf.logging.warning(
            "%s has %s, but its file named 'checkpoint' names none that is there: training begins "
            "anew and writes over them. To go on, have that file name one.",
            model_dir,
            ", ".join(map(os.path.basename, others[-8:])),
        )
    savers = [spec.scaffold.saver] if spec.scaffold.saver else []
    savers += tf.get_collection(tf.GraphKeys.SAVERS)
    # The package's own Saver checks what it restores.
    if path and savers and not isinstance(savers[0], Saver):
        # TensorFlow has no public way to get the variables of a saver.
        variables = getattr(savers[0], "_var_list", None)
        check_checkpoint(path, tf.global_variables() if variables is None else variables)


def _hooks(
    model: Model,
    spec: EstimatorSpec,
    step: _Step,
    request: Request,
    input_hooks: Sequence[tf.train.SessionRunHook],
) -> list[Any]:
    config = model.config
    own = [*spec.training_hooks]
    if config.is_chief:
        own = [*spec.training_chief_hooks, *own]
    # Inputs are first, so that hooks after them may read an element as soon as there is a session.
    hooks = [*input_hooks, *request.hooks, *own]
    if request.steps is not None or request.max_steps is not None:
        hooks.append(tf.train.StopAtStepHook(request.steps, request.max_steps))
    hooks.append(SummaryWritersHook())
    # A saver among the hooks takes the place of the default one: two would save each step twice.
    savers = [h for h in hooks if isinstance(h, tf.train.CheckpointSaverHook)]
    if config.is_chief and not savers:
        savers = _default_savers(model, spec)
        hooks += savers
    if request.saving_listeners and config.is_chief:
        _add_listeners(savers, request.saving_listeners)
    # Of several savers, each would take the checkpoints of another for those of another program.
    if config.is_chief and len(savers) == 1:
        _add_listeners(savers, [OtherWriterListener(model.model_dir)])
    nan = NanLossHook(
        step.loss,
        step.number,
        spec.scaffold,
        model.model_dir if config.is_chief else None,
        savers,
        _fails_on_nan(hooks),
    )
    progress = ProgressHook(step.loss, step.number, config.log_step_count_steps, request.last_step)
    # The loss is checked first: its error keeps the savers after it from saving a step with NaNs.
    return savers_last([nan, *hooks, progress])


def _fails_on_nan(hooks: Sequence[tf.train.SessionRunHook]) -> bool:
    """Whether a NaN loss raises an error: not if a NanTensorHook of the user disables it."""
    nan_hooks = [h for h in hooks if isinstance(h, tf.train.NanTensorHook)]
    # TensorFlow has no public way to get this setting.
    return all(getattr(h, "_fail_on_nan_loss", True) for h in nan_hooks)


def _default_savers(model: Model, spec: EstimatorSpec) -> list[Any]:
    config = model.config
    if not (config.save_checkpoints_secs or config.save_checkpoints_steps):
        return []
    return [
        SaverHook(
            model.model_dir,
            save_secs=config.save_checkpoints_secs,
            save_steps=config.save_checkpoints_steps,
            scaffold=spec.scaffold,
            save_graph_def=config.checkpoint_save_graph_def,
        )
    ]


def _add_listeners(
    savers: Sequence[tf.train.CheckpointSaverHook],
    listeners: Sequence[tf.train.CheckpointSaverListener],
) -> None:
    if not savers:
        raise ValueError(
            "train: there are saving_listeners, such as that of train_and_evaluate, but nothing is "
            "saved: set save_checkpoints_steps or save_checkpoints_secs of the RunConfig, or have "
            "the model function return a CheckpointSaverHook"
        )
    # After the listeners of the model function, which may fetch the values to save. TensorFlow has
    # no public way to add one to a CheckpointSaverHook.
    savers[0]._listeners.extend(listeners)


def _loop(
    model: Model,
    spec: EstimatorSpec,
    step: _Step,
    hooks: Sequence[tf.train.SessionRunHook],
    signals: StopSignals,
) -> Optional[int]:
    """Does the steps; returns the global step after the last one, or None if there was none."""
    config = model.config
    loss: Any = None
    number: Any = None
    # All hooks in `hooks`, to keep their order: chief-only hooks would come first.
    with told_to_user(), _session(model, spec, step, hooks) as session:
        # After a signal, the session closes normally, so that hooks end and save.
        while not session.should_stop() and signals.received is None:
            _, loss, number = session.run(step)
    if config.is_chief:
        # Hooks share this writer, which outlives their session, and not all of them flush it.
        tf.summary.FileWriterCache.get(model.model_dir).flush()
    if number is not None:
        tf.logging.info("Loss for final step: %s.", loss)
        if config.is_chief and model.model_dir:
            tf.logging.info(
                "checkpoints     %s, to step %d; its curves: tensorboard --logdir %s",
                model.model_dir,
                number,
                model.model_dir,
            )
    elif signals.received is None:
        tf.logging.warning("input_fn gave no data: there was no training step.")
    return number


def _session(
    model: Model, spec: EstimatorSpec, step: _Step, hooks: Sequence[tf.train.SessionRunHook]
) -> tf.train.MonitoredSession:
    """Returns a MonitoredSession; that of the chief never waits for lost processes.

    Its hooks count steps correctly in any order of the operations of the model function.
    """
    config = model.config
    if not config.is_chief:
        # The chief alone initializes and restores; others wait until it has.
        creator = tf.train.WorkerSessionCreator(
            spec.scaffold,
            config.master,
            config.effective_session_config,
            max_wait_secs=config.session_creation_timeout_secs,
        )
        return tf.train.MonitoredSession(creator, hooks)
    more: list[Any] = []
    if config.log_step_count_steps:
        more.append(_StepCounter(step, config.log_step_count_steps, model.model_dir))
    if config.save_summary_steps:
        more.append(
            _SummarySaver(
                step, config.save_summary_steps, output_dir=model.model_dir, scaffold=spec.scaffold
            )
        )
    creator = session_creator_for(config, spec.scaffold, checkpoint_dir=model.model_dir)
    return tf.train.MonitoredSession(creator, [*more, *hooks])


class _StepCounter(tf.train.StepCounterHook):
    """Counts by the global step after each step: the variable may be read before or after."""

    def __init__(self, step: _Step, every_n_steps: int, output_dir: str) -> None:
        super().__init__(every_n_steps, output_dir=output_dir)
        self._number = step.number

    def before_run(
        self, run_context: tf.train.SessionRunContext
    ) -> Optional[tf.train.SessionRunArgs]:
        return tf.train.SessionRunArgs(self._number)


class _SummarySaver(tf.train.SummarySaverHook):
    """Saves by the global step after each step, for the same reason."""

    def __init__(self, step: _Step, save_steps: int, **kwargs: object) -> None:
        super().__init__(save_steps, **kwargs)
        self._number = step.number
        self._before: Any = None

    def begin(self) -> None:
        super().begin()
        # The hook of TensorFlow takes the step that it fetches for an old one, and adds 1.
        self._before = self._number - 1

    def before_run(
        self, run_context: tf.train.SessionRunContext
    ) -> Optional[tf.train.SessionRunArgs]:
        arguments = super().before_run(run_context)
        arguments.fetches["global_step"] = self._before
        return arguments


# -- evaluation

LOSS = "loss"


def run_evaluation(
    model: Model,
    input_fn: Callable[..., Any],
    steps: Optional[int],
    hooks: Sequence[tf.train.SessionRunHook],
    checkpoint_path: Optional[str],
    directory: str,
) -> dict[str, Any]:
    """Evaluates a model, and writes the metrics as summaries.

    Args:
      model: the model.
      input_fn: returns features and labels.
      steps: the number of batches, or None for all.
      hooks: hooks.
      checkpoint_path: a checkpoint, or None for the latest one.
      directory: the directory of the summaries.

    Returns:
      metrics by name, with "loss" and "global_step".

    Raises:
      ValueError: there is no checkpoint or no data, or a metric has a reserved name.
    """
    find_checkpoint(model.model_dir, checkpoint_path, "evaluate")  # before a model is built
    with tf.Graph().as_default():
        global_step = begin_program(model.config)
        inputs = model.inputs(input_fn, ModeKeys.EVAL)
        if steps is None and not inputs.may_end:
            tf.logging.warning(
                "evaluate: input_fn returns tensors that never end, and steps is None: give steps="
            )
        spec = model.spec(inputs, ModeKeys.EVAL)
        values, update = _metrics(spec, global_step)
        creator = session_creator(model, spec, checkpoint_path, "evaluate")
        counter = StopAfterBatches(steps, bool(model.config.log_step_count_steps))
        final = tf.train.FinalOpsHook(values)
        all_hooks = [
            # First, so that the hooks after it may read the first element of the data.
            *inputs.hooks,
            *hooks,
            *spec.evaluation_hooks,
            SummaryWritersHook(),
            counter,
            final,
        ]
        started = time.monotonic()
        session = tf.train.MonitoredSession(session_creator=creator, hooks=all_hooks)
        with told_to_user(), session:
            try:
                while not session.should_stop():
                    session.run(update)
            finally:
                counter.close()
        if not counter.done:
            raise ValueError("evaluate: input_fn gave no batch, so there are no metrics")
        seconds = duration(time.monotonic() - started)
        tf.logging.info("Evaluated %d batches in %s", counter.done, seconds)
        results = final.final_ops_values
        # Of the checkpoint that was restored, which may be a later one than was found at first.
        write_results(results, directory, creator.path)
    return results


def _metrics(spec: EstimatorSpec, global_step: tf.Variable) -> tuple[dict[str, Any], tf.Operation]:
    metrics = dict(spec.eval_metric_ops)
    for name in (LOSS, tf.GraphKeys.GLOBAL_STEP):
        if name in metrics:
            raise ValueError(
                f"evaluate: eval_metric_ops has a metric {name!r}, the name of a result that is "
                "always there: call it something else"
            )
    # Batches count alike, whatever their sizes, as a loss does not tell of how many rows it is.
    metrics[LOSS] = tf.metrics.mean(spec.loss)
    values = {name: value for name, (value, _) in metrics.items()}
    values[tf.GraphKeys.GLOBAL_STEP] = tf.identity(global_step.read_value())
    return values, tf.group(*(update for _, update in metrics.values()))


def write_results(
    results: Mapping[str, Any], directory: str, checkpoint_path: Optional[str]
) -> None:
    """Writes metrics as summaries for TensorBoard.

    Args:
      results: values by name, with "global_step".
      directory: the directory of the summaries.
      checkpoint_path: the checkpoint that was evaluated.
    """
    step = int(results[tf.GraphKeys.GLOBAL_STEP])
    text = ", ".join(f"{name} = {results[name]}" for name in sorted(results))
    tf.logging.info("Saving dict for global step %d: %s", step, text)
    values = [
        value
        for name in sorted(results)
        if name != tf.GraphKeys.GLOBAL_STEP
        for value in _values(name, results[name])
    ]
    if checkpoint_path:
        values.append(summaries.text("checkpoint_path", checkpoint_path))
    summaries.write(directory, step, values)


def _values(name: str, value: Any) -> list[tf.Summary.Value]:
    """Returns what the summary of an evaluation has of a metric."""
    if isinstance(value, bytes):
        # A metric may be a serialized Summary, of an image for example.
        read = tf.Summary.FromString(value)
        for i, part in enumerate(read.value):
            part.tag = f"{name}/{i}"
        return list(read.value)
    if np.ndim(value) == 0 and np.issubdtype(np.asarray(value).dtype, np.number):
        return summaries.scalars({name: float(value)})
    if isinstance(value, np.ndarray):
        return [tf.Summary.Value(tag=name, tensor=tf.make_tensor_proto(value))]
    tf.logging.warning("No summary of %s, which is of type %s.", name, type(value).__name__)
    return []


# -- prediction


def run_prediction(
    model: Model,
    input_fn: Callable[..., Any],
    predict_keys: Union[str, Sequence[str], None],
    hooks: Sequence[tf.train.SessionRunHook],
    checkpoint_path: Optional[str],
    yield_single_examples: bool,
) -> Iterator[Any]:
    """Yields predictions until the data ends.

    Args:
      model: the model.
      input_fn: returns features.
      predict_keys: names of predictions, or None for all.
      hooks: hooks.
      checkpoint_path: a checkpoint, or None for the latest one.
      yield_single_examples: whether to split batches into examples.

    Yields:
      a dict of arrays, or an array if the model's prediction is a tensor.

    Raises:
      ValueError: there is no checkpoint, a name is unknown, or batches cannot be split.
    """
    find_checkpoint(model.model_dir, checkpoint_path, "predict")  # before a model is built
    graph = tf.Graph()
    with graph.as_default():
        begin_program(model.config)
        inputs = model.inputs(input_fn, ModeKeys.PREDICT, features_only=True)
        if not inputs.may_end:
            tf.logging.warning(
                "predict: input_fn returns tensors that never end, so predictions do not either"
            )
        spec = model.spec(inputs, ModeKeys.PREDICT)
        predictions = _chosen(spec.predictions, predict_keys)
        session = tf.train.MonitoredSession(
            session_creator=session_creator(model, spec, checkpoint_path, "predict"),
            hooks=[*inputs.hooks, *hooks, *spec.prediction_hooks],
        )
    with session:
        while not session.should_stop():
            # Not around a yield: the consumer of predictions may create its own graphs.
            with graph.as_default(), told_to_user():
                batch = session.run(predictions)
            if yield_single_examples:
                yield from _examples(batch)
            else:
                yield batch


def _chosen(
    predictions: Union[tf.Tensor, Mapping[str, tf.Tensor]], keys: Union[str, Sequence[str], None]
) -> Any:
    if not keys:
        return predictions
    if not isinstance(predictions, Mapping):
        raise ValueError(
            f"predict: predict_keys is {keys!r}, but the model's prediction is one tensor: leave "
            "predict_keys out"
        )
    keys = [keys] if isinstance(keys, str) else list(keys)
    unknown = [key for key in keys if key not in predictions]
    if unknown:
        raise ValueError(
            f"predict: predict_keys has {', '.join(map(repr, unknown))}, but the model predicts "
            f"{', '.join(map(repr, predictions))}"
        )
    return {key: predictions[key] for key in keys}


def _examples(batch: Union[np.ndarray, Mapping[str, np.ndarray]]) -> Iterator[Any]:
    if not isinstance(batch, Mapping):
        yield from batch
        return
    sizes = {name: len(value) if value.ndim else None for name, value in batch.items()}
    if None in sizes.values() or len(set(sizes.values())) > 1:
        shapes = ", ".join(f"{name}: {list(value.shape)}" for name, value in batch.items())
        raise ValueError(
            f"predict: predictions differ in their first dimension, so they cannot be taken apart "
            f"into examples ({shapes}): pass yield_single_examples=False, or choose some by "
            "predict_keys"
        )
    for i in range(next(iter(sizes.values())) or 0):
        yield {name: value[i] for name, value in batch.items()}
