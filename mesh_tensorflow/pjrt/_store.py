"""ArrayStore: variables as arrays of JAX, split over devices; their initial values and checkpoints.

TensorFlow's random operations fill a tensor with the blocks of a counter-based generator, Philox.
Its stateless operations take the counter, so that they give any part of what the others give. An
initializer is run in a graph, and its operations are carried out on the elements of a part: one
random operation, constants, and what is elementwise. Other initializers give whole values.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Optional

import jax
import numpy as np
import numpy.typing as npt
import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.layout import slice_coordinates
from mesh_tensorflow._mesh.random_values import initial_value, program_seed
from mesh_tensorflow._mesh.variables.checkpoint_files import (
    Reader,
    Shard,
    are_written,
    join_files,
    reading,
    slice_spec,
    write_parts,
)
from mesh_tensorflow._mesh.variables.given_values import fitting, fitting_part, given_parts
from mesh_tensorflow._mesh.variables.store import Form, Stored, VariableStore, differs
from mesh_tensorflow._quiet import not_advised
from mesh_tensorflow._stop_signals import deferred
from mesh_tensorflow.checkpoint import CheckpointError, Wanted, check_checkpoint
from mesh_tensorflow.pjrt._devices import all_dtypes, check_kept, done_in_all, gathered, placed
from mesh_tensorflow.pjrt._trace import ValueOfVariable, current_trace

if TYPE_CHECKING:
    from mesh_tensorflow._mesh.gspmd import GspmdMeshImpl
    from mesh_tensorflow._mesh.variables.store import DeviceMeshImpl
    from mesh_tensorflow.ops._variable import Variable


# -- initial values

_MOST_ELEMENTS = 2**22  # that are made at once
_BLOCK = 4  # elements of float32 for each value of the counter


def _stateless(operation: Callable[..., tf.Tensor], steps: int) -> Callable[..., tf.Tensor]:
    """Returns a function of seeds and a range of elements; `steps` is what a block counts for."""

    def values(seed: int, seed2: int, begin: int, count: int) -> tf.Tensor:
        # A range may begin within a block, whose first values are left out again.
        block, before = divmod(begin, _BLOCK)
        numbers = operation(
            shape=[before + count],
            # As stateful operations begin: a seed is the key, one the counter's upper half.
            key=tf.constant([seed % 2**64], tf.uint64),
            counter=tf.constant([block * steps, seed2 % 2**64], tf.uint64),
            alg=1,  # Philox
            dtype=tf.float32,
        )
        return numbers[before:]

    return values


_raw = tf2.raw_ops
_RANDOM = {
    "RandomUniform": _stateless(_raw.StatelessRandomUniformV2, 1),
    "RandomStandardNormal": _stateless(_raw.StatelessRandomNormalV2, 1),
    # TensorFlow has 256 values of the counter for each block, whose numbers are drawn again until
    # they are within bounds.
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
        # Each operation has to have one value for all elements, or one for each, so that a range of
        # the result takes no more than the same range of its inputs.
        ops = list(_operations(self.tensor))
        random = [op for op in ops if op.type in _RANDOM]
        shapes = [x.shape.as_list() for op in ops for x in op.outputs]
        return (
            # Two that have no seeds would be given the same ones, and so the same values.
            len(random) <= 1
            # A block of the generator has four values of float32, and two of float64.
            and all(op.outputs[0].dtype == tf.float32 for op in random)
            and all(op.type in {*_RANDOM, *_ELEMENTWISE, "Cast", "Const", "Fill"} for op in ops)
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
            # Two zeros stand for an operation without a seed, as in TensorFlow.
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
    """Returns a function that returns a part of a variable's initial value, of its slice dtype."""
    sizes, seed = variable.shape.to_integer_list, program_seed()

    def first() -> tf.Tensor:
        value = initial_value(variable.initializer, variable.name, sizes, variable.master_dtype)
        return tf.cast(value, variable.slice_dtype)

    with tf.Graph().as_default():
        if seed is not None:
            tf.set_random_seed(seed)
        # For an operation without a seed: parts that are made apart have to be of one draw.
        drawn = np.random.SeedSequence().generate_state(2)
        flat = _Flat(first(), (int(drawn[0]), int(drawn[1])))
        is_held = flat.is_known(sizes)
    # An initializer of the user's own: the whole value is made in each process, which then cuts it.
    if not is_held:
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
    # The first axis whose rows can be made at once; along those before it one goes by index.
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
        # The row-major number of the first element there: the sum of index[a] * below[a].
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


