"""Files of checkpoints: folders, the tensors in them, and those that processes write in parts.

The arrays of `mesh_tensorflow.pjrt` are such: no TensorFlow variable has their value, and it need
not fit into one process. Each process writes its parts to files of its own, which are then joined
to one checkpoint, and reads its parts when it is restored.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Protocol, Union

import numpy as np
import tensorflow.compat.v1 as tf
from google.protobuf import text_format
from tensorflow.core.protobuf import tensor_bundle_pb2
from tensorflow.python.training.saver import BulkSaverBuilder
from tensorflow.python.training.saving.saveable_object import SaveableObject, SaveSpec

from mesh_tensorflow._core.errors import reason
from mesh_tensorflow._mesh.devices import host_cpu
from mesh_tensorflow._paths import escaped, readable, write_whole

Path = Union[str, os.PathLike[str]]

_SEVERAL = re.compile(r"-\?{5}-of-\d{5}$")


def exists(path: Path) -> bool:
    """Returns whether there is a checkpoint: an index, or a file or files of the first format.

    Args:
      path: the path of a checkpoint.
    """
    path = os.fspath(path)
    if tf.io.gfile.exists(f"{path}.index"):
        return True
    several = _SEVERAL.search(path)  # the one path that is a pattern
    if several is not None:
        return bool(tf.io.gfile.glob(escaped(path[: several.start()]) + several[0]))
    return tf.io.gfile.exists(path) and not tf.io.gfile.isdir(path)


def open_reader(path: Path) -> tf.train.NewCheckpointReader:
    """Returns a reader of a checkpoint.

    Args:
      path: the path of a checkpoint, which is no directory.
    """
    return tf.train.load_checkpoint(readable(path))


def listed(directory: Path) -> tuple[Optional[str], list[str]]:
    """Returns what the file `checkpoint` names: the latest, if it names one, and all.

    Args:
      directory: the directory.
    """
    try:
        state = tf.train.get_checkpoint_state(os.fspath(directory))
    except (ValueError, UnicodeDecodeError):  # it is empty, or of other bytes
        state = None
    if state is None:
        return None, []
    path = state.model_checkpoint_path
    # The directory may have been moved since.
    moved = os.path.join(os.fspath(directory), os.path.basename(path))
    last = next((p for p in (path, moved) if exists(p)), path)
    return last, list(state.all_model_checkpoint_paths)


def latest(directory: Path) -> Optional[str]:
    """Returns the latest checkpoint that a directory lists, or None, as tf.train.latest_checkpoint.

    Args:
      directory: the directory, whatever its name.
    """
    path, _ = listed(directory)
    return path if path is not None and exists(path) else None


def find(path: Path, what: str) -> str:
    """Returns the checkpoint that a path names: itself, or the latest of a directory.

    Args:
      path: the path of a checkpoint, or a directory.
      what: what asks for it, for the error.

    Raises:
      ValueError: there is none.
    """
    path = os.fspath(path)
    if not tf.io.gfile.isdir(path):
        if exists(path):
            return path
        names = _names_in(os.path.dirname(path) or ".")
        others = f", but {', '.join(names[-8:])}" if names else ""
        raise ValueError(
            f"{what}: there is no checkpoint at {path}{others}. Give the path of one, such as "
            "model.ckpt-1000, without what follows the number, or a directory, for its latest"
        )
    path_of_latest = latest(path)
    if path_of_latest is None:
        names = _names_in(path)
        which = (
            f"one of those that are there: {', '.join(names[-8:])}"
            if names
            else ("one, such as model.ckpt-1000, without what follows the number")
        )
        raise ValueError(
            f"{what}: there is no checkpoint in {path}: its file named 'checkpoint' lists none. "
            f"Give the path of {which}"
        )
    return path_of_latest


def _names_in(directory: str) -> list[str]:
    """Returns names of checkpoints for an error, which goes without where they can't be seen."""
    try:
        return [os.path.basename(p) for p in numbered(directory)]
    except tf.errors.PermissionDeniedError:
        return []


