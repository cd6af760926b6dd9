"""Ring attention: parts of the memory are passed around the processors that share its rows.

Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers for near-infinite context"
(2023). Each processor keeps its queries. In each of n turns it attends to the part of the memory
that it has, and passes it on; in the gradient, the part's own gradients travel with it.

In causal attention the first of n contiguous parts sees one of them, and the last one all. So
processors exchange the second halves of their parts with their mirror images: processor p has then
the halves 2p and 2n-1-2p of 2n. Of the queries and the memory of any two processors, two of four
pairs of halves are seen ("zigzag", as in the context parallelism of Llama Team, "The Llama 3 herd
of models", 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import slip
from mesh_tensorflow._core.layout import parts_along
from mesh_tensorflow._core.operation import Collective, LaidOutLike
from mesh_tensorflow._mesh.mesh_impl import LaidOutTensor, MeshImpl

if TYPE_CHECKING:
    from mesh_tensorflow.layers._blocked_operation import Dims

CONTIGUOUS, ZIGZAG = "contiguous", "zigzag"
RINGS = (False, True, CONTIGUOUS, ZIGZAG)


def has_halves(mesh_impl: MeshImpl, dims: Dims) -> bool:
    """Returns whether each processor's parts of the length and the memory have two halves.

    Args:
      mesh_impl: a MeshImpl, which splits both alike.
      dims: a Dims.
    """
    num_parts = 2 * parts_along(mesh_impl.splitting_axis(dims.length), mesh_impl.shape)
    return all(d.size % num_parts == 0 for d in (dims.length, dims.memory))


def tell(what: str, kind: Union[bool, str], mesh_impl: MeshImpl, dims: Dims) -> None:
    """Warns of a layout that makes no ring, or whose parts have not the halves of a zigzag.

    Attention is the same there. But a long memory, for which rings are, may not fit.

    Args:
      what: the name of the operation.
      kind: one of RINGS, not False.
      mesh_impl: a MeshImpl.
      dims: a Dims.
    """
    length, memory = dims.length, dims.memory
    axes = [mesh_impl.splitting_axis(d) for d in (length, memory)]
    over = [None if axis is None else mesh_impl.shape[axis] for axis in axes]
    if axes[0] != axes[1]:
        split = [d for d in over if d is not None]
        # Of two mesh dimensions, advise the one over which both lengths can be split without
        # padding.
        fitting = [d for d in split if not (length.size % d.size or memory.size % d.size)]
        [axis, *_] = fitting or split
        pads = "".join(
            f", and pad {d.name}={d.size} to {-(-d.size // axis.size) * axis.size}"
            for d in (length, memory)
            if d.size % axis.size
        )
        texts = [f"over {d.name}={d.size}" if d else "over no mesh dimension" for d in over]
        slip(
            f"{what}: ring={kind!r} passes parts of {memory.name}={memory.size} around the "
            f"processors that have parts of {length.name}={length.size}, and nothing is passed "
            "where not one mesh dimension splits both; the layout splits "
            f"{length.name} {texts[0]} and {memory.name} {texts[1]}. Use the rules "
            f"{length.name}:{axis.name};{memory.name}:{axis.name}{pads}, or leave ring out",
            key=f"ring/{length.name}/{memory.name}/{texts}",
        )
    # If neither is split, each processor has the whole memory, as on one processor.
    elif kind == ZIGZAG and over[0] is not None and not has_halves(mesh_impl, dims):
        num_parts = 2 * over[0].size
        d = next(d for d in (length, memory) if d.size % num_parts)
        slip(
            f"{what}: ring={kind!r} gives each of {over[0].name}={over[0].size} processors two "
            f"halves, and {d.name}={d.size} is not divisible by {num_parts}: parts are left as "
            f"they are, as by ring={CONTIGUOUS!r}. Pad it to {-(-d.size // num_parts) * num_parts}",
            key=f"zigzag/{d.name}={d.size}/{num_parts}",
        )


def collectives(
    mesh_impl: MeshImpl,
    axis: int,
    exchanged: Sequence[mtf.Tensor],
    inputs: Sequence[mtf.Tensor],
    outputs: Sequence[mtf.Tensor],
) -> list[Collective]:
    """Returns the collectives of attention in a ring.

    Args:
      mesh_impl: a MeshImpl.
      axis: the mesh axis around which parts are passed.
      exchanged: the Tensors of positions whose halves are exchanged.
      inputs: the Tensors whose parts are passed on in each turn but the last.
      outputs: those whose parts are passed on in each turn, and so end where they began.
    """
    turns = mesh_impl.shape[axis].size
    shifts = []
    # In an exchange the first half of each part stays where it is: half of the elements are sent.
    for tensors, share, times in ((exchanged, 2, 1), (inputs, 1, turns - 1), (outputs, 1, turns)):
        for x in tensors:
            n = mesh_impl.laid_out_size(x.shape) // share
            shifts += [Collective("shift", (axis,), n, n * x.dtype.size)] * times
    return shifts


def exchanged(mesh_impl: MeshImpl, axis: int, x: LaidOutLike, at: int) -> LaidOutTensor:
    """Exchanges the second halves of parts with those of mirror images; its own inverse.

    Args:
      mesh_impl: a MeshImpl.
      axis: the mesh axis of the parts.
      x: a LaidOutTensor.
      at: the axis of the slices that is halved.
    """
    n = mesh_impl.shape[axis].size
    first, second = mesh_impl.slicewise(lambda part: tuple(tf.split(part, 2, at)), x)
    # p receives the half 2 (n - 1 - p) + 1 = 2 n - 1 - 2 p, and two reversals give what there was.
    received = mesh_impl.receive(second, axis, list(reversed(range(n))))
    return mesh_impl.slicewise(lambda *halves: tf.concat(halves, at), first, received)


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


def in_turns(
    mesh_impl: MeshImpl,
    axis: int,
    compute: Callable,
    values: Sequence[LaidOutLike],
    moving: Sequence[bool],
    join: Callable[[Any, Any], Any],
    returned: Sequence[bool],
) -> Sequence[LaidOutTensor]:
    """Returns the results of all turns together.

    Args:
      mesh_impl: a MeshImpl.
      axis: the mesh axis around which parts of the memory are passed.
      compute: returns the results of slices.
      values: LaidOutTensors, its arguments.
      moving: for each of them, whether it belongs to the memory.
      join: takes the results of the turns before and those of one; returns both together.
      returned: for each result, whether it belongs to the memory, as its gradients do.
    """
    turns = mesh_impl.shape[axis].size
    result: Any = None
    # In turn t, processor p has the part of the memory that began at processor p - t.
    for turn in range(turns):
        first, *rest = values
        if result is not None:
            # Else all turns would run at once, and the memory of their blocks would be that of all.
            # To hold back one operand of the products is enough: what follows needs all of them.
            first = mesh_impl.slicewise(_after, first, *result)
        new = mesh_impl.slicewise(compute, first, *rest)
        # After the last turn no processor needs a part any more: what it began with is still in the
        # layout.
        if turn < turns - 1:
            # Parts travel in the turn before theirs, not earlier: a processor has two at most.
            values = _passed_on(mesh_impl, axis, values, moving, result)
        # What is returned has come here with the part of the memory that `new` belongs to.
        new = new if result is None else join(result, new)
        # Also after the last turn, unlike the parts: n steps bring each result back to its owner.
        result = _passed_on(mesh_impl, axis, new, returned)
    return result


def joined_sums(
    total: tf.Tensor,
    largest: tf.Tensor,
    weight: tf.Tensor,
    new_total: tf.Tensor,
    new_largest: tf.Tensor,
    new_weight: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the sums of two parts of the memory together: of values, largest logits, weights."""
    most = tf.maximum(largest, new_largest)
    # As between two blocks: both sums are scaled to the larger of their maxima.
    old, new = tf.exp(largest - most), tf.exp(new_largest - most)
    return total * old + new_total * new, most, weight * old + new_weight * new
