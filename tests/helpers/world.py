"""A graph with a few tensors, in which calls go wrong."""

import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf

A, B, C = mtf.Dimension("a", 8), mtf.Dimension("b", 16), mtf.Dimension("c", 24)
# Names of operations; each must be free or taken as it was before the failed call.
PROBES = """add assign add_n binary_op broadcast cast cond concat constant conv2d custom_gradient
depend divide dropout einsum equal exp gather import identity less mask one_hot pad range random
reduce reduce_max reduce_mean reduce_sum relu rename reshape scalar_add scalar_mul shift slice
slicewise softmax split stack stop_gradient sub top_k transpose unstack variable while_loop v
""".split()


class World:
    """A graph with a few tensors, in which calls go wrong."""

    def __init__(self):
        self.graph = mtf.Graph()
        self.mesh = mtf.Mesh(self.graph, "mesh")
        self.x = self.tensor([A, B])
        self.y = self.tensor([B, C])
        self.i = self.tensor([A], tf.int32)
        self.m = self.tensor([A, B], tf.bool)
        self.other = mtf.import_tf_tensor(mtf.Mesh(self.graph, "other"), tf.zeros([8]), [A])
        self.w = mtf.get_variable(self.mesh, "w", [A, B])
        self.zero = mtf.constant(self.mesh, 0, dtype=tf.int32)

    def tensor(self, dims, dtype=tf.float32):
        shape = mtf.Shape(dims)
        return mtf.import_tf_tensor(self.mesh, tf.zeros(shape.to_integer_list, dtype), shape)

    def state(self):
        """Returns all that a failed call must leave as it is."""
        return (
            list(self.graph.operations),
            [op.name for op in self.graph.operations],
            [self.graph.unique_name(name, mark_as_used=False) for name in PROBES],
            list(self.graph.all_variables),
            list(self.graph.trainable_variables),
            sorted(self.graph.name_to_variable),
        )


class Plain(World):
    """A graph with nothing in it yet."""

    def __init__(self):
        self.graph = mtf.Graph()
        self.mesh = mtf.Mesh(self.graph, "mesh")
