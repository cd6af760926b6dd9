"""Where the calls of a model compute: on devices of TensorFlow, or on those of JAX.

Calls on a placement mesh are functions of eager code, and so are those on devices of JAX. A SIMD
program is one of a graph, so calls on such a mesh are programs of one graph, run in one session.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Optional, Union

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import check_choice, check_flag, check_whole
from mesh_tensorflow._core.layout import LayoutLike, convert_to_layout_rules
from mesh_tensorflow._core.shape import ShapeLike, convert_to_shape
from mesh_tensorflow._mesh.devices import device_spec
from mesh_tensorflow._mesh.gspmd import GspmdMeshImpl
from mesh_tensorflow._mesh.mesh_impl import MESH_IMPLS
from mesh_tensorflow._mesh.slice_functions import never_compiled
from mesh_tensorflow._mesh.variables.store import VariableStore, function, leaf_key
from mesh_tensorflow._pjrt import pjrt
from mesh_tensorflow._watching import collecting, hand_over, told_to_user, watch_key
from mesh_tensorflow.auto_mtf.measured import Auto
from mesh_tensorflow.checkpoint import Assignments, init_from_values
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.train._placing import Placing, check_pjrt, devices_of

# -- programs of a graph


class SessionStore:
    """The programs of a model on a SIMD mesh, and the variables that all of them have.

    They are in one graph and run in one session, so that weights are stored once. Each of several
    processes has programs of its own.
    """

    def __init__(self, placing: Placing) -> None:
        """Creates a store without programs.

        Args:
          placing: where they run.
        """
        self._placing = placing
        self._graph = tf.Graph()
        self._session: Optional[tf.Session] = None
        self._variables: dict[str, Any] = {}
        self._values: Mapping[str, Any] = {}
        self._assignments = Assignments()
        # Of graphs that are built: a stream is continued in a thread of its own.
        self._lock = threading.RLock()

    @property
    def names(self) -> list[str]:
        """The names of the variables that programs have used so far."""
        return list(self._variables)

    def begin_with(self, values: Mapping[str, Any]) -> None:
        """Has variables that are made from now on begin with given values, read part by part.

        Args:
          values: arrays by name; see `VariableStore.begin_with`.
        """
        self._values = values

    def assign(self, name: str, value: np.ndarray) -> None:
        """Assigns the whole value of a variable."""
        assert self._session is not None
        with self._lock:
            self._assignments.run(self._session, self._variables, {name: value})

    def function(self, fn: Callable[..., Any], placing: Placing) -> Callable[..., Any]:
        """Returns a function of eager tensors, with a program for each set of their shapes.

        Args:
          fn: a function of tf.Tensors and numbers that lowers a program.
          placing: where it runs, with the layout of its programs.
        """
        programs: dict[Any, Callable[..., Any]] = {}

        @functools.wraps(fn)
        def call(*args: Any) -> Any:
            key = watch_key(), _key(args)
            with self._lock:
                if key not in programs:
                    programs[key] = self._program(fn, placing, args)
            tensors = [x for x in tf.nest.flatten(args) if tf.is_tensor(x)]
            with told_to_user():
                result, collected = programs[key](*[x.numpy() for x in tensors])
            hand_over(collected)
            return tf.nest.map_structure(tf.constant, result)

        return call

    def _program(
        self, fn: Callable[..., Any], placing: Placing, args: tuple[Any, ...]
    ) -> Callable[..., Any]:
        """Returns a function of the values of tensors that runs a new program in the session."""
        with (
            self._graph.as_default(),
            # A program uses the variables of those before it, under the names that layers give
            # them: these are counted from the beginning, as in the scope of a VariableStore.
            tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE),
        ):
            fed = [
                tf.placeholder(x.dtype, x.shape) for x in tf.nest.flatten(args) if tf.is_tensor(x)
            ]

            def program(*tensors: tf.Tensor) -> Any:
                remaining = iter(tensors)
                filled = [next(remaining) if tf.is_tensor(x) else x for x in tf.nest.flatten(args)]
                return fn(*tf.nest.pack_sequence_as(args, filled))

            results = collecting(lambda: placing.run(program, fed))()
            if self._session is None:
                self._session = self._placing.session(self._graph)
            self._begin(self._session)
            return self._session.make_callable(results, fed)

    def _begin(self, session: tf.Session) -> None:
        """Gives the variables that no program has used yet their values."""
        # The others may have been assigned since: an initializer would set them back.
        new = {v.op.name: v for v in tf.global_variables() if v.op.name not in self._variables}
        init_from_values(self._values, [(n, v) for n, v in new.items() if n in self._values])
        session.run([v.initializer for v in new.values()])
        self._variables |= new


def _key(x: Any) -> Hashable:
    """Returns what a program depends on of an argument, or of a structure of arguments."""
    if tf.is_tensor(x):
        return tf.TensorSpec(x.shape, x.dtype)
    if isinstance(x, Mapping):
        return type(x), tuple((name, _key(x[name])) for name in sorted(x))
    if isinstance(x, (list, tuple)):
        return type(x), tuple(map(_key, x))
    return leaf_key(x)


# -- places


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a model computes.

    Attributes:
      placing: where its programs run: the mesh, the layout, the devices, and of which kind it is.
      mesh_impl: the mesh implementation; on a SIMD mesh that of the same mesh and layout which runs
        no program.
      shows: whether to show how far the reading of weights is.
    """

    placing: Placing
    mesh_impl: Union[PlacementMeshImpl, GspmdMeshImpl]
    shows: bool

    def __repr__(self) -> str:
        """Says on which mesh."""
        return f"{'SIMD programs of ' if self.placing.simd else ''}{self.mesh_impl!r}"

    @property
    def _layout_arguments(self) -> dict[str, Any]:
        """The mesh, its layout and how it stores variables, as arguments of functions."""
        placing = self.placing
        return {"mesh_shape": placing.shape, "layout": placing.rules, **placing.stored}

    @property
    def of_fit(self) -> dict[str, Any]:
        """The arguments of `mtf.train.fit` that train there."""
        if self.placing.pjrt:
            return {**self._layout_arguments, "mesh_impl": "pjrt"}
        if self.placing.simd:
            devices = self.placing.devices
            return {**self._layout_arguments, "devices": devices, "mesh_impl": "simd"}
        return {"mesh_impl": self.mesh_impl}

    def new_store(self) -> Union[VariableStore, SessionStore]:
        """Returns a store for the variables of functions."""
        if self.placing.simd:
            return SessionStore(self.placing)
        return pjrt().ArrayStore() if self.placing.pjrt else VariableStore()

    def function(
        self, fn: Callable[..., Any], store: Union[VariableStore, SessionStore]
    ) -> Callable[..., Any]:
        """Returns a function compiled, with arguments and results of TensorFlow.

        Args:
          fn: a function of tf.Tensors that lowers a program by `lower`.
          store: where its variables are.
        """
        if isinstance(store, SessionStore):
            return store.function(fn, self.placing)
        if not self.placing.pjrt:

            @functools.wraps(fn)
            def uncompiled(*args: Any) -> Any:
                # Only eager code calls it, so that caches are written to in place.
                with never_compiled():
                    return fn(*args)

            program = function(uncompiled, store=store)
            # A trace for each shape and set of arguments is meant, and several models share this
            # code: TensorFlow's warning, made for a tf.function in a loop, would tell users of it.
            # Nothing public turns it off: `reduce_retracing` makes sizes unknown, which programs
            # need; functions of one trace each are counted as one, since they have one code; and
            # `get_concrete_function`, which is not counted, would look for the trace twice a call.
            program.tf_function._omit_frequent_tracing_warning = True
            return program
        compiled = pjrt().function(fn, store=store, **self._layout_arguments)

        def call(*args: Any) -> Any:
            # A process has parts of an array alone; asked for in all of them, it has all of it.
            outputs = compiled(*args)
            return tf.nest.map_structure(lambda x: tf.constant(pjrt().gathered(x)), outputs)

        return call

    def lower(self, mesh: mtf.Mesh, rows: int) -> mtf.Lowering:
        """Returns the Lowering of a program of such a function.

        Args:
          mesh: the Mesh.
          rows: the size of its batch, as `filled_up` has made it.
        """
        if self.placing.simd:
            impl = self.placing.make_impl()
        else:
            impl = pjrt().mesh_impl() if self.placing.pjrt else self._place_of(rows).mesh_impl
        return mtf.Lowering(mesh.graph, {mesh: impl})

    @property
    def can_listen(self) -> bool:
        """Whether a function of Python can follow a program."""
        return not self.placing.pjrt

    def check_can_listen(self, what: str) -> None:
        """Raises ValueError where no function of Python can follow a program.

        Args:
          what: what would follow it.
        """
        if not self.can_listen:
            raise ValueError(
                f"{what}: mesh_impl='pjrt' compiles all steps into one program, which tells "
                "nothing before its end: no pieces, and no texts in stop. Stop at ids, or leave "
                "mesh_impl out of from_pretrained"
            )

    def filled_up(self, rows: np.ndarray) -> np.ndarray:
        """Returns rows with the last one repeated, so many that the layout can split them.

        Args:
          rows: an array, [batch, ...].
        """
        num_parts = self._place_of(len(rows))._parts("batch")
        return np.concatenate([rows, *[rows[-1:]] * (-len(rows) % num_parts)])

    def _place_of(self, rows: int) -> Place:
        """Returns the place of a program of so many rows: a single one is not split.

        Copies of it for the other processors would be as much work on each of them, and more where
        several share a memory, in which equal slices are computed once.
        """
        # A program of JAX or of a SIMD mesh has the layout of the function that it is of.
        has_own = not (self.placing.pjrt or self.placing.simd)
        return self.without("batch") if rows == 1 and has_own else self

    def without(self, name: str) -> Place:
        """Returns the same place with a layout that does not split a dimension."""
        rules = self.mesh_impl.layout_rules
        if all(d != name for d, _ in rules.pairs):
            return self
        impl = self.mesh_impl.with_layout(rules.without(name))
        return dataclasses.replace(self, placing=self.placing.without(name), mesh_impl=impl)

    def _parts(self, name: str) -> int:
        """Returns in how many parts the layout splits a dimension."""
        impl = self.mesh_impl
        return mtf.tensor_dim_to_mesh_dim_size(
            impl.layout_rules, impl.shape, mtf.Dimension(name, 1)
        )

    def pipeline(
        self,
        what: str,
        num_stages: Optional[int],
        num_microbatches: Optional[int],
        num_repeats: int,
    ) -> dict[str, int]:
        """Returns the arguments of `PipelinedLayerStack.of`; none for layers in a row.

        Args:
          what: the function that was called, for errors.
          num_stages: see `from_pretrained`, as for the others.
          num_microbatches: likewise.
          num_repeats: likewise.

        Raises:
          ValueError: a number is none, does not fit the layout, or is of no pipeline.
        """
        num_parts = self._parts("stages")
        stages = num_parts if num_stages is None else num_stages
        # With fewer of them than stages, a processor would have nothing to do at any moment.
        microbatches = stages if num_microbatches is None else num_microbatches
        arguments = {
            "num_stages": stages,
            "num_microbatches": microbatches,
            "num_repeats": num_repeats,
        }
        for name, value in arguments.items():
            check_whole(what, name, value)
        if stages % num_parts:
            raise ValueError(
                f"{what}: num_stages={stages} is no multiple of the {num_parts} processors that "
                "the layout splits stages over; give a multiple, or leave num_stages out for "
                f"{num_parts}"
            )
        if stages > 1:
            return arguments
        if microbatches > 1 or num_repeats > 1:
            raise ValueError(
                f"{what}: num_microbatches and num_repeats are of a pipeline, which has no stages; "
                'give num_stages, or a layout that splits them, such as "stages:all"'
            )
        return {}


