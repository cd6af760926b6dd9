"""A GspmdMeshImpl whose programs run in sessions of TensorFlow, but on devices of JAX.

    python -m mesh_tensorflow.testing.conformance mesh_tensorflow.testing.through_pjrt:split

What the program computes from placeholders, variables and keys of random numbers is compiled by XLA
for four devices, and called from the session. Assignments to variables remain in the session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import tensorflow.compat.v1 as tf
from jax.experimental import jax2tf

import mesh_tensorflow as mtf
from mesh_tensorflow._mesh.gspmd.sharding import annotating
from mesh_tensorflow.pjrt._devices import AnyMesh, all_dtypes, device_mesh, sharding

__all__ = ["split"]

_PROCESSORS = 4
# What the session computes: inputs, and what has a state.
_OF_SESSION = {"Placeholder", "RandomUniformInt", "ReadVariableOp", "VarHandleOp"}


def split(mesh_shape: str, layout: str) -> mtf.MeshImpl:
    """Returns a GspmdMeshImpl, for use in the program that `split.replicate` runs."""
    return mtf.GspmdMeshImpl(mesh_shape, layout)


def _replicate(program: Callable[[], Sequence[Any]], processors: int) -> list[Any]:
    """Runs a program on devices of JAX; returns what it returns.

    Args:
      program: a function that returns tf.Tensors, and operations.
      processors: the number of processors of the mesh.
    """
    with annotating():
        outputs = program()
    mesh = device_mesh(mtf.convert_to_shape(f"all:{max(processors, 1)}"), _devices(processors))
    tensors = [tf.identity(y) for y in outputs if tf.is_tensor(y)]
    results = iter(_called(tensors, mesh))
    return [next(results) if tf.is_tensor(y) else y for y in outputs]


split.replicate = _replicate  # type: ignore[attr-defined]


def _devices(processors: int) -> list[Any]:
    """Returns devices; on a CPU there are four, if JAX has made none yet."""
    try:
        jax.config.update("jax_num_cpu_devices", _PROCESSORS)
    except RuntimeError:
        pass  # there are devices already
    return jax.devices()[:processors]


def _called(tensors: Sequence[tf.Tensor], mesh: AnyMesh) -> list[tf.Tensor]:
    """Returns the values of tensors, computed on the devices of a mesh."""
    inputs, needed = _cut(tensors)
    whole = tf.get_default_graph().as_graph_def()
    part = tf.GraphDef(versions=whole.versions, library=whole.library)
    for node in whole.node:
        if node.name in needed:
            part.node.append(node)
            kept = [x for x in node.input if not x.startswith("^") or x[1:] in needed]
            part.node[-1].input[:] = kept
    compiled: list[Any] = []
    where = sharding(mesh, None)

    def imported(*values: tf.Tensor) -> list[tf.Tensor]:
        given = {x.name: value for x, value in zip(inputs, values)}
        return tf.import_graph_def(part, given, [y.name for y in tensors], name="")

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        with tf.init_scope(), all_dtypes():
            placed = [jax.device_put(a, where) for a in arrays]
            if not compiled:
                call = jax2tf.call_tf(imported, has_side_effects=False)
                compiled.append(jax.jit(call, in_shardings=where, out_shardings=where))
            return [np.asarray(y) for y in compiled[0](*placed)]

    results = tf.numpy_function(run, inputs, [y.dtype for y in tensors])
    for result, y in zip(results, tensors):
        result.set_shape(y.shape)
    return results


def _cut(tensors: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], set[str]]:
    """Returns what the session computes for tensors, and the names of the other operations."""
    inputs: dict[str, tf.Tensor] = {}
    needed: set[str] = set()
    open_ops = [y.op for y in tensors]
    while open_ops:
        op = open_ops.pop()
        if op.name in needed:
            continue
        needed.add(op.name)
        open_ops += [c for c in op.control_inputs if c.type not in _OF_SESSION]
        for x in op.inputs:
            if x.op.type in _OF_SESSION:
                inputs[x.name] = x
            else:
                open_ops.append(x.op)
    return list(inputs.values()), needed
