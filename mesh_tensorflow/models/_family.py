"""What a family of models is: how its config.json becomes a model, and its weights' two names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import numpy as np

from mesh_tensorflow._huggingface import Folder
from mesh_tensorflow.models._gguf import GgufFile
from mesh_tensorflow.transformer.transformer import Unitransformer


class Weight(NamedTuple):
    """A weight, by both names.

    Attributes:
      ours: the name of the variable.
      dims: the names of its dimensions, in the variable's order, as in "d_model heads d_kv".
      theirs: Hugging Face's name.
      stored: the names of the dimensions in the file's order, those that are one dimension there
        joined by "*", as in "heads*d_kv d_model".
    """

    ours: str
    dims: str
    theirs: str
    stored: str


class Form(NamedTuple):
    """A model of a family, as its config.json says.

    Attributes:
      model: a function of a LayoutRules and a mesh Shape that returns the Unitransformer.
      weights: its Weights.
      sizes: the sizes of the dimensions that the Weights name.
    """

    model: Callable[[Any, Any], Unitransformer]
    weights: Sequence[Weight]
    sizes: Mapping[str, int]


class Config:
    """The fields of a config.json, for a family to read; errors name the file's folder."""

    def __init__(self, path: str, fields: Mapping[str, Any]) -> None:
        self.path = path
        self._fields = dict(fields)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a field, or the default if it is missing or null.

        Args:
          name: its name.
          default: any value.
        """
        value = self._fields.get(name)
        return default if value is None else value

    def number(self, name: str, default: Optional[int] = None) -> int:
        """Returns a field that is a positive integer.

        Args:
          name: its name.
          default: what it is if it is missing; None for an error.

        Raises:
          ValueError: it is missing, or is something else.
        """
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{self.path}: config.json has {name}={value!r}, no positive integer")
        return value

    def must_be(self, name: str, expected: Any) -> None:
        """Checks a field of which the family knows one value.

        Args:
          name: its name.
          expected: the value, which is also meant if the field is missing.

        Raises:
          ValueError: it has another value.
        """
        value = self.get(name, expected)
        if value != expected:
            raise ValueError(
                f"{self.path}: config.json has {name}={value!r}, which is not known for this "
                f"family: only {name}={expected!r} is"
            )


class Weights(Mapping[str, np.ndarray]):
    """The weights of a folder by the names of variables; each is read when it is asked for."""

    def __init__(self, folder: Union[Folder, GgufFile], form: Form) -> None:
        """Checks that the folder has the weights of the model, in their shapes.

        Args:
          folder: a Folder or a GgufFile.
          form: the Form of the model.

        Raises:
          ValueError: weights are missing or have other shapes, or there are further ones.
        """
        self._folder = folder
        self._sizes = form.sizes
        self._weights = {weight.ours: weight for weight in form.weights}
        there, expected = set(folder), {w.theirs: w for w in form.weights}
        problems = []
        missing, extra = sorted(expected.keys() - there), sorted(there - expected.keys())
        if missing:
            problems.append(f"missing: {few(missing)}")
        if extra:
            problems.append(f"without a place in the model: {few(extra)}")
        for name in sorted(expected.keys() & there):
            shape, sizes = list(folder.shape(name)), _stored_sizes(expected[name], form.sizes)
            if shape != sizes:
                text = ", ".join(f"{d}={n}" for d, n in zip(expected[name].stored.split(), sizes))
                problems.append(f"{name} has shape {shape} instead of [{text}]")
        if problems:
            raise ValueError(
                f"{folder.path}: the weights are not those that config.json describes. "
                + "; ".join(problems)
            )

    def __getitem__(self, name: str) -> np.ndarray:
        """Reads a weight, in the dimensions of its variable."""
        weight = self._weights[name]
        return turned(weight, self._folder[weight.theirs], self._sizes)

    def __contains__(self, name: object) -> bool:
        """Returns whether there is a weight, without reading it."""
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        """Yields the names."""
        return iter(self._weights)

    def __len__(self) -> int:
        """Returns how many weights there are."""
        return len(self._weights)

    def dtype(self, name: str) -> np.dtype:
        """Returns the dtype of a weight in its file.

        Args:
          name: the name of the variable.
        """
        return self._folder.dtype(self._weights[name].theirs)


def turned(weight: Weight, value: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
    """Returns the value of a file, in the dimensions of the variable.

    Args:
      weight: a Weight.
      value: an array as Hugging Face has it.
      sizes: the sizes of dimensions.
    """
    theirs = _stored_dims(weight)
    whole = value.reshape([sizes[d] for d in theirs])
    return whole.transpose([theirs.index(d) for d in weight.dims.split()])


def turned_back(weight: Weight, value: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
    """Returns the value of a variable, as a file has it.

    Args:
      weight: a Weight.
      value: an array in the dimensions of the variable.
      sizes: the sizes of dimensions.
    """
    ours = weight.dims.split()
    whole = value.transpose([ours.index(d) for d in _stored_dims(weight)])
    return np.ascontiguousarray(whole.reshape(_stored_sizes(weight, sizes)))


def _stored_dims(weight: Weight) -> list[str]:
    return weight.stored.replace("*", " ").split()


def _stored_sizes(weight: Weight, sizes: Mapping[str, int]) -> list[int]:
    return [math.prod(sizes[d] for d in axis.split("*")) for axis in weight.stored.split()]


_SHOWN = 6


def few(names: Sequence[str]) -> str:
    """Returns the first of some names, and how many more there are.

    Args:
      names: a list of strings.
    """
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
