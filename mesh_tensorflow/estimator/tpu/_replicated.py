"""Replicates the model function of a TPUEstimator over several CPUs or GPUs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.simd.replicate import replicate
from mesh_tensorflow.estimator._cluster.cluster_watch import peers_of
from mesh_tensorflow.estimator._cluster.run_cluster import in_cluster
from mesh_tensorflow.estimator._modes import ModeKeys
from mesh_tensorflow.estimator.tpu._spec import TPUEstimatorSpec

if TYPE_CHECKING:
    from mesh_tensorflow.estimator.tpu._config import RunConfig

__all__ = ["ReplicaContext", "devices_of", "replicated_spec", "runner_of", "shards_of_process"]

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
    processes = max(1, len(peers_of(config.cluster_spec)))
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
        for peer in peers_of(config.cluster_spec)
        for device in own
    ]


def runner_of(config: RunConfig) -> Callable[[Callable[..., Any], list[Any]], Any]:
    """Returns a function of a program and its inputs that runs it on the processors.

    Args:
      config: a tpu.RunConfig.
    """
    if config.tpu_config.mesh_impl == "pjrt":
        return importlib.import_module("mesh_tensorflow.pjrt").in_session
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
    if spec.export_outputs is not None and spec.mode != ModeKeys.PREDICT:
        results["export_outputs"] = None
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
