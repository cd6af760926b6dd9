"""Processes, devices and savers of an estimator's programs, for packages built on estimators."""

from mesh_tensorflow.estimator._cluster import in_cluster, programs_over
from mesh_tensorflow.estimator._hooks import SaverHook
from mesh_tensorflow.estimator.tpu._config import devices_of, shards_of_process

__all__ = ["SaverHook", "devices_of", "in_cluster", "programs_over", "shards_of_process"]
