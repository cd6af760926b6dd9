"""Neural network layers, one kind per file."""

from mesh_tensorflow.layers._attention.attention import (
    dot_product_attention,
    multihead_attention,
    multihead_attention_params,
    multihead_attention_vars,
)
from mesh_tensorflow.layers._attention.attention_incremental import (
    masked_local_attention_1d_incremental,
    multihead_encdec_attention_incremental,
    multihead_self_attention_incremental,
)
from mesh_tensorflow.layers._attention.blocked import blocked_attention
from mesh_tensorflow.layers._attention.compressed import (
    compress_mean,
    multihead_self_attention_memory_compressed,
)
from mesh_tensorflow.layers._attention.local_attention import (
    local_1d_halo_exchange,
    local_2d_halo_exchange,
    local_2d_self_attention_spatial_blocks,
    local_self_attention_spatial_blocks,
    masked_local_attention_1d,
)
from mesh_tensorflow.layers._attention.masks import (
    attention_bias_local_2d_block,
    attention_bias_local_block,
    attention_mask_autoregressive,
    attention_mask_ignore_padding,
    attention_mask_same_segment,
    rename_length_to_memory_length,
)
from mesh_tensorflow.layers._conv import (
    conv2d,
    conv2d_with_blocks,
    conv3d,
    conv3d_with_blocks,
)
from mesh_tensorflow.layers._conv1d import conv1d, separable_conv1d
from mesh_tensorflow.layers._conv_transpose import (
    conv2d_transpose,
    conv2d_transpose_with_blocks,
    conv3d_transpose,
    conv3d_transpose_with_blocks,
)
from mesh_tensorflow.layers._dense import (
    DenseInitializer,
    VarianceScalingInitializer,
    dense,
    dense_product,
    dense_relu_dense,
    get_dense_kernel_weights,
    unit_scaling_convention,
    us_einsum,
)
from mesh_tensorflow.layers._embedding import embedding, embedding_weights
from mesh_tensorflow.layers._loss import (
    sigmoid_cross_entropy_with_logits,
    softmax_cross_entropy_with_logits,
    weights_nonzero,
)
from mesh_tensorflow.layers._norm import batch_norm, corr, layer_norm
from mesh_tensorflow.layers._pipeline.pipeline import pipeline
from mesh_tensorflow.layers._pipeline.schedule import PipelineSchedule
from mesh_tensorflow.layers._pool import avg_pool2d, avg_pool3d, max_pool2d, max_pool3d
from mesh_tensorflow.layers._regularize import (
    annealed_dropout,
    clip_activation_gradient,
    multiplicative_jitter,
    summary_for_clip_activation_gradient,
)
from mesh_tensorflow.layers._reversible import reversible_half_residual_and_swap

__all__ = [
    "DenseInitializer",
    "PipelineSchedule",
    "VarianceScalingInitializer",
    "annealed_dropout",
    "attention_bias_local_2d_block",
    "attention_bias_local_block",
    "attention_mask_autoregressive",
    "attention_mask_ignore_padding",
    "attention_mask_same_segment",
    "avg_pool2d",
    "avg_pool3d",
    "batch_norm",
    "blocked_attention",
    "clip_activation_gradient",
    "compress_mean",
    "conv1d",
    "conv2d",
    "conv2d_transpose",
    "conv2d_transpose_with_blocks",
    "conv2d_with_blocks",
    "conv3d",
    "conv3d_transpose",
    "conv3d_transpose_with_blocks",
    "conv3d_with_blocks",
    "corr",
    "dense",
    "dense_product",
    "dense_relu_dense",
    "dot_product_attention",
    "embedding",
    "embedding_weights",
    "get_dense_kernel_weights",
    "layer_norm",
    "local_1d_halo_exchange",
    "local_2d_halo_exchange",
    "local_2d_self_attention_spatial_blocks",
    "local_self_attention_spatial_blocks",
    "masked_local_attention_1d",
    "masked_local_attention_1d_incremental",
    "max_pool2d",
    "max_pool3d",
    "multihead_attention",
    "multihead_attention_params",
    "multihead_attention_vars",
    "multihead_encdec_attention_incremental",
    "multihead_self_attention_incremental",
    "multihead_self_attention_memory_compressed",
    "multiplicative_jitter",
    "rename_length_to_memory_length",
    "pipeline",
    "reversible_half_residual_and_swap",
    "separable_conv1d",
    "sigmoid_cross_entropy_with_logits",
    "softmax_cross_entropy_with_logits",
    "summary_for_clip_activation_gradient",
    "unit_scaling_convention",
    "us_einsum",
    "weights_nonzero",
]
