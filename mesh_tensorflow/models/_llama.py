"""Llama and what is built like it: RMS norms, rotary positions, grouped heads, gated units.

Touvron et al., "LLaMA: open and efficient foundation language models" (2023). Also SmolLM; Mistral
(Jiang et al., "Mistral 7B", 2023), whose queries see a window of positions; Qwen 2 (Yang et al.,
"Qwen2 technical report", 2024), with biases of queries, keys and values; and Qwen 3 ("Qwen3
technical report", 2025), which normalizes queries and keys.
"""

from __future__ import annotations

import functools
from typing import Any, Optional

from mesh_tensorflow.layers import RotaryEmbedding
from mesh_tensorflow.models._family import Config, Form, Weight
from mesh_tensorflow.transformer import transformer, transformer_layers

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# By Hugging Face's names of activations: the functions of the two factors of gated units.
_GATED = {"silu": ["silu", "linear"], "gelu_pytorch_tanh": ["gelu", "linear"]}


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
        "biases": "qkvo" if config.get("attention_bias") else "",
    }
    if config.get("model_type") == "qwen2":
        attention["biases"] = "qkv"  # no field of its config.json tells it
    if config.get("model_type") == "qwen3":
        attention["qk_norm_epsilon"] = config.get("rms_norm_eps", 1e-6)
    cls: Any = transformer_layers.SelfAttention
    window = _window(config)
    if window is not None:
        cls = transformer_layers.LocalSelfAttention
        attention["radius"] = window
    tied = bool(config.get("tie_word_embeddings", False))
    blocks = config.number("num_hidden_layers")
    make = functools.partial(_model, config, sizes, [cls, attention], blocks, tied)
    weights = [
        *_OUTER,
        *([] if tied else [_LOGITS]),
        *(w for i in range(blocks) for w in _block(i, cls.__name__, query, memory, attention)),
    ]
    return Form(make, weights, sizes)


def _window(config: Config) -> Optional[int]:
    """Returns how many positions a query sees, the last of them its own; None for all."""
    if str(config.get("model_type")).startswith("qwen"):
        # Their window is for some of the layers, and is known only where it is off.
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


def _model(
    config: Config,
    sizes: dict[str, int],
    attention: list[Any],
    blocks: int,
    tied: bool,
    layout: Any,
    mesh_shape: Any,
) -> transformer.Unitransformer:
    activation = config.get("hidden_act", "silu")
    if activation not in _GATED:
        raise ValueError(
            f"{config.path}: config.json has hidden_act={activation!r}, which is none of "
            f"{', '.join(_GATED)}"
        )
    feed_forward = {"hidden_size": sizes["d_ff"], "activation": _GATED[activation]}
    epsilon = config.get("rms_norm_eps", 1e-6)
    norm = functools.partial(transformer.sublayer_rms_norm, epsilon=epsilon)
    around = [norm, transformer.sublayer_call_layer, transformer.sublayer_residual]
    stack = transformer.make_layer_stack(
        layers=[attention, [transformer_layers.DenseReluDense, feed_forward]],
        layer_stack_cls=functools.partial(
            transformer.LayerStack,
            sublayers_initial=[],
            sublayers_per_layer=around,
            sublayers_final=[norm],
        ),
        num_layers=blocks,
    )
    return transformer.Unitransformer(
        stack,
        d_model=sizes["d_model"],
        input_vocab_size=sizes["vocab"],
        output_vocab_size=sizes["vocab"],
        autoregressive=True,
        max_length=config.number("max_position_embeddings", 2048),
        shared_embedding_and_softmax_weights=tied,
        positional_embedding=False,
        vocab_divisor=1,
        z_loss=0.0,
        vocab_embedding_cls=transformer.UnscaledVocabEmbedding,
        layout=layout,
        mesh_shape=mesh_shape,
    )


_OUTER = [
    Weight("transformer/embedding", "vocab d_model", "model.embed_tokens.weight", "vocab d_model"),
    Weight("transformer/rms_norm/scale", "d_model", "model.norm.weight", "d_model"),
]
_LOGITS = Weight("transformer/logits/kernel", "d_model vocab", "lm_head.weight", "vocab d_model")


def _block(
    number: int, layer: str, query: list[str], memory: list[str], attention: dict[str, Any]
) -> list[Weight]:
    """Returns the Weights of a block.

    Args:
      number: its number.
      layer: the name of the class of its attention.
      query: the dimensions of heads of queries.
      memory: the same of keys and values.
      attention: the arguments of its attention.
    """
    q, kv, d_model = [*query, "d_kv"], [*memory, "d_kv"], ["d_model"]
    dense = "layer_001/DenseReluDense"
    # From which dimensions to which.
    projections = {"q": (d_model, q), "k": (d_model, kv), "v": (d_model, kv), "o": (q, d_model)}
    # (our name, Hugging Face's name, dimensions of the input or none, dimensions of the output)
    rows: list[tuple[str, str, list[str], list[str]]] = [
        ("layer_000/rms_norm/scale", "input_layernorm.weight", [], d_model),
        *(
            (f"layer_000/{layer}/{name}", f"self_attn.{name}_proj.weight", *dims)
            for name, dims in projections.items()
        ),
        ("layer_001/rms_norm/scale", "post_attention_layernorm.weight", [], d_model),
        (f"{dense}/wi_0/kernel", "mlp.gate_proj.weight", d_model, ["d_ff"]),
        (f"{dense}/wi_1/kernel", "mlp.up_proj.weight", d_model, ["d_ff"]),
        (f"{dense}/wo/kernel", "mlp.down_proj.weight", ["d_ff"], d_model),
        *(
            (f"layer_000/{layer}/{name}_bias", f"self_attn.{name}_proj.bias", [], dims[1])
            for name, dims in projections.items()
            if name in attention["biases"]
        ),
    ]
    if "qk_norm_epsilon" in attention:
        rows += [
            (f"layer_000/{layer}/{name}_norm", f"self_attn.{name}_norm.weight", [], ["d_kv"])
            for name in "qk"
        ]
    return [
        Weight(
            f"transformer/block_{number:03d}/{ours}",
            " ".join([*inputs, *outputs]),
            f"model.layers.{number}.{theirs}",
            # PyTorch computes x W^T, and so stores [out, in], with heads and channels as one.
            " ".join("*".join(dims) for dims in (outputs, inputs) if dims),
        )
        for ours, theirs, inputs, outputs in rows
    ]
