"""One program for all processors: traced once, called on each of them.

Within `replicate`, the default tf graph is that of a function with the processor's number as an
argument. What a program uses from outside is passed to each call; of a variable that has a slice
for each processor, each call gets its own.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any, Optional

import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.devices import default_devices, device_spec
from mesh_tensorflow._mesh.simd.calls import call_on_each, results_of
from mesh_tensorflow._mesh.simd.program import SimdProgram, current_program, tracing

__all__ = ["replicate"]

_count_on: collections.Counter = collections.Counter()  # programs, by their devices
_counting = threading.Lock()
# Keys of groups of processors, and of collectives: programs must not share them.
_KEYS_PER_PROGRAM = 2**16
_MOST_PROGRAMS = 2**13


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
        with tracing(program), tf.variable_creator_scope(_made_outside):
            results = computation(*arguments)
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
    program = current_program()
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
