"""What is split over which processors: layout rules, layouts of tensors, and of what is stored."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union, overload

import gin

from mesh_tensorflow._calls import within
from mesh_tensorflow._core.errors import (
    WrongTypeError,
    did_you_mean,
    dims_text,
    slip,
    splittable_hint,
)
from mesh_tensorflow._core.shape import (
    JOIN,
    Dimension,
    JointAxis,
    Shape,
    ShapeLike,
    convert_to_shape,
    list_product,
    single_axes,
    split_pairs,
)

if TYPE_CHECKING:
    import tensorflow.compat.v1 as tf

    from mesh_tensorflow._mesh.mesh_impl import MeshImpl


class StoredName(str):
    """The name of a dimension where it is stored, which one mesh dimension splits.

    It is equal to no name that a program gives, whatever characters that has.

    Attributes:
      plain: the name of the dimension where it is computed with.
      mesh_dim: the name of the mesh dimension, or names joined by "+".
    """

    plain: str
    mesh_dim: str

    def __new__(cls, plain: str, mesh_dim: str) -> StoredName:
        """Creates the name, which reads plain@mesh_dim."""
        name = super().__new__(cls, f"{plain}@{mesh_dim}")
        name.plain, name.mesh_dim = plain, mesh_dim
        return name

    # Pickle and copy call `__new__` with these; a str gives them only itself, without its parts.
    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return self.plain, self.mesh_dim

    def __eq__(self, other: object) -> bool:
        # Python asks a subclass first, so "a@b" == name is answered here, too, and is false.
        return isinstance(other, StoredName) and str.__eq__(self, other)

    # A str has a __ne__ of its own, which would compare characters.
    def __ne__(self, other: object) -> bool:
        return not self == other

    # Python drops the inherited hash where __eq__ is defined.
    def __hash__(self) -> int:
        return hash((StoredName, str.__hash__(self)))


class TensorLayout:
    """For each axis of a tensor, the mesh axis that splits it, or None.

    Where several mesh axes split one axis, it is a JointAxis. Layouts are equal when their axes
    are, in order. They are not hashable.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tensor_axis_to_mesh_axis: Iterable[Union[int, Sequence[int], None]]):
        """Creates a TensorLayout.

        Args:
          tensor_axis_to_mesh_axis: for each tensor axis, a mesh axis, several of them, the first
            outermost, or None.
        """
        self._tensor_axis_to_mesh_axis: tuple[Optional[int], ...] = tuple(
            JointAxis(axis) if isinstance(axis, (list, tuple)) else axis
            for axis in tensor_axis_to_mesh_axis
        )

    @property
    def tensor_axis_to_mesh_axis(self) -> tuple[Optional[int], ...]:
        """For each tensor axis, the mesh axis that splits it, or None."""
        return self._tensor_axis_to_mesh_axis

    def plain(self) -> list[Union[int, list[int], None]]:
        """Returns what JSON can say, and what makes it again: a list for a JointAxis."""
        axes = self._tensor_axis_to_mesh_axis
        return [list(axis.axes) if isinstance(axis, JointAxis) else axis for axis in axes]

    @property
    def is_fully_replicated(self) -> bool:
        """Whether no axis is split."""
        return all(axis is None for axis in self._tensor_axis_to_mesh_axis)

    def mesh_axis_to_tensor_axis(self, mesh_ndims: int) -> tuple[Optional[int], ...]:
        """Returns, for each of `mesh_ndims` mesh axes, the tensor axis it splits, or None."""
        # One at most: no layout splits two dimensions over one mesh axis.
        splits = {
            mesh_axis: axis
            for axis, of_axis in enumerate(self._tensor_axis_to_mesh_axis)
            for mesh_axis in single_axes([of_axis])
        }
        return tuple(splits.get(mesh_axis) for mesh_axis in range(mesh_ndims))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TensorLayout)
            and self._tensor_axis_to_mesh_axis == other._tensor_axis_to_mesh_axis
        )

    def __repr__(self) -> str:
        return f"TensorLayout{self._tensor_axis_to_mesh_axis!r}"

    def __len__(self) -> int:
        return len(self._tensor_axis_to_mesh_axis)

    @overload
    def __getitem__(self, key: int) -> Optional[int]: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[Optional[int], ...]: ...
    def __getitem__(
        self, key: Union[int, slice]
    ) -> Union[Optional[int], tuple[Optional[int], ...]]:
        return self._tensor_axis_to_mesh_axis[key]

    def __iter__(self) -> Iterator[Optional[int]]:
        return iter(self._tensor_axis_to_mesh_axis)


