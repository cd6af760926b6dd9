"""Settings that all tests share."""

import collections
import fnmatch
import os
import signal
import sys
import warnings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# Two workers on two cores: threads of one operation would take each other's time.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from helpers.choices import ABOUT, KINDS, VARIABLE, choose, set_environment
from helpers.quiet import import_tensorflow

# Options are parsed after this file, which imports TensorFlow.
_given = [kind for kind in KINDS if f"--choices={kind}" in sys.argv]
set_environment(os.environ.setdefault(VARIABLE, "".join(_given[:1])))
import_tensorflow()

import gin
import hypothesis
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core import errors

# What takes longest, or mostly waits for other processes, begins first, beside all others.
FIRST = """
mesh/test_conformance.py::test_all*simd*
estimator/test_cluster.py*
mesh/test_launch.py*
mesh/test_conformance.py::test_all*
""".split("\n")[1:-1]

# Of the slow cases of one test, CI has one and one in twelve, but at most these; --all has every one.
MOST_SLOW = 5

hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("suite")


def pytest_addoption(parser):
    parser.addoption(
        "--all", action="store_true", help="run every test, those that are marked slow included"
    )
    parser.addoption(
        "--choices",
        choices=KINDS,
        help="take the choices of helpers/choices.py, of speed and memory, wherever they are "
        "possible or nowhere; leaves out the tests that are about them",
    )


def pytest_configure(config):
    """Leaves slow tests out, unless they are asked for by an option or by name."""
    choose()
    named = any("::" in argument for argument in config.args)
    if not (config.getoption("--all") or config.option.markexpr or named):
        config.option.markexpr = "not slow and not every"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Keeps the marks that are for a case, and puts the tests of FIRST before the others."""
    if os.environ[VARIABLE]:
        items[:] = [item for item in items if not _matches(item, ABOUT)]
    elif not any("::" in argument for argument in config.args):
        _check_marks(items)
    ranks = {}
    for item in items:
        _keep_marks_of_case(item)
        if item.get_closest_marker("every"):
            _leave_to_all(item)
        matches = [i for i, pattern in enumerate(FIRST) if _matches(item, [pattern])]
        ranks[item] = matches[0] if matches else len(FIRST)
    for table in _tables(items, lambda item: not item.get_closest_marker("slow")):
        slow_but = [mark for mark in table[0].own_markers if mark.name == "slow_but"]
        for item in _beyond(table, slow_but[0].args[0]) if slow_but else []:
            item.add_marker(pytest.mark.slow)
    for table in _tables(items, lambda item: item.get_closest_marker("slow")):
        for item in _beyond(table, min(MOST_SLOW, 1 + len(table) // 12)):
            _leave_to_all(item)
    items.sort(key=ranks.get)


def _tables(items, which):
    """Returns lists of the cases of each test, of those that CI has and for which `which` is true."""
    found = collections.defaultdict(list)
    for item in items:
        if which(item) and not item.get_closest_marker("every"):
            found[item.nodeid.partition("[")[0]].append(item)
    return found.values()


def _beyond(table, kept):
    """Returns the cases of a table without some that lie evenly over it."""
    # Where number * kept / length passes a whole.
    return [x for n, x in enumerate(table) if kept < len(table) and n * kept % len(table) >= kept]


def _case(item):
    return item.callspec.id if hasattr(item, "callspec") else ""


def _keep_marks_of_case(item):
    """Drops the marks of other cases: `slow("x*", "y*")` is for cases whose ids match one of these."""
    item.own_markers = [
        mark
        for mark in item.own_markers
        if mark.name not in ("slow", "every")
        or not mark.args
        or any(fnmatch.fnmatchcase(_case(item), pattern) for pattern in mark.args)
    ]


def _check_marks(items):
    """Raises an error if a mark names cases that there are no more, which would be fast unnoticed."""
    cases = collections.defaultdict(set)
    patterns = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        cases[test].add(_case(item))
        marks = [mark for mark in item.own_markers if mark.name in ("slow", "every")]
        patterns.update((test, pattern) for mark in marks for pattern in mark.args)
    stale = sorted(
        f"{test}: a mark has {pattern!r}, which matches no case"
        for test, pattern in patterns
        if not fnmatch.filter(cases[test], pattern)
    )
    if stale:
        raise pytest.UsageError("\n".join(stale))


def _leave_to_all(item):
    """Marks a test as one that neither the short run nor CI has."""
    item.own_markers = [mark for mark in item.own_markers if mark.name != "slow"]
    item.add_marker(pytest.mark.every)


def _matches(item, patterns):
    name = item.nodeid.removeprefix("tests/")
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report):
    """Says how a worker of pytest-xdist ended: a negative exit code is the number of a signal."""
    code = report.node.gateway._io.popen.wait(10)
    report.longrepr = f"{report.longrepr}: exit code {code}"


# Where warnings of slips are errors, unless a test is marked as having some.
WITHOUT_SLIPS = {"core", "errors", "ops", "optimize", "test_cases.py"}


@pytest.fixture(autouse=True)
def slips(request):
    """Makes slips errors where there are to be none; forgets those of other tests."""
    errors._told.clear()
    strict = not WITHOUT_SLIPS.isdisjoint(request.node.path.parts)
    allowed = request.node.get_closest_marker("slips") or not strict
    with warnings.catch_warnings():
        kind = "default" if allowed else "error"
        warnings.simplefilter(kind, errors.MeshTensorFlowWarning)
        yield


def _process_state():
    return {
        "eager": tf.executing_eagerly(),
        "control flow of TensorFlow 2": tf.control_flow_v2_enabled(),
        "resource variables": tf.resource_variables_enabled(),
        "strict": errors.is_strict(),
    }


@pytest.fixture(autouse=True)
def leaves_the_process_as_it_was():
    """Fails the test that changes TensorFlow's behavior for those after it."""
    before = _process_state()
    yield
    assert _process_state() == before


@pytest.fixture(autouse=True)
def own_bindings():
    """What a test binds by gin, and that it locks these, ends with it."""
    yield
    gin.clear_config()


@pytest.fixture(autouse=True)
def same_random_values():
    """Eager programs without a seed of their own draw the same values in every run."""
    tf2.random.set_seed(1)


@pytest.fixture
def parsed_flags():
    """Flags can be read, as after the start of a program."""
    tf.flags.FLAGS(["test"])


@pytest.fixture
def tf_graph():
    """A fresh default tf graph, in which programs are built as with TensorFlow 1."""
    with tf.Graph().as_default() as graph:
        yield graph


@pytest.fixture
def no_graph_rewriting():
    """TensorFlow does not spend time on rewriting the graphs of functions that run once."""
    before = tf2.config.optimizer.get_experimental_options()
    tf2.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    kept = {"disable_meta_optimizer": False, **before}
    tf2.config.optimizer.set_experimental_options(kept)


@pytest.fixture(scope="session")
def eight_devices():
    """JAX has eight CPUs as its devices, however many the first program that uses them needs."""
    jax = pytest.importorskip("jax", "0.8", reason="mesh_tensorflow.pjrt needs jax>=0.8")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    assert len(jax.devices()) == 8, "something in this process has used JAX before"


@pytest.fixture
def eight_devices_for_pjrt(request):
    """`eight_devices` in those rows of a table whose names say that they run there."""
    if "pjrt" in request.node.name:
        request.getfixturevalue("eight_devices")
