"""Speculative decoding: a small model proposes ids, and the model accepts several in one step.

Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding" (2023).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow.layers._attention.masks import hidden_where
from mesh_tensorflow.transformer.transformer._context import SPECULATED, EncoderOutputs
from mesh_tensorflow.transformer.transformer._decoding import incremental
from mesh_tensorflow.transformer.transformer._decoding.incremental import IncrementalModel

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._models.unitransformer import Unitransformer

__all__ = ["Draft", "as_draft", "draft_scope", "sample_with_draft"]


@dataclasses.dataclass(frozen=True)
class Draft:
    """The model that proposes ids.

    Attributes:
      model: an autoregressive Unitransformer.
      encoded: the EncoderOutputs that the model reads.
      num_ids: an int, how many ids it proposes in a step.
    """

    model: Unitransformer
    encoded: EncoderOutputs
    num_ids: int


def draft_scope() -> contextlib.AbstractContextManager:
    """Returns the variable scope of drafts, whose variables have the names of any model."""
    return tf.variable_scope("draft")


def as_draft(draft: Union[Unitransformer, Draft], num_ids: int) -> Draft:
    """Returns a Draft; that of a model which reads no encoder, if it is a Unitransformer."""
    return draft if isinstance(draft, Draft) else Draft(draft, EncoderOutputs(), num_ids)


def _check(model: Unitransformer, draft: Unitransformer, num_ids: int) -> None:
    """Raises a ValueError if a draft cannot propose ids for a model."""
    if num_ids < 1:
        raise ValueError(f"num_draft_ids must be 1 or more, not {num_ids}")
    if model.output_vocab_dim != draft.output_vocab_dim:
        sizes = [dims_text([m.output_vocab_dim]) if m.output_vocab_dim else "none"
                 for m in (model, draft)]  # fmt: skip
        raise ValueError(
            f"draft_model: {draft.name} has the output vocabulary {sizes[1]}, but {model.name} has "
            f"{sizes[0]}; make both with the same output_vocab_size"
        )


@leaves_no_node
def sample_with_draft(
    model: Unitransformer,
    draft: Draft,
    partial_sequences: mtf.Tensor,
    encoded: EncoderOutputs,
    stop_at_token: int,
    max_steps: Optional[int],
    temperature: float,
    variable_dtype: mtf.VariableDType,
    has_partial_sequences: bool,
    never_end: bool,
    remove_partial_sequences: bool,
    sampling_keep_top_k: int,
    bos_id: int,
) -> mtf.Tensor:
    """Returns sequences continued by a model, as `sample_autoregressive` does with a draft.

    In each step the draft proposes some ids, one after the other; the model computes the logits of
    all of them at once, and accepts those that it would have chosen itself. With temperature 0
    these are the ids with the largest logits; else an id is accepted with the probability p / q of
    model and draft, and the first one that is not is drawn from max(p - q, 0), so that ids have
    the distribution p. Each step yields one id more than it accepts. Rows advance on their own.

    Args:
      model: an autoregressive Unitransformer.
      draft: a Draft.
      partial_sequences: an int32 Tensor with dimensions [batch..., length].
      encoded: the EncoderOutputs that the model reads.
      stop_at_token: an int, the id that ends a sequence.
      max_steps: an int, the maximum number of added ids; None for as many as fit.
      temperature: a number; 0.0 takes the id with the largest logit.
      variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
      has_partial_sequences: False if `partial_sequences` is all zeros.
      never_end: whether `stop_at_token` is never chosen.
      remove_partial_sequences: whether to remove the given ids from the result.
      sampling_keep_top_k: an int, the number of ids with the largest logits to draw from; -1
        for all.
      bos_id: an int, the id that is fed before the first one.

    Returns:
      A Tensor of the shape of `partial_sequences`, 0 after the end of a row.

    Raises:
      ValueError: the draft does not fit the model; see also `sample_autoregressive`.
    """
    incremental.check_top_k(sampling_keep_top_k)
    _check(model, draft.model, draft.num_ids)
    ids = partial_sequences
    length_dim = ids.shape.dims[-1]
    given = mtf.reduce_sum(mtf.to_int32(mtf.not_equal(ids, 0)), reduced_dim=length_dim)
    target = IncrementalModel(model, ids, given, variable_dtype, encoded, bos_id)
    with draft_scope():
        small = IncrementalModel(draft.model, ids, given, variable_dtype, draft.encoded, bos_id)
    vocab_dim = model.output_vocab_dim
    assert vocab_dim is not None  # autoregressive models have an output vocabulary
    speculation = _Speculation(
        model=target,
        draft=small,
        vocab_dim=vocab_dim,
        length_dim=length_dim,
        several=mtf.Dimension(SPECULATED, draft.num_ids + 1),
        given=given if has_partial_sequences else None,
        limit=length_dim.size if max_steps is None else min(max_steps, length_dim.size),
        end=None if never_end else stop_at_token,
        choice=_Choice(
            temperature, sampling_keep_top_k, vocab_dim, stop_at_token if never_end else None
        ),
    )
    first = speculation.start(ids, bos_id)
    ids = mtf.while_loop(speculation.goes_on, speculation.step, first)[3]
    if has_partial_sequences and remove_partial_sequences:
        return mtf.dynamic_shift(ids, mtf.negative(given), length_dim, wrap=False)
    return ids


@dataclasses.dataclass(frozen=True)
class _Choice:
    """How an id is chosen from logits."""

    temperature: float
    keep_top_k: int
    vocab_dim: mtf.Dimension
    forbidden: Optional[int]

    def scaled(self, logits: mtf.Tensor) -> mtf.Tensor:
        """Returns the logits of the distribution that is drawn from."""
        if self.forbidden is not None:
            logits = incremental.without_end(logits, self.forbidden, self.vocab_dim)
        if self.temperature == 0.0:
            return logits
        if self.keep_top_k != -1 and self.keep_top_k < self.vocab_dim.size:
            top_dim = mtf.Dimension("_top_k_", self.keep_top_k)
            top, _ = mtf.top_k(logits, self.vocab_dim, top_dim)
            # A threshold keeps all ids of the vocabulary, so that two models can be compared.
            lowest = mtf.reduce_min(top, reduced_dim=top_dim)
            logits += hidden_where(mtf.less(logits, lowest), logits.dtype)
        return mtf.to_float(logits) * (1.0 / self.temperature)

    def draw(self, scaled: mtf.Tensor) -> mtf.Tensor:
        """Returns the int32 ids drawn from scaled logits."""
        # Logits are divided already, but 0 still stands for the largest one.
        temperature = 1.0 if self.temperature else 0.0
        return mtf.sample_with_temperature(scaled, self.vocab_dim, temperature)


@dataclasses.dataclass(frozen=True)
class _Speculation:
    """The body and the condition of the loop.

    The loop variables are the number of ids added to each row, which rows are done, the last ids,
    all ids, and the states of the model and of the draft.
    """

    model: IncrementalModel
    draft: IncrementalModel
    vocab_dim: mtf.Dimension
    length_dim: mtf.Dimension
    several: mtf.Dimension
    given: Optional[mtf.Tensor]
    limit: int
    end: Optional[int]
    choice: _Choice

    def start(self, ids: mtf.Tensor, bos_id: int) -> list[mtf.Tensor]:
        """Returns the initial values of the loop variables."""
        done, last = incremental.first_last(ids, self.given, bos_id)
        states = [
            state
            for model in (self.model, self.draft)
            for state in model.first_states(self.given is not None)
        ]
        return [mtf.zeros(ids.mesh, last.shape, tf.int32), done, last, ids, *states]

    def goes_on(self, added: mtf.Tensor, done: mtf.Tensor, *_: mtf.Tensor) -> mtf.Tensor:
        """Returns whether a row is not done, a boolean scalar."""
        return mtf.reduce_any(mtf.logical_not(done), output_shape=[])

    def step(
        self,
        added: mtf.Tensor,
        done: mtf.Tensor,
        last: mtf.Tensor,
        ids: mtf.Tensor,
        *states: mtf.Tensor,
    ) -> list[mtf.Tensor]:
        """Returns the loop variables after a step."""
        position = added if self.given is None else added + self.given
        count = len(self.model.states)
        proposed, odds, draft_states = self._propose(position, last, states[count:])
        offsets = mtf.range(ids.mesh, self.several, tf.int32)
        # Position i is fed the id before it, so there is one output more than there are proposals.
        fed = mtf.stack([last, *proposed], SPECULATED, axis=len(last.shape))
        positions = mtf.add(position, offsets, output_shape=fed.shape)
        logits, model_states = self.model.step(positions, fed, states[:count])
        new, accepted = self._accept(self.choice.scaled(logits), proposed, odds)
        valid = mtf.logical_and(
            mtf.less_equal(offsets, accepted, output_shape=fed.shape), mtf.logical_not(done)
        )
        ends = None
        if self.end is not None:
            stops = mtf.equal(new, self.end)
            # An end stays, and what was accepted after it does not.
            before = mtf.cumsum(mtf.to_int32(stops), self.several, exclusive=True)
            valid = mtf.logical_and(valid, mtf.equal(before, 0))
            ends = mtf.logical_and(valid, stops)
        for reached, most in ((added, self.limit), (position, self.length_dim.size)):
            inside = mtf.less(mtf.add(reached, offsets, output_shape=fed.shape), most)
            valid = mtf.logical_and(valid, inside)
        taken = mtf.to_int32(valid)
        number = mtf.reduce_sum(taken, reduced_dim=self.several)
        # Rows are at different positions, so ids are added at places, where there are zeros so far.
        places = mtf.one_hot(positions, self.length_dim, dtype=tf.int32)
        ids += mtf.einsum([new * taken, places], output_shape=ids.shape)
        latest = mtf.gather(new, mtf.maximum(number - 1, 0), self.several)
        # A row that is done adds nothing, and keeps its last id.
        last = mtf.where(mtf.greater(number, 0), latest, last)
        added += number
        done = mtf.logical_or(done, mtf.greater_equal(added, self.limit))
        done = mtf.logical_or(done, mtf.greater_equal(position + number, self.length_dim.size))
        if ends is not None:
            done = mtf.logical_or(done, mtf.reduce_any(ends, reduced_dim=self.several))
        # States of refused ids remain: no query sees positions after its own, and the next step
        # overwrites them, as it begins right after the accepted ones.
        return [added, done, last, ids, *model_states, *draft_states]

    def _call_draft(
        self, position: mtf.Tensor, last: mtf.Tensor, states: Sequence[mtf.Tensor]
    ) -> tuple[mtf.Tensor, list[mtf.Tensor]]:
        with draft_scope():
            return self.draft.step(position, last, states)

    def _propose(
        self, position: mtf.Tensor, last: mtf.Tensor, states: Sequence[mtf.Tensor]
    ) -> tuple[list[mtf.Tensor], list[mtf.Tensor], list[mtf.Tensor]]:
        """Returns the draft's ids, the scaled logits they are drawn from, and its states."""
        proposed, odds = [], []
        for i in range(self.several.size - 1):
            logits, states = self._call_draft(position + i, last, states)
            odds.append(self.choice.scaled(logits))
            last = self.choice.draw(odds[-1])
            proposed.append(last)
        # If all are accepted, the next step continues after the last one, whose states it needs.
        _, states = self._call_draft(position + len(proposed), last, states)
        return proposed, odds, states

    def _accept(
        self, scaled: mtf.Tensor, proposed: list[mtf.Tensor], odds: list[mtf.Tensor]
    ) -> tuple[mtf.Tensor, mtf.Tensor]:
        """Returns an id for each position, and how many of the draft's ids are accepted.

        The id after the accepted ones is the model's own; later ones are meaningless.
        """
        axis = len(proposed[0].shape)
        # An id that no one proposed stands at the last position, which is never accepted.
        ids = mtf.stack([*proposed, mtf.zeros_like(proposed[0]) - 1], SPECULATED, axis)
        if self.choice.temperature == 0.0:
            new = self.choice.draw(scaled)
            return new, self._leading(mtf.equal(new, ids))
        p = mtf.softmax(scaled, self.vocab_dim)
        qs = [mtf.softmax(x, self.vocab_dim) for x in odds]
        q = mtf.stack([*qs, mtf.zeros_like(qs[0])], SPECULATED, axis)
        here = mtf.one_hot(ids, self.vocab_dim, dtype=p.dtype)
        p_id, q_id = (mtf.einsum([x, here], output_shape=ids.shape) for x in (p, q))
        # With the probability min(1, p / q) (Leviathan et al., 2023, algorithm 1), without a
        # division by a q that may be 0.
        accepts = mtf.less(mtf.random_uniform(ids.mesh, ids.shape, dtype=p.dtype) * q_id, p_id)
        accepted = self._leading(accepts)
        # The distribution max(p - q, 0), up to its sum: so that accepted and drawn ids together
        # have the distribution p (Leviathan et al., 2023, algorithm 1).
        rest = mtf.relu(mtf.gather(p - q, accepted, self.several))
        # The logarithm of 0 is -inf, which is never drawn; samples need no normalized distribution.
        own = mtf.sample_with_temperature(mtf.log(rest), self.vocab_dim, 1.0)
        offsets = mtf.range(ids.mesh, self.several, tf.int32)
        earlier = mtf.less(offsets, accepted, output_shape=ids.shape)
        return mtf.where(earlier, ids, mtf.broadcast(own, ids.shape)), accepted

    def _leading(self, accepts: mtf.Tensor) -> mtf.Tensor:
        """Returns how many positions are accepted before the first that is not."""
        refused = mtf.cumsum(mtf.to_int32(mtf.logical_not(accepts)), self.several)
        leading = mtf.to_int32(mtf.equal(refused, 0))
        return mtf.reduce_sum(leading, reduced_dim=self.several)
