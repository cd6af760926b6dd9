"""Numbers by which a reader judges the house, from the source alone.

python tests/helpers/readers_table.py [--package DIR]

Nothing of the package is imported, so that any version of it can be measured.
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import pathlib
import tokenize
from collections.abc import Iterator

__all__ = [
    "any_share",
    "circles",
    "comment_share",
    "files_of_folders",
    "import_share",
    "imports_below",
    "late_imports",
    "long_functions",
    "read",
    "rows",
    "undocumented",
]

MAX_FUNCTION_LINES = 60
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

Trees = dict[str, ast.Module]


def read(package: pathlib.Path) -> Trees:
    """Returns the syntax tree of each file of a package, by module path such as `ops/_random`."""
    return {
        str(path.relative_to(package).with_suffix("")): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(package.rglob("*.py"))
    }


def files_of_folders(trees: Trees) -> dict[str, int]:
    """Returns the number of files of each folder, the largest first."""
    counts = collections.Counter(name.rpartition("/")[0] or "." for name in trees)
    return dict(counts.most_common())


def _arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.arg]:
    named = function.args
    yield from (*named.posonlyargs, *named.args, *named.kwonlyargs)
    yield from filter(None, (named.vararg, named.kwarg))


def any_share(trees: Trees) -> float:
    """Returns the share of annotated arguments whose annotation is `Any`."""
    annotations = [
        ast.unparse(argument.annotation)
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, _FUNCTIONS)
        for argument in _arguments(node)
        if argument.annotation is not None
    ]
    return annotations.count("Any") / len(annotations)


def _code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Returns the number of lines with code: neither the docstring, nor comments and empty lines."""
    body = function.body if ast.get_docstring(function) is None else function.body[1:]
    lines: set[int] = set()
    for node in (inner for statement in body for inner in ast.walk(statement)):
        if hasattr(node, "lineno"):
            # What has statements of its own begins a line; they and its expressions add theirs.
            end = node.lineno if hasattr(node, "body") else node.end_lineno
            lines.update(range(node.lineno, (end or node.lineno) + 1))
    return len(lines)


def long_functions(trees: Trees, limit: int = MAX_FUNCTION_LINES) -> list[str]:
    """Returns functions whose body has more than `limit` lines, its docstring not counted."""
    return [
        f"{name}: {node.name} has {_code_lines(node)} lines"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, _FUNCTIONS) and _code_lines(node) > limit
    ]


def imports_below(node: ast.AST, late: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Yields (import statement, whether it is within a function), those for types alone left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, late
        yield from imports_below(child, late or isinstance(child, (*_FUNCTIONS, ast.Lambda)))


def _imported(node: ast.stmt) -> Iterator[str]:
    """Yields the names of the package's modules, or of what is in them, that a statement imports."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    yield from (name for name in names if name.startswith("mesh_tensorflow."))


def late_imports(trees: Trees) -> list[str]:
    """Returns the imports of the package's own modules within functions."""
    return [
        f"{name}: {ast.unparse(node)}"
        for name, tree in trees.items()
        for node, late in imports_below(tree)
        if late and any(_imported(node))
    ]


def circles(trees: Trees) -> list[list[str]]:
    """Returns modules that import each other in a circle, packages' `__init__` left out."""
    edges = {
        name: {
            target
            for node, late in imports_below(tree)
            for imported in ([] if late else _imported(node))
            for target in [imported.partition(".")[2].replace(".", "/")]
            if target in trees and target != name
        }
        for name, tree in trees.items()
        if not name.endswith("__init__")
    }
    found, done, active = [], set(), []

    def visit(name: str) -> None:
        if name in active:
            found.append([*active[active.index(name) :], name])
        if name in done or name in active or name not in edges:
            return
        active.append(name)
        for target in sorted(edges[name]):
            visit(target)
        active.pop()
        done.add(name)

    for name in edges:
        visit(name)
    return found


def _public(node: ast.AST) -> bool:
    return isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_")


def _is_overload(node: ast.AST) -> bool:
    texts = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
    return any(t.endswith((".setter", ".deleter", "overload")) for t in texts)


def _names(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, bool]]:
    """Yields (public name, whether it has a docstring) of a module's or a class's body."""
    for node in filter(_public, body):
        if _is_overload(node):
            continue
        name = f"{prefix}{node.name}"
        yield name, bool(ast.get_docstring(node))
        if isinstance(node, ast.ClassDef):
            yield from _names(node.body, f"{name}.")