def by_step(stem: str) -> tuple[int, str]:
    """Returns a key that sorts names of checkpoints by step.

    Args:
      stem: the name, such as "model.ckpt-1000".
    """
    number = re.search(r"-(\d+)$", stem)
    # As a number: as text, model.ckpt-1000 would come before model.ckpt-200.
    return (int(number.group(1)) if number else -1, stem)


def numbered(directory: Path, name: str = "model.ckpt") -> list[str]:
    """Returns the checkpoints that are in a directory, listed there or not, by step.

    Args:
      directory: the directory, which need not exist.
      name: how their names begin.
    """
    pattern = re.compile(re.escape(name) + r"-\d+\.index")
    if not tf.io.gfile.isdir(os.fspath(directory)):
        return []
    files = filter(pattern.fullmatch, tf.io.gfile.listdir(os.fspath(directory)))
    stems = sorted((file.removesuffix(".index") for file in files), key=by_step)
    return [os.path.join(os.fspath(directory), stem) for stem in stems]


def record(path: str, keep: int, best: Optional[str] = None) -> None:
    """Lists a checkpoint as the latest of its directory, and removes the oldest that are listed.

    Args:
      path: the path of the checkpoint, whose files are complete.
      keep: how many to keep.
      best: the path of one that is kept besides them, or None.
    """
    directory, name = os.path.split(path)
    before = [os.path.basename(p) for p in listed(directory)[1]]
    # A checkpoint that is written again becomes the latest, and is listed once.
    names = [*(n for n in before if n != name), name]  # so that the directory can be moved
    old = [n for n in names[:-keep] if best is None or n != os.path.basename(best)]
    # Listed before the oldest are removed: killed in between, the list names only what is there.
    _list(directory, [n for n in names if n not in old])
    for n in old:
        remove(os.path.join(directory, n))


def _list(directory: str, names: Sequence[str]) -> None:
    """Writes the file `checkpoint` at once."""
    state = tf.train.generate_checkpoint_state_proto(
        os.path.abspath(directory), names[-1], list(names)
    )
    # Whoever reads meanwhile finds the old list or the new one, never a part.
    write_whole(os.path.join(directory, "checkpoint"), text_format.MessageToString(state))


def remove(path: str) -> None:
    """Removes the files of a checkpoint, and of no other.

    Args:
      path: the path of the checkpoint.
    """
    directory, name = os.path.split(path)
    # Of all that begins with the name: to remove model.ckpt-1 must leave model.ckpt-10.
    own = re.compile(re.escape(name) + r"(\.index|\.meta|\.data-\d{5}-of-\d{5})?")
    # The index before the data: what is left of a removal that was cut short is no checkpoint.
    for file in sorted(filter(own.fullmatch, tf.io.gfile.listdir(directory or ".")), reverse=True):
        tf.io.gfile.remove(os.path.join(directory, file))


def check_writable(directory: str, what: str) -> None:
    """Makes a directory if there is none, and writes an empty file there for a moment.

    Args:
      directory: the directory.
      what: what it is, for the error.

    Raises:
      ValueError: this process cannot write there.
    """
    # With the process's number, as several may try one directory at once.
    probe = os.path.join(directory, f".writable-{os.getpid()}")
    try:
        tf.io.gfile.makedirs(directory)
        with tf.io.gfile.GFile(probe, "w") as file:
            file.write("")
        tf.io.gfile.remove(probe)
    except (tf.errors.OpError, OSError) as e:
        raise ValueError(
            f"{what} {directory!r} cannot be written: {reason(e)}. See that no file of this name "
            "is in the way and that this user may write there, or name another"
        ) from e


def matching(pattern: Union[str, Sequence[str]]) -> list[str]:
    """Returns files in order: that of exactly this name, or those that match a pattern.

    Args:
      pattern: the name of a file, a pattern, or several of them.
    """
    patterns = [pattern] if isinstance(pattern, (str, os.PathLike)) else list(pattern)
    # The name of a file may have brackets, which in a pattern would match another name.
    exact = [escaped(p) if tf.io.gfile.exists(p) else p for p in patterns]
    return sorted(tf.io.gfile.glob(exact))


