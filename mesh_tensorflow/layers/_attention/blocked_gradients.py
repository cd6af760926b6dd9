"""The operation of the gradients of attention by blocks, which computes each block again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.cost import Cost
from mesh_tensorflow._core.interfaces import LoweringLike
from mesh_tensorflow._core.operation import PendingSums
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._mesh.slices import attention_blocks as blocks
from mesh_tensorflow._mesh.slices.attention_operands import Operands, restored
from mesh_tensorflow.layers._attention import ring
from mesh_tensorflow.layers._attention.blocked_base import Blocked

if TYPE_CHECKING:
    from mesh_tensorflow.layers._attention.blocked_operation import BlockedAttentionOperation

__all__ = ["BlockedAttentionGradOperation"]

# Matrix products of a block, with the gradients of queries, keys and values, and without.
_QKV_PRODUCTS, _PRODUCTS = 5, 2


class BlockedAttentionGradOperation(Blocked):
    """Gradients of attention by blocks, which are computed again."""

    def __init__(
        self,
        forward_op: BlockedAttentionOperation,
        dy: mtf.Tensor,
        dz: mtf.Tensor,
        wanted: Sequence[int],
    ):
        """Creates the operation.

        Args:
          forward_op: the operation whose gradients it computes.
          dy: the gradient of its first output.
          dz: that of the second.
          wanted: the indices of the inputs whose gradients are its outputs: those of q, k and v, or
            none of these; then those of biases.
        """
        inputs = forward_op.inputs
        y, _, *parts = forward_op.outputs
        super().__init__([*inputs, y, *parts, dy, dz], name="blocked_attention_grad")
        self._form = forward_op.form
        self._ring = forward_op.in_ring
        self._plain = forward_op.plain
        self._wanted = list(wanted)
        self._outputs = [
            mtf.Tensor(self, inputs[i].shape, inputs[i].dtype, index=n)
            for n, i in enumerate(wanted)
        ]

    def gradient(self, grad_ys: Sequence[Optional[mtf.Tensor]]) -> list[Optional[mtf.Tensor]]:
        """Differentiates the gradients of the plain form."""
        *inputs, _, _, _, dy, dz = self.inputs
        q, k, v, *rest = inputs
        form = self._form
        wanted = [inputs[i] for i in self._wanted]
        given = [(n, d) for n, d in enumerate(grad_ys) if d is not None]

        start = len(self.graph.operations)
        # The plain form is made of operations that have gradients of any order; it needs all
        # logits.
        ys = self._plain(q, k, v, form.dims, form.terms.of(rest))
        first = mtf.gradients(ys, wanted, [dy, dz], self.graph.operations[start:])
        operations = self.graph.operations[start:]
        some = [(first[n], d) for n, d in given if first[n] is not None]
        xs = [*inputs, dy, dz]
        found = mtf.gradients([x for x, _ in some], xs, [d for _, d in some], operations)
        return [*found[:-2], None, None, None, *found[-2:]]

    def lower(self, lowering: LoweringLike) -> None:
        """Computes gradients block by block; sums over processors are pending."""
        mesh_impl = lowering.mesh_impl(self)
        gathered, around = self._gathered_axis(mesh_impl), self._ring_axis(mesh_impl)
        operands = self._operands(lowering)
        gradients_of = self._of_slices(self._gradients, mesh_impl)
        if around is not None:
            moving = self._moving(self.inputs, operands)
            returned = self._moving(self.outputs, self.outputs)
            values = ring.added_gradients(
                mesh_impl, around, gradients_of, operands, moving, returned
            )
        else:
            values = mesh_impl.slicewise(gradients_of, *operands)
        lowering.count_collectives(self, "blocked_attention_op")
        for y, value in zip(self.outputs, self._restored(mesh_impl, values)):
            at = self._memory_axis(y)
            if gathered is not None and at is not None and not self._ring:
                # Each processor has a gradient of the whole memory, of its own queries; of the sum
                # it keeps its part.
                value = mesh_impl.reduce_scatter(value, gathered, at)
            axes = self._summed_axes(mesh_impl, y)
            lowering.set_partial_sum(y, value, axes, "blocked_attention_op")

    def _summed_axes(self, mesh_impl: MeshImpl, x: mtf.Tensor) -> list[int]:
        """Returns the mesh axes to sum over: those that split logits but not `x`."""
        over = set(mesh_impl.splitting_axes(self._logits(mesh_impl)))
        return sorted(over - set(mesh_impl.splitting_axes(x.shape)))

    def _gradients(self, of: Operands, *inputs: tf.Tensor) -> tuple:
        form = self._form
        *_, y, largest, weight, dy, dz = inputs
        value = form.dims.value.name
        names = self.inputs[-2].shape.dimension_names
        row_names = self.inputs[-1].shape.dimension_names
        y, dy = (tf.cast(form.rows(x, names, value), of.dtype) for x in (y, dy))
        largest, weight, dz = (form.rows(x, row_names, value) for x in (largest, weight, dz))
        # The sum over the memory of weight times its gradient is that of y * dy over channels (Dao
        # et al., 2022, appendix B.2); dz is the gradient of log(weight) + largest.
        shift = (tf.reduce_sum(y * dy, -1, keepdims=True) - dz) / weight
        dy = dy / weight
        indices: Any = [i for _, i, *_ in form.terms.distances]
        values = {i: n for n, i in enumerate(indices)}
        more = [i - 3 for i in self._wanted if i >= 3]
        found = blocks.block_gradients(
            of,
            largest,
            shift,
            dy,
            0 in self._wanted,
            [i for i in more if i not in values],
            [values[i] for i in more if i in values],
        )
        front, key = list(of.front), form.dims.key.name
        shared = front[: len(form.dims.shared)]
        orders = {0: (front, [*form.row, key]), 1: (shared, [*form.column, key]),
                  2: (shared, [*form.column, value])}  # fmt: skip
        results = []
        for i, x, output in zip(self._wanted, found, self.outputs):
            before, order = orders.get(i, (None, [*form.row, form.dims.memory.name]))
            if i - 3 in values:
                order = form.of_buckets(i - 3)
            if before is not None:
                x = tf.reshape(x, [*before, *x.shape.as_list()[-2:]])
            results.append(tf.cast(restored(x, order, output.shape.dimension_names), output.dtype))
        return tuple(results)

    def pending_sums(self, mesh_impl: MeshImpl, pending: PendingSums) -> dict:
        """Gradients of inputs that are replicated where logits are split are pending."""
        axes = {y: tuple(self._summed_axes(mesh_impl, y)) for y in self._outputs}
        return {y: a for y, a in axes.items() if a}

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """The logits again, and a matrix product for each factor; the gathering of a memory."""
        products = _QKV_PRODUCTS if 0 in self._wanted else _PRODUCTS
        flops = self._flops(mesh_impl, products)
        return Cost(flops, super().cost(mesh_impl).bytes, tuple(self._moved(mesh_impl)))

    def cost_key(self) -> Hashable:
        """The dimensions that are contracted, which blocks are computed where, and what of them."""
        return self._cost_key(), tuple(self._wanted)
