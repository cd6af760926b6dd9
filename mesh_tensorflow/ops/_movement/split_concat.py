"""Slices, padding, and tensors that are split or joined along a dimension."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Optional, Union

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.errors import check_choice, check_whole, dims_text, is_whole
from mesh_tensorflow._core.operation import Cost, Operation, Tensor, gradient_of_output
from mesh_tensorflow._core.shape import Dimension, DimensionLike, Shape, check_names_differ
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow.ops._elementwise.binary import check_dtypes
from mesh_tensorflow.ops._movement.halo import (
    Halo,
    halo,
    halo_collectives,
    halos_too_far,
    paddings_along,
)
from mesh_tensorflow.ops._source import check_dimension, or_zeros

__all__ = [
    "ConcatOperation",
    "PadOperation",
    "SliceOperation",
    "SplitOperation",
    "StackOperation",
    "UnstackOperation",
    "concat",
    "mtf_slice",
    "pad",
    "split",
    "stack",
    "unstack",
]


def _resized(shape: Shape, axis: int, size: int) -> Shape:
    # By position: of two dimensions with one name, as kernels of convolutions have, one changes.
    dims = shape.dims
    dims[axis] = Dimension(dims[axis].name, size)
    return Shape(dims)


class _RangeOperation(Operation):
    """Elements of one dimension in their order, from a place that may be outside of it."""

    takes_padding = True
    costs_by = ("_dim", "_begin")

    def __init__(self, x: Tensor, dim: Dimension, begin: int, size: int, name: str):
        super().__init__([x], name=name)
        self._dim, self._begin = dim, begin  # where the range begins, in the input
        self._axis = x.shape.dims.index(dim)
        self._outputs = [Tensor(self, _resized(x.shape, self._axis, size), x.dtype)]
        self._output_dim = self._outputs[0].shape[self._axis]

    def _unsplittable(self) -> Iterable[str]:
        # A search of layouts leaves it whole, as the classic's does.
        return [self._dim.name]

    def _halo(self, mesh_impl: MeshImpl) -> Halo:
        """Returns what the slices of the output need of those of the input."""
        new_dim = self._output_dim
        # Nothing is taken from outside, but next to padding: there, numbers of the program.
        inside = 0 <= self._begin <= self._dim.size - new_dim.size
        return halo(mesh_impl, self._axis, self._dim, new_dim, before=-self._begin, wrap=inside)

    def needs_whole(self, mesh_impl: MeshImpl) -> Collection[str]:
        """Returns the dimension if its elements move by more than a slice."""
        far = halos_too_far(mesh_impl, [self._halo(mesh_impl)])
        return super().needs_whole(mesh_impl) if far else frozenset()

    def _lower_range(self, lowering: mtf.Lowering, whole_fn: Callable) -> None:
        """Takes the range with the rows of neighbors, or of slices that are whole along it."""
        mesh_impl = lowering.mesh_impl(self)
        lowering.count_collectives(self, "halo")
        h = self._halo(mesh_impl)
        if h.mesh_axis is None:
            return self._lower_slices(lowering, whole_fn)
        value = lowering.tensors[self._inputs[0]].to_laid_out_tensor()
        lowering.set_tensor_lowering(self._outputs[0], h.gathered(mesh_impl, value))

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """Its bytes, and the rows that move between neighbors."""
        x = self._inputs[0]
        moved = halo_collectives([self._halo(mesh_impl)], mesh_impl, x.shape, x.dtype)
        return super().cost(mesh_impl) + Cost(collectives=moved)


class SliceOperation(_RangeOperation):
    """A range along a dimension."""

    def __init__(
        self, x: Tensor, begin: int, size: int, slice_dim_name: str, name: Optional[str] = None
    ):
        """Creates the operation; see `mtf_slice`."""
        dim = x.shape.get_dim_by_name(slice_dim_name)
        check_whole("slice", "begin", begin, least=0)
        check_whole("slice", "size", size, least=-1)
        if size == -1:
            size = dim.size - begin
        if size < 0 or begin + size > dim.size:
            raise ValueError(
                f"{name or 'slice'}: {begin} .. {begin + size} is not within "
                f"{dims_text([dim])} of {x.name} {x.shape}"
            )
        super().__init__(x, dim, begin, size, name or "slice")
        self._slice_dim = self._output_dim  # its name in the classic, for subclasses of users

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Pads dy with zeros where nothing was taken."""
        # x[begin + i] is y[i], so dx is dy with zeros on both sides.
        after = self._dim.size - self._begin - self._outputs[0].shape[self._axis].size
        return [pad(gradient_of_output(grad_ys), [self._begin, after], self._dim.name)]

    def lower(self, lowering: mtf.Lowering) -> None:
        """Slices along the dimension."""
        # Of the slice: a processor takes all of its part of dimensions that are split.
        sizes = lowering.mesh_impl(self).slice_shape(self.outputs[0].shape)
        begin = [self._begin if axis == self._axis else 0 for axis in range(len(sizes))]
        self._lower_range(lowering, lambda t: tf.slice(t, begin, sizes))


