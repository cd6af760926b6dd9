"""What BERT's programs share: records, model functions on a mesh, checkpoints, estimators."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import tensorflow.compat.v1 as tf
from google.protobuf import message

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import checkpoint, estimator
from mesh_tensorflow._lowering.lowering import rules_that_apply
from mesh_tensorflow._mesh.devices import devices_for
from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._programs import FLAGS, Setting
from mesh_tensorflow.bert.bert import BertConfig, get_assignment_map_from_checkpoint
from mesh_tensorflow.bert.optimization import create_optimizer
from mesh_tensorflow.estimator.processes import saver_hook
from mesh_tensorflow.optimize._base import weights_of
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl
from mesh_tensorflow.utils import outside_all_rewrites
from mesh_tensorflow.visualize import print_training_report

# The features of a batch, by name.
Features = Mapping[str, tf.Tensor]

# -- flags that several programs have

MESH_FLAGS: dict[str, Setting] = {
    "mesh_shape": ("batch:8", "Mesh, such as batch:2;model:2."),
    "layout": (
        "batch:batch,vocab:model,intermediate:model,num_heads:model,experts:batch",
        "Layout: which mesh dimension splits which dimension.",
    ),
    "use_tpu": (
        False,
        "Whether each processor of the mesh runs a program of its own, as TPU cores do.",
    ),
    "tpu_name": (None, "Name or grpc address of a TPU."),
    "tpu_zone": (None, "The TPU's zone."),
    "gcp_project": (None, "The TPU's project."),
    "master": (None, "The session's target; this process if empty."),
}

TRAINING_FLAGS: dict[str, Setting] = {
    "bert_config_file": (None, "Configuration of the model, as JSON."),
    "output_dir": (None, "Directory of checkpoints and results."),
    "init_checkpoint": (None, "Checkpoint that training begins with."),
    "init_checkpoint_strict": (
        False,
        "Whether that checkpoint has to have exactly the weights of the model.",
    ),
    "learning_rate": (5e-5, "The highest learning rate."),
    "optimizer": ("adam", "adam or adafactor."),
    "clip_gradients": (True, "Whether gradients are clipped to a norm of 1."),
    "train_batch_size": (32, "Sequences of a batch in training."),
    "save_checkpoints_steps": (1000, "Steps from one checkpoint to the next."),
    "iterations_per_loop": (1000, "For TPUs: steps from one return to the host to the next."),
}

TEXT_FLAGS: dict[str, Setting] = {
    "vocab_file": (None, "The vocabulary: a token per line."),
    "do_lower_case": (True, "Whether text is lowered: for uncased models, and not for cased."),
    "do_train": (False, "Whether to train."),
    "do_predict": (False, "Whether to write predictions."),
    "predict_batch_size": (8, "Sequences of a batch in prediction."),
    "num_train_epochs": (3.0, "How often training sees each example."),
    "warmup_proportion": (0.1, "The share of training in which the learning rate grows."),
    "max_optimized_variable_size": (1e7, "Variables with more elements are not trained."),
    "cached_train_file": (
        None,
        "Where training examples are kept as records, to be used again if they are there; in "
        "output_dir, and made anew, if None.",
    ),
}

# -- records

_SHUFFLE_BUFFER = 100


def int64_features(values: Mapping[str, Sequence[int]]) -> tf.train.Example:
    """Converts lists of integers to a tf.Example.

    Args:
      values: lists of integers by name.
    """
    return tf.train.Example(
        features=tf.train.Features(
            feature={
                name: tf.train.Feature(int64_list=tf.train.Int64List(value=list(value)))
                for name, value in values.items()
            }
        )
    )


def write_records(path: str, examples: Iterable[Mapping[str, Sequence[int]]]) -> None:
    """Writes a TFRecord file.

    Args:
      path: the path of the file.
      examples: lists of integers by name.
    """
    with tf.io.TFRecordWriter(path) as writer:
        for example in examples:
            writer.write(int64_features(example).SerializeToString())


def check_first_records(
    paths: Iterable[str], features: Mapping[str, Any], flags: Mapping[str, str]
) -> None:
    """Checks that TFRecord files can be read, and that their first records have all features.

    Args:
      paths: the paths of the files.
      features: tf.io.FixedLenFeature of one dimension by name.
      flags: the flags, with their values, that say how long a feature is, by the feature's name.

    Raises:
      ValueError: one is no TFRecord file, is damaged, or has other features.
    """
    for path in paths:
        try:
            # Only the first: reading all of them would take as long as an epoch does.
            record = next(tf.io.tf_record_iterator(path), None)
            features_of_record = (
                None if record is None else tf.train.Example.FromString(record).features.feature
            )
        except (tf.errors.OpError, message.DecodeError) as error:
            why_not = error.message if isinstance(error, tf.errors.OpError) else error
            raise ValueError(f"{path} is no file of TFRecords, or is damaged: {why_not}") from error
        if features_of_record is None:
            continue
        for name, feature in features.items():
            if name not in features_of_record:
                names = ", ".join(sorted(features_of_record)) or "none"
                raise ValueError(f"{path}: its records have no feature {name}; they have {names}")
            # A feature that is read as another type is empty, and its length is told as 0.
            kind = "float_list" if feature.dtype.is_floating else "int64_list"
            count, expected = len(getattr(features_of_record[name], kind).value), feature.shape[0]
            if count != expected:
                numbers = "numbers" if feature.dtype.is_floating else "integers"
                why = f", by {flags[name]}" if name in flags else ""
                raise ValueError(
                    f"{path}: {name} of its first record has {count} {numbers}; "
                    f"{expected} are expected{why}"
                )


def training_order(
    data: tf.data.Dataset,
    is_training: bool,
    buffer: int = _SHUFFLE_BUFFER,
    seed: Optional[int] = None,
) -> tf.data.Dataset:
    """Shuffles and repeats a data set for training, with a different order in each epoch.

    Args:
      data: a tf.data.Dataset.
      is_training: if False, the data set is returned unchanged.
      buffer: the size of the shuffle buffer.
      seed: the seed of the order, in addition to the graph's.
    """
    # Shuffled, then repeated: each epoch has all records, in an order of its own.
    return data.shuffle(buffer, seed=seed).repeat() if is_training else data


def parsed_record(record: tf.Tensor, features: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """Parses a record; integers become int32.

    Args:
      record: a tf.Example, as bytes.
      features: tf.io.FixedLenFeature by name.
    """
    example = tf.io.parse_single_example(record, features)
    # A tf.Example has no narrower integers than int64.
    return {name: tf.cast(x, tf.int32) if x.dtype == tf.int64 else x for name, x in example.items()}


def record_batches(
    input_file: str, shapes: Mapping[str, list[int]], is_training: bool, drop_remainder: bool
) -> Callable[[Any], Any]:
    """Returns an input function that reads TFRecords of integers.

    Args:
      input_file: the path of the file.
      shapes: the shape of each feature, by name.
      is_training: whether to shuffle and repeat the records.
      drop_remainder: whether to drop a last batch that is not full.

    Returns:
      A function of `params`, which contain "batch_size".
    """
    features = {name: tf.io.FixedLenFeature(shape, tf.int64) for name, shape in shapes.items()}

    def input_fn(params: Mapping[str, Any]) -> tf.data.Dataset:
        data = training_order(tf.data.TFRecordDataset(input_file), is_training)
        data = data.map(functools.partial(parsed_record, features=features))
        return data.batch(params["batch_size"], drop_remainder=drop_remainder)

    return input_fn


# -- initial checkpoints, and imported features


def load_initial_checkpoint(init_checkpoint: Optional[str], strict: bool = False) -> None:
    """Initializes the variables of the default tf graph from a checkpoint.

    Args:
      init_checkpoint: a checkpoint, or its directory; or None.
      strict: whether it has to have exactly the model's weights.

    Raises:
      ValueError: the checkpoint has none of the variables, or other ones, with `strict`.
    """
    if not init_checkpoint:
        return
    init_checkpoint = checkpoint_files.find(init_checkpoint, "init_checkpoint")
    assignments, _ = get_assignment_map_from_checkpoint(tf.global_variables(), init_checkpoint)
    if not assignments:
        raise ValueError(
            f"init_checkpoint: {init_checkpoint} has none of the model's variables, which have "
            "names such as bert/embeddings/word_embeddings; TF BERT's own checkpoints have others"
        )
    variables = {v.op.name: v for v in tf.global_variables()}
    shapes = {name: v.shape.as_list() for name, v in variables.items()}
    checkpoint.choose_initial(
        "init_checkpoint",
        init_checkpoint,
        {name: variables[name] for name in weights_of(shapes)},
        [v.op.name for v in tf.trainable_variables()],
        strict,
    )
    with outside_all_rewrites():
        # Initial values are read on the host, before any processor runs the program.
        checkpoint.init_from_checkpoint(
            init_checkpoint, {name: v for name, v in variables.items() if name in assignments}
        )


class Imported(NamedTuple):
    """Imported features of a batch: Tensors [batch, seq], in the order of a model's arguments."""

    input_ids: mtf.Tensor
    input_mask: mtf.Tensor
    segment_ids: mtf.Tensor

    def of_each(self, x: tf.Tensor, *dims: mtf.Dimension) -> mtf.Tensor:
        """Imports another feature as a Tensor [batch, dims...]."""
        batch_dim = self.input_ids.shape.dims[0]
        return mtf.import_tf_tensor(self.input_ids.mesh, x, mtf.Shape([batch_dim, *dims]))


