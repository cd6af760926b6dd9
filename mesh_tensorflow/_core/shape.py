"""Dimension and Shape: named sizes, ordered lists of them, and the broadcast rule."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional, TypeVar, Union, overload

from mesh_tensorflow._core.errors import WrongTypeError, dims_text, slip

_EXAMPLES = {"shape": "rows:2,cols:4", "layout": "batch:rows,d_ff:cols"}
_SEPARATORS = re.compile(r"[,.;\s]+")


class Dimension(NamedTuple):
    """A named dimension of a tensor or of a mesh.

    Two dimensions are equal if both their names and their sizes are. A program may write what it
    likes for a size that it fills in later, such as -1 or None; in a Shape, it is a number.

    Attributes:
      name: the name that layout rules refer to.
      size: number of elements along the dimension.
    """

    name: str
    size: int


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
      ValueError: the size is negative.
    """
    if d is None:
        return None
    if isinstance(d, (tuple, list)) and len(d) == 2:
        name, size = d
        # Python's True is an int of value 1, and would pass for a size.
        if isinstance(name, str) and isinstance(size, int) and not isinstance(size, bool):
            if size < 0:
                raise ValueError(
                    f"dimension {name!r} cannot have the size {size}: a size is a number of "
                    "elements. Sizes that TensorFlow infers, written -1 there, must be given"
                )
            return d if isinstance(d, Dimension) else Dimension(name, size)
    raise WrongTypeError(
        f"could not convert {d!r} to Dimension: it takes a Dimension or a pair (str, int), "
        'such as mtf.Dimension("batch", 32); a size from NumPy must be passed through int()'
    )


def is_dimension(given: Any) -> bool:
    """Returns whether what is given is one dimension, and not a list of them.

    Args:
      given: a Dimension, or what may be a pair `(str, int)` that stands for one.
    """
    is_pair = isinstance(given, (tuple, list)) and len(given) == 2 and isinstance(given[0], str)
    return isinstance(given, Dimension) or (is_pair and isinstance(given[1], int))


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
    # Separators at the ends, or several in a row, leave empty pieces.
    for piece in _SEPARATORS.split(text):
        if not piece:
            continue
        sides = piece.split(":")
        if len(sides) != 2 or not sides[0] or not sides[1]:
            raise ValueError(
                f"malformed {what} {text!r}: {piece!r} is not a pair left:right. Write pairs as "
                f'"{_EXAMPLES[what]}", with one colon each and no space around it'
            )
        pairs.append((sides[0], sides[1]))
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


ANONYMOUS_PREFIX = "_anonymous_"
T = TypeVar("T")
_FRACTION = re.compile(r":(-?\d+\.\d+)(?![\w:])")  # a period separates pairs, too


def list_product(l: Iterable[int]) -> int:
    """Returns the product of the numbers in `l`; 1 if it is empty."""
    return math.prod(l)


def transpose_list_of_lists(lol: Sequence[Sequence[T]]) -> list[list[T]]:
    """Returns the lists of first elements, of second elements, and so on.

    Raises:
      ValueError: `lol` is empty.
    """
    if not lol:
        raise ValueError("cannot transpose an empty list of lists")
    return [list(column) for column in zip(*lol)]


JOIN = "+"  # between the names of mesh dimensions that split a dimension together


class JointAxis(int):
    """Several mesh axes that split one dimension together, used wherever a mesh axis is.

    The first is the outermost: along the axes (0, 1) of the mesh "rows:2,cols:3", the processor in
    row 1 and column 2 has coordinate 1 * 3 + 2. `mesh_shape[axis]` is the Dimension
    "rows+cols"=6. As a number, it is the axis of no mesh.

    Attributes:
      axes: the mesh axes, a tuple.
    """

    axes: tuple[int, ...]

    def __new__(cls, axes: Iterable[int]) -> JointAxis:
        """Creates the axis of two mesh axes or more.

        Args:
          axes: mesh axes, the outermost first.
        """
        axes = tuple(axes)
        # Equal for equal axes in one order, and above all numbers of single axes.
        number = functools.reduce(lambda n, axis: n * 1024 + axis + 1, axes, 0)
        joint = super().__new__(cls, number)
        joint.axes = axes
        return joint

    # Pickle and copy call `__new__` with these.
    def __getnewargs__(self) -> tuple[tuple[int, ...]]:  # type: ignore[override]
        return (self.axes,)

    def __repr__(self) -> str:
        return repr(self.axes)


