"""The table of gatings: which function `moe_gating="top_2"`, "switch", ... stands for.

A gating decides which tokens go to which experts, and with what weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.transformer.moe._expert_selection import _expert_selection_gating
from mesh_tensorflow.transformer.moe._hparams import hparam
from mesh_tensorflow.transformer.moe._ntlb import _ntlb_gating
from mesh_tensorflow.transformer.moe._switch import _switch_gating, _switch_max_gating
from mesh_tensorflow.transformer.moe._top_n import _top_2_gating, _top_n_gating

__all__ = ["GATINGS", "gate"]


def _of_whole_group(
    inputs: mtf.Tensor,
    outer: Sequence[mtf.Dimension],
    experts: mtf.Dimension,
    *args: Any,
    **kwargs: Any,
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
    group_dim = inputs.shape.dims[-2]
    return _expert_selection_gating(inputs, outer, experts, group_dim, *args, **kwargs)


GATINGS: dict[str, Callable] = {
    "top_2": _top_2_gating,
    "top_n": _top_n_gating,
    "switch": _switch_gating,
    "ntlb": _ntlb_gating,
    "switch_max": _switch_max_gating,
    "expert_selection": _of_whole_group,
}


def gate(hparams: object, *args: Any, **kwargs: Any) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
    """Returns the dispatch and combine tensors of the gating `hparams.moe_gating`.

    Raises:
      ValueError: the gating is unknown.
    """
    name = hparam(hparams, "gating")
    if name not in GATINGS:
        raise ValueError(f"unknown hparams.moe_gating={name}: it is none of {', '.join(GATINGS)}")
    inputs, outer, experts, capacity_dim, *rest = args
    return GATINGS[name](inputs, outer, experts, capacity_dim, hparams, *rest, **kwargs)