class Shard(NamedTuple):
    """A part of a variable.

    Attributes:
      name: the name of the variable.
      spec: where the part belongs, from `slice_spec`.
      value: its value.
    """

    name: str
    spec: str
    value: np.ndarray


class Faults(NamedTuple):
    """What is wrong with the data of variables.

    Attributes:
      damaged: the names of variables that cannot be read.
      why: the reason for the first of them.
      not_numbers: the names of variables with NaN.
      infinite: the names of other variables with infinite values, which may be meant.
    """

    damaged: Sequence[str]
    why: str
    not_numbers: Sequence[str]
    infinite: Sequence[str]


def slice_spec(whole: Sequence[int], begin: Sequence[int], sizes: Sequence[int]) -> str:
    """Returns a part in the notation of checkpoints; "" for the whole tensor.

    Args:
      whole: the shape of the whole tensor.
      begin: the index of the first element along each dimension.
      sizes: the shape of the part.
    """
    if tuple(whole) == tuple(sizes):
        return ""
    # As in "4 6 2,2:0,6": the shape of the whole, then begin and size along each dimension.
    ranges = ":".join(f"{b},{n}" for b, n in zip(begin, sizes))
    return " ".join(map(str, whole)) + " " + ranges


def full_path(path: str) -> str:
    """Returns a path that means the same in processes with other working directories.

    Args:
      path: a path, or the address of a file system such as "gs://bucket/model".
    """
    return path if "://" in path else os.path.abspath(path)


@contextlib.contextmanager
def _session() -> Iterator[tf.Session]:
    """Context with a graph and a session of its own, on the CPU and in this thread.

    It may be within an operation of another session, whose threads may all be waiting.
    """
    # A negative number of threads between operations makes a session run all in the caller's
    # thread.
    config = tf.ConfigProto(device_count={"GPU": 0}, inter_op_parallelism_threads=-1)
    with tf.Graph().as_default(), tf.Session(config=config) as session:
        yield session


# Of other dtypes, such as float16, TensorFlow writes slices that it cannot read.
_READ_IN_SLICES = {
    *(tf.bool, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128, tf.string),
    *(tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8),
}


def is_read_in_slices(dtype: tf.DType) -> bool:
    """Returns whether TensorFlow can read slices of a dtype, and wholes that are saved in slices.

    Args:
      dtype: the dtype of a variable in files.
    """
    return dtype in _READ_IN_SLICES


# Numbers tested at a time: what comes of a test then stays in a core's cache.
_TESTED = 1 << 16

# After the path of parts: those whose bits are saved, as integers that are read in slices.
_BITS = ".bits"


def write_parts(prefix: str, parts: Sequence[Shard]) -> None:
    """Writes parts of variables as a checkpoint of their own, which `join_files` takes.

    What is there already, of a process that was killed, is written again or removed.

    Args:
      prefix: the path of the checkpoint.
      parts: the parts.

    Raises:
      OSError: it cannot be written.
    """
    usual, bits = [], []
    for part in parts:
        dtype = tf.as_dtype(part.value.dtype)
        if not part.spec or is_read_in_slices(dtype):
            usual.append(part)
        else:
            value = part.value.view(f"int{8 * dtype.size}")
            bits.append(Shard(f"{part.name}:{dtype.name}", part.spec, value))
    for path, written in ((prefix, usual), (prefix + _BITS, bits)):
        if written:
            _write_tensors(path, written)
        elif tf.io.gfile.exists(f"{path}.index"):
            remove(path)


def _write_tensors(path: str, parts: Sequence[Shard]) -> None:
    with _session() as session:
        # Fed and not constants: a graph with the values in it could not be larger than 2 GB.
        fed = [tf.placeholder(tf.as_dtype(part.value.dtype), part.value.shape) for part in parts]
        saved = tf.raw_ops.SaveV2(
            prefix=path,
            tensor_names=[part.name for part in parts],
            shape_and_slices=[part.spec for part in parts],
            tensors=fed,
        )
        try:
            session.run(saved, {x: part.value for x, part in zip(fed, parts)})
        except tf.errors.OpError as e:
            raise OSError(f"{path} could not be written: {reason(e)}") from e


