"""Training in microbatches, and values of a batch from those of its microbatches.

A model function is built for one microbatch. Of each Tensor in it, a kind says what the value of
the whole batch is:

    rows      of the examples: it has the dimension of the batch, or what became of it
    same      independent of the batch: weights, numbers, and what is computed of them
    drawn     the same, but for random numbers, which each microbatch draws anew
    mean      the mean over the microbatches, as that of `mtf.reduce_mean` over the batch
    sum       the sum over the microbatches, as that of `mtf.reduce_sum` over the batch
    function  a function of means and sums, which is to be computed of those of the whole batch
    unknown   none of these, or it is not known which

Kinds follow from the operations: a quotient of sums over the batch is a function of two sums.

The loop over the microbatches sums what `Kinds` calls means and sums. What is computed of them, and
what is the same for all, is computed once, outside of the loop. An assignment in the model function
becomes one assignment after the loop, of the value of the whole batch: all microbatches read the
variable as it was at the beginning of the step, as everywhere.

An example: loss = reduce_sum(losses * mask) / reduce_sum(mask) + 0.01 * reduce_sum(square(w))

    in the loop       S += reduce_sum(losses * mask),  W += reduce_sum(mask),  dS/dw
    before the loop   R = reduce_sum(square(w))
    after the loop    loss = S / W + 0.01 * R,  dloss/dw = dloss/dS * dS/dw + dloss/dW * dW/dw + ...

`serialize_training_step` is the classic's form; `mtf.optimize.accumulate_gradients` the newer one,
with means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.graph import Graph, leaves_no_node
from mesh_tensorflow._core.operation import (
    Operation,
    Tensor,
    is_differentiable,
    readers_of,
    with_inner_operations,
)
from mesh_tensorflow._core.shape import Dimension, Shape
from mesh_tensorflow.ops._contractions.einsum import EinsumOperation
from mesh_tensorflow.ops._contractions.reduce_broadcast import BroadcastOperation, ReduceOperation
from mesh_tensorflow.ops._control.control import Depend, ScalarSummaryOperation
from mesh_tensorflow.ops._control.gradients import CustomGradientOperation, StopGradient, usable
from mesh_tensorflow.ops._control.while_loop import WhileLoopOperation
from mesh_tensorflow.ops._elementwise.binary import (
    AddOperation,
    ScalarAddOperation,
    ScalarMultiplyOperation,
)
from mesh_tensorflow.ops._elementwise.slicewise import SlicewiseOperation, slicewise
from mesh_tensorflow.ops._elementwise.unary import is_cast
from mesh_tensorflow.ops._movement.reshape import ReshapeOperation
from mesh_tensorflow.ops._movement.split_concat import (
    ConcatOperation,
    PadOperation,
    SliceOperation,
    SplitOperation,
    StackOperation,
    UnstackOperation,
)
from mesh_tensorflow.ops._random import RandomOperation
from mesh_tensorflow.ops._source import Constant, ImportOperation
from mesh_tensorflow.ops._variable import Assign, ReadVariable, Variable

__all__ = ["serialize_training_step"]


@dataclasses.dataclass(frozen=True)
class Kind:
    """The kind of a Tensor.

    Attributes:
      name: one of those above.
      dims: of rows, the dimensions that tell examples apart.
      why: why it is unknown, or would be once rows are reduced.
    """

    name: str
    dims: frozenset[Dimension] = frozenset()
    why: str = ""


_SAME, _DRAWN, _MEAN, _SUM, _FUNCTION = map(Kind, ("same", "drawn", "mean", "sum", "function"))
_FLAT = ("same", "drawn")
# What keeps the kind of all of its inputs, if they have one.
_LINEAR: tuple[type, ...] = (
    BroadcastOperation,
    ConcatOperation,
    Depend,
    ReshapeOperation,
    SliceOperation,
    SplitOperation,
    StackOperation,
    StopGradient,
    UnstackOperation,
)
# What may make a dimension with the name of the batch and another size.
_RESIZES = (ConcatOperation, PadOperation, ReshapeOperation, SliceOperation, SplitOperation)
_ROUNDS = 4  # of a loop for each of its variables, until their kinds settle
_TINY = 1e-6


def mean_over_microbatches(x: Tensor) -> Tensor:
    """Returns a scalar, whose value of the whole batch is the mean of those of its microbatches.

    It is for what depends on which examples are computed together, as batch normalization does.

    Args:
      x: a Tensor, the output of an operation that was made for it.
    """
    x.operation.is_of_microbatch = True
    return x


class Kinds:
    """The kinds of the Tensors of a microbatch."""

    def __init__(self, batch_dim: Dimension, number: int, rows: Iterable[Tensor]):
        """Creates Kinds.

        Args:
          batch_dim: the Dimension of the batch.
          number: the number of microbatches.
          rows: the Tensors that are taken from the batch.
        """
        self._name, self._whole = batch_dim.name, batch_dim
        self._small = batch_dim.size // number
        self._kinds: dict[Tensor, Kind] = {x: Kind("rows", self._own_dims(x)) for x in rows}

    def __getitem__(self, x: Tensor) -> Kind:
        if x in self._kinds:
            return self._kinds[x]
        # A Tensor from outside of the model function.
        own = self._own_dims(x)
        return Kind("rows", own) if own else _SAME

    def _own_dims(self, x: Tensor) -> frozenset[Dimension]:
        return frozenset(d for d in x.shape if d.name == self._name)

    def add(self, operations: Iterable[Operation]) -> None:
        """Finds the kinds of the outputs of operations.

        Args:
          operations: operations in topological order.

        Raises:
          ValueError: one has the dimension of the whole batch.
        """
        for op in operations:
            kinds = [self[x] for x in op.inputs]
            if isinstance(op, WhileLoopOperation):
                self._loop(op, kinds)
                continue
            for i, y in enumerate(op.outputs):
                if y not in self._kinds:
                    self._kinds[y] = self._kind(op, y, kinds, i)

    def _loop(self, op: WhileLoopOperation, kinds: Sequence[Kind]) -> None:
        """Finds the kinds of a loop's results; those of its variables may change within."""
        n = op.num_vars
        before = list(kinds[:n])
        inner = [y for each in op.body_operations for y in each.outputs]
        # A variable may get its value from the next one, and so on: each round passes on kinds.
        for _ in range(_ROUNDS * (n + 1)):
            # Kinds that were found with other kinds of the loop's variables are not to be kept.
            for y in inner:
                self._kinds.pop(y, None)
            self._kinds.update(zip(op.placeholders, before))
            self.add(op.body_operations)
            after = [self[y] for y in op.body_outputs[:n]]
            joined = [a if a == b else _of_two(a, b) for a, b in zip(before, after)]
            if joined == before:
                break
            before = joined
        sums = [self[y] for y in op.body_outputs[n:]]
        # A function of totals cannot be computed after this loop, if an iteration computes it.
        names = ("rows", "same", "drawn", "mean", "sum", "unknown")
        why = f"it is computed in the loop {op.name}"
        results = [k if k.name in names else Kind("unknown", why=why) for k in [*before, *sums]]
        self._kinds.update(zip(op.outputs, results))

    def _kind(self, op: Operation, y: Tensor, kinds: Sequence[Kind], index: int) -> Kind:
        """Returns the kind of an output."""
        carried = frozenset().union(*(k.dims for k in kinds))
        own = frozenset(d for d in y.shape if d in carried) | self._own_dims(y)
        if isinstance(op, ReshapeOperation) and carried - own:
            # A reshape may join the batch with others; any of its new dimensions may have it.
            own |= frozenset(d for d in y.shape if d not in op.inputs[0].shape)
        self._check_size(op, y)
        if op.is_of_microbatch:
            return _MEAN
        if op.has_effect:  # its outputs are its first inputs, whatever it prints besides
            return kinds[index]
        if own:
            # Also of what computes across examples: batch normalization is of a microbatch.
            return Kind("rows", own, _why_mixed(op, own, kinds))
        # An output is what the function returned, one of its last inputs; arguments do not count.
        if isinstance(op, CustomGradientOperation):
            kind = self[op.inputs[len(op.inputs) - len(op.outputs) + index]]
            why = f"it is computed in a function with a custom gradient, {op.name}"
            return Kind("unknown", why=why) if kind is _FUNCTION else kind
        # Rows that have a reason are no rows of single examples, so their sums are not known.
        unknown = [k for k in kinds if k.name == "unknown" or (k.dims and k.why)]
        if unknown:
            return Kind("unknown", why=unknown[0].why)
        # Rows come in, and none of their dimensions goes out: here the batch is reduced.
        if carried:
            return _reduced(op, kinds)
        if all(k.name in _FLAT for k in kinds):
            drawn = isinstance(op, RandomOperation) or _DRAWN in kinds
            return _DRAWN if drawn else _SAME
        kind = self._of_totals(op, kinds)
        if kind is _FUNCTION and _DRAWN in kinds:
            why = f"{op.name} joins it with random numbers, which each microbatch draws anew"
            return Kind("unknown", why=why)
        return kind

    def _check_size(self, op: Operation, y: Tensor) -> None:
        """Raises ValueError for the dimension of the whole batch in a microbatch."""
        # With one microbatch the two dimensions are the same.
        if self._whole.size == self._small or self._whole not in y.shape:
            return
        if not isinstance(op, _RESIZES):
            raise ValueError(
                f"the model function is called with microbatches of {self._name}={self._small}, "
                f"but {op.name} has the dimension of the whole batch, "
                f"{dims_text([self._whole])}: {y.name} {y.shape}. Take the dimension from the "
                "inputs, as x.shape.dims[0] does, instead of that of the whole batch"
                + (f" ({op.site.file}:{op.site.line})" if op.site is not None else "")
            )

    def _of_totals(self, op: Operation, kinds: Sequence[Kind]) -> Kind:
        """Returns the kind of what is computed of means and sums."""
        totals = [k for k in kinds if k.name not in _FLAT]
        names = {k.name for k in totals}
        if isinstance(op, ScalarMultiplyOperation):
            return self._times(op, kinds[0], op._scalar)
        if isinstance(op, EinsumOperation) and len(totals) == 1:
            others = [_number(x) for x, k in zip(op.inputs, kinds) if k.name in _FLAT] or [1.0]
            products = [self._times(op, totals[0], other) for other in others]
            return next((kind for kind in products if kind.name == "unknown"), products[0])
        if isinstance(op, ScalarAddOperation):
            # mean(x_i) + c = mean(x_i + c), but a sum would have c once for each microbatch.
            return _MEAN if names == {"mean"} else _FUNCTION
        if isinstance(op, AddOperation):
            # Likewise, what is the same for all may be added to a mean, and not to a sum.
            all_sums = names == {"sum"} and len(totals) == len(kinds)
            return _SUM if all_sums else _MEAN if names == {"mean"} else _FUNCTION
        linear = isinstance(op, _LINEAR) or _is_linear_slicewise(op)
        linear = linear or (isinstance(op, ReduceOperation) and op._is_sum())
        same_kind = len(names) == 1 and len(totals) == len(kinds)
        return totals[0] if linear and same_kind else _FUNCTION

    def _times(self, op: Operation, kind: Kind, factor: Any) -> Kind:
        """Returns the kind of a product with a number, which may stand for the size of a batch."""
        # Only of a sum does it matter what the number stands for: a multiple of a mean is a mean.
        if kind.name != "sum":
            return kind
        source = op.inputs[0].operation
        if isinstance(op, ScalarMultiplyOperation) and op.is_mean is not None:
            # A mean over other dimensions of sums over the batch is such a sum.
            others = isinstance(source, ReduceOperation) and self[source.inputs[0]] is _SUM
            return _MEAN if op.is_mean and not others else _SUM
        number = tf.get_static_value(factor, partial=False) if tf.is_tensor(factor) else factor
        if number is None or not self._may_be_size(number):
            return _SUM
        return Kind(
            "unknown",
            why=f"{op.name} multiplies a sum over the batch by {float(number)}, which may be made "
            f"of the size of a microbatch ({self._small} examples) or of the batch",
        )

    def _may_be_size(self, factor: Any) -> bool:
        """Returns whether 1 / factor is a multiple of the size of a microbatch."""
        if not factor or factor == 1:
            return False
        # A factor such as 1 / 32 may be written by the user for the number of examples, of a
        # microbatch or of the batch. Which, cannot be told from the number, so the kind is unknown.
        share = 1.0 / abs(factor) / self._small
        return round(share) >= 1 and abs(share - round(share)) < _TINY * share


