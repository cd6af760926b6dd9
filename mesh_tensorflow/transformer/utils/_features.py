"""Data sets of examples, and their features as Tensors on a mesh, by model type."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._elements import Elements
from mesh_tensorflow.estimator import ModeKeys
from mesh_tensorflow.transformer import dataset as transformer_dataset
from mesh_tensorflow.transformer.utils._settings import Lengths, length_of_feature

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.dataset._features import Vocabularies


# The features that models take; an example may have others, for postprocessing functions.
_MODEL_FEATURES = (
    "inputs",
    "inputs_position",
    "inputs_segmentation",
    "targets",
    "targets_position",
    "targets_segmentation",
    "targets_subsegmentation",
)


# -- features as Tensors


def model_features(example: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the features of an example that models take.

    Args:
      example: a dictionary.

    Returns:
      A dictionary.
    """
    return {key: example[key] for key in example if key in _MODEL_FEATURES}


def has_inputs_feature(model_type: str, mode: str, scoring: bool) -> bool:
    """Returns whether a model type needs the feature "inputs" in a mode.

    Args:
      model_type: such as "lm".
      mode: a ModeKeys value.
      scoring: whether prediction computes scores of given targets.

    Returns:
      A bool.
    """
    if mode == ModeKeys.PREDICT and not scoring:
        return True
    return model_type not in ("lm", "delimited_lm") or (
        model_type == "delimited_lm" and mode != ModeKeys.PREDICT
    )


def check_features(
    features: Mapping[str, Any], model_type: str, mode: str, scoring: bool = False
) -> None:
    """Checks that all features that a model type needs in a mode are present.

    Args:
      features: a dictionary.
      model_type: such as "lm".
      mode: a ModeKeys value.
      scoring: whether prediction computes scores of given targets.

    Raises:
      ValueError: one is missing, or there is one that the model would ignore.
    """
    needed = has_inputs_feature(model_type, mode, scoring)
    problem = None
    if needed and "inputs" not in features:
        problem = "should have feature inputs"
    elif model_type == "lm" and not needed and "inputs" in features:
        problem = "should not have feature inputs"
    elif (mode != ModeKeys.PREDICT or scoring) and "targets" not in features:
        problem = "should have feature targets"
    if problem:
        raise ValueError(
            f"mode={mode} model_type={model_type} {problem}, and has {', '.join(features)}.\n"
            'Examples of inputs and targets are for model_type="delimited_lm" or "bitransformer", '
            'and those of targets alone for model_type="lm", which predicts what follows inputs'
        )


def import_features(
    mesh: mtf.Mesh,
    features: Mapping[str, tf.Tensor],
    batch_dims: Sequence[mtf.Dimension],
    sequence_length: Lengths,
) -> dict[str, mtf.Tensor]:
    """Imports the features that models take as Tensors.

    Args:
      mesh: a Mesh.
      features: integer tf Tensors [rows, length] by name.
      batch_dims: the dimensions of the rows.
      sequence_length: an integer, or a dictionary of them by feature.

    Returns:
      A dictionary of int32 Tensors with the dimensions [batch_dims..., length].

    Raises:
      ValueError: the shape of a feature does not match.
    """
    rows = mtf.Shape(list(batch_dims)).size
    result = {}
    for key, x in model_features(features).items():
        length = mtf.Dimension("length", length_of_feature(sequence_length, key))
        if not x.shape.is_compatible_with([rows, length.size]):
            raise ValueError(
                f"the feature {key!r} has shape {x.shape.as_list()}, but should be of {rows} rows "
                f"(utils.run.batch_size) of length {length.size} (utils.run.sequence_length): the "
                "data set should pad and cut its examples, as trim_and_pad_dataset does"
            )
        shape = mtf.Shape([*batch_dims, length])
        x = tf.reshape(tf.cast(x, tf.int32), shape.to_integer_list)
        result[key] = mtf.import_tf_tensor(mesh, x, shape)
    return result


# -- inputs and targets in one sequence


def _is_token(ids: mtf.Tensor) -> mtf.Tensor:
    return mtf.cast(mtf.not_equal(ids, 0), tf.int32)


def _rank(token: mtf.Tensor) -> mtf.Tensor:
    """Returns the number of tokens before each position of the row."""
    return mtf.cumsum(token, token.shape.dims[-1], exclusive=True)


class _Segment(NamedTuple):
    """Inputs or targets, to be joined to one sequence."""

    ids: mtf.Tensor
    token: mtf.Tensor  # 1 at tokens, 0 at padding
    segment: mtf.Tensor
    length_dim: mtf.Dimension


