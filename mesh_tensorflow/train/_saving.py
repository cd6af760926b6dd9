"""Weights that a run begins with, and its checkpoints: it goes on from the last one.

They are written at once or by a thread; the last ones and the best stay.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python.client.session import SessionInterface

from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._mesh.variables.checkpoint_files import reading
from mesh_tensorflow._mesh.variables.given_values import has_parts
from mesh_tensorflow._paths import write_whole
from mesh_tensorflow._progress import Progress
from mesh_tensorflow.checkpoint import (
    CheckpointError,
    Resize,
    check_checkpoint,
    choose_initial,
    fault_of,
    init_from_checkpoint,
    init_from_values,
    last_good,
)
from mesh_tensorflow.estimator.export import MODES, is_better
from mesh_tensorflow.train.callbacks import metric_of, read_json

_NAMED = 6  # variables in a message
# The lowest priority, in the numbers of the command `nice`. A step that waits for a core gets it at
# once, and steps leave enough time between their operations to write in.
_NICE = 19


class NotANumberError(ValueError, ArithmeticError):
    """The loss, or weights that would be saved, are not numbers, or infinite.

    >>> issubclass(mtf.train.NotANumberError, ValueError)
    True
    """


def not_a_number(what: str, last: Optional[str]) -> NotANumberError:
    """Returns the error for a run that makes values which are not numbers.

    Args:
      what: what is not a number, and when.
      last: the path of the last checkpoint, or None.
    """
    saved = f"The last checkpoint is {last}; no weights were saved since then. " if last else ""
    return NotANumberError(
        f"{what}. {saved}Run the step within mtf.debug.nan_checks() to see which operation made "
        "the first value that is not a number; often a smaller learning rate or clip_norm helps"
    )


def weights_not_numbers(step: int, wrong: Sequence[str]) -> str:
    """Returns what is wrong after a step that makes such weights, though its loss was a number."""
    return (
        f"after step {step}, whose loss was a finite number, {', '.join(wrong[:_NAMED])}"
        f"{', ...' if wrong[_NAMED:] else ''} are not numbers, or infinite"
    )


# -- what a run begins with, or goes on from

Names = Union[Mapping[str, Optional[str]], Callable[[str], Optional[str]]]
# The path of a checkpoint or a directory; such a path and names; or arrays by name.
InitialLike = Union[str, "os.PathLike[str]", tuple[Any, Names], Mapping[str, Any]]


class Initial(NamedTuple):
    """Weights to begin with: in a file, or arrays.

    Attributes:
      path: the path of the checkpoint; of arrays, what they are.
      names: the names there, by those in the model, which the others have there too; None for a
        variable that is not there. Or a function of the name.
      strict: whether the file has to have exactly the weights of the model.
      resize: which dimensions may have another size than in the file, or None.
      values: arrays by name, in place of a file.
      progress: counts what is read of them; or None.
      say: is told which variables are loaded, resized and so on; or None.
    """

    path: str
    names: Names
    strict: bool
    resize: Optional[Resize] = None
    values: Optional[Mapping[str, Any]] = None
    progress: Optional[Progress] = None
    say: Optional[Callable[[str], None]] = None

    def name_of(self, name: str) -> Optional[str]:
        """Returns the name of a variable in the file; None if it is not taken from there."""
        return self.names(name) if callable(self.names) else self.names.get(name, name)

    def load(
        self,
        variables: Mapping[str, Any],
        trained: Collection[str],
        averages: Mapping[str, Any],
        dims: Mapping[str, Sequence[str]],
    ) -> None:
        """Has variables initialized with their values in the file; those in eager code are set.

        Args:
          variables: the tf variables of the model, without slots and the like, by name.
          trained: the names of those that are trained.
          averages: the moving averages of weights, which begin as these, by their names.
          dims: the names of the dimensions of each variable, by its name.
        """
        unknown = set() if callable(self.names) else set(self.names) - set(variables)
        # One that is mistyped would be ignored otherwise, and its variable begin anew.
        if unknown:
            raise ValueError(
                f"fit: init_checkpoint names {', '.join(sorted(unknown))}, which the model does "
                f"not have; it has {', '.join(sorted(variables))}"
            )
        names = {n: other for n in variables if (other := self.name_of(n)) is not None}
        chosen = choose_initial(
            "fit: init_checkpoint",
            self.path,
            {other: variables[n] for n, other in names.items()},
            [other for n, other in names.items() if n in trained],
            self.strict,
            "give a pair (path, {name in the model: name in the checkpoint}), with None for "
            "what is to begin anew, or name dimensions that may have other sizes by init_resize "
            "and init_shrink",
            resize=self.resize,
            dims={other: dims[n] for n, other in names.items() if n in dims},
            values=self.values,
            say=self.say,
        )
        # With averages, which evaluations use: these would otherwise begin with the initial values
        # that the weights no longer have.
        pairs = [
            (other, of[n])
            for n, other in names.items()
            if other in chosen
            for of in (variables, averages)
            if n in of
        ]
        self._init(pairs, resize=self.resize is not None)

    def load_all(self, variables: Mapping[str, Any]) -> None:
        """Has all of some variables initialized with their values in the file.

        Args:
          variables: tf variables of a graph, by name.

        Raises:
          CheckpointError: it lacks some, or they have other shapes, or it is damaged.
        """
        names = self._check_all(variables)
        self._init([(names[n], v) for n, v in variables.items()])

    def _init(self, pairs: Sequence[tuple[str, Any]], resize: bool = False) -> None:
        """Has variables initialized; takes pairs of a name in the file and a variable."""
        if self.values is None:
            init_from_checkpoint(self.path, pairs, resize=resize)
        else:
            init_from_values(self.values, pairs, self.progress)

    def read_all(self, variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns the values of variables in the file, by name, as `load_all` finds them.

        Args:
          variables: tf variables, by name.

        Raises:
          CheckpointError: it lacks some, or they have other shapes, or it is damaged.
        """
        names = self._check_all(variables)
        if self.values is not None:
            return {n: np.asarray(self.values[names[n]]) for n in variables}
        reader = checkpoint_files.open_reader(self.path)
        return {n: reader.get_tensor(names[n]) for n in variables}

    def _check_all(self, variables: Mapping[str, Any]) -> dict[str, str]:
        """Returns the name there of each variable, once all of them have been found."""
        names = {n: self.name_of(n) or n for n in variables}
        expected = {names[n]: v for n, v in variables.items()}
        check_checkpoint(self.path, expected, read=True, values=self.values)
        return names


