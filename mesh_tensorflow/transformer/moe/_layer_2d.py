"""Two-level mixture-of-experts feed-forward layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Optional, Union

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow._core.tensor import without_stages
from mesh_tensorflow.transformer.moe._dispatch import (
    _split_into_groups,
    capacity,
    expert_capacity,
    expert_hidden,
    in_groups,
)
from mesh_tensorflow.transformer.moe._gatings import _top_2_gating
from mesh_tensorflow.transformer.moe._hparams import hparam, hparams_of
from mesh_tensorflow.transformer.moe._layer import call_moe
from mesh_tensorflow.transformer.transformer import TransformerLayer

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context


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


def _numbers_of_experts(hparams: object) -> tuple[int, int]:
    numbers = hparam(hparams, "num_experts")
    if not isinstance(numbers, (list, tuple)) or len(numbers) != 2:
        raise ValueError(
            f"transformer_moe_layer_v2: moe_num_experts={numbers!r} must be two numbers, of the "
            "experts in each level; for one level use transformer_moe_layer_v1"
        )
    if hparam(hparams, "gating") != "top_2":
        raise ValueError(
            f"transformer_moe_layer_v2: unknown hparams.moe_gating={hparam(hparams, 'gating')}: "
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
    num_experts = _numbers_of_experts(hparams)[0]
    groups = in_groups(mtf.Shape(tokens), hparams, layout, mesh_shape, "group_size_x")
    outer, batch, group = groups
    level = _Level.make("x", num_experts, expert_capacity(group.size, num_experts, hparams, train))
    x = groups.split(inputs, channels)
    dispatch, combine, outer_loss = _top_2_gating(
        x, [], level.unsplit, level.capacity, hparams, train, variable_dtype,
        importance=groups.importance(nonpadding, mtf.Shape(tokens)), name="outer_gating",
        num_microbatches=num_microbatches,
    )  # fmt: skip
    by_token = [level.unsplit, outer, batch, level.capacity]
    by_expert = [level.experts, outer, mtf.Dimension("batch_unsplit", batch.size), level.capacity]
    # A product with zeros and ones instead of a gather: it works in every layout, and places that
    # stay empty are zeros (Lepikhin et al., 2020).
    sent = mtf.einsum([x, dispatch], output_shape=mtf.Shape([*by_token, channels]))
    y, inner_loss = _second_level(
        mtf.reshape(sent, mtf.Shape([*by_expert, channels])),
        mtf.reshape(_importance_within(combine, by_token), mtf.Shape(by_expert)),
        output_dim, hparams, train, variable_dtype, layout, mesh_shape, num_microbatches,
    )  # fmt: skip
    y = mtf.reshape(y, mtf.Shape([*by_token, output_dim]))
    y = mtf.einsum([y, combine], output_shape=mtf.Shape([*groups, output_dim]))
    loss = (outer_loss + inner_loss) * hparam(hparams, "loss_coef")
    return mtf.reshape(y, mtf.Shape([*tokens, output_dim])), loss


def _second_level(
    inputs: mtf.Tensor,
    importance: mtf.Tensor,
    output_dim: mtf.Dimension,
    hparams: object,
    train: bool,
    variable_dtype: mtf.VariableDType,
    layout: Union[mtf.LayoutRules, str, None],
    mesh_shape: Union[mtf.Shape, str, None],
    num_microbatches: Optional[int],
) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Returns the outputs of the experts for their tokens, and the loss.

    Args:
      inputs: a Tensor with dimensions [expert_x, outer_batch, batch_unsplit, expert_capacity_x,
        d_model].
      importance: a Tensor with the same dimensions except the last.
      output_dim: a Dimension.
      hparams: an object with attributes such as moe_num_experts; see `HParams`.
      train: whether the model is being trained.
      variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
      layout: a LayoutRules or None.
      mesh_shape: a Shape or None.
      num_microbatches: an integer or None.
    """
    *places, channels = without_stages(inputs).dims
    expert_x, outer, group = _regrouped(places, hparams, layout, mesh_shape)
    num_experts = _numbers_of_experts(hparams)[1]
    factor = hparam(hparams, "capacity_factor_second_level")
    level = _Level.make("y", num_experts, capacity(group.size, num_experts, factor, hparams))
    x = mtf.reshape(inputs, mtf.Shape([expert_x, outer, group, channels]))
    dispatch, combine, loss = _top_2_gating(
        x, [expert_x], level.unsplit, level.capacity, hparams, train, variable_dtype,
        importance=mtf.reshape(importance, mtf.Shape([expert_x, outer, group])),
        name="inner_gating", num_microbatches=num_microbatches,
    )  # fmt: skip
    by_token = [level.unsplit, expert_x, outer, level.capacity]
    outer_unsplit = mtf.Dimension(outer.name + "_unsplit", outer.size)
    by_expert = [level.experts, expert_x, outer_unsplit, level.capacity]
    sent = mtf.einsum([x, dispatch], output_shape=mtf.Shape([*by_token, channels]))
    sent = mtf.reshape(sent, mtf.Shape([*by_expert, channels]))

    hidden_dim = mtf.Dimension("expert_hidden", hparam(hparams, "hidden_size"))
    expert_dims = [level.experts, expert_x]
    h = expert_hidden(sent, expert_dims, hidden_dim, hparams, train, variable_dtype, mtf.relu)
    y = layers.dense(
        h, output_dim, reduced_dims=[hidden_dim], expert_dims=expert_dims, use_bias=False,
        variable_dtype=variable_dtype, name="wo",
    )  # fmt: skip
    y = mtf.reshape(y, mtf.Shape([*by_token, output_dim]))
    y = mtf.einsum([y, combine], output_shape=mtf.Shape([expert_x, outer, group, output_dim]))
    return mtf.reshape(y, mtf.Shape([*places, output_dim])), loss


