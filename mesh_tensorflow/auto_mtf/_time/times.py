"""The time of a step under a layout, as a sum over distinct units."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Optional

import numpy as np

from mesh_tensorflow._core.cost import Collective
from mesh_tensorflow.auto_mtf._memory.space import LayoutSpace
from mesh_tensorflow.auto_mtf._time.seconds import ZERO, CostModel, Seconds
from mesh_tensorflow.auto_mtf._time.unit import Unit

__all__ = ["Known", "Sent", "StepTime", "layer_kind"]

# Units with more assignments than this are split into smaller ones.
_MOST_ASSIGNMENTS = 20_000

# Seconds by the signature of a unit, and the layout of its dimensions.
Known = dict[Any, dict[frozenset, Seconds]]

_NUMBER = re.compile(r"(?<=[A-Za-z])_?\d+(?=/|$)")
_GRADIENTS = "gradients"


def layer_kind(name: str) -> str:
    """Returns the name of a layer without numbers and operations, for grouping equal layers.

    Args:
      name: the name of an operation, such as "layer_3/dense/einsum/gradients/einsum_2".
    """
    *scopes, last = _NUMBER.sub("", name).split("/")
    if _GRADIENTS in scopes:
        forward = scopes[: max(0, scopes.index(_GRADIENTS) - 1)]
        return "/".join([*forward, _GRADIENTS])
    return "/".join(scopes) or last


class Sent(NamedTuple):
    """A collective of a step.

    Attributes:
      layer: the name of its kind of layer.
      collective: a Collective.
      times: the number of times that it occurs in a step.
      seconds: how long all of these take.
    """

    layer: str
    collective: Collective
    times: float
    seconds: float


class _Kind:
    """Units of equal time, with their count in each layer."""

    def __init__(self, unit: Unit):
        self.unit = unit
        self.dims = tuple(sorted(unit.dims))
        self.layers: Counter[str] = Counter()
        self.times = 0.0
        self.known: dict[frozenset, Seconds] = {}


class StepTime:
    """The time of a step under any layout.

    Equal units are counted together, so that the work does not grow with the number of layers.

    Attributes:
      is_exact: whether all sums that may be delayed together were evaluated together.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        space: LayoutSpace,
        model: CostModel,
        known: Optional[Known] = None,
    ):
        """Creates a StepTime.

        Args:
          units: Units.
          space: a LayoutSpace.
          model: a CostModel.
          known: the seconds of units that other StepTimes on the same mesh have evaluated, which
            differ in how variables are stored; more are added.
        """
        self._known: Known = {} if known is None else known
        self._space = space
        self._model = model
        self.is_exact = True
        self._kinds: dict[Any, _Kind] = {}
        for unit in units:
            self._add(unit)

    def _add(self, unit: Unit) -> None:
        if unit.apart is not None and unit.signature not in self._kinds:
            dims = tuple(sorted(unit.dims))
            if self._space.count(dims, _MOST_ASSIGNMENTS + 1) > _MOST_ASSIGNMENTS:
                self.is_exact = False
                for part in unit.apart():
                    self._add(part)
                return
        if unit.signature not in self._kinds:
            self._kinds[unit.signature] = kind = _Kind(unit)
            # Only what does not depend on how variables are stored is the same for other ways to
            # store them.
            if not unit.is_stored:
                kind.known = self._known.setdefault(unit.signature, {})
        kind = self._kinds[unit.signature]
        kind.layers[layer_kind(unit.layer)] += unit.times  # type: ignore[assignment]
        kind.times += unit.times

    def _seconds(self, kind: _Kind, layout: Mapping[str, str]) -> Seconds:
        own = {d: layout[d] for d in kind.dims if d in layout}
        key = frozenset(own.items())
        if key not in kind.known:
            kind.known[key] = kind.unit.seconds(self._model, self._model.impl(own))
        return kind.known[key]

    def total(self, layout: Mapping[str, str]) -> Seconds:
        """Returns the seconds of a step.

        Args:
          layout: a dictionary from dimension names to mesh dimension names.
        """
        kinds = self._kinds.values()
        return sum((self._seconds(k, layout).times(k.times) for k in kinds), ZERO)

    def by_layer(self, layout: Mapping[str, str]) -> dict[str, Seconds]:
        """Returns the seconds of a step by kind of layer, longest first.

        Args:
          layout: a dictionary from dimension names to mesh dimension names.
        """
        found: dict[str, Seconds] = {}
        for kind in self._kinds.values():
            seconds = self._seconds(kind, layout)
            for layer, times in kind.layers.items():
                found[layer] = found.get(layer, ZERO) + seconds.times(times)
        return dict(sorted(found.items(), key=lambda pair: -pair[1].total))

    def sent(self, layout: Mapping[str, str]) -> list[Sent]:
        """Returns the collectives of a step, without those of a mesh dimension of one processor.

        Args:
          layout: a dictionary from dimension names to mesh dimension names.
        """
        found = []
        for kind in self._kinds.values():
            model = self._model.recording()
            own = {d: layout[d] for d in kind.dims if d in layout}
            kind.unit.seconds(model, model.impl(own))
            for collective, seconds in model.recorded:
                for layer, times in kind.layers.items():
                    found.append(Sent(layer, collective, times, seconds * times))
        return found

    def tables(self) -> dict[tuple[str, ...], np.ndarray]:
        """Returns, for each set of dimensions, the seconds of each assignment in the space."""
        found: dict[tuple[str, ...], np.ndarray] = {}
        for kind in self._kinds.values():
            rows = self._space.assignments(kind.dims)
            seconds = [
                self._seconds(kind, self._space.layout(kind.dims, row)).total for row in rows
            ]
            column = np.array(seconds) * kind.times
            found[kind.dims] = found.get(kind.dims, 0.0) + column
        return found

    def __len__(self) -> int:
        """The number of kinds of units."""
        return len(self._kinds)
