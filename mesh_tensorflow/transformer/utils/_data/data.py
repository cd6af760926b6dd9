"""Batches and examples from users' data sets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow._elements import Elements
from mesh_tensorflow.transformer import dataset as transformer_dataset
from mesh_tensorflow.transformer.utils._data.batching import Lengths
from mesh_tensorflow.transformer.utils._data.features import model_features

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.dataset._features import Vocabularies

__all__ = [
    "arrays_input_fn",
    "call_dataset_fn",
    "call_with_known",
    "combined_input_fn",
    "examples_of",
    "in_vocabulary",
]


def call_with_known(function: Callable[..., Any], **given: object) -> Any:
    """Calls a function with the subset of arguments that it accepts.

    Args:
      function: the function.
      **given: arguments by name.

    Returns:
      What the function returns.
    """
    parameters = inspect.signature(function).parameters
    anything = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    return function(**{k: v for k, v in given.items() if anything or k in parameters})


def call_dataset_fn(
    function: Optional[Callable[..., Any]],
    name: str,
    sequence_length: Lengths,
    vocabulary: Vocabularies,
    dataset_split: str,
) -> Any:
    """Calls a user's dataset function.

    Args:
      function: a function of `sequence_length`, `vocabulary` and `dataset_split`.
      name: its name in gin.
      sequence_length: an integer, or a dictionary of them by feature.
      vocabulary: a Vocabulary, or a pair of them.
      dataset_split: such as "train".

    Returns:
      What the function returns.

    Raises:
      ValueError: the function is None.
    """
    if function is None:
        raise ValueError(f"there are no data: bind utils.run.{name} to a function, or pass {name}=")
    return function(
        sequence_length=sequence_length, vocabulary=vocabulary, dataset_split=dataset_split
    )


def examples_of(make_dataset: Callable[[], tf.data.Dataset]) -> Iterator[dict[str, Any]]:
    """Yields the examples of a data set as NumPy arrays.

    Args:
      make_dataset: a function that returns the data set, called in a separate tf graph.

    Yields:
      Dictionaries.
    """
    with tf.Graph().as_default() as graph:
        elements = Elements(make_dataset())
        tables = tf.tables_initializer()
    with tf.Session(graph=graph) as session:
        session.run([elements.initializer, tables])
        while elements.advance(session):
            yield session.run(elements.current)


def in_vocabulary(dataset: tf.data.Dataset, vocab_sizes: Mapping[str, int]) -> tf.data.Dataset:
    """Returns a data set that raises an error at ids outside the vocabulary.

    Args:
      dataset: a Dataset of dictionaries.
      vocab_sizes: the sizes of vocabularies by feature.

    Returns:
      A Dataset of the same elements.
    """

    def checked(example: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        checks = [
            tf.debugging.assert_less(
                tf.reduce_max(example[key]),
                tf.cast(size, example[key].dtype),
                message=f"the feature {key!r} has an id that the vocabulary does not: it is too "
                f"small, with vocab_size {size}",
            )
            for key, size in vocab_sizes.items()
            if key in example
        ]
        with tf.control_dependencies(checks):
            # Only what is made here waits for the checks: hence the identities.
            return {k: tf.identity(v) for k, v in example.items()}

    return dataset.map(checked)


def combined_input_fn(
    dataset_fns: Sequence[Callable[[], tf.data.Dataset]], batch_size: int
) -> Callable[..., tf.data.Dataset]:
    """Returns an input function that concatenates several data sets.

    Args:
      dataset_fns: functions that return data sets.
      batch_size: the number of examples in a batch; the last one is padded with zeros.

    Returns:
      A function of `params`.
    """

    def input_fn(params: object = None) -> tf.data.Dataset:
        del params
        combined: Any = None
        for make in dataset_fns:
            ds = make().map(model_features)
            combined = ds if combined is None else combined.concatenate(ds)
        # The last batch is filled up and not dropped: each example has to have an output.
        combined = combined.batch(batch_size, drop_remainder=False)
        combined = transformer_dataset.trim_and_pad_dataset(combined, length=batch_size)
        return combined.prefetch(tf.data.AUTOTUNE)

    return input_fn


def arrays_input_fn(
    features: Mapping[str, np.ndarray], batch_size: int
) -> Callable[..., tf.data.Dataset]:
    """Returns an input function over arrays.

    Args:
      features: arrays [rows, length], where rows is a multiple of the batch size.
      batch_size: the number of rows in a batch.

    Returns:
      A function of `params`.
    """

    def input_fn(params: object = None) -> tf.data.Dataset:
        del params
        return tf.data.Dataset.from_tensor_slices(dict(features)).batch(
            batch_size, drop_remainder=True
        )

    return input_fn
