"""Shapes of images and labels in blocks, and their layout rules."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.experimental.unet._flags import FLAGS

__all__ = ["LESION", "LIVER", "block_sizes", "check_dataset", "get_input_mtf_shapes", "get_layout"]

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
