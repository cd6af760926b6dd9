"""The arguments of `utils.run` as a data class."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

from mesh_tensorflow.transformer.utils._data.batching import Lengths
from mesh_tensorflow.transformer.utils._training.checkpoints import Steps

__all__ = ["RunArguments"]


@dataclasses.dataclass(frozen=True)
class RunArguments:
    """The arguments of `run`, see there; an integer length applies to inputs and targets."""

    tpu_job_name: Optional[str]
    tpu: Optional[str]
    gcp_project: Optional[str]
    tpu_zone: Optional[str]
    model_dir: str
    model_type: str
    vocabulary: Any
    train_dataset_fn: Optional[Callable[..., Any]]
    eval_dataset_fn: Optional[Callable[..., Any]]
    dataset_split: str
    autostack: bool
    eval_checkpoint_step: Steps
    export_checkpoint_step: Optional[int]
    export_path: str
    mode: str
    iterations_per_loop: int
    save_checkpoints_steps: int
    keep_checkpoint_max: Optional[int]
    eval_summary_dir: Optional[str]
    batch_size: Any
    train_steps: Union[int, Callable[..., int]]
    total_run_steps: Optional[int]
    sequence_length: Lengths
    mesh_shape: Any
    mesh_devices: Optional[Sequence[str]]
    layout_rules: Any
    learning_rate_schedule: Any
    optimizer: Any
    predict_fn: Optional[Callable[..., Any]]
    variable_filter: Any
    perplexity_eval_steps: int
    init_checkpoint: Optional[str]
    ensemble_inputs: Optional[int]
    train_model_fn: Callable[..., None]
    skip_seen_data: bool
    seen_data_init_step: int
    output_eval_examples: bool
    checkpoint_input_pipeline: bool
    eval_dir_suffix: Optional[str]
    mesh_impl: Optional[str]

    def __post_init__(self) -> None:
        if isinstance(self.sequence_length, int):
            both = {"inputs": self.sequence_length, "targets": self.sequence_length}
            object.__setattr__(self, "sequence_length", both)
