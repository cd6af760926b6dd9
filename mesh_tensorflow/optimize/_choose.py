"""Selection of an optimizer by the hyperparameters of Tensor2Tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mesh_tensorflow._core.errors import table_lookup
from mesh_tensorflow.optimize._adafactor import adafactor_optimizer_from_hparams
from mesh_tensorflow.optimize._base import Optimizer, Rate
from mesh_tensorflow.optimize._sgd import SgdOptimizer

__all__ = ["make_optimizer"]

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
    return table_lookup(_OPTIMIZERS, hparams.optimizer, "hparams.optimizer")(hparams, lr)