# -- parts in files


def spec_of(sizes: Sequence[int], index: Sequence[slice]) -> str:
    """Returns a part in the notation of checkpoints; "" for the whole.

    Args:
      sizes: the shape of the whole.
      index: the range of the part along each dimension.
    """
    ranges = [s.indices(size)[:2] for s, size in zip(index, sizes)]
    return slice_spec(sizes, [b for b, _ in ranges], [e - b for b, e in ranges])


def parts_to_write(array: jax.Array, name: str, dtype: tf.DType) -> list[Shard]:
    """Returns the parts that this process writes: of copies, one process has the first.

    Args:
      array: a variable.
      name: its name in files.
      dtype: its dtype in files.
    """
    return [
        Shard(
            name,
            spec_of(array.shape, shard.index),
            np.asarray(shard.data).astype(dtype.as_numpy_dtype, copy=False),
        )
        for shard in array.addressable_shards
        # Of copies, JAX numbers one with 0, whichever process has it, so each part is written once.
        if shard.replica_id == 0
    ]


def own_specs(variable: jax.ShapeDtypeStruct) -> list[str]:
    """Returns what `parts_to_write` would write of a variable, whether it has a value or not."""
    # The first device that has a part, whose copy is the one that JAX numbers with 0.
    first: dict[str, Any] = {}
    for device, index in variable.sharding.devices_indices_map(variable.shape).items():
        first.setdefault(spec_of(variable.shape, index), device)
    return [s for s, device in first.items() if device.process_index == jax.process_index()]


def read_array(
    reader: Reader, name: str, dtype: tf.DType, wanted: jax.ShapeDtypeStruct
) -> jax.Array:
    """Returns a variable, of which this process reads the parts that its devices have.

    Args:
      reader: the Reader of a checkpoint.
      name: the name of the variable in the file.
      dtype: its dtype in the file.
      wanted: its shape, its dtype on the devices, and its sharding.

    Raises:
      OSError: it cannot be read.
    """
    read: dict[str, np.ndarray] = {}

    def part(index: Sequence[slice]) -> np.ndarray:
        spec = spec_of(wanted.shape, index)
        # Several devices of a process may have copies of one part.
        if spec not in read:
            read[spec] = reader.read(name, spec, dtype).astype(wanted.dtype, copy=False)
        return read[spec]

    make: Callable[..., jax.Array] = jax.make_array_from_callback
    with all_dtypes():
        return make(wanted.shape, wanted.sharding, part)


# Variables that are to be read from a checkpoint: their dtypes in files, and `wanted` as above.
_Restored = Mapping[str, tuple[tf.DType, jax.ShapeDtypeStruct]]


def check_together(
    path: str, variables: _Restored, tracked: Mapping[str, tf.Variable] = MappingProxyType({})
) -> None:
    """Raises an error in all processes if one of them cannot read its parts of a checkpoint.

    Args:
      path: the path of the checkpoint.
      variables: what it should have, by name.
      tracked: variables of TensorFlow that it may have, by name.

    Raises:
      CheckpointError: there is no such checkpoint, it is damaged, or it lacks variables or has them
        in other shapes.
    """
    expected = {n: Wanted(v.shape, dtype) for n, (dtype, v) in variables.items()}
    specs = {n: own_specs(v) for n, (_, v) in variables.items()}

    def check() -> None:
        check_checkpoint(path, expected, specs)
        check_checkpoint(path, _in_file(path, tracked), read=True)

    if not done_in_all(check):
        raise CheckpointError(
            f"another process cannot read its parts of checkpoint {path}, and says why; no "
            "variable was changed"
        )


def _in_file(path: str, tracked: Mapping[str, tf.Variable]) -> dict[str, tf.Variable]:
    """Returns those variables of TensorFlow that a checkpoint has."""
    names = {name for name, _ in tf.train.list_variables(path)} if tracked else ()
    return {name: v for name, v in tracked.items() if name in names}


def read_arrays(path: str, variables: _Restored) -> Iterator[tuple[str, jax.Array]]:
    """Yields the name and the value of each variable; see `read_array`.

    Args:
      path: the path of a checkpoint.
      variables: the variables, by name.
    """
    with reading(path) as reader:
        for name, (dtype, wanted) in variables.items():
            yield name, read_array(reader, name, dtype, wanted)


