"""2-D and 3-D U-Nets that segment lesions of the liver in scans, split into blocks over a mesh.

Ronneberger, Fischer and Brox, "U-Net: convolutional networks for biomedical image segmentation"
(2015); Hou et al., "High resolution medical image analysis with spatial partitioning" (2019).
Settings are command-line flags, in `FLAGS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Union

import numpy as np
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow._programs import FLAGS, define
from mesh_tensorflow.experimental import data_aug_lib

__all__ = [
    "FLAGS",
    "PostProcessor",
    "conv_with_spatial_partition",
    "deconv_with_spatial_partition",
    "get_dataset_creator",
    "get_input_mtf_shapes",
    "get_layout",
    "unet_with_spatial_partition",
]

define(
    ct_resolution=(128, "Size of a scan along each of its three axes, in voxels."),
    n_dataset_read_interleave=(16, "How many files are read at a time."),
    n_dataset_processes=(16, "How many examples are prepared at a time."),
    batch_size_train=(32, "Batch size in training."),
    batch_size_eval=(32, "Batch size in evaluation."),
    image_nx_block=(8, "Number of blocks along x."),
    image_ny_block=(8, "Number of blocks along y."),
    image_c=(1, "Number of channels of an image."),
    label_c=(3, "Number of classes of a voxel: other, liver, lesion."),
    pred_downsample=(2, "Size of the windows that predictions are averaged over."),
    output_ground_truth=(True, "Whether to write the labels beside predictions."),
    train_file_pattern=("", "Files of augmented scans, by offline_data_aug."),
    eval_file_pattern=("", "Files of scans in Hounsfield units."),
    sampled_2d_slices=(False, "Whether to take slices of scans, for a 2-d U-Net."),
    n_base_filters=(32, "Channels of the first level; each further one has twice as many."),
    network_depth=(4, "Number of levels."),
    n_conv_per_block=(2, "Number of convolutions of a level, down and up each."),
    with_batch_norm=(True, "Whether convolutions are followed by batch normalization."),
    dropout_keep_p=(0.5, "Probability that dropout keeps a value."),
    xen_liver_weight=(8.0, "Weight of the liver's voxels in the cross entropy."),
    xen_lesion_weight=(
        16.0,
        "By how much, less that of the liver, a lesion's voxels weigh more than 1.",
    ),
    dice_loss_weight=(0.2, "Weight of the Dice loss; cross entropy has the rest of 1."),
    dice_epsilon=(0.1, "Added to the divisor of the Dice loss."),
    image_translate_ratio=(0.0, "See data_aug_lib.projective_transform."),
    image_transform_ratio=(0.0, "See data_aug_lib.projective_transform."),
    image_noise_probability=(0.0, "See data_aug_lib.maybe_add_noise."),
    image_noise_ratio=(0.0, "See data_aug_lib.maybe_add_noise."),
    image_corrupt_ratio_mean=(0.0, "See data_aug_lib.image_corruption."),
    image_corrupt_ratio_stddev=(0.0, "See data_aug_lib.image_corruption."),
    per_class_intensity_scale=(0.0, "See data_aug_lib.intensity_shift."),
    per_class_intensity_shift=(0.0, "See data_aug_lib.intensity_shift."),
    mtf_dtype=("bfloat16", "Dtype of activations."),
    layout=(
        "batch:cores, image_nx_block:rows, image_ny_block:columns",
        "Layout rules; or auto, to train with the fastest of some that are tried.",
    ),
)

# -- data

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
        image, label = data_aug_lib.parse_scan(record, FLAGS.ct_resolution)
        return (image, label) if is_training else (data_aug_lib.scaled(image), label)

    def creator() -> tf.data.Dataset:
        ds = data_aug_lib.read_scans(
            f"{dataset_str}_file_pattern", is_training, FLAGS.n_dataset_read_interleave
        )
        ds = data_aug_lib.mapped(ds, parsed, FLAGS.n_dataset_processes)
        if FLAGS.sampled_2d_slices:
            # Slices of a scan are alike and come in a row: hence the larger buffer below.
            ds = ds.flat_map(_slices)
        if is_training:
            # Before labels become one-hot, which takes `label_c` times the memory.
            ds = ds.shuffle(_SHUFFLED * (16 if FLAGS.sampled_2d_slices else 1))
        return data_aug_lib.mapped(ds, prepared, FLAGS.n_dataset_processes)

    return creator


# -- the network

_MOMENTUM = 0.9  # of batch normalization
_EPSILON = 1e-6
_SLOPE = 0.1  # of leaky ReLU for negative inputs


def _layer(name: str, sampled_2d_slices: bool) -> tuple[Callable[..., Any], int]:
    """Returns a layer such as "conv{}d" for slices or volumes, and its spatial dimensions."""
    size = 2 if sampled_2d_slices else 3
    return getattr(layers, name.format(size)), size


def conv_with_spatial_partition(
    x: mtf.Tensor,
    sampled_2d_slices: bool,
    image_nx_dim: mtf.Dimension,
    image_ny_dim: mtf.Dimension,
    n_filters: int,
    keep_p: float,
    with_batch_norm: bool,
    is_training: bool,
    odim_name: str,
    variable_dtype: mtf.VariableDType,
    name: str,
) -> tuple[mtf.Tensor, list[mtf.Operation]]:
    """Applies a convolution with windows of 3, batch normalization, leaky ReLU and dropout.

    Args:
      x: a Tensor with dimensions [batch, image_nx_dim, image_ny_dim, x, y, z, channels], without z
        for slices.
      sampled_2d_slices: whether images are slices, and the convolution is two-dimensional.
      image_nx_dim: the Dimension of the blocks along x.
      image_ny_dim: the Dimension of the blocks along y.
      n_filters: the number of channels of the result.
      keep_p: the probability that dropout keeps a value.
      with_batch_norm: whether to normalize over the batch.
      is_training: whether dropout applies, and normalization uses the statistics of the batch.
      odim_name: the name of the channel dimension of the result.
      variable_dtype: the VariableDType of the kernel.
      name: the name of the variable scope.

    Returns:
      (a Tensor with the shape of `x` but for the channels, operations that update the moving
      averages of batch normalization and have to run with the training step).
    """
    conv, size = _layer("conv{}d_with_blocks", sampled_2d_slices)
    x = conv(
        x,
        mtf.Dimension(odim_name, n_filters),
        (3,) * size,
        (1,) * size,
        "SAME",
        image_nx_dim,
        image_ny_dim,
        variable_dtype=variable_dtype,
        name=name,
    )
    updates: list[mtf.Operation] = []
    if with_batch_norm:
        x, updates = layers.batch_norm(x, is_training, _MOMENTUM, epsilon=_EPSILON, name=name)
    x = mtf.leaky_relu(x, _SLOPE)
    return mtf.dropout(x, is_training, keep_p), updates


def deconv_with_spatial_partition(
    x: mtf.Tensor,
    sampled_2d_slices: bool,
    image_nx_dim: mtf.Dimension,
    image_ny_dim: mtf.Dimension,
    n_filters: int,
    keep_p: float,
    is_training: bool,
    odim_name: str,
    variable_dtype: mtf.VariableDType,
    name: str,
) -> mtf.Tensor:
    """Doubles the resolution by a transposed convolution with windows of 2; applies dropout.

    Args:
      x: a Tensor as for `conv_with_spatial_partition`.
      sampled_2d_slices: whether images are slices, and the convolution is two-dimensional.
      image_nx_dim: the Dimension of the blocks along x.
      image_ny_dim: the Dimension of the blocks along y.
      n_filters: the number of channels of the result.
      keep_p: the probability that dropout keeps a value.
      is_training: whether dropout applies.
      odim_name: the name of the channel dimension of the result.
      variable_dtype: the VariableDType of the kernel.
      name: the name of the variable scope.

    Returns:
      A Tensor with the dimensions of `x`, with x, y and z twice as large and the new channels.
    """
    deconv, size = _layer("conv{}d_transpose_with_blocks", sampled_2d_slices)
    x = deconv(
        x,
        mtf.Dimension(odim_name, n_filters),
        (2,) * size,
        (2,) * size,
        "SAME",
        image_nx_dim,
        image_ny_dim,
        variable_dtype=variable_dtype,
        name=name,
    )
    return mtf.dropout(x, is_training, keep_p)


def probability_of(x: mtf.Tensor, number: int) -> mtf.Tensor:
    """Returns the values of one class of a Tensor with the dimension label_c.

    Args:
      x: a Tensor [..., label_c].
      number: the index of the class.
    """
    one = mtf.slice(x, number, 1, "label_c")
    # The sum over this one class drops the dimension.
    return mtf.reduce_sum(one, reduced_dim=one.shape.dims[-1])


def _overlap(a: mtf.Tensor, b: mtf.Tensor) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Returns (the sum of a * b, the sum of a + b) for each image."""
    batch = mtf.Shape([a.shape.dims[0]])
    return mtf.reduce_sum(a * b, output_shape=batch), mtf.reduce_sum(a + b, output_shape=batch)


