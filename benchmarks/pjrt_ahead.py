"""Compiles training steps of mtf.pjrt ahead of time, for meshes that are not here.

    python benchmarks/pjrt_ahead.py                                  # 4 to 512 devices
    python benchmarks/pjrt_ahead.py --model 4.9e9 --devices 512
    python benchmarks/pjrt_ahead.py --devices 4 512 --stop lower     # nothing is compiled

The models are the language models of "Mesh-TensorFlow: Deep Learning for Supercomputers": 6 layers,
d_model 1024, heads of 256, a vocabulary of 32768; d_ff and heads make the number of weights. The
batch is 256 sequences of 256 tokens, the layout batch:rows, and vocab, d_ff and heads over cols.
A step computes the loss and its gradients, and updates the weights by Adafactor. Neither weights
nor data are made: arguments are shapes.

Each row is a process of its own, in which JAX shows as many devices as the mesh has. "trace" is the
program in this package and in TensorFlow's operations, "lower" that in StableHLO, and "compile" the
program that XLA's partitioner makes of it for one device. "peak MB" is the largest memory of the
process, TensorFlow and JAX included.
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

ROOT = Path(__file__).resolve().parent.parent
LAYERS, D_MODEL, D_KV, VOCABULARY, BATCH, LENGTH = 6, 1024, 256, 32768, 256, 256
MODELS = {  # d_ff and heads
    "0.14e9": (4096, 4), "0.22e9": (8192, 8), "0.37e9": (16384, 16), "0.67e9": (32768, 32),
    "1.3e9": (65536, 64), "2.5e9": (131072, 128), "4.9e9": (262144, 256),
}  # fmt: skip
MESHES = {4: (2, 2), 8: (2, 4), 16: (4, 4), 64: (8, 8), 256: (16, 16), 512: (16, 32)}
LAYOUT = "batch:rows,vocab:cols,d_ff:cols,heads:cols"
STAGES = ("trace", "lower", "compile")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="0.67e9", choices=MODELS, help="number of weights")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--devices", type=int, nargs="+", default=list(MESHES), choices=MESHES)
    parser.add_argument("--stop", default="compile", choices=STAGES, help="the last stage")
    parser.add_argument("--worker", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def language_model(mtf: Any, model: str, layers: int) -> Any:
    """A language model of the package, with learned positions."""
    from mesh_tensorflow.transformer import transformer, transformer_layers

    d_ff, heads = MODELS[model]
    attention = {"num_heads": heads, "key_value_size": D_KV}
    stack = transformer.make_layer_stack(
        [
            [transformer_layers.SelfAttention, attention],
            [transformer_layers.DenseReluDense, {"hidden_size": d_ff}],
        ],
        lambda made: transformer.LayerStack(made, dropout_rate=0.0, norm_epsilon=1e-6),
        layers,
    )
    return transformer.Unitransformer(
        stack,
        d_model=D_MODEL,
        input_vocab_size=VOCABULARY,
        output_vocab_size=VOCABULARY,
        autoregressive=True,
        max_length=LENGTH,
    )


def training(mtf: Any, arguments: argparse.Namespace, counted: dict[str, int]) -> Any:
    """A function of ids that builds and lowers a training step; it counts the weights."""
    from mesh_tensorflow.transformer import transformer

    def step(ids: Any) -> Any:
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        targets = mtf.import_tf_tensor(mesh, ids, f"batch:{BATCH},length:{LENGTH}")
        inputs = transformer.autoregressive_inputs(targets)
        model = language_model(mtf, arguments.model, arguments.layers)
        loss = model.call_simple(inputs, targets, compute_loss=True)[1]
        weights = mesh.graph.trainable_variables
        counted["weights"] = sum(v.shape.size for v in weights)
        gradients = mtf.gradients([loss], [v.value for v in weights])
        optimizer = mtf.optimize.AdafactorOptimizer(learning_rate=0.01, decay_rate=0.99)
        updates = optimizer.apply_grads(gradients, weights)
        lowering = mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()})
        for update in updates:
            lowering.lowered_operation(update)
        return lowering.export_to_tf_tensor(loss)

    return step


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compiles a step for a mesh, and returns what was measured, and what XLA says of it."""
    rows, cols = MESHES[arguments.worker]
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={rows * cols}"
    sys.path.insert(0, str(ROOT))
    import quiet

    quiet.import_tensorflow()
    import jax
    import numpy as np

    import mesh_tensorflow as mtf
    from mesh_tensorflow.transformer import transformer  # noqa: F401  # not counted below

    found: dict[str, Any] = {}
    compiled = mtf.pjrt.function(
        training(mtf, arguments, found), mesh_shape=f"rows:{rows},cols:{cols}", layout=LAYOUT
    )
    ids = jax.ShapeDtypeStruct((BATCH, LENGTH), np.int32)
    start = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal start
        found[name], start = time.perf_counter() - start, time.perf_counter()

    compiled.program((ids,), {})
    lap("trace")
    if arguments.stop != "trace":
        lowered = compiled.lower(ids)
        lap("lower")
        found["lines"] = len(lowered.stablehlo.splitlines())
    if arguments.stop == "compile":
        start = time.perf_counter()
        memory = lowered.memory()
        lap("compile")
        found["arguments"], found["temporaries"] = (
            memory.argument_size_in_bytes,
            memory.temp_size_in_bytes,
        )
        found["collectives"] = [
            [c.kind, "+".join(c.mesh_dims), c.count, c.bytes] for c in lowered.collectives()
        ]
    found["peak MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return found


def in_new_process(arguments: argparse.Namespace, devices: int) -> dict[str, Any]:
    """Measures in a new process, which has as many devices."""
    command = [
        sys.executable, __file__, "--worker", str(devices), "--model", arguments.model,
        "--layers", str(arguments.layers), "--stop", arguments.stop,
    ]  # fmt: skip
    environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3")
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    if run.returncode:
        sys.exit(run.stderr[-3000:])
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    """Prints a table of all meshes, and one of the collectives of each."""
    arguments = parse_arguments()
    if arguments.worker:
        print(json.dumps(measure(arguments)))
        return
    stages = STAGES[: STAGES.index(arguments.stop) + 1]
    compiles = arguments.stop == "compile"
    head = ["devices", "mesh", *(f"{stage} s" for stage in stages), "lines", "peak MB"]
    head += ["arguments MB", "temporaries MB"] * compiles
    collectives = []
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for devices in arguments.devices:
        found = in_new_process(arguments, devices)
        mesh = "x".join(map(str, MESHES[devices]))
        cells = [str(devices), mesh, *(f"{found[stage]:.1f}" for stage in stages)]
        cells += [str(found.get("lines", "")), f"{found['peak MB']:.0f}"]
        if compiles:
            cells += [f"{found[key] / 1e6:.0f}" for key in ("arguments", "temporaries")]
            collectives += [[mesh, *c] for c in found["collectives"]]
        print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\n{found['weights'] / 1e9:.2f}e9 weights")
    if collectives:
        print("\n| mesh | collective | over | count | MB on one device |\n|---|---|---|---|---|")
    for mesh, kind, dims, count, size in collectives:
        print(f"| {mesh} | {kind} | {dims} | {count} | {size / 1e6:.2f} |")


if __name__ == "__main__":
    main()
