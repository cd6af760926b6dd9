"""Runs the tests that the classic release carries, and programs for it, against this package.

    python tests/peer/run.py            # all files, two at a time
    python tests/peer/run.py ops_test   # files whose name has this in it, with tracebacks

The packages come from PyPI, are checked, and are kept in a cache outside of this tree. Of the classic
the files *_test.py alone are taken, into a temporary folder; programs that others have published for
it are there whole, and are used as they are: by tests of their own, and by those in `programs/`.
`expected.py` says what is to come out.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fnmatch
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional

import expected
from run_file import IMPORTING, Entry


class Package(NamedTuple):
    """A package of PyPI.

    Attributes:
      requirement: its name and version.
      file: the name of its file.
      sha256: the checksum of that.
      tests: a pattern of the paths of test files in it that are run; "" if there are none.
    """

    requirement: str
    file: str
    sha256: str
    tests: str = ""


CLASSIC = Package(
    "mesh-tensorflow==0.1.21",
    "mesh_tensorflow-0.1.21-py3-none-any.whl",
    "747d46696ad260ae59a566fc1726749b99080973b07aae098be5714931a3ad80",
    "mesh_tensorflow/*_test.py",
)
# Published for the classic. Their modules are used as they are.
CLIENTS = [
    Package(
        "tensor2tensor==1.15.7",
        "tensor2tensor-1.15.7-py2.py3-none-any.whl",
        "26ef986c2b9f45bdefa4218229f33f2992e4d9df84f8939d41481cdaa8444392",
        "tensor2tensor/models/mtf_*_test.py",
    ),
    Package(
        "t5==0.9.4",
        "t5-0.9.4-py2.py3-none-any.whl",
        "53e40efdfc4d8f614cd8d38301e39d5c146f9d5fd66b6823d9c181b60370b2b5",
    ),
    Package(
        "seqio==0.0.20",
        "seqio-0.0.20-py2.py3-none-any.whl",
        "0b57ca3048a707d14504842b151edafc2b1c684df52aeb06672cfe166db9000d",
    ),
    Package(
        "flowpm==0.1.1",
        "flowpm-0.1.1.tar.gz",
        "2f926bd25d68b0240e9e466501734394506a073b2c52054f5cd89fd6f60f85e5",
    ),
]
HERE = pathlib.Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"
PACKAGE = "mesh_tensorflow/"
FILES = {**expected.TESTS, **expected.CLIENTS}
SECONDS_OF_A_FILE = 600
NOT_A_TEST = "test_session"  # a method of tf.test.TestCase that unittest takes for one


class WrongFile(Exception):
    """The file of a package is not the one that was published."""


# -- the files


def cache_folder() -> pathlib.Path:
    """Returns where the packages are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(root) / "mesh_tensorflow_peer"


def check(path: pathlib.Path, package: Package) -> pathlib.Path:
    """Returns the path of a package's file, having compared its checksum."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != package.sha256:
        raise WrongFile(
            f"{path} has SHA-256 {found}, not {package.sha256}: remove it, and run again"
        )
    return path


def fetch(package: Package, cache: pathlib.Path) -> Optional[pathlib.Path]:
    """Returns a package's file, fetched by pip unless it is in the cache; None if pip cannot."""
    path = cache / package.file
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            kind = ["--only-binary"] if path.suffix == ".whl" else ["--no-binary"]
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += [*kind, ":all:", "--dest", folder, package.requirement]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print((done.stderr.strip().splitlines() or ["pip failed"])[-1])
                print(f"skipped: {package.requirement} is not in {cache} and could not be fetched")
                return None
            check(pathlib.Path(folder) / package.file, package).rename(path)
    return check(path, package)


