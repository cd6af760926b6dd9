"""One program for all processors: traced once, called on each of them.

Within `replicate`, the default tf graph is that of a function with the processor's number as an
argument. What a program uses from outside is passed to each call; of a variable that has a slice
for each processor, each call gets its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh import random_slices
from mesh_tensorflow._mesh.devices import default_devices

__all__ = ["SimdProgram", "current_program", "replicate"]

_programs: list[SimdProgram] = []
# Keys of groups of processors, and of collectives, are the session's; programs must not share them.
_KEYS_PER_PROGRAM = 2**16
_WAKE_UP_GROUP = 2**30


class SimdProgram:
    """A program while it is traced.

    Attributes:
      devices: a device for each processor, by physical number.
      local: physical numbers of the processors that this process runs.
      graph: the tf graph of the function.
      pnum: the physical number of the processor that runs it, an int32 scalar.
      binds_masters: whether slices may be the only place of a variable's value.
    """

    binds_masters = True

    def __init__(self, devices: Sequence[str], local: Sequence[int], first_key: int):
        self.devices = list(devices)
        self.local = list(local)
        self.graph: Any = None
        self.pnum: Any = None
        self._next_key = first_key
        self._own: dict[int, list[Any]] = {}

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
          host: ignored; the zeros are made on its own device.
        """
        del host
        return tf.get_variable(
            name, sizes, dtype=dtype, initializer=tf.zeros_initializer(), trainable=trainable,
            collections=["TPU_VAR"], use_resource=True)

    def own_variable(self, name: str, slices: Sequence[Any]) -> Any:
        """Returns the variable that is each processor's own within the program.

        Args:
          name: ignored.
          slices: tf variables by physical number.
        """
        del name
        handles = [v.handle for v in slices]
        # The handles stay referenced, so that their ids stay theirs.
        self._own[id(handles[self.local[0]])] = handles
        return slices[self.local[0]]

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

    def arguments(self, captured: Sequence[tf.Tensor], pnum: int) -> list[tf.Tensor]:
        """Returns what one processor's call gets for what the program uses from outside."""
        return [
            self._own[id(tensor)][pnum] if id(tensor) in self._own else tensor
            for tensor in captured
        ]


def current_program() -> Optional[SimdProgram]:
    """Returns the program that is being traced, or None."""
    return _programs[-1] if _programs else None


def _first_key() -> int:
    """Returns the first key of the next program of this tf graph."""
    [count] = tf.get_collection_ref("mtf_simd_programs") or [0]
    tf.get_collection_ref("mtf_simd_programs")[:] = [count + 1]
    return 1 + count * _KEYS_PER_PROGRAM


def replicate(
    computation: Callable[..., Any],
    inputs: Sequence[Any] = (),
    devices: Optional[Sequence[str]] = None,
    local: Optional[Sequence[int]] = None,
) -> Any:
    """Makes one program run on each of several processors, as tpu.rewrite does on a TPU.

    The computation makes a Lowering with a SimdMeshImpl of as many processors. It is traced once,
    whatever the number of processors. All of it runs whenever one of its results is asked for.
    A step waits for all processors; `tf.RunOptions(timeout_in_ms=...)` limits how long.

    Args:
      computation: a function of `inputs` that returns tf.Tensors and tf.Operations, in lists,
        tuples or dictionaries. Its Tensors must be the same on all processors, as exports are.
      inputs: tf.Tensors; each processor gets them whole.
      devices: a device for each processor. If None, the GPUs that TensorFlow finds, else its
        logical CPUs.
      local: the numbers of the processors that this process runs; all of them if None.

    Returns:
      What `computation` returns, with a tf.Tensor or tf.Operation of the calling graph for each.

    Raises:
      ValueError: it is called in eager code or within another program.
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
    program = SimdProgram(devices, local, _first_key())
    structure: list[Any] = []

    def traced(pnum: tf.Tensor, *arguments: tf.Tensor) -> list[tf.Tensor]:
        program.graph, program.pnum = tf.get_default_graph(), pnum
        _programs.append(program)
        try:
            results = computation(*arguments)
        finally:
            _programs.pop()
        structure.append(results)
        return [_as_tensor(result) for result in tf.nest.flatten(results)]

    inputs = [tf.convert_to_tensor(x) for x in inputs]
    function = tf2.function(
        traced, autograph=False, experimental_attributes={"_noinline": True}
    ).get_concrete_function(
        tf2.TensorSpec([], tf.int32), *[tf2.TensorSpec(x.shape, x.dtype) for x in inputs]
    )
    calls = _calls(program, function, inputs)
    return _results(program, structure[-1], calls)


def _as_tensor(result: Any) -> tf.Tensor:
    """Returns a result of a computation as a function can return it."""
    if isinstance(result, tf.Operation):
        with tf.control_dependencies([result]):
            return tf.constant(True)
    return tf.convert_to_tensor(result)


def _calls(program: SimdProgram, function: Any, inputs: Sequence[tf.Tensor]) -> list[list]:
    """Calls the function on each processor; returns the outputs of each call."""
    function.add_to_graph(tf.get_default_graph())
    call = getattr(function, "_inference_function", None) or function.inference_fn
    calls = []
    for pnum in program.local:
        with tf.device(program.devices[pnum]), tf.control_dependencies([_wake_up(program)]):
            own = program.arguments(function.captured_inputs, pnum)
            outputs = call.call_flat(tf.constant(pnum), *inputs, *own)
            calls.append(list(outputs))
    return calls


def _wake_up(program: SimdProgram) -> tf.Operation:
    """Returns a collective of one member: sessions prepare for collectives only if they see one."""
    found = tf.get_collection_ref("mtf_simd_wake_up")
    if not found:
        first = program.local[0]
        with tf.device(program.devices[first]):
            found.append(tf.raw_ops.CollectiveReduceV2(
                input=tf.zeros([1]), group_size=1, group_key=_WAKE_UP_GROUP + first, instance_key=1,
                ordering_token=[], merge_op="Add", final_op="Id").op)
    return found[0]


def _results(program: SimdProgram, structure: Any, calls: Sequence[Sequence[tf.Tensor]]) -> Any:
    """Returns the results of the first processor, in the structure of the computation's.

    Each waits for all processors, so that whatever is asked for, no processor is left out.
    """
    if not calls[0]:
        return structure
    everyone = [outputs[0].op for outputs in calls]
    flat = []
    with tf.device(program.devices[program.local[0]]), tf.control_dependencies(everyone):
        for result, output in zip(tf.nest.flatten(structure), calls[0]):
            if isinstance(result, tf.Operation):
                flat.append(tf.group(*everyone))
                continue
            value = tf.identity(output)
            value.set_shape(result.shape if tf.is_tensor(result) else output.shape)
            flat.append(value)
    return tf.nest.pack_sequence_as(structure, flat)
