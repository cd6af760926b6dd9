"""Trains a convolutional network on handwritten digits, with each image split over a mesh.

    python examples/mnist.py
    python examples/mnist.py --mesh_shape="all:4" --layout="batch:all"
    python examples/mnist.py --layout=auto
    python examples/mnist.py --data_dir=mnist --download --train_epochs=5 --plot=mnist.png

An image of 28 by 28 pixels is cut into 4 by 4 blocks of 7 by 7 pixels. The default layout splits
the rows of blocks over one dimension of a 2 by 2 mesh and the columns over the other, so each
processor holds a quarter of every image. The convolutions exchange halos with neighboring
processors; the first dense layer sums over the pixels, and therefore over all processors.
Other layouts, such as "batch:b1;hidden1:b2", compute the same numbers.

On scikit-learn's digits, 40 epochs reach a test accuracy of 97.5 % to 98.1 % (seeds 0 to 4), in
about a minute on two cores. The learning rate warms up, then decays to 0. With a constant rate,
such as Adafactor's default of 1 % of a variable's size in each step, training does not converge:
Adafactor divides gradients by their size, so its steps stay large when gradients get small. The
loss stays at 0.02 to 0.03, with spikes up to 0.2, instead of 0.002; the accuracy jumps by up to 3
points between epochs and ends at 96.1 % to 96.9 % (seeds 0 to 2). Adam has no bias correction
here, so its first steps are large: at 0.001 without warmup, one of two runs stayed at 10 %.

`model_fn` is all that mesh_tensorflow.estimator needs to train, test and resume. With --model_dir,
`tensorboard --logdir` on that directory shows the training loss and the test results. SIGTERM or
Ctrl-C saves a checkpoint before the program ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

from absl import app, flags

sys.path.append(str(pathlib.Path(__file__).resolve().parent))

import command_line
from command_line import option


@dataclasses.dataclass(frozen=True)
class Options:
    """Command-line options; every field is a flag."""

    data_dir: str = option("", "Directory of MNIST's four files; if empty, scikit-learn's digits.")
    download: bool = option(False, "Fetch the files that are missing in --data_dir.")
    model_dir: str = option("", "Directory of each epoch's checkpoint, to resume from; or none.")
    batch_size: int = option(100, "Examples in a step, over all processors.")
    hidden_size: int = option(512, "Size of each of the two hidden layers.")
    train_epochs: int = option(40, "Epochs in all, with those in --model_dir.")
    epochs_between_evals: int = option(1, "Epochs from test to test.")
    eval_steps: int = option(0, "Batches of a test; 0 for the whole test set.")
    mesh_shape: str = option("b1:2;b2:2", "Dimensions of the mesh and their sizes.")
    layout: str = option(
        "row_blocks:b1;col_blocks:b2",
        "Which tensor dimension is split over which mesh dimension. Or auto, to try some and train "
        "with the fastest.",
    )
    mesh_impl: str = option("placement", "placement, or pjrt for the devices of JAX.")
    optimizer: str = option("adafactor", "One of adafactor, adam, sgd.")
    learning_rate: float = option(0.0, "Highest rate; 0 for the one that suits the optimizer.")
    max_shift: int = option(1, "Pixels that training images are moved by at random, at most.")
    seed: int = option(0, "Seed of the initial values and of the order of examples.")
    plot: str = option("", "PNG file for the curves and for which processor holds which pixels.")

    def check(self) -> None:
        """Raises ValueError for invalid options."""
        ones = ["batch_size", "hidden_size", "train_epochs", "epochs_between_evals"]
        zeros = ["eval_steps", "learning_rate", "max_shift", "seed"]
        for name, least in [*((name, 1) for name in ones), *((name, 0) for name in zeros)]:
            if not getattr(self, name) >= least:
                raise ValueError(f"--{name} is {getattr(self, name)}: it has to be {least} or more")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(
                f"--optimizer is {self.optimizer!r}: choose one of {', '.join(OPTIMIZERS)}"
            )
        if self.mesh_impl not in ("placement", "pjrt"):
            raise ValueError(f"--mesh_impl is {self.mesh_impl!r}: choose one of placement, pjrt")
        if self.plot and not pathlib.Path(self.plot).resolve().parent.is_dir():
            raise ValueError(f"--plot is {self.plot}: there is no such directory to put it in")


import mnist_checks
import mnist_dataset
import mnist_plot
import mnist_report
import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import estimator

AUTO = "auto"
BLOCKS = 4  # along each side of an image
BLOCK_SIZE = mnist_dataset.IMAGE_SIZE // BLOCKS
LOSS = "mnist_loss:0"

# For each optimizer: its constructor, which takes a learning rate, and a suitable learning rate.
OPTIMIZERS: dict[str, tuple[Callable[[Any], mtf.optimize.Optimizer], float]] = {
    "adafactor": (lambda rate: mtf.optimize.AdafactorOptimizer(learning_rate=rate), 0.03),
    "adam": (mtf.optimize.AdamWeightDecayOptimizer, 0.0006),
    "sgd": (mtf.optimize.SgdOptimizer, 0.1),
}


# --- The network ---


def network(images: mtf.Tensor, hidden_size: int) -> mtf.Tensor:
    """Returns the logits [batch, classes] of images.

    Args:
      images: [batch, row_blocks, col_blocks, row_size, col_size, one_channel].
      hidden_size: size of the hidden layers.
    """
    _, row_blocks, col_blocks, *_ = images.shape
    x = images
    for i in range(2):
        filters = mtf.Dimension(f"filters{i + 1}", 16)
        x = mtf.layers.conv2d_with_blocks(
            x, filters, [9, 9], h_blocks_dim=row_blocks, w_blocks_dim=col_blocks, name=f"conv{i}"
        )
        x = mtf.relu(x)
    x = mtf.reduce_mean(x, reduced_dim=x.shape[-1])
    pixels = x.shape[-4:]
    for i in range(2):
        hidden = mtf.Dimension(f"hidden{i + 1}", hidden_size)
        x = mtf.relu(mtf.layers.dense(x, hidden, reduced_dims=pixels, name=hidden.name))
        pixels = [hidden]
    classes = mtf.Dimension("classes", mnist_dataset.NUM_CLASSES)
    return mtf.layers.dense(x, classes, reduced_dims=pixels, name="logits")


def image_shape(batch_size: int) -> mtf.Shape:
    """Returns the shape of images as blocks of pixels; see `network`."""
    sizes = {
        "batch": batch_size,
        "row_blocks": BLOCKS,
        "col_blocks": BLOCKS,
        "row_size": BLOCK_SIZE,
        "col_size": BLOCK_SIZE,
        "one_channel": 1,
    }
    return mtf.Shape([mtf.Dimension(name, size) for name, size in sizes.items()])


def import_images(mesh: mtf.Mesh, images: tf.Tensor) -> mtf.Tensor:
    """Imports [batch, 28, 28] as blocks of pixels; see `network`."""
    shape = image_shape(int(images.shape[0]))
    batch, rows, cols, row_size, col_size, channel = shape
    given = mtf.Shape([batch, rows, row_size, cols, col_size, channel])
    x = mtf.import_tf_tensor(mesh, tf.reshape(images, given.to_integer_list), given)
    return mtf.transpose(x, shape)


def learning_rate(peak: float, total_steps: int) -> tf.Tensor:
    """Returns a learning rate that rises to `peak` in 50 steps, then decays to 0 at the end."""
    step = tf.cast(mtf.utils.steps_done(), tf.float32)
    warmup = max(1, min(50, total_steps // 10))
    return peak * tf.minimum((step + 1) / warmup, tf.maximum(0.0, 1 - step / total_steps))


def mesh_of(options: Options) -> Any:
    """Returns the mesh of --mesh_shape and --layout, on logical CPUs or on devices of JAX.

    While the layout is not chosen, it splits nothing.

    Raises:
      ValueError: the mesh shape or the layout is invalid.
    """
    mesh_shape = mtf.convert_to_shape(options.mesh_shape)
    layout = mtf.convert_to_layout_rules("" if options.layout == AUTO else options.layout)
    if options.mesh_impl == "pjrt":
        return mtf.GspmdMeshImpl(mesh_shape, layout)
    devices = [f"cpu:{i}" for i in range(mesh_shape.size)]
    return mtf.placement_mesh_impl.PlacementMeshImpl(
        mesh_shape, layout, devices, strict_layout=True
    )


def run_program(program: Callable[..., Any], inputs: list[tf.Tensor], mesh_impl: str) -> Any:
    """Returns what a program returns, as tensors and operations of the tf graph."""
    return mtf.pjrt.in_session(program, inputs) if mesh_impl == "pjrt" else program(*inputs)


def mean_loss(logits: mtf.Tensor, labels: tf.Tensor) -> mtf.Tensor:
    """Returns the mean loss of logits [batch, classes] and labels [batch]."""
    classes = logits.shape[-1]
    imported = mtf.import_tf_tensor(logits.mesh, labels, logits.shape - classes)
    targets = mtf.one_hot(imported, classes)
    return mtf.reduce_mean(mtf.layers.softmax_cross_entropy_with_logits(logits, targets, classes))


def training(loss: mtf.Tensor, options: Options, total_steps: int) -> list[mtf.Operation]:
    """Returns the updates of a training step."""
    variables = loss.graph.trainable_variables
    gradients = mtf.gradients([loss], [variable.outputs[0] for variable in variables])
    make_optimizer, usual_rate = OPTIMIZERS[options.optimizer]
    rate = learning_rate(options.learning_rate or usual_rate, total_steps)
    return make_optimizer(rate).apply_grads(gradients, variables)


def model_fn(
    features: dict[str, tf.Tensor],
    labels: Optional[tf.Tensor],
    mode: str,
    params: dict[str, Any],
    config: estimator.RunConfig,
) -> estimator.EstimatorSpec:
    """Builds and lowers the network and its training step or test.

    Args:
      features: "images" [batch, 28, 28] and, in tests, "counted" [batch], 0 for padding examples.
      labels: [batch]; None to predict.
      mode: TRAIN, EVAL or PREDICT.
      params: "options", the "total_steps" of training, and whether the layout is "shown".
      config: where and how often to save checkpoints.
    """
    options, lowerings = params["options"], []

    def program(images: tf.Tensor, *labels: tf.Tensor) -> dict[str, Any]:
        mesh, mesh_impl = mtf.Mesh(mtf.Graph(), "mnist"), mesh_of(options)
        logits = network(import_images(mesh, images), options.hidden_size)
        exported, updates = {"logits": logits}, []
        if labels:
            exported["loss"] = mean_loss(logits, *labels)
        if mode == estimator.ModeKeys.TRAIN:
            updates = training(exported["loss"], options, params["total_steps"])
        mnist_checks.check_layout(mesh.graph, mesh_impl)
        lowering = mtf.Lowering(mesh.graph, {mesh: mesh_impl})
        lowerings.append((lowering, mesh_impl))
        made = {name: lowering.export_to_tf_tensor(x) for name, x in exported.items()}
        return {**made, "update": tf.group([lowering.lowered_operation(op) for op in updates])}

    inputs = [features["images"], *([] if labels is None else [labels])]
    made = run_program(program, inputs, options.mesh_impl)
    lowering, mesh_impl = lowerings[-1]
    restore = mtf.MtfRestoreHook(lowering)
    predictions = tf.argmax(made["logits"], axis=1)
    if mode == estimator.ModeKeys.PREDICT:
        return estimator.EstimatorSpec(
            mode, predictions={"class": predictions}, prediction_hooks=[restore]
        )
    tf_loss = tf.identity(made["loss"], name=LOSS.split(":")[0])
    if mode == estimator.ModeKeys.EVAL:
        accuracy = tf.metrics.accuracy(labels, predictions, features["counted"])
        return estimator.EstimatorSpec(
            mode, loss=tf_loss, eval_metric_ops={"accuracy": accuracy}, evaluation_hooks=[restore]
        )
    with tf.control_dependencies([made["update"]]):
        train_op = tf.assign_add(tf.train.get_global_step(), 1)
    if params["shown"]:
        weights = list(lowering.graph.trainable_variables)
        print(mnist_plot.layout_text(lowering, mesh_impl, weights), flush=True)
    mnist_checks.check_checkpoint(config.model_dir)
    saver = mtf.checkpoint.Saver(tf.global_variables(), save_relative_paths=True)
    tf.add_to_collection(tf.GraphKeys.SAVERS, saver)
    save = tf.train.CheckpointSaverHook(
        config.model_dir,
        save_steps=config.save_checkpoints_steps,
        saver=saver,
        listeners=[mtf.MtfCheckpointSaverListener(lowering)],
    )
    return estimator.EstimatorSpec(
        mode, loss=tf_loss, train_op=train_op, training_chief_hooks=[restore, save]
    )


# --- Data ---


def train_input(data: mnist_dataset.Mnist, options: Options, start: int) -> tf.data.Dataset:
    """Returns the training batches from step `start` on, as in an uninterrupted run."""
    epoch, done = divmod(start, len(data.train_images) // options.batch_size)

    def batches() -> Iterator[Any]:
        for number in itertools.count(epoch):
            pairs = mnist_dataset.batches(
                data.train_images,
                data.train_labels,
                options.batch_size,
                options.seed,
                number,
                options.max_shift,
            )
            for images, labels in itertools.islice(pairs, done if number == epoch else 0, None):
                yield {"images": images}, labels

    size = options.batch_size
    image = [size, *[mnist_dataset.IMAGE_SIZE] * 2]
    signature = {"images": tf.TensorSpec(image, tf.float32)}, tf.TensorSpec([size], tf.int32)
    return tf.data.Dataset.from_generator(batches, output_signature=signature).prefetch(2)


def test_input(data: mnist_dataset.Mnist, options: Options) -> tf.data.Dataset:
    """Returns the batches of a test, in which each example is counted once.

    All batches have the same size: the last one is padded with examples that are not counted.
    """
    images, labels, size = data.test_images, data.test_labels, options.batch_size
    chosen = np.arange(-(-len(images) // size) * size)
    counted = (chosen < len(images)).astype(np.float32)
    chosen %= len(images)
    dataset = tf.data.Dataset.from_tensor_slices(
        ({"images": images[chosen], "counted": counted}, labels[chosen])
    )
    return dataset.batch(size, drop_remainder=True)


# --- Training ---


def estimator_of(
    data: mnist_dataset.Mnist, options: Options, model_dir: str, shown: bool = True
) -> estimator.Estimator:
    """Returns what trains and tests, and whether its layout is printed."""
    steps, mesh_impl = len(data.train_images) // options.batch_size, mesh_of(options)
    config = estimator.RunConfig(
        model_dir=model_dir,
        tf_random_seed=options.seed,
        session_config=mtf.session_config(mesh_impl.shape, mesh_impl.layout_rules),
        save_checkpoints_steps=steps,
        save_summary_steps=steps,
        log_step_count_steps=steps,
    )
    params = {"options": options, "total_steps": steps * options.train_epochs, "shown": shown}
    return estimator.Estimator(model_fn, config=config, params=params)


def with_layout(data: mnist_dataset.Mnist, options: Options, model_dir: str) -> Options:
    """Returns options whose --layout is chosen, if it is auto and there is something to train."""
    total = len(data.train_images) // options.batch_size * options.train_epochs
    if options.layout != AUTO or steps_done(model_dir) >= total:
        return options
    chosen = mtf.auto_mtf.layout_of_estimator(
        lambda layout: estimator_of(
            data, dataclasses.replace(options, layout=layout), model_dir, shown=False
        ),
        lambda: train_input(data, options, 0),
        options.mesh_shape,
        options.mesh_impl,
    )
    return dataclasses.replace(options, layout=chosen)


def train(data: mnist_dataset.Mnist, options: Options, model_dir: str) -> list[mnist_report.Epoch]:
    """Trains up to --train_epochs and returns the result of each epoch."""
    steps = len(data.train_images) // options.batch_size
    total = steps * options.train_epochs
    mnist = estimator_of(data, options, model_dir)

    def test() -> float:
        found = mnist.evaluate(lambda: test_input(data, options), options.eval_steps or None)
        return float(found["accuracy"])

    losses = mnist_report.Losses(LOSS)
    report = mnist_report.Report(
        steps, options.train_epochs, options.epochs_between_evals, losses, test
    )
    # A run that was stopped within an epoch first finishes it, then trains epoch by epoch.
    for stop in [-(-steps_done(model_dir) // steps) * steps, total]:
        start = steps_done(model_dir)
        if start < stop:
            batches = functools.partial(train_input, data, options, start)
            mnist.train(batches, [losses], max_steps=stop, saving_listeners=[report])
    return report.history


def steps_done(model_dir: str) -> int:
    """Returns the step of the latest checkpoint, or 0."""
    path = tf.train.latest_checkpoint(model_dir)
    return int(tf.train.load_variable(path, "global_step")) if path else 0


# --- The command ---


def run(options: Options) -> list[mnist_report.Epoch]:
    """Trains with the given options, prints progress, and returns the result of each epoch.

    Raises:
      ValueError, OSError: the options or the data are invalid.
    """
    options.check()
    data = mnist_dataset.load(options.data_dir, options.download)
    most = len(data.train_images)
    if options.batch_size > most:
        raise ValueError(f"--batch_size is {options.batch_size}: there are {most} examples")
    mesh_of(options)  # for its errors
    print(f"data     {data.source}: {most} for training, {len(data.test_images)} for test")
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        model_dir = options.model_dir or stack.enter_context(tempfile.TemporaryDirectory())
        options = with_layout(data, options, model_dir)
        # In several processes, the first one trains, on the devices of all.
        history = estimator.run_cluster(
            lambda: train(data, options, model_dir), estimator.RunConfig()
        )
    if history is None:
        return []
    if not history:
        print(f"{options.model_dir} has been trained for {options.train_epochs} epochs already")
        return history
    seconds = time.perf_counter() - start
    print(f"final test accuracy {history[-1].accuracy:.2%} after {seconds:.1f} s of training")
    command_line.tell_kept(options.model_dir, options.model_dir)
    if options.plot:
        owners = mnist_plot.tile_owners(image_shape(options.batch_size), mesh_of(options))
        mnist_plot.plot(options.plot, history, data.test_images[0], owners)
        print(f"plot in {options.plot}")
    return history


@mtf.strict()
def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    tf.logging.set_verbosity(tf.logging.WARN)
    tf.get_logger().propagate = False  # absl's logger would print each warning again
    names = [field.name for field in dataclasses.fields(Options)]
    try:
        run(Options(**{name: getattr(flags.FLAGS, name) for name in names}))
    except (ValueError, OSError, ImportError) as error:
        command_line.fail(error)
    except estimator.NanLossError as error:
        sys.exit(f"error: {error}. Try a smaller --learning_rate")


if __name__ == "__main__":
    command_line.define(command_line.table_of(Options))
    app.run(main)
