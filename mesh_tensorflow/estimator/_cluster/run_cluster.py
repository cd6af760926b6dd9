"""Runs one program on a cluster: in the chief, while the other processes serve the chief."""

from __future__ import annotations

import copy
import importlib
import os
import time
from collections.abc import Callable
from typing import Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._processes.peers import Peer, PeerLostError, answers, naming_port
from mesh_tensorflow._processes.processes import several_of_jax
from mesh_tensorflow.estimator._cluster.cluster import TaskType
from mesh_tensorflow.estimator._cluster.cluster_watch import Watch, WatchedSessionCreator, peers_of
from mesh_tensorflow.estimator._run_config import RunConfig

__all__ = ["in_cluster", "own_device", "run_cluster", "session_creator_for"]

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
    peers = peers_of(config.cluster_spec)
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
        chief = _chief(peers_of(config.cluster_spec), config)
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


def _tell(server: tf.distribute.Server, me: Peer, peer: Peer, news: bytes) -> None:
    if not answers(peer.address):
        return
    try:
        with tf.Graph().as_default():
            enqueue = _queue(peer).enqueue([news])
            with _session(server, me, peer) as session:
                session.run(enqueue)
    except tf.errors.OpError as error:
        tf.logging.warning("%s was not told that training has ended: %s", peer, error)


def _serve(server: tf.distribute.Server, me: Peer, chief: Peer, config: RunConfig) -> None:
    watch = Watch([chief], me)
    tf.logging.info("%s serves %s.", me, chief)
    with tf.Graph().as_default():
        queue = _queue(me)
        size, take = queue.size(), queue.dequeue()
        with _session(server, me) as session:
            watch.wait_for_peers(config.session_creation_timeout_secs)
            watch.start()
            try:
                while not session.run(size):
                    if watch.lost:
                        raise watch.error()
                    time.sleep(_POLL_SECS)
                news = session.run(take)
            finally:
                watch.stop()
    if news != _DONE:
        raise RuntimeError(f"{chief} has stopped: {news.decode()}")
    tf.logging.info("%s has ended, and so does %s.", chief, me)
