"""How building, steps and memory grow with layers, processors, length and vocabulary; start times.

    python benchmarks/growth.py                   # all tables
    python benchmarks/growth.py --quick           # small sizes, in seconds
    python benchmarks/growth.py --only vocabulary,start

A language model of the package (learned positions, d_model 256, d_ff 1024, 4 heads of 64) is built
with gradients, lowered and trained by gradient descent on one device. Each row is a process of its
own. `x` are ratios to the row before. Processors are a mesh whose step is built and lowered, but
not run. `start` builds T5-11B as a SIMD program and searches layouts for it. `recompute` gives a
stack of 12 layers a budget for activations, in MB.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import quiet

ROOT = Path(__file__).resolve().parent.parent
_PAGE = os.sysconf("SC_PAGE_SIZE")
SIZES = {
    "layers": 4, "length": 256, "vocabulary": 8192, "batch": 4, "d_model": 256, "d_ff": 1024,
    "heads": 4, "d_kv": 64,
}  # fmt: skip
TABLES = {
    "layers": ([12, 24, 48, 96], [1, 2]),
    "length": ([128, 256, 512, 1024, 2048, 4096], [16, 32]),
    "vocabulary": ([1024, 4096, 16384, 65536, 131072], [64, 128]),
    "processors": ([4, 16, 64, 256, 512], [4, 8]),
}
FIXED = {"layers": {"length": 64, "batch": 2}, "length": {"batch": 1}, "vocabulary": {"length": 64}}
QUICK = {"length": 32, "vocabulary": 256}  # at most
T5_11B = {
    "layers": 24, "length": 512, "vocabulary": 32128, "batch": 512, "d_model": 1024,
    "d_ff": 65536, "heads": 128, "d_kv": 128,
}  # fmt: skip
RECOMPUTE = ["none", 10_000, 300, 150, 0]  # MB of activations that are stored
MESHES = {4: (2, 2), 8: (2, 4), 16: (4, 4), 64: (8, 8), 256: (16, 16), 512: (16, 32)}
LAYOUT = "batch:rows;heads:cols;d_ff:cols;vocab:cols"


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join([*TABLES, "start", "recompute"]))
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def resident_mb() -> float:
    """Memory resident now, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE / 2**20


def peak_mb() -> float:
    """The largest resident memory of this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def model(mtf: Any, sizes: dict[str, int], both: bool) -> Any:
    """A language model with learned positions; or T5, with biases of distances."""
    from mesh_tensorflow.transformer import transformer, transformer_layers

    heads = {"num_heads": sizes["heads"], "key_value_size": sizes["d_kv"]}
    relative = {"relative_attention_type": "bias_shared"} if both else {}
    own = [transformer_layers.SelfAttention, {**heads, **relative}]
    crossed = [transformer_layers.EncDecAttention, heads]
    dense = [transformer_layers.DenseReluDense, {"hidden_size": sizes["d_ff"]}]

    budget = sizes.get("recompute_mb")
    options = {} if budget is None else {"recompute_budget": 2**20 * budget}

    def stack_of(made: list) -> Any:
        return transformer.LayerStack(made, dropout_rate=0.0, norm_epsilon=1e-6, **options)

    def side(layers: list, **options: Any) -> Any:
        stack = transformer.make_layer_stack(
            layers,
            stack_of,
            sizes["layers"],
        )
        return transformer.Unitransformer(
            stack,
            d_model=sizes["d_model"],
            input_vocab_size=sizes["vocabulary"],
            max_length=sizes["length"],
            positional_embedding=not both,
            **options,
        )

    out = {"output_vocab_size": sizes["vocabulary"], "autoregressive": True}
    if not both:
        return side([own, dense], **out)
    return transformer.Bitransformer(
        side([own, dense], autoregressive=False, output_vocab_size=None, name="encoder"),
        side([own, crossed, dense], name="decoder", **out),
    )


def training(mtf: Any, tf: Any, sizes: dict[str, int], both: bool = False) -> tuple:
    """Builds a training step; returns graph, mesh, loss and updates."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    shape = mtf.convert_to_shape(f"batch:{sizes['batch']},length:{sizes['length']}")
    ids = tf.random_uniform(shape.to_integer_list, 2, sizes["vocabulary"], tf.int32, seed=1)
    targets = mtf.import_tf_tensor(mesh, ids, shape)
    from mesh_tensorflow.transformer import transformer

    inputs = targets if both else transformer.autoregressive_inputs(targets)
    loss = model(mtf, sizes, both).call_simple(inputs, targets, compute_loss=True)[1]
    weights = graph.trainable_variables
    gradients = mtf.gradients([loss], [v.outputs[0] for v in weights])
    optimizer = mtf.optimize.AdafactorOptimizer() if both else mtf.optimize.SgdOptimizer(0.01)
    return graph, mesh, loss, optimizer.apply_grads(gradients, weights)


