"""Programs as users wrote them: whole scripts, with sessions, hooks, laid-out tensors, subclasses.

Each takes a directory and returns a dictionary of arrays and of plain values.  Where something
is trained there is one trainable variable, so that the classic's steps are deterministic.
"""

import tensorflow.compat.v1 as tf

from helpers.oracle import (
    scripts_extending,  # noqa: F401  (each adds its scripts)
    scripts_tools,  # noqa: F401
    scripts_training,  # noqa: F401
)
from helpers.oracle.script_helpers import SCRIPTS


def run(name, directory):
    with tf.Graph().as_default():
        return SCRIPTS[name](directory)
