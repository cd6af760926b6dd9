"""InMicrobatches: what a model computes and assigns in microbatches, as of the whole batch.

The loop over the microbatches sums what `Kinds` calls means and sums. What is computed of them, and
what is the same for all, is computed once, outside of the loop. An assignment in the model function
becomes one assignment after the loop, of the value of the whole batch: all microbatches read the
variable as it was at the beginning of the step, as everywhere.

An example: loss = reduce_sum(losses * mask) / reduce_sum(mask) + 0.01 * reduce_sum(square(w))

    in the loop       S += reduce_sum(losses * mask),  W += reduce_sum(mask),  dS/dw
    before the loop   R = reduce_sum(square(w))
    after the loop    loss = S / W + 0.01 * R,  dloss/dw = dloss/dS * dS/dw + dloss/dW * dW/dw + ...
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.graph import Graph
from mesh_tensorflow._core.operation import Operation, with_inner_operations
from mesh_tensorflow._core.shape import Dimension
from mesh_tensorflow._core.tensor import Tensor, is_differentiable
from mesh_tensorflow.ops._control.recompute import usable
from mesh_tensorflow.ops._debug import ScalarSummaryOperation
from mesh_tensorflow.ops._microbatches.kinds import Kinds
from mesh_tensorflow.ops._variables.assign import Assign, ReadVariable
from mesh_tensorflow.ops._variables.variable import Variable

__all__ = ["InMicrobatches"]

_EFFECTS = (Assign, ScalarSummaryOperation)
_MEND = (
    "Return (sum, weight), two scalars: a sum over the examples and what it is to be divided by; "
    "or make it by mtf.reduce_mean over the batch; or do without microbatches"
)


class InMicrobatches:
    """Values of the whole batch, of a model that a loop computes in microbatches."""

    def __init__(self, what: str, graph: Graph, batch_dim: Dimension, number: int):
        """Creates an InMicrobatches.

        Args:
          what: the function that is called, for messages.
          graph: the Graph.
          batch_dim: the Dimension of the batch.
          number: the number of microbatches.
        """
        self._what, self._graph, self._number = what, graph, number
        self._batch_dim = batch_dim
        self._begin = 0
        self._made: dict[Tensor, Operation] = {}
        self._order: dict[Operation, int] = {}
        self._effects: list[Operation] = []
        # What the loop sums, and the sums; of means, what they are to be multiplied by.
        self._summed: dict[Tensor, float] = {}
        self._totals: dict[Tensor, Tensor] = {}
        self._hoisted: set[Operation] = set()
        self._later: set[Operation] = set()  # what is computed after the loop
        self.outside: list[Operation] = []

    # -- within the body of the loop

    def begin(self) -> None:
        """Notes where the body of the loop begins."""
        self._begin = len(self._graph.operations)

    def effects_are_built(self, rows: Iterable[Tensor]) -> None:
        """Does the same as `model_is_built`, if the model function assigns anything."""
        operations = self._graph.operations[self._begin :]
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
        self._kinds = Kinds(self._batch_dim, self._number, rows)
        self._kinds.add(op for op in operations if not isinstance(op, Variable))
        self._effects = [op for op in operations if isinstance(op, _EFFECTS)]
        self._check_inner(operations)
        self._effects = [op for op in self._effects if self._can_be_made(op)]
        for op in self._effects:
            for x in op.inputs:
                self.want(x, self._value_text(op))

    def _value_text(self, op: Operation) -> str:
        if isinstance(op, Assign):
            return f"what is assigned to {', '.join(v.name for v in op.variables)}"
        return f"the summary {op.name}"

    def _can_be_made(self, op: Operation) -> bool:
        """Returns whether a summary is known for the whole batch; else it stays in the loop."""
        return isinstance(op, Assign) or self._kinds[op.inputs[0]].name not in ("unknown", "rows")

    def _check_inner(self, operations: Sequence[Operation]) -> None:
        """Raises ValueError for assignments in loops, and for reads after assignments."""
        assigned = {v for op in self._effects if isinstance(op, Assign) for v in op.variables}
        for op in with_inner_operations(operations):
            if isinstance(op, Assign) and op not in self._effects:
                raise ValueError(
                    f"{self._what}: {op.name} assigns to {', '.join(v.name for v in op.variables)} "
                    "in a loop within the model function, which microbatches cannot do. Carry the "
                    "value through the loop, and assign after it"
                )
            waits = [*getattr(op, "_dependencies", ()), *getattr(op, "_after", ())]
            reads = isinstance(op, ReadVariable) and op._var in assigned and not _is_first(op)
            if reads or any(d in self._effects for d in waits):
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
            kind = type(kind)("unknown", why="each microbatch draws random numbers of its own")
        if kind.name in ("rows", "unknown"):
            why = kind.why or f"{y.name} {y.shape} has a value for each example"
            raise ValueError(
                f"{self._what}: {text} is not known for the whole batch from "
                f"{self._number} microbatches: {why}. {_MEND}"
            )
        if kind.name == "same":
            self._hoist(y)
        elif kind.name == "function":
            self._compute_later(y)
        else:
            self._summed[y] = 1.0 if kind.name == "sum" else 1.0 / self._number

    def _hoist(self, y: Tensor) -> None:
        """Moves the computation of what is the same for all microbatches out of the loop."""
        pending = [y]
        while pending:
            op = self._made.get(pending.pop())
            if op is not None and op not in self._hoisted and not isinstance(op, Variable):
                self._hoisted.add(op)
                inner = [x for each in with_inner_operations([op]) for x in each.inputs]
                pending += [*op.inputs, *inner]

    def _compute_later(self, y: Tensor) -> None:
        """Computes a function of means and sums after the loop."""
        pending = [y]
        while pending:
            op = self._made[pending.pop()]
            if op in self._later:
                continue
            self._later.add(op)
            for x in op.inputs:
                if self._kinds[x].name == "function":
                    pending.append(x)
                else:
                    self.want(x, f"{x.name}, which is computed of a microbatch,")

    def terms(self, y: Tensor) -> list[Tensor]:
        """Returns the Tensors of a microbatch whose gradients make that of a wanted scalar."""
        if self._kinds[y].name != "function":
            return [y]
        found: dict[Tensor, None] = {}
        pending, seen = [y], set()
        while pending:
            op = self._made[pending.pop()]
            if op in seen:
                continue
            seen.add(op)
            for x in op.inputs:
                if x in self._summed:
                    found[x] = None
                elif self._kinds[x].name == "function":
                    pending.append(x)
        return [x for x in found if is_differentiable(x.dtype)]

    @property
    def num_results(self) -> int:
        """The number of Tensors that `results` returns."""
        return len(self._summed)

    def share(self, term: Tensor) -> float:
        """Returns what the sum of a term over the microbatches is to be multiplied by."""
        return self._summed.get(term, 1.0 / self._number)

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
        self.outside = [op for op in operations[self._begin :] if op in self._hoisted]
        operations[self._begin :] = [op for op in operations[self._begin :] if op not in removed]
        with usable([x.operation for x in self._summed]):
            return [_wide(x) for x in self._summed]

    # -- after the loop

    def finish(self, totals: Sequence[Tensor], loop: Operation) -> None:
        """Computes values of the whole batch, and assigns them.

        Args:
          totals: the sums of `results`.
          loop: the loop.
        """
        graph = self._graph
        at = graph.operations.index(loop)
        # Before the loop, which may read what was moved out of it.
        graph.operations[at:at] = self.outside
        for (x, share), total in zip(self._summed.items(), totals, strict=True):
            self._totals[x] = mtf.cast(total if share == 1.0 else total * share, x.dtype)
        later = sorted(self._later, key=self._order.__getitem__)
        clones, mapping = graph.clone_operations(later, self._totals)
        for clone in clones:
            clone.original = None  # it is no recomputation
        self.outside = self.outside + clones
        self._totals.update(mapping)
        for op in self._effects:
            op._inputs = [self.value(x) for x in op.inputs]
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
