"""Dot-product attention: how it is split, by blocks or not, and exchanges of positions for heads.

Jacobs et al., "DeepSpeed Ulysses" (2023): where the length is split, an all-to-all gives each
processor all positions of some heads; after attention another one takes them back.
"""

from __future__ import annotations

import copy
import functools
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow._core.errors import dims_text, slip
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow._core.operation import without_stages
from mesh_tensorflow._core.shape import single_axes
from mesh_tensorflow.layers import _masks
from mesh_tensorflow.layers._attention import dropped, logits_shape
from mesh_tensorflow.layers._blocked_attention import (
    added_terms,
    attention_and_log_sums,
    check_soft_cap,
    soft_capped,
    whole_dims,
)
from mesh_tensorflow.layers._masks import MadeOf
from mesh_tensorflow.transformer.transformer._context import made_once

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context


# -- positions exchanged for heads


ALL_TO_ALL = "all_to_all"  # the attention_func
_HEADS, _SPLIT_HEADS = "heads", "attention_heads"
_WHOLE_LENGTH = "attention_length"
_MEMORY, _WHOLE_MEMORY = "memory_length", "attention_memory_length"
# What a Context has of each position, of the sequence or of the encoder's.
_OF_POSITIONS = (
    *("position", "sequence_id", "subsequence_id", "read_priority", "write_priority"),
    "encoder_sequence_id",
)


def _renamed(x: mtf.Tensor, names: dict[str, str]) -> mtf.Tensor:
    dims = [mtf.Dimension(names.get(d.name, d.name), d.size) for d in x.shape.dims]
    # A reshape to names with other rules is what moves parts: its lowering is the exchange.
    return mtf.reshape(x, mtf.Shape(dims))


def by_heads(x: mtf.Tensor, length_name: str) -> mtf.Tensor:
    """Exchanges positions for heads: one all-to-all, if both are split.

    Args:
      x: keys or values.
      length_name: the name of their positions.
    """
    return _renamed(x, {length_name: _WHOLE_MEMORY, _HEADS: _SPLIT_HEADS})


def memory_name(context: Context) -> str:
    """Returns what the positions of the memory are called in attention."""
    exchanged = getattr(context, "exchanged_length_dim", None)  # a user's own class may lack it
    return _MEMORY if exchanged is None else _WHOLE_MEMORY


def by_positions(x: mtf.Tensor, context: Context) -> mtf.Tensor:
    """Exchanges heads for positions: back from `by_heads`."""
    return _renamed(x, {_WHOLE_LENGTH: context.length_dim.name, _SPLIT_HEADS: _HEADS})


def of_heads(context: Context) -> Context:
    """Returns a Context with the length that attention has, for masks, biases and losses."""
    # Shallow: the lists of losses and states, and the cache, remain those of the call.
    copied = copy.copy(context)
    # The whole length has a name that no rule splits, while heads get one that a rule may split.
    copied.length_dim = mtf.Dimension(_WHOLE_LENGTH, context.length_dim.size)
    copied.exchanged_length_dim = context.length_dim
    for name in _OF_POSITIONS:
        value = getattr(context, name, None)
        if isinstance(value, mtf.Tensor):
            names = {context.length_dim.name: _WHOLE_LENGTH, _MEMORY: _WHOLE_MEMORY}
            setattr(copied, name, _renamed(value, names))
    return copied


def matched(x: mtf.Tensor, context: Context) -> mtf.Tensor:
    """Returns `x` with positions exchanged for heads if a Context is one of `of_heads`.

    Variables keep the names of their dimensions, so it is their values that are exchanged.
    """
    length_dim = getattr(context, "exchanged_length_dim", None)  # a user's own class may lack it
    if length_dim is None:
        return x
    return _renamed(x, {length_dim.name: context.length_dim.name, _HEADS: _SPLIT_HEADS})


