"""Dimensions and initializers of a BertModel, and checks of its configuration."""

from __future__ import annotations

import math
from typing import Any, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.bert._config import BertConfig

__all__ = ["BertDims", "check_config"]

VOCAB_DIVISOR = 128
# Variance of initial weights times their fan-in.
_SCALE = 0.4
POSITION_SIGNALS = ("embedding", "relative_attention_bias")
RESIDUAL_STRUCTURES = ("original", "direct")
BLOCK_LAYERS = ("attention", "feedforward", "moe")


def check_config(config: BertConfig, length: int) -> None:
    """Checks a configuration for sequences of a length.

    Args:
      config: a BertConfig.
      length: an integer.

    Raises:
      ValueError: it does not describe a valid model.
    """
    choices = [
        ("position_signal", config.position_signal, POSITION_SIGNALS),
        ("residual_structure", config.residual_structure, RESIDUAL_STRUCTURES),
        *(("layer type", name, BLOCK_LAYERS) for name in config.block_layers),
    ]
    for what, value, known in choices:
        if value not in known:
            raise ValueError(
                f"BertModel: unknown {what} {value!r}; it should be one of "
                f"{', '.join(map(repr, known))}"
            )
    if config.position_signal == "embedding" and length > config.max_position_embeddings:
        raise ValueError(
            f"BertModel: cannot use sequence length {length}: max_position_embeddings is "
            f"{config.max_position_embeddings}. Shorten the sequences (--max_seq_length), or make "
            "max_position_embeddings larger in the configuration"
        )
    if config.attention_head_size is None and config.d_model % config.attention_num_heads:
        raise ValueError(
            f"BertModel: The hidden size ({config.d_model}) is not a multiple of the number of "
            f"attention heads ({config.attention_num_heads}); change d_model or "
            "attention_num_heads, or set attention_head_size"
        )


def _defined(name: str, size: Optional[int], what: str, key: str) -> mtf.Dimension:
    if size is None:
        raise ValueError(f"The {what} is not defined: the configuration has no {key}.")
    return mtf.Dimension(name, size)


class BertDims:
    """The dimensions that layout rules name, from `self.config` and the shape of `self._input_ids`.

    Attributes:
      config: a BertConfig.
    """

    config: BertConfig
    _input_ids: mtf.Tensor

    @property
    def vocab_dim(self) -> mtf.Dimension:
        """The vocabulary: its size rounded up to a multiple of 128."""
        size = -(-self.config.vocab_size // VOCAB_DIVISOR) * VOCAB_DIVISOR
        return mtf.Dimension("vocab", size)

    @property
    def model_dim(self) -> mtf.Dimension:
        """The channels of layer inputs and outputs: "hidden"."""
        return mtf.Dimension("hidden", self.config.d_model)

    @property
    def token_type_vocab_dim(self) -> mtf.Dimension:
        """Token types."""
        return mtf.Dimension("token_type_vocab", self.config.type_vocab_size)

    @property
    def feedforward_intermediate_dim(self) -> mtf.Dimension:
        """Hidden units of feed-forward layers: "intermediate"."""
        return mtf.Dimension("intermediate", self.config.feedforward_intermediate_size)

    @property
    def num_heads_dim(self) -> mtf.Dimension:
        """Attention heads: "num_heads"."""
        return mtf.Dimension("num_heads", self.config.attention_num_heads)

    @property
    def softmax_heads_dims(self) -> mtf.Dimension:
        """Heads of attention weights; the same as `num_heads_dim`."""
        return self.num_heads_dim

    @property
    def max_position_embeddings_dim(self) -> mtf.Dimension:
        """Positions with embeddings."""
        return mtf.Dimension("max_position_embeddings", self.config.max_position_embeddings)

    @property
    def seq_dim(self) -> mtf.Dimension:
        """Positions of the sequence: the last dimension of the input."""
        return self._input_ids.shape.dims[-1]

    @property
    def memory_seq_dim(self) -> mtf.Dimension:
        """Positions of keys and values: "memory_seq"."""
        return mtf.Dimension("memory_seq", self.seq_dim.size)

    @property
    def size_per_head_dim(self) -> mtf.Dimension:
        """Channels of an attention head: "attention_head"."""
        size = self.config.attention_head_size
        return mtf.Dimension(
            "attention_head", size or self.config.d_model // self.config.attention_num_heads
        )

    @property
    def key_dim(self) -> mtf.Dimension:
        """Channels of a key head, if `attention_key_head_size` is given."""
        size = self.config.attention_key_head_size
        return _defined("d_k", size, "key head size", "attention_key_head_size")

    @property
    def key_heads_dims(self) -> mtf.Dimension:
        """Key heads, if `attention_num_key_heads` is given."""
        size = self.config.attention_num_key_heads
        return _defined("key_heads", size, "number of key heads", "attention_num_key_heads")

    @property
    def value_dim(self) -> mtf.Dimension:
        """Channels of a value head, if `attention_value_head_size` is given."""
        size = self.config.attention_value_head_size
        return _defined("d_v", size, "value head size", "attention_value_head_size")

    @property
    def value_heads_dims(self) -> mtf.Dimension:
        """Value heads, if `attention_num_value_heads` is given."""
        size = self.config.attention_num_value_heads
        return _defined("value_heads", size, "number of value heads", "attention_num_value_heads")

    @property
    def dense_initializer(self) -> Any:
        """The initializer of kernels."""
        if self.config.initializer_range:
            return tf.truncated_normal_initializer(stddev=self.config.initializer_range)
        return layers.VarianceScalingInitializer(scale=_SCALE)

    @property
    def embedding_initializer(self) -> Any:
        """The initializer of embeddings that also serve as softmax weights."""
        deviation = self.config.initializer_range or math.sqrt(_SCALE / self.config.d_model)
        return tf.truncated_normal_initializer(stddev=deviation)
