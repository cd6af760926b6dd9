r"""Trains a small stack of dense layers on random numbers, with a TPUEstimator.

    python examples/toy_model_tpu.py
    python examples/toy_model_tpu.py --mesh_shape="rows:2;cols:2" --layout="batch:rows;hidden:cols"
    python examples/toy_model_tpu.py --use_tpu --mesh_shape="rows:2;cols:2" --layout=auto
    python -m mesh_tensorflow.launch --processes 4 examples/toy_model_tpu.py --use_tpu \
        --mesh_shape="rows:2;cols:2" --layout="batch:rows;hidden:cols"
    python examples/toy_model_tpu.py --model_dir=toy --train_steps=400 && \
        python examples/toy_model_tpu.py --model_dir=toy --train_steps=800

The network learns to reproduce its input, which is random in each step. The processors of the mesh
are logical CPUs of this process: each executes its part of one graph, or, with --use_tpu, all run
the same program, like the cores of a TPU. With --mesh_impl=pjrt, they are devices of JAX. With
several processes, processors are divided evenly. With --layout=auto, some layouts are tried first,
and the fastest is what training goes on with.
"""

from __future__ import annotations

import logging
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parent))

import command_line
from absl import app, flags

FLAGS = flags.FLAGS

_DTYPES = ["float32", "bfloat16", "float64"]
_FLAGS: list[command_line.Flag] = [
    (flags.DEFINE_integer, "batch_size", 64, "Examples in a step, over all processors."),
    (flags.DEFINE_integer, "io_size", 16, "Size of inputs and outputs, in each dimension."),
    (flags.DEFINE_integer, "hidden_size", 16, "Size of the hidden layers, in each dimension."),
    (flags.DEFINE_integer, "num_hidden_layers", 1, "Number of hidden layers."),
    (flags.DEFINE_integer, "iterations", 100, "Steps from one line about the loss to the next."),
    (flags.DEFINE_integer, "train_steps", 1000, "Steps in all, with those in --model_dir."),
    (flags.DEFINE_integer, "eval_steps", 10, "Batches of the test at the end."),
    (flags.DEFINE_integer, "steps_per_checkpoint", 200, "Steps from checkpoint to checkpoint."),
    (flags.DEFINE_integer, "step_with_nan", 0, "Step whose loss is made NaN, to see what then."),
    (flags.DEFINE_integer, "seed", 0, "Seed of the initial values and of the data."),
    (flags.DEFINE_string, "mesh_shape", "all:8", "Dimensions of the mesh and their sizes."),
    (flags.DEFINE_string, "layout", "hidden:all", "Which dimension is split over which, or auto."),
    (flags.DEFINE_string, "optimizer", "adafactor", "adafactor, or sgd."),
    (flags.DEFINE_float, "lr", 0.0, "Learning rate; 0 for the one that suits the optimizer."),
    (flags.DEFINE_string, "master_dtype", "float32", f"How variables are saved: {_DTYPES}."),
    (flags.DEFINE_string, "slice_dtype", "float32", f"How variables are held: {_DTYPES}."),
    (flags.DEFINE_string, "activation_dtype", "float32", f"How layers compute: {_DTYPES}."),
    (flags.DEFINE_string, "model_dir", "", "Directory of checkpoints, to resume; if empty, none."),
    (flags.DEFINE_string, "log_file", "", "File that gets the lines too."),
    (flags.DEFINE_bool, "use_tpu", False, "Whether all processors run one program."),
    (flags.DEFINE_string, "mesh_impl", "", "pjrt for the devices of JAX; else, see --use_tpu."),
    (flags.DEFINE_string, "tpu", "", "Name or address of the TPU, for --use_tpu."),
    (flags.DEFINE_string, "tpu_zone", "", "Zone of the TPU, for --use_tpu."),
    (flags.DEFINE_string, "gcp_project", "", "Project of the TPU, for --use_tpu."),
]


import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import estimator
from mesh_tensorflow.estimator import tpu


def optimizer_of(name: str, rate: float) -> mtf.optimize.Optimizer:
    """Returns an optimizer, with its default learning rate if `rate` is 0."""
    if name == "sgd":
        return mtf.optimize.SgdOptimizer(rate or 0.5)
    return mtf.optimize.AdafactorOptimizer(learning_rate=rate or 0.02)


def toy_model(x: mtf.Tensor, params: dict[str, Any]) -> mtf.Tensor:
    """Applies dense layers to [batch, io]; returns a tensor of the same shape."""
    io = x.shape[-1]
    dtype = mtf.VariableDType(
        *(tf.as_dtype(params[f"{kind}_dtype"]) for kind in ["master", "slice", "activation"])
    )
    h, reduced = x, io
    for i in range(params["num_hidden_layers"]):
        # Consecutive layers have different dimension names; the layout splits one of them.
        hidden = mtf.Dimension("hidden" if i % 2 == 0 else "hidden_2", params["hidden_size"])
        h = mtf.layers.dense(
            h,
            [hidden],
            reduced_dims=[reduced],
            use_bias=False,
            activation=mtf.relu,
            variable_dtype=dtype,
            name=f"hidden_{i}",
        )
        reduced = hidden
    return mtf.layers.dense(
        h, [io], reduced_dims=[reduced], use_bias=False, variable_dtype=dtype, name="output"
    )