def _dice(common: mtf.Tensor, total: mtf.Tensor, factor: float, epsilon: float) -> tuple:
    """Returns `factor` times Dice coefficients: (the mean over images, the one over all voxels)."""
    # Dice = 2 sum(p t) / (sum(p) + sum(t)), and the loss is its negative.
    per_case = mtf.reduce_mean(factor * common / (total + epsilon))
    of_all = factor * mtf.reduce_sum(common) / (mtf.reduce_sum(total) + epsilon)
    return per_case, of_all


def _cross_entropy(
    logits: mtf.Tensor, labels: mtf.Tensor, liver: mtf.Tensor, lesion: mtf.Tensor
) -> mtf.Tensor:
    """Returns the mean of the weighted cross entropy over voxels."""
    classes = labels.shape.dims[-1]
    # Cross entropy of a voxel = -sum over label_c of label * log p.
    log_p = mtf.log_softmax(logits, classes)
    xen = mtf.negative(mtf.reduce_sum(log_p * labels, reduced_dim=classes))
    # The weight of lesions is relative to that of the liver, so that losses stay comparable with
    # those of models trained before.
    more_for_lesions = FLAGS.xen_lesion_weight - FLAGS.xen_liver_weight
    if FLAGS.xen_liver_weight < 0 or more_for_lesions < -1:
        raise ValueError(
            f"--xen_liver_weight={FLAGS.xen_liver_weight} and --xen_lesion_weight="
            f"{FLAGS.xen_lesion_weight} reward wrong predictions: a voxel of a lesion weighs 1 + "
            "xen_lesion_weight - xen_liver_weight, and one of the liver xen_liver_weight. Choose a "
            "larger weight of lesions"
        )
    weights = 1.0 + (FLAGS.xen_liver_weight - 1.0) * liver + more_for_lesions * lesion
    return mtf.reduce_mean(xen * weights)


