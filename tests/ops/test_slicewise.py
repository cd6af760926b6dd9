"""Functions of TensorFlow applied slice by slice: what is a slip."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf


def test_cwise_of_permuted_inputs_is_a_slip():
    """One set of dimensions in two orders is hardly meant; other shapes are the function's matter."""
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x, y = (
            mtf.import_tf_tensor(mesh, np.zeros([3, 3], np.float32), mtf.Shape(dims))
            for dims in ([("a", 3), ("b", 3)], [("b", 3), ("a", 3)])
        )
        row = mtf.import_tf_tensor(mesh, np.zeros([3], np.float32), mtf.Shape([("b", 3)]))
        number = len(mesh.graph.operations)
        with mtf.strict(), pytest.raises(ValueError, match=r"another order.*mtf\.transpose\(imp"):
            mtf.cwise(tf.add, [x, y])
        assert len(mesh.graph.operations) == number
        with mtf.strict():
            assert mtf.cwise(tf.add, [x, row]).shape == x.shape
        assert mtf.cwise(tf.add, [row, x]).shape == row.shape


def test_an_output_shape_of_pairs():
    x = mtf.ones(mtf.Mesh(mtf.Graph(), "mesh"), "a:4,b:6")
    y = mtf.slicewise(lambda t: t[:, :3], [x], output_shape=[("a", 4), ("c", 3)])
    assert y.shape.to_string == "Shape[a=4, c=3]"
