"""Operations that compute each element, or each slice, by itself; and the dtypes of results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import WrongTypeError, slip, tensors_text
from mesh_tensorflow._core.layout import padded_dims
from mesh_tensorflow._core.operation import Operation, Tensor, check_tensors, is_differentiable
from mesh_tensorflow._core.shape import (
    Dimension,
    Shape,
    ShapeLike,
    convert_to_dimension,
    convert_to_shape,
    is_dimension,
    list_product,
)
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._mesh.slice_functions import slices_as_made

if TYPE_CHECKING:
    from mesh_tensorflow._core.graph import StagesLike
    from mesh_tensorflow._lowering.lowering import Lowering

__all__ = ["GenericGradOperation", "SlicewiseOperation", "cwise", "slicewise"]


# From the dtype of their parts; TensorFlow has no complex numbers with parts of other dtypes.
COMPLEX = {tf.float32: tf.complex64, tf.float64: tf.complex128}


def is_complex(x: Tensor) -> bool:
    """Returns whether a Tensor has complex numbers."""
    check_tensors("complex numbers", [x])
    return x.dtype.is_complex


def complex_dtype(what: str, x: Tensor) -> tf.DType:
    """Returns the dtype of complex numbers whose parts are like the numbers of a Tensor.

    Raises:
      WrongTypeError: there is none.
    """
    check_tensors(what, [x])
    if x.dtype not in COMPLEX:
        raise WrongTypeError(
            f"{what}: the parts of complex numbers are float32 or float64, and not as those of "
            f"{tensors_text([x])}. Write mtf.cast(x, tf.float32)"
        )
    return COMPLEX[x.dtype]


PACKAGE = "mesh_tensorflow."
# Whose functions work on any part of what may be split, and on several parts at once.
_LIBRARIES = (PACKAGE, "tensorflow.", "keras.")


def is_of_library(fn: Any, *libraries: str) -> bool:
    """Returns whether a function is one of libraries: TensorFlow, Keras or this package if none."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return (getattr(fn, "__module__", None) or "").startswith(libraries or _LIBRARIES)


def _stages_apart(fn: Any, xs: Sequence[Tensor]) -> Optional[Dimension]:
    """Returns the dimension of stages that Tensors have and that a function does not know of.

    A layer of a pipeline is written for one stage, and a function of positions, such as a sum over
    axis 1, would take another dimension in the slices of all stages. What this package applies
    finds its axes in shapes that have the stages.
    """
    stages = xs[0].graph.stages
    if stages is None or is_of_library(fn, PACKAGE):
        return None
    [stage] = stages.dims
    return stage if any(stage in x.shape for x in xs) else None


