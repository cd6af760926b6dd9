r"""Runs training, evaluation, decoding or export, configured by gin files.

python -m mesh_tensorflow.transformer.main --model_dir=DIR --tpu="" \
        --gin_file=FILE.gin --gin_param="utils.run.train_steps = 1000"

In four processes on this machine, each of which runs the same program:

python -m mesh_tensorflow.launch --processes 4 -m mesh_tensorflow.transformer.main \
        --model_dir=DIR --gin_file=FILE.gin --gin_param="utils.run.mesh_impl = 'simd'"

The layout whose steps are the fastest, of those that a cost model prefers, is trained with by
--layout=auto --mesh_shape="batch:2,model:2", after a minute, or auto_mtf.Auto.seconds of gin.

Bindings in gin files, or by --gin_param="NAME = VALUE":
  utils.run.mesh_shape      such as 'batch:2,model:2'; required, here or by --mesh_shape
  utils.run.layout_rules    such as 'batch:batch,d_ff:model', or 'auto'; required, or --layout
  utils.run.model_type      'lm', 'bitransformer' and others (default: 'bitransformer')
  utils.run.mode            see below (default: 'train')
  utils.run.mesh_impl       'placement' or 'simd' (default: chosen by the devices)
  utils.run.train_steps     the step to train to
  utils.run.batch_size      sequences of a step (default: ('tokens_per_replica', 2048))
  utils.run.sequence_length such as {'inputs': 512, 'targets': 128}; required
  utils.run.vocabulary      such as @get_default_vocabulary(); required
  utils.run.train_dataset_fn, utils.run.eval_dataset_fn   the data
  utils.run.optimizer       such as @adafactor.AdafactorOptimizer

Modes (utils.run.mode):
  train               trains to utils.run.train_steps, from the last checkpoint in --model_dir
  eval                decodes, and computes the metrics of the evaluation data sets
  score_eval          scores targets, and computes the metrics of the evaluation data sets
  perplexity_eval     computes loss and perplexity of the evaluation data sets
  infer               decodes the lines of a text file (decode_from_file.input_filename)
  score_from_dataset  writes the log likelihoods of the evaluation data sets
  score_from_strings  writes the log likelihoods of lines of text
  export              exports a model that decodes, as a SavedModel
  export_infer        the same
  export_score        exports a model that scores

Environment: with MTF_STRICT=0, slips such as layout rules that nothing uses are warnings; with
MTF_TRACEBACK=1, errors are shown with their traceback.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
import warnings
from collections.abc import Sequence

import gin
import tensorflow.compat.v1 as tf
from absl import flags

from mesh_tensorflow import estimator
from mesh_tensorflow._core.errors import MeshTensorFlowWarning, is_set, strict
from mesh_tensorflow._programs import FLAGS, define, run_with_flags
from mesh_tensorflow.transformer import utils

__all__ = ["FLAGS", "main"]

DEFAULT_DIRECTORY = "/tmp/transformer_standalone"

_MODULES = "Modules to import, such as those that register data with gin."
_LAYOUT = (
    'The layout; as utils.run.layout_rules if none. "auto" tries the best by the cost model, and '
    "trains with the fastest."
)
define(
    [
        (flags.DEFINE_multi_string, "module_import", None, _MODULES),
        (flags.DEFINE_string, "mesh_shape", None, "The mesh; as utils.run.mesh_shape if none."),
        (flags.DEFINE_string, "layout", None, _LAYOUT),
    ],
    tpu_job_name=(None, "Name of the TPU's job, if it is not the default, tpu_worker."),
    model_dir=(DEFAULT_DIRECTORY, "Directory of checkpoints and what goes with them."),
    tpu=(None, 'Name or grpc address of a TPU; "" or nothing without one.'),
    gcp_project=(None, "The TPU's project."),
    tpu_zone=(None, "The TPU's zone."),
)

for _name in ("gin_file", "gin_param", "gin_location_prefix"):  # which --help lists, too
    flags.declare_key_flag(_name)


def _write_command(model_dir: str) -> None:
    """Writes the command line to a new file "command", "command.1" and so on."""
    tf.io.gfile.makedirs(model_dir)
    path, number = os.path.join(model_dir, "command"), 0
    # A run that goes on from an earlier one keeps the command of that one.
    while tf.io.gfile.exists(path):
        number += 1
        path = os.path.join(model_dir, f"command.{number}")
    with tf.io.gfile.GFile(path, "w") as f:
        f.write(shlex.join(sys.argv))


def _warn_of_shared_directory(model_dir: str) -> None:
    """Warns if `model_dir` is the default, a directory that other users can write to."""
    if os.path.normpath(model_dir) == DEFAULT_DIRECTORY:
        warnings.warn(
            f"model_dir is {DEFAULT_DIRECTORY}, the default: a name that all users of this "
            "machine know, in a folder where all may write; checkpoints, the gin configuration and "
            "the command line are written there. Pass --model_dir=DIR, a folder of your own",
            MeshTensorFlowWarning,
            stacklevel=2,
        )


def _import(module: str) -> None:
    """Imports a module of the user's.

    Raises:
      ValueError: there is none of this name.
    """
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A module that the user's module imports is missing: that error says more.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"--module_import={module}: there is no module {error.name}. Modules are searched for "
            "in the current directory and in PYTHONPATH"
        ) from error


def main(_: Sequence[str]) -> None:
    """Imports modules, reads gin files and calls `utils.run`.

    Slips, such as a layout rule for a dimension that the model lacks, are errors; with the
    environment variable MTF_STRICT=0 they are warnings.

    Args:
      _: the remaining command line arguments.
    """
    # Before gin files are read: these may name what only the modules register.
    for module in FLAGS.module_import or []:
        _import(module)
    # Once, and not in each of several processes.
    if estimator.RunConfig().is_chief:
        _warn_of_shared_directory(FLAGS.model_dir)
        _write_command(FLAGS.model_dir)
    utils.parse_gin_defaults_and_flags()
    for flag, name in [("mesh_shape", "mesh_shape"), ("layout", "layout_rules")]:
        # A program that calls this may have flags of these names, with defaults of its own.
        if FLAGS[flag].present:
            with gin.unlock_config():
                gin.bind_parameter(f"utils.run.{name}", FLAGS[flag].value)
    with strict(is_set("MTF_STRICT", True)):
        utils.run(
            tpu_job_name=FLAGS.tpu_job_name,
            tpu=FLAGS.tpu,
            gcp_project=FLAGS.gcp_project,
            tpu_zone=FLAGS.tpu_zone,
            model_dir=FLAGS.model_dir,
        )


if __name__ == "__main__":
    run_with_flags(main, "mesh_tensorflow.transformer.main")
