"""Decoding, one id after another: a step of it, which id is chosen, and drafts by a small model.

Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding" (2023).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import dims_text, is_real, tensors_text
from mesh_tensorflow.layers._masks import MASKED_LOGIT, hidden_where
from mesh_tensorflow.transformer.transformer._call import autoregressive_inputs
from mesh_tensorflow.transformer.transformer._context import SPECULATED, Context, EncoderOutputs

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._unitransformer import Unitransformer


# -- steps and samples


class IncrementalModel:
    """A model that is called once for all positions, and then for one position at a time.

    In the first call, in mode "first_part", the layers record their states for the given ids.
    The calls in mode "incremental" take these states and return the next ones.

    Attributes:
      length_dim: the Dimension of positions.
      vocab_dim: the Dimension of ids in the logits.
      states: a list of Tensors, the states after the first call.
    """

    def __init__(
        self,
        model: Unitransformer,
        ids: mtf.Tensor,
        initial_position: mtf.Tensor,
        variable_dtype: mtf.VariableDType,
        encoded: EncoderOutputs,
        bos_id: Union[int, mtf.Tensor] = 0,
        max_given: Optional[int] = None,
    ) -> None:
        """Makes the first call of the model.

        Args:
          model: a Unitransformer.
          ids: an int32 Tensor with dimensions [batch..., length], 0 from `initial_position` on.
          initial_position: an int32 Tensor with dimensions [batch...], the number of given ids.
          variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
          encoded: the EncoderOutputs that the model reads.
          bos_id: the input of the first position: an int, or an int32 Tensor with dimensions
            [batch...].
          max_given: an int, the most given ids that a row has; the length if None.

        Raises:
          ValueError: the model is not autoregressive, or the ids are not such a Tensor.
        """
        _check(model, ids)
        self._model = model
        assert model.output_vocab_dim is not None  # autoregressive models have one
        *batch_dims, length_dim = ids.shape.dims
        self.length_dim, self.vocab_dim = length_dim, model.output_vocab_dim
        mesh = ids.mesh

        def priorities(length_dim: mtf.Dimension) -> tuple[mtf.Tensor, mtf.Tensor]:
            positions = mtf.range(mesh, length_dim, tf.int32)
            if not model.input_full_attention:
                return positions, positions
            # The given ids all see each other. The position after them is fed the last of them.
            later = mtf.greater(positions, initial_position)
            # One priority for all given ids: a position sees what has at most its own.
            return positions, positions * mtf.to_int32(later)

        if max_given is not None and max_given < length_dim.size:
            # The first call is for given ids; those that are added get their states in steps.
            ids = mtf.slice(ids, 0, max_given, length_dim.name)
        length_dim = ids.shape.dims[-1]
        shorter = length_dim != self.length_dim
        positions, write_priority = priorities(length_dim)
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
            "write_priority": write_priority,
            **encoded.arguments(),
        }
        inputs = autoregressive_inputs(ids)
        # After the shift the first input is 0, so that a sum sets it.
        first = mtf.constant(mesh, 0, dtype=tf.int32)
        if isinstance(bos_id, mtf.Tensor):
            inputs += bos_id * mtf.one_hot(first, length_dim, dtype=tf.int32)
        elif bos_id:
            inputs += mtf.one_hot(first, length_dim, bos_id, 0, tf.int32)
        context = self._context(
            mode="first_part",
            position=positions,
            position_is_default=True,
            initial_position=initial_position,
            read_priority=write_priority,
            # What the model is fed, as in training: a step is fed the last given id, not this call.
            inputs=inputs,
            states_length=self.length_dim.size if shorter else None,
        )
        model._call_internal(context, inputs)
        if shorter:
            self._arguments["length_dim"] = self.length_dim
            self._arguments["write_priority"] = priorities(self.length_dim)[1]
        self.states: list[mtf.Tensor] = context.new_states or []

    def first_states(self, given: bool) -> list[mtf.Tensor]:
        """Returns the states before the first step; zeros unless there are given ids."""
        if given:
            return self.states
        # Then nothing needs what the first call computes of the ids, and TensorFlow leaves it out.
        return [mtf.zeros(x.mesh, x.shape, x.dtype) for x in self.states]

    def widened(self, dim: mtf.Dimension) -> list[mtf.Tensor]:
        """Returns the states for steps whose rows have one more dimension, such as beams.

        Args:
          dim: the Dimension, which follows those of the batch.
        """
        rows = self._arguments["batch_dims"]
        self._arguments["batch_dims"] = [*rows, dim]
        shapes = [
            [y for d in x.shape for y in ([d, dim] if d == rows[-1] else [d])] for x in self.states
        ]
        self.states = [mtf.broadcast(x, shape) for x, shape in zip(self.states, shapes)]
        return self.states

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


Number = Union[float, mtf.Tensor]
# What the numbers of sampling may be, and how that is said.
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (
        lambda x: 0 <= x < math.inf,
        "0 or more; 0.0 takes the best id, 1.0 draws from the model's own distribution",
    ),
    "top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1; 1.0 draws from all ids"),
    "min_p": (lambda x: 0 <= x <= 1, "between 0 and 1; 0.0 draws from all ids"),
    "repetition_penalty": (
        lambda x: 0 < x < math.inf,
        "above 0; 1.0 changes nothing, and larger numbers make repetitions rarer",
    ),
}


def check_numbers(what: str, values: Mapping[str, Number]) -> None:
    """Raises a ValueError if a number of sampling is out of its range.

    Args:
      what: the name of the function that it is given to.
      values: the numbers by name; those that are Tensors are not known yet.
    """
    for name, value in values.items():
        test, text = _RANGES[name]
        if isinstance(value, mtf.Tensor):
            continue
        if not (is_real(value) and test(value)):
            raise ValueError(f"{what}: {name}={value!r} must be a number {text}")


@dataclasses.dataclass(frozen=True)
class Choice:
    """How an id is chosen from logits; see `Unitransformer.sample_autoregressive`.

    Attributes:
      temperature: a number; 0.0 takes the id with the largest logit.
      keep_top_k: an int, the number of ids with the largest logits to draw from; -1 for all.
      stop_at_token: an int, the id that ends a sequence; or a Tensor of one dimension, of several.
      never_end: whether `stop_at_token` is never chosen.
      top_p: a number; the fewest ids with this probability together are drawn from; 1.0 for all.
      min_p: a number; ids with this share of the largest probability are drawn from.
      repetition_penalty: a number, by which the logits of ids that a row has are made smaller.
      seed: a seed of the draws, or None.
    """

    temperature: Number
    keep_top_k: int
    stop_at_token: Union[int, mtf.Tensor]
    never_end: bool
    top_p: Number = 1.0
    min_p: Number = 0.0
    repetition_penalty: Number = 1.0
    seed: Union[int, tf.Tensor, None] = None

    def __post_init__(self) -> None:
        check_numbers("sample_autoregressive", {name: getattr(self, name) for name in _RANGES})
        if self.keep_top_k != -1 and self.keep_top_k < 1:
            raise ValueError(
                "sampling_keep_top_k must either be -1, for all ids, or positive, not "
                f"{self.keep_top_k}"
            )

    def _allowed(self, logits: mtf.Tensor, vocab_dim: mtf.Dimension) -> mtf.Tensor:
        if not self.never_end:
            return logits
        end = self.stop_at_token
        if isinstance(end, mtf.Tensor):
            ends = mtf.one_hot(end, vocab_dim, MASKED_LOGIT, 0.0, logits.dtype)
            return logits + mtf.reduce_sum(ends, reduced_dim=end.shape.dims[0])
        end = mtf.constant(logits.mesh, end, dtype=tf.int32)
        return logits + mtf.one_hot(end, vocab_dim, MASKED_LOGIT, 0.0, logits.dtype)

    def is_end(self, ids: mtf.Tensor) -> mtf.Tensor:
        """Returns whether ids end their rows."""
        if not isinstance(self.stop_at_token, mtf.Tensor):
            return mtf.equal(ids, self.stop_at_token)
        every = ids.shape + self.stop_at_token.shape
        equal = mtf.equal(ids, self.stop_at_token, output_shape=every)
        return mtf.reduce_any(equal, output_shape=ids.shape)

    def _top_dim(self, vocab_dim: mtf.Dimension) -> Optional[mtf.Dimension]:
        """Returns the Dimension of the ids to draw from, best first; None for all, in any order."""
        # At temperature 0 the best id is chosen, which is among any number of best ones.
        if self.temperature == 0.0:
            return None
        if 0 < self.keep_top_k < vocab_dim.size:
            return mtf.Dimension("_top_k_", self.keep_top_k)
        # What comes before an id counts, so all of them are put in order.
        return None if self.top_p == 1.0 else mtf.Dimension("_top_k_", vocab_dim.size)

    def _left_out(self, logits: mtf.Tensor, dim: mtf.Dimension) -> Optional[mtf.Tensor]:
        """Returns which of the logits are not drawn from because of top_p and min_p, or None.

        Args:
          logits: a Tensor; in falling order along `dim`, its last one, if there is a top_p.
          dim: the Dimension of the ids.
        """
        if self.temperature == 0.0 or (self.top_p == 1.0 and self.min_p == 0.0):
            return None
        scaled, left_out = self._divided(logits), []
        if self.top_p != 1.0:
            # Whatever is before the first is nothing, so that there always is one.
            before = mtf.slicewise(
                lambda p: tf.cumsum(p, p.shape.ndims - 1, exclusive=True),
                [mtf.softmax(scaled, dim)],
                splittable_dims=(logits.shape - dim).dims,
                name="probability_before",
            )
            left_out.append(mtf.greater_equal(before, self.top_p))
        if self.min_p != 0.0:
            # p < min_p * max(p), by logarithms.
            best, share = mtf.reduce_max(scaled, reduced_dim=dim), self.min_p
            log = mtf.log(share) if isinstance(share, mtf.Tensor) else math.log(share)
            left_out.append(mtf.less(scaled, best + log))
        return functools.reduce(mtf.logical_or, left_out)

    def choose(self, logits: mtf.Tensor, vocab_dim: mtf.Dimension) -> mtf.Tensor:
        """Returns the int32 id chosen in each row of logits."""
        logits, top_dim = self._allowed(logits, vocab_dim), self._top_dim(vocab_dim)
        ids, dim = None, top_dim or vocab_dim
        if top_dim is not None:
            # Random numbers are needed for the top ids only.
            logits, ids = mtf.top_k(logits, vocab_dim, top_dim)
        left_out = self._left_out(logits, dim)
        if left_out is not None:
            logits = mtf.to_float(logits) + hidden_where(left_out, tf.float32)
        drawn = mtf.sample_with_temperature(logits, dim, self.temperature, seed=self.seed)
        return drawn if ids is None else mtf.gather(ids, drawn, dim)

    def _divided(self, logits: mtf.Tensor) -> mtf.Tensor:
        return mtf.to_float(logits) * (1.0 / self.temperature)

    def scaled(self, logits: mtf.Tensor, vocab_dim: mtf.Dimension) -> mtf.Tensor:
        """Returns the logits of the distribution that is drawn from."""
        logits, top_dim = self._allowed(logits, vocab_dim), self._top_dim(vocab_dim)
        if self.temperature == 0.0:
            return logits
        if top_dim is not None:
            top, ids = mtf.top_k(logits, vocab_dim, top_dim)
            # A threshold keeps all ids of the vocabulary, so that two models can be compared. Of
            # those that are equal to it, which bfloat16 has often, only the first are kept: the
            # last id of `top_k`, and what is before it.
            left_out = self._left_out(top, top_dim)
            count: Union[int, mtf.Tensor] = top_dim.size
            if left_out is not None:
                is_left = mtf.to_int32(mtf.logical_not(left_out))
                count = mtf.reduce_sum(is_left, reduced_dim=top_dim)
                # In the place of what is left out, one that is no lowest.
                best = mtf.reduce_max(top, reduced_dim=top_dim)
                top = mtf.where(left_out, mtf.broadcast(best, top.shape), top)
            lowest = mtf.reduce_min(top, reduced_dim=top_dim)
            last = mtf.gather(ids, count - 1, top_dim)
            every = mtf.range(logits.mesh, vocab_dim, tf.int32)
            after = mtf.greater(every, last, output_shape=logits.shape)
            ties = mtf.logical_and(mtf.equal(logits, lowest), after)
            left_out = mtf.logical_or(mtf.less(logits, lowest), ties)
        else:
            left_out = self._left_out(logits, vocab_dim)
        if left_out is not None:
            logits += hidden_where(left_out, logits.dtype)
        return self._divided(logits)

    def draw(self, scaled: mtf.Tensor, vocab_dim: mtf.Dimension) -> mtf.Tensor:
        """Returns the int32 ids drawn from scaled logits."""
        # Logits are divided already, but 0 still stands for the largest one.
        temperature = 0.0 if self.temperature == 0.0 else 1.0
        return mtf.sample_with_temperature(scaled, vocab_dim, temperature, seed=self.seed)


@dataclasses.dataclass(frozen=True)
class Sampler:
    """The body and the condition of the sampling loop.

    The loop variables are the number of steps, which rows are done, the last ids, all ids, which
    ids of the vocabulary each row has if there is a penalty on them, and the states of the model.
    """

    model: IncrementalModel
    choice: Choice
    given: Optional[mtf.Tensor]  # the number of given ids in each row; None if there are none
    limit: Union[int, mtf.Tensor]
    each_step: Optional[Callable[..., tf.Tensor]] = None

    def start(self, ids: mtf.Tensor, bos_id: Union[int, mtf.Tensor]) -> list[mtf.Tensor]:
        """Returns the initial values of the loop variables."""
        step = mtf.constant(ids.mesh, 0, dtype=tf.int32)
        states = self.model.first_states(self.given is not None)
        done, last = first_last(ids, self.given, bos_id)
        seen = []
        if self._penalizes:
            seen.append(seen_ids(ids, self.given, bos_id, self.model.vocab_dim))
        return [step, done, last, ids, *seen, *states]

    @property
    def _penalizes(self) -> bool:
        return self.choice.repetition_penalty != 1.0

    def goes_on(self, step: mtf.Tensor, done: mtf.Tensor, *_: mtf.Tensor) -> mtf.Tensor:
        """Returns whether to take another step, a boolean scalar."""
        more = mtf.less(step, self.limit)
        # Then no row is ever done, and no processor has to be asked.
        if self.choice.never_end and self.given is None and self.each_step is None:
            return more
        return mtf.logical_and(more, mtf.reduce_any(mtf.logical_not(done), output_shape=[]))

    def step(
        self,
        step: mtf.Tensor,
        done: mtf.Tensor,
        last: mtf.Tensor,
        ids: mtf.Tensor,
        *rest: mtf.Tensor,
    ) -> list[mtf.Tensor]:
        """Returns the loop variables after a step."""
        seen, states = rest[: self._penalizes], rest[self._penalizes :]
        # Without given ids all rows are at the same position, and masks need no batch dimension.
        position = step if self.given is None else step + self.given
        logits, new_states = self.model.step(position, last, states)
        if seen:
            logits = penalized(logits, seen[0], self.choice.repetition_penalty)
        last = self.choice.choose(logits, self.model.vocab_dim)
        if last.shape != done.shape:
            last = mtf.broadcast(last, done.shape)
        # Rows are 0 there so far; after their end the one-hot is 0, and changes nothing.
        ids += last * mtf.one_hot(position, self.model.length_dim, dtype=tf.int32)
        if seen:
            seen = (with_ids(seen[0], last),)
        if not self.choice.never_end:
            done = mtf.logical_or(done, self.choice.is_end(last))
        if self.each_step is not None:
            rows = mtf.range(ids.mesh, done.shape.dims[0], tf.int32)
            ended = mtf.slicewise(
                self.each_step,
                [rows, last, step],
                output_dtype=tf.bool,
                splittable_dims=done.shape.dims,
                name="each_step",
            )
            done = mtf.logical_or(done, ended)
        if self.given is not None:
            # Without given ids rows are full at once, and the limit of steps tells it.
            full = mtf.greater_equal(position + 1, self.model.length_dim.size)
            done = mtf.logical_or(done, full)
        return [step + 1, done, last, ids, *seen, *new_states]


def penalized(logits: mtf.Tensor, seen: mtf.Tensor, penalty: Number) -> mtf.Tensor:
    """Returns logits with those of ids that a row has made smaller.

    Keskar et al., "CTRL: a conditional transformer language model" (2019), section 4.1; a
    negative logit is multiplied instead of divided, as it would grow.

    Args:
      logits: a Tensor with dimensions [batch..., vocab].
      seen: a boolean Tensor of the same shape.
      penalty: a number.
    """
    logits = mtf.to_float(logits)
    smaller = mtf.where(mtf.less(logits, 0.0), logits * penalty, logits / penalty)
    return mtf.where(seen, smaller, logits)


def with_ids(seen: mtf.Tensor, ids: mtf.Tensor) -> mtf.Tensor:
    """Returns which ids rows have once they get further ones.

    Args:
      seen: a boolean Tensor with dimensions [batch..., vocab].
      ids: an int32 Tensor with dimensions [batch...].
    """
    every = mtf.range(ids.mesh, seen.shape.dims[-1], tf.int32)
    return mtf.logical_or(seen, mtf.equal(ids, every, output_shape=seen.shape))


def with_penalty(
    logits_fn: Callable[..., Any],
    last_of: Callable[[mtf.Tensor, mtf.Tensor], mtf.Tensor],
    penalty: Number,
) -> Callable[..., Any]:
    """Returns such a function for a beam search that returns penalized log probabilities.

    Its first state is what `seen_ids` returns, for each beam: it goes with the beam, as the states
    of the model do.

    Args:
      logits_fn: a function of the step, ids and states; see `mtf.beam_search.beam_search`.
      last_of: a function of the step and ids that returns the id that the step is fed.
      penalty: a number.
    """

    def log_probs_fn(
        step: mtf.Tensor, ids: mtf.Tensor, states: Sequence[mtf.Tensor]
    ) -> tuple[mtf.Tensor, list[mtf.Tensor]]:
        seen = with_ids(states[0], last_of(step, ids))
        logits, new_states = logits_fn(step, ids, states[1:])
        log_probs = mtf.log_softmax(mtf.to_float(logits), seen.shape.dims[-1])
        return penalized(log_probs, seen, penalty), [seen, *new_states]

    return log_probs_fn


def seen_ids(
    ids: mtf.Tensor,
    given: Optional[mtf.Tensor],
    bos_id: Union[int, mtf.Tensor],
    vocab_dim: mtf.Dimension,
) -> mtf.Tensor:
    """Returns which ids of the vocabulary each row has before the first step.

    Args:
      ids: an int32 Tensor with dimensions [batch..., length].
      given: the number of given ids of each row, or None; see `first_last`.
      bos_id: the id that is fed before the first one; see `first_last`.
      vocab_dim: a Dimension.

    Returns:
      A boolean Tensor with dimensions [batch..., vocab].
    """
    rows = ids.shape.dims[:-1]
    every = mtf.range(ids.mesh, vocab_dim, tf.int32)
    shape = mtf.Shape([*rows, vocab_dim])
    if isinstance(bos_id, int):
        bos_id = mtf.constant(ids.mesh, bos_id, dtype=tf.int32)
    seen = mtf.equal(mtf.broadcast(bos_id, rows), every, output_shape=shape)
    if given is None:
        return seen

    def marked(ids: tf.Tensor, given: tf.Tensor) -> tf.Tensor:
        # By sums of segments, as a one-hot of all positions would be as large as all logits.
        sizes, length = ids.shape.as_list()[:-1], ids.shape.as_list()[-1]
        count, vocab = math.prod(sizes), vocab_dim.size
        flat = tf.reshape(ids, [count, length]) + tf.range(count)[:, None] * vocab
        inside = tf.range(length) < tf.reshape(given, [count, 1])
        places = tf.where_v2(inside, flat, -1)  # which the sums leave out
        sums = tf.math.unsorted_segment_sum(tf.ones_like(places), places, count * vocab)
        return tf.reshape(sums > 0, [*sizes, vocab])

    among_given = mtf.slicewise(
        marked, [ids, given], shape, tf.bool, splittable_dims=rows, name="seen_ids"
    )
    return mtf.logical_or(seen, among_given)


def first_last(
    ids: mtf.Tensor, given: Optional[mtf.Tensor], bos_id: Union[int, mtf.Tensor]
) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Returns which rows are full, and the last id of each row, before the first step.

    Args:
      ids: an int32 Tensor with dimensions [batch..., length].
      given: an int32 Tensor with dimensions [batch...], the number of given ids; None if there
        are none.
      bos_id: the id that is fed before the first one: an int, or an int32 Tensor with dimensions
        [batch...].
    """
    *rows, length_dim = ids.shape.dims
    if given is None:
        done = mtf.constant(ids.mesh, False, mtf.Shape(rows), tf.bool)
        if isinstance(bos_id, mtf.Tensor):
            return done, mtf.broadcast(bos_id, mtf.Shape(rows))
        return done, mtf.constant(ids.mesh, bos_id, mtf.Shape(rows), tf.int32)
    # Without given ids the index is -1, which gives 0, the id of padding and the usual beginning.
    last = mtf.gather(ids, given - 1, length_dim)
    if isinstance(bos_id, mtf.Tensor) or bos_id:
        last += mtf.to_int32(mtf.equal(given, 0)) * bos_id
    return mtf.greater_equal(given, length_dim.size), last


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


