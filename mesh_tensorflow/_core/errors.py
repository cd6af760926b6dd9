"""Errors and slips, what their messages share, and where a program made an operation."""

from __future__ import annotations

import contextlib
import contextvars
import difflib
import functools
import linecache
import os
import re
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Optional, TypeGuard, TypeVar, cast

from mesh_tensorflow._calls import names_taken, within

if TYPE_CHECKING:
    from mesh_tensorflow._core.operation import Tensor
    from mesh_tensorflow._core.shape import Dimension

F = TypeVar("F", bound=Callable[..., Any])


# -- where the user's program made an operation

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
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
        for begin, end, line in self._code.co_lines():
            # Instructions that Python itself adds have a place in this table, but no line.
            if begin <= self._instruction < end and line is not None:
                return line
        return self._code.co_firstlineno

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
    if file == "<string>":  # typed in; or generated in a file, such as __init__ of a data class
        return "__file__" not in frame.f_globals
    users = _is_users.get(file)
    if users is None:
        users = _is_users[file] = not _is_between(file, frame.f_globals.get("__name__", ""))
    return users


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
    in_file = _is_users
    while frame is not None:
        code = frame.f_code
        # As is_users, without a call: this runs for each operation.
        users = in_file.get(code.co_filename)
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


# -- slips

# Of each thread: what one of them builds strictly must not make the slips of others errors.
_strict: contextvars.ContextVar[bool | None] = contextvars.ContextVar("mtf_strict", default=None)
_told: set[str] = set()
_telling = threading.Lock()
# An empty value is false, so that MTF_STRICT= before a command turns it off for one run.
_FALSE = ("", "0", "false", "no", "off")


class MeshTensorFlowWarning(UserWarning):
    """The code is legal, but probably unintended.

    Each message is given once per process. `warnings.filterwarnings("ignore",
    category=mtf.MeshTensorFlowWarning)` silences them; `mtf.strict()` makes them errors.
    """


def strict(enabled: bool = True) -> contextlib.AbstractContextManager[None]:
    """Makes slips errors: a ValueError is raised instead of a MeshTensorFlowWarning.

    It applies to code within the context, in the current thread. To apply it to a whole program,
    set the environment variable MTF_STRICT=1.

    Args:
      enabled: whether slips are errors; False restores warnings within a strict context.
    """
    return within(_strict, enabled)


def is_strict() -> bool:
    """Returns whether slips are errors, by `strict()` or the environment variable MTF_STRICT."""
    chosen = _strict.get()
    return is_set("MTF_STRICT", False) if chosen is None else chosen


def is_set(variable: str, default: bool) -> bool:
    """Returns whether an environment variable is set to true; `default` if it is not set."""
    text = os.environ.get(variable)
    return default if text is None else text.strip().lower() not in _FALSE


def slip(message: str, key: str | None = None) -> None:
    """Reports a slip: warns once per process, or raises if slips are errors.

    Call it before anything is added to the graph.

    Args:
      message: the problem, with dimensions and sizes, and how to fix it.
      key: messages with the same key are given once; the message itself if None.

    Raises:
      ValueError: within `strict()`.
    """
    if is_strict():
        raise ValueError(
            f"{message}\n  (an error by mtf.strict() or MTF_STRICT; a warning otherwise)"
        )
    warn_once(message, key)


def warn_once(message: str, key: str | None = None) -> None:
    """Gives a MeshTensorFlowWarning once per process, also within `strict()`.

    For what is meant, and costs more than it need.

    Args:
      message: what costs, with dimensions and sizes, and how to save it.
      key: messages with the same key are given once; the message itself if None.
    """
    key = message if key is None else key
    # Noted before the warning is given, so that of several threads which slip at once one warns.
    with _telling:
        if key in _told:
            return
        _told.add(key)
    try:
        # The level also decides which module filters see: the user's, and not this one.
        warnings.warn(message, MeshTensorFlowWarning, stacklevel=_user_frame())
    except MeshTensorFlowWarning:  # a filter makes it an error, and will the next time
        with _telling:
            _told.discard(key)
        raise


def _user_frame() -> int:
    """Returns the stacklevel of the user's own line, for the function that calls this one."""
    # Searched for, as each slip has another number of functions between it and the user's line.
    frame, level = sys._getframe(1), 1
    while frame is not None:
        if is_users(frame):
            return level
        frame, level = frame.f_back, level + 1  # type: ignore[assignment]
    return level


