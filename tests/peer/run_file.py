"""Runs one file of tests against this package: run_file.py FILE RESULT.

The result is a JSON list of [test, "passed", "failed" or "skipped", last line of the reason]. A
file that cannot be imported gives one entry, whose test is "". Tracebacks go to the output.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
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


# Of the Universe that Planck saw: parts of the density that are matter, dark energy and curvature.
_PLANCK = types.SimpleNamespace(Om0=0.3075, Ode0=0.6910, Ok0=0.0)

_STAND_INS: dict[str, dict[str, Any]] = {
    "astropy": {},
    "astropy.cosmology": {"Planck15": _PLANCK},
    "mock": vars(unittest.mock),
    "scipy.misc": {},  # of a release of SciPy that is gone; the module is imported, not used
    "tensorflow_datasets": {"as_numpy": _as_numpy},
    "tensorflow_probability": {"stats": types.SimpleNamespace(correlation=_correlation)},
}


# What published programs import at their top, and what runs here needs nothing of.
_ABSENT = frozenset(
    """apache_beam babel bz2file clu cv2 editdistance flax gevent gunicorn gym immutabledict jax mlperf_compliance
    nltk oauth2client pyglove rouge_score sacrebleu sentencepiece sklearn sympy tensorflow_gan
    tensorflow_hub tensorflow_text torch transformers""".split()
)
# Packages of which single modules are used: the package itself would import what no longer works.
_IN_PARTS = ("tensor2tensor.models", "t5", "t5.models")


class _OfAnything(type):
    """The class of classes that have any attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _OfAnything(name, (_Anything,), {"__module__": cls.__module__})


class _Anything(metaclass=_OfAnything):
    """Stands for a class, a function or a decorator of a package that is absent."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]  # used as a decorator
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __getattr__(self, name: str) -> Any:
        return getattr(type(self), name)

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self)(*args, **kwargs)


class _Absent(types.ModuleType):
    """A module that is not there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _OfAnything(name, (_Anything,), {"__module__": self.__name__})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of packages that are absent, and of TensorFlow 1."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        root = name.partition(".")[0]
        if root in _ABSENT or name.startswith("tensorflow.contrib"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def _install_stand_ins() -> None:
    """Makes importable what TensorFlow 2.16 and the test extra do not bring."""
    import mesh_tensorflow.estimator

    mesh_tensorflow.estimator.install()
    # Before those of Python: JAX and others may be there, and take time.
    sys.meta_path.insert(0, _Finder())
    for name in _IN_PARTS:
        package = types.ModuleType(name)
        package.__path__ = [os.path.join(path, *name.split(".")) for path in sys.path]
        sys.modules[name] = package
    for name, contents in _STAND_INS.items():
        sys.modules[name] = _Absent(name, "A stand-in.")
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
    import tensorflow.compat.v1 as tf
    from absl import flags

    _install_stand_ins()
    if path.name.startswith("tensor2tensor"):  # written for TensorFlow 1
        tf.disable_v2_behavior()
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
