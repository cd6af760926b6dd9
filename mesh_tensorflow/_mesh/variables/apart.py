"""Savers of variables of which each of several processes holds only a part.

The arrays of `mesh_tensorflow.pjrt` are such: no TensorFlow variable has their value, and it need
not fit into one process. Each process writes its parts to files of its own, which are then joined
to one checkpoint, and reads its parts when it is restored.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional, Protocol

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python.training.saver import BulkSaverBuilder

from mesh_tensorflow._mesh.variables.files import Faults, full_path, join_files

__all__ = ["Apart", "PartsSaverBuilder", "ProcessesWithParts", "faults_apart"]

_TEMPORARY = "_temp"  # after the path of a checkpoint: the directory of what is joined
_REST = f"{_TEMPORARY}/rest"


class ProcessesWithParts(Protocol):
    """Processes that have parts of variables; all of them see the same files."""

    def write(self, prefix: str, variables: Mapping[str, Apart]) -> list[str]:
        """Has each process write its parts, copies once; returns the paths of what they wrote.

        Args:
          prefix: how these paths begin.
          variables: the variables, by name in files.
        """

    def restore(self, path: str, variables: Mapping[str, Apart]) -> None:
        """Has each process read its parts of the variables, and set them.

        Args:
          path: the path of a checkpoint.
          variables: the variables, by name in files.
        """

    def faults(self, path: str, variables: Mapping[str, Apart]) -> Faults:
        """Returns what is wrong with the data of variables, which all processes read in parts.

        Args:
          path: the path of a checkpoint.
          variables: the variables, by name in files.
        """


class Apart(NamedTuple):
    """A variable in parts.

    Attributes:
      processes: what has it.
      number: the number of its program there.
      name: its name there.
      dtype: its dtype in files.
    """

    processes: ProcessesWithParts
    number: int
    name: str
    dtype: tf.DType


def _groups(
    variables: Mapping[str, Apart],
) -> list[tuple[ProcessesWithParts, dict[str, Apart]]]:
    """Returns variables by the processes that have them."""
    found: dict[int, tuple[ProcessesWithParts, dict[str, Apart]]] = {}
    for name, variable in variables.items():
        key = id(variable.processes)
        found.setdefault(key, (variable.processes, {}))[1][name] = variable
    return list(found.values())


def _write(variables: Mapping[str, Apart], has_rest: bool, filename: bytes) -> np.bool_:
    """Writes a checkpoint of variables, and of the rest that is written already."""
    path = full_path(filename.decode())
    prefixes = [path + _REST] if has_rest else []
    try:
        for i, (processes, own) in enumerate(_groups(variables)):
            # Into a directory beside the checkpoint, so that a save which is cut short leaves
            # nothing that looks like a checkpoint.
            prefixes += processes.write(f"{path}{_TEMPORARY}/parts-{i}", own)
        for prefix in prefixes:
            if not tf.io.gfile.exists(f"{prefix}.index"):
                raise OSError(
                    f"another process has written {prefix}, which is not to be seen here: all "
                    "processes have to see the same directory, under the same path"
                )
        join_files(prefixes, path)
    finally:
        _remove(path + _TEMPORARY)
    return np.bool_(True)


def _remove(directory: str) -> None:
    try:
        if tf.io.gfile.exists(directory):
            tf.io.gfile.rmtree(directory)
    except tf.errors.OpError as e:
        tf.logging.warning("%s is of no use, but could not be removed: %s", directory, e.message)


def _restore(variables: Mapping[str, Apart], filename: bytes) -> np.bool_:
    for processes, own in _groups(variables):
        processes.restore(full_path(filename.decode()), own)
    return np.bool_(True)


def faults_apart(path: str, variables: Mapping[str, Apart]) -> list[Faults]:
    """Returns what is wrong with the data of variables.

    Args:
      path: the path of a checkpoint.
      variables: the variables, by name in files.
    """
    return [processes.faults(full_path(path), own) for processes, own in _groups(variables)]


class PartsSaverBuilder(BulkSaverBuilder):
    """Makes the operations of a saver: processes write and read their own parts of variables.

    What is not apart is saved and restored by the operations of TensorFlow. The part files are in
    a directory beside the checkpoint until all are written; only then they become a checkpoint.

    Attributes:
      apart: the variables that are apart, by name in files, once the operations are made.
    """

    def __init__(self, write_version: int = tf.train.SaverDef.V2):
        super().__init__(write_version)
        self.apart: dict[str, Apart] = {}

    def _split(self, saveables: Sequence[Any]) -> tuple[dict[str, Apart], list[Any]]:
        """Returns the variables that are apart, by name in files, and the other saveables."""
        apart, others = {}, []
        for saveable in saveables:
            variable: Optional[Apart] = getattr(saveable, "apart", None)
            if variable is None or self._write_version == tf.train.SaverDef.V1:
                others.append(saveable)
            else:
                apart[saveable.specs[0].name] = variable
        self.apart.update(apart)
        return apart, others

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
        if not self._split(saveables)[0]:
            return super()._AddShardedSaveOps(filename_tensor, per_device)
        return self._AddSaveOps(filename_tensor, saveables)  # the files are joined once

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


def _called(fn: Any, filename_tensor: tf.Tensor) -> tf.Operation:
    """Returns an operation that calls a function with the path of a checkpoint."""
    return tf.numpy_function(fn, [filename_tensor], tf.bool, stateful=True).op
