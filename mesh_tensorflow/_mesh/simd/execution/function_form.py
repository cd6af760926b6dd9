"""The form in which TensorFlow writes traced functions, as far as `Sharing` depends on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

import tensorflow.compat.v1 as tf

if TYPE_CHECKING:
    from tensorflow.types.experimental import ConcreteFunction

__all__ = ["mismatch"]


def mismatch(function: ConcreteFunction, graph: tf.Graph) -> Optional[str]:
    """Returns how the FunctionDef of a function differs from what `Sharing` expects, or None.

    Its nodes have to be named like the operations of the traced graph, with the same number of
    inputs; its arguments and results have to be as many as those of the function.
    """
    definition = function.function_def
    operations = {op.name: op for op in graph.get_operations()}
    arguments = [arg.name for arg in definition.signature.input_arg]
    if len(arguments) != len(function.inputs):
        return "gives functions other arguments than their graphs have"
    results = [arg.name for arg in definition.signature.output_arg]
    if len(results) != len(function.outputs) or set(results) != set(definition.ret):
        return "gives functions other results than their graphs have"
    # FunctionDefs have no documented form, so each thing that `Sharing` relies on is compared.
    nodes = {node.name for node in definition.node_def}
    for node in definition.node_def:
        if node.name not in operations or operations[node.name].type != node.op:
            return f"names nodes of functions otherwise than operations of graphs: {node.name}"
        names = [name.lstrip("^").split(":")[0] for name in node.input]
        if len([n for n in node.input if not n.startswith("^")]) != len(
            operations[node.name].inputs
        ) or not nodes.union(arguments).issuperset(names):
            return f"names inputs in functions otherwise than in graphs: {node.name}"
    return None
