"""Data: the features of a model, and batches of them from arrays, tf.data and iterables.

Every kind of data is a Source. A source can begin at any batch, so that a run that is resumed
continues with the batch that it would have had next, and can read the rows of one process only.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional

import numpy as np
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import did_you_mean, dims_text
from mesh_tensorflow._core.shape import is_dimension
from mesh_tensorflow._elements import Elements


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Features:
    """One array, a tuple or a dictionary of arrays, each with its named dimensions.

    Attributes:
      kind: `dict`, `tuple`, or `list` for a single array.
      names: a name for each array.
      shapes: the Shape of each array; None if the model imports tf.Tensors by itself.
    """

    kind: type
    names: list[str]
    shapes: Optional[list[mtf.Shape]]

    @classmethod
    def of_dims(cls, dims: Any) -> Features:
        """Returns the features that `fit(dims=...)` describes.

        Args:
          dims: dimensions, such as `[batch, pixels]` or "batch:8,pixels:64"; or a tuple or
            dictionary of them.

        Raises:
          ValueError: it is none of these, or the first dimensions differ.
        """
        # Dimensions of one array may be a list too.
        kind, names, leaves = (list, ["x"], [dims]) if _is_leaf(dims) else _parts(dims or None)
        wrong = [leaf for leaf in leaves if not _is_leaf(leaf)]
        if wrong:
            raise ValueError(
                f"fit: dims should be the dimensions of the data, such as [batch, pixels] or "
                f'{{"image": [batch, pixels], "label": [batch]}}, but has {wrong[0]!r}'
            )
        shapes = [mtf.convert_to_shape(leaf) for leaf in leaves]
        # Microbatches, layouts and the rows of processes cut all features along the first
        # dimension, so it has to be one.
        if any(not len(shape) or shape[0] != shapes[0][0] for shape in shapes):
            raise ValueError(
                "fit: all features begin with the same dimension, that of the batch; dims has "
                + ", ".join(f"{name} [{dims_text(s)}]" for name, s in zip(names, shapes))
            )
        return cls(kind, names, shapes)

    @classmethod
    def of_batch(cls, batch: Any) -> Features:
        """Returns the features that a batch has, without dimensions.

        Args:
          batch: an array, or a tuple or dictionary of arrays.
        """
        kind, names, _ = _parts(batch)
        return cls(kind, names, None)

    @property
    def batch_dim(self) -> mtf.Dimension:
        """The dimension of the batch, the first one of each feature."""
        assert self.shapes is not None
        return self.shapes[0][0]

    def with_batch(self, size: int) -> Features:
        """Returns the same features with another size of the batch dimension wherever it occurs."""
        assert self.shapes is not None
        old = self.batch_dim
        new = mtf.Dimension(old.name, size)
        shapes = [mtf.Shape([new if d == old else d for d in s]) for s in self.shapes]
        return dataclasses.replace(self, shapes=shapes)

    def values(self, item: Any) -> list[Any]:
        """Returns the arrays of a batch or an example, in order.

        Args:
          item: what the data gives. Further entries of a dictionary are left out.

        Raises:
          ValueError: it has another structure.
        """
        if self.kind is dict:
            if not isinstance(item, Mapping):
                raise ValueError(
                    f"fit: dims is a dictionary with {', '.join(self.names)}, but the data gives "
                    f"{_kind_text(item)}. Give dims and data the same structure"
                )
            missing = [name for name in self.names if name not in item]
            if missing:
                raise ValueError(
                    f"fit: dims has {missing[0]!r}, which is not in the data: it has "
                    f"{', '.join(map(str, item))}{did_you_mean(missing[0], map(str, item))}"
                )
            return [item[name] for name in self.names]
        if self.kind is tuple:
            if not isinstance(item, (tuple, list)) or len(item) != len(self.names):
                raise ValueError(
                    f"fit: dims has {len(self.names)} features, but the data gives "
                    f"{_kind_text(item)}. Give dims and data the same structure"
                )
            return list(item)
        if isinstance(item, (Mapping, tuple)):
            raise ValueError(
                f"fit: dims has one feature, but the data gives {_kind_text(item)}. Give dims and "
                "data the same structure"
            )
        return [item]

    def item(self, values: Sequence[Any]) -> Any:
        """Returns values in the structure of the data: a dictionary, a tuple, or one value."""
        if self.kind is dict:
            return dict(zip(self.names, values))
        return tuple(values) if self.kind is tuple else values[0]

    def packed(self, values: Sequence[Any]) -> tuple:
        """Returns the arguments of a model function: a tuple's members, or one argument."""
        return tuple(values) if self.kind is tuple else (self.item(values),)

    def unpacked(self, arguments: Sequence[Any]) -> list[Any]:
        """Returns the values of the arguments of a model function, in order."""
        return list(arguments) if self.kind is tuple else self.values(arguments[0])

    def imported(self, mesh: mtf.Mesh, tensors: Sequence[tf.Tensor]) -> tuple:
        """Returns the arguments of a model function as mtf Tensors.

        Args:
          mesh: a Mesh.
          tensors: a tf.Tensor for each feature. Without dimensions they are the arguments.
        """
        if self.shapes is None:
            return self.packed(tensors)
        imported = [
            mtf.import_tf_tensor(mesh, tensor, shape) for tensor, shape in zip(tensors, self.shapes)
        ]
        return self.packed(imported)

    def check(self, arrays: Sequence[np.ndarray]) -> None:
        """Raises ValueError if a batch has other sizes than the dimensions say."""
        for name, shape, array in zip(self.names, self.shapes or [], arrays):
            if list(array.shape) != shape.to_integer_list:
                raise ValueError(
                    f"fit: {name} should be [{dims_text(shape)}], but a batch of the data has the "
                    f"shape {list(array.shape)}. Change dims or the data; data of single examples "
                    "have no batch dimension, and are put into batches"
                )