class SlicewiseOperation(Operation):
    """Applies a TensorFlow function to the slices of each processor.

    This is correct only if the function works on the parts of a split dimension independently, so
    only dimensions declared splittable may be split.

    Attributes:
      is_elementwise: whether each element of a result depends on the same element of the first
        input, and on numbers beside it.
      stages_apart: the Dimension of stages of a pipeline, each of which the function is called for
        by itself; None outside of pipelines, and if the function finds its axes in shapes.
    """

    works_by_name = True
    takes_padding = True

    def __init__(
        self,
        tf_fn: Callable,
        inputs: Sequence[Tensor],
        output_shapes: Sequence[Shape],
        output_dtypes: Sequence[tf.DType],
        splittable_dims: Sequence[Dimension],
        grad_function: Optional[Callable] = None,
        name: Optional[str] = None,
        is_elementwise: bool = False,
    ):
        """Creates the operation.

        Args:
          tf_fn: takes a tf.Tensor for each input; returns one, or a tuple of them.
          inputs: Tensors.
          output_shapes: Shapes, in a pipeline with or without the stages.
          output_dtypes: tf.DTypes.
          splittable_dims: the Dimensions along which `tf_fn` works on parts independently.
          grad_function: takes this operation and a gradient for each output; returns a list of
            gradients of the inputs. If None, TensorFlow's own gradient of `tf_fn`.
          name: a string or None.
          is_elementwise: see the attributes.
        """
        super().__init__(inputs, name=name or "slicewise")
        self.is_elementwise = is_elementwise
        # With equal shapes no position matters to a function of elements.
        by_element = is_elementwise and all(x.shape == inputs[0].shape for x in inputs)
        stage = self.stages_apart = None if by_element else _stages_apart(tf_fn, inputs)
        self._tf_fn = tf_fn
        self._grad_function = grad_function
        self._outputs = [
            Tensor(self, Shape([stage, *s]) if stage and stage not in s else s, dtype, index=i)
            for i, (s, dtype) in enumerate(zip(output_shapes, output_dtypes, strict=True))
        ]
        # Whole by default: nothing is known of what the function does along a dimension.
        apart = [] if stage is None else [stage]
        self._initialize_splittable_and_unsplittable_dims(
            "unsplittable", [d.name for d in (*splittable_dims, *apart)]
        )

    @property
    def has_gradient(self) -> bool:
        """Whether it has a gradient function, or some input and some output are floating."""
        return self._grad_function is not None or super().has_gradient

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Calls the given gradient function, or differentiates the TensorFlow function."""
        if self._grad_function is not None:
            return self._grad_function(self, *grad_ys)
        return GenericGradOperation(self, grad_ys).outputs

    @property
    def stages_of_gradient(self) -> Optional[StagesLike]:
        """Those of a user's gradient function; see Operation."""
        if self._grad_function is None:
            return super().stages_of_gradient
        return None if is_of_library(self._grad_function, PACKAGE) else self._stages

    @property
    def counts_on_slices(self) -> bool:
        """Whether processors must not be merged: it has a function of the user's own.

        Published programs take the only block of a slice, as in `x[:, 0, 0, 0]`, read sizes of
        slices, or number what is in one: of the joint slice of two processors that is another.
        """
        own = not self.is_elementwise and not is_of_library(self._tf_fn)
        return own or super().counts_on_slices

    def lower(self, lowering: Lowering) -> None:
        """Applies the TensorFlow function to each slice."""
        self._lower_slices(lowering, self.function_on(lowering.requested_impl(self)))

    def function_on(self, mesh_impl: MeshImpl) -> Callable:
        """Returns the function, for what `slicewise` of a mesh gives it.

        Args:
          mesh_impl: the requested MeshImpl.
        """
        if not self.counts_on_slices:
            return self._checked_results
        shapes = [[x.shape for x in xs] for xs in (self._inputs, self._outputs)]
        return mesh_impl.of_slices(self._checked_results, *shapes)

    def _of_each_stage(self, slices: Sequence[tf.Tensor]) -> Any:
        """Returns what the function returns for slices, each stage by itself."""
        stage = self.stages_apart
        if stage is None:
            return self._tf_fn(*slices)
        axes = [x.shape.dims.index(stage) if stage in x.shape else None for x in self._inputs]
        [count] = {s.shape[a] for s, a in zip(slices, axes) if a is not None}
        stages_apart = [
            [s] * count if a is None else tf.unstack(s, count, axis=a) for s, a in zip(slices, axes)
        ]
        results = [self._tf_fn(*of_stage) for of_stage in zip(*stages_apart)]
        outputs = [y.shape.dims.index(stage) for y in self._outputs]
        of_outputs = list(zip(*(f if isinstance(f, tuple) else (f,) for f in results)))
        if len(of_outputs) != len(outputs) or not all(map(tf.is_tensor, sum(of_outputs, ()))):
            return results[0]  # of which the error tells
        stacked = [tf.stack(list(ys), axis=a) for ys, a in zip(of_outputs, outputs)]
        return tuple(stacked) if isinstance(results[0], tuple) else stacked[0]

    def _checked_results(self, *slices: tf.Tensor) -> Any:
        """Returns what the function returns for slices, which is as was declared."""
        results = self._of_each_stage(slices)
        values, ys = results if isinstance(results, tuple) else (results,), self._outputs
        if len(values) != len(ys) or not all(tf.is_tensor(y) for y in values):
            expected = "a tf.Tensor" if len(ys) == 1 else f"a tuple of {len(ys)} tf.Tensors"
            kinds = ", ".join(type(y).__name__ for y in values)
            got = f"({kinds})" if isinstance(results, tuple) else kinds
            raise WrongTypeError(
                f"{self.name}: for its {'output' if len(ys) == 1 else 'outputs'} "
                f"{tensors_text(ys)} the function must return {expected}, and it returned {got}"
            )
        for y, value in zip(ys, values):
            if value.dtype.base_dtype != y.dtype:
                # Not an error: published programs declare floating numbers for indices, and only
                # give them to other functions of TensorFlow.
                given_name, at = value.dtype.base_dtype.name, self.site or self.name
                slip(
                    f"{self.name} ({at}): the function returns {given_name} for {y.name} "
                    f"{y.shape}, which was declared as {y.dtype.name}. Operations and gradients go "
                    f"by what was declared: give output_dtype=tf.{given_name}, or "
                    f"let the function return tf.cast(y, tf.{y.dtype.name})",
                    # By the line: a function of the user may make many such operations.
                    key=f"dtype of results/{at!r}/{given_name}",
                )
        return results


