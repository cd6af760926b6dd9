"""MeshImpl: how the operations of a Graph run on a mesh; what all its kinds share.

Operations know shapes, layouts and this interface, and nothing about devices:

- *compute*: `slicewise(fn, *inputs)` calls a function of tf.Tensors on each processor's slices;
- *communicate*: `allreduce`, `reduce_scatter`, `allconcat`, `alltoall` and `receive` (shifts) over
  mesh axes; `allsplit` keeps each processor's own part;
- *locate*: `laid_out_pnum` and `laid_out_pcoord` are a processor's number and coordinates;
- *convert*: `import_tf_tensor` slices a whole tensor, `export_to_tf_tensor` joins slices, `random`
  generates the slices of a random tensor;
- *store*: `LaidOutVariable` holds the slices of a variable.

They exchange laid-out tensors, whose form is up to the implementation: PlacementMeshImpl has a
tf.Tensor for each processor, each on its device; SimdMeshImpl has one, of the program of all.

An example: a tensor x [a=4, b=6] on the mesh "rows:2,cols:2" in the layout "a:rows".

    tensor_layout(x.shape)          (0, None): a is split over mesh axis 0, b is not split
    slice_shape(x.shape)            [2, 6]
    slice_begin(x.shape, pnum=2)    [2, 0]: processor 2 is in row 1
    laid_out_size(x.shape)          48: four slices of 12 elements

`slicewise(tf.exp, x)` is exp of four slices; as the slices of processors 0 and 1 are equal, one
memory domain computes them once. The sum of x over a and b takes two steps:
`slicewise(tf.reduce_sum, x)` gives a scalar on each processor, and `allreduce(sums, [0], "SUM")`
adds those of (0, 0) and (1, 0), and those of (0, 1) and (1, 1). To split b over cols instead of
a over rows, each processor keeps its columns by `allsplit(x, mesh_axis=1, split_axis=1)`, slices
[2, 3], and gathers the other rows by `allconcat(x, mesh_axis=0, concat_axis=0)`, slices [4, 3].

Results must not depend on the layout, so that a layout affects performance alone.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Optional, Protocol, TypeGuard, TypeVar, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.layout import (
    AS_COMPUTED,
    LayoutLike,
    LayoutRules,
    StoredLayout,
    TensorLayout,
    convert_to_layout_rules,
    coordinate_of,
    pnum_to_group,
    shifted_sources,
    slice_coordinates,
    slice_sizes,
    storing,
)
from mesh_tensorflow._core.operation import LaidOutLike, Tensor
from mesh_tensorflow._core.shape import (
    Dimension,
    JointAxis,
    Shape,
    ShapeLike,
    convert_to_shape,
    list_product,
    single_axes,
)
from mesh_tensorflow._mesh import slice_functions
from mesh_tensorflow._mesh.devices import mesh_text
from mesh_tensorflow._mesh.random_values import new_key

# What users name them by, where a program makes the mesh implementation for them.
MESH_IMPLS = ("placement", "simd", "pjrt")

if TYPE_CHECKING:
    from typing_extensions import Self


def wrong_slices(what: str, sizes: list[int], expected: list[int]) -> ValueError:
    """Returns the error of slices that have not the shape that the layout implies.

    Args:
      what: whose slices they are.
      sizes: the sizes of a slice.
      expected: those that the layout implies.
    """
    return ValueError(
        f"slices of {what} must have shape {expected} in this layout, but have {sizes}"
    )


# -- laid-out tensors


class LaidOutTensor:
    """The slices of one tensor that a program has: those of all processors, or of one.

    `MeshImpl.LaidOutTensor` is the subclass of a mesh implementation, which passes its instances
    to `slicewise` and to collectives.
    """

    def __init__(self, tensor_list: Sequence[tf.Tensor]):
        """Creates a LaidOutTensor.

        Args:
          tensor_list: the slices, tf.Tensors.
        """
        self._tensor_list = list(tensor_list)

    def __repr__(self) -> str:
        return f"[{','.join(map(repr, self._tensor_list))}]"

    @classmethod
    def from_tensor_list(cls, tensor_list: Sequence[tf.Tensor]) -> Self:
        """Creates an instance from a list of tf.Tensors."""
        return cls(tensor_list)

    @property
    def tensor_list(self) -> list[tf.Tensor]:
        """The slices."""
        return self._tensor_list

    @property
    def all_slices(self) -> list[tf.Tensor]:
        """The slices."""
        return self._tensor_list

    @property
    def slice_shape(self) -> list[int]:
        """The shape of one slice."""
        return self._tensor_list[0].shape.as_list()

    def of_shape(self, tensor_shape: Shape) -> LaidOutTensor:
        """Returns the same slices; a subclass may record the Shape of the whole tensor.

        Args:
          tensor_shape: the Shape of the whole tensor.
        """
        return self

    def to_laid_out_tensor(self) -> Self:
        """Returns itself."""
        return self


class LazyAllreduceSum:
    """A partial sum: the sum of a laid-out tensor over groups of processors, computed lazily.

    Additions and reshapes work on the summands, so that a sum of several partial sums is
    communicated once. `to_laid_out_tensor` computes the sum once and caches it.

    Attributes:
      mesh_impl: the MeshImpl that computes the sum.
      laid_out_input: the summands, a LaidOutTensor.
      mesh_axes: the mesh axes to sum over.
      add_counter_fn: called without arguments when the sum is computed; or None.
    """

    def __init__(
        self,
        mesh_impl: MeshImpl,
        laid_out_input: LaidOutTensor,
        mesh_axes: Sequence[int],
        add_counter_fn: Optional[Callable[[], None]] = None,
    ):
        self.mesh_impl = mesh_impl
        self.laid_out_input = laid_out_input
        self.mesh_axes = list(mesh_axes)
        self.add_counter_fn = add_counter_fn
        self._sum: Any = None

    def to_laid_out_tensor(self) -> Any:
        """Returns the sum, a LaidOutTensor."""
        if self._sum is None:
            # Counted once, where it is computed: a sum that nobody needs is not communicated.
            if self.add_counter_fn is not None:
                self.add_counter_fn()
            self._sum = self.mesh_impl.allreduce(self.laid_out_input, self.mesh_axes, "SUM")
        return self._sum

    @property
    def is_summed(self) -> bool:
        """Whether the sum has been computed."""
        return self._sum is not None

    @property
    def slice_shape(self) -> list[int]:
        """The shape of one slice."""
        return self.laid_out_input.slice_shape

    def __add__(self, other: LazyAllreduceSum) -> LazyAllreduceSum:
        """Returns the lazy sum with a compatible LazyAllreduceSum."""
        add = self.mesh_impl.slicewise
        return self.with_summands(
            # sum(a) + sum(b) = sum(a + b) over processors: one allreduce in place of two.
            add(lambda a, b: a + b, self.laid_out_input, other.laid_out_input)
        )

    def with_summands(self, summands: LaidOutTensor) -> LazyAllreduceSum:
        """Returns the lazy sum of other summands over the same mesh axes.

        Args:
          summands: a LaidOutTensor.
        """
        # Of an addition, the one allreduce is counted under the label of the first sum, as in the
        # classic.
        return LazyAllreduceSum(self.mesh_impl, summands, self.mesh_axes, self.add_counter_fn)


def is_pending(value: object) -> TypeGuard[LazyAllreduceSum]:
    """Returns whether a value is a partial sum that has not been summed yet."""
    return isinstance(value, LazyAllreduceSum) and not value.is_summed


def summands_of(value: LaidOutLike) -> LaidOutTensor:
    """Returns the slices of a value; of a sum that is pending, its summands."""
    return value.laid_out_input if is_pending(value) else value.to_laid_out_tensor()


class LazyLaidOutTensor:
    """A laid-out tensor that is computed on each use, such as a large constant."""

    def __init__(self, to_laid_out_tensor_fn: Callable[[], Any], slice_shape: Sequence[int]):
        """Creates a LazyLaidOutTensor.

        Args:
          to_laid_out_tensor_fn: returns the LaidOutTensor; called without arguments.
          slice_shape: the shape of one slice.
        """
        self._to_laid_out_tensor_fn = to_laid_out_tensor_fn
        self._slice_shape = list(slice_shape)

    def to_laid_out_tensor(self) -> Any:
        """Computes the value, a LaidOutTensor."""
        # Not cached: what is made again at each use takes no memory between its uses.
        return self._to_laid_out_tensor_fn()

    @property
    def slice_shape(self) -> list[int]:
        """The shape of one slice."""
        return self._slice_shape


def compatible_lazy_allreduce_sums(xs: Iterable[Any]) -> bool:
    """Returns whether all `xs` are pending sums over the same mesh axes of one MeshImpl."""
    xs = list(xs)
    # To add the summands of a sum that has been computed would communicate the same values again.
    if not xs or not all(isinstance(x, LazyAllreduceSum) and not x.is_summed for x in xs):
        return False
    first = xs[0]
    # Over other axes, sum(a) + sum(b) is no sum of a + b: each has groups of its own.
    return all(x.mesh_impl is first.mesh_impl and x.mesh_axes == first.mesh_axes for x in xs)


def convert_args_to_laid_out_tensors(xs: Iterable[Any]) -> list[Any]:
    """Returns `xs` with lazy values computed; other values are unchanged."""
    # By the method: laid-out tensors and the two kinds of lazy values have no class in common.
    return [x.to_laid_out_tensor() if hasattr(x, "to_laid_out_tensor") else x for x in xs]


# -- the interface

# Methods of MeshImpl that communicate, and the parts of names that their nodes have.
COLLECTIVES = ("allreduce", "reduce_scatter", "allconcat", "alltoall", "receive")

F = TypeVar("F", bound=Callable[..., Any])


def named_collective(method: F) -> F:
    """Makes a method of a mesh implementation make its nodes in a name scope of its own name.

    Args:
      method: one of COLLECTIVES.
    """
    name = method.__name__
    assert name in COLLECTIVES, name

    @functools.wraps(method)
    def in_scope(*args: Any, **named: Any) -> Any:
        # Profiles find the nodes of communication by these scopes.
        with tf.name_scope(name):
            return method(*args, **named)

    return in_scope  # type: ignore[return-value]


# What a program has of a tensor: the slice of its processor, or a list with one for each processor.
_Slices = TypeVar("_Slices")


class Reducer(abc.ABC, Generic[_Slices]):
    """Reduces slices over groups of processors; the collective behind `MeshImpl.allreduce`.

    `Reducer[tf.Tensor]` is one processor's view, in a program that every processor runs.
    `Reducer[Sequence[tf.Tensor]]` handles the slices of all processors.
    """

    @abc.abstractmethod
    def allreduce(self, x: _Slices, mesh_axes: Sequence[int], reduction: str) -> _Slices:
        """Reduces over the processors that differ along mesh axes.

        Args:
          x: the slices, all of one shape.
          mesh_axes: the mesh axes to reduce over.
          reduction: "SUM", "MAX" or "MIN".

        Returns:
          Slices of the same shape and dtype, equal for the members of a group.
        """


SlicesT = TypeVar("SlicesT", bound=LaidOutTensor)


class MeshImpl(Generic[SlicesT]):
    """A mesh of processors with layout rules; base class of all mesh implementations.

    A subclass implements `slicewise`, the collectives, `random`, `laid_out_pnum`,
    `import_tf_tensor` and `export_to_tf_tensor`, and sets `LaidOutTensor` and `LaidOutVariable`.
    """

    LaidOutTensor: Any = None
    LaidOutVariable: Any = None
    stored_layout: Optional[StoredLayout] = None
    needs_execution_impl = False  # whether only `execution_impl` can lower operations
    is_split_by_compiler = False  # whether a compiler, and not this package, splits tensors
    is_compiled_by_xla = False  # whether XLA, which needs static sizes, compiles what is lowered
    takes_random_keys = False  # whether `random` may be given a `key` in place of the seed

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Resets what is said of `random` in a class that overrides it."""
        super().__init_subclass__(**kwargs)
        if "random" in vars(cls) and "takes_random_keys" not in vars(cls):
            cls.takes_random_keys = False

    def __init__(self, shape: ShapeLike, layout_rules: LayoutLike, uneven: bool = False):
        """Creates a MeshImpl.

        Args:
          shape: the mesh shape; a Shape, or what converts to one, such as "rows:2,cols:2".
          layout_rules: LayoutRules, or what converts to them, such as "batch:rows".
          uneven: whether all rules allow sizes that the mesh does not divide, as those do that end
            in "?".

        Raises:
          ValueError: a dimension of the mesh has size 0.
        """
        if shape is None:
            raise TypeError(
                'None is no mesh shape: write it as "rows:2,cols:2"; "" has one processor'
            )
        self._shape: Shape = convert_to_shape(shape)
        if empty := [d for d in self._shape if d.size == 0]:
            raise ValueError(
                f"a mesh with {dims_text(empty)} has no processors: {self._shape}. Sizes of "
                "meshes are numbers of processors, from 1"
            )
        rules = convert_to_layout_rules(layout_rules)
        rules = rules.allowing_uneven() if uneven else rules
        self._layout_rules = rules.on_mesh(self._shape)
        # By dimensions alone, as rules and mesh do not change. Every operation asks for both.
        self._layouts: dict[tuple, TensorLayout] = {}
        self._slice_shapes: dict[tuple, list[int]] = {}
        self._holders: dict[tuple, dict[tuple[int, ...], list[int]]] = {}
        self._in_layouts: dict[tuple, MeshImpl] = {}

    def with_layout(self, layout_rules: LayoutRules) -> Self:
        """Returns the same mesh, of the same processors, with other layout rules.

        Operations that cannot work on parts of what a layout splits are lowered on it.

        Args:
          layout_rules: LayoutRules.
        """
        key = tuple(layout_rules.written)
        if key not in self._in_layouts:
            self._in_layouts[key] = self._of_layout(layout_rules)
        return self._in_layouts[key]  # type: ignore[return-value]

    def _of_layout(self, layout_rules: LayoutRules) -> MeshImpl:
        """Returns a copy that shares all but the layout."""
        impl = copy.copy(self)
        for name in list(vars(impl)):
            # What follows from the layout follows from another one here.
            if isinstance(getattr(type(self), name, None), functools.cached_property):
                delattr(impl, name)
        impl._layout_rules = layout_rules.on_mesh(self._shape)
        impl._layouts, impl._slice_shapes, impl._holders, impl._in_layouts = {}, {}, {}, {}
        return impl

    # -- shapes and layouts

    @property
    def shape(self) -> Shape:
        """Shape of the mesh."""
        return self._shape

    @property
    def ndims(self) -> int:
        """Number of mesh dimensions."""
        return len(self._shape)

    @property
    def layout_rules(self) -> LayoutRules:
        """The layout rules of the mesh."""
        return self._layout_rules

    @property
    def size(self) -> int:
        """Number of processors."""
        return self._shape.size

    def __repr__(self) -> str:
        where = mesh_text(self._shape, self._layout_rules, getattr(self, "_devices", ()))
        return f"<{type(self).__name__} {where}>"

    @property
    def supports_control_dependencies(self) -> bool:
        """Whether operations can wait for others through control dependencies."""
        return True

    def mesh_axis(self, tensor_dimension: Dimension) -> Optional[int]:
        """Returns the mesh axis that splits a tensor dimension, or None; a JointAxis for several.

        `shape`, collectives and coordinates take it as they take any mesh axis.
        """
        return self._layout_rules.mesh_axis(tensor_dimension, self._shape)

    def tensor_dimension_to_mesh_axis(self, tensor_dimension: Dimension) -> Optional[int]:
        """Returns the mesh axis that splits a tensor dimension, or None.

        Raises:
          ValueError: several mesh axes split it; `mesh_axis` returns them as one.
        """
        return self._layout_rules.tensor_dimension_to_mesh_axis(tensor_dimension, self._shape)

    def splitting_axis(self, tensor_dimension: Dimension) -> Optional[int]:
        """Returns `mesh_axis`, or None if its size is 1."""
        axis = self.mesh_axis(tensor_dimension)
        return None if axis is None or self._shape[axis].size == 1 else axis

    def splitting_axes(self, tensor_dimensions: Iterable[Dimension]) -> list[int]:
        """Returns the mesh axes that split tensor dimensions, in the order of the dimensions."""
        return single_axes(map(self.mesh_axis, tensor_dimensions))

    def tensor_layout(self, arg: Union[Tensor, Shape]) -> TensorLayout:
        """Returns the layout of a Tensor or of a Shape.

        Raises:
          ValueError: two dimensions are split over one mesh dimension.
        """
        shape = arg.shape if isinstance(arg, Tensor) else arg
        # A Shape is not hashable, but its Dimensions are.
        key = tuple(shape)
        if key not in self._layouts:
            self._layouts[key] = self._layout_rules.tensor_layout(shape, self._shape)
        return self._layouts[key]

    def mesh_axis_to_cumprod(self, tensor_shape: Shape) -> list[Optional[int]]:
        """Returns, for each mesh axis, the product of the sizes before the axis it splits."""
        products: list[Optional[int]] = [None] * self.ndims
        # A reshape that leaves this product as it is leaves each processor's part where it begins.
        for product, of_axis in zip(tensor_shape.cumprod, self.tensor_layout(tensor_shape)):
            for mesh_axis in single_axes([of_axis]):
                # Of a joint axis, inner axes split what the outer ones have left.
                products[mesh_axis] = product
                product *= self._shape[mesh_axis].size
        return products

    def slice_shape(self, tensor_shape: Shape) -> list[int]:
        """Returns the sizes of one processor's slice of a tensor.

        Where a rule allows a size that the mesh does not divide, slices are as large as the first
        one, and the last ones end in padding.

        Raises:
          ValueError: a dimension is not divisible by the mesh dimension that splits it.
        """
        key = tuple(tensor_shape)
        if key not in self._slice_shapes:
            layout = self.tensor_layout(tensor_shape)
            self._layout_rules.check_divisible(tensor_shape, self._shape, layout)
            self._slice_shapes[key] = slice_sizes(tensor_shape, layout, self._shape)
        # A copy: a caller that changes its list must not change the one for all others.
        return list(self._slice_shapes[key])

    def padding(self, tensor_dimension: Dimension) -> int:
        """Returns how much longer all slices together are than a dimension that splits unevenly."""
        axis = self.splitting_axis(tensor_dimension)
        return 0 if axis is None else -tensor_dimension.size % self._shape[axis].size

    def filled(self, x: SlicesT, tensor_shape: Shape, dims: Iterable[Dimension], value: Any) -> Any:
        """Returns a laid-out value whose padding along dimensions has a value.

        Args:
          x: a laid-out value; a partial sum is summed.
          tensor_shape: its Shape.
          dims: Dimensions of it.
          value: a number.
        """
        for d in dims:
            if not self.padding(d):
                continue
            axis = tensor_shape.dims.index(d)
            fill = functools.partial(slice_functions.filled, d.size, axis, value)
            coordinates = self._known_pcoord(self.mesh_axis(d))  # type: ignore[arg-type]
            x = self.slicewise(fill, x, coordinates)
        return x

    def _known_pcoord(self, mesh_axis: int) -> SlicesT:
        """Returns `laid_out_pcoord`; as Python ints, where the processors are told apart."""
        return self.laid_out_pcoord(mesh_axis)

    def slice_begin(self, tensor_shape: Shape, pnum: int) -> list[int]:
        """Returns where the slice of processor `pnum` begins along each dimension."""
        layout, sizes = self.tensor_layout(tensor_shape), self.slice_shape(tensor_shape)
        # Slices have one size: the number of a part tells where it begins.
        coordinates = slice_coordinates(layout, self._shape, pnum)
        return [size * part for size, part in zip(sizes, coordinates)]

    def holders(self, tensor_shape: Shape) -> Mapping[tuple[int, ...], Sequence[int]]:
        """Returns the processors that have each distinct slice, by where that begins."""
        key = tuple(tensor_shape)
        if key not in self._holders:
            pnums_by_begin: dict[tuple[int, ...], list[int]] = {}
            for pnum in range(self.size):
                pnums_by_begin.setdefault(tuple(self.slice_begin(tensor_shape, pnum)), []).append(
                    pnum
                )
            self._holders[key] = pnums_by_begin
        return self._holders[key]

    def slice_size(self, tensor_shape: Shape) -> int:
        """Returns the number of elements of one processor's slice."""
        return list_product(self.slice_shape(tensor_shape))

    def laid_out_size(self, tensor_shape: Shape) -> int:
        """Returns the number of elements of all slices together."""
        return list_product(self.slice_shape(tensor_shape)) * self.size

    @property
    def execution_impl(self) -> MeshImpl:
        """The executed mesh: this MeshImpl, or one with fewer processors."""
        return self

    def check_processors(self) -> None:
        """Reports a slip if processors are missing, as far as it can tell."""

    def at_beginning(self) -> contextlib.AbstractContextManager:
        """Creates operations within at the beginning of a step, where variables are read."""
        # Without the dependencies in force: a read that waited for what the program does so far
        # would no longer be one of the beginning.
        return tf.control_dependencies(None)

    # -- computation

    def of_slices(
        self, fn: Callable, input_shapes: Sequence[Shape], output_shapes: Sequence[Shape]
    ) -> Callable:
        """Returns a function for `slicewise` that calls `fn` with slices of this layout.

        By default `slicewise` does so itself, where processors are not merged.

        Args:
          fn: takes a slice of each input; returns that of the output, or a tuple of them.
          input_shapes: the Shapes of the inputs.
          output_shapes: the Shapes of the outputs.
        """
        return fn

    def slicewise(self, fn: Callable, *inputs: object) -> Any:
        """Calls `fn` on each processor with that processor's slices.

        Args:
          fn: a function of tf.Tensors that returns one, or a tuple of them.
          *inputs: laid-out values, passed slice by slice; anything else is passed as is.

        Returns:
          A LaidOutTensor, or a tuple of them.
        """
        raise NotImplementedError(f"{type(self).__name__} has no slicewise")

    def slicewise_delay_allreduce(self, fn: Callable, *inputs: object) -> Any:
        """Applies `slicewise` to a partial sum without summing it; `fn` must be linear in it."""
        lazy = [x for x in inputs if isinstance(x, LazyAllreduceSum) and not x.is_summed]
        # A function that is linear in each of two partial sums, as a product is, is not linear in
        # both.
        if len(lazy) != 1:
            return self.slicewise(fn, *inputs)
        # f(sum of x) = sum of f(x): the summands go through `fn`, and the sum stays pending.
        inner = [x.laid_out_input if x is lazy[0] else x for x in inputs]
        return LazyAllreduceSum(
            self, self.slicewise(fn, *inner), lazy[0].mesh_axes, lazy[0].add_counter_fn
        )

    def Print(self, x: SlicesT, data: Sequence[SlicesT], message: str, **kwargs: object) -> SlicesT:
        """Returns `x`, and prints `data`; by default it logs that nothing is printed."""
        text = "Print is not implemented for %s; nothing is printed for %r"
        tf.logging.warning(text, type(self).__name__, message)
        return x

    def einsum(self, equation: str, *slices: tf.Tensor) -> tf.Tensor:
        """Contracts slices on one processor, as tf.einsum does; `einsum_by_shape` calls it."""
        return tf.einsum(equation, *slices)

    def einsum_by_shape(
        self, input_shapes: Sequence[Shape], output_shape: Shape, *slices: tf.Tensor
    ) -> tf.Tensor:
        """Contracts slices on one processor by the dimensions that they have in common.

        `mtf.einsum` calls it. An implementation that only contracts differently has an `einsum` of
        its own; one to which it matters what is split has this one.

        Args:
          input_shapes: the Shapes of the Tensors whose slices they are.
          output_shape: the Shape of the Tensor whose slice is returned.
          *slices: a slice of each.
        """
        equation = slice_functions.einsum_equation(input_shapes, output_shape)
        return self.einsum(equation, *slices)

    def merges(self, dims: Sequence[Dimension]) -> bool:
        """Whether dimensions of a slice become one by a reshape alone, with nothing sent."""
        return True

    # As methods: the first parameter of both functions is the mesh implementation.
    merge_dims, split_dims = slice_functions.merge_dims, slice_functions.split_dims

    def random(self, shape: Shape, tf_fn: Callable, kwargs: dict[str, Any]) -> SlicesT:
        """Returns a laid-out random tensor; processors with the same slice get equal values.

        Args:
          shape: a Shape.
          tf_fn: a function of a shape, such as tf.random.uniform.
          kwargs: a new dictionary of keyword arguments of `tf_fn`, with `seed` if there is one.
            With `takes_random_keys`, there may be a `key`, of which the values are a function: in
            a loop it is another one in each iteration.
        """
        raise NotImplementedError(f"{type(self).__name__} has no random")

    def random_key(self, seed: Optional[int]) -> tf.Tensor:
        """Returns a new key for random numbers, the same one for all processors."""
        return new_key(seed)

    # -- communication

    def allreduce(self, x: SlicesT, mesh_axes: Sequence[int], reduction_fn_string: str) -> SlicesT:
        """Reduces slices over groups of processors that differ along `mesh_axes`.

        Args:
          x: a LaidOutTensor.
          mesh_axes: a list of mesh axes.
          reduction_fn_string: "SUM", "MAX" or "MIN".
        """
        raise NotImplementedError(f"{type(self).__name__} has no allreduce")

    @named_collective
    def reduce_scatter(self, x: SlicesT, mesh_axis: int, split_axis: int) -> SlicesT:
        """Sums slices along a mesh axis, and keeps each processor's part, as `allsplit` does."""
        # Each processor receives only its own part of the others' summands, and adds. An allreduce
        # would also bring it all the parts that it does not keep.
        cut = functools.partial(slice_functions.parts_of, split_axis, self.shape[mesh_axis].size)
        received = self.alltoall(self.slicewise(cut, x), mesh_axis, 0, 0)
        return self.slicewise(lambda t: tf.reduce_sum(t, 0), received)

    def allsplit(
        self, x: SlicesT, mesh_axis: int, split_axis: int, which: Optional[SlicesT] = None
    ) -> SlicesT:
        """Keeps each processor's part of a value that is replicated along a mesh axis.

        Args:
          x: a LaidOutTensor.
          mesh_axis: a mesh axis.
          split_axis: the axis of the slices to split.
          which: a LaidOutTensor of integer scalars, the part to keep; the coordinate along
            `mesh_axis` if None.
        """
        if which is None:
            which = self.laid_out_pcoord(mesh_axis)
        # The part is a tensor: one program for all processors is built before it is known.
        part_of = functools.partial(
            slice_functions.part_of, split_axis, self._shape[mesh_axis].size
        )
        return self.slicewise(part_of, x, which)

    def allconcat(self, x: SlicesT, mesh_axis: int, concat_axis: int) -> SlicesT:
        """Concatenates the slices of the processors along `mesh_axis`, on each of them.

        Args:
          x: a LaidOutTensor.
          mesh_axis: a mesh axis.
          concat_axis: the axis of the slices to concatenate along.
        """
        raise NotImplementedError(f"{type(self).__name__} has no allconcat")

    def alltoall(self, x: SlicesT, mesh_axis: int, split_axis: int, concat_axis: int) -> SlicesT:
        """Sends part i of each slice to processor i along `mesh_axis`.

        Args:
          x: a LaidOutTensor.
          mesh_axis: a mesh axis.
          split_axis: the axis along which slices are split.
          concat_axis: the axis along which received parts are concatenated.
        """
        raise NotImplementedError(f"{type(self).__name__} has no alltoall")

    def receive(
        self, x: SlicesT, mesh_axis: int, source_pcoord: Sequence[Optional[int]]
    ) -> SlicesT:
        """Replaces each slice by that of another processor along `mesh_axis`, or by zeros.

        Args:
          x: a LaidOutTensor.
          mesh_axis: a mesh axis.
          source_pcoord: for each coordinate along it that of the source, or None for zeros.
        """
        raise NotImplementedError(f"{type(self).__name__} has no receive")

    def shift_by_n_processors(self, x: SlicesT, mesh_axis: int, offset: int, wrap: bool) -> SlicesT:
        """Moves slices by `offset` processors along `mesh_axis`.

        Args:
          x: a LaidOutTensor.
          mesh_axis: a mesh axis.
          offset: an int, may be negative.
          wrap: whether slices wrap around; otherwise zeros are shifted in.
        """
        return self.receive(
            x, mesh_axis, shifted_sources(self._shape[mesh_axis].size, offset, wrap)
        )

    def laid_out_pnum(self) -> SlicesT:
        """Returns a LaidOutTensor of the processors' numbers, int32 scalars."""
        raise NotImplementedError(f"{type(self).__name__} has no laid_out_pnum")

    def laid_out_pcoord(self, mesh_axis: int) -> SlicesT:
        """Returns a LaidOutTensor of the processors' coordinates along a mesh axis."""
        if isinstance(mesh_axis, JointAxis):
            numbers = range(self.size)
            table = [coordinate_of(self._shape, pnum, mesh_axis) for pnum in numbers]
            return self.slicewise(
                lambda pnum: tf.gather(slice_functions.constant(table), pnum), self.laid_out_pnum()
            )
        # Row-major: coordinate = pnum // (product of the sizes of later axes) % size of the axis.
        below = list_product(self._shape.to_integer_list[mesh_axis + 1 :])
        size = self._shape[mesh_axis].size
        return self.slicewise(lambda pnum: pnum // below % size, self.laid_out_pnum())

    def laid_out_slice_num(self, tensor_shape: Shape) -> SlicesT:
        """Returns a LaidOutTensor of int32 scalars that number the different slices of a tensor."""
        split = single_axes(self.tensor_layout(tensor_shape))
        # Processors that differ along other axes alone hold equal slices, and get one number.
        others = [axis for axis in range(self.ndims) if axis not in split]
        return self.slicewise(
            lambda pnum: tf.cast(pnum_to_group(self._shape, others, pnum), tf.int32),
            self.laid_out_pnum(),
        )

    def broadcast_impl(self, old_slices: SlicesT, old_shape: Shape, new_shape: Shape) -> SlicesT:
        """Broadcasts a laid-out tensor to a shape that has all its dimensions.

        Args:
          old_slices: a LaidOutTensor.
          old_shape: a Shape.
          new_shape: a Shape.
        """
        sizes = self.slice_shape(new_shape)
        return self.slicewise(
            lambda x: slice_functions.tile_slice(
                slice_functions.broadcast_slice(x, old_shape, new_shape), sizes
            ),
            old_slices,
        )

    def make_slices(self, tf_tensor: tf.Tensor, tensor_shape: Shape) -> list[tf.Tensor]:
        """Splits a whole tf.Tensor into a list with a slice for each processor."""
        self.slice_shape(tensor_shape)  # checks that it can be split
        return slice_functions.make_slices(tf_tensor, self.tensor_layout(tensor_shape), self._shape)

    def combine_slices(
        self, slices: Sequence[tf.Tensor], tensor_shape: Shape, device: Optional[str] = None
    ) -> tf.Tensor:
        """Joins a list with a slice for each processor to the whole tf.Tensor."""
        # Any of the equal slices is the whole value; no node is needed to join them.
        if self.tensor_layout(tensor_shape).is_fully_replicated:
            return slices[0]
        return slice_functions.combine_slices(
            slices, self.tensor_layout(tensor_shape), self._shape, device, tensor_shape
        )

    def export_to_tf_tensor(self, x: Tensor, laid_out_x: LaidOutLike) -> tf.Tensor:
        """Returns the whole value of a Tensor, given its lowered form."""
        raise NotImplementedError(f"{type(self).__name__} has no export_to_tf_tensor")

    def import_tf_tensor(self, x: Tensor, tf_x: tf.Tensor) -> SlicesT:
        """Returns the LaidOutTensor of a whole tf.Tensor; `x` is a Tensor of the same shape."""
        raise NotImplementedError(f"{type(self).__name__} has no import_tf_tensor")

    def loop_slices(self, laid_out: LaidOutLike, tensor_shape: Shape) -> list[tf.Tensor]:
        """Returns the tf.Tensors that a loop carries for a laid-out tensor."""
        return list(laid_out.to_laid_out_tensor().all_slices)

    def from_loop_slices(self, slices: Sequence[tf.Tensor], tensor_shape: Shape) -> SlicesT:
        """Returns the laid-out tensor of the tf.Tensors that `loop_slices` returned."""
        return self.LaidOutTensor.from_tensor_list(list(slices))


class ExecutedMeshImpl(MeshImpl):
    """A mesh that stands for another one, which checks layouts: they must fit both.

    Otherwise a layout that does not fit the requested mesh would be found only where that is the
    executed one, on other devices.

    Attributes:
      requested: the MeshImpl that it stands for.
    """

    requested: Any

    def __init__(self, requested: MeshImpl, shape: Optional[Shape] = None, **options: Any):
        """Creates the executed mesh.

        Args:
          requested: the MeshImpl that it stands for.
          shape: its Shape; one processor, with the dimensions of the other one, if None.
          **options: what the class of mesh takes besides a layout, such as devices.
        """
        # The same dimensions, so that mesh axes have the same numbers on both meshes.
        shape = shape or Shape([Dimension(d.name, 1) for d in requested.shape])
        with storing(**AS_COMPUTED):
            super().__init__(shape, requested.layout_rules, **options)
        self.execute(requested)

    def execute(self, requested: MeshImpl) -> None:
        """Sets the requested mesh, whose layout it has."""
        self.requested = requested
        # Mesh axes have the same numbers on both meshes, also those that are of one processor here.
        self._layout_rules = requested.layout_rules

    def _of_layout(self, layout_rules: LayoutRules) -> MeshImpl:
        """Returns a copy that stands for the requested mesh in the other layout; see MeshImpl."""
        impl: Any = super()._of_layout(layout_rules)
        impl.execute(self.requested.with_layout(layout_rules))
        return impl

    def tensor_layout(self, arg: Union[Tensor, Shape]) -> TensorLayout:
        """Returns the layout of a Tensor or Shape, which is that on the requested mesh.

        A layout goes by names of mesh dimensions, and both meshes have the same.
        """
        return self.requested.tensor_layout(arg)

    def slice_shape(self, tensor_shape: Shape) -> list[int]:
        """Returns the sizes of a slice, after checking those on the requested mesh."""
        self.requested.slice_shape(tensor_shape)
        return super().slice_shape(tensor_shape)


class HasSlices(Protocol):
    """What the laid-out values of a mesh implementation from elsewhere have at least."""

    @property
    def tensor_list(self) -> Sequence[tf.Tensor]:
        """The slices."""


def slices_of(laid_out: Union[LaidOutLike, HasSlices]) -> Sequence[tf.Tensor]:
    """Returns the slices of a laid-out value, computed if it is lazy."""
    if hasattr(laid_out, "to_laid_out_tensor"):
        return laid_out.to_laid_out_tensor().all_slices
    return laid_out.tensor_list


@dataclasses.dataclass(frozen=True)
class MeshPair:
    """The requested and the executed mesh implementation of a mesh, usually the same object.

    They differ where processors on one device are merged: the executed mesh has fewer processors.
    Checks, counters and error messages refer to the requested one.

    Attributes:
      requested: the mesh implementation that the user made.
      executed: the one that operations are lowered through.
    """

    requested: MeshImpl
    executed: MeshImpl

    @classmethod
    def of(cls, requested: MeshImpl, may_merge: bool) -> MeshPair:
        """Returns the pair of a mesh implementation.

        Args:
          requested: a MeshImpl, or an object with its methods.
          may_merge: whether processors may be merged.
        """
        # Whole tensors of GSPMD fit the executed mesh alone, whatever operations the program has.
        merges = may_merge or getattr(requested, "needs_execution_impl", False)
        executed = getattr(requested, "execution_impl", requested) if merges else requested
        return cls(requested, executed)

    @property
    def is_merged(self) -> bool:
        """Whether the executed mesh differs from the requested one."""
        return self.executed is not self.requested

    def with_layout(self, layout_rules: LayoutRules) -> MeshPair:
        """Returns the pair with other layout rules."""
        return MeshPair(*(m.with_layout(layout_rules) for m in (self.requested, self.executed)))

    def executed_form(self, tensor: Tensor, laid_out: LaidOutLike) -> LaidOutLike:
        """Returns a laid-out value with the slices of the executed mesh.

        Args:
          tensor: the Tensor whose value it is.
          laid_out: a LaidOutTensor of either mesh, or a lazy value.
        """
        if not self.is_merged or not isinstance(laid_out, LaidOutTensor):
            return laid_out
        # An operation may set slices of either mesh. Their number tells: a merged mesh has fewer.
        if len(laid_out.all_slices) == self.requested.size:
            laid_out = self.of_requested(tensor, laid_out.all_slices)
        # With its shape it can be cut again for callers that use the requested mesh.
        return laid_out.of_shape(tensor.shape)

    def import_requested(
        self, tensor: Tensor, laid_out: Union[LaidOutLike, HasSlices]
    ) -> Union[LaidOutLike, HasSlices]:
        """Returns a laid-out value of the requested mesh with the slices of the executed mesh.

        Args:
          tensor: the Tensor whose value it is.
          laid_out: a LaidOutTensor, or an object with the attribute `tensor_list`, its slices.
        """
        return self.of_requested(tensor, slices_of(laid_out)) if self.is_merged else laid_out

    def of_requested(self, tensor: Tensor, slices: Sequence[tf.Tensor]) -> LaidOutTensor:
        """Returns a LaidOutTensor of the executed mesh, from slices of the requested mesh.

        Args:
          tensor: the Tensor whose slices they are.
          slices: a slice for each processor of the requested mesh.
        """
        # Slices of the two meshes begin at other places, so the way is through the whole tensor.
        whole = self.requested.combine_slices(slices, tensor.shape)
        return self.executed.import_tf_tensor(tensor, whole)

    def requested_slices(self, slices: Sequence[tf.Tensor], tensor_shape: Shape) -> list[tf.Tensor]:
        """Returns a slice for each processor of the requested mesh.

        Args:
          slices: a slice for each processor of the executed mesh.
          tensor_shape: the Shape of the whole tensor.
        """
        whole = self.executed.combine_slices(slices, tensor_shape)
        return self.requested.make_slices(whole, tensor_shape)
