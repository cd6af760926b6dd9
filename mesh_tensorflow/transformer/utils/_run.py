"""`run`: an estimator trains, evaluates, decodes, scores or exports, by mode."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import estimator as mtf_estimator
from mesh_tensorflow._calls import arguments_of
from mesh_tensorflow._core.errors import WrongTypeError, is_integer
from mesh_tensorflow._mesh.devices import set_cpus
from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._paths import readable
from mesh_tensorflow.auto_mtf.measured import Auto
from mesh_tensorflow.estimator.processes import programs_over, shards_of_process
from mesh_tensorflow.estimator.tpu import TPUEstimator
from mesh_tensorflow.transformer import learning_rate_schedules
from mesh_tensorflow.transformer.learning_rate_schedules import with_total_steps
from mesh_tensorflow.transformer.utils._auto_layout import (
    AutoLayoutEstimator,
    auto_of,
    check_auto,
)
from mesh_tensorflow.transformer.utils._data import (
    call_dataset_fn,
    call_with_known,
    examples_of,
    in_vocabulary,
    model_features,
)
from mesh_tensorflow.transformer.utils._decode import infer_model
from mesh_tensorflow.transformer.utils._evaluation import (
    eval_model,
    evaluated_datasets,
    longest_examples,
    perplexity_eval,
    score_from_dataset,
    score_from_strings,
)
from mesh_tensorflow.transformer.utils._model_fn import ROWS, tpu_estimator_model_fn
from mesh_tensorflow.transformer.utils._program import (
    build_model,
)
from mesh_tensorflow.transformer.utils._settings import (
    MODULE,
    Filter,
    Lengths,
    Steps,
    auto_train_steps,
    compute_batch_size,
    get_checkpoint_iterator,
    get_step_from_checkpoint_path,
    inputs_length,
    inputs_vocabulary,
    length_of_feature,
    targets_vocabulary,
)
from mesh_tensorflow.transformer.vocabulary import vocabulary_of_feature

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.dataset import Vocabularies
    from mesh_tensorflow.transformer.vocabulary import Vocabulary


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
    layout_rules: Union[mtf.LayoutRules, str, Auto],
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
      layout_rules: the layout; "auto" or an auto_mtf.Auto to choose it by steps when the estimator
        trains first.
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
    auto = auto_of(layout_rules)
    if auto is None:
        return TPUEstimator(**_parts_of_estimator(**arguments))

    def parts_of(**given: Any) -> dict[str, Any]:
        return _parts_of_estimator(**{**arguments, **given})

    return AutoLayoutEstimator(
        auto,
        mtf.convert_to_shape(mesh_shape),
        _mesh_impl(mesh_impl, use_tpu),
        mesh_devices,
        parts_of,
    )


def _parts_of_estimator(**arguments: Any) -> dict[str, Any]:
    """Returns the arguments of a TPUEstimator, for those of `get_estimator`."""
    use_tpu, batch_size = arguments["use_tpu"], arguments["batch_size"]
    vocabulary, mesh_devices = arguments["vocabulary"], arguments["mesh_devices"]
    mesh_shape = mtf.convert_to_shape(arguments["mesh_shape"])
    layout_rules = mtf.convert_to_layout_rules(arguments["layout_rules"])
    arguments["mesh_impl"] = mesh_impl = _mesh_impl(arguments["mesh_impl"], use_tpu)
    model = build_model(
        model_type=arguments["model_type"],
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
        cluster=arguments["cluster"],
        model_dir=arguments["model_dir"],
        session_config=_session_config(
            mesh_impl, mesh_shape, layout_rules, mesh_devices, processes
        ),
        # The model function's own hook saves, once slices have been copied to masters.
        save_checkpoints_steps=None,
        save_checkpoints_secs=None,
        log_step_count_steps=100,
        tpu_config=mtf_estimator.tpu.TPUConfig(
            iterations_per_loop=arguments["iterations_per_loop"],
            tpu_job_name=arguments["tpu_job_name"],
            # If a TPU is named, nothing else should stand in for it.
            num_shards=mesh_shape.size if not use_tpu or use_tpu is True else None,
        ),
    )
    return {
        "model_fn": model_fn,
        "config": config,
        "use_tpu": bool(use_tpu),
        # In training, each member of an ensemble may have sequences of its own.
        "train_batch_size": batch_size * (arguments["ensemble_inputs"] or 1),
        "eval_batch_size": batch_size,
        "predict_batch_size": batch_size,
    }


# -- training, and where its input is


_INPUT_NAME = "input.ckpt"


_INPUT_STATE = "checkpoint_input"


class _InputCheckpoints(tf.train.SessionRunHook):
    """Saves the state of the input pipeline with each checkpoint, and restores it."""

    def __init__(self, model_dir: str) -> None:
        self._model_dir = model_dir
        self._iterator: Any = None
        self._saver: Any = None

    def follow(self, dataset: tf.data.Dataset) -> Any:
        """Returns the next batch of a data set, whose iterator is then saved with checkpoints."""
        self._iterator = tf.data.make_initializable_iterator(dataset)
        return self._iterator.get_next()

    def begin(self) -> None:
        """Creates the saver before the graph is finalized."""
        if self._saver is None:
            state = tf.data.experimental.make_saveable_from_iterator(self._iterator)
            # It removes nothing: states are kept as long as the model's checkpoints of their steps.
            self._saver = tf.train.Saver([state], max_to_keep=None)

    def _path(self, step: int) -> str:
        return os.path.join(self._model_dir, f"{_INPUT_NAME}-{step}")

    def is_saved(self) -> bool:
        """Returns whether there is a state of the pipeline beside the latest checkpoint."""
        latest = checkpoint_files.latest(self._model_dir)
        step = get_step_from_checkpoint_path(latest) if latest else 0
        return bool(step) and tf.io.gfile.exists(f"{self._path(step)}.index")

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Starts the pipeline, at its state at the step of the model if that was saved."""
        del coord
        # Once for each session: one that takes over after an error has an iterator without a state.
        session.run(self._iterator.initializer)
        step = session.run(tf.train.get_global_step(session.graph))
        path = self._path(step)
        if step and tf.io.gfile.exists(f"{path}.index"):
            self._saver.restore(session, readable(path))
            tf.logging.info("The input pipeline goes on from %s", path)
        elif step:
            tf.logging.warning("There is no %s: the input pipeline starts anew", path)

    def save(self, session: tf.Session, step: int) -> None:
        """Saves the state of the pipeline."""
        self._saver.save(
            session,
            os.path.join(self._model_dir, _INPUT_NAME),
            global_step=step,
            # The file `checkpoint` has to go on naming the model's.
            latest_filename=_INPUT_STATE,
        )
        # Kept as long as the model's checkpoint of their step, which has its own rules.
        paths = checkpoint_files.numbered(self._model_dir)
        steps_kept = {step, *(checkpoint_files.by_step(path)[0] for path in paths)}
        for path in checkpoint_files.numbered(self._model_dir, _INPUT_NAME):
            if checkpoint_files.by_step(path)[0] not in steps_kept:
                checkpoint_files.remove(path)