# -- the store


def form_of(variable: Variable, mesh_impl: GspmdMeshImpl) -> Form:
    """Returns the form in which a program has a variable."""
    # Of processors with copies of a part, the first one owns it.
    first: dict[tuple[int, ...], int] = {}
    layout = mesh_impl.even_layout(variable.stored_shape)
    owner = [
        first.setdefault(slice_coordinates(layout, mesh_impl.shape, pnum), pnum)
        for pnum in range(mesh_impl.size)
    ]
    return Form(variable.shape, variable.slice_dtype, layout, mesh_impl.shape, owner, {})


class _Shard:
    """One part of a variable, with the methods of a tf.Variable that savers call."""

    def __init__(self, store: ArrayStore, name: str, index: tuple[slice, ...]):
        self._store, self._name, self._index = store, name, index
        self.device, self.dtype = "/cpu:0", store._form(name).dtype

    def read_value(self) -> tf.Tensor:
        """Returns the value of the part."""
        with self._store.lock:
            shards = self._store.array(self._name).addressable_shards
            return tf.constant(next(np.asarray(s.data) for s in shards if s.index == self._index))

    def assign(self, value: Any, read_value: bool = True) -> None:
        """Sets the value of the part, on each device that has it."""
        self._store._assign_part(self._name, self._index, np.asarray(value))


