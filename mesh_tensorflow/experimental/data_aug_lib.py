"""Scans and the labels of their voxels: how files hold them, and their random augmentation.

Files are TFRecords of an image and a label for each voxel. Augmentation is by TensorFlow operations
only. Images and labels are floating tensors [x, y, z] of the same static shape. Labels are 0
outside of the liver, 1 in the liver and 2 in lesions of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import numpy as np
import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.variables import checkpoint_files

__all__ = [
    "image_corruption",
    "intensity_shift",
    "maybe_add_noise",
    "maybe_flip",
    "maybe_gen_fake_data_based_on_real_data",
    "maybe_rot180",
    "projective_transform",
]

# -- files

COMPRESSION = "GZIP"
IMAGE, LABEL = "image/ct_image", "image/label"  # features: bytes of float32 values
_HOUNSFIELD = (-512.0, 512.0)  # mapped to 0 and 1


def scaled(image: tf.Tensor) -> tf.Tensor:
    """Scales intensities from [-512, 512] Hounsfield units to [0, 1], and clips them.

    Args:
      image: a tf.Tensor in Hounsfield units.
    """
    low, high = _HOUNSFIELD
    return tf.clip_by_value((image - low) / (high - low), 0.0, 1.0)


def parse_scan(record: tf.Tensor, reso: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Parses a serialized tf.train.Example to (image, label), both float32 [reso, reso, reso].

    Args:
      record: a string tf scalar.
      reso: the size of a scan along each axis.
    """
    feature = tf.io.FixedLenFeature([], tf.string)
    fields = tf.io.parse_single_example(record, {IMAGE: feature, LABEL: feature})
    image, label = (
        tf.reshape(tf.io.decode_raw(fields[name], tf.float32), [reso] * 3)
        for name in (IMAGE, LABEL)
    )
    return image, label


def mapped(
    ds: tf.data.Dataset, fn: Callable[..., Any], at_a_time: Optional[int] = None
) -> tf.data.Dataset:
    """Returns a dataset with a function applied to its elements.

    Args:
      ds: a tf.data.Dataset.
      fn: a function of an element; the graph seed may seed its random operations.
      at_a_time: the number of elements to process in parallel; 1 if None.
    """
    with warnings.catch_warnings():
        # Seeding by the graph is intended.
        warnings.filterwarnings("ignore", message="Seed .* from outer graph")
        return ds.map(fn, num_parallel_calls=at_a_time)


def read_scans(flag: str, shuffled: bool, at_a_time: int) -> tf.data.Dataset:
    """Returns a tf.data.Dataset of the records in files, repeated without end.

    Args:
      flag: the name of the flag with the file pattern.
      shuffled: whether to read files in random order instead of by name.
      at_a_time: the number of files to read in parallel.

    Raises:
      ValueError: no file matches the pattern.
    """
    pattern = getattr(tf.flags.FLAGS, flag)
    files = checkpoint_files.matching(pattern) if pattern else []
    if not files:
        raise ValueError(
            f"--{flag}={pattern!r} names no file; give a pattern such as /data/scan-*.tfrecords"
        )
    ds = tf2.data.Dataset.from_tensor_slices(files)
    if shuffled:
        # The buffer holds all names: the order of each pass is uniformly random, and a new one.
        ds = ds.shuffle(len(files))
    # One file after another in evaluation, so that the order of scans does not depend on timing.
    options: dict[str, Any] = {"cycle_length": 1}
    if shuffled:
        options = {
            "cycle_length": min(at_a_time, len(files)),
            "num_parallel_calls": tf2.data.AUTOTUNE,
            "deterministic": False,
        }
    return ds.interleave(
        lambda path: tf2.data.TFRecordDataset(path, compression_type=COMPRESSION), **options
    ).repeat()


# -- random fields

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
    # Beyond the last point, its value is kept: without the minimum, weights would fall to 0.
    places = np.minimum(np.arange(size) * coarse / size, coarse - 1)
    # The weight of point p at a place x is max(0, 1 - |x - p|): those of a place add up to 1.
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
    # exp(-(x - p)^2 / (2 width^2)) for each place x and each point p of the coarse grid.
    weights = np.exp(-0.5 * np.square((np.arange(size)[:, None] - points) / width))
    # Of independent values with variance 1, the sum of w_i z_i has the variance sum of w_i^2 = 1.
    return weights / np.linalg.norm(weights, axis=1, keepdims=True)


def smooth_noise(sizes: Sequence[int], reso: int) -> tf.Tensor:
    """Returns a smooth normal field of mean 0 and variance 1.

    Its correlation length is a sixteenth of the image.

    Args:
      sizes: the shape of the result.
      reso: the size of a whole image, in voxels.
    """
    width = max(_WIDTH * reso, 0.5)
    # A smooth field needs only every other point along each axis, an eighth of them in a volume.
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
    # The largest `count` values: a threshold of their distribution would give this number on
    # average.
    return noise >= ordered[total - count]


# -- augmentation

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
    if rot180_k is None:
        rot180_k = 2 * tf.random.uniform([], 0, 2, tf.int32)
    first, second = _PLANES[static_axis]
    order = [first, second, static_axis]
    turned = []
    for x in (image, label):
        # TensorFlow's images have the axes of the plane first, and are turned as by numpy.rot90.
        y = tf.image.rot90(tf.transpose(x, order), rot180_k)
        y = tf.transpose(y, [order.index(axis) for axis in range(3)])
        # A quarter turn exchanges the sizes of two axes, so the shape is known only if they are
        # equal.
        if x.shape[first] == x.shape[second]:
            y.set_shape(x.shape)
        turned.append(y)
    return tuple(turned)


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
            # Halfway between the labels 0 and 2, interpolation would find 1, another class.
            for x, how in ((image, "BILINEAR"), (label, "NEAREST"))
        )
    return image, label


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
    # The labels stay, so what they call a lesion has to remain visible.
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
    return image * tf.cast(tf.where_v2(label > _LESIONS_ABOVE, lesions, others), image.dtype)


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
            # A slice is shorter than the spacing along its third axis, and has one point there.
            coarse = [max(size // scale, 1) for size in noise_shape]
            grains = interpolated(clipped_normal(0.0, 1.0, coarse), noise_shape)
            total += tf.random.uniform([], 0.0, image_noise_ratio) * grains
        return image + tf.cast(total, image.dtype)

    added = tf.random.uniform([]) < image_noise_probability
    return tf.cond(added, noise, lambda: tf.identity(image))


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
    # Lesions are darker than the liver: adding the contrast hides one, subtracting it draws one.
    image += contrast * (
        tf.cast(label > _LESIONS_ABOVE, image.dtype) - tf.cast(lesions, image.dtype)
    )
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
    lesion, tissue = label > _LESIONS_ABOVE, tf.logical_and(label > 0.5, label < _LESIONS_ABOVE)
    contrast = _CONTRAST * (_mean_where(image, tissue) - _mean_where(image, lesion))
    possible = tf.reduce_any(lesion) & tf.reduce_any(tissue) & (contrast > 0)
    is_drawn = tf.random.uniform([]) < gen_fake_probability
    return tf.cond(
        is_drawn & possible,
        lambda: _with_other_lesions(image, label, reso, min_fake_lesion_ratio, contrast),
        lambda: (tf.identity(image), tf.identity(label)),
    )
