"""Optimizers with decoupled weight decay: AdamW and Lion."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Union

import gin
import tensorflow.compat.v1 as tf

from mesh_tensorflow.optimize._base import Rate
from mesh_tensorflow.optimize._elementwise import (
    Change,
    ElementwiseOptimizer,
    ElementwiseStep,
    NoDecay,
    check_no_decay,
    decays,
)

__all__ = ["AdamWOptimizer", "LionOptimizer"]


def _check_between(optimizer: str, **numbers: float) -> None:
    """Checks decay rates of moving averages.

    Raises:
      ValueError: one is not in [0, 1).
    """
    for name, value in numbers.items():
        if not 0 <= value < 1:
            raise ValueError(
                f"{optimizer}: {name} must be at least 0 and less than 1, not {value!r}"
            )


class _Decoupled(ElementwiseOptimizer):
    """What AdamW and Lion share: the weight decay, and the variables that have none."""

    takes_complex = False

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
        _check_between(kind, beta_1=beta_1, beta_2=beta_2)
        check_no_decay(kind, exclude_from_weight_decay)
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
        mean = m / _one_less_power(self.beta_1, x.step)
        square = v / _one_less_power(self.beta_2, x.step)
        return self._along(mean / (tf.sqrt(square) + self.epsilon), x), {"m": m, "v": v}


def _one_less_power(beta: float, step: tf.Tensor) -> Union[float, tf.Tensor]:
    """Returns 1 - beta ** step, without the loss of digits of this formula."""
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
