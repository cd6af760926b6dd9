"""Llama and what is built like it: RMS norms, rotary positions, grouped heads, gated units.

Touvron et al., "LLaMA: open and efficient foundation language models" (2023). Also SmolLM; Mistral
(Jiang et al., "Mistral 7B", 2023), whose queries see a window of positions, and Mixtral ("Mixtral
of experts", 2024); Qwen 2 (Yang et al., "Qwen2 technical report", 2024), with biases of queries,
keys and values, also with experts, one of which all tokens go to; Qwen 3 ("Qwen3 technical report",
2025), which normalizes queries and keys, also with experts; Phi 3 (Abdin et al., "Phi-3 technical
report", 2024), whose files have queries, keys and values in one tensor; OLMo 2 (Team OLMo, "2 OLMo
2 Furious", 2024), whose norms follow their layers; and SmolLM 3 (Bakouch et al., "SmolLM3: smol,
multilingual, long-context reasoner", 2025), of which each fourth block has no positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from mesh_tensorflow._core.errors import is_whole
from mesh_tensorflow.models._decoder import Decoder, Experts, rotary_of, windows_of
from mesh_tensorflow.models._family import Config, Form

# Hugging Face's names of the parts.
NAMES = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "logits": "lm_head",
    "norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "wi_0": "mlp.gate_proj",
    "wi_1": "mlp.up_proj",
    "wo": "mlp.down_proj",
}
_EXPERTS = {
    "router": "mlp.gate",
    "wi_0": "mlp.experts.{}.gate_proj",
    "wi_1": "mlp.experts.{}.up_proj",
    "wo": "mlp.experts.{}.down_proj",
    # Of blocks without experts, where there are some.
    **{f"dense_{part}": NAMES[part] for part in ("wi_0", "wi_1", "wo")},
}
QK_NORM = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
# By model type, what names there are beside these, or instead; None where there is no such part.
_NAMES_OF: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {
        "router": "block_sparse_moe.gate",
        "wi_0": "block_sparse_moe.experts.{}.w1",
        "wi_1": "block_sparse_moe.experts.{}.w3",
        "wo": "block_sparse_moe.experts.{}.w2",
    },
    "olmo2": {
        **QK_NORM,
        "norm": None,
        "ff_norm": None,
        "post_norm": "post_attention_layernorm",
        "ff_post_norm": "post_feedforward_layernorm",
    },
    "phi3": {"qkv": "self_attn.qkv_proj", "wi_0_1": "mlp.gate_up_proj"},
    "qwen2": {},
    "qwen2_moe": {
        **_EXPERTS,
        "shared_wi_0": "mlp.shared_expert.gate_proj",
        "shared_wi_1": "mlp.shared_expert.up_proj",
        "shared_wo": "mlp.shared_expert.down_proj",
        "shared_gate": "mlp.shared_expert_gate",
    },
    "qwen3": QK_NORM,
    "qwen3_moe": {**QK_NORM, **_EXPERTS},
    "smollm3": {},
}
MODEL_TYPES = tuple(_NAMES_OF)


# What missing fields mean, where it is not what they mean in most families.
_MISSING: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "olmo2": {"rms_norm_eps": 1e-5},
    "phi3": {"rms_norm_eps": 1e-5},
    "smollm3": {
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
    },
    **{kind: {"sliding_window": 4096} for kind in MODEL_TYPES if kind.startswith("qwen")},
}


def form_of(config: Config) -> Form:
    """Returns the Form of a model.

    Args:
      config: its Config.

    Raises:
      ValueError: a field has a value that is not known.
    """
    kind = config.get("model_type")
    config.complete(_MISSING.get(kind, {}))
    names = {**NAMES, **_NAMES_OF[kind]}
    options = _experts(config)
    # No field of Qwen 2's config.json tells its biases.
    if kind == "qwen2" or (kind == "qwen2_moe" and config.is_true("qkv_bias", True)):
        options["biases"] = "qkv"
    if kind in ("llama", "smollm3"):
        options["ff_biases"] = config.is_true("mlp_bias", False)
    decoder = Decoder.of(
        config,
        {part: name for part, name in names.items() if name is not None},
        layer="model.layers.{}.",
        prefix="model.",
        qk_norm_over_heads=kind == "olmo2",
        **options,
    )
    unturned = _without_rotary(config, decoder.blocks) if kind == "smollm3" else []
    windows = _windows(config, decoder.blocks, unturned)
    # Phi 4 mini turns a part of the channels.
    rotary = {w: rotary_of(config, decoder.d_kv, partial=kind == "phi3") for w in windows}
    return dataclasses.replace(decoder, windows=windows, rotary=rotary, unturned=unturned).form


def _without_rotary(config: Config, blocks: int) -> list[int]:
    """Returns the numbers of the blocks without rotary positions."""
    interval = config.number("no_rope_layer_interval", 4)
    name = "no_rope_layers"  # which has 1 for blocks that have them
    turned = config.get(name, [int((i + 1) % interval != 0) for i in range(blocks)])
    is_list = isinstance(turned, list) and len(turned) >= blocks
    if not is_list or any(not isinstance(x, int) or x not in (0, 1) for x in turned):
        raise ValueError(
            f"{config.path}: config.json has {name}={turned!r}, which is no list of 0 and 1 for "
            f"each of num_hidden_layers={blocks}"
        )
    return [number for number in range(blocks) if not turned[number]]


def _windows(config: Config, blocks: int, unturned: Sequence[int]) -> list[int]:
    """Returns how many positions the queries of each block see; 0 for all."""
    kind = config.get("model_type")
    if kind in ("mistral", "mixtral", "phi3") and config.get("sliding_window") is not None:
        return [config.number("sliding_window")] * blocks
    if kind == "smollm3":
        return _optional_windows(config, lambda block, layers: block in unturned)
    if kind.startswith("qwen"):
        return _optional_windows(config, _QWEN[kind])
    return [0] * blocks


# By model type: whether a block has a window, by its number and `max_window_layers`.
# They are as the code of each family in transformers has them, of which no field tells.
_QWEN: dict[str, Callable[[int, int], bool]] = {
    "qwen2": lambda block, layers: block >= layers,
    "qwen3": lambda block, layers: block >= layers,
    "qwen2_moe": lambda block, layers: block < layers and block % 2 == 0,
    "qwen3_moe": lambda block, layers: True,
}


def _optional_windows(config: Config, usual: Callable[[int, int], bool]) -> list[int]:
    """Returns the same where a window is for some of the blocks, and off in most models."""
    size, layers = config.get("sliding_window"), config.get("max_window_layers", 28)
    if not config.is_true("use_sliding_window", False) or size is None:
        windows = windows_of(config, 1, lambda block: False)
        if any(windows):
            raise ValueError(
                f"{config.path}: config.json has layer_types with windows, which are off without "
                "use_sliding_window=True and a sliding_window"
            )
        return windows
    for name, value, least in (("sliding_window", size, 1), ("max_window_layers", layers, 0)):
        if not is_whole(value, least):
            raise ValueError(
                f"{config.path}: config.json has {name}={value!r}, no integer from {least} on"
            )
    return windows_of(config, size, lambda block: usual(block, layers))


def _experts(config: Config) -> dict[str, Any]:
    """Returns the attributes of a Decoder with experts; none for a family without."""
    kind = config.get("model_type")
    loss = config.coefficient("router_aux_loss_coef", 0.001)
    if kind == "mixtral":
        # The inputs of its router are multiplied by random numbers in trainings.
        config.must_be("router_jitter_noise", 0.0)
        number, per_token = _numbers_of_experts(config, "num_local_experts")
        return {"experts": Experts(number, per_token, config.number("intermediate_size"), loss)}
    if kind not in ("qwen2_moe", "qwen3_moe"):
        return {}
    dense = _dense(config)
    # Release 5 of transformers writes the other name.
    name = "num_experts" if config.get("num_experts") else "num_local_experts"
    experts = Experts(
        *_numbers_of_experts(config, name),
        config.number("moe_intermediate_size"),
        loss,
        # Else gates are those of the softmax over all experts, whose chosen ones need not sum to 1.
        normalized=config.is_true("norm_topk_prob", False),
        shared=config.number("shared_expert_intermediate_size") if kind == "qwen2_moe" else 0,
    )
    return {"experts": experts, "dense": dense}


def _dense(config: Config) -> list[int]:
    """Returns the numbers of the blocks whose feed-forward layers have no experts."""
    blocks, step = config.parts("num_hidden_layers"), config.number("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(is_whole(number, 0) for number in dense):
        raise ValueError(
            f"{config.path}: config.json has mlp_only_layers={dense!r}, which is no list of "
            "numbers of layers"
        )
    return [number for number in range(blocks) if number in dense or (number + 1) % step]


def _numbers_of_experts(config: Config, name: str) -> tuple[int, int]:
    """Returns how many experts there are, by the name of that field, and how many a token has."""
    number, per_token = config.parts(name), config.number("num_experts_per_tok")
    if per_token > number:
        raise ValueError(
            f"{config.path}: config.json has num_experts_per_tok={per_token}, of {name}={number}"
        )
    return number, per_token
