"""Estimates layouts of large transformers on TPU v3, for docs/layout_study.md.

python benchmarks/auto_mtf_study.py

Prints a table in Markdown: for each model and number of cores the step under plain data
parallelism, the fastest layout that fits in memory, and by how much it is faster.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import quiet

# 12 * layers * d_model ** 2 weights, and two of vocab * d_model.
MODELS = {
    "1B": {"layers": 20, "d_model": 2048, "heads": 16, "d_ff": 8192},
    "10B": {"layers": 32, "d_model": 5120, "heads": 40, "d_ff": 20480},
    "100B": {"layers": 80, "d_model": 10240, "heads": 80, "d_ff": 40960},
}
COMMON = {
    "length": 1024, "vocab": 32768, "d_kv": 128, "dtype": "bfloat16", "slice_dtype": "float32",
    "optimizer": "adafactor", "recompute": True,
}  # fmt: skip
SEQUENCES = 1  # for each core
CORES = [8, 64, 512]
HARDWARE = "tpu_v3"
DIMENSIONS = 3  # of the mesh, at most


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--cores", nargs="+", type=int, default=CORES)
    return parser.parse_args()


if __name__ == "__main__":
    parse_arguments()  # before the seconds of the next line
    quiet.import_tensorflow()

import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.auto_mtf import api, models, step_time


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.3g} GB"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds > 1e-2 else f"{seconds * 1e3:.2f}"


def fastest(program: models.Program, cores: int, limit: float) -> tuple:
    """Returns (Estimate, mesh shape) of the fastest that fits, or (None, missing bytes)."""
    best, missing = None, float("inf")
    for sizes in api._mesh_shape_iterator(cores, DIMENSIONS):
        shape = mtf.Shape([(f"m{i}", size) for i, size in enumerate(sizes)])
        estimator = step_time.StepEstimator(program.graph, shape, program.outputs, HARDWARE)
        try:
            found = estimator.solve(limit)
        except step_time.MemoryLimitError as e:
            missing = min(missing, e.missing_bytes)
            continue
        if best is None or found.seconds.total < best[0].seconds.total:
            best = found, shape
    return best or (None, missing)


def row(name: str, cores: int) -> str:
    """Returns a row of the table."""
    with tf.Graph().as_default():
        program = models.language_model(**MODELS[name], **COMMON, batch=SEQUENCES * cores)
    estimator = step_time.StepEstimator(program.graph, [("all", cores)], program.outputs, HARDWARE)
    limit = estimator.hardware.memory_bytes
    plain = estimator.estimate("batch:all")
    weights = sum(v.size for v in program.graph.trainable_variables)
    share = plain.seconds.communication / plain.seconds.total
    fits = "fits" if plain.peak_bytes <= limit else "does not fit"
    cells = [
        f"{weights / 1e9:.1f}e9",
        f"{cores}",
        f"{milliseconds(plain.seconds.total)} ms, {share:.0%}",
        f"{gigabytes(plain.peak_bytes)}, {fits}",
    ]
    best, shape = fastest(program, cores, limit)
    if best is None:
        cells += [f"none fits: {gigabytes(shape)} too many", "", "", ""]
    else:
        sizes = dict(zip(shape.dimension_names, shape.to_integer_list))
        share = best.seconds.communication / best.seconds.total
        rules = ", ".join(f"{d}:{sizes[m]}" for d, m in sorted(best.layout.items()))
        ratio = plain.seconds.total / best.seconds.total
        cells += [
            f"{'x'.join(map(str, sizes.values()))}: {rules}",
            f"{milliseconds(best.seconds.total)} ms, {share:.0%}",
            gigabytes(best.peak_bytes),
            f"{ratio:.2f}" if plain.peak_bytes <= limit else f"({ratio:.2f})",
        ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Prints the table."""
    options = parse_arguments()
    heads = [
        "weights", "cores", "data parallelism: step, communication", "memory of a core",
        "fastest layout that fits", "step, communication", "memory of a core", "speed-up",
    ]  # fmt: skip
    print("| " + " | ".join(heads) + " |")
    print("|" + "---|" * len(heads))
    for name in options.models:
        for cores in options.cores:
            start = time.perf_counter()
            print(row(name, cores), flush=True)
            print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    tf.disable_v2_behavior()
    tf.logging.set_verbosity(tf.logging.ERROR)
    main()
