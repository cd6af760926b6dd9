"""Compares predicted and measured steps of many programs, each under many layouts.

    python benchmarks/right_layout.py
    python benchmarks/right_layout.py --only=mnist,moe --places=shared --layouts=8 --plot=rank.png

For each program and each place: the layouts that the cost model ranks first to third, those that
times of its operations do (`mtf.auto_mtf.Profile`), that without splits, and random legal ones are
run in turns. The table has the rank correlations (Spearman) of predicted and measured times, and
the regrets: how much longer the chosen layout takes than the fastest. Layouts that take equally
long have no true order, so the table also says how well one round of measurements predicts another,
and how many pairs of layouts have one order in all rounds, and in which part of these a prediction
has it. Each row is a process of its own, or several, as the first session of a process decides
about its threads. Places are logical CPUs that share slices (`shared`, `shared8`) or run one
program (`simd`), CPU devices of JAX (`pjrt`, where no operations are timed), and four processes
that share this machine (`processes`).

    python benchmarks/right_layout.py --memory --layouts=4

prints the peak memory of a processor instead: as the cost model predicts it, and by XLA's analysis
of the program that it compiles for four devices of JAX. Nothing is timed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
PLACES = {
    "shared": "rows:2,cols:2",
    "simd": "rows:2,cols:2",
    "shared8": "rows:2,cols:4",
    "pjrt": "rows:2,cols:2",
    "processes": "rows:2,cols:2",
}


def options_of() -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--only", default=",".join(BUILDERS), help="programs")
    parser.add_argument("--places", default=",".join(PLACES), help="where they run")
    parser.add_argument("--layouts", type=int, default=16, help="how many layouts, besides the "
                        "first three of each prediction")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=60.0, help="for timing operations")
    parser.add_argument("--runs", type=int, default=8, help="steps of each round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all layouts")
    parser.add_argument("--seed", type=int, default=0, help="of the random layouts")
    parser.add_argument("--memory", action="store_true", help="compare peak memory, not "
                        "times: as predicted, and by XLA's analysis")  # fmt: skip
    parser.add_argument("--json", default="", help="where to write the results")
    parser.add_argument("--plot", default="", help="PNG file of predicted against measured times")
    parser.add_argument("--row", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds is {options.rounds}: it has to be 2 or more, to tell what is noise")
    for name, known in (("only", BUILDERS), ("places", PLACES)):
        if unknown := set(getattr(options, name).split(",")) - set(known):
            parser.error(f"--{name}: {sorted(unknown)} are none of {', '.join(known)}")
    return options


class Row(NamedTuple):
    """The layouts of one program in one place.

    Attributes:
      program: its name.
      place: a key of PLACES.
      layouts: the layouts, first those that were chosen, with and without times of operations.
      measured: the seconds of a step under each.
      estimated: those by the cost model.
      profiled: those by times of operations.
      rounds: those that were measured in each round, of the layouts behind the first two.
      again: the mean rank correlation of two rounds.
      ranks: the rank correlations of measured times with estimated and with profiled ones.
      spent: the seconds in which operations were timed.
      timed: how many of them were.
    """

    program: str
    place: str
    layouts: list[str]
    measured: list[float]
    estimated: list[float]
    profiled: list[float]
    rounds: list[list[float]]
    again: float
    ranks: list[float]
    spent: float
    timed: str


# -- the process of a row


def in_this_process(place: str) -> None:
    """Imports TensorFlow, with as many CPU devices of JAX as a place has."""
    import quiet

    number = math.prod(int(size.split(":")[1]) for size in PLACES[place].split(","))
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={number}"
    quiet.import_tensorflow()
    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "examples")]
    import tensorflow.compat.v1 as tf

    # Each function for devices of JAX has a graph of its own, with variables of its own.
    if place != "pjrt":
        tf.disable_v2_behavior()


def measured_row(program: str, place: str, options: argparse.Namespace) -> Row:
    """Returns a Row, measured in this process."""
    import tensorflow.compat.v1 as tf
    from pick_a_layout import spearman

    import mesh_tensorflow as mtf
    from mesh_tensorflow.auto_mtf import measure, profiles, step_time

    shape, build = mtf.convert_to_shape(PLACES[place]), BUILDERS[program]
    machine = machine_of(place, shape)
    with tf.Graph().as_default():
        parts = step_time.ProgramParts.of(build())
        begin = time.monotonic()
        asked = profiles.Profile(options.seconds, cache="", show=False)
        timed = profiles.estimator_on(machine, parts, asked)
        rough = profiles.estimator_on(machine, parts, None)
        spent = time.monotonic() - begin
        first = [[one.text for one in estimator.best(3)] for estimator in (timed, rough)]
        chosen = [texts[0] for texts in first]
        layouts = list(dict.fromkeys([*chosen, "", *random_layouts(rough, options)]))
        # What `fit(layout="auto")` tries, too.
        layouts = list(dict.fromkeys([*layouts[: options.layouts + 1], *itertools.chain(*first)]))
        seconds = [[e.estimate(x).seconds.total for x in layouts] for e in (rough, timed)]
    if machine.pjrt:
        steps = [step_of_jax(build, shape, layout) for layout in layouts]
        rounds = measure.seconds_in_turns(steps, options.runs, options.rounds)
    else:
        rounds = measure.rounds_on(machine, build, layouts, options.runs, options.rounds)
    # Other load can only increase times.
    times, count = [min(column) for column in rounds], len(rounds)
    # The first two are the choices, which may be one layout.
    order = [layouts.index(chosen[0]), layouts.index(chosen[1]), *range(count)]
    columns = [[column[i] for i in order] for column in (layouts, times, *seconds)]
    ranks = [spearman(list(zip(column, times))) for column in seconds]
    pairs = itertools.combinations(zip(*rounds), 2)
    again = statistics.mean(spearman(list(zip(*pair))) for pair in pairs)
    which = "none" if timed.costs is None else str(timed.costs)
    return Row(program, place, *columns, rounds, again, ranks, spent, which)  # type: ignore[arg-type]


def machine_of(place: str, shape: Any) -> Any:
    """Returns where the programs of a row run, as Processors."""
    from mesh_tensorflow import estimator
    from mesh_tensorflow.auto_mtf.profiles import Processors
    from mesh_tensorflow.estimator.processes import servers_of_all

    if place != "processes":
        cpus = [f"/device:CPU:{i}" for i in range(shape.size)]
        return Processors(shape, cpus, place == "simd", place == "pjrt")
    tasks = [("chief", 0), *(("worker", i) for i in range(shape.size - 1))]
    devices = [f"/job:{job}/task:{task}/device:CPU:0" for job, task in tasks]
    return Processors(shape, devices, servers=servers_of_all(estimator.RunConfig()))


def step_of_jax(build: Callable[[], Any], shape: Any, layout: str) -> Callable[[], Any]:
    """Returns what runs a step of a program on devices of JAX, to its end."""
    import jax

    step = function_of_jax(build, shape, layout)
    return lambda: jax.block_until_ready((step(), step.store))


def random_layouts(estimator: Any, options: argparse.Namespace) -> list[str]:
    """Returns random legal layouts."""
    draw, space = random.Random(options.seed), estimator.space
    found: dict[str, None] = {}
    for _ in range(100 * options.layouts):
        rules: dict[str, str] = {}
        for d, m in draw.sample(sorted(space.pairs), len(space.pairs)):
            more = {**rules, d: m}
            if d not in rules and draw.random() < 0.5 and space.is_legal(more):
                rules = more
        found[";".join(f"{d}:{m}" for d, m in sorted(rules.items()))] = None
        if len(found) == options.layouts:
            break
    return list(found)


# -- memory, by XLA's analysis of the program that it compiles for each device

MEMORY_HEAD = ("program", "layout", "predicted MiB", "by XLA MiB", "predicted / XLA")


def memory_lines(program: str, options: argparse.Namespace) -> list[str]:
    """Returns the lines of a program in the table of memory, compiled in this process."""
    import tensorflow.compat.v1 as tf

    import mesh_tensorflow as mtf
    from mesh_tensorflow.auto_mtf import hardware, step_time

    build, shape = BUILDERS[program], mtf.convert_to_shape(PLACES["pjrt"])
    devices = hardware.local_machine(shape.size, one_memory=False, compiled=True)
    with tf.Graph().as_default():
        parts = step_time.ProgramParts.of(build())
    rough = step_time.StepEstimator(parts.graph, shape, parts.outputs, devices, parts=parts)
    layouts = list(dict.fromkeys(["", rough.solve().text, *random_layouts(rough, options)]))
    lines = []
    for layout in layouts[: options.layouts]:
        predicted = rough.estimate(layout).peak_bytes
        memory = function_of_jax(build, shape, layout).lower().memory()
        # What is donated is both an argument and an output.
        used = (
            memory.argument_size_in_bytes + memory.temp_size_in_bytes
            + memory.output_size_in_bytes - memory.alias_size_in_bytes
        )  # fmt: skip
        sizes = [f"{bytes_ / 2**20:.2f}" for bytes_ in (predicted, used)]
        cells = [program, layout or "no splits", *sizes, f"{predicted / used:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def function_of_jax(build: Callable[[], Any], shape: Any, layout: str) -> Any:
    """Returns the function of a step that is compiled for devices of JAX."""
    import tensorflow.compat.v1 as tf

    import mesh_tensorflow as mtf

    def step() -> Any:
        program = build()
        lowering = mtf.Lowering(program.graph, {program.mesh: mtf.pjrt.mesh_impl()})
        updates = [lowering.lowered_operation(update) for update in program.updates]
        with tf.control_dependencies(updates):
            return [tf.identity(lowering.export_to_tf_tensor(y)) for y in program.outputs]

    return mtf.pjrt.function(step, mesh_shape=shape, layout=layout)


# -- the programs: a training step each, but for the Fourier transforms


def trained(mesh: Any, loss: Any) -> Any:
    """Returns the program of a training step by SGD."""
    import mesh_tensorflow as mtf
    from mesh_tensorflow.auto_mtf import models

    graph = mesh.graph
    gradients = mtf.gradients([loss], [v.value for v in graph.trainable_variables])
    optimizer = mtf.optimize.SgdOptimizer(0.01)
    updates = optimizer.apply_grads(gradients, graph.trainable_variables)
    return models.Program(graph, mesh, [loss], updates)


def new_mesh() -> Any:
    """Returns the mesh of a new graph."""
    import mesh_tensorflow as mtf

    return mtf.Mesh(mtf.Graph(), "mesh")


def ids(mesh: Any, shape: str, most: int, seed: int = 0) -> Any:
    """Returns a Tensor of random ids from 1 to below `most`."""
    import numpy as np
    import tensorflow.compat.v1 as tf

    import mesh_tensorflow as mtf

    sizes = mtf.Shape(mtf.convert_to_shape(shape))
    drawn = np.random.RandomState(seed).randint(1, most, sizes.to_integer_list)
    return mtf.import_tf_tensor(mesh, tf.constant(drawn, tf.int32), sizes)


def mnist() -> Any:
    """The network of mnist.py."""
    import pick_a_layout

    return pick_a_layout.mnist_program(batch=32)


def language_model(batch: int, length: int) -> Any:
    """A transformer of two blocks."""
    import tensorflow.compat.v1 as tf

    from mesh_tensorflow.auto_mtf import models

    return models.language_model(
        batch=batch, length=length, vocab=1024, d_model=128, layers=2, heads=4, d_kv=32,
        d_ff=512, optimizer="sgd",
        tokens=tf.random.uniform([batch, length], 0, 1024, tf.int32, seed=1),
    )  # fmt: skip


def stack(*kinds: str) -> Any:
    """Returns the layers of a transformer of these kinds."""
    from mesh_tensorflow.transformer import moe, transformer, transformer_layers

    sizes = {"num_heads": 4, "key_value_size": 32}
    made = {
        "self": lambda: transformer_layers.SelfAttention(**sizes),
        "cross": lambda: transformer_layers.EncDecAttention(**sizes),
        "dense": lambda: transformer_layers.DenseReluDense(hidden_size=512),
        "experts": lambda: moe.MoE1D(num_experts=8, hidden_size=256),
    }
    layers = [made[kind]() for kind in kinds]
    for number, layer in enumerate(layers):
        layer.set_name(f"layer_{number:03d}")
    per_layer = [
        transformer.sublayer_rms_norm,
        transformer.sublayer_call_layer,
        transformer.sublayer_residual,
    ]
    return transformer.LayerStack(
        layers, sublayers_initial=[], sublayers_per_layer=per_layer,
        sublayers_final=[transformer.sublayer_rms_norm],
    )  # fmt: skip


def experts() -> Any:
    """A transformer with a mixture of experts."""
    import mesh_tensorflow as mtf
    from mesh_tensorflow.transformer import transformer

    mesh = new_mesh()
    targets = ids(mesh, "batch:8,length:64", 512)
    model = transformer.Unitransformer(
        stack("self", "experts", "self", "dense"), d_model=128, input_vocab_size=512,
        output_vocab_size=512, autoregressive=True, max_length=64,
    )  # fmt: skip
    inputs = mtf.shift(targets, 1, targets.shape[-1], wrap=False)
    _, loss = model.call_simple(inputs, targets, compute_loss=True, mode="train")
    return trained(mesh, loss)


def t5() -> Any:
    """An encoder and a decoder."""
    from mesh_tensorflow.transformer import transformer

    mesh = new_mesh()
    sizes: dict[str, Any] = {"d_model": 128, "input_vocab_size": 512, "max_length": 64}
    model = transformer.Bitransformer(
        transformer.Unitransformer(stack(*("self", "dense") * 2), autoregressive=False,
                                   output_vocab_size=None, name="encoder", **sizes),
        transformer.Unitransformer(stack(*("self", "cross", "dense") * 2), autoregressive=True,
                                   output_vocab_size=512, name="decoder", **sizes),
    )  # fmt: skip
    inputs, targets = (ids(mesh, "batch:8,length:64", 512, seed) for seed in (0, 1))
    _, loss = model.call_simple(inputs, targets, compute_loss=True, mode="train")
    return trained(mesh, loss)


def bert_model() -> Any:
    """BERT's training of masked words."""
    import mesh_tensorflow as mtf
    from mesh_tensorflow.bert import bert

    mesh = new_mesh()
    config = bert.BertConfig(
        vocab_size=1024, d_model=128, num_blocks=2, attention_num_heads=4,
        feedforward_intermediate_size=512, max_position_embeddings=64,
        layer_output_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = bert.BertModel(config, True, ids(mesh, "batch:8,seq:64", 1024))
    positions, labels = (ids(mesh, "batch:8,predictions:8", 60, seed) for seed in (0, 1))
    weights = mtf.ones(mesh, positions.shape)
    return trained(mesh, model.get_masked_lm_output(positions, labels, weights)[0])


def unet() -> Any:
    """Convolutions of blocks in three dimensions, with a connection past the lowest."""
    import mesh_tensorflow as mtf

    mesh = new_mesh()
    shape = mtf.convert_to_shape("batch:2,x_blocks:4,y_blocks:4,x:8,y:8,z:16,channels:1")
    _, across, down, *_ = shape.dims

    def convolved(x: Any, size: int, name: str) -> Any:
        channels = mtf.Dimension(f"channels_{name}", size)
        y = mtf.layers.conv3d_with_blocks(
            x, channels, d_blocks_dim=across, h_blocks_dim=down, name=name
        )
        return mtf.relu(y)

    x = mtf.random_uniform(mesh, shape)
    top = convolved(x, 8, "top")
    low = convolved(top, 8, "low")
    joined = mtf.concat(
        [mtf.rename_dimension(t, t.shape.dims[-1].name, "c") for t in (top, low)], "c"
    )
    logits = convolved(joined, 2, "out")
    return trained(mesh, mtf.reduce_mean(mtf.square(logits)))


def fft() -> Any:
    """A Gaussian random field, and its spectrum."""
    from gaussian_random_field import Box, measured_spectrum, random_field

    from mesh_tensorflow.auto_mtf import models

    mesh, box = new_mesh(), Box.of(48, 100.0)
    field = random_field(mesh, box)
    return models.Program(mesh.graph, mesh, [field, *measured_spectrum(field, box)], [])


# Functions that build a program in the default tf graph.
BUILDERS: dict[str, Callable[[], Any]] = {
    "mnist": mnist,
    "lm": functools.partial(language_model, 8, 64),
    "long": functools.partial(language_model, 2, 512),
    "moe": experts,
    "t5": t5,
    "bert": bert_model,
    "unet": unet,
    "fft": fft,
}


# -- the results


def told_apart(row: Row) -> list[tuple[int, int]]:
    """Returns the pairs of layouts of which one was faster in all rounds, with that one first."""
    numbers = itertools.permutations(range(len(row.rounds)), 2)
    return [(i, j) for i, j in numbers if all(x < y for x, y in zip(row.rounds[i], row.rounds[j]))]


def line_of(row: Row) -> str:
    """Returns the line of a row in a table in Markdown."""
    least, pairs = min(row.measured), told_apart(row)
    number = len(row.rounds)
    cells = [
        row.program, row.place, f"{number}", f"{max(row.measured) / least:.2f}",
        f"{row.again:.2f}", f"{len(pairs) / (number * (number - 1) / 2):.0%}",
    ]  # fmt: skip
    # The choice by times of operations is the first, that of the cost model the second.
    for column, rank, chosen in zip((row.estimated, row.profiled), row.ranks, (1, 0)):
        right = sum(column[2 + i] < column[2 + j] for i, j in pairs) / max(1, len(pairs))
        cells += [f"{rank:.2f}", f"{right:.0%}", f"{row.measured[chosen] / least:.2f}"]
    return "| " + " | ".join([*cells, row.timed]) + " |"


HEAD = (
    "program", "place", "layouts", "slowest / fastest", "correlation of two rounds",
    "pairs told apart", "correlation, cost model", "of these pairs", "regret",
    "correlation, times of operations", "of these pairs", "regret", "timed",
)  # fmt: skip


def plot(path: str, rows: Sequence[Row]) -> None:
    """Plots predicted against measured times, a panel for each row."""
    import matplotlib.pyplot as plt

    columns = min(4, len(rows))
    lines = -(-len(rows) // columns)
    figure, axes = plt.subplots(
        lines, columns, squeeze=False, figsize=(3.6 * columns, 3.4 * lines), layout="constrained"
    )
    for axis in axes.flat[len(rows) :]:
        axis.set_axis_off()
    for axis, row in zip(axes.flat, rows):
        measured = [1e3 * t for t in row.measured[2:]]
        columns_of = {"cost model": row.estimated, "times of operations": row.profiled}
        for color, (name, column) in zip(("#d5a73a", "#4c8bc0"), columns_of.items()):
            axis.scatter([1e3 * t for t in column[2:]], measured, s=18, color=color, label=name)
        axis.set(xscale="log", yscale="log", title=f"{row.program}, {row.place}")
        axis.set(xlabel="predicted ms", ylabel="measured ms")
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_formatter("{x:.3g}")
            side.set_minor_formatter("{x:.3g}")
        axis.tick_params(which="both", labelsize=7)
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def print_row(program: str, place: str, options: argparse.Namespace) -> None:
    """Measures a row in this process, and prints it."""
    in_this_process(place)
    from mesh_tensorflow import estimator

    def measure() -> None:
        if options.memory:
            print("\n".join(memory_lines(program, options)))
        else:
            print(json.dumps(measured_row(program, place, options)))

    # Of several processes, the first one measures.
    estimator.run_cluster(measure, estimator.RunConfig())


def main() -> None:
    """Measures the rows, and prints the table."""
    options = options_of()
    if options.row:
        print_row(*options.row.split("/"), options)
        return
    head = MEMORY_HEAD if options.memory else HEAD
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head), flush=True)
    rows = []
    # Memory is by XLA, wherever times would be measured.
    places = ["pjrt"] if options.memory else options.places.split(",")
    for program in options.only.split(","):
        for place in places:
            command = [__file__, *sys.argv[1:], f"--row={program}/{place}"]
            if place == "processes":
                command = ["-m", "mesh_tensorflow.launch", "--processes", "4", *command]
            command = [sys.executable, *command]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            if options.memory:
                print(done.stdout.strip(), flush=True)
                continue
            rows.append(Row(*json.loads(done.stdout.splitlines()[-1])))
            print(line_of(rows[-1]), flush=True)
            if options.json:
                Path(options.json).write_text(json.dumps([row._asdict() for row in rows]))
    if options.plot:
        plot(options.plot, rows)


if __name__ == "__main__":
    main()
