"""Checkpoints of a run: written at once or by a thread; the last ones and the best stay."""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

import tensorflow.compat.v1 as tf
from tensorflow.python.client.session import SessionInterface

from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._paths import write_whole
from mesh_tensorflow.estimator.export import MODES, is_better
from mesh_tensorflow.train.callbacks import metric_of, read_json

if TYPE_CHECKING:
    from mesh_tensorflow.train._engine import Engine

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
    """Returns what is wrong after a step that makes such weights, though its loss was a number.

    Args:
      step: the number of the step.
      wrong: the names of the weights.
    """
    return (
        f"after step {step}, whose loss was a finite number, {', '.join(wrong[:_NAMED])}"
        f"{', ...' if wrong[_NAMED:] else ''} are not numbers, or infinite"
    )


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
        known = read_json(self._path).get(self._key, [])
        self._judged = [
            (at, value, name)
            for at, value, name in known
            if at <= step and checkpoint_files.exists(os.path.join(directory, name))
        ]

    @property
    def _path(self) -> str:
        return os.path.join(self._directory, "best.json")

    def is_beaten(self, values: Mapping[str, float]) -> bool:
        """Returns whether an evaluation is better than those of all checkpoints before.

        Args:
          values: the means of the evaluation.

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
        self, engine: Engine, directory: str, keep: int, in_background: bool, best: Optional[Best]
    ):
        """Creates the checkpoints of a run that has not begun.

        Args:
          engine: what has the variables.
          directory: where they are written.
          keep: the number of the last ones that stay.
          in_background: whether a thread writes them.
          best: the best one, which stays too; or None.
        """
        self._engine, self._directory, self._keep = engine, directory, keep
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
        """Notes the last checkpoint as the best.

        Args:
          values: the means of its evaluation.
        """
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
        path, wrong = self._engine.save(self._directory, step, when_read)
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
