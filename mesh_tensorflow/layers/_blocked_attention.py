"""Attention by blocks: no tensor has the size of the length times that of the memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import check_choice, dims_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow._core.operation import check_fractions
from mesh_tensorflow.layers import _blocked_slices
from mesh_tensorflow.layers._blocked_operation import BlockedAttentionOperation, Dims, Terms
from mesh_tensorflow.layers._masks import (
    COMPARISONS,
    Distances,
    biased,
    distance_bias,
    hidden_where,
    hide,
    unseen,
)
from mesh_tensorflow.layers._ring_attention import RINGS

# -- attention


Visible = Sequence[tuple[str, mtf.Tensor, mtf.Tensor]]
_WHAT = "blocked_attention"


def whole_dims(
    q: mtf.Tensor,
    k: mtf.Tensor,
    v: mtf.Tensor,
    memory_length_dim: mtf.Dimension,
    key_dim: mtf.Dimension,
    value_dim: mtf.Dimension,
    terms: Sequence[mtf.Tensor] = (),
) -> Union[Dims, str]:
    """Returns the Dims of attention by blocks, or why there is none.

    Args:
      q: queries, a Tensor.
      k: keys, a Tensor.
      v: values, a Tensor.
      memory_length_dim: the Dimension of positions that are attended to.
      key_dim: the Dimension of channels of queries and keys.
      value_dim: the Dimension of channels of values.
      terms: what is added to logits, or masks them.
    """
    needed = (("q", q, key_dim), ("k", k, key_dim), ("v", v, value_dim),
              ("k", k, memory_length_dim), ("v", v, memory_length_dim))  # fmt: skip
    for name, x, dim in needed:
        if dim not in x.shape:
            return f"{name} {x.name} {x.shape} has no {dims_text([dim])}"
    if memory_length_dim in q.shape:
        return (
            f"q {q.name} {q.shape} has the dimension of the memory, "
            f"{dims_text([memory_length_dim])}; rename it in k and v by "
            "mtf.layers.rename_length_to_memory_length"
        )
    rows = (q.shape - key_dim).dims
    # What keys share with queries is the batch of matrix products, so values must have it as well.
    columns = [d for d in k.shape if d not in (key_dim, memory_length_dim)]
    values = [d for d in v.shape if d not in (value_dim, memory_length_dim)]
    if set(columns) != set(values):
        return f"k {k.shape} and v {v.shape} have other dimensions besides their channels"
    unknown = [d for d in columns if d not in rows]
    if unknown:
        return f"k {k.name} {k.shape} has {dims_text(unknown)}, which q {q.shape} lacks"
    logits = [*rows, memory_length_dim]
    for x in terms:
        unknown = [d for d in x.shape if d not in logits]
        if unknown:
            return (
                f"{x.name} {x.shape} has {dims_text(unknown)}, which the logits "
                f"({dims_text(logits)}) lack"
            )
    alone = [d for d in rows if d not in columns]
    if not alone:
        return f"q {q.name} {q.shape} has no dimension of its own, such as a length"
    # The longest is worth most to be cut: a block holds all of the others.
    length = max(alone, key=lambda d: d.size)
    if any(d.size == 0 for d in [*logits, key_dim, value_dim]):
        return "a dimension has size 0"
    others = tuple(d for d in alone if d is not length)
    shared = tuple(d for d in rows if d in columns)
    return Dims(shared, others, length, memory_length_dim, key_dim, value_dim)


def check_soft_cap(what: str, soft_cap: Optional[float]) -> None:
    """Checks a soft cap of logits, a positive number or None.

    Args:
      what: the name of the function, for the error.
      soft_cap: what was given.

    Raises:
      ValueError: it is neither.
    """
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"{what}: soft_cap={soft_cap} must be above 0; None caps nothing")


def soft_capped(logits: mtf.Tensor, soft_cap: float) -> mtf.Tensor:
    """Returns c tanh(x / c) of logits x: about x where it is small, and never beyond c.

    Args:
      logits: a floating-point Tensor.
      soft_cap: the number c.
    """
    return mtf.tanh(logits / soft_cap) * soft_cap


def _plain(
    q: mtf.Tensor, k: mtf.Tensor, v: mtf.Tensor, dims: Dims, terms: Terms
) -> list[mtf.Tensor]:
    """The same with tensors of all logits, in operations that have gradients of any order."""
    dtype = _blocked_slices.computed_in(q.dtype)
    rows = q.shape - dims.key
    shape = rows + dims.memory
    logits = mtf.einsum([mtf.cast(q, dtype), mtf.cast(k, dtype)], output_shape=shape)
    if terms.soft_cap is not None:
        logits = soft_capped(logits, terms.soft_cap)
    # Terms in the order of `Block._with_terms`: logits that ids hide are set before biases are
    # added, which may hide more of them.
    for d in terms.distances:
        logits = mtf.add(logits, mtf.cast(distance_bias(d), dtype), output_shape=shape)
    hidden = unseen(terms.visible)
    if hidden is not None:
        logits = hide(logits, hidden_where(hidden, dtype))
    for x in terms.biases:
        logits = biased(logits, x)
    extra = terms.extra
    if isinstance(extra, mtf.Tensor):
        extra = mtf.cast(extra, dtype)
    # With the extra logit, as blocks have only the sum with it.
    log_z = mtf.reduce_logsumexp(logits, dims.memory, extra_logit=extra)
    weights = mtf.softmax(logits, dims.memory, extra_logit=extra)
    # After the softmax, as in blocks: its denominator has the weights that are dropped, too.
    if terms.noise:
        weights = mtf.multiply(weights, _noise_mask(terms, rows, dtype), output_shape=shape)
    y = mtf.einsum([weights, mtf.cast(v, dtype)], output_shape=rows + dims.value)
    return [mtf.cast(y, v.dtype), log_z]


def _noise_mask(terms: Terms, rows: mtf.Shape, dtype: tf.DType) -> mtf.Tensor:
    """Returns the whole dropout mask."""
    *_, row, column = terms.noise
    # Rows and columns have no dimension in common: the mask is their outer combination.
    order = [d for d in rows if d in row.shape] + column.shape.dims
    names = [d.name for d in order]

    def mask(*indices: tf.Tensor) -> tf.Tensor:
        key0, key1, columns = (
            _blocked_slices.arranged(index, x.shape.dimension_names, names)
            for index, x in zip(indices, terms.noise)
        )
        return _blocked_slices.noise_mask(
            _blocked_slices.Noise(key0, key1, columns, terms.keep_prob), dtype
        )

    return mtf.slicewise(mask, list(terms.noise), mtf.Shape(order), dtype, order)


def _noise(
    mesh: mtf.Mesh, dims: Dims, rows: mtf.Shape, shared: Sequence[mtf.Dimension]
) -> list[mtf.Tensor]:
    """Returns two random keys for each row, and an index for each position of the memory.

    Keys that belong to rows are cut with them, also into the microbatches of a pipeline.

    Args:
      mesh: a Mesh.
      dims: a Dims.
      rows: the Shape of queries without their channels.
      shared: the Dimensions along which the mask is the same.
    """
    noisy = mtf.Shape([d for d in rows if d not in shared])
    # 64 bits for each row: of 32, two of about 2**16 rows would likely have the same mask.
    keys = [
        # All int32 numbers but the largest, since the bound itself is excluded and has to be an
        # int32.
        mtf.random_uniform(mesh, noisy, minval=-(2**31), maxval=2**31 - 1, dtype=tf.int32)
        for _ in range(2)
    ]
    memory = dims.memory
    # One index for all positions, so that the hash of a row is the same along the memory.
    if memory in shared:
        return [*keys, mtf.zeros(mesh, [], tf.int32)]
    return [*keys, mtf.range(mesh, memory, tf.int32)]


def added_terms(
    bias: Optional[mtf.Tensor], visible: Visible, distances: Sequence[Distances]
) -> list[mtf.Tensor]:
    """Returns the Tensors whose dimensions have to be those of logits."""
    ids = [x for _, *pair in visible for x in pair]
    return [*([] if bias is None else [bias]), *ids, *(x for d in distances for x in d[-2:])]


def attention_and_log_sums(
    q: mtf.Tensor,
    k: mtf.Tensor,
    v: mtf.Tensor,
    memory_length_dim: mtf.Dimension,
    key_dim: mtf.Dimension,
    value_dim: mtf.Dimension,
    bias: Optional[mtf.Tensor] = None,
    visible: Visible = (),
    dropout_rate: float = 0.0,
    dropout_broadcast_dims: Optional[Sequence[mtf.Dimension]] = None,
    extra_logit: Union[mtf.Tensor, float, None] = None,
    block_sizes: Optional[tuple[int, int]] = None,
    name: Optional[str] = None,
    ring: Union[bool, str] = False,
    distances: Sequence[Distances] = (),
    soft_cap: Optional[float] = None,
) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Returns what `blocked_attention` does, and the logarithms of the softmax's denominators."""
    # All checks come before the first operation, so that an error leaves none in the graph.
    for comparison, _, _ in visible:
        if comparison not in COMPARISONS:
            raise ValueError(
                f"{_WHAT}: visible compares by {comparison!r}, which is none of "
                f"{', '.join(sorted(COMPARISONS))}"
            )
    check_soft_cap(_WHAT, soft_cap)
    check_fractions(_WHAT, [q, k, v])
    check_choice(_WHAT, "ring", ring, RINGS, "; True is for all")
    rest = added_terms(bias, visible, distances)
    dims = whole_dims(q, k, v, memory_length_dim, key_dim, value_dim, rest)
    if isinstance(dims, str):
        raise ValueError(f"{_WHAT}: {dims}. mtf.transformer.attention.attention takes any")
    if not 0.0 <= dropout_rate < 1.0:
        raise ValueError(
            f"{_WHAT}: dropout_rate is the rate of what is dropped, from 0 to less than 1, not "
            f"{dropout_rate}"
        )
    if block_sizes is not None and min(block_sizes) < 1:
        raise ValueError(
            f"{_WHAT}: block_sizes={block_sizes} are numbers of positions, of queries and of the "
            "memory; give integers from 1, or None"
        )
    # Under names that no layout rule has: where rules split the channels, the renaming gathers
    # them, as a block needs all of them.
    key = mtf.Dimension("_blocked_" + key_dim.name, key_dim.size)
    value = mtf.Dimension("_blocked_value_" + value_dim.name, value_dim.size)
    q, k = (mtf.rename_dimension(x, key_dim.name, key.name) for x in (q, k))
    v = mtf.rename_dimension(v, value_dim.name, value.name)
    dims = dims._replace(key=key, value=value)
    rows = q.shape - key
    noise = _noise(q.mesh, dims, rows, dropout_broadcast_dims or ()) if dropout_rate else ()
    if isinstance(extra_logit, mtf.Tensor):
        # As in `mtf.softmax`, an extra logit gets no gradient.
        extra_logit = mtf.stop_gradient(extra_logit)
    terms = Terms(
        [] if bias is None else [bias],
        list(visible),
        list(distances),
        noise,
        1.0 - dropout_rate,
        extra_logit,
        soft_cap,
    )
    # `_plain` is handed over, since the module of the operation is imported by this one.
    op = BlockedAttentionOperation(q, k, v, dims, terms, _plain, block_sizes, name, ring)
    y, log_z = op.outputs[:2]
    return mtf.rename_dimension(y, value.name, value_dim.name), log_z


