"""A report of a program in one HTML file, and the lines that are printed when a training begins."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional, Union

from mesh_tensorflow._core.operation import Tensor
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._units import bytes_text, count_text, counted, plural
from mesh_tensorflow._watching import is_recorded
from mesh_tensorflow.auto_mtf import explanation
from mesh_tensorflow.auto_mtf.hardware import Hardware
from mesh_tensorflow.ops._variable import Variable
from mesh_tensorflow.visualize._sharding import visualize_sharding
from mesh_tensorflow.visualize._step import (
    COLUMNS,
    Communication,
    Memory,
    communication_of,
    memory_of,
)
from mesh_tensorflow.visualize._summary import (
    KINDS,
    VARIABLE_COLUMNS,
    Impls,
    Program,
    Subject,
    Summary,
    VariableRow,
    mesh_text,
    subject_of,
)

__all__ = ["print_training_report", "report", "training_report"]


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
      ImportError: matplotlib or jinja2 is not installed.

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
    # First of all: without jinja2 nothing need be estimated.
    template = _template()
    subject = subject_of("mtf.visualize.report", program, mesh_impl)
    summary = Summary(subject)
    sent = communication_of(subject, outputs)
    # A page without estimates has what is counted.
    estimates = None if subject.why_no_estimate else memory_of(subject, outputs, hardware)
    chosen = _largest(subject) if tensors is None else list(tensors)
    layouts = None
    if explain and estimates is not None:
        impl = subject.impl
        layouts = explanation.explain(
            subject.graph,
            impl.shape,
            outputs,
            impl.layout_rules,
            hardware=hardware,
            stored_layout=getattr(impl, "stored_layout", None),
        )
    # All of it before the file is opened: an error leaves the last report as it was.
    text = template.render(
        title=title,
        facts=_facts(subject, summary, sent, estimates and estimates[0]),
        summary=summary,
        kinds=KINDS,
        tiles=[visualize_sharding(x, subject.impls[x.mesh]).picture() for x in chosen],
        communication=sent,
        columns=COLUMNS,
        memory=estimates and estimates[0],
        hardware=estimates and estimates[1].hardware,
        layouts=layouts,
        rows_shown=_ROWS_SHOWN,
        why_no_estimate=subject.why_no_estimate,
    )
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)


def _template() -> Any:
    """Returns the template of a page, which escapes what is put into it."""
    try:
        import jinja2
    except ImportError as e:
        raise ImportError(
            "mtf.visualize.report: jinja2 puts reports together, and matplotlib draws their "
            "pictures: pip install matplotlib jinja2"
        ) from e
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mesh_tensorflow", "visualize"),
        # A title, or the name of a variable, may have characters that HTML would take for its own.
        autoescape=True,
        # A name that the template has and the caller forgot is an error, and not an empty place.
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(bytes=bytes_text, variable_table=_variable_table)
    return environment.get_template("report.html.jinja")


def _facts(
    subject: Subject, summary: Summary, sent: Communication, memory: Optional[Memory]
) -> list[tuple[str, str, str]]:
    """Returns the labeled numbers on top: triples (label, number, a smaller line)."""
    slots = summary.bytes_per_processor("slots")
    weights = summary.bytes_per_processor("weights")
    return [
        ("mesh", summary.mesh, summary.layout),
        (
            "parameters",
            count_text(summary.parameters()),
            f"{summary.parameters():,} in {counted(len(summary.of_kind('weights')), 'variable')}",
        ),
        (
            "variables of a processor",
            bytes_text(summary.bytes_per_processor()),
            f"weights {bytes_text(weights)}, slots {bytes_text(slots)}",
        ),
        (
            "peak memory of a processor",
            bytes_text(memory.peak_bytes) if memory else "not known",
            "estimated" if memory else "why is said below",
        ),
        (
            "communication of a step",
            bytes_text(sent.bytes_per_processor),
            f"of each processor, in {counted(sum(i.times for i in sent.items), 'collective')}",
        ),
        ("operations", f"{len(subject.graph.operations):,}", "of the program"),
    ]


# -- variables


def _variable_table(rows: Iterable[VariableRow]) -> list[list[str]]:
    table = [(VARIABLE_COLUMNS, "dtype"), *((row.cells(), row.dtype) for row in rows)]
    return [[*cells[:4], dtype, *cells[4:]] for cells, dtype in table]


# -- tiles


def _largest(subject: Subject) -> list[Union[Tensor, Variable]]:
    """Returns the largest variables and the largest other tensors that are split in other ways."""
    variables = [part for v in subject.graph.trainable_variables for part in v.parts]
    chosen = _distinct(subject, variables, _WEIGHTS_SHOWN)
    tensors = [
        y
        for op in subject.graph.operations
        if op.gradient_of is None and not isinstance(op, Variable) and op.has_gradient
        for y in op.outputs
    ]
    return [*chosen, *_distinct(subject, tensors, _OTHERS_SHOWN)]


def _distinct(
    subject: Subject, candidates: Sequence[Union[Tensor, Variable]], count: int
) -> list[Union[Tensor, Variable]]:
    apart: dict[tuple, Union[Tensor, Variable]] = {}
    # The largest first; those of one shape and layout have one picture, so that one is enough.
    for x in sorted(candidates, key=lambda x: -x.shape.size):
        impl = subject.impls[x.mesh]
        apart.setdefault((tuple(x.shape), tuple(impl.shape), tuple(impl.tensor_layout(x.shape))), x)
        if len(apart) == count:
            break
    return list(apart.values())


# -- what is printed when a training begins


_MOST_COLLECTIVES = 6
_NAME = 15
# The last report of each directory, which is printed again only if it differs.
_printed: dict[str, str] = {}


def _devices_text(impl: MeshImpl) -> str:
    devices: Any = getattr(impl, "devices", None) or ()  # which not all kinds of meshes have
    # "CPU:0" of "/job:localhost/.../device:CPU:0".
    short = [re.search(r"(?:device:)?([A-Za-z]+:\d+)$", device) for device in devices]
    names = [match[1].upper() if match else device for match, device in zip(short, devices)]
    names = list(dict.fromkeys(names))
    if not names or names == [""]:
        return ""  # TensorFlow chooses the device
    # Of a large mesh, the ends say which devices it has.
    if len(names) > 4:
        names = [names[0], names[1], "...", names[-1]]
    return f" on {', '.join(names)}"


def _memory_text(summary: Summary) -> str:
    amounts = [
        f"{label} {bytes_text(summary.bytes_per_processor(kind))}"
        for kind, label in {**KINDS, "weights": "weights"}.items()
        if summary.of_kind(kind)
    ]
    return ", ".join(amounts) or "no variables"


def _parameters_text(summary: Summary) -> str:
    count, variables = summary.parameters(), len(summary.of_kind("weights"))
    words = f" ({count_text(count)})" if count >= 1000 else ""
    return f"{count:,}{words} in {counted(variables, 'variable')}"


def _communication_lines(sent: Communication) -> list[str]:
    items = sent.by_collective()
    lines = [
        f"{item.collective} over {item.mesh_axes}: {item.times} {plural('time', item.times)}, "
        f"{bytes_text(item.bytes_per_processor)} of each processor"
        for item in items[:_MOST_COLLECTIVES]
    ]
    if len(items) > _MOST_COLLECTIVES:
        lines.append(f"and {len(items) - _MOST_COLLECTIVES} more kinds")
    if lines and sent.has_loops:
        lines.append("the bodies of loops are counted once")
    return lines or ["nothing"]


def training_report(
    program: Program, mesh_impl: Impls = None, places: Optional[Mapping[str, str]] = None
) -> str:
    """Returns what a trainer prints when it starts, some ten lines.

    Mesh and devices, layout rules, trainable parameters, the bytes of weights and of optimizer
    slots on one processor, what a processor communicates in a step, and where files are written.

    Args:
      program: the Lowering of a training step; or its Graph, with gradients and updates.
      mesh_impl: for a Graph: a MeshImpl, or a dictionary from Mesh to MeshImpl.
      places: further lines, such as {"logs": "/data/run1"}, with words before texts.

    Raises:
      WrongTypeError: `program` or `mesh_impl` has another type.
      ValueError: a tensor cannot be split in this layout.

    >>> import mesh_tensorflow as mtf
    >>> mesh = mtf.Mesh(mtf.Graph(), "mesh")
    >>> w = mtf.get_variable(mesh, "w", mtf.Shape([("d_in", 256), ("d_out", 1024)]))
    >>> print(mtf.visualize.training_report(mesh.graph, places={"logs": "/data/run1"}))
    mesh            1 processor
    layout          no splits
    parameters      262,144 (262K) in 1 variable
    per processor   weights 1 MiB
    communication   nothing
    logs            /data/run1
    """
    subject = subject_of("mtf.visualize.training_report", program, mesh_impl)
    summary = Summary(subject)
    lines: list[tuple[str, str]] = [
        ("mesh", subject.text(lambda impl: mesh_text(impl) + _devices_text(impl))),
        ("layout", summary.layout),
        ("parameters", _parameters_text(summary)),
        ("per processor", _memory_text(summary)),
    ]
    sums = _communication_lines(communication_of(subject))
    lines += [("communication" if i == 0 else "", text) for i, text in enumerate(sums)]
    lines += list((places or {}).items())
    return "\n".join(f"{name:<{_NAME}} {text}".rstrip() for name, text in lines)


def print_training_report(
    program: Program, mesh_impl: Impls = None, places: Optional[Mapping[str, str]] = None
) -> None:
    """Prints the training report to stderr, unless it is the last one of the same places.

    Trainers that build their program again, for instance after each evaluation, print it once.

    >>> w = mtf.get_variable(mesh, "w", "d_model:4,d_ff:8")
    >>> mesh_impl = mtf.MeshImpl("cols:2", "d_ff:cols")
    >>> mtf.visualize.print_training_report(graph, mesh_impl, {"checkpoints": "model"})

    Args:
      program: see `training_report`.
      mesh_impl: see `training_report`.
      places: see `training_report`.
    """
    if is_recorded():  # a program that is only looked at
        return
    text = training_report(program, mesh_impl, places)
    # By the places, so that two trainings in one process do not hide each other's.
    key = repr(sorted((places or {}).items()))
    if _printed.get(key) != text:
        _printed[key] = text
        print(text, file=sys.stderr, flush=True)
