"""Lowering: turns a Graph into TensorFlow operations, given a MeshImpl for each Mesh.

An mtf program is a list of operations on tensors with named dimensions, independent of devices. A
Lowering visits the list once, in order, and calls the method `lower` of each operation. That takes
the laid-out tensors of its inputs from `lowering.tensors`, calls the mesh implementation, and sets
the laid-out tensors of its outputs. Nothing is searched, and each operation is lowered on its own.

An example: `y = relu(einsum([x, w], [batch, d_out]))` with x [batch=4, d_in=6], w [d_in=6,
d_out=8], on the mesh "rows:2,cols:2" in the layout "batch:rows,d_in:cols". Processors are
numbered row by row:

    processor  (row, col)   slice of x [2, 3]    slice of w [3, 8]
    0          (0, 0)       x[0:2, 0:3]          w[0:3]
    1          (0, 1)       x[0:2, 3:6]          w[3:6]
    2          (1, 0)       x[2:4, 0:3]          w[0:3]
    3          (1, 1)       x[2:4, 3:6]          w[3:6]

1. The variable w has two different slices. It is replicated over rows: processors 0 and 2 hold
   equal slices, which one memory domain stores once.
2. The einsum is a product of slices on each processor: [2, 3] times [3, 8] gives [2, 8]. As
   `d_in` is summed over and split over cols, each product is a *partial sum*. `set_partial_sum`
   records a LazyAllreduceSum over mesh axis 1. Nothing is communicated yet.
3. The relu is not linear, so it needs the sum: it asks the LazyAllreduceSum for its laid-out
   tensor. Now processors 0 and 1 add up their slices, and so do 2 and 3. This allreduce is
   counted: 4 processors x 16 elements, once. An addition of two such einsums would have added the
   partial sums first, with a single allreduce for both.
4. `export_to_tf_tensor(y)` joins the slices [2, 8] of row 0 and row 1 to the whole [4, 8].

Gradients are ordinary operations, created before lowering. The gradient of w sums over `batch`,
which is split over rows: a partial sum over mesh axis 0, whose value the optimizer's update needs.
That is the gradient allreduce of data parallelism; no code is specific to it.

Counters and checks refer to the *requested* mesh. Where several processors are one device,
operations are lowered through an *executed* mesh with fewer processors (see `MeshPair`): on one
CPU, the program above is one matrix product, and its counters are still those of four processors.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import os
import reprlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import (
    NotInLoweringError,
    WrongTypeError,
    did_you_mean,
    dims_text,
    first_names,
    slip,
    text_table,
    warn_once,
)
from mesh_tensorflow._core.graph import Graph, Mesh
from mesh_tensorflow._core.layout import LayoutRules, joined_names, plain_shape, uneven_names
from mesh_tensorflow._core.operation import (
    Collective,
    LaidOutLike,
    Operation,
    PendingSums,
    Tensor,
    allreduces,
    with_inner_operations,
)
from mesh_tensorflow._core.placement import collectives_of, inner_mesh_impl, moving
from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._lowering.rewrites import largest_stacked_slice, rewrite_stored_layouts
from mesh_tensorflow._lowering.watched import (
    all_checks,
    check_outputs,
    log_operation,
    parted_at_assignments,
    values_by_name,
)
from mesh_tensorflow._mesh.mesh_impl import (
    HasSlices,
    LaidOutTensor,
    LazyAllreduceSum,
    MeshImpl,
    MeshPair,
    wrong_slices,
)
from mesh_tensorflow._mesh.step_inputs import operations_so_far, read_before_increments
from mesh_tensorflow._mesh.variables.storage import ValueOfVariable
from mesh_tensorflow._units import counted
from mesh_tensorflow._watching import (
    NanChecks,
    NodeNames,
    collectors,
    nan_checks_in_force,
    operation_log,
    record_lowering,
    tell_lowering_error,
    trace_mark,
)
from mesh_tensorflow.ops._movement.reshape import redistributed
from mesh_tensorflow.ops._source import ImportOperation
from mesh_tensorflow.ops._variable import Variable
from mesh_tensorflow.utils import outside_all_rewrites, within_program

# -- what is checked before anything is changed: arguments, and rules that split nothing

_SHOWN = 16


def dimension_names(operations: Iterable[Operation]) -> set[str]:
    """Returns the names of the dimensions of all tensors, including those within loops."""
    return {
        name
        for op in with_inner_operations(operations)
        for x in op.inputs + op.outputs
        for name in x.shape.dimension_names
    }


def rules_that_apply(
    rules: LayoutRules,
    operations: Iterable[Operation],
    mesh_shape: Shape,
    usual_dims: Collection[str],
    usual_mesh_dims: Collection[str],
) -> LayoutRules:
    """Returns layout rules without those that are expected to split nothing in this program.

    One layout is used for many models and meshes. The remaining rules can be checked for slips.

    Args:
      rules: LayoutRules.
      operations: all operations of the program.
      mesh_shape: a Shape.
      usual_dims: dimension names of other models, which the program may lack.
      usual_mesh_dims: dimension names of other meshes, which the mesh may lack.
    """
    of_program, of_mesh = dimension_names(operations), mesh_shape.dimension_names
    return rules.of_pairs(
        (d, m)
        for d, m in rules.pairs
        if (d in of_program or d not in usual_dims)
        and any(name in of_mesh or name not in usual_mesh_dims for name in joined_names(m, of_mesh))
    )


def check_rules_apply(
    graph: Graph,
    mesh_to_impl: Mapping[Mesh, MeshImpl],
    slip: Callable[..., None] = slip,
) -> None:
    """Reports a slip if the program or the meshes lack the dimension of a layout rule.

    A rule that several meshes share needs to match one of them. On a mesh without dimensions, of
    one processor, no rule is reported.

    Args:
      graph: the program.
      mesh_to_impl: a dictionary from Mesh to MeshImpl, which has the layout rules.
      slip: what reports: it takes a message, and a key of those that are given once.

    Raises:
      ValueError: within `mtf.strict()`, unless `slip` is given.
    """
    # A user-defined MeshImpl may have layout rules of another class.
    impls = [
        impl
        for impl in mesh_to_impl.values()
        if isinstance(getattr(impl, "layout_rules", None), LayoutRules)
    ]
    rules = sorted({rule for impl in impls for rule in impl.layout_rules.pairs})
    of_program = sorted(dimension_names(graph.operations)) if rules else []
    of_meshes = list(dict.fromkeys(d for impl in impls for d in impl.shape.dimension_names))
    for rule in rules if of_program and of_meshes else ():  # otherwise there is nothing to split
        splits_less = any(name in of_meshes for name in joined_names(rule[1], of_meshes))
        splits = "less than it says" if splits_less and rule[0] in of_program else "nothing"
        for fault in _faults(rule, of_program, of_meshes):
            slip(
                f"layout rule {':'.join(rule)} splits {splits}: {fault}",
                # Only the first sentence, which names the side of the rule: the rest lists
                # dimensions, and would repeat the warning for each program.
                key=f"rule/{rule}/{fault.partition('. ')[0]}",
            )
        if rule[0] in graph.names_lent:
            _check_lent(graph, rule, slip)
    for impl in impls:
        _check_stored(graph.operations, impl, slip)


def _check_lent(graph: Graph, rule: tuple[str, str], slip: Callable[..., None]) -> None:
    """Reports a slip if a rule's dimension is in attention only because it is in the layout."""
    own = {
        name
        for op in with_inner_operations(graph.operations)
        if isinstance(op, (Variable, ImportOperation))
        for x in op.outputs
        for name in x.shape.dimension_names
    }
    if rule[0] not in own:
        slip(
            f"layout rule {':'.join(rule)} splits attention alone: no variable and no input of the "
            f"model has {rule[0]!r}. They have {', '.join(sorted(own))}"
            f"{did_you_mean(rule[0], own)} Correct the rule or leave it out",
            key=f"lent/{':'.join(rule)}",
        )


