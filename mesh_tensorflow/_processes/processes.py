"""The processes of a program: which there are, by the environment, and how they join."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional

import tensorflow.compat.v1 as tf
from tensorflow.python.distribute.cluster_resolver.slurm_cluster_resolver import (
    expand_hostlist,
    expand_tasks_per_node,
)

from mesh_tensorflow._paths import readable
from mesh_tensorflow._processes.peers import (
    POLL_SECONDS,
    Exchange,
    Peer,
    PeerLostError,
    Watch,
    answers,
    exchanging,
    place_of,
    server_of,
    unless_refused,
    wait_at_end,
    wait_for,
)

_PORT = 8476  # of the first task of a node, if only the nodes are known
# Numbers of processes that launchers set, which do not say where the others are.
_COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE", "MV2_COMM_WORLD_SIZE", "WORLD_SIZE")
RUNTIME = "MTF_RUNTIME"  # "pjrt" where the launcher started processes for JAX
_TASKS = ("chief", "master", "worker")  # types of tasks that run the program


# -- the environment


def read_tf_config(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns what the variable TF_CONFIG says; an empty dictionary if it is not set.

    Args:
      environment: environment variables.

    Raises:
      ValueError: the variable is not a JSON object.
    """
    text = environment.get("TF_CONFIG", "").strip()
    if not text:
        return {}
    try:
        read = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"TF_CONFIG is not JSON ({error}): it is {text!r}. Unset it for a run of one process"
        ) from error
    if not isinstance(read, dict):
        raise ValueError(f"TF_CONFIG should be a JSON object, but is {text!r}")
    return read


def addresses_and_index(environment: Mapping[str, str]) -> Optional[tuple[tuple[str, ...], int]]:
    """Returns the addresses of all processes and the index of this one.

    Args:
      environment: environment variables, such as TF_CONFIG or those of SLURM.

    Returns:
      (strings "host:port", the index); None if they do not describe several processes.

    Raises:
      ValueError: TF_CONFIG or the SLURM variables are malformed.
    """
    tf_config = read_tf_config(environment)
    if tf_config:
        return _from_tf_config(tf_config)
    if _number(environment, "SLURM_NTASKS", "1") > 1 and "SLURM_PROCID" in environment:
        return _from_slurm(environment)
    return None


def _from_tf_config(config: Mapping[str, Any]) -> tuple[tuple[str, ...], int]:
    try:
        cluster, task = config["cluster"], config["task"]
        chief = list(cluster.get("chief") or cluster.get("master") or [])
        # The chief first, as process 0 is the one that initializes, saves and reports.
        workers = chief + list(cluster.get("worker", []))
        kind, index = task["type"], task["index"]
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(
            f'TF_CONFIG must be JSON such as {{"cluster": {{"worker": ["host0:port", '
            f'"host1:port"]}}, "task": {{"type": "worker", "index": 0}}}}; got '
            f"{json.dumps(config)!r}"
        ) from e
    if kind not in _TASKS:
        raise ValueError(
            f"TF_CONFIG: this task is {kind} {index}, but all processes here run one program, and "
            f"each is one of {', '.join(_TASKS)}: make it a worker"
        )
    check_addresses(workers)
    index = task_index(index)
    own = range(len(chief), len(workers)) if kind == "worker" else range(len(chief))
    index += own.start
    if index not in own:
        raise ValueError(
            f"TF_CONFIG: task {task} is not one of the {len(workers)} in the cluster {cluster}"
        )
    return tuple(workers), index


