"""What a training begins with: initial values, or the checkpoint that it goes on from."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, Optional, Union

import numpy as np

from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._mesh.variables.checkpoint_files import Shard, reading, write_parts
from mesh_tensorflow.checkpoint import (
    CheckpointError,
    check_checkpoint,
    choose_initial,
    fault_of,
    init_from_checkpoint,
    last_good,
)

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
        # One that is mistyped would be ignored otherwise, and its variable begin anew.
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
            # Evaluations use the averages, which would otherwise begin with the initial values that
            # the weights no longer have.
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
            write_parts(path, [Shard(n, "", np.asarray(v)) for n, v in given.items()])
            yield Initial(path, names, strict)
    else:
        raise ValueError(
            f"{what} is the path of a checkpoint or of its directory, arrays by name "
            "such as Result.variables, or a pair (path, {name in the model: name in the "
            f"checkpoint}}), but is {given!r}"
        )


LAST_GOOD = "last_good"
Resume = Union[bool, str]
_STEP = "global_step"
_SHOWN = 8


class Found(NamedTuple):
    """A checkpoint to go on from.

    Attributes:
      path: its path.
      step: the number of steps that are done in it.
      note: what a user has to know about the choice, or "".
    """

    path: str
    step: int
    note: str = ""


def find_checkpoint(directory: Optional[str], resume: Resume) -> Optional[Found]:
    """Returns the checkpoint that a run goes on from; None if it begins.

    Args:
      directory: where checkpoints are, or None.
      resume: whether to go on; or LAST_GOOD for the last one that is whole.

    Raises:
      CheckpointError: the last checkpoint is damaged, or, with LAST_GOOD, all of them.
      ValueError: `resume` is something else.
    """
    if not isinstance(resume, bool) and resume != LAST_GOOD:
        raise ValueError(f"fit: resume is True, False or {LAST_GOOD!r}, but is {resume!r}")
    if directory is None or not resume:
        return None
    there = checkpoint_files.numbered(directory)
    if resume == LAST_GOOD:
        return _last_good(directory, there)
    listed, _ = checkpoint_files.listed(directory)
    last, note = listed, ""
    if last is None and there:  # a list that is missing is no reason to write over them
        last = there[-1]
        note = (
            f"the file 'checkpoint' of {directory} is missing or cut; the checkpoint there of most "
            f"steps is {os.path.basename(last)}"
        )
    if last is None:
        return None
    # No older one instead: a user who is not told would take the steps in between for done.
    if not checkpoint_files.exists(last):
        good = last_good(directory)
        instead = f"go on from {good} with resume={LAST_GOOD!r}, " if good else ""
        raise CheckpointError(
            f"fit: the last checkpoint of {directory} is {last}, whose files are missing. Bring "
            f"them back, name another checkpoint in the file 'checkpoint' there, {instead}or begin "
            "anew with resume=False"
        )
    try:
        return Found(last, _step_of(last), note)
    except (CheckpointError, OSError) as e:
        fault = fault_of(last, nan_too=False)
        # The file is whole: the error itself says what is wrong, as of one that is none of fit's.
        if not fault:
            raise
        raise damaged(last, fault) from e


def _last_good(directory: str, there: list[str]) -> Optional[Found]:
    good = last_good(directory)
    if good is None and there:
        raise CheckpointError(
            f"fit: no checkpoint in {directory} is whole: {_names(there)} are damaged or have NaN. "
            "Begin anew with resume=False, which writes over them"
        )
    if good is None:
        return None
    # Checkpoints are sorted by step, so those after a whole one are what this run writes over.
    later = there[there.index(good) + 1 :]
    note = f"{_names(later)} in {directory} are damaged or have NaN, and left out" if later else ""
    return Found(good, _step_of(good), note)


def _step_of(path: str) -> int:
    """Returns the number of steps that are done in a checkpoint."""
    # With no variables to compare, it still reads the index and looks for all files.
    check_checkpoint(path, {})
    reader = checkpoint_files.open_reader(path)
    if not reader.has_tensor(_STEP):
        raise CheckpointError(
            f"fit: {path} has no {_STEP}, so it is none of fit's. Give fit another directory; to "
            "begin with its weights, name it by init_checkpoint"
        )
    # Not by TensorFlow's reader in Python, which may abort the process on damaged slices.
    with reading(path) as found:
        return int(found.read(_STEP, "", reader.get_variable_to_dtype_map()[_STEP]))


def damaged(path: str, fault: str) -> CheckpointError:
    """Returns the error for a last checkpoint that cannot be restored.

    Args:
      path: the path of the checkpoint.
      fault: what is wrong with it.
    """
    directory = os.path.dirname(path) or "."
    good = last_good(directory)
    if good is None:
        mend = "None there is whole: begin anew with resume=False, which writes over them"
    else:
        mend = (
            f"The last whole one is {os.path.basename(good)}: fit(..., resume={LAST_GOOD!r}) goes "
            "on from it, and writes over those after it"
        )
    return CheckpointError(
        f"fit: the last checkpoint of {directory}, {os.path.basename(path)}, cannot be restored. "
        f"{mend}.\n{fault}"
    )


def _names(paths: list[str]) -> str:
    more = f"{len(paths) - _SHOWN} more, " if len(paths) > _SHOWN else ""
    return more + ", ".join(map(os.path.basename, paths[-_SHOWN:]))