def check_draft(model: Unitransformer, draft: Draft) -> None:
    """Raises a ValueError if a draft cannot propose ids for a model."""
    if draft.num_ids < 1:
        raise ValueError(f"num_draft_ids must be 1 or more, not {draft.num_ids}")
    if model.output_vocab_dim != draft.model.output_vocab_dim:
        sizes = [
            dims_text([m.output_vocab_dim]) if m.output_vocab_dim else "none"
            for m in (model, draft.model)
        ]
        raise ValueError(
            f"draft_model: {draft.model.name} has the output vocabulary {sizes[1]}, but "
            f"{model.name} has {sizes[0]}; make both with the same output_vocab_size"
        )


@dataclasses.dataclass(frozen=True)
class Speculation:
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
    choice: Choice
    several: mtf.Dimension  # the positions of a step, one more than the draft proposes
    given: Optional[mtf.Tensor]
    limit: Union[int, mtf.Tensor]

    def start(self, ids: mtf.Tensor, bos_id: Union[int, mtf.Tensor]) -> list[mtf.Tensor]:
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
        new, accepted = self._accept(
            self.choice.scaled(logits, self.model.vocab_dim), proposed, odds
        )
        valid = mtf.logical_and(
            mtf.less_equal(offsets, accepted, output_shape=fed.shape), mtf.logical_not(done)
        )
        ends = None
        if not self.choice.never_end:
            stops = self.choice.is_end(new)
            # An end stays, and what was accepted after it does not.
            before = mtf.cumsum(mtf.to_int32(stops), self.several, exclusive=True)
            valid = mtf.logical_and(valid, mtf.equal(before, 0))
            ends = mtf.logical_and(valid, stops)
        # Several ids at once may go beyond the limit or the end of a row: what is beyond is not
        # taken.
        for reached, most in ((added, self.limit), (position, self.model.length_dim.size)):
            inside = mtf.less(mtf.add(reached, offsets, output_shape=fed.shape), most)
            valid = mtf.logical_and(valid, inside)
        is_valid = mtf.to_int32(valid)
        number = mtf.reduce_sum(is_valid, reduced_dim=self.several)
        # Rows are at different positions, so ids are added at places, where there are zeros so far.
        places = mtf.one_hot(positions, self.model.length_dim, dtype=tf.int32)
        ids += mtf.einsum([new * is_valid, places], output_shape=ids.shape)
        latest = mtf.gather(new, mtf.maximum(number - 1, 0), self.several)
        # A row that is done adds nothing, and keeps its last id.
        last = mtf.where(mtf.greater(number, 0), latest, last)
        added += number
        done = mtf.logical_or(done, mtf.greater_equal(added, self.limit))
        done = mtf.logical_or(
            done, mtf.greater_equal(position + number, self.model.length_dim.size)
        )
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
            odds.append(self.choice.scaled(logits, self.model.vocab_dim))
            last = self.choice.draw(odds[-1], self.model.vocab_dim)
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
        axis, vocab_dim = len(proposed[0].shape), self.model.vocab_dim
        # An id that no one proposed stands at the last position, which is never accepted.
        ids = mtf.stack([*proposed, mtf.zeros_like(proposed[0]) - 1], SPECULATED, axis)
        if self.choice.temperature == 0.0:
            new = self.choice.draw(scaled, vocab_dim)
            return new, self._leading(mtf.equal(new, ids))
        p = mtf.softmax(scaled, vocab_dim)
        qs = [mtf.softmax(x, vocab_dim) for x in odds]
        q = mtf.stack([*qs, mtf.zeros_like(qs[0])], SPECULATED, axis)
        at_id = mtf.one_hot(ids, vocab_dim, dtype=p.dtype)
        p_id, q_id = (mtf.einsum([x, at_id], output_shape=ids.shape) for x in (p, q))
        # With the probability min(1, p / q) (Leviathan et al., 2023, algorithm 1), without a
        # division by a q that may be 0.
        accepts = mtf.less(mtf.random_uniform(ids.mesh, ids.shape, dtype=p.dtype) * q_id, p_id)
        accepted = self._leading(accepts)
        # The distribution max(p - q, 0), up to its sum: so that accepted and drawn ids together
        # have the distribution p (Leviathan et al., 2023, algorithm 1).
        rest = mtf.relu(mtf.gather(p - q, accepted, self.several))
        # The logarithm of 0 is -inf, which is never drawn; samples need no normalized distribution.
        own = mtf.sample_with_temperature(mtf.log(rest), vocab_dim, 1.0)
        offsets = mtf.range(ids.mesh, self.several, tf.int32)
        earlier = mtf.less(offsets, accepted, output_shape=ids.shape)
        return mtf.where(earlier, ids, mtf.broadcast(own, ids.shape)), accepted

    def _leading(self, accepts: mtf.Tensor) -> mtf.Tensor:
        """Returns how many positions are accepted before the first that is not."""
        refused = mtf.cumsum(mtf.to_int32(mtf.logical_not(accepts)), self.several)
        leading = mtf.to_int32(mtf.equal(refused, 0))
        return mtf.reduce_sum(leading, reduced_dim=self.several)
