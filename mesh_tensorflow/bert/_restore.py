"""Initializes variables from a pre-trained checkpoint."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow import checkpoint
from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._programs.saver_hook import SaverHook
from mesh_tensorflow.optimize._base import weights_of
from mesh_tensorflow.utils import outside_all_rewrites

__all__ = ["get_assignment_map_from_checkpoint", "load_initial_checkpoint"]


def get_assignment_map_from_checkpoint(
    tvars: Iterable[Any], init_checkpoint: str
) -> tuple[dict[str, str], dict[str, int]]:
    """Matches variables with the contents of a checkpoint.

    The global step and optimizer slots are not restored, since a new training begins.

    Args:
      tvars: tf variables.
      init_checkpoint: a checkpoint.

    Returns:
      (a dictionary from names in the checkpoint to names in the graph, for
      `tf.train.init_from_checkpoint`; a dictionary whose keys are the names of matched variables,
      with and without ":0").

    Raises:
      ValueError: the checkpoint does not exist, or has a variable of a different shape.
    """
    try:
        path = checkpoint_files.find(init_checkpoint, "init_checkpoint")
        saved = checkpoint_files.open_reader(path).get_variable_to_shape_map()
    except (tf.errors.OpError, ValueError) as error:
        raise ValueError(
            f"init_checkpoint: {init_checkpoint} is no checkpoint, such as model.ckpt-1000: {error}"
        ) from error
    assignment: dict[str, str] = collections.OrderedDict()
    initialized: dict[str, int] = {}
    by_name = {v.name.removesuffix(":0"): v for v in tvars}
    weights = set(weights_of(saved))
    for name, shape in sorted(saved.items()):
        if name not in by_name or name not in weights:
            continue
        ours = by_name[name].shape.as_list()
        if list(shape) != ours:
            raise ValueError(
                f"init_checkpoint: {init_checkpoint} has {name} of shape {list(shape)}, but in the "
                f"model it has {ours}; the configuration has to be that of the checkpoint"
            )
        assignment[name] = name
        initialized[name] = initialized[name + ":0"] = 1
    return assignment, initialized


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
    found, _ = get_assignment_map_from_checkpoint(tf.global_variables(), init_checkpoint)
    if not found:
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
        checkpoint.init_from_checkpoint(
            init_checkpoint, {v.op.name: v for v in tf.global_variables() if v.op.name in found}
        )


def checkpoint_hook(
    model_dir: Optional[str], save_steps: int, listener: tf.train.CheckpointSaverListener
) -> SaverHook:
    """Returns a hook that saves checkpoints of the masters.

    Args:
      model_dir: the directory of checkpoints.
      save_steps: the number of steps between checkpoints.
      listener: a MtfCheckpointSaverListener.
    """
    saver = checkpoint.Saver(
        tf.global_variables(),
        sharded=True,
        keep_checkpoint_every_n_hours=2,
        save_relative_paths=True,
    )
    tf.add_to_collection(tf.GraphKeys.SAVERS, saver)
    return SaverHook(model_dir, save_steps=save_steps, saver=saver, listeners=[listener])
