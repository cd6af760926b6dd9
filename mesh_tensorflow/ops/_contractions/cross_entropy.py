"""The cross entropy of integer ids, without tensors of the size of the logits beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.cost import Collective, Cost
from mesh_tensorflow._core.interfaces import LoweringLike
from mesh_tensorflow._core.operation import Operation, gradient_of_output
from mesh_tensorflow._core.shape import Dimension
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._mesh.constants import constant
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._mesh.slice_functions import add_entries

__all__ = ["CrossEntropyGradientOperation", "CrossEntropyOperation"]

_FLOPS_PER_ELEMENT = 4


def _cost(op: Operation, mesh_impl: MeshImpl) -> Cost:
    base = Operation.cost(op, mesh_impl)
    elements = mesh_impl.laid_out_size(op.inputs[0].shape)
    return Cost(_FLOPS_PER_ELEMENT * elements, base.bytes)


class _OfIds(Operation):
    """What operations on logits [..., vocab] and ids [...] have in common."""

    _dim: Dimension

    def _rows(self, logits: tf.Tensor) -> tf.Tensor:
        """Returns a slice of the logits as a matrix, with the vocabulary last."""
        shape = self._inputs[0].shape
        if shape.dims[-1] != self._dim:
            axis = shape.dims.index(self._dim)
            order = [i for i in range(shape.ndims) if i != axis]
            logits = tf.transpose(logits, [*order, axis])
        return tf.reshape(logits, constant([-1, logits.shape.as_list()[-1]], tf.int32))

    def _numbers(self, x: tf.Tensor, given: Tensor) -> tf.Tensor:
        """Returns a slice with a number for each row, as a vector in the order of the rows."""
        rest = self._inputs[0].shape - self._dim
        order = [given.shape.dims.index(d) for d in rest]
        return tf.reshape(x if order == sorted(order) else tf.transpose(x, order), [-1])

    def _is_id(self, ids: tf.Tensor) -> tf.Tensor:
        return tf.logical_and(ids >= 0, ids < constant(self._dim.size, ids.dtype))

    def _within(self, ids: tf.Tensor, part: int, coordinate: tuple) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns positions within a slice of the vocabulary, and which ids are in it."""
        for c in coordinate:
            ids = ids - tf.cast(c * part, ids.dtype)
        inside = tf.clip_by_value(ids, constant(0, ids.dtype), constant(part - 1, ids.dtype))
        return inside, tf.equal(ids, inside)

    def _coordinate(self, mesh_impl: MeshImpl) -> list[Any]:
        axis = mesh_impl.splitting_axis(self._dim)
        return [] if axis is None else [mesh_impl.laid_out_pcoord(axis)]


def _places(ids: tf.Tensor) -> tf.Tensor:
    """Returns the positions (row, id) of a matrix."""
    return tf.stack([tf.range(ids.shape[0], dtype=ids.dtype), ids], axis=1)


