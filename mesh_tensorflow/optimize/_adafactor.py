"""Adafactor; and the classic's optimizers with several learning rates, and by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow._core.errors import check_choice, check_flag
from mesh_tensorflow.optimize._adam import AdamWeightDecayOptimizer
from mesh_tensorflow.optimize._base import (
    ADAFACTOR,
    Factor,
    Optimizer,
    Rate,
    SgdOptimizer,
    compute_lr_for_step,
    rate_now,
    scalar_like,
    skip_without_gradient,
    slot_of_shape,
)
from mesh_tensorflow.utils import steps_done


def _step() -> tf.Tensor:
    return tf.cast(steps_done(), tf.float32)


def adafactor_decay_rate_adam(beta2: float) -> tf.Tensor:
    """Returns the second-moment decay of Adam, including its bias correction.

    >>> decay = mtf.optimize.adafactor_decay_rate_adam(0.999)
    >>> print(float(decay))
    0.0

    Args:
      beta2: a number between 0 and 1.
    """
    t = _step() + 1.0
    # With this decay the moving average itself is what Adam gets by dividing by 1 - beta2 ** t.
    return beta2 * (1.0 - tf.pow(beta2, t - 1.0)) / (1.0 - tf.pow(beta2, t))


@gin.configurable(module="mesh_tensorflow.optimize")
def adafactor_decay_rate_pow(exponent: float = 0.8, offset: int = 0) -> tf.Tensor:
    """Returns the second-moment decay 1 - (step + 1 - offset) ** -exponent.

    >>> decay = mtf.optimize.adafactor_decay_rate_pow(0.8)
    >>> print(float(decay))
    0.0

    Args:
      exponent: a number between 0 and 1.
      offset: the step at which training began.
    """
    # 0 in the first step, so the average begins as the first square, and no bias has to be
    # corrected (Shazeer and Stern, 2018, section 7).
    return 1.0 - tf.pow(_step() + 1.0 - tf.cast(offset, tf.float32), -exponent)


def _each_step(rate: Callable[[], tf.Tensor]) -> Rate:
    """Returns a rate that is computed from the step; in eager code a function, a schedule."""
    now = rate()
    # A tensor of eager code would stay that of the step at which the optimizer was made.
    return now if tf.is_symbolic_tensor(now) else lambda step: rate()


def reduce_rms(x: mtf.Tensor, **kwargs: Any) -> mtf.Tensor:
    """Computes the root mean square (RMS) of a Tensor.

    >>> x = mtf.constant(mesh, [3.0, 4.0], "d:2")
    >>> print(np.round(mtf.optimize.reduce_rms(x).numpy(), 3))
    3.536

    Args:
      x: a Tensor.
      **kwargs: further arguments of mtf.reduce_mean.
    """
    return mtf.sqrt(mtf.reduce_mean(mtf.square(x), **kwargs))


@gin.configurable(module="mesh_tensorflow.optimize")
class AdafactorOptimizer(Optimizer):
    """Adafactor: Shazeer and Stern, "Adafactor: adaptive learning rates with sublinear memory
    cost" (2018).

    The second moments of a large matrix are stored as row means and column means. Slot variables:
    `<var>_slot_vr` and `<var>_slot_vc` if factored, else `<var>_slot_v`; with beta1 also
    `<var>_slot_m`.

    >>> optimizer = mtf.optimize.AdafactorOptimizer(learning_rate=0.1)
    >>> w = mtf.get_variable(mesh, "w", "d_in:256,d_out:128")
    >>> updates = optimizer.apply_grads([mtf.ones_like(w)], graph.trainable_variables)
    >>> print([v.name for v in graph.all_variables])
    ['w', 'w_slot_vr', 'w_slot_vc']
    """

    takes_complex = False

    def __init__(
        self,
        multiply_by_parameter_scale: bool = True,
        learning_rate: Optional[Rate] = None,
        decay_rate: Optional[Rate] = None,
        beta1: float = 0.0,
        clipping_threshold: Optional[float] = 1.0,
        factored: bool = True,
        epsilon1: float = 1e-30,
        epsilon2: float = 1e-3,
        min_dim_size_to_factor: int = 128,
        stacked_dim_names: Optional[Sequence[str]] = None,
        exclude_from_parameter_scale: Optional[Sequence[str]] = None,
    ):
        """Creates the optimizer.

        Args:
          multiply_by_parameter_scale: whether updates are relative to the RMS of the variable.
          learning_rate: a number, tf scalar or schedule; if None, min(1 / sqrt(step + 1), 0.01),
            multiplied by 0.05 without parameter scale.
          decay_rate: a number, tf scalar or schedule, the second-moment decay;
            `adafactor_decay_rate_pow()` if None. In eager code a tf scalar is that of one step, and
            `lambda step: adafactor_decay_rate_pow(0.5)` is a schedule.
          beta1: the decay of the moving average of updates; 0 for none.
          clipping_threshold: the maximum RMS of an update; no clipping if None.
          factored: whether to factor second moments.
          epsilon1: added to squared gradients.
          epsilon2: the minimum parameter scale.
          min_dim_size_to_factor: only dimensions of at least this size are factored.
          stacked_dim_names: names of dimensions that are not factored, with a separate parameter
            scale for each index.
          exclude_from_parameter_scale: substrings of variable names; updates of variables that
            match are not relative to the RMS.
        """
        write = "AdafactorOptimizer(learning_rate={value})"
        for name, value in (
            ("multiply_by_parameter_scale", multiply_by_parameter_scale),
            ("factored", factored),
        ):
            check_flag("AdafactorOptimizer", name, value, write)
        self._multiply_by_parameter_scale = multiply_by_parameter_scale
        self._decay_rate = (
            _each_step(self._decay_rate_default) if decay_rate is None else decay_rate
        )
        self._learning_rate = (
            _each_step(lambda: self._learning_rate_default(multiply_by_parameter_scale))
            if learning_rate is None
            else learning_rate
        )
        self._beta1 = beta1
        self._clipping_threshold = clipping_threshold
        self._factored = factored
        self._epsilon1 = epsilon1
        self._epsilon2 = epsilon2
        self._min_dim_size_to_factor = min_dim_size_to_factor
        self._stacked_dim_names = stacked_dim_names or []
        self._exclude_from_parameter_scale = exclude_from_parameter_scale or []

    # The names of what subclasses of users override are those of the classic.

    def _decay_rate_default(self) -> tf.Tensor:
        return adafactor_decay_rate_pow()

    def _learning_rate_default(self, multiply_by_parameter_scale: bool) -> tf.Tensor:
        # The relative step size of algorithm 6. The factor below stands for the scale of a typical
        # weight, by which it is multiplied otherwise.
        rate = tf.minimum(tf.math.rsqrt(_step() + 1.0), 0.01)
        if not multiply_by_parameter_scale and not layers.unit_scaling_convention():
            rate *= 0.05
        return rate

    @property
    def learning_rate(self) -> Rate:
        """The learning rate: a number, a tf scalar or a schedule."""
        return self._learning_rate

    def _rate_of(self, var: mtf.Variable) -> Rate:
        """Returns the learning rate of a variable."""
        return self._learning_rate

    def _factored_dims(self, shape: mtf.Shape) -> Optional[tuple[mtf.Dimension, mtf.Dimension]]:
        """Returns the (largest, second largest) dimensions if they are to be factored."""
        if not self._factored:
            return None
        dims = [d for d in shape if d.name not in self._stacked_dim_names]
        # The two largest, which save the most; others stay as they are in both slots.
        # Stable: of equal sizes the first counts as the largest, so that slots keep their shapes.
        largest = sorted(dims, key=lambda d: -d.size)[:2]
        if len(largest) < 2 or largest[1].size < self._min_dim_size_to_factor:
            return None
        return largest[0], largest[1]

    def _parameter_scale(self, var: mtf.Tensor) -> mtf.Tensor:
        # A scale for each index of stacked dimensions.
        stacked = [d for d in var.shape if d.name in self._stacked_dim_names]
        return mtf.maximum(reduce_rms(var, output_shape=mtf.Shape(stacked)), self._epsilon2)

    def _slot(self, var: mtf.Variable, name: str, shape: mtf.Shape) -> mtf.Tensor:
        return slot_of_shape(var, f"{var.name}{ADAFACTOR[name]}", shape)

    def apply_grad(self, grad: Optional[mtf.Tensor], var: mtf.Variable) -> list[mtf.Operation]:
        """Returns operations that update one variable; see `Optimizer.apply_grad`."""
        if skip_without_gradient(grad, var):
            return []
        grad = mtf.to_float(grad)  # type: ignore[arg-type]
        # Shazeer and Stern (2018), algorithms 4 (factored) and 5. The constant keeps a row or
        # column of zeros from a division by 0.
        squared = mtf.square(grad) + self._epsilon1
        scaled, assignments = self._scaled_gradient(grad, squared, var)
        if self._clipping_threshold is not None:
            # Update clipping, U / max(1, RMS(U) / d): the second moment may be out of date when
            # gradients grow.
            norm = reduce_rms(scaled) / self._clipping_threshold
            scaled = scaled / mtf.maximum(1.0, norm)
        update = scaled * scalar_like(self._rate_of(var), scaled)
        old = var.value
        # Steps are relative to the size of the weights, max(epsilon2, RMS(X)) * rate; epsilon2 lets
        # those that begin as zeros move.
        excluded = any(part in var.name for part in self._exclude_from_parameter_scale)
        if self._multiply_by_parameter_scale and not excluded:
            update = update * mtf.to_float(self._parameter_scale(old))
        if self._beta1:
            m = self._slot(var, "m", var.shape)
            update = m + (1.0 - self._beta1) * (update - m)  # waits for it, as Adam's do
            assignments.append(mtf.assign(m, update))
        return [mtf.assign_sub(var, update), *assignments]

    def _scaled_gradient(
        self, grad: mtf.Tensor, squared: mtf.Tensor, var: mtf.Variable
    ) -> tuple[mtf.Tensor, list[mtf.Operation]]:
        """Divides the gradient by the root of its second moment; also returns the slot updates."""
        rate = rate_now(self._decay_rate)
        decay, mix = scalar_like(rate, squared), scalar_like(1.0 - rate, squared)
        factored = self._factored_dims(var.shape)
        if factored is None:
            v = self._slot(var, "v", var.shape)
            # V = decay * V + (1 - decay) * (G ** 2 + epsilon1), and U = G / sqrt(V).
            new_v = v * decay + squared * mix
            return grad * mtf.rsqrt(new_v), [mtf.assign(v, new_v)]
        d0, d1 = factored
        # Row means are over the largest dimension, as in checkpoints of the classic.
        vr, vc = self._slot(var, "vr", var.shape - d0), self._slot(var, "vc", var.shape - d1)
        # Means instead of the paper's sums: only quotients of rows and columns matter, and means do
        # not grow with the matrix.
        new_vr = vr * decay + mtf.reduce_mean(squared, reduced_dim=d0) * mix
        new_vc = vc * decay + mtf.reduce_mean(squared, reduced_dim=d1) * mix
        # V = R C / mean(R), but never as a matrix: two scalings of the gradient take no memory for
        # it.
        long_term_mean = mtf.reduce_mean(new_vr, reduced_dim=d1)
        row, column = mtf.rsqrt(new_vr / long_term_mean), mtf.rsqrt(new_vc)
        return grad * row * column, [mtf.assign(vr, new_vr), mtf.assign(vc, new_vc)]


_DECAY_RATES: dict[str, Callable[[Any], tf.Tensor]] = {
    "Adam": lambda hparams: adafactor_decay_rate_adam(hparams.optimizer_adafactor_beta2),
    "pow": lambda hparams: adafactor_decay_rate_pow(hparams.optimizer_adafactor_memory_exponent),
}


def adafactor_optimizer_from_hparams(hparams: Any, lr: Rate) -> AdafactorOptimizer:
    """Creates an AdafactorOptimizer from the hyperparameters of Tensor2Tensor.

    >>> import types
    >>> hparams = types.SimpleNamespace(
    ...     optimizer="Adafactor",
    ...     optimizer_adafactor_decay_type="pow",
    ...     optimizer_adafactor_memory_exponent=0.8,
    ...     optimizer_adafactor_multiply_by_parameter_scale=True,
    ...     optimizer_adafactor_beta1=0.0,
    ...     optimizer_adafactor_clipping_threshold=1.0,
    ...     optimizer_adafactor_factored=True,
    ... )
    >>> optimizer = mtf.optimize.adafactor_optimizer_from_hparams(hparams, 0.1)
    >>> print(optimizer.learning_rate)
    0.1

    Args:
      hparams: an object with the attributes optimizer_adafactor_decay_type ("Adam", with
        optimizer_adafactor_beta2, or "pow", with optimizer_adafactor_memory_exponent),
        optimizer_adafactor_multiply_by_parameter_scale, optimizer_adafactor_beta1,
        optimizer_adafactor_clipping_threshold and optimizer_adafactor_factored.
      lr: a number or tf scalar, the learning rate.

    Raises:
      ValueError: optimizer_adafactor_decay_type is unknown.
    """
    decay_type = hparams.optimizer_adafactor_decay_type
    check_choice("hparams", "optimizer_adafactor_decay_type", decay_type, _DECAY_RATES)
    decay_rate = _DECAY_RATES[decay_type]
    return AdafactorOptimizer(
        multiply_by_parameter_scale=hparams.optimizer_adafactor_multiply_by_parameter_scale,
        learning_rate=lr,
        decay_rate=_each_step(lambda: decay_rate(hparams)),
        beta1=hparams.optimizer_adafactor_beta1,
        clipping_threshold=hparams.optimizer_adafactor_clipping_threshold,
        factored=hparams.optimizer_adafactor_factored,
    )


class _WithAlternatives:
    """Selects a schedule by the name of a variable.

    Attributes:
      variable_search: a list of regular expressions, or None.
      alt_lr_schedules: a list with a schedule of `compute_lr_for_step` for each, or None.
    """

    def __init__(
        self,
        variable_search: Optional[Sequence[str]] = None,
        alt_lr_schedules: Optional[Sequence[Optional[Sequence[Factor]]]] = None,
        **kwargs: Any,
    ):
        """Creates the optimizer.

        Only the last regular expression has an effect, as in release 0.1.21: variables whose
        names it matches use the last schedule, all others use `learning_rate`. So write one
        expression with alternatives, "a|b".

        Args:
          variable_search: a list of regular expressions; None for a single rate.
          alt_lr_schedules: a list with a schedule for each: a list of factors as for
            `product_learning_rate`, or None for `learning_rate`. None for a single rate.
          **kwargs: arguments of the optimizer.

        Raises:
          ValueError: there are fewer schedules than regular expressions.
        """
        super().__init__(**kwargs)
        both = variable_search is not None and alt_lr_schedules is not None
        if both and len(alt_lr_schedules) < len(variable_search):  # type: ignore[arg-type]
            raise ValueError(
                f"{type(self).__name__}: each of variable_search {variable_search!r} needs one of "
                f"alt_lr_schedules, but these are {alt_lr_schedules!r}; None is a schedule, too"
            )
        self.variable_search = variable_search
        self.alt_lr_schedules = alt_lr_schedules

    def _rate_of(self, var: mtf.Variable) -> Rate:
        rate = super()._rate_of(var)
        if not self.variable_search or self.alt_lr_schedules is None:
            return rate
        *earlier, last = self.variable_search
        if re.search(last, var.name):
            schedule = self.alt_lr_schedules[len(earlier)]
            return compute_lr_for_step([schedule], rate)[0]
        if any(re.search(pattern, var.name) for pattern in earlier):
            tf.logging.warning(
                "%s matches one of %r, but only the last expression, %r, has an effect",
                var.name,
                earlier,
                last,
            )
        return rate


@gin.configurable(module="mesh_tensorflow.optimize")
class AdafactorWithMultiLRSchedule(_WithAlternatives, AdafactorOptimizer):
    """Adafactor with an alternative learning rate for variables whose names match.

    >>> optimizer = mtf.optimize.AdafactorWithMultiLRSchedule(
    ...     variable_search=["embedding"], alt_lr_schedules=[[0.01]], learning_rate=0.1
    ... )

    Attributes:
      variable_search: a list of regular expressions, or None.
      alt_lr_schedules: a list with a schedule of `compute_lr_for_step` for each, or None.
    """


@gin.configurable(module="mesh_tensorflow.optimize")
class AdamWithMultiLRSchedule(_WithAlternatives, AdamWeightDecayOptimizer):
    """Adam with an alternative learning rate for variables whose names match.

    >>> optimizer = mtf.optimize.AdamWithMultiLRSchedule(
    ...     variable_search=["embedding"], alt_lr_schedules=[[1e-4]], learning_rate=1e-3
    ... )

    Attributes:
      variable_search: a list of regular expressions, or None.
      alt_lr_schedules: a list with a schedule of `compute_lr_for_step` for each, or None.
    """


_OPTIMIZERS: dict[str, Callable[[Any, Rate], Optimizer]] = {
    "SGD": lambda hparams, lr: SgdOptimizer(lr),
    "Adafactor": adafactor_optimizer_from_hparams,
}


def make_optimizer(hparams: Any, lr: Rate) -> Optimizer:
    """Creates the optimizer that `hparams.optimizer` names.

    >>> import types
    >>> hparams = types.SimpleNamespace(optimizer="SGD")
    >>> print(type(mtf.optimize.make_optimizer(hparams, 0.1)).__name__)
    SgdOptimizer

    Args:
      hparams: an object with the attribute optimizer, "SGD" or "Adafactor", and for the latter
        those that `adafactor_optimizer_from_hparams` reads.
      lr: a number or tf scalar, the learning rate.

    Raises:
      ValueError: the name is unknown.
    """
    check_choice("hparams", "optimizer", hparams.optimizer, _OPTIMIZERS)
    return _OPTIMIZERS[hparams.optimizer](hparams, lr)
