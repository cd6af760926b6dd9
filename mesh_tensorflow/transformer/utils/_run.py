"""`run`: training, evaluation, decoding, scoring and export by mode; estimator, model function."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import estimator as mtf_estimator
from mesh_tensorflow._core.errors import WrongTypeError, is_whole
from mesh_tensorflow._mesh.devices import set_cpus
from mesh_tensorflow.estimator import ModeKeys
from mesh_tensorflow.estimator.processes import programs_over, shards_of_process
from mesh_tensorflow.estimator.tpu import TPUEstimator
from mesh_tensorflow.transformer.learning_rate_schedules import with_total_steps
from mesh_tensorflow.transformer.utils._data import call_with_known
from mesh_tensorflow.transformer.utils._decode import infer_model
from mesh_tensorflow.transformer.utils._evaluation import eval_model, perplexity_eval
from mesh_tensorflow.transformer.utils._prediction import export_model, prediction_spec
from mesh_tensorflow.transformer.utils._program import build_model, check_tiling, processor_devices
from mesh_tensorflow.transformer.utils._score import score_from_dataset, score_from_strings
from mesh_tensorflow.transformer.utils._settings import (
    MODULE,
    Filter,
    Lengths,
    Settings,
    Steps,
    auto_train_steps,
    compute_batch_size,
    get_checkpoint_iterator,
    inputs_vocabulary,
    targets_vocabulary,
)
from mesh_tensorflow.transformer.utils._training import (
    evaluation_spec,
    train_model,
    training_spec,
)

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.dataset._features import Vocabularies


_SPECS: dict[str, Callable[[Settings, Mapping[str, tf.Tensor]], Any]] = {
    ModeKeys.TRAIN: training_spec,
    ModeKeys.EVAL: evaluation_spec,
    ModeKeys.PREDICT: prediction_spec,
}


# -- the model function


@gin.configurable(module=MODULE, denylist=["predict_fn"])
def tpu_estimator_model_fn(
    model_type: str,
    transformer_model: Any,
    vocabulary: Vocabularies,
    model_dir: Optional[str],
    use_tpu: Union[str, bool, None],
    mesh_shape: Union[mtf.Shape, str],
    layout_rules: Union[mtf.LayoutRules, str],
    batch_size: int,
    sequence_length: Lengths,
    autostack: bool,
    keep_checkpoint_max: Optional[int],
    save_checkpoints_steps: Optional[int],
    learning_rate_schedule: Any = None,
    optimizer: Any = None,
    outer_batch_size: int = 1,
    tpu_summaries: bool = False,
    predict_fn: Optional[Callable[..., mtf.Tensor]] = None,
    score_in_predict_mode: bool = False,
    variable_filter: Filter = None,
    init_checkpoint: Optional[str] = None,
    init_variable_filter: str = "",
    ensemble_inputs: Optional[int] = None,
    mesh_devices: Optional[Sequence[str]] = None,
    model_info_file: Optional[str] = None,
    hierarchical_tiling_spec: Optional[Sequence[Any]] = None,
    weight_decay_checkpoint: Optional[str] = None,
    mesh_impl: Optional[str] = None,
    init_checkpoint_strict: bool = False,
    init_checkpoint_resize: Union[str, Sequence[str]] = (),
    init_checkpoint_shrink: bool = False,
) -> Callable[..., Any]:
    """Returns a model function for an estimator.

    Args:
      model_type: such as "lm"; see `build_model`.
      transformer_model: the model.
      vocabulary: a Vocabulary, or a pair of them, of inputs and of targets.
      model_dir: the directory of checkpoints.
      use_tpu: whether there is a TPU.
      mesh_shape: the mesh.
      layout_rules: the layout.
      batch_size: the number of sequences in a batch.
      sequence_length: an integer, or a dictionary of them by feature.
      autostack: whether to stack small variables that are alike.
      keep_checkpoint_max: how many checkpoints to keep; all if None.
      save_checkpoints_steps: the number of steps between checkpoints.
      learning_rate_schedule: a function of the step, a list of factors, a number or None.
      optimizer: an optimizer class, called with the learning rate; required for training.
      outer_batch_size: the size of the dimension outer_batch, a divisor of the batch size.
      tpu_summaries: whether training writes the scalars of mtf.scalar_summary, in addition to the
        loss and the learning rate. On a TPU, the host writes all of them.
      predict_fn: a function to decode with instead of the model's own, of `model`, `features` and
        `variable_dtype`, that returns a Tensor [batch, length] of ids.
      score_in_predict_mode: whether prediction computes scores of given targets.
      variable_filter: which variables are trained: None for all, a regular expression that is
        searched for in their names, or a function of a Variable.
      init_checkpoint: a checkpoint to initialize variables from, or its directory.
      init_variable_filter: a regular expression; only variables with a match in their names are
        loaded from `init_checkpoint`.
      ensemble_inputs: the number of ensemble members, if each gets different inputs in training.
      mesh_devices: a device for each processor; by default GPUs, if there are as many, or
        TensorFlow's choice.
      model_info_file: a path, to which training writes variable sizes and counters.
      hierarchical_tiling_spec: how the mesh is mapped to a TPU, pairs such as
        [["batch", None], ["model", [2, 2]]]; see `mtf.simd_mesh_impl.HierarchicalTiling`. Elsewhere
        it is only checked against `mesh_shape`.
      weight_decay_checkpoint: ignored with a warning, as in the classic release: optimizers decay
        towards zero.
      mesh_impl: "placement" for one graph with the operations of all processors, "simd" for one
        program that every processor runs, or "pjrt" for devices of JAX; "placement" if None.
      init_checkpoint_strict: whether `init_checkpoint` has to have exactly the weights of the
        model; by default the names on one side only are logged.
      init_checkpoint_resize: names of dimensions that may be larger in the model than there, such
        as "vocab"; what is beyond the values there begins as the initializer says.
      init_checkpoint_shrink: whether these dimensions may be smaller, too.

    Returns:
      A function of features, labels, mode and params that returns an EstimatorSpec; for a
      TPUEstimator with `use_tpu`, a TPUEstimatorSpec.

    Raises:
      ValueError: `mesh_impl` is unknown, the batch is not divisible, or `hierarchical_tiling_spec`
        describes another mesh.
    """
    if weight_decay_checkpoint:
        tf.logging.warning("weight_decay_checkpoint has no effect: optimizers decay towards zero")
    arguments = locals()
    # By name, so that an argument is written once; a test checks that each has a field.
    values = {
        f.name: arguments[f.name] for f in dataclasses.fields(Settings) if f.name in arguments
    }
    values["mesh_shape"] = mesh_shape = mtf.convert_to_shape(mesh_shape)
    values["layout_rules"] = mtf.convert_to_layout_rules(layout_rules)
    values["mesh_impl"] = mesh_impl = mesh_impl or "placement"
    settings = Settings(**values)
    processor_devices(mesh_impl, mesh_shape, mesh_devices)
    check_tiling(hierarchical_tiling_spec, mesh_shape)
    # For its error: a batch that cannot be divided is told before any data are read.
    settings.batch_dims(ModeKeys.TRAIN)

    def my_model_fn(
        features: Mapping[str, tf.Tensor],
        labels: object,
        mode: str,
        params: object = None,
        config: Any = None,
    ) -> Any:
        """Returns the EstimatorSpec of a mode."""
        del labels
        context = params.get("context") if isinstance(params, Mapping) else None
        # Called once for each mode and program, none of which is to see another's.
        own = dataclasses.replace(settings, config=config, context=context)
        return _SPECS[mode](own, features)

    return my_model_fn


# -- the estimator


def _session_config(
    mesh_impl: str,
    mesh_shape: mtf.Shape,
    layout_rules: mtf.LayoutRules,
    mesh_devices: Optional[Sequence[str]],
    processes: int = 1,
) -> tf.ConfigProto:
    """Returns a session configuration with as many logical CPUs as the mesh needs."""
    is_simd = mesh_impl == "simd"
    config = tf.ConfigProto(allow_soft_placement=not is_simd)
    # Soft placement would silently put all of them on the first.
    named = [tf.DeviceSpec.from_string(device) for device in mesh_devices or ()]
    cpus = [d.device_index or 0 for d in named if d.device_type == "CPU"]
    if mesh_devices is None and (is_simd or processes > 1):
        # The number of the last one: each process counts its own CPUs from 0.
        cpus.append(-(-mesh_shape.size // processes) - 1)
    if cpus:
        set_cpus(config, cpus, mesh_shape, layout_rules if processes == 1 else None)
    return config


def _mesh_impl(mesh_impl: Optional[str], use_tpu: Union[str, bool, None]) -> str:
    """Returns the mesh implementation: the argument, the gin binding, or the default."""
    if mesh_impl is None:
        with contextlib.suppress(ValueError):  # raised by gin if nothing is bound
            mesh_impl = gin.query_parameter(f"{MODULE}.tpu_estimator_model_fn.mesh_impl")
    if mesh_impl == "pjrt" and use_tpu:
        raise ValueError(
            f"mesh_impl 'pjrt' and use_tpu={use_tpu!r} exclude each other: 'pjrt' runs on the "
            "devices of JAX, TPUs among them. Leave use_tpu, or the flag --tpu, out"
        )
    return mesh_impl or ("simd" if use_tpu else "placement")


def get_estimator(
    model_type: str,
    vocabulary: Vocabularies,
    mesh_shape: Union[mtf.Shape, str],
    layout_rules: Union[mtf.LayoutRules, str],
    model_dir: str,
    batch_size: int,
    sequence_length: Lengths,
    autostack: bool,
    learning_rate_schedule: Any,
    keep_checkpoint_max: Optional[int],
    save_checkpoints_steps: Optional[int],
    optimizer: Any,
    predict_fn: Optional[Callable[..., mtf.Tensor]],
    variable_filter: Filter,
    ensemble_inputs: Optional[int],
    use_tpu: Union[str, bool, None],
    tpu_job_name: Optional[str],
    iterations_per_loop: int,
    cluster: Any,
    init_checkpoint: Optional[str] = None,
    mesh_devices: Optional[Sequence[str]] = None,
    score_in_predict_mode: bool = False,
    mesh_impl: Optional[str] = None,
) -> TPUEstimator:
    """Creates an estimator, which runs on CPUs and GPUs.

    Args:
      model_type: such as "lm"; see `build_model`.
      vocabulary: a Vocabulary, or a pair of them, of inputs and of targets.
      mesh_shape: the mesh.
      layout_rules: the layout.
      model_dir: the directory of checkpoints.
      batch_size: the number of sequences in a batch.
      sequence_length: an integer, or a dictionary of them by feature.
      autostack: whether to stack small variables that are alike.
      learning_rate_schedule: a function of the step, a list of factors, a number or None.
      keep_checkpoint_max: how many checkpoints to keep; all if None.
      save_checkpoints_steps: the number of steps between checkpoints.
      optimizer: an optimizer class; required for training.
      predict_fn: see `tpu_estimator_model_fn`.
      variable_filter: see `tpu_estimator_model_fn`.
      ensemble_inputs: the number of ensemble members, if each gets different inputs in training.
      use_tpu: the name of a TPU, or None or ""; True to run one program on all processors of the
        mesh by `TPUEstimator`, on as many CPUs or GPUs.
      tpu_job_name: the job of the TPU.
      iterations_per_loop: for TPUs only.
      cluster: a ClusterResolver, or None.
      init_checkpoint: a checkpoint to initialize variables from.
      mesh_devices: a device for each processor of the mesh.
      score_in_predict_mode: whether prediction computes scores of given targets.
      mesh_impl: "placement", "simd" or "pjrt", see `tpu_estimator_model_fn`; "simd" on a TPU, and
        "placement" elsewhere if None.

    Returns:
      A TPUEstimator.
    """
    # First, as further names would be among the arguments.
    arguments = dict(locals())
    mesh_shape = mtf.convert_to_shape(mesh_shape)
    layout_rules = mtf.convert_to_layout_rules(layout_rules)
    arguments["mesh_impl"] = mesh_impl = _mesh_impl(mesh_impl, use_tpu)
    model = build_model(
        model_type=model_type,
        input_vocab_size=inputs_vocabulary(vocabulary).vocab_size,
        output_vocab_size=targets_vocabulary(vocabulary).vocab_size,
        layout_rules=layout_rules,
        mesh_shape=mesh_shape,
    )
    # A gin binding replaces a default, not an argument.
    for name, unsaid in (("mesh_devices", None), ("score_in_predict_mode", False)):
        if arguments[name] == unsaid:
            del arguments[name]
    # By its public name, so that gin binds the parameters that are no arguments here.
    model_fn = call_with_known(tpu_estimator_model_fn, transformer_model=model, **arguments)
    processes = max(1, len(programs_over(mtf_estimator.RunConfig().cluster_spec)))
    config = mtf_estimator.tpu.RunConfig(
        cluster=cluster,
        model_dir=model_dir,
        session_config=_session_config(
            mesh_impl, mesh_shape, layout_rules, mesh_devices, processes
        ),
        # The model function's own hook saves, once slices have been copied to masters.
        save_checkpoints_steps=None,
        save_checkpoints_secs=None,
        log_step_count_steps=100,
        tpu_config=mtf_estimator.tpu.TPUConfig(
            iterations_per_loop=iterations_per_loop,
            tpu_job_name=tpu_job_name,
            # If a TPU is named, nothing else should stand in for it.
            num_shards=mesh_shape.size if not use_tpu or use_tpu is True else None,
        ),
    )
    return TPUEstimator(
        model_fn=model_fn,
        config=config,
        use_tpu=bool(use_tpu),
        # In training, each member of an ensemble may have sequences of its own.
        train_batch_size=batch_size * (ensemble_inputs or 1),
        eval_batch_size=batch_size,
        predict_batch_size=batch_size,
    )


# -- arguments of `run`, and their checks


def _is_number(value: object) -> bool:
    return is_whole(value, -math.inf)


def _is_batch_size(value: object) -> bool:
    pair = isinstance(value, tuple) and [type(part) for part in value] == [str, int]
    return pair or _is_number(value)


def _is_function(value: object) -> bool:
    return value is None or callable(value)


# What gin may have bound: arguments, whether a value is right, and what it should be.
_KINDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("train_steps", lambda v: callable(v) or _is_number(v), "a number of steps"),
    ("batch_size", _is_batch_size, 'a number or a pair such as ("tokens_per_batch", 4096)'),
    ("optimizer", _is_function, "a class such as @optimize.AdafactorOptimizer"),
    ("train_dataset_fn", _is_function, "a function such as @training_data"),
    ("eval_dataset_fn", _is_function, "a function such as @evaluation_data"),
)


def _check(arguments: Mapping[str, Any]) -> None:
    """Checks arguments, first those for which gin files often bind something else.

    Raises:
      RuntimeError: a TPU is named.
      ValueError: the mode is unknown, or an argument that it needs is missing.
      WrongTypeError: an argument is of another kind.
    """
    for name, is_right, words in _KINDS:
        value = arguments[name]
        if not is_right(value):
            form = ", with @ and without ()" if is_right is _is_function else ""
            raise WrongTypeError(f"utils.run: {name} is {value!r}; it should be {words}{form}")
    mode, tpu, split = (arguments[name] for name in ("mode", "tpu", "dataset_split"))
    if tpu:
        raise RuntimeError(
            f"utils.run: tpu={tpu!r}, but estimators run on CPUs and GPUs: leave out "
            "--tpu. Bind utils.run.mesh_shape, and perhaps utils.run.mesh_devices, to say what the "
            "model is split over; utils.run.mesh_impl = 'pjrt' runs on TPUs that JAX finds"
        )
    if mode not in _MODES:
        raise ValueError(
            f"utils.run: unknown mode {mode!r} - must be one of {', '.join(map(repr, _MODES))}"
        )
    if mode == "train" and split != "train":
        raise ValueError(
            f"utils.run: mode 'train' with dataset_split {split!r}: training "
            "is on the split 'train'; for another one call utils.train_model"
        )
    for name in ("vocabulary", "sequence_length"):
        if arguments[name] is None:
            raise ValueError(
                f"utils.run: {name} is None: bind utils.run.{name}, in a gin file or by "
                f"--gin_param='utils.run.{name} = ...'"
            )


def _completed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `run`, checked, with numbers in place of what determines them."""
    _check(arguments)
    lengths = arguments["sequence_length"]
    if isinstance(lengths, int):
        lengths = {"inputs": lengths, "targets": lengths}
    batch_size = compute_batch_size(
        lengths, arguments["mesh_shape"], arguments["layout_rules"], arguments["batch_size"]
    )
    steps = arguments["train_steps"]
    steps = steps(batch_size, lengths) if callable(steps) else steps
    completed = {
        **arguments,
        "sequence_length": lengths,
        "batch_size": batch_size,
        "train_steps": steps,
        "learning_rate_schedule": with_total_steps(
            arguments["learning_rate_schedule"], arguments["total_run_steps"] or steps
        ),
        "score_in_predict_mode": _MODES[arguments["mode"]][1],
    }
    if arguments["mode"].startswith("export"):
        # An exported model must not need as many devices as the mesh here has processors.
        size = mtf.convert_to_shape(arguments["mesh_shape"]).size
        completed.update(mesh_impl="placement", mesh_devices=[""] * size)
    return completed


