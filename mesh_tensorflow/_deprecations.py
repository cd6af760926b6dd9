"""Calls of TensorFlow's older functions, of which the user is not told."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import tensorflow.compat.v1 as tf

__all__ = ["not_advised"]


def _is_no_advice(record: logging.LogRecord) -> bool:
    return "Instructions for updating" not in str(record.msg)


@contextlib.contextmanager
def not_advised() -> Iterator[None]:
    """Context without TensorFlow's advice to replace functions, which is for who calls them."""
    log = tf.get_logger()
    log.addFilter(_is_no_advice)
    try:
        yield
    finally:
        log.removeFilter(_is_no_advice)
