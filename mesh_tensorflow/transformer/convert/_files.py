"""Reads and writes TensorFlow checkpoints and directories of Hugging Face models."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.variables import folder
from mesh_tensorflow.transformer.convert._weights import is_weight
from mesh_tensorflow.transformer.vocabulary import missing_package

__all__ = [
    "read_checkpoint",
    "read_huggingface",
    "read_step",
    "write_checkpoint",
    "write_huggingface",
]

Arrays = Mapping[str, np.ndarray]


def read_checkpoint(path: str) -> dict[str, np.ndarray]:
    """Reads the variables of a TensorFlow checkpoint, without optimizer slots.

    Args:
      path: a string, a checkpoint ("dir/model.ckpt-1000"), or a directory, for its latest
        checkpoint.

    Raises:
      ValueError: there is no checkpoint.
    """
    reader = _reader(path)
    names = sorted(reader.get_variable_to_shape_map())
    return {name: reader.get_tensor(name) for name in names if is_weight(name)}


def read_step(path: str) -> int:
    """Returns the global step of a TensorFlow checkpoint; 0 if it has none.

    Args:
      path: as that of `read_checkpoint`.

    Raises:
      ValueError: there is no checkpoint.
    """
    reader = _reader(path)
    return int(reader.get_tensor("global_step")) if reader.has_tensor("global_step") else 0


def _reader(path: str) -> tf.train.NewCheckpointReader:
    return folder.open_reader(folder.find(path, "convert"))


def write_checkpoint(variables: Arrays, directory: str, step: int = 0) -> str:
    """Writes a TensorFlow checkpoint with variables and a global step.

    It is written to a temporary directory first, so that the directory never holds a partial
    checkpoint.

    Args:
      variables: a dictionary of NumPy arrays.
      directory: a string; created if it does not exist.
      step: an integer, the global step.

    Returns:
      The path of the checkpoint, "<directory>/model.ckpt-<step>".

    Raises:
      ValueError: the checkpoint already exists.
    """
    prefix = os.path.join(directory, f"model.ckpt-{step}")
    if tf.io.gfile.exists(f"{prefix}.index"):
        raise ValueError(f"{prefix} exists already; choose another directory or step")
    arrays = {**variables, "global_step": np.int64(step)}
    tf.io.gfile.makedirs(directory)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".convert-") as folder:
        with tf.Graph().as_default(), tf.Session() as sess:
            # Fed rather than constants, since the size of a graph is limited.
            feeds = [tf.placeholder(np.asarray(a).dtype, np.shape(a)) for a in arrays.values()]
            save = tf.raw_ops.SaveV2(
                prefix=os.path.join(folder, "model"),
                tensor_names=list(arrays),
                shape_and_slices=[""] * len(arrays),
                tensors=feeds,
            )
            sess.run(save, dict(zip(feeds, arrays.values())))
        name = os.path.basename(prefix)
        with open(os.path.join(folder, "checkpoint"), "w", encoding="utf-8") as f:
            f.write(f'model_checkpoint_path: "{name}"\nall_model_checkpoint_paths: "{name}"\n')
        for ending in (".data-00000-of-00001", ".index"):
            os.replace(os.path.join(folder, f"model{ending}"), f"{prefix}{ending}")
        os.replace(os.path.join(folder, "checkpoint"), os.path.join(directory, "checkpoint"))
    return prefix


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as e:
        raise missing_package(
            "mesh_tensorflow.transformer.convert",
            "safetensors",
            "pip install 'safetensors>=0.5'",
        ) from e
    return safetensors.numpy


def read_huggingface(path: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Reads the tensors and the configuration of a Hugging Face model.

    Args:
      path: a string, a directory with `model.safetensors` or, if the model is in several files,
        `model.safetensors.index.json`; or the path of a file.

    Returns:
      A dictionary of NumPy arrays, and the contents of config.json, empty if there is none.

    Raises:
      ImportError: safetensors is not installed.
      ValueError: there are no such files.
    """
    load = _safetensors().load_file
    if os.path.isfile(path):
        return load(path), {}
    index, single = (
        os.path.join(path, n) for n in ("model.safetensors.index.json", "model.safetensors")
    )
    if os.path.isfile(single):
        files = [single]
    elif os.path.isfile(index):
        with open(index, encoding="utf-8") as f:
            names = set(json.load(f)["weight_map"].values())
        files = [os.path.join(path, n) for n in sorted(names)]
    else:
        raise ValueError(
            f"no model.safetensors in {path!r}; files of PyTorch (.bin) are written anew with "
            "`save_pretrained(..., safe_serialization=True)`"
        )
    tensors = {name: array for file in files for name, array in load(file).items()}
    config = os.path.join(path, "config.json")
    if not os.path.isfile(config):
        return tensors, {}
    with open(config, encoding="utf-8") as f:
        return tensors, json.load(f)


def write_huggingface(tensors: Arrays, config: Mapping[str, Any], directory: str) -> None:
    """Writes `config.json` and then `model.safetensors`.

    Args:
      tensors: a dictionary of NumPy arrays.
      config: a dictionary.
      directory: a string; created if it does not exist.

    Raises:
      ImportError: safetensors is not installed.
      ValueError: the directory already holds a model.
    """
    save = _safetensors().save_file
    path = os.path.join(directory, "model.safetensors")
    if os.path.exists(path):
        raise ValueError(f"{path} exists already; choose another directory")
    os.makedirs(directory, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".convert-") as folder:
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
            json.dump(config, f, indent=2)
        save(dict(tensors), os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
        for name in ("config.json", "model.safetensors"):
            os.replace(os.path.join(folder, name), os.path.join(directory, name))
