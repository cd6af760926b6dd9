"""Intensity augmentations of images; labels are unchanged."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from mesh_tensorflow.experimental.data_aug_lib._noise import (
    clipped_normal,
    interpolated,
    random_mask,
)

__all__ = ["image_corruption", "intensity_shift", "maybe_add_noise"]

_LESIONS_ABOVE = 1.5  # labels: 0 outside of the liver, 1 liver, 2 lesions


def image_corruption(
    image: tf.Tensor,
    label: tf.Tensor,
    reso: int,
    image_corrupt_ratio_mean: float,
    image_corrupt_ratio_stddev: float,
) -> tf.Tensor:
    """Sets random blobs of an image to 0, except in lesions.

    Args:
      image: a tf.Tensor.
      label: a tf.Tensor of the same shape.
      reso: the size of a whole image, in voxels.
      image_corrupt_ratio_mean: the mean fraction of the image that the blobs cover.
      image_corrupt_ratio_stddev: the standard deviation of this fraction, which is clipped to two
        standard deviations.

    Returns:
      The changed image.
    """
    if image_corrupt_ratio_mean == 0 and image_corrupt_ratio_stddev == 0:
        return image
    fraction = clipped_normal(image_corrupt_ratio_mean, image_corrupt_ratio_stddev)
    blobs = random_mask(image.shape.as_list(), reso, fraction)
    corrupted = tf.logical_and(blobs, label < _LESIONS_ABOVE)
    return tf.where(corrupted, tf.zeros_like(image), image)


def intensity_shift(
    image: tf.Tensor,
    label: tf.Tensor,
    per_class_intensity_scale: float,
    per_class_intensity_shift: float,
) -> tf.Tensor:
    """Scales lesions by one random factor and everything else by another.

    Args:
      image: a tf.Tensor.
      label: a floating tf.Tensor of the same shape.
      per_class_intensity_scale: the standard deviation of both factors, which are clipped to two
        standard deviations.
      per_class_intensity_shift: the mean factor of lesions is 1 plus this, and the mean factor of
        everything else is 1 minus this.

    Returns:
      The changed image.
    """
    lesions = clipped_normal(1.0 + per_class_intensity_shift, per_class_intensity_scale)
    others = clipped_normal(1.0 - per_class_intensity_shift, per_class_intensity_scale)
    return image * tf.cast(
        tf.where(
            label > _LESIONS_ABOVE, lesions * tf.ones_like(label), others * tf.ones_like(label)
        ),
        image.dtype,
    )


def maybe_add_noise(
    image: tf.Tensor,
    noise_shape: Sequence[int],
    scale0: int,
    scale1: int,
    image_noise_probability: float,
    image_noise_ratio: float,
) -> tf.Tensor:
    """Adds noise of two grain sizes with some probability.

    Each has a random amplitude between 0 and `image_noise_ratio`.

    Args:
      image: a tf.Tensor.
      noise_shape: the shape of the image.
      scale0: the grid spacing in voxels from which the first noise is interpolated.
      scale1: the grid spacing of the second noise.
      image_noise_probability: the probability of adding noise.
      image_noise_ratio: the largest amplitude.

    Returns:
      The changed image.
    """

    def noise() -> tf.Tensor:
        total = tf.zeros(noise_shape)
        for scale in (scale0, scale1):
            coarse = [max(size // scale, 1) for size in noise_shape]
            grains = interpolated(clipped_normal(0.0, 1.0, coarse), noise_shape)
            total += tf.random.uniform([], 0.0, image_noise_ratio) * grains
        return image + tf.cast(total, image.dtype)

    added = tf.random.uniform([]) < image_noise_probability
    return tf.cond(added, noise, lambda: tf.identity(image))
