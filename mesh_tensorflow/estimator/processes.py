"""Processes and devices of the program of an estimator, for packages built on estimators."""

from mesh_tensorflow.estimator._cluster import in_cluster, programs_over
from mesh_tensorflow.estimator.tpu._spec import devices_of, shards_of_process

__all__ = ["devices_of", "in_cluster", "programs_over", "shards_of_process"]
