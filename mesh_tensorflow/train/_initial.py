"""Weights that a run begins with, or that are used: of a checkpoint, or arrays."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, Optional, Union

import numpy as np

from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._mesh.variables.checkpoint_files import Part, write_parts
from mesh_tensorflow.checkpoint import choose_initial, init_from_checkpoint

__all__ = ["Initial", "InitialLike", "opened_initial"]

Names = Union[Mapping[str, Optional[str]], Callable[[str], Optional[str]]]
# The path of a checkpoint or a directory; such a path and names; or arrays by name.
InitialLike = Union[str, "os.PathLike[str]", tuple[Any, Names], Mapping[str, Any]]


class Initial(NamedTuple):
    """Weights in a file.

    Attributes:
      path: the path of the checkpoint.
      names: the names there, by those in the model, which the others have there too; None for a
        variable that is not there. Or a function of the name.
      strict: whether the file has to have exactly the weights of the model.
    """

    path: str
    names: Names
    strict: bool

    def name_of(self, name: str) -> Optional[str]:
        """Returns the name of a variable in the file; None if it is not taken from there.

        Args:
          name: its name in the model.
        """
        return self.names(name) if callable(self.names) else self.names.get(name, name)

    def load(
        self,
        variables: Mapping[str, Any],
        trained: Collection[str],
        averages: Mapping[str, Any],
    ) -> None:
        """Has variables initialized with their values in the file; those in eager code are set.

        Args:
          variables: the tf variables of the model, without slots and the like, by name.
          trained: the names of those that are trained.
          averages: the moving averages of weights, which begin as these, by their names.
        """
        unknown = set() if callable(self.names) else set(self.names) - set(variables)
        if unknown:
            raise ValueError(
                f"fit: init_checkpoint names {', '.join(sorted(unknown))}, which the model does "
                f"not have; it has {', '.join(sorted(variables))}"
            )
        there = {n: other for n in variables if (other := self.name_of(n)) is not None}
        found = choose_initial(
            "fit: init_checkpoint",
            self.path,
            {other: variables[n] for n, other in there.items()},
            [other for n, other in there.items() if n in trained],
            self.strict,
            "give a pair (path, {name in the model: name in the checkpoint}), with None for "
            "what is to begin anew",
        )
        init_from_checkpoint(self.path, found)
        for n, other in there.items():  # one value for several variables takes several calls
            same = [variables[n]] if variables[n] is not found.get(other) else []
            for variable in [*same, *([averages[n]] if n in averages else [])]:
                if other in found:
                    init_from_checkpoint(self.path, {other: variable})


def _has_text(given: Mapping[str, Any]) -> bool:
    return any(v is None or isinstance(v, str) for v in given.values())


@contextlib.contextmanager
def opened_initial(
    given: Optional[InitialLike], strict: bool = False, what: str = "fit: init_checkpoint"
) -> Iterator[Any]:
    """Context with an Initial, or None; files of arrays are removed at its end.

    Args:
      given: what the user gave.
      strict: see Initial.
      what: what it is, for errors.

    Raises:
      ValueError: there is no checkpoint, or it is something else.
    """
    names: Names = {}
    if isinstance(given, tuple) and len(given) == 2:
        given, names = given
    if given is None:
        yield None
    elif isinstance(given, (str, os.PathLike)):
        yield Initial(checkpoint_files.find(given, what), names, strict)
    elif isinstance(given, Mapping) and given and not _has_text(given):
        # As a checkpoint of their own: then there is one way to load, part by part and with the
        # same checks.
        with tempfile.TemporaryDirectory(prefix="mesh_tensorflow-arrays-") as directory:
            path = os.path.join(directory, "model.ckpt-0")
            write_parts(path, [Part(n, "", np.asarray(v)) for n, v in given.items()])
            yield Initial(path, names, strict)
    else:
        raise ValueError(
            f"{what} is the path of a checkpoint or of its directory, arrays by name "
            "such as Result.variables, or a pair (path, {name in the model: name in the "
            f"checkpoint}}), but is {given!r}"
        )
