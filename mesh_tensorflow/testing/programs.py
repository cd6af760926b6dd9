"""Cases of the table as programs, and checks of their results and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow._core.operation import is_differentiable
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.cases import Case, table

__all__ = ["TOLERANCE", "Program", "check_gradients", "check_results"]

# Factors of the tolerance of a case. float32 results differ by rounding only; bfloat16 has 8 bits.
TOLERANCE = {"float32": 1.0, "float64": 1e-6, "bfloat16": 3000.0, "int32": 1.0}


class Program:
    """A case as an mtf graph, with input gradients for random output gradients.

    Attributes:
      case: the Case.
      graph: the mtf.Graph.
      mesh: its Mesh.
      arrays: the input arrays.
      feed: a dictionary from placeholders to arrays; empty in eager code.
      xs: the inputs.
      ys: the outputs.
      wrt: the indices of the inputs that have a gradient.
      dys: the gradients of the floating-point outputs.
      grads: the gradients of the inputs in `wrt`.
    """

    def __init__(self, case: Case, dtype: str):
        """Builds the program.

        Args:
          case: a Case.
          dtype: the dtype of its floating-point inputs.
        """
        self.case = case
        self.graph = mtf.Graph()
        self.mesh = mtf.Mesh(self.graph, "mesh")
        self.arrays = table.input_data(case, dtype)
        self.feed: dict[Any, np.ndarray] = {}
        self.xs = [
            self._fed(array, table.shape(spec.partition("/")[0]))
            for array, spec in zip(self.arrays, case.inputs, strict=True)
        ]
        self.ys = harness.as_list(case.build(*self.xs))
        self.wrt = self._differentiable()
        self.dys: list[np.ndarray] = []
        self.grads: list[mtf.Tensor] = []
        if self.wrt:
            self._make_gradients()

    def _fed(self, array: np.ndarray, shape: mtf.Shape) -> mtf.Tensor:
        if tf.executing_eagerly_outside_functions():
            return mtf.import_tf_tensor(self.mesh, tf.constant(array), shape)
        # No constant: TensorFlow would compute what it can of the program before it is run.
        placeholder = tf.placeholder(tf.as_dtype(array.dtype), array.shape)
        self.feed[placeholder] = array
        return mtf.import_tf_tensor(self.mesh, placeholder, shape)

    def _differentiable(self) -> list[int]:
        if self.case.grads is not None:
            return [i for i in self.case.grads if is_differentiable(self.xs[i].dtype)]
        if not any(is_differentiable(y.dtype) for y in self.ys):
            return []
        return [i for i, x in enumerate(self.xs) if is_differentiable(x.dtype)]

    def _make_gradients(self) -> None:
        # Random and not ones: the sum of a softmax, for one, is constant, and has the gradient 0.
        rng = np.random.default_rng(1)
        floating = [y for y in self.ys if is_differentiable(y.dtype)]
        for y in floating:
            dy = _normal(rng, y.shape.to_integer_list, y.dtype.is_complex)
            self.dys.append(dy.astype(y.dtype.as_numpy_dtype))
        grad_ys = [self._fed(dy, y.shape) for y, dy in zip(floating, self.dys)]
        grads = mtf.gradients(floating, [self.xs[i] for i in self.wrt], grad_ys=grad_ys)
        missing = [i for i, g in zip(self.wrt, grads) if g is None]
        assert not missing, f"no gradient reaches inputs {missing}"
        self.grads = [g for g in grads if g is not None]

    @property
    def targets(self) -> list[mtf.Tensor]:
        """The outputs, then the gradients."""
        return self.ys + self.grads

    def run(
        self, placings: Iterable[harness.Placing]
    ) -> list[tuple[harness.Lowered, list[np.ndarray]]]:
        """Runs the program; returns the lowered program and its values for each placing."""
        lowered = [harness.lower(self.graph, self.mesh, p, self.targets) for p in placings]
        with harness.session() as session:
            values = harness.values_of(session, lowered, self.feed)
        return list(zip(lowered, values))


def _normal(rng: np.random.Generator, size: Sequence[int], is_complex: bool) -> np.ndarray:
    x = rng.normal(size=size)
    return x + 1j * rng.normal(size=size) if is_complex else x


def _product(g: np.ndarray, v: np.ndarray) -> Any:
    """Returns how much a function with gradient `g` grows along `v`, in TensorFlow's convention."""
    return np.sum(np.real(np.conj(g) * v))


def _directional(program: Program, direction: Sequence[np.ndarray], step: float) -> float:
    """Returns the directional derivative of the weighted sum of the oracle's outputs."""
    case, at = program.case, [table.wide(x) for x in program.arrays]

    def weighted(sign: int) -> Any:
        moved = list(at)
        for i, v in zip(program.wrt, direction):
            moved[i] = at[i] + sign * step * v
        if case.surrogate is not None:
            ys = case.surrogate(*moved, at=at)
        else:
            ys = case.oracle(*moved)
        # As in `dys`, integers and booleans are left out, which have no gradients.
        ys = [y for y in map(np.asarray, harness.as_list(ys)) if y.dtype.kind in "fc"]
        return sum(_product(table.wide(dy), y) for y, dy in zip(ys, program.dys, strict=True))

    # (f(x + h v) - f(x - h v)) / 2h: its error is of order h^2, that of one side alone of order h.
    return (weighted(1) - weighted(-1)) / (2 * step)


def check_gradients(program: Program, grads: Sequence[np.ndarray]) -> None:
    """Compares gradients with finite differences in random directions.

    Raises:
      AssertionError: the gradients differ.
    """
    rng = np.random.default_rng(2)
    wide = [table.wide(g) for g in grads]
    # Several, since an error may be small along one of them.
    for _ in range(3):
        direction = [_normal(rng, g.shape, np.iscomplexobj(g)) for g in wide]
        # In float64, h^2 = 1e-12 and rounding by 1e-16 / h = 1e-10 are far below the tolerance.
        expected = _directional(program, direction, 1e-6)
        slope = sum(_product(g, v) for g, v in zip(wide, direction))
        # Along a normal direction, the derivative has the standard deviation |gradient|.
        scale = np.sqrt(sum(_product(g, g) for g in wide)) + 1e-3
        assert abs(slope - expected) < 2e-4 * scale, (slope, expected)


def check_results(program: Program, dtype: str, values: Sequence[np.ndarray]) -> None:
    """Compares outputs with NumPy, and gradients with finite differences.

    Args:
      program: a Program.
      dtype: the dtype of its floating-point inputs.
      values: the values of its targets.

    Raises:
      AssertionError: a value, its shape or its dtype differs.
    """
    case, tolerance = program.case, program.case.tolerance * TOLERANCE[dtype]
    ys, grads = values[: len(program.ys)], values[len(program.ys) :]
    expected = harness.as_list(case.oracle(*[table.wide(x) for x in program.arrays]))
    for i, (y, e) in enumerate(zip(ys, expected, strict=True)):
        assert y.dtype == program.ys[i].dtype.as_numpy_dtype, f"{case.name}, output {i}"
        harness.assert_close(y, e, tolerance, f"{case.name}, output {i}")
    for i, g in zip(program.wrt, grads):
        assert g.shape == program.arrays[i].shape and g.dtype == program.arrays[i].dtype
    # The tolerance is that of float32: gradients in bfloat16 are off by more.
    if dtype == "float32" and grads:
        check_gradients(program, grads)
