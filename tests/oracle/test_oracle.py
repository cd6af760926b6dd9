"""This package against the classic release, by what the latter computed (see README.md)."""

import fnmatch
import json
import os
import re
import warnings
import zlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.choices import VARIABLE
from helpers.oracle import (
    checkpoints,
    expectations,
    front_ends,
    oracle_runner,
    programs_errors,
    structure,
    user_scripts,
)
from helpers.oracle.oracle_table import FAMILIES

FIXTURES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fixtures")
ONE = ""
# Counters of a sum that a reshape has split before it is made, and of any sum.
SPLIT_SUM = r"reduce_scatter/.*|allreduce/.*/reshape_op"
SUM = r"(reduce_scatter|allreduce)/.*"


def load(family):
    """Returns ({program: {key: array}}, facts) of a fixture file."""
    with open(os.path.join(FIXTURES, family + ".json")) as f:
        facts = json.load(f)
    arrays = {name: {} for name in facts}
    with np.load(os.path.join(FIXTURES, family + ".npz")) as data:
        for key in data.files:
            name, _, rest = key.partition(":")
            arrays[name][rest] = data[key]
    return arrays, facts


EXPECTED = {family: load(family) for family in [*FAMILIES, "scripts"]}
with open(os.path.join(FIXTURES, "errors.json")) as _f:
    ERRORS = json.load(_f)
with open(os.path.join(FIXTURES, "structure.json")) as _f:
    STRUCTURE = json.load(_f)


def slow_but(name, count):
    """Returns marks by which one of `count` programs is in the short run."""
    return [] if zlib.crc32(name.encode()) % count == 0 else [pytest.mark.slow]


def form(name, program):
    """Returns the form that a program is run in: on one processor (None), or in a layout of its own.

    That layouts do not change programs is tested elsewhere.
    """
    known = [None, *program.layouts]
    return known[(zlib.crc32(name.encode()) >> 8) % len(known)]


def parameters():
    """Each program in its form, one of ten in the short run.

    Of single operations there are fewer in it: the table of cases has them all.
    """
    for family, programs in FAMILIES.items():
        count = 24 if family == "language" else 10
        for name, program in programs.items():
            layout = form(name, program)
            kind = "one" if layout is None else layout or "replicated"
            marks = slow_but(name, count)
            yield pytest.param(family, name, layout, id=f"{name}-{kind}", marks=marks)


@pytest.fixture(autouse=True)
def layouts_of_tables(slips):
    """Allows layouts that have nothing to do with some of the programs of a table."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "layout rule .* splits nothing")
        yield


@pytest.fixture(autouse=True)
def small_contexts(monkeypatch):
    """Has contexts lack what the classic's layers do not read, as those of users may."""
    monkeypatch.setattr(structure, "ALLOWED", STRUCTURE["reads"])


@pytest.fixture(autouse=True)
def slices_apart(monkeypatch):
    """Has a slice for each processor, as the classic does."""
    monkeypatch.setattr(oracle_runner, "IMPL_ARGUMENTS", dict(oracle_runner.APART))


def assert_close(actual, expected, tolerance, what=""):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, what
    assert actual.dtype == expected.dtype, what
    if expected.dtype.kind != "f":
        np.testing.assert_array_equal(actual, expected, what)
    elif expected.size:
        scale = max(np.abs(expected).max(), 1e-30)
        np.testing.assert_allclose(actual / scale, expected / scale, 0, tolerance, err_msg=what)


def run(name, program, layout):
    mesh_shape = ONE if layout is None else oracle_runner.MESH
    return oracle_runner.run(name, program, mesh_shape, layout or "")


def check_values(name, program, values, expected):
    for key, array in expected.items():
        if key in expectations.SUMMED_GRADIENTS.get(name, []):
            array = array.sum(axis=0)
        first = expectations.SECOND_AT_TIES.get(name, {}).get(key)
        if first is not None:
            array = np.where(expected[first] != 0, 0, array)
        if key in expectations.ROUNDED_ZEROS.get(name, []):
            np.testing.assert_allclose([values[key], array], 0, atol=1e-6, err_msg=key)
            continue
        assert_close(values[key], array, program.tolerance, key)


def without_sums(counters):
    """Returns the counters without those of sums, and the total of these."""
    sums = {k: v for k, v in counters.items() if re.fullmatch(SUM, k)}
    return {k: v for k, v in counters.items() if k not in sums}, sum(sums.values())


