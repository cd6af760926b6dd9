"""What users of transformers say: flags, gin files, sizes, vocabularies, and which checkpoints."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.resources
import math
import operator
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Optional, Union

import gin
import numpy as np
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from absl import flags

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import estimator
from mesh_tensorflow._core.errors import check_choice
from mesh_tensorflow._mesh.tpu_topology import flag_value
from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._programs import FLAGS, Flag, define, explained_errors
from mesh_tensorflow.estimator import ModeKeys
from mesh_tensorflow.simd_mesh_impl import HierarchicalTiling

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.dataset import Vocabularies
    from mesh_tensorflow.transformer.vocabulary import Vocabulary


# -- flags, sizes and vocabularies


# The gin module of the functions of this package.
MODULE = "mesh_tensorflow.transformer.utils"

GIN_FLAGS: tuple[Flag, ...] = (
    (flags.DEFINE_multi_string, "gin_file", None, "Path to a Gin file."),
    (flags.DEFINE_multi_string, "gin_param", None, "Gin parameter binding."),
    (flags.DEFINE_list, "gin_location_prefix", [], "Gin file search path."),
)
define(GIN_FLAGS)
_GIN_PACKAGE = "mesh_tensorflow.transformer.gin"
_DEFAULTS = "defaults.gin"


class _LaterKeras(SimpleNamespace):
    """Functions that call those of a part of tf.keras, which is imported when one is called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Returns the function that stands for an optimizer or a schedule."""
        # Python asks for such names to learn what an object can do: having all would be wrong.
        if name.startswith("__"):
            raise AttributeError(name)

        def make(*args: Any, **kwargs: Any) -> Any:
            part: Any = tf2.keras
            for key in self.path:
                part = getattr(part, key)
            return getattr(part, name)(*args, **kwargs)

        make.__name__ = make.__qualname__ = name
        return make


def _import_gin_tf() -> None:
    """Imports gin.tf, which registers TensorFlow's functions for gin files, such as @tf.nn.relu.

    gin.tf itself imports tf.estimator, which TensorFlow no longer has, and Keras, which takes a
    second and 200 MB. Where Keras is not imported yet, it is when a file first uses it.
    """
    lacking = not hasattr(tf, "estimator")
    if lacking:
        estimator.install()
    keras = vars(tf2).get("keras")
    if "keras" not in sys.modules and "tf_keras" not in sys.modules:
        schedules = _LaterKeras(path=("optimizers", "schedules"))
        optimizers = _LaterKeras(path=("optimizers",), schedules=schedules)
        tf2.keras = SimpleNamespace(optimizers=optimizers)
    try:
        importlib.import_module("gin.tf.external_configurables")
    finally:
        # Gin keeps the functions that stand for Keras; all others get Keras itself again.
        tf2.keras = keras
        if lacking:
            estimator.uninstall()


_import_gin_tf()


def parse_gin_defaults_and_flags(
    skip_unknown: Union[bool, list[str], tuple[str, ...]] = False, finalize_config: bool = True
) -> None:
    """Reads `defaults.gin` of this package, then the files and parameters of the command line.

    The flags --gin_file and --gin_param may be repeated. Files are also searched for under
    --gin_location_prefix, and in this package.

    Args:
      skip_unknown: whether to ignore names that are not registered; or the names to ignore.
      finalize_config: whether to lock the configuration.

    Raises:
      ValueError: a name is unknown; the message has the nearest known ones. Or a file is not valid
        UTF-8; the message has the line.
      SyntaxError: a file or a parameter is no gin; the message has the line.
    """
    directory = importlib.resources.files(_GIN_PACKAGE)
    # The user's directories first: a file there goes before one of that name in the package.
    prefixes = [*FLAGS.gin_location_prefix, str(directory)]
    for prefix in prefixes:
        gin.add_config_file_search_path(prefix)
    with explained_errors(FLAGS.gin_file or (), prefixes):
        # An earlier call may have locked the configuration.
        with gin.unlock_config():
            # First, since of several bindings of a parameter the last one counts.
            gin.parse_config((directory / _DEFAULTS).read_text(), skip_unknown=skip_unknown)
            gin.parse_config_files_and_bindings(
                FLAGS.gin_file, FLAGS.gin_param, skip_unknown=skip_unknown, finalize_config=False
            )
        if finalize_config:
            gin.finalize()


# -- vocabularies, and lengths of features


def inputs_vocabulary(vocabulary: Vocabularies) -> Vocabulary:
    """Returns the vocabulary of inputs.

    Args:
      vocabulary: a Vocabulary, or a tuple (of inputs, of targets).

    Returns:
      A Vocabulary.
    """
    return vocabulary[0] if isinstance(vocabulary, tuple) else vocabulary


def targets_vocabulary(vocabulary: Vocabularies) -> Vocabulary:
    """Returns the vocabulary of targets.

    Args:
      vocabulary: a Vocabulary, or a tuple (of inputs, of targets).

    Returns:
      A Vocabulary.
    """
    return vocabulary[1] if isinstance(vocabulary, tuple) else vocabulary


@gin.configurable(module=MODULE)
def separate_vocabularies(
    inputs: Vocabulary = gin.REQUIRED, targets: Vocabulary = gin.REQUIRED
) -> tuple:
    """Returns a pair of vocabularies, for a gin file to bind to `utils.run.vocabulary`.

    Args:
      inputs: the Vocabulary of inputs.
      targets: the Vocabulary of targets.

    Returns:
      The tuple (inputs, targets).
    """
    return inputs, targets


Lengths = Union[int, Mapping[str, int]]

# By method of compute_batch_size: whether it counts tokens, and whether it is for each replica.
_METHODS = {
    "sequences_per_batch": (False, False),
    "tokens_per_batch": (True, False),
    "sequences_per_replica": (False, True),
    "tokens_per_replica": (True, True),
}


def longest(sequence_length: Lengths) -> int:
    """Returns the longest of the sequence lengths.

    Args:
      sequence_length: an integer, or a dictionary of them by feature.

    Returns:
      An integer.
    """
    if not isinstance(sequence_length, Mapping):
        return sequence_length
    return max(sequence_length.values())


def length_of_feature(sequence_length: Lengths, key: str) -> int:
    """Returns the length of a feature, looked up by its name up to the first "_".

    Args:
      sequence_length: an integer, or a dictionary of them by feature.
      key: the feature's name, such as "inputs_segmentation".

    Returns:
      An integer.

    Raises:
      ValueError: there is no length for it.
    """
    if not isinstance(sequence_length, Mapping):
        return sequence_length
    name = key.split("_")[0]
    if name not in sequence_length:
        raise ValueError(
            f"sequence_length={dict(sequence_length)} has no length for the feature {name!r}; give "
            "one, or one number for all"
        )
    return sequence_length[name]


def inputs_length(sequence_length: Lengths) -> int:
    """Returns the length of inputs, or that of targets if there is none for inputs.

    Args:
      sequence_length: an integer, or a dictionary of them by feature.

    Returns:
      An integer.
    """
    if isinstance(sequence_length, Mapping) and "inputs" not in sequence_length:
        return length_of_feature(sequence_length, "targets")
    return length_of_feature(sequence_length, "inputs")


# -- meshes, batches and microbatches


def _number_of_cores(topology: str) -> int:
    """Returns the number of processors of a TPU named such as "v3-8" or "4x4"."""
    # Names such as v3-8 count cores, and shapes such as 4x4 chips.
    if re.fullmatch(r"[^x]*-\d+", topology):
        return int(topology.rsplit("-", 1)[1])
    sizes = re.sub(r"_(un)?twisted$", "", topology)
    if not re.fullmatch(r"\d+(x\d+)*", sizes):
        raise ValueError(
            f"tpu_mesh_shape: tpu_topology={topology!r} names no TPU; it should be such as 'v3-8' "
            "or '4x4'. Without a TPU, bind utils.run.mesh_shape to a string such as "
            "'model:2,batch:4'"
        )
    return math.prod(map(int, sizes.split("x"))) * flag_value("logical_cores_per_chip")


@gin.configurable(module=MODULE)
def tpu_mesh_shape(
    tpu_topology: str = gin.REQUIRED,
    model_parallelism: Union[int, Sequence[Any]] = gin.REQUIRED,
    ensemble_parallelism: Optional[int] = None,
) -> mtf.Shape:
    """Returns a mesh for all processors of a TPU, with the dimensions ensemble, batch and model.

    Args:
      tpu_topology: such as "v3-8", where the last number counts cores, or "4x4", a grid of chips.
      model_parallelism: the number of processors that a model is split over; or a list such as
        [["batch", None], ["model", [2, 2]]], as HierarchicalTiling takes it.
      ensemble_parallelism: the number of processors that an ensemble is split over.

    Returns:
      A Shape, without dimensions of size 1.

    Raises:
      ValueError: the number of processors is not divisible accordingly.
    """
    cores = _number_of_cores(tpu_topology)
    if not isinstance(model_parallelism, int):
        return HierarchicalTiling.spec_to_mesh_shape(model_parallelism, cores)
    ensemble = ensemble_parallelism or 1
    if min(model_parallelism, ensemble) < 1 or cores % (model_parallelism * ensemble):
        raise ValueError(
            f"tpu_mesh_shape: the {cores} processors of {tpu_topology!r} cannot be divided by "
            f"model_parallelism={model_parallelism} times ensemble_parallelism={ensemble}; choose "
            f"numbers whose product divides {cores}"
        )
    batch = cores // (model_parallelism * ensemble)
    dims = [("ensemble", ensemble), ("batch", batch), ("model", model_parallelism)]
    return mtf.Shape([mtf.Dimension(name, size) for name, size in dims if size > 1])


def _splits(
    name: str, mesh_shape: Union[mtf.Shape, str], layout_rules: Union[mtf.LayoutRules, str]
) -> int:
    """Returns the number of slices that a layout splits a dimension into, whatever its size."""
    # Size 0 is divisible by each mesh dimension; the true one may be what is computed from this.
    return mtf.tensor_dim_to_mesh_dim_size(layout_rules, mesh_shape, mtf.Dimension(name, 0))


def compute_batch_size(
    sequence_length: Lengths,
    mesh_shape: Union[mtf.Shape, str],
    layout_rules: Union[mtf.LayoutRules, str],
    method_and_value: Union[int, tuple[str, int]],
) -> int:
    """Returns the number of sequences in a batch.

    Args:
      sequence_length: an integer, or a dictionary of them by feature; tokens are divided by the
        longest.
      mesh_shape: the mesh, which determines the number of replicas: the number of processors that
        the layout splits `batch` over, times that of `outer_batch`.
      layout_rules: the layout.
      method_and_value: an integer, or a pair (method, value), where method is
        "sequences_per_batch", "tokens_per_batch", "sequences_per_replica" or
        "tokens_per_replica".

    Returns:
      An integer.

    Raises:
      ValueError: the method is unknown, or the tokens are not divisible evenly.
    """
    if isinstance(method_and_value, int):
        return method_and_value
    method, value = method_and_value
    check_choice("compute_batch_size", "method", method, _METHODS)
    counts_tokens, per_replica = _METHODS[method]
    if counts_tokens:
        length = longest(sequence_length)
        if value % length:
            raise ValueError(
                f"compute_batch_size: {value} is not divisible by {length}, the longest of "
                f"sequence_length={sequence_length}; batch_size={method_and_value!r} should name a "
                "multiple of it"
            )
        value //= length
    if per_replica:
        # Processors with one part of the batch are a replica: there are as many as parts.
        value *= _splits("batch", mesh_shape, layout_rules)
        value *= _splits("outer_batch", mesh_shape, layout_rules)
    return value


@gin.configurable(module=MODULE)
def serialize_num_microbatches(
    batch_dim: mtf.Dimension,
    sequence_length: Lengths,
    mesh_shape: Union[mtf.Shape, str],
    layout_rules: Union[mtf.LayoutRules, str],
    tokens_per_microbatch_per_replica: Optional[int] = None,
) -> int:
    """Returns the number of microbatches of a batch, which are computed one after the other.

    Args:
      batch_dim: the batch.
      sequence_length: an integer, or a dictionary of them by feature; the longest counts.
      mesh_shape: the mesh.
      layout_rules: the layout.
      tokens_per_microbatch_per_replica: the maximum number of tokens of a microbatch on a
        processor, at least one sequence. If None, the batch is not divided.

    Returns:
      An integer that divides the processor's part of the batch.

    Raises:
      ValueError: the batch is not divisible by its number of slices.
    """
    if not tokens_per_microbatch_per_replica:
        return 1
    replicas = _splits(batch_dim.name, mesh_shape, layout_rules)
    if batch_dim.size % replicas:
        raise ValueError(
            f"serialize_num_microbatches: the batch {batch_dim.name}={batch_dim.size} is not "
            f"divisible by the {replicas} parts that the layout {layout_rules} splits it into on "
            f"the mesh {mesh_shape}; choose another utils.run.batch_size"
        )
    sequences = batch_dim.size // replicas
    at_once = max(1, tokens_per_microbatch_per_replica // longest(sequence_length))
    # The smallest divisor of `sequences` from this number on, as all microbatches have one size.
    number = math.ceil(sequences / at_once)
    # It ends with one sequence in each microbatch at the latest.
    while sequences % number:
        number += 1
    return number


@gin.configurable(module=MODULE)
def auto_train_steps(batch_size: int, sequence_length: Lengths, train_tokens: int = 2**36) -> int:
    """Returns the number of steps that train on `train_tokens` tokens.

    Args:
      batch_size: the number of sequences in a batch.
      sequence_length: an integer, or a dictionary of them by feature; the longest counts.
      train_tokens: the number of tokens.

    Returns:
      An integer.
    """
    return train_tokens // (batch_size * longest(sequence_length))


# Which variables are trained: all, those that a regular expression is found in, or by a function.
Filter = Union[str, Callable[[mtf.Variable], bool], None]


# -- settings of a program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of `tpu_estimator_model_fn`, see there; what its programs are made by."""

    model_type: str
    vocabulary: Vocabularies
    model_dir: Optional[str]
    mesh_shape: mtf.Shape
    layout_rules: mtf.LayoutRules
    batch_size: int
    sequence_length: Lengths
    autostack: bool
    keep_checkpoint_max: Optional[int]
    save_checkpoints_steps: Optional[int]
    learning_rate_schedule: Any
    optimizer: Any
    predict_fn: Optional[Callable[..., mtf.Tensor]]
    variable_filter: Filter
    init_checkpoint: Optional[str]
    ensemble_inputs: Optional[int]
    mesh_devices: Optional[Sequence[str]]
    mesh_impl: str
    use_tpu: Union[str, bool, None]
    score_in_predict_mode: bool
    transformer_model: Any
    outer_batch_size: int
    init_variable_filter: str
    init_checkpoint_strict: bool
    init_checkpoint_resize: Union[str, Sequence[str]]
    init_checkpoint_shrink: bool
    model_info_file: Optional[str]
    tpu_summaries: bool
    hierarchical_tiling_spec: Optional[Sequence[Any]]
    # The RunConfig of the estimator that calls the model function, if it passes one.
    config: Any = None
    # The TPUContext, if the model function is called inside the program of a TPUEstimator.
    context: Any = None

    def batch_dims(self, mode: str) -> list[mtf.Dimension]:
        """Returns the dimensions of a batch in a mode; the last one is `batch`."""
        sizes = {
            # Elsewhere all members of an ensemble get the same inputs.
            "ensemble": (self.ensemble_inputs or None) if mode == ModeKeys.TRAIN else None,
            "outer_batch": None if mode == ModeKeys.PREDICT else self.outer_batch_size,
        }
        sizes["batch"], rest = divmod(self.batch_size, sizes["outer_batch"] or 1)
        if rest:
            raise ValueError(
                f"tpu_estimator_model_fn: batch_size={self.batch_size} is not divisible by "
                f"outer_batch_size={sizes['outer_batch']}"
            )
        return [mtf.Dimension(name, size) for name, size in sizes.items() if size is not None]

    @property
    def joined_length(self) -> int:
        """The length of inputs followed by targets."""
        lengths = self.sequence_length
        if isinstance(lengths, Mapping) and "inputs" not in lengths:
            return length_of_feature(lengths, "targets")
        return inputs_length(lengths) + length_of_feature(lengths, "targets")


