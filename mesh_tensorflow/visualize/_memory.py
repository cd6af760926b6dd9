"""The memory of one processor in a step: weights, slots, activations and what else is live."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Union

import numpy as np

from mesh_tensorflow import _figure
from mesh_tensorflow._core.errors import text_table
from mesh_tensorflow._core.layout import LayoutRules
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._figure import Picture
from mesh_tensorflow._units import bytes_text, shortened
from mesh_tensorflow.auto_mtf.hardware import Hardware
from mesh_tensorflow.auto_mtf.step_time import Held, StepEstimator
from mesh_tensorflow.visualize._summary import (
    Impls,
    Program,
    Subject,
    subject_of,
)

__all__ = ["Memory", "memory"]

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
        layout = estimator.estimate(rules).layout
        sizes = estimator.space.mesh_sizes
        in_use = estimator.memory.in_use(layout, sizes)
        self.peak_bytes = int(in_use.max())
        self.peak_at = estimator.memory.at[int(in_use.argmax())]
        self.at_peak: dict[str, int] = estimator.peak_by_kind(layout)
        self.contents: list[Held] = estimator.peak_contents(layout)
        self.over_time: dict[str, np.ndarray] = estimator.memory.by_kind(layout, sizes)

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
            some = [h for h in self.contents if h.kind == kind]
            named = [f"{shortened(h.name, _NAME)} {bytes_text(h.bytes)}" for h in some[:2]]
            more = f", and {len(some) - 2} more" if len(some) > 2 else ""
            table.append([kind, bytes_text(count), ", ".join(named) + more])
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
