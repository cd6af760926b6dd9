"""PipelinedLayerStack: a stack whose layers are the stages of a pipeline.

A layer is written for one stage. Its activations get a dimension of stages, which it does not know
of; so must its variables and its random values. A first call of the layers, whose operations are
taken away again, tells what they ask for. Then variables are made with the names of the layers of
all stages, and random values in the order in which the layers in a row would draw them.

What the first call made is also checked: which Tensors it read, whether an operation joined stages,
and what it left in the Context. Stages are on different processors, so they cannot share anything
but variables.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

import gin
import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers as mtf_layers
from mesh_tensorflow._core.errors import dims_text, divisors
from mesh_tensorflow._core.operation import Operation, depending_on, with_inner_operations
from mesh_tensorflow._mesh.random_values import draws_its_seed
from mesh_tensorflow.ops._random import RandomOperation
from mesh_tensorflow.ops._variable import full_variable_name
from mesh_tensorflow.transformer.transformer._context import TransformerLayer
from mesh_tensorflow.transformer.transformer._stack import LayerStack

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context


@dataclasses.dataclass(frozen=True)
class Pipes:
    """The dimensions of a pipeline.

    Attributes:
      stages: the Dimension of stages.
      repeats: the Dimension of passes of a circular pipeline, or None.
      batch: the Dimension of the batch.
      microbatches: the number of microbatches.
    """

    stages: mtf.Dimension
    repeats: Optional[mtf.Dimension]
    batch: mtf.Dimension
    microbatches: int

    @property
    def microbatch(self) -> mtf.Dimension:
        """The batch's Dimension within a stage."""
        return mtf.Dimension(self.batch.name, self.batch.size // self.microbatches)

    @property
    def slots(self) -> int:
        """The number of stages in all passes."""
        return self.stages.size * (1 if self.repeats is None else self.repeats.size)

    def within(self, shape: mtf.Shape) -> mtf.Shape:
        """Returns the shape that a Tensor of the whole batch has in the stages."""
        dims = [self.microbatch if d == self.batch else d for d in shape]
        return mtf.Shape([self.stages, *(d for d in dims if d != self.stages)])

    def whole(self, shape: mtf.Shape) -> mtf.Shape:
        """Returns the shape, for the whole batch, of what one stage has."""
        dims = [d for d in shape if d != self.stages]
        return mtf.Shape([self.batch if d == self.microbatch else d for d in dims])

    def joined(self, of_slots: Sequence[mtf.Tensor]) -> mtf.Tensor:
        """Stacks the Tensors of all stages, which are in the order of layers."""
        size, name = self.stages.size, self.stages.name
        rows = []
        # Slots are in the order of layers: stage s of pass r is slot r * stages + s.
        for i in range(0, len(of_slots), size):
            # A dimension along which Tensors are stacked is split only under another name.
            row = mtf.stack(list(of_slots[i : i + size]), f"{name}_whole")
            rows.append(mtf.rename_dimension(row, f"{name}_whole", name))
        return rows[0] if self.repeats is None else mtf.stack(rows, self.repeats.name)


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What a layer asked for: a variable, or random values."""

    shape: mtf.Shape
    kwargs: dict[str, Any]
    placeholder: mtf.Tensor
    position: int
    scope: Any = None
    name: str = ""
    dtype: Any = None
    tf_fn: Optional[Callable] = None


class Stages:
    """Gives layers of all stages what they ask for; see `Graph.stages`.

    Attributes:
      dims: the dimensions of stages, which layers do not know of and never sum over.
      position: the place, among the layers of a stage, of the layer that is being called.
      shared: names of variables that the layers of all stages share with those of the first.
    """

    def __init__(self, mesh: mtf.Mesh, pipes: Pipes, names: Sequence[Sequence[str]]) -> None:
        """Creates it.

        Args:
          mesh: a Mesh.
          pipes: the dimensions.
          names: for each layer of a stage, its names in all stages.
        """
        self.dims = [pipes.stages]
        self.position = 0
        self.shared: set[str] = set()
        self._mesh, self._pipes, self._names = mesh, pipes, names
        # Names of layers are relative to the scope around the stack, those of variables are not.
        self._scope = tf.get_variable_scope().name
        self._variables: dict[str, _Asked] = {}
        self._random: list[_Asked] = []
        self._given: Optional[dict[str, mtf.Tensor]] = None
        self._noise: Iterator[Optional[mtf.Tensor]] = iter(())

    def check_apart(self, operations: Iterable[Operation]) -> None:
        """Checks that operations keep the stages apart; see StagesLike."""
        check_stages_apart(operations, self._pipes.stages)

    def _in_all(self, shape: mtf.Shape) -> mtf.Shape:
        return mtf.Shape([*self.dims, *(d for d in shape if d not in self.dims)])

    @property
    def placeholders(self) -> dict[mtf.Tensor, str]:
        """What stood for variables in the first call, with their names."""
        return {variable.placeholder: name for name, variable in self._variables.items()}

    def zeros(self, shape: mtf.Shape, dtype: tf.DType) -> mtf.Tensor:
        """Returns what stands for a Tensor in the first call."""
        with self._mesh.graph.within(None):
            if dtype == tf.bool:
                return mtf.cast(mtf.zeros(self._mesh, shape), dtype)
            return mtf.zeros(self._mesh, shape, dtype)

    def variable(
        self, name: str, shape: mtf.Shape, dtype: mtf.VariableDType, **kwargs: Any
    ) -> mtf.Tensor:
        """Returns the values of a variable in all stages; see StagesLike."""
        full_name = full_variable_name(name)
        differentiated = self._mesh.graph.differentiated
        if differentiated is not None:
            raise ValueError(
                f"{differentiated.name}: its gradient function asks for the variable {full_name}, "
                "but in a pipeline it must use those that the function was given, which are among "
                "explicit_inputs and all_inputs, or the inputs of the operation"
            )
        if self._given is not None:
            return self._given[full_name]
        # A layer may ask for one variable twice, as for a table that it shares with others.
        if full_name not in self._variables:
            self._variables[full_name] = _Asked(
                # A shape that a layer takes from its input has the stages in it.
                mtf.Shape([d for d in shape if d not in self.dims]),
                kwargs,
                self.zeros(self._in_all(shape), dtype.activation_dtype),
                self.position,
                tf.get_variable_scope(),
                full_name,
                dtype,
            )
        return self._variables[full_name].placeholder

    def random(self, shape: mtf.Shape, tf_fn: Callable, **kwargs: Any) -> mtf.Tensor:
        """Returns random values for all stages; see StagesLike."""
        inside = self._in_all(shape)
        if self._given is None:
            request = _Asked(
                # A layer in a row draws for the whole batch, of which microbatches get their rows.
                self._pipes.whole(shape),
                kwargs,
                self.zeros(inside, tf.as_dtype(kwargs.get("dtype", tf.float32))),
                self.position,
                tf_fn=tf_fn,
            )
            self._random.append(request)
            return request.placeholder
        # They were made in the order of the first call, which the layers repeat.
        # A gradient function draws for itself: it is called when all of them have been taken.
        noise = next(self._noise, None)
        if noise is None:
            return RandomOperation(self._mesh, inside, tf_fn, **kwargs).outputs[0]
        return mtf.transpose(noise, inside)

    def make_weights(self) -> dict[str, mtf.Tensor]:
        """Returns the variables of all stages, joined, by their names in the first stage.

        They are made in the order in which the layers in a row make them.
        """
        weights: dict[str, list[mtf.Tensor]] = {name: [] for name in self._variables}
        for slot in range(self._pipes.slots):
            for name, variable in self._variables.items():
                # What layers share is made once, as later layers in a row find it in the cache.
                if not slot or name not in self.shared:
                    weights[name].append(self._make(variable, slot))
        return {
            # What all stages share is one Tensor, and needs no dimension of stages.
            name: values[0] if len(set(values)) == 1 else self._pipes.joined(values)
            for name, values in weights.items()
        }

    def _make(self, variable: _Asked, slot: int) -> mtf.Tensor:
        scope = variable.scope
        # The name is whole, but initializers and custom getters are those of the layer's scope.
        at_root = tf.VariableScope(
            reuse=scope.reuse,
            name="",
            initializer=scope.initializer,
            regularizer=scope.regularizer,
            custom_getter=scope.custom_getter,
            dtype=scope.dtype,
            constraint=scope.constraint,
        )
        kwargs = dict(variable.kwargs)
        initializer: Any = kwargs.get("initializer")
        # Layers in a row each make one, with a seed of its own; here the first stage's has made it.
        if slot and draws_its_seed(initializer):
            kwargs["initializer"] = type(initializer).from_config(initializer.get_config())
        with tf.variable_scope(at_root, auxiliary_name_scope=False):
            return mtf.get_variable(
                self._mesh, self._name_in(variable, slot), variable.shape, variable.dtype, **kwargs
            )

    def _name_in(self, variable: _Asked, slot: int) -> str:
        """Returns the name that a variable of the first stage has in another one."""
        names = self._names[variable.position]
        first, in_slot = ("/".join(filter(None, (self._scope, n))) for n in (names[0], names[slot]))
        if variable.name.startswith(f"{first}/"):
            return f"{in_slot}/{variable.name.removeprefix(first + '/')}".removeprefix("/")
        return variable.name

    def make_noise(self) -> list[Optional[mtf.Tensor]]:
        """Returns random values of the whole batch in all stages, as layers in a row draw them.

        None for those without rows of the batch, which are drawn in each tick.
        """
        drawn: list[list[mtf.Tensor]] = [[] for _ in self._random]
        # Stage by stage, each layer by layer: so seeds are those of layers in a row.
        for _ in range(self._pipes.slots):
            for request, values in zip(self._random, drawn):
                if self._pipes.batch in request.shape and request.tf_fn is not None:
                    op = RandomOperation(self._mesh, request.shape, request.tf_fn, **request.kwargs)
                    values += op.outputs
                else:
                    # A layer in a row would take this number, which seeds its values.
                    self._mesh.graph.next_random_operation()
        return [self._pipes.joined(values) if values else None for values in drawn]

    def give(self, variables: dict[str, mtf.Tensor], noise: Sequence[Optional[mtf.Tensor]]) -> None:
        """Sets what the layers get in the next call of them.

        Args:
          variables: the values of variables, by their names in the first stage.
          noise: random values of microbatches; None for those that are drawn anew.
        """
        self._given, self._noise = variables, iter(noise)


# What layers may set in a Context: the stack itself does, or it is taken care of.
_MAY_CHANGE = {"cache", "current_layer", "current_layer_input", "layer_outputs", "losses"}
_MEND = "use a LayerStack for such layers"


def tensors_in(value: object) -> Iterator[mtf.Tensor]:
    """Yields the Tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, mtf.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from tensors_in(v)
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from tensors_in(v)


def alike(a: Any, b: Any, seen: Collection[int] = ()) -> bool:
    """Returns whether two layers, or attributes of them, are equal but for their names."""
    # Objects that refer back to themselves are compared once.
    if a is b or id(a) in seen:
        return True
    if type(a) is not type(b):
        return False
    seen = {*seen, id(a)}
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(alike(x, y, seen) for x, y in zip(a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[k], b[k], seen) for k in a)
    if isinstance(a, np.ndarray):  # whose text leaves out the middle
        return a.dtype == b.dtype and np.array_equal(a, b)
    if not isinstance(a, type) and isinstance(parts := _parts_of(a), list):
        return alike(parts, _parts_of(b), seen)
    return repr(a) == repr(b)


def _parts_of(x: Any) -> Optional[list[Any]]:
    """Returns what makes an object what it is; None if only its text tells.

    The text of initializers and functions has their address, which is never that of others.
    """
    if isinstance(x, types.MethodType):
        return [x.__func__, x.__self__]
    if isinstance(x, functools.partial):
        return [x.func, x.args, x.keywords]
    if isinstance(x, types.FunctionType):
        # A cell is empty as long as the function's variable has no value, and after `del`.
        cells = enumerate(x.__closure__ or ())
        closure = {i: cell.cell_contents for i, cell in cells if cell != types.CellType()}
        return [x.__code__, x.__defaults__, x.__kwdefaults__, closure]
    if hasattr(x, "__dict__"):
        drawn = "seed" if draws_its_seed(x) else None
        return [{k: v for k, v in vars(x).items() if k not in ("_name", drawn)}]
    return None


def used(operations: Iterable[Operation]) -> set[mtf.Tensor]:
    """Returns all inputs of operations."""
    return {x for op in with_inner_operations(operations) for x in op.inputs}


def check_stages_apart(operations: Iterable[Operation], stages: mtf.Dimension) -> None:
    """Checks that operations keep the stages apart.

    Raises:
      ValueError: one of them joins stages.
    """
    for op in with_inner_operations(operations):
        joined = [x for x in op.inputs if stages in x.shape]
        # A loop counts, beside what has the stages: what it joins, its operations join.
        if joined and op.loop is None and not all(stages in y.shape for y in op.outputs):
            raise ValueError(
                f"PipelinedLayerStack: {op.name} ({type(op).__name__}) makes "
                f"{', '.join(str(y.shape) for y in op.outputs)} of {joined[0].shape}, and so joins "
                f"the layers of different {stages.name}; a layer of a pipeline must keep the "
                f"dimension {stages.name}={stages.size} that its input has, or {_MEND}"
            )


def check_context(
    before: Mapping[str, object],
    after: Mapping[str, object],
    cached: Mapping[Any, Sequence[mtf.Tensor]],
    depending: Collection[mtf.Tensor],
) -> None:
    """Checks that layers leave nothing in the Context that other stages would need.

    Args:
      before: the attributes of the Context before the first call.
      after: the attributes after it.
      cached: the Tensors that the layers have put into its cache and that are no variables.
      depending: what depends on a layer's input or variables.

    Raises:
      ValueError: they do.
    """
    changed = [k for k, v in after.items() if k not in _MAY_CHANGE and before.get(k) is not v]
    if changed:
        raise ValueError(
            f"PipelinedLayerStack: the layers set context.{changed[0]}, which stages of a pipeline "
            f"cannot share, as they are on different processors; {_MEND}"
        )
    for key, values in cached.items():
        bad = [v for v in values if v in depending]
        if bad:
            raise ValueError(
                f"PipelinedLayerStack: a layer leaves {bad[0].name} {bad[0].shape}, which depends "
                f"on its input or its variables, in context.cache[{key!r}] for later layers, but "
                f"stages of a pipeline are on different processors and share variables only; "
                f"compute it in each layer, or {_MEND}"
            )


_PIPELINED_MODES = ("train", "eval", "score")
_PLACES = "pipeline_places"  # stages and passes, in the order of the layers
# Lists of a Context that grow, or that belong to decoding.
_OWN = ("constant_states", "layer_outputs", "losses", "new_states", "routings", "states")


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
class PipelinedLayerStack(LayerStack):
    """A LayerStack whose layers are the stages of a pipeline; see `mtf.layers.pipeline`.

    The layers are cut into `num_stages` stages of equal layers. Stages are a dimension named
    "stages": the layout rule `stages:axis` puts them on different processors. With `num_repeats`,
    the pipeline is circular: each stage has as many parts of the layers, and each microbatch passes
    all stages as many times.

    Variables, their initial values and checkpoints are those of a LayerStack, as are results, with
    dropout, too: each layer draws the random values of the whole batch that it would draw there.
    (Random values without rows of the batch are drawn anew for each microbatch.) Losses of layers
    are averaged over microbatches, and mixtures of experts dispatch the tokens of one microbatch at
    a time. In decoding, layers are applied in a row.

    Layers are called with activations of all stages at once: the first of `context.batch_dims` is
    the dimension of stages. Results of layers within the stack are not appended to
    `context.layer_outputs`.
    """

    def __init__(
        self,
        layers: Sequence[TransformerLayer],
        num_stages: int = gin.REQUIRED,
        num_microbatches: int = gin.REQUIRED,
        num_repeats: int = 1,
        **kwargs: Any,
    ) -> None:
        """Creates the stack.

        Args:
          layers: a list of TransformerLayers.
          num_stages: the number of stages.
          num_microbatches: the number of microbatches, which divides the last of the batch's
            dimensions.
          num_repeats: how many parts of the layers each stage has.
          **kwargs: further arguments of LayerStack, bindings of which hold for this stack, too.
            With `recompute_grads`, only the inputs of stages are kept for gradients.

        Raises:
          ValueError: `num_stages * num_repeats` does not divide the number of layers, or layers
            at the same place in two stages differ.
        """
        super().__init__(layers, **kwargs)
        self._num_stages, self._num_repeats = num_stages, num_repeats
        self._num_microbatches = num_microbatches
        self._check_layers()

    @classmethod
    def of(
        cls, stack: LayerStack, num_stages: int, num_microbatches: int, num_repeats: int = 1
    ) -> PipelinedLayerStack:
        """Returns a stack with the layers and sublayers of another one, as stages of a pipeline.

        Args:
          stack: a LayerStack.
          num_stages: the number of stages.
          num_microbatches: the number of microbatches.
          num_repeats: how many parts of the layers each stage has.

        Raises:
          ValueError: as when the stack is created.
        """
        legacy = stack.dropout_rate is not None  # it has the sublayers then
        return cls(
            stack.layers,
            num_stages,
            num_microbatches,
            num_repeats,
            sublayers_initial=None if legacy else stack._sublayers_initial,
            sublayers_per_layer=None if legacy else stack._sublayers_per_layer,
            sublayers_final=None if legacy else stack._sublayers_final,
            dropout_rate=stack.dropout_rate,
            norm_epsilon=stack.norm_epsilon,
            recompute_grads=stack.recompute_grads,
            sequence_parallel=stack.sequence_parallel,
            recompute_budget=stack._recompute_budget,
        )

    @property
    def schedule(self) -> mtf_layers.PipelineSchedule:
        """The schedule of the pipeline, which tells its ticks and its bubble."""
        return mtf_layers.PipelineSchedule(
            self._num_stages, self._num_microbatches, self._num_repeats
        )

    def call(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
        """Calls the layers, as stages of a pipeline except in decoding; see `LayerStack.call`.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, d_model].

        Returns:
          A Tensor of the same shape, zero at padding.

        Raises:
          ValueError: microbatches do not divide the batch, layers share what stages cannot, or the
            stack has a recompute_budget.
        """
        if context.mode not in _PIPELINED_MODES:
            return super().call(context, x)
        self._check_no_budget()
        # Sublayers at both ends are no part of a stage: they get the whole batch.
        x = self._begin(context, x)
        x = _Call(self, context, x, self._pipes(context, x)).run()
        # Layers after the stack have the numbers that they have after layers in a row.
        context.layer_index += self.num_layers
        return self._finish(context, x)

    @property
    def _layers_per_stage(self) -> int:
        return self.num_layers // (self._num_stages * self._num_repeats)

    def _check_layers(self) -> None:
        slots = self._num_stages * self._num_repeats
        if slots < 1 or self.num_layers % slots or not self.num_layers:
            stages = f"num_stages={self._num_stages}"
            if self._num_repeats != 1:
                stages += f" * num_repeats={self._num_repeats}"
            fits = ", ".join(str(k) for k in divisors(self.num_layers)) or "none"
            raise ValueError(
                f"PipelinedLayerStack: {stages} does not divide the {self.num_layers} layers; "
                f"choose num_stages from {fits}, or another number of layers"
            )
        per_stage = self._layers_per_stage
        for i, layer in enumerate(self._layers):
            first = self._layers[i % per_stage]
            if not alike(first, layer):
                raise ValueError(
                    f"PipelinedLayerStack: layer {layer.name} ({type(layer).__name__}) differs "
                    f"from {first.name} ({type(first).__name__}), which has its place in the first "
                    f"stage: stages of {per_stage} layers compute the same function. Choose "
                    f"num_stages so that stages are alike, or use a LayerStack"
                )

    def _pipes(self, context: Context, x: mtf.Tensor) -> Pipes:
        dims = [d for d in context.batch_dims if d in x.shape]
        count = self._num_microbatches
        if not dims or count < 1 or dims[-1].size % count:
            fits = ", ".join(str(k) for k in divisors(dims[-1].size)[:12]) if dims else "none"
            raise ValueError(
                f"PipelinedLayerStack: num_microbatches={count} does not divide the batch "
                f"{dims_text(dims[-1:]) or 'of no dimension'} of {x.name} {x.shape}; choose "
                f"num_microbatches from {fits}, or another size of the batch"
            )
        repeats = mtf.Dimension("repeats", self._num_repeats) if self._num_repeats > 1 else None
        return Pipes(mtf.Dimension("stages", self._num_stages), repeats, dims[-1], count)


class _Call:
    """One call of the stack."""

    def __init__(
        self, stack: PipelinedLayerStack, context: Context, x: mtf.Tensor, pipes: Pipes
    ) -> None:
        self._stack, self._context, self._x, self._pipes = stack, context, x, pipes
        self._layers = stack.layers[: stack._layers_per_stage]
        step = len(self._layers)
        names = [[layer.name or "" for layer in stack.layers[i::step]] for i in range(step)]
        self._stages = Stages(x.mesh, pipes, names)
        # Tensors of the whole batch in the Context, with what stood for them in the first call.
        self._stand_ins: dict[mtf.Tensor, mtf.Tensor] = {}

    def run(self) -> mtf.Tensor:
        """Returns the output of the last stage."""
        graph, context = self._x.graph, self._context
        mark = graph.mark()
        cached, used = self._first_call(mark.operations)
        # What the first call made is of no use but for what it has told, and names must be free
        # again for the real call.
        graph.roll_back(mark)
        weights, noise = self._stages.make_weights(), self._stages.make_noise()
        # Later layers find these in the cache, as they would after layers in a row.
        for key, name in cached.items():
            context.cache[key] = weights[name]

        place = [] if self._routings is None else [self._place_of_stages()]
        kinds: list[Any] = []  # classes of the routings of a stage

        def stage_fn(x: mtf.Tensor, *given: mtf.Tensor) -> list[mtf.Tensor]:
            # In the order in which they are given to `pipeline` below.
            rest = iter(given)
            own_weights = {name: next(rest) for name in weights}
            places = [next(rest) for _ in place]
            sides = {**self._stand_ins, **{side: next(rest) for side in used}}
            self._stages.give(own_weights, [None if n is None else next(rest) for n in noise])
            # What has no rows of the batch is the same for all microbatches.
            inner = self._inner_context(lambda t: sides.get(t, t))
            y = self._apply(inner, x)
            losses = [self._of_stages(loss) for loss in inner.losses or []]
            routings = (inner.routings or []) if places else []
            kinds[:] = map(type, routings)
            placed = [self._of_stages(t * places[0]) for of in routings for t in of]
            return [y, *losses, *placed]

        y, *losses = mtf_layers.pipeline(
            stage_fn,
            self._x,
            [*weights.values(), *place],
            self._pipes.stages,
            self._pipes.batch,
            self._pipes.microbatches,
            self._pipes.repeats,
            [*used, *(n for n in noise if n is not None)],
            recompute=self._stack._recomputes(context),
        )
        for kind in reversed(kinds):
            number = len(kind._fields)
            self._add_routings(kind, losses[-number:])
            del losses[-number:]
        if context.losses is not None:
            context.losses.extend(losses)
        return mtf.transpose(y, self._x.shape)

    @property
    def _routings(self) -> Optional[list]:
        """The list that mixtures of experts append to; None, or a user's own context lacks it."""
        return getattr(self._context, "routings", None)

    def _place_of_stages(self) -> mtf.Tensor:
        """Returns 1 at the place of a stage and a pass among all of them, and 0 elsewhere."""
        pipes = self._pipes
        number = self._stack.schedule.num_repeats
        slots = pipes.stages.size * number
        dims = [pipes.stages, *([] if pipes.repeats is None else [pipes.repeats])]
        ones = np.eye(slots).reshape([number, pipes.stages.size, slots]).swapaxes(0, 1)
        shape = mtf.Shape([*dims, mtf.Dimension(_PLACES, slots)])
        return mtf.constant(self._x.mesh, ones.reshape(shape.to_integer_list), shape, tf.float32)

    def _add_routings(self, kind: Any, tensors: Sequence[mtf.Tensor]) -> None:
        """Adds what one layer of a stage has routed, in each stage: sums over all microbatches."""
        assert self._routings is not None
        totals = [t * float(self._pipes.microbatches) for t in tensors]
        of_each = [mtf.unstack(t, t.shape.get_dim_by_name(_PLACES)) for t in totals]
        self._routings.extend(kind(*fields) for fields in zip(*of_each))

    def _first_call(self, start: int) -> tuple[dict[Any, str], list[mtf.Tensor]]:
        """Calls the layers to see what they ask for.

        Args:
          start: the number of operations before.

        Returns:
          (names of the variables that they leave in the cache, by keys of the cache; the Tensors
          of the Context, with rows of the batch, that they use).
        """
        stages, graph = self._stages, self._x.graph

        def stand_in(t: mtf.Tensor) -> mtf.Tensor:
            if self._pipes.batch not in t.shape:
                return t
            if t not in self._stand_ins:
                self._stand_ins[t] = stages.zeros(self._pipes.within(t.shape), t.dtype)
            return self._stand_ins[t]

        # Only shapes matter in this call, so that zeros do for all.
        x = stages.zeros(self._pipes.within(self._x.shape), self._x.dtype)
        inner = self._inner_context(stand_in)
        cached = set(self._context.cache)
        # A copy, as only a comparison tells which attributes the layers have set.
        before = dict(vars(inner))
        self._apply(inner, x)
        operations = graph.operations[start:]
        new = {key: value for key, value in inner.cache.items() if key not in cached}
        variables = stages.placeholders
        shared = {key: variables[v] for key, v in new.items() if v in variables}
        stages.shared.update(shared.values())
        check_context(
            before,
            vars(inner),
            {k: list(tensors_in(v)) for k, v in new.items() if k not in shared},
            depending_on([x, *variables], operations),
        )
        tensors = used(operations)
        # A side that no layer uses need not go along with the microbatches.
        return shared, [side for side, t in self._stand_ins.items() if t in tensors]

    def _apply(self, inner: Context, x: mtf.Tensor) -> mtf.Tensor:
        graph = x.graph
        start = len(graph.operations)
        with graph.within(self._stages):
            for i, layer in enumerate(self._layers):
                # Names of a variable in other stages are those of the layer that asks for it.
                self._stages.position = i
                with tf.variable_scope(layer.name or ""), self._pipeline_in_errors(layer, x):
                    x = self._stack._layer_fn(x, layer, inner)
        # In each call: a Tensor that all stages share has the stages in the first one.
        self._stages.check_apart(graph.operations[start:])
        return x

    @contextlib.contextmanager
    def _pipeline_in_errors(self, layer: TransformerLayer, x: mtf.Tensor) -> Iterator[None]:
        """Adds to mistakes that they are made in a pipeline, for which not all layers are."""
        try:
            yield
        except ValueError as error:
            raise ValueError(
                f"{error}\n  PipelinedLayerStack: this is layer {layer.name} "
                f"({type(layer).__name__}), called for all {self._pipes.stages.name} at once with "
                f"{x.shape}; use a LayerStack for layers that cannot have the dimension "
                f"{self._pipes.stages.name}"
            ) from error

    def _inner_context(self, replace: Callable[[mtf.Tensor], mtf.Tensor]) -> Context:
        """Returns a Context for the stages, with other Tensors for those of the whole batch."""
        context, pipes = self._context, self._pipes
        # A copy, so that attributes of a user's own class of contexts are there as well.
        inner = copy.copy(context)
        for name, value in vars(context).items():
            if name not in _OWN:
                setattr(inner, name, _replaced(value, replace))
        within = [pipes.microbatch if d == pipes.batch else d for d in context.batch_dims]
        inner.batch_dims = [pipes.stages, *within]
        # Lists of their own: what the first call appends must not remain in the Context.
        inner.layer_outputs = []
        inner.losses = None if context.losses is None else []
        if self._routings is not None:
            inner.routings = []
        # A copy of the Context whose layer_index raises an error: a layer that reads it would get
        # one number for all stages.
        inner.__class__ = _without_layer_index(type(context))
        return inner

    def _of_stages(self, loss: mtf.Tensor) -> mtf.Tensor:
        """Returns a loss of each stage; one that no stage's values are in is the same for all."""
        stages = self._pipes.stages
        return mtf.broadcast(loss, mtf.Shape([stages, *(d for d in loss.shape if d != stages)]))


def _replaced(value: Any, replace: Callable[[mtf.Tensor], mtf.Tensor]) -> Any:
    if isinstance(value, mtf.Tensor):
        return replace(value)
    if isinstance(value, dict):
        return {k: _replaced(v, replace) for k, v in value.items()}
    # Not isinstance: a named tuple cannot be made of one list of its fields.
    if type(value) in (list, tuple):
        return type(value)(_replaced(v, replace) for v in value)
    return value


def _without_layer_index(cls: type) -> type:
    """Returns a subclass whose `layer_index` is an error: all stages are called at once."""

    def layer_index(self: Any) -> int:
        raise ValueError(
            f"PipelinedLayerStack: {type(self.current_layer).__name__} reads context.layer_index, "
            f"which differs between the stages of a pipeline; use a LayerStack for such layers"
        )

    return type(cls.__name__, (cls,), {"layer_index": property(layer_index)})
