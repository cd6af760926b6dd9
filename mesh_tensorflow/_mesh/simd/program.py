"""SimdProgram: the state of a program that all processors run, while it is traced.

It notes which captured tensors differ between processors, and gives out the keys of collectives.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh import random_values
from mesh_tensorflow._mesh.program import Program

# The program that is being traced, in each thread.
_program: contextvars.ContextVar[Optional[SimdProgram]] = contextvars.ContextVar(
    "program", default=None
)


class SimdProgram(Program):
    """The state of a program while it is traced.

    Attributes:
      devices: a device for each processor, by physical number.
      local: physical numbers of the processors that this process runs.
      graph: the tf graph of the traced function.
      pnum: the physical number of the processor that runs the program, an int32 scalar.
      binds_masters: whether slices may be the only place of a variable's value.
      orders_operations: whether operations can be made to wait for others, and print.
    """

    graph: tf.Graph
    pnum: tf.Tensor

    binds_masters = True
    orders_operations = True

    def __init__(self, devices: Sequence[str], local: Sequence[int], first_key: int):
        self.devices = list(devices)
        self.local = list(local)
        self._next_key = first_key
        self._own: dict[int, Mapping[int, Optional[tf.Tensor]]] = {}
        self._zeros: dict[Hashable, tf.Tensor] = {}

    def new_keys(self, count: int = 1) -> int:
        """Returns the first of `count` keys that no other group or collective has."""
        first, self._next_key = self._next_key, self._next_key + count
        return first

    # -- places to make operations

    def outside(self) -> contextlib.AbstractContextManager:
        """Makes operations outside of the program."""
        return tf.init_scope()

    @contextlib.contextmanager
    def at_beginning(self) -> Iterator[None]:
        """Makes operations at the beginning of the program."""
        # The outermost graph: the body of a loop may be the default one, and runs later.
        with self.graph.as_default(), tf.control_dependencies(None):
            yield

    # -- variables

    def make_slice(
        self, name: str, sizes: Sequence[int], dtype: tf.DType, trainable: bool, host: str
    ) -> tf.Variable:
        """Makes the slice variable of one slice, of zeros, on the device in force.

        Args:
          name: a string, relative to the variable scope.
          sizes: sizes of the slice.
          dtype: a tf.DType.
          trainable: whether it is added to the trainable variables.
          host: the device of the zeros; slices of one shape share them.
        """
        key = (tuple(sizes), dtype)
        if key not in self._zeros:
            # One node for all slices of a shape, not one for each processor and variable.
            with tf.device(host), tf.name_scope(None):
                self._zeros[key] = tf.zeros(sizes, dtype)
        return tf.get_variable(
            name,
            initializer=self._zeros[key],
            trainable=trainable,
            collections=["TPU_VAR"],
            use_resource=True,
        )

    def own_variable(self, name: str, slices: Sequence[tf.Variable]) -> tf.Variable:
        """Returns a variable that stands for each processor's own slice within the program.

        Args:
          name: ignored.
          slices: slice variables by physical number; only those of this process are used.
        """
        del name
        # The program captures the first handle; each call gets its own in place of it. Holding the
        # handles keeps their ids from being reused.
        handles = {pnum: slices[pnum].handle for pnum in self.local}
        self._own[id(handles[self.local[0]])] = handles
        return slices[self.local[0]]

    def own_tensor(self, parts: Sequence[Optional[tf.Tensor]]) -> tf.Tensor:
        """Returns a tensor that stands for each processor's own tensor within the program.

        Args:
          parts: tf.Tensors from outside of the program, by physical number, of one shape and each
            for one processor alone; those of other processes' processors may be None.
        """
        # Holding the tensors keeps their ids from being reused.
        self._own[id(parts[self.local[0]])] = dict(enumerate(parts))
        return parts[self.local[0]]

    # -- random values

    def random_key(self, seed: Optional[int]) -> tf.Tensor:
        """Returns a new key for random numbers, the same on all processors."""
        return self.same_everywhere(lambda: random_values.new_key(seed))

    def same_everywhere(self, make: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Returns a value that is computed once for all processors.

        Args:
          make: a function that makes a tf.Tensor.
        """
        # One node, of which all calls get the value; within the program each would draw its own.
        with self.outside():
            return make()

    def is_own(self, handle: tf.Tensor) -> bool:
        """Returns whether the calls of processors get tensors of their own in place of this one."""
        return id(handle) in self._own

    def arguments(self, captured: Sequence[tf.Tensor], pnum: int) -> list[tf.Tensor]:
        """Returns the arguments of one processor's call for the captured inputs."""
        return [
            self._own[id(tensor)][pnum] if id(tensor) in self._own else tensor
            for tensor in captured
        ]


@contextlib.contextmanager
def tracing(program: SimdProgram) -> Iterator[None]:
    """Makes a program the current one of this thread within a `with` block."""
    token = _program.set(program)
    try:
        yield
    finally:
        _program.reset(token)


def current_program() -> Optional[SimdProgram]:
    """Returns the program that is being traced in this thread, or None."""
    return _program.get()
