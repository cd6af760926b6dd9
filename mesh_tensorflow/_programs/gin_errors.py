"""Errors of gin files and bindings: nearest names, lines, and no log of the search for files."""

from __future__ import annotations

import collections
import contextlib
import difflib
import inspect
import logging
import os
import re
import tokenize
from collections.abc import Iterable, Iterator

import gin

__all__ = ["explained_errors"]

_MOST_NAMES = 3

_UNKNOWN_SELECTOR = re.compile(r"No configurable matching (?:reference )?'@?([^']*?)(?:\(\))?'")
_INCLUDE = re.compile(r"""\s*include\s+['"]([^'"]+)""")
_UNKNOWN_PARAMETER = re.compile(r"Configurable '([^']*)' doesn't have a parameter named '([^']*)'")


def _registered() -> list[str]:
    # gin has no public way to list what is registered.
    return [name for name, _ in gin.config._REGISTRY.items()]


def _nearest(name: str, known: Iterable[str]) -> str:
    names = {k: k for k in known}
    # A file may use only the end of a name.
    names.update({k.rsplit(".", 1)[-1]: k for k in known})
    found = difflib.get_close_matches(name.rsplit(".", 1)[-1], names, _MOST_NAMES, 0.6)
    # Whole paths have much in common, so they have to be nearer than ends are.
    found += difflib.get_close_matches(name, names, _MOST_NAMES, 0.75)
    return ", ".join(dict.fromkeys(names[k] for k in found)) if found else ""


def _advice(message: str) -> str:
    """Returns a sentence with the nearest known names to one that gin does not know, or ""."""
    selector = _UNKNOWN_SELECTOR.search(message)
    if selector:
        near = _nearest(selector[1], _registered())
        return (f"The nearest names are {near}." if near else "No name is near it.") + (
            " A module that registers it may have to be imported, by --module_import or by an "
            "`import` in the gin file."
        )
    parameter = _UNKNOWN_PARAMETER.search(message)
    if parameter:
        function = gin.get_configurable(parameter[1])
        names = inspect.signature(function).parameters
        known = [name for name in names if name not in ("self", "args", "kwargs")]
        near = _nearest(parameter[2], known)
        return f"The nearest names are {near}." if near else f"It has {', '.join(known)}."
    return ""


@contextlib.contextmanager
def _nearest_names_in_errors() -> Iterator[None]:
    """Adds the nearest known names to gin's errors about unknown names.

    Raises:
      ValueError: gin raised it.
    """
    try:
        yield
    except ValueError as error:
        message = str(error)
        advice = _advice(message)
        if not advice:
            raise
        raise ValueError(f"{message}\n{advice}") from error


def _paths(files: Iterable[str], prefixes: Iterable[str]) -> Iterator[str]:
    """Yields the paths of gin files, and of the files that they include."""
    waiting, seen = list(files), set()
    while waiting:
        name = waiting.pop(0)
        paths = [os.path.join(prefix, name) for prefix in ("", *prefixes)]
        path = next((path for path in paths if os.path.isfile(path)), None)
        if path is None or path in seen:
            continue
        seen.add(path)
        yield path
        # The file that is searched for may be one that is not in UTF-8.
        with open(path, encoding="utf-8", errors="replace") as f:
            waiting += [found[1] for found in map(_INCLUDE.match, f) if found]


def _line_not_in_utf8(files: Iterable[str], prefixes: Iterable[str]) -> str:
    """Returns an error message if a gin file, or one that it includes, is not valid UTF-8."""
    for path in _paths(files, prefixes):
        with open(path, "rb") as f:
            for number, line in enumerate(f, 1):
                try:
                    line.decode("utf-8")
                except UnicodeDecodeError as error:
                    return (
                        f"line {number} of {path} is not in UTF-8 ({error.reason} at byte "
                        f"{error.start}: {line.strip()[:40]!r})"
                    )
    return ""


def _file_that_breaks_off(files: Iterable[str], prefixes: Iterable[str]) -> str:
    """Returns the path of a gin file in which a bracket or a string is not closed, or ""."""
    for path in _paths(files, prefixes):
        with open(path, encoding="utf-8") as f:
            try:
                collections.deque(tokenize.generate_tokens(f.readline), maxlen=0)
            except (tokenize.TokenError, SyntaxError):
                return path
    return ""


@contextlib.contextmanager
def _lines_in_errors_of_syntax(files: Iterable[str], prefixes: Iterable[str]) -> Iterator[None]:
    """Puts file, line and text into the messages of errors of syntax."""
    try:
        yield
    except tokenize.TokenError as error:
        place = _file_that_breaks_off(files, prefixes) or "--gin_param"
        raise SyntaxError(f"{place}: a bracket or a string is not closed") from error
    except SyntaxError as error:
        place = f"{error.filename}, line {error.lineno}" if error.filename else "--gin_param"
        text = (error.text or "").strip()
        raise SyntaxError(f"{place}: {error.msg}\n    {text}") from error


def _not_about_a_path(record: logging.LogRecord) -> bool:
    return os.path.basename(record.pathname) != "resource_reader.py"


@contextlib.contextmanager
def _searched_silently() -> Iterator[None]:
    """Context in which gin logs nothing about the directories that it searches.

    If a file is in none of them, gin raises an error that lists them.
    """
    root = logging.getLogger()  # to which gin writes
    root.addFilter(_not_about_a_path)
    try:
        yield
    finally:
        root.removeFilter(_not_about_a_path)


@contextlib.contextmanager
def _place_in_errors_of_encoding(files: Iterable[str], prefixes: Iterable[str]) -> Iterator[None]:
    """Adds file and line to errors about gin files that are not valid UTF-8."""
    try:
        yield
    except UnicodeDecodeError as error:
        place = _line_not_in_utf8(files, prefixes)
        raise ValueError(
            f"a gin file should be text in UTF-8: {place or error}. Save it as UTF-8, as by "
            "`iconv -f latin1 -t utf-8`"
        ) from error


@contextlib.contextmanager
def explained_errors(files: Iterable[str], prefixes: Iterable[str] = ()) -> Iterator[None]:
    """Context for reading gin files and bindings: errors say where, and what may have been meant.

    Args:
      files: the gin files that are read.
      prefixes: the directories in which they, and the files that they include, are searched for.

    Raises:
      ValueError: a name is unknown; the message has the nearest known ones. Or a file is not valid
        UTF-8; the message has the line.
      SyntaxError: a file or binding is no gin; the message has file, line and text.
    """
    files, prefixes = list(files), list(prefixes)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_searched_silently())
        stack.enter_context(_nearest_names_in_errors())
        stack.enter_context(_place_in_errors_of_encoding(files, prefixes))
        stack.enter_context(_lines_in_errors_of_syntax(files, prefixes))
        yield
