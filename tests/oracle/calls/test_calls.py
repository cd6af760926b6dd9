"""Calls of public names, usual, unusual and wrong ones, give what they gave in the classic.

What the classic gave is in ../fixtures/calls.json; what differs on purpose, in call_judged.py.
"""

import pytest
from helpers import processes
from helpers.oracle.calls import call_comparison
from helpers.oracle.calls.call_families import FAMILIES
from helpers.oracle.calls.call_sampler import sample

EXPECTED = call_comparison.load()
NAMES, CALLS = 300, 1500


def test_how_many():
    """The comparison has at least as many names and calls as it claims."""
    calls = {family: sample(text) for family, text in FAMILIES.items()}
    assert sum(len(names) for names in calls.values()) >= NAMES
    assert sum(len(c) for names in calls.values() for c in names.values()) >= CALLS
    for family, names in calls.items():
        assert {c for cs in names.values() for c in cs} == set(EXPECTED[family]), family


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_calls_agree(family):
    """No difference of a family is without a reason, and no reason without a difference.

    In a process of its own, as TensorFlow 2's behavior is turned off in it for good.
    """
    done = processes.run("-m", call_comparison.__name__, family)
    assert done.returncode == 0 and f"{family}: 0 of " in done.stdout, done.stdout + done.stderr
