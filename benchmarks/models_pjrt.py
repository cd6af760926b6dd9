"""The workloads as programs of mtf.pjrt, on devices of JAX."""

import time
from typing import Any

import numpy as np
import systems
import tensorflow as tf
import workloads
from workloads import Workload

__all__ = ["Arrays", "PjrtProgram"]


class Arrays:
    """Initial values and data for a program that is built, as `Feeds` is for sessions."""

    def __init__(self, weights: dict[str, np.ndarray], data: dict[str, Any]):
        self._weights, self._data = weights, data

    def initializer(self, key: str) -> Any:
        """An initializer for mtf.get_variable."""
        array = self._weights[key]
        return lambda shape, dtype=None, **_: tf.constant(array.reshape([int(n) for n in shape]))

    def data(self, key: str) -> Any:
        """A tensor of the program."""
        return self._data[key]


class PjrtProgram:
    """A compiled training step with its weights; see models_jax.JaxProgram."""

    def __init__(self, w: Workload, mesh_name: str):
        """Compiles a step.

        Args:
          w: the workload, of kind "ff" or "transformer".
          mesh_name: one of workloads.MESHES.
        """
        mtf = systems.import_mtf(False, w.uses_package)
        from models_mtf import MtfModel

        weights = workloads.make_weights(w)

        @mtf.pjrt.function(
            mesh_shape=workloads.MESHES[mesh_name], layout=workloads.layout(w, mesh_name)
        )
        def step(data: dict[str, Any]) -> Any:
            mesh = mtf.Mesh(mtf.Graph(), "mesh")
            loss = MtfModel(mtf, w, mesh, Arrays(weights, data)).loss()
            variables = mesh.graph.trainable_variables
            gradients = mtf.gradients([loss], [v.value for v in variables])
            updates = systems.optimizer(mtf, w).apply_grads(gradients, variables)
            lowering = mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()})
            for update in updates:
                lowering.lowered_operation(update)
            return lowering.export_to_tf_tensor(loss)

        self._step, self._data = step, workloads.make_data(w)
        start = time.perf_counter()
        lowered = step.lower(self._data)
        built = time.perf_counter()
        lowered.compiled  # noqa: B018  # compiled when it is asked for
        self.seconds = {"build": built - start, "lowering": time.perf_counter() - built}
        self.nodes = len(lowered.stablehlo.splitlines())
        self.collectives = [vars(c) for c in lowered.collectives()]
        start = time.perf_counter()
        step.make_variables(self._data)
        self.init_seconds = time.perf_counter() - start
        [self._data], _ = step.place(self._data)

    def step(self) -> float:
        """Trains one step; returns its loss."""
        return float(self._step(self._data))
