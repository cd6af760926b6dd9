"""Operations on indices: one-hot, gather, cumulative sums, top-k, and orders."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.errors import dims_text, slip
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow._core.layout import padded_dims
from mesh_tensorflow._core.operation import Collective, Cost, Operation, Tensor, check_real
from mesh_tensorflow._core.shape import (
    Dimension,
    DimensionLike,
    Shape,
    ShapeLike,
    check_names_differ,
    convert_to_dimension,
    convert_to_shape,
)
from mesh_tensorflow._mesh.mesh_impl import LaidOutTensor, MeshImpl
from mesh_tensorflow.ops._movement import gather as _gather
from mesh_tensorflow.ops._movement.split_concat import along_whole
from mesh_tensorflow.ops._source import (
    check_dimension,
    coordinate_along,
    given_dimension,
    over_a_dimension,
    scalar_indices,
)

__all__ = [
    "OneHotOperation",
    "TopKOperation",
    "argmax",
    "argsort",
    "cumsum",
    "gather",
    "nth_largest_element",
    "nth_smallest_element",
    "one_hot",
    "reverse",
    "sort",
    "top_1",
    "top_k",
]


# Temporary name of a dimension with the same name as the one that it indexes.
_CHOSEN = "_chosen"


class OneHotOperation(Operation):
    """One value at the index, another elsewhere, along a new last dimension."""

    takes_padding = True

    def __init__(
        self,
        indices: Tensor,
        output_dim: Dimension,
        on_value: float,
        off_value: float,
        dtype: tf.DType,
        name: Optional[str] = None,
    ):
        """Creates the operation; see `one_hot`."""
        if not indices.dtype.is_integer:
            raise ValueError(
                f"{name or 'one_hot'}: indices must be integers: {indices.name} {indices.shape} "
                f"is {indices.dtype.name}; mtf.to_int32 converts it"
            )
        super().__init__([indices], name=name or "one_hot")
        self._output_dim = output_dim
        self._on_value = on_value
        self._off_value = off_value
        self._dtype = tf.as_dtype(dtype)
        self._outputs = [Tensor(self, indices.shape + output_dim, self._dtype)]

    @property
    def has_gradient(self) -> bool:
        """False: the input is an integer."""
        return False

    def lower(self, lowering: mtf.Lowering) -> None:
        """Makes each slice from the indices less the slice's first position."""
        mesh_impl = lowering.mesh_impl(self)
        y = self.outputs[0]
        depth = mesh_impl.slice_shape(y.shape)[-1]

        def make(indices: tf.Tensor, part: Optional[tf.Tensor] = None) -> tf.Tensor:
            # tf.one_hot has kernels for these; and in a narrow dtype the difference below would
            # wrap around, into the range of another part.
            if indices.dtype not in (tf.int32, tf.int64):
                indices = tf.cast(indices, tf.int64 if indices.dtype.size >= 4 else tf.int32)
            if part is not None:
                # An id of another part is out of range here, so all of its row is off_value.
                indices = indices - tf.cast(part * depth, indices.dtype)
            on, off = (tf.cast(v, self._dtype) for v in (self._on_value, self._off_value))
            return tf.one_hot(indices, depth, on, off, axis=-1, dtype=self._dtype)

        self._lower_slices(lowering, make, *coordinate_along(mesh_impl, self._output_dim))


def one_hot(
    indices: Tensor,
    output_dim: Dimension,
    on_value: float = 1.0,
    off_value: float = 0.0,
    dtype: tf.DType = tf.float32,
    name: Optional[str] = None,
) -> Tensor:
    """Returns a one-hot encoding of indices along a new last dimension.

    It is `on_value` at the index and `off_value` elsewhere; an index out of range gives `off_value`
    everywhere.

    >>> ids = mtf.constant(mesh, [2, 0], "batch:2", tf.int32)
    >>> print(mtf.one_hot(ids, mtf.Dimension("vocab", 3)).numpy())
    [[0. 0. 1.]
     [1. 0. 0.]]

    Args:
      indices: an integer Tensor.
      output_dim: a Dimension.
      on_value: a number.
      off_value: a number.
      dtype: a dtype.
      name: a string or None.

    Returns:
      A Tensor of shape [indices..., output_dim].
    """
    output_dim = convert_to_dimension(output_dim)
    return OneHotOperation(indices, output_dim, on_value, off_value, dtype, name).outputs[0]