def _importance_within(combine: mtf.Tensor, dims: list[mtf.Dimension]) -> mtf.Tensor:
    """Returns 1.0 for tokens whose first choice is the group, 0.5 for second choices, else 0.0."""
    gate = mtf.reduce_sum(mtf.to_float(combine), output_shape=mtf.Shape(dims))
    # The two gates of a token have the sum 1, so only that of its first choice is above 0.5.
    first = mtf.to_float(mtf.greater(gate, 0.5))
    return 0.5 * (first + mtf.to_float(mtf.greater(gate, 0.0)))


def _regrouped(
    dims: list[mtf.Dimension],
    hparams: object,
    layout: Union[mtf.LayoutRules, str, None],
    mesh_shape: Union[mtf.Shape, str, None],
) -> list[mtf.Dimension]:
    """Returns [expert_x, outer_batch, group_size_y], the groups of the second level."""
    expert_x, outer, batch, capacity_dim = dims
    splits = 1
    if layout is not None and mesh_shape is not None:
        splits = mtf.tensor_dim_to_mesh_dim_size(layout, mesh_shape, outer)
    num_groups, group_size = _split_into_groups(
        outer.size * batch.size * capacity_dim.size, hparam(hparams, "group_size"), splits
    )
    return [
        expert_x,
        mtf.Dimension("outer_batch", num_groups),
        mtf.Dimension("group_size_y", group_size),
    ]


class MoE2D(TransformerLayer):
    """A two-level mixture of feed-forward experts; see `transformer_moe_layer_v2`.

    Variables are `outer_gating/kernel`, `inner_gating/kernel`, `wi/kernel` and `wo/kernel`.
    """

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

    def call(
        self, context: Context, x: mtf.Tensor, losses: Optional[list[mtf.Tensor]] = None
    ) -> mtf.Tensor:
        """Returns the output of the layer, and adds its loss to `context.losses`.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, d_model]; without `length` when decoding.
          losses: not used.

        Returns:
          A Tensor with the dimensions of `x`.

        Raises:
          NotImplementedError: the model is an ensemble.
        """
        del losses
        return call_moe("MoE2D", transformer_moe_layer_v2, self._hparams, context, x)
