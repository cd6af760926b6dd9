"""GPT-2 and GPT-Neo: layer norms, a learned vector for each position, feed-forward with biases.

Radford et al., "Language models are unsupervised multitask learners" (2019); Black et al.,
"GPT-Neo" (2021), whose layers may see all positions or, in turn, a window of them, and whose
attention does not scale its logits.
"""

from __future__ import annotations

import functools
from typing import Any

from mesh_tensorflow.models._family import Config, Form, Weight, decoder, kernel, vector
from mesh_tensorflow.transformer import transformer, transformer_layers

MODEL_TYPES = ("gpt2", "gpt_neo")
# Masks that older folders have, and the logits, which are of the embedding's variable.
_IGNORED = r"\.(attn|attention)\.(masked_)?bias$|^lm_head\.weight$"
_NORM = "true_layer_norm/layer_prepostprocess/layer_norm/layer_norm"


def form_of(config: Config) -> Form:
    """Returns the Form of a model.

    Args:
      config: its Config.

    Raises:
      ValueError: a field has a value that is not known.
    """
    config.must_be("tie_word_embeddings", True)
    is_neo = config.get("model_type") == "gpt_neo"
    # By what it counts: the names of a field in the two families.
    width, heads, blocks, length, inner = (
        ("hidden_size", "num_heads", "num_layers", "max_position_embeddings", "intermediate_size")
        if is_neo
        else ("n_embd", "n_head", "n_layer", "n_positions", "n_inner")
    )
    d_model, num_heads, num_blocks = (config.number(name) for name in (width, heads, blocks))
    if d_model % num_heads:
        raise ValueError(
            f"{config.path}: config.json has {width}={d_model}, which is no multiple of "
            f"{heads}={num_heads}"
        )
    sizes = {
        "vocab": config.number("vocab_size"),
        "d_model": d_model,
        "d_ff": config.number(inner, 4 * d_model),
        "d_kv": d_model // num_heads,
        "heads": num_heads,
        "max_length": config.number(length),
    }
    if not is_neo:
        for field, value in _KNOWN.items():
            config.must_be(field, value)
    windows = _windows(config, num_blocks) if is_neo else [0] * num_blocks
    # Blocks are those of config.json where all are alike, and otherwise one of all layers.
    alike = len(set(windows)) == 1
    layers = [_layers(config, sizes, is_neo, window) for window in windows]
    make = functools.partial(
        decoder,
        layers[0] if alike else [layer for block in layers for layer in block],
        num_blocks if alike else 1,
        functools.partial(
            transformer.sublayer_true_layer_norm, epsilon=config.get(_EPSILON, 1e-5)
        ),
        sizes,
        sizes["max_length"],
        True,
        True,
    )
    weights = list(_OUTER)
    for number, block in enumerate(layers):
        begin = [number, 0] if alike else [0, 2 * number]
        of_block = _of_neo if is_neo else _of_gpt2
        weights += of_block(number, *_scopes(*begin, block[0][0].__name__))
    return Form(make, weights, sizes, "transformer.", _IGNORED)


# What these fields of GPT-2 may say.
_KNOWN = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
_EPSILON = "layer_norm_epsilon"


def _windows(config: Config, blocks: int) -> list[int]:
    """Returns how many positions the queries of each block see; 0 for all."""
    try:
        kinds = [kind for some, n in config.get("attention_types") for _ in range(n) for kind in some]
        windows = [{"global": 0, "local": config.number("window_size", 256)}[k] for k in kinds]
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(
            f"{config.path}: config.json has attention_types="
            f"{config.get('attention_types')!r}, which is no list such as "
            "[[[\"global\", \"local\"], 6]]"
        ) from e
    if len(windows) != blocks:
        raise ValueError(
            f"{config.path}: config.json has num_layers={blocks}, but attention_types for "
            f"{len(windows)}"
        )
    return windows


