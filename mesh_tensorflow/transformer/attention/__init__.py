"""Attention: functions of queries, keys and values, and their projection weights."""

from mesh_tensorflow._replaced import replaceable
from mesh_tensorflow.transformer.attention._dot_product import (
    attention,
    maybe_reshape_attention_input_for_2d_sharding,
    visibility_mask_to_attention_bias,
)
from mesh_tensorflow.transformer.attention._other_weights import (
    hybrid_attention,
    local_attention_1d,
    synthetic_attention,
)
from mesh_tensorflow.transformer.attention._params import (
    AttentionParams,
    ExpertsAttentionParams,
    attention_params_simple,
)
from mesh_tensorflow.transformer.attention._prompts import (
    concat_hyper_prompts_kv,
    make_params_hyperprompt,
    make_params_mtlprompt,
)

__all__ = [
    "AttentionParams",
    "ExpertsAttentionParams",
    "attention",
    "attention_params_simple",
    "concat_hyper_prompts_kv",
    "hybrid_attention",
    "local_attention_1d",
    "make_params_hyperprompt",
    "make_params_mtlprompt",
    "maybe_reshape_attention_input_for_2d_sharding",
    "synthetic_attention",
    "visibility_mask_to_attention_bias",
]

replaceable(__name__)
