"""Random fields, and masks that cover a given fraction of a volume."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

import numpy as np
import tensorflow.compat.v1 as tf

__all__ = ["clipped_normal", "interpolated", "random_mask", "smooth_noise"]

_SIGMAS = 2.0  # random factors are clipped to this many standard deviations
_WIDTH = 1 / 16  # of the smoothing kernel, relative to the size of the image


def clipped_normal(
    mean: Union[float, tf.Tensor], stddev: Union[float, tf.Tensor], shape: Sequence[int] = ()
) -> tf.Tensor:
    """Returns normal random values, clipped to two standard deviations.

    Args:
      mean: a number or tf scalar.
      stddev: a number or tf scalar.
      shape: the shape of the result.
    """
    reach = _SIGMAS * stddev
    return tf.clip_by_value(mean + stddev * tf.random.normal(shape), mean - reach, mean + reach)


def _along_axes(x: tf.Tensor, matrices: Sequence[np.ndarray]) -> tf.Tensor:
    """Multiplies each axis of a tensor by a matrix [new size, old size]."""
    for matrix in matrices:
        # Each product moves the first axis to the end, so all of them restore the order.
        x = tf.tensordot(x, tf.constant(matrix, tf.float32), axes=[[0], [1]])
    return x


def _interpolation(size: int, coarse: int) -> np.ndarray:
    """Returns the matrix [size, coarse] of linear interpolation between evenly spaced points."""
    places = np.minimum(np.arange(size) * coarse / size, coarse - 1)
    return np.maximum(0.0, 1.0 - np.abs(places[:, None] - np.arange(coarse)))


def interpolated(x: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    """Enlarges a tensor of any rank by linear interpolation along each axis.

    Args:
      x: a tf.Tensor of static shape.
      sizes: the shape of the result.
    """
    coarse = x.shape.as_list()
    if list(sizes) == coarse:
        return x
    return _along_axes(x, [_interpolation(n, m) for n, m in zip(sizes, coarse)])


def _kernel(size: int, coarse: int, width: float) -> np.ndarray:
    """Returns the matrix [size, coarse] of a Gaussian filter; its rows have norm 1."""
    points = np.arange(coarse) * (size - 1) / max(coarse - 1, 1)
    weights = np.exp(-0.5 * np.square((np.arange(size)[:, None] - points) / width))
    return weights / np.linalg.norm(weights, axis=1, keepdims=True)


def smooth_noise(sizes: Sequence[int], reso: int) -> tf.Tensor:
    """Returns a smooth normal field of mean 0 and variance 1.

    Its correlation length is a sixteenth of the image.

    Args:
      sizes: the shape of the result.
      reso: the size of a whole image, in voxels.
    """
    width = max(_WIDTH * reso, 0.5)
    coarse = [-(-size // 2) for size in sizes]
    kernels = [_kernel(size, few, width) for size, few in zip(sizes, coarse)]
    return _along_axes(tf.random.normal(coarse), kernels)


def random_mask(sizes: Sequence[int], reso: int, fraction: Union[float, tf.Tensor]) -> tf.Tensor:
    """Returns random blobs: a bool tensor in which a given fraction of elements is true.

    Args:
      sizes: the shape of the result.
      reso: the size of a whole image, in voxels.
      fraction: a number or tf scalar from 0 to 1.
    """
    noise = smooth_noise(sizes, reso)
    total = int(np.prod(sizes))
    count = tf.cast(tf.round(tf.clip_by_value(fraction, 0.0, 1.0) * total), tf.int32)
    # Above the last one, nothing is true.
    ordered = tf.concat([tf.sort(tf.reshape(noise, [-1])), [np.inf]], 0)
    return noise >= ordered[total - count]
