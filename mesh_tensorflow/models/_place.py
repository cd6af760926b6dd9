"""Where the calls of a model compute: on devices of TensorFlow, or on those of JAX."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional, Union

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.layout import LayoutLike, convert_to_layout_rules
from mesh_tensorflow._core.shape import ShapeLike, convert_to_shape
from mesh_tensorflow._mesh.devices import device_spec
from mesh_tensorflow._mesh.gspmd import GspmdMeshImpl
from mesh_tensorflow._mesh.slice_functions import never_compiled
from mesh_tensorflow._mesh.variables.store import VariableStore, function
from mesh_tensorflow._pjrt import pjrt
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.train._placing import check_pjrt, devices_of

IMPLS = ("placement", "pjrt")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a model computes.

    Attributes:
      mesh_impl: the mesh implementation.
      of_jax: on devices of JAX, the arguments of `mtf.pjrt.function`; else None.
      shows: whether to show how far the reading of weights is.
    """

    mesh_impl: Union[PlacementMeshImpl, GspmdMeshImpl]
    of_jax: Optional[Mapping[str, Any]] = None
    shows: bool = True

    @property
    def of_fit(self) -> dict[str, Any]:
        """The arguments of `mtf.train.fit` that train there."""
        if self.of_jax is None:
            return {"mesh_impl": self.mesh_impl}
        return {**self.of_jax, "mesh_impl": "pjrt"}

    def new_store(self) -> VariableStore:
        """Returns a store for the variables of functions."""
        return VariableStore() if self.of_jax is None else pjrt().ArrayStore()

    def function(self, fn: Callable[..., Any], store: VariableStore) -> Callable[..., Any]:
        """Returns a function compiled, with arguments and results of TensorFlow.

        Args:
          fn: a function of tf.Tensors that lowers a program by `lower`.
          store: where its variables are.
        """
        if self.of_jax is None:

            @functools.wraps(fn)
            def uncompiled(*args: Any) -> Any:
                # Only eager code calls it, so that caches are written to in place.
                with never_compiled():
                    return fn(*args)

            return function(uncompiled, store=store)
        compiled = pjrt().function(fn, store=store, **self.of_jax)

        def call(*args: Any) -> Any:
            # A process has parts of an array alone; asked for in all of them, it has all of it.
            found = compiled(*args)
            return tf.nest.map_structure(lambda x: tf.constant(pjrt().gathered(x)), found)

        return call

    def lower(self, mesh: mtf.Mesh) -> mtf.Lowering:
        """Returns the Lowering of a program of such a function.

        Args:
          mesh: the Mesh.
        """
        impl = self.mesh_impl if self.of_jax is None else pjrt().mesh_impl()
        return mtf.Lowering(mesh.graph, {mesh: impl})

    @property
    def can_listen(self) -> bool:
        """Whether a function of Python can follow a program."""
        return self.of_jax is None

    def check_can_listen(self, what: str) -> None:
        """Raises ValueError where no function of Python can follow a program.

        Args:
          what: what would follow it.
        """
        if not self.can_listen:
            raise ValueError(
                f"{what}: mesh_impl='pjrt' compiles all steps into one program, which tells "
                "nothing before its end: no pieces, and no texts in stop. Stop at ids, or leave "
                "mesh_impl out of from_pretrained"
            )

    def filled_up(self, rows: np.ndarray) -> np.ndarray:
        """Returns rows with the last one repeated, so many that the layout can split them.

        Args:
          rows: an array, [batch, ...].
        """
        axis = self.mesh_impl.mesh_axis(mtf.Dimension("batch", len(rows)))
        parts = 1 if axis is None else self.mesh_impl.shape[axis].size
        return np.concatenate([rows, *[rows[-1:]] * (-len(rows) % parts)])


def place_of(
    what: str,
    mesh_shape: ShapeLike,
    layout: LayoutLike,
    devices: Optional[Sequence[str]],
    mesh_impl: Optional[str],
    *,
    zero: Optional[int],
    zero_axis: Optional[str],
    uneven: bool,
    shows: bool = True,
) -> Place:
    """Returns the Place that the arguments of `from_pretrained` describe.

    Args:
      what: the function that was called, for errors.
      mesh_shape: see `from_pretrained`, as for the others.
      layout: likewise.
      devices: likewise.
      mesh_impl: likewise.
      zero: likewise.
      zero_axis: likewise.
      uneven: likewise.
      shows: see Place.

    Raises:
      ValueError: the mesh implementation is not known, or the devices are not there.
    """
    shape = convert_to_shape(mesh_shape)
    if shape is None:
        raise ValueError(f"{what}: mesh_shape=None is no mesh; leave it out for one processor")
    stored: dict[str, Any] = {"zero": zero, "zero_axis": zero_axis}
    if mesh_impl not in (None, *IMPLS):
        raise ValueError(
            f"{what}: mesh_impl={mesh_impl!r} is none of {', '.join(map(repr, IMPLS))}. "
            "Trainings take others: give them to mtf.train.fit(model.loss, ...)"
        )
    if mesh_impl != "pjrt":
        _check_own(what, devices or ())
        places = devices_of(shape, devices, what=what)
        impl = PlacementMeshImpl(shape, layout, places, strict_layout=True, uneven=uneven, **stored)
        return Place(impl, shows=shows)
    check_pjrt(what, devices)
    rules = convert_to_layout_rules(layout)
    rules = rules.allowing_uneven() if uneven else rules
    of_jax = {"mesh_shape": shape, "layout": rules, **stored}
    return Place(GspmdMeshImpl(shape, rules, **stored), of_jax, shows)


def _check_own(what: str, devices: Sequence[str]) -> None:
    """Raises ValueError for devices of processes that eager code is not connected to.

    Args:
      what: the function that was called, for errors.
      devices: device strings.
    """
    for device in devices:
        if (spec := device_spec(device)).job in (None, "localhost"):
            continue
        there = [device_spec(known.name) for known in tf.config.list_logical_devices()]
        if not any(spec.job == one.job and spec.task == one.task for one in there):
            raise ValueError(
                f"{what}: devices has {device!r}, and the calls of a model run on devices of their "
                "own process. With mesh_impl='pjrt' several processes share them: start these with "
                "python -m mesh_tensorflow.launch --runtime pjrt. Without it each computes the "
                "whole, on '/device:CPU:0' and the like"
            )
