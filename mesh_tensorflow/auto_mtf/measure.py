"""Measures the hardware profile of the local machine, for `auto_mtf`.

python -m mesh_tensorflow.auto_mtf.measure --output=machine.json

The profile is that of logical CPUs of one process: with `--placement=simd`, each runs the whole
program on its slices; with `--placement=shared`, they are one memory domain and share equal slices.
Matrix products, convolutions and elementwise operations are timed separately. The overhead of
operations and the cost of communication are fitted to steps of two small language models under
several layouts.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import statistics
import timeit
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Optional

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow._programs import parser_of, run_with_parser
from mesh_tensorflow._progress import Progress
from mesh_tensorflow._units import bytes_text
from mesh_tensorflow.auto_mtf import models, step_time
from mesh_tensorflow.auto_mtf.hardware import FOLDED_BYTES, Hardware, Link, in_vectors
from mesh_tensorflow.auto_mtf.profiles import Processors

__all__ = ["main", "measure_machine", "rounds_on", "step_seconds"]

_PRODUCTS = [(256, 256, 256), (512, 512, 512), (1024, 256, 1024)]
_CONVOLUTIONS = [(256, 15, 1, 16), (256, 15, 16, 16)]  # images, size, channels in and out
_FILTER = 9
_LANES = (4, 8, 16)  # numbers of float32 in a vector, of any processor
_ELEMENTS = 1 << 21
# The small one is mostly overhead, and the larger one computes and sends more.
_FITTED = [
    {"batch": 8, "length": 8, "vocab": 16, "d_model": 8, "heads": 4, "d_kv": 4, "d_ff": 16},
    {"batch": 8, "length": 64, "vocab": 256, "d_model": 96, "heads": 4, "d_kv": 24, "d_ff": 384},
]
_MESH = "a:2,b:2"
_LAYOUTS = [
    "", "batch:a", "d_ff:a;d_kv:b", "batch:a;d_ff:b;heads:b;vocab:b", "batch:a;length:b",
    "d_model:a;batch:b",
]  # fmt: skip
_UNLIMITED = 1e30


def _fetches(build: Callable[[], models.Program], machine: Processors, layout: str) -> Any:
    """Returns what a session runs for a step of a program, on logical CPUs."""

    def lowered(impl: mtf.MeshImpl) -> list[Any]:
        program = build()
        lowering = mtf.Lowering(program.graph, {program.mesh: impl})
        outputs = [lowering.export_to_tf_tensor(y) for y in program.outputs]
        # All processors have to have them: of a SIMD program, only the first one's are fetched.
        updates = [lowering.lowered_operation(u) for u in program.updates]
        return [*outputs, tf.group([*outputs, *updates])]

    return machine.run(layout, lowered)


def step_seconds(
    build: Callable[[], models.Program],
    mesh_shape: Any,
    layouts: Sequence[str],
    runs: int = 10,
    rounds: int = 3,
    placement: str = "simd",
    label: str = "",
) -> list[float]:
    """Measures the seconds per step of a program under several layouts, on logical CPUs.

    Args:
      build: a function that builds the program, with variables or constants as input.
      mesh_shape: a Shape, or what converts to one.
      layouts: a list of strings.
      runs: the number of steps per round.
      rounds: the number of rounds. The result is the minimum over rounds of the median of a
        round, since other load can only increase the times.
      placement: "simd" or "shared".
      label: what is measured, for a progress line; there is none if empty.

    Returns:
      A list of seconds, one for each layout.
    """
    mesh_shape = mtf.convert_to_shape(mesh_shape)
    devices = [f"/cpu:{i}" for i in range(mesh_shape.size)]
    machine = Processors(mesh_shape, devices, placement == "simd")
    return [min(c) for c in rounds_on(machine, build, layouts, runs, rounds, label)]


def rounds_on(
    machine: Processors,
    build: Callable[[], models.Program],
    layouts: Sequence[str],
    runs: int,
    rounds: int,
    label: str = "",
) -> list[list[float]]:
    """Measures the median seconds per step in each of some rounds, on the processors of a mesh.

    Each layout is run with the threads that `mtf.session_config` gives a program in it, unless
    TensorFlow has begun before. The layouts take turns, so that other load on the machine affects
    all of them equally.

    Args:
      machine: the Processors.
      build: see `step_seconds`.
      layouts: see `step_seconds`.
      runs: see `step_seconds`.
      rounds: the number of rounds.
      label: see `step_seconds`.

    Returns:
      For each layout, a list of seconds, one for each round.
    """
    steps: list[Callable[[], Any]] = []
    # A layout is built once, and timed in each round.
    with contextlib.ExitStack() as opened:
        progress = opened.enter_context(_progress(len(layouts) + rounds * runs, label))
        for layout in layouts:
            with tf.Graph().as_default():
                tf.set_random_seed(1)
                fetches = _fetches(build, machine, layout)
                session = machine.session(tf.get_default_graph(), layout)
                opened.enter_context(contextlib.closing(session))
                session.run(tf.global_variables_initializer())
                steps.append(machine.runner(session, fetches))
            progress.update()
        return seconds_in_turns(steps, runs, rounds, progress.update)


def seconds_in_turns(
    steps: Sequence[Callable[[], Any]],
    runs: int,
    rounds: int,
    done: Callable[[], None] = lambda: None,
) -> list[list[float]]:
    """Measures the median seconds of each of some steps, in each of some rounds.

    Args:
      steps: functions that each run a step, to its end.
      runs: how often each is run in a round.
      rounds: the number of rounds.
      done: called after each turn of all steps.

    Returns:
      For each step, a list of seconds, one for each round.
    """
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        # Turn by turn, as other load lasts for seconds: with the runs of a round in a row, one
        # layout of a Fourier transform took 4.3 ms in one round and 7.3 in the next.
        turns: list[list[float]] = [[] for _ in steps]
        for turn in range(runs):
            # Forth and back, so that a machine that grows slower does not favor the first.
            order = range(len(steps)) if turn % 2 == 0 else reversed(range(len(steps)))
            for n in order:
                # The first one finds the memory of another program in the caches.
                steps[n]()
                turns[n].append(timeit.timeit(steps[n], number=1))
            done()
        for column, of_round in zip(times, turns):
            column.append(statistics.median(of_round))
    return times


def _progress(total: int, label: str) -> Progress:
    """Returns a progress line of what is measured, which is not shown if it has no label."""
    return Progress(total, label, "part", show=bool(label))


def _seconds_of(make: Callable[[], tf.Tensor], processors: int, runs: int) -> float:
    """Measures the seconds of one operation, repeated in a graph of its own."""
    with tf.Graph().as_default():
        # Several in a run, so that its own overhead is spread over them.
        repeats = 4
        results: list[tf.Operation] = []
        for _ in range(repeats):
            # One after another: side by side, they would share the machine's threads.
            with tf.control_dependencies(results[-1:]):
                results.append(tf.identity(make()).op)
        config = tf.ConfigProto(device_count={"CPU": processors})
        # Otherwise grappler would prune operations whose results are not read.
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        with tf.Session(config=config) as session:
            session.run(tf.global_variables_initializer())
            run = session.make_callable(tf.group(results))
            run()  # the first run of a session prepares its executors
            return statistics.median(timeit.repeat(run, number=1, repeat=runs)) / repeats


def _product(a: int, b: int, c: int) -> tf.Tensor:
    with tf.variable_scope("product", reuse=tf.AUTO_REUSE):
        x = tf.get_variable("x", [a, b], initializer=tf.random_normal_initializer())
        y = tf.get_variable("y", [b, c], initializer=tf.random_normal_initializer())
    return tf.matmul(x.read_value(), y.read_value())


def _convolution(
    make: Callable[..., tf.Tensor], images: int, size: int, before: int, after: int
) -> tf.Tensor:
    wide, weights = [images, size, size, before], [_FILTER, _FILTER, before, after]
    narrow = [images, size - _FILTER + 1, size - _FILTER + 1, after]
    x, w, y = (tf.fill(sizes, tf.constant(0.5)) for sizes in (wide, weights, narrow))
    return make(x, w, y, wide, weights)


_KERNELS: dict[str, Callable[..., tf.Tensor]] = {
    "Conv2dOperation": lambda x, w, y, xs, ws: tf.nn.conv2d(x, w, strides=1, padding="VALID"),
    "Conv2or3dBackpropInputOperation": lambda x, w, y, xs, ws: tf.nn.conv2d_backprop_input(
        xs, w, y, strides=[1, 1, 1, 1], padding="VALID"
    ),
    "Conv2or3dBackpropFilterOperation": lambda x, w, y, xs, ws: tf.nn.conv2d_backprop_filter(
        x, ws, y, strides=[1, 1, 1, 1], padding="VALID"
    ),
}


def _lanes(processors: int, runs: int, done: Callable[[], None]) -> int:
    """Measures how many channels a convolution computes in the time of one vector of them."""
    kernel = functools.partial(_convolution, _KERNELS["Conv2dOperation"], *_CONVOLUTIONS[-1][:3])
    channels = (*_LANES, 2 * _LANES[-1])
    rounds = []
    # In turns, of which the fastest counts: other load can only increase times.
    for _ in range(3):
        makes = (functools.partial(kernel, count) for count in channels)
        rounds.append([_seconds_of(make, processors, max(2, runs // 3)) for make in makes])
        done()
    seconds = [min(column) for column in zip(*rounds)]
    # Twice as many take twice as long, once a vector is full, and less if it was half empty.
    full = [b > 1.5 * a for a, b in itertools.pairwise(seconds)]
    return next((lanes for lanes, is_full in zip(_LANES, full) if is_full), _LANES[-1])


def _rates(processors: int, runs: int, lanes: int, done: Callable[[], None]) -> dict[str, float]:
    """Measures floating-point operations per second, by dtype and by operation class."""

    def rate(runs: int, multiplied: Sequence[float], makes: Iterable[Callable[[], Any]]) -> float:
        seconds = 0.0
        for make in makes:
            seconds += _seconds_of(make, processors, runs)
            done()
        return 2.0 * sum(multiplied) / seconds

    products = (functools.partial(_product, *sizes) for sizes in _PRODUCTS)
    rates = {"float32": rate(runs, [a * b * c for a, b, c in _PRODUCTS], products)}
    for name, kernel in _KERNELS.items():
        multiplied = [
            images * (size - _FILTER + 1) ** 2 * _FILTER**2 * before * after
            * in_vectors(before if name == "Conv2or3dBackpropInputOperation" else after, lanes)
            for images, size, before, after in _CONVOLUTIONS
        ]  # fmt: skip
        convolutions = (functools.partial(_convolution, kernel, *sizes) for sizes in _CONVOLUTIONS)
        rates[name] = rate(max(2, runs // 3), multiplied, convolutions)
    return rates


def _bandwidth(processors: int, runs: int) -> float:
    """Measures the bytes per second that elementwise operations read and write."""

    def add() -> tf.Tensor:
        with tf.variable_scope("add", reuse=tf.AUTO_REUSE):
            x = tf.get_variable("x", [_ELEMENTS], initializer=tf.random_normal_initializer())
        return x.read_value() * 2.0

    # Of each element, four bytes are read and four are written.
    return 2 * 4 * _ELEMENTS / _seconds_of(add, processors, runs)


def _unit_hardware(machine: Hardware) -> list[Hardware]:
    """Returns hardware profiles that isolate each fitted rate: compute, calls, steps, bytes."""
    # seconds = slower * compute + operation * calls + latency * steps + per_byte * bytes: with one
    # factor at 1 and the others at 0, an estimate is what it is multiplied by.
    free = machine.replace(
        flops=dict.fromkeys(machine.flops, _UNLIMITED),
        memory_bandwidth=_UNLIMITED,
        link=Link(_UNLIMITED, 0.0),
    )
    return [
        machine.replace(link=Link(_UNLIMITED, 0.0)),
        free.replace(operation_seconds=1.0),
        free.replace(link=Link(_UNLIMITED, 1.0)),
        free.replace(link=Link(1.0, 0.0)),
    ]


def _fitted(machine: Hardware, placement: str, runs: int, labels: Sequence[str]) -> Hardware:
    """Fits a hardware profile to the measured times of small programs."""
    rows, measured = [], []
    for sizes, label in zip(_FITTED, labels):
        build = functools.partial(models.language_model, **sizes, layers=2, optimizer="sgd")
        measured += step_seconds(build, _MESH, _LAYOUTS, runs, placement=placement, label=label)
        with tf.Graph().as_default():
            program = build()
            estimators = [
                step_time.StepEstimator(program.graph, _MESH, program.outputs, hardware)
                for hardware in _unit_hardware(machine)
            ]
        # One row for each layout, with a column for each of the four factors.
        rows += [[e.estimate(layout).seconds.total for e in estimators] for layout in _LAYOUTS]
    # Minimize relative errors, so that the smaller program counts as much as the larger one.
    columns, target = np.array(rows) / np.array(measured)[:, None], np.ones(len(measured))
    slower, operation, latency, per_byte = _fit(columns, target)
    if slower < 1.0:  # operations are never faster than when timed separately
        slower = 1.0
        operation, latency, per_byte = _fit(columns[:, 1:], target - columns[:, 0])
    return machine.replace(
        flops={name: rate / slower for name, rate in machine.flops.items()},
        memory_bandwidth=machine.memory_bandwidth / slower,
        operation_seconds=operation,
        # A factor of 0 says that bytes made no difference to the times: then they move as in
        # memory.
        link=Link(1 / per_byte if per_byte else machine.memory_bandwidth, latency),
    )


def _fit(columns: np.ndarray, target: np.ndarray) -> list[float]:
    """Solves a least-squares problem for nonnegative factors of columns."""
    factors = np.zeros(columns.shape[1])
    # A column of zeros has no factor to fit, and would make the scale below 0.
    columns_used = [i for i in range(columns.shape[1]) if columns[:, i].any()]
    while columns_used:
        # Calls and bytes differ by orders of magnitude, so columns are scaled to 1, for the solver
        # and for the comparison below.
        scale = columns[:, columns_used].max(axis=0)
        fitted = np.linalg.lstsq(columns[:, columns_used] / scale, target, rcond=None)[0] / scale
        if (fitted >= 0).all():
            factors[columns_used] = fitted
            break
        # Nothing takes negative time: without the most negative factor, the others are fitted
        # again.
        columns_used.pop(int((fitted * scale).argmin()))
    return factors.tolist()


def measure_machine(
    processors: int = 4,
    runs: int = 10,
    placement: str = "simd",
    name: str = "",
    show: bool = False,
) -> Hardware:
    """Measures the profile of this machine, as logical CPUs of one process.

    Args:
      processors: the number of logical CPUs.
      runs: the number of repetitions of each measurement.
      placement: "simd", where each logical CPU has a share of the machine and its own slices; or
        "shared", where they share the machine and equal slices.
      name: a string; the name of the machine if empty.
      show: whether there are progress lines.

    Returns:
      A Hardware.
    """
    shared = placement == "shared"
    # In one memory, rates are those of the whole machine; else each processor has its share.
    share = 1 if shared else processors
    kernels = 4 + len(_PRODUCTS) + len(_KERNELS) * len(_CONVOLUTIONS)
    labels = ("measure operations", "measure small steps", "measure larger steps")
    with _progress(kernels, labels[0] if show else "") as progress:
        bandwidth = _bandwidth(processors, runs) / share
        progress.update()
        lanes = _lanes(processors, runs, progress.update)
        rates = _rates(processors, runs, lanes, progress.update)
    machine = Hardware(
        name or os.uname().nodename,
        {kind: rate / share for kind, rate in rates.items()},
        bandwidth,
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / share,
        # Until one is fitted; each of the profiles that are fitted has a link of its own.
        Link(bandwidth, 0.0),
        one_memory=shared,
        vector_bytes=lanes * tf.float32.size,
        folded_bytes=FOLDED_BYTES,
        source=f"measured, {os.cpu_count()} CPUs, TensorFlow {tf.__version__}, {placement}",
    )
    return _fitted(machine, placement, runs, labels[1:] if show else ("", ""))


def _options(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """Returns what the command line says."""
    parser = parser_of(
        "auto_mtf.measure", "Measures this machine, and writes a profile of it for auto_mtf."
    )
    parser.add_argument("--output", required=True, help="JSON file for the profile")
    parser.add_argument("--processors", type=int, default=4, help="processors of the mesh")
    parser.add_argument(
        "--placement",
        choices=["simd", "shared"],
        default="simd",
        help="simd: a SIMD mesh; shared: processors placed on one device",
    )
    parser.add_argument("--runs", type=int, default=10, help="how often each step is timed")
    options = parser.parse_args(argv)
    for name in ("processors", "runs"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}: it has to be 1 or more")
    return options


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs the command.

    Args:
      argv: the command-line arguments; `sys.argv[1:]` if None.

    Returns:
      The exit code.
    """
    options = _options(argv)
    machine = measure_machine(options.processors, options.runs, options.placement, show=True)
    machine.save(options.output)
    giga = {k: f"{v / 1e9:.1f}" for k, v in machine.flops.items()}
    print(f"floating point operations a second, in 1e9: {giga}")
    print(f"communication: {bytes_text(machine.link.bandwidth)}/s")
    print(f"memory: {bytes_text(machine.memory_bandwidth)}/s, {bytes_text(machine.memory_bytes)}")
    print(f"convolutions: vectors of {machine.vector_bytes} bytes")
    print(f"each operation: {machine.operation_seconds * 1e6:.1f} us")
    print(f"each communication: {machine.link.latency * 1e6:.1f} us for each processor")
    print(
        f"in {options.output}, for python -m mesh_tensorflow.auto_mtf --hardware={options.output}"
    )
    return 0


if __name__ == "__main__":
    run_with_parser(main, "mesh_tensorflow.auto_mtf.measure")
