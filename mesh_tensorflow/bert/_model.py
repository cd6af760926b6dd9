"""The BERT model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.bert._config import BertConfig
from mesh_tensorflow.bert._dims import BertDims, check_config
from mesh_tensorflow.bert._layers import get_activation, layer_norm
from mesh_tensorflow.ops._variables.precision import widened
from mesh_tensorflow.transformer import moe as moe_lib
from mesh_tensorflow.transformer.transformer_layers._attention.params import (
    relative_position_bucket,
)

__all__ = ["BertModel"]

# Added to attention logits at padding; the value in BERT.
_MASKED_LOGIT = -10000.0
_BUCKETS = 32
# Coefficient of the z-loss of both pre-training losses.
_Z_LOSS = 1e-4
_EPSILON = 1e-5
_MOE_HPARAMS = {
    "moe_gating": "top_2",
    "moe_group_size": 2048,
    "moe_loss_coef": 1e-3,
    "moe_capacity_factor_train": 1.25,
    "moe_capacity_factor_eval": 8.0,
    "moe_use_second_place_loss": False,
    "moe_second_policy_train": "random",
    "moe_second_policy_eval": "random",
    "moe_second_threshold_train": 0.2,
    "moe_second_threshold_eval": 0.2,
}


class BertModel(BertDims):
    """A stack of blocks over the embeddings of a sequence, with a pooler and heads.

    Devlin et al., "BERT: pre-training of deep bidirectional transformers for language
    understanding" (2019). Layouts may split the batch and the dimensions "vocab", "hidden",
    "intermediate", "num_heads" and "experts".

    Attributes:
      config: a BertConfig, without dropout unless training.
      embedding_table: the variable [vocab, hidden].
      word_embedding_output: embeddings of tokens [batch..., seq, hidden].
      embedding_output: the sum of all embeddings, normalized.
      all_encoder_layers: a list of the outputs of blocks.
      sequence_output: the output of the last block [batch..., seq, hidden].
      pooled_output: the pooled output of the first position [batch..., hidden].
    """

    def __init__(
        self,
        config: BertConfig,
        is_training: bool,
        input_ids: mtf.Tensor,
        input_mask: Optional[mtf.Tensor] = None,
        token_type_ids: Optional[mtf.Tensor] = None,
        scope: Optional[str] = None,
        mesh_shape: Union[mtf.Shape, str] = "",
        layout: Union[mtf.LayoutRules, str] = "",
    ) -> None:
        """Builds the model.

        Args:
          config: a BertConfig.
          is_training: whether dropout is applied.
          input_ids: an int32 Tensor with dimensions [batch..., seq].
          input_mask: an int32 Tensor of the same shape, 0 at padding; or None.
          token_type_ids: an int32 Tensor of the same shape; 0 everywhere if None.
          scope: the variable scope; "bert" if None.
          mesh_shape: the mesh, for mixtures of experts.
          layout: the layout, for mixtures of experts.

        Raises:
          ValueError: the configuration is not valid for such inputs.
        """
        check_config(config, input_ids.shape.dims[-1].size)
        activation = get_activation(config.feedforward_intermediate_act)
        self.config = copy.deepcopy(config)
        if not is_training:
            self.config.layer_output_dropout_prob = 0.0
            self.config.attention_probs_dropout_prob = 0.0
            self.config.feedforward_intermediate_dropout_prob = 0.0
        self._activation = activation
        self._input_ids = input_ids
        self._extra_losses: list[mtf.Tensor] = []
        if token_type_ids is None:
            token_type_ids = mtf.zeros(input_ids.mesh, input_ids.shape, tf.int32)
        with tf.variable_scope(scope, default_name="bert"):
            with tf.variable_scope("embeddings"):
                self.embedding_output = self._embedded(input_ids, token_type_ids)
            with tf.variable_scope("encoder"):
                self.all_encoder_layers = self._encoded(
                    input_mask, (layout, mesh_shape, input_mask, is_training)
                )
            self.sequence_output = (
                self.all_encoder_layers[-1] if self.all_encoder_layers else self.embedding_output
            )
            if self.config.residual_structure == "direct":
                self.sequence_output = self.normalize(self.sequence_output)
            with tf.variable_scope("pooler"):
                self.pooled_output = layers.dense(
                    mtf.gather(self.sequence_output, 0, self.seq_dim),
                    [self.model_dim],
                    reduced_dims=[self.model_dim],
                    use_bias=self.config.use_bias,
                    activation=mtf.tanh,
                    kernel_initializer=self.dense_initializer,
                )

    # -- the model

    def _embedded(self, input_ids: mtf.Tensor, token_type_ids: mtf.Tensor) -> mtf.Tensor:
        """Returns the normalized sum of the embeddings of tokens, their types and positions."""
        self.embedding_table = self._embeddings("word_embeddings", self.vocab_dim)
        self.word_embedding_output = mtf.gather(self.embedding_table, input_ids, self.vocab_dim)
        types = self._embeddings("token_type_embeddings", self.token_type_vocab_dim)
        y = self.word_embedding_output + mtf.gather(
            types, token_type_ids, self.token_type_vocab_dim
        )
        if self.config.position_signal == "embedding":
            positions = self._embeddings("position_embeddings", self.max_position_embeddings_dim)
            used = mtf.slice(positions, 0, self.seq_dim.size, self.max_position_embeddings_dim.name)
            y += mtf.replace_dimensions(used, used.shape.dims[0], self.seq_dim)
        return self._dropped(self.normalize(y), self.config.layer_output_dropout_prob)

    def _embeddings(self, name: str, dim: mtf.Dimension) -> mtf.Tensor:
        return mtf.get_variable(
            self._input_ids.mesh,
            name,
            mtf.Shape([dim, self.model_dim]),
            initializer=self.embedding_initializer,
        )

    def _encoded(self, input_mask: Optional[mtf.Tensor], moe_arguments: tuple) -> list[mtf.Tensor]:
        """Returns the outputs of all blocks."""
        attention_bias = self._attention_bias(input_mask)
        layer_fns = {
            "attention": lambda x: self.self_attention(x, attention_bias),
            "feedforward": self.feedforward,
            "moe": lambda x: self.moe(x, *moe_arguments),
        }
        direct = self.config.residual_structure == "direct"
        x, outputs = self.embedding_output, []
        for number in range(self.config.num_blocks):
            with tf.variable_scope(f"block_{number}"):
                for name in self.config.block_layers:
                    with tf.variable_scope(None, default_name=name):
                        y = layer_fns[name](self.normalize(x) if direct else x)
                        x += self._dropped(y, self.config.layer_output_dropout_prob)
                        x = x if direct else self.normalize(x)
            outputs.append(x)
        return outputs

    def _attention_bias(self, input_mask: Optional[mtf.Tensor]) -> Optional[mtf.Tensor]:
        """Returns the attention bias, or None."""
        bias = None
        if input_mask is not None:
            seen = mtf.rename_dimension(input_mask, self.seq_dim.name, self.memory_seq_dim.name)
            bias = (1.0 - mtf.to_float(seen)) * _MASKED_LOGIT
        if self.config.position_signal != "relative_attention_bias":
            return bias
        mesh = self._input_ids.mesh
        distance = mtf.range(mesh, self.memory_seq_dim, tf.int32) - mtf.range(
            mesh, self.seq_dim, tf.int32
        )
        buckets_dim = mtf.Dimension("buckets", _BUCKETS)
        table = mtf.get_variable(
            mesh,
            "relative_attention_bias",
            mtf.Shape([*self._softmax_heads, buckets_dim]),
            initializer=tf.zeros_initializer(),
        )
        by_distance = mtf.gather(
            table, relative_position_bucket(distance, num_buckets=_BUCKETS), buckets_dim
        )
        return by_distance if bias is None else bias + mtf.to_float(by_distance)

    @property
    def _softmax_heads(self) -> list[mtf.Dimension]:
        return [self.softmax_heads_dims]

    def _dropped(self, x: mtf.Tensor, rate: float) -> mtf.Tensor:
        return mtf.dropout(x, True, rate=rate) if rate else x

    def _dense(
        self,
        x: mtf.Tensor,
        reduced: Sequence[mtf.Dimension],
        new: Union[mtf.Dimension, Sequence[mtf.Dimension]],
        name: str,
        **kwargs: Any,
    ) -> mtf.Tensor:
        return layers.dense(
            x,
            new,
            reduced_dims=reduced,
            use_bias=self.config.use_bias,
            kernel_initializer=self.dense_initializer,
            name=name,
            **kwargs,
        )

    # -- layers

    def self_attention(self, x: mtf.Tensor, attention_bias: Optional[mtf.Tensor]) -> mtf.Tensor:
        """Returns the attention output between all positions.

        Args:
          x: a Tensor with dimensions [batch..., seq, hidden].
          attention_bias: a Tensor that is added to the logits [batch..., seq, num_heads,
            memory_seq], or None.

        Returns:
          A Tensor of the shape of `x`.
        """
        heads = [self.num_heads_dim, self.size_per_head_dim]
        memory = mtf.rename_dimension(x, self.seq_dim.name, self.memory_seq_dim.name)
        query = self._dense(x, [self.model_dim], heads, "query")
        key = self._dense(memory, [self.model_dim], heads, "key")
        value = self._dense(memory, [self.model_dim], heads, "value")
        kept = x.shape - self.model_dim + self.num_heads_dim
        logits = mtf.einsum(
            [query * self.size_per_head_dim.size**-0.5, key],
            output_shape=kept + self.memory_seq_dim,
        )
        if attention_bias is not None:
            logits += mtf.cast(attention_bias, logits.dtype)
        weights = self._dropped(
            mtf.softmax(logits, self.memory_seq_dim), self.config.attention_probs_dropout_prob
        )
        y = mtf.einsum([weights, value], output_shape=kept + self.size_per_head_dim)
        return self._dense(y, heads, [self.model_dim], "output")

    def feedforward(self, x: mtf.Tensor) -> mtf.Tensor:
        """Returns the output of the feed-forward layer.

        Args:
          x: a Tensor with dimensions [batch..., seq, hidden].

        Returns:
          A Tensor of the shape of `x`.
        """
        hidden = self.feedforward_intermediate_dim
        h = self._dense(x, [self.model_dim], [hidden], "dense_1", activation=self._activation)
        h = self._dropped(h, self.config.feedforward_intermediate_dropout_prob)
        return self._dense(h, [hidden], [self.model_dim], "dense_2")

    def moe(
        self,
        x: mtf.Tensor,
        layout: Union[mtf.LayoutRules, str],
        mesh_shape: Union[mtf.Shape, str],
        input_mask: Optional[mtf.Tensor],
        is_training: bool,
    ) -> mtf.Tensor:
        """Returns the output of a mixture of experts, and adds its loss to `get_extra_loss()`.

        Args:
          x: a Tensor with dimensions [batch..., seq, hidden].
          layout: the layout that the program is lowered with.
          mesh_shape: the mesh.
          input_mask: an int32 Tensor, 0 at padding, which is not dispatched; or None.
          is_training: whether experts have their training capacity.

        Returns:
          A Tensor of the shape of `x`.
        """
        hparams = moe_lib.HParams(
            moe_num_experts=self.config.moe_num_experts,
            moe_hidden_size=self.config.moe_intermediate_size,
            **_MOE_HPARAMS,
        )
        y, loss = moe_lib.transformer_moe_layer_v1(
            x,
            self.model_dim,
            hparams,
            is_training,
            mtf.VariableDType(tf.float32, tf.float32, x.dtype),
            layout=layout,
            mesh_shape=mesh_shape,
            activation=self._activation,
            nonpadding=None if input_mask is None else mtf.cast(input_mask, x.dtype),
        )
        self._extra_losses.append(loss)
        return y

    def normalize(self, x: mtf.Tensor) -> mtf.Tensor:
        """Returns `layer_norm` along "hidden": without mean and bias if the model has no biases.

        Args:
          x: a Tensor with the dimension "hidden".

        Returns:
          A Tensor of the shape of `x`.
        """
        bias = self.config.use_bias
        epsilon = self.config.layer_norm_epsilon
        return layer_norm(x, self.model_dim, epsilon, subtract_mean=bias, use_bias=bias)

    # -- heads

    def get_masked_lm_output(
        self, positions: mtf.Tensor, label_ids: mtf.Tensor, label_weights: mtf.Tensor
    ) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
        """Returns the masked language model loss.

        Args:
          positions: an int32 Tensor [batch..., predictions], the positions of masked tokens.
          label_ids: an int32 Tensor of the same shape, the masked tokens.
          label_weights: a floating-point Tensor of the same shape, weights of the predictions; 0 at
            padding.

        Returns:
          (the weighted mean of the loss, the losses [batch..., predictions], logits
          [batch..., predictions, vocab]).
        """
        x = mtf.gather(self.sequence_output, positions, self.seq_dim)
        with tf.variable_scope("cls/predictions"):
            with tf.variable_scope("transform"):
                x = layers.dense(
                    x,
                    [self.model_dim],
                    reduced_dims=[self.model_dim],
                    use_bias=self.config.use_bias,
                    activation=self._activation,
                    kernel_initializer=self.dense_initializer,
                )
                x = self.normalize(x)
            bias = mtf.get_variable(
                x.mesh,
                "output_bias",
                mtf.Shape([self.vocab_dim]),
                initializer=tf.zeros_initializer(),
            )
            logits = mtf.einsum([x, self.embedding_table], reduced_dims=[self.model_dim]) + bias
            each = layers.softmax_cross_entropy_with_logits(
                logits, label_ids, self.vocab_dim, z_loss=_Z_LOSS
            )
            label_weights = mtf.cast(label_weights, each.dtype)
            total = mtf.reduce_sum(label_weights) + _EPSILON
            return mtf.reduce_sum(each * label_weights) / total, each, logits

    def get_next_sentence_output(
        self, labels: mtf.Tensor
    ) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
        """Returns the next sentence prediction loss.

        Args:
          labels: an int32 Tensor [batch...], 0 if it follows and 1 if not.

        Returns:
          (the mean loss, the losses [batch...], logits [batch..., class]).
        """
        class_dim = mtf.Dimension("class", 2)
        logits = self._dense(
            self.pooled_output, [self.model_dim], [class_dim], "cls/seq_relationship"
        )
        each = layers.softmax_cross_entropy_with_logits(logits, labels, class_dim, z_loss=_Z_LOSS)
        return mtf.reduce_mean(each), each, logits

    # -- outputs

    def get_pooled_output(self) -> mtf.Tensor:
        """Returns the pooled output of the first position, [batch..., hidden]."""
        return self.pooled_output

    def get_sequence_output(self) -> mtf.Tensor:
        """Returns the output of the last block [batch..., seq, hidden]."""
        return self.sequence_output

    def get_all_encoder_layers(self) -> list[mtf.Tensor]:
        """Returns the outputs of all blocks."""
        return self.all_encoder_layers

    def get_word_embedding_output(self) -> mtf.Tensor:
        """Returns token embeddings [batch..., seq, hidden], without token types and positions."""
        return self.word_embedding_output

    def get_embedding_output(self) -> mtf.Tensor:
        """Returns the normalized sum of all embeddings [batch..., seq, hidden]."""
        return self.embedding_output

    def get_embedding_table(self) -> mtf.Tensor:
        """Returns the embedding table [vocab, hidden]."""
        return self.embedding_table

    def get_extra_loss(self) -> Union[mtf.Tensor, float]:
        """Returns the sum of the losses of mixtures of experts, a scalar Tensor, or 0."""
        return mtf.add_n([widened(loss) for loss in self._extra_losses])