def _of_two(a: Kind, b: Kind) -> Kind:
    """Returns the kind of a loop variable that has one kind before, and another after it."""
    if a.dims or b.dims:
        return Kind("rows", a.dims | b.dims, a.why or b.why)
    names = {a.name, b.name}
    if "unknown" in names:
        return a if a.name == "unknown" else b
    # What is the same for all is the mean of itself, so a mean may follow it.
    if names <= {*_FLAT, "mean"}:
        return _MEAN if "mean" in names else _DRAWN
    return Kind("unknown", why="it is a variable of a loop that adds sums over the batch")


def _why_mixed(op: Operation, own: frozenset[Dimension], kinds: Sequence[Kind]) -> str:
    """Returns why rows are no rows of single examples: "" if they are."""
    rows = [k for k in kinds if k.dims]
    if rows and not isinstance(op, ReshapeOperation) and all(own > k.dims for k in rows):
        pairs = dims_text(sorted(own, key=lambda d: d.name))
        return f"{op.name} compares examples of a batch with each other ({pairs})"
    return next((k.why for k in rows if k.why), "")


def _reduced(op: Operation, kinds: Sequence[Kind]) -> Kind:
    """Returns the kind of what is reduced over the batch."""
    is_sum = isinstance(op, EinsumOperation) or (isinstance(op, ReduceOperation) and op._is_sum())
    # Of examples along different dimensions, it would be a sum over pairs of them.
    if is_sum and len({k.dims for k in kinds if k.dims}) == 1:
        return _SUM
    return Kind("unknown", why=f"{op.name} ({type(op).__name__}) is no sum or mean over the batch")


