"""Random augmentation of scans and of their voxel labels, by TensorFlow operations only.

Images and labels are floating tensors [x, y, z] of the same static shape. Labels are 0
outside of the liver, 1 in the liver and 2 in lesions of it.
"""

from mesh_tensorflow.experimental.data_aug_lib._images import (
    image_corruption,
    intensity_shift,
    maybe_add_noise,
    maybe_flip,
    maybe_gen_fake_data_based_on_real_data,
    maybe_rot180,
    projective_transform,
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
