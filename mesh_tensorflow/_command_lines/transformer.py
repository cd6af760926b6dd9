"""The command lines of `mesh_tensorflow.transformer.main` and `.transformer.convert`."""

from __future__ import annotations

import argparse

from absl import flags

from mesh_tensorflow._command_lines.flag_table import Flag, FlagProgram
from mesh_tensorflow._command_lines.parser import Parser, ParserProgram

__all__ = [
    "CONVERT",
    "CONVERT_DTYPES",
    "CONVERT_NORMS",
    "DEFAULT_DIRECTORY",
    "GIN_FLAGS",
    "MAIN",
    "MODES",
    "RUN_FLAGS",
]

DEFAULT_DIRECTORY = "/tmp/transformer_standalone"

RUN_FLAGS: tuple[Flag, ...] = (
    (
        flags.DEFINE_string,
        "tpu_job_name",
        None,
        "Name of the TPU's job, if it is not the default, tpu_worker.",
    ),
    (
        flags.DEFINE_string,
        "model_dir",
        DEFAULT_DIRECTORY,
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

GIN_FLAGS: tuple[Flag, ...] = (
    (flags.DEFINE_multi_string, "gin_file", None, "Path to a Gin file."),
    (flags.DEFINE_multi_string, "gin_param", None, "Gin parameter binding."),
    (flags.DEFINE_list, "gin_location_prefix", [], "Gin file search path."),
)

# What utils.run.mode may be, and what each does.
MODES = {
    "train": "trains to utils.run.train_steps, from the last checkpoint in --model_dir",
    "eval": "decodes, and computes the metrics of the evaluation data sets",
    "score_eval": "scores targets, and computes the metrics of the evaluation data sets",
    "perplexity_eval": "computes loss and perplexity of the evaluation data sets",
    "infer": "decodes the lines of a text file (infer_model.input_filename)",
    "score_from_dataset": "writes the log likelihoods of the evaluation data sets",
    "score_from_strings": "writes the log likelihoods of lines of text",
    "export": "exports a model that decodes, as a SavedModel",
    "export_infer": "the same",
    "export_score": "exports a model that scores",
}

_BINDINGS = (
    "utils.run.mesh_shape      such as 'batch:2,model:2'; required",
    "utils.run.layout_rules    such as 'batch:batch,d_ff:model'; required",
    "utils.run.model_type      'lm', 'bitransformer' and others (default: 'bitransformer')",
    "utils.run.mode            see below (default: 'train')",
    "utils.run.mesh_impl       'placement' or 'simd' (default: chosen by the devices)",
    "utils.run.train_steps     the step to train to",
    "utils.run.batch_size      sequences of a step (default: ('tokens_per_replica', 2048))",
    "utils.run.sequence_length such as {'inputs': 512, 'targets': 128}; required",
    "utils.run.vocabulary      such as @get_default_vocabulary(); required",
    "utils.run.train_dataset_fn, utils.run.eval_dataset_fn   the data",
    "utils.run.optimizer       such as @adafactor.AdafactorOptimizer",
)

MAIN = FlagProgram(
    name="mesh_tensorflow.transformer.main",
    description="Trains, evaluates, decodes, scores or exports a transformer of gin files.",
    examples=(
        '--model_dir=DIR --gin_file=FILE.gin \\\n      --gin_param="utils.run.train_steps = 1000"',
    ),
    table=(*RUN_FLAGS, *GIN_FLAGS),
    sections={
        "Bindings in gin files, or by --gin_param='NAME = VALUE'": _BINDINGS,
        "Modes (utils.run.mode)": tuple(f"{name:<19} {text}" for name, text in MODES.items()),
        "Environment": (
            "MTF_STRICT=0        slips, such as layout rules that nothing uses, are warnings",
            "MTF_TRACEBACK=1     errors are shown with their traceback",
        ),
    },
)

CONVERT_DTYPES = ("float32", "float16", "bfloat16")
CONVERT_NORMS = ("layer_norm", "rms_norm")


def _convert_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m mesh_tensorflow.transformer.convert",
        description="Converts checkpoints of T5 models to and from Hugging Face's format; joins "
        "checkpoints of a model and its draft.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    there = commands.add_parser("to-huggingface", help="a checkpoint to model.safetensors")
    there.add_argument("checkpoint", help="a checkpoint, or a directory: its latest")
    there.add_argument("directory", help="where to write")
    there.add_argument("--feed_forward", help="activation; by default relu or gated-gelu")
    back = commands.add_parser("from-huggingface", help="model.safetensors to a checkpoint")
    back.add_argument("path", help="a directory or a safetensors file")
    back.add_argument("directory", help="the model directory, where to write")
    back.add_argument("--step", type=int, default=0, help="the global step")
    back.add_argument(
        "--tied",
        action=argparse.BooleanOptionalAction,
        help="whether the softmax uses the embedding; by default what config.json says",
    )
    back.add_argument(
        "--norm_name", choices=CONVERT_NORMS, default="layer_norm", help="names of norms"
    )
    both = commands.add_parser("with-draft", help="two checkpoints to one, for decoding")
    both.add_argument("checkpoint", help="a checkpoint, or a directory: its latest")
    both.add_argument("draft", help="the same, of the draft")
    both.add_argument("directory", help="the model directory, where to write")
    for command in (there, back):
        command.add_argument("--vocab_size", type=int, help="rows of the embedding")
        command.add_argument("--dtype", choices=CONVERT_DTYPES, help="by default unchanged")
    return parser


CONVERT = ParserProgram(_convert_parser)
