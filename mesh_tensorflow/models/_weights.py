"""How the tensors of a file become weights of variables, and these such tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Union

import numpy as np

from mesh_tensorflow._huggingface import Folder
from mesh_tensorflow.models._family import Form, Weight, few
from mesh_tensorflow.models._gguf import GgufFile


class Weights(Mapping[str, np.ndarray]):
    """The weights of a folder by the names of variables; each is read when it is asked for.

    Attributes:
      form: the Form, with the names of this folder.
    """

    def __init__(self, folder: Union[Folder, GgufFile], form: Form) -> None:
        """Checks that the folder has the weights of the model, in their shapes.

        Args:
          folder: a Folder or a GgufFile.
          form: the Form of the model.

        Raises:
          ValueError: weights are missing or have other shapes, or there are further ones.
        """
        self._folder = folder
        form = _named_as_in(folder, form)
        there = set(folder)
        self.form = form._replace(
            weights=[
                w
                for w in form.weights
                if w.theirs in there or not re.search(form.optional, w.theirs)
            ]
        )
        self._weights = {weight.ours: weight for weight in self.form.weights}
        self._check()

    def _check(self) -> None:
        sizes = self.form.sizes
        expected = {
            name: weight for weight in self._weights.values() for name in names_of(weight, sizes)
        }
        there = {name for name in self._folder if not re.search(self.form.ignored, name)}
        problems = []
        missing, extra = sorted(expected.keys() - there), sorted(there - expected.keys())
        if missing:
            problems.append(f"missing: {few(missing)}")
        if extra:
            problems.append(f"without a place in the model: {few(extra)}")
        for name in sorted(expected.keys() & there):
            axes = _axes(expected[name], sizes)
            shape, wanted = list(self._folder.shape(name)), [axis.size for axis in axes]
            if shape != wanted:
                text = ", ".join(f"{axis.text}={axis.size}" for axis in axes)
                problems.append(f"{name} has shape {shape} instead of [{text}]")
        if problems:
            raise ValueError(
                f"{self._folder.path}: the weights are not those that config.json describes. "
                + "; ".join(problems)
            )

    def __getitem__(self, name: str) -> np.ndarray:
        """Reads a weight, in the dimensions of its variable."""
        weight, sizes = self._weights[name], self.form.sizes
        return turned(weight, [self._folder[n] for n in names_of(weight, sizes)], sizes)

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
        return self._folder.dtype(names_of(self._weights[name], self.form.sizes)[0])


def _named_as_in(folder: Union[Folder, GgufFile], form: Form) -> Form:
    """Returns the Form with names that lack the prefix, if those of the folder do."""
    if not form.prefix or any(name.startswith(form.prefix) for name in folder):
        return form
    return form._replace(
        weights=[w._replace(theirs=w.theirs.removeprefix(form.prefix)) for w in form.weights]
    )


class _Axis(NamedTuple):
    """An axis of a tensor in a file.

    Attributes:
      text: what the Weight calls it.
      sizes: the sizes of its dimensions. With brackets, the last is that of all of their weights.
      own: where the Weight's own rows are along each of `sizes`.
    """

    text: str
    sizes: list[int]
    own: list[slice]

    @property
    def size(self) -> int:
        """The size of the axis."""
        return math.prod(self.sizes)


def _axes(weight: Weight, sizes: Mapping[str, int]) -> list[_Axis]:
    """Returns the axes of each tensor of a Weight."""

    def size_of(names: str) -> int:
        return math.prod(sizes[name] for name in names.split("*"))

    found = []
    texts = weight.stored.split()
    for text in texts[1:] if _is_numbered(weight) else texts:
        outside, _, inside = text.partition("[")
        names = [name for name in outside.split("*") if name]
        axis = _Axis(text, [sizes[name] for name in names], [slice(None) for _ in names])
        if inside:
            parts = [size_of(part) for part in inside.rstrip("]").split("|")]
            begin = sum(parts[: weight.part])
            axis.sizes.append(sum(parts))
            axis.own.append(slice(begin, begin + parts[weight.part]))
        found.append(axis)
    return found


def _is_numbered(weight: Weight) -> bool:
    return "{}" in weight.theirs


def names_of(weight: Weight, sizes: Mapping[str, int]) -> list[str]:
    """Returns the names of the tensors of a Weight: one, or one for each expert.

    Args:
      weight: a Weight.
      sizes: the sizes of dimensions.
    """
    if not _is_numbered(weight):
        return [weight.theirs]
    return [weight.theirs.format(i) for i in range(sizes[weight.stored.split()[0]])]


def _dims(weight: Weight) -> list[str]:
    """Returns the names of a Weight's dimensions, in the file's order."""
    found = []
    for text in weight.stored.split():
        outside, _, inside = text.partition("[")
        own = inside.rstrip("]").split("|")[weight.part] if inside else ""
        found += [name for name in f"{outside}*{own}".split("*") if name]
    return found


def _own(weight: Weight, tensor: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
    """Returns what of a tensor is the Weight, as a view of it."""
    axes = _axes(weight, sizes)
    split = tensor.reshape([size for axis in axes for size in axis.sizes])
    return split[tuple(rows for axis in axes for rows in axis.own)]


def turned(weight: Weight, tensors: Iterable[np.ndarray], sizes: Mapping[str, int]) -> np.ndarray:
    """Returns the value of a variable, of the tensors of a file.

    Args:
      weight: a Weight.
      tensors: arrays as Hugging Face has them.
      sizes: the sizes of dimensions.
    """
    values = [_own(weight, tensor, sizes) for tensor in tensors]
    value = np.stack(values) if _is_numbered(weight) else values[0]
    theirs = _dims(weight)
    whole = value.reshape([sizes[d] for d in theirs])
    return whole.transpose([theirs.index(d) for d in weight.dims.split()])


def tensors_of(
    weights: Iterable[Weight], values: Mapping[str, np.ndarray], sizes: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """Returns the tensors of a file, of the values of variables.

    Args:
      weights: the Weights, all of those that share a tensor.
      values: arrays in the dimensions of the variables, by the names of these.
      sizes: the sizes of dimensions.
    """
    found: dict[str, np.ndarray] = {}
    for weight in weights:
        value, ours = values[weight.ours], weight.dims.split()
        whole = value.transpose([ours.index(d) for d in _dims(weight)])
        names = names_of(weight, sizes)
        for name, one in zip(names, whole if _is_numbered(weight) else [whole]):
            if name not in found:
                found[name] = np.empty([axis.size for axis in _axes(weight, sizes)], value.dtype)
            own = _own(weight, found[name], sizes)
            own[...] = one.reshape(own.shape)
    return found
