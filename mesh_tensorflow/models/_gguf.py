"""GGUF files, of llama.cpp: quantized weights under other names, and a config in their metadata.

Names of tensors are those that the package gguf has for Hugging Face's. What its writers change of
the weights of a family is undone when they are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Optional

import numpy as np

from mesh_tensorflow._core.errors import first_names, missing_package, slip
from mesh_tensorflow.models._family import Form

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
_EXPERTS = {
    **_FIELDS,
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_GEMMA = {
    **_FIELDS,
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope_local_base_freq": "rope.freq_base_swa",
}
_GPT2 = {
    "n_embd": "embedding_length",
    "n_inner": "feed_forward_length",
    "n_layer": "block_count",
    "n_head": "attention.head_count",
    "n_positions": "context_length",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}
_GPT_NEOX = {
    **_FIELDS,
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "rotary_emb_base": "rope.freq_base",
    "use_parallel_residual": "use_parallel_residual",
}
_IDS = ("bos_token_id", "eos_token_id")
# Metadata that say nothing of what a model computes, or what its tensors say, too.
_OF_NO_MATTER = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
_TIED = {"tie_word_embeddings": True}


class _Architecture(NamedTuple):
    """What there is under the name of an architecture.

    Attributes:
      model_type: that of config.json.
      fields: by the names of fields of config.json, those of metadata.
      fixed: fields that no metadata tell.
      sizes: the fields of the channels and of the number of heads.
      biases: by fields that say whether there are biases, one of these: no metadata tell it.
    """

    model_type: str
    fields: Mapping[str, str] = _FIELDS
    fixed: Mapping[str, Any] = {}
    sizes: tuple[str, str] = ("hidden_size", "num_attention_heads")
    biases: Mapping[str, str] = {"attention_bias": "blk.0.attn_output.bias"}


_ARCHITECTURES = {
    "llama": _Architecture("llama"),
    "qwen2": _Architecture("qwen2", biases={}),
    "qwen2moe": _Architecture(
        "qwen2_moe",
        {**_EXPERTS, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        {"norm_topk_prob": False},
        biases={"qkv_bias": "blk.0.attn_q.bias"},
    ),
    "qwen3": _Architecture("qwen3"),
    "qwen3moe": _Architecture("qwen3_moe", _EXPERTS, {"norm_topk_prob": True}),
    "phi3": _Architecture(
        "phi3",
        {
            **_FIELDS,
            "sliding_window": "attention.sliding_window",
            "original_max_position_embeddings": "rope.scaling.original_context_length",
        },
    ),
    "olmo2": _Architecture("olmo2"),
    "gemma": _Architecture("gemma", _FIELDS, _TIED),
    "gemma2": _Architecture("gemma2", _GEMMA, _TIED),
    "gemma3": _Architecture("gemma3_text", _GEMMA, _TIED),
    "gpt2": _Architecture("gpt2", _GPT2, _TIED, ("n_embd", "n_head"), biases={}),
    "gptneox": _Architecture("gpt_neox", _GPT_NEOX, {"hidden_act": "gelu"}),
    "smollm3": _Architecture("smollm3"),
}
# Llama's architecture with experts.
_MIXTRAL = _Architecture(
    "mixtral",
    {**_FIELDS, "num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
)
# Tensors that are no weights: divisors of the frequencies of rotary positions.
_DIVISORS, _SHORT, _LONG = (
    "rope_freqs.weight",
    "rope_factors_short.weight",
    "rope_factors_long.weight",
)
# The largest models' queries are scaled by the channels of a head of another division: by their
# numbers of blocks, as llama.cpp tells them, since no metadata do.
_LARGEST = {"gemma2": 46, "gemma3": 62}


class _Part(NamedTuple):
    """A tensor as Hugging Face has it: one of the file, or the part of one expert."""

    stored: str
    expert: Optional[int] = None


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
        self._gguf = gguf
        self._stored = {tensor.name: tensor for tensor in reader.tensors}
        self._parts = {name: _Part(name) for name in self._stored}
        self.config = self._config(fields)
        begin = "tokenizer."
        self.metadata = {n[len(begin) :]: v for n, v in fields.items() if n.startswith(begin)}

    # -- its config

    def _config(self, fields: dict[str, Any]) -> dict[str, Any]:
        architecture = fields.get("general.architecture")
        if architecture not in _ARCHITECTURES:
            raise ValueError(
                f"{self.path}: its architecture is {architecture!r}, which is none of "
                f"{', '.join(_ARCHITECTURES)}"
            )
        self._architecture, table = architecture, _ARCHITECTURES[architecture]

        read: set[str] = set()

        def field(name: str) -> Any:
            read.add(name)
            return fields.get(f"{architecture}.{name}")

        if architecture == "llama" and field("expert_count"):
            table = _MIXTRAL
        if architecture == "olmo2" and field("attention.sliding_window"):
            raise ValueError(f"{self.path}: it is an OLMo 3, whose windows are not known")
        config: dict[str, Any] = {
            "model_type": table.model_type,
            # Writers leave logits out that are those of the embedding; no metadata say so.
            "tie_word_embeddings": "output.weight" not in self._stored,
            **{name: tensor in self._stored for name, tensor in table.biases.items()},
            **table.fixed,
        }
        embedding = "token_embd.weight"
        # By the table itself: the number is not among the metadata of many files.
        if embedding in self._stored:
            config["vocab_size"] = self._sizes(embedding)[0]
        fields_of_file = {ours: field(theirs) for ours, theirs in table.fields.items()}
        fields_of_file |= {name: fields.get(f"tokenizer.ggml.{name}") for name in _IDS}
        config |= {name: value for name, value in fields_of_file.items() if value is not None}
        if not config.get("sliding_window"):
            config.pop("sliding_window", None)  # 0 for none
        channels, heads = table.sizes
        self._heads: tuple[Any, Any] = (
            config.get(heads),
            config.get("num_key_value_heads", config.get(heads)),
        )
        if None not in (config.get(channels), config.get(heads)):
            config |= self._of_heads(field, config[channels] // config[heads], config)
        config |= self._scaling(field, config)
        begin = f"{architecture}."
        own = {n.removeprefix(begin): v for n, v in fields.items() if n.startswith(begin)}
        self._tell_unknown({name: v for name, v in own.items() if name not in read}, config, table)
        return config

    def _tell_unknown(
        self, unknown: Mapping[str, Any], config: Mapping[str, Any], known: _Architecture
    ) -> None:
        """Warns of metadata that have not been read, but for those that say what is meant anyway.

        Raises:
          ValueError: there are some, within `mtf.strict()`.
        """
        channels, heads = (config.get(name) for name in known.sizes)
        # What follows from other fields changes nothing, as long as it is the same.
        size = config.get("head_dim", channels // heads if channels and heads else None)
        sizes = dict.fromkeys(("attention.value_length", "rope.dimension_count"), size)
        meant = {**sizes, "attention.causal": True, "expert_count": 0, "expert_used_count": 0}
        untold = [
            f"{self._architecture}.{name}={value!r}"
            for name, value in unknown.items()
            if name not in _OF_NO_MATTER and (name not in meant or value != meant[name])
        ]
        if untold:
            slip(
                f"{self.path}: its metadata have {first_names(untold)}, which is not known here of "
                f"the architecture {self._architecture!r}, and ignored. If the model computes "
                "something else with it, take another file, or the folder of Hugging Face"
            )

    def _of_heads(self, field: Any, size: int, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields that follow from the channels of a head."""
        share = {"gptneox": "rotary_pct", "phi3": "partial_rotary_factor"}.get(self._architecture)
        if share is not None and (turned := field("rope.dimension_count")) is not None:
            return {share: turned / size}
        if self._architecture not in _LARGEST:
            return {}
        scale = field("attention.scale")
        largest = config.get("num_hidden_layers") == _LARGEST[self._architecture]
        scalar = size if largest else config.get("head_dim", size)
        # Metadata have what queries are multiplied by, scalar ** -0.5.
        fields: dict[str, Any] = {
            "query_pre_attn_scalar": scalar if scale is None else round(scale**-2)
        }
        pattern = field("attention.sliding_window_pattern")
        if isinstance(pattern, list):
            kinds = ("full_attention", "sliding_attention")
            fields["layer_types"] = [kinds[bool(window)] for window in pattern]
        elif pattern is not None:
            fields["sliding_window_pattern"] = pattern
        return fields

    def _scaling(self, field: Any, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the scaling of rotary positions, in the field of config.json; none for none."""
        kind, original = field("rope.scaling.type"), "original_max_position_embeddings"
        length = field("rope.scaling.original_context_length")
        short = _SHORT if _SHORT in self._stored else _DIVISORS
        if short in self._stored:
            long = _LONG if _LONG in self._stored else short
            # Whoever wrote the file has applied Llama 3's equation: what is there is its result, a
            # divisor for each pair of channels, as longrope has them.
            divisors = [self._dequantized(name, None).tolist() for name in (short, long)]
            # Divisors alone, as of Llama 3, leave sines and cosines as they are.
            factor = field("rope.scaling.attn_factor") if short == _SHORT else 1.0
            scaling = {
                "rope_type": "longrope",
                "short_factor": divisors[0],
                "long_factor": divisors[1],
                original: length or config.get("max_position_embeddings"),
            }
            if factor is not None:
                scaling["attention_factor"] = factor
        elif kind in (None, "none"):
            return {}
        else:
            scaling = {"rope_type": kind, "factor": field("rope.scaling.factor")}
            if length is not None and kind == "yarn":
                scaling[original] = length
        return {"rope_scaling": scaling}

    # -- its tensors

    def named_by(self, form: Form) -> GgufFile:
        """Gives its tensors the names that a Form has for them; returns itself.

        Tensors that the Form does not name keep the names of the file.

        Args:
          form: the Form of its config.
        """
        kinds = {name: kind for kind, name in self._gguf.MODEL_ARCH_NAMES.items()}
        blocks = 1 + max(
            (int(name.split(".")[1]) for name in self._stored if name.startswith("blk.")),
            default=0,
        )
        names = self._gguf.get_tensor_name_map(kinds[self._architecture], blocks)
        left = dict.fromkeys(self._stored)
        for name in (_DIVISORS, _SHORT, _LONG):
            left.pop(name, None)
        if self.config["tie_word_embeddings"]:
            left.pop("output.weight", None)  # a second copy of the embedding
        self._parts = {}
        for weight in form.weights:
            # The tensors of all experts are one there.
            stored = names.get_name(weight.theirs.replace(".{}", ""), (".weight", ".bias"))
            if stored not in self._stored:
                continue
            left.pop(stored, None)
            if "{}" not in weight.theirs:
                self._parts[weight.theirs] = _Part(stored)
                continue
            for expert in range(self._sizes(stored)[0]):
                self._parts[weight.theirs.format(expert)] = _Part(stored, expert)
        # By these, `Weights` tells of what has no place in the model.
        self._parts |= {name: _Part(name) for name in left}
        return self

    def __iter__(self) -> Iterator[str]:
        """Yields the names."""
        return iter(self._parts)

    def _sizes(self, stored: str) -> tuple[int, ...]:
        # The last dimension comes first in these files.
        return tuple(int(size) for size in reversed(self._stored[stored].shape))

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the sizes of a tensor.

        Args:
          name: its name.
        """
        part = self._parts[name]
        sizes = self._sizes(part.stored)
        if part.expert is not None:
            sizes = sizes[1:]
        if _kind(part.stored) == "ffn_gate_inp_shexp":
            return (1, math.prod(sizes))  # a dense layer with one output
        return sizes[::-1] if self._is_transposed(part.stored, sizes) else sizes

    def dtype(self, name: str) -> np.dtype:
        """Returns the dtype of a tensor as it is read: float32.

        Args:
          name: its name.
        """
        # Of any kind of blocks, and of bfloat16: the package dequantizes to no other.
        return np.dtype("float32")

    def __getitem__(self, name: str) -> np.ndarray:
        """Reads a tensor."""
        part = self._parts[name]
        value = self._dequantized(part.stored, part.expert)
        kind, (heads, groups) = _kind(part.stored), self._heads
        if self._is_transposed(part.stored, value.shape):
            return value.T
        if self._architecture in ("llama", "smollm3") and kind in ("attn_q", "attn_k"):
            # Rotary pairs are neighbors there, and half of the channels apart in Hugging Face's.
            return _swapped(value, [heads if kind == "attn_q" else groups, -1, 2], 1)
        if self._architecture == "gptneox" and kind == "attn_qkv":
            # All queries, all keys and all values; in Hugging Face's form the three of each head.
            return _swapped(value, [3, heads, -1], 0)
        if self._architecture.startswith("gemma") and kind.endswith("norm"):
            return value - 1.0  # stored as what is multiplied by
        return value.reshape(self.shape(name))

    def _dequantized(self, stored: str, expert: Optional[int]) -> np.ndarray:
        tensor = self._stored[stored]
        data = tensor.data if expert is None else tensor.data[expert]
        sizes = self._sizes(stored) if expert is None else self._sizes(stored)[1:]
        return self._gguf.quants.dequantize(data, tensor.tensor_type).reshape(sizes)

    def _is_transposed(self, stored: str, sizes: tuple[int, ...]) -> bool:
        """Returns whether a kernel is the other way around than in Hugging Face's form."""
        return self._architecture == "gpt2" and stored.startswith("blk.") and len(sizes) == 2


def _kind(stored: str) -> str:
    """Returns what a tensor is, such as "attn_q" or "output_norm"."""
    # Behind it comes "weight" or "bias", before it perhaps the number of a block.
    return stored.split(".")[-2]


def _swapped(value: np.ndarray, sizes: list[int], axis: int) -> np.ndarray:
    """Splits the first axis into several, and swaps two neighbors of these."""
    split = value.reshape([*sizes, *value.shape[1:]])
    return np.swapaxes(split, axis, axis + 1).reshape(value.shape)
