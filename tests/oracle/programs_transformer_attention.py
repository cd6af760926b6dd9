"""Programs: attention layers of transformers and the functions below them, also when decoding."""

import types

import gin
import numpy as np
import tensorflow.compat.v1 as tf
from oracle_runner import dims, table, with_variables

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import attention as A
from mesh_tensorflow.transformer import transformer, transformer_layers

T = transformer_layers
TRANSFORMER_ATTENTION, program = table("batch:x,heads:y")

BATCH, LENGTH, MEMORY, DEPTH = 2, 6, 5, 8
SMALL = {"num_heads": 2, "key_value_size": 4}
PACKED = [[1, 1, 1, 2, 2, 0], [1, 1, 2, 2, 2, 2]]
ENCODED = [[1, 1, 2, 2, 0], [1, 1, 1, 2, 2]]
IDS = [[0, 11, 5, 5, 10, 7], [0, 3, 11, 4, 9, 10]]
ENCODER_IDS = [[5, 11, 6, 10, 1], [11, 4, 4, 10, 2]]
BFLOAT16 = mtf.VariableDType(tf.bfloat16, tf.float32, tf.bfloat16)


def integers(p, values, shape):
    return mtf.import_tf_tensor(p.mesh, tf.constant(np.array(values), tf.int32), mtf.convert_to_shape(shape))


def model_for(p, autoregressive, ensemble):
    """Returns what layers know of a model."""
    ensemble_dims = dims(f"ensemble:{ensemble}") if ensemble else []
    return types.SimpleNamespace(
        model_dim=mtf.Dimension("d_model", DEPTH), autoregressive=autoregressive,
        fully_autoregressive=autoregressive, ensemble_dims=ensemble_dims,
        ensemble_dim=ensemble_dims[0] if ensemble else None, input_vocab_size_unpadded=12,
        layout=p.layout, mesh_shape=p.mesh_shape,
    )  # fmt: skip


def context_for(
    p, mode="eval", autoregressive=True, packed=False, encoder=False, ensemble=None, dtype=None, **kwargs
):
    """Returns a Context."""
    [batch], [length] = dims(f"batch:{BATCH}"), dims(f"length:{LENGTH}")
    model = model_for(p, autoregressive, ensemble)
    dtype = dtype or mtf.VariableDType(tf.float32)
    priority = mtf.range(p.mesh, length, tf.int32) if autoregressive else None
    options = {
        "model": model, "mesh": p.mesh, "batch_dims": [*model.ensemble_dims, batch], "length_dim": length,
        "variable_dtype": dtype, "mode": mode, "position": mtf.range(p.mesh, length, tf.int32),
        "position_is_default": True, "losses": [], "write_priority": priority, "read_priority": priority,
        "new_states": [], "constant_states": [],
    }  # fmt: skip
    if packed:
        options["sequence_id"] = integers(p, PACKED, f"batch:{BATCH},length:{LENGTH}")
    if encoder:
        memory = p.input("encoder_output", f"batch:{BATCH},memory_length:{MEMORY},d_model:{DEPTH}")
        options["encoder_output"] = mtf.cast(memory, dtype.activation_dtype)
        if packed:
            options["encoder_sequence_id"] = integers(p, ENCODED, f"batch:{BATCH},memory_length:{MEMORY}")
    return transformer.Context(**{**options, **kwargs})


def in_order(state):
    """Returns a state as [batch, memory_length, heads, channels]: its order is of no concern."""
    first = [d for name in ("batch", "memory_length") for d in state.shape.dims if d.name == name]
    rest = sorted((d for d in state.shape.dims if d not in first), key=lambda d: d.name, reverse=True)
    return mtf.transpose(state, mtf.Shape(first + rest))


def outputs_of(p, layer, context):
    """Returns the output of a layer, its states and its losses."""
    shape = f"batch:{BATCH},length:{LENGTH},d_model:{DEPTH}"
    if context.mode == "incremental":
        shape = f"batch:{BATCH},d_model:{DEPTH}"
    if context.model.ensemble_dim:
        shape = f"ensemble:{context.model.ensemble_dim.size}," + shape
    x = mtf.cast(p.input("x", shape), context.activation_dtype)
    outputs = {"y": layer.call(context, x)}
    outputs.update({f"state{i}": in_order(s) for i, s in enumerate(context.new_states)})
    outputs.update({f"loss{i}": loss for i, loss in enumerate(context.losses or [])})
    return outputs