def _has_text(given: Mapping[str, Any]) -> bool:
    # What is read from a file part by part has none, and would be read as a whole here.
    return not has_parts(given) and any(v is None or isinstance(v, str) for v in given.values())


def initial_of(
    given: Optional[InitialLike],
    strict: bool = False,
    what: str = "fit: init_checkpoint",
    resize: Optional[Resize] = None,
) -> Optional[Initial]:
    """Returns the Initial of what the user gave; None if that is None.

    Args:
      given: what the user gave.
      strict: see Initial.
      what: what it is, for errors.
      resize: see Initial.

    Raises:
      ValueError: there is no checkpoint, or it is something else.
    """
    names: Names = {}
    if isinstance(given, tuple) and len(given) == 2:
        given, names = given
    if given is None:
        return None
    if isinstance(given, (str, os.PathLike)):
        return Initial(checkpoint_files.find(given, what), names, strict, resize)
    if isinstance(given, Mapping) and given and not _has_text(given):
        return Initial("(arrays)", names, strict, resize, given)
    raise ValueError(
        f"{what} is the path of a checkpoint or of its directory, arrays by name "
        "such as Result.variables, or a pair (path, {name in the model: name in the "
        f"checkpoint}}), but is {given!r}"
    )


LAST_GOOD = "last_good"
Resume = Union[bool, str]
_STEP = "global_step"
_SHOWN = 8


class ResumePoint(NamedTuple):
    """A checkpoint to go on from.

    Attributes:
      path: its path.
      step: the number of steps that are done in it.
      note: what a user has to know about the choice, or "".
    """

    path: str
    step: int
    note: str = ""


