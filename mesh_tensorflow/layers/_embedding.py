"""Embedding layers: a vector for each entry of a vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import dims_text

__all__ = ["embedding", "embedding_weights"]


def embedding_weights(
    mesh: mtf.Mesh,
    vocab_dim: mtf.Dimension,
    output_dim: mtf.Dimension,
    variable_dtype: mtf.VariableDType,
    name: str = "embedding",
    ensemble_dim: Optional[Union[mtf.Dimension, Sequence[mtf.Dimension]]] = None,
    initializer: Optional[Callable] = None,
) -> mtf.Tensor:
    """Creates the variable that holds the embedding vectors.

    >>> vocab, d = mtf.convert_to_shape("vocab:10,d:4").dims
    >>> print(mtf.layers.embedding_weights(mesh, vocab, d, mtf.VariableDType()).shape)
    Shape[vocab=10, d=4]

    Args:
      mesh: a Mesh.
      vocab_dim: the Dimension of ids, of the size of the vocabulary.
      output_dim: a Dimension.
      variable_dtype: a VariableDType.
      name: a string, the name of the variable.
      ensemble_dim: a Dimension or a list of them, for separate vectors per model of an ensemble.
      initializer: a TensorFlow initializer; standard normal if None.

    Returns:
      A Tensor with dimensions [ensemble_dim..., vocab_dim, output_dim].
    """
    if ensemble_dim is None:
        ensemble_dim = []
    elif isinstance(ensemble_dim, mtf.Dimension):
        ensemble_dim = [ensemble_dim]
    return mtf.get_variable(
        mesh,
        name,
        mtf.Shape([*ensemble_dim, vocab_dim, output_dim]),
        dtype=variable_dtype,
        initializer=tf.random_normal_initializer() if initializer is None else initializer,
    )


def embedding(
    indices: mtf.Tensor,
    vocab_dim: mtf.Dimension,
    output_dim: mtf.Dimension,
    variable_dtype: mtf.VariableDType,
    name: str = "embedding",
) -> mtf.Tensor:
    """Looks up embedding vectors in a variable that it creates.

    An id out of range gives a vector of zeros.

    >>> vocab, d = mtf.convert_to_shape("vocab:10,d:4").dims
    >>> ids = mtf.constant(mesh, [3, 1], "batch:2", tf.int32)
    >>> print(mtf.layers.embedding(ids, vocab, d, mtf.VariableDType()).shape)
    Shape[batch=2, d=4]

    Args:
      indices: ids, an integer Tensor with dimensions [...].
      vocab_dim: the Dimension of ids, of the size of the vocabulary.
      output_dim: a Dimension.
      variable_dtype: a VariableDType.
      name: a string, the name of the variable.

    Returns:
      A Tensor with dimensions [..., output_dim].

    Raises:
      ValueError: the ids are not integers, or have the dimension `vocab_dim`.
    """
    if not indices.dtype.is_integer or vocab_dim in indices.shape:
        raise ValueError(
            f"embedding: indices {indices.name} {indices.shape} {indices.dtype.name} must be "
            f"integers without the dimension {dims_text([vocab_dim])}; use mtf.to_int32 or "
            "mtf.rename_dimension"
        )
    weights = embedding_weights(indices.mesh, vocab_dim, output_dim, variable_dtype, name)
    return mtf.gather(weights, indices, vocab_dim)
