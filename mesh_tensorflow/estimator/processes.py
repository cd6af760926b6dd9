"""A cluster: one program in its chief, which the other processes serve; they are watched.

Packages that are built on estimators ask here for processes, devices and the saver.
"""

from __future__ import annotations

import contextlib
import copy
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.devices import devices_for
from mesh_tensorflow._pjrt import pjrt
from mesh_tensorflow._processes.peers import (
    ANSWER_SECS,
    POLL_SECONDS,
    Peer,
    Watch,
    alone,
    answers,
    follow,
    lead,
    mailbox,
    server_of,
    unless_refused,
    wait_for,
)
from mesh_tensorflow._processes.processes import several_of_jax
from mesh_tensorflow._stop_signals import StopSignals, tell_of_other
from mesh_tensorflow.estimator._hooks import saver_hook
from mesh_tensorflow.estimator._run_config import RunConfig, TaskType

__all__ = ["devices_of", "in_cluster", "programs_over", "saver_hook", "shards_of_process"]


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
        # A monitored session replaces one that has failed; if a process is lost, the new one would
        # wait for it.
        if not self._is_first:
            self._watch.settled()
            self._watch.check()
        self._is_first = False
        session = self._create()
        self._watch.add_session(session)
        return session


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
        result = pjrt().run_in_chief(main)
        return result if config.is_chief else None
    peers = programs_over(config.cluster_spec)
    # Within another call, the other processes serve already.
    if len(peers) < 2 or _watch is not None:
        return main()
    me = next(p for p in peers if (p.job, p.task) == (config.task_type, config.task_id))
    # The server runs until the process ends: TensorFlow cannot stop servers.
    server = _server(config, me)
    if not config.is_chief:
        return _serve(server, me, _chief(peers, config), config)
    others = [peer for peer in peers if peer != me]
    wait_for(others, me, config.session_creation_timeout_secs)
    # After the wait, as a Watch takes a process that has not been started for a lost one.
    watch = _watch = Watch(others, me)

    def program() -> Any:
        with _hearing_of_signals(server, me):
            return main()

    def tell(why: Optional[str]) -> None:
        lost = watch.lost()
        for peer in others:
            # A process that has failed as well would keep the chief waiting until the time-out.
            if peer not in lost and answers(peer.address):
                _send(server, me, peer, _NEWS, _DONE if why is None else why.encode())

    try:
        return lead(program, watch, tell)
    finally:
        _watch = None


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
    if _watch is None:
        master = config.evaluation_master if evaluation else config.master
        return tf.train.ChiefSessionCreator(
            scaffold, master=master, config=config.effective_session_config, **kwargs
        )
    creator = tf.train.ChiefSessionCreator(
        scaffold, master=_own_address(config), config=_config_of_all(config), **kwargs
    )
    return WatchedSessionCreator(creator.create_session, _watch)


def _config_of_all(config: RunConfig) -> tf.ConfigProto:
    """Returns the configuration of sessions on all processes of a cluster."""
    # It may be the caller's own, for other estimators as well.
    session_config = copy.deepcopy(config.effective_session_config)
    if config.session_config is None:
        del session_config.device_filters[:]  # which would hide the workers
    # Evaluation during training has variables with the same names.
    session_config.isolate_session_state = True
    _set_leader(session_config, config)
    return session_config


class ServedByAll:
    """The servers of a cluster whose chief runs the program of all, within `run_cluster`.

    Attributes:
      local: None, as the chief computes for the processors of all.
      is_first: True.
      exchange: what tells this process what it says.
    """

    local = None
    is_first = True
    exchange = staticmethod(alone)

    def __init__(self, config: RunConfig) -> None:
        """Opens nothing yet.

        Args:
          config: that of an estimator.
        """
        self._config = config

    def session(self, graph: tf.Graph, options: Optional[tf.GraphOptions] = None) -> tf.Session:
        """Returns a session that has the devices of all processes.

        Args:
          graph: its tf graph.
          options: how TensorFlow optimizes it; None for as the estimator says.
        """
        config = _config_of_all(self._config)
        if options is not None:
            config.graph_options.CopyFrom(options)
        session = tf.Session(_own_address(self._config), graph=graph, config=config)
        if _watch is not None:
            _watch.add_session(session)
        return session

    def run(self, session: tf.Session, fetches: Any, seconds: float) -> Any:
        """Returns what a session fetches.

        Args:
          session: what `session` returned.
          fetches: those of `session.run`.
          seconds: the time limit.
        """
        limit = tf.RunOptions(timeout_in_ms=int(1000 * seconds))
        return unless_refused(lambda: session.run(fetches, options=limit))


def servers_of_all(config: RunConfig) -> Optional[ServedByAll]:
    """Returns the servers of a cluster within `run_cluster`; None elsewhere.

    Args:
      config: that of an estimator.
    """
    return ServedByAll(config) if in_cluster() else None


