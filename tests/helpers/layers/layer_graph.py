"""Builds a layer on a mesh, runs it, and trains with it."""

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.layer_runs import dims, numbers


class LayerGraph:
    """A graph with one mesh; lowers it and evaluates Tensors."""

    def __init__(self, mesh_shape="", layout=""):
        self.graph = mtf.Graph()
        self.mesh = mtf.Mesh(self.graph, "mesh")
        size = mtf.convert_to_shape(mesh_shape).size
        self.impl = mtf.placement_mesh_impl.PlacementMeshImpl(mesh_shape, layout, [""] * size)

    def tensor(self, value, shape, dtype=None):
        """Returns an array on the mesh; numbers are float32 unless they are integers."""
        value = np.asarray(value)
        if value.dtype.kind == "f":
            value = value.astype("float32")
        value = tf.constant(value if value.dtype.kind == "f" else value.astype("int32"))
        x = mtf.import_tf_tensor(self.mesh, value, mtf.Shape(dims(shape)))
        return x if dtype is None else mtf.cast(x, dtype)

    def normal(self, shape, seed=0):
        """Returns normal random numbers."""
        return self.tensor(numbers(shape, seed), shape)

    def values(self, tensors, updates=(), steps=0, before=None):
        """Runs `updates` some times, then returns the values of Tensors.

        Args:
          tensors: a list of Tensors.
          updates: operations that assign.
          steps: how often to run them.
          before: a function of the session, called when variables have their initial values.
        """
        lowering = mtf.Lowering(self.graph, {self.mesh: self.impl})
        fetches = [lowering.export_to_tf_tensor(t) for t in tensors]
        updates = [lowering.lowered_operation(op) for op in updates]
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            if before is not None:
                before(session)
            session.run(lowering.copy_masters_to_slices())
            for _ in range(steps):
                session.run(updates)
            return session.run(fetches)
