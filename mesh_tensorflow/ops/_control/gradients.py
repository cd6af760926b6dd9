"""Gradients: reverse-mode differentiation, gradients by hand, and activations computed again.

Gradients are operations like any other, made before lowering, so layouts, partial sums and costs
hold for them as for the rest; an optimizer's sum over the batch needs no code of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import tensorflow.compat.v1 as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.errors import dims_text, tensors_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow._core.layout import LayoutRules, convert_to_layout_rules
from mesh_tensorflow._core.operation import (
    Operation,
    Partial,
    PartialSums,
    PendingSums,
    Tensor,
    check_tensors,
    depending_on,
    is_differentiable,
    is_of_package,
    readers_of,
    with_inner_operations,
)
from mesh_tensorflow._core.shape import Dimension, Shape, convert_to_shape
from mesh_tensorflow._mesh.mesh_impl import MeshImpl, is_pending, summands_of
from mesh_tensorflow._units import counted
from mesh_tensorflow.ops._control.control import Depend, external_inputs
from mesh_tensorflow.ops._control.while_loop import WhileLoopOperation
from mesh_tensorflow.ops._elementwise.slicewise import PACKAGE, is_of_library
from mesh_tensorflow.ops._source import Constant
from mesh_tensorflow.ops._variable import ReadVariable, Variable

if TYPE_CHECKING:
    from mesh_tensorflow._core.graph import StagesLike

__all__ = [
    "CustomGradientOperation",
    "RecomputeBudget",
    "StopGradient",
    "custom_gradient",
    "gradients",
    "recompute_grad",
    "stop_gradient",
]


@leaves_no_node
def gradients(
    ys: Sequence[Tensor],
    xs: Sequence[Tensor],
    grad_ys: Optional[Sequence[Union[Tensor, float, None]]] = None,
    operations: Optional[Sequence[Operation]] = None,
) -> list[Optional[Tensor]]:
    """Returns the gradients of the sum of `ys` with respect to `xs`.

    >>> x = mtf.constant(mesh, [1.0, 2.0], "d:2")
    >>> [dx] = mtf.gradients([mtf.reduce_sum(mtf.square(x))], [x])
    >>> print(dx.numpy())
    [2. 4.]

    Args:
      ys: a list of Tensors.
      xs: a list of Tensors.
      grad_ys: for each of `ys` its gradient, a Tensor, a number, or None for ones; all ones if
        None.
      operations: the operations to differentiate; all of the graph if None.

    Returns:
      A Tensor for each of `xs`, or None if `ys` do not depend on it.

    Raises:
      ValueError: `ys` or `xs` are not lists of Tensors, or a gradient has another shape than its
        Tensor.
    """
    _check_arguments(ys, xs, grad_ys)
    graph = ys[0].graph
    operations = list(graph.operations if operations is None else operations)
    grad_ys = grad_ys or [None] * len(ys)
    # Without this, gradients of everything that `ys` depend on would be built, down to the inputs.
    needed = depending_on(xs, [op for op in operations if op.has_gradient])
    # sums[x] = d(sum of ys) / dx, through those users of x that have been visited.
    sums: dict[Tensor, Tensor] = {}
    # Added and not set: a Tensor may be given twice among `ys`, and then counts twice.
    for y, dy in zip(ys, grad_ys, strict=True):
        if not isinstance(dy, Tensor):
            dy = Constant(y.mesh, 1 if dy is None else dy, y.shape, y.dtype).outputs[0]
        _accumulate(sums, y, dy)
    # Names must not depend on the variable scope that `gradients` happens to be called in.
    with graph.scope(graph.captured_variable_scope.name):
        # Operations are in the order of their creation, so all that reads an output has been
        # visited, and its gradient is complete, when the turn of the operation comes.
        for op in reversed(operations):
            dys = [sums.get(y) for y in op.outputs]
            # Without a gradient, as of stop_gradient, what has flowed this far ends here.
            if not op.has_gradient or all(dy is None for dy in dys):
                continue
            if not any(x in needed for x in op.inputs):
                continue
            with graph.gradient_scope(op):
                dxs = _gradients_of_inputs(op, dys)
                # An operation of a user's may leave out those of its last inputs, or give more.
                for x, dx in zip(op.inputs, dxs, strict=is_of_package(type(op))):
                    # An operation gives the gradients of all inputs; those that lead to none of
                    # `xs` go no further.
                    if dx is not None and x in needed:
                        _accumulate(sums, x, dx)
    return [sums.get(x) for x in xs]


def _check_arguments(
    ys: Sequence[Tensor], xs: Sequence[Tensor], grad_ys: Optional[Sequence[Any]]
) -> None:
    for what, tensors in (("ys", ys), ("xs", xs)):
        if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
            raise ValueError(f"gradients: {what} must be a list of mtf.Tensors, not {tensors!r}")
    check_tensors("gradients: ys", ys)
    if not ys:
        raise ValueError("gradients: ys must be a list of at least one mtf.Tensor; it is empty")
    if grad_ys and len(grad_ys) != len(ys):
        raise ValueError(
            f"gradients: grad_ys has {counted(len(grad_ys), 'gradient')} for "
            f"{counted(len(ys), 'Tensor')} of ys. Give one for each, None for ones"
        )


def _gradients_of_inputs(
    op: Operation, dys: Sequence[Optional[Tensor]]
) -> Sequence[Optional[Tensor]]:
    """Returns the gradients of inputs, with those of all stages of a pipeline."""
    graph, stages = op.graph, op.stages_of_gradient
    if stages is None:
        return op.gradient(dys)
    start = len(graph.operations)
    with graph.within(stages):
        dxs = list(op.gradient(dys))
    # Not those of gradients that a function asks for in turn, which go by shapes.
    stages.check_apart(new for new in graph.operations[start:] if new.gradient_of is op)
    for dim in stages.dims:
        if any(dy is not None and dim in dy.shape for dy in dys):
            dxs[:] = [
                None if dx is None else _of_all_stages(x, dx, dim) for x, dx in zip(op.inputs, dxs)
            ]
    return dxs


def _of_all_stages(x: Tensor, dx: Tensor, stages: Dimension) -> Tensor:
    """Returns the gradient of an input, given what a function returned that knows of no stages."""
    if dx.shape - [stages] != x.shape - [stages]:
        return dx  # which is an error
    # A function has the stages first; and what no stage's values are in is the same for each.
    if stages in x.shape:
        return mtf.broadcast(dx, x.shape)
    # What all stages share, such as a variable, gets the sum.
    return mtf.reduce_sum(dx, output_shape=x.shape) if stages in dx.shape else dx * stages.size


def _accumulate(sums: dict[Tensor, Tensor], x: Tensor, dx: Tensor) -> None:
    if dx.shape != x.shape:
        raise ValueError(
            f"the gradient of {tensors_text([x])} has another shape: {tensors_text([dx])}"
        )
    # A new addition and not a list for one sum: partial sums over the same axes are added before
    # they are communicated, in either form.
    sums[x] = sums[x] + dx if x in sums else dx


# -- gradients that are not those of the operations: none, or the user's


class _PassesOn(Operation):
    """Outputs that are inputs, the last ones."""

    takes_padding = True
    costs_nothing = True
    costs_by = ()
    delays_sums = 1

    def lower(self, lowering: mtf.Lowering) -> None:
        """Passes the values on, as they are."""
        for y, x in self.passes_on(()).items():
            lowering.set_tensor_lowering(y, lowering.tensors[x])

    def passes_on(self, split: Collection[str]) -> dict[Tensor, Tensor]:
        """Each output is an input."""
        return dict(zip(self.outputs, self.inputs[-len(self._outputs) :]))

    def partial_sums(self, mesh_impl: MeshImpl, pending: PendingSums) -> PartialSums:
        """An output is the partial sum that the input is: the first use of either is charged."""
        pairs = self.passes_on(()).items()
        return {y: Partial(pending[x], x) for y, x in pairs if x in pending}


class StopGradient(_PassesOn):
    """The same value, without a gradient."""

    works_by_name = True

    def __init__(self, x: Tensor, name: Optional[str] = None):
        """Creates the operation; see `stop_gradient`."""
        super().__init__([x], name=name or "stop_gradient")
        self._outputs = [Tensor(self, x.shape, x.dtype)]

    @property
    def has_gradient(self) -> bool:
        """False."""
        return False


def stop_gradient(x: Tensor) -> Tensor:
    """Returns the value of `x`; gradients do not flow through it.

    >>> x = mtf.constant(mesh, 3.0)
    >>> [dx] = mtf.gradients([x * mtf.stop_gradient(x)], [x])
    >>> print(dx.numpy())
    3.0
    """
    return StopGradient(x).outputs[0]


class CustomGradientOperation(_PassesOn):
    """The outputs of a function with a custom gradient, whose operations stand in the graph."""

    def __init__(
        self,
        explicit_inputs: Sequence[Tensor],
        all_inputs: Sequence[Tensor],
        fn_outputs: Sequence[Tensor],
        grad_fn: Callable,
        forward_operations: Sequence[Operation],
        name: Optional[str] = None,
    ):
        """Creates the operation; see `custom_gradient`.

        Args:
          explicit_inputs: the arguments of the function, a list of Tensors.
          all_inputs: the arguments, then the other floating Tensors that the function uses.
          fn_outputs: its results, a list of Tensors.
          grad_fn: the gradient function.
          forward_operations: the operations that it created.
          name: a string or None.
        """
        # The arguments are inputs for their gradients, the results for their values.
        super().__init__([*all_inputs, *fn_outputs], name=name or "custom_gradient")
        self._explicit_inputs = list(explicit_inputs)
        self._all_inputs = list(all_inputs)
        self._fn_outputs = list(fn_outputs)
        self._grad_fn = grad_fn
        self._forward_operations = list(forward_operations)
        self._outputs = [Tensor(self, x.shape, x.dtype, index=i) for i, x in enumerate(fn_outputs)]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Calls the user's gradient function with zeros for missing gradients."""
        grads = [
            # A gradient function of the user's own computes with all of them, whichever outputs are
            # used.
            mtf.zeros_like(y) if dy is None and is_differentiable(y.dtype) else dy
            for y, dy in zip(self.outputs, grad_ys)
        ]
        variables = len(self.graph.all_variables)
        result = list(
            self._grad_fn(
                explicit_inputs=self._explicit_inputs,
                all_inputs=self._all_inputs,
                forward_operations=self._forward_operations,
                outputs=self._fn_outputs,
                output_grads=grads,
            )
        )
        if len(self.graph.all_variables) > variables:
            new = [v.name for v in self.graph.all_variables[variables:]]
            raise ValueError(
                f"{self.name}: the gradient function made new variables {new}. It must only use "
                "those of the forward function; make them there, or before"
            )
        if len(result) != len(self._all_inputs):
            raise ValueError(
                f"{self.name}: the gradient function must return a gradient for each of "
                f"{len(self._all_inputs)} inputs "
                f"({', '.join(x.name for x in self._all_inputs)}), but returned {len(result)}"
            )
        # Nothing flows into the function's own operations: what the user gave stands for all of it.
        return result + [None] * len(self._fn_outputs)

    @property
    def stages_of_gradient(self) -> Optional[StagesLike]:
        """Those of a user's gradient function; see Operation."""
        return None if is_of_library(self._grad_fn, PACKAGE) else self._stages

    def cloned_from(self, original: Operation, mapping: Mapping[Tensor, Tensor]) -> None:
        """Replaces the forward operations by their copies; see Operation."""
        # What has no copy, such as a random operation, is shared with the original.
        self._forward_operations = [
            mapping[op.outputs[0]].operation if op.outputs and op.outputs[0] in mapping else op
            for op in self._forward_operations
        ]