def undocumented(trees: Trees) -> tuple[list[str], int]:
    """Returns the public names without a docstring of their own, and how many names there are.

    Public are functions, classes, methods, properties and nested classes without an underscore,
    those included that override what is documented elsewhere.
    """
    names = [
        (f"{module}: {name}", documented)
        for module, tree in trees.items()
        for name, documented in _names(tree.body, "")
    ]
    return [name for name, documented in names if not documented], len(names)


def comment_share(package: pathlib.Path) -> float:
    """Returns the share of comments among lines of code and of comments, docstrings left out."""
    code = comments = 0
    for path in package.rglob("*.py"):
        kinds: dict[int, set[int]] = {}
        statement_begins = True
        for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
            if token.type in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
                continue
            if token.type == tokenize.NEWLINE:
                statement_begins = True
            elif token.type == tokenize.COMMENT:
                kinds.setdefault(token.start[0], set()).add(token.type)
            elif not (token.type == tokenize.STRING and statement_begins):
                statement_begins = False
                for line in range(token.start[0], token.end[0] + 1):
                    kinds.setdefault(line, set()).add(tokenize.OP)
        code += len(kinds)
        comments += sum(tokenize.COMMENT in found for found in kinds.values())
    return comments / code


def import_share(package: pathlib.Path) -> float:
    """Returns the share of imports among the lines of files that are not blank."""
    lines = imports = 0
    for path in package.rglob("*.py"):
        text = path.read_text("utf-8")
        lines += sum(bool(line.strip()) for line in text.splitlines())
        imports += sum(
            (node.end_lineno or 0) - node.lineno + 1
            for node in ast.walk(ast.parse(text))
            if isinstance(node, (ast.Import, ast.ImportFrom))
        )
    return imports / lines


def rows(package: pathlib.Path) -> list[tuple[str, str, list[str]]]:
    """Returns labels, values and what is counted, of a package."""
    trees = read(package)
    folder, files = next(iter(files_of_folders(trees).items()))
    missing, names = undocumented(trees)
    long = long_functions(trees)
    loops = [" -> ".join(circle) for circle in circles(trees)]
    return [
        ("files", str(len(trees)), []),
        ("files in the largest folder", f"{files} ({folder})", []),
        ("lines that are imports", f"{import_share(package):.0%}", []),
        ("lines of code with a comment", f"{comment_share(package):.0%}", []),
        ("circles of module-level imports", str(len(loops)), loops),
        ("import statements within functions", str(len(late_imports(trees))), late_imports(trees)),
        ("`Any` among annotated arguments", f"{any_share(trees):.0%}", []),
        (f"functions over {MAX_FUNCTION_LINES} code lines", str(len(long)), long),
        ("public names with a docstring", f"{1 - len(missing) / names:.0%}", missing),
    ]


def main() -> None:
    """Prints the table, and what to look at."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = pathlib.Path(__file__).parents[2] / "mesh_tensorflow"
    parser.add_argument("--package", type=pathlib.Path, default=default, help="default: this one")
    parser.add_argument("--names", action="store_true", help="also names what is counted")
    arguments = parser.parse_args()
    for label, value, details in rows(arguments.package):
        print(f"| {label} | {value} |")
        for detail in details if arguments.names else []:
            print(f"    {detail}")


if __name__ == "__main__":
    main()
