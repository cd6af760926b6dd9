"""Fourier transforms along split dimensions: the operation, and the plan of its steps.

A dimension can be transformed while it is whole on each processor. A plan is a sequence of steps
that begins with the layout of the input, makes each transformed dimension whole at some time, and
ends with the layout of the output. There are many such sequences; `plan_of` finds the one that
communicates the least, by Dijkstra's algorithm over the layouts that lie between.

An example is a pencil decomposition: x and y are split over two mesh axes, z is whole. If the
output splits y and z, two all-to-alls are enough:

    split      step
    x:0, y:1   transform z
               all-to-all along mesh axis 1, from y to z
    x:0, z:1   transform y
               all-to-all along mesh axis 0, from x to y
    y:0, z:1   transform x

A dimension whose size the mesh axis does not divide is padded with zeros while it is split. This
concerns only layouts between that of the input and that of the output.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

import tensorflow.compat.v1 as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.errors import WrongTypeError, dims_text, tensors_text
from mesh_tensorflow._core.operation import (
    Collective,
    Cost,
    LaidOutLike,
    Operation,
    Tensor,
    gradient_of_output,
)
from mesh_tensorflow._core.shape import (
    Dimension,
    JointAxis,
    Shape,
    check_names_differ,
    convert_to_dimension,
    list_product,
    single_axes,
)
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._mesh.slice_functions import cut
from mesh_tensorflow.ops._elementwise.slicewise import COMPLEX
from mesh_tensorflow.ops._movement.halo import paddings_along
from mesh_tensorflow.ops._source import check_dimension

# What is gathered is also transformed and held by each processor, so an all-to-all of two thirds as
# much as a gather, or less, is preferred.
_WEIGHTS = {"alltoall": 2, "allconcat": 3}
# For each mesh axis the tensor axis that it splits, or None.
_Layout = tuple[Optional[int], ...]


class Problem(NamedTuple):
    """What a plan is made for.

    Attributes:
      sizes: the sizes of the input.
      new_sizes: the sizes of the output, which has the same axes.
      itemsizes: the bytes of an element, before and after the transforms.
      transformed: the axes to transform.
      parts: the sizes of the mesh.
      begin: the layout of the input: for each mesh axis the axis that it splits, or None.
      end: the layout of the output.
    """

    sizes: tuple[int, ...]
    new_sizes: tuple[int, ...]
    itemsizes: tuple[int, int]
    transformed: frozenset[int]
    parts: tuple[int, ...]
    begin: _Layout
    end: _Layout


class Step(NamedTuple):
    """One step of a plan.

    Attributes:
      kind: "transform", or the collective: "alltoall", "allconcat" or "allsplit".
      axes: the axes that are transformed.
      mesh_axis: the mesh axis of a collective.
      split: the axis that the mesh axis splits from now on, or None.
      joined: the axis that it has split so far, or None.
      padding: the zeros that are appended to `split` before the step.
      size: the size of `joined` after the step, without padding.
      elements: as in `Collective`; those of all slices for a transform.
      itemsize: the bytes of an element.
    """

    kind: str
    axes: tuple[int, ...] = ()
    mesh_axis: int = -1
    split: Optional[int] = None
    joined: Optional[int] = None
    padding: int = 0
    size: int = 0
    elements: int = 0
    itemsize: int = 0

    @property
    def moved_bytes(self) -> int:
        """The bytes that are communicated."""
        return self.elements * self.itemsize if self.kind in ("alltoall", "allconcat") else 0


Plan = tuple[Step, ...]


class _State(NamedTuple):
    layout: _Layout
    done: frozenset[int]


# Costs ask for the same plans again and again, for each layout that is tried, and lowering too.
@functools.lru_cache(maxsize=1024)
def plan_of(problem: Problem) -> Plan:
    """Returns the steps that communicate the least, and of these plans one of the fewest steps."""
    first, steps = _transformed(problem, _State(problem.begin, frozenset()))
    goal = _State(problem.end, problem.transformed)
    count = itertools.count()  # states are not compared
    queue = [(0, len(steps), next(count), first, steps)]
    visited = set()
    while queue:
        moved, _, _, state, steps = heapq.heappop(queue)
        if state == goal:
            return steps
        # Dijkstra's algorithm: the first time that a state is taken from the queue is the cheapest
        # way to it.
        if state in visited:
            continue
        visited.add(state)
        for step in _moves(problem, state):
            layout = list(state.layout)
            layout[step.mesh_axis] = step.split
            reached = state._replace(layout=tuple(layout))
            after, transforms = _transformed(problem, reached)
            if after not in visited:
                new = (*steps, step, *transforms)
                total = moved + step.moved_bytes * _WEIGHTS.get(step.kind, 0)
                heapq.heappush(queue, (total, len(new), next(count), after, new))
    raise AssertionError(f"no plan for {problem}")  # gathering everything always is one


def _size(problem: Problem, state: _State, axis: int) -> int:
    return (problem.new_sizes if axis in state.done else problem.sizes)[axis]


def _itemsize(problem: Problem, state: _State) -> int:
    # Real transforms are along one dimension: one that is done has changed the dtype.
    return problem.itemsizes[bool(state.done)]


def _laid_out_size(problem: Problem, state: _State) -> int:
    """Returns the number of elements of all slices, with padding."""
    sizes = [_size(problem, state, axis) for axis in range(len(problem.sizes))]
    for parts, axis in zip(problem.parts, state.layout):
        if axis is not None:
            # Rounded up: slices have equal sizes, the last ones by their padding.
            sizes[axis] = -(-sizes[axis] // parts)
    return list_product(sizes) * list_product(problem.parts)


def _transformed(problem: Problem, state: _State) -> tuple[_State, Plan]:
    """Returns the state after all that can be transformed in it is, and the step that does so."""
    axes = sorted(problem.transformed - state.done - set(state.layout))
    if not axes:
        return state, ()
    elements = _laid_out_size(problem, state)
    step = Step("transform", tuple(axes), elements=elements, itemsize=_itemsize(problem, state))
    return state._replace(done=state.done.union(axes)), (step,)


def _moves(problem: Problem, state: _State) -> Iterator[Step]:
    """Yields the collectives that are possible in a state."""
    itemsize, elements = _itemsize(problem, state), _laid_out_size(problem, state)
    whole = [axis for axis in range(len(problem.sizes)) if axis not in state.layout]
    for mesh_axis, (parts, joined) in enumerate(zip(problem.parts, state.layout)):
        # One processor has all of a dimension, so there is nothing to move.
        if parts == 1:
            continue
        size = 0 if joined is None else _size(problem, state, joined)
        for split in whole:
            points = _size(problem, state, split)
            padding = -points % parts
            if joined is not None:
                # The zeros that are appended are sent, too.
                sent = elements // max(1, points) * (points + padding)
                yield Step("alltoall", (), mesh_axis, split, joined, padding, size, sent, itemsize)
            elif not padding:
                yield Step("allsplit", (), mesh_axis, split)
        if joined is not None:
            # Its elements are those of the output.
            yield Step(
                "allconcat", (), mesh_axis, None, joined, 0, size, elements * parts, itemsize
            )


_COMPLEX = {dtype: dtype for dtype in COMPLEX.values()}
_REAL = {dtype: dtype.real_dtype for dtype in _COMPLEX}


class _Kind(NamedTuple):
    """A kind of transform.

    Attributes:
      functions: TensorFlow's functions along the last one, two and three axes.
      dtypes: from the dtypes that it takes to those that it gives.
      instead: what to write if the input has another dtype.
      is_real: whether the input or the output is real.
    """

    functions: tuple
    dtypes: dict
    instead: str
    is_real: bool = False


_KINDS = {
    "fft": _Kind(
        (tf.signal.fft, tf.signal.fft2d, tf.signal.fft3d),
        _COMPLEX,
        "mtf.cast(x, tf.complex64), or for real numbers mtf.signal.rfft(x, dim)",
    ),
    "ifft": _Kind(
        (tf.signal.ifft, tf.signal.ifft2d, tf.signal.ifft3d),
        _COMPLEX,
        "mtf.cast(x, tf.complex64)",
    ),
    "rfft": _Kind(
        (tf.signal.rfft,),
        COMPLEX,
        "mtf.cast(x, tf.float32), or for complex numbers mtf.signal.fft(x, dim)",
        is_real=True,
    ),
    "irfft": _Kind((tf.signal.irfft,), _REAL, "mtf.cast(x, tf.complex64)", is_real=True),
}


def fourier_shape(
    what: str, x: Tensor, dims: Sequence[Dimension], new_dims: Sequence[Dimension]
) -> Shape:
    """Returns the output shape: that of `x` with new dimensions in place of those transformed.

    Raises:
      ValueError: a dimension is not there, occurs twice, is empty, or a new one does not fit.
    """
    for d in dims:
        check_dimension(what, x, d)
    if not dims or len(set(dims)) < len(dims):
        raise ValueError(
            f"{what}: the dimensions to transform are {dims_text(dims) or 'none'}; name each "
            f"once, of {x.name} {x.shape}"
        )
    if len(new_dims) != len(dims):
        raise ValueError(
            f"{what}: {dims_text(dims)} cannot become {dims_text(new_dims) or 'none'}; give as "
            "many new dimensions as there are to transform, in the same order"
        )
    for d, new in zip(dims, new_dims):
        if not d.size:
            raise ValueError(
                f"{what}: {dims_text([d])} of {x.name} {x.shape} is empty; a transform takes at "
                "least one element"
            )
        _check_size(what, d, new)
    replaced = dict(zip(dims, new_dims))
    shape = Shape([replaced.get(d, d) for d in x.shape])
    check_names_differ(what, shape, x.shape)
    return shape


def _check_size(what: str, d: Dimension, new: Dimension) -> None:
    """Checks the size of the dimension that a transform gives."""
    if what == "irfft":
        if new.size < 1 or new.size // 2 + 1 != d.size:
            sizes = " or ".join(str(n) for n in (2 * d.size - 2, 2 * d.size - 1) if n > 0)
            raise ValueError(
                f"{what}: the {dims_text([d])} frequencies are those of a real signal of size "
                f"{sizes}, not of {dims_text([new])}. Give the new dimension the size that the "
                "signal had"
            )
        return
    size = d.size // 2 + 1 if what == "rfft" else d.size
    if new.size != size:
        raise ValueError(
            f"{what}: {dims_text([d])} has {size} frequencies, which do not fit "
            f"{dims_text([new])}. Write mtf.Dimension({new.name!r}, {size})"
        )


class FourierOperation(Operation):
    """Discrete Fourier transforms along dimensions, which are moved between processors for it."""

    costs_by = ("_kind", "_dims", "_new_dims")

    def __init__(
        self,
        kind: str,
        x: Tensor,
        dims: Sequence[Dimension],
        new_dims: Sequence[Dimension],
        name: Optional[str] = None,
    ):
        """Creates the operation.

        Args:
          kind: "fft", "ifft", "rfft" or "irfft"; the last two are along one dimension.
          x: a Tensor.
          dims: the Dimensions to transform.
          new_dims: the Dimensions of the output in their places.
          name: a string or None.

        Raises:
          ValueError: a dimension is not there, or a new one does not fit.
          WrongTypeError: the dtype is not one that is transformed.
        """
        shape = fourier_shape(kind, x, dims, new_dims)
        dtypes = _KINDS[kind].dtypes
        if x.dtype not in dtypes:
            names = " or ".join(dtype.name for dtype in dtypes)
            raise WrongTypeError(
                f"{kind}: {tensors_text([x])} must be {names}. Write {_KINDS[kind].instead}"
            )
        super().__init__([x], name=name or kind)
        self._kind = kind
        self._dims = tuple(convert_to_dimension(d) for d in dims)
        self._new_dims = tuple(convert_to_dimension(d) for d in new_dims)
        self._outputs = [Tensor(self, shape, dtypes[x.dtype])]

    # -- gradient

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Applies the adjoint, which is the inverse but for factors."""
        dy = gradient_of_output(grad_ys)
        points = math.prod(d.size for d in self._dims)
        # The conjugate transpose of fft is points * ifft, and that of ifft is fft / points.
        back = self._new_dims, self._dims
        if self._kind == "fft":
            return [FourierOperation("ifft", dy, *back).outputs[0] * float(points)]
        if self._kind == "ifft":
            return [FourierOperation("fft", dy, *back).outputs[0] * (1.0 / points)]
        if self._kind == "rfft":
            # Each frequency but the outer ones stands for two of a complex transform, of which
            # irfft adds up both.
            half = dy * self._outer(dy, self._new_dims[0], points, 1.0, 0.5)
            return [FourierOperation("irfft", half, *back).outputs[0] * float(points)]
        [size] = [d.size for d in self._new_dims]
        # irfft counts each inner frequency twice, for itself and for its conjugate.
        dx = FourierOperation("rfft", dy, *back).outputs[0]
        return [dx * self._outer(dx, self._dims[0], size, 1.0 / size, 2.0 / size)]

    @staticmethod
    def _outer(x: Tensor, dim: Dimension, size: int, outer: float, inner: float) -> Tensor:
        """Returns factors along frequencies: of 0 and the highest of an even size, and others."""
        k = mtf.mtf_range(x.mesh, dim, tf.int32)
        is_outer = mtf.logical_or(mtf.equal(k, 0), mtf.equal(k * 2, size))
        return mtf.cast(is_outer, x.dtype) * (outer - inner) + inner

    # -- lowering

    def _plan(self, mesh_impl: MeshImpl) -> Plan:
        x, y = self._inputs[0], self._outputs[0]
        axes = _mesh_axes(mesh_impl, x.shape, y.shape)
        # Tuples and sets that do not change, since plans are looked up by their problems.
        plan = plan_of(
            Problem(
                tuple(x.shape.to_integer_list),
                tuple(y.shape.to_integer_list),
                (x.dtype.size, y.dtype.size),
                frozenset(x.shape.dims.index(d) for d in self._dims),
                tuple(mesh_impl.shape[axis].size for axis in axes),
                _split_axes(mesh_impl, x.shape, axes),
                _split_axes(mesh_impl, y.shape, axes),
            )
        )
        steps = (
            # A plan numbers its mesh axes.
            step if step.kind == "transform" else step._replace(mesh_axis=axes[step.mesh_axis])
            for step in plan
        )
        return (*self._gathers(mesh_impl, axes), *steps)

    def _gathers(self, mesh_impl: MeshImpl, axes: Sequence[int]) -> Iterator[Step]:
        """Yields the steps before a plan: gathers along the mesh axes that it does not have."""
        x = self._inputs[0]
        elements = mesh_impl.laid_out_size(x.shape)
        for joined, mesh_axis in enumerate(mesh_impl.tensor_layout(x.shape)):
            if mesh_axis is not None and mesh_axis not in axes:
                elements *= mesh_impl.shape[mesh_axis].size
                yield Step(
                    "allconcat",
                    mesh_axis=mesh_axis,
                    joined=joined,
                    size=x.shape[joined].size,
                    elements=elements,
                    itemsize=x.dtype.size,
                )

    def lower(self, lowering: mtf.Lowering) -> None:
        """Carries out the steps of the plan."""
        mesh_impl = lowering.mesh_impl(self)
        x, y = self.inputs[0], self.outputs[0]
        mesh_impl.slice_shape(y.shape)  # checks that it can be split
        lowering.count_collectives(self, "fft_op")
        # A partial sum is summed first, although transforms are linear: a later sum is as large.
        value = lowering.tensors[x].to_laid_out_tensor()
        requested = lowering.requested_impl(self)
        if getattr(requested, "hides_parts", False):
            plan = self._plan(requested)
            # JAX has no arrays whose last parts are shorter.
            if not any(step.padding for step in plan):
                [whole] = value.tensor_list
                whole = self._split_by_compiler(requested, plan, whole)
                lowering.set_tensor_lowering(y, requested.LaidOutTensor([whole]))
                return
        for step in self._plan(mesh_impl):
            if step.kind == "transform":
                fn = functools.partial(self._transform, mesh_impl, step.axes)
                value = mesh_impl.slicewise(fn, value)
            else:
                value = _moved(mesh_impl, value, step)
        lowering.set_tensor_lowering(y, value)

    def _split_by_compiler(self, mesh_impl: Any, plan: Plan, value: tf.Tensor) -> tf.Tensor:
        """Carries out a plan on a whole value, which XLA's partitioner splits from step to step.

        Args:
          mesh_impl: a GspmdMeshImpl.
          plan: steps without padding.
          value: the whole value.
        """
        layout = list(mesh_impl.even_layout(self._inputs[0].shape))
        for step in plan:
            if step.kind == "transform":
                fn = functools.partial(self._transform, mesh_impl, step.axes)
                value = mesh_impl.on_parts(fn, value, layout)
                continue
            if step.joined is not None:
                layout[step.joined] = None
            if step.split is not None:
                layout[step.split] = step.mesh_axis
            value = mesh_impl.annotate_axes(value, layout)
        return value

    def _transform(self, mesh_impl: MeshImpl, axes: Sequence[int], t: tf.Tensor) -> tf.Tensor:
        """Transforms a slice along some axes, each whole in it."""
        functions = _KINDS[self._kind].functions
        rank = t.shape.ndims
        # TensorFlow's functions transform the last axes, and up to three of them.
        # Transforms along different axes commute, so they can be done in groups of any order.
        for first in range(0, len(axes), len(functions)):
            last = list(axes[first : first + len(functions)])
            perm = [axis for axis in range(rank) if axis not in last] + last
            t = tf.transpose(t, perm) if perm != sorted(perm) else t
            lengths = [self._outputs[0].shape[axis].size for axis in last]
            # m frequencies are those of 2 m - 2 or 2 m - 1 numbers; TensorFlow takes the former.
            further = {"fft_length": lengths} if self._kind == "irfft" else {}
            sizes = t.shape.as_list()[: rank - len(last)]
            t = functions[len(last) - 1](t, **further)
            t.set_shape([*sizes, *lengths])
            if mesh_impl.is_compiled_by_xla:
                # XLA, for CPUs, lets what reads a transform decide about the order of its
                # dimensions in memory, and then refuses all orders but one. A row has one order.
                [row] = gen_xla_ops.xla_optimization_barrier([tf.reshape(t, [-1])])
                t = tf.reshape(row, [*sizes, *lengths])
            if perm != sorted(perm):
                t = tf.transpose(t, [perm.index(axis) for axis in range(rank)])
        return t

    # -- cost

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """5 n log2(n) flops for each transform, half of them if it is real; and the collectives."""
        flops, moved, collectives = 0.0, 0, []
        x = self._inputs[0]
        # Of a real transform, the signal is the longer side.
        sizes = [max(a.size, b.size) for a, b in zip(x.shape, self._outputs[0].shape)]
        mesh_impl.slice_shape(self._outputs[0].shape)  # checks that it can be split
        for step in self._plan(mesh_impl):
            # Each step reads all elements, and writes them.
            moved += 2 * step.elements * step.itemsize
            if step.kind == "transform":
                each = 2.5 if _KINDS[self._kind].is_real else 5
                flops += each * step.elements * sum(math.log2(sizes[axis]) for axis in step.axes)
            elif step.moved_bytes:
                collectives.append(
                    Collective(step.kind, (step.mesh_axis,), step.elements, step.moved_bytes)
                )
        return Cost(int(flops), moved, tuple(collectives))