def _axes(context: Context) -> Optional[Callable[[str], Optional[mtf.Dimension]]]:
    """Returns a function of a name, the mesh dimension that splits it; None if none is known."""
    layout = getattr(context.model, "layout", None)
    mesh_shape: Any = getattr(context.model, "mesh_shape", None)
    if layout is None or mesh_shape is None:
        return None
    rules, mesh_shape = mtf.convert_to_layout_rules(layout), mtf.convert_to_shape(mesh_shape)

    def axis(name: str) -> Optional[mtf.Dimension]:
        # Of a size that every mesh dimension divides: what they do not divide is told elsewhere.
        dim = mtf.Dimension(name, mesh_shape.size)
        name_of_axis = rules.mesh_axis(dim, mesh_shape)
        return None if name_of_axis is None else mesh_shape[name_of_axis]

    return axis


def check_memory_layout(what: str, context: Context) -> None:
    """Checks that the first part of decoding, which exchanges nothing, has room for its logits.

    Args:
      what: the name of the layer.
      context: the Context of this call of the model: its mode, positions, states and losses.

    Raises:
      ValueError: the length and the memory are split over one mesh dimension.
    """
    axis = _axes(context)
    over = axis and axis(_MEMORY)
    if axis and over and over == axis(context.length_dim.name):
        raise ValueError(
            f"{what}: attention_func={ALL_TO_ALL!r} exchanges nothing in decoding, whose logits "
            f"are {context.length_dim.name} times {_MEMORY}, and the layout splits both over "
            f"{over.name}. Decode with a layout without {_MEMORY}:{over.name}, such as heads:"
            f"{over.name}"
        )


def check_layout(what: str, context: Context, heads_dim: mtf.Dimension) -> None:
    """Checks that heads can be exchanged for positions, if the model knows its layout.

    Args:
      what: the name of the layer.
      context: the Context of this call of the model: its mode, positions, states and losses.
      heads_dim: the Dimension of heads of queries and, but for a single one, of keys and values.

    Raises:
      ValueError: the length is split and heads are not, or their number is not divisible.
    """
    axis = _axes(context)
    if axis is None:
        return
    by_length, by_heads = axis(context.length_dim.name), axis(_SPLIT_HEADS)
    if by_length is not None and by_heads is None:
        raise ValueError(
            f"{what}: attention_func={ALL_TO_ALL!r} exchanges parts of the length, which the "
            f"layout splits over {by_length.name}, for heads, which it does not split; add the "
            f"rule {_SPLIT_HEADS}:{by_length.name}"
        )
    if by_heads is not None and heads_dim.size % by_heads.size:
        raise ValueError(
            f"{what}: attention_func={ALL_TO_ALL!r} splits {_SPLIT_HEADS}={heads_dim.size} over "
            f"{by_heads.name}={by_heads.size}, which does not divide it. Take a multiple of "
            f"{by_heads.size} heads (num_heads, and num_memory_heads if it is above 1), or "
            'attention_kwargs={"ring": True}, for which any number will do'
        )


# -- attention


def visibility_mask_to_attention_bias(visible: mtf.Tensor, dtype: tf.DType) -> mtf.Tensor:
    """Converts a visibility mask to an attention bias: 0 where visible, -1e9 where masked.

    Args:
      visible: a boolean Tensor.
      dtype: the dtype of the result.

    Returns:
      A Tensor of the shape of `visible`.
    """
    return _masks.hidden_where(mtf.logical_not(visible), dtype)


_Split = tuple[mtf.Dimension, list[mtf.Dimension]]


def _idle_names(
    layout: mtf.LayoutRules, mesh_shape: mtf.Shape, dims: Iterable[mtf.Dimension]
) -> Iterable[tuple[str, int]]:
    """Yields (name of a tensor dimension, number of slices) for each unused mesh dimension."""
    dims = list(dims)
    names = {d.name for d in dims}
    used = single_axes(layout.mesh_axis(d, mesh_shape) for d in dims)
    for axis, mesh_dim in enumerate(mesh_shape.dims):
        if axis in used or mesh_dim.size == 1:
            continue
        # Of this mesh dimension alone: others of a joint rule may be in use.
        rules = {name for name, over in layout.pairs if over == mesh_dim.name}
        # One of them will do, as all are split over the same mesh dimension. Sorted, since the
        # order of a set varies and equal programs should make equal graphs.
        for name in sorted(rules - names)[:1]:
            yield name, mesh_dim.size


