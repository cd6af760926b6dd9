"""Compares T5-small with PyTorch and Hugging Face's transformers: training, greedy, beam search.

    python benchmarks/t5_small.py --torch_python VENV/bin/python

VENV is an environment with torch, transformers and safetensors. The weights are random ones of
transformers, converted for this package. A time counts only if the systems agree: their first loss
to 1e-4, or every id that they decode. `--systems torch,one_bf16,2x2_bf16` computes in bfloat16 in
this package; its loss may differ by 2%. `2x2_merged` sets `merge="memory"`.

Each round starts a process for each system; they take turns. A ratio is taken within a round; what
is printed is the median of the rounds and, in brackets, the smallest and the largest.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import quiet
from report import product_rate
from talking import Process

HERE = Path(__file__).resolve().parent
SYSTEMS = ("torch", "one", "2x2")
TASKS = ("train", "greedy", "beam")
SIZES = {
    "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6,
    "num_decoder_layers": 6, "num_heads": 8,
}  # fmt: skip
BATCH, INPUTS, TARGETS, BEAMS = 8, 128, 32, 4
LEARNING_RATE = 0.01


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--torch_python", default="", help="the Python of an environment with torch"
    )
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=3, help="turns of each system in a round")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions in a turn")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    for name in ("--worker", "--task", "--folder"):
        parser.add_argument(name, default="", help="for the measured process")
    return parser.parse_args()


def ids() -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, none of which is padding."""
    rng = np.random.default_rng(0)
    inputs, targets = (rng.integers(2, 32000, (BATCH, n)) for n in (INPUTS, TARGETS))
    return inputs.astype(np.int32), targets.astype(np.int32)


def train_flops() -> float:
    """Multiply-adds of the matrix products of a training step, times two."""
    s = SIZES
    width = s["num_heads"] * s["d_kv"]
    attention = 4 * s["d_model"] * width
    dense = 2 * s["d_model"] * s["d_ff"]
    encoder = s["num_layers"] * INPUTS * (attention + dense + 2 * INPUTS * width)
    # Keys and values of the encoder's output are computed once for each input position.
    crossed = TARGETS * attention / 2 + INPUTS * attention / 2 + 2 * TARGETS * INPUTS * width
    own = TARGETS * (attention + dense + 2 * TARGETS * width)
    decoder = s["num_decoder_layers"] * (own + crossed)
    logits = TARGETS * s["d_model"] * s["vocab_size"]
    return 2.0 * 3 * BATCH * (encoder + decoder + logits)


def start(system: str, task: str, folder: str, arguments: argparse.Namespace) -> Process:
    """Starts a system's process on a task."""
    is_torch = system == "torch"
    python = arguments.torch_python if is_torch else sys.executable
    return Process(
        system,
        [python, __file__, "--worker", system, "--task", task, "--folder", folder,
         "--threads", str(arguments.threads)],
        drop=("PYTHONPATH",) if is_torch else (),
    )  # fmt: skip


def work(arguments: argparse.Namespace) -> None:
    """Serves as one of the systems."""
    given = arguments.task, arguments.folder, arguments.threads
    if arguments.worker == "torch":
        import t5_torch

        t5_torch.work(*given)
        return
    sys.path.insert(0, str(HERE.parent))
    quiet.import_tensorflow()
    import t5_mesh

    t5_mesh.work(*given, arguments.worker)


def run_round(task: str, folder: str, turn: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns by system: milliseconds, peak MB, and the rate of matrix products."""
    systems = arguments.systems.split(",")
    processes = [start(s, task, folder, arguments) for s in systems[:: -1 if turn % 2 else 1]]
    check(task, {p.name: p.ready for p in processes})
    seconds: dict[str, list[float]] = {p.name: [] for p in processes}
    peaks = {}
    for number in range(arguments.turns):
        for p in processes[:: -1 if number % 2 else 1]:
            answer = p.ask(arguments.repeats)
            seconds[p.name] += answer["seconds"]
            peaks[p.name] = answer["peak_mb"]
    for p in processes:
        p.end()
    rate = product_rate() if task == "train" else 0.0
    return {s: {"ms": 1e3 * median(seconds[s]), "peak_mb": peaks[s], "rate": rate} for s in systems}


def check(task: str, ready: dict[str, Any]) -> None:
    """Ends the program if the systems do not agree."""
    outcomes = {name: answer["outcome"] for name, answer in ready.items()}
    first, *rest = outcomes
    for other in rest:
        a, b = outcomes[first], outcomes[other]
        allowed = 2e-2 if other.endswith("_bf16") else 1e-4
        equal = abs(a - b) <= allowed * abs(a) if task == "train" else a == b
        if not equal:
            sys.exit(f"{task}: {first} and {other} differ:\n{str(a)[:400]}\n{str(b)[:400]}")


def report(task: str, rounds: list[dict[str, Any]]) -> str:
    """Returns a line for each system with its ratios to the first one."""
    lines = []
    first = next(iter(rounds[0]))
    for system in rounds[0]:
        ms, mb = (median(r[system][k] for r in rounds) for k in ("ms", "peak_mb"))
        line = f"{task:7}{system:6}{ms:9.1f} ms {mb:7.0f} MB"
        if task == "train":
            rate = train_flops() / ms / 1e6
            line += f" {rate:6.0f} GFLOP/s"
            share = rate / median(r[system]["rate"] for r in rounds)
            line += f" ({share:.0%} of a large product's rate)"
        else:
            line += f" {ms / TARGETS:7.1f} ms a token"
        if system != first:
            for key, text in (("ms", "time"), ("peak_mb", "memory")):
                ratios = sorted(r[system][key] / r[first][key] for r in rounds)
                line += f"   {text} / {first} {median(ratios):.2f} "
                line += f"({ratios[0]:.2f}-{ratios[-1]:.2f})"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    """Makes the weights, and runs the tasks."""
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments)
        return
    if not arguments.torch_python:
        sys.exit(
            "name the Python of an environment with torch: python -m venv VENV; "
            "VENV/bin/pip install torch transformers safetensors; --torch_python VENV/bin/python"
        )
    with tempfile.TemporaryDirectory() as folder:
        maker = start("torch", "make", folder, arguments)
        maker.end()
        for task in arguments.tasks.split(","):
            rounds = [run_round(task, folder, n, arguments) for n in range(arguments.rounds)]
            print(report(task, rounds), flush=True)


if __name__ == "__main__":
    main()