def _check_stored(
    operations: Iterable[Operation], mesh_impl: MeshImpl, slip: Callable[..., None]
) -> None:
    """Reports a slip if no variable has the dimension of a rule for how variables are stored."""
    stored = mesh_impl.stored_layout
    shapes = [op.shape for op in operations if isinstance(op, Variable)] if stored else []
    # A graph that was lowered before has stored names by now, and rules have the plain ones.
    names = sorted({name for shape in shapes for name in plain_shape(shape).dimension_names})
    for rule in stored.rules.pairs if stored and names else ():
        if rule[0] not in names:
            slip(
                f"variable_layout rule {':'.join(rule)} stores nothing in parts: no variable has "
                f"{rule[0]!r}. Variables have {first_names(names, _SHOWN)}"
                f"{did_you_mean(rule[0], names)} "
                "Correct the rule or leave it out",
                key=f"variable_layout/{rule}",
            )


def _faults(
    rule: tuple[str, str], of_program: Sequence[str], of_meshes: Sequence[str]
) -> Iterator[str]:
    """Yields the problems of a layout rule, with fixes."""
    tensor_dim, mesh_dim = rule
    # A rule with its sides exchanged would otherwise give two reports, neither of which says so.
    if tensor_dim in of_meshes and tensor_dim not in of_program and mesh_dim in of_program:
        yield (
            f"{tensor_dim!r} is a dimension of the mesh, and {mesh_dim!r} one of the program. A "
            f"rule names the program's first; did you mean {mesh_dim}:{tensor_dim}?"
        )
        return
    named = [(tensor_dim, "program", of_program)]
    named += [(name, "mesh", of_meshes) for name in joined_names(mesh_dim, of_meshes)]
    for name, whose, known in named:
        if name not in known:
            yield (
                f"{name!r} is not there. The {whose} has "
                f"{first_names(known, _SHOWN) or 'no dimensions'}"
                f"{did_you_mean(name, known)} Correct the rule or leave it out"
            )


