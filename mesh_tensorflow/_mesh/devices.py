"""Devices: discovery, checks and memory domains."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import dims_text, mesh_shapes_that_fit
from mesh_tensorflow._core.layout import LayoutRules
from mesh_tensorflow._core.processors import pnum_to_processor_coordinates, processor_groups
from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._core.strictness import slip

__all__ = [
    "check_devices",
    "check_devices_exist",
    "check_rules",
    "default_devices",
    "device_spec",
    "memory_domain",
    "merged_processors",
]


def default_devices() -> list[str]:
    """Returns the logical GPUs of this process, or its logical CPUs if there are none."""
    for kind in ("GPU", "CPU"):
        found = tf.config.list_logical_devices(kind)
        if found:
            return [f"/device:{kind}:{i}" for i in range(len(found))]
    return []


def device_spec(device: str) -> tf.DeviceSpec:
    """Returns the DeviceSpec of a device string.

    Raises:
      ValueError: it is malformed.
    """
    try:
        if device is not None and not isinstance(device, str):
            raise ValueError(f"it is of type {type(device).__name__}")
        return tf.DeviceSpec.from_string(device or "")
    except ValueError as e:
        raise ValueError(
            f'{device!r} is no device. Devices are strings such as "cpu:0", "/device:GPU:1" or '
            f'"/job:worker/task:2/device:CPU:0"; "" leaves it to TensorFlow ({e})'
        ) from None


def check_devices_exist(devices: Sequence[str]) -> None:
    """Reports a slip if a TensorFlow 2 program names devices that this process lacks.

    TensorFlow silently runs such operations on other devices. A TensorFlow 1 session has its own
    devices, and raises unless soft placement is enabled.

    Raises:
      ValueError: within `mtf.strict()`.
    """
    if not tf.executing_eagerly_outside_functions():
        return
    with tf.init_scope():  # functions have another setting
        if not tf.config.get_soft_device_placement():
            return
    specs = {device: device_spec(device) for device in dict.fromkeys(devices)}
    found = [device_spec(d.name) for d in tf.config.list_logical_devices()]
    here = sorted((spec.device_type, spec.device_index) for spec in found)
    absent = [
        device
        for device, spec in specs.items()
        if spec.job in (None, "localhost")
        and spec.device_type
        and (spec.device_type, spec.device_index or 0) not in here
    ]
    if absent:
        slip(
            f"this process has no device {', '.join(map(repr, absent))}; what is placed there runs "
            f"elsewhere. It has {', '.join(f'{kind}:{i}' for kind, i in here)}. Name these, or "
            "make several logical devices of one with "
            "tf.config.set_logical_device_configuration",
            key=f"devices/{absent}",
        )


def memory_domain(device: str) -> str:
    """Returns the name of a device's memory domain.

    The CPU devices of one task share one; every other device has its own.
    """
    spec = device_spec(device)
    task = f"{spec.job}/{spec.replica}/{spec.task}"
    if spec.device_type in (None, "CPU"):
        return f"{task}/CPU"
    return f"{task}/{spec.device_type}:{spec.device_index}"


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
        same = all(len({places[p] for p in group}) == 1 for group in groups)
        sizes.append(1 if same else d.size)

    def remains(pnum: int) -> bool:
        coordinates = pnum_to_processor_coordinates(mesh_shape, pnum)
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
    pairs = ", ".join(f"{t}:{m}" for t, m in getattr(rules, "pairs", ()))
    kinds = [device or "a device of TensorFlow's choice" for device in dict.fromkeys(devices)]
    where = f" on {', '.join(kinds[:4])}{', ...' if len(kinds) > 4 else ''}" if kinds else ""
    return (
        f"{dims_text(shape) or 'one processor'}; "
        f"{f'layout {pairs}' if pairs else 'no layout rules'}; "
        f"{shape.size} processor{'s' if shape.size > 1 else ''}{where}"
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
