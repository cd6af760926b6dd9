"""Tables of vectors for a vocabulary, whole, factorized, or in clusters of ids."""

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

# Clusters are joined along it: no layout splits it, whatever it does to the vocabulary.
WHOLE_CLUSTER = "whole_cluster"


def ensemble_dims(
    ensemble_dim: Union[mtf.Dimension, Sequence[mtf.Dimension], None],
) -> list[mtf.Dimension]:
    """Returns a list of Dimensions of one, a list of them, or None."""
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
    """Makes a variable with the ensemble's dimensions in front; standard normal by default."""
    return mtf.get_variable(
        mesh,
        name,
        mtf.Shape([*ensemble_dims(ensemble_dim), *dims]),
        dtype=variable_dtype,
        initializer=tf.random_normal_initializer() if initializer is None else initializer,
    )


class Table:
    """A vector of the output dimension for each id."""

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
        """Returns the vectors of ids, 0 for ids that are not among the first `num_ids`."""
        ids = _among_first(ids, num_ids)
        shape = mtf.Shape([*ids.shape.dims, self._output_dim])
        return mtf.gather(self._weights, ids, self._vocab_dim, output_shape=shape)

    def logits(self, hidden: mtf.Tensor) -> mtf.Tensor:
        """Returns the products with all vectors, the output dimension replaced by the ids'."""
        shape = hidden.shape - self._output_dim + self._vocab_dim
        return mtf.einsum([hidden, self._weights], output_shape=shape)


class FactorizedTable:
    """A product of two matrices in place of a table: a short vector for each id, and a map."""

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
        # The product of both has variance 1, as a table has.
        initializer = tf.random_normal_initializer(stddev=inner_size**-0.25)

        def factor(suffix: str, dim: mtf.Dimension, to_dim: mtf.Dimension) -> mtf.Tensor:
            dims = [dim, to_dim]
            return weights(mesh, name + suffix, dims, variable_dtype, ensemble_dim, initializer)

        self._short = factor("1", vocab_dim, self._inner_dim)
        self._map = factor("2", self._inner_dim, output_dim)

    def embed(self, ids: mtf.Tensor, num_ids: Optional[int] = None) -> mtf.Tensor:
        """Returns the vectors of ids, 0 for ids that are not among the first `num_ids`."""
        ids = _among_first(ids, num_ids)
        shape = mtf.Shape([*ids.shape.dims, self._inner_dim])
        short = mtf.gather(self._short, ids, self._vocab_dim, output_shape=shape)
        shape = mtf.Shape([*ids.shape.dims, self._output_dim])
        return mtf.einsum([short, self._map], output_shape=shape)

    def logits(self, hidden: mtf.Tensor) -> mtf.Tensor:
        """Returns the products with all vectors, the output dimension replaced by the ids'."""
        rest = hidden.shape - self._output_dim
        short = mtf.einsum([hidden, self._map], output_shape=rest + self._inner_dim)
        return mtf.einsum([short, self._short], output_shape=rest + self._vocab_dim)


def _among_first(ids: mtf.Tensor, number: Optional[int]) -> mtf.Tensor:
    """Returns ids with -1, which has no vector, for those that are not below `number`."""
    if number is None:
        return ids
    below = mtf.cast(mtf.less(ids, number), ids.dtype)
    return ids * below + (below - 1)


class Cluster(NamedTuple):
    """Neighbouring ids and their table.

    Attributes:
      start: the first id.
      size: how many ids there are.
      table: a Table or a FactorizedTable.
      length_factor: for which part of a sequence's positions there is room.
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
    """Raises if clusters are not described by positive sizes that sum to the vocabulary's."""
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
    """Makes the tables of clusters.

    Args:
      mesh: a Mesh.
      clusters: a list of dictionaries, as `check_clusters` wants them.
      vocab_dim: a Dimension; those of the tables have its name.
      output_dim: a Dimension; a cluster with shorter or longer vectors is factorized.
      variable_dtype: a VariableDType.
      name: a string, with the number of the cluster the name of its variables.
      ensemble_dim: a Dimension, a list of them, or None.
      extra_entries: how many further entries the first table has.
    """
    made = []
    start = 0
    for i, cluster in enumerate(clusters):
        size = cluster["token_count"]
        inner_size = cluster.get("embedding_size", output_dim.size)
        dim = mtf.Dimension(vocab_dim.name, size + (0 if i else extra_entries))
        arguments = (mesh, dim, output_dim, variable_dtype, f"{name}_{i}", ensemble_dim)
        whole = inner_size == output_dim.size
        table = Table(*arguments) if whole else FactorizedTable(*arguments, inner_size)
        made.append(Cluster(start, size, table, cluster.get("length_projection_factor", 1)))
        start += size
    return made


def whole_cluster(x: mtf.Tensor, vocab_dim: mtf.Dimension) -> mtf.Tensor:
    """Returns a Tensor whose dimension named as the vocabulary can be cut and joined."""
    return mtf.rename_dimension(x, vocab_dim.name, WHOLE_CLUSTER)


def join_clusters(parts: Sequence[mtf.Tensor], vocab_dim: mtf.Dimension) -> mtf.Tensor:
    """Returns one Tensor of `whole_cluster`s, with `vocab_dim` for its last dimension."""
    joined = mtf.concat(list(parts), WHOLE_CLUSTER) if len(parts) > 1 else parts[0]
    return mtf.reshape(joined, mtf.Shape([*joined.shape.dims[:-1], vocab_dim]))
