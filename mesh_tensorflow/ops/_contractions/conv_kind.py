"""ConvKind: the shapes, names and checks of the three tensors of a convolution."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from mesh_tensorflow._core.errors import dims_text, table_lookup
from mesh_tensorflow._core.shape import Dimension, Shape

__all__: list[str] = []

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
    """

    rank: int
    transposed: bool
    strides: tuple[int, ...]
    padding: str

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


def conv_kind(
    what: str, rank: int, transposed: bool, strides: Sequence[int], padding: str
) -> ConvKind:
    """Returns a ConvKind; `what` names the operation in messages.

    Raises:
      ValueError: TensorFlow does not support the rank, the strides or the padding.
    """
    if rank not in _SPATIAL:
        raise ValueError(f"{what}: a convolution has 2 or 3 spatial dimensions, not {rank!r}")
    fits = isinstance(strides, (list, tuple)) and len(strides) == rank + 2
    fits = fits and all(isinstance(s, int) and s > 0 for s in strides)
    if not fits or strides[0] != 1 or strides[-1] != 1:
        raise ValueError(
            f"{what}: strides must be [1, {', '.join('s' + c for c in _SPATIAL[rank])}, 1], "
            f"whole numbers, 1 for batch and channels, but they are {strides!r}"
        )
    table_lookup(_NARROW_SIZE, padding, f"padding of {what}")
    return ConvKind(rank, bool(transposed), tuple(strides[1:-1]), padding)


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
    if WIDE in shapes:
        fitting = kind.image_shape(NARROW, shapes[WIDE], filter_shape)
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
