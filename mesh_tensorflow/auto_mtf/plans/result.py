"""Plan: a Choice with its mesh, layout and stored layout, and what a step of it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Optional

from mesh_tensorflow._core.errors import dims_text, text_table
from mesh_tensorflow._core.layout import LayoutRules
from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._mesh.stored_layout import StoredLayout
from mesh_tensorflow._units import bytes_text
from mesh_tensorflow.auto_mtf.hardware import Hardware
from mesh_tensorflow.auto_mtf.plans.choice import Choice
from mesh_tensorflow.auto_mtf.step_time import Estimate, Seconds

__all__ = ["Lost", "Plan", "Plans"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to build, split and store a program, and what a step is estimated to take.

    Attributes:
      choice: a Choice, of how the program is built.
      mesh_shape: a Shape.
      estimate: the Estimate, with the layout and the stored layout.
      memory: bytes on one processor at the peak, by kind: "weights", "slots", "activations",
        "gradients" and so on.
      communication: seconds by collective and mesh dimensions, such as "allreduce over rows".
      bubble: the share of the ticks of a pipeline in which a stage has nothing to do.
      bubble_seconds: what stages compute in these.
      recomputed_seconds: what is computed again for the gradient; of it, too, a part is in bubbles.
    """

    choice: Choice
    mesh_shape: Shape
    estimate: Estimate
    memory: dict[str, int]
    communication: dict[str, float]
    bubble: float
    bubble_seconds: float
    recomputed_seconds: float

    @property
    def layout(self) -> LayoutRules:
        """The layout rules."""
        return LayoutRules(self.estimate.layout.items())

    @property
    def stored_layout(self) -> Optional[StoredLayout]:
        """How variables are stored; its `stage` and `mesh_dim` are arguments of meshes."""
        return self.estimate.stored_layout

    @property
    def seconds(self) -> Seconds:
        """The Seconds of a step."""
        return self.estimate.seconds

    @property
    def rules(self) -> str:
        """What was picked, in one line."""
        stored = "" if self.stored_layout is None else f"; {self.stored_layout}"
        return f"{self.choice}; {self.estimate.text or 'no splits'}{stored}"

    def __str__(self) -> str:
        seconds = self.seconds
        lines = [
            f"program  {self.choice}",
            f"mesh     {dims_text(self.mesh_shape)}",
            f"layout   {self.estimate.text or 'no splits'}",
            f"stored   {self.stored_layout or 'as computed with'}",
            f"step     {_ms(seconds.total)} ms: compute {_ms(seconds.compute)}, communication "
            f"{_ms(seconds.communication)}",
        ]
        if self.recomputed_seconds:
            lines.append(f"         of computing, {_ms(self.recomputed_seconds)} ms recompute")
        if self.bubble:
            lines.append(
                f"         of computing, {_ms(self.bubble_seconds)} ms are the bubble, "
                f"{self.bubble:.3f} of the ticks"
            )
        lines += [f"{_ms(s):>12} ms {what}" for what, s in self.communication.items()]
        lines.append(f"memory   {bytes_text(self.estimate.peak_bytes)} at the peak")
        lines += [f"{bytes_text(held):>15} {kind}" for kind, held in self.memory.items()]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Lost:
    """Why a Choice with a stage of ZeRO is no plan, or not the best.

    Attributes:
      choice: a Choice.
      zero: a stage of ZeRO; None if the program cannot be built.
      why: what is wrong.
      best: the Estimate of its best layout, if one fits.
      mesh_shape: the mesh of that, or of the layout that misses by the least; or None.
      missing_bytes: by how much the memory is exceeded at least, if none fits; else 0.
    """

    choice: Choice
    zero: Optional[int]
    why: str
    best: Optional[Estimate] = None
    mesh_shape: Optional[Shape] = None
    missing_bytes: float = 0.0


class Plans:
    """The best plan, and why others lost; printed, it explains itself.

    Attributes:
      best: a Plan.
      lost: for each other Choice and stage of ZeRO, a Lost: first those that fit, fastest first.
      hardware: a Hardware.
      memory_limit_bytes: bytes on one processor, or None.
    """

    def __init__(
        self,
        best: Plan,
        lost: Sequence[Lost],
        hardware: Hardware,
        memory_limit_bytes: Optional[float],
    ):
        """Creates the Plans."""
        self.best = best
        self.lost = list(lost)
        self.hardware = hardware
        self.memory_limit_bytes = memory_limit_bytes

    def __str__(self) -> str:
        limit = self.memory_limit_bytes
        within = "" if limit is None else f", of which {bytes_text(limit)} may be used"
        lines = [str(self.best), "", f"on processors of {self.hardware.name}{within}"]
        if self.lost:
            rows = [["other plans", "zero", "mesh and layout", "step ms", "memory", "why not"]]
            rows += [self._row(lost) for lost in self.lost]
            lines += ["", *text_table(rows, left=(0, 2, 5))]
        return "\n".join(lines)

    @staticmethod
    def _row(lost: Lost) -> list[str]:
        zero = "-" if lost.zero is None else str(lost.zero)
        if lost.best is None:
            return [str(lost.choice), zero, "-", "-", "-", lost.why]
        seconds, peak = lost.best.seconds.total, lost.best.peak_bytes
        where = f"{dims_text(lost.mesh_shape or Shape([]))}: {lost.best.text or 'no splits'}"
        if lost.best.stored_layout is not None:
            where += f" ({lost.best.stored_layout})"
        return [str(lost.choice), zero, where, _ms(seconds), bytes_text(peak), lost.why]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}" if seconds * 1e3 < 1000 else f"{seconds * 1e3:,.0f}"
