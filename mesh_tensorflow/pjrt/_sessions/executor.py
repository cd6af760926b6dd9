"""Executor: the programs of sessions and their variables, on the devices of this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import jax
import numpy as np
import tensorflow.compat.v1 as tf
from jax.sharding import NamedSharding

from mesh_tensorflow._core.layout import TensorLayout
from mesh_tensorflow._core.shape import Dimension, Shape
from mesh_tensorflow._stop_signals import deferred
from mesh_tensorflow.pjrt._devices import (
    AnyMesh,
    all_dtypes,
    check_kept,
    device_mesh,
    placed,
    process_count,
    run_step,
    sharding,
)
from mesh_tensorflow.pjrt._function import CompiledProgram
from mesh_tensorflow.pjrt._trace import Spec, Trace

__all__ = ["Description", "Executor", "VariableOfProgram"]

Layout = Optional[Sequence[Optional[int]]]


@dataclasses.dataclass(frozen=True)
class VariableOfProgram:
    """A variable of a program.

    Attributes:
      placeholder: the name of its value in the program; None if the program does not read it.
      sizes: its shape.
      dtype_name: the name of its dtype.
      axes: the mesh dimension that splits each of its dimensions, or None.
    """

    placeholder: Optional[str]
    sizes: Sequence[int]
    dtype_name: str
    axes: Layout

    @property
    def dtype(self) -> tf.DType:
        """Its dtype."""
        return tf.as_dtype(self.dtype_name)

    @property
    def layout(self) -> TensorLayout:
        """Its layout."""
        return TensorLayout(self.axes or [])

    @property
    def form(self) -> VariableOfProgram:
        """What has its layout: itself."""
        return self


@dataclasses.dataclass(frozen=True)
class Description:
    """A program, as one process tells the others.

    Attributes:
      mesh: pairs of the name and the size of each mesh dimension.
      devices: the numbers of its devices; None for the first of all.
      arguments: the names of its arguments.
      layouts: the layout of each of them, or None.
      variables: its variables, by name.
      fetches: the names of its results, and then of new values of variables.
      result_layouts: the layout of each result, or None.
      assigned: the names of the variables with new values.
    """

    mesh: Sequence[tuple[str, int]]
    devices: Optional[Sequence[int]]
    arguments: Sequence[str]
    layouts: Sequence[Layout]
    variables: Mapping[str, VariableOfProgram]
    fetches: Sequence[str]
    result_layouts: Sequence[Layout]
    assigned: Sequence[str]

    def plain(self) -> dict[str, Any]:
        """Returns it as what JSON can say."""
        return dataclasses.asdict(self)

    @staticmethod
    def of_plain(values: dict[str, Any]) -> Description:
        """Returns the Description that `plain` returned the values of.

        Args:
          values: the values.
        """
        variables = {n: VariableOfProgram(**v) for n, v in values["variables"].items()}
        return Description(**{**values, "variables": variables})


class _CompiledProgram:
    """A program, its compiled forms and its variables."""

    def __init__(self, description: Description, graph_def: tf.GraphDef):
        self.description, self._graph_def = description, graph_def
        self.arrays: dict[str, jax.Array] = {}
        shape = Shape([Dimension(*d) for d in description.mesh])
        self._mesh: AnyMesh = device_mesh(shape, _devices(description.devices))
        self.shardings: dict[str, NamedSharding] = {
            name: sharding(self._mesh, v.layout) for name, v in description.variables.items()
        }
        self._compiled: dict[Any, CompiledProgram] = {}

    def run(self, arrays: Sequence[np.ndarray]) -> list[jax.Array]:
        # XLA compiles for fixed shapes; the last batch of an epoch may be smaller.
        key = tuple(a.shape for a in arrays)
        if key not in self._compiled:
            self._compiled[key] = CompiledProgram(self._trace(arrays), self._mesh)
        program = self._compiled[key]
        with all_dtypes():
            arguments = [placed(a, s) for a, s in zip(arrays, program.arguments)]
            kept = [self.current(name) for name in program.kept]
            assigned = [self.current(name) for name in program.assigned]
            # Between the two, there are variables whose memory the step was given.
            with deferred():
                # No keys: the session draws them, and gives them as arguments.
                results, new = run_step(program.step, arguments, [], kept, assigned)
                self.arrays.update(zip(program.assigned, new))
        return results

    def current(self, name: str) -> jax.Array:
        if name not in self.arrays:
            raise ValueError(
                f"variable {name!r} has no value: run tf.global_variables_initializer() or restore "
                "a checkpoint, then lowering.copy_masters_to_slices()"
            )
        array = self.arrays[name]
        check_kept(name, array)
        return array

    def assign(self, name: str, value: np.ndarray) -> None:
        with all_dtypes():
            self.arrays[name] = placed(value, self.shardings[name])

    def _trace(self, arrays: Sequence[np.ndarray]) -> Trace:
        told = self.description
        read = {name: v for name, v in told.variables.items() if v.placeholder is not None}
        # What is assigned to and not read has no placeholder, but memory to give away.
        own = {**read, **{name: told.variables[name] for name in told.assigned}}
        wrapped = tf.wrap_function(
            lambda: tf.graph_util.import_graph_def(self._graph_def, name=""), []
        )
        feeds = [*told.arguments, *(v.placeholder for v in read.values())]
        pruned = wrapped.prune(
            [wrapped.graph.as_graph_element(name) for name in feeds],
            [wrapped.graph.as_graph_element(name) for name in told.fetches],
        )
        number = len(told.arguments)

        def function(*values: Any) -> Any:
            by_name = dict(zip(own, values[number:]))
            return pruned(*values[:number], *(by_name[name] for name in read))

        # In several processes, each device has all of a result, so that any can read it.
        several = process_count() > 1
        results = [None if several or x is None else TensorLayout(x) for x in told.result_layouts]
        return Trace(
            function,
            [Spec(a.shape, tf.as_dtype(a.dtype)) for a in arrays],
            [None if x is None else TensorLayout(x) for x in told.layouts],
            results,
            list,
            0,
            own,  # type: ignore[arg-type]  # what is used of ValueOfVariable
            list(told.assigned),
            None,
        )


def _devices(numbers: Optional[Sequence[int]]) -> Optional[list[Any]]:
    """Returns devices by their numbers."""
    if numbers is None:
        return None
    known = {device.id: device for device in jax.devices()}
    return [known[number] for number in numbers]


class Executor:
    """Programs and their variables, by the numbers of the programs."""

    def __init__(self) -> None:
        """Begins without programs."""
        self._programs: dict[int, _CompiledProgram] = {}

    def define(self, number: int, description: Description, graph_def: tf.GraphDef) -> None:
        """Adds a program.

        Args:
          number: its number.
          description: what it is.
          graph_def: its operations.
        """
        self._programs[number] = _CompiledProgram(description, graph_def)

    def forget(self, number: int) -> None:
        """Removes a program and its variables.

        Args:
          number: its number.
        """
        self._programs.pop(number, None)

    def run(self, number: int, arrays: Sequence[np.ndarray]) -> list[jax.Array]:
        """Does a step of a program; returns its results.

        Args:
          number: its number.
          arrays: its arguments.

        Raises:
          ValueError: a variable has no value yet.
        """
        return self._programs[number].run(arrays)

    def assign(self, number: int, name: str, value: np.ndarray) -> None:
        """Sets a variable; the array may not be changed any more.

        Args:
          number: the number of its program.
          name: its name.
          value: its whole value.
        """
        self._programs[number].assign(name, value)

    def place(self, number: int, name: str) -> tuple[jax.ShapeDtypeStruct, NamedSharding]:
        """Returns the shape and dtype of a variable, and where it has its parts.

        Args:
          number: the number of its program.
          name: its name.
        """
        program = self._programs[number]
        variable = program.description.variables[name]
        like = jax.ShapeDtypeStruct(tuple(variable.sizes), variable.dtype.as_numpy_dtype)
        return like, program.shardings[name]

    def put(self, number: int, name: str, array: jax.Array) -> None:
        """Sets a variable to an array that is on its devices.

        Args:
          number: the number of its program.
          name: its name.
          array: the array.
        """
        self._programs[number].arrays[name] = array

    def array(self, number: int, name: str) -> Optional[jax.Array]:
        """Returns a variable, or None if it has no value yet.

        Args:
          number: the number of its program.
          name: its name.
        """
        return self._programs[number].arrays.get(name)

    def current(self, number: int, name: str) -> jax.Array:
        """Returns a variable; see `array`.

        Args:
          number: the number of its program.
          name: its name.

        Raises:
          ValueError: it has no value yet.
        """
        return self._programs[number].current(name)
