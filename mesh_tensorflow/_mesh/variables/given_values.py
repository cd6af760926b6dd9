"""Values that variables are given: parts of them, in the dtype of a variable, without a copy."""

from __future__ import annotations

import collections
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Optional

import numpy as np
import numpy.typing as npt
import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import WrongTypeError
from mesh_tensorflow._mesh.devices import cores

if TYPE_CHECKING:
    from mesh_tensorflow._mesh.variables.store import Form

# A function of the range of a part along each dimension, which returns the part.
PartFunction = Callable[[tuple[slice, ...]], np.ndarray]


def given_parts(values: Mapping[str, Any], name: str) -> PartFunction:
    """Returns a function that returns parts of a given value.

    Args:
      values: arrays by name. If it has a method `parts`, that returns the function for a name, and
        so need not have the whole of an array. Or a ChainMap of such.
      name: a name in it.
    """
    mapping = _one_with(values, name)
    if has_parts(mapping):
        return mapping.parts(name)  # type: ignore[attr-defined]
    whole = np.asarray(mapping[name])
    return lambda index: whole[index]


def given_shape(values: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Returns the shape of a given value, without reading it if `values` has a method `parts`.

    Args:
      values: arrays by name, as `given_parts` takes them.
      name: a name in it.
    """
    mapping = _one_with(values, name)
    return mapping.shape(name) if has_parts(mapping) else np.shape(mapping[name])  # type: ignore[attr-defined]


def has_parts(values: Mapping[str, Any]) -> bool:
    """Returns whether given values can be read part by part.

    Args:
      values: arrays by name, as `given_parts` takes them, or a ChainMap whose last are.
    """
    last = values.maps[-1] if isinstance(values, collections.ChainMap) else values
    return hasattr(last, "parts")


def _one_with(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns the first of the mappings of a ChainMap that has a name; of others, itself."""
    if not isinstance(values, collections.ChainMap):
        return values
    return next(one for one in values.maps if name in one)


def fitting_part(
    name: str, form: Form, part: PartFunction, begin: Sequence[int], sizes: Sequence[int]
) -> tf.Tensor:
    """Returns a part of a value that is assigned to a variable, in its dtype; see `fitting`.

    Args:
      name: the full name of the variable.
      form: its Form.
      part: returns parts of the value.
      begin: the index of the first element along each dimension.
      sizes: the shape of the part.
    """
    index = tuple(slice(b, b + n) for b, n in zip(begin, sizes))
    return fitting(name, form, _in_own_memory(part(index), form.dtype), sizes)


def fitting(
    name: str, form: Form, value: npt.ArrayLike, sizes: Optional[Sequence[int]] = None
) -> tf.Tensor:
    """Returns a value that is assigned to a variable, in its dtype.

    Floats are rounded to it. Nothing else of the value may be lost.

    Args:
      name: the full name of the variable.
      form: its Form.
      value: an array of its shape.
      sizes: the shape of the value, if that is a part of the variable.

    Raises:
      ValueError: the value has another shape, or an element is no number of the dtype.
      WrongTypeError: no number of its dtype is, such as a complex one where that is real.
    """
    description = f"variable {name!r} {form.shape} of {form.dtype.name}"
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError, OverflowError) as e:
        raise WrongTypeError(f"{description}: {value!r} is no array of numbers: {e}") from e
    is_number = tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype == tf.bool
    is_same = tensor.dtype == form.dtype or (tensor.dtype.is_complex and form.dtype.is_complex)
    if not is_number and not is_same:
        raise WrongTypeError(
            f"{description} cannot be assigned {tensor.dtype.name} values, such as "
            f"{_element(tensor, np.zeros(tensor.shape.rank or 0, int))}. Convert them first"
        )
    expected = form.shape.to_integer_list if sizes is None else list(sizes)
    if not tensor.shape.is_compatible_with(expected):
        raise ValueError(
            f"{description} cannot be assigned a value of shape {tensor.shape}: "
            f"give one of {expected}"
        )
    if tensor.dtype == form.dtype:
        return tensor
    cast = tf.cast(tensor, form.dtype)
    if (tensor.dtype, form.dtype) in _WIDENED:
        return cast
    # In a function there are no values to look at yet, so only the dtypes can tell.
    if tf.is_symbolic_tensor(cast):
        if tensor.dtype.is_floating and not (form.dtype.is_floating or form.dtype.is_complex):
            raise WrongTypeError(
                f"{description} cannot be assigned {tensor.dtype.name}: use tf.cast on it"
            )
        return cast
    before, after = tensor.numpy(), cast.numpy()
    if form.dtype.is_floating or form.dtype.is_complex:
        # A number above the largest of the dtype becomes infinite; what was infinite may stay so.
        lost = np.isfinite(before) & ~np.isfinite(after)
    else:
        with np.errstate(invalid="ignore"):
            # Back and compared: what the cast cut off is not there any more.
            lost = (after.astype(before.dtype) != before) | ~np.isfinite(before)
            # Between a signed and an unsigned dtype of one width, the way back finds the same bits.
            lost |= (after < 0) != (before < 0)
    if np.any(lost):
        index = np.argwhere(lost)[0]
        raise ValueError(
            f"{description} cannot be assigned {_element(tensor, index)}, the element at "
            f"{index.tolist()} of {tensor.dtype.name}: it would become {after[tuple(index)]!r}. "
            "Round or clip the values first"
        )
    return cast


# Pairs of dtypes of which the second has all numbers of the first.
_WIDENED = {
    (few, more)
    for few, more in itertools.product(
        (tf.bfloat16, tf.float16, tf.float32), (tf.float32, tf.float64)
    )
    if few.size < more.size
}


