"""Gives tokens places in the experts that they chose, or experts their best tokens.

An expert takes a fixed number of tokens of each group, its capacity. The results are two tensors
with a dimension of places: `dispatch`, by which tokens are sent, and `combine`, by which outputs
come back.
"""

from __future__ import annotations

from typing import Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.transformer.moe._router import Router

__all__ = ["Assignment", "best_of_group", "dispatch_and_combine"]


class Assignment:
    """Assigns expert capacity to tokens in the order of their group.

    Tokens beyond the capacity are dropped.
    """

    def __init__(self, router: Router) -> None:
        self._group_dim, self._capacity_dim = router.group_dim, router.capacity_dim
        self._experts_dim = router.experts_dim
        self._dtype = router.dtype
        self._taken: Optional[mtf.Tensor] = None
        self._combine: Optional[mtf.Tensor] = None

    def place(self, choices: mtf.Tensor, gates: mtf.Tensor) -> mtf.Tensor:
        """Assigns places after those that are already taken.

        Args:
          choices: a Tensor with dimensions [..., group, experts], 1.0 where a token chooses an
            expert, at most one per token, and 0.0 elsewhere.
          gates: a Tensor with dimensions [..., group], the weights of the tokens' outputs.

        Returns:
          A Tensor with dimensions [..., group], 1.0 where a token got a place.
        """
        # The place of a token is the number of earlier tokens of its group that chose the same
        # expert.
        places = mtf.cumsum(choices, self._group_dim, exclusive=True)
        if self._taken is not None:
            places += self._taken
        capacity = float(self._capacity_dim.size)
        kept = choices * mtf.to_float(mtf.less(places, capacity))
        place = mtf.reduce_sum(places * kept, reduced_dim=self._experts_dim)
        combine = mtf.einsum(
            [
                kept,
                gates,
                mtf.one_hot(mtf.to_int32(place), self._capacity_dim),
            ],
            output_shape=kept.shape + self._capacity_dim,
        )
        # Of all choices, also those that got no place: where there are such, the expert is full
        # anyway.
        taken = mtf.reduce_sum(choices, reduced_dim=self._group_dim)
        self._taken = taken if self._taken is None else self._taken + taken
        self._combine = combine if self._combine is None else self._combine + combine
        return mtf.reduce_sum(kept, reduced_dim=self._experts_dim)

    def tensors(self) -> tuple[mtf.Tensor, mtf.Tensor]:
        """Returns (dispatch, combine), [..., group, experts, expert_capacity] each.

        Dispatch is 1 where a token has a place; combine is the gate there.
        """
        if self._combine is None:
            raise RuntimeError("Assignment: no places were given")
        return dispatch_and_combine(self._combine, self._dtype)


def dispatch_and_combine(combine: mtf.Tensor, dtype: tf.DType) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Returns (dispatch, combine) in a dtype; dispatch is 1 where combine is not 0."""
    return mtf.cast(mtf.not_equal(combine, 0.0), dtype), mtf.cast(combine, dtype)


def best_of_group(router: Router, scores: mtf.Tensor) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Returns the highest scores of each expert, and their tokens as one-hot vectors.

    Args:
      router: a Router.
      scores: a Tensor with dimensions [..., group, experts].

    Returns:
      (a Tensor with dimensions [..., experts, expert_capacity], one with [..., experts,
      expert_capacity, group]); zeros where the capacity exceeds the group.
    """
    capacity_dim, group_dim = router.capacity_dim, router.group_dim
    # The minimum capacity may exceed the tokens of a small group, and top_k cannot.
    k_dim = mtf.Dimension(capacity_dim.name, min(capacity_dim.size, group_dim.size))
    values, tokens = mtf.top_k(scores, group_dim, k_dim)
    places = mtf.one_hot(tokens, group_dim)
    beyond = [0, capacity_dim.size - k_dim.size]
    if beyond[1]:
        values = mtf.pad(values, beyond, capacity_dim.name)
        places = mtf.pad(places, beyond, capacity_dim.name)
    return values, places
