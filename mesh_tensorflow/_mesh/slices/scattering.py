"""Additions to some entries of a slice, in its memory where that is possible."""

from __future__ import annotations

import tensorflow.compat.v1 as tf

__all__ = ["add_entries"]


def _may_be_compiled() -> bool:
    """Returns whether XLA may have to compile what is built now.

    That is not known in a function: whoever calls it may be compiled.
    """
    graph = tf.get_default_graph()
    if graph.building_function:
        return True
    context = graph._get_control_flow_context()
    while context is not None:
        if context.IsXLAContext():
            return True
        context = context.outer_context
    return False


def add_entries(x: tf.Tensor, indices: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Returns a tensor with values added to entries; for equal indices all of them.

    In the graph of a session it is computed in the memory of `x` if nothing else reads that.
    tf.tensor_scatter_nd_add, which XLA knows, always copies `x`.

    Args:
      x: a tf.Tensor.
      indices: positions, an integer tf.Tensor whose last dimension is that of their coordinates.
      values: a tf.Tensor with the entries, or the parts of x, to add.
    """
    if _may_be_compiled():
        return tf.tensor_scatter_nd_add(x, indices, values)
    return tf.raw_ops.ScatterNdNonAliasingAdd(input=x, indices=indices, updates=values)
