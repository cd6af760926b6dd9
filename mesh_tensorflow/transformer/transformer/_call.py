"""A call of a model, from ids to logits and losses: what goes in, and what comes out.

Calls for all positions at once, sampling and beam search share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow._core.errors import dims_text, slip
from mesh_tensorflow.layers._norm_and_loss import smoothed_cross_entropy
from mesh_tensorflow.ops._contractions.reduce_broadcast import divided_sum
from mesh_tensorflow.transformer.transformer._context import Context

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._unitransformer import Unitransformer


# -- targets shifted by one position, and ids


def _shifted(ids: mtf.Tensor) -> mtf.Tensor:
    """Returns the ids shifted by one along the last dimension, with 0 in the first position."""
    return mtf.shift(ids, offset=1, dim=ids.shape.dims[-1], wrap=False)


def autoregressive_inputs(
    targets: mtf.Tensor, sequence_id: Optional[mtf.Tensor] = None
) -> mtf.Tensor:
    """Returns the inputs of an autoregressive model: the targets shifted by one position.

    The absolute value is taken, as a negative target is an id that need not be predicted.

    Args:
      targets: an integer Tensor with dimensions [..., length].
      sequence_id: a Tensor of the same shape that numbers the examples packed into a row. The
        inputs of each example begin with 0, not with the last target of the previous example.

    Returns:
      A Tensor of the shape of `targets`.
    """
    inputs = mtf.abs(_shifted(targets))
    if sequence_id is not None:
        # In a packed row, the first input of an example is 0, not the last target before it.
        goes_on = mtf.equal(sequence_id, _shifted(sequence_id))
        inputs *= mtf.cast(goes_on, inputs.dtype)
    return inputs


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
def shift_targets(targets: mtf.Tensor, bos_id: int = 0, eos_id: int = 1) -> mtf.Tensor:
    """Returns the targets shifted by one position; an older form of `autoregressive_inputs`.

    Examples packed into a row are told apart by their end symbols.

    Args:
      targets: an integer Tensor with dimensions [..., length].
      bos_id: an integer, the first input of each example.
      eos_id: an integer, the end symbol.

    Returns:
      A Tensor of the shape of `targets`.
    """
    shifted = _shifted(targets)
    # What follows an end symbol is another example, which begins like the row.
    shifted *= mtf.cast(mtf.not_equal(shifted, eos_id), shifted.dtype)
    if bos_id:
        # Not where the target is padding too: no example begins there.
        begins = mtf.logical_and(mtf.equal(shifted, 0), mtf.not_equal(targets, 0))
        shifted += mtf.cast(begins, shifted.dtype) * bos_id
    return shifted


def delimited_lm_inputs_mask(ids: mtf.Tensor, eos_id: int = 1) -> mtf.Tensor:
    """Returns a mask of the inputs, in rows of inputs, end, targets, end, inputs, ...

    Args:
      ids: an integer Tensor with dimensions [..., length].
      eos_id: an integer, the end symbol.

    Returns:
      A boolean Tensor of the shape of `ids`: whether an even number of end symbols comes before.
      The end symbol of the inputs is thus one of the inputs.
    """
    ends = mtf.to_int32(mtf.equal(ids, eos_id))
    # Exclusive, so that an end belongs to what it ends.
    ends_before = mtf.cumsum(ends, ids.shape.dims[-1], exclusive=True)
    return mtf.equal(mtf.mod(ends_before, 2), 0)


def check_ids(what: str, ids: mtf.Tensor, vocab_dim: mtf.Dimension) -> None:
    """Checks that ids are integers and, if their values are known, within the vocabulary.

    Args:
      what: a string for the error message: the caller, and what the ids are.
      ids: a Tensor.
      vocab_dim: the Dimension of ids, of the size of the vocabulary.

    Raises:
      ValueError: they are not.
    """
    if not ids.dtype.is_integer:
        raise ValueError(
            f"{what} {ids.name} {ids.shape} must be integers, got {ids.dtype.name}; use "
            "mtf.to_int32"
        )
    # Only the values of what is imported can be known before the program runs.
    if not isinstance(ids.operation, mtf.ImportOperation):
        return
    value = tf.get_static_value(ids.operation._tf_tensor)
    if value is not None and value.size and value.max() >= vocab_dim.size:
        raise ValueError(
            f"{what} {ids.name} {ids.shape} have the id {value.max()}, but the vocabulary "
            f"{vocab_dim.name}={vocab_dim.size} ends at {vocab_dim.size - 1}; make the model "
            "with a larger vocabulary size"
        )


def sinusoid_positional_embedding_weights(
    mesh: mtf.Mesh,
    max_length_dim: mtf.Dimension,
    model_dim: mtf.Dimension,
    dtype: tf.DType,
    min_timescale: float = 1.0,
    max_timescale: float = 10000.0,
) -> mtf.Tensor:
    """Returns sines and cosines of positions, at wavelengths in geometric progression.

    Vaswani et al., "Attention is all you need" (2017). They are constants, not variables.

    Args:
      mesh: a Mesh.
      max_length_dim: a Dimension, the positions.
      model_dim: a Dimension of even size: sines in the first half, cosines in the second.
      dtype: a floating dtype.
      min_timescale: 2 pi divided by the shortest wavelength, as in the classic: a factor of all
        rates.
      max_timescale: the longest wavelength divided by 2 pi, if `min_timescale` is 1.

    Returns:
      A Tensor with dimensions [max_length_dim, model_dim].

    Raises:
      ValueError: the size of `model_dim` is odd.
    """
    if model_dim.size % 2:
        raise ValueError(
            f"sinusoid_positional_embedding_weights: {dims_text([model_dim])} must be even, for "
            "a sine and a cosine of each wavelength; change d_model"
        )
    half = model_dim.size // 2
    exponent = math.log(max_timescale / min_timescale) / max(half - 1, 1)
    channel = mtf.range(mesh, model_dim, tf.int32)
    # rates[c] = min_timescale * (max_timescale / min_timescale) ** -((c mod half) / (half - 1)).
    rates = mtf.exp(mtf.to_float(mtf.mod(channel, half)) * -exponent) * min_timescale
    # Always in float32: bfloat16 cannot represent 257.
    angles = mtf.range(mesh, max_length_dim, tf.float32) * rates
    # Not a concatenation, so that layouts may split the channels.
    waves = mtf.where(mtf.less(channel, half), mtf.sin(angles), mtf.cos(angles))
    return mtf.cast(waves, dtype)


def new_position_weights(
    model: Unitransformer, mesh: mtf.Mesh, variable_dtype: mtf.VariableDType
) -> mtf.Tensor:
    """Returns the variable of a model's positions, with [ensemble..., max_length, d_model]."""
    assert model.max_length_dim is not None
    return layers.embedding_weights(
        mesh,
        model.max_length_dim,
        model.model_dim,
        variable_dtype,
        "positional_embedding",
        ensemble_dim=model.ensemble_dim,
    )


