"""Follower: carries out, in every process but the first, what the first one tells it to do.

Only the first process has a session. It tells the others to define programs, run them and save
their variables, one message after another; `CALLS` has the method for each kind of message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow.pjrt._sessions.executor import Description, Executor
from mesh_tensorflow.pjrt._sessions.parts import own_parts
from mesh_tensorflow.pjrt._sessions.saving import faults_here, restore_here, write_here
from mesh_tensorflow.pjrt._sessions.wire import Message

__all__ = ["CALLS", "FAILED", "SIGNAL", "Follower"]

FAILED, SIGNAL = "failed", "signal"  # beside answers

Answer = tuple[Any, Sequence[np.ndarray]]
_NOTHING: Answer = (None, ())


class Follower:
    """Does what the chief asks for, on the devices of this process."""

    def __init__(self) -> None:
        """Begins without programs."""
        self._executor = Executor()

    def answer(self, message: Message) -> Message:
        """Does what a message says, and returns the answer.

        Args:
          message: one of CALLS.
        """
        try:
            values, arrays = CALLS[message.call](self, message)
        except Exception as error:
            # The chief raises it, unless it has the same error itself.
            return Message(FAILED, f"{type(error).__name__}: {error}")
        return Message(message.call, values, arrays)

    def define(self, message: Message) -> Answer:
        """Adds a program.

        Args:
          message: its number and description; its operations.
        """
        number, described = message.values
        graph_def = tf.GraphDef.FromString(message.arrays[0].tobytes())
        self._executor.define(number, Description.of_plain(described), graph_def)
        return _NOTHING

    def forget(self, message: Message) -> Answer:
        """Removes a program.

        Args:
          message: its number.
        """
        self._executor.forget(message.values)
        return _NOTHING

    def run(self, message: Message) -> Answer:
        """Does a step.

        Args:
          message: the number of the program; its arguments.
        """
        self._executor.run(message.values, message.arrays)
        return _NOTHING

    def assign(self, message: Message) -> Answer:
        """Sets a variable.

        Args:
          message: the number of the program and the name; the whole value.
        """
        number, name = message.values
        self._executor.assign(number, name, message.arrays[0])
        return _NOTHING

    def read(self, message: Message) -> Answer:
        """Returns the parts of a variable that this process has, copies once over all processes.

        Args:
          message: the number of the program and the name.
        """
        parts = own_parts(self._executor.current(*message.values))
        return [begin for begin, _ in parts], [value for _, value in parts]

    def write(self, message: Message) -> Answer:
        """Writes the parts of variables that this process has to a file; returns its path, or None.

        Args:
          message: the beginning of the path; the variables.
        """
        return write_here(self._executor, *message.values), ()

    def restore(self, message: Message) -> Answer:
        """Sets variables to what a checkpoint has.

        Args:
          message: the path; the variables.
        """
        restore_here(self._executor, *message.values)
        return _NOTHING

    def faults(self, message: Message) -> Answer:
        """Returns what is wrong with the data of this process' parts in a checkpoint.

        Args:
          message: the path; the variables.
        """
        return faults_here(self._executor, *message.values), ()


CALLS: dict[str, Callable[[Follower, Message], Answer]] = {
    "define": Follower.define,
    "forget": Follower.forget,
    "run": Follower.run,
    "assign": Follower.assign,
    "read": Follower.read,
    "write": Follower.write,
    "restore": Follower.restore,
    "faults": Follower.faults,
}
