"""Order and gradients by hand: depend, stop_gradient, custom_gradient."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.cost import Cost
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow._core.interfaces import LoweringLike
from mesh_tensorflow._core.operation import Operation, PendingSums
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow.ops._variables.assign import ReadVariable
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
    """A Tensor that waits until other operations have run.

    The value of a variable is read again, after them.
    """

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
        super().__init__([x], name=name or "depend")
        self._dependencies = list(dependencies)
        self._outputs = [Tensor(self, x.shape, x.dtype)]

    def gradient(self, grad_ys: Sequence[Tensor]) -> Sequence[Tensor]:
        return list(grad_ys)

    def _variable(self) -> Optional[Variable]:
        op = self.inputs[0].operation
        return op._var if isinstance(op, ReadVariable) else op if isinstance(op, Variable) else None

    def lower(self, lowering: LoweringLike) -> None:
        mesh_impl = lowering.mesh_impl(self)
        if not mesh_impl.supports_control_dependencies:
            raise ValueError(
                f"{self.name}: {type(mesh_impl).__name__} does not support control dependencies; "
                "make the value of one computation an input of the other instead"
            )
        waits: list = []
        for d in self._dependencies:
            if isinstance(d, Operation):
                waits.append(lowering.lowered_operation(d))
            else:
                waits.extend(lowering.tensors[d].to_laid_out_tensor().all_slices)
        x, y = lowering.tensors[self.inputs[0]], self.outputs[0]
        variable = self._variable()
        with tf.control_dependencies(waits):
            if variable is not None:
                value = lowering.variables[variable].read()
                value = variable.cast_to_activation(mesh_impl, value)
            else:
                value = mesh_impl.slicewise(tf.identity, x.to_laid_out_tensor())
        lowering.set_tensor_lowering(y, value)


def depend(x: Tensor, dependencies: Sequence[Union[Tensor, Operation]]) -> Tensor:
    """Returns `x`, to be had only after other operations have run.

    If `x` is the value of a variable, it is read again after them.

    Args:
      x: a Tensor.
      dependencies: a list of Tensors and Operations, such as those that mtf.assign returns.
    """
    return Depend(x, dependencies).outputs[0]


class StopGradient(Operation):
    """The same value, through which no gradient goes."""

    def __init__(self, x: Tensor, name: Optional[str] = None):
        """Creates the operation; see `stop_gradient`."""
        super().__init__([x], name=name or "stop_gradient")
        self._outputs = [Tensor(self, x.shape, x.dtype)]

    @property
    def has_gradient(self) -> bool:
        """False."""
        return False

    def lower(self, lowering: LoweringLike) -> None:
        lowering.set_tensor_lowering(self.outputs[0], lowering.tensors[self.inputs[0]])

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        return Cost()

    def cost_key(self) -> None:
        return None

    def passes_on(self, split: Collection[str]) -> dict[Tensor, Tensor]:
        return {self.outputs[0]: self.inputs[0]}

    def delays_sums(self, mesh_impl: MeshImpl, pending: PendingSums) -> bool:
        return True

    def may_begin_sum(self, split: Collection[str]) -> bool:
        return False

    def pending_sums(self, mesh_impl: MeshImpl, pending: PendingSums) -> dict:
        axes = pending.get(self.inputs[0])
        return {} if axes is None else {self.outputs[0]: self.inputs[0]}


def stop_gradient(x: Tensor) -> Tensor:
    """Returns the value of `x`; no gradient goes through it."""
    return StopGradient(x).outputs[0]


class CustomGradientOperation(Operation):
    """The outputs of a function, with a gradient function of its own."""

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
          all_inputs: these, then the floating Tensors from outside that it uses.
          fn_outputs: what it returned, a list of Tensors.
          grad_fn: the gradient function.
          forward_operations: the operations that it made.
          name: a string or None.
        """
        super().__init__([*all_inputs, *fn_outputs], name=name or "custom_gradient")
        self._explicit_inputs = list(explicit_inputs)
        self._all_inputs = list(all_inputs)
        self._fn_outputs = list(fn_outputs)
        self._grad_fn = grad_fn
        self._forward_operations = list(forward_operations)
        self._outputs = [Tensor(self, x.shape, x.dtype, index=i) for i, x in enumerate(fn_outputs)]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        grads = [
            mtf.zeros_like(y) if dy is None and y.dtype.is_floating else dy
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
        return result + [None] * len(self._fn_outputs)

    def lower(self, lowering: LoweringLike) -> None:
        for x, y in zip(self.inputs[len(self._all_inputs) :], self.outputs):
            lowering.set_tensor_lowering(y, lowering.tensors[x])

    def cloned_from(self, original: Operation, mapping: Mapping[Tensor, Tensor]) -> None:
        """Makes a copy refer to the copies of the forward operations; see Operation."""
        self._forward_operations = [
            mapping[op.outputs[0]].operation if op.outputs and op.outputs[0] in mapping else op
            for op in self._forward_operations
        ]

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        return Cost()

    def cost_key(self) -> None:
        return None

    def passes_on(self, split: Collection[str]) -> dict[Tensor, Tensor]:
        return dict(zip(self.outputs, self.inputs[len(self._all_inputs) :]))

    def delays_sums(self, mesh_impl: MeshImpl, pending: PendingSums) -> bool:
        return True

    def may_begin_sum(self, split: Collection[str]) -> bool:
        return False

    def pending_sums(self, mesh_impl: MeshImpl, pending: PendingSums) -> dict:
        inner = self.inputs[len(self._all_inputs) :]
        return {y: x for x, y in zip(inner, self.outputs) if x in pending}


def external_inputs(operations: Sequence[Operation], known: Sequence[Tensor]) -> list[Tensor]:
    """Returns the Tensors that operations use and neither make nor have in `known`."""
    seen = set(known)
    for op in operations:
        seen.update(op.outputs)
    found: dict[Tensor, None] = {}
    for op in operations:
        for x in op.inputs:
            if x not in seen:
                found[x] = None
    return list(found)


def distinct_tensors(xs: Sequence[Tensor]) -> list[Tensor]:
    """Returns `xs`, with copies of those that stand there again.

    Each argument of a function has a gradient of its own, also where two are one Tensor.
    """
    seen: set[Tensor] = set()
    distinct = []
    for x in xs:
        distinct.append(mtf.identity(x) if x in seen else x)
        seen.add(x)
    return distinct


@leaves_no_node
def custom_gradient(fn: Callable, grad_fn: Callable, explicit_inputs: Sequence[Tensor]) -> Any:
    """Calls a function of Tensors and gives its result a gradient function of its own.

    Args:
      fn: takes Tensors, each another one; returns a Tensor, or a tuple or list of them.
      grad_fn: takes the keyword arguments explicit_inputs, all_inputs (these and the floating
        Tensors from outside that `fn` uses), forward_operations, outputs and output_grads;
        returns a gradient, or None, for each of all_inputs.
      explicit_inputs: a list of Tensors, the arguments of `fn`.

    Returns:
      What `fn` returned: a Tensor, or a list of Tensors.

    Raises:
      ValueError: the gradient function returns a wrong number of gradients, or makes
        variables; found when the gradient is built.
    """
    explicit_inputs = distinct_tensors(explicit_inputs)
    graph = explicit_inputs[0].graph
    outputs, forward = graph.take_operations(lambda: fn(*explicit_inputs))
    graph.operations.extend(forward)
    several = isinstance(outputs, (tuple, list))
    outputs = list(outputs) if several else [outputs]
    external = [x for x in external_inputs(forward, explicit_inputs) if x.dtype.is_floating]
    # Variables made by the function are inputs to it.
    external += [
        y for op in forward if isinstance(op, Variable) for y in op.outputs if y not in external
    ]
    op = CustomGradientOperation(
        explicit_inputs, explicit_inputs + external, outputs, grad_fn, forward
    )
    for inner in forward:
        if not isinstance(inner, Variable):
            for y in inner.outputs:
                y.usable = y in external or y in outputs
    return op.outputs if several else op.outputs[0]