# At the end of a rule that allows sizes which the mesh does not divide.
UNEVEN = "?"


def joined_names(name: str, names: Collection[str]) -> list[str]:
    """Returns the names of mesh dimensions that a rule joins by "+"; of one, that one.

    Args:
      name: such as "rows", or "rows+cols".
      names: those of a mesh, of which one may have a "+" in it.
    """
    name = name if name in names else name.removesuffix(UNEVEN)
    return [name] if name in names else name.split(JOIN)


def mesh_axis_of_name(name: str, mesh_shape: Shape) -> Optional[int]:
    """Returns the mesh axis of a name, or of names joined by "+"; None if the mesh has none.

    Of joined names, those that the mesh lacks are left out, as if their size were 1.

    Args:
      name: such as "rows", or "rows+cols".
      mesh_shape: a Shape.
    """
    names = mesh_shape.dimension_names
    if name in names:
        return names.index(name)
    axes = [names.index(part) for part in joined_names(name, names) if part in names]
    if len(axes) < 2:
        return axes[0] if axes else None
    return JointAxis(axes)


class LayoutRules:
    """A set of rules (tensor dimension name, mesh dimension name).

    Names of mesh dimensions joined by "+", as in "batch:rows+cols", split a dimension over several,
    the first of them outermost: its parts are the largest. A "?" at the end, as in "vocab:cols?",
    allows sizes that the mesh does not divide: the last parts are shorter. A rule whose tensor or
    mesh dimension does not exist splits nothing; a Lowering warns about it, or raises within
    `mtf.strict()`. `unknown_mesh_dimensions` lists such mesh dimensions.

    Attributes:
      uneven: the names of tensor dimensions whose sizes need not be divisible.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]):
        """Creates LayoutRules.

        Args:
          pairs: pairs (tensor dimension name, mesh dimension name, or several joined by "+"); a
            "?" at the end allows sizes that the mesh does not divide.

        Raises:
          ValueError: a mesh dimension is joined with itself, or with no name.
        """
        written = [(tensor_dim, mesh_dim) for tensor_dim, mesh_dim in pairs]
        self.uneven = frozenset(t for t, m in written if m.endswith(UNEVEN))
        plain = [(t, m.removesuffix(UNEVEN)) for t, m in written]
        self._pairs = set(plain)
        self._mesh_dims: dict[str, list[str]] = {}
        for tensor_dim, mesh_dim in dict.fromkeys(plain):
            self._mesh_dims.setdefault(tensor_dim, []).append(mesh_dim)
            joined = mesh_dim.split(JOIN) if JOIN in mesh_dim else []
            if len(joined) > 1 and ("" in joined or len(set(joined)) < len(joined)):
                raise ValueError(
                    f"layout rule {tensor_dim}:{mesh_dim} joins mesh dimensions by {JOIN!r}: write "
                    "each of them once, as in batch:rows+cols"
                )
        twice = sorted({f"{t}:{m}" for t, m in plain if plain.count((t, m)) > 1})
        if twice:
            slip(
                f"layout rule {', '.join(twice)} is given more than once in "
                f"{','.join(f'{t}:{m}' for t, m in plain)}. Once is enough; is one of them meant "
                "to be another rule?"
            )

    def __repr__(self) -> str:
        text = ", ".join(f"{tensor_dim}:{mesh_dim}" for tensor_dim, mesh_dim in self.written)
        return f"LayoutRules{{{text}}}"

    @property
    def written(self) -> list[tuple[str, str]]:
        """The rules as `pairs`, with a "?" at the end of those that allow uneven sizes."""
        return [(t, m + UNEVEN if t in self.uneven else m) for t, m in self.pairs]

    def of_pairs(self, pairs: Iterable[tuple[str, str]]) -> LayoutRules:
        """Returns rules of other pairs, in which the same tensor dimensions may be uneven."""
        return LayoutRules((t, m + UNEVEN if t in self.uneven else m) for t, m in pairs)

    def without(self, name: str) -> LayoutRules:
        """Returns the rules without those for a tensor dimension, which then is not split."""
        return self.of_pairs((t, m) for t, m in self.pairs if t != name)

    def allowing_uneven(self) -> LayoutRules:
        """Returns the same rules, all of which allow sizes that the mesh does not divide."""
        return LayoutRules((t, m + UNEVEN) for t, m in self.pairs)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The rules, (tensor dimension name, mesh dimension name), sorted."""
        # The order of a set of strings is another in each process, and processes build one program.
        return sorted(self._pairs)

    def on_mesh(self, mesh_shape: Shape) -> LayoutRules:
        """Returns the rules without mesh dimensions of one processor among those that are joined.

        Otherwise rows+cols and cols+rows would be two ways to split where there is but one row.

        Args:
          mesh_shape: a Shape.
        """
        names = mesh_shape.dimension_names
        single = {d.name for d in mesh_shape if d.size == 1}
        pairs = []
        for tensor_dim, mesh_dim in self.pairs:
            joined = joined_names(mesh_dim, names)
            parts = [name for name in joined if name not in single] or joined[:1]
            pairs.append((tensor_dim, JOIN.join(parts)))
        return self if pairs == self.pairs else self.of_pairs(pairs)

    def mesh_axis(self, tensor_dimension: Dimension, mesh_shape: Shape) -> Optional[int]:
        """Returns the mesh axis that splits `tensor_dimension`, or None; a JointAxis for several.

        Raises:
          ValueError: two rules split the dimension.
        """
        name = tensor_dimension.name
        # A stored name says itself what splits it, so no layout rule can split it otherwise.
        if isinstance(name, StoredName):
            return mesh_axis_of_name(name.mesh_dim, mesh_shape)
        axes = []
        for mesh_dim in self._mesh_dims.get(name, ()):
            axis = mesh_axis_of_name(mesh_dim, mesh_shape)
            axes += [] if axis is None else [axis]
        if len(axes) > 1:
            axes.sort()
            joined = JOIN.join(mesh_shape[a].name for a in dict.fromkeys(single_axes(axes)))
            raise ValueError(
                f"Tensor dimension {dims_text([tensor_dimension])} maps to multiple mesh "
                f"dimensions {dims_text([mesh_shape[a] for a in axes])} by {self}. Keep one of "
                f"these rules; {name}:{joined} splits it over all of them, the first outermost"
            )
        return axes[0] if axes else None

    def tensor_dimension_to_mesh_axis(
        self, tensor_dimension: Dimension, mesh_shape: Shape
    ) -> Optional[int]:
        """Returns the mesh axis that splits `tensor_dimension`, or None.

        Raises:
          ValueError: several mesh axes split it, which `mesh_axis` returns as one; or two rules do.
        """
        axis = self.mesh_axis(tensor_dimension, mesh_shape)
        if isinstance(axis, JointAxis):
            raise ValueError(
                f"tensor_dimension_to_mesh_axis: {dims_text([tensor_dimension])} is split over "
                f"several mesh dimensions, {dims_text(mesh_shape[a] for a in axis.axes)}, by "
                f"{self}. Call mesh_axis, which returns them as one axis, or splitting_axes of a "
                "mesh implementation, which lists them"
            )
        return axis

    def tensor_layout(self, tensor_shape: ShapeLike, mesh_shape: ShapeLike) -> TensorLayout:
        """Returns the layout of a tensor of shape `tensor_shape` on a mesh.

        Args:
          tensor_shape: a Shape, or what converts to one.
          mesh_shape: a Shape, or what converts to one.

        Raises:
          ValueError: two tensor dimensions are split over one mesh dimension, or two rules split
            one.
        """
        tensor_shape = convert_to_shape(tensor_shape)
        mesh_shape = convert_to_shape(mesh_shape)
        axes = [self.mesh_axis(d, mesh_shape) for d in tensor_shape]
        single = single_axes(axes)
        # If one coordinate cut two dimensions, no processor would have blocks off the diagonal.
        for mesh_axis, mesh_dim in enumerate(mesh_shape):
            if single.count(mesh_axis) > 1:
                dims = [d for d, a in zip(tensor_shape, axes) if mesh_axis in single_axes([a])]
                raise ValueError(
                    f"Two Tensor Dimensions may not map to the same Mesh Dimension: "
                    f"{dims_text(dims)} of {tensor_shape} are both split over mesh dimension "
                    f"{dims_text([mesh_dim])} by {self}. Remove one of the rules, or rename "
                    "one of the dimensions (mtf.rename_dimension) so that no rule splits it"
                    f"{self._or_free(dims, mesh_dim, mesh_shape, single)}"
                )
        return TensorLayout(axes)

    def _or_free(
        self, dims: Sequence[Dimension], mesh_dim: Dimension, mesh_shape: Shape, used: list[int]
    ) -> str:
        """Returns the end of a sentence: what a mesh dimension that splits no other could do."""
        free = [d.name for axis, d in enumerate(mesh_shape) if axis not in used and d.size > 1]
        if not free:
            return ""
        # Of the rules as they are: one of the two may be over several mesh dimensions already.
        first = dict(self.pairs).get(dims[0].name, mesh_dim.name)
        return (
            f"; {free[0]} splits neither: {dims[1].name}:{free[0]} splits both, and "
            f"{dims[0].name}:{first}{JOIN}{free[0]} one of them over both"
        )

    def check_divisible(self, tensor_shape: Shape, mesh_shape: Shape, layout: TensorLayout) -> None:
        """Checks that `layout` splits a tensor into equal parts, where it has to.

        Raises:
          ValueError: a size is not divisible by the number of parts, and its rule has no "?".
        """
        for d, axis in zip(tensor_shape, layout):
            # All slices have one shape: a program of a SIMD mesh is the same on each processor.
            if axis is not None and d.size % mesh_shape[axis].size and d.name not in self.uneven:
                mesh_dim = mesh_shape[axis]
                raise ValueError(
                    f"Tensor dimension size not divisible by mesh dimension size: "
                    f"{dims_text([d])} of {tensor_shape} cannot be split over mesh dimension "
                    f"{dims_text([mesh_dim])} by {self}. "
                    f"{splittable_hint(d, mesh_dim)}"
                )

    def mesh_dimension_name_to_tensor_dimension_names(self, mesh_dimension_name: str) -> list[str]:
        """Returns the names of the tensor dimensions split over a mesh dimension, sorted."""
        name = mesh_dimension_name
        return sorted(t for t, m in self._pairs if name in joined_names(m, [name]))

    def unknown_mesh_dimensions(self, mesh_shape: Shape) -> list[str]:
        """Returns the mesh dimension names in the rules that `mesh_shape` lacks, sorted."""
        names = mesh_shape.dimension_names
        return sorted({part for _, m in self._pairs for part in joined_names(m, names)} - {*names})


