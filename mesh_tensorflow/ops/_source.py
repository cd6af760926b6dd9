"""Operations without mesh inputs: constants, ranges, and imports from TensorFlow."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Optional, Union

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.errors import WrongTypeError, did_you_mean, dims_text, explained
from mesh_tensorflow._core.graph import Mesh, leaves_no_node
from mesh_tensorflow._core.operation import ArrayLike, LaidOutLike, Operation, Tensor, check_tensors
from mesh_tensorflow._core.shape import (
    Dimension,
    DimensionLike,
    Shape,
    ShapeLike,
    anonymous_shape,
    convert_to_shape,
)
from mesh_tensorflow._mesh.mesh_impl import HasSlices, LazyLaidOutTensor, MeshImpl, slices_of
from mesh_tensorflow.ops._variable import imported_dtype

__all__ = [
    "Constant",
    "ImportLaidOutTensorOperation",
    "ImportOperation",
    "RangeOperation",
    "constant",
    "import_fully_replicated",
    "import_laid_out_tensor",
    "import_tf_tensor",
    "mtf_range",
    "ones",
    "ones_like",
    "zeros",
    "zeros_like",
]


class Constant(Operation):
    """A Tensor filled with one value."""

    works_by_name = True
    takes_padding = True
    costs_nothing = True  # what uses the value makes it

    def __init__(
        self,
        mesh: Mesh,
        value: Union[float, tf.Tensor],
        shape: Shape,
        dtype: tf.DType,
        name: Optional[str] = None,
    ):
        """Creates the operation.

        Args:
          mesh: a Mesh.
          value: a number.
          shape: a Shape.
          dtype: a dtype.
          name: a string or None.
        """
        dtype = tf.as_dtype(dtype)
        if value is None or isinstance(value, (str, bytes)):
            raise WrongTypeError(f"{name or 'constant'}: {value!r} is no number")
        if isinstance(value, complex) and not dtype.is_complex:
            raise WrongTypeError(
                f"{name or 'constant'}: {value!r} is complex, and the dtype is {dtype.name}; "
                "write dtype=tf.complex64"
            )
        if dtype.is_integer and isinstance(value, (float, np.floating)):
            raise WrongTypeError(
                f"{name or 'constant'}: {value!r} is no integer, and the dtype is {dtype.name}; "
                "write dtype=tf.float32, or an int"
            )
        super().__init__([], mesh=mesh, name=name or "constant")
        # TensorFlow takes no 0 or 1 for a boolean, which mtf.zeros and mtf.ones fill with.
        self._value = bool(value) if dtype.is_bool and not tf.is_tensor(value) else value
        self._outputs = [Tensor(self, shape, dtype)]

    def lower(self, lowering: mtf.Lowering) -> None:
        """Fills slices at each use, which is cheaper than keeping them."""
        mesh_impl = lowering.mesh_impl(self)
        y = self.outputs[0]
        sizes = mesh_impl.slice_shape(y.shape)

        def fill() -> tf.Tensor:
            if tf.is_tensor(self._value):
                # tf.constant takes numbers of Python and NumPy, and no tensors.
                return tf.fill(sizes, tf.cast(self._value, y.dtype))
            return tf.constant(self._value, dtype=y.dtype, shape=sizes)

        lazy = LazyLaidOutTensor(lambda: mesh_impl.slicewise(fill), sizes)
        lowering.set_tensor_lowering(y, lazy)

    @property
    def takes_memory(self) -> bool:
        """False: it is created where it is used."""
        return False


def _constant_array(
    mesh: Mesh, value: ArrayLike, sizes: tf.TensorShape, shape: Shape, dtype: tf.DType
) -> Tensor:
    if not sizes.is_compatible_with(shape.to_integer_list):
        raise ValueError(
            f"constant: one number, or an array of the sizes of {shape}, not one of "
            f"{tuple(sizes.as_list())}; "
            "mtf.import_tf_tensor and mtf.broadcast make a Tensor of smaller ones"
        )
    if dtype.is_complex and not tf.is_tensor(value):
        value = np.asarray(value)  # lists may have both real and complex numbers
    # The dtype was asked for by name, so it is kept in any precision in force.
    value = tf.cast(value, dtype) if tf.is_tensor(value) else tf.constant(value, dtype)
    return import_unchanged(mesh, value, shape, name="constant")


def number_in(array: Any) -> Any:
    """Returns the number in an array, list or tf.Tensor with one element."""
    return tf.reshape(array, []) if tf.is_tensor(array) else np.reshape(array, [])[()]


def constant(
    mesh: Mesh, value: ArrayLike, shape: Optional[ShapeLike] = None, dtype: tf.DType = tf.float32
) -> Tensor:
    """Returns a Tensor filled with one value.

    >>> print(mtf.constant(mesh, 2.0, "d:3").numpy())
    [2. 2. 2.]
    >>> print(mtf.constant(mesh, [[1, 2], [3, 4]], "row:2,col:2", tf.int32).numpy())
    [[1 2]
     [3 4]]

    Args:
      mesh: a Mesh.
      value: a number, also as an array with one element; or an array with the sizes of `shape`,
        which is imported.
      shape: a Shape; a scalar if None.
      dtype: a dtype.

    Raises:
      ValueError: the array has other sizes.
    """
    shape = Shape([]) if shape is None else convert_to_shape(shape)
    if not isinstance(value, (int, float)):
        array: Any = value
        sizes = array.shape if tf.is_tensor(array) else tf.TensorShape(np.shape(array))
        fits = sizes.is_compatible_with(shape.to_integer_list)
        if sizes.rank and sizes.num_elements() == 1 and not fits:
            value = number_in(array)
        elif sizes.rank != 0:
            return _constant_array(mesh, value, sizes, shape, tf.as_dtype(dtype))
    return Constant(mesh, value, shape, dtype).outputs[0]


def zeros(mesh: Mesh, shape: ShapeLike, dtype: tf.DType = tf.float32) -> Tensor:
    """Returns a Tensor of zeros; see `constant`.

    >>> print(mtf.zeros(mesh, "row:2,col:2").numpy())
    [[0. 0.]
     [0. 0.]]
    """
    return constant(mesh, 0, shape=shape, dtype=dtype)


def zeros_like(t: Tensor) -> Tensor:
    """Returns a Tensor of zeros with the shape and dtype of `t`.

    >>> x = mtf.constant(mesh, 5, "d:3", tf.int32)
    >>> print(mtf.zeros_like(x).numpy())
    [0 0 0]
    """
    return zeros(t.mesh, t.shape, dtype=t.dtype)


def or_zeros(grads: Sequence[Optional[Tensor]], xs: Sequence[Tensor]) -> list[Tensor]:
    """Returns the gradients of Tensors, with zeros for those that are None."""
    return [zeros_like(x) if dx is None else dx for dx, x in zip(grads, xs)]


def ones(mesh: Mesh, shape: ShapeLike, dtype: tf.DType = tf.float32) -> Tensor:
    """Returns a Tensor of ones; see `constant`.

    >>> print(mtf.ones(mesh, "d:3").numpy())
    [1. 1. 1.]
    """
    return constant(mesh, 1, shape=shape, dtype=dtype)


def ones_like(t: Tensor) -> Tensor:
    """Returns a Tensor of ones with the shape and dtype of `t`.

    >>> x = mtf.constant(mesh, 5, "d:3", tf.int32)
    >>> print(mtf.ones_like(x).numpy())
    [1 1 1]
    """
    return ones(t.mesh, t.shape, dtype=t.dtype)


class RangeOperation(Operation):
    """The indices of a dimension, from 0."""

    takes_padding = True

    def __init__(self, mesh: Mesh, dim: Dimension, dtype: tf.DType, name: Optional[str] = None):
        """Creates the operation; see `mtf_range`."""
        shape = Shape([dim])
        super().__init__([], mesh=mesh, name=name or "range")
        # That of the Shape, as a plain pair of a name and a size may have been given.
        self._dim = shape.dims[0]
        self._outputs = [Tensor(self, shape, tf.as_dtype(dtype))]

    def lower(self, lowering: mtf.Lowering) -> None:
        """Makes each slice of the range from the slice's first position."""
        mesh_impl = lowering.mesh_impl(self)
        y = self.outputs[0]
        size = mesh_impl.slice_shape(y.shape)[0]

        def make(*coordinate: tf.Tensor) -> tf.Tensor:
            values = tf.range(size)
            if mesh_impl.is_compiled_by_xla:
                # Before XLA compiles, TensorFlow would compute all that depends on indices
                # alone, such as masks, and write each result into the program as often as it is
                # read: of 30 layers and 512 positions, 80 MB.
                [values] = gen_xla_ops.xla_optimization_barrier([values])
            for part in coordinate:
                # Element i of part p is p * size + i, added in int32 and cast after that: so narrow
                # floats are rounded as those of a whole range.
                values = values + part * size
            return tf.cast(values, y.dtype)

        self._lower_slices(lowering, make, *coordinate_along(mesh_impl, self._dim))


