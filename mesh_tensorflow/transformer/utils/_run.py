"""`run`: training, evaluation, decoding, scoring and export, by mode; and its arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Optional, TypedDict, Union

import gin

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import estimator as mtf_estimator
from mesh_tensorflow._core.errors import WrongTypeError
from mesh_tensorflow.estimator.processes import shards_of_process
from mesh_tensorflow.transformer.utils._checkpoints import Steps, get_checkpoint_iterator
from mesh_tensorflow.transformer.utils._decode import infer_model
from mesh_tensorflow.transformer.utils._estimator import get_estimator
from mesh_tensorflow.transformer.utils._evaluation import eval_model, perplexity_eval
from mesh_tensorflow.transformer.utils._prediction import export_model
from mesh_tensorflow.transformer.utils._score import score_from_dataset, score_from_strings
from mesh_tensorflow.transformer.utils._settings import (
    MODULE,
    Lengths,
    auto_train_steps,
    compute_batch_size,
)
from mesh_tensorflow.transformer.utils._training import train_model, with_total_steps

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.dataset._features import Vocabularies
    from mesh_tensorflow.transformer.utils._program import Filter


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
            # Plain assignment raises an error, as the dataclass is frozen.
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


class _Common(TypedDict):
    """The arguments that every mode passes on."""

    estimator: mtf_estimator.tpu.TPUEstimator
    vocabulary: Any
    sequence_length: Lengths
    batch_size: int


@dataclasses.dataclass(frozen=True)
class _Run:
    """The state that the modes of `run` share.

    Attributes:
      given: the arguments of `run`.
      estimator: a TPUEstimator.
      batch_size: the number of sequences in a batch.
      train_steps: the step to train to.
    """

    given: RunArguments
    estimator: mtf_estimator.tpu.TPUEstimator
    batch_size: int
    train_steps: int

    @property
    def common(self) -> _Common:
        """The arguments that the functions of all modes take."""
        return {
            "estimator": self.estimator,
            "vocabulary": self.given.vocabulary,
            "sequence_length": self.given.sequence_length,
            "batch_size": self.batch_size,
        }


def _train(run: _Run) -> None:
    given = run.given
    given.train_model_fn(
        **run.common,
        train_dataset_fn=given.train_dataset_fn,
        train_steps=run.train_steps,
        ensemble_inputs=given.ensemble_inputs,
        dataset_split=given.dataset_split,
        skip_seen_data=given.skip_seen_data,
        seen_data_init_step=given.seen_data_init_step,
        checkpoint_input_pipeline=given.checkpoint_input_pipeline,
    )


def _eval(run: _Run, eval_with_score: bool = False) -> None:
    given = run.given
    eval_model(
        **run.common,
        dataset_split=given.dataset_split,
        model_dir=given.model_dir,
        eval_dataset_fn=given.eval_dataset_fn,  # type: ignore[arg-type]
        eval_summary_dir=given.eval_summary_dir,
        eval_checkpoint_step=given.eval_checkpoint_step,
        eval_with_score=eval_with_score,
        output_eval_examples=given.output_eval_examples,
        eval_dir_suffix=given.eval_dir_suffix,
    )


def _perplexity_eval(run: _Run) -> None:
    given = run.given
    perplexity_eval(
        **run.common,
        dataset_split=given.dataset_split,
        model_dir=given.model_dir,
        eval_dataset_fn=given.eval_dataset_fn,  # type: ignore[arg-type]
        eval_checkpoint_step=given.eval_checkpoint_step,
        steps=given.perplexity_eval_steps,
        eval_dir_suffix=given.eval_dir_suffix,
    )


def _infer(run: _Run) -> None:
    given = run.given
    infer_model(
        **run.common,
        model_type=given.model_type,
        model_dir=given.model_dir,
        eval_checkpoint_step=given.eval_checkpoint_step,
    )


def _score_from_dataset(run: _Run) -> Any:
    given = run.given
    return score_from_dataset(
        **run.common,
        model_dir=given.model_dir,
        eval_checkpoint_step=given.eval_checkpoint_step,
        dataset_split=given.dataset_split,
    )


def _score_from_strings(run: _Run) -> Any:
    given = run.given
    return score_from_strings(
        **run.common,
        model_type=given.model_type,
        model_dir=given.model_dir,
        eval_checkpoint_step=given.eval_checkpoint_step,
    )


def _export(run: _Run, eval_with_score: bool = False) -> list[bytes]:
    given = run.given
    step = given.export_checkpoint_step
    paths = get_checkpoint_iterator(-1 if step is None else step, given.model_dir)
    return [
        export_model(
            **run.common,
            export_dir=given.export_path or given.model_dir,
            checkpoint_path=path,
            eval_with_score=eval_with_score,
            model_type=given.model_type,
        )
        for path in paths
    ]


# By mode: the function to call, and whether prediction computes scores.
_MODES: dict[str, tuple[Callable[[_Run], Any], bool]] = {
    "train": (_train, False),
    "eval": (_eval, False),
    "score_eval": (lambda run: _eval(run, eval_with_score=True), True),
    "perplexity_eval": (_perplexity_eval, False),
    "infer": (_infer, False),
    "score_from_dataset": (_score_from_dataset, True),
    "score_from_strings": (_score_from_strings, True),
    "export_score": (lambda run: _export(run, eval_with_score=True), True),
    "export_infer": (_export, False),
    "export": (_export, False),
}


def _prepared(given: RunArguments) -> _Run:
    """Returns the estimator and sizes of a mode, derived from the arguments of `run`."""
    mesh_shape = mtf.convert_to_shape(given.mesh_shape)
    assert mesh_shape is not None
    if given.mode.startswith("export"):
        # An exported model must not need as many devices as the mesh here has processors.
        here = [""] * mesh_shape.size
        given = dataclasses.replace(given, mesh_impl="placement", mesh_devices=here)
    lengths = given.sequence_length
    layout_rules = mtf.convert_to_layout_rules(given.layout_rules)
    batch_size = compute_batch_size(lengths, mesh_shape, layout_rules, given.batch_size)
    steps = given.train_steps
    steps = steps(batch_size, lengths) if callable(steps) else steps
    estimator = get_estimator(
        model_type=given.model_type,
        vocabulary=given.vocabulary,
        mesh_shape=mesh_shape,
        layout_rules=layout_rules,
        model_dir=given.model_dir,
        batch_size=batch_size,
        sequence_length=lengths,
        autostack=given.autostack,
        learning_rate_schedule=with_total_steps(
            given.learning_rate_schedule, given.total_run_steps or steps
        ),
        keep_checkpoint_max=given.keep_checkpoint_max,
        save_checkpoints_steps=given.save_checkpoints_steps,
        optimizer=given.optimizer,
        predict_fn=given.predict_fn,
        variable_filter=given.variable_filter,
        ensemble_inputs=given.ensemble_inputs,
        use_tpu=None,
        tpu_job_name=given.tpu_job_name,
        iterations_per_loop=given.iterations_per_loop,
        cluster=None,
        init_checkpoint=given.init_checkpoint,
        mesh_devices=given.mesh_devices,
        score_in_predict_mode=_MODES[given.mode][1],
        mesh_impl=given.mesh_impl,
    )
    return _Run(given, estimator, batch_size, steps)


def _check(given: RunArguments) -> None:
    mode = given.mode
    if given.tpu:
        raise RuntimeError(
            f"utils.run: tpu={given.tpu!r}, but estimators run on CPUs and GPUs: leave out "
            "--tpu. Bind utils.run.mesh_shape, and perhaps utils.run.mesh_devices, to say what the "
            "model is split over; utils.run.mesh_impl = 'pjrt' runs on TPUs that JAX finds"
        )
    if mode not in _MODES:
        raise ValueError(
            f"utils.run: unknown mode {mode!r} - must be one of {', '.join(map(repr, _MODES))}"
        )
    if mode == "train" and given.dataset_split != "train":
        raise ValueError(
            f"utils.run: mode 'train' with dataset_split {given.dataset_split!r}: training "
            "is on the split 'train'; for another one call utils.train_model"
        )
    needed = {"vocabulary": given.vocabulary, "sequence_length": given.sequence_length}
    for name, value in needed.items():
        if value is None:
            raise ValueError(
                f"utils.run: {name} is None: bind utils.run.{name}, in a gin file or by "
                f"--gin_param='utils.run.{name} = ...'"
            )


def _run_in_chief(run: _Run, main: Callable[[_Run], Any]) -> Any:
    """Runs a mode, in the chief if there are several processes; an evaluator runs alone."""
    config = run.estimator.config
    if config.task_type == "evaluator":
        return main(run)
    if run.given.mesh_devices is None:
        shards_of_process(config)  # otherwise only the chief would find that they are not divisible
    return mtf_estimator.run_cluster(lambda: main(run), config)


@gin.configurable(module=MODULE)
def run(
    tpu_job_name: Optional[str],
    tpu: Optional[str],
    gcp_project: Optional[str],
    tpu_zone: Optional[str],
    model_dir: str,
    model_type: str = "bitransformer",
    vocabulary: Optional[Vocabularies] = None,
    train_dataset_fn: Optional[Callable[..., Any]] = None,
    eval_dataset_fn: Optional[Callable[..., Any]] = None,
    dataset_split: str = "train",
    autostack: bool = True,
    eval_checkpoint_step: Steps = None,
    export_checkpoint_step: Optional[int] = None,
    export_path: str = "",
    mode: str = "train",
    iterations_per_loop: int = 100,
    save_checkpoints_steps: int = 5000,
    keep_checkpoint_max: Optional[int] = None,
    eval_summary_dir: Optional[str] = None,
    batch_size: Union[int, tuple[str, int]] = ("tokens_per_replica", 2048),
    train_steps: Union[int, Callable[..., int]] = auto_train_steps,
    total_run_steps: Optional[int] = None,
    sequence_length: Lengths = None,  # type: ignore[assignment]  # needed, as gin binds it
    mesh_shape: Union[mtf.Shape, str] = gin.REQUIRED,
    mesh_devices: Optional[Sequence[str]] = None,
    layout_rules: Union[mtf.LayoutRules, str] = gin.REQUIRED,
    learning_rate_schedule: Any = None,
    optimizer: Any = None,
    predict_fn: Optional[Callable[..., Any]] = None,
    variable_filter: Filter = None,
    perplexity_eval_steps: int = 100,
    init_checkpoint: Optional[str] = None,
    ensemble_inputs: Optional[int] = None,
    train_model_fn: Callable[..., None] = train_model,
    skip_seen_data: bool = False,
    seen_data_init_step: int = 0,
    output_eval_examples: bool = True,
    checkpoint_input_pipeline: bool = False,
    eval_dir_suffix: Optional[str] = None,
    mesh_impl: Optional[str] = None,
) -> Any:
    """Trains, evaluates, decodes, scores or exports, by mode; gin binds the arguments.

    With several processes, as TF_CONFIG describes, the chief runs the mode, and the others lend it
    their devices: by default each has the same number of processors of the mesh.

    Args:
      tpu_job_name: for TPUs only.
      tpu: None or "": estimators run on CPUs and GPUs.
      gcp_project: for TPUs only.
      tpu_zone: for TPUs only.
      model_dir: the directory of checkpoints.
      model_type: such as "lm"; see `build_model`.
      vocabulary: a Vocabulary, or a pair of them, of inputs and of targets.
      train_dataset_fn: the data to train on; see `train_model`.
      eval_dataset_fn: the data to evaluate on; see `eval_model`.
      dataset_split: such as "train".
      autostack: whether to stack small variables that are alike.
      eval_checkpoint_step: which checkpoints to evaluate; see `get_checkpoint_iterator`.
      export_checkpoint_step: which checkpoint to export; the latest if None.
      export_path: the directory to write to; `model_dir` if empty.
      mode: "train", "eval", "score_eval", "perplexity_eval", "infer", "score_from_dataset",
        "score_from_strings", "export_score", "export_infer" or "export".
      iterations_per_loop: for TPUs only.
      save_checkpoints_steps: the number of steps between checkpoints.
      keep_checkpoint_max: how many checkpoints to keep; all if None.
      eval_summary_dir: where evaluation writes; a subdirectory of `model_dir` if None.
      batch_size: a number of sequences or a pair; see `compute_batch_size`.
      train_steps: the step to train to; or a function of the batch size and `sequence_length`.
      total_run_steps: the step at which learning rate schedules end; `train_steps` if None.
      sequence_length: an integer, or a dictionary such as {"inputs": 512, "targets": 128}.
      mesh_shape: the mesh.
      mesh_devices: a device for each processor of the mesh.
      layout_rules: the layout.
      learning_rate_schedule: a function of (step, total_train_steps), a list of factors, a number,
        or None for the optimizer's own.
      optimizer: an optimizer class, called with the learning rate; required for training.
      predict_fn: a function to decode with instead; see `tpu_estimator_model_fn`.
      variable_filter: which variables are trained; see `tpu_estimator_model_fn`.
      perplexity_eval_steps: the number of batches that "perplexity_eval" takes from each data set.
      init_checkpoint: a checkpoint to initialize variables from.
      ensemble_inputs: the number of ensemble members, if each gets different inputs in training.
      train_model_fn: the function that trains.
      skip_seen_data: whether resumed training skips the data that it has seen.
      seen_data_init_step: the step at which that training began.
      output_eval_examples: whether evaluation writes text files of examples.
      checkpoint_input_pipeline: whether to save the state of the input pipeline with checkpoints.
      eval_dir_suffix: a suffix of the names of evaluation directories.
      mesh_impl: "placement", "simd" or "pjrt"; see `tpu_estimator_model_fn`.

    Returns:
      What the mode returns: scores as `score_postprocess_fn` returns them, the directories of
      exported models, or None; None in processes that are not the chief.

    Raises:
      ValueError: the mode is unknown, an argument that it needs is missing, or the processors are
        not divisible by the processes.
      PeerLostError: another process has failed or was never started.
      RuntimeError: a TPU is named.
    """
    given = RunArguments(
        tpu_job_name=tpu_job_name,
        tpu=tpu,
        gcp_project=gcp_project,
        tpu_zone=tpu_zone,
        model_dir=model_dir,
        model_type=model_type,
        vocabulary=vocabulary,
        train_dataset_fn=train_dataset_fn,
        eval_dataset_fn=eval_dataset_fn,
        dataset_split=dataset_split,
        autostack=autostack,
        eval_checkpoint_step=eval_checkpoint_step,
        export_checkpoint_step=export_checkpoint_step,
        export_path=export_path,
        mode=mode,
        iterations_per_loop=iterations_per_loop,
        save_checkpoints_steps=save_checkpoints_steps,
        keep_checkpoint_max=keep_checkpoint_max,
        eval_summary_dir=eval_summary_dir,
        batch_size=batch_size,
        train_steps=train_steps,
        total_run_steps=total_run_steps,
        sequence_length=sequence_length,
        mesh_shape=mesh_shape,
        mesh_devices=mesh_devices,
        layout_rules=layout_rules,
        learning_rate_schedule=learning_rate_schedule,
        optimizer=optimizer,
        predict_fn=predict_fn,
        variable_filter=variable_filter,
        perplexity_eval_steps=perplexity_eval_steps,
        init_checkpoint=init_checkpoint,
        ensemble_inputs=ensemble_inputs,
        train_model_fn=train_model_fn,
        skip_seen_data=skip_seen_data,
        seen_data_init_step=seen_data_init_step,
        output_eval_examples=output_eval_examples,
        checkpoint_input_pipeline=checkpoint_input_pipeline,
        eval_dir_suffix=eval_dir_suffix,
        mesh_impl=mesh_impl,
    )
    _check(given)
    return _run_in_chief(_prepared(given), _MODES[mode][0])