def _layers(config: Config, sizes: dict[str, int], is_neo: bool, window: int) -> list[Any]:
    """Returns the layers of a block, as `make_layer_stack` takes them."""
    attention: dict[str, Any] = {
        "num_heads": sizes["heads"],
        "key_value_size": sizes["d_kv"],
        "combine_dims": False,
        # What is folded into initial values is not computed: Neo's logits are not scaled.
        "fold_scaling_into_initializer": is_neo,
        "biases": "o" if is_neo else "qkvo",
    }
    cls: Any = transformer_layers.SelfAttention
    if window:
        cls, attention["radius"] = transformer_layers.LocalSelfAttention, window
    feed_forward = {
        "hidden_size": sizes["d_ff"],
        "activation": config.activation("activation_function", "gelu_new"),
        "use_bias": True,
    }
    return [[cls, attention], [transformer_layers.DenseReluDense, feed_forward]]


_OUTER = [
    Weight("transformer/embedding", "vocab d_model", "transformer.wte.weight", "vocab d_model"),
    Weight(
        "transformer/positional_embedding",
        "max_length d_model",
        "transformer.wpe.weight",
        "max_length d_model",
    ),
    vector(f"transformer/{_NORM}_scale", "transformer.ln_f.weight"),
    vector(f"transformer/{_NORM}_bias", "transformer.ln_f.bias"),
]
_HEADS = "heads*d_kv"


def _scopes(block: int, layer: int, attention: str) -> list[str]:
    """Returns the scopes of the two layers of a block, and of their parts."""
    first, second = (f"transformer/block_{block:03d}/layer_{layer + i:03d}" for i in range(2))
    return [first, second, f"{first}/{attention}", f"{second}/DenseReluDense"]


def _norms(first: str, second: str, theirs: str) -> list[Weight]:
    return [
        vector(f"{scope}/{_NORM}_{ours}", f"{theirs}.{norm}.{kind}")
        for scope, norm in ((first, "ln_1"), (second, "ln_2"))
        for ours, kind in (("scale", "weight"), ("bias", "bias"))
    ]


def _of_gpt2(number: int, first: str, second: str, attention: str, mlp: str) -> list[Weight]:
    theirs = f"transformer.h.{number}"
    # Its layers were once convolutions of length 1, whose kernels are [inputs, outputs].
    dense = functools.partial(kernel, transposed=False)
    weights = _norms(first, second, theirs)
    for part, name in enumerate("qkv"):
        other = f"{theirs}.attn.c_attn"
        ours = f"{attention}/{name}"
        weights.append(dense(ours, f"{other}.weight", "d_model", [_HEADS] * 3, part))
        rows = f"[{_HEADS}|{_HEADS}|{_HEADS}]"
        weights.append(Weight(f"{ours}_bias", "heads d_kv", f"{other}.bias", rows, part))
    return [
        *weights,
        dense(f"{attention}/o", f"{theirs}.attn.c_proj.weight", _HEADS, "d_model"),
        vector(f"{attention}/o_bias", f"{theirs}.attn.c_proj.bias"),
        dense(f"{mlp}/wi/kernel", f"{theirs}.mlp.c_fc.weight", "d_model", "d_ff"),
        vector(f"{mlp}/wi/bias", f"{theirs}.mlp.c_fc.bias", "d_ff"),
        dense(f"{mlp}/wo/kernel", f"{theirs}.mlp.c_proj.weight", "d_ff", "d_model"),
        vector(f"{mlp}/wo/bias", f"{theirs}.mlp.c_proj.bias"),
    ]


def _of_neo(number: int, first: str, second: str, attention: str, mlp: str) -> list[Weight]:
    theirs = f"transformer.h.{number}"
    inner = f"{theirs}.attn.attention"
    return [
        *_norms(first, second, theirs),
        *(
            kernel(f"{attention}/{name}", f"{inner}.{name}_proj.weight", "d_model", _HEADS)
            for name in "qkv"
        ),
        kernel(f"{attention}/o", f"{inner}.out_proj.weight", _HEADS, "d_model"),
        vector(f"{attention}/o_bias", f"{inner}.out_proj.bias"),
        kernel(f"{mlp}/wi/kernel", f"{theirs}.mlp.c_fc.weight", "d_model", "d_ff"),
        vector(f"{mlp}/wi/bias", f"{theirs}.mlp.c_fc.bias", "d_ff"),
        kernel(f"{mlp}/wo/kernel", f"{theirs}.mlp.c_proj.weight", "d_ff", "d_model"),
        vector(f"{mlp}/wo/bias", f"{theirs}.mlp.c_proj.bias"),
    ]
