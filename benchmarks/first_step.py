"""Seconds from the start of `transformer.main` until the loss of its first step, of T5-small.

    python benchmarks/first_step.py
    python benchmarks/first_step.py --rounds 5 --mesh_shape "rows:2,cols:2"

A new process trains one step on random ids, in a directory of its own. Its lines are read as they
come; "mesh" is when it has told which mesh it found, before anything is built.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
BINDINGS = """
utils.run.model_type = "bitransformer"
utils.run.train_dataset_fn = @random_pairs.random_pairs
utils.run.vocabulary = @vocabulary.ByteVocabulary()
ByteVocabulary.extra_ids = 31869
utils.run.sequence_length = {"inputs": 128, "targets": 32}
utils.run.batch_size = ("sequences_per_batch", 8)
utils.run.train_steps = 1
utils.run.learning_rate_schedule = @learning_rate_schedules.constant_learning_rate
constant_learning_rate.learning_rate = 0.01
dropout_rate = 0.0
num_layers = 6
d_model = 512
d_ff = 2048
num_heads = 8
d_kv = 64
EncDecAttention.num_heads = %num_heads
EncDecAttention.key_value_size = %d_kv
utils.get_variable_dtype.activation_dtype = "float32"
"""
EVENTS = {"mesh": r"\bmesh\b", "first step": r"\bloss\b"}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mesh_shape", default="")
    parser.add_argument("--layout_rules", default="")
    parser.add_argument("--lines", action="store_true", help="print what the process prints")
    return parser.parse_args()


def command(folder: str, arguments: argparse.Namespace) -> list[str]:
    """The command that is timed."""
    bindings = [line for line in BINDINGS.splitlines() if line]
    bindings.append(f"utils.run.mesh_shape = {arguments.mesh_shape!r}")
    bindings.append(f"utils.run.layout_rules = {arguments.layout_rules!r}")
    return [
        sys.executable,
        *("-m", "mesh_tensorflow.transformer.main", "--module_import=random_pairs"),
        f"--model_dir={folder}/model",
        *(f"--gin_param={binding}" for binding in bindings),
    ]


def seconds(arguments: argparse.Namespace) -> dict[str, float]:
    """Runs the command; returns when each of EVENTS was there, and when the process ended."""
    path = os.pathsep.join([str(HERE.parent), str(HERE)])
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        process = subprocess.Popen(
            command(folder, arguments), env={**os.environ, "PYTHONPATH": path}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        lines = []
        for line in process.stdout or ():
            now = time.perf_counter() - start
            lines.append(f"{now:6.1f} {line}")
            for event, pattern in EVENTS.items():
                if event not in found and re.search(pattern, line):
                    found[event] = now
        if process.wait() or "first step" not in found:
            raise SystemExit(f"the process ended with {process.returncode}:\n{''.join(lines)}")
        found["end"] = time.perf_counter() - start
    if arguments.lines:
        print("".join(lines))
    return found


def main() -> None:
    """Prints the medians of all rounds, and the smallest and the largest."""
    arguments = parse_arguments()
    rounds = [seconds(arguments) for _ in range(arguments.rounds)]
    for event in rounds[0]:
        times = [found[event] for found in rounds]
        print(f"{event:>10} {median(times):6.1f} s ({min(times):.1f}-{max(times):.1f})")


if __name__ == "__main__":
    main()
