"""Attention to near positions, and to a memory that is compressed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow.layers._attention import (
    attend,
    check_dropout,
    dot_product_attention,
    multihead_attention_vars,
    project,
    trains_if_not_told,
)
from mesh_tensorflow.layers._masks import (
    attention_bias_local_2d_block,
    attention_bias_local_block,
    hidden_where,
)


def _check_factor(what: str, x: mtf.Tensor, dim: mtf.Dimension, factor: int) -> None:
    if dim not in x.shape:
        raise ValueError(f"{what}: {x.name} {x.shape} has no dimension {dims_text([dim])}")
    if factor < 1 or dim.size % factor:
        raise ValueError(
            f"{what}: the compression factor {factor} must divide {dims_text([dim])} of {x.name} "
            f"{x.shape}; pad that dimension, or use another factor"
        )


@leaves_no_node
def compress_mean(x: mtf.Tensor, dim: mtf.Dimension, compression_factor: int) -> mtf.Tensor:
    """Averages groups of neighboring positions along a dimension.

    >>> x = mtf.constant(mesh, [1.0, 3.0, 5.0, 7.0], "length:4")
    >>> print(mtf.layers.compress_mean(x, x.shape.dims[0], 2).numpy())
    [2. 6.]

    Args:
      x: a Tensor.
      dim: a Dimension of `x`.
      compression_factor: the number of positions per group.

    Returns:
      A Tensor in which `dim` is shorter by that factor.

    Raises:
      ValueError: the factor does not divide the size of `dim`.
    """
    _check_factor("compress_mean", x, dim, compression_factor)
    groups = mtf.Dimension(dim.name, dim.size // compression_factor)
    group = mtf.Dimension("compression_factor", compression_factor)
    # Groups keep the name of the dimension: a rule that splits it splits them, and nothing moves.
    x = mtf.reshape(x, mtf.replace_dimensions(x.shape, dim, [groups, group]))
    return mtf.reduce_mean(x, reduced_dim=group)


@trains_if_not_told
@leaves_no_node
def multihead_self_attention_memory_compressed(
    x: mtf.Tensor,
    mask_right: bool,
    compression_factor: int,
    kv_channels: mtf.Dimension,
    heads: mtf.Dimension,
    is_training: bool,
    dropout: float = 0.0,
    dropout_broadcast_dims: Optional[Sequence[mtf.Dimension]] = None,
    master_dtype: tf.DType = tf.float32,
    slice_dtype: tf.DType = tf.float32,
    name: Optional[str] = "multihead_attention",
) -> mtf.Tensor:
    """Attends to means of groups of positions, and to one extra position with key and value 0.

    Memory-compressed attention of Liu et al., "Generating Wikipedia by summarizing long
    sequences" (2018), with means instead of strided convolutions.

    >>> x = mtf.ones(mesh, "batch:2,length:4,d_model:8")
    >>> kv, heads = mtf.Dimension("kv", 4), mtf.Dimension("heads", 2)
    >>> y = mtf.layers.multihead_self_attention_memory_compressed(
    ...     x, mask_right=True, compression_factor=2, kv_channels=kv, heads=heads, is_training=False
    ... )
    >>> print(y.shape)
    Shape[batch=2, length=4, d_model=8]

    Args:
      x: a Tensor with dimensions [batch..., length, io].
      mask_right: whether a position attends only to groups that end at or before it.
      compression_factor: the number of positions per group.
      kv_channels: a Dimension, the channels of queries, keys and values.
      heads: the Dimension of attention heads.
      is_training: whether dropout is applied; if it is left out, as before 0.1.19, it is.
      dropout: the dropout rate of the attention weights.
      dropout_broadcast_dims: Dimensions along which dropout is shared, or None.
      master_dtype: a dtype.
      slice_dtype: a dtype.
      name: a string, the variable scope; "compressed_attention" if None.

    Returns:
      A Tensor of the shape of `x`.

    Raises:
      ValueError: the factor does not divide the length, or dropout is out of range.
    """
    what = "multihead_self_attention_memory_compressed"
    if len(x.shape) < 2:
        raise ValueError(f"{what}: {x.name} {x.shape} must be [batch..., length, io]")
    length, io = x.shape.dims[-2:]
    _check_factor(what, x, length, compression_factor)
    check_dropout(what, dropout)
    if "memory_length" in x.shape.dimension_names:
        raise ValueError(
            f"{what}: the length of {x.name} {x.shape} is renamed to memory_length, and it has a "
            "dimension of that name. Rename it"
        )
    with tf.variable_scope(name, default_name="compressed_attention"):
        weights = multihead_attention_vars(
            x.mesh, heads, io, kv_channels, master_dtype, slice_dtype, x.dtype
        )
        memory = compress_mean(x, length, compression_factor)
        memory = mtf.rename_dimension(memory, length.name, "memory_length")
        mask = None
        if mask_right:
            # Group g has the positions g * factor to g * factor + factor - 1 of the sequence.
            first = mtf.range(x.mesh, memory.shape.dims[-2], tf.int32) * compression_factor
            query_pos = mtf.range(x.mesh, length, tf.int32)
            # A group is the mean of all its positions, so a query before its end would see later
            # ones.
            mask = hidden_where(mtf.less(query_pos, first + (compression_factor - 1)), x.dtype)
        return attend(
            x,
            memory,
            mask,
            weights,
            kv_channels,
            heads,
            is_training=is_training,
            dropout=dropout,
            dropout_broadcast_dims=dropout_broadcast_dims,
            # The position with key 0 has the logit 0; its value 0 adds nothing to the mean. It lets
            # early positions attend, which see no group at all.
            extra_logit=0.0,
        )


# Blocks may be this long even if the window is shorter, to make matrix products large.
_SHORT_BLOCK = 128


def longest_block(per_split: int, window: int) -> int:
    """Returns the number of positions in a block of local attention.

    Args:
      per_split: the number of positions that a processor has.
      window: the number of positions that are seen.
    """
    limit = min(per_split, max(window, _SHORT_BLOCK))
    # A divisor of what each processor has: a block over two processors would have to be gathered.
    return max(n for n in range(1, limit + 1) if per_split % n == 0)


def _block_length(length: mtf.Dimension, length_per_split: Optional[int], window_size: int) -> int:
    """Returns the number of positions per block, such that no block crosses a split."""
    what = "masked_local_attention_1d"
    if window_size < 0:
        raise ValueError(f"{what}: window_size must be 0 or more, got {window_size}")
    per_split = length.size if length_per_split is None else length_per_split
    if per_split < 1:
        raise ValueError(f"{what}: length_per_split must be 1 or more, got {per_split}")
    block = longest_block(per_split, window_size)
    if length.size % block:
        raise ValueError(
            f"{what}: {dims_text([length])} cannot be cut into blocks of {block}, the largest "
            f"divisor of length_per_split={per_split} up to max(window_size, {_SHORT_BLOCK})="
            f"{max(window_size, _SHORT_BLOCK)}; length_per_split must divide the length"
        )
    return block


def _in_blocks(t: mtf.Tensor, length: mtf.Dimension, block: mtf.Dimension) -> mtf.Tensor:
    # Blocks keep the name of the length: a layout that splits it splits them, and nothing is moved.
    blocks = mtf.Dimension(length.name, length.size // block.size)
    return mtf.reshape(t, mtf.replace_dimensions(t.shape, length, [blocks, block]))


@trains_if_not_told
@leaves_no_node
def masked_local_attention_1d(
    x: mtf.Tensor,
    kv_channels: mtf.Dimension,
    heads: mtf.Dimension,
    is_training: bool,
    window_size: int = 128,
    master_dtype: tf.DType = tf.float32,
    slice_dtype: tf.DType = tf.float32,
    length_per_split: Optional[int] = None,
    return_kv: Optional[list] = None,
    params: Optional[Sequence[mtf.Tensor]] = None,
    name: Optional[str] = None,
) -> mtf.Tensor:
    """Attends to a window of positions to the left, block by block.

    The length is cut into blocks. The block length is the largest divisor of `length_per_split`
    that is at most max(window_size, 128). A position attends to itself and to earlier positions
    that are less than a block length away and are in its block or among the `window_size`
    positions before the block. So where the block length equals `window_size`, the window is
    exactly the last `window_size` positions including the current one. Positions before the
    start of the sequence count, with keys and values 0.

    The dimension that numbers the blocks has the name of the length. A layout may split it if
    each processor holds whole blocks.

    >>> x = mtf.ones(mesh, "batch:2,length:4,d_model:8")
    >>> kv, heads = mtf.Dimension("kv", 4), mtf.Dimension("heads", 2)
    >>> y = mtf.layers.masked_local_attention_1d(x, kv, heads, is_training=False, window_size=2)
    >>> print(y.shape)
    Shape[batch=2, length=4, d_model=8]

    Args:
      x: a Tensor with dimensions [batch..., length, io].
      kv_channels: a Dimension, the channels of queries, keys and values.
      heads: the Dimension of attention heads.
      is_training: a bool, unused; there is no dropout. It may be left out.
      window_size: the number of positions before a block that are visible from it.
      master_dtype: a dtype.
      slice_dtype: a dtype.
      length_per_split: the number of positions per processor; the whole length if None.
      return_kv: a list to which keys and values, [batch..., heads, length, kv_channels], are
        appended; or None.
      params: four weights as returned by `multihead_attention_params`; variables if None.
      name: a string, the variable scope; "masked_local_attention_1d" if None.

    Returns:
      A Tensor of the shape of `x`.

    Raises:
      ValueError: the window is negative, or the length is not a multiple of the block length.
    """
    if len(x.shape) < 2:
        raise ValueError(
            f"masked_local_attention_1d: {x.name} {x.shape} must be [batch..., length, io]"
        )
    length, io = x.shape.dims[-2:]
    block_length = _block_length(length, length_per_split, window_size)
    block = mtf.Dimension("query_block_length", block_length)
    memory_block = mtf.Dimension("memory_block_length", block_length)
    # Positions a block length or more away are never visible.
    halo = min(window_size, block_length)
    with tf.variable_scope(name, default_name="masked_local_attention_1d"):
        wq, wk, wv, wo = params or multihead_attention_vars(
            x.mesh, heads, io, kv_channels, master_dtype, slice_dtype, x.dtype
        )
        # Before the halo exchange, so that margins are not projected again by their neighbors.
        q, k, v = (project(x, w, heads, kv_channels, 1) for w in (wq, wk, wv))
        if return_kv is not None:
            return_kv.extend([k, v])
        q = _in_blocks(q, length, block)
        blocks = q.shape.dims[-3]
        k, v = (
            mtf.left_halo_exchange(_in_blocks(t, length, memory_block), blocks, memory_block, halo)
            for t in (k, v)
        )
        query_pos = mtf.range(x.mesh, block, tf.int32)
        # Relative to the block, so that one mask serves all blocks.
        memory_pos = mtf.range(x.mesh, k.shape.dims[-2], tf.int32) - halo
        # Seen is query_pos - block_length < memory_pos <= query_pos.
        unseen = mtf.logical_or(
            mtf.less(query_pos, memory_pos),
            mtf.greater_equal(query_pos, memory_pos + block_length),
        )
        o = dot_product_attention(q, k, v, hidden_where(unseen, x.dtype), is_training)
        # The inverse of `_in_blocks`: again the name of the length remains, and nothing is moved.
        o = mtf.reshape(o, mtf.replace_dimensions(o.shape, [blocks, block], length))
        return mtf.einsum([o, wo], output_shape=x.shape)


@leaves_no_node
def local_1d_halo_exchange(
    k: mtf.Tensor,
    v: mtf.Tensor,
    num_w_blocks: Optional[mtf.Dimension],
    w_dim: mtf.Dimension,
    mask_right: bool,
) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Extends keys and values of each block by those of its neighbors, with zeros at the ends.

    >>> k = mtf.ones(mesh, "blocks:3,length:2,kv:4")
    >>> blocks, length, _ = k.shape.dims
    >>> k, v = mtf.layers.local_1d_halo_exchange(k, k, blocks, length, mask_right=True)
    >>> print(k.shape)
    Shape[blocks=3, length=4, kv=4]

    Args:
      k: keys, a Tensor with dimensions [..., num_w_blocks, ..., w_dim, ...].
      v: values, a Tensor with dimensions [..., num_w_blocks, ..., w_dim, ...].
      num_w_blocks: the Dimension of blocks, or None for one block.
      w_dim: a Dimension, the positions of a block.
      mask_right: whether to use the left neighbor only.

    Returns:
      A tuple (k, v) in which `w_dim` is three times as large, or twice with `mask_right`.
    """
    # A whole block as margin, so that each position sees its neighbor blocks from end to end.
    exchange = mtf.left_halo_exchange if mask_right else mtf.halo_exchange
    k, v = (exchange(t, num_w_blocks, w_dim, w_dim.size) for t in (k, v))
    return k, v