def model_fn(
    features: tf.Tensor,
    labels: tf.Tensor,
    mode: str,
    params: dict[str, Any],
    config: tpu.RunConfig,
) -> tpu.TPUEstimatorSpec:
    """Builds and lowers the network and its training step or test.

    Args:
      features: [batch, io].
      labels: [batch, io].
      mode: TRAIN or EVAL.
      params: the flags, and "batch_size".
      config: where and how often to save checkpoints.
    """
    global_step = tf.train.get_global_step()
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "toy")
    shape = [mtf.Dimension("batch", params["batch_size"]), mtf.Dimension("io", params["io_size"])]
    dtype = tf.as_dtype(params["activation_dtype"])
    x = mtf.import_tf_tensor(mesh, tf.cast(features, dtype), shape)
    target = mtf.import_tf_tensor(mesh, tf.cast(labels, dtype), shape)
    y = toy_model(x, params)
    loss = mtf.reduce_mean(mtf.square(mtf.cast(y - target, tf.float32)))
    updates: list[Any] = []
    if mode == estimator.ModeKeys.TRAIN:
        gradients = mtf.gradients([loss], [v.outputs[0] for v in graph.trainable_variables])
        optimizer = optimizer_of(params["optimizer"], params["lr"])
        updates = optimizer.apply_grads(gradients, graph.trainable_variables)
    lowering = mtf.Lowering(graph, {mesh: mesh_of(params)})
    tf_loss = tf.cast(lowering.export_to_tf_tensor(loss), tf.float32)
    with mtf.utils.outside_all_rewrites():
        restore = mtf.MtfRestoreHook(lowering)
    if mode == estimator.ModeKeys.TRAIN:
        mtf.visualize.print_training_report(lowering)
    if mode == estimator.ModeKeys.EVAL:
        return tpu.TPUEstimatorSpec(mode, loss=tf_loss, evaluation_hooks=[restore])
    if params["step_with_nan"] >= 1:
        is_nan = tf.equal(global_step.read_value() + 1, params["step_with_nan"])
        tf_loss = tf.where(is_nan, float("nan"), tf_loss)
    # The step is incremented last: the optimizer and the lines above read it first.
    done = [tf_loss, *(lowering.lowered_operation(update) for update in updates)]
    with tf.control_dependencies(done):
        train_op = tf.assign_add(global_step, 1)
    with mtf.utils.outside_all_rewrites():
        saver = tf.train.Saver(tf.global_variables(), save_relative_paths=True)
        tf.add_to_collection(tf.GraphKeys.SAVERS, saver)
        save = tf.train.CheckpointSaverHook(
            config.model_dir,
            save_steps=config.save_checkpoints_steps,
            saver=saver,
            listeners=[mtf.MtfCheckpointSaverListener(lowering)],
        )
    return tpu.TPUEstimatorSpec(
        mode, loss=tf_loss, train_op=train_op, training_hooks=[restore, save]
    )


def mesh_of(params: dict[str, Any]) -> Any:
    """Returns the mesh of --mesh_shape and --layout."""
    shape = mtf.convert_to_shape(params["mesh_shape"])
    if params["mesh_impl"] == "pjrt":
        return mtf.GspmdMeshImpl(shape, params["layout"])
    if params["use_tpu"]:
        return mtf.simd_mesh_impl.SimdMeshImpl(shape, params["layout"])
    devices = [f"cpu:{i}" for i in range(shape.size)]
    return mtf.placement_mesh_impl.PlacementMeshImpl(shape, params["layout"], devices)


