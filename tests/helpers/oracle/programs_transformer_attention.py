"""Programs: attention of transformers to a sequence itself and to an encoder, also when decoding."""

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.oracle.attention_harness import (
    BATCH,
    DEPTH,
    KEYS,
    LENGTH,
    MEMORY,
    MEMORY_KEYS,
    NO_GRADIENTS,
    PACKED,
    SMALL,
    context_for,
    integers,
    made_once,
    outputs_of,
    step,
    whole,
)
from helpers.oracle.oracle_runner import table, with_variables
from mesh_tensorflow.transformer import transformer_layers as T

TRANSFORMER_ATTENTION, program = table("batch:x,heads:y")

IDS = [[0, 11, 5, 5, 10, 7], [0, 3, 11, 4, 9, 10]]
ENCODER_IDS = [[5, 11, 6, 10, 1], [11, 4, 4, 10, 2]]
BFLOAT16 = mtf.VariableDType(tf.bfloat16, tf.float32, tf.bfloat16)


@program("batch:x,heads:y", "d_model:x", "batch:x,d_model:y")
def self_attention(p):
    return whole(p, T.SelfAttention(**SMALL), packed=True)


@program()
def self_attention_bidirectional(p):
    return whole(p, T.SelfAttention(**SMALL, relative_attention_type="bias"), autoregressive=False, packed=True)


@program()
def self_attention_bias(p):
    return whole(p, T.SelfAttention(**SMALL, relative_attention_type="bias", relative_attention_num_buckets=4))


@program()
def self_attention_positions(p):
    position = integers(p, [[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]], f"batch:{BATCH},length:{LENGTH}")
    layer = T.SelfAttention(**SMALL, relative_attention_type="bias", relative_attention_num_buckets=4)
    return whole(p, layer, packed=True, position=position, position_is_default=False)


@program()
def self_attention_contextual(p):
    return whole(p, T.SelfAttention(**SMALL, relative_attention_type="contextual"), packed=True)


@program()
def self_attention_bias_shared(p):
    """Two layers, of which the first has the variable."""
    layer = T.SelfAttention(**SMALL, relative_attention_type="bias_shared", relative_attention_num_buckets=8)
    context = context_for(p)
    with tf.variable_scope("first"):
        first = outputs_of(p, layer, context)["y"]
    with tf.variable_scope("second"):
        second = layer.call(context, first)
    return with_variables(p, {"first": first, "second": second})


@program()
def self_attention_shared_kv(p):
    return whole(p, T.SelfAttention(**SMALL, shared_kv=True, fold_scaling_into_initializer=False))


@program("batch:x,d_model:y")
def self_attention_one_memory_head(p):
    return whole(p, T.SelfAttention(**SMALL, num_memory_heads=1))


@program()
def self_attention_grouped(p):
    return whole(p, T.SelfAttention(num_heads=4, num_memory_heads=2, key_value_size=2))


@program()
def self_attention_not_combined(p):
    return whole(p, T.SelfAttention(**SMALL, combine_dims=False, fold_scaling_into_initializer=False))


@program()
def self_attention_not_combined_grouped(p):
    return whole(p, T.SelfAttention(num_heads=4, num_memory_heads=2, key_value_size=2, combine_dims=False))


@program()
def self_attention_losses(p):
    layer = T.SelfAttention(**SMALL, z_loss_coeff=0.1, attention_kwargs={"extra_logit": 0.5})
    return whole(p, layer, packed=True, mode="train")


@program()
def self_attention_eval(p):
    return whole(p, T.SelfAttention(**SMALL, z_loss_coeff=0.1, dropout_rate=0.5), packed=True)


@program("batch:x", tolerance=0.03, **NO_GRADIENTS)
def self_attention_bfloat16(p):
    layer = T.SelfAttention(**SMALL, relative_attention_type="bias", z_loss_coeff=0.1)
    return whole(p, layer, packed=True, dtype=BFLOAT16, mode="train")


@program("batch:x", tolerance=0.03, **NO_GRADIENTS)
def self_attention_bfloat16_logits(p):
    layer = T.SelfAttention(**SMALL, attention_kwargs={"float32_logits": False})
    return whole(p, layer, dtype=BFLOAT16)


@program("ensemble:x,heads:y")
def self_attention_ensemble(p):
    return whole(p, T.SelfAttention(**SMALL, relative_attention_type="bias"), ensemble=2)


