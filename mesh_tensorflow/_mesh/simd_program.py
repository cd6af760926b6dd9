"""One program for all processors: traced once, called on each of them.

Within `replicate`, the default tf graph is that of a function with the processor's number as an
argument. What a program uses from outside is passed to each call; of a variable that has a slice
for each processor, each call gets its own.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh import random_slices
from mesh_tensorflow._mesh.devices import default_devices, device_spec
from mesh_tensorflow._mesh.simd_calls import call_on_each, results_of
from mesh_tensorflow._mesh.simd_reductions import Reduction

__all__ = ["SimdProgram", "current_program", "replicate"]

# The one that is being traced, in each thread.
_program: contextvars.ContextVar[Optional[SimdProgram]] = contextvars.ContextVar(
    "program", default=None)
_count_on: collections.Counter = collections.Counter()  # programs, by their devices
_counting = threading.Lock()
# Keys of groups of processors, and of collectives: programs must not share them.
_KEYS_PER_PROGRAM = 2**16
_MOST_PROGRAMS = 2**13


class SimdProgram:
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
            name, initializer=self._zeros[key], trainable=trainable, collections=["TPU_VAR"],
            use_resource=True)

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
        return self.same_everywhere(lambda: random_slices.new_key(seed))

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
        """Returns what one processor's call gets for what the program uses from outside."""
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


def current_program() -> Optional[SimdProgram]:
    """Returns the program that is being traced, or None."""
    return _program.get()


def _first_key(devices: Sequence[str]) -> int:
    """Returns the first key of the next program on some devices.

    Servers remember keys for as long as they run, whatever the tf graph. Processes agree about
    them as each makes the same programs of all devices in the same order.
    """
    with _counting:
        number = _count_on[tuple(devices)]
        _count_on[tuple(devices)] += 1
    return 1 + number % _MOST_PROGRAMS * _KEYS_PER_PROGRAM


def replicate(
    computation: Callable[..., Any],
    inputs: Sequence[Any] = (),
    devices: Optional[Sequence[str]] = None,
    local: Optional[Sequence[int]] = None,
    share_memory: bool = True,
) -> Any:
    """Makes one program run on each of several processors, as tpu.rewrite does on a TPU.

    The computation makes a Lowering with a SimdMeshImpl of as many processors. It is traced once,
    whatever the number of processors. All of it runs whenever one of its results is asked for.
    Processors of one memory, that is a few CPUs of one process, take from each other what is equal
    on them. All others communicate by TensorFlow's collectives.
    A step waits for all processors; `tf.RunOptions(timeout_in_ms=...)` limits how long.

    Args:
      computation: a function of `inputs` that returns tf.Tensors and tf.Operations, in lists,
        tuples or dictionaries. Its Tensors must be the same on all processors, as exports are.
      inputs: tf.Tensors; each processor gets them whole.
      devices: a device for each processor; in a session of a server, with its job and task. If
        None, the GPUs that TensorFlow finds, else its logical CPUs.
      local: the numbers of the processors that this process runs; all of them if None.
      share_memory: False to have processors of one memory compute everything themselves, and
        communicate by TensorFlow's collectives, as those of several processes do.

    Returns:
      What `computation` returns, with a tf.Tensor or tf.Operation of the calling graph for each.

    Raises:
      ValueError: it is called in eager code or within another program, two processors are to be
        on one device, or `local` has none of the processors.
    """
    if tf.executing_eagerly_outside_functions():
        raise ValueError(
            "replicate makes programs of tf.compat.v1 graphs: call it within "
            "`with tf.Graph().as_default():` and run its results in a tf.Session"
        )
    if current_program() is not None:
        raise ValueError("replicate was called within a program that is being replicated")
    devices = list(default_devices() if devices is None else devices)
    local = list(range(len(devices)) if local is None else local)
    _check_distinct(devices)
    _check_local(local, devices)
    program = SimdProgram(devices, local, _first_key(devices))
    structure: list[Any] = []
    global_step = tf.get_collection_ref(tf.GraphKeys.GLOBAL_STEP)

    def traced(pnum: tf.Tensor, *arguments: tf.Tensor) -> list[tf.Tensor]:
        program.graph, program.pnum = tf.get_default_graph(), pnum
        # Else one that is made in the program would not be found there. There is no public way.
        program.graph._collections[tf.GraphKeys.GLOBAL_STEP] = global_step
        token = _program.set(program)
        try:
            with tf.variable_creator_scope(_made_outside):
                results = computation(*arguments)
        finally:
            _program.reset(token)
        structure.append(results)
        return [_as_tensor(result) for result in tf.nest.flatten(results)]

    inputs = [tf.convert_to_tensor(x) for x in inputs]
    try:
        function = tf2.function(
            traced, autograph=False, experimental_attributes={"_noinline": True}
        ).get_concrete_function(
            tf2.TensorSpec([], tf.int32), *[tf2.TensorSpec(x.shape, x.dtype) for x in inputs]
        )
    except TypeError as e:
        if "_ref" in str(e):
            raise TypeError(
                "a replicated program assigns to a variable that was made outside of it and is "
                "no resource variable: call tf.compat.v1.enable_resource_variables() first, or "
                f"make it within tf.variable_scope(..., use_resource=True)\n  {e}"
            ) from e
        raise
    calls = call_on_each(program, function, inputs, share_memory)
    return results_of(program, structure[-1], calls)


def _check_distinct(devices: Sequence[str]) -> None:
    """Raises ValueError if processors share a device: in collectives they would wait for ever."""
    counts = collections.Counter(device_spec(d).to_string() for d in devices)
    repeated = [device for device, n in counts.items() if n > 1]
    if repeated:
        raise ValueError(
            f"each processor of a replicated program needs a device of its own, but {devices} "
            f"names {', '.join(map(repr, repeated))} more than once. Logical CPUs are "
            f"{[f'/cpu:{i}' for i in range(len(devices))]}, in a session with "
            f'tf.compat.v1.ConfigProto(device_count={{"CPU": {len(devices)}}})'
        )


def _check_local(local: Sequence[int], devices: Sequence[str]) -> None:
    """Raises ValueError unless this process runs some of the processors, each once."""
    if not devices:
        raise ValueError(
            "replicate: devices is empty: give one for each processor, or None for those there are"
        )
    if not local or len(set(local)) < len(local) or not set(local) <= set(range(len(devices))):
        raise ValueError(
            f"replicate: local must have numbers from 0 to {len(devices) - 1}, each at most once "
            f"and at least one: those of the {len(devices)} processors ({', '.join(devices)}) that "
            f"this process runs. It is {local}; None means all"
        )


def _made_outside(next_creator: Callable[..., Any], **arguments: Any) -> Any:
    """Makes a variable of the calling graph, in the process that calls."""
    del next_creator
    program = _program.get()
    assert program is not None
    spec = tf.DeviceSpec.from_string(program.devices[program.local[0]])
    process = spec.replace(device_type=None, device_index=None).to_string()
    with tf.init_scope(), tf.device(process or None):
        return tf.Variable(**{**arguments, "use_resource": True})


def _as_tensor(result: Any) -> tf.Tensor:
    """Returns a result of a computation as a function can return it."""
    if isinstance(result, tf.Operation):
        with tf.control_dependencies([result]):
            return tf.constant(True)
    return tf.convert_to_tensor(result)
