"""What a model function returns: a loss and metrics, and how they are averaged."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import numpy as np

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow.train.metrics import Metric

__all__ = [
    "Afters",
    "Means",
    "Output",
    "call_model",
    "check_names",
    "finished",
    "outputs_of",
    "single",
]


@dataclasses.dataclass(frozen=True)
class Output:
    """A loss or a metric of a batch.

    Attributes:
      value: a scalar, the mean over the batch; or a Tensor with a value for each example.
      weight: a scalar; then `value` is a sum, and the mean is value / weight. Or None.
      after: a function of the mean over all batches, or None.
    """

    value: mtf.Tensor
    weight: Optional[mtf.Tensor] = None
    after: Optional[Callable[[float], float]] = None

    def mean(self) -> mtf.Tensor:
        """Returns the mean over the batch, a scalar Tensor."""
        if self.weight is not None:
            return mtf.divide(self.value, mtf.cast(self.weight, self.value.dtype))
        return self.value if not len(self.value.shape) else mtf.reduce_mean(self.value)

    @property
    def parts(self) -> list[mtf.Tensor]:
        """The Tensors to export."""
        return [self.value] if self.weight is None else [self.value, self.weight]


def call_model(model_fn: Callable, mesh: mtf.Mesh, arguments: tuple, training: bool) -> Any:
    """Calls a model function; `training` is passed if it has a parameter of that name.

    Args:
      model_fn: the function.
      mesh: its first argument.
      arguments: its further arguments.
      training: whether weights are updated.
    """
    known = inspect.signature(model_fn).parameters
    named = {"training": training} if "training" in known else {}
    return model_fn(mesh, *arguments, **named)


def outputs_of(returned: Any, batch_dim: Optional[mtf.Dimension]) -> dict[str, Output]:
    """Returns the loss and the metrics that a model function has returned, by name.

    Args:
      returned: a Tensor, the loss; or a dictionary with "loss"; or a pair (loss, dictionary).
        Each is a scalar, a Tensor with the batch dimension, or a pair (sum, weight) of scalars.
      batch_dim: the Dimension of the batch, if it is known.

    Raises:
      ValueError: it is something else.
    """
    named = returned
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        named = {"loss": returned[0], **returned[1]}
    elif not isinstance(returned, Mapping):
        named = {"loss": returned}
    if "loss" not in named:
        raise ValueError(
            f"fit: the model function returned a dictionary without 'loss': {list(named)}"
        )
    check_names(named)
    return {str(name): _output(str(name), value, batch_dim) for name, value in named.items()}


def check_names(named: Mapping[Any, Any]) -> None:
    """Raises ValueError for a metric with the name of the number of steps.

    Args:
      named: metrics by name.
    """
    if "step" in named:
        raise ValueError(
            "fit: a metric has the name 'step', which the records of a run have for the number of "
            "steps. Give it another name"
        )


def _output(name: str, value: Any, batch_dim: Optional[mtf.Dimension]) -> Output:
    if isinstance(value, Metric):
        return Output(value.total, value.weight, value.after)
    parts = list(value) if isinstance(value, (tuple, list)) else [value]
    if not 1 <= len(parts) <= 2 or not all(isinstance(part, mtf.Tensor) for part in parts):
        raise ValueError(
            f"fit: the model function should return mtf Tensors, but {name} is {value!r}. A loss "
            "or metric is a scalar, a Tensor with the batch dimension, a pair (sum, weight), or "
            "one of mtf.train.metrics"
        )
    allowed = [[]] if len(parts) == 2 or batch_dim is None else [[], [batch_dim]]
    for part in parts:
        if part.shape.dims not in allowed:
            also = "" if batch_dim is None else f", or one value for each {batch_dim.name}"
            raise ValueError(
                f"fit: {name} of the model function has the dimensions [{dims_text(part.shape)}], "
                f"but a loss or metric is a scalar{also}. Take mtf.reduce_mean of it"
            )
    return Output(*parts)


Afters = Mapping[str, Optional[Callable[[float], float]]]


def single(values: Sequence[Any]) -> float:
    """Returns the mean that the exported parts of an Output stand for."""
    if len(values) == 2:
        # A batch of padding alone has the weight 0, and no mean.
        return float(values[0]) / float(values[1]) if float(values[1]) else float("nan")
    return float(np.mean(np.asarray(values[0], np.float64)))


class Means:
    """Means over batches of different sizes.

    A scalar counts with the rows of its batch, a sum with its weight, and values of examples one
    by one.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, outputs: Mapping[str, Sequence[Any]], rows: int) -> None:
        """Adds the values of a batch.

        Args:
          outputs: for each name the exported parts of an Output.
          rows: the number of rows of the batch.
        """
        for name, values in outputs.items():
            if len(values) == 2:
                added = float(values[0]), float(values[1])
            elif np.ndim(values[0]):
                # In float64: an evaluation may sum over many more examples than a batch has.
                column = np.asarray(values[0], np.float64)
                added = float(column.sum()), float(column.size)
            else:
                added = float(values[0]) * rows, float(rows)
            total, weight = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = total + added[0], weight + added[1]

    def result(self, afters: Afters) -> dict[str, float]:
        """Returns the means, by name; NaN where all weights are zero.

        Args:
          afters: the function of the mean of each name, or None.
        """
        means = {n: t / w if w else float("nan") for n, (t, w) in self._sums.items()}
        return finished(means, afters)


def finished(means: Mapping[str, float], afters: Afters) -> dict[str, float]:
    """Returns means after their functions, by name.

    Args:
      means: the means.
      afters: the function of the mean of each name, or None.
    """
    done = {}
    for name, value in means.items():
        after = afters.get(name)
        done[name] = value if after is None else after(value)
    return done
