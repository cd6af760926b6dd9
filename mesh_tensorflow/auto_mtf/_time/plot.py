"""Plots of explanations, with matplotlib."""

from __future__ import annotations

from typing import Any

import numpy as np

from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._units import shortened_apart, unit_of_bytes

__all__ = ["draw"]

_MOST_LAYERS = 14
_MOST_NAME = 40
_COLORS = {"compute": "#4c72b0", "communication": "#dd8452"}


def draw(explanation: Any, path: str) -> None:
    """Plots memory over time, time by layer and the other layouts.

    Args:
      explanation: an Explanation.
      path: the path of a PNG file.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ImportError("a plot needs matplotlib: pip install matplotlib") from e
    figure = Figure(figsize=(11, 13), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, 1)
    figure.suptitle(
        f"{explanation.chosen.text or 'no splits'} on "
        f"{dims_text(explanation.estimator.mesh_shape)} of {explanation.estimator.hardware.name}"
    )
    _memory(axes[0], explanation)
    layers = explanation.estimator.times.by_layer(explanation.chosen.layout)
    names = list(layers)[:_MOST_LAYERS]
    _times(axes[1], names, [layers[n] for n in names], "time by layer")
    estimates = [explanation.chosen, *(a.estimate for a in explanation.alternatives)]
    names = [e.text or "no splits" for e in estimates]
    _times(axes[2], names, [e.seconds for e in estimates], "this layout and others")
    figure.savefig(path, dpi=100)


def _memory(axis: Any, explanation: Any) -> None:
    estimator = explanation.estimator
    kinds = estimator.memory.by_kind(explanation.chosen.layout, estimator.space.mesh_sizes)
    kinds = dict(sorted(kinds.items(), key=lambda pair: -int(pair[1].min())))
    length = len(next(iter(kinds.values()))) if kinds else 1
    limit = explanation.memory_limit_bytes or estimator.hardware.memory_bytes
    top = explanation.chosen.peak_bytes
    unit, size = unit_of_bytes(top)
    if kinds:
        axis.stackplot(
            np.arange(length), *(v / size for v in kinds.values()), labels=list(kinds), step="post"
        )
    if limit < 3 * top:
        axis.axhline(limit / size, color="black", linestyle="--", label="limit")
    axis.set_xlabel("operations of the step, in order")
    axis.set_ylabel(f"{unit} on a processor")
    axis.set_title("memory over the step")
    _legend(axis)


def _times(axis: Any, names: list[str], seconds: list[Any], title: str) -> None:
    places = np.arange(len(names))
    begin = np.zeros(len(names))
    for i, (what, color) in enumerate(_COLORS.items()):
        values = np.array([s[i] * 1e3 for s in seconds])
        axis.barh(places, values, left=begin, label=what, color=color)
        begin += values
    axis.set_yticks(places, shortened_apart(names, _MOST_NAME), fontsize="small")
    axis.invert_yaxis()
    axis.set_xlabel("ms")
    axis.set_title(title)
    _legend(axis)


def _legend(axis: Any) -> None:
    """Draws the legend to the right of the axes, off what they show."""
    axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize="small", frameon=False)
