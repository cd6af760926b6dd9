"""The U-Net."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.experimental.unet._blocks import (
    conv_with_spatial_partition,
    deconv_with_spatial_partition,
)
from mesh_tensorflow.experimental.unet._flags import FLAGS
from mesh_tensorflow.experimental.unet._loss import losses_and_scores
from mesh_tensorflow.experimental.unet._results import results_to_record
from mesh_tensorflow.experimental.unet._shapes import (
    LESION,
    activation_dtype,
    check_dataset,
    get_input_mtf_shapes,
)

__all__ = ["unet_with_spatial_partition"]


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
        pool = layers.max_pool2d if FLAGS.sampled_2d_slices else layers.max_pool3d
        kept = []
        for depth in range(FLAGS.network_depth):
            if depth:
                x = pool(x)
            x = self._level(x, "down", depth)
            kept.append(x)
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
            x = mtf.concat([x, kept[depth]], channels)
            x = self._level(x, "up", depth)
        classes = mtf.Dimension("label_c", FLAGS.label_c)
        conv, size = (layers.conv2d, 2) if FLAGS.sampled_2d_slices else (layers.conv3d, 3)
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
    check_dataset(dataset_str)
    _check_settings()
    shapes = get_input_mtf_shapes(dataset_str)
    x, labels = (_imported(mesh, mesh_impl, t, shape) for t, shape in zip((images, labels), shapes))
    _, nx_dim, ny_dim, *_ = x.shape.dims
    network = _Network(nx_dim, ny_dim, dataset_str == "train", x.dtype)
    logits = network.logits(x)
    loss, scores, areas = losses_and_scores(logits, labels)
    record = results_to_record(logits, labels)
    return [*record, *areas], loss, scores, network.updates