def along_whole(
    what: str,
    tf_fn: Callable[[tf.Tensor, int], tf.Tensor],
    x: Tensor,
    dim: Dimension,
    size: Optional[int] = None,
    dtype: Optional[tf.DType] = None,
) -> Tensor:
    """Returns what a TensorFlow function makes of a dimension, which it needs whole.

    Args:
      what: the name of the operation.
      tf_fn: a function of a tensor and an axis.
      x: a Tensor.
      dim: a Dimension of it.
      size: the size that the dimension then has; as it was if None.
      dtype: the dtype of the result; that of `x` if None.
    """
    check_dimension(what, x, dim)
    axis, others = x.shape.dims.index(dim), [d for d in x.shape if d != dim]
    shape = x.shape if size is None else _resized(x.shape, axis, size)
    return mtf.slicewise(lambda t: tf_fn(t, axis), [x], shape, dtype, others, name=what)


def mtf_slice(
    x: Tensor,
    begin: int,
    size: int,
    slice_dim_name: str,
    name: Optional[str] = None,
    stride: int = 1,
) -> Tensor:
    """Returns a range along a dimension; exported as mtf.slice.

    >>> x = mtf.range(mesh, mtf.Dimension("d", 5), tf.int32)
    >>> print(mtf.slice(x, 1, 3, "d").numpy(), mtf.slice(x, 0, 3, "d", stride=2).numpy())
    [1 2 3] [0 2 4]

    Args:
      x: a Tensor.
      begin: the first index of the range.
      size: the number of elements; -1 for all that follow.
      slice_dim_name: a string. Where a layout splits it, slices are exchanged before and after.
      name: a string or None.
      stride: of this many elements the first one is taken.

    Raises:
      ValueError: the range is not within the dimension, or the stride is none.
    """
    if stride == 1:
        return SliceOperation(x, begin, size, slice_dim_name, name=name).outputs[0]
    what, dim = name or "slice", x.shape.get_dim_by_name(slice_dim_name)
    check_whole(what, "stride", stride)
    size = -(-(dim.size - begin) // stride) if size == -1 else size
    end = begin + (size - 1) * stride + 1 if size else begin
    if begin < 0 or size < 0 or end > dim.size:
        raise ValueError(
            f"{what}: {size} elements from {begin}, every {stride}, are not within "
            f"{dims_text([dim])} of {x.name} {x.shape}"
        )
    return along_whole(
        what, lambda t, axis: t[(slice(None),) * axis + (slice(begin, end, stride),)], x, dim, size
    )


class PadOperation(_RangeOperation):
    """A Tensor with zeros before and after it along a dimension."""

    def __init__(
        self, x: Tensor, paddings: Sequence[int], pad_dim_name: str, name: Optional[str] = None
    ):
        """Creates the operation; see `pad`."""
        dim = x.shape.get_dim_by_name(pad_dim_name)
        if len(paddings) != 2 or min(paddings) < 0:
            raise ValueError(
                f"{name or 'pad'}: paddings must be two numbers [before, after] of 0 or more, "
                f"got {paddings!r} for {dims_text([dim])} of {x.name} {x.shape}"
            )
        before, after = self._paddings = list(paddings)
        super().__init__(x, dim, -before, before + dim.size + after, name or "pad")

    def filling(self, x: Tensor) -> tuple[Collection[Dimension], float]:
        """Returns the dimension: past its end there are zeros."""
        return [self._dim], 0

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Takes from dy what was there before padding."""
        dy = gradient_of_output(grad_ys)
        # y[before + i] is x[i], so dx is that range of dy.
        return [mtf_slice(dy, self._paddings[0], self._dim.size, self._dim.name)]

    def lower(self, lowering: mtf.Lowering) -> None:
        """Pads along the dimension."""
        paddings = paddings_along(self.outputs[0].shape.ndims, self._axis, *self._paddings)
        self._lower_range(lowering, lambda t: tf.pad(t, paddings))


def pad(
    x: Tensor,
    paddings: Sequence[int],
    dim_name: str,
    name: Optional[str] = None,
    mode: str = "constant",
) -> Tensor:
    """Returns a Tensor with zeros, or with elements of its own, before and after it.

    >>> x = mtf.ones(mesh, "d:2")
    >>> print(mtf.pad(x, [1, 2], "d").numpy())
    [0. 1. 1. 0. 0.]
    >>> x = mtf.range(mesh, mtf.Dimension("d", 3), tf.int32)
    >>> print(mtf.pad(x, [2, 1], "d", mode="reflect").numpy())
    [2 1 0 1 2 1]
    >>> print(mtf.pad(x, [2, 1], "d", mode="edge").numpy())
    [0 0 0 1 2 2]

    Args:
      x: a Tensor.
      paddings: [number of elements before, number of elements after].
      dim_name: a string. Where a layout splits it, slices are exchanged before and after.
      name: a string or None.
      mode: "constant" for zeros; "reflect" for the elements in the opposite order, from the second
        on; or "edge" for the first and the last one.

    Raises:
      ValueError: the paddings are not two numbers of 0 or more, or more than "reflect" has elements
        for, or the mode is none.
    """
    what = name or "pad"
    check_choice(what, "mode", mode, ["constant", *_PADS])
    if mode == "constant":
        return PadOperation(x, paddings, dim_name, name=name).outputs[0]
    fn, dim = _PADS[mode], x.shape.get_dim_by_name(dim_name)
    least = 1 + max(paddings, default=0) if mode == "reflect" else 1
    if len(paddings) != 2 or min(paddings) < 0 or dim.size < least:
        raise ValueError(
            f"{what}: paddings must be two numbers [before, after] from 0, in mode {mode!r} for a "
            f"dimension of {least} or more, got {paddings!r} for {dims_text([dim])} of {x.name} "
            f"{x.shape}"
        )
    before, after = paddings
    padded = functools.partial(fn, before, after)
    return along_whole(what, padded, x, dim, before + dim.size + after)


def _reflected(before: int, after: int, t: tf.Tensor, axis: int) -> tf.Tensor:
    return tf.pad(t, paddings_along(t.shape.ndims, axis, before, after), mode="REFLECT")


def _with_edges(before: int, after: int, t: tf.Tensor, axis: int) -> tf.Tensor:
    front = (slice(None),) * axis
    first, last = t[front + (slice(0, 1),)], t[front + (slice(-1, None),)]
    return tf.concat([*[first] * before, t, *[last] * after], axis)


_PADS = {"reflect": _reflected, "edge": _with_edges}


class ConcatOperation(Operation):
    """Tensors concatenated along a dimension that is not split."""

    takes_padding = True

    def __init__(
        self,
        xs: Sequence[Tensor],
        concat_dim_name: Union[str, Dimension],
        name: Optional[str] = None,
    ):
        """Creates the operation; see `concat`."""
        if not xs:
            raise ValueError("concat needs at least one tensor")
        check_dtypes(name or "concat", xs)
        first = xs[0].shape
        dim: Any = concat_dim_name
        if isinstance(concat_dim_name, Dimension):
            concat_dim_name = concat_dim_name.name
        # A Dimension tells two of one name apart, but callers also give that of the result.
        if dim not in first.dims:
            dim = first.get_dim_by_name(concat_dim_name)
        self._axis = first.dims.index(dim)
        for x in xs[1:]:
            rest = x.shape.dims[: self._axis] + x.shape.dims[self._axis + 1 :]
            # Slices are joined by position, so the dimensions must be in one order, too.
            if (
                x.shape.dimension_names != first.dimension_names
                or rest != first.dims[: self._axis] + first.dims[self._axis + 1 :]
            ):
                raise ValueError(
                    f"{name or 'concat'}: shapes must agree except for the size of "
                    f"{concat_dim_name!r}: {xs[0].name} {first} and {x.name} {x.shape}"
                )
        super().__init__(xs, name=name or "concat")
        self._concat_dim_name = concat_dim_name
        self._input_sizes = [x.shape[self._axis].size for x in xs]
        shape = _resized(first, self._axis, sum(self._input_sizes))
        self._outputs = [Tensor(self, shape, xs[0].dtype)]

    def _unsplittable(self) -> Iterable[str]:
        # Joined slice by slice, parts of the inputs would alternate in the whole.
        return [self._concat_dim_name]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Splits dy into the sizes of the inputs."""
        dy = gradient_of_output(grad_ys)
        # y is x1, x2, ... in a row, so dx1, dx2, ... are dy cut at the same places.
        return split(dy, self.outputs[0].shape[self._axis], self._input_sizes)

    def lower(self, lowering: mtf.Lowering) -> None:
        """Concatenates slice by slice; the dimension is not split."""
        self._lower_slices(lowering, lambda *pieces: tf.concat(pieces, self._axis))


def concat(xs: Sequence[Tensor], concat_dim_name: str, name: Optional[str] = None) -> Tensor:
    """Returns Tensors concatenated along a dimension.

    >>> a, b = mtf.zeros(mesh, "d:1"), mtf.ones(mesh, "d:2")
    >>> print(mtf.concat([a, b], "d").numpy())
    [0. 1. 1.]

    Args:
      xs: a list of Tensors whose shapes are equal except for the size of that dimension.
      concat_dim_name: a string. Where a layout splits it, slices are exchanged before and after.
      name: a string or None.

    Raises:
      ValueError: the shapes or dtypes differ.
    """
    return ConcatOperation(xs, concat_dim_name, name).outputs[0]


class SplitOperation(Operation):
    """A Tensor split along a dimension that is not split over the mesh."""

    takes_padding = True

    def __init__(
        self,
        x: Tensor,
        split_dim: DimensionLike,
        num_or_size_splits: Union[int, Sequence[int]],
        name: Optional[str] = None,
    ):
        """Creates the operation; see `split`."""
        split_dim = check_dimension(name or "split", x, split_dim)
        splits: Any = num_or_size_splits
        if np.ndim(splits) == 0:
            check_whole(name or "split", "num_or_size_splits", splits, ", or a list of sizes")
            n = int(splits)
            if split_dim.size % n:
                raise ValueError(
                    f"{name or 'split'}: {dims_text([split_dim])} of {x.name} {x.shape} cannot be "
                    f"cut into {n} equal parts; give a list of sizes, or a divisor of "
                    f"{split_dim.size}"
                )
            sizes = [split_dim.size // n] * n
        else:
            sizes = list(splits)
            if not all(is_whole(size, 0) for size in sizes):
                raise ValueError(
                    f"{name or 'split'}: the sizes {sizes} must be integers of 0 or more, of "
                    f"{dims_text([split_dim])} of {x.name} {x.shape}"
                )
            if sum(sizes) != split_dim.size:
                raise ValueError(
                    f"{name or 'split'}: the sizes {sizes} add up to {sum(sizes)}, not to "
                    f"{dims_text([split_dim])} of {x.name} {x.shape}"
                )
        super().__init__([x], name=name or "split")
        self._split_dim = split_dim
        self._output_sizes = sizes
        self._axis = x.shape.dims.index(split_dim)
        self._outputs = [
            Tensor(self, _resized(x.shape, self._axis, size), x.dtype, index=i)
            for i, size in enumerate(sizes)
        ]

    def _unsplittable(self) -> Iterable[str]:
        # Each processor would cut its own slice, but outputs are parts of the whole.
        return [self._split_dim.name]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Concatenates the gradients, zeros for missing ones."""
        # By Dimension: another one may have the same name.
        part = self.outputs[0].shape[self._axis]
        # The places of the others in what is joined depend on those that are None.
        return [ConcatOperation(or_zeros(grad_ys, self.outputs), part).outputs[0]]

    def lower(self, lowering: mtf.Lowering) -> None:
        """Splits slice by slice; the dimension is not split."""
        equal = len(set(self._output_sizes)) == 1
        # By their number, tf.split makes equal parts without a tensor of sizes.
        how = len(self._output_sizes) if equal else self._output_sizes
        self._lower_slices(lowering, lambda t: tuple(tf.split(t, how, axis=self._axis)))


def split(
    x: Tensor,
    split_dim: DimensionLike,
    num_or_size_splits: Union[int, Sequence[int]],
    name: Optional[str] = None,
) -> list[Tensor]:
    """Splits a Tensor along a dimension.

    >>> d = mtf.Dimension("d", 4)
    >>> a, b = mtf.split(mtf.range(mesh, d, tf.int32), d, 2)
    >>> print(a.numpy(), b.numpy(), b.shape)
    [0 1] [2 3] Shape[d=2]

    Args:
      x: a Tensor.
      split_dim: a Dimension of it, or its name. Where a layout splits it, slices are exchanged
        before and after.
      num_or_size_splits: the number of equal parts, or a list of sizes.
      name: a string or None.

    Returns:
      A list of Tensors; the dimension keeps its name.

    Raises:
      ValueError: the sizes do not add up to that of the dimension.
    """
    return SplitOperation(x, split_dim, num_or_size_splits, name=name).outputs


class StackOperation(Operation):
    """Tensors of one shape stacked along a new dimension."""

    takes_padding = True

    def __init__(self, xs: Sequence[Tensor], dim_name: str, axis: int, name: Optional[str] = None):
        """Creates the operation; see `stack`."""
        if not xs:
            raise ValueError("stack needs at least one tensor")
        check_dtypes(name or "stack", xs)
        for x in xs[1:]:
            if x.shape != xs[0].shape:
                raise ValueError(
                    f"{name or 'stack'}: shapes must be equal: {xs[0].name} {xs[0].shape} and "
                    f"{x.name} {x.shape}"
                )
        dims = xs[0].shape.dims
        if not -len(dims) - 1 <= axis <= len(dims):
            raise ValueError(
                f"{name or 'stack'}: axis={axis} is no place in {xs[0].shape}: a new dimension can "
                f"stand at 0 to {len(dims)}, or at {-len(dims) - 1} to -1 counted from the end"
            )
        # Counted in the result, which has one dimension more: -1 is the place after the last.
        axis = axis if axis >= 0 else len(dims) + 1 + axis
        dims.insert(axis, Dimension(dim_name, len(xs)))
        check_names_differ(name or "stack", Shape(dims), xs[0].shape)
        super().__init__(xs, name=name or "stack")
        self._axis = axis
        self._new_dim = dims[axis]
        self._outputs = [Tensor(self, Shape(dims), xs[0].dtype)]

    def _unsplittable(self) -> Iterable[str]:
        # Each processor has a slice of every input, and so all of the new dimension.
        return [self._new_dim.name]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Unstacks dy."""
        return unstack(gradient_of_output(grad_ys), self._new_dim)

    def lower(self, lowering: mtf.Lowering) -> None:
        """Stacks slice by slice; the new dimension is not split."""
        axis = self.outputs[0].shape.dims.index(self._new_dim)
        self._lower_slices(lowering, lambda *pieces: tf.stack(pieces, axis))


def stack(xs: Sequence[Tensor], dim_name: str, axis: int = 0, name: Optional[str] = None) -> Tensor:
    """Returns Tensors of one shape stacked along a new dimension.

    >>> a, b = mtf.zeros(mesh, "d:3"), mtf.ones(mesh, "d:3")
    >>> print(mtf.stack([a, b], "row").numpy())
    [[0. 0. 0.]
     [1. 1. 1.]]

    Args:
      xs: a list of Tensors.
      dim_name: name of the new dimension. Where a layout splits it, each processor keeps a part.
      axis: the index of the new dimension; counted from the end if negative.
      name: a string or None.

    Raises:
      ValueError: the shapes or dtypes differ, or the axis is out of range.
    """
    return StackOperation(xs, dim_name, axis, name=name).outputs[0]


class UnstackOperation(Operation):
    """The Tensors that a Tensor consists of along a dimension, which is removed."""

    takes_padding = True

    def __init__(self, x: Tensor, dim: DimensionLike, name: Optional[str] = None):
        """Creates the operation; see `unstack`."""
        dim = check_dimension(name or "unstack", x, dim)
        super().__init__([x], name=name or "unstack")
        self._dim = dim
        self._axis = x.shape.dims.index(dim)
        shape = x.shape - dim
        self._outputs = [Tensor(self, shape, x.dtype, index=i) for i in range(dim.size)]

    def _unsplittable(self) -> Iterable[str]:
        # Else each output would be in the slices of some processors, and not in others.
        return [self._dim.name]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Stacks the gradients, zeros for missing ones."""
        return [stack(or_zeros(grad_ys, self.outputs), self._dim.name, self._axis)]

    def lower(self, lowering: mtf.Lowering) -> None:
        """Unstacks slice by slice; the dimension is not split."""
        self._lower_slices(lowering, lambda t: tuple(tf.unstack(t, axis=self._axis)))


def unstack(x: Tensor, dim: DimensionLike, name: Optional[str] = None) -> list[Tensor]:
    """Returns the Tensors that `x` consists of along a dimension, without that dimension.

    >>> x = mtf.constant(mesh, [[1.0, 2.0], [3.0, 5.0]], "row:2,col:2")
    >>> a, b = mtf.unstack(x, mtf.Dimension("row", 2))
    >>> print(a.numpy(), b.numpy())
    [1. 2.] [3. 5.]

    Args:
      x: a Tensor.
      dim: a Dimension of it, or its name. Where a layout splits it, slices are exchanged or
        gathered.
      name: a string or None.
    """
    return UnstackOperation(x, dim, name=name).outputs
