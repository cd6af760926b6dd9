"""Decoding: beam search, and greedy or sampled decoding one position at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional, Union

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import tensors_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow._core.operation import Cost
from mesh_tensorflow._mesh.mesh_impl import MeshImpl

__all__ = ["EOS_ID", "INF", "beam_search", "compute_topk_scores_and_seq", "greedy_decode"]

EOS_ID = 1
# Effectively infinite for scores, but its product with 0 is 0.
INF = 1.0 * 1e7


class SelectOperation(mtf.Operation):
    """A batched gather: entries along one dimension by index, with indices per batch entry."""

    costs_by = ()

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
        # An index may be of any entry, so each processor needs them all.
        return [self._old_dim.name, self._new_dim.name]

    def gradient(self, grad_ys: Sequence[Optional[mtf.Tensor]]) -> Sequence[Optional[mtf.Tensor]]:
        """Adds up the gradients of equal indices by an einsum with a one-hot."""
        dy = grad_ys[0]
        if dy is None:
            return [None, None]
        x, indices = self.inputs
        # The two dimensions may be one, which the one-hot cannot have twice.
        chosen = mtf.Dimension("_chosen", self._new_dim.size)
        dy = mtf.reshape(dy, self._batch + [chosen] + dy.shape.dims[len(indices.shape) :])
        indices = mtf.reshape(indices, self._batch + [chosen])
        selector = mtf.one_hot(indices, self._old_dim, dtype=dy.dtype)
        return [mtf.einsum([dy, selector], output_shape=x.shape), None]

    def lower(self, lowering: mtf.Lowering) -> None:
        """Gathers along the first dimension after the batch dimensions."""
        axis = len(self._batch)
        self._lower_slices(lowering, lambda t, i: tf.gather(t, i, axis=axis, batch_dims=axis))

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
        # TensorFlow's batched gather wants all batch dimensions in both of its operands.
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
    tensors = [sequences, scores, scores_to_gather, flags]
    rows = sequences.shape.dims[:-1]
    if len(rows) < 1 or any(x.shape.dims != rows for x in tensors[1:]):
        raise ValueError(
            "compute_topk_scores_and_seq: sequences must be [batch..., candidates, length], and "
            "scores, scores_to_gather and flags [batch..., candidates], but got "
            f"{tensors_text(tensors)}"
        )
    with tf.variable_scope(f"{prefix}_topk"):
        _, indices, seq, gathered, chosen = best(
            scores, rows[-1], beam_dim, sequences, scores_to_gather, flags
        )
        return seq, gathered, chosen, mtf.one_hot(indices, rows[-1], dtype=tf.float32)


class _State(NamedTuple):
    """The state of the search loop, besides the states of the model."""

    step: mtf.Tensor  # the number of decoded positions
    alive_seq: mtf.Tensor  # [batch..., beam, length]
    alive_log_probs: mtf.Tensor  # [batch..., beam], best first
    finished_seq: mtf.Tensor
    finished_scores: mtf.Tensor  # best first
    finished_flags: mtf.Tensor  # whether the entry holds a sequence


class _Candidates(NamedTuple):
    """The best continuations of the alive beams, twice as many or, with several ends, more."""

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
        eos_id: Union[int, mtf.Tensor],
        decode_length: Optional[Union[int, mtf.Tensor]],
        dtype: tf.DType,
        stop_early: bool,
        normalized: bool,
        ends_fn: Optional[Callable],
    ):
        self._logits_fn = logits_fn
        self._normalized = normalized
        self._ends_fn = ends_fn
        self._mesh = initial_ids.mesh
        self._batch = initial_ids.shape.dims[:-2]
        self._beam, self._length = initial_ids.shape.dims[-2:]
        # Of each beam at most one continuation ends the sequence by each end, so of these at least
        # as many do not as there are beams.
        ends = eos_id.shape.size if isinstance(eos_id, mtf.Tensor) else 1
        self._double = mtf.Dimension("double_beam", (1 + ends) * self._beam.size)
        # The sequences that had finished before a step, and the candidates of the step.
        self._triple = mtf.Dimension("triple_beam", (2 + ends) * self._beam.size)
        self._alpha = alpha
        self._eos_id = eos_id
        self._dtype = dtype
        self._stop_early = stop_early
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
        # ((5 + length) / 6) ** alpha: Wu et al. (2016), equation 14.
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

    def goes_on(self, state: _State) -> mtf.Tensor:
        """Returns whether to take another step, a boolean scalar."""
        room = mtf.less(state.step, self._decode_length)
        if not self._stop_early:
            return room
        best_alive = mtf.reduce_max(state.alive_log_probs, reduced_dim=self._beam)
        # Log probabilities only decrease, so the penalty of the maximum length gives a bound; if
        # alpha is negative, it grows worse with the length, and that of the next one does.
        best_length = self._decode_length if self._alpha >= 0 else state.step + 1
        bound = self._divided(best_alive, best_length)
        # Scores are below 0, so entries that hold no sequence, which become 0, are not the worst.
        flags = mtf.cast(state.finished_flags, self._dtype)
        worst = mtf.reduce_min(state.finished_scores * flags, reduced_dim=self._beam)
        # Where none has finished, the worst is 0 less INF, so that any alive one may improve on it.
        none = 1.0 - mtf.reduce_max(flags, reduced_dim=self._beam)
        may_improve = mtf.greater_equal(bound, worst + none * -INF)
        # All rows of the batch are in one loop, which goes on as long as one of them may improve.
        return mtf.logical_and(room, mtf.reduce_any(may_improve, output_shape=[]))

    def _grow(
        self, state: _State, states: Sequence[mtf.Tensor]
    ) -> tuple[_Candidates, list[mtf.Tensor]]:
        """Returns the best continuations, and the states of the model after this position."""
        logits, new_states = self._logits_fn(state.step, state.alive_seq, list(states))
        vocab = self._vocab_dim(logits)
        rows = self._batch + [self._beam]
        # Beams and vocabulary are merged below, so they have to be next to each other in this
        # order.
        if logits.shape.dims != rows + [vocab]:
            logits = mtf.transpose(logits, rows + [vocab])
        # At most this many continuations of one beam can be among the best. If the vocabulary is
        # split, processors exchange only these.
        some = mtf.Dimension("minor_vocab", min(vocab.size, self._double.size))
        logits = mtf.cast(logits, self._dtype)
        top, ids = mtf.top_k(
            logits if self._normalized else mtf.log_softmax(logits, vocab), vocab, some
        )
        flat = mtf.Dimension("beam_and_vocab", self._beam.size * some.size)
        # The probability of a sequence is the product of those of its ids: logarithms are added.
        log_probs = mtf.reshape(top + state.alive_log_probs, self._batch + [flat])
        ids = mtf.reshape(ids, self._batch + [flat])
        log_probs, place, ids = best(log_probs, flat, self._double, ids)
        if isinstance(self._eos_id, mtf.Tensor):
            every = ids.shape + self._eos_id.shape
            finished = mtf.reduce_any(
                mtf.equal(ids, self._eos_id, output_shape=every), output_shape=ids.shape
            )
        else:
            finished = mtf.equal(ids, self._eos_id)
        origin = mtf.floordiv(place, some.size)  # a place is beam * some + number of the id
        if self._ends_fn is not None:
            at_step = mtf.one_hot(state.step, self._length, 1, 0, tf.int32)
            sequences = select(state.alive_seq, origin, self._beam) + ids * at_step
            finished = mtf.logical_or(finished, self._ends_fn(state.step, sequences))
        return _Candidates(log_probs, origin, ids, finished), new_states

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
        at_step = mtf.one_hot(state.step, self._length, 1, 0, tf.int32)
        ends = mtf.cast(candidates.finished, self._dtype)
        # At least as many candidates are unfinished as there are beams.
        log_probs, _, origin, ids = best(
            # Lower than any score, also that of a beam which does not count, so that finished ones
            # are never continued.
            candidates.log_probs - ends * (3.0 * INF),
            self._double, self._beam, candidates.origin, candidates.ids,
        )  # fmt: skip
        # Positions that are not decoded yet hold 0, so an addition sets one.
        alive_seq = select(state.alive_seq, origin, self._beam) + ids * at_step
        # From the old beams and not from `alive_seq`, since the origins of candidates count in
        # those.
        finished = self._finished(state, candidates, ends, at_step)
        # What the model knows of a beam goes with it: several new beams may continue one old beam.
        new_states = [
            select(x, origin, self._beam) if self._beam in x.shape else x for x in new_states
        ]
        return _State(state.step + 1, alive_seq, log_probs, *finished), new_states

    def _finished(
        self, state: _State, candidates: _Candidates, ends: mtf.Tensor, at_step: mtf.Tensor
    ) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
        """Returns the best finished sequences, their scores and flags."""
        # Candidates that go on are put below those that have finished.
        scores = self._divided(candidates.log_probs, state.step + 1) + (ends - 1.0) * INF
        scores = mtf.concat(
            [_renamed(state.finished_scores, self._beam, self._triple),
             _renamed(scores, self._double, self._triple)],
            self._triple.name,
        )  # fmt: skip
        scores, place = mtf.top_k(scores, self._triple, self._beam)
        # Each sequence is either one that had finished before, or a continued beam.
        earlier = mtf.range(self._mesh, self._beam, tf.int32)
        # What had finished gets no further id: it is added below, too, as 0.
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
        # In the order that `origin` counts in: first those that had finished, then the alive ones.
        both_dim = mtf.Dimension(self._double.name, 2 * self._beam.size)
        both = mtf.concat(
            [_renamed(x, self._beam, both_dim) for x in (state.finished_seq, state.alive_seq)],
            both_dim.name,
        )
        return select(both, origin, both_dim) + ids * at_step, scores, flags

    def results(self, state: _State) -> tuple[mtf.Tensor, mtf.Tensor]:
        """Returns finished sequences and scores, or the alive ones if none has finished."""
        any_finished = mtf.reduce_any(state.finished_flags, reduced_dim=self._beam)
        return (
            mtf.where(any_finished, state.finished_seq, state.alive_seq),
            mtf.where(any_finished, state.finished_scores, state.alive_log_probs),
        )


class _SearchOfTransformers(_Search):
    """The same as Hugging Face's transformers searches.

    Scores are log probabilities divided by length ** length_penalty. A sequence finishes only if it
    is among as many of the best candidates as there are beams; at the maximum length all of these
    do. A row is closed once it has as many finished sequences as beams and its alive ones are not
    expected to become better, or at once with `early_stopping`; then nothing changes in it.
    """

    def __init__(self, *args: Any, early_stopping: Union[bool, str], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._early_stopping = early_stopping

    def _divided(self, log_probs: mtf.Tensor, length: mtf.Tensor) -> mtf.Tensor:
        penalty = mtf.pow(mtf.to_float(length), self._alpha)
        return log_probs / mtf.cast(penalty, self._dtype)

    def _open(self, state: _State) -> mtf.Tensor:
        """Returns which rows are not closed, [batch...]."""
        # Those of closed rows are set to much less than those of beams that do not count.
        best_alive = mtf.reduce_max(state.alive_log_probs, reduced_dim=self._beam)
        return mtf.greater(best_alive, -1.5 * INF)

    def goes_on(self, state: _State) -> mtf.Tensor:
        room = mtf.less(state.step, self._decode_length)
        return mtf.logical_and(room, mtf.reduce_any(self._open(state), output_shape=[]))

    def step(self, state: _State, states: Sequence[mtf.Tensor]) -> tuple[_State, list[mtf.Tensor]]:
        state, new_states = super().step(state, states)
        full = mtf.reduce_all(state.finished_flags, reduced_dim=self._beam)
        closed = full
        if self._early_stopping is not True:
            # Not a bound but a guess, that sequences end now; except for "never", which takes the
            # maximum length where longer ones have better scores.
            bounded = self._early_stopping == "never" and self._alpha > 0
            length = self._decode_length if bounded else state.step
            best_alive = mtf.reduce_max(state.alive_log_probs, reduced_dim=self._beam)
            worst = mtf.reduce_min(state.finished_scores, reduced_dim=self._beam)
            improves = mtf.greater(self._divided(best_alive, length), worst)
            closed = mtf.logical_and(full, mtf.logical_not(improves))
        lowered = mtf.where(closed, state.alive_log_probs - 2.0 * INF, state.alive_log_probs)
        return state._replace(alive_log_probs=lowered), new_states

    def _finished(
        self, state: _State, candidates: _Candidates, ends: mtf.Tensor, at_step: mtf.Tensor
    ) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
        places = mtf.range(self._mesh, self._double, tf.int32)
        last = mtf.greater_equal(state.step + 1, self._decode_length)
        finished = mtf.logical_or(candidates.finished, last)
        finished = mtf.logical_and(finished, mtf.less(places, self._beam.size))
        finished = mtf.logical_and(finished, self._open(state))
        candidates = candidates._replace(finished=finished)
        return super()._finished(state, candidates, mtf.cast(finished, self._dtype), at_step)


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
    eos_id: Union[int, mtf.Tensor] = EOS_ID,
    stop_early: bool = True,
    decode_length: Optional[Union[int, mtf.Tensor]] = None,
    use_tpu: bool = True,
    dtype: tf.DType = tf.float32,
    layout: object = None,
    mesh_shape: object = None,
    num_prefilter: int = 2,
    length_penalty: Optional[float] = None,
    early_stopping: Union[bool, str] = False,
    normalized: bool = False,
    ends_fn: Optional[Callable] = None,
) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Searches for the most probable sequences; returns them and their scores.

    A finished sequence ends with `eos_id` and has the score
    log(probability) / ((5 + length) / 6)^alpha, where the length includes `eos_id`; see Wu et al.,
    "Google's Neural Machine Translation System", arXiv:1609.08144, for this length penalty. If no
    sequence of a batch entry has finished, its alive sequences are returned, with their log
    probabilities.

    With `length_penalty` the search is that of Hugging Face's transformers: a sequence has the
    score log(probability) / length^length_penalty; it finishes if it ends and is among as many of
    the best candidates of a step as there are beams, or at the maximum length; and a row ends by
    `early_stopping`.

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
      eos_id: an int, the id that ends a sequence; or an int32 Tensor of one dimension, the ids of
        which any does.
      stop_early: whether to stop as soon as no alive sequence can become better than the finished
        ones.
      decode_length: the maximum length, an int or an int32 scalar Tensor; the full length if None.
      use_tpu: unused.
      dtype: the dtype of scores.
      layout: unused.
      mesh_shape: unused.
      num_prefilter: unused.
      length_penalty: a number, which takes the place of `alpha` and `stop_early`; or None.
      early_stopping: when a row of that search ends that has as many finished sequences as beams:
        at once if it is True, and if no alive sequence would be better than the worst of them: if
        it ended now (False), or at the best length that it may have ("never").
      normalized: whether what `logits_fn` returns are log probabilities, perhaps changed by
        penalties, which are added up as they are.
      ends_fn: a function of (step, ids): an int32 scalar, the last position that is decoded; an
        int32 Tensor [batch..., candidates, length]. Returns a boolean Tensor [batch...,
        candidates], which of them end there, besides those that do so by `eos_id`. Or None.

    Returns:
      A tuple (ids [batch..., beam, length], scores [batch..., beam]), best first.

    Raises:
      ValueError: the ids, the logits or the new states have invalid shapes.
    """
    _check_ids(initial_ids)
    states = list(states or [])
    arguments = (eos_id, decode_length, dtype, stop_early, normalized, ends_fn)
    search = _Search(logits_fn, initial_ids, alpha, *arguments)
    if length_penalty is not None:
        search = _SearchOfTransformers(
            logits_fn, initial_ids, length_penalty, *arguments, early_stopping=early_stopping
        )
    first = search.start(initial_ids)
    n = len(first)

    def cond_fn(*values: mtf.Tensor) -> mtf.Tensor:
        return search.goes_on(_State(*values[:n]))

    def body_fn(*values: mtf.Tensor) -> list[mtf.Tensor]:
        state, new_states = search.step(_State(*values[:n]), values[n:])
        return [*state, *new_states]

    last = mtf.while_loop(cond_fn, body_fn, [*first, *states])
    return search.results(_State(*last[:n]))


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
    _check_greedy_ids(initial_ids, forced_ids)
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
            # 0 is padding and no id to force, so it stands for positions that are free.
            forced = mtf.gather(forced_ids, step, length)
            new = mtf.where(mtf.equal(forced, 0), new, forced)
        # As in a beam search: an addition sets the position, which holds 0 until now.
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


def _check_greedy_ids(initial_ids: mtf.Tensor, forced_ids: Optional[mtf.Tensor]) -> None:
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
