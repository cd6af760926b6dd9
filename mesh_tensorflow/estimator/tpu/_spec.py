"""TPUEstimatorSpec: what a model function of TPUEstimator returns, on one or on several devices."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.simd.replicate import replicate
from mesh_tensorflow._pjrt import pjrt
from mesh_tensorflow.estimator._cluster import in_cluster, programs_over
from mesh_tensorflow.estimator._modes import STANDARD_MODES, ModeKeys
from mesh_tensorflow.estimator._spec import EstimatorSpec, check_hooks, check_loss

if TYPE_CHECKING:
    from mesh_tensorflow.estimator.tpu._config import RunConfig


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
        # Checked here, where the mistake is: the function itself is called later.
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


_TENSORS = ("loss", "train_op", "predictions")
_CALLS = ("eval_metrics", "host_call")


class _Topology(NamedTuple):
    """The part of a TPU topology that mesh programs use: all processors in a row."""

    mesh_shape: tuple[int, ...]


class _DeviceAssignment(NamedTuple):
    """The part of a TPU device assignment that mesh programs use."""

    topology: _Topology
    num_replicas: int
    num_cores_per_replica: int = 1


class ReplicaContext:
    """The value of `params["context"]`: tells a model function where its program runs.

    Attributes:
      num_replicas: the number of processors.
      num_hosts: 1, since the calling process feeds all processors.
      device_assignment: a device assignment with all processors in a row.
    """

    num_hosts = 1

    def __init__(self, num_replicas: int):
        """Creates a ReplicaContext.

        Args:
          num_replicas: the number of processors.
        """
        self.num_replicas = num_replicas
        self.device_assignment = _DeviceAssignment(_Topology((num_replicas, 1, 1)), num_replicas)

    def tpu_host_placement_function(self, host_id: int = 0) -> str:
        """Returns the device of a host.

        Args:
          host_id: ignored.
        """
        del host_id
        return "/cpu:0"


def shards_of_process(config: Any) -> int:
    """Returns the number of processors of the mesh in each process; 0 if it is not configured.

    Args:
      config: a tpu.RunConfig.

    Raises:
      ValueError: the number of processors is not divisible by the number of processes.
    """
    shards = config.tpu_config.num_shards or 0
    processes = max(1, len(programs_over(config.cluster_spec)))
    if shards % processes:
        raise ValueError(
            f"TPUConfig: num_shards is {shards}, which {processes} processes cannot share equally"
        )
    return shards // processes


def devices_of(config: RunConfig) -> list[str]:
    """Returns a device for each processor.

    Args:
      config: a tpu.RunConfig; `num_shards` of its TPUConfig is the number of processors.
    """
    count = shards_of_process(config)
    gpus = tf.config.list_physical_devices("GPU")
    kind = "GPU" if len(gpus) >= count else "CPU"
    own = [f"/device:{kind}:{i}" for i in range(count)]
    if not in_cluster():
        return own
    return [
        f"/job:{peer.job}/task:{peer.task}{device}"
        for peer in programs_over(config.cluster_spec)
        for device in own
    ]


def runner_of(config: RunConfig) -> Callable[[Callable[..., Any], list[Any]], Any]:
    """Returns a function of a program and its inputs that runs it on the processors.

    Args:
      config: a tpu.RunConfig.
    """
    if config.tpu_config.mesh_impl == "pjrt":
        return pjrt().in_session
    devices = devices_of(config)
    return lambda program, inputs: replicate(program, inputs, devices=devices)


def replicated_spec(
    call: Callable[[Any, Any], Any],
    features: object,
    labels: object,
    run: Callable[[Callable[..., Any], list[Any]], Any],
) -> TPUEstimatorSpec:
    """Calls a model function as one program that all processors run.

    Args:
      call: calls the model function with features and labels; returns a TPUEstimatorSpec.
      features: the features of the input function, which every processor gets whole.
      labels: the labels of the input function, which every processor gets whole.
      run: runs a program with inputs; see `runner_of`.

    Returns:
      A TPUEstimatorSpec of tensors outside of the program.

    Raises:
      TypeError: the model function does not return a TPUEstimatorSpec.
    """
    specs: list[TPUEstimatorSpec] = []
    inputs = (features, labels)

    def program(*flat: tf.Tensor) -> dict[str, Any]:
        spec = call(*tf.nest.pack_sequence_as(inputs, _with_none(inputs, flat)))
        if not isinstance(spec, TPUEstimatorSpec):
            raise TypeError(
                f"TPUEstimator: with use_tpu the model_fn has to return a TPUEstimatorSpec, whose "
                f"eval_metrics and host_call are made outside of the program; it returned {spec!r}"
            )
        inside = len(tf.get_collection(tf.GraphKeys.SUMMARIES)) - outside
        if inside:
            tf.logging.warning(
                "%d summaries of the model_fn are left out: they are within the program of all "
                "processors. Write them in host_call, as mtf.utils.create_host_call does",
                inside,
            )
        specs.append(spec)
        return _results_of(spec)

    outside = len(tf.get_collection(tf.GraphKeys.SUMMARIES))
    # A program is given tensors only, and `program` puts each None back in its place.
    results = run(program, [x for x in tf.nest.flatten(inputs) if x is not None])
    return _outside(specs[-1], results)


def _with_none(structure: object, flat: Iterable[tf.Tensor]) -> list[Any]:
    """Returns the leaves of a structure: None where it has None, else the next tensor."""
    rest = iter(flat)
    return [x if x is None else next(rest) for x in tf.nest.flatten(structure)]


def _results_of(spec: TPUEstimatorSpec) -> dict[str, Any]:
    """Returns the results that are used outside of the program."""
    results = {name: getattr(spec, name) for name in _TENSORS}
    for name in _CALLS:
        pair = getattr(spec, name)
        results[name] = None if pair is None else pair[1]
    return {name: value for name, value in results.items() if _leaves(value)}


def _leaves(value: object) -> bool:
    return any(x is not None for x in tf.nest.flatten(value))


def _outside(spec: TPUEstimatorSpec, results: Mapping[str, Any]) -> TPUEstimatorSpec:
    """Returns a spec with the results of the program in place of its own tensors."""
    values = spec._asdict()
    values["export_outputs"] = None  # only programs on one device are exported
    for name in _TENSORS:
        values[name] = results.get(name)
    for name in _CALLS:
        if values[name] is not None:
            values[name] = (values[name][0], results.get(name, values[name][1]))
    return TPUEstimatorSpec(**values)
