"""Random values that do not depend on how a tensor is split.

An element's bits are a hash of its index in the whole tensor and of a key. So a random tensor has
the same value under every mesh and layout, and each processor generates only its own slice. The
hash is a keyed form of "triple32", an integer hash with very low bias
(https://nullprogram.com/blog/2018/07/31/); counter-based generation follows Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

The key comes from one stateful TensorFlow operation, seeded like those of TensorFlow: a new key at
each execution, and the same sequence of keys in each run of a seeded program. XLA ignores the seeds
of such operations: in what it compiles, the key that the operation would draw is computed from the
number of calls (`Calls`). Within `keys_by_step` it is a function of the step instead, so that
training that is resumed continues with the keys of the current step.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import inspect
import math
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Optional, Union

import numpy as np
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from tensorflow.python.eager import context

from mesh_tensorflow._calls import requires, within
from mesh_tensorflow._core.errors import WrongTypeError, is_real
from mesh_tensorflow._mesh.slice_functions import static_arange

Number = Union[float, tf.Tensor]

# Elementwise kernels compute whole vectors, then the remainder one by one, and these differ in the
# last bit for functions such as log. Padding to a multiple of this leaves no remainder.
_VECTOR = 64
_DEFAULT_SEED = 87654321  # TensorFlow's graph seed for an operation seed without one

_step: contextvars.ContextVar[Optional[tf.Tensor]] = contextvars.ContextVar("step", default=None)


def keys_by_step(step: tf.Tensor) -> contextlib.AbstractContextManager[None]:
    """Makes seeded keys created within depend on the step alone, not on earlier executions.

    Args:
      step: an integer tf scalar, which changes whenever new random values are needed.
    """
    return within(_step, step)


def program_seed() -> Optional[int]:
    """Returns the seed of tf.set_random_seed or tf.random.set_seed; None if not set."""
    if not tf.executing_eagerly():
        return tf.get_default_graph().seed
    # TensorFlow has no function that tells the seed of eager code, but it makes such pairs with it.
    seed = tf.get_seed(0)[0]
    return None if seed == _DEFAULT_SEED else seed


def key_is_of_step(seed: Optional[int]) -> bool:
    """Returns whether a new key would be a function of the step."""
    return seed is not None and _step.get() is not None


class Calls:
    """Numbers the calls of a function that is traced once and compiled by XLA.

    Seeded keys are those that calls of the function would draw without XLA: tf.random.set_seed
    begins them anew.
    """

    _all: ClassVar[weakref.WeakSet[Calls]] = weakref.WeakSet()
    _seeded: ClassVar[object] = None

    def __init__(self) -> None:
        """Creates a Calls; there is no variable until a key is asked for."""
        self.variable: Optional[tf.Variable] = None

    @classmethod
    def begin_anew_if_seeded(cls) -> None:
        """Counts from 0 in all functions if the program has been seeded since this was called."""
        # tf.random.set_seed makes another of these, as it forgets the states of operations.
        seeded = getattr(context.context(), "_rng", None)
        if seeded is not cls._seeded:
            cls._seeded = seeded
            for calls in list(cls._all):
                if calls.variable is not None:
                    calls.variable.assign(0)

    def key(self, seeds: tuple[int, int]) -> tf.Tensor:
        """Returns the key that an operation of these seeds would draw in the current call."""
        key = tf.constant([seeds[0]], tf.uint64)
        if self.variable is None:
            # Outside of the trace, which it outlives, and where XLA computes.
            with tf.init_scope(), tf.device(key.device), tf.name_scope(None):
                self.begin_anew_if_seeded()
                self.variable = tf2.Variable(
                    0,
                    dtype=tf.int64,  # as on a GPU int32 is for its host
                    trainable=False,
                    name="calls",
                    experimental_enable_variable_lifting=False,  # a function would trace twice
                )
            self._all.add(self)
        # The operation goes ahead by 256 for each number that it has drawn.
        drawn = tf.cast(self.variable.read_value(), tf.uint64) * (256 * _WORDS)
        bits = tf.raw_ops.StatelessRandomUniformIntV2(
            shape=[_WORDS],
            key=key,
            counter=tf.stack([drawn, tf.constant(seeds[1], tf.uint64)]),
            alg=tf2.random.Algorithm.PHILOX.value,
            minval=tf.constant(_LEAST, tf.int32),
            maxval=tf.constant(_MOST, tf.int32),
        )
        return tf.bitcast(bits, tf.uint32)

    def end(self) -> None:
        """Counts the call, after all of its keys."""
        if self.variable is not None:
            self.variable.assign_add(1, read_value=False)


_calls: contextvars.ContextVar[Optional[Calls]] = contextvars.ContextVar("calls", default=None)


def keys_by_call(calls: Calls) -> contextlib.AbstractContextManager[None]:
    """Makes seeded keys created within depend on the number of the call.

    Args:
      calls: the Calls of what is traced within.
    """
    return within(_calls, calls)


_WORDS = 4  # of a key
# All of int32 but its largest number, since the upper end is exclusive.
_LEAST, _MOST = -(2**31), 2**31 - 1


def new_key(seed: Optional[int] = None) -> tf.Tensor:
    """Returns a uint32 [4] key, which changes with each execution, or with each step.

    Args:
      seed: the seed of the random operation; None if neither it nor the program has one.
    """
    if seed is None:
        return _drawn_key((0, 0))  # TensorFlow chooses seeds
    graph_seed = program_seed()
    seeds = (_DEFAULT_SEED if graph_seed is None else graph_seed, seed)
    step, calls = _step.get(), _calls.get()
    if step is not None:
        # The two seeds are the key here, of which fold_key uses two words.
        return fold_key(tf.stack([_u32(part) for part in seeds]), step)
    seeds = (seeds[0] % 2**31, seeds[1] % 2**31)
    if seeds == (0, 0):
        seeds = (0, 2**31 - 1)  # as tf.get_seed has it, since two zeros are no seeds
    if calls is None:
        return _drawn_key(seeds)
    if tf.executing_eagerly_outside_functions():
        return calls.key(seeds)
    with tf.init_scope():  # by the session that the function is part of
        return _drawn_key(seeds)


def _drawn_key(seeds: tuple[int, int]) -> tf.Tensor:
    bits = tf.raw_ops.RandomUniformInt(
        shape=[_WORDS],
        minval=tf.constant(_LEAST, tf.int32),
        maxval=tf.constant(_MOST, tf.int32),
        seed=seeds[0],
        seed2=seeds[1],
    )
    return tf.bitcast(bits, tf.uint32)


def key_of(seed: tf.Tensor, number: int) -> tf.Tensor:
    """Returns the uint32 [4] key of an integer tf scalar as seed, the same in each execution.

    Args:
      seed: an integer tf scalar.
      number: that of a random operation, each of which has a key of its own.
    """
    seed = tf.cast(seed, tf.int64)
    key = tf.stack([_u32(_DEFAULT_SEED), _u32(number)])
    # A key is folded by 30 bits, as an index has four numbers of 32.
    for bits in (tf.bitwise.bitwise_and(seed, 2**30 - 1), tf.bitwise.right_shift(seed, 30)):
        key = fold_key(key, bits)
    return key


def _u32(value: int) -> tf.Tensor:
    return tf.constant(value & 0xFFFFFFFF, tf.uint32)


def _xorshift(x: tf.Tensor, by: int) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, _u32(by)))


def hash_bits(index: tf.Tensor, key0: tf.Tensor, key1: tf.Tensor) -> tf.Tensor:
    """Returns uniform uint32 bits for a uint32 index under a key of two uint32 scalars."""
    x = tf.bitwise.bitwise_xor(index, key0)
    x = _xorshift(x, 17) * _u32(0xED5AD4BB)
    # Between two rounds: with key0 alone, another key would permute the numbers of the first.
    x = _xorshift(x, 11) * _u32(0xAC4C1B51) + key1
    x = _xorshift(x, 15) * _u32(0x31848BAB)
    return _xorshift(x, 14)


def fold_key(key: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """Returns a different key for each index, such as the iteration of a loop."""
    # key'[j] = hash(4 * index + j): no two indices have a counter in common.
    streams = tf.constant([0, 1, 2, 3], tf.uint32) + tf.cast(index, tf.uint32) * _u32(4)
    return hash_bits(streams, key[0], key[1])


def _element_index(
    sizes: Sequence[int], begin: Sequence[Union[int, tf.Tensor]], slice_sizes: Sequence[int]
) -> tf.Tensor:
    """Returns the flat uint32 index, in the whole tensor, of each element of a slice."""
    # Adjacent axes are merged if the inner one is not split.
    axes: list[list] = []
    stride = 1
    for size, start, length in zip(reversed(sizes), reversed(begin), reversed(slice_sizes)):
        contiguous = axes and axes[-1][3]
        if contiguous:
            _, inner, inner_stride, _ = axes[-1]
            # (start + i) * inner + j, for j below inner, is one range with the inner stride.
            axes[-1] = [start * inner, length * inner, inner_stride, length == size]
        else:
            axes.append([start, length, stride, length == size])
        stride *= size
    # index = sum over axes of (start + i) * stride, modulo 2**32.
    index: Any = None
    for start, length, axis_stride, _ in axes:  # innermost first
        part = _axis_index(start, length, axis_stride)
        index = part if index is None else tf.reshape(part[:, None] + index[None, :], [-1])
    return tf.zeros([1], tf.uint32) if index is None else index


def _axis_index(start: Union[int, tf.Tensor], length: int, stride: int) -> tf.Tensor:
    if isinstance(start, int) and length <= 256:
        return tf.constant(static_arange(start, length, stride))
    # Computed in the step: as a constant, a large slice's indices would fill the graph.
    offset = tf.bitcast(tf.range(length, dtype=tf.int32), tf.uint32)
    start = _u32(start) if isinstance(start, int) else tf.cast(start, tf.uint32)
    index = offset + start
    return index if stride == 1 else index * _u32(stride)


def _unit_float(bits: tf.Tensor, dtype: tf.DType, precision: int) -> tf.Tensor:
    """Returns the top `precision` bits as an exact multiple of 2**-precision in [0, 1)."""
    # At most 24 bits are left, which int32 has without a sign and float32 without rounding.
    top = tf.bitcast(tf.bitwise.right_shift(bits, _u32(32 - precision)), tf.int32)
    return tf.cast(tf.cast(top, tf.float32) * np.float32(2.0**-precision), dtype)


# Bits of the significand with the implied one: multiples of 2**-bits below 1 are exact.
_PRECISION = {tf.float32: 24, tf.bfloat16: 8, tf.float16: 11}


def _uniform(
    bits_fn: Callable[[int], tf.Tensor], dtype: tf.DType, minval: Number, maxval: Optional[Number]
) -> tf.Tensor:
    if dtype.is_integer:
        return _uniform_int(bits_fn, dtype, minval, maxval)
    if dtype == tf.float64:
        # The 53 bits of float64: 26 of one stream and 27 of the other.
        high = tf.cast(tf.bitcast(tf.bitwise.right_shift(bits_fn(0), _u32(6)), tf.int32), dtype)
        low = tf.cast(tf.bitcast(tf.bitwise.right_shift(bits_fn(1), _u32(5)), tf.int32), dtype)
        unit = high * 2.0**-26 + low * 2.0**-53
    else:
        unit = _unit_float(bits_fn(0), dtype, _PRECISION[dtype])
    maxval = 1 if maxval is None else maxval
    if isinstance(minval, (int, float)) and isinstance(maxval, (int, float)):
        # Exact multiples below 1: without a product and a sum, none is rounded up to the end.
        if minval == 0 and maxval == 1:
            return unit
        scale: Any = tf.cast(maxval - minval, dtype)
    else:
        scale = tf.cast(maxval, dtype) - tf.cast(minval, dtype)
    low, high = tf.cast(minval, dtype), tf.cast(maxval, dtype)
    value = unit * scale + low
    # The sum may round up to the end, which is no part of the range; the beginning is next to it as
    # on a circle, and values stay evenly spread.
    return tf.where_v2(tf.logical_and(value >= high, low < high), low, value)


def _uniform_int(bits_fn: Callable, dtype: tf.DType, minval: Number, maxval: Number) -> tf.Tensor:
    static = not tf.is_tensor(minval) and not tf.is_tensor(maxval)
    if static and int(maxval) - int(minval) >= 2**63:
        return _uniform_wide(bits_fn, dtype, minval, maxval)
    wide = tf.cast(tf.cast(bits_fn(0), tf.uint64), tf.int64)
    if dtype.size > 4:
        # 32 bits and 31 more are below 2**63, so that there is no sign.
        wide = wide * 2**31 + tf.cast(tf.bitwise.right_shift(bits_fn(1), _u32(1)), tf.int64)
        wide = tf.bitwise.bitwise_and(wide, tf.constant(2**63 - 1, tf.int64))
    low, high = tf.cast(minval, tf.int64), tf.cast(maxval, tf.int64)
    # The remainder favors low values, by less than (high - low) / 2**32.
    value = tf.cast(wide % (high - low) + low, dtype)
    if static or dtype.size <= 4:
        return value
    # Of tensors, it is known only when the program runs: such a width is negative in int64.
    return tf.where_v2(high - low < 0, _uniform_wide(bits_fn, dtype, minval, maxval), value)


def _uniform_wide(bits_fn: Callable, dtype: tf.DType, minval: Number, maxval: Number) -> tf.Tensor:
    """Returns integers of a range whose width int64 has not: its remainders would be negative."""
    # Modulo 2**64, sums are right.
    low, high = (
        tf.bitcast(tf.cast(x, dtype), tf.uint64)
        if tf.is_tensor(x)
        else tf.constant(int(x) % 2**64, tf.uint64)
        for x in (minval, maxval)
    )
    high_bits, low_bits = (tf.cast(bits_fn(i), tf.uint64) for i in (0, 1))
    return tf.bitcast((high_bits * np.uint64(2**32) + low_bits) % (high - low) + low, dtype)


def _normal(bits_fn: Callable, dtype: tf.DType, mean: Number, stddev: Number) -> tf.Tensor:
    # Box and Muller (1958): z = sqrt(-2 log(u1)) cos(2 pi u2); u1 is in (0, 1], without log(0).
    compute = tf.float64 if dtype == tf.float64 else tf.float32
    radius = _unit_float(bits_fn(0), compute, 24) + tf.constant(2.0**-24, compute)
    angle = _unit_float(bits_fn(1), compute, 24) * (2 * math.pi)
    z = tf.sqrt(-2.0 * tf.log(radius)) * tf.cos(angle)
    return tf.cast(z, dtype) * tf.cast(stddev, dtype) + tf.cast(mean, dtype)


def _truncated_normal(
    bits_fn: Callable, dtype: tf.DType, mean: Number, stddev: Number
) -> tf.Tensor:
    # Inverse transform of uniform numbers between the quantiles of -2 and 2.
    compute = tf.float64 if dtype == tf.float64 else tf.float32
    # The middles of the 2**24 intervals, which lie symmetrically about 1/2.
    half = _unit_float(bits_fn(0), compute, 24) + tf.constant(2.0**-25, compute)
    # P(|Z| < 2) = erf(sqrt(2)), and the quantile of p is sqrt(2) erfinv(2 p - 1).
    z = math.sqrt(2.0) * tf.math.erfinv((2.0 * half - 1.0) * math.erf(math.sqrt(2.0)))
    return tf.cast(z, dtype) * tf.cast(stddev, dtype) + tf.cast(mean, dtype)


def keep_mask(
    shape: Sequence[int],
    keep_prob: Number,
    dtype: tf.DType = tf.float32,
    seed: Optional[int] = None,
) -> tf.Tensor:
    """Returns a whole dropout mask: 1 / keep_prob with probability keep_prob, else 0.

    Args:
      shape: sizes.
      keep_prob: a number or a tf scalar.
      dtype: a floating dtype.
      seed: a seed, or None.
    """
    bits = tf.bitcast(
        tf.random.uniform(shape, -(2**31), 2**31 - 1, dtype=tf.int32, seed=seed), tf.uint32
    )
    return keep_where(bits, dtype, keep_prob)


def _keep_mask(bits_fn: Callable, dtype: tf.DType, keep_prob: Number) -> tf.Tensor:
    return keep_where(bits_fn(0), dtype, keep_prob)


def keep_where(bits: tf.Tensor, dtype: tf.DType, keep_prob: Number) -> tf.Tensor:
    """Returns 1 / keep_prob where uniform uint32 bits are among those to keep, else 0."""
    if tf.is_tensor(keep_prob):
        # P(bits < threshold) = threshold / 2**32; uint32 lacks 2**32, that of keep_prob 1.
        wide = tf.cast(keep_prob, tf.float64)
        threshold = tf.cast(tf.cast(tf.minimum(wide * 2.0**32, 2.0**32 - 1), tf.int64), tf.uint32)
        # Else 1 in 2**32 elements would be dropped where a schedule ends at a keep_prob of 1.
        keep = tf.logical_or(bits < threshold, keep_prob >= 1.0)
    else:
        keep = bits < _u32(min(round(keep_prob * 2**32), 2**32 - 1))
    return tf.cast(keep, dtype) * tf.cast(1.0 / keep_prob, dtype)


# By the id of a function: its values, and what its parameters are if they are not given.
_DISTRIBUTIONS: dict[int, tuple[Callable, dict[str, Any]]] = {
    id(tf.random.uniform): (_uniform, {"minval": 0, "maxval": None}),
    id(tf.random.normal): (_normal, {"mean": 0.0, "stddev": 1.0}),
    id(tf.random.truncated_normal): (_truncated_normal, {"mean": 0.0, "stddev": 1.0}),
    id(keep_mask): (_keep_mask, {"keep_prob": 1.0}),
}
# Without functions whose vector form may differ in the last bit.
_EXACT = (_uniform, _keep_mask)


def is_known(tf_fn: Callable) -> bool:
    """Returns whether `random_slice` supports `tf_fn`."""
    return id(tf_fn) in _DISTRIBUTIONS


def check_arguments(tf_fn: Callable, kwargs: Mapping[str, Any]) -> None:
    """Checks the keyword arguments of a function that `random_slice` supports.

    Raises:
      WrongTypeError: there are no such values of the dtype, or a parameter is no number.
      ValueError: there is an argument that it does not take, or the range of integers has no end,
        is empty, or is wider than the dtype.
    """
    name, parameters = tf_fn.__name__, _DISTRIBUTIONS[id(tf_fn)][1]
    unknown = set(kwargs) - {"dtype", "seed", "name", *parameters}
    if unknown:
        raise ValueError(
            f"{name} does not take {', '.join(sorted(unknown))}; it takes dtype, seed, "
            f"{', '.join(parameters)}"
        )
    for key in set(parameters) & set(kwargs):
        _check_parameter(name, key, kwargs[key], may_lack=parameters[key] is None)
    dtype = tf.as_dtype(kwargs.get("dtype", tf.float32))
    if tf_fn is tf.random.uniform and dtype.is_integer:
        _check_integers(dtype, kwargs.get("minval", 0), kwargs.get("maxval"))
    elif tf_fn is not keep_mask and dtype not in (tf.float64, *_PRECISION):
        raise WrongTypeError(
            f"{name}: there are no values of dtype {dtype.name}. Random integers are "
            "mtf.random_uniform(..., minval=a, maxval=b, dtype=tf.int32), and random booleans "
            "mtf.less(mtf.random_uniform(...), 0.5)"
        )


def _check_parameter(name: str, key: str, value: Any, may_lack: bool) -> None:
    """Checks that a parameter of a distribution is one number, for all slices alike."""
    if tf.is_tensor(value):
        is_number = value.shape.rank in (None, 0)
    elif value is None:
        is_number = may_lack
    else:
        # Of NumPy's numbers, those of 16 bits and arrays of no dimension are no numbers of Python.
        of_numpy = isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0
        is_number = is_real(value) or (of_numpy and tf.as_dtype(value.dtype).is_floating)
    if not is_number:
        raise WrongTypeError(
            f"{name}: {key} is a number or a tf scalar, not {value!r}. What differs from element "
            "to element is a mtf.Tensor that the random values are multiplied by, or added to"
        )


def _check_integers(dtype: tf.DType, minval: Any, maxval: Any) -> None:
    """Checks the range of random integers, as far as it is known before the program runs."""
    if maxval is None:
        raise ValueError(f"random_uniform of {dtype.name} needs maxval: pass maxval=n for 0 .. n-1")
    if tf.is_tensor(minval) or tf.is_tensor(maxval):
        return
    # The end is no part of the range; that of 64 bits is computed with, and has to be one of them.
    least, most = int(dtype.min), int(dtype.max) + (dtype.size < 8)
    integral = float(minval).is_integer() and float(maxval).is_integer()
    if not (integral and least <= minval < maxval <= most):
        raise ValueError(
            f"random_uniform of {dtype.name}: there are no integers from minval={minval} to below "
            f"maxval={maxval}; give whole numbers, minval < maxval, from {least} to {most}"
        )


def random_slice(
    key: tf.Tensor,
    sizes: Sequence[int],
    begin: Sequence[Union[int, tf.Tensor]],
    slice_sizes: Sequence[int],
    tf_fn: Callable,
    kwargs: Mapping[str, Any],
) -> tf.Tensor:
    """Returns one slice of a random tensor.

    Args:
      key: from `new_key`.
      sizes: sizes of the whole tensor.
      begin: where the slice begins along each axis; ints or integer tf scalars.
      slice_sizes: sizes of the slice.
      tf_fn: tf.random.uniform, tf.random.normal or tf.random.truncated_normal.
      kwargs: its keyword arguments: dtype and the parameters of the distribution.

    Raises:
      ValueError: arguments are wrong; see `check_arguments`.
    """
    # Of an operation of the user's own; `RandomOperation` asks where it is made.
    check_arguments(tf_fn, kwargs)
    generator, parameters = _DISTRIBUTIONS[id(tf_fn)]
    dtype = tf.as_dtype(kwargs.get("dtype", tf.float32))
    count = int(np.prod(slice_sizes, dtype=np.int64))
    index = _element_index(sizes, begin, slice_sizes)
    # A value must not depend on the size of the slice it is in, not even in its last bit.
    padding = 0 if generator in _EXACT else -count % _VECTOR
    if padding:
        index = tf.concat([index, tf.zeros([padding], tf.uint32)], 0)
    key_parts = tf.unstack(key)

    def bits_fn(stream: int) -> tf.Tensor:
        # Each of the two streams has two words of the key, and so bits of its own for one element.
        return hash_bits(index, key_parts[2 * stream], key_parts[2 * stream + 1])

    values = generator(bits_fn, dtype, *(kwargs.get(p, d) for p, d in parameters.items()))
    if padding:
        values = values[:count]
    return tf.reshape(values, slice_sizes)


# -- initial values of variables, by the seed of the program and their names


def seeded_initializer(
    initializer: Optional[Callable[..., Any]], name: str, dtype: tf.DType = tf.float32
) -> Any:
    """Returns an initializer whose values depend only on the program's seed and on `name`.

    The initializer is unchanged if the program has no seed, or if the initializer has one.

    Args:
      initializer: a TensorFlow initializer; TensorFlow's default for the dtype if None.
      name: the full name of the variable.
      dtype: the dtype of the variable; the default for dtypes that are not floating is zeros.

    Returns:
      A TensorFlow initializer, or None for TensorFlow's default.
    """
    if initializer is None and not dtype.is_floating:
        return None
    if program_seed() is None:
        return initializer
    if initializer is None:
        initializer = tf.glorot_uniform_initializer()
    if isinstance(initializer, type):
        initializer = initializer()
    # By name and not by order, so that a variable starts alike if others are added before it. Not
    # Python's hash, which differs from process to process.
    number = zlib.crc32(name.encode()) % 2**31
    if draws_its_seed(initializer):
        seeded: Any = copy.copy(initializer)
        seeded.seed = zlib.crc32(f"{program_seed()}/{number}".encode()) % 2**31
        return seeded
    if getattr(initializer, "seed", 0) is None:
        # TensorFlow's own join this with the program's seed. A copy, as one initializer may be that
        # of several variables.
        seeded = copy.copy(initializer)
        seeded.seed = number
        return seeded
    return initializer


def draws_its_seed(initializer: object) -> bool:
    """Returns whether an initializer drew a seed when it was made, as Keras' do without a seed.

    It makes equal values in each call; what it is compared by, and copied for, is not this seed.

    Args:
      initializer: an initializer, or any other object.
    """
    return getattr(initializer, "_init_seed", 0) is None


def initial_value(
    initializer: Optional[Callable[..., Any]], name: str, sizes: Sequence[int], dtype: tf.DType
) -> tf.Tensor:
    """Returns the initial value of a variable, as tf.get_variable computes it.

    Args:
      initializer: a TensorFlow initializer; TensorFlow's default for the dtype if None.
      name: the full name of the variable.
      sizes: the shape of the variable.
      dtype: the dtype of the variable.

    Returns:
      A tf.Tensor of the shape and dtype of the variable.

    Raises:
      ValueError: the initializer returns a value of another shape or dtype.
    """
    if initializer is None and not dtype.is_floating:
        initializer = tf.zeros_initializer()
    initializer = seeded_initializer(initializer, name) or tf.glorot_uniform_initializer()
    if isinstance(initializer, type):
        initializer = initializer()
    # Functions written for TensorFlow 1 may require this argument, others do not know it.
    old = inspect.isfunction(initializer) and requires(initializer, "partition_info")
    further = {"partition_info": None} if old else {}
    return checked_value(initializer(list(sizes), dtype=dtype, **further), name, sizes, dtype)


def checked_value(
    value: Union[tf.Tensor, np.ndarray, None], name: str, sizes: Sequence[int], dtype: tf.DType
) -> tf.Tensor:
    """Converts the result of an initializer to a tf.Tensor and checks its shape and dtype.

    Args:
      value: an array or a tf.Tensor.
      name: the full name of the variable.
      sizes: the shape of the variable.
      dtype: the dtype of the variable.

    Returns:
      A tf.Tensor of the shape and dtype of the variable.

    Raises:
      ValueError: `value` is None, or has another shape or dtype.
    """
    if value is not None and not tf.is_tensor(value):
        value = tf.convert_to_tensor(value, dtype)
    if value is None or value.shape != tf.TensorShape(sizes) or value.dtype != dtype:
        got = "None" if value is None else f"{value.dtype.name} {value.shape}"
        raise ValueError(
            f"the initializer of variable {name!r} returned {got}; it must return the shape and "
            f"dtype that it is called with, {dtype.name} {tf.TensorShape(sizes)}"
        )
    return value
