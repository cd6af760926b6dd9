"""GGUF files, of llama.cpp: quantized weights under other names, and a config in their metadata."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Optional

import numpy as np

from mesh_tensorflow._core.errors import missing_package

# The architectures, by their names, which are also the model types of config.json.
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
# By the names of fields of config.json: those of metadata, after the name of the architecture.
_FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}
_IDS = ("bos_token_id", "eos_token_id")
# By the names of tensors there: those of Hugging Face.
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_BLOCKS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufFile:
    """The tensors of a GGUF file by Hugging Face's names; each is dequantized when it is read.

    Attributes:
      path: where it is.
      config: the config.json that such a model has.
      metadata: what the file says of its tokenizer, by the names after "tokenizer.".
    """

    def __init__(self, path: str) -> None:
        """Opens it.

        Args:
          path: its path.

        Raises:
          ImportError: the package gguf is not installed.
          ValueError: it is damaged, or its architecture is not known.
        """
        try:
            import gguf
        except ImportError as e:
            raise missing_package("a GGUF file", "gguf", "pip install gguf") from e
        self.path = path
        try:
            reader = gguf.GGUFReader(path)
            fields = {name: field.contents() for name, field in reader.fields.items()}
        except Exception as error:  # of many kinds, since a file may hold anything
            raise ValueError(f"{path} is no whole GGUF file; get it anew: {error}") from error
        self._dequantize = gguf.quants.dequantize
        self._tensors = {_name(tensor.name): tensor for tensor in reader.tensors}
        self.config = self._config(fields)
        begin = "tokenizer."
        self.metadata = {n[len(begin) :]: v for n, v in fields.items() if n.startswith(begin)}

    def _config(self, fields: dict[str, Any]) -> dict[str, Any]:
        architecture = fields.get("general.architecture")
        if architecture not in _ARCHITECTURES:
            raise ValueError(
                f"{self.path}: its architecture is {architecture!r}, which is none of "
                f"{', '.join(_ARCHITECTURES)}"
            )
        config: dict[str, Any] = {
            "model_type": architecture,
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            # No field tells it.
            "attention_bias": "model.layers.0.self_attn.o_proj.bias" in self._tensors,
        }
        embedding = "model.embed_tokens.weight"
        if embedding in self._tensors:
            config["vocab_size"] = self.shape(embedding)[0]
        names = {ours: f"{architecture}.{theirs}" for ours, theirs in _FIELDS.items()}
        names |= {name: f"tokenizer.ggml.{name}" for name in _IDS}
        config |= {ours: fields[theirs] for ours, theirs in names.items() if theirs in fields}
        scaling = f"{architecture}.rope.scaling"
        if fields.get(f"{scaling}.type", "none") != "none":
            config["rope_scaling"] = {
                "rope_type": fields[f"{scaling}.type"],
                "factor": fields.get(f"{scaling}.factor"),
            }
            length = fields.get(f"{scaling}.original_context_length")
            if length is not None and config["rope_scaling"]["rope_type"] == "yarn":
                config["rope_scaling"]["original_max_position_embeddings"] = length
        return config

    def __iter__(self) -> Iterator[str]:
        """Yields the names."""
        return iter(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the sizes of a tensor.

        Args:
          name: its name.
        """
        # The last dimension comes first in these files.
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def dtype(self, name: str) -> np.dtype:
        """Returns the dtype of a tensor as it is read: float32.

        Args:
          name: its name.
        """
        return np.dtype("float32")

    def __getitem__(self, name: str) -> np.ndarray:
        """Reads a tensor."""
        tensor = self._tensors[name]
        value = self._dequantize(tensor.data, tensor.tensor_type).reshape(self.shape(name))
        heads = self._permuted_heads(name)
        if heads is None:
            return value
        # Rotary pairs are neighbors there, and half of the channels apart in Hugging Face's form.
        pairs = value.reshape([heads, value.shape[0] // heads // 2, 2, *value.shape[1:]])
        return np.swapaxes(pairs, 1, 2).reshape(value.shape)

    def _permuted_heads(self, name: str) -> Optional[int]:
        """Returns the number of heads of a tensor whose channels are in another order."""
        if self.config["model_type"] != "llama":
            return None
        # Only the converter of Llama's weights to GGUF changes their order.
        for projection, field in (
            ("self_attn.q_proj", "num_attention_heads"),
            ("self_attn.k_proj", "num_key_value_heads"),
        ):
            if projection in name:
                return self.config.get(field, self.config["num_attention_heads"])
        return None


def _name(theirs: str) -> str:
    """Returns Hugging Face's name of a tensor; that of the file if there is none."""
    if theirs in _OUTER:
        return _OUTER[theirs]
    parts = theirs.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _OF_BLOCKS:
        return f"model.layers.{parts[1]}.{_OF_BLOCKS[parts[2]]}.{parts[3]}"
    return theirs