def lowered(mtf: Any, tf: Any, built: tuple, impl: Any) -> list:
    """Lowers a training step; returns what a step fetches."""
    graph, mesh, loss, updates = built
    lowering = mtf.Lowering(graph, {mesh: impl})
    step = tf.group([lowering.lowered_operation(op) for op in updates])
    return [lowering.export_to_tf_tensor(loss), step, lowering.copy_masters_to_slices()]


def measure_step(sizes: dict[str, int]) -> dict[str, float]:
    """Builds, lowers and trains on one device."""
    quiet.import_tensorflow()
    import tensorflow.compat.v1 as tf

    import mesh_tensorflow as mtf
    from mesh_tensorflow.transformer import transformer  # noqa: F401  # not counted below

    tf.disable_v2_behavior()
    start = time.perf_counter()
    built = training(mtf, tf, sizes)
    graph_s = time.perf_counter() - start
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("", "", [""])
    loss, step, copies = lowered(mtf, tf, built, impl)
    lower_s = time.perf_counter() - start - graph_s
    before = resident_mb()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(copies)
        run = session.make_callable([loss, step])
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
    return {
        "graph s": graph_s,
        "lower s": lower_s,
        "nodes": len(tf.get_default_graph().get_operations()),
        "first s": seconds[0],
        "step ms": 1e3 * min(seconds[1:]),
        "MB": peak_mb() - before,
    }


def measure_mesh(processors: int, kind: str, sizes: dict[str, int], both: bool) -> dict[str, float]:
    """Builds and lowers for a mesh, by placement or as a SIMD program, without running it."""
    quiet.import_tensorflow()
    import tensorflow.compat.v1 as tf

    import mesh_tensorflow as mtf
    from mesh_tensorflow.transformer import transformer  # noqa: F401  # not counted below

    tf.disable_v2_behavior()
    rows, cols = MESHES[processors]
    shape = f"rows:{rows};cols:{cols}"
    seconds: dict[str, float] = {}

    def program(make: Any) -> list:
        start = time.perf_counter()
        built = training(mtf, tf, sizes, both)
        seconds["graph s"] = time.perf_counter() - start
        # Initial values and copies are made by who runs it.
        return lowered(mtf, tf, built, make())[:2]

    start, before = time.perf_counter(), peak_mb()
    if kind == "simd":
        mtf.simd_mesh_impl.replicate(
            lambda: program(lambda: mtf.simd_mesh_impl.SimdMeshImpl(shape, LAYOUT)),
            devices=[f"/job:worker/task:{i // 8}/cpu:{i % 8}" for i in range(processors)],
            local=range(min(8, processors)),
        )
    else:
        devices = [f"/cpu:{i}" for i in range(processors)]
        program(lambda: mtf.placement_mesh_impl.PlacementMeshImpl(shape, LAYOUT, devices))
    total = time.perf_counter() - start
    return {
        **seconds,
        "lower s": total - seconds["graph s"],
        "nodes": len(tf.get_default_graph().get_operations()),
        "MB": peak_mb() - before,
    }