def check_communication(name, layout, ours, theirs):
    differ = [p for pattern, p, _ in expectations.COUNTERS_DIFFER if fnmatch.fnmatch(name, pattern)]
    if "vocab:" in (layout or ""):
        # The gradient of the cross entropy of ids needs no sum over the vocabulary.
        for key in [k for k in ours if re.fullmatch(r"allreduce/.*/reduce_op", k)]:
            assert ours[key] <= theirs[key], key
            differ.append(re.escape(key))

    def kept(counters):
        return {k: v for k, v in counters.items() if not any(re.fullmatch(p, k) for p in differ)}

    ours, theirs = kept(ours), kept(theirs)
    if any(re.fullmatch(SPLIT_SUM, key) for key in ours):
        # The classic sums all of what is split then; here each processor sums its part of it.
        ours, ours_summed = without_sums(ours)
        theirs, theirs_summed = without_sums(theirs)
        assert ours_summed <= theirs_summed or not theirs_summed  # they may be left out above
    assert ours == theirs


@pytest.mark.slow_but(2)
@pytest.mark.slow("bert_heads-batch:x,num*", "published_adapters-one*")
@pytest.mark.parametrize("family, name, layout", parameters())
def test_program(family, name, layout):
    """Values and gradients, counters of communication, variables, names."""
    program = FAMILIES[family][name]
    arrays, facts = EXPECTED[family]
    theirs = facts[name] if layout is None else facts[name]["layouts"][layout]
    assert "error" not in theirs or name in expectations.CLASSIC_FAILS
    # In the classic an update may run before another one has read its variable.
    if "differs" in theirs and not program.steps:
        assert (name, layout) in expectations.CLASSIC_WRONG, theirs["differs"]
    values, ours = run(name, program, layout)
    expected = arrays[name]
    if not expected:  # the classic cannot do it at all; be at least consistent
        expected, _ = run(name, program, None)
    assert set(values) == set(expected)
    check_values(name, program, values, expected)
    if os.environ[VARIABLE]:  # other operations make them
        return
    if "counters" in theirs:
        check_communication(name, layout, ours["counters"], theirs["counters"])
    if "variables" in theirs:
        assert ours["variables"] == theirs["variables"]
    if "error" not in EXPECTED[family][1][name]:
        check_names_shapes_and_dtypes(family, name, ours)


def check_dimensions(name, ours, theirs):
    """Variables have the dimension names of the classic, so that layout rules bind alike.

    Where the classic has one name twice, all but one of them may be called otherwise.
    """
    known = expectations.DIMENSIONS_DIFFER.get(name, {})
    judged = {v for v in theirs if any(fnmatch.fnmatch(v, pattern) for pattern in known)}
    assert set(ours) <= set(theirs) <= set(ours) | judged, name
    assert not known or any(ours.get(v) != theirs[v] for v in judged), name
    for variable in set(ours) - judged:
        dims, expected = ours[variable].split(), theirs[variable].split()
        same = [d == e or expected.count(e) > 1 for d, e in zip(dims, expected, strict=True)]
        assert all(same) and set(expected) <= set(dims), (name, variable, dims, expected)


def check_names_shapes_and_dtypes(family, name, ours):
    """What made each result, by name and class; shapes and dtypes, also of gradients.

    Dimension names of variables, too.
    """
    theirs = EXPECTED[family][1][name]
    check_dimensions(
        name, ours["structure"]["dimensions"], STRUCTURE["dimensions"][family].get(name, {})
    )
    summed = expectations.SUMMED_GRADIENTS.get(name, [])
    for key, described in theirs["outputs"].items():
        assert key in summed or ours["outputs"][key] == described, key
    for key, made_by in theirs["names"].items():
        if ours["names"][key] != made_by:
            known = [key, ours["names"][key][1]]
            judged = any(fnmatch.fnmatch(k, p) for k in known for p in expectations.NAMES_DIFFER)
            assert judged, (key, made_by, ours["names"][key])


MERGED = [
    pytest.param(family, name, layout, marks=slow_but(name, 3))
    for family in ("layers", "attention", "models")
    for name, program in FAMILIES[family].items()
    for layout in program.layouts[:1]
]


@pytest.mark.slow_but(4)
@pytest.mark.slow("models-language_model*")
@pytest.mark.parametrize("family, name, layout", MERGED)
def test_merged_processors(monkeypatch, family, name, layout):
    """The same with all processors on one device, executed as one: the default here."""
    monkeypatch.setattr(oracle_runner, "IMPL_ARGUMENTS", {})
    expected = EXPECTED[family][0][name]
    values, _ = run(name, FAMILIES[family][name], layout)
    check_values(name, FAMILIES[family][name], values, expected or values)


