"""Programs that every processor of a SIMD mesh runs, and their collectives.

A `Program` says where operations and variables are placed. `ProgramCollectives` is what collectives
of all programs share; `TfCollectives` are those of CPUs and GPUs, by TensorFlow's operations.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, TypeVar

import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.layout import coordinate_of, processor_groups
from mesh_tensorflow._core.shape import Shape, single_axes
from mesh_tensorflow._mesh.mesh_impl import Reducer
from mesh_tensorflow._mesh.slice_functions import complex_view, constant, real_view

if TYPE_CHECKING:
    from mesh_tensorflow._mesh.replicate import SimdProgram


class Program(abc.ABC):
    """The program of a SimdMeshImpl: where its operations and variables are placed.

    Attributes:
      devices: a device for each processor, by physical number.
      local: physical numbers of the processors that this process runs.
      binds_masters: whether slices may be the only place of a variable's value.
      orders_operations: whether the program supports control dependencies and printing.
      is_compiled: whether XLA compiles it, for one device that stands for all processors.
      has_infeed: whether the inputs of each step come by the infeed of a TPU; otherwise
        `own_tensor` brings them into the program.
    """

    devices: list[str]
    local: list[int]
    binds_masters: bool
    orders_operations: bool
    is_compiled: bool = False
    has_infeed: bool = False

    @abc.abstractmethod
    def outside(self) -> contextlib.AbstractContextManager:
        """Returns a context in which operations are created outside of the program."""

    @abc.abstractmethod
    def at_beginning(self) -> contextlib.AbstractContextManager:
        """Returns a context for the point of the program where variables are read."""

    @abc.abstractmethod
    def make_slice(
        self, name: str, sizes: Sequence[int], dtype: tf.DType, trainable: bool, host: str
    ) -> tf.Variable:
        """Creates the tf variable of one slice, on the current device, initialized to zeros.

        Args:
          name: the name of the tf variable.
          sizes: the shape of the slice.
          dtype: the dtype of the slice.
          trainable: whether it is added to the trainable variables.
          host: the device of the zeros.

        Returns:
          A tf.Variable.
        """

    @abc.abstractmethod
    def own_variable(self, name: str, slices: Mapping[int, tf.Variable]) -> Any:
        """Returns one variable that stands, within the program, for each processor's slice.

        Args:
          name: the name of the mtf variable.
          slices: the tf variables of this process, by physical number.

        Returns:
          What has `read_value`, `assign`, `assign_add` and `assign_sub` of a tf.Variable.
        """

    def own_tensor(self, parts: Sequence[Optional[tf.Tensor]]) -> tf.Tensor:
        """Returns one tensor that stands, within the program, for each processor's part.

        Only of a program without infeed.

        Args:
          parts: tf.Tensors created outside of the program, by physical number, all of one shape;
            those of other processes may be None.
        """
        raise NotImplementedError(f"{type(self).__name__} has no own_tensor")

    @abc.abstractmethod
    def random_key(self, seed: Optional[int]) -> tf.Tensor:
        """Returns a new key for random numbers, the same on all processors.

        Args:
          seed: the seed of the operation, or None.
        """

    @abc.abstractmethod
    def same_everywhere(self, make: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Returns a value that is computed once and is the same on all processors.

        Args:
          make: a function that creates the tf.Tensor.
        """


# -- collectives

_Entry = TypeVar("_Entry", int, bool, Sequence[int])


