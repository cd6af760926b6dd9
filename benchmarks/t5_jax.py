"""T5-small's loss in JAX, written by hand for the weights of this package by their names.

Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text transformer"
(https://arxiv.org/abs/1910.10683).
"""

from typing import Any

import jax
import jax.numpy as jnp
from t5_small import SIZES

__all__ = ["loss", "weight_shapes"]

BUCKETS, FARTHEST = 32, 128
_KINDS = {
    "encoder": ("SelfAttention", "DenseReluDense"),
    "decoder": ("SelfAttention", "EncDecAttention", "DenseReluDense"),
}
Weights = dict[str, Any]


def _norm(x: Any, scale: Any) -> Any:
    """Root mean square normalization."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * scale


def _buckets(length: int, both_ways: bool) -> Any:
    """The bucket of each distance [query, memory]: exact ones, then wider and wider ones."""
    distance = jnp.arange(length)[None, :] - jnp.arange(length)[:, None]
    count = BUCKETS // 2 if both_ways else BUCKETS
    first = jnp.where(distance > 0, count, 0) if both_ways else 0
    distance = jnp.abs(distance) if both_ways else jnp.maximum(-distance, 0)
    exact = count // 2
    ratio = jnp.log(jnp.maximum(distance, 1) / exact) / jnp.log(FARTHEST / exact)
    wide = jnp.minimum(exact + (ratio * (count - exact)).astype(jnp.int32), count - 1)
    return first + jnp.where(distance < exact, distance, wide)


def _attention(x: Any, memory: Any, weights: Weights, prefix: str, bias: Any) -> Any:
    """Attention of x to memory; its logits are not scaled."""
    heads, d_kv = SIZES["num_heads"], SIZES["d_kv"]

    def projected(source: Any, name: str) -> Any:
        y = source @ weights[f"{prefix}/{name}"]
        return y.reshape(*y.shape[:-1], heads, d_kv)

    q, k, v = projected(x, "q"), projected(memory, "k"), projected(memory, "v")
    logits = jnp.einsum("bqhd,bmhd->bhqm", q, k) + bias
    mixed = jnp.einsum("bhqm,bmhd->bqhd", jax.nn.softmax(logits), v)
    return mixed.reshape(*x.shape[:-1], heads * d_kv) @ weights[f"{prefix}/o"]


def _stack(x: Any, weights: Weights, name: str, encoded: Any = None) -> Any:
    """The encoder, or the decoder that attends to what was encoded."""
    length, is_decoder = x.shape[1], encoded is not None
    values = weights[f"{name}/block_000/layer_000/SelfAttention/relative_attention_bias"]
    bias = values[:, _buckets(length, not is_decoder)]
    if is_decoder:
        bias = jnp.where(jnp.tril(jnp.ones((length, length), bool)), bias, -1e9)
    for block in range(SIZES["num_layers"]):
        for i, kind in enumerate(_KINDS[name]):
            layer = f"{name}/block_{block:03}/layer_{i:03}"
            y = _norm(x, weights[f"{layer}/layer_norm/scale"])
            prefix = f"{layer}/{kind}"
            if kind == "DenseReluDense":
                y = jax.nn.relu(y @ weights[f"{prefix}/wi/kernel"]) @ weights[f"{prefix}/wo/kernel"]
            elif kind == "SelfAttention":
                y = _attention(y, y, weights, prefix, bias)
            else:
                y = _attention(y, encoded, weights, prefix, 0.0)
            x = x + y
    return _norm(x, weights[f"{name}/final_layer_norm/scale"])


def loss(weights: Weights, inputs: Any, targets: Any) -> Any:
    """The mean cross entropy of targets, all of which count. Both are ids: [batch, length]."""
    embedding = weights["shared/embedding"]
    encoded = _stack(embedding[inputs], weights, "encoder")
    shifted = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)))
    decoded = _stack(embedding[shifted], weights, "decoder", encoded)
    logits = (decoded * SIZES["d_model"] ** -0.5) @ embedding.T
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -jnp.mean(chosen)


def weight_shapes() -> dict[str, tuple[int, ...]]:
    """The shapes of all weights by their names in this package."""
    model, ff = SIZES["d_model"], SIZES["d_ff"]
    inner = SIZES["num_heads"] * SIZES["d_kv"]
    shapes: dict[str, tuple[int, ...]] = {"shared/embedding": (SIZES["vocab_size"], model)}
    for name, kinds in _KINDS.items():
        for block in range(SIZES["num_layers"]):
            for i, kind in enumerate(kinds):
                layer = f"{name}/block_{block:03}/layer_{i:03}"
                shapes[f"{layer}/layer_norm/scale"] = (model,)
                if kind == "DenseReluDense":
                    shapes[f"{layer}/{kind}/wi/kernel"] = (model, ff)
                    shapes[f"{layer}/{kind}/wo/kernel"] = (ff, model)
                    continue
                for projection in "qkv":
                    shapes[f"{layer}/{kind}/{projection}"] = (model, inner)
                shapes[f"{layer}/{kind}/o"] = (inner, model)
        first = f"{name}/block_000/layer_000/SelfAttention"
        shapes[f"{first}/relative_attention_bias"] = (SIZES["num_heads"], BUCKETS)
        shapes[f"{name}/final_layer_norm/scale"] = (model,)
    return shapes
