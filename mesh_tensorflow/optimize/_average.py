"""Moving averages of weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._mesh.random_values import initial_value
from mesh_tensorflow.optimize._base import Rate, rate_now, scalar_like, stored_value

__all__ = ["ExponentialMovingAverage"]


class ExponentialMovingAverage:
    """Averages of weights over training, which often evaluate better than the last weights.

    After each step, average = decay * average + (1 - decay) * weight: Polyak and Juditsky,
    "Acceleration of stochastic approximation by averaging" (1992). An average begins as the initial
    value of its variable. It is a float32 variable `<var>/ExponentialMovingAverage`, the name that
    TensorFlow's class of this name gives it, so files can be read by both.

    >>> w = mtf.get_variable(mesh, "w", [mtf.Dimension("d", 4)])
    >>> grads = mtf.gradients([mtf.reduce_sum(mtf.square(w))], [w])
    >>> variables = graph.trainable_variables
    >>> updates = mtf.optimize.SgdOptimizer(0.1).apply_grads(grads, variables)
    >>> average = mtf.optimize.ExponentialMovingAverage(0.99)
    >>> updates += average.apply(variables, after=updates)
    >>> print([v.name for v in graph.all_variables])
    ['w', 'w/ExponentialMovingAverage']
    """

    def __init__(
        self,
        decay: Rate,
        num_updates: Optional[Rate] = None,
        name: str = "ExponentialMovingAverage",
    ):
        """Creates averages.

        Args:
          decay: a number between 0 and 1, such as 0.999; a tf scalar or a schedule.
          num_updates: a number, tf scalar or function of the step, the number of updates n; if
            given, the decay is at most (1 + n) / (10 + n), so that averages follow faster at first.
            `lambda step: step` counts training steps.
          name: the end of the names of averages.

        Raises:
          ValueError: the decay is not between 0 and 1.
        """
        if isinstance(decay, (int, float)) and not 0 <= decay <= 1:
            raise ValueError(
                f"ExponentialMovingAverage: decay must be between 0 and 1, not {decay!r}; 0.999 "
                "averages over some 1000 steps"
            )
        self._decay = decay
        self._num_updates = num_updates
        self._name = name

    def average_name(self, variable: mtf.Variable) -> str:
        """Returns the full name of the average of a variable.

        Args:
          variable: a Variable.
        """
        return f"{variable.name}/{self._name}"

    def average(self, variable: mtf.Variable) -> mtf.Tensor:
        """Returns the average of a variable, a float32 Tensor of its shape.

        Args:
          variable: a Variable. Its average is created if `apply` has not been called.
        """
        return mtf.get_variable(
            variable.mesh,
            self.average_name(variable),
            variable.shape,
            initializer=_same_beginning(variable),
            trainable=False,
        )

    def apply(
        self, variables: Sequence[mtf.Variable], after: Sequence[mtf.Operation] = ()
    ) -> list[mtf.Operation]:
        """Returns operations that update the averages.

        Args:
          variables: Variables, usually `graph.trainable_variables`.
          after: the operations that update the variables: averages are of the values after them. If
            there are none, averages are of the values at the beginning of the step.

        Returns:
          A list of Assign operations, to be run in each step with `after`.
        """
        updates = []
        for variable in variables:
            average = self.average(variable)
            difference = stored_value(variable, after) - average
            share = 1.0 - _at_most(self._decay, self._num_updates, average)
            # As an addition of a small difference, which loses less to rounding than two products
            # do.
            updates.append(mtf.assign_add(average, difference * share))
        return variables[0].graph.combine_assignments(updates) if updates else []

    def swap(self, variables: Sequence[mtf.Variable]) -> list[mtf.Operation]:
        """Returns operations that exchange variables and their averages.

        Run them before an evaluation, and again after it.

        Args:
          variables: Variables with averages.

        Returns:
          A list of Assign operations.
        """
        updates = []
        for variable in variables:
            average = self.average(variable)
            # Both assign what was read at the step's beginning, so neither sees what the other did.
            updates.append(mtf.assign(average, stored_value(variable)))
            updates.append(mtf.assign(variable, average))
        return variables[0].graph.combine_assignments(updates) if updates else []

    @contextlib.contextmanager
    def averaged(self, store: mtf.VariableStore) -> Iterator[mtf.VariableStore]:
        """Returns a context in which the variables of a store have their averages as values.

        It is for programs in tf.function and for eager ones; those with sessions run `swap`.

        Args:
          store: a VariableStore with variables and their averages.

        Raises:
          ValueError: it has no averages.
        """
        end = f"/{self._name}"
        names = [n.removesuffix(end) for n in store.names if n.endswith(end)]
        names = [n for n in names if n in store.names]
        if not names:
            raise ValueError(
                f"ExponentialMovingAverage: no variable of the store has an average '<var>{end}'; "
                f"there are {store.names}. Call apply, with the updates of the training step"
            )
        # Copies: what `value` returns may be the memory of a slice, which is about to be assigned
        # to.
        weights = {n: tf.identity(store.value(n)) for n in names}
        try:
            for n in names:
                store.assign(n, store.value(n + end))
            yield store
        finally:
            for n, value in weights.items():
                store.assign(n, value)

    def variables_to_restore(self, graph: mtf.Graph) -> dict[str, Any]:
        """Returns the masters of a graph by the names under which a Saver finds averages.

        `mtf.checkpoint.Saver(average.variables_to_restore(graph))` in a graph for evaluation
        restores the averages of a training run as the values of its trainable variables.

        Args:
          graph: a Graph.
        """
        end = f"/{self._name}"
        trained = set(graph.trainable_variables)
        return {
            self.average_name(v) if v in trained else v.name: v.get_master()
            for v in graph.all_variables
            if not v.name.endswith(end)
        }


def _same_beginning(variable: mtf.Variable) -> Any:
    """Returns an initializer that gives the initial value of a variable."""

    def initializer(shape: Sequence[int], dtype: tf.DType = tf.float32, **unused: object) -> Any:
        store = variable.store
        if store is None:
            # Not of the initializer again, which might draw other numbers.
            value = variable.get_master().initial_value
        elif variable.name in store.names:
            value = store.value(variable.name)
        else:
            value = initial_value(
                variable.initializer, variable.name, list(shape), variable.master_dtype
            )
        return tf.cast(value, dtype)

    return initializer


def _at_most(decay: Rate, num_updates: Optional[Rate], average: mtf.Tensor) -> Any:
    """Returns the decay, at most (1 + n) / (10 + n)."""
    decay = rate_now(decay)
    if num_updates is not None:
        n = rate_now(num_updates)
        if isinstance(n, mtf.Tensor) or isinstance(decay, mtf.Tensor):
            raise ValueError(
                "ExponentialMovingAverage: with num_updates, it and the decay must be numbers or "
                "tf scalars, not mtf.Tensors"
            )
        n = tf.cast(n, tf.float32)
        decay = tf.minimum(tf.cast(decay, tf.float32), (1.0 + n) / (10.0 + n))
    return scalar_like(decay, average)