# -- which checkpoints


Steps = Union[int, str, Sequence[int], None]
LATEST = -1
_POLL_SECONDS = 1.0


def get_step_from_checkpoint_path(checkpoint_path: str) -> int:
    """Returns the step in the name of a checkpoint.

    Args:
      checkpoint_path: a path with "model.ckpt-<step>" in it.

    Returns:
      An integer.

    Raises:
      ValueError: there is no step in it.
    """
    match = re.search(r"model\.ckpt-(\d+)", checkpoint_path)
    if match is None:
        raise ValueError(
            f"Invalid checkpoint path {checkpoint_path}: it should have 'model.ckpt-<step>' in it"
        )
    return int(match.group(1))


def _path(model_dir: str, step: int) -> str:
    return os.path.join(model_dir, f"model.ckpt-{step}")


def _saved_steps(model_dir: str) -> list[int]:
    return [
        get_step_from_checkpoint_path(os.path.basename(p))
        for p in checkpoint_files.numbered(model_dir)
    ]


def _latest(model_dir: str) -> list[str]:
    path = checkpoint_files.latest(model_dir)
    if path is None:
        raise ValueError(f"get_checkpoint_iterator: No checkpoint files found in {model_dir}")
    return [path]


def _chosen(steps: Iterable[int], model_dir: str, find_closest: bool) -> list[str]:
    """Returns the checkpoints at or nearest to the given steps, in order and without duplicates."""
    steps = list(steps)
    if not steps:
        return []
    saved = _saved_steps(model_dir)
    if not saved:
        raise ValueError(f"get_checkpoint_iterator: No checkpoint files found in {model_dir}")
    if find_closest:
        # Of two at the same distance, the earlier one.
        chosen = {min(saved, key=lambda s: (abs(s - step), s)) for step in steps}
        for step in sorted(set(steps) - chosen):
            tf.logging.info("No checkpoint at step %d: using the nearest one.", step)
    else:
        chosen = set(steps) & set(saved)
    if not chosen:
        raise ValueError(
            f"You asked for checkpoints '{steps}' but none were found; {model_dir} has those of "
            f"steps {', '.join(map(str, saved))}"
        )
    return [_path(model_dir, step) for step in sorted(chosen)]


