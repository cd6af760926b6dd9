"""Runs a few layers with variables of their own in a placing."""

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.harness import WHOLE


def dims(text):
    return mtf.convert_to_shape(text).dims


def numbers(text, seed=0):
    sizes = mtf.convert_to_shape(text).to_integer_list
    return np.random.RandomState(seed).normal(size=sizes).astype(np.float32)


def run(build, placing=WHOLE, seed=1):
    """Returns (values of what `build` makes of a mesh, masters by name)."""
    with tf.Graph().as_default():
        tf.set_random_seed(seed)
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")

        def given(text, array_seed=0):
            return mtf.import_tf_tensor(
                mesh, tf.constant(numbers(text, array_seed)), mtf.convert_to_shape(text)
            )

        tensors = build(mesh, given)
        with harness.separate_memories() if placing.apart else tf.name_scope(""):
            lowering = mtf.Lowering(graph, {mesh: placing.impl()})
            exports = [lowering.export_to_tf_tensor(t) for t in harness.as_list(tensors)]
            copy = lowering.copy_masters_to_slices()
        with harness.session() as session:
            session.run(tf.global_variables_initializer())
            session.run(copy)
            masters = {v.op.name: v for v in tf.global_variables()}
            return session.run([exports, masters])
