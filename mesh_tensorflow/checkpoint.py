"""Savers that look at a checkpoint before they restore it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

__all__ = ["CheckpointError", "Saver", "check_checkpoint", "init_from_checkpoint"]

# How many names of variables an error spells out.
_LONGEST_LIST = 12


class CheckpointError(ValueError):
    """A checkpoint is not there, is damaged, or is not of this program."""


class Wanted(NamedTuple):
    """What a program wants from a checkpoint under some name."""

    shape: tuple[int, ...]
    dtype: tf.DType


class Saver(tf.train.Saver):
    """A tf.train.Saver that changes no variable unless it can restore all of them.

    It looks at the names, shapes and dtypes in the checkpoint first, and says which of them are
    not those of the program.
    """

    def __init__(self, var_list: Any = None, **kwargs: Any):
        """Makes a saver.

        Args:
          var_list: as of tf.train.Saver: a list of variables, or a dictionary of them by name in
            the checkpoint. If None, all global variables.
          **kwargs: further arguments of tf.train.Saver.
        """
        if var_list is None and not kwargs.get("defer_build"):
            var_list = tf.global_variables() + tf.get_collection(tf.GraphKeys.SAVEABLE_OBJECTS)
        self._wanted = _wanted(var_list)
        super().__init__(var_list, **kwargs)

    def build(self) -> None:
        """Makes the operations, if that was deferred."""
        if not self._wanted:
            self._wanted = _wanted(tf.global_variables())
        super().build()

    def restore(self, sess: tf.Session, save_path: str) -> None:
        """Restores all variables, or none.

        Args:
          sess: a session.
          save_path: the path of a checkpoint, as `save` returns it.

        Raises:
          CheckpointError: there is no such checkpoint; it cannot be read; or variables are
            missing in it, or have other shapes or dtypes. The message names them.
        """
        # Several readers may fail one by one, so what they are to read is read before.
        check_checkpoint(save_path, self._wanted, read=self._has_several_readers())
        try:
            super().restore(sess, save_path)
        except (tf.errors.DataLossError, tf.errors.OutOfRangeError, tf.errors.NotFoundError) as e:
            check_checkpoint(save_path, self._wanted, read=True)
            raise CheckpointError(f"checkpoint {save_path} could not be read: {e.message}") from e

    def _has_several_readers(self) -> bool:
        graph = tf.get_default_graph()
        scope = self.saver_def.restore_op_name.rpartition("/")[0] + "/"
        readers = [op for op in graph.get_operations()
                   if op.type == "RestoreV2" and op.name.startswith(scope)]
        return len(readers) > 1


def _wanted(var_list: Any) -> dict[str, Wanted]:
    """Returns what variables want, by name in the checkpoint."""
    if isinstance(var_list, Mapping):
        named: Iterable = var_list.items()
    else:
        named = ((getattr(getattr(v, "op", None), "name", None), v) for v in var_list or ())
    return {
        name: Wanted(tuple(v.shape.as_list()), v.dtype.base_dtype)
        for name, v in named
        if name and hasattr(v, "shape") and not getattr(v, "_save_slice_info", None)
    }


def init_from_checkpoint(path: str, variables: Mapping[str, Any]) -> None:
    """Has variables begin with the values in a checkpoint, instead of those of their initializers.

    As `tf.train.init_from_checkpoint`, and also for variables with slices in several processes. To
    be called before they are initialized.

    Args:
      path: the path of a checkpoint, as `save` returns it, or a directory, for the last one there.
      variables: tf variables by name in the checkpoint.

    Raises:
      ValueError: the checkpoint has no such variable, or one of another shape; or there is none.
    """
    if tf.io.gfile.isdir(path):
        last = tf.train.latest_checkpoint(path)
        if last is None:
            raise ValueError(
                f"there is no checkpoint in {path}: its file named 'checkpoint' lists none. Give "
                "the path of one, such as model.ckpt-1000, without what follows the number"
            )
        path = last
    check_checkpoint(path, variables)
    several = {
        name: v for name, v in variables.items() if len(v._gather_saveables_for_checkpoint()) > 1}
    one = {name: v for name, v in variables.items() if name not in several}
    if one:
        tf.train.init_from_checkpoint(path, one)
    for name, variable in several.items():
        with tf.device("/device:CPU:0"), tf.name_scope("init_from_checkpoint"):
            [value] = tf.raw_ops.RestoreV2(
                prefix=path, tensor_names=[name], shape_and_slices=[""],
                dtypes=[variable.dtype.base_dtype])
            variable._initial_value = tf.ensure_shape(value, variable.shape)


def check_checkpoint(
    path: str,
    wanted: Union[Mapping[str, Any], Iterable[Any]],
    read: bool = False,
) -> None:
    """Checks that a checkpoint has what a program wants.

    Args:
      path: the path of a checkpoint, as `save` returns it.
      wanted: variables, or a dictionary of them by name in the checkpoint.
      read: whether to read the data too, which finds files that are cut short or damaged.

    Raises:
      CheckpointError: it has not; the message says which file and which variables.
    """
    if not isinstance(wanted, Mapping) or not all(
        isinstance(w, Wanted) for w in wanted.values()
    ):
        wanted = _wanted(wanted)
    path = os.fspath(path)
    if not tf.train.checkpoint_exists(path):
        raise CheckpointError(f"there is no checkpoint {path}.{_others(path, 'Checkpoints')}")
    try:
        reader = tf.train.load_checkpoint(path)
        shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    except (tf.errors.OpError, ValueError, RuntimeError) as e:
        others = _others(path, "Other checkpoints")
        raise CheckpointError(
            f"{path}.index cannot be read: {_first_line(str(e))}.{others}"
        ) from e
    _check_names(path, wanted, shapes, dtypes)
    _check_files(path)
    if read:
        _check_data(path, wanted)


def _check_names(path: str, wanted: Mapping[str, Wanted], shapes: Mapping[str, Any],
                 dtypes: Mapping[str, Any]) -> None:
    """Raises an error if what is wanted is not there, in shape and dtype."""
    missing = [f"{n} {list(w.shape)}" for n, w in wanted.items() if n not in shapes]
    differs = [
        f"{n}: {dtypes[n].name} {list(shapes[n])} in the file, "
        f"{w.dtype.name} {list(w.shape)} in the program"
        for n, w in wanted.items()
        if n in shapes and (tuple(shapes[n]) != w.shape or dtypes[n] != w.dtype)
    ]
    if not missing and not differs:
        return
    extra = [f"{n} {list(shapes[n])}" for n in sorted(shapes) if n not in wanted]
    raise CheckpointError(
        f"checkpoint {path} is not of this program; no variable was changed."
        + _list("Missing in the file", missing)
        + _list("Of another shape or dtype", differs)
        + _list("In the file only", extra)
        + "\nBuild the program with the dimensions and names it was saved with, or restore the "
        "variables that match with mtf.checkpoint.Saver(var_list)"
    )


def _check_files(path: str) -> None:
    """Raises an error if one of the data files is not there."""
    directory, name = os.path.split(path)
    found = [f for f in tf.io.gfile.listdir(directory or ".")
             if re.fullmatch(re.escape(name) + r"\.data-\d{5}-of-\d{5}", f)]
    counts = {int(f[-5:]) for f in found}
    if not found or len(found) != max(counts):
        number = f" of {max(counts)}" if counts else ""
        raise CheckpointError(
            f"checkpoint {path} has {len(found)}{number} data files: {', '.join(found) or 'none'}."
            f"{_others(path, 'Other checkpoints')}"
        )


def _check_data(path: str, wanted: Mapping[str, Wanted]) -> None:
    """Raises an error if the data of a variable cannot be read."""
    damaged, reason = [], ""
    with tf.Graph().as_default(), tf.Session() as session:
        # By the operation that restores; the reader in Python may abort on damaged slices.
        for name, (_, dtype) in wanted.items():
            read = tf.raw_ops.RestoreV2(
                prefix=path, tensor_names=[name], shape_and_slices=[""], dtypes=[dtype])
            try:
                session.run(tf.group(read))
            except tf.errors.OpError as e:
                damaged.append(name)
                reason = reason or _first_line(e.message)
    if damaged:
        raise CheckpointError(
            f"the data of checkpoint {path} is damaged or cut short ({reason}); no variable was "
            f"changed.{_list('Variables that cannot be read', damaged)}"
            f"\n  {_others(path, 'Other checkpoints').strip()}"
        )


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0].rstrip(".")


def _list(title: str, lines: list[str]) -> str:
    if not lines:
        return ""
    more = [f"... and {len(lines) - _LONGEST_LIST} more"] if len(lines) > _LONGEST_LIST else []
    shown = "".join(f"\n    {line}" for line in lines[:_LONGEST_LIST] + more)
    return f"\n  {title} ({len(lines)}):{shown}"


def _others(path: str, title: str) -> str:
    """Returns a sentence about what else there is in the directory."""
    directory, name = os.path.split(path)
    try:
        files = tf.io.gfile.listdir(directory or ".")
    except tf.errors.NotFoundError:
        return f" There is no directory {directory!r}"
    stems = [f[: -len(".index")] for f in files if f.endswith(".index")]
    others = sorted((s for s in stems if s != name), key=_by_step)
    if not others:
        return f" There is no other in {directory or '.'}"
    return f" {title} in {directory or '.'}: {', '.join(others[-_LONGEST_LIST:])}"


def _by_step(stem: str) -> tuple[int, str]:
    number: Optional[re.Match] = re.search(r"-(\d+)$", stem)
    return (int(number.group(1)) if number else -1, stem)