def losses_and_scores(
    logits: mtf.Tensor, labels: mtf.Tensor
) -> tuple[mtf.Tensor, dict[str, mtf.Tensor], tuple[mtf.Tensor, mtf.Tensor]]:
    """Computes the loss and the scores of a segmentation.

    The loss is a weighted sum of the Dice loss of lesions (Milletari, Navab and Ahmadi, "V-Net",
    2016), as the mean of the losses per image and over all voxels, and of the cross entropy.

    Args:
      logits: a Tensor [batch, ..., label_c].
      labels: a Tensor of the same shape, one-hot.

    Returns:
      (the loss, scores by name, overlaps). The overlaps are, for each image [batch], the number of
      lesion voxels that were predicted correctly, and the sum of the numbers of predicted and of
      labeled lesion voxels.
    """
    classes = labels.shape.dims[-1]
    labeled, predicted = mtf.argmax(labels, classes), mtf.argmax(logits, classes)
    liver, lesion, predicted_lesion = (
        mtf.cast(mtf.equal(x, number), logits.dtype)
        for x, number in ((labeled, LIVER), (labeled, LESION), (predicted, LESION))
    )
    accuracy = mtf.cast(mtf.equal(labeled, predicted), logits.dtype)
    scores = {
        "lesion_pred_ratio": mtf.reduce_mean(predicted_lesion),
        "lesion_label_ratio": mtf.reduce_mean(lesion),
        "accuracy_of_all_classes": mtf.reduce_mean(accuracy),
    }
    xen = _cross_entropy(logits, labels, liver, lesion)
    # Probabilities, since a loss of the predicted classes would have no gradient.
    p_lesion = probability_of(mtf.softmax(logits, classes), LESION)
    loss_per_case, loss_global = _dice(*_overlap(p_lesion, lesion), -2.0, FLAGS.dice_epsilon)
    loss_dice = (loss_per_case + loss_global) * 0.5
    loss = FLAGS.dice_loss_weight * loss_dice + (1.0 - FLAGS.dice_loss_weight) * xen
    areas = _overlap(predicted_lesion, lesion)
    dice_per_case, dice_global = _dice(*areas, 2.0, _EPSILON)
    scores.update(
        lesion_dice_per_case=dice_per_case,
        lesion_dice_global=dice_global,
        loss_xen=xen,
        loss_dice=loss_dice,
        loss_dice_per_case=loss_per_case,
        loss_dice_global=loss_global,
    )
    return loss, scores, areas