def single_axes(mesh_axes: Iterable[Optional[int]]) -> list[int]:
    """Returns the axes of a mesh among mesh axes: each of a JointAxis, and no None.

    Args:
      mesh_axes: mesh axes, JointAxes or None.
    """
    single: list[int] = []
    for axis in mesh_axes:
        if axis is not None:
            single += axis.axes if isinstance(axis, JointAxis) else [axis]
    return single


class Shape:
    """The shape of a Tensor or of a Mesh: an ordered list of Dimensions.

    Shapes are equal when their dimensions are, in order. They are not hashable.
    `shape + x` appends and `shape - x` removes, where `x` is a Shape, a Dimension or a
    list of Dimensions.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, dims: Iterable[Union[Dimension, tuple[str, int]]]):
        """Creates a Shape.

        Args:
          dims: Dimensions, or pairs `(str, int)`.

        Raises:
          ValueError: a dimension, name and size, occurs twice.
        """
        self._dims: list[Dimension] = [convert_to_dimension(d) for d in dims]
        # One name with two sizes is allowed: kernels of convolutions have channels in and out.
        if len(set(self._dims)) != len(self._dims):
            twice = sorted({d for d in self._dims if self._dims.count(d) > 1})
            raise ValueError(
                f"Shape must not have repeated dimensions: {self} repeats "
                f"{dims_text(twice)}. "
                "Rename one of them with mtf.rename_dimension"
            )

    @property
    def dims(self) -> list[Dimension]:
        """A fresh list of the dimensions."""
        # Tensors share Shapes, and a caller that changed the list would change them all.
        return list(self._dims)

    @property
    def ndims(self) -> int:
        """Number of dimensions."""
        return len(self._dims)

    @property
    def dimension_names(self) -> list[str]:
        """Names of the dimensions, in order."""
        return [d.name for d in self._dims]

    @property
    def to_integer_list(self) -> list[int]:
        """Sizes of the dimensions, in order."""
        return [d.size for d in self._dims]

    @property
    def size(self) -> int:
        """Number of elements."""
        return list_product(d.size for d in self._dims)

    @property
    def to_string(self) -> str:
        """The shape as "Shape[a=2, b=4]"."""
        return f"Shape[{dims_text(self._dims)}]"

    @property
    def cumprod(self) -> list[int]:
        """For each axis, the product of the sizes before it."""
        products, product = [], 1
        for d in self._dims:
            products.append(product)
            product *= d.size
        return products

    def cumprod_to_tensor_axis(self, cumprod: int) -> Optional[int]:
        """Returns the last axis whose preceding sizes multiply to `cumprod`, or None."""
        products = self.cumprod
        # Dimensions of size 1 repeat a product, and what is wanted is the axis behind them.
        for axis in reversed(range(len(products))):
            if products[axis] == cumprod:
                return axis
        return None

    def get_dim_by_name(self, name: str) -> Dimension:
        """Returns the dimension called `name`.

        Raises:
          ValueError: there is no such dimension.
        """
        for d in self._dims:
            if d.name == name:
                return d
        raise ValueError(f"Dimension {name!r} not found in {self}")

    def rename_dimension(self, old_name: str, new_name: str) -> Shape:
        """Returns this shape with every dimension `old_name` called `new_name`.

        Raises:
          ValueError: there is no dimension `old_name`.
        """
        # Raises if there is none: a name that is misspelled would leave the shape as it is.
        self.get_dim_by_name(old_name)
        return Shape([Dimension(new_name, d.size) if d.name == old_name else d for d in self])

    def resize_dimension(self, name: str, new_size: int) -> Shape:
        """Returns this shape with every dimension `name` resized to `new_size`.

        Raises:
          ValueError: there is no dimension `name`.
        """
        self.get_dim_by_name(name)
        return Shape([Dimension(name, new_size) if d.name == name else d for d in self])

    def __repr__(self) -> str:
        return self.to_string

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shape) and self._dims == other._dims

    def __len__(self) -> int:
        return len(self._dims)

    def __iter__(self) -> Iterator[Dimension]:
        return iter(self._dims)

    def __contains__(self, d: object) -> bool:
        return d in self._dims

    @overload
    def __getitem__(self, key: int) -> Dimension: ...
    @overload
    def __getitem__(self, key: slice) -> list[Dimension]: ...
    def __getitem__(self, key: Union[int, slice]) -> Union[Dimension, list[Dimension]]:
        if isinstance(key, JointAxis):
            dims = [self._dims[axis] for axis in key.axes]
            return Dimension(JOIN.join(d.name for d in dims), list_product(d.size for d in dims))
        return self._dims[key]

    def __add__(self, other: Union[Shape, Dimension, list]) -> Shape:
        if isinstance(other, Shape):
            return Shape(self._dims + other._dims)
        if isinstance(other, Dimension):
            return Shape(self._dims + [other])
        return Shape(self._dims + other)

    def __radd__(self, other: Union[Dimension, list]) -> Shape:
        return Shape([other] if isinstance(other, Dimension) else other) + self

    def __sub__(self, other: Union[Shape, Dimension, list, tuple, None]) -> Shape:
        if other is None:
            return self
        if isinstance(other, Dimension):
            # Only one Dimension has to be there; `shape - [d]` is for one that may be missing.
            if other not in self._dims:
                raise ValueError(
                    f"Subtracting a dimension that is not there: {self} has no "
                    f"{other.name}={other.size}"
                )
            other = [other]
        if isinstance(other, str):
            raise WrongTypeError(
                f"{self} - {other!r}: what is taken away are Dimensions, not names. Write "
                f"shape - shape.get_dim_by_name({other!r})"
            )
        # By name and size: of a name that has two sizes, only the one that is given goes.
        removed = set(other)
        return Shape([d for d in self._dims if d not in removed])


DimensionLike = Union[Dimension, str]  # of a Tensor, by its name
# A Shape, or what converts to one.
ShapeLike = Union[Shape, str, Iterable[Union[Dimension, tuple[str, int]]]]


@overload
def convert_to_shape(x: ShapeLike) -> Shape: ...
@overload
def convert_to_shape(x: Optional[ShapeLike]) -> Optional[Shape]: ...
def convert_to_shape(x: Optional[ShapeLike]) -> Optional[Shape]:
    """Returns a Shape made from `x`.

    Args:
      x: a Shape, a string such as "rows:2,cols:4", an iterable of Dimensions or pairs,
        or None.

    Returns:
      A Shape, or None if `x` is None.

    Raises:
      ValueError: a string is malformed, or an element is not a dimension.
      TypeError: `x` is none of these.
    """
    if x is None or isinstance(x, Shape):
        return x
    if isinstance(x, str):
        pairs = []
        # Looked for before splitting: a period separates pairs, so "a:1.5" would be "a:1" and "5".
        fraction = _FRACTION.search(x)
        if fraction:
            raise ValueError(
                f"malformed shape {x!r}: the size {fraction[1]!r} is not a whole number. Write it "
                'as "rows:2,cols:4"'
            )
        for name, size in split_pairs(x, "shape"):
            try:
                pairs.append((name, int(size)))
            except ValueError:
                raise ValueError(
                    f"malformed shape {x!r}: the size {size!r} of {name!r} is not a whole "
                    'number. Write it as "rows:2,cols:4"'
                ) from None
        x = pairs
    # Of a dict its keys are taken, which are names without sizes, unless it was made of Dimensions
    # to leave out those that come twice.
    is_sizes = isinstance(x, Mapping) and any(isinstance(key, str) for key in x)
    if not isinstance(x, Iterable) or is_sizes:
        raise TypeError(
            f"{x!r} ({type(x).__name__}) is no shape: write it as a list of mtf.Dimensions or of "
            'pairs (name, size), or as "rows:2,cols:4"'
        )
    return Shape(x)


def combined_dimension(dims: Sequence[Dimension], name: Optional[str] = None) -> Dimension:
    """Returns one Dimension whose size is the product of those of `dims`.

    Args:
      dims: a nonempty sequence of Dimensions.
      name: its name; the name of the first of `dims` if None.

    Raises:
      ValueError: `dims` is empty and no name is given.
    """
    if not dims and not name:
        raise ValueError("cannot combine no dimensions without a name for the result")
    return Dimension(name or dims[0].name, list_product(d.size for d in dims))


def anonymous_shape(shape: ShapeLike) -> Shape:
    """Returns a Shape of the same sizes, with dimension names that no layout rule mentions."""
    sizes = convert_to_shape(shape).to_integer_list
    return Shape([Dimension(f"{ANONYMOUS_PREFIX}{i}", size) for i, size in enumerate(sizes)])


def is_subsequence(short_seq: Sequence[T], long_seq: Sequence[T]) -> bool:
    """Returns whether `short_seq` occurs in `long_seq` in order, gaps allowed."""
    # One iterator for all: each search goes on behind the element that the one before has found.
    remaining = iter(long_seq)
    return all(any(x == y for y in remaining) for x in short_seq)


def verify_no_new_dims(input_shapes: Iterable[Shape], output_shape: Shape) -> None:
    """Checks that every dimension of `output_shape` is in one of `input_shapes`.

    Raises:
      ValueError: a dimension of the output is in no input.
    """
    input_shapes = list(input_shapes)
    of_inputs = {d for shape in input_shapes for d in shape}
    new = [d for d in output_shape if d not in of_inputs]
    if new:
        raise ValueError(
            f"output shape {output_shape} has dimensions that no input has: "
            f"{dims_text(new)}; the inputs are "
            f"{', '.join(map(str, input_shapes))}. Use mtf.broadcast to add a dimension"
        )


def check_sizes_of_names(what: str, shapes: Iterable[Shape]) -> None:
    """Reports a slip if a dimension name has different sizes in different shapes.

    A name that has two sizes in one shape (as in convolution kernels) matches either.

    Args:
      what: the operation, for the message.
      shapes: Shapes of the Tensors that the operation matches by name.

    Raises:
      ValueError: within `mtf.strict()`.
    """
    # The message lists them again, when an iterator would have nothing left.
    shapes = list(shapes)
    sizes: dict[str, set[int]] = {}
    for shape in shapes:
        own: dict[str, set[int]] = {}
        for d in shape:
            own.setdefault(d.name, set()).add(d.size)
        for name, now in own.items():
            before = sizes.setdefault(name, now)
            if before.isdisjoint(now):
                two = sorted([min(before), min(now)])
                slip(
                    f"{what}: the name {name!r} has two sizes in one operation, "
                    f"{min(before)} and {min(now)}: "
                    f"{', '.join(map(str, shapes))}. These are different dimensions, and are not "
                    "matched with each other. Give them one size if they should be, else give one "
                    "of them another name with mtf.rename_dimension",
                    # Without the operation, so that many layers with one mistake warn once.
                    key=f"sizes/{name}/{two}",
                )
            # A later shape may match any of the sizes so far, such as one of a kernel's two.
            sizes[name] = before | now


def check_names_differ(what: str, result: Shape, *given: Shape) -> None:
    """Reports a slip if the result of an operation has two dimensions of one name.

    Args:
      what: the operation, for the message.
      result: the Shape of its result.
      *given: Shapes of its inputs; names that occur twice in one of these are not reported.

    Raises:
      ValueError: within `mtf.strict()`.
    """
    names = result.dimension_names
    # In order, so that of several names each run reports the same one as an error.
    for name in sorted({n for n in names if names.count(n) > 1}):
        if any(shape.dimension_names.count(name) > 1 for shape in given):
            continue
        two = [d.size for d in result if d.name == name][:2]
        slip(
            f"{what}: the result {result} has two dimensions called {name!r}, of "
            f"sizes {two[0]} and {two[1]}. No layout can split either, and what goes by name takes "
            "the first. Give one of them another name",
            key=f"sizes/{name}/{sorted(two)}",
        )


def broadcast_shape(shape1: Shape, shape2: Shape, output_shape: Optional[Shape]) -> Shape:
    """Returns the shape of a binary operation's output.

    That is `output_shape` if given; otherwise the longer shape, if the other is a subsequence of
    it; otherwise the dimensions of the first, then those of the second that the first lacks.
    Dimensions of size 1 are not broadcast to other sizes.

    Raises:
      ValueError: `output_shape` lacks a dimension of an input.
    """
    if output_shape is not None:
        missing = [d for d in list(shape1) + list(shape2) if d not in output_shape]
        if missing:
            raise ValueError(
                f"cannot broadcast {shape1} and {shape2} to {output_shape}: it lacks "
                f"{dims_text(missing)}"
            )
        return output_shape
    # Before appending, so that [d] + [batch, d] has the order of the larger one on either side.
    if is_subsequence(shape1.dims, shape2.dims):
        return shape2
    if is_subsequence(shape2.dims, shape1.dims):
        return shape1
    # Dimensions are matched by name and size, so 1 is a size like any other and is not stretched.
    return shape1 + [d for d in shape2 if d not in shape1]
