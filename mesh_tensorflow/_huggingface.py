"""Folders of Hugging Face: the tensors of a model, in one file or several, and its config."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn, Optional

import numpy as np

# NumPy has bfloat16 once this is imported.
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import missing_package
from mesh_tensorflow._paths import written_whole

# Of weights, by the names in files.
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_OF_PYTORCH = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_POINTER = b"version https://git-lfs"  # how it begins
_INDEX, _SINGLE, _CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"


def safetensors_numpy() -> Any:
    """Returns the module safetensors.numpy.

    Raises:
      ImportError: safetensors is not installed.
    """
    try:
        import safetensors.numpy
    except ImportError as e:
        raise missing_package(
            "a folder of Hugging Face", "safetensors", "pip install 'safetensors>=0.5'"
        ) from e
    return safetensors.numpy


def check_no_pointer(file: str) -> None:
    """Checks that a file which could not be read is not what git has in place of a large file.

    Raises:
      ValueError: it is.
    """
    if not os.path.isfile(file):
        return
    with open(file, "rb") as f:
        if f.read(len(_POINTER)) == _POINTER:
            raise ValueError(
                f"{file} is not the file itself, but what git has in its place until it is "
                "fetched: run `git lfs pull` in its folder"
            )


def read_any_json(file: str) -> Any:
    """Reads a JSON file.

    Raises:
      ValueError: it is damaged.
    """
    try:
        with open(file, encoding="utf-8") as f:
            return json.load(f)
    except (ValueError, RecursionError) as error:
        check_no_pointer(file)
        raise ValueError(f"{file} is damaged, it is no JSON: {error}") from error


def read_json(file: str) -> dict[str, Any]:
    """Reads a JSON file that holds an object.

    Raises:
      ValueError: it is damaged, or holds something else.
    """
    content = read_any_json(file)
    if not isinstance(content, dict):
        raise ValueError(f"{file} is damaged: it holds {type(content).__name__}, not an object")
    return content


def _cannot_be_read(path: str) -> NoReturn:
    """Raises a ValueError for a folder without safetensors files, with what to do."""
    if not os.path.isdir(path):
        raise ValueError(
            f"there is no folder {path!r}. Models are read from this machine: bring one here first"
        )
    # As of a cache of downloads that was copied without what its links lead to.
    for name in (_SINGLE, _INDEX):
        if os.path.islink(file := os.path.join(path, name)):
            raise ValueError(
                f"{file} is a link to {os.readlink(file)!r}, where there is no file; copy the "
                "folder with what its links lead to, as `cp -L` does, or get it anew"
            )
    pickles = [name for name in _OF_PYTORCH if os.path.isfile(os.path.join(path, name))]
    if not pickles:
        raise ValueError(
            f"no model.safetensors in {path!r}; files of PyTorch (.bin) are written anew with "
            "`save_pretrained(..., safe_serialization=True)`"
        )
    # Such a file is a program, which may do anything where it is read.
    raise ValueError(
        f"no model.safetensors in {path!r}, but {pickles[0]}, a pickle that is not opened here, as "
        "it could run any code. If you trust it, convert it where PyTorch and transformers are "
        'installed: python -c "import transformers as t; p = '
        f"{path!r}; t.AutoModelForCausalLM.from_pretrained(p, dtype='auto').save_pretrained(p, "
        'safe_serialization=True)"'
    )


def _shards(index: str) -> dict[str, list[str]]:
    """Returns which tensors are read from which file, by the index of a model."""
    weight_map = read_json(index).get("weight_map")
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


class _Header(NamedTuple):
    """What a file says of a tensor.

    Attributes:
      file: its path.
      shape: the sizes of the tensor.
      dtype: its dtype, by the name in files.
      begin: where it begins in the file.
    """

    file: str
    shape: tuple[int, ...]
    dtype: str
    begin: int


class Folder:
    """The tensors of a model, by Hugging Face's names; each is read when it is asked for.

    Headers are read and checked at once, so that a file that is missing or cut is found first.

    Attributes:
      path: where it is.
      config: what config.json says; empty if there is none.
    """

    def __init__(self, path: str) -> None:
        """Opens it.

        Args:
          path: a directory with `model.safetensors` or, if the model is in several files,
            `model.safetensors.index.json`, whose `weight_map` says which file a tensor is read
            from; or the path of a file.

        Raises:
          ImportError: safetensors is not installed.
          ValueError: there are no such files, or one is damaged.
        """
        safetensors_numpy()
        self.path = path
        self.config: dict[str, Any] = {}
        self._headers: dict[str, _Header] = {}
        index, single, config = (os.path.join(path, n) for n in (_INDEX, _SINGLE, _CONFIG))
        if os.path.isfile(path):
            self._add(path, None)
            return
        if os.path.isfile(single):
            self._add(single, None)
        elif os.path.isfile(index):
            for file, names in sorted(_shards(index).items()):
                self._add(file, names)
        else:
            _cannot_be_read(path)
        if os.path.isfile(config):
            self.config = read_json(config)

    def _add(self, file: str, names: Optional[list[str]]) -> None:
        """Adds tensors of a file, all of them if no names are given."""
        if not os.path.isfile(file):
            raise ValueError(f"{file}: there is no such file, but the model's index names it")
        with _opened(file):  # checks that it is whole
            headers = _headers_of(file)
        chosen = sorted(headers if names is None else names)
        missing = [name for name in chosen if name not in headers]
        if missing:
            raise ValueError(
                f"{file} has no {', '.join(missing)}, which the model's index has there"
            )
        self._headers.update({name: headers[name] for name in chosen})

    def __getitem__(self, name: str) -> np.ndarray:
        """Reads a tensor."""
        with _opened(self.file_of(name)) as opened:
            return opened.get_tensor(name)

    def mapped(self, name: str) -> np.ndarray:
        """Returns a tensor where its file has it; what of it is used is read then.

        Returns:
          An array that cannot be written to. The file is mapped into memory while it is there.

        Raises:
          ValueError: the file is damaged, or has a dtype that NumPy lacks.
        """
        file, shape, dtype = self.file_of(name), self.shape(name), self.dtype(name)
        if 0 in shape:
            return np.empty(shape, dtype)
        with _opened(file):  # checks that it is whole still
            return np.memmap(file, dtype, "r", self._headers[name].begin, shape).view(np.ndarray)

    def __iter__(self) -> Iterator[str]:
        """Yields the names."""
        return iter(self._headers)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the sizes of a tensor, without reading it."""
        return self._headers[name].shape

    def dtype(self, name: str) -> np.dtype:
        """Returns the dtype of a tensor, without reading it.

        Raises:
          ValueError: weights have no such dtype.
        """
        file, dtype = self.file_of(name), self._headers[name].dtype
        if dtype not in _DTYPES:
            raise ValueError(
                f"{file}: {name} is of dtype {dtype}, but weights are of {', '.join(_DTYPES)}"
            )
        return tf.as_dtype(_DTYPES[dtype]).as_numpy_dtype

    def file_of(self, name: str) -> str:
        """Returns the path of the file that a tensor is in."""
        return self._headers[name].file


