"""Decoding with a draft, against decoding without one."""

import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.transformer import decoding_models as models
from helpers.transformer.decoding_models import EOS, LENGTH, PLACINGS, VOCAB, prefixes

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.harness import WHOLE, Placing
from mesh_tensorflow.transformer import transformer, transformer_layers
from mesh_tensorflow.transformer.transformer import _decoding

NOISE = 0.3  # with which the draft agrees often, but not always


def upto_end(ids, given, stop=EOS):
    """Returns the ids up to the first end of each row that was not given, then zeros."""
    ids = ids.copy()
    for row, n in zip(ids, (given != 0).sum(1)):
        ends = np.flatnonzero(row[n:] == stop)
        if len(ends):
            row[n + ends[0] + 1 :] = 0
    return ids


def both(given, num_draft_ids=3, placing=WHOLE, noise=NOISE, relative=False, **kwargs):
    """Returns the ids without and with a draft."""

    def layers():
        attention = transformer_layers.SelfAttention(
            num_heads=4,
            key_value_size=4,
            relative_attention_type="bias_shared" if relative else None,
            rotary=mtf.layers.RotaryEmbedding() if relative else None,
        )
        return [attention, models.feed_forward(), models.attention()]

    model, draft = (models.unitransformer(layers()) for _ in range(2))

    def build(mesh):
        partial = models.imported(mesh, given)
        plain = model.sample_autoregressive(partial, **kwargs)
        with tf.variable_scope("", reuse=tf.AUTO_REUSE):
            ids = model.sample_autoregressive(
                partial, draft_model=draft, num_draft_ids=num_draft_ids, **kwargs
            )
        return [plain, ids]

    found = models.run(build, placing, draft_noise=noise)
    return found[0], found[1]


@pytest.mark.slow_but(1)
@pytest.mark.slow("*x:2,y:2*")
@pytest.mark.parametrize("placing", [WHOLE, *PLACINGS, Placing("x:2", "memory_length:x")], ids=str)
def test_the_same_ids_in_every_layout(placing):
    given = prefixes((0, 2, 4, 7))
    plain, ids = both(given, placing=placing, relative=True)
    np.testing.assert_array_equal(ids, upto_end(plain, given))


@pytest.mark.slow
@pytest.mark.parametrize("counts, options", [
    ((0, 0, 0, 0), {"has_partial_sequences": False}),
    ((0, 0, 0, 0), {"has_partial_sequences": False, "bos_id": 5, "num_draft_ids": 1}),
    ((8, 8, 3, 1), {"num_draft_ids": 5, "bos_id": 7}),
    ((1, 2, 3, 0), {"never_end": True, "num_draft_ids": 12}),
    ((1, 2, 3, 0), {"max_steps": 3, "never_end": True}),
    ((1, 2, 3, 0), {"max_steps": 0}),
    ((1, 2, 3, 0), {"remove_partial_sequences": True, "never_end": True}),
    ((1, 2, 3, 0), {"noise": 3.0, "never_end": True}),
    ((1, 2, 3, 0), {"noise": 0.0, "stop_at_token": 7}),
])  # fmt: skip
def test_the_same_ids_with_every_option(counts, options):
    given = prefixes(counts)
    plain, ids = both(given, **options)
    kept = given * (not options.get("remove_partial_sequences"))
    if not options.get("never_end"):
        plain = upto_end(plain, kept, options.get("stop_at_token", EOS))
    np.testing.assert_array_equal(ids, plain)


@pytest.mark.slow
@pytest.mark.parametrize("keep_top_k, temperature", [(-1, 1.0), (4, 0.7)])
def test_sampled_ids_have_the_distribution_of_the_model(keep_top_k, temperature):
    """Pairs of ids after given ones, against the products of their probabilities."""
    rows, start = 6000, np.array([3, 5])
    model, draft = models.language_model("attention"), models.language_model("attention")

    def build(mesh):
        given = np.zeros((rows, 4), "int32")
        given[:, :2] = start
        ids = model.sample_autoregressive(
            models.imported(mesh, given),
            draft_model=draft, num_draft_ids=2, temperature=temperature,
            sampling_keep_top_k=keep_top_k, stop_at_token=-1,
        )  # fmt: skip
        first = [[*start, i, 0] for i in range(VOCAB)]
        every = models.imported(mesh, np.array(first, "int32"), "first")
        with tf.variable_scope("", reuse=True):
            logits, _ = model.call_simple(
                transformer.autoregressive_inputs(every), every, compute_loss=False, mode="eval"
            )
        return [ids, logits]

    found = models.run(build, scale=0.5, draft_noise=0.5)
    logits = found[1][:, 2:4] / temperature
    if keep_top_k > 0:
        logits[logits < np.sort(logits)[..., -keep_top_k, None]] = -np.inf
    p = np.exp(models.log_softmax(logits))
    expected = p[0, 0][:, None] * p[:, 1] * rows
    counts = np.zeros((VOCAB, VOCAB))
    np.add.at(counts, tuple(found[0][:, 2:4].T), 1)
    assert (counts[expected == 0] == 0).all()
    common = expected > 5
    chi_squared = ((counts - expected)[common] ** 2 / expected[common]).sum()
    freedom = common.sum()
    assert chi_squared < freedom + 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("layout", ["", "vocab:x", "batch:x"])
