"""Metrics: sums and weights whose means are right over batches of different sizes, and rates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.placement import cost_of
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow.auto_mtf._units import program_steps
from mesh_tensorflow.auto_mtf.hardware import Hardware

__all__ = [
    "Metric",
    "accuracy",
    "flops_per_step",
    "mean",
    "model_flops_utilization",
    "perplexity",
]


@dataclasses.dataclass(frozen=True)
class Metric:
    """A sum and its weight; over batches, both are added up, and the mean is sum / weight.

    Attributes:
      total: a scalar Tensor, the sum.
      weight: a scalar Tensor, what to divide the sum by.
      after: a function of the mean, a float, or None.
    """

    total: mtf.Tensor
    weight: mtf.Tensor
    after: Optional[Callable[[float], float]] = None


def mean(values: mtf.Tensor, weights: Optional[mtf.Tensor] = None) -> Metric:
    """Returns the mean of values.

    >>> values = mtf.import_tf_tensor(mesh, tf.constant([1.0, 2.0, 6.0]), "length:3")
    >>> weights = mtf.import_tf_tensor(mesh, tf.constant([1.0, 1.0, 0.0]), "length:3")
    >>> metric = mtf.train.metrics.mean(values, weights)
    >>> metric.total.shape.to_integer_list, metric.weight.shape.to_integer_list
    ([], [])

    Args:
      values: a Tensor of any shape, such as the loss of each token.
      weights: a Tensor whose dimensions `values` has too, such as 0 for padding and 1 for tokens;
        or None, all are 1.

    Returns:
      A Metric, in float32.
    """
    # A sum of bfloat16, of 8 binary digits, would stop growing at 256 ones.
    values = mtf.cast(values, tf.float32)
    if weights is None:
        weight = mtf.constant(values.mesh, float(values.shape.size), mtf.Shape([]), tf.float32)
        return Metric(mtf.reduce_sum(values), weight)
    weights = mtf.cast(weights, tf.float32)
    if not set(weights.shape.dims) <= set(values.shape.dims):
        raise ValueError(
            f"metrics.mean: weights {weights.shape} has dimensions that values {values.shape} does "
            "not have. Give a weight for each value, or for several"
        )
    # Each value counts with its weight, also where several share one, so the sum is over all.
    whole = mtf.broadcast(weights, values.shape)
    return Metric(mtf.reduce_sum(values * whole), mtf.reduce_sum(whole))


def accuracy(
    logits: mtf.Tensor,
    labels: mtf.Tensor,
    classes_dim: mtf.Dimension,
    weights: Optional[mtf.Tensor] = None,
) -> Metric:
    """Returns the share of labels whose logit is the largest.

    >>> batch, classes = mtf.Dimension("batch", 2), mtf.Dimension("classes", 3)
    >>> logits = mtf.ones(mesh, [batch, classes])
    >>> labels = mtf.zeros(mesh, [batch], tf.int32)
    >>> mtf.train.metrics.accuracy(logits, labels, classes).total.shape.to_integer_list
    []

    Args:
      logits: a Tensor with the dimension `classes_dim`.
      labels: an integer Tensor without it.
      classes_dim: the dimension of the classes.
      weights: as for `mean`; or None.

    Returns:
      A Metric between 0 and 1.
    """
    predicted = mtf.argmax(logits, classes_dim)
    right = mtf.cast(mtf.equal(predicted, mtf.cast(labels, predicted.dtype)), tf.float32)
    return mean(right, weights)


def perplexity(losses: mtf.Tensor, weights: Optional[mtf.Tensor] = None) -> Metric:
    """Returns the exponential of the mean loss.

    >>> losses = mtf.zeros(mesh, "length:3")
    >>> mtf.train.metrics.perplexity(losses).after(0.0)
    1.0

    Args:
      losses: the loss of each token, in nats.
      weights: as for `mean`; or None.

    Returns:
      A Metric; the mean is taken over all batches before the exponential.
    """
    average = mean(losses, weights)
    return Metric(average.total, average.weight, _exp)


def _exp(x: float) -> float:
    """Returns e^x; infinity where that is too large for a float."""
    # math.exp raises an OverflowError from about 709.78 on.
    return math.inf if x >= 709 else math.exp(x)


def flops_per_step(graph: mtf.Graph, mesh_impl: MeshImpl) -> int:
    """Returns the floating-point operations of a program, over all processors.

    A multiply-add counts as two. What is in a loop counts as often as it runs: for microbatches,
    their number; and once where that is not known.

    >>> d = mtf.Dimension("d", 4)
    >>> x = mtf.ones(mesh, [mtf.Dimension("batch", 8), d])
    >>> y = mtf.layers.dense(x, [mtf.Dimension("e", 2)], reduced_dims=[d], use_bias=False)
    >>> impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:1", "", ["cpu:0"])
    >>> mtf.train.metrics.flops_per_step(graph, impl)
    128

    Args:
      graph: the Graph of a step.
      mesh_impl: its mesh implementation.
    """
    total = 0.0
    for step in program_steps(graph.operations):
        cost = None if step.op is None else cost_of(step.op, mesh_impl)
        total += 0.0 if cost is None else step.times * cost.flops
    return round(total)


def model_flops_utilization(
    flops: float, seconds: float, hardware: Hardware, processors: int, dtype: str = "float32"
) -> float:
    """Returns the share of the hardware's compute rate that a step uses.

    It is the measure of Chowdhery et al., PaLM (2022), except that recomputed operations are
    counted if the program has them.

    >>> tpu = mtf.auto_mtf.hardware.hardware_profile("tpu_v3")
    >>> mtf.train.metrics.model_flops_utilization(tpu.flops["float32"], 2.0, tpu, 1)
    0.5

    Args:
      flops: floating-point operations of a step, over all processors.
      seconds: the duration of a step.
      hardware: the Hardware of a processor.
      processors: their number; 1 if the profile is that of one memory, whose rates are the whole
        machine's.
      dtype: the dtype of the activations.
    """
    # utilization = (flops / seconds) / (rate of a processor * processors)
    rate = hardware.flops.get(dtype, hardware.flops["float32"])
    machines = 1 if hardware.one_memory else processors
    return flops / (seconds * rate * machines)
