"""Random changes of scans and of the labels of their voxels, by TensorFlow operations alone.

Images and labels are floating tensors [x, y, z] of the same static shape. Labels are 0 for what is
around the liver, 1 for the liver and 2 for lesions in it.
"""

from mesh_tensorflow.experimental.data_aug_lib._geometry import (
    maybe_flip,
    maybe_rot180,
    projective_transform,
)
from mesh_tensorflow.experimental.data_aug_lib._intensity import (
    image_corruption,
    intensity_shift,
    maybe_add_noise,
)
from mesh_tensorflow.experimental.data_aug_lib._lesions import (
    maybe_gen_fake_data_based_on_real_data,
)

__all__ = [
    "image_corruption",
    "intensity_shift",
    "maybe_add_noise",
    "maybe_flip",
    "maybe_gen_fake_data_based_on_real_data",
    "maybe_rot180",
    "projective_transform",
]
