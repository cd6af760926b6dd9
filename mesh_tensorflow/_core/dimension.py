"""Dimension: a named size, and the string form of lists of dimensions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, Optional, Union, overload

from mesh_tensorflow._core.errors import WrongTypeError

__all__ = ["Dimension", "convert_to_dimension", "list_of_dimensions", "split_pairs"]

_EXAMPLES = {"shape": "rows:2,cols:4", "layout": "batch:rows,d_ff:cols"}
_SEPARATORS = re.compile(r"[,.;\s]+")


class _NameAndSize(NamedTuple):
    name: str
    size: int


class Dimension(_NameAndSize):
    """A named dimension of a tensor or of a mesh.

    Two dimensions are equal if both their names and their sizes are.

    Attributes:
      name: the name that layout rules refer to.
      size: number of elements along the dimension.
    """

    __slots__ = ()

    def __new__(cls, name: str, size: int) -> Dimension:
        """Creates a Dimension.

        Args:
          name: a string.
          size: a nonnegative integer.

        Raises:
          ValueError: the size is negative.
        """
        if isinstance(size, int) and size < 0:
            raise ValueError(
                f"dimension {name!r} cannot have the size {size}: a size is a number of elements. "
                "Sizes that TensorFlow infers, written -1 there, must be given"
            )
        return super().__new__(cls, name, size)


@overload
def convert_to_dimension(d: None) -> None: ...
@overload
def convert_to_dimension(d: Union[Dimension, tuple[str, int]]) -> Dimension: ...
@overload
def convert_to_dimension(
    d: Optional[Union[Dimension, tuple[str, int]]],
) -> Optional[Dimension]: ...
def convert_to_dimension(d: Optional[Union[Dimension, tuple[str, int]]]) -> Optional[Dimension]:
    """Returns a Dimension made from `d`.

    Args:
      d: a Dimension, a pair `(str, int)` as a tuple or list, or None.

    Returns:
      A Dimension, or None if `d` is None.

    Raises:
      WrongTypeError: `d` is none of these, or its size is not a Python int. It is a TypeError
        and a ValueError.
    """
    if d is None:
        return None
    if isinstance(d, (tuple, list)) and len(d) == 2:
        name, size = d
        if isinstance(name, str) and isinstance(size, int) and not isinstance(size, bool):
            return d if isinstance(d, Dimension) else Dimension(name, size)
    raise WrongTypeError(
        f"could not convert {d!r} to Dimension: it takes a Dimension or a pair (str, int), "
        'such as mtf.Dimension("batch", 32); a size from NumPy must be passed through int()'
    )


def split_pairs(text: str, what: str) -> list[tuple[str, str]]:
    """Splits "a:x,b:y" into [("a", "x"), ("b", "y")].

    Pairs are separated by commas, semicolons, periods or white space, in any number.

    Args:
      text: the string.
      what: "shape" or "layout", for the error message.

    Raises:
      ValueError: a pair does not have exactly one colon, with text on both sides.
    """
    pairs = []
    for piece in _SEPARATORS.split(text):
        if not piece:
            continue
        parts = piece.split(":")
        if len(parts) != 2 or not parts[0] or not parts[1]:
            raise ValueError(
                f"malformed {what} {text!r}: {piece!r} is not a pair left:right. Write pairs as "
                f'"{_EXAMPLES[what]}", with one colon each and no space around it'
            )
        pairs.append((parts[0], parts[1]))
    return pairs


def list_of_dimensions(what: str, dims: Union[Dimension, Sequence[Dimension]]) -> list[Dimension]:
    """Returns a list of one or several Dimensions.

    Args:
      what: the operation and its argument, for the error message.
      dims: a Dimension, or a list of them.

    Raises:
      WrongTypeError: it is a size, or a name.
    """
    if isinstance(dims, (int, str)):
        size = dims if isinstance(dims, int) else 16
        raise WrongTypeError(
            f"{what} is {dims!r}; it takes a Dimension or a list of them, such as "
            f'mtf.Dimension("hidden", {size})'
        )
    return [dims] if isinstance(dims, Dimension) else list(dims)
