"""Sampling one position at a time, against the same models called for all positions."""

import itertools

import gin
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.layer_runs import dims
from helpers.transformer import decoding_models as models
from helpers.transformer.decoding_models import (
    EOS,
    LAYERS,
    LENGTH,
    PLACINGS,
    ROWS,
    VOCAB,
    assert_best,
    language_model,
    log_softmax,
    prefixes,
    steps_until_all_end,
)

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.harness import WHOLE, Placing, assert_close
from mesh_tensorflow.transformer import transformer, transformer_layers


def sampled(model, given, bos_id=0, removed=False, **kwargs):
    """Returns a function that samples, and calls the model for all of the result."""

    def build(mesh):
        partial = models.imported(mesh, given)
        ids = model.sample_autoregressive(partial, bos_id=bos_id, **kwargs)
        inputs = transformer.autoregressive_inputs(ids)
        zero = mtf.constant(mesh, 0, dtype=tf.int32)
        inputs += mtf.one_hot(zero, inputs.shape.dims[-1], bos_id, 0, tf.int32)
        logits, _ = model.call_simple(inputs, ids, compute_loss=False, mode="eval")
        outputs = {"ids": ids, "logits": logits}
        if removed:
            outputs["removed"] = model.sample_autoregressive(
                partial, bos_id=bos_id, remove_partial_sequences=True, **kwargs
            )
        return outputs

    return build


# -- greedy sampling


@pytest.mark.parametrize("kind, counts", [
    ("sums", (0, 2, 4, 7)), ("sums", (0, 0, 0, 0)), ("sums", (8, 8, 3, 1)),
    ("attention", (0, 2, 4, 7)),
])  # fmt: skip
def test_sampling_equals_the_whole_sequence(kind, counts):
    """At temperature 0 each id is the best one by the logits of all positions."""
    given = prefixes(counts)
    found = models.run(sampled(language_model(kind), given))
    assert_best(found, given, steps_until_all_end(found["ids"], given, EOS))


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("kind", LAYERS)
def test_what_is_given_may_be_left_out_of_the_result(kind):
    given = prefixes()
    found = models.run(sampled(language_model(kind), given, removed=True, bos_id=5))
    for row, n in enumerate((given != 0).sum(1)):
        np.testing.assert_array_equal(found["removed"][row, : LENGTH - n], found["ids"][row, n:])
        assert (found["removed"][row, LENGTH - n :] == 0).all()


def test_stops_at_another_token_and_after_a_number_of_steps():
    given = prefixes((1, 1, 2, 3))
    whole = models.run(sampled(language_model(), given, never_end=True))["ids"]
    stop = int(whole[0, 4])  # comes fourth, or before
    found = models.run(sampled(language_model(), given, stop_at_token=stop))
    steps = steps_until_all_end(found["ids"], given, stop)
    assert_best(found, given, steps)
    for limit in (0, 2):
        found = models.run(sampled(language_model(), given, max_steps=limit, never_end=True))
        ends = (given != 0).sum(1) + limit
        np.testing.assert_array_equal(
            found["ids"], np.where(np.arange(LENGTH) < ends[:, None], whole, 0)
        )


def test_never_ends():
    """The end has no chance, even where its logit is the largest."""
    given = prefixes()
    for stop in (EOS, 5):
        found = models.run(sampled(language_model(), given, never_end=True, stop_at_token=stop))
        logits = found["logits"].copy()
        logits[..., stop] = -np.inf
        assert_best({"ids": found["ids"], "logits": logits}, given, LENGTH)


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("has_partial", [False, True])
def test_begins_with_another_id(kind, has_partial):
    given = prefixes() if has_partial else prefixes((0, 0, 0, 0))
    kwargs = {"has_partial_sequences": has_partial, "never_end": True, "stop_at_token": 0}
    begun = [
        models.run(sampled(language_model(kind), given, bos_id=bos, **kwargs)) for bos in (0, 5, 9)
    ]
    for found in begun:
        found["logits"][..., 0] = -np.inf
        assert_best(found, given, LENGTH)
    assert any((a["ids"] != b["ids"]).any() for a, b in itertools.combinations(begun, 2))


@pytest.mark.parametrize("kind, counts", [
    *((kind, (0, 0, 0, 0)) for kind in LAYERS), ("attention", (0, 2, 4, 7)),
])  # fmt: skip
def test_sampling_is_the_same_either_way(kind, counts):
    given = prefixes(counts)
    found = [
        models.run(sampled(language_model(kind), given, has_partial_sequences=has))["ids"]
        for has in (False, True)
    ]
    np.testing.assert_array_equal(*found)


def test_what_is_given_sees_all_of_itself():
    """A model of full attention to its inputs, by logits of the inputs alone."""
    given = prefixes((2, 4, 6, 3))
    model = language_model("attention", input_full_attention=True)

    def build(mesh):
        ids = model.sample_autoregressive(models.imported(mesh, given), never_end=True)
        inputs = transformer.autoregressive_inputs(ids)
        length = inputs.shape.dims[-1]
        count = mtf.import_tf_tensor(
            mesh, tf.constant((given != 0).sum(1), tf.int32), dims("batch:4")
        )
        positions = mtf.range(mesh, length, tf.int32)
        priority = mtf.einsum(
            [positions, mtf.to_int32(mtf.greater(positions, count))], output_shape=ids.shape
        )
        context = transformer.Context(
            model, mesh, dims("batch:4"), length, mtf.VariableDType(tf.float32), mode="eval",
            position=positions, position_is_default=True, losses=[], inputs=inputs,
            write_priority=priority, read_priority=priority,
        )  # fmt: skip
        return {"ids": ids, "logits": model._call_internal(context, inputs)}

    found = models.run(build)
    found["logits"][..., EOS] = -np.inf
    assert_best(found, given, LENGTH)