def uneven_names(mesh_impl: Any) -> frozenset[str]:
    """Returns the names of dimensions that a mesh implementation may split unevenly.

    Args:
      mesh_impl: a MeshImpl; also a user's, whose layout rules may be of another class.
    """
    return getattr(getattr(mesh_impl, "layout_rules", None), "uneven", frozenset())


def padded_dims(mesh_impl: Any, dims: Iterable[Dimension]) -> list[Dimension]:
    """Returns the Dimensions of which slices end in padding, of those given.

    Args:
      mesh_impl: as for `uneven_names`.
      dims: Dimensions.
    """
    return [d for d in dims if mesh_impl.padding(d)] if uneven_names(mesh_impl) else []


# LayoutRules, or what converts to them.
LayoutLike = Union[LayoutRules, str, Iterable[tuple[str, str]]]


def convert_to_layout_rules(x: LayoutLike) -> LayoutRules:
    """Returns LayoutRules made from `x`.

    Args:
      x: LayoutRules, a string such as "batch:rows,d_ff:cols", or an iterable of pairs. An empty
        iterable, even an empty dict, has no rules.

    Raises:
      ValueError: a string is malformed, or an element is not a pair.
      TypeError: `x` is none of these.
    """
    if isinstance(x, LayoutRules):
        return x
    if isinstance(x, str):
        return LayoutRules(split_pairs(x, "layout"))
    written = 'write it as "batch:rows,d_ff:cols", or as a list of pairs of names; "" has no rules'
    # A dict would give its keys alone, which are no rules.
    if not isinstance(x, Iterable) or (isinstance(x, Mapping) and x):
        raise TypeError(f"{x!r} ({type(x).__name__}) is no layout: {written}")
    # Once, since an iterator would have nothing left after the check.
    pairs = list(x)
    wrong = [pair for pair in pairs if not isinstance(pair, (tuple, list)) or len(pair) != 2]
    if wrong:
        raise ValueError(f"{wrong[0]!r} in the layout {x!r} is no pair of names: {written}")
    return LayoutRules(pairs)


