"""Input readers: give each processor of a mesh its slices of the batches of a dataset."""

from mesh_tensorflow.experimental.input_reader._devices import (
    ProcessDevices,
    _host_id_to_tf_device,
)
from mesh_tensorflow.experimental.input_reader._placement import PlacementMeshImplInputReader
from mesh_tensorflow.experimental.input_reader._simd import SimdMeshImplInputReader
from mesh_tensorflow.experimental.input_reader._slicer import SubBatchSlicer

__all__ = [
    "PlacementMeshImplInputReader",
    "ProcessDevices",
    "SimdMeshImplInputReader",
    "SubBatchSlicer",
    "_host_id_to_tf_device",
]
