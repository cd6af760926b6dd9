"""mtf.pjrt.function: builds mtf programs, shows what XLA makes of them, runs and exports them."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import jax
import numpy as np
import tensorflow as tf
from jax import export as jax_export
from jax.core import Tracer
from jax.experimental import jax2tf
from jax.sharding import AbstractMesh

from mesh_tensorflow._core.layout import LayoutLike, pnum_to_processor_coordinates
from mesh_tensorflow._core.shape import Dimension, Shape, ShapeLike
from mesh_tensorflow._mesh.gspmd import GspmdMeshImpl
from mesh_tensorflow._mesh.variables.store import leaf_key
from mesh_tensorflow._paths import written_whole
from mesh_tensorflow._stop_signals import deferred
from mesh_tensorflow._watching import collecting, hand_over, told_to_user, unwatched, watch_key
from mesh_tensorflow.pjrt._devices import (
    all_dtypes,
    device_mesh,
    done_in_all,
    gathered,
    placed,
    run_step,
)
from mesh_tensorflow.pjrt._store import ArrayStore
from mesh_tensorflow.pjrt._trace import Trace, trace

# -- what XLA makes of a step


@dataclasses.dataclass(frozen=True)
class Collectives:
    """Collectives of one kind over the same mesh dimensions.

    Attributes:
      kind: as XLA calls it: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or
        "collective-permute".
      mesh_dims: the names of the mesh dimensions along which devices communicate.
      count: how many there are.
      bytes: the bytes of their results on one device; for "reduce-scatter", of what is summed.
    """

    kind: str
    mesh_dims: tuple[str, ...]
    count: int
    bytes: int


_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
# An asynchronous collective counts where it starts; a line with `-done` does not match.
_LINE = re.compile(rf"= (?P<type>.*?) (?P<kind>{_KINDS})(?P<start>-start)?\((?P<rest>.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
# XLA writes groups as {{0,1},{2,3}}, as [2,2]<=[4] with a transposition, or as axes of a mesh.
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_RANGE = re.compile(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_AXES = re.compile(
    r"replica_groups=mesh\[(?P<mesh>[^\]]*)\](?:, device_ids=\((?P<order>[^()]*(?:\([\d,]+\))?)\))?"
    r" \{(?P<axes>[^}]*)\}"
)
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _bits(dtype: str) -> int:
    return 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])


def _bytes(types: str) -> list[int]:
    """Returns the bytes of each array in the text of a type."""
    return [
        # In whole bytes: a dtype such as s4 has fewer bits.
        (_bits(dtype) * int(np.prod(_numbers(sizes), dtype=np.int64)) + 7) // 8
        for dtype, sizes in _ARRAY.findall(types)
    ]


def _elements(types: str) -> list[str]:
    """Returns the elements of a tuple in the text of a type; one of several arrays is a tuple."""
    elements, depth = [""], 0
    for character in types.strip()[1:-1]:
        # Sizes, layouts and inner tuples have commas of their own.
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += character
    return elements


def _order(text: str) -> np.ndarray:
    """Returns the devices of "[2,3]T(1,0)": those of a 2 x 3 mesh, transposed, in a row."""
    sizes, _, transposed = text.partition("T")
    devices = np.arange(np.prod(_numbers(sizes))).reshape(_numbers(sizes))
    return (devices.transpose(_numbers(transposed)) if transposed else devices).reshape(-1)


def _groups_along(found: re.Match[str]) -> list[list[int]]:
    """Returns the groups along axes of a mesh, or along parts 'axis':(before)size of axes."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found["mesh"])}
    chosen = {name: part for name, *part in _AXIS.findall(found["axes"])}
    split: list[int] = []
    along: list[int] = []
    for name, size in sizes.items():
        before, own = chosen.get(name, ["", ""])
        first, middle = (int(before), int(own)) if own else (1, size)
        if name in chosen:
            along.append(len(split) + 1)
        # Each axis becomes three, (before, own, after); `along` has the `own` of those chosen.
        split += [first, middle, size // (first * middle)]
    text = found["order"]
    order = _order(text) if text else np.arange(np.prod(list(sizes.values())))
    others = [axis for axis in range(len(split)) if axis not in along]
    # With the chosen axes last, each row is a group.
    members = int(np.prod([split[axis] for axis in along]))
    return order.reshape(split).transpose(others + along).reshape(-1, members).tolist()


def _groups(rest: str, devices: int) -> list[list[int]]:
    """Returns the groups of devices that communicate, from the attributes of an instruction."""
    if found := _RANGE.search(rest):
        # The devices in their order, cut into rows: [2,3]<=[6] is the groups {0,1,2} and {3,4,5}.
        return _order(found[2]).reshape(_numbers(found[1])).tolist()
    if found := _AXES.search(rest):
        return _groups_along(found)
    if found := _LISTED.search(rest):
        return [_numbers(group) for group in found[1].split("}")[:-1]]
    # Without groups, or with empty ones, all devices communicate.
    return [list(range(devices))]


def _mesh_dims(groups: Sequence[Sequence[int]], mesh_shape: Shape) -> tuple[str, ...]:
    """Returns the names of the dimensions in which the members of a group differ."""
    names = mesh_shape.dimension_names
    differ = set()
    for group in groups:
        places = [pnum_to_processor_coordinates(mesh_shape, pnum) for pnum in group]
        differ |= {axis for axis in range(len(names)) if len({p[axis] for p in places}) > 1}
    return tuple(names[axis] for axis in sorted(differ))


def collectives_of(text: str, mesh_shape: Shape) -> list[Collectives]:
    """Returns the collectives of a compiled program, by kind and mesh dimensions.

    Args:
      text: a program of one device, in XLA's notation.
      mesh_shape: the Shape of the mesh; devices are numbered in row-major order.
    """
    # The number and the bytes of each kind along the same dimensions.
    totals: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for line in text.splitlines():
        match = _LINE.search(line)
        if not match:
            continue
        groups = _groups(match["rest"], mesh_shape.size)
        key = match["kind"], _mesh_dims(groups, mesh_shape)
        result = match["type"]
        # The type of a start has operands, too, but that of a sum, whose results are like them.
        if match["start"] and match["kind"] != "all-reduce":
            result = [*_elements(result), "", ""][1]
        total = sum(_bytes(result))
        # The text has the type of the result, which is the part that one device keeps.
        if match["kind"] == "reduce-scatter":
            total *= len(groups[0])
        of_kind = totals.setdefault(key, [0, 0])
        of_kind[0] += 1
        of_kind[1] += total
    return [Collectives(*key, *totals[key]) for key in sorted(totals)]


class Lowered:
    """A program for arguments of certain shapes, on a mesh of devices."""

    def __init__(self, lowered: jax.stages.Lowered, mesh_shape: Shape):
        """Creates a Lowered.

        Args:
          lowered: what JAX made of the program.
          mesh_shape: the Shape of the mesh.
        """
        self._lowered, self._mesh_shape = lowered, mesh_shape

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The program of one device, as XLA compiled it."""
        with all_dtypes():
            return self._lowered.compile()

    @property
    def stablehlo(self) -> str:
        """The program of whole tensors with annotations, as StableHLO."""
        return self._lowered.as_text()

    @property
    def compiled_text(self) -> str:
        """The program of one device, in XLA's notation."""
        return self.compiled.as_text() or ""

    def collectives(self) -> list[Collectives]:
        """Returns the communication that XLA put in, with what is in a loop counted once."""
        return collectives_of(self.compiled_text, self._mesh_shape)

    def memory(self) -> Any:
        """Returns what XLA knows of the memory on one device, such as `temp_size_in_bytes`."""
        return self.compiled.memory_analysis()

    def cost(self) -> dict[str, float]:
        """Returns what XLA knows of the cost on one device, such as "flops"."""
        return dict(self.compiled.cost_analysis() or {})


# -- functions of programs


# How programs are exported. TensorFlow without CUDA lowers operations for XLA's CPUs alone, to a
# StableHLO that is the same for all: so it is told CPUs, whatever the devices of JAX are.
ANY_PLATFORM: Any = {
    "platforms": ["cpu"],
    "disabled_checks": [jax_export.DisabledSafetyCheck.platform()],
}


def function(
    fn: Optional[Callable[..., Any]] = None,
    *,
    mesh_shape: ShapeLike,
    layout: LayoutLike,
    devices: Union[Sequence[Any], str, None] = None,
    store: Optional[ArrayStore] = None,
    variable_layout: Optional[LayoutLike] = None,
    zero: Optional[int] = None,
    zero_axis: Optional[str] = None,
) -> Any:
    """Compiles a function that builds and lowers mtf programs, for devices of JAX.

    Within it, programs are lowered with `mtf.pjrt.mesh_impl()`. The first call creates the
    variables of the programs. They are kept in `.store`, an ArrayStore, as arrays that are split
    over the devices by the layout. A call gives their memory to their new values. Threads may call
    functions at once: those of one store run one after the other.

    Args:
      fn: a function of tf.Tensors; None to use `function` as a decorator.
      mesh_shape: the mesh shape; a Shape, or what converts to one, such as "rows:2,cols:2".
      layout: LayoutRules, or what converts to them, such as "batch:rows,d_ff:cols".
      devices: JAX devices, one for each processor in row-major order; the first of all if None.
        "abstract" for none: the function can be lowered, and not be called.
      store: the ArrayStore of another function, to share its variables.
      variable_layout: rules by which variables are stored in parts, such as "d_model:rows".
      zero: the stage of ZeRO: 1 or 2 to store optimizers' slots in parts, 3 for weights too.
      zero_axis: the mesh dimension of ZeRO, or several joined by "+"; that of a mesh with just
        one if None.

    Returns:
      A function with the arguments of `fn`, which may be arrays of NumPy, TensorFlow or JAX; other
      values are the same for a program. It returns arrays of JAX for the tensors that `fn`
      returns. Its attributes are `store`; `mesh`, the jax.sharding.Mesh; `lower`, which takes the
      arguments and returns a Lowered; `make_variables`, which takes them and makes the variables
      of a call; and `place`, which takes them and returns them on the devices.
    """
    options: Any = {"variable_layout": variable_layout, "zero": zero, "zero_axis": zero_axis}
    make = functools.partial(
        CompiledFunction, GspmdMeshImpl(mesh_shape, layout, **options), devices, store
    )
    return make if fn is None else make(fn)


class CompiledProgram:
    """A program for arguments of certain shapes and dtypes.

    Attributes:
      trace: what it is made from.
      compiled: the function that XLA compiles. It takes a list of arguments, of keys, of the
        variables that it only reads, and of those that it assigns to, and returns results and
        values of the last.
      step: the same, or one that TensorFlow runs where there are checks for NaNs.
      kept: the variables that it only reads, by name.
      assigned: those that it assigns to, by name.
    """

    def __init__(self, traced: Trace):
        self.trace = traced
        self.assigned = {name: traced.variables[name] for name in traced.assigned}
        self.kept = {n: v for n, v in traced.variables.items() if n not in self.assigned}
        # Of whole variables and of their parts, either of which may be passed as an argument.
        self._given_away = {
            (sizes, v.dtype)
            for v in self.assigned.values()
            for sizes in (v.shape, v.sharding.shard_shape(v.shape))
        }
        self.compiled = jax.jit(
            self.call,
            in_shardings=_shardings(self.abstract()),
            out_shardings=(traced.results, _shardings(list(self.assigned.values()))),
            # The variables that get new values: XLA may compute these in their memory. Those that
            # are only read are apart from them, as what is donated is gone afterwards.
            donate_argnums=3,
        )
        self.step: Callable[..., Any] = self._checked if traced.is_checked else self.compiled

    def call(self, arguments: list, keys: list, kept: list, assigned: list) -> tuple[list, list]:
        """Returns results, and new values of variables; see `step`."""
        return self._called(self._program_of_cpus.call, arguments, keys, kept, assigned)

    def _called(
        self, program: Callable, arguments: list, keys: list, kept: list, assigned: list
    ) -> tuple[list, list]:
        # In two groups, as only what is assigned to gives its memory away; the trace has one order.
        values = {**dict(zip(self.kept, kept)), **dict(zip(self.assigned, assigned))}
        variables = [values[name] for name in self.trace.variables]
        results = list(program(*arguments, *keys, *variables))
        count = len(self.trace.results)
        return results[:count], results[count:]

    def _checked(self, *groups: Sequence[Any]) -> tuple[list, list]:
        """Returns what `step` does, after TensorFlow has computed it on a CPU of this process."""
        # XLA has no checks between operations.
        whole = [[gathered(x) if isinstance(x, jax.Array) else x for x in g] for g in groups]
        with tf.device("cpu:0"), told_to_user(self.trace.node_names or None):
            outputs = self._called(self._program_of_tensorflow, *whole)
        where = self.trace.results, _shardings(list(self.assigned.values()))
        results, new = (
            [placed(y.numpy(), s) for y, s in zip(*pair)] for pair in zip(outputs, where)
        )
        return results, new

    @functools.cached_property
    def _program_of_tensorflow(self) -> Any:
        return tf.function(self.trace.function, autograph=False)

    @functools.cached_property
    def _program_of_cpus(self) -> jax_export.Exported:
        """The trace in StableHLO, as a function of arguments, keys and variables."""
        # New values of variables are results, so JAX may treat this as a function without effects.
        call = jax2tf.call_tf(self.trace.function, has_side_effects=False)
        traced = self.trace
        inputs = [*traced.arguments, *traced.keys, *traced.variables.values()]
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
        with all_dtypes():
            return jax_export.export(jax.jit(call), **ANY_PLATFORM)(*shapes)

    def not_given_away(self, arguments: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns arguments that have no memory in common with variables that get new values.

        Args:
          arguments: arrays of JAX, which may be variables, or parts of them.
        """
        # By shape and dtype, as JAX does not tell which arrays share memory. A copy too many does
        # no harm.
        return [a.copy() if (a.shape, a.dtype) in self._given_away else a for a in arguments]

    def abstract(self) -> tuple[list, list, list, list]:
        """Returns the arguments of `step` as shapes, dtypes and shardings."""
        variables = list(self.kept.values()), list(self.assigned.values())
        return self.trace.arguments, self.trace.keys, *variables


def _shardings(described: Any) -> Any:
    """Returns the shardings of what arrays are described by, in a structure of any form."""
    return jax.tree_util.tree_map(lambda x: x.sharding, described)


class CompiledFunction:
    """A function that `mtf.pjrt.function` compiles.

    Attributes:
      store: the ArrayStore of its variables.
      mesh: the jax.sharding.Mesh.
      mesh_impl: the GspmdMeshImpl of its programs.
      fn: the function that builds them.
    """

    def __init__(
        self,
        mesh_impl: GspmdMeshImpl,
        devices: Union[Sequence[Any], str, None],
        store: Optional[ArrayStore],
        fn: Callable[..., Any],
    ):
        functools.update_wrapper(self, fn)
        self.fn, self.mesh_impl = fn, mesh_impl
        self.mesh = device_mesh(mesh_impl.shape, devices)
        if store is not None and not isinstance(store, ArrayStore):
            raise TypeError(
                f"store should be an mtf.pjrt.ArrayStore, such as the `store` of another function "
                f"of mtf.pjrt.function, but is {store!r}"
            )
        self.store = ArrayStore() if store is None else store
        self._programs: dict[Any, CompiledProgram] = {}

    def __repr__(self) -> str:
        return f"<mtf.pjrt.function {self.__name__} on {self.mesh_impl!r}>"  # type: ignore[attr-defined]

    def __call__(self, *args: object, **named: object) -> Any:
        if isinstance(self.mesh, AbstractMesh):
            raise ValueError(
                f'{self!r} has no devices: it was made with devices="abstract", to look at what '
                "`lower` returns. Make it without, to call it"
            )
        if tf.inside_function():
            # A trace would keep the variables of this one call, and the next calls of it would not
            # change them.
            raise self._traced("a tf.function, or the function of an mtf.pjrt.function")
        if any(isinstance(x, Tracer) for x in jax.tree_util.tree_leaves((args, named))):
            raise self._traced("jax.jit, jax.grad or jax.vmap")
        watched = watch_key()
        # From the arrays that a step takes to those that it returns: a step of another thread would
        # be given memory that this one has given away.
        with self.store.lock:
            program, arrays = self._program(args, named, watched)
            kept, assigned = self._variables(program)
            arguments = program.not_given_away(_placed(arrays, program.trace.arguments))
            with all_dtypes():
                keys = program.trace.draw_keys()
                # Between the two, the store has variables whose memory the step was given.
                with deferred():
                    results, new = run_step(program.step, arguments, keys, kept, assigned)
                    # Without arrays as arguments, only the results tell of a trace by JAX; the
                    # store must keep none of its tracers.
                    if any(isinstance(y, Tracer) for y in [*results, *new]):
                        raise self._traced("jax.jit")
                    self.store.update(list(program.assigned), new)
        returned = tf.nest.map_structure(
            lambda number: None if number is None else results[number], program.trace.structure
        )
        if watched is None:
            return returned
        returned, collected = returned
        hand_over(collected)
        return returned

    def _traced(self, by: str) -> ValueError:
        return ValueError(
            f"{self!r} is called within {by}, which calls its function once, to see what it does. "
            "It keeps variables between calls, so call it outside. For gradients, use "
            "mtf.gradients in its program; mtf.pjrt.export makes a function for JAX of a program"
        )

    def _variables(self, program: CompiledProgram) -> list[list[jax.Array]]:
        """Returns the variables that a program only reads, and those that it assigns to."""
        groups = program.kept, program.assigned
        with self.store.lock:
            self.store.prepare(program.trace.values, {**program.kept, **program.assigned})
            return [[self.store.array(name) for name in group] for group in groups]

    def make_variables(self, *args: object, **named: object) -> None:
        """Makes the variables of a call, as before a checkpoint is read, and computes nothing.

        Args:
          *args: arrays, or what has their shape and dtype, such as a jax.ShapeDtypeStruct.
          **named: likewise.
        """
        self._variables(self.program(args, named)[0])

    def place(self, *args: object, **named: object) -> tuple[tuple, dict]:
        """Returns the arguments of a call with arrays on the devices, where the call needs them.

        Args:
          *args: arguments of the function.
          **named: likewise.
        """
        program, arrays = self.program(args, named)
        placed = iter(_placed(arrays, program.trace.arguments))
        leaves, structure = jax.tree_util.tree_flatten((args, named))
        arguments = [next(placed) if _is_array(leaf) else leaf for leaf in leaves]
        return jax.tree_util.tree_unflatten(structure, arguments)

    def lower(self, *args: object, **named: object) -> Lowered:
        """Returns the program for such arguments, before it is compiled; nothing is computed.

        Args:
          *args: arrays, or what has their shape and dtype, such as a jax.ShapeDtypeStruct.
          **named: likewise.
        """
        program, _ = self.program(args, named)
        with all_dtypes():
            # Of shapes alone: no variable has to be there, nor a device to have it on.
            traced = program.compiled.trace(*program.abstract())
            # Named, since an abstract mesh has no devices that would tell the platform.
            lowered = traced.lower(lowering_platforms=(jax.default_backend(),))
            return Lowered(lowered, self.mesh_impl.shape)

    def program(self, args: tuple, named: dict) -> tuple[CompiledProgram, list[Any]]:
        """Returns the program for arguments, and those of them that are arrays."""
        with unwatched():
            return self._program(args, named, None)

    def _program(self, args: tuple, named: dict, watched: Any) -> tuple[CompiledProgram, list[Any]]:
        """Returns the same; with checks, and what is collected, for a `watch_key`."""
        leaves, structure = jax.tree_util.tree_flatten((args, named))
        arrays = [_array(leaf) for leaf in leaves if _is_array(leaf)]
        kinds = tuple(_kind(leaf) for leaf in leaves)
        key = (structure, kinds, watched)
        with self.store.lock:
            # Under the lock, or two threads would both build it. It is kept when it is whole:
            # Ctrl-C leaves none with a part missing.
            if key not in self._programs:
                fn = self.fn if watched is None else collecting(self.fn)
                self._programs[key] = CompiledProgram(self._trace(fn, leaves, structure))
            return self._programs[key], arrays

    def _trace(self, fn: Callable[..., Any], leaves: Sequence[Any], structure: Any) -> Trace:
        def program(tensors: Sequence[tf.Tensor]) -> Any:
            remaining = iter(tensors)
            arguments = [next(remaining) if _is_array(leaf) else leaf for leaf in leaves]
            args, named = jax.tree_util.tree_unflatten(structure, arguments)
            return fn(*args, **named)

        specs = [
            tf.TensorSpec(leaf.shape, tf.as_dtype(leaf.dtype)) for leaf in leaves if _is_array(leaf)
        ]
        return trace(program, specs, self.mesh_impl, self.store, self.mesh)


def _placed(arrays: Sequence[Any], wanted: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Returns arrays as arrays of JAX, split as is wanted."""
    with all_dtypes():
        return [
            # What `place` has put there is not copied again.
            a if isinstance(a, jax.Array) and a.committed and a.sharding == s else placed(a, s)
            for a, s in zip(arrays, _shardings(wanted))
        ]


_ARRAYS = (np.ndarray, np.generic, jax.Array, jax.ShapeDtypeStruct, tf.Tensor, tf.Variable)


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, _ARRAYS)


def _array(leaf: Any) -> Any:
    """Returns an argument as JAX takes it."""
    if isinstance(leaf, tf.Tensor) and not hasattr(leaf, "numpy"):
        raise TypeError(
            f"{leaf!r} is a tensor of a tf graph, which has no value: a function of "
            "mtf.pjrt.function takes arrays. In a program with a session, use mtf.pjrt.in_session"
        )
    return leaf.numpy() if isinstance(leaf, (tf.Tensor, tf.Variable)) else leaf


def _kind(leaf: Any) -> Any:
    """Returns what of an argument a program is made for."""
    if _is_array(leaf):
        return tuple(leaf.shape), tf.as_dtype(leaf.dtype)
    try:
        hash(leaf)
    except TypeError:
        raise TypeError(
            f"{leaf!r} ({type(leaf).__name__}) is no argument of a function of mtf.pjrt: pass "
            "arrays of NumPy, TensorFlow or JAX, or values that can be keys of a dictionary"
        ) from None
    return leaf_key(leaf)


# -- files that JAX alone can run


def export(
    function: CompiledFunction,
    directory: Union[str, os.PathLike[str]],
    *args: object,
    **named: object,
) -> list[str]:
    """Writes a program and its weights, which JAX can run without TensorFlow.

    `program_N.bin` is the program for the N devices of the function's mesh, and `program_1.bin` the
    same for one device, both as `jax.export` serializes them, for any kind of device. They take a
    list of the arguments that are arrays, and a dictionary of the weights by name, and return a
    list of results. A program that assigns to variables, such as a training step, returns the
    results and a dictionary of the new values. `weights.safetensors` has the weights and, as
    metadata, the mesh. `examples/run_exported.py` runs such files; JAX needs the package
    `flatbuffers` to read them. With several processes, all of them
    have to call it, and the first one writes.

    Args:
      function: a function that `mtf.pjrt.function` compiled.
      directory: where the files are written; it is made if need be.
      *args: arguments of the function: arrays, or what has their shape and dtype.
      **named: arguments of the function by name, likewise.

    Returns:
      The paths of the files.

    Raises:
      ValueError: the program makes random values, or a weight is of a dtype that safetensors lacks.
      OSError: the files cannot be written. If the first of several processes has an error, the
        others raise a RuntimeError.
    """
    function.make_variables(*args, **named)
    program, _ = function.program(args, named)
    _check(program, function)
    # By collectives of all processes, if no process has all parts.
    weights = {name: gathered(function.store.array(name)) for name in program.trace.variables}
    folder = pathlib.Path(directory)

    def write() -> None:
        # All contents are made before the first is written, so that an error leaves no part.
        contents = {"weights.safetensors": _safetensors(weights, function.mesh_impl.shape)}
        for one in (function, _on_one_device(function)):
            serialized = _serialized(one.program(args, named)[0])
            contents[f"program_{one.mesh.size}.bin"] = serialized
        # An export that ends early, as on a full disk, leaves an earlier one as it was.
        with written_whole(str(folder), last="program_1.bin") as new:
            for name, content in contents.items():
                pathlib.Path(new, name).write_bytes(content)

    if not done_in_all(write, first=True):
        raise RuntimeError(
            f"mtf.pjrt.export: the first process could not write to {folder}, and says why"
        )
    # Once, if the mesh has one device: both names are the same then.
    programs = dict.fromkeys(f"program_{n}.bin" for n in (function.mesh.size, 1))
    return [str(folder / name) for name in ["weights.safetensors", *programs]]


def _on_one_device(function: CompiledFunction) -> CompiledFunction:
    """Returns a function that builds the same program for a mesh of one device."""
    impl = function.mesh_impl
    shape = Shape([Dimension(d.name, 1) for d in impl.shape])
    # Without rules by which variables are stored in parts, as there are none on one device.
    return CompiledFunction(GspmdMeshImpl(shape, impl.layout_rules), None, None, function.fn)


def _check(program: CompiledProgram, function: CompiledFunction) -> None:
    """Raises a ValueError if a program is no function of its arguments and weights."""
    if program.trace.keys:
        raise ValueError(
            f"{function!r} makes random values, whose keys are drawn outside of the program: only "
            "programs that are functions of their arguments and weights can be exported. Export "
            "one that evaluates, trains without dropout, or decodes without sampling"
        )


def _serialized(program: CompiledProgram) -> bytes:
    """Returns a program that takes arguments and weights."""

    def step(arguments: list[Any], weights: dict[str, Any]) -> Any:
        kept, assigned = ([weights[n] for n in g] for g in (program.kept, program.assigned))
        results, new = program.call(arguments, [], kept, assigned)
        return (results, dict(zip(program.assigned, new))) if program.assigned else results

    arguments, weights = program.trace.arguments, {**program.kept, **program.assigned}
    results = program.trace.results
    jitted = jax.jit(
        step,
        in_shardings=_shardings((arguments, weights)),
        out_shardings=(results, _shardings(program.assigned)) if program.assigned else results,
    )
    with all_dtypes():
        exported = jax_export.export(jitted, **ANY_PLATFORM)(arguments, weights)
    return bytes(exported.serialize())


_SAFETENSORS_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
}  # fmt: skip


def _safetensors(arrays: dict[str, np.ndarray], mesh_shape: Shape) -> bytes:
    """Returns arrays in the format of safetensors: a header in JSON, and the values."""
    mesh = ",".join(f"{d.name}:{d.size}" for d in mesh_shape)
    header: dict[str, Any] = {"__metadata__": {"mesh": mesh}}
    values, end = [], 0
    for name, array in arrays.items():
        if array.dtype.name not in _SAFETENSORS_DTYPES:
            raise ValueError(
                f"variable {name!r} is of {array.dtype.name}, which safetensors does not have: it "
                f"has {', '.join(_SAFETENSORS_DTYPES)}"
            )
        # Offsets count from the end of the header.
        start, end = end, end + array.nbytes
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
        values.append(np.ascontiguousarray(array).tobytes())
    text = json.dumps(header).encode()
    # The format aligns values by spaces after the header.
    text += b" " * (-len(text) % 8)
    # The file: the length of the header in eight bytes, the header, the values one after another.
    return len(text).to_bytes(8, "little") + text + b"".join(values)
