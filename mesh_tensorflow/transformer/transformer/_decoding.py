"""Decoding, one id after another: a step of it, samples, beam search, and drafts by a small model.

Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding" (2023).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import beam_search as mtf_beam_search
from mesh_tensorflow._core.errors import dims_text, tensors_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow.layers._masks import hidden_where
from mesh_tensorflow.layers._visibility import MASKED_LOGIT
from mesh_tensorflow.transformer.transformer._call import autoregressive_inputs
from mesh_tensorflow.transformer.transformer._context import SPECULATED, Context, EncoderOutputs

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._unitransformer import Unitransformer


# -- samples and beam search


class IncrementalModel:
    """A model that is called once for all positions, and then for one position at a time.

    In the first call, in mode "first_part", the layers record their states for the given ids.
    The calls in mode "incremental" take these states and return the next ones.

    Attributes:
      states: a list of Tensors, the states after the first call.
    """

    def __init__(
        self,
        model: Unitransformer,
        ids: mtf.Tensor,
        initial_position: mtf.Tensor,
        variable_dtype: mtf.VariableDType,
        encoded: EncoderOutputs,
        bos_id: int = 0,
    ) -> None:
        """Makes the first call of the model.

        Args:
          model: a Unitransformer.
          ids: an int32 Tensor with dimensions [batch..., length], 0 from `initial_position` on.
          initial_position: an int32 Tensor with dimensions [batch...], the number of given ids.
          variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
          encoded: the EncoderOutputs that the model reads.
          bos_id: an int, the input of the first position.

        Raises:
          ValueError: the model is not autoregressive, or the ids are not such a Tensor.
        """
        _check(model, ids)
        self._model = model
        *batch_dims, length_dim = ids.shape.dims
        mesh = ids.mesh
        positions = mtf.range(mesh, length_dim, tf.int32)
        self._write_priority = positions
        if model.input_full_attention:
            # The given ids all see each other. The position after them is fed the last of them.
            later = mtf.greater(positions, initial_position)
            # One priority for all given ids: a position sees what has at most its own.
            self._write_priority = positions * mtf.to_int32(later)
        self._arguments = {
            "model": model,
            "mesh": mesh,
            "batch_dims": batch_dims,
            "length_dim": length_dim,
            "variable_dtype": variable_dtype,
            # The encoder's padding has id 0, so decoder positions with id 1 do not attend to it.
            "sequence_id": None if encoded.encoder_sequence_id is None else 1,
            # One list for all calls: the first one records into it, and the steps read it.
            "constant_states": [],
            "write_priority": self._write_priority,
            **encoded.arguments(),
        }
        inputs = autoregressive_inputs(ids)
        if bos_id:
            first = mtf.constant(mesh, 0, dtype=tf.int32)
            # After the shift the first input is 0, so that a sum sets it.
            inputs += mtf.one_hot(first, length_dim, bos_id, 0, tf.int32)
        context = self._context(
            mode="first_part",
            position=positions,
            position_is_default=True,
            initial_position=initial_position,
            read_priority=self._write_priority,
            # What the model is fed, as in training: a step is fed the last given id, not this call.
            inputs=inputs,
        )
        model._call_internal(context, inputs)
        self.states: list[mtf.Tensor] = context.new_states or []

    def first_states(self, given: bool) -> list[mtf.Tensor]:
        """Returns the states before the first step; zeros unless there are given ids."""
        if given:
            return self.states
        # Then nothing needs what the first call computes of the ids, and TensorFlow leaves it out.
        return [mtf.zeros(x.mesh, x.shape, x.dtype) for x in self.states]

    def _context(self, **kwargs: Any) -> Context:
        return Context(**self._arguments, new_states=[], **kwargs)

    def step(
        self, position: mtf.Tensor, last_ids: mtf.Tensor, states: Sequence[mtf.Tensor]
    ) -> tuple[mtf.Tensor, list[mtf.Tensor]]:
        """Returns the logits at a position, and the states after it.

        Args:
          position: an int32 Tensor, a scalar or with dimensions [batch...]; or with the dimension
            `speculated` in addition, for several positions that follow each other.
          last_ids: an int32 Tensor with dimensions [batch...], the ids before the position; for
            several positions with dimensions [batch..., speculated].
          states: a list of Tensors, the states before the position.

        Returns:
          (a Tensor with the dimensions of `last_ids` and the vocabulary, a list of Tensors).

        Raises:
          ValueError: the layers record states of other shapes than in mode "first_part".
        """
        context = self._context(
            mode="incremental",
            position=position,
            read_priority=position,
            states=list(states),
            inputs=last_ids,
        )
        # The first call has made all variables. A layer that asks for another one is wrong.
        with tf.variable_scope(tf.get_variable_scope(), reuse=True):
            logits = self._model._call_internal(context, last_ids)
        new_states = context.new_states or []
        if [x.shape for x in new_states] != [x.shape for x in states]:
            raise ValueError(
                f"{self._model.name}: in mode incremental layers must record states of the shapes "
                f"that they recorded in mode first_part, {tensors_text(states)}, not "
                f"{tensors_text(new_states)}"
            )
        return logits, new_states


def _check(model: Unitransformer, ids: mtf.Tensor) -> None:
    if not model.autoregressive:
        raise ValueError(
            f"{model.name} must be autoregressive to be decoded one position at a time; make the "
            "Unitransformer with autoregressive=True"
        )
    if not ids.shape.dims or ids.dtype != tf.int32:
        raise ValueError(
            f"{model.name}: sequences must be an int32 Tensor with dimensions [batch..., length], "
            f"not {tensors_text([ids])}"
        )


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How sequences are continued, the arguments of `Unitransformer.sample_autoregressive`.

    Attributes:
      stop_at_token: an int, the id that ends a sequence.
      max_steps: an int, the maximum number of added ids; None for as many as fit.
      temperature: a number; 0.0 takes the id with the largest logit.
      variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
      has_partial_sequences: False if the sequences are all zeros.
      never_end: whether `stop_at_token` is never chosen.
      remove_partial_sequences: whether to remove the given ids from the result.
      sampling_keep_top_k: an int, the number of ids with the largest logits to draw from; -1
        for all.
      bos_id: an int, the id that is fed before the first one.
    """

    stop_at_token: int
    max_steps: Optional[int]
    temperature: float
    variable_dtype: mtf.VariableDType
    has_partial_sequences: bool
    never_end: bool
    remove_partial_sequences: bool
    sampling_keep_top_k: int
    bos_id: int


