"""Convolutions: their kinds, operations, gradients, and how XLA compiles them.

XLA is slow where a window is larger than its image, as in the gradients of images and in transposed
convolutions. Where it compiles the program, these have another form; elsewhere TensorFlow's kernels
compute them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import check_choice, dims_text, is_whole
from mesh_tensorflow._core.layout import padded_dims, parts_along
from mesh_tensorflow._core.operation import (
    Cost,
    Operation,
    Tensor,
    gradient_of_output,
)
from mesh_tensorflow._core.shape import Dimension, Shape, ShapeLike, convert_to_shape, list_product
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._mesh.slice_functions import constant, cut, merged_sizes, never_with_bias
from mesh_tensorflow.ops._elementwise.binary import check_dtypes
from mesh_tensorflow.ops._movement.halo import (
    Halo,
    gathered_along_all,
    halo,
    halo_collectives,
    halos_too_far,
    paddings_along,
)

if TYPE_CHECKING:
    from mesh_tensorflow._lowering.lowering import Lowering

__all__ = [
    "Conv2dOperation",
    "Conv2dTransposeOperation",
    "Conv2or3dBackpropFilterOperation",
    "Conv2or3dBackpropInputOperation",
    "Conv3dOperation",
    "Conv3dTransposeOperation",
    "conv2d_backprop_filter",
    "conv2d_backprop_input",
    "conv2d_transpose_backprop_filter",
    "conv2d_transpose_backprop_input",
    "conv3d_backprop_filter",
    "conv3d_backprop_input",
    "conv3d_transpose_backprop_filter",
    "conv3d_transpose_backprop_input",
]

# -- images in blocks: a convolution of them is one of the images that they make

# The blocks of a processor are next to each other. So they are joined to a part of an image, whose
# halos come from other processors alone: nothing is exchanged, and no margin is computed, between
# blocks of one processor. Along a dimension that has blocks, joined images have the name of that of
# the blocks, so that the layout splits both alike.
#
# XLA's partitioner would gather where dimensions are merged of which it splits one, and convolves
# parts of an image wrongly. There, a dimension of blocks is cut into the parts that the layout
# makes of it. Each part is an image of its own, of joined blocks, with margins of others.

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


def cut_to_parts(
    shape: Shape, blocks: Blocks, parts: Mapping[str, int]
) -> tuple[Shape, tuple[Optional[Dimension], ...]]:
    """Returns a Shape whose blocks are in parts, and the Dimensions of the blocks of a part.

    Args:
      shape: the Shape of the blocks.
      blocks: for each spatial dimension, the Dimension of its blocks or None.
      parts: by the names of these, how many parts they have. Those with one have no dimension of
        parts; all others keep the name, by which the layout splits them.
    """
    # Names that no layout has: a part is whole.
    each = {
        d.name: Dimension(f"_{d.name}_of_part", d.size // parts[d.name])
        for d in blocks
        if d is not None
    }
    dims: list[Dimension] = []
    for d in shape:
        if d in blocks:
            dims += [Dimension(d.name, parts[d.name])] * (parts[d.name] > 1) + [each[d.name]]
        else:
            dims.append(d)
    return Shape(dims), tuple(d and each[d.name] for d in blocks)


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
            rest = cut(t, axis, after, n - out)
            return tf.pad(rest, paddings_along(len(t.shape), axis, before, after))

        return self._mesh_impl.slicewise(moved, x)


# -- kinds of convolutions


# A convolution has three tensors. The filter is [window..., wide channels, narrow channels]. The
# wide image is the input of an ordinary convolution, or the output of a transposed one; the narrow
# image is the other one. Every operation computes one of the three from the other two, so there are
# three kernels, with strides and gradients in common.
WIDE, NARROW, FILTER = "wide", "narrow", "filter"

_SPATIAL = {2: "hw", 3: "dhw"}

# For each product: the suffix of "conv2d" if it is transposed, and the suffixes of the names of the
# operation and of its sum over processors.
_NAMES = {
    "forward": ("_transpose", "", "_op"),
    "backprop_input": ("_trans", "_backprop", "_op"),
    "backprop_filter": ("_trans", "_backprop_filter", "_backprop_filter"),
}

# Size of an image along a spatial dimension, from the size of the other image (n), the window (k)
# and the stride (s). Several wide sizes give the same narrow size; n * s is chosen if it does.
_NARROW_SIZE = {"SAME": lambda n, k, s: -(-n // s), "VALID": lambda n, k, s: (n - k) // s + 1}
_WIDE_SIZE = {"SAME": lambda n, k, s: n * s, "VALID": lambda n, k, s: (n - 1) * s + max(k, s)}


@dataclasses.dataclass(frozen=True)
class ConvKind:
    """The kind of a convolution, with its strides and padding.

    Attributes:
      rank: number of spatial dimensions, 2 or 3.
      transposed: whether the input is the narrow image.
      strides: the stride of each spatial dimension.
      padding: "SAME" or "VALID".
      blocks: if images are in blocks, the Dimension of these along each spatial dimension, or None.
    """

    rank: int
    transposed: bool
    strides: tuple[int, ...]
    padding: str
    blocks: tuple[Optional[Dimension], ...] = ()

    @property
    def input_role(self) -> str:
        """The role of its input."""
        return NARROW if self.transposed else WIDE

    @property
    def output_role(self) -> str:
        """The role of its output."""
        return WIDE if self.transposed else NARROW

    @property
    def tf_strides(self) -> list[int]:
        """The strides in TensorFlow's form, [1, strides..., 1]."""
        return [1, *self.strides, 1]

    def product(self, role: str) -> str:
        """Returns the name of the product that computes a tensor, such as "forward"."""
        roles = [self.output_role, self.input_role, FILTER]
        return ["forward", "backprop_input", "backprop_filter"][roles.index(role)]

    def names(self, product: str) -> tuple[str, str, str]:
        """Returns the names of a product's counters, of its operation and of its sum."""
        transposed, operation, summed = _NAMES[product]
        family = f"conv{self.rank}d{transposed * self.transposed}"
        return family, family + operation, family + summed

    def image_shape(self, role: str, other: Shape, filter_shape: Shape) -> Shape:
        """Returns the shape of one image, given that of the other.

        Args:
          role: WIDE or NARROW, the image whose shape to return.
          other: the Shape of the other image, [batch..., spatial..., channels].
          filter_shape: a Shape [window..., wide channels, narrow channels].
        """
        sizes, channels = (_NARROW_SIZE, -1) if role == NARROW else (_WIDE_SIZE, -2)
        first = len(other) - self.rank - 1
        spatial = [
            Dimension(d.name, sizes[self.padding](d.size, k.size, s))
            for d, k, s in zip(other[first:-1], filter_shape, self.strides)
        ]
        return Shape(other[:first] + spatial + [filter_shape[channels]])


