"""while_loop: a loop in the Graph, its gradient, and what iterations keep for that."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Optional, TypeGuard

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.errors import tensors_text
from mesh_tensorflow._core.graph import Mesh, leaves_no_node
from mesh_tensorflow._core.operation import (
    Cost,
    Loop,
    Operation,
    Tensor,
    check_tensors,
    is_differentiable,
    readers_of,
    with_inner_operations,
)
from mesh_tensorflow._core.placement import sums_of, walk
from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._mesh import replicate
from mesh_tensorflow._mesh.mesh_impl import LazyAllreduceSum, MeshImpl, is_pending
from mesh_tensorflow._mesh.random_values import fold_key
from mesh_tensorflow._mesh.slice_functions import inside_loop
from mesh_tensorflow.ops._control.control import Depend, external_inputs
from mesh_tensorflow.ops._random import RandomOperation
from mesh_tensorflow.ops._source import or_zeros
from mesh_tensorflow.ops._variable import (
    Assign,
    ReadVariable,
    Variable,
    earlier_assignments,
)

__all__ = ["WhileLoopOperation", "while_loop"]


class LoopValueOperation(Operation):
    """A placeholder for a value inside a loop; the loop sets its lowered value."""

    takes_padding = True

    def __init__(self, mesh: Mesh, shape: Shape, dtype: tf.DType, name: str):
        super().__init__([], mesh=mesh, name=name)
        self._outputs = [Tensor(self, shape, dtype)]

    def lower(self, lowering: mtf.Lowering) -> None:
        """Raises an error: the loop gives the value when it is lowered."""
        raise ValueError(f"{self.name} has a value only inside its loop")


def loop_values(xs: Sequence[Tensor], name: str) -> list[Tensor]:
    """Returns a placeholder for each of `xs`; their operations are not added to the graph."""
    if not xs:
        return []
    # In the graph, a Lowering would try to lower them, and only their loop can give them values.
    values, _ = xs[0].graph.take_operations(
        lambda: [LoopValueOperation(x.mesh, x.shape, x.dtype, name).outputs[0] for x in xs]
    )
    return values


def _zeros(mesh_impl: MeshImpl, y: Tensor, summands: bool) -> Any:
    """Returns laid-out zeros to accumulate into."""
    sizes = mesh_impl.slice_shape(y.shape)
    if not summands:
        return mesh_impl.slicewise(lambda: tf.zeros(sizes, y.dtype))
    # The processor's number is an argument only so that each gets zeros of its own: equal slices
    # would be one tensor, into which summands that differ could not be accumulated.
    return mesh_impl.slicewise(lambda _: tf.zeros(sizes, y.dtype), mesh_impl.laid_out_pnum())


class LoopState:
    """What a loop carries of some Tensors of an iteration, as a flat list of tf.Tensors.

    Of the first Tensors, the loop's variables, it carries the values of the last iteration; of all
    others the sums over the iterations so far.
    """

    def __init__(
        self,
        mesh_impl: MeshImpl,
        tensors: Sequence[Tensor],
        num_vars: int,
        partial: Collection[Tensor] = (),
    ):
        """Creates a LoopState.

        Args:
          mesh_impl: a MeshImpl.
          tensors: the Tensors of an iteration.
          num_vars: how many of them are variables.
          partial: those Tensors of an iteration that are partial sums.
        """
        self._mesh_impl = mesh_impl
        self._tensors = list(tensors)
        self._num_vars = num_vars
        # Sums of partial sums stay partial, so that there is one allreduce after the loop and not
        # one for each iteration. A variable is needed whole in the next iteration.
        self._summands = [i >= num_vars and y in partial for i, y in enumerate(tensors)]
        # By index, the mesh axes and the counter of each sum that stays partial.
        self._partial: dict[int, tuple] = {}
        # How many tf.Tensors each value becomes, which depends on the mesh: `flatten` finds out,
        # and must be called before `unflatten`.
        self._counts: list[int] = []

    def first(self, values: Sequence[Any]) -> list[tf.Tensor]:
        """Returns what the first iteration is given: the variables' values, and zeros for sums."""
        sums = list(zip(self._tensors, self._summands))[self._num_vars :]
        return self.flatten([*values, *(_zeros(self._mesh_impl, y, s) for y, s in sums)])

    def next(self, lowering: mtf.Lowering, carried: Sequence[Any]) -> list[Any]:
        """Returns the values after an iteration that has been lowered, given those before it."""
        new = []
        for i, (total, y) in enumerate(zip(carried, self._tensors, strict=True)):
            value = lowering.tensors[y]
            if self._summands[i]:
                # Lowering has left pending what was predicted to be.
                assert is_pending(value)
                self._partial[i] = (value.mesh_axes, value.add_counter_fn)
                value = value.laid_out_input
            if i >= self._num_vars:
                value = self._mesh_impl.slicewise(tf.add, total, value.to_laid_out_tensor())
            new.append(value)
        return new

    def last(self, flat: Sequence[tf.Tensor]) -> list[Any]:
        """Returns the values after the loop, of which partial sums are summed when needed."""
        values = self.unflatten(flat)
        for i, (axes, count) in self._partial.items():
            values[i] = LazyAllreduceSum(self._mesh_impl, values[i], axes, count)
        return values

    def flatten(self, values: Sequence[Any]) -> list[tf.Tensor]:
        """Returns the tf.Tensors of laid-out values."""
        parts = []
        for value, x, summands in zip(values, self._tensors, self._summands, strict=True):
            value = value.to_laid_out_tensor()
            if summands:
                # Summands differ even between processors that would hold the same slice of a sum.
                parts.append(list(value.all_slices))
            else:
                parts.append(self._mesh_impl.loop_slices(value, x.shape))
        self._counts = [len(part) for part in parts]
        return [t for part in parts for t in part]

    def unflatten(self, flat: Sequence[tf.Tensor]) -> list[Any]:
        """Returns the laid-out values of tf.Tensors."""
        values, at = [], 0
        for count, x, summands in zip(self._counts, self._tensors, self._summands):
            part = list(flat[at : at + count])
            at += count
            if summands:
                values.append(self._mesh_impl.LaidOutTensor.from_tensor_list(part))
            else:
                values.append(self._mesh_impl.from_loop_slices(part, x.shape))
        return values


