"""Converts models from files to files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Optional

import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow.transformer.convert._files import (
    check_weights,
    read_checkpoint,
    read_huggingface_files,
    read_step,
    write_checkpoint,
    write_huggingface,
)
from mesh_tensorflow.transformer.convert._weights import huggingface_to_mesh, mesh_to_huggingface

__all__ = ["DTYPES", "from_huggingface", "to_huggingface", "with_draft"]

Arrays = Mapping[str, np.ndarray]

DTYPES = {"float32": tf.float32, "float16": tf.float16, "bfloat16": tf.bfloat16}


def _cast(arrays: Arrays, dtype: Optional[str]) -> Arrays:
    if dtype is None:
        return arrays
    with np.errstate(over="ignore"):  # is told below
        cast = {name: a.astype(DTYPES[dtype].as_numpy_dtype) for name, a in arrays.items()}
    check_weights(cast, f"as {dtype}")
    return cast


def to_huggingface(
    checkpoint: str,
    directory: str,
    feed_forward: Optional[str] = None,
    vocab_size: Optional[int] = None,
    dtype: Optional[str] = None,
) -> None:
    """Converts a checkpoint of this package to a directory for T5ForConditionalGeneration.

    Args:
      checkpoint: a string, a checkpoint, or a directory, for its latest checkpoint.
      directory: a string, the directory to write to.
      feed_forward: a string or `None`; see `mesh_to_huggingface`.
      vocab_size: an integer or `None`; see `mesh_to_huggingface`.
      dtype: a string, "float32", "float16" or "bfloat16"; by default each weight keeps its own.

    Raises:
      ImportError: safetensors is not installed.
      ValueError: this is not a T5 model, a weight is of integers or not finite, or the directory
        already holds a model.
    """
    variables = read_checkpoint(checkpoint)
    check_weights(variables, checkpoint)
    tensors, config = mesh_to_huggingface(variables, feed_forward, vocab_size)
    write_huggingface(_cast(tensors, dtype), config, directory)


def from_huggingface(
    path: str,
    directory: str,
    step: int = 0,
    tied: Optional[bool] = None,
    norm_name: str = "layer_norm",
    vocab_size: Optional[int] = None,
    dtype: Optional[str] = None,
) -> str:
    """Converts a directory of T5ForConditionalGeneration to a checkpoint of this package.

    Args:
      path: a string, the directory or a safetensors file.
      directory: a string, the model directory to write to.
      step: an integer, the global step.
      tied: a boolean; see `huggingface_to_mesh`. By default, the value in config.json.
      norm_name: a string; see `huggingface_to_mesh`.
      vocab_size: an integer or `None`; see `huggingface_to_mesh`.
      dtype: a string, "float32", "float16" or "bfloat16"; by default each weight keeps its own.

    Returns:
      The path of the checkpoint.

    Raises:
      ImportError: safetensors is not installed.
      ValueError: a file is damaged, this is not a T5 model, a weight is of integers or not finite,
        or the checkpoint already exists.
    """
    files, config = read_huggingface_files(path)
    for file, part in files.items():
        check_weights(part, file)
    tensors = {name: array for part in files.values() for name, array in part.items()}
    if tied is None:
        tied = config.get("scale_decoder_outputs", config.get("tie_word_embeddings"))
        if tied not in (None, True, False):
            raise ValueError(
                f"{path}: config.json has {tied!r} for scale_decoder_outputs or "
                "tie_word_embeddings; say by `tied` whether the softmax uses the embedding"
            )
    variables = huggingface_to_mesh(tensors, tied, norm_name, vocab_size)
    return write_checkpoint(_cast(variables, dtype), directory, step)


def with_draft(checkpoint: str, draft: str, directory: str) -> str:
    """Writes a checkpoint of a model together with its draft, for decoding.

    The draft's variables are in the scope "draft", where `draft_model` of
    `Unitransformer.sample_autoregressive` and `Bitransformer.decode` has them.

    Args:
      checkpoint: a string, a checkpoint, or a directory, for its latest checkpoint.
      draft: the same, of the draft, which is trained like any model.
      directory: a string, the model directory to write to.

    Returns:
      The path of the checkpoint, which has the model's step.

    Raises:
      ValueError: there is no such checkpoint, the first one has a draft already, or the result
        already exists.
    """
    variables = read_checkpoint(checkpoint)
    if any(name.startswith("draft/") for name in variables):
        raise ValueError(
            f"{checkpoint} already holds a draft; give the checkpoint of the model alone"
        )
    small = {f"draft/{name}": value for name, value in read_checkpoint(draft).items()}
    return write_checkpoint({**variables, **small}, directory, read_step(checkpoint))