def embedding_of_positions(
    model: Unitransformer,
    max_length_dim: mtf.Dimension,
    context: Context,
    weights: mtf.Tensor,
) -> mtf.Tensor:
    """Returns the positional embeddings of the positions of a Context.

    Args:
      model: a Unitransformer.
      max_length_dim: a Dimension, the positions that have embeddings.
      context: the Context of this call of the model: its mode, positions, states and losses.
      weights: a Tensor with dimensions [..., max_length, d_model].

    Returns:
      A Tensor with dimensions [..., length, d_model]; if the positions are not the default ones,
      with those of the positions in place of `length`.

    Raises:
      ValueError: the length exceeds the model's maximum length.
    """
    length, offset = context.length_dim, model.position_offset
    if not context.position_is_default:
        # Positions of packed rows begin again with each example; a step of decoding has one.
        position = context.position
        assert position is not None
        return mtf.gather(weights, position + offset if offset else position, max_length_dim)
    if length.size + offset > max_length_dim.size:
        room = mtf.Dimension(max_length_dim.name, max_length_dim.size - offset)
        raise ValueError(
            f"{model.name}: a sequence of {dims_text([length])} exceeds "
            f"{dims_text([room])}, for which the model has positional embeddings; make "
            "the model with a larger max_length, or with positional_embedding=False"
        )
    # Default positions are the first rows in order, so that nothing has to be looked up.
    used = mtf.slice(weights, offset, length.size, max_length_dim.name)
    return mtf.rename_dimension(used, max_length_dim.name, length.name)


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
        # So embeddings have variance 1 whichever way the variable is scaled.
        return (
            self._scaled(vectors, 0.5) if self._scale_variable_like_classifier_weights else vectors
        )

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
            # The product sums output_dim terms, and the table has variance 1.
            hidden = self._scaled(hidden, -0.5)
        return mtf.einsum([hidden, self._embedding_weights], reduced_dims=[self._output_dim])

    def _scaled(self, x: mtf.Tensor, exponent: float) -> mtf.Tensor:
        return x * self._output_dim.size**exponent


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
class UnscaledVocabEmbedding(VocabEmbedding):
    """A `VocabEmbedding` that scales neither vectors nor logits, as Llama and GPT-2 do."""

    def _scaled(self, x: mtf.Tensor, exponent: float) -> mtf.Tensor:
        return x


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
def get_vocab_embedding_cls(cls: Callable[..., Any] = VocabEmbedding) -> Callable[..., Any]:
    """Returns the vocabulary embedding class that models use; gin may set it.

    Args:
      cls: a class with the constructor and the methods of `VocabEmbedding`.
    """
    return cls


