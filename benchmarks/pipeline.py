"""Measures a pipeline on several processes: CPU time of a step, and memory of activations.

    python benchmarks/pipeline.py --processes 4 --microbatches 8

Residual feed-forward layers, as many in each stage, are trained as `mtf.layers.pipeline` on several
processes of one processor each, and one after the other on a single process. Printed are

* the CPU time of a step, of all processes together, beside the ideal: that of the layers in a row,
  divided by 1 - bubble, since a stage computes in its bubbles, too;
* the memory that a step needs at most in one process, less that of a step with a small batch: what
  grows with the batch, which is activations.

TensorFlow's allocators keep memory that tensors have had: that of oneDNN grows by doubling and
returns nothing, and the C library's keeps a heap for each thread. With `--allocator direct`, which
is the default, every large tensor is memory of its own that is returned when it is freed; with
`--allocator default`, processes allocate as they do elsewhere.
"""

import argparse
import resource

import quiet
import talking

STEPS = 6
FIRST = 2  # steps that are not measured
PASSED = ("microbatches", "layers", "d_model", "recompute")  # options of processes


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--processes", type=int, default=4, help="as many as stages")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4, help="layers in each stage")
    parser.add_argument("--rows", type=int, default=8192, help="rows of the batch")
    parser.add_argument("--d_model", type=int, default=256)
    parser.add_argument("--recompute", type=int, default=0, help="1: keep inputs of stages only")
    parser.add_argument("--allocator", choices=talking.ALLOCATORS, default="direct")
    parser.add_argument("--stages", type=int, help=argparse.SUPPRESS)  # also if one process has all
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def cpu_seconds() -> float:
    """CPU time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def train(arguments: argparse.Namespace, kind: str, rows: int, directory: str) -> None:
    """Takes steps as one of the processes, and writes what was measured."""
    quiet.import_tensorflow()
    import tensorflow.compat.v1 as tf

    import mesh_tensorflow as mtf
    from mesh_tensorflow import launch
    from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate

    tf.disable_v2_behavior()
    stages = mtf.Dimension("stages", arguments.stages)
    batch = mtf.Dimension("batch", rows)
    d, f = mtf.Dimension("d", arguments.d_model), mtf.Dimension("f", 4 * arguments.d_model)
    mine = launch.processes()
    server = mine.start_server(1)

    def stage(x: mtf.Tensor, *weights: mtf.Tensor) -> mtf.Tensor:
        for wi, wo in zip(weights[::2], weights[1::2]):
            h = mtf.relu(mtf.einsum([x, wi], reduced_dims=[d]))
            x += mtf.einsum([h, wo], output_shape=x.shape)
        return x

    def program(rows_of_batch: tf.Tensor) -> dict:
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.import_tf_tensor(mesh, rows_of_batch, [batch, d])
        weights = []
        for i in range(arguments.layers):
            for name, dims in (("wi", [d, f]), ("wo", [f, d])):
                small = tf.random_normal_initializer(stddev=0.01)
                weights.append(
                    mtf.get_variable(mesh, f"{name}{i}", [stages, *dims], initializer=small)
                )
        if kind == "pipeline":
            y = mtf.layers.pipeline(
                stage,
                x,
                weights,
                stages,
                batch,
                arguments.microbatches,
                recompute=bool(arguments.recompute),
            )
        else:
            y = x
            for of_stage in zip(*(mtf.unstack(w, stages) for w in weights)):
                y = stage(y, *of_stage)
        loss = mtf.reduce_mean(mtf.square(y))
        variables = graph.trainable_variables
        gradients = mtf.gradients([loss], [v.value for v in variables])
        updates = mtf.optimize.SgdOptimizer(1e-3).apply_grads(gradients, variables)
        n = mine.count
        impl = SimdMeshImpl(f"all:{n}", "stages:all" if n > 1 else "")
        lowering = mtf.Lowering(graph, {mesh: impl}, autostack=False)
        train = tf.group([lowering.lowered_operation(op) for op in updates])
        return {"loss": lowering.export_to_tf_tensor(loss), "train": train}

    with tf.Graph().as_default():
        tf.set_random_seed(1)
        # Drawn in each step, with the same seed in all processes: of a constant the first process
        # would hold a copy for each of them, and those that TensorFlow folds parts into.
        data = tf.random.uniform([rows, d.size], -1.7, 1.7, seed=0)
        step = replicate(program, [data], devices=mine.devices(per_process=1), local=mine.local(1))
        with tf.Session(server.target, config=mine.config(1)) as session:
            mine.initialize(session, None)
            losses = []
            begin = 0.0
            for i in range(STEPS):
                if i == FIRST:
                    talking.forget_largest()
                    begin = cpu_seconds()
                losses.append(float(mine.run(session, step)["loss"]))
            found = {
                "cpu": (cpu_seconds() - begin) / (STEPS - FIRST),
                "largest": talking.memory("VmHWM"),
                "losses": losses,
            }
            talking.leave(directory, mine.index, found)
            mine.finish(server)


def measure(arguments: argparse.Namespace, kind: str, rows: int) -> list[dict]:
    """What the processes measured, with a batch of some rows."""
    processes = arguments.processes if kind == "pipeline" else 1
    options = [f"--{name}={getattr(arguments, name)}" for name in PASSED]
    options.append(f"--stages={arguments.processes}")
    return talking.measured_together(
        __file__, processes, options, f"{kind}:{rows}", arguments.allocator
    )


def main() -> None:
    """Measures both, and prints a table."""
    arguments = parse_arguments()
    if arguments.worker:
        kind, rows, directory = arguments.worker.split(":", 2)
        train(arguments, kind, int(rows), directory)
        return
    k, m = arguments.processes, arguments.microbatches
    bubble = (k - 1) / (m + k - 1)
    print(f"{k} stages of {arguments.layers} layers, {m} microbatches, bubble {bubble:.3f}")
    print("              CPU s a step   ideal  ratio  activations MiB    loss")
    ideal = activations = 0.0
    losses = []
    for kind in ("plain", "pipeline"):
        few, found = (measure(arguments, kind, rows) for rows in (m * k, arguments.rows))
        cpu = sum(f["cpu"] for f in found)
        ideal = ideal or cpu / (1 - bubble)
        grown = max(b["largest"] - a["largest"] for a, b in zip(few, found)) / 2**20
        activations = activations or grown
        ratio = f"{ideal:7.2f} {cpu / ideal:6.2f}" if kind == "pipeline" else " " * 14
        print(
            f"{kind:12s} {cpu:13.2f} {ratio} {grown:10.0f} ({grown / activations:4.2f}) "
            f"{found[0]['losses'][-1]:7.5f}",
            flush=True,
        )
        losses.append(found[0]["losses"][-1])
    if abs(losses[1] - losses[0]) > 1e-4 * losses[0]:
        raise SystemExit(f"the pipeline computes something else: losses {losses}")


if __name__ == "__main__":
    main()