class GenericGradOperation(Operation):
    """The gradients of an operation's floating inputs, by TensorFlow, slice by slice.

    A subclass may lower in another way; it finds the operation in `_forward_op`, and the gradients
    of its outputs in `_grad_ys`.
    """

    takes_padding = True
    # How many inputs and outputs the function has, and which of these have gradients.
    costs_by = ("_num_forward", "_given")

    def __init__(
        self,
        forward_op: Operation,
        grad_ys: Sequence[Optional[Tensor]],
        name: Optional[str] = None,
    ):
        """Creates the operation.

        Args:
          forward_op: a SlicewiseOperation, or an operation that lowers to slices of its inputs.
          grad_ys: a Tensor or None for each of its outputs.
          name: a string or None.
        """
        self._forward_op = forward_op
        self._grad_ys = list(grad_ys)
        self._given = tuple(i for i, dy in enumerate(grad_ys) if dy is not None)
        self._num_forward = (len(forward_op.inputs), len(forward_op.outputs))
        # The outputs are inputs here, as TensorFlow differentiates the very nodes that made them.
        inputs = forward_op.inputs + forward_op.outputs + [dy for dy in grad_ys if dy is not None]
        super().__init__(inputs, mesh=inputs[0].mesh, name=name or "generic_grad")
        # Integer inputs have no gradient; their outputs are zeros.
        self._outputs = [
            Tensor(self, x.shape, x.dtype, index=i) for i, x in enumerate(forward_op.inputs)
        ]
        # An operation may move values between meshes; a gradient is on the mesh of its input.
        for y, x in zip(self._outputs, forward_op.inputs):
            y._mesh = x.mesh

    @property
    def forward_op(self) -> Operation:
        """The operation whose gradients these are."""
        return self._forward_op

    def needs_whole(self, mesh_impl: MeshImpl) -> Collection[str]:
        """Returns those of the function, and padded ones that a tensor lacks, which are summed."""
        tensors = self._inputs + self._outputs
        dims = padded_dims(mesh_impl, dict.fromkeys(d for t in tensors for d in t.shape))
        summed = (d.name for d in dims if any(d not in t.shape for t in tensors))
        return {*super().needs_whole(mesh_impl), *summed}

    def _unsplittable(self) -> Collection[str]:
        return self._forward_op.unsplittable_dims

    def _split_over(self, mesh_impl: MeshImpl, shape: Shape) -> set[int]:
        return set(mesh_impl.splitting_axes(shape))

    def _summed_axes(self, mesh_impl: MeshImpl, x: Tensor) -> list[int]:
        """Returns the mesh axes to sum over: those that split outputs but not `x`."""
        ys = self._forward_op.outputs
        # Where x is replicated, each processor finds only the gradient through its own part of the
        # outputs. The gradient of x is the sum of these.
        over: set[int] = set().union(*(self._split_over(mesh_impl, y.shape) for y in ys))
        return (
            sorted(over - self._split_over(mesh_impl, x.shape))
            if is_differentiable(x.dtype)
            else []
        )

    def lower(self, lowering: Lowering) -> None:
        """Differentiates the TensorFlow function slice by slice."""
        mesh_impl = lowering.mesh_impl(self)
        num_x, num_y = self._num_forward
        fn = getattr(self._forward_op, "_tf_fn", None)
        if isinstance(self._forward_op, SlicewiseOperation):
            fn = self._forward_op.function_on(lowering.requested_impl(self))
        if fn is None and tf.executing_eagerly():
            raise NotImplementedError(
                f"{self.name} differentiates the nodes that {self._forward_op.name} became in a "
                "graph of TensorFlow, which eager code has not: lower the program within "
                f"@mtf.function, or give {type(self._forward_op).__name__} another gradient"
            )
        # Outputs that were moved come from collectives, through which TensorFlow has no gradients.
        anew = fn is not None and lowering.in_other_layout
        summed = [self._summed_axes(mesh_impl, y) for y in self._outputs]
        # An output that is equal on the processors of such a sum would be counted once for each.
        shares = [self._share(mesh_impl, self._forward_op.outputs[i], summed) for i in self._given]

        def grad_fn(*values: tf.Tensor) -> tuple:
            xs, ys, dys = values[:num_x], values[num_x : num_x + num_y], values[num_x + num_y :]
            dys = tuple(dy if share == 1 else dy / share for dy, share in zip(dys, shares))
            outputs = [ys[i] for i in self._given]
            return tuple(_tf_gradients(fn, xs, outputs, dys, self._given, anew))

        with slices_as_made():  # of which the outputs are computed
            values = mesh_impl.slicewise(grad_fn, *[lowering.tensors[x] for x in self.inputs])
        for y, value, axes in zip(self.outputs, values, summed):
            lowering.set_partial_sum(y, value, axes, "slicewise_op")

    def _share(self, mesh_impl: MeshImpl, y: Tensor, summed: Sequence[Sequence[int]]) -> int:
        """Returns how many of the processors to sum over have the same slice of an output."""
        equal = {axis for axes in summed for axis in axes} - self._split_over(mesh_impl, y.shape)
        return list_product(mesh_impl.shape[axis].size for axis in equal)

    def begun_sums(self, mesh_impl: MeshImpl) -> dict[Tensor, list[int]]:
        """Gradients of inputs that are replicated where an output is split are partial."""
        return {y: self._summed_axes(mesh_impl, y) for y in self._outputs}


