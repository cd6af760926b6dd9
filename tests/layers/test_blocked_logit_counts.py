"""How many logits the busiest processor computes: as by going through all blocks."""

import itertools

import pytest

from mesh_tensorflow.layers._blocked_operation import most_pairs


def parts_of(count, size, halves):
    """Returns the runs of positions of each part."""
    if not halves:
        return [[range(i * size, (i + 1) * size)] for i in range(count)]
    half = size // 2
    runs = [range(i * half, (i + 1) * half) for i in range(2 * count)]
    return [[runs[2 * i], runs[2 * count - 1 - 2 * i]] for i in range(count)]


def blocks_of(runs, block):
    """Returns the positions of blocks of a part, whose runs stand one after the other."""
    part = list(itertools.chain(*runs))
    return [part[i : i + block] for i in range(0, len(part), block)]


def by_hand(length, processors, part, blocks, halves, earlier):
    queries = parts_of(processors, length // processors, halves)
    memory = parts_of(length // part, part, halves)
    columns_of_all = [b for runs in memory for b in blocks_of(runs, blocks[1])]
    found = []
    for runs in queries:
        pairs = itertools.product(blocks_of(runs, blocks[0]), columns_of_all)
        found.append(
            sum(
                len(rows) * len(columns)
                for rows, columns in pairs
                if any(i >= j if earlier else i <= j for i in rows for j in columns)
            )
        )
    return max(found)


@pytest.mark.parametrize("earlier", [True, False])
@pytest.mark.parametrize("length, processors, part, halves", [
    (13, 1, 13, False), (24, 3, 8, False), (24, 3, 24, False), (24, 3, 8, True), (24, 2, 12, True),
    (1, 1, 1, False),
])  # fmt: skip
def test_as_by_hand(length, processors, part, halves, earlier):
    """Blocks that divide nothing, in parts of a ring and in a memory that is whole."""
    for blocks in [(1, 1), (3, 5), (4, 3), (5, 2), (6, 8)]:
        arguments = length, processors, part, blocks, halves, earlier
        assert most_pairs(*arguments) == by_hand(*arguments), arguments


def test_about_half_of_fine_blocks():
    n = 4096
    for halves, processors, share in [(False, 1, 1), (True, 8, 1 / 8), (False, 8, 15 / 64)]:
        found = most_pairs(n, processors, n // processors, (8, 8), halves, True)
        assert found / n**2 == pytest.approx(share / 2, rel=0.01)