def import_features(mesh: mtf.Mesh, features: Features) -> Imported:
    """Imports the features that all models use.

    Args:
      mesh: a Mesh.
      features: tf Tensors by name, including input_ids, input_mask and segment_ids with static
        shapes.
    """
    batch, length = features["input_ids"].shape.as_list()
    shape = mtf.Shape([mtf.Dimension("batch", batch), mtf.Dimension("seq", length)])
    return Imported(*(mtf.import_tf_tensor(mesh, features[n], shape) for n in Imported._fields))


# -- the mesh


def _mesh_shape() -> mtf.Shape:
    shape = mtf.convert_to_shape(FLAGS.mesh_shape)
    assert shape is not None
    return shape


def _is_simd(params: object) -> bool:
    """Returns whether the estimator runs the program on every processor."""
    return bool(_parameter(params, "use_tpu") and _parameter(params, "context") is not None)


def _parameter(params: object, name: str) -> Any:
    """Returns a value of a dictionary, of an object such as HParams, or of None; None if absent."""
    get = getattr(params, "get", None)
    return getattr(params, name, None) if get is None else get(name)


def _mesh_impl(params: object, graph: mtf.Graph) -> mtf.MeshImpl:
    shape = _mesh_shape()
    # The default rules may be for dimensions of other models: those are left out.
    usual = mtf.convert_to_layout_rules(FLAGS["layout"].default or "").pairs
    layout = rules_that_apply(
        mtf.convert_to_layout_rules(FLAGS.layout),
        graph.operations,
        shape,
        {d for d, _ in usual},
        {m for _, m in usual},
    )
    if _is_simd(params):
        return SimdMeshImpl(shape, layout)
    # Fewer GPUs than processors: TensorFlow chooses the device of each operation.
    return PlacementMeshImpl(shape, layout, devices_for(shape.size, otherwise=""))


