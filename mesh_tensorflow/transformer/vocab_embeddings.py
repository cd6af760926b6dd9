"""Alternative vocabulary embeddings: factorized, in clusters, and mixtures of softmaxes.

Each is a class to be bound as `get_vocab_embedding_cls.cls`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Optional, Union

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import is_whole
from mesh_tensorflow.transformer.transformer._context import dropout_of

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = ["AdaptiveVocabEmbedding", "FactorizedVocabEmbedding", "Mixtape", "MixtureOfSoftmaxes"]


# -- tables


# Clusters are concatenated along it; unlike the vocabulary, no layout splits it.
WHOLE_CLUSTER = "whole_cluster"


class Variables(NamedTuple):
    """What the variables of an embedding have in common.

    Attributes:
      mesh: a Mesh.
      variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
      name: a string, which their names begin with.
      ensemble_dim: a Dimension, a list of them, or None.
    """

    mesh: mtf.Mesh
    variable_dtype: mtf.VariableDType
    name: str
    ensemble_dim: Union[mtf.Dimension, Sequence[mtf.Dimension], None]

    def make(
        self,
        suffix: str,
        dims: Sequence[mtf.Dimension],
        initializer: Optional[Callable[..., tf.Tensor]] = None,
    ) -> mtf.Tensor:
        """Creates a variable with ensemble dimensions first; standard normal by default."""
        ensemble = self.ensemble_dim
        before = [ensemble] if isinstance(ensemble, mtf.Dimension) else ensemble or ()
        return mtf.get_variable(
            self.mesh,
            self.name + suffix,
            mtf.Shape([*before, *dims]),
            dtype=self.variable_dtype,
            initializer=tf.random_normal_initializer() if initializer is None else initializer,
        )


class Table:
    """An embedding table: a vector of the output dimension for each id.

    With an inner size it is the product of two matrices: a vector of this size for each id, and a
    projection of these; and, if `projects_back`, another one of what logits are of.
    """

    def __init__(
        self,
        variables: Variables,
        suffix: str,
        vocab_dim: mtf.Dimension,
        output_dim: mtf.Dimension,
        inner_size: Optional[int] = None,
        projects_back: bool = False,
    ):
        self._vocab_dim = vocab_dim
        self._output_dim = self._vector_dim = output_dim
        self._projection: Optional[mtf.Tensor] = None
        self._back: Optional[mtf.Tensor] = None
        if inner_size is None:
            self._vectors = variables.make(suffix, [vocab_dim, output_dim])
            return
        self._vector_dim = mtf.Dimension("inner_vocab", inner_size)
        # The product of both has variance 1, like a whole table.
        initializer = tf.random_normal_initializer(stddev=inner_size**-0.25)
        self._vectors = variables.make(f"{suffix}1", [vocab_dim, self._vector_dim], initializer)
        self._projection = variables.make(f"{suffix}2", [self._vector_dim, output_dim], initializer)
        self._back = self._projection
        if projects_back:
            # So that logits have variance 1, unscaled.
            initializer = tf.random_normal_initializer(
                stddev=output_dim.size**-0.5 * inner_size**-0.25
            )
            self._back = variables.make(f"{suffix}3", [output_dim, self._vector_dim], initializer)

    def embed(self, ids: mtf.Tensor, num_ids: Optional[int] = None) -> mtf.Tensor:
        """Returns the embeddings of ids; 0 for ids outside the first `num_ids`."""
        ids = _among_first(ids, num_ids)
        shape = mtf.Shape([*ids.shape.dims, self._vector_dim])
        vectors = mtf.gather(self._vectors, ids, self._vocab_dim, output_shape=shape)
        if self._projection is None:
            return vectors
        # After the lookup, so that only the vectors of these ids are projected.
        shape = mtf.Shape([*ids.shape.dims, self._output_dim])
        return mtf.einsum([vectors, self._projection], output_shape=shape)

    def logits(self, hidden: mtf.Tensor) -> mtf.Tensor:
        """Returns logits: the products of `hidden` with the embeddings of all ids."""
        rest = hidden.shape - self._output_dim
        if self._back is not None:
            # By way of the short vectors: the product of both matrices would be a whole table.
            hidden = mtf.einsum([hidden, self._back], output_shape=rest + self._vector_dim)
        return mtf.einsum([hidden, self._vectors], output_shape=rest + self._vocab_dim)


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
      table: its Table.
      length_factor: the fraction of a sequence's positions that the loss has room for.
    """

    start: int
    size: int
    table: Table
    length_factor: float = 1

    @property
    def end(self) -> int:
        """The first id after the cluster."""
        return self.start + self.size