def whole(p, layer, **kwargs):
    return with_variables(p, outputs_of(p, layer, context_for(p, **kwargs)))


def step(p, layer, states, **kwargs):
    """Returns the output of a layer for one position after others, and its new states."""
    position = integers(p, [2, 4], f"batch:{BATCH}")
    context = context_for(
        p, mode="incremental", position=position, position_is_default=False, read_priority=position,
        sequence_id=1, states=[p.input(f"state{i}", s) for i, s in enumerate(states)], **kwargs,
    )  # fmt: skip
    return with_variables(p, outputs_of(p, layer, context))


KEYS = f"batch:{BATCH},memory_length:{LENGTH},heads:2,d_kv:4"
FURTHER = {"gradients": False}


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


@program("batch:x", tolerance=0.03, **FURTHER)
def self_attention_bfloat16(p):
    layer = T.SelfAttention(**SMALL, relative_attention_type="bias", z_loss_coeff=0.1)
    return whole(p, layer, packed=True, dtype=BFLOAT16, mode="train")


@program("batch:x", tolerance=0.03, **FURTHER)
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


@program(**FURTHER)
def self_attention_step(p):
    return step(p, T.SelfAttention(**SMALL, relative_attention_type="bias"), [KEYS, KEYS])


@program(**FURTHER)
def self_attention_shared_kv_step(p):
    return step(p, T.SelfAttention(**SMALL, shared_kv=True), [KEYS])


@program(**FURTHER)
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


def made_once(p, layer, *shapes, **kwargs):
    """Returns a step of decoding with constant states of the encoder."""
    states = [p.input(f"constant{i}", s) for i, s in enumerate(shapes)]
    [memory] = dims(f"memory_length:{MEMORY}")
    return step(p, layer, [], encoder=True, packed=True, constant_states=[(*states, memory)], **kwargs)


MEMORY_KEYS = f"batch:{BATCH},memory_length:{MEMORY},heads:2,d_kv:4"


@program("batch:x", **FURTHER)
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


TALKING = {"key_heads_dims": (("key_heads", 2),), "softmax_heads_dims": (("heads", 4),),
           "value_heads_dims": (("value_heads", 2),), "key_size": 4, "value_size": 3}  # fmt: skip
SHARED = {"key_heads_dims": (("heads", 2), ("a", 2)), "softmax_heads_dims": (("heads", 2), ("b", 3)),
          "value_heads_dims": (("heads", 2),), "key_size": 4, "value_size": 3}  # fmt: skip
ALL_DYNAMIC = ["x2l", "m2l", "x2w", "m2w"]


@program()
def talking_heads(p):
    return whole(p, T.TalkingHeadsSelfAttention(**TALKING, relative_attention_type="bias"), packed=True)


@program()
def talking_heads_same(p):
    one = (("heads", 2),)
    layer = T.TalkingHeadsSelfAttention(one, one, one, key_size=4, value_size=3, dynamic_projections=["x2l"])
    return whole(p, layer)


@program()
def talking_heads_shared(p):
    return whole(p, T.TalkingHeadsSelfAttention(**SHARED))


@program()
def talking_heads_dynamic(p):
    return whole(p, T.TalkingHeadsSelfAttention(**TALKING, dynamic_projections=ALL_DYNAMIC))


@program("ensemble:x,heads:y")
def talking_heads_ensemble(p):
    return whole(p, T.TalkingHeadsSelfAttention(**TALKING, dynamic_projections=["x2l"]), ensemble=2)


@program(**FURTHER)
def talking_heads_step(p):
    states = [f"batch:{BATCH},memory_length:{LENGTH},{rest}" for rest in ("key_heads:2,d_k:4", "value_heads:2,d_v:3")]
    return step(p, T.TalkingHeadsSelfAttention(**TALKING, dynamic_projections=["x2l", "x2w"]), states)


