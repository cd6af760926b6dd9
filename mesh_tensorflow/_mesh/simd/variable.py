"""The tensors and variables of SimdMeshImpl."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.mesh_impl import LaidOutTensor
from mesh_tensorflow._mesh.variables.slice_variables import SliceVariables

if TYPE_CHECKING:
    from mesh_tensorflow.ops import Variable
    from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl


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


class MadeWhenAsked(Sequence[tf.Variable]):
    """Slice variables by physical number, some of which are made when they are first asked for."""

    def __init__(self, make: Callable[[int], tf.Variable], size: int, now: Sequence[int]):
        """Makes some slice variables.

        Args:
          make: makes the slice variable of a number, in the default graph and variable scope.
          size: how many there are.
          now: the numbers of those that are made at once.
        """
        self._make = make
        self._size = size
        # Those of later are made here, too, wherever they are asked for.
        self._graph = tf.get_default_graph()
        self._scope = tf.get_variable_scope()
        self._made = {number: make(number) for number in now}

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < self._size:
            # By this error Python ends a loop over a Sequence that has no iterator of its own.
            raise IndexError(number)
        if number not in self._made:
            with (
                self._graph.as_default(),
                tf.init_scope(),
                tf.variable_scope(self._scope, auxiliary_name_scope=False),
            ):
                self._made[number] = self._make(number)
        return self._made[number]


class _ByLogicalNumber(Mapping[int, tf.Variable]):
    """Slice variables by logical number."""

    def __init__(self, made: Sequence[tf.Variable], impl: SimdMeshImpl):
        self._made = made
        self._impl = impl

    def __getitem__(self, pnum: int) -> tf.Variable:
        return self._made[self._impl.l2p(pnum)]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._made)))

    def __len__(self) -> int:
        return len(self._made)


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
            made = self._make_slices(variable, sorted(program.local))
            self.owner = list(range(mesh_impl.size))
            if len(program.local) == mesh_impl.size:  # sessions fetch dictionaries
                self.slices = {l: made[l2p(l)] for l in self.owner}
            else:
                self.slices = _ByLogicalNumber(made, mesh_impl)
            self._own = program.own_variable(variable.name, made)
        # Before the base class, which binds the masters that nothing uses.
        if not program.binds_masters:
            for master in variable.masters:
                # On a TPU a master stays on the host: initializing and saving need no TPU then.
                master.keep()
        super().__init__(variable)
        # Held weakly, since a tensor keeps the graph of the program in memory.
        self._value: Optional[weakref.ref[tf.Tensor]] = None

    def _make_slices(self, variable: Variable, local: Sequence[int]) -> Sequence[tf.Variable]:
        """Returns new slice variables, by physical number.

        Those of this process's processors are made at once, those of other processes' when they are
        first asked for, such as by the process that sets initial values. A program for many
        processors is built in the time of its own.
        """
        impl = self.mesh_impl
        sizes = impl.slice_shape(variable.stored_shape)
        # TensorFlow has no public name for them. Where the private one is missing there are none.
        functions = getattr(tf.get_default_graph(), "_device_functions_outer_to_inner", ())
        impl.graph_device_function_stacks.append(list(functions))

        def make(physical: int) -> tf.Variable:
            with tf.device(impl.devices[impl.p2l(physical)]):
                return impl.program.make_slice(
                    f"{variable.name}_slice_{physical}",
                    sizes,
                    variable.slice_dtype,
                    variable.trainable,
                    variable.master_device,
                )

        return MadeWhenAsked(make, impl.size, local)

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
            made = assign_fn(self._variable, target, value)
        return tf.no_op() if made is None else tf.group(made)
