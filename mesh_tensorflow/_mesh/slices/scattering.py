"""Changes of some entries of a slice, in its memory where that is possible."""

from __future__ import annotations

import tensorflow.compat.v1 as tf
from tensorflow.python.ops import control_flow_v2_func_graphs as func_graphs

__all__ = ["add_entries", "set_entries"]

_OF_CONTROL_FLOW = (
    func_graphs.CondBranchFuncGraph,
    func_graphs.WhileBodyFuncGraph,
    func_graphs.WhileCondFuncGraph,
)


def _may_be_compiled() -> bool:
    """Returns whether XLA may have to compile what is built now.

    That is not known in a function: whoever calls it may be compiled. The body of a loop is a
    function of the graph that the loop is in.
    """
    graph = tf.get_default_graph()
    while True:
        context = graph._get_control_flow_context()
        while context is not None:
            if context.IsXLAContext():
                return True
            context = context.outer_context
        if not graph.building_function:
            return False
        if not isinstance(graph, _OF_CONTROL_FLOW):
            return True
        graph = graph.outer_graph


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


def set_entries(
    x: tf.Tensor, indices: tf.Tensor, values: tf.Tensor, known: tf.Tensor, distinct: bool
) -> tf.Tensor:
    """Returns a tensor with some rows replaced, with the memory of `add_entries`.

    tf.tensor_scatter_nd_update always copies `x` on CPUs, since its kernel asks for memory of
    another kind than that of `x`. So what was there is subtracted first, which leaves an exact 0,
    and the new values are added.

    Args:
      x: a tf.Tensor of two dimensions.
      indices: numbers of rows, a vector.
      values: a tf.Tensor with a row for each index.
      known: booleans, a scalar or one for each index: False leaves the row as it is.
      distinct: whether no row number is in `indices` twice. If some are, only one of them may be
        known.
    """
    where = tf.expand_dims(indices, 1)
    known = tf.expand_dims(known, 1) if known.shape.ndims else known
    old = tf.gather(x, indices)
    if distinct and _may_be_compiled():
        return tf.tensor_scatter_nd_update(x, where, tf.where_v2(known, values, old))
    none = tf.zeros_like(old)
    # In loops new values come last: others that read `x` are done then, and its memory is free.
    with tf.control_dependencies([values]):
        removed = tf.where_v2(known, tf.negative(old), none)
    x = add_entries(x, where, removed)
    return add_entries(x, where, tf.where_v2(known, values, none))
