"""Writes fixtures/structure.json: what the programs of the table are made of in the classic.

Run with the oracle's Python (see README.md):  python -m oracle.make_structure
"""

import json
import os
import sys
from unittest import mock

import classic_shim  # noqa: F401  (first: makes the classic importable)
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
tf.logging.set_verbosity(tf.logging.ERROR)
sys.modules["tensorflow_datasets"] = mock.MagicMock()  # which the classic's transformer imports
sys.modules["tensorflow_probability"] = mock.MagicMock()  # and its experimental package

from helpers.oracle import oracle_runner as runner  # noqa: E402
from helpers.oracle import structure  # noqa: E402
from helpers.oracle.oracle_table import FAMILIES  # noqa: E402

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fixtures", "structure.json")


def main():
    found, reads = {}, {}
    for family, programs in FAMILIES.items():
        found[family] = {}
        for name, program in programs.items():
            with tf.Graph().as_default():
                try:
                    made = structure.of(program, runner.Case(name, "", ""))[1]
                except Exception as error:  # what the classic cannot build
                    print(name, type(error).__name__)
                    continue
            found[family][name] = made["dimensions"]
            for part, names in made["reads"].items():
                reads[part] = sorted({*reads.get(part, []), *names})
    with open(PATH, "w") as f:
        json.dump({"dimensions": found, "reads": reads}, f, sort_keys=True, separators=(",", ":"))


if __name__ == "__main__":
    main()
