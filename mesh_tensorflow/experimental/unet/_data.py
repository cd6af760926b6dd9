"""Data of the U-Net: scans, and shapes of their batches."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf2
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.experimental import data_aug_lib
from mesh_tensorflow.experimental._scans import mapped, parse_scan, read_scans, scaled
from mesh_tensorflow.experimental.unet._flags import FLAGS

# Classes of voxels; 0 is outside of the liver.
LIVER, LESION = 1, 2
DATASETS = ("train", "eval")


def check_dataset(dataset_str: str) -> None:
    """Checks the name of a dataset.

    Args:
      dataset_str: "train" or "eval".

    Raises:
      ValueError: `dataset_str` is unknown.
    """
    if dataset_str not in DATASETS:
        raise ValueError(f'dataset_str must be "train" or "eval", not {dataset_str!r}')


def block_sizes() -> list[int]:
    """Returns the shape [x blocks, x, y blocks, y] or [x blocks, x, y blocks, y, z] of an image.

    Raises:
      ValueError: --ct_resolution is not divisible by the number of blocks.
    """
    sizes = []
    for flag in ("image_nx_block", "image_ny_block"):
        count = getattr(FLAGS, flag)
        if count < 1 or FLAGS.ct_resolution % count:
            raise ValueError(
                f"--ct_resolution={FLAGS.ct_resolution} cannot be cut into --{flag}={count} blocks "
                "of one size; choose a divisor"
            )
        sizes += [count, FLAGS.ct_resolution // count]
    return sizes if FLAGS.sampled_2d_slices else [*sizes, FLAGS.ct_resolution]


def get_input_mtf_shapes(dataset_str: str) -> list[mtf.Shape]:
    """Returns the Shapes of images and labels.

    Args:
      dataset_str: "train" or "eval".

    Returns:
      [Shape of the images, Shape of the labels]: [batch, image_nx_block, image_sx_block,
      image_ny_block, image_sy_block, image_sz_block, image_c or label_c]; slices lack
      image_sz_block.

    Raises:
      ValueError: `dataset_str` is unknown, or --ct_resolution is not divisible by the blocks.
    """
    check_dataset(dataset_str)
    names = ["nx_block", "sx_block", "ny_block", "sy_block", "sz_block"]
    spatial = [mtf.Dimension(f"image_{name}", n) for name, n in zip(names, block_sizes())]
    batch = mtf.Dimension("batch", getattr(FLAGS, f"batch_size_{dataset_str}"))
    return [
        mtf.Shape([batch, *spatial, mtf.Dimension(name, getattr(FLAGS, name))])
        for name in ("image_c", "label_c")
    ]


def get_layout() -> mtf.LayoutRules:
    """Returns the layout rules of the flag --layout."""
    return mtf.convert_to_layout_rules(FLAGS.layout)


def activation_dtype() -> tf.DType:
    """Returns the dtype of the flag --mtf_dtype.

    Raises:
      ValueError: the dtype is not floating.
    """
    try:
        dtype = tf.as_dtype(FLAGS.mtf_dtype)
    except TypeError:
        dtype = tf.string
    if not dtype.is_floating:
        raise ValueError(
            f'--mtf_dtype={FLAGS.mtf_dtype} is no floating dtype; choose "float32" or "bfloat16"'
        )
    return dtype


_SHUFFLED = 64  # scans, or 16 times as many slices
_NOISE_SCALES = (4, 8)  # grid spacings of the noise, in voxels


def _augmented(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Augments an image [x, y, z] and its labels, as configured by flags."""
    flat = FLAGS.sampled_2d_slices
    for axis in range(2 if flat else 3):
        image, label = data_aug_lib.maybe_flip(image, label, axis)
    image, label = data_aug_lib.projective_transform(
        image,
        label,
        FLAGS.ct_resolution,
        FLAGS.image_translate_ratio,
        FLAGS.image_transform_ratio,
        flat,
    )
    if FLAGS.per_class_intensity_scale or FLAGS.per_class_intensity_shift:
        image = data_aug_lib.intensity_shift(
            image, label, FLAGS.per_class_intensity_scale, FLAGS.per_class_intensity_shift
        )
    if FLAGS.image_noise_probability and FLAGS.image_noise_ratio:
        image = data_aug_lib.maybe_add_noise(
            image,
            image.shape.as_list(),
            *_NOISE_SCALES,
            FLAGS.image_noise_probability,
            FLAGS.image_noise_ratio,
        )
    image = data_aug_lib.image_corruption(
        image,
        label,
        FLAGS.ct_resolution,
        FLAGS.image_corrupt_ratio_mean,
        FLAGS.image_corrupt_ratio_stddev,
    )
    return image, label


def _in_blocks(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Reshapes an image [x, y, z] and its labels, as one-hot classes, to one example in blocks."""
    sizes = block_sizes()
    classes = tf.one_hot(tf.cast(label, tf.int32), FLAGS.label_c)
    return tf.reshape(image, [*sizes, 1]), tf.reshape(classes, [*sizes, FLAGS.label_c])


def _slices(image: tf.Tensor, label: tf.Tensor) -> tf.data.Dataset:
    """Returns a dataset of the slices [x, y, 1] of a scan."""
    return tf2.data.Dataset.from_tensor_slices(
        tuple(tf.transpose(x, [2, 0, 1])[..., None] for x in (image, label))
    )


def get_dataset_creator(dataset_str: str) -> Callable[[], tf.data.Dataset]:
    """Returns a function that creates an endless tf.data.Dataset of (image, label).

    Its elements are single examples [x blocks, x, y blocks, y, z, channels], without z for slices.
    Training reads --train_file_pattern, files of offline_data_aug, and shuffles and augments the
    scans as configured by flags. Evaluation reads --eval_file_pattern, in Hounsfield units.

    Args:
      dataset_str: "train" or "eval".

    Raises:
      ValueError: `dataset_str` is unknown, images have several channels, or (raised by the
        function) no file matches the pattern.
    """
    check_dataset(dataset_str)
    if FLAGS.image_c != 1:
        raise ValueError(f"--image_c={FLAGS.image_c}: scans in files have 1 channel")
    is_training = dataset_str == "train"

    def prepared(*scan: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image, label = scan
        if is_training:
            image, label = _augmented(image, label)
        return _in_blocks(image, label)

    def parsed(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image, label = parse_scan(record, FLAGS.ct_resolution)
        return (image, label) if is_training else (scaled(image), label)

    def creator() -> tf.data.Dataset:
        ds = read_scans(f"{dataset_str}_file_pattern", is_training, FLAGS.n_dataset_read_interleave)
        ds = mapped(ds, parsed, FLAGS.n_dataset_processes)
        if FLAGS.sampled_2d_slices:
            ds = ds.flat_map(_slices)
        if is_training:
            # Before labels become one-hot, which takes `label_c` times the memory.
            ds = ds.shuffle(_SHUFFLED * (16 if FLAGS.sampled_2d_slices else 1))
        return mapped(ds, prepared, FLAGS.n_dataset_processes)

    return creator
