"""Loss functions and their weights."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow.ops._variables.variable import widened

__all__ = [
    "sigmoid_cross_entropy_with_logits",
    "smoothed_cross_entropy",
    "softmax_cross_entropy_with_logits",
    "weights_nonzero",
]


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