# -- what each mode calls


def _train(train_model_fn: Callable[..., None], **arguments: Any) -> None:
    # A user's function has the arguments of `train_model`, and need not have others.
    names = inspect.signature(train_model).parameters
    train_model_fn(**{name: arguments[name] for name in names})


def _export(
    model_dir: str,
    export_path: str,
    export_checkpoint_step: Optional[int],
    export_any_batch: bool,
    **arguments: Any,
) -> list[bytes]:
    step = -1 if export_checkpoint_step is None else export_checkpoint_step
    arguments.update(export_dir=export_path or model_dir, any_batch=export_any_batch)
    return [
        call_with_known(export_model, checkpoint_path=path, **arguments)
        for path in get_checkpoint_iterator(step, model_dir)
    ]


# By mode: the function to call, with the arguments of `run` that it has, and whether it scores.
_MODES: dict[str, tuple[Callable[..., Any], bool]] = {
    "train": (_train, False),
    "eval": (eval_model, False),
    "score_eval": (eval_model, True),
    "perplexity_eval": (perplexity_eval, False),
    "infer": (infer_model, False),
    "score_from_dataset": (score_from_dataset, True),
    "score_from_strings": (score_from_strings, True),
    "export_score": (_export, True),
    "export_infer": (_export, False),
    "export": (_export, False),
}


