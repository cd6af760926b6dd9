"""Input readers: give each processor of a mesh its slices of the batches of a dataset."""

from mesh_tensorflow.experimental.input_reader._readers import (
    PlacementMeshImplInputReader,
    ProcessDevices,
    SimdMeshImplInputReader,
    SubBatchSlicer,
    _host_id_to_tf_device,
)

__all__ = [
    "PlacementMeshImplInputReader",
    "ProcessDevices",
    "SimdMeshImplInputReader",
    "SubBatchSlicer",
    "_host_id_to_tf_device",
]
