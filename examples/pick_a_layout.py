"""Chooses the layout of two programs, and measures it and others.

    python examples/pick_a_layout.py
    python examples/pick_a_layout.py --model=transformer --layouts=20 --plot=layouts.png

The programs are the training steps of the network of mnist.py and of a transformer built from
mtf.layers, on a 2 by 2 mesh of logical CPUs. First, the speed of the machine is measured, unless
--hardware names a profile written by `python -m mesh_tensorflow.auto_mtf.measure`. Then layouts are
timed, from the fastest to the slowest estimate. The table shows estimated and measured milliseconds
per step.

Each logical CPU runs the whole program on its slices, like a separate processor. With
--placement=shared, the logical CPUs form one memory domain instead, where equal slices are computed
once. A layout that splits nothing is then about as fast as any other, and layouts are slow if they
need many operations. For other hardware:

    python -m mesh_tensorflow.auto_mtf --mesh_shape=rows:2,cols:2 --hardware=tpu_v3
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.auto_mtf import explanation, hardware, measure, models, step_time

sys.path.append(str(pathlib.Path(__file__).resolve().parent))

import mnist

MESH_SHAPE = "rows:2,cols:2"


class Trial(NamedTuple):
    """A layout with its estimated and measured seconds per step."""

    layout: str
    estimated: float
    measured: float


def mnist_program(batch: int = 64, hidden: int = 256) -> models.Program:
    """Builds the training step of mnist.py on random images."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mnist")
    rng = np.random.RandomState(0)
    pixels = tf.get_variable(
        "pixels", initializer=rng.uniform(size=[batch, 28, 28]).astype("float32"), trainable=False
    )
    labels = tf.constant(rng.randint(10, size=[batch]), tf.int32)
    logits = mnist.network(mnist.import_images(mesh, pixels.read_value()), hidden)
    classes = logits.shape[-1]
    targets = mtf.one_hot(mtf.import_tf_tensor(mesh, labels, logits.shape - classes), classes)
    loss = mtf.reduce_mean(mtf.layers.softmax_cross_entropy_with_logits(logits, targets, classes))
    variables = graph.trainable_variables
    gradients = mtf.gradients([loss], [v.value for v in variables])
    updates = mtf.optimize.SgdOptimizer(0.01).apply_grads(gradients, variables)
    return models.Program(graph, mesh, [loss], updates)


def transformer_program() -> models.Program:
    """Builds the training step of a transformer with two blocks."""
    return models.language_model(
        batch=8, length=64, vocab=1024, d_model=256, layers=2, heads=4, d_kv=64, d_ff=1024,
        optimizer="sgd", tokens=tf.random.uniform([8, 64], 0, 1024, tf.int32, seed=1),
    )  # fmt: skip


PROGRAMS: dict[str, Callable[[], models.Program]] = {
    "mnist": mnist_program,
    "transformer": transformer_program,
}


def candidates(estimator: step_time.StepEstimator, count: int) -> list[step_time.Estimate]:
    """Returns legal layouts, evenly spaced from the fastest to the slowest estimate.

    Args:
      estimator: a StepEstimator.
      count: the number of layouts.
    """
    layouts: list[dict[str, str]] = [{}]
    for d in estimator.space.dims:
        more = [{**rules, d: m} for rules in layouts for n, m in estimator.space.pairs if n == d]
        layouts += [rules for rules in more if estimator.space.is_legal(rules)]
    total = estimator.program().seconds
    ranked = sorted(layouts, key=lambda rules: (total(rules), sorted(rules.items())))
    places = np.linspace(0, len(ranked) - 1, min(count, len(ranked))).astype(int)
    best = estimator.solve()
    # Layouts that differ only by a permutation of mesh dimensions are tried once.
    found = {f"{best.seconds.total:.5g}": best}
    for place in places:
        estimate = estimator.estimate(ranked[place])
        found.setdefault(f"{estimate.seconds.total:.5g}", estimate)
    return list(found.values())


