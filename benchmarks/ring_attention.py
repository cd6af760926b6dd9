"""Compares attention in a ring with attention that gathers keys and values, over processes.

    python benchmarks/ring_attention.py
    python benchmarks/ring_attention.py --length 4096 --processes 2 --forms whole,blocked,ring

Each process has a part of the positions. "whole" has the logits of its queries and all keys at
once, "blocked" computes them by blocks, both from gathered keys and values; in "ring" and
"contiguous", keys and values are passed around, with and without an exchange of halves before.
What is printed, for value and gradients of causal attention, is the largest resident memory of a
process above that before the first step, and the CPU seconds of a step: of all processes, and of
the one that takes most.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import quiet

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

FORMS = ("whole", "blocked", "contiguous", "ring")
RINGS = {"ring": True, "contiguous": "contiguous"}  # the option of blocked_attention
STEPS = 2


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def attention(mtf: Any, tf: Any, mesh: Any, form: str, arguments: argparse.Namespace) -> list[Any]:
    """Returns sums of squares of the value and of the gradients of queries, keys and values."""
    dims = {
        "length": arguments.length,
        "memory_length": arguments.length,
        "heads": arguments.heads,
        "d_kv": arguments.channels,
    }
    length, memory, heads, channels = (mtf.Dimension(*size) for size in dims.items())

    def given(dim: Any) -> Any:
        return mtf.random_normal(mesh, mtf.Shape([dim, heads, channels]), stddev=0.3)

    q, k, v, dy = given(length), given(memory), given(memory), given(length)
    positions = [mtf.range(mesh, d, tf.int32) for d in (length, memory)]
    if form == "whole":
        logits = mtf.einsum([q, k], output_shape=[heads, length, memory])
        hidden = mtf.cast(mtf.less(*positions), tf.float32) * -1e9
        y = mtf.einsum([mtf.softmax(logits + hidden, memory), v], output_shape=q.shape)
    else:
        visible = [("greater_equal", *positions)]
        y = mtf.layers.blocked_attention(
            q, k, v, memory, channels, channels, visible=visible, ring=RINGS.get(form, False)
        )
    return [mtf.reduce_sum(mtf.square(x)) for x in (y, *mtf.gradients([y], [q, k, v], [dy]))]


def work(arguments: argparse.Namespace, form: str, directory: str) -> None:
    """Measures as one of the processes, and writes what was found."""
    quiet.import_tensorflow()
    import tensorflow.compat.v1 as tf
    from talking import peak_mb

    import mesh_tensorflow as mtf
    from mesh_tensorflow import launch
    from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate

    n = arguments.processes
    layout = "length:all" + (";memory_length:all" if form in RINGS else "")
    mine = launch.processes()
    server = mine.start_server(1)

    def program() -> dict[str, Any]:
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        found = attention(mtf, tf, mesh, form, arguments)
        lowering = mtf.Lowering(mesh.graph, {mesh: SimdMeshImpl(f"all:{n}", layout)})
        return {str(i): lowering.export_to_tf_tensor(x) for i, x in enumerate(found)}

    with tf.Graph().as_default():
        tf.set_random_seed(1)
        step = replicate(program, devices=mine.devices(per_process=1), local=mine.local(1))
        with tf.Session(server.target, config=mine.config(1)) as session:
            mine.initialize(session, None)
            before = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            cpu = []
            for _ in range(STEPS):
                start = time.process_time()
                values = mine.run(session, step)
                cpu.append(time.process_time() - start)
            found = {
                "mb": peak_mb() - before,
                "cpu": cpu[-1],
                "values": [float(values[str(i)]) for i in range(4)],
            }
            Path(directory, f"process_{mine.index}.json").write_text(json.dumps(found))
            mine.finish(server)


def measure(arguments: argparse.Namespace, form: str) -> list[dict[str, Any]]:
    """Returns what the processes of a form found."""
    with tempfile.TemporaryDirectory() as directory:
        command = [
            *(sys.executable, "-m", "mesh_tensorflow.launch"),
            *("--processes", str(arguments.processes), __file__),
            *("--processes", str(arguments.processes), "--length", str(arguments.length)),
            *("--heads", str(arguments.heads), "--channels", str(arguments.channels)),
            *("--worker", f"{form}:{directory}"),
        ]
        subprocess.run(command, check=True)
        return [json.loads(path.read_text()) for path in sorted(Path(directory).iterdir())]


def main() -> None:
    """Measures each form, and prints a table."""
    arguments = parse_arguments()
    if arguments.worker:
        form, _, directory = arguments.worker.partition(":")
        work(arguments, form, directory)
        return
    print(
        f"{arguments.processes} processes, length {arguments.length}, {arguments.heads} heads of "
        f"{arguments.channels}; value and gradients\n"
        f"{'':10s} {'peak MB':>8s} {'/ first':>8s} {'CPU s':>7s} {'most':>6s}   sums of squares"
    )
    first = None
    for form in arguments.forms.split(","):
        found = measure(arguments, form)
        mb = max(f["mb"] for f in found)
        first = first or mb
        values = " ".join(f"{x:.7g}" for x in found[0]["values"])
        cpu = [f["cpu"] for f in found]
        print(
            f"{form:10s} {mb:8.1f} {mb / first:8.2f} {sum(cpu):7.1f} {max(cpu):6.1f}   {values}",
            flush=True,
        )


if __name__ == "__main__":
    main()