def distinct_tensors(xs: Sequence[Tensor]) -> list[Tensor]:
    """Returns `xs`, with copies of repeated Tensors.

    So each argument of a function has its own gradient, even if two are the same Tensor.
    """
    seen: set[Tensor] = set()
    distinct = []
    for x in xs:
        distinct.append(mtf.identity(x) if x in seen else x)
        seen.add(x)
    return distinct


@leaves_no_node
def custom_gradient(fn: Callable, grad_fn: Callable, explicit_inputs: Sequence[Tensor]) -> Any:
    """Calls a function of Tensors, with a custom gradient function.

    >>> x = mtf.constant(mesh, 3.0)
    >>> def tenfold(output_grads, **others):
    ...     return [10.0 * output_grads[0]]
    >>> y = mtf.custom_gradient(mtf.square, tenfold, [x])
    >>> print(y.numpy(), mtf.gradients([y], [x])[0].numpy())
    9.0 10.0

    Args:
      fn: takes distinct Tensors; returns a Tensor, or a tuple or list of them.
      grad_fn: takes the keyword arguments explicit_inputs, all_inputs (these and the floating
        Tensors from outside that `fn` uses), forward_operations, outputs and output_grads;
        returns a gradient, or None, for each of all_inputs.
      explicit_inputs: a list of Tensors, the arguments of `fn`.

    Returns:
      The result of `fn`: a Tensor, or a list of Tensors.

    Raises:
      ValueError: when the gradient is built, the gradient function returns a wrong number of
        gradients, or creates variables.
    """
    explicit_inputs = distinct_tensors(explicit_inputs)
    graph = explicit_inputs[0].graph
    outputs, forward = graph.take_operations(lambda: fn(*explicit_inputs))
    # Taken out first and put back now: what `fn` makes is then known, whatever it does to the
    # graph.
    graph.operations.extend(forward)
    several = isinstance(outputs, (tuple, list))
    outputs = list(outputs) if several else [outputs]
    # What a function uses without being given it, such as weights, has a gradient, too.
    external = [x for x in external_inputs(forward, explicit_inputs) if is_differentiable(x.dtype)]
    # Variables that the function creates are inputs of it.
    external += [
        y for op in forward if isinstance(op, Variable) for y in op.outputs if y not in external
    ]
    op = CustomGradientOperation(
        explicit_inputs, explicit_inputs + external, outputs, grad_fn, forward
    )
    for inner in forward:
        # A variable is an input of the function, so that other uses of it have gradients, too.
        if not isinstance(inner, Variable):
            for y in inner.outputs:
                # Gradients flow through the function as a whole; a use of an inner value beside it
                # would get none.
                y.usable = y in external or y in outputs
    return op.outputs if several else op.outputs[0]


