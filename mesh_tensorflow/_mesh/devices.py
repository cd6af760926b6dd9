"""Devices: of a process, of a session's configuration and of a mesh; which share memory, and
whether XLA compiles the whole function that is traced for one.

Collectives between two devices that a session has put in one place would wait for each other
forever, without a message. Which devices a session has is not known while its graph is built, so
that check runs with the step.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import os
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import tensorflow as tf2
import tensorflow.compat.v1 as tf
from tensorflow.python.eager import context

from mesh_tensorflow._calls import within
from mesh_tensorflow._core.errors import dims_text, mesh_shapes_that_fit, slip
from mesh_tensorflow._core.layout import (
    LayoutLike,
    LayoutRules,
    convert_to_layout_rules,
    joined_names,
    pnum_to_processor_coordinates,
    processor_groups,
)
from mesh_tensorflow._core.shape import Shape, ShapeLike, convert_to_shape, list_product
from mesh_tensorflow._units import plural

# A device string, or a tf.DeviceSpec, which tf.device takes too.
DeviceLike = Union[str, tf2.DeviceSpec]

_compiled: contextvars.ContextVar[bool] = contextvars.ContextVar("compiled", default=False)


def compiling(whole: bool = True) -> contextlib.AbstractContextManager[None]:
    """Says whether XLA compiles all of a function that is traced within.

    Args:
      whole: whether it does.
    """
    return within(_compiled, whole)


def is_compiled_whole() -> bool:
    """Returns whether XLA compiles all of the function that is traced."""
    return _compiled.get()


def default_devices() -> list[str]:
    """Returns the logical GPUs of this process, or its logical CPUs if there are none."""
    for kind in ("GPU", "CPU"):
        logical = tf.config.list_logical_devices(kind)
        if logical:
            return [f"/device:{kind}:{i}" for i in range(len(logical))]
    return []


def devices_for(count: int, otherwise: Optional[str] = None) -> list[str]:
    """Returns a device for each processor of a mesh whose devices a session has.

    Args:
      count: the number of processors.
      otherwise: the device of all of them if there are fewer GPUs, such as "" for TensorFlow's
        choice; a logical CPU for each if None.
    """
    # Those of the machine: to ask for logical ones would fix how many this process has.
    if len(tf.config.list_physical_devices("GPU")) >= count:
        return [f"/device:GPU:{i}" for i in range(count)]
    return [f"/device:CPU:{i}" if otherwise is None else otherwise for i in range(count)]


def device_spec(device: DeviceLike) -> tf2.DeviceSpec:
    """Returns the DeviceSpec of a device, a string or a DeviceSpec.

    Raises:
      ValueError: it is malformed.
    """
    # That of TensorFlow 1 is a subclass.
    if isinstance(device, tf2.DeviceSpec):
        return device
    try:
        # DeviceSpec.from_string fails on other types, too, but with no ValueError.
        if device is not None and not isinstance(device, str):
            raise ValueError(f"it is of type {type(device).__name__}")
        return tf.DeviceSpec.from_string(device or "")
    except ValueError as e:
        raise ValueError(
            f'{device!r} is no device. Devices are strings such as "cpu:0", "/device:GPU:1" or '
            f'"/job:worker/task:2/device:CPU:0"; "" leaves it to TensorFlow ({e})'
        ) from None


def device_name(device: DeviceLike) -> str:
    """Returns a device string as it is, and that of a DeviceSpec."""
    return device.to_string() if isinstance(device, tf2.DeviceSpec) else device


def host_cpu(device: str) -> str:
    """Returns the first CPU of the process that has a device, where its host's values are.

    Args:
      device: a device string.
    """
    return device_spec(device).replace(device_type="CPU", device_index=0).to_string()


def local_device(device: str) -> Optional[tuple[str, int]]:
    """Returns the kind and number of a device of this process, as in ("GPU", 0).

    Args:
      device: a device string.

    Returns:
      None if the choice is left to TensorFlow, or the device is of another process.

    Raises:
      ValueError: it is malformed.
    """
    spec = device_spec(device)
    if spec.job not in (None, "localhost") or not spec.device_type:
        return None
    return spec.device_type, spec.device_index or 0


def _devices_here(in_session: bool) -> list[tuple[str, int]]:
    """Returns the kinds and numbers of the devices that this process has.

    Args:
      in_session: whether a session is meant. What it has is found without TensorFlow's eager
        runtime, which would fix the threads of the process and take the memory of GPUs.
    """
    if not in_session:
        with tf.init_scope():
            names = [d.name for d in tf.config.list_logical_devices()]
        return sorted((s.device_type, s.device_index or 0) for s in map(device_spec, names))
    counts: collections.Counter = collections.Counter()
    for device in tf.config.get_visible_devices():
        configured = tf.config.get_logical_device_configuration(device)
        # A device without a configuration of its own is one logical device.
        counts[device.device_type] += len(configured or [None])
    return sorted((kind, i) for kind, count in counts.items() for i in range(count))


def devices_text(places: Sequence[tuple[str, int]]) -> str:
    """Returns kinds and numbers of devices as text, such as "CPU:0, GPU:0"."""
    return ", ".join(f"{kind}:{number}" for kind, number in places)


def absent_devices(
    devices: Sequence[str], in_session: bool
) -> tuple[list[str], list[tuple[str, int]]]:
    """Returns those devices which should be of this process, but are not there.

    Args:
      devices: device strings.
      in_session: whether they are those of a session, which has as many logical CPUs as its
        configuration says.

    Returns:
      (some of the devices, the kinds and numbers of all that are there).
    """
    existing = _devices_here(in_session)
    places = {device: local_device(device) for device in dict.fromkeys(devices)}
    absent = [
        device
        for device, place in places.items()
        if place is not None and place not in existing and not (in_session and place[0] == "CPU")
    ]
    return absent, existing


def check_devices_exist(
    devices: Sequence[str], soft: Optional[bool], in_session: bool, who: str
) -> None:
    """Checks that this process has the devices that a user names.

    Args:
      devices: device strings; those of other processes are not checked.
      soft: whether TensorFlow runs elsewhere what is placed on absent ones, which is a slip, and
        no error; None if it can't.
      in_session: see `absent_devices`.
      who: what was given the devices, for the message.

    Raises:
      ValueError: one is not there, and `soft` is false or slips are errors.
    """
    absent, existing = absent_devices(devices, in_session)
    if not absent:
        return
    more = ", and as many logical CPUs as a session is given" if in_session else ""
    text = (
        f"{who}: this process has no device {', '.join(map(repr, absent))}"
        f"{'; what is placed there runs elsewhere' if soft else ''}. It has "
        f"{devices_text(existing)}{more}. Name these, or make several logical "
        "devices of one with tf.config.set_logical_device_configuration"
    )
    if soft:
        # Told once for the same devices, however many meshes a program makes of them.
        slip(text, key=f"devices/{absent}")
        return
    if soft is not None:
        text += (
            ". If what is placed on absent devices should run on others, call "
            "tf.config.set_soft_device_placement(True)"
        )
    raise ValueError(text)


def soft_placement(default: bool) -> bool:
    """Returns whether eager code runs elsewhere what is placed on absent devices.

    Args:
      default: what is returned unless the program has called tf.config.set_soft_device_placement;
        in TensorFlow it is true in eager code.
    """
    # tf.config.get_soft_device_placement answers with a default, too, and so cannot tell a choice.
    chosen = getattr(context.context(), "_soft_device_placement", None)
    return default if chosen is None else chosen


def are_whole_gpus(devices: Sequence[str]) -> bool:
    """Returns whether devices are GPUs that collectives may connect.

    Those of this process are there, and none is one of several logical devices of one GPU.

    Args:
      devices: device strings.
    """
    if any(device_spec(device).device_type != "GPU" for device in devices):
        return False
    # What other processes have is not known here; they are trusted to have what is named.
    if all(local_device(device) is None for device in devices):
        return True
    absent, existing = absent_devices(devices, not tf.executing_eagerly_outside_functions())
    # NCCL refuses two members on one GPU, which is what logical devices of one would be.
    logical = sum(kind == "GPU" for kind, _ in existing)
    return not absent and logical == len(tf.config.get_visible_devices("GPU"))


_cpus_are_apart: contextvars.ContextVar[bool] = contextvars.ContextVar("apart", default=False)


def separate_memories() -> contextlib.AbstractContextManager[None]:
    """Makes each logical CPU count as a separate memory domain, as GPUs do."""
    return within(_cpus_are_apart, True)


def memory_domain(device: str) -> str:
    """Returns the name of a device's memory domain.

    The CPU devices of one task share one, unless `separate_memories`; every other device has its
    own.
    """
    spec = device_spec(device)
    # "cpu:0" and "/job:localhost/cpu:0" are one device of this process.
    job = None if spec.job == "localhost" else spec.job
    task = "localhost" if job is None else f"{job}/{spec.replica or 0}/{spec.task}"
    # What is left to TensorFlow counts as a CPU of the task.
    if spec.device_type in (None, "CPU") and not _cpus_are_apart.get():
        return f"{task}/CPU"
    return f"{task}/{spec.device_type or 'CPU'}:{spec.device_index or 0}"


def merged_processors(mesh_shape: Shape, places: Sequence[str]) -> tuple[Shape, list[int]]:
    """Merges the processors at one place, and returns the executed mesh.

    Args:
      mesh_shape: a Shape.
      places: for each processor the name of its place, such as a device.

    Returns:
      (the mesh shape, with size 1 for each dimension along which the processors of every group are
      at one place; the processors that remain).
    """
    sizes = []
    for axis, d in enumerate(mesh_shape):
        groups = processor_groups(mesh_shape, [axis])
        # Only if it is so of all groups along the axis: the executed mesh is a mesh, too.
        same = all(len({places[p] for p in group}) == 1 for group in groups)
        sizes.append(1 if same else d.size)

    def remains(pnum: int) -> bool:
        coordinates = pnum_to_processor_coordinates(mesh_shape, pnum)
        # Of merged processors the one with coordinate 0 stays, whose place is that of all.
        return all(c == 0 or size > 1 for c, size in zip(coordinates, sizes))

    shape = Shape([(d.name, size) for d, size in zip(mesh_shape, sizes)])
    return shape, [p for p in range(mesh_shape.size) if remains(p)]


def check_devices(devices: object, mesh_shape: Shape) -> None:
    """Checks that there is a device for each processor of a mesh.

    Raises:
      TypeError: `devices` is not a list.
      ValueError: a device is malformed, or their number is wrong; the message lists mesh shapes
        that match it.
    """
    if not isinstance(devices, (list, tuple)):
        raise TypeError(
            f"devices must be a list of device strings, not {type(devices).__name__}: "
            f"pass list(devices)"
        )
    # In order and once: meshes of one device name it as often as they have processors.
    for device in dict.fromkeys(devices):
        device_spec(device)
    have, need = len(devices), mesh_shape.size
    if have == need:
        return
    fits = mesh_shapes_that_fit(mesh_shape.dims, have)
    fits_text = f" Mesh shapes that fit {have}: {'; '.join(fits)}." if fits else ""
    raise ValueError(
        f"the mesh {dims_text(mesh_shape)} needs {need} devices, but there are {have}: "
        f"{devices}.{fits_text} Or give {need} devices: one may be named several "
        f'times, as in ["cpu:0"] * {need}, and '
        "tf.config.set_logical_device_configuration makes several logical CPUs of one"
    )


def mesh_text(shape: Shape, rules: object, devices: Sequence[str]) -> str:
    """Returns one line about a mesh: its shape, the layout rules, and its devices.

    Args:
      shape: the Shape of the mesh.
      rules: its LayoutRules.
      devices: the device of each processor, or an empty list if they are not known.
    """
    pairs = ", ".join(f"{t}:{m}" for t, m in getattr(rules, "written", ()))
    names = dict.fromkeys(map(device_name, devices))
    kinds = [name or "a device of TensorFlow's choice" for name in names]
    where = f" on {', '.join(kinds[:4])}{', ...' if len(kinds) > 4 else ''}" if kinds else ""
    return (
        f"{dims_text(shape) or 'one processor'}; "
        f"{f'layout {pairs}' if pairs else 'no layout rules'}; "
        f"{shape.size} {plural('processor', shape.size)}{where}"
    )


def check_rules(layout_rules: LayoutRules, mesh_shape: Shape) -> None:
    """Checks that every rule of a layout names a dimension of the mesh.

    Raises:
      ValueError: one does not.
    """
    unknown = layout_rules.unknown_mesh_dimensions(mesh_shape)
    if unknown:
        raise ValueError(
            f"unknown mesh dimension {', '.join(map(repr, unknown))} in {layout_rules}: "
            f"the mesh has {dims_text(mesh_shape)}. Correct the rule, add the dimension to "
            "the mesh, or pass strict_layout=False to ignore such rules"
        )


def check_distinct_devices(devices: Sequence[str], mend: str) -> tf.Operation:
    """Returns an operation that fails if a session has put two of some devices in one place.

    That is what soft placement does with absent devices; and collectives between members on one
    device wait forever. Each device has its own resources: what each writes, it reads again.

    Args:
      devices: device strings, all different.
      mend: what else to do than to name other devices, for the message.
    """
    devices = [device_name(device) for device in devices]
    scope = tf.get_default_graph()._get_control_flow_context()
    # Nothing outside of a loop can wait for what is in it, so each control flow context has its
    # own.
    checks = tf.get_collection_ref(f"mtf_apart/{getattr(scope, 'name', '')}/{devices}")
    if checks:
        return checks[0]
    # Each writes its number; on one device these are one variable, which keeps a single number.
    handles, written, read = [], [], []
    for number, device in enumerate(devices):
        with tf.device(device):
            # One name everywhere: handles are one variable only if their devices are the same.
            handle = tf.raw_ops.VarHandleOp(
                dtype=tf.float32, shape=[], shared_name=f"mtf_number_among/{'/'.join(devices)}"
            )
            value = tf.constant(float(number))
            written.append(tf.raw_ops.AssignVariableOp(resource=handle, value=value))
            handles.append(handle)
    # All writes come before all reads, or each device might read before another overwrites.
    with tf.control_dependencies(written):
        for device, handle in zip(devices, handles):
            with tf.device(device):
                read.append(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32))
    # Strings and Assert are for CPUs.
    with tf.device(host_cpu(devices[0])):
        same = tf.reduce_all(tf.equal(tf.stack(read), list(map(float, range(len(devices))))))
        text = (
            f"the session has put several of the devices {', '.join(devices)} in one place, where "
            "collectives between them would wait forever: it lacks some, and has "
            f"allow_soft_placement. Name devices of session.list_devices(), or {mend}"
        )
        checks.append(tf.raw_ops.Assert(condition=same, data=[text], summarize=1))
    return checks[0]


def session_config(
    mesh_shape: ShapeLike,
    layout: LayoutLike,
    devices: Optional[Sequence[str]] = None,
) -> tf.ConfigProto:
    """Returns the configuration of a session that computes on logical CPUs of this machine.

    It has a logical CPU for each processor. If the layout splits tensors into at least as many
    parts as the machine has cores, each operation is computed by one thread, since all cores have
    operations of other processors: that is faster than sharing each operation among all threads.
    The first session of a program decides about threads for all of them, and so does the first
    eager operation, or tracing a SIMD program. So this function also sets the threads of the
    process, unless TensorFlow has begun: call it before.

    Args:
      mesh_shape: a Shape, or a string such as "rows:2,cols:2".
      layout: LayoutRules, or a string such as "batch:rows,d_ff:cols".
      devices: the device of each processor, by default "cpu:0", "cpu:1" and so on. Devices that are
        no CPUs of this process are left to TensorFlow.

    Raises:
      ValueError: there is not a device for each processor, or one is malformed.
    """
    shape, rules = convert_to_shape(mesh_shape), convert_to_layout_rules(layout)
    if devices is None:
        devices = [f"cpu:{i}" for i in range(shape.size)]
    check_devices(devices, shape)
    config = tf.ConfigProto()
    set_cpus(config, local_cpus(devices), shape, rules)
    return config


def local_cpus(devices: Sequence[str]) -> list[int]:
    """Returns the numbers of the CPUs of this process among devices."""
    specs = [device_spec(device) for device in devices]
    return [
        spec.device_index or 0
        for spec in specs
        if spec.device_type in (None, "CPU") and spec.job in (None, "localhost")
    ]


def set_cpus(
    config: tf.ConfigProto,
    cpus: Sequence[int],
    mesh_shape: Shape,
    rules: Optional[LayoutRules],
    own_threads: bool = False,
) -> None:
    """Sets the logical CPUs of a session, and the threads of an operation.

    Args:
      config: the tf.ConfigProto that is changed.
      cpus: the numbers of the CPUs of this process in the mesh.
      mesh_shape: the Shape of the mesh.
      rules: its LayoutRules; if None, threads are left to TensorFlow.
      own_threads: whether the session has threads of its own, beside others of this process.
    """
    # A session numbers its logical CPUs from 0 without gaps, so the largest number counts.
    config.device_count["CPU"] = 1 + max(cpus, default=0)
    threads = None if rules is None else set_threads(cpus, mesh_shape, rules)
    if threads is not None:
        config.intra_op_parallelism_threads, config.inter_op_parallelism_threads = threads
    # After `threads_by_session`, a session that says nothing would have those of the first one. Not
    # by the environment, which processes that this one starts take over: sessions of several
    # processes must not ask for it.
    if own_threads or (rules is not None and _threads_are_by_session):
        config.use_per_session_threads = True


_threads_are_by_session = False


def threads_by_session() -> None:
    """Lets each session on the devices of this process have threads of its own.

    Otherwise all have those of the first one: a program that runs under several layouts, one after
    the other, would be the slower the less they fit the others. It is so, too, if TensorFlow has
    begun before.
    """
    global _threads_are_by_session
    os.environ.setdefault("TF_OVERRIDE_GLOBAL_THREADPOOL", "1")
    _threads_are_by_session = True


def set_threads(
    cpus: Sequence[int], mesh_shape: Shape, rules: LayoutRules
) -> Optional[tuple[int, int]]:
    """Sets, and returns, the threads of an operation, and those of operations at a time.

    They are set unless eager code has begun: TensorFlow's first session or function decides about
    threads for the whole process, and tracing a SIMD program counts as one.

    Args:
      cpus: the numbers of the CPUs of this process in the mesh.
      mesh_shape: the Shape of the mesh.
      rules: its LayoutRules.

    Returns:
      None if they are left to TensorFlow.
    """
    if not one_thread_each(cpus, mesh_shape, rules):
        return None
    with contextlib.suppress(RuntimeError):  # which says that it has begun
        tf2.config.threading.set_intra_op_parallelism_threads(1)
    # Operations of all processors run side by side, one thread each, so as many as there are cores.
    return 1, cores()


def one_thread_each(cpus: Sequence[int], mesh_shape: Shape, rules: LayoutRules) -> bool:
    """Returns whether each operation of a program is computed by one thread; see `set_threads`."""
    # Fewer parts than cores would leave cores idle if each operation had one thread.
    return 1 < cores() <= min(parts_of_mesh(mesh_shape, rules), len(set(cpus)))


def parts_of_mesh(mesh_shape: Shape, rules: LayoutRules) -> int:
    """Returns into how many slices layout rules cut at most.

    A mesh dimension that splits nothing adds copies, which one processor computes for all.

    Args:
      mesh_shape: the Shape of the mesh.
      rules: LayoutRules.
    """
    names = mesh_shape.dimension_names
    splitting = {name for _, mesh_dim in rules.pairs for name in joined_names(mesh_dim, names)}
    return list_product(d.size for d in mesh_shape if d.name in splitting)


def cores() -> int:
    """Returns how many cores this process may use."""
    # In a container or under taskset a process may use fewer cores than the machine has.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def parallel(devices: Sequence[str], fn: Callable, *args: object, **kwargs: object) -> list[Any]:
    """Calls `fn` once on each device, in variable scopes parallel_0, parallel_1, ...

    Args:
      devices: a list of device strings.
      fn: a function.
      *args: a list with a value for each device, or any other value, passed to all calls.
      **kwargs: likewise.

    Returns:
      A list of the results.

    Raises:
      ValueError: `devices` is not a list, or an argument is a list of another length.
    """
    if not isinstance(devices, list):
        raise ValueError(f"devices must be a list, not {type(devices).__name__}")
    for value in (*args, *kwargs.values()):
        if isinstance(value, list) and len(value) != len(devices):
            raise ValueError(
                f"a list argument must have a value for each of {len(devices)} devices, got "
                f"{len(value)}: {value!r}"
            )

    def pick(value: object, i: int) -> object:
        return value[i] if isinstance(value, list) else value

    results = []
    for i, device in enumerate(devices):
        with tf.variable_scope(f"parallel_{i}"), tf.device(device):
            results.append(
                fn(
                    *[pick(a, i) for a in args],
                    **{key: pick(value, i) for key, value in kwargs.items()},
                )
            )
    return results
