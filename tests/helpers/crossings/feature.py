"""What a row of the table is: a small model that uses a feature, and what has to come out."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Optional

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.harness import Placing

__all__ = [
    "BATCH",
    "DATA",
    "EVALUATED",
    "HIDDEN",
    "RATE",
    "STEPS",
    "WIDTH",
    "Feature",
    "Outcome",
    "built",
    "computed",
    "pieces",
    "weight",
]

STEPS, RATE = 3, 0.1
BATCH, WIDTH, HIDDEN = mtf.convert_to_shape("batch:8,width:4,hidden:8").dims
DATA = np.random.RandomState(0).randn(STEPS * BATCH.size, WIDTH.size).astype(np.float32)
EVALUATED = np.random.RandomState(1).randn(13, WIDTH.size).astype(np.float32)  # no whole batches


@dataclasses.dataclass
class Outcome:
    """What a training of STEPS steps leaves.

    Attributes:
      losses: the loss of each step; of the last one, if the front end tells no more.
      variables: the variables after them, by name.
      printed: what was written to stderr.
      summaries: the last value of each scalar summary; None if the front end hands none out.
      evaluation: the mean loss of EVALUATED after the training, if the feature is evaluated.
      predictions: what the model computes of EVALUATED; None if the front end does not tell it.
    """

    losses: list[float]
    variables: dict[str, np.ndarray]
    printed: str = ""
    summaries: Optional[dict[str, float]] = None
    evaluation: Optional[float] = None
    predictions: Optional[np.ndarray] = None


Between = Callable[[mtf.Tensor], Any]


@dataclasses.dataclass(frozen=True)
class Feature:
    """A row of the table.

    Attributes:
      name: its name.
      between: a function of the hidden layer of an autoencoder that returns a Tensor of its shape,
        or (one, update operations).
      plain: the same without the feature, with the same results; None if the feature is compared
        with itself, unsplit.
      layout: the layout rules.
      options: arguments of `fit`: average, clip_norm, learning_rate, microbatches, precision,
        zero, zero_axis.
      optimizer: a function of the learning rate that returns an optimizer.
      is_random: whether front ends draw other values: then each is compared with itself, unsplit.
      begins: the front end that does the first step, and its mesh implementation, of whose
        checkpoint the others go on; "" is the front end itself, and unsplit. None begins anew.
      raises: the text of the error that is due in a layout, in place of results.
      evaluates: "after" to evaluate and to predict after the training, "between" to do so after each
        step, too, by which nothing may change.
      check: a function of an Outcome that asserts what no comparison shows.
      around: a context around the building and the running of the program.
      tolerance: of the comparison.
      gin: what gin binds for transformer.utils.run, in place of a layer that calls `between`.
      plain_gin: the same without the feature.
      gin_layout: layout rules of the transformer.
    """

    name: str
    between: Between
    plain: Optional[Between] = None
    layout: str = "batch:rows,hidden:cols"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    optimizer: Callable[..., mtf.optimize.Optimizer] = mtf.optimize.SgdOptimizer
    is_random: bool = False
    begins: Optional[tuple[str, str]] = None
    raises: str = ""
    evaluates: str = ""
    check: Callable[[Outcome], None] = lambda outcome: None
    around: Callable[[], Any] = contextlib.nullcontext
    tolerance: float = 1e-4
    gin: Optional[str] = None
    plain_gin: str = ""
    gin_layout: str = "batch:rows,d_ff:cols,heads:cols,vocab:cols"

    def unsplit(self) -> Feature:
        """Returns what it is compared with."""
        always = ("average", "clip_norm", "learning_rate")
        kept = {n: v for n, v in self.options.items() if n in always}
        if self.plain is None:
            kept.update({n: v for n, v in self.options.items() if n == "precision"})
        return dataclasses.replace(
            self,
            between=self.plain or self.between,
            options=kept,
            around=contextlib.nullcontext,
            begins=None,
            gin=None if self.gin is None else self.plain_gin,
        )

    def rate(self, step: Any) -> Any:
        """Returns the learning rate of a step, which may be a tf scalar."""
        rate = self.options.get("learning_rate", RATE)
        return tf.cast(rate(step), tf.float32) if callable(rate) else rate

    def outputs(self, mesh: mtf.Mesh, x: mtf.Tensor) -> tuple[mtf.Tensor, list[mtf.Operation]]:
        """Returns what an autoencoder makes of its input, and update operations."""
        encode = weight(mesh, "encode", [WIDTH, HIDDEN])
        h = mtf.tanh(mtf.einsum([x, encode], reduced_dims=[WIDTH]))
        found = self.between(h)
        h, updates = found if isinstance(found, tuple) else (found, [])
        y = mtf.einsum([h, weight(mesh, "decode", [HIDDEN, WIDTH])], reduced_dims=[HIDDEN])
        return y, list(updates)

    def model(self, mesh: mtf.Mesh, x: mtf.Tensor) -> tuple[mtf.Tensor, list[mtf.Operation]]:
        """Returns the loss of the autoencoder, and update operations."""
        y, updates = self.outputs(mesh, x)
        return mtf.reduce_mean(mtf.square(y - x)), updates

    def placed(self, placing: Placing) -> Placing:
        """Returns a Placing with the layout of the feature, and the way it stores variables."""
        if not placing.mesh:
            return placing
        stored = {n: v for n, v in self.options.items() if n in ("zero", "zero_axis")}
        return placing._replace(layout=self.layout, **stored)


def weight(mesh: mtf.Mesh, name: str, shape: Any, **kwargs: Any) -> mtf.Tensor:
    """Returns a variable whose initial value follows from its name and its sizes."""
    shape = mtf.convert_to_shape(shape)
    draws = np.random.RandomState(len(name) + shape.size)
    value = np.float32(draws.randn(*shape.to_integer_list) * 0.5)
    start = tf.constant_initializer(value)
    return mtf.get_variable(mesh, name, shape, initializer=start, **kwargs)


def built(
    feature: Feature, placing: Placing, data: tf.Tensor, step: Any
) -> tuple[dict[str, Any], mtf.Lowering]:
    """Builds and lowers a step, as a user's program does.

    Args:
      feature: a Feature.
      placing: where it runs, a Placing of `Feature.placed`.
      data: a batch.
      step: the number of steps before this one, a tf scalar.

    Returns:
      ({"loss": a tf.Tensor, "done": a tf.Operation}, the Lowering).
    """
    options, of_model = feature.options, []
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    parts = options.get("microbatches", 1)

    def loss_of(x: mtf.Tensor) -> mtf.Tensor:
        loss, more = feature.model(mesh, x)
        of_model.extend(more)
        return loss

    chosen = options.get("precision")
    with (
        mtf.precision(chosen) if chosen else contextlib.nullcontext(),
        mtf.utils.counted_steps(tf.convert_to_tensor(step)),
    ):
        x = mtf.import_tf_tensor(mesh, data, [BATCH, WIDTH])
        if parts > 1:
            found = mtf.optimize.accumulate_gradients(loss_of, x, BATCH, parts)
            loss, grads = found.loss, found.grads
        else:
            loss = loss_of(x)
            grads = mtf.gradients([loss], [v.value for v in graph.trainable_variables])
        with mtf.precision("float32"):
            if "clip_norm" in options:
                grads, _ = mtf.optimize.clip_by_global_norm(grads, options["clip_norm"])
            optimizer = feature.optimizer(feature.rate(step))
            variables = graph.trainable_variables
            updates = optimizer.apply_grads(grads, variables)
            if "average" in options:
                averages = mtf.optimize.ExponentialMovingAverage(options["average"])
                updates = [*updates, *averages.apply(variables, after=updates)]
        lowering = mtf.Lowering(graph, {mesh: placing.impl()})
    if of_model and parts > 1:  # assignments in microbatches are made after them
        done = list(lowering.effects)
    else:
        done = [lowering.lowered_operation(op) for op in [*of_model, *updates]]
    results = {"loss": lowering.export_to_tf_tensor(loss)}
    with tf.control_dependencies([op for op in done if op is not None]):
        return {**results, "done": tf.no_op()}, lowering


def computed(feature: Feature, placing: Placing, data: tf.Tensor) -> tuple[tf.Tensor, mtf.Lowering]:
    """Returns what the model computes of a batch, and the Lowering, as a user evaluates it.

    Args:
      feature: a Feature.
      placing: where it runs, a Placing of `Feature.placed`.
      data: a batch.
    """
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    y, _ = feature.outputs(mesh, mtf.import_tf_tensor(mesh, data, [BATCH, WIDTH]))
    lowering = mtf.Lowering(graph, {mesh: placing.impl()})
    return lowering.export_to_tf_tensor(y), lowering


def pieces() -> np.ndarray:
    """Returns EVALUATED as batches, the last of which zeros fill up."""
    batches = -(-len(EVALUATED) // BATCH.size)
    whole = np.zeros([batches * BATCH.size, WIDTH.size], np.float32)
    whole[: len(EVALUATED)] = EVALUATED
    return whole.reshape(batches, BATCH.size, WIDTH.size)
