"""A tf operation that stops a session which has put two devices of a mesh in one place.

Collectives between them would wait for each other forever, without a message. Which devices a
session has is not known while its graph is built, so the check runs with the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.devices import device_spec

__all__ = ["apart_in_session"]


def apart_in_session(devices: Sequence[str], mend: str) -> tf.Operation:
    """Returns an operation that fails if a session has put two of some devices in one place.

    That is what soft placement does with absent devices; and collectives between members on one
    device wait forever. Each device has its own resources: what each writes, it reads again.

    Args:
      devices: device strings, all different.
      mend: what else to do than to name other devices, for the message.
    """
    scope = tf.get_default_graph()._get_control_flow_context()
    # Nothing outside of a loop can wait for what is in it, so each control flow context has its
    # own.
    found = tf.get_collection_ref(f"mtf_apart/{getattr(scope, 'name', '')}/{devices}")
    if found:
        return found[0]
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
    with tf.control_dependencies(written):
        for device, handle in zip(devices, handles):
            with tf.device(device):
                read.append(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32))
    with tf.device(device_spec(devices[0]).replace(device_type="CPU", device_index=0).to_string()):
        same = tf.reduce_all(tf.equal(tf.stack(read), list(map(float, range(len(devices))))))
        text = (
            f"the session has put several of the devices {', '.join(devices)} in one place, where "
            "collectives between them would wait forever: it lacks some, and has "
            f"allow_soft_placement. Name devices of session.list_devices(), or {mend}"
        )
        found.append(tf.raw_ops.Assert(condition=same, data=[text], summarize=1))
    return found[0]
