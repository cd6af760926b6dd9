"""Tensor and Operation: the values of a graph, and what makes them.

A Tensor is an output of an Operation. Its operators are added by `ops/_elementwise/operators.py`,
its value in eager code by `_lowering/values.py`: both import this module.

A subclass of Operation says what it computes (`lower`), its gradient, which dimensions a layout may
split, and, for predictions, what it costs and how it treats partial sums. Only `lower` is required.
"""

from __future__ import annotations

import copy
import dataclasses
import reprlib
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Optional, Protocol, Union

import numpy as np
import numpy.typing as npt
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import (
    Site,
    WrongTypeError,
    caller_site,
    dims_text,
    tensors_text,
)
from mesh_tensorflow._core.shape import Shape, single_axes

if TYPE_CHECKING:
    from mesh_tensorflow._core.graph import Graph, Mesh, StagesLike
    from mesh_tensorflow._core.shape import Dimension
    from mesh_tensorflow._lowering.lowering import Lowering
    from mesh_tensorflow._mesh.mesh_impl import LaidOutTensor, MeshImpl

# -- tensors

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
# What other libraries have as functions, too: those above, and these.
_FUNCTIONS_INSTEAD = {
    "Adam": "mtf.optimize.AdamWOptimizer(learning_rate)",
    "arange": "mtf.range(mesh, dim, dtype)",
    "array": "mtf.import_tf_tensor(mesh, array, shape)",
    "asarray": "mtf.import_tf_tensor(mesh, array, shape)",
    "bfloat16": "tf.bfloat16",
    "bmm": "mtf.einsum([x, y], output_shape=shape)",
    "cat": "mtf.concat(xs, dim_name)",
    "clamp": "mtf.minimum(mtf.maximum(x, low), high)",
    "clip": "mtf.minimum(mtf.maximum(x, low), high)",
    "clip_by_value": "mtf.minimum(mtf.maximum(x, low), high)",
    "concatenate": "mtf.concat(xs, dim_name)",
    "convert_to_tensor": "mtf.import_tf_tensor(mesh, array, shape)",
    "cross_entropy": "mtf.layers.softmax_cross_entropy_with_logits(logits, targets, vocab_dim)",
    "dot": "mtf.einsum([x, y], output_shape=shape)",
    "expand_dims": "mtf.reshape(x, new_shape); operations broadcast by name, without it",
    "eye": "mtf.one_hot(mtf.range(mesh, rows, tf.int32), columns)",
    "float32": "tf.float32",
    "full": "mtf.constant(mesh, value, shape)",
    "grad": "mtf.gradients([loss], xs)",
    "int32": "tf.int32",
    "jit": "@mtf.function",
    "nn": "mtf.relu, mtf.softmax, ...; layers are in mtf.layers",
    "randn": "mtf.random_normal(mesh, shape)",
    "random": "mtf.random_normal(mesh, shape) or mtf.random_uniform(mesh, shape)",
    "tensor": "mtf.import_tf_tensor(mesh, array, shape)",
    "tensordot": "mtf.einsum([x, y], output_shape=shape)",
}


def written_instead(name: str, function: bool = False) -> str:
    """Returns the end of a sentence: what does here what a name does in other libraries.

    Args:
      name: of an attribute of their tensors.
      function: whether it is one of their functions.
    """
    instead = {**_INSTEAD, **_FUNCTIONS_INSTEAD} if function else _INSTEAD
    return f". Write {instead[name]}" if name in instead else ""


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
        raise AttributeError(f"a mtf.Tensor has no attribute {name!r}{written_instead(name)}")

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