class Tape:
    """Past values of Tensors, one entry for each iteration, in tf.TensorArrays."""

    def __init__(self, mesh_impl: MeshImpl, tensors: Sequence[Tensor]):
        self._mesh_impl = mesh_impl
        self._tensors = list(tensors)
        self._state = LoopState(mesh_impl, tensors, len(tensors))

    def new_arrays(self, most: Optional[int] = None) -> list[tf.TensorArray]:
        """Returns empty arrays, one for each saved tf.Tensor.

        Args:
          most: their size; arrays that grow if None.
        """
        arrays = []
        for x in self._tensors:
            sizes = self._mesh_impl.slice_shape(x.shape)
            # For their number alone: nothing reads these zeros.
            slices = self._mesh_impl.loop_slices(_zeros(self._mesh_impl, x, False), x.shape)
            arrays += [
                tf.TensorArray(
                    x.dtype,
                    size=most or 0,
                    dynamic_size=most is None,
                    # A gradient that is computed again reads the tape a second time.
                    clear_after_read=False,
                    element_shape=sizes,
                )
                for _ in slices
            ]
        return arrays

    def write(
        self, lowering: mtf.Lowering, arrays: Sequence[tf.TensorArray], index: tf.Tensor
    ) -> list[tf.TensorArray]:
        """Returns the arrays with the current values of the Tensors written at `index`."""
        flat = self._state.flatten([lowering.tensors[x] for x in self._tensors])
        return [array.write(index, t) for array, t in zip(arrays, flat, strict=True)]

    def read(
        self, lowering: mtf.Lowering, arrays: Sequence[tf.TensorArray], index: tf.Tensor
    ) -> None:
        """Sets the lowered values of the Tensors to those saved at `index`."""
        flat = [array.read(index) for array in arrays]
        # Their numbers are known since `write`: the forward loop is lowered before its gradient.
        flat_tensors = [x for x, n in zip(self._tensors, self._state._counts) for _ in range(n)]
        for t, x in zip(flat, flat_tensors, strict=True):
            t.set_shape(self._mesh_impl.slice_shape(x.shape))
        for x, value in zip(self._tensors, self._state.unflatten(flat)):
            lowering.set_tensor_lowering(x, value)


