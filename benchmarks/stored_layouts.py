"""Measures the memory of processes that store variables in parts, and what they communicate.

    python benchmarks/stored_layouts.py --processes 4 --millions 64
    python benchmarks/stored_layouts.py --microbatches 4

For each stage of ZeRO it starts processes of one processor each, which train residual layers with
Adam in float32, the batch split over all of them. It prints the resident memory that each process
has gained from before the program was built until after some steps, the largest during the steps
after the first, and the elements that a step communicates, beside those of the paper's table: 4
bytes a weight for each of weights and gradients, 8 for the two slots (Rajbhandari et al., "ZeRO",
SC 2020). Between steps there are no gradients. With `--microbatches`, what is communicated in each
of them is counted once.

TensorFlow's allocators keep memory that tensors have had: that of oneDNN grows by doubling and
returns nothing, and the C library's keeps a heap for each thread. With `--allocator direct`, which
is the default, every large tensor is memory of its own that is returned when it is freed; with
`--allocator default`, processes allocate as they do elsewhere.
"""

import argparse

import quiet
import talking

STEPS = 4
# Bytes of a weight on each of n processors, and what is communicated, in data parallelism's unit.
FORMULAS = {
    0: (lambda n: 16.0, 1.0),
    1: (lambda n: 4 + 4 + 8 / n, 1.0),
    2: (lambda n: 4 + (4 + 8) / n, 1.0),
    3: (lambda n: 16 / n, 1.0),
}
# A ring sends this part of what a collective counts.
SENT = {"allreduce": 2.0, "reduce_scatter": 1.0, "allconcat": 1.0}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--millions", type=float, default=64.0, help="weights, in millions")
    parser.add_argument("--layers", type=int, default=32, help="layers, of one weight each")
    parser.add_argument("--rows", type=int, default=8, help="rows of the batch on each processor")
    parser.add_argument("--stages", default="0,1,2,3")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--allocator", choices=talking.ALLOCATORS, default="direct")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def train(arguments: argparse.Namespace, stage: int, directory: str) -> None:
    """Trains as one of the processes, and writes what was measured."""
    import numpy as np

    quiet.import_tensorflow()
    import tensorflow.compat.v1 as tf

    import mesh_tensorflow as mtf
    from mesh_tensorflow import launch
    from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate

    tf.disable_v2_behavior()
    n = arguments.processes
    size = int((arguments.millions * 1e6 / arguments.layers) ** 0.5) // (8 * n) * 8 * n
    batch = mtf.Dimension("batch", arguments.rows * n)
    dims = mtf.Dimension("d_in", size), mtf.Dimension("d_out", size)
    mine = launch.processes()
    server = mine.start_server(1)
    found: dict = {"weights": arguments.layers * size**2}

    def program() -> dict:
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        data = np.random.RandomState(0).randn(batch.size, size).astype(np.float32)
        x = mtf.import_tf_tensor(mesh, tf.constant(data), [batch, dims[0]])

        def loss_fn(x: mtf.Tensor) -> mtf.Tensor:
            for i in range(arguments.layers):
                initializer = tf.random_normal_initializer(stddev=1e-3)
                w = mtf.get_variable(mesh, f"w{i}", list(dims), initializer=initializer)
                y = mtf.einsum([x, w], [x.shape.dims[0], dims[1]])
                x += mtf.rename_dimension(y, "d_out", "d_in")
            return mtf.reduce_mean(mtf.square(x))

        loss, gradients, variables = mtf.optimize.accumulate_gradients(
            loss_fn, x, batch, arguments.microbatches
        )
        updates = mtf.optimize.AdamWeightDecayOptimizer(1e-4).apply_grads(gradients, variables)
        impl = SimdMeshImpl(f"all:{n}", "batch:all", zero=stage)
        lowering = mtf.Lowering(graph, {mesh: impl}, autostack=False)
        found["sent"] = sum(SENT[c.kind] * c.elements for _, _, c in lowering.collectives) / n
        train = tf.group([lowering.lowered_operation(op) for op in updates])
        return {"loss": lowering.export_to_tf_tensor(loss), "train": train}

    before = talking.memory("VmRSS")
    with tf.Graph().as_default():
        step = replicate(program, devices=mine.devices(per_process=1), local=mine.local(1))
        with tf.Session(server.target, config=mine.config(1)) as session:
            mine.initialize(session, None)
            mine.run(session, step)
            talking.forget_largest()
            found["losses"] = [float(mine.run(session, step)["loss"]) for _ in range(1, STEPS)]
            found["resident"] = talking.memory("VmRSS") - before
            found["largest"] = talking.memory("VmHWM") - before
            talking.leave(directory, mine.index, found)
            mine.finish(server)


def measure(arguments: argparse.Namespace, stage: int, millions: float) -> list[dict]:
    """What the processes of a stage measured, with some millions of weights."""
    options = [f"--millions={millions}"]
    for name in ("rows", "layers", "microbatches"):
        options.append(f"--{name}={getattr(arguments, name)}")
    return talking.measured_together(
        __file__, arguments.processes, options, str(stage), arguments.allocator
    )


def main() -> None:
    """Measures each stage, and prints a table."""
    arguments = parse_arguments()
    if arguments.worker:
        stage, _, directory = arguments.worker.partition(":")
        train(arguments, int(stage), directory)
        return
    print(
        f"{arguments.processes} processes, Adam in float32, bytes a weight on each process\n"
        "zero  formula  resident  largest in a step  sent / data parallelism    loss"
    )
    first = None
    for stage in map(int, arguments.stages.split(",")):
        # What a program takes whatever its size is measured with few weights.
        few, found = (measure(arguments, stage, millions) for millions in (0.1, arguments.millions))
        weights, sent = found[0]["weights"] - few[0]["weights"], found[0]["sent"]
        first = first or sent
        resident, largest = (
            (max(f[key] for f in found) - max(f[key] for f in few)) / weights
            for key in ("resident", "largest")
        )
        formula = FORMULAS[stage][0](arguments.processes)
        print(
            f"{stage:4d} {formula:8.2f} {resident:9.2f} {largest:18.2f} {sent / first:24.2f} "
            f"{found[0]['losses'][-1]:7.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
