"""Gemma: scaled embeddings, norms that scale by 1 plus a variable, and before and after layers.

Gemma team, "Gemma: open models based on Gemini research and technology" (2024); "Gemma 2: improving
open language models at a practical size" (2024), with soft caps of logits, and a window in every
second layer; and "Gemma 3 technical report" (2025), which normalizes queries and keys, and whose
layers with a window have rotary positions of their own. The latter's models of texts alone.
"""

from __future__ import annotations

from typing import Any

from mesh_tensorflow.models._decoder import Decoder
from mesh_tensorflow.models._family import Config, Form
from mesh_tensorflow.models._llama import NAMES, QK_NORM, rotary

MODEL_TYPES = ("gemma", "gemma2", "gemma3_text")
_LATER = {
    **NAMES,
    "post_norm": "post_attention_layernorm",
    "ff_norm": "pre_feedforward_layernorm",
    "ff_post_norm": "post_feedforward_layernorm",
}
_NAMES_OF = {
    "gemma": NAMES,
    "gemma2": _LATER,
    "gemma3_text": {**_LATER, **QK_NORM},
}
_WINDOW, _WHOLE = "sliding_attention", "full_attention"  # the types of layers


def form_of(config: Config) -> Form:
    """Returns the Form of a model.

    Args:
      config: its Config.

    Raises:
      ValueError: a field has a value that is not known.
    """
    kind = config.get("model_type")
    config.must_be("use_bidirectional_attention", False)
    heads = config.number("num_attention_heads")
    key_size = config.number("head_dim", 256)
    blocks = config.number("num_hidden_layers")
    windows = [0] * blocks if kind == "gemma" else _windows(config, blocks)
    scale = None if kind == "gemma" else config.number("query_pre_attn_scalar", 256) ** -0.5
    return Decoder(
        config,
        _NAMES_OF[kind],
        layer="model.layers.{}.",
        blocks=blocks,
        d_model=config.number("hidden_size"),
        d_ff=config.number("intermediate_size"),
        d_kv=key_size,
        heads=heads,
        groups=config.number("num_key_value_heads", heads),
        vocab=config.number("vocab_size"),
        max_length=config.number("max_position_embeddings", 8192),
        # An older field says "gelu" and means this one.
        activation=config.get("hidden_activation", "gelu_pytorch_tanh"),
        gated=True,
        epsilon=config.get("rms_norm_eps", 1e-6),
        unit_offset=True,
        rotary=_rotary(config, key_size, set(windows)),
        windows=windows,
        biases="qkvo" if config.get("attention_bias") else "",
        query_scale=scale,
        soft_cap=config.get("attn_logit_softcapping"),
        logits_soft_cap=config.get("final_logit_softcapping"),
        scaled_embedding=True,
        tied=bool(config.get("tie_word_embeddings", True)),
        ignored=r"\.rotary_emb\.inv_freq$",
    ).form


def _windows(config: Config, blocks: int) -> list[int]:
    """Returns how many positions the queries of each block see; 0 for all."""
    # Before `layer_types`, every second layer of Gemma 2 had a window, and all but each sixth of
    # Gemma 3.
    turn = 2 if config.get("model_type") == "gemma2" else config.number("sliding_window_pattern", 6)
    usual = [_WHOLE if (i + 1) % turn == 0 else _WINDOW for i in range(blocks)]
    types = config.get("layer_types", usual)
    sizes = {_WINDOW: config.number("sliding_window", 4096), _WHOLE: 0}
    if not isinstance(types, list) or len(types) != blocks or set(types) - {*sizes}:
        raise ValueError(
            f"{config.path}: config.json has layer_types={types!r}, which is no list of "
            f"num_hidden_layers={blocks} names, each {_WINDOW!r} or {_WHOLE!r}"
        )
    return [sizes[name] for name in types]


def _rotary(config: Config, key_size: int, windows: set[int]) -> dict[int, Any]:
    """Returns the rotary positions by windows: those of a window have a base of their own."""
    if config.get("model_type") != "gemma3_text":
        return dict.fromkeys(windows, rotary(config, key_size))
    given = config.get("rope_parameters") or {
        _WINDOW: {"rope_theta": config.get("rope_local_base_freq", 10000.0)},
        _WHOLE: {
            "rope_theta": config.get("rope_theta", 1000000.0),
            **(config.get("rope_scaling") or {}),
        },
    }
    kinds = {window: given.get(_WINDOW if window else _WHOLE, {}) for window in windows}
    return {window: rotary(config, key_size, **numbers) for window, numbers in kinds.items()}
