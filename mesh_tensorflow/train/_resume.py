"""Where a run goes on from: the last checkpoint of its directory, or the last that is whole."""

from __future__ import annotations

import os
from typing import NamedTuple, Optional, Union

from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._mesh.variables.checkpoint_files import reading
from mesh_tensorflow.checkpoint import CheckpointError, check_checkpoint, fault_of, last_good

__all__ = ["LAST_GOOD", "Found", "Resume", "damaged", "find_checkpoint"]

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
    later = there[there.index(good) + 1 :]
    note = f"{_names(later)} in {directory} are damaged or have NaN, and left out" if later else ""
    return Found(good, _step_of(good), note)


def _step_of(path: str) -> int:
    """Returns the number of steps that are done in a checkpoint."""
    check_checkpoint(path, {})
    reader = checkpoint_files.open_reader(path)
    if not reader.has_tensor(_STEP):
        raise CheckpointError(
            f"fit: {path} has no {_STEP}, so it is none of fit's. Give fit another directory; to "
            "begin with its weights, name it by init_checkpoint"
        )
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
