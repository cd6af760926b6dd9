"""Order and effects: depend, Print, scalar_summary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.operation import Operation, Tensor
from mesh_tensorflow._mesh.mesh_impl import summands_of
from mesh_tensorflow.ops._variable import (
    Assign,
    ReadVariable,
    Variable,
    note_read,
    read_now,
)
from mesh_tensorflow.utils import SCALAR_SUMMARIES_COLLECTION_KEY

if TYPE_CHECKING:
    from mesh_tensorflow._lowering.lowering import Lowering

__all__ = [
    "Depend",
    "Print",
    "PrintOperation",
    "ScalarSummaryOperation",
    "depend",
    "scalar_summary",
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
                read = read_now(lowering, variable)
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


def external_inputs(operations: Sequence[Operation], known: Sequence[Tensor]) -> list[Tensor]:
    """Returns the inputs of operations that are neither their outputs nor in `known`."""
    seen = set(known)
    for op in operations:
        seen.update(op.outputs)
    # A dictionary, as the order of a set of objects differs from run to run.
    return list(dict.fromkeys(x for op in operations for x in op.inputs if x not in seen))


# -- effects: printing values and writing summaries


class PrintOperation(Operation):
    """The same value; prints other values when it is computed."""

    has_effect = True
    takes_padding = True
    costs_nothing = True

    def __init__(
        self,
        x: Tensor,
        data: Sequence[Tensor],
        message: str,
        name: Optional[str] = None,
        **kwargs: object,
    ):
        """Creates the operation; see `Print`."""
        # What is printed are inputs too: it is computed before, and summed where it is pending.
        super().__init__([x, *data], name=name or "Print")
        self._message = message
        self._kwargs = kwargs
        self._outputs = [Tensor(self, x.shape, x.dtype)]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Passes the gradient on to the value that is returned."""
        return [*grad_ys, *[None] * (len(self.inputs) - 1)]

    def lower(self, lowering: Lowering) -> None:
        """Has the mesh implementation print the slices."""
        if lowering.computes_again:
            lowering.set_tensor_lowering(self.outputs[0], lowering.tensors[self.inputs[0]])
            return
        x, *data = [lowering.tensors[x].to_laid_out_tensor() for x in self.inputs]
        value = lowering.mesh_impl(self).Print(x, data, self._message, **self._kwargs)
        # A loop looks there for what must run in each iteration, whether its result is used or not.
        lowering.operations[self] = tf.group(value.all_slices)
        lowering.set_tensor_lowering(self.outputs[0], value)


def Print(x: Tensor, data: Sequence[Tensor], message: str, **kwargs: Any) -> Tensor:
    """Returns `x`, and prints slices of `data` when it is computed, like tf.Print.

    >>> x = mtf.ones(mesh, "d:2")
    >>> y = mtf.Print(x, [x], "x: ")
    >>> print(y.shape)
    Shape[d=2]

    Args:
      x: a Tensor.
      data: a list of Tensors; the slice of one processor is printed.
      message: a string.
      **kwargs: name, and arguments of tf.Print such as summarize and first_n.
    """
    return PrintOperation(x, data, message, **kwargs).outputs[0]


class ScalarSummaryOperation(Operation):
    """Adds a scalar to the summaries, with its name as the tag."""

    has_effect = True
    takes_padding = True
    costs_nothing = True

    def __init__(self, name: str, x: Tensor):
        """Creates the operation; see `scalar_summary`."""
        if x.shape.ndims:
            raise ValueError(
                f"scalar_summary {name!r}: {x.name} {x.shape} is no scalar; reduce it with "
                "mtf.reduce_mean"
            )
        super().__init__([x], name=name)
        self._outputs = [Tensor(self, x.shape, x.dtype)]

    def lower(self, lowering: Lowering) -> None:
        """Adds the first processor's value to the collection of scalar summaries."""
        value = lowering.tensors[self.inputs[0]].to_laid_out_tensor()
        # The collection outlives an eager program: only the latest values are kept.
        if tf.executing_eagerly():
            summaries = tf.get_collection_ref(SCALAR_SUMMARIES_COLLECTION_KEY)
            summaries[:] = [(name, x) for name, x in summaries if name != self.name]
        # A scalar is whole on each processor, so that the first one has it.
        tf.add_to_collection(SCALAR_SUMMARIES_COLLECTION_KEY, (self.name, value.all_slices[0]))
        lowering.set_tensor_lowering(self.outputs[0], value)

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Passes the gradient on."""
        return list(grad_ys)


def scalar_summary(name: str, x: Tensor) -> Operation:
    """Adds a scalar to the summaries, in the collection "mtf_scalar_summaries".

    >>> summary = mtf.scalar_summary("loss", mtf.constant(mesh, 0.5))
    >>> print(type(summary).__name__)
    ScalarSummaryOperation

    Args:
      name: the tag, under the variable scope; it is made unique.
      x: a scalar Tensor. In layers of a pipeline, which are applied to all stages at once, nothing
        is recorded.

    Returns:
      The operation.

    Raises:
      ValueError: `x` has dimensions.
    """
    # In a pipeline the Tensor has the values of all stages, and is no scalar.
    return ScalarSummaryOperation(name, x) if x.graph.stages is None else x.operation
