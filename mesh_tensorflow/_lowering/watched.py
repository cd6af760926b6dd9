"""What a Lowering does where a user watches: values by name, lines of a log, checks for NaNs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.graph import Graph
from mesh_tensorflow._core.layout import pnum_to_processor_coordinates, uneven_names
from mesh_tensorflow._core.operation import (
    Operation,
    Tensor,
    is_differentiable,
    with_inner_operations,
)
from mesh_tensorflow._mesh.mesh_impl import (
    LaidOutTensor,
    LazyLaidOutTensor,
    MeshImpl,
    is_pending,
    summands_of,
)
from mesh_tensorflow._mesh.slice_functions import real_view
from mesh_tensorflow._watching import (
    STATE,
    NanChecks,
    NonFiniteError,
    matches,
    nonfinite_message,
    site_text,
)
from mesh_tensorflow.ops._variable import Assign, ReadVariable

if TYPE_CHECKING:
    from mesh_tensorflow._lowering.lowering import Lowering


# -- values by name


def named_tensors(graph: Graph) -> Iterator[tuple[str, Tensor]]:
    """Yields the Tensors of a graph outside of loops, with their names.

    The name is that of the operation, with the number of the output if it has several. Tensors that
    were given to `mtf.inspect` come again, under their names there.

    Args:
      graph: a Graph.
    """
    outputs_so_far = set()
    for op in graph.operations:
        outputs = op.outputs
        outputs_so_far.update(outputs)
        for y in outputs:
            yield (op.name if len(outputs) == 1 else y.name), y
    for name, x in graph.inspected.items():
        # In a loop's body, or in a call that failed and was undone, a Tensor has no value.
        if x in outputs_so_far or x in graph.stacked_values:
            yield name, x


def values_by_name(
    lowering: Lowering, patterns: Sequence[str], processor: Optional[int]
) -> dict[str, tf.Tensor]:
    """Returns the values of the Tensors whose names match, and of all that are inspected.

    Args:
      lowering: a Lowering.
      patterns: patterns of names, as of files.
      processor: the number of the processor whose slices are returned; None for whole values.
    """
    return {
        name: (
            lowering.export_to_tf_tensor(x)
            if processor is None
            else processor_slice(lowering, x, processor)
        )
        for name, x in named_tensors(lowering.graph)
        if (x in lowering.tensors or x.operation.is_on_demand)
        and (name in lowering.graph.inspected or matches(name, patterns))
    }


def processor_slice(lowering: Lowering, x: Tensor, pnum: int) -> tf.Tensor:
    """Returns the slice of a Tensor that one processor of the requested mesh has.

    Args:
      lowering: a Lowering.
      x: a Tensor.
      pnum: the number of the processor.

    Raises:
      ValueError: the mesh has no such processor.
    """
    requested, executed = lowering.requested_impl(x), lowering.mesh_impl(x)
    if not 0 <= pnum < requested.size:
        raise ValueError(
            f"processor {pnum} of mesh {x.mesh.name!r} does not exist: {requested.shape} has "
            f"processors 0 to {requested.size - 1}"
        )
    lowering.lower_late(x)
    value = lowering.tensors[x].to_laid_out_tensor()
    slices = value.all_slices
    # On a merged mesh no processor has exactly that slice, so it is cut from the whole value.
    if executed is not requested:
        whole = executed.export_to_tf_tensor(x, value)
        begin, sizes = requested.slice_begin(x.shape, pnum), requested.slice_shape(x.shape)
        # Without padding, of which a whole value has none.
        begin = [min(b, d.size) for b, d in zip(begin, x.shape)]
        sizes = [min(n, d.size - b) for b, n, d in zip(begin, sizes, x.shape)]
        return tf.slice(whole, tf.constant(begin, tf.int32), sizes) if len(x.shape) else whole
    if len(slices) == requested.size:
        return tf.identity(slices[pnum])
    # A SIMD program has no slices but those of the processor that runs it.
    return _from_processor(executed, value, pnum)


def _from_processor(mesh_impl: MeshImpl, value: LaidOutTensor, pnum: int) -> tf.Tensor:
    """Returns one processor's slice on all processors of a program."""
    dtype = value.all_slices[0].dtype
    # An allreduce adds, and bools have no sum.
    carried = tf.int32 if dtype == tf.bool else dtype

    def own_or_zeros(piece: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        piece = tf.cast(piece, carried)
        return tf.where(
            tf.fill(tf.shape(piece), tf.equal(number, pnum)), piece, tf.zeros_like(piece)
        )

    # A program is the same on all processors and cannot return what only one has. So the others add
    # zeros to it. The select, unlike a product with 0, keeps their NaNs out.
    mine = mesh_impl.slicewise(own_or_zeros, value, mesh_impl.laid_out_pnum())
    summed = mesh_impl.allreduce(mine, list(range(mesh_impl.ndims)), "SUM")
    return tf.cast(summed.to_laid_out_tensor().all_slices[0], dtype)


# -- a log


def log_operation(
    log: logging.Logger, lowering: Lowering, op: Operation, communicated: int
) -> None:
    """Logs an operation that has just been lowered.

    Args:
      log: the log.
      lowering: the Lowering.
      op: the operation.
      communicated: the number of collectives of the Lowering before it.
    """
    impl = lowering.requested_impl(op)
    words = [f"lowering {op.name} {type(op).__name__}"]
    words += [_output_text(impl, y) for y in op.outputs]
    for _, mesh_impl, collective in lowering.collectives[communicated:]:
        axes = ", ".join(mesh_impl.shape[axis].name for axis in collective.mesh_axes)
        words.append(f"{collective.kind} over {axes}: {collective.bytes:,} bytes")
    if op.site is not None:
        words.append(f"{'gradient of ' if op.gradient_of is not None else ''}{op.site}")
    log.info("%s", " | ".join(words))


def _output_text(impl: MeshImpl, y: Tensor) -> str:
    layout = impl.tensor_layout(y.shape)
    rules = ", ".join(
        f"{d.name}:{impl.shape[axis].name}" for d, axis in zip(y.shape, layout) if axis is not None
    )
    shape = f"{dims_text(y.shape) or 'scalar'} {y.dtype.name}"
    return f"{shape}, slice {impl.slice_shape(y.shape)}, {rules or 'whole'}"


# -- checks for NaNs

_MOST_INPUTS = 8  # that are described


class _RequestedSlice(NamedTuple):
    """What one processor of the requested mesh has of a slice of the executed mesh.

    Attributes:
      text: the processor and its slice.
      begin: where it begins in the slice; None if it is all of it.
      sizes: its sizes.
    """

    text: str
    begin: Optional[list[int]]
    sizes: list[int]


def check_outputs(lowering: Lowering, op: Operation, checks: NanChecks) -> None:
    """Makes the outputs of a lowered operation raise an error if they are not finite.

    Args:
      lowering: the Lowering.
      op: the operation, which has just been lowered.
      checks: which values are errors.

    Raises:
      NonFiniteError: in eager code; otherwise a step raises it, as an InvalidArgumentError.
    """
    if not checks.applies_to(op.name):
        return
    for y in op.outputs:
        value = lowering.tensors.get(y)
        # A LazyLaidOutTensor is computed at each use: a check would compute it once more, for
        # itself.
        if value is None or not is_differentiable(y.dtype) or isinstance(value, LazyLaidOutTensor):
            continue
        laid_out = summands_of(value)
        # A reshape or an identity passes its input's slices on, which need no second check.
        if not y.size or all(id(t) in lowering.checked for t in laid_out.all_slices):
            continue
        impl = lowering.mesh_impl(y)
        if uneven_names(impl):
            # What is past the end may be anything, and is no fault of the program.
            laid_out = impl.filled(laid_out, y.shape, y.shape.dims, 0)
        new = _checked(lowering, y, laid_out, checks)
        # Held, so that their ids are not used again.
        lowering.checked.update({id(t): t for t in new.all_slices})
        # The sum stays pending, so that a program with checks communicates what it does without.
        if is_pending(value):
            lowering.tensors[y] = value.with_summands(new)
        else:
            # With its shape, so that merged processors' values can be cut again if need be.
            lowering.tensors[y] = new.of_shape(y.shape)


def parted_at_assignments(
    operations: Sequence[Operation],
) -> tuple[list[Operation], list[Operation]]:
    """Returns operations that depend on no assignment, and assignments with those that do.

    Args:
      operations: the operations of a program, in order.
    """
    # Ordered, unlike a set: these are lowered in the order of the program.
    last: dict[Operation, None] = {}
    assigned: set[Operation] = set()
    for op in operations:
        inner = list(with_inner_operations([op]))
        assigned.update(v for each in inner if isinstance(each, Assign) for v in each.variables)
        sources = [d for each in inner for d in (*each.inputs, *each.dependencies)]
        # The gradient of a loop reads what that has kept, whether it reads its results or not.
        loops = [each.loop for each in inner if each.loop is not None]
        sources += [loop.tape_of for loop in loops if loop.tape_of is not None]
        if (
            any(isinstance(each, Assign) for each in inner)
            # A ReadVariable has no input that tells: what it reads is changed by assignments before
            # it.
            or any(isinstance(each, ReadVariable) and each.variable in assigned for each in inner)
            or any((d.operation if isinstance(d, Tensor) else d) in last for d in sources)
        ):
            last[op] = None
    return [op for op in operations if op not in last], list(last)


def all_checks(lowering: Lowering) -> list[tf.Tensor]:
    """Returns tf.Tensors that are there once all checks so far have passed, on all processors.

    Args:
      lowering: the Lowering.
    """
    if tf.executing_eagerly():
        # Eager checks have raised by now if they were to.
        return []
    # Nothing outside of a loop or a function can wait for what is inside of it.
    is_here = _in_context()
    done = [t for t in lowering.checked.values() if is_here(t)]
    passed = list(done)
    for impl in {id(impl): impl for impl in lowering.executed_impls}.values():
        pnums = impl.laid_out_pnum()
        if len(pnums.all_slices) < impl.size and impl.supports_control_dependencies:
            # Each processor knows of its own checks; the sum is there once all have passed.
            with tf.control_dependencies(done):
                one = impl.slicewise(lambda pnum: tf.ones_like(pnum, tf.float32), pnums)
                passed += impl.allreduce(one, range(impl.shape.ndims), "SUM").all_slices
    return passed


def _in_context() -> Callable[[tf.Tensor], bool]:
    """Returns a function of whether a tf.Tensor is of the loop or function that is being built."""
    graph = tf.get_default_graph()
    context = graph._get_control_flow_context()
    return lambda t: t.graph is graph and t.op._get_control_flow_context() is context


def _checked(
    lowering: Lowering, y: Tensor, laid_out: LaidOutTensor, checks: NanChecks
) -> LaidOutTensor:
    """Returns the same slices, each of which waits for its check."""
    mesh_impl, requested = lowering.mesh_impl(y), lowering.requested_impl(y)
    parts = _parts(y, mesh_impl, requested)
    differentiable = [
        x for x in y.operation.inputs if x in lowering.tensors and is_differentiable(x.dtype)
    ]
    inputs = differentiable[:_MOST_INPUTS]
    values = [summands_of(lowering.tensors[x]) for x in inputs]
    head = f"NaN or Inf in {_tensor_text(y)} of {type(y.operation).__name__} {y.operation.name}"

    def check(t: tf.Tensor, number: Union[int, tf.Tensor], *xs: tf.Tensor) -> tf.Tensor:
        others = [(_tensor_text(x), _state(lowering, v)) for x, v in zip(inputs, xs)]
        done = []
        for at in range(len(parts[0])):
            # In a SIMD program the number is a tensor, and this is traced once for all processors.
            # All have parts of the same sizes, so those of processor 0 do; the text is chosen when
            # it runs.
            part = parts[0 if not isinstance(number, int) else number][at]
            piece = t if part.begin is None else tf.slice(t, part.begin, part.sizes)
            state = _state(lowering, piece)
            places = [column[at].text for column in parts]
            where = (
                f"{head} on {places[number]}"
                if isinstance(number, int)
                else tf.gather(tf.constant([f"{head} on {text}" for text in places]), number)
            )
            done.append(_require_finite(y, where, state, others, checks))
        if tf.executing_eagerly():
            return t
        # A step runs only what its results depend on, so the slice has to depend on its assertion.
        with tf.control_dependencies(done):
            checked = tf.identity(t)
        if id(t) in lowering.states:  # what takes it as an input need not count again
            lowering.states[id(checked)] = (checked, lowering.states[id(t)][1])
        return checked

    return mesh_impl.slicewise(check, laid_out, _numbers(mesh_impl, laid_out), *values)


def _numbers(mesh_impl: MeshImpl, laid_out: LaidOutTensor) -> LaidOutTensor:
    """Returns the number of each processor, that of the first one that has the same slice."""
    slices = laid_out.all_slices
    if len(slices) < mesh_impl.size:
        return mesh_impl.laid_out_pnum()
    # Slicewise makes one check for equal arguments, so holders of one slice share its number.
    first: dict[int, int] = {}
    return mesh_impl.LaidOutTensor.from_tensor_list(
        [first.setdefault(id(t), pnum) for pnum, t in enumerate(slices)]
    )


def _require_finite(
    y: Tensor,
    where: Union[str, tf.Tensor],
    state: tf.Tensor,
    others: Sequence[tuple[str, tf.Tensor]],
    checks: NanChecks,
) -> Optional[tf.Operation]:
    """Returns a tf operation that fails if a slice has NaNs or infinities; fails in eager code."""
    bad = state[0] + state[1] if checks.infinities else state[0]
    data = [where, f"{STATE} the output:", state]
    for name, other in others:
        data += [f"{STATE} {name}:", other]
    if not tf.executing_eagerly():
        # Not tf.Assert, which makes a condition of it.
        return tf.raw_ops.Assert(condition=tf.equal(bad, 0), data=data, summarize=8)
    if float(bad):
        texts = [x.numpy() if tf.is_tensor(x) else x for x in data]
        message = nonfinite_message(y.operation, texts)
        raise NonFiniteError(None, None, f"{message}\n{site_text(y.operation)}".rstrip())
    return None


def _state(lowering: Lowering, t: tf.Tensor) -> tf.Tensor:
    """Returns the numbers of NaNs, infinities and zeros, the least, the largest and the size.

    Of complex numbers those of their parts. Each slice is counted once in a graph.
    """
    if tf.executing_eagerly():
        return _counted(t)
    state = lowering.states.get(id(t))
    if state is None or not _in_context()(state[1]):
        # The slice is held, so that its id is not used again.
        lowering.states[id(t)] = state = (t, _counted(t))
    return state[1]


def _counted(t: tf.Tensor) -> tf.Tensor:
    """Returns the state of a slice."""
    t = real_view(t)
    t = tf.cast(t, tf.float32) if t.dtype.size < 4 else t
    # The least and the largest of no elements would be infinities, which no element is.
    if t.shape.num_elements() == 0:
        return tf.zeros([6], tf.float64)
    axes = tf.range(t.shape.ndims)
    # A sum of float32 would stop at 2**24.
    flags = [tf.cast(f, tf.float64) for f in (tf.math.is_nan(t), tf.math.is_inf(t), tf.equal(t, 0))]
    ends = [tf.cast(f(t, axes), tf.float64) for f in (tf.reduce_min, tf.reduce_max)]
    size = tf.cast(tf.size(t), tf.float64)
    return tf.stack([*(tf.reduce_sum(f, axes) for f in flags), *ends, size])


def _tensor_text(x: Tensor) -> str:
    """Returns the name, the dimensions and the dtype, without brackets."""
    return f"{x.name} ({', '.join(filter(None, [dims_text(x.shape), x.dtype.name]))})"


def _parts(y: Tensor, executed: MeshImpl, requested: MeshImpl) -> list[list[_RequestedSlice]]:
    """Returns, for each processor of the executed mesh, what those of the requested mesh have.

    All have the same number of parts.
    """
    sizes, whole_sizes = requested.slice_shape(y.shape), executed.slice_shape(y.shape)
    if executed is not requested and any(map(requested.padding, y.shape)):
        # Parts of two meshes that do not divide a size begin at places of their own.
        requested, sizes = executed, whole_sizes
    holders = requested.holders(y.shape)
    result = []
    for pnum in range(executed.size):
        outer = executed.slice_begin(y.shape, pnum)
        parts = []
        for begin, pnums in holders.items():
            inner = [b - o for b, o in zip(begin, outer)]
            # Each slice of the requested mesh lies within one of the executed mesh, so its
            # beginning tells in which one.
            if not all(0 <= i < w for i, w in zip(inner, whole_sizes)):
                continue
            # A processor's own number, not that of the first with an equal slice.
            number = pnum if executed is requested else pnums[0]
            text = _place_text(y, requested, number, begin, sizes, len(pnums))
            parts.append(_RequestedSlice(text, None if sizes == whole_sizes else inner, sizes))
        result.append(parts)
    return result


def _place_text(
    y: Tensor,
    mesh_impl: MeshImpl,
    pnum: int,
    begin: Sequence[int],
    sizes: Sequence[int],
    copies: int,
) -> str:
    """Returns the processor, and the range of each dimension that its slice has."""
    coordinates = pnum_to_processor_coordinates(mesh_impl.shape, pnum)
    at = ", ".join(f"{d.name}={c}" for d, c in zip(mesh_impl.shape, coordinates))
    ranges = ", ".join(f"{d.name} {b}:{b + s}" for d, b, s in zip(y.shape, begin, sizes))
    text = f"processor {pnum} ({at or 'the only one'}) of mesh {y.mesh.name}"
    if ranges:
        text += f", whose slice is {ranges}"
    return text if copies == 1 else f"{text}; {copies} processors have this slice"
