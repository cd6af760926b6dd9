"""A mixture of experts with different widths and depths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import gin
import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.transformer import transformer
from mesh_tensorflow.transformer.moe._layer import (
    MixtureLayer,
    dispatched,
    expert_hidden,
    expert_output,
)
from mesh_tensorflow.transformer.moe._router import Mixture, hparams_of

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = [
    "HeterogeneousMoE1D",
    "generate_heterogeneous_expert_masks",
    "transformer_moe_layer_v1",
]


def _kinds_of_experts(mask_info: Sequence[Mapping[str, Any]], num_experts: int) -> list[int]:
    """Returns the kind of each expert, an index of `mask_info`; the last kind takes the rest."""
    kinds = []
    for i, info in enumerate(mask_info[:-1]):
        share = info["percent_number"]
        # From 1 on, whole numbers are numbers of experts, as in the classic.
        counts = share >= 1 and share == int(share)
        kinds += [i] * int(share if counts else share * num_experts)
    rest = num_experts - len(kinds)
    if rest < 0:
        raise ValueError(
            f"heterogeneous experts: percent_number of {list(mask_info)} asks for {len(kinds)} "
            f"experts, but there are {num_experts}; the fractions must add up to 1"
        )
    return kinds + [len(mask_info) - 1] * rest


def generate_heterogeneous_expert_masks(
    mask_info: Sequence[Mapping[str, Any]],
    num_experts: int,
    experts_dim: mtf.Dimension,
    mesh: mtf.Mesh,
    expert_width: int,
) -> mtf.Tensor:
    """Returns masks of the hidden units of each layer of each expert.

    Args:
      mask_info: a list of dictionaries, one for each kind of experts: "layers", their number of
        layers; "width", an integer, their number of hidden units divided by `expert_width`;
        "percent_number", their fraction of all experts; or from 1 on their number. As in the
        classic, fractions are rounded down, products like 0.29 * 100 too (28), and the last kind
        has the rest, whatever its own is.
      num_experts: an integer.
      experts_dim: a Dimension.
      mesh: a Mesh.
      expert_width: an integer. The number of hidden units is the largest width, so experts differ
        in width if this is 1.

    Returns:
      A float32 Tensor with dimensions [expert_hidden, num_expert_layers, experts].

    Raises:
      ValueError: the fractions sum to more than 1, or there are no kinds.
    """
    if not mask_info:
        raise ValueError(
            "heterogeneous experts: mask_info is empty; it needs a dictionary for each kind of "
            "experts"
        )
    widest = max(info["width"] for info in mask_info)
    deepest = max(info["layers"] for info in mask_info)
    # In a layer that an expert lacks all of its units are masked, so that the residual alone is
    # left.
    masks = np.zeros([widest, deepest, num_experts], np.float32)
    for expert, kind in enumerate(_kinds_of_experts(mask_info, num_experts)):
        width, depth = mask_info[kind]["width"] * expert_width, mask_info[kind]["layers"]
        # A slice ends at the widest kind: with a large expert_width all experts are alike, as in
        # the classic.
        masks[:width, :depth, expert] = 1.0
    shape = mtf.Shape(
        [
            mtf.Dimension("expert_hidden", widest),
            mtf.Dimension("num_expert_layers", deepest),
            experts_dim,
        ]
    )
    return mtf.import_tf_tensor(mesh, tf.constant(masks), shape)


def _hidden_dim_and_masks(
    inputs: mtf.Tensor, mixture: Mixture
) -> tuple[mtf.Dimension, list[Optional[mtf.Tensor]]]:
    """Returns the hidden Dimension, and per layer a mask of the experts' hidden units or None."""
    num_experts, hidden_size = mixture.hparam("num_experts"), mixture.hparam("hidden_size")
    mask_info = mixture.hparam("heterogeneous_mask_info")
    if mask_info is None:
        return mtf.Dimension("expert_hidden", hidden_size), [None] * mixture.hparam("num_layers")
    masks = generate_heterogeneous_expert_masks(
        mask_info,
        num_experts,
        mtf.Dimension("experts", num_experts),
        mesh=inputs.mesh,
        expert_width=hidden_size,
    )
    # From the masks: `hidden_size` is a factor of widths here, and the widest kind counts.
    hidden_dim, layers_dim, _ = masks.shape.dims
    return hidden_dim, [mtf.cast(m, inputs.dtype) for m in mtf.unstack(masks, layers_dim)]


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
    context: Context = None,  # type: ignore[assignment]
) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Applies a mixture of experts with different widths and depths.

    Like `moe.transformer_moe_layer_v1`; each layer except the first has a norm before it and a
    residual connection around it.

    Args are those of `moe.transformer_moe_layer_v1`, and:
      context: the Context of this call of the model: its mode, positions, states and losses.

    Returns:
      (a Tensor with dimensions [outer_batch (or not), batch, ..., output_dim], a scalar to add
      to the model's loss).

    Raises:
      ValueError: there are several layers, and `output_dim` is not the input dimension.
    """
    mixture = Mixture(hparams, train, variable_dtype, layout, mesh_shape, num_microbatches)
    hidden_dim, masks = _hidden_dim_and_masks(inputs, mixture)
    if len(masks) > 1 and output_dim != inputs.shape.dims[-1]:
        raise ValueError(
            f"heterogeneous experts: output_dim {output_dim} differs from the channels of "
            f"{inputs.shape}; it must not with {len(masks)} layers, as residual connections add "
            "one to the other"
        )

    def expert_layer(
        x: mtf.Tensor, experts_dim: mtf.Dimension, mask: Optional[mtf.Tensor]
    ) -> mtf.Tensor:
        h = expert_hidden(mixture, x, [experts_dim], hidden_dim, activation)
        # All experts have one shape: units that one of them lacks are computed and masked.
        h = h if mask is None else h * mask
        return expert_output(mixture, h, [experts_dim], hidden_dim, output_dim)

    def experts(x: mtf.Tensor, experts_dim: mtf.Dimension) -> mtf.Tensor:
        for i, mask in enumerate(masks):
            with tf.variable_scope(f"expert_layer_{i}"):
                # The stack has a norm right before the first layer already.
                if i == 0:
                    x = expert_layer(x, experts_dim, mask)
                else:
                    # One scale for all experts: the norm's variable has the channels alone.
                    y = transformer.sublayer_rms_norm(x, None, context)
                    x += expert_layer(y, experts_dim, mask)
        return x

    return dispatched(mixture, experts, inputs, nonpadding, token_embeddings)


@gin.configurable(module="mesh_tensorflow.transformer.heterogeneous_moe")
class HeterogeneousMoE1D(MixtureLayer):
    """A mixture of feed-forward experts with different widths and depths.

    Variables are `<gating>_gating/kernel` and, in `expert_layer_<i>`, `wi/kernel`, `wo/kernel`
    and from the second layer on `rms_norm/scale`.
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
        z_loss: Optional[float] = None,
        word_embed_mode: Optional[str] = None,
        use_second_place_expert_prob: Optional[float] = None,
        use_second_place_expert_prob_temp: Optional[float] = None,
        moe_num_layers: int = 1,
        heterogeneous_mask_info: Optional[Sequence[Mapping[str, Any]]] = None,
        top_n_num_experts_per_token: int = 3,
        balance_padding: bool = True,
    ) -> None:
        """Creates the layer.

        Args are those of `moe.MoE1D`, and:
          moe_num_layers: an integer, the number of layers of an expert without mask info.
          heterogeneous_mask_info: see `generate_heterogeneous_expert_masks`; None if all experts
            are alike.
        """
        # First of all, while the locals are the parameters and nothing else.
        self._hparams = hparams_of(locals())
        self._activation = activation

    def _options(self, context: Context) -> dict[str, Any]:
        return {
            "activation": self._activation,
            "token_embeddings": context.input_embeddings,
            "context": context,
        }
