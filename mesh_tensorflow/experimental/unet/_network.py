"""The U-Net."""

from __future__ import annotations

from typing import Any

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
    """A U-Net that is being built.

    Attributes:
      updates: operations that update moving averages.
    """

    def __init__(
        self, nx_dim: mtf.Dimension, ny_dim: mtf.Dimension, is_training: bool, dtype: tf.DType
    ):
        self._blocks = nx_dim, ny_dim
        self._is_training = is_training
        self._variable_dtype = mtf.VariableDType(tf.float32, tf.float32, dtype)
        self.updates: list[mtf.Operation] = []

    def _level(self, x: mtf.Tensor, kind: str, depth: int) -> mtf.Tensor:
        """Convolves some times on one level."""
        for n in range(FLAGS.n_conv_per_block):
            # What is made of the image directly is kept whole.
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
        """Returns a Tensor with the dimension label_c in place of image_c."""
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
    """Checks flags for combinations that would fail later or train nothing.

    Raises:
      ValueError: a flag makes no sense with the others.
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


def _imported(mesh: mtf.Mesh, mesh_impl: Any, slices: Any, shape: mtf.Shape) -> mtf.Tensor:
    """Returns a Tensor of a list of slices, or of one whole tf.Tensor."""
    if isinstance(slices, (list, tuple)):
        laid_out = mesh_impl.LaidOutTensor.from_tensor_list(list(slices))
        x = mtf.import_laid_out_tensor(mesh, laid_out, shape)
    else:
        x = mtf.import_tf_tensor(mesh, slices, shape)
    x = mtf.cast(x, activation_dtype())
    batch, nx, sx, ny, *rest = x.shape.dims
    return mtf.transpose(x, mtf.Shape([batch, nx, ny, sx, *rest]))


def unet_with_spatial_partition(
    mesh: mtf.Mesh, mesh_impl: Any, dataset_str: str, images: Any, labels: Any
) -> tuple[list[mtf.Tensor], mtf.Tensor, dict[str, mtf.Tensor], list[mtf.Operation]]:
    """Builds a U-Net with its losses; flags have the settings.

    The blocks of an image may be split over the mesh; convolutions get margins of their neighbours.
    The result does not depend on the layout.

    Args:
      mesh: a Mesh.
      mesh_impl: the MeshImpl that the program will be lowered with.
      dataset_str: "train" or "eval".
      images: a list of tf.Tensors, one for each processor, as input_reader makes them: slices of a
        tensor of the first of `get_input_mtf_shapes`. Or a whole tf.Tensor.
      labels: likewise, of the second shape; classes are one-hot.

    Returns:
      (what `PostProcessor.record` needs, the loss, scores by name, operations that update moving
      averages with the training step). What is to be recorded: the probabilities of liver and of
      lesions and the labels of lesions, averaged over windows, [batch, image_nx_block,
      image_ny_block, x, y, z]; for each image, voxels of lesions that were found, and the sum of
      those that were taken for lesions and those that are.

    Raises:
      ValueError: another data set, or flags that do not fit each other.
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
