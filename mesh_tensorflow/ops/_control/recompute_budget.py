"""A budget of memory for activations, which decides what is stored and what is recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional, Union

from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.layout import LayoutRules, convert_to_layout_rules
from mesh_tensorflow._core.operation import Operation
from mesh_tensorflow._core.shape import Shape, convert_to_shape
from mesh_tensorflow._core.tensor import Tensor

__all__ = ["RecomputeBudget"]


class RecomputeBudget:
    """How many bytes of activations one processor may store for gradients.

    Functions called by `mtf.recompute_grad` with a budget store their activations as long as there
    is room, from the last function to the first, in the order in which gradients are built; the
    others are recomputed. While a function is recomputed, those after it have freed theirs.

    >>> budget = mtf.RecomputeBudget(20_000)
    >>> x = y = mtf.ones(mesh, "a:1000")
    >>> for _ in range(4):
    ...     y = mtf.recompute_grad(lambda x: mtf.sin(mtf.sin(mtf.sin(x))), [y], budget=budget)
    >>> dx = mtf.gradients([y], [x])
    >>> print(budget.num_stored, budget.num_recomputed, budget.left)
    2 2 4000

    Attributes:
      bytes: a number.
      left: how many bytes are left.
      num_stored: how many functions store their activations.
      num_recomputed: how many functions are recomputed.
    """

    def __init__(
        self,
        bytes: float,
        layout: Union[LayoutRules, str, None] = None,
        mesh_shape: Union[Shape, str, None] = None,
    ) -> None:
        """Creates a budget.

        Args:
          bytes: a number, of all functions that are called with this budget.
          layout: the layout rules that the program will be lowered with; None if nothing is split.
          mesh_shape: the mesh; None for one processor.

        Raises:
          ValueError: the number is negative, or only one of layout and mesh is given.
        """
        if bytes < 0:
            raise ValueError(f"RecomputeBudget: bytes must be 0 or more, not {bytes}")
        if (layout is None) != (mesh_shape is None):
            raise ValueError(
                f"RecomputeBudget: layout={layout} and mesh_shape={mesh_shape} must both be given, "
                "for the part of an activation that one processor has, or both be None"
            )
        self.bytes = bytes
        self.left = bytes
        self.num_stored = 0
        self.num_recomputed = 0
        self._layout = convert_to_layout_rules(layout or "")
        self._mesh_shape = convert_to_shape(mesh_shape or "")

    def __repr__(self) -> str:
        return (
            f"RecomputeBudget(bytes={self.bytes}, left={self.left}, num_stored={self.num_stored}, "
            f"num_recomputed={self.num_recomputed})"
        )

    def takes(self, forward: Sequence[Operation], backward: Sequence[Operation]) -> bool:
        """Returns whether there is room for what the gradient of a function reads, and takes it.

        Args:
          forward: the operations of the function.
          backward: the operations of its gradient, which read activations.
        """
        needed = self._needed(forward, backward)
        if needed > self.left:
            self.num_recomputed += 1
            return False
        self.left -= needed
        self.num_stored += 1
        return True

    def _needed(self, forward: Sequence[Operation], backward: Sequence[Operation]) -> int:
        """Returns the bytes of the function's values that its gradient reads."""
        split = {d for d, _ in self._layout.pairs}
        root: dict[Tensor, Optional[Tensor]] = {}
        for op in forward:
            passed = op.passes_on(split)
            for y in op.outputs:
                if y in passed:  # a view of another value
                    x = passed[y]
                    root[y] = root.get(x)
                else:
                    root[y] = y if op.takes_memory else None
        read = {root.get(x) for op in backward for x in op.inputs}
        return sum(self._bytes_of(x) for x in read if x is not None)

    def _bytes_of(self, x: Tensor) -> int:
        size = 1
        for dim in x.shape:
            axis = self._layout.tensor_dimension_to_mesh_axis(dim, self._mesh_shape)
            if axis is None:
                size *= dim.size
                continue
            parts = self._mesh_shape[axis].size
            if dim.size % parts:
                raise ValueError(
                    f"RecomputeBudget: {dims_text([dim])} of {x.name} is split over "
                    f"{dims_text([self._mesh_shape[axis]])}, which does not divide it; change the "
                    "layout or the size"
                )
            size *= dim.size // parts
        return size * x.dtype.size
