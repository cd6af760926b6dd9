"""The order in which modules may import each other, and limits of size and documentation."""

import ast
import importlib
import inspect
import pathlib
from typing import NamedTuple

import pytest

import mesh_tensorflow

PACKAGE = pathlib.Path(mesh_tensorflow.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# A part imports what stands before it, never what stands after or beside it.
ORDER = [
    ["utils", "_flags"],
    ["_core"],
    ["_mesh", "_processes"],
    ["ops"],
    ["_lowering"],
    ["placement_mesh_impl", "tpu_variables", "ops_with_redefined_builtins"],
    ["simd_mesh_impl", "test_utils", "launch"],
    ["layers"],
    ["optimize", "beam_search", "checkpoint"],
    ["estimator"],
    ["auto_mtf", "transformer"],
    ["bert", "experimental", "testing"],
]
CORE_ORDER = [
    ["strictness"],
    ["errors", "tables"],
    ["dimension"],
    ["shape"],
    ["layout", "processors", "cost"],
    ["tensor", "loop", "interfaces"],
    ["operation"],
    ["graph", "pending"],
]
# Rooms of _mesh: neither sees the other, and files outside of rooms see none of them but slices.
MESH_ORDER = [
    ["constants", "devices", "laid_out", "laid_out_variable", "parallel", "program", "reducer"],
    ["mesh_pair"],
    ["slices"],
    ["mesh_impl"],
    ["variables"],
    ["placement", "simd", "tpu"],
]
# (module, what it imports): why it does so although the order forbids it.
AGAINST_THE_ORDER = {
    ("ops/__init__", "_lowering.counters"): "mtf.Lowering and its kin are public names of ops",
    ("ops/__init__", "_lowering.lowering"): "mtf.Lowering and its kin are public names of ops",
    ("auto_mtf/gin_models", "transformer.utils"): "builds transformers; nothing imports it",
}
# Imports inside of functions, which are carried out when the function is called.
LATE = {
    ("_core/graph", "_lowering.stack_variables"): "methods of Graph that rewrite the program",
    ("auto_mtf/explanation", "auto_mtf._time.plot"): "needs matplotlib, which is an extra",
}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


class Import(NamedTuple):
    """One import of a module of the package."""

    module: str
    target: str
    late: bool


def module_name(path):
    return str(path.relative_to(PACKAGE).with_suffix(""))


def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports_below(node, late=False):
    """Yields (import node, whether it is inside of a function)."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            continue
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, late
        inner = late or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from imports_below(child, inner)


def targets(node):
    """Returns the modules of the package that an import node names, without its name."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        assert node.level == 0, f"relative import: {ast.unparse(node)}"
        names = [node.module]
        # `from package import module` names the module.
        names += [
            f"{node.module}.{alias.name}"
            for alias in node.names
            if is_module(f"{node.module}.{alias.name}")
        ]
        if len(names) > 1:
            names = names[1:]
    inside = [n for n in names if n == "mesh_tensorflow" or n.startswith("mesh_tensorflow.")]
    return [n[len("mesh_tensorflow") :].lstrip(".") for n in inside]


def is_module(name):
    if not name.startswith("mesh_tensorflow."):
        return False
    path = PACKAGE.joinpath(*name.split(".")[1:])
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imports_of(path):
    return [
        Import(module_name(path), target, late)
        for node, late in imports_below(parse(path))
        for target in targets(node)
    ]


def rank(order, part):
    return next(i for i, parts in enumerate(order) if part in parts)


def allowed(imported):
    """Whether the order allows an import."""
    part = imported.module.split("/")[0]
    if not imported.target:
        # The package itself: only what is built on the whole language.
        return rank(ORDER, part) > rank(ORDER, "simd_mesh_impl") or part == "test_utils"
    target_part = imported.target.split(".")[0]
    if part == target_part == "_core":
        own = imported.module.split("/")[1]
        return rank(CORE_ORDER, imported.target.split(".")[1]) < rank(CORE_ORDER, own)
    if part == target_part == "_mesh":
        own, other = imported.module.split("/")[1], imported.target.split(".")[1]
        return own == other or rank(MESH_ORDER, other) < rank(MESH_ORDER, own)
    if part == target_part:
        return True
    return rank(ORDER, target_part) < rank(ORDER, part)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_import_order(path):
    if module_name(path) == "__init__":
        return
    for imported in imports_of(path):
        if imported.late:
            assert (imported.module, imported.target) in LATE, imported
        elif (imported.module, imported.target) not in AGAINST_THE_ORDER:
            assert allowed(imported), imported


def test_estimators_have_a_public_door():
    """What is built on estimators takes nothing from their private files."""
    for path in FILES:
        for imported in imports_of(path):
            if imported.target.startswith("estimator."):
                private = any(part.startswith("_") for part in imported.target.split("."))
                assert not private or imported.module.startswith("estimator/"), imported


def test_every_part_has_its_place():
    parts = {module_name(path).split("/")[0] for path in FILES} - {"__init__"}
    assert parts <= {part for level in ORDER for part in level}
    for room, order in [("_core", CORE_ORDER), ("_mesh", MESH_ORDER)]:
        inner = {module_name(p).split("/")[1] for p in (PACKAGE / room).rglob("*.py")}
        assert inner - {"__init__"} == {name for level in order for name in level}


def test_exceptions_are_all_in_use():
    found = {(i.module, i.target) for path in FILES for i in imports_of(path)}
    assert set(AGAINST_THE_ORDER) | set(LATE) <= found


def test_no_cycles():
    """Also not within one part, but for the files of `ops` that import `ops` as a whole."""
    edges = {}
    for path in FILES:
        name = module_name(path).removesuffix("/__init__")
        if path.name == "__init__.py":
            continue
        edges[name] = {
            i.target.replace(".", "/") for i in imports_of(path) if not i.late and i.target
        }
    done, active = set(), []

    def visit(name):
        assert name not in active, " -> ".join([*active, name])
        if name in done or name not in edges:
            return
        active.append(name)
        for target in sorted(edges[name]):
            visit(target)
        active.pop()
        done.add(name)

    for name in edges:
        visit(name)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_size(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES, f"{lines} lines"
    for node in ast.walk(parse(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            code = node.body if ast.get_docstring(node) is None else node.body[1:]
            length = node.end_lineno - code[0].lineno + 1 if code else 0
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


def imported_module(path):
    name = ".".join(["mesh_tensorflow", *path.relative_to(PACKAGE).with_suffix("").parts])
    return importlib.import_module(name.removesuffix(".__init__"))


def undocumented(module):
    """Yields public classes, functions and methods without a docstring, their own or inherited."""
    for name, thing in vars(module).items():
        if name.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(thing) and not inspect.getdoc(thing):
            yield name
        if inspect.isclass(thing):
            methods = [
                m
                for m, value in vars(thing).items()
                if not m.startswith("_") and (callable(value) or isinstance(value, property))
            ]
            yield from (f"{name}.{m}" for m in methods if not inspect.getdoc(getattr(thing, m)))
            if not vars(thing).get("__doc__"):
                yield name


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_documented(path):
    assert ast.get_docstring(parse(path)), "no docstring"
    assert list(undocumented(imported_module(path))) == []


@pytest.mark.parametrize("path", [p for p in FILES if p.name != "__init__.py"], ids=module_name)
def test_all_is_declared(path):
    """Public names by `__all__`; modules that only join others have none."""
    tree = parse(path)
    joins = all(isinstance(n, (ast.ImportFrom, ast.Import, ast.Expr)) for n in tree.body)
    declared = [
        target.id
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    ]
    assert joins or "__all__" in declared