# -- recompute_grad: activations that are computed again for gradients, and which of them are


class RecomputeBudget:
    """How many bytes of activations one processor may store for gradients.

    Functions called by `mtf.recompute_grad` with a budget store their activations as long as there
    is room, from the last function to the first, in the order in which gradients are built; the
    others are recomputed. While a function is recomputed, those after it have freed theirs.

    >>> budget = mtf.RecomputeBudget(20_000)
    >>> x = y = mtf.ones(mesh, "a:1000")
    >>> for _ in range(4):
    ...     y = mtf.recompute_grad(lambda x: mtf.sin(mtf.sin(mtf.sin(x))), [y], budget=budget)
    >>> dx = mtf.gradients([y], [x])
    >>> print(budget.num_stored, budget.num_recomputed, budget.left)
    2 2 4000

    Attributes:
      bytes: a number.
      left: how many bytes are left.
      num_stored: how many functions store their activations.
      num_recomputed: how many functions are recomputed.
    """

    def __init__(
        self,
        bytes: float,
        layout: Union[LayoutRules, str, None] = None,
        mesh_shape: Union[Shape, str, None] = None,
    ) -> None:
        """Creates a budget.

        Args:
          bytes: a number, of all functions that are called with this budget.
          layout: the layout rules that the program will be lowered with; None if nothing is split.
          mesh_shape: the mesh; None for one processor.

        Raises:
          ValueError: the number is negative, or only one of layout and mesh is given.
        """
        if bytes < 0:
            raise ValueError(f"RecomputeBudget: bytes must be 0 or more, not {bytes}")
        if (layout is None) != (mesh_shape is None):
            raise ValueError(
                f"RecomputeBudget: layout={layout} and mesh_shape={mesh_shape} must both be given, "
                "for the part of an activation that one processor has, or both be None"
            )
        self.bytes = bytes
        self.left = bytes
        self.num_stored = 0
        self.num_recomputed = 0
        self._layout = convert_to_layout_rules(layout or "")
        self._mesh_shape = convert_to_shape(mesh_shape or "")

    def __repr__(self) -> str:
        return (
            f"RecomputeBudget(bytes={self.bytes}, left={self.left}, num_stored={self.num_stored}, "
            f"num_recomputed={self.num_recomputed})"
        )

    def takes(self, forward: Sequence[Operation], backward: Sequence[Operation]) -> bool:
        """Returns whether there is room for what the gradient of a function reads, and takes it.

        Args:
          forward: the operations of the function.
          backward: the operations of its gradient, which read activations.
        """
        needed = self._needed(forward, backward)
        if needed > self.left:
            self.num_recomputed += 1
            return False
        # For good: what all functions store is in memory together when the gradients begin.
        self.left -= needed
        self.num_stored += 1
        return True

    def _needed(self, forward: Sequence[Operation], backward: Sequence[Operation]) -> int:
        """Returns the bytes of the function's values that its gradient reads."""
        split = {d for d, _ in self._layout.pairs}
        root: dict[Tensor, Optional[Tensor]] = {}
        for op in forward:
            passed = op.passes_on(split)
            for y in op.outputs:
                if y in passed:  # a view of another value
                    x = passed[y]
                    # None for a view of an input, which is stored in either case.
                    root[y] = root.get(x)
                else:
                    # Constants are made where they are read, and weights are stored anyway.
                    root[y] = y if op.takes_memory else None
        # A set, since a value that several gradients read is stored once.
        read = {root.get(x) for op in backward for x in op.inputs}
        # A loop whose gradient is built keeps these of each iteration besides, on its tape.
        loops = [op.loop for op in forward if op.loop is not None]
        tapes = sum(int(loop.iterations) * self._bytes_of(x) for loop in loops for x in loop.tape)
        return tapes + sum(self._bytes_of(x) for x in read if x is not None)

    def _bytes_of(self, x: Tensor) -> int:
        size = 1
        for dim in x.shape:
            axis = self._layout.mesh_axis(dim, self._mesh_shape)
            mesh_dim = Dimension("", 1) if axis is None else self._mesh_shape[axis]
            if dim.size % mesh_dim.size:
                raise ValueError(
                    f"RecomputeBudget: {dims_text([dim])} of {x.name} is split over "
                    f"{dims_text([mesh_dim])}, which does not divide it; change the "
                    "layout or the size"
                )
            size *= dim.size // mesh_dim.size
        return size * x.dtype.size