@leaves_no_node
def sample_autoregressive(
    model: Unitransformer,
    ids: mtf.Tensor,
    encoded: EncoderOutputs,
    how: Sampling,
    draft: Optional[Draft] = None,
) -> mtf.Tensor:
    """Returns sequences continued by a model; see `Unitransformer.sample_autoregressive`.

    Args:
      model: an autoregressive Unitransformer.
      ids: an int32 Tensor with dimensions [batch..., length]: in each row the given ids, then
        zeros.
      encoded: the EncoderOutputs that the model reads.
      how: a Sampling.
      draft: a Draft that proposes several ids, of which each step accepts some; or None.

    Returns:
      A Tensor of the shape of `ids`; with a draft, 0 after the end of a row.

    Raises:
      ValueError: the model is not autoregressive, `sampling_keep_top_k` is 0 or below -1, `ids` is
        not such a Tensor, or the draft does not fit the model.
    """
    check_top_k(how.sampling_keep_top_k)
    if draft is not None:
        _check_draft(model, draft.model, draft.num_ids)
    length_dim = ids.shape.dims[-1]
    # Rows begin with their given ids, so that their number is also the first position to fill.
    given = mtf.reduce_sum(mtf.to_int32(mtf.not_equal(ids, 0)), reduced_dim=length_dim)
    incremental = IncrementalModel(model, ids, given, how.variable_dtype, encoded, how.bos_id)
    vocab_dim = model.output_vocab_dim
    assert vocab_dim is not None  # autoregressive models have an output vocabulary
    limit = length_dim.size if how.max_steps is None else min(how.max_steps, length_dim.size)
    loop: Union[_Sampler, _Speculation]
    if draft is None:
        loop = _Sampler(
            incremental=incremental,
            vocab_dim=vocab_dim,
            length_dim=length_dim,
            given=given if how.has_partial_sequences else None,
            limit=limit,
            stop_at_token=how.stop_at_token,
            never_end=how.never_end,
            temperature=how.temperature,
            keep_top_k=how.sampling_keep_top_k,
        )
    else:
        with draft_scope():
            small = IncrementalModel(
                draft.model, ids, given, how.variable_dtype, draft.encoded, how.bos_id
            )
        forbidden = how.stop_at_token if how.never_end else None
        loop = _Speculation(
            model=incremental,
            draft=small,
            vocab_dim=vocab_dim,
            length_dim=length_dim,
            several=mtf.Dimension(SPECULATED, draft.num_ids + 1),
            given=given if how.has_partial_sequences else None,
            limit=limit,
            end=None if how.never_end else how.stop_at_token,
            choice=_Choice(how.temperature, how.sampling_keep_top_k, vocab_dim, forbidden),
        )
    first = loop.start(ids, how.bos_id)
    # Both kinds of loops have all ids as their fourth variable.
    ids = mtf.while_loop(loop.goes_on, loop.step, first)[3]
    if how.has_partial_sequences and how.remove_partial_sequences:
        # Each row by the number of its own given ids, so that all continuations begin at 0.
        return mtf.dynamic_shift(ids, mtf.negative(given), length_dim, wrap=False)
    return ids


