"""NonFiniteError: a value that is NaN or infinite, and the text that says where."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.operation import Operation
from mesh_tensorflow._units import counted

__all__ = ["STATE", "NonFiniteError", "nonfinite_data", "nonfinite_message"]

# How the label of the state of a value begins, in the data of the assertion that a step makes.
STATE = "NaNs, Infs, zeros, least, largest and elements of"
_DATA = re.compile(r"assertion failed: (\[NaN or Inf in .*\])", re.S)


class NonFiniteError(tf.errors.InvalidArgumentError, ArithmeticError):
    """A value of a program is NaN or infinite, found by `mtf.debug.nan_checks`.

    The message says in which operation, on which processor and in which slice, what its inputs
    were, and which line of the user's program made it. It is an InvalidArgumentError, as
    TensorFlow's own checks raise.
    """


def nonfinite_data(message: str) -> Optional[list[Any]]:
    """Returns the data of a failed check from the text of TensorFlow's error, or None.

    Args:
      message: the text of the error.

    Returns:
      Where it is, then for the output and for each input a label and its state, six numbers.
    """
    match = _DATA.search(message)
    if match is None:
        return None
    pieces = re.findall(r"\[([^\[\]]*)\]", match[1])
    data: list[Any] = pieces[:1]
    for label, numbers in zip(pieces[1::2], pieces[2::2]):
        if not label.startswith(STATE):
            break
        data += [label, np.array([float(x) for x in numbers.split()])]
    return data


def nonfinite_message(operation: Operation, data: Sequence[Any]) -> str:
    """Returns what a NonFiniteError says.

    Args:
      operation: the operation whose output it is.
      data: as `nonfinite_data` returns it.
    """
    where = data[0].decode() if isinstance(data[0], bytes) else str(data[0])
    lines = [_kind(data[2]) + where.removeprefix("NaN or Inf")]
    for label, state in zip(data[1::2], data[2::2]):
        name = label.removeprefix(STATE).strip().rstrip(":")
        what = "its slice" if name == "the output" else f"input {name}"
        lines.append(f"  {what}: {_state_text(state)}")
    return "\n".join(lines)


def _kind(state: Sequence[float]) -> str:
    kinds = [kind for kind, n in (("NaN", state[0]), ("Inf", state[1])) if n]
    return " and ".join(kinds) or "NaN or Inf"


def _state_text(state: Sequence[float]) -> str:
    """Returns the state of a slice in words."""
    nans, infs, zeros, least, largest, elements = state
    bad = [f"{int(n)} {kind}" for n, kind in ((nans, "NaN"), (infs, "Inf")) if n]
    if bad:
        return f"{' and '.join(bad)} of {counted(int(elements), 'element')}"
    if elements == 1:
        return f"1 finite element, {least:g}"
    return f"{int(elements)} finite elements from {least:g} to {largest:g}, {int(zeros)} of them 0"
