"""The optimum is that of brute force; the program does not grow with layers; errors."""

import itertools

import hypothesis
import hypothesis.strategies as st
import pulp
import pytest
from helpers.auto_mtf.program_graphs import build, two_products

import mesh_tensorflow as mtf
from mesh_tensorflow import auto_mtf
from mesh_tensorflow.auto_mtf import _program as program
from mesh_tensorflow.auto_mtf import layout_optimizer
from mesh_tensorflow.auto_mtf.layout_optimizer import LayoutOptimizer, SolverError
from mesh_tensorflow.auto_mtf.memory_estimator import MemoryEstimator

SIZES = {"a": 4, "b": 6, "c": 12, "d": 8}
LARGE = {"a": 4096, "b": 3 << 12, "c": 1 << 16, "d": 48}


def optimizer_of(graph, mesh_shape, outputs=(), joint=False):
    return LayoutOptimizer(MemoryEstimator(graph, mesh_shape, outputs), joint=joint)


def legal_layouts(graph, mesh_shape, joint=False):
    """Yields all layouts that are legal, found one dimension after the other."""
    validator = MemoryEstimator(graph, mesh_shape).get_layout_validator()
    together = [
        {n for t in op.inputs + op.outputs for n in t.shape.dimension_names}
        for op in graph.operations
    ]
    mesh_dims = list(validator.mesh_dimension_name_to_size)
    for count in range(2, len(mesh_dims) + 1) if joint else ():
        mesh_dims += map("+".join, itertools.combinations(mesh_shape_names(mesh_shape), count))
    layouts = [{}]
    for d in sorted(validator.splittable_mtf_dimension_names):
        if any(t.shape.dimension_names.count(d) > 1 for op in graph.operations for t in op.outputs):
            continue
        layouts += [
            {**layout, d: m}
            for layout in layouts
            for m in mesh_dims
            if validator.is_valid_assignment(d, m)
            and not any(d in s and any(meet(layout.get(o), m) for o in s) for s in together)
        ]
    return layouts


def mesh_shape_names(mesh_shape):
    return [d.name for d in mtf.convert_to_shape(mesh_shape) if d.size > 1]


def meet(one, other):
    """Whether a mesh dimension is in both of two names."""
    return one is not None and bool({*one.split("+")} & {*other.split("+")})


@st.composite
def programs(draw, sizes):
    """Draws operations and which tensors are outputs."""
    operations, tensors = [], []
    for i in range(draw(st.integers(1, 7))):
        inputs = draw(st.lists(st.sampled_from(tensors), max_size=3)) if tensors else []
        outputs = []
        for port in range(draw(st.sampled_from([1, 1, 1, 2, 0]))):
            dims = draw(st.lists(st.sampled_from(sorted(sizes)), max_size=3, unique=True))
            scale = draw(st.sampled_from([1, 1, 1, 5]))
            shape = ",".join(f"{d}:{sizes[d] * scale}" for d in dims)
            outputs.append([shape, draw(st.sampled_from(["float32", "bfloat16", "bool"]))])
            tensors.append(f"op{i}:{port}")
        unsplittable = draw(st.lists(st.sampled_from(sorted(sizes)), max_size=1)) if i == 0 else []
        operations.append([f"op{i}", inputs, outputs, unsplittable])
    final = draw(st.lists(st.sampled_from(tensors), unique=True)) if tensors else []
    return operations, final


MESHES = st.sampled_from(
    ["m:2", "m:4", "m:2,n:2", "m:4,n:2", "m:2,n:3", "m:2,n:2,o:2", "m:1,n:2", ""]
)


def check_against_brute_force(program, mesh_shape, tolerance=0.0, joint=False):
    operations, final = program
    graph, tensors = build(operations)
    optimizer = optimizer_of(graph, mesh_shape, [tensors[t] for t in final], joint)
    ranked = [
        (optimizer.evaluate_layout(";".join(f"{d}:{m}" for d, m in layout.items())), -len(layout))
        for layout in legal_layouts(graph, mesh_shape, joint)
    ]
    found = optimizer.solve()
    pairs = dict(piece.split(":") for piece in found.split(";") if piece)
    assert pairs in legal_layouts(graph, mesh_shape, joint)
    least, splits = min(ranked)
    assert least <= optimizer.evaluate_layout(found) <= least * (1 + tolerance)
    assert tolerance or -len(pairs) == splits


