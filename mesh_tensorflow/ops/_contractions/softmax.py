"""Softmax, cross entropy, and normalization to mean 0 and variance 1, with their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow._core.layout import uneven_names
from mesh_tensorflow._core.operation import (
    Cost,
    LaidOutLike,
    Operation,
    Tensor,
    allreduces,
    check_fractions,
    gradient_of_output,
)
from mesh_tensorflow._core.shape import Dimension, DimensionLike, Shape
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._mesh.slice_functions import add_entries, constant, within_part
from mesh_tensorflow.ops._source import check_dimension, coordinate_along, over_a_dimension
from mesh_tensorflow.ops._variable import computed_in_float32

__all__ = [
    "CrossEntropyGradientOperation",
    "CrossEntropyOperation",
    "log_softmax",
    "reduce_logsumexp",
    "softmax",
]


_MOST_DIMS = 5  # the maximum of oneDNN's kernel


class _AlongDimension(Operation):
    """Base of operations that reduce along a dimension, which may be split, and keep the shape."""

    _flops_per_element = 8
    takes_padding = True
    costs_by = ("_dim",)

    def filling(self, x: Tensor) -> tuple[Collection[Dimension], float]:
        """Returns its dimension, along which 0 adds nothing."""
        return [self._dim], 0

    def __init__(self, xs: Sequence[Tensor], dim: Dimension, name: str):
        super().__init__(xs, name=name)
        self._dim = dim
        self._axis = xs[0].shape.dims.index(dim)

    def _mean(self, mesh_impl: MeshImpl, value: LaidOutLike) -> LaidOutLike:
        mesh_axis = mesh_impl.splitting_axis(self._dim)
        if mesh_axis is None:
            return mesh_impl.slicewise(
                lambda t: tf.reduce_mean(t, constant(self._axis), keepdims=True), value
            )
        # By the whole size: each processor has only its part of the mean.
        share = 1.0 / max(1, self._dim.size)
        local = mesh_impl.slicewise(
            lambda t: (
                tf.reduce_sum(t, constant(self._axis), keepdims=True) * constant(share, t.dtype)
            ),
            value,
        )
        return mesh_impl.allreduce(local, [mesh_axis], "SUM")

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """The elementwise work, and two allreduces if the dimension is split."""
        base, y = super().cost(mesh_impl), self._outputs[0]
        axes = mesh_impl.splitting_axes([self._dim])
        moved = allreduces(mesh_impl, y.shape - self._dim, y.dtype, axes, times=2)
        return Cost(base.flops * self._flops_per_element, base.bytes, moved)


class SoftmaxOperation(_AlongDimension):
    """The softmax along a dimension, or its logarithm.

    It uses TensorFlow's fused kernel if the dimension is not split. If it is, the maximum and the
    sum are allreduced.
    """

    _flops_per_element = 5

    def __init__(self, x: Tensor, reduced_dim: DimensionLike, log: bool, name: str):
        reduced_dim = check_dimension(name, x, reduced_dim)
        check_fractions(name, [x])
        super().__init__([x], reduced_dim, name)
        self._log = log
        self._outputs = [Tensor(self, x.shape, x.dtype)]

    def filling(self, x: Tensor) -> tuple[Collection[Dimension], float]:
        """Returns its dimension, along which minus infinity has no share."""
        return [self._dim], -math.inf

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Returns (dy - sum(dy * y)) * y, or dy - exp(y) * sum(dy) of the logarithm."""
        # Of the output alone, so that the input need not be kept until then.
        y, dy = self.outputs[0], gradient_of_output(grad_ys)
        rest = y.shape - self._dim
        if self._log:
            # The slope of y_i along x_j is [i = j] - softmax_j, and softmax = exp(y).
            return [dy - mtf.exp(y) * mtf.reduce_sum(dy, output_shape=rest)]
        # The slope of y_i along x_j is y_i ([i = j] - y_j).
        return [(dy - mtf.reduce_sum(dy * y, output_shape=rest)) * y]

    def lower(self, lowering: mtf.Lowering) -> None:
        """Calls TensorFlow's softmax, or reduces maximum and sum over the mesh."""
        mesh_impl = lowering.mesh_impl(self)
        x = lowering.tensors[self.inputs[0]]
        lowering.count_collectives(self, "reduce_op")
        mesh_axis = mesh_impl.splitting_axis(self._dim)
        if mesh_axis is None:
            xla = mesh_impl.is_compiled_by_xla
            fn = tf.nn.log_softmax if self._log else _softmax_of_xla if xla else _softmax
            # In XLA there is no kernel to please, and the partitioner would gather what is split.
            most = math.inf if xla else _MOST_DIMS
            value = mesh_impl.slicewise(lambda t: self._along_axis(fn, t, most), x)
        else:
            value = self._lower_split(mesh_impl, x.to_laid_out_tensor(), mesh_axis)
        lowering.set_tensor_lowering(self.outputs[0], value)

    def _along_axis(self, fn: Callable, t: tf.Tensor, most: float) -> tf.Tensor:
        sizes = t.shape.as_list()
        if len(sizes) <= most:
            return fn(t, axis=self._axis)
        before, after = sizes[: self._axis], sizes[self._axis + 1 :]
        # Elements stay where they are in memory, so this reshape costs nothing.
        joined = [mtf.list_product(before), sizes[self._axis], mtf.list_product(after)]
        return tf.reshape(fn(tf.reshape(t, joined), axis=1), sizes)

    def _lower_split(self, mesh_impl: MeshImpl, x: LaidOutLike, mesh_axis: int) -> LaidOutLike:
        def reduce(fn: Callable, value: LaidOutLike, reduction: str) -> LaidOutLike:
            # The axis stays, of size 1, so that results broadcast beside the slices by position.
            local = mesh_impl.slicewise(lambda t: fn(t, self._axis, keepdims=True), value)
            return mesh_impl.allreduce(local, [mesh_axis], reduction)

        # The maximum of all slices, not of each: exponentials of all are added up.
        largest = reduce(tf.reduce_max, x, "MAX")
        # It cancels in the quotient, and keeps exponentials from overflowing.
        shifted = mesh_impl.slicewise(tf.subtract, x, largest)
        exps = mesh_impl.slicewise(tf.exp, shifted)
        total = reduce(tf.reduce_sum, exps, "SUM")
        if self._log:
            # Not log(exps / total), which is -inf where an exponential is rounded to 0.
            return mesh_impl.slicewise(lambda t, s: t - tf.log(s), shifted, total)
        return mesh_impl.slicewise(tf.divide, exps, total)


