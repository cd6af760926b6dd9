"""Tensor: a named-dimension tensor of a Graph, the output of an Operation.

Its operators are added by `ops/_elementwise/operators.py`, its value in eager code by
`_lowering/values.py`: both import this module.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Optional, Union

import numpy as np
import numpy.typing as npt
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import WrongTypeError, tensors_text
from mesh_tensorflow._core.shape import Shape

if TYPE_CHECKING:
    from mesh_tensorflow._core.graph import Graph, Mesh
    from mesh_tensorflow._core.operation import Operation

__all__ = [
    "ArrayLike",
    "Operand",
    "Tensor",
    "check_numbers",
    "check_real",
    "check_tensors",
    "is_differentiable",
    "with_stages",
    "without_stages",
]

# What other libraries' tensors have, and what does it here.
_INSTEAD = {
    "T": "mtf.transpose(x, new_shape); most operations find dimensions by name, in any order",
    "all": "mtf.reduce_all(x, reduced_dim=dim)",
    "any": "mtf.reduce_any(x, reduced_dim=dim)",
    "argmax": "mtf.argmax(x, reduced_dim)",
    "astype": "mtf.cast(x, dtype)",
    "backward": "mtf.gradients([loss], xs), which returns the gradients",
    "detach": "mtf.stop_gradient(x)",
    "eval": "lowering.export_to_tf_tensor(x) and evaluate that; x.numpy() in eager code",
    "get_shape": "x.shape",
    "item": "float(x) or int(x)",
    "matmul": "x @ w, or mtf.einsum([x, w], output_shape=shape)",
    "max": "mtf.reduce_max(x, reduced_dim=dim)",
    "mean": "mtf.reduce_mean(x, reduced_dim=dim)",
    "min": "mtf.reduce_min(x, reduced_dim=dim)",
    "ndim": "x.shape.ndims",
    "permute": "mtf.transpose(x, new_shape)",
    "reshape": "mtf.reshape(x, new_shape), or mtf.rename_dimension, mtf.replace_dimensions",
    "squeeze": "mtf.reshape(x, new_shape)",
    "std": "mtf.sqrt(mtf.reduce_mean(mtf.square(x - mtf.reduce_mean(x))))",
    "sum": "mtf.reduce_sum(x, reduced_dim=dim)",
    "to": "mtf.cast(x, dtype); the layout says where it is",
    "tolist": "x.numpy().tolist(), in eager code",
    "transpose": "mtf.transpose(x, new_shape)",
    "unsqueeze": "mtf.reshape(x, new_shape); operations broadcast by name, without it",
    "view": "mtf.reshape(x, new_shape)",
}


class Tensor:
    """A tensor with named dimensions, the output of an Operation.

    It is equal only to itself, and hashable; `mtf.equal` compares values. It stands for a
    computation. In eager code it also has a value, which `numpy`, `print`, `float` and `np.asarray`
    compute when they ask for it. Elsewhere a Lowering gives it one, and it is always true.

    >>> import mesh_tensorflow as mtf
    >>> mesh = mtf.Mesh(mtf.Graph(), "mesh")
    >>> x = mtf.import_tf_tensor(mesh, [[1.0, 2.0], [3.0, 4.0]], "a:2,b:2")
    >>> w = mtf.import_tf_tensor(mesh, [1.0, -1.0], "b:2")
    >>> print(abs(x @ w) ** 2)
    Tensor[square:0, Shape[a=2], <dtype: 'float32'>] = [1. 1.]
    """

    # Makes NumPy leave `array + tensor` to the operators of Tensor.
    __array_ufunc__ = None

    def __init__(
        self,
        operation: Operation,
        shape: Shape,
        dtype: tf.DType,
        name: Optional[str] = None,
        index: int = 0,
    ):
        """Creates output number `index` of `operation`.

        Args:
          operation: an Operation.
          shape: a Shape.
          dtype: a tf.DType.
          name: a string; the operation's name and the index if None.
          index: the number of the output.

        Raises:
          ValueError: `shape` is not a Shape, or `dtype` is not a tf.DType.
        """
        name = f"{operation.name}:{index}" if name is None else name
        if not isinstance(shape, Shape):
            raise ValueError(
                f"the shape of tensor {name!r} must be a mtf.Shape, not {shape!r}; "
                "mtf.convert_to_shape makes one"
            )
        if not isinstance(dtype, tf.DType):
            raise ValueError(f"the dtype of tensor {name!r} must be a tf.DType, not {dtype!r}")
        self._operation = operation
        self._mesh = operation.mesh
        self._shape = shape
        self._dtype = dtype
        self._name = name
        # Inner values of a function with a custom gradient cannot be inputs of other operations.
        self.usable = True
        # Of an attention mask: the positions or segment ids that it was computed from. Attention by
        # blocks compares those and never reads the mask itself; see layers/_masks.py.
        self.made_of: Any = None

    @property
    def shape(self) -> Shape:
        """Shape of the tensor."""
        return self._shape

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._shape.size

    @property
    def mesh(self) -> Mesh:
        """The Mesh it is on."""
        return self._mesh

    @property
    def graph(self) -> Graph:
        """The Graph it belongs to."""
        return self._operation.graph

    @property
    def operation(self) -> Operation:
        """The Operation whose output it is."""
        return self._operation

    @property
    def dtype(self) -> tf.DType:
        """Dtype of its elements."""
        return self._dtype

    @property
    def name(self) -> str:
        """Name of the operation, a colon, and the index of the output."""
        return self._name

    @property
    def to_string(self) -> str:
        """One line with name, shape and dtype."""
        return f"Tensor[{self.name}, {self.shape}, {self.dtype}]"

    def __repr__(self) -> str:
        return self.to_string

    def __getattr__(self, name: str) -> NoReturn:
        # Nothing of `self` is read here: copy and pickle ask a Tensor that has no attributes yet,
        # and this would call itself without end.
        instead = _INSTEAD.get(name)
        mend = "" if instead is None else f". Write {instead}"
        raise AttributeError(f"a mtf.Tensor has no attribute {name!r}{mend}")

    if TYPE_CHECKING:
        # Defined by mesh_tensorflow._lowering.
        def numpy(self) -> np.ndarray: ...
        def __array__(
            self, dtype: Optional[npt.DTypeLike] = None, copy: Optional[bool] = None
        ) -> np.ndarray: ...
        def __float__(self) -> float: ...
        def __complex__(self) -> complex: ...
        def __int__(self) -> int: ...
        def __bool__(self) -> bool: ...

        # Defined by mesh_tensorflow.ops.
        def __add__(self, other: Operand) -> Tensor: ...
        def __and__(self, other: Tensor) -> Tensor: ...
        def __neg__(self) -> Tensor: ...

        __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __add__
        __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __add__
        __lt__ = __le__ = __gt__ = __ge__ = __add__
        __or__ = __matmul__ = __and__
        __pos__ = __abs__ = __invert__ = __neg__


def bind_methods(methods: Mapping[str, Any]) -> None:
    """Sets methods of Tensor, by name, from modules that this one must not import."""
    for name, method in methods.items():
        # Else a traceback would call most of them <lambda>.
        method.__name__ = name
        setattr(Tensor, name, method)


# What converts to a tf.Tensor.
ArrayLike = Union[tf.Tensor, np.ndarray, np.generic, float, Sequence[Any]]
# An operand of an arithmetic operator; an array has the sizes of the Tensor beside it.
Operand = Union[Tensor, ArrayLike]


def _has_no_value(
    x: Tensor,
    dtype: Optional[tf.DType] = None,
    name: Optional[str] = None,
    as_ref: bool = False,
) -> NoReturn:
    raise TypeError(
        f"{x.to_string} has no value that TensorFlow can use: lowering.export_to_tf_tensor(x) "
        "returns one once the graph is lowered, x.numpy() in eager code. Beside it only numbers "
        "and tf.Tensors of its very shape can stand; mtf.import_tf_tensor gives names to the axes "
        "of others"
    )


# Without it, TensorFlow would try `__array__`, and in eager code make a constant of a Tensor, which
# has no gradient and no layout.
tf.register_tensor_conversion_function(Tensor, _has_no_value)


def is_differentiable(dtype: tf.DType) -> bool:
    """Returns whether gradients flow through values of a dtype: floating or complex numbers."""
    return dtype.is_floating or dtype.is_complex


def check_tensors(what: str, xs: Iterable[object]) -> None:
    """Checks that all of `xs` are Tensors.

    Raises:
      WrongTypeError: one is not; the message shows how to make it a Tensor.
    """
    # An equation of tf.einsum that is given first would else be refused letter by letter.
    if isinstance(xs, (str, Tensor)):
        raise WrongTypeError(
            f"{what}: the inputs are a list of Tensors, such as [x, w], not {reprlib.repr(xs)}. "
            "Names say which dimensions belong together, instead of letters or positions"
        )
    for x in xs:
        if not isinstance(x, Tensor):
            raise WrongTypeError(
                f"{what}: input {reprlib.repr(x)} is a {type(x).__name__}, not a mtf.Tensor. "
                "mtf.import_tf_tensor or mtf.constant makes one"
            )


def check_numbers(what: str, xs: Sequence[Tensor]) -> None:
    """Checks that Tensors have no booleans.

    Raises:
      WrongTypeError: one has.
    """
    check_tensors(what, xs)
    for x in xs:
        if x.dtype.is_bool:
            raise WrongTypeError(
                f"{what} is not defined for booleans, such as those of {tensors_text([x])}. "
                "Numbers are mtf.to_int32(x), mtf.to_float(x); of booleans there are "
                "mtf.logical_and, mtf.logical_or, mtf.equal, mtf.reduce_all, mtf.reduce_any"
            )


def check_real(what: str, xs: Sequence[Tensor]) -> None:
    """Checks that Tensors have neither complex numbers nor booleans.

    Raises:
      WrongTypeError: one has.
    """
    check_numbers(what, xs)
    for x in xs:
        if x.dtype.is_complex:
            raise WrongTypeError(
                f"{what} is not defined for complex numbers, such as those of "
                f"{tensors_text([x])}. Real are mtf.abs(x), mtf.real(x), mtf.imag(x), mtf.angle(x)"
            )


def with_stages(xs: Sequence[Tensor], shape: Shape) -> Shape:
    """Returns a shape with the stages of a pipeline that is being built, if Tensors have them.

    Layers do not know of these, and do not mean them when they sum over all that a shape lacks.
    """
    stages = xs[0].graph.stages if xs else None
    if stages is None:
        return shape
    lost = [d for d in stages.dims if d not in shape and any(d in x.shape for x in xs)]
    return Shape([*lost, *shape])


def without_stages(x: Tensor) -> Shape:
    """Returns the shape of a Tensor as layers of a pipeline that is being built know it."""
    stages = x.graph.stages
    return x.shape if stages is None else x.shape - stages.dims
