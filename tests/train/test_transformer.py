"""A language model of mesh_tensorflow.transformer, trained by mtf.train.fit."""

import functools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.transformer import decoding_models as models

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.harness import assert_close
from mesh_tensorflow.transformer import transformer, transformer_layers

BATCH, LENGTH = mtf.Dimension("batch", 4), mtf.Dimension("length", 8)
IDS = (np.arange(64).reshape(8, 8) * 7 % 13 + 3).astype(np.int32)
FOUR = {"mesh_shape": "rows:2,cols:2", "layout": "batch:rows,heads:cols,d_ff:cols"}


def model_fn(mesh, ids, training, num_microbatches=1, **attention):
    """The loss of a very small language model, and its perplexity."""
    layers = [
        transformer_layers.SelfAttention(num_heads=2, key_value_size=4, **attention),
        transformer_layers.DenseReluDense(hidden_size=16),
    ]
    model = transformer.Unitransformer(
        transformer.LayerStack(
            layers,
            sublayers_initial=[],
            sublayers_per_layer=[
                transformer.sublayer_rms_norm,
                transformer.sublayer_call_layer,
                transformer.sublayer_residual,
            ],
            sublayers_final=[transformer.sublayer_rms_norm],
        ),
        d_model=8,
        input_vocab_size=16,
        output_vocab_size=16,
        autoregressive=True,
        max_length=8,
        vocab_divisor=16,
    )
    _, loss = model.call_simple(
        transformer.autoregressive_inputs(ids),
        ids,
        compute_loss=True,
        mode="train" if training else "eval",
        num_microbatches=num_microbatches,
    )
    return loss


@pytest.mark.slow
def test_a_language_model():
    losses = []
    for place in ({}, FOUR, {**FOUR, "simd": True}):
        result = mtf.train.fit(
            model_fn,
            IDS,
            3,
            dims=[BATCH, LENGTH],
            optimizer=mtf.optimize.AdafactorOptimizer,
            learning_rate=0.05,
            eval_data=IDS,
            log_every=1,
            tokens_per_batch=32,
            progress=False,
            **place,
        )
        losses.append([*result.losses, result.final["eval_loss"]])
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.slow
def test_the_z_loss_of_attention_in_microbatches_of_fit():
    losses = []
    z_loss = functools.partial(model_fn, z_loss_coeff=0.5)
    for number in (1, 2):
        result = mtf.train.fit(
            z_loss, IDS[:4], 2, dims=[BATCH, LENGTH], optimizer=mtf.optimize.SgdOptimizer,
            learning_rate=0.05, log_every=1, progress=False, microbatches=number, seed=1,
        )  # fmt: skip
        losses.append(result.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_the_z_loss_of_attention_counts_once_for_the_batch():
    """In microbatches that the call of the model is told of, whose losses are summed."""

    def build(mesh, number):
        ids = mtf.import_tf_tensor(mesh, tf.constant(IDS[:4]), [BATCH, LENGTH])
        grads, outputs = mtf.serialize_training_step(
            {"ids": ids},
            lambda features: {
                "loss": model_fn(mesh, features["ids"], True, number, z_loss_coeff=0.5)
            },
            BATCH,
            number,
        )
        return [outputs["loss"], *grads]

    whole = models.run(lambda mesh: build(mesh, 1), scale=0.4)
    halves = models.run(lambda mesh: build(mesh, 2), scale=0.4)
    for key, value in whole.items():
        assert_close(halves[key], value, 1e-4)
