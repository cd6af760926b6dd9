"""A report of a program in one HTML file: variables, tiles, communication, memory, layouts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Optional, Union

from mesh_tensorflow._core.operation import Operation
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._units import bytes_text, count_text, counted
from mesh_tensorflow.auto_mtf import explanation
from mesh_tensorflow.auto_mtf.hardware import Hardware
from mesh_tensorflow.auto_mtf.step_time import StepEstimator
from mesh_tensorflow.ops._variables.variable import Variable
from mesh_tensorflow.visualize import _html, _sharding_picture
from mesh_tensorflow.visualize._communication import Communication, communication_of
from mesh_tensorflow.visualize._memory import Memory, memory_of
from mesh_tensorflow.visualize._sharding import Sharding, visualize_sharding
from mesh_tensorflow.visualize._summary import (
    KINDS,
    Impls,
    Program,
    Subject,
    Summary,
    VariableRow,
    layout_text,
    mesh_text,
    subject_of,
)

__all__ = ["report"]

_ROWS_SHOWN = 16  # of a table; longer ones are folded
_WEIGHTS_SHOWN = 4
_OTHERS_SHOWN = 2


def report(
    program: Program,
    path: Union[str, os.PathLike[str]],
    mesh_impl: Impls = None,
    outputs: Sequence[Tensor] = (),
    tensors: Optional[Sequence[Union[Tensor, Variable]]] = None,
    explain: bool = True,
    hardware: Union[str, Hardware, None] = None,
    title: str = "Program report",
) -> None:
    """Writes a report of a program to one HTML file, which refers to no other file.

    It has the variables, pictures of which processor holds which tile, the communication of a step
    by layer, the estimated memory of a processor over the step, and the estimated time of the step
    in this layout and in others.

    Args:
      program: a Graph, or a Lowering. A training step has gradients and updates, too.
      path: the path of the file.
      mesh_impl: for a Graph: a MeshImpl, or a dictionary from Mesh to MeshImpl; one processor if
        None.
      outputs: Tensors whose values are needed after the step, such as the loss.
      tensors: Tensors and Variables whose tiles are shown; the largest ones if None.
      explain: whether to compare with other layouts, which takes seconds for large programs.
      hardware: what times are estimated for; see `mtf.auto_mtf.layout`.
      title: the title of the page.

    Raises:
      WrongTypeError: `program` or `mesh_impl` has another type.
      ValueError: a tensor cannot be split in this layout, or `hardware` is unknown.

    >>> import os, tempfile
    >>> import mesh_tensorflow as mtf
    >>> mesh = mtf.Mesh(mtf.Graph(), "mesh")
    >>> w = mtf.get_variable(mesh, "w", mtf.Shape([("d_in", 256), ("d_out", 1024)]))
    >>> mesh_impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:2", "d_out:all", ["cpu:0"] * 2)
    >>> path = os.path.join(tempfile.mkdtemp(), "report.html")
    >>> mtf.visualize.report(mesh.graph, path, mesh_impl)
    >>> "d_out over all in 2 parts of 512" in open(path, encoding="utf-8").read()
    True
    """
    subject = subject_of("mtf.visualize.report", program, mesh_impl)
    summary = Summary(subject)
    found = communication_of(subject, outputs)
    memory, estimator = memory_of(subject, outputs, hardware)
    chosen = _largest(subject) if tensors is None else list(tensors)
    sections = [
        _variables(summary),
        _tiles(subject, chosen),
        _communication(found),
        _memory(memory, estimator),
    ]
    if explain:
        sections.append(_layouts(subject, outputs, hardware))
    # All of it before the file is opened: an error leaves the last report as it was.
    text = _html.page(title, _head(subject, summary, found, memory), sections)
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)


def _head(subject: Subject, summary: Summary, found: Communication, memory: Memory) -> str:
    slots = summary.bytes_per_processor("slots")
    weights = summary.bytes_per_processor("weights")
    return _html.facts(
        [
            ("mesh", mesh_text(subject.impl), layout_text(subject.impl)),
            (
                "parameters",
                count_text(summary.parameters()),
                f"{summary.parameters():,} in "
                f"{counted(len(summary.of_kind('weights')), 'variable')}",
            ),
            (
                "variables of a processor",
                bytes_text(summary.bytes_per_processor()),
                f"weights {bytes_text(weights)}, slots {bytes_text(slots)}",
            ),
            ("peak memory of a processor", bytes_text(memory.peak_bytes), "estimated"),
            (
                "communication of a step",
                bytes_text(found.bytes_per_processor),
                f"of each processor, in {counted(sum(i.times for i in found.items), 'collective')}",
            ),
            ("operations", f"{len(subject.graph.operations):,}", "of the program"),
        ]
    )


# -- variables


def _variable_table(rows: Iterable[VariableRow]) -> str:
    header = ["variable", "shape", "slice", "split", "dtype", "parameters", "per processor"]
    cells = [
        [
            row.name,
            row.shape_text,
            str(list(row.slice_shape)),
            row.split_text,
            row.dtype,
            f"{row.parameters:,}",
            bytes_text(row.bytes_per_processor),
        ]
        for row in rows
    ]
    return _html.table([header, *cells], left=(0, 1, 2, 3, 4), code=(0, 1, 2, 3))


def _variables(summary: Summary) -> tuple[str, str]:
    header = ["", "variables", "parameters", "whole", "per processor"]
    rows = []
    for kind, label in [*KINDS.items(), (None, "in all")]:
        count = len(summary.rows if kind is None else summary.of_kind(kind))
        if count or kind is None:
            sizes = summary.bytes(kind), summary.bytes_per_processor(kind)
            numbers = [str(count), f"{summary.parameters(kind):,}"]
            rows.append([label, *numbers, *map(bytes_text, sizes)])
    lists = []
    for kind, label in KINDS.items():
        found = summary.of_kind(kind)
        shown = found if kind == "weights" else []
        if len(shown) > _ROWS_SHOWN:
            shown = sorted(shown, key=lambda row: -row.parameters)[: _ROWS_SHOWN // 2]
            lists.append(_html.note(f"The {len(shown)} largest:"))
        if shown:
            lists.append(_variable_table(shown))
        if len(shown) < len(found):
            lists.append(_html.details(f"all {len(found)} {label}", _variable_table(found)))
    return _html.section("Variables", _html.table([header, *rows], sums=1), *lists)


# -- tiles


def _signature(subject: Subject, x: Union[Tensor, Variable]) -> tuple:
    return tuple(x.shape), tuple(subject.impl.tensor_layout(x.shape))


def _largest(subject: Subject) -> list[Union[Tensor, Variable]]:
    """Returns the largest variables and the largest other tensors that are split in other ways."""
    variables = [part for v in subject.graph.trainable_variables for part in v.parts]
    chosen = _distinct(subject, variables, _WEIGHTS_SHOWN)
    forward = [op for op in subject.graph.operations if _is_forward(op)]
    tensors = [y for op in forward for y in op.outputs]
    return [*chosen, *_distinct(subject, tensors, _OTHERS_SHOWN)]


def _is_forward(op: Operation) -> bool:
    return op.gradient_of is None and not isinstance(op, Variable) and op.has_gradient


def _distinct(
    subject: Subject, candidates: Sequence[Union[Tensor, Variable]], count: int
) -> list[Union[Tensor, Variable]]:
    found: dict[tuple, Union[Tensor, Variable]] = {}
    for x in sorted(candidates, key=lambda x: -x.shape.size):
        found.setdefault(_signature(subject, x), x)
        if len(found) == count:
            break
    return list(found.values())


def _tiles(subject: Subject, chosen: Sequence[Union[Tensor, Variable]]) -> tuple[str, str]:
    pictures = []
    for x in chosen:
        sharding: Sharding = visualize_sharding(x, subject.impl_of(x.mesh))
        pictures.append(_html.figure(_sharding_picture.picture(sharding).svg(inline=True)))
    text = "Processors that hold copies of a tile have its color." if pictures else "No tensors."
    return _html.section("Tiles", _html.note(text), *pictures)


# -- communication


def _communication(found: Communication) -> tuple[str, str]:
    if not found.items:
        return _html.section("Communication", _html.note("The step communicates nothing."))
    header = ["layer", "collective", "mesh axes", "count", "per processor", "all processors"]
    rows = []
    for layer, items in found.by_layer().items():
        rows += [[layer, *item.cells()] for item in items]
    sums = [["in all", *item.cells()] for item in found.by_collective()]
    loops = "The bodies of loops are counted once. " if found.has_loops else ""
    text = (
        f"{loops}Bytes are those of the input of a collective, or of the output of an allconcat. "
        "The sum of a gradient belongs to the layer whose gradient it is."
    )
    picture = _html.figure(found.picture().svg(inline=True))
    if len(rows) > _ROWS_SHOWN:
        every = _html.table([header, *rows], (0, 1, 2), (0,))
        table = _html.table([header, *sums], (0, 1, 2), (0,), sums=len(sums))
        table += _html.details(f"{len(rows)} sums by layer", every)
    else:
        table = _html.table([header, *rows, *sums], (0, 1, 2), (0,), sums=len(sums))
    return _html.section("Communication", _html.note(text), picture, table)


# -- memory


def _memory(memory: Memory, estimator: StepEstimator) -> tuple[str, str]:
    limit = estimator.hardware.memory_bytes
    text = (
        "Estimated from the shapes of tensors: variables are in memory throughout, other tensors "
        "from the operation that makes them to the last one that reads them. "
        f"A processor of {estimator.hardware.name} has {bytes_text(limit)}."
    )
    where = _html.note(f"The peak is at {memory.peak_at}.") if memory.peak_at else ""
    table = _html.table(memory.rows(), left=(0, 2), code=(2,), sums=1)
    picture = _html.figure(memory.picture(limit).svg(inline=True)) if memory.over_time else ""
    return _html.section("Memory", _html.note(text), picture, table, where)


# -- layouts


def _layouts(
    subject: Subject, outputs: Sequence[Tensor], hardware: Union[str, Hardware, None]
) -> tuple[str, str]:
    impl = subject.impl
    explained = explanation.explain(
        subject.graph, impl.shape, outputs, impl.layout_rules, hardware=hardware
    )
    text = (
        f"Estimated for {explained.estimator.hardware.name}, whatever the program runs on; the "
        "estimates rank layouts of one program. See mtf.auto_mtf.explain."
    )
    parts = explained.sections()
    layers = parts.pop("layers")
    if layers.count("\n") < _ROWS_SHOWN:
        folded = _html.preformatted(layers)
    else:
        folded = _html.details("times of all layers", _html.preformatted(layers))
    shown = _html.preformatted("\n\n".join(parts.values()))
    return _html.section("Layouts", _html.note(text), shown, folded)
