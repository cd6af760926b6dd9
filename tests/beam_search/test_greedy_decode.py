"""Decoding one position at a time, against what the table of logits says."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.layer_runs import dims
from helpers.world import World

import mesh_tensorflow as mtf
from mesh_tensorflow.simd_mesh_impl import replicate
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.harness import WHOLE, Placing

EOS = 1
# What is chosen at each position; a row ends at its first 1.
CHOSEN = np.array([[3, 4, 1, 5, 6, 2], [2, 1, 3, 4, 5, 6], [4, 4, 4, 1, 3, 2], [1, 2, 2, 2, 2, 2]])


def fetched(placing, build):
    with tf.Graph().as_default():
        tf.set_random_seed(5)
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        outputs = build(mesh)

        def program():
            lowering = mtf.Lowering(graph, {mesh: placing.impl()}, autostack=False)
            return [lowering.export_to_tf_tensor(x) for x in outputs]

        exports = replicate(program, devices=placing.cpus) if placing.simd else program()
        with harness.session() as session:
            return session.run(exports)


def imported(mesh, value, text):
    return mtf.import_tf_tensor(
        mesh, tf.constant(np.asarray(value, "int32")), mtf.convert_to_shape(text)
    )


def decoded(table, forced=None, **kwargs):
    """Returns a function that decodes; states count the steps."""
    batch, length, vocab = dims("batch:4,length:6,vocab:8")

    def build(mesh):
        chosen = imported(mesh, table, "batch:4,length:6")

        def logits_fn(step, ids, states):
            here = mtf.gather(chosen, states[0], length)
            return mtf.one_hot(here, vocab) * 9.0, [states[0] + 1]

        ids = mtf.zeros(mesh, [batch, length], tf.int32)
        given = {} if forced is None else {"forced_ids": imported(mesh, forced, "batch:4,length:6")}
        start = [mtf.zeros(mesh, [batch], tf.int32)]
        return [
            mtf.beam_search.greedy_decode(logits_fn, ids, initial_states=start, **given, **kwargs)
        ]

    return build


@pytest.mark.parametrize("placing", [
    WHOLE, Placing("x:2,y:2", "batch:x,vocab:y"), Placing("x:2,y:2", "batch:y", merge="device"),
    Placing("x:2,y:2", "batch:x,vocab:y", simd=True),
])  # fmt: skip
def test_ends_with_the_last_row(placing):
    (ids,) = fetched(placing, decoded(CHOSEN))
    np.testing.assert_array_equal(ids, np.where(np.arange(6) < 4, CHOSEN, 0))


def test_goes_to_the_end_of_the_length():
    table = np.where(CHOSEN == 1, 7, CHOSEN)
    np.testing.assert_array_equal(fetched(WHOLE, decoded(table))[0], table)
    (ids,) = fetched(WHOLE, decoded(CHOSEN, eos_id=7))
    np.testing.assert_array_equal(ids, CHOSEN)


def test_forced_ids():
    forced = np.zeros((4, 6), int)
    forced[0, :3], forced[1, 5], forced[3, 2] = [0, 2, 2], 7, 5
    (ids,) = fetched(WHOLE, decoded(CHOSEN, forced))
    np.testing.assert_array_equal(ids, np.where(forced, forced, CHOSEN))


def test_draws_at_a_temperature():
    """Frequencies of ids, by Pearson's chi-square, against the softmax of logits / temperature."""
    batch, length, vocab = dims("batch:500,length:8,vocab:5")
    logits = np.array([0.5, -1.0, 1.0, 0.0, 0.3])

    def build(mesh):
        row = mtf.import_tf_tensor(mesh, tf.constant(logits, tf.float32), mtf.Shape([vocab]))
        ids = mtf.zeros(mesh, [batch, length], tf.int32)

        def logits_fn(step, ids, states):
            return mtf.broadcast(row, [batch, vocab]), states

        return [mtf.beam_search.greedy_decode(logits_fn, ids, t, eos_id=9) for t in (1.0, 0.5)]

    for ids, temperature in zip(fetched(WHOLE, build), (1.0, 0.5)):
        p = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
        expected = ids.size * p
        counts = np.bincount(ids.reshape(-1), minlength=5)
        assert ((counts - expected) ** 2 / expected).sum() < 23.5  # 4 degrees, one in 10^4
        assert len({tuple(column) for column in ids.T}) == 8  # each step draws anew


@pytest.mark.parametrize("kwargs, text", [
    ({"initial_ids": "float"}, "initial_ids must be an integer Tensor of shape [batch..., length]"),
    ({"forced_ids": "other"}, "forced_ids must be like initial_ids"),
    ({"logits": "batch:2,beam:2,vocab:3"}, "logits must have the dimensions of the batch"),
])  # fmt: skip
def test_errors(tf_graph, kwargs, text):
    world = World()
    known = {
        "float": mtf.zeros(world.mesh, "batch:2,length:4"),
        "other": mtf.zeros(world.mesh, "batch:2,length:5", tf.int32),
    }
    logits = mtf.zeros(world.mesh, kwargs.get("logits", "batch:2,vocab:3"))
    arguments = {"initial_ids": mtf.zeros(world.mesh, "batch:2,length:4", tf.int32)}
    arguments.update({k: known[v] for k, v in kwargs.items() if k != "logits"})
    before = world.state()
    with pytest.raises(ValueError) as raised:
        mtf.beam_search.greedy_decode(lambda step, ids, states: (logits, states), **arguments)
    assert text in str(raised.value)
    assert world.state() == before
