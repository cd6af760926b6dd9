"""Programs: language models of mesh_tensorflow.transformer.transformer, and what they are made of."""

import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.oracle.model_harness import (
    CHANNELS,
    DELIMITED,
    PACKED,
    POSITIONS,
    ROWS,
    Mix,
    given,
    language_model,
    outcome,
    stack,
    unitransformer,
)
from helpers.oracle.oracle_runner import table
from mesh_tensorflow.transformer import transformer as T

TRANSFORMER_MODELS, model = table("batch:x,vocab:y", gradients=False, tolerance=1e-4)


@model(CHANNELS, "batch:x,vocab:y", "batch:x,length:y")
def lm(p):
    return language_model(p)


@model()
def lm_shared(p):
    return language_model(p, shared_embedding_and_softmax_weights=True)


@model()
def lm_eval_smoothed(p):
    return language_model(p, call={"mode": "eval"}, label_smoothing=0.1)


@model()
def lm_no_positions(p):
    return language_model(p, positional_embedding=False, call={"position": given(p, POSITIONS)})


@model(CHANNELS)
def lm_sinusoids(p):
    return language_model(p, sinusoid_positional_embedding=True, max_length=12)


@model(CHANNELS, "batch:x,length:y")
def lm_packed(p):
    packed, positions = given(p, PACKED), given(p, POSITIONS)
    call = {"sequence_id": packed, "position": positions, "subsequence_id": given(p, POSITIONS)}
    return language_model(p, call=call, max_length=10)


@model(CHANNELS, "batch:x,length:y")
def lm_delimited(p):
    return language_model(
        p, targets=given(p, DELIMITED), input_full_attention=True, loss_on_targets_only=True
    )


@model()
def lm_denominator(p):
    return language_model(p, loss_denominator=7.0, call={"num_microbatches": 4})


@model("outer_batch:x,batch:y")
def lm_outer_batch(p):
    targets = p.input("targets", "outer_batch:2,batch:2,length:8", 14)
    return language_model(p, targets=targets)


@model()
def lm_loss_fn(p):
    def loss_fn(model, context, logits, targets, vocab_dim):
        chosen = logits * mtf.one_hot(targets, vocab_dim)
        return mtf.reduce_sum(chosen) / model.loss_denominator(targets, context.num_microbatches)

    return language_model(p, loss_fn=loss_fn)


@model("ensemble:x,batch:y", CHANNELS)
def lm_ensemble(p):
    return language_model(p, ensemble=2)


@model("ensemble:x,batch:y")
def lm_ensemble_inputs(p):
    targets = p.input("targets", "ensemble:2,batch:2,length:8", 14)
    return language_model(
        p, targets=targets, ensemble=2, shared_embedding_and_softmax_weights=True,
        sinusoid_positional_embedding=True,
    )


@model("ensemble:x,batch:y")
def ensemble_logits(p):
    logits = p.input("logits", "ensemble:4,batch:2,vocab:8")
    ensemble, _, vocab = logits.shape.dims
    arguments = logits, ensemble, vocab
    return {
        "mean_prob": T.reduce_ensemble_logits_mean_prob(*arguments),
        "mean_logit": T.reduce_ensemble_logits_mean_logit(*arguments),
        "select": T.reduce_ensemble_logits_select(*arguments, model_id=2),
        "default": T.reduce_ensemble_logits(*arguments),
        "given": T.reduce_ensemble_logits(*arguments, reduce_fn=T.reduce_ensemble_logits_mean_logit),
    }


@model()
def aligned(p):
    inputs, targets = p.input("inputs", ROWS, 14), p.input("targets", ROWS, 14)
    uni = unitransformer(autoregressive=False)
    logits, loss = uni.call_simple(inputs, targets, True, sequence_id=mtf.minimum(inputs, 1))
    return outcome(p, logits, loss)


@model()
def encoder_alone(p):
    """Vectors instead of logits; the outputs of the layers; no loss but the layers'."""
    uni = unitransformer(
        stack(layers=[(Mix, {"loss": 0.5})]), autoregressive=False, output_vocab_size=None
    )
    outputs = []
    vectors, loss = uni.call_simple(p.input("inputs", ROWS, 14), None, True, layer_outputs=outputs)
    return outcome(p, vectors, loss, **{f"layer{i}": y for i, y in enumerate(outputs)})


@model(CHANNELS)
def classifier_scale(p):
    a, b, vocab, d = mtf.convert_to_shape("batch:4,length:3,vocab:8,d_model:16").dims
    ids = p.input("ids", mtf.Shape([a, b]), 8)
    outputs = {}
    for scaled in (False, True):
        embedding = T.VocabEmbedding(
            p.mesh, vocab, d, mtf.VariableDType(tf.float32), f"e{scaled}", None,
            scale_variable_like_classifier_weights=scaled,
        )
        outputs[f"vectors{scaled}"] = x = embedding.ids_to_embedding(ids, None)
        outputs[f"logits{scaled}"] = embedding.hidden_to_logits(x, None)
    p.fill_variables()
    return outputs


@model("batch:x,length:y")
def inputs_of_targets(p):
    targets, packed = p.input("targets", ROWS, 6) - 2, given(p, PACKED)
    return {
        "whole": T.autoregressive_inputs(targets),
        "packed": T.autoregressive_inputs(targets, sequence_id=packed),
        "older": T.shift_targets(targets),
        "older_ids": T.shift_targets(targets, bos_id=3, eos_id=2),
        "mask": mtf.cast(T.delimited_lm_inputs_mask(targets), tf.int32),
        "mask_2": mtf.cast(T.delimited_lm_inputs_mask(targets, eos_id=2), tf.int32),
    }


@model("length:x")
def sinusoids(p):
    length, d = mtf.convert_to_shape("length:10,d_model:8").dims
    return {
        "sinusoids": T.sinusoid_positional_embedding_weights(p.mesh, length, d, tf.float32),
        "sinusoids_scaled": T.sinusoid_positional_embedding_weights(p.mesh, length, d, tf.float32, 0.5, 50.0),
    }
