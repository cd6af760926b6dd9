"""Pooling over two or three spatial dimensions, and over groups along one dimension."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.errors import check_choice, dims_text, is_whole, slip, tensors_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow._core.operation import Cost, Operation, Tensor, gradient_of_output
from mesh_tensorflow._core.shape import Dimension, Shape, list_product
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow.ops._contractions.reduce_broadcast import reduce_first, reduce_mean
from mesh_tensorflow.ops._elementwise.binary import check_dtypes
from mesh_tensorflow.ops._movement.halo import Halo, halo, halo_collectives, halos_too_far

__all__ = [
    "PoolBackPropOperation",
    "PoolOperation",
    "pool_backprop",
    "pool_fn",
    "pool_tensor_1d",
    "stride_tensor_1d",
]


class _Pool(NamedTuple):
    rank: int
    is_max: bool


_FUNCTIONS = {
    _Pool(2, is_max=True): tf.nn.max_pool2d,
    _Pool(3, is_max=True): tf.nn.max_pool3d,
    _Pool(2, is_max=False): tf.nn.avg_pool2d,
    _Pool(3, is_max=False): tf.nn.avg_pool3d,
}
_POOLS = {f"{'MAX' if pool.is_max else 'AVG'}_{pool.rank}D": pool for pool in _FUNCTIONS}
# TensorFlow pools volumes of these dtypes on every device, and planes of all dtypes.
_VOLUME_DTYPES = (tf.float32, tf.bfloat16)


def pool_fn(pool_fn_string: str) -> Callable:
    """Returns a TensorFlow function that pools over the dimensions before the last.

    Args:
      pool_fn_string: "MAX_2D", "MAX_3D", "AVG_2D" or "AVG_3D".

    Returns:
      A function of a tf.Tensor [batch..., spatial..., channels] with any number of batch
      dimensions, of `ksize` and `strides`, with a number for each spatial dimension, and of
      `padding`, "VALID" by default.

    Raises:
      ValueError: `pool_fn_string` is unknown.
    """
    check_choice("pool_fn", "pool_fn_string", pool_fn_string, _POOLS)
    return functools.partial(_pooled, _POOLS[pool_fn_string])


def _pooled(
    pool: _Pool, x: tf.Tensor, ksize: Sequence[int], strides: Sequence[int], padding: str = "VALID"
) -> tf.Tensor:
    *batch, channels = x.shape.as_list()
    batch, image = batch[: -pool.rank], batch[-pool.rank :]
    if pool.rank == 2 or x.dtype in _VOLUME_DTYPES:
        # TensorFlow's pooling takes one batch dimension.
        flat = tf.reshape(x, [list_product(batch), *image, channels])
        y = _FUNCTIONS[pool](flat, list(ksize), list(strides), padding)
        return tf.reshape(y, batch + y.shape.as_list()[1:])
    # Windows of all planes are alike, so a maximum of maxima, or mean of means, is that of all.
    # First within the planes, then across them.
    plane = pool._replace(rank=2)
    y = _pooled(plane, x, ksize[1:], strides[1:], padding)
    depth, height, width = y.shape.as_list()[-4:-1]
    # [depth, height * width] is a plane, in which a window of [k, 1] pools along depth alone.
    y = tf.reshape(y, [*batch, depth, height * width, channels])
    y = _pooled(plane, y, [ksize[0], 1], [strides[0], 1], padding)
    return tf.reshape(y, [*batch, y.shape.as_list()[-3], height, width, channels])


def _check_window(
    what: str, pool_fn_string: str, x: Tensor, ksize: Sequence[int], strides: Sequence[int]
) -> tuple[int, ...]:
    """Checks the arguments of a pooling of `x`; returns its window as a tuple.

    Raises:
      ValueError: the window, the strides, or the shape or dtype of `x` are invalid.
    """
    check_choice(what, "pool_fn_string", pool_fn_string, _POOLS)
    rank, is_max = _POOLS[pool_fn_string]
    described = f"{x.name} {x.shape} {x.dtype.name}"
    if not is_max and not x.dtype.is_floating:
        raise ValueError(
            f"{what}: {pool_fn_string} averages floating tensors, not {described}; use mtf.to_float"
        )
    for argument, sizes in (("ksize", ksize), ("strides", strides)):
        fits = isinstance(sizes, (list, tuple)) and len(sizes) == rank
        if not fits or not all(map(is_whole, sizes)):
            raise ValueError(
                f"{what}: {argument} of {pool_fn_string} must be {rank} whole numbers from 1, "
                f"one for each spatial dimension, but is {sizes!r}"
            )
    # Gradients rely on it that each element is in one window at most.
    if tuple(ksize) != tuple(strides):
        raise ValueError(
            f"{what}: windows must neither overlap nor leave gaps, but ksize is {tuple(ksize)} "
            f"and strides is {tuple(strides)}. Give both the same value"
        )
    if len(x.shape) < rank + 1:
        raise ValueError(
            f"{what}: {pool_fn_string} takes [batch..., {rank} spatial dimensions, channels], "
            f"but {described} has {len(x.shape)} dimensions"
        )
    # Without a whole window the result would be empty.
    small = [d for d, k in zip(x.shape[-rank - 1 : -1], ksize) if d.size < k]
    if small:
        raise ValueError(
            f"{what}: ksize {tuple(ksize)} is larger than {dims_text(small)} of {described}. "
            "Choose a smaller window"
        )
    return tuple(ksize)


def _pooled_shape(shape: Shape, ksize: Sequence[int]) -> Shape:
    first = len(shape) - len(ksize) - 1
    pooled = [Dimension(d.name, d.size // k) for d, k in zip(shape[first:-1], ksize)]
    return Shape(shape[:first] + pooled + shape[-1:])


class _Pooling(Operation):
    """Pooling and its gradient: what windows reach over where pooled dimensions are split."""

    takes_padding = True
    costs_by = ("_pool_fn_string", "_ksize")

    _pool_fn_string: str
    _ksize: tuple[int, ...]
    _images: tuple[Tensor, Tensor]  # the one that is pooled, and the one that has been
    _times_moved = 1  # how often halos are exchanged

    def _unsplittable(self) -> list[str]:
        # A search of layouts leaves these whole, as the classic's does.
        return [d.name for d in self._spatial(0)]

    def _spatial(self, which: int) -> list[Dimension]:
        return self._images[which].shape[-len(self._ksize) - 1 : -1]

    def needs_whole(self, mesh_impl: MeshImpl) -> Collection[str]:
        """Returns the pooled dimensions of which windows reach beyond a neighbor's slice."""
        image = self._images[0].shape
        return {image[h.tensor_axis].name for h in halos_too_far(mesh_impl, self._halos(mesh_impl))}

    def _halos(self, mesh_impl: MeshImpl) -> list[Halo]:
        """Returns what windows reach over, for each pooled dimension."""
        first = len(self._images[0].shape) - len(self._ksize) - 1
        return [
            halo(mesh_impl, first + i, wide, narrow, k, k)
            for i, (wide, narrow, k) in enumerate(
                zip(self._spatial(0), self._spatial(1), self._ksize)
            )
        ]

    def _moving_halos(self, mesh_impl: MeshImpl) -> list[Halo]:
        # Where nothing is split, the end that windows leave out may stay: pooling drops it.
        halos = self._halos(mesh_impl)
        return [h for h in halos if h.mesh_axis is not None and not h.is_local]

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """Its work and bytes, and halos of split images."""
        image, halos = self._images[0], self._moving_halos(mesh_impl)
        moved = halo_collectives(halos, mesh_impl, image.shape, image.dtype)
        return super().cost(mesh_impl) + Cost(collectives=moved * self._times_moved)