def _is_cluster(cluster: Mapping[str, float]) -> bool:
    sizes = [cluster.get("token_count"), cluster.get("embedding_size", 1)]
    return (
        set(cluster) <= {"token_count", "embedding_size", "length_projection_factor"}
        and all(is_whole(size) for size in sizes)
        and 0 < cluster.get("length_projection_factor", 1) <= 1
    )


def make_clusters(
    what: str,
    variables: Variables,
    clusters: Sequence[dict],
    vocab_dim: mtf.Dimension,
    output_dim: mtf.Dimension,
    entries_of_tails: bool = False,
) -> list[Cluster]:
    """Creates the tables of clusters.

    Args:
      what: the class that has them, for errors.
      variables: Variables, whose names get the number of the cluster.
      clusters: a list of dictionaries, one for each cluster.
      vocab_dim: a Dimension; those of the tables have its name.
      output_dim: a Dimension; a cluster with shorter or longer vectors is factorized.
      entries_of_tails: whether the first table has an entry for each other cluster, too.

    Raises:
      ValueError: a cluster is malformed, or their sizes do not sum to the vocabulary size.
    """
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
    clusters_made: list[Cluster] = []
    for i, cluster in enumerate(clusters):
        size = cluster["token_count"]
        inner_size = cluster.get("embedding_size", output_dim.size)
        # Only the first table has entries besides those of its ids.
        extra = len(clusters) - 1 if entries_of_tails and not i else 0
        table = Table(
            variables,
            f"_{i}",
            mtf.Dimension(vocab_dim.name, size + extra),
            output_dim,
            # A projection between dimensions of one size would add parameters and no capacity.
            None if inner_size == output_dim.size else inner_size,
        )
        start = clusters_made[-1].end if clusters_made else 0
        clusters_made.append(
            Cluster(start, size, table, cluster.get("length_projection_factor", 1))
        )
    return clusters_made


def whole_cluster(x: mtf.Tensor, vocab_dim: mtf.Dimension) -> mtf.Tensor:
    """Renames the vocabulary dimension so that it can be sliced and concatenated."""
    return mtf.rename_dimension(x, vocab_dim.name, WHOLE_CLUSTER)


def join_clusters(parts: Sequence[mtf.Tensor], vocab_dim: mtf.Dimension) -> mtf.Tensor:
    """Concatenates `whole_cluster`s to a Tensor with `vocab_dim` as its last dimension."""
    joined = mtf.concat(list(parts), WHOLE_CLUSTER) if len(parts) > 1 else parts[0]
    # Only now by its own name: slices of a split vocabulary do not end where clusters do.
    return mtf.reshape(joined, mtf.Shape([*joined.shape.dims[:-1], vocab_dim]))


# -- embeddings


_MODULE = "mesh_tensorflow.transformer.vocab_embeddings"


def _scaled(hidden: mtf.Tensor, output_dim: mtf.Dimension) -> mtf.Tensor:
    # Logits sum output_dim products with entries of variance 1.
    return hidden * output_dim.size**-0.5


