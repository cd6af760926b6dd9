"""Unit: a part of a program whose time adds to that of the others, whatever the layout."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, Optional

from mesh_tensorflow._core.operation import Operation
from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow.auto_mtf._time.seconds import CostModel, Seconds

__all__ = ["Unit", "dims_of", "signature", "weight_key"]


class Unit(NamedTuple):
    """A part of a program whose time depends only on the layout of its own dimensions.

    Attributes:
      signature: equal for units that take equally long under every layout.
      dims: names of the dimensions that its time depends on.
      times: the number of times that it occurs in a step.
      layer: the name of its layer.
      seconds: a function of a CostModel and a MeshImpl that returns Seconds.
      apart: a function that returns smaller Units of about the same total time, with fewer
        dimensions; or None.
      is_stored: whether its time depends on how variables are stored.
    """

    signature: Any
    dims: frozenset[str]
    times: float
    layer: str
    seconds: Callable[[CostModel, MeshImpl], Seconds]
    apart: Optional[Callable[[], list[Unit]]] = None
    is_stored: bool = False


def dims_of(
    operations: Iterable[Operation],
    weights: Iterable[Optional[Shape]],
    candidates: frozenset[str],
) -> frozenset[str]:
    """Returns the names of dimensions that the time of operations depends on.

    Args:
      operations: Operations.
      weights: Shapes of weights whose update they are part of, or Nones.
      candidates: names of the dimensions that may be split.
    """
    shapes = [t.shape for op in operations for t in op.inputs + op.outputs]
    shapes += [weight for weight in weights if weight is not None]
    return frozenset(n for shape in shapes for n in shape.dimension_names) & candidates


def weight_key(weight: Optional[Shape]) -> Hashable:
    """Returns what tells Shapes of weights apart, or None."""
    return None if weight is None else tuple(weight)


def signature(op: Operation) -> Hashable:
    """Returns a key that two operations share only if they cost the same under every layout.

    Args:
      op: an Operation.
    """
    shapes = tuple((tuple(t.shape), t.dtype) for t in op.inputs + op.outputs)
    return type(op), len(op.inputs), shapes, op.cost_key()
