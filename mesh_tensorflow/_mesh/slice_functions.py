"""Functions of slices that kinds of meshes share: cutting, products, sums of parts, scattering.

Constants and reshaped values are shared by the operations on one device. This keeps graphs small,
and a value that several contractions need as a matrix is reshaped once.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import string
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python.ops import control_flow_v2_func_graphs as func_graphs

from mesh_tensorflow._calls import within
from mesh_tensorflow._core.errors import check_choice
from mesh_tensorflow._core.layout import TensorLayout, parts_along, slice_coordinates
from mesh_tensorflow._core.operation import ArrayLike
from mesh_tensorflow._core.shape import Dimension, Shape, list_product

# -- what operations on one device share

_WIDE = [("is_floating", np.float64), ("is_complex", np.complex128)]
_POOL = "_mtf_constants"  # an attribute of tf.Graph, so that the pool is freed with the graph
# Separate for each thread: several may build programs, each in its own tf graph.
_device: contextvars.ContextVar[Optional[str]] = contextvars.ContextVar("device", default=None)
_loop: contextvars.ContextVar[Optional[object]] = contextvars.ContextVar("loop", default=None)
_as_made: contextvars.ContextVar[bool] = contextvars.ContextVar("as_made", default=False)
_never_compiled: contextvars.ContextVar[bool] = contextvars.ContextVar("uncompiled", default=False)


def inside_loop() -> contextlib.AbstractContextManager[None]:
    """Constants created within are shared only within one part of a loop."""
    # A new object each time, so that the condition and the body of a loop share nothing.
    return within(_loop, object())


def at_device(device: Optional[str]) -> contextlib.AbstractContextManager[None]:
    """Constants created within may be shared with others on the same device."""
    return within(_device, device)


def slices_as_made() -> contextlib.AbstractContextManager[None]:
    """Functions of slices called within get these themselves, so that they may differentiate."""
    return within(_as_made, True)


def _shared_pool() -> tuple[dict, tuple]:
    """Returns the pool of the current graph, and a key of the current context in it.

    Values created in a loop, a condition or a TPU computation are not shared with those outside.
    """
    graph = tf.get_default_graph()
    pool = getattr(graph, _POOL, None)
    if pool is None:
        pool = {}
        setattr(graph, _POOL, pool)
    return pool, (_device.get(), _loop.get(), graph._get_control_flow_context())


def constant(value: ArrayLike, dtype: tf.DType = tf.int32) -> tf.Tensor:
    """Returns a constant, the same tf.Tensor for the same value on the same device.

    Args:
      value: a number or a list of numbers.
      dtype: a dtype.
    """
    if _device.get() is None or tf.executing_eagerly():
        return tf.constant(value, dtype)
    pool, place = _shared_pool()
    wide = next((w for kind, w in _WIDE if getattr(dtype, kind)), np.int64)
    # In the widest dtype of the kind, which loses nothing; the key has the dtype itself.
    array = np.asarray(value, wide)
    # By bytes, since 0.0 equals -0.0 and a NaN does not equal itself.
    key = (*place, dtype, array.shape, array.tobytes())
    if key not in pool:
        with _outside_dependencies():
            pool[key] = tf.constant(value, dtype)
    return pool[key]


def _outside_dependencies() -> contextlib.AbstractContextManager[Any]:
    """What is created within waits for its inputs alone, since others share it."""
    context = tf.get_default_graph()._get_control_flow_context()
    # None would also leave a condition or a TPU computation, so within these it may wait.
    return tf.control_dependencies(None if context is None else [])


def reshaped(x: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    """Returns `x` reshaped, the same tf.Tensor for the same sizes on the same device."""
    if x.shape.as_list() == list(sizes):
        return x
    return remembered("reshaped", [x], tuple(sizes), lambda: tf.reshape(x, constant(sizes)))


def remembered(
    what: str, xs: Sequence[tf.Tensor], options: Hashable, make: Callable[[], Any]
) -> Any:
    """Returns what is computed of tf.Tensors, the same for the same ones on the same device.

    Args:
      what: what is computed.
      xs: tf.Tensors, all that it is computed of.
      options: what else it depends on.
      make: a function without arguments that computes it.
    """
    if _device.get() is None or tf.executing_eagerly():
        return make()
    pool, place = _shared_pool()
    key = (*place, what, *map(id, xs), options)
    if key not in pool:
        # Holding tensors keeps their ids from being used by others.
        pool[key] = (make(), xs)
    return pool[key][0]


def remember_reshaped(x: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    """Returns `x` reshaped; `reshaped` of the result to the sizes of `x` will return `x`."""
    y = tf.reshape(x, constant(list(sizes)))
    if _device.get() is not None and not tf.executing_eagerly():
        pool, place = _shared_pool()
        # The next contraction often needs the matrix again: it finds `x`, without a reshape.
        key = (*place, "reshaped", id(y), tuple(x.shape.as_list()))
        pool[key] = (x, [y])
    return y


# Up to this, TensorFlow computes what is made of constants before it knows where it is read.
SMALL_BYTES = 100 * 2**10
_HANDLES = (tf.resource, tf.variant)


def read_here(x: Any) -> Any:
    """Returns what another device has as it is on the current one, if it is small.

    TensorFlow computes what is made of constants before the first step, but on each device by
    itself: what another one sends is not known then, and all that is made of it is computed in each
    step. A small constant is known on the device of an identity, too.

    Args:
      x: a tf.Tensor, or anything else, which is returned as it is.
    """
    device = _device.get()
    # What most slices fail by is asked first: it is asked of each argument of each operation.
    if not isinstance(device, str) or not isinstance(x, tf.Tensor):
        return x
    if not device or not _differ(x.device, device) or _as_made.get() or tf.executing_eagerly():
        return x
    # A handle or a reference is a variable, and no value.
    if x.dtype in _HANDLES or x.dtype._is_ref_dtype:
        return x
    elements = x.shape.num_elements()
    if elements is None or elements * x.dtype.size > SMALL_BYTES:
        return x
    # A function's graph has what it captures on no device.
    if x.graph is not tf.get_default_graph():
        return x
    with _outside_dependencies():
        return remembered("read", [x], (), lambda: tf.identity(x))


@functools.cache
def _differ(one: str, other: str) -> bool:
    """Returns whether two devices are different ones, by what the names of both say."""
    # What is on no device is computed on the first CPU of a machine without others.
    specs = [tf.DeviceSpec.from_string(name or "/device:CPU:0") for name in (one, other)]
    fields = ("job", "replica", "task", "device_type", "device_index")
    pairs = ([getattr(spec, part) for spec in specs] for part in fields)
    return any(None not in pair and pair[0] != pair[1] for pair in pairs)


# -- slices of one processor


def real_view(x: tf.Tensor) -> tf.Tensor:
    """Returns a complex tf.Tensor as a real one of shape [..., 2]; others as they are."""
    # The sum of complex numbers is that of their parts, and a bitcast copies nothing.
    return tf.bitcast(x, x.dtype.real_dtype) if x.dtype.is_complex else x


def complex_view(y: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns a `real_view` as numbers of the dtype that it had."""
    return tf.bitcast(y, dtype) if dtype.is_complex else y


