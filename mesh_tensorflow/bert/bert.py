"""The BERT model on a mesh: its configuration, dimensions, layers, losses and initial weights."""

from __future__ import annotations

import collections
import copy
import dataclasses
import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow._core.errors import is_whole
from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._replaced import replaceable
from mesh_tensorflow.layers._attention import dropped, logits_shape
from mesh_tensorflow.ops._contractions.softmax import normalize
from mesh_tensorflow.ops._variable import computed_in_float32, widened
from mesh_tensorflow.optimize._base import weights_of
from mesh_tensorflow.transformer import moe as moe_lib
from mesh_tensorflow.transformer.transformer_layers._parts import relative_position_bucket

__all__ = [
    "BertConfig",
    "BertModel",
    "get_activation",
    "get_assignment_map_from_checkpoint",
    "layer_norm",
]


# -- the configuration


# TF BERT's configuration keys, and ours.
_TF_BERT_KEYS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "num_blocks",
    "num_attention_heads": "attention_num_heads",
    "intermediate_size": "feedforward_intermediate_size",
    "hidden_act": "feedforward_intermediate_act",
    "hidden_dropout_prob": "layer_output_dropout_prob",
    "layer_norm_eps": "layer_norm_epsilon",
}


_NORM_EPSILON = 1e-6  # as in the classic, whose configurations cannot say another one


# Other keys in configuration files of TF BERT's published models; they do not affect the model.
_WITHOUT_MEANING = {
    "directionality",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
}


_SIZES = (
    "vocab_size",
    "d_model",
    "num_blocks",
    "max_position_embeddings",
    "type_vocab_size",
    "attention_num_heads",
    "moe_num_experts",
    "feedforward_intermediate_size",
    "moe_intermediate_size",
)


def _check_size(name: str, size: object) -> None:
    least = 0 if name == "num_blocks" else 1
    if not is_whole(size, least):
        more = ": the number of lines of the vocabulary" if name == "vocab_size" else ""
        raise ValueError(f"BertConfig: {name} should be a positive integer{more}, but is {size!r}")