def check_booleans(what: str, xs: Sequence[Tensor]) -> None:
    """Checks that Tensors have booleans.

    Raises:
      WrongTypeError: one has numbers.
    """
    check_tensors(what, xs)
    for x in xs:
        if not x.dtype.is_bool:
            raise WrongTypeError(
                f"{what} is defined for booleans alone, and not for numbers, such as those of "
                f"{tensors_text([x])}. Booleans are mtf.not_equal(x, 0), mtf.greater(x, 0), "
                "mtf.cast(x, tf.bool)"
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


def check_fractions(what: str, xs: Sequence[Tensor], of_complex: bool = False) -> None:
    """Checks that Tensors have dtypes for fractions: floating, or complex if `of_complex`.

    Raises:
      WrongTypeError: one has integers, or other numbers that are refused.
    """
    check = check_numbers if of_complex else check_real
    check(what, xs)
    for x in xs:
        if x.dtype.is_integer:
            raise WrongTypeError(
                f"{what} is not defined for integers, such as those of {tensors_text([x])}, since "
                "its values are fractions. Write mtf.to_float(x)"
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


class LaidOutLike(Protocol):
    """A value spread over a mesh: a LaidOutTensor, or a lazy value that makes one."""

    @property
    def slice_shape(self) -> list[int]:
        """Sizes of one processor's slice."""

    def to_laid_out_tensor(self) -> LaidOutTensor:
        """Returns the slices, computed if need be."""


# -- costs


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective communication.

    Attributes:
      kind: "allreduce", "reduce_scatter", "allconcat", "alltoall" or "shift".
      mesh_axes: the mesh axes that processors communicate along.
      elements: number of input elements, or for an allconcat of output elements, over all
        processors.
      bytes: the size of these elements in bytes.
    """

    kind: str
    mesh_axes: tuple[int, ...]
    elements: int
    bytes: int

    def __post_init__(self) -> None:
        # Axis by axis: what is counted and what a network costs does not know which were joined.
        object.__setattr__(self, "mesh_axes", tuple(single_axes(self.mesh_axes)))


def allreduces(
    mesh_impl: MeshImpl, shape: Shape, dtype: tf.DType, axes: Sequence[int], times: int = 1
) -> tuple[Collective, ...]:
    """Returns the allreduces of a tensor over mesh axes; none if there are no axes.

    Args:
      mesh_impl: a MeshImpl.
      shape: the Shape of the tensor.
      dtype: its dtype.
      axes: mesh axes.
      times: how many tensors of this shape are reduced, one after another.
    """
    elements = mesh_impl.laid_out_size(shape)
    one = Collective("allreduce", tuple(axes), elements, elements * dtype.size)
    return (one,) * times if axes else ()


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one operation, over all processors.

    Attributes:
      flops: floating point operations; a multiply-add counts as two. If processors do not have the
        same work, as many as if all had that of the busiest, for which the others wait.
      bytes: bytes read and written.
      collectives: its own communication. The allreduce of a partial sum is charged to the operation
        that first needs its value.
    """

    flops: int = 0
    bytes: int = 0
    collectives: tuple[Collective, ...] = ()

    def __add__(self, other: Optional[Cost]) -> Cost:
        if other is None:
            return self
        return Cost(
            self.flops + other.flops,
            self.bytes + other.bytes,
            # Side by side and not added up: each collective has a latency of its own.
            self.collectives + other.collectives,
        )


# -- operations


class Loop(NamedTuple):
    """The contents of a loop, and the inputs and outputs of an iteration.

    Attributes:
      operations: the operations of an iteration, in order.
      needed: Tensors whose values are needed at the end of an iteration.
      sums: pairs (output of the loop, Tensor of an iteration) that are summed over iterations.
      iterations: the number of iterations; 1 if it is unknown.
      tape: Tensors of each iteration that are saved for the gradient.
      tape_of: the loop whose tape an iteration reads, or None.
    """

    operations: list[Operation]
    needed: list[Tensor]
    sums: list[tuple[Tensor, Tensor]]
    iterations: float
    tape: list[Tensor]
    tape_of: Optional[Operation]


def with_inner_operations(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Yields operations, each followed by its inner operations.

    Args:
      operations: Operations.
    """
    for op in operations:
        yield op
        yield from with_inner_operations(op.inner_operations)


def depending_on(sources: Iterable[Tensor], operations: Iterable[Operation]) -> set[Tensor]:
    """Returns the Tensors that operations compute from others, and these.

    Args:
      sources: the others.
      operations: Operations in the order of creation.
    """
    dependent = set(sources)
    # In this order, inputs are decided upon before what reads them: one pass finds all.
    for op in operations:
        if any(x in dependent for x in op.inputs):
            dependent.update(op.outputs)
    return dependent


def readers_of(sources: Iterable[Tensor], operations: Sequence[Operation]) -> list[Operation]:
    """Returns the operations that read Tensors, or what is computed from them.

    Args:
      sources: the Tensors.
      operations: Operations in the order of creation.
    """
    dependent = depending_on(sources, operations)
    return [op for op in operations if any(x in dependent for x in op.inputs)]


def needed_operations(
    operations: Sequence[Operation], outputs: Sequence[Tensor]
) -> list[Operation]:
    """Returns the operations that run: what outputs and effects, such as assignments, need.

    Args:
      operations: all Operations of a program, in order.
      outputs: Tensors whose values are needed at the end; if there are none, all operations run.
    """
    if not outputs:
        return list(operations)
    used: set[Union[Tensor, Operation]] = set(outputs)
    needed = []
    for op in reversed(operations):
        if not (op.has_effect or op in used or any(y in used for y in op.outputs)):
            continue
        needed.append(op)
        for each in with_inner_operations([op]):
            used.update(each.inputs, each.dependencies)
            if each.loop is not None:
                used.update(each.loop.needed, (x for _, x in each.loop.sums))
                # A gradient may read what a loop keeps of its iterations, and not its results.
                if each.loop.tape_of is not None:
                    used.add(each.loop.tape_of)
    return needed[::-1]


# The methods whose results `cost_key` stands for.
_COSTS = frozenset(["begun_sums", "cost", "partial_sums"])

PendingSums = Mapping[Tensor, tuple[int, ...]]


class Partial(NamedTuple):
    """What is still to be summed of an output.

    Attributes:
      axes: the mesh axes to sum over.
      same_as: an input, if the output is the same sum.
      scattered: collectives that sum inputs over other axes and split the sums, in one step. They
        are in addition to those of `cost`, which assumes that no input is a partial sum.
    """

    axes: tuple[int, ...] = ()
    same_as: Optional[Tensor] = None
    scattered: tuple[Collective, ...] = ()


# The outputs that are partial sums; None of an operation that needs the values of its inputs.
PartialSums = Optional[Mapping[Tensor, Partial]]


def is_of_package(cls: type) -> bool:
    """Returns whether a class of operations is one of this package, and not a user's."""
    # With the dot, since a user's package may be called mesh_tensorflow_models.
    return cls.__module__.startswith("mesh_tensorflow.")


def gradient_of_output(grad_ys: Sequence[Optional[Tensor]]) -> Tensor:
    """Returns the gradient of the output of an operation that has one.

    Args:
      grad_ys: the argument of its `gradient`.
    """
    dy = grad_ys[0]
    # `mtf.gradients` asks an operation only if some output has a gradient: here, the only one.
    assert dy is not None, "gradients of inputs are asked for without one of the output"
    return dy


class _LeavesNothingBehind(type):
    """Removes an operation from its graph again if its constructor raises.

    `Operation.__init__` adds it. If a constructor raises after that, the graph is restored: the
    operation, its names, and the operations that it created are removed.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        operation: Any = cls.__new__(cls, *args, **kwargs)  # type: ignore[arg-type]
        # Taken here: in Operation.__init__, an unknown number of constructors is in between.
        operation._maker = sys._getframe(1)
        try:
            operation.__init__(*args, **kwargs)
        except BaseException:
            # Without a mark the constructor has failed before it added its operation. What it made
            # earlier was there before the mark, and stays.
            if "_mark" in vars(operation):
                operation._graph.roll_back(operation._mark)
            raise
        return operation


class Operation(metaclass=_LeavesNothingBehind):
    """A node of a Graph: a function of tensors, with its gradient, lowering and cost.

    A subclass calls `super().__init__(inputs, name=...)`, then sets `_outputs`. It implements
    `lower`, and `gradient` if it has one. It declares which dimensions may be split by overriding
    `_unsplittable` or calling one of the `_initialize_*` methods. The defaults of all other methods
    are correct for any class.

    Attributes:
      original: the operation that it is a copy of, or None.
      gradient_of: the operation whose gradient it is part of, or None.
      is_eager: whether it was made in eager code, so that its outputs have values at any time.
      works_by_name: whether only shapes of inputs and outputs name dimensions, in its class.
      takes_padding: whether it can work on slices that end in padding, along every dimension that
        it does not need whole. What is past the end may be anything then, in its inputs as in its
        outputs. Without, it is given whole tensors along what a layout splits unevenly. What a
        class says is not said of a subclass of a user's that lowers otherwise.
      takes_stages: whether a class of a user's, in a layer of a pipeline, works on slices that have
        one dimension more, that of all stages: it finds axes by the names in the shapes of inputs
        and outputs. Without, it is refused there.
      delays_sums: 0 if it needs the values of its inputs; else how many of them have to be partial
        sums over the same axes for its outputs to be partial sums, too.
      has_effect: whether it does something, such as print, and its outputs are its first inputs. It
        does so once a step, also where its function is computed again.
      costs_nothing: whether it neither computes nor moves anything.
      is_of_microbatch: whether the value of a batch is, by definition, the mean of those of its
        microbatches.
      is_on_demand: whether it is lowered only once an output of it is asked for.
      costs_by: the names of attributes that costs and partial sums depend on, besides shapes and
        dtypes; None if that is not said, or `cost_key` says it.
    """

    is_eager = works_by_name = has_effect = takes_padding = costs_nothing = False
    is_of_microbatch = is_on_demand = takes_stages = False
    delays_sums = 0
    costs_by: Optional[tuple[str, ...]] = None

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Resets the cost key of a class that overrides costs or partial sums."""
        super().__init_subclass__(**kwargs)
        # An inherited key would give operations one cost whose class now tells them apart.
        says = not vars(cls).keys().isdisjoint(("cost_key", "costs_by"))
        if not says and not _COSTS.isdisjoint(vars(cls)):
            cls.cost_key, cls.costs_by = Operation.cost_key, None  # type: ignore[method-assign]

    def __init__(
        self, inputs: Sequence[Tensor], mesh: Optional[Mesh] = None, name: Optional[str] = None
    ):
        """Initializes the operation, and adds it to its graph.

        Args:
          inputs: the Tensors it reads.
          mesh: the Mesh it runs on and its outputs are on, if inputs are on several, or there are
            none; that of all inputs if None.
          name: a string, made unique in the graph; the class's name if None.

        Raises:
          ValueError: an input is not a Tensor, or is an inner value of a function with a custom
            gradient; inputs are on several meshes, or there are none, and no mesh is given.
        """
        inputs = list(inputs or ())
        self._check_inputs(inputs, name, mesh)
        if mesh is None:
            if not inputs:
                raise ValueError(
                    f"{type(self).__name__} has no inputs, so its mesh must be given: "
                    "pass mesh=mtf.Mesh(graph, name)"
                )
            mesh = inputs[0].mesh
        self._inputs = inputs
        self._mesh = mesh
        self._graph: Graph = mesh.graph
        # Those whose layers are being built, which its gradient is to keep apart as well.
        self._stages: Optional[StagesLike] = mesh.graph.stages
        self._outputs: list[Tensor] = []
        self.original: Optional[Operation] = None
        self.gradient_of: Optional[Operation] = self._graph.differentiated
        self._splittable_dims: Optional[frozenset[str]] = None
        self._unsplittable_dims: Optional[frozenset[str]] = None
        # Not of the constructors between: the line that made it.
        # Taken out: a frame that is kept would keep all local variables of the user's function.
        maker = self.__dict__.pop("_maker", None)
        self._site: Optional[Site] = (
            caller_site(maker) if self.gradient_of is None else self.gradient_of._site
        )
        # Before the name is taken, so that a constructor that fails later gives it back.
        self._mark = self._graph.mark()
        self._name = self._graph.unique_name(type(self).__name__ if name is None else name)
        # Here, not when all constructors are done: subclasses that were written for the classic
        # look for themselves in graph.operations as soon as this returns.
        self._graph.register(self)

    def _check_inputs(
        self, inputs: Sequence[Tensor], name: Optional[str], mesh: Optional[Mesh] = None
    ) -> None:
        what = name or type(self).__name__
        check_tensors(what, inputs)
        for x in inputs:
            # Gradients flow through that function as a whole: a use of an inner value gets none.
            if not x.usable:
                raise ValueError(
                    f"{what}: {x.to_string} is an inner value of a function with a custom gradient "
                    "and cannot be used outside; return it from that function"
                )
        if mesh is None and any(x.mesh is not inputs[0].mesh for x in inputs):
            if len({x.mesh.name for x in inputs}) == 1:
                raise ValueError(
                    f"{what}: inputs must be on one mesh, and those of "
                    f"{', '.join(x.name for x in inputs)} are different Mesh objects of one name, "
                    f"{inputs[0].mesh.name!r}. Make one mtf.Graph and one mtf.Mesh for a program, "
                    "such as that of another Tensor, x.mesh"
                )
            raise ValueError(
                f"{what}: inputs must be on one mesh: "
                f"{', '.join(f'{x.name} is on {x.mesh.name!r}' for x in inputs)}. An operation of "
                "your own that moves values between meshes gives the mesh of its outputs: "
                "super().__init__(inputs, mesh=mesh)"
            )
        self._check_stages(what, inputs)

    def _check_stages(self, what: str, inputs: Sequence[Tensor]) -> None:
        """Checks that slices of all stages of a pipeline are not given to what counts their axes.

        Raises:
          ValueError: they would be given to a class of a user's that does not say it takes them.
        """
        for x in inputs:
            stages = x.graph.stages
            if stages is None or not any(d in x.shape for d in stages.dims):
                continue
            if not self.takes_stages and "lower" in self._own_names():
                cls = type(self).__name__
                raise ValueError(
                    f"{what}: an operation of your own, {cls}, would lower to slices of "
                    f"{dims_text(stages.dims)}, all stages of a pipeline at once, of "
                    f"{tensors_text([x])}. Write it as mtf.slicewise(fn, xs), whose function is "
                    "called for each stage by itself; or, if its constructor and `lower` find each "
                    "axis by name in the shapes of inputs and outputs, set takes_stages = True in "
                    f"the class {cls}"
                )

    @property
    def graph(self) -> Graph:
        """The Graph it belongs to."""
        return self._graph

    @property
    def mesh(self) -> Mesh:
        """The Mesh it runs on."""
        return self._mesh

    @property
    def name(self) -> str:
        """Its name, unique in the graph."""
        return self._name

    @property
    def site(self) -> Optional[Site]:
        """The line of the user's program that made it; a `Site`, with `file` and `line`.

        That of a gradient is the line of the operation that it is the gradient of, `gradient_of`,
        and that of a copy, such as one that is recomputed, the line of the original.
        """
        return self._site

    @property
    def inputs(self) -> list[Tensor]:
        """A new list of its inputs."""
        return list(self._inputs)

    @property
    def outputs(self) -> list[Tensor]:
        """A new list of its outputs."""
        return list(self._outputs)

    @property
    def to_string(self) -> str:
        """One line with name, inputs and outputs."""
        return (
            f"{type(self).__name__}[{self.name}: Inputs=({tensors_text(self._inputs)}) "
            f"Outputs=({tensors_text(self._outputs)})]"
        )

    def __repr__(self) -> str:
        return self.to_string

    # -- which dimensions may be split

    @property
    def splittable_dims(self) -> frozenset[str]:
        """Names of its dimensions that it can work on parts of."""
        return self._split_rules()[0]

    @property
    def unsplittable_dims(self) -> frozenset[str]:
        """Names of its dimensions that it cannot work on parts of."""
        return self._split_rules()[1]

    def _dimension_names(self) -> frozenset[str]:
        return frozenset(n for t in self._inputs + self._outputs for n in t.shape.dimension_names)

    def _unsplittable(self) -> Iterable[str]:
        """Returns the names of dimensions that it needs whole; none by default."""
        return ()

    def _split_rules(self) -> tuple[frozenset[str], frozenset[str]]:
        """Returns the names that may be split and those that may not, declared in either way."""
        splittable, unsplittable = self._splittable_dims, self._unsplittable_dims
        names = self._dimension_names()
        if unsplittable is None:
            unsplittable = (
                frozenset(self._unsplittable()) if splittable is None else names - splittable
            )
        return names - unsplittable if splittable is None else splittable, unsplittable

    def _rules_are_of_base(self) -> bool:
        """Returns whether it declares nothing, and lowers in another way than a class of ours."""
        if self._splittable_dims is not None or self._unsplittable_dims is not None:
            return False
        own = self._own_names()
        return "lower" in own and own.isdisjoint(("_unsplittable", "unsplittable_dims"))

    def _own_names(self) -> set[str]:
        """Returns the names that classes of the user's define, before the first of this package."""
        names: set[str] = set()
        for cls in type(self).__mro__:
            if is_of_package(cls):
                break
            names.update(vars(cls))
        return names

    def _initialize_splittable_and_unsplittable_dims(
        self, default_splittability: str, exception_dims_iterable: Optional[Iterable[str]] = None
    ) -> tuple[frozenset[str], frozenset[str]]:
        """Declares all dimensions "splittable" or "unsplittable", with exceptions.

        Args:
          default_splittability: "splittable" or "unsplittable".
          exception_dims_iterable: names of dimensions that are declared the opposite.

        Returns:
          (splittable names, unsplittable names).

        Raises:
          ValueError: `default_splittability` is neither.
        """
        names = self._dimension_names()
        exceptions = names & frozenset(exception_dims_iterable or ())
        rest = names - exceptions
        if default_splittability == "splittable":
            self._splittable_dims, self._unsplittable_dims = rest, exceptions
        elif default_splittability == "unsplittable":
            self._splittable_dims, self._unsplittable_dims = exceptions, rest
        else:
            raise ValueError(
                'default_splittability should be either "splittable" or "unsplittable" but was '
                f"{default_splittability!r}"
            )
        return self._splittable_dims, self._unsplittable_dims

    def _initialize_all_dimensions_as_splittable(self) -> tuple[frozenset[str], frozenset[str]]:
        """Declares that every dimension may be split.

        Returns:
          (names of all dimensions, an empty set).
        """
        return self._initialize_splittable_and_unsplittable_dims("splittable")

    @property
    def counts_on_slices(self) -> bool:
        """Whether it may count on a slice for each processor: processors are not merged then."""
        return not is_of_package(type(self))

    def needs_whole(self, mesh_impl: MeshImpl) -> Collection[str]:
        """Returns the names of the dimensions that it cannot work on parts of.

        A layout may split them all the same: then its inputs are moved to another layout, and its
        outputs back.

        Args:
          mesh_impl: the requested MeshImpl; an operation may be able to work on large parts alone.
        """
        # What a class says of how it lowers is not said of a user's subclass that lowers otherwise.
        return frozenset() if self._rules_are_of_base() else self.unsplittable_dims

    def is_given_padding(self) -> bool:
        """Returns `takes_padding`, or False of a user's subclass that lowers otherwise."""
        own = self._own_names()
        return self.takes_padding and ("lower" not in own or "takes_padding" in own)

    def filling(self, x: Tensor) -> tuple[Collection[Dimension], float]:
        """Returns the dimensions of an input that it reduces, and what padding there has to be.

        Args:
          x: an input.

        Returns:
          (Dimensions, the number by which nothing of the result changes).
        """
        return (), 0

    # -- gradient

    @property
    def has_gradient(self) -> bool:
        """Whether some input and some output are floating or complex."""
        return any(is_differentiable(x.dtype) for x in self._inputs) and any(
            is_differentiable(y.dtype) for y in self._outputs
        )

    def gradient(self, unused_grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Returns the gradients of the inputs, given those of the outputs.

        Args:
          unused_grad_ys: a Tensor or None for each output.

        Returns:
          A Tensor or None for each input.
        """
        raise NotImplementedError(f"{type(self).__name__} has no gradient: {self}")

    @property
    def stages_of_gradient(self) -> Optional[StagesLike]:
        """The stages of the pipeline whose layer gave its gradient; None of gradients of ours.

        A layer knows of no stages, nor does what it says of a gradient. Ours go by shapes.
        """
        return self._stages if "gradient" in self._own_names() else None

    # -- lowering

    def lower(self, lowering: Lowering) -> None:
        """Creates the TensorFlow operations, and passes the lowered outputs to `lowering`."""
        raise NotImplementedError(f"{type(self).__name__} cannot be lowered: {self}")

    def _lower_slices(self, lowering: Lowering, fn: Callable[..., Any], *more: Any) -> None:
        """Sets the lowered outputs to what a function returns of the slices of all inputs.

        Args:
          lowering: a Lowering.
          fn: takes a slice of each input, and of each of `more`; returns that of the output, or a
            tuple with one for each output.
          *more: further laid-out values.
        """
        values = [lowering.tensors[x] for x in self._inputs]
        results = lowering.mesh_impl(self).slicewise(fn, *values, *more)
        # A function with one output may return it in a tuple or as it is.
        several = len(self._outputs) > 1 or isinstance(results, tuple)
        for y, value in zip(self._outputs, results if several else (results,)):
            lowering.set_tensor_lowering(y, value)

    def _added_to(self, value: LaidOutLike, lowering: Lowering) -> Optional[LaidOutLike]:
        """Returns a lowered value with its output added, in one memory; or None, by default.

        Args:
          value: a laid-out value of the shape of its output; a partial sum only if its own output
            is one over the same mesh axes.
          lowering: a Lowering.
        """
        return None

    # -- inner operations, order, and rewriting

    @property
    def dependencies(self) -> Sequence[Tensor | Operation]:
        """What it waits for besides its inputs; nothing by default."""
        return ()

    @property
    def loop(self) -> Optional[Loop]:
        """Its contents, if it is a loop; None by default."""
        return None

    @property
    def inner_operations(self) -> Sequence[Operation]:
        """The operations that it lowers itself, such as those of a loop; none by default."""
        loop = self.loop
        return () if loop is None else loop.operations

    def replace_inputs(self, mapping: Mapping[Tensor, Tensor]) -> None:
        """Replaces Tensors, in its inputs and wherever else it refers to them.

        The default handles attributes that are Tensors, or lists or tuples of them; a class that
        stores them otherwise overrides this. It is called separately for inner operations.

        Args:
          mapping: from Tensors to their replacements.
        """
        # Python lets attributes that exist be set while their dictionary is iterated.
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, mapping.get(value, value))
            # Of exactly these types: a Shape or a named tuple could not be built again from its
            # elements.
            elif (
                type(value) in (list, tuple)
                and name != "_outputs"
                and any(isinstance(x, Tensor) and x in mapping for x in value)
            ):
                new = (mapping.get(x, x) if isinstance(x, Tensor) else x for x in value)
                setattr(self, name, type(value)(new))

    def _copy_outputs(
        self, original: Operation, shape_of: Callable[[Shape], Shape] = lambda shape: shape
    ) -> None:
        """Gives a copy of an operation, which has its own name already, outputs of its own.

        Args:
          original: the operation that it is a copy of.
          shape_of: returns the shape of an output for that of the original's.
        """
        # A list of its own: that of a shallow copy is the original's, which would grow.
        self._outputs = []
        for i, y in enumerate(original.outputs):
            # A copy of the Tensor keeps what was noted in it, such as `made_of` of masks.
            new = copy.copy(y)
            new._operation, new._name, new._shape = self, f"{self._name}:{i}", shape_of(y.shape)
            new.usable = True
            self._outputs.append(new)

    def cloned_from(self, original: Operation, mapping: Mapping[Tensor, Tensor]) -> None:
        """Updates a new copy of `original`, whose inputs have been replaced already.

        A class that refers to operations overrides this, to refer to their copies.

        Args:
          original: the operation that was copied.
          mapping: from tensors of the originals to those of the copies.
        """

    # -- cost

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """Returns the cost on `mesh_impl`, given inputs that are not partial sums.

        It depends on shapes and the layout alone. The default is that of an elementwise function.
        """
        if self.costs_nothing:
            return Cost()
        return Cost(
            # One operation for each element of an output; all tensors are read or written once.
            flops=sum(mesh_impl.laid_out_size(t.shape) for t in self._outputs),
            bytes=sum(
                mesh_impl.laid_out_size(t.shape) * t.dtype.size
                for t in self._inputs + self._outputs
            ),
        )

    def collectives(self, mesh_impl: MeshImpl) -> tuple[Collective, ...]:
        """Returns the collectives of its cost, which a Lowering counts."""
        return self.cost(mesh_impl).collectives

    def cost_key(self) -> Hashable:
        """Returns what its cost and partial sums depend on, besides class, shapes and dtypes.

        Operations of one class with equal keys, shapes and dtypes have the same cost under every
        layout. The default are the values of `costs_by`, None if that is empty; or, for a class
        that overrides costs or partial sums without it, the operation itself, which equals no
        other.
        """
        if self.costs_by is not None:
            return tuple(getattr(self, name) for name in self.costs_by) or None
        # Of a class that says nothing of its costs, shapes and dtypes determine the default ones.
        return self if any(map(self._has_own, _COSTS)) else None

    def _has_own(self, method: str) -> bool:
        """Returns whether its class overrides a method."""
        return getattr(type(self), method) is not getattr(Operation, method)

    # -- memory

    @property
    def takes_memory(self) -> bool:
        """Whether its outputs are stored in memory of their own; True by default."""
        return True

    def passes_on(self, split: Collection[str]) -> Mapping[Tensor, Tensor]:
        """Returns the outputs that are identical to inputs, with these inputs.

        Args:
          split: names of the dimensions that a layout may split.
        """
        return {}

    # -- partial sums

    def partial_sums(self, mesh_impl: MeshImpl, pending: PendingSums) -> PartialSums:
        """Returns the outputs that are partial sums; None if it needs the values of its inputs.

        Args:
          mesh_impl: a MeshImpl.
          pending: the inputs that are partial sums, each with the mesh axes to sum over. Without
            any, what is returned are the sums that begin here.
        """
        if pending:
            return None
        begun = self.begun_sums(mesh_impl)
        # Sorted as in lowering, where sums over equal axes are added before they are communicated.
        return {y: Partial(tuple(sorted(axes))) for y, axes in begun.items() if axes}

    def sums_as_lowered(self, mesh_impl: MeshImpl, pending: PendingSums) -> PartialSums:
        """Returns `partial_sums`, or the default of a user's subclass that lowers otherwise.

        Args:
          mesh_impl: a MeshImpl.
          pending: the inputs that are partial sums, each with the mesh axes to sum over.
        """
        own = self._own_names()
        if "lower" in own and own.isdisjoint(("begun_sums", "partial_sums")):
            # Its `lower` may have summed them. A sum that it leaves pending all the same is
            # computed where it is used.
            return None if pending else {}
        return self.partial_sums(mesh_impl, pending)

    def begun_sums(self, mesh_impl: MeshImpl) -> Mapping[Tensor, Sequence[int]]:
        """Returns the mesh axes to sum outputs over, of an operation that no partial sum enters.

        Args:
          mesh_impl: a MeshImpl.

        Returns:
          A dictionary from outputs to mesh axes; nothing by default.
        """
        return {}

    def may_begin_sum(self, split: Collection[str]) -> bool:
        """Returns whether an output may be a partial sum, under some layout, if no input is.

        Too often is allowed, and too rarely is not.

        Args:
          split: names of the dimensions that a layout may split.
        """
        begins = self._has_own("begun_sums") or self._has_own("partial_sums")
        if self.delays_sums or not begins:
            return False
        # A sum is over what an output lacks; of loops, sums begin inside.
        return bool(self.inner_operations) or any(
            name in split and name not in y.shape.dimension_names
            for y in self._outputs
            for name in self._dimension_names()
        )
