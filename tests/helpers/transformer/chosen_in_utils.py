"""Trains a language model by utils.run in several processes, in a layout that is chosen."""

import sys

import tensorflow.compat.v1 as tf

import mesh_tensorflow.transformer.utils
from helpers.oracle import utils_runs as runs
from mesh_tensorflow.transformer import dataset

__all__ = ["main"]

ASKED = """
import mesh_tensorflow.transformer.utils
run.train_steps = 2
run.mesh_shape = "rows:2,cols:2"
run.mesh_impl = "{impl}"
run.layout_rules = "auto"
auto_mtf.Auto.seconds = 10
auto_mtf.Auto.candidates = 1
auto_mtf.Auto.cache = "{directory}/cache.json"
"""


def main(directory, impl):
    """Trains; checkpoints are in the directory."""
    runs.register(dataset)
    tf.flags.FLAGS(["test"])
    further = ASKED.format(impl=impl, directory=directory)
    runs.call(mesh_tensorflow.transformer.utils.run, directory, "lm", "train", further)


if __name__ == "__main__":
    main(*sys.argv[1:])