def check_addresses(addresses: Sequence[object]) -> None:
    """Checks the addresses of all processes in TF_CONFIG.

    Args:
      addresses: the entries of TF_CONFIG.

    Raises:
      ValueError: one is not of the form "host:port", or two processes have the same.
    """
    for address in addresses:
        # From the right, since an IPv6 address has colons of its own.
        host, _, port = str(address).rpartition(":")
        is_port = port.isdecimal() and 0 < int(port) < 65536
        if not isinstance(address, str) or not host or not is_port:
            raise ValueError(
                f'TF_CONFIG: the address {address!r} should be "host:port", with a port of 1 to '
                "65535 that the process can be reached at"
            )
    twice = [address for address, n in collections.Counter(addresses).items() if n > 1]
    if twice:
        raise ValueError(
            f"TF_CONFIG: {', '.join(map(str, twice))} is the address of several tasks, but each "
            f"process needs a port of its own; the addresses are {', '.join(map(str, addresses))}"
        )


def task_index(index: object) -> int:
    """Returns the number of a task in TF_CONFIG.

    Args:
      index: the entry of TF_CONFIG, an integer or its digits.

    Raises:
      ValueError: it is something else, or negative.
    """
    # Not isinstance, since a JSON true would be the number 1.
    if type(index) is int and index >= 0:
        return index
    if isinstance(index, str) and index.isdecimal():
        return int(index)
    raise ValueError(
        f'TF_CONFIG: the "index" of "task" is {index!r}; it should be a whole number, and counts '
        "from 0"
    )


def check_described(environment: Mapping[str, str]) -> None:
    """Checks that a launcher that has started several processes says where they are.

    Args:
      environment: environment variables.

    Raises:
      ValueError: it says only how many there are, or not even that.
    """
    if addresses_and_index(environment) is not None:
        return
    for name in _COUNTS:
        count = _number(environment, name, "1")
        if count > 1:
            raise ValueError(
                f"fit: {name}={count} says that there are {count} processes, but not where they "
                "are, so each would train a model of its own. Start them with python -m "
                "mesh_tensorflow.launch --processes N script.py, by SLURM, or set TF_CONFIG in "
                f"each; or unset {name} to train in one process"
            )


def _number(environment: Mapping[str, str], name: str, default: str = "") -> int:
    text = environment.get(name) or default
    if not text.strip().isdecimal():
        launcher = "SLURM" if name.startswith("SLURM") else "a launcher"
        raise ValueError(
            f"{name} should be a number, as {launcher} sets it, but is {text!r}. Unset it, or set "
            f"TF_CONFIG, if {launcher} has not started this process"
        )
    return int(text)


def _from_slurm(environment: Mapping[str, str]) -> tuple[tuple[str, ...], int]:
    # Those of the step first: srun may run fewer tasks, on fewer nodes, than the job has.
    nodes = _expand(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", ""))
    counts = _expand_counts(
        environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "")
    )
    count = _number(environment, "SLURM_NTASKS")
    index = _number(environment, "SLURM_PROCID")
    if index >= count:
        raise ValueError(
            f"SLURM_PROCID is {index}, but SLURM_NTASKS says that there are {count} tasks, counted "
            "from 0. Set TF_CONFIG if these variables are not SLURM's own"
        )
    if len(nodes) != len(counts) or sum(counts) != count:
        raise ValueError(
            f"SLURM: {count} tasks, but the nodes are {nodes} with {counts} tasks. Set TF_CONFIG "
            "if these variables are not SLURM's own"
        )
    # In blocks, as SLURM distributes tasks by default.
    tasks = [(node, i) for node, n in enumerate(counts) for i in range(n)]
    how = environment.get("SLURM_DISTRIBUTION") or "block"
    # What follows is about the cores within a node.
    if re.split("[:,]", how)[0] == "cyclic":
        # A task of each node in turn: in the order of their numbers there, and then of the nodes.
        tasks.sort(key=lambda task: (task[1], task[0]))
    own = [environment.get(name) or "" for name in ("SLURM_NODEID", "SLURM_LOCALID")]
    # Other distributions, such as planes, are told from those two by where this task is.
    if all(own) and tuple(map(str, tasks[index])) != tuple(own):
        raise ValueError(
            f"SLURM: task {index} is number {own[1]} of node {own[0]}, but with the distribution "
            f"{how} it would be number {tasks[index][1]} of node {tasks[index][0]}. Run srun with "
            "--distribution=block or cyclic, or set TF_CONFIG in each task"
        )
    return tuple(f"{nodes[node]}:{_PORT + i}" for node, i in tasks), index


