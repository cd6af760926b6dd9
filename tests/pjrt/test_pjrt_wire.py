"""Messages between processes, and what the standard output leaves out."""

import contextlib
import itertools
import os
import signal
import socket
import threading
import time

import numpy as np
import pytest

pytest.importorskip("jax", "0.8", reason="mesh_tensorflow.pjrt needs jax>=0.8")

import jax.numpy as jnp
from helpers import processes

from mesh_tensorflow._processes.peers import Peer, PeerLostError
from mesh_tensorflow.pjrt._programs import (
    Message,
    PeerProcesses,
    connected,
    receive,
    send,
    watch_over,
)


def test_messages_arrive_as_they_were():
    arrays = [
        np.arange(6, dtype="int64").reshape(2, 3),
        np.asarray(jnp.ones([2], "bfloat16")),
        np.zeros([0, 4], "float32"),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(True),
    ]
    one, other = socket.socketpair()
    with one, other:
        large = np.arange(2**20)
        sender = threading.Thread(
            target=send, args=(one, Message("run", [1, "a"], [*arrays, large]))
        )
        sender.start()
        found = receive(other)
        sender.join()
        assert (found.call, found.values) == ("run", [1, "a"])
        for array, expected in zip(found.arrays, [*arrays, large]):
            assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
            np.testing.assert_array_equal(array, expected)
        one.close()
        with pytest.raises(EOFError):
            receive(other)


def test_a_process_that_closes_its_connection_is_lost():
    me, peer = Peer("worker", 0, "here:1"), Peer("worker", 1, "there:2")
    one, other = map(connected, tcp_pair())
    watch = watch_over([(peer, one)], me)
    try:
        assert watch.settled() == []
        other.close()
        for _ in range(1000):
            if watch.lost():
                break
            time.sleep(0.05)
        assert watch.lost() == [peer]
        with pytest.raises(
            PeerLostError, match="/job:worker/task:1 at there:2 does not answer any"
        ):
            watch.check()
    finally:
        watch.stop()
        one.close()


def tcp_pair():
    """Returns two sockets that are connected."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("where", ["here", "there"])
def test_an_interrupt_leaves_no_answer_for_the_next_message(where):
    """Ctrl-C while this process does its part, or a signal that another one tells of."""
    me, peer = Peer("worker", 0, "here:1"), Peer("worker", 1, "there:2")
    one, other = map(connected, tcp_pair())

    def follow():
        with contextlib.suppress(EOFError):
            for number in itertools.count():
                message = receive(other)
                if where == "there" and number == 0:
                    send(other, Message("signal", int(signal.SIGINT)))
                send(other, Message(message.call, number))

    threading.Thread(target=follow, daemon=True).start()
    peers = PeerProcesses([(peer, one)], me)
    try:
        with pytest.raises(KeyboardInterrupt):
            peers.do(Message("run"), interrupt if where == "here" else lambda: None)
        result, [answer] = peers.do(Message("read"), lambda: "own")
        assert (result, answer.call, answer.values) == ("own", "read", 1)
    finally:
        peers.watch.stop()
        one.close()


def test_a_second_interrupt_breaks_a_message_off():
    me, peer = Peer("worker", 0, "here:1"), Peer("worker", 1, "there:2")
    one, other = map(connected, tcp_pair())
    peers = PeerProcesses([(peer, one)], me)
    try:
        with pytest.raises(KeyboardInterrupt):
            peers.do(Message("run"), lambda: (interrupt(), interrupt()))
        with pytest.raises(RuntimeError, match=r"message 'run' .* was broken off"):
            peers.do(Message("read"), lambda: None)
    finally:
        peers.watch.stop()
        one.close()
        other.close()


SCRIPT = r"""
import ctypes, os, subprocess, sys, threading
from mesh_tensorflow.pjrt._devices import without_connection_lines

library = ctypes.CDLL("libstdc++.so.6")
cout = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(library, "_ZSt4cout")))
write = library["_ZStlsISt11char_traitsIcEERSt13basic_ostreamIcT_ES5_PKc"]
flush = library["_ZNSo5flushEv"]


def connect(text):
    write(cout, ctypes.c_char_p(text))
    flush(cout)


print("before", flush=True)
connect(b"from C++\n")
with without_connection_lines():
    print("python", flush=True)
    connect(b"[Gloo] Rank 1 is connected\n")
    with without_connection_lines():
        thread = threading.Thread(target=os.write, args=(1, b"thread\n"))
        thread.start()
        thread.join()
    connect(b"[Gloo] Rank 0 is connected\n")
    later = [sys.executable, "-c", "import time; time.sleep(1); print('later')"]
    later = subprocess.Popen(later)
connect(b"C++ again\n")
print("end", flush=True)
later.wait()
"""


def test_only_what_cpp_libraries_write_is_left_out():
    """What other threads and processes write is there in its order, to the last line."""
    done = processes.run("-c", SCRIPT)
    assert done.returncode == 0, done.stderr
    expected = ["before", "from C++", "python", "thread", "C++ again", "end", "later", ""]
    assert done.stdout.split("\n") == expected


def test_a_closed_standard_output():
    code = "import os\nfrom mesh_tensorflow.pjrt._devices import without_connection_lines as w\n"
    code += "os.close(1)\nwith w(): pass\n"
    assert processes.run("-c", code).returncode == 0
