"""How long a model of a folder takes to load, beside reading its file, and how much memory.

    python benchmarks/loading.py

writes a random Llama of a billion weights in bfloat16 (2 GB) to a temporary folder, and loads it in
processes of their own, from a warm page cache: on one device, and on 2x2 split by heads, d_ff and
vocab, and by ZeRO 3. "read" is the time of reading the file into memory, in the same process.
"load" is that of making the variables, all that `model.logits` does at its first call but for
tracing and computing. "peak" is the largest resident memory, minus that right before.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

CONFIG = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
}
PLACES = {
    "1": {},
    "2x2": {"mesh_shape": "x:2,y:2", "layout": "batch:x,heads:y,d_ff:y,vocab:y"},
    "8, zero=3": {"mesh_shape": "x:8", "layout": "batch:x", "zero": 3},
}


def write(folder, layers):
    """Writes the model, a tensor after another."""
    import numpy as np
    import tensorflow as tf
    from safetensors.numpy import save_file

    config = {**CONFIG, "num_hidden_layers": layers}
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config, f)
    d, hidden, kv = config["hidden_size"], config["intermediate_size"], 8 * 64
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], d], "model.norm.weight": [d]}
    for i in range(layers):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{n}_proj.weight": [d, d] for n in "qo"}
        shapes |= {f"{layer}.self_attn.{n}_proj.weight": [kv, d] for n in "kv"}
        shapes |= {f"{layer}.mlp.{n}_proj.weight": [hidden, d] for n in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = [d, hidden]
        shapes |= {f"{layer}.{n}_layernorm.weight": [d] for n in ("input", "post_attention")}
    # The numbers of one block again and again: what is in them takes no time to read.
    block = (np.random.RandomState(0).randn(2**20) * 0.02).astype(tf.bfloat16.as_numpy_dtype)
    tensors = {n: np.resize(block, shape) for n, shape in shapes.items()}
    save_file(tensors, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    return sum(t.size for t in tensors.values())


def resident():
    """Returns the resident memory and its peak, in MB; files that are mapped count too."""
    with open("/proc/self/statm") as f:
        now = int(f.read().split()[1]) * resource.getpagesize() / 1e6
    return now, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def load(folder, place, dtype, profile):
    """Loads it in this process; prints what was measured."""
    import mesh_tensorflow as mtf
    from mesh_tensorflow import VariableStore

    model = mtf.models.from_pretrained(folder, dtype=dtype, **PLACES[place])
    file = os.path.join(folder, "model.safetensors")
    begin = time.monotonic()
    with open(file, "rb", buffering=0) as f:
        buffer = bytearray(2**24)
        while f.readinto(buffer):
            pass
    read = time.monotonic() - begin
    del buffer
    spent = [0.0]
    slices = VariableStore.slices

    def timed(*args):
        begin = time.monotonic()
        found = slices(*args)
        spent[0] += time.monotonic() - begin
        return found

    VariableStore.slices = timed
    before, _ = resident()
    loaded = [0.0]
    if profile:
        import cProfile

        cProfile.runctx("model.logits([[1]] * 2)", {}, {"model": model}, sort="tottime")
    else:
        begin = time.monotonic()
        model.logits([[1]] * 2)
        loaded[0] = time.monotonic() - begin
    _, peak = resident()
    stored = sum(
        v.shape.num_elements() * v.dtype.size
        for name in model.store.names
        for v in model.store.slice_variables(name).values()
    )
    record = {"read": read, "load": spent[0], "first": loaded[0]}
    print(json.dumps({**record, "peak": peak - before, "stored": stored / 1e6}))


def main():
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--places", nargs="*", default=list(PLACES), choices=list(PLACES))
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        load(*options.one, options.profile)
        return
    with tempfile.TemporaryDirectory() as folder:
        weights = write(folder, options.layers)
        file = os.path.getsize(os.path.join(folder, "model.safetensors"))
        print(f"{weights / 1e6:.0f} million weights, a file of {file / 1e6:.0f} MB")
        print("place | dtype | read s | load s | load/read | first call s | peak MB | stored MB")
        for place in options.places:
            for dtype in options.dtypes:
                command = [sys.executable, __file__, "--one", folder, place, dtype]
                found = []
                for _ in range(options.repeats):
                    command += ["--profile"] * options.profile
                    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                    *further, last = done.stdout.strip().splitlines()
                    print("\n".join(further[:40]), end="")
                    found.append(json.loads(last))
                m = {n: statistics.median(r[n] for r in found) for n in found[0]}
                print(
                    f"{place} | {dtype} | {m['read']:.2f} | {m['load']:.2f} | "
                    f"{m['load'] / m['read']:.2f} | {m['first']:.1f} | {m['peak']:.0f} | "
                    f"{m['stored']:.0f}"
                )


if __name__ == "__main__":
    main()
