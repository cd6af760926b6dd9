"""Finds the TPU computation that is being built, and lets code make operations outside of it.

TensorFlow has no public way to either; `tpu.replicate` and its relatives keep a control flow
context, which is searched for here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Optional

import tensorflow.compat.v1 as tf

if TYPE_CHECKING:
    from tensorflow.python.ops.control_flow_ops import ControlFlowContext

__all__ = ["outside_tpu_context", "tpu_context", "within_tpu_context"]


def tpu_context() -> tuple[Any, Optional[tf.Graph]]:
    """Returns the context of the computation that is being built, and its graph.

    Graphs of functions and of control flow belong to the computation of the outer graph.

    Returns:
      (a TPUReplicateContext, a tf.Graph), or (None, None) outside of tpu.rewrite, tpu.replicate and
      tpu.shard.
    """
    graph = None if tf.executing_eagerly() else tf.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()
        while context is not None:
            if hasattr(context, "get_replicated_var_handle"):
                return context, graph
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)
    return None, None


@contextlib.contextmanager
def _at_context(graph: tf.Graph, context: ControlFlowContext) -> Iterator[None]:
    """Creates operations in the given control flow context instead of the current one."""
    # On exit the previous context is restored, with its control dependencies.
    with graph.as_default(), tf.control_dependencies(None), tf.device(None):
        graph._set_control_flow_context(context)
        yield


@contextlib.contextmanager
def outside_tpu_context() -> Iterator[None]:
    """Creates operations on the host that feeds the computation."""
    context, graph = tpu_context()
    with _at_context(graph, context.outer_context):
        yield


@contextlib.contextmanager
def within_tpu_context() -> Iterator[None]:
    """Creates operations of the computation that are outside of its loops and conditions."""
    context, graph = tpu_context()
    with _at_context(graph, context):
        yield
