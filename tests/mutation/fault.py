"""The row of a table of seeded faults."""

import pathlib
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = "mesh_tensorflow"


class Fault(NamedTuple):
    """An edit that makes the package wrong.

    Attributes:
      path: the file below the package.
      old: a text that occurs once in the file.
      new: what takes its place.
      what: the fault, in a line.
      finders: the tests that are likely to find it: pytest arguments, with files below tests.
    """

    path: str
    old: str
    new: str
    what: str
    finders: str

    def applied(self, root: pathlib.Path = ROOT) -> str:
        """Returns the text of the file with the fault.

        Raises:
          ValueError: the old text is not there once.
        """
        text = (root / PACKAGE / self.path).read_text(encoding="utf-8")
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.path} has {self.old!r} {count} times; it must be there once")
        return text.replace(self.old, self.new)