# A gather of less than this, of each processor, is not worth a word.
_MUCH = 2**20


def warn_of_gather(
    op: Operation, outer: Mapping[Mesh, MeshPair], inner: Mapping[Mesh, MeshPair]
) -> None:
    """Warns if an operation makes processors hold much more than their slices of its inputs.

    Args:
      op: an Operation, which cannot work on parts of a dimension.
      outer: the pair of each mesh.
      inner: the pair with the layout that it is lowered in, of meshes that have another one.
    """

    def gathered(x: Tensor) -> int:
        old, new = outer[x.mesh].requested, inner[x.mesh].requested
        return (new.slice_size(x.shape) - old.slice_size(x.shape)) * x.dtype.size

    x = max((x for x in op.inputs if x.mesh in inner), key=gathered, default=None)
    if x is None or gathered(x) < _MUCH:
        return
    old, new = outer[x.mesh].requested, inner[x.mesh].requested
    split = [d for d in x.shape if old.splitting_axis(d) != new.splitting_axis(d)]
    others = [d for d in x.shape if d not in split and d.size > 1]
    warn_once(
        f"{op.name}: {type(op).__name__} cannot work on parts of {dims_text(split)}, so that each "
        f"processor gathers {x.name} {x.shape}, {gathered(x):,} bytes more than its slice. Where "
        f"the mesh divides {dims_text(others) or 'another dimension'}, parts are exchanged instead",
        key=f"gather/{type(op).__name__}/{[d.name for d in split]}",
    )


def fit_merged(operations: Iterable[Operation]) -> bool:
    """Returns whether no operation, including inner ones, may count on each processor's slice.

    Classes and functions of the user's may, so processors are not merged where there are such.
    """
    return not any(op.counts_on_slices for op in with_inner_operations(operations))


def check_impls(mesh_to_impl: object) -> None:
    """Checks the argument `mesh_to_impl` of a Lowering; a slip if processors are missing.

    Raises:
      TypeError: it is not a dictionary, or a value in it is not a MeshImpl.
    """
    impls = mesh_to_impl.values() if isinstance(mesh_to_impl, Mapping) else [None]
    for impl in impls:
        # Only what surely is none: a mesh implementation of the user's own need not be a MeshImpl.
        if impl is None or isinstance(impl, str):
            got = repr(mesh_to_impl if impl is None else impl)
            raise TypeError(
                "Lowering: mesh_to_impl must be a dictionary from mtf.Mesh to a MeshImpl, as "
                '{mesh: mtf.placement_mesh_impl.PlacementMeshImpl("all:1", "", [""])}, and not '
                f"{got}"
            )
    for impl in impls:
        if isinstance(impl, MeshImpl):
            impl.check_processors()


# -- what is always told: counters and sizes, as text


def pretty_print_counters(counters: Iterable[tuple[str, int]]) -> str:
    """Returns counters summed by name and by each prefix of a name, indented.

    Args:
      counters: pairs (name, number); slashes in names make a hierarchy.
    """
    totals: collections.Counter[str] = collections.Counter()
    for name, value in counters:
        levels = name.split("/")
        for depth in range(1, len(levels) + 1):
            totals["/".join(levels[:depth])] += value
    # Below a million, the six digits of `g` show every integer in full.
    return "\n".join(
        f"{' ' * name.count('/')}{name}: {total:{'.3g' if total >= 1e6 else 'g'}}"
        for name, total in sorted(totals.items())
    )


def write_log(text: str, log_file: Optional[str] = None) -> None:
    """Writes text to TensorFlow's log, and appends it to a file if one is given."""
    tf.logging.info("%s", text)
    if log_file:
        with tf.io.gfile.GFile(log_file, "a") as f:
            f.write(text + "\n")


def log_variable_sizes(
    var_list: Sequence[Variable],
    tag: str,
    verbose: bool = True,
    mesh_to_impl: Optional[Mapping[Mesh, MeshImpl]] = None,
    log_file: Optional[str] = None,
) -> None:
    """Logs the sizes of variables and of their slices, and the totals.

    Args:
      var_list: Variable operations.
      tag: the label of the line of totals.
      verbose: whether to write a line for each variable.
      mesh_to_impl: a dictionary from Mesh to MeshImpl; if None, slices are as large as the
        variables.
      log_file: a path to also write to, or None.
    """
    if not var_list:
        return
    lines, total, slice_total = [], 0, 0
    for v in sorted(var_list, key=lambda v: v.name):
        size = v.size
        # The shape that is stored: with `variable_layout` or `zero` a processor holds less than its
        # part in the layout.
        slice_size = mesh_to_impl[v.mesh].slice_size(v.stored_shape) if mesh_to_impl else size
        total += size
        slice_total += slice_size
        if verbose:
            lines.append(
                f"Variable {v.name:<60s} size {size:<12d} slice_size {slice_size:<12d} {v.shape}"
            )
            lines += [f"    {name}" for name in getattr(v, "original_names", [])]
    lines.append(
        f"{tag:<30s} count: {len(var_list):<7d} Total size: {total:<16d} "
        f"Total slice_size: {slice_total:<16d}"
    )
    write_log("\n".join(lines), log_file)


