"""Flags of U-Nets, of their data and of their losses."""

from __future__ import annotations

from absl import flags

from mesh_tensorflow._flags import FLAGS, Flag, define

__all__ = ["FLAGS"]

_DEFINITIONS: tuple[Flag, ...] = (
    (
        flags.DEFINE_integer,
        "ct_resolution",
        128,
        "Size of a scan along each of its three axes, in voxels.",
    ),
    (flags.DEFINE_integer, "n_dataset_read_interleave", 16, "How many files are read at a time."),
    (flags.DEFINE_integer, "n_dataset_processes", 16, "How many examples are prepared at a time."),
    (flags.DEFINE_integer, "batch_size_train", 32, "Batch size in training."),
    (flags.DEFINE_integer, "batch_size_eval", 32, "Batch size in evaluation."),
    (flags.DEFINE_integer, "image_nx_block", 8, "Number of blocks along x."),
    (flags.DEFINE_integer, "image_ny_block", 8, "Number of blocks along y."),
    (flags.DEFINE_integer, "image_c", 1, "Number of channels of an image."),
    (flags.DEFINE_integer, "label_c", 3, "Number of classes of a voxel: other, liver, lesion."),
    (
        flags.DEFINE_integer,
        "pred_downsample",
        2,
        "Size of the windows that predictions are averaged over.",
    ),
    (
        flags.DEFINE_bool,
        "output_ground_truth",
        True,
        "Whether to write the labels beside predictions.",
    ),
    (
        flags.DEFINE_string,
        "train_file_pattern",
        "",
        "Files of augmented scans, by offline_data_aug.",
    ),
    (flags.DEFINE_string, "eval_file_pattern", "", "Files of scans in Hounsfield units."),
    (
        flags.DEFINE_bool,
        "sampled_2d_slices",
        False,
        "Whether to take slices of scans, for a 2-d U-Net.",
    ),
    (
        flags.DEFINE_integer,
        "n_base_filters",
        32,
        "Channels of the first level; each further one has twice as many.",
    ),
    (flags.DEFINE_integer, "network_depth", 4, "Number of levels."),
    (
        flags.DEFINE_integer,
        "n_conv_per_block",
        2,
        "Number of convolutions of a level, down and up each.",
    ),
    (
        flags.DEFINE_bool,
        "with_batch_norm",
        True,
        "Whether convolutions are followed by batch normalization.",
    ),
    (flags.DEFINE_float, "dropout_keep_p", 0.5, "Probability that dropout keeps a value."),
    (
        flags.DEFINE_float,
        "xen_liver_weight",
        8.0,
        "Weight of the liver's voxels in the cross entropy.",
    ),
    (
        flags.DEFINE_float,
        "xen_lesion_weight",
        16.0,
        "By how much, less that of the liver, a lesion's voxels weigh more than 1.",
    ),
    (
        flags.DEFINE_float,
        "dice_loss_weight",
        0.2,
        "Weight of the Dice loss; cross entropy has the rest of 1.",
    ),
    (flags.DEFINE_float, "dice_epsilon", 0.1, "Added to the divisor of the Dice loss."),
    (flags.DEFINE_float, "image_translate_ratio", 0.0, "See data_aug_lib.projective_transform."),
    (flags.DEFINE_float, "image_transform_ratio", 0.0, "See data_aug_lib.projective_transform."),
    (flags.DEFINE_float, "image_noise_probability", 0.0, "See data_aug_lib.maybe_add_noise."),
    (flags.DEFINE_float, "image_noise_ratio", 0.0, "See data_aug_lib.maybe_add_noise."),
    (flags.DEFINE_float, "image_corrupt_ratio_mean", 0.0, "See data_aug_lib.image_corruption."),
    (flags.DEFINE_float, "image_corrupt_ratio_stddev", 0.0, "See data_aug_lib.image_corruption."),
    (flags.DEFINE_float, "per_class_intensity_scale", 0.0, "See data_aug_lib.intensity_shift."),
    (flags.DEFINE_float, "per_class_intensity_shift", 0.0, "See data_aug_lib.intensity_shift."),
    (flags.DEFINE_string, "mtf_dtype", "bfloat16", "Dtype of activations."),
    (
        flags.DEFINE_string,
        "layout",
        "batch:cores, image_nx_block:rows, image_ny_block:columns",
        "Layout rules.",
    ),
)

define(_DEFINITIONS)