@leaves_no_node
def gather(
    weights: Tensor,
    indices: Union[Tensor, int, tf.Tensor],
    dim: Dimension,
    output_shape: Optional[ShapeLike] = None,
) -> Tensor:
    """Returns the entries of `weights` at `indices` along a dimension.

    The result is that of an einsum with a one-hot: an index out of range gives zeros, dimensions
    that `weights` and `indices` share are matched, and `weights` must be finite everywhere.

    >>> table = mtf.constant(mesh, [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "vocab:3,d:2")
    >>> ids = mtf.constant(mesh, [2, 0], "batch:2", tf.int32)
    >>> print(mtf.gather(table, ids, mtf.Dimension("vocab", 3)).numpy())
    [[5. 6.]
     [1. 2.]]

    Args:
      weights: a Tensor.
      indices: an integer Tensor, an int, or an integer tf scalar.
      dim: a Dimension of `weights`. If `weights` lacks it, each index in range gives all of
        `weights`, with a warning.
      output_shape: a Shape; if None, the dimensions of `indices`, then those of `weights`.
    """
    dim = given_dimension("gather", weights, dim)
    if dim not in weights.shape:
        slip(
            f"gather: {weights.name} {weights.shape} has no dimension {dims_text([dim])}, so "
            "nothing is picked: each index gives all of it. Both the name and the size must agree",
            key="gather",
        )
    indices = scalar_indices(weights.mesh, indices)
    # Products and sums over processors are of numbers.
    if weights.dtype == tf.bool:
        return mtf.cast(gather(mtf.to_float(weights), indices, dim, output_shape), tf.bool)
    if output_shape is None:
        rest = weights.shape - [dim]
        output_shape = indices.shape + [d for d in rest if d not in indices.shape]
    output_shape = convert_to_shape(output_shape)
    if _gather.is_worthwhile(weights, indices, dim, output_shape):
        return _gather.GatherOperation(weights, indices, dim, output_shape).outputs[0]
    alike = [d for d in indices.shape if d.name == dim.name and d != dim]
    if alike:
        # The one-hot would have two dimensions of this name; the result has one again.
        indices = mtf.rename_dimension(indices, dim.name, _CHOSEN)
        named_apart = [(_CHOSEN, d.size) if d in alike else d for d in output_shape]
        selected = gather(weights, indices, dim, named_apart)
        return mtf.reshape(selected, output_shape)
    selector = one_hot(indices, dim, dtype=weights.dtype)
    return mtf.einsum([selector, weights], output_shape=output_shape)


@leaves_no_node
def cumsum(x: Tensor, dim: DimensionLike, exclusive: bool = False) -> Tensor:
    """Returns the cumulative sum along a dimension, by an einsum with a triangular matrix.

    As all elements take part in each product, `x` must be finite everywhere.

    >>> x = mtf.constant(mesh, [1.0, 2.0, 4.0], "d:3")
    >>> print(mtf.cumsum(x, mtf.Dimension("d", 3)).numpy())
    [1. 3. 7.]

    Args:
      x: a Tensor.
      dim: a Dimension of it, or its name.
      exclusive: whether to exclude each element from its own sum.
    """
    dim = check_dimension("cumsum", x, dim)
    if x.dtype.is_bool:
        raise TypeError(
            f"cumsum: {x.name} {x.shape} is bool, of which there is no sum; use mtf.to_int32 or "
            "mtf.to_float on it first"
        )
    with tf.variable_scope("cumsum"):
        # Of positions before and after, the einsum needs two dimensions, which must differ in name.
        new_name = "tmp_dim_cumsum"
        new_dim = Dimension(new_name, dim.size)
        new_shape = x.shape.rename_dimension(dim.name, new_name)
        comparator = mtf.less if exclusive else mtf.less_equal
        earlier = mtf.mtf_range(x.mesh, dim, dtype=tf.float32)
        later = mtf.mtf_range(x.mesh, new_dim, dtype=tf.float32)
        # A product with a triangle of ones instead of tf.cumsum, which could not go on from one
        # processor's slice to the next.
        mask = mtf.cast(comparator(earlier, later), x.dtype)
        # total[j] = sum over i of x[i] [i <= j], or [i < j] if it is exclusive.
        total = mtf.einsum([x, mask], output_shape=new_shape)
        return mtf.rename_dimension(total, new_name, dim.name)