@dataclasses.dataclass(eq=False, repr=False)
class BertConfig:
    """Configuration of a BertModel; a ValueError says which size is not a positive integer.

    Devlin et al., "BERT: pre-training of deep bidirectional transformers for language
    understanding" (2019).

    Attributes:
      vocab_size: the number of tokens; the model rounds it up to a multiple of 128.
      d_model: the hidden size, of layer inputs and outputs.
      position_signal: "embedding", a vector for each position, or "relative_attention_bias", a
        learned bias for each distance and head, which all layers share.
      max_position_embeddings: the maximum sequence length, with `position_signal` "embedding".
      num_blocks: the number of repetitions of `block_layers`.
      block_layers: "attention", "feedforward" and "moe" in the order of the layers: a list,
        which may be given as text with commas.
      layer_output_dropout_prob: the dropout rate of embeddings and layer outputs.
      residual_structure: "original" (post-norm: the sum after each layer is normalized) or
        "direct" (pre-norm: the input of each layer is).
      use_bias: whether layers and normalizations have biases.
      attention_num_heads: the number of attention heads.
      attention_head_size: the size of a head; `d_model` divided by the number of heads if None.
      attention_num_key_heads: for `BertModel.key_heads_dims`; not used by any layer.
      attention_key_head_size: for `BertModel.key_dim`.
      attention_num_value_heads: for `BertModel.value_heads_dims`.
      attention_value_head_size: for `BertModel.value_dim`.
      attention_probs_dropout_prob: the dropout rate of attention weights.
      feedforward_intermediate_size: the number of hidden units of feed-forward layers.
      feedforward_intermediate_act: their activation; see `get_activation`.
      feedforward_intermediate_dropout_prob: the dropout rate of their hidden units.
      moe_num_experts: the number of experts of a mixture.
      moe_intermediate_size: the number of hidden units of an expert.
      type_vocab_size: the number of values of `token_type_ids`.
      initializer_range: the standard deviation of the initializers; if None, it depends on the
        fan-in.
      layer_norm_epsilon: what normalizations add to the variance. The published BERT
        checkpoints were trained with 1e-12.
    """

    vocab_size: int
    d_model: int = 768
    position_signal: str = "embedding"
    max_position_embeddings: int = 512
    num_blocks: int = 12
    block_layers: Union[str, Sequence[str]] = "attention,feedforward"
    layer_output_dropout_prob: float = 0.1
    residual_structure: str = "original"
    use_bias: bool = True
    attention_num_heads: int = 12
    attention_head_size: Optional[int] = None
    attention_num_key_heads: Optional[int] = None
    attention_key_head_size: Optional[int] = None
    attention_num_value_heads: Optional[int] = None
    attention_value_head_size: Optional[int] = None
    attention_probs_dropout_prob: float = 0.1
    feedforward_intermediate_size: int = 3072
    feedforward_intermediate_act: Union[str, Callable[[mtf.Tensor], mtf.Tensor], None] = "gelu"
    feedforward_intermediate_dropout_prob: float = 0.0
    moe_num_experts: int = 32
    moe_intermediate_size: int = 6144
    type_vocab_size: int = 16
    initializer_range: Optional[float] = 0.02
    layer_norm_epsilon: float = _NORM_EPSILON

    def __post_init__(self) -> None:
        for name in _SIZES:
            _check_size(name, getattr(self, name))
        # Text in JSON files of the classic; a list is what the model goes through.
        if isinstance(self.block_layers, str):
            self.block_layers = [name.strip() for name in self.block_layers.split(",")]
        self.block_layers = list(self.block_layers)

    @classmethod
    def from_dict(cls, json_object: Mapping[str, Any]) -> BertConfig:
        """Creates a configuration from a dictionary.

        Args:
          json_object: arguments of BertConfig by name, or by TF BERT's names, such as
            "hidden_size"; ours take precedence.

        Returns:
          A BertConfig.

        Raises:
          ValueError: a key is unknown, or `vocab_size` is missing.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        # Ours come second: where a file has both names of a value, ours is meant.
        keys = sorted(json_object, key=lambda key: key not in _TF_BERT_KEYS)
        values = {_TF_BERT_KEYS.get(key, key): json_object[key] for key in keys}
        unknown = [key for key in values if key not in names and key not in _WITHOUT_MEANING]
        if unknown:
            near = [
                name
                for key in unknown
                for name in difflib.get_close_matches(key, [*names, *_TF_BERT_KEYS], 1)
            ]
            raise ValueError(
                f"BertConfig: unknown keys {', '.join(map(repr, sorted(unknown)))}; "
                + (f"near names are {', '.join(near)}" if near else f"known are {', '.join(names)}")
            )
        if values.get("vocab_size") is None:
            raise ValueError(
                "BertConfig: vocab_size is missing; it is the number of lines of the vocabulary"
            )
        return cls(**{key: value for key, value in values.items() if key in names})

    @classmethod
    def from_json_file(cls, json_file: str) -> BertConfig:
        """Reads a configuration from a JSON file; see `from_dict`.

        Args:
          json_file: the path of the file.

        Returns:
          A BertConfig.

        Raises:
          ValueError: the file does not hold such a dictionary.
          tf.errors.NotFoundError: there is no such file.
        """
        with tf.io.gfile.GFile(json_file, "r") as f:
            text = f.read()
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"BertConfig: {json_file} is no JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"BertConfig: {json_file} holds no dictionary, but {values!r}")
        try:
            return cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{json_file}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Returns the attributes as a dictionary, which `from_dict` reads.

        Returns:
          A dictionary.
        """
        # A copy, as the list of layers could otherwise be changed by way of the dictionary.
        values = copy.deepcopy(self.__dict__)
        # The classic's configurations have no such key.
        if self.layer_norm_epsilon == _NORM_EPSILON:
            del values["layer_norm_epsilon"]
        return values

    def to_json_string(self) -> str:
        """Returns the attributes as JSON.

        Returns:
          A string.
        """
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"


# -- the dimensions


