"""GraphInterface: operations, tensors and sizes of a tf.Graph or an mtf.Graph, by name."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional, TypeVar

import tensorflow.compat.v1 as tf
from tensorflow.core.framework import cost_graph_pb2

from mesh_tensorflow._core.graph import Graph

__all__ = ["GraphInterface", "MemoryChange"]

V = TypeVar("V")


class MemoryChange(NamedTuple):
    """The change in memory at one operation of a schedule.

    Attributes:
      born: names of the tensors that the operation creates.
      dead: names of the tensors that no later operation reads.
    """

    born: list[str]
    dead: list[str]


def memory_changes(
    inputs: Sequence[Sequence[str]],
    outputs: Sequence[Sequence[str]],
    final: Collection[str],
    schedule: Iterable[int],
) -> Iterator[MemoryChange]:
    """Yields the change in memory at each operation of a schedule.

    Args:
      inputs: for each operation, the names of its inputs.
      outputs: for each, the names of its outputs.
      final: the names of the tensors that stay in memory until the end.
      schedule: indices of operations, in execution order.
    """
    # How many operations have still to read each tensor. One that takes it twice is one reader.
    readers = collections.Counter(name for names in inputs for name in set(names))
    for number in schedule:
        read, born = dict.fromkeys(inputs[number]), list(dict.fromkeys(outputs[number]))
        readers.subtract(read.keys())
        # Also of what is made here, if nothing reads it: it is live at this operation alone.
        unread = (name for name in [*read, *born] if not readers[name])
        yield MemoryChange(born, [name for name in unread if name not in final])


def live_names(changes: Iterable[MemoryChange]) -> Iterator[set[str]]:
    """Yields the names of the live tensors at each change: one set, which goes on changing."""
    live: set[str] = set()
    for born, dead in changes:
        live.update(born)
        # Before the dead ones leave: an operation has its inputs in memory while it runs.
        yield live
        live.difference_update(dead)


class GraphInterface:
    """Access to a graph by the names of its operations and tensors.

    It is a snapshot: operations added to the graph later are not included.

    Attributes:
      canonical_device: a device string, or None.
    """

    def __init__(self, graph: Any, canonical_device: Optional[str] = None):
        """Creates a GraphInterface.

        Args:
          graph: a tf.Graph or an mtf.Graph.
          canonical_device: the device for which `is_tensor_on_canonical_device` is true; it is
            also true for tensors without a device.

        Raises:
          TypeError: `graph` is neither.
        """
        self._is_mtf = isinstance(graph, Graph)
        if not self._is_mtf and not isinstance(graph, tf.Graph):
            raise TypeError(f"Graph is not tf.Graph or mtf.Graph: {type(graph)}")
        self.canonical_device = canonical_device
        operations: list[Any] = graph.operations if self._is_mtf else graph.get_operations()
        # A copy of the list, as the graph may grow while a schedule counts on these numbers.
        self._operations: dict[str, Any] = {op.name: op for op in operations}
        self._tensors: dict[str, Any] = {t.name: t for op in operations for t in op.outputs}
        self._final: set[str] = set()

    def _named(self, table: Mapping[str, V], what: str, name: str) -> V:
        # Asked for at once: a table of mesh dimensions knows joined names that it does not list.
        try:
            return table[name]
        except KeyError:
            raise KeyError(f"the graph has no {what} named {name!r}") from None

    def _operation(self, name: str) -> Any:
        return self._named(self._operations, "operation", name)

    def _tensor(self, name: str) -> Any:
        return self._named(self._tensors, "tensor", name)

    # -- operations

    def get_num_operations(self) -> int:
        """Returns the number of operations."""
        return len(self._operations)

    def get_all_operation_names(self) -> Iterator[str]:
        """Yields the names of the operations, in order of creation."""
        yield from self._operations

    def get_operation_input_names(self, operation_name: str) -> Iterator[str]:
        """Returns the names of an operation's inputs; a repeated input is repeated.

        Raises:
          KeyError: there is no such operation.
        """
        return iter([t.name for t in self._operation(operation_name).inputs])

    def get_operation_output_names(self, operation_name: str) -> Iterator[str]:
        """Returns the names of an operation's outputs.

        Raises:
          KeyError: there is no such operation.
        """
        return iter([t.name for t in self._operation(operation_name).outputs])

    def get_operation_device(self, operation_name: str) -> Optional[str]:
        """Returns the device of an operation; None in an mtf.Graph.

        Raises:
          KeyError: there is no such operation.
        """
        operation = self._operation(operation_name)
        return None if self._is_mtf else operation.device

    def get_operation_mtf_dimension_names(self, operation_name: str) -> set[str]:
        """Returns the names of all dimensions of an operation's inputs and outputs.

        Raises:
          KeyError: there is no such operation.
        """
        operation = self._operation(operation_name)
        if not self._is_mtf:
            return set()
        tensors = [*operation.inputs, *operation.outputs]
        return {name for t in tensors for name in t.shape.dimension_names}

    # -- tensors

    def get_all_tensor_names(self) -> Iterator[str]:
        """Yields the names of the tensors, in order of creation."""
        yield from self._tensors

    def get_tensor_dtype(self, tensor_name: str) -> tf.DType:
        """Returns the dtype of a tensor.

        Raises:
          KeyError: there is no such tensor.
        """
        return self._tensor(tensor_name).dtype

    def get_tensor_shape(self, tensor_name: str) -> tf.TensorShape:
        """Returns the sizes of a tensor's dimensions.

        Raises:
          KeyError: there is no such tensor.
        """
        shape = self._tensor(tensor_name).shape
        return tf.TensorShape(shape.to_integer_list) if self._is_mtf else shape

    def get_tensor_num_entries(
        self,
        tensor_name: str,
        partial_layout: Optional[Mapping[str, str]] = None,
        mesh_dimension_to_size: Optional[Mapping[str, int]] = None,
    ) -> int:
        """Returns the number of entries of a tensor on one processor, rounded up.

        Args:
          tensor_name: a string.
          partial_layout: a dictionary from dimension names to mesh dimension names; no splits if
            None.
          mesh_dimension_to_size: a dictionary from mesh dimension names to sizes.

        Raises:
          KeyError: there is no such tensor, or a mesh dimension has no size.
          ValueError: the shape of the tensor is unknown, or a layout is given without sizes.
        """
        shape = self.get_tensor_shape(tensor_name)
        if not shape.is_fully_defined():
            raise ValueError(
                f"the size of tensor {tensor_name!r} is not known: its shape is {shape}. Give "
                "its placeholder or its reshape a full shape"
            )
        entries = shape.num_elements()
        if not partial_layout:
            return entries
        if mesh_dimension_to_size is None:
            raise ValueError("partial_layout was given without mesh_dimension_to_size")
        # Different mesh dimensions split the dimensions of a tensor, so the numbers of parts
        # multiply.
        num_parts = 1
        for name in self.get_tensor_mtf_dimension_names(tensor_name):
            if name in partial_layout:
                num_parts *= self._named(
                    mesh_dimension_to_size, "mesh dimension with a size", partial_layout[name]
                )
        # Rounded up, since a layout to be evaluated may be one that does not divide sizes evenly.
        return -(-entries // num_parts)

    def get_tensor_size(
        self,
        tensor_name: str,
        partial_layout: Optional[Mapping[str, str]] = None,
        mesh_dimension_to_size: Optional[Mapping[str, int]] = None,
    ) -> int:
        """Returns the size of a tensor on one processor in bytes; see `get_tensor_num_entries`."""
        entries = self.get_tensor_num_entries(tensor_name, partial_layout, mesh_dimension_to_size)
        return entries * self.get_tensor_dtype(tensor_name).size

    def get_tensor_device(self, tensor_name: str) -> Optional[str]:
        """Returns the device of a tensor; None in an mtf.Graph.

        Raises:
          KeyError: there is no such tensor.
        """
        tensor = self._tensor(tensor_name)
        return None if self._is_mtf else tensor.device

    def is_tensor_on_canonical_device(self, tensor_name: str) -> bool:
        """Returns whether a tensor is on the canonical device, or has no device.

        Raises:
          KeyError: there is no such tensor.
        """
        device = self.get_tensor_device(tensor_name)
        return not device or device == self.canonical_device

    def get_tensor_mtf_dimension_names(self, tensor_name: str) -> list[str]:
        """Returns the names of a tensor's dimensions; none in a tf.Graph.

        Raises:
          KeyError: there is no such tensor.
        """
        tensor = self._tensor(tensor_name)
        return list(tensor.shape.dimension_names) if self._is_mtf else []

    def set_tensor_final(self, tensor_name: str) -> None:
        """Marks a tensor as an output of the program, which stays in memory until the end.

        Raises:
          KeyError: there is no such tensor.
        """
        # For its error alone, if there is no such tensor.
        self._tensor(tensor_name)
        self._final.add(tensor_name)

    def is_tensor_final(self, tensor_name: str) -> bool:
        """Returns whether a tensor is marked as an output of the program.

        Raises:
          KeyError: there is no such tensor.
        """
        self._tensor(tensor_name)
        return tensor_name in self._final

    # -- the whole graph

    def compute_cost_graph(
        self, devices: Optional[Sequence[str]] = None
    ) -> cost_graph_pb2.CostGraphDef:
        """Returns a CostGraphDef of the graph with the sizes of its tensors.

        Args:
          devices: a list of devices; tensors on other devices get size 0 and no shape. All
            devices if None.
        """
        graph = cost_graph_pb2.CostGraphDef()
        made_by = {
            name: (number, port)
            for number, operation in enumerate(self._operations)
            for port, name in enumerate(self.get_operation_output_names(operation))
        }
        for number, operation in enumerate(self._operations):
            node = graph.node.add(
                name=operation, id=number, device=self.get_operation_device(operation) or ""
            )
            for name in self.get_operation_input_names(operation):
                place, port = made_by[name]
                node.input_info.add(preceding_node=place, preceding_port=port)
            for name in self.get_operation_output_names(operation):
                device = self.get_tensor_device(name)
                # Tensors of an mtf.Graph have the device None, and all count. In a tf.Graph, "" is
                # a device like others, which may be among these.
                counts = devices is None or device is None or device in devices
                node.output_info.add(
                    size=self.get_tensor_size(name) if counts else 0,
                    # No alias: 0 would say that it is the memory of the first input.
                    alias_input_port=-1,
                    dtype=self.get_tensor_dtype(name).as_datatype_enum,
                    shape=self.get_tensor_shape(name).as_proto() if counts else None,
                )
                # A node has one flag for all of its outputs.
                node.is_final |= self.is_tensor_final(name)
        return graph

    def memory_changes(self, schedule: Iterable[int]) -> Iterator[MemoryChange]:
        """Yields the change in memory at each operation of a schedule.

        A tensor is live from the operation that creates it to the last operation that reads it. A
        tensor that is never read is live only while it is created, a final one until the end.

        Args:
          schedule: indices of operations, in execution order.
        """
        names = list(self._operations)
        inputs = [list(self.get_operation_input_names(name)) for name in names]
        outputs = [list(self.get_operation_output_names(name)) for name in names]
        yield from memory_changes(inputs, outputs, self._final, schedule)

    def compute_memory_contents_under_schedule(
        self, schedule: Iterable[int]
    ) -> list[frozenset[str]]:
        """Returns the names of the live tensors during each operation of a schedule.

        Args:
          schedule: indices of operations, in execution order.
        """
        changes = self.memory_changes(schedule)
        return [frozenset(live) for live in live_names(changes)]