class ArrayStore(VariableStore):
    """Keeps the variables of functions of `mtf.pjrt.function`, as arrays of JAX.

    It has the methods of an `mtf.VariableStore`. `tf.train.Checkpoint(store=store)` and
    `mtf.checkpoint.Saver(store.masters)` save and restore its variables, part by part, in files
    that any layout and mesh implementation can read.

    Attributes:
      lock: is held by each step and each access to a variable. Hold it, by `with store.lock:`, to
        save or read several variables as they are between two steps of other threads.
    """

    def __init__(self, name: Optional[str] = None):
        super().__init__(name=name or "mtf_arrays")
        # Hidden from TensorFlow, which would wrap a dictionary to save what is in it.
        self._arrays = self._no_dependency({})
        # Reentrant, as a step holds it while it makes variables and asks for their arrays.
        self.lock = threading.RLock()
        # What was read before the variables were made, and the names that it has.
        self._checkpoint: Optional[str] = None
        self._names_there: set[str] = set()

    def array(self, name: str) -> jax.Array:
        """Returns a variable as it is on the devices, until the next step that assigns to it.

        Args:
          name: the full name of an mtf variable.

        Raises:
          RuntimeError: a step that was to assign to it was given its memory, and failed.
        """
        self._form(name)
        array = self._arrays[name]
        check_kept(name, array)
        return array

    def declare(self, variable: Variable) -> None:
        """Does nothing: the function that is built gives the variable its value.

        Args:
          variable: the Variable.
        """
        if tf.executing_eagerly():
            current_trace()  # an error: no function is built

    def slices(
        self, variable: Variable, mesh_impl: DeviceMeshImpl, owner: Sequence[int]
    ) -> dict[int, Any]:
        """Returns a Variable within the function that is built; see VariableStore.

        Raises:
          ValueError: the store has the variable with another shape or dtype, or the program is
            lowered with another mesh implementation than that of the function.
        """
        trace = current_trace()
        if getattr(mesh_impl, "requested", mesh_impl) is not trace.mesh_impl:
            raise ValueError(
                f"variable {variable.name!r} is lowered with {mesh_impl!r}, but the function of "
                f"mtf.pjrt runs on {trace.mesh_impl!r}. Lower programs with mtf.pjrt.mesh_impl()"
            )
        name, earlier = variable.name, self._known.form(variable.name)
        form = form_of(variable, trace.mesh_impl)
        if earlier is not None and (earlier.shape, earlier.dtype) != (form.shape, form.dtype):
            raise ValueError(differs(name, earlier, form, False))
        if name not in trace.variables:
            trace.variables[name] = ValueOfVariable(variable, form)
        # One value for all processors: it is XLA that splits it, and not the Lowering.
        return {0: trace.variables[name]}

    # -- values

    def prepare(
        self, values: Mapping[str, ValueOfVariable], needed: Mapping[str, jax.ShapeDtypeStruct]
    ) -> None:
        """Makes variables that are not there yet, and moves those that are elsewhere.

        Args:
          values: the variables in a program, by name.
          needed: how the program needs them.
        """
        with self.lock:
            new = {name: v for name, v in needed.items() if name not in self._arrays}
            self._make({name: values[name] for name in new}, new)
            for name, wanted in needed.items():
                array = self.array(name)
                # Functions of one store may have other layouts: each has the variable where its
                # program needs it.
                if array.sharding != wanted.sharding:
                    with all_dtypes():
                        array = placed(array, wanted.sharding)
                    self._set(values[name], array)

    def _make(
        self, values: Mapping[str, ValueOfVariable], new: Mapping[str, jax.ShapeDtypeStruct]
    ) -> None:
        """Gives variables their initial values, or those of a checkpoint that was read before."""
        # The first variables all have to be in the checkpoint; later ones may be new, as slots.
        read = new if not self._arrays else set(new) & self._names_there
        arrays: dict[str, jax.Array] = {}
        if self._checkpoint is not None and read:
            saved = {n: (values[n].variable.master_dtype, new[n]) for n in new if n in read}
            check_together(self._checkpoint, saved)
            arrays.update(read_arrays(self._checkpoint, saved))
        for name, wanted in new.items():
            if name not in arrays:
                part: Any = self._given_part(values[name])
                part = part or part_function(values[name].variable)
                with all_dtypes():
                    arrays[name] = jax.make_array_from_callback(wanted.shape, wanted.sharding, part)
        # All values are there before the first is kept, so that an error leaves the store as it
        # was; a signal in between would leave arrays that savers do not know.
        with deferred():
            for name, value in values.items():
                self._set(value, arrays[name])
                v = value.variable
                self._known.saved.add(self, name, v.shape, v.master_dtype, v.trainable)

    def _given_part(
        self, traced: ValueOfVariable
    ) -> Optional[Callable[[tuple[slice, ...]], np.ndarray]]:
        """Returns a function that returns a part of what `begin_with` was given; None for none."""
        name, values, form = traced.variable.name, self._known.values, traced.form
        if name not in values:
            return None
        part, sizes = given_parts(values, name), form.shape.to_integer_list

        def fitted(index: tuple[slice, ...]) -> np.ndarray:
            ranges = [s.indices(size)[:2] for s, size in zip(index, sizes)]
            begin, shape = [b for b, _ in ranges], [e - b for b, e in ranges]
            return fitting_part(name, form, part, begin, shape).numpy()

        return fitted

    def _set(self, traced: ValueOfVariable, array: jax.Array) -> None:
        name = traced.variable.name
        self._arrays[name] = array
        self._known.variables.setdefault(name, Stored(traced.form)).form = traced.form

    def restore(self, path: str) -> None:
        """Restores all variables, or none; see `mtf.pjrt.restore`.

        Args:
          path: the path of a checkpoint.
        """
        with self.lock:
            masters = self.masters
            expected = {
                name: (
                    masters[name].dtype.base_dtype,
                    # Without its memory.
                    jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding),
                )
                for name, array in self._arrays.items()
            }
            # All is read before any is changed, and then again: the devices may have no memory for
            # two values of each variable.
            check_together(path, expected, self._known.saved.tracked)
            with deferred():
                for name, array in read_arrays(path, expected):
                    self._arrays[name] = array
                tracked = _in_file(path, self._known.saved.tracked)
                with reading(path) as reader:  # by a session, in which nothing eager is assigned
                    restored = [(v, reader.read(name, "", v.dtype)) for name, v in tracked.items()]
                for v, value in restored:
                    v.assign(value)
            self._checkpoint = path
            self._names_there = {name for name, _ in tf.train.list_variables(path)}

    def update(self, names: Sequence[str], arrays: Sequence[jax.Array]) -> None:
        """Sets variables to what a step returned.

        Args:
          names: their names.
          arrays: their new values.
        """
        with self.lock:
            self._arrays.update(zip(names, arrays))

    def value(self, name: str) -> tf.Tensor:
        """Returns the whole value of a variable, gathered from all devices.

        With several processes, all of them have to call it.

        Args:
          name: the full name of an mtf variable.
        """
        with self.lock:
            return tf.constant(gathered(self.array(name)))

    def assign(self, name: str, value: npt.ArrayLike) -> None:
        """Assigns the whole value of a variable.

        Args:
          name: the full name of an mtf variable.
          value: an array of the shape of the variable; see VariableStore.
        """
        whole = fitting(name, self._form(name), value)
        with self.lock, all_dtypes():
            self._arrays[name] = placed(whole.numpy(), self._arrays[name].sharding)

    def _assign_part(self, name: str, index: tuple[slice, ...], value: np.ndarray) -> None:
        with self.lock, all_dtypes():
            array = self.array(name)
            parts = [
                jax.device_put(value, s.device) if s.index == index else s.data
                for s in array.addressable_shards
            ]
            self._arrays[name] = jax.make_array_from_single_device_arrays(
                array.shape, array.sharding, parts
            )

    def parts(self, name: str) -> tuple[list[int], dict[tuple[int, ...], list[Any]]]:
        """Returns the shape of a part, and each part by its first index; see VariableStore.

        Args:
          name: the full name of an mtf variable.
        """
        array = self.array(name)
        holders: dict[tuple[int, ...], list[Any]] = {}
        for shard in array.addressable_shards:
            begin = tuple(part.start or 0 for part in shard.index)
            holders.setdefault(begin, [_Shard(self, name, shard.index)])
        return list(array.sharding.shard_shape(array.shape)), holders

    def slice_variables(self, name: str) -> dict[str, tf.Variable]:
        """Returns nothing: there are no variables of TensorFlow."""
        return {}


