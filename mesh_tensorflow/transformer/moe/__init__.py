"""Mixtures of experts: layers of which each token uses only some parts."""

from mesh_tensorflow._replaced import replaceable
from mesh_tensorflow.transformer.moe._layer import (
    MoE1D,
    MoE2D,
    _split_into_groups,
    transformer_moe_layer_v1,
    transformer_moe_layer_v2,
)
from mesh_tensorflow.transformer.moe._router import (
    HParams,
    Routing,
    _expert_selection_gating,
    _ntlb_gating,
    _switch_gating,
    _switch_max_gating,
    _top_2_gating,
    _top_n_gating,
    set_default_moe_hparams,
)

__all__ = [
    "HParams",
    "MoE1D",
    "MoE2D",
    "Routing",
    "_expert_selection_gating",
    "_ntlb_gating",
    "_split_into_groups",
    "_switch_gating",
    "_switch_max_gating",
    "_top_2_gating",
    "_top_n_gating",
    "set_default_moe_hparams",
    "transformer_moe_layer_v1",
    "transformer_moe_layer_v2",
]

replaceable(__name__)
