"""Beam search by models, and decoding from sequences to sequences."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.transformer import decoding_models as models
from helpers.transformer.decoding_models import (
    DECODER_LAYERS,
    EOS,
    LAYERS,
    LENGTH,
    PLACINGS,
    VOCAB,
    RunningSum,
    assert_best,
    encoder_and_decoder,
    language_model,
    log_softmax,
    prefixes,
    steps_until_all_end,
)

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import transformer

# -- beam search


def searched_in_python(logits_of, beam, alpha, length, stop_early=True):
    """Returns the best sequence of one row, by logits of all positions."""
    alive, finished = [(0.0, [])], []

    def score(total, n):
        return total / ((5.0 + n) / 6.0) ** alpha

    for i in range(length):
        if stop_early and finished and finished[-1][0] > score(alive[0][0], length):
            break
        rows = log_softmax(logits_of([ids for _, ids in alive])[:, i])
        grown = sorted(
            ((total + row[v], [*ids, v]) for (total, ids), row in zip(alive, rows) for v in range(VOCAB)),
            reverse=True,
        )[: 2 * beam]  # fmt: skip
        finished += [(score(total, i + 1), ids) for total, ids in grown if ids[-1] == EOS]
        finished = sorted(finished, reverse=True)[:beam]
        alive = [entry for entry in grown if entry[1][-1] != EOS][:beam]
    return (finished or alive)[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS)
def test_beam_search_equals_one_by_whole_sequences(kind):
    """A search in Python, whose logits come from calls of the model for all positions."""
    model, beam, length = language_model(kind), 3, 5
    cache = {}

    def logits_of(sequences):
        key = tuple(map(tuple, sequences))
        if key not in cache:
            padded = np.zeros((len(sequences), length), "int32")
            for row, ids in zip(padded, sequences):
                row[: len(ids)] = ids

            def build(mesh):
                ids = models.imported(mesh, padded)
                inputs = transformer.autoregressive_inputs(ids)
                return [model.call_simple(inputs, ids, compute_loss=False, mode="eval")[0]]

            cache[key] = models.run(build, scale=0.5)[0]
        return cache[key]

    def search(alpha):
        def build(mesh):
            beams = mtf.zeros(mesh, f"batch:1,beam:{beam},length:{length}", tf.int32)
            return [model.beam_search(beams, length, alpha=alpha)]

        return models.run(build, scale=0.5)[0][0]

    for alpha in (0.0, 2.0):
        expected = searched_in_python(logits_of, beam, alpha, length)
        np.testing.assert_array_equal(search(alpha)[: len(expected)], expected)
        assert (search(alpha)[len(expected) :] == 0).all()


# -- from sequences to sequences


@pytest.mark.parametrize("kind", DECODER_LAYERS)
def test_decoding_equals_the_whole_sequence(kind):
    model, given = encoder_and_decoder(kind), prefixes((3, 8, 1, 5))

    def build(mesh):
        inputs = models.imported(mesh, given)
        ids = model.decode(inputs)
        # All of the targets count, also ids 0 among them.
        ones = mtf.ones(mesh, ids.shape, tf.int32)
        logits, _ = model.call_simple(
            inputs, ids, compute_loss=False, mode="eval", decoder_sequence_id=ones
        )
        return {"ids": ids, "logits": logits}

    found = models.run(build)
    nothing = np.zeros_like(given)
    assert_best(found, nothing, steps_until_all_end(found["ids"], nothing, EOS))


@pytest.mark.slow
@pytest.mark.parametrize("placing", PLACINGS)
def test_decoding_is_the_same_in_every_layout(placing):
    given = prefixes((3, 8, 1, 5))
    rules = {"layout": mtf.convert_to_layout_rules(placing.layout),
             "mesh_shape": mtf.convert_to_shape(placing.mesh)}  # fmt: skip

    def build(mesh):
        model = encoder_and_decoder("attention")
        for part in (model.encoder, model.decoder):
            part.layout, part.mesh_shape = rules["layout"], rules["mesh_shape"]
        inputs = models.imported(mesh, given)
        return {
            "greedy": model.decode(inputs), "beams": model.decode(inputs, beam_size=4, alpha=9.0),
        }  # fmt: skip

    expected, found = models.run(build, scale=0.5), models.run(build, placing, scale=0.5)
    for key, ids in expected.items():
        np.testing.assert_array_equal(found[key], ids)
    assert len({tuple(row) for row in expected["beams"]}) > 1


@pytest.mark.slow
def test_lengths_of_what_is_decoded():
    given = prefixes((3, 8, 1, 5))

    def build(mesh):
        inputs, model = models.imported(mesh, given), encoder_and_decoder()
        return {
            "short": model.decode(inputs, max_decode_length=5),
            "long": model.decode(inputs, max_decode_length=11),
            "plain": model.decode(inputs),
            "beams": model.decode(inputs, beam_size=2, max_decode_length=11),
            # the longest input has 8 ids
            "limited": model.decode(
                inputs, beam_size=2, decode_length_multiplier=0.25, decode_length_constant=1, alpha=9.0
            ),
        }  # fmt: skip

    found = models.run(build, scale=0.5)
    shapes = {key: ids.shape[1] for key, ids in found.items()}
    assert shapes == {"short": 5, "long": 11, "plain": 8, "beams": 11, "limited": 8}
    assert (found["limited"][:, 3:] == 0).all() and (found["limited"][:, 2] != 0).any()


def test_one_beam_finds_what_greedy_sampling_does():
    given = prefixes((3, 8, 1, 5))

    def build(mesh):
        inputs, model = models.imported(mesh, given), encoder_and_decoder()
        shape = mtf.convert_to_shape("batch:4,beam:1,length:8")
        shared = model._shared_params(mesh, mtf.VariableDType(tf.float32))
        output, _ = model.encoder.call_simple(
            inputs, None, compute_loss=False, mode="infer", sequence_id=mtf.minimum(inputs, 1),
            shared_params=shared,
        )  # fmt: skip
        to_memory = mtf.layers.rename_length_to_memory_length
        one = model.decoder.beam_search(
            mtf.zeros(mesh, shape, tf.int32), 8, alpha=0.0, shared_params=shared,
            encoder_output=to_memory(output),
            encoder_sequence_id=to_memory(mtf.minimum(inputs, 1)),
        )  # fmt: skip
        return {"one": one, "greedy": model.decode(inputs)}

    found = models.run(build)
    for one, greedy in zip(found["one"], found["greedy"]):
        # One beam follows the best sequence that goes on, beside the best that ends.
        n = list(one).index(EOS) + 1 if EOS in one else LENGTH
        np.testing.assert_array_equal(one[: n - 1], greedy[: n - 1])


# -- errors


def error_of(fn, kind=ValueError):
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        with pytest.raises(kind) as raised:
            fn(mesh)
        return str(raised.value)


class Forgetful(RunningSum):
    """Records another state than it asked for."""

    def call(self, context, x, losses=None):
        y = super().call(context, x)
        if context.mode == "incremental":
            context.new_states.clear()
        return y


class Inventive(RunningSum):
    """Makes a variable only when it is called for one position."""

    def call(self, context, x, losses=None):
        if context.mode == "incremental":
            mtf.get_variable(context.mesh, "late", x.shape.dims[-1:])
        return super().call(context, x)


def test_errors():
    ids = lambda mesh: mtf.zeros(mesh, "batch:2,length:4", tf.int32)  # noqa: E731
    floats = lambda mesh: mtf.zeros(mesh, "batch:2,length:4")  # noqa: E731
    sample = lambda mesh, model, x, **kw: model.sample_autoregressive(x(mesh), **kw)  # noqa: E731
    both_ways = language_model(autoregressive=False)
    for fn in (
        lambda mesh: sample(mesh, both_ways, ids),
        lambda mesh: both_ways.beam_search(mtf.zeros(mesh, "batch:2,beam:2,length:4", tf.int32), 4),
    ):
        assert "transformer must be autoregressive to be decoded" in error_of(fn)
    for kwargs in ({"sampling_keep_top_k": 0}, {"sampling_keep_top_k": -2}):
        text = error_of(lambda mesh, kw=kwargs: sample(mesh, language_model(), ids, **kw))
        assert "sampling_keep_top_k must either be -1, for all ids, or positive" in text
    text = error_of(lambda mesh: sample(mesh, language_model(), floats))
    assert "sequences must be an int32 Tensor with dimensions [batch..., length]" in text
    text = error_of(lambda mesh: language_model().beam_search(ids(mesh), 4))
    assert "inputs must have the dimensions [batch, beam, length]" in text
    text = error_of(lambda mesh: encoder_and_decoder().decode(ids(mesh), beam_size=0))
    assert "beam_size must be 1, for sampling, or more, not 0" in text
    for sampling in ({"temperature": 1.0}, {"temperature": 0.5}, {"sampling_keep_top_k": 3}):
        text = error_of(
            lambda mesh, kw=sampling: encoder_and_decoder().decode(ids(mesh), beam_size=4, **kw)
        )
        [(name, value)] = sampling.items()
        assert f"{name}={value}" in text and "have no meaning with beam_size=4" in text
    text = error_of(lambda mesh: encoder_and_decoder().decode(floats(mesh)))
    assert "inputs must be an integer Tensor with dimensions [batch..., length]" in text


def test_errors_of_layers():
    def sample(layer):
        model = models.unitransformer([layer])
        return lambda mesh: model.sample_autoregressive(
            mtf.zeros(mesh, "batch:2,length:4", tf.int32)
        )

    text = error_of(sample(Forgetful()))
    assert "in mode incremental layers must record states of the shapes" in text
    assert "late" in error_of(sample(Inventive()))
