"""Convolutions whose window is larger than the image, in a form that XLA computes fast.

`conv.py` uses it where XLA compiles the program, for the gradients of images and for transposed
convolutions; elsewhere TensorFlow's kernels compute these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.shape import list_product
from mesh_tensorflow.ops._contractions.conv_kind import ConvKind

__all__: list[str] = []

_CONVOLUTIONS = {2: tf.nn.conv2d, 3: tf.nn.conv3d}


def wide_by_filter(
    kind: ConvKind, narrow: tf.Tensor, window: tf.Tensor, wide_sizes: Sequence[int]
) -> Optional[tf.Tensor]:
    """Returns the wide image of a convolution, with its filter as image and its image as filter.

    XLA exchanges the two itself if the window is larger than the narrow image, as of blocks of
    images. But it makes a convolution with a reversed window, for which CPUs have no kernel: with
    blocks of 7 x 7 and windows of 9 x 9, that takes 20 times as long as with a reversed image.

    Args:
      kind: the ConvKind.
      narrow: a tf.Tensor [batch, spatial..., narrow channels].
      window: a tf.Tensor [window..., wide channels, narrow channels].
      wide_sizes: the sizes of the result [batch, spatial..., wide channels].

    Returns:
      A tf.Tensor, or None where XLA exchanges nothing, and with strides.
    """
    rank = kind.rank
    image, sizes = narrow.shape.as_list()[1:-1], window.shape.as_list()[:rank]
    # Images of size 1 do not count, which XLA leaves as they are.
    counted = [size for size, n in zip(sizes, image) if n > 1]
    if max(kind.strides) > 1 or list_product(counted) <= list_product(image):
        return None
    margins, kept = [], []
    for n, size, wide in zip(image, sizes, wide_sizes[1:-1]):
        before = (size - 1) // 2 if kind.padding == "SAME" else 0  # of the wide image
        first, last = n - 1 - before, wide + before - size
        margins.append([max(0, first), max(0, last)])
        # What is so far out that it never meets the image.
        kept.append(slice(max(0, -first), size - max(0, -last)))
    spatial = list(range(rank))
    filters = tf.transpose(window[tuple(kept)], [rank, *spatial, rank + 1])
    filters = tf.pad(filters, [[0, 0], *margins, [0, 0]])
    images = tf.reverse(narrow, [1 + i for i in spatial])
    images = tf.transpose(images, [*(1 + i for i in spatial), rank + 1, 0])
    y = _CONVOLUTIONS[rank](filters, images, strides=[1] * (rank + 2), padding="VALID")
    return tf.transpose(y, [rank + 1, *(1 + i for i in spatial), 0])
