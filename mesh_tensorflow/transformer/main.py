r"""Runs training, evaluation, decoding or export, configured by gin files.

python -m mesh_tensorflow.transformer.main --model_dir=DIR --tpu="" \
        --gin_file=FILE.gin --gin_param="utils.run.train_steps = 1000"

In four processes on this machine, each of which runs the same program:

python -m mesh_tensorflow.launch --processes 4 -m mesh_tensorflow.transformer.main \
        --model_dir=DIR --gin_file=FILE.gin --gin_param="utils.run.mesh_impl = 'simd'"
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
import warnings
from collections.abc import Sequence

import tensorflow.compat.v1 as tf
from absl import app, flags

from mesh_tensorflow import estimator
from mesh_tensorflow._core.strictness import MeshTensorFlowWarning, is_set, strict
from mesh_tensorflow._flags import FLAGS, Flag, define
from mesh_tensorflow.transformer import utils

__all__ = ["FLAGS", "main"]

_DEFAULT_DIRECTORY = "/tmp/transformer_standalone"
_DEFINITIONS: tuple[Flag, ...] = (
    (
        flags.DEFINE_string,
        "tpu_job_name",
        None,
        "Name of the TPU's job, if it is not the default, tpu_worker.",
    ),
    (
        flags.DEFINE_string,
        "model_dir",
        _DEFAULT_DIRECTORY,
        "Directory of checkpoints and what goes with them.",
    ),
    (flags.DEFINE_string, "tpu", None, 'Name or grpc address of a TPU; "" or nothing without one.'),
    (flags.DEFINE_string, "gcp_project", None, "The TPU's project."),
    (flags.DEFINE_string, "tpu_zone", None, "The TPU's zone."),
    (
        flags.DEFINE_multi_string,
        "module_import",
        None,
        "Modules to import, such as those that register data with gin.",
    ),
)

define(_DEFINITIONS)


def _write_command(model_dir: str) -> None:
    """Writes the command line to a new file "command", "command.1" and so on."""
    tf.io.gfile.makedirs(model_dir)
    path, number = os.path.join(model_dir, "command"), 0
    while tf.io.gfile.exists(path):
        number += 1
        path = os.path.join(model_dir, f"command.{number}")
    with tf.io.gfile.GFile(path, "w") as f:
        f.write(shlex.join(sys.argv))


def _warn_of_shared_directory(model_dir: str) -> None:
    """Warns if `model_dir` is the default, a directory that other users can write to."""
    if os.path.normpath(model_dir) == _DEFAULT_DIRECTORY:
        warnings.warn(
            f"model_dir is {_DEFAULT_DIRECTORY}, the default: a name that all users of this "
            "machine know, in a folder where all may write; checkpoints, the gin configuration and "
            "the command line are written there. Pass --model_dir=DIR, a folder of your own",
            MeshTensorFlowWarning,
            stacklevel=2,
        )


def main(_: Sequence[str]) -> None:
    """Imports modules, reads gin files and calls `utils.run`.

    Slips, such as a layout rule for a dimension that the model lacks, are errors; with the
    environment variable MTF_STRICT=0 they are warnings.

    Args:
      _: the remaining command line arguments.
    """
    for module in FLAGS.module_import or []:
        importlib.import_module(module)
    if estimator.RunConfig().is_chief:
        _warn_of_shared_directory(FLAGS.model_dir)
        _write_command(FLAGS.model_dir)
    utils.parse_gin_defaults_and_flags()
    with strict(is_set("MTF_STRICT", True)):
        utils.run(
            tpu_job_name=FLAGS.tpu_job_name,
            tpu=FLAGS.tpu,
            gcp_project=FLAGS.gcp_project,
            tpu_zone=FLAGS.tpu_zone,
            model_dir=FLAGS.model_dir,
        )


if __name__ == "__main__":
    tf.disable_v2_behavior()
    tf.logging.set_verbosity(tf.logging.INFO)
    tf.get_logger().propagate = False  # to absl's logger, which would print each line again
    app.run(main)