def make_slices(x: tf.Tensor, layout: TensorLayout, mesh_shape: Shape) -> list[tf.Tensor]:
    """Splits `x` into a slice for each processor; equal slices are the same tf.Tensor."""
    # By coordinates of parts, not by processor, so that equal slices are made once.
    parts: dict[tuple[int, ...], Any] = {(): x}
    for tensor_axis, mesh_axis in enumerate(layout):
        grown = {}
        for key, part in parts.items():
            n = parts_along(mesh_axis, mesh_shape)
            size = tf.TensorShape(part.shape).as_list()[tensor_axis]
            if n > 1 and size is not None:
                part = padded(part, tensor_axis, -size % n)
            pieces = [part] if n == 1 else tf.split(part, n, tensor_axis)
            grown.update({key + (i,): piece for i, piece in enumerate(pieces)})
        parts = grown
    return [parts[slice_coordinates(layout, mesh_shape, pnum)] for pnum in range(mesh_shape.size)]


def in_own_memory(piece: tf.Tensor, whole: tf.Tensor) -> tf.Tensor:
    """Returns a slice that a variable can keep without keeping the whole tensor.

    TensorFlow cuts along the first axis without copying, and a view holds the memory of it all. Its
    graph optimizer takes operations that only copy (DeepCopy, Snapshot) away.

    Args:
      piece: a slice.
      whole: the tf.Tensor that it was cut from.
    """
    if piece is whole or piece.shape == whole.shape:
        return piece
    return tf.raw_ops.Roll(input=piece, shift=0, axis=0)


def padded(t: tf.Tensor, axis: int, count: int) -> tf.Tensor:
    """Returns a tensor with copies of its last element after it along an axis.

    So padding is no number that the program could not have: an integer is not divided by 0 there.

    Args:
      t: a tf.Tensor, or an array.
      axis: an axis.
      count: how many elements are added.
    """
    if not count:
        return t
    size = tf.TensorShape(t.shape).as_list()[axis]
    if not size:
        return tf.pad(t, [[0, count if i == axis else 0] for i in range(len(t.shape))])
    last = t[(slice(None),) * axis + (slice(size - 1, size),)]
    return tf.concat([t, *[last] * count], axis)