class _InputListener(tf.train.CheckpointSaverListener):
    """Saves the state of the input pipeline whenever the model is saved."""

    def __init__(self, input_checkpoints: _InputCheckpoints) -> None:
        self._input_checkpoints = input_checkpoints

    def after_save(self, session: tf.Session, global_step_value: int) -> None:
        """Saves."""
        # After the model, whose checkpoints now say which older states are kept.
        self._input_checkpoints.save(session, global_step_value)


def train_model(
    estimator: mtf_estimator.tpu.TPUEstimator,
    vocabulary: Vocabularies,
    sequence_length: Lengths,
    batch_size: int,
    train_dataset_fn: Callable[..., tf.data.Dataset],
    train_steps: int,
    ensemble_inputs: Optional[int],
    dataset_split: str = "train",
    skip_seen_data: bool = False,
    seen_data_init_step: int = 0,
    checkpoint_input_pipeline: bool = False,
) -> None:
    """Trains a model to a step.

    Args:
      estimator: what `get_estimator` returns.
      vocabulary: a Vocabulary, or a pair of them.
      sequence_length: an integer, or a dictionary of them by feature.
      batch_size: the number of sequences in a batch.
      train_dataset_fn: a function of `sequence_length`, `vocabulary` and `dataset_split` that
        returns a Dataset of dictionaries of padded features.
      train_steps: the step to train to.
      ensemble_inputs: the number of ensemble members, if each gets different inputs, which
        multiplies the number of sequences in a batch; all members get the same inputs if None.
      dataset_split: such as "train".
      skip_seen_data: whether resumed training skips the batches that it has seen.
      seen_data_init_step: the step at which that training began.
      checkpoint_input_pipeline: whether to save the state of the input pipeline with checkpoints,
        and resume from it.
    """
    rows = batch_size * (ensemble_inputs or 1)
    input_checkpoints = None
    if checkpoint_input_pipeline:
        input_checkpoints = _InputCheckpoints(estimator.model_dir)

    def input_fn(params: object = None) -> Any:
        del params
        dataset = call_dataset_fn(
            train_dataset_fn, "train_dataset_fn", sequence_length, vocabulary, dataset_split
        )
        keys = ("inputs", "targets")
        sizes = {key: vocabulary_of_feature(vocabulary, key).vocab_size for key in keys}
        dataset = in_vocabulary(dataset.map(model_features), sizes)
        # Repeated first, or examples at the end that fill no batch would never be seen.
        dataset = dataset.repeat().batch(rows, drop_remainder=True)
        if skip_seen_data:
            # A saved state of the pipeline is that after the seen batches: no more are skipped.
            goes_on = input_checkpoints is not None and input_checkpoints.is_saved()
            latest = checkpoint_files.latest(estimator.model_dir)
            seen = 0
            if latest and not goes_on:
                seen = max(get_step_from_checkpoint_path(latest) - seen_data_init_step, 0)
            tf.logging.info("Skipping %d batches", seen)
            # Of batches, one of which is a step, and so after they are made.
            dataset = dataset.skip(seen)
        # A saved state has what is in this buffer, too, so that no batch is lost or read twice.
        dataset = dataset.prefetch(tf.data.AUTOTUNE)
        return dataset if input_checkpoints is None else input_checkpoints.follow(dataset)

    hooks, listeners = [], []
    if input_checkpoints is not None:
        hooks, listeners = [input_checkpoints], [_InputListener(input_checkpoints)]
    with learning_rate_schedules.training_for(train_steps):
        estimator.train(
            input_fn=input_fn, max_steps=train_steps, hooks=hooks, saving_listeners=listeners
        )


