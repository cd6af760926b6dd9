"""Layers that run otherwise than one after another: reversible ones, and stages of pipelines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import divisors, text_table
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow._core.operation import with_inner_operations
from mesh_tensorflow.ops._contractions.reduce_broadcast import divided_sum
from mesh_tensorflow.ops._control.gradients import (
    Gradients,
    computed_again,
    custom_gradient,
    wait_for,
)
from mesh_tensorflow.ops._elementwise.binary import select
from mesh_tensorflow.ops._source import or_zeros

# -- reversible layers


def reversible_half_residual_and_swap(
    x1: mtf.Tensor,
    x1_backwards: Optional[mtf.Tensor],
    x2: mtf.Tensor,
    x2_backwards: Optional[mtf.Tensor],
    f: Callable[[mtf.Tensor], mtf.Tensor],
    recompute_grads: bool = True,
) -> list:
    """Adds `f(x2)` to `x1` and swaps the two: one step of a reversible network.

    Gomez et al., "The reversible residual network: backpropagation without storing activations"
    (2017). The backward pass recomputes `f(x2)` from the outputs of the step and subtracts it to
    recover `x1`. So neither activations inside `f` nor inputs are stored for it, only the outputs
    of the last step. Recomputed random values and variables in `f` are the same as before.

    A network of layers, each with both halves:

        for f, g in layers:
            a = reversible_half_residual_and_swap(*a, f)
            a = reversible_half_residual_and_swap(*a, g)

    >>> x1, x2 = mtf.ones(mesh, "d:2"), 3.0 * mtf.ones(mesh, "d:2")
    >>> y1, _, y2, _ = mtf.layers.reversible_half_residual_and_swap(x1, None, x2, None, mtf.square)
    >>> print(y1.numpy(), y2.numpy())
    [3. 3.] [10. 10.]

    Args:
      x1: a Tensor.
      x1_backwards: the Tensor that the previous step returned with `x1`; None for the first step.
        Its value has no meaning; its gradient is the recomputed value of `x1`.
      x2: a Tensor of the shape and dtype of `x1`.
      x2_backwards: the Tensor that the previous step returned with `x2`; None for the first step.
      f: a function of a Tensor that returns a Tensor of the same shape.
      recompute_grads: whether to recompute activations; if False, they are stored as usual.

    Returns:
      The first four arguments of the next step: [x2, x2_backwards, x1 + f(x2), x1_backwards].

    Raises:
      ValueError: `x1`, `x2` and `f(x2)` differ in shape or dtype.
    """
    _check_alike("x1 and x2", x1, x2)

    def step(
        x1: mtf.Tensor,
        x1_back: Optional[mtf.Tensor],
        x2: mtf.Tensor,
        x2_back: Optional[mtf.Tensor],
    ) -> tuple:
        residual = f(x2)
        # Before the addition, which would broadcast the one to the other.
        _check_alike("x1 and f(x2)", x1, residual)
        return x2, x2_back, x1 + residual, x1_back

    if not recompute_grads:
        return list(step(x1, x1_backwards, x2, x2_backwards))
    # Inputs of which only the gradients count: these are the recomputed values.
    x1_backwards, x2_backwards = or_zeros([x1_backwards, x2_backwards], [x1, x2])
    return list(mtf.custom_gradient(step, _backwards, [x1, x1_backwards, x2, x2_backwards]))


def _check_alike(what: str, a: mtf.Tensor, b: mtf.Tensor) -> None:
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(
            f"reversible_half_residual_and_swap: {what} must have one shape and one dtype, but "
            f"{a.name} is {a.shape} {a.dtype.name} and {b.name} is {b.shape} {b.dtype.name}"
        )


def _backwards(
    explicit_inputs: Sequence[mtf.Tensor],
    all_inputs: Sequence[mtf.Tensor],
    forward_operations: Sequence[mtf.Operation],
    outputs: Sequence[mtf.Tensor],
    output_grads: Sequence[mtf.Tensor],
) -> list[Optional[mtf.Tensor]]:
    """Returns the gradients of all inputs; those of `x_backwards` are the recomputed inputs."""
    x2 = explicit_inputs[2]
    others = list(all_inputs[len(explicit_inputs) :])
    dy1, y1_again, dy2, y2_again = output_grads
    if isinstance(y1_again.operation, mtf.Constant):
        # No later step recomputed them: these are the zeros of a missing gradient.
        y1_again, y2_again = outputs[0], outputs[2]
    # Wait for the gradients, or all steps would be recomputed at once.
    y1, y2 = wait_for([y1_again, y2_again], [dy1, dy2])
    *inner, addition = forward_operations
    # The last operation of `step` is x1 + f(x2), and the others are those of f.
    residual = addition.inputs[1]
    # x2 = y1, which was not changed, and x1 = y2 - f(y1).
    [residual], (dx2, *d_others) = computed_again(inner, {x2: y1}, [residual], [x2, *others], [dy2])
    # The previous step waits for this one, or activations of both would be stored at once.
    [x1] = wait_for([y2 - residual], [d for d in d_others if d is not None])
    # dx1 = dy2, and dx2 = dy1 + (df/dx2)^T dy2.
    return [dy2, x1, dy1 if dx2 is None else dy1 + dx2, y1, *d_others]


# -- pipelines


class PipelineSchedule(NamedTuple):
    """Which microbatch is in which stage of a pipeline at each tick.

    In a circular pipeline, every microbatch passes all stages several times.

    >>> schedule = mtf.layers.PipelineSchedule(num_stages=2, num_microbatches=3)
    >>> print(schedule.ticks, schedule.bubble)
    4 0.25
    >>> print(schedule.table())
    tick  stage 0  stage 1
    ----  -------  -------
    0           0        -
    1           1        0
    2           2        1
    3           -        2

    Attributes:
      num_stages: the number of stages, K.
      num_microbatches: the number of microbatches, M.
      num_repeats: how often each microbatch passes all stages, R.
    """

    num_stages: int
    num_microbatches: int
    num_repeats: int = 1

    @property
    def items(self) -> int:
        """How often each stage has something to do, M * R."""
        return self.num_microbatches * self.num_repeats

    @property
    def ticks(self) -> int:
        """The number of ticks, M * R + K - 1."""
        return self.items + self.num_stages - 1

    @property
    def bubble(self) -> float:
        """The fraction of its ticks that a stage has nothing to do, (K - 1) / (M * R + K - 1)."""
        return (self.num_stages - 1) / self.ticks

    def at(self, tick: int, stage: int) -> Optional[tuple[int, int]]:
        """Returns (repeat, microbatch) in a stage at a tick; None in a bubble."""
        # At tick t stage k has item t - k: microbatch item % M, in its pass item // M.
        item = tick - stage
        return divmod(item, self.num_microbatches) if 0 <= item < self.items else None

    def clipped(self, tick: int, stage: int) -> tuple[int, int]:
        """Returns (repeat, microbatch); in a bubble, those nearest in time."""
        # In a bubble a stage computes on something, as all processors run one program. With the
        # nearest microbatch, no further weights have to be fetched for it.
        item = min(max(tick - stage, 0), self.items - 1)
        return divmod(item, self.num_microbatches)

    def table(self) -> str:
        """Returns a table of the microbatches in all stages at each tick, with "-" for bubbles.

        In a circular pipeline, "1.0" is microbatch 0 when it passes the second time.
        """
        rows = [["tick", *(f"stage {k}" for k in range(self.num_stages))]]
        for tick in range(self.ticks):
            places = [self.at(tick, k) for k in range(self.num_stages)]
            rows.append([str(tick), *(self._cell(place) for place in places)])
        return "\n".join(text_table(rows))

    def _cell(self, place: Optional[tuple[int, int]]) -> str:
        if place is None:
            return "-"
        repeat, microbatch = place
        return str(microbatch) if self.num_repeats == 1 else f"{repeat}.{microbatch}"


_MICROBATCHES = "pipeline_microbatches"
# Takes the number of a tick and the inputs of all stages; returns their outputs, and losses.
_Apply = Callable[[int, mtf.Tensor], list[mtf.Tensor]]


@leaves_no_node
def pipeline(
    stage_fn: Callable[..., Any],
    x: mtf.Tensor,
    weights: Sequence[mtf.Tensor],
    stages_dim: mtf.Dimension,
    batch_dim: mtf.Dimension,
    num_microbatches: int,
    repeats_dim: Optional[mtf.Dimension] = None,
    side_inputs: Sequence[mtf.Tensor] = (),
    recompute: bool = False,
) -> Any:
    """Passes a batch through stages in a row, microbatch by microbatch.

    Stages are a dimension. At each tick, `stage_fn` is applied to all stages at once, each with a
    microbatch of its own, and results are shifted to the next stage. A layout rule for
    `stages_dim` puts stages on different processors, which then hold the weights and the
    activations of their stage only, and send activations to the processor of the next stage
    (GPipe, Huang et al., 2019; as a shift along a dimension, GSPMD, Xu et al., 2021, section 3.3).

    Rows `m`, `m + M`, `m + 2 * M`, ... of the batch are microbatch `m` of `M`. A layout that splits
    the batch therefore splits each microbatch, without communication.

    With `repeats_dim`, the pipeline is circular: what leaves the last stage enters the first again,
    `repeats_dim.size` times, each time with other weights. The bubble is smaller by this factor.

    What stages compute in bubbles is part of no result and of no gradient. The first ticks, in
    which later stages wait, are computed again for the gradient, with inputs that these stages see
    later: a function with infinite slopes elsewhere would give gradients that are not numbers.

    >>> stages, batch, d = mtf.convert_to_shape("stages:2,batch:6,d:4").dims
    >>> w = mtf.constant(mesh, 3.0, mtf.Shape([stages, d]))
    >>> x = mtf.ones(mesh, mtf.Shape([batch, d]))
    >>> y = mtf.layers.pipeline(lambda x, w: x * w, x, [w], stages, batch, num_microbatches=3)
    >>> print(y.shape, y.numpy()[0, 0])
    Shape[batch=6, d=4] 9.0

    Args:
      stage_fn: takes the activations, the weights and the side inputs as Tensors, and returns new
        activations of the same shape and dtype. In it, activations and side inputs have the
        dimension `stages_dim`, and `batch_dim` with the size of a microbatch. It may return a list
        of activations and losses, each with the dimension `stages_dim`, and with others if these
        are none of the activations.
      x: a Tensor with `batch_dim` and without `stages_dim`.
      weights: a list of Tensors: with `stages_dim` (and with `repeats_dim`, if there is one) those
        that differ from stage to stage, without both those that all stages share.
      stages_dim: a Dimension, the stages.
      batch_dim: a Dimension of `x`.
      num_microbatches: an int that divides the size of `batch_dim`.
      repeats_dim: a Dimension, the passes of a circular pipeline, or None for one pass.
      side_inputs: a list of Tensors with `batch_dim` that each stage sees with its microbatch,
        such as masks: one for all stages, or with `stages_dim` (and `repeats_dim`) one for each.
      recompute: whether to compute the activations within a stage again for the gradient, so that
        only the inputs of stages are kept.

    Returns:
      A Tensor with the shape of `x`; or a list of it and of the losses, summed over stages (and
      repeats), and averaged over microbatches.

    Raises:
      ValueError: `num_microbatches` does not divide the batch, there are fewer microbatches than
        stages in a circular pipeline, a Tensor lacks a dimension or has it with another size, or
        `stage_fn` returns another shape or dtype, or assigns to variables.
    """
    _check(x, weights, side_inputs, stages_dim, batch_dim, num_microbatches, repeats_dim)
    repeats = 1 if repeats_dim is None else repeats_dim.size
    run = _Run(
        x.mesh,
        stages_dim,
        batch_dim,
        repeats_dim,
        PipelineSchedule(stages_dim.size, num_microbatches, repeats),
    )
    sources = run.sources(x)
    of_passes = run.of_passes(weights)
    sides_of_passes = run.of_passes([run.by_microbatch(side) for side in side_inputs])
    returned: Any = None

    def apply(tick: int, state: mtf.Tensor) -> list[mtf.Tensor]:
        """Returns the activations of all stages, and what the tick adds to the losses."""
        nonlocal returned
        sides = run.of_tick(tick, sides_of_passes)
        inputs = [state, *run.of_tick(tick, of_passes), *(run.side(tick, s) for s in sides)]
        again = recompute and tick >= stages_dim.size - 1  # the ticks before are computed again
        fn = functools.partial(mtf.recompute_grad, stage_fn, inputs)
        fn = fn if again else functools.partial(stage_fn, *inputs)
        # To see what it makes: an assignment would be done in each tick, and with what bubbles
        # compute.
        returned, operations = x.mesh.graph.capture_operations(fn)
        _check_assigns_nothing(operations)
        y, *added = returned if isinstance(returned, (list, tuple)) else [returned]
        _check_result(y, state, added, stages_dim)
        return [y, *(run.loss(tick, loss) for loss in added)]

    results, losses = run.ticks(apply, sources)
    y = run.of_last_stage(results, x.shape)
    if not isinstance(returned, (list, tuple)):
        return y
    return [y, *(mtf.add_n(list(of_ticks)) for of_ticks in zip(*losses))]


class _Run:
    """How the batch is cut into microbatches, enters the stages, and leaves them."""

    def __init__(
        self,
        mesh: mtf.Mesh,
        stages_dim: mtf.Dimension,
        batch_dim: mtf.Dimension,
        repeats_dim: Optional[mtf.Dimension],
        schedule: PipelineSchedule,
    ):
        self._mesh = mesh
        self._stages_dim = stages_dim
        self._batch_dim = batch_dim
        self._repeats_dim = repeats_dim
        self._dim = mtf.Dimension(_MICROBATCHES, schedule.num_microbatches)
        self.schedule = schedule

    def _stage_is(self, stage: int, compare: Callable = mtf.equal) -> mtf.Tensor:
        return compare(mtf.range(self._mesh, self._stages_dim, tf.int32), stage)

    def by_microbatch(self, x: mtf.Tensor) -> mtf.Tensor:
        """Returns a Tensor with a dimension of microbatches after that of the batch."""
        size = self._batch_dim.size // self._dim.size
        # Microbatches run fastest: processors that split the batch then have a part of each, and
        # keep their rows.
        of_batch = [mtf.Dimension(self._batch_dim.name, size), self._dim]
        dims = [[d] if d != self._batch_dim else of_batch for d in x.shape]
        return mtf.reshape(x, mtf.Shape([d for part in dims for d in part]))

    def sources(self, x: mtf.Tensor) -> list[mtf.Tensor]:
        """Returns the microbatches, each in all stages: their gradients are summed once."""
        x = self.by_microbatch(x)
        x = mtf.broadcast(x, mtf.Shape([self._stages_dim, *x.shape]))
        return [
            mtf.reshape(mtf.slice(x, i, 1, self._dim.name), x.shape - self._dim)
            for i in range(self._dim.size)
        ]

    def ticks(
        self, apply: _Apply, sources: Sequence[mtf.Tensor]
    ) -> tuple[list[mtf.Tensor], list[list[mtf.Tensor]]]:
        """Returns the activations of the last ticks, and the losses of all of them."""
        first = self._stages_dim.size - 1
        results, losses = [], []
        shifted: list[mtf.Tensor] = []
        if first:
            last, *of_first = self._first_ticks(apply, sources)
            shifted = [last] * first  # of which the last one is used
            losses.append(of_first)
        for tick in range(first, self.schedule.ticks):
            y, *added = apply(tick, self._entering(tick, sources, shifted))
            losses.append(added)
            # The last pass of microbatch m leaves the last stage at tick M (R - 1) + m + K - 1.
            if tick >= self.schedule.ticks - self._dim.size:
                results.append(y)
            if tick + 1 < self.schedule.ticks:
                shifted.append(self._shifted(y))
        return results, losses

    def _shifted(self, y: mtf.Tensor) -> mtf.Tensor:
        # Without repeats the first stage needs nothing of the last one, and nothing is sent to it.
        return mtf.shift(y, 1, self._stages_dim, wrap=self.schedule.num_repeats > 1)

    def _first_ticks(self, apply: _Apply, sources: Sequence[mtf.Tensor]) -> list[mtf.Tensor]:
        """Returns the shifted activations after all ticks with a stage that waits, and losses.

        A stage that waits computes with the input of the first one. Its result is not used, and
        gets the gradient 0; but 0 times a slope that is infinite there is not a number, and may be
        summed over stages. When the gradient is computed, what each stage gets first is known, and
        so ticks are computed again with that where stages wait. The rest is as before.
        """
        graph, stages = self._mesh.graph, self._stages_dim.size
        # After which of the operations that enter a tick, or make it, there are others.
        ends: list[int] = []
        count = 0

        def fn(waiting: mtf.Tensor) -> list[mtf.Tensor]:
            nonlocal count
            # `forward_operations` of the gradient begin here, and so do the numbers in `ends`.
            start = len(graph.operations)
            states: list[mtf.Tensor] = []
            shifted: list[mtf.Tensor] = []
            losses = []
            for tick in range(stages - 1):
                state = self._entering(tick, sources, shifted)
                states.append(select(self._stage_is(tick, mtf.less_equal), state, waiting))
                ends.append(len(graph.operations) - start)
                y, *added = apply(tick, states[-1])
                ends.append(len(graph.operations) - start)
                losses.append(added)
                shifted.append(self._shifted(y))
            results = [shifted[-1], *(mtf.add_n(list(of_ticks)) for of_ticks in zip(*losses))]
            count = len(results)
            # States are results, too, for the gradient to take; nothing else uses them.
            return [*results, *states]

        def grad_fn(
            explicit_inputs: Sequence[mtf.Tensor],
            all_inputs: Sequence[mtf.Tensor],
            forward_operations: Sequence[mtf.Operation],
            outputs: Sequence[mtf.Tensor],
            output_grads: Sequence[mtf.Tensor],
        ) -> list[Optional[mtf.Tensor]]:
            states = outputs[count:]
            seen = states[0]
            # Stage k gets its first microbatch at tick k; the last one, after these ticks.
            for stage, state in enumerate([*states[1:], outputs[0]], 1):
                seen = select(self._stage_is(stage), state, seen)
            seen = mtf.stop_gradient(seen)
            for op in forward_operations:
                for y in op.outputs:
                    y.usable = True  # also in the gradients of what follows
            grads = Gradients(all_inputs, outputs[:count], output_grads[:count])
            grads.through(forward_operations[ends[-1] :])
            for tick in reversed(range(stages - 1)):
                # There are two ends for each tick: after what enters it, and after what its stages
                # compute.
                begin, middle, end = [0, *ends][2 * tick : 2 * tick + 3]
                busy = self._stage_is(tick, mtf.less_equal)
                again = {states[tick]: select(busy, states[tick], seen)}
                grads.through(forward_operations[middle:end], again)
                # Selections and shifts, whose gradients read no values that could be infinite.
                grads.through(forward_operations[begin:middle])
            # None for the input of stages that wait: what they compute is part of no result.
            return grads.of(all_inputs, but=explicit_inputs)

        return custom_gradient(fn, grad_fn, [mtf.stop_gradient(sources[0])])[:count]

    def _entering(
        self, tick: int, sources: Sequence[mtf.Tensor], shifted: Sequence[mtf.Tensor]
    ) -> mtf.Tensor:
        """Returns what enters all stages at a tick.

        Stages that have nothing to do any more compute what they have computed last.
        """
        if tick == 0:
            return sources[0]
        # When the last microbatch has entered, the first stage repeats it; nothing depends on the
        # result.
        item = min(tick, self.schedule.items - 1)
        if item < len(sources):
            first = sources[item]
        else:
            # What left the last stage waits until all microbatches have entered the first.
            # Item i was item i - M a pass before, in the last stage at tick i - M + K - 1.
            first = shifted[item - len(sources) + self._stages_dim.size - 1]
        # With as many microbatches as stages, nothing waits: the shift has wrapped it around.
        if first is shifted[tick - 1]:
            return first
        return select(self._stage_is(0), first, shifted[tick - 1], output_shape=first.shape)

    def side(self, tick: int, side: mtf.Tensor) -> mtf.Tensor:
        """Returns the part of a side input that belongs to each stage's microbatch."""
        # Each stage is at another microbatch, and so at another part of a mask.
        parts = [self.schedule.clipped(tick, k)[1] for k in range(self._stages_dim.size)]
        indices = mtf.constant(self._mesh, parts, mtf.Shape([self._stages_dim]), tf.int32)
        rest = [d for d in side.shape if d not in (self._dim, self._stages_dim)]
        return mtf.gather(
            side, indices, self._dim, output_shape=mtf.Shape([self._stages_dim, *rest])
        )

    def loss(self, tick: int, loss: mtf.Tensor) -> mtf.Tensor:
        """Returns what a tick adds to a loss: nothing in bubbles, else a mean over microbatches."""
        busy = [self.schedule.at(tick, k) is not None for k in range(self._stages_dim.size)]
        if not all(busy):
            mask = mtf.constant(self._mesh, busy, mtf.Shape([self._stages_dim]), tf.bool)
            # Selected, since 0 times what a bubble computed may be NaN.
            loss = select(mask, loss, 0.0)
        return divided_sum(mtf.reduce_sum(loss, reduced_dim=self._stages_dim), self._dim.size)

    def of_last_stage(self, results: Sequence[mtf.Tensor], shape: mtf.Shape) -> mtf.Tensor:
        """Returns the results of the last stage, joined to a batch."""
        axis = results[0].shape.dims.index(
            mtf.Dimension(self._batch_dim.name, self._batch_dim.size // self._dim.size)
        )
        y = mtf.stack(list(results), self._dim.name, axis + 1)
        # A selection and a sum instead of a slice: stages are split, and the processor of the last
        # one alone has the results.
        y = select(self._stage_is(self._stages_dim.size - 1), y, 0.0, output_shape=y.shape)
        return mtf.reshape(mtf.reduce_sum(y, reduced_dim=self._stages_dim), shape)

    # -- weights, in a circular pipeline those of the pass that each stage is in

    def of_passes(self, weights: Sequence[mtf.Tensor]) -> list[Sequence[mtf.Tensor]]:
        """Returns the parts of weights for each pass; one part where all passes have the same."""
        dim = self._repeats_dim
        return [[w] if dim is None or dim not in w.shape else mtf.unstack(w, dim) for w in weights]

    def of_tick(self, tick: int, of_passes: list[Sequence[mtf.Tensor]]) -> list[mtf.Tensor]:
        """Returns the weights of all stages at a tick."""
        passes = [self.schedule.clipped(tick, k)[0] for k in range(self._stages_dim.size)]
        # Passes do not rise with stages: that of the first is the latest, of the last the earliest.
        # There are no fewer microbatches than stages: stages are in one pass, or in two.
        number_of_first = passes.count(passes[0])
        weights = []
        for parts in of_passes:
            first, last = (parts[passes[k] if len(parts) > 1 else 0] for k in (0, -1))
            if first is not last:
                is_first = mtf.less(
                    mtf.range(first.mesh, self._stages_dim, tf.int32), number_of_first
                )
                first = select(is_first, first, last, output_shape=first.shape)
            weights.append(first)
        return weights


def _check(
    x: mtf.Tensor,
    weights: Sequence[mtf.Tensor],
    side_inputs: Sequence[mtf.Tensor],
    stages_dim: mtf.Dimension,
    batch_dim: mtf.Dimension,
    num_microbatches: int,
    repeats_dim: Optional[mtf.Dimension],
) -> None:
    for what, t in [("x", x), *(("a side input", side) for side in side_inputs)]:
        if batch_dim not in t.shape:
            raise ValueError(
                f"pipeline: {what} {t.name} {t.shape} lacks the batch "
                f"{batch_dim.name}={batch_dim.size}; pass a Dimension of it as batch_dim"
            )
        if t is x and stages_dim.name in t.shape.dimension_names:
            raise ValueError(
                f"pipeline: {what} {t.name} {t.shape} has the dimension {stages_dim.name} of the "
                f"stages; all stages get the same input, so give the stages another name"
            )
    if num_microbatches < 1 or batch_dim.size % num_microbatches:
        fits = ", ".join(str(k) for k in divisors(batch_dim.size)[:12])
        raise ValueError(
            f"pipeline: {num_microbatches} microbatches do not divide the batch "
            f"{batch_dim.name}={batch_dim.size}; choose num_microbatches from {fits}, or another "
            f"size of the batch"
        )
    if repeats_dim is not None and num_microbatches < stages_dim.size:
        raise ValueError(
            f"pipeline: a circular pipeline needs a microbatch for each stage, but "
            f"num_microbatches={num_microbatches} is less than "
            f"{stages_dim.name}={stages_dim.size}; use at least {stages_dim.size} microbatches, or "
            f"repeats_dim=None"
        )
    for w in weights:
        _check_parts("the weight", w, stages_dim, repeats_dim)
    for side in side_inputs:
        _check_parts("the side input", side, stages_dim, repeats_dim)


def _check_parts(
    what: str, w: mtf.Tensor, stages_dim: mtf.Dimension, repeats_dim: Optional[mtf.Dimension]
) -> None:
    needed = [stages_dim] if repeats_dim is None else [repeats_dim, stages_dim]
    for d in needed:
        own = w.shape.get_dim_by_name(d.name) if d.name in w.shape.dimension_names else None
        if own is not None and own != d:
            raise ValueError(
                f"pipeline: {what} {w.name} {w.shape} has {d.name}={own.size}, but there are "
                f"{d.size} {d.name}; stack those of {d.size}, or pass its Dimension"
            )
    has = [d in w.shape for d in needed]
    if any(has) and not all(has):
        missing = needed[has.index(False)]
        raise ValueError(
            f"pipeline: {what} {w.name} {w.shape} lacks {missing.name}={missing.size}; in a "
            f"circular pipeline weights have both {needed[0].name} and {needed[1].name}, or "
            f"neither"
        )


def _check_assigns_nothing(made: Sequence[mtf.Operation]) -> None:
    for op in with_inner_operations(made):
        if isinstance(op, mtf.Assign):
            names = ", ".join(v.name for v in op.variables)
            raise ValueError(
                f"pipeline: stage_fn assigns to {names}, but it is called for each tick, with what "
                "bubbles compute among the values; return what is to be assigned as a loss, which "
                "leaves bubbles out, and assign its mean after the pipeline"
            )


def _check_result(
    y: mtf.Tensor, state: mtf.Tensor, losses: Sequence[mtf.Tensor], stages_dim: mtf.Dimension
) -> None:
    if y.shape != state.shape or y.dtype != state.dtype:
        raise ValueError(
            f"pipeline: stage_fn got activations {state.shape} {state.dtype.name} and returned "
            f"{y.shape} {y.dtype.name}; the next stage takes what a stage returns, so return the "
            f"same dimensions, in the same order, and the same dtype"
        )
    for loss in losses:
        others = [d for d in loss.shape if d != stages_dim]
        if stages_dim not in loss.shape or any(d in state.shape for d in others):
            raise ValueError(
                f"pipeline: stage_fn returned a loss {loss.name} {loss.shape}, but losses have the "
                f"dimension {stages_dim.name}={stages_dim.size} alone, so that those of bubbles "
                f"can be left out; mtf.reduce_mean(loss, output_shape=[stages_dim]) gives it"
            )