class CrossEntropyOperation(_OfIds):
    """For each id, minus the logarithm of its softmax; and the logarithm of the softmax's sum.

    The first output is 0 for ids out of range. Equal to `log_softmax` at the ids, but neither
    probabilities nor one-hots of the size of the logits are stored for the gradient.
    """

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
        super().__init__([logits, ids], name=name or "cross_entropy")
        self._dim = vocab_dim
        shape = logits.shape - vocab_dim
        self._outputs = [Tensor(self, shape, logits.dtype), Tensor(self, shape, logits.dtype)]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Returns softmax * (dy + dz) - one_hot * dy as one operation; ids have no gradient."""
        logits, ids = self.inputs
        dy, dz = grad_ys
        if dy is None:
            dy = mtf.zeros_like(self.outputs[0])
        made = CrossEntropyGradientOperation(logits, ids, self.outputs[1], dy, dz, self._dim)
        return [made.outputs[0], None]

    def lower(self, lowering: LoweringLike) -> None:
        """Reduces rows of the logits, and sums over the mesh if the vocabulary is split."""
        mesh_impl = lowering.mesh_impl(self)
        lowering.count_collectives(self, "reduce_op")
        logits, ids = (lowering.tensors[x].to_laid_out_tensor() for x in self.inputs)
        part = mesh_impl.slice_shape(self.inputs[0].shape)[
            self.inputs[0].shape.dims.index(self._dim)
        ]
        sizes = constant(mesh_impl.slice_shape(self.outputs[0].shape), tf.int32)
        axis = mesh_impl.splitting_axis(self._dim)

        def over_vocab(reduction: str, fn: Callable, *values: Any) -> Any:
            local = mesh_impl.slicewise(fn, *values)
            return local if axis is None else mesh_impl.allreduce(local, [axis], reduction)

        def sums(x: tf.Tensor, most: tf.Tensor) -> tf.Tensor:
            return tf.reduce_sum(tf.exp(self._rows(x) - most[:, None]), axis=1)

        def picked(x: tf.Tensor, i: tf.Tensor, *coordinate: tf.Tensor) -> tf.Tensor:
            inside, is_here = self._within(self._numbers(i, self.inputs[1]), part, coordinate)
            # An id of another processor's slice is clipped into this one, and what is found there
            # replaced by 0; the allreduce then gives the logit of whoever has it.
            found = tf.gather_nd(self._rows(x), _places(inside))
            return tf.where(is_here, found, tf.zeros_like(found))

        def loss(total: tf.Tensor, most: tf.Tensor, found: tf.Tensor, i: tf.Tensor) -> tf.Tensor:
            y = tf.log(total) - (found - most)
            known = self._is_id(self._numbers(i, self.inputs[1]))
            return tf.reshape(tf.where(known, y, tf.zeros_like(y)), sizes)

        most = over_vocab("MAX", lambda x: tf.reduce_max(self._rows(x), axis=1), logits)
        total = over_vocab("SUM", sums, logits, most)
        found = over_vocab("SUM", picked, logits, ids, *self._coordinate(mesh_impl))
        value = mesh_impl.slicewise(loss, total, most, found, ids)
        lowering.set_tensor_lowering(self.outputs[0], value)
        log_z = mesh_impl.slicewise(lambda t, m: tf.reshape(tf.log(t) + m, sizes), total, most)
        lowering.set_tensor_lowering(self.outputs[1], log_z)

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """The elementwise work, and three allreduces if the vocabulary is split."""
        y = self._outputs[0]
        axis = mesh_impl.tensor_dimension_to_mesh_axis(self._dim)
        collectives: tuple[Collective, ...] = ()
        if axis is not None:
            n = mesh_impl.laid_out_size(y.shape)
            collectives = (Collective("allreduce", (axis,), n, n * y.dtype.size),) * 3
        base = _cost(self, mesh_impl)
        return Cost(base.flops, base.bytes, collectives)

    def cost_key(self) -> Dimension:
        """The dimension of ids."""
        return self._dim


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
        given = [logits, ids, log_z, dy, *([] if dz is None else [dz])]
        super().__init__(given, name=name or "cross_entropy_gradient")
        self._dim = vocab_dim
        self._outputs = [Tensor(self, logits.shape, logits.dtype)]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Returns the gradients of all inputs but the ids, from one-hots."""
        logits, ids, log_z, dy, *dz = self.inputs
        one_hot = mtf.one_hot(ids, self._dim, dtype=dy.dtype)
        known = mtf.reduce_sum(one_hot, output_shape=dy.shape)
        dd_logits = gradient_of_output(grad_ys)
        weighted = dd_logits * mtf.exp(logits - log_z)
        total = mtf.reduce_sum(weighted, output_shape=dy.shape)
        at_ids = mtf.reduce_sum(dd_logits * one_hot, output_shape=dy.shape)
        scale = mtf.add_n([dy * known, *dz])
        d_logits = mtf.einsum([weighted, scale], logits.shape)
        return [d_logits, None, -total * scale, total * known - at_ids, *[total for _ in dz]]

    def lower(self, lowering: LoweringLike) -> None:
        """Scales each slice's exponentials, and subtracts dy at the ids."""
        mesh_impl = lowering.mesh_impl(self)
        logits, ids, log_z, dy = self.inputs[:4]
        axis = logits.shape.dims.index(self._dim)
        sizes = mesh_impl.slice_shape(logits.shape)
        part = sizes[axis]
        rest = [*sizes[:axis], *sizes[axis + 1 :]]
        back = [*range(axis), len(rest), *range(axis, len(rest))]

        def fn(x: tf.Tensor, i: tf.Tensor, z: tf.Tensor, d: tf.Tensor, *more: tf.Tensor) -> Any:
            i = self._numbers(i, ids)
            z, d = self._numbers(z, log_z), self._numbers(d, dy)
            d = tf.where(self._is_id(i), d, tf.zeros_like(d))
            scale = d
            for dz, value in zip(self.inputs[4:], more):
                scale = scale + self._numbers(value, dz)
            # Each writes to the memory of the one before.
            y = tf.exp(self._rows(x) - z[:, None]) * scale[:, None]
            inside, is_here = self._within(i, part, more[len(self.inputs) - 4 :])
            y = add_entries(y, _places(inside), tf.where(is_here, -d, tf.zeros_like(d)))
            y = tf.reshape(y, constant([*rest, part], tf.int32))
            return y if back == sorted(back) else tf.transpose(y, back)

        values = [lowering.tensors[x] for x in self.inputs]
        result = mesh_impl.slicewise(fn, *values, *self._coordinate(mesh_impl))
        lowering.set_tensor_lowering(self.outputs[0], result)

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """The elementwise work."""
        return _cost(self, mesh_impl)

    def cost_key(self) -> Dimension:
        """The dimension of ids."""
        return self._dim