def numbering(mesh_shape: Shape, logical_to_physical: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns the physical numbers of logical processors, and the logical ones of physical.

    Args:
      mesh_shape: the logical mesh.
      logical_to_physical: the physical number of each logical processor.

    Raises:
      ValueError: `logical_to_physical` is not a permutation.
    """
    permutation = list(logical_to_physical)
    if sorted(permutation) != list(range(mesh_shape.size)):
        raise ValueError(
            f"logical_to_physical must have each of 0 to {mesh_shape.size - 1} once, for the mesh "
            f"{dims_text(mesh_shape)}; got {permutation}"
        )
    l2p = [int(p) for p in permutation]  # topologies have NumPy integers
    # The inverse permutation: p2l[l2p[l]] = l.
    return l2p, [l2p.index(p) for p in range(mesh_shape.size)]


class ProgramCollectives(Reducer[tf.Tensor]):
    """Collectives along the axes of a mesh, as the processor sees them that runs the program."""

    def __init__(self, mesh_shape: Shape, logical_to_physical: Sequence[int]):
        """Creates collectives.

        Args:
          mesh_shape: the logical mesh.
          logical_to_physical: the physical number of each logical processor.

        Raises:
          ValueError: `logical_to_physical` is not a permutation.
        """
        self._shape = mesh_shape
        self._physical, self._logical = numbering(mesh_shape, logical_to_physical)

    @abc.abstractmethod
    def pnum(self) -> tf.Tensor:
        """Returns the logical number of the processor that runs the program, an int32 scalar."""

    @abc.abstractmethod
    def allgather(self, x: tf.Tensor, mesh_axis: int) -> tf.Tensor:
        """Returns the slices of the processors along a mesh axis, stacked by coordinate."""

    def own(self, table: Sequence[_Entry], dtype: tf.DType = tf.int32) -> tf.Tensor:
        """Returns the entry of the processor that runs the program, of a table.

        Args:
          table: an entry for each logical processor.
          dtype: dtype of the result.
        """
        if all(entry == table[0] for entry in table):
            # One value for all needs no processor's number.
            return constant(table[0], dtype)
        return tf.gather(constant(list(table), dtype), self.pnum())

    def coordinates(self, mesh_axis: int) -> list[int]:
        """Returns the coordinate of each logical processor along a mesh axis."""
        numbers = range(self._shape.size)
        return [coordinate_of(self._shape, pnum, mesh_axis) for pnum in numbers]

    def _by_coordinate(
        self, mesh_axis: int, table: Sequence[_Entry], dtype: tf.DType = tf.int32
    ) -> tf.Tensor:
        """Returns the entry of a table for the processor's coordinate along a mesh axis."""
        return self.own([table[c] for c in self.coordinates(mesh_axis)], dtype)

    def _selected(
        self, x: tf.Tensor, mesh_axis: int, sources: Sequence[Optional[int]]
    ) -> tf.Tensor:
        """Returns the slice of a source, which may have several receivers, from all slices."""
        # Whoever is to have zeros takes any slice, which `_or_zeros` replaces.
        senders = [source or 0 for source in sources]
        return tf.gather(self.allgather(x, mesh_axis), self._by_coordinate(mesh_axis, senders))

    def _or_zeros(
        self, y: tf.Tensor, mesh_axis: int, sources: Sequence[Optional[int]]
    ) -> tf.Tensor:
        """Returns a received slice; zeros on processors that have no source."""
        if None not in sources:
            return y
        holds = self._by_coordinate(mesh_axis, [s is not None for s in sources], tf.bool)
        # A selection: a product with 0 would keep a NaN of the processor whose slice came.
        return tf.where(holds, y, tf.zeros_like(y))


# -- collectives of TensorFlow

_MERGE = {"SUM": "Add", "MAX": "Max", "MIN": "Min"}
# What TensorFlow's kernels add up, and what they move. Small integers and booleans travel as int32,
# and unsigned ones, which that cannot tell apart, as int64.
_REDUCED = (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64)
_MOVED = (tf.float32, tf.float64, tf.float16, tf.int32, tf.int64)
# Each collective that is begun has a thread of its own, on each processor. A tf.function lets one
# reduction, gather or alltoall begin after the other, but all sends and receives at once.
# With hundreds of them at once, a step of TensorFlow 2.21 may end in a segmentation fault.
_MOST_EXCHANGES = 8


class TfCollectives(ProgramCollectives):
    """Collectives along the axes of a mesh, by CollectiveReduceV2 and similar operations.

    All processors run one program, so all make the same calls in the same order, and a collective
    may wait for an earlier one without a deadlock. The group of a processor follows from its
    number, by a table in the program.

    No collective has a timeout of its own: TensorFlow would block a thread that long for each,
    even after it is done. The session's timeout stops collectives too.

    Tensors without elements are not communicated: TensorFlow's collectives crash on them.
    """

    def __init__(self, mesh_shape: Shape, program: SimdProgram, physical: Sequence[int]):
        """Creates a TfCollectives.

        Args:
          mesh_shape: the logical mesh.
          program: the SimdProgram that is being traced.
          physical: for each logical processor its physical number.
        """
        super().__init__(mesh_shape, physical)
        self._program = program
        self._group_keys: dict[tuple[int, ...], int] = {}
        # Held weakly, since a tensor keeps the graph of the program in memory.
        self._pnum: Optional[weakref.ref[tf.Tensor]] = None
        # Names of the last exchanges of the program, and of each loop and branch. Graphs are held
        # weakly, and operations, which refer to them, not at all: they are to be freed.
        self._exchanges: weakref.WeakKeyDictionary[tf.Graph, collections.deque[str]] = (
            weakref.WeakKeyDictionary()
        )
        # TensorFlow ranks the members of a group by the names of their devices.
        order = sorted(range(mesh_shape.size), key=lambda l: _rank(program.devices[physical[l]]))
        self._rank = {l: rank for rank, l in enumerate(order)}

    def pnum(self) -> tf.Tensor:
        """Returns the logical number of the processor that runs the program, an int32 scalar."""
        pnum = self._pnum and self._pnum()
        if pnum is None:
            # In the outermost graph, from which loops and conditions capture it.
            with self._program.graph.as_default(), tf.control_dependencies(None):
                pnum = self._program.pnum
                if self._logical != sorted(self._logical):
                    pnum = tf.gather(constant(self._logical), pnum)
            self._pnum = weakref.ref(pnum)
        return pnum

    # -- groups

    def _groups(self, mesh_axes: Sequence[int]) -> list[list[int]]:
        """Returns the groups of logical processors that differ only along some mesh axes."""
        return processor_groups(self._shape, sorted(mesh_axes))

    def _keys(self, mesh_axes: Sequence[int]) -> dict[str, tf.Tensor]:
        """Returns the keys of the group and of a new collective, as TensorFlow's arguments."""
        groups = self._groups(mesh_axes)
        self._program.note_collective()
        # A group keeps its key: TensorFlow finds its members once for all of its collectives.
        axes = tuple(sorted(single_axes(mesh_axes)))
        if axes not in self._group_keys:
            self._group_keys[axes] = self._program.new_keys(len(groups))
        first = self._group_keys[axes]
        # Groups of the same axes have consecutive keys, which a processor looks up by its number.
        table = {pnum: first + i for i, group in enumerate(groups) for pnum in group}
        return {
            "group_size": constant(len(groups[0])),
            "group_key": self.own([table[pnum] for pnum in range(self._shape.size)]),
            "instance_key": constant(self._program.new_keys()),
        }

    def _ranks(self, mesh_axis: int) -> Optional[np.ndarray]:
        """Returns the rank of each member of each processor's group.

        Returns:
          Indexed by processor, then by the member's coordinate; None if all ranks are coordinates.
        """
        table = np.zeros([self._shape.size, self._shape[mesh_axis].size], np.int64)
        for group, by_rank in zip(self._groups([mesh_axis]), self._ranked_groups(mesh_axis)):
            for pnum in group:
                table[pnum] = [by_rank.index(member) for member in group]
        return None if (table == np.arange(table.shape[1])).all() else table

    def _ranked_groups(self, mesh_axis: int) -> list[list[int]]:
        """Returns the groups along a mesh axis, each in the order of TensorFlow's ranks."""
        return [sorted(g, key=lambda pnum: self._rank[pnum]) for g in self._groups([mesh_axis])]

    # -- collectives

    def allreduce(self, x: tf.Tensor, mesh_axes: Sequence[int], reduction: str) -> tf.Tensor:
        """Reduces over the processors that differ only along some mesh axes.

        Args:
          x: this processor's tf.Tensor.
          mesh_axes: mesh axes.
          reduction: "SUM", "MAX" or "MIN".
        """
        if _is_empty(x):
            return x
        dtype, x = x.dtype, real_view(x)
        wide = _reducible(x, reduction)
        y = tf.raw_ops.CollectiveReduceV2(
            input=wide,
            ordering_token=[],
            merge_op=_MERGE[reduction],
            final_op="Id",
            **self._keys(mesh_axes),
        )
        # Collectives give no static shape, and later operations are built by it.
        y.set_shape(x.shape)
        return complex_view(y if wide is x else _reduced(y, x.dtype, reduction), dtype)

    def allgather(self, x: tf.Tensor, mesh_axis: int) -> tf.Tensor:
        """Returns the slices of the processors along a mesh axis, stacked by coordinate."""
        if _is_empty(x):
            return tf.zeros([self._shape[mesh_axis].size, *x.shape], x.dtype)
        moved = _movable(x)
        # TensorFlow concatenates along the first axis: a new one stacks, and scalars, too.
        y = tf.raw_ops.CollectiveGatherV2(
            input=moved[None],
            ordering_token=[],
            **self._keys([mesh_axis]),
        )
        y.set_shape([self._shape[mesh_axis].size, *moved.shape])
        ranks = self._ranks(mesh_axis)
        if ranks is not None:
            # From the order of TensorFlow's ranks to that of coordinates.
            y = tf.gather(y, tf.gather(constant(ranks.tolist()), self.pnum()))
        return _moved(y, x.dtype)

    def alltoall(
        self, x: tf.Tensor, mesh_axis: int, split_axis: int, concat_axis: int
    ) -> tf.Tensor:
        """Sends part i along `split_axis` to processor i; concatenates along `concat_axis`."""
        n = self._shape[mesh_axis].size
        if _is_empty(x):
            # Without elements only the shape counts, which is that of the exchange.
            return tf.concat(tf.split(x, n, split_axis), concat_axis)
        parts = tf.stack(tf.split(_movable(x), n, split_axis))
        ranks = self._ranks(mesh_axis)
        if ranks is not None:  # TensorFlow sends part r to the member of rank r
            # ranks[c] is the rank of the member at coordinate c; the inverse gives the coordinate.
            inverse = np.argsort(ranks, axis=1)
            parts = tf.gather(parts, tf.gather(constant(inverse.tolist()), self.pnum()))
        y = tf.raw_ops.CollectiveAllToAllV2(
            input=parts,
            ordering_token=[],
            **self._keys([mesh_axis]),
        )
        y.set_shape(parts.shape)
        if ranks is not None:
            y = tf.gather(y, tf.gather(constant(ranks.tolist()), self.pnum()))
        return _moved(tf.concat(tf.unstack(y), concat_axis), x.dtype)

    def permute(
        self, x: tf.Tensor, mesh_axis: int, source_pcoord: Sequence[Optional[int]]
    ) -> tf.Tensor:
        """Returns the slice of the processor with another coordinate along a mesh axis, or zeros.

        Slices go from sender to receiver only, if each has at most one receiver.

        Args:
          x: this processor's tf.Tensor.
          mesh_axis: a mesh axis.
          source_pcoord: for each coordinate along the axis the source's coordinate, or None.
        """
        if _is_empty(x):
            return x
        cycle = _without_fixed_points(source_pcoord)
        # A send has one receiver, another processor: what several or the sender itself are to
        # have needs a gather.
        if cycle is None:
            y = self._selected(x, mesh_axis, source_pcoord)
        else:
            y = self._exchange(x, mesh_axis, cycle)
        return self._or_zeros(y, mesh_axis, source_pcoord)

    def _exchange(self, x: tf.Tensor, mesh_axis: int, sources: Sequence[int]) -> tf.Tensor:
        """Sends from each processor to one other; `sources` has each receiver's source."""
        senders = [0] * self._shape.size
        for group in self._groups([mesh_axis]):
            for coordinate, pnum in enumerate(group):
                senders[pnum] = group[sources[coordinate]]
        self._program.note_collective()
        # A send to one processor is a broadcast in a group of two, which has the key of its sender.
        first = self._program.new_keys(self._shape.size)  # the group of a sender and its receiver
        instance = constant(self._program.new_keys())
        moved = _movable(x)
        size, shape = constant(2), constant(moved.shape.as_list())
        to_group = self.pnum() + constant(first)
        from_group = self.own([first + sender for sender in senders])
        graph = tf.get_default_graph()
        last = self._exchanges.setdefault(graph, collections.deque(maxlen=_MOST_EXCHANGES))
        full = len(last) == _MOST_EXCHANGES
        # Without a deadlock: all processors make the same exchanges, and none needs a later one.
        with tf.control_dependencies([graph.get_operation_by_name(last[0])] if full else []):
            sent = tf.raw_ops.CollectiveBcastSendV2(
                input=moved, group_size=size, instance_key=instance, group_key=to_group
            )
            y = tf.raw_ops.CollectiveBcastRecvV2(
                group_size=size,
                instance_key=instance,
                T=moved.dtype,
                group_key=from_group,
                shape=shape,
            )
        with tf.control_dependencies([sent]):  # else nothing would run the send
            y = tf.identity(y)
        last.append(y.op.name)
        y.set_shape(moved.shape)
        return _moved(y, x.dtype)


def _without_fixed_points(sources: Sequence[Optional[int]]) -> Optional[list[int]]:
    """Completes a table of sources to a permutation without fixed points.

    Returns:
      The table; None if a source occurs twice or is its own receiver.
    """
    named = [s for s in sources if s is not None]
    if len(set(named)) < len(named) or any(c == s for c, s in enumerate(sources)):
        return None
    # All processors run one program, so each must send and receive. One that is to have zeros gets
    # a slice that nobody else takes; `permute` replaces it by zeros.
    free = [s for s in range(len(sources)) if s not in named]
    open_places = [c for c, s in enumerate(sources) if s is None]
    # As many sources are free as places are open. Any rotation that leaves none in place will do.
    for turn in range(len(free) or 1):
        filled = free[turn:] + free[:turn]
        if all(c != s for c, s in zip(open_places, filled)):
            table = dict(zip(open_places, filled))
            return [table.get(c, s) for c, s in enumerate(sources)]
    return None


def _is_empty(x: tf.Tensor) -> bool:
    return x.shape.num_elements() == 0


def _reducible(x: tf.Tensor, reduction: str) -> tf.Tensor:
    """Converts to a dtype that collectives can reduce; `_reduced` converts back."""
    if x.dtype == tf.uint64:
        return tf.bitcast(_in_order(x, reduction), tf.int64)
    wide = tf.int64 if x.dtype == tf.uint32 else tf.int32
    return x if x.dtype in _REDUCED else tf.cast(x, wide)


def _reduced(y: tf.Tensor, dtype: tf.DType, reduction: str) -> tf.Tensor:
    """Undoes `_reducible`."""
    if dtype == tf.uint64:
        return _in_order(tf.bitcast(y, dtype), reduction)
    return tf.cast(y, dtype)


def _in_order(x: tf.Tensor, reduction: str) -> tf.Tensor:
    """Exchanges the two halves of uint64, whose upper one is negative as int64, to compare them."""
    # Sums are the same modulo 2**64.
    return x if reduction == "SUM" else tf.bitwise.bitwise_xor(x, np.uint64(2**63))


def _movable(x: tf.Tensor) -> tf.Tensor:
    """Converts to a dtype that collectives can move; `_moved` converts back."""
    if x.dtype == tf.bfloat16:
        # The collectives do not move bfloat16; a value that is only moved may have any dtype of its
        # size.
        return tf.bitcast(x, tf.float16)
    x = real_view(x)
    if x.dtype == tf.uint64:
        return tf.bitcast(x, tf.int64)
    return x if x.dtype in _MOVED else tf.cast(x, tf.int32)


def _moved(y: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Undoes `_movable`."""
    if dtype in (tf.bfloat16, tf.uint64):
        return tf.bitcast(y, dtype)
    if dtype.is_complex:
        return complex_view(y, dtype)
    return y if y.dtype == dtype else tf.cast(y, dtype)


def _rank(device: str) -> tuple[str, int]:
    """Returns the key by which TensorFlow sorts devices; it compares task numbers as strings."""
    spec = tf.DeviceSpec.from_string(device or "")
    job = spec.job or "localhost"
    task = f"/job:{job}/replica:{spec.replica or 0}/task:{spec.task or 0}/{spec.device_type}"
    return task, spec.device_index or 0
