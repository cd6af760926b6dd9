"""Writes what the classic's BERT programs make of texts to fixtures/bert_data.json.

Run with the oracle's Python (see README.md):  python -m oracle.make_bert

The classic's programs cannot be imported together, so each part is a process of its own.
"""

import json
import os
import subprocess
import sys
import tempfile
from unittest import mock

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fixtures", "bert_data.json")


def on_placed_mesh(bert_cases):
    """Lets model functions that are for TPUs alone be lowered for one processor of this machine."""
    import mesh_tensorflow as mtf

    def placed(shape, layout, *args, **kwargs):
        return mtf.placement_mesh_impl.PlacementMeshImpl(shape, layout, [""] * shape.size)

    mtf.simd_mesh_impl.SimdMeshImpl = placed
    context = mock.MagicMock(
        num_hosts=1, tpu_host_placement_function=lambda host_id=0: "/device:CPU:0"
    )
    bert_cases.PARAMS["context"] = context


def part(name):
    import classic_shim  # noqa: F401  (first: makes the classic importable)
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    tf.logging.set_verbosity(tf.logging.ERROR)
    sys.modules["tensorflow_datasets"] = mock.MagicMock()
    from helpers.oracle import bert_cases

    sys.argv = [
        sys.argv[0],
        "--vocab_file=x",
        "--output_dir=x",
        "--bert_config_file=x",
        "--data_dir=x",
        "--task_name=x",
    ]
    tf.flags.FLAGS(sys.argv, known_only=True)
    if name.startswith("run_"):
        on_placed_mesh(bert_cases)
    with tempfile.TemporaryDirectory() as directory:
        return bert_cases.PARTS[name](directory)


def main():
    if len(sys.argv) > 1:
        name, path = sys.argv[1:]
        found = part(name)
        with open(path, "w") as f:
            json.dump(found, f)
        return
    facts = {}
    from helpers.oracle import bert_cases

    for name in bert_cases.PARTS:
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "part.json")
            subprocess.run([sys.executable, "-m", "oracle.make_bert", name, path], check=True)
            with open(path) as f:
                facts[name] = json.load(f)
    with open(PATH, "w") as f:
        json.dump(facts, f, sort_keys=True, separators=(",", ":"))


if __name__ == "__main__":
    main()
