"""Compares a training step of mtf.function with the same step in a session.

Both are built in one process from the same weights and data, and take turns: each round times
some steps of one, then of the other. What is printed is the median of the ratios of the rounds,
with their range.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import quiet


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", default="b_small", choices=["a", "b_small", "b4"])
    parser.add_argument("--mesh", default="2x2", help="one of workloads.MESHES")
    parser.add_argument(
        "--placement",
        default="logical",
        choices=["one", "logical"],
        help="one device for all processors, or a logical CPU for each",
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=40, help="steps of each kind in a round")
    parser.add_argument("--trace", default="", help="write a profile of both kinds to this folder")
    return parser.parse_args()


if __name__ == "__main__":
    parse_arguments()  # before the seconds of the next line
    quiet.import_tensorflow()

import numpy as np
import tensorflow as tf2
import tensorflow.compat.v1 as tf
import workloads
from feeds import EagerFeeds, Feeds
from models_mtf import MtfModel

import mesh_tensorflow as mtf


class FrontEnds:
    """The two programs of a workload."""

    def __init__(self, arguments: argparse.Namespace):
        self._w = workloads.WORKLOADS[arguments.workload]
        self._mesh = arguments.mesh
        count = workloads.mesh_size(arguments.mesh)
        self._devices = [
            f"cpu:{i if arguments.placement == 'logical' else 0}" for i in range(count)
        ]
        cpu = tf2.config.list_physical_devices("CPU")[0]
        if arguments.placement == "logical":
            tf2.config.set_logical_device_configuration(
                cpu, [tf2.config.LogicalDeviceConfiguration()] * count
            )
        self._arrays = {**workloads.make_weights(self._w), **workloads.make_data(self._w)}

    def _train(self, feeds: Any) -> tuple[Any, Any, Any]:
        """Returns the updates, the loss and the Lowering of one step."""
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        loss = MtfModel(mtf, self._w, mesh, feeds).loss()
        variables = graph.trainable_variables
        gradients = mtf.gradients([loss], [v.outputs[0] for v in variables])
        updates = mtf.optimize.SgdOptimizer(self._w.learning_rate).apply_grads(gradients, variables)
        shape = mtf.convert_to_shape(workloads.MESHES[self._mesh])
        rules = mtf.convert_to_layout_rules(workloads.layout(self._w, self._mesh))
        impl = mtf.placement_mesh_impl.PlacementMeshImpl(shape, rules, self._devices)
        lowering = mtf.Lowering(graph, {mesh: impl})
        train = [lowering.lowered_operation(op) for op in updates]
        return train, lowering.export_to_tf_tensor(loss), lowering

    def function_step(self) -> Callable[[], float]:
        """A step of mtf.function."""
        feeds = EagerFeeds(self._arrays)

        @mtf.function
        def step() -> Any:
            train, loss, _ = self._train(feeds)
            # Grouped as what the session fetches, with few dependencies between devices.
            with tf.control_dependencies([tf.group(*train)]):
                return tf.identity(loss)

        return lambda: float(step())

    def session_step(self) -> Callable[[], float]:
        """A step of a session."""
        with tf.Graph().as_default():
            feeds = Feeds(self._arrays)
            train, loss, lowering = self._train(feeds)
            count = len(set(self._devices))
            session = tf.Session(config=tf.ConfigProto(device_count={"CPU": count}))
            session.run(tf.global_variables_initializer(), feeds.make())
            session.run(lowering.copy_masters_to_slices())
            run = session.make_callable([loss, tf.group(*train)])
        return lambda: float(run()[0])


def seconds(step: Callable[[], float], count: int) -> float:
    """Seconds of one of some steps."""
    start = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - start) / count


def main() -> None:
    """Measures, and prints a line for each kind and the ratio."""
    arguments = parse_arguments()
    programs = FrontEnds(arguments)
    kinds = {"session": programs.session_step(), "mtf.function": programs.function_step()}
    losses = {name: [step() for _ in range(10)] for name, step in kinds.items()}
    np.testing.assert_allclose(losses["session"], losses["mtf.function"], rtol=1e-4)
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(arguments.rounds):
        for name in list(kinds)[:: 1 if number % 2 else -1]:
            times[name].append(seconds(kinds[name], arguments.steps))
    if arguments.trace:
        for name, step in kinds.items():
            with tf2.profiler.experimental.Profile(os.path.join(arguments.trace, name)):
                seconds(step, 3)
    for name, values in times.items():
        print(f"{name:14s} {1e3 * statistics.median(values):8.3f} ms a step")
    ratios = sorted(f / s for f, s in zip(times["mtf.function"], times["session"]))
    print(
        f"mtf.function / session {statistics.median(ratios):.3f} "
        f"({ratios[0]:.2f}-{ratios[-1]:.2f}), "
        f"{arguments.workload}@{arguments.mesh}, {arguments.placement}"
    )


if __name__ == "__main__":
    main()
