"""StoredLayout: which dimensions of variables are split where they are stored."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Optional

import gin

from mesh_tensorflow._core.errors import did_you_mean, dims_text
from mesh_tensorflow._core.layout import (
    LayoutLike,
    LayoutRules,
    StoredName,
    convert_to_layout_rules,
)
from mesh_tensorflow._core.shape import Dimension, Shape

if TYPE_CHECKING:
    from mesh_tensorflow._mesh.mesh_impl import MeshImpl

__all__ = [
    "EARLY",
    "WEIGHTS_TOO",
    "StoredLayout",
    "given_stored_layout",
    "plain_shape",
    "stored_layout",
    "storing",
]

_in_force: contextvars.ContextVar[Optional[dict[str, Any]]] = contextvars.ContextVar(
    "stored_layout", default=None
)
EARLY = 2  # the stage from which each gradient is scattered before the next is computed
WEIGHTS_TOO = 3  # the stage from which weights are stored in parts, besides slots


@dataclasses.dataclass(frozen=True, eq=False)
class StoredLayout:
    """How variables are stored, where that is not how they are computed with.

    ZeRO: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter
    models" (SC 2020).

    Attributes:
      stage: 3 if weights are stored in parts; 1 or 2 if only what optimizers keep is. From 2 on,
        a gradient is scattered before the next one is computed.
      rules: which dimensions are split over which mesh dimensions.
      mesh_dim: the name of a mesh dimension that splits one dimension of each variable; or None.
    """

    stage: int
    rules: LayoutRules
    mesh_dim: Optional[str]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoredLayout) and self._key() == other._key()

    def __str__(self) -> str:
        rules = ",".join(f"{d}:{m}" for d, m in self.rules.pairs)
        over = "" if self.mesh_dim is None else f" over {self.mesh_dim}"
        return f"zero={self.stage}{over}" + (f", variables {rules}" if rules else "")

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple:
        # By pairs, since objects of LayoutRules are equal only to themselves.
        return self.stage, tuple(self.rules.pairs), self.mesh_dim

    def names(self, shape: Shape, mesh_impl: MeshImpl) -> dict[str, StoredName]:
        """Returns the names under which dimensions of a variable are stored, by their own.

        A dimension that is split already, or that a mesh dimension does not divide, is left whole;
        so is one that another dimension of the variable shares its mesh dimension with.

        Args:
          shape: the Shape of a variable.
          mesh_impl: a MeshImpl.
        """
        # No two dimensions of a tensor may be split over one mesh axis, and some are by the layout.
        taken = set(mesh_impl.splitting_axes(shape))
        found: dict[str, StoredName] = {}
        for d, mesh_dim in self._wanted(shape):
            axis = mesh_impl.shape.dims.index(mesh_impl.shape.get_dim_by_name(mesh_dim))
            parts = mesh_impl.shape[axis].size
            split = mesh_impl.tensor_dimension_to_mesh_axis(d) is not None
            if parts == 1 or axis in taken or split or d.name in found or d.size % parts:
                continue
            taken.add(axis)
            found[d.name] = StoredName(d.name, mesh_dim)
        return found

    def _wanted(self, shape: Shape) -> Iterator[tuple[Dimension, str]]:
        """Yields dimensions with the mesh dimensions to split them over, the best first."""
        for d in shape:
            for tensor_dim, mesh_dim in self.rules.pairs:
                if tensor_dim == d.name:
                    yield d, mesh_dim
        if self.mesh_dim is not None:
            # After the rules: what a rule says of a dimension precedes the choice of any.
            for d in sorted(shape, key=lambda d: -d.size):
                yield d, self.mesh_dim


def plain_shape(shape: Shape) -> Shape:
    """Returns a Shape with the dimensions' own names, without how they are stored."""
    return Shape(
        [
            Dimension(d.name.plain if isinstance(d.name, StoredName) else d.name, d.size)
            for d in shape
        ]
    )


