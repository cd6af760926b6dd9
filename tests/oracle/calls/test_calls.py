"""Calls of public names, usual, unusual and wrong ones, give what they gave in the classic.

What the classic gave is in ../fixtures/calls.json; what differs on purpose, in call_judged.py.
"""

import call_comparison
import call_judged
import pytest
import tensorflow.compat.v1 as tf
from call_families import FAMILIES
from call_sampler import sample

EXPECTED = call_comparison.load()
NAMES, CALLS = 300, 1500


def test_how_many():
    """The comparison has at least as many names and calls as it claims."""
    calls = {family: sample(text) for family, text in FAMILIES.items()}
    assert sum(len(names) for names in calls.values()) >= NAMES
    assert sum(len(c) for names in calls.values() for c in names.values()) >= CALLS
    for family, names in calls.items():
        assert {c for cs in names.values() for c in cs} == set(EXPECTED[family]), family


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_agree(family):
    """No difference of a family is without a reason, and no reason without a difference."""
    tf.disable_v2_behavior()
    found = list(call_comparison.differences(family, EXPECTED[family]))
    unjudged = [d for d in found if d.judged is None]
    lines = [
        f"{d.call}: classic {call_comparison.brief(d.expected)}, here {call_comparison.brief(d.found)}"
        for d in unjudged]
    assert not unjudged, "\n" + "\n".join(lines)
    used = {d.judged[1] for d in found}
    assert [p for p, _ in call_judged.JUDGED.get(family, ()) if p not in used] == []
