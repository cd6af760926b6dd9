"""Collects the messages of all errors that the package raises, for the index of messages.

`python docs/error_messages.py` prints them. docs/errors_index.md says with `<!-- messages: ... -->`
which folders and modules belong to which subject; `fill_in` puts the messages there when the site
is built, so that the index cannot differ from the source. Slips, which are warnings or errors, are
messages too.
"""

from __future__ import annotations

import ast
import functools
import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Optional

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mesh_tensorflow"
MARKER = re.compile(r"^<!-- messages: (?P<places>[^>]*?) -->$", re.M)
REST = "*"  # the place of all that no other marker names
# What a message has in place of a value: a character that no message has otherwise.
VALUE = "\N{HORIZONTAL ELLIPSIS}"
SLIP = "MeshTensorFlowWarning"
_DEEP = 6  # how far a text is followed through names and functions


class Message(NamedTuple):
    """One message: its text with `VALUE` in place of values, and what raises it."""

    text: str
    error: str
    module: str
    function: str
    line: int


class _File:
    """A module's syntax tree, and its functions by name."""

    def __init__(self, path: Path):
        self.module = path.relative_to(PACKAGE).with_suffix("").as_posix()
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.functions = {
            node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)
        }


class _Reader:
    """Finds the texts of errors, also of those that other functions write."""

    def __init__(self) -> None:
        self.files = [_File(path) for path in sorted(PACKAGE.rglob("*.py"))]
        self.functions = {name: f for file in self.files for name, f in file.functions.items()}

    def messages(self) -> Iterator[Message]:
        for file in self.files:
            for scope, call in _errors(file.tree):
                if _last_name(call.func) == "slip":
                    error, text = SLIP, _tidy(self.text(call.args[0], file, scope))
                else:
                    error, text = self.raised(call, file, scope)
                yield Message(text, error, file.module, scope_name(scope), call.lineno)

    def raised(self, call: ast.Call, file: _File, scope: list[ast.AST]) -> tuple[str, str]:
        """Returns the name of the class of an error, and its text."""
        name = _last_name(call.func)
        if name[:1].isupper():
            text = self.text(call.args[0], file, scope) if call.args else ""
            return name, _tidy(text)
        maker = file.functions.get(name) or self.functions.get(name)
        for value in _returned(maker):
            if isinstance(value, ast.Call) and _last_name(value.func)[:1].isupper():
                assert maker is not None
                return self.raised(value, file, [maker])
        # What the maker was given, which is the text of the errors of signals.
        return "error", _tidy(self.text(call.args[0], file, scope) if call.args else VALUE)

    def text(self, node: ast.AST, file: _File, scope: list[ast.AST], deep: int = 0) -> str:
        """Returns the text of an expression, with `VALUE` for what depends on values."""

        def inner(part: ast.AST) -> str:
            return self.text(part, file, scope, deep + 1)

        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if deep > _DEEP:
            return VALUE
        if isinstance(node, ast.JoinedStr):
            return "".join(
                VALUE if isinstance(part, ast.FormattedValue) else inner(part)
                for part in node.values
            )
        if isinstance(node, ast.BinOp):
            if isinstance(node.op, ast.Add):
                return inner(node.left) + inner(node.right)
            return re.sub(r"%[sdr]", VALUE, inner(node.left)) if _is_mod(node) else VALUE
        if isinstance(node, ast.IfExp):
            return inner(node.body) if not isinstance(node.body, ast.Name) else VALUE
        if isinstance(node, ast.Name):
            found = _assigned(scope, node.id)
            return inner(found) if found is not None else VALUE
        if isinstance(node, ast.Call):
            name = _last_name(node.func)
            if name == "format" and isinstance(node.func, ast.Attribute):
                return re.sub(r"\{[^}]*\}", VALUE, inner(node.func.value))
            maker = file.functions.get(name) or self.functions.get(name)
            for value in _returned(maker):
                assert maker is not None
                return self.text(value, file, [maker], deep + 1)
        return VALUE


