"""Mapping of variable names between models that number their layers differently."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Optional, Union

import gin
import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow.transformer.utils._flags import MODULE

__all__ = ["flexible_ckpt_init_mapping"]

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
