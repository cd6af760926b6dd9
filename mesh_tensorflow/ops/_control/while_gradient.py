"""The gradient of a loop: a loop over the iterations in reverse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.cost import Cost
from mesh_tensorflow._core.interfaces import LoweringLike
from mesh_tensorflow._core.operation import Loop, Operation, PendingSums
from mesh_tensorflow._core.pending import walk
from mesh_tensorflow._core.tensor import Tensor, is_differentiable
from mesh_tensorflow._mesh.constants import inside_loop
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow.ops._control.control import external_inputs
from mesh_tensorflow.ops._control.loop_state import (
    LoopState,
    accumulate,
    after_loop,
    loop_values,
    zero_state,
)

if TYPE_CHECKING:
    from mesh_tensorflow.ops._control.while_loop import WhileLoopOperation

__all__: list[str] = []


class WhileGradientOperation(Operation):
    """Propagates gradients of the loop variables backward, and sums those of other inputs.

    An iteration reads values from the forward loop's tape, recomputes the body and computes its
    gradient.
    """

    def __init__(self, forward: WhileLoopOperation, grad_ys: Sequence[Optional[Tensor]]):
        """Creates the operation.

        Args:
          forward: a WhileLoopOperation.
          grad_ys: a Tensor or None for each of its outputs.
        """
        n = forward.num_vars
        floating = [i for i, p in enumerate(forward.placeholders) if is_differentiable(p.dtype)]
        first: list[Any] = [
            mtf.zeros_like(forward.outputs[i]) if grad_ys[i] is None else grad_ys[i]
            for i in floating
        ]
        # The gradient of an iteration's variables is what the iteration before it gets.
        carried = loop_values(first, "loop_gradient")
        sums = [i for i in range(n, len(grad_ys)) if grad_ys[i] is not None]
        ys = [forward.body_outputs[i] for i in floating + sums]
        dys = carried + [grad_ys[i] for i in sums]
        external = [x for x in forward.inputs[n:] if is_differentiable(x.dtype)]
        starts = [forward.placeholders[i] for i in floating]

        def build() -> tuple[list[Tensor], list[Optional[Tensor]]]:
            grads = mtf.gradients(ys, starts + external, dys, operations=forward.body_operations)
            back = [mtf.zeros_like(x) if g is None else g for x, g in zip(starts, grads)]
            return back, grads[len(starts) :]

        (back, external_grads), grad_ops = forward.graph.take_operations(build)
        summed = [(x, g) for x, g in zip(external, external_grads) if g is not None]
        needed = _needed(forward.body_operations, grad_ops, back + [g for _, g in summed])
        known = [*forward.taped(), *carried, *(y for op in needed for y in op.outputs)]
        inputs = first + [dys[len(floating) + k] for k in range(len(sums))]
        inputs += [x for x in external_inputs(needed + grad_ops, known) if x not in inputs]
        # Inputs that the tape depends on, so that a second gradient reaches this loop.
        inputs += [x for x in forward.inputs if x not in inputs]
        super().__init__(inputs, name="while_gradient")
        self._forward = forward
        self._carried = carried
        self._results = back + [g for _, g in summed]
        self._operations = needed + grad_ops
        self._outputs = [
            Tensor(self, x.shape, x.dtype, index=i) for i, x in enumerate(self._results)
        ]
        sums_out = self._outputs[len(back) :]
        by_input: dict[Tensor, Tensor] = {x: y for (x, _), y in zip(summed, sums_out)}
        gradient_of_var = dict(zip(floating, self._outputs))
        self._input_gradients: list[Optional[Tensor]] = [
            gradient_of_var.get(i) for i in range(n)
        ] + [by_input.get(x) for x in forward.inputs[n:]]

    @property
    def input_gradients(self) -> list[Optional[Tensor]]:
        """The gradient of each input of the forward loop, or None."""
        return self._input_gradients

    @property
    def loop(self) -> Loop:
        """The recomputed body and its gradient; see Operation."""
        n = len(self._carried)
        return Loop(
            self._operations,
            self._results[:n],
            list(zip(self.outputs[n:], self._results[n:])),
            self._forward.iterations,
            [],
            self._forward,
        )

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Raises an error: there is no second derivative."""
        raise NotImplementedError(
            f"{self.name}: the gradient of a loop has no gradient itself; unroll the loop"
        )

    def lower(self, lowering: LoweringLike) -> None:
        """Lowers to a tf.while_loop over the iterations in reverse order."""
        mesh_impl = lowering.mesh_impl(self)
        tape, count, arrays = lowering.loop_tapes[self._forward]
        values = [lowering.tensors[x].to_laid_out_tensor() for x in self.inputs]
        n = len(self._carried)
        pending = walk(self._operations, mesh_impl)
        # Gradients of weights stay partial within the loop, so that there is one allreduce after it
        # and not one for each iteration. What is carried is needed whole in the next iteration.
        summands = [False] * n + [bool(pending.pending_axes(y)) for y in self._results[n:]]
        state = LoopState(mesh_impl, [y.shape for y in self._results], summands)
        counters: dict[int, Any] = {}

        def body(index: tf.Tensor, flat: list) -> tuple:
            totals = state.unflatten(flat)
            tape.read(lowering, arrays, index)
            for x, value in zip(self._carried, totals):
                lowering.set_tensor_lowering(x, value)
            with inside_loop():
                lowering.lower_operations(self._operations)
                results = [lowering.tensors[y] for y in self._results]
                new = results[:n]
                new += accumulate(mesh_impl, totals[n:], results[n:], summands[n:], counters)
                return index - 1, state.flatten(new)

        zeros = [zero_state(mesh_impl, y, s) for y, s in zip(self._results[n:], summands[n:])]
        _, flat = tf.while_loop(
            lambda index, flat: index >= 0,
            body,
            (count - 1, state.flatten(values[:n] + zeros)),
            back_prop=False,
        )
        final = state.unflatten(flat)
        final[n:] = after_loop(mesh_impl, final[n:], counters)
        for y, value in zip(self.outputs, final):
            lowering.set_tensor_lowering(y, value)

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """Returns the cost of one iteration; the number of iterations is unknown."""
        inner = walk(self._operations, mesh_impl, self._results[: len(self._carried)]).costs
        return sum((cost for _, cost in inner), Cost())

    def pending_sums(self, mesh_impl: MeshImpl, pending: PendingSums) -> dict:
        """Accumulated gradients are pending as they are within an iteration."""
        inner = walk(self._operations, mesh_impl)
        n = len(self._carried)
        axes = {y: inner.pending_axes(x) for y, x in zip(self.outputs[n:], self._results[n:])}
        return {y: a for y, a in axes.items() if a}


def _needed(
    body: Sequence[Operation], users: Sequence[Operation], results: Sequence[Tensor]
) -> list[Operation]:
    """Returns the operations of the body whose outputs are used, except random ones."""
    # What no gradient reads is not computed a second time.
    wanted = set(results) | {x for op in users for x in op.inputs}
    # The gradient of an inner loop reads the tape of the inner loop.
    loops = {op._forward for op in users if isinstance(op, WhileGradientOperation)}
    found = []
    for op in reversed(body):
        if op.inputs and (op in loops or any(y in wanted for y in op.outputs)):
            found.append(op)
            wanted.update(op.inputs)
        elif not op.inputs and not isinstance(op, mtf.RandomOperation):
            if any(y in wanted for y in op.outputs):
                found.append(op)
    return found[::-1]
