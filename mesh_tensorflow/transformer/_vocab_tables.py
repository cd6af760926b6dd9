"""Embedding tables of a vocabulary: dense, factorized, or in clusters of ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers

__all__ = [
    "Cluster",
    "FactorizedTable",
    "Table",
    "WHOLE_CLUSTER",
    "check_clusters",
    "ensemble_dims",
    "join_clusters",
    "make_clusters",
    "weights",
    "whole_cluster",
]

# Clusters are concatenated along it; unlike the vocabulary, no layout splits it.
WHOLE_CLUSTER = "whole_cluster"


def ensemble_dims(
    ensemble_dim: Union[mtf.Dimension, Sequence[mtf.Dimension], None],
) -> list[mtf.Dimension]:
    """Converts a Dimension, a list of them, or None to a list."""
    if ensemble_dim is None:
        return []
    return [ensemble_dim] if isinstance(ensemble_dim, mtf.Dimension) else list(ensemble_dim)


def weights(
    mesh: mtf.Mesh,
    name: str,
    dims: Sequence[mtf.Dimension],
    variable_dtype: mtf.VariableDType,
    ensemble_dim: Union[mtf.Dimension, Sequence[mtf.Dimension], None],
    initializer: Optional[Callable[..., tf.Tensor]] = None,
) -> mtf.Tensor:
    """Creates a variable with ensemble dimensions first; standard normal by default."""
    return mtf.get_variable(
        mesh,
        name,
        mtf.Shape([*ensemble_dims(ensemble_dim), *dims]),
        dtype=variable_dtype,
        initializer=tf.random_normal_initializer() if initializer is None else initializer,
    )


class Table:
    """An embedding table: a vector of the output dimension for each id."""

    def __init__(
        self,
        mesh: mtf.Mesh,
        vocab_dim: mtf.Dimension,
        output_dim: mtf.Dimension,
        variable_dtype: mtf.VariableDType,
        name: str,
        ensemble_dim: Union[mtf.Dimension, Sequence[mtf.Dimension], None],
    ):
        self._vocab_dim = vocab_dim
        self._output_dim = output_dim
        self._weights = layers.embedding_weights(
            mesh, vocab_dim, output_dim, variable_dtype, name, ensemble_dim
        )

    def embed(self, ids: mtf.Tensor, num_ids: Optional[int] = None) -> mtf.Tensor:
        """Returns the embeddings of ids; 0 for ids outside the first `num_ids`."""
        ids = _among_first(ids, num_ids)
        shape = mtf.Shape([*ids.shape.dims, self._output_dim])
        return mtf.gather(self._weights, ids, self._vocab_dim, output_shape=shape)

    def logits(self, hidden: mtf.Tensor) -> mtf.Tensor:
        """Returns logits: the products of `hidden` with the embeddings of all ids."""
        shape = hidden.shape - self._output_dim + self._vocab_dim
        return mtf.einsum([hidden, self._weights], output_shape=shape)


class FactorizedTable:
    """A table factorized into two matrices: a short vector for each id, and a projection."""

    def __init__(
        self,
        mesh: mtf.Mesh,
        vocab_dim: mtf.Dimension,
        output_dim: mtf.Dimension,
        variable_dtype: mtf.VariableDType,
        name: str,
        ensemble_dim: Union[mtf.Dimension, Sequence[mtf.Dimension], None],
        inner_size: int,
    ):
        self._vocab_dim = vocab_dim
        self._output_dim = output_dim
        self._inner_dim = mtf.Dimension("inner_vocab", inner_size)
        # The product of both has variance 1, like a Table.
        initializer = tf.random_normal_initializer(stddev=inner_size**-0.25)

        def factor(suffix: str, dim: mtf.Dimension, to_dim: mtf.Dimension) -> mtf.Tensor:
            dims = [dim, to_dim]
            return weights(mesh, name + suffix, dims, variable_dtype, ensemble_dim, initializer)

        self._short = factor("1", vocab_dim, self._inner_dim)
        self._map = factor("2", self._inner_dim, output_dim)

    def embed(self, ids: mtf.Tensor, num_ids: Optional[int] = None) -> mtf.Tensor:
        """Returns the embeddings of ids; 0 for ids outside the first `num_ids`."""
        ids = _among_first(ids, num_ids)
        shape = mtf.Shape([*ids.shape.dims, self._inner_dim])
        short = mtf.gather(self._short, ids, self._vocab_dim, output_shape=shape)
        shape = mtf.Shape([*ids.shape.dims, self._output_dim])
        return mtf.einsum([short, self._map], output_shape=shape)

    def logits(self, hidden: mtf.Tensor) -> mtf.Tensor:
        """Returns logits: the products of `hidden` with the embeddings of all ids."""
        rest = hidden.shape - self._output_dim
        short = mtf.einsum([hidden, self._map], output_shape=rest + self._inner_dim)
        return mtf.einsum([short, self._short], output_shape=rest + self._vocab_dim)


def _among_first(ids: mtf.Tensor, number: Optional[int]) -> mtf.Tensor:
    """Replaces ids that are not below `number` by -1, which has no embedding."""
    if number is None:
        return ids
    below = mtf.cast(mtf.less(ids, number), ids.dtype)
    # `below` is 1 or 0, so this is the id itself or -1.
    return ids * below + (below - 1)


class Cluster(NamedTuple):
    """A range of ids and its table.

    Attributes:
      start: the first id.
      size: how many ids there are.
      table: a Table or a FactorizedTable.
      length_factor: the fraction of a sequence's positions that the loss has room for.
    """

    start: int
    size: int
    table: Any
    length_factor: float = 1

    @property
    def end(self) -> int:
        """The first id after the cluster."""
        return self.start + self.size


def _is_cluster(cluster: Mapping[str, float]) -> bool:
    sizes = [cluster.get("token_count"), cluster.get("embedding_size", 1)]
    return (
        set(cluster) <= {"token_count", "embedding_size", "length_projection_factor"}
        and all(isinstance(size, int) and size >= 1 for size in sizes)
        and 0 < cluster.get("length_projection_factor", 1) <= 1
    )


def check_clusters(
    what: str, clusters: Sequence[Mapping[str, float]], vocab_dim: mtf.Dimension
) -> None:
    """Checks that clusters have positive sizes that sum to the vocabulary size."""
    for cluster in clusters:
        if not _is_cluster(cluster):
            raise ValueError(
                f"{what}: a cluster is a dictionary of token_count and, if wanted, embedding_size, "
                "positive integers, and length_projection_factor, more than 0 and at most 1, not "
                f"{cluster!r}"
            )
    counts = [cluster["token_count"] for cluster in clusters]
    if sum(counts) != vocab_dim.size:
        raise ValueError(
            f"{what}: the token counts {counts} of the clusters sum to {sum(counts)}, not to "
            f"{vocab_dim.name}={vocab_dim.size}, which is the size of the vocabulary rounded up "
            "to a multiple of Unitransformer's vocab_divisor; enlarge the last cluster"
        )


def make_clusters(
    mesh: mtf.Mesh,
    clusters: Sequence[dict],
    vocab_dim: mtf.Dimension,
    output_dim: mtf.Dimension,
    variable_dtype: mtf.VariableDType,
    name: str,
    ensemble_dim: Union[mtf.Dimension, Sequence[mtf.Dimension], None],
    extra_entries: int = 0,
) -> list[Cluster]:
    """Creates the tables of clusters.

    Args:
      mesh: a Mesh.
      clusters: a list of dictionaries, as `check_clusters` requires.
      vocab_dim: a Dimension; those of the tables have its name.
      output_dim: a Dimension; a cluster with shorter or longer vectors is factorized.
      variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
      name: a string, which the variable names begin with, followed by the number of the cluster.
      ensemble_dim: a Dimension, a list of them, or None.
      extra_entries: the number of additional entries of the first table.
    """
    made = []
    start = 0
    for i, cluster in enumerate(clusters):
        size = cluster["token_count"]
        inner_size = cluster.get("embedding_size", output_dim.size)
        # Only the first table has entries besides those of its ids.
        dim = mtf.Dimension(vocab_dim.name, size + (0 if i else extra_entries))
        arguments = (mesh, dim, output_dim, variable_dtype, f"{name}_{i}", ensemble_dim)
        whole = inner_size == output_dim.size
        table = Table(*arguments) if whole else FactorizedTable(*arguments, inner_size)
        made.append(Cluster(start, size, table, cluster.get("length_projection_factor", 1)))
        start += size
    return made


def whole_cluster(x: mtf.Tensor, vocab_dim: mtf.Dimension) -> mtf.Tensor:
    """Renames the vocabulary dimension so that it can be sliced and concatenated."""
    return mtf.rename_dimension(x, vocab_dim.name, WHOLE_CLUSTER)


def join_clusters(parts: Sequence[mtf.Tensor], vocab_dim: mtf.Dimension) -> mtf.Tensor:
    """Concatenates `whole_cluster`s to a Tensor with `vocab_dim` as its last dimension."""
    joined = mtf.concat(list(parts), WHOLE_CLUSTER) if len(parts) > 1 else parts[0]
    return mtf.reshape(joined, mtf.Shape([*joined.shape.dims[:-1], vocab_dim]))