def unpack(path: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Unpacks a package into a folder; returns the folder that its modules are in."""
    # The checksum says what is in it, so that no archive is unpacked that nobody has looked at.
    shutil.unpack_archive(path, folder, "zip" if path.suffix == ".whl" else "gztar")
    return folder if path.suffix == ".whl" else folder / path.name.removesuffix(".tar.gz")


def extract(
    wheel: pathlib.Path, folder: pathlib.Path, pattern: str, part: str = ""
) -> dict[str, pathlib.Path]:
    """Lays the test files whose name has `part` in it flat in `folder`; returns them by name."""
    files = {}
    with zipfile.ZipFile(wheel) as archive:
        for member in sorted(archive.namelist()):
            name = member.removeprefix(PACKAGE)
            if fnmatch.fnmatch(member, pattern) and part in name:
                files[name] = folder / name.replace("/", "__")
                files[name].write_bytes(archive.read(member))
    return files


class Laid(NamedTuple):
    """What is there to run.

    Attributes:
      files: the files by name.
      used: the folders of the modules that they import.
      wanted: the names of all files that there should be.
    """

    files: dict[str, pathlib.Path]
    used: list[str]
    wanted: set[str]


def lay_out(folder: pathlib.Path, part: str) -> Laid:
    """Lays the files whose name has `part` in it, and the packages that they use, in a folder.

    Without a network, what is not in the cache is left out.

    Raises:
      WrongFile: a package is not the one that was published.
    """
    laid = Laid({}, [], set())
    classic, *clients = (fetch(package, cache_folder()) for package in [CLASSIC, *CLIENTS])
    if classic is not None:
        laid.files.update(extract(classic, folder, CLASSIC.tests, part))
        laid.wanted.update(expected.TESTS)
    # They import each other, so that one alone is of no use.
    if None not in clients:
        for package, path in zip(CLIENTS, clients):
            laid.files.update(extract(path, folder, package.tests, part) if package.tests else {})
            laid.used.append(str(unpack(path, folder / "packages")))
        for path in sorted(PROGRAMS.glob("*.py")):
            name = f"{PROGRAMS.name}/{path.name}"
            if part in name:
                laid.files[name] = pathlib.Path(shutil.copy(path, folder))
        laid.wanted.update(expected.CLIENTS)
    return laid


# -- running them


def run_file(path: pathlib.Path, used: Sequence[str]) -> list[Entry]:
    """Runs a file in a process of its own; its output goes to FILE.log, beside it."""
    result, log = path.with_suffix(".json"), path.with_suffix(".log")
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), *used]),
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


def run_files(
    files: Mapping[str, pathlib.Path], used: Sequence[str], processes: int
) -> dict[str, list[Entry]]:
    """Returns what became of the tests of each file; the longest files are begun first."""
    names = sorted(files, key=lambda name: -FILES.get(name, 0))
    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        found = dict(zip(names, pool.map(lambda name: run_file(files[name], used), names)))
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
    tests = FILES.get(name)
    if tests is None:
        return Verdict(0, 0, 0, [f"{name} is not in the tables of expected.py"])
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
        faults.append(f"{name}: {len(entries)} tests were run; expected.py has {tests}")
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
    with tempfile.TemporaryDirectory(prefix="mesh_tensorflow_peer_") as folder:
        try:
            laid = lay_out(pathlib.Path(folder), options.part)
        except WrongFile as error:
            print(error)
            return 1
        files = {n: path for n, path in laid.files.items() if n not in expected.NOT_RUN}
        if not files:
            return 0
        found = run_files(files, laid.used, options.processes)
        if options.part:
            for path in files.values():
                print(path.with_suffix(".log").read_text(encoding="utf-8"))
        faults = report(found)
    missing = [] if options.part else sorted(laid.wanted - set(found))
    for name in missing:
        print(f"{name} is not in its package")
    passed = sum(judge(name, entries).passed for name, entries in found.items())
    judged = sum(judge(name, entries).judged for name, entries in found.items())
    print(f"{passed} passed, {judged} judged, {len(faults) + len(missing)} failed")
    return 1 if faults or missing else 0


if __name__ == "__main__":
    sys.exit(main())
