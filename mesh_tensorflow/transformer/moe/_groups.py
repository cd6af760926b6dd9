"""Groups of tokens, each dispatched independently, so that processors need not synchronize."""

from __future__ import annotations

from typing import NamedTuple, Optional, Union

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.transformer.moe._hparams import hparam, hparam_by_mode

__all__ = ["Groups", "expert_capacity", "in_groups"]


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


def in_groups(
    tokens: mtf.Shape,
    hparams: object,
    layout: Union[mtf.LayoutRules, str, None],
    mesh_shape: Union[mtf.Shape, str, None],
    group_name: str = "group",
) -> Groups:
    """Returns the Groups of tokens.

    Args:
      tokens: a Shape, [outer_batch (or not), batch, ...].
      hparams: an object with attributes such as moe_num_experts; see `HParams`.
      layout: a LayoutRules or None.
      mesh_shape: a Shape or None; no group is split over processors.
      group_name: a string.
    """
    dims = list(tokens.dims)
    outer = dims.pop(0) if dims and dims[0].name == "outer_batch" else None
    if not dims:
        raise ValueError(
            f"mixture of experts: the input {tokens} needs a dimension of the batch before the "
            "channels"
        )
    splits = 1
    if layout is not None and mesh_shape is not None:
        splits = mtf.tensor_dim_to_mesh_dim_size(layout, mesh_shape, dims[0])
    num_groups, group_size = _split_into_groups(
        mtf.Shape(dims).size, hparam(hparams, "group_size"), splits
    )
    return Groups(
        outer or mtf.Dimension("outer_batch", 1),
        mtf.Dimension(dims[0].name, num_groups),
        mtf.Dimension(group_name, group_size),
    )


def expert_capacity(group_size: int, num_experts: int, hparams: object, train: bool) -> int:
    """Returns the capacity of an expert: how many tokens of a group it takes at most."""
    factor = hparam_by_mode(hparams, "capacity_factor", train)
    return capacity(group_size, num_experts, factor, hparams)


def capacity(group_size: int, num_experts: int, factor: float, hparams: object) -> int:
    """Returns an expert's even share of a group times a factor, and at least the minimum."""
    # Fedus et al. (2021), equation 3, with the tokens of a group in place of those of the batch.
    # The size is fixed in advance because shapes cannot depend on what the router chooses.
    share = min(group_size, int(group_size * factor / num_experts))
    return max(share, hparam(hparams, "min_expert_capacity"))