@dataclasses.dataclass(frozen=True)
class _Sampler:
    """The body and the condition of the sampling loop.

    The loop variables are the number of steps, which rows are done, the last ids, all ids, and
    the states of the model.
    """

    incremental: IncrementalModel
    vocab_dim: mtf.Dimension
    length_dim: mtf.Dimension
    given: Optional[mtf.Tensor]  # the number of given ids in each row; None if there are none
    limit: int
    stop_at_token: int
    never_end: bool
    temperature: float
    keep_top_k: int

    def start(self, ids: mtf.Tensor, bos_id: int) -> list[mtf.Tensor]:
        """Returns the initial values of the loop variables."""
        step = mtf.constant(ids.mesh, 0, dtype=tf.int32)
        states = self.incremental.first_states(self.given is not None)
        return [step, *first_last(ids, self.given, bos_id), ids, *states]

    def goes_on(self, step: mtf.Tensor, done: mtf.Tensor, *_: mtf.Tensor) -> mtf.Tensor:
        """Returns whether to take another step, a boolean scalar."""
        more = mtf.less(step, self.limit)
        # Then no row is ever done, and no processor has to be asked.
        if self.never_end and self.given is None:
            return more
        return mtf.logical_and(more, mtf.reduce_any(mtf.logical_not(done), output_shape=[]))

    def step(
        self,
        step: mtf.Tensor,
        done: mtf.Tensor,
        last: mtf.Tensor,
        ids: mtf.Tensor,
        *states: mtf.Tensor,
    ) -> list[mtf.Tensor]:
        """Returns the loop variables after a step."""
        # Without given ids all rows are at the same position, and masks need no batch dimension.
        position = step if self.given is None else step + self.given
        logits, new_states = self.incremental.step(position, last, states)
        if self.never_end:
            logits = without_end(logits, self.stop_at_token, self.vocab_dim)
        last = _choose(logits, self.vocab_dim, self.temperature, self.keep_top_k)
        if last.shape != done.shape:
            last = mtf.broadcast(last, done.shape)
        # Rows are 0 there so far; after their end the one-hot is 0, and changes nothing.
        ids += last * mtf.one_hot(position, self.length_dim, dtype=tf.int32)
        if not self.never_end:
            done = mtf.logical_or(done, mtf.equal(last, self.stop_at_token))
        if self.given is not None:
            # Without given ids rows are full at once, and the limit of steps tells it.
            full = mtf.greater_equal(position + 1, self.length_dim.size)
            done = mtf.logical_or(done, full)
        return [step + 1, done, last, ids, *new_states]


