"""Checkpoints in a model directory, and warm starts from other checkpoints."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow import checkpoint
from mesh_tensorflow._mesh.variables import checkpoint_files

__all__ = [
    "WarmStartSettings",
    "as_warm_start_settings",
    "find_checkpoint",
    "has_other_source",
    "load_global_step",
    "no_checkpoint_error",
    "saved_step",
    "warm_start",
]


class _WarmStartFields(NamedTuple):
    ckpt_to_initialize_from: str
    vars_to_warm_start: Any
    var_name_to_vocab_info: Any
    var_name_to_prev_var_name: Any


class WarmStartSettings(_WarmStartFields):
    """Which variables are initialized from a checkpoint of another model."""

    def __new__(
        cls,
        ckpt_to_initialize_from: str,
        vars_to_warm_start: Union[str, list[str], None] = ".*",
        var_name_to_vocab_info: Optional[Mapping[str, Any]] = None,
        var_name_to_prev_var_name: Optional[Mapping[str, str]] = None,
    ) -> WarmStartSettings:
        """Creates an instance.

        Args:
          ckpt_to_initialize_from: a checkpoint, or a directory of checkpoints.
          vars_to_warm_start: a regular expression for names of trainable variables, a list of
            regular expressions for names of any variables, or None for no variables.
          var_name_to_vocab_info: must be empty: vocabularies are not remapped.
          var_name_to_prev_var_name: names in the checkpoint that differ, by the name of the
            variable.

        Returns:
          a WarmStartSettings.

        Raises:
          ValueError: the path is empty, or vocabularies are given.
        """
        if not ckpt_to_initialize_from:
            raise ValueError("WarmStartSettings: ckpt_to_initialize_from is empty; name a path")
        if var_name_to_vocab_info:
            raise ValueError(
                "WarmStartSettings: var_name_to_vocab_info should be empty: embeddings are not "
                "remapped from one vocabulary to another. Leave these variables out by "
                "vars_to_warm_start, and give them an initializer"
            )
        return super().__new__(
            cls,
            os.fspath(ckpt_to_initialize_from),
            vars_to_warm_start,
            dict(var_name_to_vocab_info or {}),
            dict(var_name_to_prev_var_name or {}),
        )


def as_warm_start_settings(
    given: Union[str, os.PathLike[str], WarmStartSettings, None],
) -> Optional[WarmStartSettings]:
    """Converts the argument `warm_start_from` of an estimator to WarmStartSettings.

    Args:
      given: None, a path, or a WarmStartSettings.

    Returns:
      a WarmStartSettings, or None.

    Raises:
      ValueError: the path is empty.
      TypeError: `given` has another type.
    """
    if given is None or isinstance(given, WarmStartSettings):
        return given
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(
            f"warm_start_from should be a path or a WarmStartSettings, but is {given!r}"
        )
    path = os.fspath(given)
    if tf.io.gfile.exists(os.path.join(path, "saved_model.pb")):
        # A SavedModel has its variables in a checkpoint of this name.
        path = os.path.join(path, "variables", "variables")
    return WarmStartSettings(ckpt_to_initialize_from=path)


def warm_start(settings: WarmStartSettings) -> list[str]:
    """Has variables of the default graph initialized from a checkpoint.

    Args:
      settings: the checkpoint and the variables.

    Returns:
      the names of the variables.

    Raises:
      ValueError: there is no checkpoint, or it does not have all variables.
    """
    path = checkpoint_files.find(settings.ckpt_to_initialize_from, "warm start")
    saved = checkpoint_files.open_reader(path).get_variable_to_shape_map()
    variables = {v.op.name: v for v in _chosen(settings.vars_to_warm_start)}
    names = {name: settings.var_name_to_prev_var_name.get(name, name) for name in variables}
    lacking = sorted(old for old in names.values() if old not in saved)
    if lacking:
        raise ValueError(
            f"warm start from {path}: it has no {', '.join(lacking)}; it has "
            f"{', '.join(sorted(saved))}. Choose variables by vars_to_warm_start, or say what they "
            "are called there by var_name_to_prev_var_name"
        )
    if not names and settings.vars_to_warm_start is not None:
        raise ValueError(
            f"warm start from {path}: vars_to_warm_start={settings.vars_to_warm_start!r} is the "
            "name of no variable of the model, so that it would begin with random weights"
        )
    if names:
        wanted = {old: variables[new] for new, old in names.items()}
        checkpoint.choose_initial("warm start", path, wanted, wanted)
        checkpoint.init_from_checkpoint(path, wanted)
    return sorted(names)


def _chosen(patterns: Union[str, list[str], None]) -> list[Any]:
    """Returns variables of the default graph; for mtf variables, their masters."""
    if patterns is None:
        return []
    whole = tf.global_variables()
    if isinstance(patterns, str):
        trainable = {v.op.name for v in tf.trainable_variables()}
        return [v for v in whole if v.op.name in trainable and re.match(patterns, v.op.name)]
    return [v for v in whole if any(re.match(pattern, v.op.name) for pattern in patterns)]


def find_checkpoint(model_dir: str, checkpoint_path: Optional[str], called: str) -> Optional[str]:
    """Returns the checkpoint to evaluate, predict or export from.

    Args:
      model_dir: the model directory.
      checkpoint_path: the checkpoint that the caller gave, or None.
      called: the name of the method, for error messages.

    Returns:
      a path, or None if the directory has no checkpoint.

    Raises:
      ValueError: there is no checkpoint at `checkpoint_path`.
    """
    if checkpoint_path is None:
        return checkpoint_files.latest(model_dir)
    checkpoint_path = os.fspath(checkpoint_path)
    if not checkpoint_files.exists(checkpoint_path):
        there = checkpoint_files.latest(model_dir)
        raise ValueError(
            f"{called}: there is no checkpoint at checkpoint_path={checkpoint_path!r}; the latest "
            f"in the model directory is {there}"
        )
    return checkpoint_path


def has_other_source(scaffold: tf.train.Scaffold) -> bool:
    """Returns whether variables of the default graph get values other than by initializers.

    Args:
      scaffold: the Scaffold of the model.

    Returns:
      whether the scaffold has its own initialization, a variable is initialized from another
      checkpoint (tf.train.init_from_checkpoint), or there is no trainable variable.
    """
    if scaffold.init_fn is not None or scaffold.init_op is not None:
        return True
    restores = any(op.type == "RestoreV2" for op in tf.get_default_graph().get_operations())
    return restores or not tf.trainable_variables()


def no_checkpoint_error(model_dir: str, called: str) -> ValueError:
    """Returns the error for a model that was not trained.

    Args:
      model_dir: the model directory.
      called: the name of the method, for error messages.

    Returns:
      a ValueError.
    """
    return ValueError(
        f"{called}: there is no checkpoint in {model_dir}, so the variables would have initial "
        "values. Train first, or pass checkpoint_path=, or let model_fn fill them by "
        "tf.train.init_from_checkpoint or by the init_fn of a Scaffold"
    )


def load_global_step(checkpoint_dir: str) -> int:
    """Returns the global step of the latest checkpoint in a directory.

    Args:
      checkpoint_dir: a directory, which need not exist.

    Returns:
      a step; 0 if there is no checkpoint, or it has no global step.
    """
    return saved_step(checkpoint_dir) or 0


def saved_step(model_dir: str) -> Optional[int]:
    """Returns the global step of the latest checkpoint.

    Args:
      model_dir: a directory.

    Returns:
      a step; None if there is no checkpoint, or it has no global step.
    """
    path = checkpoint_files.latest(model_dir)
    if path is None:
        return None
    reader = checkpoint_files.open_reader(path)
    if not reader.has_tensor(tf.GraphKeys.GLOBAL_STEP):
        return None
    return int(reader.get_tensor(tf.GraphKeys.GLOBAL_STEP))