def _part(features: Mapping[str, mtf.Tensor], key: str) -> _Segment:
    """Returns a feature as a part, with its length dimension named after it."""
    ids = features[key]
    length = ids.shape.dims[-1]
    # Both are named `length`, with sizes that may differ, and stand in one product below.
    own = mtf.Dimension(f"{key}_length", length.size)
    ids = mtf.rename_dimension(ids, length.name, own.name)
    token = _is_token(ids)
    given = features.get(f"{key}_segmentation")
    # Without packing all tokens are of example 1, and padding of none.
    segment = token if given is None else mtf.rename_dimension(given, length.name, own.name)
    return _Segment(ids, token, segment, own)


def _count(
    of: _Segment, at: _Segment, compare: Callable[[mtf.Tensor, mtf.Tensor], mtf.Tensor]
) -> mtf.Tensor:
    """Counts, at each position of `at`, the tokens of `of` whose segments satisfy `compare`."""
    other = mtf.Dimension("other_length", of.length_dim.size)
    segment = mtf.rename_dimension(of.segment, of.length_dim.name, other.name)
    token = mtf.rename_dimension(of.token, of.length_dim.name, other.name)
    shape = mtf.Shape(at.ids.shape.dims + [other])
    chosen = compare(mtf.broadcast(segment, shape), mtf.broadcast(at.segment, shape))
    return mtf.reduce_sum(mtf.cast(chosen, tf.int32) * token, reduced_dim=other)


def _joined(
    parts: Sequence[_Segment],
    values: Sequence[mtf.Tensor],
    places: Sequence[mtf.Tensor],
    length: mtf.Dimension,
) -> mtf.Tensor:
    """Returns the values of both parts, each at its position in the joined sequence."""
    joined = []
    for part, value, place in zip(parts, values, places):
        # A product with a one-hot, which any layout can split, unlike a scatter; padding adds 0.
        at = mtf.one_hot(place, length, dtype=tf.int32)
        shape = mtf.Shape(part.ids.shape.dims[:-1] + [length])
        joined.append(mtf.einsum([value * part.token, at], output_shape=shape))
    return mtf.add_n(joined)


def dynamic_text2self(mtf_features: Mapping[str, mtf.Tensor]) -> dict[str, mtf.Tensor]:
    """Concatenates inputs and targets to one sequence of targets, without padding in between.

    In packed rows, the inputs of each example are followed by its targets.

    Args:
      mtf_features: "inputs" [..., length], "targets" [..., length], and with packing
        "inputs_segmentation" and "targets_segmentation"; lengths may differ.

    Returns:
      "targets" [..., length], where the length is the sum of both, and with packing
      "targets_segmentation" and "targets_position".
    """
    inputs, targets = _part(mtf_features, "inputs"), _part(mtf_features, "targets")
    length = mtf.Dimension(
        mtf_features["targets"].shape.dims[-1].name,
        inputs.length_dim.size + targets.length_dim.size,
    )
    parts = [inputs, targets]
    # The inputs of an example follow the targets of earlier examples; its targets follow its
    # inputs.
    places = [
        _rank(inputs.token) + _count(targets, inputs, mtf.less),
        _rank(targets.token) + _count(inputs, targets, mtf.less_equal),
    ]
    result = {"targets": _joined(parts, [part.ids for part in parts], places, length)}
    if {"inputs_segmentation", "targets_segmentation"} <= set(mtf_features):
        # An example begins after all tokens of earlier ones, inputs and targets.
        starts = [_count(inputs, p, mtf.less) + _count(targets, p, mtf.less) for p in parts]
        result["targets_segmentation"] = _joined(
            parts, [part.segment for part in parts], places, length
        )
        result["targets_position"] = _joined(
            parts, [place - start for place, start in zip(places, starts)], places, length
        )
    return result


# -- data sets and input functions


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
    # In a graph of its own, which is freed with its data set, also where the caller is eager.
    with tf.Graph().as_default() as graph:
        elements = Elements(make_dataset())
        # After the data set is made, as the tables of its vocabularies are created with it.
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
            # A lookup of an id beyond the table gives zeros, without an error.
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
        # Along the batch, whose size is static then, as programs on a mesh need it.
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
        # Nothing is dropped, as rows are a multiple of the batch; it makes the batch's size static.
        return tf.data.Dataset.from_tensor_slices(dict(features)).batch(
            batch_size, drop_remainder=True
        )

    return input_fn