def parts_along(mesh_axis: Optional[int], mesh_shape: Shape) -> int:
    """Returns the number of parts that a mesh axis, or a JointAxis, splits a dimension into.

    Args:
      mesh_axis: the axis; None splits nothing, so there is one part.
      mesh_shape: the Shape of the mesh.
    """
    return 1 if mesh_axis is None else mesh_shape[mesh_axis].size


def tensor_dim_to_mesh_dim_size(
    layout: LayoutLike, mesh_shape: ShapeLike, tensor_dim: Dimension
) -> int:
    """Returns the number of parts that `layout` splits `tensor_dim` into; 1 if it is not split.

    Args:
      layout: LayoutRules, or what converts to them.
      mesh_shape: a Shape, or what converts to one.
      tensor_dim: a Dimension.
    """
    mesh_shape = convert_to_shape(mesh_shape)
    axis = convert_to_layout_rules(layout).mesh_axis(tensor_dim, mesh_shape)
    return parts_along(axis, mesh_shape)


def tensor_dim_to_size_per_split(
    layout: LayoutLike, mesh_shape: ShapeLike, tensor_dim: Dimension
) -> int:
    """Returns the size of one part of `tensor_dim` under `layout`.

    Args:
      layout: LayoutRules, or what converts to them.
      mesh_shape: a Shape, or what converts to one.
      tensor_dim: a Dimension.

    Raises:
      ValueError: the size is not divisible by the number of parts.
    """
    num_parts = tensor_dim_to_mesh_dim_size(layout, mesh_shape, tensor_dim)
    if tensor_dim.size % num_parts:
        raise ValueError(
            f"Tensor dimension size not divisible by mesh dimension size: "
            f"{dims_text([tensor_dim])} cannot be cut into {num_parts} equal parts by layout "
            f"{layout} on mesh {mesh_shape}. Choose a size that is a multiple of {num_parts}"
        )
    return tensor_dim.size // num_parts


