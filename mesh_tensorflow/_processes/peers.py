"""The other processes of a program: waiting for them, what ends when one is lost, how all end.

A process is there as long as its server answers a new connection. A killed process refuses the
connection at once; one that hangs, or whose machine is down, does not answer in time.

Of a program that one process, the chief, runs, while others lend it their devices, the others are
told how it ended. Processes with TensorFlow's servers do so by queues in their memory.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, Optional, TypeVar

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import reason
from mesh_tensorflow._stop_signals import StopSignals

ANSWER_SECS = 5.0  # the time for a peer to answer
POLL_SECONDS = 0.2  # the interval at which a process checks what it waits for
PING_SECS = 0.5  # between rounds of pings
MISSES = 3  # in a row, after which a peer is lost
_TELL_SECS = 10  # for a message by a queue
GRACE_SECS = 15.0  # for a program to raise an error, before its process is ended
# How long a process that finds a peer lost keeps running, so that all others find the same peer
# lost: a process that ends later than that ended only because of it.
_STAY_SECS = 4 * PING_SECS

Result = TypeVar("Result")

# The connection preface of an HTTP/2 client, with empty settings; servers answer with theirs.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


class PeerLostError(RuntimeError):
    """Another process of the cluster does not answer.

    Attributes:
      text: the message.
      peer: the lost process.
      is_complete: whether the message says what to do, and nothing has to be added.
    """

    is_complete = False

    def __init__(self, text: str, peer: Peer) -> None:
        """Creates a PeerLostError.

        Args:
          text: the message.
          peer: the lost process.
        """
        super().__init__(text)
        self.text, self.peer = text, peer

    def __str__(self) -> str:
        return self.text


class Peer(NamedTuple):
    """A process of a cluster."""

    job: str
    task: int
    address: str

    def __str__(self) -> str:
        return f"/job:{self.job}/task:{self.task} at {self.address}"

    @property
    def device(self) -> str:
        """The device string of the process."""
        return f"/job:{self.job}/task:{self.task}"


def server_of(
    me: Peer, spec: tf.train.ClusterSpec, config: tf.ConfigProto, protocol: Optional[str] = None
) -> tf.distribute.Server:
    """Starts the server of this process.

    Args:
      me: this process.
      spec: the addresses of all processes.
      config: the configuration of the server.
      protocol: how servers talk; gRPC if None.

    Raises:
      RuntimeError: TensorFlow could not start the server; the message names its port.
    """
    # By default, a call to a lost process waits forever.
    os.environ.setdefault("GRPC_FAIL_FAST", "true")
    try:
        return tf.distribute.Server(spec, me.job, me.task, protocol, config)
    except tf.errors.OpError as error:
        raise RuntimeError(
            f"{me}: its server cannot be started ({reason(error)}). Another process may use the "
            "port, as one that is left of an earlier run: end it, or give this process another "
            "port in the TF_CONFIG of all"
        ) from error


def place_of(address: str) -> tuple[str, int]:
    """Returns the host and the port of an address.

    Args:
      address: "host:port"; an IPv6 host may have brackets.
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def answers(address: str, seconds: float = ANSWER_SECS) -> bool:
    """Returns whether a server answers a connection.

    Args:
      address: "host:port".
      seconds: how long to wait.
    """
    try:
        with socket.create_connection(place_of(address), timeout=seconds) as connection:
            # The kernel accepts connections even for a process that hangs, so it has to answer.
            connection.sendall(_HELLO)
            return bool(connection.recv(1))
    except OSError:
        return False


def _answers(peer: Peer) -> bool:
    return answers(peer.address)


def wait_for(
    peers: Iterable[Peer], me: Peer, seconds: float, is_there: Callable[[Peer], bool] = _answers
) -> None:
    """Waits until processes are there.

    Args:
      peers: the processes.
      me: this process.
      seconds: the maximum time to wait.
      is_there: whether a process is there; it is not asked again once it was.

    Raises:
      PeerLostError: a process was not there in time.
    """
    deadline, missing = time.monotonic() + seconds, list(peers)
    warned = False
    while True:
        missing = [peer for peer in missing if not is_there(peer)]
        if not missing:
            return
        names = ", ".join(map(str, missing))
        if time.monotonic() >= deadline:
            raise PeerLostError(
                f"{me} waited {seconds:g} s for {names}, in vain: start it with the same "
                "TF_CONFIG but for its task, and see that nothing blocks the port",
                missing[0],
            )
        if not warned:
            tf.logging.info("%s waits for %s.", me, names)
            warned = True
        time.sleep(POLL_SECONDS)