def mtf_range(mesh: Mesh, dim: Dimension, dtype: tf.DType, name: Optional[str] = None) -> Tensor:
    """Returns 0, 1, ..., size - 1 along a dimension; exported as mtf.range.

    >>> print(mtf.range(mesh, mtf.Dimension("d", 4), tf.int32).numpy())
    [0 1 2 3]

    Args:
      mesh: a Mesh.
      dim: a Dimension.
      dtype: a dtype.
      name: a string or None.
    """
    return RangeOperation(mesh, dim, dtype, name=name).outputs[0]


class ImportOperation(Operation):
    """Imports a tf.Tensor, sliced by the layout."""

    takes_padding = True

    def __init__(self, mesh: Mesh, tf_tensor: tf.Tensor, shape: Shape, name: Optional[str] = None):
        """Creates the operation.

        Args:
          mesh: a Mesh.
          tf_tensor: a tf.Tensor with the sizes of `shape`.
          shape: a Shape.
          name: a string or None.

        Raises:
          ValueError: the sizes differ.
        """
        # Sizes that are not known yet pass here: `lower` has them checked when the program runs.
        if not tf_tensor.shape.is_compatible_with(shape.to_integer_list):
            raise ValueError(
                f"{name or 'import'}: the tf.Tensor has shape {tf_tensor.shape}, which does not "
                f"fit {shape}. Give a Dimension of the right size for each of its axes"
            )
        super().__init__([], mesh=mesh, name=name or "import")
        self._tf_tensor = tf_tensor
        self._outputs = [Tensor(self, shape, tf_tensor.dtype)]

    def lower(self, lowering: mtf.Lowering) -> None:
        """Cuts the tf.Tensor into slices."""
        y = self.outputs[0]
        tf_tensor = _of_sizes(self.name, self._tf_tensor, y.shape.to_integer_list, y.shape)
        value = lowering.mesh_impl(self).import_tf_tensor(y, tf_tensor)
        lowering.set_tensor_lowering(y, value)


