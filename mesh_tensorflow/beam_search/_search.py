"""Beam search for the most probable sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional, Union

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import tensors_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow.beam_search._select import EOS_ID, INF, best, select

__all__ = ["beam_search"]


class _State(NamedTuple):
    """The state of the search loop, besides the states of the model."""

    step: mtf.Tensor  # the number of decoded positions
    alive_seq: mtf.Tensor  # [batch..., beam, length]
    alive_log_probs: mtf.Tensor  # [batch..., beam], best first
    finished_seq: mtf.Tensor
    finished_scores: mtf.Tensor  # best first
    finished_flags: mtf.Tensor  # whether the entry holds a sequence


class _Candidates(NamedTuple):
    """The best continuations of the alive beams, twice the number of beams."""

    log_probs: mtf.Tensor  # [batch..., double_beam], best first
    origin: mtf.Tensor  # the index of the continued beam
    ids: mtf.Tensor  # the next id
    finished: mtf.Tensor  # whether the id ends the sequence


class _Search:
    """The steps of one search."""

    def __init__(
        self,
        logits_fn: Callable,
        initial_ids: mtf.Tensor,
        alpha: float,
        eos_id: int,
        decode_length: Optional[Union[int, mtf.Tensor]],
        dtype: tf.DType,
    ):
        self._logits_fn = logits_fn
        self._mesh = initial_ids.mesh
        self._batch = initial_ids.shape.dims[:-2]
        self._beam, self._length = initial_ids.shape.dims[-2:]
        # Of each beam at most one continuation ends the sequence, so at least half of these do not.
        self._double = mtf.Dimension("double_beam", 2 * self._beam.size)
        self._triple = mtf.Dimension("triple_beam", 3 * self._beam.size)
        self._alpha = alpha
        self._eos_id = eos_id
        self._dtype = dtype
        self._decode_length = self._limit(decode_length)

    def _limit(self, decode_length: Optional[Union[int, mtf.Tensor]]) -> mtf.Tensor:
        size = mtf.constant(self._mesh, self._length.size, dtype=tf.int32)
        if decode_length is None:
            return size
        if not isinstance(decode_length, mtf.Tensor):
            decode_length = mtf.constant(self._mesh, decode_length, dtype=tf.int32)
        return mtf.minimum(decode_length, size)

    def _divided(self, log_probs: mtf.Tensor, length: mtf.Tensor) -> mtf.Tensor:
        """Returns scores: log probabilities divided by the length penalty of Wu et al."""
        if self._alpha == 0:
            return log_probs
        penalty = mtf.pow((mtf.to_float(length) + 5.0) * (1.0 / 6.0), self._alpha)
        return log_probs * mtf.cast(mtf.reciprocal(penalty), self._dtype)

    def start(self, initial_ids: mtf.Tensor) -> _State:
        rows = mtf.Shape(self._batch + [self._beam])
        # All beams start out equal, so only the first one counts.
        first = mtf.one_hot(
            mtf.constant(self._mesh, 0, dtype=tf.int32), self._beam, 0.0, -INF, self._dtype
        )
        return _State(
            step=mtf.constant(self._mesh, 0, dtype=tf.int32),
            alive_seq=initial_ids,
            alive_log_probs=mtf.broadcast(first, rows),
            finished_seq=initial_ids,
            finished_scores=mtf.constant(self._mesh, -INF, rows, self._dtype),
            finished_flags=mtf.constant(self._mesh, False, rows, tf.bool),
        )

    def goes_on(self, state: _State, stop_early: bool) -> mtf.Tensor:
        """Returns whether to take another step, a boolean scalar."""
        room = mtf.less(state.step, self._decode_length)
        if not stop_early:
            return room
        best_alive = mtf.reduce_max(state.alive_log_probs, reduced_dim=self._beam)
        # Log probabilities only decrease, so the penalty of the maximum length gives a bound.
        bound = self._divided(best_alive, self._decode_length)
        flags = mtf.cast(state.finished_flags, self._dtype)
        worst = mtf.reduce_min(state.finished_scores * flags, reduced_dim=self._beam)
        none = 1.0 - mtf.reduce_max(flags, reduced_dim=self._beam)
        may_improve = mtf.greater_equal(bound, worst + none * -INF)
        return mtf.logical_and(room, mtf.reduce_any(may_improve, output_shape=[]))

    def _grow(
        self, state: _State, states: Sequence[mtf.Tensor]
    ) -> tuple[_Candidates, list[mtf.Tensor]]:
        """Returns the best continuations, and the states of the model after this position."""
        logits, new_states = self._logits_fn(state.step, state.alive_seq, list(states))
        vocab = self._vocab_dim(logits)
        rows = self._batch + [self._beam]
        if logits.shape.dims != rows + [vocab]:
            logits = mtf.transpose(logits, rows + [vocab])
        # At most this many continuations of one beam can be among the best. If the vocabulary is
        # split, processors exchange only these.
        some = mtf.Dimension("minor_vocab", min(vocab.size, self._double.size))
        found, ids = mtf.top_k(mtf.log_softmax(mtf.cast(logits, self._dtype), vocab), vocab, some)
        flat = mtf.Dimension("beam_and_vocab", self._beam.size * some.size)
        # The probability of a sequence is the product of those of its ids: logarithms are added.
        log_probs = mtf.reshape(found + state.alive_log_probs, self._batch + [flat])
        ids = mtf.reshape(ids, self._batch + [flat])
        log_probs, place, ids = best(log_probs, flat, self._double, ids)
        finished = mtf.equal(ids, self._eos_id)
        return _Candidates(log_probs, mtf.floordiv(place, some.size), ids, finished), new_states

    def _vocab_dim(self, logits: mtf.Tensor) -> mtf.Dimension:
        rest = [d for d in logits.shape if d not in self._batch + [self._beam]]
        if len(rest) != 1 or len(logits.shape) != len(self._batch) + 2 or rest[0].size < 2:
            rows = ", ".join(f"{d.name}={d.size}" for d in [*self._batch, self._beam])
            raise ValueError(
                f"beam_search: logits must have the dimensions {rows} and a vocabulary of 2 or "
                f"more, not {tensors_text([logits])}"
            )
        return rest[0]

    def step(self, state: _State, states: Sequence[mtf.Tensor]) -> tuple[_State, list[mtf.Tensor]]:
        """Decodes one more position; returns the new states of the search and of the model."""
        candidates, new_states = self._grow(state, states)
        _check_states(states, new_states)
        here = mtf.one_hot(state.step, self._length, 1, 0, tf.int32)
        ends = mtf.cast(candidates.finished, self._dtype)
        # At least as many candidates are unfinished as there are beams.
        log_probs, _, origin, ids = best(
            # Lower than any score, also that of a beam which does not count, so that finished ones
            # are never continued.
            candidates.log_probs - ends * (3.0 * INF),
            self._double, self._beam, candidates.origin, candidates.ids,
        )  # fmt: skip
        alive_seq = select(state.alive_seq, origin, self._beam) + ids * here
        finished = self._finished(state, candidates, ends, here)
        new_states = [
            select(x, origin, self._beam) if self._beam in x.shape else x for x in new_states
        ]
        return _State(state.step + 1, alive_seq, log_probs, *finished), new_states

    def _finished(
        self, state: _State, candidates: _Candidates, ends: mtf.Tensor, here: mtf.Tensor
    ) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
        """Returns the best finished sequences, their scores and flags."""
        scores = self._divided(candidates.log_probs, state.step + 1) + (ends - 1.0) * INF
        scores = mtf.concat(
            [_renamed(state.finished_scores, self._beam, self._triple),
             _renamed(scores, self._double, self._triple)],
            self._triple.name,
        )  # fmt: skip
        scores, place = mtf.top_k(scores, self._triple, self._beam)
        # Each sequence is either one that had finished before, or a continued beam.
        earlier = mtf.range(self._mesh, self._beam, tf.int32)
        none = mtf.zeros(self._mesh, self._batch + [self._beam], tf.int32)
        origin, ids, flags = (
            select(
                mtf.concat([_renamed(x, self._beam, self._triple),
                            _renamed(y, self._double, self._triple)], self._triple.name),
                place, self._triple,
            )
            for x, y in [
                (none + earlier, candidates.origin + self._beam.size),
                (none, candidates.ids),
                (state.finished_flags, candidates.finished),
            ]
        )  # fmt: skip
        both = mtf.concat(
            [_renamed(x, self._beam, self._double) for x in (state.finished_seq, state.alive_seq)],
            self._double.name,
        )
        return select(both, origin, self._double) + ids * here, scores, flags

    def results(self, state: _State) -> tuple[mtf.Tensor, mtf.Tensor]:
        """Returns finished sequences and scores, or the alive ones if none has finished."""
        any_finished = mtf.reduce_any(state.finished_flags, reduced_dim=self._beam)
        return (
            mtf.where(any_finished, state.finished_seq, state.alive_seq),
            mtf.where(any_finished, state.finished_scores, state.alive_log_probs),
        )


def _renamed(x: mtf.Tensor, old: mtf.Dimension, new: mtf.Dimension) -> mtf.Tensor:
    return mtf.rename_dimension(x, old.name, new.name)


def _check_states(states: Sequence[mtf.Tensor], new_states: Sequence[mtf.Tensor]) -> None:
    if [x.shape for x in states] != [x.shape for x in new_states]:
        raise ValueError(
            f"beam_search: logits_fn must return states of the shapes it was given, "
            f"{tensors_text(states)}, not {tensors_text(new_states)}"
        )


def _check_ids(initial_ids: mtf.Tensor) -> None:
    if len(initial_ids.shape) < 3 or not initial_ids.dtype.is_integer:
        raise ValueError(
            "beam_search: initial_ids must be an integer Tensor of shape [batch, beam, length], "
            f"not {tensors_text([initial_ids])}"
        )


@gin.configurable(module="mesh_tensorflow.beam_search")
@leaves_no_node
def beam_search(
    logits_fn: Callable,
    initial_ids: mtf.Tensor,
    alpha: float,
    states: Optional[Sequence[mtf.Tensor]] = None,
    eos_id: int = EOS_ID,
    stop_early: bool = True,
    decode_length: Optional[Union[int, mtf.Tensor]] = None,
    use_tpu: bool = True,
    dtype: tf.DType = tf.float32,
    layout: object = None,
    mesh_shape: object = None,
    num_prefilter: int = 2,
) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Searches for the most probable sequences; returns them and their scores.

    A finished sequence ends with `eos_id` and has the score
    log(probability) / ((5 + length) / 6)^alpha, where the length includes `eos_id`; see Wu et al.,
    "Google's Neural Machine Translation System", arXiv:1609.08144, for this length penalty. If no
    sequence of a batch entry has finished, its alive sequences are returned, with their log
    probabilities.

    The result does not depend on the mesh or the layout: if the vocabulary is split, each
    processor searches its own slice, and only the best entries of each slice are communicated. So
    `layout`, `mesh_shape`, `num_prefilter` and `use_tpu`, which in the classic release trade
    exactness for speed, have no effect.

    Args:
      logits_fn: a function of (step, ids, states): an int32 scalar, the position to decode; an
        int32 Tensor [batch..., beam, length], the ids decoded so far; a list of Tensors. Returns
        logits [batch..., beam, vocab] and a list of the next states.
      initial_ids: an int32 Tensor of shape [batch..., beam, length], zeros.
      alpha: a number, the exponent of the length penalty; larger values prefer longer sequences.
      states: a list of Tensors, the first states for `logits_fn`; those with the dimension beam
        are reordered along with the beams.
      eos_id: an int, the id that ends a sequence.
      stop_early: whether to stop as soon as no alive sequence can become better than the finished
        ones.
      decode_length: the maximum length, an int or an int32 scalar Tensor; the full length if None.
      use_tpu: unused.
      dtype: the dtype of scores.
      layout: unused.
      mesh_shape: unused.
      num_prefilter: unused.

    Returns:
      A tuple (ids [batch..., beam, length], scores [batch..., beam]), best first.

    Raises:
      ValueError: the ids, the logits or the new states have invalid shapes.
    """
    _check_ids(initial_ids)
    states = list(states or [])
    search = _Search(logits_fn, initial_ids, alpha, eos_id, decode_length, dtype)
    first = search.start(initial_ids)
    n = len(first)

    def cond_fn(*values: mtf.Tensor) -> mtf.Tensor:
        return search.goes_on(_State(*values[:n]), stop_early)

    def body_fn(*values: mtf.Tensor) -> list[mtf.Tensor]:
        state, new_states = search.step(_State(*values[:n]), values[n:])
        return [*state, *new_states]

    last = mtf.while_loop(cond_fn, body_fn, [*first, *states])
    return search.results(_State(*last[:n]))
