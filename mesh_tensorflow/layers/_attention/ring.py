"""Ring attention: parts of the memory are passed around the processors that share its rows.

Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers for near-infinite context"
(2023). Each processor keeps its queries. In each of n turns it attends to the part of the memory
that it has, and passes it on; in the gradient, the part's own gradients travel with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.cost import Collective
from mesh_tensorflow._core.interfaces import LaidOutLike
from mesh_tensorflow._mesh.laid_out import LaidOutTensor
from mesh_tensorflow._mesh.mesh_impl import MeshImpl

__all__ = ["added_gradients", "joined_sums", "shifts"]


def shifts(
    mesh_impl: MeshImpl, axis: int, inputs: Sequence[mtf.Tensor], outputs: Sequence[mtf.Tensor]
) -> list[Collective]:
    """Returns the collectives of one turn around.

    Args:
      mesh_impl: a MeshImpl.
      axis: the mesh axis around which parts are passed.
      inputs: the Tensors whose parts are passed on in each turn but the last.
      outputs: those whose parts are passed on in each turn, and so end where they began.
    """
    turns = mesh_impl.shape[axis].size
    found = []
    for tensors, times in ((inputs, turns - 1), (outputs, turns)):
        for x in tensors:
            n = mesh_impl.laid_out_size(x.shape)
            found += [Collective("shift", (axis,), n, n * x.dtype.size)] * times
    return found


def _passed_on(
    mesh_impl: MeshImpl,
    axis: int,
    values: Sequence[LaidOutLike],
    moving: Sequence[bool],
    earlier: Any = None,
) -> Sequence[Any]:
    """Returns values after each processor has given those that move to the next one.

    Args:
      mesh_impl: a MeshImpl.
      axis: a mesh axis.
      values: LaidOutTensors.
      moving: for each of them, whether it moves.
      earlier: what has to be there before, or None; so parts do not arrive long before their turn.
    """

    def moved(x: LaidOutLike) -> Any:
        if earlier is not None:
            x = mesh_impl.slicewise(_after, x, *earlier)
        return mesh_impl.shift_by_n_processors(x.to_laid_out_tensor(), axis, 1, True)

    return [moved(x) if moves else x for x, moves in zip(values, moving)]


def _after(x: tf.Tensor, *earlier: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies(earlier):
        return tf.identity(x)


def _in_turn(
    mesh_impl: MeshImpl, compute: Callable, values: Sequence[LaidOutLike], earlier: Any
) -> Any:
    """Returns what is computed from slices after the results of the turn before.

    Else all turns would run at once, and the memory of their blocks would be that of all. The parts
    of the next turn may arrive meanwhile.
    """
    if earlier is not None:
        first, *rest = values
        values = [mesh_impl.slicewise(_after, first, *earlier), *rest]
    return mesh_impl.slicewise(compute, *values)


def joined_sums(
    mesh_impl: MeshImpl,
    axis: int,
    sums_of: Callable,
    values: Sequence[LaidOutLike],
    moving: Sequence[bool],
) -> Sequence[LaidOutTensor]:
    """Returns the sums of whole rows: of values, the largest logits, and of exponentials.

    Args:
      mesh_impl: a MeshImpl.
      axis: the mesh axis around which parts of the memory are passed.
      sums_of: returns the sums of slices, which are relative to the largest logit.
      values: LaidOutTensors, its arguments.
      moving: for each of them, whether it belongs to the memory.
    """
    turns = mesh_impl.shape[axis].size
    found: Any = None
    for turn in range(turns):
        sums = _in_turn(mesh_impl, sums_of, values, found)
        if turn < turns - 1:
            values = _passed_on(mesh_impl, axis, values, moving, found)
        found = sums if found is None else mesh_impl.slicewise(_joined, *found, *sums)
    return found


def _joined(
    total: tf.Tensor,
    largest: tf.Tensor,
    weight: tf.Tensor,
    new_total: tf.Tensor,
    new_largest: tf.Tensor,
    new_weight: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    most = tf.maximum(largest, new_largest)
    old, new = tf.exp(largest - most), tf.exp(new_largest - most)
    return total * old + new_total * new, most, weight * old + new_weight * new


def added_gradients(
    mesh_impl: MeshImpl,
    axis: int,
    gradients_of: Callable,
    values: Sequence[LaidOutLike],
    moving: Sequence[bool],
    returned: Sequence[bool],
) -> Sequence[LaidOutTensor]:
    """Returns sums of the gradients of all turns.

    Args:
      mesh_impl: a MeshImpl.
      axis: the mesh axis around which parts of the memory are passed.
      gradients_of: returns gradients of slices.
      values: LaidOutTensors, its arguments.
      moving: for each of them, whether it belongs to the memory.
      returned: for each gradient, whether it belongs to the memory.
    """
    turns = mesh_impl.shape[axis].size
    found: Any = None
    for turn in range(turns):
        new = _in_turn(mesh_impl, gradients_of, values, found)
        if turn < turns - 1:
            values = _passed_on(mesh_impl, axis, values, moving, found)
        if found is not None:
            new = [mesh_impl.slicewise(tf.add, x, y) for x, y in zip(found, new)]
        found = _passed_on(mesh_impl, axis, new, returned)
    return found
