"""Examples in docstrings as blocks of code on the reference pages.

mkdocstrings reads the package with griffe, which loads this extension. A docstring has its examples
as `>>>` lines between paragraphs, which Markdown would take for quotations.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

# Lines from one that begins with >>> to the next blank line or the end.
_EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?! *$).*)*", re.M)


class ReferenceExamples(griffe.Extension):
    """Puts examples in fences."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Called when all modules of a package have been read."""
        pending: list[Any] = [pkg]
        while pending:
            current = pending.pop()
            if current.docstring is not None:
                current.docstring.value = in_fences(current.docstring.value)
            pending += [m for m in current.members.values() if not m.is_alias]


def in_fences(text: str) -> str:
    """Returns a docstring with fences around its examples."""

    def fenced(match: re.Match[str]) -> str:
        indent = match.group(1)
        return f"{indent}```pycon\n{match.group(0)}\n{indent}```"

    return _EXAMPLE.sub(fenced, text)
