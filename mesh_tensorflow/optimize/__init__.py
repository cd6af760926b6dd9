"""Optimizers: operations that assign to variables, given their gradients."""

from mesh_tensorflow.optimize._adafactor import (
    AdafactorOptimizer,
    adafactor_decay_rate_adam,
    adafactor_decay_rate_pow,
    reduce_rms,
)
from mesh_tensorflow.optimize._adam import AdamWeightDecayOptimizer
from mesh_tensorflow.optimize._base import Optimizer
from mesh_tensorflow.optimize._sgd import MomentumOptimizer, SgdOptimizer

__all__ = [
    "AdafactorOptimizer",
    "AdamWeightDecayOptimizer",
    "MomentumOptimizer",
    "Optimizer",
    "SgdOptimizer",
    "adafactor_decay_rate_adam",
    "adafactor_decay_rate_pow",
    "reduce_rms",
]
