"""Pooling layers."""

from __future__ import annotations

from collections.abc import Sequence

import mesh_tensorflow.ops_with_redefined_builtins as mtf

__all__ = ["avg_pool2d", "avg_pool3d", "max_pool2d", "max_pool3d"]


def _pool(x: mtf.Tensor, ksize: Sequence[int], kind: str, name: str) -> mtf.Tensor:
    if all(k == 1 for k in ksize):
        return x
    return mtf.PoolOperation(x, ksize, strides=ksize, pool_fn_string=kind, name=name).outputs[0]


def max_pool2d(
    x: mtf.Tensor, ksize: Sequence[int] = (2, 2), name: str = "max_pool2d"
) -> mtf.Tensor:
    """Applies 2-D max pooling over windows that do not overlap.

    >>> images = mtf.ones(mesh, "batch:2,h:4,w:4,channels:3")
    >>> print(mtf.layers.max_pool2d(images, ksize=(2, 2)).shape)
    Shape[batch=2, h=2, w=2, channels=3]

    Args:
      x: a Tensor with dimensions [batch..., h, w, channels].
      ksize: [height, width] of a window; (1, 1) returns `x`.
      name: a string.
    """
    return _pool(x, ksize, "MAX_2D", name)


def max_pool3d(
    x: mtf.Tensor, ksize: Sequence[int] = (2, 2, 2), name: str = "max_pool3d"
) -> mtf.Tensor:
    """Applies 3-D max pooling to [batch..., d, h, w, channels]; see `max_pool2d`.

    >>> volumes = mtf.ones(mesh, "batch:2,d:4,h:4,w:4,channels:3")
    >>> print(mtf.layers.max_pool3d(volumes, ksize=(2, 2, 2)).shape)
    Shape[batch=2, d=2, h=2, w=2, channels=3]
    """
    return _pool(x, ksize, "MAX_3D", name)


def avg_pool2d(
    x: mtf.Tensor, ksize: Sequence[int] = (2, 2), name: str = "avg_pool2d"
) -> mtf.Tensor:
    """Applies 2-D average pooling to [batch..., h, w, channels]; see `max_pool2d`.

    >>> images = mtf.ones(mesh, "batch:2,h:4,w:4,channels:3")
    >>> print(mtf.layers.avg_pool2d(images, ksize=(2, 2)).shape)
    Shape[batch=2, h=2, w=2, channels=3]
    """
    return _pool(x, ksize, "AVG_2D", name)


def avg_pool3d(
    x: mtf.Tensor, ksize: Sequence[int] = (2, 2, 2), name: str = "avg_pool3d"
) -> mtf.Tensor:
    """Applies 3-D average pooling to [batch..., d, h, w, channels]; see `max_pool2d`.

    >>> volumes = mtf.ones(mesh, "batch:2,d:4,h:4,w:4,channels:3")
    >>> print(mtf.layers.avg_pool3d(volumes, ksize=(2, 2, 2)).shape)
    Shape[batch=2, d=2, h=2, w=2, channels=3]
    """
    return _pool(x, ksize, "AVG_3D", name)