@program("ensemble:x,heads:y")
def self_attention_contextual_ensemble(p):
    return whole(p, T.SelfAttention(**SMALL, relative_attention_type="contextual"), ensemble=2)


@program()
def self_attention_subsequences(p):
    subsequence_id = integers(p, [[1, 1, 2, 3, 3, 0], [1, 2, 3, 3, 4, 4]], f"batch:{BATCH},length:{LENGTH}")
    return whole(p, T.SelfAttention(**SMALL), packed=True, subsequence_id=subsequence_id)


@program()
def self_attention_priorities(p):
    """Inputs that see each other, as with input_full_attention."""
    priority = integers(p, [[0, 0, 0, 3, 4, 5], [0, 0, 2, 3, 4, 5]], f"batch:{BATCH},length:{LENGTH}")
    return whole(p, T.SelfAttention(**SMALL), write_priority=priority, read_priority=priority)


@program()
def self_attention_first_part(p):
    return whole(p, T.SelfAttention(**SMALL, relative_attention_type="bias"), mode="first_part", packed=True)


@program(**NO_GRADIENTS)
def self_attention_step(p):
    return step(p, T.SelfAttention(**SMALL, relative_attention_type="bias"), [KEYS, KEYS])


@program(**NO_GRADIENTS)
def self_attention_shared_kv_step(p):
    return step(p, T.SelfAttention(**SMALL, shared_kv=True), [KEYS])


@program(**NO_GRADIENTS)
def self_attention_step_one_position(p):
    """All rows at the same position, as in beam search."""
    layer = T.SelfAttention(**SMALL)
    position = integers(p, 3, "")
    states = [p.input(f"state{i}", KEYS) for i in range(2)]
    context = context_for(
        p, mode="incremental", position=position, read_priority=position, sequence_id=1, states=states,
        position_is_default=False,
    )  # fmt: skip
    return with_variables(p, outputs_of(p, layer, context))


@program()
def enc_dec_attention(p):
    return whole(p, T.EncDecAttention(**SMALL), encoder=True, packed=True)


@program()
def enc_dec_attention_losses(p):
    layer = T.EncDecAttention(**SMALL, z_loss_coeff=0.1, shared_kv=True, attention_kwargs={"extra_logit": 0.0})
    return whole(p, layer, encoder=True, packed=True, mode="train")


@program()
def enc_dec_attention_one_memory_head(p):
    return whole(p, T.EncDecAttention(**SMALL, num_memory_heads=1), encoder=True, packed=True)


@program()
def enc_dec_attention_spans(p):
    ids = integers(p, IDS, f"batch:{BATCH},length:{LENGTH}")
    encoder_ids = integers(p, ENCODER_IDS, f"batch:{BATCH},memory_length:{MEMORY}")
    layer = T.EncDecAttention(**SMALL, relative_attention_type="bias", relative_attention_num_buckets=8)
    with gin.unlock_config():
        gin.bind_parameter("relative_position_spans.num_sentinels", 2)
    try:
        return whole(p, layer, encoder=True, packed=True, inputs=ids, encoder_inputs=encoder_ids)
    finally:
        gin.clear_config()


@program("batch:x", **NO_GRADIENTS)
def enc_dec_attention_step(p):
    return made_once(p, T.EncDecAttention(**SMALL), MEMORY_KEYS, MEMORY_KEYS)


MIXED = {"layers_per_encoder_module": 2, "layers_per_decoder_module": 3, "encoder_num_modules": 1,
         "decoder_num_modules": 2}  # fmt: skip


@program()
def transparent_attention(p):
    outputs = [p.input(f"layer{i}", f"batch:{BATCH},length:{LENGTH},d_model:{DEPTH}") for i in range(3)]
    sequence_id = integers(p, PACKED, f"batch:{BATCH},length:{LENGTH}")
    context = context_for(
        p, packed=True, encoder_layer_outputs=outputs,
        encoder_output=mtf.rename_dimension(outputs[-1], "length", "memory_length"),
        encoder_sequence_id=mtf.rename_dimension(sequence_id, "length", "memory_length"),
    )  # fmt: skip
    layer = T.TransparentEncDecAttention(**MIXED, **SMALL)
    results = {}
    with tf.variable_scope("first"):
        results["first"] = outputs_of(p, layer, context)["y"]
    context.layer_index = 4
    with tf.variable_scope("second"):
        results["second"] = layer.call(context, results["first"])
    return with_variables(p, results)
