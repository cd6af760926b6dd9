"""TPUEstimator and its configuration, on CPUs and GPUs, for programs written for them."""

from __future__ import annotations

import copy
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union, cast

import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._calls import arguments_of, takes
from mesh_tensorflow._core.errors import check_choice, check_whole
from mesh_tensorflow._mesh.replicate import replicate
from mesh_tensorflow._pjrt import pjrt
from mesh_tensorflow.estimator._estimator import Estimator
from mesh_tensorflow.estimator._model import (
    Model,
    call_input_fn,
    call_model_fn,
    features_and_labels,
    function_name,
)
from mesh_tensorflow.estimator._run_config import RunConfig as _RunConfig
from mesh_tensorflow.estimator._run_config import check_number
from mesh_tensorflow.estimator._spec import EstimatorSpec, ModeKeys, checked_fields
from mesh_tensorflow.estimator.processes import devices_of, shards_of_process

if TYPE_CHECKING:
    from mesh_tensorflow.estimator._model import WarmStartSettings

__all__ = [
    "InputPipelineConfig",
    "RunConfig",
    "TPUConfig",
    "TPUContext",
    "TPUEstimator",
    "TPUEstimatorSpec",
]

# -- the configuration

_CORES_PER_REPLICA = (1, 2, 4, 8, 16, 32, 64, 128)
_MESH_IMPLS = ("simd", "pjrt")


class InputPipelineConfig:
    """The values of `per_host_input_for_training`: how the input function feeds TPU cores."""

    PER_SHARD_V1 = 1
    PER_HOST_V1 = 2
    PER_HOST_V2 = 3
    BROADCAST = 4
    SLICED = 5


class _TPUConfigFields(NamedTuple):
    iterations_per_loop: Union[int, str]
    num_shards: Optional[int]
    num_cores_per_replica: Optional[int]
    per_host_input_for_training: int
    tpu_job_name: Optional[str]
    initial_infeed_sleep_secs: Optional[int]
    input_partition_dims: Any
    eval_training_input_configuration: int
    experimental_host_call_every_n_steps: int
    experimental_allow_per_host_v2_parallel_get_next: bool
    experimental_feed_hook: Any
    mesh_impl: str


class TPUConfig(_TPUConfigFields):
    """Settings of a TPU; elsewhere, `num_shards`, `mesh_impl` and the host call interval apply."""

    def __new__(
        cls,
        iterations_per_loop: Union[int, str] = 2,
        num_shards: Optional[int] = None,
        num_cores_per_replica: Optional[int] = None,
        per_host_input_for_training: Union[int, bool] = True,
        tpu_job_name: Optional[str] = None,
        initial_infeed_sleep_secs: Optional[int] = None,
        input_partition_dims: Optional[Sequence[object]] = None,
        eval_training_input_configuration: int = InputPipelineConfig.PER_HOST_V1,
        experimental_host_call_every_n_steps: int = 1,
        experimental_allow_per_host_v2_parallel_get_next: bool = False,
        experimental_feed_hook: object = None,
        mesh_impl: str = "simd",
    ) -> TPUConfig:
        """Creates an instance.

        Args:
          iterations_per_loop: steps between returns to the host; a number, or a time such as "60m".
          num_shards: the number of model replicas.
          num_cores_per_replica: the number of cores of a replica.
          per_host_input_for_training: an InputPipelineConfig value, or a bool.
          tpu_job_name: the name of the job with the TPU.
          initial_infeed_sleep_secs: the initial delay of the infeed.
          input_partition_dims: how inputs are split over the cores of a replica.
          eval_training_input_configuration: an InputPipelineConfig value.
          experimental_host_call_every_n_steps: steps between host calls.
          experimental_allow_per_host_v2_parallel_get_next: ignored.
          experimental_feed_hook: ignored.
          mesh_impl: what runs the program of a TPUEstimator with `use_tpu`: "simd" for devices of
            TensorFlow, with a SimdMeshImpl in the model function, or "pjrt" for devices of JAX,
            with an mtf.GspmdMeshImpl; then `num_shards` need not be given.

        Returns:
          a TPUConfig.

        Raises:
          ValueError: an argument is invalid.
        """
        if isinstance(iterations_per_loop, str):
            valid = re.fullmatch(r"[1-9]\d*[smh]", iterations_per_loop) is not None
        else:
            valid = iterations_per_loop >= 1
        if not valid:
            raise ValueError(
                f"TPUConfig: iterations_per_loop is {iterations_per_loop!r}; it should be 1 or "
                "more, or a time such as '30s', '60m' or '1h'"
            )
        check_number("TPUConfig", "num_shards", num_shards, 1)
        name = "experimental_host_call_every_n_steps"
        check_number("TPUConfig", name, experimental_host_call_every_n_steps, 1)
        cores = num_cores_per_replica
        check_choice("TPUConfig", "num_cores_per_replica", cores, (None, *_CORES_PER_REPLICA))
        check_choice("TPUConfig", "mesh_impl", mesh_impl, _MESH_IMPLS)
        # By identity: PER_SHARD_V1 is 1, which equals True.
        if per_host_input_for_training is True:
            per_host_input_for_training = InputPipelineConfig.PER_HOST_V1
        elif per_host_input_for_training is False:
            per_host_input_for_training = InputPipelineConfig.PER_SHARD_V1
        return super().__new__(cls, **arguments_of(_TPUConfigFields, locals()))