@contextlib.contextmanager
def usable(operations: Sequence[Operation]) -> Iterator[None]:
    """Lets operations use inner values of others, such as random ones, which are not recomputed."""
    hidden = [y for op in operations for y in op.outputs if not y.usable]
    for y in hidden:
        y.usable = True
    try:
        yield
    finally:
        for y in hidden:
            y.usable = False


class DelayOperation(Operation):
    """Inputs that wait for gradients, to delay recomputation."""

    takes_padding = True
    costs_nothing = True
    costs_by = ()
    delays_sums = 1

    def __init__(self, xs: Sequence[Tensor], after: Sequence[Tensor]):
        super().__init__([*xs, *after], name="recompute")
        self._num = len(xs)
        self._outputs = [Tensor(self, x.shape, x.dtype, index=i) for i, x in enumerate(xs)]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Passes gradients on; nothing flows to what is waited for."""
        return [*grad_ys, *[None] * (len(self.inputs) - self._num)]

    def partial_sums(self, mesh_impl: MeshImpl, pending: PendingSums) -> PartialSums:
        """Each output is partial as its input is, where control dependencies order operations."""
        # Control dependencies work on summands as well as on sums.
        if pending and not mesh_impl.supports_control_dependencies:
            return None
        return {y: Partial(pending[x]) for x, y in zip(self.inputs, self.outputs) if x in pending}

    def lower(self, lowering: mtf.Lowering) -> None:
        """Makes the values wait for the gradients that recomputation is for."""
        mesh_impl = lowering.mesh_impl(self)
        wait = mesh_impl.supports_control_dependencies
        values = [lowering.tensors[x] for x in self.inputs]
        slices = [summands_of(v) if wait else v.to_laid_out_tensor() for v in values]
        after = slices[self._num :]

        def late(x: tf.Tensor, *dys: tf.Tensor) -> tf.Tensor:
            if mesh_impl.is_compiled_by_xla:
                # XLA drops control dependencies, and computes once what is computed twice.
                return gen_xla_ops.xla_optimization_barrier([x, *dys])[0]
            if wait:
                with tf.control_dependencies(dys):
                    return tf.identity(x)
            # Compilers that drop control dependencies keep data dependencies.
            total = tf.add_n([tf.reduce_sum(tf.cast(tf.math.real(dy), tf.float32)) for dy in dys])
            # Never: float32 ends at 3.4e38. But no compiler knows that; and a choice leaves x as it
            # is, where a sum would make zeros positive, and spread Inf and NaN.
            never = tf.equal(total * 1e-30, 1e30)
            return tf.where_v2(never, tf.zeros([], x.dtype), x)

        for y, x, value in zip(self.outputs, slices, values):
            delayed = mesh_impl.slicewise(late, x, *after)
            # Still pending: what reads the delayed value may add it to other partial sums.
            pending = wait and is_pending(value)
            lowering.set_tensor_lowering(y, value.with_summands(delayed) if pending else delayed)


def wait_for(xs: Sequence[Tensor], after: Sequence[Tensor]) -> list[Tensor]:
    """Returns Tensors whose values are computed only after those of others.

    Args:
      xs: a list of Tensors.
      after: a list of Tensors.
    """
    # Without gradients to wait for, an operation would only make copies.
    return DelayOperation(xs, after).outputs if xs and after else list(xs)


def computed_again(
    operations: Sequence[Operation],
    mapping: Mapping[Tensor, Tensor],
    ys: Sequence[Tensor],
    xs: Sequence[Tensor],
    grad_ys: Sequence[Tensor],
) -> tuple[list[Tensor], list[Optional[Tensor]]]:
    """Recomputes operations, and differentiates the copies.

    Args:
      operations: the operations of a function.
      mapping: a dictionary from inputs to the Tensors that replace them.
      ys: outputs of the operations.
      xs: inputs of the operations.
      grad_ys: the gradient of each of `ys`.

    Returns:
      (`ys` recomputed, the gradients for `xs` or None).
    """
    graph = grad_ys[0].graph
    start = len(graph.operations)
    _, mapping = graph.clone_operations(readers_of(mapping, operations), mapping)
    # A result that depends on none of the replaced inputs has no copy.
    again = [mapping.get(y, y) for y in ys]
    # What does not depend on the replaced inputs, as random values and variables, is shared with
    # the first computation; gradients flow through it as well.
    unchanged = [op for op in operations if op.outputs and op.outputs[0] not in mapping]
    with usable(unchanged):
        grads = mtf.gradients(
            again,
            [mapping.get(x, x) for x in xs],
            grad_ys=grad_ys,
            operations=unchanged + graph.operations[start:],
        )
    return again, grads


def _gradients_computed_again(
    operations: Sequence[Operation],
    mapping: Mapping[Tensor, Tensor],
    ys: Sequence[Tensor],
    xs: Sequence[Tensor],
    grad_ys: Sequence[Tensor],
) -> list[Optional[Tensor]]:
    """Returns the gradients of `computed_again`, without what is recomputed for results alone."""
    graph = grad_ys[0].graph
    start = len(graph.operations)
    grads = computed_again(operations, mapping, ys, xs, grad_ys)[1]
    # Such as the last sum of a residual block, which no gradient reads: processors that run one
    # program would exchange it all the same.
    graph.drop_unread(start, [dx for dx in grads if dx is not None])
    return grads


class Gradients:
    """Gradients of parts of a function, from the last part to the first."""

    def __init__(
        self, inputs: Sequence[Tensor], ys: Sequence[Tensor], grad_ys: Sequence[Tensor]
    ) -> None:
        """Creates it.

        Args:
          inputs: the Tensors that the function uses, and variables that it makes.
          ys: its results.
          grad_ys: the gradient of each of `ys`.
        """
        self._inputs = set(inputs)
        self._sums: dict[Tensor, Tensor] = {}
        for y, dy in zip(ys, grad_ys):
            _accumulate(self._sums, y, dy)

    def through(
        self, operations: Sequence[Operation], again: Optional[Mapping[Tensor, Tensor]] = None
    ) -> None:
        """Adds the gradients of what operations use.

        Args:
          operations: a part of the function.
          again: from inputs of the part to others, with which it is computed again; or None.
        """
        computed = [y for op in operations for y in op.outputs]
        # Variables that the part makes are inputs: their gradient is a result, and goes no further.
        ys = [y for y in computed if y in self._sums and y not in self._inputs]
        if not ys:
            return
        # They are complete: parts come from the last to the first, so all that use these were here.
        dys = [self._sums.pop(y) for y in ys]
        used = external_inputs(operations, [])
        xs = [x for x in used if is_differentiable(x.dtype)]
        xs += [y for y in computed if y in self._inputs]
        if again:
            # Not before their gradients are known: until then, values would only take memory.
            again = dict(zip(again, wait_for(list(again.values()), dys)))
            grads = _gradients_computed_again(operations, again, ys, xs, dys)
        else:
            grads = mtf.gradients(ys, xs, grad_ys=dys, operations=list(operations))
        for x, dx in zip(xs, grads):
            if dx is not None:
                _accumulate(self._sums, x, dx)

    def of(self, xs: Sequence[Tensor], but: Collection[Tensor] = ()) -> list[Optional[Tensor]]:
        """Returns the gradients of inputs, None for those of `but`."""
        return [None if x in but else self._sums.get(x) for x in xs]


def _from_stored(
    budget: RecomputeBudget,
    forward: Sequence[Operation],
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    dys: Sequence[Tensor],
) -> Optional[list[Optional[Tensor]]]:
    """Returns gradients that read stored activations; None, and no operations, without room."""
    graph = dys[0].graph
    mark, start = graph.mark(), len(graph.operations)
    loops = [op for op in with_inner_operations(forward) if isinstance(op, WhileLoopOperation)]
    without_tape = [loop for loop in loops if not loop.keeps_tape]
    # Gradients read inner values of the function, which are hidden from all other users.
    with usable(forward):
        grads = mtf.gradients(ys, xs, grad_ys=dys, operations=forward)
    # Which activations a gradient reads is known only once it is built, so it is built and, without
    # room for them, taken back.
    if budget.takes(forward, graph.operations[start:]):
        return grads
    graph.roll_back(mark)
    # Their gradients are gone, of which the graph knows, but the loops do not.
    for loop in without_tape:
        loop.keeps_tape = False
    return None


def _reads_in_loops(operations: Sequence[Operation]) -> bool:
    """Returns whether a loop among operations reads a variable, other than at the beginning."""
    inner = with_inner_operations(i for op in operations for i in op.inner_operations)
    return any(
        isinstance(op, ReadVariable) or (isinstance(op, Depend) and op.reads() is not None)
        for op in inner
    )


def recompute_grad(
    fn: Callable,
    explicit_inputs: Sequence[Tensor],
    control_dependencies: bool = True,
    budget: Optional[RecomputeBudget] = None,
) -> Any:
    """Calls a function of Tensors whose activations are recomputed for its gradient.

    This saves the memory of the activations at the cost of a second forward computation (Chen et
    al., "Training deep nets with sublinear memory cost", 2016). Random values and variables are the
    same in both.

    >>> x = mtf.constant(mesh, 3.0)
    >>> y = mtf.recompute_grad(lambda x: mtf.square(mtf.square(x)), [x])
    >>> print(mtf.gradients([y], [x])[0].numpy())
    108.0

    Args:
      fn: takes Tensors; returns a Tensor, or a tuple or list of them.
      explicit_inputs: a list of Tensors, the arguments of `fn`.
      control_dependencies: whether to delay the recomputation until the gradients of the outputs
        are computed.
      budget: a RecomputeBudget: as long as it has room, activations are stored after all; or None.

    Returns:
      The result of `fn`: a Tensor, or a list of Tensors.
    """

    def grad_fn(
        explicit_inputs: Sequence[Tensor],
        all_inputs: Sequence[Tensor],
        forward_operations: Sequence[Operation],
        outputs: Sequence[Tensor],
        output_grads: Sequence[Optional[Tensor]],
    ) -> Sequence[Optional[Tensor]]:
        pairs = [(y, dy) for y, dy in zip(outputs, output_grads) if dy is not None]
        ys, dys = [y for y, _ in pairs], [dy for _, dy in pairs]
        if _reads_in_loops(forward_operations):
            # Read a second time, a variable may have changed: the tape of a loop has what it was.
            with usable(forward_operations):
                return in_order(mtf.gradients(ys, all_inputs, dys, operations=forward_operations))
        if budget is not None:
            grads = _from_stored(budget, forward_operations, all_inputs, ys, dys)
            if grads is not None:
                return in_order(grads)
        if control_dependencies:
            # Without waiting, TensorFlow could recompute everything early and hold it all, as if
            # nothing had been dropped.
            again = wait_for(explicit_inputs, dys)
        else:
            again = [mtf.identity(x) for x in explicit_inputs]
        mapping = dict(zip(explicit_inputs, again))
        return in_order(_gradients_computed_again(forward_operations, mapping, ys, all_inputs, dys))

    def in_order(grads: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        if not control_dependencies:
            return grads
        own, others = grads[: len(explicit_inputs)], grads[len(explicit_inputs) :]
        # Preceding operations wait for these, so activations are not kept for weight gradients.
        after = [dx for dx in others if dx is not None]
        late = iter(wait_for([dx for dx in own if dx is not None], after))
        return [*(None if dx is None else next(late) for dx in own), *others]

    return custom_gradient(fn, grad_fn, explicit_inputs)
