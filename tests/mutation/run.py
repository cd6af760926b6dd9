"""Seeds faults into copies of the package, one at a time, and says which test finds each.

python tests/mutation/run.py --help
"""

import argparse
import concurrent.futures
import hashlib
import importlib.util
import json
import os
import pathlib
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading

from fault import PACKAGE, ROOT
from faults import FAULTS

LONGEST = 3600  # seconds, after which a run of tests is taken to hang
SHORT = ["-m", "not slow"]
LONG = ["--all"]
EVERYTHING = ["tests", "--ignore=tests/mutation"]  # whose test finds every fault by its text
_WITHOUT_TEST = {"": "SURVIVED", None: "tests were not run to their end"}


class Results:
    """What has been found, in a file, so that a run that was killed goes on."""

    def __init__(self, path, whole, likely_only):
        self._path = pathlib.Path(path)
        self._whole, self._likely_only = whole, likely_only
        self._lock = threading.Lock()
        self._values = json.loads(self._path.read_text()) if self._path.exists() else {}

    def _key(self, fault, likely_only=False):
        parts = (*fault, self._whole, likely_only)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def get(self, fault):
        """Returns the name of the test that found a fault; "" if none did, None if not known."""
        # What the likely tests alone do not find may still be found by others.
        for likely_only in (False, True) if self._likely_only else (False,):
            found = self._values.get(self._key(fault, likely_only))
            if found is not None:
                return found
        return None

    def set(self, fault, found):
        """Keeps the name of the test that found a fault, "" if none did."""
        with self._lock:
            self._values[self._key(fault, self._likely_only and not found)] = found
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(self._values, indent=1))
            new.replace(self._path)


class Tree:
    """A copy of the repository, whose files may be changed."""

    def __init__(self, directory):
        self.root = pathlib.Path(directory)
        left_out = shutil.ignore_patterns(
            ".git", ".*_cache", ".hypothesis", "*.egg-info", "_core.errors"
        )
        shutil.copytree(ROOT, self.root, ignore=left_out, dirs_exist_ok=True)

    def run(self, arguments):
        """Runs pytest.

        Args:
          arguments: a list of strings.

        Returns:
          (its exit code, or None if it did not end; its output).
        """
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
        with subprocess.Popen(
            [*command, *arguments],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": str(self.root), "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=LONGEST)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return None, process.communicate()[0]
        return process.returncode, output

    def run_with(self, fault, arguments):
        """Runs pytest while a file has a fault; see `run`."""
        path = self.root / PACKAGE / fault.path
        right, wrong = path.read_text(encoding="utf-8"), fault.applied(self.root)
        try:
            _write(path, wrong)
            return self.run(arguments)
        finally:
            _write(path, right)


def _write(path, text):
    path.write_text(text, encoding="utf-8")
    # Bytecode is known by the size and the second of its source, which a fault may both leave.
    pathlib.Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)


def failures(output):
    """Returns the names of tests that failed, by what pytest printed."""
    return re.findall(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", output, re.MULTILINE)


def arguments_of(finders):
    """Returns pytest arguments, with files below the root instead of below tests."""
    words = shlex.split(finders)
    return [f"tests/{word}" if word.partition("::")[0].endswith(".py") else word for word in words]


def look_for(fault, tree, scope, likely_only):
    """Returns the name of a test that finds a fault, or "" if none does.

    Raises:
      RuntimeError: the tests could not be run, such as for a fault with which nothing imports.
    """
    selections = [arguments_of(fault.finders)] + ([] if likely_only else [EVERYTHING])
    for selection in selections:
        code, output = tree.run_with(fault, ["-x", *scope, *selection])
        found = failures(output)
        if code is None:
            return f"does not end: {shlex.join(selection)}"
        if code == 1 and found:
            return found[0]
        if code:
            raise RuntimeError(f"pytest {shlex.join(selection)} ended with {code}:\n{output}")
    return ""


def fail_without_faults(names, tree):
    """Returns those of some tests that fail in the tree as it is."""
    if not names:
        return []
    code, output = tree.run(names)
    if code not in (0, 1):
        raise RuntimeError(f"pytest of the tree without faults ended with {code}:\n{output}")
    return failures(output)


def parsed(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", metavar="N,...", help="numbers of rows, from 1, or N-M")
    parser.add_argument("--whole", action="store_true", help="run slow tests too")
    parser.add_argument("--likely", action="store_true", help="run the likely finders alone")
    parser.add_argument("--jobs", type=int, default=1, help="how many faults at a time")
    parser.add_argument(
        "--results",
        default=os.path.join(tempfile.gettempdir(), "mtf_seeded_faults.json"),
        help="a file from which a run goes on; remove it to begin anew (%(default)s)",
    )
    return parser.parse_args(argv)


def chosen(only):
    """Returns [(number, Fault)] of what --only names."""
    numbers = []
    for part in only.split(",") if only else [f"1-{len(FAULTS)}"]:
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return [(n, FAULTS[n - 1]) for n in numbers]


def search(rows, trees, results, options):
    """Looks for the faults of rows that have no result yet, in several trees at a time."""
    scope = LONG if options.whole else SHORT

    def one(row):
        number, fault = row
        tree = trees.get()
        try:
            found = look_for(fault, tree, scope, options.likely)
        except RuntimeError as e:
            print(f"{number:3} {fault.path}: {fault.what}\n{e}", flush=True)
            return
        finally:
            trees.put(tree)
        results.set(fault, found)
        print(f"{number:3} {fault.path}: {fault.what}\n    {found or 'SURVIVED'}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, [row for row in rows if results.get(row[1]) is None]))


def main(argv=None):
    options = parsed(argv)
    rows = chosen(options.only)
    results = Results(options.results, options.whole, options.likely)
    for _, fault in rows:
        fault.applied()
    with tempfile.TemporaryDirectory() as directory:
        trees = queue.Queue()
        for i in range(options.jobs):
            trees.put(Tree(os.path.join(directory, str(i))))
        search(rows, trees, results, options)
        found = {number: results.get(fault) for number, fault in rows}
        tests = sorted({name for name in found.values() if name and "::" in name})
        broken = set(fail_without_faults(tests, trees.get()))
    for number, name in found.items():
        if not name or name in broken:
            why = f"{name} fails without it too" if name else _WITHOUT_TEST[name]
            print(f"{number:3} {why}: {FAULTS[number - 1].path}: {FAULTS[number - 1].what}")
    count = sum(bool(name) and name not in broken for name in found.values())
    print(f"found {count} of {len(rows)}")
    return 0 if count == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
