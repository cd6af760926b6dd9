"""The order in which modules may import each other, and what every module has."""

import ast
import functools
import pathlib
from typing import NamedTuple

import pytest
from helpers import readers_table

import mesh_tensorflow

PACKAGE = pathlib.Path(mesh_tensorflow.__file__).parent  # which may be installed elsewhere
ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted(PACKAGE.rglob("*.py"))

# A part imports what stands before it, never what stands after or beside it.
ORDER = [
    ["_quiet", "_calls", "_replaced", "_units", "_gin_names"],
    [
        "utils",
        "_paths",
        "_progress",
        "_elements",
        "_stop_signals",
        "_pjrt",
    ],
    ["_core"],
    ["_watching", "_figure", "_huggingface"],
    ["_mesh", "_processes", "_programs"],
    ["placement_mesh_impl"],
    ["ops"],
    ["_lowering"],
    ["tpu_variables", "ops_with_redefined_builtins"],
    ["simd_mesh_impl", "test_utils", "launch"],
    ["debug"],
    ["layers", "schedules", "signal"],
    ["optimize", "beam_search"],
    ["checkpoint"],
    ["pjrt"],
    ["estimator"],
    ["auto_mtf"],
    ["visualize"],
    ["transformer"],
    ["train"],
    ["bert", "experimental", "testing", "report"],
    ["models"],
    ["finetune", "generate"],
    ["__main__"],
]
CORE_ORDER = [
    ["errors"],
    ["shape"],
    ["layout"],
    ["operation"],
    ["graph", "placement"],
]
# Rooms of _mesh: neither sees the other, and files outside of rooms see none of them but slices.
MESH_ORDER = [
    ["devices"],
    ["slice_functions"],
    ["random_values"],
    ["mesh_impl"],
    ["variables", "program"],
    ["step_inputs"],
    ["replicate", "tpu_program", "tpu_topology", "gspmd"],
]
# (module, what it imports): why it does so although the order forbids it.
AGAINST_THE_ORDER = {
    ("ops/__init__", "_lowering.lowering"): "mtf.Lowering and its kin are public names of ops",
    ("ops/__init__", "_lowering.values"): "gives Tensor its methods numpy, __float__ and so on",
    ("auto_mtf/gin_models", "transformer.utils"): "builds transformers; nothing imports it",
}
# Imports inside of functions, which are carried out when the function is called.
LATE = {
    ("_core/graph", "_lowering.rewrites"): "methods of Graph that rewrite the program",
}
MAX_ANY = 0.08  # of the arguments that are annotated


class Import(NamedTuple):
    """One import of a module of the package."""

    module: str
    target: str
    late: bool


def module_name(path):
    return str(path.relative_to(PACKAGE).with_suffix(""))


@functools.cache
def trees():
    return readers_table.read(PACKAGE)


def tree_of(path):
    return trees()[module_name(path)]


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


@functools.cache
def imports_of(path):
    return [
        Import(module_name(path), target, late)
        for node, late in readers_table.imports_below(tree_of(path))
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


def all_imports():
    return [imported for path in FILES for imported in imports_of(path)]


def listed(found):
    """Returns a line for each of what is found, for the message of a failure."""
    return "\n" + "\n".join(str(one) for one in found)


def test_import_order():
    wrong = [
        i
        for i in all_imports()
        if i.module != "__init__"
        and (i.module, i.target) not in (LATE if i.late else AGAINST_THE_ORDER)
        and (i.late or not allowed(i))
    ]
    assert not wrong, listed(wrong)


def imported_by_name(path):
    """Returns the modules of the package that importlib.import_module is called with."""
    calls = [n for n in ast.walk(tree_of(path)) if isinstance(n, ast.Call) and n.args]
    names = [n.args[0] for n in calls if ast.unparse(n.func).endswith("import_module")]
    values = [n.value for n in names if isinstance(n, ast.Constant)]
    return [v for v in values if v.split(".")[0] == "mesh_tensorflow"]


def test_what_needs_jax_has_one_door():
    """Used by what may import `pjrt`, by the order; imports by name are none that the order sees."""
    found = {module_name(path): imported_by_name(path) for path in FILES if imported_by_name(path)}
    # Names of the package itself that are imported when a program uses them.
    assert found.pop("__init__") == ["mesh_tensorflow.models"]
    assert found == {"_pjrt": ["mesh_tensorflow.pjrt"]}
    users = {i.module for i in all_imports() if i.target == "_pjrt"} - {"__init__"}
    wrong = [user for user in users if not allowed(Import(user, "pjrt", False))]
    assert users and not wrong, listed(wrong)


def test_estimators_have_a_public_door():
    """What is built on estimators takes nothing from their private files."""
    wrong = [
        i
        for i in all_imports()
        if i.target.startswith("estimator.")
        and any(part.startswith("_") for part in i.target.split("."))
        and not i.module.startswith("estimator/")
    ]
    assert not wrong, listed(wrong)


def test_every_part_has_its_place():
    parts = {module_name(path).split("/")[0] for path in FILES} - {"__init__"}
    assert parts <= {part for level in ORDER for part in level}
    for room, order in [("_core", CORE_ORDER), ("_mesh", MESH_ORDER)]:
        inner = {module_name(p).split("/")[1] for p in (PACKAGE / room).rglob("*.py")}
        assert inner - {"__init__"} == {name for level in order for name in level}


def test_page_of_modules_shows_the_order():
    page = (ROOT / "docs" / "design" / "modules.md").read_text(encoding="utf-8")
    shown = page.split("```text\n")[1].split("\n\n")[0]
    parts = [[part.strip() for part in step.split("|")] for step in shown.split("→")]
    assert [sorted(step) for step in parts] == [sorted(step) for step in ORDER]


@pytest.mark.slow
def test_page_of_numbers_says_what_the_script_prints():
    page = (ROOT / "docs" / "design" / "readers_table.md").read_text(encoding="utf-8")
    printed = [f"| {label} | {value} |" for label, value, _ in readers_table.rows(PACKAGE)]
    assert not [line for line in printed if line not in page]


def test_exceptions_are_all_in_use():
    found = {(i.module, i.target) for i in all_imports()}
    assert set(AGAINST_THE_ORDER) | set(LATE) <= found


def test_no_cycles():
    """Also not within one part, but for the files of `ops` that import `ops` as a whole."""
    found = [" -> ".join(circle) for circle in readers_table.circles(trees())]
    assert not found, listed(found)


def test_arguments_have_types():
    assert readers_table.any_share(trees()) <= MAX_ANY


def test_size_of_functions():
    long = readers_table.long_functions(trees())
    assert not long, listed(long)


def test_files_are_documented():
    bare = [module_name(path) for path in FILES if not ast.get_docstring(tree_of(path))]
    assert not bare, listed(bare)


def test_public_names_are_documented():
    """Methods that override others included."""
    bare, _ = readers_table.undocumented(trees())
    assert not bare, listed(bare)


def declares_all(path):
    """Whether a file declares `__all__`, or only joins others."""
    tree = tree_of(path)
    joins = all(isinstance(n, (ast.ImportFrom, ast.Import, ast.Expr)) for n in tree.body)
    declared = [
        target.id
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    ]
    return joins or "__all__" in declared


def is_public(path):
    return not any(part.startswith("_") for part in module_name(path).split("/"))


def test_public_modules_declare_all():
    silent = [module_name(p) for p in FILES if is_public(p) and not declares_all(p)]
    assert not silent, listed(silent)
