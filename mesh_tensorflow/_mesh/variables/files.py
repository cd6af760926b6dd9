"""Files of checkpoints: parts of variables that are written, joined and read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.core.protobuf import tensor_bundle_pb2

from mesh_tensorflow._core.errors import reason
from mesh_tensorflow._paths import readable

__all__ = [
    "Faults",
    "Part",
    "Reader",
    "faults",
    "full_path",
    "join_files",
    "number_of_files",
    "reading",
    "slice_spec",
    "write_parts",
]


class Part(NamedTuple):
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


def write_parts(prefix: str, parts: Sequence[Part]) -> None:
    """Writes parts of variables as a checkpoint of their own, which `join_files` takes.

    Args:
      prefix: the path of the checkpoint.
      parts: the parts.

    Raises:
      OSError: it cannot be written.
    """
    with _session() as session:
        fed = [tf.placeholder(tf.as_dtype(part.value.dtype), part.value.shape) for part in parts]
        saved = tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=[part.name for part in parts],
            shape_and_slices=[part.spec for part in parts],
            tensors=fed,
        )
        try:
            session.run(saved, {x: part.value for x, part in zip(fed, parts)})
        except tf.errors.OpError as e:
            raise OSError(f"{prefix} could not be written: {reason(e)}") from e


def join_files(prefixes: Sequence[str], path: str) -> None:
    """Makes one checkpoint of several, which are no more then.

    Args:
      prefixes: their paths.
      path: the path of the one.

    Raises:
      OSError: it cannot be written.
    """
    with _session() as session:
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
        self._kinds: dict[tf.DType, tf.Tensor] = {}

    def _value(self, dtype: tf.DType) -> tf.Tensor:
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
        return self._run(self._value(dtype), name, spec)

    def kinds(self, name: str, spec: str, dtype: tf.DType) -> tuple[bool, bool]:
        """Returns whether a part of a variable has NaN, and infinite values; see `read`."""
        if dtype not in self._kinds:
            value = self._value(dtype)
            # RestoreV2 checks a slice only when it is read, also where no test of its numbers is
            # needed.
            none = tf.size(value) < 0  # which reads it
            tests = [tf.math.is_nan, tf.math.is_inf] if dtype.is_floating else []
            self._kinds[dtype] = tf.stack([tf.reduce_any(t(value)) for t in tests] or [none, none])
        nan, infinite = self._run(self._kinds[dtype], name, spec)
        return bool(nan), bool(infinite)

    def _run(self, fetched: tf.Tensor, name: str, spec: str) -> Any:
        try:
            return self._session.run(fetched, {self._name: name, self._spec: spec})
        except tf.errors.OpError as e:
            raise OSError(reason(e)) from e


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
                found = [reader.kinds(name, spec, dtype) for spec in specs]  # reads them all
                if any(nan for nan, _ in found):
                    not_numbers.append(name)
                elif any(inf for _, inf in found):
                    infinite.append(name)
            except OSError as e:
                damaged.append(name)
                why = why or str(e)
    return Faults(damaged, why, not_numbers, infinite)