class PoolOperation(_Pooling):
    """The maximum or the mean of each window of an image.

    Windows do not overlap. An incomplete window at the end of a spatial dimension is dropped, as
    with TensorFlow's "VALID" padding.
    """

    def __init__(
        self,
        x: Tensor,
        ksize: Sequence[int],
        strides: Sequence[int],
        pool_fn_string: str,
        name: Optional[str] = None,
    ):
        """Creates the operation.

        Args:
          x: a Tensor [batch..., spatial..., channels]; any number of batch dimensions.
          ksize: window sizes, one for each of the 2 or 3 spatial dimensions.
          strides: the same as `ksize`.
          pool_fn_string: "MAX_2D", "MAX_3D", "AVG_2D" or "AVG_3D".
          name: a string or None.

        Raises:
          ValueError: `pool_fn_string` is unknown, the strides differ from `ksize`, `x` has too few
            dimensions, the window is larger than the image, or it is a mean of integers.
        """
        what = name or type(self).__name__
        self._check_inputs([x], what)
        self._ksize = _check_window(what, pool_fn_string, x, ksize, strides)
        spatial = x.shape[-len(self._ksize) - 1 : -1]
        if rest := [d for d, k in zip(spatial, self._ksize) if d.size % k]:
            slip(
                f"{what}: windows of {self._ksize} leave out the end of {dims_text(rest)} of "
                f"{x.name} {x.shape}. Lengthen it with mtf.pad, or cut it with mtf.slice",
                key=f"rest of {dims_text(rest)} by {self._ksize}",
            )
        self._strides = self._ksize
        self._pool_fn_string = pool_fn_string
        super().__init__([x], name=name or "pool")
        self._outputs = [Tensor(self, _pooled_shape(x.shape, self._ksize), x.dtype)]
        self._images = x, self._outputs[0]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Returns the pooling operation's backpropagation."""
        x, y, dy = self._inputs[0], self._outputs[0], gradient_of_output(grad_ys)
        return [pool_backprop(x, y, dy, self._ksize, self._strides, self._pool_fn_string)]

    def lower(self, lowering: mtf.Lowering) -> None:
        """Pools slice by slice; the rest of a window at the end of a slice comes from the next."""
        mesh_impl = lowering.mesh_impl(self)
        lowering.count_collectives(self, "halo")
        fn, ksize = pool_fn(self._pool_fn_string), self._ksize
        value = lowering.tensors[self._inputs[0]]
        for h in self._moving_halos(mesh_impl):
            value = h.gathered(mesh_impl, value.to_laid_out_tensor())
        value = mesh_impl.slicewise(lambda x: fn(x, ksize, ksize), value)
        lowering.set_tensor_lowering(self.outputs[0], value)


