"""2-D and 3-D U-Nets that segment lesions of the liver in scans, split into blocks over a mesh.

Ronneberger, Fischer and Brox, "U-Net: convolutional networks for biomedical image segmentation"
(2015); Hou et al., "High resolution medical image analysis with spatial partitioning" (2019).
Settings are command-line flags, in `FLAGS`.
"""

from mesh_tensorflow.experimental.unet._data import (
    get_dataset_creator,
    get_input_mtf_shapes,
    get_layout,
)
from mesh_tensorflow.experimental.unet._flags import FLAGS
from mesh_tensorflow.experimental.unet._network import (
    PostProcessor,
    conv_with_spatial_partition,
    deconv_with_spatial_partition,
    unet_with_spatial_partition,
)

__all__ = [
    "FLAGS",
    "PostProcessor",
    "conv_with_spatial_partition",
    "deconv_with_spatial_partition",
    "get_dataset_creator",
    "get_input_mtf_shapes",
    "get_layout",
    "unet_with_spatial_partition",
]
