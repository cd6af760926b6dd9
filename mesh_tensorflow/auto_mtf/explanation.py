"""Explanation of a layout: memory over time, time by layer, and the next best layouts.

All numbers are estimates, from the costs of operations; the program is not run.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable
from typing import Any, NamedTuple, Optional, Union

import numpy as np

from mesh_tensorflow import _figure
from mesh_tensorflow._core.errors import dims_text, first_names
from mesh_tensorflow._core.errors import text_table as table
from mesh_tensorflow._core.graph import Graph
from mesh_tensorflow._core.layout import StoredLayout
from mesh_tensorflow._core.operation import Tensor
from mesh_tensorflow._units import bytes_text, ms_text
from mesh_tensorflow.auto_mtf import api
from mesh_tensorflow.auto_mtf.hardware import ZERO, Hardware, Seconds
from mesh_tensorflow.auto_mtf.parts import RenamedProgram, best_part
from mesh_tensorflow.auto_mtf.profiles import MeasuredCosts, Profile, estimator_for
from mesh_tensorflow.auto_mtf.step_time import AnyLayout, Estimate, ProgramParts, StepEstimator

__all__ = ["Alternative", "Explanation", "explain", "table"]

# Layouts whose times differ by a smaller fraction are shown as one.
_NEAR = 1e-3
_TRIES = 12  # layouts to try for each one shown
_LEVELS = "▁▂▃▄▅▆▇█"
_COLUMNS = 60
_LARGEST = 3  # tensors to name of each kind
_BARS = 14  # layers of a figure


class Alternative(NamedTuple):
    """A layout that was not chosen.

    Attributes:
      estimate: its Estimate.
      why: how it compares with the chosen layout.
    """

    estimate: Estimate
    why: str


class Explanation:
    """The time and memory of a step under a layout, as text (`str`) or as a figure (`plot`).

    Attributes:
      estimator: the StepEstimator.
      chosen: the Estimate of the layout.
      alternatives: the next best layouts, including fast ones that do not fit in memory.
      memory_limit_bytes: the memory that a step may use on one processor, or None.
      renamed: the RenamedProgram that all this is of, with names of their own for dimensions in a
        part; None if it is the user's program.
      one_rule: with `parts`, the Estimate of the fastest layout of the user's program; else None.
    """

    def __init__(
        self,
        estimator: StepEstimator,
        chosen: Estimate,
        others: Iterable[Estimate],
        memory_limit_bytes: Optional[float],
        renamed: Optional[RenamedProgram] = None,
        one_rule: Optional[Estimate] = None,
    ):
        """Creates an Explanation.

        Args:
          estimator: a StepEstimator, of all layouts.
          chosen: an Estimate.
          others: Estimates of other layouts.
          memory_limit_bytes: bytes on one processor, or None.
          renamed: the RenamedProgram that these are of, or None.
          one_rule: the Estimate of the fastest layout of the user's program, or None.
        """
        self.renamed, self.one_rule = renamed, one_rule
        self._every = estimator
        self.estimator = estimator.reaching(chosen.layout)
        self.chosen = chosen
        self.memory_limit_bytes = memory_limit_bytes
        self.alternatives = [Alternative(e, self._why(e)) for e in others]

    def _why(self, other: Estimate) -> str:
        """Describes the difference in time between another layout and the chosen one."""
        limit = self.memory_limit_bytes
        if limit is not None and other.peak_bytes > limit:
            return f"does not fit: {bytes_text(other.peak_bytes - limit)} too many"
        ours = self.estimator.times.by_layer(self.chosen.layout)
        theirs = self._every.reaching(other.layout).times.by_layer(other.layout)
        differences = []
        for i, what in enumerate(Seconds._fields):
            more = other.seconds[i] - self.chosen.seconds[i]
            if abs(more) <= _NEAR * self.chosen.seconds.total:
                continue
            by_layer = {
                name: theirs.get(name, ZERO)[i] - ours.get(name, ZERO)[i]
                for name in {**ours, **theirs}
            }
            # Of the layers that change in the same direction as the whole, the one that changes
            # most.
            sign = 1 if more > 0 else -1
            layer = max(by_layer, key=lambda name: sign * by_layer[name])
            differences.append(
                f"{what} {more * 1e3:+.3g} ms, of which {layer} {by_layer[layer] * 1e3:+.3g}"
            )
        return "; ".join(differences) or "as fast"

    @property
    def memory_over_time(self) -> np.ndarray:
        """Bytes in use on one processor during each operation of the schedule."""
        kinds = self.estimator.memory.by_kind(self.chosen.layout)
        return sum(kinds.values(), np.zeros(len(next(iter(kinds.values()), [0])), np.int64))

    # -- as text

    def sections(self) -> dict[str, str]:
        """Returns the text of each section: "step", "parts", "memory", "layers", "others"."""
        texts = {
            "step": self._heading(),
            "parts": self._parts(),
            "memory": self._memory(),
            "layers": self._times(),
            "others": self._others(),
        }
        return {name: "\n".join(lines) for name, lines in texts.items() if lines}

    def __str__(self) -> str:
        return "\n\n".join(self.sections().values())

    def _heading(self) -> list[str]:
        seconds, estimator = self.chosen.seconds, self.estimator
        share = seconds.communication / (seconds.total or 1.0)
        lines = [
            f"layout  {self.chosen.text or 'no splits'}",
            f"mesh    {dims_text(estimator.mesh_shape)} of {estimator.hardware.name}",
            f"step    {seconds} ({share:.0%})",
        ]
        if estimator.costs is not None:
            lines.append(f"        {estimator.costs}")
        if estimator.stored_layout is not None:
            lines.insert(1, f"stored  {estimator.stored_layout}")
        if not estimator.times.is_exact:
            lines.append("        sums over several processors may be counted more than once")
        return lines

    def _parts(self) -> list[str]:
        if self.one_rule is None:
            return []
        if self.renamed is None:
            return ["parts   none is faster with names of its own for dimensions"]
        first, *rest = str(self.renamed).splitlines()
        seconds, text = self.one_rule.seconds, self.one_rule.text or "no splits"
        # As other lines below the words on the left.
        return [
            f"parts   {first}",
            *(f"      {line}" for line in rest),
            *[f"        with one rule for each name, {text}, a step takes {seconds}"],
        ]

    def _memory(self) -> list[str]:
        has = self.memory_limit_bytes or self.estimator.hardware.memory_bytes
        used = self.chosen.peak_bytes
        verdict = "fits in" if used <= has else "DOES NOT FIT in"
        rules = self.chosen.layout
        lines = [
            f"memory  {bytes_text(used)} at the peak, {verdict} {bytes_text(has)}",
            f"        over the step, from nothing to the peak: {self._curve()}",
            f"        the peak is at {self.estimator.peak_at(rules) or 'the start'}:",
        ]
        contents = self.estimator.peak_contents(rules)
        for kind, total in self.estimator.peak_by_kind(rules).items():
            some = [f"{h.name} {bytes_text(h.bytes)}" for h in contents if h.kind == kind]
            lines.append(f"{bytes_text(total):>16s} {kind:11s} {first_names(some, _LARGEST)}")
        return lines

    def _curve(self) -> str:
        """Draws memory over time as a line of bars."""
        values = self.memory_over_time
        pieces = np.array_split(values, min(_COLUMNS, len(values)))
        top = max(1, int(values.max()))
        # The largest of a piece: a mean would hide a peak of a single operation.
        return "".join(_LEVELS[int(p.max() * (len(_LEVELS) - 1) // top)] for p in pieces)

    def _times(self) -> list[str]:
        total = self.chosen.seconds.total or 1.0
        times, rules = self.estimator.times, self.chosen.layout
        layers = times.by_layer(rules)
        measured: Optional[dict[str, Seconds]] = None
        if isinstance(self.estimator.costs, MeasuredCosts):
            measured = times.by_layer(rules, self.estimator.costs.only_timed())
        long = [name for name, s in layers.items() if s.total >= _NEAR * total]
        rows = {name: [name] for name in long}
        # What is too short for a row is added up, so that the rows make the whole step.
        rest = [name for name in layers if name not in rows and layers[name].total]
        if rest:
            rows[f"{len(rest)} more"] = rest
        head = ["layers", "compute ms", "communication ms", "share"]
        lines = [head if measured is None else [*head, "timed"]]
        for layer, names in rows.items():
            seconds = sum((layers[name] for name in names), ZERO)
            share = f"{seconds.total / total:.1%}"
            cells = [layer, ms_text(seconds.compute), ms_text(seconds.communication), share]
            if measured is not None:
                timed = sum((measured[name] for name in names), ZERO)
                cells.append(f"{timed.total / seconds.total:.0%}")
            lines.append(cells)
        return table(lines)

    def _others(self) -> list[str]:
        if not self.alternatives:
            return []
        rows = [["other layouts", "step ms", "memory", "against the chosen one"]]
        for estimate, why in self.alternatives:
            cells = [ms_text(estimate.seconds.total), bytes_text(estimate.peak_bytes), why]
            rows.append([estimate.text or "no splits", *cells])
        return table(rows, left=(0, 3))

    # -- as a figure

    def plot(self, path: str) -> None:
        """Plots memory over time, time by layer and the other layouts to a PNG, SVG or PDF file.

        Args:
          path: the path of the file.

        Raises:
          ImportError: matplotlib is not installed.
        """
        estimator, layout = self.estimator, self.chosen.layout
        where = f"{dims_text(estimator.mesh_shape)} of {estimator.hardware.name}"
        try:
            picture = _figure.Picture(f"{self.chosen.text or 'no splits'} on {where}")
        except ImportError as e:
            raise ImportError("a plot needs matplotlib: pip install matplotlib") from e
        picture.words(0, -32, picture.label, 16)
        kinds = estimator.memory.by_kind(layout)
        limit = self.memory_limit_bytes or estimator.hardware.memory_bytes
        what = "operations of the step, in order"
        _figure.areas("memory over the step", kinds, what, limit, picture)
        layers = itertools.islice(estimator.times.by_layer(layout).items(), _BARS)
        estimates = [self.chosen, *(a.estimate for a in self.alternatives)]
        layouts = [(e.text or "no splits", e.seconds) for e in estimates]
        for title, times in (("time by layer", layers), ("this layout and others", layouts)):
            rows = {name: seconds._asdict() for name, seconds in times}
            _figure.bars(title, rows, Seconds._fields, "", _figure.SECONDS, picture)
        # A name with another end, or with none, is that of a PNG file all the same.
        if os.path.splitext(path)[1].lower() in (".svg", ".pdf"):
            picture.save(path)
            return
        with open(path, "wb") as f:
            f.write(picture.drawn("png"))


# -- layouts to explain


def explain(
    mtf_graph: Graph,
    mesh_shape: Any,
    mtf_outputs: Iterable[Tensor] = (),
    layout: Optional[AnyLayout] = None,
    objective: str = "time",
    memory_limit_bytes: Optional[float] = None,
    hardware: Union[str, Hardware, None] = None,
    alternatives: int = 4,
    stored_layout: Optional[StoredLayout] = None,
    joint: bool = False,
    profile: Union[bool, Profile] = False,
    parts: bool = False,
) -> Explanation:
    """Explains the time and memory of a step under a layout, compared with other layouts.

    >>> x = mtf.ones(mesh, "batch:8,d_in:4")
    >>> y = mtf.layers.dense(x, [mtf.Dimension("d_out", 16)], x.shape.dims[1:])
    >>> explanation = mtf.auto_mtf.explain(graph, "rows:2,cols:2", [y], layout="batch:rows")
    >>> print(str(explanation).splitlines()[0])
    layout  batch:rows

    With `parts`, it also says where a dimension had better have another name, and so another rule:

    >>> x = mtf.sin(mtf.ones(mesh, "batch:256,pixels:1021,channels:64"))
    >>> x = mtf.reduce_max(x, reduced_dim=x.shape.dims[1])
    >>> y = mtf.layers.dense(x, [mtf.Dimension("classes", 65536)], x.shape.dims[1:], name="classes")
    >>> explanation = mtf.auto_mtf.explain(graph, "all:4", [y], parts=True)
    >>> print(explanation.chosen.text)
    batch:all;classes:all
    >>> explanation.renamed.names
    {'batch': 'batch_classes'}

    Args:
      mtf_graph: an mtf.Graph.
      mesh_shape: a Shape, or what converts to one.
      mtf_outputs: Tensors that stay in memory until the end.
      layout: the layout; the choice of `auto_mtf.layout` if None.
      objective: "time" or "memory", the objective of that choice.
      memory_limit_bytes: the memory that a step may use on one processor, or None.
      hardware: see `auto_mtf.layout`.
      alternatives: the number of next fastest layouts to show; with a limit, also as many layouts
        that do not fit.
      stored_layout: how variables are stored, such as the choice of
        `auto_mtf.layout_and_stored_layout`; None if as they are computed with.
      joint: whether layouts to compare with, and one to choose, may split one dimension over
        several mesh dimensions together.
      profile: see `auto_mtf.layout`; the explanation says how much of the time was measured.
      parts: whether to look for a part of the program, such as the variable scope of its decoder,
        in which dimensions would better have names of their own, and so rules of their own. The
        explanation is of the program with these names, and says where to rename what.

    Returns:
      An Explanation: print it, or call its `plot`.

    Raises:
      ValueError: the layout or another argument is invalid.
      auto_mtf.step_time.MemoryLimitError: no layout fits; the error says by how much, and what
        would help.
      auto_mtf.layout_optimizer.SolverError: the solver did not find an optimum.
    """
    if parts:
        _check_parts(layout, objective, profile)
    program = ProgramParts(mtf_graph, mtf_outputs)
    of = functools.partial(
        estimator_for,
        mesh_shape=mesh_shape,
        hardware=hardware,
        stored_layout=stored_layout,
        joint=joint,
    )
    estimator = of(program, profile=profile)
    # One more than is shown, as the layout that is chosen is usually the first of them.
    ranked = distinct(estimator, alternatives + 1, memory_limit_bytes)
    if layout is None and objective == "time":
        # The search for the alternatives has found it, too; `api.layout` would search once more.
        layout = ranked[0].layout
    elif layout is None:
        layout = api.layout(
            mtf_graph, mesh_shape, program.outputs, objective, memory_limit_bytes, hardware, joint
        )
    chosen = estimator.estimate(layout)
    renamed, one_rule = None, chosen if parts else None
    if parts and (found := best_part(estimator, chosen, memory_limit_bytes, of)) is not None:
        renamed, estimator, chosen = found
        ranked = distinct(estimator, alternatives + 1, memory_limit_bytes)
    others = [e for e in ranked if e.layout != chosen.layout][:alternatives]
    if memory_limit_bytes is not None and alternatives:  # that would be next if they fitted
        large = distinct(estimator, alternatives, None)
        # Those that fit are in `ranked` already.
        others += [e for e in large if e.peak_bytes > memory_limit_bytes]
        others = [e for e in others if e.layout != chosen.layout]
    others.sort(key=lambda e: e.seconds.total)
    return Explanation(estimator, chosen, others, memory_limit_bytes, renamed, one_rule)


def _check_parts(layout: Optional[AnyLayout], objective: str, profile: Any) -> None:
    """Raises ValueError if other arguments leave nothing to choose by time, or by a cost model."""
    if layout is not None:
        raise ValueError(
            f"parts=True looks for a layout, and {layout!r} is given: leave one of the two out"
        )
    if objective != "time":
        raise ValueError(f'parts=True is for objective="time", not {objective!r}')
    if profile:
        raise ValueError(
            "parts=True compares programs that are not lowered, whose operations cannot be timed: "
            "leave profile out"
        )


def distinct(
    estimator: StepEstimator, count: int, memory_limit_bytes: Optional[float]
) -> list[Estimate]:
    """Returns the fastest layouts, and of nearly equally fast ones only the first."""
    chosen: list[Estimate] = []
    # Each try excludes a layout, and many in a row may be as fast as the last one that is shown.
    tries = itertools.islice(estimator.fastest(memory_limit_bytes), 1 + count * _TRIES)
    for estimate in tries:
        # They come fastest first, so the last one that was kept is the nearest.
        if not chosen or estimate.seconds.total > chosen[-1].seconds.total * (1 + _NEAR):
            chosen.append(estimate)
        if len(chosen) >= count:
            break
    return chosen
