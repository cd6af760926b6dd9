"""Attention with other weights than a softmax over all pairs: local, of two sums, synthesized."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow._core.errors import check_choice, dims_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow.layers import _masks
from mesh_tensorflow.layers._attention import dropped, logits_shape
from mesh_tensorflow.layers._local_attention import longest_block
from mesh_tensorflow.layers._masks import ABSENT_LOGIT, HIDDEN_LOGIT
from mesh_tensorflow.ops._elementwise.binary import select
from mesh_tensorflow.transformer.attention._dot_product import (
    attention,
    check_operands,
    visibility_mask_to_attention_bias,
)

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context


# -- local attention, and hybrids of two normalizations


def _block_length(length_dim: mtf.Dimension, num_splits: int, radius: int) -> int:
    """Returns the number of positions in a block; no block crosses a slice boundary."""
    if radius < 1:
        raise ValueError(f"local_attention_1d: radius must be 1 or more, got {radius}")
    if num_splits < 1 or length_dim.size % num_splits:
        raise ValueError(
            f"local_attention_1d: {dims_text([length_dim])} cannot be cut into "
            f"length_dim_num_splits={num_splits} equal parts"
        )
    return longest_block(length_dim.size // num_splits, radius)


class _Blocks:
    """Blocks of a sequence, and the neighborhood that each block attends to."""

    def __init__(
        self,
        length_dim: mtf.Dimension,
        num_splits: int,
        radius: int,
        fully_autoregressive: bool,
    ) -> None:
        size = _block_length(length_dim, num_splits, radius)
        # There is nothing farther away than the length, and room for it would be computed with.
        radius = min(radius, length_dim.size)
        self.length = length_dim
        # By the name of the length, so that layouts which split positions split the blocks.
        self.blocks = mtf.Dimension(length_dim.name, length_dim.size // size)
        self.query = mtf.Dimension("query_block_length", size)
        self.memory = mtf.Dimension("memory_block_length", size)
        self.radius = radius
        self.one_sided = fully_autoregressive
        # The position `radius` to the left is masked.
        self.left = radius - 1
        self.right = 0 if fully_autoregressive else radius
        # One exchange takes as much from both sides; `in_window` hides the excess of one of them.
        self.halo = max(self.left, self.right)
        extra = self.halo if fully_autoregressive else 2 * self.halo
        self.window = mtf.Dimension(self.memory.name, size + extra)

    def queries(self, x: mtf.Tensor) -> mtf.Tensor:
        """Returns `x` in blocks."""
        return self._cut(x, self.query)

    def memories(self, x: mtf.Tensor) -> mtf.Tensor:
        """Returns `x` in blocks, each with its neighborhood; padded with 0 at the ends."""
        x = self._cut(x, self.memory)
        exchange = mtf.left_halo_exchange if self.one_sided else mtf.halo_exchange
        return exchange(x, self.blocks, self.memory, self.halo)

    def _cut(self, x: mtf.Tensor, block: mtf.Dimension) -> mtf.Tensor:
        shape = mtf.replace_dimensions(x.shape, self.length, [self.blocks, block])
        return mtf.reshape(x, shape)

    def in_window(self, mesh: mtf.Mesh) -> mtf.Tensor:
        """Returns a boolean mask of the neighborhood within the sequence."""
        begin = mtf.range(mesh, self.blocks, tf.int32) * self.query.size
        # The window begins before its block, by the halo.
        memory = mtf.range(mesh, self.window, tf.int32) - self.halo
        distance = memory - mtf.range(mesh, self.query, tf.int32)
        position = begin + memory
        conditions = [
            mtf.greater_equal(distance, -self.left),
            mtf.less_equal(distance, self.right),
            mtf.greater_equal(position, 0),
        ]
        # Otherwise the window ends with its block, which never goes beyond the end.
        if not self.one_sided:
            conditions.append(mtf.less(position, self.length.size))
        return functools.reduce(mtf.logical_and, conditions)


def _bias(
    blocks: _Blocks,
    mesh: mtf.Mesh,
    sequence_id: Union[mtf.Tensor, int, None],
    write_priority: Optional[mtf.Tensor],
    read_priority: Optional[mtf.Tensor],
    dtype: tf.DType,
) -> mtf.Tensor:
    """Returns the mask; how much more than the neighborhood a block has is up to the layout."""
    in_window = blocks.in_window(mesh)
    conditions = []
    if isinstance(sequence_id, mtf.Tensor) and blocks.length in sequence_id.shape:
        # Beyond the ends memories are 0, as is padding's id: `absent` hides them from padding too.
        conditions.append(mtf.equal(blocks.queries(sequence_id), blocks.memories(sequence_id)))
    if write_priority is not None and read_priority is not None:
        conditions.append(
            mtf.greater_equal(blocks.queries(read_priority), blocks.memories(write_priority))
        )
    # Room beyond the ends is no memory: even a query that sees nothing has no mean over it.
    absent = select(in_window, mtf.zeros(mesh, [], dtype), ABSENT_LOGIT, in_window.shape)
    if not conditions:
        return absent
    hidden = visibility_mask_to_attention_bias(functools.reduce(mtf.logical_and, conditions), dtype)
    return absent + hidden


@leaves_no_node
def local_attention_1d(
    q: mtf.Tensor,
    k: mtf.Tensor,
    v: mtf.Tensor,
    length_dim: mtf.Dimension,
    key_dim: mtf.Dimension,
    value_dim: mtf.Dimension,
    fully_autoregressive: bool = True,
    length_dim_num_splits: int = 1,
    radius: int = 128,
    sequence_id: Union[mtf.Tensor, int, None] = 1,
    write_priority: Optional[mtf.Tensor] = None,
    read_priority: Optional[mtf.Tensor] = None,
    attention_kwargs: Optional[dict[str, Any]] = None,
) -> mtf.Tensor:
    """Local attention to the `radius` positions up to each one, and as many after it.

    Position i attends to j if -radius < j - i <= radius, or <= 0 if the model is autoregressive.
    The length is cut into blocks, whose size is the largest divisor of a processor's part that is
    at most max(radius, 128). The dimension of blocks has the name of the length; a layout may split
    it.

    Args:
      q: queries, a Tensor with dimensions [batch..., length, heads..., key_dim].
      k: keys, a Tensor with dimensions [batch..., length, heads..., key_dim].
      v: values, a Tensor with dimensions [batch..., length, heads..., value_dim].
      length_dim: a Dimension.
      key_dim: the Dimension of channels of queries and keys.
      value_dim: the Dimension of channels of values.
      fully_autoregressive: whether positions attend to earlier positions only.
      length_dim_num_splits: into how many parts the layout splits the length.
      radius: the number of positions on each side.
      sequence_id: a Tensor with dimensions [batch..., length]; positions attend to those with the
        same id only. 1 or None if there is one sequence.
      write_priority: a Tensor with dimensions [..., length], or None.
      read_priority: a Tensor with dimensions [..., length], or None. Position i attends to j if
        read_priority[i] >= write_priority[j].
      attention_kwargs: a dictionary of further arguments of `attention`, or None.

    Returns:
      A Tensor with dimensions [dims of q without key_dim..., value_dim].

    Raises:
      ValueError: the length is not divisible as requested, or the radius is below 1.
    """
    for name, x in {"q": q, "k": k, "v": v}.items():
        if length_dim not in x.shape:
            raise ValueError(
                f"local_attention_1d: {name} {x.name} {x.shape} has no length_dim "
                f"{dims_text([length_dim])}; queries, keys and values all have it"
            )
    output_shape = mtf.Shape([d for d in q.shape if d != key_dim] + [value_dim])
    blocks = _Blocks(length_dim, length_dim_num_splits, radius, fully_autoregressive)
    bias = _bias(blocks, q.mesh, sequence_id, write_priority, read_priority, q.dtype)
    kwargs = dict(attention_kwargs or {})
    # The length is cut into blocks, which have its name: a mask is shared within a block instead.
    shared = [d for d in kwargs.pop("dropout_broadcast_dims", None) or [] if d != length_dim]
    o = attention(
        blocks.queries(q),
        blocks.memories(k),
        blocks.memories(v),
        blocks.window,
        key_dim,
        value_dim,
        bias=bias,
        dropout_broadcast_dims=[*shared, blocks.query],
        **kwargs,
    )
    return mtf.reshape(o, output_shape)


def _log_add(x: mtf.Tensor, y: Union[mtf.Tensor, float]) -> mtf.Tensor:
    """Returns log(exp(x) + exp(y))."""
    # Subtracted first, so that no exponential overflows.
    largest = mtf.maximum(x, y)
    return largest + mtf.log(mtf.exp(x - largest) + mtf.exp(y - largest))


def _before_decoding(context: Context, logits: mtf.Tensor) -> mtf.Tensor:
    """Masks the logits of queries at and after the position where decoding begins."""
    if context.initial_position is None:
        return logits
    positions = mtf.range(context.mesh, context.length_dim, tf.int32)
    # Later queries are decoded one by one, and each step adds its own.
    outside = mtf.greater_equal(positions, context.initial_position)
    return _masks.hide(logits, _masks.hidden_where(outside, logits.dtype))


def _log_sums_over_queries(
    context: Context, logits: mtf.Tensor, extra_logit: Union[mtf.Tensor, float, None]
) -> mtf.Tensor:
    """Returns the log of the sum of exp(logits) over queries, for each memory position.

    In decoding, the sum is over the queries up to the current position.
    """
    if context.mode == "incremental":
        [sums] = context.get_states(1)
        # States are zeros where decoding begins without given ids, and the log of no sum is not 0.
        begun = mtf.greater(context.position, 0)
        sums = _log_add(select(begun, sums, HIDDEN_LOGIT, sums.shape), logits)
        context.record_new_states([sums])
    else:
        if context.mode == "first_part":
            logits = _before_decoding(context, logits)
        # In logarithms the division by a sum is a difference, and no exponential overflows.
        sums = mtf.reduce_logsumexp(logits, context.length_dim)
        if context.mode == "first_part":
            context.record_new_states([sums])
    return sums if extra_logit is None else _log_add(sums, extra_logit)


@leaves_no_node
def hybrid_attention(
    q: mtf.Tensor,
    k: mtf.Tensor,
    v: mtf.Tensor,
    context: Context,
    memory_length_dim: mtf.Dimension,
    key_dim: mtf.Dimension,
    value_dim: mtf.Dimension,
    bias: Optional[mtf.Tensor] = None,
    dropout_rate: float = 0.0,
    dropout_broadcast_dims: Optional[Sequence[mtf.Dimension]] = None,
    extra_logit: Union[mtf.Tensor, float, None] = None,
) -> mtf.Tensor:
    """Attention with a learned mix of softmax weights and doubly normalized weights.

    Ding et al., "Attention that does not explain away" (2020): doubly normalized weights are
    normalized over queries first, then over the memory. So each weight depends on all queries of a
    sequence, later ones included; in decoding, on those up to the current one.

    Args:
      q: queries, a Tensor with dimensions [batch..., length, heads..., key_dim].
      k: keys, a Tensor with dimensions [batch..., memory_length, heads..., key_dim].
      v: values, a Tensor with dimensions [batch..., memory_length, heads..., value_dim].
      context: the Context of this call of the model: its mode, positions, states and losses.
      memory_length_dim: the Dimension of positions that are attended to.
      key_dim: the Dimension of channels of queries and keys.
      value_dim: the Dimension of channels of values.
      bias: a Tensor that is added to the logits, or None.
      dropout_rate: the dropout rate of the attention weights.
      dropout_broadcast_dims: Dimensions along which the dropout mask is the same, or None.
      extra_logit: a number or a Tensor, one more logit in each denominator; or None.

    Returns:
      A Tensor with dimensions [dims of q without key_dim..., value_dim].

    Raises:
      ValueError: a dimension is missing.
    """
    tensors = {"q": q, "k": k, "v": v}
    check_operands("hybrid_attention", tensors, memory_length_dim, key_dim, value_dim)
    # Of all pairs and never by blocks: the sums over queries need the logits of all queries at
    # once.
    logits = layers.us_einsum(
        [q, k], output_shape=logits_shape(q.shape, k.shape, memory_length_dim, key_dim)
    )
    logits = _masks.biased(logits, bias)
    mix = mtf.get_variable(
        context.mesh,
        "doubly_coeff",
        mtf.Shape([]),
        initializer=tf.constant_initializer(0.5),
        dtype=context.variable_dtype,
    )
    # Training knows no bounds, and beyond these the mix could have negative weights.
    mix = mtf.maximum(mtf.minimum(mix, 1.0), 0.0)
    # weights = (1 - mix) * softmax(logits) + mix * (normalized over queries, then over the memory).
    usual = mtf.softmax(logits, memory_length_dim, extra_logit=extra_logit)
    # Weights before the second softmax are exp(logit) / (sum over queries of exp(logit)).
    twice = logits - _log_sums_over_queries(context, logits, extra_logit)
    # A memory position that is masked for all queries has a sum as low as its logits.
    twice = _masks.hide(twice, bias)
    twice = mtf.softmax(twice, memory_length_dim, extra_logit=extra_logit)
    weights = usual + (twice - usual) * mix
    rows = q.shape - key_dim
    weights = dropped(weights, rows.dims, context.train, dropout_rate, dropout_broadcast_dims)
    return mtf.einsum([weights, v], output_shape=rows + value_dim)


# -- synthesizers


def _first(x: mtf.Tensor, dim: mtf.Dimension) -> mtf.Tensor:
    """Slices the beginning of `x` along the dimension named like `dim`, which may be split."""
    # Under a name that no rule splits: parts of a slice are not where those of the whole are.
    whole = mtf.rename_dimension(x, dim.name, "_" + dim.name)
    part = mtf.slice(whole, 0, dim.size, "_" + dim.name)
    return mtf.rename_dimension(part, "_" + dim.name, dim.name)


@dataclasses.dataclass(frozen=True)
class _SyntheticLogits:
    """Logits that are not products, and the sizes of their weights.

    Attributes:
      context: the Context of this call of the model: its mode, positions, states and losses.
      q: queries, a Tensor; None in modes without them.
      heads_dim: a Dimension.
      key_dim: the Dimension of channels of queries.
      memory_length_dim: the Dimension of positions that are attended to.
      max_length: the number of positions that there are weights for.
      factorized_dim: the number of summands of `factorized`.
    """

    context: Context
    q: Optional[mtf.Tensor]
    heads_dim: mtf.Dimension
    key_dim: mtf.Dimension
    memory_length_dim: mtf.Dimension
    max_length: int
    factorized_dim: int

    @property
    def columns(self) -> mtf.Dimension:
        """The memory of the weights, which are for `max_length` positions whatever the length.

        So one variable serves all lengths up to it.
        """
        return mtf.Dimension(self.memory_length_dim.name, self.max_length)

    def _table(self, name: str, first: mtf.Dimension) -> mtf.Tensor:
        """Returns a variable [first, heads, memory], cut to the length of the memory."""
        shape = mtf.Shape([first, self.heads_dim, self.columns])
        table = mtf.get_variable(self.context.mesh, name, shape, dtype=self.context.variable_dtype)
        return _first(table, self.memory_length_dim)

    def random(self) -> mtf.Tensor:
        """Returns learned logits that are the same for all sequences."""
        length_dim = self.context.length_dim
        rows = mtf.Dimension(length_dim.name, self.max_length)
        logits = self._table("R", rows)
        if self.context.mode == "incremental":
            # A step has one query, so it takes one row of the logits.
            return mtf.gather(logits, self.context.position, rows)
        return _first(logits, length_dim)

    def factorized(self) -> mtf.Tensor:
        """Returns a logit for each position of the memory, the same for all queries.

        logits[h, m] = sum over t of R1[t, h, m] * R2[t, h, m]
        """
        summed = mtf.Dimension("tmp", self.factorized_dim)
        factors = [self._table(name, summed) for name in ("R1", "R2")]
        logits = mtf.einsum(factors, output_shape=[self.heads_dim, self.memory_length_dim])
        if self.context.mode == "incremental":
            return logits
        # Without queries nothing else has the length, which weights and the output need.
        return mtf.broadcast(logits, mtf.Shape([self.context.length_dim, *logits.shape]))

    def dense(self) -> mtf.Tensor:
        """Returns logits computed from each query by a dense layer that all heads share."""
        assert self.q is not None
        # pi relu(q), where q is already a projection of x: the two layers of Tay et al. (2020).
        logits = layers.dense(
            mtf.relu(self.q),
            self.columns,
            reduced_dims=[self.key_dim],
            use_bias=False,
            variable_dtype=self.context.variable_dtype,
            name="pi",
        )
        return _first(logits, self.memory_length_dim)


def _only(context: Context, products: Optional[mtf.Tensor], synthetic: mtf.Tensor) -> mtf.Tensor:
    return synthetic


def _plus(context: Context, products: Optional[mtf.Tensor], synthetic: mtf.Tensor) -> mtf.Tensor:
    return products + synthetic


def _plus_alpha(
    context: Context, products: Optional[mtf.Tensor], synthetic: mtf.Tensor
) -> mtf.Tensor:
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
    return products * (1.0 - alpha) + synthetic * alpha


_Mode = tuple[Callable[..., mtf.Tensor], Callable[..., mtf.Tensor]]

# By mode: how logits are computed, and how they are combined with products.
SYNTHESIZE_MODES: dict[str, _Mode] = {
    "random": (_SyntheticLogits.random, _only),
    "random_plus": (_SyntheticLogits.random, _plus),
    "random_plus_alpha": (_SyntheticLogits.random, _plus_alpha),
    "dense_minus": (_SyntheticLogits.dense, _only),
    "dense_plus": (_SyntheticLogits.dense, _plus),
    "dense_plus_alpha": (_SyntheticLogits.dense, _plus_alpha),
    "factorized": (_SyntheticLogits.factorized, _only),
}
# For so many positions are the weights in users' checkpoints, whatever max_length was: the classic
# asks for it only in these two modes. Longer sequences, which it refuses, need a larger max_length.
_LEAST_LENGTH = 512
_OF_MAX_LENGTH = ("random", "dense_minus")


def _mode(name: str) -> _Mode:
    check_choice("synthetic_attention", "synthesize_mode", name, sorted(SYNTHESIZE_MODES))
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
      max_length: the largest length, which determines the size of the weights; but for "random" and
        "dense_minus" they are for 512 positions at least.
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
        if synthesize_mode not in _OF_MAX_LENGTH:
            max_length = max(max_length, _LEAST_LENGTH)
        _check_lengths(max_length, memory_length_dim, context.length_dim)
        heads_dim = _heads_dim(q, v)
        synthetic = _SyntheticLogits(
            context, q, heads_dim, key_dim, memory_length_dim, max_length, factorized_dim
        )
        logits = join(context, logits, make(synthetic))
    assert logits is not None
    logits = _masks.biased(logits, bias)
    weights = mtf.softmax(logits, memory_length_dim, extra_logit=extra_logit)
    weights = dropped(weights, (), context.train, dropout_rate, dropout_broadcast_dims)
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
