"""A program that one process, the chief, runs, while others lend it their devices: how all end.

Processes with TensorFlow's servers tell each other of it by queues in their memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional, TypeVar

import tensorflow.compat.v1 as tf

from mesh_tensorflow._processes.peers import POLL_SECONDS, Peer, PeerLostError, Watch, answers
from mesh_tensorflow._stop_signals import StopSignals

__all__ = ["Mailbox", "follow", "lead", "mailbox", "wait_at_end"]

_TELL_SECS = 10

Result = TypeVar("Result")


def lead(
    main: Callable[[], Result], watch: Watch, tell: Callable[[Optional[str]], object]
) -> Result:
    """Runs the program of the chief, and tells the other processes how it ended.

    Args:
      main: the program.
      watch: the Watch over the other processes, which is stopped then.
      tell: tells them why the program failed; or None, if it did not.

    Returns:
      the result of `main`.

    Raises:
      PeerLostError: a process is lost, which may be the cause of another error.
    """
    why: Optional[str] = "it failed"
    try:
        result = main()
        why = None
        return result
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"
        # A lost process shows as an error of what waited for it; all are told of the loss itself.
        cause = watch.cause(error)
        if cause is not None:
            why = str(cause)
            raise cause from None  # a session's error shows the graph, in 100 lines
        raise
    finally:
        watch.stop()
        # Whatever ends this program, the others are told; they would serve for ever otherwise.
        tell(why)


def follow(
    me: Peer, chief: Peer, serve: Callable[[StopSignals], tuple[Optional[str], Result]]
) -> Result:
    """Serves the chief until its program has ended.

    Args:
      me: this process.
      chief: the first process.
      serve: takes the signals that this process receives, of which it tells the chief; returns
        why the program failed, or None, and the result of this process.

    Raises:
      RuntimeError: the program of the chief failed.
    """
    # The chief, which is told of a signal, needs this process until it has saved.
    with StopSignals() as signals:
        why, result = serve(signals)
    if signals.received is not None:
        raise signals.error(f"{me} was stopped, after {chief}")
    if why is not None:
        raise RuntimeError(f"{chief} has stopped: {why}")
    return result


# -- queues of TensorFlow's servers


class Mailbox:
    """A queue in the memory of a process, which other processes put values into."""

    def __init__(self, session: tf.Session, queue: tf.queue.FIFOQueue, dtype: tf.DType):
        """Creates the operations; see `mailbox`."""
        self._session, self._given = session, tf.placeholder(dtype, [])
        self._put, self._size = queue.enqueue(self._given), queue.size()
        self._take = queue.dequeue()

    def put(self, value: Any) -> None:
        """Adds a value.

        Args:
          value: an integer or bytes.
        """
        self._session.run(self._put, {self._given: value})

    def size(self) -> int:
        """Returns the number of values that are there."""
        return int(self._session.run(self._size))

    def take(self) -> Any:
        """Returns the first value, and removes it; ask for the size before, or it may wait."""
        return self._session.run(self._take)


@contextlib.contextmanager
def mailbox(
    server: tf.distribute.Server, me: Peer, owner: Peer, name: str, dtype: tf.DType, size: int = 1
) -> Iterator[Mailbox]:
    """Yields the mailbox of a process.

    Args:
      server: the server of this process.
      me: this process.
      owner: the process that has the mailbox.
      name: its name.
      dtype: the dtype of the values.
      size: how many values it has place for.
    """
    config = tf.ConfigProto(
        # Without filters, a session connects to all processes, and waits for those that have ended.
        device_filters=list({owner.device, me.device}),
        operation_timeout_in_ms=_TELL_SECS * 1000,
    )
    with tf.Graph().as_default(), tf.device(f"{owner.device}/device:CPU:0"):
        # Each process builds it in its own graph; by the name it is one queue, at its owner.
        queue = tf.queue.FIFOQueue(size, dtype, shared_name=name)
        with tf.Session(server.target, config=config) as session:
            yield Mailbox(session, queue, dtype)


def wait_at_end(peers: Sequence[Peer], index: int, server: tf.distribute.Server) -> None:
    """Waits until all processes have called this function.

    Args:
      peers: all processes; the first one counts the calls.
      index: the index of this process.
      server: the server of this process.

    Raises:
      PeerLostError: this is the first process, and another one is lost.
      tf.errors.OpError: the first process was lost before the call.
    """
    chief, me = peers[0], peers[index]
    name = "processes_at_their_end"
    with mailbox(server, me, chief, name, tf.int32, len(peers)) as come:
        # The chief stays until all have put theirs, as the queue is in its memory.
        come.put(index)
        while answers(chief.address):
            # The first one may end between two lines, once all have called.
            with contextlib.suppress(tf.errors.UnavailableError, tf.errors.AbortedError):
                if come.size() == len(peers):
                    return
            # Only the chief judges: the others may all end, and be silent, once they have seen
            # the full number.
            lost = [peer for peer in peers if not answers(peer.address)] if me is chief else []
            # They may have called, and ended, since the number was read.
            if lost and come.size() < len(peers):
                raise PeerLostError(
                    f"{me} waits at its end for {', '.join(map(str, lost))}, which does not "
                    "answer: see what it wrote last",
                    lost[0],
                )
            time.sleep(POLL_SECONDS)
