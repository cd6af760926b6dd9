"""Several processes of one run, each of which computes for its own processors."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Mapping
from typing import Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._processes.peers import POLL_SECONDS
from mesh_tensorflow._processes.processes import Processes, check_described, processes
from mesh_tensorflow._stop_signals import StopSignals

__all__ = ["Agreement", "Cluster", "check_connected", "find_cluster"]

_NEVER = 2**62

_found: list[Cluster] = []  # the one of this process, whose server lasts as long as it


class Cluster:
    """The processes of a run, and the server of this one.

    Attributes:
      processes: the Processes.
      per_process: the number of logical CPUs of each.
    """

    def __init__(self, found: Processes, per_process: int):
        """Starts the server of this process, and waits for those of the others.

        Args:
          found: the Processes.
          per_process: the number of logical CPUs of each.
        """
        self.processes, self.per_process = found, per_process
        self._server = found.start_server(per_process)

        self._runs = 0
        self._finished = False
        # A process that ends early would take its slices away from the others.
        atexit.register(self._at_exit)

    @property
    def is_chief(self) -> bool:
        """Whether this process saves, logs and reports."""
        return self.processes.is_chief

    @property
    def devices(self) -> list[str]:
        """The devices of all processes, in order."""
        return self.processes.devices(per_process=self.per_process)

    @property
    def local(self) -> list[int]:
        """The numbers of the processors of this process."""
        return self.processes.local(self.per_process)

    def session(self, graph: tf.Graph) -> tf.Session:
        """Returns a session on the server of this process.

        Args:
          graph: its tf graph.
        """
        config = self.processes.config(self.per_process)
        return tf.Session(self._server.target, graph=graph, config=config)

    def next_container(self) -> str:
        """Returns the name of the place on the servers where the next run has its variables."""
        self._runs += 1
        return f"fit_{self._runs}"

    def finish(self) -> None:
        """Waits until all processes have come here; the second call does nothing."""
        if not self._finished:
            self._finished = True
            self.processes.finish(self._server)

    def _at_exit(self) -> None:
        if getattr(sys, "last_type", None) is None:  # no error ended the program
            self.finish()


class Agreement:
    """What all know of each other: the step at which they stop and why, and that all is saved."""

    def __init__(self, cluster: Cluster):
        """Adds its variables to the default tf graph.

        Args:
          cluster: the processes.
        """
        self._cluster = cluster
        chief = f"/job:{cluster.processes.job}/replica:0/task:0/device:CPU:0"
        with tf.device(chief):
            # They are no global variables: every process would initialize them, and savers save
            # them.
            self._last, self._signal, self._saved = (
                tf.Variable(
                    tf.constant(0, tf.int64),
                    collections=[],
                    trainable=False,
                    use_resource=True,
                    name=name,
                )
                for name in ("last_step_of_all", "signal_of_all", "saved_step_of_all")
            )
            self._fed = tf.placeholder(tf.int64, [])
            self._set_last = self._last.assign(self._fed, read_value=False)
            self._set_signal = self._signal.assign(self._fed, read_value=False)
            self._set_saved = self._saved.assign(self._fed, read_value=False)
            self._read_last, self._read_saved = self._last.read_value(), self._saved.read_value()
            self._read_signal = self._signal.read_value()

    def reset(self, session: tf.Session) -> None:
        """Makes a run begin; in the chief, before the others read what it decides."""
        if self._cluster.is_chief:
            session.run(self._set_signal, {self._fed: 0})
            session.run(self._set_last, {self._fed: _NEVER})
            session.run(self._set_saved, {self._fed: -1})

    def settle(self, session: tf.Session, step: int) -> None:
        """Waits until the chief has come here too, and so has saved.

        Args:
          session: the session of this process.
          step: the number of steps that are done.
        """
        if self._cluster.is_chief:
            session.run(self._set_saved, {self._fed: step})
        while self._cluster.processes.run(session, self._read_saved) != step:
            time.sleep(POLL_SECONDS)

    def agreed(self, session: tf.Session, step: int, wanted: bool, signals: StopSignals) -> bool:
        """Returns whether all processes stop after this step.

        Processes are in the same step when they compute, as it needs all of them. When one of them
        decides, others may be done with this step, but not with the next.

        Args:
          session: the session of this process.
          step: the number of steps that are done.
          wanted: whether this process was asked to stop.
          signals: those that this process received; the one of another is noted there.
        """
        last = session.run(self._read_last)
        if wanted and last == _NEVER:
            if signals.received is not None:  # first, so that whoever stops knows why
                session.run(self._set_signal, {self._fed: int(signals.received)})
            session.run(self._set_last, {self._fed: step + 1})
        if step < last:
            return False
        if number := session.run(self._read_signal):
            signals.note_of_other(number)
        return True


def check_connected(environment: Optional[Mapping[str, str]] = None) -> None:
    """Raises ValueError if there are several processes that do not know each other.

    Args:
      environment: environment variables; those of this process if None.
    """
    check_described(os.environ if environment is None else environment)


def find_cluster(simd: bool, size: int) -> Optional[Cluster]:
    """Returns the cluster of this process; None if it is the only process.

    Args:
      simd: whether all processors run one program.
      size: the number of processors of the mesh.

    Raises:
      ValueError: the mesh can't be run in so many processes.
    """
    check_connected()
    found = processes()
    if found.count == 1:
        return None
    if not simd:
        raise ValueError(
            f"fit: there are {found.count} processes. Each computes for its own processors with "
            "fit(simd=True); for a mesh of devices that one process drives, train within "
            "estimator.run_cluster"
        )
    if size % found.count:
        raise ValueError(
            f"fit: the mesh has {size} processors, which {found.count} processes can't share "
            "equally. Make the size of the mesh a multiple of the number of processes"
        )
    per_process = size // found.count
    if not _found:
        _found.append(Cluster(found, per_process))
    if _found[0].per_process != per_process:
        raise ValueError(
            f"fit: the processes were started for meshes of {_found[0].per_process * found.count} "
            f"processors, and this one has {size}. Use meshes of one size in a program"
        )
    return _found[0]