def test_of_equal_logits_the_first_are_drawn_from(layout):
    """As without a draft, where `top_k` gives the ids."""
    rows = [[2, 1, 2, 2, 0, 2], [1, 1, 1, 1, 1, 1], [0, 0, 3, 0, 0, 3], [5, 4, 3, 2, 1, 0]]
    mesh = mtf.Mesh(mtf.Graph(), "mesh", mesh_impl=Placing("x:2", layout).impl())
    logits = mtf.constant(mesh, rows, "batch:4,vocab:6", tf.bfloat16)
    vocab_dim = logits.shape.dims[1]
    scaled = _decoding.Choice(1.0, 3, 1, False).scaled(logits, vocab_dim).numpy()
    expected = [[0, 2, 3], [0, 1, 2], [0, 2, 5], [0, 1, 2]]
    assert [np.flatnonzero(row > -1e8).tolist() for row in scaled] == expected


def test_fewer_steps_than_ids():
    """With a draft that is always right, the loop takes a step for each num_draft_ids + 1 ids."""
    steps = []
    model, draft = models.language_model("attention"), models.language_model("attention")

    def build(mesh):
        ids = model.sample_autoregressive(
            mtf.zeros(mesh, f"batch:2,length:{LENGTH}", tf.int32),
            draft_model=draft, num_draft_ids=3, never_end=True, has_partial_sequences=False,
        )  # fmt: skip
        return [ids]

    original = mtf.while_loop

    def counted(cond, body, variables, **kwargs):
        def with_count(count, *rest):
            return [count + 1, *body(*rest)]

        zero = mtf.constant(variables[0].mesh, 0, dtype=tf.int32)
        count, *found = original(lambda _, *rest: cond(*rest), with_count, [zero, *variables])
        steps.append(count)
        return found

    def with_counted_loop(mesh):
        from mesh_tensorflow.transformer.transformer import _decoding

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_decoding.mtf, "while_loop", counted)
            return [*build(mesh), *steps]

    assert models.run(with_counted_loop)[1] == LENGTH / 4


OTHERS = {
    "one head of keys": lambda: transformer_layers.SelfAttention(
        num_heads=4, key_value_size=4, num_memory_heads=1
    ),
    "contextual": lambda: transformer_layers.SelfAttention(
        num_heads=4, key_value_size=4, relative_attention_type="contextual"
    ),
    "synthesizer": lambda: transformer_layers.Synthesizer(
        num_heads=4, key_value_size=4, synthesize_mode="random"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_other_layers(kind):
    model, draft = (
        models.unitransformer([models.attention(), OTHERS[kind](), models.feed_forward()])
        for _ in range(2)
    )

    def build(mesh):
        partial = models.imported(mesh, prefixes((1, 2, 3, 0)))
        plain = model.sample_autoregressive(partial, never_end=True)
        with tf.variable_scope("", reuse=tf.AUTO_REUSE):
            ids = model.sample_autoregressive(partial, never_end=True, draft_model=draft)
        return [plain, ids]

    np.testing.assert_array_equal(*models.run(build, draft_noise=NOISE).values())


@pytest.mark.slow
def test_decoding_from_sequences_to_sequences():
    given = prefixes((3, 8, 1, 5))
    model, draft = models.encoder_and_decoder("attention"), models.encoder_and_decoder("attention")

    def build(mesh):
        inputs = models.imported(mesh, given)
        plain = model.decode(inputs)
        with tf.variable_scope("", reuse=tf.AUTO_REUSE):
            return [plain, model.decode(inputs, draft_model=draft)]

    plain, ids = models.run(build, draft_noise=NOISE).values()
    np.testing.assert_array_equal(ids, upto_end(plain, np.zeros_like(given)))


def fails(text, draft=None, model=None, **kwargs):
    draft = draft or models.language_model("attention")
    model = model or models.language_model("attention")
    with tf.Graph().as_default(), pytest.raises(ValueError, match=re.escape(text)):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        model.sample_autoregressive(models.imported(mesh, prefixes()), draft_model=draft, **kwargs)


def test_bad_drafts():
    fails("num_draft_ids must be 1 or more, not 0", num_draft_ids=0)
    fails(
        "draft_model: transformer has the output vocabulary vocab=16, but transformer has vocab=12; "
        "make both with the same output_vocab_size",
        draft=models.language_model("attention", output_vocab_size=16),
    )
    fails(
        "RunningSum decodes one position at a time; speculative decoding asks for speculated=5 in "
        "a step. Decode without draft_model",
        model=models.language_model("sums"),
    )
    local = models.unitransformer(
        [transformer_layers.LocalSelfAttention(radius=2, num_heads=4, key_value_size=4)]
    )
    fails("LocalSelfAttention decodes one position at a time", model=local)
    model, draft = models.encoder_and_decoder("attention"), models.encoder_and_decoder("attention")
    with tf.Graph().as_default(), pytest.raises(ValueError, match="but beam_size is 2; set beam"):
        inputs = models.imported(mtf.Mesh(mtf.Graph(), "mesh"), prefixes())
        model.decode(inputs, beam_size=2, draft_model=draft)