def find_checkpoint(directory: Optional[str], resume: Resume) -> Optional[ResumePoint]:
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
    numbered = checkpoint_files.numbered(directory)
    if resume == LAST_GOOD:
        return _last_good(directory, numbered)
    listed, _ = checkpoint_files.listed(directory)
    last, note = listed, ""
    if last is None and numbered:  # a list that is missing is no reason to write over them
        last = numbered[-1]
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
        return ResumePoint(last, _step_of(last), note)
    except (CheckpointError, OSError) as e:
        fault = fault_of(last, nan_too=False)
        # The file is whole: the error itself says what is wrong, as of one that is none of fit's.
        if not fault:
            raise
        raise damaged(last, fault) from e


def _last_good(directory: str, there: list[str]) -> Optional[ResumePoint]:
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
    return ResumePoint(good, _step_of(good), note)


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
    with reading(path) as values:
        return int(values.read(_STEP, "", reader.get_variable_to_dtype_map()[_STEP]))


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


# -- the best one


class Best:
    """The checkpoint with the best value of a metric of evaluations.

    A file beside the checkpoints has each one that has been the best, so that a run which goes on
    from an earlier one of them knows what was the best until then.
    """

    def __init__(self, given: str):
        """Creates a Best of no evaluations.

        Args:
          given: the metric, and which values are better, such as "accuracy:max".

        Raises:
          ValueError: it is something else.
        """
        metric, _, mode = given.rpartition(":") if isinstance(given, str) else ("", "", "")
        self.metric, self._mode = ("loss", "min") if given == "loss" else (metric, mode)
        if not self.metric or self._mode not in MODES:
            raise ValueError(
                f'fit: keep_best is "loss", whose least value is the best, or a metric of '
                f'evaluations with ":max" or ":min", such as "accuracy:max", but is {given!r}'
            )
        # The step, the value and the name of each checkpoint that has been the best, in order.
        self._judged: list[tuple[int, float, str]] = []

    @property
    def _key(self) -> str:
        return f"{self._mode} {self.metric}"

    def begin(self, directory: str, step: int) -> None:
        """Goes on from what earlier evaluations have shown, up to a step.

        Args:
          directory: where the checkpoints are.
          step: the number of steps that are done; what was evaluated later does not count.
        """
        self._directory = directory
        earlier = read_json(self._path).get(self._key, [])
        self._judged = [
            (at, value, name)
            for at, value, name in earlier
            if at <= step and checkpoint_files.exists(os.path.join(directory, name))
        ]

    @property
    def _path(self) -> str:
        return os.path.join(self._directory, "best.json")

    def is_beaten(self, values: Mapping[str, float]) -> bool:
        """Returns whether an evaluation is better than those of all checkpoints before.

        Raises:
          ValueError: they lack the metric.
        """
        best = self._judged[-1][1] if self._judged else None
        return is_better(metric_of(values, self.metric, "fit: keep_best"), best, self._mode)

    def record(self, path: str, step: int, values: Mapping[str, float]) -> None:
        """Notes a checkpoint as the best.

        Args:
          path: the path of the checkpoint, whose files are complete.
          step: the number of steps that are done in it.
          values: the means of its evaluation.
        """
        self._judged.append((step, float(values[self.metric]), os.path.basename(path)))
        write_whole(self._path, json.dumps({self._key: self._judged}))

    @property
    def checkpoint(self) -> Optional[str]:
        """The path of the best checkpoint, or None."""
        return os.path.join(self._directory, self._judged[-1][2]) if self._judged else None


# -- writing


class InThisThread(SessionInterface):
    """A session that runs operations in the caller's thread, and so at its priority.

    Those of several devices it runs in threads of its own, as other sessions do.
    """

    def __init__(self, session: tf.Session):
        """Wraps a session."""
        self._session = session

    @property
    def graph(self) -> tf.Graph:
        """The graph."""
        return self._session.graph

    def run(
        self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
    ) -> Any:
        """Runs operations; see tf.Session."""
        options = options or tf.RunOptions(inter_op_thread_pool=-1)  # none of its pools
        return self._session.run(fetches, feed_dict, options, run_metadata)


