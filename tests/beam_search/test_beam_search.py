"""Beam search against a search of all sequences, and one written down in Python."""

import itertools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.layer_runs import dims
from helpers.world import World

import mesh_tensorflow as mtf
from mesh_tensorflow import beam_search as package
from mesh_tensorflow.beam_search import select
from mesh_tensorflow.simd_mesh_impl import replicate
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.harness import WHOLE, Placing

EOS = 1
BATCH = 4


def fetched(placing, build):
    """Returns the values of what `build` makes of a mesh, in a placing."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        outputs = build(mesh)

        def program():
            lowering = mtf.Lowering(graph, {mesh: placing.impl()}, autostack=False)
            return [lowering.export_to_tf_tensor(x) for x in outputs]

        exports = replicate(program, devices=placing.cpus) if placing.simd else program()
        with harness.session() as session:
            return session.run(exports)


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def random_table(length, vocab, seed, scale=1.5):
    """Returns logits by batch row, position and last id."""
    return np.random.RandomState(seed).normal(0, scale, (BATCH, length, vocab, vocab))


def score(log_prob, length, alpha):
    return log_prob / ((5.0 + length) / 6.0) ** alpha


def every_sequence(table, alpha):
    """Returns all sequences of a row that end, with their scores, best first."""
    length, vocab, _ = table.shape
    log_probs = log_softmax(table)
    others = [v for v in range(vocab) if v != EOS]
    found = []
    for n in range(length):
        for start in itertools.product(others, repeat=n):
            ids = [*start, EOS]
            lasts = [0, *start]
            total = sum(log_probs[i, last, id] for i, (last, id) in enumerate(zip(lasts, ids)))
            found.append((score(total, n + 1, alpha), ids + [0] * (length - n - 1)))
    return sorted(found, reverse=True)


def searched_in_python(tables, beam, alpha, stop_early):
    """Returns a list of (score, ids) for each row, best first; rows end together."""
    length = tables[0].shape[0]
    rows = [([(0.0, [])], []) for _ in tables]
    for i in range(length):
        if stop_early and all(
            done and done[-1][0] > max(score(alive[0][0], n, alpha) for n in (i + 1, length))
            for alive, done in rows
        ):
            break
        rows = [step_in_python(log_softmax(t[i]), i, beam, alpha, *r) for t, r in zip(tables, rows)]
    return [
        [(s, ids + [0] * (length - len(ids))) for s, ids in finished or alive]
        for alive, finished in rows
    ]


def step_in_python(log_probs, i, beam, alpha, alive, finished):
    """Returns the alive and the finished sequences of a row after position i."""
    grown = sorted(
        ((total + log_probs[ids[-1] if ids else 0, v], [*ids, v])
         for total, ids in alive for v in range(len(log_probs))),
        reverse=True,
    )[: 2 * beam]  # fmt: skip
    ended = [(score(total, i + 1, alpha), ids) for total, ids in grown if ids[-1] == EOS]
    alive = [entry for entry in grown if entry[1][-1] != EOS][:beam]
    return alive, sorted(finished + ended, reverse=True)[:beam]


def table_search(table, beam, alpha, **kwargs):
    """Returns a function that makes (ids, scores) of a search with the logits of a table."""
    _, length, vocab, _ = table.shape
    vocab_dim, last_dim = mtf.Dimension("vocab", vocab), mtf.Dimension("last", vocab)
    batch, beam_dim, length_dim = dims(f"batch:{BATCH},beam:{beam},length:{length}")

    def build(mesh):
        shape = mtf.Shape([batch, length_dim, last_dim, vocab_dim])
        logits = mtf.import_tf_tensor(mesh, tf.constant(table.astype("float32")), shape)

        def logits_fn(step, ids, states):
            (seen,) = states
            last = mtf.one_hot(mtf.gather(ids, step - 1, length_dim), last_dim)
            # A state that remembers other ids than the sequence has would spoil the logits.
            before = mtf.less(mtf.range(mesh, length_dim, tf.int32), step - 1)
            counts = mtf.einsum(
                [mtf.one_hot(ids, last_dim), mtf.to_float(before)], output_shape=seen.shape
            )
            wrong = mtf.rename_dimension(mtf.abs(seen - counts), "last", "vocab")
            row = mtf.einsum(
                [last, mtf.one_hot(step, length_dim), logits],
                output_shape=[batch, beam_dim, vocab_dim],
            )
            started = mtf.to_float(mtf.greater(step, 0))
            return row + wrong * 100.0, [seen + last * started]

        ids = mtf.zeros(mesh, [batch, beam_dim, length_dim], tf.int32)
        seen = mtf.zeros(mesh, [batch, beam_dim, last_dim])
        return mtf.beam_search.beam_search(logits_fn, ids, alpha, states=[seen], **kwargs)

    return build


def assert_found(ids, scores, expected, row):
    """Checks sequences and scores of a row, in order, as far as there are any."""
    real = scores > -1e6
    assert real.sum() == len(expected), row
    np.testing.assert_array_equal(ids[real], [i for _, i in expected], str(row))
    harness.assert_close(scores[real], [s for s, _ in expected], 1e-5)


@pytest.mark.parametrize("stop_early", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.6, -2.0])
def test_finds_the_best_of_all_sequences(alpha, stop_early):
    """With so many beams that none is left out."""
    table = random_table(length=4, vocab=3, seed=3)
    ids, scores = fetched(WHOLE, table_search(table, 16, alpha, stop_early=stop_early))
    for row in range(BATCH):
        expected = every_sequence(table[row], alpha)
        assert len(expected) == 15
        if stop_early:  # those after the best that can be told apart may be missing
            expected = expected[: (scores[row] > -1e6).sum()]
            assert expected
        assert_found(ids[row], scores[row], expected, row)


@pytest.mark.slow_but(8)
@pytest.mark.parametrize("beam", [1, 2, 4])
@pytest.mark.parametrize(
    "alpha, stop_early", [(0.0, True), (0.6, True), (0.6, False), (2.0, True), (-2.0, True)]
)
def test_equals_a_search_in_python(beam, alpha, stop_early):
    table = random_table(length=6, vocab=9, seed=beam)
    ids, scores = fetched(WHOLE, table_search(table, beam, alpha, stop_early=stop_early))
    for row, expected in enumerate(searched_in_python(table, beam, alpha, stop_early)):
        assert_found(ids[row], scores[row], expected, row)


def test_goes_on_while_a_longer_sequence_may_be_better():
    """By the length that it may come to: now, what ended is better than what goes on."""
    steps = [[0.15, 0.45, 0.4], *[[0.005, 0.005, 0.99]] * 4, [0.005, 0.99, 0.005]]
    table = np.broadcast_to(np.log(steps)[:, np.newaxis], [BATCH, 6, 3, 3])
    ids, scores = fetched(WHOLE, table_search(table, 1, 2.0))
    best = every_sequence(table[0], 2.0)[0]
    assert best[1] == [2, 2, 2, 2, 2, EOS]
    for row in range(BATCH):
        assert_found(ids[row], scores[row], [best], row)


def test_goes_on_while_a_sequence_of_the_next_length_may_be_better():
    """With a negative alpha, longer ones are worse: what goes on may still end at once."""
    steps = [[0.005, 0.44, 0.555], [0.005, 0.99, 0.005], *[[0.1, 0.1, 0.8]] * 4]
    table = np.broadcast_to(np.log(steps)[:, np.newaxis], [BATCH, 6, 3, 3])
    ids, scores = fetched(WHOLE, table_search(table, 1, -1.0))
    best = every_sequence(table[0], -1.0)[0]
    assert best[1][:2] == [2, EOS]
    for row in range(BATCH):
        assert_found(ids[row], scores[row], [best], row)


PLACINGS = [
    Placing("x:2", "batch:x"), Placing("x:2", "vocab:x"), Placing("x:2,y:2", "batch:x,vocab:y"),
    Placing("x:2,y:2", "batch:x,vocab:y", merge="device"), Placing("x:4", "vocab:x"),
    Placing("x:2,y:2", "batch:x,vocab:y", simd=True),
]  # fmt: skip


@pytest.mark.slow_but(2)
@pytest.mark.slow("placing[12]*")
@pytest.mark.parametrize("placing", PLACINGS)
def test_is_the_same_in_every_layout(placing):
    """Also with the arguments that let the classic look at some of the vocabulary only."""
    table = random_table(length=5, vocab=8, seed=7)
    expected = fetched(WHOLE, table_search(table, 4, 0.6))
    rules = {"layout": placing.layout, "mesh_shape": placing.mesh, "num_prefilter": 1}
    found = fetched(placing, table_search(table, 4, 0.6, **rules))
    np.testing.assert_array_equal(found[0], expected[0])
    harness.assert_close(found[1], expected[1], 1e-5)


def test_rows_without_an_end_return_what_was_followed():
    """Their scores are log probabilities; other rows are not affected."""
    table = random_table(length=3, vocab=6, seed=1)
    table[2, :, :, EOS] = -50.0
    ids, scores = fetched(WHOLE, table_search(table, 2, 0.6))
    expected = searched_in_python(table, 2, 0.6, True)[2]
    assert not (ids[2] == EOS).any()
    assert_found(ids[2], scores[2], expected, 2)
    assert (ids[[0, 1, 3], 0] == EOS).any(-1).all()


def test_decode_length_and_dtype():
    table = random_table(length=6, vocab=8, seed=2)
    table[..., EOS] -= 20.0
    limited = table_search(table, 2, 0.0, decode_length=4)
    ids, _ = fetched(WHOLE, limited)
    assert (ids[..., 4:] == 0).all()
    expected = [row[0][1] for row in searched_in_python(table[:, :4], 2, 0.0, True)]
    np.testing.assert_array_equal(ids[:, 0, :4], expected)
    _, scores = fetched(WHOLE, table_search(table, 2, 0.6, dtype=tf.float64))
    assert scores.dtype == np.float64


def test_states_without_beams_are_kept_and_two_batch_dimensions_work():
    outer, batch, beam, length, vocab = dims("outer:2,batch:2,beam:2,length:4,vocab:6")
    table = np.random.RandomState(5).normal(0, 1.5, (2, 2, 4, 6))

    def build(mesh):
        shape = mtf.Shape([outer, batch, length, vocab])
        logits = mtf.import_tf_tensor(mesh, tf.constant(table.astype("float32")), shape)

        def logits_fn(step, ids, states):
            here = mtf.gather(logits, states[0], length)
            turned = mtf.broadcast(here, [beam, vocab, outer, batch])
            return turned, [states[0] + 1]

        ids = mtf.zeros(mesh, [outer, batch, beam, length], tf.int32)
        start = mtf.zeros(mesh, [outer, batch], tf.int32)
        return mtf.beam_search.beam_search(logits_fn, ids, 0.6, states=[start])

    ids, scores = fetched(WHOLE, build)
    by_last = np.repeat(table.reshape(4, 4, 1, 6), 6, axis=2)
    for row, expected in enumerate(searched_in_python(by_last, 2, 0.6, True)):
        assert_found(ids.reshape(4, 2, 4)[row], scores.reshape(4, 2)[row], expected, row)


# -- choosing


def test_select_in_any_order_of_dimensions():
    rng = np.random.RandomState(0)
    batch, beam, new, depth = dims("batch:4,beam:3,chosen:2,depth:5")
    x = rng.normal(size=(4, 3, 5)).astype("float32")
    indices = rng.randint(3, size=(4, 2)).astype("int32")
    expected = np.take_along_axis(x, indices[:, :, None], 1)

    def build(mesh):
        t = mtf.import_tf_tensor(mesh, tf.constant(x), mtf.Shape([batch, beam, depth]))
        i = mtf.import_tf_tensor(mesh, tf.constant(indices), mtf.Shape([batch, new]))
        turned = mtf.transpose(t, [depth, beam, batch])
        same = mtf.import_tf_tensor(
            mesh, tf.constant(indices[:, [0, 1, 0]]), mtf.Shape([batch, beam])
        )
        dy = mtf.import_tf_tensor(
            mesh, tf.constant(np.ones((4, 2, 5), "float32")), mtf.Shape([batch, new, depth])
        )
        y = select(t, i, beam)
        row = mtf.gather(t, 0, batch)
        return [
            y, select(turned, i, beam), select(turned, same, beam), select(row, i, beam),
            mtf.gradients([y], [t], [dy])[0],
        ]  # fmt: skip

    for placing in (WHOLE, Placing("x:2", "batch:x"), Placing("x:5", "depth:x")):
        plain, turned, same, row, gradient = fetched(placing, build)
        np.testing.assert_array_equal(plain, expected)
        np.testing.assert_array_equal(turned, expected)
        np.testing.assert_array_equal(same, expected[:, [0, 1, 0]].transpose(2, 1, 0))
        np.testing.assert_array_equal(row, x[0][indices])
        counts = [[(i == b).sum() for b in range(3)] for i in indices]
        np.testing.assert_array_equal(gradient, np.repeat(np.array(counts)[..., None], 5, 2))


def test_best_candidates():
    rng = np.random.RandomState(1)
    seq = rng.randint(9, size=(4, 6, 5)).astype("int32")
    scores, other = rng.normal(size=(2, 4, 6)).astype("float32")
    flags = rng.rand(4, 6) > 0.5

    def build(mesh):
        rows, length = dims("batch:4,triple_beam:6"), mtf.Dimension("length", 5)
        given = [
            mtf.import_tf_tensor(mesh, tf.constant(value), mtf.Shape(shape))
            for value, shape in (
                (seq, rows + [length]),
                (scores, rows),
                (other, rows),
                (flags, rows),
            )
        ]
        return package.compute_topk_scores_and_seq(*given, mtf.Dimension("beam", 2))

    found = fetched(WHOLE, build)
    order = np.argsort(-scores, 1)[:, :2]
    np.testing.assert_array_equal(found[0], np.take_along_axis(seq, order[..., None], 1))
    np.testing.assert_array_equal(found[1], np.take_along_axis(other, order, 1))
    np.testing.assert_array_equal(found[2], np.take_along_axis(flags, order, 1))
    np.testing.assert_array_equal(found[3], np.eye(6)[order])


# -- errors


def ids_of(world, text="batch:2,beam:2,length:4", dtype=tf.int32):
    return mtf.zeros(world.mesh, text, dtype)


def logits_of(text):
    return lambda step, ids, states: (mtf.zeros(ids.mesh, text), states)


@pytest.mark.parametrize("ids, logits, text", [
    ("length:4", "vocab:3", "initial_ids must be an integer Tensor of shape [batch, beam, length]"),
    ("batch:2,beam:2,length:4", "batch:2,vocab:3",
     "logits must have the dimensions batch=2, beam=2 and a vocabulary of 2 or more"),
    ("batch:2,beam:2,length:4", "batch:2,beam:2,vocab:1", "a vocabulary of 2 or more"),
])  # fmt: skip
def test_unsuitable_shapes(tf_graph, ids, logits, text):
    world = World()
    ids = ids_of(world, ids)
    before = world.state()
    with pytest.raises(ValueError) as raised:
        package.beam_search(logits_of(logits), ids, 0.6)
    assert text in str(raised.value)
    assert world.state() == before


def test_states_that_change(tf_graph):
    world = World()
    grown = lambda step, ids, states: (mtf.zeros(ids.mesh, "batch:2,beam:2,vocab:3"), [])  # noqa: E731
    with pytest.raises(ValueError, match="logits_fn must return states of the shapes it was given"):
        package.beam_search(grown, ids_of(world), 0.6, states=[ids_of(world)])


def test_candidates_that_do_not_fit(tf_graph):
    world = World()
    rows = mtf.zeros(world.mesh, "batch:2,beam:3")
    flags = mtf.zeros(world.mesh, "batch:2,beam:3", tf.bool)
    with pytest.raises(ValueError, match=r"sequences must be \[batch..., candidates, length\]"):
        package.compute_topk_scores_and_seq(rows, rows, rows, flags, mtf.Dimension("beam", 2))


def test_split_beams(tf_graph):
    """What is chosen from is gathered where a layout splits it."""
    search = table_search(random_table(length=3, vocab=4, seed=0), 2, 0.6)
    for whole, split in zip(fetched(WHOLE, search), fetched(Placing("x:2", "beam:x"), search)):
        np.testing.assert_allclose(split, whole, rtol=1e-6)


def test_gin_name():
    import gin

    gin.parse_config("mesh_tensorflow.beam_search.beam_search.stop_early = False")
    gin.parse_config("mesh_tensorflow.beam_search.greedy_decode.temperature = 0.0")
    assert (package.EOS_ID, package.INF) == (1, 1e7)