class ConvForm(NamedTuple):
    """What an operation computes of a convolution.

    Attributes:
      kind: the ConvKind.
      roles: the roles of its inputs.
      computed: the role of its output.
      shapes: the Shapes of all three tensors, by their roles.
    """

    kind: ConvKind
    roles: list[str]
    computed: str
    shapes: dict[str, Shape]

    def joined(self, mesh_impl: MeshImpl) -> ConvForm:
        """Returns the same of the images that blocks make, if images are in blocks."""
        blocks = self.kind.blocks
        if not blocks:
            return self
        shapes = {
            role: shape if role == FILTER else joined_shape(shape, blocks, mesh_impl)
            for role, shape in self.shapes.items()
        }
        return self._replace(kind=dataclasses.replace(self.kind, blocks=()), shapes=shapes)


def conv_kind(
    what: str,
    rank: int,
    transposed: bool,
    strides: Sequence[int],
    padding: str,
    blocks: Blocks = (),
) -> ConvKind:
    """Returns a ConvKind; `what` names the operation in messages.

    Raises:
      ValueError: TensorFlow does not support the rank, the strides or the padding.
    """
    if rank not in _SPATIAL:
        raise ValueError(f"{what}: a convolution has 2 or 3 spatial dimensions, not {rank!r}")
    fits = isinstance(strides, (list, tuple)) and len(strides) == rank + 2
    fits = fits and all(map(is_whole, strides))
    if not fits or strides[0] != 1 or strides[-1] != 1:
        raise ValueError(
            f"{what}: strides must be [1, {', '.join('s' + c for c in _SPATIAL[rank])}, 1], "
            f"whole numbers, 1 for batch and channels, but they are {strides!r}"
        )
    check_choice(what, "padding", padding, _NARROW_SIZE)
    return ConvKind(rank, bool(transposed), tuple(strides[1:-1]), padding, tuple(blocks))