class RunConfig(_RunConfig):
    """How a TPUEstimator runs."""

    def __init__(
        self,
        tpu_config: Optional[TPUConfig] = None,
        evaluation_master: Optional[str] = None,
        master: Optional[str] = None,
        cluster: Optional[tf.distribute.cluster_resolver.ClusterResolver] = None,
        **kwargs: Any,
    ) -> None:
        """Creates a RunConfig.

        Args:
          tpu_config: a TPUConfig.
          evaluation_master: the target of the session in evaluation and prediction; `master` by
            default.
          master: the target of the session in training; "" for this process.
          cluster: a ClusterResolver, which provides the master.
          **kwargs: arguments of `estimator.RunConfig`.

        Raises:
          TypeError: `tpu_config` is not a TPUConfig, or an argument is unknown.
          ValueError: `cluster` and `master` are both given, or an argument is invalid.
        """
        super().__init__(**kwargs)
        if tpu_config is not None and not isinstance(tpu_config, TPUConfig):
            raise TypeError(f"RunConfig: tpu_config should be a TPUConfig, but is {tpu_config!r}")
        if cluster is not None and (master is not None or evaluation_master is not None):
            raise ValueError(
                "RunConfig: cluster and master are both given; the cluster knows its master, so "
                "leave out master and evaluation_master"
            )
        self._tpu_config = tpu_config or TPUConfig()
        self._resolver = cluster
        if cluster is not None:
            master = cluster.master()
        if master is None:
            master = self._cluster.master
        if evaluation_master is None:
            # Unlike other estimators, evaluations run where the training does.
            evaluation_master = self._cluster.evaluation_master or master
        self._cluster = self._cluster._replace(master=master, evaluation_master=evaluation_master)

    @property
    def tpu_config(self) -> TPUConfig:
        """The TPUConfig."""
        return self._tpu_config

    @property
    def cluster(self) -> Optional[tf.distribute.cluster_resolver.ClusterResolver]:
        """The ClusterResolver, or None."""
        return self._resolver

    @property
    def effective_session_config(self) -> tf.ConfigProto:
        """`session_config`, or the default with a logical CPU for each processor."""
        config = super().effective_session_config
        # Only the default is changed, which is made anew each time: another one is the caller's.
        if self.session_config is None and shards_of_process(self):
            config.device_count["CPU"] = shards_of_process(self)
        return config


# -- the processors of a program


class _Topology(NamedTuple):
    """The part of a TPU topology that mesh programs use: all processors in a row."""

    mesh_shape: tuple[int, ...]


