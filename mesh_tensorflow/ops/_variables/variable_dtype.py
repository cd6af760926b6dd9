"""VariableDType: the dtypes of one variable in its three forms."""

from __future__ import annotations

from typing import Optional

import tensorflow.compat.v1 as tf

__all__ = ["VariableDType"]


class VariableDType:
    """The dtypes of a variable: in checkpoints, in memory and in computations."""

    def __init__(
        self,
        master_dtype: tf.DType = tf.float32,
        slice_dtype: Optional[tf.DType] = None,
        activation_dtype: Optional[tf.DType] = None,
    ):
        """Creates a VariableDType.

        Args:
          master_dtype: dtype of the master, and of checkpoints.
          slice_dtype: dtype of the slices, which are stored and updated; `master_dtype` if None.
          activation_dtype: dtype of the value in computations; `master_dtype` if None.
        """
        self._master_dtype = tf.as_dtype(master_dtype)
        self._slice_dtype = tf.as_dtype(slice_dtype or master_dtype)
        self._activation_dtype = tf.as_dtype(activation_dtype or master_dtype)

    @property
    def master_dtype(self) -> tf.DType:
        """Dtype of the master, and of checkpoints."""
        return self._master_dtype

    @property
    def slice_dtype(self) -> tf.DType:
        """Dtype of the slices, which are stored and updated."""
        return self._slice_dtype

    @property
    def activation_dtype(self) -> tf.DType:
        """Dtype of the value in computations."""
        return self._activation_dtype
