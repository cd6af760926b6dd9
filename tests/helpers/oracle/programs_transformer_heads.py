"""Programs: kinds of attention of transformers that differ in their heads, also when decoding."""

import mesh_tensorflow as mtf
from helpers.oracle.attention_harness import (
    BATCH,
    DEPTH,
    KEYS,
    LENGTH,
    MEMORY,
    NO_GRADIENTS,
    SMALL,
    context_for,
    made_once,
    outputs_of,
    step,
    whole,
)
from helpers.oracle.oracle_runner import table
from mesh_tensorflow.transformer import transformer_layers as T

TRANSFORMER_HEADS, program = table("batch:x,heads:y")

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


@program(**NO_GRADIENTS)
def talking_heads_step(p):
    states = [f"batch:{BATCH},memory_length:{LENGTH},{rest}" for rest in ("key_heads:2,d_k:4", "value_heads:2,d_v:3")]
    return step(p, T.TalkingHeadsSelfAttention(**TALKING, dynamic_projections=["x2l", "x2w"]), states)


@program()
def talking_heads_enc_dec(p):
    layer = T.TalkingHeadsEncDecAttention(**TALKING, dynamic_projections=["m2l"])
    return whole(p, layer, encoder=True, packed=True)


@program("batch:x", **NO_GRADIENTS)
def talking_heads_enc_dec_step(p):
    shapes = [f"batch:{BATCH},memory_length:{MEMORY},{rest}" for rest in ("key_heads:2,d_k:4", "value_heads:2,d_v:3")]
    return made_once(p, T.TalkingHeadsEncDecAttention(**TALKING), *shapes)


BILINEAR = {"heads_dims": (("heads", 2),)}


@program("batch:x,heads:y", "d_model:x")
def bilinear_attention(p):
    return whole(p, T.GeneralBilinearSelfAttention(**BILINEAR, relative_attention_type="bias"), packed=True)


@program(**NO_GRADIENTS)
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


for _mode in ("random", "random_plus", "random_plus_alpha", "dense_minus", "dense_plus", "dense_plus_alpha", "factorized"):
    synthesizer(_mode)


@program(**NO_GRADIENTS)
def synthesizer_dense_step(p):
    layer = T.Synthesizer(**SMALL, synthesize_mode="dense_plus")
    return step(p, layer, [KEYS, KEYS])


@program()
def synthesizer_factorized_unmasked(p):
    layer = T.Synthesizer(**SMALL, synthesize_mode="factorized", attention_kwargs={"max_length": 8})
    return whole(p, layer, autoregressive=False)


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


@program(**NO_GRADIENTS)
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
