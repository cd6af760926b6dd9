"""The operations of attention by blocks: the means of values, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.cost import Collective, Cost
from mesh_tensorflow._core.interfaces import LaidOutLike, LoweringLike
from mesh_tensorflow._core.operation import PendingSums
from mesh_tensorflow._core.tensor import is_differentiable
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._mesh.slices import attention_blocks as blocks
from mesh_tensorflow._mesh.slices.attention_operands import arranged, computed_in, restored
from mesh_tensorflow.layers._attention import ring
from mesh_tensorflow.layers._attention.blocked_form import Dims, Form, Terms

__all__ = ["BlockedAttentionGradOperation", "BlockedAttentionOperation"]

_FLOPS_PER_LOGIT = 8  # besides those of matrix products
# Matrix products of a block, of the value and with the gradients of queries, keys and values.
_PRODUCTS, _QKV_PRODUCTS = 2, 5


class _Blocked(mtf.Operation):
    """What attention by blocks and its gradient have in common."""

    _form: Form
    _in_ring: bool  # whether the memory's parts are passed around instead of gathered

    def _unsplittable(self) -> Collection[str]:
        """Channels are summed within a block; numbers of a key, and buckets, belong together."""
        form = self._form
        key = [form.rest[i] for i in form.terms.noise[:1]]
        key += [form.of_buckets(i)[-1:] for _, i, *_ in form.terms.distances]
        return [
            form.dims.key.name,
            form.dims.value.name,
            *(name for names in key for name in names),
        ]

    def _gathered_axis(self, mesh_impl: MeshImpl) -> Optional[int]:
        """Returns the mesh axis that splits the memory as well as the rows of logits, or None.

        Then each processor needs the whole memory.
        """
        *rows, memory = self._form.dims.logits
        axis = mesh_impl.splitting_axis(memory)
        return axis if axis in mesh_impl.splitting_axes(rows) else None

    def _logits(self, mesh_impl: MeshImpl) -> mtf.Shape:
        """Returns the Shape of the logits; if the memory is gathered, no layout splits it."""
        *rows, memory = self._form.dims.logits
        if self._gathered_axis(mesh_impl) is not None:
            memory = mtf.Dimension("_blocked_memory", memory.size)
        return mtf.Shape([*rows, memory])

    def _memory_axis(self, x: mtf.Tensor) -> Optional[int]:
        memory = self._form.dims.memory
        return x.shape.dims.index(memory) if memory in x.shape else None

    def _operands(self, lowering: LoweringLike) -> list[LaidOutLike]:
        """Returns the laid-out inputs, with the whole memory if it is gathered at once."""
        mesh_impl = lowering.mesh_impl(self)
        axis = self._gathered_axis(mesh_impl)
        values = [lowering.tensors[x] for x in self.inputs]
        if axis is None or self._in_ring:
            return values
        at = [self._memory_axis(x) for x in self.inputs]
        return [
            v if i is None else mesh_impl.allconcat(v.to_laid_out_tensor(), axis, i)
            for v, i in zip(values, at)
        ]

    def _moved(self, mesh_impl: MeshImpl) -> list[Collective]:
        """Returns the collectives that gather the memory, and scatter gradients along it."""
        axis = self._gathered_axis(mesh_impl)
        if axis is None:
            return []
        if self._in_ring:
            return ring.shifts(mesh_impl, axis, *self._around())
        parts = mesh_impl.shape[axis].size
        kinds = [("allconcat", self.inputs), ("reduce_scatter", self.outputs)]
        found = []
        for kind, tensors in kinds:
            for x in tensors:
                if self._memory_axis(x) is not None:
                    n = mesh_impl.laid_out_size(x.shape) * parts
                    found.append(Collective(kind, (axis,), n, n * x.dtype.size))
        return found

    def _around(self) -> tuple[list[mtf.Tensor], list[mtf.Tensor]]:
        """Returns the inputs and the outputs that belong to positions of the memory."""
        inputs, outputs = (
            [x for x in xs if self._memory_axis(x) is not None]
            for xs in (self.inputs, self.outputs)
        )
        return inputs, outputs

    def _flops(self, mesh_impl: MeshImpl, products: int) -> int:
        dims = self._form.dims
        logits = mesh_impl.laid_out_size(self._logits(mesh_impl))
        return logits * (products * (dims.key.size + dims.value.size) + _FLOPS_PER_LOGIT)


class BlockedAttentionOperation(_Blocked):
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
        in_ring: bool = False,
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
          in_ring: whether parts of the memory are passed around, where one mesh dimension splits
            rows and memory, instead of gathered.
        """
        super().__init__([q, k, v, *terms.tensors], name=name or "blocked_attention")
        self._in_ring = in_ring
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
    def in_ring(self) -> bool:
        """Whether parts of the memory are passed around."""
        return self._in_ring

    def gradient(self, grad_ys: Sequence[Optional[mtf.Tensor]]) -> list[Optional[mtf.Tensor]]:
        """Recomputes blocks; in a second operation for masks, whose gradient is hardly needed."""
        dy, dz = grad_ys[:2]
        y, log_z = self.outputs[:2]
        dy = mtf.zeros_like(y) if dy is None else dy
        dz = mtf.zeros_like(log_z) if dz is None else dz
        biases = [3 + i for i in self._form.weighted]
        learned = [i for i in biases if is_learned(self.inputs[i])]
        found: dict[int, mtf.Tensor] = {}
        for some in ([0, 1, 2, *learned], [i for i in biases if i not in learned]):
            if some:
                op = BlockedAttentionGradOperation(self, dy, dz, some)
                found.update(zip(some, op.outputs))
        return [found.get(i) for i in range(len(self.inputs))]

    def lower(self, lowering: LoweringLike) -> None:
        """Computes sums of blocks, joins those of a row, and divides."""
        mesh_impl = lowering.mesh_impl(self)
        values = self._operands(lowering)
        extra = [] if self._form.terms.extra is None else [values.pop()]
        gathered = self._gathered_axis(mesh_impl)
        if gathered is not None and self._in_ring:
            moving = [self._memory_axis(x) is not None for x in self.inputs]
            sums = ring.joined_sums(mesh_impl, gathered, self._sums, values, moving)
        else:
            sums = mesh_impl.slicewise(self._sums, *values)
        lowering.count_collectives(self, "blocked_attention_op")
        axis = self._joined_axis(mesh_impl)
        if axis is not None:
            total, largest, weight = sums
            most = mesh_impl.allreduce(largest, [axis], "MAX")
            total, weight = (
                mesh_impl.allreduce(
                    mesh_impl.slicewise(_relative_to, x, largest, most), [axis], "SUM"
                )
                for x in (total, weight)
            )
            sums = total, most, weight
        found = mesh_impl.slicewise(self._finished, *sums, *extra)
        for y, value in zip(self.outputs, found):
            lowering.set_tensor_lowering(y, value)

    def _joined_axis(self, mesh_impl: MeshImpl) -> Optional[int]:
        """Returns the mesh axis over which the parts of a row are, or None."""
        if self._gathered_axis(mesh_impl) is not None:
            return None
        return mesh_impl.splitting_axis(self._form.dims.memory)

    def _sums(self, q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, *rest: tf.Tensor) -> tuple:
        front = self._form.front(q)
        found = blocks.block_sums(self._form.operands(q, k, v, rest))
        return tuple(tf.reshape(x, [*front, *x.shape.as_list()[2:]]) for x in found)

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
        """The dimensions that are contracted."""
        return self._form.dims


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


