"""Runs the table with the classic release and writes what comes out to fixtures/.

Run with the oracle's Python (see README.md):  python -m oracle.make_fixtures [NAME...]
"""

import json
import os
import sys
import tempfile
import traceback
from unittest import mock

import classic_shim  # noqa: F401  (first: makes the classic importable)
import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
tf.logging.set_verbosity(tf.logging.ERROR)
sys.modules["tensorflow_datasets"] = mock.MagicMock()  # which the classic's transformer imports
sys.modules["tensorflow_probability"] = mock.MagicMock()  # and its experimental package

from helpers.oracle import checkpoints, programs_errors, user_scripts  # noqa: E402
from helpers.oracle import oracle_runner as runner  # noqa: E402
from helpers.oracle.oracle_table import FAMILIES  # noqa: E402

FIXTURES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fixtures")


def attempt(name, program, mesh_shape, layout):
    try:
        feed_reads = program.steps > 0 and not mesh_shape
        return runner.run(name, program, mesh_shape, layout, feed_reads)
    except Exception as e:
        if "-v" in sys.argv:
            traceback.print_exc()
        return None, {"error": type(e).__name__, "message": str(e)[:100]}


def difference(values, others):
    worst = 0.0
    for key in values:
        a, b = values[key].astype("float64"), others[key].astype("float64")
        if a.shape != b.shape:
            return float("inf")
        if a.size:
            worst = max(worst, np.abs(a - b).max() / max(np.abs(a).max(), 1e-30))
    return float(worst)


def record(name, program):
    """Returns (arrays, facts) of a program on one processor and with its layouts."""
    values, facts = attempt(name, program, "", "")
    facts.pop("structure", None)  # is in structure.json
    facts["layouts"] = {}
    for layout in program.layouts:
        split_values, split = attempt(name, program, runner.MESH, layout)
        entry = {k: split[k] for k in ("counters", "error", "message") if k in split}
        if values is not None and split_values is not None:
            differs = difference(values, split_values)
            if not differs < 1e-4:
                entry["differs"] = str(float(f"{differs:.1e}"))
        for key in ("variables",):
            if key in split and split[key] != facts.get(key):
                entry[key] = split[key]
        facts["layouts"][layout] = entry
        if values is None and split_values is not None:
            values = split_values
    return values, facts


def plain(value):
    """Returns what JSON can hold of a script's result."""
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def record_scripts():
    """Runs the scripts of users; writes scripts.npz and scripts.json."""
    arrays, facts = {}, {}
    for name in user_scripts.SCRIPTS:
        with tempfile.TemporaryDirectory() as directory:
            result = user_scripts.run(name, directory)
        facts[name] = {}
        for key, value in result.items():
            if isinstance(value, (np.ndarray, np.generic)):
                arrays[f"{name}:{key}"] = np.asarray(value)
            else:
                facts[name][key] = plain(value)
        print("scripts", name)
    write("scripts", arrays, facts)


def record_errors():
    facts = {name: programs_errors.outcome(name)[:2] for name in programs_errors.ERRORS}
    write("errors", {}, facts)
    print("errors", len(facts))


def write(family, arrays, facts):
    if arrays:
        np.savez_compressed(os.path.join(FIXTURES, family + ".npz"), **arrays)
    with open(os.path.join(FIXTURES, family + ".json"), "w") as f:
        json.dump(facts, f, sort_keys=True, separators=(",", ":"))


def main():
    wanted = [a for a in sys.argv[1:] if not a.startswith("-")]
    os.makedirs(FIXTURES, exist_ok=True)
    for family, programs in FAMILIES.items():
        if wanted and family not in wanted and not set(wanted) & set(programs):
            continue
        arrays, facts = {}, {}
        for name, program in programs.items():
            if wanted and family not in wanted and name not in wanted:
                continue
            values, facts[name] = record(name, program)
            for key, value in (values or {}).items():
                arrays[f"{name}:{key}"] = value
            errors = {k: v["error"] for k, v in facts[name]["layouts"].items() if "error" in v}
            worst = {k: v["differs"] for k, v in facts[name]["layouts"].items() if "differs" in v}
            print(
                family,
                name,
                facts[name].get("error", "ok"),
                facts[name].get("message", ""),
                errors or "",
                worst or "",
                flush=True,
            )
        if wanted and family not in wanted:
            continue  # a part of a family is only shown
        write(family, arrays, facts)
    for name, fn in {
        "scripts": record_scripts,
        "errors": record_errors,
        "checkpoint": checkpoints.record,
    }.items():
        if not wanted or name in wanted:
            fn()


if __name__ == "__main__":
    main()
