"""Compares two forms of attention in time and memory: by blocks, and with all logits at once.

python benchmarks/attention.py
python benchmarks/attention.py --lengths 4096 --kinds bias,causal --rounds 5
python benchmarks/attention.py --lengths 2048 --kinds heads_first --forms blocked,loop

The form "loop" is written in the language: a `while_loop` over blocks of the memory, computed again
for the gradients of each block of queries.
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
FORMS = ("plain", "blocked", "loop")
BLOCK = 256  # of the form "loop"
STEPS = 5


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="256,512,1024,2048,4096")
    parser.add_argument("--kinds", default="none", help=f"some of {','.join(KINDS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--forms", default="plain,blocked", help=f"two of {','.join(FORMS)}")
    parser.add_argument("--worker", default="", help="a form: measure once, print JSON")
    return parser.parse_args()


def peak_mb() -> float:
    """The largest resident memory since it was last reset, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**10


def attention_in_a_loop(q, k, v, memory, channels, is_causal: bool):
    """Returns attention with one block of logits at a time, by operations of the language."""
    import tensorflow.compat.v1 as tf

    import mesh_tensorflow as mtf

    length = next(d for d in q.shape if d.name == "length")
    queries, within = mtf.Dimension("queries", BLOCK), mtf.Dimension("within", BLOCK)
    blocks = mtf.Dimension("blocks", memory.size // BLOCK)

    def first(x, dim, inner):
        """Cuts a dimension, and has its blocks first, so that each is one run of memory."""
        outer = mtf.Dimension("blocks", dim.size // BLOCK)
        rest = [inner if d == dim else d for d in x.shape]
        return mtf.transpose(mtf.replace_dimensions(x, dim, [outer, inner]), [outer, *rest])

    def of_queries(n, some, k, v):
        shape = some.shape - channels
        at = mtf.range(q.mesh, queries, tf.int32) + n * BLOCK

        def body(i, largest, total, weighted):
            keys, values = mtf.gather(k, i, blocks), mtf.gather(v, i, blocks)
            logits = mtf.einsum([some, keys], shape + within)
            if is_causal:
                there = mtf.range(q.mesh, within, tf.int32) + i * BLOCK
                hidden = mtf.to_float(mtf.less(at, there))
                logits += hidden * -1e9
            top = mtf.reduce_max(mtf.stop_gradient(logits), reduced_dim=within)
            new = mtf.maximum(largest, top)
            weights, kept = mtf.exp(logits - new), mtf.exp(largest - new)
            total = total * kept + mtf.reduce_sum(weights, reduced_dim=within)
            weighted = weighted * kept + mtf.einsum([weights, values], some.shape)
            return [i + 1, new, total, weighted]

        end = n + 1 if is_causal else blocks.size
        zero = mtf.constant(q.mesh, 0, dtype=tf.int32)
        lowest = mtf.constant(q.mesh, -1e30, shape)
        start = [zero, lowest, mtf.zeros(q.mesh, shape), mtf.zeros(q.mesh, some.shape)]
        _, _, total, weighted = mtf.while_loop(lambda i, *_: mtf.less(i, end), body, start)
        return weighted / total

    k, v = first(k, memory, within), first(v, memory, within)
    cut = mtf.unstack(first(q, length, queries), mtf.Dimension("blocks", length.size // BLOCK))
    made = [
        mtf.recompute_grad(lambda some, k, v, n=n: of_queries(n, some, k, v), [some, k, v])
        for n, some in enumerate(cut)
    ]
    at = q.shape.dims.index(length)
    stacked = mtf.stack(made, "blocks", axis=at)
    return mtf.replace_dimensions(stacked, stacked.shape.dims[at : at + 2], length)


def build(kind: str, length: int, form: str):
    """Returns TensorFlow operations: the initializer, and value and gradients."""
    quiet.import_tensorflow()
    import tensorflow.compat.v1 as tf

    import mesh_tensorflow as mtf
    from mesh_tensorflow.layers import _masks
    from mesh_tensorflow.layers._masks import Buckets
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
    if form == "loop":
        if kind not in ("none", "causal", "heads_first"):
            raise ValueError(f"the form loop has no {kind}")
        y = attention_in_a_loop(q, k, v, memory, channels, kind == "causal")
    else:
        blocked = form == "blocked"
        y = attention.attention(q, k, v, memory, channels, channels, bias, rate, blocked=blocked)
    results = [y, *mtf.gradients([y], xs, [dy])]
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("", "", [""])
    lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    exports = [lowering.export_to_tf_tensor(x) for x in results]
    return tf.global_variables_initializer(), [x.op for x in exports]


def measure(kind: str, length: int, form: str) -> dict:
    """Returns seconds, CPU seconds and the peak of memory of value and gradients."""
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    initialize, operations = build(kind, length, form)
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


def compare(kind: str, length: int, rounds: int, forms: list[str]) -> None:
    """Prints medians of both forms, and medians of the ratios of each round."""
    found = [{form: worker(form, kind, length) for form in forms} for _ in range(rounds)]
    line = f"{kind:12s} {length:6d}"
    for unit in ("ms", "cpu_ms", "mb"):
        first, second = ([r[form][unit] for r in found] for form in forms)
        ratios = [b / a for a, b in zip(first, second)]
        line += f"  {statistics.median(first):11.1f} {statistics.median(second):8.1f}"
        line += f"  {statistics.median(ratios):4.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    print(line, flush=True)


def main() -> None:
    """Measures once, or compares."""
    arguments = parse_arguments()
    kinds = arguments.kinds.split(",")
    lengths = [int(n) for n in arguments.lengths.split(",")]
    if arguments.worker:
        print(json.dumps(measure(kinds[0], lengths[0], arguments.worker)))
        return
    print(f"batch {BATCH}, {HEADS} heads of {CHANNELS}; value and gradients; medians")
    forms = arguments.forms.split(",")
    columns = "".join(
        f"  {f'{forms[0]} {unit}':>11s} {forms[1]:>8s}  {'ratio':16s}"
        for unit in ("ms", "CPU", "MB")
    )
    print(f"{'':12s} {'length':>6s}{columns}")
    for kind in kinds:
        for length in lengths:
            compare(kind, length, arguments.rounds, forms)


if __name__ == "__main__":
    main()
