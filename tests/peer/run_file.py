"""Runs one file of the classic's tests against this package: run_file.py FILE RESULT.

The result is a JSON list of [test, "passed", "failed" or "skipped", last line of the reason]. A
file that cannot be imported gives one entry, whose test is "". Tracebacks go to the output.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys
import traceback
import types
import unittest
import unittest.mock
from collections.abc import Iterator, Sequence
from typing import Any, Union

Entry = tuple[str, str, str]
IMPORTING = ""  # stands for a test when a file cannot be imported


# -- what the files import of packages that the tests of this one do not need


def _correlation(x: Any, sample_axis: Union[int, Sequence[int]], event_axis: int) -> Any:
    """Returns the matrix of correlations of vectors, as tensorflow_probability.stats does."""
    import tensorflow.compat.v1 as tf

    axes = [sample_axis] if isinstance(sample_axis, int) else list(sample_axis)
    if sorted([*axes, event_axis]) != list(range(x.shape.rank)):
        raise NotImplementedError("the stand-in takes axes of samples and one of events, no others")
    samples = tf.reshape(tf.transpose(x, [*axes, event_axis]), [-1, x.shape[event_axis]])
    samples -= tf.reduce_mean(samples, 0)
    return tf.matmul(tf.math.l2_normalize(samples, 0), tf.math.l2_normalize(samples, 0), True)


def _as_numpy(dataset: Any) -> Iterator[Any]:
    """Yields the elements of a tf.data.Dataset as arrays, as tensorflow_datasets does."""
    yield from dataset.as_numpy_iterator()


_STAND_INS: dict[str, dict[str, Any]] = {
    "mock": vars(unittest.mock),
    "scipy.misc": {},  # of a release of SciPy that is gone; the module is imported, not used
    "tensorflow_datasets": {"as_numpy": _as_numpy},
    "tensorflow_probability": {"stats": types.SimpleNamespace(correlation=_correlation)},
}


def _install_stand_ins() -> None:
    """Makes importable what TensorFlow 2.16 and the test extra do not bring."""
    import mesh_tensorflow.estimator

    mesh_tensorflow.estimator.install()
    for name, contents in _STAND_INS.items():
        sys.modules[name] = types.ModuleType(name, "A stand-in.")
        vars(sys.modules[name]).update(
            {key: value for key, value in contents.items() if not key.startswith("__")}
        )


# -- running


def _last_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


class _Result(unittest.TestResult):
    """Notes what became of each test; one whose subtest fails has failed."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[str, Entry] = {}

    def _note(self, test: Any, outcome: str, reason: str = "") -> None:
        # Parameters of a test are shown with addresses of functions.
        name = test.id().partition(" (")[0].partition(".")[2]
        if self.entries.get(name, ("", "passed", ""))[1] == "passed":
            self.entries[name] = (name, outcome, reason)

    def _note_error(self, test: Any, error: Any) -> None:
        print(f"\n== {test.id()}")
        traceback.print_exception(error[1])
        self._note(test, "failed", _last_line(error[1]))

    def addSuccess(self, test: Any) -> None:
        self._note(test, "passed")

    def addFailure(self, test: Any, err: Any) -> None:
        self._note_error(test, err)

    def addError(self, test: Any, err: Any) -> None:
        self._note_error(test, err)

    def addSkip(self, test: Any, reason: str) -> None:
        self._note(test, "skipped", reason)

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self._note_error(test, err)


def run(path: pathlib.Path) -> list[Entry]:
    """Returns what became of each test of a file."""
    from absl import flags

    _install_stand_ins()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    except Exception as error:
        traceback.print_exc()
        return [(IMPORTING, "failed", _last_line(error))]
    flags.FLAGS([str(path)])
    result = _Result()
    unittest.defaultTestLoader.loadTestsFromModule(module).run(result)
    return sorted(result.entries.values())


if __name__ == "__main__":
    found = run(pathlib.Path(sys.argv[1]))
    pathlib.Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
