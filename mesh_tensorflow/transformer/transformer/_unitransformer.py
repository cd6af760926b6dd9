"""A model of one stack of layers: a language model, an encoder or a decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import beam_search as mtf_beam_search
from mesh_tensorflow import layers
from mesh_tensorflow._calls import arguments_of
from mesh_tensorflow._core.errors import dims_text, tensors_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow.layers._blocked_attention import soft_capped
from mesh_tensorflow.transformer.transformer._call import (
    VocabEmbedding,
    check_ids,
    embedding_of_positions,
    loss_from_logits,
    new_embedding,
    new_position_weights,
    reduce_ensemble_logits,
    sinusoid_positional_embedding_weights,
    visibility_priority,
)
from mesh_tensorflow.transformer.transformer._context import SPECULATED, Context, EncoderOutputs
from mesh_tensorflow.transformer.transformer._decoding import (
    Choice,
    Draft,
    IncrementalModel,
    Number,
    Sampler,
    Speculation,
    check_draft,
    draft_scope,
    first_last,
    seen_ids,
    with_penalty,
)

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import TransformerLayer


def _vocab_dim(size: int, divisor: int) -> mtf.Dimension:
    """Returns the dimension of a vocabulary, with its size rounded up to a multiple."""
    # A multiple, so that layouts may split the vocabulary. Floor division of -size rounds up.
    return mtf.Dimension("vocab", -(-size // divisor) * divisor)


def _for_ensemble(model: Unitransformer, ids: mtf.Tensor) -> mtf.Tensor:
    """Returns the ids with the ensemble dimension, broadcast over it if they do not have it."""
    if model.ensemble_dim is None or model.ensemble_dim in ids.shape:
        return ids
    return mtf.broadcast(ids, mtf.Shape([model.ensemble_dim, *ids.shape.dims]))


def _embedding(model: Unitransformer, context: Context, mesh: mtf.Mesh) -> VocabEmbedding:
    shared = context.shared_params
    if "embedding" not in shared:
        embedding = new_embedding(model, mesh, context.variable_dtype)
        # Loss functions read it from the Context. The caller's dictionary must not change.
        context.shared_params = {**shared, "embedding": embedding}
    return context.shared_params["embedding"]


def _position_weights(
    model: Unitransformer, max_length_dim: mtf.Dimension, context: Context, mesh: mtf.Mesh
) -> mtf.Tensor:
    """Returns [..., max_length, d_model]: sinusoids, or what models share, or a variable."""
    # A model that shares parameters may still have sinusoids where the other one has learned
    # vectors.
    if model.sinusoid_positional_embedding:
        return sinusoid_positional_embedding_weights(
            mesh, max_length_dim, model.model_dim, context.activation_dtype
        )
    shared = context.shared_params.get("positional_embedding")
    if shared is not None:
        return shared
    return new_position_weights(model, mesh, context.variable_dtype)


def _with_token_dropout(model: Unitransformer, context: Context, ids: mtf.Tensor) -> mtf.Tensor:
    if not context.train or not model.token_dropout_rate:
        return ids
    noise = mtf.random_uniform(ids.mesh, ids.shape)
    # A dropped id is that of padding, but layers tell padding by sequence_id.
    return ids * mtf.cast(mtf.greater_equal(noise, model.token_dropout_rate), ids.dtype)


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
class Unitransformer:
    """A model of one stack of layers, from ids to logits or to vectors.

    Vaswani et al., "Attention is all you need" (2017). The variables are in the scope of its name.
    """

    def __init__(
        self,
        layer_stack: TransformerLayer,
        d_model: int = 1024,
        input_vocab_size: int = gin.REQUIRED,
        output_vocab_size: Optional[int] = gin.REQUIRED,
        autoregressive: bool = gin.REQUIRED,
        max_length: int = gin.REQUIRED,
        shared_embedding_and_softmax_weights: bool = False,
        label_smoothing: float = 0.0,
        z_loss: float = 1e-4,
        name: str = "transformer",
        layout: Optional[mtf.LayoutRules] = None,
        mesh_shape: Optional[mtf.Shape] = None,
        vocab_divisor: int = 128,
        ensemble: Optional[int] = None,
        loss_fn: Optional[Callable[..., mtf.Tensor]] = None,
        positional_embedding: bool = True,
        sinusoid_positional_embedding: bool = False,
        input_full_attention: bool = False,
        loss_on_targets_only: bool = False,
        loss_denominator: Optional[float] = None,
        token_dropout_rate: float = 0.0,
        vocab_embedding_cls: Optional[Callable[..., Any]] = None,
        position_offset: int = 0,
        logits_bias: bool = False,
        logits_soft_cap: Optional[float] = None,
    ) -> None:
        """Creates the model; calls of it create the variables.

        Args:
          layer_stack: a LayerStack, or another layer.
          d_model: an integer, the size of the vectors.
          input_vocab_size: an integer.
          output_vocab_size: an integer; None for a model that returns vectors.
          autoregressive: whether a position sees only the positions up to itself.
          max_length: an integer, the maximum length of sequences with positional embeddings.
          shared_embedding_and_softmax_weights: whether the logits are computed with the
            embedding's variable: logits = d_model ** -0.5 * x @ embedding^T, where x is the output
            of the stack. The factor makes up for embeddings of standard deviation 1; without
            sharing there is none. See `get_vocab_embedding_cls` for other embeddings.
          label_smoothing: a number, the part of the target probability that is spread over the
            whole vocabulary.
          z_loss: a number, the coefficient of the z loss; see
            `mtf.layers.softmax_cross_entropy_with_logits`.
          name: a string, the variable scope.
          layout: the LayoutRules that the model will be lowered with, for layers that ask.
          mesh_shape: the Shape of the mesh, for layers that ask.
          vocab_divisor: an integer; vocabulary sizes are rounded up to a multiple of it.
          ensemble: an integer, the number of models trained in parallel; or None.
          loss_fn: a function that takes the model, the Context, the logits, the targets and the
            vocabulary Dimension, and returns the loss; `loss_from_logits` if None.
          positional_embedding: whether the model has positional embeddings.
          sinusoid_positional_embedding: whether these are sinusoids instead of variables.
          input_full_attention: whether all inputs see each other, in rows of inputs and targets;
            see `delimited_lm_inputs_mask`.
          loss_on_targets_only: whether the inputs in such rows have no loss.
          loss_denominator: a number that the sum of the losses is divided by; see the method.
          token_dropout_rate: the rate at which ids are set to 0 in training.
          vocab_embedding_cls: the class of the embedding; by default, that of
            `get_vocab_embedding_cls`.
          position_offset: which row of the variable of positions is the first position, as in OPT
            and RoBERTa, whose first rows are of padding; it has as many rows more than max_length.
          logits_bias: whether logits that do not share the embedding's variable have a bias.
          logits_soft_cap: a number c, by which logits x become c tanh(x / c), as in Gemma 2; None
            for none.

        Raises:
          ValueError: there is no input vocabulary, an autoregressive model has no output
            vocabulary, or the two vocabularies cannot share their weights.
        """
        if input_vocab_size is None:
            raise ValueError(f"Unitransformer {name}: input_vocab_size must be set, got None")
        self.layer_stack: Any = layer_stack  # some models read attributes of particular stacks
        self.model_dim = mtf.Dimension("d_model", d_model)
        self.input_vocab_size_unpadded = input_vocab_size
        self.input_vocab_dim = _vocab_dim(input_vocab_size, vocab_divisor)
        self.output_vocab_size_unpadded = output_vocab_size
        self.output_vocab_dim = (
            None if output_vocab_size is None else _vocab_dim(output_vocab_size, vocab_divisor)
        )
        self.autoregressive = autoregressive
        positions = positional_embedding or sinusoid_positional_embedding
        self.max_length_dim = (
            mtf.Dimension("max_length", max_length + position_offset) if positions else None
        )
        self.position_offset = position_offset
        self.logits_bias = logits_bias
        self.logits_soft_cap = logits_soft_cap
        self.shared_embedding_and_softmax_weights = shared_embedding_and_softmax_weights
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.name = name
        self.layout = layout
        self.mesh_shape = mesh_shape
        self.ensemble_dim = mtf.Dimension("ensemble", ensemble) if ensemble else None
        self._loss_fn = loss_fn
        self.positional_embedding = positional_embedding
        self.sinusoid_positional_embedding = sinusoid_positional_embedding
        self.input_full_attention = input_full_attention
        self.loss_on_targets_only = loss_on_targets_only
        self._loss_denominator = loss_denominator
        self.token_dropout_rate = token_dropout_rate
        self.vocab_embedding_cls = vocab_embedding_cls
        self._check_vocabularies()

    def _check_vocabularies(self) -> None:
        if self.output_vocab_dim is None:
            if self.autoregressive:
                raise ValueError(
                    f"Unitransformer {self.name}: an autoregressive model needs an output "
                    "vocabulary; set output_vocab_size"
                )
        elif (
            self.shared_embedding_and_softmax_weights
            and self.output_vocab_dim != self.input_vocab_dim
        ):
            raise ValueError(
                f"Unitransformer {self.name}: shared_embedding_and_softmax_weights needs equal "
                f"vocabularies, got {dims_text([self.input_vocab_dim])} for inputs and "
                f"{dims_text([self.output_vocab_dim])} for outputs (sizes rounded up)"
            )

    @property
    def fully_autoregressive(self) -> bool:
        """Whether no position sees a later one, not even among the inputs."""
        return self.autoregressive and not self.input_full_attention

    @property
    def ensemble_dims(self) -> list[mtf.Dimension]:
        """A list of the ensemble dimension, empty if there is no ensemble."""
        return [self.ensemble_dim] if self.ensemble_dim else []

    def loss_denominator(self, targets: mtf.Tensor, num_microbatches: int) -> float:
        """Returns the denominator of the loss.

        It is the `loss_denominator` of the constructor, if one was given. Otherwise it is the
        number of target positions in all microbatches, including padding, and without the
        ensemble dimension.

        Args:
          targets: a Tensor with dimensions [batch..., length].
          num_microbatches: an integer, the number of microbatches.
        """
        if self._loss_denominator is not None:
            return float(self._loss_denominator)
        # A constant: microbatches then add up to the loss of the batch, whatever padding each has.
        # Without the ensemble: losses of members add up, and each learns as it would alone.
        return float((targets.shape - self.ensemble_dims).size * num_microbatches)

    def _compute_loss(
        self,
        context: Context,
        logits: mtf.Tensor,
        targets: mtf.Tensor,
        output_vocab_dim: mtf.Dimension,
    ) -> mtf.Tensor:
        # A method of this name, as in the classic: subclasses of users call and override it.
        loss_fn = self._loss_fn or loss_from_logits
        return loss_fn(self, context, logits, targets, output_vocab_dim)

    def _call_internal(
        self, context: Context, inputs: mtf.Tensor, targets: Optional[mtf.Tensor] = None
    ) -> mtf.Tensor:
        """Embeds the ids, calls the layer stack and computes the logits, in the model's scope.

        Args:
          context: a Context. If it has a list of losses, the loss of the targets is appended to it.
          inputs: an integer Tensor of ids with dimensions [batch..., length], or [batch...] in mode
            "incremental".
          targets: a Tensor of the same shape, or None.

        Returns:
          The logits, reduced over the ensemble: a Tensor with the dimensions of `inputs` and the
          vocabulary, or `d_model` instead if the model has no output vocabulary.

        Raises:
          ValueError: the ids are not integers, or exceed the vocabulary.
        """
        check_ids(f"{self.name}: inputs", inputs, self.input_vocab_dim)
        with tf.variable_scope(self.name):
            embedding = _embedding(self, context, inputs.mesh)
            # Only for the embedding: masks and targets are made of the ids that were given.
            ids = _with_token_dropout(self, context, _for_ensemble(self, inputs))
            x = embedding.ids_to_embedding(ids, context=context)
            # Before positions are added: routers of experts may read what the ids alone are.
            context.input_embeddings = x
            if self.max_length_dim is not None:
                positions = self.max_length_dim
                weights = _position_weights(self, positions, context, inputs.mesh)
                x += embedding_of_positions(self, positions, context, weights)
            x = self.layer_stack.call(context, x)
            vocab_dim = self.output_vocab_dim
            if vocab_dim is None:
                return x
            if self.shared_embedding_and_softmax_weights:
                logits = embedding.hidden_to_logits(x, context=context)
            else:
                logits = layers.dense(
                    x,
                    vocab_dim,
                    reduced_dims=[self.model_dim],
                    use_bias=self.logits_bias,
                    variable_dtype=context.variable_dtype,
                    name="logits",
                )
            if self.logits_soft_cap is not None:
                logits = soft_capped(logits, self.logits_soft_cap)
            if targets is not None and context.losses is not None:
                targets = _for_ensemble(self, targets)
                loss = self._compute_loss(context, logits, targets, vocab_dim)
                # Last in the list: the sum of all losses has the dtype of this one.
                context.losses.append(loss)
            # After the loss, which is that of each member by itself.
            if self.ensemble_dim is not None:
                logits = reduce_ensemble_logits(logits, self.ensemble_dim, vocab_dim)
            return logits

    @leaves_no_node
    def call_simple(
        self,
        inputs: mtf.Tensor,
        targets: Optional[mtf.Tensor],
        compute_loss: bool,
        mode: str = "train",
        variable_dtype: mtf.VariableDType = mtf.VariableDType(tf.float32),
        sequence_id: Union[mtf.Tensor, int, None] = None,
        subsequence_id: Optional[mtf.Tensor] = None,
        position: Optional[mtf.Tensor] = None,
        encoder_output: Optional[mtf.Tensor] = None,
        encoder_sequence_id: Optional[mtf.Tensor] = None,
        encoder_inputs: Optional[mtf.Tensor] = None,
        shared_params: Optional[dict] = None,
        layer_outputs: Optional[list] = None,
        encoder_layer_outputs: Optional[list] = None,
        num_microbatches: int = 1,
        *,
        routings: Optional[list] = None,
    ) -> tuple[mtf.Tensor, Any]:
        """Returns the logits of all positions, and the loss.

        Args:
          inputs: an integer Tensor with dimensions [batch..., length], ids.
          targets: a Tensor of the same shape, the ids that the positions predict, 0 at padding;
            None if no loss is computed.
          compute_loss: a bool, whether to compute the loss.
          mode: "train", "eval" or "infer"; see tf.estimator.ModeKeys.
          variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
          sequence_id: a Tensor of the shape of `inputs`, which numbers the examples packed into
            a row from 1, and is 0 at padding; None if there is neither packing nor padding.
          subsequence_id: a Tensor of the same shape, for parts of examples.
          position: a Tensor of the same shape, the positions within examples; 0, 1, 2, ... if
            it is None, or if the model has no positional embeddings.
          encoder_output: a Tensor with dimensions [batch..., memory_length, d_model].
          encoder_sequence_id: a Tensor with dimensions [batch..., memory_length].
          encoder_inputs: a Tensor with dimensions [batch..., memory_length], ids.
          shared_params: a dictionary with an "embedding" and a "positional_embedding" to use
            instead of the model's own.
          layer_outputs: a list that the outputs of the layers are appended to.
          encoder_layer_outputs: a list of the outputs of the encoder's layers.
          num_microbatches: an integer, the number of microbatches; this call is for one of them.
          routings: a list that each `MoE1D` appends a `moe.Routing` to, of what its router has
            done; in a pipeline, one for each layer of each stage, of all microbatches.

        Returns:
          (logits, loss). The logits are a Tensor with dimensions [batch..., length, vocab], or
          `d_model` instead of the vocabulary if the model has no output vocabulary. The loss is
          a scalar Tensor, 0 without losses, or None if no loss is computed.

        Raises:
          ValueError: targets to compute a loss are missing, or the arguments do not fit the
            model.
        """
        if compute_loss and targets is None and self.output_vocab_dim is not None:
            raise ValueError(f"{self.name}: compute_loss needs targets, got None")
        *batch_dims, length_dim = inputs.shape.dims
        length_range = mtf.range(inputs.mesh, length_dim, dtype=tf.int32)
        # Without positional embeddings only differences of positions count, and within an example
        # these are the same.
        position_is_default = position is None or self.max_length_dim is None
        priority = visibility_priority(self, length_range, inputs, targets)
        # None, not an empty list: layers such as mixtures of experts then add no loss.
        losses: Optional[list] = [] if compute_loss else None
        context = Context(
            self, inputs.mesh, batch_dims, length_dim, variable_dtype, mode=mode,
            position=length_range if position_is_default else position,
            position_is_default=position_is_default,
            sequence_id=sequence_id, subsequence_id=subsequence_id,
            losses=losses, layer_outputs=layer_outputs,
            encoder_output=encoder_output, encoder_sequence_id=encoder_sequence_id,
            encoder_inputs=encoder_inputs, encoder_layer_outputs=encoder_layer_outputs,
            shared_params=shared_params, write_priority=priority, read_priority=priority,
            inputs=inputs, num_microbatches=num_microbatches, routings=routings,
        )  # fmt: skip
        logits = self._call_internal(context, inputs, targets)
        if losses is None:
            return logits, None
        # That of the targets comes last; in a mixed precision it is wider than those of layers.
        return logits, mtf.add_n([mtf.cast(loss, losses[-1].dtype) for loss in losses])

    @leaves_no_node
    @gin.configurable(module="Unitransformer")
    def sample_autoregressive(
        self,
        partial_sequences: mtf.Tensor,
        stop_at_token: Union[int, mtf.Tensor] = 1,
        max_steps: Union[int, mtf.Tensor, None] = None,
        temperature: Union[float, mtf.Tensor] = 0.0,
        variable_dtype: mtf.VariableDType = mtf.VariableDType(tf.float32),
        encoder_output: Optional[mtf.Tensor] = None,
        encoder_sequence_id: Optional[mtf.Tensor] = None,
        encoder_inputs: Optional[mtf.Tensor] = None,
        shared_params: Optional[dict] = None,
        has_partial_sequences: bool = True,
        encoder_layer_outputs: Optional[list] = None,
        never_end: bool = False,
        remove_partial_sequences: bool = False,
        sampling_keep_top_k: int = -1,
        bos_id: Union[int, mtf.Tensor] = 0,
        draft_model: Union[Unitransformer, Draft, None] = None,
        num_draft_ids: int = 4,
        num_given: Optional[mtf.Tensor] = None,
        top_p: Union[float, mtf.Tensor] = 1.0,
        min_p: Union[float, mtf.Tensor] = 0.0,
        repetition_penalty: Union[float, mtf.Tensor] = 1.0,
        seed: Union[int, tf.Tensor, None] = None,
        each_step: Optional[Callable[..., tf.Tensor]] = None,
        max_given: Optional[int] = None,
    ) -> mtf.Tensor:
        """Returns sequences continued by the model, one id at a time.

        With `draft_model`, a small model that knows the same vocabulary, several ids are found in
        one step: the draft proposes some, and the model computes all of their logits at once.
        Which ids are chosen is as without it (with a temperature, their distribution is).

        Each row continues after its given ids. Sampling stops when every row has reached
        `stop_at_token` or is full; the ids after a row's first `stop_at_token` are meaningless.

        What changes the distribution is done in the order of `repetition_penalty`, `temperature`,
        `sampling_keep_top_k`, `top_p` and `min_p`. For top-k sampling: Fan et al., "Hierarchical
        Neural Story Generation", arXiv:1805.04833; for top_p: Holtzman et al., "The Curious Case
        of Neural Text Degeneration", arXiv:1904.09751; for min_p: Nguyen et al., "Turning up the
        heat", arXiv:2407.01082; for the penalty: Keskar et al., "CTRL", arXiv:1909.05858.

        Args:
          partial_sequences: an int32 Tensor with dimensions [batch..., length]: in each row the
            given ids, then zeros.
          stop_at_token: an int, the id that ends a sequence; or an int32 Tensor of one dimension,
            the ids of which any does. It is ignored among the given ids.
          max_steps: the maximum number of added ids, an int or an int32 scalar Tensor; None for
            as many as fit.
          temperature: a number; 0.0 takes the id with the largest logit, 1.0 samples from the
            softmax. Or a scalar Tensor above 0, as which a program takes any.
          variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
          encoder_output: a Tensor with dimensions [batch..., memory_length, d_model], or None.
          encoder_sequence_id: a Tensor with dimensions [batch..., memory_length], or None.
          encoder_inputs: a Tensor with dimensions [batch..., memory_length], or None.
          shared_params: a dictionary with an "embedding" and a "positional_embedding" to use
            instead of the model's own; or None.
          has_partial_sequences: False if `partial_sequences` is `mtf.zeros`, which saves computing
            the layers' states for the given ids.
          encoder_layer_outputs: a list of Tensors, or None.
          never_end: whether `stop_at_token` is never chosen.
          remove_partial_sequences: whether to remove the given ids from the result.
          sampling_keep_top_k: an int, the number of ids with the largest logits to sample from;
            -1 for all.
          bos_id: the id that is fed before the first one: an int, or an int32 Tensor with
            dimensions [batch...].
          draft_model: a Unitransformer with this model's output vocabulary, whose variables are
            in the scope "draft"; a Draft, if it reads an encoder of its own; or None.
          num_draft_ids: an int, how many ids a Unitransformer as draft proposes in a step.
          num_given: an int32 Tensor with dimensions [batch...], the number of given ids; if None,
            of those that are not 0.
          top_p: a number or a scalar Tensor; the fewest ids are sampled from whose probabilities
            have at least this sum, 1.0 for all.
          min_p: a number or a scalar Tensor; ids are sampled from whose probability is at least
            this share of the largest one, 0.0 for all.
          repetition_penalty: a number or a scalar Tensor; the logits of ids that a row has, given
            or added, are divided by it, or multiplied if they are negative.
          seed: an int, or an integer tf scalar, of the samples; see `mtf.random_uniform`.
          each_step: a function of TensorFlow that is called in each step with three int32
            tf.Tensors: the numbers of rows, the ids chosen for them, and the number of the step.
            It returns which of these rows end. It is for sequences of one batch dimension, and
            may be called for the same rows by several processors.
          max_given: an int, the most given ids that a row has; then the first call of the model is
            for so many positions instead of all.

        Returns:
          A Tensor of the shape of `partial_sequences`.

        Raises:
          ValueError: the model is not autoregressive, `sampling_keep_top_k` is 0 or below -1,
            another number is out of its range, `partial_sequences` is not such a Tensor, or the
            draft does not fit the model or has no meaning with a penalty or `each_step`.
        """
        # First, as further names would be among the arguments.
        encoded = EncoderOutputs(**arguments_of(EncoderOutputs, locals()))
        choice = Choice(
            temperature, sampling_keep_top_k, stop_at_token, never_end,
            top_p, min_p, repetition_penalty, seed,
        )  # fmt: skip
        draft = draft_model
        if draft is not None:
            # A model by itself reads no encoder.
            if not isinstance(draft, Draft):
                draft = Draft(draft, EncoderOutputs(), num_draft_ids)
            check_draft(self, draft)
            if repetition_penalty != 1.0 or each_step is not None:
                raise ValueError(
                    "draft_model: several ids of a step are chosen at once, so that "
                    "repetition_penalty and each_step, which follow one id after another, have no "
                    "meaning; leave out either"
                )
        ids, length_dim = partial_sequences, partial_sequences.shape.dims[-1]
        # Rows begin with their given ids, so that their number is also the first position to fill.
        number = num_given
        if number is None:
            number = mtf.reduce_sum(mtf.to_int32(mtf.not_equal(ids, 0)), reduced_dim=length_dim)
        model = IncrementalModel(self, ids, number, variable_dtype, encoded, bos_id, max_given)
        # Zeros by construction need no look at the ids; of others, rows go on after what they have.
        zeros = isinstance(ids.operation, mtf.Constant)
        given = number if has_partial_sequences or not zeros else None
        limit: Union[int, mtf.Tensor] = length_dim.size
        if max_steps is not None:
            least = mtf.minimum if isinstance(max_steps, mtf.Tensor) else min
            limit = least(max_steps, limit)
        loop: Union[Sampler, Speculation] = Sampler(model, choice, given, limit, each_step)
        if draft is not None:
            with draft_scope():
                small = IncrementalModel(
                    draft.model, ids, number, variable_dtype, draft.encoded, bos_id, max_given
                )
            several = mtf.Dimension(SPECULATED, draft.num_ids + 1)
            loop = Speculation(model, small, choice, several, given, limit)
        first = loop.start(ids, bos_id)
        # Both kinds of loops have all ids as their fourth variable.
        ids = mtf.while_loop(loop.goes_on, loop.step, first)[3]
        if has_partial_sequences and remove_partial_sequences:
            # Each row by the number of its own given ids, so that all continuations begin at 0.
            return mtf.dynamic_shift(ids, mtf.negative(number), length_dim, wrap=False)
        return ids

    @leaves_no_node
    def beam_search(
        self,
        inputs: mtf.Tensor,
        decode_length: Union[int, mtf.Tensor],
        variable_dtype: mtf.VariableDType = mtf.VariableDType(tf.float32),
        encoder_output: Optional[mtf.Tensor] = None,
        encoder_sequence_id: Optional[mtf.Tensor] = None,
        encoder_inputs: Optional[mtf.Tensor] = None,
        alpha: float = 0.6,
        shared_params: Optional[dict] = None,
        encoder_layer_outputs: Optional[list] = None,
        bos_id: Union[int, mtf.Tensor] = 0,
        partial_sequences: Optional[mtf.Tensor] = None,
        num_given: Optional[mtf.Tensor] = None,
        max_given: Optional[int] = None,
        all_beams: bool = False,
        repetition_penalty: Number = 1.0,
        **search: Any,
    ) -> Any:
        """Returns the best sequences found by a beam search; see `mtf.beam_search.beam_search`.

        With `partial_sequences`, they are continuations of these.

        Args:
          inputs: an int32 Tensor with dimensions [batch..., beam, length], all zeros.
          decode_length: the maximum length, an int or an int32 scalar Tensor.
          variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
          encoder_output: a Tensor with dimensions [batch..., memory_length, d_model], or None.
          encoder_sequence_id: a Tensor with dimensions [batch..., memory_length], or None.
          encoder_inputs: a Tensor with dimensions [batch..., memory_length], or None.
          alpha: a number, the length penalty: larger values prefer longer sequences.
          shared_params: a dictionary with an "embedding" and a "positional_embedding" to use
            instead of the model's own; or None.
          encoder_layer_outputs: a list of Tensors, or None.
          bos_id: the id that is fed before the first one: an int, or with `partial_sequences` an
            int32 Tensor with dimensions [batch...].
          partial_sequences: an int32 Tensor with dimensions [batch..., length]: in each row the
            given ids, then zeros, as many as may be added at least. The length has another name
            than that of `inputs`.
          num_given: an int32 Tensor with dimensions [batch...], the number of given ids.
          max_given: an int, the most of these that a row has; the length if None.
          all_beams: whether to return all beams with their scores, best first.
          repetition_penalty: a number, by which the log-probabilities of ids that a row has are
            multiplied, as transformers does; or a scalar Tensor.
          **search: further arguments of `mtf.beam_search.beam_search`.

        Returns:
          A Tensor with dimensions [batch..., length]; with `all_beams`, a tuple of Tensors with
          dimensions [batch..., beam, length] and [batch..., beam].

        Raises:
          ValueError: the model is not autoregressive, the inputs have no beams, or only one of
            `partial_sequences` and `num_given` is there.
        """
        # First, as further names would be among the arguments.
        encoded = EncoderOutputs(**arguments_of(EncoderOutputs, locals()))
        if len(inputs.shape) < 3:
            raise ValueError(
                f"{self.name}: for a beam search, inputs must have the dimensions [batch, beam, "
                f"length], not {tensors_text([inputs])}"
            )
        *rows, beam_dim, length_dim = inputs.shape.dims
        if (partial_sequences is None) != (num_given is None):
            raise ValueError(
                f"{self.name}: for a beam search, partial_sequences and num_given go together"
            )
        first: Union[int, mtf.Tensor] = bos_id  # what the first step is fed
        if partial_sequences is None or num_given is None:
            # No ids are given: the first call makes variables, and tells the shapes of states.
            start = mtf.zeros(inputs.mesh, mtf.Shape([*rows, beam_dim]), tf.int32)
            model = IncrementalModel(self, inputs, start, variable_dtype, encoded, bos_id)
            states = [mtf.zeros(inputs.mesh, x.shape, x.dtype) for x in model.states]
        else:
            model = IncrementalModel(
                self, partial_sequences, num_given, variable_dtype, encoded, bos_id, max_given
            )
            # Given ids are read once for all beams.
            states = model.widened(beam_dim)
            _, first = first_last(partial_sequences, num_given, bos_id)

        def last_of(step: mtf.Tensor, ids: mtf.Tensor) -> mtf.Tensor:
            # Before the first step the index is -1, for which gather returns 0.
            last = mtf.gather(ids, step - 1, length_dim)
            if isinstance(first, mtf.Tensor) or first:
                last += mtf.to_int32(mtf.equal(step, 0)) * first
            return last

        def logits_fn(
            step: mtf.Tensor, ids: mtf.Tensor, states: Sequence[mtf.Tensor]
        ) -> tuple[mtf.Tensor, list[mtf.Tensor]]:
            last = last_of(step, ids)
            rows_at = step if num_given is None else mtf.broadcast(num_given + step, last.shape)
            return model.step(rows_at, last, states)

        if penalizes := isinstance(repetition_penalty, mtf.Tensor) or repetition_penalty != 1.0:
            prompt = inputs if partial_sequences is None else partial_sequences
            seen = seen_ids(prompt, num_given, bos_id, model.vocab_dim)
            states = [mtf.broadcast(seen, [*rows, beam_dim, model.vocab_dim]), *states]
            logits_fn = with_penalty(logits_fn, last_of, repetition_penalty)

        ids, scores = mtf_beam_search.beam_search(
            logits_fn,
            inputs,
            alpha,
            states=states,
            decode_length=decode_length,
            # Scores add up log-probabilities of whole sequences, of which bfloat16 would lose
            # digits.
            dtype=tf.float32,
            layout=self.layout,
            mesh_shape=self.mesh_shape,
            normalized=penalizes,
            **search,
        )
        if all_beams:
            return ids, scores
        # Beams are sorted, the best one first.
        return mtf.gather(ids, mtf.constant(inputs.mesh, 0, dtype=tf.int32), beam_dim)
