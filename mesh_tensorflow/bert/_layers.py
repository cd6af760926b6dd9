"""Layers specific to BERT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.ops._contractions.softmax import normalize
from mesh_tensorflow.ops._variables.precision import computed_in_float32

__all__ = ["get_activation", "layer_norm"]

_ACTIVATIONS: dict[str, Optional[Callable[[mtf.Tensor], mtf.Tensor]]] = {
    "linear": None,
    "relu": mtf.relu,
    "gelu": mtf.gelu,
    "tanh": mtf.tanh,
}


def get_activation(
    activation_string: Union[str, Callable[[mtf.Tensor], mtf.Tensor], None],
) -> Optional[Callable[[mtf.Tensor], mtf.Tensor]]:
    """Looks up an activation function by name.

    Args:
      activation_string: "gelu", "relu", "tanh" or "linear", case-insensitive; or a function, which
        is returned unchanged; or None or "".

    Returns:
      A function of a Tensor; None for "linear", None and "".

    Raises:
      ValueError: the name is unknown.
    """
    if not activation_string:
        return None
    if not isinstance(activation_string, str):
        return activation_string
    if activation_string.lower() not in _ACTIVATIONS:
        raise ValueError(
            f"Unsupported activation: {activation_string!r}; it should be one of "
            f"{', '.join(map(repr, _ACTIVATIONS))}"
        )
    return _ACTIVATIONS[activation_string.lower()]


def layer_norm(
    x: mtf.Tensor,
    dim: mtf.Dimension,
    epsilon: float = 1e-6,
    subtract_mean: bool = True,
    use_scale: bool = True,
    use_bias: bool = True,
    name: Optional[str] = None,
) -> mtf.Tensor:
    """Normalizes along a dimension, then scales and shifts.

    Ba et al., "Layer normalization" (2016); without the mean, Zhang and Sennrich, "Root mean square
    layer normalization" (2019).

    Args:
      x: a Tensor with the dimension `dim`.
      dim: a Dimension.
      epsilon: added to the variance.
      subtract_mean: whether to subtract the mean.
      use_scale: whether to multiply by a variable "scale" with the dimension `dim`.
      use_bias: whether to add a variable "bias" with the dimension `dim`.
      name: the variable scope; "layer_norm" if None.

    Returns:
      A Tensor of the shape of `x`.

    Raises:
      ValueError: `x` lacks `dim`.
    """
    if dim not in x.shape:
        raise ValueError(
            f"layer_norm: {x.name} {x.shape} has no dimension {dim.name}={dim.size}; normalize "
            "along one of its dimensions"
        )
    with tf.variable_scope(name, default_name="layer_norm"):
        y = computed_in_float32(normalize if subtract_mean else _by_rms)(x, dim, epsilon)
        if use_scale:
            y *= _vector(x, dim, "scale", tf.ones_initializer())
        if use_bias:
            y += _vector(x, dim, "bias", tf.zeros_initializer())
        return y


def _by_rms(x: mtf.Tensor, dim: mtf.Dimension, epsilon: float) -> mtf.Tensor:
    return x * mtf.rsqrt(mtf.reduce_mean(mtf.square(x), reduced_dim=dim) + epsilon)


def _vector(
    x: mtf.Tensor, dim: mtf.Dimension, name: str, initializer: Callable[..., tf.Tensor]
) -> mtf.Tensor:
    return mtf.get_variable(
        x.mesh, name, mtf.Shape([dim]), initializer=initializer, activation_dtype=x.dtype
    )
