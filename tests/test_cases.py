"""Every case: values, gradients, layouts, and communication as predicted."""

import zlib

import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.cases import CASES
from mesh_tensorflow.testing.programs import TOLERANCE, Program, check_results

# Legal, hardly meant, and right all the same.
SLIPS = {
    "attention_ring_soft_cap",
    "einsum_broadcast_output",
    "einsum_broadcast_middle",
    "reshape_relabel_equal_sizes",
    "reshape_relabel_three",
}
PARAMS = [
    pytest.param(c, t, id=f"{c.name}-{t}", marks=[pytest.mark.slips] if c.name in SLIPS else [])
    for c in CASES
    for t in c.dtypes
]


def check_placings(program, placings, dtype):
    """Checks values and gradients, the same in several placings, and what is communicated there."""
    (_, expected), *rest = program.run([harness.WHOLE, *placings])
    check_results(program, dtype, expected)
    tolerance = program.case.tolerance * TOLERANCE[dtype]
    for lowered, values in rest:
        for i, (value, e) in enumerate(zip(values, expected)):
            harness.assert_close(value, e, tolerance, f"{lowered.placing}, target {i}")
        assert lowered.counted == lowered.predicted, lowered.placing


@pytest.mark.slow_but(180)
@pytest.mark.slow("attention_ring*", "while_accumulators_only*")
@pytest.mark.parametrize("case, dtype", PARAMS)
def test_layouts(case, dtype, tf_graph):
    """Values and gradients, in a few layouts and another kind of mesh; in other dtypes in one."""
    program = Program(case, dtype)
    placings = harness.placings(
        program.graph, case.whole, False, zlib.crc32(case.name.encode()), case.alike
    )
    check_placings(program, placings if dtype == "float32" else placings[-1:], dtype)


@pytest.mark.every("*bfloat16*", "attention_*", "while_*")
@pytest.mark.slow
@pytest.mark.parametrize("case, dtype", PARAMS)
def test_all_layouts(case, dtype, tf_graph):
    program = Program(case, dtype)
    seed = zlib.crc32(case.name.encode())
    placings = harness.placings(program.graph, case.whole, case.thorough, seed, case.alike)
    if dtype != "float32":
        placings = placings[:: max(1, len(placings) // 3)]
    placings.append(placings[seed % len(placings)]._replace(apart=False, merge="device"))
    check_placings(program, placings, dtype)


def chosen_placing(program, case):
    """Returns a placing that splits something, if there is one."""
    seed = zlib.crc32(case.name.encode())
    layouts = harness.legal_layouts(program.graph, "x:2,y:2", case.whole, 64, case.alike)
    rules = layouts[seed % len(layouts)] if layouts else {}
    return harness.Placing("x:2,y:2", harness.layout_text(rules, "x:2,y:2"))


def lowered_here(case, dtype):
    """Builds and lowers a case where it is called; returns its values, and what they are."""
    program = Program(case, dtype)
    placing = chosen_placing(program, case)
    lowering = mtf.Lowering(program.graph, {program.mesh: placing.impl()})
    return [lowering.export_to_tf_tensor(t) for t in program.targets], program


FRONT_END_BATCHES = [PARAMS[i::24] for i in range(24)]
FRONT_END_NUMBERS = [
    pytest.param(i, marks=[pytest.mark.slow] if i % 6 else [])
    for i in range(len(FRONT_END_BATCHES))
]


@pytest.mark.slips  # some cases are
@pytest.mark.parametrize("number", FRONT_END_NUMBERS)
def test_eagerly(number):
    """Each case in some layout, built and lowered in eager code."""
    for param in FRONT_END_BATCHES[number]:
        values, program = lowered_here(*param.values)
        check_results(program, param.values[1], [v.numpy() for v in values])


@pytest.mark.slow_but(1)
@pytest.mark.slips  # some cases are
@pytest.mark.parametrize("number", FRONT_END_NUMBERS)
def test_in_a_function(number, no_graph_rewriting):
    """The same, several cases in each tf.function, which is traced once."""
    programs = []

    @mtf.function
    def run():
        results = []
        for param in FRONT_END_BATCHES[number]:
            values, program = lowered_here(*param.values)
            results.append(values)
            programs.append(program)
        return results

    for param, values, program in zip(FRONT_END_BATCHES[number], run(), programs):
        check_results(program, param.values[1], [v.numpy() for v in values])