# -- the processors of a mesh, by number and coordinates

MeshShape = Union[Shape, Sequence[int]]


def _sizes(mesh_shape: MeshShape) -> list[int]:
    """Returns the sizes of a mesh, given as a Shape or as numbers."""
    if isinstance(mesh_shape, Shape):
        return mesh_shape.to_integer_list
    if not isinstance(mesh_shape, (list, tuple)) or not all(isinstance(s, int) for s in mesh_shape):
        raise WrongTypeError(f"the shape of a mesh is a mtf.Shape or sizes, not {mesh_shape!r}")
    return list(mesh_shape)


def pnum_to_processor_coordinates(mesh_shape: MeshShape, pnum: int) -> list[int]:
    """Returns the coordinates of processor `pnum`; the last mesh dimension varies fastest."""
    coordinates = []
    # pnum = (c[0] * size[1] + c[1]) * size[2] + ..., so the last coordinate is the first remainder.
    for size in reversed(_sizes(mesh_shape)):
        coordinates.append(pnum % size)
        pnum //= size
    return coordinates[::-1]


def slice_sizes(
    tensor_shape: Shape, layout: Iterable[Optional[int]], mesh_shape: Shape
) -> list[int]:
    """Returns the sizes of a slice, rounded up: the last ones may end in padding."""
    return [-(-d.size // parts_along(axis, mesh_shape)) for d, axis in zip(tensor_shape, layout)]


def slice_coordinates(
    layout: Iterable[Optional[int]], mesh_shape: Shape, pnum: int
) -> tuple[int, ...]:
    """Returns, for each tensor axis, the number of the part that processor `pnum` holds."""
    coordinates = pnum_to_processor_coordinates(mesh_shape, pnum)
    numbers = []
    for axis in layout:
        if isinstance(axis, JointAxis):
            sizes = [mesh_shape[a].size for a in axis.axes]
            part = processor_coordinates_to_pnum(sizes, [coordinates[a] for a in axis.axes])
        else:
            part = 0 if axis is None else coordinates[axis]
        numbers.append(part)
    return tuple(numbers)


def coordinate_of(mesh_shape: Shape, pnum: int, mesh_axis: int) -> int:
    """Returns the coordinate of processor `pnum` along a mesh axis, or along a JointAxis."""
    return slice_coordinates([mesh_axis], mesh_shape, pnum)[0]


def processor_coordinates_to_pnum(mesh_shape: MeshShape, coord: Sequence[int]) -> int:
    """Returns the number of the processor at coordinates `coord`."""
    pnum = 0
    for size, c in zip(_sizes(mesh_shape), coord):
        pnum = pnum * size + c
    return pnum


def pnum_to_group(
    mesh_shape: MeshShape, group_dims: Sequence[int], pnum: Union[int, tf.Tensor]
) -> Union[int, tf.Tensor]:
    """Returns the number of the group that processor `pnum` is in.

    A group is the processors whose coordinates differ only along the mesh axes `group_dims`.

    Args:
      mesh_shape: a Shape, or its sizes.
      group_dims: mesh axes.
      pnum: a processor number; a Python int or an integer tf.Tensor.
    """
    group = 0
    stride = list_product(_sizes(mesh_shape))
    for axis, size in enumerate(_sizes(mesh_shape)):
        # Only +, * and // with numbers, so that `pnum` may be a tf.Tensor of a SIMD program.
        stride //= size
        # Row-major in the other axes, whose coordinates all members of a group share.
        if axis not in group_dims:
            group = group * size + pnum // stride % size
    return group


def processor_groups(mesh_shape: MeshShape, group_dims: Sequence[int]) -> list[list[int]]:
    """Returns the groups of processors that differ only along mesh axes `group_dims`.

    Groups are ordered by `pnum_to_group`. Their members are ordered by processor number; along one
    JointAxis, by coordinate.
    """
    axes = single_axes(group_dims)
    by_outside: dict[tuple[int, ...], list[int]] = {}
    # Row-major, so that along one axis member i of a group has coordinate i: collectives need that.
    for pnum, coord in enumerate(itertools.product(*map(range, _sizes(mesh_shape)))):
        outside = tuple(c for axis, c in enumerate(coord) if axis not in axes)
        by_outside.setdefault(outside, []).append(pnum)
    groups = list(by_outside.values())
    if len(group_dims) == 1 and axes != sorted(axes):
        assert isinstance(mesh_shape, Shape)  # only a MeshImpl has a JointAxis
        return [
            sorted(g, key=lambda pnum: coordinate_of(mesh_shape, pnum, group_dims[0]))
            for g in groups
        ]
    return groups


def shifted_sources(size: int, offset: int, wrap: bool) -> list[Optional[int]]:
    """Returns, for each coordinate along a mesh axis, the coordinate it receives from in a shift.

    Args:
      size: size of the mesh axis.
      offset: the number of processors to shift by.
      wrap: whether to wrap around; otherwise the source of processors at the end is None.
    """
    # A shift sends the slice of coordinate c to c + offset. Python's remainder is never negative,
    # so shifts backward and beyond the axis wrap too.
    return [
        source % size if wrap or 0 <= source < size else None
        for source in range(-offset, size - offset)
    ]


# -- how variables are stored, where that is not how they are computed with

_stored_in_force: contextvars.ContextVar[Optional[dict[str, Any]]] = contextvars.ContextVar(
    "stored_layout", default=None
)
# For `storing`: the executed mesh of another one, which stores in parts for both. Even a None hides
# what gin binds.
AS_COMPUTED = {"variable_layout": None, "zero": 0, "zero_axis": None}
_EARLY = 2  # the stage from which each gradient is scattered before the next is computed
WEIGHTS_TOO = 3  # the stage from which weights are stored in parts, besides slots


@dataclasses.dataclass(frozen=True, eq=False)
class StoredLayout:
    """How variables are stored, where that is not how they are computed with.

    ZeRO: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter
    models" (SC 2020).

    Attributes:
      stage: 3 if weights are stored in parts; 1 or 2 if only what optimizers keep is. From 2 on,
        a gradient is scattered before the next one is computed.
      rules: which dimensions are split over which mesh dimensions.
      mesh_dim: the name of a mesh dimension, or several joined by "+", that splits one dimension of
        each variable; or None.
    """

    stage: int
    rules: LayoutRules
    mesh_dim: Optional[str]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoredLayout) and self._key() == other._key()

    def __str__(self) -> str:
        rules = ",".join(f"{d}:{m}" for d, m in self.rules.pairs)
        over = "" if self.mesh_dim is None else f" over {self.mesh_dim}"
        return f"zero={self.stage}{over}" + (f", variables {rules}" if rules else "")

    def __hash__(self) -> int:
        return hash(self._key())

    @property
    def is_early(self) -> bool:
        """Whether each gradient is scattered before the next one is computed."""
        return self.stage >= _EARLY

    def _key(self) -> tuple:
        # By pairs, since objects of LayoutRules are equal only to themselves.
        return self.stage, tuple(self.rules.pairs), self.mesh_dim

    def names(self, shape: Shape, mesh_impl: MeshImpl) -> dict[str, StoredName]:
        """Returns the names under which dimensions of a variable are stored, by their own.

        A dimension that is split already, or that a mesh dimension does not divide, is left whole;
        so is one that another dimension of the variable shares its mesh dimension or its name with.
        Of mesh dimensions that are joined, those are left out that split another dimension.

        Args:
          shape: the Shape of a variable.
          mesh_impl: a MeshImpl.
        """
        # No two dimensions of a tensor may be split over one mesh axis, and some are by the layout.
        used = set(mesh_impl.splitting_axes(shape))
        stored: dict[str, StoredName] = {}
        for d, mesh_dim in self._wanted(shape):
            # Of joined mesh dimensions, those that the layout has left: with ZeRO over all of a
            # mesh, what one of its dimensions splits is stored over the others.
            axes = single_axes([mesh_axis_of_name(mesh_dim, mesh_impl.shape)])
            axes = [a for a in axes if a not in used and mesh_impl.shape[a].size > 1]
            num_parts = list_product(mesh_impl.shape[axis].size for axis in axes)
            split = mesh_impl.mesh_axis(d) is not None
            # A kernel may have one name with two sizes. What is renamed by it would be both.
            twice = shape.dimension_names.count(d.name) > 1
            if num_parts == 1 or split or twice or d.name in stored or d.size % num_parts:
                continue
            used.update(axes)
            over = JOIN.join(mesh_impl.shape[axis].name for axis in axes)
            stored[d.name] = StoredName(d.name, over)
        return stored

    def _wanted(self, shape: Shape) -> Iterator[tuple[Dimension, str]]:
        """Yields dimensions with the mesh dimensions to split them over, the best first."""
        for d in shape:
            for tensor_dim, mesh_dim in self.rules.pairs:
                if tensor_dim == d.name:
                    yield d, mesh_dim
        if self.mesh_dim is not None:
            # After the rules: what a rule says of a dimension precedes the choice of any.
            for d in sorted(shape, key=lambda d: -d.size):
                yield d, self.mesh_dim


def plain_shape(shape: Shape) -> Shape:
    """Returns a Shape with the dimensions' own names, without how they are stored."""
    names = (d.name.plain if isinstance(d.name, StoredName) else d.name for d in shape)
    return Shape([Dimension(name, d.size) for name, d in zip(names, shape)])


def storing(**options: Any) -> contextlib.AbstractContextManager[None]:
    """Makes options of `stored_layout` those of mesh implementations that are made within.

    Args:
      **options: `variable_layout`, `zero` and `zero_axis`, where they are not None.
    """
    # The options around this context stay in force where these say nothing.
    return within(_stored_in_force, {**(_stored_in_force.get() or {}), **options})


def given_stored_layout(
    mesh_shape: Shape,
    variable_layout: Optional[LayoutLike],
    zero: Optional[int],
    zero_axis: Optional[str],
) -> Optional[StoredLayout]:
    """Returns the StoredLayout that arguments ask for, or, where they are None, `storing` or gin.

    Args:
      mesh_shape: shape of the mesh.
      variable_layout: see `stored_layout`.
      zero: likewise.
      zero_axis: likewise.
    """
    named = {"variable_layout": variable_layout, "zero": zero, "zero_axis": zero_axis}
    arguments: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    # An argument that is left out is not passed on as None, which would hide what gin binds.
    return stored_layout(mesh_shape, **{**(_stored_in_force.get() or {}), **arguments})


@gin.configurable(module="mesh_tensorflow", denylist=["mesh_shape"])
def stored_layout(
    mesh_shape: Shape,
    variable_layout: Optional[LayoutLike] = None,
    zero: int = 0,
    zero_axis: Optional[str] = None,
) -> Optional[StoredLayout]:
    """Returns how variables are stored on a mesh, or None if just as they are computed with.

    Args:
      mesh_shape: shape of the mesh.
      variable_layout: LayoutRules, or what converts to them, such as "d_model:rows"; or None.
      zero: 0, or the stage of ZeRO.
      zero_axis: the name of a mesh dimension, or several joined by "+", the first outermost; the
        only one of the mesh if None.

    Raises:
      ValueError: the stage is none, or the mesh lacks a dimension.
    """
    if zero not in (0, 1, 2, 3):
        raise ValueError(
            f"zero={zero!r}: the stage of ZeRO is 1 or 2 (what optimizers keep is stored in "
            "parts), 3 (weights too), or 0 for neither"
        )
    rules = convert_to_layout_rules(variable_layout or "")
    names = mesh_shape.dimension_names
    unknown = rules.unknown_mesh_dimensions(mesh_shape)
    over = LayoutRules([] if zero_axis is None else [("", zero_axis)])
    absent = over.unknown_mesh_dimensions(mesh_shape)
    if unknown or absent:
        name = [*unknown, *absent][0]
        what = f"variable_layout {rules}: {name!r}" if unknown else f"zero_axis={zero_axis!r}"
        part = f": {name!r}" if not unknown and name != zero_axis else ""
        raise ValueError(f"{what}{part} {_is_none_of(name, mesh_shape)}")
    if zero_axis is not None and not zero:
        raise ValueError(f"zero_axis={zero_axis!r} has no effect without zero=1, 2 or 3")
    if not zero and not rules.pairs:
        return None
    # Rules alone store weights in parts, as stage 3 does. With rules, a mesh axis is not guessed.
    if not zero or rules.pairs:
        return StoredLayout(zero or WEIGHTS_TOO, rules, zero_axis)
    if not names:
        raise ValueError(
            f"zero={zero} on a mesh without dimensions: one processor stores everything. Give the "
            "mesh a dimension, such as all=1, or leave zero out"
        )
    if zero_axis is None and len(names) != 1:
        raise ValueError(
            f"zero={zero} on the mesh {dims_text(mesh_shape)}: say over which of its dimensions, "
            f"by zero_axis={names[0]!r}, usually that which splits the batch, or over all of them, "
            f"by zero_axis={JOIN.join(names)!r}"
        )
    return StoredLayout(zero, rules, zero_axis or names[0])


def _is_none_of(name: str, mesh_shape: Shape) -> str:
    """Returns the end of an error: a mesh has no dimension of a name, and what to write instead."""
    names = mesh_shape.dimension_names
    if not names:
        return "is no dimension of the mesh, which has none. Give it one, or leave this out"
    nearest = did_you_mean(name, names)
    instead = nearest if nearest != "." else ". Name one of these"
    return f"is no dimension of the mesh {dims_text(mesh_shape)}{instead}"
