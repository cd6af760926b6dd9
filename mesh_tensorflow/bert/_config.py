"""Configuration of a BertModel, read from JSON."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import is_whole

if TYPE_CHECKING:
    import mesh_tensorflow.ops_with_redefined_builtins as mtf

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
_EPSILON = 1e-6  # as in the classic, whose configurations cannot say another one
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
    layer_norm_epsilon: float = _EPSILON

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
        known = [field.name for field in dataclasses.fields(cls)]
        # Ours come second: where a file has both names of a value, ours is meant.
        keys = sorted(json_object, key=lambda key: key not in _TF_BERT_KEYS)
        values = {_TF_BERT_KEYS.get(key, key): json_object[key] for key in keys}
        unknown = [key for key in values if key not in known and key not in _WITHOUT_MEANING]
        if unknown:
            near = [
                name
                for key in unknown
                for name in difflib.get_close_matches(key, [*known, *_TF_BERT_KEYS], 1)
            ]
            raise ValueError(
                f"BertConfig: unknown keys {', '.join(map(repr, sorted(unknown)))}; "
                + (f"near names are {', '.join(near)}" if near else f"known are {', '.join(known)}")
            )
        if values.get("vocab_size") is None:
            raise ValueError(
                "BertConfig: vocab_size is missing; it is the number of lines of the vocabulary"
            )
        return cls(**{key: value for key, value in values.items() if key in known})

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
        if self.layer_norm_epsilon == _EPSILON:  # the classic's configurations have no such key
            del values["layer_norm_epsilon"]
        return values

    def to_json_string(self) -> str:
        """Returns the attributes as JSON.

        Returns:
          A string.
        """
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"