def place_of(
    what: str,
    mesh_shape: ShapeLike,
    layout: LayoutLike,
    devices: Optional[Sequence[str]],
    mesh_impl: Optional[str],
    *,
    zero: Optional[int],
    zero_axis: Optional[str],
    uneven: bool,
    shows: bool = True,
) -> Place:
    """Returns the Place that the arguments of `from_pretrained` describe.

    Args:
      what: the function that was called, for errors.
      mesh_shape: see `from_pretrained`, as for the others.
      layout: likewise.
      devices: likewise.
      mesh_impl: likewise.
      zero: likewise.
      zero_axis: likewise.
      uneven: likewise.
      shows: see Place.

    Raises:
      ValueError: the mesh implementation is not known, or the devices are not there.
    """
    shape = convert_to_shape(mesh_shape)
    if shape is None:
        raise ValueError(f"{what}: mesh_shape=None is no mesh; leave it out for one processor")
    check_flag(what, "uneven", uneven)
    stored: dict[str, Any] = {"zero": zero, "zero_axis": zero_axis}
    if mesh_impl is not None:
        check_choice(what, "mesh_impl", mesh_impl, MESH_IMPLS)
    if layout == "auto" or isinstance(layout, Auto):
        raise ValueError(
            f"{what}: layout={layout!r} is of trainings, whose steps are timed: give it to "
            "mtf.models.finetune or mtf.train.fit, with mesh_shape. A model has a layout that is "
            "said: mtf.models.layouts.of returns one for ways such as 'tensor:4', and "
            "mtf.models.layouts.plan searches for one"
        )
    rules = convert_to_layout_rules(layout)
    rules = rules.allowing_uneven() if uneven else rules
    if mesh_impl == "pjrt":
        check_pjrt(what, devices)
        placing = Placing(shape, rules, (), pjrt=True, stored=stored)
        return Place(placing, GspmdMeshImpl(shape, rules, **stored), shows)
    _check_own(what, devices or ())
    simd = mesh_impl == "simd"
    placing = Placing(shape, rules, devices_of(shape, devices, simd, what), simd, stored=stored)
    # Else, a rule with a misspelled mesh dimension would split nothing, without a word.
    # Processors of one memory would each read the same weights from it, which is most of the time
    # of a step of decoding.
    merged: Any = {"strict_layout": True, "merge": "memory", **stored}
    return Place(placing, PlacementMeshImpl(shape, rules, placing.devices, **merged), shows)


def _check_own(what: str, devices: Sequence[str]) -> None:
    """Raises ValueError for devices of processes that eager code is not connected to.

    Args:
      what: the function that was called, for errors.
      devices: device strings.
    """
    for device in devices:
        if (spec := device_spec(device)).job in (None, "localhost"):
            continue
        own = [device_spec(known.name) for known in tf.config.list_logical_devices()]
        if not any(spec.job == one.job and spec.task == one.task for one in own):
            raise ValueError(
                f"{what}: devices has {device!r}, and the calls of a model run on devices of their "
                "own process. With mesh_impl='pjrt' several processes share them: start these with "
                "python -m mesh_tensorflow.launch --runtime pjrt. Without it each computes the "
                "whole, on '/device:CPU:0' and the like"
            )
