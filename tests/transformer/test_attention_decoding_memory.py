"""What a step of decoding allocates: its states are written where they are."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.transformer import decoding_models as models

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.harness import WHOLE


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("given", [0, 2])
def test_no_state_is_copied(given, draft):
    """But once, if it is also read by the first call."""
    rows, length, heads, channels = 2, 96, 4, 4
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        ids = np.zeros([rows, length], "int32")
        ids[:, :given] = 3
        model = models.unitransformer(
            [models.attention(), models.feed_forward()], max_length=length
        )
        small = models.unitransformer([models.attention()], max_length=length) if draft else None
        found = model.sample_autoregressive(
            models.imported(mesh, ids),
            never_end=True,
            has_partial_sequences=given > 0,
            draft_model=small,
        )
        lowering = mtf.Lowering(mesh.graph, {mesh: WHOLE.impl()})
        fetch = lowering.export_to_tf_tensor(found)
        metadata = tf.RunMetadata()
        options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(fetch, options=options, run_metadata=metadata)
    state = 4 * rows * heads * length * channels
    written = [
        sum(r.alloc_bytes for m in node.memory for r in m.allocation_records if r.alloc_bytes > 0)
        for device in metadata.step_stats.dev_stats
        for node in device.node_stats
        if "/write_at" in node.node_name and "Scatter" in node.node_name
    ]
    assert len(written) >= 2 * 2 * (length - given) / (5 if draft else 1)
    # Seldom an operation of the last position still reads it.
    assert sum(size >= state for size in written) <= (4 if draft else 2) + len(written) // 20
