"""Checks that the layers of a stack can be the stages of a pipeline.

`PipelinedLayerStack` calls the layers of one stage once in advance, for all stages at once, and
takes the operations away again. This file looks at what that call made: which Tensors it read,
whether an operation joined stages, and what it left in the Context. Stages are on different
processors, so they cannot share anything but variables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.operation import Operation, with_inner_operations

__all__ = ["alike", "check_context", "check_stages_apart", "depending_on", "tensors_in", "used"]

# What layers may set in a Context: the stack itself does, or it is taken care of.
_MAY_CHANGE = {"cache", "current_layer", "current_layer_input", "layer_outputs", "losses"}
_MEND = "use a LayerStack for such layers"


def tensors_in(value: object) -> Iterator[mtf.Tensor]:
    """Yields the Tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, mtf.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from tensors_in(v)
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from tensors_in(v)


def alike(a: Any, b: Any, seen: Collection[int] = ()) -> bool:
    """Returns whether two layers, or attributes of them, are equal but for their names."""
    if a is b or id(a) in seen:
        return True
    if type(a) is not type(b):
        return False
    seen = {*seen, id(a)}
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(alike(x, y, seen) for x, y in zip(a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[k], b[k], seen) for k in a)
    if hasattr(a, "__dict__") and not callable(a):
        mine, others = ({k: v for k, v in vars(x).items() if k != "_name"} for x in (a, b))
        return alike(mine, others, seen)
    return repr(a) == repr(b)


def used(operations: Iterable[Operation]) -> set[mtf.Tensor]:
    """Returns all inputs of operations."""
    return {x for op in with_inner_operations(operations) for x in op.inputs}


def depending_on(sources: Iterable[mtf.Tensor], operations: Iterable[Operation]) -> set[mtf.Tensor]:
    """Returns the Tensors that operations compute from others, and these."""
    found = set(sources)
    for op in operations:
        if any(x in found for x in op.inputs):
            found.update(op.outputs)
    return found


def check_stages_apart(operations: Iterable[Operation], stages: mtf.Dimension) -> None:
    """Checks that operations keep the stages apart.

    Raises:
      ValueError: one of them joins stages.
    """
    for op in operations:
        joined = [x for x in op.inputs if stages in x.shape]
        if joined and not all(stages in y.shape for y in op.outputs):
            raise ValueError(
                f"PipelinedLayerStack: {op.name} ({type(op).__name__}) makes "
                f"{', '.join(str(y.shape) for y in op.outputs)} of {joined[0].shape}, and so joins "
                f"the layers of different {stages.name}; a layer of a pipeline must keep the "
                f"dimension {stages.name}={stages.size} that its input has, or {_MEND}"
            )


def check_context(
    before: Mapping[str, object],
    after: Mapping[str, object],
    cached: Mapping[Any, Sequence[mtf.Tensor]],
    depending: Collection[mtf.Tensor],
) -> None:
    """Checks that layers leave nothing in the Context that other stages would need.

    Args:
      before: the attributes of the Context before the first call.
      after: the attributes after it.
      cached: the Tensors that the layers have put into its cache and that are no variables.
      depending: what depends on a layer's input or variables.

    Raises:
      ValueError: they do.
    """
    changed = [k for k, v in after.items() if k not in _MAY_CHANGE and before.get(k) is not v]
    if changed:
        raise ValueError(
            f"PipelinedLayerStack: the layers set context.{changed[0]}, which stages of a pipeline "
            f"cannot share, as they are on different processors; {_MEND}"
        )
    for key, values in cached.items():
        bad = [v for v in values if v in depending]
        if bad:
            raise ValueError(
                f"PipelinedLayerStack: a layer leaves {bad[0].name} {bad[0].shape}, which depends "
                f"on its input or its variables, in context.cache[{key!r}] for later layers, but "
                f"stages of a pipeline are on different processors and share variables only; "
                f"compute it in each layer, or {_MEND}"
            )