class BlockedAttentionGradOperation(_Blocked):
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
        self._in_ring = forward_op.in_ring
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
        gathered = self._gathered_axis(mesh_impl)
        operands = self._operands(lowering)
        if gathered is not None and self._in_ring:
            moving, returned = (
                [self._memory_axis(x) is not None for x in xs] for xs in (self.inputs, self.outputs)
            )
            values = ring.added_gradients(
                mesh_impl, gathered, self._gradients, operands, moving, returned
            )
        else:
            values = mesh_impl.slicewise(self._gradients, *operands)
        lowering.count_collectives(self, "blocked_attention_op")
        for y, value in zip(self.outputs, values):
            at = self._memory_axis(y)
            if gathered is not None and at is not None and not self._in_ring:
                value = mesh_impl.reduce_scatter(value, gathered, at)
            axes = self._summed_axes(mesh_impl, y)
            lowering.set_partial_sum(y, value, axes, "blocked_attention_op")

    def _summed_axes(self, mesh_impl: MeshImpl, x: mtf.Tensor) -> list[int]:
        """Returns the mesh axes to sum over: those that split logits but not `x`."""
        over = set(mesh_impl.splitting_axes(self._logits(mesh_impl)))
        return sorted(over - set(mesh_impl.splitting_axes(x.shape)))

    def _gradients(self, q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, *others: tf.Tensor) -> tuple:
        form = self._form
        *rest, y, largest, weight, dy, dz = others
        of = form.operands(q, k, v, rest)
        value = form.dims.value.name
        names = self.inputs[-2].shape.dimension_names
        row_names = self.inputs[-1].shape.dimension_names
        y, dy = (tf.cast(form.rows(x, names, value), of.dtype) for x in (y, dy))
        largest, weight, dz = (form.rows(x, row_names, value) for x in (largest, weight, dz))
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
        front, key = form.front(q), form.dims.key.name
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
        """The dimensions that are contracted, and what is computed."""
        return self._form.dims, tuple(self._wanted)
