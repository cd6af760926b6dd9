"""Programs: functions below the attention layers of transformers, local attention, prompts."""

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.oracle.attention_harness import (
    BATCH,
    DEPTH,
    NO_GRADIENTS,
    SMALL,
    context_for,
    integers,
    outputs_of,
)
from helpers.oracle.oracle_runner import dims, table, with_variables
from mesh_tensorflow.transformer import attention as A
from mesh_tensorflow.transformer import transformer_layers as T

TRANSFORMER_FUNCTIONS, program = table("batch:x,heads:y")


def qkv(p, memory="memory_length"):
    shapes = {"q": "length:8,heads:2,d_kv:4", "k": f"{memory}:8,heads:2,d_kv:4", "v": f"{memory}:8,heads:2,d_v:3"}
    return [p.input(n, f"batch:2,{s}") for n, s in shapes.items()]


@program("batch:x,length:y", "batch:x,heads:y", "batch:x,d_ff:y")
def attention_function(p):
    q, k, v = qkv(p)
    context = context_for(p)
    bias = p.input("bias", "length:8,memory_length:8")
    arguments = dims("memory_length:8,d_kv:4,d_v:3")
    attend = A.attention
    return {
        "attention_biased": attend(q, k, v, *arguments, bias=bias, context=context),
        "attention_extra": attend(q, k, v, *arguments, bias=bias, extra_logit=0.5, context=context, dropout_rate=0.5),
        "attention_float32": attend(q, k, v, *arguments, bias=bias, float32_logits=False, context=context),
    }


@program()
def hybrid_attention(p):
    q, k, v = qkv(p)
    context = context_for(p, length_dim=q.shape.dims[1])
    arguments = (context, *dims("memory_length:8,d_kv:4,d_v:3"))
    bias = p.input("bias", "length:8,memory_length:8")
    with tf.variable_scope("plain"):
        plain = A.hybrid_attention(q, k, v, *arguments, extra_logit=0.5)
    with tf.variable_scope("biased"):
        biased = A.hybrid_attention(q, k, v, *arguments, bias=bias)
    outputs = {"plain": plain, "biased": biased}
    with_variables(p, outputs)
    for name in p.feeds:
        p.feeds[name] = np.array(0.3, "float32")  # where the mix is not at its bounds
    return outputs


def local(p, cases):
    q, k, v = qkv(p, "length")
    [length, key, value] = dims("length:8,d_kv:4,d_v:3")
    sequence_id = integers(p, [[1, 1, 1, 2, 2, 2, 2, 3], [1, 1, 2, 2, 2, 3, 3, 3]], "batch:2,length:8")
    priority = mtf.range(p.mesh, length, tf.int32)
    outputs = {}
    for radius, splits, causal in cases:
        outputs[f"y_{radius}_{splits}_{causal}"] = A.local_attention_1d(
            q, k, v, length, key, value, fully_autoregressive=causal, length_dim_num_splits=splits, radius=radius,
            sequence_id=sequence_id, attention_kwargs={"context": context_for(p)},
        )  # fmt: skip
    outputs["priorities"] = A.local_attention_1d(
        q, k, v, length, key, value, fully_autoregressive=False, radius=4, write_priority=priority,
        read_priority=priority, attention_kwargs={"context": context_for(p), "extra_logit": 0.0},
        length_dim_num_splits=splits,
    )  # fmt: skip
    return outputs


@program("batch:x,heads:y", "")
def local_attention(p):
    return local(p, ((1, 4, True), (20, 2, True), (3, 1, True)))


@program("batch:x,length:y", "length:x,heads:y")
def local_attention_split(p):
    return local(p, ((3, 4, True), (8, 2, False), (3, 2, False)))


@program(**NO_GRADIENTS)
def attention_bits(p):
    visible = mtf.greater(p.input("visible", "length:4,memory_length:3"), 0.0)
    return {
        "float32": A.visibility_mask_to_attention_bias(visible, tf.float32),
        "bfloat16": A.visibility_mask_to_attention_bias(visible, tf.bfloat16),
    }


def prompts(p, use_hyperprompt, share, side, length):
    layer = T.SelfAttention(
        **SMALL, use_hyperprompt=use_hyperprompt, hyperprompt_mtlshare=share, hyperprompt_hidden_dim=3,
        hyperprompt_task_num=2, hyperprompt_length_encoder=2, hyperprompt_length_decoder=3,
        relative_attention_type="bias",
    )  # fmt: skip
    shapes = {
        "prompts": f"task_num:2,memory_length:{length},d_model:{DEPTH}", "task_raw_embedding": "task_num:2,task:3",
        "task_projector_layer_one": "task:6,task_hidden:8", "task_projector_layer_two": "task_hidden:8,task_out:5",
        "layer_embedding": "layers:4,task:3",
    }  # fmt: skip
    for part in "kv":
        shapes[f"hypernet_w_{part}_up"] = f"task_out:5,d_model:{DEPTH},prefix_hidden:3"
        shapes[f"hypernet_w_{part}_down"] = "task_out:5,prefix_hidden:3,heads:2,d_kv:4"
    used = shapes if use_hyperprompt else ["prompts"]
    shared = {side: {n: p.input(n, shapes[n]) for n in used}}
    context = context_for(p, autoregressive=side == "decoder", shared_params=shared)
    context.cache["task-id"] = integers(p, [[1], [0]], f"batch:{BATCH},one:1")
    with tf.variable_scope(f"{side}/block_002/layer_000/SelfAttention"):
        return with_variables(p, outputs_of(p, layer, context))


@program("batch:x,heads:y")
def prompts_of_decoder(p):
    return prompts(p, False, False, "decoder", 3)


@program()
def prompts_of_encoder_shared(p):
    return prompts(p, False, True, "encoder", 2)


@program("batch:x")
def prompts_of_hypernetworks(p):
    return prompts(p, True, False, "encoder", 2)
