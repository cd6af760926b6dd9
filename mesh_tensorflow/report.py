r"""Writes a report of a transformer's training step, configured by gin files, without training it.

python -m mesh_tensorflow.report --gin_file=models/lm_base.gin \
        --gin_param="utils.run.model_type = 'lm'" \
        --mesh_shape="rows:2,cols:4" --layout="batch:rows,d_ff:cols,heads:cols,vocab:cols"
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import tempfile
from collections.abc import Sequence
from typing import Any, Optional

import tensorflow.compat.v1 as tf
from absl import flags
from absl.testing import flagsaver

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import visualize
from mesh_tensorflow._core.errors import is_set, strict
from mesh_tensorflow._programs import parser_of, run_with_parser
from mesh_tensorflow._watching import recorded_lowerings
from mesh_tensorflow.auto_mtf.gin_models import bound
from mesh_tensorflow.estimator import ModeKeys
from mesh_tensorflow.transformer import utils
from mesh_tensorflow.transformer.learning_rate_schedules import training_for
from mesh_tensorflow.transformer.utils._data import has_inputs_feature
from mesh_tensorflow.transformer.utils._settings import length_of_feature

__all__ = ["main"]


class _Ids:
    """Stands for a vocabulary of which only the size is known."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size


def _build_step(
    model_type: str,
    estimator: Any,
    _vocabulary: Any,
    sequence_length: Any,
    batch_size: int,
    _train_dataset_fn: Any,
    train_steps: int,
    ensemble_inputs: Optional[int],
    **_: object,
) -> None:
    """Builds the training step in place of training; takes what `utils.train_model` does."""
    names = ["targets"]
    if has_inputs_feature(model_type, ModeKeys.TRAIN, False):
        names.append("inputs")
    rows = batch_size * (ensemble_inputs or 1)
    with tf.Graph().as_default(), training_for(train_steps):
        features = {
            name: tf.placeholder(tf.int32, [rows, length_of_feature(sequence_length, name)])
            for name in names
        }
        estimator.model_fn(features, None, ModeKeys.TRAIN, estimator.config)


def _lowered(options: argparse.Namespace, directory: str) -> mtf.Lowering:
    """Returns the Lowering of the training step that `utils.run` would train."""
    # A mesh of any size can be placed on one CPU, and nothing is run.
    settings: dict[str, Any] = {"mode": "train", "dataset_split": "train", "mesh_impl": "placement"}
    if bound("utils.run.vocabulary", None) is None:
        settings["vocabulary"] = _Ids(options.vocab_size)
    model_type = bound("utils.run.model_type", "bitransformer")
    with recorded_lowerings() as lowerings:
        utils.run(
            tpu_job_name=None,
            tpu=None,
            gcp_project=None,
            tpu_zone=None,
            model_dir=directory,
            autostack=False,
            train_model_fn=functools.partial(_build_step, model_type),
            **settings,
        )
    return lowerings[-1]


def _parse_gin(options: argparse.Namespace) -> None:
    for module in options.module_import:
        importlib.import_module(module)
    # The command line has been read by argparse, but gin files are looked for in flags of absl.
    flags.FLAGS.mark_as_parsed()
    names = ("gin_file", "gin_param", "gin_location_prefix")
    bindings = {name: getattr(options, name) for name in names}
    # As bindings, since gin evaluates those of the files even where arguments replace them.
    for parameter, value in [("mesh_shape", options.mesh_shape), ("layout_rules", options.layout)]:
        if value is not None:
            bindings["gin_param"] = [*bindings["gin_param"], f"utils.run.{parameter} = {value!r}"]
    with flagsaver.flagsaver(**bindings):
        utils.parse_gin_defaults_and_flags()


def _options(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """Returns what the command line says."""
    parser = parser_of(
        "report",
        "Builds the training step of a transformer as mesh_tensorflow.transformer.main would, and "
        "writes a report of it to one HTML file. Nothing is trained, and no data is read.",
        __doc__,
    )
    parser.add_argument(
        "--gin_file",
        action="append",
        default=[],
        help="file of bindings, also one of the package's; may be repeated",
    )
    parser.add_argument(
        "--gin_param", action="append", default=[], help="a binding; may be repeated"
    )
    parser.add_argument(
        "--gin_location_prefix", action="append", default=[], help="where to search for gin files"
    )
    parser.add_argument(
        "--module_import",
        action="append",
        default=[],
        help="module that registers names for gin files; may be repeated",
    )
    parser.add_argument(
        "--mesh_shape", help='such as "rows:2,cols:4"; utils.run.mesh_shape of the files if none'
    )
    parser.add_argument(
        "--layout", help='such as "batch:rows,d_ff:cols"; utils.run.layout_rules if none'
    )
    parser.add_argument(
        "--vocab_size",
        type=int,
        default=32128,
        help="ids of inputs and of targets, if the files bind no utils.run.vocabulary",
    )
    parser.add_argument("--output", default="report.html", help="the HTML file")
    parser.add_argument("--title", help="its title; the names of the gin files if none")
    parser.add_argument("--hardware", help="name or file of a profile, for times (default: tpu_v3)")
    parser.add_argument(
        "--no_explanation",
        action="store_true",
        help="leave out the comparison with other layouts, which may take seconds",
    )
    options = parser.parse_args(argv)
    if not options.gin_file and not options.gin_param:
        parser.error("--gin_file or --gin_param must say what the model is")
    if options.vocab_size < 3:
        parser.error(f"--vocab_size is {options.vocab_size}: it has to be 3 or more")
    if not options.output.endswith((".html", ".htm")):
        parser.error(f"--output={options.output}: the report is a file that ends in .html")
    return options


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs the command.

    Args:
      argv: the command-line arguments; `sys.argv[1:]` if None.

    Returns:
      0.
    """
    options = _options(argv)
    _parse_gin(options)
    with tempfile.TemporaryDirectory() as directory, strict(is_set("MTF_STRICT", True)):
        lowering = _lowered(options, directory)
    title = options.title or ", ".join(map(os.path.basename, options.gin_file)) or "Transformer"
    visualize.report(
        lowering,
        options.output,
        explain=not options.no_explanation,
        hardware=options.hardware,
        title=title,
    )
    print(visualize.training_report(lowering, places={"report": options.output}))
    return 0


if __name__ == "__main__":
    run_with_parser(main, "mesh_tensorflow.report")
