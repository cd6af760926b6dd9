"""Settings of U-Nets, of their data and of their losses."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from mesh_tensorflow.experimental._flags import define

__all__ = ["FLAGS"]

_DEFINITIONS: tuple[tuple[str, type, Any, str], ...] = (
    ("ct_resolution", int, 128, "Size of a scan along each of its three axes, in voxels."),
    ("n_dataset_read_interleave", int, 16, "How many files are read at a time."),
    ("n_dataset_processes", int, 16, "How many examples are prepared at a time."),
    ("batch_size_train", int, 32, "Batch size in training."),
    ("batch_size_eval", int, 32, "Batch size in evaluation."),
    ("image_nx_block", int, 8, "Number of blocks along x."),
    ("image_ny_block", int, 8, "Number of blocks along y."),
    ("image_c", int, 1, "Number of channels of an image."),
    ("label_c", int, 3, "Number of classes of a voxel: other, liver, lesion."),
    ("pred_downsample", int, 2, "Size of the windows that predictions are averaged over."),
    ("output_ground_truth", bool, True, "Whether to write the labels beside predictions."),
    ("train_file_pattern", str, "", "Files of augmented scans, by offline_data_aug."),
    ("eval_file_pattern", str, "", "Files of scans in Hounsfield units."),
    ("sampled_2d_slices", bool, False, "Whether to take slices of scans, for a 2-d U-Net."),
    ("n_base_filters", int, 32, "Channels of the first level; each further one has twice as many."),
    ("network_depth", int, 4, "Number of levels."),
    ("n_conv_per_block", int, 2, "Number of convolutions of a level, down and up each."),
    ("with_batch_norm", bool, True, "Whether convolutions are followed by batch normalization."),
    ("dropout_keep_p", float, 0.5, "Probability that dropout keeps a value."),
    ("xen_liver_weight", float, 8.0, "Weight of the liver's voxels in the cross entropy."),
    ("xen_lesion_weight", float, 16.0,
     "By how much, less that of the liver, a lesion's voxels weigh more than 1."),
    ("dice_loss_weight", float, 0.2, "Weight of the Dice loss; cross entropy has the rest of 1."),
    ("dice_epsilon", float, 0.1, "Added to the divisor of the Dice loss."),
    ("image_translate_ratio", float, 0.0, "See data_aug_lib.projective_transform."),
    ("image_transform_ratio", float, 0.0, "See data_aug_lib.projective_transform."),
    ("image_noise_probability", float, 0.0, "See data_aug_lib.maybe_add_noise."),
    ("image_noise_ratio", float, 0.0, "See data_aug_lib.maybe_add_noise."),
    ("image_corrupt_ratio_mean", float, 0.0, "See data_aug_lib.image_corruption."),
    ("image_corrupt_ratio_stddev", float, 0.0, "See data_aug_lib.image_corruption."),
    ("per_class_intensity_scale", float, 0.0, "See data_aug_lib.intensity_shift."),
    ("per_class_intensity_shift", float, 0.0, "See data_aug_lib.intensity_shift."),
    ("mtf_dtype", str, "bfloat16", "Dtype of activations."),
    ("layout", str, "batch:cores, image_nx_block:rows, image_ny_block:columns", "Layout rules."),
)

define(_DEFINITIONS)

# This form reads the command line by itself when a flag is first asked for.
FLAGS = tf.flags.FLAGS
