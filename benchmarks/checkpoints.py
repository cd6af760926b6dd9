"""Measures the memory of variables, and how fast checkpoints are saved and restored.

    python benchmarks/checkpoints.py --oracle_python VENV/bin/python --json results.json
    python benchmarks/checkpoints.py --fit

Each system has variables of the same total size: Mesh TensorFlow on a 2x2 mesh of logical CPUs,
each matrix split over both dimensions; the classic release likewise; and plain TensorFlow. Each
run is a new process, and the systems take turns. With `--fit`, it measures how much longer the
steps of `mtf.train.fit` take that saves: at once, or in the background. See README.md.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import quiet

# Freed memory goes back to the system at once, so that what is resident is what is in use.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
SYSTEMS = ("mtf", "classic", "tf")
ROWS = 1024
COLUMNS = 4096  # 16 MiB a matrix


class PeakWatch:
    """Peak resident memory while it is open, in MiB, sampled each millisecond."""

    def __enter__(self) -> "PeakWatch":
        self.peak, self._open = resident_mb(), True
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while self._open:
            self.peak = max(self.peak, resident_mb())
            time.sleep(0.001)

    def __exit__(self, *unused: Any) -> None:
        self._open = False
        self._thread.join()


def resident_mb() -> float:
    """Memory resident now, in MiB."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def build_tf(tf: Any, count: int) -> tuple[Any, Any, Any]:
    """Plain variables; returns the operations before saving, after restoring, and a saver."""
    for i in range(count):
        tf.get_variable(
            f"v{i}", [ROWS, COLUMNS], initializer=tf.random_uniform_initializer(), use_resource=True
        )
    return tf.no_op(), tf.no_op(), tf.train.Saver()


def build_mtf(tf: Any, count: int, classic: bool) -> tuple[Any, Any, Any]:
    """Variables on a mesh; returns the same."""
    from systems import import_mtf

    mtf = import_mtf(classic)
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    shape = [mtf.Dimension("rows", ROWS), mtf.Dimension("columns", COLUMNS)]
    for i in range(count):
        mtf.get_variable(mesh, f"v{i}", shape, initializer=tf.random_uniform_initializer())
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(
        mtf.convert_to_shape("x:2;y:2"),
        mtf.convert_to_layout_rules("rows:x;columns:y"),
        [f"cpu:{i}" for i in range(4)],
    )
    lowering = mtf.Lowering(graph, {mesh: impl}, autostack=False)
    saver = tf.train.Saver(tf.global_variables())
    return lowering.copy_slices_to_masters(), lowering.copy_masters_to_slices(), saver


def work(system: str, mib: int, directory: str) -> dict[str, float]:
    """What one process measures."""
    quiet.import_tensorflow()
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    tf.disable_eager_execution()
    count = mib * 2**20 // (4 * ROWS * COLUMNS)
    before_save, after_restore, saver = (
        build_tf(tf, count) if system == "tf" else build_mtf(tf, count, system == "classic")
    )
    init = tf.global_variables_initializer()
    config = tf.ConfigProto(device_count={"CPU": 4})
    found: dict[str, float] = {}
    with tf.Session(config=config) as session:
        session.run(tf.constant(0))
        base = resident_mb()
        with PeakWatch() as watch:
            session.run(init)
            session.run(after_restore)
        time.sleep(0.2)
        found["resident"] = (resident_mb() - base) / mib
        found["peak_init"] = (watch.peak - base) / mib
        path = os.path.join(directory, "model")
        os.sync()  # what others wrote before does not slow this down
        with PeakWatch() as watch:
            start = time.perf_counter()
            session.run(before_save)
            saver.save(session, path, write_meta_graph=False)
            found["save_s"] = time.perf_counter() - start
        found["peak_save"] = (watch.peak - base) / mib
    with tf.Session(config=config) as session:  # as a program that goes on from a checkpoint
        with PeakWatch() as watch:
            start = time.perf_counter()
            saver.restore(session, path)
            session.run(after_restore)
            found["restore_s"] = time.perf_counter() - start
        found["peak_restore"] = (watch.peak - base) / mib
    return found


# -- what a training waits for

WAYS: dict[str, dict[str, Any]] = {
    "no saves": {},
    "at once": {"save_in_background": False},
    "background": {"save_in_background": True},
}
SAVES = 3  # in the steps of one run


