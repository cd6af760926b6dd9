"""The command lines of the programs in `mesh_tensorflow.experimental`."""

from __future__ import annotations

from absl import flags

from mesh_tensorflow._command_lines.flag_table import Flag, FlagProgram

__all__ = ["AUGMENTATION_FLAGS", "MODEL_EXECUTOR", "OFFLINE_DATA_AUG", "RUN_FLAGS", "UNET_FLAGS"]

RUN_FLAGS: tuple[Flag, ...] = (
    (
        flags.DEFINE_bool,
        "use_tpu",
        True,
        "Whether all processors run one program: on a TPU, or on CPUs or GPUs if there is none. "
        "Otherwise operations are placed on CPUs or GPUs one by one.",
    ),
    (flags.DEFINE_bool, "on_gcp", False, "Whether --master is the name of a Cloud TPU."),
    (flags.DEFINE_string, "master", "", "Address of the session's master."),
    (
        flags.DEFINE_string,
        "checkpoint_dir",
        "",
        "Directory of checkpoints, from which training goes on.",
    ),
    (
        flags.DEFINE_string,
        "pred_output_dir",
        "",
        "Directory of predictions; none are written without.",
    ),
    (
        flags.DEFINE_string,
        "summary_dir",
        "",
        "Directory of summaries; --checkpoint_dir if it is empty.",
    ),
    (flags.DEFINE_bool, "write_summary", True, "Whether to write summaries."),
    (
        flags.DEFINE_integer,
        "num_train_iterations_per_loop",
        500,
        "Training steps between evaluations.",
    ),
    (flags.DEFINE_integer, "num_eval_iterations_per_loop", 2, "Batches of an evaluation."),
    (flags.DEFINE_integer, "num_training_loops", 1000, "How many times to train and evaluate."),
    (
        flags.DEFINE_integer,
        "save_checkpoints_steps",
        500,
        "Steps between checkpoints; also before evaluations.",
    ),
    (
        flags.DEFINE_float,
        "lr",
        0.003,
        "Learning rate at the beginning, relative to the size of weights.",
    ),
    (flags.DEFINE_float, "lr_drop_steps", 20000.0, "Steps between drops of the learning rate."),
    (flags.DEFINE_float, "lr_drop_rate", 0.3, "What a drop multiplies the learning rate by."),
    (flags.DEFINE_string, "mesh_shape", "rows:4, columns:4, cores:2", "Shape of the mesh."),
)

UNET_FLAGS: tuple[Flag, ...] = (
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

AUGMENTATION_FLAGS: tuple[Flag, ...] = (
    (
        flags.DEFINE_integer,
        "ct_resolution",
        128,
        "Size of a scan along each of its three axes, in voxels.",
    ),
    (flags.DEFINE_string, "input_file_pattern", "", "Files of scans in Hounsfield units."),
    (flags.DEFINE_string, "output_folder", "", "Directory of the files that are written."),
    (flags.DEFINE_string, "output_file_prefix", "augmented", "How their names begin."),
    (flags.DEFINE_integer, "num_data_aug", 1000, "How many scans to write."),
    (flags.DEFINE_integer, "process_no", None, "Number of this process, a part of file names."),
    (flags.DEFINE_float, "gen_fake_probability", 0.5, "How often lesions are made up."),
    (
        flags.DEFINE_float,
        "min_fake_lesion_ratio",
        0.05,
        "Least part of the liver that these are, on average.",
    ),
)

MODEL_EXECUTOR = FlagProgram(
    name="mesh_tensorflow.experimental.model_executor",
    description="Alternates between training and evaluation of a U-Net of scans.",
    examples=(
        '--train_file_pattern="train-*" --eval_file_pattern="eval-*" \\\n'
        '      --checkpoint_dir=DIR --mesh_shape="rows:2,columns:2"',
    ),
    table=(*RUN_FLAGS, *UNET_FLAGS),
)

OFFLINE_DATA_AUG = FlagProgram(
    name="mesh_tensorflow.experimental.offline_data_aug",
    description="Augments scans of livers once, before training.",
    examples=(
        "--process_no=0 --num_data_aug=1000 \\\n"
        '      --input_file_pattern="/data/scan-*.tfrecords" --output_folder=/data/augmented',
    ),
    table=AUGMENTATION_FLAGS,
    required=("input_file_pattern", "output_folder", "process_no"),
)