# Whose sums would round, and whose logarithms are too coarse.
_NARROW = (tf.bfloat16, tf.float16)


def _softmax_of_xla(t: tf.Tensor, axis: int) -> tf.Tensor:
    """Returns the softmax of a slice that XLA compiles, so that it is in memory once.

    Of exponentials over their sum, each reader would divide by itself: a product in its order of
    dimensions, a gradient in another, and the exponentials would be kept for it. What ends in an
    exponential is computed once.
    """
    if t.dtype in _NARROW:
        return tf.nn.softmax(t, axis=axis)
    return tf.exp(tf.nn.log_softmax(t, axis=axis))


# Of fewer elements than these, a softmax of several kernels is faster than the fused one, which is
# distributed over threads.
_SMALL = 2**14


def _softmax(t: tf.Tensor, axis: int) -> tf.Tensor:
    """Returns the softmax of a slice, with the kernels that are faster on CPUs."""
    is_small = t.shape.is_fully_defined() and t.shape.num_elements() < _SMALL
    if t.dtype in _NARROW or not is_small:
        return tf.nn.softmax(t, axis=axis)
    exps = tf.exp(t - tf.reduce_max(t, axis, keepdims=True))
    return exps / tf.reduce_sum(exps, axis, keepdims=True)


def _finite_or_zero(x: tf.Tensor) -> tf.Tensor:
    return tf.where_v2(tf.math.is_finite(x), x, constant(0, x.dtype))


