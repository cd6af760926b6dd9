"""GspmdMeshImpl: a program on whole tensors, whose shardings XLA's partitioner follows.

The program is lowered as on one processor. Each tensor is a whole value, annotated by its layout
where XLA compiles the program. XLA's partitioner (GSPMD) then makes the program of one device, and
puts in the collectives: here, a sum over processors is nothing more than the sum itself.
`mesh_tensorflow.pjrt` runs such programs on any device that XLA knows. In a plain tf.function, or a
session, they run on one device.

An annotation is an operation `XlaSharding` with a serialized OpSharding of XLA's data.proto. The
devices are a transposed range of numbers, so that an annotation of 512 devices is as long as that
of 4.

Merged dimensions: convolutions, and others whose kernels take a single batch dimension, call
`merge_dims`. The partitioner has no sharding for the product of dimensions of which another than
the first is split: it would gather the value. So each split dimension is cut into its parts, and
these come first in the merged dimension: [a, b] with a over rows and b over cols becomes [rows,
cols, a / rows, b / cols], whose product is split over both mesh dimensions.

Products: tf.einsum and tf.matmul are the same operation of XLA in the end. But TensorFlow
translates a tf.einsum with a pipeline of MLIR for it alone, which takes 4 ms, and a tf.matmul in
0.06 ms. Several dimensions of an operand become one for that, as XLA itself makes of them, unless
the mesh splits another than the first of them, which would have to be gathered.

Functions of the user's own, in mtf.slicewise, may count on the slice of one processor. They are
called with such slices: a value is cut into parts as above, and the function is mapped over these
along each mesh axis.

Fourier transforms: the partitioner gathers what they are along and all else, too. So they are
called with the part of each device, between annotations that hide it from the partitioner.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Optional, Union

import tensorflow.compat.v1 as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from mesh_tensorflow._calls import within
from mesh_tensorflow._core.layout import (
    LayoutLike,
    TensorLayout,
    given_stored_layout,
)
from mesh_tensorflow._core.operation import LaidOutLike, Tensor
from mesh_tensorflow._core.shape import Dimension, Shape, ShapeLike, list_product, single_axes
from mesh_tensorflow._mesh import random_values
from mesh_tensorflow._mesh.devices import is_compiled_whole
from mesh_tensorflow._mesh.mesh_impl import (
    ExecutedMeshImpl,
    LaidOutTensor,
    MeshImpl,
    convert_args_to_laid_out_tensors,
    named_collective,
    wrong_slices,
)
from mesh_tensorflow._mesh.random_values import new_key
from mesh_tensorflow._mesh.variables.storage import SliceVariables
from mesh_tensorflow._watching import nan_checks_in_force

if TYPE_CHECKING:
    from mesh_tensorflow.ops._variable import Variable


Annotate = Callable[[tf.Tensor, Sequence], tf.Tensor]


class _Cut:
    """The sizes and axes of a value whose dimensions are cut into the parts of processors.

    The parts come first: [a, b] with a over rows and b over cols becomes [rows, cols, a / rows,
    b / cols].

    Attributes:
      part_axes: the mesh axes of the parts, in the order in which they come.
    """

    def __init__(
        self,
        tensor_shape: Shape,
        axes: Sequence[Optional[int]],
        mesh: Shape,
        count: int,
        annotate: Annotate,
    ):
        """Plans the way.

        Args:
          tensor_shape: the Shape of the value.
          axes: for each dimension, the mesh axis that splits it, or None.
          mesh: the Shape of the mesh.
          count: how many dimensions are cut, from the first on.
          annotate: annotates a value, given the mesh axes of each dimension.
        """
        self._annotate = annotate
        sizes, rest = tensor_shape.to_integer_list, list(axes[count:])
        self.sizes = sizes
        self.axes = list(axes)
        self.merged_sizes = [list_product(sizes[:count]), *sizes[count:]]
        self.merged_axes = [single_axes(axes[:count]), *rest]
        self.cut_sizes: list[int] = []
        self.cut_axes: list[Optional[int]] = []
        # Each dimension of n becomes [p, n / p], of which its mesh axis splits p parts; one over
        # joined axes has parts by the one, and within these by the other.
        for size, axis in zip(sizes, axes[:count]):
            of_dim = single_axes([axis])
            sizes_of_parts = [mesh[a].size for a in of_dim]
            self.cut_sizes += [*sizes_of_parts, size // list_product(sizes_of_parts)]
            self.cut_axes += [*of_dim, None]
        cut = range(len(self.cut_axes))
        firsts = [i for i in cut if self.cut_axes[i] is not None]
        self.part_axes = [axis for axis in self.cut_axes if axis is not None]
        self.cut_sizes += sizes[count:]
        self.cut_axes += rest
        # Places of the cut dimensions in the ordered value, parts before what is in them, so that
        # [p, a / p, q, b / q] becomes [p, q, a / p, b / q].
        others = [i for i in range(len(self.cut_axes)) if i not in firsts]
        self.order = firsts + others
        self.ordered_sizes = [self.cut_sizes[i] for i in self.order]
        self.ordered_axes = [self.cut_axes[i] for i in self.order]

    def parts(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the parts of a whole value, before what is in them."""
        # Annotated after each step, so that the partitioner has no value whose sharding it must
        # guess.
        value = self._annotate(tf.reshape(value, self.cut_sizes), self.cut_axes)
        return self._annotate(tf.transpose(value, self.order), self.ordered_axes)

    def whole(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the whole value from what `parts` returns."""
        # A permutation's inverse: inverse[order[k]] = k.
        inverse = [self.order.index(i) for i in range(len(self.order))]
        # The steps of `parts` in the opposite order, each annotated as there.
        value = self._annotate(value, self.ordered_axes)
        value = self._annotate(tf.transpose(value, inverse), self.cut_axes)
        return self._annotate(tf.reshape(value, self.sizes), self.axes)

    def merged(self, value: tf.Tensor) -> tf.Tensor:
        """Returns a whole value with its first dimensions merged to one, parts of devices first."""
        return self._annotate(tf.reshape(self.parts(value), self.merged_sizes), self.merged_axes)

    def split(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the whole value of a tensor from what `merged` returns."""
        value = self._annotate(value, self.merged_axes)
        return self.whole(tf.reshape(value, self.ordered_sizes))


def _of_each_part(
    fn: Callable,
    axes: Mapping[int, int],
    values: Sequence[tf.Tensor],
    split: Sequence[Sequence[int]],
    kept: Sequence[Sequence[int]],
) -> list[tf.Tensor]:
    """Returns what a function returns for each part of values, along mesh axes.

    Args:
      fn: a function of parts; returns one, or a tuple of them.
      axes: the sizes of the mesh axes, in the order in which results have them.
      values: each with its parts along some of them first.
      split: these axes of each, in the order in which it has them.
      kept: those along which the parts of each result differ; of others, the first part is taken.
    """
    if not axes:
        results = fn(*values)
        return list(results) if isinstance(results, tuple) else [results]
    (axis, size), *more = axes.items()

    def of_part(parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        own = iter(parts[1:])
        of_all = [next(own) if axis in s else x for x, s in zip(values, split)]
        left = [[a for a in s if a != axis] for s in split]
        return _of_each_part(fn, dict(more), of_all, left, kept)

    moved = []
    for x, s in zip(values, split):
        if axis in s:
            others = [i for i in range(x.shape.rank) if i != s.index(axis)]
            moved.append(tf.transpose(x, [s.index(axis), *others]))
    # By an operation on all parts at once, which XLA splits as they are; a loop would gather them.
    # The numbers say how many there are, also where no value is split.
    results = tf.vectorized_map(of_part, [tf.range(size), *moved], warn=False)
    return [y if axis in k else y[0] for y, k in zip(results, kept)]


def matrix_product(
    input_shapes: Sequence[Shape],
    output_shape: Shape,
    values: Sequence[tf.Tensor],
    merges: Callable[[Sequence[Dimension]], bool],
) -> Optional[tf.Tensor]:
    """Returns a contraction of whole values as a product of matrices, or of batches of them.

    Args:
      input_shapes: the Shapes of the values.
      output_shape: the Shape of the result.
      values: whole values.
      merges: whether some dimensions become one by a reshape alone, see MeshImpl.

    Returns:
      A tf.Tensor; None if it is no such product.
    """
    if len(values) != 2:
        return None
    first, second = input_shapes
    batch = [d for d in output_shape if d in first and d in second]
    rows = [d for d in output_shape if d not in second]
    columns = [d for d in output_shape if d not in first]
    contracted = [d for d in first if d in second and d not in output_shape]
    # What one operand alone has and the output has not is summed over, which no product does.
    if not contracted or {*first, *second} != {*output_shape, *contracted}:
        return None
    if not all(map(merges, (rows, columns, contracted))):
        return None
    sizes = {d: n for s, x in zip(input_shapes, values) for d, n in zip(s, x.shape.as_list())}
    if None in sizes.values():
        return None

    def matrices(x: tf.Tensor, named: Shape, outer: list[Dimension]) -> tuple[tf.Tensor, bool]:
        """Returns batches of matrices, and whether those are contracted over their rows."""
        orders = [[*batch, *outer, *contracted], [*batch, *contracted, *outer]]
        over_rows = named.dims == orders[1]
        order = orders[over_rows]
        # XLA takes a transposed operand as it is.
        x = x if named.dims == order else tf.transpose(x, [named.dims.index(d) for d in order])
        groups = [contracted, outer] if over_rows else [outer, contracted]
        shape = [sizes[d] for d in batch] + [list_product(sizes[d] for d in g) for g in groups]
        return (x if x.shape == shape else tf.reshape(x, shape)), over_rows

    x, x_over_rows = matrices(values[0], first, rows)
    y, y_over_rows = matrices(values[1], second, columns)
    product = tf.matmul(x, y, transpose_a=x_over_rows, transpose_b=not y_over_rows)
    dims = [*batch, *rows, *columns]
    shape = [sizes[d] for d in dims]
    product = product if product.shape == shape else tf.reshape(product, shape)
    if dims == output_shape.dims:
        return product
    return tf.transpose(product, [dims.index(d) for d in output_shape])


# Numbers of the fields of OpSharding, and the type OTHER: tiles over devices.
# They are type, tile_assignment_dimensions, replicate_on_last_tile_dim, iota_reshape_dims and
# iota_transpose_perm.
_TYPE, _TILES, _LAST_IS_COPIES, _RANGE, _TRANSPOSED = 1, 3, 6, 9, 10
_OTHER = 3


class Compilation:
    """A program that XLA compiles, while it is lowered."""

    def has_layout(self, value: tf.Tensor, layout: TensorLayout) -> None:
        """Called with the value of each tensor of the program, and its layout."""

    def has_impl(self, mesh_impl: GspmdMeshImpl) -> None:
        """Called with the mesh implementation of the program, at least once."""

    def slice_of(self, variable: Variable, mesh_impl: GspmdMeshImpl) -> Any:
        """Returns what stands for the only slice of a variable; None for a tf variable.

        It has the methods of one, and `first`: the value at the beginning of the program.
        """
        return None

    def random_key(self, seed: Optional[int]) -> tf.Tensor:
        """Returns a new key for random numbers; see `random_values.new_key`."""
        return new_key(seed)


_compilation: contextvars.ContextVar[Optional[Compilation]] = contextvars.ContextVar(
    "compilation", default=None
)


def annotating(
    compilation: Optional[Compilation] = None,
) -> contextlib.AbstractContextManager[None]:
    """Annotates the values of programs that are lowered within, because XLA compiles them.

    Args:
      compilation: what is told of the program.
    """
    return within(_compilation, compilation or Compilation())


def current_compilation() -> Optional[Compilation]:
    """Returns the compilation for which values are annotated; None if they are not."""
    return _compilation.get()


def _is_compiled() -> bool:
    """Returns whether XLA compiles the program, split or on one device."""
    return current_compilation() is not None or is_compiled_whole()


def _varint(number: int) -> bytes:
    encoded = bytearray()
    # Seven bits in each byte, the lowest first; the top bit says that another byte follows.
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


def _number(field: int, value: int) -> bytes:
    # Wire type 0 of protocol buffers: the number follows at once.
    return _varint(field << 3) + _varint(value)


def _numbers(field: int, values: Sequence[int]) -> bytes:
    packed = b"".join(map(_varint, values))
    # Wire type 2: a length and as many bytes, here numbers without keys of their own ("packed").
    return _varint(field << 3 | 2) + _varint(len(packed)) + packed


# The type REPLICATED, which is 0 and has to be said: an empty text is no annotation.
_COPIES = _number(_TYPE, 0)


def sharding_text(layout: Iterable[Union[int, Sequence[int], None]], mesh_shape: Shape) -> bytes:
    """Returns a layout as a serialized OpSharding.

    Args:
      layout: the TensorLayout of a tensor; for a dimension that several mesh axes split, their
        sequence, that of the largest parts first.
      mesh_shape: the Shape of the mesh; devices are numbered in row-major order.
    """
    sizes = mesh_shape.to_integer_list
    axes = [single_axes([a] if a is None or isinstance(a, int) else a) for a in layout]
    split = [axis for of_dim in axes for axis in of_dim if sizes[axis] > 1]
    if not split:
        return _COPIES
    # Devices of axes that split nothing hold copies; they vary fastest in the transposed range.
    others = [axis for axis in range(len(sizes)) if axis not in split]
    tiles = [list_product([sizes[axis] for axis in of_dim]) for of_dim in axes]
    copies = list_product([sizes[axis] for axis in others])
    # Copies are one more dimension of tiles, the last one, of which a flag says what it is.
    encoded = _number(_TYPE, _OTHER) + _numbers(_TILES, tiles + [copies] * (copies > 1))
    if copies > 1:
        encoded += _number(_LAST_IS_COPIES, 1)
    return encoded + _numbers(_RANGE, sizes) + _numbers(_TRANSPOSED, split + others)


def annotated(value: tf.Tensor, sharding: bytes) -> tf.Tensor:
    """Returns the same value, which XLA's partitioner splits.

    Args:
      value: a whole value in a tf.function or a graph.
      sharding: from `sharding_text`.
    """
    # No dimension is left to the partitioner's choice: each is split as the layout says, or whole.
    return gen_xla_ops.xla_sharding(value, sharding=sharding, unspecified_dims=[])


class GspmdTensor(LaidOutTensor):
    """A whole value, as the only slice.

    Attributes:
      mesh_impl: the mesh implementation, which annotates values; each one has a subclass.
    """

    mesh_impl: ClassVar[Any] = None

    def of_shape(self, tensor_shape: Shape) -> GspmdTensor:
        """Returns the same value, annotated by the layout of the tensor's Shape."""
        [value] = self._tensor_list
        return type(self)([self.mesh_impl.annotate(value, tensor_shape)])


class GspmdVariable(SliceVariables):
    """The only slice of a Variable, which is its whole value.

    It is the master itself, if that has the dtype of the slices, or what a store has.
    """

    def __init__(self, variable: Variable, mesh_impl: GspmdMeshImpl):
        """Creates the slice, or finds it.

        Args:
          variable: a Variable operation.
          mesh_impl: a GspmdMeshImpl.
        """
        self._variable = variable
        self.mesh_impl = mesh_impl
        self.owner = [0]
        compilation = current_compilation()
        own = None if compilation is None else compilation.slice_of(variable, mesh_impl)
        # Decided once, before the masters are bound: then the answer would be another.
        self._is_master = own is None and self._may_be_master()
        if own is not None:
            self.slices = {0: own}
        elif variable.store is not None:
            self.slices = variable.store.slices(variable, mesh_impl, self.owner)
        elif self.slice_is_master:
            self.slices = {0: variable.tf_master}
        else:
            self.slices = {0: self._new_slice(0, variable.stored_shape.to_integer_list)}
        super().__init__(variable)
        # One read for the whole step, made before any assignment of the program.
        self._reads = {0: self.slices[0].read_value() if own is None else own.first}

    @property
    def slice_is_master(self) -> bool:
        """Whether the slice is the master itself."""
        return self._is_master


class GspmdMeshImpl(MeshImpl[GspmdTensor]):
    """A mesh of devices that XLA's partitioner splits whole tensors over.

    Its laid-out tensors are whole values, and operations are lowered through `execution_impl`,
    which has one processor. Layouts, counters and checks are those of the mesh.

    >>> import mesh_tensorflow as mtf
    >>> impl = mtf.GspmdMeshImpl("rows:2,cols:2", "batch:rows")
    >>> impl.slice_shape(mtf.Shape([("batch", 4)])), impl.execution_impl.size
    ([2], 1)

    Attributes:
      devices: one device, of TensorFlow's choice.
      copy_master_to_slice_ops: the tf operations that copy masters to slices, in order.
    """

    LaidOutVariable = GspmdVariable
    needs_execution_impl = True
    is_split_by_compiler = True
    takes_random_keys = True

    def __init__(
        self,
        shape: ShapeLike,
        layout: LayoutLike,
        annotate: Optional[bool] = None,
        variable_layout: Optional[LayoutLike] = None,
        zero: Optional[int] = None,
        zero_axis: Optional[str] = None,
        uneven: bool = False,
    ):
        """Creates a GspmdMeshImpl.

        Args:
          shape: the mesh shape; a Shape, or what converts to one, such as "rows:2,cols:2".
          layout: LayoutRules, or what converts to them, such as "batch:rows,d_ff:cols".
          annotate: whether values are annotated by their layouts. If None, in the programs of
            `mesh_tensorflow.pjrt`. On one device, annotations do nothing.
          variable_layout: rules by which variables are stored in parts, such as "d_model:rows".
          zero: the stage of ZeRO: 1 or 2 to store optimizers' slots in parts, 3 for weights too.
          zero_axis: the mesh dimension of ZeRO, or several joined by "+"; that of a mesh with just
            one if None.
          uneven: whether all rules allow sizes that the mesh does not divide, as those do that end
            in "?", such as "vocab:cols?".
        """
        super().__init__(shape, layout, uneven)
        self.stored_layout = given_stored_layout(self.shape, variable_layout, zero, zero_axis)
        self._annotate = annotate
        self.devices = [""]
        self.copy_master_to_slice_ops: list[tf.Operation] = []

    @functools.cached_property
    def LaidOutTensor(self) -> Any:
        """The class of the values of this mesh, which it annotates."""
        # One for each mesh: `of_shape` has no argument by which a value would find its mesh.
        return type("GspmdTensor", (GspmdTensor,), {"mesh_impl": self})

    @property
    def execution_impl(self) -> MeshImpl:
        """The mesh of one processor that operations are lowered through."""
        compilation = current_compilation()
        if compilation is not None:
            compilation.has_impl(self)
        return self._executed

    @functools.cached_property
    def _executed(self) -> MeshImpl:
        return self if self.size == 1 else _WholeMeshImpl(self)

    @property
    def is_compiled_by_xla(self) -> bool:  # type: ignore[override]
        """Whether XLA compiles what is lowered, rather than TensorFlow running it."""
        return _is_compiled()

    def same_memory(self, device1: str, device2: str) -> bool:
        """Whether two devices are in one memory domain: there is one device."""
        return True

    def annotate(self, value: tf.Tensor, tensor_shape: Shape) -> tf.Tensor:
        """Returns a whole value annotated by the layout of its Shape, where XLA compiles it.

        Args:
          value: a whole value.
          tensor_shape: its Shape.
        """
        # Eager tensors have no graph, and nothing compiles them.
        if not self.annotates or not tf.is_tensor(value) or not hasattr(value, "graph"):
            return value
        layout = self.even_layout(tensor_shape)
        result = self.annotate_axes(value, layout)
        compilation = current_compilation()
        if compilation is not None:
            # Both are looked up later: arguments of a program by the one, its results by the other.
            compilation.has_layout(value, layout)
            compilation.has_layout(result, layout)
        return result

    def even_layout(self, tensor_shape: Shape) -> TensorLayout:
        """Returns the layout of a Shape without what the mesh does not divide, which is whole.

        JAX has no arrays whose last parts are shorter.

        Args:
          tensor_shape: a Shape.
        """
        layout = self.tensor_layout(tensor_shape)
        if not self._layout_rules.uneven:
            return layout
        return TensorLayout(
            None if self.padding(d) else axis for d, axis in zip(tensor_shape, layout)
        )

    @property
    def annotates(self) -> bool:
        """Whether values are annotated."""
        return current_compilation() is not None if self._annotate is None else self._annotate

    def annotate_axes(self, value: tf.Tensor, axes: Iterable) -> tf.Tensor:
        """Returns a whole value annotated by the mesh axes that split its dimensions.

        Also if none does: without an annotation the partitioner splits a value as suits the
        operations around it, and has to gather it for others.
        """
        return value if self.size == 1 else annotated(value, sharding_text(axes, self.shape))

    # -- computation

    @property
    def hides_parts(self) -> bool:
        """Whether `on_parts` may be called: the partitioner compiles what is lowered."""
        # TensorFlow, which runs programs with checks for NaNs, has no kernels of its annotations.
        return current_compilation() is not None and nan_checks_in_force() is None

    def on_parts(
        self, fn: Callable[[tf.Tensor], tf.Tensor], value: tf.Tensor, axes: Sequence
    ) -> tf.Tensor:
        """Returns what a function makes of the part of each device, of which others see nothing.

        Args:
          fn: a function of a part, which changes no dimension that is split.
          value: a whole value.
          axes: for each dimension, the mesh axis that splits it evenly, or None.
        """
        sharding = sharding_text(axes, self.shape)
        counts = [list_product([self.shape[one].size for one in single_axes([a])]) for a in axes]
        part = gen_xla_ops.xla_spmd_full_to_shard_shape(
            self.annotate_axes(value, axes), manual_sharding=sharding
        )
        part.set_shape([n // count for n, count in zip(value.shape.as_list(), counts)])
        result = fn(part)
        sizes = [n * count for n, count in zip(result.shape.as_list(), counts)]
        whole = gen_xla_ops.xla_spmd_shard_to_full_shape(
            result, manual_sharding=sharding, full_shape=sizes
        )
        return self.annotate_axes(whole, axes)

    def of_slices(
        self, fn: Callable, input_shapes: Sequence[Shape], output_shapes: Sequence[Shape]
    ) -> Callable:
        """Returns a function of whole values that calls `fn` with slices; see MeshImpl."""

        def cut(shape: Shape) -> _Cut:
            annotate = self.annotate_axes if self.annotates else lambda value, axes: value
            return _Cut(shape, list(self.even_layout(shape)), self.shape, shape.ndims, annotate)

        xs, ys = [cut(shape) for shape in input_shapes], [cut(shape) for shape in output_shapes]
        split = [x.part_axes for x in xs]
        split_results = [y.part_axes for y in ys]
        axes = {
            a: self.shape[a].size for a in sorted({a for s in split + split_results for a in s})
        }
        if not axes:
            return fn

        def checked(*slices: tf.Tensor) -> tuple[tf.Tensor, ...]:
            results = fn(*slices)
            results = results if isinstance(results, tuple) else (results,)
            for result, y, shape in zip(results, ys, output_shapes):
                expected = y.ordered_sizes[len(y.part_axes) :]
                if result.shape.as_list() != expected:
                    raise wrong_slices(str(shape), result.shape.as_list(), expected)
            return results

        def of_whole(*values: tf.Tensor) -> tuple[tf.Tensor, ...]:
            parts = [x.parts(value) for x, value in zip(xs, values)]
            results = _of_each_part(checked, axes, parts, split, split_results)
            # They come in the order of mesh axes, and not of dimensions.
            orders = [[sorted(k).index(a) for a in k] for k in split_results]
            return tuple(
                y.whole(tf.transpose(value, [*order, *range(len(order), value.shape.rank)]))
                for y, value, order in zip(ys, results, orders)
            )

        return of_whole

    def slicewise(self, fn: Callable, *inputs: object) -> Any:
        """Calls `fn` with the whole values; see MeshImpl."""
        values = [
            x.tensor_list[0] if isinstance(x, GspmdTensor) else x
            for x in convert_args_to_laid_out_tensors(inputs)
        ]
        result = fn(*values)
        if isinstance(result, tuple):
            return tuple(self.LaidOutTensor([part]) for part in result)
        return self.LaidOutTensor([result])

    def merges(self, dims: Sequence[Dimension]) -> bool:
        """Whether the partitioner leaves parts where they are; see MeshImpl."""
        # If only the first is split, its parts are contiguous in the product: a reshape keeps them.
        return not self.annotates or all(self.splitting_axis(d) is None for d in dims[1:])

    def einsum_by_shape(
        self, input_shapes: Sequence[Shape], output_shape: Shape, *slices: tf.Tensor
    ) -> tf.Tensor:
        """Contracts whole values; see MeshImpl."""
        product = None
        # Only where XLA compiles: what costs time is the translation of tf.einsum for it.
        if current_compilation() is not None:
            product = matrix_product(input_shapes, output_shape, slices, self.merges)
        if product is None:
            return super().einsum_by_shape(input_shapes, output_shape, *slices)
        return product

    def Print(
        self, x: GspmdTensor, data: Sequence[GspmdTensor], message: str, **kwargs: object
    ) -> GspmdTensor:
        """Returns `x`, and prints `data`; where XLA compiles the program, it cannot print.

        Args:
          x: a LaidOutTensor.
          data: a list of LaidOutTensors.
          message: a string.
          **kwargs: `summarize`, `first_n` and `name` of tf.Print.
        """
        if _is_compiled():
            return super().Print(x, data, message, **kwargs)
        shown = [d.to_laid_out_tensor().tensor_list[0] for d in data]
        return self.slicewise(lambda t: tf.Print(t, shown, message, **kwargs), x)

    def random(self, shape: Shape, tf_fn: Callable, kwargs: dict[str, Any]) -> GspmdTensor:
        """Returns a random tensor, the same as that of any other mesh implementation.

        Args:
          shape: a Shape.
          tf_fn: a function of tf.random.
          kwargs: its keyword arguments, including `seed`; or `key`, from random_values.new_key,
            instead of the seed.
        """
        kwargs, sizes = dict(kwargs), shape.to_integer_list
        seed, key = kwargs.pop("seed", None), kwargs.pop("key", None)
        if not random_values.is_known(tf_fn):
            return self.LaidOutTensor([tf_fn(sizes, seed=seed, **kwargs)])
        if key is None:
            key = self.random_key(seed)
        # The slice that is all: an element's bits are a hash of its index, as on other meshes.
        begin = [0] * len(sizes)
        value = random_values.random_slice(key, sizes, begin, sizes, tf_fn, kwargs)
        return self.LaidOutTensor([value])

    def random_key(self, seed: Optional[int]) -> tf.Tensor:
        """Returns a new key for random numbers; see MeshImpl."""
        compilation = current_compilation()
        return super().random_key(seed) if compilation is None else compilation.random_key(seed)

    # -- communication, which is left to the partitioner

    def _whole(self, x: GspmdTensor, *unused: Any, **unused_named: Any) -> GspmdTensor:
        """Returns the value, which is whole: sums are complete, and no part is elsewhere."""
        return x.to_laid_out_tensor()

    allreduce = reduce_scatter = allsplit = allconcat = alltoall = _whole

    @named_collective
    def receive(
        self, x: GspmdTensor, mesh_axis: int, source_pcoord: Sequence[Optional[int]]
    ) -> GspmdTensor:
        """Returns the value if the only processor sends it to itself, else zeros."""
        x = x.to_laid_out_tensor()
        # Operations are lowered on the executed mesh, whose only processor has coordinate 0.
        return x if source_pcoord[0] is not None else self.slicewise(tf.zeros_like, x)

    def laid_out_pnum(self) -> GspmdTensor:
        """Returns a LaidOutTensor of the number of the only processor, 0."""
        return self.LaidOutTensor([tf.constant(0)])

    # -- whole tensors

    def export_to_tf_tensor(self, x: Tensor, laid_out_x: LaidOutLike) -> tf.Tensor:
        """Returns the whole value of a Tensor."""
        return laid_out_x.to_laid_out_tensor().tensor_list[0]

    def import_tf_tensor(self, x: Tensor, tf_x: tf.Tensor) -> GspmdTensor:
        """Returns the LaidOutTensor of a whole tf.Tensor."""
        self.slice_shape(x.shape)  # checks that it can be split
        return self.LaidOutTensor([tf.convert_to_tensor(tf_x)])


class _WholeMeshImpl(ExecutedMeshImpl, GspmdMeshImpl):
    """The executed mesh of a GspmdMeshImpl: one processor, for which slices are whole tensors."""

    def annotate(self, value: tf.Tensor, tensor_shape: Shape) -> tf.Tensor:
        """Returns a value annotated by the layout on the requested mesh."""
        return self.requested.annotate(value, tensor_shape)

    def merges(self, dims: Sequence[Dimension]) -> bool:
        """Whether the partitioner leaves parts where they are; see MeshImpl."""
        return self.requested.merges(dims)

    def _cut(self, tensor_shape: Shape, count: int) -> Optional[_Cut]:
        """Returns how dimensions are merged; None if annotations split none after the first."""
        requested = self.requested
        if requested.merges(tensor_shape.dims[:count]):
            return None
        axes = [None if requested.padding(d) else requested.splitting_axis(d) for d in tensor_shape]
        return _Cut(tensor_shape, axes, requested.shape, count, requested.annotate_axes)

    def merge_dims(self, x: tf.Tensor, tensor_shape: Shape, count: int) -> tf.Tensor:
        """Merges dimensions such that devices keep their parts; see MeshImpl."""
        cut = self._cut(tensor_shape, count)
        return super().merge_dims(x, tensor_shape, count) if cut is None else cut.merged(x)

    def split_dims(self, x: tf.Tensor, tensor_shape: Shape, count: int) -> tf.Tensor:
        """Undoes `merge_dims`; see MeshImpl."""
        cut = self._cut(tensor_shape, count)
        return super().split_dims(x, tensor_shape, count) if cut is None else cut.split(x)
