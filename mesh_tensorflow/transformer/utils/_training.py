"""Training: the model function in training and evaluation, initial checkpoints, the loop."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import checkpoint
from mesh_tensorflow import estimator as mtf_estimator
from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._paths import readable
from mesh_tensorflow.estimator import ModeKeys
from mesh_tensorflow.estimator.processes import SaverHook
from mesh_tensorflow.transformer import learning_rate_schedules
from mesh_tensorflow.transformer.utils._data import (
    call_dataset_fn,
    check_features,
    in_vocabulary,
    model_features,
    temporary_name,
    write_text,
)
from mesh_tensorflow.transformer.utils._evaluation import token_metrics
from mesh_tensorflow.transformer.utils._prediction import evaluated, imported
from mesh_tensorflow.transformer.utils._program import (
    Outputs,
    Results,
    call_model,
    get_variable_dtype,
    is_recorded,
    outside_program,
    run_on_mesh,
    trained_variables,
)
from mesh_tensorflow.transformer.utils._settings import (
    MODULE,
    Lengths,
    Settings,
    get_step_from_checkpoint_path,
    inputs_vocabulary,
    longest,
    serialize_num_microbatches,
    targets_vocabulary,
)
from mesh_tensorflow.visualize import print_training_report

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.dataset._features import Vocabularies


_CHECKPOINT_HOURS = 2
_CONFIG_NAME = "operative_config"
_OWN_TAGS = ("learning_rate", "loss")  # summaries that are always written


# -- programs


def _training_program(
    settings: Settings,
    mesh: mtf.Mesh,
    features: Mapping[str, tf.Tensor],
    learning_rate: Union[mtf.Tensor, float, None],
) -> Outputs:
    grads: Sequence[Any]
    variable_dtype = get_variable_dtype()
    mtf_features = imported(settings, mesh, features, ModeKeys.TRAIN)
    batch_dim = settings.batch_dims(ModeKeys.TRAIN)[-1]
    number = serialize_num_microbatches(
        batch_dim, longest(settings.sequence_length), settings.mesh_shape, settings.layout_rules
    )

    def losses(mtf_features: dict[str, mtf.Tensor]) -> dict[str, mtf.Tensor]:
        _, loss = call_model(
            settings.transformer_model,
            mtf_features,
            ModeKeys.TRAIN,
            variable_dtype,
            compute_loss=True,
            num_microbatches=number,
        )
        assert loss is not None
        return {"loss": loss}

    if number > 1:
        tf.logging.info("Training in %d microbatches.", number)
        grads, outputs = mtf.serialize_training_step(mtf_features, losses, batch_dim, number)
        # Gradients are of all trainable variables; the filter selects some of them.
        by_name = dict(zip([v.name for v in mesh.graph.trainable_variables], grads))
        variables = trained_variables(mesh.graph, settings.variable_filter)
        grads = [by_name[v.name] for v in variables]
    else:
        outputs = losses(mtf_features)
        # Only after the call of the model, which makes the variables.
        variables = trained_variables(mesh.graph, settings.variable_filter)
        grads = mtf.gradients([outputs["loss"]], [v.value for v in variables])
    updates = settings.optimizer(learning_rate=learning_rate).apply_grads(grads, variables)
    return Outputs({"loss": mtf.cast(outputs["loss"], tf.float32)}, updates)


def _evaluation_program(
    settings: Settings, mesh: mtf.Mesh, features: Mapping[str, tf.Tensor]
) -> Outputs:
    mode = ModeKeys.EVAL
    mtf_features = imported(settings, mesh, features, mode)
    # Not in microbatches, which save the memory of activations that are kept for gradients.
    logits, loss = call_model(
        settings.transformer_model, mtf_features, mode, get_variable_dtype(), compute_loss=True
    )
    assert loss is not None
    tensors = evaluated(logits, mtf_features, settings.model_type)
    return Outputs({"loss": mtf.cast(loss, tf.float32), **tensors})


# -- initial checkpoints


@gin.configurable(module=MODULE)
def init_checkpoint_variable_mapping(
    name: str, mapping_fn: Optional[Callable[[str], str]] = None
) -> str:
    """Returns the name in the initial checkpoint of a variable of the program.

    Args:
      name: the variable's name.
      mapping_fn: a function of the name, to be set through gin; the same name if None.

    Returns:
      A string.
    """
    return name if mapping_fn is None else mapping_fn(name)


@gin.configurable(module=MODULE)
def should_load_variable(name: str, filter_fn: Optional[Callable[[str], bool]] = None) -> bool:
    """Returns whether a variable is loaded from the initial checkpoint.

    Args:
      name: the variable's name.
      filter_fn: a function of the name, to be set through gin; all are loaded if None.

    Returns:
      A bool.
    """
    return True if filter_fn is None else filter_fn(name)


# Of a variable in a layer: its stack, the scope of the layer in it, and the rest of the name.
_LAYER = re.compile(r"(.*?)/((?:block_\d+/)?layer_\d+)/(.*)")
_STACKS = ("encoder", "decoder")


def _layers_by_stack(names: Iterable[str]) -> dict[str, list[str]]:
    """Returns the layer scopes of each stack, in order."""
    scopes_of: dict[str, set[str]] = {}
    for match in filter(None, map(_LAYER.fullmatch, names)):
        scopes_of.setdefault(match[1], set()).add(match[2])

    def numbers(scope: str) -> list[int]:
        # As text, layer_1000 would come before layer_999.
        return [int(digits) for digits in re.findall(r"\d+", scope)]

    return {stack: sorted(scopes, key=numbers) for stack, scopes in scopes_of.items()}


def _scopes_in_checkpoint(
    model: Iterable[str], saved: Iterable[str], new_layers: dict[str, Sequence[int]]
) -> dict[tuple[str, str], str]:
    """Maps the scope of each layer that is not new to its scope in the checkpoint."""
    in_model, in_checkpoint = _layers_by_stack(model), _layers_by_stack(saved)
    found = {}
    for stack, scopes in in_model.items():
        new = set(new_layers.get(stack) or ())
        old = [scope for i, scope in enumerate(scopes) if i not in new]
        there = in_checkpoint.get(stack, [])
        if len(old) != len(there):
            raise ValueError(
                "Invalid checkpoint to load. Number of layers in ckpt and current model (minus "
                f"`new_layers`) must be equal, but of {stack!r} the checkpoint has {len(there)} "
                f"and the model {len(scopes)}, of which {sorted(new)} are new"
            )
        found.update({(stack, scope): other for scope, other in zip(old, there)})
    return found


@gin.configurable(module=MODULE)
def flexible_ckpt_init_mapping(
    ckpt_path: str = "",
    new_layers: Optional[Sequence[Sequence[int]]] = None,
    return_mapping_fn: bool = True,
) -> Callable[[str], Union[str, bool]]:
    """Returns a mapping from variables of the default tf graph to names in a checkpoint.

    Layers are matched by their order in each stack, across blocks: block_000/layer_003 of a model
    may be block_001/layer_001 in the checkpoint.

    Args:
      ckpt_path: the checkpoint.
      new_layers: a pair of lists, for encoder and decoder, of the numbers in the stack of layers
        that are not in the checkpoint; either may be None.
      return_mapping_fn: whether to return a function for
        `init_checkpoint_variable_mapping.mapping_fn`, or else one for
        `should_load_variable.filter_fn`.

    Returns:
      A function of a variable's name that returns its name in the checkpoint, or whether the
      checkpoint has it.

    Raises:
      ValueError: the numbers of layers do not match.
    """
    saved = set(checkpoint_files.open_reader(ckpt_path).get_variable_to_shape_map())
    model = [v.op.name for v in tf.global_variables()]
    new = dict(zip(_STACKS, new_layers or ((), ())))
    # Names of slots hold the names of their weights, and so map like them.
    scopes = _scopes_in_checkpoint(model, saved, new)
    mapping = {}
    for name in model:
        there = name
        if match := _LAYER.fullmatch(name):
            stack, scope, rest = match.groups()
            # A new layer has no scope there, and so a name that the checkpoint lacks.
            there = f"{stack}/{scopes.get((stack, scope), '')}/{rest}"
        if there in saved:
            mapping[name] = there

    def mapped(name: str) -> str:
        if name not in mapping:
            raise KeyError(
                f"{name} is not in the checkpoint {ckpt_path}; bind should_load_variable.filter_fn "
                "to @flexible_ckpt_init_mapping() with return_mapping_fn=False to leave out such "
                "variables"
            )
        return mapping[name]

    return mapped if return_mapping_fn else mapping.__contains__


def _load_initial_checkpoint(settings: Settings, graph: mtf.Graph) -> None:
    """Initializes variables from the initial checkpoint, if it has them."""
    path = settings.init_checkpoint
    if not path:
        return
    path = checkpoint_files.find(path, "init_checkpoint")
    resize = checkpoint.Resize.of(
        "init_checkpoint", settings.init_checkpoint_resize, settings.init_checkpoint_shrink
    )
    shapes = {part.name: part.shape for v in graph.all_variables for part in v.parts}
    wanted = {
        init_checkpoint_variable_mapping(v.op.name): v
        for v in tf.global_variables()
        if should_load_variable(v.op.name) and re.search(settings.init_variable_filter, v.op.name)
    }
    # Slots and steps may be new; of what is trained, something has to be in the checkpoint.
    trainable = {v.op.name for v in tf.trainable_variables()}
    found = checkpoint.choose_initial(
        "init_checkpoint",
        path,
        wanted,
        [there for there, v in wanted.items() if v.op.name in trainable],
        settings.init_checkpoint_strict,
        "choose variables by should_load_variable.filter_fn, or "
        "tpu_estimator_model_fn.init_variable_filter, name them by "
        "init_checkpoint_variable_mapping.mapping_fn, and dimensions that may have other sizes by "
        "tpu_estimator_model_fn.init_checkpoint_resize and init_checkpoint_shrink",
        resize=resize,
        dims={
            there: shapes[v.op.name].dimension_names
            for there, v in wanted.items()
            if v.op.name in shapes
        },
    )
    checkpoint.init_from_checkpoint(path, found, resize=resize is not None)


# -- hooks


def _saver_hook(settings: Settings, results: Results) -> SaverHook:
    saver = checkpoint.Saver(
        tf.global_variables(),
        sharded=True,
        max_to_keep=settings.keep_checkpoint_max,
        keep_checkpoint_every_n_hours=_CHECKPOINT_HOURS,
        # So that the directory can be moved with its checkpoints.
        save_relative_paths=True,
    )
    # From here a session takes its saver, and otherwise makes another one.
    tf.add_to_collection(tf.GraphKeys.SAVERS, saver)
    return SaverHook(
        settings.model_dir,
        save_steps=settings.save_checkpoints_steps,
        saver=saver,
        # A saver knows the masters alone; before each save this gives them the values of the
        # slices.
        listeners=[mtf.MtfCheckpointSaverListener(results.lowering)],
    )


class OperativeConfigHook(tf.train.SessionRunHook):
    """Writes the operative gin configuration to operative_config.gin, and as a summary."""

    def __init__(self, directory: Optional[str]) -> None:
        """Creates an OperativeConfigHook.

        Args:
          directory: the directory to write to; nothing is written if None.
        """
        self._directory = directory

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Writes.

        Args:
          session: the new session.
          coord: unused.
        """
        if self._directory is None:
            return
        # Not before: it has the parameters of what was called, by now the whole program.
        text = gin.operative_config_str()
        tf.io.gfile.makedirs(self._directory)
        path = os.path.join(self._directory, f"{_CONFIG_NAME}.gin")
        # A unique name, since another process may write here too.
        write_text(text, path, temporary_name(path))
        plugin = tf.SummaryMetadata.PluginData(plugin_name="text")
        summary = tf.Summary(
            value=[
                tf.Summary.Value(
                    tag=f"gin/{_CONFIG_NAME}",
                    tensor=tf.make_tensor_proto(gin.markdown(text)),
                    metadata=tf.SummaryMetadata(plugin_data=plugin),
                )
            ]
        )
        step = session.run(tf.train.get_global_step(session.graph))
        writer = tf.summary.FileWriterCache.get(self._directory)
        writer.add_summary(summary, step)
        writer.flush()


