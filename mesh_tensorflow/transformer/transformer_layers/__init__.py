"""Layers of transformers: attention, feed-forward layers and convolutions, one kind per file."""

from mesh_tensorflow._replaced import replaceable
from mesh_tensorflow.transformer.transformer_layers._attention_variants import (
    BranchedEncDecAttention,
    BranchedSelfAttention,
    ExpertsEncDecAttention,
    ExpertsSelfAttention,
    LocalSelfAttention,
    Synthesizer,
)
from mesh_tensorflow.transformer.transformer_layers._enc_dec_attention import (
    EncDecAttention,
    TransparentEncDecAttention,
    enc_dec_attention,
    enc_dec_attention_bias,
    relative_position_spans,
)
from mesh_tensorflow.transformer.transformer_layers._feed_forward import (
    Conv1D,
    Conv1DLayer,
    Conv1DLocalAttn,
    DenseReluDense,
    DynamicConv1DLocalAttn,
    LightweightConv1DLocalAttn,
    LocalConvAttnBlock,
    ParallelLayer,
    SeparableConv1DLayer,
)
from mesh_tensorflow.transformer.transformer_layers._parts import attention_params
from mesh_tensorflow.transformer.transformer_layers._self_attention import SelfAttention
from mesh_tensorflow.transformer.transformer_layers._talking_heads import (
    GeneralBilinearEncDecAttention,
    GeneralBilinearSelfAttention,
    TalkingHeadsEncDecAttention,
    TalkingHeadsSelfAttention,
)

__all__ = [
    "BranchedEncDecAttention",
    "BranchedSelfAttention",
    "Conv1D",
    "Conv1DLayer",
    "Conv1DLocalAttn",
    "DenseReluDense",
    "DynamicConv1DLocalAttn",
    "EncDecAttention",
    "ExpertsEncDecAttention",
    "ExpertsSelfAttention",
    "GeneralBilinearEncDecAttention",
    "GeneralBilinearSelfAttention",
    "LightweightConv1DLocalAttn",
    "LocalConvAttnBlock",
    "LocalSelfAttention",
    "ParallelLayer",
    "SelfAttention",
    "SeparableConv1DLayer",
    "Synthesizer",
    "TalkingHeadsEncDecAttention",
    "TalkingHeadsSelfAttention",
    "TransparentEncDecAttention",
    "attention_params",
    "enc_dec_attention",
    "enc_dec_attention_bias",
    "relative_position_spans",
]

replaceable(__name__)