class TopKOperation(Operation):
    """The k largest elements along a dimension, with their indices."""

    takes_padding = True
    costs_by = ("_reduced_dim",)

    def __init__(
        self, x: Tensor, reduced_dim: DimensionLike, k_dim: Dimension, name: Optional[str] = None
    ):
        """Creates the operation; see `top_k`."""
        reduced_dim = check_dimension(name or "top_k", x, reduced_dim)
        check_real(name or "top_k", [x])
        if not 1 <= k_dim.size <= reduced_dim.size:
            raise ValueError(
                f"{name or 'top_k'}: {dims_text([k_dim])} must be between 1 and "
                f"{dims_text([reduced_dim])} of {x.name} {x.shape}"
            )
        shape = (x.shape - reduced_dim) + k_dim
        check_names_differ(name or "top_k", shape, x.shape)
        super().__init__([x], name=name or "top_k")
        self._reduced_dim = reduced_dim
        self._k_dim = k_dim
        self._outputs = [Tensor(self, shape, x.dtype), Tensor(self, shape, tf.int32, index=1)]

    def needs_whole(self, mesh_impl: MeshImpl) -> Collection[str]:
        """Returns the dimension of the chosen ones, and that of the others if it is padded."""
        padded = padded_dims(mesh_impl, [self._reduced_dim])
        return {*super().needs_whole(mesh_impl), *(d.name for d in padded)}

    def _unsplittable(self) -> Sequence[str]:
        # The chosen ones are found and ordered together, so each processor has all of them.
        return [self._k_dim.name]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Multiplies dy by a one-hot of the chosen positions."""
        # The indices are integers, so only the values have a gradient.
        if grad_ys[0] is None:
            return [None]
        x, dy, indices = self.inputs[0], grad_ys[0], self.outputs[1]
        if self._k_dim.name == self._reduced_dim.name:  # the selector has both
            dy = mtf.rename_dimension(dy, self._k_dim.name, _CHOSEN)
            indices = mtf.rename_dimension(indices, self._k_dim.name, _CHOSEN)
        # dx[j] = sum over k of dy[k] [indices[k] = j].
        selector = one_hot(indices, self._reduced_dim, dtype=x.dtype)
        return [mtf.einsum([dy, selector], output_shape=x.shape)]

    def _candidates(self, mesh_impl: MeshImpl) -> int:
        """Returns the number of candidates from each processor's slice."""
        # The k largest of all are among the k largest of each slice; a small one gives all.
        part = mesh_impl.slice_shape(Shape([self._reduced_dim]))[0]
        return min(part, self._k_dim.size)

    def lower(self, lowering: mtf.Lowering) -> None:
        """Takes the largest of each slice, gathers these, and chooses again."""
        mesh_impl = lowering.mesh_impl(self)
        x = self.inputs[0]
        axis = x.shape.dims.index(self._reduced_dim)
        mesh_axis = mesh_impl.splitting_axis(self._reduced_dim)
        lowering.count_collectives(self, "top_k_op")
        k = self._candidates(mesh_impl)
        values, indices = mesh_impl.slicewise(
            lambda t: _local_top_k(t, axis, k), lowering.tensors[x]
        )
        if mesh_axis is not None:
            values, indices = self._merge(lowering, mesh_impl, mesh_axis, values, indices)
        lowering.set_tensor_lowering(self.outputs[0], values)
        lowering.set_tensor_lowering(self.outputs[1], indices)

    def _merge(
        self,
        lowering: mtf.Lowering,
        mesh_impl: MeshImpl,
        mesh_axis: int,
        values: LaidOutTensor,
        indices: LaidOutTensor,
    ) -> tuple[LaidOutTensor, LaidOutTensor]:
        """Selects among the candidates of all processors along the mesh axis."""
        part = mesh_impl.slice_shape(Shape([self._reduced_dim]))[0]
        # The k are the last dimension of each slice, wherever the dimension that is searched was.
        last = len(self.outputs[0].shape) - 1
        # Positions in the whole dimension, while it is still known which slice each is of.
        indices = mesh_impl.slicewise(
            lambda i, c: i + c * part, indices, mesh_impl.laid_out_pcoord(mesh_axis)
        )
        # Only the candidates: k of each processor instead of its whole slice.
        values = mesh_impl.allconcat(values, mesh_axis, last)
        indices = mesh_impl.allconcat(indices, mesh_axis, last)
        k = self._k_dim.size

        def choose(v: tf.Tensor, i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            # Candidates are in the order of processors, and so of indices: of equal ones the first
            # is chosen, as without a split.
            best, places = tf.math.top_k(v, k)
            return best, tf.gather(i, places, batch_dims=last, axis=last)

        return mesh_impl.slicewise(choose, values, indices)

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """The search of each slice, and the gathers of candidates if the dimension is split."""
        base = super().cost(mesh_impl)
        mesh_axis = mesh_impl.mesh_axis(self._reduced_dim)
        if mesh_axis is None:
            return base
        candidates = self._candidates(mesh_impl) * mesh_impl.shape[mesh_axis].size
        # The elements of an output that has all candidates in the place of the k that are chosen.
        n = mesh_impl.laid_out_size(self._outputs[0].shape) // self._k_dim.size * candidates
        gathers = tuple(
            Collective("allconcat", (mesh_axis,), n, n * y.dtype.size) for y in self._outputs
        )
        return Cost(base.flops, base.bytes, gathers)


def _local_top_k(t: tf.Tensor, axis: int, k: int) -> tuple[tf.Tensor, tf.Tensor]:
    # TensorFlow's top_k searches along the last axis.
    last = t.shape.ndims - 1
    if axis != last:
        order = [i for i in range(last + 1) if i != axis] + [axis]
        t = tf.transpose(t, order)
    # Reductions are enough for one, and argmax too takes the first of equal elements.
    if k == 1:
        # TensorFlow's graph optimizer takes argmax(f(x)) to be argmax(x) for relu, tanh, floor and
        # others that are monotonic, but have equal values of different ones. It does not look
        # through EnsureShape.
        searched = tf.ensure_shape(t, t.shape)
        return tf.reduce_max(t, -1, keepdims=True), tf.expand_dims(
            tf.argmax(searched, -1, output_type=tf.int32), -1
        )
    values, indices = tf.math.top_k(t, k)  # ties are in the order of their indices
    return values, indices


@leaves_no_node
def top_k(
    x: Tensor, reduced_dim: DimensionLike, k_dim: Dimension, name: Optional[str] = None
) -> tuple[Tensor, Tensor]:
    """Returns the k largest elements along a dimension, and their indices.

    Equal elements are in the order of their indices. The gradient flows through the values.

    >>> x = mtf.constant(mesh, [3.0, 1.0, 2.0], "d:3")
    >>> values, indices = mtf.top_k(x, mtf.Dimension("d", 3), mtf.Dimension("k", 2))
    >>> print(values.numpy(), indices.numpy())
    [3. 2.] [0 2]

    Args:
      x: a Tensor.
      reduced_dim: a Dimension of it, or its name.
      k_dim: a Dimension of size k, the last one of the result. Where a layout splits it, each
        processor keeps a part.
      name: a string or None.

    Returns:
      (a Tensor of values, an int32 Tensor of indices).
    """
    values, indices = TopKOperation(x, reduced_dim, k_dim, name=name).outputs
    return values, indices


@leaves_no_node
def top_1(
    x: Tensor, reduced_dim: DimensionLike, name: Optional[str] = None
) -> tuple[Tensor, Tensor]:
    """Returns the largest element along a dimension, which is removed, and its index.

    >>> x = mtf.constant(mesh, [3.0, 1.0, 2.0], "d:3")
    >>> value, index = mtf.top_1(x, mtf.Dimension("d", 3))
    >>> print(value.numpy(), index.numpy())
    3.0 0
    """
    one_dim = Dimension("_one", 1)
    values, indices = top_k(x, reduced_dim, one_dim, name=name)
    shape = values.shape - one_dim
    return mtf.reshape(values, shape), mtf.reshape(indices, shape)


@over_a_dimension
def argmax(x: Tensor, reduced_dim: DimensionLike, name: Optional[str] = None) -> Tensor:
    """Returns the int32 index of the largest element along a dimension; the first of ties.

    >>> x = mtf.constant(mesh, [3.0, 7.0, 2.0], "d:3")
    >>> print(mtf.argmax(x, mtf.Dimension("d", 3)).numpy())
    1
    """
    return top_1(x, reduced_dim, name=name)[1]


@leaves_no_node
def nth_largest_element(
    x: Tensor, n: int, reduced_dim: DimensionLike, name: Optional[str] = None
) -> Tensor:
    """Returns the n-th largest element along a dimension; n = 0 is the maximum.

    >>> x = mtf.constant(mesh, [3.0, 7.0, 2.0], "d:3")
    >>> print(mtf.nth_largest_element(x, 1, mtf.Dimension("d", 3)).numpy())
    3.0

    Args:
      x: a Tensor.
      n: a nonnegative int.
      reduced_dim: a Dimension of it, or its name.
      name: a string or None.
    """
    reduced_dim = given_dimension("nth_largest_element", x, reduced_dim)
    # In falling order, the last of the n + 1 largest is the one with n before it.
    k_dim = Dimension("_top_k_", n + 1)
    values, _ = top_k(x, reduced_dim, k_dim, name=name)
    # No layout splits k_dim, so it can be sliced in all of them.
    last = mtf.mtf_slice(values, n, 1, k_dim.name)
    return mtf.reshape(last, x.shape - reduced_dim)


@leaves_no_node
def nth_smallest_element(
    x: Tensor, n: int, reduced_dim: DimensionLike, name: Optional[str] = None
) -> Tensor:
    """Returns the n-th smallest element along a dimension; n = 0 is the minimum.

    >>> x = mtf.constant(mesh, [3.0, 7.0, 2.0], "d:3")
    >>> print(mtf.nth_smallest_element(x, 0, mtf.Dimension("d", 3)).numpy())
    2.0
    """

    def reverse(x: Tensor) -> Tensor:
        # The least integer has no negative, and unsigned ones have none; all have ~x = -1 - x.
        return mtf.cwise(tf.bitwise.invert, [x]) if x.dtype.is_integer else mtf.negative(x)

    # min(x) = -max(-x), and so on for the n-th.
    return reverse(nth_largest_element(reverse(x), n, reduced_dim, name=name))


def reverse(x: Tensor, dim: Dimension, name: Optional[str] = None) -> Tensor:
    """Returns a Tensor in the opposite order along a dimension.

    >>> x = mtf.constant(mesh, [3.0, 1.0, 2.0], "d:3")
    >>> print(mtf.reverse(x, mtf.Dimension("d", 3)).numpy())
    [2. 1. 3.]

    Args:
      x: a Tensor.
      dim: a Dimension of it. Where a layout splits it, slices are exchanged before and after.
      name: a string or None.
    """
    return along_whole(name or "reverse", lambda t, axis: tf.reverse(t, [axis]), x, dim)


def sort(x: Tensor, dim: Dimension, descending: bool = False, name: Optional[str] = None) -> Tensor:
    """Returns a Tensor in rising order along a dimension.

    >>> x = mtf.constant(mesh, [3.0, 1.0, 2.0], "d:3")
    >>> print(mtf.sort(x, mtf.Dimension("d", 3)).numpy())
    [1. 2. 3.]

    Args:
      x: a Tensor of real numbers.
      dim: a Dimension of it. Where a layout splits it, slices are exchanged before and after.
      descending: whether it is in falling order.
      name: a string or None.
    """
    check_real("sort", [x])
    order = "DESCENDING" if descending else "ASCENDING"
    return along_whole(name or "sort", lambda t, axis: tf.sort(t, axis, order), x, dim)


def argsort(
    x: Tensor, dim: Dimension, descending: bool = False, name: Optional[str] = None
) -> Tensor:
    """Returns the int32 indices along a dimension by which `sort` orders a Tensor.

    Of equal elements, the one with the lower index comes first.

    >>> x = mtf.constant(mesh, [3.0, 1.0, 2.0], "d:3")
    >>> print(mtf.argsort(x, mtf.Dimension("d", 3)).numpy())
    [1 2 0]

    Args:
      x: a Tensor of real numbers.
      dim: a Dimension of it. Where a layout splits it, slices are exchanged before and after.
      descending: whether `sort` is in falling order.
      name: a string or None.
    """
    check_real("argsort", [x])
    order = "DESCENDING" if descending else "ASCENDING"

    def indices(t: tf.Tensor, axis: int) -> tf.Tensor:
        return tf.argsort(t, axis, order, stable=True)

    return along_whole(name or "argsort", indices, x, dim, dtype=tf.int32)
