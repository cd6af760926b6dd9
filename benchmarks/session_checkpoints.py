"""Measures savers of a session that drives several processes of JAX.

    python benchmarks/session_checkpoints.py

A program has matrices of float32 on a 2x2 mesh of CPU devices, in two processes, each split over
both dimensions. `mtf.checkpoint.Saver` writes and reads in both processes, part by part, and
tf.train.Saver in the first, whole. For each, it prints by how many MiB the resident memory of the
first process grows at the peak, and the seconds. See README.md.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import quiet
from checkpoints import ALLOCATOR, resident_mb

ROWS = COLUMNS = 4096  # 64 MiB a matrix


def measured(call: Callable[[], object]) -> tuple[float, float]:
    """Returns by how much the resident memory grows at the peak of a call, and its seconds."""
    os.sync()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before, start = resident_mb(), time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    lines = Path("/proc/self/status").read_text().splitlines()
    [peak] = [int(line.split()[1]) / 2**10 for line in lines if line.startswith("VmHWM:")]
    return max(peak - before, 0.0), seconds


def in_chief(directory: str, system: str, mib: int) -> None:
    """Prints what a saver takes, in the first process."""
    import tensorflow.compat.v1 as tf

    import mesh_tensorflow as mtf

    def program() -> tf.Operation:
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        for i in range(mib * 2**20 // (4 * ROWS * COLUMNS)):
            mtf.get_variable(
                mesh, f"w{i}", f"rows:{ROWS},columns:{COLUMNS}", initializer=tf.ones_initializer()
            )
        updates = [mtf.assign(v, 2.0 * v.value) for v in mesh.graph.all_variables]
        impl = mtf.GspmdMeshImpl("x:2,y:2", "rows:x,columns:y")
        lowering = mtf.Lowering(mesh.graph, {mesh: impl})
        return tf.group([lowering.lowered_operation(u) for u in updates])

    with tf.Graph().as_default(), tf.Session() as session:
        step = mtf.pjrt.in_session(program)
        made = {"mtf": mtf.checkpoint.Saver, "tf": tf.train.Saver}[system](sharded=True)
        for v in tf.global_variables():  # one after the other: initial values are whole
            session.run(v.initializer)
        session.run(step)
        path = os.path.join(directory, "model")
        further = {"write_meta_graph": False, "write_state": False}
        found = [measured(lambda: made.save(session, path, **further))]
        found.append(measured(lambda: made.restore(session, path)))
    print(json.dumps(found), flush=True)


def run(system: str, mib: int) -> list[tuple[float, float]]:
    """Starts the processes; returns what they measured of saving and of restoring."""
    devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    launcher = [sys.executable, "-m", "mesh_tensorflow.launch", "--runtime", "pjrt"]
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [*launcher, "--processes", "2", __file__, "--worker", directory, system]
            + ["--mib", str(mib)],
            env={**os.environ, **ALLOCATOR, **devices},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise SystemExit(f"{system} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Runs both savers in turns, or is a process of one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--worker", nargs=2, metavar=("DIRECTORY", "SYSTEM"), help=argparse.SUPPRESS
    )
    parser.add_argument("--mib", type=int, default=384, help="size of all variables")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.worker:
        quiet.import_tensorflow()
        import mesh_tensorflow as mtf

        mtf.pjrt.run_in_chief(lambda: in_chief(*arguments.worker, arguments.mib))
        return
    rounds: dict[str, list[Any]] = {"mtf": [], "tf": []}
    for _ in range(arguments.rounds):
        for system, found in rounds.items():
            found.append(run(system, arguments.mib))
    print(f"{arguments.mib} MiB of variables")
    for system, found in rounds.items():
        for i, what in enumerate(("save", "restore")):
            memory, seconds = (statistics.median(r[i][j] for r in found) for j in range(2))
            print(f"{system:4}{what:8}{memory:6.0f} MiB{seconds:7.2f} s")


if __name__ == "__main__":
    main()