def check_shapes(what: str, kind: ConvKind, shapes: dict[str, Shape]) -> None:
    """Checks that the shapes of a filter and of one or both images match.

    Raises:
      ValueError: a number of dimensions is wrong, an image has other channels than the filter, or
        the images do not match.
    """
    window = ", ".join("f" + c for c in _SPATIAL[kind.rank])
    layout = f"[{window}, {'out, in' if kind.transposed else 'in, out'}]"
    spatial = ", ".join(_SPATIAL[kind.rank])
    filter_shape = shapes[FILTER]
    if len(filter_shape) != kind.rank + 2:
        raise ValueError(
            f"{what}: a filter must have the dimensions {layout}, but {filter_shape} has "
            f"{len(filter_shape)}"
        )
    for role, channels in ((WIDE, filter_shape[-2]), (NARROW, filter_shape[-1])):
        image = shapes.get(role)
        if image is not None and len(image) < kind.rank + 1:
            raise ValueError(
                f"{what}: an image must have the dimensions [batch..., {spatial}, channels], "
                f"but {image} has {len(image)}"
            )
        if image is not None and image[-1] != channels:
            raise ValueError(
                f"{what}: the last dimension of the image {image} is {dims_text(image[-1:])}, "
                f"but the filter {filter_shape}, that is {layout}, has {dims_text([channels])} "
                "there. Bring channels last with mtf.transpose, or give both one name with "
                "mtf.rename_dimension"
            )
    # From the wide image to the narrow one, since several wide sizes go with one narrow size.
    if WIDE in shapes:
        fitting = kind.image_shape(NARROW, shapes[WIDE], filter_shape)
        # Such a size is that of "VALID" padding with a window that fits nowhere.
        if min(d.size for d in fitting[-kind.rank - 1 : -1]) < 1:
            raise ValueError(
                f"{what}: the window {dims_text(filter_shape[:-2])} is larger than the image "
                f'{shapes[WIDE]}. Use padding "SAME" or a smaller filter'
            )
        if shapes.get(NARROW, fitting) != fitting:
            raise ValueError(
                f"{what}: the image {shapes[WIDE]} goes with one of {fitting}, not of "
                f"{shapes[NARROW]}, by the filter {filter_shape}, strides {kind.tf_strides} and "
                f"padding {kind.padding!r}"
            )


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
    # wide[p] = sum over m of narrow[m] filter[p - m + before]: the padded filter is the image of
    # this convolution, and the reversed narrow image its filter.
    margins, windows = [], []
    for n, size, wide in zip(image, sizes, wide_sizes[1:-1]):
        before = (size - 1) // 2 if kind.padding == "SAME" else 0  # of the wide image
        first, last = n - 1 - before, wide + before - size
        margins.append([max(0, first), max(0, last)])
        # What is so far out that it never meets the image.
        windows.append(slice(max(0, -first), size - max(0, -last)))
    spatial = list(range(rank))
    # As an image it is [wide channels, window..., narrow channels], so wide channels are the batch.
    filters = tf.transpose(window[tuple(windows)], [rank, *spatial, rank + 1])
    filters = tf.pad(filters, [[0, 0], *margins, [0, 0]])
    # As a filter it is [spatial..., narrow channels, batch], so the batch is the result's last.
    images = tf.reverse(narrow, [1 + i for i in spatial])
    images = tf.transpose(images, [*(1 + i for i in spatial), rank + 1, 0])
    y = _CONVOLUTIONS[rank](filters, images, strides=[1] * (rank + 2), padding="VALID")
    return tf.transpose(y, [rank + 1, *(1 + i for i in spatial), 0])


# For each computed tensor: the TensorFlow operation for each number of spatial dimensions, its
# argument names for the two operands, and its argument name for the sizes of the result, if any.
_KERNELS: dict[str, tuple[dict[int, Any], dict[str, str], Optional[str]]] = {
    NARROW: (
        {2: tf.raw_ops.Conv2D, 3: tf.raw_ops.Conv3D},
        {WIDE: "input", FILTER: "filter"},
        None,
    ),
    WIDE: (
        {2: tf.raw_ops.Conv2DBackpropInput, 3: tf.raw_ops.Conv3DBackpropInputV2},
        {NARROW: "out_backprop", FILTER: "filter"},
        "input_sizes",
    ),
    FILTER: (
        {2: tf.raw_ops.Conv2DBackpropFilter, 3: tf.raw_ops.Conv3DBackpropFilterV2},
        {WIDE: "input", NARROW: "out_backprop"},
        "filter_sizes",
    ),
}