def measure_search(sizes: dict[str, int]) -> dict[str, float]:
    """Searches layouts of the training step for 16x32 processors."""
    quiet.import_tensorflow()
    import tensorflow.compat.v1 as tf

    import mesh_tensorflow as mtf

    tf.disable_v2_behavior()
    graph, _, loss, _ = training(mtf, tf, sizes, True)
    found = {}
    for objective in ("memory", "time"):
        start = time.perf_counter()
        mtf.auto_mtf.layout(graph, "rows:16;cols:32", [loss], objective=objective)
        found[f"{objective} s"] = time.perf_counter() - start
    return found


WORKERS = {"step": measure_step, "mesh": measure_mesh, "search": measure_search}


def measure(worker: str, *given: Any) -> dict[str, float]:
    """Measures in a new process."""
    environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3")
    run = subprocess.run(
        [sys.executable, __file__, "--worker", json.dumps([worker, *given])],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    if run.returncode:
        sys.exit(run.stderr[-3000:])
    return json.loads(run.stdout.splitlines()[-1])


def show(name: str, found: dict[str, float], before: dict[str, float]) -> None:
    """Prints a row, and ratios to the row before."""
    cells = []
    for key, value in found.items():
        digits = 2 if key.endswith(" s") else 0
        ratio = f" x{value / before[key]:.2f}" if before.get(key) else ""
        cells.append(f"{key} {value:9.{digits}f}{ratio:6}")
    print(f"{name:>16}  " + "  ".join(cells), flush=True)


def report(table: str, quick: bool) -> None:
    """Prints a table."""
    print(f"== {table}")
    before: dict[str, float] = {}
    for n in TABLES[table][1 if quick else 0]:
        if table == "processors":
            sizes = {**SIZES, "vocabulary": 32768, "batch": 512, "heads": 32, "d_kv": 8}
            for kind in ("simd", "placement") if n <= 64 else ("simd",):
                show(f"{n} {kind}", measure("mesh", n, kind, sizes, False), {})
            continue
        sizes = {**SIZES, **FIXED[table], table: n}
        if quick:
            sizes |= {
                "length": min(sizes["length"], 32),
                "vocabulary": min(sizes["vocabulary"], 256),
            }
        found = measure("step", sizes)
        show(str(n), found, before)
        before = found


def report_start(quick: bool) -> None:
    """Prints how long it takes to build the program of T5-11B, and to search layouts for it."""
    sizes = {**T5_11B, "layers": 1} if quick else T5_11B
    print(f"== T5-11B, {sizes['layers']} + {sizes['layers']} layers, with Adafactor")
    show("auto_mtf, 16x32", measure("search", sizes), {})
    show("program, 2x4", measure("mesh", 8, "simd", sizes, True), {})
    show("program, 16x32", measure("mesh", 512, "simd", sizes, True), {})


def report_recompute(quick: bool) -> None:
    """Prints time and memory of steps with several budgets."""
    sizes = {**SIZES, "layers": 2 if quick else 12, "batch": 1 if quick else 8, "vocabulary": 256}
    print(f"== recompute: {sizes['layers']} layers, {sizes['batch']} x {sizes['length']} tokens")
    before: dict[str, float] = {}
    for budget in RECOMPUTE[:: 2 if quick else 1]:
        own = {} if budget == "none" else {"recompute_mb": budget}
        found = measure("step", {**sizes, **own})
        show(f"{budget} MB" if own else "no budget", found, before)
        before = before or found


def main() -> None:
    """Prints the tables that are asked for."""
    arguments = parse_arguments()
    if arguments.worker:
        sys.path.insert(0, str(ROOT))
        worker, *given = json.loads(arguments.worker)
        print(json.dumps(WORKERS[worker](*given)))
        return
    reports = {"start": report_start, "recompute": report_recompute}
    for table in arguments.only.split(","):
        if table in reports:
            reports[table](arguments.quick)
        else:
            report(table, arguments.quick)


if __name__ == "__main__":
    main()