@gin.configurable(module=_MODULE)
class FactorizedVocabEmbedding:
    """An embedding whose table is the product of two matrices.

    See Lan et al., "ALBERT: a lite BERT for self-supervised learning of language
    representations" (2019).
    """

    def __init__(
        self,
        mesh: mtf.Mesh,
        vocab_dim: mtf.Dimension,
        output_dim: mtf.Dimension,
        variable_dtype: mtf.VariableDType,
        name: str,
        ensemble_dim: Union[mtf.Dimension, Sequence[mtf.Dimension], None],
        inner_dimension_size: int = gin.REQUIRED,
        projects_back: bool = False,
    ):
        """Creates the variables `name`1 [vocab, inner] and `name`2 [inner, output].

        Args:
          mesh: a Mesh.
          vocab_dim: the Dimension of ids, of the size of the vocabulary.
          output_dim: a Dimension.
          variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
          name: a string, the beginning of the variables' names.
          ensemble_dim: a Dimension, a list of them, or None.
          inner_dimension_size: an integer, the size that both matrices share.
          projects_back: whether logits have a projection of their own, `name`3 [output, inner], and
            not that of embeddings. They are not divided by sqrt(output_dim) then, as in OPT.
        """
        self._output_dim = output_dim
        self._projects_back = projects_back
        variables = Variables(mesh, variable_dtype, name, ensemble_dim)
        self._table = Table(
            variables, "", vocab_dim, output_dim, inner_dimension_size, projects_back
        )

    def ids_to_embedding(self, ids: mtf.Tensor, context: Context) -> mtf.Tensor:
        """Returns the embeddings of ids: dimensions [...] become [..., output_dim]."""
        del context
        return self._table.embed(ids)

    def hidden_to_logits(self, hidden: mtf.Tensor, context: Context) -> mtf.Tensor:
        """Returns logits: dimensions [..., output_dim] become [..., vocab_dim]."""
        del context
        if not self._projects_back:
            hidden = _scaled(hidden, self._output_dim)
        return self._table.logits(hidden)


@gin.configurable(module=_MODULE)
class AdaptiveVocabEmbedding:
    """An embedding in clusters of ids, with shorter vectors for rarer ids.

    The ids must be sorted by frequency. See Baevski and Auli, "Adaptive input representations
    for neural language modeling" (2018).
    """

    def __init__(
        self,
        mesh: mtf.Mesh,
        vocab_dim: mtf.Dimension,
        output_dim: mtf.Dimension,
        variable_dtype: mtf.VariableDType,
        name: str,
        ensemble_dim: Union[mtf.Dimension, Sequence[mtf.Dimension], None],
        clusters: Sequence[dict] = gin.REQUIRED,
    ):
        """Creates the variables.

        Args:
          mesh: a Mesh.
          vocab_dim: the Dimension of ids, of the size of the vocabulary.
          output_dim: a Dimension.
          variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
          name: a string, the beginning of the variables' names.
          ensemble_dim: a Dimension, a list of them, or None.
          clusters: a list of dictionaries, one for each cluster from the most frequent ids to
            the rarest: "token_count", the number of its ids, and "embedding_size", the size of its
            embeddings, that of `output_dim` by default.

        Raises:
          ValueError: the token counts do not sum to the size of `vocab_dim`.
        """
        self._vocab_dim = vocab_dim
        self._output_dim = output_dim
        variables = Variables(mesh, variable_dtype, name, ensemble_dim)
        self._clusters = make_clusters(
            type(self).__name__, variables, clusters, vocab_dim, output_dim
        )

    def ids_to_embedding(self, ids: mtf.Tensor, context: Context) -> mtf.Tensor:
        """Returns the embeddings of ids: dimensions [...] become [..., output_dim]."""
        del context
        # Ids of other clusters are out of range, for which gather returns 0: so one term counts.
        embedded = [c.table.embed(ids - c.start if c.start else ids) for c in self._clusters]
        return mtf.add_n(embedded)

    def hidden_to_logits(self, hidden: mtf.Tensor, context: Context) -> mtf.Tensor:
        """Returns logits: dimensions [..., output_dim] become [..., vocab_dim]."""
        del context
        # Of the hidden vectors and not of the logits, which are many more numbers.
        hidden = _scaled(hidden, self._output_dim)
        logits_of_clusters = [
            whole_cluster(c.table.logits(hidden), self._vocab_dim) for c in self._clusters
        ]
        return join_clusters(logits_of_clusters, self._vocab_dim)


