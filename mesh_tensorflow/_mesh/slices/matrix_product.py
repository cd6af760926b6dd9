"""Contractions of two slices as matrix products, where that is faster than tf.einsum."""

from __future__ import annotations

import functools
import string
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.shape import list_product
from mesh_tensorflow._mesh.constants import remember_reshaped, reshaped

__all__ = ["contract", "never_with_bias"]

# Below about this many multiply-adds, the overhead of tf.einsum on CPUs exceeds that of a matrix
# product and its reshapes.
_SMALL = 4_000_000

# Large products of two matrices for which tf.matmul is still faster; with a transposed right
# operand tf.einsum is.
_LARGE = frozenset(["ab,bc->ac", "ab,ac->bc"])


class _Plan(NamedTuple):
    """A matrix product that computes an equation: free and contracted labels of each operand."""

    left_free: str
    right_free: str
    contracted: str
    transpose_left: bool
    transpose_right: bool


def _side(labels: str, contracted: str) -> Optional[tuple[str, bool]]:
    """Returns (free labels, whether the contracted ones come first), or None."""
    n = len(contracted)
    if labels[len(labels) - n :] == contracted:
        return labels[: len(labels) - n], False
    if labels[:n] == contracted:
        return labels[n:], True
    return None


@functools.lru_cache(maxsize=4096)
def _plan(equation: str) -> Optional[_Plan]:
    """Returns the matrix product that computes an equation, or None if there is none."""
    inputs, output = equation.split("->")
    left, right = inputs.split(",")
    contracted = "".join(c for c in left if c in right and c not in output)
    sides = _side(left, contracted), _side(right, contracted)
    if not contracted or sides[0] is None or sides[1] is None:
        return None
    (left_free, left_first), (right_free, right_first) = sides
    if left_free + right_free != output or set(left_free) & set(right_free):
        return None
    return _Plan(left_free, right_free, contracted, left_first, not right_first)


def contract(equation: str, *slices: tf.Tensor) -> tf.Tensor:
    """Returns tf.einsum(equation, *slices), with the kernel that is faster on CPUs.

    Args:
      equation: as for tf.einsum.
      *slices: tf.Tensors.
    """
    if len(slices) != 2 or not all(x.shape.is_fully_defined() for x in slices):
        return tf.einsum(equation, *slices)
    labels = equation.split("->")[0].split(",")
    size = {c: s for text, x in zip(labels, slices) for c, s in zip(text, x.shape.as_list())}
    single = {c for c in labels[0] if size[c] == 1 and all(c in part for part in _parts(equation))}
    if single:
        return _without(single, equation, slices, size)
    plan = _plan(equation)
    if plan is None:
        return tf.einsum(equation, *slices)
    left, inner, right = (
        list_product(size[c] for c in part)
        for part in (plan.left_free, plan.contracted, plan.right_free)
    )
    if left * inner * right > _SMALL and equation not in _LARGE:
        return tf.einsum(equation, *slices)
    y = never_with_bias(
        tf.matmul(
            reshaped(slices[0], _matrix(left, inner, plan.transpose_left)),
            reshaped(slices[1], _matrix(inner, right, plan.transpose_right)),
            transpose_a=plan.transpose_left,
            transpose_b=plan.transpose_right,
        )
    )
    sizes = [size[c] for c in plan.left_free + plan.right_free]
    return y if sizes == [left, right] else remember_reshaped(y, sizes)


def never_with_bias(y: tf.Tensor) -> tf.Tensor:
    """Returns a product that TensorFlow's optimizer does not join with what is added to it.

    It takes a row that is added for a bias if it does not know that the product is one row too, as
    in loops and after collectives. Its kernel then refuses it: "bias must be 1-dimensional". Only
    products of one row are concerned: the others meet no rows, but biases of one dimension.

    Args:
      y: what tf.matmul or a convolution returns.
    """
    if tf.executing_eagerly() or not y.shape.is_fully_defined():
        return y
    return tf.ensure_shape(y, y.shape) if y.shape[:-1].num_elements() == 1 else y


def _parts(equation: str) -> list[str]:
    return equation.replace("->", ",").split(",")


def _without(
    single: Collection[str], equation: str, slices: Sequence[tf.Tensor], size: Mapping[str, int]
) -> tf.Tensor:
    """Contracts without labels of size 1 that are in all operands and in the result.

    With them it would be a batch of one product, which kernels compute more slowly: such is the
    slice of a dimension that each processor has one index of, as of stages or experts.
    """
    parts = ["".join(c for c in part if c not in single) for part in _parts(equation)]
    names = dict(zip(dict.fromkeys("".join(parts)), string.ascii_lowercase))
    left, right, output = ("".join(names[c] for c in part) for part in parts)
    y = contract(
        f"{left},{right}->{output}",
        *(reshaped(x, [size[c] for c in part]) for x, part in zip(slices, parts)),
    )
    return remember_reshaped(y, [size[c] for c in _parts(equation)[-1]])


def _matrix(rows: int, columns: int, transposed: bool) -> Sequence[int]:
    return [columns, rows] if transposed else [rows, columns]
