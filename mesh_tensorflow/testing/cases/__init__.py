"""The case table: programs for every family of operations, with NumPy oracles."""

from mesh_tensorflow.testing.cases import (
    attention,
    contraction,
    control,
    elementwise,
    layers,
    movement,
)
from mesh_tensorflow.testing.cases.table import Case

__all__ = ["CASES", "Case"]

_FAMILIES = [elementwise, contraction, movement, control, layers, attention]

CASES: list[Case] = [c for family in _FAMILIES for c in family.CASES]

assert len({c.name for c in CASES}) == len(CASES), "names of cases must be unique"
