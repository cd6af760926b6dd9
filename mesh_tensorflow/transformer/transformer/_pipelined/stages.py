"""Layers applied to all stages of a pipeline at once: what they ask for, and what they get.

A layer is written for one stage. Its activations get a dimension of stages, which it does not know
of; so must its variables and its random values. A first call of the layers, whose operations are
taken away again, tells what they ask for. Then variables are made with the names of the layers of
all stages, and random values in the order in which the layers in a row would draw them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.ops._random import RandomOperation
from mesh_tensorflow.ops._variables.variable import full_variable_name

__all__ = ["Pipes", "Stages"]


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
      dims: the dimensions of stages.
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
        self._scope = tf.get_variable_scope().name
        self._variables: dict[str, _Asked] = {}
        self._random: list[_Asked] = []
        self._given: Optional[dict[str, mtf.Tensor]] = None
        self._noise: Iterator[Optional[mtf.Tensor]] = iter(())

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Lets the operations of layers come here for variables and random values."""
        graph = self._mesh.graph
        graph.stages = self
        try:
            yield
        finally:
            graph.stages = None

    @contextlib.contextmanager
    def _outside(self) -> Iterator[None]:
        graph = self._mesh.graph
        graph.stages, inside = None, graph.stages
        try:
            yield
        finally:
            graph.stages = inside

    def _in_all(self, shape: mtf.Shape) -> mtf.Shape:
        return mtf.Shape([*self.dims, *(d for d in shape if d not in self.dims)])

    @property
    def placeholders(self) -> dict[mtf.Tensor, str]:
        """What stood for variables in the first call, with their names."""
        return {asked.placeholder: name for name, asked in self._variables.items()}

    def zeros(self, shape: mtf.Shape, dtype: tf.DType) -> mtf.Tensor:
        """Returns what stands for a Tensor in the first call."""
        with self._outside():
            if dtype == tf.bool:
                return mtf.cast(mtf.zeros(self._mesh, shape), dtype)
            return mtf.zeros(self._mesh, shape, dtype)

    def variable(
        self, name: str, shape: mtf.Shape, dtype: mtf.VariableDType, **kwargs: Any
    ) -> mtf.Tensor:
        """Returns the values of a variable in all stages; see StagesLike."""
        full_name = full_variable_name(name)
        if self._given is not None:
            return self._given[full_name]
        # A layer may ask for one variable twice, as for a table that it shares with others.
        if full_name not in self._variables:
            self._variables[full_name] = _Asked(
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
            asked = _Asked(
                self._pipes.whole(shape),
                kwargs,
                self.zeros(inside, tf.as_dtype(kwargs.get("dtype", tf.float32))),
                self.position,
                tf_fn=tf_fn,
            )
            self._random.append(asked)
            return asked.placeholder
        found = next(self._noise)
        if found is None:
            return RandomOperation(self._mesh, inside, tf_fn, **kwargs).outputs[0]
        return mtf.transpose(found, inside)

    def make_weights(self) -> dict[str, mtf.Tensor]:
        """Returns the variables of all stages, joined, by their names in the first stage.

        They are made in the order in which the layers in a row make them.
        """
        made: dict[str, list[mtf.Tensor]] = {name: [] for name in self._variables}
        for slot in range(self._pipes.slots):
            for name, asked in self._variables.items():
                if not slot or name not in self.shared:
                    made[name].append(self._make(asked, slot))
        return {
            name: values[0] if len(set(values)) == 1 else self._pipes.joined(values)
            for name, values in made.items()
        }

    def _make(self, asked: _Asked, slot: int) -> mtf.Tensor:
        scope = asked.scope
        at_root = tf.VariableScope(
            reuse=scope.reuse,
            name="",
            initializer=scope.initializer,
            regularizer=scope.regularizer,
            custom_getter=scope.custom_getter,
            dtype=scope.dtype,
            constraint=scope.constraint,
        )
        with tf.variable_scope(at_root, auxiliary_name_scope=False):
            return mtf.get_variable(
                self._mesh, self._name_in(asked, slot), asked.shape, asked.dtype, **asked.kwargs
            )

    def _name_in(self, asked: _Asked, slot: int) -> str:
        """Returns the name that a variable of the first stage has in another one."""
        names = self._names[asked.position]
        first, there = ("/".join(filter(None, (self._scope, n))) for n in (names[0], names[slot]))
        if asked.name.startswith(f"{first}/"):
            return f"{there}/{asked.name.removeprefix(first + '/')}".removeprefix("/")
        return asked.name

    def make_noise(self) -> list[Optional[mtf.Tensor]]:
        """Returns random values of the whole batch in all stages, as layers in a row draw them.

        None for those without rows of the batch, which are drawn in each tick.
        """
        drawn: list[list[mtf.Tensor]] = [[] for _ in self._random]
        for _ in range(self._pipes.slots):
            for asked, values in zip(self._random, drawn):
                if self._pipes.batch in asked.shape and asked.tf_fn is not None:
                    op = RandomOperation(self._mesh, asked.shape, asked.tf_fn, **asked.kwargs)
                    values += op.outputs
                else:
                    self._mesh.graph.next_random_operation()
        return [self._pipes.joined(values) if values else None for values in drawn]

    def give(self, variables: dict[str, mtf.Tensor], noise: Sequence[Optional[mtf.Tensor]]) -> None:
        """Sets what the layers get in the next call of them.

        Args:
          variables: the values of variables, by their names in the first stage.
          noise: random values of microbatches; None for those that are drawn anew.
        """
        self._given, self._noise = variables, iter(noise)