# A sixth of the programs, some of every family, half of them eagerly and half in a tf.function.
WITHOUT_SESSIONS = [
    pytest.param(
        family,
        name,
        number % 12 == 0,
        id=f"{name}-{'eager' if number % 12 else 'function'}",
        marks=slow_but(name, 7),
    )
    for family, programs in FAMILIES.items()
    for number, name in enumerate(sorted(programs, key=lambda n: zlib.crc32(n.encode())))
    if number % 6 == 0 and name not in expectations.IN_SESSIONS_ONLY
]


@pytest.mark.slow_but(1)
@pytest.mark.every("*-function*")
@pytest.mark.parametrize("family, name, in_function", WITHOUT_SESSIONS)
def test_without_a_session(family, name, in_function, no_graph_rewriting):
    program, expected = FAMILIES[family][name], EXPECTED[family][0][name]
    values = front_ends.run(name, program, oracle_runner.MESH, program.layouts[0], in_function)
    for key, array in expected.items():
        if np.size(array) and np.abs(array).max() < 1e-6:  # nothing but what is left by rounding
            assert np.abs(values.pop(key)).max() < 1e-5
    kept = {key: array for key, array in expected.items() if key in values}
    assert not kept or set(values) - {"after/global_step"} <= set(kept)
    check_values(name, program, values, kept)


@pytest.mark.parametrize("name", programs_errors.ERRORS)
@pytest.mark.slips
def test_error(name):
    when, kind = ERRORS[name]
    ours_when, ours_kind, text, ours_kinds = programs_errors.outcome(name)
    if name in expectations.ERRORS_DIFFER:
        assert (ours_when, ours_kind) != (when, kind)
        assert ours_kind == expectations.ERRORS_DIFFER[name][0]
    elif name in expectations.EARLIER:
        assert ours_when == "build" or when == "run"
        assert {kind, "ValueError"} & set(ours_kinds)
    else:
        assert ours_when == when and kind in ours_kinds, text


def check_script(name, directory):
    arrays, facts = (part[name] for part in EXPECTED["scripts"])
    result = user_scripts.run(name, str(directory))
    assert set(result) == set(arrays) | set(facts)
    for key, array in arrays.items():
        assert_close(result[key], array, 1e-5, key)
    for key, fact in facts.items():
        ours = json.loads(json.dumps(result[key], default=str))
        if (name, key) not in expectations.SCRIPTS_DIFFER:
            assert ours == fact, key


@pytest.mark.slow_but(4)
@pytest.mark.parametrize("name", user_scripts.SCRIPTS)
def test_script(name, tmp_path):
    check_script(name, tmp_path)


@pytest.mark.parametrize(
    "name", [n for n in user_scripts.SCRIPTS if n not in expectations.NEEDS_SLICES]
)
def test_script_on_merged_processors(monkeypatch, name, tmp_path):
    monkeypatch.setattr(oracle_runner, "IMPL_ARGUMENTS", {})
    check_script(name, tmp_path)


@pytest.mark.slow_but(1)
@pytest.mark.parametrize(
    "mesh_shape, layout", [(ONE, ""), (oracle_runner.MESH, "batch:x,hidden:y")]
)
def test_checkpoint_of_the_classic(mesh_shape, layout):
    with np.load(checkpoints.PATH + ".npz") as expected:
        logits, loss = checkpoints.evaluate(checkpoints.PATH, mesh_shape, layout)
        assert_close(logits, expected["logits"], 1e-5)
        assert_close(loss, expected["loss"], 1e-5)


@pytest.mark.slow
def test_checkpoint_for_the_classic(tmp_path):
    """Holds the same names, shapes and dtypes; check_ours_in_classic.py loads it there."""
    path = str(tmp_path / "ours.ckpt")
    logits, _ = checkpoints.save(path, oracle_runner.MESH, "batch:x,hidden:y")
    assert checkpoints.listing(path) == checkpoints.listing(checkpoints.PATH)
    assert_close(checkpoints.evaluate(path)[0], logits, 1e-5)
    with tf.Graph().as_default():  # a file for the classic must not need this package
        assert "mnist/conv0/kernel" in dict((n, s) for n, s, _ in checkpoints.listing(path))