def are_written(prefix: str) -> bool:
    """Returns whether there are parts that `write_parts` has written.

    Args:
      prefix: their path.
    """
    return any(tf.io.gfile.exists(f"{prefix}{end}.index") for end in ("", _BITS))


def join_files(prefixes: Sequence[str], path: str) -> None:
    """Makes one checkpoint of several, which are no more then.

    Args:
      prefixes: their paths.
      path: the path of the one.

    Raises:
      OSError: it cannot be written.
    """
    bits = [p + _BITS for p in prefixes if tf.io.gfile.exists(f"{p}{_BITS}.index")]
    joined = [p for p in prefixes if tf.io.gfile.exists(f"{p}.index")]
    _merge([*joined, *(_wholes(bits) if bits else [])], path)


def _wholes(prefixes: Sequence[str]) -> list[str]:
    """Returns checkpoints of a variable each, made of the bits of its parts."""
    path = f"{prefixes[0]}.joined"
    _merge(prefixes, path)
    checkpoints: list[str] = []
    with reading(path) as reader:  # one variable after the other, which may be large
        for saved, kind in open_reader(path).get_variable_to_dtype_map().items():
            name, _, dtype = saved.rpartition(":")
            value = reader.read(saved, "", kind).view(tf.as_dtype(dtype).as_numpy_dtype)
            checkpoints.append(f"{path}-{len(checkpoints)}")
            _write_tensors(checkpoints[-1], [Shard(name, "", value)])
    remove(path)
    return checkpoints


def _merge(prefixes: Sequence[str], path: str) -> None:
    with _session() as session:
        # Directories stay: their maker removes them once, also if this fails.
        joined = tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=list(prefixes), destination_prefix=path, delete_old_dirs=False
        )
        try:
            session.run(joined)
        except tf.errors.OpError as e:
            raise OSError(f"{path} could not be joined: {reason(e)}") from e


def number_of_files(path: str) -> Optional[int]:
    """Returns the number of data files of a checkpoint, from its index; None if that is damaged.

    An index is a table of sorted names. Its first entry has the empty name, and consists of two
    zero bytes (lengths of the shared and the own part of the name), the length of its value, and
    its value, a header.

    Args:
      path: the path of the checkpoint.
    """
    with tf.io.gfile.GFile(f"{path}.index", "rb") as index:
        start = index.read(3 + 127)
    # A length from 128 on has two bytes, the first of them above 127; no header is that long.
    if start[:2] != b"\0\0" or not 0 < start[2] <= len(start) - 3:
        return None
    return tensor_bundle_pb2.BundleHeaderProto.FromString(start[3 : 3 + start[2]]).num_shards


class Reader:
    """Reads parts of the variables of a checkpoint, by the operation that restores.

    TensorFlow's Python reader gives whole variables only, and may abort on damaged slices.
    """

    def __init__(self, path: str, session: tf.Session):
        """Creates a Reader; see `reading`."""
        self._path, self._session = path, session
        self._name, self._spec = tf.placeholder(tf.string, []), tf.placeholder(tf.string, [])
        self._values: dict[tf.DType, tf.Tensor] = {}

    def _value(self, dtype: tf.DType) -> tf.Tensor:
        # One node for all variables of a dtype, by a fed name: not a graph as large as a model.
        if dtype not in self._values:
            [self._values[dtype]] = tf.raw_ops.RestoreV2(
                prefix=self._path,
                tensor_names=[self._name],
                shape_and_slices=[self._spec],
                dtypes=[dtype],
            )
        return self._values[dtype]

    def read(self, name: str, spec: str, dtype: tf.DType) -> np.ndarray:
        """Returns a part of a variable.

        Args:
          name: the name of the variable.
          spec: the part, from `slice_spec`.
          dtype: the dtype of the variable.

        Raises:
          OSError: it cannot be read.
        """
        if is_read_in_slices(dtype) or not spec:
            return self._run(self._value(dtype), name, spec)
        ranges = [r.split(",") for r in spec.rpartition(" ")[2].split(":")]  # of all dimensions
        cut = tuple(slice(int(begin), int(begin) + int(size)) for begin, size in ranges)
        return self._run(self._value(dtype), name, "")[cut]

    def kinds(self, name: str, spec: str, dtype: tf.DType) -> tuple[bool, bool]:
        """Returns whether a part of a variable has NaN, and infinite values; see `read`."""
        value = self.read(name, spec, dtype)  # also finds damage where there are no numbers to test
        return _kinds(value, dtype)

    def _run(self, fetched: tf.Tensor, name: str, spec: str) -> Any:
        try:
            return self._session.run(fetched, {self._name: name, self._spec: spec})
        except tf.errors.OpError as e:
            raise OSError(reason(e)) from e


