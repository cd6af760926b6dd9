"""What is not selected leaves no trace, also where it is infinite or no number."""

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf

ROWS = 2**13  # large enough for a gather, which a small table does by a product


def on_two(layout):
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:2", layout, ["cpu:0"] * 2, merge="none")
    return mtf.Mesh(mtf.Graph(), "mesh", mesh_impl=impl)


@pytest.mark.parametrize("layout", ["", "rows:all", "batch:all", "d:all"])
def test_rows_of_a_split_table(layout):
    """On the processors that lack a row, another one is looked up in its place."""
    values = np.ones([ROWS, 2], np.float32)
    values[[0, ROWS // 2 - 1, ROWS // 2, -1]] = [[np.inf], [np.nan], [np.inf], [-np.inf]]
    mesh = on_two(layout)
    table = mtf.import_tf_tensor(mesh, tf.constant(values), [("rows", ROWS), ("d", 2)])
    ids = mtf.import_tf_tensor(mesh, tf.constant([1, ROWS - 2, -1, ROWS]), "batch:4")
    found = mtf.gather(table, ids, table.shape.dims[0])
    np.testing.assert_array_equal(found.numpy(), [[1, 1], [1, 1], [0, 0], [0, 0]])


@pytest.mark.parametrize("layout", ["", "rows:all", "d:all"])
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_the_first_element(dtype, layout):
    values = tf.constant([[1.0, 2.0], [np.inf, 3.0], [-np.inf, np.nan], [4.0, 5.0]])
    x = mtf.import_tf_tensor(on_two(layout), tf.cast(values, dtype), "rows:4,d:2")
    y = mtf.reduce_first(x, x.shape.dims[0])
    [gradient] = mtf.gradients([mtf.reduce_sum(y * y)], [x])
    assert y.dtype == dtype and y.numpy().tolist() == [1.0, 2.0]
    assert gradient.numpy().tolist() == [[2.0, 4.0], *[[0.0, 0.0]] * 3]