_NAMES = ("pred_liver", "pred_lesion", "label")


def results_to_record(logits: mtf.Tensor, labels: mtf.Tensor) -> list[mtf.Tensor]:
    """Returns probabilities of liver and of lesions and labels of lesions, downsampled.

    Args:
      logits: a Tensor [batch, ..., label_c].
      labels: a Tensor of the same shape, one-hot.
    """
    classes = logits.shape.dims[-1]
    pool, size = _layer("avg_pool{}d", FLAGS.sampled_2d_slices)
    window = (FLAGS.pred_downsample,) * size
    p, of_lesions = mtf.softmax(logits, classes), mtf.slice(labels, LESION, 1, "label_c")
    p, of_lesions = pool(p, ksize=window), pool(of_lesions, ksize=window)
    return [
        probability_of(p, LIVER),
        probability_of(p, LESION),
        mtf.reduce_sum(of_lesions, reduced_dim=of_lesions.shape.dims[-1]),
    ]


def _joined(volume: np.ndarray) -> np.ndarray:
    """Joins the blocks of an image: [x blocks, y blocks, x, y, ...] to [x, y, ...]."""
    nx, ny, sx, sy, *rest = volume.shape
    return np.swapaxes(volume, 1, 2).reshape([nx * sx, ny * sy, *rest])


class PostProcessor:
    """Writes predictions to files, and computes scores over all images of an evaluation."""

    def __init__(self) -> None:
        """Creates a PostProcessor without results."""
        self._areas: list[np.ndarray] = []  # of each batch [2, batch]: common areas, and sums
        self._instance_i = 0

    def record(self, results: Sequence[np.ndarray], pred_output_dir: str) -> None:
        """Records the results of a batch.

        Args:
          results: the values of the record of `unet_with_spatial_partition`, then the loss, then
            the global step.
          pred_output_dir: a directory for the files pred_liver_STEP_I.npy, pred_lesion_STEP_I.npy
            and, with --output_ground_truth, label_STEP_I.npy of each image; "" to write none.
        """
        *volumes, common, total, _, step = results
        for images in zip(*volumes):
            for name, image in zip(_NAMES, images):
                if not pred_output_dir or (name == "label" and not FLAGS.output_ground_truth):
                    continue
                path = os.path.join(pred_output_dir, f"{name}_{step}_{self._instance_i}.npy")
                with tf.io.gfile.GFile(path, "wb") as f:
                    np.save(f, _joined(np.asarray(image, np.float32)))
            self._instance_i += 1
        self._areas.append(np.array([common, total], np.float32))

    def finish(self) -> dict[str, float]:
        """Returns and logs the Dice coefficients of lesions, and resets the results.

        Returns:
          "lesion_dice_per_case", the mean over images, and "lesion_dice_global", over all voxels.

        Raises:
          ValueError: nothing was recorded.
        """
        if not self._areas:
            raise ValueError("PostProcessor.finish: no results were recorded; call record before")
        common, total = np.concatenate(self._areas, 1)
        scores = {
            "lesion_dice_per_case": float(np.mean(2.0 * common / (total + _EPSILON))),
            "lesion_dice_global": float(2.0 * common.sum() / (total.sum() + _EPSILON)),
        }
        tf.logging.info("Scores of %d images: %s", self._instance_i, scores)
        self._areas, self._instance_i = [], 0
        return scores