def _kinds(value: np.ndarray, dtype: tf.DType) -> tuple[bool, bool]:
    """Returns whether an array has NaN, and infinite values."""
    if not dtype.is_floating:
        return False, False
    # Not by operations of TensorFlow, which would use threads of other priorities.
    value = np.reshape(value, -1)
    blocks = [value[i : i + _TESTED] for i in range(0, value.size, _TESTED)]
    # One test, as nearly always all are finite.
    wrong = [part for part in blocks if not np.isfinite(part).all()]
    return (
        any(bool(np.isnan(part).any()) for part in wrong),
        any(bool(np.isinf(part).any()) for part in wrong),
    )


def faults_of(values: Mapping[str, np.ndarray]) -> Faults:
    """Returns what is wrong with values of variables.

    Args:
      values: arrays by the names of the variables.
    """
    kinds = {n: _kinds(v, tf.as_dtype(np.asarray(v).dtype)) for n, v in values.items()}
    infinite = [name for name, (nan, inf) in kinds.items() if inf and not nan]
    return Faults([], "", [name for name, (nan, _) in kinds.items() if nan], infinite)


@contextlib.contextmanager
def reading(path: str) -> Iterator[Reader]:
    """Context with a Reader.

    Args:
      path: the path of a checkpoint.
    """
    with _session() as session:
        yield Reader(readable(path), session)


def faults(path: str, wanted: Mapping[str, tuple[tf.DType, Sequence[str]]]) -> Faults:
    """Returns what is wrong with variables of a checkpoint, of which each part is read.

    Args:
      path: the path of the checkpoint.
      wanted: the dtype of each variable, and its parts as in `slice_spec`, by name.
    """
    damaged, why, not_numbers, infinite = [], "", [], []
    with reading(path) as reader:
        for name, (dtype, specs) in wanted.items():
            try:
                kinds = [reader.kinds(name, spec, dtype) for spec in specs]  # reads them all
                if any(nan for nan, _ in kinds):
                    not_numbers.append(name)
                elif any(inf for _, inf in kinds):
                    infinite.append(name)
            except OSError as e:
                damaged.append(name)
                why = why or str(e)
    return Faults(damaged, why, not_numbers, infinite)


_TEMPORARY = "_temp"  # after the path of a checkpoint: the directory of what is joined
_REST = f"{_TEMPORARY}/rest"


class ShardHolders(Protocol):
    """Processes that have parts of variables; all of them see the same files."""

    def write(self, prefix: str, variables: Mapping[str, ShardedVariable]) -> list[str]:
        """Has each process write its parts, copies once; returns the paths of what they wrote.

        Args:
          prefix: how these paths begin.
          variables: the variables, by name in files.
        """

    def restore(self, path: str, variables: Mapping[str, ShardedVariable]) -> None:
        """Has each process read its parts of the variables, and set them.

        Args:
          path: the path of a checkpoint.
          variables: the variables, by name in files.
        """

    def faults(self, path: str, variables: Mapping[str, ShardedVariable]) -> Faults:
        """Returns what is wrong with the data of variables, which all processes read in parts.

        Args:
          path: the path of a checkpoint.
          variables: the variables, by name in files.
        """


