"""PlacementMeshImpl: every processor of the mesh is a TensorFlow device.

Sums and exchanges between devices are rings of copies, or TensorFlow's collectives. In a sum by
copies, values travel around a ring of the devices in both directions, so that each link carries
about the same amount. Bandwidth-optimal ring reduction: Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations" (JPDC 2009).
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import check_choice, dims_text
from mesh_tensorflow._core.layout import (
    LayoutLike,
    coordinate_of,
    given_stored_layout,
    processor_groups,
)
from mesh_tensorflow._core.operation import LaidOutLike, Tensor
from mesh_tensorflow._core.shape import Shape, ShapeLike, single_axes
from mesh_tensorflow._mesh import random_values
from mesh_tensorflow._mesh.devices import (
    DeviceLike,
    absent_devices,
    are_whole_gpus,
    check_devices,
    check_devices_exist,
    check_distinct_devices,
    check_rules,
    default_devices,
    devices_text,
    is_compiled_whole,
    memory_domain,
    merged_processors,
    soft_placement,
)
from mesh_tensorflow._mesh.mesh_impl import (
    ExecutedMeshImpl,
    LaidOutTensor,
    MeshImpl,
    MeshPair,
    Reducer,
    convert_args_to_laid_out_tensors,
    named_collective,
)
from mesh_tensorflow._mesh.slice_functions import (
    at_device,
    binary_reduction_fn,
    complex_view,
    contract,
    read_here,
    real_view,
)
from mesh_tensorflow._mesh.variables.storage import SliceVariables
from mesh_tensorflow._quiet import not_advised
from mesh_tensorflow._replaced import replaceable

if TYPE_CHECKING:
    from mesh_tensorflow.ops._variable import Variable

__all__ = [
    "PlacementMeshImpl",
    "allconcat_ring",
    "allreduce_ring",
    "allreduce_ring_single_shard",
    "alltoall_pointtwise",
    "alltoall_ring",
]


# -- sums and exchanges of tensors on several devices

_MIN_ELEMENTS_TO_SHARD = 1024


def _check(xs: Sequence[tf.Tensor], devices: Sequence[str], what: str) -> None:
    if len(xs) != len(devices) or not xs:
        raise ValueError(
            f"{what}: needs one tensor for each device, got {len(xs)} tensors for "
            f"{len(devices)} devices"
        )


def allreduce_ring_single_shard(
    xs: Sequence[tf.Tensor], devices: Sequence[str], reduction_fn_string: str = "SUM"
) -> list[tf.Tensor]:
    """Reduces tensors from both ends of a line to its middle, and broadcasts the result.

    Args:
      xs: tf.Tensors of one shape, one for each device.
      devices: device strings.
      reduction_fn_string: "SUM", "MAX" or "MIN".

    Returns:
      The reduced value on each device.
    """
    _check(xs, devices, "allreduce_ring_single_shard")
    reduce_fn = binary_reduction_fn(reduction_fn_string)
    n = len(xs)
    middle = n // 2
    # From both ends at once, in half as many steps as from one. The order of additions is fixed, so
    # that results are the same in each run.
    left = xs[0]
    for i in range(1, middle + 1):
        with tf.device(devices[i]):
            left = reduce_fn(left, xs[i])
    total = left
    # Of two devices the second is the middle, and nothing comes from the right.
    if n > middle + 1:
        right = xs[n - 1]
        for i in range(n - 2, middle, -1):
            with tf.device(devices[i]):
                right = reduce_fn(right, xs[i])
        with tf.device(devices[middle]):
            total = reduce_fn(left, right)
    return _send_out(total, devices, middle)


def _send_out(x: tf.Tensor, devices: Sequence[str], origin: int) -> list[tf.Tensor]:
    """Copies a tensor from device `origin` to all, each device from its neighbor."""
    copies = [x] * len(devices)
    for step in (-1, 1):
        i = origin + step
        while 0 <= i < len(devices):
            with tf.device(devices[i]):
                # Of the neighbor's copy, so that each link of the line carries the value once.
                copies[i] = tf.identity(copies[i - step])
            i += step
    return copies


def allreduce_ring(
    xs: Sequence[tf.Tensor], devices: Sequence[str], reduction_fn_string: str = "SUM"
) -> list[tf.Tensor]:
    """Reduces tensors over devices; large ones in as many shards as there are devices.

    Args:
      xs: tf.Tensors of one shape, one for each device.
      devices: device strings.
      reduction_fn_string: "SUM", "MAX" or "MIN".

    Returns:
      The reduced value on each device.
    """
    _check(xs, devices, "allreduce_ring")
    n, sizes = len(xs), xs[0].shape.as_list()
    elements = xs[0].shape.num_elements()
    if n == 1:
        return list(xs)
    # A small tensor in shards takes more copies than it has work, and tf.split needs equal parts.
    if elements is None or elements < _MIN_ELEMENTS_TO_SHARD or elements % n:
        return allreduce_ring_single_shard(xs, devices, reduction_fn_string)
    shards_of = []
    for x, device in zip(xs, devices):
        with tf.device(device):
            shards_of.append(tf.split(tf.reshape(x, [-1]), n))
    reduced: list[list[tf.Tensor]] = [[] for _ in range(n)]
    for shard in range(n):
        # Each shard is reduced on another device.
        order = [(i + shard) % n for i in range(n)]
        result = allreduce_ring_single_shard(
            [shards_of[i][shard] for i in order], [devices[i] for i in order], reduction_fn_string
        )
        for i, value in zip(order, result):
            # Each device gets the shards in their order, and so can concatenate them.
            reduced[i].append(value)
    out = []
    for pieces, device in zip(reduced, devices):
        with tf.device(device):
            out.append(tf.reshape(tf.concat(pieces, 0), sizes))
    return out


def _ring_copies(x: tf.Tensor, devices: Sequence[str], origin: int) -> list[tf.Tensor]:
    """Copies a tensor from device `origin` to all, in both directions around the ring."""
    n = len(devices)
    copies = [x] * n
    # Together n - 1 hops: each device gets one copy, on the shorter way around.
    for step, hops in ((1, n // 2), (-1, (n - 1) // 2)):
        value = x
        for hop in range(1, hops + 1):
            i = (origin + step * hop) % n
            with tf.device(devices[i]):
                value = tf.identity(value)
            copies[i] = value
    return copies


def allconcat_ring(
    xs: Sequence[tf.Tensor], devices: Sequence[str], concat_axis: int
) -> list[tf.Tensor]:
    """Concatenates tensors along an axis, on each device.

    Args:
      xs: tf.Tensors, one for each device.
      devices: device strings.
      concat_axis: an axis.

    Returns:
      The concatenated value on each device.
    """
    _check(xs, devices, "allconcat_ring")
    # In the order of origins, that of the whole tensor, whatever way each copy took.
    copies = [_ring_copies(x, devices, i) for i, x in enumerate(xs)]
    return _joined(zip(*copies), devices, concat_axis)


def _split_all(
    xs: Sequence[tf.Tensor], devices: Sequence[str], split_axis: int
) -> list[list[tf.Tensor]]:
    split = []
    for x, device in zip(xs, devices):
        with tf.device(device):
            split.append(tf.split(x, len(xs), split_axis))
    return split


def _joined(
    parts: Iterable[Sequence[tf.Tensor]], devices: Sequence[str], concat_axis: int
) -> list[tf.Tensor]:
    """Returns the concatenation of the parts that each device has."""
    out = []
    for of_device, device in zip(parts, devices):
        with tf.device(device):
            out.append(tf.concat(list(of_device), concat_axis))
    return out


def alltoall_pointtwise(
    xs: Sequence[tf.Tensor], devices: Sequence[str], split_axis: int, concat_axis: int
) -> list[tf.Tensor]:
    """Sends part i of each tensor directly to device i, and concatenates the received parts.

    Args:
      xs: tf.Tensors, one for each device.
      devices: device strings.
      split_axis: the axis along which tensors are split.
      concat_axis: the axis along which parts are concatenated.

    Returns:
      A list of tf.Tensors.
    """
    _check(xs, devices, "alltoall_pointtwise")
    return _joined(zip(*_split_all(xs, devices, split_axis)), devices, concat_axis)


def alltoall_ring(
    xs: Sequence[tf.Tensor], devices: Sequence[str], split_axis: int, concat_axis: int
) -> list[tf.Tensor]:
    """Like alltoall_pointtwise, with parts sent in both directions around the ring.

    The parts for all devices in one direction are sent together; each device keeps its own.

    Args:
      xs: tf.Tensors, one for each device.
      devices: device strings.
      split_axis: the axis along which tensors are split.
      concat_axis: the axis along which parts are concatenated.

    Returns:
      A list of tf.Tensors.
    """
    _check(xs, devices, "alltoall_ring")
    n = len(xs)
    parts = _split_all(xs, devices, split_axis)
    received: list[list] = [[None] * n for _ in range(n)]
    for source in range(n):
        received[source][source] = parts[source][source]
        for step, hops in ((1, n // 2), (-1, (n - 1) // 2)):
            route = [(source + step * hop) % n for hop in range(1, hops + 1)]
            # A part travels in as many loads as its receiver is hops away, each shorter by one.
            load = [parts[source][i] for i in route]
            for i in route:
                with tf.device(devices[i]):
                    load = [tf.identity(t) for t in load]
                # The first part of the load is for this device; the rest goes on to the next.
                received[i][source] = load.pop(0)
    return _joined(received, devices, concat_axis)


_IN_ANY_PLACE = 'give PlacementMeshImpl allreduce="ring"'
_MERGE_OPS = {"SUM": "Add", "MAX": "Max", "MIN": "Min"}

# TensorFlow's runtime identifies groups and instances of collectives by process-wide numbers.
_group_keys: dict[tuple[str, ...], int] = {}
# Above all groups of SIMD programs, which may be in one session with these.
_FIRST_GROUP = 3 * 2**29
# Shared without the lock below: to take a number of a count is one step for Python's threads.
_instance_keys = itertools.count(1)
_counting = threading.Lock()


def reduce_here(xs: Sequence[tf.Tensor], reduction: str) -> tf.Tensor:
    """Reduces tensors that are in one memory domain."""
    if len(xs) == 1:
        return xs[0]
    if reduction == "SUM":
        # One pass over all of them, without partial sums in memory.
        return tf.add_n(xs)
    fn = binary_reduction_fn(reduction)
    total = xs[0]
    for x in xs[1:]:
        # max(x, x) = x, and equal slices of one memory are one tensor.
        if x is not total:
            total = fn(total, x)
    return total


def group_key(devices: Sequence[str]) -> int:
    """Returns the unique number of a group of devices."""
    with _counting:
        # The same devices are one group for TensorFlow, in whatever order they are named.
        number = _FIRST_GROUP + len(_group_keys)
        return _group_keys.setdefault(tuple(sorted(devices)), number)


def _checked(devices: Sequence[str]) -> list[tf.Operation]:
    """Checks that devices are there, each by itself; returns what checks it in a session."""
    in_session = not tf.executing_eagerly_outside_functions()
    absent, existing = absent_devices(devices, in_session)
    if absent:
        raise ValueError(
            f"collectives between {', '.join(devices)} would wait forever: this process has no "
            f"device {', '.join(map(repr, absent))}. It has "
            f"{devices_text(existing)}. Name these, or {_IN_ANY_PLACE}"
        )
    # Only a session may place them elsewhere; eager code has the devices that it lists.
    return [check_distinct_devices(devices, _IN_ANY_PLACE)] if in_session else []


def allreduce_collective(
    xs: Sequence[tf.Tensor], devices: Sequence[str], reduction_fn_string: str = "SUM"
) -> list[tf.Tensor]:
    """Reduces tensors over devices with TensorFlow's collective operations.

    Fetching one result runs the whole group, because a single member would wait for the others.

    Args:
      xs: tf.Tensors of one shape, one for each device.
      devices: device strings, all different.
      reduction_fn_string: "SUM", "MAX" or "MIN".

    Returns:
      The reduced value on each device.

    Raises:
      ValueError: this process lacks a device.
    """
    check_choice("allreduce_collective", "reduction_fn_string", reduction_fn_string, _MERGE_OPS)
    before = _checked(devices)
    # Each call has a new instance: the members of a group find each other by that number.
    group, instance_key = group_key(devices), next(_instance_keys)
    reduced = []
    for x, device in zip(xs, devices):
        with tf.device(device), tf.control_dependencies(before):
            reduced.append(
                tf.raw_ops.CollectiveReduceV2(
                    input=real_view(x),
                    group_size=len(xs),
                    group_key=group,
                    instance_key=instance_key,
                    ordering_token=[],
                    merge_op=_MERGE_OPS[reduction_fn_string],
                    final_op="Id",
                    communication_hint="auto",
                    # No time limit: for each, TensorFlow would use a thread that sleeps that long.
                    # What would never end is found before.
                )
            )
    out = []
    for x, value, device in zip(xs, reduced, devices):
        with tf.device(device), tf.control_dependencies(reduced):
            out.append(complex_view(tf.identity(value), x.dtype))
    return out


# -- tensors, variables and sums


class PlacedTensor(LaidOutTensor):
    """A tf.Tensor for each processor, in order of processor number.

    Attributes:
      tensor_shape: the Shape of the whole tensor, or None if it is unknown.
    """

    def __init__(self, tensor_list: Sequence[Any], tensor_shape: Optional[Shape] = None):
        """Creates a PlacedTensor.

        Args:
          tensor_list: a tf.Tensor for each processor.
          tensor_shape: the Shape of the whole tensor, or None if it is unknown.
        """
        super().__init__(tensor_list)
        self.tensor_shape = tensor_shape

    def of_shape(self, tensor_shape: Shape) -> PlacedTensor:
        """Returns the same slices with the Shape of the whole tensor."""
        return PlacedTensor(self._tensor_list, tensor_shape)


class PlacedVariable(SliceVariables):
    """The slice variables of a Variable, and copies to and from its master.

    Equal slices in one memory domain are one tf variable. Each is read once, before any assignment
    to it. If a variable has only one slice, with the master's memory domain and dtype, the slice is
    the master.
    """

    def __init__(self, variable: Variable, mesh_impl: PlacementMeshImpl):
        """Creates the slice variables.

        Args:
          variable: a Variable operation.
          mesh_impl: a PlacementMeshImpl.
        """
        self._variable = variable
        self.mesh_impl = mesh_impl
        self.owner = mesh_impl.owners(variable.stored_shape)
        if variable.store is not None:
            self.slices = variable.store.slices(variable, mesh_impl, self.owner)
        elif self.slice_is_master:
            self.slices = dict.fromkeys(self.owner, variable.tf_master)
        else:
            self.slices = self._make_slices()
        # After the slices, to which it binds the masters.
        super().__init__(variable)
        # Made before the program assigns anything, since every assignment waits for its read.
        self._reads = {pnum: _read_once(slice_var) for pnum, slice_var in self.slices.items()}

    @property
    def slice_is_master(self) -> bool:
        """Whether the only slice is the master itself."""
        if len(set(self.owner)) != 1 or not self._may_be_master():
            return False
        device = self.mesh_impl.devices[self.owner[0]]
        return self.mesh_impl.same_memory(self._variable.master_device, device)

    def _make_slices(self) -> dict[int, Any]:
        sizes = self.mesh_impl.slice_shape(self._variable.stored_shape)
        slices = {}
        for pnum in sorted(set(self.owner)):
            with tf.device(self.mesh_impl.devices[pnum]):
                slices[pnum] = self._new_slice(pnum, sizes)
        return slices


def _read_once(slice_var: tf.Variable) -> tf.Tensor:
    """Returns the tensor by which a graph reads a variable; in a function, a new read."""
    if tf.executing_eagerly_outside_functions():
        with tf.device(slice_var.device):
            return slice_var.value()
    # In a graph of TensorFlow 1 that is the read which was made with the variable, so all parts of
    # a step have the value of one moment.
    return slice_var.graph.as_graph_element(slice_var)


class PlacedReducer(Reducer[Sequence[tf.Tensor]]):
    """Reduces slices that are placed on devices.

    Members of a group in one memory domain are reduced on one device, in one operation; the results
    of several domains are then reduced by a ring of copies or by TensorFlow's collectives.
    """

    def __init__(
        self, mesh_shape: Shape, devices: Sequence[str], domains: Sequence[str], method: str
    ):
        """Creates a PlacedReducer.

        Args:
          mesh_shape: shape of the mesh.
          devices: device strings, one for each processor.
          domains: the name of each processor's memory domain.
          method: "ring", "collective", or "auto" for collectives between GPUs that are there, and
            rings otherwise.
        """
        across = {"ring": allreduce_ring, "collective": allreduce_collective, "auto": None}
        check_choice("PlacementMeshImpl", "allreduce", method, across)
        self._across = across[method]
        self._mesh_shape = mesh_shape
        self._devices = devices
        self._domains = domains

    def allreduce(
        self, x: Sequence[tf.Tensor], mesh_axes: Sequence[int], reduction: str
    ) -> list[tf.Tensor]:
        """Reduces over the processors that differ along mesh axes.

        Args:
          x: a tf.Tensor for each processor.
          mesh_axes: the mesh axes to reduce over.
          reduction: "SUM", "MAX" or "MIN".

        Returns:
          The reduced value for each processor.
        """
        return self._by_group(x, mesh_axes, lambda group: self._reduce_group(x, group, reduction))

    def _by_group(
        self,
        x: Sequence[tf.Tensor],
        mesh_axes: Sequence[int],
        reduce_group: Callable[[Sequence[int]], Sequence[tf.Tensor]],
    ) -> list[tf.Tensor]:
        """Returns the value of each processor, given a function of groups that has their values.

        Groups of the same memory domains and the same tensors are reduced once.
        """
        out: list[Any] = [None] * len(x)
        # By ids of tensors, which `x` holds until all groups are done.
        done: dict[tuple, Sequence[tf.Tensor]] = {}
        for group in processor_groups(self._mesh_shape, mesh_axes):
            key = tuple((self._domains[p], id(x[p])) for p in group)
            if key not in done:
                done[key] = reduce_group(group)
            for p, value in zip(group, done[key]):
                out[p] = value
        return out

    def _reduce_group(
        self, slices: Sequence[tf.Tensor], group: Sequence[int], reduction: str
    ) -> list[tf.Tensor]:
        """Returns the reduced value of each member of a group."""
        # In memory first, so that only one value of each domain travels.
        leaders, reduced = self._reduced_in_memory(slices, group, reduction)
        if len(reduced) > 1:
            devices = list(leaders.values())
            across = self._across
            if across is None:
                # Asked of each group, as one mesh may have groups of GPUs and of CPUs.
                across = allreduce_collective if are_whole_gpus(devices) else allreduce_ring
            reduced = across(reduced, devices, reduction)
        by_domain = dict(zip(leaders, reduced))
        return [by_domain[self._domains[p]] for p in group]

    def _reduced_in_memory(
        self, slices: Sequence[tf.Tensor], group: Sequence[int], reduction: str
    ) -> tuple[dict[str, str], list[tf.Tensor]]:
        """Reduces the slices of each memory domain of a group.

        Returns:
          The device of each domain, and the reduced value there.
        """
        members: dict[str, list[int]] = {}
        for p in group:
            members.setdefault(self._domains[p], []).append(p)
        # Domains come in one order here and in the list of values: callers zip them.
        leaders = {domain: self._devices[ps[0]] for domain, ps in members.items()}
        partial = []
        for domain, ps in members.items():
            with tf.device(leaders[domain]):
                partial.append(reduce_here([slices[p] for p in ps], reduction))
        return leaders, partial

    def reduce_scatter(
        self, x: Sequence[tf.Tensor], mesh_axis: int, split_axis: int
    ) -> list[tf.Tensor]:
        """Sums over the processors along a mesh axis, of which each keeps its own part.

        Memory domains send each other the parts that are needed there, and nothing else.

        Args:
          x: a tf.Tensor for each processor.
          mesh_axis: the mesh axis to sum over.
          split_axis: the axis of the slices to split.

        Returns:
          The part of each processor.
        """
        if self._mesh_shape[mesh_axis].size == 1:
            return list(x)
        return self._by_group(
            x, [mesh_axis], lambda group: self._scatter_group(x, group, split_axis)
        )

    def _scatter_group(
        self, slices: Sequence[tf.Tensor], group: Sequence[int], split_axis: int
    ) -> list[tf.Tensor]:
        """Returns the part of the sum of each member of a group."""
        leaders, partial = self._reduced_in_memory(slices, group, "SUM")
        columns = []
        for value, device in zip(partial, leaders.values()):
            with tf.device(device):
                # Cut where it was summed, so that only the parts that are needed elsewhere travel.
                columns.append(tf.split(value, len(group), split_axis))
        sums = []
        # From a row of parts for each domain to a row of summands for each member.
        for p, column in zip(group, zip(*columns)):
            with tf.device(self._devices[p]):
                sums.append(reduce_here(column, "SUM"))
        return sums


# -- the mesh


class PlacementMeshImpl(MeshImpl[PlacedTensor]):
    """A mesh of TensorFlow devices; slices are separate tensors, each on its device.

    Devices in one memory domain (the CPU devices of one process, or one device named several
    times) share equal slices: a value that is replicated over them is computed once, a replicated
    variable is stored once, and a sum over them is computed once.

    Attributes:
      copy_master_to_slice_ops: the tf operations that copy masters to slices, in order.
      merges_devices: whether processors on one device may be merged; False in other subclasses.
    """

    merges_devices = True
    takes_random_keys = True
    LaidOutTensor = PlacedTensor
    LaidOutVariable = PlacedVariable

    def __init__(
        self,
        shape: ShapeLike,
        layout: LayoutLike,
        devices: Optional[Sequence[DeviceLike]] = None,
        strict_layout: bool = False,
        allreduce: str = "auto",
        merge: str = "device",
        variable_layout: Optional[LayoutLike] = None,
        zero: Optional[int] = None,
        zero_axis: Optional[str] = None,
        uneven: bool = False,
    ):
        """Creates a PlacementMeshImpl.

        Args:
          shape: the mesh shape; a Shape, or what converts to one, such as "rows:2,cols:2".
          layout: LayoutRules, or what converts to them, such as "batch:rows,d_ff:cols".
          devices: a list of device strings or tf.DeviceSpecs, one for each processor in row-major
            order; "" leaves the choice to TensorFlow. If None, the GPUs of the process, or its
            logical CPUs if it has none.
          strict_layout: whether a rule for a mesh dimension that the mesh does not have is an
            error. By default it is ignored, so that one layout works for several meshes.
          allreduce: the algorithm for sums over several memory domains: "ring" of copies,
            "collective" (TensorFlow's collectives, NCCL on GPUs), or "auto": collectives between
            GPUs, unless this process lacks some of them, and rings elsewhere.
          merge: which processors along a mesh dimension are merged, so that no tensors are split
            over them: those on one "device", those that share "memory", or "none". Results,
            counters and checks are those of the requested mesh.
          variable_layout: rules by which variables are stored in parts, such as "d_model:rows".
          zero: the stage of ZeRO: 1 or 2 to store optimizers' slots in parts, 3 for weights too.
          zero_axis: the mesh dimension of ZeRO, or several joined by "+"; that of a mesh with just
            one if None.
          uneven: whether all rules allow sizes that the mesh does not divide, as those do that end
            in "?", such as "vocab:cols?".

        Raises:
          ValueError: the number of devices is wrong, `allreduce` or `merge` is unknown, or, with
            `strict_layout`, a mesh dimension is unknown.
          TypeError: `devices` is not a list.
        """
        super().__init__(shape, layout, uneven)
        self.stored_layout = given_stored_layout(self.shape, variable_layout, zero, zero_axis)
        if strict_layout:
            check_rules(self.layout_rules, self.shape)
        self._devices: Any = default_devices() if devices is None else devices
        check_devices(self._devices, self.shape)
        self._domains = [memory_domain(device) for device in self._devices]
        places = {"device": self._devices, "memory": self._domains, "none": None}
        check_choice("PlacementMeshImpl", "merge", merge, places)
        self._places = places[merge]
        self._allreduce = allreduce
        self._reducer = PlacedReducer(self.shape, self._devices, self._domains, allreduce)
        self.copy_master_to_slice_ops: list[tf.Operation] = []
        self._groups_along: dict[int, list[list[int]]] = {}

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        # A subclass may override methods that a merged mesh would not call.
        cls.merges_devices = vars(cls).get("merges_devices", False)

    def check_processors(self) -> None:
        """Checks that this process has the devices, if this is a TensorFlow 2 program.

        A TensorFlow 1 session has devices of its own, and checks them itself.

        Raises:
          ValueError: it lacks some, and there is no soft placement, or slips are errors.
        """
        if tf.executing_eagerly_outside_functions():
            soft = soft_placement(default=True)
            check_devices_exist(self._devices, soft, in_session=False, who="PlacementMeshImpl")

    @property
    def is_compiled_by_xla(self) -> bool:  # type: ignore[override]
        """Whether XLA compiles the whole function."""
        return is_compiled_whole()

    @functools.cached_property
    def execution_impl(self) -> MeshImpl:
        """The executed mesh, with the processors on one device merged."""
        if self._places is None or not self.merges_devices:
            return self
        # On one device, parts of a tensor only make matrix products smaller and more numerous.
        shape, owners = merged_processors(self.shape, self._places)
        if shape == self.shape:
            return self
        devices = [self._devices[p] for p in owners]
        # What remains at one place cannot be merged along a dimension.
        return _MergedMeshImpl(
            self, shape, devices=devices, allreduce=self._allreduce, merge="none"
        )

    @property
    def devices(self) -> list[DeviceLike]:
        """The devices as they were given, in order of processor number."""
        return self._devices

    @property
    def domains(self) -> list[str]:
        """The name of the memory domain of each processor."""
        return self._domains

    def same_memory(self, device1: str, device2: str) -> bool:
        """Whether two devices are in one memory domain."""
        return memory_domain(device1) == memory_domain(device2)

    # -- computation

    def slicewise(self, fn: Callable, *inputs: object) -> Any:
        """Calls `fn` on each processor with that processor's slices; see MeshImpl.

        Processors in one memory domain that have the same slices share the result.
        """
        inputs = tuple(convert_args_to_laid_out_tensors(inputs))
        # The columns hold the arguments until the end, so that no id in a key is used again.
        columns = [
            self._slices_of(x) if isinstance(x, PlacedTensor) else [x] * self.size for x in inputs
        ]
        shared: dict[tuple, Any] = {}
        results = []
        for pnum, device in enumerate(self._devices):
            arguments = [column[pnum] for column in columns]
            # By identity: equal slices of one memory domain are one tensor, and so is what is
            # computed of them.
            key = (self._domains[pnum], *map(id, arguments))
            if key not in shared:
                with tf.device(device), at_device(device):
                    shared[key] = fn(*map(read_here, arguments))
            results.append(shared[key])
        if isinstance(results[0], tuple):
            return tuple(PlacedTensor(column) for column in zip(*results))
        return PlacedTensor(results)

    def _slices_of(self, value: LaidOutLike) -> list[Any]:
        """Returns a slice for each processor, even if the value has those of the merged mesh."""
        x: Any = value.to_laid_out_tensor()
        # A value of the merged mesh has fewer slices than this one, which would not be merged else.
        if len(x.tensor_list) == self.size:
            return x.tensor_list
        if x.tensor_shape is None:
            raise ValueError(
                f"a laid-out value has {len(x.tensor_list)} slices, but the mesh "
                f"{dims_text(self.shape)} has {self.size} processors. Processors on one device "
                'are merged; make the mesh with merge="none" to have a slice for each, or use '
                "lowering.mesh_impl(mesh), which fits what the Lowering holds"
            )
        return MeshPair.of(self, True).requested_slices(x.tensor_list, x.tensor_shape)

    def einsum(self, equation: str, *slices: tf.Tensor) -> tf.Tensor:
        """Contracts slices on one processor, with the kernel that is fastest on CPUs."""
        return contract(equation, *slices)

    def Print(
        self, x: PlacedTensor, data: Sequence[PlacedTensor], message: str, **kwargs: object
    ) -> PlacedTensor:
        """Returns `x`, and prints the first slices of `data` when it is computed.

        Where XLA compiles the whole function, it cannot print.

        Args:
          x: a LaidOutTensor.
          data: a list of LaidOutTensors.
          message: a string.
          **kwargs: `summarize`, `first_n` and `name` of tf.Print.
        """
        if is_compiled_whole():
            return super().Print(x, data, message, **kwargs)
        x = x.to_laid_out_tensor()
        shown = [d.to_laid_out_tensor().tensor_list[0] for d in data]
        with tf.device(self._devices[0]), not_advised():
            first = tf.Print(x.tensor_list[0], shown, message, **kwargs)
        # For all that share the slice: what others compute of it would not run the print otherwise.
        return PlacedTensor([first if t is x.tensor_list[0] else t for t in x.tensor_list])

    def random(self, shape: Shape, tf_fn: Callable, kwargs: dict[str, Any]) -> PlacedTensor:
        """Returns a laid-out random tensor; its value depends on the seed, not on the layout.

        Args:
          shape: a Shape.
          tf_fn: tf.random.uniform, .normal or .truncated_normal, for which each processor generates
            its own slice; any other function is called once, for the whole tensor.
          kwargs: keyword arguments of `tf_fn`, including `seed`; or `key`, from
            random_values.new_key, instead of the seed.
        """
        kwargs = dict(kwargs)
        seed, key = kwargs.pop("seed", None), kwargs.pop("key", None)
        sizes, slice_sizes = shape.to_integer_list, self.slice_shape(shape)
        if not random_values.is_known(tf_fn):
            with tf.device(self._devices[0]):
                # A generator for each slice would give other values in each layout.
                whole = tf_fn(sizes, seed=seed, **kwargs)
            return PlacedTensor(self.make_slices(whole, shape))
        if key is None:
            with tf.device(self._devices[0]):
                # One key, drawn in one place: what processors share must be equal on all.
                key = random_values.new_key(seed)
        # Processors in one memory whose slices begin at the same place have one tensor.
        owners = self.owners(shape)
        drawn = {}
        for pnum in dict.fromkeys(owners):
            begin = self.slice_begin(shape, pnum)
            with tf.device(self._devices[pnum]):
                drawn[pnum] = random_values.random_slice(
                    key, sizes, begin, slice_sizes, tf_fn, kwargs
                )
        return PlacedTensor([drawn[owner] for owner in owners])

    # -- communication

    @named_collective
    def allreduce(
        self, x: PlacedTensor, mesh_axes: Sequence[int], reduction_fn_string: str
    ) -> PlacedTensor:
        """Reduces slices over groups of processors; see MeshImpl."""
        slices = self._slices_of(x)
        # A merged mesh has axes of size 1, over which there is nothing to reduce.
        mesh_axes = [axis for axis in single_axes(mesh_axes) if self.shape[axis].size > 1]
        return PlacedTensor(self._reducer.allreduce(slices, mesh_axes, reduction_fn_string))

    @named_collective
    def reduce_scatter(self, x: PlacedTensor, mesh_axis: int, split_axis: int) -> PlacedTensor:
        """Sums slices over the processors along a mesh axis, and splits the sum; see MeshImpl."""
        slices = self._slices_of(x)
        return PlacedTensor(self._reducer.reduce_scatter(slices, mesh_axis, split_axis))

    def allsplit(
        self, x: PlacedTensor, mesh_axis: int, split_axis: int, which: Optional[PlacedTensor] = None
    ) -> PlacedTensor:
        """Keeps each processor's part of a replicated value; see MeshImpl."""
        if self.shape[mesh_axis].size == 1:
            return x
        if which is not None:
            return super().allsplit(x, mesh_axis, split_axis, which)
        n = self.shape[mesh_axis].size
        parts = self.slicewise(lambda t: tuple(tf.split(t, n, split_axis)), x)
        # One split makes the parts of all processors that share the value.
        own = [parts[self._coordinate(p, mesh_axis)].tensor_list[p] for p in range(self.size)]
        return PlacedTensor(own)

    @named_collective
    def allconcat(self, x: PlacedTensor, mesh_axis: int, concat_axis: int) -> PlacedTensor:
        """Concatenates the slices of the processors along a mesh axis; see MeshImpl."""
        if self.shape[mesh_axis].size == 1:
            return x
        members = self._group_slices(x, mesh_axis)
        # The members of a group get the same pieces, so each memory concatenates them once.
        return self.slicewise(lambda *pieces: tf.concat(pieces, concat_axis), *members)

    @named_collective
    def alltoall(
        self, x: PlacedTensor, mesh_axis: int, split_axis: int, concat_axis: int
    ) -> PlacedTensor:
        """Sends part i of each slice to processor i along a mesh axis; see MeshImpl."""
        n = self.shape[mesh_axis].size
        if n == 1:
            return x
        parts = self.slicewise(lambda t: tuple(tf.split(t, n, split_axis)), x)
        received = []
        for source in range(n):
            column = []
            for pnum in range(self.size):
                sender = self._member(pnum, mesh_axis, source)
                # From each member of its group, a processor gets the part of its own number there.
                column.append(parts[self._coordinate(pnum, mesh_axis)].tensor_list[sender])
            received.append(PlacedTensor(column))
        return self.slicewise(lambda *pieces: tf.concat(pieces, concat_axis), *received)

    @named_collective
    def receive(
        self, x: PlacedTensor, mesh_axis: int, source_pcoord: Sequence[Optional[int]]
    ) -> PlacedTensor:
        """Replaces each slice by that of another processor, or by zeros; see MeshImpl."""
        own = self._slices_of(x)
        zeros = None
        if None in source_pcoord:
            sizes, dtype = own[0].shape.as_list(), own[0].dtype
            # Slicewise, so that a memory has one tensor of zeros for all its processors.
            zeros = self.slicewise(lambda: tf.zeros(sizes, dtype))
        slices = []
        for pnum in range(self.size):
            source = source_pcoord[self._coordinate(pnum, mesh_axis)]
            if source is None:
                slices.append(zeros.tensor_list[pnum])  # type: ignore[union-attr]
            else:
                slices.append(own[self._member(pnum, mesh_axis, source)])
        return PlacedTensor(slices)

    def _collective_with_groups(
        self,
        x: Any,
        mesh_axes: Sequence[int],
        collective: Callable[[list[tf.Tensor], list[DeviceLike]], Sequence[tf.Tensor]],
    ) -> Any:
        """Applies a collective to groups of processors; for subclasses with their own ones.

        Args:
          x: a LaidOutTensor.
          mesh_axes: the mesh axes along which the processors of a group differ.
          collective: takes the slices of a group and its devices; returns its new slices.
        """
        if not mesh_axes:
            return x
        slices: list[Any] = self._slices_of(x)
        reduced = list(slices)
        for group in processor_groups(self.shape, single_axes(mesh_axes)):
            results = collective([slices[p] for p in group], [self._devices[p] for p in group])
            for pnum, result in zip(group, results, strict=True):
                reduced[pnum] = result
        return PlacedTensor(reduced)

    def _coordinate(self, pnum: int, mesh_axis: int) -> int:
        return coordinate_of(self.shape, pnum, mesh_axis)

    def _member(self, pnum: int, mesh_axis: int, coordinate: int) -> int:
        """Returns the processor of the same group with another coordinate along an axis."""
        return self._groups(mesh_axis)[pnum][coordinate]

    def _groups(self, mesh_axis: int) -> list[list[int]]:
        """Returns, for each processor, its group along an axis, by coordinate."""
        if mesh_axis not in self._groups_along:
            groups = processor_groups(self.shape, [mesh_axis])
            of = {pnum: group for group in groups for pnum in group}
            self._groups_along[mesh_axis] = [of[pnum] for pnum in range(self.size)]
        return self._groups_along[mesh_axis]

    def _group_slices(self, x: PlacedTensor, mesh_axis: int) -> list[PlacedTensor]:
        """Returns, for each coordinate along an axis, the slice of the member there."""
        own = self._slices_of(x)
        return [
            PlacedTensor([own[self._member(p, mesh_axis, c)] for p in range(self.size)])
            for c in range(self.shape[mesh_axis].size)
        ]

    # -- processor numbers

    def laid_out_pnum(self) -> PlacedTensor:
        """Returns a LaidOutTensor of the processors' numbers, Python ints."""
        return PlacedTensor(list(range(self.size)))

    def laid_out_pcoord(self, mesh_axis: int) -> PlacedTensor:
        """Returns a LaidOutTensor of the processors' coordinates along a mesh axis."""
        constants: dict[tuple[str, int], tf.Tensor] = {}
        coordinates = []
        for pnum, device in enumerate(self._devices):
            # Equal coordinates in one memory are one constant: what is computed of them is shared.
            key = (self._domains[pnum], self._coordinate(pnum, mesh_axis))
            if key not in constants:
                with tf.device(device):
                    constants[key] = tf.constant(key[1], tf.int32)
            coordinates.append(constants[key])
        return PlacedTensor(coordinates)

    def _known_pcoord(self, mesh_axis: int) -> PlacedTensor:
        """Returns the coordinates as Python ints."""
        return PlacedTensor([self._coordinate(pnum, mesh_axis) for pnum in range(self.size)])

    # -- loops

    def owners(self, tensor_shape: Shape) -> list[int]:
        """Returns the owner of each processor's slice."""
        first: dict[tuple, int] = {}
        return [
            # Slices of a tensor have one shape: those that begin at one place are equal.
            first.setdefault((self._domains[pnum], *self.slice_begin(tensor_shape, pnum)), pnum)
            for pnum in range(self.size)
        ]

    def loop_slices(self, laid_out: LaidOutLike, tensor_shape: Shape) -> list[tf.Tensor]:
        """Returns one tf.Tensor for each different slice in each memory domain."""
        slices = laid_out.to_laid_out_tensor().tensor_list
        # A loop that carried a tensor for each processor would make copies of what they share.
        return [slices[pnum] for pnum in sorted(set(self.owners(tensor_shape)))]

    def from_loop_slices(self, slices: Sequence[tf.Tensor], tensor_shape: Shape) -> PlacedTensor:
        """Returns the laid-out tensor of the tf.Tensors that `loop_slices` returned."""
        owners = self.owners(tensor_shape)
        # In the order of `loop_slices`: that of the owners' numbers.
        stored = dict(zip(sorted(set(owners)), slices))
        return PlacedTensor([stored[pnum] for pnum in owners])

    # -- whole tensors

    def export_to_tf_tensor(self, x: Tensor, laid_out_x: LaidOutLike) -> tf.Tensor:
        """Returns the whole value of a Tensor, given its lowered form."""
        slices = laid_out_x.to_laid_out_tensor().tensor_list
        return self.combine_slices(slices, x.shape, self._devices[0])

    def import_tf_tensor(self, x: Tensor, tf_x: tf.Tensor) -> PlacedTensor:
        """Returns the LaidOutTensor of a whole tf.Tensor."""
        return PlacedTensor(self.make_slices(tf_x, x.shape))


class _MergedMeshImpl(ExecutedMeshImpl, PlacementMeshImpl):
    """The executed mesh of a PlacementMeshImpl; layouts must fit the requested mesh too."""


replaceable(__name__)