def _is_linear_slicewise(op: Operation) -> bool:
    """Returns whether it is a change of sign, of nothing, or of the dtype."""
    if not isinstance(op, SlicewiseOperation):
        return False
    x, y = op.inputs[0], op.outputs[0]
    to_number = is_cast(op) and is_differentiable(y.dtype) and not x.dtype.is_bool
    return to_number or op._tf_fn in (tf.negative, tf.identity)


def _number(x: Tensor) -> Optional[float]:
    """Returns the number that a Tensor is filled with; None if it is not known."""
    # A factor may be a constant, or made of one by a cast, a reciprocal or a change of shape.
    op = x.operation
    if isinstance(op, Constant):
        value = op._value
        return tf.get_static_value(value) if tf.is_tensor(value) else value
    if isinstance(op, ImportOperation):
        value = tf.get_static_value(op._tf_tensor)
        return float(value) if value is not None and not value.shape else None
    if not op.inputs:
        return None
    inner = _number(op.inputs[0])
    if inner is None:
        return None
    unary: Mapping[Any, Callable[[float], float]] = {
        tf.math.reciprocal: lambda v: 1.0 / v if v else float("inf"),
        tf.negative: lambda v: -v,
        tf.identity: lambda v: v,
    }
    if isinstance(op, SlicewiseOperation):
        return inner if is_cast(op) else unary[op._tf_fn](inner) if op._tf_fn in unary else None
    return inner if isinstance(op, (BroadcastOperation, ReshapeOperation)) else None


