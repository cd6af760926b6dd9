"""The embedding of a vocabulary, shared with the output projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = ["VocabEmbedding", "get_vocab_embedding_cls"]


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
class VocabEmbedding:
    """An embedding of ids and a projection of vectors to logits that share one variable.

    Press and Wolf, "Using the output embedding to improve language models" (2017).
    """

    def __init__(
        self,
        mesh: mtf.Mesh,
        vocab_dim: mtf.Dimension,
        output_dim: mtf.Dimension,
        variable_dtype: mtf.VariableDType,
        name: str,
        ensemble_dim: Optional[mtf.Dimension],
        scale_variable_like_classifier_weights: bool = False,
    ) -> None:
        """Creates the variable, with dimensions [ensemble_dim..., vocab_dim, output_dim].

        Args:
          mesh: a Mesh.
          vocab_dim: the Dimension of ids, of the size of the vocabulary.
          output_dim: a Dimension.
          variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
          name: a string, the name of the variable.
          ensemble_dim: a Dimension, or None.
          scale_variable_like_classifier_weights: if True, the variable is initialized with the
            standard deviation of a classifier's weights, 1 / sqrt(output_dim), and embeddings
            are multiplied by sqrt(output_dim). If False, with the standard deviation 1, and the
            inputs of the projection to logits are divided by sqrt(output_dim).
        """
        self._vocab_dim = vocab_dim
        self._output_dim = output_dim
        self._scale_variable_like_classifier_weights = scale_variable_like_classifier_weights
        deviation = output_dim.size**-0.5 if scale_variable_like_classifier_weights else 1.0
        self._embedding_weights = layers.embedding_weights(
            mesh,
            vocab_dim,
            output_dim,
            variable_dtype,
            name,
            ensemble_dim,
            initializer=tf.random_normal_initializer(stddev=deviation),
        )

    def ids_to_embedding(self, ids: mtf.Tensor, context: Context) -> mtf.Tensor:
        """Returns the embeddings of ids.

        Args:
          ids: an integer Tensor.
          context: the Context of this call of the model: its mode, positions, states and losses.

        Returns:
          A Tensor with the dimensions of `ids` and `output_dim`.
        """
        del context
        vectors = mtf.gather(self._embedding_weights, ids, self._vocab_dim)
        if self._scale_variable_like_classifier_weights:
            vectors *= self._output_dim.size**0.5
        return vectors

    def hidden_to_logits(self, hidden: mtf.Tensor, context: Context) -> mtf.Tensor:
        """Returns the logits of vectors, their products with the embeddings of all ids.

        The vectors are multiplied by output_dim ** -0.5, unless
        `scale_variable_like_classifier_weights`.

        Args:
          hidden: a Tensor with dimensions [..., output_dim].
          context: the Context of this call of the model: its mode, positions, states and losses.

        Returns:
          A Tensor with dimensions [..., vocab_dim].
        """
        del context
        if not self._scale_variable_like_classifier_weights:
            hidden *= self._output_dim.size**-0.5
        return mtf.einsum([hidden, self._embedding_weights], reduced_dims=[self._output_dim])


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
def get_vocab_embedding_cls(cls: Callable[..., Any] = VocabEmbedding) -> Callable[..., Any]:
    """Returns the vocabulary embedding class that models use; gin may set it.

    Args:
      cls: a class with the constructor and the methods of `VocabEmbedding`.
    """
    return cls