def communication_table(collectives: Iterable[tuple[str, MeshImpl, Collective]]) -> str:
    """Returns a table of communication by operation, collective and mesh axes."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for kind, mesh_impl, collective in collectives:
        axes = dims_text(mesh_impl.shape[a] for a in collective.mesh_axes)
        total = groups.setdefault((kind, collective.kind, axes), [0, 0, 0])
        total[0] += 1
        total[1] += collective.elements
        total[2] += collective.bytes
    if not groups:
        return "no communication"
    rows = [
        [*key, str(count), f"{elements:,}", f"{size:,}"]
        for key, (count, elements, size) in sorted(groups.items())
    ]
    sums = [sum(values[i] for values in groups.values()) for i in range(3)]
    rows.append(["total", "", "", str(sums[0]), f"{sums[1]:,}", f"{sums[2]:,}"])
    header = ["operation", "collective", "mesh axes", "count", "elements", "bytes"]
    return "\n".join(text_table([header, *rows], left=(0, 1, 2)))


# -- the Lowering


class Lowering:
    """The TensorFlow form of a Graph.

    Attributes:
      graph: the Graph.
      mesh_to_impl: a dictionary from Mesh to MeshImpl.
      operations: from Assign operations, and others that have effects, to tf operations.
      assigned: from Variables to the last assignment to each, in the order of the program.
      first_reads: from Variables whose slices are tf variables to reads, before all assignments.
      tensors: from Tensors to laid-out values.
      variables: from Variables to LaidOutVariables.
      loop_tapes: from loops to the saved values that their gradients read.
      random_keys: keys of the random operations in loops, in the current iteration.
      node_names: the operations, by the names of their TensorFlow nodes.
      checked: the slices that have been checked for NaNs, by their ids.
      states: slices that those checks have looked at, and what they counted, by ids of the slices.
      in_other_layout: whether an operation is being lowered in another layout than its tensors'.
      communicated: for each of `collectives`, the name of the operation whose value it is of.
      computes_again: whether what is lowered has been computed before, so that assignments are done
        and texts printed.
    """

    def __init__(
        self,
        graph: Graph,
        mesh_to_impl: Mapping[Mesh, MeshImpl],
        autostack: bool = True,
        log_file: Optional[str] = None,
        keep_masters: bool = False,
    ):
        """Lowers a graph.

        Args:
          graph: a Graph.
          mesh_to_impl: a dictionary from Mesh to MeshImpl.
          autostack: whether to stack small variables that are similar.
          log_file: a path to also write the sizes of variables and the counters to.
          keep_masters: whether to store a whole copy of each variable besides its slices. If False,
            savers, initializers and reads of the masters use the slices; only masters that the tf
            graph uses already are stored.

        Raises:
          ValueError: an operation cannot be lowered in this layout; the message names it. In eager
            code, where lowering computes, variables are then as they were, unless what has failed
            depends on an assignment.
        """
        # What is made from here on is the step, whose reads go before increments of what it reads.
        start = operations_so_far()
        # Checks come before rewrites, so that a graph which they refuse can be lowered otherwise.
        check_impls(mesh_to_impl)
        check_rules_apply(graph, mesh_to_impl)
        # Before variables are stacked: a stack has no longer the dimensions of one weight to
        # rename.
        rewrite_stored_layouts(graph, mesh_to_impl)
        self._begin(graph, mesh_to_impl)
        # Before stacking and lowering: a master that is in use is not bound to slices.
        for master in [m for v in graph.all_variables for m in v.masters if keep_masters]:
            master.keep()
        if autostack:
            self.autostack()
        operations, passed = [op for op in graph.operations if not op.is_on_demand], []
        if nan_checks_in_force() is not None or tf.executing_eagerly():
            # Nothing is assigned before all that depends on no assignment has been computed, and
            # has passed its checks: a step that fails leaves all variables as they were.
            first, operations = parted_at_assignments(operations)
            self.lower_operations(first)
            passed = all_checks(self)
        with tf.control_dependencies(passed):
            self.lower_operations(operations)
        # Users still hold the values of variables from before stacking, and export them by these.
        self.tensors.update({x: self.tensors[y] for x, y in graph.stacked_values.items()})
        read_before_increments(start=start)
        log_variable_sizes(
            graph.trainable_variables, "Trainable Variables", True, mesh_to_impl, log_file
        )
        log_variable_sizes(graph.all_variables, "All Variables", False, mesh_to_impl, log_file)
        write_log("Counters:\n" + pretty_print_counters(self._counters), log_file)
        # Last, since it may sum partial sums whose values no operation needs, which adds counters.
        for collector in collectors():
            values = values_by_name(self, collector.patterns, collector.processor)
            collector.values.update(values)
        record_lowering(self)

    def _begin(self, graph: Graph, mesh_to_impl: Mapping[Mesh, MeshImpl]) -> None:
        """Sets the attributes, with nothing lowered yet."""
        self.graph = graph
        self.mesh_to_impl = mesh_to_impl
        self._tf_graph = None if tf.executing_eagerly() else tf.get_default_graph()
        merges = fit_merged(graph.operations)
        self._pairs = {mesh: MeshPair.of(impl, merges) for mesh, impl in mesh_to_impl.items()}
        self.in_other_layout = False
        # Values with the numbers that padding has; with the values, so that no id is used again.
        self._fills: dict[tuple, tuple[LaidOutLike, Any]] = {}
        self._may_pad = any(uneven_names(pair.executed) for pair in self._pairs.values())
        self.operations: dict[Operation, tf.Operation] = {}
        self.assigned: dict[Any, tf.Operation] = {}
        self.first_reads: dict[Any, list[tf.Operation]] = {}
        self.tensors: dict[Tensor, Any] = {}
        self.variables: dict[Any, Any] = {}
        self.loop_tapes: dict[Operation, tuple] = {}
        self.random_keys: dict[Operation, tf.Tensor] = {}
        self.node_names = NodeNames()
        self.checked: dict[int, tf.Tensor] = {}
        self.states: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}
        self._counters: list[tuple[str, int]] = []
        self._collectives: list[tuple[str, MeshImpl, Collective]] = []
        self.communicated: list[str] = []
        self.computes_again = False
        # The innermost operation that is being lowered, which collectives are counted for.
        self._at: Optional[Operation] = None

    def __repr__(self) -> str:
        stored = sum(
            self.mesh_to_impl[v.mesh].slice_size(v.stored_shape) for v in self.graph.all_variables
        )
        elements = sum(collective.elements for _, _, collective in self._collectives)
        lines = [
            f"<Lowering of {self.graph!r}",
            *(f"  {mesh.name!r} on {impl!r}" for mesh, impl in self.mesh_to_impl.items()),
            f"  {counted(stored, 'parameter')} on each processor; "
            f"{counted(len(self._collectives), 'collective')} of "
            f"{counted(elements, 'element')} in all>",
        ]
        return "\n".join(lines)

    # -- lowering operations

    @contextlib.contextmanager
    def again(self, is_again: bool = True) -> Iterator[None]:
        """Returns a context in which operations are computed a second time, without their effects.

        Args:
          is_again: False for a context that changes nothing.
        """
        before, self.computes_again = self.computes_again, self.computes_again or is_again
        try:
            yield
        finally:
            self.computes_again = before

    def lower_operations(self, operations: Iterable[Operation]) -> None:
        """Lowers operations in order; loops also call it for their bodies.

        Args:
          operations: operations in topological order.
        """
        checks, log = nan_checks_in_force(), operation_log()
        for op in operations:
            # A loop lowers its body by this method too, so the operation outside is put back
            # afterwards. Whatever communicates is counted for the innermost one: for a partial sum
            # that is the operation that needs it, not the one that began it.
            outer, self._at = self._at, op
            try:
                self._lower_operation(op, checks, log)
            finally:
                # Also after an error: a Lowering may be asked for what was made later once more.
                self._at = outer

    def _lower_operation(
        self, op: Operation, checks: Optional[NanChecks], log: Optional[logging.Logger]
    ) -> None:
        """Lowers one operation, checks its outputs, and counts and logs it."""
        communicated = len(self._collectives)
        with tf.name_scope(op.name) as scope, trace_mark(op):
            # Not op.name: TensorFlow numbers the scopes of a second Lowering in a graph.
            self.node_names.add(scope, op)
            try:
                inner = self._inner_pairs(op)
                if inner or self._may_pad:
                    self._lower_in_layout(op, inner)
                else:
                    op.lower(self)
            except Exception as e:
                tell_lowering_error(e, op)
                raise
            if checks is not None:
                check_outputs(self, op, checks)
        for y in op.outputs:
            self.add_counter(f"output/{type(op).__name__}", self.laid_out_size(y))
            self.add_counter(f"output_unique/{type(op).__name__}", y.size)
        if log is not None:
            log_operation(log, self, op, communicated)

    def _lower_in_layout(self, op: Operation, inner: Mapping[Mesh, MeshPair]) -> None:
        """Lowers an operation in layouts that it can work in, on inputs whose padding is set."""
        outer = self._pairs
        pairs = {**outer, **inner}
        outside = {x: self.tensors[x] for x in op.inputs}
        if inner:
            warn_of_gather(op, outer, inner)
        try:
            for x in outside:
                value = self._moved(op, x, outer, inner) if x.mesh in inner else outside[x]
                self.tensors[x] = self._filled(op, x, value, pairs[x.mesh].executed)
            self._pairs, self.in_other_layout = pairs, bool(inner)
            op.lower(self)
            results = {y: self._moved(op, y, inner, outer) for y in op.outputs if y.mesh in inner}
        finally:
            # Whatever else uses the inputs finds them as they are laid out.
            self._pairs, self.in_other_layout = outer, False
            self.tensors.update(outside)
        for y, value in results.items():
            self.set_tensor_lowering(y, value)

    def _filled(self, op: Operation, x: Tensor, value: LaidOutLike, impl: MeshImpl) -> Any:
        """Returns the value of an input, with padding set along what the operation reduces."""
        dims, number = op.filling(x)
        dims = [d for d in dims if d in x.shape and impl.padding(d)]
        if not dims:
            return value
        if tf.executing_eagerly():
            return impl.filled(value, x.shape, dims, number)
        # A loss and its gradient need the same. Not from one function's graph in another one's.
        key = id(value), tuple(dims), number, id(tf.get_default_graph())
        if key not in self._fills:
            self._fills[key] = value, impl.filled(value, x.shape, dims, number)
        return self._fills[key][1]

    def _inner_pairs(self, op: Operation) -> dict[Mesh, MeshPair]:
        """Returns the pairs of other layouts, of meshes in whose layout an operation cannot work.

        Args:
          op: an Operation.
        """
        inner = {}
        for mesh in {x.mesh: None for x in op.inputs + op.outputs}:
            impl = inner_mesh_impl(op, self.requested_impl(mesh), mesh)
            if impl is not None:
                inner[mesh] = self._pair(mesh).with_layout(impl.layout_rules)
        return inner

    def _moved(
        self, op: Operation, x: Tensor, old: Mapping[Mesh, MeshPair], new: Mapping[Mesh, MeshPair]
    ) -> Any:
        """Returns the value of a Tensor in the layout of another pair, and counts what moves."""
        before, after = old[x.mesh], new[x.mesh]
        value = self.tensors[x].to_laid_out_tensor()
        moves, factored, _ = moving(x, before.requested, after.requested)
        elements = factored.slice_size * before.requested.size
        for collective in collectives_of(moves, elements, x.dtype.size, before.requested.shape):
            self._count_collective(before.requested, collective, "relayout", op)
        impl = after.executed
        steps = moving(x, before.executed, impl)
        value = redistributed(impl, value, *steps, impl.slice_shape(x.shape))
        # Annotated by the layout on both sides, XLA moves it here, and not within the operation.
        return after.executed_form(x, impl.LaidOutTensor.from_tensor_list(value.all_slices))

    def mesh_impl(self, m: Union[Mesh, Operation, Tensor]) -> MeshImpl:
        """Returns the executed MeshImpl of a Mesh, or of the Mesh of an Operation or Tensor.

        Raises:
          NotInLoweringError: no MeshImpl was given for it. It is a KeyError and a ValueError.
        """
        return self._pair(m).executed

    @property
    def executed_impls(self) -> list[MeshImpl]:
        """The executed MeshImpl of each Mesh."""
        return [pair.executed for pair in self._pairs.values()]

    def requested_impl(self, m: Union[Mesh, Operation, Tensor]) -> MeshImpl:
        """Returns the requested MeshImpl of a Mesh, which counters and checks refer to."""
        return self._pair(m).requested

    def import_slices(self, tensor: Tensor, laid_out: Union[LaidOutLike, HasSlices]) -> Any:
        """Returns a laid-out value of the requested mesh with the slices of the executed mesh.

        Args:
          tensor: the Tensor whose value it is.
          laid_out: a LaidOutTensor, or an object with the attribute `tensor_list`, its slices.
        """
        return self._pair(tensor).import_requested(tensor, laid_out)

    def _pair(self, m: Union[Mesh, Operation, Tensor]) -> MeshPair:
        mesh = m if isinstance(m, Mesh) else m.mesh
        if mesh not in self._pairs:
            raise NotInLoweringError(
                f"no mesh implementation for mesh {mesh.name!r}: give Lowering a dictionary "
                "{mesh: mtf.placement_mesh_impl.PlacementMeshImpl(...)}"
            )
        return self._pairs[mesh]

    def set_tensor_lowering(self, tensor: Tensor, laid_out_tensor: LaidOutLike) -> None:
        """Sets the lowered value of a Tensor, after checking the shape of its slices."""
        # Before the check, whose shapes are those of the executed mesh.
        if isinstance(laid_out_tensor, ValueOfVariable):
            # Operations compute with the value, and not with the variables that it shows to users.
            laid_out_tensor = laid_out_tensor.to_laid_out_tensor()
        laid_out_tensor = self._pair(tensor).executed_form(tensor, laid_out_tensor)
        self.verify_slice_shapes(tensor, laid_out_tensor)
        self.tensors[tensor] = laid_out_tensor

    def set_partial_sum(
        self, tensor: Tensor, summands: LaidOutTensor, mesh_axes: Sequence[int], label: str
    ) -> None:
        """Sets the lowered value of a Tensor to a partial sum, which is summed when it is needed.

        Args:
          tensor: a Tensor.
          summands: the LaidOutTensor to sum over processors; the value itself if there are no mesh
            axes.
          mesh_axes: the axes to sum over, in the order of the counter's name.
          label: the label of the counter, such as "einsum_op".
        """
        value: LaidOutLike = summands
        if mesh_axes:
            count = self.allreduce_counter(mesh_axes, tensor, label)
            impl = self.mesh_impl(tensor)
            # Sums are joined if their axes are equal lists, so these are sorted; the name of the
            # counter keeps the order of the summed dimensions, as in the classic.
            value = LazyAllreduceSum(impl, summands, sorted(mesh_axes), count)
        self.set_tensor_lowering(tensor, value)

    def verify_slice_shapes(self, tensor: Tensor, laid_out_tensor: LaidOutLike) -> None:
        """Checks that slices have the shape that the layout implies.

        Raises:
          ValueError: they do not.
        """
        try:
            expected = self.mesh_impl(tensor).slice_shape(tensor.shape)
        except ValueError as e:
            raise ValueError(f"{tensor.name}: {e}") from e
        sizes = laid_out_tensor.slice_shape
        if sizes != expected:
            raise wrong_slices(f"{tensor.name} {tensor.shape}", sizes, expected)

    def laid_out_size(self, tensor: Tensor) -> int:
        """Returns the number of elements of all slices of a Tensor."""
        return self.requested_impl(tensor).laid_out_size(tensor.shape)

    def autostack(self) -> None:
        """Stacks small variables that are similar, if a mesh has more than one processor."""
        # Of the executed meshes: stacking saves slice variables, and merged processors have one.
        impls = {mesh: pair.executed for mesh, pair in self._pairs.items()}
        largest = largest_stacked_slice(self.graph, impls)
        if largest:
            self.graph.rewrite_stack_variables(mesh_to_impl=impls, max_combined_slice_size=largest)

    # -- results

    def export_to_tf_tensor(self, x: Tensor) -> tf.Tensor:
        """Returns the whole value of a Tensor as a tf.Tensor.

        In eager code it is the value that the Lowering computed; for a variable, its current value.
        What was made after the Lowering is lowered now.

        Raises:
          NotInLoweringError: it is a value inside of a loop, belongs to another graph, or depends
            on a variable, or on the gradient of a loop, that was made after the Lowering.
        """
        mesh_impl = self.mesh_impl(x)
        self.lower_late(x)
        source: Any = x.operation
        # A variable may have been assigned to since: eager code expects its value of now.
        if tf.executing_eagerly() and getattr(source, "store", None) is not None:
            return source.stored_value()
        # Processors cannot communicate outside of their program, where a spec may be made.
        with within_program(self._tf_graph):
            return mesh_impl.export_to_tf_tensor(x, self.tensors[x].to_laid_out_tensor())

    def lower_late(self, x: Tensor) -> None:
        """Lowers what a Tensor depends on and is not lowered yet: made later, or on demand.

        Args:
          x: a Tensor.

        Raises:
          NotInLoweringError: see `export_to_tf_tensor`.
        """
        if x in self.tensors:
            return
        needed, late, loops = {x}, [], set()
        # Backward, so that all that reads an output has been visited before what makes it.
        for op in reversed(self.graph.operations):
            if not needed.isdisjoint(op.outputs) and not self.tensors.keys() >= set(op.outputs):
                late.append(op)
                needed.update(op.inputs)
                if op.loop is not None and op.loop.tape_of is not None:
                    # Read by its gradient, besides the inputs.
                    loops.add(op.loop.tape_of)
                    needed.update(op.loop.tape_of.outputs)
        # Values so far are those of merged processors, which an operation of a user's cannot read.
        merged = any(pair.is_merged for pair in self._pairs.values())
        available = {y for op in late for y in op.outputs} | self.tensors.keys()
        if (
            not needed <= available
            # A loop saves what its gradient reads only if it is lowered after that was made.
            or not loops <= {*late, *self.loop_tapes}
            or any(isinstance(op, Variable) for op in late)
            or (merged and not fit_merged(late))
        ):
            raise NotInLoweringError(
                f"{x.name} {x.shape} is not in this Lowering: it is a value inside of a loop, "
                "belongs to another graph, or depends on a variable, on the gradient of a loop, or "
                "on an operation or a function of your own, that was made after it. Make the "
                "Lowering last"
            )
        late.reverse()
        with within_program(self._tf_graph):
            self.lower_operations(late)

    def lowered_operation(self, op: Operation) -> tf.Operation:
        """Returns the tf operation of an Assign.

        Raises:
          WrongTypeError: `op` is not an Operation, such as a list of them.
          NotInLoweringError: it cannot be lowered now; see `export_to_tf_tensor`.
          ValueError: the operation has none; export its outputs instead.
        """
        if not isinstance(op, Operation):
            raise WrongTypeError(
                f"lowered_operation: {reprlib.repr(op)} is a {type(op).__name__}, not an "
                "Operation. mtf.assign returns one, apply_grads of an optimizer a list of them; "
                "that of a Tensor x is x.operation"
            )
        # Two forms: an Assign has one tf operation; of any other, all slices of its outputs are
        # waited for.
        if op in self.operations:
            return self.operations[op]
        for y in op.outputs:
            self.lower_late(y)
        outputs = [t for y in op.outputs for t in self.tensors[y].to_laid_out_tensor().all_slices]
        if not outputs:
            raise ValueError(
                f"{op} is not in this Lowering. Operations given to graph.combine_assignments "
                "are replaced by those it returns"
            )
        return tf.group(outputs)

    @property
    def effects(self) -> list[tf.Operation]:
        """The tf operations of what a step does besides its results: assignments, prints.

        They are all those of the program, in its order; loops do themselves what is in them. What
        trains a model runs them in each step, whoever made them: optimizers, layers or the model.
        """
        return [self.operations[op] for op in self.graph.operations if op in self.operations]

    def copy_masters_to_slices(self) -> tf.Operation:
        """Returns a tf operation that copies all masters to their slices.

        Run it after variables have been initialized or restored. With the environment variable
        MTF_SEQUENCE_MODE=1, variables are copied one after another.
        """
        # A Lowering may be made within a program of processors, and these run outside of it.
        with outside_all_rewrites():
            if os.environ.get("MTF_SEQUENCE_MODE", "") != "1":
                return tf.group([v.copy_master_to_slices for v in self._copied()])
            done: list[tf.Operation] = []
            for laid_out in self._copied():
                with tf.control_dependencies(done[-1:]):
                    done.append(tf.group([laid_out.copy_master_to_slices]))
            return done[-1] if done else tf.no_op()

    def _copied(self) -> list[Any]:
        """Returns the LaidOutVariables whose slices are stored separately from their masters."""
        # A class of the user's own may lack it; its masters and slices are two copies.
        return [v for v in self.variables.values() if getattr(v, "needs_copies", True)]

    def copy_slices_to_masters(self) -> tf.Operation:
        """Returns a tf operation that copies all slices to their masters.

        Run it before variables are saved.
        """
        with outside_all_rewrites():
            return tf.group([v.copy_slices_to_master for v in self._copied()])

    # -- counters

    @property
    def counters(self) -> list[tuple[str, int]]:
        """Pairs (name, number) of computation and communication; slashes make a hierarchy."""
        return self._counters

    @property
    def collectives(self) -> list[tuple[str, MeshImpl, Collective]]:
        """The communication, in order: triples (operation class name, MeshImpl, Collective)."""
        return self._collectives

    def add_counter(self, key: str, value: int) -> None:
        """Adds a pair to the counters."""
        assert isinstance(value, int)
        self._counters.append((key, value))

    def count_collectives(
        self, op: Operation, label: Optional[str], pending: Optional[PendingSums] = None
    ) -> None:
        """Counts the collectives of an operation, on the requested mesh.

        Args:
          op: an operation.
          label: the label of the counters, such as "einsum_op"; None if they are added elsewhere.
          pending: the inputs that are partial sums, each with the mesh axes to sum over.
        """
        requested = self.requested_impl(op)
        sums = op.partial_sums(requested, pending) if pending else None
        scattered = itertools.chain(*(p.scattered for p in (sums or {}).values()))
        for collective in (*scattered, *op.collectives(requested)):
            self._count_collective(requested, collective, label, op)

    def _count_collective(
        self, impl: MeshImpl, collective: Collective, label: Optional[str], op: Operation
    ) -> None:
        self.communicated.append(op.name)
        if label is not None:
            axes: Any = list(collective.mesh_axes)
            # The classic names counters of one axis by a number, and only those of sums by a list.
            where = axes if collective.kind == "allreduce" or len(axes) > 1 else axes[0]
            self.add_counter(f"{collective.kind}/{where}/{label}", collective.elements)
        # A partial sum that no operation has needed may be summed only when it is exported.
        kind = "export" if self._at is None else type(self._at).__name__
        self._collectives.append((kind, impl, collective))

    def allreduce_counter(
        self, mesh_axes: Sequence[int], x: Tensor, label: str
    ) -> Callable[[], None]:
        """Returns a function that counts the allreduce of a Tensor over mesh axes.

        Args:
          mesh_axes: the axes in the order of the counter's name, that of the summed dimensions.
          x: a Tensor.
          label: the label of the counter, such as "einsum_op".
        """
        requested = self.requested_impl(x)
        [collective] = allreduces(requested, x.shape, x.dtype, sorted(mesh_axes))
        # Partial sums keep the function, and the Lowering keeps them: without a cycle, all of a
        # program is freed when its Lowering is.
        reference, op = weakref.ref(self), x.operation

        def count() -> None:
            lowering = reference()
            if lowering is not None:
                lowering.add_counter(f"allreduce/{list(mesh_axes)}/{label}", collective.elements)
                lowering._count_collective(requested, collective, None, op)

        return count

    def communication_table(self) -> str:
        """Returns a table of a step's communication; the body of a loop is counted once."""
        return communication_table(self._collectives)