class _DeviceAssignment(NamedTuple):
    """The part of a TPU device assignment that mesh programs use."""

    topology: _Topology
    num_replicas: int
    num_cores_per_replica: int = 1


class TPUContext:
    """The value of `params["context"]`: tells a model function where its program runs.

    Attributes:
      num_replicas: the number of processors.
      num_hosts: 1, since the calling process feeds all processors.
      device_assignment: a device assignment with all processors in a row.
    """

    num_hosts = 1

    def __init__(self, num_replicas: int):
        """Creates a TPUContext.

        Args:
          num_replicas: the number of processors.
        """
        self.num_replicas = num_replicas
        # The sizes along the coordinates of a TPU's topology, of which a row of processors needs
        # one.
        self.device_assignment = _DeviceAssignment(_Topology((num_replicas, 1, 1)), num_replicas)

    def tpu_host_placement_function(self, host_id: int = 0) -> str:
        """Returns the device of a host.

        Args:
          host_id: ignored.
        """
        del host_id
        return "/cpu:0"


def runner_of(config: RunConfig) -> Callable[[Callable[..., Any], list[Any]], Any]:
    """Returns a function of a program and its inputs that runs it on the processors.

    Args:
      config: a tpu.RunConfig.
    """
    if config.tpu_config.mesh_impl == "pjrt":
        return pjrt().in_session
    devices = devices_of(config)
    return lambda program, inputs: replicate(program, inputs, devices=devices)


# -- the spec

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
        self.every_n_steps = every_n_steps
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
        if self._count % self.every_n_steps:
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
        _check_call("eval_metrics", eval_metrics)
        _check_call("host_call", host_call)
        if scaffold_fn is not None and not callable(scaffold_fn):
            raise TypeError(
                f"TPUEstimatorSpec: scaffold_fn should be a function, but is {scaffold_fn!r}"
            )
        fields = checked_fields(
            "TPUEstimatorSpec",
            mode,
            predictions,
            loss,
            train_op,
            training_hooks=training_hooks,
            evaluation_hooks=evaluation_hooks,
            prediction_hooks=prediction_hooks,
        )
        return super().__new__(
            cls,
            **fields,
            eval_metrics=eval_metrics,
            export_outputs=None if export_outputs is None else dict(export_outputs),
            scaffold_fn=scaffold_fn,
            host_call=host_call,
        )

    def as_estimator_spec(self) -> EstimatorSpec:
        """Converts to an EstimatorSpec; calls the functions.

        Returns:
          an EstimatorSpec.

        Raises:
          ValueError: the function of `eval_metrics` does not return a dict.
        """
        hooks: list[Any] = []
        if self.host_call is not None:
            operations = _call(self.host_call)
            if operations is not None:
                hooks.append(HostCallHook(operations))
        metrics = None
        # In evaluation only: the function makes variables, of which training has no use.
        if self.mode == ModeKeys.EVAL and self.eval_metrics is not None:
            metrics = _call(self.eval_metrics)
            if not isinstance(metrics, Mapping):
                raise ValueError(
                    "TPUEstimatorSpec: the function of eval_metrics should return a dict of "
                    f"(value, update operation), but returned {metrics!r}"
                )
        scaffold = self.scaffold_fn() if self.scaffold_fn is not None else None
        return EstimatorSpec(
            mode=self.mode,
            predictions=self.predictions,
            loss=self.loss,
            train_op=self.train_op,
            eval_metric_ops=metrics,
            export_outputs=self.export_outputs,
            scaffold=scaffold,
            training_hooks=[*self.training_hooks, *hooks],
            evaluation_hooks=[*self.evaluation_hooks, *hooks],
            prediction_hooks=[*self.prediction_hooks, *hooks],
        )


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


_TENSORS = ("loss", "train_op", "predictions")
_CALLS = ("eval_metrics", "host_call")


# -- one program on several devices


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
    # A program returns tensors only, so that its spec leaves it by this list.
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

    # What an input function has summarized before is no part of the program.
    outside = len(tf.get_collection(tf.GraphKeys.SUMMARIES))
    # A program is given tensors only, and `program` puts each None back in its place.
    results = run(program, [x for x in tf.nest.flatten(inputs) if x is not None])
    return _spec_of_results(specs[-1], results)


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


