"""Images in blocks: a convolution of them is one of the images that they make.

The blocks of a processor are next to each other. So they are joined to a part of an image, whose
halos come from other processors alone: nothing is exchanged, and no margin is computed, between
blocks of one processor. Along a dimension that has blocks, joined images have the name of that of
the blocks, so that the layout splits both alike.

XLA's partitioner would gather where dimensions are merged of which it splits one, and convolves
parts of an image wrongly. There, each block stays an image of its own, with margins of others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.layout import padded_dims
from mesh_tensorflow._core.shape import Dimension, Shape
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._mesh.slice_functions import constant, cut
from mesh_tensorflow.ops._movement.halo import paddings_along

# The Dimension of blocks along each spatial dimension, None for one block; empty without blocks.
Blocks = Sequence[Optional[Dimension]]


def check_blocks(
    what: str,
    blocks: Blocks,
    image: Shape,
    window: Sequence[int],
    strides: Sequence[int],
    padding: str,
    transposed: bool,
) -> tuple[Optional[Dimension], ...]:
    """Checks the dimensions of blocks; returns those along which windows reach into other blocks.

    Args:
      what: the name of the operation or the layer, for messages.
      blocks: for each spatial dimension, the Dimension of its blocks, or None.
      image: the Shape of the images, [batch..., spatial..., channels].
      window: the size of the filter along each spatial dimension.
      strides: the stride along each.
      padding: "SAME" or "VALID".
      transposed: whether it is a transposed convolution, whose strides are those of its output.

    Raises:
      ValueError: the images lack a dimension, or convolving blocks would not give what the whole
        image gives.
    """
    if padding == "VALID" and any(d is not None and d.size > 1 for d in blocks):
        several = [d for d in blocks if d is not None]
        raise ValueError(
            f'{what}: with blocks {dims_text(several)} the padding must be "SAME"; "VALID" would '
            "make blocks of different sizes"
        )
    batch, spatial = image.dims[: -len(blocks) - 1], image.dims[-len(blocks) - 1 : -1]
    for block, stride in zip(spatial, strides):
        if block.size % stride and padding == "SAME" and not transposed:
            raise ValueError(
                f"the block size {dims_text([block])} must be a multiple of the stride {stride}, "
                "so that each block makes a whole number of outputs"
            )
    # Where no window reaches into another block, each block is convolved like an image of its own.
    reached = [d if size > stride else None for d, size, stride in zip(blocks, window, strides)]
    several = [d for d in reached if d is not None and d.size > 1]
    for d in several:
        if d not in batch or several.count(d) > 1:
            raise ValueError(
                f"{what}: blocks must be dimensions of their own before {dims_text(spatial)}, but "
                f"{dims_text(several)} are not in {image}"
            )
    return tuple(d if d in several else None for d in reached) if several else ()


def joined_shape(shape: Shape, blocks: Blocks, mesh_impl: MeshImpl) -> Shape:
    """Returns the Shape of the images that blocks make.

    Args:
      shape: a Shape [batch..., spatial..., channels], whose batch has the dimensions of blocks.
      blocks: for each spatial dimension, the Dimension of its blocks or None.
      mesh_impl: a MeshImpl, where slices may end in padding: in whole blocks, which count.
    """
    first = len(shape) - len(blocks) - 1
    spatial = []
    for d, of in zip(shape[first:-1], blocks):
        if of is None:
            spatial.append(d)
            continue
        more = mesh_impl.padding(of) if padded_dims(mesh_impl, [of]) else 0
        spatial.append(Dimension(of.name, (of.size + more) * d.size))
    return Shape([d for d in shape[:first] if d not in blocks] + spatial + shape[-1:])


def _order(shape: Shape, blocks: Blocks) -> list[int]:
    """Returns the axes of blocks in the order of the images that they make."""
    first, dims = len(shape) - len(blocks) - 1, shape.dims
    order = [axis for axis in range(first) if dims[axis] not in blocks]
    for axis, of in enumerate(blocks, first):
        order += [axis] if of is None else [dims.index(of), axis]
    return [*order, len(shape) - 1]


def joiner(shape: Shape, blocks: Blocks) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns the function that joins the blocks of a slice to images.

    Args:
      shape: the Shape of the blocks.
      blocks: for each spatial dimension, the Dimension of its blocks or None.
    """
    order = _order(shape, blocks)
    batch = len(shape) - len(blocks) - 1 - sum(d is not None for d in blocks)

    def joined(t: tf.Tensor) -> tf.Tensor:
        sizes = t.shape.as_list()
        rows = iter([sizes[axis] for axis in order[batch:]])
        spatial = [next(rows) * (1 if of is None else next(rows)) for of in blocks]
        whole = [sizes[axis] for axis in order[:batch]] + spatial + sizes[-1:]
        return tf.reshape(tf.transpose(t, constant(order)), constant(whole))

    return joined


def cutter(shape: Shape, blocks: Blocks, sizes: Sequence[int]) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns the function that cuts a slice of images into their blocks, the inverse of `joiner`.

    Args:
      shape: the Shape of the blocks.
      blocks: for each spatial dimension, the Dimension of its blocks or None.
      sizes: the sizes of a slice of the blocks.
    """
    order = _order(shape, blocks)
    inverse = [order.index(axis) for axis in range(len(order))]
    ordered = [sizes[axis] for axis in order]
    return lambda t: tf.transpose(tf.reshape(t, constant(ordered)), constant(inverse))


class BlocksAsProcessors:
    """Blocks of whole tensors that have halos as slices of processors have; see `Halo`.

    Attributes:
      shape: the Dimensions of the blocks' shape, of which an axis stands for that of a mesh.
    """

    def __init__(self, mesh_impl: MeshImpl, shape: Shape, blocks: Blocks):
        """Creates it.

        Args:
          mesh_impl: the executed MeshImpl, of one processor.
          shape: the Shape of the blocks.
          blocks: for each spatial dimension, the Dimension of its blocks or None.
        """
        self._mesh_impl = mesh_impl
        self.shape = shape.dims
        self._axes = {d.name: self.shape.index(d) for d in blocks if d is not None}

    def splitting_axis(self, d: Dimension) -> Optional[int]:
        """Returns the axis of the blocks that a dimension of the joined images is cut into."""
        return self._axes.get(d.name)

    def slicewise(self, fn: Callable, *inputs: Any) -> Any:
        """Calls `fn` with the blocks of all images."""
        return self._mesh_impl.slicewise(fn, *inputs)

    def shift_by_n_processors(self, x: Any, axis: int, offset: int, wrap: bool) -> Any:
        """Moves blocks by `offset` along an axis; none wraps around, zeros are shifted in."""
        n = self.shape[axis].size
        out = min(abs(offset), n)
        before, after = (out, 0) if offset > 0 else (0, out)

        def moved(t: tf.Tensor) -> tf.Tensor:
            kept = cut(t, axis, after, n - out)
            return tf.pad(kept, paddings_along(len(t.shape), axis, before, after))

        return self._mesh_impl.slicewise(moved, x)
