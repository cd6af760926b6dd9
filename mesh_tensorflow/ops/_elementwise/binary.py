"""Operations of two values, whose shapes broadcast; and of a value and a number."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.errors import WrongTypeError, tensors_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow._core.operation import (
    Operand,
    Operation,
    Partial,
    PartialSums,
    PendingSums,
    Tensor,
    check_booleans,
    check_numbers,
    check_real,
    check_tensors,
    gradient_of_output,
)
from mesh_tensorflow._core.shape import (
    Shape,
    ShapeLike,
    broadcast_shape,
    check_sizes_of_names,
    convert_to_shape,
)
from mesh_tensorflow._mesh.mesh_impl import (
    LazyAllreduceSum,
    MeshImpl,
    compatible_lazy_allreduce_sums,
)
from mesh_tensorflow._mesh.slice_functions import broadcast_slice, constant, for_kernels, tile_slice
from mesh_tensorflow.ops._source import import_unchanged, number_in

__all__ = [
    "AddOperation",
    "BinaryOpWithBroadcasting",
    "MinMaxOperation",
    "ScalarAddOperation",
    "ScalarMultiplyOperation",
    "add",
    "add_n",
    "binary_arguments_to_tensors",
    "binary_op_with_broadcasting",
    "divide",
    "equal",
    "floordiv",
    "greater",
    "greater_equal",
    "less",
    "less_equal",
    "logical_and",
    "logical_or",
    "maximum",
    "minimum",
    "mod",
    "multiply",
    "not_equal",
    "sub",
    "where",
]


# A number: of Python, of NumPy, or a tf.Tensor without dimensions.
Number = Union[float, np.number, tf.Tensor]


def beside(what: str, x: Tensor, value: Operand) -> Union[Tensor, Number]:
    """Returns the other operand of a binary operator, as a Tensor or a number.

    A number is returned as is, and so is that in an array with one element. An array with the sizes
    of the Tensor is imported.

    Args:
      what: the operation, for error messages.
      x: a Tensor.
      value: a Tensor, a number, a NumPy array, a tf.Tensor, or a list of numbers.

    Returns:
      A Tensor, a Python or NumPy number, or a tf.Tensor without dimensions.

    Raises:
      ValueError: an array has other sizes.
      TypeError: `value` is none of these.
    """
    if isinstance(value, (Tensor, int, float)):
        return value
    check_tensors(what, [x])
    return _array_beside(what, x, value)


def _array_beside(what: str, x: Tensor, value: Any) -> Union[Tensor, Number]:
    if tf.is_tensor(value):
        if value.shape.rank is None:
            # Without known axes it is taken for a number; all else fails when the program runs.
            return tf.ensure_shape(value, [])
        sizes = value.shape.as_list()
    else:
        value = _as_array(what, x, value)
        sizes = list(value.shape)
    fits = len(sizes) == len(x.shape) and all(n in (None, d.size) for n, d in zip(sizes, x.shape))
    if not sizes or (not fits and all(n == 1 for n in sizes)):
        if not tf.is_tensor(value):
            # A number of NumPy, as an array without dimensions is none.
            return number_in(value)
        _check_integral(what, x, value, repr(value))
        return number_in(value) if sizes else value
    array = f"{_kind(value)} of shape {tuple(sizes)}"
    if not fits:
        raise ValueError(
            f"{what}: {array} stands beside {x.name} {x.shape}, and its axes have no names. Only "
            "numbers, and arrays of that very shape, can stand beside a Tensor; give it dimensions "
            "with mtf.import_tf_tensor(mesh, array, shape)"
        )
    if not tf.is_tensor(value):
        _check_integral(what, x, value, array)
        value = tf.constant(value.astype(x.dtype.as_numpy_dtype))
    elif value.dtype.base_dtype != x.dtype:
        raise ValueError(
            f"{what}: {array} is {value.dtype.base_dtype.name}, beside {tensors_text([x])}; bring "
            "it to that type with tf.cast"
        )
    # Not import_tf_tensor, which in a mixed precision would give it another dtype than x has.
    return import_unchanged(x.mesh, value, x.shape)


def _as_array(what: str, x: Tensor, value: Operand) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # ragged lists
        # Of a kind that is refused below, with a message that names the Tensor.
        array = np.empty([0], object)
    # NumPy knows bfloat16 as a type of another library, whose kind is that of raw bytes.
    real = array.dtype.kind in "biuf" or array.dtype.name == "bfloat16"
    is_complex = array.dtype.kind == "c"
    if is_complex and not x.dtype.is_complex:
        raise TypeError(
            f"{what}: complex numbers stand beside {tensors_text([x])}. Nothing is converted by "
            "itself; write mtf.cast(x, tf.complex64)"
        )
    if not real and not is_complex:
        raise TypeError(
            f"{what}: {value!r} beside {x.name} {x.shape} is a {type(value).__name__}, neither a "
            "number nor a mtf.Tensor. mtf.import_tf_tensor or mtf.constant makes a Tensor"
        )
    return array


def _kind(value: object) -> str:
    return "a tf.Tensor" if tf.is_tensor(value) else "an array"


def _check_integral(what: str, x: Tensor, value: object, found: str) -> None:
    if not x.dtype.is_integer or isinstance(value, int):
        return
    dtype = getattr(value, "dtype", None)
    if isinstance(value, float) or (dtype is not None and tf.as_dtype(dtype).is_floating):
        raise TypeError(
            f"{what}: {x.name} {x.shape} is {x.dtype.name}, and {found} is no integer. Use "
            "mtf.to_float on the tensor first, or // and % to stay with integers"
        )


def checked_scalar(what: str, x: Tensor, scalar: Any) -> Number:
    """Returns a number to add to a Tensor or to multiply it by, taken out of an array of one.

    Raises:
      ValueError: `scalar` is a Tensor, or an array of several elements.
      TypeError: `scalar` is floating and `x` has an integer dtype.
    """
    if isinstance(scalar, Tensor):
        raise ValueError(
            f"{what}: {tensors_text([scalar])} is a Tensor; pass a number or a tf scalar"
        )
    is_tf = tf.is_tensor(scalar)
    _check_integral(what, x, scalar, repr(scalar))
    if is_tf or not isinstance(scalar, (int, float, np.generic)):
        sizes = scalar.shape if is_tf else tf.TensorShape(np.shape(scalar))
        rank = sizes.rank
        if rank and sizes.num_elements() == 1:
            scalar = number_in(scalar)
        elif rank:
            raise ValueError(
                f"{what}: {_kind(scalar)} with {rank} dimensions is no number; "
                "mtf.import_tf_tensor makes a Tensor of it"
            )
    if is_tf and scalar.dtype.base_dtype != x.dtype:
        raise TypeError(
            f"{what}: the tf.Tensor beside {tensors_text([x])} is {scalar.dtype.base_dtype.name}; "
            "bring it to that type with tf.cast"
        )
    return scalar


def _as_operand(scalar: Number, x: tf.Tensor) -> Number:
    """Returns a Python number as a constant of the dtype of `x`; others as they are."""
    if isinstance(scalar, int) and x.dtype == tf.uint64:
        # Modulo the range, as TensorFlow takes numbers beside all other unsigned dtypes.
        return constant(np.uint64(scalar % 2**64), x.dtype)
    return constant(scalar, x.dtype) if isinstance(scalar, (int, float, complex)) else scalar


def _conjugate(scalar: Number) -> Number:
    """Returns the conjugate of a number; real ones as they are."""
    if tf.is_tensor(scalar):
        return tf.math.conj(scalar)
    return scalar.conjugate() if isinstance(scalar, complex) else scalar


class _ScalarOperation(Operation):
    """A Tensor and a number or a tf scalar; no gradient goes to the scalar."""

    works_by_name = True
    takes_padding = True
    _verb: str
    _default_name: str
    _operator: Any  # of two values; no method, which a Callable would be taken for

    def __init__(self, x: Tensor, scalar: Number, name: Optional[str] = None):
        """Creates the operation.

        Args:
          x: a Tensor.
          scalar: a number or a tf.Tensor without dimensions.
          name: a string or None.

        Raises:
          TypeError: `scalar` is floating and `x` has an integer dtype, or `x` has booleans.
          ValueError: `scalar` is not a number.
        """
        check_numbers(self._verb, [x])
        scalar = checked_scalar(self._verb, x, scalar)
        super().__init__([x], name=name or self._default_name)
        self._scalar = scalar
        self._outputs = [Tensor(self, x.shape, x.dtype)]

    def lower(self, lowering: mtf.Lowering) -> None:
        """Multiplies each slice by the scalar, or adds it to the slice."""
        fn = type(self)._operator
        self._lower_slices(lowering, lambda x: fn(x, _as_operand(self._scalar, x)))


class ScalarMultiplyOperation(_ScalarOperation):
    """Multiplies a Tensor by a number or a tf scalar; no gradient goes to the scalar.

    Attributes:
      is_mean: whether it makes the mean of a sum, by the number of what is summed; or divides a sum
        by another number, if False. None if it is not known. Microbatches ask for it.
    """

    _verb, _default_name, _operator = "multiply", "scalar_mul", operator.mul
    is_mean: Optional[bool] = None

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Multiplies dy by the scalar, or by its conjugate if it is complex."""
        # y = c x has dx = conj(c) dy; see unary.py for the convention.
        return [gradient_of_output(grad_ys) * _conjugate(self._scalar)]


