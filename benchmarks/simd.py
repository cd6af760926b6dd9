"""Measures how SIMD programs grow with the mesh, and what each process holds in memory.

    python benchmarks/simd.py                  # all of these
    python benchmarks/simd.py --only size      # nodes and seconds for 4, 16 and 64 processors
    python benchmarks/simd.py --only memory    # 1, 2 and 4 processes, weights split over them
    python benchmarks/simd.py --only sums      # what collectives cost in a step

Size: a transformer is built and lowered for a mesh of logical processors, data parallel along one
dimension and model parallel along the other, without running it. Memory: each process has one
processor; resident memory above what a process holds that trains a model without weights.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import quiet

HERE = pathlib.Path(__file__).resolve().parent
MESHES = {4: "rows:2;cols:2", 16: "rows:4;cols:4", 64: "rows:8;cols:8"}
LAYERS = 4
WEIGHT_MB = 256
# Freed memory goes back to the system at once, so that what is resident is what is in use.
# (oneDNN's allocator would keep it.)
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "TF_ENABLE_ONEDNN_OPTS": "0",
}
_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_mb() -> float:
    """Memory resident now, in MB."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * _PAGE / 2**20


def transformer_loss(mtf: Any, mesh: Any) -> Any:
    """The loss of a small transformer whose sizes 8 divides."""
    import tensorflow.compat.v1 as tf

    batch, length = mtf.Dimension("batch", 64), mtf.Dimension("length", 16)
    d_model, d_ff = mtf.Dimension("d_model", 64), mtf.Dimension("d_ff", 256)
    heads, d_kv = mtf.Dimension("heads", 8), mtf.Dimension("d_kv", 8)
    x = mtf.import_tf_tensor(mesh, tf.zeros([64, 16, 64]), [batch, length, d_model])
    for i in range(LAYERS):
        with tf.variable_scope(f"layer_{i}"):
            norm = mtf.layers.layer_norm(x, d_model, name="norm")
            x += mtf.layers.masked_local_attention_1d(
                norm, d_kv, heads, is_training=True, window_size=16, name="attention"
            )
            x += mtf.layers.dense_relu_dense(x, d_ff, is_training=True, name="ff")
    return mtf.reduce_mean(mtf.square(x))


def train_op(mtf: Any, graph: Any, loss: Any, mesh_impl: Any) -> dict[str, Any]:
    """Lowers a training step."""
    import tensorflow.compat.v1 as tf

    variables = graph.trainable_variables
    gradients = mtf.gradients([loss], [v.outputs[0] for v in variables])
    updates = mtf.optimize.SgdOptimizer(0.1).apply_grads(gradients, variables)
    lowering = mtf.Lowering(graph, {loss.mesh: mesh_impl})
    return {
        "loss": lowering.export_to_tf_tensor(loss),
        "train": tf.group([lowering.lowered_operation(op) for op in updates]),
    }


def measure_size(processors: int, kind: str) -> dict[str, float]:
    """Builds the transformer for a mesh; returns nodes and seconds."""
    quiet.import_tensorflow()
    import tensorflow.compat.v1 as tf

    import mesh_tensorflow as mtf

    devices = [f"/cpu:{i}" for i in range(processors)]
    layout = "batch:rows;heads:cols;d_ff:cols"
    inner: list[int] = []

    def program() -> dict[str, Any]:
        graph = mtf.Graph()
        loss = transformer_loss(mtf, mtf.Mesh(graph, "mesh"))
        if kind == "simd":
            impl: Any = mtf.simd_mesh_impl.SimdMeshImpl(MESHES[processors], layout)
        else:
            impl = mtf.placement_mesh_impl.PlacementMeshImpl(MESHES[processors], layout, devices)
        step = train_op(mtf, graph, loss, impl)
        inner.append(len(tf.get_default_graph().get_operations()))
        return step

    with tf.Graph().as_default() as tf_graph:
        start = time.perf_counter()
        if kind == "simd":
            mtf.simd_mesh_impl.replicate(program, devices=devices)
        else:
            program()
        seconds = time.perf_counter() - start
        nodes = len(tf_graph.get_operations())
    return {"program": inner[0], "outside": nodes if kind == "simd" else 0, "seconds": seconds}


def report_size(rounds: int) -> None:
    """Prints the table of nodes and seconds."""
    measure_size(4, "simd")  # what is made once in a process
    print(f"transformer of {LAYERS} layers, built and lowered; medians of {rounds}")
    print(f"{'processors':>10} {'kind':>10} {'nodes':>8} {'outside':>8} {'build s':>8} {'/ 4':>6}")
    for kind in ("simd", "placement"):
        first = None
        for processors in MESHES:
            found = [measure_size(processors, kind) for _ in range(rounds)]
            seconds = statistics.median(x["seconds"] for x in found)
            first = first or seconds
            print(
                f"{processors:10} {kind:>10} {found[0]['program']:8} {found[0]['outside']:8} "
                f"{seconds:8.2f} {seconds / first:6.2f}",
                flush=True,
            )