class Watch:
    """Asks other processes in a thread whether they are there; ends what waits for a lost one.

    A step that waits in a collective for a lost process ends in no other way, unless it has a limit
    of time, nor can it be interrupted: so its session is closed. A program that then goes on to
    hang, in another call of that kind, can be ended with its process.
    """

    def __init__(
        self,
        peers: Iterable[Peer],
        me: Optional[Peer] = None,
        is_there: Callable[[Peer], bool] = _answers,
        misses: int = MISSES,
    ) -> None:
        """Starts to watch, until `stop` or the end of this process.

        Args:
          peers: the other processes, all of which have been there.
          me: this process, if it is to end when its program does not, some time after a loss.
          is_there: whether a process is there.
          misses: how often in a row it is not, if it is lost.
        """
        self._me, self._is_there, self._limit = me, is_there, misses
        # The peers stay the same, so that any thread may go over them while another one counts.
        self._misses = dict.fromkeys(peers, 0)
        self._silent_since: dict[Peer, float] = {}  # in the order of time
        self._begun = self._ended = 0  # rounds of pings
        # The last ones: those of estimators are not told apart from ones that are closed.
        self._sessions: collections.deque[tf.Session] = collections.deque(maxlen=8)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch of processes", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops watching; the watch does not end the process any more."""
        self._stopped.set()

    # -- what is lost

    def lost(self) -> list[Peer]:
        """Returns the lost peers, the first one first, without those that ended because of it."""
        since = {
            peer: moment
            # Copied at once, as the thread that pings may change it during the iteration.
            for peer, moment in self._silent_since.copy().items()
            if self._misses[peer] >= self._limit
        }
        first = min(since.values(), default=math.inf)
        return [peer for peer, moment in since.items() if moment < first + _STAY_SECS]

    def settled(self) -> list[Peer]:
        """Returns the lost peers, once it is known whether those that are silent are lost.

        A program's error may come before the first ping that a lost process does not answer.
        """
        begun = self._begun
        # By rounds, and not by a time: a machine that has much to do may take long for one ping.
        while not self.lost() and self._thread.is_alive():
            # A round under way may have asked a process before it was lost; a later one has not.
            if not self._silent_since and self._ended > begun:
                break  # all have been there since
            time.sleep(PING_SECS / 2)
        return self.lost()

    def confirmed(self) -> list[Peer]:
        """Returns the lost peers, after enough time for all processes to find the same ones."""
        lost = self.settled()
        if lost:
            time.sleep(_STAY_SECS)
        return lost

    def has_lost(self, peer: Peer) -> NoReturn:
        """Raises PeerLostError for a peer that is found to be lost, or for one that was before.

        Args:
          peer: the process.
        """
        self._silent_since.setdefault(peer, time.monotonic())
        self._misses[peer] = self._limit
        # A ping that was answered before may be counted only now.
        raise self._error_of(next(iter(self.lost()), peer))

    def check(self) -> None:
        """Raises PeerLostError if a process is lost."""
        for peer in self.lost():
            raise self._error_of(peer)

    def cause(self, error: BaseException) -> Optional[PeerLostError]:
        """Returns the error for a lost process if another error may be a consequence of it.

        Args:
          error: what the program raised.
        """
        if isinstance(error, PeerLostError):
            return None
        # That of a session or a collective, which does not say that a process is lost.
        if isinstance(error, (tf.errors.OpError, RuntimeError)):
            self.settled()
        return next(map(self._error_of, self.lost()), None)

    def _error_of(self, peer: Peer) -> PeerLostError:
        return PeerLostError(
            f"{peer} does not answer any more: the process ended, or its machine or the "
            f"network is down. {self._me} stops. Training resumes from the last checkpoint when "
            "all processes are started again",
            peer,
        )

    # -- what ends then

    def add_session(self, session: tf.Session) -> None:
        """Adds a session to close when a process is lost.

        Args:
          session: a session.
        """
        self._sessions.append(session)

    @contextlib.contextmanager
    def ending(self, session: tf.Session) -> Iterator[None]:
        """Context in which a session runs a step, which ends as soon as a process is lost.

        Args:
          session: the session, which is closed then.
        """
        self.add_session(session)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # it has been closed
                self._sessions.remove(session)

    def call(self, function: Callable[[], None], seconds: float, what: str) -> None:
        """Calls a function that may wait for another process, in a separate thread.

        A TensorFlow call that waits for a lost process cannot be interrupted, so its thread keeps
        running.

        Args:
          function: a function without arguments or result.
          seconds: the maximum time that it may take.
          what: a description of the function, for the error message.

        Raises:
          PeerLostError: a process is lost.
          TimeoutError: all processes answer, but the function took too long.
        """
        errors: list[BaseException] = []

        def run() -> None:
            try:
                function()
            except BaseException as error:  # raised again in the calling thread
                errors.append(error)

        thread = threading.Thread(target=run, name=what, daemon=True)
        thread.start()
        deadline = time.monotonic() + seconds
        while thread.is_alive():
            thread.join(PING_SECS / 2)
            # Asked again: it may have ended meanwhile, and then no process is to blame.
            lost = self.confirmed() if thread.is_alive() and self.lost() else []
            if lost:
                raise PeerLostError(f"{', '.join(map(str, lost))}", lost[0])
            if time.monotonic() >= deadline and thread.is_alive():
                raise TimeoutError(f"{what} took longer than {seconds:g} s")
        if errors:
            raise errors[0]

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._begun += 1
            for peer in self._misses:
                # Noted before the ping, which waits for seconds if a process has fallen silent.
                moment = time.monotonic()
                if self._is_there(peer):
                    self._misses[peer] = 0
                    self._silent_since.pop(peer, None)
                else:
                    self._silent_since.setdefault(peer, moment)
                    self._misses[peer] += 1
            self._ended += 1
            # A round takes seconds, in which the program and its peers may have ended in order.
            if self.lost() and not self._stopped.is_set():
                self.close_sessions()
                if self._me is not None:
                    self._end_process()
                    return
            self._stopped.wait(PING_SECS)

    def close_sessions(self) -> None:
        """Closes the sessions, so that what waits in one for another process ends."""
        with contextlib.suppress(IndexError):  # there are no more
            while True:
                # In threads: closing a session may wait for the lost process.
                close = threading.Thread(target=_close, args=(self._sessions.pop(),), daemon=True)
                close.start()

    def _end_process(self) -> None:
        if not self._stopped.wait(GRACE_SECS):
            print(f"error: {self._error_of(self.lost()[0])}", file=sys.stderr, flush=True)
            # `sys.exit` would end this thread only, while the main one hangs in a call to the lost
            # peer.
            os._exit(1)


