"""Exported programs that take any number of rows, and compute them piece by piece."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf2
import tensorflow.compat.v1 as tf

__all__ = ["any_batch"]


def any_batch(signature: Any, rows: int, what: str) -> Any:
    """Returns a signature that takes any number of rows, of one that takes so many at a time.

    Both are of the default graph. The rows are computed in pieces; the last one is filled up with
    zeros, or empty strings, and what comes of those is left out.

    Args:
      signature: a SignatureDef, of which each input and output has the rows first.
      rows: the number of rows of a piece.
      what: what is exported, for errors.

    Raises:
      ValueError: an input or an output has not so many rows, or there is a loop of TensorFlow 1.
    """
    graph = tf.get_default_graph()
    named = [
        {n: graph.get_tensor_by_name(info.name) for n, info in sorted(infos.items())}
        for infos in (signature.inputs, signature.outputs)
        if all(info.name for info in infos.values())  # else sparse tensors, which have several
    ]
    if len(named) < 2:
        raise ValueError(f"{what}: sparse tensors have no rows that could be cut into pieces")
    inputs, outputs = named
    for n, x in {**inputs, **outputs}.items():
        if not x.shape.rank or x.shape[0] not in (None, rows):
            raise ValueError(
                f"{what}: {n!r} has the shape {x.shape}, but a model that takes any number of "
                f"rows, {rows} at a time, has them first in each input and output"
            )
    program = _Program(graph, inputs, outputs, what)
    free = {n: tf.placeholder(x.dtype, [None, *x.shape[1:]], n) for n, x in inputs.items()}

    @tf2.function(autograph=False)
    def serve(*features: tf.Tensor) -> list[tf.Tensor]:
        return _in_pieces(program, dict(zip(free, features)), rows)

    made = dict(zip(outputs, serve(*free.values())))
    return tf.saved_model.build_signature_def(
        *[{n: tf.saved_model.build_tensor_info(x) for n, x in of.items()} for of in (free, made)],
        signature.method_name,
    )


class _Program:
    """What a graph computes, to be computed again within functions of the same graph."""

    def __init__(
        self,
        graph: tf.Graph,
        inputs: Mapping[str, tf.Tensor],
        outputs: Mapping[str, tf.Tensor],
        what: str,
    ) -> None:
        self.inputs, self.outputs = inputs, list(outputs.values())
        self._nodes = tf.graph_util.extract_sub_graph(
            graph.as_graph_def(), [x.op.name for x in self.outputs]
        )
        if any(node.op == "Enter" for node in self._nodes.node):
            raise ValueError(
                f"{what}: the model has loops of TensorFlow 1, which cannot be computed in pieces. "
                "Call tf.compat.v1.enable_control_flow_v2() at the beginning of the program"
            )
        self._names = {node.name for node in self._nodes.node}
        # Variables and tables stay in the graph, where those who load it look for them.
        self._held = [
            x
            for op in graph.get_operations()
            for x in op.outputs
            if x.dtype == tf.resource and not op.inputs and op.name in self._names
        ]

    def __call__(self, given: Mapping[str, tf.Tensor]) -> list[tf.Tensor]:
        """Returns the outputs for inputs by name, within a function."""
        values = {x.name: tf.get_default_graph().capture(x) for x in self._held}
        # What an output does not depend on is not there.
        used = {n: x for n, x in self.inputs.items() if x.op.name in self._names}
        values.update({x.name: given[n] for n, x in used.items()})
        return tf.import_graph_def(
            self._nodes, values, [x.name for x in self.outputs], name="piece"
        )


def _in_pieces(program: _Program, features: Mapping[str, tf.Tensor], rows: int) -> list[tf.Tensor]:
    """Returns the outputs of a program of so many rows for features of any number."""
    count, *others = [tf.shape(x)[0] for x in features.values()]
    text = f"there are not as many rows of each of {', '.join(features)}"
    with tf.control_dependencies(
        [tf.debugging.assert_equal(n, count, message=text) for n in others]
    ):
        count = tf.identity(count)
    # As many rows more as a piece has: the last one is filled up with some of them.
    longer = {
        n: tf.concat([x, tf.zeros(tf.concat([[rows], tf.shape(x)[1:]], 0), x.dtype)], 0)
        for n, x in features.items()
    }

    def piece(start: tf.Tensor) -> list[tf.Tensor]:
        cut = {n: x[start : start + rows] for n, x in longer.items()}
        return program({n: tf.ensure_shape(x, [rows, *x.shape[1:]]) for n, x in cut.items()})

    # One piece at least, which gives outputs their shapes where there are no rows.
    starts = tf.range(0, tf.maximum(count, 1), rows)
    pieces = tf.map_fn(
        piece,
        starts,
        fn_output_signature=[tf.TensorSpec([rows, *x.shape[1:]], x.dtype) for x in program.outputs],
        parallel_iterations=1,  # several at once would need the memory of several
    )
    # From [pieces, rows, ...] to [pieces * rows, ...], without what fills up the last one.
    return [
        tf.reshape(x, tf.concat([[tf.size(starts) * rows], tf.shape(x)[2:]], 0))[:count]
        for x in pieces
    ]
