"""SimdProgram: the state of a SIMD program while it is traced."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.program import Program
from mesh_tensorflow._mesh.simd.reductions import Reduction
from mesh_tensorflow._mesh.slices import random_values

__all__ = ["SimdProgram", "current_program", "tracing"]

# The one that is being traced, in each thread.
_program: contextvars.ContextVar[Optional[SimdProgram]] = contextvars.ContextVar(
    "program", default=None
)


class SimdProgram(Program):
    """A program while it is traced.

    Attributes:
      devices: a device for each processor, by physical number.
      local: physical numbers of the processors that this process runs.
      graph: the tf graph of the function.
      pnum: the physical number of the processor that runs it, an int32 scalar.
      reductions: its reductions outside of loops, by the name of the tf operation.
      tables: for operations whose value is known, by their name: for each processor a text that
        is the same where the value is.
      binds_masters: whether slices may be the only place of a variable's value.
    """

    binds_masters = True
    orders_operations = True

    def __init__(self, devices: Sequence[str], local: Sequence[int], first_key: int):
        self.devices = list(devices)
        self.local = list(local)
        self.graph: Any = None
        self.pnum: Any = None
        self._next_key = first_key
        self.reductions: dict[str, Reduction] = {}
        self.tables: dict[str, list[str]] = {}
        self._own: dict[int, list[Any]] = {}
        self._parts: dict[int, list[Any]] = {}
        self._zeros: dict[Any, tf.Tensor] = {}

    def new_keys(self, count: int = 1) -> int:
        """Returns the first of some numbers that no other group or collective has."""
        first, self._next_key = self._next_key, self._next_key + count
        return first

    # -- places to make operations

    def outside(self) -> contextlib.AbstractContextManager:
        """Makes operations outside of the program."""
        return tf.init_scope()

    @contextlib.contextmanager
    def at_beginning(self) -> Iterator[None]:
        """Makes operations at the beginning of the program."""
        with self.graph.as_default(), tf.control_dependencies(None):
            yield

    # -- variables

    def make_slice(
        self, name: str, sizes: Sequence[int], dtype: tf.DType, trainable: bool, host: str
    ) -> Any:
        """Makes the tf variable of one slice, on the device in force; its value is zeros.

        Args:
          name: a string; it is named under the variable scope.
          sizes: its sizes.
          dtype: its dtype.
          trainable: whether it is among the trainable variables.
          host: where to make the zeros; one tensor does for all slices of this shape.
        """
        key = (tuple(sizes), dtype)
        if key not in self._zeros:
            with tf.device(host), tf.name_scope(None):
                self._zeros[key] = tf.zeros(sizes, dtype)
        return tf.get_variable(
            name,
            initializer=self._zeros[key],
            trainable=trainable,
            collections=["TPU_VAR"],
            use_resource=True,
        )

    def own_variable(self, name: str, slices: Sequence[Any], parts: Sequence[Any]) -> Any:
        """Returns the variable that is each processor's own within the program.

        Args:
          name: ignored.
          slices: tf variables by physical number.
          parts: by physical number, which part of the whole it is: equal for equal slices.
        """
        del name
        handles = [v.handle for v in slices]
        # The handles stay referenced, so that their ids stay theirs.
        self._own[id(handles[self.local[0]])] = handles
        self._parts[id(handles[self.local[0]])] = list(parts)
        return slices[self.local[0]]

    def own_tensor(self, parts: Sequence[Any]) -> tf.Tensor:
        """Returns the tensor that is each processor's own within the program.

        Args:
          parts: tf.Tensors made outside, by physical number, all of one shape and each made for
            one processor alone; those of other processes may be None.
        """
        # They stay referenced, so that their ids stay theirs.
        self._own[id(parts[self.local[0]])] = list(parts)
        self._parts[id(parts[self.local[0]])] = list(range(len(parts)))
        return parts[self.local[0]]

    # -- random values

    def random_key(self, seed: Optional[int]) -> tf.Tensor:
        """Returns a new key for random numbers, the same one for all processors."""
        return self.same_everywhere(lambda: random_values.new_key(seed))

    def same_everywhere(self, make: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Returns a value that is made once for all processors.

        Args:
          make: a function that makes a tf.Tensor.
        """
        with self.outside():
            return make()

    def is_own(self, handle: tf.Tensor) -> bool:
        """Returns whether each processor gets a variable of its own in place of this one."""
        return id(handle) in self._own

    def arguments(self, captured: Sequence[tf.Tensor], pnum: int) -> list[tf.Tensor]:
        """Returns the arguments of one processor's call for the captured inputs."""
        return [
            self._own[id(tensor)][pnum] if id(tensor) in self._own else tensor
            for tensor in captured
        ]

    def argument_keys(self, captured: Sequence[tf.Tensor], pnum: int) -> list[Any]:
        """Returns for each of `arguments` a key that equal values have in common."""
        return [
            (id(tensor), self._parts[id(tensor)][pnum]) if id(tensor) in self._own else id(tensor)
            for tensor in captured
        ]


@contextlib.contextmanager
def tracing(program: SimdProgram) -> Iterator[None]:
    """Makes a program the one that is being traced in this thread."""
    token = _program.set(program)
    try:
        yield
    finally:
        _program.reset(token)


def current_program() -> Optional[SimdProgram]:
    """Returns the program that is being traced, or None."""
    return _program.get()