def test_spans_are_counted_from_what_is_given():
    """The last given id is fed to the first step: a sentinel there is one, not two."""
    given = prefixes((0, 2, 4, 7), seed=1)
    given[[1, 2, 3], [1, 3, 6]] = VOCAB - 1
    memory = np.random.RandomState(1).randint(4, VOCAB, (ROWS, LENGTH))
    values = 3 * np.random.RandomState(2).normal(size=(ROWS, LENGTH, 16)).astype("float32")

    def build(mesh):
        spans = transformer_layers.EncDecAttention(
            num_heads=4, key_value_size=4, relative_attention_type="bias",
            relative_attention_num_buckets=8,
        )  # fmt: skip
        model = models.unitransformer([spans, models.attention()])
        shape = dims(f"batch:{ROWS},memory_length:{LENGTH},d_model:16")
        encoder = {
            "encoder_output": mtf.import_tf_tensor(mesh, tf.constant(values), shape),
            "encoder_inputs": mtf.import_tf_tensor(mesh, tf.constant(memory, tf.int32), shape[:2]),
        }
        ids = model.sample_autoregressive(models.imported(mesh, given), never_end=True, **encoder)
        inputs = transformer.autoregressive_inputs(ids)
        logits, _ = model.call_simple(inputs, ids, compute_loss=False, mode="eval", **encoder)
        return {"ids": ids, "logits": logits}

    gin.bind_parameter("relative_position_spans.num_sentinels", 4)
    found = models.run(build)
    found["logits"][..., EOS] = -np.inf
    assert_best(found, given, LENGTH)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, placing", [("sums", PLACINGS[2]), *(("attention", p) for p in PLACINGS)]
)
@pytest.mark.slips
def test_sampling_is_the_same_in_every_layout(kind, placing):
    given = prefixes()
    build = sampled(language_model(kind), given, never_end=True, removed=True)
    expected, found = models.run(build), models.run(build, placing)
    for key in ("ids", "removed"):
        np.testing.assert_array_equal(found[key], expected[key])
    assert_close(found["logits"], expected["logits"], 1e-4)


def test_ensembles_and_two_batch_dimensions():
    given = prefixes()

    def build(mesh):
        outer = models.imported(mesh, given)
        split = mtf.reshape(outer, mtf.convert_to_shape("outer:2,batch:2,length:8"))
        plain = language_model(name="plain")
        ensemble = language_model(ensemble=3, name="ensemble")
        ids = ensemble.sample_autoregressive(outer)
        inputs = transformer.autoregressive_inputs(ids)
        logits, _ = ensemble.call_simple(inputs, ids, compute_loss=False, mode="eval")
        return {
            "split": plain.sample_autoregressive(split), "whole": plain.sample_autoregressive(outer),
            "ids": ids, "logits": logits,
        }  # fmt: skip

    found = models.run(build)
    np.testing.assert_array_equal(found["split"].reshape(ROWS, LENGTH), found["whole"])
    assert_best(found, given, steps_until_all_end(found["ids"], given, EOS))


# -- sampling by chance


@pytest.mark.slow_but(3)
@pytest.mark.parametrize(
    "temperature, top_k", [(1.0, -1), (0.5, -1), (1.0, 3), (2.0, 3), (1.0, 99)]
)
@pytest.mark.parametrize("placing", [WHOLE, Placing("x:2", "vocab:x")])
def test_frequencies(placing, temperature, top_k):
    """Pearson's chi-square of the first id of many rows, against the softmax of its logits."""
    rows = 3000
    given = np.zeros((rows, 2), "int32")
    found = models.run(
        sampled(
            language_model(d_model=8), given, temperature=temperature, sampling_keep_top_k=top_k,
            has_partial_sequences=False, max_steps=1,
        ),
        placing, scale=0.6,
    )  # fmt: skip
    logits = found["logits"][0, 0] / temperature
    if 0 < top_k < VOCAB:
        logits = np.where(logits >= np.sort(logits)[-top_k], logits, -np.inf)
    expected = rows * np.exp(log_softmax(logits))
    counts = np.bincount(found["ids"][:, 0], minlength=VOCAB)
    assert (counts[expected == 0] == 0).all()
    # Rare ids count together, so that the statistic has the distribution of chi-square.
    rare = (expected > 0) & (expected < 5)
    counts, expected = (np.append(x[expected >= 5], x[rare].sum()) for x in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    assert freedom >= 2
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < freedom + 4.5 * np.sqrt(2 * freedom) + 6


def test_each_step_and_each_row_draws_anew():
    given = np.zeros((200, LENGTH), "int32")
    model = language_model(positional_embedding=False)
    found = models.run(
        sampled(model, given, temperature=3.0, never_end=True, has_partial_sequences=False),
        scale=0.3,
    )
    assert len({tuple(row) for row in found["ids"]}) == 200
    assert len({tuple(column) for column in found["ids"].T}) == LENGTH