def _expand(nodes: str) -> list[str]:
    """Expands node names in SLURM's short form, such as "gpu[01-03,7],login".

    It calls SLURM's own command if there is one; otherwise it supports the common forms.
    """
    if "[" in nodes and shutil.which("scontrol"):
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False
        )
        if done.returncode == 0 and done.stdout.split():
            return done.stdout.split()
    try:
        return expand_hostlist(nodes) if nodes else []
    except ValueError as e:
        raise ValueError(
            f"SLURM_STEP_NODELIST: cannot tell which nodes {nodes!r} are: 'scontrol show hostnames'"
            " does not list them here. Set TF_CONFIG instead"
        ) from e


def _expand_counts(counts: str) -> list[int]:
    """Expands numbers in SLURM's short form, such as "2(x3),1"."""
    try:
        return expand_tasks_per_node(counts) if counts else []
    except ValueError as e:
        raise ValueError(
            'SLURM_STEP_TASKS_PER_NODE should be numbers, as SLURM sets it, such as "2(x3),1", '
            f"but is {counts!r}. Set TF_CONFIG, if this is no task of SLURM"
        ) from e


def is_pjrt() -> bool:
    """Returns whether the processes, if there are several, are connected by JAX.

    Raises:
      ValueError: the environment variable has a value that no launcher sets.
    """
    runtime = os.environ.get(RUNTIME) or "tensorflow"
    if runtime not in ("tensorflow", "pjrt"):
        raise ValueError(
            f'{RUNTIME} is {runtime!r}; it should be "tensorflow" or "pjrt", or not be set'
        )
    return runtime == "pjrt"


def task_of(index: int) -> tuple[str, int]:
    """Returns the type and the number of a task, as in TF_CONFIG.

    Args:
      index: the number of a process.
    """
    # TensorFlow counts each type from 0; here the chief is process 0, and workers follow it.
    return ("worker", index - 1) if index else ("chief", 0)


def variables_for(addresses: Sequence[str], index: int, runtime: str) -> dict[str, str]:
    """Returns environment variables by which a process knows the others.

    Args:
      addresses: "host:port" of each process.
      index: the number of the process.
      runtime: what connects them: "tensorflow" or "pjrt".
    """
    kind, number = task_of(index)
    config = {
        "cluster": {"chief": [addresses[0]], "worker": list(addresses[1:])},
        "task": {"type": kind, "index": number},
    }
    return {"TF_CONFIG": json.dumps(config), RUNTIME: runtime}


def several_of_jax() -> bool:
    """Returns whether there are several processes, which are connected by JAX."""
    return is_pjrt() and processes().count > 1


