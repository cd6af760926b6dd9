"""What a trainer says when it starts: mesh, layout, parameters, memory, communication, places."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any, Optional

from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._units import bytes_text, count_text, counted
from mesh_tensorflow.visualize._communication import Communication, communication_of
from mesh_tensorflow.visualize._summary import (
    KINDS,
    Impls,
    Program,
    Summary,
    mesh_text,
    subject_of,
)

__all__ = ["print_training_report", "training_report"]

_MOST_COLLECTIVES = 6
_NAME = 15
# The last report of each directory, which is printed again only if it differs.
_printed: dict[str, str] = {}


def _short_device(device: str) -> str:
    """Returns "CPU:0" of "/job:localhost/.../device:CPU:0"."""
    found = re.search(r"(?:device:)?([A-Za-z]+:\d+)$", device)
    return found[1].upper() if found else device


def _devices_text(impl: MeshImpl) -> str:
    found: Any = getattr(impl, "devices", None) or ()  # which not all kinds of meshes have
    names = list(dict.fromkeys(map(_short_device, found)))
    if not names or names == [""]:
        return ""  # TensorFlow chooses the device
    if len(names) > 4:
        names = [names[0], names[1], "...", names[-1]]
    return f" on {', '.join(names)}"


def _memory_text(summary: Summary) -> str:
    parts = [
        f"{label} {bytes_text(summary.bytes_per_processor(kind))}"
        for kind, label in {**KINDS, "weights": "weights"}.items()
        if summary.of_kind(kind)
    ]
    return ", ".join(parts) or "no variables"


def _parameters_text(summary: Summary) -> str:
    count, variables = summary.parameters(), len(summary.of_kind("weights"))
    words = f" ({count_text(count)})" if count >= 1000 else ""
    return f"{count:,}{words} in {counted(variables, 'variable')}"


def _communication_lines(found: Communication) -> list[str]:
    items = found.by_collective()
    lines = [
        f"{item.collective} over {item.mesh_axes}: {item.times} time{'s' * (item.times > 1)}, "
        f"{bytes_text(item.bytes_per_processor)} of each processor"
        for item in items[:_MOST_COLLECTIVES]
    ]
    if len(items) > _MOST_COLLECTIVES:
        lines.append(f"and {len(items) - _MOST_COLLECTIVES} more kinds")
    if lines and found.has_loops:
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
    found = Summary(subject)
    lines: list[tuple[str, str]] = [
        ("mesh", subject.text(lambda impl: mesh_text(impl) + _devices_text(impl))),
        ("layout", found.layout),
        ("parameters", _parameters_text(found)),
        ("per processor", _memory_text(found)),
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
    text = training_report(program, mesh_impl, places)
    key = repr(sorted((places or {}).items()))
    if _printed.get(key) != text:
        _printed[key] = text
        print(text, file=sys.stderr, flush=True)
