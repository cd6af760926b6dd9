"""A step: what it communicates by collective and layer, and the memory of a processor in it."""

from __future__ import annotations

import collections
import functools
import itertools
import os
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple, Optional, Union

import numpy as np

from mesh_tensorflow import _figure
from mesh_tensorflow._core.errors import dims_text, first_names, text_table
from mesh_tensorflow._core.layout import LayoutRules
from mesh_tensorflow._core.operation import Collective, Operation, Tensor, with_inner_operations
from mesh_tensorflow._core.placement import Walk, cost_of
from mesh_tensorflow._figure import Picture
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._units import bytes_text, shortened
from mesh_tensorflow.auto_mtf.hardware import Hardware
from mesh_tensorflow.auto_mtf.step_time import Held, StepEstimator
from mesh_tensorflow.visualize._summary import Impls, Program, Subject, subject_of

__all__ = [
    "Communication",
    "Item",
    "Memory",
    "communication",
    "layer_of",
    "memory",
    "sum_of",
]

_GRADIENTS = "gradients"
_MOST_LAYERS = 20
_DEEPEST = 8
_NEARLY_ALL = 0.98  # of the bytes
_NUMBER = re.compile(r"_?\d+(?=/|$)")  # at the end of a scope, as in "block_12"
COLUMNS = ["layer", "collective", "mesh axes", "count", "per processor", "all processors"]


class Item(NamedTuple):
    """One or more collectives that are alike.

    Attributes:
      operation: the name of the operation whose value is communicated.
      collective: "allreduce", "reduce_scatter", "allconcat", "alltoall" or "shift".
      mesh_axes: the mesh dimensions as text, such as "cols=2".
      times: the number of collectives.
      elements: the number of elements, over all processors; see `mtf.Lowering.collectives`.
      bytes: the bytes of these elements, over all processors.
      processors: the number of processors of the mesh.
    """

    operation: str
    collective: str
    mesh_axes: str
    times: int
    elements: int
    bytes: int
    processors: int

    @property
    def bytes_per_processor(self) -> int:
        """The bytes that each processor contributes, or receives in an allconcat."""
        return self.bytes // self.processors

    def cells(self) -> list[str]:
        """Returns what tables say of it, without its operation."""
        sizes = [bytes_text(self.bytes_per_processor), bytes_text(self.bytes)]
        return [self.collective, self.mesh_axes, str(self.times), *sizes]


def layer_of(operation: str, depth: int = _DEEPEST) -> str:
    """Returns the layer of an operation: the scopes of its name, without those of its gradient.

    Args:
      operation: the name of an operation, such as "block_1/wi/einsum/gradients/einsum_2".
      depth: the number of scopes to keep.

    >>> layer_of("block_1/wi/einsum/gradients/einsum_2")
    'block_1/wi'
    """
    scopes = operation.split("/")
    if _GRADIENTS in scopes:
        scopes = scopes[: scopes.index(_GRADIENTS)]
    # The last part is the name of the operation itself.
    names = scopes[:-1][:depth]
    return "/".join(names) or "(no scope)"


def _kind_of_layer(operation: str, depth: int) -> str:
    """Returns the layer of an operation without its numbers, such as "block_*/layer_*"."""
    return _NUMBER.sub("_*", layer_of(operation, depth))


class _NamedSums(Walk):
    """A walk over operations that knows which operation began a sum."""

    def __init__(self, mesh_impl: MeshImpl):
        super().__init__(mesh_impl)
        self._begun_by: dict[Tensor, str] = {}

    def named(self) -> list[tuple[str, Collective]]:
        """Returns what was summed since the last call, under the names of what began the sums."""
        sums = [(self._begun_by[x], collective) for x, collective in self.asked]
        self.asked.clear()
        return sums

    def sum_inputs(self, op: Operation) -> list[Collective]:
        """Visits the sums of one operation; those that it delays keep their names."""
        before = [x for x in op.inputs if self.pending_axes(x)]
        collectives = super().sum_inputs(op)
        delayed = [self._begun_by[x] for x in before if self.pending_axes(x)]
        for y in op.outputs:
            if self.pending_axes(y):
                # Not its first reader: sums of gradients would all be the optimizer's.
                self._begun_by[y] = (delayed or [op.name])[0]
        return collectives


