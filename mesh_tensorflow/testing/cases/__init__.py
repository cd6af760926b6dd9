"""The case table: programs for every family of operations, with NumPy oracles."""

from mesh_tensorflow.testing.cases import (
    binary,
    contraction,
    control,
    conv,
    elementwise,
    indexing,
    joining,
    layers,
    loops,
    reductions,
    reshaping,
    shifting,
)
from mesh_tensorflow.testing.cases.attention import blocked
from mesh_tensorflow.testing.cases.attention import layers as attention_layers
from mesh_tensorflow.testing.cases.complex import fourier, numbers
from mesh_tensorflow.testing.cases.table import Case

__all__ = ["CASES", "Case"]

_FAMILIES = [
    elementwise,
    binary,
    numbers,
    contraction,
    reductions,
    reshaping,
    joining,
    shifting,
    indexing,
    control,
    loops,
    conv,
    layers,
    attention_layers,
    fourier,
    blocked,
]

CASES: list[Case] = [c for family in _FAMILIES for c in family.CASES]

assert len({c.name for c in CASES}) == len(CASES), "names of cases must be unique"