def _spec_of_results(spec: TPUEstimatorSpec, results: Mapping[str, Any]) -> TPUEstimatorSpec:
    """Returns a spec with the results of the program in place of its own tensors."""
    values = spec._asdict()
    values["export_outputs"] = None  # only programs on one device are exported
    for name in _TENSORS:
        values[name] = results.get(name)
    for name in _CALLS:
        if values[name] is not None:
            # A function of no tensors has no results, and keeps its empty list.
            values[name] = (values[name][0], results.get(name, values[name][1]))
    return spec._replace(**values)  # of the same class, which may be a user's


# -- batches of predictions


class _PaddedBatch(NamedTuple):
    """Features of as many rows as every batch has, of which the first `rows` are of the data."""

    features: Any
    rows: tf.Tensor


def padded_batches(dataset: Any, size: int) -> Any:
    """Returns a dataset of the features of batches, all of one size: shapes of programs are static.

    Args:
      dataset: a tf.data.Dataset of batches, of features or (features, labels).
      size: the rows of each batch. Rows of zeros fill up those that have fewer.

    Returns:
      a tf.data.Dataset of _PaddedBatch.
    """

    def pad(*element: Any) -> _PaddedBatch:
        features, _ = features_and_labels(element[0] if len(element) == 1 else element)
        batched = [x for x in tf.nest.flatten(features) if _has_rows(x)]
        # Nothing to fill up: features that have no rows are of the whole batch.
        if not batched:
            return _PaddedBatch(features, tf.constant(size))
        rows = tf.shape(batched[0])[0]
        fits = tf.debugging.assert_less_equal(
            rows,
            size,
            message="TPUEstimator.predict: a batch of input_fn has more rows than "
            f"predict_batch_size={size}: let it make batches of params['batch_size']",
        )
        with tf.control_dependencies([fits]):
            missing = size - rows

        def whole(x: Any) -> Any:
            if not _has_rows(x):
                return x
            zeros = tf.zeros(tf.concat([[missing], tf.shape(x)[1:]], 0), x.dtype)
            # What a computed number of rows is joined to has no known size, as the program needs.
            return tf.ensure_shape(
                tf.concat([x, zeros], 0), tf.TensorShape([size]).concatenate(x.shape[1:])
            )

        return _PaddedBatch(tf.nest.map_structure(whole, features), rows)

    return dataset.map(pad)


def _has_rows(x: object) -> bool:
    return isinstance(x, tf.Tensor) and x.shape.rank != 0


def _without_padding(predictions: Any, rows: tf.Tensor, size: int) -> Any:
    """Returns predictions of the rows of the data; those that are not of rows, as they are."""

    def cut(x: tf.Tensor) -> tf.Tensor:
        return x[:rows] if x.shape.rank and x.shape[0] == size else x

    return tf.nest.map_structure(cut, predictions)


_BATCH_SIZE = "batch_size"
_RESERVED = (_BATCH_SIZE, "context")


# -- the estimator