class ShardedVariable(NamedTuple):
    """A variable in parts.

    Attributes:
      processes: what has it.
      number: the number of its program there.
      name: its name there.
      dtype: its dtype in files.
    """

    processes: ShardHolders
    number: int
    name: str
    dtype: tf.DType


def _groups(
    variables: Mapping[str, ShardedVariable],
) -> list[tuple[ShardHolders, dict[str, ShardedVariable]]]:
    """Returns variables by the processes that have them."""
    groups: dict[int, tuple[ShardHolders, dict[str, ShardedVariable]]] = {}
    for name, variable in variables.items():
        # The values hold what has these ids, so that none is used again.
        key = id(variable.processes)
        groups.setdefault(key, (variable.processes, {}))[1][name] = variable
    return list(groups.values())


def _write(variables: Mapping[str, ShardedVariable], has_rest: bool, filename: bytes) -> np.bool_:
    """Writes a checkpoint of variables, and of the rest that is written already."""
    path = full_path(filename.decode())
    prefixes = [path + _REST] if has_rest else []
    try:
        for i, (processes, own) in enumerate(_groups(variables)):
            # Into a directory beside the checkpoint, so that a save which is cut short leaves
            # nothing that looks like a checkpoint.
            prefixes += processes.write(f"{path}{_TEMPORARY}/parts-{i}", own)
        for prefix in prefixes:
            if not are_written(prefix):
                raise OSError(
                    f"another process has written {prefix}, which is not to be seen here: all "
                    "processes have to see the same directory, under the same path"
                )
        # Only now there is an index under the checkpoint's own path, which makes it one.
        join_files(prefixes, path)
    finally:
        _remove(path + _TEMPORARY)
    return np.bool_(True)


def _remove(directory: str) -> None:
    try:
        if tf.io.gfile.exists(directory):
            tf.io.gfile.rmtree(directory)
    except tf.errors.OpError as e:
        # No error: the checkpoint itself is complete, or has an error of its own by now.
        tf.logging.warning("%s is of no use, but could not be removed: %s", directory, e.message)


def _restore(variables: Mapping[str, ShardedVariable], filename: bytes) -> np.bool_:
    for processes, own in _groups(variables):
        processes.restore(full_path(filename.decode()), own)
    return np.bool_(True)


def faults_apart(path: str, variables: Mapping[str, ShardedVariable]) -> list[Faults]:
    """Returns what is wrong with the data of variables.

    Args:
      path: the path of a checkpoint.
      variables: the variables, by name in files.
    """
    return [processes.faults(full_path(path), own) for processes, own in _groups(variables)]


