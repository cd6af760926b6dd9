"""The features of a model: their structure, names, dimensions and dtypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import did_you_mean, dims_text

__all__ = ["Features", "as_array", "with_dtype"]


class Features:
    """One array, a tuple or a dictionary of arrays, each with its named dimensions.

    Attributes:
      names: a name for each array.
      shapes: the Shape of each array; None if the model imports tf.Tensors by itself.
    """

    def __init__(self, kind: type, names: Sequence[str], shapes: Optional[list[mtf.Shape]]):
        """Creates a description of features; users call `of_dims` or `of_batch`.

        Args:
          kind: `dict`, `tuple`, or `list` for a single array.
          names: a name for each array.
          shapes: a Shape for each array, or None.
        """
        self._kind = kind
        self.names = list(names)
        self.shapes = shapes

    @classmethod
    def of_dims(cls, dims: Any) -> Features:
        """Returns the features that `fit(dims=...)` describes.

        Args:
          dims: dimensions, such as `[batch, pixels]` or "batch:8,pixels:64"; or a tuple or
            dictionary of them.

        Raises:
          ValueError: it is none of these, or the first dimensions differ.
        """
        kind: type
        leaves: list[Any]
        if _is_leaf(dims):
            kind, names, leaves = list, ["x"], [dims]
        elif isinstance(dims, Mapping) and dims:
            kind, names, leaves = dict, [str(name) for name in dims], list(dims.values())
        elif isinstance(dims, (tuple, list)) and dims:
            kind, names, leaves = tuple, [f"feature {i}" for i in range(len(dims))], list(dims)
        else:
            kind, names, leaves = list, ["x"], [None]
        wrong = [leaf for leaf in leaves if not _is_leaf(leaf)]
        if wrong:
            raise ValueError(
                f"fit: dims should be the dimensions of the data, such as [batch, pixels] or "
                f'{{"image": [batch, pixels], "label": [batch]}}, but has {wrong[0]!r}'
            )
        shapes = [mtf.convert_to_shape(leaf) for leaf in leaves]
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
        if isinstance(batch, Mapping):
            return cls(dict, [str(name) for name in batch], None)
        if isinstance(batch, (tuple, list)):
            return cls(tuple, [f"feature {i}" for i in range(len(batch))], None)
        return cls(list, ["x"], None)

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
        return Features(self._kind, self.names, shapes)

    def values(self, item: Any) -> list[Any]:
        """Returns the arrays of a batch or an example, in order.

        Args:
          item: what the data gives. Further entries of a dictionary are left out.

        Raises:
          ValueError: it has another structure.
        """
        if self._kind is dict:
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
        if self._kind is tuple:
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
        if self._kind is dict:
            return dict(zip(self.names, values))
        return tuple(values) if self._kind is tuple else values[0]

    def packed(self, values: Sequence[Any]) -> tuple:
        """Returns the arguments of a model function: a tuple's members, or one argument."""
        return tuple(values) if self._kind is tuple else (self.item(values),)

    def imported(self, mesh: mtf.Mesh, tensors: Sequence[tf.Tensor]) -> tuple:
        """Returns the arguments of a model function as mtf Tensors.

        Args:
          mesh: a Mesh.
          tensors: a tf.Tensor for each feature. Without dimensions they are the arguments.
        """
        if self.shapes is None:
            return self.packed(tensors)
        made = [
            mtf.import_tf_tensor(mesh, tensor, shape) for tensor, shape in zip(tensors, self.shapes)
        ]
        return self.packed(made)

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

    Args:
      array: the array.
      dtype: the dtype.
      name: the name of the feature.

    Raises:
      ValueError: a value is lost.
    """
    if array.dtype == dtype:
        return array
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
    return isinstance(dims, (tuple, list)) and bool(dims) and all(map(_is_dimension, dims))


def _is_dimension(d: Any) -> bool:
    if isinstance(d, mtf.Dimension):
        return True
    pair = isinstance(d, (tuple, list)) and len(d) == 2
    return pair and isinstance(d[0], str) and isinstance(d[1], int)


def _kind_text(item: Any) -> str:
    if isinstance(item, Mapping):
        return f"a dictionary with {', '.join(map(str, item))}"
    if isinstance(item, (tuple, list)):
        return f"a {type(item).__name__} of {len(item)}"
    return f"one {type(item).__name__}"
