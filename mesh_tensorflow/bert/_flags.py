"""Command-line flags of the BERT programs, which share most of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow.compat.v1 as tf
from absl import flags

__all__ = ["FLAGS", "MESH_FLAGS", "TEXT_FLAGS", "TRAINING_FLAGS", "Flag", "define"]

# This form reads the command line by itself when a flag is first asked for.
FLAGS = tf.flags.FLAGS


class Flag(NamedTuple):
    """A flag: its kind, its default and what it means."""

    kind: Callable[..., Any]
    default: Any
    text: str


def define(definitions: Mapping[str, Flag]) -> None:
    """Defines the flags that no module has defined, and lets those that have keep their default.

    A program reads a flag that was there before through FLAGS all the same.

    Args:
      definitions: flags by name.
    """
    for name, flag in definitions.items():
        if name not in flags.FLAGS:
            flag.kind(name, flag.default, flag.text)


MESH_FLAGS = {
    "mesh_shape": Flag(flags.DEFINE_string, "batch:8", "Mesh, such as batch:2;model:2."),
    "layout": Flag(
        flags.DEFINE_string,
        "batch:batch,vocab:model,intermediate:model,num_heads:model,experts:batch",
        "Layout: which mesh dimension splits which dimension."),
    "use_tpu": Flag(
        flags.DEFINE_bool, False,
        "Whether each processor of the mesh runs a program of its own, as TPU cores do."),
    "tpu_name": Flag(flags.DEFINE_string, None, "Name or grpc address of a TPU."),
    "tpu_zone": Flag(flags.DEFINE_string, None, "The TPU's zone."),
    "gcp_project": Flag(flags.DEFINE_string, None, "The TPU's project."),
    "master": Flag(flags.DEFINE_string, None, "The session's target; this process if empty."),
}

TRAINING_FLAGS = {
    "bert_config_file": Flag(flags.DEFINE_string, None, "Configuration of the model, as JSON."),
    "output_dir": Flag(flags.DEFINE_string, None, "Directory of checkpoints and results."),
    "init_checkpoint": Flag(flags.DEFINE_string, None, "Checkpoint that training begins with."),
    "learning_rate": Flag(flags.DEFINE_float, 5e-5, "The highest learning rate."),
    "optimizer": Flag(flags.DEFINE_string, "adam", "adam or adafactor."),
    "clip_gradients": Flag(
        flags.DEFINE_bool, True, "Whether gradients are clipped to a norm of 1."),
    "train_batch_size": Flag(flags.DEFINE_integer, 32, "Sequences of a batch in training."),
    "save_checkpoints_steps": Flag(
        flags.DEFINE_integer, 1000, "Steps from one checkpoint to the next."),
    "iterations_per_loop": Flag(
        flags.DEFINE_integer, 1000, "For TPUs: steps from one return to the host to the next."),
}

TEXT_FLAGS = {
    "vocab_file": Flag(flags.DEFINE_string, None, "The vocabulary: a token per line."),
    "do_lower_case": Flag(
        flags.DEFINE_bool, True, "Whether text is lowered: for uncased models, and not for cased."),
    "do_train": Flag(flags.DEFINE_bool, False, "Whether to train."),
    "do_predict": Flag(flags.DEFINE_bool, False, "Whether to write predictions."),
    "predict_batch_size": Flag(flags.DEFINE_integer, 8, "Sequences of a batch in prediction."),
    "num_train_epochs": Flag(flags.DEFINE_float, 3.0, "How often training sees each example."),
    "warmup_proportion": Flag(
        flags.DEFINE_float, 0.1, "The share of training in which the learning rate grows."),
    "max_optimized_variable_size": Flag(
        flags.DEFINE_float, 1e7, "Variables with more elements are not trained."),
    "cached_train_file": Flag(
        flags.DEFINE_string, None,
        "Where training examples are kept as records, to be used again if they are there; in "
        "output_dir, and made anew, if None."),
}
