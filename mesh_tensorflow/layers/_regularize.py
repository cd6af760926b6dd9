"""Regularization: noise on activations, and clipping of their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.utils import steps_done

__all__ = [
    "annealed_dropout",
    "clip_activation_gradient",
    "multiplicative_jitter",
    "summary_for_clip_activation_gradient",
]


def annealed_dropout(
    x: mtf.Tensor,
    is_training: bool,
    start_step: int,
    end_step: int,
    init_rate: Optional[float] = None,
    noise_shape: Optional[mtf.Shape] = None,
    name: Optional[str] = None,
) -> mtf.Tensor:
    """Applies dropout at a rate that decays to 0 with the global step.

    The rate is `init_rate` until `start_step`, 0 from `end_step` on, and decays linearly in
    between.

    >>> x = mtf.ones(mesh, "d:4")
    >>> y = mtf.layers.annealed_dropout(x, True, start_step=0, end_step=100, init_rate=0.1)
    >>> print(y.shape)
    Shape[d=4]

    Args:
      x: a Tensor.
      is_training: a bool; `x` itself is returned if it is false.
      start_step: an integer.
      end_step: an integer, later than `start_step`.
      init_rate: the initial dropout rate.
      noise_shape: a Shape; the noise is broadcast along the dimensions of `x` that it lacks.
      name: a string, the variable scope; "dropout" if None.

    Raises:
      ValueError: the steps or the rate are out of range.
    """
    if not is_training:
        return x
    if init_rate is None or not 0.0 <= init_rate < 1.0 or start_step >= end_step:
        raise ValueError(
            "annealed_dropout: init_rate must be at least 0 and below 1, and start_step before "
            f"end_step, got init_rate={init_rate}, start_step={start_step}, end_step={end_step}"
        )
    # The global step itself may be read before or after it counts this one.
    step = tf.cast(steps_done(), tf.float32)
    progress = tf.clip_by_value((step - start_step) / (end_step - start_step), 0.0, 1.0)
    keep_prob = 1.0 - init_rate * (1.0 - progress)
    return mtf.dropout(x, is_training, keep_prob=keep_prob, noise_shape=noise_shape, name=name)


def multiplicative_jitter(x: mtf.Tensor, epsilon: float = 1e-2) -> mtf.Tensor:
    """Multiplies `x` by random numbers, uniform between 1 - epsilon and 1 + epsilon.

    >>> x = mtf.ones(mesh, "d:4")
    >>> print(abs(mtf.layers.multiplicative_jitter(x, epsilon=0.01).numpy() - 1).max() <= 0.01)
    True

    Args:
      x: a floating Tensor.
      epsilon: a number; `x` itself is returned if it is 0.
    """
    if epsilon == 0:
        return x
    low, high = 1.0 - epsilon, 1.0 + epsilon
    return x * mtf.random_uniform(x.mesh, x.shape, minval=low, maxval=high, dtype=x.dtype)


@gin.configurable(module="mesh_tensorflow.layers")
def clip_activation_gradient(x: mtf.Tensor, clip_rms_norm: Optional[float] = None) -> mtf.Tensor:
    """Returns the value of `x`, and clips its gradient to a maximum root mean square (RMS).

    Also writes summaries of `x`, see `summary_for_clip_activation_gradient`; all dimensions but
    the last are batch dimensions.

    >>> x = mtf.constant(mesh, [3.0, 4.0], "d:2")
    >>> y = mtf.layers.clip_activation_gradient(x, clip_rms_norm=1.0)
    >>> [dx] = mtf.gradients([mtf.reduce_sum(100.0 * y)], [x])
    >>> print(dx.numpy())
    [1. 1.]

    Args:
      x: a Tensor.
      clip_rms_norm: the largest RMS of the gradient; no clipping if None or 0.

    Raises:
      ValueError: `clip_rms_norm` is negative.
    """
    if clip_rms_norm is not None and clip_rms_norm < 0:
        raise ValueError(
            f"clip_activation_gradient: clip_rms_norm must not be negative, got {clip_rms_norm}"
        )

    def clipped(output_grads: Sequence[mtf.Tensor], **_: Any) -> list[mtf.Tensor]:
        dy = output_grads[0]
        if not clip_rms_norm:
            return [dy]
        # In bfloat16 a sum of many squares would stop to grow, and in float16 it would overflow.
        wide = mtf.to_float(dy) if dy.dtype.is_floating and dy.dtype.size < 4 else dy
        rms = mtf.sqrt(mtf.reduce_mean(mtf.square(wide)))
        # dy * min(1, clip_rms_norm / rms), without a division by an rms of 0.
        return [mtf.cast(wide / mtf.maximum(rms * (1.0 / clip_rms_norm), 1.0), dy.dtype)]

    summary_for_clip_activation_gradient(x, name="forward_act", batch_dims=x.shape.dims[:-1])
    return mtf.custom_gradient(mtf.identity, clipped, [x])


def summary_for_clip_activation_gradient(
    t: mtf.Tensor,
    name: Optional[str] = None,
    batch_dims: Optional[Sequence[mtf.Dimension]] = None,
) -> None:
    """Adds scalar summaries of the mean, the maximum and the root mean square (RMS) of a Tensor.

    Tags are `mean/` and `max/`. With `batch_dims`, the mean, maximum and variance over examples
    of the RMS of an example are added as `rms_mean/<name>`, `rms_max/<name>` and
    `rms_var/<name>`.

    >>> x = mtf.constant(mesh, [[3.0, 4.0]], "batch:1,d:2")
    >>> mtf.layers.summary_for_clip_activation_gradient(x, name="x")

    Args:
      t: a Tensor.
      name: a string.
      batch_dims: the Dimensions that index examples, or None.
    """
    mtf.scalar_summary("mean/", mtf.reduce_mean(t))
    mtf.scalar_summary("max/", mtf.reduce_max(t))
    if not batch_dims:
        return
    rms = mtf.sqrt(mtf.reduce_mean(mtf.square(t), output_shape=mtf.Shape(list(batch_dims))))
    mean = mtf.reduce_mean(rms)
    mtf.scalar_summary(f"rms_mean/{name}", mean)
    mtf.scalar_summary(f"rms_max/{name}", mtf.reduce_max(rms))
    mtf.scalar_summary(f"rms_var/{name}", mtf.reduce_mean(mtf.square(rms - mean)))
