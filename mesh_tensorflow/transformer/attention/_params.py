"""Projection weights of attention: queries, keys, values and output; also by experts."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow._calls import arguments_of
from mesh_tensorflow._core.errors import check_choice, dims_text
from mesh_tensorflow.ops._variable import widened
from mesh_tensorflow.transformer import moe

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context


def _replaced(x: mtf.Tensor, old: list[mtf.Dimension], new: list[mtf.Dimension]) -> mtf.Tensor:
    return mtf.reshape(x, mtf.replace_dimensions(x.shape, old, new))


class QueryKeyNorm(NamedTuple):
    """How queries and keys are divided by their root mean squares, and scaled by a variable.

    Attributes:
      epsilon: what is added to the mean squares.
      over_heads: whether a mean is over the channels of all heads, as in OLMo 2, rather than of
        each head by itself.
      unit_offset: whether they are multiplied by 1 plus the variable, as in Gemma 3.
    """

    epsilon: float
    over_heads: bool = False
    unit_offset: bool = False


@dataclasses.dataclass(eq=False, repr=False)
class AttentionParams:
    """Attention weights, and the projections that use them.

    With `combine_dims`, the heads and channels of a weight are one dimension, named after the first
    of them: `q` is [d_model, heads], where `heads` has the size of heads times channels.

    It creates the variables, in the current variable scope. Options that do not fit each other are
    a ValueError.

    Attributes:
      mesh: a Mesh.
      query_input_dim: a Dimension, the channels that queries are computed from.
      memory_input_dim: a Dimension, the channels that keys and values are computed from.
      output_dim: a Dimension.
      key_dim: the Dimension of channels of queries and keys.
      value_dim: the Dimension of channels of values.
      query_heads_dims: a list of Dimensions; None for none.
      memory_heads_dims: a list of Dimensions, the heads of keys and values, a subset of those of
        the queries; None for none.
      variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
      shared_kv: whether keys double as values.
      no_query: whether there are no queries.
      combine_dims: whether heads and channels are one dimension of the weights.
      ensemble_dim: a Dimension, the first of each weight; or None.
      keep_query_heads_dims: whether the output has heads.
      fold_scaling_into_initializer: whether the scale key_dim^-0.5 of the logits is folded into the
        initializer of `wq` rather than applied in `compute_q`.
      make_attention_vars: whether there are weights for queries, keys and values.
      biases: which projections add a bias: letters of "qkvo".
      norm: how queries and keys are normalized before they are scaled; None if they are not.
      query_scale: what queries are multiplied by; None for key_dim^-0.5, applied or folded.
      q_shape: the Shape of `wq`; k_shape, v_shape and o_shape likewise.
      wq: a Tensor, or None; wk, wv, wkv and wo likewise.
    """

    mesh: mtf.Mesh
    query_input_dim: mtf.Dimension
    memory_input_dim: mtf.Dimension
    output_dim: mtf.Dimension
    key_dim: mtf.Dimension
    value_dim: mtf.Dimension
    query_heads_dims: list[mtf.Dimension]
    memory_heads_dims: list[mtf.Dimension]
    variable_dtype: mtf.VariableDType
    shared_kv: bool = False
    no_query: bool = False
    combine_dims: bool = True
    ensemble_dim: Optional[mtf.Dimension] = None
    keep_query_heads_dims: bool = False
    fold_scaling_into_initializer: bool = True
    make_attention_vars: bool = True
    biases: str = ""
    norm: Optional[QueryKeyNorm] = None
    query_scale: Optional[float] = None

    def __post_init__(self) -> None:
        lacks_some = self.shared_kv or self.no_query or not self.make_attention_vars
        _check_biases(self.biases, self.norm, lacks_some)
        if self.shared_kv and self.key_dim != self.value_dim:
            raise ValueError(
                f"AttentionParams: shared_kv makes values of keys, so key_dim "
                f"{dims_text([self.key_dim])} and value_dim {dims_text([self.value_dim])} must be "
                "equal"
            )
        if self.keep_query_heads_dims and self.combine_dims:
            raise ValueError(
                "AttentionParams: keep_query_heads_dims needs the heads of the output's weight as "
                "a dimension of their own; set combine_dims=False"
            )
        self.query_heads_dims = list(self.query_heads_dims or [])
        self.memory_heads_dims = list(self.memory_heads_dims or [])
        self._ensemble_dims = front = [self.ensemble_dim] if self.ensemble_dim else []
        # Input dimensions come before output dimensions, as in T5's checkpoints.
        self.q_shape = mtf.Shape([*front, self.query_input_dim, *self._stored(self.q_dims)])
        self.k_shape = mtf.Shape([*front, self.memory_input_dim, *self._stored(self.k_dims)])
        self.v_shape = mtf.Shape([*front, self.memory_input_dim, *self._stored(self.v_dims)])
        self.o_shape = mtf.Shape([*front, *self._stored(self.o_dims), self.output_dim])
        self.wq: Optional[mtf.Tensor] = None
        self.wk: Optional[mtf.Tensor] = None
        self.wv: Optional[mtf.Tensor] = None
        self.wkv: Optional[mtf.Tensor] = None
        self.wo: Optional[mtf.Tensor] = None
        # Last, since subclasses override it and need the shapes from above.
        self.init_weights()

    def _stored(self, dims: list[mtf.Dimension]) -> list[mtf.Dimension]:
        """Returns the dimensions of heads and channels as a weight stores them."""
        # Weights in T5's checkpoints are matrices, with one dimension for heads and channels.
        return [mtf.combined_dimension(dims)] if self.combine_dims else dims

    def init_weights(self) -> None:
        """Creates the variables.

        Initializers are normal, such that outputs of projections, and products of queries and keys,
        have variance 1.
        """
        memory = self.memory_input_dim.size**-0.5
        if self.make_attention_vars:
            if not self.no_query:
                query = self.query_input_dim.size**-0.5
                if self.fold_scaling_into_initializer:
                    # Logits sum key_dim products: for keys of variance 1, var(q . k) = key_dim *
                    # var(q) is then 1.
                    query *= self.key_dim.size**-0.5
                self.wq = self._weight("q", self.q_shape, query)
            if self.shared_kv:
                self.wkv = self._weight("kv", self.k_shape, memory)
            else:
                self.wk = self._weight("k", self.k_shape, memory)
                self.wv = self._weight("v", self.v_shape, memory)
        # An output sums over all heads and their channels.
        output = mtf.list_product(d.size for d in self.o_dims) ** -0.5
        self.wo = self._weight("o", self.o_shape, output)

    def _weight(self, name: str, shape: mtf.Shape, deviation: float) -> mtf.Tensor:
        if layers.unit_scaling_convention():
            # `us_einsum` scales the projections' outputs instead.
            deviation = 1.0
        return mtf.get_variable(
            self.mesh,
            name,
            shape,
            initializer=tf.random_normal_initializer(stddev=deviation),
            dtype=self.variable_dtype,
        )

    def _project(
        self,
        name: str,
        x: mtf.Tensor,
        w: mtf.Tensor,
        input_dim: mtf.Dimension,
        dims: list[mtf.Dimension],
    ) -> mtf.Tensor:
        """Projects the input dimension of `x` to `dims`."""
        y = layers.us_einsum([x, w], reduced_dims=[input_dim])
        stored = self._stored(dims)
        # The combined dimension has the name of the first of `dims`: a rule for heads splits either
        # form alike, and the reshape moves nothing.
        return self._with_bias(name, y if stored == dims else _replaced(y, stored, dims), dims)

    def _with_bias(self, name: str, y: mtf.Tensor, dims: list[mtf.Dimension]) -> mtf.Tensor:
        if name not in self.biases:
            return y
        return y + self._vector(f"{name}_bias", dims, tf.zeros_initializer())

    def _vector(
        self, name: str, dims: list[mtf.Dimension], initializer: tf.initializers.Initializer
    ) -> mtf.Tensor:
        shape = mtf.Shape([*self._ensemble_dims, *dims])
        return mtf.get_variable(
            self.mesh, name, shape, initializer=initializer, dtype=self.variable_dtype
        )

    def _normalized(self, name: str, x: mtf.Tensor, dims: list[mtf.Dimension]) -> mtf.Tensor:
        """Divides queries or keys by their root mean square along `dims`, if there are norms.

        Henry et al., "Query-key normalization for transformers" (2020).
        """
        if self.norm is None:
            return x
        epsilon, over_heads, unit_offset = self.norm
        dims = dims if over_heads else [self.key_dim]
        begin = tf.zeros_initializer() if unit_offset else tf.ones_initializer()
        scale = self._vector(f"{name}_norm", dims, begin)
        if unit_offset:
            scale += 1.0
        wide = widened(x)
        mean_square = mtf.reduce_mean(mtf.square(wide), output_shape=x.shape - dims)
        return mtf.cast(wide * mtf.rsqrt(mean_square + epsilon), x.dtype) * scale

    def scaled(self, q: mtf.Tensor) -> mtf.Tensor:
        """Scales queries, unless the scale is folded into the weights."""
        if self.query_scale is not None:
            return q if self.query_scale == 1.0 else q * self.query_scale
        # A norm undoes the scale of weights.
        folded = self.fold_scaling_into_initializer and self.norm is None
        return q if folded else q * self.key_dim.size**-0.5

    def compute_q(self, query_antecedent: mtf.Tensor) -> mtf.Tensor:
        """Returns queries.

        Args:
          query_antecedent: a Tensor with dimensions [batch..., length, query_input_dim].

        Returns:
          A Tensor with dimensions [batch..., length, query_heads_dims..., key_dim].

        Raises:
          ValueError: there are no queries.
        """
        if self.wq is None:
            raise ValueError("compute_q: there is no weight for queries, by no_query=True")
        q = self._project("q", query_antecedent, self.wq, self.query_input_dim, self.q_dims)
        return self.scaled(self._normalized("q", q, self.q_dims))

    def compute_kv(self, memory_antecedent: mtf.Tensor) -> mtf.Tensor:
        """Returns keys that double as values.

        Args:
          memory_antecedent: a Tensor with dimensions [batch..., memory_length, memory_input_dim].

        Returns:
          A Tensor with dimensions [batch..., memory_length, memory_heads_dims..., key_dim].

        Raises:
          ValueError: keys and values have separate weights.
        """
        if self.wkv is None:
            raise ValueError("compute_kv: there is no weight kv; use compute_k and compute_v")
        return self._project("kv", memory_antecedent, self.wkv, self.memory_input_dim, self.k_dims)

    def compute_k(self, memory_antecedent: mtf.Tensor) -> mtf.Tensor:
        """Returns keys.

        Args:
          memory_antecedent: a Tensor with dimensions [batch..., memory_length, memory_input_dim].

        Returns:
          A Tensor with dimensions [batch..., memory_length, memory_heads_dims..., key_dim].

        Raises:
          ValueError: keys and values share a weight.
        """
        if self.wk is None:
            raise ValueError("compute_k: there is no weight k, by shared_kv; use compute_kv")
        k = self._project("k", memory_antecedent, self.wk, self.memory_input_dim, self.k_dims)
        return self._normalized("k", k, self.k_dims)

    def compute_v(self, memory_antecedent: mtf.Tensor) -> mtf.Tensor:
        """Returns values.

        Args:
          memory_antecedent: a Tensor with dimensions [batch..., memory_length, memory_input_dim].

        Returns:
          A Tensor with dimensions [batch..., memory_length, memory_heads_dims..., value_dim].

        Raises:
          ValueError: keys and values share a weight.
        """
        if self.wv is None:
            raise ValueError("compute_v: there is no weight v, by shared_kv; use compute_kv")
        return self._project("v", memory_antecedent, self.wv, self.memory_input_dim, self.v_dims)

    def compute_output(self, o: mtf.Tensor, output_shape: Optional[mtf.Shape] = None) -> mtf.Tensor:
        """Projects the attention output to the output dimension.

        Args:
          o: a Tensor with dimensions [batch..., length, query_heads_dims..., value_dim], in any
            order.
          output_shape: a Shape, of [batch..., length, output_dim], with `query_heads_dims` if
            they are kept; or None.

        Returns:
          A Tensor of that shape.
        """
        if self.combine_dims:
            # A reshape joins neighbors only.
            last = [d for d in o.shape if d not in self.o_dims] + self.o_dims
            if o.shape.dims != last:
                o = mtf.transpose(o, mtf.Shape(last))
            o = _replaced(o, self.o_dims, self._stored(self.o_dims))
            reduced = self._stored(self.o_dims)
        else:
            # Kept heads are not summed over, though the weight has them.
            reduced = [self.value_dim] if self.keep_query_heads_dims else self.o_dims
        assert self.wo is not None
        y = layers.us_einsum([o, self.wo], output_shape=output_shape, reduced_dims=reduced)
        return self._with_bias("o", y, [self.output_dim])

    @property
    def q_dims(self) -> list[mtf.Dimension]:
        """The dimensions of queries except batch and length."""
        return [*self.query_heads_dims, self.key_dim]

    @property
    def k_dims(self) -> list[mtf.Dimension]:
        """The dimensions of keys except batch and length."""
        return [*self.memory_heads_dims, self.key_dim]

    @property
    def v_dims(self) -> list[mtf.Dimension]:
        """The dimensions of values except batch and length."""
        return [*self.memory_heads_dims, self.value_dim]

    @property
    def o_dims(self) -> list[mtf.Dimension]:
        """The dimensions that the output projection contracts."""
        return [*self.query_heads_dims, self.value_dim]


def _check_biases(biases: str, norm: Optional[QueryKeyNorm], lacks_some: bool) -> None:
    if set(biases) - set("qkvo"):
        raise ValueError(f"AttentionParams: biases={biases!r} has other letters than q, k, v and o")
    if lacks_some and (set(biases) - {"o"} or norm is not None):
        raise ValueError(
            f"AttentionParams: biases={biases!r} and norm_epsilon={norm and norm.epsilon} are for "
            "queries, keys and values with weights of their own; leave them out with shared_kv, "
            "no_query, or projections by experts"
        )


def attention_params_simple(
    mesh: mtf.Mesh,
    io_dim: mtf.Dimension,
    kv_dim: mtf.Dimension,
    heads_dim: mtf.Dimension,
    variable_dtype: mtf.VariableDType,
) -> AttentionParams:
    """Returns attention weights with as many memory heads as query heads.

    Args:
      mesh: a Mesh.
      io_dim: a Dimension, the channels of the inputs and the output.
      kv_dim: a Dimension, of queries, keys and values.
      heads_dim: a Dimension.
      variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
    """
    return AttentionParams(
        mesh,
        query_input_dim=io_dim,
        memory_input_dim=io_dim,
        output_dim=io_dim,
        key_dim=kv_dim,
        value_dim=kv_dim,
        query_heads_dims=[heads_dim],
        memory_heads_dims=[heads_dim],
        variable_dtype=variable_dtype,
    )


# What experts compute, by `expert_computation`: queries, keys (which double as values).
_MADE_BY_EXPERTS = {"qkv": (True, True), "q": (True, False), "kv": (False, True)}


def _check(
    expert_computation: str,
    combine_dims: bool,
    shared_kv: bool,
    query_heads_dims: Optional[Sequence[mtf.Dimension]],
    memory_heads_dims: Optional[Sequence[mtf.Dimension]],
) -> None:
    check_choice(
        "ExpertsAttentionParams", "expert_computation", expert_computation, _MADE_BY_EXPERTS
    )
    for name, value in (("combine_dims", combine_dims), ("shared_kv", shared_kv)):
        if not value:
            raise ValueError(
                f"ExpertsAttentionParams: experts make one vector that is cut into heads, and "
                f"keys that are values; set {name}=True"
            )
    if list(query_heads_dims or []) != list(memory_heads_dims or []):
        raise ValueError(
            "ExpertsAttentionParams: queries and keys come from the same experts and have the "
            "same heads; set num_memory_heads=0"
        )


class ExpertsAttentionParams(AttentionParams):
    """Attention projections; those of queries, keys or both are mixtures of experts.

    Fedus et al., "Switch transformers: scaling to trillion parameter models with simple and
    efficient sparsity" (2021), appendix A. Keys double as values.

    Attributes:
      context: the Context of this call of the model: its mode, positions, states and losses.
      expert_computation: "qkv", "q" or "kv": what the experts compute.
      moe_layer: a MoE1D.
    """

    def __init__(
        self,
        mesh: mtf.Mesh,
        query_input_dim: mtf.Dimension,
        memory_input_dim: mtf.Dimension,
        output_dim: mtf.Dimension,
        key_dim: mtf.Dimension,
        value_dim: mtf.Dimension,
        query_heads_dims: Optional[Sequence[mtf.Dimension]],
        memory_heads_dims: Optional[Sequence[mtf.Dimension]],
        variable_dtype: mtf.VariableDType,
        shared_kv: bool = False,
        no_query: bool = False,
        combine_dims: bool = True,
        ensemble_dim: Optional[mtf.Dimension] = None,
        keep_query_heads_dims: bool = False,
        fold_scaling_into_initializer: bool = True,
        context: Context = None,  # type: ignore[assignment]
        experts_hparams: object = None,
        expert_computation: str = "qkv",
        biases: str = "",
        norm: Optional[QueryKeyNorm] = None,
        query_scale: Optional[float] = None,
    ) -> None:
        """Creates the variables that do not belong to experts, in the current variable scope.

        Args:
          mesh: a Mesh; the arguments up to `fold_scaling_into_initializer` are those of
            `AttentionParams`.
          query_input_dim: a Dimension.
          memory_input_dim: a Dimension.
          output_dim: a Dimension.
          key_dim: the Dimension of channels of queries and keys.
          value_dim: the Dimension of channels of values.
          query_heads_dims: a list of Dimensions.
          memory_heads_dims: a list of Dimensions, equal to those of the queries.
          variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
          shared_kv: must be True.
          no_query: a bool.
          combine_dims: must be True.
          ensemble_dim: a Dimension or None.
          keep_query_heads_dims: a bool.
          fold_scaling_into_initializer: ignored; queries are scaled.
          context: the Context of this call of the model: its mode, positions, states and losses.
          experts_hparams: an object with the arguments of MoE1D as attributes.
          expert_computation: "qkv", "q" or "kv": what the experts compute.
          biases: "o" for a bias of the output, or "".
          norm: must be None.
          query_scale: what queries are multiplied by; key_dim^-0.5 if None.

        Raises:
          ValueError: an argument has a value that is not supported.
        """
        _check(expert_computation, combine_dims, shared_kv, query_heads_dims, memory_heads_dims)
        self.context = context
        self.expert_computation = expert_computation
        self._query_by_experts, self._keys_by_experts = _MADE_BY_EXPERTS[expert_computation]
        # In mode "qkv", what `compute_q` has made for `compute_kv`; weights are made anew for each
        # call of the layer, so it is never that of another input.
        self._keys: Optional[mtf.Tensor] = None
        # Only the output's weight: which of the others there are is decided below.
        super().__init__(**arguments_of(AttentionParams, locals()), make_attention_vars=False)
        if not self._query_by_experts:
            # Without the factor key_dim ** -0.5, by which `scaled` multiplies in each call here.
            self.wq = self._weight("q", self.q_shape, query_input_dim.size**-0.5)
        if not self._keys_by_experts:
            self.wkv = self._weight("kv", self.k_shape, memory_input_dim.size**-0.5)
        self.moe_layer = self._make_layer(experts_hparams)

    def _make_layer(self, hparams: object) -> moe.MoE1D:
        """Returns the experts, whose output concatenates all heads."""
        [combined] = self._stored(self.q_dims)
        # Both follow from the heads and from what the experts make, so those given are left out.
        settings = {
            name: value
            for name, value in vars(hparams).items()
            if not name.startswith("_") and name not in ("output_dim", "use_experts_attention")
        }
        return moe.MoE1D(
            **settings,
            output_dim=mtf.Dimension(self.query_input_dim.name, combined.size),
            # Each expert then has one output weight for queries and one for keys.
            use_experts_attention=self._query_by_experts and self._keys_by_experts,
        )

    def _in_heads(self, y: mtf.Tensor) -> mtf.Tensor:
        """Splits the last dimension of the experts' output into heads and channels."""
        return mtf.reshape(y, mtf.Shape([*y.shape.dims[:-1], *self.q_dims]))

    def scaled(self, q: mtf.Tensor) -> mtf.Tensor:
        """Returns the queries divided by the square root of the key size."""
        # Initializers of experts are those of any mixture, and do not hold this factor.
        scale = self.key_dim.size**-0.5 if self.query_scale is None else self.query_scale
        return q * scale

    def compute_q(self, query_antecedent: mtf.Tensor) -> mtf.Tensor:
        """Returns queries; in mode "qkv" the experts compute the keys at the same time."""
        if not self._query_by_experts:
            return super().compute_q(query_antecedent)
        q = self.moe_layer.call(self.context, query_antecedent)
        if self._keys_by_experts:
            q, keys = q
            self._keys = self._in_heads(keys)
        return self.scaled(self._in_heads(q))

    def compute_k(self, memory_antecedent: mtf.Tensor) -> mtf.Tensor:
        """Returns keys, which double as values; see `compute_kv`."""
        return self.compute_kv(memory_antecedent)

    def compute_v(self, memory_antecedent: mtf.Tensor) -> mtf.Tensor:
        """Returns values, which equal the keys; see `compute_kv`."""
        return self.compute_kv(memory_antecedent)

    def compute_kv(self, memory_antecedent: mtf.Tensor) -> mtf.Tensor:
        """Returns keys that double as values; in mode "qkv" those computed with the queries."""
        if not self._keys_by_experts:
            return super().compute_kv(memory_antecedent)
        # In mode "qkv" compute_q has been called before: one pass of the experts makes both.
        if self._keys is not None:
            return self._keys
        return self._in_heads(self.moe_layer.call(self.context, memory_antecedent))

    def keys_of_memory(
        self,
        memory_antecedent: mtf.Tensor,
        length_dim: mtf.Dimension,
        sequence_id: Union[mtf.Tensor, int, None],
    ) -> mtf.Tensor:
        """Returns the keys of a sequence other than that of the queries.

        Args:
          memory_antecedent: a Tensor with dimensions [batch..., length_dim, memory_input_dim].
          length_dim: a Dimension.
          sequence_id: the sequence id of the memory, as in a Context.
        """
        if not self._keys_by_experts:
            return super().compute_kv(memory_antecedent)
        # Experts tell padding by sequence_id; the copy is shallow, and shares the list of losses.
        context = copy.copy(self.context)
        context.length_dim = length_dim
        context.sequence_id = sequence_id
        keys = self.moe_layer.call(context, memory_antecedent)
        # Experts for both make queries of the memory too, which no one needs.
        return self._in_heads(keys[1] if self._query_by_experts else keys)