class ScalarAddOperation(_ScalarOperation):
    """Adds a number or a tf scalar to a Tensor; no gradient goes to the scalar."""

    _verb, _default_name, _operator = "add", "scalar_add", operator.add

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Passes the gradient on."""
        return list(grad_ys)


# TensorFlow's functions that are not defined for complex numbers.
_OF_REAL = {
    tf.less: "less",
    tf.less_equal: "less_equal",
    tf.greater: "greater",
    tf.greater_equal: "greater_equal",
    tf.floordiv: "floordiv",
    tf.math.floormod: "mod",
}


def check_dtypes(what: str, tensors: Sequence[Tensor]) -> None:
    """Checks that Tensors have one dtype.

    Raises:
      ValueError: they do not.
    """
    check_tensors(what, tensors)
    if len({t.dtype for t in tensors}) > 1:
        raise ValueError(
            f"{what}: dtypes must be equal: {tensors_text(tensors)}. Nothing is converted by "
            "itself; bring one to the other's type with mtf.cast"
        )


def lower_broadcast(op: Operation, lowering: mtf.Lowering, tf_fn: Callable) -> None:
    """Applies a TensorFlow function to the slices of an operation's inputs, broadcast by name."""
    shape = op.outputs[0].shape
    sizes = lowering.mesh_impl(op).slice_shape(shape)

    def apply(*slices: tf.Tensor) -> tf.Tensor:
        aligned = for_kernels(
            [broadcast_slice(t, x.shape, shape) for t, x in zip(slices, op.inputs)]
        )
        # Computed once, then repeated along dimensions that only the output has.
        return tile_slice(tf_fn(*aligned), sizes)

    op._lower_slices(lowering, apply)


