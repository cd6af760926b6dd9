"""Processes that are missing, lost, or in each other's way are named."""

import socket
import threading
import time

import pytest
import tensorflow.compat.v1 as tf
from helpers import processes
from helpers.workers import lost_worker

from mesh_tensorflow import launch
from mesh_tensorflow._processes import peers
from mesh_tensorflow._processes.peers import Peer, PeerLostError


def test_a_process_that_is_missing_is_named():
    mine = launch.Processes(tuple(launch._free_addresses(2)), 0)
    with pytest.raises(
        PeerLostError,
        match=rf"waited 1 s for /job:worker/task:1 at "
        rf"{mine.addresses[1]}, in vain: start it",
    ):
        mine.start_server(wait_seconds=1)


@pytest.mark.slow
def test_a_process_that_is_lost_before_the_variables_are_initialized_is_named(tmp_path):
    """By each of the others, also by one that hears of it after another has ended."""
    addresses = launch._free_addresses(3)
    logs = [tmp_path / f"{i}.log" for i in range(3)]
    started = [
        processes.context().Process(target=lost_worker.run, args=(addresses, i, str(logs[i])))
        for i in range(3)
    ]
    for process in started:
        process.start()
    started[2].join(120)
    assert started[2].exitcode == -9
    for process in started[:2]:
        process.join(40)
        process.kill()
    for i in range(2):
        assert logs[i].exists(), f"process {i} waits for ever"
        text = logs[i].read_text()
        assert text.startswith(
            f"PeerLostError: /job:worker/task:{i} at {addresses[i]} lost /job:worker/task:2 at "
            f"{addresses[2]}, which does not answer: see what it wrote last"
        ), text


def test_who_is_lost_and_who_merely_ended(monkeypatch):
    """The first that is silent is lost; who is silent well after it ended for want of it."""
    found = [Peer("worker", i, f"127.0.0.1:{port}") for i, port in enumerate((1, 2, 3))]
    silent = set()
    monkeypatch.setattr(peers, "answers", lambda address: address not in silent)
    monkeypatch.setattr(peers, "PING_SECS", 0.02)
    monkeypatch.setattr(peers, "_STAY_SECS", 0.3)
    watch = peers.Watch(found)
    assert watch.confirmed() == []
    silent.add(found[1].address)
    start = time.monotonic()
    with pytest.raises(PeerLostError, match=r"^/job:worker/task:1 at 127\.0\.0\.1:2$"):
        watch.call(lambda: time.sleep(60), 60, "waiting")
    assert 0.3 < time.monotonic() - start < 30
    silent.add(found[0].address)
    time.sleep(0.5)
    assert watch.lost() == [found[1]]
    silent.clear()
    time.sleep(0.5)
    assert watch.lost() == []
    with pytest.raises(TimeoutError, match=r"waiting took longer than 0.1 s"):
        watch.call(lambda: time.sleep(60), 0.1, "waiting")
    with pytest.raises(KeyError):
        watch.call(lambda: {}["absent"], 60, "looking")


def test_a_process_is_lost_before_it_misses_a_ping(monkeypatch):
    """As when a session notices first."""
    found = [Peer("worker", i, f"127.0.0.1:{port}") for i, port in enumerate((1, 2))]
    silent = set()
    monkeypatch.setattr(peers, "answers", lambda address: address not in silent)
    monkeypatch.setattr(peers, "PING_SECS", 0.2)
    monkeypatch.setattr(peers, "_STAY_SECS", 0.1)
    watch = peers.Watch(found)
    time.sleep(0.1)  # between two rounds of pings
    silent.add(found[1].address)
    assert watch.confirmed() == [found[1]]


@pytest.mark.slow
def test_processes_that_hang_are_found_however_many_they_are(monkeypatch):
    """A round of pings waits for each of them."""
    found = [Peer("worker", i, f"127.0.0.1:{port}") for i, port in enumerate((1, 2, 3))]
    hangs = threading.Event()

    def answers(address):
        if hangs.is_set():
            time.sleep(peers.ANSWER_SECS)
        return not hangs.is_set()

    monkeypatch.setattr(peers, "answers", answers)
    monkeypatch.setattr(peers, "ANSWER_SECS", 0.3)
    monkeypatch.setattr(peers, "PING_SECS", 0.05)
    watch = peers.Watch(found)
    hangs.set()
    assert watch.confirmed()[0] == found[0]


@pytest.mark.slow
def test_a_slow_machine_has_the_time_that_its_pings_take(monkeypatch):
    """However much longer than a ping should, those that answer and those that do not."""
    found, silent = [Peer("worker", 1, "127.0.0.1:1")], threading.Event()

    def answers(address):
        time.sleep(0.3)
        return not silent.is_set()

    monkeypatch.setattr(peers, "answers", answers)
    monkeypatch.setattr(peers, "ANSWER_SECS", 0.01)
    monkeypatch.setattr(peers, "PING_SECS", 0.01)
    watch = peers.Watch(found)
    assert watch.settled() == []
    assert watch.cause(ValueError()) is None
    silent.set()
    assert watch.cause(RuntimeError()).peer == found[0]
    with pytest.raises(PeerLostError, match=r"task:1 at 127\.0\.0\.1:1 does not answer any more"):
        watch.check()
    watch.stop()
    assert watch.settled() == found


def test_a_process_that_has_ended_after_all_had_called_is_not_lost(monkeypatch):
    """The chief asks for it after it has read that one call is missing."""
    found = [Peer("worker", i, a) for i, a in enumerate(launch._free_addresses(2))]
    cluster = tf.train.ClusterSpec({"worker": [peer.address for peer in found]})
    server = tf.distribute.Server(cluster, "worker", 0)
    calls = []

    def answers(address):
        if address == found[0].address:
            return True
        # Once: where the server does not say at first how many have called, it is asked again, and
        # there is no room for a third call.
        if not calls:
            calls.append(address)
            name = "processes_at_their_end"
            with peers.mailbox(server, *found[:1] * 2, name, tf.int32, len(found)) as come:
                come.put(1)
        return False

    monkeypatch.setattr(peers, "answers", answers)
    peers.wait_at_end(found, 0, server)


@pytest.mark.parametrize("by_server", [False, True])
def test_a_port_that_is_in_use_is_named(by_server):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{other.getsockname()[1]}"
        if by_server:
            other.close()
            assert launch.Processes((address,), 0).start_server()
        else:
            other.listen()
        with pytest.raises(
            RuntimeError,
            match=rf"/job:worker/task:0 at {address}: its server "
            r"cannot be started \(Could not start gRPC server\)\. Another process",
        ):
            launch.Processes((address,), 0).start_server()


def test_what_a_server_refuses_by_mistake_is_asked_again():
    """Of 40,000 steps it refuses about one, so that the error is not that of a server here."""
    said = ["The same RunGraph (Worker) request was received twice. step_id: 1", "it was restarted"]
    asked = []

    def run():
        asked.append(len(asked))
        if len(asked) == 2:
            return "done"
        raise tf.errors.AbortedError(None, None, said[len(asked) // 2])

    assert peers.unless_refused(run) == "done"
    with pytest.raises(tf.errors.AbortedError, match="restarted"):
        peers.unless_refused(run)
    assert asked == [0, 1, 2]
