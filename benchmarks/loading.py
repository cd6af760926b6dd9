"""How long a model of a folder takes to load, beside reading its file, and how much memory.

    python benchmarks/loading.py

writes a random Llama of a billion weights in bfloat16 (2 GB) to a temporary folder, and loads it in
processes of their own, from a warm page cache: on one device, and on 2x2 split by heads, d_ff and
vocab, and by ZeRO 3. `--folder` loads a model that is there, with one file of weights; `--cold` has
the system forget the file before it is read, and before it is loaded. "read" is the time of reading
the file into memory, in the same process.
"load" is that of making the variables, all that `model.logits` does at its first call but for
tracing and computing. "peak" is the largest resident memory, minus that right before.
"""

import argparse
import json
import os
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


def resident():
    """Returns the resident memory and its peak, in MB; files that are mapped count too."""
    with open("/proc/self/status") as f:
        found = dict(line.split(":", 1) for line in f)
    return tuple(int(found[name].split()[0]) * 1024 / 1e6 for name in ("VmRSS", "VmHWM"))


def forget(file):
    """Drops a file from the page cache."""
    number = os.open(file, os.O_RDONLY)
    os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(number)


def load(folder, place, dtype, profile, cold):
    """Loads it in this process; prints what was measured."""
    import numpy as np

    import mesh_tensorflow as mtf
    from mesh_tensorflow import VariableStore

    model = mtf.models.from_pretrained(folder, dtype=dtype, **PLACES[place])
    file = os.path.join(folder, "model.safetensors")
    if cold:
        forget(file)
    begin = time.monotonic()
    np.fromfile(file, np.uint8)
    read = time.monotonic() - begin
    if cold:
        forget(file)
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")  # the peak is counted anew
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
    parser.add_argument("--folder", help="a model to load, with one file; else one is written")
    parser.add_argument("--cold", action="store_true", help="nothing of the file is in memory")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        load(*options.one, options.profile, options.cold)
        return
    with tempfile.TemporaryDirectory() as folder:
        if options.folder:
            folder = options.folder
        else:
            write(folder, options.layers)
        file = os.path.getsize(os.path.join(folder, "model.safetensors"))
        print(f"a file of {file / 1e6:.0f} MB")
        print("place | dtype | read s | load s | load/read | first call s | peak MB | stored MB")
        for place in options.places:
            for dtype in options.dtypes:
                command = [sys.executable, __file__, "--one", folder, place, dtype]
                found = []
                for _ in range(options.repeats):
                    command += ["--profile"] * options.profile + ["--cold"] * options.cold
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