class _Network:
    """Builds a U-Net.

    Attributes:
      updates: operations that update the moving averages of batch normalization.
    """

    def __init__(
        self, nx_dim: mtf.Dimension, ny_dim: mtf.Dimension, is_training: bool, dtype: tf.DType
    ):
        self._blocks = nx_dim, ny_dim
        self._is_training = is_training
        # Activations alone may be bfloat16: its 8 bits would round small updates of weights away.
        self._variable_dtype = mtf.VariableDType(tf.float32, tf.float32, dtype)
        self.updates: list[mtf.Operation] = []

    def _level(self, x: mtf.Tensor, kind: str, depth: int) -> mtf.Tensor:
        """Applies the convolutions of one level."""
        for n in range(FLAGS.n_conv_per_block):
            # No dropout after the first convolution of the image.
            is_first = kind == "down" and depth == n == 0
            x, updates = conv_with_spatial_partition(
                x,
                FLAGS.sampled_2d_slices,
                *self._blocks,
                FLAGS.n_base_filters * 2**depth,
                1.0 if is_first else FLAGS.dropout_keep_p,
                FLAGS.with_batch_norm,
                self._is_training,
                f"conv_{depth}_{n}",
                self._variable_dtype,
                f"conv_{kind}_{depth}_{n}",
            )
            self.updates += updates
        return x

    def logits(self, x: mtf.Tensor) -> mtf.Tensor:
        """Returns the logits, with the dimension label_c in place of image_c."""
        pool, _ = _layer("max_pool{}d", FLAGS.sampled_2d_slices)
        of_levels = []
        for depth in range(FLAGS.network_depth):
            if depth:
                x = pool(x)
            x = self._level(x, "down", depth)
            of_levels.append(x)
        for depth in reversed(range(FLAGS.network_depth - 1)):
            channels = f"conv_{depth}_{FLAGS.n_conv_per_block - 1}"
            x = deconv_with_spatial_partition(
                x,
                FLAGS.sampled_2d_slices,
                *self._blocks,
                FLAGS.n_base_filters * 2**depth,
                FLAGS.dropout_keep_p,
                self._is_training,
                channels,
                self._variable_dtype,
                f"deconv_{depth}_0",
            )
            # The transposed convolution was given the name of these channels, along which both are
            # joined.
            x = mtf.concat([x, of_levels[depth]], channels)
            x = self._level(x, "up", depth)
        classes = mtf.Dimension("label_c", FLAGS.label_c)
        # Windows of 1 need nothing of neighboring blocks, so this is the layer without halos.
        conv, size = _layer("conv{}d", FLAGS.sampled_2d_slices)
        return conv(
            x,
            classes,
            (1,) * size,
            (1,) * size,
            "VALID",
            variable_dtype=self._variable_dtype,
            name=f"final_conv_{FLAGS.label_c}",
        )