@contextlib.contextmanager
def storing(**options: Any) -> Iterator[None]:
    """Makes options of `stored_layout` those of mesh implementations that are made within.

    Args:
      **options: `variable_layout`, `zero` and `zero_axis`, where they are not None.
    """
    # The options around this context stay in force where these say nothing.
    token = _in_force.set({**(_in_force.get() or {}), **options})
    try:
        yield
    finally:
        _in_force.reset(token)


def given_stored_layout(
    mesh_shape: Shape,
    variable_layout: Optional[LayoutLike],
    zero: Optional[int],
    zero_axis: Optional[str],
) -> Optional[StoredLayout]:
    """Returns the StoredLayout that arguments ask for, or, where they are None, `storing` or gin.

    Args:
      mesh_shape: shape of the mesh.
      variable_layout: see `stored_layout`.
      zero: likewise.
      zero_axis: likewise.
    """
    named = {"variable_layout": variable_layout, "zero": zero, "zero_axis": zero_axis}
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    # An argument that is left out is not passed on as None, which would hide what gin binds.
    return stored_layout(mesh_shape, **{**(_in_force.get() or {}), **given})


@gin.configurable(module="mesh_tensorflow", denylist=["mesh_shape"])
def stored_layout(
    mesh_shape: Shape,
    variable_layout: Optional[LayoutLike] = None,
    zero: int = 0,
    zero_axis: Optional[str] = None,
) -> Optional[StoredLayout]:
    """Returns how variables are stored on a mesh, or None if just as they are computed with.

    Args:
      mesh_shape: shape of the mesh.
      variable_layout: LayoutRules, or what converts to them, such as "d_model:rows"; or None.
      zero: 0, or the stage of ZeRO.
      zero_axis: the name of a mesh dimension; the only one of the mesh if None.

    Raises:
      ValueError: the stage is none, or the mesh lacks a dimension.
    """
    if zero not in (0, 1, 2, 3):
        raise ValueError(
            f"zero={zero!r}: the stage of ZeRO is 1 or 2 (what optimizers keep is stored in "
            "parts), 3 (weights too), or 0 for neither"
        )
    rules = convert_to_layout_rules(variable_layout or "")
    names = mesh_shape.dimension_names
    unknown = rules.unknown_mesh_dimensions(mesh_shape)
    if unknown or (zero_axis is not None and zero_axis not in names):
        name = zero_axis if not unknown else unknown[0]
        what = f"zero_axis={name!r}" if not unknown else f"variable_layout {rules}: {name!r}"
        raise ValueError(f"{what} {_is_none_of(str(name), mesh_shape)}")
    if zero_axis is not None and not zero:
        raise ValueError(f"zero_axis={zero_axis!r} has no effect without zero=1, 2 or 3")
    if not zero and not rules.pairs:
        return None
    # Rules alone store weights in parts, as stage 3 does. With rules, a mesh axis is not guessed.
    if not zero or rules.pairs:
        return StoredLayout(zero or WEIGHTS_TOO, rules, zero_axis)
    if not names:
        raise ValueError(
            f"zero={zero} on a mesh without dimensions: one processor stores everything. Give the "
            "mesh a dimension, such as all=1, or leave zero out"
        )
    if zero_axis is None and len(names) != 1:
        raise ValueError(
            f"zero={zero} on the mesh {dims_text(mesh_shape)}: say over which of its dimensions, "
            f"by zero_axis={names[0]!r}; usually that which splits the batch"
        )
    return StoredLayout(zero, rules, zero_axis or names[0])


def _is_none_of(name: str, mesh_shape: Shape) -> str:
    """Returns the end of an error: a mesh has no dimension of a name, and what to write instead."""
    names = mesh_shape.dimension_names
    if not names:
        return "is no dimension of the mesh, which has none. Give it one, or leave this out"
    nearest = did_you_mean(name, names)
    instead = nearest if nearest != "." else ". Name one of these"
    return f"is no dimension of the mesh {dims_text(mesh_shape)}{instead}"
