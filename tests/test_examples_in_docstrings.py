"""The examples in docstrings run and print what they say, and every public function has one.

An example is an eager program. It has `mtf`, `np`, `tf` (TensorFlow itself), and `graph` and `mesh`,
which are new for each docstring.
"""

import contextlib
import doctest
import inspect
import types

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import (
    auto_mtf,
    checkpoint,
    debug,
    layers,
    ops,
    optimize,
    schedules,
    signal,
    train,
    visualize,
)
from mesh_tensorflow.train import metrics

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
MODULES = {
    "ops": ops,
    "layers": layers,
    "optimize": optimize,
    "schedules": schedules,
    "signal": signal,
    "auto_mtf": auto_mtf,
    "train": train,
    "train.metrics": metrics,
    "visualize": visualize,
    "checkpoint": checkpoint,
}
# Modules whose functions need an example, and whose classes are what these functions return.
FUNCTIONS = ("ops", "train.metrics", "visualize", "debug")
# tests/debug/test_examples_of_debug.py runs those of debug.
DOCUMENTED = {**MODULES, "debug": debug}
# Functions for those who write operations or meshes, which guides and tests of their own show.
WITHOUT = {
    "binary_reduction_fn",
    "convert_args_to_laid_out_tensors",
    "compatible_lazy_allreduce_sums",
    "pool_backprop",
    "pool_fn",
    "reduction_fn",
    "assign_slice",
    "assign_add_slice",
    "assign_sub_slice",
}


def documented(module):
    """Returns (name, object) of the public functions and, but for FUNCTIONS, classes."""
    names = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
    found = [(n, getattr(module, n)) for n in names]
    functions_only = any(module is DOCUMENTED[name] for name in FUNCTIONS)
    kinds = (types.FunctionType,) if functions_only else (types.FunctionType, type)
    return [
        (n, inspect.unwrap(x))
        for n, x in found
        if isinstance(x, kinds)
        and inspect.unwrap(x).__module__.startswith("mesh_tensorflow")
        and not (isinstance(x, type) and issubclass(x, Exception))
    ]


def in_operations(name, function):
    """Whether a function of `ops` is on the reference page of operations."""
    file = function.__module__.removeprefix("mesh_tensorflow.")
    return file.startswith("ops._") and name not in WITHOUT and "backprop" not in name


def examples(module):
    """Returns the doctests of a module's public names."""
    parser = doctest.DocTestParser()
    tests = []
    for name, thing in documented(module):
        docs = inspect.getdoc(thing) or ""
        if isinstance(thing, type) and "__init__" in vars(thing):
            docs += "\n\n" + (inspect.getdoc(thing.__init__) or "")
        tests.append((name, thing, parser.get_doctest(docs, {}, name, name, 0)))
    return tests


@pytest.mark.slow_but(3)
@pytest.mark.parametrize("name", MODULES)
def test_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    failed = []
    for function, _, test in examples(MODULES[name]):
        printed = []
        # fit keeps variables of its own.
        fits = function == "fit"
        with contextlib.nullcontext() if fits else mtf.VariableStore().scope():
            graph = mtf.Graph()
            test.globs = {
                "mtf": mtf,
                "np": np,
                "tf": tf,
                "graph": graph,
                "mesh": mtf.Mesh(graph, "mesh"),
            }
            doctest.DocTestRunner(verbose=False, optionflags=FLAGS).run(test, out=printed.append)
        if printed:
            failed.append(f"{function}:\n{''.join(printed)}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_function_has_one(name):
    module = DOCUMENTED[name]
    bare = [
        function
        for function, thing, test in examples(module)
        if not test.examples and (module is not ops or in_operations(function, thing))
    ]
    assert not bare, bare
