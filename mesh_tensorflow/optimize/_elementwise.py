"""Optimizers given as elementwise functions of TensorFlow tensors, applied to each slice."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, TypeAlias, Union

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import WrongTypeError
from mesh_tensorflow.optimize._base import (
    Optimizer,
    Rate,
    float_slot,
    scalar_like,
    skip_without_gradient,
)
from mesh_tensorflow.optimize._stored import stored_value

__all__ = [
    "Change",
    "ElementwiseOptimizer",
    "ElementwiseStep",
    "NoDecay",
    "check_no_decay",
    "decays",
    "elementwise",
]

# What is added to a variable, and its new slots by name.
Change: TypeAlias = tuple[tf.Tensor, Mapping[str, tf.Tensor]]
# Takes (gradient, state, value, learning_rate, step); returns (change, new state).
Update: TypeAlias = Callable[..., Change]
# Which variables have no weight decay: regular expressions of their names, or a function of them.
NoDecay: TypeAlias = Optional[Union[Sequence[str], Callable[[mtf.Variable], bool]]]


class ElementwiseStep(NamedTuple):
    """What the rule of an `ElementwiseOptimizer` is given: the same slice of several tensors.

    >>> step = mtf.optimize.ElementwiseStep(tf.ones([2]), {}, tf.zeros([2]), 0.1, None, None)
    >>> print((-step.learning_rate * step.grad).numpy())
    [-0.1 -0.1]

    Attributes:
      grad: the gradient, float32.
      state: each slot by name, float32.
      value: the variable, float32.
      learning_rate: a number or a float32 tf scalar.
      step: the number of this update from 1, a float32 tf scalar; None without `counts_steps`.
      var: the Variable.
    """

    grad: tf.Tensor
    state: Mapping[str, tf.Tensor]
    value: tf.Tensor
    learning_rate: Any
    step: Optional[tf.Tensor]
    var: mtf.Variable


class ElementwiseOptimizer(Optimizer):
    """An optimizer whose rule treats each element of a variable alone.

    The rule is one function of TensorFlow tensors. It is applied to the slices of a variable, so it
    gives the same result in every layout, and is one operation of the program. `elementwise` makes
    one of a function; a subclass defines `update`.

    Slot variables: `<var>/<name>_<slot>`, float32, for each of `slots`; and `<var>/<name>_t`, the
    number of updates, if `counts_steps`.

    >>> class SignDescent(mtf.optimize.ElementwiseOptimizer):
    ...     name = "signs"
    ...     def update(self, x):
    ...         return -x.learning_rate * tf.sign(x.grad), {}
    >>> optimizer = SignDescent(0.01)
    >>> w = mtf.get_variable(mesh, "w", "d:4")
    >>> updates = optimizer.apply_grads([mtf.ones_like(w)], graph.trainable_variables)

    Attributes:
      name: a string, the beginning of the names of slot variables.
      slots: the initial value of each slot, by name.
      counts_steps: whether the rule depends on the number of updates.
      learning_rate: a number, a tf scalar, an mtf scalar Tensor or a schedule.
    """

    name = "elementwise"
    slots: Mapping[str, float] = {}
    counts_steps = False

    def __init__(self, learning_rate: Rate):
        """Creates the optimizer.

        Args:
          learning_rate: a number, a tf scalar, an mtf scalar Tensor or a schedule.
        """
        self.learning_rate = learning_rate

    def update(self, x: ElementwiseStep) -> Change:
        """Returns (what is added to the value, the new slots by name), of the shape of `x.grad`.

        Args:
          x: slices of the gradient, the slots and the value, and what the rule depends on besides.
        """
        raise NotImplementedError(f"{type(self).__name__} has no update")

    def apply_grad(self, grad: Optional[mtf.Tensor], var: mtf.Variable) -> list[mtf.Operation]:
        """Returns operations that update one variable; see `Optimizer.apply_grad`."""
        if skip_without_gradient(grad, var):
            return []
        names = list(self.slots)
        slots = [float_slot(var, f"{var.name}/{self.name}_{n}", self.slots[n]) for n in names]
        inputs = [mtf.to_float(grad), stored_value(var), *slots]  # type: ignore[arg-type]
        outputs = [var.shape] * (1 + len(names))
        scalars: dict[str, mtf.Tensor] = {}
        if self.counts_steps:
            # A count of its own for each variable: the global step also counts steps before it was
            # trained.
            scalars["step"] = self._steps(var) + 1.0
        rate = scalar_like(self.learning_rate, inputs[0])
        if isinstance(rate, mtf.Tensor):
            scalars["learning_rate"] = rate

        def on_slices(g: tf.Tensor, w: tf.Tensor, *rest: tf.Tensor) -> tuple[tf.Tensor, ...]:
            given = dict(zip(scalars, rest[len(names) :]))
            step, lr = given.get("step"), given.get("learning_rate", rate)
            x = ElementwiseStep(g, dict(zip(names, rest)), w, lr, step, var)
            # What the rule computes of slots alone would else be there from the step's beginning.
            with tf.control_dependencies([g]):
                change, new = self.update(x)
            return self._checked(g, [change, *(new[n] for n in names)], var)

        op = mtf.SlicewiseOperation(
            on_slices,
            [*inputs, *scalars.values()],
            outputs,
            [tf.float32] * len(outputs),
            splittable_dims=var.shape.dims,
            name=f"{self.name}_update",
        )
        change, *new = op.outputs
        updates = [mtf.assign_add(var, change)]
        updates += [mtf.assign(slot, y) for slot, y in zip(slots, new)]
        if self.counts_steps:
            updates.append(mtf.assign(self._steps(var), scalars["step"]))
        return updates

    def _steps(self, var: mtf.Variable) -> mtf.Tensor:
        return mtf.get_variable(
            var.mesh,
            f"{var.name}/{self.name}_t",
            mtf.Shape([]),
            initializer=tf.zeros_initializer(),
            trainable=False,
        )

    def _checked(
        self, grad: tf.Tensor, values: Sequence[tf.Tensor], var: mtf.Variable
    ) -> tuple[tf.Tensor, ...]:
        for value in values:
            if not grad.shape.is_compatible_with(value.shape):
                raise ValueError(
                    f"{self.name}: the update of {var.name} {var.shape} returned shape "
                    f"{value.shape} for slices of shape {grad.shape}; an elementwise rule returns "
                    "the change and each slot in the shape of the gradient"
                )
        return tuple(tf.cast(value, tf.float32) for value in values)


class _Rule(ElementwiseOptimizer):
    """An optimizer of a given function; see `elementwise`."""

    def __init__(
        self,
        learning_rate: Rate,
        function: Update,
        slots: Mapping[str, float],
        name: str,
        counts_steps: bool,
    ):
        super().__init__(learning_rate)
        self.name = name
        self.slots = dict(slots)
        self.counts_steps = counts_steps
        self._function = function

    def update(self, x: ElementwiseStep) -> Change:
        """Calls the function."""
        return self._function(x.grad, x.state, x.value, x.learning_rate, x.step)


def elementwise(
    update: Update,
    slots: Optional[Mapping[str, float]] = None,
    learning_rate: Rate = 1.0,
    name: str = "elementwise",
    counts_steps: bool = True,
) -> ElementwiseOptimizer:
    """Returns an optimizer made of a function of TensorFlow tensors.

    The function is in the style of optax: it takes a gradient and a state, and returns what is
    added to the variable, and the new state. It sees slices, so each element of what it returns may
    only depend on the same element of what it is given: no norms, means or products of matrices.
    This is tried on numbers when the optimizer is made.

    >>> def sign_descent(grad, state, value, learning_rate, step):
    ...     m = 0.9 * state["m"] + 0.1 * grad
    ...     return -learning_rate * tf.sign(m), {"m": m}
    >>> optimizer = mtf.optimize.elementwise(
    ...     sign_descent, slots={"m": 0.0}, learning_rate=0.01, name="signs", counts_steps=False
    ... )
    >>> w = mtf.get_variable(mesh, "w", [mtf.Dimension("d", 4)])
    >>> updates = optimizer.apply_grads([mtf.ones_like(w)], graph.trainable_variables)
    >>> print([v.name for v in graph.all_variables])
    ['w', 'w/signs_m']

    Args:
      update: takes (gradient, state, value, learning_rate, step): float32 slices of the gradient,
        of each slot in a dictionary, and of the variable; the learning rate, a number or tf scalar;
        the number of this update from 1, a float32 tf scalar, or None without `counts_steps`.
        Returns (what is added to the variable, a dictionary of new slots).
      slots: the initial value of each slot, a number, by name. Slot variables are
        `<var>/<name>_<slot>`.
      learning_rate: a number, a tf scalar, an mtf scalar Tensor or a schedule.
      name: a string, the beginning of the names of slot variables.
      counts_steps: whether to count updates of each variable, in a slot `<var>/<name>_t`.

    Raises:
      ValueError: `update` is not elementwise, or returns other slots than it is given.
    """
    slots = dict(slots or {})
    if not re.fullmatch(r"\w+", name):
        raise ValueError(f"elementwise: name must be a word, for names of variables, not {name!r}")
    if "t" in slots and counts_steps:
        raise ValueError(
            "elementwise: a slot 't' has the name of the number of updates; use another name, or "
            "counts_steps=False"
        )
    _try(update, slots, name, counts_steps)
    return _Rule(learning_rate, update, slots, name, counts_steps)


def _try(update: Update, slots: Mapping[str, float], name: str, counts_steps: bool) -> None:
    """Calls an update on a matrix and on its parts, which must give the same.

    Raises:
      ValueError: it gives something else, or other slots.
    """
    random = np.random.RandomState(0)
    arrays = [random.uniform(0.1, 1.0, [4, 6]).astype(np.float32) for _ in range(2 + len(slots))]
    parts = [(slice(0, 4), slice(0, 6)), (slice(0, 1), slice(0, 6)), (slice(1, 3), slice(2, 3))]
    with tf.Graph().as_default(), tf.Session() as session:
        step = tf.constant(3.0) if counts_steps else None
        made = []
        for part in parts:
            grad, value, *rest = (tf.constant(array[part]) for array in arrays)
            change, new = update(grad, dict(zip(slots, rest)), value, tf.constant(0.1), step)
            if not isinstance(new, Mapping) or set(new) != set(slots):
                found = sorted(new) if isinstance(new, Mapping) else new
                raise ValueError(
                    f"elementwise: the update of {name!r} returned the slots {found}, but has "
                    f"{sorted(slots)}; return (change, a dictionary with each of them)"
                )
            made.append([tf.convert_to_tensor(x) for x in (change, *(new[s] for s in slots))])
        whole, *others = session.run(made)
    labels = ["change", *(f"slot {s!r}" for s in slots)]
    for part, found in zip(parts[1:], others):
        for label, one, other in zip(labels, whole, found):
            right = one.shape == arrays[0].shape and np.allclose(
                one[part], other, rtol=1e-5, atol=1e-7, equal_nan=True
            )
            if not right:
                raise ValueError(
                    f"elementwise: the {label} of {name!r} is not elementwise: on part of a matrix "
                    "it differs from that part of it on the whole. A rule that needs a norm, a "
                    "mean or a product is a subclass of mtf.optimize.Optimizer, of mtf operations"
                )


def check_no_decay(function: str, given: object) -> None:
    """Checks the argument exclude_from_weight_decay.

    Raises:
      WrongTypeError: it is neither None, nor a list of strings, nor a function.
    """
    is_list = isinstance(given, (list, tuple)) and all(isinstance(p, str) for p in given)
    if given is not None and not is_list and not callable(given):
        raise WrongTypeError(
            f"{function}: exclude_from_weight_decay must be a list of regular expressions or a "
            f"function of a variable, not {given!r}; write [{given!r}] for one expression"
        )


def decays(var: mtf.Variable, rate: float, excluded: NoDecay) -> bool:
    """Returns whether a variable has weight decay.

    Args:
      var: a Variable.
      rate: the weight decay.
      excluded: regular expressions of names, a function of the variable, or None.
    """
    if not rate or excluded is None:
        return bool(rate)
    if callable(excluded):
        return not excluded(var)
    return not any(re.search(pattern, var.name) for pattern in excluded)
