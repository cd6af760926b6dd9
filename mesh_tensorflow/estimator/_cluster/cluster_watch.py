"""Watches the processes of a cluster, and stops the program if one is lost.

A peer is alive as long as its server answers a new connection. A killed process refuses the
connection at once; a process that hangs, or whose machine is down, does not answer in time.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._processes.peers import ANSWER_SECS, Peer, PeerLostError, answers, wait_for

__all__ = ["Watch", "peers_of"]

PING_SECS = 1.0  # between rounds of pings
MISSES = 3  # in a row, after which a peer is lost
GRACE_SECS = 15.0  # for the program to raise an error, before the process is ended


def peers_of(cluster_spec: tf.train.ClusterSpec) -> list[Peer]:
    """Returns the processes of a cluster.

    Args:
      cluster_spec: addresses by job and task.

    Returns:
      a list.
    """
    return [
        Peer(job, task, cluster_spec.task_address(job, task))
        for job in cluster_spec.jobs
        for task in cluster_spec.task_indices(job)
    ]


class Watch:
    """Pings other processes in a thread; closes running sessions if one is lost.

    If the program does not end after that, because it is in a call that cannot be interrupted,
    ends the process.
    """

    def __init__(self, peers: Iterable[Peer], me: Peer) -> None:
        """Creates a Watch.

        Args:
          peers: the processes to watch.
          me: this process.
        """
        self._peers, self._me = tuple(peers), me
        self._misses = dict.fromkeys(self._peers, 0)
        self._sessions: list[tf.Session] = []
        self._lost = threading.Event()
        self._stopped = threading.Event()
        self._lost_peer: Optional[Peer] = None
        self._thread = threading.Thread(target=self._run, name="cluster watch", daemon=True)

    @property
    def lost(self) -> Optional[Peer]:
        """The process that is lost, or None."""
        return self._lost_peer

    def wait_for_peers(self, seconds: float) -> None:
        """Waits until all processes answer.

        Args:
          seconds: the maximum time.

        Raises:
          PeerLostError: a process has not been started.
        """
        wait_for(self._peers, self._me, seconds)

    def start(self) -> None:
        """Starts pinging."""
        self._thread.start()

    def stop(self) -> None:
        """Stops pinging; the watch does not end the process any more."""
        self._stopped.set()

    def add_session(self, session: tf.Session) -> None:
        """Adds a session to close when a process is lost.

        Args:
          session: a session.
        """
        self._sessions = [*self._sessions[-7:], session]

    def confirm(self, seconds: float = 2 * MISSES * (PING_SECS + ANSWER_SECS)) -> Optional[Peer]:
        """Checks whether a process is lost, after an error that this may have caused.

        Args:
          seconds: the maximum time.

        Returns:
          the process, or None if all have answered.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._lost.is_set():
            if all(answers(peer.address) for peer in self._peers):
                return None
            self._lost.wait(PING_SECS / 2)
        return self._lost_peer

    def error(self) -> PeerLostError:
        """Returns the error for the lost process.

        Returns:
          a PeerLostError.
        """
        assert self._lost_peer is not None
        return PeerLostError(
            f"{self._lost_peer} does not answer any more: the process ended, or its machine or the "
            f"network is down. {self._me} stops. Training resumes from the last checkpoint when "
            "all processes are started again",
            self._lost_peer,
        )

    def _run(self) -> None:
        while not self._stopped.wait(PING_SECS):
            for peer in self._peers:
                self._misses[peer] = 0 if answers(peer.address) else self._misses[peer] + 1
            gone = [peer for peer, misses in self._misses.items() if misses >= MISSES]
            if gone and not self._stopped.is_set():
                self._lost_peer = gone[0]
                self._lost.set()
                self._end()
                return

    def _end(self) -> None:
        for session in self._sessions:
            # In threads: closing a session may wait for the lost process.
            threading.Thread(target=_close, args=(session,), daemon=True).start()
        if not self._stopped.wait(GRACE_SECS):
            print(f"error: {self.error()}", file=sys.stderr, flush=True)
            os._exit(1)


def _close(session: tf.Session) -> None:
    try:
        session.close()
    except (tf.errors.OpError, RuntimeError) as error:
        tf.logging.info("A session was not closed: %s", error)


class WatchedSessionCreator(tf.train.SessionCreator):
    """Creates sessions, but not while a process of the cluster is lost."""

    def __init__(self, create: Callable[[], Any], watch: Watch) -> None:
        """Creates a WatchedSessionCreator.

        Args:
          create: creates a session.
          watch: the Watch of the cluster.
        """
        self._create, self._watch = create, watch
        self._is_first = True

    def create_session(self) -> tf.Session:
        """Creates a session, also to replace one that failed.

        Returns:
          a session.

        Raises:
          PeerLostError: a process is lost.
        """
        if not self._is_first and self._watch.confirm():
            raise self._watch.error()
        self._is_first = False
        session = self._create()
        self._watch.add_session(session)
        return session
