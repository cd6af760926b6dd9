"""The base class of attention by blocks and of its gradient.

It decides, from the layout, how a processor gets the keys and values that its queries need: it has
them, gathers them, or has them passed around in a ring; and it adds up what that costs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.cost import Collective
from mesh_tensorflow._core.interfaces import LaidOutLike, LoweringLike
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._mesh.slices.attention_operands import Operands
from mesh_tensorflow.layers._attention import ring
from mesh_tensorflow.layers._attention.blocked_form import Form
from mesh_tensorflow.layers._attention.blocked_work import most_pairs

__all__ = ["Blocked"]

_FLOPS_PER_LOGIT = 8  # besides those of matrix products


class Blocked(mtf.Operation):
    """What attention by blocks and its gradient have in common."""

    _form: Form
    # Whether the memory's parts are passed around instead of gathered, and how: one of ring.RINGS.
    _ring: Union[bool, str]

    def _unsplittable(self) -> Collection[str]:
        """Channels are summed within a block; values of buckets belong together."""
        form = self._form
        buckets = [form.of_buckets(i)[-1] for _, i, *_ in form.terms.distances]
        return [form.dims.key.name, form.dims.value.name, *buckets]

    # -- where the memory is

    def _gathered_axis(self, mesh_impl: MeshImpl) -> Optional[int]:
        """Returns the mesh axis that splits the memory as well as the rows of logits, or None.

        Then each processor needs the whole memory.
        """
        *rows, memory = self._form.dims.logits
        axis = mesh_impl.splitting_axis(memory)
        return axis if axis in mesh_impl.splitting_axes(rows) else None

    def _ring_axis(self, mesh_impl: MeshImpl) -> Optional[int]:
        """Returns the mesh axis around which the memory is passed, or None."""
        return self._gathered_axis(mesh_impl) if self._ring else None

    def _exchanged_axis(self, mesh_impl: MeshImpl) -> Optional[int]:
        """Returns the mesh axis along which halves are exchanged so that work is even, or None."""
        axis, dims = self._ring_axis(mesh_impl), self._form.dims
        if axis is None or axis != mesh_impl.splitting_axis(dims.length):
            return None
        parts = 2 * mesh_impl.shape[axis].size
        halves = all(d.size % parts == 0 for d in (dims.length, dims.memory))
        causal = self._form.may_skip and self._form.is_ordered
        return axis if ring.is_exchanged(self._ring, halves and causal) else None

    @property
    def ring_dims(self) -> tuple[mtf.Dimension, ...]:
        """The length and the memory if a layout has to split both alike, else none."""
        dims = self._form.dims
        return (dims.length, dims.memory) if self._ring else ()

    @property
    def parts_in_ring(self) -> int:
        """Into how many parts each processor of a ring cuts its part, at least."""
        return ring.least_parts(self._ring)

    def _check_ring(self, lowering: LoweringLike) -> None:
        if self._ring:
            # Processors may be merged where it runs, but a program is right or wrong everywhere.
            ring.check(self.name, self._ring, lowering.requested_impl(self), self._form.dims)

    def _logits(self, mesh_impl: MeshImpl) -> mtf.Shape:
        """Returns the Shape of the logits; if the memory is gathered, no layout splits it."""
        *rows, memory = self._form.dims.logits
        if self._gathered_axis(mesh_impl) is not None:
            # Under a name that no rule splits, as the rows are split by that mesh axis already.
            memory = mtf.Dimension("_blocked_memory", memory.size)
        return mtf.Shape([*rows, memory])

    def _memory_axis(self, x: mtf.Tensor) -> Optional[int]:
        memory = self._form.dims.memory
        return x.shape.dims.index(memory) if memory in x.shape else None

    def _position_axis(self, x: mtf.Tensor) -> Optional[int]:
        """Returns the axis of positions, of queries or of the memory, or None."""
        length = self._form.dims.length
        return x.shape.dims.index(length) if length in x.shape else self._memory_axis(x)

    # -- laid-out operands

    def _operands(self, lowering: LoweringLike) -> list[LaidOutLike]:
        """Returns the laid-out inputs with the memory that is computed with at first.

        One more says whether blocks may be left out, if some may.
        """
        mesh_impl = lowering.mesh_impl(self)
        self._check_ring(lowering)
        values = [lowering.tensors[x] for x in self.inputs]
        # Of the operands as they lie in the layout: a gathered or an exchanged memory is in another
        # place.
        skips = self._skips(mesh_impl, values)
        gathered, exchanged = self._gathered_axis(mesh_impl), self._exchanged_axis(mesh_impl)
        if exchanged is not None:
            at = [self._position_axis(x) for x in self.inputs]
            values = [
                v if i is None else ring.exchanged(mesh_impl, exchanged, v, i)
                for v, i in zip(values, at)
            ]
        elif gathered is not None and not self._ring:
            at = [self._memory_axis(x) for x in self.inputs]
            values = [
                v if i is None else mesh_impl.allconcat(v.to_laid_out_tensor(), gathered, i)
                for v, i in zip(values, at)
            ]
        return values + skips

    def _skips(self, mesh_impl: MeshImpl, values: Sequence[LaidOutLike]) -> list[LaidOutLike]:
        """Returns [whether blocks of which nothing is seen may be left out], or an empty list."""
        form = self._form
        length, memory = (mesh_impl.splitting_axis(d) for d in (form.dims.length, form.dims.memory))
        if not form.may_skip or memory not in (None, length):
            return []
        [size] = mesh_impl.slice_shape(mtf.Shape([form.dims.length]))
        # Some of the queries and the whole memory: their own positions begin somewhere in it.
        begins = (
            [mesh_impl.laid_out_pcoord(length)] if length is not None and memory is None else []
        )

        def skips(*slices: Any) -> tf.Tensor:
            *rest, part = slices if begins else (*slices, 0)
            return form.skips(rest, size, part * size)

        return [mesh_impl.slicewise(skips, *values[3 : 3 + len(form.rest)], *begins)]

    def _moving(self, tensors: Sequence[mtf.Tensor], values: Sequence[Any]) -> list[bool]:
        """Returns which of values, of Tensors and others after them, belong to the memory."""
        found = [self._memory_axis(x) is not None for x in tensors]
        return found + [False] * (len(values) - len(found))

    def _restored(self, mesh_impl: MeshImpl, values: Sequence[Any]) -> list[Any]:
        """Returns values of the outputs, with the halves that were exchanged where they belong."""
        axis = self._exchanged_axis(mesh_impl)
        at = [self._position_axis(y) for y in self.outputs]
        if axis is None:
            return list(values)
        return [
            v if i is None else ring.exchanged(mesh_impl, axis, v, i) for v, i in zip(values, at)
        ]

    def _of_slices(self, compute: Callable, mesh_impl: MeshImpl) -> Callable:
        """Returns a function of slices of `_operands`; `compute` takes Operands and the slices."""
        parts = 1 if self._exchanged_axis(mesh_impl) is None else 2
        count = 3 + len(self._form.rest)

        def computed(*values: tf.Tensor) -> tuple:
            inputs, [*skips] = values[: len(self.inputs)], values[len(self.inputs) :]
            q, k, v, *rest = inputs[:count]
            [may_skip] = skips or [None]
            of: Operands = self._form.operands(q, k, v, rest, may_skip, parts)
            return compute(of, *inputs)

        return computed

    # -- costs

    def _moved(self, mesh_impl: MeshImpl) -> list[Collective]:
        """Returns the collectives that gather the memory, and scatter gradients along it."""
        axis = self._gathered_axis(mesh_impl)
        if axis is None:
            return []
        inputs, outputs = (
            [x for x in xs if self._memory_axis(x) is not None]
            for xs in (self.inputs, self.outputs)
        )
        if self._ring:
            exchanged = [] if self._exchanged_axis(mesh_impl) is None else [
                x for x in (*self.inputs, *self.outputs) if self._position_axis(x) is not None
            ]  # fmt: skip
            return ring.exchanges(mesh_impl, axis, exchanged) + ring.shifts(
                mesh_impl, axis, inputs, outputs
            )
        parts = mesh_impl.shape[axis].size
        found = []
        for kind, tensors in (("allconcat", inputs), ("reduce_scatter", outputs)):
            for x in tensors:
                n = mesh_impl.laid_out_size(x.shape) * parts
                found.append(Collective(kind, (axis,), n, n * x.dtype.size))
        return found

    def _flops(self, mesh_impl: MeshImpl, products: int) -> int:
        """Returns what is computed if all processors do as much as the busiest one.

        Blocks that an order hides are left out; those of other segments are not known.
        """
        dims = self._form.dims
        logits = mesh_impl.laid_out_size(self._logits(mesh_impl))
        pairs = self._computed_pairs(mesh_impl)
        if pairs is not None:
            [length] = mesh_impl.slice_shape(mtf.Shape([dims.length]))
            logits = logits // (length * dims.memory.size) * pairs
        return logits * (products * (dims.key.size + dims.value.size) + _FLOPS_PER_LOGIT)

    def _computed_pairs(self, mesh_impl: MeshImpl) -> Optional[int]:
        """Returns how many pairs of positions the busiest processor computes; None if all."""
        form, dims = self._form, self._form.dims
        axis = mesh_impl.splitting_axis(dims.length)
        if not self._skips_by_order(mesh_impl):
            return None
        [length] = mesh_impl.slice_shape(mtf.Shape([dims.length]))
        front = mtf.list_product(mesh_impl.slice_shape(mtf.Shape(dims.front)))
        halves = self._exchanged_axis(mesh_impl) is not None
        memory = length if self._ring_axis(mesh_impl) is not None else dims.memory.size
        found = form.blocks(front, length, memory, 2 if halves else 1)
        if found[1] >= dims.memory.size:
            return None
        count = 1 if axis is None else mesh_impl.shape[axis].size
        within = min(found[0], length), min(found[1], memory)
        return most_pairs(
            dims.length.size, count, memory, within, halves, form.order == "greater_equal"
        )

    def _skips_by_order(self, mesh_impl: MeshImpl) -> bool:
        dims = self._form.dims
        length, memory = (mesh_impl.splitting_axis(d) for d in (dims.length, dims.memory))
        return self._form.may_skip and self._form.is_ordered and memory in (None, length)

    def _cost_key(self) -> tuple:
        """Returns what costs depend on besides shapes."""
        form = self._form
        return form.dims, self._ring, form.block_sizes, form.may_skip, form.order