def _element(x: tf.Tensor, index: np.ndarray) -> str:
    is_there = not tf.is_symbolic_tensor(x) and tf.size(x) > 0
    return repr(np.asarray(x.numpy())[tuple(index)]) if is_there else x.name


_FLOATS = {
    np.dtype(dtype.as_numpy_dtype): dtype
    for dtype in (tf.bfloat16, tf.float16, tf.float32, tf.float64)
}
# Smaller arrays are not worth a thread. NumPy asks for large pages from 4 MB on.
_LARGE = 2**20
_PIECE = 2**18  # elements that a thread converts at once, in its cache
_ALIGNED = 64  # what kernels of TensorFlow want of addresses, in bytes
_ROWS = 1024  # of a piece that is transposed
_BESIDE = 16  # elements after each row there: rows 2**n apart would share few lines of a cache


def _in_own_memory(array: np.ndarray, dtype: tf.DType) -> npt.ArrayLike:
    """Returns a copy of an array as a tf.Tensor of a dtype that has all its numbers.

    Of small arrays and other dtypes, returns the array itself. Each element is moved once, from
    where the array has it, such as a file, to the memory that a variable keeps: several threads
    take a piece each, which they convert and transpose in their caches. TensorFlow would copy an
    array twice, and each conversion once more.
    """
    if not isinstance(array, np.ndarray) or array.nbytes < _LARGE:
        return array
    source_dtype = _FLOATS.get(array.dtype)
    if source_dtype is None or (source_dtype != dtype and (source_dtype, dtype) not in _WIDENED):
        return array
    room = np.empty(array.size * dtype.size + _ALIGNED, np.uint8)
    begin = -room.ctypes.data % _ALIGNED
    # As whole numbers of so many bits: NumPy keeps its lock while it copies a bfloat16.
    buffer = room[begin : begin + array.size * dtype.size].view(f"u{dtype.size}")
    if source_dtype == dtype:
        _fill(buffer, array.view(buffer.dtype), np.copyto)
    elif (source_dtype, dtype) == (tf.bfloat16, tf.float32):
        _fill(buffer, array.view(np.uint16), _widen)
    else:
        _fill(buffer.view(dtype.as_numpy_dtype), array, np.copyto)
    shared = tf2.experimental.dlpack.from_dlpack(buffer.reshape(array.shape).__dlpack__())
    return tf.bitcast(shared, dtype)


def _widen(to: np.ndarray, bfloats: np.ndarray) -> None:
    """Writes the bits of float32s, of which a bfloat16 is the upper half."""
    # Two steps in a cache: one that shifts and widens goes through a buffer of NumPy, and takes
    # twice as long.
    np.copyto(to, bfloats)
    np.left_shift(to, np.uint32(16), out=to)


def _fill(
    made: np.ndarray, array: np.ndarray, convert: Callable[[np.ndarray, np.ndarray], None]
) -> None:
    """Converts the elements of an array into memory, in their order, by several threads."""
    sizes, strides = _joined(array)
    to, source = made.reshape(sizes), array.reshape(sizes)
    nearest, last = int(np.argmin(strides)), len(sizes) - 1
    if nearest == last or sizes[nearest] * sizes[last] < _ROWS:
        jobs = _straight(to, source, convert)
    else:
        ends = [nearest, last], [-2, -1]
        jobs = _transposed(np.moveaxis(to, *ends), np.moveaxis(source, *ends), convert)
    with ThreadPoolExecutor(cores()) as threads:
        list(threads.map(lambda job: job(), jobs))


def _joined(array: np.ndarray) -> tuple[list[int], list[int]]:
    """Returns sizes and strides of an array, with axes joined that lie like one."""
    sizes, strides = [1], [0]
    for size, stride in zip(array.shape, array.strides):
        if size == 1:
            continue
        if sizes == [1] or strides[-1] == size * stride:
            sizes[-1], strides[-1] = sizes[-1] * size, stride
        else:
            sizes.append(size)
            strides.append(stride)
    return sizes, strides


def _straight(
    to: np.ndarray, source: np.ndarray, convert: Callable[[np.ndarray, np.ndarray], None]
) -> Iterator[Callable[[], None]]:
    """Yields what converts a piece each, cut along the longest axis."""
    axis = int(np.argmax(to.shape))
    step = max(1, _PIECE // (to.size // to.shape[axis]))
    to, source = np.moveaxis(to, axis, 0), np.moveaxis(source, axis, 0)
    for i in range(0, len(to), step):
        yield functools.partial(convert, to[i : i + step], source[i : i + step])


def _transposed(
    to: np.ndarray, source: np.ndarray, convert: Callable[[np.ndarray, np.ndarray], None]
) -> Iterator[Callable[[], None]]:
    """Yields what transposes some columns each of the two last axes."""
    rows, columns = to.shape[-2:]
    step = min(columns, max(_ROWS, _PIECE // rows))
    height = max(1, _PIECE // step)

    mine = threading.local()  # memory that is asked for anew would be cleared each time

    def turn(to: np.ndarray, source: np.ndarray) -> None:
        if not hasattr(mine, "room"):
            mine.room = np.empty((step, height + _BESIDE), to.dtype)
        room = mine.room
        for i in range(0, rows, height):
            near, far = source[i : i + height], to[i : i + height]
            # First in the order of the source, then in that of `to`: both are read or written in
            # whole lines of the cache.
            piece = room[: near.shape[1], : near.shape[0]].T
            convert(piece, near)
            np.copyto(far, piece)

    for index in np.ndindex(*to.shape[:-2]):
        for i in range(0, columns, step):
            part = (*index, slice(None), slice(i, i + step))
            yield functools.partial(turn, to[part], source[part])
