"""Common parts of the transformer examples: flags, and training with transformer.utils."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import gin
import tensorflow.compat.v1 as tf
from absl import app, flags

import mesh_tensorflow as mtf
from mesh_tensorflow import estimator
from mesh_tensorflow.transformer import utils, vocabulary

# The tensor dimensions that --layout may split.
DIMENSIONS = ("batch", "heads", "d_ff", "vocab", "d_model")
MESH_IMPLS = ("placement", "simd")

Outcome = TypeVar("Outcome")


def option(default: Any, text: str) -> Any:
    """Returns a field of Options with the help text of its flag."""
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True)
class Options:
    """Command-line options; every field is a flag."""

    mesh_shape: str = option("rows:2;cols:2", "Dimensions of the mesh and their sizes.")
    layout: str = option(
        "batch:rows;heads:cols;d_ff:cols;vocab:cols",
        f"Which tensor dimension is split over which mesh dimension: {', '.join(DIMENSIONS)}.",
    )
    mesh_impl: str = option(
        "placement", "placement for one graph of all processors, simd for one program on each."
    )
    model_dir: str = option("", "Directory of checkpoints, to resume from; or none.")
    batch_size: int = option(0, "Sequences in a step, over all processors; 0 for the usual.")
    train_steps: int = option(0, "Steps in all, with those in --model_dir; 0 for the usual.")
    steps_per_checkpoint: int = option(
        0, "Steps from checkpoint to checkpoint, each of which is tested; 0 for the usual."
    )
    seed: int = option(0, "Seed of the order of examples.")
    quick: bool = option(False, "Fewer steps, in about half a minute, and a worse model.")

    def mesh(self) -> mtf.Shape:
        """Returns the shape of the mesh."""
        return mtf.Shape(list(mtf.convert_to_shape(self.mesh_shape) or []))

    def check(self) -> None:
        """Raises ValueError for invalid options."""
        for name in ("batch_size", "train_steps", "steps_per_checkpoint", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name} is {getattr(self, name)}: it has to be 0 or more")
        if self.mesh_impl not in MESH_IMPLS:
            raise ValueError(
                f"--mesh_impl is {self.mesh_impl!r}: choose one of {', '.join(MESH_IMPLS)}"
            )
        mesh_shape = self.mesh()
        rules = mtf.convert_to_layout_rules(self.layout)
        for name in rules.unknown_mesh_dimensions(mesh_shape):
            raise ValueError(
                f"--layout splits dimensions over {name!r}, but --mesh_shape has no such dimension:"
                f" it has {', '.join(mesh_shape.dimension_names) or 'none'}"
            )
        named = [rules.mesh_dimension_name_to_tensor_dimension_names(d.name) for d in mesh_shape]
        for mesh_dim, names in zip(mesh_shape, named):
            for name in sorted(set(names) - set(DIMENSIONS)):
                raise ValueError(
                    f"--layout splits {name!r} over {mesh_dim.name!r}, but the model has no "
                    f"dimension {name!r} to split: it has {', '.join(DIMENSIONS)}"
                )


# --- Training, testing and decoding ---


class Test(tf.train.CheckpointSaverListener):
    """Tests the checkpoints of a training run, and prints a line about each."""

    def __init__(self, every: int, last_step: int, test: Callable[[], str]) -> None:
        """Initializes the listener.

        Args:
          every: steps between tests; checkpoints saved in between, by a signal, are not tested.
          last_step: the step at which training ends.
          test: returns a description of the latest checkpoint.
        """
        self._every, self._last_step, self._test = every, last_step, test
        self._start, self._first = time.perf_counter(), True

    def after_save(self, session: tf.Session, global_step_value: int) -> None:
        """Tests the checkpoint, unless training starts from it."""
        is_due = not global_step_value % self._every or global_step_value == self._last_step
        if is_due and not self._first:
            said = self._test()
            seconds = time.perf_counter() - self._start
            if sys.stderr.isatty():  # the live progress line
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            step = f"step {global_step_value}/{self._last_step}"
            print(f"{step}  {said}  {seconds:.0f} s", flush=True)
        self._first = False


@dataclasses.dataclass(frozen=True)
class Model:
    """A model with its estimator, as utils.run creates them."""

    estimator: estimator.tpu.TPUEstimator
    vocabulary: vocabulary.ByteVocabulary
    sequence_length: dict[str, int]
    batch_size: int
    train_steps: int
    steps_per_checkpoint: int

    def train(self, examples: Callable[[], tf.data.Dataset], test: Callable[[], str]) -> bool:
        """Trains up to the last step, skipping the examples of earlier steps.

        Args:
          examples: creates the data set, always in the same order.
          test: returns a description of the latest checkpoint.

        Returns:
          Whether there were any steps left to train.
        """
        path = self.estimator.latest_checkpoint()
        start = utils.get_step_from_checkpoint_path(path) if path else 0
        if start >= self.train_steps:
            print(f"{self.estimator.model_dir} has been trained for {start} steps already")
            return False

        def input_fn(params: Any) -> tf.data.Dataset:
            batches = examples().batch(params["batch_size"], drop_remainder=True)
            return batches.skip(start).prefetch(2)

        listener = Test(self.steps_per_checkpoint, self.train_steps, test)
        self.estimator.train(input_fn, max_steps=self.train_steps, saving_listeners=[listener])
        return True

    def evaluate(self, examples: Callable[[], tf.data.Dataset], steps: int) -> dict[str, Any]:
        """Returns the metrics of the latest checkpoint on `steps` batches of examples."""

        def input_fn(params: Any) -> tf.data.Dataset:
            return examples().batch(params["batch_size"], drop_remainder=True)

        return self.estimator.evaluate(input_fn, steps=steps)

    def decode(self, inputs: Sequence[str], model_type: str) -> list[str]:
        """Decodes texts with the latest checkpoint."""
        length = self.sequence_length.get("inputs", self.sequence_length["targets"])
        ids = utils.encode_inputs(inputs, self.vocabulary, model_type, self.batch_size, length)

        def input_fn(params: Any) -> tf.data.Dataset:
            return tf.data.Dataset.from_tensor_slices({"inputs": ids}).batch(params["batch_size"])

        # The remaining rows are the padding of the last batch.
        return list(utils.decode(self.estimator, input_fn, self.vocabulary))[: len(inputs)]


def run(options: Options, gin_file: str, act: Callable[[Model], Outcome], **usual: int) -> Outcome:
    """Builds the model of a gin file on the mesh of the flags, and runs a function on it.

    Args:
      options: the flags.
      gin_file: the name of the gin file, in the directory of this file.
      act: the function to run on the model.
      **usual: defaults of batch_size, train_steps and steps_per_checkpoint.

    Returns:
      The result of `act`.
    """
    numbers = {name: getattr(options, name) or value for name, value in usual.items()}
    outcomes = []

    def train_model_fn(
        estimator: Any,
        vocabulary: Any,
        sequence_length: Any,
        batch_size: int,
        train_steps: int,
        **unused: Any,
    ) -> None:
        model = Model(
            estimator,
            vocabulary,
            sequence_length,
            batch_size,
            train_steps,
            numbers["steps_per_checkpoint"],
        )
        outcomes.append(act(model))

    processors = options.mesh().size
    bindings = {
        "mesh_shape": options.mesh_shape,
        "mesh_devices": [f"/device:CPU:{i}" for i in range(processors)],
        "mesh_impl": options.mesh_impl,
        "layout_rules": options.layout,
        "batch_size": numbers["batch_size"],
        "train_steps": numbers["train_steps"],
        "save_checkpoints_steps": numbers["steps_per_checkpoint"],
    }
    flags.FLAGS.set_default("gin_file", [str(pathlib.Path(__file__).with_name(gin_file))])
    utils.parse_gin_defaults_and_flags(finalize_config=False)
    for name, value in bindings.items():
        gin.bind_parameter(f"utils.run.{name}", value)
    gin.finalize()
    with contextlib.ExitStack() as stack:
        model_dir = options.model_dir or stack.enter_context(tempfile.TemporaryDirectory())
        utils.run(
            tpu_job_name=None,
            tpu=None,
            gcp_project=None,
            tpu_zone=None,
            model_dir=model_dir,
            vocabulary=vocabulary.ByteVocabulary(),
            train_model_fn=train_model_fn,
            keep_checkpoint_max=2,
        )
    return outcomes[0]


# --- The command ---


def says_loss_or_warns(record: logging.LogRecord) -> bool:
    """Returns whether to show a message: not those between steps, nor TensorFlow's plans."""
    if record.module == "deprecation":
        return False
    return record.levelno > logging.INFO or record.getMessage().startswith("loss = ")


