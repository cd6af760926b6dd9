"""An input function of arrays that are in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Optional, Union

import numpy as np
import tensorflow as tf2

from mesh_tensorflow._core.errors import WrongTypeError, check_whole

__all__ = ["numpy_input_fn"]

Arrays = Union[np.ndarray, Mapping[str, np.ndarray]]


def numpy_input_fn(
    x: Arrays,
    y: Optional[Arrays] = None,
    batch_size: int = 128,
    num_epochs: Optional[int] = 1,
    shuffle: Optional[bool] = None,
    queue_capacity: int = 1000,
    num_threads: int = 1,
) -> Callable[[], tf2.data.Dataset]:
    """Returns an input function whose batches are rows of arrays.

    Epochs follow one another without a gap, so that a batch may end one and begin the next; the
    last batch may be smaller. The arrays are not part of the graph, nor of what is saved of it.

    >>> x, y = np.ones([5, 3]), np.arange(5)
    >>> input_fn = mtf.estimator.inputs.numpy_input_fn(x, y, batch_size=2, shuffle=False)
    >>> for features, labels in input_fn():
    ...     print(features.shape, labels.numpy())
    (2, 3) [0 1]
    (2, 3) [2 3]
    (1, 3) [4]

    Args:
      x: the features: an array, or a dict of arrays with as many rows each.
      y: the labels, likewise; None if there are none.
      batch_size: the number of rows in a batch.
      num_epochs: how often the rows are read; None for no end.
      shuffle: whether rows are in random order, another one in each epoch. It has no default.
      queue_capacity: an int, unused: all rows are shuffled.
      num_threads: an int, unused.

    Returns:
      A function without parameters that returns a Dataset of features, or of (features, labels).

    Raises:
      TypeError: `x` or `y` is neither an array nor a dict.
      ValueError: `shuffle` is not a bool, a dict is empty, `x` and `y` share keys, or arrays differ
        in their numbers of rows.
    """
    if not isinstance(shuffle, bool):
        raise ValueError(
            f"numpy_input_fn: shuffle={shuffle!r} must be given, as True (for training, in "
            "general) or False"
        )
    check_whole("numpy_input_fn", "batch_size", batch_size)
    if num_epochs is not None:
        check_whole("numpy_input_fn", "num_epochs", num_epochs, " or None, for no end")
    arrays = _arrays("x", x) if y is None else (_arrays("x", x), _arrays("y", y))
    if isinstance(x, Mapping) and isinstance(y, Mapping) and (shared := sorted({*x} & {*y})):
        raise ValueError(f"numpy_input_fn: x and y both have the keys {shared}; rename those of y")
    flat = tf2.nest.flatten(arrays)
    lengths = [len(a) for a in flat]
    if len(set(lengths)) > 1:
        raise ValueError(
            "numpy_input_fn: all arrays of x and y must have as many rows, but have the shapes "
            f"{[a.shape for a in flat]}"
        )
    dtypes = [tf2.as_dtype(a.dtype) for a in flat]

    def input_fn() -> tf2.data.Dataset:
        rows = tf2.data.Dataset.range(lengths[0])
        if shuffle:
            rows = rows.shuffle(max(lengths[0], 1))
        # Only a batch that may be the last has a size that is not known.
        rows = rows.repeat(num_epochs).batch(batch_size, drop_remainder=num_epochs is None)

        def batch(indices: tf2.Tensor) -> Any:
            # By a call: as constants, the arrays would be in every graph that is saved.
            rows_of_batch = tf2.numpy_function(lambda i: [a[i] for a in flat], [indices], dtypes)
            rows_of_batch = [
                tf2.ensure_shape(t, [indices.shape[0], *a.shape[1:]])
                for t, a in zip(rows_of_batch, flat)
            ]
            return tf2.nest.pack_sequence_as(arrays, rows_of_batch)

        return rows.map(batch).prefetch(1)

    return input_fn


def _arrays(name: str, given: Arrays) -> Any:
    """Returns an array, or a dict of arrays, from an argument."""
    if isinstance(given, Mapping):
        if not given:
            raise ValueError(f"numpy_input_fn: {name} is a dict without arrays")
        return {key: _array(f"{name}[{key!r}]", value) for key, value in given.items()}
    if not isinstance(given, np.ndarray):
        raise WrongTypeError(
            f"numpy_input_fn: {name} must be an array or a dict of arrays, but is a "
            f"{type(given).__name__}; np.array makes an array of a list"
        )
    return _array(name, given)


def _array(name: str, value: object) -> np.ndarray:
    array = np.asarray(value)
    if not array.ndim:
        raise ValueError(f"numpy_input_fn: {name} has no rows, but is the single value {value!r}")
    return array
