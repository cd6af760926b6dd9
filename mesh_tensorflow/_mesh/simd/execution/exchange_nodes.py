"""Collectives between processors of one memory, as nodes of a function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.simd.exchanges import ALLGATHER, ALLTOALL, Exchange

__all__ = ["constant_node", "exchange_nodes", "output_name"]

_BINARY = {"SUM": "AddV2", "MAX": "Maximum", "MIN": "Minimum"}


def constant_node(name: str, value: Union[bool, int]) -> tf.NodeDef:
    """Returns a node with a scalar constant: a bool, or an int32."""
    node = tf.NodeDef(name=name, op="Const")
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
    node.attr["dtype"].type = node.attr["value"].tensor.dtype
    return node


def output_name(exchange: Exchange) -> str:
    """Returns the name of the output of the last node of an exchange."""
    if _is_one_sum(exchange):
        return "sum"
    return "output" if _is_copy(exchange) or exchange.kind not in _BINARY else "z"


def exchange_nodes(
    exchange: Exchange,
    pnum: int,
    name: str,
    inputs: Sequence[str],
    waits: Sequence[str],
    dtype: tf.DType,
) -> list[tf.NodeDef]:
    """Returns the nodes that make a processor's result of an exchange.

    Args:
      exchange: the Exchange.
      pnum: the processor.
      name: the name of the last node.
      inputs: names of the tensors of the processor's sources, in their order.
      waits: control inputs, each "^" and the name of a node.
      dtype: their dtype.
    """
    if _is_copy(exchange):
        made = [tf.NodeDef(name=name, op="Identity", input=[*inputs, *waits])]
    elif exchange.kind == ALLGATHER:
        made = _concatenated(name, inputs, waits)
    elif exchange.kind == ALLTOALL:
        made = _parts_stacked(name, exchange.part_of(pnum), inputs, waits)
    elif _is_one_sum(exchange):
        made = [tf.NodeDef(name=name, op="AddN", input=[*inputs, *waits])]
        made[0].attr["N"].i = len(inputs)
    else:
        made = _reduced_in_turn(_BINARY[exchange.kind], name, inputs, waits)
    for node in made:
        if node.op != "Const":
            node.attr["T"].type = dtype.as_datatype_enum
    return made


def _is_copy(exchange: Exchange) -> bool:
    return len(exchange.sources[0]) == 1 and exchange.kind != ALLTOALL


def _is_one_sum(exchange: Exchange) -> bool:
    # AddN reads all inputs in one pass, without a partial sum in memory for each.
    return exchange.kind == "SUM" and len(exchange.sources[0]) > 2


def _concatenated(name: str, inputs: Sequence[str], waits: Sequence[str]) -> list[tf.NodeDef]:
    """Returns nodes that concatenate the inputs along their first dimension."""
    axis = constant_node(f"{name}/axis", 0)
    node = tf.NodeDef(name=name, op="ConcatV2", input=[*inputs, f"{axis.name}:output:0", *waits])
    node.attr["N"].i = len(inputs)
    node.attr["Tidx"].type = tf.int32.as_datatype_enum
    return [axis, node]


def _parts_stacked(
    name: str, part: Optional[int], inputs: Sequence[str], waits: Sequence[str]
) -> list[tf.NodeDef]:
    """Returns nodes that stack one part of each input; all inputs have a part for each input."""
    made = []
    for i, tensor in enumerate(inputs):
        made.append(tf.NodeDef(name=f"{name}/parts_{i}", op="Unpack", input=[tensor, *waits]))
        made[-1].attr["num"].i = len(inputs)
    made.append(tf.NodeDef(name=name, op="Pack", input=[f"{p.name}:output:{part}" for p in made]))
    made[-1].attr["N"].i = len(inputs)
    for node in made:
        node.attr["axis"].i = 0
    return made


def _reduced_in_turn(
    op: str, name: str, inputs: Sequence[str], waits: Sequence[str]
) -> list[tf.NodeDef]:
    """Returns nodes that reduce the inputs one after another, in their order."""
    made = []
    total, last = inputs[0], len(inputs) - 1
    for i, tensor in enumerate(inputs[1:], 1):
        part = name if i == last else f"{name}/part_{i}"
        made.append(tf.NodeDef(name=part, op=op, input=[total, tensor, *waits]))
        total = f"{part}:z:0"
    return made
