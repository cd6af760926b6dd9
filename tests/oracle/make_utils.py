"""Writes fixtures/utils.json: what functions and whole runs of the classic's utils give.

Run with the oracle's Python (see README.md):  python -m oracle.make_utils
"""

import json
import os
import shutil
import sys
import tempfile
from unittest import mock

import classic_shim  # noqa: F401  (first: makes the classic importable)
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
tf.logging.set_verbosity(tf.logging.ERROR)
sys.modules["tensorflow_datasets"] = mock.MagicMock()  # which the classic's transformer imports

from helpers.oracle.utils_cases import CASES  # noqa: E402
from helpers.oracle.utils_runs import (  # noqa: E402  # noqa: E402
    MICROBATCHES,
    MODELS,
    SCORES,
    STEP,
    call,
    decoded_file,
    register,
    summaries,
    write_checkpoint,
)

import mesh_tensorflow as mtf  # noqa: E402
from mesh_tensorflow.transformer import dataset, utils  # noqa: E402

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fixtures", "utils.json")


def ids(line):
    """Returns the ids of a line of a file, which the classic writes as the text of bytes."""
    words = line.removeprefix("b'").removesuffix("'").split()
    while words and words[-1] == "0":
        words.pop()
    return " ".join(words)


def one_model(model_type):
    found = {}
    with tempfile.TemporaryDirectory() as first:
        call(utils.run, first, model_type, "train")
        found["variables"] = dict(tf.train.list_variables(first))
    with tempfile.TemporaryDirectory() as directory:
        path = write_checkpoint(directory, found["variables"])
        for name, further in (
            ("loss", ""),
            ("loss_microbatches", MICROBATCHES),
            ("loss_packed", ""),
        ):
            own = os.path.join(directory, name)
            call(
                utils.run,
                own,
                model_type,
                "train",
                (f'run.init_checkpoint = "{path}"\nrun.train_steps = {STEP + 1}\n{further}'),
                packed=name == "loss_packed",
            )
            found[name] = summaries(own)["loss"]
            shutil.rmtree(own)
        call(utils.run, directory, model_type, "perplexity_eval")
        found["perplexity"] = summaries(os.path.join(directory, "eval_task_validation_8"))
        if model_type != "aligned":
            call(utils.run, directory, model_type, "score_from_strings")
            found["scores"] = list(SCORES)
            found["decoded"] = [
                ids(line) for line in decoded_file(directory, utils.run, model_type)
            ]
    return found


def main():
    tf.flags.FLAGS(["make_utils"])
    register(dataset)
    fixture = {
        "functions": {name: case(utils, mtf) for name, case in CASES.items()},
        "models": {model_type: one_model(model_type) for model_type in MODELS},
    }
    with open(PATH, "w") as f:
        json.dump(fixture, f, separators=(",", ":"), sort_keys=True)


if __name__ == "__main__":
    main()