@over_a_dimension
@leaves_no_node
@computed_in_float32
def reduce_logsumexp(
    x: Tensor,
    reduced_dim: DimensionLike,
    extra_logit: Union[Tensor, float, None] = None,
    name: Optional[str] = None,
) -> Tensor:
    """Returns log(sum(exp(x))) over a dimension, which is removed; stable for large `x`.

    >>> x = mtf.constant(mesh, [1000.0, 1000.0], "d:2")
    >>> print(np.round(mtf.reduce_logsumexp(x, mtf.Dimension("d", 2)).numpy(), 3))
    1000.693

    Args:
      x: a Tensor.
      reduced_dim: a Dimension of it, or its name.
      extra_logit: a number or a Tensor without that dimension, an additional logit in the sum; it
        gets no gradient.
      name: a string or None.
    """
    reduced_dim = check_dimension("reduce_logsumexp", x, reduced_dim)
    check_fractions("reduce_logsumexp", [x])
    shape = x.shape - reduced_dim
    with tf.variable_scope(name, default_name="reduce_logsumexp"):
        # Only for range: the result does not depend on it, so it needs no gradient.
        largest = mtf.reduce_max(mtf.stop_gradient(x), output_shape=shape)
        if extra_logit is not None:
            if isinstance(extra_logit, Tensor):
                extra_logit = mtf.stop_gradient(extra_logit)
            largest = mtf.maximum(largest, extra_logit)
        # Infinite, it would give Inf - Inf, a NaN; nothing is too large or too small beside it.
        largest = mtf.cwise(_finite_or_zero, [largest])
        total = mtf.reduce_sum(mtf.exp(x - largest), output_shape=shape)
        if extra_logit is not None:
            total += mtf.exp(extra_logit - largest)
        # log(sum of exp(x)) = log(sum of exp(x - largest)) + largest.
        return mtf.log(total) + largest


@over_a_dimension
@leaves_no_node
@computed_in_float32
def log_softmax(
    x: Tensor,
    reduced_dim: DimensionLike,
    extra_logit: Union[Tensor, float, None] = None,
    name: Optional[str] = None,
) -> Tensor:
    """Returns the logarithm of the softmax along a dimension.

    >>> x = mtf.constant(mesh, [0.0, 0.0], "d:2")
    >>> print(np.round(mtf.log_softmax(x, mtf.Dimension("d", 2)).numpy(), 3))
    [-0.693 -0.693]

    Args:
      x: a Tensor.
      reduced_dim: a Dimension of it, or its name.
      extra_logit: a number or a Tensor without that dimension, an additional logit in the
        denominator only; it gets no gradient.
      name: a string or None.
    """
    if extra_logit is not None:
        # TensorFlow's fused kernel takes no further logit, so here it is made of parts.
        return x - reduce_logsumexp(x, reduced_dim, extra_logit=extra_logit, name=name)
    return SoftmaxOperation(x, reduced_dim, True, name or "log_softmax").outputs[0]


@over_a_dimension
@leaves_no_node
@computed_in_float32
def softmax(
    x: Tensor,
    reduced_dim: DimensionLike,
    extra_logit: Union[Tensor, float, None] = None,
    name: Optional[str] = None,
) -> Tensor:
    """Returns the softmax along a dimension; see `log_softmax`.

    >>> x = mtf.constant(mesh, [0.0, 1.0], "d:2")
    >>> print(np.round(mtf.softmax(x, mtf.Dimension("d", 2)).numpy(), 3))
    [0.269 0.731]
    """
    if extra_logit is not None:
        with tf.variable_scope(name, default_name="softmax"):
            return mtf.exp(log_softmax(x, reduced_dim, extra_logit=extra_logit))
    return SoftmaxOperation(x, reduced_dim, False, name or "softmax").outputs[0]


_CROSS_ENTROPY_FLOPS_PER_ELEMENT = 4