def is_constant(op: Operation) -> bool:
    """Returns whether an operation without inputs has the same results in each run of a graph.

    Args:
      op: an Operation.
    """
    if isinstance(op, ImportOperation):
        x = op._tf_tensor
        return tf.is_tensor(x) and hasattr(x, "graph") and x.op.type == "Const"
    if isinstance(op, Constant):
        return not tf.is_tensor(op._value)
    return isinstance(op, RangeOperation)


def _of_sizes(what: str, x: tf.Tensor, sizes: Sequence[int], shape: Shape) -> tf.Tensor:
    """Returns a tf.Tensor of known sizes; checked when it runs if they are not known yet.

    Args:
      what: what the tensor is, for the message.
      x: a tf.Tensor.
      sizes: the sizes that it must have.
      shape: the Shape that they follow from, for the message.
    """
    if not tf.is_tensor(x) or x.shape.is_fully_defined():
        return x
    own = tf.shape(x)
    # Equal numbers of sizes first: one size would be compared with each of several.
    fits = tf.logical_and(
        tf.equal(tf.size(own), len(sizes)),
        tf.reduce_all(tf.raw_ops.Equal(x=own, y=sizes, incompatible_shape_error=False)),
    )
    must = "" if list(sizes) == shape.to_integer_list else f" in slices of {list(sizes)}"
    message = f"{what}: {x.name} must fit {shape}{must}; its sizes are"
    with tf.control_dependencies([tf.Assert(fits, [message, own])]):
        checked = tf.identity(x)
    # Not tf.ensure_shape, which may run before the assertion, and does not know the operation.
    checked.set_shape(sizes)
    return checked


