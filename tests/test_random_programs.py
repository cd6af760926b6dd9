"""Random programs give the same outputs, gradients and updates in every layout."""

import pytest
from helpers import random_programs
from helpers.random_programs import (
    OPTIMIZERS,
    SHAPES,
    Program,
    check,
    placing_of,
    run,
    unless_refused,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.harness import Placing

pytestmark = pytest.mark.usefixtures("eight_devices")
INSTRUCTION = st.tuples(
    st.integers(0, len(random_programs.OPS) - 1),
    st.integers(0, 3),
    st.integers(0, 15),
    st.integers(0, 31),
)
PHASES = [Phase.generate, Phase.shrink]
IN_LAYOUTS = given(
    st.lists(INSTRUCTION, min_size=10, max_size=20),
    st.sampled_from(SHAPES),
    st.sampled_from(SHAPES),
    st.integers(0, 10**6),
)
FEW = st.lists(INSTRUCTION, min_size=4, max_size=12)
IN_ONE_LAYOUT = given(FEW, st.sampled_from(SHAPES), st.integers(0, 10**6))


@unless_refused
def check_layouts(instructions, first_mesh, second_mesh, seed):
    program = Program(instructions)
    expected = run(program)
    kinds = [
        {"merge": ["none", "memory"][seed % 2]},
        {"apart": True, "merge": "device", "pairs": seed % 3 == 0},
    ]
    for mesh, kind in zip((first_mesh, second_mesh), kinds):
        check(program, placing_of(program, mesh, seed, **kind), expected)


@unless_refused
def check_recomputed(instructions, mesh, seed):
    """Values that are computed again for a gradient are the same, and so are the gradients."""
    expected = run(Program(instructions, keeps_state=False))
    program = Program(instructions, recompute=True)
    for placing in (harness.WHOLE, placing_of(program, mesh, seed)):
        check(program, placing, expected)


@unless_refused
def check_microbatches(instructions, mesh, seed):
    """A loop over parts of a batch adds up the same in every layout."""
    program = Program(instructions, microbatches=2)
    check(program, placing_of(program, mesh, seed, simd=True), run(program))


@unless_refused
def check_stored(instructions, mesh, seed):
    """Variables and slots that are stored in parts change alike."""
    program = Program(instructions, optimizer=sorted(OPTIMIZERS)[seed % len(OPTIMIZERS)])
    kind = {"zero": 1 + seed % 3, "zero_axis": "x", "simd": bool(seed & 1)}
    check(program, placing_of(program, mesh, seed, **kind), run(program))


test_some_layouts = settings(max_examples=2, phases=PHASES)(IN_LAYOUTS(check_layouts))
test_some_recomputed = pytest.mark.slow(
    settings(max_examples=3, phases=PHASES)(IN_ONE_LAYOUT(check_recomputed))
)
test_some_microbatches = pytest.mark.slow(
    settings(max_examples=2, phases=PHASES)(IN_ONE_LAYOUT(check_microbatches))
)
test_some_stored = pytest.mark.slow(
    settings(max_examples=3, phases=PHASES)(IN_ONE_LAYOUT(check_stored))
)


@pytest.mark.every
@pytest.mark.slow
@settings(max_examples=20, phases=PHASES)
@IN_LAYOUTS
def test_any_layout(instructions, first_mesh, second_mesh, seed):
    check_layouts(instructions, first_mesh, second_mesh, seed)


@pytest.mark.slow
@settings(max_examples=8, phases=PHASES)
@IN_ONE_LAYOUT
def test_recomputed(instructions, mesh, seed):
    check_recomputed(instructions, mesh, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
@unless_refused
def test_drawn(seed):
    """What run_random_programs.py runs."""
    program, placings = random_programs.drawn(seed)
    expected = run(program)
    for placing in placings:
        check(program, placing, expected)


# Programs that were found to differ, or to end, by run_random_programs.py.
FOUND = {
    "gradients of microbatches, of which nothing reads the whole": (
        Program([], microbatches=2, inputs=(0, 4)),
        Placing("x:2", "a:x,d:x", merge="memory", zero=2, zero_axis="x"),
    ),
    "a ring within a loop, of merged processors": (
        Program([(37, 3, 3, 11)], microbatches=2),
        Placing("x:3", "d:x,n1:x", merge="memory"),
    ),
    "attention of rows that one axis splits, over a memory that two do": (
        Program(
            [(34, 2, 14, 15), (34, 0, 8, 2), (33, 3, 13, 30), (10, 2, 11, 7), (7, 3, 7, 28)]
            + [(4, 3, 11, 26), (18, 2, 2, 10), (11, 3, 15, 8), (37, 3, 0, 2)],
            variables=(1, 3),
        ),
        Placing("x:2,y:2", "a:x,b:y,d:y,n4:y+x"),
    ),
    "axes of one processor that are joined in two orders": (
        Program([(37, 0, 6, 7)], variables=(2,)),
        Placing("x:1,y:4", "d:x+y,n1:y+x", merge="memory"),
    ),
    "a function of TensorFlow, of weights that are stored in parts": (
        Program(
            [(33, 2, 4, 31), (10, 0, 0, 10), (23, 1, 7, 26), (1, 2, 8, 11), (14, 3, 14, 30)]
            + [(34, 0, 6, 6), (34, 2, 14, 26)]
        ),
        Placing("x:4", "d:x,e:x,n2:x", apart=True, merge="device", zero=1, zero_axis="x"),
    ),
    "a function of TensorFlow, of weights that are stored in parts, in SIMD": (
        Program([(33, 3, 15, 10), (28, 2, 5, 0), (8, 2, 10, 6), (2, 2, 6, 20)]),
        Placing("x:4", "a:x,e:x", simd=True, zero=1, zero_axis="x"),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_found(name):
    program, placing = FOUND[name]
    check(program, placing, run(program))