def missing_package(user: str, package: str, install: str) -> ImportError:
    """Returns the error for a missing optional package.

    Args:
      user: a string, the name of what needs it.
      package: a string, the name of the package.
      install: a string, the command that installs it.
    """
    return ImportError(f"{user} needs the package {package}, which is not installed: {install}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of a sentence: "; did you mean rows?" with the nearest name, or "."."""
    nearest = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {nearest[0]}?" if nearest else "."


def explained(elsewhere: Mapping[str, str], further: Collection[str] = ()) -> Callable[[F], F]:
    """Returns a decorator: unknown arguments are told what there is in their place.

    Args:
      elsewhere: names that others have, and what there is in their place.
      further: names of arguments that the function takes as `**kwargs`.
    """

    def decorator(function: F) -> F:
        names = names_taken(function).union(further)

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            # Python's own error would name one of them, and not what there is in its place.
            unknown = [name for name in kwargs if name not in names]
            if unknown:
                texts = [
                    f"{name!r}: {elsewhere[name]}"
                    if name in elsewhere
                    else f"{name!r}{did_you_mean(name, names)}"
                    for name in unknown
                ]
                raise TypeError(f"{function.__name__} has no argument {'; and none '.join(texts)}")
            return function(*args, **kwargs)

        return cast(F, called)

    return decorator


def first_names(names: Sequence[str], most: int = 6) -> str:
    """Returns the first names of a list, and how many more there are than `most`."""
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def check_flag(function: str, name: str, value: object, instead: Optional[str] = None) -> None:
    """Checks an argument that is true or false.

    Args:
      function: the name of the function that was called, for the error.
      name: the parameter's name.
      value: the argument.
      instead: the call that was probably intended, with `{value}` in place of the value: for
        functions of the classic, which go by what Python takes for true. Anything else is then a
        slip, such as an argument by position that was meant for the parameter behind it.

    Raises:
      ValueError: it is something else, such as a text, all of which are true to Python; of a slip
        within `strict()`.
    """
    if is_flag(value):
        return
    if instead is None:
        raise ValueError(f"{function}: {name}={value!r} is neither True nor False")
    slip(
        f"{function}: {name} is true or false, but was given {value!r}. By position, "
        f"arguments go to the parameters in their order; write {instead.format(value=repr(value))}"
    )


def is_flag(value: object) -> bool:
    """Returns whether a value is true or false: a boolean of Python or NumPy, 0, 1 or None.

    Args:
      value: anything.
    """
    # NumPy's boolean is a class of its own, which is called bool_ before NumPy 2 and bool since.
    is_flag = value is None or isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")
    return is_flag or (isinstance(value, int) and value in (0, 1))


def is_integer(value: object) -> TypeGuard[int]:
    """Returns whether a value is an integer, of Python or NumPy; a bool is none.

    Args:
      value: anything.
    """
    # Python takes a bool for an int, so that steps=True would be a single step.
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_whole(value: object, least: int = 1) -> bool:
    """Returns whether a value is an integer that is not too small.

    Args:
      value: anything.
      least: the smallest number that is right.
    """
    return is_integer(value) and int(value) >= least


def is_real(value: object) -> TypeGuard[float]:
    """Returns whether a value is a real number, of Python or NumPy; a bool is none.

    Args:
      value: anything.
    """
    return isinstance(value, Real) and not isinstance(value, bool)


def check_whole(
    function: str,
    name: str,
    value: Any,
    otherwise: str = "",
    least: int = 1,
    most: Optional[int] = None,
) -> None:
    """Checks an argument that is a whole number.

    Args:
      function: the name of the function that was called, for the error.
      name: the parameter's name.
      value: the argument.
      otherwise: which others there are, for the error.
      least: the smallest number that is right.
      most: the largest; None if there is none.

    Raises:
      ValueError: it is no integer, too small, or too large.
    """
    if not is_whole(value, least):
        raise ValueError(
            f"{function}: {name}={value!r} must be an integer of at least {least}{otherwise}"
        )
    if most is not None and value > most:
        raise ValueError(f"{function}: {name}={value!r} must be {most} or less")


def check_choice(
    what: str, name: str, value: object, choices: Iterable[object], otherwise: str = ""
) -> None:
    """Checks an argument that is one of a few values.

    Args:
      what: what has the argument, for the error.
      name: the argument's name.
      value: the argument.
      choices: what it may be.
      otherwise: which others there are, for the error.

    Raises:
      ValueError: it is none of them; the message lists these.
    """
    values = list(choices)
    # By comparison and not by hash: what was given instead may be a list.
    if value not in values:
        text = ", ".join(map(repr, values))
        raise ValueError(f"{what}: {name}={value!r} is none of {text}{otherwise}")


def text_table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Formats a table, with a rule under its first row; returns its lines.

    Args:
      rows: lists of cells; the first has the headings.
      left: numbers of the columns that are aligned to the left.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


# Lines that TensorFlow adds around the reason: where an operation was created, and its name.
_AROUND = re.compile(
    r"Graph execution error:|Detected at node .*|Node: .*|\s+File .*|\s*\[\[.*|\d+ root error.*"
    r"|Hint: .*|Original stack trace .*|\s*\(\d+\)\s*|No OpKernel .*"
)


class WrongTypeError(TypeError, ValueError):
    """An argument has the wrong type.

    It is a TypeError, as in Python, and a ValueError, like errors of other arguments.
    """


class NoValueError(WrongTypeError):
    """A Tensor is used as a number or an array where its value is not known yet."""


class MissingMethodError(NotImplementedError, ValueError):
    """A subclass lacks a method that it must define."""


class NotInLoweringError(KeyError, ValueError):
    """A Lowering does not have the given Tensor, Operation or Mesh."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError would quote it


def dims_text(dims: Iterable[Dimension]) -> str:
    """Returns "a=2, b=4"."""
    return ", ".join(f"{d.name}={d.size}" for d in dims)


def tensors_text(tensors: Iterable[Tensor]) -> str:
    """Returns "x:0 Shape[a=2] float32; y:0 ..." of mtf Tensors."""
    return "; ".join(f"{t.name} {t.shape} {t.dtype.name}" for t in tensors)


def divisors(n: int) -> list[int]:
    """Returns the divisors of `n` in increasing order."""
    # These are hints in messages only, so a large number is not worth a search.
    return [k for k in range(1, n + 1) if n % k == 0] if n < 4096 else [1, n]


def splittable_hint(d: Dimension, mesh_dim: Dimension) -> str:
    """Returns a sentence on how to make a dimension divisible by a mesh dimension."""
    below = d.size // mesh_dim.size * mesh_dim.size
    above = below + mesh_dim.size
    sizes = f"{below} or {above}" if below else f"{above}"
    fits = ", ".join(str(k) for k in divisors(d.size)[:12])
    return (
        f"Make {d.name} a multiple of {mesh_dim.size} (for instance {sizes}), give "
        f"{mesh_dim.name} a size that divides {d.size} ({fits}), allow a last part that is shorter "
        f"by {d.name}:{mesh_dim.name}? (uneven=True for all rules), or drop the layout rule "
        f"{d.name}:{mesh_dim.name}"
    )


def mesh_shapes_that_fit(mesh_dims: Sequence[Dimension], num_devices: int) -> list[str]:
    """Returns up to eight mesh shapes over the names of `mesh_dims` with `num_devices`."""
    if num_devices < 1 or not mesh_dims:
        return []
    shapes: list[list[int]] = [[]]
    for i in range(len(mesh_dims)):
        # The last dimension takes all that is left, so that every shape has exactly `num_devices`.
        last = i == len(mesh_dims) - 1
        grown = []
        for sizes in shapes:
            rest = num_devices
            for s in sizes:
                rest //= s
            grown += [sizes + [k] for k in ([rest] if last else divisors(rest))]
        shapes = grown
    # The ones nearest to the requested shape come first.
    shapes.sort(key=lambda sizes: sum(abs(s - d.size) for s, d in zip(sizes, mesh_dims)))
    return [",".join(f"{d.name}:{s}" for s, d in zip(sizes, mesh_dims)) for sizes in shapes[:8]]


def reason(error: Exception) -> str:
    """Returns one line about why a TensorFlow or file system operation failed.

    Args:
      error: the exception.

    Returns:
      The first line of its message that states the reason, without a period at the end.
    """
    # As text, an OpError may add where its operation was made; its message is shorter.
    text = str(getattr(error, "message", None) or error)
    lines = [line.strip() for line in text.splitlines() if not _AROUND.fullmatch(line)]
    first = next(filter(None, lines), type(error).__name__)
    # TensorFlow numbers the reasons of a step that fails in several places: "(0) UNKNOWN: ...".
    return re.sub(r"^\(\d+\) \w+: ", "", first).rstrip(".")
