"""Peak memory of a step that XLA compiles for CPUs.

It differs from what TensorFlow needs in five ways, each of which was found in XLA's lists of the
buffers of training steps:

- Elementwise operations are fused: each of their elements is computed within what reads it,
  several times if several operations do. Results are in memory only for others, such as products;
  and what is fused reads what such a result is made of, such as the input of a relu, in its place.
- Operations run breadth first: whatever has all of its inputs comes next, in the order in which
  they were there, as several threads could run them. So what the backward pass needs is made early.
- A step begins with a copy of each variable that it assigns and that both passes read, although new
  values are written after the last reader of the old ones. The gradient is in its memory.
- The gradient of a convolution's filter reads copies of both images, in another order of
  dimensions; and any convolution reads one of an image in blocks. Where the blocks are split, the
  copy has edges, and the gradient of an image is there once more for each that is added to it.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import Optional

from mesh_tensorflow._core.operation import Operation, Tensor
from mesh_tensorflow.auto_mtf.objective import Block, Column, Item, ResidentMemory
from mesh_tensorflow.ops._contractions.conv import ConvNdOperation
from mesh_tensorflow.ops._contractions.einsum import EinsumOperation
from mesh_tensorflow.ops._contractions.reduce_broadcast import BroadcastOperation, ReduceOperation
from mesh_tensorflow.ops._elementwise.binary import (
    BinaryOpWithBroadcasting,
    ScalarAddOperation,
    ScalarMultiplyOperation,
    SelectOperation,
)
from mesh_tensorflow.ops._elementwise.slicewise import GenericGradOperation, SlicewiseOperation
from mesh_tensorflow.ops._movement.reshape import ReshapeOperation
from mesh_tensorflow.ops._movement.split_concat import (
    ConcatOperation,
    PadOperation,
    SliceOperation,
    SplitOperation,
    StackOperation,
    UnstackOperation,
)
from mesh_tensorflow.ops._variable import Assign, ReadVariable, Variable

# What XLA computes element by element, of elements of inputs.
_FUSED = (
    BinaryOpWithBroadcasting, BroadcastOperation, PadOperation, ReshapeOperation,
    ScalarAddOperation, ScalarMultiplyOperation, SelectOperation, SliceOperation, SplitOperation,
    StackOperation, UnstackOperation,
)  # fmt: skip
# What computes its inputs by itself, and is computed once.
_READERS = (Assign, ConcatOperation, ReduceOperation)


def is_fused(op: Operation) -> bool:
    """Returns whether XLA computes an operation within what reads it.

    Args:
      op: an Operation.
    """
    if isinstance(op, GenericGradOperation):
        return is_fused(op.forward_op)
    if isinstance(op, SlicewiseOperation):
        return op.is_elementwise
    if isinstance(op, EinsumOperation):
        dims = op.outputs[0].shape.dims
        return all(d in dims for x in op.inputs for d in x.shape)
    return isinstance(op, _FUSED)


class CompiledMemory(ResidentMemory):
    """The memory of a program that XLA compiles for CPUs, on one processor, under any layout."""

    def _variable_blocks(self, operations: Sequence[Operation]) -> Iterator[Block]:
        copied = self._copied(operations)
        for block in super()._variable_blocks(operations):
            yield block
            if block.name in copied:
                yield block._replace(name=f"{block.name}/copy", kind="copies")

    def _copied(self, operations: Sequence[Operation]) -> set[str]:
        """Returns the names of variables that are assigned, and read by two or more operations."""
        assigned = {v.name for op in operations if isinstance(op, Assign) for v in op.variables}
        variable: dict[Tensor, str] = {}
        count: collections.Counter[str] = collections.Counter()
        for op in operations:
            if isinstance(op, Variable):
                variable.update(dict.fromkeys(op.outputs, op.name))
            same = is_fused(op) or isinstance(op, ReadVariable)
            for i, x in enumerate(op.inputs):
                if x in variable and not self._computes(op, i) and not same:
                    count[variable[x]] += 1
            # What is cast, or has other names, is no copy that would last.
            if same and len(op.inputs) == 1 and op.inputs[0] in variable:
                variable.update(dict.fromkeys(op.outputs, variable[op.inputs[0]]))
        return {name for name in assigned if count[name] > 1}

    def _make_items(self, operations: Iterable[Operation]) -> Iterator[Item]:
        operations = list(operations)
        self._summed = {
            y.name: tuple(sorted({d.name for x in op.inputs for d in x.shape - y.shape}))
            for op in operations
            for y in op.outputs
        }
        # What some operation reads as it is, and what is made of what, by the names of blocks.
        self._read_whole = set(self._outputs)
        self._made_of: dict[Tensor, Sequence[str]] = {}
        for op in reversed(operations):
            passed = op.passes_on(self._candidates)
            read = [x for i, x in enumerate(op.inputs) if not self._computes(op, i)]
            self._read_whole.update(
                [x for y, x in passed.items() if y in self._read_whole] if passed else read
            )
        items = list(super()._make_items(operations))
        readers = collections.Counter(name for item in items for name in dict.fromkeys(item.inputs))
        for item in items:
            if not isinstance(item.op, Assign) or item.outputs:  # a whole copy of an update
                continue
            v = item.op.variables[int(item.name.rpartition("/")[2])]
            copied = self._blocks.get(f"{v.name}/copy")
            for name in item.inputs:
                block = self._blocks[name]
                alone = readers[name] == 1 and block.kind == "gradients"
                if copied is not None and alone and block.bytes == copied.bytes:
                    # In the memory of the variable, which others read the copy of; but not if it
                    # is summed over processors.
                    only = self._summed.get(name, ())
                    column = block.column._replace(only=only)
                    self._blocks[name] = block._replace(
                        column=column, bytes=block.bytes * bool(only)
                    )
        yield from items

    @staticmethod
    def _computes(op: Operation, i: int) -> bool:
        """Returns whether an operation computes elements of an input where it reads them."""
        if isinstance(op, ConvNdOperation):
            return op.is_copied_by_xla(i)
        return is_fused(op) or isinstance(op, _READERS)

    def _reads(self, op: Operation, i: int) -> Sequence[str]:
        x = op.inputs[i]
        while passed := x.operation.passes_on(self._candidates):
            x = passed[x]
        if x in self._made_of and (x not in self._read_whole or self._computes(op, i)):
            return self._made_of[x]
        return super()._reads(op, i)

    def _is_kept(self, op: Operation, y: Tensor, inputs: Sequence[str]) -> bool:
        is_stored = not is_fused(op) or y in self._read_whole
        made_of = list(dict.fromkeys(inputs))
        # Of two tensors, each reader would read both in place of one.
        if is_fused(op) and (not is_stored or len(made_of) == 1):
            self._made_of[y] = made_of
        return is_stored and super()._is_kept(op, y, inputs)

    def _copy(self, op: Operation, i: int) -> Optional[Block]:
        stored = super()._copy(op, i)
        if stored is not None or not (isinstance(op, ConvNdOperation) and op.is_copied_by_xla(i)):
            return stored
        return self._block(op.inputs[i], "copies")._replace(name=f"{op.name}/{i}/copy")

    def _moved(self, op: Operation) -> Optional[Block]:
        moved = super()._moved(op)
        if moved is not None or not isinstance(op, ConvNdOperation) or not op.blocks:
            return moved
        wide, more = op.with_edges
        column = Column(self._split(wide), only=tuple(d.name for d in op.blocks))
        return Block(f"{op.name}/edges", "copies", int(more * op.outputs[0].dtype.size), column)

    def _orders(self) -> list[list[int]]:
        inputs, readers = self._needed(), dict[int, list[int]]()
        for number, needed in enumerate(inputs):
            for n in needed:
                readers.setdefault(n, []).append(number)
        missing = list(map(len, inputs))
        order = [number for number, count in enumerate(missing) if not count]
        for number in order:  # which grows
            for reader in readers.get(number, ()):
                missing[reader] -= 1
                if not missing[reader]:
                    order.append(reader)
        return [order]
