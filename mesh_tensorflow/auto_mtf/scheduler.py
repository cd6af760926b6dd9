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

    The ready operation that frees the most memory runs next.

    Args:
      names: the names of the operations.
      inputs: for each, the names of its inputs.
      outputs: for each, the names of its outputs.
      size: the bytes of each tensor.
      final: the names of the tensors that stay in memory until the end.

    Raises:
      ValueError: the operations depend on each other in a cycle.
    """
    # Operations that have not run yet, by what they read; the dictionaries serve as ordered sets.
    readers: dict[str, dict[int, None]] = {t: {} for t in size}
    for number, tensors in enumerate(inputs):
        for t in tensors:
            readers[t][number] = None
    maker = {t: number for number, ts in enumerate(outputs) for t in ts}
    missing = [{maker[t] for t in tensors} for tensors in inputs]
    # The bytes that an operation is known to free minus those that it allocates: what nobody reads
    # is freed at once, and does not count.
    balance = [-sum(size[t] for t in ts if readers[t] or t in final) for ts in outputs]
    ready: list[tuple[int, str, int]] = []

    def offer(number: int) -> None:
        # The largest balance runs next; ties are broken by name. A heap cannot change an entry, so
        # each change adds one. Balances only grow, so the newest one is popped first, and the
        # others are stale.
        heapq.heappush(ready, (-balance[number], names[number], number))

    def credit(t: str, counts_twice: bool) -> None:
        # The last one that reads a tensor frees it.
        (reader,) = readers[t]
        balance[reader] += size[t] * (inputs[reader].count(t) if counts_twice else 1)
        if not missing[reader]:
            offer(reader)

    for number in range(len(names)):
        if not missing[number]:
            offer(number)
    last_made_is_final = False
    schedule: dict[int, None] = {}
    while ready:
        _, _, number = heapq.heappop(ready)
        if number in schedule:
            continue
        schedule[number] = None
        for t in outputs[number]:
            last_made_is_final = t in final
            if len(readers[t]) == 1 and not last_made_is_final:
                # An operation that reads a tensor twice counts it twice, as in the classic
                # release, so that schedules and hence peak memory agree.
                credit(t, counts_twice=True)
        # An operation that takes a tensor twice is one reader of it.
        for t in dict.fromkeys(inputs[number]):
            del readers[t][number]
            # For the same reason, the last created tensor is tested, not this one.
            if len(readers[t]) == 1 and not last_made_is_final:
                credit(t, counts_twice=False)
        for reader in dict.fromkeys(r for t in outputs[number] for r in readers[t]):
            missing[reader].discard(number)
            if not missing[reader]:
                offer(reader)
    if len(schedule) < len(names):
        waiting = [n for number, n in enumerate(names) if missing[number]]
        raise ValueError(f"operations wait for each other, in a loop: {', '.join(waiting[:10])}")
    return list(schedule)


_ALGORITHMS: dict[str, Callable[[GraphInterface], Sequence[int]]] = {
    "NAIVE": lambda graph: range(graph.get_num_operations()),
    "LIST": _greedy,
}