def new_embedding(model: Unitransformer, mesh: mtf.Mesh, variable_dtype: mtf.VariableDType) -> Any:
    """Returns a model's embedding of ids, whose variable is in the current variable scope."""
    cls = model.vocab_embedding_cls or get_vocab_embedding_cls()
    return cls(
        mesh,
        model.input_vocab_dim,
        model.model_dim,
        variable_dtype,
        name="embedding",
        ensemble_dim=model.ensemble_dim,
    )


# -- ensembles: one distribution of the members' logits


# Smaller probabilities are clipped to this one before the logarithm is taken.
# Of 0 it would be -inf, and a cross entropy of such logits infinite or NaN.
_SMALLEST_PROBABILITY = 1e-20


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
def reduce_ensemble_logits_select(
    logits: mtf.Tensor, ensemble_dim: mtf.Dimension, vocab_dim: mtf.Dimension, model_id: int = 0
) -> mtf.Tensor:
    """Returns the logits of one member of an ensemble.

    Args:
      logits: a Tensor with dimensions [ensemble_dim, ..., vocab_dim].
      ensemble_dim: a Dimension.
      vocab_dim: the Dimension of ids, of the size of the vocabulary.
      model_id: an integer, the index of the member. If out of range, it is taken modulo the
        ensemble's size, with a warning.

    Returns:
      A Tensor without `ensemble_dim`.
    """
    del vocab_dim
    if not 0 <= model_id < ensemble_dim.size:
        slip(
            f"reduce_ensemble_logits_select: model_id={model_id} of {dims_text([ensemble_dim])} is "
            f"taken as {model_id % ensemble_dim.size}; it should be between 0 and "
            f"{ensemble_dim.size - 1}",
            key="reduce_ensemble_logits_select",
        )
        model_id %= ensemble_dim.size
    return mtf.gather(logits, mtf.constant(logits.mesh, model_id, dtype=tf.int32), ensemble_dim)


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
def reduce_ensemble_logits_mean_prob(
    logits: mtf.Tensor, ensemble_dim: mtf.Dimension, vocab_dim: mtf.Dimension
) -> mtf.Tensor:
    """Returns the logarithm of the mean of the members' probabilities.

    Args:
      logits: a Tensor with dimensions [ensemble_dim, ..., vocab_dim].
      ensemble_dim: a Dimension.
      vocab_dim: the Dimension of ids, of the size of the vocabulary.

    Returns:
      A Tensor without `ensemble_dim`.
    """
    probs = mtf.softmax(logits, vocab_dim)
    # log p[v] = log(1 / n * sum over members of p[member, v]): a mixture, not a mean of logits.
    mean = mtf.reduce_mean(probs, reduced_dim=ensemble_dim)
    # float16 has no such number: it would be 0.
    smallest = 2.0**-24 if mean.dtype == tf.float16 else _SMALLEST_PROBABILITY
    return mtf.log(mtf.maximum(mean, smallest))


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
def reduce_ensemble_logits_mean_logit(
    logits: mtf.Tensor, ensemble_dim: mtf.Dimension, vocab_dim: mtf.Dimension
) -> mtf.Tensor:
    """Returns the mean of the members' logits.

    Args:
      logits: a Tensor with dimensions [ensemble_dim, ..., vocab_dim].
      ensemble_dim: a Dimension.
      vocab_dim: the Dimension of ids, of the size of the vocabulary.

    Returns:
      A Tensor without `ensemble_dim`.
    """
    del vocab_dim
    return mtf.reduce_mean(logits, reduced_dim=ensemble_dim)


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
def reduce_ensemble_logits(
    logits: mtf.Tensor,
    ensemble_dim: mtf.Dimension,
    vocab_dim: mtf.Dimension,
    reduce_fn: Callable[
        [mtf.Tensor, mtf.Dimension, mtf.Dimension], mtf.Tensor
    ] = reduce_ensemble_logits_mean_prob,
) -> mtf.Tensor:
    """Returns the logits of an ensemble, reduced by a function that gin may set.

    Args:
      logits: a Tensor with dimensions [ensemble_dim, ..., vocab_dim].
      ensemble_dim: a Dimension.
      vocab_dim: the Dimension of ids, of the size of the vocabulary.
      reduce_fn: a function of the three arguments above.

    Returns:
      A Tensor without `ensemble_dim`.
    """
    return reduce_fn(logits, ensemble_dim, vocab_dim)