def _new_ones(model_dir: str, skip_until: int, stop_after: Optional[int]) -> Iterator[str]:
    """Yields each checkpoint as soon as it is written."""
    if checkpoint_files.latest(model_dir) is None:
        tf.logging.info(
            "Waiting for the first checkpoint in %s: a training that writes there makes one%s. "
            "Ctrl-C ends this",
            model_dir,
            "" if stop_after is None else f"; ends at that of step {stop_after}",
        )
    path = None
    while True:
        # Those that were written while the caller was at work are left out: it keeps up.
        before, path = path, checkpoint_files.latest(model_dir)
        if path is None or path == before:
            time.sleep(_POLL_SECONDS)
            continue
        step = get_step_from_checkpoint_path(path)
        if step > skip_until:
            yield path
        if stop_after is not None and step >= stop_after:
            return


@gin.configurable(module=MODULE)
def get_checkpoint_iterator(
    checkpoint_step: Steps,
    model_dir: str,
    skip_until: int = 0,
    stop_after: Optional[int] = None,
    find_closest: bool = True,
) -> Iterable[str]:
    """Returns paths of checkpoints.

    Args:
      checkpoint_step: a step or a list of steps; "all" for all existing checkpoints, in order; -1
        for the latest; None for the latest and all later ones, as they are written.
      model_dir: the directory of the checkpoints.
      skip_until: with "all" and None, skips checkpoints up to this step.
      stop_after: with None, stops after the first checkpoint at this step or a later one.
      find_closest: whether to take the checkpoint nearest to a step if there is none at that step.

    Returns:
      An iterable of strings.

    Raises:
      ValueError: there is no such checkpoint, or `checkpoint_step` is none of these.
    """
    if model_dir is None:
        raise ValueError("get_checkpoint_iterator: model_dir is None; give the directory")
    if checkpoint_step is None:
        return _new_ones(model_dir, skip_until, stop_after)
    if isinstance(checkpoint_step, str) and checkpoint_step == "all":
        return iter([_path(model_dir, s) for s in _saved_steps(model_dir) if s > skip_until])
    # NumPy's integers are steps too; its arrays also have an index, and are lists of steps.
    if hasattr(checkpoint_step, "__index__") and not np.ndim(checkpoint_step):
        step = operator.index(checkpoint_step)
        return _latest(model_dir) if step == LATEST else _chosen([step], model_dir, find_closest)
    if isinstance(checkpoint_step, (str, float)):
        raise ValueError(
            f"get_checkpoint_iterator: checkpoint_step={checkpoint_step!r} should be a step, a "
            "list of steps, 'all', -1 for the latest, or None for each new one"
        )
    steps: Any = checkpoint_step
    return _chosen(map(int, steps), model_dir, find_closest)
