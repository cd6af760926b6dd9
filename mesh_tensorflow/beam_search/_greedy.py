"""Greedy decoding and sampling, one position at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import tensors_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow.beam_search._select import EOS_ID

__all__ = ["greedy_decode"]


@gin.configurable(module="mesh_tensorflow.beam_search")
@leaves_no_node
def greedy_decode(
    logits_fn: Callable,
    initial_ids: mtf.Tensor,
    temperature: float = 0.0,
    initial_states: Optional[Sequence[mtf.Tensor]] = None,
    eos_id: int = EOS_ID,
    forced_ids: Optional[mtf.Tensor] = None,
    use_tpu: bool = True,
) -> mtf.Tensor:
    """Decodes sequences one position at a time, greedily or by sampling.

    Decoding ends when every sequence contains `eos_id`, or at the full length. Ids after an
    `eos_id` are meaningless.

    Args:
      logits_fn: a function of (step, ids, states): an int32 scalar, the position to decode; an
        int32 Tensor [batch..., length], the ids decoded so far; a list of Tensors. Returns logits
        [batch..., vocab] and a list of the next states.
      initial_ids: an int32 Tensor of shape [batch..., length], zeros.
      temperature: a number; 0.0 takes the largest logit, 1.0 samples from the softmax.
      initial_states: a list of Tensors, the first states for `logits_fn`.
      eos_id: an int, the id that ends a sequence.
      forced_ids: an int32 Tensor of the shape of `initial_ids`; its nonzero ids are used instead
        of decoded ones.
      use_tpu: unused.

    Returns:
      An int32 Tensor of the shape of `initial_ids`.

    Raises:
      ValueError: the ids or the logits have invalid shapes.
    """
    _check_ids(initial_ids, forced_ids)
    batch, length = initial_ids.shape.dims[:-1], initial_ids.shape.dims[-1]
    mesh = initial_ids.mesh

    def cond_fn(step: mtf.Tensor, has_eos: mtf.Tensor, *_: mtf.Tensor) -> mtf.Tensor:
        all_have = mtf.reduce_all(has_eos, output_shape=[])
        return mtf.logical_and(mtf.less(step, length.size), mtf.logical_not(all_have))

    def body_fn(
        step: mtf.Tensor, has_eos: mtf.Tensor, ids: mtf.Tensor, *states: mtf.Tensor
    ) -> list[mtf.Tensor]:
        logits, new_states = logits_fn(step, ids, list(states))
        vocab = [d for d in logits.shape if d not in batch]
        if len(vocab) != 1 or len(logits.shape) != len(batch) + 1:
            raise ValueError(
                f"greedy_decode: logits must have the dimensions of the batch "
                f"{mtf.Shape(batch)} and a vocabulary, not {tensors_text([logits])}"
            )
        new = mtf.sample_with_temperature(logits, vocab[0], temperature)
        if new.shape.dims != batch:
            new = mtf.transpose(new, batch)
        if forced_ids is not None:
            forced = mtf.gather(forced_ids, step, length)
            new = mtf.where(mtf.equal(forced, 0), new, forced)
        ids += new * mtf.one_hot(step, length, dtype=tf.int32)
        # Rows that have ended are computed on until all have, as shapes are fixed in a loop.
        has_eos = mtf.logical_or(has_eos, mtf.equal(new, eos_id))
        return [step + 1, has_eos, ids, *new_states]

    first = [
        mtf.constant(mesh, 0, dtype=tf.int32),
        mtf.constant(mesh, False, mtf.Shape(batch), tf.bool),
        initial_ids,
        *(initial_states or []),
    ]
    return mtf.while_loop(cond_fn, body_fn, first)[2]


def _check_ids(initial_ids: mtf.Tensor, forced_ids: Optional[mtf.Tensor]) -> None:
    if not initial_ids.shape.dims or not initial_ids.dtype.is_integer:
        raise ValueError(
            "greedy_decode: initial_ids must be an integer Tensor of shape [batch..., length], "
            f"not {tensors_text([initial_ids])}"
        )
    if forced_ids is not None and (
        forced_ids.shape != initial_ids.shape or forced_ids.dtype != initial_ids.dtype
    ):
        raise ValueError(
            f"greedy_decode: forced_ids must be like initial_ids {tensors_text([initial_ids])}, "
            f"not {tensors_text([forced_ids])}"
        )