# -- model functions


def make_model_fn(
    build: Callable[[mtf.Mesh, Features, str], Mapping[str, mtf.Tensor]],
    outputs: Callable[[Features, str, dict[str, tf.Tensor]], dict[str, Any]],
    init_checkpoint: Optional[str],
    learning_rate: float,
    num_train_steps: int,
    num_warmup_steps: Optional[int],
    max_optimized_variable_size: Optional[float] = None,
    use_tpu: bool = True,
) -> Callable[..., Any]:
    """Returns a model function for a TPUEstimator, with mesh, layout and optimizer given by flags.

    Args:
      build: takes a Mesh, the features and the mode; returns the results, Tensors by name. In
        training "loss" is one of them.
      outputs: takes the features, the mode and the results as tf Tensors; returns arguments of a
        TPUEstimatorSpec for evaluation and prediction.
      init_checkpoint: a checkpoint to initialize variables from, or None.
      learning_rate: the peak learning rate.
      num_train_steps: the number of training steps.
      num_warmup_steps: the number of warmup steps.
      max_optimized_variable_size: larger variables are not trained.
      use_tpu: whether the estimator may run one program on each processor.

    Returns:
      A function of features, labels, mode and params that returns a TPUEstimatorSpec.
    """

    def model_fn(
        features: Features, labels: object, mode: str, params: object
    ) -> estimator.tpu.TPUEstimatorSpec:
        """Returns the TPUEstimatorSpec of a mode."""
        del labels
        # Without them the program is that of one process, whatever the estimator runs on.
        params = params if use_tpu else None
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "bert_mesh")
        results = build(mesh, features, mode)
        # What layers assign is part of a step of training, besides what the optimizer does.
        graph.assigns = "none"
        if mode == estimator.ModeKeys.TRAIN:
            graph.assigns = "all"
            # Others would be computed in each step.
            results = {"loss": results["loss"]}
            rate, _ = create_optimizer(
                results["loss"],
                learning_rate,
                num_train_steps,
                num_warmup_steps,
                max_optimized_variable_size,
                FLAGS.optimizer,
                FLAGS.clip_gradients,
            )
        lowering = mtf.Lowering(graph, {mesh: _mesh_impl(params, graph)})
        tensors = {name: lowering.export_to_tf_tensor(x) for name, x in results.items()}
        if mode == estimator.ModeKeys.TRAIN:
            if not _is_simd(params):
                # A summary within the program that all processors run would not be written.
                tf.summary.scalar("learning_rate", rate)
            return _training_spec(lowering, tensors["loss"], init_checkpoint)
        hooks = [_restore_hook(lowering)]
        return estimator.tpu.TPUEstimatorSpec(
            mode,
            **outputs(features, mode, tensors),
            evaluation_hooks=hooks,
            prediction_hooks=hooks,
        )

    return model_fn


