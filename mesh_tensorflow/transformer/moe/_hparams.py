"""Hyperparameters of mixtures of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Optional, Protocol, Union

import mesh_tensorflow.ops_with_redefined_builtins as mtf

# What `set_default_moe_hparams` sets. All but the coefficient of the loss have to be
# set: what lacks them was not made for a mixture of experts.
_BASIC: dict[str, Any] = {
    "num_experts": 16,
    "loss_coef": 0.01,
    "gating": "top_2",
    "capacity_factor_train": 1.25,
    "capacity_factor_eval": 2.0,
    "capacity_factor_second_level": 1.0,
    "hidden_size": 4096,
    "group_size": 1024,
    "use_second_place_loss": 0,
    "second_policy_train": "random",
    "second_policy_eval": "random",
    "second_threshold_train": 0.2,
    "second_threshold_eval": 0.2,
}
_OF_TENSOR2TENSOR = ("num_experts", "loss_coef")

# Hyperparameters that objects made for earlier releases lack.
_LATER: dict[str, Any] = {
    "min_expert_capacity": 4,
    "dropout_rate": 0.0,
    "switch_policy_train": "input_jitter",
    "switch_policy_eval": "input_jitter",
    "switch_dropout": 0.1,
    "switch_temperature": 1.0,
    "switch_jitter": 0.01,
    "ntlb_top_k": 4,
    "output_dim": None,
    "top_n_num_experts_per_token": 3,
    "use_experts_attention": False,
    "z_loss": None,
    "balance_padding": True,
    "word_embed_mode": None,
    "use_second_place_expert_prob": None,
    "use_second_place_expert_prob_temp": None,
    "num_layers": 1,
    "heterogeneous_mask_info": None,
}

# All hyperparameters, without the prefix moe_ of their attributes.
DEFAULTS = {**_BASIC, **_LATER}
_FALLBACKS = {"loss_coef": _BASIC["loss_coef"], **_LATER}


class HParams:
    """Hyperparameters as attributes, such as `moe_num_experts`.

    Any other object with these attributes works too, such as Tensor2Tensor's.
    """

    def __init__(self, **kwargs: object) -> None:
        for k, v in kwargs.items():
            self.add_hparam(k, v)

    def add_hparam(self, k: str, v: object) -> None:
        """Sets the attribute `k`."""
        setattr(self, k, v)


class _Extensible(Protocol):
    """Hyperparameters that can be added to, such as `HParams` and Tensor2Tensor's."""

    def add_hparam(self, k: str, v: object, /) -> None:
        """Sets the attribute `k`."""


def set_default_moe_hparams(hparams: _Extensible) -> None:
    """Adds the hyperparameters of a mixture of experts to Tensor2Tensor's.

    Args:
      hparams: an object with `add_hparam(name, value)`. Tensor2Tensor's basic hyperparameters have
        `moe_num_experts` and `moe_loss_coef` already: these two are overwritten.
    """
    for name, value in _BASIC.items():
        if name in _OF_TENSOR2TENSOR:
            setattr(hparams, f"moe_{name}", value)
        else:
            hparams.add_hparam(f"moe_{name}", value)


def hparams_of(arguments: Mapping[str, Any], **others: object) -> HParams:
    """Returns the hyperparameters among the arguments of a layer's constructor, and others.

    Args:
      arguments: a dictionary by names of arguments, which may have the prefix moe_; it may have
        arguments that are no hyperparameters.
      **others: further hyperparameters by names without prefix.
    """
    plain = {name.removeprefix("moe_"): value for name, value in arguments.items()}
    chosen = {name: value for name, value in {**plain, **others}.items() if name in DEFAULTS}
    return HParams(**{f"moe_{name}": value for name, value in chosen.items()})


@dataclasses.dataclass(frozen=True)
class Mixture:
    """What all parts of a mixture of experts take into account.

    Attributes:
      hparams: an object with attributes such as moe_num_experts; see `HParams`.
      train: whether the model is being trained.
      variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
      layout: a LayoutRules or None.
      mesh_shape: a Shape or None; no group of tokens is split over processors.
      num_microbatches: an integer that losses are divided by, or None.
    """

    hparams: object
    train: bool
    variable_dtype: mtf.VariableDType
    layout: Union[mtf.LayoutRules, str, None] = None
    mesh_shape: Union[mtf.Shape, str, None] = None
    num_microbatches: Optional[int] = None

    def hparam(self, name: str) -> Any:
        """Returns `hparams.moe_<name>`, or its default if an earlier release had no such field.

        Raises:
          ValueError: there is no such field and no default.
        """
        if hasattr(self.hparams, f"moe_{name}"):
            return getattr(self.hparams, f"moe_{name}")
        if name not in _FALLBACKS:
            raise ValueError(
                f"mixture of experts: the hyperparameters have no moe_{name}; set it, for example "
                f"with hparams.add_hparam('moe_{name}', ...)"
            )
        return _FALLBACKS[name]

    def of_mode(self, name: str) -> Any:
        """Returns `hparams.moe_<name>_train` or `hparams.moe_<name>_eval`."""
        return self.hparam(f"{name}_{'train' if self.train else 'eval'}")

    def slices(self, dim: mtf.Dimension) -> int:
        """Returns the number of slices of a dimension; 1 without layout and mesh."""
        if self.layout is None or self.mesh_shape is None:
            return 1
        return mtf.tensor_dim_to_mesh_dim_size(self.layout, self.mesh_shape, dim)
