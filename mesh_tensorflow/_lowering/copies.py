"""Copies masters of variables to their slices one after another, for MTF_SEQUENCE_MODE=1.

Otherwise all are copied at once, which is faster, but may have all pieces in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow.compat.v1 as tf

__all__ = ["copy_in_sequence"]


def copy_in_sequence(variables: Iterable[Any]) -> tf.Operation:
    """Returns a tf operation that copies masters to slices, one variable after another.

    Args:
      variables: LaidOutVariables.
    """
    done: list[tf.Operation] = []
    for laid_out in variables:
        with tf.control_dependencies(done[-1:]):
            done.append(tf.group([laid_out.copy_master_to_slices]))
    return done[-1] if done else tf.no_op()
