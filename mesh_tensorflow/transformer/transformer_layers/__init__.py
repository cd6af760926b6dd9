"""Layers of transformers: attention, feed-forward layers and convolutions, one kind per file."""

from mesh_tensorflow.transformer.transformer_layers._attention.enc_dec_attention import (
    EncDecAttention,
    TransparentEncDecAttention,
    enc_dec_attention,
    enc_dec_attention_bias,
    relative_position_spans,
)
from mesh_tensorflow.transformer.transformer_layers._attention.local_attention import (
    LocalSelfAttention,
)
from mesh_tensorflow.transformer.transformer_layers._attention.params import attention_params
from mesh_tensorflow.transformer.transformer_layers._attention.self_attention import SelfAttention
from mesh_tensorflow.transformer.transformer_layers._attention.talking_heads import (
    GeneralBilinearEncDecAttention,
    GeneralBilinearSelfAttention,
    TalkingHeadsEncDecAttention,
    TalkingHeadsSelfAttention,
)
from mesh_tensorflow.transformer.transformer_layers._attention.variants import (
    BranchedEncDecAttention,
    BranchedSelfAttention,
    ExpertsEncDecAttention,
    ExpertsSelfAttention,
    Synthesizer,
)
from mesh_tensorflow.transformer.transformer_layers._conv import (
    Conv1D,
    Conv1DLayer,
    Conv1DLocalAttn,
    DynamicConv1DLocalAttn,
    LightweightConv1DLocalAttn,
    LocalConvAttnBlock,
    SeparableConv1DLayer,
)
from mesh_tensorflow.transformer.transformer_layers._feed_forward import (
    DenseReluDense,
    ParallelLayer,
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
