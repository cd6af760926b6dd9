"""Every case: values, gradients, all layouts, and communication as predicted."""

import zlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from cases import CASES, harness, table

import mesh_tensorflow as mtf

# Legal, hardly meant, and right all the same.
SLIPS = {
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
# Neighbouring float32 results differ by rounding only; bfloat16 has 8 bits.
TOLERANCE = {"float32": 1.0, "bfloat16": 3000.0, "int32": 1.0}


class Program:
    """A case as an mtf graph with gradients for random grad_ys, and its placeholders."""

    def __init__(self, case, dtype):
        self.case = case
        self.graph = mtf.Graph()
        self.mesh = mtf.Mesh(self.graph, "mesh")
        self.arrays = table.input_data(case, dtype)
        self.feed = {}
        self.xs = [
            self.fed(array, table.shape(spec.partition("/")[0]))
            for array, spec in zip(self.arrays, case.inputs, strict=True)
        ]
        self.ys = harness.as_list(case.build(*self.xs))
        self.wrt = self.differentiable()
        self.dys, self.grads = [], []
        if self.wrt:
            self.make_gradients()

    def fed(self, array, shape):
        if tf.executing_eagerly_outside_functions():
            return mtf.import_tf_tensor(self.mesh, tf.constant(array), shape)
        placeholder = tf.placeholder(tf.as_dtype(array.dtype), array.shape)
        self.feed[placeholder] = array
        return mtf.import_tf_tensor(self.mesh, placeholder, shape)

    def differentiable(self):
        if self.case.grads is not None:
            return [i for i in self.case.grads if self.xs[i].dtype.is_floating]
        if not any(y.dtype.is_floating for y in self.ys):
            return []
        return [i for i, x in enumerate(self.xs) if x.dtype.is_floating]

    def make_gradients(self):
        rng = np.random.default_rng(1)
        floating = [y for y in self.ys if y.dtype.is_floating]
        for y in floating:
            dtype = y.dtype.as_numpy_dtype
            self.dys.append(rng.normal(size=y.shape.to_integer_list).astype(dtype))
        grad_ys = [self.fed(dy, y.shape) for y, dy in zip(floating, self.dys)]
        self.grads = mtf.gradients(floating, [self.xs[i] for i in self.wrt], grad_ys=grad_ys)
        missing = [i for i, g in zip(self.wrt, self.grads) if g is None]
        assert not missing, f"no gradient reaches inputs {missing}"

    @property
    def targets(self):
        return self.ys + self.grads

    def run(self, placings):
        """Returns, for each placing, what became of the program, and the values."""
        lowered = [harness.lower(self.graph, self.mesh, p, self.targets) for p in placings]
        with harness.session() as session:
            values = session.run([low.exports for low in lowered], self.feed)
        return list(zip(lowered, values))


def directional(case, arrays, wrt, dys, direction, step):
    """Returns the derivative of the weighted sum of the oracle's outputs in a direction."""
    at = [table.wide(x) for x in arrays]

    def weighted(sign):
        moved = list(at)
        for i, v in zip(wrt, direction):
            moved[i] = at[i] + sign * step * v
        if case.surrogate is not None:
            ys = case.surrogate(*moved, at=at)
        else:
            ys = case.oracle(*moved)
        ys = [y for y in map(np.asarray, harness.as_list(ys)) if y.dtype == np.float64]
        return sum(np.sum(y * table.wide(dy)) for y, dy in zip(ys, dys, strict=True))

    return (weighted(1) - weighted(-1)) / (2 * step)


def check_gradients(program, grads):
    """Compares gradients with finite differences in random directions."""
    rng = np.random.default_rng(2)
    wide = [table.wide(g) for g in grads]
    for _ in range(3):
        direction = [rng.normal(size=g.shape) for g in wide]
        expected = directional(
            program.case, program.arrays, program.wrt, program.dys, direction, 1e-6
        )
        found = sum(np.sum(g * v) for g, v in zip(wide, direction))
        scale = np.sqrt(sum(np.sum(g * g) for g in wide)) + 1e-3
        assert abs(found - expected) < 2e-4 * scale, (found, expected)


@pytest.mark.parametrize("case, dtype", PARAMS)
def test_value_and_gradient(case, dtype, tf_graph):
    program = Program(case, dtype)
    [(_, values)] = program.run([harness.WHOLE])
    ys, grads = values[: len(program.ys)], values[len(program.ys) :]
    expected = harness.as_list(case.oracle(*[table.wide(x) for x in program.arrays]))
    tolerance = case.tolerance * TOLERANCE[dtype]
    for i, (y, e) in enumerate(zip(ys, expected, strict=True)):
        assert y.dtype == program.ys[i].dtype.as_numpy_dtype
        harness.assert_close(y, e, tolerance, f"output {i}")
    for i, g in zip(program.wrt, grads):
        assert g.shape == program.arrays[i].shape and g.dtype == program.arrays[i].dtype
    if dtype == "float32" and grads:
        check_gradients(program, grads)


def check_placings(program, placings, dtype):
    """Compares a program in several placings with the unsplit one, and what it communicates."""
    (_, expected), *rest = program.run([harness.WHOLE, *placings])
    tolerance = program.case.tolerance * TOLERANCE[dtype]
    for lowered, values in rest:
        for i, (value, e) in enumerate(zip(values, expected)):
            harness.assert_close(value, e, tolerance, f"{lowered.placing}, target {i}")
        assert lowered.counted == lowered.predicted, lowered.placing


@pytest.mark.parametrize("case, dtype", PARAMS)
def test_layouts(case, dtype, tf_graph):
    """A few layouts of each case, and of each two other kinds of meshes."""
    program = Program(case, dtype)
    placings = harness.placings(program.graph, case.whole, False, zlib.crc32(case.name.encode()))
    check_placings(program, placings if dtype == "float32" else placings[-2:], dtype)


@pytest.mark.slow
@pytest.mark.parametrize("case, dtype", PARAMS)
def test_all_layouts(case, dtype, tf_graph):
    program = Program(case, dtype)
    seed = zlib.crc32(case.name.encode())
    placings = harness.placings(program.graph, case.whole, case.thorough, seed)
    if dtype != "float32":
        placings = placings[:: max(1, len(placings) // 6)]
    placings.append(placings[seed % len(placings)]._replace(apart=False, merge="device"))
    check_placings(program, placings, dtype)


def chosen_placing(program, case):
    """Returns a placing that splits something, if there is one."""
    seed = zlib.crc32(case.name.encode())
    layouts = harness.legal_layouts(program.graph, "x:2,y:2", case.whole, limit=64)
    rules = layouts[seed % len(layouts)] if layouts else {}
    return harness.Placing("x:2,y:2", harness.layout_text(rules, "x:2,y:2"))


def lowered_here(case, dtype):
    """Builds and lowers a case where it is called; returns its values, and what they are."""
    program = Program(case, dtype)
    placing = chosen_placing(program, case)
    lowering = mtf.Lowering(program.graph, {program.mesh: placing.impl()})
    return [lowering.export_to_tf_tensor(t) for t in program.targets], program


def check_front_end(case, dtype, values, program):
    """Compares what a case gave without a session with the oracle, and its gradients."""
    tolerance = case.tolerance * TOLERANCE[dtype]
    values = [v.numpy() for v in values]
    ys, grads = values[: len(program.ys)], values[len(program.ys) :]
    expected = harness.as_list(case.oracle(*[table.wide(x) for x in program.arrays]))
    for i, (y, e) in enumerate(zip(ys, expected, strict=True)):
        harness.assert_close(y, e, tolerance, f"{case.name}, output {i}")
    if dtype == "float32" and grads:
        check_gradients(program, grads)


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
        check_front_end(*param.values, values, program)


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
        check_front_end(*param.values, values, program)