class _TableWithContexts:
    """Base class of embeddings whose softmax combines several projections of the hidden vector.

    Variables: a table, and for each component a square projection of the hidden vector.
    """

    def __init__(self, variables: Variables, vocab_dim: mtf.Dimension, output_dim: mtf.Dimension):
        self._variables = variables
        self._vocab_dim = vocab_dim
        self._output_dim = output_dim
        # A name without a rule: where one splits the channels, a map of them is split on one side.
        self._copy_output_dim = mtf.Dimension(f"_{output_dim.name}_copy", output_dim.size)
        self._embedding_weights = variables.make("_embedding_weights", [vocab_dim, output_dim])

    def ids_to_embedding(self, ids: mtf.Tensor, context: Context) -> mtf.Tensor:
        """Returns the embeddings of ids: dimensions [...] become [..., output_dim]."""
        del context
        shape = mtf.Shape([*ids.shape.dims, self._output_dim])
        return mtf.gather(self._embedding_weights, ids, self._vocab_dim, output_shape=shape)

    def _component_logits(
        self,
        hidden: mtf.Tensor,
        component_dim: mtf.Dimension,
        maps: mtf.Tensor,
        bias: Optional[mtf.Tensor] = None,
    ) -> mtf.Tensor:
        """Returns logits with dimensions [..., component_dim, vocab_dim]."""
        rest = hidden.shape - self._output_dim + component_dim
        # A tensor cannot have one dimension twice, as the map from d_model to d_model would.
        copied = mtf.rename_dimension(hidden, self._output_dim.name, self._copy_output_dim.name)
        mapped = mtf.einsum([copied, maps], output_shape=rest + self._output_dim)
        if bias is not None:
            mapped = mtf.add(mapped, bias, output_shape=mapped.shape)
        # logits[k, v] = tanh(hidden maps[k] + bias[k]) . table[v], for each component k.
        return mtf.einsum(
            [mtf.tanh(mapped), self._embedding_weights], output_shape=rest + self._vocab_dim
        )


@gin.configurable(module=_MODULE)
class MixtureOfSoftmaxes(_TableWithContexts):
    """Several softmaxes over the vocabulary, mixed by weights that depend on the context.

    See Yang et al., "Breaking the softmax bottleneck: a high-rank RNN language model" (2017).
    """

    def __init__(
        self,
        mesh: mtf.Mesh,
        vocab_dim: mtf.Dimension,
        output_dim: mtf.Dimension,
        variable_dtype: mtf.VariableDType,
        name: str,
        ensemble_dim: Union[mtf.Dimension, Sequence[mtf.Dimension], None],
        num_softmaxes: int = gin.REQUIRED,
    ):
        """Creates the variables.

        Args:
          mesh: a Mesh.
          vocab_dim: the Dimension of ids, of the size of the vocabulary.
          output_dim: a Dimension.
          variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
          name: a string, the beginning of the variables' names.
          ensemble_dim: a Dimension, a list of them, or None.
          num_softmaxes: an integer.
        """
        variables = Variables(mesh, variable_dtype, name, ensemble_dim)
        super().__init__(variables, vocab_dim, output_dim)
        self._components_dim = mtf.Dimension("softmax_components", num_softmaxes)
        self._mixture_weights = variables.make(
            "_mixture_weights", [self._components_dim, output_dim]
        )
        self._context_weights = variables.make(
            "_context_weights", [self._components_dim, self._copy_output_dim, output_dim]
        )

    def hidden_to_logits(self, hidden: mtf.Tensor, context: Context) -> mtf.Tensor:
        """Returns log probabilities.

        Args:
          hidden: a Tensor with dimensions [..., output_dim].
          context: the Context of this call of the model: its mode, positions, states and losses.

        Returns:
          A Tensor with dimensions [..., vocab_dim].
        """
        del context
        hidden = _scaled(hidden, self._output_dim)
        rest = hidden.shape - self._output_dim
        mixture = mtf.einsum(
            [hidden, self._mixture_weights], output_shape=rest + self._components_dim
        )
        logits = self._component_logits(hidden, self._components_dim, self._context_weights)
        log_probs = mtf.log_softmax(logits, self._vocab_dim)
        log_priors = mtf.log_softmax(mixture, self._components_dim)
        # log(sum over k of prior[k] * p[k, token]); in logarithms, as small p would be 0.
        # Normalized already, and so a later softmax leaves these log probabilities as they are.
        return mtf.reduce_logsumexp(
            mtf.add(log_probs, log_priors, output_shape=log_probs.shape), self._components_dim
        )