def _predicted(subject: Subject, outputs: Sequence[Tensor]) -> list[Item]:
    """Returns the collectives of a graph, from the costs of its operations."""
    items = []
    for mesh, impl in subject.impls.items():
        walk = _NamedSums(impl)
        sent: list[tuple[str, Collective]] = []
        for op in subject.graph.operations:
            if op.mesh is mesh:
                # As in lowering: what it needs is summed before it communicates.
                walk.sum_inputs(op)
                sent += [*walk.named(), *((op.name, c) for c in cost_of(op, impl).collectives)]
        for x in outputs:
            if x.mesh is mesh:
                # A partial sum that nothing in the step has read is still to be summed.
                walk.need(x)
        items += [_item(name, impl, c) for name, c in [*sent, *walk.named()]]
    return items


def _item(name: str, impl: MeshImpl, collective: Collective) -> Item:
    axes = dims_text(impl.shape[a] for a in collective.mesh_axes)
    return Item(name, collective.kind, axes, 1, collective.elements, collective.bytes, impl.size)


def sum_of(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[Item]:
    """Adds up items with equal keys; returns the largest first.

    Args:
      items: Items.
      key: a function of an Item.

    Returns:
      An Item for each key, with the names of the first of its items.
    """
    sums: dict[Hashable, Item] = {}
    for item in items:
        k = key(item)
        if k not in sums:
            sums[k] = item
            continue
        # The name stays that of the first: a sum has no single operation.
        s = sums[k]
        sums[k] = s._replace(
            times=s.times + item.times,
            elements=s.elements + item.elements,
            bytes=s.bytes + item.bytes,
        )
    return sorted(sums.values(), key=lambda item: -item.bytes)


class Communication:
    """The communication of one step of a program; `print` it, or `save` a chart.

    Attributes:
      items: an Item for each collective, in order.
      has_loops: whether the program has loops, whose bodies are counted once.
    """

    def __init__(self, items: Sequence[Item], has_loops: bool = False):
        """Creates a Communication.

        Args:
          items: Items.
          has_loops: whether the program has loops.
        """
        self.items = list(items)
        self.has_loops = has_loops

    @property
    def bytes(self) -> int:
        """The bytes communicated in a step, over all processors."""
        return sum(item.bytes for item in self.items)

    @property
    def bytes_per_processor(self) -> int:
        """The bytes communicated in a step, on average over processors."""
        return sum(item.bytes_per_processor for item in self.items)

    def by_collective(self) -> list[Item]:
        """Returns a sum for each collective and mesh axes, largest first."""
        return sum_of(self.items, lambda item: (item.collective, item.mesh_axes))

    def _needed(self, layer: Callable[[str], str]) -> int:
        """Returns how many layers have nearly all bytes, if operations are in these layers."""
        sizes: collections.Counter[str] = collections.Counter()
        for item in self.items:
            sizes[layer(item.operation)] += item.bytes
        # From the smallest on, as many layers are left out as have no more than the rest together.
        rest, number = self.bytes * (1 - _NEARLY_ALL), len(sizes)
        for size in sorted(sizes.values()):
            rest -= size
            if rest < 0:
                break
            number -= 1
        return number

    def _layers(self, most_layers: int) -> Callable[[str], str]:
        """Returns a function from operations to layers, as fine as so many layers allow."""

        def few(layer: Callable[[str], str]) -> bool:
            return self._needed(layer) <= most_layers

        scopes = [functools.partial(layer_of, depth=depth) for depth in range(1, _DEEPEST + 1)]
        layer = [scopes[0], *itertools.takewhile(few, scopes[1:])][-1]
        # One or two names for nearly all bytes would say little of where they come from.
        if self._needed(layer) > 2:
            return layer
        # Too many blocks for a row each: equal ones together.
        kinds = (functools.partial(_kind_of_layer, depth=d) for d in range(_DEEPEST, 1, -1))
        return next(filter(few, kinds), layer)

    def by_layer(
        self, depth: Optional[int] = None, most_layers: int = _MOST_LAYERS
    ) -> dict[str, list[Item]]:
        """Returns for each layer a sum for each collective and mesh axes.

        The layer of an operation is the variable scopes that it was made in. Gradients belong to
        the layer whose gradients they are.

        Args:
          depth: the number of scopes that make a layer. If None, as many as `most_layers` allows;
            "block_*" then stands for all blocks if each of them would be too many, and the layers
            that communicate least are added up as the last one.
          most_layers: a number of layers.

        Returns:
          A dictionary from layers, in the order of the program, to lists of Items.
        """
        if depth is None:
            layer = self._layers(most_layers)
        else:
            layer = functools.partial(layer_of, depth=depth)
        layers: dict[str, list[Item]] = {}
        for item in self.items:
            layers.setdefault(layer(item.operation), []).append(item)
        if depth is None and len(layers) > most_layers:
            by_size = sorted(layers, key=lambda name: -sum(item.bytes for item in layers[name]))
            # One of the rows is that of the others.
            small = by_size[most_layers - 1 :]
            rest = [item for name in small for item in layers.pop(name)]
            layers[f"{len(small)} others"] = rest
        return {
            name: sum_of(items, lambda item: (item.collective, item.mesh_axes))
            for name, items in layers.items()
        }

    def picture(self, depth: Optional[int] = None) -> Picture:
        """Returns a chart with a bar for each layer.

        Args:
          depth: see `by_layer`.
        """
        kinds = [f"{item.collective} over {item.mesh_axes}" for item in self.by_collective()]
        rows = {
            layer: {
                f"{i.collective} over {i.mesh_axes}": float(i.bytes_per_processor) for i in sums
            }
            for layer, sums in self.by_layer(depth).items()
        }
        size = bytes_text(self.bytes_per_processor)
        title = f"communication of a step by layer, {size} of each processor"
        return _figure.bars(title, rows, kinds, "of each processor in a step")

    def save(self, path: Union[str, os.PathLike[str]]) -> None:
        """Writes a chart with a bar for each layer, its parts colored by collective and mesh axes.

        Args:
          path: the path of an SVG, PNG or PDF file.

        Raises:
          ValueError: the name of the file ends otherwise.
          ImportError: matplotlib is not installed.
        """
        self.picture().save(path)

    def layer_rows(self) -> list[list[str]]:
        """Returns a row for each sum of each layer, under `COLUMNS`."""
        layers = self.by_layer().items()
        return [[layer, *item.cells()] for layer, items in layers for item in items]

    def sum_rows(self) -> list[list[str]]:
        """Returns a row for each sum over all layers, under `COLUMNS`."""
        return [["in all", *item.cells()] for item in self.by_collective()]

    def __str__(self) -> str:
        if not self.items:
            return "no communication"
        rows, previous = [*self.layer_rows(), *self.sum_rows()], ""
        for row in rows:
            # A name stands in the first of its rows.
            row[0], previous = "" if row[0] == previous else row[0], row[0]
        lines = text_table([COLUMNS, *rows], left=(0, 1, 2))
        if self.has_loops:
            lines.append("The bodies of loops are counted once.")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)


