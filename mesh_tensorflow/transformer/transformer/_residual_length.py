"""The length of the residual stream, under a name of its own.

Megatron's sequence parallelism (Korthikanti et al., "Reducing activation recomputation in large
transformer models", 2022) splits by position what tensor parallelism repeats on each processor:
residuals, normalization and dropout between layers. A tensor cannot have its length split where
layers need it whole, so the stream has the name `residual_length`, which a rule of its own splits.
"""

from __future__ import annotations

import mesh_tensorflow.ops_with_redefined_builtins as mtf

__all__ = ["RESIDUAL_LENGTH", "has_residual_length", "to_length", "to_residual_length"]

RESIDUAL_LENGTH = "residual_length"


def has_residual_length(x: mtf.Tensor) -> bool:
    """Returns whether `x` is a residual stream under the name of its own."""
    return RESIDUAL_LENGTH in x.shape.dimension_names


def to_length(x: mtf.Tensor, length_name: str) -> mtf.Tensor:
    """Gives positions the name that layers know; gathers them if `residual_length` is split."""
    if not has_residual_length(x):
        return x
    return mtf.rename_dimension(x, RESIDUAL_LENGTH, length_name)


def to_residual_length(x: mtf.Tensor, length_name: str) -> mtf.Tensor:
    """Gives positions the name of the residual stream; a partial sum is reduce-scattered.

    Steps of decoding, which have no length, stay as they are.
    """
    if length_name not in x.shape.dimension_names:
        return x
    return mtf.rename_dimension(x, length_name, RESIDUAL_LENGTH)