class TPUEstimator(Estimator):
    """An Estimator whose functions get the batch size as `params["batch_size"]`.

    It runs on CPUs and GPUs. With `use_tpu=True` and `TPUConfig(num_shards=N)`, the model function
    is one program that N devices run, as the cores of a TPU would: its mesh implementation is a
    SimdMeshImpl. With `TPUConfig(mesh_impl="pjrt")` it is one on devices of JAX, TPUs among them:
    its mesh implementation is an mtf.GspmdMeshImpl. If neither says how many devices there are,
    `train`, `evaluate` and `predict` raise a RuntimeError.
    """

    def __init__(
        self,
        model_fn: Any = None,
        model_dir: Union[str, os.PathLike[str], None] = None,
        config: Optional[RunConfig] = None,
        params: object = None,
        use_tpu: bool = True,
        train_batch_size: Optional[int] = None,
        eval_batch_size: Optional[int] = None,
        predict_batch_size: Optional[int] = None,
        batch_axis: object = None,
        eval_on_tpu: bool = True,
        export_to_tpu: bool = True,
        export_to_cpu: bool = True,
        warm_start_from: Union[str, os.PathLike[str], WarmStartSettings, None] = None,
        embedding_config_spec: None = None,
        export_saved_model_api_version: object = None,
    ) -> None:
        """Creates a TPUEstimator.

        Args:
          model_fn: a function that returns a TPUEstimatorSpec or an EstimatorSpec. It takes
            `features` and optionally `labels`, `mode`, `params` and `config`.
          model_dir: the directory of checkpoints and summaries; that of `config` by default.
          config: a tpu.RunConfig.
          params: a dict, or an object with `set_hparam`. Both functions get a copy, with
            `batch_size` and `use_tpu` added.
          use_tpu: whether the model function is one program for all processors of a mesh, whose
            number is `num_shards` of the TPUConfig. It gets `params["use_tpu"]`, and
            `params["context"]` with a device assignment.
          train_batch_size: the batch size in training; if given, `input_fn` has to take `params`.
          eval_batch_size: the batch size in evaluation.
          predict_batch_size: the batch size in prediction.
          batch_axis: ignored; only for TPUs.
          eval_on_tpu: whether `use_tpu` applies to evaluation and prediction too.
          export_to_tpu: ignored; only for TPUs.
          export_to_cpu: ignored; only for TPUs.
          warm_start_from: a path or a WarmStartSettings; see `Estimator`.
          embedding_config_spec: must be None.
          export_saved_model_api_version: ignored; only for TPUs.

        Raises:
          TypeError: `config` is not a tpu.RunConfig.
          ValueError: `params` has a reserved key, or a batch size is not positive.
        """
        if not isinstance(config, RunConfig):
            raise TypeError(
                f"TPUEstimator: config should be an estimator.tpu.RunConfig, but is {config!r}"
            )
        _check_params(params)
        self._batch_sizes = {
            ModeKeys.TRAIN: train_batch_size,
            ModeKeys.EVAL: eval_batch_size,
            ModeKeys.PREDICT: predict_batch_size,
        }
        for mode, size in self._batch_sizes.items():
            _check_batch_size(mode, size)
        if embedding_config_spec is not None:
            raise ValueError(
                "TPUEstimator: embedding_config_spec should be None: embeddings on TPUs are not "
                "there; mtf.layers.embedding can be split by a layout"
            )
        self._use_tpu = {
            ModeKeys.TRAIN: use_tpu,
            ModeKeys.EVAL: use_tpu and eval_on_tpu,
            ModeKeys.PREDICT: use_tpu and eval_on_tpu,
        }
        super().__init__(model_fn, model_dir, config, params, warm_start_from)

    def _exported_model(self) -> Model:
        """Returns the model for one device, to be exported as a SavedModel."""
        other = copy.copy(self)
        # A new dictionary: that of the copy is still this estimator's own.
        other._use_tpu = dict.fromkeys(self._use_tpu, False)
        return other._model()

    def _check_devices(self, mode: str, called: str) -> None:
        """Raises RuntimeError if `use_tpu` is true, and the number of devices is unknown."""
        if not self._use_tpu[mode]:
            return
        config: Any = self.config
        if config.tpu_config.mesh_impl == "pjrt":
            pjrt()  # an error without JAX
            return
        tpus = tf.config.list_physical_devices("TPU")
        if tpus or config.tpu_config.num_shards is None:
            cores = f"there are {len(tpus)} TPU cores" if tpus else "there is no TPU"
            raise RuntimeError(
                f"TPUEstimator.{called}: use_tpu is True, but {cores}, and this estimator runs on "
                "CPUs and GPUs: pass use_tpu=False, for a model_fn with a PlacementMeshImpl; or, "
                "for one with a SimdMeshImpl, give TPUConfig(num_shards=N), N being the number of "
                "processors of the mesh, to run it on N devices of this machine"
            )

    def _params_with(self, mode: str, **values: object) -> Any:
        # The property returns a copy, so the additions stay out of the caller's hyperparameters.
        params = self.params
        size = self._batch_sizes[mode]
        if size is not None:
            values[_BATCH_SIZE] = size
        for name, value in values.items():
            if hasattr(params, "set_hparam"):
                # HParams refuses to set a name that it lacks.
                is_declared = hasattr(params, name)
                (params.set_hparam if is_declared else params.add_hparam)(name, value)
            else:
                params[name] = value
        return params

    def _call_input_fn(self, input_fn: Callable[..., Any], mode: str) -> Any:
        size = self._batch_sizes[mode]
        if size is not None and not takes(input_fn, "params"):
            raise ValueError(
                f"input_fn {function_name(input_fn)} takes no argument `params`, in which it would "
                f'find params["batch_size"] ({size}): add it, or give the TPUEstimator no batch '
                "size"
            )
        returned = call_input_fn(input_fn, mode, self._params_with(mode), self.config)
        if not self._use_tpu[mode] or mode != ModeKeys.PREDICT or size is None:
            return returned
        # What is no dataset has the shapes that it has.
        is_dataset = isinstance(returned, tf2.data.Dataset)
        return padded_batches(returned, size) if is_dataset else returned

    def _call_model_fn(
        self, features: object, labels: object, mode: str, config: _RunConfig
    ) -> Any:
        config = cast(RunConfig, config)  # which the constructor asks for
        if self._use_tpu[mode]:
            shards = config.tpu_config.num_shards
            context = None if shards is None else TPUContext(shards)
            params = self._params_with(mode, use_tpu=True, context=context)
            rows, size = None, self._batch_sizes[mode]
            if isinstance(features, _PaddedBatch):
                features, rows = features
            spec = replicated_spec(
                lambda x, y: call_model_fn(self._model_fn, x, y, mode, params, config),
                features,
                labels,
                runner_of(config),
            )
            if rows is not None and size is not None:
                spec = spec._replace(predictions=_without_padding(spec.predictions, rows, size))
        else:
            params = self._params_with(mode, use_tpu=False)
            spec = call_model_fn(self._model_fn, features, labels, mode, params, config)
        if not isinstance(spec, TPUEstimatorSpec):
            return spec
        # Without arguments, as TensorFlow's: classes of users override it.
        converted = spec.as_estimator_spec()
        for hook in (
            *converted.training_hooks,
            *converted.evaluation_hooks,
            *converted.prediction_hooks,
        ):
            if isinstance(hook, HostCallHook):
                hook.every_n_steps = config.tpu_config.experimental_host_call_every_n_steps
        return converted


