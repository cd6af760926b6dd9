"""Random tensors of a PlacementMeshImpl: each different slice is generated once, on its device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._mesh.placement.tensor import PlacedTensor
from mesh_tensorflow._mesh.slices import random_values

if TYPE_CHECKING:
    from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl

__all__ = ["random_tensor"]


def random_tensor(
    impl: PlacementMeshImpl, shape: Shape, tf_fn: Callable, kwargs: dict[str, Any]
) -> PlacedTensor:
    """Returns a laid-out random tensor; see `PlacementMeshImpl.random`.

    Args:
      impl: a PlacementMeshImpl.
      shape: a Shape.
      tf_fn: a function of tf.random.
      kwargs: its keyword arguments.
    """
    kwargs = dict(kwargs)
    seed, key = kwargs.pop("seed", None), kwargs.pop("key", None)
    if not random_values.is_known(tf_fn):
        with tf.device(impl.devices[0]):
            # A generator for each slice would give other values in each layout.
            whole = tf_fn(shape.to_integer_list, seed=seed, **kwargs)
        return PlacedTensor(impl.make_slices(whole, shape))
    if key is None:
        with tf.device(impl.devices[0]):
            key = random_values.new_key(seed)
    sizes, slice_sizes = shape.to_integer_list, impl.slice_shape(shape)
    made: dict[tuple, tf.Tensor] = {}
    slices = []
    for pnum, device in enumerate(impl.devices):
        begin = impl.slice_begin(shape, pnum)
        place = (impl.domains[pnum], *begin)
        if place not in made:
            with tf.device(device):
                made[place] = random_values.random_slice(
                    key, sizes, begin, slice_sizes, tf_fn, kwargs
                )
        slices.append(made[place])
    return PlacedTensor(slices)
