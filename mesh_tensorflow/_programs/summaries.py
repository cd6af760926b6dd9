"""The scalars of mtf.scalar_summary that a program has made, as results of it."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

from mesh_tensorflow.utils import SCALAR_SUMMARIES_COLLECTION_KEY

__all__ = ["summaries_so_far", "taken_summaries"]


def summaries_so_far() -> int:
    """Returns the number of scalars that the collection of the default graph has."""
    return len(tf.get_collection(SCALAR_SUMMARIES_COLLECTION_KEY))


def taken_summaries(start: int) -> dict[str, tf.Tensor]:
    """Takes scalars out of the collection of mtf.scalar_summary; returns them by name.

    Args:
      start: `summaries_so_far()` before the program was built.

    Returns:
      A float32 tf.Tensor for each name; those of what is within a loop are left out, with a
      warning.
    """
    collection = tf.get_collection_ref(SCALAR_SUMMARIES_COLLECTION_KEY)
    found, graph = dict(collection[start:]), tf.get_default_graph()
    del collection[start:]
    around = tf.no_op()._get_control_flow_context()
    there = {
        name: tf.cast(x, tf.float32)
        for name, x in found.items()
        if x.graph is graph and x.op._get_control_flow_context() is around
    }
    if len(there) < len(found):
        tf.logging.warning(
            "Summaries of what is within loops are left out: %s",
            ", ".join(found.keys() - there.keys()),
        )
    return there
