"""Gradients of a batch in several microbatches, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import WrongTypeError, dims_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow.ops._training import split_microbatches, take_microbatch

__all__ = ["AccumulatedLoss", "accumulate_gradients"]

# A Tensor, or several in a list, tuple or dictionary.
Inputs = Union[mtf.Tensor, Sequence[mtf.Tensor], Mapping[str, mtf.Tensor]]
# The mean loss, or (a sum of losses, their total weight).
Loss = Union[mtf.Tensor, tuple[mtf.Tensor, mtf.Tensor]]


class AccumulatedLoss(NamedTuple):
    """The loss of a batch and its gradients.

    >>> print(mtf.optimize.AccumulatedLoss._fields)
    ('loss', 'grads', 'variables')

    Attributes:
      loss: a float32 scalar Tensor.
      grads: for each variable a float32 Tensor of its shape, or None if the loss does not depend
        on it.
      variables: the Variables.
    """

    loss: mtf.Tensor
    grads: list[Optional[mtf.Tensor]]
    variables: list[mtf.Variable]


@leaves_no_node
def accumulate_gradients(
    loss_fn: Callable[[Any], Loss],
    inputs: Inputs,
    batch_dim: mtf.Dimension,
    num_microbatches: int,
    variables: Optional[Sequence[mtf.Variable]] = None,
) -> AccumulatedLoss:
    """Computes a loss and its gradients in microbatches, with the memory of one.

    The batch is split into microbatches of equal size, which a loop goes through within one step.
    Results are those of the whole batch: means over the microbatches. Gradients are summed in
    float32, and over processors once, after the loop.

    If examples have weights, such as 0 for padding, the mean of means is not the mean over the
    batch: then let `loss_fn` return (the weighted sum of losses, the sum of weights). The result is
    the quotient of their totals, with the gradients of it for fixed weights.

    >>> batch, d = mtf.Dimension("batch", 8), mtf.Dimension("d", 4)
    >>> x = mtf.import_tf_tensor(mesh, np.ones([8, 4], np.float32), [batch, d])
    >>> def loss_fn(x):
    ...     y = mtf.layers.dense(x, [mtf.Dimension("out", 2)], reduced_dims=[d])
    ...     return mtf.reduce_mean(mtf.square(y))
    >>> result = mtf.optimize.accumulate_gradients(loss_fn, x, batch, num_microbatches=4)
    >>> updates = mtf.optimize.SgdOptimizer(0.1).apply_grads(result.grads, result.variables)
    >>> print([g.shape.to_string for g in result.grads])
    ['Shape[d=4, out=2]', 'Shape[out=2]']

    Args:
      loss_fn: takes one microbatch of the inputs, a Tensor or a list or dictionary; `batch_dim` is
        smaller in it, with the same name. Returns the mean loss of the microbatch, a scalar Tensor;
        or (sum, weight), two scalar Tensors.
      inputs: a Tensor, or several in a list, tuple or dictionary. Those without `batch_dim` go
        whole to every microbatch.
      batch_dim: a Dimension.
      num_microbatches: a divisor of its size. Each microbatch has to be divisible by the number of
        parts that the layout splits `batch_dim` into.
      variables: the Variables of the gradients; the trainable ones of the graph if None.

    Raises:
      ValueError: the batch is not divisible by `num_microbatches`, no input has `batch_dim`, or the
        loss is not a scalar.
    """
    names, values = _named(inputs)
    _check(values, batch_dim, num_microbatches)
    step = _Microbatch(names, inputs, loss_fn, variables)
    if num_microbatches == 1:
        results = step(values)
    else:
        results = _in_loop(step, values, batch_dim, num_microbatches)
    total, weight, *sums = results
    share = 1.0 / num_microbatches if not step.weighted else mtf.reciprocal(weight)
    grads = iter(
        [x * (share if isinstance(share, float) else mtf.cast(share, x.dtype)) for x in sums]
    )
    return AccumulatedLoss(
        total * share,
        [next(grads) if reached else None for reached in step.reached],
        step.variables,
    )


def _wide(x: mtf.Tensor) -> mtf.Tensor:
    return x if x.dtype.is_complex else mtf.to_float(x)


class _Microbatch:
    """Computes the loss and the gradients of one microbatch.

    Attributes:
      variables: the Variables.
      reached: for each of them, whether the loss depends on it.
      weighted: whether the loss function returns a weight.
    """

    def __init__(
        self,
        names: Optional[list[str]],
        inputs: Inputs,
        loss_fn: Callable[[Any], Loss],
        variables: Optional[Sequence[mtf.Variable]],
    ):
        self._names = names
        self._single = isinstance(inputs, mtf.Tensor)
        self._loss_fn = loss_fn
        self._given = variables
        self.variables: list[mtf.Variable] = []
        self.reached: list[bool] = []
        self.weighted = False

    def __call__(self, values: list[mtf.Tensor]) -> list[mtf.Tensor]:
        """Returns [loss, weight, gradients of the variables that it depends on], in float32.

        Complex gradients stay as they are.
        """
        given: Any = values[0] if self._single else values
        if self._names is not None:
            given = dict(zip(self._names, values))
        loss, weight = self._checked(self._loss_fn(given))
        given_variables = self._given
        chosen = loss.graph.trainable_variables if given_variables is None else given_variables
        self.variables = list(chosen)
        grads = mtf.gradients([loss], [v.value for v in self.variables])
        self.reached = [g is not None for g in grads]
        found = [_wide(x) for x in (loss, *(g for g in grads if g is not None))]
        one = mtf.constant(loss.mesh, 1.0, mtf.Shape([]), tf.float32)
        return [found[0], one if weight is None else mtf.to_float(weight), *found[1:]]

    def _checked(self, result: Loss) -> tuple[mtf.Tensor, Optional[mtf.Tensor]]:
        self.weighted = isinstance(result, (tuple, list))
        pair = list(result) if isinstance(result, (tuple, list)) else [result]
        scalars = [x for x in pair if isinstance(x, mtf.Tensor) and not x.shape.ndims]
        if len(scalars) != len(pair) or len(pair) > 2 or (self.weighted and len(pair) < 2):
            raise ValueError(
                "accumulate_gradients: loss_fn must return a scalar Tensor, or two: (sum of "
                f"losses, weight); it returned {result!r}. mtf.reduce_mean makes one of several"
            )
        return pair[0], pair[1] if self.weighted else None


def _in_loop(
    step: _Microbatch, values: list[mtf.Tensor], batch_dim: mtf.Dimension, num_microbatches: int
) -> list[mtf.Tensor]:
    """Returns the sums of the results of all microbatches."""
    small = mtf.Dimension(batch_dim.name, batch_dim.size // num_microbatches)
    micro = mtf.Dimension("microbatch", num_microbatches)
    split = [batch_dim in x.shape for x in values]
    prepared = [
        split_microbatches(x, batch_dim, small, micro) if s else x for x, s in zip(values, split)
    ]

    def body(index: mtf.Tensor) -> list[mtf.Tensor]:
        given = [take_microbatch(x, index, micro) if s else x for x, s in zip(prepared, split)]
        return [index + 1, *step(given)]

    return mtf.while_loop(
        lambda index: mtf.less(index, num_microbatches),
        body,
        [mtf.constant(values[0].mesh, 0, dtype=tf.int32)],
        has_accumulators=True,
        maximum_iterations=num_microbatches,
    )[1:]


def _named(inputs: Inputs) -> tuple[Optional[list[str]], list[mtf.Tensor]]:
    """Returns (the keys of a dictionary or None, the Tensors)."""
    names = list(inputs) if isinstance(inputs, Mapping) else None
    values = list(inputs.values()) if isinstance(inputs, Mapping) else inputs
    values = [values] if isinstance(values, mtf.Tensor) else values
    if not isinstance(values, (list, tuple)) or not all(isinstance(x, mtf.Tensor) for x in values):
        raise WrongTypeError(
            "accumulate_gradients: inputs must be an mtf.Tensor, or a list or dictionary of them, "
            f"not {inputs!r}"
        )
    return names, list(values)


def _check(values: list[mtf.Tensor], batch_dim: mtf.Dimension, num_microbatches: int) -> None:
    if num_microbatches < 1 or batch_dim.size % num_microbatches:
        raise ValueError(
            f"accumulate_gradients: {dims_text([batch_dim])} is not divisible by num_microbatches="
            f"{num_microbatches}; choose a divisor of {batch_dim.size}"
        )
    if not any(batch_dim in x.shape for x in values):
        shapes = ", ".join(str(x.shape) for x in values)
        raise ValueError(
            f"accumulate_gradients: no input has the dimension {dims_text([batch_dim])}; they are "
            f"of {shapes}"
        )
