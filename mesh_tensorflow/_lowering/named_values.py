"""Values of a Lowering by name: whole, or one processor's slices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.graph import Graph
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._mesh.laid_out import LaidOutTensor
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._watching.requests import collectors, matches

if TYPE_CHECKING:
    from mesh_tensorflow._lowering.lowering import Lowering

__all__ = ["collect_values", "named_tensors", "processor_slice", "values_by_name"]


def named_tensors(graph: Graph) -> Iterator[tuple[str, Tensor]]:
    """Yields the Tensors of a graph outside of loops, with their names.

    The name is that of the operation, with the number of the output if it has several. Tensors that
    were given to `mtf.inspect` come again, under their names there.

    Args:
      graph: a Graph.
    """
    made = set()
    for op in graph.operations:
        outputs = op.outputs
        made.update(outputs)
        for y in outputs:
            yield (op.name if len(outputs) == 1 else y.name), y
    for name, x in graph.inspected.items():
        if x in made or x in graph.stacked_values:
            yield name, x


def values_by_name(
    lowering: Lowering, patterns: Sequence[str], processor: Optional[int]
) -> dict[str, tf.Tensor]:
    """Returns the values of the Tensors whose names match, and of all that are inspected.

    Args:
      lowering: a Lowering.
      patterns: patterns of names, as of files.
      processor: the number of the processor whose slices are returned; None for whole values.
    """
    return {
        name: (
            lowering.export_to_tf_tensor(x)
            if processor is None
            else processor_slice(lowering, x, processor)
        )
        for name, x in named_tensors(lowering.graph)
        if x in lowering.tensors and (name in lowering.graph.inspected or matches(name, patterns))
    }


def collect_values(lowering: Lowering) -> None:
    """Gives the values that are asked for to the collectors of this context."""
    for collector in collectors():
        collector.values.update(values_by_name(lowering, collector.patterns, collector.processor))


def processor_slice(lowering: Lowering, x: Tensor, pnum: int) -> tf.Tensor:
    """Returns the slice of a Tensor that one processor of the requested mesh has.

    Args:
      lowering: a Lowering.
      x: a Tensor.
      pnum: the number of the processor.

    Raises:
      ValueError: the mesh has no such processor.
    """
    requested, executed = lowering.requested_impl(x), lowering.mesh_impl(x)
    if not 0 <= pnum < requested.size:
        raise ValueError(
            f"processor {pnum} of mesh {x.mesh.name!r} does not exist: {requested.shape} has "
            f"processors 0 to {requested.size - 1}"
        )
    value = lowering.tensors[x].to_laid_out_tensor()
    slices = value.all_slices
    # On a merged mesh no processor has exactly that slice, so it is cut from the whole value.
    if executed is not requested:
        whole = executed.export_to_tf_tensor(x, value)
        begin = tf.constant(requested.slice_begin(x.shape, pnum), tf.int32)
        return tf.slice(whole, begin, requested.slice_shape(x.shape)) if len(x.shape) else whole
    if len(slices) == requested.size:
        return tf.identity(slices[pnum])
    return _from_processor(executed, value, pnum)


def _from_processor(mesh_impl: MeshImpl, value: LaidOutTensor, pnum: int) -> tf.Tensor:
    """Returns one processor's slice on all processors of a program."""
    dtype = value.all_slices[0].dtype
    carried = tf.int32 if dtype == tf.bool else dtype

    def own_or_zeros(piece: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        piece = tf.cast(piece, carried)
        return tf.where(
            tf.fill(tf.shape(piece), tf.equal(number, pnum)), piece, tf.zeros_like(piece)
        )

    # A program is the same on all processors and cannot return what only one has. So the others add
    # zeros to it. The select, unlike a product with 0, keeps their NaNs out.
    mine = mesh_impl.slicewise(own_or_zeros, value, mesh_impl.laid_out_pnum())
    summed = mesh_impl.allreduce(mine, list(range(mesh_impl.ndims)), "SUM")
    return tf.cast(summed.to_laid_out_tensor().all_slices[0], dtype)