# -- specifications of training and evaluation


def _host_call(settings: Settings, scalars: Mapping[str, tf.Tensor]) -> Any:
    """Returns the host_call that writes scalar summaries."""
    key = mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY
    for name, value in scalars.items():
        tf.add_to_collection(key, (name, value))
    host_call = mtf.utils.create_host_call(settings.model_dir or "")
    mtf.utils.remove_summaries()
    return host_call


def training_spec(settings: Settings, features: Mapping[str, tf.Tensor]) -> Any:
    """Builds the EstimatorSpec for training.

    Args:
      settings: the arguments of the model function.
      features: tf Tensors by name.

    Returns:
      An EstimatorSpec, or a TPUEstimatorSpec inside the program of a TPUEstimator.
    """
    check_features(features, settings.model_type, ModeKeys.TRAIN)
    if settings.optimizer is None:
        raise ValueError(
            "training needs an optimizer: bind utils.run.optimizer to a class such as "
            "@optimize.AdafactorOptimizer, or pass optimizer="
        )
    rate = learning_rate_schedules.rate_of_step(settings.learning_rate_schedule)
    results = run_on_mesh(
        settings,
        lambda mesh: _training_program(settings, mesh, features, rate),
        settings.model_info_file,
        settings.tpu_summaries,
    )
    if settings.model_dir and not is_recorded():
        places = {"checkpoints": f"{settings.model_dir}, with logs"}
        print_training_report(results.lowering, places=places)
    with outside_program(settings):
        # First, so that the initial checkpoint counts where both would set a variable.
        if hasattr(settings.transformer_model, "initialize"):
            settings.transformer_model.initialize()
        _load_initial_checkpoint(settings, results.lowering.graph)
        hooks = [
            # The saver saves at once, from slices, which have to be copies of the masters.
            mtf.MtfRestoreHook(results.lowering),
            _saver_hook(settings, results),
            OperativeConfigHook(settings.model_dir),
        ]
    loss = results.tensors["loss"]
    scalars = {
        # A scalar of the model's own would otherwise take the place of one that is always written.
        f"{name}_1" if name in _OWN_TAGS else name.rstrip("/"): value
        for name, value in results.summaries.items()
    }
    if rate is not None:
        scalars["learning_rate"] = tf.convert_to_tensor(rate, tf.float32)
    # The step is incremented last, after summaries have read it.
    with tf.control_dependencies([results.update, loss, *scalars.values()]):
        train_op = tf.assign_add(tf.train.get_or_create_global_step(), 1)
    if settings.context is not None:
        with tf.control_dependencies([train_op]):
            # It reads the step, and after the increment scalars get the number of the step that
            # made them.
            host_call = _host_call(settings, scalars) if settings.tpu_summaries else None
        return mtf_estimator.tpu.TPUEstimatorSpec(
            ModeKeys.TRAIN,
            loss=loss,
            train_op=train_op,
            training_hooks=hooks,
            host_call=host_call,
        )
    for name, value in scalars.items():
        # tf.summary.scalar would append a number to the tag, since its name scope is in use.
        tf.add_to_collection(
            tf.GraphKeys.SUMMARIES, tf.raw_ops.ScalarSummary(tags=name, values=value)
        )
    return mtf_estimator.EstimatorSpec(
        ModeKeys.TRAIN, loss=loss, train_op=train_op, training_chief_hooks=hooks
    )


