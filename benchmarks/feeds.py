"""Initial values that come in by feeding, so that no graph holds large constants."""
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf


class Feeds:
    """Placeholders for arrays; all are fed once, when variables are initialised."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        """`arrays` are the values by key."""
        self._arrays = arrays
        self.feed_dict: dict[Any, np.ndarray] = {}

    def initializer(self, key: str) -> Callable[..., Any]:
        """An initializer for tf.get_variable or mtf.get_variable."""
        array = self._arrays[key]

        def initialize(shape: Any, dtype: Any = None, partition_info: Any = None) -> Any:
            del partition_info
            value = array.reshape([int(n) for n in shape])
            with tf.init_scope():
                placeholder = tf.placeholder(dtype or tf.float32, value.shape)
            self.feed_dict[placeholder] = value
            return placeholder

        return initialize

    def data(self, key: str) -> Any:
        """A tensor read from an untrained variable, so that it is not folded away."""
        array = self._arrays[key]
        variable = tf.get_variable(
            f"data_{key}", array.shape, dtype=array.dtype, trainable=False,
            initializer=self.initializer(key), use_resource=True)
        return variable.read_value()
