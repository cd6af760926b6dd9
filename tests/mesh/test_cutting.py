"""Slices of whole values, and the memory that they keep."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.slice_functions import in_own_memory

SIZES = [64, 1024]


def requested_bytes(session, x):
    """The bytes that were requested for the memory in which a tensor is."""
    metadata = tf.RunMetadata()
    options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
    session.run(x.op, options=options, run_metadata=metadata)
    nodes = {n.node_name: n for d in metadata.step_stats.dev_stats for n in d.node_stats}
    description = nodes[x.op.name].output[0].tensor_description
    return description.allocation_description.requested_bytes


@pytest.mark.parametrize("own", [False, True], ids=["a view", "in_own_memory"])
@pytest.mark.parametrize("dtype", [tf.float32, tf.int32, tf.bfloat16, tf.bool, tf.complex64])
def test_memory_that_variables_keep(own, dtype):
    """With TensorFlow's optimizers of graphs, which undo plain copies."""
    with tf.Graph().as_default():
        whole = tf.cast(tf.random.uniform(SIZES, 0, 2, tf.int32), dtype)
        pieces = tf.split(whole, 2, 0)
        kept = [in_own_memory(piece, whole) if own else piece for piece in pieces]
        made = [
            tf.get_variable(f"v{i}", initializer=tf.zeros_like(x), use_resource=True)
            for i, x in enumerate(kept)
        ]
        values = [v.read_value() for v in made]
        assigned = [v.assign(x, read_value=False) for v, x in zip(made, kept)]
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            expected = session.run([*pieces, *assigned])[:2]
            for value, piece in zip(values, expected):
                np.testing.assert_array_equal(session.run(value), piece)
                bytes_of_both = 64 * 1024 * dtype.size
                assert requested_bytes(session, value) == bytes_of_both // (2 if own else 1)


def test_what_is_not_cut_is_not_copied():
    with tf.Graph().as_default():
        whole = tf.zeros([4])
        assert in_own_memory(whole, whole) is whole