def import_tf_tensor(
    mesh: Mesh, tf_tensor: ArrayLike, shape: Optional[ShapeLike] = None, name: Optional[str] = None
) -> Tensor:
    """Returns a Tensor with the value of a tf.Tensor, sliced by the layout.

    >>> x = mtf.import_tf_tensor(mesh, np.eye(2, dtype=np.float32), "row:2,col:2")
    >>> print(x.shape, x.dtype.name)
    Shape[row=2, col=2] float32

    Args:
      mesh: a Mesh.
      tf_tensor: a tf.Tensor, or an object that converts to one. Sizes that are not known yet, such
        as that of a batch, are checked when it runs.
      shape: a Shape; anonymous dimensions if None.
      name: a string or None.

    Raises:
      ValueError: the sizes do not fit `shape`, or are not known and there is none.
    """
    try:
        tf_tensor = tf.convert_to_tensor(tf_tensor)
    except (TypeError, ValueError) as e:
        text, kind = repr(tf_tensor), type(tf_tensor).__name__
        raise ValueError(
            f"import_tf_tensor: {text if len(text) < 80 else text[:80] + '...'} is a {kind} "
            "from which no tf.Tensor can be made. Pass a tf.Tensor, an array, a number, or lists "
            f"whose rows are of one length: {e}"
        ) from e
    dtype = imported_dtype(tf_tensor.dtype)
    if dtype != tf_tensor.dtype:
        tf_tensor = tf.cast(tf_tensor, dtype)
    return import_unchanged(mesh, tf_tensor, shape, name)


def import_unchanged(
    mesh: Mesh, tf_tensor: tf.Tensor, shape: Optional[ShapeLike], name: Optional[str] = None
) -> Tensor:
    """Returns a Tensor that has the dtype of a tf.Tensor in any precision in force."""
    if shape is None:
        if not tf_tensor.shape.is_fully_defined():
            raise ValueError(
                f"import_tf_tensor: the tf.Tensor has shape {tf_tensor.shape}, whose sizes are not "
                "all known before it runs: give its shape, mtf.import_tf_tensor(mesh, x, shape)"
            )
        # These names are replaced; without them, equal sizes would repeat a dimension.
        sizes = enumerate(tf_tensor.shape.as_list())
        shape = anonymous_shape([(f"d{i}", size) for i, size in sizes])
    return ImportOperation(mesh, tf_tensor, convert_to_shape(shape), name=name).outputs[0]


@leaves_no_node
def import_fully_replicated(
    mesh: Mesh, tf_tensor: ArrayLike, shape: ShapeLike, name: Optional[str] = None
) -> Tensor:
    """Returns a Tensor with the value of a tf.Tensor, imported on each processor, then sliced.

    >>> x = mtf.import_fully_replicated(mesh, np.arange(4), "d:4")
    >>> print(x.shape, x.numpy())
    Shape[d=4] [0 1 2 3]

    Args:
      mesh: a Mesh.
      tf_tensor: a tf.Tensor, or an object that converts to one.
      shape: a Shape.
      name: a string or None.
    """
    # No layout splits anonymous dimensions, so each processor cuts its part of its own copy.
    whole = import_tf_tensor(mesh, tf_tensor, anonymous_shape(shape), name)
    return mtf.reshape(whole, shape)


class ImportLaidOutTensorOperation(Operation):
    """Imports existing slices."""

    takes_padding = True

    def __init__(
        self,
        mesh: Mesh,
        laid_out_tensor: Union[LaidOutLike, HasSlices],
        shape: ShapeLike,
        name: Optional[str] = None,
    ):
        """Creates the operation.

        Args:
          mesh: a Mesh.
          laid_out_tensor: a LaidOutTensor in the layout of `shape`, or an object with the attribute
            `tensor_list`, its slices.
          shape: a Shape.
          name: a string or None.
        """
        super().__init__([], mesh=mesh, name=name or "import")
        self._laid_out_tensor = laid_out_tensor
        # A slice may be a reference variable of TensorFlow 1, whose own dtype is none of values.
        dtype = slices_of(laid_out_tensor)[0].dtype
        self._outputs = [Tensor(self, convert_to_shape(shape), dtype.base_dtype)]

    def _unsplittable(self) -> list[str]:
        """Returns all dimension names: the slices are in one layout, which cannot be changed."""
        return self._outputs[0].shape.dimension_names

    def needs_whole(self, mesh_impl: MeshImpl) -> Collection[str]:
        """Returns nothing: the layout may be any; the Lowering checks the shapes of the slices."""
        return ()

    def lower(self, lowering: mtf.Lowering) -> None:
        """Uses the slices that it was given."""
        y, laid_out = self.outputs[0], self._laid_out_tensor
        # The user cut slices for the mesh that was asked for; the executed one may have fewer.
        mesh_impl, slices = lowering.requested_impl(self), slices_of(laid_out)
        if any(tf.is_tensor(s) and not s.shape.is_fully_defined() for s in slices):
            sizes = mesh_impl.slice_shape(y.shape)
            known = [_of_sizes(self.name, s, sizes, y.shape) for s in slices]
            laid_out = mesh_impl.LaidOutTensor.from_tensor_list(known)
        lowering.set_tensor_lowering(y, lowering.import_slices(y, laid_out))


