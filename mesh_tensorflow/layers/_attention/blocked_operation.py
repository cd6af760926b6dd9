"""The operation of attention by blocks: for each query the mean of the values, by its weights.

The gradient is in `blocked_gradients.py`; what both share is in `blocked_base.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.cost import Collective, Cost
from mesh_tensorflow._core.interfaces import LoweringLike
from mesh_tensorflow._core.tensor import is_differentiable
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._mesh.slices import attention_blocks as blocks
from mesh_tensorflow._mesh.slices.attention_operands import (
    Operands,
    arranged,
    computed_in,
    restored,
)
from mesh_tensorflow.layers._attention import ring
from mesh_tensorflow.layers._attention.blocked_base import Blocked
from mesh_tensorflow.layers._attention.blocked_form import Dims, Form, Terms
from mesh_tensorflow.layers._attention.blocked_gradients import BlockedAttentionGradOperation

__all__ = ["BlockedAttentionOperation"]

_PRODUCTS = 2  # matrix products of a block


class BlockedAttentionOperation(Blocked):
    """Means of values, and the logarithms of the denominators of their weights.

    Two more outputs are what gradients are computed with: the largest logit of each row, and the
    sum of exponentials relative to it.

    Each processor computes its part of the logits block by block. If the memory is split, the parts
    of a row are joined by three allreduces; if the same mesh dimension splits the rows too, the
    memory is gathered, or passed around.
    """

    def __init__(
        self,
        q: mtf.Tensor,
        k: mtf.Tensor,
        v: mtf.Tensor,
        dims: Dims,
        terms: Terms,
        plain: Callable,
        block_sizes: Optional[tuple[int, int]] = None,
        name: Optional[str] = None,
        in_ring: Union[bool, str] = False,
    ):
        """Creates the operation.

        Args:
          q: queries, a Tensor.
          k: keys, a Tensor.
          v: values, a Tensor.
          dims: a Dims.
          terms: a Terms.
          plain: the same function of (q, k, v, dims, terms), made of other operations, which gives
            gradients of gradients.
          block_sizes: the numbers of positions of queries and of the memory in a block, or None.
          name: a string or None.
          in_ring: whether parts of the memory are passed around instead of gathered, and how: see
            `blocked_attention`.
        """
        super().__init__([q, k, v, *terms.tensors], name=name or "blocked_attention")
        self._ring = in_ring
        self._form = Form.of(q, k, v, dims, terms, block_sizes)
        self.plain = plain
        rows = q.shape - dims.key
        self._outputs = [
            mtf.Tensor(self, rows + dims.value, v.dtype, index=0),
            *(mtf.Tensor(self, rows, computed_in(q.dtype), index=i) for i in (1, 2, 3)),
        ]

    @property
    def form(self) -> Form:
        """What its inputs mean."""
        return self._form

    @property
    def in_ring(self) -> Union[bool, str]:
        """Whether parts of the memory are passed around, and how."""
        return self._ring

    def gradient(self, grad_ys: Sequence[Optional[mtf.Tensor]]) -> list[Optional[mtf.Tensor]]:
        """Recomputes blocks; in a second operation for masks, whose gradient is hardly needed."""
        dy, dz = grad_ys[:2]
        y, log_z = self.outputs[:2]
        dy = mtf.zeros_like(y) if dy is None else dy
        dz = mtf.zeros_like(log_z) if dz is None else dz
        biases = [3 + i for i in self._form.weighted]
        learned = [i for i in biases if is_learned(self.inputs[i])]
        found: dict[int, mtf.Tensor] = {}
        # Two operations: TensorFlow leaves out the second, with its work, if nothing fetches it.
        for some in ([0, 1, 2, *learned], [i for i in biases if i not in learned]):
            if some:
                op = BlockedAttentionGradOperation(self, dy, dz, some)
                found.update(zip(some, op.outputs))
        return [found.get(i) for i in range(len(self.inputs))]

    def lower(self, lowering: LoweringLike) -> None:
        """Computes sums of blocks, joins those of a row, and divides."""
        mesh_impl = lowering.mesh_impl(self)
        values = self._operands(lowering)
        sums_of = self._of_slices(self._sums, mesh_impl)
        around = self._ring_axis(mesh_impl)
        if around is not None:
            moving = self._moving(self.inputs, values)
            sums = ring.joined_sums(mesh_impl, around, sums_of, values, moving)
        else:
            sums = mesh_impl.slicewise(sums_of, *values)
        lowering.count_collectives(self, "blocked_attention_op")
        axis = self._joined_axis(mesh_impl)
        if axis is not None:
            total, largest, weight = sums
            # Sums of different processors are relative to different maxima and have to be scaled to
            # one before they are added, as blocks are.
            most = mesh_impl.allreduce(largest, [axis], "MAX")
            total, weight = (
                mesh_impl.allreduce(
                    mesh_impl.slicewise(_relative_to, x, largest, most), [axis], "SUM"
                )
                for x in (total, weight)
            )
            sums = total, most, weight
        last = len(self.inputs) - 1
        extra = [] if self._form.terms.extra is None else [values[last]]
        found = mesh_impl.slicewise(self._finished, *sums, *extra)
        for y, value in zip(self.outputs, self._restored(mesh_impl, found)):
            lowering.set_tensor_lowering(y, value)

    def _joined_axis(self, mesh_impl: MeshImpl) -> Optional[int]:
        """Returns the mesh axis over which the parts of a row are, or None."""
        if self._gathered_axis(mesh_impl) is not None:
            return None
        return mesh_impl.splitting_axis(self._form.dims.memory)

    def _sums(self, operands: Operands, *inputs: tf.Tensor) -> tuple:
        found = blocks.block_sums(operands)
        return tuple(tf.reshape(x, [*operands.front, *x.shape.as_list()[2:]]) for x in found)

    def _finished(
        self, total: tf.Tensor, largest: tf.Tensor, weight: tf.Tensor, *extra: tf.Tensor
    ) -> tuple:
        form, (y, z) = self._form, self.outputs[:2]
        more: Any = form.terms.extra_value
        if extra:
            more = arranged(extra[0], form.rest[-1], [*form.row, form.dims.value.name])
        mean, *rows = blocks.finished(total, largest, weight, more)
        order = [*form.row, form.dims.value.name]
        return (
            tf.cast(restored(mean, order, y.shape.dimension_names), y.dtype),
            *(restored(x, order, z.shape.dimension_names) for x in rows),
        )

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """Two matrix products; three allreduces if the memory is split, or the gathering of it."""
        collectives = self._moved(mesh_impl)
        axis = self._joined_axis(mesh_impl)
        if axis is not None:
            y, z = (mesh_impl.laid_out_size(x.shape) for x in self.outputs[:2])
            size = self.outputs[1].dtype.size
            collectives += [Collective("allreduce", (axis,), n, n * size) for n in (z, y, z)]
        flops = self._flops(mesh_impl, _PRODUCTS)
        return Cost(flops, super().cost(mesh_impl).bytes, tuple(collectives))

    def cost_key(self) -> Hashable:
        """The dimensions that are contracted, and which blocks are computed where."""
        return self._cost_key()


def _relative_to(x: tf.Tensor, largest: tf.Tensor, most: tf.Tensor) -> tf.Tensor:
    return x * tf.exp(largest - most)


def is_learned(x: mtf.Tensor) -> bool:
    """Returns whether gradients may flow from `x` to values that are not computed from integers."""
    seen = {x}
    left = [x]
    while left:
        op = left.pop().operation
        if not op.inputs:
            return True
        if op.has_gradient:
            new = [y for y in op.inputs if is_differentiable(y.dtype) and y not in seen]
            seen.update(new)
            left += new
    return False
