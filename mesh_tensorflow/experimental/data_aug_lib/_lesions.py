"""Synthetic lesions with the intensities of the real lesions of a scan."""

from __future__ import annotations

from typing import Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow.experimental.data_aug_lib._noise import random_mask

__all__ = ["maybe_gen_fake_data_based_on_real_data"]

_CONTRAST = 1.15  # of synthetic lesions, relative to the real ones
_FRACTION = (0.015, 0.05)  # mean and standard deviation of the fraction covered by blobs


def _mean_where(x: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Returns the mean of x where a mask is true; 0 if it is true nowhere."""
    weights = tf.cast(mask, x.dtype)
    return tf.reduce_sum(x * weights) / tf.maximum(tf.reduce_sum(weights), 1.0)


def _with_other_lesions(
    image: tf.Tensor, label: tf.Tensor, reso: int, min_fraction: float, contrast: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Turns lesions into liver, and random parts of the liver into lesions."""
    liver = label > 0.5
    fraction = tf.maximum(tf.random.normal([], *_FRACTION), min_fraction)
    lesions = tf.logical_and(random_mask(image.shape.as_list(), reso, fraction), liver)
    image += contrast * (tf.cast(label > 1.5, image.dtype) - tf.cast(lesions, image.dtype))
    return image, tf.cast(liver, label.dtype) + tf.cast(lesions, label.dtype)


def maybe_gen_fake_data_based_on_real_data(
    image: tf.Tensor,
    label: tf.Tensor,
    reso: int,
    min_fake_lesion_ratio: float,
    gen_fake_probability: Union[float, tf.Tensor],
) -> tuple[tf.Tensor, tf.Tensor]:
    """Replaces real lesions with synthetic ones with some probability.

    Real lesions become brighter by 1.15 times their contrast to the liver, and random blobs of the
    liver become darker by the same amount. A volume is unchanged if it has no lesion or no liver,
    or if its lesions are brighter than its liver.

    Args:
      image: a floating tf.Tensor.
      label: a tf.Tensor of the same shape.
      reso: the size of a whole image, in voxels.
      min_fake_lesion_ratio: the minimum fraction of the liver that becomes a lesion, on average
        over volumes.
      gen_fake_probability: the probability of replacing lesions.

    Returns:
      (image, label).
    """
    lesion, tissue = label > 1.5, tf.logical_and(label > 0.5, label < 1.5)
    contrast = _CONTRAST * (_mean_where(image, tissue) - _mean_where(image, lesion))
    possible = tf.reduce_any(lesion) & tf.reduce_any(tissue) & (contrast > 0)
    wanted = tf.random.uniform([]) < gen_fake_probability
    return tf.cond(
        wanted & possible,
        lambda: _with_other_lesions(image, label, reso, min_fake_lesion_ratio, contrast),
        lambda: (tf.identity(image), tf.identity(label)),
    )
