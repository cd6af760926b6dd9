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
from mesh_tensorflow.models._decoder import Decoder, rotary_of
from mesh_tensorflow.models._family import Config, Form

# By model type, Hugging Face's names of the parts.
_NAMES: dict[str, dict[str, str]] = {
    "gpt2": {
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "logits": "lm_head",
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
        "logits": "lm_head",
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
        "embedding_in": "model.decoder.project_in",
        "embedding_out": "model.decoder.project_out",
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
# By attributes of a Decoder: the names of fields in config.json.
_GPT = {
    "d_model": "n_embd",
    "heads": "n_head",
    "blocks": "n_layer",
    "max_length": "n_positions",
    "d_ff": "n_inner",
    "activation": "activation_function",
    "epsilon": "layer_norm_epsilon",
}
_FIELDS: dict[str, dict[str, str]] = {
    "gpt2": _GPT,
    "gptj": _GPT,
    "gpt_neo": {
        "heads": "num_heads",
        "blocks": "num_layers",
        "activation": "activation_function",
        "epsilon": "layer_norm_epsilon",
    },
    "gpt_neox": {"epsilon": "layer_norm_eps"},
    "opt": {"d_ff": "ffn_dim", "activation": "activation_function"},
}
# What missing fields mean; a number of hidden units is four times that of channels.
_MISSING: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_positions": 1024,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    },
    "gpt_neo": {"activation_function": "gelu_new", "tie_word_embeddings": True},
    "gpt_neox": {
        "hidden_act": "gelu",
        "attention_bias": True,
        "rotary_pct": 0.25,
    },
    "gptj": {"activation_function": "gelu_new"},
    "opt": {"activation_function": "relu", "tie_word_embeddings": True},
}
# What the fields of a family must say, as nothing else is known.
_MUST_BE: dict[str, dict[str, Any]] = {
    "gpt2": {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    },
    "gptj": {"tie_word_embeddings": False, "rotary": True, "scale_attn_weights": True},
    "opt": {"layer_norm_elementwise_affine": True},
}
# How names begin, but in folders of models without logits; and those of a layer, behind that.
_BEGINNINGS = {
    "gpt_neox": ("gpt_neox.", "layers.{}."),
    "opt": ("model.", "decoder.layers.{}."),
}


def form_of(config: Config) -> Form:
    """Returns the Form of a model.

    Args:
      config: its Config.

    Raises:
      ValueError: a field has a value that is not known.
    """
    kind = config.get("model_type")
    for field, value in _MUST_BE.get(kind, {}).items():
        config.must_be(field, value)
    config.complete(_MISSING[kind])
    fields = _FIELDS[kind]
    d_model, heads = (
        fields.get("d_model", "hidden_size"),
        fields.get("heads", "num_attention_heads"),
    )
    key_size = config.multiple(d_model, heads) // config.number(heads)
    prefix, layer = _BEGINNINGS.get(kind, ("transformer.", "h.{}."))
    return Decoder.of(
        config,
        _names(config, kind),
        fields,
        prefix=prefix,
        layer=prefix + layer,
        d_ff=config.number(fields.get("d_ff", "intermediate_size"), 4 * config.number(d_model)),
        d_kv=key_size,
        groups=config.number(heads),
        gated=False,
        # No field tells OPT's, which is PyTorch's own.
        epsilon=1e-5 if kind == "opt" else config.real(fields["epsilon"], 1e-5),
        rms=False,
        ff_biases=config.is_true("enable_bias", True) if kind == "opt" else True,
        # Masks and tables that older folders have.
        ignored=r"\.(attn|attention)\.(masked_)?bias$|\.rotary_emb\.inv_freq$",
        **_parts(config, kind, key_size),
    ).form


def _names(config: Config, kind: str) -> dict[str, str]:
    """Returns Hugging Face's names of the parts that the model has."""
    names = dict(_NAMES[kind])
    if kind != "opt":
        return names
    before = config.is_true("do_layer_norm_before", True)
    if config.is_true("_remove_final_layer_norm", False) or not before:
        del names["final_norm"]
    if not before:
        # Of the 350m alone, as in the first transformers: norms of sums.
        names["post_norm"], names["ff_post_norm"] = names.pop("norm"), names.pop("ff_norm")
    return names


def _parts(config: Config, kind: str, key_size: int) -> dict[str, Any]:
    """Returns the attributes of a Decoder that tell these families apart."""
    if kind == "gpt2":
        config.get("reorder_and_upcast_attn")  # how it is computed, not what
        # Its kernels are those of convolutions of width 1, [inputs, outputs].
        return {"biases": "qkvo", "transposed": False}
    if kind == "gpt_neo":
        config.get("attention_layers")  # the same as attention_types, written out
        # Trained without the usual d_kv ** -0.5.
        return {"biases": "o", "query_scale": 1.0, "windows": _windows(config)}
    if kind == "opt":
        # fairseq, which trained it, begins behind the row of padding's id, 1.
        parts: dict[str, Any] = {"position_offset": 2, "norms_sums": True}
        parts["biases"] = "qkvo" if config.is_true("enable_bias", True) else ""
        d_model = config.number("hidden_size")
        if (size := config.number("word_embed_proj_dim", d_model)) != d_model:
            config.must_be("tie_word_embeddings", True)
            parts["embedding_size"] = size
        return parts
    if kind == "gptj":
        turned = config.number("rotary_dim", key_size)
        # Pairs of channels are neighbors, as in RoFormer; others' are half of the channels apart.
        rotary = RotaryEmbedding(fraction=turned / key_size, interleaved=True)
        return {"logits_bias": True, "biases": "", "parallel": True, "rotary": {0: rotary}}
    # Releases before 5 of transformers have names of their own.
    older = {"partial_rotary_factor": config.real("rotary_pct")}
    older["rope_theta"] = config.real("rotary_emb_base", 10000.0)
    config.complete(older)
    return {
        "by_heads": True,
        "parallel": config.is_true("use_parallel_residual", True),
        "rotary": {0: rotary_of(config, key_size, partial=True)},
    }


def _windows(config: Config) -> list[int]:
    """Returns how many positions the queries of each block see; 0 for all."""
    blocks, types = config.number("num_layers"), config.get("attention_types")
    try:
        # [[["global", "local"], 6]] is this pair six times: the layers take turns.
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
