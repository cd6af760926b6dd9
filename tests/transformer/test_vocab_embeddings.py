"""Vocabulary embeddings against NumPy, in layouts, and their errors."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.transformer import decoding_models as models
from helpers.transformer import further_models as further
from helpers.transformer.further_models import LENGTH, ROWS, VOCAB, Mix, softmax, weights

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import transformer
from mesh_tensorflow.transformer import vocab_embeddings as vocab

D = 8
CLUSTERS = [
    {"token_count": 6, "embedding_size": D},
    {"token_count": 8, "embedding_size": 4},
    {"token_count": 10, "embedding_size": 2},
]
CLASSES = {
    "factorized": lambda *a: vocab.FactorizedVocabEmbedding(*a, inner_dimension_size=3),
    "factorized_twice": lambda *a: vocab.FactorizedVocabEmbedding(
        *a, inner_dimension_size=3, projects_back=True
    ),
    "adaptive": lambda *a: vocab.AdaptiveVocabEmbedding(*a, clusters=CLUSTERS),
    "mixture": lambda *a: vocab.MixtureOfSoftmaxes(*a, num_softmaxes=3),
    "mixtape": lambda *a: vocab.Mixtape(
        *a, gate_embedding_size=3, frequent_token_fraction=0.35, extra_ids=5
    ),
}
IDS = np.random.RandomState(0).randint(0, VOCAB, (ROWS, LENGTH)).astype("int32")
HIDDEN = np.random.RandomState(1).normal(size=(ROWS, LENGTH, D)).astype("float32")


def embedded(name, mode="eval", ensemble=None, repeat=1, **kwargs):
    """Returns vectors of IDS and logits of HIDDEN."""

    def build(mesh):
        made = CLASSES.get(name, name)(
            mesh, mtf.Dimension("vocab", VOCAB), mtf.Dimension("d_model", D), further.FLOAT, "e",
            ensemble, **kwargs,
        )  # fmt: skip
        ids = models.imported(mesh, IDS)
        hidden = mtf.import_tf_tensor(
            mesh, tf.constant(HIDDEN), mtf.Shape([*ids.shape.dims, mtf.Dimension("d_model", D)])
        )
        if ensemble:
            front = [ensemble]
            ids = mtf.broadcast(ids, mtf.Shape(front + ids.shape.dims))
            hidden = mtf.broadcast(hidden, mtf.Shape(front + hidden.shape.dims))
        context = transformer.Context(
            None, mesh, ids.shape.dims[:-1], ids.shape.dims[-1], further.FLOAT, mode=mode
        )
        outputs = {"vectors": made.ids_to_embedding(ids, context)}
        for i in range(repeat):
            outputs[f"logits{i or ''}"] = made.hidden_to_logits(hidden, context)
        return outputs

    return build


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


def test_factorized():
    found = models.run(embedded("factorized"), scale=0.5)
    table = weights("e1", VOCAB, 3) @ weights("e2", 3, D)
    close(found["vectors"], table[IDS])
    close(found["logits"], HIDDEN * D**-0.5 @ table.T)


def test_factorized_with_a_projection_back():
    found = models.run(embedded("factorized_twice"), scale=0.5)
    close(found["vectors"], (weights("e1", VOCAB, 3) @ weights("e2", 3, D))[IDS])
    close(found["logits"], HIDDEN @ weights("e3", D, 3) @ weights("e1", VOCAB, 3).T)


def clustered(extra=0):
    tables = [
        weights("e_0", 6 + extra, D),
        weights("e_11", 8, 4) @ weights("e_12", 4, D),
        weights("e_21", 10, 2) @ weights("e_22", 2, D),
    ]
    return tables


def test_adaptive():
    found = models.run(embedded("adaptive"), scale=0.5)
    table = np.concatenate(clustered())
    close(found["vectors"], table[IDS])
    close(found["logits"], HIDDEN * D**-0.5 @ table.T)


def contexts(hidden, number, bias=0.0):
    mapped = np.einsum("blc,kcd->blkd", hidden, weights("e_context_weights", number, D, D))
    return np.tanh(mapped + bias)


def test_mixture_of_softmaxes():
    found = models.run(embedded("mixture"), scale=0.5)
    hidden = HIDDEN * D**-0.5
    table = weights("e_embedding_weights", VOCAB, D)
    priors = softmax(hidden @ weights("e_mixture_weights", 3, D).T)
    probabilities = softmax(contexts(hidden, 3) @ table.T)
    close(found["vectors"], table[IDS])
    close(np.exp(found["logits"]), np.einsum("blk,blkv->blv", priors, probabilities))
    close(np.exp(found["logits"]).sum(-1), np.ones([ROWS, LENGTH]))


def mixtape_gates(hidden, frequent):
    vectors = np.tanh(
        np.einsum("bld,ged->blge", hidden, weights("e_prior_weights", 3, 3, D))
        + weights("e_prior_weights_bias", 3, 3)
    )
    activations = np.repeat(hidden @ weights("e_prior_gates_vector", 3, D).T, VOCAB).reshape(
        ROWS, LENGTH, 3, VOCAB
    )
    own = np.einsum("blge,ve->blgv", vectors, weights("e_prior_vocab_vector", frequent, 3))
    activations[..., :frequent] += own + weights("e_prior_bias", frequent, 3).T
    first, second, third = np.moveaxis(1 / (1 + np.exp(-activations)), 2, 0)
    gates = [first * second, first * (1 - second), (1 - first) * third, (1 - first) * (1 - third)]
    return np.stack(gates, 2)


def test_mixtape():
    """The softmax has the last extra ids first, as the most frequent ones."""
    found = models.run(embedded("mixtape"), scale=0.5)
    hidden, table = HIDDEN * D**-0.5, weights("e_embedding_weights", VOCAB, D)
    gates = mixtape_gates(hidden, int(0.35 * VOCAB))
    close(gates.sum(2), np.ones([ROWS, LENGTH, VOCAB]))
    components = contexts(hidden, 4, weights("e_context_weights_bias", 4, D)) @ table.T
    logits = (gates * components).sum(2)
    close(found["vectors"], table[IDS])
    close(found["logits"], np.roll(logits, -5, axis=-1))


def test_mixtape_is_noisy_in_training_only():
    def mixtape(*args, **kwargs):
        return vocab.Mixtape(*args, gate_embedding_size=3, **kwargs)

    for noise in [{"noise_std_dev": 1.0}, {"dropout_rate": 0.5}]:
        for mode in ["train", "eval"]:
            found = models.run(embedded(mixtape, mode=mode, repeat=2, **noise))
            assert np.allclose(found["logits"], found["logits1"]) == (mode == "eval")
    rates = models.run(embedded(mixtape, mode="train", dropout_rate=0.5))["logits"]
    dropped = np.all(rates == 0.0, axis=1)  # the same along the length, for all four components
    assert 0 < dropped.mean() < 0.2


@pytest.mark.parametrize("name", CLASSES)
def test_ensemble(name):
    """Each member has variables of its own."""
    alone = models.run(embedded(name))
    found = models.run(embedded(name, ensemble=mtf.Dimension("ensemble", 2)))
    for key, value in alone.items():
        assert found[key].shape == (2, *value.shape)
        assert not np.allclose(found[key][0], found[key][1])


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.slips
def test_equal_in_layouts(name):
    build = further.language_model(
        lambda: models.stack([Mix()]), CLASSES[name], positional_embedding=False
    )
    further.equal_in_placings(build)


def test_tables_are_split_as_the_vocabulary():
    """Clusters and frequent ids have its dimension, so their sizes must fit the mesh as well."""
    clusters = [{"token_count": n, "embedding_size": s} for n, s in [(5, 8), (7, 4), (12, 2)]]
    for make, size in [
        (lambda *a: vocab.AdaptiveVocabEmbedding(*a, clusters=clusters), 5),
        (lambda *a: vocab.Mixtape(*a, gate_embedding_size=3, frequent_token_fraction=0.3), 7),
    ]:
        build = further.language_model(lambda: models.stack([Mix()]), make, gradients=False)
        with pytest.raises(ValueError, match=f"not divisible.*vocab={size} "):
            models.run(build, further.Placing("x:2", "vocab:x"))


def error(text, make):
    with tf.Graph().as_default(), pytest.raises(ValueError, match=text):
        make(
            mtf.Mesh(mtf.Graph(), "mesh"), mtf.Dimension("vocab", VOCAB),
            mtf.Dimension("d_model", D), further.FLOAT, "e", None,
        )  # fmt: skip


def test_errors():
    error(
        r"token counts \[6\] of the clusters sum to 6, not to vocab=24.*enlarge the last cluster",
        lambda *a: vocab.AdaptiveVocabEmbedding(*a, clusters=CLUSTERS[:1]),
    )
    error(
        "a cluster is a dictionary of token_count and, if wanted, embedding_size.*'count': 3",
        lambda *a: vocab.AdaptiveVocabEmbedding(*a, clusters=[{"count": 3}]),
    )
    error(
        "frequent_token_fraction=0.01 of vocab=24 is 0 tokens",
        lambda *a: vocab.Mixtape(*a, gate_embedding_size=3, frequent_token_fraction=0.01),
    )
    error(
        "extra_ids=25 must be between 0 and the size of vocab=24",
        lambda *a: vocab.Mixtape(*a, gate_embedding_size=3, extra_ids=25),
    )
