"""Optimizers: operations that update variables, given their gradients."""

from mesh_tensorflow.optimize._adafactor import (
    AdafactorOptimizer,
    adafactor_decay_rate_adam,
    adafactor_decay_rate_pow,
    adafactor_optimizer_from_hparams,
    reduce_rms,
)
from mesh_tensorflow.optimize._adam import AdamWeightDecayOptimizer
from mesh_tensorflow.optimize._base import Optimizer
from mesh_tensorflow.optimize._choose import make_optimizer
from mesh_tensorflow.optimize._multi_rate import (
    AdafactorWithMultiLRSchedule,
    AdamWithMultiLRSchedule,
)
from mesh_tensorflow.optimize._schedules import compute_lr_for_step, product_learning_rate
from mesh_tensorflow.optimize._sgd import MomentumOptimizer, SgdOptimizer

__all__ = [
    "AdafactorOptimizer",
    "AdafactorWithMultiLRSchedule",
    "AdamWeightDecayOptimizer",
    "AdamWithMultiLRSchedule",
    "MomentumOptimizer",
    "Optimizer",
    "SgdOptimizer",
    "adafactor_decay_rate_adam",
    "adafactor_decay_rate_pow",
    "adafactor_optimizer_from_hparams",
    "compute_lr_for_step",
    "make_optimizer",
    "product_learning_rate",
    "reduce_rms",
]