# -- losses, and what positions see


def loss_from_logits(
    model: Unitransformer,
    context: Context,
    logits: mtf.Tensor,
    targets: mtf.Tensor,
    vocab_dim: mtf.Dimension,
) -> mtf.Tensor:
    """Returns the cross entropy of the targets, divided by the model's loss denominator.

    Targets of 0 or below have no loss. Label smoothing is over the whole vocabulary, including the
    ids that only pad its size. The z loss is added in training only.

    Args:
      model: a Unitransformer; its label_smoothing, z_loss and loss_on_targets_only are used.
      context: the Context of this call of the model: its mode, positions, states and losses.
      logits: a Tensor with dimensions [batch..., length, vocab_dim].
      targets: an integer Tensor with dimensions [batch..., length].
      vocab_dim: the Dimension of ids, of the size of the vocabulary.

    Returns:
      A scalar Tensor.
    """
    check_ids(f"{model.name}: targets", targets, vocab_dim)
    # Targets below 0 are read but not predicted: their label may be any id, as its weight is 0.
    labels = mtf.maximum(targets, 0)
    z_loss = model.z_loss if context.train else 0.0
    loss = smoothed_cross_entropy(logits, labels, vocab_dim, z_loss, model.label_smoothing)
    weights = mtf.cast(mtf.greater(targets, 0), loss.dtype)
    if model.loss_on_targets_only:
        weights *= mtf.cast(mtf.logical_not(delimited_lm_inputs_mask(targets)), loss.dtype)
    return divided_loss(mtf.reduce_sum(loss * weights), model, targets, context.num_microbatches)


def divided_loss(
    total: mtf.Tensor, model: Any, targets: mtf.Tensor, num_microbatches: int
) -> mtf.Tensor:
    """Returns a sum of losses divided by the denominator of the loss.

    Args:
      total: a Tensor.
      model: a Unitransformer or another model with a `loss_denominator`.
      targets: a Tensor with dimensions [batch..., length].
      num_microbatches: an integer, the number of microbatches.
    """
    number = model.loss_denominator(targets, num_microbatches)
    if not isinstance(number, (int, float)):
        return total / number
    # Of a model with an encoder it is the decoder that has the loss.
    denominator = getattr(getattr(model, "decoder", model), "_loss_denominator", None)
    # A denominator that was given is the same for every batch, so that this is no mean.
    return divided_sum(total, number, is_mean=denominator is None)


def visibility_priority(
    model: Unitransformer, positions: mtf.Tensor, inputs: mtf.Tensor, targets: Optional[mtf.Tensor]
) -> Optional[mtf.Tensor]:
    """Returns the read and write priority of all positions; see Context.

    Args:
      model: a Unitransformer.
      positions: an integer Tensor with the dimension `length`: 0, 1, 2, ...
      inputs: an integer Tensor with dimensions [batch..., length], ids.
      targets: a Tensor of the same shape, or None.

    Returns:
      `positions` if each position sees those up to itself, with 0 at the inputs if they all see
      each other; None if all positions see each other.
    """
    if not model.autoregressive:
        return None
    if not model.input_full_attention:
        # read[i] >= write[j] is i >= j then, the causal mask.
        return positions
    if targets is None:
        visible = delimited_lm_inputs_mask(inputs)
    else:
        # As an input, the end of the inputs comes one position later than as a target.
        ends = delimited_lm_inputs_mask(targets)
        length_dim = targets.shape.dims[-1]
        visible = mtf.logical_or(ends, mtf.shift(ends, 1, length_dim, wrap=False))
    # Position i sees j if read[i] >= write[j]: inputs, at 0, see each other, and all see them.
    return positions * mtf.cast(mtf.logical_not(visible), positions.dtype)
