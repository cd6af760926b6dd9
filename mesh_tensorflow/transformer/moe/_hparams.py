"""Hyperparameters of mixtures of experts, as attributes of an object, and their defaults.

Functions take any object with such attributes, since Tensor2Tensor's were passed to them.
"""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["HParams", "hparam", "hparam_by_mode", "set_default_moe_hparams"]

# Hyperparameters that objects made for earlier releases lack, with their defaults.
_LATER = {
    "loss_coef": 0.01,
    "min_expert_capacity": 4,
    "dropout_rate": 0.0,
    "switch_policy_train": "input_jitter",
    "switch_policy_eval": "input_jitter",
    "switch_dropout": 0.1,
    "switch_temperature": 1.0,
    "switch_jitter": 0.01,
    "ntlb_top_k": 4,
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

_OF_TENSOR2TENSOR: dict[str, Any] = {"num_experts": 16, "loss_coef": 0.01}

_DEFAULTS: dict[str, Any] = {
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
    for name, value in _OF_TENSOR2TENSOR.items():
        setattr(hparams, f"moe_{name}", value)
    for name, value in _DEFAULTS.items():
        hparams.add_hparam(f"moe_{name}", value)


def hparam(hparams: object, name: str) -> Any:
    """Returns `hparams.moe_<name>`, or its default if an earlier release had no such field.

    Raises:
      ValueError: there is no such field and no default.
    """
    if hasattr(hparams, f"moe_{name}"):
        return getattr(hparams, f"moe_{name}")
    if name not in _LATER:
        raise ValueError(
            f"mixture of experts: the hyperparameters have no moe_{name}; set it, for example "
            f"with hparams.add_hparam('moe_{name}', ...)"
        )
    return _LATER[name]


def hparam_by_mode(hparams: object, name: str, train: bool) -> Any:
    """Returns `hparams.moe_<name>_train` or `hparams.moe_<name>_eval`."""
    return hparam(hparams, f"{name}_{'train' if train else 'eval'}")