def cut(t: tf.Tensor, axis: int, begin: Union[int, tf.Tensor], size: int) -> tf.Tensor:
    """Returns a range of a tensor along an axis.

    Args:
      t: a tf.Tensor of known sizes.
      axis: an axis.
      begin: the first index, an int or an int32 scalar.
      size: how many elements.
    """
    sizes = t.shape.as_list()
    if size == sizes[axis]:
        return t  # which begins at 0
    begins = [begin if i == axis else 0 for i in range(len(sizes))]
    sizes[axis] = size
    return tf.slice(t, begins, sizes)


def cut_to(t: tf.Tensor, sizes: Sequence[Optional[int]]) -> tf.Tensor:
    """Returns the beginning of a tensor along each axis; all of it where the size is None."""
    if t.shape.as_list() == list(sizes):
        return t
    return tf.slice(t, [0] * len(sizes), [-1 if size is None else size for size in sizes])


def filled(size: int, axis: int, value: Any, t: tf.Tensor, coordinate: Any) -> tf.Tensor:
    """Returns a slice whose elements past the end of the whole tensor have a value.

    Args:
      size: the size of the whole along the axis.
      axis: an axis.
      value: a number.
      t: a slice.
      coordinate: the number of the slice along the axis; an int if it is known.
    """
    sizes = t.shape.as_list()
    part = sizes[axis]
    if isinstance(coordinate, int):
        valid = min(part, max(0, size - coordinate * part))
        if valid == part:
            return t
        before, after = list_product(sizes[:axis]), list_product(sizes[axis + 1 :])
        # Scattered, which copies the slice once. To cut off what is kept, and join it with the
        # padding, would copy it twice, which is much for logits.
        rows, places = tf.meshgrid(tf.range(before), tf.range(valid, part), indexing="ij")
        padding = tf.fill([before, part - valid, after], tf.cast(value, t.dtype))
        matrices = tf.reshape(t, [before, part, after])
        replaced = tf.tensor_scatter_nd_update(matrices, tf.stack([rows, places], -1), padding)
        return tf.reshape(replaced, sizes)
    index = tf.range(part) + tf.cast(coordinate, tf.int32) * part
    inside = tf.reshape(index < size, [part if i == axis else 1 for i in range(len(sizes))])
    return tf.where_v2(inside, t, tf.cast(value, t.dtype))


