"""Writes fixtures/calls.json: what the classic gives for each call of the tables.

Run with the oracle's Python (see ../README.md):  python -m oracle.calls.make_calls [FAMILY...]
"""

import json
import os
import sys
from unittest import mock

HERE = os.path.dirname(os.path.abspath(__file__))

import classic_shim  # noqa: E402,F401  (first: makes the classic importable)
import tensorflow.compat.v1 as tf  # noqa: E402

tf.disable_v2_behavior()
tf.logging.set_verbosity(tf.logging.FATAL)
sys.modules["tensorflow_datasets"] = mock.MagicMock()  # which the classic's transformer imports

from helpers.oracle.calls.call_families import FAMILIES  # noqa: E402
from helpers.oracle.calls.call_outcomes import outcome  # noqa: E402
from helpers.oracle.calls.call_sampler import sample  # noqa: E402

PATH = os.path.join(HERE, os.pardir, "fixtures", "calls.json")


def kept(found):
    """Returns of an outcome what is compared: of an error, the type that is raised."""
    if "error" in found:
        return {k: found[k] for k in ("when", "declared")} | {"error": found["error"][0]}
    return found


def family_outcomes(family):
    """Returns {call: outcome} of a family; TensorFlow ends the process for a few wrong calls."""
    found = {}
    for calls in sample(FAMILIES[family]).values():
        for call in calls:
            if "-v" in sys.argv:
                print(call, flush=True)
            found[call] = kept(outcome(call))
    return found


def main():
    families = [a for a in sys.argv[1:] if a != "-v"] or list(FAMILIES)
    fixture = {}
    if os.path.exists(PATH):
        with open(PATH) as f:
            fixture = json.load(f)
    for family in families:
        fixture[family] = family_outcomes(family)
        print(family, len(fixture[family]), flush=True)
        with open(PATH, "w") as f:
            known = {k: fixture[k] for k in FAMILIES if k in fixture}
            json.dump(known, f, separators=(",", ":"), indent=0)


if __name__ == "__main__":
    main()
