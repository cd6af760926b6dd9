"""Softmax, log-softmax and logsumexp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.cost import Cost
from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow._core.interfaces import LaidOutLike, LoweringLike
from mesh_tensorflow._core.operation import Operation, gradient_of_output
from mesh_tensorflow._core.shape import Dimension
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow.ops._contractions.reduce_broadcast import cost_along
from mesh_tensorflow.ops._source import check_dimension
from mesh_tensorflow.ops._variables.precision import computed_in_float32

__all__ = ["log_softmax", "reduce_logsumexp", "softmax"]

_FLOPS_PER_ELEMENT = 5
_MOST_DIMS = 5  # the maximum of oneDNN's kernel


def _check_floating(what: str, x: Tensor, dim: Dimension) -> None:
    """Checks that `x` is floating and has dimension `dim`.

    Raises:
      ValueError: it has no such dimension.
      TypeError: it is not floating.
    """
    check_dimension(what, x, dim)
    if not x.dtype.is_floating:
        raise TypeError(
            f"{what}: {x.name} {x.shape} is {x.dtype.name}, and exponentials along "
            f"{dims_text([dim])} are fractions; use mtf.to_float on it first"
        )


class SoftmaxOperation(Operation):
    """The softmax along a dimension, or its logarithm.

    It uses TensorFlow's fused kernel if the dimension is not split. If it is, the maximum and the
    sum are allreduced.
    """

    def __init__(self, x: Tensor, reduced_dim: Dimension, log: bool, name: str):
        _check_floating(name, x, reduced_dim)
        super().__init__([x], name=name)
        self._dim = reduced_dim
        self._axis = x.shape.dims.index(reduced_dim)
        self._log = log
        self._outputs = [Tensor(self, x.shape, x.dtype)]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Returns (dy - sum(dy * y)) * y, or dy - exp(y) * sum(dy) of the logarithm."""
        y, dy = self.outputs[0], gradient_of_output(grad_ys)
        rest = y.shape - self._dim
        if self._log:
            return [dy - mtf.exp(y) * mtf.reduce_sum(dy, output_shape=rest)]
        return [(dy - mtf.reduce_sum(dy * y, output_shape=rest)) * y]

    def lower(self, lowering: LoweringLike) -> None:
        """Calls TensorFlow's softmax, or reduces maximum and sum over the mesh."""
        mesh_impl = lowering.mesh_impl(self)
        x = lowering.tensors[self.inputs[0]]
        lowering.count_collectives(self, "reduce_op")
        mesh_axis = mesh_impl.splitting_axis(self._dim)
        if mesh_axis is None:
            fn = tf.nn.log_softmax if self._log else tf.nn.softmax
            value = mesh_impl.slicewise(lambda t: self._along_axis(fn, t), x)
        else:
            value = self._lower_split(mesh_impl, x.to_laid_out_tensor(), mesh_axis)
        lowering.set_tensor_lowering(self.outputs[0], value)

    def _along_axis(self, fn: Callable, t: tf.Tensor) -> tf.Tensor:
        sizes = t.shape.as_list()
        if len(sizes) <= _MOST_DIMS:
            return fn(t, axis=self._axis)
        before, after = sizes[: self._axis], sizes[self._axis + 1 :]
        joined = [mtf.list_product(before), sizes[self._axis], mtf.list_product(after)]
        return tf.reshape(fn(tf.reshape(t, joined), axis=1), sizes)

    def _lower_split(self, mesh_impl: MeshImpl, x: LaidOutLike, mesh_axis: int) -> LaidOutLike:
        def reduce(fn: Callable, value: LaidOutLike, reduction: str) -> LaidOutLike:
            local = mesh_impl.slicewise(lambda t: fn(t, self._axis, keepdims=True), value)
            return mesh_impl.allreduce(local, [mesh_axis], reduction)

        # The maximum of all slices, not of each: exponentials of all are added up.
        largest = reduce(tf.reduce_max, x, "MAX")
        shifted = mesh_impl.slicewise(tf.subtract, x, largest)
        exps = mesh_impl.slicewise(tf.exp, shifted)
        total = reduce(tf.reduce_sum, exps, "SUM")
        if self._log:
            return mesh_impl.slicewise(lambda t, s: t - tf.log(s), shifted, total)
        return mesh_impl.slicewise(tf.divide, exps, total)

    def cost_key(self) -> Dimension:
        """The dimension that is normalized."""
        return self._dim

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """The elementwise work, and two allreduces if the dimension is split."""
        return cost_along(self, mesh_impl, self._dim, _FLOPS_PER_ELEMENT)


@leaves_no_node
@computed_in_float32
def reduce_logsumexp(
    x: Tensor,
    reduced_dim: Dimension,
    extra_logit: Union[Tensor, float, None] = None,
    name: Optional[str] = None,
) -> Tensor:
    """Returns log(sum(exp(x))) over a dimension, which is removed; stable for large `x`.

    >>> x = mtf.constant(mesh, [1000.0, 1000.0], "d:2")
    >>> print(np.round(mtf.reduce_logsumexp(x, mtf.Dimension("d", 2)).numpy(), 3))
    1000.693

    Args:
      x: a Tensor.
      reduced_dim: a Dimension of it.
      extra_logit: a number or a Tensor without that dimension, an additional logit in the sum; it
        gets no gradient.
      name: a string or None.
    """
    _check_floating("reduce_logsumexp", x, reduced_dim)
    shape = x.shape - reduced_dim
    with tf.variable_scope(name, default_name="reduce_logsumexp"):
        # Only for range: the result does not depend on it, so it needs no gradient.
        largest = mtf.reduce_max(mtf.stop_gradient(x), output_shape=shape)
        if extra_logit is not None:
            if isinstance(extra_logit, Tensor):
                extra_logit = mtf.stop_gradient(extra_logit)
            largest = mtf.maximum(largest, extra_logit)
        total = mtf.reduce_sum(mtf.exp(x - largest), output_shape=shape)
        if extra_logit is not None:
            total += mtf.exp(extra_logit - largest)
        return mtf.log(total) + largest


@leaves_no_node
@computed_in_float32
def log_softmax(
    x: Tensor,
    reduced_dim: Dimension,
    extra_logit: Union[Tensor, float, None] = None,
    name: Optional[str] = None,
) -> Tensor:
    """Returns the logarithm of the softmax along a dimension.

    >>> x = mtf.constant(mesh, [0.0, 0.0], "d:2")
    >>> print(np.round(mtf.log_softmax(x, mtf.Dimension("d", 2)).numpy(), 3))
    [-0.693 -0.693]

    Args:
      x: a Tensor.
      reduced_dim: a Dimension of it.
      extra_logit: a number or a Tensor without that dimension, an additional logit in the
        denominator only; it gets no gradient.
      name: a string or None.
    """
    if extra_logit is not None:
        return x - reduce_logsumexp(x, reduced_dim, extra_logit=extra_logit, name=name)
    return SoftmaxOperation(x, reduced_dim, True, name or "log_softmax").outputs[0]


@leaves_no_node
@computed_in_float32
def softmax(
    x: Tensor,
    reduced_dim: Dimension,
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