@program()
def talking_heads_enc_dec(p):
    layer = T.TalkingHeadsEncDecAttention(**TALKING, dynamic_projections=["m2l"])
    return whole(p, layer, encoder=True, packed=True)


@program("batch:x", **FURTHER)
def talking_heads_enc_dec_step(p):
    shapes = [f"batch:{BATCH},memory_length:{MEMORY},{rest}" for rest in ("key_heads:2,d_k:4", "value_heads:2,d_v:3")]
    return made_once(p, T.TalkingHeadsEncDecAttention(**TALKING), *shapes)


BILINEAR = {"heads_dims": (("heads", 2),)}


@program("batch:x,heads:y", "d_model:x")
def bilinear_attention(p):
    return whole(p, T.GeneralBilinearSelfAttention(**BILINEAR, relative_attention_type="bias"), packed=True)


@program(**FURTHER)
def bilinear_attention_step(p):
    return step(p, T.GeneralBilinearSelfAttention(**BILINEAR), [f"batch:{BATCH},memory_length:{LENGTH},d_model:{DEPTH}"])


@program()
def bilinear_enc_dec_attention(p):
    return whole(p, T.GeneralBilinearEncDecAttention(**BILINEAR), encoder=True, packed=True)


def synthesizer(mode):
    def build(p):
        layer = T.Synthesizer(
            **SMALL, synthesize_mode=mode, relative_attention_type="bias",
            attention_kwargs={"extra_logit": 0.0},
        )  # fmt: skip
        return whole(p, layer, packed=True)

    build.__name__ = "synthesizer_" + mode
    program(tolerance=3e-5)(build)


for _mode in ("random", "random_plus", "random_plus_alpha", "dense_minus", "dense_plus", "dense_plus_alpha"):
    synthesizer(_mode)


@program(**FURTHER)
def synthesizer_dense_step(p):
    layer = T.Synthesizer(**SMALL, synthesize_mode="dense_plus")
    return step(p, layer, [KEYS, KEYS])


@program("batch:x,heads:y", "batch:x,d_ff:y")
def branched_attention(p):
    layer = T.BranchedSelfAttention(**SMALL, relative_attention_type="bias")
    layer.dense_layer.hidden_size = 12
    return whole(p, layer, packed=True)


@program()
def branched_enc_dec_attention(p):
    layer = T.BranchedEncDecAttention(**SMALL)
    layer.dense_layer.hidden_size = 12
    return whole(p, layer, encoder=True, packed=True)


@program(**FURTHER)
def branched_attention_step(p):
    layer = T.BranchedSelfAttention(**SMALL)
    layer.dense_layer.hidden_size = 12
    return step(p, layer, [KEYS, KEYS])


EXPERTS = {**SMALL, "num_experts": 2, "hidden_size": 6, "group_size": 4, "shared_kv": True,
           "switch_policy_eval": "argmax", "min_expert_capacity": 2}  # fmt: skip


def experts(computation, encoder=False):
    def build(p):
        make = T.ExpertsEncDecAttention if encoder else T.ExpertsSelfAttention
        context = context_for(p, packed=True, encoder=encoder)
        context.model.layout, context.model.mesh_shape = "batch:x", "x:1"
        outputs = outputs_of(p, make(**EXPERTS, expert_computation=computation), context)
        p.fill_variables()
        # Queries have no part in what is found, so those of other weights are but rounding.
        used = [p.inputs["x"], p.graph.name_to_variable["o"].outputs[0]]
        loss = mtf.reduce_sum(mtf.square(outputs["y"]))
        return {**outputs, **{f"d_{i}": dx for i, dx in enumerate(mtf.gradients([loss], used))}}

    build.__name__ = f"experts_{'enc_dec_' if encoder else ''}attention_{computation}"
    program("expert_hidden:y", "d_model:y", gradients=False)(build)


for _computation in ("qkv", "q", "kv"):
    experts(_computation)
experts("qkv", encoder=True)


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


@program(**FURTHER)
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
