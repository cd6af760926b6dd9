"""Constants and reshaped values that operations on one device share.

This keeps graphs small, and a value that several contractions need as a matrix is reshaped once.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Optional

import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.tensor import ArrayLike

__all__ = ["at_device", "constant", "inside_loop", "remember_reshaped", "reshaped"]

_WIDE = [("is_floating", np.float64), ("is_complex", np.complex128)]
_POOL = "_mtf_constants"  # an attribute of tf.Graph, so that the pool is freed with the graph
# Separate for each thread: several may build programs, each in its own tf graph.
_device: contextvars.ContextVar[Optional[str]] = contextvars.ContextVar("device", default=None)
_loop: contextvars.ContextVar[Optional[object]] = contextvars.ContextVar("loop", default=None)


@contextlib.contextmanager
def inside_loop() -> Iterator[None]:
    """Constants created within are shared only within one part of a loop."""
    # A new object each time, so that the condition and the body of a loop share nothing.
    token = _loop.set(object())
    try:
        yield
    finally:
        _loop.reset(token)


@contextlib.contextmanager
def at_device(device: Optional[str]) -> Iterator[None]:
    """Constants created within may be shared with others on the same device."""
    token = _device.set(device)
    try:
        yield
    finally:
        _device.reset(token)


def _pool() -> tuple[dict, tuple]:
    """Returns the pool of the current graph, and a key of the current context in it.

    Values created in a loop, a condition or a TPU computation are not shared with those outside.
    """
    graph = tf.get_default_graph()
    pool = getattr(graph, _POOL, None)
    if pool is None:
        pool = {}
        setattr(graph, _POOL, pool)
    return pool, (_device.get(), _loop.get(), graph._get_control_flow_context())


def constant(value: ArrayLike, dtype: tf.DType = tf.int32) -> tf.Tensor:
    """Returns a constant, the same tf.Tensor for the same value on the same device.

    Args:
      value: a number or a list of numbers.
      dtype: a dtype.
    """
    if _device.get() is None or tf.executing_eagerly():
        return tf.constant(value, dtype)
    pool, place = _pool()
    wide = next((w for kind, w in _WIDE if getattr(dtype, kind)), np.int64)
    # In the widest dtype of the kind, which loses nothing; the key has the dtype itself.
    array = np.asarray(value, wide)
    # By bytes, since 0.0 equals -0.0 and a NaN does not equal itself.
    key = (*place, dtype, array.shape, array.tobytes())
    if key not in pool:
        # It waits for nothing, since others share it. None would also leave a condition or a TPU
        # computation, so within these it may wait.
        context = tf.get_default_graph()._get_control_flow_context()
        nothing: Optional[list] = None if context is None else []
        with tf.control_dependencies(nothing):
            pool[key] = tf.constant(value, dtype)
    return pool[key]


def reshaped(x: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    """Returns `x` reshaped, the same tf.Tensor for the same sizes on the same device."""
    if x.shape.as_list() == list(sizes):
        return x
    if _device.get() is None or tf.executing_eagerly():
        return tf.reshape(x, constant(sizes))
    pool, place = _pool()
    key = (*place, "reshaped", id(x), tuple(sizes))
    if key not in pool:
        # Holding `x` keeps its id from being used by another tensor.
        pool[key] = (tf.reshape(x, constant(sizes)), x)
    return pool[key][0]


def remember_reshaped(x: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    """Returns `x` reshaped; `reshaped` of the result to the sizes of `x` will return `x`."""
    y = tf.reshape(x, constant(list(sizes)))
    if _device.get() is not None and not tf.executing_eagerly():
        pool, place = _pool()
        # The next contraction often needs the matrix again: it finds `x`, without a reshape.
        key = (*place, "reshaped", id(y), tuple(x.shape.as_list()))
        pool[key] = (x, y)
    return y