@gin.configurable(module=_MODULE)
class Mixtape(_TableWithContexts):
    """Four sets of logits, mixed by gates that depend on the context and the token.

    The gates are products of three sigmoids. Frequent tokens have their own gates, the others share
    theirs. The ids must be sorted by frequency. See Yang et al., "Mixtape: breaking the softmax
    bottleneck efficiently" (2019).
    """

    def __init__(
        self,
        mesh: mtf.Mesh,
        vocab_dim: mtf.Dimension,
        output_dim: mtf.Dimension,
        variable_dtype: mtf.VariableDType,
        name: str,
        ensemble_dim: Union[mtf.Dimension, Sequence[mtf.Dimension], None],
        extra_ids: int = 0,
        dropout_rate: float = 0.0,
        gate_embedding_size: int = gin.REQUIRED,
        frequent_token_fraction: float = 0.1,
        noise_std_dev: float = 0.0,
    ):
        """Creates the variables.

        Args:
          mesh: a Mesh.
          vocab_dim: the Dimension of ids, of the size of the vocabulary.
          output_dim: a Dimension.
          variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
          name: a string, the beginning of the variables' names.
          ensemble_dim: a Dimension, a list of them, or None.
          extra_ids: the number of ids at the end of the vocabulary that count as the most frequent:
            the softmax has its entries in this order, the embedding of ids does not.
          dropout_rate: the dropout rate of logits and gate embeddings.
          gate_embedding_size: an integer, the size of gate embeddings.
          frequent_token_fraction: the fraction of the vocabulary with its own gates.
          noise_std_dev: the standard deviation of the noise added to gates in training.

        Raises:
          ValueError: the fraction leaves no frequent token, or `extra_ids` are too many.
        """
        variables = Variables(mesh, variable_dtype, name, ensemble_dim)
        super().__init__(variables, vocab_dim, output_dim)
        frequent = int(vocab_dim.size * frequent_token_fraction)
        if not 1 <= frequent <= vocab_dim.size:
            raise ValueError(
                f"Mixtape: frequent_token_fraction={frequent_token_fraction} of {vocab_dim.name}="
                f"{vocab_dim.size} is {frequent} tokens; it must be at least one and at most all"
            )
        if not 0 <= extra_ids <= vocab_dim.size:
            raise ValueError(
                f"Mixtape: extra_ids={extra_ids} must be between 0 and the size of "
                f"{vocab_dim.name}={vocab_dim.size}"
            )
        self._extra_ids = extra_ids
        self._dropout_rate = dropout_rate
        self._noise_std_dev = noise_std_dev
        # Three decisions have four outcomes; as no tensor has both dimensions, one name will do.
        self._gates_dim = mtf.Dimension("gates", 4)
        self._pre_gates_dim = mtf.Dimension("gates", 3)
        self._gate_embedding_dim = mtf.Dimension("gate_embedding", gate_embedding_size)
        self._frequent_vocab_dim = mtf.Dimension(vocab_dim.name, frequent)
        gates, pre, vector = self._gates_dim, self._pre_gates_dim, self._gate_embedding_dim
        most_frequent, zeros, make = (
            self._frequent_vocab_dim,
            tf.zeros_initializer(),
            variables.make,
        )
        self._context_weights = make("_context_weights", [gates, self._copy_output_dim, output_dim])
        self._context_weights_bias = make("_context_weights_bias", [gates, output_dim], zeros)
        self._prior_weights = make("_prior_weights", [pre, vector, output_dim])
        self._prior_weights_bias = make("_prior_weights_bias", [pre, vector], zeros)
        self._prior_vocab_vector = make("_prior_vocab_vector", [most_frequent, vector])
        self._prior_gates_vector = make("_prior_gates_vector", [pre, output_dim])
        # Random, unlike the other biases, as in the classic.
        self._prior_bias = make("_prior_bias", [most_frequent, pre])

    def hidden_to_logits(self, hidden: mtf.Tensor, context: Context) -> mtf.Tensor:
        """Returns logits.

        Args:
          hidden: a Tensor with dimensions [..., output_dim].
          context: the Context of this call of the model: its mode, positions, states and losses.

        Returns:
          A Tensor with dimensions [..., vocab_dim].
        """
        hidden = _scaled(hidden, self._output_dim)
        components = self._component_logits(
            hidden, self._gates_dim, self._context_weights, self._context_weights_bias
        )
        components = dropout_of(components, context, self._dropout_rate)
        gates = self._gates(hidden, context)
        # logits[v] = sum over k of gates[k, v] * tanh(hidden C[k] + b[k]) . table[v].
        logits = mtf.einsum(
            [components, gates], output_shape=hidden.shape - self._output_dim + self._vocab_dim
        )
        if not self._extra_ids:
            return logits
        # Logits are made in the order of frequency, in which the extra ids come first.
        return mtf.shift(logits, -self._extra_ids, self._vocab_dim, wrap=True)

    def _for_all_tokens(self, x: mtf.Tensor) -> mtf.Tensor:
        """Pads a Tensor over frequent tokens with zeros for the others."""
        dims = [self._vocab_dim if d == self._frequent_vocab_dim else d for d in x.shape.dims]
        rest = self._vocab_dim.size - self._frequent_vocab_dim.size
        if not rest:
            return x
        # Under a name without a rule: what is padded cannot be split.
        x = whole_cluster(x, self._vocab_dim)
        return mtf.reshape(mtf.pad(x, [0, rest], WHOLE_CLUSTER), mtf.Shape(dims))

    def _gates(self, hidden: mtf.Tensor, context: Context) -> mtf.Tensor:
        """Returns the gates, with dimensions [..., gates, vocab_dim]; they sum to 1."""
        rest = hidden.shape - self._output_dim + self._pre_gates_dim
        vectors = mtf.einsum(
            [hidden, self._prior_weights], output_shape=rest + self._gate_embedding_dim
        )
        vectors = mtf.tanh(mtf.add(vectors, self._prior_weights_bias, output_shape=vectors.shape))
        vectors = dropout_of(vectors, context, self._dropout_rate)
        shared = mtf.einsum([hidden, self._prior_gates_vector], output_shape=rest)
        # Tokens that are not frequent have zeros here, and so the shared gates alone.
        own = mtf.einsum(
            [vectors, self._for_all_tokens(self._prior_vocab_vector)],
            output_shape=rest + self._vocab_dim,
        )
        own = mtf.add(own, self._for_all_tokens(self._prior_bias), output_shape=own.shape)
        activations = mtf.add(own, shared, output_shape=own.shape)
        if context.train and self._noise_std_dev:
            # Before the sigmoids, so that gates stay between 0 and 1 and still sum to 1.
            activations += mtf.random_normal(
                self._variables.mesh, own.shape, stddev=self._noise_std_dev, dtype=own.dtype
            )
        # A tree of decisions: the parts f s, f (1 - s), (1 - f) t and (1 - f) (1 - t) sum to 1.
        first, second, third = mtf.unstack(mtf.sigmoid(activations), self._pre_gates_dim)
        left, right = first * second, (1.0 - first) * third
        products = [left, first - left, right, (1.0 - first) - right]
        # In the place of the decisions that `unstack` took out, before the vocabulary.
        return mtf.stack(products, self._gates_dim.name, axis=len(rest) - 1)
