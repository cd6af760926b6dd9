"""The settings of a model function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Optional

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.transformer.utils._data.batching import (
    Lengths,
    inputs_length,
    length_of_feature,
)
from mesh_tensorflow.transformer.utils._data.features import BatchDims

__all__ = ["Settings"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `tpu_estimator_model_fn`; see there."""

    model_type: str
    model: Any
    vocabulary: Any
    model_dir: Optional[str]
    mesh_shape: mtf.Shape
    layout_rules: mtf.LayoutRules
    batch_size: int
    sequence_length: Lengths
    autostack: bool
    keep_checkpoint_max: Optional[int]
    save_checkpoints_steps: Optional[int]
    learning_rate_schedule: Any
    optimizer: Any
    outer_batch_size: int
    predict_fn: Optional[Callable[..., mtf.Tensor]]
    scoring: bool
    variable_filter: Any
    init_checkpoint: Optional[str]
    init_variable_filter: str
    init_checkpoint_strict: bool
    ensemble_inputs: Optional[int]
    mesh_devices: Any
    model_info_file: Optional[str]
    mesh_impl: str
    tpu_summaries: bool
    hierarchical_tiling_spec: Any
    # The RunConfig of the estimator that calls the model function, if it passes one.
    config: Any = None
    # The ReplicaContext, if the model function is called inside the program of a TPUEstimator.
    context: Any = None

    def batch_dims(self, training: bool = True) -> BatchDims:
        """Returns the dimensions of a batch; prediction has no outer_batch."""
        ensemble = self.ensemble_inputs if training else None
        outer = self.outer_batch_size if training else 1
        batch, rest = divmod(self.batch_size, outer)
        if rest:
            raise ValueError(
                f"tpu_estimator_model_fn: batch_size={self.batch_size} is not divisible by "
                f"outer_batch_size={outer}"
            )
        return BatchDims(
            mtf.Dimension("ensemble", ensemble) if ensemble else None,
            mtf.Dimension("outer_batch", outer) if training else None,
            mtf.Dimension("batch", batch),
        )

    @property
    def joined_length(self) -> int:
        """The length of inputs followed by targets."""
        lengths = self.sequence_length
        if isinstance(lengths, Mapping) and "inputs" not in lengths:
            return length_of_feature(lengths, "targets")
        return inputs_length(lengths) + length_of_feature(lengths, "targets")