# -- `run`


def _run_in_chief(arguments: Mapping[str, Any], estimator: TPUEstimator) -> Any:
    """Runs a mode, in the chief if there are several processes; an evaluator runs alone."""
    function, scores = _MODES[arguments["mode"]]

    def main() -> Any:
        return call_with_known(function, estimator=estimator, eval_with_score=scores, **arguments)

    config = estimator.config
    if config.task_type == "evaluator":
        return main()
    if arguments["mesh_devices"] is None:
        shards_of_process(config)  # otherwise only the chief would find that they are not divisible
    return mtf_estimator.run_cluster(main, config)


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
    export_any_batch: bool = False,
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
      export_any_batch: whether an exported model takes any number of texts, a batch at a time.

    Returns:
      What the mode returns: scores as `score_postprocess_fn` returns them, the directories of
      exported models, or None; None in processes that are not the chief.

    Raises:
      ValueError: the mode is unknown, an argument that it needs is missing, or the processors are
        not divisible by the processes.
      PeerLostError: another process has failed or was never started.
      RuntimeError: a TPU is named.
    """
    # First, as further names would be among the arguments.
    arguments = _completed(locals())
    # Without a TPU, which was refused above; the other arguments are those of modes.
    estimator = call_with_known(get_estimator, use_tpu=None, cluster=None, **arguments)
    return _run_in_chief(arguments, estimator)