def _tf_gradients(
    fn: Optional[Callable],
    xs: Sequence[tf.Tensor],
    ys: Sequence[tf.Tensor],
    dys: Sequence[tf.Tensor],
    given: Sequence[int],
    anew: bool,
) -> list[tf.Tensor]:
    """Returns the partial derivatives with respect to each argument of `fn`.

    Where `anew` is true, `fn` is computed again for them. Two of `xs` may be one tf.Tensor, or one
    may be computed from the other: gradients do not flow from one to the other.
    """
    # By identity, as tf.Tensors may compare their values, and not be hashable.
    distinct = len({id(x) for x in xs}) == len(xs)
    grads: list = [None] * len(xs)
    # A tf.Tensor that is given twice has one gradient there, which is that of both together.
    if distinct and not tf.executing_eagerly() and not anew:
        grads = tf.gradients(ys, xs, grad_ys=list(dys), stop_gradients=xs)
    missing = any(g is None and is_differentiable(x.dtype) for g, x in zip(grads, xs))
    if missing and fn is not None:
        # The forward value was computed from other copies of them (a constant, a cloned input).
        floating = [x for x in xs if is_differentiable(x.dtype)]
        # A tape has one gradient for a tf.Tensor: copies tell apart one that is given twice.
        copies = floating if distinct else [tf.identity(x) for x in floating]
        with tf.GradientTape() as tape:
            tape.watch(copies)
            values = iter(copies)
            again = fn(*[next(values) if is_differentiable(x.dtype) else x for x in xs])
        again = again if isinstance(again, tuple) else (again,)
        of_copies = iter(tape.gradient([again[i] for i in given], copies, list(dys)))
        again_grads = [next(of_copies) if is_differentiable(x.dtype) else None for x in xs]
        grads = [a if g is None else g for a, g in zip(again_grads, grads)]
    return [tf.zeros_like(x) if g is None else g for x, g in zip(xs, grads)]


def _some_tensors(what: str, xs: Sequence[Tensor]) -> list[Tensor]:
    """Returns a list of Tensors, which must not be empty."""
    check_tensors(what, xs)
    if not xs:
        raise ValueError(
            f"{what}: the list of Tensors is empty; the first gives the mesh, and the shape and "
            "dtype of the result. mtf.import_tf_tensor makes a Tensor of no others"
        )
    return list(xs)


