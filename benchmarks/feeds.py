"""Initial values that are fed, so that no graph holds large constants."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf


class Feeds:
    """Placeholders for arrays; all are fed once, when variables are initialized."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        """`arrays` are the values by key."""
        self._arrays = arrays
        self._makers: dict[Any, Callable[[], np.ndarray]] = {}

    def make(self) -> dict[Any, np.ndarray]:
        """Returns what to feed, once; making it is no part of building a program."""
        values = {placeholder: maker() for placeholder, maker in self._makers.items()}
        self._makers.clear()
        return values

    def initializer(self, key: str) -> Callable[..., Any]:
        """An initializer for tf.get_variable or mtf.get_variable."""
        array = self._arrays[key]

        def initialize(shape: Any, dtype: Any = None, partition_info: Any = None) -> Any:
            del partition_info
            value = array.reshape([int(n) for n in shape])
            with tf.init_scope():
                placeholder = tf.placeholder(dtype or tf.float32, value.shape)
            self._makers[placeholder] = lambda: value
            return placeholder

        return initialize

    def named_variables(self, make: Callable[[str, Any], np.ndarray]) -> Any:
        """A scope where variables start with what `make` returns for their name and shape."""

        def named(getter: Any, name: str, **kwargs: Any) -> Any:
            def initialize(shape: Any, dtype: Any = None, partition_info: Any = None) -> Any:
                del partition_info
                sizes = tuple(int(n) for n in shape)
                with tf.init_scope():
                    placeholder = tf.placeholder(dtype or tf.float32, sizes)
                self._makers[placeholder] = lambda: make(name, sizes)
                return placeholder

            return getter(name, **{**kwargs, "initializer": initialize})

        return tf.variable_scope(tf.get_variable_scope(), custom_getter=named)

    def data(self, key: str) -> Any:
        """A tensor read from an untrained variable, so that it is not folded away."""
        array = self._arrays[key]
        variable = tf.get_variable(
            f"data_{key}",
            array.shape,
            dtype=array.dtype,
            trainable=False,
            initializer=self.initializer(key),
            use_resource=True,
        )
        return variable.read_value()


class EagerFeeds:
    """What Feeds gives to a session's program, for programs in a tf.function."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        """`arrays` are the values by key."""
        self._arrays = arrays
        self._data = {k: tf.compat.v2.Variable(arrays[k], trainable=False) for k in ("x", "target")}

    def initializer(self, key: str) -> Callable[..., Any]:
        """An initializer for mtf.get_variable."""

        def initialize(shape: Any, dtype: Any = None, partition_info: Any = None) -> Any:
            del partition_info
            return tf.constant(self._arrays[key].reshape([int(n) for n in shape]), dtype)

        return initialize

    def data(self, key: str) -> Any:
        """A tensor read from an untrained variable."""
        return self._data[key].read_value()