_EFFECTS = (Assign, ScalarSummaryOperation)
_MEND = (
    "Return (sum, weight), two scalars: a sum over the examples and what it is to be divided by; "
    "or make it by mtf.reduce_mean over the batch; or do without microbatches"
)


class InMicrobatches:
    """Values of the whole batch, of a model that a loop computes in microbatches.

    Attributes:
      number: the number of microbatches.
      outside: the operations that the model's are computed by outside of the loop.
    """

    def __init__(self, what: str, graph: Graph, batch_dim: Dimension, number: int):
        """Creates an InMicrobatches.

        Args:
          what: the function that is called, for messages.
          graph: the Graph.
          batch_dim: the Dimension of the batch.
          number: the number of microbatches.
        """
        self._what, self._graph, self.number = what, graph, number
        self._batch_dim = batch_dim
        self._begin = 0
        self._made: dict[Tensor, Operation] = {}
        self._order: dict[Operation, int] = {}
        self._effects: list[Operation] = []
        # What the loop sums, and the sums; of means, what they are to be multiplied by.
        self._summed: dict[Tensor, float] = {}
        self._totals: dict[Tensor, Tensor] = {}
        self._hoisted: set[Operation] = set()
        self._passed: dict[Tensor, Tensor] = {}
        self._later: set[Operation] = set()  # what is computed after the loop
        self.outside: list[Operation] = []

    # -- within the body of the loop

    def begin(self) -> None:
        """Notes where the body of the loop begins."""
        self._begin = len(self._graph.operations)

    def effects_are_built(self, rows: Iterable[Tensor]) -> None:
        """Does the same as `model_is_built`, if the model function assigns anything."""
        operations = self._graph.operations[self._begin :]
        # Without effects nobody asks for kinds, which refuse some models that a loop can do.
        if any(isinstance(op, _EFFECTS) for op in with_inner_operations(operations)):
            self.model_is_built(rows)

    def model_is_built(self, rows: Iterable[Tensor]) -> None:
        """Finds out about the operations of the model function, which come after `begin`.

        Args:
          rows: its inputs that are taken from the batch.

        Raises:
          ValueError: what it assigns is not known for the whole batch, or is read again.
        """
        operations = self._graph.operations[self._begin :]
        self._made = {y: op for op in operations for y in op.outputs}
        self._order = {op: i for i, op in enumerate(operations)}
        self._kinds = Kinds(self._batch_dim, self.number, rows)
        # Variables are the same for all microbatches, as any Tensor is that has no kind of its own.
        self._kinds.add(op for op in operations if not isinstance(op, Variable))
        self._effects = [op for op in operations if isinstance(op, _EFFECTS)]
        self._check_inner(operations)
        # A summary that is not known for the whole batch stays in the loop.
        self._effects = [
            op
            for op in self._effects
            if isinstance(op, Assign) or self._kinds[op.inputs[0]].name not in ("unknown", "rows")
        ]
        for op in self._effects:
            text = f"the summary {op.name}"
            if isinstance(op, Assign):
                text = f"what is assigned to {', '.join(v.name for v in op.variables)}"
            for x in op.inputs:
                self.want(x, text)

    def _check_inner(self, operations: Sequence[Operation]) -> None:
        """Raises ValueError for assignments in loops, and for reads after assignments."""
        assigned: set[Variable] = set()  # so far: a read before has the value of the beginning
        for op in with_inner_operations(operations):
            if isinstance(op, Assign):
                assigned.update(op.variables)
            if isinstance(op, Assign) and op not in self._effects:
                raise ValueError(
                    f"{self._what}: {op.name} assigns to {', '.join(v.name for v in op.variables)} "
                    "in a loop within the model function, which microbatches cannot do. Carry the "
                    "value through the loop, and assign after it"
                )
            reads = isinstance(op, ReadVariable) and op._var in assigned and not _is_first(op)
            if reads or any(d in self._effects for d in op.dependencies):
                raise ValueError(
                    f"{self._what}: {op.name} reads a variable after an assignment to it. In "
                    "microbatches, assignments are done once, after all of them. Compute with the "
                    "value that is assigned, or do without microbatches"
                )

    def want(self, y: Tensor, text: str) -> None:
        """Makes `value` return a Tensor's value of the whole batch, after the loop.

        Args:
          y: a Tensor of the model function.
          text: what it is, for messages.

        Raises:
          ValueError: it is not known.
        """
        kind = self._kinds[y]
        # Floating numbers have a mean over microbatches; that of drawn integers or booleans means
        # nothing.
        if kind.name == "drawn" and not is_differentiable(y.dtype):
            kind = Kind("unknown", why="each microbatch draws random numbers of its own")
        if kind.name in ("rows", "unknown"):
            why = kind.why or f"{y.name} {y.shape} has a value for each example"
            raise ValueError(
                f"{self._what}: {text} is not known for the whole batch from "
                f"{self.number} microbatches: {why}. {_MEND}"
            )
        if kind.name == "same":
            self._hoist(y)
        elif kind.name == "function":
            self._compute_later(y)
        else:
            self._summed[y] = 1.0 if kind.name == "sum" else 1.0 / self.number

    def _hoist(self, y: Tensor) -> None:
        """Moves the computation of what is the same for all microbatches out of the loop."""
        pending = [y]
        while pending:
            y = pending.pop()
            op = self._made.get(y)
            flat = op is None or all(self._kinds[x].name in _FLAT for x in op.inputs)
            if op is not None and op.has_effect and not flat:
                # It prints what only the loop has; outside, what it passes on stands for it.
                self._passed[y] = op.inputs[op.outputs.index(y)]
                pending.append(self._passed[y])
                continue
            # The loop leaves variables outside by itself.
            if op is not None and op not in self._hoisted and not isinstance(op, Variable):
                self._hoisted.add(op)
                # A loop is moved as a whole, together with what its body reads.
                for each in with_inner_operations([op]):
                    waits = [d for d in each.dependencies if isinstance(d, Tensor)]
                    pending += [*each.inputs, *(d for d in waits if self._kinds[d].name == "same")]

    def _compute_later(self, y: Tensor) -> None:
        """Computes a function of means and sums after the loop."""
        pending = [y]
        while pending:
            op = self._made[pending.pop()]
            if op in self._later:
                continue
            self._later.add(op)
            for x in op.inputs[: len(op.outputs)] if op.has_effect else op.inputs:
                # Back to the totals, which the loop sums, and to what is the same for all of them.
                if self._kinds[x].name == "function":
                    pending.append(x)
                else:
                    self.want(x, f"{x.name}, which is computed of a microbatch,")

    def terms(self, y: Tensor) -> list[Tensor]:
        """Returns the Tensors of a microbatch whose gradients make that of a wanted scalar."""
        if self._kinds[y].name != "function":
            return [y]
        terms: dict[Tensor, None] = {}
        pending, seen = [y], set()
        while pending:
            op = self._made[pending.pop()]
            if op in seen:
                continue
            seen.add(op)
            for x in op.inputs:
                # dy/dw is the sum over these terms S of dy/dS dS/dw; the loop sums dS/dw.
                if x in self._summed:
                    terms[x] = None
                elif self._kinds[x].name == "function":
                    pending.append(x)
        return [x for x in terms if is_differentiable(x.dtype)]

    @property
    def num_results(self) -> int:
        """The number of Tensors that `results` returns."""
        return len(self._summed)

    def share(self, term: Tensor) -> float:
        """Returns what the sum of a term over the microbatches is to be multiplied by."""
        return self._summed.get(term, 1.0 / self.number)

    def is_function(self, y: Tensor) -> bool:
        """Returns whether a Tensor is computed of means and sums after the loop."""
        return self._kinds[y].name == "function"

    def results(self) -> list[Tensor]:
        """Takes what is done outside out of the body; returns what the loop is to sum."""
        operations = self._graph.operations
        removed = self._hoisted.union(self._effects)
        passed = {y: x for op in self._effects for x, y in zip(op.inputs, op.outputs)}
        for op in with_inner_operations(operations[self._begin :]):
            if passed and op not in removed:
                # The outputs of a summary are its inputs; what reads them stays in the loop,
                # without it.
                op.replace_inputs(passed)
        for y, x in self._passed.items():
            while x in self._passed:
                x = self._passed[x]
            self._totals[y] = x
        self.outside = [op for op in operations[self._begin :] if op in self._hoisted]
        for op in with_inner_operations(self.outside):
            op.replace_inputs(self._totals)
        self._wait_for_nothing_of_the_loop(self.outside)
        operations[self._begin :] = [op for op in operations[self._begin :] if op not in removed]
        # Some may be inner values of a function with a custom gradient, as of a recomputed one.
        with usable([x.operation for x in self._summed]):
            return [_wide(x) for x in self._summed]

    def _wait_for_nothing_of_the_loop(self, operations: Sequence[Operation]) -> None:
        """Has operations that are computed outside of the loop not wait for what is inside."""
        # An order within a microbatch says nothing of what is computed once for all of them.
        inside = self._order.keys() - self._hoisted
        for op in with_inner_operations(operations):
            if isinstance(op, Depend):
                op.wait_less(lambda d: d in inside and not isinstance(d, Variable))

    # -- after the loop

    def finish(
        self, totals: Sequence[Tensor], loop: Operation, grads: Mapping[Tensor, Variable]
    ) -> None:
        """Computes values of the whole batch, and assigns them.

        Args:
          totals: the sums of `results`.
          loop: the loop.
          grads: those of its outputs that are gradients, with their Variables.
        """
        graph = self._graph
        assert isinstance(loop, WhileLoopOperation)
        loop.gradient_sums = {loop.outputs.index(g): v for g, v in grads.items()}
        at = graph.operations.index(loop)
        # Before the loop, which may read what was moved out of it.
        graph.operations[at:at] = self.outside
        for (x, share), total in zip(self._summed.items(), totals, strict=True):
            self._totals[x] = mtf.cast(total if share == 1.0 else total * share, x.dtype)
        later = sorted(self._later, key=self._order.__getitem__)
        # Copies, as what stays in the loop may read the originals, which are of one microbatch.
        clones, mapping = graph.clone_operations(readers_of(self._totals, later), self._totals)
        for clone in clones:
            clone.original = None  # it is no recomputation
        self._wait_for_nothing_of_the_loop(clones)
        self.outside = self.outside + clones
        self._totals.update(mapping)
        for op in self._effects:
            op._inputs = [self.value(x) for x in op.inputs]
        # Last, so that assignments follow all that reads their variables.
        graph.operations.extend(self._effects)

    def value(self, y: Tensor) -> Tensor:
        """Returns the value of the whole batch of a wanted Tensor."""
        return self._totals.get(y, y)