class PoolBackPropOperation(_Pooling):
    """The gradient of a pooling with respect to its input.

    For a maximum, every element that equals it gets the whole gradient of its window.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        dy: Tensor,
        ksize: Sequence[int],
        strides: Sequence[int],
        pool_fn_string: str,
        name: Optional[str] = None,
    ):
        """Creates the operation.

        Args:
          x: a Tensor [batch..., spatial..., channels], the input of the pooling.
          y: a Tensor [batch..., smaller spatial..., channels], its output.
          dy: a Tensor of the shape of `y`, the gradient of the output.
          ksize: window sizes, one for each of the 2 or 3 spatial dimensions.
          strides: the same as `ksize`.
          pool_fn_string: "MAX_2D", "MAX_3D", "AVG_2D" or "AVG_3D".
          name: a string or None.

        Raises:
          ValueError: as for PoolOperation, or the shapes or dtypes do not match.
        """
        what = name or type(self).__name__
        self._check_inputs([x, y, dy], what)
        check_dtypes(what, [x, y, dy])
        self._ksize = _check_window(what, pool_fn_string, x, ksize, strides)
        pooled = _pooled_shape(x.shape, self._ksize)
        if y.shape != pooled or dy.shape != pooled:
            raise ValueError(
                f"{what}: pooling {x.name} {x.shape} by ksize {self._ksize} gives {pooled}, but "
                f"y and dy are {tensors_text([y, dy])}"
            )
        self._pool_fn_string = pool_fn_string
        super().__init__([x, y, dy], name=name or "pool_backprop")
        self._outputs = [Tensor(self, x.shape, x.dtype)]
        self._images = x, y
        # Of a maximum, the image is gathered, and its gradient scattered; of a mean, the latter.
        self._times_moved = 2 if _POOLS[pool_fn_string].is_max else 1

    def filling(self, x: Tensor) -> tuple[Collection[Dimension], float]:
        """Returns the pooled dimensions of dy: what windows at the end left out gets nothing."""
        return (self._spatial(1) if x is self._inputs[2] else ()), 0

    def gradient(self, unused_grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Returns the gradient with respect to dy; that of maxima goes to the elements chosen."""
        # Linear in dy: each window gathers the gradients of the elements that dy was sent to.
        x, y, dy = self._inputs
        ksize, reached = self._ksize, gradient_of_output(unused_grad_ys)
        mean = self._pool_fn_string.replace("MAX", "AVG")
        # A mean gives each element the same share of dy, so its transpose is the mean itself.
        if mean == self._pool_fn_string:
            return [None, None, PoolOperation(reached, ksize, ksize, mean).outputs[0]]
        # Of ones, it is 1 at the elements that equal the maximum of their window, and 0 elsewhere.
        is_maximum = pool_backprop(x, y, mtf.ones_like(dy), ksize, ksize, self._pool_fn_string)
        masked = mtf.multiply(reached, is_maximum)
        gathered = PoolOperation(masked, ksize, ksize, mean).outputs[0]
        # There is no pooling by sums, but a sum is a mean times the number of elements.
        return [None, None, mtf.multiply(gathered, list_product(ksize))]

    def lower(self, lowering: mtf.Lowering) -> None:
        """Spreads dy over each window, or gives it to the window's maximum."""
        mesh_impl = lowering.mesh_impl(self)
        lowering.count_collectives(self, "halo")
        ksize, halos = self._ksize, self._moving_halos(mesh_impl)
        x, y, dy = (lowering.tensors[t] for t in self.inputs)
        if _POOLS[self._pool_fn_string].is_max:
            for h in halos:
                x = h.gathered(mesh_impl, x.to_laid_out_tensor())
            value = mesh_impl.slicewise(lambda *xs: _max_backprop(ksize, *xs), x, y, dy)
        else:
            sizes = mesh_impl.slice_shape(self.outputs[0].shape)
            for h in halos:
                sizes[h.tensor_axis] = h.width
            # y is the mean of n elements, so each of them gets dy / n.
            window = list_product(ksize)
            value = mesh_impl.slicewise(lambda d: _spread(d / window, ksize, sizes), dy)
        for h in reversed(halos):
            value = h.scattered(mesh_impl, value)
        lowering.set_tensor_lowering(self.outputs[0], value)


