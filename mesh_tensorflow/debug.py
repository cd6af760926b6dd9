"""Looking into programs: whose line an error comes from, values, NaNs, and the time of a step."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Optional, Union

import tensorflow as tf

from mesh_tensorflow._core.errors import Site, WrongTypeError, check_choice, text_table
from mesh_tensorflow._core.operation import Operation, Tensor, check_tensors
from mesh_tensorflow._lowering.lowering import Lowering
from mesh_tensorflow._lowering.watched import values_by_name
from mesh_tensorflow._mesh.mesh_impl import COLLECTIVES
from mesh_tensorflow._watching import (
    EAGER_EVENT,
    CollectedValues,
    Collector,
    NanChecks,
    NodeNames,
    NonFiniteError,
    explain_run_error,
    living_names,
    profiling,
    told_to_user,
    use_collector,
    use_nan_checks,
)

__all__ = [
    "CollectedValues",
    "NonFiniteError",
    "OperationTime",
    "Profile",
    "Site",
    "collect",
    "explain",
    "inspect",
    "nan_checks",
    "profile",
    "time_table",
    "user_errors",
    "values",
]


def explain(error: BaseException, lowering: Optional[Lowering] = None) -> str:
    """Returns which operation an error at run time comes from, and the user's line that made it.

    TensorFlow's errors name a node. Its operation is looked up in the Lowerings that are in use.

    Args:
      error: a `tf.errors.OpError`, from `session.run` or from a call of a function.
      lowering: the Lowering that was run; if None, all that are in use are looked through.

    Returns:
      Lines of text: the operation with the shapes of its inputs and outputs, and the file, the
      line and the source as in a traceback; or that no operation was found.

    >>> import tensorflow.compat.v1 as tf
    >>> import mesh_tensorflow as mtf
    >>> with tf.Graph().as_default(), tf.Session() as session:
    ...     mesh = mtf.Mesh(mtf.Graph(), "mesh")
    ...     x = mtf.import_tf_tensor(mesh, tf.constant([2, 0]), [mtf.Dimension("a", 2)])
    ...     y = 8 // x
    ...     impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:1", "", ["cpu:0"])
    ...     lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    ...     try:
    ...         session.run(lowering.export_to_tf_tensor(y))
    ...     except tf.errors.OpError as error:
    ...         print(mtf.debug.explain(error).splitlines()[1])
      made here:
    """
    text = explain_run_error(error, None if lowering is None else [lowering.node_names])
    if text is None:
        return f"no mtf operation was found for {type(error).__name__}: {error}"
    return text


@contextlib.contextmanager
def user_errors(lowering: Optional[Lowering] = None) -> Iterator[None]:
    """Adds the operation and the user's line that made it to errors of steps run within.

    `mtf.function`, estimators and `Processes.run` do so themselves; this is for `session.run`.

    Args:
      lowering: the Lowering that is run; if None, all that are in use are looked through.

    Yields:
      None.

    Raises:
      NonFiniteError: `nan_checks` found a NaN or an infinite value.
      tf.errors.OpError: the error of the step otherwise, with a longer message.

    >>> import tensorflow.compat.v1 as tf
    >>> import mesh_tensorflow as mtf
    >>> with tf.Graph().as_default(), tf.Session() as session:
    ...     mesh = mtf.Mesh(mtf.Graph(), "mesh")
    ...     x = mtf.import_tf_tensor(mesh, tf.constant([2, 1]), [mtf.Dimension("a", 2)])
    ...     impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:1", "", ["cpu:0"])
    ...     lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    ...     with mtf.debug.user_errors(lowering):
    ...         session.run(lowering.export_to_tf_tensor(x))
    array([2, 1], dtype=int32)
    """
    with told_to_user(None if lowering is None else [lowering.node_names]):
        yield


def patterns_of(what: str, patterns: Union[str, Sequence[str]]) -> tuple[str, ...]:
    """Returns patterns of names as a tuple.

    Raises:
      WrongTypeError: they are neither a string nor strings.
    """
    several = (patterns,) if isinstance(patterns, str) else patterns
    if not isinstance(several, (list, tuple)) or not all(isinstance(p, str) for p in several):
        raise WrongTypeError(
            f'{what}: patterns of names are a string such as "encoder/*", or a list of strings, '
            f"not {patterns!r}"
        )
    return tuple(several)


def inspect(x: Tensor, name: str) -> Tensor:
    """Gives a tensor a name by which `mtf.debug.collect` returns its value.

    It adds nothing to the program, which runs as it would without.

    Args:
      x: a Tensor of any shape and dtype. Values inside of loops are not collected.
      name: a string; under the variable scope, and made unique by _1, _2, ...

    Returns:
      `x`.

    Raises:
      WrongTypeError: `x` is not a Tensor.

    >>> import tensorflow as tf
    >>> import mesh_tensorflow as mtf
    >>> mesh = mtf.Mesh(mtf.Graph(), "mesh")
    >>> x = mtf.import_tf_tensor(mesh, tf.constant([1.0, -2.0]), [mtf.Dimension("a", 2)])
    >>> y = mtf.reduce_sum(mtf.inspect(mtf.relu(x), "positive"))
    >>> impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:2", "a:all", ["cpu:0"] * 2)
    >>> with mtf.debug.collect() as values:
    ...     lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    >>> values["positive"].numpy()
    array([1., 0.], dtype=float32)
    """
    check_tensors("inspect", [x])
    scope = tf.compat.v1.get_variable_scope().name
    unique = name = f"{scope}/{name}" if scope else name
    inspected, count = x.graph.inspected, 0
    # The same tensor under the same name again is no other value.
    while unique in inspected and inspected[unique] is not x:
        count += 1
        unique = f"{name}_{count}"
    inspected[unique] = x
    return x


@contextlib.contextmanager
def collect(
    names: Union[str, Sequence[str]] = (), processor: Optional[int] = None
) -> Iterator[CollectedValues]:
    """Collects values of the programs that are lowered within, by their names.

    In eager code these are values; in a tf graph tensors to run, as `session.run(dict(values))`. An
    `mtf.function` or `mtf.pjrt.function` is traced once more when it is called within, and values
    are there after each call. Around `replicate` or `in_session` they are tensors of the calling
    graph. A plain `tf.function` has to
    return those of a `collect` inside of it.

    Args:
      names: a pattern, or several, of names of operations, such as "encoder/*/softmax"; those that
        were given to `mtf.inspect` are always collected. The second output of an operation is
        "name:1".
      processor: the number of a processor, whose slices are collected; None for whole values.

    Yields:
      A dictionary from names to values, filled when a program is lowered or called. Looking up a
      name that it lacks says which ones it has.

    >>> import tensorflow as tf
    >>> import mesh_tensorflow as mtf
    >>> mesh = mtf.Mesh(mtf.Graph(), "mesh")
    >>> x = mtf.import_tf_tensor(mesh, tf.constant([1.0, -2.0]), [mtf.Dimension("a", 2)])
    >>> y = mtf.reduce_sum(mtf.relu(x))
    >>> impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:2", "a:all", ["cpu:0"] * 2)
    >>> with mtf.debug.collect("re*", processor=1) as values:
    ...     lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    >>> {name: value.numpy().tolist() for name, value in values.items()}
    {'relu': [0.0], 'reduce': 1.0}
    """
    collector = Collector(patterns_of("collect", names), processor)
    with use_collector(collector):
        yield collector.values


def values(
    lowering: Lowering, names: Union[str, Sequence[str]] = "*", processor: Optional[int] = None
) -> CollectedValues:
    """Returns values of a Lowering by name; see `collect`.

    Args:
      lowering: a Lowering.
      names: a pattern, or several, of names of operations.
      processor: the number of a processor, whose slices are returned; None for whole values.

    Returns:
      A dictionary from names to tf.Tensors; in eager code they have values.

    Raises:
      ValueError: the mesh has no such processor.

    >>> import tensorflow as tf
    >>> import mesh_tensorflow as mtf
    >>> mesh = mtf.Mesh(mtf.Graph(), "mesh")
    >>> x = mtf.import_tf_tensor(mesh, tf.constant([1.0, -2.0]), [mtf.Dimension("a", 2)])
    >>> y = mtf.relu(x, name="positive")
    >>> impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:2", "a:all", ["cpu:0"] * 2)
    >>> lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    >>> mtf.debug.values(lowering, "pos*")["positive"].numpy()
    array([1., 0.], dtype=float32)
    """
    return CollectedValues(values_by_name(lowering, patterns_of("values", names), processor))


@contextlib.contextmanager
def nan_checks(
    enabled: bool = True, infinities: bool = True, operations: Union[str, Sequence[str]] = "*"
) -> Iterator[None]:
    """Makes programs that are lowered within fail at the first operation that gives a NaN or Inf.

    Each processor checks its own slice of each floating output. The error says which operation,
    which processor and range of its slice, how many NaNs and infinities, how the inputs were, and
    which line of the program made the operation. Checks are part of a step: with sessions, the
    Lowering is made within; an `mtf.function` is traced once more, with checks, when it is called
    within, and not compiled by XLA; one of `mtf.pjrt`, too, whose steps a CPU of the process
    computes meanwhile. The environment variable MTF_DEBUG_NANS=1 checks in all of a
    program. A step with checks takes some times as long; results are the same.

    A step that fails leaves variables as they were: a Lowering assigns only once its checks have
    passed, but for those of what is computed of assigned values, which come after the assignments.
    Lowerings know nothing of each other: where a step has several, one may have assigned before
    another finds a NaN. Programs in one Graph have one Lowering.

    Args:
      enabled: False for no checks within, whatever is outside.
      infinities: whether infinite values are errors, besides NaNs.
      operations: a pattern, or several, of names of the operations to check, as "encoder/*".

    Yields:
      None.

    Raises:
      NonFiniteError: a value is NaN or infinite. It is a `tf.errors.InvalidArgumentError`; steps
        that are run by `session.run` outside of this context and of `user_errors` raise that,
        with the operation, the processor and the slice in its text.

    >>> import tensorflow as tf
    >>> import mesh_tensorflow as mtf
    >>> batch = mtf.Dimension("batch", 4)
    >>> @mtf.function
    ... def logs(data):
    ...     mesh = mtf.Mesh(mtf.Graph(), "mesh")
    ...     y = mtf.log(mtf.import_tf_tensor(mesh, data, [batch]))
    ...     impl = mtf.placement_mesh_impl.PlacementMeshImpl("rows:2", "batch:rows", ["cpu:0"] * 2)
    ...     return mtf.Lowering(mesh.graph, {mesh: impl}).export_to_tf_tensor(y)
    >>> try:
    ...     with mtf.debug.nan_checks():
    ...         logs(tf.constant([1.0, 2.0, 0.0, 4.0]))
    ... except mtf.debug.NonFiniteError as error:
    ...     print(error.message.splitlines()[1])
      its slice: 1 Inf of 2 elements
    """
    checks = NanChecks(infinities, patterns_of("nan_checks", operations)) if enabled else None
    # A failed check is an error of TensorFlow's, of which user_errors makes a NonFiniteError.
    with use_nan_checks(checks), user_errors():
        yield


def trace_files(logdir: str) -> list[Path]:
    """Returns the trace files of the last profile in a directory.

    Args:
      logdir: the directory that the profiler was given, or one within.

    Raises:
      FileNotFoundError: it has none.
    """
    files = sorted(Path(logdir).rglob("*.xplane.pb"))
    if not files:
        raise FileNotFoundError(
            f"no profile in {logdir}: a profile is written at the end of "
            "`with mtf.debug.profile(logdir):`, in plugins/profile/<time>/*.xplane.pb"
        )
    # By the times of the files: names have times only below the directories of several runs.
    last = max(files, key=lambda file: (file.stat().st_mtime_ns, file.parent)).parent
    return [file for file in files if file.parent == last]


def read_events(path: Path) -> Iterator[tuple[str, float]]:
    """Yields the events of a trace file: the name of each, "node:type" of nodes, and its seconds.

    Args:
      path: a file `*.xplane.pb`.
    """
    # No public module of TensorFlow: should it move, the package can be imported all the same.
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    for plane in xplane_pb2.XSpace.FromString(path.read_bytes()).planes:
        names = {key: metadata.name for key, metadata in plane.event_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                yield names.get(event.metadata_id, ""), event.duration_ps * 1e-12


_TRANSFERS = ("_Send", "_Recv", "_HostSend", "_HostRecv", "Send", "Recv")
_OUTSIDE = "(outside of mtf operations)"


@dataclasses.dataclass
class OperationTime:
    """The time of an operation, or of one kind of its communication.

    Attributes:
      name: the operation's name.
      type: its class, such as "EinsumOperation".
      kind: "compute"; or "allreduce", "allconcat", "alltoall" or "receive"; or "transfer", for what
        TensorFlow copies between devices.
      seconds: the sum over processors and steps. Parts of a step run at the same time, so the sum
        of all may be larger than the time that has passed.
      executions: how many TensorFlow operations were executed.
      site: the line that made it, or None.
    """

    name: str
    type: str
    kind: str
    seconds: float = 0.0
    executions: int = 0
    site: Optional[Site] = None


# What a row of a time table is of: the name of the row of an operation.
_ROWS: dict[str, Callable[[OperationTime], str]] = {
    "operation": lambda t: t.name,
    "type": lambda t: t.type,
    "layer": lambda t: t.name.rpartition("/")[0] or t.name,
    "kind": lambda t: "",
}


class Profile:
    """The times of the steps that ran within `mtf.debug.profile`.

    Attributes:
      logdir: the directory of the trace, which TensorBoard shows, too.
    """

    def __init__(self, logdir: str, tables: Optional[Sequence[NodeNames]] = None):
        """Reads nothing yet.

        Args:
          logdir: a directory with a trace.
          tables: the names of the nodes of Lowerings; those that are in use if None.
        """
        self.logdir = logdir
        self.names = list(living_names() if tables is None else tables)
        self._times: Optional[list[OperationTime]] = None

    def times(self) -> list[OperationTime]:
        """Returns the times of operations and of their communication, the longest first.

        Raises:
          FileNotFoundError: the directory has no trace.
        """
        if self._times is None:
            events = itertools.chain(*map(read_events, trace_files(self.logdir)))
            self._times = _times(events, self.names)
        return list(self._times)

    def table(self, by: str = "operation", limit: int = 25) -> str:
        """Returns a table of times.

        Args:
          by: a row for each "operation"; "type", that is class of operations; "layer", that is
            all of a name but its last part; or "kind": computation and each collective.
          limit: the number of rows; the others are added up.

        Raises:
          ValueError: `by` is something else.
        """
        check_choice("time_table", "by", by, _ROWS)
        name_of = _ROWS[by]
        groups: dict[tuple[str, str], list[OperationTime]] = {}
        for t in self.times():
            # Communication has rows of its own, beside what its operation computes.
            groups.setdefault((name_of(t), t.kind), []).append(t)
        rows = [
            (
                name,
                kind,
                sum(t.executions for t in ts),
                sum(t.seconds for t in ts),
                # Operations of one type or layer are made at several lines.
                str(ts[0].site or "") if by == "operation" else "",
            )
            for (name, kind), ts in groups.items()
        ]
        rows.sort(key=lambda row: -row[3])
        total = sum(row[3] for row in rows)
        if len(rows) > limit:
            # In one row, so that the column of shares adds up to all of the time.
            rest = rows[limit:]
            sums = sum(row[2] for row in rest), sum(row[3] for row in rest)
            rows = [*rows[:limit], (f"{len(rest)} others", "", *sums, "")]
        rows.append(("total", "", sum(row[2] for row in rows), total, ""))
        header = [by if by != "kind" else "", "kind", "executions", "ms", "%", "made at"]
        cells = [
            [name, kind, f"{n:,}", f"{s * 1e3:.3f}", f"{100 * s / total if total else 0:.1f}", site]
            for name, kind, n, s, site in rows
        ]
        return "\n".join(text_table([header, *cells], left=(0, 1, 5)))

    def __str__(self) -> str:
        return self.table()


def _times(events: Iterable[tuple[str, float]], tables: Sequence[NodeNames]) -> list[OperationTime]:
    """Returns the times of operations, the longest first."""
    times: dict[tuple[str, str], OperationTime] = {}
    found: dict[str, tuple[Optional[Operation], str]] = {}
    for node, seconds in events:
        if node not in found:
            # Many events have one name, and looking it up tries all parts of it.
            found[node] = _operation_of(node, tables)
        op, kind = found[node]
        if not kind:
            continue
        name = _OUTSIDE if op is None else op.name
        time = times.get((name, kind))
        if time is None:
            time = times[name, kind] = OperationTime(
                name, "" if op is None else type(op).__name__, kind, site=op.site if op else None
            )
        time.seconds += seconds
        time.executions += 1
    return sorted(times.values(), key=lambda t: -t.seconds)


def _operation_of(name: str, tables: Sequence[NodeNames]) -> tuple[Optional[Operation], str]:
    """Returns the operation of an event, or None, and its kind; the kind is "" if it is no part."""
    if name.startswith(EAGER_EVENT):
        node, kind = name.removeprefix(EAGER_EVENT), "compute"
        place = next(filter(None, (t.place(f"{node}/") for t in tables)), None)
        return (place[0], kind) if place else (None, "")
    # What TensorFlow executes is called node:type; the trace has other events, too.
    node, colon, tf_type = name.rpartition(":")
    # A double colon is that of a function of C++, and none between a node and its type.
    if not colon or node.endswith(":") or not tf_type.lstrip("_").isidentifier() or " " in node:
        return None, ""
    place = next(filter(None, (t.place(node) for t in tables)), None)
    if tf_type in _TRANSFERS:
        kind = "transfer"
    else:
        rest = place[1].split("/") if place else []
        kind = next(
            (c for c in COLLECTIVES if any(_is_collective(part, c) for part in rest)), "compute"
        )
    return (place[0] if place else None), kind


def _is_collective(part: str, collective: str) -> bool:
    """Returns whether a part of a node's name is that of a collective, such as allreduce_1."""
    return part == collective or part.rpartition("_")[0] == collective


