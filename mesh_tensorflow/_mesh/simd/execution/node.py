"""Node: a node of a program, as `Sharing` distributes it over processors."""

from __future__ import annotations

from typing import Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.simd.exchanges import Exchange

__all__ = ["Node"]

# Below this many elements, computing a value again costs less than handing it over.
LEAST_ELEMENTS = 1024
# Operations that cost nothing, or would force a copy of a variable if their value is held.
_KEPT = (
    "Const",
    "Placeholder",
    "Identity",
    "Reshape",
    "ReadVariableOp",
    "ExpandDims",
    "Squeeze",
    "StopGradient",
    "Shape",
)
_NO_VALUE = (tf.resource, tf.variant, tf.string)


class Node:
    """A node of a program, with where its values are equal and where they are computed.

    Attributes:
      definition: its NodeDef in the program's FunctionDef.
      operation: the tf.Operation of the traced graph, or one that the node waits for.
      equal: for each processor, the first one on which the node has the same value.
      at: for each processor, the one that computes the value it uses.
      exchange: the Exchange that the node stands for, or None.
      variable: the name of the input that is a variable of several processors, or None.
    """

    def __init__(
        self, definition: tf.NodeDef, operation: tf.Operation, exchange: Optional[Exchange]
    ):
        self.definition = definition
        self.operation = operation
        self.exchange = exchange
        self.variable: Optional[str] = None
        self.equal: list[int] = []
        self.at: list[int] = []

    @property
    def data_inputs(self) -> list[str]:
        """Names of its input tensors, in the form of FunctionDefs."""
        return [name for name in self.definition.input if not name.startswith("^")]

    @property
    def control_inputs(self) -> list[str]:
        """Names of the nodes that it waits for."""
        return [name[1:] for name in self.definition.input if name.startswith("^")]

    @property
    def is_collective(self) -> bool:
        """Whether it is one of TensorFlow's collectives."""
        return self.definition.op.startswith("Collective")

    def is_pure(self) -> bool:
        """Whether equal inputs give equal values; all processors read a variable at one point."""
        op = self.operation
        # Stateful for TensorFlow, but all reads are at the beginning of the program, before
        # assignments.
        if op.type == "ReadVariableOp":
            return True
        has_function = any(a.HasField("func") for a in self.definition.attr.values())
        return not (op.op_def.is_stateful or has_function)

    def is_worth_sharing(self) -> bool:
        """Whether handing its value over costs less than computing it again."""
        op = self.operation
        if op.type in _KEPT or op.control_inputs or any(t.dtype in _NO_VALUE for t in op.outputs):
            return False
        sizes = [t.shape.num_elements() or 0 for t in [*op.inputs, *op.outputs]]
        return max(sizes, default=0) >= LEAST_ELEMENTS
