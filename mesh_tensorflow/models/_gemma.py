"""Gemma: scaled embeddings, norms that scale by 1 plus a variable, and before and after layers.

Gemma team, "Gemma: open models based on Gemini research and technology" (2024); "Gemma 2: improving
open language models at a practical size" (2024), with soft caps of logits, and a window in every
second layer; and "Gemma 3 technical report" (2025), which normalizes queries and keys, and whose
layers with a window have rotary positions of their own. The latter's models of texts alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mesh_tensorflow.layers import RotaryEmbedding
from mesh_tensorflow.models._decoder import Decoder, rotary_of, windows_of
from mesh_tensorflow.models._family import Config, Form
from mesh_tensorflow.models._llama import NAMES, QK_NORM

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
# What missing fields mean, where it is not what they mean in most families.
_MISSING: dict[str, dict[str, Any]] = {
    "gemma": {},
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {"rope_theta": 1e6, "max_position_embeddings": 131072},
}


def form_of(config: Config) -> Form:
    """Returns the Form of a model.

    Args:
      config: its Config.

    Raises:
      ValueError: a field has a value that is not known.
    """
    kind = config.get("model_type")
    config.must_be("use_bidirectional_attention", False)
    if kind == "gemma3_text":
        # transformers reads the field for Gemma 2, and computes nothing with it here.
        config.must_be("attn_logit_softcapping", None)
    usual = {"max_position_embeddings": 8192, "head_dim": 256, "tie_word_embeddings": True}
    config.complete({**usual, **_MISSING[kind]})
    decoder = Decoder.of(
        config,
        _NAMES_OF[kind],
        layer="model.layers.{}.",
        prefix="model.",
        activation=_activation(config),
        unit_offset=True,
        scaled_embedding=True,
        **({} if kind == "gemma" else _of_logits(config)),
    )
    windows = [0] * decoder.blocks if kind == "gemma" else _windows(config)
    rotary = {window: _rotary(config, decoder.d_kv, window) for window in windows}
    return dataclasses.replace(decoder, windows=windows, rotary=rotary).form


def _activation(config: Config) -> Any:
    # The older field says "gelu" where it means the other one's function.
    older = config.get("hidden_act", "gelu")
    return config.get("hidden_activation", "gelu_pytorch_tanh" if older == "gelu" else older)


def _of_logits(config: Config) -> dict[str, Any]:
    """Returns how logits are scaled, as attributes of a Decoder."""
    caps = {"soft_cap": "attn_logit_softcapping", "logits_soft_cap": "final_logit_softcapping"}
    return {
        # Not always the channels of a head: the largest models divide by those of d_model / heads.
        "query_scale": config.real("query_pre_attn_scalar", 256) ** -0.5,
        **{ours: config.real(name) for ours, name in caps.items() if config.get(name) is not None},
    }


def _windows(config: Config) -> list[int]:
    """Returns how many positions the queries of each block see; 0 for all."""
    # Before `layer_types`, every second layer of Gemma 2 had a window, and all but each sixth of
    # Gemma 3.
    turn = 2
    if config.get("model_type") == "gemma3_text":
        older = config.get("_sliding_window_pattern", 6)
        turn = config.number("sliding_window_pattern", older)
    # The last block of each turn sees all positions.
    return windows_of(config, config.number("sliding_window", 4096), lambda i: (i + 1) % turn != 0)


def _rotary(config: Config, key_size: int, window: int) -> RotaryEmbedding:
    """Returns the rotary positions of blocks with a window: Gemma 3's have a base of their own."""
    rotary = rotary_of(config, key_size, window)
    if config.get("model_type") != "gemma3_text":
        return rotary
    # Since release 5 of transformers `rope_parameters` has the bases of both types of layers.
    base = config.real("rope_local_base_freq", 10000.0)
    return rotary if config.get("rope_parameters") or not window else RotaryEmbedding(base)
