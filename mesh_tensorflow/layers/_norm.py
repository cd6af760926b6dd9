"""Normalization."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.ops._normalize import normalize

__all__ = ["layer_norm"]


def layer_norm(
    x: mtf.Tensor, dim: mtf.Dimension, epsilon: float = 1e-6, name: str = "layer_prepostprocess"
) -> mtf.Tensor:
    """Normalizes to mean 0 and variance 1 along a dimension, then scales and shifts.

    Ba et al., "Layer normalization" (2016).

    Args:
      x: a Tensor.
      dim: a Dimension of it.
      epsilon: added to the variance.
      name: a string; variables are under `name/layer_norm`.
    """
    with tf.variable_scope(name + "/layer_norm"):

        def vector(vector_name: str, initializer: object) -> mtf.Tensor:
            return mtf.get_variable(
                x.mesh,
                vector_name,
                mtf.Shape([dim]),
                initializer=initializer,
                activation_dtype=x.dtype,
            )

        scale = vector("layer_norm_scale", tf.ones_initializer())
        bias = vector("layer_norm_bias", tf.zeros_initializer())
        return normalize(x, dim, epsilon) * scale + bias
