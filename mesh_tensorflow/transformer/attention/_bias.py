"""Attention masks as biases of the logits."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.layers._attention.masks import MASKED_LOGIT

__all__ = ["visibility_mask_to_attention_bias"]


def visibility_mask_to_attention_bias(visible: mtf.Tensor, dtype: tf.DType) -> mtf.Tensor:
    """Converts a visibility mask to an attention bias: 0 where visible, -1e9 where masked.

    Args:
      visible: a boolean Tensor.
      dtype: the dtype of the result.

    Returns:
      A Tensor of the shape of `visible`.
    """
    return mtf.cast(mtf.logical_not(visible), dtype) * MASKED_LOGIT