# -- checkpoints

_STEP = "global_step"


def save(store: ArrayStore, path: str, step: Optional[int] = None) -> str:
    """Saves the variables of a store, and those of TensorFlow that it tracks.

    With several processes, all have to call it.
    Each process writes the parts that its devices have, copies just once, to a file system that
    all share; the first process joins their files. Any mesh implementation, in any layout, and the
    classic can read them.

    Args:
      store: the `store` of a function of `mtf.pjrt.function`.
      path: the path of the checkpoint, such as "model/model.ckpt".
      step: a number that is appended to the path, and saved as "global_step"; or None.

    Returns:
      The path of the checkpoint.

    Raises:
      ValueError: the store has no variables yet.
      OSError: a process cannot write its file, and all raise an error.
    """
    path = path if step is None else f"{path}-{step}"
    if not store.names:
        raise ValueError(
            "mtf.pjrt.save: the store has no variables yet: call the function, or its "
            "make_variables, before"
        )
    masters = store.masters
    with store.lock:  # the values between two steps
        parts = [
            part
            for name in store.names
            for part in parts_to_write(store.array(name), name, masters[name].dtype.base_dtype)
        ]
    if jax.process_index() == 0:
        # By one process: a tensor in two files could not be joined.
        tracked = {name: v.numpy() for name, v in store._known.saved.tracked.items()}
        tracked.update({} if step is None else {_STEP: np.asarray(step, np.int64)})
        parts += [Shard(name, "", np.asarray(value)) for name, value in tracked.items()]
    count = jax.process_count()
    written = [f"{path}.part-{i}-of-{count}" for i in range(count)]

    def write() -> None:
        tf.gfile.MakeDirs(os.path.dirname(path) or ".")
        write_parts(written[jax.process_index()], parts)

    def join() -> None:
        join_files([w for w in written if are_written(w)], path)
        with not_advised():
            tf.train.update_checkpoint_state(os.path.dirname(path) or ".", path)

    # The files can be joined once all are written, and used once they are joined.
    if not (done_in_all(write) and done_in_all(join, first=True)):
        raise OSError(
            f"mtf.pjrt.save: another process could not write checkpoint {path}, and says why; the "
            "checkpoints before it are as they were"
        )
    return path


def restore(store: ArrayStore, path: str) -> None:
    """Restores all variables of a store, or none; each process reads the parts that it has.

    So are the variables of TensorFlow that it tracks, if the file has them.
    Variables that are made later get their values in the checkpoint as well, if it has them; those
    of the first call, where the store has none yet, have to be there. With several processes, all
    have to call it.

    Args:
      store: the `store` of a function of `mtf.pjrt.function`.
      path: the path of a checkpoint, of any mesh implementation.

    Raises:
      CheckpointError: there is no such checkpoint, it is damaged, or it lacks variables or has
        them in other shapes; no variable was changed.
    """
    store.restore(os.fspath(path))
