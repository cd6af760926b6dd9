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
from typing import Any, Optional, TypeVar

import command_line
import gin
import tensorflow.compat.v1 as tf
from absl import app, flags
from transformer_options import AUTO, DIMENSIONS, MESH_IMPLS, NAMED_BY, Options

import mesh_tensorflow as mtf
from mesh_tensorflow import estimator
from mesh_tensorflow.transformer import transformer, utils, vocabulary

Outcome = TypeVar("Outcome")


def mesh_of(options: Options) -> mtf.Shape:
    """Returns the shape of the mesh."""
    return mtf.Shape(list(mtf.convert_to_shape(options.mesh_shape) or []))


def given_rules(options: Options) -> Optional[mtf.LayoutRules]:
    """Returns the layout rules, or None where the layout is chosen by steps of training."""
    return None if options.rules == AUTO else mtf.convert_to_layout_rules(options.rules)


def zero_axis(options: Options) -> str:
    """Returns the name of the mesh dimension that splits the batch, or an empty string."""
    rules = mtf.convert_to_layout_rules(options.rules)
    found = rules.tensor_dimension_to_mesh_axis(mtf.Dimension("batch", 0), mesh_of(options))
    return "" if found is None else mesh_of(options).dims[found].name


def check_pipeline(options: Options) -> None:
    """Raises ValueError if there are stages without a layout rule, or a rule without stages."""
    if options.pipeline < 0:
        raise ValueError(f"--pipeline is {options.pipeline}: it has to be 0 or more")
    split = "stages" in dict(mtf.convert_to_layout_rules(options.rules).pairs)
    if options.pipeline and not split:
        raise ValueError(
            f"--pipeline={options.pipeline} puts stages on processors by the rule stages:NAME, "
            f"which --layout={options.rules} lacks: add it"
        )
    if split and not options.pipeline:
        raise ValueError(
            f"--layout={options.rules} splits stages, but the model has none: add --pipeline=2"
        )


def check(options: Options) -> None:
    """Raises ValueError for invalid options."""
    for name in ("batch_size", "train_steps", "steps_per_checkpoint", "seed"):
        if getattr(options, name) < 0:
            raise ValueError(f"--{name} is {getattr(options, name)}: it has to be 0 or more")
    if options.mesh_impl not in MESH_IMPLS:
        raise ValueError(
            f"--mesh_impl is {options.mesh_impl!r}: choose one of {', '.join(MESH_IMPLS)}"
        )
    rules, mesh_shape = given_rules(options), mesh_of(options)
    if rules is None:
        if options.zero or options.pipeline:
            name = "zero" if options.zero else "pipeline"
            raise ValueError(
                f"--layout=auto with --{name}: it is a layout that says what is stored in parts, "
                "and which stages are where. Give a layout, or leave it out"
            )
        return
    for name in rules.unknown_mesh_dimensions(mesh_shape):
        raise ValueError(
            f"--layout splits dimensions over {name!r}, but --mesh_shape has no such dimension:"
            f" it has {', '.join(mesh_shape.dimension_names) or 'none'}"
        )
    if options.zero not in range(4):
        raise ValueError(f"--zero is {options.zero}: a stage is 1, 2 or 3, and 0 is for none")
    if options.zero and not zero_axis(options):
        raise ValueError(
            f"--zero={options.zero} stores parts over the mesh dimension that splits the batch, "
            f"but --layout={options.rules} does not split it: add batch:NAME"
        )
    check_pipeline(options)
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


def run(
    options: Options, gin_file: str, act: Callable[[Model], Outcome], **usual: int
) -> Optional[Outcome]:
    """Builds the model of a gin file on the mesh of the flags, and runs a function on it.

    Args:
      options: the flags.
      gin_file: the name of the gin file, in the directory of this file.
      act: the function to run on the model.
      **usual: defaults of batch_size, train_steps and steps_per_checkpoint.

    Returns:
      The result of `act`; None in the processes that only lend their devices.
    """
    numbers = {name: getattr(options, name) or value for name, value in usual.items()}
    outcomes = []

    def train_model_fn(
        estimator: Any,
        vocabulary: Any,
        sequence_length: Any,
        batch_size: int,
        train_dataset_fn: Any,
        train_steps: int,
        *unused: Any,
        **unused_named: Any,
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

    devices = [f"/device:CPU:{i}" for i in range(mesh_of(options).size)]
    bindings = {
        "mesh_shape": options.mesh_shape,
        "mesh_devices": None if options.mesh_impl == "pjrt" else devices,
        "mesh_impl": options.mesh_impl,
        "layout_rules": options.rules,
        "batch_size": numbers["batch_size"],
        "train_steps": numbers["train_steps"],
        "save_checkpoints_steps": numbers["steps_per_checkpoint"],
    }
    flags.FLAGS.set_default("gin_file", [str(pathlib.Path(__file__).with_name(gin_file))])
    utils.parse_gin_defaults_and_flags(finalize_config=False)
    for name, value in bindings.items():
        gin.bind_parameter(f"utils.run.{name}", value)
    if options.zero:
        gin.bind_parameter("stored_layout.zero", options.zero)
        gin.bind_parameter("stored_layout.zero_axis", zero_axis(options))
    rules = given_rules(options)
    split = set() if rules is None else {name for name, _ in rules.pairs}
    for name, (parameter, value) in NAMED_BY.items():
        if name in split:
            gin.bind_parameter(parameter, value)
    if options.pipeline:
        stack = transformer.PipelinedLayerStack
        gin.bind_parameter("make_layer_stack.layer_stack_cls", stack)
        gin.bind_parameter("PipelinedLayerStack.num_stages", options.pipeline)
    if options.ring:
        gin.bind_parameter("SelfAttention.attention_kwargs", {"ring": True})
    gin.finalize()
    with contextlib.ExitStack() as contexts:
        model_dir = options.model_dir or contexts.enter_context(tempfile.TemporaryDirectory())
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
    command_line.tell_kept(options.model_dir, options.model_dir)
    return outcomes[0] if outcomes else None  # in the chief only, if there are several processes


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
    command_line.define(command_line.table_of(make_options))
    fields = dataclasses.fields(make_options)

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
            command_line.fail(text_of(error))
        except KeyboardInterrupt as error:
            sys.exit(f"stopped: {text_of(error)}")

    app.run(main)