def combine_slices(
    slices: Sequence[Any],
    layout: TensorLayout,
    mesh_shape: Shape,
    device: Optional[str] = None,
    tensor_shape: Optional[Shape] = None,
) -> tf.Tensor:
    """Joins the slices of all processors to the whole tensor.

    Args:
      slices: one tf.Tensor for each processor.
      layout: a TensorLayout.
      mesh_shape: a Shape.
      device: the device to join them on; chosen by TensorFlow if None.
      tensor_shape: the Shape of the whole, if slices may end in padding.
    """
    parts: dict[tuple[int, ...], Any] = {}
    for pnum, piece in enumerate(slices):
        # One of several equal slices, that of the first processor that has it.
        parts.setdefault(slice_coordinates(layout, mesh_shape, pnum), piece)
    with tf.device(device):
        # The last axis first: joining along it removes the last coordinate of each key.
        for tensor_axis in reversed(range(len(layout))):
            joined: dict[tuple[int, ...], list] = {}
            # By coordinates, so that pieces are joined in the order in which they lie in the whole.
            for key in sorted(parts):
                joined.setdefault(key[:-1], []).append(parts[key])
            parts = {
                key: pieces[0] if len(pieces) == 1 else tf.concat(pieces, tensor_axis)
                for key, pieces in joined.items()
            }
        whole = parts[()]
        if tensor_shape is None:
            return whole
        # A user may join slices of other sizes than those of the Shape, which then only says how
        # they are laid out: what is beyond it is padding only of slices that have its sizes.
        of_slice, of_whole = slices[0].shape.as_list(), whole.shape.as_list()
        sizes = [
            # A slice of a dimension that is padded has its size by their number, rounded up.
            dim.size if size and size > dim.size and part == -(-dim.size * part // size) else size
            for part, size, dim in zip(of_slice, of_whole, tensor_shape)
        ]
        return cut_to(whole, sizes)


# Matrix products are slower than elementwise products if a matrix, or all of them together, have
# fewer elements than these, because they are distributed over threads.
_SMALL_MATRIX, _SMALL_MATRICES = 2**6, 2**15

_REDUCTIONS = {"SUM": tf.reduce_sum, "MAX": tf.reduce_max, "MIN": tf.reduce_min}
_BINARY_REDUCTIONS = {"SUM": tf.add, "MAX": tf.maximum, "MIN": tf.minimum}


def reduction_fn(reduction_fn_string: str) -> Callable:
    """Returns tf.reduce_sum, _max or _min for "SUM", "MAX" or "MIN"."""
    check_choice("reduction_fn", "reduction_fn_string", reduction_fn_string, _REDUCTIONS)
    return _REDUCTIONS[reduction_fn_string]


def binary_reduction_fn(reduction_fn_string: str) -> Callable:
    """Returns tf.add, tf.maximum or tf.minimum for "SUM", "MAX" or "MIN"."""
    check_choice("binary_reduction_fn", "reduction_fn_string", reduction_fn_string, _REDUCTIONS)
    return _BINARY_REDUCTIONS[reduction_fn_string]


# Neighboring dimensions that the same operands have are one to an elementwise kernel, which
# broadcasts along at most so many.
_GROUPS = 5


def _groups(shapes: Sequence[Sequence[int]]) -> int:
    """Returns how many groups of dimensions, by which operands have them, a kernel has to tell."""
    # Of all ranks: dimensions are counted from the last one.
    dims = itertools.zip_longest(*map(reversed, shapes), fillvalue=1)
    patterns = [[n > 1 for n in sizes] for sizes in dims if max(sizes) > 1]
    return sum(1 for _ in itertools.groupby(patterns))


def for_kernels(
    slices: Sequence[tf.Tensor], sizes: Optional[Sequence[int]] = None
) -> list[tf.Tensor]:
    """Returns slices that are broadcast to each other, repeated where no kernel could do it.

    Dimensions of many names may alternate between two tensors, as a, c, e and a, b, c, d, e, f do.

    Args:
      slices: tf.Tensors whose shapes can be broadcast to each other.
      sizes: a shape that they are broadcast to besides; None if there is none.
    """
    shapes = [x.shape.as_list() for x in slices] + ([] if sizes is None else [list(sizes)])
    rank = max(map(len, shapes))
    if rank <= _GROUPS or _groups(shapes) <= _GROUPS:
        return list(slices)
    full = [[1] * (rank - len(s)) + s for s in shapes]
    factors = [[1] * rank for _ in full]
    # From the last dimension on: what is broadcast along the first ones is repeated by rows.
    for d in reversed(range(rank)):
        size = max(s[d] for s in full)
        for s, by in zip(full, factors):
            if s[d] < size:
                s[d], by[d] = size, size
        if _groups(full) <= _GROUPS:
            break
    return [
        x if max(by) == 1 else tf.tile(tf.reshape(x, [n // m for n, m in zip(s, by)]), by)
        for x, s, by in zip(slices, full, factors)
    ]


def broadcast_slice(x: tf.Tensor, old_shape: Shape, new_shape: Shape) -> tf.Tensor:
    """Transposes a slice to the order of `new_shape`, with size 1 for the dimensions that it lacks.

    TensorFlow can broadcast the result to a slice of `new_shape`.

    Args:
      x: a tf.Tensor, a slice of a tensor of shape `old_shape`.
      old_shape: a Shape.
      new_shape: a Shape that has all dimensions of `old_shape`.
    """
    if old_shape == new_shape:
        return x
    common = [d for d in new_shape if d in old_shape]
    perm = [old_shape.dims.index(d) for d in common]
    if perm != sorted(perm):
        x = tf.transpose(x, constant(perm))
    # Leading dimensions of size 1 are implied.
    if common == new_shape.dims[len(new_shape) - len(common) :]:
        return x
    # Sizes of the slice, which are not those of the whole tensor's dimensions.
    sizes = iter(x.shape.as_list())
    first = new_shape.dims.index(common[0]) if common else len(new_shape)
    aligned = [next(sizes) if d in old_shape else 1 for d in new_shape.dims[first:]]
    return tf.reshape(x, constant(aligned))


def einsum_equation(input_shapes: Sequence[Shape], output_shape: Shape) -> str:
    """Returns the equation of `tf.einsum`, with letters from "a" in order of appearance."""
    # Plans are cached by the text, and `_LARGE` has it, so that letters must not depend on names.
    letters: dict = {}

    def text(shape: Shape) -> str:
        return "".join(letters.setdefault(d, chr(ord("a") + len(letters))) for d in shape)

    inputs = ",".join(text(shape) for shape in input_shapes)
    return f"{inputs}->{text(output_shape)}"


def einsum_slice(
    slices: Sequence[tf.Tensor],
    input_shapes: Sequence[Shape],
    output_shape: Shape,
    einsum_by_shape: Callable[..., tf.Tensor],
    merges: Callable[[Sequence[Dimension]], bool] = lambda dims: True,
) -> tf.Tensor:
    """Contracts slices by dimension.

    If one input or the output has all dimensions, or if the dtype is an integer, slices are
    broadcast, multiplied and summed, or multiplied as a batch of vectors and matrices. Otherwise
    `einsum_by_shape` is called.

    Args:
      slices: tf.Tensors.
      input_shapes: their Shapes (of the whole tensors).
      output_shape: a Shape; every dimension occurs in an input.
      einsum_by_shape: takes the Shapes of slices, that of the result, and the slices.
      merges: whether some dimensions become one by a reshape alone, see MeshImpl.
    """
    all_dims = list(dict.fromkeys(d for shape in input_shapes for d in shape))
    full = next((s for s in [output_shape, *input_shapes] if all(d in s for d in all_dims)), None)
    if full is None and slices[0].dtype.is_integer:
        full = Shape(all_dims)
    if full is None:
        if len(slices) == 2 and _second_comes_first(input_shapes, output_shape):
            slices, input_shapes = slices[::-1], input_shapes[::-1]
        return einsum_by_shape(input_shapes, output_shape, *slices)
    product = _rows_times_matrices(slices, input_shapes, output_shape, merges)
    if product is not None:
        return product
    aligned = for_kernels([broadcast_slice(x, s, full) for x, s in zip(slices, input_shapes)])
    # y[output] = sum over all other dimensions of the product of the inputs.
    product = functools.reduce(tf.multiply, aligned)
    if len(output_shape) == len(full):
        return transpose_slice(product, full, output_shape)
    # Leading dimensions that no input has were left out by broadcast_slice.
    offset = len(full) - product.shape.ndims
    summed = [i - offset for i, d in enumerate(full) if d not in output_shape]
    summed_shape = Shape([d for d in full if d in output_shape])
    return transpose_slice(tf.reduce_sum(product, constant(summed)), summed_shape, output_shape)


def _second_comes_first(input_shapes: Sequence[Shape], output_shape: Shape) -> bool:
    """Returns whether a product of two slices needs no transpose if they are swapped.

    After the dimensions that both have, kernels output those of the first operand, then those of
    the second.
    """
    left, right = input_shapes
    of_one = [d for d in output_shape if (d in left) != (d in right)]
    return bool(of_one) and of_one[0] in right


def _rows_times_matrices(
    slices: Sequence[tf.Tensor],
    input_shapes: Sequence[Shape],
    output_shape: Shape,
    merges: Callable[[Sequence[Dimension]], bool],
) -> Optional[tf.Tensor]:
    """Returns a contraction as a batch of vectors times matrices; None if it is not one.

    Examples are attention from a single position, and sums over several dimensions by weights.
    """
    if len(slices) != 2 or not slices[0].dtype.is_floating:
        return None
    # y[batch, others] = sum over inner of row[batch, inner] * matrix[batch, inner, others].
    (row, dims), (matrix, matrix_dims) = sorted(
        zip(slices, (s.dims for s in input_shapes)), key=lambda pair: len(pair[1])
    )
    batch = [d for d in dims if d in output_shape]
    inner = [d for d in dims if d not in output_shape]
    others = [d for d in matrix_dims if d not in dims]
    first = matrix_dims == [*batch, *inner, *others]
    if not (first or matrix_dims == [*batch, *others, *inner]) or dims != [*batch, *inner]:
        return None
    if not inner or not others or output_shape.dims != [*batch, *others]:
        return None
    if not (merges(inner) and merges(others)):
        return None
    sizes, place = matrix.shape.as_list(), len(batch)
    small = list_product(sizes[place:]) < _SMALL_MATRIX or list_product(sizes) < _SMALL_MATRICES
    if small:
        return None
    # The kernel reads either order, [inner, others] or [others, inner], without a transposed copy.
    middle = place + len(inner if first else others)
    cut = (sizes[:place], sizes[place:middle], sizes[middle:])
    rows = reshaped(row, [*cut[0], 1, list_product(cut[1 if first else 2])])
    matrices = reshaped(matrix, [*cut[0], *map(list_product, cut[1:])])
    product = tf.matmul(rows, matrices, transpose_b=not first)
    return reshaped(product, [*cut[0], *cut[2 if first else 1]])


def transpose_slice(x: tf.Tensor, old_shape: Shape, new_shape: Shape) -> tf.Tensor:
    """Transposes a slice to the order of `new_shape`, which has the same dimensions."""
    perm = [old_shape.dims.index(d) for d in new_shape]
    return x if perm == sorted(perm) else tf.transpose(x, constant(perm))


def parts_of(axis: int, parts: int, x: tf.Tensor) -> tf.Tensor:
    """Returns equal parts of a slice, stacked.

    Args:
      axis: the axis along which it is cut.
      parts: the number of parts.
      x: a tf.Tensor.
    """
    if axis == 0 and x.shape.is_fully_defined():  # they lie in memory like that
        first, *others = x.shape.as_list()
        return tf.reshape(x, [parts, first // parts, *others])
    return tf.stack(tf.split(x, parts, axis))


def part_of(axis: int, parts: int, x: tf.Tensor, part: Union[int, tf.Tensor]) -> tf.Tensor:
    """Returns one of equal parts of a slice.

    Args:
      axis: the axis along which it is cut.
      parts: the number of parts.
      x: a tf.Tensor.
      part: the number of the part.
    """
    sizes = x.shape.as_list()
    sizes[axis] //= parts
    begin: list[Any] = [0] * len(sizes)
    begin[axis] = part * sizes[axis]
    # Not one of tf.split: the number of the part may be a tensor, which differs by processor.
    return tf.slice(x, begin, sizes)


def tile_slice(x: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    """Broadcasts a slice to `sizes` where it is smaller."""
    if x.shape.as_list() == list(sizes):
        return x
    [x] = for_kernels([x], sizes)
    return tf.broadcast_to(x, constant(list(sizes)))


def static_arange(begin: int, size: int, stride: int) -> np.ndarray:
    """Returns (begin .. begin + size - 1) * stride, modulo 2**32."""
    # In 64 bits, since NumPy makes no uint32 range beyond 2**32; what wraps at 2**64 is right
    # modulo 2**32 as well.
    wide = (np.arange(begin, begin + size, dtype=np.uint64) * np.uint64(stride)) & np.uint64(
        0xFFFFFFFF
    )
    return wide.astype(np.uint32)


# Below about this many multiply-adds, the overhead of tf.einsum on CPUs exceeds that of a matrix
# product and its reshapes.
_SMALL = 4_000_000

# Of this many rows for each matrix of a batch, products are those of decoding.
_FEW_ROWS = 8
_BATCHES = (tf.float32, tf.float64, tf.bfloat16)  # the dtypes that have a kernel on all devices

# Of more than one and up to so many rows, as in steps of decoding, a product with a kernel is
# faster as a batch of one: oneDNN has newer code for batches than for matrices.
_ROWS_OF_STEPS = 64

# Large products of two matrices for which tf.matmul is still faster; with a transposed right
# operand tf.einsum is.
_LARGE = frozenset(["ab,bc->ac", "ab,ac->bc"])


class _Plan(NamedTuple):
    """A matrix product that computes an equation: free and contracted labels of each operand."""

    left_free: str
    right_free: str
    contracted: str
    transpose_left: bool
    transpose_right: bool


def _free_side(labels: str, contracted: str) -> Optional[tuple[str, bool]]:
    """Returns (free labels, whether the contracted ones come first), or None."""
    # At one end and in one order, contracted dimensions are merged by a reshape alone.
    n = len(contracted)
    if labels[len(labels) - n :] == contracted:
        return labels[: len(labels) - n], False
    if labels[:n] == contracted:
        return labels[n:], True
    return None


@functools.lru_cache(maxsize=4096)
def _plan(equation: str) -> Optional[_Plan]:
    """Returns the matrix product that computes an equation, or None if there is none."""
    inputs, output = equation.split("->")
    left, right = inputs.split(",")
    contracted = "".join(c for c in left if c in right and c not in output)
    sides = _free_side(left, contracted), _free_side(right, contracted)
    if not contracted or sides[0] is None or sides[1] is None:
        return None
    (left_free, left_first), (right_free, right_first) = sides
    # What both have and the output keeps is a batch dimension, and this is a single product.
    if left_free + right_free != output or set(left_free) & set(right_free):
        return None
    # A product contracts the last axis on the left with the first one on the right.
    return _Plan(left_free, right_free, contracted, left_first, not right_first)


def contract(equation: str, *slices: tf.Tensor) -> tf.Tensor:
    """Returns tf.einsum(equation, *slices), with the kernel that is faster on CPUs.

    Args:
      equation: as for tf.einsum.
      *slices: tf.Tensors.
    """
    # Which kernel is faster depends on sizes, and so do the reshapes to matrices.
    if len(slices) != 2 or not all(x.shape.is_fully_defined() for x in slices):
        return tf.einsum(equation, *slices)
    labels = equation.split("->")[0].split(",")
    size = {c: s for text, x in zip(labels, slices) for c, s in zip(text, x.shape.as_list())}
    single = {c for c in labels[0] if size[c] == 1 and all(c in part for part in _parts(equation))}
    if single:
        return _without_ones(single, equation, slices, size)
    plan = _plan(equation)
    if plan is None:
        batched = _few_rows_of_each(equation, slices, size)
        return tf.einsum(equation, *slices) if batched is None else batched
    left, inner, right = (
        list_product(size[c] for c in part)
        for part in (plan.left_free, plan.contracted, plan.right_free)
    )
    is_step = 1 < left <= _ROWS_OF_STEPS < min(inner, right) and not plan.transpose_left
    if is_step and all(x.dtype == tf.float32 for x in slices):
        y = tf.raw_ops.BatchMatMulV2(
            x=reshaped(slices[0], [left, inner]),
            y=reshaped(slices[1], _matrix(inner, right, plan.transpose_right)),
            adj_y=plan.transpose_right,
        )
        return reshaped(y, [size[c] for c in plan.left_free + plan.right_free])
    # A single row, as in decoding, is multiplied as fast as the matrix is read.
    large = left * inner * right > _SMALL and min(left, right) > 1
    if large and equation not in _LARGE:
        return tf.einsum(equation, *slices)
    # The matrices of operands are kept: several products of a layer and its gradient need them.
    y = never_with_bias(
        tf.matmul(
            reshaped(slices[0], _matrix(left, inner, plan.transpose_left)),
            reshaped(slices[1], _matrix(inner, right, plan.transpose_right)),
            transpose_a=plan.transpose_left,
            transpose_b=plan.transpose_right,
        )
    )
    sizes = [size[c] for c in plan.left_free + plan.right_free]
    return y if sizes == [left, right] else remember_reshaped(y, sizes)


def _few_rows_of_each(
    equation: str, slices: Sequence[tf.Tensor], size: Mapping[str, int]
) -> Optional[tf.Tensor]:
    """Returns a small batch of products of few rows, as of attention in decoding; None for others.

    Args:
      equation: as for tf.einsum.
      slices: two tf.Tensors.
      size: the sizes of labels.
    """
    parts = _parts(equation)
    same = itertools.takewhile(lambda labels: len(set(labels)) == 1, zip(*parts))
    batch = "".join(labels[0] for labels in same)
    left, right, output = (part[len(batch) :] for part in parts)
    plan = _plan(f"{left},{right}->{output}")
    if not batch or plan is None or slices[0].dtype not in _BATCHES:
        return None
    of_all, rows, inner, columns = (
        list_product(size[c] for c in part)
        for part in (batch, plan.left_free, plan.contracted, plan.right_free)
    )
    if min(rows, columns) > _FEW_ROWS or of_all * rows * inner * columns > _SMALL:
        return None
    # This kernel alone is one that no optimizer replaces by oneDNN's: that takes longer to begin
    # than such products take.
    product = tf.raw_ops.BatchMatMulV3(
        x=reshaped(slices[0], [of_all, *_matrix(rows, inner, plan.transpose_left)]),
        y=reshaped(slices[1], [of_all, *_matrix(inner, columns, plan.transpose_right)]),
        Tout=slices[0].dtype,
        adj_x=plan.transpose_left,
        adj_y=plan.transpose_right,
    )
    return reshaped(product, [size[c] for c in parts[-1]])


def never_with_bias(y: tf.Tensor) -> tf.Tensor:
    """Returns a product that TensorFlow's optimizer does not join with what is added to it.

    It takes a row that is added for a bias if it does not know that the product is one row too, as
    in loops and after collectives. Its kernel then refuses it: "bias must be 1-dimensional". Only
    products of one row are concerned: the others meet no rows, but biases of one dimension.

    Args:
      y: what tf.matmul or a convolution returns.
    """
    if tf.executing_eagerly() or not y.shape.is_fully_defined():
        return y
    return tf.ensure_shape(y, y.shape) if y.shape[:-1].num_elements() == 1 else y


def _parts(equation: str) -> list[str]:
    return equation.replace("->", ",").split(",")


def _without_ones(
    single: Collection[str], equation: str, slices: Sequence[tf.Tensor], size: Mapping[str, int]
) -> tf.Tensor:
    """Contracts without labels of size 1 that are in all operands and in the result.

    With them it would be a batch of one product, which kernels compute more slowly: such is the
    slice of a dimension that each processor has one index of, as of stages or experts.
    """
    labels = ["".join(c for c in part if c not in single) for part in _parts(equation)]
    # Letters from "a" on again, since plans and `_LARGE` know equations by their text.
    names = dict(zip(dict.fromkeys("".join(labels)), string.ascii_lowercase))
    left, right, output = ("".join(names[c] for c in part) for part in labels)
    y = contract(
        f"{left},{right}->{output}",
        *(reshaped(x, [size[c] for c in part]) for x, part in zip(slices, labels)),
    )
    return remember_reshaped(y, [size[c] for c in _parts(equation)[-1]])


def _matrix(rows: int, columns: int, transposed: bool) -> Sequence[int]:
    return [columns, rows] if transposed else [rows, columns]


def merged_sizes(mesh_impl: Any, tensor_shape: Shape, count: int) -> list[int]:
    """Returns the sizes of a slice, with the first `count` dimensions merged to one."""
    sizes = mesh_impl.slice_shape(tensor_shape)
    return [list_product(sizes[:count]), *sizes[count:]]


def merge_dims(mesh_impl: Any, x: tf.Tensor, tensor_shape: Shape, count: int) -> tf.Tensor:
    """Returns a slice with its first dimensions merged to one, in an order of the mesh's choice.

    Args:
      mesh_impl: a MeshImpl, whose method this is.
      x: a slice of a tensor.
      tensor_shape: the Shape of the tensor.
      count: how many dimensions become one.
    """
    return _reshaped(x, merged_sizes(mesh_impl, tensor_shape, count))


def split_dims(mesh_impl: Any, x: tf.Tensor, tensor_shape: Shape, count: int) -> tf.Tensor:
    """Returns the slice of a tensor from one whose first dimensions `merge_dims` merged."""
    return _reshaped(x, mesh_impl.slice_shape(tensor_shape))


def _reshaped(x: tf.Tensor, sizes: list[int]) -> tf.Tensor:
    return x if x.shape.as_list() == sizes else tf.reshape(x, sizes)


_OF_CONTROL_FLOW = (
    func_graphs.CondBranchFuncGraph,
    func_graphs.WhileBodyFuncGraph,
    func_graphs.WhileCondFuncGraph,
)


def never_compiled() -> contextlib.AbstractContextManager[None]:
    """What is built within is of a function that no other calls, and XLA does not compile."""
    return within(_never_compiled, True)


def _may_be_compiled() -> bool:
    """Returns whether XLA may have to compile what is built now.

    That is not known in a function, without `never_compiled`: whoever calls it may be compiled. The
    body of a loop is a function of the graph that the loop is in.
    """
    if _never_compiled.get():
        return False
    graph = tf.get_default_graph()
    while True:
        context = graph._get_control_flow_context()
        while context is not None:
            if context.IsXLAContext():
                return True
            context = context.outer_context
        if not graph.building_function:
            return False
        if not isinstance(graph, _OF_CONTROL_FLOW):
            return True
        graph = graph.outer_graph


def within_part(
    indices: tf.Tensor, part: int, coordinate: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns indices within a slice of a dimension, clipped to it, and which of them are in it.

    Args:
      indices: indices along the whole dimension.
      part: the number of positions in the slice.
      coordinate: [the number of the slice], or [] if the dimension is not split.
    """
    # Counted from the first position of this slice, those of others are below 0 or too large.
    for c in coordinate:
        indices = indices - tf.cast(c * part, indices.dtype)
    # Kernels on CPUs raise an error for an index out of range, and those on GPUs give 0.
    ends = (constant(n, indices.dtype) for n in (0, part - 1))
    inside = tf.clip_by_value(indices, *ends)
    return inside, tf.equal(indices, inside)


def add_entries(x: tf.Tensor, indices: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Returns a tensor with values added to entries; for equal indices all of them.

    In the graph of a session it is computed in the memory of `x` if nothing else reads that.
    tf.tensor_scatter_nd_add, which XLA knows, always copies `x`.

    Args:
      x: a tf.Tensor.
      indices: positions, an integer tf.Tensor whose last dimension is that of their coordinates.
      values: a tf.Tensor with the entries, or the parts of x, to add.
    """
    if _may_be_compiled():
        return tf.tensor_scatter_nd_add(x, indices, values)
    return tf.raw_ops.ScatterNdNonAliasingAdd(input=x, indices=indices, updates=values)


def set_entries(
    x: tf.Tensor, indices: tf.Tensor, values: tf.Tensor, known: tf.Tensor, distinct: bool
) -> tf.Tensor:
    """Returns a tensor with some rows replaced, with the memory of `add_entries`.

    tf.tensor_scatter_nd_update always copies `x` on CPUs, since its kernel asks for memory of
    another kind than that of `x`. So what was there is subtracted first, which leaves an exact 0,
    and the new values are added; where it is infinite, that leaves NaN, as the products that read
    it before have given.

    Args:
      x: a tf.Tensor of two dimensions.
      indices: numbers of rows, a vector.
      values: a tf.Tensor with a row for each index.
      known: booleans, a scalar or one for each index: False leaves the row as it is.
      distinct: whether no row number is in `indices` twice. If some are, only one of them may be
        known.
    """
    where = tf.expand_dims(indices, 1)
    known = tf.expand_dims(known, 1) if known.shape.ndims else known
    old = tf.gather(x, indices)
    # With a row number twice, the update that is not known could come last and undo the other.
    if distinct and _may_be_compiled():
        return tf.tensor_scatter_nd_update(x, where, tf.where_v2(known, values, old))
    # Rows that are not known get zeros added, and so stay as they are.
    none = tf.zeros_like(old)
    # In loops new values come last: others that read `x` are done then, and its memory is free.
    with tf.control_dependencies([values]):
        removed = tf.where_v2(known, tf.negative(old), none)
    x = add_entries(x, where, removed)
    return add_entries(x, where, tf.where_v2(known, values, none))