def communication_of(subject: Subject, outputs: Sequence[Tensor] = ()) -> Communication:
    """Returns the Communication of a Subject; see `communication`."""
    # Also loops within loops, whose bodies are counted once, too.
    loops = any(op.loop is not None for op in with_inner_operations(subject.graph.operations))
    # What a Lowering has counted is exact; before it, costs predict the same.
    lowering = subject.lowering
    if lowering is None:
        return Communication(_predicted(subject, outputs), loops)
    counted = zip(lowering.communicated, lowering.collectives)
    return Communication([_item(name, impl, c) for name, (_, impl, c) in counted], loops)


def communication(
    program: Program, mesh_impl: Impls = None, outputs: Sequence[Tensor] = ()
) -> Communication:
    """Returns what a program communicates in a step: by collective, mesh axes and layer.

    For a Lowering it is what was counted while it was lowered and exported; for a Graph, what the
    costs of its operations predict, which is the same. The body of a loop is counted once.

    Args:
      program: a Graph, or a Lowering.
      mesh_impl: for a Graph: a MeshImpl, or a dictionary from Mesh to MeshImpl; one processor if
        None.
      outputs: for a Graph: Tensors whose values are needed after the step, such as the loss.

    Returns:
      A Communication, which prints as a table.

    Raises:
      WrongTypeError: `program` or `mesh_impl` has another type.
      ValueError: a tensor cannot be split in this layout.

    >>> import mesh_tensorflow as mtf
    >>> mesh = mtf.Mesh(mtf.Graph(), "mesh")
    >>> x = mtf.ones(mesh, mtf.Shape([("batch", 8), ("d", 4)]))
    >>> total = mtf.reduce_sum(x, reduced_dim=mtf.Dimension("batch", 8))
    >>> mesh_impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:2", "batch:all", ["cpu:0"] * 2)
    >>> found = mtf.visualize.communication(mesh.graph, mesh_impl, [total])
    >>> found.bytes
    32
    """
    subject = subject_of("mtf.visualize.communication", program, mesh_impl)
    return communication_of(subject, outputs)


_LARGEST = 8
_NAME = 60


