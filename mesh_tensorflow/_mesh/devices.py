"""Which devices there are, and which of them share their memory."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

__all__ = ["default_devices", "memory_domain"]


def default_devices() -> list[str]:
    """Returns the logical GPUs of this process, or its logical CPUs if there are none."""
    for kind in ("GPU", "CPU"):
        found = tf.config.list_logical_devices(kind)
        if found:
            return [f"/device:{kind}:{i}" for i in range(len(found))]
    return []


def memory_domain(device: str) -> str:
    """Returns a name for the memory a device computes in.

    The CPU devices of one task share theirs; every other device has its own.
    """
    spec = tf.DeviceSpec.from_string(device or "")
    task = f"{spec.job}/{spec.replica}/{spec.task}"
    if spec.device_type in (None, "CPU"):
        return f"{task}/CPU"
    return f"{task}/{spec.device_type}:{spec.device_index}"