def _check_params(params: Any) -> None:
    if params is None:
        return
    if not isinstance(params, dict) and not hasattr(params, "set_hparam"):
        raise TypeError(
            f"TPUEstimator: params should be a dict, to which batch_size is added, but is of type "
            f"{type(params).__name__}"
        )
    reserved = [name for name in _RESERVED if name in params]
    if reserved:
        raise ValueError(
            f"TPUEstimator: params has {', '.join(map(repr, reserved))}, which the estimator sets: "
            "leave it out, and give train_batch_size, eval_batch_size and predict_batch_size"
        )


def _check_batch_size(mode: str, size: Optional[int]) -> None:
    if size is not None:
        name = {"train": "train", "eval": "eval", "infer": "predict"}[mode]
        check_whole("TPUEstimator", f"{name}_batch_size", size)


# Names that modules of tf.estimator, which this package replaces, had for one another.
_OTHER_NAMES = {
    **dict.fromkeys(
        ["estimator_lib", "model_fn_lib", "run_config_lib", "util_lib"],
        "mesh_tensorflow.estimator",
    ),
    **dict.fromkeys(["tpu_config", "tpu_context", "tpu_estimator"], __name__),
}


def __getattr__(name: str) -> object:
    if name in _OTHER_NAMES:
        return sys.modules[_OTHER_NAMES[name]]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