# -- the processes


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of a program, and the index of this one.

    Attributes:
      addresses: "host:port" of each.
      index: the number of this process.
      job: the name of the TensorFlow job that they are tasks of.
    """

    addresses: tuple[str, ...] = ("localhost:0",)
    index: int = 0
    job: str = "worker"
    # In a list, since the fields of a frozen dataclass cannot be set once the server is started.
    _watches: list[Watch] = dataclasses.field(
        default_factory=list, init=False, repr=False, compare=False
    )

    @property
    def count(self) -> int:
        """Number of processes."""
        return len(self.addresses)

    @property
    def is_chief(self) -> bool:
        """Whether this process reports, initializes and saves."""
        return self.index == 0

    def devices(self, kind: str = "CPU", per_process: int = 1) -> list[str]:
        """Returns the devices of all processes, in order.

        Args:
          kind: "CPU" or "GPU".
          per_process: the number of devices of each process.
        """
        return [
            f"/job:{self.job}/replica:0/task:{task}/device:{kind}:{i}"
            for task in range(self.count)
            for i in range(per_process)
        ]

    def local(self, per_process: int = 1) -> list[int]:
        """Returns the indices of this process's devices in the list of `devices`."""
        return list(range(self.index * per_process, (self.index + 1) * per_process))

    def config(self, per_process: int = 1) -> tf.ConfigProto:
        """Returns a tf.ConfigProto for servers and sessions of these processes."""
        config = tf.ConfigProto(device_count={"CPU": per_process})
        # One task resolves the groups of collectives for all, so all have to name the same one.
        leader = f"/job:{self.job}/replica:0/task:0"
        config.experimental.collective_group_leader = leader
        return config

    @property
    def peers(self) -> list[Peer]:
        """All processes."""
        return [Peer(self.job, task, address) for task, address in enumerate(self.addresses)]

    def start_server(
        self, per_process: int = 1, wait_seconds: float = 300.0
    ) -> tf.distribute.Server:
        """Starts this process's tf.distribute.Server, and waits for those of the others.

        Args:
          per_process: the number of logical CPUs of each process.
          wait_seconds: the maximum time to wait for the other processes.

        Returns:
          The server.

        Raises:
          PeerLostError: a process has not been started; the message names it.
          RuntimeError: the server cannot be started, for example because its port is in use.
        """
        me, spec = self.peers[self.index], tf.train.ClusterSpec({self.job: list(self.addresses)})
        # Before the wait: the others wait for this server, too.
        server = server_of(me, spec, self.config(per_process))
        # A connection that is refused at first would keep failing for some time.
        others = self.peers[: self.index] + self.peers[self.index + 1 :]
        wait_for(others, me, wait_seconds)
        # Not earlier: to a Watch, a process that has not been started yet would be lost.
        self._watches[:] = [Watch(others)]
        return server

    def run(
        self,
        session: tf.Session,
        fetches: object,
        feed_dict: Optional[Mapping[Any, Any]] = None,
        timeout_seconds: float = 600.0,
    ) -> Any:
        """Runs a step like `session.run`, without waiting forever for a lost process.

        Args:
          session: a tf.Session on this process's server.
          fetches: as for `session.run`.
          feed_dict: likewise.
          timeout_seconds: the maximum time of the step, including waiting for other processes.

        Returns:
          The fetched values.

        Raises:
          PeerLostError: a process is lost; the message names it.
          tf.errors.DeadlineExceededError: no process is lost, but the step took too long.
        """
        # A limit as well as a watch: a process may answer pings and hang in a step.
        limit = tf.RunOptions(timeout_in_ms=int(1000 * timeout_seconds))
        watch = self._watches[0].ending(session) if self._watches else contextlib.nullcontext()
        with self.naming_lost_peers(), watch:
            return unless_refused(lambda: session.run(fetches, feed_dict, options=limit))

    @contextlib.contextmanager
    def naming_lost_peers(self) -> Iterator[None]:
        """Raises PeerLostError instead of a session's error within, if a process is lost.

        A session's error shows where the graph was made, in a hundred lines; here, that is no
        matter.

        Raises:
          PeerLostError: it names this process and the lost one, and says what to do.
        """
        try:
            yield
        except (tf.errors.OpError, PeerLostError) as error:
            # Such contexts may be nested, and the inner one has said all.
            if getattr(error, "is_complete", False):
                raise
            lost = self._lost()
            if not lost:
                raise
            names = ", ".join(map(str, lost))
            how = (
                ""
                if isinstance(error, PeerLostError)
                else f" (the session raised {type(error).__name__})"
            )
            complete = PeerLostError(
                f"{self.peers[self.index]} lost {names}, which does not answer: see what it wrote "
                f"last; all processes have to be started again, from the last checkpoint{how}",
                lost[0],
            )
            complete.is_complete = True
            raise complete from None

    def _lost(self) -> list[Peer]:
        """Returns the lost processes, without those that ended because of them."""
        if self._watches:
            return self._watches[0].confirmed()
        return [peer for peer in self.peers if not answers(peer.address)]

    def exchanging(
        self, server: tf.distribute.Server, name: str
    ) -> contextlib.AbstractContextManager[Exchange]:
        """Context in which all processes tell each other values, in turns; see `exchanging`.

        Args:
          server: the server from `start_server`.
          name: that of this context, which is the same in all processes, and of no other one.
        """
        return exchanging(self.peers, self.index, server, name, self._watches[0])

    @property
    def machines(self) -> int:
        """Number of machines that the processes are on, by their addresses."""
        return len({place_of(address)[0] for address in self.addresses})

    def finish(self, server: tf.distribute.Server) -> None:
        """Waits until all processes have called this; call it at the end of each process.

        A process that has finished may still be needed: the chief coordinates all groups of
        collectives, including those that it is not a member of.

        Args:
          server: the server from `start_server`.

        Raises:
          PeerLostError: a process was lost before it called this; the chief's message names it.
        """
        with self.naming_lost_peers():
            wait_at_end(self.peers, self.index, server)

    def initialize(
        self,
        session: tf.Session,
        checkpoint: Optional[str] = None,
        timeout_seconds: float = 1800.0,
    ) -> None:
        """Initializes all variables, or restores them from a checkpoint.

        Each process calls it after its graph is complete. The chief initializes or restores the
        variables of meshes, wherever their slices are; the others wait for it. Each process
        initializes its own copy of other variables, such as the global step.

        Args:
          session: a tf.Session on this process's server.
          checkpoint: a path, such as from tf.train.latest_checkpoint; None to initialize.
          timeout_seconds: the maximum time, including waiting for the chief. A lost process is
            detected immediately.

        Raises:
          PeerLostError: a process is lost; the message names it.
          TimeoutError: no process is lost, but it took too long.
        """
        variables = tf.global_variables()
        saved = set(
            tf.train.load_checkpoint(readable(checkpoint)).get_variable_to_shape_map()
            if checkpoint
            else ()
        )
        # The chief alone sets slices: a slower process would overwrite what a step has changed.
        mine = [v for v in variables if self.is_chief or not getattr(v, "is_bound", False)]
        # What begins with given parts, each process sets in its own slices; steps begin when all
        # have done so.
        by_parts = {
            v: assignments for v in variables if (assignments := getattr(v, "by_parts", {}))
        }
        own = [
            op
            for assignments in by_parts.values()
            for device, op in assignments.items()
            if (tf.DeviceSpec.from_string(device).task or 0) == self.index
        ]
        new = [v for v in mine if v.op.name not in saved and v not in by_parts]
        restored = [v for v in mine if v.op.name in saved]
        # Of all variables, not only of `mine`, so that the others wait for what the chief sets.
        missing = tf.report_uninitialized_variables(variables)
        initializer = tf.group(tf.variables_initializer(new + tf.local_variables()), *own)
        saver = tf.train.Saver(restored) if restored else None
        graph = tf.get_default_graph()

        def initialize() -> None:
            # A default graph is of one thread only; without it, TensorFlow 2 would be eager in this
            # one.
            with graph.as_default():
                session.run(initializer)
                if saver is not None and checkpoint is not None:
                    saver.restore(session, readable(checkpoint))
                while session.run(missing).size:
                    time.sleep(POLL_SECONDS)

        watch = self._watches[0] if self._watches else Watch([])
        chief = self.peers[0]
        what = f"{self.peers[self.index]}: Processes.initialize, which waits for {chief},"
        with self.naming_lost_peers():
            watch.call(initialize, timeout_seconds, what)


def processes(environment: Optional[Mapping[str, str]] = None) -> Processes:
    """Returns the processes of this program, from environment variables.

    Args:
      environment: environment variables; those of this process if None. It reads TF_CONFIG, in
        TensorFlow's format; or SLURM_PROCID, SLURM_NTASKS, SLURM_STEP_NODELIST and
        SLURM_STEP_TASKS_PER_NODE. Without either, this is the only process.

    Raises:
      ValueError: TF_CONFIG or the SLURM variables are malformed.
    """
    environment = os.environ if environment is None else environment
    described = addresses_and_index(environment)
    return Processes(*described) if described else Processes()