def _restore_hook(lowering: mtf.Lowering) -> mtf.MtfRestoreHook:
    """Returns a hook that copies restored masters to slices."""
    with outside_all_rewrites():
        return mtf.MtfRestoreHook(lowering)


def _training_spec(
    lowering: mtf.Lowering, loss: tf.Tensor, init_checkpoint: Optional[str]
) -> estimator.tpu.TPUEstimatorSpec:
    """Builds the spec for training, with a hook that saves checkpoints of the masters."""
    update, restoring = tf.group(lowering.effects), _restore_hook(lowering)
    load_initial_checkpoint(init_checkpoint, FLAGS.init_checkpoint_strict)
    print_training_report(lowering, places={"checkpoints": f"{FLAGS.output_dir}, with logs"})
    # After the update, whose learning rate reads the step.
    with tf.control_dependencies([update]):
        train_op = tf.assign_add(tf.train.get_or_create_global_step(), 1)
    with outside_all_rewrites():
        saving = saver_hook(lowering, FLAGS.output_dir, FLAGS.save_checkpoints_steps)
    return estimator.tpu.TPUEstimatorSpec(
        estimator.ModeKeys.TRAIN,
        loss=loss,
        train_op=train_op,
        # The saver saves at once, from slices, which have to be copies of the masters by then.
        training_hooks=[restoring, saving],
    )


# -- programs


def require_flags(script: str, names: Sequence[str]) -> None:
    """Checks that required flags are set.

    Args:
      script: the name of the program.
      names: the names of the flags.

    Raises:
      ValueError: a flag is not set.
    """
    missing = [f"--{name}" for name in names if not getattr(FLAGS, name)]
    if missing:
        raise ValueError(f"{script}: {', '.join(missing)} must be given")


def read_config(max_seq_length: int) -> BertConfig:
    """Reads the configuration in --bert_config_file.

    Args:
      max_seq_length: the length of the sequences.

    Raises:
      ValueError: the file does not exist, or the model has fewer positions.
    """
    try:
        config = BertConfig.from_json_file(FLAGS.bert_config_file)
    except tf.errors.NotFoundError as error:
        raise ValueError(
            f"bert_config_file: there is no file {FLAGS.bert_config_file}; "
            "mesh_tensorflow/bert/config has several"
        ) from error
    check_positions(config, max_seq_length)
    return config


