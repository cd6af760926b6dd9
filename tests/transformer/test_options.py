"""Every option of transformers that is a word, built in a small model; another word is an error.

The words are those that the classic release knows. What they compute is compared with it in
`tests/oracle`.
"""

import functools
import inspect

import pytest
import tensorflow.compat.v1 as tf
from helpers.oracle import oracle_runner
from helpers.oracle import programs_transformer_further as models

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import (
    fixup_layers,
    moe,
    universal_transformer,
)
from mesh_tensorflow.transformer import transformer_layers as TL
from mesh_tensorflow.transformer.utils import _run

HEADS = {"num_heads": 2, "key_value_size": 4}
EXPERTS = {"num_experts": 2, "hidden_size": 8, "group_size": 8}
SYNTHESIZERS = (
    "random", "random_plus", "random_plus_alpha", "dense_minus", "dense_plus", "dense_plus_alpha",
    "factorized",
)  # fmt: skip
SECOND = ("all", "none", "threshold", "random")


def universal(p, **kwargs):
    layer_stack = universal_transformer.UTLayerStack(
        models.named(models.Mix()), **{**models.UNIVERSAL, **kwargs}
    )
    return models.language_model(p, layer_stack)


def funnel(p, **kwargs):
    sizes = {"block_param_size": [1, 1, 1], "block_repeat_size": [1, 1, 1]}
    return models.funnel(p, 3, n_blocks=3, pooling_size=2, **sizes, **kwargs)


def layer(cls, **given):
    return lambda p, **kwargs: models.language_model(p, models.stack(cls(**given, **kwargs)))


ONE = (("heads", 2),)
TALKING = functools.partial(TL.TalkingHeadsSelfAttention, ONE, ONE, ONE, key_size=4, value_size=4)
WINDOW = {"min_relative_pos": -2, "max_relative_pos": 0, "output_size": 8}
moe_layer = functools.partial(layer, moe.MoE1D, **EXPERTS)
# (argument, what is made with it, all of its words)
OPTIONS = [
    ("synthesize_mode", layer(TL.Synthesizer, **HEADS), SYNTHESIZERS),
    ("relative_attention_type", layer(TL.SelfAttention, **HEADS), (None, "bias", "bias_shared", "contextual")),
    ("attention_func", layer(TL.SelfAttention, **HEADS), (None, "hybrid")),
    ("dynamic_projections", layer(TALKING), (["x2l"], ["m2l"], ["x2w"], ["m2w"])),
    ("attention_type", layer(TL.LocalConvAttnBlock, **WINDOW), ("lightweight_conv", "dynamic_conv")),
    ("expert_computation", layer(TL.ExpertsSelfAttention, **HEADS, shared_kv=True, num_experts=2, hidden_size=8), ("qkv", "q", "kv")),
    ("default_init", layer(fixup_layers.DenseReluDenseFixup, hidden_size=8, num_blocks=1), ("glorot", "he")),
    ("pooling_type", funnel, ("mean", "max", "min")),
    ("moe_gating", moe_layer(), ("top_2", "top_n", "switch", "switch_max", "ntlb", "expert_selection")),
    ("word_embed_mode", moe_layer(), (None, "add", "add_stop_grad", "concat", "concat_stop_grad", "embed_only")),
    ("second_policy_train", moe_layer(), SECOND),
    ("second_policy_train", moe_layer(moe_gating="top_n"), SECOND),
    ("switch_policy_train", moe_layer(moe_gating="switch"), ("argmax", "sample", "input_dropout", "input_jitter")),
    ("switch_policy_train", moe_layer(moe_gating="switch_max"), ("argmax", "sample", "input_dropout", "input_jitter")),
    ("recurrence_type", universal, ("basic", "highway", "act")),
    ("act_type", functools.partial(universal, recurrence_type="act"), ("basic", "accumulated", "global", "random")),
    ("position_start_index", functools.partial(universal, add_position_timing_signal=True), (None, "random", "step")),
    ("add_or_concat_timing_signal", functools.partial(universal, add_position_timing_signal=True), ("add", "concat")),
    ("step_timing_signal_type", universal, ("learned", "sinusoid")),
    ("gates_inputs", functools.partial(universal, recurrence_type="highway"), ("i", "t", "s", "its")),
    ("gate_ffn_layer", functools.partial(universal, recurrence_type="highway"), ("dense", "dense_relu_dense")),
    ("gating_type", functools.partial(universal, use_gated_transformer=True), ("highway", "gru")),
]  # fmt: skip
CASES = [
    pytest.param(make, {name: word}, id=f"{i}-{name}={word}")
    for i, (name, make, words) in enumerate(OPTIONS)
    for word in words
]
WRONG = [
    pytest.param(make, {name: "none such"}, id=f"{i}-{name}")
    for i, (name, make, _) in enumerate(OPTIONS)
    if name not in ("dynamic_projections", "gates_inputs")  # of several words, of letters
]


def build(make, kwargs):
    tf.train.get_or_create_global_step()
    return make(oracle_runner.Case("options", "", ""), **kwargs)


@pytest.mark.slow_but(7)
@pytest.mark.parametrize("make, kwargs", CASES)
def test_words_that_options_take(make, kwargs, tf_graph):
    outputs = build(make, kwargs)
    assert outputs["loss"].shape == mtf.Shape([])


@pytest.mark.parametrize("make, kwargs", WRONG)
def test_words_that_options_do_not_take(make, kwargs, tf_graph):
    with pytest.raises((ValueError, NotImplementedError), match="none such"):
        build(make, kwargs)


def test_modes_of_run():
    assert set(_run._MODES) == {
        "train", "eval", "score_eval", "perplexity_eval", "infer", "score_from_dataset",
        "score_from_strings", "export_score", "export_infer", "export",
    }  # fmt: skip
    known = {"estimator", *inspect.signature(_run.run).parameters}
    for mode, (function, _) in _run._MODES.items():
        needed = inspect.signature(function).parameters.values()
        missing = {p.name for p in needed if p.default is p.empty and p.kind != p.VAR_KEYWORD}
        assert missing <= known, mode
