"""Compares what calls give here with what the classic gave; as a program, prints what differs.

    cd tests
    PYTHONPATH=.. python -m helpers.oracle.calls.call_comparison [FAMILY...] [-a]   # -a: judged ones too
"""

import collections
import json
import math
import sys

from helpers.oracle.calls.call_families import FAMILIES
from helpers.oracle.calls.call_judged import JUDGED, judge
from helpers.oracle.calls.call_outcomes import outcome
from helpers.oracle.calls.call_sampler import sample
from helpers.paths import FIXTURES

Difference = collections.namedtuple("Difference", "name call expected found judged")


def load():
    """Returns {family: {call: what the classic gave}}."""
    return json.loads((FIXTURES / "calls.json").read_text())


def same(expected, found):
    """Whether two descriptions are equal; numbers to 1e-4 of their size, for sums in another order."""
    if isinstance(expected, float) or isinstance(found, float):
        numbers = all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in (expected, found))
        return numbers and math.isclose(expected, found, rel_tol=1e-4, abs_tol=1e-5)
    if isinstance(expected, dict) and isinstance(found, dict):
        return expected.keys() == found.keys() and all(same(expected[k], found[k]) for k in expected)
    if isinstance(expected, list) and isinstance(found, list):
        return len(expected) == len(found) and all(map(same, expected, found))
    return type(expected) is type(found) and expected == found


def agree(expected, found):
    """Whether outcomes agree: equal values, or an error at one moment that a handler of the classic's catches."""
    if "error" in expected or "error" in found:
        return ("error" in expected and "error" in found
                and expected["error"] in found["error"] and expected["when"] == found["when"])
    return same(expected, found)


def differences(family, expected):
    """Yields a Difference for each call of a family whose outcome here isn't the classic's."""
    for name, calls in sample(FAMILIES[family]).items():
        for call in calls:
            found = json.loads(json.dumps(outcome(call)))
            if not agree(expected[call], found):
                judged = judge(family, call, expected[call], found, same)
                yield Difference(name, call, expected[call], found, judged)


def main():
    """Prints differences without a reason, and reasons without a difference; returns how many."""
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    fixture, total = load(), 0
    for family in [a for a in sys.argv[1:] if a != "-a"] or FAMILIES:
        count, used = 0, set()
        for d in differences(family, fixture[family]):
            used.add(d.judged and d.judged[1])
            count += not d.judged
            if not d.judged or "-a" in sys.argv:
                print(f"{d.call}\n    classic: {brief(d.expected)}\n    here:    {brief(d.found)}")
                print(f"    judged:  {d.judged[0]}" if d.judged else "    not judged")
        stale = [pattern for pattern, _ in JUDGED.get(family, ()) if pattern not in used]
        print(*(f"{pattern}\n    is judged, but does not differ" for pattern in stale), sep="\n")
        print(f"{family}: {count} of {len(fixture[family])} calls differ, {len(stale)} reasons are idle")
        total += count + len(stale)
    return total


def brief(result):
    """Returns a line about an outcome."""
    if "error" in result:
        error = result["error"] if isinstance(result["error"], str) else result["error"][0]
        return f"{error} ({result['when']}) {result.get('text', '')}"[:200]
    return json.dumps(result)[:240]


if __name__ == "__main__":
    sys.exit(main() > 0)