def evaluation_spec(settings: Settings, features: Mapping[str, tf.Tensor]) -> Any:
    """Builds the EstimatorSpec for evaluation, with metrics of targets.

    Args:
      settings: the arguments of the model function.
      features: tf Tensors by name.

    Returns:
      An EstimatorSpec.
    """
    check_features(features, settings.model_type, ModeKeys.EVAL)
    results = run_on_mesh(settings, lambda mesh: _evaluation_program(settings, mesh, features))
    tensors = dict(results.tensors)
    loss = tensors.pop("loss")
    # Metrics are of rows: whatever dimensions a batch has, they become one.
    rows = {
        name: tf.reshape(x, [math.prod(x.shape.as_list()[:-1]), x.shape.as_list()[-1]])
        for name, x in tensors.items()
    }
    with outside_program(settings):
        hooks = [mtf.MtfRestoreHook(results.lowering)]
    spec = mtf_estimator.tpu.TPUEstimatorSpec(
        ModeKeys.EVAL,
        loss=loss,
        evaluation_hooks=hooks,
        eval_metrics=(lambda **rows: token_metrics(rows), rows),
    )
    return spec.as_estimator_spec() if settings.context is None else spec


# -- the loop, and where its input is


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
        kept = {step, *(checkpoint_files.by_step(path)[0] for path in paths)}
        for path in checkpoint_files.numbered(self._model_dir, _INPUT_NAME):
            if checkpoint_files.by_step(path)[0] not in kept:
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
        own = {"inputs": inputs_vocabulary(vocabulary), "targets": targets_vocabulary(vocabulary)}
        sizes = {key: own_vocabulary.vocab_size for key, own_vocabulary in own.items()}
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
