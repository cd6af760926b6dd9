"""Counts the logits that attention by blocks computes when causal order hides some of the blocks.

Only `cost` uses it: the busiest processor decides about the time of a step.
"""

from __future__ import annotations

import functools

import numpy as np

__all__ = ["most_pairs"]


def _positions(part: int, parts: int, size: int, halves: bool) -> list[tuple[int, int]]:
    """Returns where the runs of positions of a part begin and end."""
    if not halves:
        return [(part * size, (part + 1) * size)]
    half = size // 2
    return [(i * half, (i + 1) * half) for i in (2 * part, 2 * parts - 1 - 2 * part)]


def _blocks(runs: list[tuple[int, int]], block: int) -> np.ndarray:
    """Returns the begins and the ends of the blocks of runs of positions, [blocks, 2]."""
    found = []
    for begin, end in runs:
        begins = np.arange(begin, end, block)
        found.append(np.stack([begins, np.minimum(begins + block, end)], 1))
    return np.concatenate(found)


@functools.lru_cache(1024)
def most_pairs(
    length: int,
    processors: int,
    part: int,
    blocks: tuple[int, int],
    halves: bool,
    earlier: bool,
) -> int:
    """Returns how many pairs of a query and a position the busiest processor computes.

    Blocks are computed whole, unless each of their queries is before all their positions of the
    memory, or after them. Ids are taken to be the positions.

    Args:
      length: how many queries there are, and positions of the memory.
      processors: how many parts the queries are split into.
      part: how many positions of the memory a processor has at a time.
      blocks: the numbers of positions of queries and of the memory in a block, none of which are of
        two parts, or of two halves of them.
      halves: whether parts have exchanged their second halves, as in a zigzag.
      earlier: whether queries see what is before them, instead of what is after.
    """
    size = length // processors
    # In turns of a ring, each processor has the blocks of every part once.
    turns = length // part
    whole = [run for p in range(turns) for run in _positions(p, turns, part, halves)]
    begins, ends = _blocks(whole, blocks[1]).T
    widths = ends - begins
    order = np.argsort(begins)
    begins, ends = begins[order], ends[order]
    # Widths of all blocks that begin before a position, so that each block of queries takes one
    # look-up.
    seen = np.concatenate([[0], np.cumsum(widths[order])])
    most = 0
    for p in range(processors):
        first, last = _blocks(_positions(p, processors, size, halves), blocks[0]).T
        if earlier:
            columns = seen[np.searchsorted(begins, last)]
        else:
            columns = length - seen[np.searchsorted(ends, first, side="right")]
        most = max(most, int(((last - first) * columns).sum()))
    return most
