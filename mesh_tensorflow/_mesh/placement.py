"""What PlacementMeshImpl is made of: its tensors, variables, random values and collectives.

In a sum by copies, values travel around a ring of the devices in both directions, so that each link
carries about the same amount. Bandwidth-optimal ring reduction: Patarasuk and Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations" (JPDC 2009).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import table_lookup
from mesh_tensorflow._core.layout import processor_groups
from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._mesh import random_values
from mesh_tensorflow._mesh.devices import (
    absent_devices,
    are_whole_gpus,
    check_distinct_devices,
    devices_text,
)
from mesh_tensorflow._mesh.mesh_impl import LaidOutTensor, Reducer
from mesh_tensorflow._mesh.slice_functions import binary_reduction_fn, complex_view, real_view
from mesh_tensorflow._mesh.variables.slice_variables import SliceVariables

if TYPE_CHECKING:
    from mesh_tensorflow.ops._variables.variable import Variable
    from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl


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
        self._reads: dict[int, tf.Tensor] = {}
        for pnum, slice_var in self.slices.items():
            # Made before the program assigns anything, since every assignment waits for this read.
            self._reads[pnum] = _read_once(slice_var)

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

    def _spread(self, values: dict[int, Any]) -> Any:
        return self.mesh_impl.LaidOutTensor([values[owner] for owner in self.owner])

    @property
    def laid_out_tensor(self) -> Any:
        """A LaidOutTensor of the values at the beginning of the step."""
        return self._spread(self._reads)

    def read(self) -> Any:
        """Returns a LaidOutTensor of the values at this point of the program."""
        values = {}
        for pnum, v in self.slices.items():
            with tf.device(v.device):
                values[pnum] = v.read_value()
        return self._spread(values)

    def assign_to_slices(self, assign_fn: Callable, values: Sequence[tf.Tensor]) -> tf.Operation:
        """Assigns to the slices, after their values have been read.

        Args:
          assign_fn: takes the Variable, a slice variable and a value; returns a tf operation.
          values: a tf.Tensor for each processor.

        Returns:
          A tf.Operation.
        """
        assignments = []
        for pnum, v in self.slices.items():
            # Otherwise gradients of one step could be of a mixture of old and new weights.
            with tf.device(v.device), tf.control_dependencies([self._reads[pnum]]):
                assignments.append(assign_fn(self._variable, v, values[pnum]))
        # In eager code an assignment is done at once, and what it returns may be None.
        made = [a for a in assignments if a is not None]
        return made[0] if len(made) == 1 else tf.group(made)


def _read_once(slice_var: tf.Variable) -> tf.Tensor:
    """Returns the tensor by which a graph reads a variable; in a function, a new read."""
    if tf.executing_eagerly_outside_functions():
        with tf.device(slice_var.device):
            return slice_var.value()
    # In a graph of TensorFlow 1 that is the read which was made with the variable, so all parts of
    # a step have the value of one moment.
    return slice_var.graph.as_graph_element(slice_var)


def random_tensor(
    impl: PlacementMeshImpl, shape: Shape, tf_fn: Callable, kwargs: dict[str, Any]
) -> PlacedTensor:
    """Returns a laid-out random tensor; see `PlacementMeshImpl.random`.

    Args:
      impl: a PlacementMeshImpl.
      shape: a Shape.
      tf_fn: a function of tf.random.
      kwargs: its keyword arguments.
    """
    kwargs = dict(kwargs)
    seed, key = kwargs.pop("seed", None), kwargs.pop("key", None)
    if not random_values.is_known(tf_fn):
        with tf.device(impl.devices[0]):
            # A generator for each slice would give other values in each layout.
            whole = tf_fn(shape.to_integer_list, seed=seed, **kwargs)
        return PlacedTensor(impl.make_slices(whole, shape))
    if key is None:
        with tf.device(impl.devices[0]):
            # One key, drawn in one place: what processors share of the tensor must be equal on all.
            key = random_values.new_key(seed)
    sizes, slice_sizes = shape.to_integer_list, impl.slice_shape(shape)
    made: dict[tuple, tf.Tensor] = {}
    slices = []
    for pnum, device in enumerate(impl.devices):
        begin = impl.slice_begin(shape, pnum)
        # Processors in one memory whose slices begin at the same place have one tensor.
        place = (impl.domains[pnum], *begin)
        if place not in made:
            with tf.device(device):
                made[place] = random_values.random_slice(
                    key, sizes, begin, slice_sizes, tf_fn, kwargs
                )
        slices.append(made[place])
    return PlacedTensor(slices)


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
    copies = [_ring_copies(x, devices, i) for i, x in enumerate(xs)]
    out = []
    for i, device in enumerate(devices):
        with tf.device(device):
            # In the order of origins, that of the whole tensor, whatever way each copy took.
            out.append(tf.concat([copy[i] for copy in copies], concat_axis))
    return out


def _split_all(
    xs: Sequence[tf.Tensor], devices: Sequence[str], split_axis: int
) -> list[list[tf.Tensor]]:
    parts = []
    for x, device in zip(xs, devices):
        with tf.device(device):
            parts.append(tf.split(x, len(xs), split_axis))
    return parts


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
    parts = _split_all(xs, devices, split_axis)
    out = []
    for i, device in enumerate(devices):
        with tf.device(device):
            out.append(tf.concat([part[i] for part in parts], concat_axis))
    return out


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
    out = []
    for pieces, device in zip(received, devices):
        with tf.device(device):
            out.append(tf.concat(pieces, concat_axis))
    return out


_IN_ANY_PLACE = 'give PlacementMeshImpl allreduce="ring"'
_MERGE_OPS = {"SUM": "Add", "MAX": "Max", "MIN": "Min"}

# TensorFlow's runtime identifies groups and instances of collectives by process-wide numbers.
_group_keys: dict[tuple[str, ...], int] = {}
# Above all groups of SIMD programs, which may be in one session with these.
_FIRST_GROUP = 3 * 2**29
# Shared without the lock below: to take a number of a count is one step for Python's threads.
_instance_keys = itertools.count(1)
_counting = threading.Lock()


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
        self._across = table_lookup(across, method, "allreduce method")
        self._mesh_shape = mesh_shape
        self._devices = devices
        self._domains = domains

    def allreduce(
        self, x: Sequence[tf.Tensor], mesh_axes: Sequence[int], reduction: str
    ) -> list[tf.Tensor]:
        """Reduces over the processors that differ along mesh axes.

        Groups of the same memory domains and the same tensors are reduced once.

        Args:
          x: a tf.Tensor for each processor.
          mesh_axes: the mesh axes to reduce over.
          reduction: "SUM", "MAX" or "MIN".

        Returns:
          The reduced value for each processor.
        """
        out: list[Any] = [None] * len(x)
        # By ids of tensors, which `x` holds until all groups are done.
        done: dict[tuple, dict[str, tf.Tensor]] = {}
        for group in processor_groups(self._mesh_shape, mesh_axes):
            key = tuple((self._domains[p], id(x[p])) for p in group)
            if key not in done:
                done[key] = self._reduce_group(x, group, reduction)
            for p in group:
                out[p] = done[key][self._domains[p]]
        return out

    def _reduce_group(
        self, slices: Sequence[tf.Tensor], group: Sequence[int], reduction: str
    ) -> dict[str, tf.Tensor]:
        """Returns the reduced value for each memory domain of the group."""
        # In memory first, so that only one value of each domain travels.
        leaders, partial = self._reduced_in_memory(slices, group, reduction)
        if len(partial) > 1:
            reduced = self._method(list(leaders.values()))(partial, [*leaders.values()], reduction)
            return dict(zip(leaders, reduced))
        return dict(zip(leaders, partial))

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
        out: list[Any] = [None] * len(x)
        # As in `allreduce`: groups that have the same slices in the same memories are summed once.
        done: dict[tuple, list[tf.Tensor]] = {}
        for group in processor_groups(self._mesh_shape, [mesh_axis]):
            key = tuple((self._domains[p], id(x[p])) for p in group)
            if key not in done:
                done[key] = self._scatter_group(x, group, split_axis)
            for p, part in zip(group, done[key]):
                out[p] = part
        return out

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
        parts = []
        # From a row of parts for each domain to a row of summands for each member.
        for p, column in zip(group, zip(*columns)):
            with tf.device(self._devices[p]):
                parts.append(reduce_here(column, "SUM"))
        return parts

    def _method(self, leaders: Sequence[str]) -> Callable[..., list[tf.Tensor]]:
        if self._across is not None:
            return self._across
        # Asked of each group, as one mesh may have groups of GPUs and of CPUs.
        return allreduce_collective if are_whole_gpus(leaders) else allreduce_ring


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
    absent, here = absent_devices(devices, in_session)
    if absent:
        raise ValueError(
            f"collectives between {', '.join(devices)} would wait forever: this process has no "
            f"device {', '.join(map(repr, absent))}. It has "
            f"{devices_text(here)}. Name these, or {_IN_ANY_PLACE}"
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
    before = _checked(devices)
    # Each call has a new instance: the members of a group find each other by that number.
    group, instance_key = group_key(devices), next(_instance_keys)
    merge_op = table_lookup(_MERGE_OPS, reduction_fn_string, "reduction")
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
                    merge_op=merge_op,
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