def _mesh_axes(mesh_impl: MeshImpl, begin: Shape, end: Shape) -> list[int]:
    """Returns the mesh axes of a plan, no two of which share one; joint as in the layouts.

    They split the output as its layout says. An axis that splits the input and is none of them has
    to be gathered first.
    """
    layout = mesh_impl.tensor_layout(end)
    joint = [axis for axis in layout if isinstance(axis, JointAxis)]
    used = {*single_axes(layout)}
    joint += [
        axis
        for axis in mesh_impl.tensor_layout(begin)
        if isinstance(axis, JointAxis) and not used.intersection(axis.axes)
    ]
    apart = {*single_axes(joint)}
    return [*(axis for axis in range(mesh_impl.ndims) if axis not in apart), *joint]


def _split_axes(mesh_impl: MeshImpl, shape: Shape, axes: Sequence[int]) -> _Layout:
    """Returns, for each mesh axis of more than one processor, the axis that it splits, or None."""
    layout = list(mesh_impl.tensor_layout(shape))
    # Else what one processor has as a whole would be taken for split, and never be transformed.
    return tuple(
        layout.index(axis) if axis in layout and mesh_impl.shape[axis].size > 1 else None
        for axis in axes
    )


def _moved(mesh_impl: MeshImpl, value: LaidOutLike, step: Step) -> LaidOutLike:
    """Applies a collective, with zeros appended before it, and those of earlier steps removed."""
    split, joined = step.split, step.joined
    if split is not None and step.padding:
        paddings = paddings_along(len(value.slice_shape), split, 0, step.padding)
        value = mesh_impl.slicewise(lambda t: tf.pad(t, paddings), value)
    axes = [axis for axis in (split, joined) if axis is not None]
    value = getattr(mesh_impl, step.kind)(value, step.mesh_axis, *axes)
    # Zeros were appended to the whole: they are at its end, and can be cut once it is joined.
    if joined is not None and value.slice_shape[joined] > step.size:
        value = mesh_impl.slicewise(lambda t: cut(t, joined, 0, step.size), value)
    return value
