"""Norms of all gradients together, and clipping by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import WrongTypeError
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow.optimize._base import Rate, scalar_like

__all__ = ["clip_by_global_norm", "global_norm"]


def _given(function: str, tensors: Sequence[Optional[mtf.Tensor]]) -> list[mtf.Tensor]:
    if isinstance(tensors, mtf.Tensor) or not isinstance(tensors, Sequence):
        raise WrongTypeError(f"{function}: give a list of mtf.Tensors, not {tensors!r}")
    for x in tensors:
        if x is not None and not isinstance(x, mtf.Tensor):
            raise WrongTypeError(f"{function}: {x!r} is neither an mtf.Tensor nor None")
    found = [x for x in tensors if x is not None]
    if not found:
        raise ValueError(
            f"{function}: none of the {len(tensors)} gradients is a Tensor; does the loss depend "
            "on the variables?"
        )
    return found


@leaves_no_node
def global_norm(tensors: Sequence[Optional[mtf.Tensor]]) -> mtf.Tensor:
    """Returns the Euclidean norm of all elements of several Tensors together.

    The sums of squares run over all slices, so it is the same in every layout.

    >>> x = mtf.constant(mesh, 2.0, [mtf.Dimension("d", 3)])
    >>> norm = mtf.optimize.global_norm([x, None, mtf.constant(mesh, 2.0)])
    >>> print(norm.shape.to_integer_list, norm.dtype.name)
    [] float32

    Args:
      tensors: Tensors of any shapes, or None, which does not count.

    Returns:
      A float32 scalar Tensor.

    Raises:
      ValueError: there is no Tensor.
    """
    given = _given("global_norm", tensors)
    lengths = [mtf.abs(x) if x.dtype.is_complex else x for x in given]
    # In float32, since squares in bfloat16 or float16 lose digits and may overflow. The sums are
    # partial and are added before they are communicated.
    squares = [mtf.reduce_sum(mtf.square(mtf.to_float(x))) for x in lengths]
    return mtf.sqrt(mtf.add_n(squares))


@leaves_no_node
def clip_by_global_norm(
    grads: Sequence[Optional[mtf.Tensor]], max_norm: Rate
) -> tuple[list[Optional[mtf.Tensor]], mtf.Tensor]:
    """Scales gradients down together, if their global norm is more than `max_norm`.

    Pascanu et al., "On the difficulty of training recurrent neural networks" (2013). As with
    tf.clip_by_global_norm, gradients of norm 0 stay, and if the norm is infinite or NaN, all become
    NaN, which shows that something is wrong.

    >>> w = mtf.get_variable(mesh, "w", [mtf.Dimension("d", 4)])
    >>> grads = mtf.gradients([mtf.reduce_sum(mtf.square(w))], [w])
    >>> grads, norm = mtf.optimize.clip_by_global_norm(grads, max_norm=1.0)
    >>> updates = mtf.optimize.SgdOptimizer(0.1).apply_grads(grads, graph.trainable_variables)

    Args:
      grads: Tensors, or None, which stays None: the result of `mtf.gradients`.
      max_norm: a number above 0, a tf scalar or an mtf scalar Tensor; infinity only measures.

    Returns:
      (a list with each gradient, of its shape and dtype; the norm before clipping, a float32
      scalar Tensor).

    Raises:
      ValueError: there is no gradient, or `max_norm` is not above 0.
    """
    if isinstance(max_norm, (int, float)) and not max_norm > 0:
        raise ValueError(f"clip_by_global_norm: max_norm must be above 0, not {max_norm!r}")
    norm = global_norm(grads)
    bound = scalar_like(max_norm, norm)
    if not isinstance(bound, mtf.Tensor):
        bound = mtf.constant(norm.mesh, float(bound), mtf.Shape([]), tf.float32)
    factor = mtf.cwise(_factor, [norm, bound], name="clip_factor")
    return [None if g is None else _scaled(g, factor) for g in grads], norm


def _scaled(g: mtf.Tensor, factor: mtf.Tensor) -> mtf.Tensor:
    """Returns a gradient times a float32 factor, in the dtype that it has."""
    if g.dtype.is_complex:
        return g * mtf.cast(factor, g.dtype)
    return mtf.cast(mtf.to_float(g) * factor, g.dtype)


def _factor(norm: tf.Tensor, bound: tf.Tensor) -> tf.Tensor:
    """Returns bound / norm, at most 1; NaN if the norm is infinite or NaN."""
    # The difference is 0 for a finite norm, and NaN otherwise. An infinite bound clips nothing.
    return tf.where(norm <= bound, tf.ones_like(norm), bound / norm) + (norm - norm)
