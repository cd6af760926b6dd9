"""What a directory of checkpoints holds, whatever its name and the state of its files."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Optional, Union

import tensorflow.compat.v1 as tf
from google.protobuf import text_format

from mesh_tensorflow._core.errors import reason
from mesh_tensorflow._paths import escaped, readable

__all__ = [
    "by_step",
    "check_writable",
    "exists",
    "find",
    "latest",
    "listed",
    "matching",
    "numbered",
    "open_reader",
    "record",
    "remove",
]

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


def _listed(directory: Path) -> Optional[tuple[str, list[str]]]:
    """Returns the latest checkpoint in the file `checkpoint` and all; None if it names none."""
    try:
        state = tf.train.get_checkpoint_state(os.fspath(directory))
    except (ValueError, UnicodeDecodeError):  # it is empty, or of other bytes
        return None
    return state and (state.model_checkpoint_path, list(state.all_model_checkpoint_paths))


def _here(directory: Path, path: str) -> Optional[str]:
    """Returns the path of a checkpoint, whose directory may have been moved; None without files."""
    moved = os.path.join(os.fspath(directory), os.path.basename(path))
    return next((p for p in (path, moved) if exists(p)), None)


def latest(directory: Path) -> Optional[str]:
    """Returns the latest checkpoint that a directory lists, or None, as tf.train.latest_checkpoint.

    Args:
      directory: the directory, whatever its name.
    """
    known = _listed(directory)
    return _here(directory, known[0]) if known else None


def listed(directory: Path) -> tuple[Optional[str], list[str]]:
    """Returns what the file `checkpoint` names: the latest, if it names one, and all.

    Args:
      directory: the directory.
    """
    known = _listed(directory)
    if known is None:
        return None, []
    return _here(directory, known[0]) or known[0], known[1]


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
        there = [os.path.basename(p) for p in numbered(os.path.dirname(path) or ".")]
        others = f", but {', '.join(there[-8:])}" if there else ""
        raise ValueError(
            f"{what}: there is no checkpoint at {path}{others}. Give the path of one, such as "
            "model.ckpt-1000, without what follows the number, or a directory, for its latest"
        )
    found = latest(path)
    if found is None:
        there = [os.path.basename(p) for p in numbered(path)]
        which = (
            f"one of those that are there: {', '.join(there[-8:])}"
            if there
            else ("one, such as model.ckpt-1000, without what follows the number")
        )
        raise ValueError(
            f"{what}: there is no checkpoint in {path}: its file named 'checkpoint' lists none. "
            f"Give the path of {which}"
        )
    return found


def by_step(stem: str) -> tuple[int, str]:
    """Returns a key that sorts names of checkpoints by step.

    Args:
      stem: the name, such as "model.ckpt-1000".
    """
    number = re.search(r"-(\d+)$", stem)
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


def record(path: str, keep: int) -> None:
    """Lists a checkpoint as the latest of its directory, and removes the oldest that are listed.

    Args:
      path: the path of the checkpoint, whose files are complete.
      keep: how many to keep.
    """
    directory, name = os.path.split(path)
    before = [os.path.basename(p) for p in listed(directory)[1]]
    # A checkpoint that is written again becomes the latest, and is listed once.
    names = [*(n for n in before if n != name), name]  # so that the directory can be moved
    _list(directory, names[-keep:])
    for old in names[:-keep]:
        remove(os.path.join(directory, old))


def _list(directory: str, names: Sequence[str]) -> None:
    """Writes the file `checkpoint` at once."""
    state = tf.train.generate_checkpoint_state_proto(
        os.path.abspath(directory), names[-1], list(names)
    )
    written = os.path.join(directory, "checkpoint.new")
    with tf.io.gfile.GFile(written, "w") as file:
        file.write(text_format.MessageToString(state))
    tf.io.gfile.rename(written, os.path.join(directory, "checkpoint"), overwrite=True)


def remove(path: str) -> None:
    """Removes the files of a checkpoint, and of no other.

    Args:
      path: the path of the checkpoint.
    """
    directory, name = os.path.split(path)
    own = re.compile(re.escape(name) + r"(\.index|\.meta|\.data-\d{5}-of-\d{5})?")
    # The index first: what is left of a removal that was cut short is no checkpoint.
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
    exact = [escaped(p) if tf.io.gfile.exists(p) else p for p in patterns]
    return sorted(tf.io.gfile.glob(exact))
