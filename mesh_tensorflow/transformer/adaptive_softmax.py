"""Adaptive softmax: rare tokens have shorter embeddings and separate softmaxes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Union

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow._core.errors import slip
from mesh_tensorflow.transformer import vocab_embeddings
from mesh_tensorflow.transformer.transformer._call import divided_loss

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context
    from mesh_tensorflow.transformer.transformer._unitransformer import Unitransformer

__all__ = ["AdaptiveSoftmaxVocabEmbedding", "adaptive_softmax_loss_fn"]

_MODULE = "mesh_tensorflow.transformer.adaptive_softmax"


@gin.configurable(module=_MODULE)
class AdaptiveSoftmaxVocabEmbedding:
    """An embedding in clusters of ids, and a two-level softmax over them.

    The ids must be sorted by frequency. The softmax of the first cluster is over its ids and an
    entry for each other cluster; that of another cluster is over its ids. See Joulin et al.,
    "Efficient softmax approximation for GPUs" (2017).

    In mode "train" `hidden_to_logits` returns its input, and `adaptive_softmax_loss_fn`, to be
    bound as `Unitransformer.loss_fn`, computes the loss without computing all logits. The encoder
    and the decoder of a Bitransformer, or the input and the softmax of a language model, must share
    the embedding.
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
            embeddings, that of `output_dim` by default. Clusters after the first may also have
            "length_projection_factor", 1 by default: the fraction of a sequence's positions that
            the loss has room for. Further ids of the cluster, at the end of the sequence,
            contribute to the loss only as members of the cluster.

        Raises:
          ValueError: the description of a cluster is malformed, or the token counts do not sum to
            the size of `vocab_dim`.
        """
        self._vocab_dim = vocab_dim
        self._output_dim = output_dim
        variables = vocab_embeddings.Variables(mesh, variable_dtype, name, ensemble_dim)
        self._head, *self._tails = vocab_embeddings.make_clusters(
            type(self).__name__,
            variables,
            clusters,
            vocab_dim,
            output_dim,
            # One for each tail: the probability of all of its ids together.
            entries_of_tails=True,
        )

    def ids_to_embedding(self, ids: mtf.Tensor, context: Context) -> mtf.Tensor:
        """Returns the embeddings of ids.

        Args:
          ids: an integer Tensor with dimensions [...].
          context: the Context of this call of the model: its mode, positions, states and losses.

        Returns:
          A Tensor with dimensions [..., output_dim].
        """
        del context
        # The head's table also has entries for the tails, which are no ids.
        embedded = self._head.table.embed(ids, self._head.size)
        for tail in self._tails:
            embedded += tail.table.embed(ids - tail.start)
        return embedded

    def hidden_to_logits(self, hidden: mtf.Tensor, context: Context) -> mtf.Tensor:
        """Returns the log probabilities of all ids; in training, its input.

        Args:
          hidden: a Tensor with dimensions [..., output_dim].
          context: the Context of this call of the model: its mode, positions, states and losses.

        Returns:
          A Tensor with dimensions [..., vocab_dim]; `hidden` in mode "train".
        """
        # The loss makes a tail's logits at the tail's positions only; all would cost much more.
        if context.mode == "train":
            return hidden
        head = self._log_probs(self._head, hidden)
        size, dim_name = self._head.size, head.shape.dims[-1].name  # which can be sliced
        logits_of_clusters = [mtf.slice(head, 0, size, dim_name)]
        for i, tail in enumerate(self._tails):
            entry = mtf.slice(head, size + i, 1, dim_name)
            entry = mtf.reshape(entry, hidden.shape - self._output_dim)
            # log p(id) = log p(cluster) + log p(id | cluster).
            logits_of_clusters.append(self._log_probs(tail, hidden) + entry)
        return vocab_embeddings.join_clusters(logits_of_clusters, self._vocab_dim)

    def compute_loss(
        self, decoder: Unitransformer, hidden: mtf.Tensor, targets: mtf.Tensor, context: Context
    ) -> mtf.Tensor:
        """Returns the loss: the sum of cross entropies over the decoder's denominator.

        Args:
          decoder: a Unitransformer; its `z_loss` and `loss_denominator` are used.
          hidden: a Tensor with dimensions [..., output_dim].
          targets: an integer Tensor with dimensions [...], ids; only positive ids are predicted.
          context: the Context of this call of the model: its mode, positions, states and losses.

        Returns:
          A scalar.
        """
        # Ids of the second cluster map to the first entry after the head's ids, and so on.
        entries = mtf.minimum(targets, self._head.size - 1)
        for tail in self._tails:
            entries += mtf.cast(mtf.greater_equal(targets, tail.start), tf.int32)
        counted = mtf.cast(mtf.greater(targets, 0), hidden.dtype)
        loss = self._cross_entropy(self._head, decoder, hidden, entries, counted)
        for tail in self._tails:
            inside = mtf.logical_and(
                mtf.greater_equal(targets, tail.start), mtf.less(targets, tail.end)
            )
            loss += self._cross_entropy(
                tail, decoder, *_projected(tail, hidden, targets - tail.start, inside)
            )
        return divided_loss(loss, decoder, targets, context.num_microbatches)

    def _logits(self, cluster: vocab_embeddings.Cluster, hidden: mtf.Tensor) -> mtf.Tensor:
        # A product sums output_dim terms, and entries of tables have variance 1.
        return cluster.table.logits(hidden * self._output_dim.size**-0.5)

    def _log_probs(self, cluster: vocab_embeddings.Cluster, hidden: mtf.Tensor) -> mtf.Tensor:
        logits = self._logits(cluster, hidden)
        log_probs = mtf.log_softmax(logits, logits.shape.dims[-1])
        return vocab_embeddings.whole_cluster(log_probs, self._vocab_dim)

    def _cross_entropy(
        self,
        cluster: vocab_embeddings.Cluster,
        decoder: Unitransformer,
        hidden: mtf.Tensor,
        targets: mtf.Tensor,
        counted: mtf.Tensor,
    ) -> mtf.Tensor:
        logits = self._logits(cluster, hidden)
        loss = layers.softmax_cross_entropy_with_logits(
            logits, targets, logits.shape.dims[-1], z_loss=decoder.z_loss
        )
        return mtf.reduce_sum(loss * mtf.cast(counted, loss.dtype))


def _projected(
    cluster: vocab_embeddings.Cluster, hidden: mtf.Tensor, targets: mtf.Tensor, inside: mtf.Tensor
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
    """Gathers the positions of a cluster from sequences, as many as it has room for.

    Args:
      cluster: a Cluster.
      hidden: a Tensor with dimensions [..., output_dim].
      targets: an integer Tensor with dimensions [...], one of which is named "length"; otherwise
        the last one is the length.
      inside: a boolean Tensor with dimensions [...], True at positions of the cluster.

    Returns:
      (hidden, targets, 1 at positions that count and 0 elsewhere), where the length is replaced by
      the cluster's room.
    """
    length = next((d for d in targets.shape.dims if d.name == "length"), targets.shape.dims[-1])
    counted = mtf.cast(inside, hidden.dtype)
    # Fixed in advance, as shapes cannot depend on how many ids of the cluster there are.
    room = math.ceil(length.size * cluster.length_factor)
    if room == length.size:
        return hidden, targets, counted
    places = mtf.Dimension(f"places_of_{length.name}", room)
    # The place of a position is the number of earlier ones of its cluster.
    order = mtf.cumsum(mtf.cast(inside, tf.int32), length, exclusive=True)
    # Positions beyond the room have a one-hot of zeros: the loss leaves them out.
    chosen = mtf.one_hot(order, places, dtype=hidden.dtype) * counted
    shape = mtf.Shape([places if d == length else d for d in targets.shape.dims])
    return (
        mtf.einsum([hidden, chosen], output_shape=shape + hidden.shape.dims[-1]),
        mtf.reduce_sum(mtf.cast(chosen, targets.dtype) * targets, output_shape=shape),
        mtf.reduce_sum(chosen, output_shape=shape),
    )


@gin.configurable(module=_MODULE)
def adaptive_softmax_loss_fn(
    decoder: Unitransformer,
    context: Context,
    logits: mtf.Tensor,
    targets: mtf.Tensor,
    output_vocab_dim: mtf.Dimension,
) -> mtf.Tensor:
    """Returns the loss of an adaptive softmax; to be bound as `Unitransformer.loss_fn`.

    As in the classic, it has no label smoothing and is the loss of all targets: the model's
    `label_smoothing` and `loss_on_targets_only` have no effect, which is warned of.

    Args:
      decoder: a Unitransformer whose softmax shares an AdaptiveSoftmaxVocabEmbedding.
      context: the Context of this call of the model: its mode, positions, states and losses.
      logits: what the embedding's `hidden_to_logits` returned.
      targets: an integer Tensor, ids.
      output_vocab_dim: a Dimension.

    Returns:
      A scalar.

    Raises:
      ValueError: the model does not share such an embedding.
    """
    embedding: Any = context.shared_params.get("embedding")
    if not hasattr(embedding, "compute_loss"):
        raise ValueError(
            "adaptive_softmax_loss_fn: the model shares no AdaptiveSoftmaxVocabEmbedding with its "
            "softmax; bind get_vocab_embedding_cls.cls = @AdaptiveSoftmaxVocabEmbedding, and "
            "Unitransformer.shared_embedding_and_softmax_weights = True (for a Bitransformer also "
            "Bitransformer.shared_embedding = True)"
        )
    for name in ("label_smoothing", "loss_on_targets_only"):
        if getattr(decoder, name, None):
            slip(
                f"adaptive_softmax_loss_fn: {name}={getattr(decoder, name)} has no effect on this "
                f"loss; leave {name} out",
                key=f"adaptive_softmax_loss_fn {name}",
            )
    # In training these are the hidden vectors, which lack the vocabulary.
    if output_vocab_dim not in logits.shape:
        return embedding.compute_loss(decoder, hidden=logits, targets=targets, context=context)
    # Outside of training these are log probabilities.
    # Their softmax is the probabilities again, so that the usual cross entropy fits.
    loss = layers.softmax_cross_entropy_with_logits(logits, targets, output_vocab_dim)
    counted = mtf.cast(mtf.greater(targets, 0), loss.dtype)
    return divided_loss(mtf.reduce_sum(loss * counted), decoder, targets, context.num_microbatches)
