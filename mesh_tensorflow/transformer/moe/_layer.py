"""Mixture-of-experts layers, of one level and of two: tokens in groups go to experts and back.

Each group is dispatched independently, so that processors need not synchronize.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow._core.operation import without_stages
from mesh_tensorflow.ops._random import drops
from mesh_tensorflow.transformer.moe._router import (
    GATINGS,
    HParams,
    Mixture,
    Router,
    Routing,
    gate,
    hparams_of,
)
from mesh_tensorflow.transformer.transformer import TransformerLayer

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context


# A function of the experts' inputs [outer_batch, experts, batch_unsplit, expert_capacity, d_model]
# and the Dimension of experts that returns their output, a Tensor or a list of Tensors.
Experts = Callable[[mtf.Tensor, mtf.Dimension], Any]


# -- groups of tokens


def _split_into_groups(n: int, max_group_size: int, mesh_dim_size: int) -> tuple[int, int]:
    """Returns (number of groups, size of a group) for `n` tokens.

    Groups have equal sizes, and each processor has the same number of them. Their number is n //
    max_group_size, or the next higher number that allows this; so a group may be larger than
    `max_group_size`, but less than twice as large.

    Args:
      n: an integer.
      max_group_size: an integer.
      mesh_dim_size: an integer, the number of processors that the groups are split over.

    Raises:
      ValueError: the tokens cannot be split evenly over the processors.
    """
    if n % mesh_dim_size:
        raise ValueError(
            f"mixture of experts: n={n} is not a multiple of mesh_dim_size={mesh_dim_size}: the "
            "tokens of a step cannot be split evenly among the processors; change the batch size "
            "or the layout"
        )
    # At least one group for each processor, so that no cumsum over a group has to communicate.
    num_groups = max(mesh_dim_size, n // max_group_size)
    # It ends with a group for each token at the latest, as processors divide the tokens.
    while num_groups < n and (num_groups % mesh_dim_size or n % num_groups):
        num_groups += 1
    return num_groups, n // num_groups


class Groups(NamedTuple):
    """How tokens are grouped.

    Attributes:
      outer_batch: a Dimension, the outer part of the batch.
      batch: a Dimension with the name of the batch, the groups in each index of it.
      group: a Dimension, the tokens of a group.
    """

    outer_batch: mtf.Dimension
    batch: mtf.Dimension
    group: mtf.Dimension

    def split(self, x: mtf.Tensor, *inner: mtf.Dimension) -> mtf.Tensor:
        """Returns `x` with dimensions [outer_batch, batch, group, inner...]."""
        return mtf.reshape(x, mtf.Shape([*self, *inner]))

    def importance(
        self, nonpadding: Union[mtf.Tensor, int, None], tokens: mtf.Shape
    ) -> Optional[mtf.Tensor]:
        """Returns the importance of tokens, [outer_batch, batch, group].

        Args:
          nonpadding: a Tensor with dimensions among those of the tokens, 0 at padding; any other
            value if there is no padding, for which None is returned.
          tokens: a Shape.
        """
        if not isinstance(nonpadding, mtf.Tensor):
            return None
        return self.split(mtf.broadcast(nonpadding, tokens))


def in_groups(mixture: Mixture, tokens: mtf.Shape, group_name: str = "group") -> Groups:
    """Returns the Groups of tokens.

    Args:
      mixture: the Mixture.
      tokens: a Shape, [outer_batch (or not), batch, ...].
      group_name: a string.
    """
    dims = list(tokens.dims)
    # Groups are within an index of it: its mesh axis may hold copies of all experts.
    outer = dims.pop(0) if dims and dims[0].name == "outer_batch" else None
    if not dims:
        raise ValueError(
            f"mixture of experts: the input {tokens} needs a dimension of the batch before the "
            "channels"
        )
    # A step of decoding has one token of a row.
    within = mixture.hparam("groups_in_rows") and len(dims) > 1
    # A single row is whole on each processor, whatever the layout says of larger batches.
    whole = within or dims[0].size == 1
    num_groups, group_size = _split_into_groups(
        mtf.Shape(dims).size,
        mixture.hparam("group_size"),
        dims[0].size if whole else mixture.slices(dims[0]),
    )
    return Groups(
        outer or mtf.Dimension("outer_batch", 1),
        mtf.Dimension(dims[0].name, num_groups),
        mtf.Dimension(group_name, group_size),
    )


def capacity(mixture: Mixture, group_size: int, num_experts: int, factor: float) -> int:
    """Returns how many tokens of a group an expert takes at most.

    It is an even share of the group times the factor, and at least the minimum.
    """
    # Fedus et al. (2021), equation 3, with the tokens of a group in place of those of the batch.
    # The size is fixed in advance because shapes cannot depend on what the router chooses.
    share = min(group_size, int(group_size * factor / num_experts))
    # A share may round to 0 where tokens are few, as in a step of decoding; all would be dropped.
    return max(share, mixture.hparam("min_expert_capacity"))


def _renamed(x: mtf.Tensor, dims: list[mtf.Dimension]) -> mtf.Tensor:
    """Renames the dimensions of `x`, which may change what the layout splits.

    In between, the channels are named `d_model_split`: with a layout that splits it, each processor
    sends only its part of the channels.
    """
    channels = mtf.Dimension("d_model_split", dims[-1].size)
    x = mtf.reshape(x, mtf.Shape([*dims[:-1], channels]))
    # Back to the name that experts know; if the other one is split, this gathers the channels.
    return mtf.reshape(x, mtf.Shape(dims))


def dispatched(
    mixture: Mixture,
    experts: Experts,
    inputs: mtf.Tensor,
    nonpadding: Union[mtf.Tensor, int, None],
    token_embeddings: Optional[mtf.Tensor],
) -> tuple[Any, mtf.Tensor]:
    """Dispatches each token to some of the experts, and combines their outputs.

    Args:
      mixture: the Mixture.
      experts: a function, see `Experts`.
      inputs: a Tensor with dimensions [outer_batch (or not), batch, ..., d_model].
      nonpadding: a Tensor with the dimensions of the inputs except the last, 0 at tokens that are
        not dispatched; any other value if there is no padding.
      token_embeddings: a Tensor of the shape of the inputs, or None.

    Returns:
      (a Tensor, or a list of them as `experts` returns, with dimensions [outer_batch (or not),
      batch, ..., output]; the loss times its coefficient).
    """
    *tokens, channels = without_stages(inputs).dims
    groups = in_groups(mixture, mtf.Shape(tokens))
    num_experts = mixture.hparam("num_experts")
    # Two names for experts and for the batch, of which a layout splits one each: by token the
    # batch, by expert the experts.
    unsplit = mtf.Dimension("expert_unsplit", num_experts)
    experts_dim = mtf.Dimension("experts", num_experts)
    batch_unsplit = mtf.Dimension("batch_unsplit", groups.batch.size)
    factor = mixture.of_mode("capacity_factor")
    capacity_dim = mtf.Dimension(
        "expert_capacity", capacity(mixture, groups.group.size, num_experts, factor)
    )
    x = groups.split(inputs, channels)
    embeddings = None
    if token_embeddings is not None and mixture.hparam("word_embed_mode") is not None:
        embeddings = groups.split(token_embeddings, channels)
    importance = groups.importance(nonpadding, mtf.Shape(tokens))
    router = Router(
        mixture, x, unsplit, capacity_dim, importance=importance, token_embeddings=embeddings
    )
    dispatch, combine, loss = gate(router)
    # Between these two shapes a layout such as "batch:all,experts:all" needs an alltoall.
    by_token = [groups.outer_batch, unsplit, groups.batch, capacity_dim]
    by_expert = [groups.outer_batch, experts_dim, batch_unsplit, capacity_dim]
    # A product with a one-hot has a fixed shape, unlike a gather; places without a token are 0.
    sent = mtf.einsum([x, dispatch], output_shape=mtf.Shape([*by_token, channels]))
    computed = experts(_renamed(sent, [*by_expert, channels]), experts_dim)

    def back(y: mtf.Tensor) -> mtf.Tensor:
        output = y.shape.dims[-1]
        y = _renamed(y, [*by_token, output])
        # A token that no expert takes has no place, and its output is 0: only a residual keeps it.
        y = mtf.einsum([y, combine], output_shape=mtf.Shape([*groups, output]))
        return mtf.reshape(y, mtf.Shape([*tokens, output]))

    outputs = [back(y) for y in computed] if isinstance(computed, list) else back(computed)
    return outputs, loss * mixture.hparam("loss_coef")


# -- experts of one level


def expert_hidden(
    mixture: Mixture,
    x: mtf.Tensor,
    expert_dims: list[mtf.Dimension],
    hidden_dim: mtf.Dimension,
    activation: Union[Callable, str, list, None],
) -> mtf.Tensor:
    """Returns the hidden units of each expert's feed-forward layer.

    Args:
      mixture: the Mixture.
      x: a Tensor with dimensions [..., d_model].
      expert_dims: a list of Dimensions.
      hidden_dim: a Dimension.
      activation: as for `mtf.layers.dense_product`.
    """
    h = layers.dense_product(
        x,
        reduced_dims=x.shape.dims[-1:],
        new_dims=hidden_dim,
        expert_dims=expert_dims,
        activation_functions=activation,
        use_bias=False,
        variable_dtype=mixture.variable_dtype,
        name="wi",
    )
    rate = mixture.hparam("dropout_rate")
    return mtf.dropout(h, mixture.train, rate=rate) if drops(rate) else h


def expert_output(
    mixture: Mixture,
    h: mtf.Tensor,
    expert_dims: list[mtf.Dimension],
    hidden_dim: mtf.Dimension,
    output_dim: mtf.Dimension,
    name: str = "wo",
) -> mtf.Tensor:
    """Returns the outputs of experts, computed from their hidden units.

    Args:
      mixture: the Mixture.
      h: a Tensor, as `expert_hidden` returns.
      expert_dims: a list of Dimensions.
      hidden_dim: the Dimension of the hidden units.
      output_dim: a Dimension.
      name: a string, the variable scope.
    """
    return layers.dense(
        h,
        output_dim,
        reduced_dims=[hidden_dim],
        expert_dims=expert_dims,
        use_bias=False,
        variable_dtype=mixture.variable_dtype,
        name=name,
    )


def transformer_moe_layer_v1(
    inputs: mtf.Tensor,
    output_dim: mtf.Dimension,
    hparams: object,
    train: bool,
    variable_dtype: mtf.VariableDType,
    layout: Union[mtf.LayoutRules, str, None] = None,
    mesh_shape: Union[mtf.Shape, str, None] = None,
    nonpadding: Optional[mtf.Tensor] = None,
    activation: Union[Callable, str, list, None] = mtf.relu,
    num_microbatches: Optional[int] = None,
    token_embeddings: Optional[mtf.Tensor] = None,
    *,
    routings: Optional[list[Routing]] = None,
) -> tuple[Any, mtf.Tensor]:
    """Applies a mixture of feed-forward experts, which a router chooses for each token.

    Shazeer et al., "Outrageously large neural networks: the sparsely-gated mixture-of-experts
    layer" (2017), and "Mesh-TensorFlow" (2018). Tokens are dispatched in groups; an expert takes at
    most `expert_capacity` tokens of a group and drops the others. The number of groups is a
    multiple of the number of processors that the batch is split over, so results depend on the
    layout if groups would be larger otherwise. With `moe_shared_hidden_size`, the output of a
    further expert is added, which all tokens go to.

    Args:
      inputs: a Tensor with dimensions [outer_batch (or not), batch, ..., d_model].
      output_dim: a Dimension.
      hparams: an object with the attributes moe_num_experts, moe_hidden_size, moe_gating, ...
      train: whether the model is being trained.
      variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
      layout: the layout that the program is lowered with, LayoutRules or what converts to them; or
        None.
      mesh_shape: a Shape or None.
      nonpadding: a Tensor with the dimensions of the inputs except the last, 0 at padding, which is
        not dispatched; or None.
      activation: as for `mtf.layers.dense_product`.
      num_microbatches: an integer that the loss is divided by, or None.
      token_embeddings: a Tensor of the shape of the inputs for `moe_word_embed_mode`, or None.
      routings: a list that a Routing is appended to, if tokens choose experts; or None.

    Returns:
      (a Tensor with dimensions [outer_batch (or not), batch, ..., output_dim], a scalar to add
      to the model's loss). With `moe_use_experts_attention` the first is a list of two such
      Tensors, for queries and keys.

    Raises:
      ValueError: the gating or its policy is unknown, a hyperparameter is missing, or the tokens
        cannot be split evenly among the processors.
    """
    mixture = Mixture(
        hparams, train, variable_dtype, layout, mesh_shape, num_microbatches, routings
    )
    hidden_dim = mtf.Dimension("expert_hidden", mixture.hparam("hidden_size"))
    for_attention = mixture.hparam("use_experts_attention")
    names = ["q_wo", "k_wo"] if for_attention else ["wo"]

    def experts(x: mtf.Tensor, experts_dim: mtf.Dimension) -> Any:
        h = expert_hidden(mixture, x, [experts_dim], hidden_dim, activation)
        outputs = [
            expert_output(mixture, h, [experts_dim], hidden_dim, output_dim, name) for name in names
        ]
        return outputs if for_attention else outputs[0]

    y, loss = dispatched(mixture, experts, inputs, nonpadding, token_embeddings)
    if mixture.hparam("shared_hidden_size"):
        y += shared_output(mixture, inputs, output_dim, activation)
    return y, loss


def shared_output(
    mixture: Mixture,
    inputs: mtf.Tensor,
    output_dim: mtf.Dimension,
    activation: Union[Callable, str, list, None],
) -> mtf.Tensor:
    """Returns the output of the expert that all tokens go to.

    Dai et al., "DeepSeekMoE" (2024), section 3.2; with a gate of its own, as in Qwen 2.

    Args:
      mixture: the Mixture; its hyperparameter `shared_gate` says whether there is a gate.
      inputs: a Tensor with dimensions [..., d_model].
      output_dim: a Dimension.
      activation: as for `mtf.layers.dense_product`.
    """
    # The name of feed-forward layers without experts, so that layouts split both alike.
    hidden_dim = mtf.Dimension("d_ff", mixture.hparam("shared_hidden_size"))
    with tf.variable_scope("shared"):
        h = expert_hidden(mixture, inputs, [], hidden_dim, activation)
        y = expert_output(mixture, h, [], hidden_dim, output_dim)
        if not mixture.hparam("shared_gate"):
            return y
        one = mtf.Dimension("shared_gate", 1)
        gate = layers.dense(
            inputs,
            one,
            reduced_dims=inputs.shape.dims[-1:],
            use_bias=False,
            variable_dtype=mixture.variable_dtype,
            name="gate",
        )
    return y * mtf.sigmoid(mtf.reduce_sum(gate, reduced_dim=one))


class MixtureLayer(TransformerLayer):
    """Base class of layers of experts, which `_moe_layer` applies with `_hparams`."""

    _hparams: HParams
    # A function such as `transformer_moe_layer_v1`.
    _moe_layer: Callable[..., tuple[Any, mtf.Tensor]]

    def _options(self, context: Context) -> dict[str, Any]:
        """Returns further arguments of `_moe_layer`."""
        return {}

    def call(
        self, context: Context, x: mtf.Tensor, losses: Optional[list[mtf.Tensor]] = None
    ) -> Any:
        """Returns the output of the layer, and adds its loss to `context.losses`.

        Args:
          context: a Context.
          x: a Tensor with dimensions [batch..., length, d_model]; without `length` when decoding.
          losses: ignored.

        Returns:
          A Tensor with the dimensions of `x`; of MoE1D with `use_experts_attention`, a list of two.

        Raises:
          NotImplementedError: the model is an ensemble.
        """
        del losses
        model = context.model
        if getattr(model, "ensemble_dim", None) is not None:
            raise NotImplementedError(
                f"{type(self).__name__}: MoE not yet implemented with ensembles, but the model has "
                f"{model.ensemble_dim}; use DenseReluDense in ensembles"
            )
        # Attention asks for another size: that of all heads together.
        output_dim = getattr(self._hparams, "moe_output_dim", None) or model.model_dim
        nonpadding = context.nonpadding
        if isinstance(nonpadding, mtf.Tensor) and any(d not in x.shape for d in nonpadding.shape):
            nonpadding = None  # a decoding step, for one position
        y, loss = self._moe_layer(
            x,
            output_dim,
            self._hparams,
            context.train,
            context.variable_dtype,
            layout=model.layout,
            mesh_shape=model.mesh_shape,
            nonpadding=nonpadding,
            num_microbatches=context.num_microbatches,
            **self._options(context),
        )
        if context.losses is not None:
            context.losses.append(loss)
        return y


@gin.configurable(module="mesh_tensorflow.transformer.moe")
class MoE1D(MixtureLayer):
    """A mixture of feed-forward experts; see `transformer_moe_layer_v1`.

    Variables are `<gating>_gating/kernel`, `wi/kernel` and `wo/kernel`; of a shared expert
    `shared/wi/kernel`, `shared/wo/kernel` and `shared/gate/kernel`.
    """

    _moe_layer = staticmethod(transformer_moe_layer_v1)

    def __init__(
        self,
        num_experts: int = 16,
        loss_coef: float = 1e-2,
        hidden_size: int = 4096,
        group_size: int = 1024,
        capacity_factor_train: float = 1.25,
        capacity_factor_eval: float = 2.0,
        use_second_place_loss: bool = False,
        second_policy_train: str = "random",
        second_policy_eval: str = "random",
        second_threshold_train: float = 0.2,
        second_threshold_eval: float = 0.2,
        dropout_rate: float = 0.0,
        activation: Union[str, list] = "relu",
        moe_gating: str = "top_2",
        min_expert_capacity: int = 4,
        switch_policy_train: str = "input_jitter",
        switch_policy_eval: str = "input_jitter",
        switch_dropout: float = 0.1,
        switch_temperature: float = 1.0,
        switch_jitter: float = 1e-2,
        ntlb_top_k: int = 4,
        output_dim: Optional[mtf.Dimension] = None,
        use_experts_attention: bool = False,
        z_loss: Optional[float] = None,
        word_embed_mode: Optional[str] = None,
        use_second_place_expert_prob: Optional[float] = None,
        use_second_place_expert_prob_temp: Optional[float] = None,
        top_n_num_experts_per_token: int = 3,
        balance_padding: bool = True,
        *,
        top_n_normalized: Optional[bool] = None,
        shared_hidden_size: int = 0,
        shared_gate: bool = False,
        groups_in_rows: bool = False,
    ) -> None:
        """Creates the layer.

        Args:
          num_experts: an integer.
          loss_coef: the coefficient of the load-balancing loss.
          hidden_size: an integer, the number of hidden units of an expert.
          group_size: an integer, about how many tokens are dispatched together.
          capacity_factor_train: the capacity of an expert, relative to its even share of a group.
          capacity_factor_eval: the same when not training.
          use_second_place_loss: whether second choices are balanced too.
          second_policy_train: whether a token goes to its second expert: "all", "none",
            "threshold" (if its gate is above the threshold) or "random" (with a probability of
            its gate over the threshold).
          second_policy_eval: the same when not training.
          second_threshold_train: a number.
          second_threshold_eval: a number.
          dropout_rate: the dropout rate of the hidden units.
          activation: the name of a function of mtf, or a list of names for gated units.
          moe_gating: "top_2", "top_n", "switch", "ntlb", "switch_max" or "expert_selection".
          min_expert_capacity: an integer, the minimum capacity of an expert.
          switch_policy_train: "argmax", "sample", "input_dropout" or "input_jitter".
          switch_policy_eval: the same when not training.
          switch_dropout: the dropout rate of "input_dropout".
          switch_temperature: the temperature of "sample".
          switch_jitter: the width of "input_jitter".
          ntlb_top_k: an integer, the maximum number of experts that a token tries.
          output_dim: a Dimension; the model's if None.
          use_experts_attention: whether to return two outputs, for queries and keys.
          z_loss: the coefficient of the router's z-loss in training, or None.
          word_embed_mode: how the embeddings of ids are in the router's input: "add", "concat",
            "add_stop_grad" or "concat_stop_grad" (the same without a gradient to the embeddings),
            or "embed_only" (in its place); or None.
          use_second_place_expert_prob: the probability that a token's best expert is passed over in
            training, for the switch gatings; or None.
          use_second_place_expert_prob_temp: the temperature at which another expert is sampled in
            that case, or None for the second best.
          top_n_num_experts_per_token: an integer, for "top_n".
          balance_padding: whether the load-balancing loss is a mean over all places of a group,
            padding too, so that it is smaller the more padding there is. It is so in the classic
            release, and so for its programs and files; set False in new models, for a mean over
            tokens.
          top_n_normalized: whether "top_n" divides the gates of a token's experts by their sum; if
            None, where there are several.
          shared_hidden_size: an integer, the number of hidden units (`d_ff`) of an expert that all
            tokens go to, whose output is added; 0 for none.
          shared_gate: whether its output is multiplied by the sigmoid of a dense layer with one
            output.
          groups_in_rows: whether tokens of a group are of one row of the batch (in decoding, they
            are not), so that groups are the same in each layout.
        """
        if shared_hidden_size and use_experts_attention:
            raise ValueError(
                f"MoE1D: shared_hidden_size={shared_hidden_size} is for feed-forward experts, not "
                "for use_experts_attention; leave one of them out"
            )
        # No local may come before: one with the name of a hyperparameter would be taken for it.
        self._hparams = hparams_of(locals())
        self._activation = activation

    def _options(self, context: Context) -> dict[str, Any]:
        return {
            "activation": self._activation,
            "token_embeddings": context.input_embeddings,
            # A user's own context class may lack it.
            "routings": getattr(context, "routings", None),
        }


# -- experts of two levels


class _Level(NamedTuple):
    """The Dimensions of one level of experts."""

    experts: mtf.Dimension
    unsplit: mtf.Dimension
    capacity: mtf.Dimension

    @classmethod
    def make(cls, name: str, num_experts: int, capacity: int) -> _Level:
        return cls(
            mtf.Dimension(f"expert_{name}", num_experts),
            mtf.Dimension(f"expert_{name}_unsplit", num_experts),
            mtf.Dimension(f"expert_capacity_{name}", capacity),
        )


def _numbers_of_experts(mixture: Mixture) -> tuple[int, int]:
    numbers = mixture.hparam("num_experts")
    if not isinstance(numbers, (list, tuple)) or len(numbers) != 2:
        raise ValueError(
            f"transformer_moe_layer_v2: moe_num_experts={numbers!r} must be two numbers, of the "
            "experts in each level; for one level use transformer_moe_layer_v1"
        )
    # The second level tells first from second choices by gates that sum to 1, which others do not.
    if mixture.hparam("gating") != "top_2":
        raise ValueError(
            f"transformer_moe_layer_v2: unknown hparams.moe_gating={mixture.hparam('gating')}: "
            "in two levels it must be top_2"
        )
    return numbers[0], numbers[1]


def transformer_moe_layer_v2(
    inputs: mtf.Tensor,
    output_dim: mtf.Dimension,
    hparams: object,
    train: bool,
    variable_dtype: mtf.VariableDType,
    layout: Union[mtf.LayoutRules, str, None] = None,
    mesh_shape: Union[mtf.Shape, str, None] = None,
    nonpadding: Optional[mtf.Tensor] = None,
    num_microbatches: Optional[int] = None,
) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Applies a two-level mixture of feed-forward experts.

    Shazeer et al., "Outrageously large neural networks" (2017), appendix B. A first router sends
    tokens to expert_x groups of experts; each group has its own router, which sends them to its
    expert_y experts. Within a group, tokens for which it is the second choice are dispatched after
    those for which it is the first.

    A layout for a mesh of two dimensions is
    "batch:mesh_x,outer_batch:mesh_y,expert_x:mesh_x,expert_y:mesh_y".

    Args:
      inputs: a Tensor with dimensions [outer_batch (or not), batch, ..., d_model].
      output_dim: a Dimension.
      hparams: an object with the attributes moe_num_experts (a list of two), moe_hidden_size, ...
      train: whether the model is being trained.
      variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
      layout: the layout that the program is lowered with, LayoutRules or what converts to them; or
        None.
      mesh_shape: a Shape or None.
      nonpadding: a Tensor with the dimensions of the inputs except the last, 0 at padding, which is
        not dispatched; or None.
      num_microbatches: an integer that the loss is divided by, or None.

    Returns:
      (a Tensor with dimensions [outer_batch (or not), batch, ..., output_dim], a scalar to add
      to the model's loss).

    Raises:
      ValueError: there are not two numbers of experts, or the gating is not "top_2".
    """
    *tokens, channels = without_stages(inputs).dims
    mixture = Mixture(hparams, train, variable_dtype, layout, mesh_shape, num_microbatches)
    num_experts = _numbers_of_experts(mixture)[0]
    groups = in_groups(mixture, mtf.Shape(tokens), "group_size_x")
    outer, batch, group = groups
    factor = mixture.of_mode("capacity_factor")
    level = _Level.make("x", num_experts, capacity(mixture, group.size, num_experts, factor))
    x = groups.split(inputs, channels)
    importance = groups.importance(nonpadding, mtf.Shape(tokens))
    dispatch, combine, outer_loss = gate(
        Router(
            mixture, x, level.unsplit, level.capacity, importance=importance, name="outer_gating"
        ),
        GATINGS["top_2"],
    )
    # Both have one order, so that the reshape in between only renames: the layout splits experts
    # there, where it split the batch here.
    by_token = [level.unsplit, outer, batch, level.capacity]
    by_expert = [level.experts, outer, mtf.Dimension("batch_unsplit", batch.size), level.capacity]
    # A product with zeros and ones instead of a gather: it works in every layout, and places that
    # stay empty are zeros (Lepikhin et al., 2020).
    sent = mtf.einsum([x, dispatch], output_shape=mtf.Shape([*by_token, channels]))
    y, inner_loss = _second_level(
        mixture,
        mtf.reshape(sent, mtf.Shape([*by_expert, channels])),
        mtf.reshape(_importance_within(combine, by_token), mtf.Shape(by_expert)),
        output_dim,
    )
    y = mtf.reshape(y, mtf.Shape([*by_token, output_dim]))
    y = mtf.einsum([y, combine], output_shape=mtf.Shape([*groups, output_dim]))
    loss = (outer_loss + inner_loss) * mixture.hparam("loss_coef")
    return mtf.reshape(y, mtf.Shape([*tokens, output_dim])), loss


def _second_level(
    mixture: Mixture, inputs: mtf.Tensor, importance: mtf.Tensor, output_dim: mtf.Dimension
) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Returns the outputs of the experts for their tokens, and the loss.

    Args:
      mixture: the Mixture.
      inputs: a Tensor with dimensions [expert_x, outer_batch, batch_unsplit, expert_capacity_x,
        d_model].
      importance: a Tensor with the same dimensions except the last.
      output_dim: a Dimension.
    """
    *places, channels = without_stages(inputs).dims
    expert_x, outer, group = _regrouped(mixture, places)
    num_experts = _numbers_of_experts(mixture)[1]
    factor = mixture.hparam("capacity_factor_second_level")
    level = _Level.make("y", num_experts, capacity(mixture, group.size, num_experts, factor))
    x = mtf.reshape(inputs, mtf.Shape([expert_x, outer, group, channels]))
    importance = mtf.reshape(importance, mtf.Shape([expert_x, outer, group]))
    # Each group of experts has a router of its own: expert_x is a dimension of the kernel.
    dispatch, combine, loss = gate(
        Router(mixture, x, level.unsplit, level.capacity, [expert_x], importance, "inner_gating"),
        GATINGS["top_2"],
    )
    by_token = [level.unsplit, expert_x, outer, level.capacity]
    # Here expert_y takes over the mesh axis of the groups, as expert_x did that of the batch.
    outer_unsplit = mtf.Dimension(outer.name + "_unsplit", outer.size)
    by_expert = [level.experts, expert_x, outer_unsplit, level.capacity]
    sent = mtf.einsum([x, dispatch], output_shape=mtf.Shape([*by_token, channels]))
    sent = mtf.reshape(sent, mtf.Shape([*by_expert, channels]))

    hidden_dim = mtf.Dimension("expert_hidden", mixture.hparam("hidden_size"))
    # Each group of experts has weights of its own: their number is the product of both levels.
    expert_dims = [level.experts, expert_x]
    h = expert_hidden(mixture, sent, expert_dims, hidden_dim, mtf.relu)
    y = expert_output(mixture, h, expert_dims, hidden_dim, output_dim)
    y = mtf.reshape(y, mtf.Shape([*by_token, output_dim]))
    y = mtf.einsum([y, combine], output_shape=mtf.Shape([expert_x, outer, group, output_dim]))
    return mtf.reshape(y, mtf.Shape([*places, output_dim])), loss


def _importance_within(combine: mtf.Tensor, dims: list[mtf.Dimension]) -> mtf.Tensor:
    """Returns 1.0 for tokens whose first choice is the group, 0.5 for second choices, else 0.0."""
    # One token is in each place, so the sum over the rest is its gate there.
    gate = mtf.reduce_sum(mtf.to_float(combine), output_shape=mtf.Shape(dims))
    # The two gates of a token have the sum 1, so only that of its first choice is above 0.5.
    first = mtf.to_float(mtf.greater(gate, 0.5))
    return 0.5 * (first + mtf.to_float(mtf.greater(gate, 0.0)))


def _regrouped(mixture: Mixture, dims: list[mtf.Dimension]) -> list[mtf.Dimension]:
    """Returns [expert_x, outer_batch, group_size_y], the groups of the second level."""
    expert_x, outer, batch, capacity_dim = dims
    # Only outer_batch is still split: the mesh axis of the batch has gone to expert_x.
    num_groups, group_size = _split_into_groups(
        outer.size * batch.size * capacity_dim.size,
        mixture.hparam("group_size"),
        mixture.slices(outer),
    )
    return [
        expert_x,
        mtf.Dimension("outer_batch", num_groups),
        mtf.Dimension("group_size_y", group_size),
    ]


class MoE2D(MixtureLayer):
    """A two-level mixture of feed-forward experts; see `transformer_moe_layer_v2`.

    Variables are `outer_gating/kernel`, `inner_gating/kernel`, `wi/kernel` and `wo/kernel`.
    """

    _moe_layer = staticmethod(transformer_moe_layer_v2)

    def __init__(
        self,
        expert_x: int = 8,
        expert_y: int = 8,
        loss_coef: float = 1e-2,
        hidden_size: int = 4096,
        group_size: int = 1024,
        capacity_factor_train: float = 1.25,
        capacity_factor_eval: float = 2.0,
        capacity_factor_second_level: float = 1.0,
        use_second_place_loss: bool = False,
        second_policy_train: str = "random",
        second_policy_eval: str = "random",
        second_threshold_train: float = 0.2,
        second_threshold_eval: float = 0.2,
        balance_padding: bool = True,
    ) -> None:
        """Creates the layer.

        Args:
          expert_x: an integer, the number of groups of experts.
          expert_y: an integer, the number of experts of a group.
          loss_coef: the coefficient of the load-balancing loss.
          hidden_size: an integer, the number of hidden units of an expert.
          group_size: an integer, about how many tokens are dispatched together.
          capacity_factor_train: the capacity of a group of experts, relative to its even share.
          capacity_factor_eval: the same when not training.
          capacity_factor_second_level: the capacity of an expert, relative to its even share of its
            group's tokens.
          use_second_place_loss: whether second choices are balanced too.
          second_policy_train: as for MoE1D.
          second_policy_eval: as for MoE1D.
          second_threshold_train: a number.
          second_threshold_eval: a number.
          balance_padding: as for MoE1D.
        """
        self._hparams = hparams_of(locals(), gating="top_2", num_experts=[expert_x, expert_y])
