"""Llama and what is built like it: RMS norms, rotary positions, grouped heads, gated units.

Touvron et al., "LLaMA: open and efficient foundation language models" (2023). Also SmolLM; Mistral
(Jiang et al., "Mistral 7B", 2023), whose queries see a window of positions, and Mixtral ("Mixtral
of experts", 2024); Qwen 2 (Yang et al., "Qwen2 technical report", 2024), with biases of queries,
keys and values, also with experts, one of which all tokens go to; Qwen 3 ("Qwen3 technical report",
2025), which normalizes queries and keys, also with experts; Phi 3 (Abdin et al., "Phi-3 technical
report", 2024), whose files have queries, keys and values in one tensor; and OLMo 2 (Team OLMo, "2
OLMo 2 Furious", 2024), whose norms follow their layers.
"""

from __future__ import annotations

from typing import Any

from mesh_tensorflow.layers import RotaryEmbedding
from mesh_tensorflow.models._decoder import Decoder, Experts
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
}
MODEL_TYPES = tuple(_NAMES_OF)


def form_of(config: Config) -> Form:
    """Returns the Form of a model.

    Args:
      config: its Config.

    Raises:
      ValueError: a field has a value that is not known.
    """
    config.must_be("mlp_bias", False)
    kind = config.get("model_type")
    heads = config.number("num_attention_heads")
    d_model = config.number("hidden_size")
    key_size = config.number("head_dim", max(1, d_model // heads))
    blocks = config.number("num_hidden_layers")
    window = _window(config)
    names = {**NAMES, **_NAMES_OF[kind]}
    return Decoder(
        config,
        {part: name for part, name in names.items() if name is not None},
        layer="model.layers.{}.",
        blocks=blocks,
        d_model=d_model,
        d_ff=config.number("intermediate_size"),
        d_kv=key_size,
        heads=heads,
        groups=config.number("num_key_value_heads", heads),
        vocab=config.number("vocab_size"),
        max_length=config.number("max_position_embeddings", 2048),
        activation=config.get("hidden_act", "silu"),
        gated=True,
        epsilon=config.get("rms_norm_eps", 1e-6),
        qk_norm_over_heads=kind == "olmo2",
        rotary={window: rotary(config, key_size)},
        windows=[window] * blocks,
        biases=_biases(config),
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=_experts(config),
        ignored=r"\.rotary_emb\.inv_freq$",  # tables that older folders have
    ).form


def _window(config: Config) -> int:
    """Returns how many positions a query sees, the last of them its own; 0 for all."""
    if str(config.get("model_type")).startswith("qwen"):
        # Their window is for some of the layers, and is known only where it is off.
        config.must_be("use_sliding_window", False)
        return 0
    return 0 if config.get("sliding_window") is None else config.number("sliding_window")


def _biases(config: Config) -> str:
    """Returns the projections of attention that have biases."""
    kind = config.get("model_type")
    # No field of Qwen 2's config.json tells its biases.
    if kind == "qwen2" or (kind == "qwen2_moe" and config.get("qkv_bias", True)):
        return "qkv"
    return "qkvo" if config.get("attention_bias") else ""


def _experts(config: Config) -> Any:
    kind, loss = config.get("model_type"), config.get("router_aux_loss_coef", 0.001)
    if kind == "mixtral":
        config.must_be("router_jitter_noise", 0.0)
        number, per_token = config.number("num_local_experts"), config.number("num_experts_per_tok")
        return Experts(number, per_token, config.number("intermediate_size"), loss)
    if kind in ("qwen2_moe", "qwen3_moe"):
        # Else, some of the blocks have feed-forward layers without experts.
        config.must_be("decoder_sparse_step", 1)
        config.must_be("mlp_only_layers", [])
        # Release 5 of transformers writes the other name.
        name = "num_experts" if config.get("num_experts") else "num_local_experts"
        number, per_token = config.number(name), config.number("num_experts_per_tok")
        return Experts(
            number,
            per_token,
            config.number("moe_intermediate_size"),
            loss,
            normalized=bool(config.get("norm_topk_prob", False)),
            shared=config.number("shared_expert_intermediate_size") if kind == "qwen2_moe" else 0,
        )
    return None


def rotary(config: Config, key_size: int, **given: Any) -> RotaryEmbedding:
    """Returns the rotary positions that config.json describes.

    Args:
      config: a Config.
      key_size: the number of channels of a head.
      **given: what it says of them elsewhere than in its usual fields: "rope_theta", and the
        numbers of a scaling.

    Raises:
      ValueError: they are of a kind that is not known, or a number is none.
    """
    try:
        # Since release 5 of transformers one field has the base and the scaling; before, each had
        # one.
        scaling = dict(given or config.get("rope_parameters") or config.get("rope_scaling") or {})
        base = scaling.pop("rope_theta", None) or config.get("rope_theta", 10000.0)
        fraction = scaling.pop("partial_rotary_factor", None)
        if fraction is None:
            fraction = config.get("partial_rotary_factor", 1.0)
        _complete(config, scaling)
        made = RotaryEmbedding(base, fraction, scaling=scaling)
        for length in (0, 2**40):  # numbers that are none are found here
            made.frequencies(int(key_size * fraction), length=length)
        return made
    except (TypeError, ValueError) as e:
        raise ValueError(f"{config.path}: config.json has unknown rotary positions. {e}") from e


def _complete(config: Config, scaling: dict[str, Any]) -> None:
    """Adds what numbers of a scaling follow from other fields of config.json."""
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None)
    scaling.pop("type", None)
    if kind == "su" or (kind == "yarn" and config.get("model_type") == "phi3"):
        kind = "longrope"  # older names of it in Phi's folders
    if kind in ("yarn", "longrope"):
        length = config.number("max_position_embeddings")
        original = "original_max_position_embeddings"
        scaling.setdefault(original, config.get(original, length))
        if kind == "longrope" and scaling.get("factor") is None:
            scaling["factor"] = length / scaling[original]
    if kind is not None:
        scaling["rope_type"] = kind
