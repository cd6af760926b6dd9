"""Arguments of fit that are given by mistake: what is said to them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any, Optional, TypeVar, cast

from mesh_tensorflow._core.errors import did_you_mean
from mesh_tensorflow.train.callbacks import Callback

__all__ = ["check_callbacks", "learning_rate_of", "check_seed", "explained"]

F = TypeVar("F", bound=Callable[..., Any])

_BATCH = (
    "the size of a batch is that of the first dimension in dims, such as "
    'dims="batch:32,pixels:784" or {"image": [batch, pixels], "label": [batch]}'
)
_STEPS = (
    "training is counted in steps: give steps = epochs * (rows // batch), such as "
    "steps=3 * (len(images) // batch.size). Data are read again and again, and eval_every=rows // "
    "batch evaluates after each epoch"
)
# Names that other trainers have, and what there is in their place.
_ELSEWHERE = {
    "epochs": _STEPS,
    "num_epochs": _STEPS,
    "num_train_epochs": _STEPS,
    "max_epochs": _STEPS,
    "steps_per_epoch": _STEPS,
    "max_steps": "give steps, the number of steps, those of earlier runs included",
    "batch_size": _BATCH,
    "x": "give data, arrays in the structure of dims, such as the tuple (x, y)",
    "y": "give data, arrays in the structure of dims, such as the tuple (x, y)",
    "validation_data": "give eval_data, in the structure of dims",
    "validation_split": "give eval_data, in the structure of dims",
    "validation_freq": "give eval_every, a number of steps",
    "metrics": 'let the model function return them: {"loss": loss, "accuracy": accuracy}',
    "loss": "let the model function return it",
    "lr": "give learning_rate",
    "verbose": "give progress=False to write nothing",
    "model_dir": "give directory",
    "checkpoint_dir": "give directory",
    "output_dir": "give directory",
}


def explained(function: F) -> F:
    """Decorates a function: unknown arguments are told what there is in their place.

    Args:
      function: the function.
    """
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        unknown = [name for name in kwargs if name not in known]
        if unknown:
            texts = [
                f"{name!r}: {_ELSEWHERE[name]}"
                if name in _ELSEWHERE
                else f"{name!r}{did_you_mean(name, known)}"
                for name in unknown
            ]
            raise TypeError(f"{function.__name__} has no argument {'; and none '.join(texts)}")
        return function(*args, **kwargs)

    return cast(F, called)


def learning_rate_of(rate: Any) -> Any:
    """Returns a learning rate, of an eager tf.Tensor its value.

    Args:
      rate: a number, a function of the step, or None.

    Raises:
      TypeError: it is something else.
    """
    if rate is None or callable(rate):
        return rate
    if isinstance(rate, bool) or not hasattr(type(rate), "__float__"):
        raise TypeError(
            f"fit: learning_rate is a number or a function of the step, but is {rate!r}, a "
            f"{type(rate).__name__}. Give for instance 0.1, or mtf.schedules.cosine(...)"
        )
    return float(rate) if hasattr(rate, "numpy") else rate


def check_callbacks(callbacks: Any) -> None:
    """Raises TypeError for what are no callbacks.

    Args:
      callbacks: objects of class Callback.
    """
    if isinstance(callbacks, (Callback, type)) or not isinstance(callbacks, Iterable):
        raise TypeError(f"fit: callbacks is a list of callbacks, but is {callbacks!r}")
    events = [name for name in vars(Callback) if name.startswith("on_")]
    for callback in callbacks:
        if isinstance(callback, type) or not all(hasattr(callback, event) for event in events):
            mend = (
                f"Make an object of it: {callback.__name__}()"
                if isinstance(callback, type) and issubclass(callback, Callback)
                else "Derive its class from mtf.train.Callback, which has all of "
                + ", ".join(events)
            )
            raise TypeError(f"fit: {callback!r} among the callbacks is none. {mend}")


def check_seed(seed: Optional[int]) -> None:
    """Raises ValueError for what is no seed.

    Args:
      seed: an integer that is not negative, or None.
    """
    if seed is not None and not (isinstance(seed, Integral) and 0 <= seed < 2**63):
        raise ValueError(
            f"fit: seed is None or an integer from 0 to 2**63 - 1, but is {seed!r}. None draws "
            "another one in each run"
        )