def find_split(
    context: Context, tensors: Sequence[mtf.Tensor], unsplittable_dims: Sequence[mtf.Dimension]
) -> Optional[_Split]:
    """Returns a dimension of all tensors and the two dimensions that replace it, or None.

    Args:
      context: a Context or None.
      tensors: Tensors, the first two of which are queries and keys.
      unsplittable_dims: Dimensions that are not split.
    """
    model: Any = getattr(context, "model", None)
    if getattr(model, "layout", None) is None or getattr(model, "mesh_shape", None) is None:
        return None
    layout = mtf.convert_to_layout_rules(model.layout)
    mesh_shape: Any = mtf.convert_to_shape(model.mesh_shape)
    q, k = tensors[:2]
    dims = [d for t in tensors for d in t.shape]
    for name, parts in _idle_names(layout, mesh_shape, dims):
        # Operations of a pipeline's layers give the stages to their outputs by themselves.
        for dim in without_stages(q):
            # Of both, as a dimension of the batch: each product needs what is in its own part.
            if dim not in k.shape or dim in unsplittable_dims:
                continue
            # The outer part has an index for each present slice, so that its split stays the same,
            # and only the inner part is split further.
            outer = mtf.tensor_dim_to_mesh_dim_size(layout, mesh_shape, dim)
            if dim.size % (outer * parts) == 0:
                inner = mtf.Dimension(name, dim.size // outer)
                q.graph.names_lent.add(name)
                return dim, [mtf.Dimension(dim.name, outer), inner]
    return None


def split_again(x: Optional[mtf.Tensor], split: Optional[_Split]) -> Optional[mtf.Tensor]:
    """Returns `x` with the dimension of a split replaced, also in what it was made of."""
    if x is None or split is None:
        return x
    y = mtf.replace_dimensions(x, *split) if split[0] in x.shape else x
    terms: Optional[MadeOf] = x.made_of
    if terms is None:
        return y
    again: Any = functools.partial(split_again, split=split)
    visible = [(name, again(a), again(b)) for name, a, b in terms.visible]
    distances = [
        d._replace(values=again(d.values), here=again(d.here), there=again(d.there))
        for d in terms.distances
    ]
    if terms.stands_in:
        # It is a scalar, but its parts have the batch: left whole, it would be crossed with itself.
        return _masks.stand_in(x.mesh, visible, x.dtype, distances)
    return y if y is x else _masks.made_of(y, visible, again(terms.rest), distances)


def maybe_reshape_attention_input_for_2d_sharding(
    context: Context,
    q: mtf.Tensor,
    k: mtf.Tensor,
    v: mtf.Tensor,
    bias: Optional[mtf.Tensor],
    unsplittable_dims: Sequence[mtf.Dimension],
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor, Optional[mtf.Tensor]]:
    """Splits attention over a mesh dimension by which the layout splits other tensors only.

    With the layout "batch:x,d_ff:y" all processors along y would repeat the same work. So the first
    dimension that queries and keys share and that is divisible, usually the batch, becomes two, the
    second of which has a name that the layout splits over y. Results are the same.

    Args:
      context: a Context, whose model knows its layout and mesh shape; or None.
      q: a Tensor with dimensions [batch..., length, heads..., d_kv].
      k: a Tensor with dimensions [batch..., memory_length, heads..., d_kv].
      v: a Tensor with dimensions [batch..., memory_length, heads..., d_kv].
      bias: a Tensor or None.
      unsplittable_dims: Dimensions that are not replaced.

    Returns:
      A tuple (q, k, v, bias), reshaped or unchanged.
    """
    split = find_split(context, [q, k, v], unsplittable_dims)
    return tuple(split_again(x, split) for x in (q, k, v, bias))  # type: ignore[return-value]


# From this length of queries and of the memory on, blocks are used: see docs/benchmarks.md.
LEAST_LENGTH = 1024


def _parts_of(bias: Optional[mtf.Tensor]) -> MadeOf:
    """Returns what a bias was made of."""
    parts: Optional[MadeOf] = None if bias is None else bias.made_of
    return MadeOf(bias, ()) if parts is None else parts


def takes_blocks(
    blocked: Optional[bool],
    tensors: Sequence[mtf.Tensor],
    dims: Sequence[mtf.Dimension],
    bias: Optional[mtf.Tensor],
    dropout_rate: Any,
    joint: bool,
    ring: Union[bool, str] = False,
) -> bool:
    """Returns whether attention works by blocks.

    Args:
      blocked: what the caller says; None if it does not.
      tensors: queries, keys and values.
      dims: the Dimensions of the memory, of keys and of values.
      bias: a Tensor or None.
      dropout_rate: a number or a tf scalar.
      joint: whether there are an extra logit and a z-loss, which exclude each other in blocks.
      ring: whether, or how, keys and values are passed around; then blocks are used wherever they
        are possible.

    Raises:
      ValueError: `blocked` is true, and blocks are not possible.
    """
    if blocked is False:
        return False
    q, k, v = tensors
    memory, key, value = dims
    parts = _parts_of(bias)
    terms = added_terms(parts.rest, parts.visible, parts.distances)
    dims_or_reason = whole_dims(q, k, v, memory, key, value, terms)
    why = dims_or_reason if isinstance(dims_or_reason, str) else ""
    if not isinstance(dropout_rate, numbers.Real):
        why = "dropout_rate is a tensor, and blocks need a number"
    elif joint:
        why = "z_loss_coeff leaves an extra_logit out, and blocks have only the sums with it"
    if blocked and why:
        raise ValueError(f"attention: blocked=True is not possible: {why}. Leave blocked out")
    if ring and why:
        slip(
            f"attention: ring={ring!r} is not possible: {why}. Each processor gets all keys and "
            "values, and has all of its logits at once; leave ring out, or mend that"
        )
    # By now an obstacle to what was asked for is told; without a request it only says no.
    if blocked or ring or why:
        return not why
    return min(dims_or_reason.length.size, memory.size) >= LEAST_LENGTH  # type: ignore[union-attr]


def check_operands(
    what: str,
    tensors: Mapping[str, Optional[mtf.Tensor]],
    memory_length_dim: mtf.Dimension,
    key_dim: mtf.Dimension,
    value_dim: mtf.Dimension,
) -> None:
    """Checks that queries, keys and values have the dimensions that attention needs.

    Args:
      what: the name of the function.
      tensors: a dictionary with q, k and v, some of which may be None.
      memory_length_dim: the Dimension of positions that are attended to.
      key_dim: the Dimension of channels of queries and keys.
      value_dim: the Dimension of channels of values.

    Raises:
      ValueError: one is missing, or queries have the memory's dimension.
    """
    needed = {
        "q": {"key_dim": key_dim},
        "k": {"key_dim": key_dim, "memory_length_dim": memory_length_dim},
        "v": {"value_dim": value_dim, "memory_length_dim": memory_length_dim},
    }
    for name, dims in needed.items():
        x = tensors[name]
        for argument, dim in dims.items():
            if x is not None and dim not in x.shape:
                raise ValueError(
                    f"{what}: {name} {x.name} {x.shape} has no {argument} {dims_text([dim])}; "
                    "rename or reshape it, for instance by mtf.rename_dimension"
                )
    q = tensors["q"]
    if q is not None and memory_length_dim in q.shape:
        raise ValueError(
            f"{what}: q {q.name} {q.shape} has the dimension of the memory, "
            f"{dims_text([memory_length_dim])}, with which it is crossed; rename it in k and v by "
            "mtf.layers.rename_length_to_memory_length"
        )


def _add_z_loss(
    log_z: mtf.Tensor,
    rows_shape: mtf.Shape,
    coefficient: float,
    context: Context,
    dtype: tf.DType,
) -> None:
    """Appends the z-loss to the losses: the mean square of the softmax's log denominators.

    Args:
      log_z: the log denominators, a Tensor.
      rows_shape: their Shape, in case the logits have been reshaped.
      coefficient: a number.
      context: the Context of this call of the model: its mode, positions, states and losses.
      dtype: the dtype of the loss.
    """
    # Rows of padding often see nothing, and have the log of a sum of hidden pairs: its square would
    # be infinite, and then NaN times the mask below.
    log_z = mtf.maximum(log_z, _masks.MASKED_LOGIT)
    # With the dimensions from before a split, which the mask of padding has too.
    squares = mtf.square(mtf.reshape(log_z, rows_shape))
    nonpadding = context.nonpadding
    if isinstance(nonpadding, mtf.Tensor):
        mask = mtf.cast(nonpadding, squares.dtype)
        # Padding counts as 0 and is still counted: a mean over all places.
        squares = mtf.multiply(squares, mask, output_shape=squares.shape)
    mean = mtf.reduce_mean(squares)
    mtf.scalar_summary("attention_z_loss", mean)
    number = getattr(context, "num_microbatches", 1)  # a user's own context may lack it
    if number > 1:
        # Losses of microbatches are summed, and this one is to count once for the batch.
        mean /= number
    context.losses.append(mtf.cast(mean * coefficient, dtype))  # type: ignore[union-attr]


def attend(
    q: mtf.Tensor,
    k: mtf.Tensor,
    v: mtf.Tensor,
    memory_length_dim: mtf.Dimension,
    key_dim: mtf.Dimension,
    value_dim: mtf.Dimension,
    bias: Optional[mtf.Tensor] = None,
    dropout_rate: float = 0.0,
    dropout_broadcast_dims: Optional[Sequence[mtf.Dimension]] = None,
    extra_logit: Union[mtf.Tensor, float, None] = None,
    context: Context = None,  # type: ignore[assignment]
    float32_logits: bool = True,
    z_loss_coeff: Optional[float] = None,
    blocked: Optional[bool] = None,
    ring: Union[bool, str] = False,
    soft_cap: Optional[float] = None,
) -> mtf.Tensor:
    """Computes `attention` without checking its operands."""
    # Of the queries before they are split again: the caller knows nothing of that.
    output_shape = q.shape - key_dim + value_dim
    rows_shape = q.shape - key_dim
    # Not along channels, which products sum over: sums of parts would have to be added up.
    split = find_split(context, [q, k, v], [key_dim, value_dim])
    q, k, v, bias = (split_again(x, split) for x in (q, k, v, bias))  # type: ignore[assignment]
    has_z_loss = z_loss_coeff is not None and context.train and context.losses is not None
    dims = (memory_length_dim, key_dim, value_dim)
    joint = has_z_loss and extra_logit is not None
    if getattr(context, "mode", None) == "incremental":
        # One position has nothing that could go around, or be cut.
        blocked, ring = False, False
    if takes_blocks(blocked, (q, k, v), dims, bias, dropout_rate, joint, ring):
        if layers.unit_scaling_convention():
            # What layers.us_einsum does to the logits of the plain form.
            q = q * key_dim.size**-0.5
        made_of = _parts_of(bias)
        outputs, log_z = attention_and_log_sums(
            q,
            k,
            v,
            *dims,
            made_of.rest,
            made_of.visible,
            dropout_rate=dropout_rate if context is None or context.train else 0.0,
            dropout_broadcast_dims=dropout_broadcast_dims,
            extra_logit=extra_logit,
            ring=ring,
            distances=made_of.distances,
            soft_cap=soft_cap,
        )
        if has_z_loss:
            _add_z_loss(log_z, rows_shape, z_loss_coeff, context, v.dtype)  # type: ignore[arg-type]
        return outputs if outputs.shape == output_shape else mtf.reshape(outputs, output_shape)
    bias = _masks.whole(bias)
    dtype = tf.float32 if float32_logits else q.dtype
    # Casts come before the product, whose sums would otherwise be rounded to bfloat16.
    logits = layers.us_einsum(
        [mtf.cast(q, dtype), mtf.cast(k, dtype)],
        # Keys of a layer that does not attend to its memory lack that dimension: the bias gives it.
        output_shape=logits_shape(q.shape, k.shape, memory_length_dim, key_dim),
    )
    if soft_cap is not None:
        logits = soft_capped(logits, soft_cap)
    if bias is not None:
        hiding = made_once(context, ("hiding", bias, dtype), lambda: _masks.hiding(bias, dtype))
        logits = _masks.replaced(logits + mtf.cast(bias, dtype), *hiding)
    if has_z_loss:
        # Without the extra logit, which the softmax has: two sums, of which blocks have but one.
        log_z = mtf.transpose(mtf.reduce_logsumexp(logits, memory_length_dim), q.shape - key_dim)
        _add_z_loss(log_z, rows_shape, z_loss_coeff, context, v.dtype)  # type: ignore[arg-type]
    weights = mtf.softmax(logits, memory_length_dim, extra_logit=extra_logit)
    # After the softmax, whose sums bfloat16 would round.
    weights = mtf.cast(weights, v.dtype)
    rows = q.shape - key_dim
    training = context is None or context.train
    weights = dropped(weights, rows.dims, training, dropout_rate, dropout_broadcast_dims)
    outputs = mtf.einsum([weights, v], output_shape=rows + value_dim)
    return outputs if outputs.shape == output_shape else mtf.reshape(outputs, output_shape)


@leaves_no_node
def attention(
    q: mtf.Tensor,
    k: mtf.Tensor,
    v: mtf.Tensor,
    memory_length_dim: mtf.Dimension,
    key_dim: mtf.Dimension,
    value_dim: mtf.Dimension,
    bias: Optional[mtf.Tensor] = None,
    dropout_rate: float = 0.0,
    dropout_broadcast_dims: Optional[Sequence[mtf.Dimension]] = None,
    extra_logit: Union[mtf.Tensor, float, None] = None,
    context: Context = None,  # type: ignore[assignment]
    float32_logits: bool = True,
    z_loss_coeff: Optional[float] = None,
    blocked: Optional[bool] = None,
    ring: Union[bool, str] = False,
    soft_cap: Optional[float] = None,
) -> mtf.Tensor:
    """Dot-product attention: means of values, weighted by the softmax of queries times keys.

    Vaswani et al., "Attention is all you need" (2017), but the logits are not scaled: the scale is
    folded into the initializer of the query weights, see `AttentionParams`.

    Dimensions that queries and keys share, such as batch and heads, are batch dimensions; every
    query attends along the others.

    Args:
      q: queries, a Tensor with dimensions [batch..., length, heads..., key_dim].
      k: keys, a Tensor with dimensions [batch..., memory_length, heads..., key_dim].
      v: values, a Tensor with dimensions [batch..., memory_length, heads..., value_dim].
      memory_length_dim: the Dimension of positions that are attended to.
      key_dim: the Dimension of channels of queries and keys.
      value_dim: the Dimension of channels of values.
      bias: a Tensor that is added to the logits, or None. Where it is below -5e8, memory is hidden;
        a query from which all of it is hidden has the mean of all values.
      dropout_rate: the dropout rate of the attention weights.
      dropout_broadcast_dims: Dimensions along which the dropout mask is the same, or None.
      extra_logit: a number or a Tensor, one more logit in the softmax's denominator; or None.
      context: a Context, which tells whether the model is training; without one, dropout is applied
        if its rate is not 0.
      float32_logits: whether logits and softmax are computed in float32.
      z_loss_coeff: the coefficient of a loss that keeps the log of the softmax's denominator near
        0, in training; or None.
      blocked: whether logits are computed by blocks, see `mtf.layers.blocked_attention`; if None,
        they are for lengths from 1,024 on where that is possible. The logits and the softmax of
        blocks are in float32. Steps of decoding take no notice of it.
      ring: whether to use blocks wherever that is possible and, in layouts that split the length of
        queries and of the memory over one mesh dimension, to pass keys and values around its
        processors instead of gathering them; see `mtf.layers.blocked_attention`. Steps of decoding
        take no notice of it.
      soft_cap: a number c, by which logits x become c tanh(x / c) before the bias is added, so that
        none is larger, as in Gemma 2; or None.

    Returns:
      A Tensor with dimensions [dims of q without key_dim..., value_dim].

    Raises:
      ValueError: a dimension is missing, dropout is out of range, there is a z-loss and no Context
        to add it to, or blocks are asked for and not possible.
    """
    # First, as further names would be among the arguments.
    arguments = dict(locals())
    tensors = {"q": q, "k": k, "v": v}
    check_operands("attention", tensors, memory_length_dim, key_dim, value_dim)
    if isinstance(dropout_rate, numbers.Real) and not 0.0 <= dropout_rate < 1.0:
        raise ValueError(
            "attention: dropout_rate is the rate of what is dropped, from 0 to less than 1, not "
            f"{dropout_rate}"
        )
    if z_loss_coeff is not None and context is None:
        raise ValueError(
            "attention: z_loss_coeff adds to context.losses; give the Context of the model, or "
            "no z_loss_coeff"
        )
    check_soft_cap("attention", soft_cap)
    return attend(**arguments)
