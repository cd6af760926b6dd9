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


def training_step(w: Workload, mesh_name: str) -> tuple[Any, dict[str, np.ndarray]]:
    """Returns the step of a workload of kind "ff" or "transformer", and what it is called with.

    Args:
      w: the workload.
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
        return trained(mtf, loss, systems.optimizer(mtf, w))

    return step, workloads.make_data(w)


def t5_step() -> tuple[Any, dict[str, np.ndarray]]:
    """Returns a training step of T5-small on one device, and what it is called with."""
    mtf = systems.import_mtf(False, True)
    import t5_mesh
    import t5_small

    @mtf.pjrt.function(mesh_shape="all:1", layout="batch:all")
    def step(data: dict[str, Any]) -> Any:
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        inputs, targets = (
            mtf.import_tf_tensor(mesh, x, mtf.convert_to_shape(f"batch:{x.shape[0]},length:{n}"))
            for x in (data["x"], data["target"])
            for n in x.shape[1:]
        )
        loss = t5_mesh.model().call_simple(inputs, targets, compute_loss=True)[1]
        return trained(mtf, loss, mtf.optimize.SgdOptimizer(t5_small.LEARNING_RATE))

    data = dict(zip(("x", "target"), t5_small.ids()))
    step.make_variables(data)
    for name, master in step.store.masters.items():
        step.store.assign(name, workloads.make_weight(name, tuple(master.shape)))
    return step, data


def pretrained_step(
    folder: str, precision: str, ids: np.ndarray, rate: float
) -> tuple[Any, dict[str, np.ndarray]]:
    """Returns a training step of a language model of a folder, and what it is called with.

    Args:
      folder: of Hugging Face.
      precision: as of mtf.precision.
      ids: what each step is given, [batch, length].
      rate: the learning rate of gradient descent.
    """
    mtf = systems.import_mtf(False, True)
    place = {"mesh_shape": "all:1", "layout": "batch:all"}
    model = mtf.models.from_pretrained(folder, mesh_impl="pjrt", **place)
    dims = mtf.convert_to_shape(f"batch:{ids.shape[0]},length:{ids.shape[1]}")

    @mtf.pjrt.function(**place)
    def step(data: dict[str, Any]) -> Any:
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        with mtf.precision(precision):
            loss = model.loss(mesh, mtf.import_tf_tensor(mesh, data["ids"], dims))
            return trained(mtf, loss, mtf.optimize.SgdOptimizer(rate))

    data = {"ids": ids}
    step.make_variables(data)
    for name in step.store.masters:
        step.store.assign(name, model.weights[name])
    return step, data


def trained(mtf: Any, loss: Any, optimizer: Any) -> Any:
    """Returns a loss as a tensor, after the weights of its graph were trained by it."""
    graph = loss.graph
    variables = graph.trainable_variables
    gradients = mtf.gradients([loss], [v.value for v in variables])
    updates = optimizer.apply_grads(gradients, variables)
    lowering = mtf.Lowering(graph, {loss.mesh: mtf.pjrt.mesh_impl()})
    for update in updates:
        lowering.lowered_operation(update)
    return lowering.export_to_tf_tensor(loss)


class PjrtProgram:
    """A compiled training step with its weights; see models_jax.TrainingStep."""

    def __init__(self, w: Workload, mesh_name: str):
        """Compiles a step.

        Args:
          w: the workload, of kind "ff" or "transformer".
          mesh_name: one of workloads.MESHES.
        """
        self._compile(*training_step(w, mesh_name))

    @classmethod
    def t5_small(cls) -> "PjrtProgram":
        """Returns T5-small on one device."""
        program = cls.__new__(cls)
        program._compile(*t5_step())
        return program

    @classmethod
    def pretrained(cls, *given: Any) -> "PjrtProgram":
        """Returns a language model of a folder on one device; arguments as of its step."""
        program = cls.__new__(cls)
        program._compile(*pretrained_step(*given))
        return program

    def _compile(self, step: Any, data: dict[str, np.ndarray]) -> None:
        self._step = step
        start = time.perf_counter()
        # Lowered alone: the first step compiles, which `lowered.compiled` would do once more.
        self.nodes = len(step.lower(data).stablehlo.splitlines())
        self.seconds = {"build": time.perf_counter() - start, "lowering": 0.0}
        start = time.perf_counter()
        step.make_variables(data)
        self.init_seconds = time.perf_counter() - start
        [self._data], _ = step.place(data)

    def start_step(self) -> Any:
        """Trains one step; returns its loss, an array that may not be computed yet."""
        return self._step(self._data)

    def step(self) -> float:
        """Trains one step; returns its loss."""
        return float(self.start_step())
