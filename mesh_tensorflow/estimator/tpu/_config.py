"""RunConfig and TPUConfig: how a TPUEstimator runs, and on which processors its programs do."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.simd.replicate import replicate
from mesh_tensorflow._pjrt import pjrt
from mesh_tensorflow.estimator._run_config import RunConfig as _RunConfig
from mesh_tensorflow.estimator._run_config import check_number
from mesh_tensorflow.estimator.processes import devices_of, shards_of_process

__all__ = ["InputPipelineConfig", "RunConfig", "TPUConfig"]

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
        if num_cores_per_replica not in (None, *_CORES_PER_REPLICA):
            raise ValueError(
                f"TPUConfig: num_cores_per_replica is {num_cores_per_replica}; it should be one of "
                f"{', '.join(map(str, _CORES_PER_REPLICA))}"
            )
        if mesh_impl not in _MESH_IMPLS:
            raise ValueError(
                f"TPUConfig: mesh_impl is {mesh_impl!r}; it should be one of "
                f"{', '.join(map(repr, _MESH_IMPLS))}"
            )
        # By identity: PER_SHARD_V1 is 1, which equals True.
        if per_host_input_for_training is True:
            per_host_input_for_training = InputPipelineConfig.PER_HOST_V1
        elif per_host_input_for_training is False:
            per_host_input_for_training = InputPipelineConfig.PER_SHARD_V1
        return super().__new__(
            cls,
            iterations_per_loop,
            num_shards,
            num_cores_per_replica,
            per_host_input_for_training,
            tpu_job_name,
            initial_infeed_sleep_secs,
            input_partition_dims,
            eval_training_input_configuration,
            experimental_host_call_every_n_steps,
            experimental_allow_per_host_v2_parallel_get_next,
            experimental_feed_hook,
            mesh_impl,
        )


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
