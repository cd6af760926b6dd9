"""Counters of computation and communication, as text."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.cost import Collective
from mesh_tensorflow._core.errors import text_table
from mesh_tensorflow._core.graph import Graph, Mesh
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._units import counted
from mesh_tensorflow.ops._variables.variable import Variable

__all__ = [
    "communication_table",
    "log_variable_sizes",
    "lowering_text",
    "pretty_print_counters",
    "write_log",
]


def pretty_print_counters(counters: Iterable[tuple[str, int]]) -> str:
    """Returns counters summed by name and by each prefix of a name, indented.

    Args:
      counters: pairs (name, number); slashes in names make a hierarchy.
    """
    totals: collections.Counter[str] = collections.Counter()
    for name, value in counters:
        parts = name.split("/")
        for depth in range(1, len(parts) + 1):
            totals["/".join(parts[:depth])] += value
    return "\n".join(
        # Below a million, the six digits of `g` show every integer in full.
        f"{' ' * name.count('/')}{name}: {total:.3g}"
        if total >= 1e6
        else f"{' ' * name.count('/')}{name}: {total:g}"
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


def lowering_text(
    graph: Graph,
    mesh_to_impl: Mapping[Mesh, MeshImpl],
    collectives: Sequence[tuple[str, MeshImpl, Collective]],
) -> str:
    """Returns a few lines on a Lowering: its program, its meshes, what it communicates."""
    stored = sum(mesh_to_impl[v.mesh].slice_size(v.stored_shape) for v in graph.all_variables)
    elements = sum(collective.elements for _, _, collective in collectives)
    lines = [
        f"<Lowering of {graph!r}",
        *(f"  {mesh.name!r} on {impl!r}" for mesh, impl in mesh_to_impl.items()),
        f"  {counted(stored, 'parameter')} on each processor; "
        f"{counted(len(collectives), 'collective')} of {counted(elements, 'element')} in all>",
    ]
    return "\n".join(lines)


def communication_table(collectives: Iterable[tuple[str, MeshImpl, Collective]]) -> str:
    """Returns a table of communication by operation, collective and mesh axes."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for kind, mesh_impl, collective in collectives:
        axes = ", ".join(
            f"{mesh_impl.shape[a].name}={mesh_impl.shape[a].size}" for a in collective.mesh_axes
        )
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