def _max_backprop(ksize: Sequence[int], x: tf.Tensor, y: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
    sizes = x.shape.as_list()
    # All elements that equal the maximum, unlike in TensorFlow's gradient, which takes one.
    is_maximum = tf.equal(x, _spread(y, ksize, sizes))
    # Outside of the windows the maximum is padded with 0, which may be equal to x; but so is dy.
    return tf.where_v2(is_maximum, _spread(dy, ksize, sizes), tf.zeros([], dy.dtype))


def _spread(y: tf.Tensor, ksize: Sequence[int], sizes: Sequence[int]) -> tf.Tensor:
    """Repeats each element of a slice over its window; zeros outside of windows.

    Args:
      y: a tf.Tensor [batch..., spatial..., channels].
      ksize: window sizes.
      sizes: sizes of the result.
    """
    rank = len(ksize)
    batch, channels = list_product(sizes[: -rank - 1]), sizes[-1]
    counts = y.shape.as_list()[-rank - 1 : -1]
    # The first spatial dimension is merged with the batch: TensorFlow tiles up to 7 dimensions.
    apart = [size for count in counts for size in (count, 1)]
    apart[0] *= batch
    repeats = [size for k in ksize for size in (1, k)]
    # [count, 1] tiled by [1, k], then merged, has each element k times in a row.
    spread = tf.tile(tf.reshape(y, [*apart, channels]), [*repeats, 1])
    covered = [count * k for count, k in zip(counts, ksize)]
    # Windows may leave out the end of the image, which is filled with 0.
    rest = [[0, n - c] for n, c in zip(sizes[-rank - 1 : -1], covered)]
    spread = tf.reshape(spread, [batch, *covered, channels])
    if any(after for _, after in rest):
        spread = tf.pad(spread, [[0, 0], *rest, [0, 0]])
    return tf.reshape(spread, sizes)


def pool_backprop(
    x: Tensor,
    y: Tensor,
    dy: Tensor,
    ksize: Sequence[int],
    strides: Sequence[int],
    pool_fn_string: str,
    name: Optional[str] = None,
) -> Tensor:
    """Returns the gradient with respect to a pooling's input; see `PoolBackPropOperation`."""
    return PoolBackPropOperation(x, y, dy, ksize, strides, pool_fn_string, name=name).outputs[0]


def _grouped(what: str, tensor: Tensor, pool_dim: Dimension, pool_size: int) -> tuple:
    """Returns `tensor` with `pool_dim` split into groups, and the dimension within a group."""
    if pool_size < 1 or pool_dim.size % pool_size:
        raise ValueError(
            f"{what}: {dims_text([pool_dim])} of {tensor.name} {tensor.shape} cannot be cut into "
            f"groups of pool_size={pool_size}. Choose a divisor of {pool_dim.size}, or lengthen "
            "the tensor with mtf.pad"
        )
    low = Dimension("_low", pool_size)
    high = Dimension(pool_dim.name, pool_dim.size // pool_size)
    # A reshape is row-major: the neighbors of a group differ in the last of the two dimensions.
    return mtf.replace_dimensions(tensor, pool_dim, [high, low]), low


@leaves_no_node
def pool_tensor_1d(
    tensor: Tensor, pool_dim: Dimension, reduce_fn: Callable = reduce_mean, pool_size: int = 2
) -> Tensor:
    """Reduces each group of adjacent elements along a dimension to one element.

    >>> d = mtf.Dimension("d", 4)
    >>> x = mtf.range(mesh, d, tf.float32)
    >>> print(mtf.pool_tensor_1d(x, d, pool_size=2).numpy())
    [0.5 2.5]

    Args:
      tensor: a Tensor.
      pool_dim: a Dimension of it.
      reduce_fn: a function with an argument `reduced_dim`, such as mtf.reduce_max.
      pool_size: number of elements of a group; it must divide the size of `pool_dim`.

    Raises:
      ValueError: it does not.
    """
    grouped, low = _grouped("pool_tensor_1d", tensor, pool_dim, pool_size)
    return reduce_fn(grouped, reduced_dim=low)


@leaves_no_node
def stride_tensor_1d(tensor: Tensor, pool_dim: Dimension, pool_size: int = 2) -> Tensor:
    """Returns the first element of each group of adjacent elements along a dimension.

    >>> d = mtf.Dimension("d", 4)
    >>> x = mtf.range(mesh, d, tf.float32)
    >>> print(mtf.stride_tensor_1d(x, d, pool_size=2).numpy())
    [0. 2.]

    Args:
      tensor: a Tensor.
      pool_dim: a Dimension of it.
      pool_size: number of elements of a group; it must divide the size of `pool_dim`.

    Raises:
      ValueError: it does not.
    """
    grouped, low = _grouped("stride_tensor_1d", tensor, pool_dim, pool_size)
    return reduce_first(grouped, reduced_dim=low)