class _OfIds(Operation):
    """What operations on logits [..., vocab] and ids [...] have in common."""

    _dim: Dimension
    _reductions = 0  # over the ids: how many numbers for each row
    takes_padding = True
    costs_by = ("_dim",)

    def filling(self, x: Tensor) -> tuple[Collection[Dimension], float]:
        """Returns the dimension of ids of the logits, along which minus infinity has no share."""
        return [d for d in x.shape if d == self._dim], -math.inf

    def _rows(self, logits: tf.Tensor, mesh_impl: MeshImpl) -> tf.Tensor:
        """Returns a slice of the logits with the vocabulary last, by `_numbers`' dimensions."""
        shape = self._inputs[0].shape
        if shape.dims[-1] != self._dim:
            axis = shape.dims.index(self._dim)
            order = [i for i in range(shape.ndims) if i != axis]
            logits = tf.transpose(logits, [*order, axis])
        if mesh_impl.is_compiled_by_xla:
            return logits
        return tf.reshape(logits, constant([-1, logits.shape.as_list()[-1]], tf.int32))

    def _numbers(self, x: tf.Tensor, given: Tensor, mesh_impl: MeshImpl) -> tf.Tensor:
        """Returns a slice with a number for each row of the logits, as a vector.

        Where XLA compiles the program it keeps its dimensions: the partitioner would gather what
        is split and becomes one with a dimension before it.
        """
        rest = self._inputs[0].shape - self._dim
        order = [given.shape.dims.index(d) for d in rest]
        x = x if order == sorted(order) else tf.transpose(x, order)
        return x if mesh_impl.is_compiled_by_xla else tf.reshape(x, [-1])

    def _is_id(self, ids: tf.Tensor) -> tf.Tensor:
        # By the whole vocabulary: `within_part` asks only for the slice of one processor.
        return tf.logical_and(ids >= 0, ids < constant(self._dim.size, ids.dtype))

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """The elementwise work, and allreduces of what is reduced, if the vocabulary is split."""
        y, axes = self._outputs[0], mesh_impl.splitting_axes([self._dim])
        moved = allreduces(mesh_impl, y.shape, y.dtype, axes, self._reductions)
        # Of the logits: the base class counts outputs, and those of the loss lack the vocabulary.
        elements = mesh_impl.laid_out_size(self._inputs[0].shape)
        flops = _CROSS_ENTROPY_FLOPS_PER_ELEMENT * elements
        return Cost(flops, super().cost(mesh_impl).bytes, moved)


def _places(ids: tf.Tensor) -> tf.Tensor:
    """Returns the positions (row, id) of a matrix."""
    return tf.stack([tf.range(ids.shape[0], dtype=ids.dtype), ids], axis=1)


def _hits(ids: tf.Tensor, part: int) -> tf.Tensor:
    """Returns where in rows of `part` entries an id is.

    XLA computes it within what reads it. A gather or a scatter it would split over the mesh as
    suits the indices, and pass logits or their gradients for that.
    """
    return tf.equal(tf.range(part, dtype=ids.dtype), ids[..., None])


