"""Intensity augmentations of images; labels stay as they are."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from mesh_tensorflow.experimental.data_aug_lib._noise import (
    clipped_normal,
    interpolated,
    random_mask,
)

__all__ = ["image_corruption", "intensity_shift", "maybe_add_noise"]

_LESIONS_ABOVE = 1.5  # labels: 0 around the liver, 1 the liver, 2 lesions


def image_corruption(
    image: tf.Tensor,
    label: tf.Tensor,
    reso: int,
    image_corrupt_ratio_mean: float,
    image_corrupt_ratio_stddev: float,
) -> tf.Tensor:
    """Sets blobs of an image to 0, nowhere in a lesion.

    Args:
      image: a tf.Tensor.
      label: a tf.Tensor of the same shape.
      reso: the size of a whole image, in voxels.
      image_corrupt_ratio_mean: which part of the image the blobs cover, on average.
      image_corrupt_ratio_stddev: the standard deviation of this part, within two of which it
        stays.

    Returns:
      The image.
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
    """Multiplies lesions by one random number and everything else by another.

    Args:
      image: a tf.Tensor.
      label: a floating tf.Tensor of the same shape.
      per_class_intensity_scale: the standard deviation of both numbers, within two of which they
        stay.
      per_class_intensity_shift: by how much the mean of the lesions' number is above 1, and that
        of the other one below.

    Returns:
      The image.
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
    """Adds noise of two grain sizes, or does not.

    Each of the two has a random amplitude between 0 and `image_noise_ratio`.

    Args:
      image: a tf.Tensor.
      noise_shape: the sizes of the image.
      scale0: the distance in voxels of the points that the first noise is interpolated between.
      scale1: that of the second.
      image_noise_probability: how often noise is added.
      image_noise_ratio: the largest amplitude.

    Returns:
      The image.
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
