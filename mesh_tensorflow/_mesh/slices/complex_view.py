"""Complex slices as real ones with a last axis of two, for collectives of real numbers."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

__all__ = ["complex_view", "real_view"]

_PARTS = {tf.complex64: tf.float32, tf.complex128: tf.float64}


def real_view(x: tf.Tensor) -> tf.Tensor:
    """Returns a complex tf.Tensor as a real one of shape [..., 2]; others as they are."""
    return tf.bitcast(x, _PARTS[x.dtype]) if x.dtype.is_complex else x


def complex_view(y: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns a `real_view` as numbers of the dtype that it had."""
    return tf.bitcast(y, dtype) if dtype.is_complex else y