def train(way: str, arguments: argparse.Namespace, directory: str) -> dict[str, float]:
    """The seconds of some steps of a training, those before the first save left out."""
    quiet.import_tensorflow()
    import numpy as np

    import mesh_tensorflow as mtf

    size = 1024
    batch, *dims = (mtf.Dimension("batch", arguments.rows), mtf.Dimension("d0", size))
    # With the two slots of Adam, each matrix takes three times its own bytes.
    for i in range(arguments.mib * 2**20 // (3 * 4 * size * size)):
        dims.append(mtf.Dimension(f"d{i + 1}", size))

    def model_fn(mesh: Any, x: Any) -> Any:
        for i, d in enumerate(dims[1:]):
            x = mtf.layers.dense(
                x, [d], reduced_dims=[dims[i]], use_bias=False, activation=mtf.relu, name=f"w{i}"
            )
        return mtf.reduce_mean(mtf.square(x))

    class Times(mtf.train.Callback):
        """The moment of each step."""

        def __init__(self) -> None:
            self.moments: list[float] = []

        def on_step(self, run: Any, values: Any) -> None:
            self.moments.append(time.perf_counter())

    times, every = Times(), arguments.save_every
    os.sync()  # what others wrote before does not slow this down
    result = mtf.train.fit(
        model_fn,
        np.random.RandomState(0).randn(arguments.rows, size).astype("float32"),
        steps=every * (SAVES + 1) - 1,
        dims=[batch, dims[0]],
        optimizer=mtf.optimize.AdamWOptimizer(1e-4),
        mesh_shape="rows:2",
        layout="batch:rows",
        directory=None if way == "no saves" else directory,
        save_every=every,
        log_every=every,
        keep=1,
        progress=False,
        callbacks=[times],
        **WAYS[way],
    )
    import resource

    # From the end of the step that is saved first. The rates of fit are those of steps alone.
    seconds = times.moments[-1] - times.moments[every - 1]
    ends = [every - 1, *(int(record["step"]) - 1 for record in result.history[1:])]
    counts = [end - begin for begin, end in itertools.pairwise(ends)]
    alone = sum(n / r["steps_per_second"] for n, r in zip(counts, result.history[1:]))
    return {
        "seconds": seconds,
        "waits": (seconds - alone) / SAVES,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
    }


def fit(arguments: argparse.Namespace) -> None:
    """Prints how long steps take, in turns."""
    rounds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for turn in range(arguments.rounds):
        ways = list(WAYS)
        for way in ways[turn % 3 :] + ways[: turn % 3]:
            rounds[way].append(run(way, arguments, "--train"))
    steps = arguments.save_every * SAVES - 1
    print(f"{arguments.mib} MiB of variables; {SAVES} saves in {steps} steps; medians")
    for way, found in rounds.items():
        seconds = [one["seconds"] for one in found]
        ratios = [s / alone["seconds"] for s, alone in zip(seconds, rounds["no saves"])]
        print(
            f"{way:12}{statistics.median(seconds) / steps * 1000:8.1f} ms a step"
            f"{statistics.median(ratios):8.3f} ({min(ratios):.3f}-{max(ratios):.3f})"
            f"{statistics.median(one['waits'] for one in found) * 1000:8.0f} ms a save"
            f"{statistics.median(one['peak'] for one in found):8.0f} MiB at the peak"
        )


def run(system: str, arguments: argparse.Namespace, worker: str = "--worker") -> dict[str, float]:
    """Starts a process and returns what it measured."""
    python = arguments.oracle_python if system == "classic" else sys.executable
    environment = dict(os.environ, **ALLOCATOR)
    if system == "classic":
        environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [python, __file__, worker, system, directory, "--mib", str(arguments.mib)]
            + ["--save_every", str(arguments.save_every), "--rows", str(arguments.rows)],
            env=environment,
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise SystemExit(f"{system} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


HEADINGS = {
    "resident": "resident",
    "peak_init": "peak, init",
    "peak_save": "peak, save",
    "peak_restore": "peak, restore",
    "save_s": "save MiB/s",
    "restore_s": "restore MiB/s",
}


def table(rounds: dict[str, list[dict[str, float]]], mib: int) -> str:
    """Medians, and ratios to plain TensorFlow within a round."""
    lines = [
        f"{mib} MiB of variables; memory as a multiple of that, beyond the empty session's",
        " " * 10 + "".join(f"{h:>16}" for h in HEADINGS.values()),
    ]
    for system, rows in rounds.items():
        cells = []
        for key in HEADINGS:
            median = statistics.median(row[key] for row in rows)
            cells.append(f"{mib / median:.0f}" if key.endswith("_s") else f"{median:.2f}")
        lines.append(f"{system:10}" + "".join(f"{c:>16}" for c in cells))
    for system, rows in rounds.items():
        if system == "tf" or "tf" not in rounds:
            continue
        cells = []
        for key in HEADINGS:
            ratios = [row[key] / base[key] for row, base in zip(rows, rounds["tf"])]
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
        lines.append(f"{system + '/tf':10}" + "".join(f"{c:>16}" for c in cells))
    return "\n".join(lines) + "\n(ratios of seconds, where they are of speeds)"


def main() -> None:
    """Runs the systems in turns, or is one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--worker", nargs=2, metavar=("SYSTEM", "DIRECTORY"), help=argparse.SUPPRESS
    )
    parser.add_argument("--train", nargs=2, metavar=("WAY", "DIRECTORY"), help=argparse.SUPPRESS)
    parser.add_argument("--fit", action="store_true", help="measure the steps of mtf.train.fit")
    parser.add_argument("--save_every", type=int, default=30, help="steps, for --fit")
    parser.add_argument("--rows", type=int, default=64, help="of a batch, for --fit")
    parser.add_argument("--mib", type=int, default=1024, help="size of all variables")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", default="", help="write everything to this file")
    parser.add_argument(
        "--oracle_python", default="", help="a Python that has the classic mesh-tensorflow 0.1.21"
    )
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(work(arguments.worker[0], arguments.mib, arguments.worker[1])))
        return
    if arguments.train:
        print(json.dumps(train(arguments.train[0], arguments, arguments.train[1])))
        return
    if arguments.fit:
        fit(arguments)
        return
    names = [s for s in SYSTEMS if s != "classic" or arguments.oracle_python]
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(arguments.rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            rounds[name].append(run(name, arguments))
    print(table(rounds, arguments.mib))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"mib": arguments.mib, "rounds": rounds}))


if __name__ == "__main__":
    main()
