"""Synthetic attention: weights that are not products of queries and keys alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow.layers import _masks
from mesh_tensorflow.transformer.attention._dot_product import check_operands, with_dropout

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = ["SYNTHESIZE_MODES", "synthetic_attention", "uses_products", "uses_queries"]

# By mode: how many positions the weights in users' checkpoints are for, if max_length is smaller.
_LEAST_LENGTH = {"factorized": 512}


def _first(x: mtf.Tensor, dim: mtf.Dimension) -> mtf.Tensor:
    """Slices the beginning of `x` along the dimension named like `dim`, which may be split."""
    # Under a name that no rule splits: parts of a slice are not where those of the whole are.
    whole = mtf.rename_dimension(x, dim.name, "_" + dim.name)
    part = mtf.slice(whole, 0, dim.size, "_" + dim.name)
    return mtf.rename_dimension(part, "_" + dim.name, dim.name)


def _random_logits(
    context: Context,
    q: Optional[mtf.Tensor],
    heads_dim: mtf.Dimension,
    key_dim: mtf.Dimension,
    memory_length_dim: mtf.Dimension,
    max_length: int,
    factorized_dim: int,
) -> mtf.Tensor:
    """Returns learned logits that are the same for all sequences."""
    rows = mtf.Dimension(context.length_dim.name, max_length)
    columns = mtf.Dimension(memory_length_dim.name, max_length)
    logits = mtf.get_variable(
        context.mesh, "R", mtf.Shape([rows, heads_dim, columns]), dtype=context.variable_dtype
    )
    logits = _first(logits, memory_length_dim)
    if context.mode == "incremental":
        # A step has one query, so it takes one row of the logits.
        return mtf.gather(logits, context.position, rows)
    return _first(logits, context.length_dim)


def _factorized_logits(
    context: Context,
    q: Optional[mtf.Tensor],
    heads_dim: mtf.Dimension,
    key_dim: mtf.Dimension,
    memory_length_dim: mtf.Dimension,
    max_length: int,
    factorized_dim: int,
) -> mtf.Tensor:
    """Returns a logit for each position of the memory, the same for all queries.

    logits[h, m] = sum over t of R1[t, h, m] * R2[t, h, m]
    """
    columns = mtf.Dimension(memory_length_dim.name, max_length)
    shape = mtf.Shape([mtf.Dimension("tmp", factorized_dim), heads_dim, columns])
    factors = [
        _first(
            mtf.get_variable(context.mesh, name, shape, dtype=context.variable_dtype),
            memory_length_dim,
        )
        for name in ("R1", "R2")
    ]
    logits = mtf.einsum(factors, output_shape=[heads_dim, memory_length_dim])
    if context.mode == "incremental":
        return logits
    return mtf.broadcast(logits, mtf.Shape([context.length_dim, *logits.shape]))


def _dense_logits(
    context: Context,
    q: Optional[mtf.Tensor],
    heads_dim: mtf.Dimension,
    key_dim: mtf.Dimension,
    memory_length_dim: mtf.Dimension,
    max_length: int,
    factorized_dim: int,
) -> mtf.Tensor:
    """Returns logits computed from each query by a dense layer that all heads share."""
    assert q is not None
    logits = layers.dense(
        mtf.relu(q),
        mtf.Dimension(memory_length_dim.name, max_length),
        reduced_dims=[key_dim],
        use_bias=False,
        variable_dtype=context.variable_dtype,
        name="pi",
    )
    return _first(logits, memory_length_dim)


def _only(context: Context, products: Optional[mtf.Tensor], made: mtf.Tensor) -> mtf.Tensor:
    return made


def _plus(context: Context, products: Optional[mtf.Tensor], made: mtf.Tensor) -> mtf.Tensor:
    return products + made


def _plus_alpha(context: Context, products: Optional[mtf.Tensor], made: mtf.Tensor) -> mtf.Tensor:
    """Returns a learned mix of products and synthetic logits."""
    alpha = mtf.get_variable(
        context.mesh,
        "alpha",
        mtf.Shape([mtf.Dimension("alpha", 1)]),
        initializer=tf.zeros_initializer(),
        dtype=context.variable_dtype,
    )
    # The sigmoid keeps the mix between both; alpha begins as 0, and so the mix as one half.
    alpha = mtf.sigmoid(mtf.reshape(alpha, []))
    return products * (1.0 - alpha) + made * alpha


_Mode = tuple[Callable[..., mtf.Tensor], Callable[..., mtf.Tensor]]

# By mode: how logits are computed, and how they are combined with products.
SYNTHESIZE_MODES: dict[str, _Mode] = {
    "random": (_random_logits, _only),
    "random_plus": (_random_logits, _plus),
    "random_plus_alpha": (_random_logits, _plus_alpha),
    "dense_minus": (_dense_logits, _only),
    "dense_plus": (_dense_logits, _plus),
    "dense_plus_alpha": (_dense_logits, _plus_alpha),
    "factorized": (_factorized_logits, _only),
}


def _mode(name: str) -> _Mode:
    if name not in SYNTHESIZE_MODES:
        raise ValueError(
            f"synthesize_mode={name!r} is none of {', '.join(sorted(SYNTHESIZE_MODES))}"
        )
    return SYNTHESIZE_MODES[name]


def uses_products(synthesize_mode: str) -> bool:
    """Returns whether queries are multiplied by keys."""
    return _mode(synthesize_mode)[1] is not _only


def uses_queries(synthesize_mode: str) -> bool:
    """Returns whether there are queries."""
    return synthesize_mode == "dense_minus" or uses_products(synthesize_mode)


def _heads_dim(*tensors: Optional[mtf.Tensor]) -> mtf.Dimension:
    for x in tensors:
        for dim in [] if x is None else x.shape:
            if dim.name == "heads":
                return dim
    raise ValueError(
        "synthetic_attention: neither queries nor values have a dimension named heads; set "
        "num_memory_heads to 0, or use a mode with queries"
    )


def _check_lengths(max_length: int, *dims: mtf.Dimension) -> None:
    for dim in dims:
        if dim.size > max_length:
            raise ValueError(
                f"synthetic_attention: {dims_text([dim])} is longer than max_length={max_length}, "
                'for which there are weights; set attention_kwargs={"max_length": ...} of the layer'
            )


@leaves_no_node
def synthetic_attention(
    q: Optional[mtf.Tensor],
    k: Optional[mtf.Tensor],
    v: mtf.Tensor,
    memory_length_dim: mtf.Dimension,
    key_dim: mtf.Dimension,
    value_dim: mtf.Dimension,
    bias: Optional[mtf.Tensor] = None,
    dropout_rate: float = 0.0,
    dropout_broadcast_dims: Optional[Sequence[mtf.Dimension]] = None,
    extra_logit: Union[mtf.Tensor, float, None] = None,
    synthesize: bool = True,
    synthesize_mode: str = "random_plus_alpha",
    factorized_dim: int = 16,
    max_length: int = 512,
    context: Context = None,  # type: ignore[assignment]
) -> mtf.Tensor:
    """Attention with weights that are learned directly or computed from the queries alone.

    Tay et al., "Synthesizer: rethinking self-attention in transformer models" (2020).

    Args:
      q: queries, a Tensor with dimensions [batch..., length, heads, key_dim]; None in mode
        "random" or "factorized".
      k: keys, a Tensor with dimensions [batch..., memory_length, heads, key_dim]; not used in
        the modes "random", "factorized" and "dense_minus".
      v: values, a Tensor with dimensions [batch..., memory_length, heads, value_dim].
      memory_length_dim: the Dimension of positions that are attended to.
      key_dim: the Dimension of channels of queries and keys.
      value_dim: the Dimension of channels of values.
      bias: a Tensor that is added to the logits, or None.
      dropout_rate: the dropout rate of the attention weights.
      dropout_broadcast_dims: Dimensions along which the dropout mask is the same, or None.
      extra_logit: a number or a Tensor, one more logit in the softmax's denominator; or None.
      synthesize: if False, logits are products of queries and keys.
      synthesize_mode: "random" for learned logits, "dense_minus" for logits computed from queries;
        "random_plus" and "dense_plus" add the products to them, "random_plus_alpha" and
        "dense_plus_alpha" mix the two. "factorized" learns one logit for each position of the
        memory, which all queries share, as the product of two tables.
      factorized_dim: an integer, the size of the dimension that this product sums over.
      max_length: the largest length, which determines the size of the weights; those of
        "factorized" are for 512 positions at least.
      context: the Context of this call of the model: its mode, positions, states and losses.

    Returns:
      A Tensor with dimensions [batch..., length, heads, value_dim].

    Raises:
      ValueError: a dimension is missing, the mode is unknown, or the length is above `max_length`.
    """
    tensors = {"q": q, "k": k, "v": v}
    check_operands("synthetic_attention", tensors, memory_length_dim, key_dim, value_dim)
    make, join = _mode(synthesize_mode)
    logits = None
    if not synthesize or uses_products(synthesize_mode):
        assert q is not None and k is not None
        logits = mtf.einsum([q, k], output_shape=q.shape - key_dim + memory_length_dim)
    if synthesize:
        max_length = max(max_length, _LEAST_LENGTH.get(synthesize_mode, 0))
        _check_lengths(max_length, memory_length_dim, context.length_dim)
        heads_dim = _heads_dim(q, v)
        made = make(context, q, heads_dim, key_dim, memory_length_dim, max_length, factorized_dim)
        logits = join(context, logits, made)
    assert logits is not None
    if bias is not None:
        logits = _masks.hide(logits + bias, bias)
    weights = mtf.softmax(logits, memory_length_dim, extra_logit=extra_logit)
    weights = with_dropout(weights, dropout_rate, dropout_broadcast_dims, context)
    if q is not None:
        output_shape = q.shape - key_dim + value_dim
    else:
        new = [context.length_dim]
        if context.mode == "incremental":  # a dimension if there are several positions in a step
            assert context.position is not None
            new = [d for d in context.position.shape if d not in v.shape]
        others = {memory_length_dim: new}
        output_shape = mtf.Shape([e for d in v.shape for e in others.get(d, [d])])
    return mtf.einsum([weights, v], output_shape=output_shape)
