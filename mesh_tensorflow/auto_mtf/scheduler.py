"""Scheduling of the operations of a graph for low peak memory."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence

from mesh_tensorflow.auto_mtf.graph_interface import GraphInterface

__all__ = ["minimize_peak_memory"]


def minimize_peak_memory(graph: GraphInterface, scheduler_alg: str) -> Sequence[int]:
    """Returns a schedule of the operations with low peak memory, as a list of indices.

    Args:
      graph: a GraphInterface.
      scheduler_alg: "NAIVE", the order of creation; or "LIST", a greedy list schedule, which at
        each step runs the operation that frees the most memory.

    Raises:
      NotImplementedError: `scheduler_alg` is unknown.
      ValueError: the operations depend on each other in a cycle.
    """
    if scheduler_alg not in _ALGORITHMS:
        raise NotImplementedError(
            f"{scheduler_alg} is not a scheduler algorithm. It should be one of "
            f"{' or '.join(_ALGORITHMS)}."
        )
    return _ALGORITHMS[scheduler_alg](graph)


def _as_made(graph: GraphInterface) -> Sequence[int]:
    return range(graph.get_num_operations())


def _greedy(graph: GraphInterface) -> Sequence[int]:
    names = list(graph.get_all_operation_names())
    tensors = list(graph.get_all_tensor_names())
    return list_schedule(
        names,
        [list(graph.get_operation_input_names(n)) for n in names],
        [list(graph.get_operation_output_names(n)) for n in names],
        {t: graph.get_tensor_size(t) for t in tensors},
        {t for t in tensors if graph.is_tensor_final(t)},
    )


def list_schedule(
    names: Sequence[str],
    inputs: Sequence[Sequence[str]],
    outputs: Sequence[Sequence[str]],
    size: Mapping[str, int],
    final: Collection[str],
) -> list[int]:
    """Returns a greedy list schedule of operations, as a list of indices.

    Args:
      names: the names of the operations.
      inputs: for each, the names of its inputs.
      outputs: for each, the names of its outputs.
      size: the bytes of each tensor.
      final: the names of the tensors that stay in memory until the end.

    Raises:
      ValueError: the operations depend on each other in a cycle.
    """
    run = _ListSchedule(names, inputs, outputs, size, final)
    while run.ready:
        run.step()
    if len(run.schedule) < len(names):
        waiting = [n for number, n in enumerate(names) if run.missing[number]]
        raise ValueError(f"operations wait for each other, in a loop: {', '.join(waiting[:10])}")
    return run.schedule


class _ListSchedule:
    """The state of a list schedule.

    Each operation has a balance: the bytes that it is known to free minus those that it
    allocates. The ready operation with the largest balance runs next; ties are broken by name.
    """

    def __init__(
        self,
        names: Sequence[str],
        inputs: Sequence[Sequence[str]],
        outputs: Sequence[Sequence[str]],
        size: Mapping[str, int],
        final: Collection[str],
    ):
        self.names, self.inputs, self.outputs = names, inputs, outputs
        self.size, self.final = size, final
        # Operations that have not run yet; the dictionaries serve as ordered sets.
        self.readers: dict[str, dict[int, None]] = {t: {} for t in size}
        for number, tensors in enumerate(inputs):
            for t in tensors:
                self.readers[t][number] = None
        maker = {t: number for number, ts in enumerate(outputs) for t in ts}
        self.missing = [{maker[t] for t in tensors} for tensors in inputs]
        # What nobody reads is freed at once, and does not count.
        self.balance = [
            -sum(size[t] for t in ts if self.readers[t] or t in final) for ts in outputs
        ]
        self.last_made_is_final = False
        self.schedule: list[int] = []
        self.done = [False] * len(names)
        self.ready: list[tuple[int, str, int]] = []
        for number, missing in enumerate(self.missing):
            if not missing:
                self._offer(number)

    def _offer(self, number: int) -> None:
        # A heap cannot change an entry, so each change adds one. Balances only grow, so the newest
        # one is popped first, and the others are stale.
        heapq.heappush(self.ready, (-self.balance[number], self.names[number], number))

    def _credit(self, number: int, size: int) -> None:
        self.balance[number] += size
        if not self.missing[number]:
            self._offer(number)

    def step(self) -> None:
        """Runs the next operation; skips stale entries of operations that have already run."""
        _, _, number = heapq.heappop(self.ready)
        if self.done[number]:
            return
        self.done[number] = True
        self.schedule.append(number)
        for t in self.outputs[number]:
            self.last_made_is_final = t in self.final
            if len(self.readers[t]) == 1 and not self.last_made_is_final:
                # An operation that reads a tensor twice counts it twice, as in the classic
                # release, so that schedules and hence peak memory agree.
                (reader,) = self.readers[t]
                self._credit(reader, self.size[t] * self.inputs[reader].count(t))
        # An operation that takes a tensor twice is one reader of it.
        for t in dict.fromkeys(self.inputs[number]):
            del self.readers[t][number]
            # For the same reason, the last created tensor is tested, not this one.
            if len(self.readers[t]) == 1 and not self.last_made_is_final:
                (reader,) = self.readers[t]
                self._credit(reader, self.size[t])
        self._release(number)

    def _release(self, number: int) -> None:
        for reader in dict.fromkeys(r for t in self.outputs[number] for r in self.readers[t]):
            self.missing[reader].discard(number)
            if not self.missing[reader]:
                self._offer(reader)


_ALGORITHMS: dict[str, Callable[[GraphInterface], Sequence[int]]] = {
    "NAIVE": _as_made,
    "LIST": _greedy,
}
