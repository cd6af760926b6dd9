"""A cluster: one program in its chief, which the other processes serve; they are watched.

A peer is alive as long as its server answers a new connection. A killed process refuses the
connection at once; a process that hangs, or whose machine is down, does not answer in time.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._processes.peers import (
    ANSWER_SECS,
    Peer,
    PeerLostError,
    answers,
    naming_port,
    wait_for,
)
from mesh_tensorflow._processes.processes import several_of_jax
from mesh_tensorflow._stop_signals import StopSignals, tell_of_other
from mesh_tensorflow.estimator._run_config import RunConfig, TaskType

PING_SECS = 1.0  # between rounds of pings
MISSES = 3  # in a row, after which a peer is lost
GRACE_SECS = 15.0  # for the program to raise an error, before the process is ended


def programs_over(cluster_spec: tf.train.ClusterSpec) -> list[Peer]:
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
        # A new list, since the watching thread may be going over the old one.
        self._sessions = [*self._sessions[-7:], session]

    def confirm(self, seconds: float = 2 * MISSES * (PING_SECS + ANSWER_SECS)) -> Optional[Peer]:
        """Checks whether a process is lost, after an error that this may have caused.

        Args:
          seconds: the maximum time.

        Returns:
          the process, or None if all have answered.
        """
        deadline = time.monotonic() + seconds
        # One missed ping proves nothing, so this waits until all answer or the watch has decided.
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
            # A round of pings takes seconds, in which the program and its peers may have ended in
            # order.
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
            # `sys.exit` would end this thread only, while the main one hangs in a call to the lost
            # peer.
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


_POLL_SECS = 0.3
_TELL_SECS = 10
_DONE = b"done"

_watch: Optional[Watch] = None  # while the chief runs its program


def run_cluster(main: Callable[[], Any], config: RunConfig) -> Any:
    """Runs a function in the chief, with the devices of all processes.

    Call it in each process. In the chief, sessions of estimators within `main` see the devices of
    all processes, such as "/job:worker/task:0/device:CPU:0". The other processes serve until
    `main` returns. If the chief loses the connection to a process, the run ends in all processes.
    With `mesh_tensorflow.launch --runtime pjrt`, it is `mtf.pjrt.run_in_chief`.

    Args:
      main: a function without arguments.
      config: a RunConfig, with the cluster of TF_CONFIG.

    Returns:
      the result of `main`; None in the other processes.

    Raises:
      PeerLostError: another process does not answer, or was not started.
      TypeError: `config` is not a RunConfig.
      ValueError: this process is an evaluator.
      RuntimeError: in the other processes, if the program of the chief failed.
    """
    global _watch
    if not isinstance(config, RunConfig):
        raise TypeError(f"run_cluster: config should be a RunConfig, but is {config!r}")
    if config.task_type == TaskType.EVALUATOR:
        raise ValueError(
            "run_cluster: TF_CONFIG makes this process an evaluator, which is not part of the "
            "cluster: evaluate in the chief's function, or call estimator.evaluate here"
        )
    if several_of_jax():
        result = importlib.import_module("mesh_tensorflow.pjrt").run_in_chief(main)
        return result if config.is_chief else None
    peers = programs_over(config.cluster_spec)
    if len(peers) < 2 or _watch is not None:
        return main()
    me = next(p for p in peers if (p.job, p.task) == (config.task_type, config.task_id))
    # The server runs until the process ends: TensorFlow cannot stop servers.
    server = _server(config)
    if not config.is_chief:
        return _serve(server, me, _chief(peers, config), config)
    others = [peer for peer in peers if peer != me]
    watch = Watch(others, me)
    watch.wait_for_peers(config.session_creation_timeout_secs)
    watch.start()
    _watch = watch
    stop_signals = _told_of_signals(server, me)
    # Whatever ends this program, the other processes are told; they would serve for ever otherwise.
    news = b"it failed"
    try:
        result = main()
        news = _DONE
        return result
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        news = f"{type(error).__name__}: {error}".encode()
        # The error of a session does not say that a process is lost.
        if isinstance(error, tf.errors.OpError):
            watch.confirm()
        if watch.lost and not isinstance(error, PeerLostError):
            news = str(watch.error()).encode()
            raise watch.error() from None  # a session's error shows the graph, in 100 lines
        raise
    finally:
        watch.stop()
        stop_signals()
        _watch = None
        for peer in others:
            if peer != watch.lost:
                _tell(server, me, peer, news)


def in_cluster() -> bool:
    """Returns whether this is the chief of a cluster, within `run_cluster`.

    Returns:
      a bool.
    """
    return _watch is not None


def own_device(config: RunConfig) -> Optional[str]:
    """Returns the device of operations that no mesh places.

    Args:
      config: a RunConfig.

    Returns:
      the device of the chief in a cluster; None otherwise.
    """
    return f"/job:{config.task_type}/task:{config.task_id}" if in_cluster() else None


def session_creator_for(
    config: RunConfig, scaffold: tf.train.Scaffold, evaluation: bool = False, **kwargs: Any
) -> tf.train.SessionCreator:
    """Returns the session creator of an estimator; in a cluster, for all processes.

    Args:
      config: a RunConfig.
      scaffold: the Scaffold of the model.
      evaluation: whether the session is for evaluation or prediction.
      **kwargs: further arguments of tf.train.ChiefSessionCreator.

    Returns:
      a SessionCreator.
    """
    session_config = config.effective_session_config
    if _watch is None:
        master = config.evaluation_master if evaluation else config.master
        return tf.train.ChiefSessionCreator(
            scaffold, master=master, config=session_config, **kwargs
        )
    session_config = copy.deepcopy(session_config)
    if config.session_config is None:
        del session_config.device_filters[:]  # which would hide the workers
    # Evaluation during training has variables with the same names.
    session_config.isolate_session_state = True
    _set_leader(session_config, config)
    creator = tf.train.ChiefSessionCreator(
        scaffold, master=_own_address(config), config=session_config, **kwargs
    )
    return WatchedSessionCreator(creator.create_session, _watch)


# -- processes


def _chief(peers: list[Peer], config: RunConfig) -> Peer:
    jobs = (TaskType.CHIEF, TaskType.MASTER)
    return next(p for job in jobs for p in peers if p.job == job)


def _own_address(config: RunConfig) -> str:
    address = config.cluster_spec.task_address(config.task_type, config.task_id)
    return f"{config.protocol or 'grpc'}://{address}"


def _set_leader(session_config: tf.ConfigProto, config: RunConfig) -> None:
    if not session_config.experimental.collective_group_leader:
        chief = _chief(programs_over(config.cluster_spec), config)
        session_config.experimental.collective_group_leader = (
            f"/job:{chief.job}/replica:0/task:{chief.task}"
        )


def _server(config: RunConfig) -> tf.distribute.Server:
    given = tf.ConfigProto()
    if config.session_config is not None:
        given.CopyFrom(config.session_config)
        del given.device_filters[:]
    _set_leader(given, config)
    # By default, a call to a lost process waits forever.
    os.environ.setdefault("GRPC_FAIL_FAST", "true")
    address = config.cluster_spec.task_address(config.task_type, config.task_id)
    with naming_port(Peer(config.task_type, config.task_id, address)):
        return tf.distribute.Server(
            config.cluster_spec,
            job_name=config.task_type,
            task_index=config.task_id,
            protocol=config.protocol,
            config=given,
        )


# -- the result of the chief's program, sent through a queue of each process


def _queue(peer: Peer) -> tf.queue.FIFOQueue:
    with tf.device(f"{peer.device}/device:CPU:0"):
        # By a name, under which the chief and the process itself mean one queue.
        return tf.queue.FIFOQueue(1, [tf.string], [[]], shared_name="mesh_tensorflow_news")


def _session(server: tf.distribute.Server, *peers: Peer) -> tf.Session:
    # The filters allow a session even if other processes are lost.
    return tf.Session(
        server.target,
        config=tf.ConfigProto(
            device_filters=[peer.device for peer in peers],
            operation_timeout_in_ms=_TELL_SECS * 1000,
        ),
    )


def _signals(chief: Peer) -> tf.queue.FIFOQueue:
    with tf.device(f"{chief.device}/device:CPU:0"):
        return tf.queue.FIFOQueue(100, [tf.int32], [[]], shared_name="mesh_tensorflow_signals")


def _told_of_signals(server: tf.distribute.Server, me: Peer) -> Callable[[], None]:
    """Passes on signals that other processes tell of, in a thread; returns what ends it."""
    ended = threading.Event()

    def run() -> None:
        with tf.Graph().as_default():
            queue = _signals(me)
            size, take = queue.size(), queue.dequeue()
            with contextlib.suppress(tf.errors.OpError), _session(server, me) as session:
                while not ended.wait(_POLL_SECS):
                    if session.run(size):
                        number = signal.Signals(int(session.run(take)))
                        tf.logging.warning("Another process received %s.", number.name)
                        tell_of_other(number)

    thread = threading.Thread(target=run, name="signals of others", daemon=True)
    thread.start()

    def stop() -> None:
        ended.set()
        # A session that runs while Python ends may abort the process. It runs here alone, so it
        # answers at once, unless TensorFlow itself hangs.
        thread.join(ANSWER_SECS)

    return stop


def _tell(server: tf.distribute.Server, me: Peer, peer: Peer, news: bytes) -> None:
    # A process that has failed as well would keep the chief waiting until the time-out.
    if not answers(peer.address):
        return
    try:
        with tf.Graph().as_default():
            _run(server, me, peer, _queue(peer).enqueue([news]))
    except tf.errors.OpError as error:
        tf.logging.warning("%s was not told that training has ended: %s", peer, error)


def _tell_of_signal(
    server: tf.distribute.Server, me: Peer, chief: Peer, number: signal.Signals
) -> None:
    tf.logging.warning("%s: %s stops, and saves before.", number.name, chief)
    try:
        with tf.Graph().as_default():
            _run(server, me, chief, _signals(chief).enqueue([int(number)]))
    except tf.errors.OpError as error:
        tf.logging.warning("%s was not told of %s: %s", chief, number.name, error)


def _run(server: tf.distribute.Server, me: Peer, peer: Peer, operation: tf.Operation) -> None:
    with _session(server, me, peer) as session:
        session.run(operation)


def _serve(server: tf.distribute.Server, me: Peer, chief: Peer, config: RunConfig) -> None:
    watch, told = Watch([chief], me), False
    tf.logging.info("%s serves %s.", me, chief)
    # The chief, which is told of a signal, needs this process until it has saved.
    with StopSignals() as signals, tf.Graph().as_default():
        queue = _queue(me)
        size, take = queue.size(), queue.dequeue()
        with _session(server, me) as session:
            watch.wait_for_peers(config.session_creation_timeout_secs)
            watch.start()
            try:
                # A dequeue would reach the time limit of the session and fail, so the size is
                # polled instead.
                while not session.run(size):
                    if watch.lost:
                        raise watch.error()
                    if signals.received is not None and not told:
                        told = True
                        _tell_of_signal(server, me, chief, signals.received)
                    time.sleep(_POLL_SECS)
                news = session.run(take)
            finally:
                watch.stop()
    if signals.received is not None:
        raise signals.error(f"{me} was stopped, after {chief}")
    if news != _DONE:
        raise RuntimeError(f"{chief} has stopped: {news.decode()}")
    tf.logging.info("%s has ended, and so does %s.", chief, me)