class CrossEntropyOperation(_OfIds):
    """For each id, minus the logarithm of its softmax; and the logarithm of the softmax's sum.

    The first output is 0 for ids out of range. Equal to `log_softmax` at the ids, but neither
    probabilities nor one-hots of the size of the logits are stored for the gradient.
    """

    _reductions = 3  # the maximum, the sum, and the logit at the id

    def __init__(
        self, logits: Tensor, ids: Tensor, vocab_dim: Dimension, name: Optional[str] = None
    ):
        """Creates the operation.

        Args:
          logits: a floating Tensor with the dimension `vocab_dim`.
          ids: an int32 or int64 Tensor with the other dimensions, in any order.
          vocab_dim: the Dimension of ids, of the size of the vocabulary.
          name: a string or None.
        """
        check_fractions(name or "cross_entropy", [logits])
        super().__init__([logits, ids], name=name or "cross_entropy")
        self._dim = vocab_dim
        shape = logits.shape - vocab_dim
        self._outputs = [Tensor(self, shape, logits.dtype, index=i) for i in range(2)]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Returns softmax * (dy + dz) - one_hot * dy as one operation; ids have no gradient."""
        logits, ids = self.inputs
        dy, dz = grad_ys
        # It is None where only the second output is used, the logarithm of the sum.
        if dy is None:
            dy = mtf.zeros_like(self.outputs[0])
        op = CrossEntropyGradientOperation(logits, ids, self.outputs[1], dy, dz, self._dim)
        return [op.outputs[0], None]

    def lower(self, lowering: mtf.Lowering) -> None:
        """Reduces rows of the logits, and sums over the mesh if the vocabulary is split."""
        mesh_impl = lowering.mesh_impl(self)
        lowering.count_collectives(self, "reduce_op")
        # Computed once: a lazy value would be made again by each of the three reductions.
        logits, ids = (lowering.tensors[x].to_laid_out_tensor() for x in self.inputs)
        part = mesh_impl.slice_shape(self.inputs[0].shape)[
            self.inputs[0].shape.dims.index(self._dim)
        ]
        sizes = constant(mesh_impl.slice_shape(self.outputs[0].shape), tf.int32)
        axis = mesh_impl.splitting_axis(self._dim)

        def rows(x: tf.Tensor) -> tf.Tensor:
            return self._rows(x, mesh_impl)

        def numbers(i: tf.Tensor) -> tf.Tensor:
            return self._numbers(i, self.inputs[1], mesh_impl)

        # Three numbers for each row are reduced over processors; the logits stay where they are.
        def over_vocab(reduction: str, fn: Callable, *values: Any) -> Any:
            local = mesh_impl.slicewise(fn, *values)
            return local if axis is None else mesh_impl.allreduce(local, [axis], reduction)

        def sums(x: tf.Tensor, most: tf.Tensor) -> tf.Tensor:
            return tf.reduce_sum(tf.exp(rows(x) - most[..., None]), axis=-1)

        def picked(x: tf.Tensor, i: tf.Tensor, *coordinate: tf.Tensor) -> tf.Tensor:
            inside, is_here = within_part(numbers(i), part, coordinate)
            if mesh_impl.is_compiled_by_xla:
                hits = tf.logical_and(_hits(inside, part), is_here[..., None])
                return tf.reduce_sum(tf.where_v2(hits, rows(x), constant(0, x.dtype)), axis=-1)
            # An id of another processor's slice is clipped into this one, and what is found there
            # replaced by 0; the allreduce then gives the logit of whoever has it.
            logit = tf.gather_nd(rows(x), _places(inside))
            return tf.where(is_here, logit, tf.zeros_like(logit))

        def loss(total: tf.Tensor, most: tf.Tensor, logit: tf.Tensor, i: tf.Tensor) -> tf.Tensor:
            # -log softmax = log(sum of exp(x - most)) - (x[id] - most).
            y = tf.log(total) - (logit - most)
            is_id = self._is_id(numbers(i))
            # No processor has an id out of range: what was found for it is 0, and y has no meaning.
            return tf.reshape(tf.where(is_id, y, tf.zeros_like(y)), sizes)

        # First the maximum, of all processors: without it, exponentials in the sum may overflow.
        most = over_vocab("MAX", lambda x: tf.reduce_max(rows(x), axis=-1), logits)
        total = over_vocab("SUM", sums, logits, most)
        at_ids = over_vocab("SUM", picked, logits, ids, *coordinate_along(mesh_impl, self._dim))
        value = mesh_impl.slicewise(loss, total, most, at_ids, ids)
        lowering.set_tensor_lowering(self.outputs[0], value)
        # log(sum of exp(x)) = log(sum of exp(x - most)) + most.
        log_z = mesh_impl.slicewise(lambda t, m: tf.reshape(tf.log(t) + m, sizes), total, most)
        lowering.set_tensor_lowering(self.outputs[1], log_z)


class CrossEntropyGradientOperation(_OfIds):
    """The gradient of logits: softmax * (dy + dz) - one_hot(ids) * dy.

    TensorFlow computes it in the memory of the logits, if nothing else reads them later.
    """

    def __init__(
        self,
        logits: Tensor,
        ids: Tensor,
        log_z: Tensor,
        dy: Tensor,
        dz: Optional[Tensor],
        vocab_dim: Dimension,
        name: Optional[str] = None,
    ):
        """Creates the operation.

        Args:
          logits: a floating Tensor with the dimension `vocab_dim`.
          ids: an int32 or int64 Tensor with the other dimensions, in any order; for those out of
            range, dy counts as 0.
          log_z: the logarithm of the sum of exponentials, with the dimensions of logits without
            `vocab_dim`.
          dy: the gradient of the cross entropy, of the shape of `log_z`.
          dz: the gradient of `log_z`, or None.
          vocab_dim: the Dimension of ids, of the size of the vocabulary.
          name: a string or None.
        """
        inputs = [logits, ids, log_z, dy, *([] if dz is None else [dz])]
        super().__init__(inputs, name=name or "cross_entropy_gradient")
        self._dim = vocab_dim
        self._outputs = [Tensor(self, logits.shape, logits.dtype)]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Returns the gradients of all inputs but the ids, from one-hots."""
        logits, ids, log_z, dy, *dz = self.inputs
        one_hot = mtf.one_hot(ids, self._dim, dtype=dy.dtype)
        has_id = mtf.reduce_sum(one_hot, output_shape=dy.shape)
        dd_logits = gradient_of_output(grad_ys)
        # With p = exp(logits - log_z), where log_z is an input by itself, and s = dy + dz: the
        # output is p s - one_hot dy, for ids in range; dy counts as 0 elsewhere.
        weighted = dd_logits * mtf.exp(logits - log_z)
        total = mtf.reduce_sum(weighted, output_shape=dy.shape)
        at_ids = mtf.reduce_sum(dd_logits * one_hot, output_shape=dy.shape)
        scale = mtf.add_n([dy * has_id, *dz])
        d_logits = mtf.einsum([weighted, scale], logits.shape)
        return [d_logits, None, -total * scale, total * has_id - at_ids, *[total for _ in dz]]

    def lower(self, lowering: mtf.Lowering) -> None:
        """Scales each slice's exponentials, and subtracts dy at the ids."""
        mesh_impl = lowering.mesh_impl(self)
        logits, ids, log_z, dy = self.inputs[:4]
        axis = logits.shape.dims.index(self._dim)
        sizes = mesh_impl.slice_shape(logits.shape)
        part = sizes[axis]
        rest = [*sizes[:axis], *sizes[axis + 1 :]]
        # Rows have the vocabulary last: this order brings it to where the logits have it.
        back = [*range(axis), len(rest), *range(axis, len(rest))]

        def fn(x: tf.Tensor, i: tf.Tensor, z: tf.Tensor, d: tf.Tensor, *more: tf.Tensor) -> Any:
            i, z, d = (self._numbers(*pair, mesh_impl) for pair in ((i, ids), (z, log_z), (d, dy)))
            # An id out of range has the loss 0, whatever the logits are.
            d = tf.where(self._is_id(i), d, tf.zeros_like(d))
            scale = d
            # Of dz, if it is given, and the coordinate after it, zip takes the former alone.
            for dz, value in zip(self.inputs[4:], more):
                scale = scale + self._numbers(value, dz, mesh_impl)
            # Each writes to the memory of the one before.
            # log_z has the forward computation's maximum and sum: nothing is reduced again.
            y = tf.exp(self._rows(x, mesh_impl) - z[..., None]) * scale[..., None]
            inside, is_here = within_part(i, part, more[len(self.inputs) - 4 :])
            at_id = tf.where(is_here, -d, tf.zeros_like(d))
            if mesh_impl.is_compiled_by_xla:
                y = tf.where_v2(_hits(inside, part), y + at_id[..., None], y)
            else:
                y = add_entries(y, _places(inside), at_id)
            y = tf.reshape(y, constant([*rest, part], tf.int32))
            return y if back == sorted(back) else tf.transpose(y, back)

        self._lower_slices(lowering, fn, *coordinate_along(mesh_impl, self._dim))


