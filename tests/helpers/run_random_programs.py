"""Runs random programs, each unsplit and in some layouts, and writes a line for each to a file.

python tests/helpers/run_random_programs.py --first 0 --count 10000 --minutes 60 --out programs.jsonl

Seeds that the file has are left out: a run that has ended, or was ended, goes on where it was. The
last line of the output counts what the file has. `--seed N` runs one program, and prints what it
was shrunk to if layouts differ.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import os
import pathlib
import resource
import sys
import time
import traceback
import warnings

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
# Each program runs a few steps only: it is worth no effort of XLA's.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

from helpers import random_programs  # noqa: E402
from helpers.random_programs import Program  # noqa: E402

MOST_MEMORY = 4 << 30  # bytes; then the process starts itself anew
TRIES = 60  # of shrinking
CLEARED_EACH = 8  # programs; a collection of all objects takes a fifth of a short program's time


def outcome(program, placing, expected):
    """Returns "same", "refused: ...", or what differs."""
    try:
        random_programs.check(program, placing, expected)
    except AssertionError as e:
        return f"differs: {e}"
    except Exception as e:
        refused = random_programs.is_refused(e)
        return f"refused: {e}" if refused else f"crash: {traceback.format_exc(limit=-3)}"
    return "same"


def shrunk(program, placing):
    """Returns a smaller program that differs in the same placing."""

    def differs(smaller):
        try:
            found = outcome(smaller, placing, random_programs.run(smaller))
        except Exception:  # the smaller program has lost what the layout names, or its loss
            return False
        return found.startswith("differs") or (
            found.startswith("crash") and found.splitlines()[-1] == last
        )

    last = outcome(program, placing, random_programs.run(program)).splitlines()[-1]
    tries, at = 0, 0
    while at < len(program.instructions) and tries < TRIES:
        rest = program.instructions[:at] + program.instructions[at + 1 :]
        tries += 1
        smaller = program._replace(instructions=rest)
        if differs(smaller):
            program = smaller
        else:
            at += 1
    for simple in ({"optimizer": None}, {"recompute": False}, {"microbatches": 1}):
        smaller = program._replace(**simple)
        if smaller != program and differs(smaller):
            program = smaller
    return program


def record_of(seed):
    """Returns what is to be written about the program of a seed."""
    begun = time.monotonic()
    record = {"seed": seed, "placings": [], "found": []}
    try:
        program, placings = random_programs.drawn(seed)
        expected = random_programs.run(program)
    except Exception as e:
        refused = random_programs.is_refused(e)
        why = str(e) if refused else traceback.format_exc(limit=-6)
        record["found"].append(f"{'refused' if refused else 'crash'}: {why}")
        return record
    for placing in placings:
        found = outcome(program, placing, expected)
        record["placings"].append(repr(placing))
        record["found"].append(found)
        if found.startswith(("differs", "crash")):
            smaller = shrunk(program, placing)
            record["smallest"] = f"check({smaller!r}, {placing!r}, run({smaller!r}))"
    record["seconds"] = round(time.monotonic() - begun, 1)
    return record


def summary(path):
    """Returns a text that counts what a file has."""
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    kinds = collections.Counter(
        found.partition(":")[0] for record in records for found in record["found"]
    )
    wrong = [
        record["seed"]
        for record in records
        if any(found.startswith(("differs", "crash")) for found in record["found"])
    ]
    layouts = sum(len(record["placings"]) for record in records)
    return (
        f"{len(records)} programs in {layouts} layouts: {kinds['same']} the same, "
        f"{kinds['refused']} refused, {kinds['differs']} differ, {kinds['crash']} crash; "
        f"seeds {wrong}"
    )


def clear():
    """Frees what programs leave behind; where that is not enough, begins anew."""
    import jax

    jax.clear_caches()
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
    if resident > MOST_MEMORY:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.argv])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=100, help="the number of seeds")
    parser.add_argument("--minutes", type=float, default=60, help="after which it ends")
    parser.add_argument("--out", type=pathlib.Path, default="random_programs.jsonl")
    parser.add_argument("--seed", type=int, help="the only one, shown on the screen")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    make_devices()
    gc.freeze()  # the modules' objects, which collections would visit again and again
    if given.seed is not None:
        for name, value in record_of(given.seed).items():
            print(f"{name}: {value}")
        return
    # Kept in the environment, so that a process that has begun anew ends in time.
    end = float(os.environ.setdefault("RANDOM_PROGRAMS_END", str(time.time() + 60 * given.minutes)))
    known = set()
    if given.out.exists():
        known = {json.loads(line)["seed"] for line in given.out.read_text().splitlines()}
    done = 0
    for seed in range(given.first, given.first + given.count):
        if seed in known:
            continue
        if time.time() > end:
            break
        record = record_of(seed)
        with open(given.out, "a") as file:
            file.write(json.dumps(record) + "\n")
        done += 1
        if done % CLEARED_EACH == 0:
            clear()
    print(summary(given.out))


def make_devices():
    """JAX has eight CPUs, which its first use makes."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)


__all__ = ["Program", "main", "outcome", "record_of", "shrunk", "summary"]

if __name__ == "__main__":
    main()