def scope_name(scope: list[ast.AST]) -> str:
    """Returns "Class.method" or "function" of nested definitions."""
    names = [getattr(node, "name", "") for node in scope]
    return ".".join(name for name in names if name and name != "__init__")


def _errors(tree: ast.AST) -> Iterator[tuple[list[ast.AST], ast.Call]]:
    """Yields each call that makes an error or a slip, with the definitions around it.

    `raise` and `raise error` pass on what is made, and listed, elsewhere.
    """
    pending: list[tuple[list[ast.AST], ast.AST]] = [([], tree)]
    while pending:
        scope, node = pending.pop()
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield scope, node.exc
        if isinstance(node, ast.Call) and _last_name(node.func) == "slip":
            yield scope, node
        opens = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        around = [*scope, node] if opens else scope
        pending += [(around, child) for child in ast.iter_child_nodes(node)]


def _returned(function: Optional[ast.FunctionDef]) -> list[ast.AST]:
    """Returns what a function returns, in the order of its source."""
    if function is None:
        return []
    return [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value]


def _assigned(scope: list[ast.AST], name: str) -> Optional[ast.AST]:
    """Returns what is assigned to a name in the innermost definition that does, or None."""
    for around in reversed(scope):
        for node in ast.walk(around):
            if isinstance(node, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id == name for target in node.targets
            ):
                return node.value
    return None


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_mod(node: ast.BinOp) -> bool:
    return isinstance(node.op, ast.Mod)


def _tidy(text: str) -> str:
    """Returns a text in one line, in which values that touch each other are one."""
    text = " ".join(text.split())
    return re.sub(f"{VALUE}(?:[ ,;:]*{VALUE})+", VALUE, text)


@functools.lru_cache(maxsize=1)
def messages() -> list[Message]:
    """Returns all messages, sorted by text."""
    return sorted(_Reader().messages(), key=lambda m: (m.text.lstrip(VALUE + " :'").lower(), m))


def place_of(module: str, places: list[str]) -> str:
    """Returns the longest of the places that a module is in, else `REST`."""
    around = [p for p in places if module == p or module.startswith(p + "/")]
    return max(around, key=len, default=REST)


def pattern(message: Message) -> re.Pattern[str]:
    """Returns what matches the message with any values, in one line."""
    pieces = [re.escape(piece) for piece in message.text.split(VALUE)]
    return re.compile(".*".join(pieces), re.S)


def is_told(message: Message) -> bool:
    """Whether a text says something beside values."""
    return len(re.sub(r"\W+", "", message.text)) > 2


def as_html(found: list[Message]) -> str:
    """Returns a list of messages; each text once, with the names of what raises it."""
    raisers: dict[tuple[str, str], list[str]] = {}
    for m in found:
        name = m.function.split(".")[0].lstrip("_")
        names = raisers.setdefault((m.text, m.error), [])
        if name not in names:
            names.append(name)
    lines = ['<ul class="messages">']
    for (text, error), names in raisers.items():
        shown = html.escape(text).replace(VALUE, f"<i>{VALUE}</i>")
        where = ", ".join(html.escape(name) for name in names)
        lines.append(f"<li>{shown} <small>{error}: {where}</small></li>")
    return "\n".join([*lines, "</ul>"])


def fill_in(markdown: str) -> str:
    """Returns a page with the messages of each subject after its marker."""
    if not MARKER.search(markdown):
        return markdown
    places = [p for m in MARKER.finditer(markdown) for p in m["places"].split()]
    by_place: dict[str, list[Message]] = {}
    for message in filter(is_told, messages()):
        by_place.setdefault(place_of(message.module, places), []).append(message)

    def listed(match: re.Match[str]) -> str:
        found = [m for place in match["places"].split() for m in by_place.get(place, [])]
        return as_html(found)

    return MARKER.sub(listed, markdown)


if __name__ == "__main__":
    for one in messages():
        print(f"{one.module}.py:{one.line}: {one.error}: {one.text}")
