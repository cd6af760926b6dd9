"""Optimizers: operations that update variables, given their gradients."""

from mesh_tensorflow._replaced import replaceable
from mesh_tensorflow.optimize._accumulate import (
    AccumulatedLoss,
    ExponentialMovingAverage,
    accumulate_gradients,
    clip_by_global_norm,
    global_norm,
)
from mesh_tensorflow.optimize._adafactor import (
    AdafactorOptimizer,
    AdafactorWithMultiLRSchedule,
    AdamWithMultiLRSchedule,
    adafactor_decay_rate_adam,
    adafactor_decay_rate_pow,
    adafactor_optimizer_from_hparams,
    make_optimizer,
    reduce_rms,
)
from mesh_tensorflow.optimize._adam import (
    AdamWeightDecayOptimizer,
    AdamWOptimizer,
    ElementwiseOptimizer,
    ElementwiseStep,
    LionOptimizer,
    elementwise,
)
from mesh_tensorflow.optimize._base import (
    MomentumOptimizer,
    Optimizer,
    SgdOptimizer,
    compute_lr_for_step,
    float_slot,
    product_learning_rate,
    rate_now,
    scalar_like,
    skip_without_gradient,
)
from mesh_tensorflow.optimize._keras import from_keras

__all__ = [
    "AccumulatedLoss",
    "AdafactorOptimizer",
    "AdafactorWithMultiLRSchedule",
    "AdamWOptimizer",
    "AdamWeightDecayOptimizer",
    "AdamWithMultiLRSchedule",
    "ElementwiseOptimizer",
    "ElementwiseStep",
    "ExponentialMovingAverage",
    "LionOptimizer",
    "MomentumOptimizer",
    "Optimizer",
    "SgdOptimizer",
    "accumulate_gradients",
    "adafactor_decay_rate_adam",
    "adafactor_decay_rate_pow",
    "adafactor_optimizer_from_hparams",
    "clip_by_global_norm",
    "compute_lr_for_step",
    "elementwise",
    "float_slot",
    "from_keras",
    "global_norm",
    "make_optimizer",
    "product_learning_rate",
    "rate_now",
    "reduce_rms",
    "scalar_like",
    "skip_without_gradient",
]

replaceable(__name__)
