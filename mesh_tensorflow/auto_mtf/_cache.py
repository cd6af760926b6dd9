"""What was measured on this machine, kept in files for later runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._processes.peers import Exchange, alone


class Cache:
    """A JSON file of values by keys; every program of a user may write it."""

    def __init__(self, name: str, path: Optional[str] = None):
        """Names a file; nothing is read or written.

        Args:
          name: its name in ~/.cache/mesh_tensorflow.
          path: the path of another one; "" for none.
        """
        root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        usual = os.path.join(root, "mesh_tensorflow", name)
        self.path = usual if path is None else os.path.expanduser(path)

    def read(self, key: str) -> dict[str, Any]:
        """Returns the value of a key, a dictionary; an empty one if there is none."""
        return self._read_file().get(key, {})

    def known_or(
        self,
        key: str,
        find: Callable[[], dict[str, Any]],
        exchange: Exchange = alone,
        is_first: bool = True,
    ) -> tuple[dict[str, Any], bool]:
        """Returns the value of a key, and whether it was known; if not, it is found, and kept.

        Args:
          key: a string.
          find: returns the value, a dictionary that JSON can hold.
          exchange: tells what all processes say, if they find it together.
          is_first: whether this is the first of them, whose cache counts for all.
        """
        if cached := exchange(self.read(key))[0]:
            return cached, True
        value = find()
        if is_first:
            self.keep(key, value)
        return value, False

    def keep(self, key: str, value: dict[str, Any]) -> None:
        """Sets the value of a key, in a whole new file: other programs may read it meanwhile.

        Args:
          key: a string.
          value: a dictionary that JSON can hold.
        """
        if not self.path:
            return
        try:
            os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
            written = f"{self.path}.{os.getpid()}"
            with open(written, "w", encoding="utf-8") as f:
                json.dump({**self._read_file(), key: value}, f, indent=1)
            os.replace(written, self.path)
        except OSError as e:
            tf.logging.warning("What was measured is not kept: %s", e)

    def _read_file(self) -> dict[str, Any]:
        try:
            with open(self.path, encoding="utf-8") as f:
                content = json.load(f)
        except (OSError, ValueError):  # a cache is written anew, whatever has become of it
            return {}
        return content if isinstance(content, dict) else {}
