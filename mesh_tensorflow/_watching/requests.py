"""What the user asked to see of the values of programs: NaN checks, and collected values.

`mtf.debug` sets it, a Lowering does it, and functions are traced anew for it.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Optional

from mesh_tensorflow._core.errors import did_you_mean, is_set

__all__ = [
    "EAGER_EVENT",
    "CollectedValues",
    "Collector",
    "NanChecks",
    "collecting",
    "collectors",
    "hand_over",
    "is_profiling",
    "nan_checks_in_force",
    "profiling",
    "use_collector",
    "use_nan_checks",
    "watch_key",
]

# How the names of events of a trace begin that stand for operations in eager code.
EAGER_EVENT = "mtf_operation/"


@dataclasses.dataclass(frozen=True)
class NanChecks:
    """Which values are errors.

    Attributes:
      infinities: whether infinite values are, besides NaNs.
      operations: patterns of names of operations; those that match none are not checked.
    """

    infinities: bool = True
    operations: tuple[str, ...] = ("*",)

    def applies_to(self, name: str) -> bool:
        """Returns whether the operation of a name is checked."""
        return matches(name, self.operations)


class CollectedValues(dict):
    """Values by the names of what they were collected from; a dictionary."""

    def __missing__(self, name: object) -> NoReturn:
        known = ", ".join(map(str, list(self)[:16])) or "nothing"
        raise KeyError(
            f"{name!r} was not collected; collected: {known}{did_you_mean(str(name), self)} "
            "Values are collected from programs that are lowered within mtf.debug.collect, and "
            "not from inside of loops"
        )


@dataclasses.dataclass(frozen=True)
class Collector:
    """A request for values of the programs that are lowered within its context.

    Attributes:
      patterns: patterns of names, as of files.
      processor: the number of the processor whose slices are asked for; None for whole values.
      values: what was collected.
    """

    patterns: tuple[str, ...]
    processor: Optional[int]
    values: CollectedValues = dataclasses.field(default_factory=CollectedValues)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Returns whether a name matches one of some patterns, such as "encoder/*/softmax"."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


_checks: contextvars.ContextVar[Optional[NanChecks]] = contextvars.ContextVar("mtf_nan_checks")
_collectors: contextvars.ContextVar[tuple[Collector, ...]] = contextvars.ContextVar(
    "mtf_collectors", default=()
)


@contextlib.contextmanager
def use_nan_checks(checks: Optional[NanChecks]) -> Iterator[None]:
    """Makes Lowerings within check values, or not if `checks` is None."""
    token = _checks.set(checks)
    try:
        yield
    finally:
        _checks.reset(token)


def nan_checks_in_force() -> Optional[NanChecks]:
    """Returns the checks of the context, or those that MTF_DEBUG_NANS=1 asks for, or None."""
    try:
        return _checks.get()
    except LookupError:
        return NanChecks() if is_set("MTF_DEBUG_NANS", False) else None


@contextlib.contextmanager
def use_collector(collector: Collector) -> Iterator[None]:
    """Makes Lowerings within hand values to a collector, besides those outside of it."""
    token = _collectors.set((*_collectors.get(), collector))
    try:
        yield
    finally:
        _collectors.reset(token)


def collectors() -> tuple[Collector, ...]:
    """Returns the collectors in whose contexts this is called, the outermost first."""
    return _collectors.get()


def watch_key() -> Any:
    """Returns what the tracing of a function depends on; None if nothing is watched."""
    checks, asked = nan_checks_in_force(), _collectors.get()
    if checks is None and not asked:
        return None
    return checks, tuple((c.patterns, c.processor) for c in asked)


def collecting(fn: Callable[..., Any]) -> Callable[..., tuple[Any, list[dict[str, Any]]]]:
    """Returns a function that also returns what is collected while it is traced.

    Its tensors are of the traced graph, so they have to be results of it. `hand_over` gives the
    values of these results to the collectors.

    Args:
      fn: a function that lowers programs.
    """

    def with_values(*args: Any, **named: Any) -> tuple[Any, list[dict[str, Any]]]:
        own = tuple(Collector(c.patterns, c.processor) for c in _collectors.get())
        token = _collectors.set(own)
        try:
            result = fn(*args, **named)
        finally:
            _collectors.reset(token)
        return result, [dict(c.values) for c in own]

    return with_values


def hand_over(collected: Sequence[Mapping[str, Any]]) -> None:
    """Gives the values that a traced function returned to the collectors of this context.

    Args:
      collected: a dictionary for each collector.
    """
    for collector, values in zip(_collectors.get(), collected):
        collector.values.update(values)


_profiling = 0


@contextlib.contextmanager
def profiling() -> Iterator[None]:
    """Makes eager Lowerings mark their operations in the profiler's trace within, in any thread."""
    global _profiling
    _profiling += 1
    try:
        yield
    finally:
        _profiling -= 1


def is_profiling() -> bool:
    """Returns whether a profile is being made."""
    return _profiling > 0
