"""Scans and their labels from files, as examples in blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow.experimental import data_aug_lib
from mesh_tensorflow.experimental._scans import mapped, parse_scan, read_scans, scaled
from mesh_tensorflow.experimental.unet._flags import FLAGS
from mesh_tensorflow.experimental.unet._shapes import block_sizes, check_dataset

__all__ = ["get_dataset_creator"]

_SHUFFLED = 64  # scans, or 16 times as many slices
_NOISE_SCALES = (4, 8)  # distances of the points that noise is interpolated between, in voxels


def _augmented(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Changes an image [x, y, z] and its labels as the flags say."""
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
    """Returns an image [x, y, z] and one-hot labels in the shapes of one example."""
    sizes = block_sizes()
    classes = tf.one_hot(tf.cast(label, tf.int32), FLAGS.label_c)
    return tf.reshape(image, [*sizes, 1]), tf.reshape(classes, [*sizes, FLAGS.label_c])


def _slices(image: tf.Tensor, label: tf.Tensor) -> Any:
    """Returns a data set of the slices [x, y, 1] of a scan."""
    return tf2.data.Dataset.from_tensor_slices(
        tuple(tf.transpose(x, [2, 0, 1])[..., None] for x in (image, label))
    )


def get_dataset_creator(dataset_str: str) -> Callable[[], Any]:
    """Returns a function that returns a tf.data.Dataset without end of (image, label).

    They are single examples: [x blocks, x, y blocks, y, z, channels], without z for slices.
    Files are those of --train_file_pattern, written by offline_data_aug, whose scans are shuffled
    and augmented as flags say; or of --eval_file_pattern, whose intensities are Hounsfield units.

    Args:
      dataset_str: "train" or "eval".

    Raises:
      ValueError: another data set, more than one channel, or (from the function) no such file.
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

    def creator() -> Any:
        ds = read_scans(f"{dataset_str}_file_pattern", is_training, FLAGS.n_dataset_read_interleave)
        ds = mapped(ds, parsed, FLAGS.n_dataset_processes)
        if FLAGS.sampled_2d_slices:
            ds = ds.flat_map(_slices)
        if is_training:
            ds = ds.shuffle(_SHUFFLED * (16 if FLAGS.sampled_2d_slices else 1))
        return mapped(ds, prepared, FLAGS.n_dataset_processes)

    return creator