def _close(session: tf.Session) -> None:
    try:
        session.close()
    except (tf.errors.OpError, RuntimeError) as error:
        tf.logging.info("A session was not closed: %s", error)


# -- a program that the chief runs


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

# A server numbers its requests by chance, in a new thread for each step, whose generator begins
# with one of 2**32 seeds. It takes a number that is among the last 100,000 for a request that came
# twice, and refuses it: of 360,000 steps that do nothing, TensorFlow 2.21 refused 9.
_REFUSED = "request was received twice"


def unless_refused(run: Callable[[], Result]) -> Result:
    """Returns what a step on a server returns, which the server may refuse by mistake at first.

    Args:
      run: runs the step, of which nothing has run if it is refused.
    """
    while True:
        try:
            return run()
        except tf.errors.AbortedError as error:
            if _REFUSED not in error.message:
                raise


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
        self._run(self._put, {self._given: value})

    def size(self) -> int:
        """Returns the number of values that are there."""
        return int(self._run(self._size))

    def take(self) -> Any:
        """Returns the first value, and removes it; it may wait, up to the time limit."""
        return self._run(self._take)

    def _run(self, fetch: Any, fed: Optional[dict[tf.Tensor, Any]] = None) -> Any:
        return unless_refused(lambda: self._session.run(fetch, fed))


@contextlib.contextmanager
def mailbox(
    server: tf.distribute.Server,
    me: Peer,
    owner: Peer,
    name: str,
    dtype: tf.DType,
    size: int = 1,
    seconds: int = _TELL_SECS,
) -> Iterator[Mailbox]:
    """Yields the mailbox of a process.

    Args:
      server: the server of this process.
      me: this process.
      owner: the process that has the mailbox.
      name: its name.
      dtype: the dtype of the values.
      size: how many values it has place for.
      seconds: the time limit of a call; 0 for none.
    """
    config = tf.ConfigProto(
        # Without filters, a session connects to all processes, and waits for those that have ended.
        device_filters=list({owner.device, me.device}),
        operation_timeout_in_ms=seconds * 1000,
    )
    with tf.Graph().as_default(), tf.device(f"{owner.device}/device:CPU:0"):
        # Each process builds it in its own graph; by the name it is one queue, at its owner.
        values = tf.queue.FIFOQueue(size, dtype, shared_name=name)
        session = tf.Session(server.target, config=config)
        box = Mailbox(session, values, dtype)
    # Outside of the graph, as programs are built while a mailbox is open.
    with contextlib.closing(session):
        yield box


# -- what all processes tell each other, in turns

Exchange = Callable[[Any], list[Any]]


