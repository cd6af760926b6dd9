"""SimdMeshImpl: one program that every processor runs on its own slices."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

import gin
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.layout import LayoutLike, given_stored_layout
from mesh_tensorflow._core.operation import LaidOutLike, Tensor
from mesh_tensorflow._core.shape import Shape, ShapeLike, list_product, single_axes
from mesh_tensorflow._mesh import random_values
from mesh_tensorflow._mesh.devices import check_devices
from mesh_tensorflow._mesh.mesh_impl import (
    ExecutedMeshImpl,
    LaidOutTensor,
    MeshImpl,
    convert_args_to_laid_out_tensors,
    named_collective,
)
from mesh_tensorflow._mesh.program import Program, TfCollectives, numbering
from mesh_tensorflow._mesh.replicate import current_program, replicate
from mesh_tensorflow._mesh.slice_functions import at_device, constant, contract, cut_to, padded
from mesh_tensorflow._mesh.tpu_program import TpuProgram, tpu_context
from mesh_tensorflow._mesh.tpu_topology import (
    HierarchicalTiling,
    auto_logical_to_physical_tpu,
    physical_shape_3d_from_topology_proto_4d,
)
from mesh_tensorflow._mesh.variables.storage import SliceVariables
from mesh_tensorflow._quiet import not_advised
from mesh_tensorflow._replaced import replaceable
from mesh_tensorflow.tpu_variables import ReplicatedVariable

if TYPE_CHECKING:
    from tensorflow.tpu.experimental import DeviceAssignment

    from mesh_tensorflow.ops import Variable

__all__ = [
    "HierarchicalTiling",
    "SimdMeshImpl",
    "auto_logical_to_physical_tpu",
    "physical_shape_3d_from_topology_proto_4d",
    "replicate",
]


# -- tensors and variables


class SimdTensor(LaidOutTensor):
    """The slice of the processor that runs the program, as a list of one tf.Tensor."""

    def __init__(self, tensor_list: Sequence[tf.Tensor]):
        """Creates a SimdTensor.

        Args:
          tensor_list: a list of one tf.Tensor.
        """
        if len(tensor_list) != 1:
            raise ValueError(f"a SIMD program has one slice of a tensor, not {len(tensor_list)}")
        super().__init__(tensor_list)

    @property
    def one_slice(self) -> tf.Tensor:
        """The slice, a tf.Tensor."""
        return self._tensor_list[0]


class _MadeWhenAsked(Mapping[int, tf.Variable]):
    """Slice variables by logical number; those of other processes are made when asked for."""

    def __init__(
        self,
        made: dict[int, tf.Variable],
        make: Callable[[int], tf.Variable],
        mesh_impl: SimdMeshImpl,
    ):
        self._made, self._make, self._impl = made, make, mesh_impl
        # Those of later are made here, too, wherever they are asked for.
        self._graph, self._scope = tf.get_default_graph(), tf.get_variable_scope()

    def __getitem__(self, pnum: int) -> tf.Variable:
        physical = self._impl.l2p(pnum)
        if physical not in self._made:
            with (
                self._graph.as_default(),
                tf.init_scope(),
                tf.variable_scope(self._scope, auxiliary_name_scope=False),
            ):
                self._made[physical] = self._make(physical)
        return self._made[physical]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._impl.size))

    def __len__(self) -> int:
        return self._impl.size


class SimdVariable(SliceVariables):
    """The slice variables of a Variable; the program sees that of the processor that runs it.

    Slice variables are numbered by physical processor; which part of the variable each one holds
    follows from the logical number. Equal slices are a tf variable of each processor, as on a TPU.
    """

    mesh_impl: SimdMeshImpl

    def __init__(self, variable: Variable, mesh_impl: SimdMeshImpl):
        """Creates the slice variables, outside of the program.

        Args:
          variable: a Variable operation.
          mesh_impl: a SimdMeshImpl.
        """
        self.mesh_impl = mesh_impl
        program, l2p = mesh_impl.program, mesh_impl.l2p
        # Variables of the traced function would be gone with it, and could not be fed to each call.
        with program.outside():
            make = functools.partial(self._make_slice, variable)
            # Those of this process's processors. A program for many is built in the time of its
            # own: slices elsewhere are needed only by the process that sets initial values.
            made = {physical: make(physical) for physical in sorted(program.local)}
            self.owner = list(range(mesh_impl.size))
            if len(program.local) == mesh_impl.size:  # sessions fetch dictionaries
                self.slices = {l: made[l2p(l)] for l in self.owner}
            else:
                self.slices = _MadeWhenAsked(made, make, mesh_impl)
            self._own = program.own_variable(variable.name, made)
            # TensorFlow has no public name for them. Where the private one is missing there are
            # none.
            functions = getattr(tf.get_default_graph(), "_device_functions_outer_to_inner", ())
            mesh_impl.graph_device_function_stacks.append(list(functions))
        # Before the base class, which binds the masters that nothing uses.
        if not program.binds_masters:
            for master in variable.masters:
                # On a TPU a master stays on the host: initializing and saving need no TPU then.
                master.keep()
        super().__init__(variable)
        # Held weakly, since a tensor keeps the graph of the program in memory.
        self._value: Optional[weakref.ref[tf.Tensor]] = None

    def _make_slice(self, variable: Variable, physical: int) -> tf.Variable:
        """Returns the slice variable of a physical processor."""
        impl = self.mesh_impl
        with tf.device(impl.devices[impl.p2l(physical)]):
            return impl.program.make_slice(
                f"{variable.name}_slice_{physical}",
                impl.slice_shape(variable.stored_shape),
                variable.slice_dtype,
                variable.trainable,
                variable.master_device,
            )

    @property
    def laid_out_tensor(self) -> SimdTensor:
        """The value at the beginning of the step, a SimdTensor."""
        value = self._value and self._value()
        if value is None:
            # Not where the value is first used, which may be in a loop or after an assignment.
            with self.mesh_impl.program.at_beginning():
                value = self._own.read_value()
            self._value = weakref.ref(value)
        return self.mesh_impl.LaidOutTensor([value])

    def read(self) -> SimdTensor:
        """Reads the value at the point of the program where it is called."""
        return self.mesh_impl.LaidOutTensor([self._own.read_value()])

    def assign_to_slices(
        self,
        assign_fn: Callable,
        values: Sequence[tf.Tensor],
        assign_to_tensor_list: Optional[Sequence[tf.Variable]] = None,
    ) -> tf.Operation:
        """Assigns to the slice of the processor that runs the program.

        Args:
          assign_fn: takes the Variable, a slice variable and a value; returns a tf operation.
          values: a list of one tf.Tensor.
          assign_to_tensor_list: a list of one variable to assign to in place of the slice variable.

        Returns:
          A tf.Operation.
        """
        [value] = values
        [target] = assign_to_tensor_list or [self._own]
        # After the read at the beginning, so that a step is a function of the state before it.
        with tf.control_dependencies([self.laid_out_tensor.one_slice]):
            assigned = assign_fn(self._variable, target, value)
        return tf.no_op() if assigned is None else tf.group(assigned)


# -- the mesh


@gin.configurable(module="mesh_tensorflow.simd_mesh_impl")
class SimdMeshImpl(MeshImpl[SimdTensor]):
    """A mesh whose processors all run one program, each on its slice of every tensor.

    On CPUs and GPUs `replicate` traces the program, and processors communicate through TensorFlow's
    collectives. On a TPU tpu.rewrite, tpu.replicate or tpu.shard builds it, with a replica for each
    processor.

    Attributes:
      program: the SimdProgram or TpuProgram.
      copy_master_to_slice_ops: tf operations that set the slices of a variable from its master.
      graph_device_function_stacks: for each variable, the device functions in effect where its
        slices were created.
    """

    LaidOutTensor = SimdTensor
    takes_random_keys = True
    LaidOutVariable = SimdVariable

    def __init__(
        self,
        shape: ShapeLike,
        layout: LayoutLike,
        devices: Optional[Sequence[str]] = None,
        device_assignment: Optional[DeviceAssignment] = None,
        logical_to_physical: Optional[Sequence[int]] = None,
        allreduce_in_bfloat16_max_group_size: int = 8,
        variable_layout: Optional[LayoutLike] = None,
        zero: Optional[int] = None,
        zero_axis: Optional[str] = None,
        uneven: bool = False,
    ):
        """Creates a SimdMeshImpl.

        Args:
          shape: the mesh shape; a Shape, or what converts to one, such as "rows:2,cols:2".
          layout: LayoutRules, or what converts to them, such as "batch:rows,d_ff:cols".
          devices: a list of device strings by physical number; those of the program if None, or
            if all are "". Ignored on a TPU, where the device assignment has them.
          device_assignment: on a TPU, the tf DeviceAssignment of the computation.
          logical_to_physical: the physical number of each logical processor, in row-major order;
            on a TPU, that of its replica. The same number if None. See
            `auto_logical_to_physical_tpu` and `HierarchicalTiling`.
          allreduce_in_bfloat16_max_group_size: larger groups sum bfloat16 in float32.
          variable_layout: rules by which variables are stored in parts, such as "d_model:rows".
          zero: the stage of ZeRO: 1 or 2 to store optimizers' slots in parts, 3 for weights too.
          zero_axis: the mesh dimension of ZeRO, or several joined by "+"; that of a mesh with just
            one if None.
          uneven: whether all rules allow sizes that the mesh does not divide, as those do that end
            in "?", such as "vocab:cols?".

        Raises:
          ValueError: it is created outside of `replicate` without a device assignment, the number
            of devices or replicas is wrong, or `logical_to_physical` is not a permutation.
        """
        super().__init__(shape, layout, uneven)
        self.stored_layout = given_stored_layout(self.shape, variable_layout, zero, zero_axis)
        self._device_assignment = device_assignment
        numbers = range(self.size) if logical_to_physical is None else logical_to_physical
        self._l2p, self._p2l = numbering(self.shape, numbers)
        self._wide_groups = allreduce_in_bfloat16_max_group_size
        self.program: Program
        self._collectives: Any = None  # a ProgramCollectives, with the methods of the two kinds
        # By physical number; the property `devices` has them by logical number.
        self._devices: list[str] = []
        self._join_program(devices)
        self.copy_master_to_slice_ops: list[tf.Operation] = []
        self.graph_device_function_stacks: list[Any] = []

    def _join_program(self, devices: Optional[Sequence[str]]) -> None:
        """Sets the program that all processors run, its devices and its collectives."""
        program = current_program()
        if program is not None:
            self.program = program
            named = devices is not None and any(devices)  # on TPUs "" stands for each device
            own = program.devices * self.size if program.is_compiled else program.devices
            self._devices = list(devices if devices and named else own)
            check_devices(self._devices, self.shape)
            if not program.is_compiled or self.size == 1:  # else they are merged
                self._collectives = TfCollectives(self.shape, program, self._l2p)
        elif self._device_assignment is not None or tpu_context()[0] is not None:
            tpu_program = TpuProgram(
                self.shape, self._device_assignment, self._l2p, ReplicatedVariable
            )
            self.program, self._devices = tpu_program, tpu_program.devices
            self._collectives = tpu_program.collectives
        else:
            raise ValueError(
                "SimdMeshImpl works within a program that all processors run: make the graph, the "
                "mesh and the Lowering in a function and give it to "
                "mtf.simd_mesh_impl.replicate(function, devices=[...]); on a TPU give it to "
                "tf.compat.v1.tpu.replicate, and the device assignment to both. To place "
                "operations on devices one by one, use mtf.placement_mesh_impl.PlacementMeshImpl"
            )

    @property
    def needs_execution_impl(self) -> bool:  # type: ignore[override]
        """Whether only the executed mesh fits the program: where XLA compiles it for one device."""
        return self.program.is_compiled

    @property
    def is_compiled_by_xla(self) -> bool:  # type: ignore[override]
        """Whether XLA compiles the program, which is then lowered for one device."""
        return self.program.is_compiled

    @functools.cached_property
    def execution_impl(self) -> MeshImpl:
        """The executed mesh: a single processor, where XLA compiles the program."""
        if self.size == 1 or not self.program.is_compiled:
            return self
        return _MergedSimdMeshImpl(self, devices=self.devices[:1])

    def at_beginning(self) -> contextlib.AbstractContextManager:
        """Creates operations within at the beginning of a step; on a TPU, at the current place."""
        return self.program.at_beginning()

    @property
    def supports_control_dependencies(self) -> bool:
        """Whether operations can wait for others through control dependencies; False on a TPU."""
        return self.program.orders_operations

    # -- processors

    def l2p(self, logical_pnum: int) -> int:
        """Returns the physical number of a logical processor."""
        return self._l2p[logical_pnum]

    def p2l(self, physical_pnum: int) -> int:
        """Returns the logical number of a physical processor."""
        return self._p2l[physical_pnum]

    @property
    def devices(self) -> list[str]:
        """Device strings, in order of logical processor number."""
        return [self._devices[p] for p in self._l2p]

    @property
    def device_assignment(self) -> Optional[DeviceAssignment]:
        """The tf DeviceAssignment of a TPU, or None."""
        return self._device_assignment

    @property
    def pnum_tensor(self) -> tf.Tensor:
        """The logical number of the current processor, an int32 scalar."""
        return self._collectives.pnum()

    def laid_out_pnum(self) -> SimdTensor:
        """Returns a LaidOutTensor of the current processor's number, an int32 scalar."""
        return SimdTensor([self.pnum_tensor])

    def laid_out_pcoord(self, mesh_axis: int) -> SimdTensor:
        """Returns a LaidOutTensor of the current processor's coordinate along a mesh axis."""
        # Looked up and not computed: one gather, or a constant where all coordinates are equal.
        return SimdTensor([self._collectives.own(self._collectives.coordinates(mesh_axis))])

    # -- computation

    def slicewise(self, fn: Callable, *inputs: object) -> Any:
        """Calls `fn` with the current processor's slices; see MeshImpl."""
        slices = [
            x.one_slice if isinstance(x, SimdTensor) else x
            for x in convert_args_to_laid_out_tensors(inputs)
        ]
        # All processors have one program, so that its constants can be shared wherever it runs.
        with at_device(""):
            y = fn(*slices)
        if isinstance(y, tuple):
            return tuple(SimdTensor([part]) for part in y)
        return SimdTensor([y])

    def einsum(self, equation: str, *slices: tf.Tensor) -> tf.Tensor:
        """Contracts the current processor's slices."""
        return contract(equation, *slices)

    def Print(
        self, x: SimdTensor, data: Sequence[SimdTensor], message: str, **kwargs: object
    ) -> SimdTensor:
        """Returns `x`; processor 0 prints its slices of `data`, unless XLA compiles the program."""
        if not self.program.orders_operations or self.program.is_compiled:
            return super().Print(x, data, message, **kwargs)
        x = x.to_laid_out_tensor().one_slice
        shown = [d.to_laid_out_tensor().one_slice for d in data]
        with not_advised():
            y = tf.cond(
                # One line for the program, not one for each processor.
                tf.equal(self.pnum_tensor, 0),
                lambda: tf.Print(x, shown, message, **kwargs),
                lambda: tf.identity(x),
            )
        return SimdTensor([y])

    def random(self, shape: Shape, tf_fn: Callable, kwargs: dict[str, Any]) -> SimdTensor:
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
        if not random_values.is_known(tf_fn):
            # Called on each processor, it would give each other values.
            whole = self.program.same_everywhere(
                lambda: tf_fn(shape.to_integer_list, seed=seed, **kwargs)
            )
            return self._own_slice(whole, shape)
        if key is None:
            key = self.random_key(seed)
        # Tensors: in the one program, the beginning is another number on each processor.
        begin = tf.unstack(self._begin(shape)) if len(shape) else []
        return SimdTensor(
            [
                random_values.random_slice(
                    key, shape.to_integer_list, begin, self.slice_shape(shape), tf_fn, kwargs
                )
            ]
        )

    def random_key(self, seed: Optional[int]) -> tf.Tensor:
        """Returns a new key for random numbers, the same one for all processors."""
        return self.program.random_key(seed)

    # -- communication

    @named_collective
    def allreduce(
        self, x: SimdTensor, mesh_axes: Sequence[int], reduction_fn_string: str
    ) -> SimdTensor:
        """Reduces slices over groups of processors; see MeshImpl."""
        x = x.to_laid_out_tensor()
        # A group of one has nothing to add up, and its collective would only cost time.
        mesh_axes = [axis for axis in single_axes(mesh_axes) if self.shape[axis].size > 1]
        if not mesh_axes:
            return x
        group = list_product(self.shape[axis].size for axis in mesh_axes)
        t = x.one_slice
        # bfloat16 has 8 bits of precision: a sum of many would lose small summands.
        widen = (
            t.dtype == tf.bfloat16 and reduction_fn_string == "SUM" and group > self._wide_groups
        )
        y = self._collectives.allreduce(
            tf.cast(t, tf.float32) if widen else t, mesh_axes, reduction_fn_string
        )
        return SimdTensor([tf.cast(y, t.dtype)])

    @named_collective
    def allconcat(
        self, x: SimdTensor, mesh_axis: int, concat_axis: int, stack: bool = False
    ) -> SimdTensor:
        """Concatenates the slices of the processors along a mesh axis; see MeshImpl.

        Args:
          x: a LaidOutTensor.
          mesh_axis: a mesh axis.
          concat_axis: the axis of the slices to concatenate along.
          stack: whether to stack along a new axis there instead.
        """
        x = x.to_laid_out_tensor()
        if self.shape[mesh_axis].size == 1:
            return SimdTensor([tf.expand_dims(x.one_slice, concat_axis)]) if stack else x
        stacked = self._collectives.allgather(x.one_slice, mesh_axis)
        if concat_axis == 0:  # in memory as it will be
            first, *others = x.slice_shape or [1]
            joined = [self.shape[mesh_axis].size * first, *others]
            return SimdTensor([stacked if stack else tf.reshape(stacked, constant(joined))])
        join = tf.stack if stack else tf.concat
        return SimdTensor([join(tf.unstack(stacked), concat_axis)])

    @named_collective
    def alltoall(
        self, x: SimdTensor, mesh_axis: int, split_axis: int, concat_axis: int
    ) -> SimdTensor:
        """Sends part i of each slice to processor i along a mesh axis; see MeshImpl."""
        x = x.to_laid_out_tensor()
        if self.shape[mesh_axis].size == 1:
            return x
        return SimdTensor(
            [self._collectives.alltoall(x.one_slice, mesh_axis, split_axis, concat_axis)]
        )

    @named_collective
    def receive(
        self, x: SimdTensor, mesh_axis: int, source_pcoord: Sequence[Optional[int]]
    ) -> SimdTensor:
        """Replaces each slice by that of another processor, or by zeros; see MeshImpl."""
        x = x.to_laid_out_tensor()
        # Everything stays where it is, as in a shift by a multiple of the size.
        if list(source_pcoord) == list(range(self.shape[mesh_axis].size)):
            return x
        if all(source is None for source in source_pcoord):
            return self.slicewise(tf.zeros_like, x)
        return SimdTensor([self._collectives.permute(x.one_slice, mesh_axis, source_pcoord)])

    # -- whole tensors

    def _begin(self, tensor_shape: Shape) -> tf.Tensor:
        """Returns where the current processor's slice begins, an int32 vector."""
        return self._collectives.own(
            [self.slice_begin(tensor_shape, pnum) for pnum in range(self.size)]
        )

    def slice(self, tf_tensor: tf.Tensor, tensor_shape: Shape) -> tf.Tensor:
        """Returns the current processor's slice of a whole tf.Tensor."""
        sizes = self.slice_shape(tensor_shape)
        if sizes == tensor_shape.to_integer_list:
            return tf_tensor
        for axis, d in enumerate(tensor_shape):
            tf_tensor = padded(tf_tensor, axis, self.padding(d))
        return tf.slice(tf_tensor, self._begin(tensor_shape), constant(sizes))

    def _own_slice(self, whole: tf.Tensor, tensor_shape: Shape) -> SimdTensor:
        piece = self.slice(whole, tensor_shape)
        piece.set_shape(self.slice_shape(tensor_shape))
        return SimdTensor([piece])

    def import_tf_tensor(self, x: Tensor, tf_x: tf.Tensor) -> SimdTensor:
        """Returns the LaidOutTensor of a whole tf.Tensor."""
        return self._own_slice(tf.convert_to_tensor(tf_x), x.shape)

    def export_to_tf_tensor(self, x: Tensor, laid_out_x: LaidOutLike) -> tf.Tensor:
        """Returns the whole value of a Tensor, on each processor."""
        value = SimdTensor(laid_out_x.to_laid_out_tensor().tensor_list)
        # On each processor, as what a program returns must be the same on all.
        for tensor_axis, mesh_axis in enumerate(self.tensor_layout(x)):
            if mesh_axis is not None:
                value = self.allconcat(value, mesh_axis, tensor_axis)
        return cut_to(value.one_slice, x.shape.to_integer_list)


class _MergedSimdMeshImpl(ExecutedMeshImpl, SimdMeshImpl):
    """The executed mesh of a SimdMeshImpl all of whose processors are one."""


replaceable(__name__)
