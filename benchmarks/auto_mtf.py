"""Measures the search for layouts: how long it takes, and how well it ranks layouts.

python benchmarks/auto_mtf.py
python benchmarks/auto_mtf.py --oracle_python VENV/bin/python
python benchmarks/auto_mtf.py --rank --layouts=16

The first table has the seconds that the search takes for transformers with gradients and Adafactor.
With --oracle_python the classic's search runs on the same graphs, operation for operation. --rank
measures this machine and steps of MNIST and of a transformer under many layouts, as
examples/pick_a_layout.py does.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import quiet


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 12, 48])
    parser.add_argument("--oracle_python", help="a Python that has the classic release")
    parser.add_argument("--classic_layers", type=int, nargs="+", default=[1, 2, 6])
    parser.add_argument("--rank", action="store_true", help="measure steps under many layouts")
    parser.add_argument("--layouts", type=int, default=16)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    parse_arguments()  # before the seconds of the next line
    quiet.import_tensorflow()

import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.auto_mtf import explanation, models, step_time

MESHES = ["m:8,n:4", "a:8,b:8,c:8"]
SIZES = {
    "batch": 512, "length": 512, "vocab": 32768, "d_model": 1024, "heads": 16, "d_kv": 64,
    "d_ff": 4096,
}  # fmt: skip
SECONDS = 300  # that the classic may take


def transformer(layers: int) -> models.Program:
    return models.language_model(**SIZES, layers=layers)


def described(program: models.Program) -> dict:
    """Returns a graph as auto_mtf_classic.py reads it."""
    return {
        "operations": [
            [
                op.name,
                [t.name for t in op.inputs],
                [
                    [",".join(f"{d.name}:{d.size}" for d in t.shape), t.dtype.name]
                    for t in op.outputs
                ],
                sorted(op.unsplittable_dims),
            ]
            for op in program.graph.operations
        ],
        "outputs": [t.name for t in program.outputs],
    }


def our_times(program: models.Program, mesh_shape: str) -> list[str]:
    """Returns cells: seconds by objective, and the layout of least time."""
    start = time.perf_counter()
    mtf.auto_mtf.layout(program.graph, mesh_shape, program.outputs)
    memory = time.perf_counter() - start
    start = time.perf_counter()
    estimator = step_time.StepEstimator(program.graph, mesh_shape, program.outputs)
    best = estimator.solve()
    return [f"{memory:.2f}", f"{time.perf_counter() - start:.2f}", best.text]


def table_of_solving(layers: list[int]) -> None:
    rows = [["layers", "operations", "mesh", "memory s", "time s", "fastest layout"]]
    for count in layers:
        with tf.Graph().as_default():
            program = transformer(count)
            for mesh_shape in MESHES:
                cells = [f"{count}", f"{len(program.graph.operations):,}", mesh_shape]
                rows.append([*cells, *our_times(program, mesh_shape)])
    print("\n".join(explanation.table(rows, left=(2, 5))), flush=True)


def against_the_classic(python: str, layers: list[int]) -> None:
    import auto_mtf_classic

    rows = [["layers", "mesh", "ours s", "classic s", "our peak", "its peak"]]
    for count in layers:
        with tf.Graph().as_default(), tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "graph.json")
            Path(path).write_text(json.dumps(described(transformer(count))))
            for mesh_shape in MESHES:
                ours = auto_mtf_classic.seconds(path, mesh_shape)
                script = str(ROOT / "benchmarks" / "auto_mtf_classic.py")
                try:
                    done = subprocess.run(
                        [python, script, path, mesh_shape],
                        capture_output=True, text=True, check=True, timeout=SECONDS,
                        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
                    )  # fmt: skip
                    theirs = json.loads(done.stdout.splitlines()[-1])
                    cells = [f"{theirs['seconds']:.2f}", f"{theirs['peak']:,.0f}"]
                except subprocess.TimeoutExpired:
                    cells = [f"more than {SECONDS}", "?"]
                row = [f"{count}", mesh_shape, f"{ours['seconds']:.2f}", cells[0]]
                rows.append([*row, f"{ours['peak']:,.0f}", cells[1]])
    print("\n".join(explanation.table(rows, left=(1,))), flush=True)


def main() -> None:
    """Prints the tables."""
    options = parse_arguments()
    if options.rank:
        import pick_a_layout

        found = pick_a_layout.main(
            [f"--{name}={getattr(options, name)}" for name in ("layouts", "runs", "rounds")]
        )
        for name, tried in found.items():
            slower = tried[0].measured / min(t.measured for t in tried) - 1
            correlation = pick_a_layout.spearman([(t.estimated, t.measured) for t in tried])
            print(f"{name}: rank correlation {correlation:.2f}, chosen {slower:.0%} above the best")
        return
    if options.oracle_python:
        against_the_classic(options.oracle_python, options.classic_layers)
        return
    table_of_solving(options.layers)


if __name__ == "__main__":
    tf.disable_v2_behavior()
    tf.logging.set_verbosity(tf.logging.ERROR)
    main()
