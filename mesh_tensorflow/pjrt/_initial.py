"""Initial values of parts of a variable, without the whole.

TensorFlow's random operations fill a tensor with the blocks of a counter-based generator, Philox.
Its stateless operations take the counter, so that they give any part of what the others give. An
initializer is run in a graph, and its operations are carried out on the elements of a part: one
random operation, constants, and what is elementwise. Other initializers give whole values.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Optional

import numpy as np
import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.random_values import program_seed
from mesh_tensorflow._mesh.variables.storage import initial_value

if TYPE_CHECKING:
    from mesh_tensorflow.ops._variables.variable import Variable

__all__ = ["part_function"]

_MOST_ELEMENTS = 2**22  # that are made at once
_BLOCK = 4  # elements of float32 for each value of the counter


def _stateless(operation: Callable[..., tf.Tensor], steps: int) -> Callable[..., tf.Tensor]:
    """Returns a function of seeds and a range of elements; `steps` is what a block counts for."""

    def values(seed: int, seed2: int, begin: int, count: int) -> tf.Tensor:
        block, before = divmod(begin, _BLOCK)
        made = operation(
            shape=[before + count],
            key=tf.constant([seed % 2**64], tf.uint64),
            counter=tf.constant([block * steps, seed2 % 2**64], tf.uint64),
            alg=1,  # Philox
            dtype=tf.float32,
        )
        return made[before:]

    return values


_raw = tf2.raw_ops
_RANDOM = {
    "RandomUniform": _stateless(_raw.StatelessRandomUniformV2, 1),
    "RandomStandardNormal": _stateless(_raw.StatelessRandomNormalV2, 1),
    "TruncatedNormal": _stateless(_raw.StatelessTruncatedNormalV2, 256),
}
_ELEMENTWISE: dict[str, Callable[..., tf.Tensor]] = {
    "Add": tf.add,
    "AddV2": tf.add,
    "Identity": tf.identity,
    "Mul": tf.multiply,
    "Neg": tf.negative,
    "RealDiv": tf.realdiv,
    "Sub": tf.subtract,
}


@dataclasses.dataclass(frozen=True)
class _Flat:
    """A tensor of a graph whose elements can be computed a range at a time.

    Attributes:
      tensor: the tensor.
      seeds: those that an operation without seeds has been given.
      constants: the values of constants that have been needed, by name.
    """

    tensor: tf.Tensor
    seeds: tuple[int, int]
    constants: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def is_known(self, sizes: Sequence[int]) -> bool:
        """Returns whether all operations are known, and at most one is random."""
        found = list(_operations(self.tensor))
        random = [op for op in found if op.type in _RANDOM]
        shapes = [x.shape.as_list() for op in found for x in op.outputs]
        return (
            len(random) <= 1
            and all(op.outputs[0].dtype == tf.float32 for op in random)
            and all(op.type in {*_RANDOM, *_ELEMENTWISE, "Cast", "Const", "Fill"} for op in found)
            and all(shape in ([], list(sizes)) for shape in shapes)
        )

    def values(self, begin: int, count: int) -> np.ndarray:
        """Returns a range of the elements in row-major order, or one value for all of them."""
        if self.tensor.op.type == "Const":
            return self._constant(self.tensor.op, begin, count)
        return self._value(self.tensor, begin, count).numpy()

    def _constant(self, op: tf.Operation, begin: int, count: int) -> np.ndarray:
        if op.name not in self.constants:
            self.constants[op.name] = tf.make_ndarray(op.get_attr("value"))
        array = self.constants[op.name]
        return array if array.ndim == 0 else array.reshape(-1)[begin : begin + count]

    def _value(self, x: tf.Tensor, begin: int, count: int) -> tf.Tensor:
        op = x.op
        if op.type == "Const":
            return tf.constant(self._constant(op, begin, count), x.dtype)
        if op.type in _RANDOM:
            seeds = op.get_attr("seed"), op.get_attr("seed2")
            return _RANDOM[op.type](*(seeds if any(seeds) else self.seeds), begin, count)
        if op.type == "Fill":
            return self._value(op.inputs[1], begin, count)
        inputs = [self._value(y, begin, count) for y in op.inputs]
        return tf.cast(*inputs, x.dtype) if op.type == "Cast" else _ELEMENTWISE[op.type](*inputs)


def _operations(x: tf.Tensor) -> Iterator[tf.Operation]:
    """Yields the operations that a tensor is computed from; not the sizes of random tensors."""
    yield x.op
    if x.op.type not in _RANDOM:
        for y in x.op.inputs[1:] if x.op.type == "Fill" else x.op.inputs:
            yield from _operations(y)


def part_function(variable: Variable) -> Callable[[tuple[slice, ...]], np.ndarray]:
    """Returns a function that returns a part of a variable's initial value, of its slice dtype.

    Args:
      variable: a Variable.
    """
    sizes, seed = variable.shape.to_integer_list, program_seed()

    def first() -> tf.Tensor:
        value = initial_value(variable.initializer, variable.name, sizes, variable.master_dtype)
        return tf.cast(value, variable.slice_dtype)

    with tf.Graph().as_default():
        if seed is not None:
            tf.set_random_seed(seed)
        drawn = np.random.SeedSequence().generate_state(2)
        flat = _Flat(first(), (int(drawn[0]), int(drawn[1])))
        known = flat.is_known(sizes)
    # An initializer of the user's own: the whole value is made in each process, which then cuts it.
    if not known:
        whole = first().numpy()
        return lambda index: whole[index]
    cached: list[Any] = [None, None]  # copies of a part follow each other

    def part(index: tuple[slice, ...]) -> np.ndarray:
        ranges = tuple(s.indices(size)[:2] for s, size in zip(index, sizes))
        if cached[0] != ranges:
            cached[:] = ranges, _part(flat, sizes, ranges, variable.slice_dtype.as_numpy_dtype)
        return cached[1]

    return part


def _part(
    flat: _Flat, sizes: Sequence[int], ranges: Sequence[tuple[int, int]], dtype: Any
) -> np.ndarray:
    """Returns the elements in a range along each dimension, made in pieces of rows."""
    below = [int(np.prod(sizes[axis + 1 :], dtype=np.int64)) for axis in range(len(sizes))]
    axis: Optional[int] = next((a for a, n in enumerate(below) if n <= _MOST_ELEMENTS), None)
    if axis is None:  # a scalar
        return np.asarray(flat.values(0, 1), dtype).reshape([])
    result = np.empty([stop - start for start, stop in ranges], dtype)
    # Elements of whole rows are consecutive in the generator's order; the columns of the part are
    # cut out of them afterwards.
    rows = max(1, _MOST_ELEMENTS // max(1, below[axis]))
    cut = tuple(slice(*r) for r in ranges[axis + 1 :])
    (start, stop), row_sizes = ranges[axis], list(sizes[axis + 1 :])
    for outer in itertools.product(*(range(*r) for r in ranges[:axis])):
        at = sum(i * n for i, n in zip(outer, below))
        place = tuple(i - r[0] for i, r in zip(outer, ranges))
        for row in range(start, stop, rows):
            n = min(rows, stop - row)
            values = flat.values(at + row * below[axis], n * below[axis])
            whole_rows = np.broadcast_to(values, [n * below[axis]]).reshape([n, *row_sizes])
            own: Any = (*place, slice(row - start, row - start + n))
            part: Any = (slice(None), *cut)
            result[own] = whole_rows[part]
    return result
