"""Orders in which to run the operations of a graph, so that they need little memory."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from mesh_tensorflow.auto_mtf.graph_interface import GraphInterface

__all__ = ["minimize_peak_memory"]


def minimize_peak_memory(graph: GraphInterface, scheduler_alg: str) -> Sequence[int]:
    """Returns the numbers of the operations in an order that needs little memory.

    Args:
      graph: a GraphInterface.
      scheduler_alg: "NAIVE", the order in which they were made, or "LIST", at each step the
        operation that makes memory smallest.

    Raises:
      NotImplementedError: another `scheduler_alg`.
      ValueError: some operations wait for each other.
    """
    if scheduler_alg not in _ALGORITHMS:
        raise NotImplementedError(
            f"{scheduler_alg} is not a scheduler algorithm. It should be one of "
            f"{' or '.join(_ALGORITHMS)}."
        )
    return _ALGORITHMS[scheduler_alg](graph)


def _as_made(graph: GraphInterface) -> Sequence[int]:
    return range(graph.get_num_operations())


def _list_schedule(graph: GraphInterface) -> Sequence[int]:
    run = _ListSchedule(graph)
    while run.ready:
        run.step()
    if len(run.schedule) < len(run.names):
        waiting = [n for number, n in enumerate(run.names) if run.missing[number]]
        raise ValueError(f"operations wait for each other, in a loop: {', '.join(waiting[:10])}")
    return run.schedule


class _ListSchedule:
    """The state of a list schedule.

    Each operation has a balance: the bytes that it is known to free less those that it takes.
    Of those that are ready the one with the largest balance is next, and of several that
    whose name comes first.
    """

    def __init__(self, graph: GraphInterface):
        self.graph = graph
        self.names = list(graph.get_all_operation_names())
        self.inputs = [list(graph.get_operation_input_names(n)) for n in self.names]
        self.outputs = [list(graph.get_operation_output_names(n)) for n in self.names]
        self.size = {t: graph.get_tensor_size(t) for t in graph.get_all_tensor_names()}
        # Those that have yet to run; the dictionaries serve as ordered sets.
        self.readers: dict[str, dict[int, None]] = {t: {} for t in self.size}
        for number, tensors in enumerate(self.inputs):
            for t in tensors:
                self.readers[t][number] = None
        maker = {t: number for number, ts in enumerate(self.outputs) for t in ts}
        self.missing = [{maker[t] for t in tensors} for tensors in self.inputs]
        self.balance = [
            -sum(self.size[t] for t in ts if self.readers[t] or graph.is_tensor_final(t))
            for ts in self.outputs
        ]
        self.last_made_is_final = False
        self.schedule: list[int] = []
        self.done = [False] * len(self.names)
        self.ready: list[tuple[int, str, int]] = []
        for number, missing in enumerate(self.missing):
            if not missing:
                self._offer(number)

    def _offer(self, number: int) -> None:
        heapq.heappush(self.ready, (-self.balance[number], self.names[number], number))

    def _credit(self, number: int, size: int) -> None:
        self.balance[number] += size
        if not self.missing[number]:
            self._offer(number)

    def step(self) -> None:
        """Runs the next operation, if its entry is not an old one of an operation that ran."""
        _, _, number = heapq.heappop(self.ready)
        if self.done[number]:
            return
        self.done[number] = True
        self.schedule.append(number)
        for t in self.outputs[number]:
            self.last_made_is_final = self.graph.is_tensor_final(t)
            if len(self.readers[t]) == 1 and not self.last_made_is_final:
                # An operation that reads a tensor twice counts it twice, as in the classic:
                # peaks of memory are to agree, and so must the schedule.
                (reader,) = self.readers[t]
                self._credit(reader, self.size[t] * self.inputs[reader].count(t))
        for t in dict.fromkeys(self.inputs[number]):
            del self.readers[t][number]
            # For the same reason, what counts is the tensor made last, not this one.
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
    "LIST": _list_schedule,
}
