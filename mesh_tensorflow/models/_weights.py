"""How the tensors of a file become weights of variables, and these such tensors."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Optional, Union

import numpy as np

from mesh_tensorflow._core.errors import first_names
from mesh_tensorflow._huggingface import Folder
from mesh_tensorflow._progress import Progress
from mesh_tensorflow.models._family import Form, Weight
from mesh_tensorflow.models._gguf import GgufFile

_ROWS = 4096  # of two tensors that are compared


class Weights(Mapping[str, np.ndarray]):
    """The weights of a folder by the names of variables; each is read when it is asked for.

    `parts` reads them in slices, as processors store them.

    Attributes:
      form: the Form, with the names of this folder.
    """

    _progress: Optional[Progress] = None
    _size_of_last = 0

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
        names = set(folder)
        # What a folder may lack is of no use here: its variables begin with their initializers.
        self.form = form._replace(
            weights=[
                w
                for w in form.weights
                if w.theirs in names or not re.search(form.optional, w.theirs)
            ]
        )
        self._weights = {weight.ours: weight for weight in self.form.weights}
        self._check()

    def _check(self) -> None:
        sizes = self.form.sizes
        expected = {
            name: weight for weight in self._weights.values() for name in names_of(weight, sizes)
        }
        names = {name for name in self._folder if not re.search(self.form.ignored, name)}
        copies = names & self.form.copies.keys()
        names -= copies
        problems = []
        missing, extra = sorted(expected.keys() - names), sorted(names - expected.keys())
        if missing:
            problems.append(f"missing: {first_names(missing)}")
        if extra:
            problems.append(f"without a place in the model: {first_names(extra)}")
        # By headers alone, so that a folder of another model is refused before anything is read.
        for name in sorted(expected.keys() & names):
            axes = _axes(expected[name], sizes)
            shape, expected_shape = list(self._folder.shape(name)), [axis.size for axis in axes]
            if shape != expected_shape:
                text = ", ".join(f"{axis.text}={axis.size}" for axis in axes)
                problems.append(f"{name} has shape {shape} instead of [{text}]")
        if problems:
            raise ValueError(
                f"{self._folder.path}: the weights are not those that config.json describes. "
                + "; ".join(problems)
            )
        for name in sorted(copies):
            self._check_copy(name, self._weights[self.form.copies[name]].theirs)

    def _check_copy(self, name: str, of: str) -> None:
        """Checks that a tensor is the same as another one: the model has no place for it."""
        folder = self._folder
        if not isinstance(folder, Folder):  # the config of a GGUF file is made of what it has
            return
        is_same = folder.shape(name) == folder.shape(of) and folder.dtype(name) == folder.dtype(of)
        if is_same:
            first, second = (folder.mapped(n) for n in (name, of))
            # A few rows at once, as a table of a large model may be a gigabyte; and as bytes, since
            # NaN is not equal to itself.
            is_same = all(
                first[i : i + _ROWS].tobytes() == second[i : i + _ROWS].tobytes()
                for i in range(0, len(first), _ROWS)
            )
        if not is_same:
            raise ValueError(
                f"{folder.path}: by config.json logits are those of the embedding, but {name} is "
                f"not the same as {of}. Set tie_word_embeddings to false there to use both, or "
                "leave the former out of the file"
            )

    def __getitem__(self, name: str) -> np.ndarray:
        """Reads a weight, in the dimensions of its variable."""
        part = self.parts(name)(tuple(slice(0, size) for size in self.shape(name)))
        return part.copy("K")  # no part of a file that may be written anew

    def parts(self, name: str) -> Callable[[tuple[slice, ...]], np.ndarray]:
        """Returns a function of the ranges of a part, which reads that part of a weight.

        A part of a folder's weight is a view of its file, which is mapped into memory until
        function and parts are gone: what is not used of it is not read.

        Args:
          name: the name of the variable.
        """
        weight, sizes, last = self._weights[name], self.form.sizes, dict[str, np.ndarray]()
        if self._progress is not None:
            # Asked for is not read: what is counted is the weight before. By size, as an embedding
            # may be a fifth of all bytes, and most norms are next to nothing.
            self._progress.update(self._size_of_last)
            self._size_of_last = self.size(name)

        def read(tensor: str, index: tuple[slice, ...]) -> np.ndarray:
            # Parts of the same tensor follow each other.
            if tensor not in last:
                last.clear()
                folder = self._folder
                last[tensor] = (
                    folder.mapped(tensor) if isinstance(folder, Folder) else folder[tensor]
                )
            return last[tensor][index]

        return lambda index: _part(weight, read, sizes, index)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the sizes of a variable, without reading it.

        Args:
          name: its name.
        """
        return tuple(self.form.sizes[d] for d in self._weights[name].dims.split())

    @contextlib.contextmanager
    def progress_shown(self) -> Iterator[None]:
        """Context in which a line shows how much of the weights `parts` has read."""
        # Without a last line: small models are read before there is a first. Its clock starts when
        # the first weight is asked for: tracing, before that, says nothing of the time left.
        total = sum(self.size(name) for name in self)
        self._progress = Progress(total, "read weights", unit="byte", leave=False)
        self._size_of_last = 0
        try:
            yield
        finally:
            self._progress.close()
            self._progress = None

    def size(self, name: str) -> int:
        """Returns the number of bytes of a weight in its file's dtype, without reading it.

        Args:
          name: the name of the variable.
        """
        return math.prod(self.shape(name)) * self.dtype(name).itemsize

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
        return np.dtype(self._folder.dtype(names_of(self._weights[name], self.form.sizes)[0]))


