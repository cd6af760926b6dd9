"""The adaptive softmax against NumPy: vectors, probabilities, losses, and its errors."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.transformer import decoding_models as models
from helpers.transformer import further_models as further
from helpers.transformer.further_models import LENGTH, VOCAB, Mix, softmax, weights

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import transformer
from mesh_tensorflow.transformer.adaptive_softmax import (
    AdaptiveSoftmaxVocabEmbedding,
    adaptive_softmax_loss_fn,
)

D = 8
SIZES = [(6, D), (8, 4), (10, 2)]
CLUSTERS = [{"token_count": n, "embedding_size": size} for n, size in SIZES]
HIDDEN = np.random.RandomState(1).normal(size=(4, LENGTH, D)).astype("float32")


class Decoder:
    """What `compute_loss` asks of a Unitransformer."""

    z_loss = 0.25

    def loss_denominator(self, targets, num_microbatches):
        return 5.0 * num_microbatches


def make(*args, clusters=CLUSTERS):
    return AdaptiveSoftmaxVocabEmbedding(*args, clusters=clusters)


def outputs(targets, clusters=CLUSTERS):
    def build(mesh):
        embedding = make(
            mesh, mtf.Dimension("vocab", VOCAB), mtf.Dimension("d_model", D), further.FLOAT, "e",
            None, clusters=clusters,
        )  # fmt: skip
        ids = models.imported(mesh, targets)
        hidden = mtf.import_tf_tensor(
            mesh, tf.constant(HIDDEN), mtf.Shape([*ids.shape.dims, mtf.Dimension("d_model", D)])
        )
        context = transformer.Context(
            None, mesh, ids.shape.dims[:1], ids.shape.dims[1], further.FLOAT, num_microbatches=2
        )
        assert embedding.hidden_to_logits(hidden, context) is hidden
        loss = embedding.compute_loss(Decoder(), hidden, ids, context)
        context.mode = "eval"
        return {
            "vectors": embedding.ids_to_embedding(ids, context), "loss": loss,
            "logits": embedding.hidden_to_logits(hidden, context),
        }  # fmt: skip

    return build


def tables():
    return [
        weights("e_0", 6 + 2, D),
        weights("e_11", 8, 4) @ weights("e_12", 4, D),
        weights("e_21", 10, 2) @ weights("e_22", 2, D),
    ]


def probabilities():
    head, *tails = (softmax(HIDDEN * D**-0.5 @ t.T) for t in tables())
    parts = [head[..., :6]] + [head[..., 6 + i : 7 + i] * t for i, t in enumerate(tails)]
    return np.concatenate(parts, -1)


def expected_loss(targets):
    """The cross entropies of positions that count, with z loss in each softmax they use."""
    logits = [HIDDEN * D**-0.5 @ t.T for t in tables()]
    log_z = [np.log(np.exp(x).sum(-1)) for x in logits]
    starts = [0, 6, 14, 24]
    loss = 0.0
    for place in np.ndindex(targets.shape):
        target = targets[place]
        if target > 0:
            loss -= np.log(probabilities()[place][target])
            cluster = np.searchsorted(starts, target, side="right") - 1
            loss += sum(0.25 * log_z[c][place] ** 2 for c in {0, cluster})
    return loss / 10.0


TARGETS = further.target_ids(seed=2)


def test_vectors_and_probabilities():
    found = models.run(outputs(TARGETS), scale=0.5)
    table = np.concatenate([tables()[0][:6], *tables()[1:]])
    np.testing.assert_allclose(found["vectors"], table[TARGETS], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.exp(found["logits"]), probabilities(), rtol=1e-5)
    np.testing.assert_allclose(np.exp(found["logits"]).sum(-1), 1.0, rtol=1e-5)


@pytest.mark.parametrize("targets", [TARGETS, -TARGETS, np.where(TARGETS > 9, TARGETS, -1)])
def test_loss(targets):
    """What is 0 or negative is not predicted."""
    found = models.run(outputs(targets), scale=0.5)
    np.testing.assert_allclose(found["loss"], expected_loss(targets), rtol=1e-5)


def of_room(targets, factors):
    """As `expected_loss`, with room for a part of the positions in each of the tails."""
    logits = [HIDDEN * D**-0.5 @ t.T for t in tables()]
    log_z = [np.log(np.exp(x).sum(-1)) for x in logits]
    starts = [0, 6, 14, 24]
    loss = 0.0
    for row, row_targets in enumerate(targets):
        room = [int(np.ceil(LENGTH * f)) for f in factors]
        for place, target in enumerate(row_targets):
            if target <= 0:
                continue
            cluster = np.searchsorted(starts, target, side="right") - 1
            entries = [(0, target if not cluster else 6 + cluster - 1)]
            if cluster and room[cluster - 1]:
                room[cluster - 1] -= 1
                entries.append((cluster, target - starts[cluster]))
            for c, i in entries:
                z = log_z[c][row, place]
                loss += z - logits[c][row, place, i] + 0.25 * z**2
    return loss / 10.0


@pytest.mark.slow("factors[02]*")
@pytest.mark.parametrize("factors", [(0.5, 0.2), (1, 0.01), (1.0, 0.99)])
def test_loss_with_room_for_some_positions(factors):
    """The first ones of each sequence; with room for all it is the plain loss."""
    clusters = [dict(c) for c in CLUSTERS]
    del clusters[0]["embedding_size"]  # that of the model
    for cluster, factor in zip(clusters[1:], factors):
        cluster["length_projection_factor"] = factor
    expected = of_room(TARGETS, factors)
    assert (expected < expected_loss(TARGETS) - 0.1) == (factors[1] != 0.99)
    for placing in [further.WHOLE, further.Placing("x:2,y:2", "vocab:x,length:y", simd=True)]:
        found = models.run(outputs(TARGETS, clusters), placing, scale=0.5)
        np.testing.assert_allclose(found["loss"], expected, rtol=1e-5)


def test_one_cluster_is_a_softmax():
    """Which the classic cannot build."""
    found = models.run(outputs(TARGETS, [{"token_count": VOCAB, "embedding_size": D}]), scale=0.5)
    logits = HIDDEN * D**-0.5 @ weights("e_0", VOCAB, D).T
    np.testing.assert_allclose(np.exp(found["logits"]), softmax(logits), rtol=1e-5)


def model(mode, loss_fn=adaptive_softmax_loss_fn, **kwargs):
    return further.language_model(
        lambda: models.stack([Mix()]), make, mode=mode, loss_fn=loss_fn,
        positional_embedding=False, z_loss=0.0, **kwargs,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.slips
def test_equal_in_layouts(mode):
    further.equal_in_placings(model(mode))


def test_loss_outside_of_training():
    """From the probabilities it is what it was from the vectors, and what any model has."""
    training, evaluated = (models.run(model(mode), scale=0.5) for mode in ["train", "eval"])
    np.testing.assert_allclose(training["loss"], evaluated["loss"], rtol=1e-5)
    plain = models.run(model("eval", loss_fn=None), scale=0.5)
    np.testing.assert_allclose(plain["loss"], evaluated["loss"], rtol=1e-5)
    assert training["logits"].shape[-1] == D and evaluated["logits"].shape[-1] == VOCAB


@pytest.mark.slips
@pytest.mark.parametrize(
    "option, value", [("label_smoothing", 0.1), ("loss_on_targets_only", True)]
)
def test_options_without_effect_are_told(option, value):
    with pytest.warns(mtf.MeshTensorFlowWarning, match=f"{option}={value} has no effect"):
        found = models.run(model("train", **{option: value}), scale=0.5)["loss"]
    assert found == models.run(model("train"), scale=0.5)["loss"]


def test_model_without_the_embedding():
    plain = further.language_model(
        lambda: models.stack([Mix()]), None, loss_fn=adaptive_softmax_loss_fn
    )
    with pytest.raises(
        ValueError, match="shares no AdaptiveSoftmaxVocabEmbedding with its softmax"
    ):
        models.run(plain)