def input_of(seed: int, start: int) -> Any:
    """Returns an input function; its random numbers depend only on the seed and the step."""

    def input_fn(params: dict[str, Any]) -> tf.data.Dataset:
        shape = [params["batch_size"], params["io_size"]]

        def batch(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            x = tf.random.stateless_uniform(shape, tf.stack([tf.cast(seed, tf.int64), step]))
            return x, x

        return tf.data.Dataset.range(start, np.iinfo(np.int64).max).map(batch)

    return input_fn


def config_of(params: dict[str, Any], model_dir: str, use_tpu: bool) -> tpu.RunConfig:
    """Returns the RunConfig of the flags."""
    resolver = None
    if use_tpu and not params["mesh_impl"] and FLAGS.tpu:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(
            tpu=FLAGS.tpu, zone=FLAGS.tpu_zone or None, project=FLAGS.gcp_project or None
        )
    processors = mtf.convert_to_shape(params["mesh_shape"]).size
    return tpu.RunConfig(
        cluster=resolver,
        model_dir=model_dir,
        tf_random_seed=params["seed"],
        session_config=None if use_tpu else tf.ConfigProto(device_count={"CPU": processors}),
        save_checkpoints_steps=params["steps_per_checkpoint"],
        log_step_count_steps=params["iterations"],
        tpu_config=tpu.TPUConfig(
            iterations_per_loop=params["iterations"],
            num_shards=processors,
            mesh_impl=params["mesh_impl"] or "simd",
        ),
    )


def run(params: dict[str, Any], config: tpu.RunConfig, use_tpu: bool) -> dict[str, Any]:
    """Trains and tests, and returns the test results."""
    size, seed = params.pop("batch_size"), params["seed"]

    def toy_of(layout: str) -> tpu.TPUEstimator:
        return tpu.TPUEstimator(
            model_fn,
            config=config,
            params={**params, "layout": layout},
            use_tpu=use_tpu,
            train_batch_size=size,
            eval_batch_size=size,
        )

    auto = params["layout"] == "auto"
    toy = toy_of("" if auto else params["layout"])
    path = toy.latest_checkpoint()
    start = int(toy.get_variable_value("global_step")) if path else 0
    if start >= params["train_steps"]:
        print(f"{toy.model_dir} has been trained for {start} steps already")
    else:
        if auto:
            impl = params["mesh_impl"] or ("simd" if use_tpu else "placement")
            toy = toy_of(
                mtf.auto_mtf.layout_of_estimator(
                    toy_of, input_of(seed, 0), params["mesh_shape"], impl
                )
            )
        toy.train(input_of(seed, start), max_steps=params["train_steps"])
    # Another seed gives data that training has not seen.
    return toy.evaluate(input_of(seed + 1, 0), steps=params["eval_steps"])


def check(params: dict[str, Any]) -> None:
    """Raises ValueError for invalid flags."""
    for name in [
        "batch_size",
        "io_size",
        "hidden_size",
        "num_hidden_layers",
        "iterations",
        "train_steps",
        "eval_steps",
        "steps_per_checkpoint",
    ]:
        if params[name] < 1:
            raise ValueError(f"--{name} is {params[name]}: it has to be 1 or more")
    for name in ["master_dtype", "slice_dtype", "activation_dtype"]:
        if params[name] not in _DTYPES:
            raise ValueError(f"--{name} is {params[name]!r}: choose one of {', '.join(_DTYPES)}")
    if params["mesh_impl"] not in ("", "pjrt"):
        raise ValueError(f"--mesh_impl is {params['mesh_impl']!r}: choose pjrt, or leave it out")
    if params["layout"] == "auto" and params["tpu"]:
        raise ValueError("--layout=auto with --tpu: layouts are tried on devices of this process")
    if params["optimizer"] not in ("adafactor", "sgd"):
        raise ValueError(f"--optimizer is {params['optimizer']!r}: choose adafactor or sgd")


def says_loss_or_warns(record: logging.LogRecord) -> bool:
    """Returns whether to show a message: only losses and warnings."""
    return record.levelno > logging.INFO or record.getMessage().startswith("loss = ")


def start_log(path: str) -> None:
    """Logs a line every --iterations steps to standard error and, if named, to a file."""
    logger = tf.get_logger()
    logger.propagate = False  # absl's logger would print each line again
    logger.handlers[:] = [logging.StreamHandler(sys.stderr)]
    if path:
        logger.addHandler(logging.FileHandler(path))
    for handler in logger.handlers:
        handler.setFormatter(logging.Formatter("%(message)s"))
        handler.addFilter(says_loss_or_warns)
    tf.logging.set_verbosity(tf.logging.INFO)


@mtf.strict()
def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    params = {name: FLAGS[name].value for _, name, _, _ in _FLAGS}
    try:
        check(params)
        start_log(FLAGS.log_file)
        with tempfile.TemporaryDirectory() as scratch:
            one_program = FLAGS.use_tpu or FLAGS.mesh_impl == "pjrt"
            config = config_of(params, FLAGS.model_dir or scratch, one_program)
            # The first process runs everything, on the devices of all processes.
            results = estimator.run_cluster(lambda: run(params, config, one_program), config)
    except estimator.NanLossError as error:
        sys.exit(f"error: {error}")
    except (ValueError, OSError, RuntimeError) as error:
        command_line.fail(error)
    if results is not None:
        print(f"step {results['global_step']}  test loss {results['loss']:.6f}")
        command_line.tell_kept(FLAGS.model_dir, FLAGS.model_dir)


if __name__ == "__main__":
    command_line.define(_FLAGS)
    app.run(main)
