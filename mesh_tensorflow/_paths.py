"""Paths that TensorFlow would take for patterns, such as the directory "lr[0.1]"; whole files."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import Optional, Union

import tensorflow.compat.v1 as tf

__all__ = ["escaped", "new_directory", "readable", "write_whole", "written_whole"]

_SPECIAL = re.compile(r"[*?\[\\]")
# Those with which a pattern does not match itself; "*" and "?" do.
_NOT_ITSELF = re.compile(r"[\[\\]")


def escaped(path: Union[str, os.PathLike[str]]) -> str:
    r"""Returns the pattern of `tf.io.gfile.glob` that this path alone matches.

    Args:
      path: the path.

    >>> print(escaped("runs/lr[0.1]"))
    runs/lr\[0.1]
    """
    return _SPECIAL.sub(lambda found: "\\" + found[0], os.fspath(path))


def readable(path: Union[str, os.PathLike[str]]) -> str:
    """Returns a path at which operations and readers of TensorFlow find a checkpoint.

    They look for files that match the path before they read those of this name, so a checkpoint
    with a bracket in its path is not found. Such a one is read through a link, which this process
    removes at its end.

    Args:
      path: the path of a checkpoint.
    """
    path = os.fspath(path)
    if not _NOT_ITSELF.search(path) or "://" in path:
        return path
    directory, name = os.path.split(os.path.abspath(path))
    # The key tells the directory, so that a second checkpoint there has the same link.
    key = hashlib.sha256(directory.encode()).hexdigest()[:16]
    link = os.path.join(_links(os.getpid()), key)
    # Where only the directory has a bracket, one link serves all of its checkpoints. Otherwise the
    # files themselves need other names.
    if not _NOT_ITSELF.search(name):
        if not os.path.islink(link):
            os.symlink(directory, link)
        return os.path.join(link, name)
    plain = hashlib.sha256(name.encode()).hexdigest()[:16]
    os.makedirs(f"{link}-files", exist_ok=True)
    for file in os.listdir(f"{link}-files"):  # of a checkpoint that may have been written anew
        if file.startswith(f"{plain}."):
            os.remove(os.path.join(f"{link}-files", file))
    for file in os.listdir(directory) if os.path.isdir(directory) else []:
        if file.startswith(f"{name}."):
            target = os.path.join(f"{link}-files", plain + file[len(name) :])
            os.symlink(os.path.join(directory, file), target)
    return os.path.join(f"{link}-files", plain)


# By the number of the process, so that a forked one makes a directory of its own.
@functools.cache
def _links(pid: int) -> str:
    """Returns a directory of this process for links."""
    folder = tempfile.mkdtemp(prefix="mesh_tensorflow-links-")

    def remove() -> None:
        if os.getpid() == pid:  # a forked process has the same exit handlers
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def write_whole(path: str, text: str, temporary: Optional[str] = None) -> None:
    """Writes a file that a process which is killed leaves as it was before, or whole.

    Args:
      path: the path of the file.
      text: its content.
      temporary: where it is written first, on the same file system; beside it if None. Processes
        that write the file at the same time need places of their own.
    """
    temporary = f"{path}.new" if temporary is None else temporary
    with tf.io.gfile.GFile(temporary, "w") as file:
        file.write(text)
    # Otherwise the renamed file could be empty after a crash of the machine.
    if os.path.exists(temporary):
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    tf.io.gfile.rename(temporary, path, overwrite=True)


@contextlib.contextmanager
def new_directory(path: str, temporary: str) -> Iterator[None]:
    """Context that writes a directory: it gets its name at the end, and goes after an error.

    Args:
      path: the path of the directory, where nothing may be at the end.
      temporary: where it is written, on the same file system.
    """
    try:
        yield
        tf.io.gfile.rename(temporary, path)
    finally:
        # Also after an interrupt: a second attempt would find files in its way.
        if tf.io.gfile.exists(temporary):
            tf.io.gfile.rmtree(temporary)


@contextlib.contextmanager
def written_whole(directory: str, last: str) -> Iterator[str]:
    """Context with a folder whose files become those of a directory at the end, each of them whole.

    A program that ends before that leaves the files of the directory as they are.

    Args:
      directory: a string; created if it does not exist.
      last: the file that comes last, as it tells that the others are there.
    """
    os.makedirs(directory, exist_ok=True)
    # On the same file system, where a file is moved at once.
    with tempfile.TemporaryDirectory(dir=directory, prefix=".new-") as folder:
        yield folder
        paths = [os.path.join(root, name) for root, _, names in os.walk(folder) for name in names]
        for file in sorted(paths, key=lambda file: (os.path.basename(file) == last, file)):
            place = os.path.join(directory, os.path.relpath(file, folder))
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.replace(file, place)