class _LoopOperation(Operation):
    """What a loop and its gradient have in common."""

    takes_padding = True

    @property
    def loop(self) -> Loop:
        """Its contents; see Operation."""
        raise NotImplementedError(f"{type(self).__name__} has no loop")

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """Returns the cost of one iteration; the number of iterations is unknown."""
        inner = walk(self.loop.operations, mesh_impl, self.loop.needed).costs
        return sum((cost for _, cost in inner), Cost())

    def begun_sums(self, mesh_impl: MeshImpl) -> dict[Tensor, tuple[int, ...]]:
        """What is summed over iterations is partial as it is within one."""
        loop = self.loop
        inner = sums_of(loop.operations, mesh_impl)
        return {y: inner.pending_axes(x) for y, x in loop.sums}


class WhileGradientOperation(_LoopOperation):
    """Propagates gradients of the loop variables backward, and sums those of other inputs.

    An iteration reads values from the forward loop's tape, recomputes the body and computes its
    gradient.

    Attributes:
      input_gradients: the gradient of each input of the forward loop, or None.
    """

    def __init__(self, forward: WhileLoopOperation, grad_ys: Sequence[Optional[Tensor]]):
        """Creates the operation.

        Args:
          forward: a WhileLoopOperation.
          grad_ys: a Tensor or None for each of its outputs.
        """
        n = forward.num_vars
        floating = [i for i, p in enumerate(forward.placeholders) if is_differentiable(p.dtype)]
        # An unused result has the gradient 0 after the last iteration only: in those before, other
        # variables may have been computed from it.
        first: list[Any] = [
            mtf.zeros_like(forward.outputs[i]) if grad_ys[i] is None else grad_ys[i]
            for i in floating
        ]
        # The gradient of an iteration's variables is what the iteration before it gets.
        carried = loop_values(first, "loop_gradient")
        sums = [i for i in range(n, len(grad_ys)) if grad_ys[i] is not None]
        ys = [forward.body_outputs[i] for i in floating + sums]
        # y = sum of y_t over iterations t, so each y_t has the gradient of y, which is not carried.
        dys = carried + [grad_ys[i] for i in sums]
        external = [x for x in forward.inputs[n:] if is_differentiable(x.dtype)]
        starts = [forward.placeholders[i] for i in floating]

        def build() -> tuple[list[Tensor], list[Optional[Tensor]]]:
            grads = mtf.gradients(ys, starts + external, dys, operations=forward.body_operations)
            # A loop carries a value for each variable, so where no gradient flows it is zeros.
            return or_zeros(grads[: len(starts)], starts), grads[len(starts) :]

        (back, external_grads), grad_ops = forward.graph.take_operations(build)
        summed = [(x, g) for x, g in zip(external, external_grads) if g is not None]
        # Built once, of the body's own operations: lowered again after the tape is read, they
        # compute the values that the gradients read.
        results = back + [g for _, g in summed]
        needed = _needed(forward.body_operations, grad_ops, results, set(forward.taped()))
        available = [*forward.taped(), *carried, *(y for op in needed for y in op.outputs)]
        inputs = first + dys[len(floating) :]
        inputs += [x for x in external_inputs(needed + grad_ops, available) if x not in inputs]
        # Inputs that the tape depends on, so that a second gradient reaches this loop.
        inputs += [x for x in forward.inputs if x not in inputs]
        super().__init__(inputs, name="while_gradient")
        self._forward = forward
        self._carried = carried
        self._results = results
        self._operations = needed + grad_ops
        self._outputs = [
            Tensor(self, x.shape, x.dtype, index=i) for i, x in enumerate(self._results)
        ]
        sums_out = self._outputs[len(back) :]
        by_input: dict[Tensor, Tensor] = {x: y for (x, _), y in zip(summed, sums_out)}
        gradient_of_var = dict(zip(floating, self._outputs))
        self.input_gradients: list[Optional[Tensor]] = [
            *(gradient_of_var.get(i) for i in range(n)),
            *(by_input.get(x) for x in forward.inputs[n:]),
        ]

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

    def lower(self, lowering: mtf.Lowering) -> None:
        """Lowers to a tf.while_loop over the iterations in reverse order."""
        mesh_impl = lowering.mesh_impl(self)
        tape, count, arrays = lowering.loop_tapes[self._forward]
        # All of them, though only the first are carried: pending sums are computed before a loop.
        values = [lowering.tensors[x].to_laid_out_tensor() for x in self.inputs]
        n = len(self._carried)
        sums = sums_of(self._operations, lowering.requested_impl(self))
        partial = {y for y in self._results if sums.pending_axes(y)}
        state = LoopState(mesh_impl, self._results, n, partial)
        assigned = dict(lowering.assigned)  # a read within is none that what follows can wait for

        def body(index: tf.Tensor, flat: list) -> tuple:
            totals = state.unflatten(flat)
            tape.read(lowering, arrays, index)
            for x, value in zip(self._carried, totals):
                lowering.set_tensor_lowering(x, value)
            with inside_loop(), lowering.again():
                lowering.lower_operations(self._operations)
                return index - 1, state.flatten(state.next(lowering, totals))

        _, flat = replicate.while_loop(
            lambda index, flat: index >= 0,
            body,
            # The tape has the entries 0 to count - 1, which are read from the last to the first.
            (count - 1, state.first(values[:n])),
            # Nothing is kept for a second derivative, which `gradient` refuses.
            back_prop=False,
            # What an iteration computes again depends on the tape alone, so several would do so at
            # once, and take the memory of several.
            parallel_iterations=1,
        )
        lowering.assigned.clear()
        lowering.assigned.update(assigned)
        for y, value in zip(self.outputs, state.last(flat)):
            lowering.set_tensor_lowering(y, value)


