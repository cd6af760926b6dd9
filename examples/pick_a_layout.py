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

sys.path.append(str(pathlib.Path(__file__).resolve().parent))


PLACEMENTS = ["simd", "shared"]
MODELS = ["mnist", "transformer"]


def options_of(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the options of a command line."""
    parser = argparse.ArgumentParser(
        prog="python examples/pick_a_layout.py",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", choices=[*MODELS, "all"], default="all", help="the programs")
    parser.add_argument("--hardware", default="", help="a profile; measured if empty")
    parser.add_argument("--placement", choices=PLACEMENTS, default="simd", help="of the program")
    parser.add_argument("--layouts", type=int, default=6, help="how many to try")
    parser.add_argument("--runs", type=int, default=5, help="steps of each round")
    parser.add_argument("--rounds", type=int, default=2, help="rounds over all layouts")
    parser.add_argument("--plot", default="", help="PNG file")
    options = parser.parse_args(argv)
    for name in ("layouts", "runs", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}: it has to be 1 or more")
    return options


import mnist
import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.auto_mtf import explanation, hardware, measure, models, step_time

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
    pixels = tf.random.uniform([batch, 28, 28], seed=1)
    labels = tf.constant(np.random.RandomState(0).randint(10, size=[batch]), tf.int32)
    logits = mnist.network(mnist.import_images(mesh, pixels), hidden)
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
    runs: int = 5,
    rounds: int = 2,
    placement: str = "simd",
    label: str = "",
) -> list[Trial]:
    """Returns layouts with estimated and measured times; the first one is the chosen layout.

    Args:
      build: builds the program.
      machine: a Hardware.
      count: the number of layouts.
      runs: the number of steps in each round of measurement.
      rounds: the number of rounds for each layout.
      placement: "simd" or "shared"; see `measure.step_seconds`.
      label: of the progress line; there is none if empty.
    """
    with tf.Graph().as_default():
        program = build()
        estimator = step_time.StepEstimator(program.graph, MESH_SHAPE, program.outputs, machine)
        estimates = candidates(estimator, count)
    layouts = [e.text for e in estimates]
    measured = measure.step_seconds(build, MESH_SHAPE, layouts, runs, rounds, placement, label)
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
    said = f"rank correlation (Spearman) of estimates and measurements {correlation:.2f}"
    return "\n".join([*explanation.table(rows), said])


def plot(path: str, found: dict[str, list[Trial]]) -> None:
    """Plots measured against estimated times, with the line on which they are equal.

    Points are numbered from the fastest; beneath are their layouts. Axes are logarithmic.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(found), squeeze=False, figsize=(6.5 * len(found), 6))
    for axis, (name, tried) in zip(axes[0], found.items()):
        draw(axis, name, tried)
    figure.savefig(path, dpi=120, bbox_inches="tight")  # with what is beneath
    plt.close(figure)


def draw(axis: Any, name: str, tried: Sequence[Trial]) -> None:
    """Draws the points of one program."""
    ranked = sorted(tried, key=lambda t: t.measured)
    times = [t.estimated * 1e3 for t in ranked], [t.measured * 1e3 for t in ranked]
    ends = [min(map(min, times)) / 1.3, max(map(max, times)) * 1.3]
    axis.plot(ends, ends, ls="--", color="gray", label="estimated = measured", zorder=0)
    axis.scatter(*times, color="#4c8bc0", label="a layout")
    chosen = ranked.index(tried[0])
    axis.scatter(times[0][chosen], times[1][chosen], color="#d5673a", s=80, label="the chosen one")
    for number, place in enumerate(zip(*times), 1):
        axis.annotate(str(number), place, (7, -3), textcoords="offset points", fontsize=8)
    axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends, box_aspect=1)
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_formatter("{x:.3g}")
        side.set_minor_formatter("{x:.2g}")
    axis.tick_params(which="both", labelsize=8)
    axis.set_title(name, pad=28)
    axis.set(xlabel="estimated ms of a step", ylabel="measured ms of a step")
    above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0)}
    axis.legend(**above, ncols=3, fontsize=8, frameon=False)
    lines = [f"{i:2d}  {t.layout or 'no splits'}" for i, t in enumerate(ranked, 1)]
    lines[chosen] += "  <- chosen"
    key = "\n".join(lines)
    axis.text(0, -0.16, key, transform=axis.transAxes, va="top", fontsize=8, family="monospace")


@mtf.strict()
def main(argv: Sequence[str]) -> dict[str, list[Trial]]:
    """Prints the tables and returns their contents."""
    options = options_of(argv)
    if options.hardware:
        machine = hardware.hardware_profile(options.hardware)
    else:
        processors = mtf.convert_to_shape(MESH_SHAPE).size
        print("the speed of this machine, from operations and steps of small models", flush=True)
        machine = measure.measure_machine(processors, options.runs, options.placement, show=True)
    names = list(PROGRAMS) if options.model == "all" else [options.model]
    found = {}
    for name in names:
        how = options.runs, options.rounds, options.placement, name
        found[name] = trials(PROGRAMS[name], machine, options.layouts, *how)
        print(report(name, found[name]), end="\n\n", flush=True)
    if options.plot:
        plot(options.plot, found)
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
