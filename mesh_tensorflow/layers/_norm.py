"""Normalization layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import check_flag, dims_text
from mesh_tensorflow.ops._contractions.softmax import normalize
from mesh_tensorflow.ops._variables.variable import InputDType, computed_in_float32, widened

__all__ = ["batch_norm", "corr", "layer_norm"]


def _vector(
    x: mtf.Tensor, name: str, shape: mtf.Shape, initializer: Callable, **kwargs: Any
) -> mtf.Tensor:
    """Returns a variable that scales or shifts `x`, with activations in the dtype of `x`."""
    dtype = InputDType(activation_dtype=x.dtype)
    return mtf.get_variable(x.mesh, name, shape, initializer=initializer, dtype=dtype, **kwargs)


def layer_norm(
    x: mtf.Tensor, dim: mtf.Dimension, epsilon: float = 1e-6, name: str = "layer_prepostprocess"
) -> mtf.Tensor:
    """Normalizes to mean 0 and variance 1 along a dimension, then scales and shifts.

    Ba et al., "Layer normalization" (2016).

    >>> x = mtf.constant(mesh, [[1.0, 3.0], [0.0, 10.0]], "batch:2,d:2")
    >>> print(np.round(mtf.layers.layer_norm(x, x.shape.dims[1]).numpy(), 3))
    [[-1.  1.]
     [-1.  1.]]

    Args:
      x: a Tensor.
      dim: a Dimension of `x`.
      epsilon: added to the variance.
      name: a string; the variable scope is `<name>/layer_norm`.
    """
    with tf.variable_scope(name + "/layer_norm"):
        scale = _vector(x, "layer_norm_scale", mtf.Shape([dim]), tf.ones_initializer())
        bias = _vector(x, "layer_norm_bias", mtf.Shape([dim]), tf.zeros_initializer())
        return computed_in_float32(normalize)(x, dim, epsilon) * scale + bias


def batch_norm(
    x: mtf.Tensor,
    is_training: bool,
    momentum: float,
    epsilon: float = 1e-9,
    dims_idx_start: Optional[int] = 0,
    dims_idx_end: Optional[int] = -1,
    init_zero: bool = False,
    name: Optional[str] = None,
) -> tuple[mtf.Tensor, list[mtf.Operation]]:
    """Normalizes to mean 0 and variance 1 over a batch, then scales and shifts.

    Ioffe and Szegedy, "Batch normalization" (2015). In training, statistics are those of the
    whole batch, however it is split; otherwise, their moving averages are used.

    >>> x = mtf.constant(mesh, [[1.0, 3.0], [0.0, 10.0]], "batch:2,d:2")
    >>> y, updates = mtf.layers.batch_norm(x, is_training=True, momentum=0.9)
    >>> print(np.round(y.numpy(), 3), len(updates))
    [[ 1. -1.]
     [-1.  1.]] 2

    Args:
      x: a Tensor, usually with dimensions [batch, ..., channels].
      is_training: a bool.
      momentum: the decay of the moving averages, between 0 and 1.
      epsilon: added to the variance.
      dims_idx_start: statistics are over `x.shape.dims[dims_idx_start:dims_idx_end]`.
      dims_idx_end: as above.
      init_zero: whether the scale begins at 0 instead of 1.
      name: a string, the variable scope; "batch_norm" if None.

    Returns:
      A tuple (y, updates): a Tensor of the shape of `x`, and a list of operations that update the
      moving averages, to be run with the training step; empty unless `is_training`.

    Raises:
      ValueError: the indices select no dimension.
    """
    check_flag(
        "batch_norm", "is_training", is_training, "batch_norm(x, is_training, momentum={value})"
    )
    reduced = x.shape.dims[dims_idx_start:dims_idx_end]
    if not reduced:
        raise ValueError(
            f"batch_norm: {x.name} {x.shape} has no dimensions at "
            f"[{dims_idx_start}:{dims_idx_end}] to take statistics over; set dims_idx_start and "
            "dims_idx_end"
        )
    # Before variables are made, whose values take the dtype of `x`: statistics of bfloat16 would
    # have two or three digits.
    given, x = x, widened(x)
    shape = x.shape - reduced
    ones, zeros = tf.ones_initializer(), tf.zeros_initializer()
    fixed = {"trainable": False}
    with tf.variable_scope(name, default_name="batch_norm"):
        scale = _vector(x, "batch_norm_scale", shape, zeros if init_zero else ones)
        bias = _vector(x, "batch_norm_bias", shape, zeros)
        normal = tf.random_normal_initializer()
        moving_mean = _vector(x, "bn_moving_mean", shape, normal, **fixed)
        moving_variance = _vector(x, "bn_moving_variance", shape, ones, **fixed)
        updates = []
        if is_training:
            mean = mtf.reduce_mean(x, output_shape=shape)
            # The mean of squares less the square of the mean would be faster, but lose digits where
            # the mean is large.
            centered = x - mean
            variance = mtf.reduce_mean(mtf.square(centered), output_shape=shape)
            updates = [
                _decay(moving_mean, mean, momentum, "bn_mean_update"),
                _decay(moving_variance, variance, momentum, "bn_var_update"),
            ]
        else:
            centered, variance = x - moving_mean, moving_variance
        # The product in parentheses has the size of the statistics alone.
        y = centered * (mtf.rsqrt(variance + epsilon) * scale) + bias
        return mtf.cast(y, given.dtype), updates


def _decay(average: mtf.Tensor, value: mtf.Tensor, momentum: float, name: str) -> mtf.Operation:
    """Returns an operation that moves an average toward a value.

    It subtracts a difference, so that small steps are not lost in low-precision activations.
    """
    step = (average - value) * (1.0 - momentum)
    return mtf.assign(average, step, assign_fn=mtf.assign_sub_slice, name=name)


def corr(
    x: mtf.Tensor, dim: mtf.Dimension, epsilon: float = 1e-20, name: str = "pearson_correlation"
) -> mtf.Tensor:
    """Computes the Pearson correlation matrix between the entries of a dimension.

    >>> x = mtf.constant(mesh, [[1.0, 2.0], [2.0, 4.0], [3.0, 6.5]], "batch:3,d:2")
    >>> print(np.round(mtf.layers.corr(x, x.shape.dims[1]).numpy(), 2))
    [[1. 1.]
     [1. 1.]]

    Args:
      x: a Tensor; its other dimensions together index the samples.
      dim: a Dimension of `x`.
      epsilon: added to the standard deviations.
      name: a string, the variable scope.

    Returns:
      A Tensor with dimensions [dim_1, dim_2], which are `dim` with `_1` and `_2` appended to its
      name.

    Raises:
      ValueError: `x` lacks `dim`.
    """
    if dim not in x.shape:
        raise ValueError(f"corr: {x.name} {x.shape} has no dimension {dims_text([dim])}")
    with tf.variable_scope(name, default_name="pearson_correlation"):
        each = mtf.Shape([dim])
        centered = x - mtf.reduce_mean(x, output_shape=each)
        norm = mtf.sqrt(mtf.reduce_sum(mtf.square(centered), output_shape=each))
        # corr[i, j] = sum_n unit[n, i] unit[n, j], where each unit[:, i] has norm 1.
        unit = centered / (norm + epsilon)
        sides = [mtf.Dimension(f"{dim.name}_{i}", dim.size) for i in (1, 2)]
        renamed = [mtf.rename_dimension(unit, dim.name, side.name) for side in sides]
        return mtf.einsum(renamed, output_shape=mtf.Shape(sides))