class ConvNdOperation(Operation):
    """One of the three tensors of a convolution, computed from the other two."""

    takes_padding = True

    def __init__(
        self,
        kind: ConvKind,
        operands: dict[str, Tensor],
        output_shape: Optional[Shape],
        name: Optional[str],
    ):
        """Creates the operation.

        Args:
          kind: a ConvKind.
          operands: Tensors by their role, for two of the three roles.
          output_shape: Shape of the third; None for an image of the default size.
          name: a string or None.

        Raises:
          ValueError: shapes or dtypes do not match, or TensorFlow does not convolve the dtype.
        """
        computed = next(role for role in _KERNELS if role not in operands)
        what = name or kind.names(kind.product(computed))[1]
        tensors = list(operands.values())
        self._check_inputs(tensors, what)
        check_dtypes(what, tensors)
        dtype = tensors[0].dtype
        # Kernels of images that are planes take int32 as well; those of volumes and of filters take
        # floats alone.
        if not dtype.is_floating and ((kind.rank, dtype) != (2, tf.int32) or computed == FILTER):
            raise ValueError(
                f"{what}: TensorFlow does not convolve {dtype.name} in {kind.rank} dimensions; "
                "use mtf.to_float on the inputs"
            )
        shapes = {role: x.shape for role, x in operands.items()}
        if output_shape is not None:
            shapes[computed] = output_shape
        check_shapes(what, kind, shapes)
        if kind.blocks:
            blocks = check_blocks(
                what,
                kind.blocks,
                shapes[kind.input_role if kind.input_role in shapes else kind.output_role],
                shapes[FILTER].to_integer_list[: kind.rank],
                kind.strides,
                kind.padding,
                kind.transposed or kind.input_role not in shapes,
            )
            kind = dataclasses.replace(kind, blocks=blocks)
        if output_shape is None:
            image = shapes[kind.input_role]
            shapes[computed] = kind.image_shape(computed, image, shapes[FILTER])
        super().__init__(tensors, name=what)
        self._form = ConvForm(kind, list(operands), computed, shapes)
        self._strides, self._padding = kind.tf_strides, kind.padding
        self._outputs = [Tensor(self, shapes[computed], dtype)]

    # No plain property, which the constructor could not set: an attribute hides a cached one.
    @functools.cached_property
    def _form(self) -> ConvForm:
        """What it computes, which the constructor sets."""
        raise AttributeError(f"{type(self).__name__} has no _form: call super().__init__")

    def filling(self, x: Tensor) -> tuple[Collection[Dimension], float]:
        """Returns the dimensions of images, and what is summed over: 0 adds nothing to either."""
        # Where whole blocks are padding, these are what windows meet past the end of the image.
        spatial = [*self._spatial(WIDE), *self._spatial(NARROW), *self._form.kind.blocks]
        return [d for d in x.shape if d in spatial or d not in self._outputs[0].shape], 0

    @property
    def _product(self) -> str:
        return self._form.kind.product(self._form.computed)

    def _unsplittable(self) -> list[str]:
        # A window meets all pixels. An image may be split, as its halos are exchanged.
        kind, _, _, shapes = self._form
        within = [
            d for role in (WIDE, NARROW) for d, of in zip(self._spatial(role), kind.blocks) if of
        ]
        return [d.name for d in [*shapes[FILTER][: kind.rank], *within]]

    def needs_whole(self, mesh_impl: MeshImpl) -> Collection[str]:
        """Returns the window's dimensions, and those of images whose halos reach too far."""
        # XLA's partitioner (of jaxlib 0.10) adds up equal products of several processors where it
        # convolves parts of an image. Elsewhere, halos across several slices are more than what an
        # exchange of dimensions moves.
        compiled = getattr(mesh_impl, "is_split_by_compiler", False)  # one from elsewhere lacks it
        halos = self._halos(mesh_impl)
        far = halos if compiled else halos_too_far(mesh_impl, halos)
        image = self._form.joined(mesh_impl).shapes[WIDE]
        names = {image[h.tensor_axis].name for h in far}
        if compiled:
            # Blocks, which are not joined there, have margins of their own.
            names -= {d.name for d in self.blocks}
        return {*super().needs_whole(mesh_impl), *names}

    def _spatial(self, role: str) -> list[Dimension]:
        return self._form.shapes[role][-self._form.kind.rank - 1 : -1]

    def _halos(self, mesh_impl: MeshImpl) -> list[Halo]:
        """Returns what windows need of the wide image, for each spatial dimension."""
        return self._halos_of(self._form.joined(mesh_impl), mesh_impl)

    def _halos_of(self, form: ConvForm, mesh_impl: Any) -> list[Halo]:
        """Returns the halos of a form without blocks."""
        kind, _, _, shapes = form
        wide, narrow = (shapes[role][-kind.rank - 1 : -1] for role in (WIDE, NARROW))
        halos = []
        for i, (w, n, k, s) in enumerate(zip(wide, narrow, shapes[FILTER], kind.strides)):
            # As TensorFlow pads: the odd one comes after.
            padding = max(0, (n.size - 1) * s + k.size - w.size) if kind.padding == "SAME" else 0
            axis = len(shapes[WIDE]) - kind.rank - 1 + i
            halos.append(halo(mesh_impl, axis, w, n, k.size, s, padding // 2))
        # Padding last, so that no neighbor is sent zeros.
        return sorted(halos, key=lambda h: h.mesh_axis is None)

    @property
    def blocks(self) -> list[Dimension]:
        """The dimensions of blocks that images are in."""
        return [d for d in self._form.kind.blocks if d is not None]

    @property
    def rank(self) -> int:
        """The number of spatial dimensions."""
        return self._form.kind.rank

    @property
    def channels_read(self) -> Optional[Dimension]:
        """Of an image that is computed, the channels of the one whose windows are summed."""
        _, _, computed, shapes = self._form
        axes = {NARROW: -2, WIDE: -1}
        return shapes[FILTER][axes[computed]] if computed in axes else None

    @property
    def with_edges(self) -> tuple[Shape, float]:
        """The Shape of the wide image, and the elements beyond it where its blocks are split.

        XLA has the image with its edges and padding; the gradient of one is there once more for
        each of its two ends.
        """
        kind, _, computed, shapes = self._form
        share = 1.0
        blocks = kind.blocks or [None] * kind.rank
        for d, block, window in zip(self._spatial(WIDE), blocks, shapes[FILTER]):
            size = d.size * (1 if block is None else block.size)
            share *= (size + window.size - 1) / size
        wide = shapes[WIDE]
        return wide, wide.size * (share - 1.0 + 2.0 * (computed == WIDE))

    def is_copied_by_xla(self, i: int) -> bool:
        """Returns whether XLA, for CPUs, reads an input in another order of dimensions.

        Args:
          i: the number of the input.
        """
        image = self._form.roles[i] != FILTER
        return image and (self._form.computed == FILTER or bool(self.blocks))

    def share_inside(self, mesh_impl: MeshImpl) -> float:
        """Returns which part of the products of pixels and windows is not with padding.

        Kernels leave out the padding of whole images. Where halos come from other processors, the
        image has its padding in all dimensions, as zeros that look like numbers.

        Args:
          mesh_impl: a MeshImpl.
        """
        form, share = self._form.joined(mesh_impl), 1.0
        halos = {h.tensor_axis: h for h in self._halos_of(form, mesh_impl)}
        if any(h.mesh_axis is not None for h in halos.values()):
            return 1.0
        axes = zip(sorted(halos), form.shapes[FILTER].to_integer_list, form.kind.strides)
        for axis, window, stride in axes:
            h = halos[axis]
            begins = range(-h.left, h.width - window - h.left + 1, stride)
            inside = sum(min(h.size, b + window) - max(0, b) for b in begins)
            share *= inside / (window * len(begins))
        return share

    # -- gradient

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Returns the two other products of the same kind: each role is bilinear in the others."""
        # Each product is linear in either operand, and its gradients are the other two products.
        _, roles, computed, _ = self._form
        # What it computes is an operand of the other two products: there, by its gradient.
        tensors = {**dict(zip(roles, self._inputs)), computed: gradient_of_output(grad_ys)}
        return [self._product_of(role, tensors) for role in roles]

    def _product_of(self, role: str, tensors: dict[str, Tensor]) -> Tensor:
        """Returns the tensor with the given role in this convolution, computed from the others."""
        kind, _, _, shapes = self._form
        rank, transposed = kind.rank, kind.transposed
        movement = (kind.tf_strides, kind.padding)
        if role == FILTER:
            images = tensors[kind.input_role], shapes[FILTER], tensors[kind.output_role]
            op = Conv2or3dBackpropFilterOperation(
                rank, transposed, *images, *movement, blocks=kind.blocks
            )
            return op.outputs[0]
        known_image = NARROW if role == WIDE else WIDE
        usual = kind.image_shape(role, shapes[known_image], shapes[FILTER])
        if role == kind.output_role and usual == shapes[role]:
            cls = _FORWARD[rank, transposed]
            image = tensors[known_image]
            return cls(image, tensors[FILTER], *movement, blocks=kind.blocks).outputs[0]
        # A wide image that has not the default size of a transposed convolution needs its shape.
        # The operation computes an input, which of a transposed convolution is the narrow image.
        return Conv2or3dBackpropInputOperation(
            rank,
            role == NARROW,
            shapes[role],
            tensors[FILTER],
            tensors[known_image],
            *movement,
            blocks=kind.blocks,
        ).outputs[0]

    # -- lowering

    def _summed_axes(self, mesh_impl: MeshImpl) -> list[int]:
        """Returns the mesh axes that split the summed dimensions, in the order of these."""
        _, _, computed, shapes = self._form
        # An image sums over the window, too, which is never split.
        summed = {
            NARROW: shapes[FILTER][-2:-1],
            WIDE: shapes[FILTER][-1:],
            FILTER: shapes[WIDE][:-1],
        }[computed]
        return mesh_impl.splitting_axes(summed)

    def lower(self, lowering: Lowering) -> None:
        """Convolves slice by slice; leaves a partial sum over split summed dimensions."""
        mesh_impl = lowering.mesh_impl(self)
        output = self.outputs[0]
        # By the requested mesh: in the executed one, processors that share a device may be one.
        self._count(lowering, lowering.requested_impl(self))
        self._count_halos(lowering)
        values = [lowering.tensors[x] for x in self.inputs]
        result = self._convolved(lowering.requested_impl(self), mesh_impl, values)
        axes = self._summed_axes(mesh_impl)
        _, _, label = self._form.kind.names(self._product)
        lowering.set_partial_sum(output, result, axes, label)

    def _convolved(self, requested: MeshImpl, mesh_impl: MeshImpl, values: Sequence[Any]) -> Any:
        """Returns the laid-out result, before sums over processors, of laid-out inputs."""
        (kind, roles, computed, shapes), form = self._form, self._form.joined(mesh_impl)
        blocks = kind.blocks
        if not blocks:
            return self._with_halos(mesh_impl, mesh_impl, form, self._halos(mesh_impl), values)
        # What a compiler splits stays a dimension, of the parts: in joined blocks it would be lost.
        if getattr(requested, "is_split_by_compiler", False):
            parts = {
                d.name: parts_along(
                    None if requested.padding(d) else requested.splitting_axis(d), requested.shape
                )
                for d in self.blocks
            }
            if max(parts.values()) > 1:
                return self._of_parts(mesh_impl, parts, values)
        # Windows reach from block to block: as one image, each finds its pixels side by side.
        joined = [
            v if role == FILTER else mesh_impl.slicewise(joiner(shapes[role], blocks), v)
            for role, v in zip(roles, values)
        ]
        result = self._with_halos(mesh_impl, mesh_impl, form, self._halos(mesh_impl), joined)
        if computed == FILTER:
            return result
        sizes = mesh_impl.slice_shape(shapes[computed])
        return mesh_impl.slicewise(cutter(shapes[computed], blocks, sizes), result)

    def _of_parts(
        self, mesh_impl: MeshImpl, parts: Mapping[str, int], values: Sequence[Any]
    ) -> Any:
        """Returns the laid-out result where a compiler splits blocks; see `cut_to_parts`."""
        kind, roles, computed, shapes = self._form
        cuts = {role: cut_to_parts(shapes[role], kind.blocks, parts) for role in (WIDE, NARROW)}
        joined = {role: joined_shape(*cut, mesh_impl) for role, cut in cuts.items()}

        def join(role: str, value: Any) -> Any:
            shape, blocks = cuts[role]
            sizes, joins = mesh_impl.slice_shape(shape), joiner(shape, blocks)
            value = mesh_impl.slicewise(lambda t: joins(tf.reshape(t, constant(sizes))), value)
            return value.of_shape(joined[role])

        values = [v if role == FILTER else join(role, v) for role, v in zip(roles, values)]
        of_parts = [Dimension(name, count) for name, count in parts.items() if count > 1]
        between = BlocksAsProcessors(mesh_impl, joined[WIDE], of_parts)
        halos = [
            dataclasses.replace(h, tensor_axis=h.tensor_axis + len(of_parts))
            for h in self._halos_of(self._form.joined(mesh_impl), between)
        ]
        form = self._form._replace(shapes={**shapes, **joined})
        result = self._with_halos(mesh_impl, between, form, halos, values)
        if computed == FILTER:
            return result
        cuts_again = cutter(*cuts[computed], mesh_impl.slice_shape(cuts[computed][0]))
        sizes = mesh_impl.slice_shape(shapes[computed])
        return mesh_impl.slicewise(lambda t: tf.reshape(cuts_again(t), constant(sizes)), result)

    def _with_halos(
        self,
        mesh_impl: MeshImpl,
        between: Any,
        form: ConvForm,
        halos: Sequence[Halo],
        values: Sequence[Any],
    ) -> Any:
        """Returns what a form gives of laid-out inputs.

        Args:
          mesh_impl: the executed MeshImpl.
          between: what halos are exchanged between: that mesh, or blocks of its tensors.
          form: the ConvForm.
          halos: those of its wide image.
          values: laid-out values, in the order of the form's roles.
        """
        if all(h.mesh_axis is None for h in halos):
            return mesh_impl.slicewise(self._slice_fn(mesh_impl, form), *values)
        # With halos, each slice of the wide image is one by itself, and has every window inside.
        kind, roles, computed, shapes = form
        image = shapes[WIDE].dims
        for h in halos:
            image[h.tensor_axis] = Dimension(f"_reached_{h.tensor_axis}", h.width)
        # Strides of a single window have no meaning. With them, oneDNN (of TensorFlow 2.21) reads
        # beyond an image that has one channel.
        sizes = mesh_impl.slice_shape(shapes[NARROW])[-kind.rank - 1 : -1]
        strides = tuple(1 if n == 1 else s for n, s in zip(sizes, kind.strides))
        form = form._replace(
            kind=dataclasses.replace(kind, padding="VALID", strides=strides),
            shapes={**shapes, WIDE: Shape(image)},
        )
        if computed == WIDE:
            result = mesh_impl.slicewise(self._slice_fn(mesh_impl, form), *values)
            # The transpose of what the other two begin with, in the opposite order.
            for h in reversed(halos):
                result = h.scattered(between, result)
            return result
        operands = [v.to_laid_out_tensor() for v in values]
        place = roles.index(WIDE)
        operands[place] = gathered_along_all(halos, between, operands[place])
        return mesh_impl.slicewise(self._slice_fn(mesh_impl, form), *operands)

    def _slice_fn(self, mesh_impl: MeshImpl, form: ConvForm) -> Callable[..., tf.Tensor]:
        """Returns a function of one processor's slices of the inputs."""
        kind, roles, computed, shapes = form
        kernels, argument_names, sizes_name = _KERNELS[computed]

        def batch_dims(role: str) -> int:
            # The batch dimensions of an image are merged; a filter's window stays as it is.
            return 1 if role == FILTER else len(shapes[role]) - kind.rank - 1

        def apply(*slices: tf.Tensor) -> tf.Tensor:
            merged = {
                role: mesh_impl.merge_dims(x, shapes[role], batch_dims(role))
                for role, x in zip(roles, slices)
            }
            sizes = merged_sizes(mesh_impl, shapes[computed], batch_dims(computed))
            y = None
            # XLA alone is slow without this form.
            if computed == WIDE and mesh_impl.is_compiled_by_xla:
                y = wide_by_filter(kind, merged[NARROW], merged[FILTER], sizes)
            if y is None:
                arguments: dict[str, Any] = {argument_names[r]: x for r, x in merged.items()}
                if sizes_name is not None:
                    arguments[sizes_name] = sizes
                y = kernels[kind.rank](strides=kind.tf_strides, padding=kind.padding, **arguments)
                # Of one row, TensorFlow's optimizer would take what is added to it for a bias.
                y = never_with_bias(y)
            return mesh_impl.split_dims(y, shapes[computed], batch_dims(computed))

        return apply

    # -- cost

    def _multiply_adds(self, image: str, sizes_of: Callable[[Shape], list[int]]) -> int:
        """Returns the number of products of elements of `image` and elements of the filter."""
        *window, wide, narrow = sizes_of(self._form.shapes[FILTER])
        # Each pixel, in each of its channels, meets the window in all channels of the other image.
        pixels = list_product(sizes_of(self._form.shapes[image]))
        return pixels * list_product(window) * (wide if image == NARROW else narrow)

    def _count(self, lowering: Lowering, mesh_impl: MeshImpl) -> None:
        counter, _, _ = self._form.kind.names(self._product)
        # By pixels of the output, as in the classic: of a transposed convolution it counts also
        # what strides leave out.
        image = self._form.kind.output_role
        laid_out = self._multiply_adds(image, mesh_impl.slice_shape) * mesh_impl.size
        unique = self._multiply_adds(image, lambda shape: shape.to_integer_list)
        lowering.add_counter(f"{counter}/{self._product}", laid_out)
        lowering.add_counter(f"{counter}_unique/{self._product}", unique)

    def _count_halos(self, lowering: Lowering) -> None:
        if not self._form.kind.blocks:
            return lowering.count_collectives(self, "halo")
        requested = lowering.requested_impl(self)
        offsets = [offset for h in self._halos(requested) for offset in h.offsets]
        # As in the classic, where shifts of the edges of blocks bring them.
        for offset, moved in zip(offsets, self.cost(requested).collectives):
            lowering.add_counter(f"shift[{offset}]", moved.elements)
        lowering.count_collectives(self, None)

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """Two flops for each multiply-add of every processor, and halos of split images."""
        # Each pixel of the narrow image meets the whole window; those of the wide one need not.
        multiply_adds = self._multiply_adds(NARROW, mesh_impl.slice_shape) * mesh_impl.size
        image, dtype = self._form.joined(mesh_impl).shapes[WIDE], self._outputs[0].dtype
        collectives = halo_collectives(self._halos(mesh_impl), mesh_impl, image, dtype)
        return Cost(2 * multiply_adds, super().cost(mesh_impl).bytes, collectives)

    def cost_key(self) -> tuple:
        """The kind of convolution, and which of its tensors is computed."""
        return self._form.kind, tuple(self._form.roles)

    def begun_sums(self, mesh_impl: MeshImpl) -> dict[Tensor, list[int]]:
        """The output is partial over the mesh axes that split summed dimensions."""
        return {self.outputs[0]: self._summed_axes(mesh_impl)}


class _ForwardConvOperation(ConvNdOperation):
    """A convolution of an image with a filter; subclasses define the kind."""

    _family = (0, False)

    def __init__(
        self,
        conv_input: Tensor,
        conv_filter: Tensor,
        strides: Sequence[int],
        padding: str,
        name: Optional[str] = None,
        blocks: Blocks = (),
    ):
        """Creates the operation.

        Args:
          conv_input: a Tensor [batch..., spatial..., in]; any number of batch dimensions.
          conv_filter: a Tensor [window..., in, out]; [window..., out, in] if transposed.
          strides: a list [1, stride of each spatial dimension..., 1].
          padding: "SAME" or "VALID". The output sizes are those of TensorFlow. For a spatial
            dimension of size n, a stride s and a window k they are ceil(n / s) for "SAME" and
            floor((n - k) / s) + 1 for "VALID"; if transposed, n * s for "SAME" and
            (n - 1) * s + max(k, s) for "VALID".
          name: a string or None.
          blocks: if images are in blocks, as those of `mtf.layers.conv2d_with_blocks`, the
            Dimension of blocks along each spatial dimension, or None for one block.

        Raises:
          ValueError: dtypes, ranks, channels, strides or padding are invalid or do not match, or
            the window is larger than the image.
        """
        kind = conv_kind(name or type(self).__name__, *self._family, strides, padding, blocks)
        operands = {kind.input_role: conv_input, FILTER: conv_filter}
        super().__init__(kind, operands, None, name)
        x, w, y = conv_input.shape.dims, conv_filter.shape.dims, self._outputs[0].shape.dims
        first = -kind.rank - 1
        self._batch_dims, self._in_dim, self._out_dim = x[:first], x[-1], y[-1]
        # For subclasses that read what the classic's constructor sets.
        for letter, *dims in zip("dhw"[-kind.rank :], x[first:-1], w, y[first:-1]):
            for prefix, dim in zip(("in_", "f", "out_"), dims):
                setattr(self, f"_{prefix}{letter}_dim", dim)

    @functools.cached_property
    def _form(self) -> ConvForm:
        """What it computes, if a subclass sets the fields instead of calling this constructor."""
        kind = conv_kind(self.name, *self._family, self._strides, self._padding)
        x, w = self._inputs
        shapes = {kind.input_role: x.shape, FILTER: w.shape}
        form = ConvForm(kind, list(shapes), kind.output_role, shapes)
        return form._replace(shapes={**shapes, form.computed: self._outputs[0].shape})


class Conv2dOperation(_ForwardConvOperation):
    """Convolves [batch..., h, w, in] with [fh, fw, in, out] to [batch..., h, w, out]."""

    _family = (2, False)


class Conv3dOperation(_ForwardConvOperation):
    """Convolves [batch..., d, h, w, in] with [fd, fh, fw, in, out] to [batch..., d, h, w, out]."""

    _family = (3, False)


class Conv2dTransposeOperation(_ForwardConvOperation):
    """Transposed convolution of [batch..., h, w, in] with [fh, fw, out, in]."""

    _family = (2, True)


class Conv3dTransposeOperation(_ForwardConvOperation):
    """Transposed convolution of [batch..., d, h, w, in] with [fd, fh, fw, out, in]."""

    _family = (3, True)


# At this line it has the four classes of this module, and no subclass of the user's own.
_FORWARD = {cls._family: cls for cls in _ForwardConvOperation.__subclasses__()}


class Conv2or3dBackpropInputOperation(ConvNdOperation):
    """The gradient of a convolution with respect to its input, of shape `input_shape`."""

    def __init__(
        self,
        conv_dimension: int,
        is_transpose: bool,
        input_shape: ShapeLike,
        conv_filter: Tensor,
        dy: Tensor,
        strides: Sequence[int],
        padding: str,
        name: Optional[str] = None,
        blocks: Blocks = (),
    ):
        """Creates the operation.

        Args:
          conv_dimension: number of spatial dimensions, 2 or 3.
          is_transpose: whether it is a transposed convolution.
          input_shape: a Shape [batch..., spatial..., in], that of the convolution's input.
          conv_filter: a Tensor [window..., in, out]; [window..., out, in] if transposed.
          dy: a Tensor [batch..., spatial..., out], the gradient of the convolution's output.
          strides: a list [1, stride of each spatial dimension..., 1].
          padding: "SAME" or "VALID".
          name: a string or None.
          blocks: the Dimensions of blocks, or None, if images are in blocks.

        Raises:
          ValueError: dtypes, shapes, strides or padding are invalid or do not match.
        """
        what = name or type(self).__name__
        kind = conv_kind(what, conv_dimension, is_transpose, strides, padding, blocks)
        # In the order of the operation's inputs, which is that of its gradients.
        operands = {FILTER: conv_filter, kind.output_role: dy}
        super().__init__(kind, operands, convert_to_shape(input_shape), name)

    # The base class's: here the argument has the name that it has in the classic.
    def gradient(self, unused_grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Returns the gradients of the filter and of the output's gradient."""
        return super().gradient(unused_grad_ys)


class Conv2or3dBackpropFilterOperation(ConvNdOperation):
    """The gradient of a convolution with respect to its filter, of shape `filter_shape`."""

    def __init__(
        self,
        conv_dimension: int,
        is_transpose: bool,
        conv_input: Tensor,
        filter_shape: ShapeLike,
        dy: Tensor,
        strides: Sequence[int],
        padding: str,
        name: Optional[str] = None,
        blocks: Blocks = (),
    ):
        """Creates the operation.

        Args:
          conv_dimension: number of spatial dimensions, 2 or 3.
          is_transpose: whether it is a transposed convolution.
          conv_input: a Tensor [batch..., spatial..., in], the convolution's input.
          filter_shape: a Shape [window..., in, out]; [window..., out, in] if transposed.
          dy: a Tensor [batch..., spatial..., out], the gradient of the convolution's output.
          strides: a list [1, stride of each spatial dimension..., 1].
          padding: "SAME" or "VALID".
          name: a string or None.
          blocks: the Dimensions of blocks, or None, if images are in blocks.

        Raises:
          ValueError: dtypes, shapes, strides or padding are invalid or do not match.
        """
        what = name or type(self).__name__
        kind = conv_kind(what, conv_dimension, is_transpose, strides, padding, blocks)
        operands = {kind.input_role: conv_input, kind.output_role: dy}
        super().__init__(kind, operands, convert_to_shape(filter_shape), name)

    # The base class's: here the argument has the name that it has in the classic.
    def gradient(self, unused_grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Returns the gradients of the input and of the output's gradient."""
        return super().gradient(unused_grad_ys)


def _named(fn: Callable, rank: int, transposed: bool, end: str) -> Callable:
    """Sets the public name of a function, and the name of its convolution in the docstring."""
    family = f"conv{rank}d" + ("_transpose" if transposed else "")
    fn.__name__ = fn.__qualname__ = f"{family}_{end}"
    fn.__doc__ = (fn.__doc__ or "").replace("<a convolution>", family)
    return fn


def _backprop_input(rank: int, transposed: bool) -> Callable:
    def backprop_input(
        input_shape: ShapeLike,
        conv_filter: Tensor,
        dy: Tensor,
        strides: Sequence[int],
        padding: str,
        name: Optional[str] = None,
    ) -> Tensor:
        """Returns the gradient with respect to the input of <a convolution>.

        See Conv2or3dBackpropInputOperation.
        """
        return Conv2or3dBackpropInputOperation(
            rank, transposed, input_shape, conv_filter, dy, strides, padding, name=name
        ).outputs[0]

    return _named(backprop_input, rank, transposed, "backprop_input")


def _backprop_filter(rank: int, transposed: bool) -> Callable:
    def backprop_filter(
        conv_input: Tensor,
        filter_shape: ShapeLike,
        dy: Tensor,
        strides: Sequence[int],
        padding: str,
        name: Optional[str] = None,
    ) -> Tensor:
        """Returns the gradient with respect to the filter of <a convolution>.

        See Conv2or3dBackpropFilterOperation.
        """
        return Conv2or3dBackpropFilterOperation(
            rank, transposed, conv_input, filter_shape, dy, strides, padding, name=name
        ).outputs[0]

    return _named(backprop_filter, rank, transposed, "backprop_filter")


conv2d_backprop_input = _backprop_input(2, False)
conv3d_backprop_input = _backprop_input(3, False)
conv2d_transpose_backprop_input = _backprop_input(2, True)
conv3d_transpose_backprop_input = _backprop_input(3, True)
conv2d_backprop_filter = _backprop_filter(2, False)
conv3d_backprop_filter = _backprop_filter(3, False)
conv2d_transpose_backprop_filter = _backprop_filter(2, True)
conv3d_transpose_backprop_filter = _backprop_filter(3, True)
