"""PipelinedLayerStack: a stack whose layers are the stages of a pipeline.

Layers are written for one sequence of activations. The stack calls those of one stage for all
stages at once: `stages.py` gives them variables and random values with a dimension of stages, and
`first_call.py` checks beforehand that this is possible.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers as mtf_layers
from mesh_tensorflow._core.errors import dims_text, divisors
from mesh_tensorflow.transformer.transformer._layer import TransformerLayer
from mesh_tensorflow.transformer.transformer._pipelined import first_call
from mesh_tensorflow.transformer.transformer._pipelined.stages import Pipes, Stages
from mesh_tensorflow.transformer.transformer._stack import LayerStack

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = ["PipelinedLayerStack"]

_PIPELINED_MODES = ("train", "eval", "score")
# Lists of a Context that grow, or that belong to decoding.
_OWN = ("constant_states", "layer_outputs", "losses", "new_states", "states")


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
        x = self._begin(context, x)
        x = _Call(self, context, x, self._pipes(context, x)).run()
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
            if not first_call.alike(first, layer):
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
        for key, name in cached.items():
            context.cache[key] = weights[name]

        def stage_fn(x: mtf.Tensor, *given: mtf.Tensor) -> list[mtf.Tensor]:
            rest = iter(given)
            found = {name: next(rest) for name in weights}
            sides = {**self._stand_ins, **{side: next(rest) for side in used}}
            self._stages.give(found, [None if n is None else next(rest) for n in noise])
            inner = self._inner_context(lambda t: sides.get(t, t))
            y = self._apply(inner, x)
            return [y, *(self._of_stages(loss) for loss in inner.losses or [])]

        y, *losses = mtf_layers.pipeline(
            stage_fn,
            self._x,
            list(weights.values()),
            self._pipes.stages,
            self._pipes.batch,
            self._pipes.microbatches,
            self._pipes.repeats,
            [*used, *(n for n in noise if n is not None)],
            recompute=self._stack._recomputes(context),
        )
        if context.losses is not None:
            context.losses.extend(losses)
        return mtf.transpose(y, self._x.shape)

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

        x = stages.zeros(self._pipes.within(self._x.shape), self._x.dtype)
        inner = self._inner_context(stand_in)
        known = set(self._context.cache)
        before = dict(vars(inner))
        self._apply(inner, x)
        operations = graph.operations[start:]
        first_call.check_stages_apart(operations, self._pipes.stages)
        new = {key: value for key, value in inner.cache.items() if key not in known}
        variables = stages.placeholders
        shared = {key: variables[v] for key, v in new.items() if v in variables}
        stages.shared.update(shared.values())
        first_call.check_context(
            before,
            vars(inner),
            {k: list(first_call.tensors_in(v)) for k, v in new.items() if k not in shared},
            first_call.depending_on([x, *variables], operations),
        )
        used = first_call.used(operations)
        return shared, [side for side, t in self._stand_ins.items() if t in used]

    def _apply(self, inner: Context, x: mtf.Tensor) -> mtf.Tensor:
        with self._stages.building():
            for i, layer in enumerate(self._layers):
                self._stages.position = i
                with tf.variable_scope(layer.name or ""), self._said_where(layer, x):
                    x = self._stack._layer_with_sublayers(inner, layer, x)
        return x

    @contextlib.contextmanager
    def _said_where(self, layer: TransformerLayer, x: mtf.Tensor) -> Iterator[None]:
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
        inner = copy.copy(context)
        for name, value in vars(context).items():
            if name not in _OWN:
                setattr(inner, name, _replaced(value, replace))
        within = [pipes.microbatch if d == pipes.batch else d for d in context.batch_dims]
        inner.batch_dims = [pipes.stages, *within]
        inner.layer_outputs = []
        inner.losses = None if context.losses is None else []
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
