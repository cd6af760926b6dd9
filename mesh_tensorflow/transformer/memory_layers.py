"""Product-key memory layers: each position reads a few of many vectors."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.transformer import transformer

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = ["ProductKeyValueMemory"]


@gin.configurable(module="mesh_tensorflow.transformer.memory_layers")
@dataclasses.dataclass(eq=False, repr=False)
class ProductKeyValueMemory(transformer.TransformerLayer):
    """A memory of n_keys squared vectors, whose keys are pairs of shorter keys.

    Each head selects the `knn` best keys for each half of its query, and then the `knn` best of
    their pairs. See Lample et al., "Large memory layers with product keys" (2019).

    Attributes:
      key_size: an integer, the size of a query; each half of a key has half that size.
      n_keys: an integer, the number of keys for each half.
      n_values: an integer, the number of vectors.
      n_heads: an integer.
      knn: an integer, the number of vectors that a head reads.
    """

    key_size: int = gin.REQUIRED
    n_keys: int = gin.REQUIRED
    n_heads: int = gin.REQUIRED
    knn: int = gin.REQUIRED

    def __post_init__(self) -> None:
        if self.key_size < 2 or not 1 <= self.knn <= self.n_keys:
            raise ValueError(
                f"ProductKeyValueMemory: key_size={self.key_size} must be at least 2, and knn="
                f"{self.knn} between 1 and n_keys={self.n_keys}, of which a head takes so many for "
                "each half"
            )
        self.n_values = self.n_keys**2
        self._heads_dim = mtf.Dimension("n_heads", self.n_heads)
        self._halves_dim = mtf.Dimension("product_key", 2)
        self._keys_dim = mtf.Dimension("n_keys", self.n_keys)
        self._key_dim = mtf.Dimension("key", self.key_size // 2)
        self._values_dim = mtf.Dimension("n_values", self.n_values)
        self._knn_dim = mtf.Dimension("knn", self.knn)

    def call(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
        """Returns the memory output of each position; see TransformerLayer.call."""
        model_dim = x.shape.dims[-1]
        halves = [self._heads_dim, self._halves_dim]
        # TensorFlow's default initializer, whose fans depend on all of these dimensions.
        keys = mtf.get_variable(
            context.mesh,
            "keys",
            mtf.Shape([*halves, self._keys_dim, self._key_dim]),
            dtype=context.variable_dtype,
        )
        values = mtf.get_variable(
            context.mesh,
            "values",
            mtf.Shape([self._values_dim, model_dim]),
            dtype=context.variable_dtype,
            initializer=tf.random_normal_initializer(stddev=1.0),
        )
        query = layers.dense(
            x,
            [*halves, self._key_dim],
            reduced_dims=[model_dim],
            variable_dtype=context.variable_dtype,
            name="query",
        )
        query = layers.layer_norm(query, self._key_dim)
        scores, indices = self.get_indices(keys, query)
        # Over the best pairs only: all others have the weight 0.
        weights = mtf.softmax(scores, self._knn_dim)
        read = self._spread(weights, indices, x.shape - model_dim)
        return mtf.einsum([read, values], output_shape=x.shape)

    def get_indices(self, keys: mtf.Tensor, query: mtf.Tensor) -> tuple[mtf.Tensor, mtf.Tensor]:
        """Returns the best product keys.

        Args:
          keys: a Tensor with dimensions [n_heads, product_key, n_keys, key].
          query: a Tensor with dimensions [..., n_heads, product_key, key].

        Returns:
          (a Tensor of scores, an int32 Tensor of indices in the memory), both with dimensions
          [..., n_heads, knn], best first.
        """
        shape = query.shape - self._key_dim + self._keys_dim
        # 2 * n_keys scores of halves stand for n_keys^2 of whole keys (Lample et al., 2019).
        scores = mtf.einsum([query, keys], output_shape=shape)
        # A pair's score is the sum of its halves', so the best pairs are of the best halves.
        best, places = mtf.top_k(scores, self._keys_dim, self._knn_dim)
        (first, second), (row, column) = (mtf.unstack(t, self._halves_dim) for t in (best, places))
        other_dim = mtf.Dimension("knn2", self.knn)
        pairs_dim = mtf.Dimension("knn_square_dim", self.knn**2)

        def pairs(a: mtf.Tensor, b: mtf.Tensor) -> mtf.Tensor:
            b = mtf.rename_dimension(b, self._knn_dim.name, other_dim.name)
            both = mtf.add(a, b, output_shape=a.shape + other_dim)
            return mtf.reshape(both, a.shape - self._knn_dim + pairs_dim)

        scores, places = mtf.top_k(pairs(first, second), pairs_dim, self._knn_dim)
        # The same sum, of row * n_keys and column, gives the index of a pair.
        indices = mtf.gather(pairs(row * self.n_keys, column), places, pairs_dim)
        return scores, indices

    def _spread(self, weights: mtf.Tensor, indices: mtf.Tensor, shape: mtf.Shape) -> mtf.Tensor:
        """Returns the weight of each vector at each position, with dimensions [..., n_values].

        Computed from two short one-hot vectors, of the row and the column of an index, instead of
        one over all vectors.
        """
        row_dim = mtf.Dimension("n_keys_row", self.n_keys)
        column_dim = mtf.Dimension("n_keys_column", self.n_keys)
        dtype = weights.dtype
        # By row and column: a one-hot of n_keys^2 for each head and pair would be huge.
        rows = mtf.one_hot(indices // self.n_keys, row_dim, dtype=dtype)
        columns = mtf.one_hot(indices % self.n_keys, column_dim, dtype=dtype)
        weighted = mtf.einsum([rows, weights], output_shape=rows.shape)
        # spread[r, c] = sum over heads and pairs of weight * [row = r] * [column = c].
        spread = mtf.einsum([weighted, columns], output_shape=shape + [row_dim, column_dim])
        return mtf.reshape(spread, shape + self._values_dim)