def memory_worker(path: str, size_mb: int) -> None:
    """Trains a dense layer by SIMD, one processor per process; reports the memory of each."""
    quiet.import_tensorflow()
    import tensorflow.compat.v1 as tf

    import mesh_tensorflow as mtf
    from mesh_tensorflow import launch

    mine = launch.processes()
    server = mine.start_server()

    def program() -> dict[str, Any]:
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        batch, d_in = mtf.Dimension("batch", 4), mtf.Dimension("in", 1024)
        hidden = mtf.Dimension("hidden", max(4, size_mb * 2**20 // 4 // 1024))
        x = mtf.import_tf_tensor(mesh, tf.ones([4, 1024]), [batch, d_in])
        w = mtf.get_variable(
            mesh, "w", mtf.Shape([d_in, hidden]), initializer=tf.zeros_initializer()
        )
        loss = mtf.reduce_mean(mtf.square(mtf.einsum([x, w], reduced_dims=[d_in]) - 1.0))
        impl = mtf.simd_mesh_impl.SimdMeshImpl(f"all:{mine.count}", "hidden:all")
        return train_op(mtf, graph, loss, impl)

    with tf.Graph().as_default():
        step = mtf.simd_mesh_impl.replicate(program, devices=mine.devices(), local=mine.local())
        with tf.Session(server.target, config=mine.config()) as session:
            mine.initialize(session)
            for _ in range(3):
                session.run(step)
            held = resident_mb()
            session.run(step)
    mine.finish(server)
    pathlib.Path(f"{path}.{mine.index}").write_text(json.dumps(held))


def held_by_processes(count: int, size_mb: int) -> list[float]:
    """Runs the memory worker in processes; returns what each holds, in MB."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "held")
        environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3", **ALLOCATOR)
        paths = [str(HERE.parent), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        subprocess.run(
            [
                sys.executable,
                "-m",
                "mesh_tensorflow.launch",
                "--processes",
                str(count),
                str(HERE / "simd.py"),
                "--worker",
                path,
                "--size_mb",
                str(size_mb),
            ],
            check=True,
            env=environment,
        )
        return [json.loads(pathlib.Path(f"{path}.{i}").read_text()) for i in range(count)]


def report_memory() -> None:
    """Prints the table of memory."""
    print(f"weights of {WEIGHT_MB} MB, split over processes")
    print(f"{'processes':>9} {'resident MB of each':>32} {'most / weights':>15}")
    for count in (1, 2, 4):
        empty = held_by_processes(count, 0)
        held = [a - b for a, b in zip(held_by_processes(count, WEIGHT_MB), empty)]
        shown = " ".join(f"{x:.0f}" for x in held)
        print(f"{count:9} {shown:>32} {max(held) / WEIGHT_MB:15.2f}", flush=True)


def report_sums(rounds: int) -> None:
    """Prints the CPU time of steps with and without collectives."""
    import systems

    quiet.import_tensorflow()
    import tensorflow.compat.v1 as tf

    from mesh_tensorflow._mesh.program import TfCollectives

    sums: list[int] = []
    allreduce = TfCollectives.allreduce

    def copied(self: Any, x: Any, mesh_axes: Any, reduction: str) -> Any:
        sums.append(x.shape.num_elements() * x.dtype.size)
        return tf.identity(x)

    steps = {}
    for name in ("placement", "simd", "simd, no sums"):
        TfCollectives.allreduce = copied if "no sums" in name else allreduce  # type: ignore[method-assign]
        with tf.Graph().as_default():
            kind = "logical" if name == "placement" else "simd"
            program = systems.build("mtf", "b12", "2x2", kind)()
            session = tf.Session(config=tf.ConfigProto(device_count={"CPU": 4}))
            session.run(tf.global_variables_initializer(), program.feeds.make())
            if program.copy_masters is not None:
                session.run(program.copy_masters)
            steps[name] = session.make_callable([program.loss, program.step])
            steps[name]()
    print(f"each processor: {len(sums)} sums of {sum(sums) / 2**20:.1f} MB")
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.process_time()
            for _ in range(5):
                step()
            seconds[name].append((time.process_time() - start) / 5)
    for name, found in seconds.items():
        print(f"{name:>30} {1000 * statistics.median(found):6.0f} CPU ms a step")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["size", "memory", "sums"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--size_mb", type=int, default=WEIGHT_MB, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(HERE.parent))
    if arguments.worker:
        memory_worker(arguments.worker, arguments.size_mb)
        return
    reports = {
        "size": lambda: report_size(arguments.rounds),
        "memory": report_memory,
        "sums": lambda: report_sums(arguments.rounds),
    }
    for name, report in reports.items():
        if arguments.only in (None, name):
            report()


if __name__ == "__main__":
    main()