class NormalizeOperation(_AlongDimension):
    """(x - mean) / sqrt(variance + epsilon); the second output is 1 / sqrt(variance + epsilon)."""

    def __init__(self, x: Tensor, dim: Dimension, epsilon: float):
        check_dimension("normalize", x, dim)
        check_fractions("normalize", [x])
        super().__init__([x], dim, "normalize")
        self._epsilon = epsilon
        # Of size 1 in the place of the dimension, so that slices of the two broadcast by position.
        self._factor_dim = Dimension("_one", 1)
        shape = x.shape.dims
        shape[self._axis] = self._factor_dim
        self._outputs = [
            Tensor(self, x.shape, x.dtype),
            Tensor(self, Shape(shape), x.dtype, index=1),
        ]

    def _unsplittable(self) -> Sequence[str]:
        return [self._factor_dim.name]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Returns dx by an operation of its own, from the output and the factor."""
        # The second output is for this gradient alone, and `normalize` does not return it.
        if grad_ys[0] is None:
            return [None]
        # Of these two alone, so that neither the input nor its mean need be kept.
        y, factor = self.outputs
        return NormalizeGradOperation(y, factor, grad_ys[0], self._dim).outputs

    def lower(self, lowering: mtf.Lowering) -> None:
        """Lowers to mean, variance and rsqrt, with an allreduce each if the dimension is split."""
        mesh_impl = lowering.mesh_impl(self)
        lowering.count_collectives(self, "reduce_op")
        # Here, as a lazy value would be computed at each of its uses.
        x = lowering.tensors[self.inputs[0]].to_laid_out_tensor()
        # In two passes: the mean of squares minus the square of the mean loses all digits where the
        # mean is large.
        centered = mesh_impl.slicewise(tf.subtract, x, self._mean(mesh_impl, x))
        if uneven_names(mesh_impl):
            centered = mesh_impl.filled(centered, self.inputs[0].shape, [self._dim], 0)
        variance = self._mean(mesh_impl, mesh_impl.slicewise(tf.square, centered))
        factor = mesh_impl.slicewise(
            lambda v: tf.math.rsqrt(v + constant(self._epsilon, v.dtype)), variance
        )
        y = mesh_impl.slicewise(tf.multiply, centered, factor)
        lowering.set_tensor_lowering(self.outputs[0], y)
        lowering.set_tensor_lowering(self.outputs[1], factor)


class NormalizeGradOperation(_AlongDimension):
    """factor * (dy - mean(dy) - y * mean(dy * y))."""

    def __init__(self, y: Tensor, factor: Tensor, dy: Tensor, dim: Dimension):
        super().__init__([y, factor, dy], dim, "normalize_grad")
        self._outputs = [Tensor(self, y.shape, y.dtype)]

    def _unsplittable(self) -> Sequence[str]:
        # By position: a factor's last dimension is 1, and stands beside all of the other one's.
        return [self._inputs[1].shape.dims[self._axis].name]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Raises an error: there is no second derivative."""
        raise NotImplementedError(
            f"{self.name}: layer_norm has first derivatives only; for second ones write it with "
            "mtf.reduce_mean and mtf.rsqrt"
        )

    def lower(self, lowering: mtf.Lowering) -> None:
        """Computes dx = factor * (dy - mean(dy) - y * mean(dy * y))."""
        mesh_impl = lowering.mesh_impl(self)
        lowering.count_collectives(self, "reduce_op")
        y, factor, dy = (lowering.tensors[x].to_laid_out_tensor() for x in self.inputs)
        # What dy changes through the mean of x, and through its variance: both depend on all of x.
        mean_dy = self._mean(mesh_impl, dy)
        along_y = self._mean(mesh_impl, mesh_impl.slicewise(tf.multiply, dy, y))
        dx = mesh_impl.slicewise(
            lambda y, factor, dy, m, c: factor * (dy - m - y * c), y, factor, dy, mean_dy, along_y
        )
        lowering.set_tensor_lowering(self.outputs[0], dx)


def normalize(x: Tensor, dim: Dimension, epsilon: float) -> Tensor:
    """Normalizes `x` to mean 0 and variance 1 along a dimension.

    Args:
      x: a floating Tensor.
      dim: a Dimension of it.
      epsilon: added to the variance.
    """
    return NormalizeOperation(x, dim, epsilon).outputs[0]