def alone(value: Any) -> list[Any]:
    """The Exchange of a process that is the only one.

    Args:
      value: what this process says.
    """
    return [value]


class _Exchange:
    """Lets each process say something, and returns what all have said; the first one collects it.

    Who fails says why in place of a value, and all others fail then, instead of waiting for it: at
    once if they are in a step, which would need it.

    Attributes:
      failure: the error of another process that has failed, or None.
      is_told: whether the first process said so, and so all know.
    """

    failure: Optional[RuntimeError] = None
    is_told = False

    def __init__(self, peers: Sequence[Peer], index: int, out: Sequence[Mailbox], watch: Watch):
        """Begins; see `exchanging`."""
        self._peers, self._index = peers, index
        self._out, self._watch = out, watch
        self._heard = queue.SimpleQueue[list[Any]]()

    def __call__(self, value: Any) -> list[Any]:
        """Returns what all processes say, by their numbers; all of them call it.

        Args:
          value: what this process says, which JSON can say.
        """
        if self._index:
            self.send([self._index, value, None])
            return self._take()[1]
        by_peer = {0: value}
        for _ in self._out:
            index, other, _ = self._take()
            by_peer[index] = other
        values = [by_peer[i] for i in range(len(self._peers))]
        self.send([0, values, None])
        return values

    def send(self, message: list[Any]) -> None:
        """Sends to the first process, and from it to all others."""
        for box in self._out:
            box.put(json.dumps(message).encode())

    def fail(self, why: str) -> None:
        """Tells the others that this process fails."""
        for peer, box in zip(self._peers[1:] if self._index == 0 else self._peers[:1], self._out):
            # One that has failed as well would keep this process waiting until the time-out.
            if answers(peer.address):
                with contextlib.suppress(tf.errors.OpError):
                    box.put(json.dumps([self._index, None, why]).encode())

    def _take(self) -> list[Any]:
        # The others may search for a minute, or be lost meanwhile.
        while True:
            with contextlib.suppress(queue.Empty):
                message = self._heard.get(timeout=POLL_SECONDS)
                if self.failure is not None:
                    raise self.failure
                return message
            self._watch.check()

    @contextlib.contextmanager
    def listening(self, opened: contextlib.AbstractContextManager[Mailbox]) -> Iterator[None]:
        """Context in which a thread takes what the others say; then its mailbox is closed."""
        over = threading.Event()

        def listen(inbox: Mailbox) -> None:
            with contextlib.suppress(tf.errors.OpError):  # as it is closed, or its server lost
                while self.failure is None:
                    index, _, why = message = json.loads(inbox.take())
                    if why is not None:
                        self.is_told = index == 0
                        self.failure = RuntimeError(f"{self._peers[index]} has stopped: {why}")
                    self._heard.put(message)
                # Again and again: the program may be about to begin a step.
                self._watch.close_sessions()
                while not over.wait(POLL_SECONDS):
                    self._watch.close_sessions()

        with contextlib.ExitStack() as closed, opened as inbox:
            thread = threading.Thread(target=listen, args=[inbox], name="exchange", daemon=True)
            thread.start()
            # A session that runs while Python ends may abort the process.
            closed.callback(thread.join, ANSWER_SECS)
            closed.callback(over.set)
            yield


@contextlib.contextmanager
def exchanging(
    peers: Sequence[Peer], index: int, server: tf.distribute.Server, name: str, watch: Watch
) -> Iterator[Exchange]:
    """Context in which all processes tell each other values, in turns.

    If one fails within, the others do so at their next turn, with its reason.

    Args:
      peers: all processes.
      index: the index of this process.
      server: the server of this process.
      name: that of this context, which is the same in all processes, and of no other one.
      watch: the Watch over the other processes.
    """
    me = peers[index]
    others = peers[1:] if index == 0 else peers[:1]

    def box(owner: Peer, seconds: int) -> contextlib.AbstractContextManager[Mailbox]:
        # A value of each process, and why it fails then.
        return mailbox(server, me, owner, name, tf.string, 2 * len(peers), seconds)

    with contextlib.ExitStack() as stack:
        out = [stack.enter_context(box(peer, _TELL_SECS)) for peer in others]
        exchange = _Exchange(peers, index, out, watch)
        stack.enter_context(exchange.listening(box(me, 0)))
        try:
            yield exchange
        except BaseException as error:
            why = error
            # What failed here may be a step that was ended, as another process has failed.
            ended = isinstance(error, (tf.errors.OpError, PeerLostError))
            if ended and exchange.failure is not None:
                why = exchange.failure
            if not exchange.is_told:
                exchange.fail(f"{type(why).__name__}: {why}")
            if why is error:
                raise
            raise why from None


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