# -- the processors of a mesh that all processes share


def shards_of_process(config: Any) -> int:
    """Returns the number of processors of the mesh in each process; 0 if it is not configured.

    Args:
      config: a tpu.RunConfig.

    Raises:
      ValueError: the number of processors is not divisible by the number of processes.
    """
    shards = config.tpu_config.num_shards or 0
    processes = max(1, len(programs_over(config.cluster_spec)))
    if shards % processes:
        raise ValueError(
            f"TPUConfig: num_shards is {shards}, which {processes} processes cannot share equally"
        )
    return shards // processes


def devices_of(config: Any) -> list[str]:
    """Returns a device for each processor.

    Args:
      config: a tpu.RunConfig; `num_shards` of its TPUConfig is the number of processors.
    """
    count = shards_of_process(config)
    # The other processes of a cluster are taken to have as many as this one.
    own = devices_for(count)
    if not in_cluster():
        return own
    return [
        f"/job:{peer.job}/task:{peer.task}{device}"
        for peer in programs_over(config.cluster_spec)
        for device in own
    ]


# -- processes


def _chief(peers: list[Peer], config: RunConfig) -> Peer:
    jobs = (TaskType.CHIEF, TaskType.MASTER)
    return next(p for job in jobs for p in peers if p.job == job)


def _own_address(config: RunConfig) -> str:
    address = config.cluster_spec.task_address(config.task_type, config.task_id)
    return f"{config.protocol or 'grpc'}://{address}"


def _set_leader(session_config: tf.ConfigProto, config: RunConfig) -> None:
    # All processes have to name the same one, which tells them of the members of collectives.
    if not session_config.experimental.collective_group_leader:
        chief = _chief(programs_over(config.cluster_spec), config)
        session_config.experimental.collective_group_leader = (
            f"/job:{chief.job}/replica:0/task:{chief.task}"
        )


def _server(config: RunConfig, me: Peer) -> tf.distribute.Server:
    options = tf.ConfigProto()
    if config.session_config is not None:
        options.CopyFrom(config.session_config)
        # They would hide other processes from the server, as from a session.
        del options.device_filters[:]
    _set_leader(options, config)
    return server_of(me, config.cluster_spec, options, config.protocol)


# -- what processes tell each other: the chief how its program ended, the others of signals

# The name and the size of a mailbox, and the dtype of what is in it.
_NEWS = "mesh_tensorflow_news", tf.string, 1
_SIGNALS = "mesh_tensorflow_signals", tf.int32, 100
_DONE = b"done"


def _send(
    server: tf.distribute.Server, me: Peer, peer: Peer, box: tuple[str, tf.DType, int], what: Any
) -> None:
    try:
        with mailbox(server, me, peer, *box) as opened:
            opened.put(what)
    except tf.errors.OpError as error:
        what_text = (
            signal.Signals(what).name if isinstance(what, int) else "that training has ended"
        )
        tf.logging.warning("%s was not told of %s: %s", peer, what_text, error)


@contextlib.contextmanager
def _hearing_of_signals(server: tf.distribute.Server, me: Peer) -> Iterator[None]:
    """Context in which a thread passes on the signals that other processes tell of."""
    ended = threading.Event()

    def run() -> None:
        with contextlib.suppress(tf.errors.OpError), mailbox(server, me, me, *_SIGNALS) as told:
            while not ended.wait(POLL_SECONDS):
                if told.size():
                    number = signal.Signals(int(told.take()))
                    tf.logging.warning("Another process received %s.", number.name)
                    tell_of_other(number)

    thread = threading.Thread(target=run, name="signals of others", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        # A session that runs while Python ends may abort the process. It runs here alone, so it
        # answers at once, unless TensorFlow itself hangs.
        thread.join(ANSWER_SECS)


def _serve(server: tf.distribute.Server, me: Peer, chief: Peer, config: RunConfig) -> None:
    tf.logging.info("%s serves %s.", me, chief)

    def serve(signals: StopSignals) -> tuple[Optional[str], None]:
        with mailbox(server, me, me, *_NEWS) as news:
            wait_for([chief], me, config.session_creation_timeout_secs)
            watch = Watch([chief], me)
            try:
                # To take what is not there yet would reach the time limit of the session, and fail.
                while not news.size():
                    watch.check()
                    if (number := signals.to_tell()) is not None:
                        tf.logging.warning("%s: %s stops, and saves before.", number.name, chief)
                        _send(server, me, chief, _SIGNALS, int(number))
                    time.sleep(POLL_SECONDS)
                message = news.take()
            finally:
                watch.stop()
        return (None if message == _DONE else message.decode()), None

    follow(me, chief, serve)
    tf.logging.info("%s has ended, and so does %s.", chief, me)
