"""Flips, rotations and projective transforms of images together with their labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow.experimental.data_aug_lib._noise import clipped_normal

__all__ = ["maybe_flip", "maybe_rot180", "projective_transform"]

_IDENTITY = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)
_SHIFTS = (2, 5)  # indices of the translations among the eight parameters
# By the fixed axis: the axes of the plane of rotation, from the first to the second.
_PLANES = {0: (2, 1), 1: (0, 2), 2: (0, 1)}


def maybe_flip(
    image: tf.Tensor,
    label: tf.Tensor,
    flip_axis: int,
    flip_indicator: Union[float, tf.Tensor, None] = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Flips an axis at random.

    Args:
      image: a tf.Tensor.
      label: a tf.Tensor of the same shape.
      flip_axis: the axis.
      flip_indicator: a number or tf scalar; above 0.5 means to flip. If None, uniformly random
        between 0 and 1.

    Returns:
      (image, label), both flipped or neither.
    """
    if flip_indicator is None:
        flip_indicator = tf.random.uniform([])
    return tf.cond(
        tf.greater(flip_indicator, 0.5),
        lambda: (tf.reverse(image, [flip_axis]), tf.reverse(label, [flip_axis])),
        lambda: (tf.identity(image), tf.identity(label)),
    )


def _quarter_turns(x: tf.Tensor, times: int, plane: Sequence[int]) -> tf.Tensor:
    """Rotates a tensor in a plane, as numpy.rot90 does."""
    if times == 2:
        return tf.reverse(x, plane)
    order = list(range(x.shape.rank))
    order[plane[0]], order[plane[1]] = plane[1], plane[0]
    flipped = {0: x, 1: tf.reverse(x, [plane[1]]), 3: tf.reverse(x, [plane[0]])}[times]
    return tf.identity(x) if times == 0 else tf.transpose(flipped, order)


def maybe_rot180(
    image: tf.Tensor,
    label: tf.Tensor,
    static_axis: int,
    rot180_k: Union[int, tf.Tensor, None] = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Rotates a volume by 180 degrees around an axis at random.

    Args:
      image: a tf.Tensor [x, y, z].
      label: a tf.Tensor of the same shape.
      static_axis: the axis of rotation, 0, 1 or 2.
      rot180_k: an integer or int32 tf scalar, the number of quarter turns. If None, 0 or 2 at
        random. An odd one needs a volume that is a square around the axis.

    Returns:
      (image, label), both rotated in the same way.

    Raises:
      ValueError: there is no such axis.
    """
    if static_axis not in _PLANES:
        raise ValueError(
            f"maybe_rot180: static_axis is {static_axis!r}, but a volume has the axes 0, 1 and 2"
        )
    plane = _PLANES[static_axis]
    if rot180_k is None:
        rot180_k = 2 * tf.random.uniform([], 0, 2, tf.int32)

    def turned(times: int) -> Callable:
        return lambda: tuple(_quarter_turns(x, times, plane) for x in (image, label))

    results = tf.switch_case(tf.math.floormod(rot180_k, 4), [turned(k) for k in range(4)])
    for result, x in zip(results, (image, label)):
        if x.shape[plane[0]] == x.shape[plane[1]]:
            result.set_shape(x.shape)
    return tuple(results)


def _random_transform(reso: int, translate: float, transform: float) -> tf.Tensor:
    """Returns the eight parameters of a random projective transform near the identity."""
    stddevs = [translate * reso if i in _SHIFTS else transform for i in range(8)]
    return tf.stack([clipped_normal(mean, stddev) for mean, stddev in zip(_IDENTITY, stddevs)])


def _transformed(x: tf.Tensor, numbers: tf.Tensor, interpolation: str) -> tf.Tensor:
    """Transforms the first two axes of [rows, columns, channels]; fills with 0."""
    y = tf.raw_ops.ImageProjectiveTransformV3(
        images=x[None],
        transforms=numbers[None],
        output_shape=tf.shape(x)[:2],
        fill_value=0.0,
        interpolation=interpolation,
        fill_mode="CONSTANT",
    )
    return tf.ensure_shape(y[0], x.shape)


def projective_transform(
    image: tf.Tensor,
    label: tf.Tensor,
    reso: int,
    image_translate_ratio: float,
    image_transform_ratio: float,
    sampled_2d_slices: bool = False,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Applies a random projective transform in each of the three planes of a volume.

    A pixel (c, r) of a plane, c its column and r its row, is taken from
    ((a0 c + a1 r + a2) / k, (b0 c + b1 r + b2) / k) with k = c0 c + c1 r + 1. Images are
    interpolated linearly, labels are taken from the nearest pixel.

    Args:
      image: a tf.Tensor [x, y, z].
      label: a tf.Tensor of the same shape.
      reso: the size of a whole image, in voxels.
      image_translate_ratio: the standard deviation of a2 and b2, as a part of `reso`.
      image_transform_ratio: the standard deviation of the other six, of which a0 and b1 are near
        1 and the rest near 0. All are clipped to two standard deviations.
      sampled_2d_slices: whether these are slices [x, y, slices], which are only transformed in the
        plane of the first two axes.

    Returns:
      (image, label), both transformed in the same way.
    """
    if image_translate_ratio == 0 and image_transform_ratio == 0:
        return image, label
    # Each order puts the two axes of a plane first.
    orders = [(0, 1, 2)] if sampled_2d_slices else [(0, 1, 2), (1, 2, 0), (0, 2, 1)]
    for order in orders:
        numbers = _random_transform(reso, image_translate_ratio, image_transform_ratio)
        back = [order.index(axis) for axis in range(3)]
        image, label = (
            tf.transpose(_transformed(tf.transpose(x, order), numbers, how), back)
            for x, how in ((image, "BILINEAR"), (label, "NEAREST"))
        )
    return image, label
