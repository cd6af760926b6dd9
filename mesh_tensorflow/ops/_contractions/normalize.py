"""Normalization to mean 0 and variance 1, as a single operation with its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.cost import Cost
from mesh_tensorflow._core.interfaces import LaidOutLike, LoweringLike
from mesh_tensorflow._core.operation import Operation
from mesh_tensorflow._core.shape import Dimension
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._mesh.constants import constant
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow.ops._contractions.reduce_broadcast import cost_along
from mesh_tensorflow.ops._source import check_dimension

__all__: list[str] = []

_FLOPS_PER_ELEMENT = 8


class _AlongDimension(Operation):
    """Base of operations that compute means along a dimension, which may be split."""

    def _set_dimension(self, x: Tensor, dim: Dimension) -> None:
        self._dim = dim
        self._axis = x.shape.dims.index(dim)

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

    def cost_key(self) -> Dimension:
        return self._dim

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        return cost_along(self, mesh_impl, self._dim, _FLOPS_PER_ELEMENT)


class NormalizeOperation(_AlongDimension):
    """(x - mean) / sqrt(variance + epsilon); the second output is 1 / sqrt(variance + epsilon)."""

    def __init__(self, x: Tensor, dim: Dimension, epsilon: float):
        check_dimension("normalize", x, dim)
        super().__init__([x], name="normalize")
        self._set_dimension(x, dim)
        self._epsilon = epsilon
        self._factor_dim = Dimension("_one", 1)
        shape = x.shape.dims
        shape[self._axis] = self._factor_dim
        self._outputs = [
            Tensor(self, x.shape, x.dtype),
            Tensor(self, type(x.shape)(shape), x.dtype, index=1),
        ]

    def _unsplittable(self) -> Sequence[str]:
        return [self._factor_dim.name]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Returns dx by an operation of its own, from the output and the factor."""
        if grad_ys[0] is None:
            return [None]
        y, factor = self.outputs
        return NormalizeGradOperation(y, factor, grad_ys[0], self._dim).outputs

    def lower(self, lowering: LoweringLike) -> None:
        """Lowers to mean, variance and rsqrt, with an allreduce each if the dimension is split."""
        mesh_impl = lowering.mesh_impl(self)
        lowering.count_collectives(self, "reduce_op")
        x = lowering.tensors[self.inputs[0]].to_laid_out_tensor()
        # In two passes: the mean of squares minus the square of the mean loses all digits where the
        # mean is large.
        centered = mesh_impl.slicewise(tf.subtract, x, self._mean(mesh_impl, x))
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
        super().__init__([y, factor, dy], name="normalize_grad")
        self._set_dimension(y, dim)
        self._outputs = [Tensor(self, y.shape, y.dtype)]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Raises an error: there is no second derivative."""
        raise NotImplementedError(
            f"{self.name}: layer_norm has first derivatives only; for second ones write it with "
            "mtf.reduce_mean and mtf.rsqrt"
        )

    def lower(self, lowering: LoweringLike) -> None:
        """Computes dx = factor * (dy - mean(dy) - y * mean(dy * y))."""
        mesh_impl = lowering.mesh_impl(self)
        lowering.count_collectives(self, "reduce_op")
        y, factor, dy = (lowering.tensors[x].to_laid_out_tensor() for x in self.inputs)
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
