"""Selection of beams: the best scores, and the states that belong to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.cost import Cost
from mesh_tensorflow._core.errors import tensors_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow._core.interfaces import LoweringLike
from mesh_tensorflow._mesh.mesh_impl import MeshImpl

__all__ = [
    "EOS_ID",
    "INF",
    "SelectOperation",
    "best",
    "compute_topk_scores_and_seq",
    "select",
]

EOS_ID = 1
# Effectively infinite for scores, but its product with 0 is 0.
INF = 1.0 * 1e7


class SelectOperation(mtf.Operation):
    """A batched gather: entries along one dimension by index, with indices per batch entry."""

    def __init__(
        self,
        x: mtf.Tensor,
        indices: mtf.Tensor,
        old_dim: mtf.Dimension,
        name: Optional[str] = None,
    ):
        """Creates the operation; see `select`, which orders the dimensions."""
        super().__init__([x, indices], name=name or "select")
        self._old_dim = old_dim
        self._batch = indices.shape.dims[:-1]
        self._new_dim = indices.shape.dims[-1]
        shape = mtf.Shape(indices.shape.dims + x.shape.dims[len(indices.shape) :])
        self._outputs = [mtf.Tensor(self, shape, x.dtype)]

    def _unsplittable(self) -> Sequence[str]:
        return [self._old_dim.name, self._new_dim.name]

    def gradient(self, grad_ys: Sequence[Optional[mtf.Tensor]]) -> Sequence[Optional[mtf.Tensor]]:
        """Adds up the gradients of equal indices by an einsum with a one-hot."""
        dy = grad_ys[0]
        if dy is None:
            return [None, None]
        x, indices = self.inputs
        chosen = mtf.Dimension("_chosen", self._new_dim.size)
        dy = mtf.reshape(dy, self._batch + [chosen] + dy.shape.dims[len(indices.shape) :])
        indices = mtf.reshape(indices, self._batch + [chosen])
        selector = mtf.one_hot(indices, self._old_dim, dtype=dy.dtype)
        return [mtf.einsum([dy, selector], output_shape=x.shape), None]

    def lower(self, lowering: LoweringLike) -> None:
        """Gathers along the first dimension after the batch dimensions."""
        axis = len(self._batch)
        x, indices = (lowering.tensors[t] for t in self.inputs)
        value = lowering.mesh_impl(self).slicewise(
            lambda t, i: tf.gather(t, i, axis=axis, batch_dims=axis), x, indices
        )
        lowering.set_tensor_lowering(self.outputs[0], value)

    def cost_key(self) -> None:
        """Costs depend on the shapes alone."""
        return None

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """Bytes only: elements are moved."""
        return Cost(0, super().cost(mesh_impl).bytes)


@leaves_no_node
def select(x: mtf.Tensor, indices: mtf.Tensor, old_dim: mtf.Dimension) -> mtf.Tensor:
    """Gathers entries of `x` along a dimension, with separate indices for each batch entry.

    Args:
      x: a Tensor with the dimension `old_dim`, and any of the batch dimensions.
      indices: an int32 Tensor of shape [batch..., new_dim], indices along `old_dim`.
      old_dim: a Dimension, which may equal `new_dim`.

    Returns:
      A Tensor of shape [batch..., new_dim, rest...], where rest are the other dimensions of `x`.
      If `x` has all batch dimensions and `new_dim` equals `old_dim`, the order of `x` is kept.
    """
    batch, new_dim = indices.shape.dims[:-1], indices.shape.dims[-1]
    rest = [d for d in x.shape.dims if d not in batch and d != old_dim]
    ordered = batch + [old_dim] + rest
    if x.shape.dims == ordered:
        return SelectOperation(x, indices, old_dim).outputs[0]
    if len(x.shape) == len(ordered):
        y = SelectOperation(mtf.transpose(x, ordered), indices, old_dim).outputs[0]
    else:
        y = SelectOperation(mtf.broadcast(x, ordered), indices, old_dim).outputs[0]
    same = new_dim == old_dim and len(x.shape) == len(ordered)
    return mtf.transpose(y, x.shape) if same else y


def best(
    scores: mtf.Tensor, old_dim: mtf.Dimension, new_dim: mtf.Dimension, *others: mtf.Tensor
) -> list[mtf.Tensor]:
    """Returns the best scores, best first, and the matching entries of other Tensors.

    Args:
      scores: a Tensor of shape [batch..., old_dim].
      old_dim: a Dimension.
      new_dim: a Dimension, no larger.
      *others: Tensors of shape [batch..., old_dim, ...].

    Returns:
      A list: the scores [batch..., new_dim], their indices along `old_dim`, and a Tensor
      [batch..., new_dim, ...] for each of `others`.
    """
    top, indices = mtf.top_k(scores, old_dim, new_dim)
    return [top, indices, *(select(x, indices, old_dim) for x in others)]


@leaves_no_node
def compute_topk_scores_and_seq(
    sequences: mtf.Tensor,
    scores: mtf.Tensor,
    scores_to_gather: mtf.Tensor,
    flags: mtf.Tensor,
    beam_dim: mtf.Dimension,
    prefix: str = "default",
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor, mtf.Tensor]:
    """Selects the best candidates, one for each beam.

    Args:
      sequences: ids, an integer Tensor of shape [batch..., candidates, length].
      scores: the scores to compare, a Tensor of shape [batch..., candidates].
      scores_to_gather: the scores to return, a Tensor of the same shape.
      flags: a boolean Tensor of the same shape.
      beam_dim: a Dimension, no larger than the candidates dimension.
      prefix: a string, a prefix of the operations' names.

    Returns:
      A tuple (sequences [batch..., beam, length], scores_to_gather [batch..., beam],
      flags [batch..., beam], selector [batch..., beam, candidates]), where selector is a float32
      one-hot encoding of the selected candidates.

    Raises:
      ValueError: the shapes do not match, or there are too few candidates.
    """
    given = [sequences, scores, scores_to_gather, flags]
    rows = sequences.shape.dims[:-1]
    if len(rows) < 1 or any(x.shape.dims != rows for x in given[1:]):
        raise ValueError(
            "compute_topk_scores_and_seq: sequences must be [batch..., candidates, length], and "
            "scores, scores_to_gather and flags [batch..., candidates], but got "
            f"{tensors_text(given)}"
        )
    with tf.variable_scope(f"{prefix}_topk"):
        _, indices, seq, gathered, chosen = best(
            scores, rows[-1], beam_dim, sequences, scores_to_gather, flags
        )
        return seq, gathered, chosen, mtf.one_hot(indices, rows[-1], dtype=tf.float32)