@pytest.mark.slow
@hypothesis.settings(max_examples=60)
@hypothesis.given(programs(SIZES), MESHES, st.booleans())
def test_brute_force(program, mesh_shape, joint):
    check_against_brute_force(program, mesh_shape, joint=joint)


@pytest.mark.slow
@hypothesis.settings(max_examples=30)
@hypothesis.given(programs(LARGE), MESHES)
def test_brute_force_of_large_tensors(program, mesh_shape):
    """Within what solvers can tell from zero."""
    check_against_brute_force(program, mesh_shape, tolerance=1e-6)


@pytest.mark.parametrize("name", program.available_solvers())
def test_solvers_agree(name, monkeypatch):
    monkeypatch.setattr(program, "available_solvers", lambda: [name])
    graph, outputs = two_products()
    optimizer = optimizer_of(graph, "m:4,n:2", outputs)
    assert optimizer.evaluate_layout(optimizer.solve()) == 104.0


def test_evaluate():
    graph, outputs = two_products()
    optimizer = optimizer_of(graph, "m:4,n:2", outputs)
    expected = {
        "": 480.0,
        "a:m": 408.0,
        "b:m": 200.0,
        "a:m;c:m": 120.0,
        "b:n, c:m": 104.0,
        "q:m": 480.0,
    }
    assert {text: optimizer.evaluate_layout(text) for text in expected} == expected
    assert optimizer.evaluate_layout(mtf.LayoutRules([("b", "n"), ("c", "m")])) == 104.0
    with pytest.raises(KeyError, match="the mesh has no dimension 'o'"):
        optimizer.evaluate_layout("a:o")
    with pytest.raises(ValueError, match="splits dimension 'a' over both 'm' and 'n'"):
        optimizer.evaluate_layout("a:m;a:n")
    with pytest.raises(ValueError, match=r"malformed layout 'a': 'a' is not a pair left:right"):
        optimizer.evaluate_layout("a")


def test_a_repeated_name_is_not_split():
    """A tensor cannot be split along two dimensions of one name; another one may be."""
    graph, _ = build([["x", [], [["a:4,a:8,b:4", "float32"]], []]])
    assert optimizer_of(graph, "m:4").solve() == "b:m"


def test_program_does_not_grow_with_layers():
    def layers(count):
        operations = [["x0", [], [["batch:8,d:16", "float32"]], []]]
        for i in range(count):
            operations += [
                [f"w{i}", [], [["d:16,h:32", "float32"]], []],
                [f"h{i}", [f"x{i}:0", f"w{i}:0"], [["batch:8,h:32", "float32"]], []],
                [f"x{i + 1}", [f"h{i}:0", f"w{i}:0"], [["batch:8,d:16", "float32"]], []],
            ]
        for i in reversed(range(count)):  # what a gradient reads
            operations.append(
                [f"g{i}", [f"h{i}:0", f"x{i}:0", f"w{i}:0"], [["d:16,h:32", "float32"]], []]
            )
        return build(operations)[0]

    sizes = {}
    for count in [3, 60]:
        optimizer = optimizer_of(layers(count), "m:4,n:2")
        assert optimizer.evaluate_layout(optimizer.solve()) < optimizer.evaluate_layout("d:m")
        sizes[count] = (optimizer._model.numVariables(), optimizer._model.numConstraints())
    assert sizes[60][0] == sizes[3][0]
    assert sizes[60][1] <= sizes[3][1] + 2