def first_last(
    ids: mtf.Tensor, given: Optional[mtf.Tensor], bos_id: int
) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Returns which rows are full, and the last id of each row, before the first step.

    Args:
      ids: an int32 Tensor with dimensions [batch..., length].
      given: an int32 Tensor with dimensions [batch...], the number of given ids; None if there
        are none.
      bos_id: an int, the id that is fed before the first one.
    """
    *rows, length_dim = ids.shape.dims
    if given is None:
        done = mtf.constant(ids.mesh, False, mtf.Shape(rows), tf.bool)
        return done, mtf.constant(ids.mesh, bos_id, mtf.Shape(rows), tf.int32)
    # Without given ids the index is -1, which gives 0, the id of padding and the usual beginning.
    last = mtf.gather(ids, given - 1, length_dim)
    if bos_id:
        last += mtf.to_int32(mtf.equal(given, 0)) * bos_id
    return mtf.greater_equal(given, length_dim.size), last


def without_end(logits: mtf.Tensor, stop_at_token: int, vocab_dim: mtf.Dimension) -> mtf.Tensor:
    """Returns logits with which `stop_at_token` is never chosen."""
    end = mtf.constant(logits.mesh, stop_at_token, dtype=tf.int32)
    return logits + mtf.one_hot(end, vocab_dim, MASKED_LOGIT, 0.0, logits.dtype)


def check_top_k(sampling_keep_top_k: int) -> None:
    """Raises a ValueError if a number of ids to draw from is neither positive nor -1, for all."""
    if sampling_keep_top_k != -1 and sampling_keep_top_k < 1:
        raise ValueError(
            "sampling_keep_top_k must either be -1, for all ids, or positive, not "
            f"{sampling_keep_top_k}"
        )


def _choose(
    logits: mtf.Tensor, vocab_dim: mtf.Dimension, temperature: float, keep_top_k: int
) -> mtf.Tensor:
    """Returns the int32 id chosen in each row of logits."""
    # At temperature 0 the best id is chosen, which is among any number of best ones.
    if temperature == 0.0 or keep_top_k == -1 or keep_top_k >= vocab_dim.size:
        return mtf.sample_with_temperature(logits, vocab_dim, temperature)
    # Random numbers are needed for the top ids only.
    top_dim = mtf.Dimension("_top_k_", keep_top_k)
    top, ids = mtf.top_k(logits, vocab_dim, top_dim)
    drawn = mtf.sample_with_temperature(top, top_dim, temperature)
    return mtf.gather(ids, drawn, top_dim)


@leaves_no_node
def beam_search(
    model: Unitransformer,
    inputs: mtf.Tensor,
    decode_length: Union[int, mtf.Tensor],
    variable_dtype: mtf.VariableDType,
    encoded: EncoderOutputs,
    alpha: float = 0.6,
    bos_id: int = 0,
) -> mtf.Tensor:
    """Returns the best sequences found by a beam search; see `Unitransformer.beam_search`.

    Args:
      model: an autoregressive Unitransformer.
      inputs: an int32 Tensor with dimensions [batch..., beam, length], all zeros.
      decode_length: the maximum length, an int or an int32 scalar Tensor.
      variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
      encoded: the EncoderOutputs that the model reads.
      alpha: a number, the length penalty: larger values prefer longer sequences.
      bos_id: an int, the id that is fed before the first one.

    Returns:
      A Tensor with dimensions [batch..., length].

    Raises:
      ValueError: the model is not autoregressive, or the inputs have no beams.
    """
    if len(inputs.shape) < 3:
        raise ValueError(
            f"{model.name}: for a beam search, inputs must have the dimensions [batch, beam, "
            f"length], not {tensors_text([inputs])}"
        )
    *rows, beam_dim, length_dim = inputs.shape.dims
    mesh = inputs.mesh
    # No ids are given: the first call makes variables, and tells the shapes of states.
    start = mtf.zeros(mesh, mtf.Shape([*rows, beam_dim]), tf.int32)
    incremental = IncrementalModel(model, inputs, start, variable_dtype, encoded, bos_id)

    def logits_fn(
        step: mtf.Tensor, ids: mtf.Tensor, states: Sequence[mtf.Tensor]
    ) -> tuple[mtf.Tensor, list[mtf.Tensor]]:
        # Before the first step the index is -1, for which gather returns 0.
        last = mtf.gather(ids, step - 1, length_dim)
        if bos_id:
            last += mtf.to_int32(mtf.equal(step, 0)) * bos_id
        return incremental.step(step, last, states)

    ids, _ = mtf_beam_search.beam_search(
        logits_fn,
        inputs,
        alpha,
        states=[mtf.zeros(mesh, x.shape, x.dtype) for x in incremental.states],
        decode_length=decode_length,
        # Scores add up log-probabilities of whole sequences, of which bfloat16 would lose digits.
        dtype=tf.float32,
        layout=model.layout,
        mesh_shape=model.mesh_shape,
    )
    # Beams are sorted, the best one first.
    return mtf.gather(ids, mtf.constant(mesh, 0, dtype=tf.int32), beam_dim)


# -- speculative decoding


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


def _check_draft(model: Unitransformer, draft: Unitransformer, num_ids: int) -> None:
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
            logits = without_end(logits, self.forbidden, self.vocab_dim)
        if self.temperature == 0.0:
            return logits
        if self.keep_top_k != -1 and self.keep_top_k < self.vocab_dim.size:
            top_dim = mtf.Dimension("_top_k_", self.keep_top_k)
            top, ids = mtf.top_k(logits, self.vocab_dim, top_dim)
            # A threshold keeps all ids of the vocabulary, so that two models can be compared. Of
            # those that are equal to it, which bfloat16 has often, only the first are kept: the
            # last id of `top_k`, and what is before it.
            lowest = mtf.reduce_min(top, reduced_dim=top_dim)
            last = mtf.gather(ids, top_dim.size - 1, top_dim)
            every = mtf.range(logits.mesh, self.vocab_dim, tf.int32)
            after = mtf.greater(every, last, output_shape=logits.shape)
            ties = mtf.logical_and(mtf.equal(logits, lowest), after)
            left_out = mtf.logical_or(mtf.less(logits, lowest), ties)
            logits += hidden_where(left_out, logits.dtype)
        return mtf.to_float(logits) * (1.0 / self.temperature)

    def draw(self, scaled: mtf.Tensor) -> mtf.Tensor:
        """Returns the int32 ids drawn from scaled logits."""
        # Logits are divided already, but 0 still stands for the largest one.
        temperature = 1.0 if self.temperature else 0.0
        return mtf.sample_with_temperature(scaled, self.vocab_dim, temperature)


@dataclasses.dataclass(frozen=True)
class _Speculation:
    """The body and the condition of the loop with a draft.

    In each step the draft proposes some ids, one after the other; the model computes the logits of
    all of them at once, and accepts those that it would have chosen itself. With temperature 0
    these are the ids with the largest logits; else an id is accepted with the probability p / q of
    model and draft, and the first one that is not is drawn from max(p - q, 0), so that ids have
    the distribution p. Each step yields one id more than it accepts. Rows advance on their own.

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
        done, last = first_last(ids, self.given, bos_id)
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
        # Several ids at once may go beyond the limit or the end of a row: what is beyond is not
        # taken.
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
