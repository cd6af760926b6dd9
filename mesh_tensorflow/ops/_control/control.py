"""Control over execution order and gradients: depend, stop_gradient, custom_gradient."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow._core.operation import Operation, Partial, PartialSums, PendingSums
from mesh_tensorflow._core.tensor import Tensor, is_differentiable
from mesh_tensorflow._mesh.mesh_impl import MeshImpl, summands_of
from mesh_tensorflow.ops._variables.assign import Assign, ReadVariable, note_read
from mesh_tensorflow.ops._variables.variable import Variable

__all__ = [
    "CustomGradientOperation",
    "Depend",
    "StopGradient",
    "custom_gradient",
    "depend",
    "stop_gradient",
]


class Depend(Operation):
    """A Tensor that waits for other operations.

    The value of a variable is read again after operations that may assign to it.
    """

    takes_padding = True

    def __init__(
        self,
        x: Tensor,
        dependencies: Sequence[Union[Tensor, Operation]],
        name: Optional[str] = None,
    ):
        """Creates the operation; see `depend`."""
        for d in dependencies:
            if not isinstance(d, (Tensor, Operation)):
                raise ValueError(f"depend: {d!r} is neither a mtf.Tensor nor a mtf.Operation")
        # What it waits for is no input: an order has no gradient.
        super().__init__([x], name=name or "depend")
        self._dependencies = list(dependencies)
        self._outputs = [Tensor(self, x.shape, x.dtype)]

    @property
    def dependencies(self) -> Sequence[Union[Tensor, Operation]]:
        """What it waits for."""
        return self._dependencies

    def wait_less(self, gone: Callable[[Operation], bool]) -> None:
        """Waits no longer for operations that are not there where it is computed.

        Args:
          gone: takes an Operation; returns whether it and its outputs are not there.
        """
        self._dependencies = [
            d for d in self._dependencies if not gone(d.operation if isinstance(d, Tensor) else d)
        ]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Passes the gradient on."""
        return list(grad_ys)

    def reads(self) -> Optional[Variable]:
        """The variable that it reads again; None if it passes a value on."""
        variable = self._variable()
        return variable if variable and self._may_follow_assignment(variable) else None

    def _variable(self) -> Optional[Variable]:
        op = self.inputs[0].operation
        return op._var if isinstance(op, ReadVariable) else op if isinstance(op, Variable) else None

    def _may_follow_assignment(self, variable: Variable) -> bool:
        """Returns whether a dependency is an Operation, or made after an assignment to a variable.

        Else nothing says whether a read comes before the assignments of the step or after them.
        """
        if any(isinstance(d, Operation) for d in self._dependencies):
            return True
        rest = [d.operation for d in self._dependencies if isinstance(d, Tensor)]
        seen: set[Operation] = set()
        while rest:
            op = rest.pop()
            if op in seen:
                continue
            seen.add(op)
            if isinstance(op, Assign) and variable in op.variables:
                return True
            # What it waits for comes before it, too.
            sources = (*op.inputs, *op.dependencies)
            rest += [d.operation if isinstance(d, Tensor) else d for d in sources]
        return False

    def lower(self, lowering: mtf.Lowering) -> None:
        """Adds control dependencies on all lowered dependencies."""
        mesh_impl = lowering.mesh_impl(self)
        if not mesh_impl.supports_control_dependencies:
            raise ValueError(
                f"{self.name}: {type(mesh_impl).__name__} does not support control dependencies; "
                "make the value of one computation an input of the other instead"
            )
        waits: list = []
        for d in self._dependencies:
            if isinstance(d, Operation):
                done = lowering.lowered_operation(d)
                # A loop's gradient computes this again, and an assignment was done by the loop.
                if done is None or _can_be_waited_for(done):
                    waits.append(done)
            else:
                # Of a partial sum it waits for the summands: an order alone asks for no allreduce;
                # and one in a loop, of a sum from outside, would be of no use there.
                # All slices, of all processors: a processor may not read a variable again while
                # others still have to assign to theirs.
                waits.extend(summands_of(lowering.tensors[d]).all_slices)
        x, y = lowering.tensors[self.inputs[0]], self.outputs[0]
        variable = self.reads()
        with tf.control_dependencies(waits):
            if variable is not None:
                read = lowering.variables[variable].read()
                # So that an assignment that comes after this read waits for it.
                note_read(lowering, variable, read)
                value = variable.cast_to_activation(mesh_impl, read)
            else:
                # TensorFlow gives control dependencies to new operations only: one for each slice.
                value = mesh_impl.slicewise(tf.identity, x.to_laid_out_tensor())
        lowering.set_tensor_lowering(y, value)


def _can_be_waited_for(op: tf.Operation) -> bool:
    """Returns whether an operation is in what is being built, a graph or a loop, or outside."""
    graph = tf.get_default_graph()
    # A function sees what is in the graphs around it, and nothing of functions within.
    while op.graph is not graph:
        graph = getattr(graph, "outer_graph", None)
        if graph is None:
            return False
    # Within a graph of TensorFlow 1 loops are contexts, of which the same holds.
    own, context = op._get_control_flow_context(), graph._get_control_flow_context()
    while context is not None and context is not own:
        context = context.outer_context
    return context is own


def depend(x: Tensor, dependencies: Sequence[Union[Tensor, Operation]]) -> Tensor:
    """Returns `x` with control dependencies on other operations.

    If `x` is the value of a variable that they may assign to, it is read again after them.

    >>> w = mtf.get_variable(mesh, "w", "d:2", initializer=tf.ones_initializer())
    >>> update = mtf.assign_add(w, mtf.ones_like(w))
    >>> after = mtf.depend(w, [update])
    >>> impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:1", "", [""])
    >>> lowering = mtf.Lowering(graph, {mesh: impl})
    >>> print(lowering.export_to_tf_tensor(after).numpy())
    [2. 2.]

    Args:
      x: a Tensor.
      dependencies: a list of Tensors and Operations, such as the result of mtf.assign.
    """
    return Depend(x, dependencies).outputs[0]


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

    def cloned_from(self, original: Operation, mapping: Mapping[Tensor, Tensor]) -> None:
        """Replaces the forward operations by their copies; see Operation."""
        # What has no copy, such as a random operation, is shared with the original.
        self._forward_operations = [
            mapping[op.outputs[0]].operation if op.outputs and op.outputs[0] in mapping else op
            for op in self._forward_operations
        ]


def external_inputs(operations: Sequence[Operation], known: Sequence[Tensor]) -> list[Tensor]:
    """Returns the inputs of operations that are neither their outputs nor in `known`."""
    seen = set(known)
    for op in operations:
        seen.update(op.outputs)
    # A dictionary, as the order of a set of objects differs from run to run.
    return list(dict.fromkeys(x for op in operations for x in op.inputs if x not in seen))


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
