"""Llama and what is built like it: RMS norms, rotary positions, grouped heads, gated units.

Touvron et al., "LLaMA: open and efficient foundation language models" (2023). Also SmolLM; Mistral
(Jiang et al., "Mistral 7B", 2023), whose queries see a window of positions; Qwen 2 (Yang et al.,
"Qwen2 technical report", 2024), with biases of queries, keys and values; Qwen 3 ("Qwen3
technical report", 2025), which normalizes queries and keys; and Phi 3 (Abdin et al., "Phi-3
technical report", 2024), whose files have queries, keys and values in one tensor.
"""

from __future__ import annotations

import functools
from typing import Any, Optional

from mesh_tensorflow.layers import RotaryEmbedding
from mesh_tensorflow.models._family import Config, Form, Weight, decoder, kernel, vector
from mesh_tensorflow.transformer import transformer, transformer_layers

MODEL_TYPES = ("llama", "mistral", "phi3", "qwen2", "qwen3")
# Tables that older folders have, and what a tied model may have twice.
_IGNORED = r"\.rotary_emb\.inv_freq$"
_IGNORED_IF_TIED = rf"{_IGNORED}|^lm_head\.weight$"


def form_of(config: Config) -> Form:
    """Returns the Form of a model.

    Args:
      config: its Config.

    Raises:
      ValueError: a field has a value that is not known.
    """
    config.must_be("mlp_bias", False)
    heads = config.number("num_attention_heads")
    groups = config.number("num_key_value_heads", heads)
    d_model = config.number("hidden_size")
    key_size = config.number("head_dim", max(1, d_model // heads))
    if heads % groups:
        raise ValueError(
            f"{config.path}: config.json has num_attention_heads={heads}, which is no multiple of "
            f"num_key_value_heads={groups}"
        )
    # As attention layers have them: queries that share a head of the keys are a dimension.
    query, memory = ["heads", "query_heads"], ["heads"]
    if groups == heads:
        query = ["heads"]
    elif groups == 1:
        query, memory = ["heads"], []
    sizes = {
        "vocab": config.number("vocab_size"),
        "d_model": d_model,
        "d_ff": config.number("intermediate_size"),
        "d_kv": key_size,
        "heads": groups if len(query) > 1 else heads,
        "query_heads": heads // groups,
    }
    attention: dict[str, Any] = {
        "num_heads": heads,
        "num_memory_heads": 0 if groups == heads else groups,
        "key_value_size": key_size,
        "combine_dims": False,
        "fold_scaling_into_initializer": False,
        "rotary": _rotary(config, key_size),
        "biases": _biases(config),
    }
    if config.get("model_type") == "qwen3":
        attention["qk_norm_epsilon"] = config.get("rms_norm_eps", 1e-6)
    cls: Any = transformer_layers.SelfAttention
    window = _window(config)
    if window is not None:
        cls = transformer_layers.LocalSelfAttention
        attention["radius"] = window
    tied = bool(config.get("tie_word_embeddings", False))
    blocks = config.number("num_hidden_layers")
    feed_forward = {
        "hidden_size": sizes["d_ff"],
        "activation": [config.activation("hidden_act", "silu"), "linear"],
    }
    make = functools.partial(
        decoder,
        [[cls, attention], [transformer_layers.DenseReluDense, feed_forward]],
        blocks,
        functools.partial(
            transformer.sublayer_rms_norm, epsilon=config.get("rms_norm_eps", 1e-6)
        ),
        sizes,
        config.number("max_position_embeddings", 2048),
        tied,
        False,
    )
    block = functools.partial(
        _block, layer=cls.__name__, query=query, memory=memory, attention=attention,
        fused=config.get("model_type") == "phi3",
    )  # fmt: skip
    weights = [
        *_OUTER,
        *([] if tied else [_LOGITS]),
        *(weight for number in range(blocks) for weight in block(number)),
    ]
    return Form(make, weights, sizes, ignored=_IGNORED_IF_TIED if tied else _IGNORED)


def _biases(config: Config) -> str:
    """Returns the projections of attention that have biases."""
    if config.get("model_type") == "qwen2":
        return "qkv"
    return "qkvo" if config.get("attention_bias") else ""


def _window(config: Config) -> Optional[int]:
    """Returns how many positions a query sees, the last of them its own; None for all."""
    if str(config.get("model_type")).startswith("qwen"):
        # Their window is for some of the layers.
        config.must_be("use_sliding_window", False)
        return None
    return None if config.get("sliding_window") is None else config.number("sliding_window")


def _rotary(config: Config, key_size: int) -> RotaryEmbedding:
    try:
        # Since release 5 of transformers one field has the base and the scaling; before, each had
        # one.
        scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        base = scaling.pop("rope_theta", None) or config.get("rope_theta", 10000.0)
        if scaling.get("rope_type", scaling.get("type")) == "yarn":
            length = config.number("max_position_embeddings")
            scaling.setdefault("original_max_position_embeddings", length)
        made = RotaryEmbedding(base, scaling=scaling)
        made.frequencies(key_size)  # numbers that are none are found here
        return made
    except (TypeError, ValueError) as e:
        raise ValueError(f"{config.path}: config.json has unknown rotary positions. {e}") from e


_OUTER = [
    Weight("transformer/embedding", "vocab d_model", "model.embed_tokens.weight", "vocab d_model"),
    vector("transformer/rms_norm/scale", "model.norm.weight"),
]
_LOGITS = kernel("transformer/logits/kernel", "lm_head.weight", "d_model", "vocab")


def _block(
    number: int,
    layer: str,
    query: list[str],
    memory: list[str],
    attention: dict[str, Any],
    fused: bool,
) -> list[Weight]:
    """Returns the Weights of a block.

    Args:
      number: its number.
      layer: the name of the class of its attention.
      query: the dimensions of heads of queries.
      memory: the same of keys and values.
      attention: the arguments of its attention.
      fused: whether files have queries, keys and values in one tensor, and both factors of the
        gated units in another.
    """
    ours, theirs = f"transformer/block_{number:03d}", f"model.layers.{number}"
    attend, mlp = f"{ours}/layer_000/{layer}", f"{ours}/layer_001/DenseReluDense"
    q, kv = "*".join([*query, "d_kv"]), "*".join([*memory, "d_kv"])
    made = dict(zip("qkvo", [q, kv, kv, "d_model"]))
    units = {"wi_0": "gate_proj", "wi_1": "up_proj"}
    weights = [
        vector(f"{ours}/layer_000/rms_norm/scale", f"{theirs}.input_layernorm.weight"),
        vector(f"{ours}/layer_001/rms_norm/scale", f"{theirs}.post_attention_layernorm.weight"),
        kernel(f"{attend}/o", f"{theirs}.self_attn.o_proj.weight", q, "d_model"),
        kernel(f"{mlp}/wo/kernel", f"{theirs}.mlp.down_proj.weight", "d_ff", "d_model"),
    ]
    if fused:
        rows = {
            "self_attn.qkv_proj": [(f"{attend}/{name}", made[name]) for name in "qkv"],
            "mlp.gate_up_proj": [(f"{mlp}/{name}/kernel", "d_ff") for name in units],
        }
        for name, variables in rows.items():
            outs = [out for _, out in variables]
            weights += [
                kernel(variable, f"{theirs}.{name}.weight", "d_model", outs, part)
                for part, (variable, _) in enumerate(variables)
            ]
    else:
        for name in "qkv":
            other = f"{theirs}.self_attn.{name}_proj.weight"
            weights.append(kernel(f"{attend}/{name}", other, "d_model", made[name]))
        for name, other in units.items():
            other = f"{theirs}.mlp.{other}.weight"
            weights.append(kernel(f"{mlp}/{name}/kernel", other, "d_model", "d_ff"))
    for name in attention["biases"]:
        other = f"{theirs}.self_attn.{name}_proj.bias"
        weights.append(vector(f"{attend}/{name}_bias", other, made[name]))
    if "qk_norm_epsilon" in attention:
        for name in "qk":
            other = f"{theirs}.self_attn.{name}_norm.weight"
            weights.append(vector(f"{attend}/{name}_norm", other, "d_kv"))
    return weights
