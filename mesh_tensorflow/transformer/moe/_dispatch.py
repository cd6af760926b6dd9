"""Dispatches tokens to experts and combines their outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional, Union

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow._core.tensor import without_stages
from mesh_tensorflow.transformer.moe._gatings import gate
from mesh_tensorflow.transformer.moe._groups import expert_capacity, in_groups
from mesh_tensorflow.transformer.moe._hparams import hparam

__all__ = ["dispatched", "expert_hidden"]

# A function of the experts' inputs [outer_batch, experts, batch_unsplit, expert_capacity, d_model]
# and the Dimension of experts that returns their output, a Tensor or a list of Tensors.
Experts = Callable[[mtf.Tensor, mtf.Dimension], Any]


def _renamed(x: mtf.Tensor, dims: list[mtf.Dimension]) -> mtf.Tensor:
    """Renames the dimensions of `x`, which may change what the layout splits.

    In between, the channels are named `d_model_split`: with a layout that splits it, each processor
    sends only its part of the channels.
    """
    channels = mtf.Dimension("d_model_split", dims[-1].size)
    x = mtf.reshape(x, mtf.Shape([*dims[:-1], channels]))
    return mtf.reshape(x, mtf.Shape(dims))


def dispatched(
    experts: Experts,
    inputs: mtf.Tensor,
    hparams: object,
    train: bool,
    variable_dtype: mtf.VariableDType,
    layout: Union[mtf.LayoutRules, str, None],
    mesh_shape: Union[mtf.Shape, str, None],
    nonpadding: Union[mtf.Tensor, int, None],
    num_microbatches: Optional[int],
    token_embeddings: Optional[mtf.Tensor],
) -> tuple[Any, mtf.Tensor]:
    """Dispatches each token to some of the experts, and combines their outputs.

    Args:
      experts: a function, see `Experts`.
      inputs: a Tensor with dimensions [outer_batch (or not), batch, ..., d_model].
      hparams: an object with attributes such as moe_num_experts; see `HParams`.
      train: whether the model is being trained.
      variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
      layout: a LayoutRules or None.
      mesh_shape: a Shape or None.
      nonpadding: a Tensor with the dimensions of the inputs except the last, 0 at tokens that are
        not dispatched; any other value if there is no padding.
      num_microbatches: an integer or None.
      token_embeddings: a Tensor of the shape of the inputs, or None.

    Returns:
      (a Tensor, or a list of them as `experts` returns, with dimensions [outer_batch (or not),
      batch, ..., output]; the loss times its coefficient).
    """
    *tokens, channels = without_stages(inputs).dims
    groups = in_groups(mtf.Shape(tokens), hparams, layout, mesh_shape)
    num_experts = hparam(hparams, "num_experts")
    unsplit = mtf.Dimension("expert_unsplit", num_experts)
    experts_dim = mtf.Dimension("experts", num_experts)
    batch_unsplit = mtf.Dimension("batch_unsplit", groups.batch.size)
    capacity_dim = mtf.Dimension(
        "expert_capacity", expert_capacity(groups.group.size, num_experts, hparams, train)
    )
    x = groups.split(inputs, channels)
    embeddings = None
    if token_embeddings is not None and hparam(hparams, "word_embed_mode") is not None:
        embeddings = groups.split(token_embeddings, channels)
    dispatch, combine, loss = gate(
        hparams,
        x,
        [],
        unsplit,
        capacity_dim,
        train,
        variable_dtype,
        importance=groups.importance(nonpadding, mtf.Shape(tokens)),
        num_microbatches=num_microbatches,
        token_embeddings=embeddings,
    )
    # Between these two shapes a layout such as "batch:all,experts:all" needs an alltoall.
    by_token = [groups.outer_batch, unsplit, groups.batch, capacity_dim]
    by_expert = [groups.outer_batch, experts_dim, batch_unsplit, capacity_dim]
    # A product with zeros and ones instead of a gather: it works in every layout, and places that
    # stay empty are zeros (Lepikhin et al., 2020).
    sent = mtf.einsum([x, dispatch], output_shape=mtf.Shape([*by_token, channels]))
    computed = experts(_renamed(sent, [*by_expert, channels]), experts_dim)

    def back(y: mtf.Tensor) -> mtf.Tensor:
        output = y.shape.dims[-1]
        y = _renamed(y, [*by_token, output])
        y = mtf.einsum([y, combine], output_shape=mtf.Shape([*groups, output]))
        return mtf.reshape(y, mtf.Shape([*tokens, output]))

    outputs = [back(y) for y in computed] if isinstance(computed, list) else back(computed)
    return outputs, loss * hparam(hparams, "loss_coef")


def expert_hidden(
    x: mtf.Tensor,
    expert_dims: list[mtf.Dimension],
    hidden_dim: mtf.Dimension,
    hparams: object,
    train: bool,
    variable_dtype: mtf.VariableDType,
    activation: Union[Callable, str, list, None],
) -> mtf.Tensor:
    """Returns the hidden units of each expert's feed-forward layer.

    Args:
      x: a Tensor with dimensions [..., d_model].
      expert_dims: a list of Dimensions.
      hidden_dim: a Dimension.
      hparams: an object with attributes such as moe_num_experts; see `HParams`.
      train: whether the model is being trained.
      variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
      activation: as for `mtf.layers.dense_product`.
    """
    h = layers.dense_product(
        x,
        reduced_dims=x.shape.dims[-1:],
        new_dims=hidden_dim,
        expert_dims=expert_dims,
        activation_functions=activation,
        use_bias=False,
        variable_dtype=variable_dtype,
        name="wi",
    )
    rate = hparam(hparams, "dropout_rate")
    return mtf.dropout(h, train, rate=rate) if rate else h
