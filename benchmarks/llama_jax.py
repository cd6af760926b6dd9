"""The loss of a Llama in JAX, written by hand for the weights of a folder of Hugging Face.

Touvron et al., "LLaMA: Open and efficient foundation language models"
(https://arxiv.org/abs/2302.13971), with grouped heads and tied logits as SmolLM2 has them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["loss_of"]

Weights = dict[str, Any]


def _norm(x: Any, scale: Any, epsilon: float) -> Any:
    """Root mean square normalization, in float32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + epsilon)
    return y.astype(x.dtype) * scale


def _rotated(x: Any, theta: float) -> Any:
    """Turns channels of x, [batch, length, heads, d], by positions; halves belong together."""
    size = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * theta ** (-jnp.arange(size) / size)
    cos, sin = (f(angles)[:, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    first, second = x[..., :size], x[..., size:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attention(config: dict[str, Any], x: Any, of: Callable[[str], Any]) -> Any:
    """Causal attention of [batch, length, hidden]; several heads share a head of keys."""
    size = config["hidden_size"] // config["num_attention_heads"]
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    q, k, v = (
        (x @ of(f"self_attn.{n}_proj").T).reshape(*x.shape[:2], -1, size) for n in ("q", "k", "v")
    )
    # XLA's own operations, or cuDNN's if a later JAX prefers them: the default of the library.
    mixed = jax.nn.dot_product_attention(_rotated(q, theta), _rotated(k, theta), v, is_causal=True)
    return mixed.reshape(*x.shape[:2], -1) @ of("self_attn.o_proj").T


def _loss(config: dict[str, Any], dtype: Any, weights: Weights, ids: Any) -> Any:
    epsilon = config["rms_norm_eps"]
    embedding = weights["model.embed_tokens.weight"].astype(dtype)
    x = embedding[ids]
    for layer in range(config["num_hidden_layers"]):

        def of(name: str, layer: int = layer) -> Any:
            return weights[f"model.layers.{layer}.{name}.weight"].astype(dtype)

        x = x + _attention(config, _norm(x, of("input_layernorm"), epsilon), of)
        y = _norm(x, of("post_attention_layernorm"), epsilon)
        inner = jax.nn.silu(y @ of("mlp.gate_proj").T) * (y @ of("mlp.up_proj").T)
        x = x + inner @ of("mlp.down_proj").T
    x = _norm(x, weights["model.norm.weight"].astype(dtype), epsilon)
    logits = (x[:, :-1] @ embedding.T).astype(jnp.float32)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, 1:, None], axis=-1)
    return -jnp.mean(chosen)


def loss_of(config: dict[str, Any], dtype: str = "float32") -> Callable[[Weights, Any], Any]:
    """Returns a function of weights by name and ids, [batch, length]: the mean loss of next ids.

    Args:
      config: of config.json.
      dtype: of activations; weights are float32.
    """
    return functools.partial(_loss, config, jnp.dtype(dtype))
