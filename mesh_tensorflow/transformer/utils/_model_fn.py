"""The model function: training, evaluation, scoring or decoding of a batch, by mode."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import checkpoint, layers
from mesh_tensorflow import estimator as mtf_estimator
from mesh_tensorflow._calls import arguments_of
from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._paths import write_whole
from mesh_tensorflow._watching import is_recorded
from mesh_tensorflow.estimator import ModeKeys, summaries
from mesh_tensorflow.estimator.processes import saver_hook
from mesh_tensorflow.transformer import learning_rate_schedules, transformer
from mesh_tensorflow.transformer.utils._data import (
    check_features,
    clean_decodes,
    dynamic_text2self,
    import_features,
    temporary_name,
)
from mesh_tensorflow.transformer.utils._program import (
    Outputs,
    call_model,
    check_length,
    check_tiling,
    get_variable_dtype,
    is_unitransformer,
    outside_program,
    processor_devices,
    run_on_mesh,
    trained_variables,
)
from mesh_tensorflow.transformer.utils._settings import (
    MODULE,
    Filter,
    Lengths,
    Settings,
    inputs_length,
    longest,
    serialize_num_microbatches,
)
from mesh_tensorflow.transformer.vocabulary import vocabulary_of_feature
from mesh_tensorflow.visualize import print_training_report

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.dataset import Vocabularies


# -- a batch on the mesh, and what is computed of its targets


# A feature of exported models: the number of rows of the batch that are not padding.
ROWS = "_rows"


def imported(
    settings: Settings, mesh: mtf.Mesh, features: Mapping[str, tf.Tensor], mode: str
) -> dict[str, mtf.Tensor]:
    """Imports features; joins those of a delimited language model to one sequence.

    Args:
      settings: the arguments of the model function.
      mesh: a Mesh.
      features: integer tf Tensors [rows, length] by name.
      mode: a ModeKeys value.

    Returns:
      A dictionary of Tensors [batch..., length].

    Raises:
      ValueError: targets, or inputs with targets, are longer than the model's positions.
    """
    has_targets = mode != ModeKeys.PREDICT or settings.score_in_predict_mode
    delimited = has_targets and settings.model_type == "delimited_lm"
    joins = has_targets and "inputs" in features and settings.model_type in ("lm", "delimited_lm")
    if joins and not delimited:
        # No id says where its inputs end, so that it predicts them as it does the targets.
        tf.logging.warning('scores of model_type="lm" include those of the inputs')
    lengths = settings.sequence_length
    if delimited and not joins:
        # They were joined when they were encoded.
        lengths = settings.joined_length
    elif mode == ModeKeys.PREDICT and isinstance(lengths, Mapping):
        lengths = {"inputs": inputs_length(lengths), **lengths}
    mtf_features = import_features(mesh, features, settings.batch_dims(mode), lengths)
    if joins:
        mtf_features = dynamic_text2self(mtf_features)
    if has_targets:
        length = max(x.shape.dims[-1].size for x in mtf_features.values())
        check_length(settings.transformer_model, length)
    return mtf_features


def target_weights(targets: mtf.Tensor, model_type: str) -> mtf.Tensor:
    """Returns 1 at targets to predict, and 0 at padding and given ids.

    Args:
      targets: an integer Tensor [..., length]; negative ids are given.
      model_type: such as "lm"; for "delimited_lm" the inputs are given.

    Returns:
      A float32 Tensor of the same shape.
    """
    weights = mtf.cast(mtf.greater(targets, 0), tf.float32)
    if model_type == "delimited_lm":
        inputs = transformer.delimited_lm_inputs_mask(targets)
        weights *= mtf.cast(mtf.logical_not(inputs), tf.float32)
    return weights


def negative_log_prob(logits: mtf.Tensor, targets: mtf.Tensor) -> mtf.Tensor:
    """Returns the negative log likelihood of each target.

    Args:
      logits: a Tensor [..., length, vocab].
      targets: an integer Tensor [..., length].

    Returns:
      A float32 Tensor [..., length].
    """
    vocab = logits.shape.dims[-1]
    # They are summed over a row, for which the 8 significant bits of bfloat16 are too few.
    logits = mtf.cast(logits, tf.float32)
    # Given ids are negative; they have no weight, so that any label will do.
    labels = mtf.one_hot(mtf.maximum(targets, 0), vocab, dtype=tf.float32)
    return layers.softmax_cross_entropy_with_logits(logits, labels, vocab)


def evaluated(
    logits: mtf.Tensor, features: Mapping[str, mtf.Tensor], model_type: str
) -> dict[str, mtf.Tensor]:
    """Returns the per-target values that metrics are computed from.

    Args:
      logits: a Tensor [..., length, vocab].
      features: Tensors by name, "targets" [..., length] among them.
      model_type: such as "lm".

    Returns:
      A dictionary of Tensors [..., length].
    """
    targets = features["targets"]
    return {
        "targets": targets,
        "weights": target_weights(targets, model_type),
        "predicted": mtf.argmax(logits, logits.shape.dims[-1]),
        "negative_log_prob": negative_log_prob(logits, targets),
    }


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


def _scoring_program(
    settings: Settings, mesh: mtf.Mesh, features: Mapping[str, tf.Tensor]
) -> Outputs:
    mtf_features = imported(settings, mesh, features, ModeKeys.PREDICT)
    targets, variable_dtype = mtf_features["targets"], get_variable_dtype()
    if settings.predict_fn is not None:
        scores = settings.predict_fn(
            model=settings.transformer_model, features=mtf_features, variable_dtype=variable_dtype
        )
        return Outputs({"scores": scores, "targets": targets})
    logits, _ = call_model(
        settings.transformer_model, mtf_features, "score", variable_dtype, compute_loss=False
    )
    scores = -negative_log_prob(logits, targets) * target_weights(targets, settings.model_type)
    batch = settings.batch_dims(ModeKeys.PREDICT)
    # log p(targets) of a row = the sum of log p(target | those before it) over its positions.
    return Outputs({"scores": mtf.reduce_sum(scores, output_shape=batch), "targets": targets})


def _decoding_program(
    settings: Settings, mesh: mtf.Mesh, features: Mapping[str, tf.Tensor]
) -> Outputs:
    mtf_features = imported(settings, mesh, features, ModeKeys.PREDICT)
    inputs, model = mtf_features["inputs"], settings.transformer_model
    length = inputs.shape.dims[-1]
    variable_dtype = get_variable_dtype()
    if settings.predict_fn is not None:
        outputs = settings.predict_fn(
            model=model, features=mtf_features, variable_dtype=variable_dtype
        )
    elif settings.model_type == "aligned":
        check_length(model, length.size)
        logits, _ = call_model(
            model, {"inputs": inputs}, ModeKeys.PREDICT, variable_dtype, compute_loss=False
        )
        # The most likely id at each position.
        outputs = mtf.argmax(logits, logits.shape.dims[-1])
    elif is_unitransformer(model):
        check_length(model, settings.joined_length)
        more, start = settings.joined_length - length.size, inputs
        if more > 0:
            # Decoding fills in zeros after the inputs, and so needs some.
            start = mtf.pad(inputs, [0, more], length.name)
        outputs = model.sample_autoregressive(
            start, variable_dtype=variable_dtype, remove_partial_sequences=True
        )
    else:
        check_length(model, length.size)
        outputs = model.decode(inputs, variable_dtype=variable_dtype)
    return Outputs({"inputs": inputs, "outputs": outputs})


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
    scopes_there = {}
    for stack, scopes in in_model.items():
        new = set(new_layers.get(stack) or ())
        old = [scope for i, scope in enumerate(scopes) if i not in new]
        others = in_checkpoint.get(stack, [])
        if len(old) != len(others):
            raise ValueError(
                "Invalid checkpoint to load. Number of layers in ckpt and current model (minus "
                f"`new_layers`) must be equal, but of {stack!r} the checkpoint has {len(others)} "
                f"and the model {len(scopes)}, of which {sorted(new)} are new"
            )
        scopes_there.update({(stack, scope): other for scope, other in zip(old, others)})
    return scopes_there


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
        saved_name = name
        if match := _LAYER.fullmatch(name):
            stack, scope, rest = match.groups()
            # A new layer has no scope there, and so a name that the checkpoint lacks.
            saved_name = f"{stack}/{scopes.get((stack, scope), '')}/{rest}"
        if saved_name in saved:
            mapping[name] = saved_name

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
    expected = {
        init_checkpoint_variable_mapping(v.op.name): v
        for v in tf.global_variables()
        if should_load_variable(v.op.name) and re.search(settings.init_variable_filter, v.op.name)
    }
    # Slots and steps may be new; of what is trained, something has to be in the checkpoint.
    trainable = {v.op.name for v in tf.trainable_variables()}
    choice = checkpoint.choose_initial(
        "init_checkpoint",
        path,
        expected,
        [saved_name for saved_name, v in expected.items() if v.op.name in trainable],
        settings.init_checkpoint_strict,
        "choose variables by should_load_variable.filter_fn, or "
        "tpu_estimator_model_fn.init_variable_filter, name them by "
        "init_checkpoint_variable_mapping.mapping_fn, and dimensions that may have other sizes by "
        "tpu_estimator_model_fn.init_checkpoint_resize and init_checkpoint_shrink",
        resize=resize,
        dims={
            saved_name: shapes[v.op.name].dimension_names
            for saved_name, v in expected.items()
            if v.op.name in shapes
        },
    )
    checkpoint.init_from_checkpoint(path, choice, resize=resize is not None)


# -- hooks and summaries of training


_CONFIG_NAME = "operative_config"


_OWN_TAGS = ("learning_rate", "loss")  # summaries that are always written


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
        write_whole(path, text, temporary_name(path))
        step = session.run(tf.train.get_global_step(session.graph))
        shown = summaries.text(f"gin/{_CONFIG_NAME}", gin.markdown(text))
        summaries.write(self._directory, step, [shown])


def _host_call(settings: Settings, scalars: Mapping[str, tf.Tensor]) -> Any:
    """Returns the host_call that writes scalar summaries."""
    key = mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY
    for name, value in scalars.items():
        tf.add_to_collection(key, (name, value))
    host_call = mtf.utils.create_host_call(settings.model_dir or "")
    mtf.utils.remove_summaries()
    return host_call


# -- metrics of evaluation


Metric = tuple[Any, tf.Tensor]


# How values of a batch become one, and how that is joined with those of earlier batches.
_KINDS = {"sum": (tf.reduce_sum, tf.add), "max": (tf.reduce_max, tf.maximum)}


def _accumulated(values: tf.Tensor, name: Optional[str], kind: str) -> Metric:
    """Returns a metric of values over all batches, from 0 on, and the operation that adds some."""
    reduce, combine = _KINDS[kind]
    with tf.variable_scope(name, f"metric_{kind}"):
        total = tf.get_variable(
            "accum",
            shape=[],
            dtype=tf.float32,
            trainable=False,
            initializer=tf.constant_initializer(0.0),
            # The old kind of variable hands out its memory, which a later assignment changes.
            use_resource=True,
            # No checkpoint has it, and each evaluation begins with its initial value.
            collections=[tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.METRIC_VARIABLES],
        )
        reduced = reduce(tf.cast(values, tf.float32))
        update = total.assign(combine(total, reduced), read_value=False)
        with tf.control_dependencies([update]):
            updated = total.read_value()
    # The value must not run the update, or reading it at the end would count the last batch twice.
    return total.read_value(), updated


def metric_sum(values: tf.Tensor, name: Optional[str] = None, **kwargs: object) -> Metric:
    """Sums values over all batches, in the style of `tf.metrics`.

    Args:
      values: a tf Tensor of numbers.
      name: a name for its variable scope.
      **kwargs: ignored.

    Returns:
      (the value, the operation that adds a batch), both float32 scalars.
    """
    del kwargs
    return _accumulated(values, name, "sum")


def metric_max(values: tf.Tensor, name: Optional[str] = None, **kwargs: object) -> Metric:
    """Returns the maximum of values over all batches, at least 0, in the style of `tf.metrics`.

    Args:
      values: a tf Tensor of numbers.
      name: a name for its variable scope.
      **kwargs: ignored.

    Returns:
      (the value, the operation that adds a batch), both float32 scalars.
    """
    del kwargs
    return _accumulated(values, name, "max")


def token_metrics(tensors: Mapping[str, tf.Tensor]) -> dict[str, Metric]:
    """Returns metrics of a model's predictions of given targets.

    Args:
      tensors: "targets", "weights" (1 where a target counts), "predicted" and "negative_log_prob",
        all [rows, length].

    Returns:
      A dictionary of metrics.
    """
    weights = tf.cast(tensors["weights"], tf.float32)
    right = tf.cast(tf.equal(tensors["predicted"], tensors["targets"]), tf.float32)
    wrong = tf.reduce_sum((1.0 - right) * weights, axis=-1)
    lengths = tf.reduce_sum(weights, axis=-1)
    # Rows that only fill up the last batch have no targets, and are not counted.
    has_tokens = tf.cast(tf.greater(lengths, 0), tf.float32)
    return {
        "token_accuracy": tf.metrics.mean(right, weights),
        "sequence_accuracy": tf.metrics.mean(tf.cast(tf.equal(wrong, 0), tf.float32), has_tokens),
        "mean_label": tf.metrics.mean(tf.cast(tensors["targets"], tf.float32), weights),
        "num_eval_tokens": metric_sum(weights, name="num_eval_tokens"),
        "max_targets_length": metric_max(lengths, name="max_targets_length"),
        # log(perplexity) is the mean of -log p(target), over the targets that count.
        "neg_log_perplexity": tf.metrics.mean(-tensors["negative_log_prob"], weights),
    }


# -- the specification of each mode, and the model function


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
    if settings.model_dir:
        places = {"checkpoints": f"{settings.model_dir}, with logs"}
        print_training_report(results.lowering, places=places)
    with outside_program(settings):
        # First, so that the initial checkpoint counts where both would set a variable.
        if hasattr(settings.transformer_model, "initialize"):
            settings.transformer_model.initialize()
        _load_initial_checkpoint(settings, results.lowering.graph)
        # The saver saves at once, from slices, which have to be copies of the masters.
        hooks: list[tf.train.SessionRunHook] = [mtf.MtfRestoreHook(results.lowering)]
        if not is_recorded():  # what is only looked at writes nothing
            saver = saver_hook(
                results.lowering,
                settings.model_dir,
                settings.save_checkpoints_steps,
                settings.keep_checkpoint_max,
            )
            hooks += [saver, OperativeConfigHook(settings.model_dir)]
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


def _texts(settings: Settings, predictions: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Replaces ids by text in predictions, if the vocabularies can decode in a graph."""
    result = dict(predictions)
    for name in predictions.keys() & {"inputs", "outputs", "targets"}:
        own = vocabulary_of_feature(settings.vocabulary, name)
        decode = getattr(own, "decode_tf", None)
        if decode is None:
            tf.logging.warning("%s are exported as ids: the vocabulary has no decode_tf", name)
        else:
            # Ids that are given and not scored are negative.
            result[name] = decode(clean_decodes(tf.abs(predictions[name])))
    return result