@contextlib.contextmanager
def profile(logdir: Optional[str] = None, level: int = 3) -> Iterator[Profile]:
    """Profiles the steps that run within, by operation of the program.

    It works for sessions, functions and eager programs, with every mesh implementation. Run a step
    before, so that building and tracing are not part of it.

    Args:
      logdir: a directory for the trace, which TensorBoard shows, too; a temporary one if None.
      level: how much TensorFlow traces of the host: 2 leaves out operations that take little time.

    Yields:
      A Profile, whose `table` and `times` may be asked for after the context.

    >>> import tensorflow as tf
    >>> import mesh_tensorflow as mtf
    >>> batch, d_in = mtf.Dimension("batch", 64), mtf.Dimension("d_in", 64)
    >>> @mtf.function
    ... def norm(data):
    ...     mesh = mtf.Mesh(mtf.Graph(), "mesh")
    ...     x = mtf.import_tf_tensor(mesh, data, [batch, d_in])
    ...     y = mtf.reduce_sum(mtf.square(x))
    ...     impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:2", "batch:all", ["cpu:0"] * 2)
    ...     return mtf.Lowering(mesh.graph, {mesh: impl}).export_to_tf_tensor(y)
    >>> data = tf.ones([64, 64])
    >>> value = norm(data)
    >>> with mtf.debug.profile() as p:
    ...     value = norm(data)
    >>> "square" in p.table()
    True
    """
    logdir = tempfile.mkdtemp(prefix="mtf_profile_") if logdir is None else logdir
    options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=level)
    tf.profiler.experimental.start(logdir, options)
    result = Profile(logdir, [])
    try:
        with profiling():
            yield result
    finally:
        # Also after an error: a process has one profiler, which could not be started again.
        tf.profiler.experimental.stop()
        # At the end, since programs may be lowered within.
        result.names = living_names()


def time_table(logdir: str, by: str = "operation", limit: int = 25) -> str:
    """Returns the table "time per operation and collective" of the last trace in a directory.

    The Lowerings whose steps were traced have to be in use still: operations are found by the names
    of their nodes.

    Args:
      logdir: a directory that `profile`, TensorFlow's profiler or a callback wrote a trace to.
      by: "operation", "type", "layer" or "kind"; see `Profile.table`.
      limit: the number of rows.

    Raises:
      FileNotFoundError: the directory has no trace.

    >>> import tempfile
    >>> import tensorflow as tf
    >>> import mesh_tensorflow as mtf
    >>> mesh = mtf.Mesh(mtf.Graph(), "mesh")
    >>> x = mtf.import_tf_tensor(mesh, tf.constant([1.0, -2.0]), [mtf.Dimension("a", 2)])
    >>> y = mtf.relu(x, name="positive")
    >>> impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:2", "a:all", ["cpu:0"] * 2)
    >>> logdir = tempfile.mkdtemp()
    >>> with mtf.debug.profile(logdir):
    ...     lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    >>> "positive" in mtf.debug.time_table(logdir)
    True
    """
    return Profile(logdir).table(by, limit)