def as_array(value: Any, name: str) -> np.ndarray:
    """Returns a value as a NumPy array that TensorFlow can be fed; float64 becomes float32.

    Args:
      value: an array, a tf.Tensor or a tensor of another library.
      name: the name of the feature.
    """
    array = np.asarray(value)
    # NumPy makes float64 of what has no other dtype, so it does not say what a user means.
    if array.dtype == np.float64:
        return array.astype(np.float32)
    if array.dtype.kind in "OUS":
        raise ValueError(
            f"fit: {name} has the dtype {array.dtype}, which no mtf Tensor can have: turn it into "
            "numbers first, as a tokenizer does, or leave it out of dims"
        )
    return array


def with_dtype(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Returns an array with another dtype, if that has all of its values.

    Raises:
      ValueError: a value is lost.
    """
    if array.dtype == dtype:
        return array
    # There and back: a value that the dtype lacks comes back as another one. NumPy warns of some of
    # these, and the error below says more.
    with np.errstate(all="ignore"):
        cast = (array if dtype.kind == "c" else np.real(array)).astype(dtype)
        lost = (cast.astype(array.dtype) != array) & (array == array)  # NaN is not lost
        if dtype.kind in "iub":  # no NaN there, and uint64 above 2**63 comes back from int64
            lost |= (array != array) | ((cast >= 0) != (np.real(array) >= 0))
    if np.any(lost):
        value = array[lost].flat[0]
        raise ValueError(
            f"fit: {name} of a batch is {array.dtype.name} with the value {value}, which no "
            f"{np.dtype(dtype).name} has, the dtype of the first batch. Give all batches one "
            f"dtype, such as np.asarray({name}, np.{np.result_type(array.dtype, dtype).name})"
        )
    return cast


def _is_leaf(dims: Any) -> bool:
    if isinstance(dims, (str, mtf.Shape)):
        return True
    # A list of dimensions is that of one feature, a list of such lists that of several.
    return isinstance(dims, (tuple, list)) and bool(dims) and all(map(is_dimension, dims))


def _parts(x: Any) -> tuple[type, list[str], list[Any]]:
    """Returns the kind of `Features`, and the names and values of what has their structure."""
    if isinstance(x, Mapping):
        return dict, [str(name) for name in x], list(x.values())
    if isinstance(x, (tuple, list)):
        return tuple, [f"feature {i}" for i in range(len(x))], list(x)
    return list, ["x"], [x]


def _kind_text(item: Any) -> str:
    if isinstance(item, Mapping):
        return f"a dictionary with {', '.join(map(str, item))}"
    if isinstance(item, (tuple, list)):
        return f"a {type(item).__name__} of {len(item)}"
    return f"one {type(item).__name__}"


Batch = list[np.ndarray]


def rows_of(batch: Batch) -> int:
    """Returns the number of rows of a batch; 1 if its items are numbers."""
    return len(batch[0]) if batch and batch[0].ndim else 1


# The class of tf.data in tensorflow.compat.v1 is a subclass of this one.
AnyDataset = tf2.data.Dataset


@dataclasses.dataclass(frozen=True)
class Part:
    """The rows of each batch that a process reads: part `index` of `count` equal parts."""

    index: int = 0
    count: int = 1

    def rows(self, size: int) -> slice:
        """Returns the rows of a batch of this size."""
        own = size // self.count
        return slice(self.index * own, (self.index + 1) * own)

    def only(self, batch: Batch) -> Batch:
        """Returns a batch which is zero where other processes read."""
        if self.count == 1:
            return batch
        size = rows_of(batch)
        return self.whole([array[self.rows(size)] for array in batch], size)

    def whole(self, arrays: Batch, size: int) -> Batch:
        """Returns arrays of the whole batch of a size, of the rows of this part; zero elsewhere."""
        if self.count == 1:
            return arrays
        batch = []
        for array in arrays:
            # Programs take the whole batch as their input, and each processor cuts its rows out of
            # it.
            filled = np.zeros((size, *array.shape[1:]), array.dtype)
            filled[self.rows(size)] = array
            batch.append(filled)
        return batch


@dataclasses.dataclass(eq=False, repr=False)
class Source:
    """Batches of data. A subclass has `training` and `once`.

    Attributes:
      features: the structure and the dimensions of the batches.
      part: the rows to read of each batch.
    """

    features: Features
    part: Part

    @property
    def _size(self) -> int:
        return self.features.batch_dim.size

    def _arrays(self, item: Any) -> Batch:
        names = self.features.names
        return [as_array(v, name) for name, v in zip(names, self.features.values(item))]

    def _is_batched(self, arrays: Sequence[np.ndarray]) -> bool:
        """Returns whether an item is a batch, by its ranks; without dimensions it is."""
        shapes = self.features.shapes
        return shapes is None or arrays[0].ndim == len(shapes[0])

    def _whole(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields batches of all rows; leaves out smaller ones, as the last of an epoch may be."""
        count = 0
        for batch in batches:
            if self.features.shapes is None or len(batch[0]) == self._size:
                count += 1
                yield batch
                continue
            sizes = (
                f"fit: {{}} has {len(batch[0])} rows, but dims has "
                f"{dims_text([self.features.batch_dim])}. "
            )
            if len(batch[0]) > self._size:
                raise ValueError(
                    sizes.format(f"batch {count} of the data")
                    + "Change dims or the data: what is above it would be lost"
                )
            # After a whole batch, a smaller one is the end of an epoch. Before one, all may be too
            # small, and data that are read again and again would never give any.
            if not count:
                raise ValueError(
                    sizes.format("the first batch of the data")
                    + "Smaller batches are left out, as the last of an epoch may be: change dims, "
                    "or give single examples, which fit puts into batches"
                )

    def training(self, start: int) -> Iterator[Batch]:
        """Yields whole batches from number `start` on, endlessly if data can be read again."""
        raise NotImplementedError

    def once(self) -> Iterator[Batch]:
        """Yields all rows once; the last batch may be smaller."""
        raise NotImplementedError

    def check_end(self, what: str) -> None:
        """Raises ValueError for data that are known to have no end.

        Args:
          what: what they are, for the error.
        """


@dataclasses.dataclass(eq=False, repr=False)
class Rows(Source):
    """Data with a length and random access: arrays, Hugging Face datasets.

    Attributes:
      length: the number of rows.
      take: returns the rows of the given numbers.
      shuffle: whether each epoch has its own order.
      seed: the seed of the orders, or None for one that is drawn.
    """

    length: int
    take: Callable[[np.ndarray], Any]
    shuffle: bool
    seed: Any

    def __post_init__(self) -> None:
        # Without a seed, this draws one that all epochs of the run have.
        self.seed = np.random.SeedSequence(self.seed).entropy

    def training(self, start: int) -> Iterator[Batch]:
        """Returns whole batches in the order of each epoch, from number `start` on.

        Raises:
          ValueError: there are fewer rows than in a batch.
        """
        if self.length < self._size:
            raise ValueError(
                f"fit: the data have {self.length} rows, fewer than one batch, "
                f"{self.features.batch_dim.name}={self._size}: make the batch smaller"
            )
        # The check is made at the call: in a generator it would wait for the first batch.
        return self._epochs(start)

    def _epochs(self, start: int) -> Iterator[Batch]:
        # What fills no batch is left out of an epoch; with shuffling, other rows each time.
        per_epoch = self.length // self._size
        for epoch in itertools.count(start // per_epoch):
            order = np.arange(self.length)
            if self.shuffle:
                # A function of the seed and the epoch, so that a run which is resumed finds the
                # order again without reading what came before.
                np.random.default_rng([self.seed, epoch]).shuffle(order)
            # Only the epoch that a run goes on in is begun in its middle.
            first = start % per_epoch if epoch == start // per_epoch else 0
            for i in range(first, per_epoch):
                rows = order[i * self._size : (i + 1) * self._size]
                # All processes have the same order and take the rows of their own processors from
                # it.
                arrays = self._arrays(self.take(rows[self.part.rows(self._size)]))
                yield self.part.whole(arrays, self._size)

    def once(self) -> Iterator[Batch]:
        """Yields all rows once; the last batch may be smaller."""
        for first in range(0, self.length, self._size):
            yield self._arrays(self.take(np.arange(first, min(first + self._size, self.length))))


@dataclasses.dataclass(eq=False, repr=False)
class Iterated(Source):
    """An iterable of batches or of examples.

    Attributes:
      items: the iterable; an iterator gives each of its items once.
    """

    items: Iterable[Any]

    def __post_init__(self) -> None:
        items = self.items
        # A list has one dtype for each feature, as an array of all would have.
        self._dtypes: list[Any] = []
        if isinstance(items, list) and items:
            columns = zip(*(self._arrays(item) for item in items))
            dtypes = [np.result_type(*{a.dtype for a in column}) for column in columns]
            # Numbers of Python are float64 in NumPy, which models hardly mean.
            self._dtypes = [np.dtype(np.float32) if d == np.float64 else d for d in dtypes]

    def _batches(self, items: Iterator[Any], partial: bool) -> Iterator[Batch]:
        arrays: Iterator[Batch] = (self._typed(self._arrays(item)) for item in items)
        # The rank of the first item says whether items are batches; it is put in front again.
        first = next(arrays, None)
        if first is None:
            return
        arrays = itertools.chain([first], arrays)
        if self._is_batched(first):
            yield from arrays if partial else self._whole(arrays)
            return
        while examples := list(itertools.islice(arrays, self._size)):
            if partial or len(examples) == self._size:
                yield [np.stack(column) for column in zip(*examples)]

    def _typed(self, arrays: Batch) -> Batch:
        if not self._dtypes:
            return arrays
        return [array.astype(dtype, copy=False) for array, dtype in zip(arrays, self._dtypes)]

    def _endless(self) -> Iterator[Batch]:
        read = True
        while read:
            items = iter(self.items)
            # Data without a whole batch would otherwise be read again and again without an end.
            read = False
            for batch in self._batches(items, False):
                read = True
                yield batch
            if items is self.items:
                return  # an iterator can't be read again

    def training(self, start: int) -> Iterator[Batch]:
        """Yields whole batches in the order of the iterable, from number `start` on."""
        # What was trained on before is read and dropped: an iterable can begin nowhere else. Nor
        # can it skip rows, so each process reads all of it and keeps its own.
        return map(self.part.only, itertools.islice(self._endless(), start, None))

    def once(self) -> Iterator[Batch]:
        """Yields all rows once; the last batch may be smaller."""
        return self._batches(iter(self.items), True)


@dataclasses.dataclass(eq=False, repr=False)
class Dataset(Source):
    """A tf.data.Dataset of batches or of examples, of eager code or of a TensorFlow 1 graph."""

    dataset: tf.data.Dataset

    def __post_init__(self) -> None:
        shapes = self.features.shapes
        spec = self.features.values(self.dataset.element_spec)
        # One dimension less than in `dims` means single examples. All features begin with the
        # batch, so the first one tells.
        rank = spec[0].shape.rank if shapes else None
        self._examples = shapes is not None and rank == len(shapes[0]) - 1
        # A dataset of a graph consists of operations there, which a session of it has to read.
        self._graph = None if tf.executing_eagerly() else tf.get_default_graph()

    def training(self, start: int) -> Iterator[Batch]:
        """Yields whole batches in the order of the dataset, from number `start` on."""
        dataset = self.dataset
        if self._examples:
            # Whole batches are cut into parts: shards of an epoch that is no whole number of
            # batches would have different numbers of batches, and drift apart.
            dataset = dataset.batch(self._size, drop_remainder=True)
        # In a graph it is a tensor, which equals no number: what repeats by itself is repeated, to
        # no effect.
        if dataset.cardinality() != tf.data.INFINITE_CARDINALITY:
            # After the batches: repeated before, the last rows of an epoch and the first of the
            # next would be one batch, unlike those of arrays.
            dataset = dataset.repeat()
        batches: Iterator[Batch]
        if self._examples or self.features.shapes is None:
            batches = map(self._arrays, self._iterate(dataset.skip(start).prefetch(2)))
        else:  # smaller batches are left out before batches are counted
            whole = self._whole(map(self._arrays, self._iterate(dataset.prefetch(2))))
            batches = itertools.islice(whole, start, None)
        return map(self.part.only, batches)

    def check_end(self, what: str) -> None:
        """Raises ValueError for a dataset that repeats itself."""
        if self._graph is None and self.dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise ValueError(
                f"{what} repeat without an end, but all of them are read: leave out repeat(), or "
                "limit them with take(n)"
            )

    def once(self) -> Iterator[Batch]:
        """Yields all rows once; the last batch may be smaller."""
        dataset = self.dataset.batch(self._size) if self._examples else self.dataset
        for item in self._iterate(dataset):
            yield self._arrays(item)

    def _iterate(self, dataset: tf.data.Dataset) -> Iterator[Any]:
        if self._graph is None:
            yield from dataset.as_numpy_iterator()
            return
        with self._graph.as_default(), tf.device("/cpu:0"):
            elements = Elements(dataset)
        with tf.Session(graph=self._graph) as session:
            session.run(elements.initializer)
            while elements.advance(session):
                yield session.run(elements.current)


def source_of(
    data: Any,
    features: Features,
    part: Part = Part(),
    shuffle: bool = False,
    seed: Optional[int] = None,
) -> Source:
    """Returns the Source of any kind of data.

    Args:
      data: see `mtf.train.fit`.
      features: the features of the model.
      part: the rows of each batch to read.
      shuffle: whether the rows of arrays and of Hugging Face datasets are shuffled.
      seed: the seed of their orders.

    Raises:
      ValueError: the data have another structure than the features, or fewer rows than a batch.
      TypeError: the data are of no known kind.
    """
    data = opened(data)
    if isinstance(data, AnyDataset):
        return Dataset(features, part, data)
    if _is_hugging_face(data):
        rows = data.with_format("numpy")
        # Rows are read with the batch that has them: such data may be larger than memory.
        return Rows(features, part, len(rows), lambda i: rows[i], shuffle, seed)
    if _is_arrays(data):
        if features.shapes is None:
            raise ValueError(
                "fit: dims is missing: to take batches of arrays, their dimensions have to be "
                'known. Give for instance dims={"image": [batch, pixels], "label": [batch]}'
            )
        arrays = features.values(data)
        lengths = {name: len(array) for name, array in zip(features.names, arrays)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"fit: the arrays of the data have several lengths: {lengths}")

        def take(i: np.ndarray) -> Any:
            return features.item([np.asarray(array)[i] for array in arrays])

        return Rows(features, part, len(arrays[0]), take, shuffle, seed)
    # Of a text or a dictionary, an iteration would give letters or names for batches.
    if isinstance(data, Iterable) and not isinstance(data, (str, bytes, Mapping)):
        return Iterated(features, part, data)
    raise TypeError(
        "fit: data should be a tf.data.Dataset, NumPy arrays (one, or a tuple or dictionary), a "
        "Hugging Face dataset or the path of one on disk, an iterable of batches or examples, or "
        f"a function that returns one of these; it is a {type(data).__name__}{_entries_text(data)}"
    )


def _entries_text(data: Any) -> str:
    """Returns what to do with a dictionary that may be one of datasets."""
    if not isinstance(data, Mapping) or not data:
        return ""
    names = ", ".join(map(str, list(data)[:4]))
    return f" with {names}. If these are splits, give one, such as data[{next(iter(data))!r}]"


class _Again:
    """An iterable that calls a function for a new iterator each time that it is read."""

    def __init__(self, function: Callable[[], Iterator[Any]], first: Iterator[Any]):
        # The iterator by which the function was found to make iterators is read, too, not lost.
        self._function, self._first = function, [first]

    def __iter__(self) -> Iterator[Any]:
        return self._first.pop() if self._first else self._function()


def opened(data: Any) -> Any:
    """Returns the data that a function without arguments or a path stands for."""
    if callable(data) and not isinstance(data, Iterable):
        returned = data()
        data = _Again(data, returned) if isinstance(returned, Iterator) else returned
    if isinstance(data, (str, os.PathLike)):
        return _from_disk(os.fspath(data))
    return data


def _from_disk(path: str) -> Any:
    if not os.path.isdir(path):
        raise ValueError(
            f"fit: data is {path!r}, and there is no such directory: a path is that of a Hugging "
            "Face dataset that save_to_disk has written"
        )
    try:
        import datasets
    except ImportError as e:
        raise ImportError(
            f"fit: to read {path}, a dataset that Hugging Face's save_to_disk has written, "
            "datasets is needed: pip install datasets"
        ) from e
    return datasets.load_from_disk(path)


def _is_hugging_face(data: Any) -> bool:
    # Without an import: whoever has such a dataset has imported the package.
    module = sys.modules.get("datasets")
    kind = getattr(module, "Dataset", None)
    return isinstance(kind, type) and isinstance(data, kind)


def _is_array(data: Any) -> bool:
    return hasattr(data, "__array__") and len(getattr(data, "shape", ())) > 0


def _is_arrays(data: Any) -> bool:
    if isinstance(data, Mapping):
        # In a dictionary, a list is a column of rows; alone, it would be an iterable of examples.
        return bool(data) and all(_is_array(v) or isinstance(v, list) for v in data.values())
    if isinstance(data, tuple):
        return bool(data) and all(map(_is_array, data))
    return _is_array(data)
