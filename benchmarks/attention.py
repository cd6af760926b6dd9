"""Compares attention by blocks with attention that has all logits at once, in time and memory.

python benchmarks/attention.py
python benchmarks/attention.py --lengths 4096 --kinds bias,causal --rounds 5
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import quiet

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
BATCH, HEADS, CHANNELS = 1, 8, 64
KINDS = ("none", "causal", "bias", "relative", "dropout", "heads_first")
STEPS = 5


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="256,512,1024,2048,4096")
    parser.add_argument("--kinds", default="none", help=f"some of {','.join(KINDS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", default="", help="blocked or plain: measure once, print JSON")
    return parser.parse_args()


def peak_mb() -> float:
    """The largest resident memory since it was last reset, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**10


def build(kind: str, length: int, blocked: bool):
    """Returns TensorFlow operations: the initializer, and value and gradients."""
    quiet.import_tensorflow()
    import tensorflow.compat.v1 as tf

    import mesh_tensorflow as mtf
    from mesh_tensorflow.layers import _masks
    from mesh_tensorflow.layers._visibility import Buckets
    from mesh_tensorflow.transformer import attention

    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    sizes = {"batch": BATCH, "length": length, "memory_length": length, "heads": HEADS}
    sizes["buckets"] = 32
    names = ["batch", "heads", "length"] if kind == "heads_first" else ["batch", "length", "heads"]

    def given(names: list) -> mtf.Tensor:
        dims = [mtf.Dimension(name, sizes.get(name, CHANNELS)) for name in names]
        init = tf.random_normal([d.size for d in dims], stddev=0.3)
        return mtf.import_tf_tensor(mesh, tf.Variable(init), dims)

    q, dy = given([*names, "d_kv"]), given([*names, "d_kv"])
    k, v = (
        given(["memory_length" if name == "length" else name for name in names] + ["d_kv"])
        for _ in range(2)
    )
    memory, channels = mtf.Dimension("memory_length", length), q.shape.dims[-1]
    xs = [q, k, v]
    bias = None
    if kind == "bias":
        bias = given(["heads", "length", "memory_length"])
        xs.append(bias)
    if kind == "causal":
        positions = mtf.range(mesh, mtf.Dimension("length", length), tf.int32)
        bias = mtf.layers.attention_mask_autoregressive(positions)
    if kind == "relative":  # as self-attention of T5's decoder has it
        positions = mtf.range(mesh, mtf.Dimension("length", length), tf.int32)
        hidden = mtf.layers.attention_mask_autoregressive(positions)
        values = given(["heads", "buckets"])
        there = mtf.layers.rename_length_to_memory_length(positions)
        buckets = Buckets(sizes["buckets"], False, 128)
        far = _masks.Distances(buckets, values, values.shape.dims[1], positions, there)
        whole = hidden + _masks.distance_bias(far)
        bias = _masks.made_of(whole, hidden.made_of.visible, None, [far])
        xs.append(values)
    rate = 0.1 if kind == "dropout" else 0.0
    y = attention.attention(q, k, v, memory, channels, channels, bias, rate, blocked=blocked)
    results = [y, *mtf.gradients([y], xs, [dy])]
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("", "", [""])
    lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    exports = [lowering.export_to_tf_tensor(x) for x in results]
    return tf.global_variables_initializer(), [x.op for x in exports]


def measure(kind: str, length: int, blocked: bool) -> dict:
    """Returns seconds, CPU seconds and the peak of memory of value and gradients."""
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    initialize, operations = build(kind, length, blocked)
    with tf.Session() as session:
        session.run(initialize)
        run = session.make_callable(operations)
        base = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        run()
        times = []
        for _ in range(STEPS):
            start = time.perf_counter(), time.process_time()
            run()
            times.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    seconds, cpu = (statistics.median(column) for column in zip(*times))
    return {"ms": 1e3 * seconds, "cpu_ms": 1e3 * cpu, "mb": peak_mb() - base}


def worker(form: str, kind: str, length: int) -> dict:
    """Measures in a new process."""
    command = [
        sys.executable,
        __file__,
        "--worker",
        form,
        "--kinds",
        kind,
        "--lengths",
        str(length),
    ]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def compare(kind: str, length: int, rounds: int) -> None:
    """Prints medians of both forms, and medians of the ratios of each round."""
    found = [
        {form: worker(form, kind, length) for form in ("plain", "blocked")} for _ in range(rounds)
    ]
    line = f"{kind:12s} {length:6d}"
    for unit in ("ms", "cpu_ms", "mb"):
        plain, blocked = ([r[form][unit] for r in found] for form in ("plain", "blocked"))
        ratios = [b / a for a, b in zip(plain, blocked)]
        line += f"  {statistics.median(plain):8.1f} {statistics.median(blocked):8.1f}"
        line += f"  {statistics.median(ratios):5.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    print(line, flush=True)


def main() -> None:
    """Measures once, or compares."""
    arguments = parse_arguments()
    kinds = arguments.kinds.split(",")
    lengths = [int(n) for n in arguments.lengths.split(",")]
    if arguments.worker:
        print(json.dumps(measure(kinds[0], lengths[0], arguments.worker == "blocked")))
        return
    print(f"batch {BATCH}, {HEADS} heads of {CHANNELS}; value and gradients; medians")
    print(
        f"{'':12s} {'length':>6s}  {'plain ms':>8s} {'blocked':>8s}  {'ratio':17s}"
        f"{'plain CPU':>10s} {'blocked':>8s}  {'ratio':17s}{'plain MB':>10s} {'blocked':>8s}  ratio"
    )
    for kind in kinds:
        for length in lengths:
            compare(kind, length, arguments.rounds)


if __name__ == "__main__":
    main()