@leaves_no_node
def blocked_attention(
    q: mtf.Tensor,
    k: mtf.Tensor,
    v: mtf.Tensor,
    memory_length_dim: mtf.Dimension,
    key_dim: mtf.Dimension,
    value_dim: mtf.Dimension,
    bias: Optional[mtf.Tensor] = None,
    visible: Visible = (),
    dropout_rate: float = 0.0,
    dropout_broadcast_dims: Optional[Sequence[mtf.Dimension]] = None,
    extra_logit: Union[mtf.Tensor, float, None] = None,
    block_sizes: Optional[tuple[int, int]] = None,
    name: Optional[str] = None,
    ring: Union[bool, str] = False,
    soft_cap: Optional[float] = None,
) -> mtf.Tensor:
    """Dot-product attention by blocks, whose memory does not grow with the square of the length.

    Dao et al., "FlashAttention" (2022). Values and gradients are those of attention with all logits
    at once; the gradient computes each block again.

    >>> q = mtf.ones(mesh, "batch:2,length:3,heads:2,d_kv:4")
    >>> k = mtf.ones(mesh, "batch:2,memory_length:5,heads:2,d_kv:4")
    >>> memory, channels = k.shape.dims[1], k.shape.dims[3]
    >>> y = mtf.layers.blocked_attention(q, k, k, memory, channels, channels)
    >>> print(y.shape, y.numpy().max())
    Shape[batch=2, length=3, heads=2, d_kv=4] 1.0

    Args:
      q: queries, a Tensor with dimensions [batch..., length, heads..., key_dim].
      k: keys, a Tensor with dimensions [batch..., memory_length, heads..., key_dim]; those besides
        the memory's and the channels are dimensions of `q`.
      v: values, a Tensor with dimensions [batch..., memory_length, heads..., value_dim].
      memory_length_dim: the Dimension of positions that are attended to.
      key_dim: the Dimension of channels of queries and keys.
      value_dim: the Dimension of channels of values.
      bias: a Tensor that is added to the logits, and may lack dimensions of them; or None.
      visible: triples (comparison, ids of queries, ids of the memory). A query sees what all
        comparisons are true for: "equal" for segments, "greater_equal" for the positions of causal
        attention, "less_equal". The masks are computed by block. A query that sees nothing has the
        mean of all values.
      dropout_rate: the dropout rate of the attention weights.
      dropout_broadcast_dims: Dimensions along which the dropout mask is the same, or None.
      extra_logit: a number or a Tensor, one more logit in the softmax's denominator; or None. It
        gets no gradient.
      block_sizes: the numbers of positions of queries and of the memory in a block; chosen if None.
      name: a string or None.
      ring: whether, in layouts that split the length of queries and of the memory over the same
        mesh dimension, processors pass parts of keys and values around (ring attention, Liu et al.,
        2023) instead of gathering them. Then the memory of each processor is that of its parts.
        Where `visible` is causal, and n processors divide the lengths by 2 n, they exchange halves
        first, so that all have the same work; "zigzag" does so with any masks, and warns where
        there are no halves to exchange, "contiguous" leaves parts where they are. Results are the
        same in each case.
      soft_cap: a number c, by which products x of queries and keys become c tanh(x / c); or None.

    Returns:
      A Tensor with dimensions [dims of q without key_dim..., value_dim].

    Raises:
      ValueError: dimensions do not match, or an argument is out of range.
    """
    return attention_and_log_sums(
        q, k, v, memory_length_dim, key_dim, value_dim, bias, visible, dropout_rate,
        dropout_broadcast_dims, extra_logit, block_sizes, name, ring, soft_cap=soft_cap,
    )[0]  # fmt: skip
