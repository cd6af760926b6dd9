"""Reductions over processors of one memory, as nodes of a function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

__all__ = ["Reduction"]

_BINARY = {"SUM": "AddV2", "MAX": "Maximum", "MIN": "Minimum"}


class Reduction:
    """A reduction over groups of processors.

    Attributes:
      groups: lists of physical processor numbers; each processor is in one of them.
      kind: "SUM", "MAX" or "MIN".
    """

    def __init__(self, groups: Sequence[Sequence[int]], kind: str):
        self.groups = [list(group) for group in groups]
        self.kind = kind
        self._group_of = {pnum: group for group in self.groups for pnum in group}

    def group_of(self, pnum: int) -> list[int]:
        """Returns the processors that a processor reduces with, itself among them."""
        return self._group_of[pnum]

    @property
    def _is_one_node(self) -> bool:
        return self.kind == "SUM" and len(self.groups[0]) > 2

    @property
    def output(self) -> str:
        """The name of the output of its last node."""
        return "sum" if self._is_one_node else "z"

    def nodes(
        self, name: str, inputs: Sequence[str], waits: Sequence[str], dtype: tf.DType
    ) -> list[Any]:
        """Returns the NodeDefs that reduce tensors of one function.

        Args:
          name: the name of the last node.
          inputs: names of the tensors, in the order in which they are added.
          waits: names of the nodes that it waits for.
          dtype: their dtype.
        """
        if self._is_one_node:
            node = tf.NodeDef(name=name, op="AddN", input=[*inputs, *waits])
            node.attr["T"].type = dtype.as_datatype_enum
            node.attr["N"].i = len(inputs)
            return [node]
        made = []
        total, last = inputs[0], len(inputs) - 1
        for i, tensor in enumerate(inputs[1:], 1):
            part = name if i == last else f"{name}/part_{i}"
            node = tf.NodeDef(name=part, op=_BINARY[self.kind], input=[total, tensor, *waits])
            node.attr["T"].type = dtype.as_datatype_enum
            made.append(node)
            total = f"{part}:z:0"
        return made