def _needed(
    body: Sequence[Operation],
    users: Sequence[Operation],
    results: Sequence[Tensor],
    taped: Collection[Tensor],
) -> list[Operation]:
    """Returns the operations of the body whose outputs are used, and are not on the tape."""
    # What no gradient reads is not computed a second time.
    used = set(results) | {x for op in users for x in op.inputs}
    # The gradient of an inner loop reads the tape of the inner loop.
    loops = {op._forward for op in users if isinstance(op, WhileGradientOperation)}
    needed = []
    # Backward, so that what an operation reads is known to be wanted when its maker's turn comes.
    for op in reversed(body):
        # Random values and reads are on the tape: made here, they would not be those of the forward
        # loop.
        if any(y in taped for y in op.outputs):
            continue
        if op in loops or any(y in used for y in op.outputs):
            needed.append(op)
            used.update(op.inputs)
            # What it waits for is of the forward loop else, which the gradient cannot wait for.
            used.update(d for d in op.dependencies if isinstance(d, Tensor))
    return needed[::-1]


class WhileLoopOperation(_LoopOperation):
    """A loop whose condition and body are built once, as lists of operations.

    Attributes:
      num_vars: the number of loop variables.
      placeholders: the loop variables inside the body.
      body_outputs: the outputs of the body.
      body_operations: the operations of the body.
      keeps_tape: whether it keeps values of each iteration, for its gradient.
      gradient_sums: of a loop over microbatches, the outputs that are gradients, by number, with
        their Variables; else empty.
    """

    def __init__(
        self,
        cond_fn: Callable,
        body_fn: Callable,
        inputs: Sequence[Tensor],
        tf_kwargs: Optional[Mapping[str, Any]] = None,
        has_accumulators: bool = False,
        name: str = "while_loop",
    ):
        """Creates the operation; see `while_loop`.

        Args:
          cond_fn: takes a Tensor for each loop variable; returns a boolean scalar.
          body_fn: takes the same; returns the next values, followed by accumulators.
          inputs: Tensors, the initial values of the loop variables.
          tf_kwargs: arguments of tf.while_loop.
          has_accumulators: whether the body returns more than the loop variables.
          name: a string.

        Raises:
          ValueError: the outputs of the body do not match the loop variables.
        """
        inputs = list(inputs)
        if not inputs:
            raise ValueError("while_loop needs at least one loop variable")
        graph = inputs[0].graph
        placeholders = loop_values(inputs, "loop_variable")
        cond_output, cond_ops = graph.take_operations(lambda: cond_fn(*placeholders))
        outputs, body_ops = graph.take_operations(lambda: _as_list(body_fn(*placeholders)))
        _check_cond(cond_output, cond_ops)
        _check_body(inputs, outputs, has_accumulators)
        # Variables stay outside of the loop.
        # A variable is made once, and read at the beginning of the step as all are.
        graph.operations.extend(op for op in cond_ops + body_ops if isinstance(op, Variable))
        cond_ops, body_ops = (
            [op for op in ops if not isinstance(op, Variable)] for ops in (cond_ops, body_ops)
        )
        computed = {y for op in body_ops for y in op.outputs}
        external = external_inputs(cond_ops + body_ops, placeholders)
        # A body may return a Tensor from outside as it is, which none of its operations reads.
        external += [
            y for y in outputs if y not in computed and y not in placeholders and y not in external
        ]
        super().__init__(inputs + external, name=name)
        self._cond_ops = cond_ops
        self.body_operations = body_ops
        self.num_vars = len(inputs)
        self.placeholders = placeholders
        self._cond_output = cond_output
        self.body_outputs = outputs
        self._tf_kwargs = dict(tf_kwargs or {})
        # TensorFlow's own gradient of the lowered loop would keep all its values, and knows no
        # layouts.
        self._tf_kwargs.setdefault("back_prop", False)
        self.keeps_tape = False
        self.gradient_sums: dict[int, Variable] = {}
        self._outputs = [Tensor(self, y.shape, y.dtype, index=i) for i, y in enumerate(outputs)]

    @property
    def loop(self) -> Loop:
        """The condition and the body; see Operation."""
        n = self.num_vars
        return Loop(
            self._cond_ops + self.body_operations,
            [self._cond_output, *self.body_outputs[:n]],
            list(zip(self.outputs[n:], self.body_outputs[n:])),
            self.iterations,
            self.taped() if self.keeps_tape else [],
            None,
        )

    @property
    def iterations(self) -> float:
        """The argument `maximum_iterations` if it is a number; 1 otherwise."""
        most = self._tf_kwargs.get("maximum_iterations")
        return max(1, int(most)) if isinstance(most, numbers.Integral) else 1

    def _dimension_names(self) -> frozenset[str]:
        inner = (n for op in self.body_operations for n in op._dimension_names())
        return super()._dimension_names() | frozenset(inner)

    def _unsplittable(self) -> Sequence[str]:
        return [n for op in self.body_operations for n in op.unsplittable_dims]

    def needs_whole(self, mesh_impl: MeshImpl) -> Collection[str]:
        """Returns nothing: each of the inner operations is asked itself."""
        return ()

    def cloned_from(self, original: Operation, mapping: Mapping[Tensor, Tensor]) -> None:
        """Replaces outer tensors in the body by their copies; see Operation."""
        outer = {x: mapping[x] for x in original.inputs[self.num_vars :] if x in mapping}
        if not outer:
            return
        # Copies are added to the graph, but these belong into the body: they are taken out again.
        (clones, mapped), _ = self.graph.take_operations(
            lambda: self.graph.clone_operations(
                readers_of(outer, self._cond_ops + self.body_operations), outer
            )
        )
        clone_of = {clone.original: clone for clone in clones}
        self._cond_ops = [clone_of.get(op, op) for op in self._cond_ops]
        self.body_operations = [clone_of.get(op, op) for op in self.body_operations]
        self._cond_output = mapped.get(self._cond_output, self._cond_output)
        self.body_outputs = [mapped.get(y, y) for y in self.body_outputs]

    # -- gradient

    def taped(self) -> list[Tensor]:
        """Returns the Tensors of each iteration that are saved for its gradient."""
        # The variables of an iteration determine all its other values but the random ones, and what
        # it read of variables that may have changed since, so these are enough to compute it again.
        drawn = [y for op in self.body_operations if _is_drawn_or_read(op) for y in op.outputs]
        return self.placeholders + drawn

    def gradient(self, unused_grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Returns the gradients by a loop in reverse order, and has this one keep a tape."""
        # The tape has one value of a Tensor for each iteration, and an inner loop draws several.
        for op in self.body_operations:
            if isinstance(op, WhileLoopOperation) and op.random_operations():
                raise NotImplementedError(
                    f"{self.name}: no gradient of a loop in a loop that makes random values; "
                    f"make them outside of {op.name} and use them in it"
                )
        self._check_inner_reads()
        # Only a loop that is differentiated takes memory for what its iterations computed from.
        self.keeps_tape = True
        return WhileGradientOperation(self, unused_grad_ys).input_gradients

    def _check_inner_reads(self) -> None:
        """Raises NotImplementedError for reads in inner loops, which no tape keeps."""
        everything = list(with_inner_operations([*self.graph.operations, *self.body_operations]))
        # What nothing assigns to has the same value in all iterations, and when it is read again.
        assigned = {v for op in everything if isinstance(op, Assign) for v in op.variables}
        for loop in self.body_operations:
            for op in with_inner_operations(loop.inner_operations):
                if isinstance(op, ReadVariable) and op.variable in assigned:
                    raise NotImplementedError(
                        f"{self.name}: no gradient of a loop in a loop that reads the variable "
                        f"{op.variable.name}, which is assigned to; read it outside of {loop.name} "
                        "and use it in it"
                    )

    # -- lowering

    def lower(self, lowering: mtf.Lowering) -> None:
        """Lowers to a tf.while_loop over the slices of the loop variables."""
        with lowering.again(self.original is not None):
            self._lower(lowering)

    def _lower(self, lowering: mtf.Lowering) -> None:
        mesh_impl = lowering.mesh_impl(self)
        n = self.num_vars
        inputs = [lowering.tensors[x].to_laid_out_tensor() for x in self.inputs[:n]]
        # Pending sums are computed before the loop: within, they would be in each iteration, and
        # uses after it would be given a tf.Tensor of the body.
        for x in self.inputs[n:]:
            lowering.tensors[x].to_laid_out_tensor()
        sums = sums_of(self.body_operations, lowering.requested_impl(self))
        partial = {y for y in self.body_outputs if sums.pending_axes(y)}
        state = LoopState(mesh_impl, self.body_outputs, n, partial)
        tape = Tape(mesh_impl, self.taped()) if self.keeps_tape else None
        keys = self._random_keys(lowering)
        # A copy, since lowering the body forgets these, and notes its own.
        assigned, waits = dict(lowering.assigned), self._waits(lowering)

        def lower(operations: Sequence[Operation], index: tf.Tensor, values: Sequence[Any]) -> None:
            for placeholder, value in zip(self.placeholders, values):
                lowering.set_tensor_lowering(placeholder, value)
            drawn = [op for op in with_inner_operations(operations) if op in keys]
            lowering.random_keys.update({op: fold_key(keys[op], index) for op in drawn})
            lowering.lower_operations(operations)

        def cond(index: tf.Tensor, flat: list, arrays: list) -> tf.Tensor:
            with inside_loop():
                lower(self._cond_ops, index, state.unflatten(flat))
            # One loop serves all processors, and they all compute the same condition.
            value = lowering.tensors[self._cond_output].to_laid_out_tensor().all_slices[0]
            # TensorFlow lets each input enter a loop by itself, also in spite of control
            # dependencies: only what the condition is computed from is there before the body.
            return tf.logical_and(value, index >= 0) if waits else value

        def body(index: tf.Tensor, flat: list, arrays: list) -> tuple:
            values = state.unflatten(flat)
            lowering.assigned.clear()  # what is outside cannot wait for what is in here
            with inside_loop():
                lower(self.body_operations, index, values)
                flat = state.flatten(state.next(lowering, values))
                if tape is not None:
                    arrays = tape.write(lowering, arrays, index)
                # Sessions leave out what no result of the loop depends on.
                done = [lowering.operations[op] for op in self._effects(lowering)]
                # The next iteration assigns after this one's reads.
                done += lowering.assigned.values()
                if done:
                    with tf.control_dependencies([op for op in done if op is not None]):
                        flat = [tf.identity(t) for t in flat]
            return index + 1, flat, arrays

        first = state.first(inputs)
        arrays = [] if tape is None else tape.new_arrays(self._size_of_tape(mesh_impl))
        with tf.control_dependencies(waits):
            start = tf.identity(tf.constant(0))
        count, flat, arrays = replicate.while_loop(
            cond, body, (start, first, arrays), **self._tf_kwargs
        )
        # A recomputation of this loop starts from the same keys.
        lowering.random_keys.update(keys)
        for y, value in zip(self.outputs, state.last(flat)):
            lowering.set_tensor_lowering(y, value)
        # What was assigned within is known by operations of the body, for which nothing outside can
        # wait: what follows waits for the whole loop.
        used = list(lowering.assigned)
        lowering.assigned.clear()
        lowering.assigned.update(assigned)
        if self._effects(lowering):
            lowering.operations[self] = tf.group(flat)
        if used:
            done = lowering.operations.get(self) or tf.group(flat)
            lowering.assigned.update(dict.fromkeys(used, done))
        if tape is not None:
            lowering.loop_tapes[self] = (tape, count, arrays)

    def _waits(self, lowering: mtf.Lowering) -> list[tf.Operation]:
        """Returns what the loop waits for, if it assigns to variables, or reads them."""
        assigned: dict[Variable, None] = {}
        used: dict[Variable, None] = {}
        for op in with_inner_operations(self._cond_ops + self.body_operations):
            if isinstance(op, Assign):
                assigned.update(dict.fromkeys(op.variables))
            elif isinstance(op, ReadVariable):
                used[op.variable] = None
        used.update(assigned)
        waits = earlier_assignments(lowering, list(used)) if used else []
        if tf.executing_eagerly() or not lowering.mesh_impl(self).supports_control_dependencies:
            return waits  # it is done in the order of the program
        # The reads of the beginning of the step, as an assignment waits for outside of a loop.
        for v in assigned:
            slices = lowering.variables[v].laid_out_tensor.to_laid_out_tensor().all_slices
            waits += lowering.first_reads.get(v) or [t.op for t in slices]
        return waits

    def _effects(self, lowering: mtf.Lowering) -> list[Operation]:
        """Returns the operations of the body that do something besides computing."""
        if lowering.computes_again:
            return []
        return [op for op in self.body_operations if op in lowering.operations]

    def _size_of_tape(self, mesh_impl: MeshImpl) -> Optional[int]:
        """Returns the most iterations, where a compiler must know it; None elsewhere."""
        if not mesh_impl.is_compiled_by_xla:
            return None
        most = self._tf_kwargs.get("maximum_iterations")
        if not isinstance(most, numbers.Integral):
            raise ValueError(
                f"{self.name}: XLA compiles the gradient of a loop for a known number of "
                "iterations at most. Pass it to mtf.while_loop as maximum_iterations=n"
            )
        return int(most)

    def random_operations(self) -> list[RandomOperation]:
        """Returns the random operations of condition and body, also those of inner loops."""
        inner = with_inner_operations(self._cond_ops + self.body_operations)
        return [op for op in inner if isinstance(op, RandomOperation)]

    def _random_keys(self, lowering: mtf.Lowering) -> dict[Operation, tf.Tensor]:
        """Returns keys created outside the loop, which each iteration derives its own keys from.

        Iterations run in parallel, so a key drawn inside would depend on their timing.
        """
        mesh_impl = lowering.mesh_impl(self)
        keys: dict[Operation, tf.Tensor] = {}
        for op in self.random_operations():
            key = lowering.random_keys.get(op)  # of a loop around this one
            key = op.key() if key is None else key
            keys[op] = mesh_impl.random_key(op.seed()) if key is None else key
        return keys


def is_of_microbatches(op: Operation) -> TypeGuard[WhileLoopOperation]:
    """Returns whether an operation is a loop over microbatches.

    Each iteration is a forward and a backward pass: where each gradient is split before the next
    one is computed, it gathers weights that are in parts, and sums gradients in parts.

    Args:
      op: an Operation.
    """
    return isinstance(op, WhileLoopOperation) and bool(op.gradient_sums)


def _is_drawn_or_read(op: Operation) -> bool:
    """Returns whether an operation may give another value when it is done again."""
    reads = isinstance(op, ReadVariable) or (isinstance(op, Depend) and op.reads() is not None)
    return reads or isinstance(op, RandomOperation)


def _as_list(outputs: Any) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def _check_cond(cond_output: object, operations: Sequence[Operation]) -> None:
    if not isinstance(cond_output, Tensor):
        raise ValueError(f"while_loop: cond_fn must return a mtf.Tensor, not {cond_output!r}")
    if cond_output.shape.ndims or cond_output.dtype != tf.bool:
        raise ValueError(
            f"while_loop: cond_fn must return a boolean scalar, not {tensors_text([cond_output])}; "
            "mtf.reduce_any and mtf.reduce_all make one of several"
        )
    inner = with_inner_operations(operations)
    names = [v.name for op in inner if isinstance(op, Assign) for v in op.variables]
    if names:
        raise ValueError(
            f"while_loop: cond_fn assigns to {', '.join(names)}, but what it makes besides its "
            "result is not done; assign in body_fn"
        )


def _check_body(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], has_accumulators: bool
) -> None:
    check_tensors("while_loop: body_fn", outputs)
    fits = len(outputs) >= len(inputs) if has_accumulators else len(outputs) == len(inputs)
    if not fits:
        raise ValueError(
            f"while_loop: body_fn returned {len(outputs)} Tensors for {len(inputs)} loop "
            "variables; pass has_accumulators=True to sum further outputs over the iterations"
        )
    if booleans := [y for y in outputs[len(inputs) :] if y.dtype.is_bool]:
        raise ValueError(
            f"while_loop: further outputs are summed over the iterations, and there is no sum of "
            f"{tensors_text(booleans)}; mtf.to_int32 converts it"
        )
    for x, y in zip(inputs, outputs):
        if x.shape != y.shape or x.dtype != y.dtype:
            raise ValueError(
                f"while_loop: a loop variable must keep its shape and dtype: "
                f"{tensors_text([x])} became {tensors_text([y])}"
            )


@leaves_no_node
def while_loop(
    cond_fn: Callable,
    body_fn: Callable,
    inputs: Sequence[Tensor],
    num_loop_vars: Optional[int] = None,
    has_accumulators: bool = False,
    **kwargs: object,
) -> list[Tensor]:
    """Repeats a computation while a condition is true.

    The loop has a gradient: the loop variables of each iteration are saved, and the gradient
    recomputes each iteration.

    >>> x = mtf.constant(mesh, 1.0)
    >>> [y] = mtf.while_loop(lambda x: mtf.less(x, 100.0), lambda x: [2.0 * x], [x])
    >>> print(y.numpy())
    128.0

    Args:
      cond_fn: takes a Tensor for each loop variable; returns a boolean Tensor of no dimensions.
      body_fn: takes the same; returns a list of their next values, of the same shapes.
      inputs: a list of Tensors, the initial values of the loop variables.
      num_loop_vars: the number of results to return; all if None.
      has_accumulators: whether the body returns further Tensors, which are summed over the
        iterations.
      **kwargs: arguments of tf.while_loop, such as maximum_iterations.

    Returns:
      A list of Tensors: the final values, then the accumulated sums.

    Raises:
      ValueError: the outputs of the body do not match the loop variables.
    """
    op = WhileLoopOperation(
        cond_fn, body_fn, inputs, tf_kwargs=kwargs, has_accumulators=has_accumulators
    )
    return op.outputs if num_loop_vars is None else op.outputs[:num_loop_vars]