class ShardSaverBuilder(BulkSaverBuilder):
    """Makes the operations of a saver: processes write and read their own parts of variables.

    What is not apart is saved and restored by the operations of TensorFlow. The part files are in
    a directory beside the checkpoint until all are written; only then they become a checkpoint.

    Attributes:
      apart: the variables that are apart, by name in files, once the operations are made.
    """

    def __init__(
        self,
        write_version: int = tf.train.SaverDef.V2,
        when_read: Optional[Callable[[], None]] = None,
    ):
        """Creates a builder.

        Args:
          write_version: the format of the files.
          when_read: is called in a save, by another thread, as soon as all variables are read and
            none is written yet; then they may change. For sharded savers, and not where variables
            are apart. None for reading and writing one after the other.
        """
        super().__init__(write_version)
        self.apart: dict[str, ShardedVariable] = {}
        self._when_read = when_read

    def _split(self, saveables: Sequence[Any]) -> tuple[dict[str, ShardedVariable], list[Any]]:
        """Returns the variables that are apart, by name in files, and the other saveables."""
        sharded, others = {}, []
        for saveable in saveables:
            variable: Optional[ShardedVariable] = getattr(saveable, "apart", None)
            # Files of the first format cannot be joined, so there a variable is saved as a whole.
            if variable is None or self._write_version == tf.train.SaverDef.V1:
                others.append(saveable)
            else:
                # What is apart is one piece here, so its first spec is that of the whole tensor.
                sharded[saveable.specs[0].name] = variable
        self.apart.update(sharded)
        return sharded, others

    def save_op(self, filename_tensor: tf.Tensor, saveables: Sequence[Any]) -> tf.Operation:
        """Returns an operation that saves; see BaseSaverBuilder.

        Args:
          filename_tensor: the path of the checkpoint.
          saveables: what is saved.
        """
        apart, others = self._split(saveables)
        if not apart:
            return super().save_op(filename_tensor, saveables)
        with tf.device("/cpu:0"):
            rest = tf.strings.join([filename_tensor, _REST])
            # Before the parts: `_write` joins these files with those of the processes.
            before = [super().save_op(rest, others)] if others else []
            with tf.control_dependencies(before):
                return _called(functools.partial(_write, apart, bool(others)), filename_tensor)

    def _AddShardedSaveOps(self, filename_tensor: tf.Tensor, per_device: Sequence[Any]) -> Any:
        saveables = list(itertools.chain.from_iterable(group for _, group in per_device))
        if self._split(saveables)[0]:
            return self._AddSaveOps(filename_tensor, saveables)  # the files are joined once
        if self._when_read is None:
            return super()._AddShardedSaveOps(filename_tensor, per_device)
        per_device = [(device, list(map(_read_apart, group))) for device, group in per_device]
        read = [spec.tensor for _, group in per_device for s in group for spec in s.specs]
        with tf.device("/cpu:0"), tf.control_dependencies(read):
            notified = _called(functools.partial(_announce, self._when_read), filename_tensor)
        with tf.control_dependencies([notified]):
            return super()._AddShardedSaveOps(filename_tensor, per_device)

    def _AddRestoreOps(
        self,
        filename_tensor: tf.Tensor,
        saveables: Sequence[Any],
        restore_sequentially: bool,
        reshape: bool,
        preferred_shard: int = -1,
        name: str = "restore_all",
    ) -> tf.Operation:
        usual = super()._AddRestoreOps
        further = restore_sequentially, reshape, preferred_shard
        apart, others = self._split(saveables)
        # Parts have the shapes that the processes know, so only TensorFlow's way can reshape them.
        if not apart or reshape:
            return usual(filename_tensor, saveables, *further, name)
        before = [usual(filename_tensor, others, *further, f"{name}_others")] if others else []
        with tf.device("/cpu:0"), tf.control_dependencies(before):
            done = _called(functools.partial(_restore, apart), filename_tensor)
        return tf.group(done, name=name)


def _read_apart(saveable: SaveableObject) -> SaveableObject:
    """Returns what is saved with values that are read here, and not where they are written."""
    specs = []
    for spec in saveable.specs:
        with tf.device(host_cpu(spec.device or "")):
            value = spec.tensor  # made now, if it is a function
            # A resource variable leaves its old value to those that have read it when it changes.
            # Others change it in place, as JAX does with an array whose memory a step is given.
            value = value if _is_of_resource(value) else tf.raw_ops.DeepCopy(x=value)
        specs.append(SaveSpec(value, spec.slice_spec, spec.name, spec.dtype, spec.device))
    return SaveableObject(saveable.op, specs, saveable.name)


def _is_of_resource(value: tf.Tensor) -> bool:
    """Returns whether a tensor is the value of a resource variable, or a cut or a cast of one."""
    op = value.op
    while op.type in ("Identity", "Cast", "Slice", "StridedSlice"):
        op = op.inputs[0].op
    return op.type == "ReadVariableOp"


def _announce(when_read: Callable[[], None], filename: bytes) -> np.bool_:
    when_read()
    return np.bool_(True)


def _called(fn: Any, filename_tensor: tf.Tensor) -> tf.Operation:
    """Returns an operation that calls a function with the path of a checkpoint."""
    # Stateful, so that the optimizer neither merges two calls for one path nor leaves one out.
    return tf.numpy_function(fn, [filename_tensor], tf.bool, stateful=True).op
