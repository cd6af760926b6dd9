"""What scripts of users have in common."""

import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.oracle import oracle_runner

SCRIPTS = {}
D = mtf.Dimension


def script(fn):
    SCRIPTS[fn.__name__] = fn
    return fn


def placement(shape="x:2,y:2", layout="batch:x,d:y", cls=mtf.placement_mesh_impl.PlacementMeshImpl):
    size = mtf.Shape(mtf.convert_to_shape(shape).dims).size
    arguments = (
        oracle_runner.IMPL_ARGUMENTS if cls is mtf.placement_mesh_impl.PlacementMeshImpl else {}
    )
    return cls(shape, layout, ["cpu:0"] * size, **arguments)


def value_of(session, name):
    """Returns the value of a global variable."""
    (v,) = [v for v in tf.global_variables() if v.op.name == name]
    return session.run(v)


def fetch(lowering, tensors, feed=None):
    fetches = {k: lowering.export_to_tf_tensor(v) for k, v in tensors.items()}
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        return session.run(fetches, feed)