def _named_as_in(folder: Union[Folder, GgufFile], form: Form) -> Form:
    """Returns the Form with the names of a folder: without the prefix, or with older endings."""
    names = set(folder)
    # Folders of a model without logits, as GPT-2's first ones and most of BERT's, lack it.
    has_prefix = any(name.startswith(form.prefix) for name in names)

    def named(theirs: str) -> str:
        name = theirs if has_prefix else theirs.removeprefix(form.prefix)
        older = [
            name.removesuffix(end) + old for end, old in form.older.items() if name.endswith(end)
        ]
        return next((n for n in older if n in names and name not in names), name)

    return form._replace(weights=[w._replace(theirs=named(w.theirs)) for w in form.weights])


class _Axis(NamedTuple):
    """An axis of a tensor in a file.

    Attributes:
      text: what the Weight calls it.
      dims: the names of the Weight's own dimensions in it.
      sizes: the sizes of its dimensions. With brackets, the last is that of all of their weights.
      own: where the Weight's own rows are along each of `sizes`.
      begin: with brackets, where the Weight begins along the last of `sizes`; None without.
    """

    text: str
    dims: list[str]
    sizes: list[int]
    own: list[slice]
    begin: Optional[int] = None

    @property
    def size(self) -> int:
        """The size of the axis."""
        return math.prod(self.sizes)


def _axes(weight: Weight, sizes: Mapping[str, int]) -> list[_Axis]:
    """Returns the axes of each tensor of a Weight."""

    def size_of(names: str) -> int:
        return math.prod(sizes[name] for name in names.split("*"))

    axes = []
    texts = weight.stored.split()
    # The index of an expert is in the tensor's name, and no axis of it.
    for text in texts[1:] if _is_numbered(weight) else texts:
        outside, _, inside = text.partition("[")
        names = [name for name in outside.split("*") if name]
        axis = _Axis(text, names, [sizes[name] for name in names], [slice(None) for _ in names])
        if inside:
            # "heads*[q|k|v]" is reshaped to [heads, q + k + v], whose last dimension is cut.
            texts = inside.rstrip("]").split("|")
            widths = [size_of(part) for part in texts]
            begin = sum(widths[: weight.part])
            axis.dims.extend(texts[weight.part].split("*"))
            axis.sizes.append(sum(widths))
            axis.own.append(slice(begin, begin + widths[weight.part]))
            axis = axis._replace(begin=begin)
        axes.append(axis)
    return axes


def shape_of(weight: Weight, sizes: Mapping[str, int]) -> list[int]:
    """Returns the shape of each tensor of a Weight.

    Args:
      weight: a Weight.
      sizes: the sizes of dimensions.
    """
    return [axis.size for axis in _axes(weight, sizes)]


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


def _dims(weight: Weight, sizes: Mapping[str, int]) -> list[str]:
    """Returns the names of a Weight's dimensions, in the file's order."""
    first = weight.stored.split()[:1] if _is_numbered(weight) else []
    return [*first, *(name for axis in _axes(weight, sizes) for name in axis.dims)]


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
    named = dict(zip(names_of(weight, sizes), tensors))
    whole = tuple(slice(0, sizes[d]) for d in weight.dims.split())
    return _part(weight, lambda name, index: named[name][index], sizes, whole)