# -- export


_EOS = 1


def _encoded(
    vocabulary: Vocabulary, texts: tf.Tensor, length: int, batch_size: int, eos: bool
) -> tf.Tensor:
    """Returns the ids of texts [rows], padded to [batch_size, length]."""

    def row(text: tf.Tensor) -> tf.Tensor:
        ids = tf.cast(vocabulary.encode_tf(text), tf.int32)
        ids = tf.concat([ids, [_EOS]], 0) if eos else ids
        ids = ids[:length]
        return tf.pad(ids, [[0, length - tf.size(ids)]])

    # Row by row, since `encode_tf` takes a single text.
    ids = tf.map_fn(row, texts, fn_output_signature=tf.TensorSpec([length], tf.int32))
    missing = batch_size - tf.shape(texts)[0]
    return tf.ensure_shape(tf.pad(ids, [[0, missing], [0, 0]]), [batch_size, length])


def _targets_after_inputs(targets: tf.Tensor, inputs: tf.Tensor, length: int) -> tf.Tensor:
    """Prepends inputs to targets, as negative ids, which are not scored."""
    rows = []
    # By rows, since in each the targets begin where its own inputs end.
    for before, after in zip(tf.unstack(inputs), tf.unstack(targets)):
        ids = tf.concat([-tf.boolean_mask(before, before > 0), after], 0)[:length]
        rows.append(tf.pad(ids, [[0, length - tf.size(ids)]]))
    return tf.ensure_shape(tf.stack(rows), [targets.shape[0], length])


def export_model(
    estimator: mtf_estimator.tpu.TPUEstimator,
    export_dir: str,
    vocabulary: Vocabularies,
    sequence_length: Lengths,
    model_type: str,
    eval_with_score: bool = False,
    batch_size: int = 1,
    checkpoint_path: Optional[str] = None,
    *,
    any_batch: bool = False,
) -> bytes:
    """Writes a SavedModel with text inputs.

    Its signature "serving_default" takes "inputs", up to `batch_size` strings, and returns their
    "outputs", and "inputs" as the model received them. With scores it also takes "targets", and
    returns "scores" and "targets".

    Args:
      estimator: what `get_estimator` returns, with `score_in_predict_mode` for scores.
      export_dir: a directory; the model is written to a new subdirectory, named by a timestamp.
      vocabulary: a Vocabulary, or a pair of them, with `encode_tf`, which encodes in a graph.
      sequence_length: an integer, or a dictionary of them by feature.
      model_type: such as "lm".
      eval_with_score: whether the model scores targets instead of decoding.
      batch_size: the largest number of texts in a call.
      checkpoint_path: a checkpoint; the latest if None.
      any_batch: whether a call may have any number of texts, which are computed `batch_size` at a
        time.

    Returns:
      The new directory, as bytes.

    Raises:
      ValueError: there is no checkpoint.
    """
    # A language model goes on after its inputs, which for it have no end.
    eos = model_type != "lm"

    def receiver_fn() -> Any:
        texts = {"inputs": tf.placeholder(tf.string, [None], "inputs")}
        if eval_with_score:
            texts["targets"] = tf.placeholder(tf.string, [None], "targets")
        rows = tf.shape(texts["inputs"])[0]
        checks = [
            tf.debugging.assert_less_equal(
                rows, batch_size, message=f"the model was exported for {batch_size} texts at a time"
            )
        ]
        with tf.control_dependencies(checks):
            features = {
                # The identity waits for the check; what was made outside of the context does not.
                ROWS: tf.identity(rows),
                "inputs": _encoded(
                    inputs_vocabulary(vocabulary),
                    texts["inputs"],
                    inputs_length(sequence_length),
                    batch_size,
                    eos,
                ),
            }
            if eval_with_score:
                length = length_of_feature(sequence_length, "targets")
                features["targets"] = _encoded(
                    targets_vocabulary(vocabulary), texts["targets"], length, batch_size, eos
                )
        if eval_with_score and model_type == "lm":
            features["targets"] = _targets_after_inputs(
                features["targets"], features.pop("inputs"), length
            )
        return mtf_estimator.export.ServingInputReceiver(features, texts)

    return estimator.export_saved_model(
        export_dir,
        receiver_fn,
        checkpoint_path=checkpoint_path,
        rows_at_a_time=batch_size if any_batch else None,
    )


