"""GPT-2 and what is built like it: layer norms with biases, feed-forward layers without gates.

Radford et al., "Language models are unsupervised multitask learners" (2019). Also GPT-Neo (Black et
al., 2021), whose layers see all positions or, in turn, a window of them, and whose attention does
not scale its logits; GPT-J (Wang and Komatsuzaki, 2021) and GPT-NeoX with Pythia (Black et al.,
"GPT-NeoX-20B", 2022; Biderman et al., "Pythia", 2023), with rotary positions, which add attention
and feed-forward of the same input; and OPT (Zhang et al., "OPT: open pre-trained transformer
language models", 2022).
"""

from __future__ import annotations

from typing import Any

from mesh_tensorflow.layers import RotaryEmbedding
from mesh_tensorflow.models._decoder import Decoder
from mesh_tensorflow.models._family import Config, Form
from mesh_tensorflow.models._llama import rotary

# By model type, Hugging Face's names of the parts.
_NAMES: dict[str, dict[str, str]] = {
    "gpt2": {
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "norm": "ln_1",
        "qkv": "attn.c_attn",
        "o": "attn.c_proj",
        "ff_norm": "ln_2",
        "wi": "mlp.c_fc",
        "wo": "mlp.c_proj",
    },
    "gpt_neo": {
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "norm": "ln_1",
        "q": "attn.attention.q_proj",
        "k": "attn.attention.k_proj",
        "v": "attn.attention.v_proj",
        "o": "attn.attention.out_proj",
        "ff_norm": "ln_2",
        "wi": "mlp.c_fc",
        "wo": "mlp.c_proj",
    },
    "gpt_neox": {
        "embedding": "gpt_neox.embed_in",
        "final_norm": "gpt_neox.final_layer_norm",
        "logits": "embed_out",
        "norm": "input_layernorm",
        "qkv": "attention.query_key_value",
        "o": "attention.dense",
        "ff_norm": "post_attention_layernorm",
        "wi": "mlp.dense_h_to_4h",
        "wo": "mlp.dense_4h_to_h",
    },
    "gptj": {
        "embedding": "transformer.wte",
        "final_norm": "transformer.ln_f",
        "logits": "lm_head",
        "norm": "ln_1",
        "q": "attn.q_proj",
        "k": "attn.k_proj",
        "v": "attn.v_proj",
        "o": "attn.out_proj",
        "wi": "mlp.fc_in",
        "wo": "mlp.fc_out",
    },
    "opt": {
        "embedding": "model.decoder.embed_tokens",
        "positions": "model.decoder.embed_positions",
        "final_norm": "model.decoder.final_layer_norm",
        "logits": "lm_head",
        "norm": "self_attn_layer_norm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.out_proj",
        "ff_norm": "final_layer_norm",
        "wi": "fc1",
        "wo": "fc2",
    },
}
MODEL_TYPES = tuple(_NAMES)
# By what it says: the names of a field in config.json.
_GPT = {
    "d_model": "n_embd",
    "heads": "n_head",
    "blocks": "n_layer",
    "max_length": "n_positions",
    "d_ff": "n_inner",
    "activation": "activation_function",
    "epsilon": "layer_norm_epsilon",
}
_LATER = {
    "d_model": "hidden_size",
    "heads": "num_attention_heads",
    "blocks": "num_hidden_layers",
    "max_length": "max_position_embeddings",
    "d_ff": "intermediate_size",
    "activation": "hidden_act",
    "epsilon": "layer_norm_eps",
}
_FIELDS: dict[str, dict[str, str]] = {
    "gpt2": _GPT,
    "gptj": _GPT,
    "gpt_neo": {
        **_LATER,
        "heads": "num_heads",
        "blocks": "num_layers",
        "activation": "activation_function",
        "epsilon": "layer_norm_epsilon",
    },
    "gpt_neox": _LATER,
    "opt": {**_LATER, "d_ff": "ffn_dim", "activation": "activation_function"},
}
# What the fields of a family must say, as nothing else is known.
_MUST_BE: dict[str, dict[str, Any]] = {
    "gpt2": {
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    "gpt_neo": {"tie_word_embeddings": True},
    "gpt_neox": {"use_parallel_residual": True},
    "gptj": {"tie_word_embeddings": False},
    "opt": {
        "do_layer_norm_before": True,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
    },
}
_LAYERS = {
    "gpt_neox": "gpt_neox.layers.{}.",
    "opt": "model.decoder.layers.{}.",
}


def form_of(config: Config) -> Form:
    """Returns the Form of a model.

    Args:
      config: its Config.

    Raises:
      ValueError: a field has a value that is not known.
    """
    kind = config.get("model_type")
    for field, value in _MUST_BE[kind].items():
        config.must_be(field, value)
    fields = _FIELDS[kind]
    d_model = config.multiple(fields["d_model"], fields["heads"])
    if kind == "opt":
        config.must_be("word_embed_proj_dim", d_model)
    heads = config.number(fields["heads"])
    blocks = config.number(fields["blocks"])
    # Of those that have parts like the other ones' only by their config.json.
    options: dict[str, dict[str, Any]] = {
        "gpt2": {"biases": "qkvo", "transposed": False},
        "gpt_neo": {"biases": "o", "query_scale": 1.0},
        "gpt_neox": {"by_heads": True, "parallel": True},
        "gptj": {"logits_bias": True, "parallel": True},
        "opt": {"biases": "qkvo", "position_offset": 2},
    }
    further = options[kind]
    if kind == "gpt_neo":
        further["windows"] = _windows(config, blocks)
    if kind == "gpt_neox":
        further["biases"] = "qkvo" if config.get("attention_bias", True) else ""
        # Releases before 5 of transformers have a name of their own for the share.
        old = {"partial_rotary_factor": config.get("rotary_pct", 0.25)}
        old["rope_theta"] = config.get("rotary_emb_base", 10000)
        given = config.get("rope_parameters") or {**old, **(config.get("rope_scaling") or {})}
        further["rotary"] = {0: rotary(config, d_model // heads, **given)}
    if kind == "gptj":
        turned = config.number("rotary_dim", d_model // heads)
        further["rotary"] = {
            0: RotaryEmbedding(fraction=turned / (d_model // heads), interleaved=True)
        }
    tied = kind not in ("gpt_neox", "gptj")
    return Decoder(
        config,
        _NAMES[kind],
        layer=_LAYERS.get(kind, "transformer.h.{}."),
        blocks=blocks,
        d_model=d_model,
        d_ff=config.number(fields["d_ff"], 4 * d_model),
        d_kv=d_model // heads,
        heads=heads,
        groups=heads,
        vocab=config.number("vocab_size"),
        max_length=config.number(fields["max_length"]),
        activation=config.get(fields["activation"], "gelu_new"),
        gated=False,
        epsilon=config.get(fields["epsilon"], 1e-5),
        rms=False,
        ff_biases=True,
        tied=bool(config.get("tie_word_embeddings", tied)),
        prefix="" if kind in _LAYERS else "transformer.",
        # Masks and tables that older folders have.
        ignored=r"\.(attn|attention)\.(masked_)?bias$|\.rotary_emb\.inv_freq$",
        **further,
    ).form


def _windows(config: Config, blocks: int) -> list[int]:
    """Returns how many positions the queries of each block see; 0 for all."""
    types = config.get("attention_types")
    try:
        kinds = [kind for some, number in types for _ in range(number) for kind in some]
        sizes = {"global": 0, "local": config.number("window_size", 256)}
        windows = [sizes[kind] for kind in kinds]
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(
            f"{config.path}: config.json has attention_types={types!r}, which is no list such as "
            '[[["global", "local"], 6]]'
        ) from e
    if len(windows) != blocks:
        raise ValueError(
            f"{config.path}: config.json has num_layers={blocks}, but attention_types of "
            f"{len(windows)} layers"
        )
    return windows
