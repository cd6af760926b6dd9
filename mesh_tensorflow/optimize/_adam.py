"""Optimizers that work element by element: functions of one's own, Adam, AdamW and Lion."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, TypeAlias, Union

import gin
import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import WrongTypeError, slip
from mesh_tensorflow.optimize._base import (
    ADAM,
    Optimizer,
    Rate,
    float_slot,
    scalar_like,
    skip_without_gradient,
    slot_of_shape,
    stored_value,
)

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
    takes_complex = False  # it computes in float32
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
        # Not `var.value`, which may be bfloat16: weight decay would be of rounded weights.
        inputs = [mtf.to_float(grad), stored_value(var), *slots]  # type: ignore[arg-type]
        outputs = [var.shape] * (1 + len(names))
        scalars: dict[str, mtf.Tensor] = {}
        if self.counts_steps:
            # A count of its own for each variable: the global step also counts steps before it was
            # trained.
            scalars["step"] = self._steps(var) + 1.0
        rate = scalar_like(self.learning_rate, inputs[0])
        # A Tensor is an input, since the rule sees slices alone; a number needs no slices.
        if isinstance(rate, mtf.Tensor):
            scalars["learning_rate"] = rate

        def on_slices(g: tf.Tensor, w: tf.Tensor, *rest: tf.Tensor) -> tuple[tf.Tensor, ...]:
            # `rest` has the slots in the order of `names`, and then the scalars in theirs.
            numbers = dict(zip(scalars, rest[len(names) :]))
            step, lr = numbers.get("step"), numbers.get("learning_rate", rate)
            x = ElementwiseStep(g, dict(zip(names, rest)), w, lr, step, var)
            # What the rule computes of slots alone would else be there from the step's beginning.
            with tf.control_dependencies([g]):
                change, new = self.update(x)
            values = [change, *(new[n] for n in names)]
            for value in values:
                if not g.shape.is_compatible_with(value.shape):
                    raise ValueError(
                        f"{self.name}: the update of {var.name} {var.shape} returned shape "
                        f"{value.shape} for slices of shape {g.shape}; an elementwise rule "
                        "returns the change and each slot in the shape of the gradient"
                    )
            return tuple(tf.cast(value, tf.float32) for value in values)

        # The rule is elementwise, so any dimension may be split: a slice of a result depends on the
        # same slices of the inputs.
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
        return slot_of_shape(var, f"{var.name}/{self.name}_t", mtf.Shape([]))


class Rule(ElementwiseOptimizer):
    """An optimizer of a given function; see `elementwise` and `from_keras`."""

    def __init__(
        self,
        learning_rate: Rate,
        update: Callable[[ElementwiseStep], Change],
        slots: Mapping[str, float],
        name: str,
        counts_steps: bool,
    ):
        super().__init__(learning_rate)
        self.name = name
        self.slots = dict(slots)
        self.counts_steps = counts_steps
        self._update = update

    def update(self, x: ElementwiseStep) -> Change:
        """Calls the function."""
        return self._update(x)


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
    return Rule(
        learning_rate,
        lambda x: update(x.grad, x.state, x.value, x.learning_rate, x.step),
        slots,
        name,
        counts_steps,
    )


def _try(update: Update, slots: Mapping[str, float], name: str, counts_steps: bool) -> None:
    """Calls an update on a matrix and on its parts, which must give the same.

    Raises:
      ValueError: it gives something else, or other slots.
    """
    random = np.random.RandomState(0)
    # All above 0, as a rule may take the root of a slot that is a mean of squares.
    arrays = [random.uniform(0.1, 1.0, [4, 6]).astype(np.float32) for _ in range(2 + len(slots))]
    # A part of rows, and one of rows and columns: a reduction over either axis is noticed.
    indices = [(slice(0, 4), slice(0, 6)), (slice(0, 1), slice(0, 6)), (slice(1, 3), slice(2, 3))]
    # In a graph of its own, so that nothing of the trial stays in that of the program.
    with tf.Graph().as_default(), tf.Session() as session:
        step = tf.constant(3.0) if counts_steps else None
        results = []
        for part in indices:
            grad, value, *rest = (tf.constant(array[part]) for array in arrays)
            change, new = update(grad, dict(zip(slots, rest)), value, tf.constant(0.1), step)
            if not isinstance(new, Mapping) or set(new) != set(slots):
                returned = sorted(new) if isinstance(new, Mapping) else new
                raise ValueError(
                    f"elementwise: the update of {name!r} returned the slots {returned}, but has "
                    f"{sorted(slots)}; return (change, a dictionary with each of them)"
                )
            results.append([tf.convert_to_tensor(x) for x in (change, *(new[s] for s in slots))])
        whole, *others = session.run(results)
    labels = ["change", *(f"slot {s!r}" for s in slots)]
    for part, of_part in zip(indices[1:], others):
        for label, one, other in zip(labels, whole, of_part):
            # NaN equals NaN: a rule may be undefined for these numbers, if it is so in each part.
            right = one.shape == arrays[0].shape and np.allclose(
                one[part], other, rtol=1e-5, atol=1e-7, equal_nan=True
            )
            if not right:
                raise ValueError(
                    f"elementwise: the {label} of {name!r} is not elementwise: on part of a matrix "
                    "it differs from that part of it on the whole. A rule that needs a norm, a "
                    "mean or a product is a subclass of mtf.optimize.Optimizer, of mtf operations"
                )


def decays(var: mtf.Variable, rate: float, excluded: NoDecay) -> bool:
    """Returns whether a variable has weight decay.

    Args:
      var: a Variable.
      rate: the weight decay.
      excluded: regular expressions of names, a function of the variable, or None.
    """
    if callable(excluded):
        return bool(rate) and not excluded(var)
    return _name_decays(var.name, rate, excluded)


def _name_decays(name: str, rate: float, excluded: Optional[Sequence[str]]) -> bool:
    # Anywhere in the name, as in BERT: "bias" stands for all biases, in whichever scope.
    return bool(rate) and not any(re.search(pattern, name) for pattern in excluded or ())


@gin.configurable(module="mesh_tensorflow.optimize")
class AdamWeightDecayOptimizer(Optimizer):
    """Adam with decoupled weight decay, without bias correction.

    Kingma and Ba, "Adam: a method for stochastic optimization" (2014); Loshchilov and Hutter,
    "Decoupled weight decay regularization" (2017). Slot variables: `<var>/adam_m` and
    `<var>/adam_v`.

    >>> optimizer = mtf.optimize.AdamWeightDecayOptimizer(1e-3, weight_decay_rate=0.01)
    >>> w = mtf.get_variable(mesh, "w", "d:4")
    >>> updates = optimizer.apply_grads([mtf.ones_like(w)], graph.trainable_variables)
    >>> print([v.name for v in graph.all_variables])
    ['w', 'w/adam_m', 'w/adam_v']

    Attributes:
      learning_rate, weight_decay_rate, beta_1, beta_2, epsilon: numbers.
      exclude_from_weight_decay: a list of regular expressions; variables whose names match one of
        them are not decayed.
    """

    takes_complex = False

    def __init__(
        self,
        learning_rate: Rate,
        weight_decay_rate: float = 0.0,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        exclude_from_weight_decay: Optional[Sequence[str]] = None,
    ):
        """Creates the optimizer.

        Args:
          learning_rate: a number or tf scalar.
          weight_decay_rate: the weight decay per step, relative to the learning rate.
          beta_1: the decay of the first moment, the moving average of gradients.
          beta_2: the decay of the second moment, the moving average of squared gradients.
          epsilon: added to the square root of the second moment.
          exclude_from_weight_decay: a list of regular expressions, or None.
        """
        self._check_order(weight_decay_rate, beta_1)
        self.learning_rate = learning_rate
        self.weight_decay_rate = weight_decay_rate
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.exclude_from_weight_decay = exclude_from_weight_decay

    @staticmethod
    def _check_order(weight_decay_rate: Rate, beta_1: Rate) -> None:
        """Reports a slip if beta_1 and beta_2 seem to be given by position, as for other Adams."""
        if not isinstance(weight_decay_rate, (int, float)) or not isinstance(beta_1, (int, float)):
            return
        if weight_decay_rate >= 0.5 and beta_1 > 0.98:
            slip(
                f"AdamWeightDecayOptimizer: weight_decay_rate={weight_decay_rate}, "
                f"beta_1={beta_1}. By position, weight_decay_rate comes before beta_1 and beta_2; "
                f"write AdamWeightDecayOptimizer(learning_rate, beta_1={weight_decay_rate}, "
                f"beta_2={beta_1})"
            )

    def apply_grad(self, grad: Optional[mtf.Tensor], var: mtf.Variable) -> list[mtf.Operation]:
        """Returns operations that update one variable; see `Optimizer.apply_grad`."""
        if skip_without_gradient(grad, var):
            return []
        grad = mtf.to_float(grad)  # type: ignore[arg-type]
        m, v = (float_slot(var, f"{var.name}{ADAM[slot]}") for slot in ("adam_m", "adam_v"))
        # As corrections of the slots: a product of a slot alone would be in memory from the
        # beginning of the step.
        next_m = m + (1.0 - self.beta_1) * (grad - m)
        next_v = v + (1.0 - self.beta_2) * (mtf.square(grad) - v)
        # Without the division of the moments by 1 - beta ** t, as BERT was trained: a warmup of the
        # rate takes its place.
        update = next_m / (mtf.sqrt(next_v) + self.epsilon)
        # Added to the update and not to the gradient, whose moments would otherwise contain it
        # (Loshchilov and Hutter, 2017).
        if self._do_use_weight_decay(var.name):
            # Of the value in the dtype of activations, as in the classic: in bfloat16 it is a
            # rounded one, unlike in AdamW.
            update = mtf.cwise(self._with_decay, [update, mtf.to_float(var.value)])
        update *= scalar_like(self._rate_of(var), update)
        return [mtf.assign_sub(var, update), mtf.assign(m, next_m), mtf.assign(v, next_v)]

    def _do_use_weight_decay(self, param_name: str) -> bool:
        # A method of this name, as in the classic: subclasses of users override it.
        return _name_decays(param_name, self.weight_decay_rate, self.exclude_from_weight_decay)

    def _rate_of(self, var: mtf.Variable) -> Rate:
        """Returns the learning rate of a variable."""
        return self.learning_rate

    def _with_decay(self, update: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        # Otherwise the product with the weights may be computed, and held, from the beginning of
        # the step.
        with tf.control_dependencies([update]):
            return update + value * self.weight_decay_rate


class _Decoupled(ElementwiseOptimizer):
    """What AdamW and Lion share: the weight decay, and the variables that have none."""

    def __init__(
        self,
        learning_rate: Rate,
        weight_decay_rate: float,
        beta_1: float,
        beta_2: float,
        exclude_from_weight_decay: NoDecay,
    ):
        super().__init__(learning_rate)
        kind = type(self).__name__
        for name, value in (("beta_1", beta_1), ("beta_2", beta_2)):
            if not 0 <= value < 1:
                raise ValueError(
                    f"{kind}: {name} must be at least 0 and less than 1, not {value!r}"
                )
        excluded = exclude_from_weight_decay
        # A string is no list here: of its letters as expressions, one would be in nearly every
        # name.
        is_list = isinstance(excluded, (list, tuple)) and all(isinstance(p, str) for p in excluded)
        if excluded is not None and not is_list and not callable(excluded):
            raise WrongTypeError(
                f"{kind}: exclude_from_weight_decay must be a list of regular expressions or a "
                f"function of a variable, not {excluded!r}; write [{excluded!r}] for one expression"
            )
        self.weight_decay_rate = weight_decay_rate
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.exclude_from_weight_decay = exclude_from_weight_decay

    def _along(self, direction: tf.Tensor, x: ElementwiseStep) -> tf.Tensor:
        """Returns the change against a direction, with weight decay."""
        if decays(x.var, self.weight_decay_rate, self.exclude_from_weight_decay):
            # Decoupled: it is not divided by the root of the second moment, as a gradient of it
            # would be.
            direction += self.weight_decay_rate * x.value
        return -x.learning_rate * direction


@gin.configurable(module="mesh_tensorflow.optimize")
class AdamWOptimizer(_Decoupled):
    """AdamW: Adam with bias correction and decoupled weight decay.

    Loshchilov and Hutter, "Decoupled weight decay regularization" (2019), algorithm 2:
    w = w - learning_rate * (m' / (sqrt(v') + epsilon) + weight_decay_rate * w), where m' and v' are
    the moving averages divided by 1 - beta ** t. Slot variables: `<var>/adamw_m`, `<var>/adamw_v`,
    and `<var>/adamw_t`, the number of updates. `AdamWeightDecayOptimizer` is the same without bias
    correction.

    >>> optimizer = mtf.optimize.AdamWOptimizer(
    ...     1e-3, weight_decay_rate=0.1, exclude_from_weight_decay=["bias$", "scale$"]
    ... )
    >>> w = mtf.get_variable(mesh, "w", [mtf.Dimension("d", 4)])
    >>> updates = optimizer.apply_grads([mtf.ones_like(w)], graph.trainable_variables)
    >>> print([v.name for v in graph.all_variables])
    ['w', 'w/adamw_m', 'w/adamw_v', 'w/adamw_t']

    Attributes:
      learning_rate: the learning rate.
      weight_decay_rate: a number.
      beta_1: a number.
      beta_2: a number.
      epsilon: a number.
      exclude_from_weight_decay: a list of regular expressions of variable names; or a function that
        takes a Variable and returns whether it has no weight decay.
    """

    name = "adamw"
    slots: Mapping[str, float] = {"m": 0.0, "v": 0.0}
    counts_steps = True

    def __init__(
        self,
        learning_rate: Rate,
        weight_decay_rate: float = 0.01,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        exclude_from_weight_decay: NoDecay = None,
    ):
        """Creates the optimizer.

        Args:
          learning_rate: a number, a tf scalar, an mtf scalar Tensor or a schedule.
          weight_decay_rate: the weight decay per step, relative to the learning rate.
          beta_1: the decay of the first moment, the moving average of gradients.
          beta_2: the decay of the second moment, the moving average of squared gradients.
          epsilon: added to the square root of the second moment.
          exclude_from_weight_decay: a list of regular expressions, such as `["bias$"]`, a function
            of a Variable, or None. Usually biases and the scales of norms have no decay.

        Raises:
          ValueError: beta_1 or beta_2 is not in [0, 1).
        """
        super().__init__(
            learning_rate, weight_decay_rate, beta_1, beta_2, exclude_from_weight_decay
        )
        self.epsilon = epsilon

    def update(self, x: ElementwiseStep) -> Change:
        """Returns the change and the new moments of a slice; see `ElementwiseOptimizer`."""
        m = self.beta_1 * x.state["m"] + (1.0 - self.beta_1) * x.grad
        v = self.beta_2 * x.state["v"] + (1.0 - self.beta_2) * tf.square(x.grad)
        assert x.step is not None
        # m and v begin as 0 and are too small at first: m' = m / (1 - beta_1 ** t), likewise v'.
        mean = m / _one_less_power(self.beta_1, x.step)
        square = v / _one_less_power(self.beta_2, x.step)
        return self._along(mean / (tf.sqrt(square) + self.epsilon), x), {"m": m, "v": v}


def _one_less_power(beta: float, step: tf.Tensor) -> Union[float, tf.Tensor]:
    """Returns 1 - beta ** step, without the loss of digits of this formula."""
    # A beta of 0 has no logarithm, and 1 - 0 ** step is 1 in all steps from 1 on.
    return -tf.math.expm1(step * math.log(beta)) if beta else 1.0


@gin.configurable(module="mesh_tensorflow.optimize")
class LionOptimizer(_Decoupled):
    """Lion: steps of the sign of a moving average, with decoupled weight decay.

    Chen et al., "Symbolic discovery of optimization algorithms" (2023). With gradient g,
    w = w - learning_rate * (sign(beta_1 * m + (1 - beta_1) * g) + weight_decay_rate * w), and then
    m = beta_2 * m + (1 - beta_2) * g. Use a learning rate 3 to 10 times less than with Adam, and a
    weight decay as much larger. Slot variable: `<var>/lion_m`.

    >>> optimizer = mtf.optimize.LionOptimizer(1e-4, weight_decay_rate=1.0)
    >>> w = mtf.get_variable(mesh, "w", [mtf.Dimension("d", 4)])
    >>> updates = optimizer.apply_grads([mtf.ones_like(w)], graph.trainable_variables)
    >>> print([v.name for v in graph.all_variables])
    ['w', 'w/lion_m']

    Attributes:
      learning_rate: the learning rate.
      weight_decay_rate: a number.
      beta_1: a number.
      beta_2: a number.
      exclude_from_weight_decay: a list of regular expressions of variable names; or a function that
        takes a Variable and returns whether it has no weight decay.
    """

    name = "lion"
    slots: Mapping[str, float] = {"m": 0.0}

    def __init__(
        self,
        learning_rate: Rate,
        weight_decay_rate: float = 0.0,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        exclude_from_weight_decay: NoDecay = None,
    ):
        """Creates the optimizer.

        Args:
          learning_rate: a number, a tf scalar, an mtf scalar Tensor or a schedule.
          weight_decay_rate: the weight decay per step, relative to the learning rate.
          beta_1: the share of the moving average in the step.
          beta_2: the decay of the moving average of gradients.
          exclude_from_weight_decay: a list of regular expressions, a function of a Variable, or
            None.

        Raises:
          ValueError: beta_1 or beta_2 is not in [0, 1).
        """
        super().__init__(
            learning_rate, weight_decay_rate, beta_1, beta_2, exclude_from_weight_decay
        )

    def update(self, x: ElementwiseStep) -> Change:
        """Returns the change and the new average of a slice; see `ElementwiseOptimizer`."""
        m = x.state["m"]
        # Two averages of one slot: beta_1 weights the current gradient in the step, beta_2 in the
        # memory (Chen et al., 2023, algorithm 2).
        direction = tf.sign(self.beta_1 * m + (1.0 - self.beta_1) * x.grad)
        return self._along(direction, x), {"m": self.beta_2 * m + (1.0 - self.beta_2) * x.grad}