def prediction_spec(settings: Settings, features: Mapping[str, tf.Tensor]) -> Any:
    """Builds the EstimatorSpec for prediction.

    Args:
      settings: the arguments of the model function.
      features: tf Tensors by name.

    Returns:
      An EstimatorSpec whose predictions are ids: "outputs" and their "inputs", or "scores" and
      their "targets". Exported models return text.
    """
    mode = ModeKeys.PREDICT
    check_features(features, settings.model_type, mode, settings.score_in_predict_mode)
    program = _scoring_program if settings.score_in_predict_mode else _decoding_program
    results = run_on_mesh(settings, lambda mesh: program(settings, mesh, features))
    predictions = dict(results.tensors)
    if not settings.score_in_predict_mode:
        # A row may go on after its EOS until all rows have ended; the ids there mean nothing.
        predictions["outputs"] = clean_decodes(predictions["outputs"])
    exported: Optional[dict[str, Any]] = None
    if ROWS in features:
        # The batch of an exported model has a fixed size: rows that fill it up are left out.
        of_rows = {name: x[: features[ROWS]] for name, x in predictions.items()}
        predictions = _texts(settings, of_rows)
        exported = {"serving_default": mtf_estimator.export.PredictOutput(predictions)}
    with outside_program(settings):
        hooks = [mtf.MtfRestoreHook(results.lowering)]
    spec = mtf_estimator.tpu.TPUEstimatorSpec(
        mode, predictions=predictions, export_outputs=exported, prediction_hooks=hooks
    )
    return spec.as_estimator_spec() if settings.context is None else spec


_SPECS: dict[str, Callable[[Settings, Mapping[str, tf.Tensor]], Any]] = {
    ModeKeys.TRAIN: training_spec,
    ModeKeys.EVAL: evaluation_spec,
    ModeKeys.PREDICT: prediction_spec,
}


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
        `variable_dtype`, that returns a Tensor [batch, length] of ids; with
        `score_in_predict_mode` one that returns scores, a Tensor [batch, ...].
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
    # By name, so that an argument is written once; a test checks that each has a field.
    values = arguments_of(Settings, locals())
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