def _is_first(op: ReadVariable) -> bool:
    """Returns whether it takes the value of the beginning of the step."""
    return hasattr(op, "_after") and not op._after


def _wide(x: Tensor) -> Tensor:
    """Returns a Tensor in the dtype in which it is summed."""
    # Many microbatches summed in bfloat16 would lose the later ones to rounding.
    return mtf.to_float(x) if x.dtype.is_floating and x.dtype.size < 4 else x


def take_microbatch(x: Tensor, index: Tensor, dim: Dimension) -> Tensor:
    """Returns the entry of `x` at a scalar index along its last dimension."""
    shape = x.shape - dim
    return slicewise(
        lambda t, i: tf.gather(t, i, axis=len(shape)),
        [x, index],
        output_shape=shape,
        output_dtype=x.dtype,
        splittable_dims=shape.dims,
        # Features have no gradient; a gather in reverse would need a scatter for each microbatch.
        grad_function=lambda op, dy: [None, None],
        name="microbatch_input",
    )


def split_microbatches(
    x: Tensor, batch_dim: Dimension, small_dim: Dimension, micro_dim: Dimension
) -> Tensor:
    """Returns `x` with its batch split into microbatches, whose number is the last dimension."""
    x = mtf.reshape(x, mtf.replace_dimensions(x.shape, batch_dim, [small_dim, micro_dim]))
    # The number of the microbatch comes second, so that examples of one are not neighbours in the
    # batch: where processors split the batch, each has a part of every microbatch, and nothing
    # moves.
    last = (x.shape - micro_dim) + micro_dim
    return x if x.shape == last else mtf.transpose(x, last)


