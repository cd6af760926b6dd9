"""Measures Mesh TensorFlow against plain TensorFlow and the classic release.

    python benchmarks/run.py --quick
    python benchmarks/run.py --oracle_python VENV/bin/python --json results.json

See README.md for what is measured and how.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import groups
import report
from groups import Config, Group

HERE = Path(__file__).resolve().parent
SYSTEMS = ("mtf", "tf", "tf_xla", "classic")  # others run if they are named
ALL_PLACEMENTS = ("one", "logical", "simd", "xla")
PLACEMENTS = (*ALL_PLACEMENTS, "logical_default")
CHUNKS = 4
DETERMINISM_RUNS = 3
DETERMINISM_STEPS = 40


class Failed(Exception):
    """A worker ended early; the text is the last line of its output."""


class Process:
    """A worker that is running."""

    def __init__(self, config: Config, oracle_python: str):
        self.config = config
        python = oracle_python if config.system == "classic" else sys.executable
        environment = dict(os.environ, PYTHONHASHSEED="0")
        if config.system == "classic":
            environment.pop("PYTHONPATH", None)
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [python, str(HERE / "worker.py")] + config.arguments(),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
        )
        self.times: list[float] = []
        self.cpu = 0.0
        self.ready = self._read()

    def _read(self) -> dict[str, Any]:
        """The next answer."""
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            lines = self._log.read().strip().splitlines() or ["no output"]
            raise Failed(lines[-1][:300])
        return json.loads(line)

    def _ask(self, command: str) -> dict[str, Any]:
        """Sends a command and waits for the answer."""
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # reading tells why
        return self._read()

    def steps(self, count: int) -> None:
        """Does and books measured steps."""
        answer = self._ask(f"steps {count}")
        self.times += answer["times"]
        self.cpu += answer["cpu"]

    def end(self) -> dict[str, Any]:
        """Ends the worker; returns all that it told."""
        answer = self._ask("end")
        self._process.stdin.close()
        self._process.wait()
        return dict(
            self.ready, **answer, times=self.times, cpu=self.cpu, workload=self.config.workload
        )

    def kill(self) -> None:
        """Ends the worker at once."""
        self._process.kill()
        self._process.wait()


def start(config: Config, oracle_python: str, errors: dict[str, str]) -> Process | None:
    """Starts a worker and waits until it is ready, or records why it failed."""
    try:
        return Process(config, oracle_python)
    except (Failed, OSError) as error:
        errors[config.label] = str(error)
        return None


def run_round(
    group: Group, steps: int, oracle_python: str, errors: dict[str, str], turn: int
) -> dict[str, dict[str, Any]]:
    """One round: new processes, built one after the other, then steps in turns."""
    shift = turn % len(group.configs)
    order = group.configs[shift:] + group.configs[:shift]
    started = [start(c, oracle_python, errors) for c in order if c.label not in errors]
    processes = [p for p in started if p is not None]
    per_chunk = max(1, steps * group.step_factor // CHUNKS)
    results: dict[str, dict[str, Any]] = {}
    try:
        for chunk in range(CHUNKS):
            for process in processes if chunk % 2 == 0 else processes[::-1]:
                process.steps(per_chunk)
        for process in processes:
            results[process.config.label] = process.end()
    finally:
        for process in processes:
            process.kill()
    return results


def run_group(group: Group, arguments: argparse.Namespace) -> dict[str, Any]:
    """All rounds of a group, with a summary."""
    errors: dict[str, str] = {}
    rounds = []
    begin = time.time()
    for turn in range(arguments.rounds):
        rounds.append(run_round(group, arguments.steps, arguments.oracle_python, errors, turn))
    summary = report.summarize(group, rounds, errors)
    summary["seconds"] = time.time() - begin
    return summary


def run_determinism(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Whether separate runs of one program end at the same loss to the bit."""
    results = []
    for config in groups.determinism_configs(arguments.placements):
        errors: dict[str, str] = {}
        ends = []
        for _ in range(DETERMINISM_RUNS):
            process = start(config, arguments.oracle_python, errors)
            if process is None:
                break
            process.steps(DETERMINISM_STEPS)
            ends.append(process.end()["losses"][-1])
        same = len(ends) == DETERMINISM_RUNS and len({loss.hex() for loss in ends}) == 1
        results.append(
            {
                "workload": config.workload,
                "placement": config.placement,
                "mesh": config.mesh,
                "losses": ends,
                "same": same,
                "error": errors.get(config.label, ""),
            }
        )
    return results


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="measured steps in a round")
    parser.add_argument(
        "--only",
        default="",
        help="names of groups, workloads or meshes, with commas; also dropout and determinism",
    )
    parser.add_argument("--quick", action="store_true", help="mesh 2x2 only, 2 rounds of 12 steps")
    parser.add_argument(
        "--placement",
        default="all",
        help=f"all, or some of {', '.join(PLACEMENTS)}, with commas; all is without the last",
    )
    parser.add_argument(
        "--systems",
        default=",".join(SYSTEMS),
        help="also jax (jit on one device), jax_named (by shardings on the mesh), pjrt and dtensor",
    )
    parser.add_argument("--json", default="", help="write everything to this file")
    parser.add_argument(
        "--oracle_python", default="", help="a Python that has the classic mesh-tensorflow 0.1.21"
    )
    arguments = parser.parse_args()
    arguments.systems = arguments.systems.split(",")
    if not arguments.oracle_python and "classic" in arguments.systems:
        arguments.systems.remove("classic")
    if arguments.placement == "all":
        arguments.placement = ",".join(ALL_PLACEMENTS)
    arguments.placements = arguments.placement.split(",")
    for name in arguments.placements:
        if name not in PLACEMENTS:
            parser.error(f"--placement {name!r} is none of all, {', '.join(PLACEMENTS)}")
    if arguments.quick:
        arguments.rounds, arguments.steps = 2, 12
    return arguments


def main() -> None:
    """Runs the requested groups, printing each table when it is ready."""
    arguments = parse_arguments()
    header = report.machine_facts()
    rate = report.product_rate()
    header.update(rounds=arguments.rounds, steps=arguments.steps, rate=rate)
    print(report.format_header(header), flush=True)
    results: dict[str, Any] = {"header": header, "groups": [], "determinism": []}

    def save() -> None:
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(results, indent=1))

    for group in groups.all_groups(arguments.systems, arguments.placements, arguments.quick):
        if groups.wanted(group.name, arguments.only):
            results["groups"].append(run_group(group, arguments))
            print(report.format_group(results["groups"][-1], rate), flush=True)
            save()
    if groups.wanted("determinism", arguments.only) and "mtf" in arguments.systems:
        results["determinism"] = run_determinism(arguments)
        print(report.format_determinism(results["determinism"]))
    print(report.format_targets(results["groups"]))
    save()


if __name__ == "__main__":
    main()
