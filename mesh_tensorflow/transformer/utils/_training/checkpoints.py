"""Checkpoints of models: paths, steps, the variables that are loaded, and mapped names."""

from __future__ import annotations

import operator
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Optional, Union

import gin
import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow.transformer.utils._flags import MODULE

Filter = Union[str, Callable[[mtf.Variable], bool], None]


@gin.configurable(module=MODULE)
def get_variable_dtype(
    master_dtype: Union[tf.DType, str] = tf.bfloat16,
    slice_dtype: Union[tf.DType, str] = tf.float32,
    activation_dtype: Union[tf.DType, str] = tf.float32,
) -> mtf.VariableDType:
    """Returns the dtypes of a model's variables and activations.

    Args:
      master_dtype: the dtype of masters and checkpoints; a tf.DType or its name.
      slice_dtype: the dtype of slices, in which variables are updated.
      activation_dtype: the dtype of activations.

    Returns:
      A VariableDType.
    """
    return mtf.VariableDType(
        tf.as_dtype(master_dtype), tf.as_dtype(slice_dtype), tf.as_dtype(activation_dtype)
    )


@gin.configurable(module=MODULE)
def variable_filter_max_size(v: mtf.Variable, max_size: float = 1e7) -> bool:
    """Returns whether a variable is small enough to be trained, as a `variable_filter`.

    Args:
      v: a Variable.
      max_size: the largest number of elements.

    Returns:
      A bool.
    """
    return v.size <= max_size


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


def trained_variables(graph: mtf.Graph, variable_filter: Filter) -> list[mtf.Variable]:
    """Returns the variables to train.

    Args:
      graph: a Graph.
      variable_filter: None for all that are trainable, a regular expression that is searched for
        in their names, or a function of a Variable.

    Returns:
      A list of Variables.

    Raises:
      ValueError: the filter leaves none.
    """
    if variable_filter is None:
        return list(graph.trainable_variables)
    if isinstance(variable_filter, str):
        found = [v for v in graph.trainable_variables if re.search(variable_filter, v.name)]
    else:
        found = [v for v in graph.trainable_variables if variable_filter(v)]
    if not found:
        names = ", ".join(v.name for v in graph.trainable_variables[:10])
        raise ValueError(
            f"variable_filter={variable_filter!r} leaves no variable to train; the model has "
            f"{len(graph.trainable_variables)}: {names}, ..."
        )
    tf.logging.info(
        "Training %d of %d variables: %s",
        len(found),
        len(graph.trainable_variables),
        ", ".join(v.name for v in found),
    )
    return found


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
        found = {min(saved, key=lambda s: (abs(s - step), s)) for step in steps}
        for step in sorted(set(steps) - found):
            tf.logging.info("No checkpoint at step %d: using the nearest one.", step)
    else:
        found = set(steps) & set(saved)
    if not found:
        raise ValueError(
            f"You asked for checkpoints '{steps}' but none were found; {model_dir} has those of "
            f"steps {', '.join(map(str, saved))}"
        )
    return [_path(model_dir, step) for step in sorted(found)]


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


_LAYER = re.compile(r"(?P<stack>.*?)/(?:block_(?P<block>\d+)/)?layer_(?P<layer>\d+)/(?P<rest>.*)")
_STACKS = ("encoder", "decoder")


def _layer_of(name: str) -> Optional[tuple[str, str, str]]:
    """Splits a variable's name into (stack, layer scope, rest); None outside of layers."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return None
    scope = name[len(match["stack"]) + 1 : len(name) - len(match["rest"]) - 1]
    return match["stack"], scope, match["rest"]


def _layers_by_stack(names: Iterable[str]) -> dict[str, list[str]]:
    """Returns the layer scopes of each stack, in order."""
    found: dict[str, set] = {}
    for name in names:
        parts = _layer_of(name)
        if parts is not None:
            # By numbers: as text, layer_1000 would come before layer_999.
            numbers = tuple(map(int, re.findall(r"\d+", parts[1])))
            found.setdefault(parts[0], set()).add((numbers, parts[1]))
    return {stack: [scope for _, scope in sorted(layers)] for stack, layers in found.items()}


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
    scopes = _scopes_in_checkpoint(model, saved, new)
    mapping = {}
    for name in model:
        parts = _layer_of(name)
        if parts is None:
            there = name
        else:
            stack, scope, rest = parts
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
