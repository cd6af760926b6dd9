"""Attention of a sequence to itself, with its masks and relative biases."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow._core.errors import check_choice
from mesh_tensorflow.layers import _masks
from mesh_tensorflow.layers._masks import Buckets
from mesh_tensorflow.transformer import attention, transformer
from mesh_tensorflow.transformer.attention import _dot_product
from mesh_tensorflow.transformer.attention._params import QueryKeyNorm
from mesh_tensorflow.transformer.attention._prompts import side_of_scope
from mesh_tensorflow.transformer.transformer._context import made_once
from mesh_tensorflow.transformer.transformer_layers import _parts

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context


def query_position(context: Context) -> mtf.Tensor:
    """Returns the positions of queries."""
    if context.position is not None:
        return context.position
    dim = context.length_dim
    return made_once(context, ("positions", dim), lambda: mtf.range(context.mesh, dim, tf.int32))


def _so_far(context: Context) -> mtf.Tensor:
    """Returns how many positions the longest row has up to this call, a scalar."""
    last = query_position(context)
    if context.mode == "first_part" and context.initial_position is not None:
        # After the given ids, of which rows have different numbers, there is the first step's.
        last = context.initial_position
    size = getattr(context, "states_length", None) or context.length_dim.size
    # A row that only fills up a batch is full from the beginning.
    last = mtf.where(mtf.less(last, size), last, mtf.zeros_like(last))
    return mtf.reduce_max(last, output_shape=[]) + 1


def _conditions(
    layer: SelfAttention, context: Context, memory_position: mtf.Tensor
) -> list[tuple[str, Any, mtf.Tensor]]:
    """Returns what has to be true of ids of queries and of the memory where attention is seen."""
    # Each compares a tensor of queries with one of the memory, so that blocks and rings can compare
    # their parts, and need no mask of all pairs.
    conditions: list[tuple[str, Any, mtf.Tensor]] = []
    position = query_position(context)
    smallest, largest = layer.min_relative_position(context), layer.max_relative_position(context)
    if smallest is not None:
        conditions.append(("less_equal", position + smallest, memory_position))
    if largest is not None:
        conditions.append(("greater_equal", position + largest, memory_position))
    # Position i sees j if read[i] >= write[j]: with positions as priorities, the causal mask.
    if context.write_priority is not None:
        written = layer.rename_length_to_memory_length(context.write_priority, context)
        conditions.append(("greater_equal", context.read_priority, written))
    # Parts of examples see only themselves: where they are numbered, examples need no comparison.
    sequence_id = context.sequence_id if context.subsequence_id is None else context.subsequence_id
    # In decoding it is a number or None: each row is one example, and nothing has to be compared.
    if isinstance(sequence_id, mtf.Tensor) and context.length_dim in sequence_id.shape:
        memory = layer.rename_length_to_memory_length(sequence_id, context)
        conditions.append(("equal", sequence_id, memory))
    return conditions


def _ids_of(context: Context) -> tuple[Any, ...]:
    """Returns what `_conditions` compares besides positions."""
    # A stack may change them between layers, as one does that pools positions.
    ids = (context.sequence_id, context.subsequence_id)
    return (*ids, context.write_priority, context.read_priority, context.activation_dtype)


def _hidden(
    layer: SelfAttention,
    context: Context,
    relative_position: mtf.Tensor,
    memory_position: mtf.Tensor,
    num_prompts: int,
) -> Optional[mtf.Tensor]:
    """Returns the mask: -1e9 where attention is masked, 0 elsewhere; None if nothing is."""
    conditions: list[mtf.Tensor] = []
    smallest, largest = layer.min_relative_position(context), layer.max_relative_position(context)
    if smallest is not None:
        conditions.append(mtf.greater_equal(relative_position, smallest))
    if largest is not None:
        conditions.append(mtf.less_equal(relative_position, largest))
    ids = _conditions(layer, context, memory_position)
    # The first ones are those of relative positions, which are there already, and with the
    # prompts subtracted.
    conditions += [getattr(mtf, name)(x, y) for name, x, y in ids[len(conditions) :]]
    if not conditions:
        return None
    visible = functools.reduce(mtf.logical_and, conditions)
    hidden = attention.visibility_mask_to_attention_bias(visible, context.activation_dtype)
    # Prompts are seen by all queries. What the mask was made of has no prompts, so it is left out.
    if num_prompts:
        return mtf.pad(hidden, [num_prompts, 0], layer.memory_length(context).name)
    return _masks.made_of(hidden, ids)


def _distances(
    layer: SelfAttention,
    context: Context,
    here: mtf.Tensor,
    there: mtf.Tensor,
    heads_dims: list[mtf.Dimension],
    q: Optional[mtf.Tensor],
) -> Optional[_masks.Distances]:
    """Returns what the bias of relative positions is made of; None without relative attention."""
    kind = layer.relative_attention_type
    if kind is None:
        return None
    # Where later positions are hidden, all buckets are for distances back.
    both = not context.model.fully_autoregressive
    if kind == "alibi":
        distances = _parts.alibi(context, heads_dims, here, there, both)
        return distances._replace(values=_dot_product.matched(distances.values, context))
    buckets_dim = mtf.Dimension("buckets", layer.relative_attention_num_buckets)
    if kind == "contextual":
        assert q is not None
        # values[head, bucket] = sum over d_kv of q[head, d_kv] * ak[head, d_kv, bucket].
        values = layers.dense(
            q,
            buckets_dim,
            reduced_dims=[layer.kv_dim],
            expert_dims=[*context.model.ensemble_dims, *heads_dims],
            use_bias=False,
            variable_dtype=context.variable_dtype,
            name="relative_attention_ak",
        )
    else:
        bounds = (layer.min_relative_position(context), layer.max_relative_position(context))
        values = _parts.shared_bias_values(
            context,
            "relative_attention_bias",
            heads_dims,
            buckets_dim,
            # Layers with another window or other heads have another bias.
            ("self_attention_bias", *bounds, tuple(heads_dims)) if kind == "bias_shared" else None,
        )
    buckets = Buckets(buckets_dim.size, both, _parts.MAX_DISTANCE)
    values = _dot_product.matched(values, context)
    return _masks.Distances(buckets, values, buckets_dim, here, there)


# In rings, a bias that depends on the query has the length and the memory.
_NOT_IN_RINGS = {"contextual": "'bias_shared' or 'bias'"}


_ATTENTION_FUNCTIONS: dict[Optional[str], Callable[..., mtf.Tensor]] = {
    None: attention.attention,
    "hybrid": attention.hybrid_attention,
    _dot_product.ALL_TO_ALL: attention.attention,
}


def output_of(
    layer: SelfAttention,
    context: Context,
    params: attention.AttentionParams,
    x: mtf.Tensor,
    o: mtf.Tensor,
    losses: Optional[list[mtf.Tensor]],
) -> mtf.Tensor:
    """Returns the output of a layer for what its heads have found.

    Args:
      layer: the layer, which may be a class of a user's own that has the methods of SelfAttention.
      context: the Context of this call of the model: its mode, positions, states and losses.
      params: the weights.
      x: the input of the layer.
      o: the result of attention, a Tensor with dimensions [batch..., length, heads..., d_v].
      losses: a list or None.
    """
    output_shape = layer.expected_attention_output_shape(x, params)
    y = params.compute_output(o, output_shape=output_shape)
    return layer.layer_output_from_attention_output(context, y, losses)


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
@dataclasses.dataclass(eq=False, repr=False)
class SelfAttention(transformer.TransformerLayer):
    """Multi-head self-attention.

    Vaswani et al., "Attention is all you need" (2017). In decoding, the states are the keys and
    values of earlier positions. Options that do not fit each other are a ValueError.

    Attributes:
      num_heads: an integer.
      num_memory_heads: how many heads keys and values have, a divisor of `num_heads`; 1 for
        multi-query attention, 0 for `num_heads`.
      key_value_size: the number of channels of a head.
      shared_kv: whether values are the keys.
      dropout_rate: the dropout rate of the attention weights; all queries share one dropout
        mask.
      attention_kwargs: a dictionary of further arguments of the attention function, or None.
      relative_attention_type: None, "bias" for a learned bias for each head and distance,
        "bias_shared" for one that all layers share, "contextual" for one computed from the
        query, "alibi" for minus the distance times a fixed number for each head (Press et al.,
        "Train short, test long: attention with linear biases", 2022).
      relative_attention_num_buckets: the number of buckets of relative positions.
      attention_func: None; "hybrid" for `hybrid_attention`; or "all_to_all", with which a
        length that is split is exchanged for heads, under the names `attention_length` and
        `attention_heads`, when whole sequences are attended to: by the rules
        `length:axis,attention_heads:axis`, each processor has all positions of its heads.
      combine_dims: whether heads and channels are one dimension of the weights.
      keep_query_heads_dims: whether the output keeps its heads.
      fold_scaling_into_initializer: whether initial values, rather than queries, are scaled.
      z_loss_coeff: the coefficient of a loss on the logits, see `attention`; or None.
      use_hyperprompt: whether hypernetworks generate prompt keys and values.
      hyperprompt_mtlshare: whether tasks share the weights that generate them.
      hyperprompt_length_encoder: the length of the prompts in encoders; None for no prompts.
      hyperprompt_length_decoder: the length of the prompts in decoders; None for no prompts.
      hyperprompt_hidden_dim: the number of hidden channels of prompts.
      hyperprompt_task_num: how many tasks have prompts.
      rotary: the `mtf.layers.RotaryEmbedding` of queries and keys; None for none.
      biases: which projections add a bias: letters of "qkvo".
      qk_norm_epsilon: what is added to the mean squares by which queries and keys are
        normalized, each head by itself; None if they are not.
      qk_norm_over_heads: whether one mean square is over the channels of all heads.
      qk_norm_unit_offset: whether the scales of these norms are 1 plus a variable.
      query_scale: what queries are multiplied by; None for key_value_size^-0.5, applied or
        folded.
    """

    no_query = False  # which only a Synthesizer may set
    # The types of relative attention that the layer has.
    _kinds: ClassVar[Sequence[Any]] = (None, "bias", "bias_shared", "contextual", "alibi")

    num_heads: int = 8
    num_memory_heads: int = 0
    key_value_size: int = 128
    shared_kv: bool = False
    dropout_rate: float = 0.0
    attention_kwargs: Any = None
    relative_attention_type: Optional[str] = None
    relative_attention_num_buckets: int = 32
    attention_func: Optional[str] = None
    combine_dims: bool = True
    keep_query_heads_dims: bool = False
    fold_scaling_into_initializer: bool = True
    z_loss_coeff: Optional[float] = None
    use_hyperprompt: bool = False
    hyperprompt_mtlshare: bool = False
    hyperprompt_length_encoder: Optional[int] = None
    hyperprompt_length_decoder: Optional[int] = None
    hyperprompt_hidden_dim: Optional[int] = None
    hyperprompt_task_num: int = 8
    rotary: Optional[layers.RotaryEmbedding] = None
    biases: str = ""
    qk_norm_epsilon: Optional[float] = None
    qk_norm_over_heads: bool = False
    qk_norm_unit_offset: bool = False
    query_scale: Optional[float] = None

    def __post_init__(self) -> None:
        self.attention_kwargs = self.attention_kwargs or {}
        self.qk_norm = None
        if self.qk_norm_epsilon is not None:
            self.qk_norm = QueryKeyNorm(
                self.qk_norm_epsilon, self.qk_norm_over_heads, self.qk_norm_unit_offset
            )
        _parts.check_type(type(self).__name__, self.relative_attention_type, self._kinds)
        self._check_function()

    def _check_function(self) -> None:
        what = type(self).__name__
        check_choice(what, "attention_func", self.attention_func, _ATTENTION_FUNCTIONS)
        if self.rotary is not None and self.shared_kv:
            raise ValueError(
                f"{what}: rotary turns keys, and with shared_kv they are the values, too; set "
                "shared_kv=False"
            )
        prompts = (self.hyperprompt_length_encoder, self.hyperprompt_length_decoder)
        if self.attention_func == _dot_product.ALL_TO_ALL and any(prompts):
            raise ValueError(
                f"{what}: attention_func={self.attention_func!r} has no prompts; set "
                "hyperprompt_length_encoder=None and hyperprompt_length_decoder=None, or leave "
                "attention_func out"
            )
        if self.attention_func == "hybrid" and self.z_loss_coeff is not None:
            raise ValueError(
                f"{what}: attention_func={self.attention_func!r} has no z-loss; set "
                "z_loss_coeff=None"
            )

    def call(
        self, context: Context, x: mtf.Tensor, losses: Optional[list[mtf.Tensor]] = None
    ) -> mtf.Tensor:
        """Returns the self-attention output of each position.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, d_model]; without `length` in mode
            "incremental".
          losses: a list or None.

        Returns:
          A Tensor of the shape of `x`.
        """
        params = self.make_params(context)
        # Queries come first: if experts compute them, they may make the keys at the same time.
        q, seen = self._turned(context, params.compute_q(x), query_position(context)), context
        if self._by_heads(context):
            _dot_product.check_layout(type(self).__name__, context, params.query_heads_dims[0])
            seen = _dot_product.of_heads(context)
        memory_length = self.memory_length(seen)
        k, v = self._keys_and_values(context, x, params, memory_length)
        memory_position = self._memory_position(seen)
        side, prompt_length = self._prompts()
        if prompt_length is not None:
            k, v, memory_position, memory_length = attention.concat_hyper_prompts_kv(
                k,
                v,
                side,
                self.use_hyperprompt,
                memory_length,
                self.hyperprompt_task_num,
                self.num_heads,
                self.hyperprompt_hidden_dim,  # type: ignore[arg-type]
                self.kv_dim,
                context,
                self.hyperprompt_mtlshare,
                self.dropout_rate,
                prompt_length,
            )
        bias = self.compute_bias(
            seen,
            memory_position,
            x,
            params.query_heads_dims,
            q,
            use_prompt_kv=prompt_length is not None,
        )
        o = self._attend(seen, _dot_product.matched(q, seen), k, v, memory_length, bias)
        if seen is not context:
            # Before the projection, whose weight has heads by their own name.
            o = _dot_product.by_positions(o, context)
        return output_of(self, context, params, x, o, losses)

    def layer_output_from_attention_output(
        self, context: Context, attention_output: mtf.Tensor, losses: Optional[list[mtf.Tensor]]
    ) -> mtf.Tensor:
        """Returns the output of the layer; here, the attention output itself.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          attention_output: a Tensor of the shape `expected_attention_output_shape`.
          losses: a list or None.
        """
        return attention_output

    def expected_attention_output_shape(
        self, x: mtf.Tensor, params: attention.AttentionParams
    ) -> mtf.Shape:
        """Returns the shape of the attention output: that of `x`, plus heads if they are kept.

        Args:
          x: a Tensor with dimensions [batch..., length, d_model].
          params: the weights.
        """
        if not self.keep_query_heads_dims:
            return x.shape
        *front, channels = x.shape.dims
        return mtf.Shape([*front, *params.query_heads_dims, channels])

    def attention_kwargs_from_context(self, context: Context) -> dict[str, Any]:
        """Returns the keyword arguments of the attention function; dropout in training only.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
        """
        return {
            **self.attention_kwargs,
            "dropout_rate": self.dropout_rate if context.train else 0.0,
            "dropout_broadcast_dims": [context.length_dim],
        }

    def make_params(self, context: Context) -> attention.AttentionParams:
        """Returns the weights; creates their variables if they do not exist.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
        """
        return attention.AttentionParams(
            context.mesh, **self._params_arguments(context), no_query=self.no_query
        )

    def _params_arguments(self, context: Context) -> dict[str, Any]:
        """Returns the arguments of `AttentionParams` that all attention layers have."""
        return {
            **_parts.params_arguments(context, self.kv_dim, self.num_heads, self.num_memory_heads),
            "shared_kv": self.shared_kv,
            "combine_dims": self.combine_dims,
            "keep_query_heads_dims": self.keep_query_heads_dims,
            "fold_scaling_into_initializer": self.fold_scaling_into_initializer,
            "biases": self.biases,
            "norm": self.qk_norm,
            "query_scale": self.query_scale,
        }

    def _keys_and_values(
        self,
        context: Context,
        x: mtf.Tensor,
        params: attention.AttentionParams,
        memory_length: mtf.Dimension,
    ) -> tuple[mtf.Tensor, mtf.Tensor]:
        """Returns keys and values of all positions so far, and records them when decoding."""
        by_heads = self._by_heads(context)
        plain = context.mode == "incremental" or by_heads
        # `by_heads` gives the length another name.
        m = x if by_heads else self._as_memory(x, context)
        if params.shared_kv:
            # One state for both: with shared keys and values, decoding keeps half as much.
            states = [params.compute_kv(m)]
        else:
            position = query_position(context) if plain else self._memory_position(context)
            # Turned before they are kept: what decoding reads again has its position already.
            keys = self._turned(context, params.compute_k(m), position)
            states = [keys, params.compute_v(m)]
        if by_heads:
            states = [_dot_product.by_heads(s, context.length_dim.name) for s in states]
        # Prompts are prepended to keys and values in the order of their dimensions.
        keep = _parts.next_to_channels if self._prompts()[1] is None else None
        states = _parts.states_so_far(context, states, memory_length, keep)
        return states[0], states[-1]

    def _turned(self, context: Context, x: mtf.Tensor, position: mtf.Tensor) -> mtf.Tensor:
        """Returns queries or keys, turned by their positions if the layer has a `rotary`."""
        if self.rotary is None:
            return x
        # Keys are kept turned, so that all steps of a decoding turn by the same frequencies.
        length = getattr(context, "states_length", None) or context.length_dim.size
        rotary, dim = self.rotary, self.kv_dim
        if rotary.follows_length(length):
            # But for those of this scaling, which keys are turned by as they were, as elsewhere.
            length = made_once(context, ("positions so far", length), lambda: _so_far(context))
        turns = made_once(
            context,
            ("turns", position, x.dtype, rotary.key(dim, length=length)),
            lambda: rotary.turns(position, dim, x.dtype, length=length),
        )
        return rotary.turned(x, dim, turns)

    def _by_heads(self, context: Context) -> bool:
        """Returns whether positions are exchanged for heads; decoding keeps states as they are."""
        if self.attention_func != _dot_product.ALL_TO_ALL:
            return False
        if context.mode == "first_part":
            _dot_product.check_memory_layout(type(self).__name__, context)
        return context.mode not in ("first_part", "incremental")

    def _attend(
        self,
        context: Context,
        q: mtf.Tensor,
        k: mtf.Tensor,
        v: mtf.Tensor,
        memory_length: mtf.Dimension,
        bias: Optional[mtf.Tensor],
    ) -> mtf.Tensor:
        kwargs = self.attention_kwargs_from_context(context)
        # Other functions of attention do not have this argument.
        if self.z_loss_coeff is not None:
            kwargs["z_loss_coeff"] = self.z_loss_coeff
        return self.attention_fn(
            q,
            k,
            v,
            context=context,
            memory_length_dim=memory_length,
            key_dim=self.kv_dim,
            value_dim=self.kv_dim,
            bias=bias,
            **kwargs,
        )

    def _memory_position(self, context: Context) -> mtf.Tensor:
        """Returns the positions of the memory; in decoding they are 0, 1, 2, ..."""
        if context.mode == "incremental":
            dim = self.memory_length(context)
            return made_once(
                context, ("positions", dim), lambda: mtf.range(context.mesh, dim, tf.int32)
            )
        position = query_position(context)
        return made_once(
            context,
            # Subclasses may rename in another way.
            ("memory position", position, type(self), self.memory_length(context)),
            lambda: self.rename_length_to_memory_length(position, context),
        )

    def _prompts(self) -> tuple[Optional[str], Optional[int]]:
        """Returns ("encoder" or "decoder", the length of its prompts); None if there are none."""
        lengths = {
            "encoder": self.hyperprompt_length_encoder,
            "decoder": self.hyperprompt_length_decoder,
        }
        side = side_of_scope()
        return side, None if side is None else lengths[side]

    def compute_bias(
        self,
        context: Context,
        memory_position: mtf.Tensor,
        x: mtf.Tensor,
        heads_dims: list[mtf.Dimension],
        q: Optional[mtf.Tensor],
        use_prompt_kv: Optional[bool] = None,
    ) -> Optional[mtf.Tensor]:
        """Returns the attention bias: mask and relative positions.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          memory_position: an int32 Tensor with dimensions [batch..., memory_length].
          x: a Tensor with dimensions [batch..., length, d_model].
          heads_dims: a list of Dimensions; each head has its own relative position bias.
          q: queries, for relative_attention_type="contextual"; or None.
          use_prompt_kv: whether the memory begins with prompts, which every position attends to.

        Returns:
          A Tensor, or None if nothing is masked and there is no relative attention.
        """
        memory_length = memory_position.shape.dims[-1]
        # The memory is longer than the sequence by what was prepended to it.
        num_prompts = memory_length.size - context.length_dim.size if use_prompt_kv else 0
        position = query_position(context)
        # Prompts have no ids to compare parts of the memory by, so they get the whole mask.
        if _parts.in_ring(self, context, _NOT_IN_RINGS) and not num_prompts:
            visible = _conditions(self, context, memory_position)
            far = _distances(self, context, position, memory_position, heads_dims, q)
            distances = [] if far is None else [far]
            if not visible and not distances:
                return None
            return _masks.stand_in(context.mesh, visible, context.activation_dtype, distances)
        # Prompts come first; distances within the sequence are those that it has without them.
        position_of_key = memory_position - num_prompts if num_prompts else memory_position
        relative_position = made_once(
            context,
            ("relative_position", position_of_key, position),
            lambda: position_of_key - position,
        )
        bounds = (self.min_relative_position(context), self.max_relative_position(context))
        hidden = made_once(
            context,
            ("hidden", relative_position, memory_position, num_prompts, bounds, *_ids_of(context)),
            lambda: _hidden(self, context, relative_position, memory_position, num_prompts),
        )
        far = _distances(self, context, position, position_of_key, heads_dims, q)
        if far is None:
            return hidden
        bucketed = made_once(
            context,
            ("buckets", relative_position, far.buckets),
            lambda: _masks.bucketed(relative_position, far.buckets),
        )
        near = made_once(
            context,
            ("near", far.values, bucketed, memory_length),
            lambda: _masks.of_buckets(far.values, bucketed, far.buckets_dim, memory_length),
        )
        # Values that depend on the query have the size of the bias.
        by_distance = self.relative_attention_type != "contextual"
        distances = [far] if by_distance else []
        # Blocks make the bias of `distances`; what they cannot make goes along as a Tensor.
        rest = None if by_distance else near
        if hidden is None:
            return _masks.made_of(near, (), rest, distances) if by_distance else near
        # In the order of the logits, so that the sum with them needs no transposition.
        order = [*x.shape.dims[:-1], *heads_dims, memory_length]
        in_order = [d for d in order if d in near.shape or d in hidden.shape]
        others = [d for d in near.shape.dims + hidden.shape.dims if d not in in_order]
        dims = (*dict.fromkeys(others), *in_order)
        bias = made_once(
            context, ("bias", near, hidden, dims), lambda: mtf.add(near, hidden, mtf.Shape(dims))
        )
        if hidden.made_of is None:
            return _masks.made_of(bias, (), hidden, distances) if by_distance else bias
        return _masks.made_of(bias, hidden.made_of.visible, rest, distances)

    @property
    def kv_dim(self) -> mtf.Dimension:
        """The Dimension of queries, keys and values."""
        return mtf.Dimension("d_kv", self.key_value_size)

    def memory_length(self, context: Context) -> mtf.Dimension:
        """Returns the Dimension of the memory: as long as the sequence.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
        """
        return mtf.Dimension(_dot_product.memory_name(context), context.length_dim.size)

    def rename_length_to_memory_length(self, x: mtf.Tensor, context: Context) -> mtf.Tensor:
        """Returns `x` with its length renamed to memory_length, as the memory of attention.

        Args:
          x: a Tensor with the dimension of the sequence.
          context: the Context of this call of the model: its mode, positions, states and losses.
        """
        # Logits have both lengths, which need two names; a layout may then split one of them alone.
        return mtf.rename_dimension(x, context.length_dim.name, self.memory_length(context).name)

    def _as_memory(self, x: mtf.Tensor, context: Context) -> mtf.Tensor:
        """Returns `x` as the memory of attention; a step of decoding has no length to rename."""
        step = context.mode == "incremental"
        return x if step else self.rename_length_to_memory_length(x, context)

    def min_relative_position(self, context: Context) -> Optional[int]:
        """Returns how far back a position attends, a negative number; None for no limit.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
        """
        return None

    def max_relative_position(self, context: Context) -> Optional[int]:
        """Returns how far ahead a position attends; None for no limit.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
        """
        return None

    @property
    def attention_fn(self) -> Callable[..., mtf.Tensor]:
        """The attention function."""
        return _ATTENTION_FUNCTIONS[self.attention_func]
