"""Dot-product attention: of a whole sequence, in its parts, and one position at a time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Optional, TypeVar, Union, cast

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow._core.shape import Dimension
from mesh_tensorflow.layers._masks import biased, hidden_where
from mesh_tensorflow.ops._source import scalar_indices
from mesh_tensorflow.ops._variable import InputDType, current_precision

_Layer = TypeVar("_Layer", bound=Callable[..., Any])


def trains_if_not_told(layer: _Layer) -> _Layer:
    """Makes calls without `is_training` calls in training, as before release 0.1.19.

    By position, the argument in its place is then the one that comes after it now.

    Args:
      layer: a function with the parameter `is_training`.
    """
    # `signature` follows `__wrapped__`, and so sees through `leaves_no_node` beneath this
    # decorator.
    place = list(inspect.signature(layer).parameters).index("is_training")

    @functools.wraps(layer)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "is_training" not in kwargs:
            if len(args) <= place:
                kwargs["is_training"] = True
            # A rate or a size here is that of an older call, whose arguments from this place on
            # moved by one.
            elif _is_next(args[place]):
                args = (*args[:place], True, *args[place:])
        return layer(*args, **kwargs)

    return cast(_Layer, call)


def _is_next(value: object) -> bool:
    """Returns whether an argument is a rate, a size or a dimension, and no flag."""
    # True and False are ints that equal 1 and 0, so these two numbers are taken for flags.
    return isinstance(value, (float, Dimension)) or (isinstance(value, int) and value not in (0, 1))


def logits_shape(
    q: mtf.Shape, k: mtf.Shape, memory_dim: mtf.Dimension, key_dim: mtf.Dimension
) -> mtf.Shape:
    """Returns the Shape of the logits of queries and keys, the largest tensors of attention.

    The dimensions that both have come first: products of matrices make and take a matrix [queries,
    memory] for each of them. In the order of the queries' dimensions, whose length is before the
    heads, six products of a training step would each transpose the logits.

    Args:
      q: the Shape of the queries.
      k: the Shape of the keys; it may lack `memory_dim`, as the logits do then.
      memory_dim: the dimension of the keys that queries attend over.
      key_dim: the dimension that products of queries and keys sum over.
    """
    shared = [d for d in q if d in k and d != key_dim]
    own = [d for d in q if d not in k]
    return mtf.Shape([*shared, *own, *(d for d in [memory_dim] if d in k)])


def dropped(
    weights: mtf.Tensor,
    rows: Sequence[mtf.Dimension],
    training: bool,
    rate: float,
    shared: Optional[Sequence[mtf.Dimension]] = None,
) -> mtf.Tensor:
    """Applies dropout to attention weights.

    Weights that are kept are scaled by 1 / (1 - rate) and not normalized again: the expectation of
    each is its softmax.

    Args:
      weights: a Tensor.
      rows: dimensions that the noise has before the others, those of the queries: so the same seed
        drops the same weights in whatever order these have their dimensions.
      training: whether weights are dropped at all.
      rate: the share of weights that are dropped, from 0 to less than 1.
      shared: Dimensions along which one decision holds for all weights, or None.
    """
    first = [d for d in rows if d in weights.shape]
    order = mtf.Shape([*first, *(d for d in weights.shape if d not in first)])
    noise_shape = order - list(shared or [])
    return mtf.dropout(weights, training, keep_prob=1.0 - rate, noise_shape=noise_shape)


def _check_operands(
    q: mtf.Tensor, k: mtf.Tensor, v: mtf.Tensor, mask: Optional[mtf.Tensor]
) -> mtf.Dimension:
    """Checks that queries, keys, values and mask match; returns the memory dimension."""
    what = f"dot_product_attention of q {q.shape}, k {k.shape}, v {v.shape}"
    if not len(q.shape) or len(k.shape) < 2 or not len(v.shape):
        raise ValueError(f"{what}: q must be [..., kv], k [..., memory, kv], v [..., channels]")
    # Only these two are told by their places. All others are matched by name: what q and k share is
    # a batch dimension, and what k alone has is summed over.
    kv_dim, memory_dim = q.shape.dims[-1], k.shape.dims[-2]
    if kv_dim not in k.shape:
        raise ValueError(
            f"{what}: the last dimension of q, {dims_text([kv_dim])}, must be in k, with which it "
            "is contracted"
        )
    if memory_dim in q.shape:
        raise ValueError(
            f"{what}: {dims_text([memory_dim])}, the last but one of k, must not be in q, since "
            "queries and memory are crossed. Rename it in k and v, for instance by "
            "mtf.layers.rename_length_to_memory_length, or transpose k to [..., memory, kv]"
        )
    if memory_dim not in v.shape:
        raise ValueError(
            f"{what}: v must have the memory dimension of k, {dims_text([memory_dim])}"
        )
    check_mask(what, mask, mtf.Shape([*q.shape.dims[:-1], memory_dim]), q.dtype)
    return memory_dim


def check_mask(
    what: str, mask: Optional[mtf.Tensor], logits_shape: mtf.Shape, dtype: tf.DType
) -> None:
    """Checks that a mask can be added to logits.

    Raises:
      ValueError: the mask has dimensions that the logits lack, or another dtype.
    """
    if mask is None:
        return
    unknown = [d for d in mask.shape if d not in logits_shape]
    if unknown:
        raise ValueError(
            f"{what}: the mask {mask.name} {mask.shape} has {dims_text(unknown)}, which is not "
            f"among the dimensions of the logits, {dims_text(logits_shape)}"
        )
    # In a mixed precision, logits are bfloat16 and masks float32 unless asked for: they are cast.
    if mask.dtype != dtype and current_precision() is None:
        raise ValueError(
            f"{what}: the mask {mask.name} is {mask.dtype.name}, the logits are {dtype.name}; give "
            f"the function that makes the mask dtype=tf.{dtype.name}, or mtf.cast it"
        )


def check_dropout(what: str, dropout: float | tf.Tensor) -> None:
    """Checks the dropout rate, if it is a number.

    Raises:
      ValueError: the rate is out of range.
    """
    # A tf.Tensor may have no value yet, when the program is built.
    if isinstance(dropout, (int, float)) and not 0.0 <= dropout < 1.0:
        raise ValueError(
            f"{what}: dropout is the rate of what is dropped, from 0 to less than 1, not {dropout}"
        )


@trains_if_not_told
@leaves_no_node
def dot_product_attention(
    q: mtf.Tensor,
    k: mtf.Tensor,
    v: mtf.Tensor,
    mask: Optional[mtf.Tensor],
    is_training: bool,
    dropout: float = 0.0,
    dropout_broadcast_dims: Optional[Sequence[mtf.Dimension]] = None,
    extra_logit: Optional[Union[float, mtf.Tensor]] = None,
) -> mtf.Tensor:
    """Averages values, weighted by the softmax of dot products of queries and keys.

    Vaswani et al., "Attention is all you need" (2017), but the logits are not scaled: the scale
    is part of the initial values of `multihead_attention_params`.

    >>> q = mtf.ones(mesh, "batch:2,length:3,kv:4")
    >>> k = mtf.ones(mesh, "batch:2,memory:5,kv:4")
    >>> v = mtf.ones(mesh, "batch:2,memory:5,channels:6")
    >>> print(mtf.layers.dot_product_attention(q, k, v, None, is_training=False).shape)
    Shape[batch=2, length=3, channels=6]

    Args:
      q: queries, a Tensor with dimensions [..., kv].
      k: keys, a Tensor with dimensions [..., memory, kv]. Logits are summed over any other
        dimensions that `q` lacks.
      v: values, a Tensor with dimensions [..., memory, channels].
      mask: a Tensor that is added to the logits [dims of q without kv..., memory], and may lack
        some of their dimensions; or None. Where it is below -5e8, memory is hidden; a query from
        which all of it is hidden has the mean of all values.
      is_training: whether dropout is applied; if it is left out, as before 0.1.19, it is.
      dropout: the dropout rate of the attention weights.
      dropout_broadcast_dims: Dimensions along which dropout is shared, or None.
      extra_logit: a number or a Tensor, an extra logit in the denominator of the softmax; or None.

    Returns:
      A Tensor with dimensions [dims of q without kv..., channels].

    Raises:
      ValueError: the dimensions do not match, or the dropout rate is out of range.
    """
    memory_dim = _check_operands(q, k, v, mask)
    check_dropout("dot_product_attention", dropout)
    query_dims = q.shape.dims[:-1]
    # logits[query, memory] = sum over kv of q[query, kv] * k[memory, kv].
    shape = logits_shape(q.shape, k.shape, memory_dim, q.shape.dims[-1])
    logits = mtf.einsum([q, k], output_shape=shape)
    weights = mtf.softmax(biased(logits, mask), memory_dim, extra_logit=extra_logit)
    weights = dropped(weights, query_dims, is_training, dropout, dropout_broadcast_dims)
    return mtf.einsum([weights, v], output_shape=mtf.Shape([*query_dims, v.shape.dims[-1]]))


class _NormalParts:
    """A normal initializer of stacked weights, with a standard deviation for each part."""

    def __init__(self, deviations: Sequence[float], seed: Optional[int] = None):
        self.deviations = deviations
        # Under TensorFlow's name for it: `seeded_initializer` sets it in a copy, in programs with a
        # seed.
        self.seed = seed

    def __call__(self, shape: Sequence[int], dtype: tf.DType = tf.float32) -> tf.Tensor:
        sizes = [len(self.deviations)] + [1] * (len(shape) - 1)
        factors = tf.reshape(tf.constant(self.deviations, dtype), sizes)
        return tf.random_normal(shape, dtype=dtype, seed=self.seed) * factors


@leaves_no_node
def multihead_attention_params(
    mesh: mtf.Mesh,
    heads: mtf.Dimension,
    io_channels: mtf.Dimension,
    kv_channels: mtf.Dimension,
    variable_dtype: mtf.VariableDType,
    combine: bool = False,
) -> list[mtf.Tensor]:
    """Creates the projection weights of queries, keys, values and the output.

    >>> d_model, kv, heads = mtf.convert_to_shape("d_model:8,kv:4,heads:2").dims
    >>> ws = mtf.layers.multihead_attention_params(mesh, heads, d_model, kv, mtf.VariableDType())
    >>> print(len(ws), ws[0].shape)
    4 Shape[heads=2, d_model=8, kv=4]

    Args:
      mesh: a Mesh.
      heads: the Dimension of attention heads.
      io_channels: a Dimension, the channels of the inputs and of the output.
      kv_channels: a Dimension, the channels of queries, keys and values.
      variable_dtype: a VariableDType.
      combine: whether to store the weights in one variable, qkvo, instead of q, k, v and o.

    Returns:
      A list of four Tensors of shape [heads, io_channels, kv_channels]. The first two are
      initialized such that logits have variance 1.
    """
    shape = mtf.Shape([heads, io_channels, kv_channels])
    io, kv = max(1, io_channels.size), max(1, kv_channels.size)
    # For inputs of variance 1, queries and keys have the variance kv ** -0.5 each, and sums of kv
    # products of theirs the variance 1, without the factor of Vaswani et al. (2017), equation 1.
    qk = io**-0.5 * kv**-0.25
    deviations = {
        "q": qk,
        "k": qk,
        "v": io**-0.5,
        # A sum over heads * kv products, but with io in place of kv, as in the classic: outputs
        # have kv / io of the variance of what heads return.
        "o": (io * max(1, heads.size)) ** -0.5,
    }
    if not combine:
        return [
            mtf.get_variable(
                mesh,
                name,
                shape,
                dtype=variable_dtype,
                initializer=tf.random_normal_initializer(stddev=deviation),
            )
            for name, deviation in deviations.items()
        ]
    # One variable instead of four: fewer operations, and one allreduce for its gradient.
    kinds = mtf.Dimension("qkvo", len(deviations))
    combined = mtf.get_variable(
        mesh,
        "qkvo",
        mtf.Shape([kinds]) + shape,
        dtype=variable_dtype,
        initializer=_NormalParts(list(deviations.values())),
    )
    return list(mtf.unstack(combined, kinds))


def multihead_attention_vars(
    mesh: mtf.Mesh,
    heads: mtf.Dimension,
    io_channels: mtf.Dimension,
    kv_channels: mtf.Dimension,
    master_dtype: Optional[tf.DType],
    slice_dtype: Optional[tf.DType],
    activation_dtype: tf.DType,
) -> list[mtf.Tensor]:
    """Creates the weights of `multihead_attention_params`, stored in one variable, qkvo.

    >>> d_model, kv, heads = mtf.convert_to_shape("d_model:8,kv:4,heads:2").dims
    >>> f32 = tf.float32
    >>> ws = mtf.layers.multihead_attention_vars(mesh, heads, d_model, kv, f32, f32, f32)
    >>> print(len(ws), [v.name for v in graph.trainable_variables])
    4 ['qkvo']

    Args:
      mesh: a Mesh.
      heads: the Dimension of attention heads.
      io_channels: a Dimension, the channels of the inputs and of the output.
      kv_channels: a Dimension, the channels of queries, keys and values.
      master_dtype: a dtype; float32 if None.
      slice_dtype: a dtype; `master_dtype` if None.
      activation_dtype: a dtype.

    Returns:
      A list of four Tensors of shape [heads, io_channels, kv_channels].
    """
    dtype = InputDType(master_dtype or tf.float32, slice_dtype, activation_dtype)
    return multihead_attention_params(mesh, heads, io_channels, kv_channels, dtype, combine=True)


def project(
    x: mtf.Tensor, w: mtf.Tensor, heads: mtf.Dimension, kv_channels: mtf.Dimension, places: int
) -> mtf.Tensor:
    """Projects a Tensor to queries, keys or values.

    Args:
      x: a Tensor with dimensions [batch..., places..., io].
      w: a Tensor of shape [heads, io, kv_channels].
      heads: the Dimension of attention heads.
      kv_channels: a Dimension.
      places: the number of position dimensions: 1 for a sequence, 2 for an image.

    Returns:
      A Tensor with dimensions [batch..., heads, places..., kv_channels].
    """
    dims = x.shape.dims[:-1]
    # Heads go before positions: the memory is looked for in the last dimension but one of keys.
    at = len(dims) - places
    return mtf.einsum([x, w], output_shape=mtf.Shape([*dims[:at], heads, *dims[at:], kv_channels]))


def _check_antecedents(query: mtf.Tensor, memory: Optional[mtf.Tensor]) -> None:
    what = f"multihead_attention of {query.name} {query.shape}"
    if len(query.shape) < 2:
        raise ValueError(f"{what}: the query must be [..., length, io]")
    *batch, length, io = query.shape.dims
    if memory is None:
        if "memory_length" in query.shape.dimension_names:
            raise ValueError(
                f"{what}: to attend to itself its length is renamed to memory_length, and it has "
                "a dimension of that name. Rename it"
            )
        return
    if memory.shape.dims[:-2] != batch or memory.shape.dims[-1:] != [io]:
        raise ValueError(
            f"{what}: the memory {memory.name} {memory.shape} must be [{dims_text(batch)}, "
            f"memory_length, {dims_text([io])}], with batch and channels as in the query"
        )
    if memory.shape.dims[-2] == length:
        raise ValueError(
            f"{what}: the memory {memory.name} {memory.shape} has the query's dimension "
            f"{dims_text([length])}; rename it by mtf.layers.rename_length_to_memory_length. For "
            "self-attention give None as memory"
        )


@trains_if_not_told
@leaves_no_node
def multihead_attention(
    query_antecedent: mtf.Tensor,
    memory_antecedent: Optional[mtf.Tensor],
    mask: Optional[mtf.Tensor],
    kv_channels: mtf.Dimension,
    heads: mtf.Dimension,
    is_training: bool,
    dropout: float = 0.0,
    dropout_broadcast_dims: Optional[Sequence[mtf.Dimension]] = None,
    master_dtype: tf.DType = tf.float32,
    slice_dtype: tf.DType = tf.float32,
    name: Optional[str] = "multihead_attention",
) -> mtf.Tensor:
    """Applies multi-head attention to a memory, or to the sequence itself.

    Vaswani et al., "Attention is all you need" (2017).

    >>> x = mtf.ones(mesh, "batch:2,length:4,d_model:8")
    >>> kv, heads = mtf.Dimension("kv", 4), mtf.Dimension("heads", 2)
    >>> print(mtf.layers.multihead_attention(x, None, None, kv, heads, is_training=False).shape)
    Shape[batch=2, length=4, d_model=8]

    Args:
      query_antecedent: a Tensor with dimensions [batch..., length, io].
      memory_antecedent: a Tensor with dimensions [batch..., memory_length, io]; if None, the
        query with its length renamed to memory_length.
      mask: a Tensor that is added to logits [batch..., heads, length, memory_length], and may
        lack some of their dimensions; or None.
      kv_channels: a Dimension, the channels of queries, keys and values.
      heads: the Dimension of attention heads.
      is_training: whether dropout is applied; if it is left out, as before 0.1.19, it is.
      dropout: the dropout rate of the attention weights.
      dropout_broadcast_dims: Dimensions along which dropout is shared, or None.
      master_dtype: a dtype.
      slice_dtype: a dtype.
      name: a string, the variable scope.

    Returns:
      A Tensor of the shape of `query_antecedent`.

    Raises:
      ValueError: the dimensions do not match, or the dropout rate is out of range.
    """
    _check_antecedents(query_antecedent, memory_antecedent)
    *batch, length, io = query_antecedent.shape.dims
    memory = memory_antecedent
    memory_length = mtf.Dimension("memory_length", length.size)
    if memory is not None:
        memory_length = memory.shape.dims[-2]
    logits_shape = mtf.Shape([*batch, heads, length, memory_length])
    check_mask("multihead_attention", mask, logits_shape, query_antecedent.dtype)
    check_dropout("multihead_attention", dropout)
    with tf.variable_scope(name, default_name="multihead_attention"):
        if memory is None:
            # Logits cross the sequence with itself, and a shape cannot have the length twice.
            memory = mtf.rename_dimension(query_antecedent, length.name, memory_length.name)
        weights = multihead_attention_vars(
            memory.mesh, heads, io, kv_channels, master_dtype, slice_dtype, query_antecedent.dtype
        )
        return attend(
            query_antecedent,
            memory,
            mask,
            weights,
            kv_channels,
            heads,
            is_training=is_training,
            dropout=dropout,
            dropout_broadcast_dims=dropout_broadcast_dims,
        )


def attend(
    query: mtf.Tensor,
    memory: mtf.Tensor,
    mask: Optional[mtf.Tensor],
    weights: Sequence[mtf.Tensor],
    kv_channels: mtf.Dimension,
    heads: mtf.Dimension,
    **kwargs: Any,
) -> mtf.Tensor:
    """Applies multi-head attention with given weights.

    Args:
      query: a Tensor with dimensions [batch..., length, io].
      memory: a Tensor with dimensions [batch..., memory_length, io].
      mask: a Tensor or None.
      weights: as `multihead_attention_params` returns.
      kv_channels: a Dimension.
      heads: the Dimension of attention heads.
      **kwargs: further arguments of `dot_product_attention`.
    """
    wq, wk, wv, wo = weights
    q = project(query, wq, heads, kv_channels, 1)
    k = project(memory, wk, heads, kv_channels, 1)
    v = project(memory, wv, heads, kv_channels, 1)
    # The heads are in q, k and v, so each of them attends by itself; the projection below sums over
    # them.
    o = dot_product_attention(q, k, v, mask, **kwargs)
    return mtf.einsum([o, wo], output_shape=query.shape)


def _check_state(what: str, query: mtf.Tensor, prev_k: mtf.Tensor, prev_v: mtf.Tensor) -> None:
    batch = query.shape.dims[:-1]
    for t in (prev_k, prev_v):
        if len(t.shape) < 3 or set(t.shape.dims[:-3]) != set(batch) or t.shape != prev_k.shape:
            raise ValueError(
                f"{what}: keys {prev_k.shape} and values {prev_v.shape} must both be "
                f"[{dims_text(batch)}, heads, memory_length, kv], with the batch dimensions of the "
                f"query {query.name} {query.shape}"
            )


@leaves_no_node
def multihead_self_attention_incremental(
    query_antecedent: mtf.Tensor,
    prev_k: mtf.Tensor,
    prev_v: mtf.Tensor,
    step_num: Union[int, mtf.Tensor],
    master_dtype: tf.DType,
    slice_dtype: tf.DType,
    name: Optional[str] = "multihead_attention",
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
    """Attends from one position to itself and to the positions before it.

    >>> x = mtf.ones(mesh, "batch:2,d_model:8")
    >>> memory = mtf.zeros(mesh, "batch:2,heads:2,memory_length:5,kv:4")
    >>> step = mtf.constant(mesh, 0, dtype=tf.int32)
    >>> f32 = tf.float32
    >>> y, k, v = mtf.layers.multihead_self_attention_incremental(x, memory, memory, step, f32, f32)
    >>> print(y.shape, k.shape == memory.shape)
    Shape[batch=2, d_model=8] True

    Args:
      query_antecedent: a Tensor with dimensions [batch..., io].
      prev_k: cached keys, a Tensor with dimensions [batch..., heads, memory_length, kv] that is 0
        from the current position on.
      prev_v: cached values, a Tensor of the same shape.
      step_num: the current position, an int32 Tensor or a number.
      master_dtype: a dtype.
      slice_dtype: a dtype.
      name: a string, the variable scope; variables are those of `multihead_attention`.

    Returns:
      A tuple (y, k, v): a Tensor of the shape of `query_antecedent`, and the cached keys and
      values, extended by those of the current position.

    Raises:
      ValueError: the shapes do not match.
    """
    x = query_antecedent
    _check_state("multihead_self_attention_incremental", x, prev_k, prev_v)
    heads, memory_length, kv_channels = prev_k.shape.dims[-3:]
    with tf.variable_scope(name, default_name="multihead_attention"):
        wq, wk, wv, wo = multihead_attention_vars(
            x.mesh, heads, x.shape.dims[-1], kv_channels, master_dtype, slice_dtype, x.dtype
        )
        step = scalar_indices(x.mesh, step_num)
        at_step = mtf.one_hot(step, memory_length, dtype=x.dtype)

        def written(previous: mtf.Tensor, w: mtf.Tensor) -> mtf.Tensor:
            # An addition to zeros instead of an assignment: the cache is a loop variable that a
            # layout may split, also along the memory.
            new = project(x, w, heads, kv_channels, 0)
            return previous + mtf.multiply(new, at_step, output_shape=previous.shape)

        q = project(x, wq, heads, kv_channels, 0)
        # Before attention reads them, as a position sees itself.
        k, v = written(prev_k, wk), written(prev_v, wv)
        # Positions that are not written yet have keys 0, whose logits 0 would count in the softmax.
        later = mtf.less(step, mtf.range(x.mesh, memory_length, tf.int32))
        o = dot_product_attention(q, k, v, hidden_where(later, x.dtype), False)
        return mtf.einsum([o, wo], output_shape=x.shape), k, v


@leaves_no_node
def multihead_encdec_attention_incremental(
    query_antecedent: mtf.Tensor,
    wq: mtf.Tensor,
    wo: mtf.Tensor,
    k: mtf.Tensor,
    v: mtf.Tensor,
    mask: Optional[mtf.Tensor],
    name: Optional[str] = "multihead_attention",
) -> mtf.Tensor:
    """Attends from one position to the keys and values of an encoder.

    >>> x = mtf.ones(mesh, "batch:2,d_model:8")
    >>> wq = wo = mtf.ones(mesh, "heads:2,d_model:8,kv:4")
    >>> k = v = mtf.ones(mesh, "batch:2,heads:2,memory_length:5,kv:4")
    >>> mask = mtf.zeros(mesh, "batch:2,memory_length:5")
    >>> print(mtf.layers.multihead_encdec_attention_incremental(x, wq, wo, k, v, mask).shape)
    Shape[batch=2, d_model=8]

    Args:
      query_antecedent: a Tensor with dimensions [batch..., io].
      wq: a Tensor of shape [heads, io, kv], the first of `multihead_attention_params`.
      wo: a Tensor of shape [heads, io, kv], the last of them.
      k: keys, a Tensor with dimensions [..., heads, memory_length, kv].
      v: values, a Tensor of the same shape.
      mask: a Tensor that is added to the logits [batch..., heads, memory_length], or None.
      name: a string, the variable scope.

    Returns:
      A Tensor of the shape of `query_antecedent`.

    Raises:
      ValueError: the dimensions do not match.
    """
    x = query_antecedent
    if len(k.shape) < 3 or set(wq.shape) != {k.shape.dims[-3], x.shape.dims[-1], k.shape.dims[-1]}:
        raise ValueError(
            f"multihead_encdec_attention_incremental: keys {k.shape} must be [..., heads, "
            f"memory_length, kv], the query {x.shape} [..., io], and the weights {wq.shape} "
            "[heads, io, kv]"
        )
    with tf.variable_scope(name, default_name="multihead_attention"):
        q = project(x, wq, k.shape.dims[-3], k.shape.dims[-1], 0)
        o = dot_product_attention(q, k, v, mask, False)
        return mtf.einsum([o, wo], output_shape=x.shape)


@leaves_no_node
def masked_local_attention_1d_incremental(
    x: mtf.Tensor,
    prev_k: mtf.Tensor,
    prev_v: mtf.Tensor,
    step_num: Union[int, mtf.Tensor],
    master_dtype: Optional[tf.DType] = None,
    slice_dtype: Optional[tf.DType] = None,
    params: Optional[Sequence[mtf.Tensor]] = None,
    name: Optional[str] = None,
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
    """Attends from one position to itself and to a window of positions before it.

    Keys and values of the window are cached in a ring buffer, in which the current position
    overwrites the one that leaves the window. Unused entries count as positions with keys and
    values 0, as in `masked_local_attention_1d`; the results agree if its window size equals its
    block length.

    >>> x = mtf.ones(mesh, "batch:2,d_model:8")
    >>> memory = mtf.zeros(mesh, "batch:2,heads:2,memory_length:4,kv:4")
    >>> step = mtf.constant(mesh, 0, dtype=tf.int32)
    >>> f32 = tf.float32
    >>> attend = mtf.layers.masked_local_attention_1d_incremental
    >>> y, k, v = attend(x, memory, memory, step, f32, f32)
    >>> print(y.shape)
    Shape[batch=2, d_model=8]

    Args:
      x: a Tensor with dimensions [batch..., io].
      prev_k: cached keys, a Tensor with dimensions [batch..., heads, window, kv], initially 0.
      prev_v: cached values, a Tensor of the same shape.
      step_num: the current position, an int32 Tensor or a number.
      master_dtype: a dtype; float32 if None.
      slice_dtype: a dtype; `master_dtype` if None.
      params: four weights as returned by `multihead_attention_params`; variables if None.
      name: a string, the variable scope; "masked_local_attention_1d" if None.

    Returns:
      A tuple (y, k, v): a Tensor of the shape of `x`, and the updated keys and values.

    Raises:
      ValueError: the shapes do not match.
    """
    _check_state("masked_local_attention_1d_incremental", x, prev_k, prev_v)
    heads, window, kv_channels = prev_k.shape.dims[-3:]
    with tf.variable_scope(name, default_name="masked_local_attention_1d"):
        wq, wk, wv, wo = params or multihead_attention_vars(
            x.mesh, heads, x.shape.dims[-1], kv_channels, master_dtype, slice_dtype, x.dtype
        )
        # The order of entries does not matter to attention without positions, so the oldest is
        # replaced where it lies.
        at_step = mtf.one_hot(
            mtf.mod(scalar_indices(x.mesh, step_num), window.size), window, dtype=x.dtype
        )

        def replaced(previous: mtf.Tensor, w: mtf.Tensor) -> mtf.Tensor:
            new = project(x, w, heads, kv_channels, 0)
            new = mtf.multiply(new, at_step, output_shape=previous.shape)
            # Not 0 before, unlike in a whole memory: here is the position that leaves the window.
            return previous * (1.0 - at_step) + new

        k, v = replaced(prev_k, wk), replaced(prev_v, wv)
        q = project(x, wq, heads, kv_channels, 0)
        # No mask: entries that no position has reached yet are zeros, like those before the start
        # of a whole sequence.
        o = dot_product_attention(q, k, v, None, False)
        return mtf.einsum([o, wo], output_shape=x.shape), k, v