# -- arguments of `run`, and their checks


def _is_batch_size(value: object) -> bool:
    pair = isinstance(value, tuple) and [type(part) for part in value] == [str, int]
    return pair or is_integer(value)


def _is_function(value: object) -> bool:
    return value is None or callable(value)


# What gin may have bound: arguments, whether a value is right, and what it should be.
_KINDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("train_steps", lambda v: callable(v) or is_integer(v), "a number of steps"),
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
    if auto_of(arguments["layout_rules"]) is not None:
        check_auto(mode, arguments["batch_size"])
    evaluates = _MODES[mode][0] is eval_model
    for name in ("vocabulary", "sequence_length"):
        if arguments[name] is None and not (name == "sequence_length" and evaluates):
            raise ValueError(
                f"utils.run: {name} is None: bind utils.run.{name}, in a gin file or by "
                f"--gin_param='utils.run.{name} = ...'"
            )


def _longest_evaluated(
    eval_dataset_fn: Optional[Callable[..., Any]], vocabulary: Vocabularies, dataset_split: str
) -> dict[str, int]:
    """Returns the lengths of the longest inputs and targets that are evaluated."""
    datasets = evaluated_datasets(eval_dataset_fn, None, vocabulary, dataset_split)
    lengths = longest_examples(itertools.chain(*(examples_of(d.dataset_fn) for d in datasets)))
    tf.logging.info("sequence_length is that of the longest examples: %s", lengths)
    return lengths


def _completed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `run`, checked, with numbers in place of what determines them."""
    _check(arguments)
    lengths = arguments["sequence_length"]
    if lengths is None:
        lengths = _longest_evaluated(**arguments_of(_longest_evaluated, arguments))
    if isinstance(lengths, int):
        lengths = {"inputs": lengths, "targets": lengths}
    # A batch whose size depends on a layout that is to be chosen has been refused.
    rules = arguments["layout_rules"] if auto_of(arguments["layout_rules"]) is None else ""
    batch_size = compute_batch_size(
        lengths, arguments["mesh_shape"], rules, arguments["batch_size"]
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


# Arguments of `train_model`, and of functions that are called in its place.
_POSITIONAL = (
    "estimator",
    "vocabulary",
    "sequence_length",
    "batch_size",
    "train_dataset_fn",
    "train_steps",
    "ensemble_inputs",
)


def _train(
    train_model_fn: Callable[..., None],
    skip_seen_data: bool,
    seen_data_init_step: int,
    checkpoint_input_pipeline: bool,
    **arguments: Any,
) -> None:
    # By position, whatever a function of the user's own calls its arguments.
    train_model_fn(
        *(arguments[name] for name in _POSITIONAL),
        skip_seen_data=skip_seen_data,
        seen_data_init_step=seen_data_init_step,
        checkpoint_input_pipeline=checkpoint_input_pipeline,
    )


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
    layout_rules: Union[mtf.LayoutRules, str, Auto] = gin.REQUIRED,
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
      sequence_length: an integer, or a dictionary such as {"inputs": 512, "targets": 128}; in the
        modes "eval" and "score_eval" None for the lengths of the longest inputs and targets.
      mesh_shape: the mesh.
      mesh_devices: a device for each processor of the mesh.
      layout_rules: the layout. Or "auto", or @auto_mtf.Auto(): then steps are run under those that
        the cost model prefers, for a minute (auto_mtf.Auto.seconds), and the fastest is trained
        with; only in the mode "train".
      learning_rate_schedule: a function of (step, total_train_steps), a list of factors, a number,
        or None for the optimizer's own.
      optimizer: an optimizer class, called with the learning rate; required for training.
      predict_fn: a function to decode or to score with instead; see `tpu_estimator_model_fn`.
      variable_filter: which variables are trained; see `tpu_estimator_model_fn`.
      perplexity_eval_steps: the number of batches that "perplexity_eval" takes from each data set.
      init_checkpoint: a checkpoint to initialize variables from.
      ensemble_inputs: the number of ensemble members, if each gets different inputs in training.
      train_model_fn: the function that trains, called as `train_model` is: with its arguments up
        to `ensemble_inputs` by position, and the rest but `dataset_split` by name.
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
