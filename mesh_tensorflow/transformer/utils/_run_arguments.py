"""The arguments of `utils.run` as a data class."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

from mesh_tensorflow._core.errors import WrongTypeError
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
        _check_kinds(self)
        if isinstance(self.sequence_length, int):
            both = {"inputs": self.sequence_length, "targets": self.sequence_length}
            object.__setattr__(self, "sequence_length", both)


def _is_batch_size(value: object) -> bool:
    pair = isinstance(value, tuple) and [type(part) for part in value] == [str, int]
    return pair or isinstance(value, int)


# What gin may have bound: arguments, whether a value is right, and what it should be.
_KINDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("train_steps", lambda v: callable(v) or isinstance(v, int), "a number of steps"),
    ("batch_size", _is_batch_size, 'a number or a pair such as ("tokens_per_batch", 4096)'),
    (
        "optimizer",
        lambda v: v is None or callable(v),
        "a class such as @optimize.AdafactorOptimizer, with @ and without ()",
    ),
    (
        "train_dataset_fn",
        lambda v: v is None or callable(v),
        "a function such as @training_data, with @ and without ()",
    ),
    (
        "eval_dataset_fn",
        lambda v: v is None or callable(v),
        "a function such as @evaluation_data, with @ and without ()",
    ),
)


def _check_kinds(given: RunArguments) -> None:
    """Checks arguments of which gin files often bind something else.

    Args:
      given: the arguments of `utils.run`.

    Raises:
      WrongTypeError: an argument is of another kind.
    """
    for name, is_right, words in _KINDS:
        value = getattr(given, name)
        if not is_right(value):
            raise WrongTypeError(f"utils.run: {name} is {value!r}; it should be {words}")