class BinaryOpWithBroadcasting(Operation):
    """An elementwise function of two Tensors, broadcast by dimension name."""

    works_by_name = True
    takes_padding = True

    def __init__(
        self,
        tf_fn: Callable,
        x1: Tensor,
        x2: Tensor,
        output_shape: Optional[ShapeLike],
        output_dtype: tf.DType,
        name: Optional[str] = None,
    ):
        """Creates the operation.

        Args:
          tf_fn: a function of two tf.Tensors that broadcasts as TensorFlow does.
          x1: a Tensor.
          x2: a Tensor of the same dtype.
          output_shape: a Shape that has the dimensions of both.
          output_dtype: a dtype.
          name: a string or None.

        Raises:
          ValueError: the dtypes differ, or the output shape lacks a dimension.
        """
        check_dtypes(name or "binary operation", [x1, x2])
        check_sizes_of_names(name or "binary operation", [x1.shape, x2.shape])
        shape = broadcast_shape(x1.shape, x2.shape, convert_to_shape(output_shape))
        super().__init__([x1, x2], name=name or "binary_op")
        self._tf_fn = tf_fn
        self._outputs = [Tensor(self, shape, tf.as_dtype(output_dtype))]

    @property
    def has_gradient(self) -> bool:
        """False, unless a subclass defines a gradient."""
        # So gradients end at floordiv and mod, which are of this class, and do not fail there.
        return type(self) is not BinaryOpWithBroadcasting and super().has_gradient

    def gradient(self, unused_grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Raises an error: the derivative of a TensorFlow function is not known."""
        raise NotImplementedError(
            f"{self.name}: a binary operation from a TensorFlow function has no gradient; "
            "mtf.slicewise or mtf.custom_gradient takes one"
        )

    def lower(self, lowering: mtf.Lowering) -> None:
        """Applies the function to slices that are broadcast by name."""
        lower_broadcast(self, lowering, self._tf_fn)


def _sum_to(dy: Tensor, x: Tensor) -> Tensor:
    # A value that was repeated along a dimension gets the gradients of all its copies.
    return mtf.reduce_sum(dy, output_shape=x.shape)


class AddOperation(BinaryOpWithBroadcasting):
    """The sum of two Tensors; it adds partial sums over the same mesh axes without an allreduce."""

    delays_sums = 2  # both summands
    costs_by = ()

    def __init__(
        self, x1: Tensor, x2: Tensor, output_shape: Optional[ShapeLike], name: Optional[str] = None
    ):
        """Creates the operation; see BinaryOpWithBroadcasting."""
        super().__init__(tf.add, x1, x2, output_shape, x1.dtype, name=name or "add")

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Sums dy to the shape of each summand."""
        dy = gradient_of_output(grad_ys)
        return [_sum_to(dy, x) for x in self.inputs]

    def _same_shapes(self) -> bool:
        return all(x.shape == self.outputs[0].shape for x in self.inputs)

    def lower(self, lowering: mtf.Lowering) -> None:
        """Adds two compatible partial sums without reducing them; else adds slices."""
        values = [lowering.tensors[x] for x in self.inputs]
        # Summands of pending sums are added by position, which takes equal shapes.
        if self._same_shapes():
            value = self._added(values, lowering)
            if value is not None:
                lowering.set_tensor_lowering(self.outputs[0], value)
                return
        super().lower(lowering)

    def _added(self, values: Sequence[Any], lowering: mtf.Lowering) -> Any:
        """Returns the sum in the memory of one summand, or a partial sum; None if it is neither."""
        pending = compatible_lazy_allreduce_sums(values)
        # What is still to be summed over processors cannot be added to what is not.
        if pending or not any(isinstance(v, LazyAllreduceSum) for v in values):
            # Gradients of a table that is read twice, such as a shared embedding, need one table in
            # memory. Reversed: the rows of one are added to the value of the other.
            for x, other in zip(self.inputs[::-1], values):
                total = x.operation._added_to(other, lowering)
                if total is not None:
                    return total
        return values[0] + values[1] if pending else None

    def partial_sums(self, mesh_impl: MeshImpl, pending: PendingSums) -> PartialSums:
        """The sum of two partial sums over the same mesh axes is one, too."""
        # (sum over p of x1_p) + (sum over p of x2_p) = sum over p of (x1_p + x2_p), for the same
        # processors p alone.
        first, second = (pending.get(x) for x in self.inputs)
        if self._same_shapes() and first is not None and first == second:
            return {self.outputs[0]: Partial(first)}
        return super().partial_sums(mesh_impl, pending)


class MinMaxOperation(BinaryOpWithBroadcasting):
    """The elementwise minimum or maximum of two Tensors; ties send the gradient to the first."""

    def __init__(
        self,
        tf_fn: Callable,
        x1: Tensor,
        x2: Tensor,
        output_shape: Optional[ShapeLike],
        name: Optional[str] = None,
    ):
        """Creates the operation; `tf_fn` is tf.minimum or tf.maximum."""
        # The classic's name of both, by which programs may know their nodes.
        super().__init__(tf_fn, x1, x2, output_shape, x1.dtype, name=name or "add")

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Gives dy to the input that was chosen, the first of equal ones."""
        (x1, x2), y, dy = self.inputs, self.outputs[0], gradient_of_output(grad_ys)
        first = mtf.equal(x1, y, output_shape=y.shape)
        # Of equal values one gets all of the gradient: both would count it twice.
        masks = [first, mtf.logical_not(first)]
        return [_sum_to(dy * mtf.cast(mask, y.dtype), x) for x, mask in zip((x1, x2), masks)]


def binary_arguments_to_tensors(
    x1: Operand, x2: Operand, what: str = "binary operation"
) -> tuple[Tensor, Tensor]:
    """Imports the operand that is not a Tensor, in the dtype of the other operand.

    >>> x = mtf.constant(mesh, [1.0, 2.0], "d:2")
    >>> _, two = mtf.ops.binary_arguments_to_tensors(x, 2)
    >>> print(two.shape, two.dtype.name)
    Shape[] float32

    Args:
      x1: a Tensor, a number or an array.
      x2: a Tensor, a number or an array; one of the two is a Tensor.
      what: the operation, for error messages.

    Raises:
      ValueError: neither is a Tensor, or an array has another shape than the Tensor.
      TypeError: one is not a Tensor, a number or an array.
    """
    if not isinstance(x1, Tensor) and not isinstance(x2, Tensor):
        raise ValueError(f"at least one of x1 and x2 must be a mtf.Tensor, got {x1!r} and {x2!r}")
    if isinstance(x1, Tensor):
        return x1, x2 if isinstance(x2, Tensor) else _import_beside(what, x1, x2)
    return _import_beside(what, x2, x1), x2  # type: ignore[arg-type,return-value]  # a Tensor, by now


def _import_beside(what: str, x: Tensor, value: Operand) -> Tensor:
    value = beside(what, x, value)
    if isinstance(value, Tensor):
        return value
    _check_integral(what, x, value, repr(value))
    if not tf.is_tensor(value) and not isinstance(value, (bool, np.bool_)):
        check_numbers(what, [x])
    value = tf.cast(value, x.dtype) if tf.is_tensor(value) else tf.constant(value, x.dtype)
    return import_unchanged(x.mesh, value, [])


@leaves_no_node
def binary_op_with_broadcasting(
    tf_fn: Callable,
    x1: Operand,
    x2: Operand,
    output_shape: Optional[ShapeLike] = None,
    output_dtype: Optional[tf.DType] = None,
) -> Tensor:
    """Applies an elementwise TensorFlow function to two Tensors of different shapes.

    The output shape is `output_shape` if given; otherwise the longer shape, if the other is a
    subsequence of it; otherwise the dimensions of the first, then the new ones of the second.

    >>> a = mtf.constant(mesh, [1.0, 2.0], "row:2")
    >>> b = mtf.constant(mesh, [3.0, 4.0, 5.0], "col:3")
    >>> y = mtf.ops.binary_op_with_broadcasting(tf.math.atan2, a, b)
    >>> print(y.shape)
    Shape[row=2, col=3]

    Args:
      tf_fn: a function of two tf.Tensors that broadcasts as TensorFlow does.
      x1: a Tensor or a number.
      x2: a Tensor or a number; one of the two is a Tensor.
      output_shape: a Shape or None.
      output_dtype: a dtype; that of the inputs if None.

    Raises:
      ValueError: the dtypes differ, or the output shape lacks a dimension.
    """
    what = getattr(tf_fn, "__name__", "binary operation")
    x1, x2 = binary_arguments_to_tensors(x1, x2, what)
    if tf_fn in _OF_REAL:
        check_real(_OF_REAL[tf_fn], [x1, x2])
    if tf_fn in (tf.logical_and, tf.logical_or):
        check_booleans(what, [x1, x2])
    return BinaryOpWithBroadcasting(
        tf_fn, x1, x2, output_shape, x1.dtype if output_dtype is None else output_dtype
    ).outputs[0]


@leaves_no_node
def add(
    x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None, name: Optional[str] = None
) -> Tensor:
    """Returns x1 + x2, broadcast by dimension name.

    >>> a = mtf.constant(mesh, [1.0, 2.0], "row:2")
    >>> b = mtf.constant(mesh, [3.0, 4.0, 5.0], "col:3")
    >>> print(mtf.add(a, b).shape)
    Shape[row=2, col=3]
    >>> print((a + b).numpy())
    [[4. 5. 6.]
     [5. 6. 7.]]

    Args:
      x1: a Tensor, a number, or an array with the sizes of `x2`.
      x2: a Tensor, a number, or an array with the sizes of `x1`.
      output_shape: a Shape or None.
      name: a string or None.
    """
    x2 = beside("add", x1, x2)  # type: ignore[arg-type]  # checks x1
    if not isinstance(x2, Tensor):
        return ScalarAddOperation(x1, x2).outputs[0]  # type: ignore[arg-type]  # checks x1
    x1, x2 = binary_arguments_to_tensors(x1, x2, "add")
    check_numbers("add", [x1, x2])
    return AddOperation(x1, x2, output_shape, name=name).outputs[0]


@leaves_no_node
def add_n(xs: Sequence[Any]) -> Any:
    """Returns the sum of `xs`, from left to right; 0 if the list is empty.

    >>> a = mtf.constant(mesh, [1.0, 5.0, 7.0], "d:3")
    >>> b = mtf.constant(mesh, [4.0, 5.0, 6.0], "d:3")
    >>> print(mtf.add_n([a, b, a]).numpy())
    [ 6. 15. 20.]
    """
    return functools.reduce(add, xs) if xs else 0


def _minus(number: Any) -> Number:
    """Returns the negative of a number, also of one whose dtype lacks it."""
    if isinstance(number, np.integer):
        return -int(number)  # that of np.uint8(1) would be 255
    if tf.is_tensor(number) and number.dtype.is_unsigned:
        # Modulo 2 ** bits, where to add this is to subtract the number.
        return tf.zeros_like(number) - number
    return -number


@leaves_no_node
def sub(
    x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None, name: Optional[str] = None
) -> Tensor:
    """Returns x1 - x2, broadcast by dimension name; see `add`.

    It adds the negative of x2, so that the gradient of x2 is only computed if it is used;
    TensorFlow fuses the two.

    >>> a = mtf.constant(mesh, [1.0, 5.0, 7.0], "d:3")
    >>> b = mtf.constant(mesh, [4.0, 5.0, 6.0], "d:3")
    >>> print(mtf.sub(a, b).numpy(), (1.0 - a).numpy())
    [-3.  0.  1.] [ 0. -4. -6.]
    """
    x2 = beside("sub", x1, x2)  # type: ignore[arg-type]  # checks x1
    if not isinstance(x2, Tensor):
        return ScalarAddOperation(x1, _minus(x2)).outputs[0]  # type: ignore[arg-type]  # checks x1
    x1, x2 = binary_arguments_to_tensors(x1, x2, "sub")
    check_dtypes(name or "sub", [x1, x2])
    check_numbers("sub", [x1, x2])
    # There are no negative numbers of these dtypes to add.
    if x2.dtype.is_unsigned:
        return binary_op_with_broadcasting(tf.subtract, x1, x2, output_shape)
    return AddOperation(x1, mtf.negative(x2), output_shape, name=name).outputs[0]


@leaves_no_node
def multiply(
    x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None, name: Optional[str] = None
) -> Tensor:
    """Returns x1 * x2, broadcast by dimension name.

    >>> a = mtf.constant(mesh, [1.0, 2.0], "row:2")
    >>> b = mtf.constant(mesh, [3.0, 4.0, 5.0], "col:3")
    >>> print((a * b).numpy())
    [[ 3.  4.  5.]
     [ 6.  8. 10.]]

    Args:
      x1: a Tensor, a number, or an array with the sizes of `x2`.
      x2: a Tensor, a number, or an array with the sizes of `x1`.
      output_shape: a Shape or None; the product is summed over dimensions that it lacks, and
        repeated along those that neither operand has.
      name: a string or None.
    """
    x2 = beside("multiply", x1, x2)  # type: ignore[arg-type]  # checks x1
    if not isinstance(x2, Tensor):
        return ScalarMultiplyOperation(x1, x2).outputs[0]  # type: ignore[arg-type]  # checks x1
    x1, x2 = binary_arguments_to_tensors(x1, x2, "multiply")
    check_numbers("multiply", [x1, x2])
    if output_shape is None:
        output_shape = broadcast_shape(x1.shape, x2.shape, None)
    output_shape = convert_to_shape(output_shape)
    # Without what neither has: mtf.einsum would report that as a slip, and here it is asked for.
    computed = Shape([d for d in output_shape if d in x1.shape or d in x2.shape])
    # By an einsum, which also sums over dimensions that the output lacks.
    return mtf.broadcast(mtf.einsum([x1, x2], computed, name=name), output_shape)


@leaves_no_node
def divide(
    x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None, name: Optional[str] = None
) -> Tensor:
    """Returns x1 * (1 / x2), broadcast by dimension name; see `multiply`.

    >>> a = mtf.constant(mesh, [1.0, 5.0, 7.0], "d:3")
    >>> b = mtf.constant(mesh, [4.0, 5.0, 6.0], "d:3")
    >>> print((a / 2.0).numpy())
    [0.5 2.5 3.5]
    """
    x2 = beside("divide", x1, x2)  # type: ignore[arg-type]  # checks x1
    if not isinstance(x2, Tensor):
        # As in the classic: a quotient may have another last digit than this product.
        return ScalarMultiplyOperation(x1, 1.0 / x2).outputs[0]  # type: ignore[arg-type]  # checks x1
    x1, x2 = binary_arguments_to_tensors(x1, x2, "divide")
    check_numbers("divide", [x1, x2])
    # TensorFlow has no reciprocals of integers; XLA has, which are 0.
    if x1.dtype.is_integer and x2.dtype.is_integer:
        raise TypeError(
            f"divide: {tensors_text([x1, x2])}, and a quotient is no integer. Use mtf.to_float on "
            "the tensors first, or // and % to stay with integers"
        )
    return multiply(x1, mtf.reciprocal(x2), output_shape=output_shape, name=name)


def floordiv(x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None) -> Tensor:
    """Returns x1 // x2, rounded down, in the Tensor's dtype; see `binary_op_with_broadcasting`.

    >>> a = mtf.constant(mesh, [7, -7], "d:2", tf.int32)
    >>> print((a // 2).numpy())
    [ 3 -4]
    """
    return binary_op_with_broadcasting(tf.floordiv, x1, x2, output_shape)


def mod(x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None) -> Tensor:
    """Returns x1 % x2, with the sign of x2, in the Tensor's dtype.

    >>> a = mtf.constant(mesh, [7, -7], "d:2", tf.int32)
    >>> print((a % 4).numpy())
    [3 1]
    """
    return binary_op_with_broadcasting(tf.math.floormod, x1, x2, output_shape)


@leaves_no_node
def minimum(
    x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None, name: Optional[str] = None
) -> Tensor:
    """Returns the elementwise minimum; where x1 and x2 tie, x1 gets the gradient; see `add`.

    >>> a = mtf.constant(mesh, [1.0, 5.0, 7.0], "d:3")
    >>> b = mtf.constant(mesh, [4.0, 5.0, 6.0], "d:3")
    >>> print(mtf.minimum(a, b).numpy())
    [1. 5. 6.]
    """
    x1, x2 = binary_arguments_to_tensors(x1, x2, "minimum")
    check_real("minimum", [x1, x2])
    return MinMaxOperation(tf.minimum, x1, x2, output_shape, name=name).outputs[0]


@leaves_no_node
def maximum(
    x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None, name: Optional[str] = None
) -> Tensor:
    """Returns the elementwise maximum; where x1 and x2 tie, x1 gets the gradient; see `add`.

    >>> a = mtf.constant(mesh, [1.0, 5.0, 7.0], "d:3")
    >>> b = mtf.constant(mesh, [4.0, 5.0, 6.0], "d:3")
    >>> print(mtf.maximum(a, 2.0).numpy())
    [2. 5. 7.]
    """
    x1, x2 = binary_arguments_to_tensors(x1, x2, "maximum")
    check_real("maximum", [x1, x2])
    return MinMaxOperation(tf.maximum, x1, x2, output_shape, name=name).outputs[0]


# -- comparisons, logic and selection


def less(x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None) -> Tensor:
    """Returns whether x1 < x2, a boolean Tensor; see `binary_op_with_broadcasting`.

    >>> a = mtf.constant(mesh, [1.0, 5.0, 7.0], "d:3")
    >>> b = mtf.constant(mesh, [4.0, 5.0, 6.0], "d:3")
    >>> print(mtf.less(a, b).numpy())
    [ True False False]
    """
    return binary_op_with_broadcasting(tf.less, x1, x2, output_shape, tf.bool)


def greater(x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None) -> Tensor:
    """Returns whether x1 > x2, a boolean Tensor; see `binary_op_with_broadcasting`.

    >>> a = mtf.constant(mesh, [1.0, 5.0, 7.0], "d:3")
    >>> b = mtf.constant(mesh, [4.0, 5.0, 6.0], "d:3")
    >>> print(mtf.greater(a, b).numpy())
    [False False  True]
    """
    return binary_op_with_broadcasting(tf.greater, x1, x2, output_shape, tf.bool)


def less_equal(x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None) -> Tensor:
    """Returns whether x1 <= x2, a boolean Tensor; see `binary_op_with_broadcasting`.

    >>> a = mtf.constant(mesh, [1.0, 5.0, 7.0], "d:3")
    >>> b = mtf.constant(mesh, [4.0, 5.0, 6.0], "d:3")
    >>> print(mtf.less_equal(a, b).numpy())
    [ True  True False]
    """
    return binary_op_with_broadcasting(tf.less_equal, x1, x2, output_shape, tf.bool)


def greater_equal(x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None) -> Tensor:
    """Returns whether x1 >= x2, a boolean Tensor; see `binary_op_with_broadcasting`.

    >>> a = mtf.constant(mesh, [1.0, 5.0, 7.0], "d:3")
    >>> b = mtf.constant(mesh, [4.0, 5.0, 6.0], "d:3")
    >>> print(mtf.greater_equal(a, b).numpy())
    [False  True  True]
    """
    return binary_op_with_broadcasting(tf.greater_equal, x1, x2, output_shape, tf.bool)


def equal(x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None) -> Tensor:
    """Returns whether x1 == x2, a boolean Tensor; see `binary_op_with_broadcasting`.

    >>> a = mtf.constant(mesh, [1.0, 5.0, 7.0], "d:3")
    >>> b = mtf.constant(mesh, [4.0, 5.0, 6.0], "d:3")
    >>> print(mtf.equal(a, b).numpy())
    [False  True False]
    """
    return binary_op_with_broadcasting(tf.equal, x1, x2, output_shape, tf.bool)


def not_equal(x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None) -> Tensor:
    """Returns whether x1 != x2, a boolean Tensor; see `binary_op_with_broadcasting`.

    >>> a = mtf.constant(mesh, [1.0, 5.0, 7.0], "d:3")
    >>> b = mtf.constant(mesh, [4.0, 5.0, 6.0], "d:3")
    >>> print(mtf.not_equal(a, b).numpy())
    [ True False  True]
    """
    return binary_op_with_broadcasting(tf.not_equal, x1, x2, output_shape, tf.bool)


def logical_and(x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None) -> Tensor:
    """Returns x1 and x2, boolean Tensors; see `binary_op_with_broadcasting`.

    >>> a = mtf.constant(mesh, [True, True, False], "d:3", tf.bool)
    >>> b = mtf.constant(mesh, [True, False, False], "d:3", tf.bool)
    >>> print(mtf.logical_and(a, b).numpy())
    [ True False False]
    """
    return binary_op_with_broadcasting(tf.logical_and, x1, x2, output_shape, tf.bool)


def logical_or(x1: Operand, x2: Operand, output_shape: Optional[ShapeLike] = None) -> Tensor:
    """Returns x1 or x2, boolean Tensors; see `binary_op_with_broadcasting`.

    >>> a = mtf.constant(mesh, [True, True, False], "d:3", tf.bool)
    >>> b = mtf.constant(mesh, [True, False, False], "d:3", tf.bool)
    >>> print(mtf.logical_or(a, b).numpy())
    [ True  True False]
    """
    return binary_op_with_broadcasting(tf.logical_or, x1, x2, output_shape, tf.bool)


@leaves_no_node
def where(
    condition: Tensor,
    if_true: Union[Tensor, float],
    if_false: Union[Tensor, float],
    output_shape: Optional[ShapeLike] = None,
) -> Tensor:
    """Returns `if_true` where `condition` is true, and `if_false` elsewhere, broadcast.

    It is the sum of two masked products: if the value that is not selected is NaN or infinite, the
    result is NaN.

    >>> a = mtf.constant(mesh, [1.0, 5.0, 7.0], "d:3")
    >>> b = mtf.constant(mesh, [4.0, 5.0, 6.0], "d:3")
    >>> print(mtf.where(mtf.less(a, b), a, 0.0).numpy())
    [1. 0. 0.]

    Args:
      condition: a boolean Tensor.
      if_true: a Tensor or a number.
      if_false: a Tensor or a number; not both are numbers.
      output_shape: a Shape or None.

    Raises:
      WrongTypeError: `condition` is not a Tensor, or neither of the others is.
    """
    if isinstance(condition, bool):
        raise WrongTypeError(
            f"where: the condition is {condition}. `x == y` asks whether two Tensors are the same "
            "object; mtf.equal(x, y) and mtf.not_equal(x, y) compare their values"
        )
    check_tensors("where", [condition])
    check_booleans("where: the condition", [condition])
    if not isinstance(if_true, Tensor) and isinstance(if_false, Tensor):
        return where(mtf.logical_not(condition), if_false, if_true, output_shape)
    check_tensors("where", [if_true])
    assert isinstance(if_true, Tensor)
    # Products and sums are of numbers.
    if if_true.dtype.is_bool:
        other = mtf.to_int32(if_false) if isinstance(if_false, Tensor) else if_false
        return mtf.cast(where(condition, mtf.to_int32(if_true), other, output_shape), tf.bool)
    mask = mtf.cast(condition, if_true.dtype)
    first = multiply(if_true, mask, output_shape)
    # The usual mask: a second product would only add zeros.
    if not isinstance(if_false, Tensor) and isinstance(if_false, (int, float)) and if_false == 0:
        return first
    other = multiply(if_false, mtf.cast(mtf.logical_not(condition), if_true.dtype), output_shape)
    return add(first, other)


class SelectOperation(Operation):
    """One of two Tensors, by a condition; what is not selected has no part in it, not even NaN."""

    works_by_name = True
    takes_padding = True

    def __init__(self, condition: Tensor, if_true: Tensor, if_false: Tensor, shape: Shape):
        """Creates the operation; `shape` has the dimensions of all inputs."""
        check_dtypes("select", [if_true, if_false])
        super().__init__([condition, if_true, if_false], name="select")
        self._outputs = [Tensor(self, shape, if_true.dtype)]

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Gives dy to the one that was selected, and 0 to the other."""
        (condition, *inputs), dy = self.inputs, gradient_of_output(grad_ys)
        # The gradient is selected, too: 0 times a NaN from what follows would be NaN.
        conditions = [condition, mtf.logical_not(condition)]
        return [
            None,
            *(
                mtf.reduce_sum(select(taken, dy, 0.0), output_shape=x.shape)
                for taken, x in zip(conditions, inputs)
            ),
        ]

    def lower(self, lowering: mtf.Lowering) -> None:
        """Selects slices that are broadcast by name."""
        # The where of TensorFlow 1 does not broadcast.
        lower_broadcast(self, lowering, tf.where_v2)


def select(
    condition: Tensor,
    if_true: Operand,
    if_false: Operand,
    output_shape: Optional[ShapeLike] = None,
) -> Tensor:
    """Returns what `where` does, of whatever value the one is that is not selected.

    So the gradients of what is selected are numbers, too, where those of the other are not.

    Args:
      condition: a boolean Tensor.
      if_true: a Tensor or a number.
      if_false: a Tensor or a number; one of the two is a Tensor.
      output_shape: a Shape or None.
    """
    if_true, if_false = binary_arguments_to_tensors(if_true, if_false)
    shape = convert_to_shape(output_shape)
    if shape is None:
        shape = broadcast_shape(if_true.shape, if_false.shape, None)
        shape = broadcast_shape(shape, condition.shape, None)
    for x in (condition, if_true, if_false):
        broadcast_shape(shape, x.shape, shape)  # an error if it lacks a dimension
    return SelectOperation(condition, if_true, if_false, shape).outputs[0]