def check_positions(config: BertConfig, max_seq_length: int) -> None:
    """Checks that a model has positions for all of its sequences.

    Args:
      config: the configuration in --bert_config_file.
      max_seq_length: the length of the sequences.

    Raises:
      ValueError: the model has fewer positions.
    """
    positions = config.max_position_embeddings
    if config.position_signal == "embedding" and max_seq_length > positions:
        raise ValueError(
            f"Cannot use sequence length {max_seq_length} because the BERT model was only trained "
            f"up to sequence length {positions} (max_position_embeddings of "
            f"{FLAGS.bert_config_file}): pass --max_seq_length={positions} or less"
        )


def make_estimator(model_fn: Callable[..., Any], *modes: str) -> estimator.tpu.TPUEstimator:
    """Creates an estimator for the mesh and the sizes of batches given by flags.

    Args:
      model_fn: a model function.
      *modes: "train", "eval" or "predict": those whose batch size is a flag.
    """
    cluster = None
    if FLAGS.use_tpu and FLAGS.tpu_name:
        cluster = tf.distribute.cluster_resolver.TPUClusterResolver(
            FLAGS.tpu_name, zone=FLAGS.tpu_zone, project=FLAGS.gcp_project
        )
    config = estimator.tpu.RunConfig(
        cluster=cluster,
        master=FLAGS.master or None,
        model_dir=FLAGS.output_dir,
        # The model function has a hook that saves, once slices are copied to masters.
        save_checkpoints_steps=None,
        save_checkpoints_secs=None,
        tpu_config=estimator.tpu.TPUConfig(
            iterations_per_loop=FLAGS.iterations_per_loop, num_shards=_mesh_shape().size
        ),
    )
    return estimator.tpu.TPUEstimator(
        model_fn=model_fn,
        config=config,
        use_tpu=FLAGS.use_tpu,
        params={},
        **{f"{mode}_batch_size": FLAGS[f"{mode}_batch_size"].value for mode in modes},
    )


def training_steps(count: int, what: str) -> int:
    """Returns the number of steps of the epochs given by flags.

    Args:
      count: the number of examples.
      what: what they are, for the error.

    Raises:
      ValueError: there is none.
    """
    # Rounded down: a last batch that is not full makes no step.
    steps = math.floor(count / FLAGS.train_batch_size * FLAGS.num_train_epochs)
    if not steps:
        raise ValueError(
            f"training has no step: {count} {what}, --train_batch_size={FLAGS.train_batch_size} "
            f"and --num_train_epochs={FLAGS.num_train_epochs}"
        )
    tf.logging.info("Training on %d %s for %d steps", count, what, steps)
    return steps


def training_records(write: Callable[[str], Any]) -> str:
    """Returns the path of records to train on; writes them, unless --cached_train_file has them.

    Args:
      write: a function of the path.
    """
    cached = FLAGS.cached_train_file
    path = cached or os.path.join(FLAGS.output_dir, "train.tf_record")
    # What is left in the output directory may be of other flags: it is written again.
    if not (cached and tf.io.gfile.exists(cached)):
        write(path)
    return path


def evaluate(
    run: estimator.tpu.TPUEstimator,
    input_fn: Callable[[Any], Any],
    steps: Optional[int],
    name: str = "eval_results.txt",
) -> None:
    """Evaluates, and writes a file of the results.

    Args:
      run: an estimator.
      input_fn: an input function.
      steps: the number of batches.
      name: the name of the file.
    """
    result = run.evaluate(input_fn, steps=steps)
    with tf.io.gfile.GFile(os.path.join(FLAGS.output_dir, name), "w") as f:
        for key in sorted(result):
            tf.logging.info("  %s = %s", key, result[key])
            f.write(f"{key} = {result[key]}\n")


def predicted(
    run: estimator.tpu.TPUEstimator, input_fn: Callable[[Any], Any], count: int
) -> list[dict[str, Any]]:
    """Returns the first `count` predictions.

    Args:
      run: an estimator.
      input_fn: an input function.
      count: the number of predictions; any others belong to padding of the last batch.
    """
    predictions: Any = run.predict(input_fn)
    # The padding is never asked for, so the generator is closed, which closes its session.
    with contextlib.closing(predictions):
        return list(itertools.islice(predictions, count))
