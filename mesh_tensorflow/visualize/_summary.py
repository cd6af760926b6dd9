"""The table of a program's variables: shapes, slices, parameters and bytes of a processor."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Optional, Union

from mesh_tensorflow._core.errors import WrongTypeError, dims_text, text_table
from mesh_tensorflow._core.graph import Graph, Mesh
from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._lowering.lowering import Lowering
from mesh_tensorflow._lowering.rewrites import has_stored_names, stored_shapes
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._units import bytes_text, count_text, plural, shortened_apart
from mesh_tensorflow.ops._variable import Variable
from mesh_tensorflow.optimize._base import is_slot

# The mesh implementation of a graph, or that of each of its meshes; one processor if None.
Impls = Union[MeshImpl, Mapping[Mesh, MeshImpl], None]
Program = Union[Graph, Lowering]


class Subject(NamedTuple):
    """A program with the meshes that it is laid out on.

    Attributes:
      graph: the Graph.
      impls: the MeshImpl of each Mesh of the graph.
      lowering: the Lowering, if the program has been lowered.
    """

    graph: Graph
    impls: Mapping[Mesh, MeshImpl]
    lowering: Optional[Lowering]

    @property
    def impl(self) -> MeshImpl:
        """The MeshImpl of the first mesh."""
        return next(iter(self.impls.values()), MeshImpl("", ""))

    @property
    def why_no_estimate(self) -> str:
        """Why time and memory cannot be estimated, a sentence with what to do; "" if they can."""
        if len({(mesh_text(i), layout_text(i)) for i in self.impls.values()}) > 1:
            # An estimate is of one mesh and layout: those of the first would be wrong for others.
            return (
                "time and memory are estimated for one layout, but the meshes of the program have "
                f"several: {self.text(mesh_text)}, {self.text(layout_text)}. Ask for a graph that "
                "has one of the meshes"
            )
        if has_stored_names(self.graph):
            return (
                "time and memory are estimated of a program whose variables its Lowering has not "
                f"yet cut in parts ({self.text(layout_text)}). Ask before the Lowering, with the "
                "Graph and the mesh implementation"
            )
        return ""

    def text(self, of: Callable[[MeshImpl], str]) -> str:
        """Returns what a function says of the mesh; of each by its name, where they differ."""
        # Pairs, and not by name, which several meshes may have in common.
        texts = [(mesh.name, of(impl)) for mesh, impl in self.impls.items()]
        if len({text for _, text in texts}) > 1:
            return "; ".join(f"{name} {text}" for name, text in texts)
        return of(self.impl)


def _meshes(graph: Graph) -> list[Mesh]:
    # In an order, unlike a set: headings tell of the first mesh.
    return list(dict.fromkeys(op.mesh for op in graph.operations))


def _used(graph: Graph, impls: Mapping[Mesh, MeshImpl]) -> Mapping[Mesh, MeshImpl]:
    # Others, which nothing is on, are not told of; of an empty graph, all are.
    return {mesh: impls[mesh] for mesh in _meshes(graph) if mesh in impls} or impls


def subject_of(what: str, program: Program, mesh_impl: Impls = None) -> Subject:
    """Returns the graph and mesh implementations that a caller means.

    Args:
      what: the name of the function that was called, for errors.
      program: a Graph, or a Lowering.
      mesh_impl: for a Graph: a MeshImpl, a dictionary from Mesh to MeshImpl, or None for one
        processor. None for a Lowering, which has its own.

    Raises:
      WrongTypeError: `program` or `mesh_impl` is something else. It is a TypeError and a
        ValueError.
      ValueError: a Lowering is given with another `mesh_impl`, or a mesh has none.
    """
    if isinstance(program, Lowering):
        if mesh_impl is not None:
            raise ValueError(
                f"{what}: a Lowering has its own mesh implementation; leave out mesh_impl, or give "
                "the graph with it"
            )
        return Subject(program.graph, _used(program.graph, program.mesh_to_impl), program)
    if not isinstance(program, Graph):
        raise WrongTypeError(
            f"{what} describes a mtf.Graph or a mtf.Lowering, not {type(program).__name__}: "
            "give it mesh.graph, with a mesh implementation, or the Lowering"
        )
    meshes = _meshes(program)
    if isinstance(mesh_impl, Mapping):
        missing = [m.name for m in meshes if m not in mesh_impl]
        if missing:
            raise ValueError(f"{what}: no mesh implementation for mesh {', '.join(missing)}")
        return Subject(program, _used(program, mesh_impl), None)
    if mesh_impl is not None and not isinstance(mesh_impl, MeshImpl):
        raise WrongTypeError(
            f"{what}: mesh_impl is a mesh implementation such as "
            f"mtf.placement_mesh_impl.PlacementMeshImpl(shape, layout), not {mesh_impl!r}"
        )
    # Without one, the program is described as on a mesh of one processor.
    impl = MeshImpl("", "") if mesh_impl is None else mesh_impl
    return Subject(program, dict.fromkeys(meshes, impl), None)


def mesh_text(impl: MeshImpl) -> str:
    """Returns "rows=2, cols=2: 4 processors"."""
    count = f"{impl.size} {plural('processor', impl.size)}"
    return f"{dims_text(impl.shape)}: {count}" if impl.ndims else count


def layout_text(impl: MeshImpl) -> str:
    """Returns "batch:rows, d_ff:cols", or "no splits"; with how variables are stored."""
    rules = ", ".join(f"{t}:{m}" for t, m in impl.layout_rules.written) or "no splits"
    # A mesh implementation from elsewhere has none.
    stored = getattr(impl, "stored_layout", None)
    return rules if stored is None else f"{rules}; stored with {stored}"


# Kinds of variables, in the order of the table, with the label of their totals.
KINDS = {
    "weights": "trainable",
    "slots": "optimizer slots",
    "others": "other variables",
}
VARIABLE_COLUMNS = ["variable", "shape", "slice", "split", "parameters", "per processor"]
_MIN_NAME = 32
_DEFAULT_WIDTH = 120  # where there is no terminal


class VariableRow(NamedTuple):
    """A variable of a program.

    Attributes:
      name: its full name.
      kind: "weights" if it is trainable; "slots" if it is untrainable and its name and shape
        are those of an optimizer's slot of a trainable variable; otherwise "others".
      shape: its Shape.
      slice_shape: the sizes of the slice that each processor holds.
      split: pairs (dimension name, mesh dimension name) of the dimensions that are split where
        the variable is stored.
      copies: the number of processors that hold the same slice.
      parameters: the number of its elements.
      dtype: the name of the dtype of its slices.
      bytes_per_processor: the bytes of its slice on one processor.
      bytes: the bytes of its whole value.
    """

    name: str
    kind: str
    shape: Shape
    slice_shape: tuple[int, ...]
    split: tuple[tuple[str, str], ...]
    copies: int
    parameters: int
    dtype: str
    bytes_per_processor: int
    bytes: int

    @property
    def split_text(self) -> str:
        """The split dimensions as "d_ff:cols", or "-" if each processor holds a copy."""
        return ", ".join(f"{d}:{m}" for d, m in self.split) or "-"

    @property
    def shape_text(self) -> str:
        """The shape as "[d_in=4, hidden=16]"."""
        return f"[{dims_text(self.shape)}]"

    def cells(self) -> list[str]:
        """Returns what tables say of it; see `VARIABLE_COLUMNS`."""
        return [
            self.name,
            self.shape_text,
            str(list(self.slice_shape)),
            self.split_text,
            f"{self.parameters:,}",
            bytes_text(self.bytes_per_processor),
        ]


def _kind(variable: Variable, weights: Mapping[str, Sequence[int]]) -> str:
    if variable.trainable:
        return "weights"
    # A slot is told by the name and the shape of its weight, which therefore are among these.
    shapes = {**weights, variable.name: variable.shape.to_integer_list}
    return "slots" if is_slot(variable.name, shapes) else "others"


def _row(variable: Variable, stored: Shape, kind: str, impl: MeshImpl) -> VariableRow:
    slice_shape = tuple(impl.slice_shape(stored))
    # Stored dimensions may have other names, which say what splits them; readers know the model's.
    axes = [(d, impl.splitting_axis(s)) for d, s in zip(variable.shape, stored)]
    split = tuple((d.name, impl.shape[a].name) for d, a in axes if a is not None)
    num_parts = math.prod(impl.shape[a].size for _, a in axes if a is not None)
    size = variable.slice_dtype.size
    return VariableRow(
        variable.name,
        kind,
        variable.shape,
        slice_shape,
        split,
        # Processors that differ only along axes that split no dimension hold equal slices.
        impl.size // num_parts,
        variable.size,
        variable.slice_dtype.name,
        math.prod(slice_shape) * size,
        variable.size * size,
    )


def variable_rows(subject: Subject) -> list[VariableRow]:
    """Returns a row for each variable, weights first, in order of creation."""
    # Of stacked variables, those that they consist of.
    variables = [part for v in subject.graph.all_variables for part in v.parts]
    weights = {v.name: v.shape.to_integer_list for v in variables if v.trainable}
    stored = stored_shapes(subject.graph, subject.impls)
    rows = [_row(v, stored[v], _kind(v, weights), subject.impls[v.mesh]) for v in variables]
    # Variables that have been stacked are still known by name, in order of creation.
    order = {name: i for i, name in enumerate(subject.graph.name_to_variable)}
    return sorted(rows, key=lambda row: (list(KINDS).index(row.kind), order[row.name]))


class Summary:
    """The variables of a program and their totals; `print` it.

    Attributes:
      rows: a VariableRow for each variable: weights, optimizer slots, others.
      mesh: the mesh as text, such as "rows=2, cols=2: 4 processors".
      layout: the layout rules as text, such as "batch:rows, hidden:cols".
      width: the width of the text in characters, or None; see `summary`.
      slots: whether the text lists optimizer slots one by one.
    """

    def __init__(self, subject: Subject, width: Optional[int] = None, slots: bool = False):
        """Creates a Summary.

        Args:
          subject: a Subject.
          width: see `summary`.
          slots: see `summary`.
        """
        self.rows = variable_rows(subject)
        self.mesh = subject.text(mesh_text)
        self.layout = subject.text(layout_text)
        self.width = width
        self.slots = slots

    def of_kind(self, kind: str) -> list[VariableRow]:
        """Returns the rows of a kind: "weights", "slots" or "others"."""
        return [row for row in self.rows if row.kind == kind]

    def _total(self, field: str, kind: Optional[str]) -> int:
        rows = self.rows if kind is None else self.of_kind(kind)
        return sum(getattr(row, field) for row in rows)

    def parameters(self, kind: Optional[str] = "weights") -> int:
        """Returns the number of parameters.

        Args:
          kind: "weights", "slots" or "others"; all variables if None.
        """
        return self._total("parameters", kind)

    def bytes_per_processor(self, kind: Optional[str] = None) -> int:
        """Returns the bytes of variables that one processor holds.

        Args:
          kind: "weights", "slots" or "others"; all variables if None.
        """
        return self._total("bytes_per_processor", kind)

    def bytes(self, kind: Optional[str] = None) -> int:
        """Returns the bytes of the whole values of variables, each counted once.

        Args:
          kind: "weights", "slots" or "others"; all variables if None.
        """
        return self._total("bytes", kind)

    def _width(self) -> int:
        if self.width is not None:
            return self.width
        # What goes to a file does not depend on the terminal that a program was started in.
        return shutil.get_terminal_size().columns if sys.stdout.isatty() else _DEFAULT_WIDTH

    def _table(self) -> list[str]:
        rows = [row.cells() for row in self.rows if self.slots or row.kind != "slots"]
        widths = [max(map(len, column)) for column in list(zip(VARIABLE_COLUMNS, *rows))[1:]]
        # Names alone are shortened; each other column has two spaces before it.
        room = max(_MIN_NAME, self._width() - sum(widths) - 2 * len(widths))
        names = shortened_apart([row[0] for row in rows], room)
        rows = [[name, *row[1:]] for name, row in zip(names, rows)]
        return text_table([VARIABLE_COLUMNS, *rows], left=(0, 1, 2, 3))

    def totals(self) -> list[list[str]]:
        """Returns a table: of each kind, how many there are, and their sizes; and of all."""
        table = [["", "variables", "parameters", "", "whole", "per processor"]]
        for kind, label in [*KINDS.items(), (None, "in all")]:
            count = len(self.rows if kind is None else self.of_kind(kind))
            # That there is nothing to train is worth a row.
            if not count and kind in ("slots", "others"):
                continue
            parameters = self.parameters(kind)
            words = f"({count_text(parameters)})" if parameters >= 1000 else ""
            sizes = self.bytes(kind), self.bytes_per_processor(kind)
            cells = [str(count), f"{parameters:,}", words, *map(bytes_text, sizes)]
            table.append([label, *cells])
        return table

    def _totals(self) -> list[str]:
        header, *rows = self.totals()
        # Of one kind alone, its total is that of all.
        return text_table([header, *(rows if len(rows) > 2 else rows[:1])])

    def __str__(self) -> str:
        lines = [f"mesh    {self.mesh}", f"layout  {self.layout}", ""]
        if not self.rows:
            return "\n".join([*lines, "no variables"])
        return "\n".join([*lines, *self._table(), "", *self._totals()])

    def __repr__(self) -> str:
        return str(self)


def summary(
    program: Program,
    mesh_impl: Impls = None,
    width: Optional[int] = None,
    slots: bool = False,
) -> Summary:
    """Returns a table of the variables of a program, and their totals.

    Bytes are those of the slices that a processor of the mesh holds and updates. Where several
    processors share a memory, equal slices are stored once, so that less may be in use.

    Args:
      program: a Graph, or a Lowering.
      mesh_impl: for a Graph: a MeshImpl, or a dictionary from Mesh to MeshImpl; one processor if
        None.
      width: the width of the text in characters; where it is exceeded, names are shortened, but not
        below 32 characters. That of the terminal if None, or 120 without one.
      slots: whether to list optimizer slots one by one; otherwise only their totals are shown.

    Returns:
      A Summary, which prints as a table, and has the numbers as `rows`, `parameters()`,
      `bytes_per_processor()` and `bytes()`.

    Raises:
      WrongTypeError: `program` or `mesh_impl` has another type.
      ValueError: a variable cannot be split in this layout.

    >>> import mesh_tensorflow as mtf
    >>> mesh = mtf.Mesh(mtf.Graph(), "mesh")
    >>> w = mtf.get_variable(mesh, "w", mtf.Shape([("d_in", 256), ("d_out", 1024)]))
    >>> mesh_impl = mtf.placement_mesh_impl.PlacementMeshImpl(
    ...     "rows:2,cols:2", "d_out:cols", ["cpu:0"] * 4)
    >>> found = mtf.summary(mesh.graph, mesh_impl)
    >>> print(found)
    mesh    rows=2, cols=2: 4 processors
    layout  d_out:cols
    <BLANKLINE>
    variable  shape                   slice       split       parameters  per processor
    --------  ----------------------  ----------  ----------  ----------  -------------
    w         [d_in=256, d_out=1024]  [256, 512]  d_out:cols     262,144        512 KiB
    <BLANKLINE>
               variables  parameters          whole  per processor
    ---------  ---------  ----------  ------  -----  -------------
    trainable          1     262,144  (262K)  1 MiB        512 KiB
    >>> found.bytes_per_processor()
    524288
    """
    return Summary(subject_of("mtf.summary", program, mesh_impl), width, slots)
