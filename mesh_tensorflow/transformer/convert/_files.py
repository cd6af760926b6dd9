"""Reads and writes TensorFlow checkpoints and directories of Hugging Face models."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Optional, TypeVar

import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow.optimize._base import weights_of
from mesh_tensorflow.transformer.vocabulary import missing_package

__all__ = [
    "check_weights",
    "read_checkpoint",
    "read_huggingface",
    "read_huggingface_files",
    "read_step",
    "write_checkpoint",
    "write_huggingface",
]

Arrays = Mapping[str, np.ndarray]
_Result = TypeVar("_Result")


def read_checkpoint(path: str) -> dict[str, np.ndarray]:
    """Reads the variables of a TensorFlow checkpoint, without optimizer slots.

    Args:
      path: a string, a checkpoint ("dir/model.ckpt-1000"), or a directory, for its latest
        checkpoint.

    Raises:
      ValueError: there is no checkpoint, or it is damaged.
    """
    return _read(
        path,
        lambda reader: {
            name: reader.get_tensor(name)
            for name in sorted(weights_of(reader.get_variable_to_shape_map()))
        },
    )


def read_step(path: str) -> int:
    """Returns the global step of a TensorFlow checkpoint; 0 if it has none.

    Args:
      path: as that of `read_checkpoint`.

    Raises:
      ValueError: there is no checkpoint, or it is damaged.
    """
    return _read(
        path,
        lambda reader: (
            int(reader.get_tensor("global_step")) if reader.has_tensor("global_step") else 0
        ),
    )


def _read(path: str, function: Callable[[tf.train.NewCheckpointReader], _Result]) -> _Result:
    """Calls a function with the reader of a checkpoint."""
    found = checkpoint_files.find(path, "convert")
    try:
        return function(checkpoint_files.open_reader(found))
    except (tf.errors.OpError, IndexError, RuntimeError, ValueError) as error:
        raise ValueError(f"the checkpoint {found} is damaged: {error}") from error


def check_weights(arrays: Arrays, file: str) -> None:
    """Checks that weights are finite floating-point numbers.

    Args:
      arrays: a dictionary of NumPy arrays.
      file: the file that they are of, for the message.

    Raises:
      ValueError: one is of another dtype, or has a value that is NaN or infinite.
    """
    for name, array in arrays.items():
        array = np.asarray(array)
        if not tf.as_dtype(array.dtype).is_floating:
            value = f", such as {array.flat[0]}" if array.size else ""
            raise ValueError(
                f"{file}: {name} is of dtype {array.dtype}{value}; weights of T5 are "
                "floating-point numbers"
            )
        wrong = np.argwhere(~np.isfinite(array.astype(np.float64)))
        if len(wrong):
            place = tuple(int(i) for i in wrong[0])
            raise ValueError(
                f"{file}: {name} has the value {array[place]} at {list(place)}, and {len(wrong)} "
                f"of its {array.size} values are NaN or infinite; a model with them computes NaN. "
                "Take an earlier checkpoint"
            )


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
    # In the same directory, so that files are moved by renaming them.
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
        # Readers find a checkpoint by its index, and the latest by `checkpoint`: these come last.
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


def _tensors(file: str, names: Optional[Iterable[str]] = None) -> dict[str, np.ndarray]:
    """Reads tensors of a safetensors file, all of them if no names are given."""
    _safetensors()
    from safetensors import safe_open

    if not os.path.isfile(file):
        raise ValueError(f"{file}: there is no such file, but the model's index names it")
    try:
        with safe_open(file, framework="numpy") as opened:
            there = set(opened.keys())
            wanted = sorted(there if names is None else names)
            missing = [name for name in wanted if name not in there]
            tensors = {name: opened.get_tensor(name) for name in wanted if name in there}
    except Exception as error:  # of many kinds, since a file may hold anything
        raise ValueError(
            f"{file} is no whole safetensors file, or has a dtype that NumPy lacks; "
            f"get it anew: {error}"
        ) from error
    if missing:
        raise ValueError(f"{file} has no {', '.join(missing)}, which the model's index has there")
    return tensors


def _json(file: str) -> dict[str, Any]:
    """Reads a JSON file that holds an object."""
    try:
        with open(file, encoding="utf-8") as f:
            found = json.load(f)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged, it is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} is damaged: it holds {type(found).__name__}, not an object")
    return found


def _shards(index: str) -> dict[str, list[str]]:
    """Returns which tensors are read from which file, by the index of a model."""
    weight_map = _json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} is damaged: it has no weight_map of names to files")
    shards: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        # Only files beside the index belong to the model.
        if not isinstance(file, str) or file in ("", ".", "..") or os.path.basename(file) != file:
            raise ValueError(
                f"{index} is damaged: weight_map has {file!r} for {name}, no file name"
            )
        shards.setdefault(os.path.join(os.path.dirname(index), file), []).append(name)
    return shards


def read_huggingface(path: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Reads the tensors and the configuration of a Hugging Face model.

    Args:
      path: a string, a directory with `model.safetensors` or, if the model is in several files,
        `model.safetensors.index.json`, whose `weight_map` says which file a tensor is read from; or
        the path of a file.

    Returns:
      A dictionary of NumPy arrays, and the contents of config.json, empty if there is none.

    Raises:
      ImportError: safetensors is not installed.
      ValueError: there are no such files, or one is damaged.
    """
    files, config = read_huggingface_files(path)
    return {name: array for tensors in files.values() for name, array in tensors.items()}, config


def read_huggingface_files(
    path: str,
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
    """Reads a Hugging Face model as `read_huggingface`; returns its tensors by file."""
    _safetensors()
    if os.path.isfile(path):
        return {path: _tensors(path)}, {}
    index, single = (
        os.path.join(path, n) for n in ("model.safetensors.index.json", "model.safetensors")
    )
    if os.path.isfile(single):
        files = {single: _tensors(single)}
    elif os.path.isfile(index):
        files = {file: _tensors(file, names) for file, names in sorted(_shards(index).items())}
    else:
        raise ValueError(
            f"no model.safetensors in {path!r}; files of PyTorch (.bin) are written anew with "
            "`save_pretrained(..., safe_serialization=True)`"
        )
    config = os.path.join(path, "config.json")
    return files, _json(config) if os.path.isfile(config) else {}


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
        save(
            dict(tensors),
            os.path.join(folder, "model.safetensors"),
            # The package transformers does not load a file without this entry.
            metadata={"format": "pt"},
        )
        # The weights come last, as they are what tells that a directory holds a model.
        for name in ("config.json", "model.safetensors"):
            os.replace(os.path.join(folder, name), os.path.join(directory, name))