def text_of(error: BaseException) -> str:
    """Returns the message of an error without the text that gin adds to it."""
    text = error.message if isinstance(error, tf.errors.OpError) else str(error)
    lines = [line for line in text.splitlines() if "In call to configurable" not in line]
    return "\n".join(lines)


def start_log() -> None:
    """Logs a line every 100 steps to standard error."""
    logger = tf.get_logger()
    logger.propagate = False  # absl's logger would print each line again
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(says_loss_or_warns)
    logger.handlers[:] = [handler]
    tf.logging.set_verbosity(tf.logging.INFO)


def command(make_options: type[Options], act: Callable[[Any], Any]) -> None:
    """Runs an example with the options of the flags, and reports mistakes in one line of text.

    Args:
      make_options: a subclass of Options.
      act: the function to run on the options.
    """
    # Registered as flags of the example, so that --help shows them.
    flags.disclaim_key_flags()
    define: dict[str, Callable[..., Any]] = {
        "int": flags.DEFINE_integer,
        "float": flags.DEFINE_float,
        "bool": flags.DEFINE_bool,
    }
    fields = dataclasses.fields(make_options)
    for field in fields:
        make = define.get(str(field.type), flags.DEFINE_string)
        make(field.name, field.default, field.metadata["help"])

    @mtf.strict()
    def main(argv: Sequence[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
        start_log()
        try:
            act(make_options(**{field.name: getattr(flags.FLAGS, field.name) for field in fields}))
        except estimator.NanLossError as error:
            sys.exit(f"error: {text_of(error)}. Try a lower rate in --gin_param")
        except (ValueError, OSError, SyntaxError, tf.errors.OpError) as error:
            sys.exit(f"error: {text_of(error)}")
        except KeyboardInterrupt as error:
            sys.exit(f"stopped: {text_of(error)}")

    app.run(main)