class _Rows(NamedTuple):
    """Ranges of the dimensions that one axis is made of: rows that hold them, and where there.

    Attributes:
      read: the rows of the axis.
      sizes: the sizes of these rows, by dimension.
      own: the ranges of the dimensions in them.
    """

    read: slice
    sizes: list[int]
    own: list[slice]


def _rows(sizes: Sequence[int], ranges: Sequence[slice]) -> _Rows:
    """Returns the least whole rows of an axis, of dimensions of some sizes, that hold ranges."""
    # Rows of an axis [a, b, c] are contiguous for ranges of one index in a, a range in b and all of
    # c. A range behind that one is cut out of the rows that are read.
    outer = 0  # so many dimensions have one index each, within which the others lie
    while outer < len(sizes) - 1 and ranges[outer].stop - ranges[outer].start == 1:
        outer += 1
    below, at = math.prod(sizes[outer + 1 :]), 0
    # Horner's rule: the row of indices i, j in sizes [m, n] is i * n + j.
    for size, own in zip(sizes[: outer + 1], ranges):
        at = at * size + own.start
    number = ranges[outer].stop - ranges[outer].start
    return _Rows(
        slice(at * below, (at + number) * below),
        [*[1] * outer, number, *sizes[outer + 1 :]],
        [*[slice(None)] * (outer + 1), *ranges[outer + 1 :]],
    )


def _part(
    weight: Weight,
    read: Callable[[str, tuple[slice, ...]], np.ndarray],
    sizes: Mapping[str, int],
    index: Sequence[slice],
) -> np.ndarray:
    """Returns a part of a variable.

    Args:
      weight: a Weight.
      read: a function that returns a part of a tensor of the file, of its name and its ranges.
      sizes: the sizes of dimensions.
      index: the range of the part along each dimension.
    """
    ranges, theirs = dict(zip(weight.dims.split(), index)), _dims(weight, sizes)
    names = names_of(weight, sizes)
    # Only the tensors of the experts in range are opened.
    if _is_numbered(weight):
        names = names[ranges[theirs[0]]]
    # First the rows of whole axes; then, within them, those of the dimensions in brackets.
    steps = list(zip(*(_rows_of(axis, sizes, ranges) for axis in _axes(weight, sizes))))
    values = []
    for name in names:
        value = read(name, tuple(rows.read for rows in steps[0]))
        for step in steps:
            split = value.reshape([size for rows in step for size in rows.sizes])
            value = split[tuple(own for rows in step for own in rows.own)]
        values.append(value)
    # What was read is a view of the file up to here; of experts, this is the only copy.
    value = np.stack(values) if _is_numbered(weight) else values[0]
    return value.transpose([theirs.index(d) for d in weight.dims.split()])


def _rows_of(
    axis: _Axis, sizes: Mapping[str, int], ranges: Mapping[str, slice]
) -> tuple[_Rows, _Rows]:
    """Returns the rows of an axis that hold ranges of dimensions, and where these are in them."""
    own = [ranges[d] for d in axis.dims]
    n = len(own) if axis.begin is None else len(axis.sizes) - 1
    numbers, every = [r.stop - r.start for r in own[:n]], [slice(None)] * n
    if axis.begin is None:
        return _rows(axis.sizes, own), _Rows(slice(None), numbers, every)
    inside = _rows([sizes[d] for d in axis.dims[n:]], own[n:])
    last = slice(axis.begin + inside.read.start, axis.begin + inside.read.stop)
    outside = _rows(axis.sizes, [*own[:n], last])
    return outside, _Rows(inside.read, [*numbers, *inside.sizes], [*every, *inside.own])


def tensors_of(
    weights: Iterable[Weight], values: Mapping[str, np.ndarray], sizes: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """Returns the tensors of a file, of the values of variables.

    Args:
      weights: the Weights, all of those that share a tensor.
      values: arrays in the dimensions of the variables, by the names of these.
      sizes: the sizes of dimensions.
    """
    tensors: dict[str, np.ndarray] = {}
    for weight in weights:
        value, ours = values[weight.ours], weight.dims.split()
        whole = value.transpose([ours.index(d) for d in _dims(weight, sizes)])
        names = names_of(weight, sizes)
        for name, one in zip(names, whole if _is_numbered(weight) else [whole]):
            # The first of the weights that share a tensor makes it; each fills its own part.
            if name not in tensors:
                tensors[name] = np.empty(shape_of(weight, sizes), value.dtype)
            own = _own(weight, tensors[name], sizes)
            own[...] = one.reshape(own.shape)
    return tensors
