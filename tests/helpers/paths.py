"""Where things of the tests are, and what processes that tests start need to find them."""

import os
import pathlib
import sys

TESTS = pathlib.Path(__file__).resolve().parents[1]
EXAMPLES = TESTS.parent / "examples"
WORKERS = TESTS / "helpers" / "workers"
FIXTURES = TESTS / "oracle" / "fixtures"


def environment(**more):
    """Returns the environment of a process that imports what this one can, these tests too."""
    found = os.pathsep.join(dict.fromkeys([str(TESTS), *(p for p in sys.path if p)]))
    return {**os.environ, "PYTHONPATH": found, **more}
