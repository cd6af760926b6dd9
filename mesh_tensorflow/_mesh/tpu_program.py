"""A program on a TPU: how it is replicated, and its collectives.

TensorFlow has no public way to either; `tpu.replicate` and its relatives keep a control flow
context, which is searched for here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import check_choice, dims_text
from mesh_tensorflow._core.layout import processor_groups
from mesh_tensorflow._core.shape import Shape, single_axes
from mesh_tensorflow._mesh import random_values
from mesh_tensorflow._mesh.program import Program, ProgramCollectives
from mesh_tensorflow._mesh.slice_functions import reduction_fn

if TYPE_CHECKING:
    from tensorflow.python.ops.control_flow_ops import ControlFlowContext
    from tensorflow.tpu.experimental import DeviceAssignment


def tpu_context() -> tuple[Any, Optional[tf.Graph]]:
    """Returns the context of the computation that is being built, and its graph.

    Graphs of functions and of control flow belong to the computation of the outer graph.

    Returns:
      (a TPUReplicateContext, a tf.Graph), or (None, None) outside of tpu.rewrite, tpu.replicate and
      tpu.shard.
    """
    graph = None if tf.executing_eagerly() else tf.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()
        while context is not None:
            # Known by its method, as the class of this context has no public name.
            if hasattr(context, "get_replicated_var_handle"):
                return context, graph
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)
    return None, None


@contextlib.contextmanager
def _at_context(graph: tf.Graph, context: ControlFlowContext) -> Iterator[None]:
    """Creates operations in the given control flow context instead of the current one."""
    # On exit the previous context is restored, with its control dependencies.
    with graph.as_default(), tf.control_dependencies(None), tf.device(None):
        graph._set_control_flow_context(context)
        yield


@contextlib.contextmanager
def outside_tpu_context() -> Iterator[None]:
    """Creates operations on the host that feeds the computation."""
    context, graph = tpu_context()
    with _at_context(graph, context.outer_context):
        yield


@contextlib.contextmanager
def within_tpu_context() -> Iterator[None]:
    """Creates operations of the computation that are outside of its loops and conditions."""
    context, graph = tpu_context()
    with _at_context(graph, context):
        yield


def pnum_to_processor_coordinates_nd(
    mesh_shape: Sequence[int], pnum: int, device_assignment: DeviceAssignment
) -> tuple[int, ...]:
    """Returns the physical coordinates of the core that runs replica `pnum`.

    Args:
      mesh_shape: the physical shape; ignored, as in earlier releases.
      pnum: a replica number.
      device_assignment: a tf DeviceAssignment.
    """
    del mesh_shape
    return tuple(int(c) for c in device_assignment.coordinates(pnum, 0))


def processor_coordinates_to_pnum_map_nd(
    mesh_shape: Sequence[int],
    logical_to_physical: Sequence[Sequence[int]],
    device_assignment: DeviceAssignment,
) -> list[int]:
    """Returns, for each logical processor, the replica number at its physical coordinates.

    It is for chips with one core, with coordinates from `auto_logical_to_physical_tpu`. Chips are
    numbered with x varying fastest, then y, then z; the two coordinates of `mesh_shape` give the
    same number, with the first varying fastest. Of several replicas on a chip, the last is used.

    Args:
      mesh_shape: the physical shape, a list of ints such as [x * y, z, 1].
      logical_to_physical: the physical coordinates of each logical processor; only the first two
        are used.
      device_assignment: a tf DeviceAssignment.

    Returns:
      A list of replica numbers; -1 where there is no replica.
    """
    sizes = device_assignment.topology.mesh_shape
    replica_on: dict[int, int] = {}
    for pnum in range(device_assignment.num_replicas):
        x, y, z, *_ = pnum_to_processor_coordinates_nd(mesh_shape, pnum, device_assignment)
        replica_on[x + int(sizes[0]) * (y + int(sizes[1]) * z)] = pnum
    rows = mesh_shape[0]
    return [replica_on.get(first + rows * second, -1) for first, second, *_ in logical_to_physical]


# The dtype that each dtype is summed in, without loss or as exactly as float32; other dtypes are
# gathered.
_SUMMED_AS = {
    tf.float32: tf.float32,
    tf.float64: tf.float64,
    tf.float16: tf.float32,
    tf.bfloat16: tf.bfloat16,
    tf.int32: tf.int32,
    tf.uint32: tf.uint32,
    **dict.fromkeys([tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16], tf.int32),
}
_LOGICAL = {"MAX": tf.reduce_any, "MIN": tf.reduce_all}

# Dtypes that are cast without loss for CollectivePermute, and those that are bitcast.
_CAST = {
    tf.float16: tf.float32,
    **dict.fromkeys([tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16], tf.int32),
}
_BITCAST = (tf.uint32, tf.int64, tf.uint64, tf.float64)


class TpuCollectives(ProgramCollectives):
    """Collectives along the axes of a mesh, within tpu.rewrite, tpu.replicate or tpu.shard.

    Replica i of the computation is the core with physical number i. All cores run one program; its
    groups consist of physical numbers, in the order of the cores' coordinates.
    """

    def __init__(self, mesh_shape: Shape, logical_to_physical: Sequence[int]):
        """Creates a TpuCollectives; see `ProgramCollectives`."""
        super().__init__(mesh_shape, logical_to_physical)
        self._pnum: Any = None
        self._pnum_context: Any = None

    # -- processor numbers

    def pnum(self) -> tf.Tensor:
        """Returns the logical number of the current core, an int32 scalar.

        Raises:
          ValueError: no replicated computation is being built, or it does not have one replica for
            each processor.
        """
        context = self._context()
        # A mesh may be made before the computation, and serve several of them.
        if context is not self._pnum_context:
            with outside_tpu_context():
                # One input of the computation that is another number for each replica: all cores
                # run the same program, and nothing in it tells them apart.
                numbers = [tf.constant(p, tf.int32) for p in range(self._shape.size)]
                physical = tf.raw_ops.TPUReplicatedInput(inputs=numbers, name="physical_pnum")
            with within_tpu_context():
                if self._logical == sorted(self._logical):
                    self._pnum = tf.identity(physical, name="pnum")
                else:
                    self._pnum = tf.gather(
                        tf.constant(self._logical, tf.int32), physical, name="pnum"
                    )
            self._pnum_context = context
        return self._pnum

    def _context(self) -> Any:
        """Returns the context of the computation being built, after checking its replicas."""
        context, _ = tpu_context()
        if context is None:
            raise ValueError(
                f"collectives of the TPU mesh {dims_text(self._shape)} are used outside of a "
                "replicated computation. Build the program in a function and give it to "
                "tf.compat.v1.tpu.rewrite, replicate or shard"
            )
        replicas = context._num_replicas
        if replicas != self._shape.size:
            raise ValueError(
                f"the replicated computation has {replicas} replicas, the mesh "
                f"{dims_text(self._shape)} has {self._shape.size} processors. Replicate it over "
                "a device assignment with a replica for each processor"
            )
        return context

    def _groups(self, mesh_axes: Sequence[int]) -> list[list[int]]:
        """Returns groups of physical numbers, with members in order of logical number."""
        # Checked here, since all collectives ask for groups.
        self._context()
        groups = processor_groups(self._shape, sorted(mesh_axes))
        return [[self._physical[pnum] for pnum in group] for group in groups]

    # -- collectives

    def allreduce(self, x: tf.Tensor, mesh_axes: Sequence[int], reduction: str) -> tf.Tensor:
        """Reduces over the processors that differ along mesh axes.

        Maxima, minima, and sums of dtypes that TPUs do not sum, are gathered axis by axis and
        reduced on each core. Booleans are reduced by logical or (SUM, MAX) or logical and (MIN).

        Args:
          x: this core's tf.Tensor.
          mesh_axes: mesh axes.
          reduction: "SUM", "MAX" or "MIN".
        """
        reduce_fn = reduction_fn(reduction)
        axes = sorted(axis for axis in {*single_axes(mesh_axes)} if self._shape[axis].size > 1)
        if not axes:
            return x
        if reduction == "SUM" and x.dtype in _SUMMED_AS:
            return self._cross_replica_sum(x, axes)
        if x.dtype == tf.bool:
            # tf.reduce_max and tf.reduce_min take no booleans.
            check_choice("allreduce of booleans", "reduction_fn_string", reduction, _LOGICAL)
            reduce_fn = _LOGICAL[reduction]
        # One axis after the other: a core holds n slices, then m, and never the n * m of a group.
        for axis in axes:
            x = reduce_fn(self.allgather(x, axis), axis=0)
        return x

    def _cross_replica_sum(self, x: tf.Tensor, mesh_axes: Sequence[int]) -> tf.Tensor:
        y = tf.raw_ops.CrossReplicaSum(
            input=tf.cast(x, _SUMMED_AS[x.dtype]),
            group_assignment=tf.constant(self._groups(mesh_axes), tf.int32),
        )
        # Of booleans the sum is above 0 where one was true: cast back, it is their logical or.
        return tf.cast(y, x.dtype)

    def allgather(self, x: tf.Tensor, mesh_axis: int) -> tf.Tensor:
        """Returns [n, ...]: the slices of the processors along a mesh axis, by coordinate."""
        n = self._shape[mesh_axis].size
        # An exchange in which every part is the whole slice; a sum of slices times one-hots, as in
        # the classic, would spread a NaN to all of them.
        copies = tf.broadcast_to(tf.expand_dims(x, 0), [n, *x.shape.as_list()])
        return self._all_to_all(copies, mesh_axis, 0, 0)

    def alltoall(
        self, x: tf.Tensor, mesh_axis: int, split_axis: int, concat_axis: int
    ) -> tf.Tensor:
        """Sends part i of each slice to processor i along a mesh axis.

        It preserves all bits of any dtype.

        Args:
          x: this core's tf.Tensor.
          mesh_axis: a mesh axis.
          split_axis: the axis along which `x` is split.
          concat_axis: the axis along which received parts are concatenated.

        Raises:
          ValueError: the size of `split_axis` is not divisible by that of the mesh axis.
        """
        n, size = self._shape[mesh_axis].size, x.shape.as_list()[split_axis]
        if size % n:
            raise ValueError(
                f"alltoall cuts axis {split_axis} of a slice of shape {x.shape} in {n} parts, for "
                f"the mesh dimension {dims_text([self._shape[mesh_axis]])}, which does not divide "
                f"{size}. Give the tensor dimension a multiple of the sizes of both mesh dimensions"
            )
        return x if n == 1 else self._all_to_all(x, mesh_axis, split_axis, concat_axis)

    def _all_to_all(
        self, x: tf.Tensor, mesh_axis: int, split_axis: int, concat_axis: int
    ) -> tf.Tensor:
        rank = x.shape.ndims
        return tf.raw_ops.AllToAll(
            input=x,
            group_assignment=tf.constant(self._groups([mesh_axis]), tf.int32),
            concat_dimension=concat_axis % rank,
            split_dimension=split_axis % rank,
            split_count=self._shape[mesh_axis].size,
        )

    def permute(
        self, x: tf.Tensor, mesh_axis: int, source_pcoord: Sequence[Optional[int]]
    ) -> tf.Tensor:
        """Returns the slice of the processor with another coordinate along a mesh axis, or zeros.

        If each slice has at most one receiver, slices are sent point to point.

        Args:
          x: this core's tf.Tensor.
          mesh_axis: a mesh axis.
          source_pcoord: for each coordinate along it that of the source, or None for zeros.

        Raises:
          ValueError: the number of sources is not that of the processors along the axis, or a
            source is out of range.
        """
        sources = list(source_pcoord)
        n = self._shape[mesh_axis].size
        if len(sources) != n or any(s is not None and not 0 <= s < n for s in sources):
            raise ValueError(
                f"source_pcoord names, for each of the {n} coordinates along the mesh dimension "
                f"{dims_text([self._shape[mesh_axis]])}, another of them or None; got {sources}"
            )
        named = [s for s in sources if s is not None]
        # CollectivePermute has one receiver for each sender.
        if len(set(named)) < len(named):
            return self._or_zeros(self._selected(x, mesh_axis, sources), mesh_axis, sources)
        # A core that no pair sends to gets zeros.
        pairs = [
            [group[source], group[target]]
            for group in self._groups([mesh_axis])
            for target, source in enumerate(sources)
            if source is not None
        ]
        if not pairs:
            return tf.zeros_like(x)
        forth, back = _conversions(x.dtype)
        return back(
            tf.raw_ops.CollectivePermute(
                input=forth(x), source_target_pairs=tf.constant(pairs, tf.int32)
            )
        )


def _conversions(dtype: tf.DType) -> tuple[Callable, Callable]:
    """Returns lossless conversions to and from the dtypes of CollectivePermute."""
    if dtype in _CAST:
        return (lambda x: tf.cast(x, _CAST[dtype])), (lambda y: tf.cast(y, dtype))
    if dtype in _BITCAST:
        # 64-bit numbers become pairs of int32 along a new last axis, and single ones again.
        return (lambda x: tf.bitcast(x, tf.int32)), (lambda y: tf.bitcast(y, dtype))
    return tf.identity, tf.identity


class TpuProgram(Program):
    """The program of all cores of a TPU, which tpu.rewrite, tpu.replicate or tpu.shard builds.

    It may be created before the computation is built; its methods are called while it is.

    Attributes:
      devices: the device of each core, by physical number; replica i is the core of number i.
      local: all processors: one process builds the computation for all cores.
      binds_masters: whether the value of a variable may be stored in its slices only.
    """

    # Masters are stored on the host, and variables on TPU devices are only read and assigned as a
    # whole. So initializing and restoring need no TPU, and reinitializing a TPU loses nothing that
    # the host does not have.
    binds_masters = False
    orders_operations = False
    has_infeed = True

    def __init__(
        self,
        mesh_shape: Shape,
        device_assignment: Optional[DeviceAssignment],
        logical_to_physical: Sequence[int],
        make_variable: Callable[[str, Sequence[Any]], Any],
    ):
        """Creates a TpuProgram.

        Args:
          mesh_shape: the logical mesh.
          device_assignment: a tf DeviceAssignment with a replica for each processor.
          logical_to_physical: the physical number of each logical processor.
          make_variable: takes a name and the variables of all replicas; returns one variable.

        Raises:
          ValueError: there is no device assignment, or its number of replicas is wrong.
        """
        if device_assignment is None:
            raise ValueError(
                f"SimdMeshImpl of the mesh {dims_text(mesh_shape)} within a TPU computation has no "
                "device_assignment, which says where slices of variables are. Give it the one that "
                "tpu.replicate gets"
            )
        replicas = getattr(device_assignment, "num_replicas", mesh_shape.size)
        if replicas != mesh_shape.size:
            raise ValueError(
                f"the mesh {dims_text(mesh_shape)} has {mesh_shape.size} processors, the device "
                f"assignment has {replicas} replicas. Make it with num_replicas={mesh_shape.size}"
            )
        self.devices = [device_assignment.tpu_device(replica=n) for n in range(mesh_shape.size)]
        self.local = list(range(mesh_shape.size))
        self.collectives = TpuCollectives(mesh_shape, logical_to_physical)
        self._axes = range(len(mesh_shape))
        self._make_variable = make_variable

    # -- places of operations

    def outside(self) -> contextlib.AbstractContextManager:
        """Creates operations on the host."""
        return contextlib.nullcontext() if tpu_context()[0] is None else outside_tpu_context()

    def at_beginning(self) -> contextlib.AbstractContextManager:
        """Creates operations where the program is lowered, which may be a loop of many steps."""
        return contextlib.nullcontext()

    # -- variables

    def make_slice(
        self, name: str, sizes: Sequence[int], dtype: tf.DType, trainable: bool, host: str
    ) -> Any:
        """Creates the tf variable of one slice, on the current device, with initial zeros.

        It is named under the name scope; in a variable scope with reuse=tf.AUTO_REUSE, it is the
        variable of that name in the variable scope.

        Args:
          name: a string.
          sizes: its sizes.
          dtype: its dtype.
          trainable: whether it is among the trainable variables.
          host: the device of the zeros.
        """
        options = {"trainable": trainable, "collections": ["TPU_VAR"], "use_resource": True}
        with tf.device(host):
            zeros = tf.zeros(sizes, dtype)
        if tf.get_variable_scope().reuse == tf.AUTO_REUSE:
            return tf.get_variable(name, initializer=zeros, **options)
        return tf.Variable(zeros, name=name, dtype=dtype, **options)

    def own_variable(self, name: str, slices: Mapping[int, Any]) -> Any:
        """Returns a variable that is each core's own slice within the computation.

        Args:
          name: a string.
          slices: tf variables by physical number.
        """
        return self._make_variable(name, list(slices.values()))

    # -- random values

    def random_key(self, seed: Optional[int]) -> tf.Tensor:
        """Returns a new key for random numbers, the same on all cores."""
        # Every core has the step, and computes the same key of it without the host.
        if random_values.key_is_of_step(seed):
            return random_values.new_key(seed)
        return self.same_everywhere(lambda: random_values.new_key(seed))

    def same_everywhere(self, make: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Returns a new random value, the same on all cores.

        It is computed on the host, which respects seeds. In a loop of the computation that would be
        one value for all iterations, so there the first processor computes it for all.

        Args:
          make: a function that returns a random tf.Tensor.
        """
        context, graph = tpu_context()
        current = tf.get_default_graph()
        # The body of a loop is another context in TensorFlow 1, and another graph in TensorFlow 2.
        is_in_loop = current._get_control_flow_context() is not context or current is not graph
        if context is None or not is_in_loop:
            with self.outside():
                return make()
        value = make()
        is_first = tf.equal(self.collectives.pnum(), 0)
        # Selected and summed: a broadcast with the operations that TPUs have.
        value = tf.where(is_first, value, tf.zeros_like(value))
        return self.collectives.allreduce(value, self._axes, "SUM")
