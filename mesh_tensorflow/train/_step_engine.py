"""An engine for a step function of the user: @mtf.function, or plain eager code."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Optional

import numpy as np
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._mesh.random_values import keys_by_step
from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._mesh.variables.checkpoint_files import faults
from mesh_tensorflow._stop_signals import StopSignals
from mesh_tensorflow.checkpoint import check_checkpoint
from mesh_tensorflow.train._data import Batch, Features
from mesh_tensorflow.train._engine import CHECKPOINT_NAME, wrong_values
from mesh_tensorflow.train._initial import Initial
from mesh_tensorflow.train._model import LoweredModel, Means, check_names

__all__ = ["StepEngine"]

_STEP = "global_step"


class StepEngine:
    """Calls a step function; saves the variables of its VariableStore.

    Attributes:
      lowered: None; the step function makes its own Lowerings.
    """

    lowered: Optional[LoweredModel] = None

    def __init__(
        self,
        step_fn: Callable[..., Any],
        eval_fn: Optional[Callable[..., Any]],
        store: Optional[mtf.VariableStore],
        features: Features,
        seed: Optional[int],
    ):
        """Creates an engine.

        Args:
          step_fn: a function of the features of a batch that updates weights and returns the loss,
            or a dictionary with "loss" and metrics.
          eval_fn: the same without updates; or None.
          store: the VariableStore of both; if None, `step_fn.store`.
          features: the structure of a batch.
          seed: the seed of a run, or None.

        Raises:
          ValueError: there is no store.
        """
        self._step_fn, self._eval_fn = step_fn, eval_fn
        found = getattr(step_fn, "store", None) if store is None else store
        if not isinstance(found, mtf.VariableStore):
            raise ValueError(
                f"fit: {getattr(step_fn, '__name__', step_fn)} is given without an optimizer, so "
                "it should be a step function: decorate it with @mtf.function, whose variables "
                "fit saves, or give fit(store=...), the mtf.VariableStore in whose scope it builds "
                "its program. For a model function, give fit an optimizer"
            )
        self._store: mtf.VariableStore = found
        self._features = features
        self._seed = seed
        self._step: Any = None

    def prepare(self, batch: Batch, checkpoint: Optional[str], initial: Optional[Initial]) -> None:
        """Begins counting steps, or restores a checkpoint."""
        self._features.check(batch)
        if tf.executing_eagerly():
            # What reads the global step, such as a schedule, counts the steps of this run.
            self._step = tf.train.get_or_create_global_step()
            self._step.assign(0)
            if self._seed is not None:
                tf2.random.set_seed(self._seed)
        if checkpoint is not None:
            self._restore(checkpoint, batch)
        elif initial is not None:
            self._begin_with(initial, batch)

    def _begin_with(self, initial: Initial, batch: Batch) -> None:
        """Sets the variables that the store has before the first step to given weights."""
        if _traced(self._step_fn) is not None:
            self._make_variables(batch)
        if not self._store.names:
            raise ValueError(
                "fit: init_checkpoint sets variables before the first step, but the store of this "
                "step function has none yet: decorate the function with @mtf.function, or call "
                "mtf.checkpoint.init_from_checkpoint(path, store.masters) once they are there"
            )
        masters = {n: v for n, v in self._store.masters.items() if n != _STEP}
        trained = {n for n, v in masters.items() if v.trainable}
        # Slots have the name of a weight with "/" or "_" after it; they are left to begin anew.
        roots = tuple(f"{name}{mark}" for name in trained for mark in "/_")
        own = {n: v for n, v in masters.items() if n in trained or not n.startswith(roots)}
        initial.load(own, trained, {})

    def _make_variables(self, batch: Batch) -> None:
        """Traces a tf.function, which makes its variables."""
        arguments = self._features.packed([tf2.constant(array) for array in batch])
        # As in a call: the trace is kept for calls, with random keys that depend on the step.
        with keys_by_step(self._step):
            _traced(self._step_fn).get_concrete_function(*arguments)

    def stops(self, step: int, wanted: bool, signals: StopSignals) -> bool:
        """Returns whether to stop after this step: if the process was asked to."""
        return wanted

    def settle(self, step: int) -> None:
        """Does nothing: there is one process."""

    def finish(self) -> None:
        """Does nothing: there is one process."""

    def _call(self, fn: Callable[..., Any], batch: Batch) -> dict[str, float]:
        if self._step is None:
            # In a graph, each batch as a tensor would stay there as a constant.
            returned = fn(*self._features.packed(batch))
        else:
            tensors = [tf2.constant(array) for array in batch]
            with keys_by_step(self._step):
                returned = fn(*self._features.packed(tensors))
        named = returned if isinstance(returned, Mapping) else {"loss": returned}
        check_names(named)
        return {str(name): _number(name, value) for name, value in named.items()}

    def train(self, batch: Batch) -> dict[str, float]:
        """Does a step; returns the loss and the metrics."""
        self._features.check(batch)
        # Read before the call and set after it, as the step function may count the global step
        # itself.
        before = None if self._step is None else int(self._step)
        if before is not None and self._seed is not None and _traced(self._step_fn) is None:
            # Eager operations are seeded by their order in the process; a run that is resumed has
            # had others before.
            tf2.random.set_seed(self._seed + before)
        values = self._call(self._step_fn, batch)
        if before is not None:  # the step function may count steps, too
            self._step.assign(before + 1, read_value=False)
        return values

    def evaluate(self, batches: Iterator[Batch]) -> dict[str, float]:
        """Returns the means over batches, each counted with its rows."""
        if self._eval_fn is None:
            raise ValueError(
                "fit: eval_data is given, but a step function also trains: give fit(eval_fn=...), "
                "a function of a batch that returns the loss and metrics, with the same store"
            )
        means = Means()
        for batch in batches:
            values = self._call(self._eval_fn, batch)
            means.add({name: [value] for name, value in values.items()}, len(batch[0]))
        return means.result({})

    def save(self, directory: str, step: int) -> tuple[str, list[str]]:
        """Writes a checkpoint; returns its path, and what in it is not a number, or infinite."""
        path = os.path.join(directory, f"{CHECKPOINT_NAME}-{step}")
        # Whole values under their own names, as a Saver of sessions writes them, so that any
        # program reads these files.
        values = {**self.values(), _STEP: np.int64(step)}
        tf.raw_ops.SaveV2(
            prefix=path,
            tensor_names=list(values),
            shape_and_slices=[""] * len(values),
            tensors=list(values.values()),
        )
        wanted = {name: (tf.as_dtype(np.asarray(v).dtype), [""]) for name, v in values.items()}
        weights = {name for name, v in self._store.masters.items() if v.trainable}
        return path, wrong_values(path, [faults(path, wanted)], weights)

    def _restore(self, path: str, batch: Batch) -> None:
        """Restores a checkpoint.

        A tf.function is traced, and eager code runs once, so that there are variables to restore.
        """
        if _traced(self._step_fn) is not None:
            self._make_variables(batch)
        else:
            self._call(self._step_fn, batch)
        wanted = {name: self._store.value(name) for name in self._store.names}
        check_checkpoint(path, wanted, read=True)
        reader = checkpoint_files.open_reader(path)
        for name in self._store.names:
            self._store.assign(name, reader.get_tensor(name))
        if self._step is not None:
            self._step.assign(int(reader.get_tensor(_STEP)))

    def values(self) -> dict[str, np.ndarray]:
        """Returns the whole values of all variables, by name."""
        return {name: self._store.value(name).numpy() for name in self._store.names}

    def close(self) -> None:
        """Holds nothing: the store belongs to the user."""


def _traced(fn: Callable[..., Any]) -> Any:
    """Returns the tf.function of a function; None if it is eager code."""
    found = getattr(fn, "tf_function", fn)
    return found if hasattr(found, "get_concrete_function") else None


def _number(name: object, value: Any) -> float:
    """Returns what a step function returned for a name as a float."""
    if np.ndim(value):
        raise ValueError(
            f"fit: {name} of the step function has the shape {np.shape(value)}, but a loss or "
            "metric is a scalar. Take its mean"
        )
    return float(value)