def slicewise(
    tf_fn: Callable,
    xs: Sequence[Tensor],
    output_shape: Union[ShapeLike, Sequence[ShapeLike], None] = None,
    output_dtype: Union[tf.DType, Sequence[tf.DType], None] = None,
    splittable_dims: Optional[Sequence[Dimension]] = None,
    grad_function: Optional[Callable] = None,
    name: Optional[str] = None,
) -> Any:
    """Applies a TensorFlow function slice by slice.

    >>> x = mtf.constant(mesh, [[3.0, 1.0, 2.0]], "batch:1,d:3")
    >>> y = mtf.slicewise(tf.sort, [x], splittable_dims=x.shape.dims[:1])
    >>> print(y.numpy())
    [[1. 2. 3.]]

    Args:
      tf_fn: takes a tf.Tensor for each of `xs`; returns one, or a tuple of them.
      xs: Tensors.
      output_shape: a Shape, or a list of Shapes for several outputs; the shape of the first input
        if None.
      output_dtype: a dtype, or a list of dtypes; the dtype of the first input if None.
      splittable_dims: the Dimensions along which `tf_fn` works on parts independently; no
        other may be split.
      grad_function: takes the operation and a gradient for each output; returns a list of
        gradients of the inputs. If None, TensorFlow's own gradient of `tf_fn`.
      name: a string or None.

    Returns:
      A Tensor, or a tuple of them for several outputs.

    Raises:
      ValueError: there are no Tensors, or `splittable_dims` are no Dimensions.
    """
    xs = _some_tensors(name or "slicewise", xs)
    splittable_dims = [convert_to_dimension(d) for d in splittable_dims or ()]
    shape_or_shapes: Any = output_shape  # a shape may be a list, too
    several = isinstance(shape_or_shapes, (list, tuple)) and any(
        isinstance(s, (Shape, list, tuple)) and not is_dimension(s) for s in shape_or_shapes
    )
    if several:
        shapes = [convert_to_shape(s) for s in shape_or_shapes]
    else:
        shapes = [xs[0].shape if shape_or_shapes is None else convert_to_shape(shape_or_shapes)]
    if isinstance(output_dtype, (list, tuple)):
        dtypes = [tf.as_dtype(t) for t in output_dtype]
    else:
        dtypes = [xs[0].dtype if output_dtype is None else tf.as_dtype(output_dtype)] * len(shapes)
    op = SlicewiseOperation(tf_fn, xs, shapes, dtypes, splittable_dims, grad_function, name)
    return tuple(op.outputs) if len(op.outputs) > 1 else op.outputs[0]


def cwise(
    tf_fn: Callable,
    xs: Sequence[Tensor],
    output_dtype: Optional[tf.DType] = None,
    grad_function: Optional[Callable] = None,
    name: Optional[str] = None,
) -> Tensor:
    """Applies an elementwise TensorFlow function whose result has the shape of the first input.

    The function broadcasts or reshapes the other inputs to the shape of the first. The dimensions
    of the first input may be split; those that only other inputs have may not.

    >>> x = mtf.constant(mesh, [0.0, 1.0], "d:2")
    >>> print(np.round(mtf.cwise(tf.math.erf, [x]).numpy(), 3))
    [0.    0.843]

    Args:
      tf_fn: takes a tf.Tensor for each of `xs`; returns one with the shape of the first.
      xs: Tensors.
      output_dtype: a dtype; the dtype of the first input if None.
      grad_function: takes the operation and the gradient of the output; returns a list of
        gradients of the inputs. If None, TensorFlow's own gradient of `tf_fn`.
      name: a string or None.

    Returns:
      A Tensor with the shape of the first input.
    """
    xs = _some_tensors(name or "cwise", xs)
    for x in xs[1:]:
        if x.shape != xs[0].shape and set(x.shape) == set(xs[0].shape):
            slip(
                f"{name or 'cwise'}: {x.name} {x.shape} has the dimensions of {xs[0].name} "
                f"{xs[0].shape} in another order, and the function sees them side by side by "
                f"position, not by name. Give mtf.transpose({x.name}, {xs[0].shape})"
            )
    shape, dtype = xs[0].shape, tf.as_dtype(output_dtype or xs[0].dtype)
    op = SlicewiseOperation(
        tf_fn,
        xs,
        [shape],
        [dtype],
        shape.dims,
        grad_function,
        name or "cwise",
        is_elementwise=True,
    )
    return op.outputs[0]