def one_at_a_time(number: int) -> dict[str, int]:
    """Returns arguments of `mtf.while_loop` for a loop over a number of microbatches."""
    # Microbatches depend on nothing but their index, so TensorFlow would begin with ten at once,
    # which takes the memory of ten. XLA has to know the number of iterations in advance.
    return {"maximum_iterations": number, "parallel_iterations": 1}


@leaves_no_node
def serialize_training_step(
    features: Mapping[str, Tensor],
    model_fn: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
    batch_dim: Dimension,
    num_splits: int,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Computes losses and gradients of a batch as a sequence of microbatches.

    Losses and gradients are summed over the microbatches, not averaged, in the dtypes that they
    have; mtf.optimize.accumulate_gradients sums in float32. Outputs that have the batch dimension
    are concatenated to the whole batch. Assignments in `model_fn` are done once, of the
    value of the whole batch: see mtf.optimize.accumulate_gradients.

    >>> x = mtf.ones(mesh, "batch:4,d:2")
    >>> def model_fn(features):
    ...     w = mtf.get_variable(mesh, "w", "d:2", initializer=tf.ones_initializer())
    ...     return {"loss": mtf.reduce_sum(features["x"] * w)}
    >>> grads, outputs = mtf.serialize_training_step({"x": x}, model_fn, x.shape.dims[0], 2)
    >>> print([g.shape for g in grads], outputs["loss"].shape)
    [Shape[d=2]] Shape[]

    Args:
      features: a dictionary of Tensors, each with `batch_dim`.
      model_fn: takes the features of one microbatch; returns a dictionary of Tensors that includes
        "loss", a scalar.
      batch_dim: a Dimension.
      num_splits: the number of microbatches.

    Returns:
      (gradients of the loss for `graph.trainable_variables`, a dictionary of outputs).

    Raises:
      ValueError: the batch size is not divisible by `num_splits`, a trainable variable has no
        gradient, or what is assigned is not known for the whole batch.
    """
    if batch_dim.size % num_splits:
        raise ValueError(
            f"serialize_training_step: {dims_text([batch_dim])} is not divisible by num_splits="
            f"{num_splits}; choose a divisor of {batch_dim.size}"
        )
    mesh = next(iter(features.values())).mesh
    graph = mesh.graph
    small_dim = Dimension(batch_dim.name, batch_dim.size // num_splits)
    micro_dim = Dimension("microbatch", num_splits)
    built: dict[str, Tensor] = {}  # what the model function returned for a microbatch
    prepared = {
        key: split_microbatches(x, batch_dim, small_dim, micro_dim) for key, x in features.items()
    }

    def to_whole(y: Tensor, index: Tensor) -> Tensor:
        # Loops can only sum further results, so each microbatch adds its rows at its own place, and
        # zeros elsewhere.
        if y.dtype.is_bool:  # there are no sums of booleans
            y = mtf.to_int32(y)
        place = mtf.one_hot(index, micro_dim, dtype=y.dtype)
        # After the examples, as in `split_microbatches`: the two become the batch again.
        at = y.shape.dims.index(small_dim) + 1
        shape = Shape(y.shape.dims[:at] + [micro_dim] + y.shape.dims[at:])
        return mtf.einsum([y, place], output_shape=shape)

    whole = InMicrobatches("serialize_training_step", graph, batch_dim, num_splits)

    def body(index: Tensor) -> list[Any]:
        whole.begin()
        small = {key: take_microbatch(x, index, micro_dim) for key, x in prepared.items()}
        outputs = model_fn(dict(small))
        whole.effects_are_built(list(small.values()))
        trainable = [v.value for v in graph.trainable_variables]
        # The loop sums them: they stay partial sums, which take one allreduce for all microbatches.
        grads = mtf.gradients([outputs["loss"]], trainable)
        missing = [v.name for v, g in zip(graph.trainable_variables, grads) if g is None]
        if missing:
            raise ValueError(
                f"serialize_training_step: no gradient reaches the trainable variables {missing}; "
                "make them with trainable=False, or use them in the loss"
            )
        # In a dictionary from outside, as a loop takes nothing but Tensors from its body.
        built.update(outputs)
        results = [to_whole(y, index) if small_dim in y.shape else y for y in built.values()]
        return [index + 1, *results, *grads, *whole.results()]

    results = mtf.while_loop(
        lambda index: mtf.less(index, num_splits),
        body,
        [mtf.constant(mesh, 0, dtype=tf.int32)],
        has_accumulators=True,
        **one_at_a_time(num_splits),
    )
    loop, count = results[0].operation, len(results) - whole.num_results
    # The first one is the number of microbatches that were counted.
    grads = results[1 + len(built) : count]
    whole.finish(results[count:], loop, dict(zip(grads, graph.trainable_variables)))
    results = results[1:count]
    outputs = {}
    for (name, small), y in zip(built.items(), results):
        if small_dim in small.shape:
            y = mtf.reshape(y, mtf.replace_dimensions(y.shape, [small_dim, micro_dim], batch_dim))
        outputs[name] = mtf.cast(y, small.dtype)
    return grads, outputs
