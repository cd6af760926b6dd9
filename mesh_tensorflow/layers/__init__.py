"""Layers of neural networks, one kind a file."""

from mesh_tensorflow.layers._conv import (
    conv2d,
    conv2d_with_blocks,
    conv3d,
    conv3d_with_blocks,
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
from mesh_tensorflow.layers._loss import softmax_cross_entropy_with_logits
from mesh_tensorflow.layers._norm import layer_norm
from mesh_tensorflow.layers._pool import avg_pool2d, avg_pool3d, max_pool2d, max_pool3d

__all__ = [
    "DenseInitializer",
    "VarianceScalingInitializer",
    "avg_pool2d",
    "avg_pool3d",
    "conv2d",
    "conv2d_with_blocks",
    "conv3d",
    "conv3d_with_blocks",
    "dense",
    "dense_product",
    "dense_relu_dense",
    "get_dense_kernel_weights",
    "layer_norm",
    "max_pool2d",
    "max_pool3d",
    "softmax_cross_entropy_with_logits",
    "unit_scaling_convention",
    "us_einsum",
]