# BERT's own vocabulary, 30,522 = 2 * 3 * 5,087 tokens, could hardly be split over a mesh.
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
    for what, value, values in choices:
        if value not in values:
            raise ValueError(
                f"BertModel: unknown {what} {value!r}; it should be one of "
                f"{', '.join(map(repr, values))}"
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
    first_position: int = 0  # the row of the table of positions that the first one has
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
        # Of a fixed deviation, as in TF BERT.
        if self.config.initializer_range:
            return tf.truncated_normal_initializer(stddev=self.config.initializer_range)
        return layers.VarianceScalingInitializer(scale=_SCALE)

    @property
    def embedding_initializer(self) -> Any:
        """The initializer of embeddings that also serve as softmax weights."""
        # A logit is a sum over hidden of products with a normalized x: its variance is about
        # hidden * deviation^2 = _SCALE.
        deviation = self.config.initializer_range or math.sqrt(_SCALE / self.config.d_model)
        return tf.truncated_normal_initializer(stddev=deviation)


_ACTIVATIONS: dict[str, Optional[Callable[[mtf.Tensor], mtf.Tensor]]] = {
    "linear": None,
    "relu": mtf.relu,
    "gelu": mtf.gelu,
    "tanh": mtf.tanh,
}


def get_activation(
    activation_string: Union[str, Callable[[mtf.Tensor], mtf.Tensor], None],
) -> Optional[Callable[[mtf.Tensor], mtf.Tensor]]:
    """Looks up an activation function by name.

    Args:
      activation_string: "gelu", "relu", "tanh" or "linear", case-insensitive; or a function, which
        is returned unchanged; or None or "".

    Returns:
      A function of a Tensor; None for "linear", None and "".

    Raises:
      ValueError: the name is unknown.
    """
    if not activation_string:
        return None
    if not isinstance(activation_string, str):
        return activation_string
    if activation_string.lower() not in _ACTIVATIONS:
        raise ValueError(
            f"Unsupported activation: {activation_string!r}; it should be one of "
            f"{', '.join(map(repr, _ACTIVATIONS))}"
        )
    return _ACTIVATIONS[activation_string.lower()]


def layer_norm(
    x: mtf.Tensor,
    dim: mtf.Dimension,
    epsilon: float = 1e-6,
    subtract_mean: bool = True,
    use_scale: bool = True,
    use_bias: bool = True,
    name: Optional[str] = None,
) -> mtf.Tensor:
    """Normalizes along a dimension, then scales and shifts.

    Ba et al., "Layer normalization" (2016); without the mean, Zhang and Sennrich, "Root mean square
    layer normalization" (2019).

    Args:
      x: a Tensor with the dimension `dim`.
      dim: a Dimension.
      epsilon: added to the variance.
      subtract_mean: whether to subtract the mean.
      use_scale: whether to multiply by a variable "scale" with the dimension `dim`.
      use_bias: whether to add a variable "bias" with the dimension `dim`.
      name: the variable scope; "layer_norm" if None.

    Returns:
      A Tensor of the shape of `x`.

    Raises:
      ValueError: `x` lacks `dim`.
    """
    if dim not in x.shape:
        raise ValueError(
            f"layer_norm: {x.name} {x.shape} has no dimension {dim.name}={dim.size}; normalize "
            "along one of its dimensions"
        )
    with tf.variable_scope(name, default_name="layer_norm"):
        # bfloat16 has 8 significant bits, too few for a mean of squares.
        y = computed_in_float32(normalize if subtract_mean else _by_rms)(x, dim, epsilon)
        if use_scale:
            y *= _vector(x, dim, "scale", tf.ones_initializer())
        if use_bias:
            y += _vector(x, dim, "bias", tf.zeros_initializer())
        return y


def _by_rms(x: mtf.Tensor, dim: mtf.Dimension, epsilon: float) -> mtf.Tensor:
    # x / sqrt(mean over dim of x^2 + epsilon).
    return x * mtf.rsqrt(mtf.reduce_mean(mtf.square(x), reduced_dim=dim) + epsilon)


def _vector(
    x: mtf.Tensor, dim: mtf.Dimension, name: str, initializer: Callable[..., tf.Tensor]
) -> mtf.Tensor:
    return mtf.get_variable(
        x.mesh, name, mtf.Shape([dim]), initializer=initializer, activation_dtype=x.dtype
    )


# Added to attention logits at padding; the value in BERT.
# Finite, so that a sequence of padding alone, which fills up a batch, sees all of it evenly.
_MASKED_LOGIT = -10000.0


_BUCKETS = 32


# Coefficient of the z-loss of both pre-training losses.
# It is log(sum over classes of exp(logit))^2, which keeps the divisors of softmax near 1.
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
        # A copy, as the caller builds both training and evaluation with one configuration.
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
            # Nothing has normalized the sum of pre-norm layers yet.
            if self.config.residual_structure == "direct":
                self.sequence_output = self.normalize(self.sequence_output)
            with tf.variable_scope("pooler"):
                # The first token is [CLS], which stands for the whole sequence.
                first = mtf.gather(self.sequence_output, 0, self.seq_dim)
                hidden = [self.model_dim]
                self.pooled_output = self._dense(first, hidden, hidden, activation=mtf.tanh)

    # -- the model

    def _embedded(self, input_ids: mtf.Tensor, token_type_ids: mtf.Tensor) -> mtf.Tensor:
        """Returns the normalized sum of the embeddings of tokens, their types and positions."""
        self.embedding_table = self._embeddings("word_embeddings", self.vocab_dim)
        # Where vocab is split, a processor finds the tokens of its part, and 0 for others; these
        # are added up.
        self.word_embedding_output = mtf.gather(self.embedding_table, input_ids, self.vocab_dim)
        types = self._embeddings("token_type_embeddings", self.token_type_vocab_dim)
        y = self.word_embedding_output + mtf.gather(
            types, token_type_ids, self.token_type_vocab_dim
        )
        if self.config.position_signal == "embedding":
            positions = self._embeddings("position_embeddings", self.max_position_embeddings_dim)
            rows = self.max_position_embeddings_dim.name
            used = mtf.slice(positions, self.first_position, self.seq_dim.size, rows)
            # Under its own name, the dimension of positions would be a second one of the sum.
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
        # Once for all blocks, which share one table of biases by distance.
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
                    # A second layer of a kind then has variables of its own, as in attention_1.
                    with tf.variable_scope(None, default_name=name):
                        # Pre-norm: x + layer(norm(x)); post-norm, as in BERT: norm(x + layer(x)).
                        y = layer_fns[name](self.normalize(x) if direct else x)
                        x += self._dropped(y, self.config.layer_output_dropout_prob)
                        x = x if direct else self.normalize(x)
            outputs.append(x)
        return outputs

    def _attention_bias(self, input_mask: Optional[mtf.Tensor]) -> Optional[mtf.Tensor]:
        """Returns the attention bias, or None."""
        bias = None
        if input_mask is not None:
            # Padding is hidden as a key, from every query: hence [batch, memory_seq] and no seq.
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
            mtf.Shape([self.softmax_heads_dims, buckets_dim]),
            initializer=tf.zeros_initializer(),
        )
        by_distance = mtf.gather(
            table, relative_position_bucket(distance, num_buckets=_BUCKETS), buckets_dim
        )
        return by_distance if bias is None else bias + mtf.to_float(by_distance)

    def _dropped(self, x: mtf.Tensor, rate: float) -> mtf.Tensor:
        return mtf.dropout(x, True, rate=rate) if rate else x

    def _dense(
        self,
        x: mtf.Tensor,
        reduced: Sequence[mtf.Dimension],
        new: Union[mtf.Dimension, Sequence[mtf.Dimension]],
        name: Optional[str] = None,
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
          attention_bias: a Tensor that is added to the logits [batch..., num_heads, seq,
            memory_seq], or None.

        Returns:
          A Tensor of the shape of `x`.
        """
        # Two dimensions, so that a layout can split the heads, of which each attends by itself.
        heads = [self.num_heads_dim, self.size_per_head_dim]
        # Under one name, queries and keys would be multiplied position by position, not all by all.
        memory = mtf.rename_dimension(x, self.seq_dim.name, self.memory_seq_dim.name)
        query = self._dense(x, [self.model_dim], heads, "query")
        key = self._dense(memory, [self.model_dim], heads, "key")
        value = self._dense(memory, [self.model_dim], heads, "value")
        dims = x.shape - self.model_dim + self.num_heads_dim
        # softmax_memory_seq(q k / sqrt(attention_head) + bias) v.
        logits = mtf.einsum(
            # Queries are scaled and not logits, which have memory_seq in place of attention_head.
            [query * self.size_per_head_dim.size**-0.5, key],
            output_shape=logits_shape(
                query.shape, key.shape, self.memory_seq_dim, self.size_per_head_dim
            ),
        )
        if attention_bias is not None:
            logits += mtf.cast(attention_bias, logits.dtype)
        weights = dropped(
            mtf.softmax(logits, self.memory_seq_dim),
            dims.dims,
            True,
            self.config.attention_probs_dropout_prob,
        )
        y = mtf.einsum([weights, value], output_shape=dims + self.size_per_head_dim)
        # Going forward, only this communicates where a layout splits num_heads, over which it sums.
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
        # Going forward, only this communicates where a layout splits intermediate.
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
            # Weights stay in float32: in bfloat16, small updates would be rounded away.
            mtf.VariableDType(tf.float32, tf.float32, x.dtype),
            layout=layout,
            mesh_shape=mesh_shape,
            activation=self._activation,
            # Padding would otherwise take places of experts from tokens.
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
        # Only masked positions have logits, as these are of the size of the vocabulary.
        x = mtf.gather(self.sequence_output, positions, self.seq_dim)
        with tf.variable_scope("cls/predictions"):
            with tf.variable_scope("transform"):
                hidden = [self.model_dim]
                x = self.normalize(self._dense(x, hidden, hidden, activation=self._activation))
            bias = mtf.get_variable(
                x.mesh,
                "output_bias",
                mtf.Shape([self.vocab_dim]),
                initializer=tf.zeros_initializer(),
            )
            # The embeddings of tokens are the weights of the softmax over them, too.
            logits = mtf.einsum([x, self.embedding_table], reduced_dims=[self.model_dim]) + bias
            each = layers.softmax_cross_entropy_with_logits(
                logits, label_ids, self.vocab_dim, z_loss=_Z_LOSS
            )
            label_weights = mtf.cast(label_weights, each.dtype)
            # A batch without masked tokens has the loss 0, not 0 / 0.
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
        # In float32, so that a sum over many layers does not round small losses away.
        return mtf.add_n([widened(loss) for loss in self._extra_losses])


# -- initial weights


def get_assignment_map_from_checkpoint(
    tvars: Iterable[Any], init_checkpoint: str
) -> tuple[dict[str, str], dict[str, int]]:
    """Matches variables with the contents of a checkpoint.

    The global step and optimizer slots are not restored, since a new training begins.

    Args:
      tvars: tf variables.
      init_checkpoint: a checkpoint.

    Returns:
      (a dictionary from names in the checkpoint to names in the graph, for
      `tf.train.init_from_checkpoint`; a dictionary whose keys are the names of matched variables,
      with and without ":0").

    Raises:
      ValueError: the checkpoint does not exist, or has a variable of a different shape.
    """
    try:
        path = checkpoint_files.find(init_checkpoint, "init_checkpoint")
        saved = checkpoint_files.open_reader(path).get_variable_to_shape_map()
    except (tf.errors.OpError, ValueError) as error:
        raise ValueError(
            f"init_checkpoint: {init_checkpoint} is no checkpoint, such as model.ckpt-1000: {error}"
        ) from error
    assignment: dict[str, str] = collections.OrderedDict()
    # With the names of tensors, too: programs of TF BERT look for these.
    initialized: dict[str, int] = {}
    by_name = {v.name.removesuffix(":0"): v for v in tvars}
    weights = set(weights_of(saved))
    for name, shape in sorted(saved.items()):
        if name not in by_name or name not in weights:
            continue
        ours = by_name[name].shape.as_list()
        if list(shape) != ours:
            raise ValueError(
                f"init_checkpoint: {init_checkpoint} has {name} of shape {list(shape)}, but in the "
                f"model it has {ours}; the configuration has to be that of the checkpoint"
            )
        assignment[name] = name
        initialized[name] = initialized[name + ":0"] = 1
    return assignment, initialized


replaceable(__name__)