def _headers_of(file: str) -> dict[str, _Header]:
    """Returns the headers of the tensors of a safetensors file that has been checked, by name."""
    # The file: the length of the header in eight bytes, the header in JSON, the values.
    with open(file, "rb") as f:
        size = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(size))
    header.pop("__metadata__", None)
    return {
        name: _Header(file, tuple(x["shape"]), x["dtype"], 8 + size + x["data_offsets"][0])
        for name, x in header.items()
    }


@contextlib.contextmanager
def _opened(file: str) -> Iterator[Any]:
    """Context with an open safetensors file, whose errors name it."""
    from safetensors import safe_open

    try:
        with safe_open(file, framework="numpy") as opened:
            yield opened
    except Exception as error:  # of many kinds, since a file may hold anything
        check_no_pointer(file)
        raise ValueError(
            f"{file} is no whole safetensors file, or has a dtype that NumPy lacks; "
            f"get it anew: {error}"
        ) from error


def has_model(directory: str) -> Optional[str]:
    """Returns the file by which a directory holds a model, in one file or several; or None."""
    paths = (os.path.join(directory, name) for name in (_SINGLE, _INDEX, *_OF_PYTORCH))
    return next((path for path in paths if os.path.exists(path)), None)


def write_folder(
    tensors: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    directory: str,
    write_more: Callable[[str], None] = lambda folder: None,
) -> None:
    """Writes `config.json` and, behind all others, `model.safetensors`.

    Args:
      tensors: a dictionary of NumPy arrays.
      config: a dictionary.
      directory: a string; created if it does not exist.
      write_more: writes further files to the folder that it is given.

    Raises:
      ImportError: safetensors is not installed.
      ValueError: the directory already holds a model.
    """
    save = safetensors_numpy().save_file
    if (existing := has_model(directory)) is not None:
        raise ValueError(f"{existing} exists already; choose another directory")
    with written_whole(directory, last=_SINGLE) as folder:
        with open(os.path.join(folder, _CONFIG), "w", encoding="utf-8") as f:
            json.dump(config, f, indent=2)
        write_more(folder)
        # The package transformers does not load a file without this entry.
        save(dict(tensors), os.path.join(folder, _SINGLE), metadata={"format": "pt"})