def _check_settings() -> None:
    """Checks that the flags are compatible.

    Raises:
      ValueError: a flag is not compatible with the others.
    """
    if FLAGS.label_c <= LESION:
        raise ValueError(
            f"--label_c={FLAGS.label_c}: losses need the classes other, liver and lesion, 3 at "
            "least"
        )
    if min(FLAGS.network_depth, FLAGS.n_conv_per_block) < 1:
        raise ValueError(
            f"--network_depth={FLAGS.network_depth} and --n_conv_per_block="
            f"{FLAGS.n_conv_per_block} must be 1 at least"
        )
    # Each level but the first halves a block, and no window of pooling may span two blocks.
    halvings = 2 ** (FLAGS.network_depth - 1)
    for what, size in (
        ("each level but the last", halvings),
        ("--pred_downsample", FLAGS.pred_downsample),
    ):
        for flag in ("image_nx_block", "image_ny_block"):
            block = FLAGS.ct_resolution // getattr(FLAGS, flag)
            if size < 1 or block % size:
                raise ValueError(
                    f"blocks of {block} pixels (--ct_resolution={FLAGS.ct_resolution} by --{flag}="
                    f"{getattr(FLAGS, flag)}) must be divisible by {size}, for {what}"
                )


def _imported(
    mesh: mtf.Mesh,
    mesh_impl: mtf.MeshImpl,
    slices: Union[tf.Tensor, Sequence[tf.Tensor]],
    shape: mtf.Shape,
) -> mtf.Tensor:
    """Imports a list of slices, or one whole tf.Tensor."""
    if isinstance(slices, (list, tuple)):
        laid_out = mesh_impl.LaidOutTensor.from_tensor_list(list(slices))
        x = mtf.import_laid_out_tensor(mesh, laid_out, shape)
    else:
        x = mtf.import_tf_tensor(mesh, slices, shape)
    x = mtf.cast(x, activation_dtype())
    # In memory, an image [x, y] is [nx, sx, ny, sy]; layers want the blocks before what is in them.
    batch, nx, sx, ny, *rest = x.shape.dims
    return mtf.transpose(x, mtf.Shape([batch, nx, ny, sx, *rest]))


def unet_with_spatial_partition(
    mesh: mtf.Mesh,
    mesh_impl: mtf.MeshImpl,
    dataset_str: str,
    images: Union[tf.Tensor, Sequence[tf.Tensor]],
    labels: Union[tf.Tensor, Sequence[tf.Tensor]],
) -> tuple[list[mtf.Tensor], mtf.Tensor, dict[str, mtf.Tensor], list[mtf.Operation]]:
    """Builds a U-Net and its losses, as configured by flags.

    The blocks of an image can be split over the mesh; convolutions exchange halos between
    neighboring blocks. The result does not depend on the layout.

    Args:
      mesh: a Mesh.
      mesh_impl: the MeshImpl that lowers the program.
      dataset_str: "train" or "eval".
      images: the slices of the images, of the first shape of `get_input_mtf_shapes`: a list with
        one tf.Tensor for each processor, from input_reader; or a whole tf.Tensor.
      labels: the slices of the one-hot labels, of the second shape; or a whole tf.Tensor.

    Returns:
      (record, loss, scores by name, operations that update moving averages and have to run with the
      training step). The record is for `PostProcessor.record`: the probabilities of liver and of
      lesions and the labels of lesions, averaged over windows, [batch, image_nx_block,
      image_ny_block, x, y, z]; and for each image [batch], the number of lesion voxels that were
      predicted correctly, and the sum of the numbers of predicted and of labeled lesion voxels.

    Raises:
      ValueError: `dataset_str` is unknown, or flags are not compatible.
    """
    shapes = get_input_mtf_shapes(dataset_str)
    _check_settings()
    x, labels = (_imported(mesh, mesh_impl, t, shape) for t, shape in zip((images, labels), shapes))
    _, nx_dim, ny_dim, *_ = x.shape.dims
    network = _Network(nx_dim, ny_dim, dataset_str == "train", x.dtype)
    logits = network.logits(x)
    loss, scores, areas = losses_and_scores(logits, labels)
    record = results_to_record(logits, labels)
    return [*record, *areas], loss, scores, network.updates