@leaves_no_node
def local_2d_halo_exchange(
    k: mtf.Tensor,
    v: mtf.Tensor,
    num_h_blocks: Optional[mtf.Dimension],
    h_dim: mtf.Dimension,
    num_w_blocks: Optional[mtf.Dimension],
    w_dim: mtf.Dimension,
    mask_right: bool,
) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Extends keys and values of each block of an image by those of its neighbors.

    >>> k = mtf.ones(mesh, "h_blocks:3,w_blocks:3,h:2,w:2,kv:4")
    >>> h_blocks, w_blocks, h, w, _ = k.shape.dims
    >>> k, v = mtf.layers.local_2d_halo_exchange(k, k, h_blocks, h, w_blocks, w, mask_right=False)
    >>> print(k.shape)
    Shape[h_blocks=3, w_blocks=3, h=6, w=6, kv=4]

    Args:
      k: keys, a Tensor with dimensions [..., num_h_blocks, num_w_blocks, ..., h_dim, w_dim, ...].
      v: values, a Tensor with the dimensions of `k`.
      num_h_blocks: the Dimension of blocks along the height, or None for one block.
      h_dim: a Dimension, the rows of a block.
      num_w_blocks: the Dimension of blocks along the width, or None for one block.
      w_dim: a Dimension, the columns of a block.
      mask_right: whether to use only the neighbors above, to the left, and above to the left.

    Returns:
      A tuple (k, v) in which `h_dim` and `w_dim` are three times as large, or twice with
      `mask_right`.
    """
    # The second exchange passes on what the first has brought, and so the corners, from blocks that
    # are diagonal neighbors.
    k, v = local_1d_halo_exchange(k, v, num_h_blocks, h_dim, mask_right)
    return local_1d_halo_exchange(k, v, num_w_blocks, w_dim, mask_right)


def _memory_dim(what: str, x: mtf.Tensor, dim: mtf.Dimension) -> mtf.Dimension:
    """Returns the Dimension that stands for `dim` on the memory side of attention."""
    name = "memory_" + dim.name
    if name in x.shape.dimension_names:
        raise ValueError(
            f"{what}: {x.name} {x.shape} has a dimension {name!r}, by which {dims_text([dim])} of "
            "the memory would go; give it another name"
        )
    return mtf.Dimension(name, dim.size)


@trains_if_not_told
@leaves_no_node
def local_self_attention_spatial_blocks(
    query_antecedent: mtf.Tensor,
    kv_channels: mtf.Dimension,
    heads: mtf.Dimension,
    is_training: bool,
    memory_w_dim: Optional[mtf.Dimension] = None,
    mask_right: bool = False,
    master_dtype: tf.DType = tf.float32,
    slice_dtype: tf.DType = tf.float32,
    name: Optional[str] = None,
) -> mtf.Tensor:
    """Attends from each block of a sequence to itself and to its neighbors.

    Parmar et al., "Image transformer" (2018). Positions beyond the ends count, with keys and
    values 0. A layout may split the blocks.

    >>> x = mtf.ones(mesh, "batch:2,num_wblocks:2,length:4,d_model:8")
    >>> kv, heads = mtf.Dimension("kv", 4), mtf.Dimension("heads", 2)
    >>> y = mtf.layers.local_self_attention_spatial_blocks(x, kv, heads, is_training=False)
    >>> print(y.shape)
    Shape[batch=2, num_wblocks=2, length=4, d_model=8]

    Args:
      query_antecedent: a Tensor with dimensions [batch..., num_w_blocks, w, io].
      kv_channels: a Dimension, the channels of queries, keys and values.
      heads: the Dimension of attention heads.
      is_training: a bool, unused; there is no dropout. It may be left out.
      memory_w_dim: a Dimension or None, unused: memory positions are "memory_w" for "w".
      mask_right: whether to attend only to the left neighbor, and within the block only to the
        position itself and to earlier ones.
      master_dtype: a dtype.
      slice_dtype: a dtype.
      name: a string, the variable scope; "multihead_attention" if None.

    Returns:
      A Tensor of the shape of `query_antecedent`.

    Raises:
      ValueError: dimensions are missing, or one has the name of a memory dimension.
    """
    how = (mask_right, kv_channels, heads, is_training, master_dtype, slice_dtype, name)
    what = "local_self_attention_spatial_blocks"
    return _attend_to_blocks(what, query_antecedent, ["w"], *how)


@trains_if_not_told
@leaves_no_node
def local_2d_self_attention_spatial_blocks(
    query_antecedent: mtf.Tensor,
    kv_channels: mtf.Dimension,
    heads: mtf.Dimension,
    is_training: bool,
    memory_h_dim: Optional[mtf.Dimension] = None,
    memory_w_dim: Optional[mtf.Dimension] = None,
    mask_right: bool = False,
    master_dtype: tf.DType = tf.float32,
    slice_dtype: tf.DType = tf.float32,
    name: Optional[str] = None,
) -> mtf.Tensor:
    """Attends from each block of an image to itself and to the blocks around it.

    Parmar et al., "Image transformer" (2018). Positions beyond the border count, with keys and
    values 0. A layout may split the blocks.

    Without `mask_right`, the memory positions of a column share one attention weight, as in
    release 0.1.21: logits are summed over rows, and the softmax is over columns. With
    `mask_right`, each position has its own weight.

    >>> x = mtf.ones(mesh, "batch:2,num_h_blocks:2,num_w_blocks:2,h:2,w:2,d_model:8")
    >>> kv, heads = mtf.Dimension("kv", 4), mtf.Dimension("heads", 2)
    >>> y = mtf.layers.local_2d_self_attention_spatial_blocks(x, kv, heads, is_training=False)
    >>> print(y.shape)
    Shape[batch=2, num_h_blocks=2, num_w_blocks=2, h=2, w=2, d_model=8]

    Args:
      query_antecedent: a Tensor with dimensions [batch..., num_h_blocks, num_w_blocks, h, w, io].
      kv_channels: a Dimension, the channels of queries, keys and values.
      heads: the Dimension of attention heads.
      is_training: a bool, unused; there is no dropout. It may be left out.
      memory_h_dim: a Dimension or None, unused: memory rows are "memory_h" for "h".
      memory_w_dim: a Dimension or None, unused: memory columns are "memory_w" for "w".
      mask_right: whether to attend only to the blocks above, to the left, and above to the left,
        and to earlier positions of the block; see `attention_bias_local_2d_block`.
      master_dtype: a dtype.
      slice_dtype: a dtype.
      name: a string, the variable scope; "multihead_attention" if None.

    Returns:
      A Tensor of the shape of `query_antecedent`.

    Raises:
      ValueError: dimensions are missing, or one has the name of a memory dimension.
    """
    how = (mask_right, kv_channels, heads, is_training, master_dtype, slice_dtype, name)
    what = "local_2d_self_attention_spatial_blocks"
    return _attend_to_blocks(what, query_antecedent, ["h", "w"], *how)


def _attend_to_blocks(
    what: str,
    x: mtf.Tensor,
    names: Sequence[str],
    mask_right: bool,
    kv_channels: mtf.Dimension,
    heads: mtf.Dimension,
    is_training: bool,
    master_dtype: tf.DType,
    slice_dtype: tf.DType,
    name: Optional[str],
) -> mtf.Tensor:
    """Attends from each block to itself and its neighbors, along one or two dimensions.

    Args:
      what: the name of the layer.
      x: a Tensor with dimensions [batch..., blocks..., positions..., io].
      names: what errors call the dimensions of positions.
      mask_right: whether later positions and blocks are hidden.
      kv_channels: a Dimension.
      heads: a Dimension.
      is_training: a bool.
      master_dtype: a dtype.
      slice_dtype: a dtype.
      name: the variable scope, or None.
    """
    n = len(names)
    if len(x.shape) < 2 * n + 1:
        dims = ", ".join([*(f"num_{name}_blocks" for name in names), *names])
        raise ValueError(f"{what}: {x.name} {x.shape} must be [batch..., {dims}, io]")
    blocks, places = x.shape.dims[-2 * n - 1 : -n - 1], x.shape.dims[-n - 1 : -1]
    memory_places = [_memory_dim(what, x, dim) for dim in places]
    with tf.variable_scope(name, default_name="multihead_attention"):
        wq, wk, wv, wo = multihead_attention_vars(
            x.mesh, heads, x.shape.dims[-1], kv_channels, master_dtype, slice_dtype, x.dtype
        )
        # Logits cross queries with the memory, so positions of the two need different names.
        memory = x
        for dim, memory_dim in zip(places, memory_places):
            memory = mtf.rename_dimension(memory, dim.name, memory_dim.name)
        q = project(x, wq, heads, kv_channels, n)
        k, v = (project(memory, w, heads, kv_channels, n) for w in (wk, wv))
        # Of projected blocks: neighbors would otherwise project each margin again. The second
        # exchange passes corners on; see `local_2d_halo_exchange`.
        for blocks_dim, memory_dim in zip(blocks, memory_places):
            k, v = local_1d_halo_exchange(k, v, blocks_dim, memory_dim, mask_right)
        # Without a mask, rows stay a dimension of keys that queries lack: logits are summed over
        # them, as in the classic.
        mask = None
        if mask_right:
            bias = attention_bias_local_block if n == 1 else attention_bias_local_2d_block
            mask = mtf.cast(bias(x.mesh, *places, *memory_places), x.dtype)
            if n > 1:
                # A softmax is over one dimension, so rows and columns of the memory have to be one.
                both = mask.shape.dims[-2:]
                joined = mtf.combined_dimension(both)
                k, v, mask = (
                    mtf.reshape(t, mtf.replace_dimensions(t.shape, both, joined))
                    for t in (k, v, mask)
                )
        o = dot_product_attention(q, k, v, mask, is_training)
        return mtf.einsum([o, wo], output_shape=x.shape)
