"""Embeddings of positions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow._core.errors import dims_text

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context
    from mesh_tensorflow.transformer.transformer._models.unitransformer import Unitransformer

__all__ = [
    "embedding_of_positions",
    "positional_embedding_weights",
    "sinusoid_positional_embedding_weights",
]


def sinusoid_positional_embedding_weights(
    mesh: mtf.Mesh,
    max_length_dim: mtf.Dimension,
    model_dim: mtf.Dimension,
    dtype: tf.DType,
    min_timescale: float = 1.0,
    max_timescale: float = 10000.0,
) -> mtf.Tensor:
    """Returns sines and cosines of positions, at wavelengths in geometric progression.

    Vaswani et al., "Attention is all you need" (2017). They are constants, not variables.

    Args:
      mesh: a Mesh.
      max_length_dim: a Dimension, the positions.
      model_dim: a Dimension of even size: sines in the first half, cosines in the second.
      dtype: a floating dtype.
      min_timescale: the shortest wavelength divided by 2 pi.
      max_timescale: the longest wavelength divided by 2 pi.

    Returns:
      A Tensor with dimensions [max_length_dim, model_dim].

    Raises:
      ValueError: the size of `model_dim` is odd.
    """
    if model_dim.size % 2:
        raise ValueError(
            f"sinusoid_positional_embedding_weights: {dims_text([model_dim])} must be even, for "
            "a sine and a cosine of each wavelength; change d_model"
        )
    half = model_dim.size // 2
    exponent = math.log(max_timescale / min_timescale) / max(half - 1, 1)
    channel = mtf.range(mesh, model_dim, tf.int32)
    rates = mtf.exp(mtf.to_float(mtf.mod(channel, half)) * -exponent) * min_timescale
    # Always in float32: bfloat16 cannot represent 257.
    angles = mtf.range(mesh, max_length_dim, tf.float32) * rates
    # Not a concatenation, so that layouts may split the channels.
    waves = mtf.where(mtf.less(channel, half), mtf.sin(angles), mtf.cos(angles))
    return mtf.cast(waves, dtype)


def positional_embedding_weights(
    model: Unitransformer,
    max_length_dim: mtf.Dimension,
    mesh: mtf.Mesh,
    variable_dtype: mtf.VariableDType,
) -> mtf.Tensor:
    """Returns the positional embedding of a model: a variable, or sinusoids.

    Args:
      model: a Unitransformer.
      max_length_dim: a Dimension, the positions.
      mesh: a Mesh.
      variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.

    Returns:
      A Tensor with dimensions [ensemble..., max_length, d_model]; sinusoids have no `ensemble`.
    """
    if model.sinusoid_positional_embedding:
        return sinusoid_positional_embedding_weights(
            mesh, max_length_dim, model.model_dim, variable_dtype.activation_dtype
        )
    return layers.embedding_weights(
        mesh,
        max_length_dim,
        model.model_dim,
        variable_dtype,
        "positional_embedding",
        ensemble_dim=model.ensemble_dim,
    )


def embedding_of_positions(
    model: Unitransformer,
    max_length_dim: mtf.Dimension,
    context: Context,
    weights: mtf.Tensor,
) -> mtf.Tensor:
    """Returns the positional embeddings of the positions of a Context.

    Args:
      model: a Unitransformer.
      max_length_dim: a Dimension, the positions that have embeddings.
      context: the Context of this call of the model: its mode, positions, states and losses.
      weights: a Tensor with dimensions [..., max_length, d_model].

    Returns:
      A Tensor with dimensions [..., length, d_model]; if the positions are not the default ones,
      with those of the positions in place of `length`.

    Raises:
      ValueError: the length exceeds the model's maximum length.
    """
    length = context.length_dim
    if not context.position_is_default:
        return mtf.gather(weights, context.position, max_length_dim)
    if length.size > max_length_dim.size:
        raise ValueError(
            f"{model.name}: a sequence of {dims_text([length])} exceeds "
            f"{dims_text([max_length_dim])}, for which the model has positional embeddings; make "
            "the model with a larger max_length, or with positional_embedding=False"
        )
    used = mtf.slice(weights, 0, length.size, max_length_dim.name)
    return mtf.rename_dimension(used, max_length_dim.name, length.name)