class Memory:
    """The estimated memory of one processor over a step; `print` it, or `save` a chart.

    Attributes:
      peak_bytes: the most bytes in use at any time.
      at_peak: the bytes in use then, by kind: "weights", "slots", "activations", "recomputed",
        "gradients", "updates" and "loop tape", largest first.
      contents: the tensors in use then, largest first, each a Held(name, kind, bytes).
      over_time: for each kind, an array of bytes, one for each operation of the schedule. What is
        live only inside of a loop is not part of it.
      peak_at: the name of the operation that runs at the peak.
    """

    def __init__(self, estimator: StepEstimator, rules: LayoutRules):
        """Creates a Memory.

        Args:
          estimator: a StepEstimator.
          rules: the layout.
        """
        estimate = estimator.estimate(rules)
        layout, self.peak_bytes = estimate.layout, estimate.peak_bytes
        self.peak_at = estimator.peak_at(layout)
        self.at_peak: dict[str, int] = estimator.peak_by_kind(layout)
        self.contents: list[Held] = estimator.peak_contents(layout)
        self.over_time: dict[str, np.ndarray] = estimator.memory.by_kind(layout)

    def picture(self, limit: float = 0) -> Picture:
        """Returns a chart of memory over the step.

        Args:
          limit: the bytes that a processor has, or 0.
        """
        title = f"memory of one processor, {bytes_text(self.peak_bytes)} at the peak"
        return _figure.areas(title, self.over_time, "operations of the step, in order", limit)

    def save(self, path: Union[str, os.PathLike[str]], limit: float = 0) -> None:
        """Writes a chart of memory over the step.

        Args:
          path: the path of an SVG, PNG or PDF file.
          limit: the bytes that a processor has, or 0.

        Raises:
          ValueError: the name of the file ends otherwise.
          ImportError: matplotlib is not installed.
        """
        self.picture(limit).save(path)

    def rows(self) -> list[list[str]]:
        """Returns a table: for each kind its bytes at the peak, and its largest tensors."""
        table = [["at the peak", "bytes", "largest"]]
        for kind, count in self.at_peak.items():
            # In the order of `contents`, so that the first ones are the largest.
            some = [
                f"{shortened(h.name, _NAME)} {bytes_text(h.bytes)}"
                for h in self.contents
                if h.kind == kind
            ]
            table.append([kind, bytes_text(count), first_names(some, 2)])
        return [*table, ["in all", bytes_text(self.peak_bytes), ""]]

    def __str__(self) -> str:
        where = f"The peak is at {self.peak_at}." if self.peak_at else ""
        return "\n".join([*text_table(self.rows(), left=(0, 2)), *([where] if where else [])])

    def __repr__(self) -> str:
        return str(self)


def memory_of(
    subject: Subject,
    outputs: Sequence[Tensor] = (),
    hardware: Union[str, Hardware, None] = None,
) -> tuple[Memory, StepEstimator]:
    """Returns the Memory of a Subject, and the estimator that it is from."""
    impl = subject.impl
    if subject.why_no_estimate:
        raise ValueError(
            f"mtf.visualize.memory: {subject.why_no_estimate}; mtf.visualize.summary tells of "
            "variables in any case"
        )
    stored = getattr(impl, "stored_layout", None)  # a mesh implementation from elsewhere has none
    estimator = StepEstimator(subject.graph, impl.shape, outputs, hardware, stored)
    # A layout of the user's may split what no search would.
    estimator = estimator.reaching(impl.layout_rules)
    return Memory(estimator, impl.layout_rules), estimator


def memory(program: Program, mesh_impl: Impls = None, outputs: Sequence[Tensor] = ()) -> Memory:
    """Returns the estimated memory of one processor in a step.

    Variables and optimizer slots are in memory throughout; other tensors from the operation that
    makes them to the last one that reads them. See `mtf.auto_mtf.explain` for what is assumed.

    Args:
      program: a Graph, or a Lowering.
      mesh_impl: for a Graph: a MeshImpl, or a dictionary from Mesh to MeshImpl; one processor if
        None.
      outputs: Tensors that stay in memory until the end, such as the loss.

    Returns:
      A Memory, which prints as a table.

    Raises:
      WrongTypeError: `program` or `mesh_impl` has another type.
      ValueError: a tensor cannot be split in this layout, or the meshes have several layouts.

    >>> import mesh_tensorflow as mtf
    >>> mesh = mtf.Mesh(mtf.Graph(), "mesh")
    >>> w = mtf.get_variable(mesh, "w", mtf.Shape([("d_in", 256), ("d_out", 1024)]))
    >>> y = mtf.relu(w)
    >>> print(mtf.visualize.memory(mesh.graph, outputs=[y]))
    at the peak  bytes  largest
    -----------  -----  ------------
    activations  1 MiB  relu:0 1 MiB
    weights      1 MiB  w 1 MiB
    in all       2 MiB
    The peak is at relu.
    """
    return memory_of(subject_of("mtf.visualize.memory", program, mesh_impl), outputs)[0]