def trials(
    build: Callable[[], models.Program],
    machine: hardware.Hardware,
    count: int,
    runs: int = 10,
    rounds: int = 3,
    placement: str = "simd",
) -> list[Trial]:
    """Returns layouts with estimated and measured times; the first one is the chosen layout.

    Args:
      build: builds the program.
      machine: a Hardware.
      count: the number of layouts.
      runs: the number of steps in each round of measurement.
      rounds: the number of rounds for each layout.
      placement: "simd" or "shared"; see `measure.step_seconds`.
    """
    with tf.Graph().as_default():
        program = build()
        estimator = step_time.StepEstimator(program.graph, MESH_SHAPE, program.outputs, machine)
        estimates = candidates(estimator, count)
    layouts = [e.text for e in estimates]
    measured = measure.step_seconds(build, MESH_SHAPE, layouts, runs, rounds, placement)
    return [
        Trial(text, e.seconds.total, seconds)
        for text, e, seconds in zip(layouts, estimates, measured)
    ]


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns the rank correlation of pairs of numbers; equal numbers share a rank."""

    def ranks(column: Any) -> np.ndarray:
        values = np.array(column)
        return np.array([(values < v).sum() + ((values == v).sum() - 1) / 2 for v in values])

    x, y = (ranks(column) for column in zip(*pairs))
    return float(np.corrcoef(x, y)[0, 1])


def report(name: str, tried: Sequence[Trial]) -> str:
    """Returns the table of a program's layouts."""
    fastest = min(t.measured for t in tried)
    rows = [[name, "estimated ms", "measured ms", "slower than the fastest"]]
    for t in sorted(tried, key=lambda t: t.measured):
        mark = "  <- chosen" if t is tried[0] else ""
        times = [f"{s * 1e3:.2f}" for s in (t.estimated, t.measured)]
        rows.append([(t.layout or "no splits") + mark, *times, f"{t.measured / fastest - 1:.0%}"])
    correlation = spearman([(t.estimated, t.measured) for t in tried])
    return "\n".join([*explanation.table(rows), f"rank correlation {correlation:.2f}"])


def plot(path: str, found: dict[str, list[Trial]]) -> None:
    """Plots measured against estimated times."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(found), squeeze=False, figsize=(6 * len(found), 5))
    for axis, (name, tried) in zip(axes[0], found.items()):
        axis.scatter([t.estimated * 1e3 for t in tried], [t.measured * 1e3 for t in tried])
        axis.scatter(tried[0].estimated * 1e3, tried[0].measured * 1e3, label="chosen")
        axis.set(title=name, xlabel="estimated ms", ylabel="measured ms")
        axis.legend()
    figure.savefig(path)


@mtf.strict()
def main(argv: Sequence[str]) -> dict[str, list[Trial]]:
    """Prints the tables and returns their contents."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=[*PROGRAMS, "all"], default="all")
    parser.add_argument("--hardware", default="", help="a profile; measured if empty")
    parser.add_argument("--placement", choices=["simd", "shared"], default="simd")
    parser.add_argument("--layouts", type=int, default=14, help="how many to try")
    parser.add_argument("--runs", type=int, default=10, help="steps of each round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all layouts")
    parser.add_argument("--plot", default="", help="PNG file")
    options = parser.parse_args(argv)
    if options.hardware:
        machine = hardware.hardware_profile(options.hardware)
    else:
        processors = mtf.convert_to_shape(MESH_SHAPE).size
        machine = measure.measure_machine(processors, options.runs, options.placement)
    names = list(PROGRAMS) if options.model == "all" else [options.model]
    found = {}
    for name in names:
        how = options.runs, options.rounds, options.placement
        found[name] = trials(PROGRAMS[name], machine, options.layouts, *how)
        print(report(name, found[name]), end="\n\n", flush=True)
    if options.plot:
        plot(options.plot, found)
    return found


if __name__ == "__main__":
    tf.disable_v2_behavior()
    tf.logging.set_verbosity(tf.logging.ERROR)
    main(sys.argv[1:])