def import_laid_out_tensor(
    mesh: Mesh,
    laid_out_tensor: Union[LaidOutLike, HasSlices],
    shape: ShapeLike,
    name: Optional[str] = None,
) -> Tensor:
    """Returns a Tensor with the value of slices that are in its layout already.

    >>> impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:2", "d:x", ["", ""])
    >>> slices = impl.LaidOutTensor.from_tensor_list([tf.constant([1, 2]), tf.constant([3, 4])])
    >>> x = mtf.import_laid_out_tensor(mesh, slices, "d:4")
    >>> lowering = mtf.Lowering(graph, {mesh: impl})
    >>> print(lowering.export_to_tf_tensor(x).numpy())
    [1 2 3 4]

    Args:
      mesh: a Mesh.
      laid_out_tensor: a LaidOutTensor of the mesh implementation.
      shape: a Shape.
      name: a string or None.
    """
    return ImportLaidOutTensorOperation(mesh, laid_out_tensor, shape, name=name).outputs[0]


def coordinate_along(mesh_impl: MeshImpl, dim: Dimension) -> list[Any]:
    """Returns [the laid-out number of each processor's part of a dimension]; [] if it is whole."""
    # A list, to be passed on with a star: where the dimension is whole, there is no argument.
    axis = mesh_impl.splitting_axis(dim)
    return [] if axis is None else [mesh_impl.laid_out_pcoord(axis)]


def scalar_indices(mesh: Mesh, value: Union[Tensor, int, tf.Tensor]) -> Tensor:
    """Returns a number as an int32 scalar Tensor; `value` itself if it is a Tensor."""
    return value if isinstance(value, Tensor) else constant(mesh, value, dtype=tf.int32)


# For functions over a dimension, where other libraries count axes.
over_a_dimension = explained(
    dict.fromkeys(("axis", "dim"), "axes have names; give reduced_dim, a Dimension or a name")
    | dict.fromkeys(("keepdims", "keepdim"), "operations broadcast by name, so that none is kept")
)


def check_dimension(what: str, x: Tensor, dim: DimensionLike) -> Dimension:
    """Checks that `x` has dimension `dim`, and returns it.

    Raises:
      ValueError: it does not.
      WrongTypeError: `x` is not a Tensor, or `dim` is neither a Dimension nor a name.
    """
    dim = given_dimension(what, x, dim)
    if dim not in x.shape:
        raise ValueError(
            f"{what}: {x.name} {x.shape} has no dimension {dims_text([dim])}; "
            "both the name and the size must agree"
        )
    return dim


def given_dimension(what: str, x: Tensor, dim: DimensionLike) -> Dimension:
    """Returns `dim` as a Dimension, whether `x` has it or not; that of `x` of a name.

    Raises:
      ValueError: it is a name, and `x` has no dimension of that name.
      WrongTypeError: `x` is not a Tensor, or `dim` is neither a Dimension nor a name.
    """
    check_tensors(what, [x])
    if isinstance(dim, str):
        names = [d.name for d in x.shape]
        if dim not in names:
            raise ValueError(
                f"{what}: {x.name} {x.shape} has no dimension {dim!r}{did_you_mean(dim, names)}"
            )
        return x.shape.get_dim_by_name(dim)
    # A Dimension is a tuple, and a plain pair of a name and a size may stand for one.
    if not isinstance(dim, tuple):
        raise WrongTypeError(
            f"{what}: {dim!r} is neither the name of a dimension nor an mtf.Dimension; {x.name} "
            f"has {x.shape}"
        )
    return Dimension(*dim)
