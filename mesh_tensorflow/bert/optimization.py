"""Optimization of BERT: learning rate warmup and decay, gradient clipping, and an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import optimize
from mesh_tensorflow._core.errors import check_choice
from mesh_tensorflow._replaced import replaceable
from mesh_tensorflow.utils import steps_done

__all__ = ["clip_by_global_norm", "create_optimizer"]

_WEIGHT_DECAY = 0.01
# Normalizations are called LayerNorm in TF BERT, and layer_norm here.
_NOT_DECAYED = ("LayerNorm", "layer_norm", "bias")
_MAX_NORM = 1.0

_OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adam": lambda rate: optimize.AdamWeightDecayOptimizer(
        learning_rate=rate,
        weight_decay_rate=_WEIGHT_DECAY,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-6,
        exclude_from_weight_decay=list(_NOT_DECAYED),
    ),
    "adafactor": lambda rate: optimize.AdafactorOptimizer(learning_rate=rate),
}


def clip_by_global_norm(
    grads: Sequence[Optional[mtf.Tensor]], clip_norm: Union[mtf.Tensor, float]
) -> tuple[list[Optional[mtf.Tensor]], mtf.Tensor]:
    """Scales gradients down so that their global norm is at most `clip_norm`.

    Pascanu et al., "On the difficulty of training recurrent neural networks" (2013).

    Args:
      grads: Tensors or None, which stays None.
      clip_norm: a number or a scalar Tensor.

    Returns:
      (a list of Tensors, the global norm before clipping).

    Raises:
      ValueError: all gradients are None.
    """
    grads_there = [g for g in grads if g is not None]
    if not grads_there:
        raise ValueError(
            "clip_by_global_norm: all gradients are None; the loss does not depend on the variables"
        )
    norm = optimize.global_norm(grads_there)
    # min(1, clip_norm / norm), without 0 / 0 where all gradients are 0.
    factor = clip_norm / mtf.maximum(norm, clip_norm)
    clipped = [None if g is None else g * mtf.cast(factor, g.dtype) for g in grads]
    return clipped, norm


def _learning_rate(
    init_lr: float, num_train_steps: int, num_warmup_steps: Optional[int]
) -> tf.Tensor:
    """Returns the learning rate of the current step, with linear warmup and linear decay to 0."""
    # Not the variable itself, which a step may increment before or after this reads it.
    step = tf.cast(steps_done(), tf.float32)
    left = tf.maximum(0.0, 1.0 - step / float(num_train_steps))
    if not num_warmup_steps:
        return init_lr * left
    # As in BERT, the decay is over all steps, also those of the warmup: where that ends, the rate
    # drops from init_lr to init_lr times the fraction of steps that is left.
    share = step / float(num_warmup_steps)
    return init_lr * tf.where_v2(share < 1.0, share, left)


def create_optimizer(
    loss: mtf.Tensor,
    init_lr: float,
    num_train_steps: int,
    num_warmup_steps: Optional[int],
    max_optimized_variable_size: Optional[float] = None,
    optimizer: str = "adam",
    clip_gradients: bool = True,
) -> tuple[tf.Tensor, list[mtf.Operation]]:
    """Creates the operations that update the variables of the loss's graph.

    The learning rate rises linearly from 0 to `init_lr` during `num_warmup_steps`; after that it is
    `init_lr` times the fraction of steps that remain.

    Args:
      loss: a scalar Tensor.
      init_lr: the learning rate.
      num_train_steps: the step at which the learning rate reaches 0.
      num_warmup_steps: the number of warmup steps; 0 or None for no warmup.
      max_optimized_variable_size: larger variables are not trained; all are if None.
      optimizer: "adam", with a weight decay of 0.01 for variables other than biases and
        normalizations, or "adafactor".
      clip_gradients: whether to clip gradients to a global norm of 1.

    Returns:
      (the learning rate, a list of operations).

    Raises:
      ValueError: the optimizer is unknown, the numbers of steps are invalid, or no variable is
        left.
    """
    check_choice("create_optimizer", "optimizer", optimizer, _OPTIMIZERS)
    if num_train_steps < 1:
        raise ValueError(
            f"create_optimizer: num_train_steps is {num_train_steps}; it should be 1 or more"
        )
    if num_warmup_steps and num_warmup_steps < 0:
        raise ValueError(
            f"create_optimizer: num_warmup_steps is {num_warmup_steps}; it should be 1 or more, or "
            "0 for no warmup"
        )
    variables = [
        v
        for v in loss.graph.trainable_variables
        if max_optimized_variable_size is None or v.shape.size <= max_optimized_variable_size
    ]
    if not variables:
        raise ValueError(
            "create_optimizer: no variable is trained: all are larger than "
            f"max_optimized_variable_size={max_optimized_variable_size}"
        )
    grads: Sequence[Optional[mtf.Tensor]] = mtf.gradients([loss], [v.outputs[0] for v in variables])
    if clip_gradients:
        # Before the optimizer, or one huge gradient would stay in Adam's averages for many steps.
        grads, _ = clip_by_global_norm(grads, mtf.constant(loss.mesh, _MAX_NORM))
    rate = _learning_rate(init_lr, num_train_steps, num_warmup_steps)
    return rate, _OPTIMIZERS[optimizer](rate).apply_grads(grads, variables)


replaceable(__name__)
