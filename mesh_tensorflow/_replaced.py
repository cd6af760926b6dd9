"""Functions and classes of public modules, replaced by those of a program.

A program may assign to an attribute of a public module: `transformer.utils.get_estimator = mine`.
What calls that function is to call the program's then. A module that is a folder of files has
imported names of them, and they names of each other, so that the attribute alone is read by none.
"""

from __future__ import annotations

import sys
import types
from typing import Any

__all__ = ["replaceable"]

_ROOT = __name__.partition(".")[0]
# What the root's functions are read from. Those of `ops` call each other whatever `mtf.relu` is, so
# that a program's `mtf.relu` may call what calls `relu`.
_READ_FOR_ROOT = f"{_ROOT}.ops_with_redefined_builtins"


class _Replaceable(types.ModuleType):
    """A public module; assigning a function to its attribute replaces it in all files."""

    def __setattr__(self, name: str, value: Any) -> None:
        before = vars(self).get(name)
        super().__setattr__(name, value)
        if not callable(before):
            return
        for names in _files_beneath(self.__name__):
            for key, held in list(names.items()):
                if not key.startswith("__"):
                    names[key] = _exchanged(held, before, value)


def replaceable(name: str) -> None:
    """Lets assignments to attributes of a public module replace its functions in all files."""
    sys.modules[name].__class__ = _Replaceable


def _files_beneath(public: str) -> list[dict[str, Any]]:
    """Returns the names of each file that reads the functions of a public module."""
    if public == _ROOT:
        return [vars(sys.modules[_READ_FOR_ROOT])]
    return [
        vars(module)
        for name, module in list(sys.modules.items())
        if name.startswith(f"{_ROOT}.") and "._" in name
    ]


def _exchanged(held: Any, before: object, after: object) -> Any:
    """Returns what a file holds with one function in place of another; tables are changed."""
    if held is before:
        return after
    if type(held) in (dict, list):
        for key, x in list(held.items() if type(held) is dict else enumerate(held)):
            held[key] = _exchanged(x, before, after)
    elif type(held) is tuple:
        return tuple(_exchanged(x, before, after) for x in held)
    return held