def test_variables_by_name():
    assert layout_optimizer._global_var_name("a", "m1") == "x_(a:m1)"
    assert layout_optimizer._local_var_name(frozenset(["b", "a"]), {"a": "m1"}) == "y_(a:m1,b)"
    assert layout_optimizer._generate_assignments({"a", "b"}, {"m": 2, "n": 4}) == [
        {},
        {"a": "m"},
        {"a": "n"},
        {"b": "m"},
        {"b": "n"},
        {"a": "m", "b": "n"},
        {"a": "n", "b": "m"},
    ]
    graph, outputs = two_products()
    optimizer = optimizer_of(graph, "m:4,n:2", outputs)
    names = {v.name for v in optimizer._model.variables()}
    assert {"x_(a:m)", "x_(b:n)", "y_(a,b:n)", "y_(a:m,c:n)", "z"} <= names
    assert "x_(b:m)" not in names  # 4 does not divide 6
    assert list(optimizer._graph.get_all_operation_names()) == ["X", "Y", "Z", "W"]


def test_names_that_solvers_would_confuse():
    graph, _ = build([["x", [], [["d-model:4,d_model:4,d/model:8", "float32"]], []]])
    assert optimizer_of(graph, "m:4").solve().endswith(":m")
    optimizer = optimizer_of(graph, "m:4,n:2,o:2")
    assert optimizer.evaluate_layout(optimizer.solve()) == 4 * 4 * 4 * 8 / 16


def test_print_solution(capsys):
    graph, outputs = two_products()
    optimizer_of(graph, "m:4,n:2", outputs).solve(print_solution=True)
    printed = capsys.readouterr().out
    assert "  x_(c:m) = 1\n" in printed and "  x_(a:m) = 0\n" in printed
    assert "Minimize: " in printed and "Objective value: -2" in printed
    with pytest.raises(TypeError, match="a CpModel of OR-Tools, but is"):
        auto_mtf.print_cp_model_solution.print_solution(graph, None)


@pytest.mark.parametrize(
    "objective, expected",
    [
        (lambda m, x, y: m.Minimize(3 * x - 2 * y + 7), "Minimize: 3*x - 2*y + 7\n -1"),
        (lambda m, x, y: m.Maximize(2 * x + y - 1), "Maximize: 2*x + 1*y - 1\n 5"),
        (lambda m, x, y: m.Maximize(0.5 * x + y), "Maximize: 0.5*x + 1*y\n 4.5"),
    ],
)
def test_print_solution_of_a_model_of_or_tools(objective, expected, capsys):
    """As programs for the classic, which had OR-Tools for its solver, could print theirs."""
    cp_model = pytest.importorskip("ortools.sat.python.cp_model", reason="needs ortools")
    model, solver = cp_model.CpModel(), cp_model.CpSolver()
    x, y = model.NewBoolVar("x"), model.NewIntVar(0, 4, "y")
    model.Add(x + y <= 4 + model.NewBoolVar(""))
    objective(model, x, y)
    assert solver.Solve(model) == cp_model.OPTIMAL
    auto_mtf.print_cp_model_solution.print_solution(model, solver)
    printed = capsys.readouterr().out
    text, value = expected.split("\n")
    assert f"  x = {solver.Value(x)}\n  y = {solver.Value(y)}\n{text}\n" in printed
    assert f"Objective value:{value} (CpSolver)" in printed


def test_errors(monkeypatch):
    graph, outputs = two_products()
    with pytest.raises(NotImplementedError, match="BEST is not a scheduler algorithm"):
        LayoutOptimizer(MemoryEstimator(graph, "m:2"), scheduler_alg="BEST")
    optimizer = optimizer_of(graph, "m:2", outputs)
    optimizer._model += optimizer._program._peak <= -1
    with pytest.raises(SolverError, match=r"found no optimum of the layout program.*Infeasible"):
        optimizer.solve()
    monkeypatch.setattr(program, "available_solvers", list)
    with pytest.raises(SolverError, match="pip install highspy"):
        optimizer.solve()
    assert issubclass(auto_mtf.layout_optimizer.SolverError, Exception)


def test_failing_solver():
    graph, outputs = two_products()
    solver = pulp.COIN_CMD(path="/nonexistent/cbc", msg=False)
    with pytest.raises(SolverError, match="failed"):
        optimizer_of(graph, "m:2", outputs)._program.least_memory(solver)