class _Saving:
    """A checkpoint that a thread writes, while the caller goes on."""

    def __init__(self, write: Callable[[Callable[[], None]], str]):
        """Begins to write; returns when the variables are read, and may change.

        Args:
          write: writes a checkpoint, and calls its argument once the variables are read; returns
            its path.
        """
        self._read = threading.Event()
        self._path = ""
        self._error: Optional[BaseException] = None
        # A daemon: a program that is to end at once does not wait for it, and what is half written
        # is no checkpoint.
        self._thread = threading.Thread(
            target=self._run, args=(write,), name="checkpoint", daemon=True
        )
        self._thread.start()
        self._read.wait()

    def _run(self, write: Callable[[Callable[[], None]], str]) -> None:
        try:
            self._path = write(self._all_read)
        except BaseException as error:  # raised again in the thread that asks for the path
            self._error = error
        finally:
            self._read.set()

    def _all_read(self) -> None:
        """Lets the caller go on; steps come first from here on, where cores are too few."""
        # Not before: while variables are read the caller waits, and other programs may want cores.
        if sys.platform == "linux" and self._thread.native_id is not None:
            # Of a thread alone, as Linux has it; elsewhere this would be that of the program.
            os.setpriority(os.PRIO_PROCESS, self._thread.native_id, _NICE)
        self._read.set()

    @property
    def is_done(self) -> bool:
        """Whether it is written, or has failed."""
        return not self._thread.is_alive()

    def path(self) -> str:
        """Waits until it is written; returns its path, or raises the error of the thread."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._path


class Checkpoints:
    """The checkpoints of a run in a directory; one is written at a time.

    Attributes:
      last: the path of the last one that is whole, or None.
      step: the step of the last one that was begun, or None.
    """

    def __init__(
        self,
        save: Callable[..., tuple[str, list[str]]],
        directory: str,
        keep: int,
        in_background: bool,
        best: Optional[Best],
    ):
        """Creates the checkpoints of a run that has not begun.

        Args:
          save: writes the variables; see `Engine.save`.
          directory: where they are written.
          keep: the number of the last ones that stay.
          in_background: whether a thread writes them.
          best: the best one, which stays too; or None.
        """
        self._save, self._directory, self._keep = save, directory, keep
        self._in_background, self.best = in_background, best
        self._saving: Optional[_Saving] = None
        self.last: Optional[str] = None
        self.step: Optional[int] = None

    def begin(self, step: int, values: Optional[Mapping[str, float]] = None) -> Optional[str]:
        """Saves the variables as they are now, none being written; may return before that is done.

        Args:
          step: the number of steps that are done.
          values: the means of an evaluation, if it was the best; or None.

        Returns:
          The path of the checkpoint; None if a thread writes it.
        """
        self.step = step
        write = functools.partial(self._write, step, values)
        if not self._in_background:
            self.last = write(None)
            return self.last
        self._saving = _Saving(write)
        return None

    def ended(self, wait: bool) -> Optional[str]:
        """Returns the path of the checkpoint that was being written, once; None if there is none.

        Args:
          wait: whether to wait for it.

        Raises:
          CheckpointError: it could not be written.
          NotANumberError: it has values that are not numbers.
        """
        if self._saving is None or not (wait or self._saving.is_done):
            return None
        saving, self._saving = self._saving, None
        self.last = saving.path()
        return self.last

    def record_best(self, values: Mapping[str, float]) -> None:
        """Notes the last checkpoint as the best."""
        assert self.best is not None and self.last is not None and self.step is not None
        self.best.record(self.last, self.step, values)
        checkpoint_files.record(self.last, self._keep, self.last)

    def _write(
        self,
        step: int,
        values: Optional[Mapping[str, float]],
        when_read: Optional[Callable[[], None]],
    ) -> str:
        """Writes a checkpoint, whole, and lists it."""
        tf.gfile.MakeDirs(self._directory)
        path, wrong = self._save(self._directory, step, when_read)
        # Removed, and not listed: a run that is resumed would go on from weights that are lost.
        if wrong:
            checkpoint_files.remove(path)
            raise not_a_number(weights_not_numbers(step, wrong), self.last)
        # First: a run that is killed before it is listed comes to this evaluation again.
        if values is not None and self.best is not None:
            self.best.record(path, step, values)
        # Last, as this removes the oldest: the new one might have been of no use.
        best = None if self.best is None else self.best.checkpoint
        checkpoint_files.record(path, self._keep, best)
        return path
