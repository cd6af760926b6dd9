"""Reductions over processors of one memory, as nodes of a function."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.simd.reductions import Reduction

__all__ = ["output_name", "reduction_nodes"]

_BINARY = {"SUM": "AddV2", "MAX": "Maximum", "MIN": "Minimum"}


def _is_one_node(reduction: Reduction) -> bool:
    return reduction.kind == "SUM" and len(reduction.groups[0]) > 2


def output_name(reduction: Reduction) -> str:
    """Returns the name of the output of the last node of a reduction."""
    return "sum" if _is_one_node(reduction) else "z"


def reduction_nodes(
    reduction: Reduction, name: str, inputs: Sequence[str], waits: Sequence[str], dtype: tf.DType
) -> list[tf.NodeDef]:
    """Returns the nodes that reduce tensors of one function.

    Args:
      reduction: the Reduction.
      name: the name of the last node.
      inputs: names of the tensors, in the order in which they are added.
      waits: control inputs, each "^" and the name of a node.
      dtype: their dtype.
    """
    if _is_one_node(reduction):
        node = tf.NodeDef(name=name, op="AddN", input=[*inputs, *waits])
        node.attr["T"].type = dtype.as_datatype_enum
        node.attr["N"].i = len(inputs)
        return [node]
    made = []
    total, last = inputs[0], len(inputs) - 1
    for i, tensor in enumerate(inputs[1:], 1):
        part = name if i == last else f"{name}/part_{i}"
        node = tf.NodeDef(name=part, op=_BINARY[reduction.kind], input=[total, tensor, *waits])
        node.attr["T"].type = dtype.as_datatype_enum
        made.append(node)
        total = f"{part}:z:0"
    return made
