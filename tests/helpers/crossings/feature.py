"""What a row of the table is: a small model that uses a feature, and what has to come out."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Optional

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf

__all__ = ["BATCH", "DATA", "LAYOUT", "MESH", "STEPS", "WIDTH", "Feature", "Outcome", "built"]

MESH, LAYOUT = "rows:2,cols:2", "batch:rows,hidden:cols"
STEPS, RATE = 3, 0.1
BATCH, WIDTH = mtf.convert_to_shape("batch:8,width:4").dims
DATA = np.random.RandomState(0).randn(STEPS * BATCH.size, WIDTH.size).astype(np.float32)


@dataclasses.dataclass
class Outcome:
    """What a training of STEPS steps leaves.

    Attributes:
      losses: the loss of each step.
      variables: the variables after them, by name.
      printed: what was written to stderr.
      summaries: the last value of each scalar summary; None if the front end hands none out.
    """

    losses: list[float]
    variables: dict[str, np.ndarray]
    printed: str = ""
    summaries: Optional[dict[str, float]] = None


@dataclasses.dataclass(frozen=True)
class Feature:
    """A row of the table.

    Attributes:
      name: its name.
      model: a function of a mesh and a batch that returns the loss, or (loss, update operations).
      plain: a model without the feature, with the same loss and variables; None compares with the
        model itself, unsplit in a session.
      layout: the layout rules.
      optimizer: a function of the learning rate that returns an optimizer.
      options: arguments of `fit`: clip_norm, learning_rate, microbatches, precision, zero.
      random: whether front ends may draw other values: then each is compared with itself, unsplit.
      check: a function of an Outcome that asserts what no comparison shows.
      around: a context around the building and the running of the program.
      tolerance: of the comparison.
      gin: for transformer.utils.run: what gin binds; None is a dash.
      dashes: why a cell is empty, by pairs of patterns of a front end and a mesh.
      errors: the text of the error of a cell, likewise.
    """

    name: str
    model: Callable[[mtf.Mesh, mtf.Tensor], Any]
    plain: Optional[Callable[[mtf.Mesh, mtf.Tensor], Any]] = None
    layout: str = LAYOUT
    optimizer: Callable[..., mtf.optimize.Optimizer] = mtf.optimize.SgdOptimizer
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    random: bool = False
    check: Callable[[Outcome], None] = lambda outcome: None
    around: Callable[[], Any] = contextlib.nullcontext
    tolerance: float = 1e-4
    gin: Optional[str] = None
    dashes: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=dict)
    errors: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=dict)

    def unsplit(self) -> Feature:
        """Returns the feature that it is compared with."""
        if self.plain is None:
            return self
        kept = {n: v for n, v in self.options.items() if n == "learning_rate"}
        return dataclasses.replace(self, model=self.plain, plain=None, options=kept)

    def rate(self, step: Any) -> Any:
        """Returns the learning rate of a step, which may be a tf scalar."""
        rate = self.options.get("learning_rate", RATE)
        return rate(step) if callable(rate) else rate

    def loss(self, mesh: mtf.Mesh, x: mtf.Tensor) -> mtf.Tensor:
        """Calls the model as a model function of `fit`, which has no place for updates."""
        found = self.model(mesh, x)
        return found[0] if isinstance(found, tuple) else found

    def stored(self) -> dict[str, Any]:
        """Returns the arguments of mesh implementations."""
        return {n: v for n, v in self.options.items() if n in ("zero", "zero_axis")}


def built(
    feature: Feature, make_impl: Callable[[], mtf.MeshImpl], data: tf.Tensor, step: Any
) -> tuple[dict[str, Any], mtf.Lowering]:
    """Builds and lowers a step as a user's program does.

    Args:
      feature: a Feature.
      make_impl: returns the mesh implementation.
      data: a batch.
      step: the number of steps before this one, a tf scalar.

    Returns:
      ({"loss": a tf.Tensor, "done": a tf.Operation}, the Lowering).
    """
    options, updates = feature.options, []
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")

    def loss_of(x: mtf.Tensor) -> mtf.Tensor:
        found = feature.model(mesh, x)
        if isinstance(found, tuple):
            updates.extend(found[1])
            return found[0]
        return found

    with (
        mtf.precision(options["precision"]) if "precision" in options else contextlib.nullcontext()
    ):
        x = mtf.import_tf_tensor(mesh, data, [BATCH, WIDTH])
        parts = options.get("microbatches", 1)
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
            updates += optimizer.apply_grads(grads, graph.trainable_variables)
        lowering = mtf.Lowering(graph, {mesh: make_impl()})
    done = [lowering.lowered_operation(op) for op in updates]
    with tf.control_dependencies([op for op in done if op is not None]):
        return {"loss": lowering.export_to_tf_tensor(loss), "done": tf.no_op()}, lowering
