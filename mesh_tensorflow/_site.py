"""Site: the line of the user's program that made an operation."""

from __future__ import annotations

import linecache
import os
import sysconfig
from types import CodeType, FrameType
from typing import Optional

__all__ = ["Site", "caller_site", "is_users"]

_PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_STANDARD = os.path.join(sysconfig.get_paths()["stdlib"], "")
# Top-level modules between the user's line and an operation, besides the standard library.
_BETWEEN = frozenset(["mesh_tensorflow", "gin", "absl", "tensorflow", "keras", "tf_keras", "wrapt"])
# Folders of this package that make operations for others, who are the more telling ones.
_MAKERS = ("_core", "_lowering", "_mesh", "layers", "ops", "optimize")
# By file, since that is quick to look up: whether it is the user's.
_is_users: dict[str, bool] = {}


class Site:
    """A line of a program.

    It holds the code and the place in it, and looks up the rest when it is asked for.

    An example, of an operation that is made here:

    >>> import mesh_tensorflow as mtf
    >>> def build(mesh):
    ...     return mtf.ones(mesh, [mtf.Dimension("batch", 4)])
    >>> site = build(mtf.Mesh(mtf.Graph(), "mesh")).operation.site
    >>> site.function, site.line
    ('build', 2)
    """

    __slots__ = ("_code", "_instruction")

    def __init__(self, code: CodeType, instruction: int):
        """Creates a Site.

        Args:
          code: the code object of the function.
          instruction: the offset of the instruction in it, `f_lasti` of a frame.
        """
        self._code = code
        self._instruction = instruction

    @property
    def file(self) -> str:
        """The path of the file, as Python has it."""
        return self._code.co_filename

    @property
    def line(self) -> int:
        """The number of the line, from 1."""
        found = self._code.co_firstlineno
        for begin, end, line in self._code.co_lines():
            # Instructions that Python itself adds have a place in this table, but no line.
            if begin <= self._instruction < end and line is not None:
                return line
        return found

    @property
    def function(self) -> str:
        """The name of the function, or "<module>"."""
        return self._code.co_name

    @property
    def source(self) -> str:
        """The text of the line, without indentation; "" if the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def trace(self) -> str:
        """The lines of a Python traceback for it, indented as there."""
        text = f'  File "{self.file}", line {self.line}, in {self.function}'
        source = self.source
        return f"{text}\n    {source}" if source else text

    def __reduce__(self) -> tuple:
        return _site_at, (self.file, self.line, self.function)  # code cannot be pickled

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"

    def __repr__(self) -> str:
        return f"Site({self.file}:{self.line} in {self.function})"


def _site_at(file: str, line: int, function: str) -> Site:
    """Returns a Site of a line, without the code of its function."""
    some = _site_at.__code__  # the place of no instruction, so that its first line is the line
    return Site(some.replace(co_filename=file, co_name=function, co_firstlineno=line), -1)


def is_users(frame: FrameType) -> bool:
    """Returns whether the code of a frame is the user's: not of this package or of those below it.

    Args:
      frame: a Python frame.
    """
    file = frame.f_code.co_filename
    found = _is_users.get(file)
    if found is None:
        found = _is_users[file] = not _is_between(file, frame.f_globals.get("__name__", ""))
    return found


def _is_between(file: str, module: object) -> bool:
    if file.startswith("<"):  # no file: what is typed in, or part of Python
        return file.startswith("<frozen ")
    if file.startswith(_PACKAGE):
        return True
    # What is installed lies in a folder of the standard library, and is no part of it.
    if file.startswith(_STANDARD) and not file.startswith(
        tuple(os.path.join(_STANDARD, d, "") for d in ("site-packages", "dist-packages"))
    ):
        return True
    return str(module).split(".")[0] in _BETWEEN


def caller_site(start: Optional[FrameType]) -> Optional[Site]:
    """Returns the innermost line of the user's code, at a frame or among its callers.

    If there is none, as in a command of this package, it is the line of this package that uses
    its layers and operations.

    Args:
      start: a Python frame.
    """
    frame = start
    known = _is_users
    while frame is not None:
        code = frame.f_code
        # As is_users, without a call: this runs for each operation.
        users = known.get(code.co_filename)
        if users or (users is None and is_users(frame)):
            # Not the frame, which would keep all local variables of the user's function in memory.
            return Site(code, frame.f_lasti)
        frame = frame.f_back
    return _site_in_package(start)


def _site_in_package(frame: Optional[FrameType]) -> Optional[Site]:
    makers = tuple(os.path.join(_PACKAGE, folder, "") for folder in _MAKERS)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE) and not file.startswith(makers):
            return Site(frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return None
