"""Splits tokens into groups, dispatches them to experts, and combines the outputs.

Each group is dispatched independently, so that processors need not synchronize.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Optional, Union

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow._core.tensor import without_stages
from mesh_tensorflow.transformer.moe._gatings import gate
from mesh_tensorflow.transformer.moe._hparams import Mixture
from mesh_tensorflow.transformer.moe._router import Router

# A function of the experts' inputs [outer_batch, experts, batch_unsplit, expert_capacity, d_model]
# and the Dimension of experts that returns their output, a Tensor or a list of Tensors.
Experts = Callable[[mtf.Tensor, mtf.Dimension], Any]


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
    outer = dims.pop(0) if dims and dims[0].name == "outer_batch" else None
    if not dims:
        raise ValueError(
            f"mixture of experts: the input {tokens} needs a dimension of the batch before the "
            "channels"
        )
    num_groups, group_size = _split_into_groups(
        mtf.Shape(dims).size, mixture.hparam("group_size"), mixture.slices(dims[0])
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
    return mtf.dropout(h, mixture.train, rate=rate) if rate else h
