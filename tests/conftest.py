"""Which tests run, in which order; what they share is in helpers/fixtures.py."""

import collections
import fnmatch
import gc
import os
import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
# What is imported and collected stays: a quarter of that time was spent on looking for garbage.
gc.disable()
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# Two workers on two cores: threads of one operation would take each other's time.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import pytest
from helpers.choices import ABOUT, KINDS, VARIABLE, choose, set_environment
from helpers.quiet import import_tensorflow

# What takes longest, or mostly waits for other processes, begins first, beside all others.
FIRST = """
mesh/test_conformance.py::test_all*simd*
estimator/test_cluster.py*
mesh/test_launch.py*
mesh/test_conformance.py::test_all*
""".split("\n")[1:-1]

# Of the slow cases of one test, CI has one and one in twelve, but at most these; --all has every one.
MOST_SLOW = 5


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
    named = any("::" in argument for argument in config.args)
    if not (config.getoption("--all") or config.option.markexpr or named):
        config.option.markexpr = "not slow and not every"
    # The process that hands tests out to workers runs none: it starts them seconds earlier if it
    # imports no TensorFlow.
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        gc.enable()
        return
    # The environment is read when TensorFlow and the package are imported.
    set_environment(os.environ.setdefault(VARIABLE, config.getoption("--choices") or ""))
    import_tensorflow()
    config.pluginmanager.import_plugin("helpers.fixtures")
    choose()


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


def pytest_collection_finish():
    """From here on there is garbage, and none of it among what the tests are."""
    gc.freeze()
    gc.enable()


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
