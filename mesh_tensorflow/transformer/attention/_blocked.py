"""When attention works by blocks, and how it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.layers._attention.blocked import (
    added_terms,
    attention_and_log_sums,
    whole_dims,
)
from mesh_tensorflow.layers._attention.masks import MadeOf

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = ["blocked_attend", "takes_blocks"]

# From this length of queries and of the memory on, blocks are used: see docs/benchmarks.md.
LEAST_LENGTH = 1024


def _parts_of(bias: Optional[mtf.Tensor]) -> MadeOf:
    """Returns what a bias was made of."""
    found: Optional[MadeOf] = None if bias is None else bias.made_of
    return MadeOf(bias, ()) if found is None else found


def takes_blocks(
    blocked: Optional[bool],
    tensors: Sequence[mtf.Tensor],
    dims: Sequence[mtf.Dimension],
    bias: Optional[mtf.Tensor],
    dropout_rate: Any,
    joint: bool,
    ring: Union[bool, str] = False,
) -> bool:
    """Returns whether attention works by blocks.

    Args:
      blocked: what the caller says; None if it does not.
      tensors: queries, keys and values.
      dims: the Dimensions of the memory, of keys and of values.
      bias: a Tensor or None.
      dropout_rate: a number or a tf scalar.
      joint: whether there are an extra logit and a z-loss, which exclude each other in blocks.
      ring: whether, or how, keys and values are passed around; then blocks are used wherever they
        are possible.

    Raises:
      ValueError: `blocked` is true, and blocks are not possible.
    """
    if blocked is False:
        return False
    q, k, v = tensors
    memory, key, value = dims
    parts = _parts_of(bias)
    terms = added_terms(parts.rest, parts.visible, parts.distances)
    found = whole_dims(q, k, v, memory, key, value, terms)
    why = found if isinstance(found, str) else ""
    if not isinstance(dropout_rate, (int, float)):
        why = "dropout_rate is a tensor, and blocks need a number"
    elif joint:
        why = "z_loss_coeff leaves an extra_logit out, and blocks have only the sums with it"
    if blocked and why:
        raise ValueError(f"attention: blocked=True is not possible: {why}. Leave blocked out")
    if blocked or ring or why:
        return not why
    return min(found.length.size, memory.size) >= LEAST_LENGTH  # type: ignore[union-attr]


def blocked_attend(
    tensors: Sequence[mtf.Tensor],
    dims: Sequence[mtf.Dimension],
    bias: Optional[mtf.Tensor],
    dropout_rate: float,
    dropout_broadcast_dims: Optional[Sequence[mtf.Dimension]],
    extra_logit: Union[mtf.Tensor, float, None],
    context: Context,
    ring: Union[bool, str] = False,
) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Returns what `attend` does, and the logarithms of the softmax's denominators."""
    q, k, v = tensors
    memory, key, value = dims
    if layers.unit_scaling_convention():
        # What layers.us_einsum does to the logits of the plain form.
        q = q * key.size**-0.5
    parts = _parts_of(bias)
    training = context is None or context.train
    return attention_and_log_sums(
        q,
        k,
        v,
        memory,
        key,
        value,
        parts.rest,
        parts.visible,
        dropout_rate=dropout_rate if training else 0.0,
        dropout_broadcast_dims=dropout_broadcast_dims,
        extra_logit=extra_logit,
        ring=ring,
        distances=parts.distances,
    )
