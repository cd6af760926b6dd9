"""Normalization, noise on activations, clipping of their gradients, and losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import check_flag, dims_text
from mesh_tensorflow._core.operation import check_fractions, with_stages
from mesh_tensorflow.ops._contractions.softmax import normalize
from mesh_tensorflow.ops._variable import InputDType, computed_in_float32, widened
from mesh_tensorflow.utils import steps_done

# -- normalization


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
    check_fractions("layer_norm", [x])
    with tf.variable_scope(name + "/layer_norm"):
        scale = _vector(x, "layer_norm_scale", mtf.Shape([dim]), tf.ones_initializer())
        bias = _vector(x, "layer_norm_bias", mtf.Shape([dim]), tf.zeros_initializer())
        # In a mixed precision, means and variances are float32; the result has the dtype of `x`, as
        # the scale and the bias have.
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
    check_fractions("batch_norm", [x])
    reduced = x.shape.dims[dims_idx_start:dims_idx_end]
    if not reduced:
        raise ValueError(
            f"batch_norm: {x.name} {x.shape} has no dimensions at "
            f"[{dims_idx_start}:{dims_idx_end}] to take statistics over; set dims_idx_start and "
            "dims_idx_end"
        )
    # Before variables are made, whose values take the dtype of `x`: statistics of bfloat16 would
    # have two or three digits.
    original, x = x, widened(x)
    shape = x.shape - reduced
    ones, zeros = tf.ones_initializer(), tf.zeros_initializer()
    fixed = {"trainable": False}
    with tf.variable_scope(name, default_name="batch_norm"):
        scale = _vector(x, "batch_norm_scale", shape, zeros if init_zero else ones)
        bias = _vector(x, "batch_norm_bias", shape, zeros)
        normal = tf.random_normal_initializer()
        # Random, as in the classic; each step of training multiplies what is left of it by
        # `momentum`.
        moving_mean = _vector(x, "bn_moving_mean", shape, normal, **fixed)
        moving_variance = _vector(x, "bn_moving_variance", shape, ones, **fixed)
        updates = []
        if is_training:
            # Means of Tensors are over all slices, so it is the same however a layout splits the
            # batch.
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
        return mtf.cast(y, original.dtype), updates


def _decay(average: mtf.Tensor, value: mtf.Tensor, momentum: float, name: str) -> mtf.Operation:
    """Returns an operation that moves an average toward a value.

    It subtracts a difference, so that small steps are not lost in low-precision activations.
    """
    # average - step = momentum * average + (1 - momentum) * value.
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
    check_fractions("corr", [x])
    with tf.variable_scope(name, default_name="pearson_correlation"):
        each = mtf.Shape([dim])
        centered = x - mtf.reduce_mean(x, output_shape=each)
        norm = mtf.sqrt(mtf.reduce_sum(mtf.square(centered), output_shape=each))
        # corr[i, j] = sum_n unit[n, i] unit[n, j], where each unit[:, i] has norm 1.
        unit = centered / (norm + epsilon)
        sides = [mtf.Dimension(f"{dim.name}_{i}", dim.size) for i in (1, 2)]
        renamed = [mtf.rename_dimension(unit, dim.name, side.name) for side in sides]
        return mtf.einsum(renamed, output_shape=mtf.Shape(sides))


# -- regularization


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
        rms = mtf.sqrt(mtf.reduce_mean(mtf.square(wide), output_shape=of_each))
        # dy * min(1, clip_rms_norm / rms), without a division by an rms of 0.
        return [mtf.cast(wide / mtf.maximum(rms * (1.0 / clip_rms_norm), 1.0), dy.dtype)]

    # A number; in a pipeline one of each stage, which the gradient is to keep apart, too.
    of_each = with_stages([x], mtf.Shape([]))
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


# -- losses


def softmax_cross_entropy_with_logits(
    logits: mtf.Tensor, targets: mtf.Tensor, vocab_dim: mtf.Dimension, z_loss: float = 0.0
) -> mtf.Tensor:
    """Computes the cross entropy between targets and the softmax of logits, per example.

    >>> logits = mtf.constant(mesh, [[2.0, 0.0], [0.0, 0.0]], "batch:2,vocab:2")
    >>> ids = mtf.constant(mesh, [0, 1], "batch:2", tf.int32)
    >>> losses = mtf.layers.softmax_cross_entropy_with_logits(logits, ids, logits.shape.dims[1])
    >>> print(np.round(losses.numpy(), 3))
    [0.127 0.693]

    Args:
      logits: a Tensor with dimensions [..., vocab_dim].
      targets: integer ids without `vocab_dim`, or floating probabilities of the shape of
        `logits`.
      vocab_dim: the Dimension of ids, of the size of the vocabulary.
      z_loss: the coefficient of a term log(z) ** 2, where z is the denominator of the softmax;
        it keeps logits near 0.

    Returns:
      A Tensor without `vocab_dim`.

    Raises:
      ValueError: the dimensions do not match.
    """
    if vocab_dim not in logits.shape:
        raise ValueError(
            f"softmax_cross_entropy_with_logits: vocab_dim {dims_text([vocab_dim])} must be in "
            f"logits {logits.name} {logits.shape}"
        )
    if targets.dtype.is_integer:
        expected = set(logits.shape) - {vocab_dim}
        if set(targets.shape) != expected:
            raise ValueError(
                f"softmax_cross_entropy_with_logits: integer targets {targets.name} "
                f"{targets.shape} must have the dimensions of logits {logits.shape} without "
                f"{dims_text([vocab_dim])}"
            )
        # The operation on ids reshapes to [-1, vocab], which is undetermined without a vocabulary.
        if logits.shape.size:
            return _of_ids(logits, targets, vocab_dim, z_loss)
        targets = mtf.one_hot(targets, vocab_dim, dtype=logits.dtype)
    elif set(targets.shape) != set(logits.shape):
        raise ValueError(
            f"softmax_cross_entropy_with_logits: floating targets {targets.name} {targets.shape} "
            f"must have the dimensions of logits {logits.name} {logits.shape}"
        )
    # The sum over a vocabulary of thousands would lose most of its digits in bfloat16.
    logits, targets = widened(logits), widened(targets)
    shape = logits.shape - vocab_dim
    if z_loss == 0.0:
        log_probs = mtf.log_softmax(logits, vocab_dim)
        return mtf.negative(mtf.reduce_sum(log_probs * targets, output_shape=shape))
    # The z-loss needs log z itself, and log p is logits - log z: one pass gives both.
    log_z = mtf.reduce_logsumexp(logits, vocab_dim)
    loss = mtf.negative(mtf.reduce_sum((logits - log_z) * targets, output_shape=shape))
    return loss + z_loss * mtf.square(log_z)


def _of_ids(
    logits: mtf.Tensor,
    ids: mtf.Tensor,
    vocab_dim: mtf.Dimension,
    z_loss: float,
    smoothing: float = 0.0,
) -> mtf.Tensor:
    if ids.dtype not in (tf.int32, tf.int64):
        ids = mtf.cast(ids, tf.int64)
    logits = widened(logits)
    loss, log_z = mtf.CrossEntropyOperation(logits, ids, vocab_dim).outputs
    if smoothing:
        # -mean(log p) = log z - mean(logits), the loss of targets that are all alike.
        even = log_z - mtf.reduce_mean(logits, output_shape=log_z.shape)
        loss = (1.0 - smoothing) * loss + smoothing * even
    return loss if z_loss == 0.0 else loss + z_loss * mtf.square(log_z)


def smoothed_cross_entropy(
    logits: mtf.Tensor,
    ids: mtf.Tensor,
    vocab_dim: mtf.Dimension,
    z_loss: float,
    smoothing: float,
) -> mtf.Tensor:
    """Computes the cross entropy of ids whose probability is partly spread over the vocabulary.

    The targets are `(1 - smoothing) * one_hot + smoothing / vocab`, which is never stored. Szegedy
    et al., "Rethinking the inception architecture for computer vision" (2016).

    Args:
      logits: a Tensor with dimensions [..., vocab_dim].
      ids: an integer Tensor without `vocab_dim`.
      vocab_dim: the Dimension of ids, of the size of the vocabulary.
      z_loss: as that of `softmax_cross_entropy_with_logits`.
      smoothing: a number from 0 to 1.

    Returns:
      A Tensor without `vocab_dim`.
    """
    if not smoothing or not logits.shape.size:
        return softmax_cross_entropy_with_logits(logits, ids, vocab_dim, z_loss)
    return _of_ids(logits, ids, vocab_dim, z_loss, smoothing)


def sigmoid_cross_entropy_with_logits(logits: mtf.Tensor, targets: mtf.Tensor) -> mtf.Tensor:
    """Computes the elementwise cross entropy between targets and the sigmoid of logits.

    >>> logits = mtf.constant(mesh, [2.0, 0.0], "batch:2")
    >>> targets = mtf.constant(mesh, [1.0, 0.0], "batch:2")
    >>> losses = mtf.layers.sigmoid_cross_entropy_with_logits(logits, targets)
    >>> print(np.round(losses.numpy(), 3))
    [0.127 0.693]

    Args:
      logits: a Tensor.
      targets: probabilities, a floating Tensor of the same shape and dtype.

    Returns:
      A Tensor of the same shape.

    Raises:
      ValueError: the shapes or the dtypes differ.
    """
    if logits.shape != targets.shape or logits.dtype != targets.dtype:
        raise ValueError(
            f"sigmoid_cross_entropy_with_logits: targets {targets.name} {targets.shape} "
            f"{targets.dtype.name} must have the shape and the dtype of logits {logits.name} "
            f"{logits.shape} {logits.dtype.name}; use mtf.transpose or mtf.cast"
        )
    check_fractions("sigmoid_cross_entropy_with_logits", [logits])
    logits, targets = widened(logits), widened(targets)
    # Equals -t log(s) - (1 - t) log(1 - s), but never takes the logarithm of a rounded 0.
    return mtf.softplus(logits) - logits * targets


def weights_nonzero(targets: mtf.Tensor, dtype: tf.DType = tf.float32) -> mtf.Tensor:
    """Returns 1 where an id is nonzero and 0 where it is 0, which stands for padding.

    >>> ids = mtf.constant(mesh, [5, 2, 0], "length:3", tf.int32)
    >>> print(mtf.layers.weights_nonzero(ids).numpy())
    [1. 1. 0.]

    Args:
      targets: a Tensor.
      dtype: the dtype of the result.
    """
    return mtf.cwise(
        lambda ids: tf.cast(tf.not_equal(ids, 0), dtype),
        [targets],
        output_dtype=tf.as_dtype(dtype),
        grad_function=lambda op, dy: [None],
        name="weights_nonzero",
    )
