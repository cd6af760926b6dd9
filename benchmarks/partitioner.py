"""Compares what this package and XLA's partitioner communicate, for a dozen layouts of a model.

    python benchmarks/partitioner.py
    python benchmarks/partitioner.py --workloads b4 llama --rounds 0   # collectives, without times

For each layout on 2 x 2 CPU devices, the training step is lowered to devices of TensorFlow
(PlacementMeshImpl) and compiled for devices of JAX (mtf.pjrt). What is printed in Markdown are the
collectives of both, in bytes on one device by mesh dimension, the median step of both in turn, and
the time that auto_mtf predicts for hardware that was measured before:

    python -m mesh_tensorflow.auto_mtf.measure --output cpu.json
    python benchmarks/partitioner.py --hardware cpu.json

A layout counts only if the losses of three steps agree. `llama` is a model of `mtf.models` with
Adam. Behind a layout there may be a stage of ZeRO, as in "batch:rows zero 3"; its time is not
predicted.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import quiet

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

LAYOUTS = {
    "transformer": [
        "batch:rows",
        "batch:rows,d_ff:cols",
        "batch:rows,heads:cols",
        "batch:rows,d_ff:cols,heads:cols",
        "d_ff:rows",
        "d_ff:rows,heads:rows,batch:cols",
        "d_ff:rows,heads:cols",
        "d_model:rows",
        "batch:rows,d_model:cols",
        "length:rows",
        "batch:rows,length:cols",
        "batch:rows,memory_length:cols",
    ],
    "llama": [
        "batch:rows",
        "batch:rows,vocab:cols,d_ff:cols,heads:cols",
        "vocab:rows,d_ff:rows,heads:rows,batch:cols",
        "length:rows",
        "batch:rows,length:cols",
        "vocab:rows,d_ff:rows,heads:rows,length:cols",
        "batch:rows zero 1",
        "batch:rows zero 3",
        "batch:rows,vocab:cols,d_ff:cols,heads:cols zero 3",
        "d_model:rows",
    ],
    "conv": [
        "batch:rows",
        "row_blocks:rows",
        "row_blocks:rows,col_blocks:cols",
        "batch:rows,row_blocks:cols",
        "hidden1:rows",
        "hidden1:rows,hidden2:cols",
        "batch:rows,hidden1:cols",
        "batch:rows,hidden2:cols",
        "row_blocks:rows,hidden1:cols",
        "row_blocks:rows,col_blocks:cols,hidden2:rows",
        "filters1:rows",
        "batch:rows,filters0:cols",
    ],
}
KINDS = {
    "allreduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "allconcat": "all-gather",
    "alltoall": "all-to-all",
    "shift": "collective-permute",
}
# 4 layers with groups of heads; one table is of ids and of logits.
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "tie_word_embeddings": True,
}
ROWS, LENGTH = 8, 64
STEPS = 3  # whose losses are compared


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", default=["b4", "llama", "c"])
    parser.add_argument("--layouts", nargs="+", default=[], help="instead of the dozen")
    parser.add_argument("--rounds", type=int, default=5, help="0 for no times")
    parser.add_argument("--hardware", default="", help="a profile; empty for no prediction")
    parser.add_argument("--steps", type=int, default=3, help="steps of each in a round")
    return parser.parse_args()


if __name__ == "__main__":
    ARGUMENTS = parse_arguments()  # before the seconds of the next line
    quiet.import_tensorflow()

import jax
import numpy as np
import tensorflow as tf
import workloads
from models_mtf import MtfModel
from models_pjrt import Arrays

import mesh_tensorflow as mtf
from mesh_tensorflow.auto_mtf.step_time import StepEstimator
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl

MESH = mtf.convert_to_shape("rows:2,cols:2")


class Model:
    """A training step, in both implementations."""

    title: str
    kind: str  # of LAYOUTS
    data: dict[str, Any]
    lowering: Any = None

    def loss(self, mesh: mtf.Mesh, data: dict[str, Any]) -> mtf.Tensor:
        """Returns the loss of a step."""
        raise NotImplementedError

    def optimizer(self) -> mtf.optimize.Optimizer:
        """Returns what updates the weights."""
        raise NotImplementedError

    def step(self, make_impl: Callable[[], Any]) -> Callable[..., Any]:
        """Returns a function that builds and lowers the program."""

        def step(data: dict[str, Any]) -> Any:
            mesh = mtf.Mesh(mtf.Graph(), "mesh")
            loss = self.loss(mesh, data)
            variables = mesh.graph.trainable_variables
            gradients = mtf.gradients([loss], [v.value for v in variables])
            updates = self.optimizer().apply_grads(gradients, variables)
            self.lowering = mtf.Lowering(mesh.graph, {mesh: make_impl()})
            with tf.control_dependencies([self.lowering.lowered_operation(u) for u in updates]):
                return tf.identity(self.lowering.export_to_tf_tensor(loss))

        return step

    def placed(self, layout: str) -> Callable[[], float]:
        """Returns a step on devices of TensorFlow."""
        devices = [f"cpu:{i}" for i in range(MESH.size)]
        given = arguments_of(layout)
        tf.random.set_seed(1)
        run = mtf.function(self.step(lambda: PlacementMeshImpl(MESH, devices=devices, **given)))
        data = {name: tf.constant(array) for name, array in self.data.items()}
        return lambda: float(run(data))

    def partitioned(self, layout: str) -> tuple[Callable[[], float], Any]:
        """Returns a step on devices of JAX, and what XLA made of it."""
        given = arguments_of(layout)
        tf.random.set_seed(1)
        run = mtf.pjrt.function(self.step(mtf.pjrt.mesh_impl), mesh_shape=MESH, **given)
        lowered = run.lower(self.data)
        run.make_variables(self.data)
        [data], _ = run.place(self.data)
        return lambda: float(run(data)), lowered


class OfWorkload(Model):
    """A workload of workloads.py."""

    def __init__(self, w: workloads.Workload):
        """Makes weights and data."""
        self.title, self.kind = w.title, w.kind
        self._w, self._weights = w, workloads.make_weights(w)
        self.data = workloads.make_data(w)

    def loss(self, mesh: mtf.Mesh, data: dict[str, Any]) -> mtf.Tensor:
        """Returns the loss of a step."""
        return MtfModel(mtf, self._w, mesh, Arrays(self._weights, data)).loss()

    def optimizer(self) -> mtf.optimize.Optimizer:
        """Returns gradient descent."""
        return mtf.optimize.SgdOptimizer(self._w.learning_rate)


class Llama(Model):
    """A language model of `mtf.models`, from random weights."""

    kind = "llama"
    title = f"Llama, d_model {LLAMA['hidden_size']}, {ROWS * LENGTH} tokens, 4 layers"

    def __init__(self) -> None:
        """Makes data."""
        self._model = mtf.models.from_config(LLAMA)
        ids = np.random.default_rng(0).integers(3, LLAMA["vocab_size"], [ROWS, LENGTH])
        self.data = {"ids": ids.astype(np.int32)}

    def loss(self, mesh: mtf.Mesh, data: dict[str, Any]) -> mtf.Tensor:
        """Returns the loss of a step."""
        ids = mtf.import_tf_tensor(mesh, data["ids"], f"batch:{ROWS},length:{LENGTH}")
        return self._model.loss(mesh, ids)

    def optimizer(self) -> mtf.optimize.Optimizer:
        """Returns Adam, which has two slots for each weight."""
        return mtf.optimize.AdamWOptimizer(1e-3)


def arguments_of(layout: str) -> dict[str, Any]:
    """Returns the arguments of a mesh implementation that a text of LAYOUTS is for."""
    rules, _, stage = layout.partition(" zero ")
    return {"layout": rules, **({"zero": int(stage), "zero_axis": "rows"} if stage else {})}


def ours(lowering: mtf.Lowering) -> dict[tuple, int]:
    """Returns the bytes of collectives on one device, by kind and mesh dimensions."""
    found: dict[tuple, int] = {}
    for _, impl, c in lowering.collectives:
        names = tuple(impl.shape.dimension_names[axis] for axis in c.mesh_axes)
        key = KINDS[c.kind], names
        found[key] = found.get(key, 0) + c.bytes // impl.size
    return found


def text(found: dict[tuple, int]) -> str:
    """Returns collectives as a cell of a table."""
    parts = [
        f"{kind} {'+'.join(names)} {size / 1e6:.2f}"
        for (kind, names), size in sorted(found.items(), key=lambda item: -item[1])
        if size >= 5e3
    ]
    return "; ".join(parts) or "none"


def times(runs: list[Callable[[], float]], rounds: int, steps: int) -> list[list[float]]:
    """Returns milliseconds of a step of each, by round."""
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for i, run in enumerate(runs):
            start = time.perf_counter()
            for _ in range(steps):
                run()
            found[i].append((time.perf_counter() - start) / steps * 1e3)
    return found


def row(model: Model, layout: str, arguments: argparse.Namespace) -> list[str]:
    """Returns the cells of a layout."""
    placed = model.placed(layout)
    losses = [placed() for _ in range(STEPS)]
    lowering = model.lowering
    predicted = ""
    if arguments.hardware and "zero" not in arguments_of(layout):
        estimator = StepEstimator(lowering.graph, MESH, hardware=arguments.hardware)
        predicted = f"{estimator.estimate(layout).seconds.total * 1e3:.0f}"
    step, lowered = model.partitioned(layout)
    others = [step() for _ in range(STEPS)]
    if any(abs(a - b) > 1e-4 * abs(a) for a, b in zip(losses, others)):
        return [layout, f"losses differ: {losses} {others}", "", "", "", "", ""]
    own = ours(lowering)
    xla = {(c.kind, c.mesh_dims): c.bytes for c in lowered.collectives()}
    found = times([placed, step], arguments.rounds, arguments.steps)
    cells = [f"{median(t):.0f}" if t else "" for t in found]
    volume = f"{sum(own.values()) / 1e6:.2f} / {sum(xla.values()) / 1e6:.2f}"
    return [layout, text(own), text(xla), volume, *cells, predicted]


def main() -> None:
    """Prints a table for each workload."""
    jax.config.update("jax_num_cpu_devices", MESH.size)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * MESH.size
    )
    for name in ARGUMENTS.workloads:
        model = Llama() if name == "llama" else OfWorkload(workloads.WORKLOADS[name])
        print(f"\n{model.title}, on 2 x 2 devices; MB on one device\n")
        print("| layout | this package | XLA | MB, both | ms | ms, XLA | ms, predicted |")
        print("|---|---|---|---|---|---|---|")
        for layout in ARGUMENTS.layouts or LAYOUTS[model.kind]:
            cells = row(model, layout, ARGUMENTS)
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
