"""Messages between processes, and what the standard output leaves out."""

import socket
import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.paths import environment

from mesh_tensorflow._processes.peers import Peer
from mesh_tensorflow.pjrt._quiet import LineFilter
from mesh_tensorflow.pjrt._sessions.watch import Watch, connected
from mesh_tensorflow.pjrt._sessions.wire import Message, receive, send

GLOO = (
    b"[Gloo] Rank 1 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3\n"
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
    watch = Watch([(peer, one)], me)
    try:
        assert watch.error() is None
        other.close()
        for _ in range(100):
            if watch.error() is not None:
                break
            time.sleep(0.05)
        assert watch.error().peer == peer
        assert "/job:worker/task:1 at there:2 does not answer any more" in str(watch.error())
    finally:
        watch.stop()
        one.close()


def tcp_pair():
    """Returns two sockets that are connected."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_only_the_lines_of_gloo_are_left_out(size):
    lines, data = (
        LineFilter(),
        b"a [1]" + GLOO + GLOO + b"[Gloo] Rank?\n[Gl" + b"\n[" + GLOO + b"end [",
    )
    passed = b"".join(lines.passed(data[i : i + size]) for i in range(0, len(data), size))
    assert passed + lines.rest() == b"a [1][Gloo] Rank?\n[Gl\n[end ["


PEERS = b" is connected to 3 peer ranks. Expected number of connected peer ranks is : "
MIXED = [
    b"[Gloo] Rank [Gloo] Rank 2 is connected to 33" + PEERS + b"3\n" + PEERS[18:] + b"3\n",
    b"[Gloo] Rank 1" + PEERS + b"[Gloo] Rank 0" + PEERS + b"3\n3\n",
    b"[Gloo] Rank [Gloo] Rank 0[Gloo] Rank 1" + PEERS + b"3\n" + PEERS + b"3\n2" + PEERS + b"3\n",
    b"[Gloo] Rank 1" + PEERS + b"[Gloo] Rank 0" + PEERS + b"3\nother [\n3\n",
]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("mixed", MIXED)
def test_lines_of_gloo_that_threads_mixed(mixed, size):
    lines, data = LineFilter(), b"0\n1" + mixed + b"2\n[3]" + mixed + b"4\n"
    passed = b"".join(lines.passed(data[i : i + size]) for i in range(0, len(data), size))
    other = b"other [\n" if b"other" in mixed else b""
    assert passed + lines.rest() == b"0\n1" + other + b"2\n[3]" + other + b"4\n"


def test_what_is_written_after_a_line_that_was_cut():
    lines = LineFilter()
    assert lines.passed(b"a" + GLOO[:-1]) + lines.rest() + lines.passed(b"5\n") == b"a5\n"


def test_what_is_written_is_passed_on_at_once():
    lines = LineFilter()
    assert lines.passed(b"step 1 of 2 [loss 0.5]") == b"step 1 of 2 [loss 0.5]"


SCRIPT = """
import os, subprocess, sys
from mesh_tensorflow.pjrt._quiet import without_connection_lines
GLOO = %r
print("before", end=" ")
with without_connection_lines():
    print("a", end="")
    sys.stdout.flush()
    os.write(1, GLOO)
    with without_connection_lines():
        os.write(1, b"\\0b" + GLOO[:20])
        os.write(1, GLOO[20:] + b"c\\n")
    later = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1); print('later')"])
    print("d")
for i in range(3):
    with without_connection_lines():
        os.write(1, b"[%%d" %% i + GLOO)
os.write(1, b"]\\n")
later.wait()
"""


def test_the_standard_output_has_all_other_lines_in_order():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT % GLOO],
        env=environment(),
        capture_output=True,
        check=True,
        timeout=100,
    )
    head, _, rest = done.stdout.partition(b"[0")
    assert head == b"before a\0bc\nd\n"
    assert rest.replace(b"later\n", b"") == b"[1[2]\n" and b"later\n" in rest


def test_a_closed_standard_output():
    code = "import os\nfrom mesh_tensorflow.pjrt._quiet import without_connection_lines as w\n"
    code += "os.close(1)\nwith w(): pass\n"
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True, timeout=100)
