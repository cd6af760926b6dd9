"""Repeated calls of a tf.function, which find their trace by their arguments alone.

At each call, tf.function also hashes the types of all that the trace captured: of a program, a
handle for each slice of each variable.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
import tensorflow as tf2

from mesh_tensorflow._mesh.variables.argument_keys import (
    ToldApart,
    original,
    told_apart,
    value_key,
)

try:  # Parts of TensorFlow that are not public; tf.function does all calls if one is missing.
    from tensorflow.python.eager import context, record
    from tensorflow.python.eager.polymorphic_function.atomic_function import (
        InterpolateRuntimeError,
    )
    from tensorflow.python.framework.ops import EagerTensor

    _AVAILABLE = hasattr(context.Context, "call_function") and hasattr(
        record, "could_possibly_record"
    )
except ImportError:
    _AVAILABLE = False

__all__ = ["QuickCalls"]

# Arguments of tf.function that change neither how arguments are converted nor how traces run.
_PLAIN_OPTIONS = frozenset({"autograph", "name", "reduce_retracing"})
_NEW, _SEEN = object(), object()
_LITERALS = frozenset({bool, int, float, complex, str, bytes, type(None)})
_OPAQUE = frozenset({tf2.resource, tf2.variant})
_MOST_TRACES = 256
# This many calls after one with new arguments are left to tf.function: its warning of too frequent
# traces is about their part of the latest calls, of which it has to see some.
_SEEN_CALLS = 3


class _Trace(NamedTuple):
    """What a call of a trace needs.

    Attributes:
      function: TensorFlow's function of flat arguments.
      errors: the context in which it is called, which adds to errors where nodes were made.
      order: for each of its arguments, the index of the tensor among those of the call.
      captures: its further arguments.
      outputs: the number of its flat results.
    """

    function: Any
    errors: Any
    order: Sequence[int]
    captures: list[Any]
    outputs: int


class QuickCalls:
    """A tf.function with quicker repeated calls.

    Calls are tf.function's own if they have arguments other than tensors, arrays, plain Python
    values and containers of these, or are within a gradient tape, a graph or a strategy.

    Attributes:
      told: returns arguments as the tf.function takes them, Python values told apart by type.
    """

    def __init__(self, traced: Any, options: Mapping[str, Any]):
        """Adapts a tf.function.

        Args:
          traced: the tf.function.
          options: the arguments that it was made with, except for the Python function.
        """
        self._traced = traced
        self._name = traced.python_function.__name__
        self._always_seen = not (_AVAILABLE and _PLAIN_OPTIONS.issuperset(options))
        # A signature has no place for Python values.
        self.told = original if "input_signature" in options else told_apart
        self._traces: dict[tuple[Any, ...], Any] = {}  # also _SEEN, and None: left to tf.function
        self._to_be_seen = 0

    def __call__(self, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Calls the function.

        Args:
          args: arguments by position.
          named: arguments by name.

        Returns:
          The function's result.
        """
        key: list[Any] = []
        tensors: list[Any] = []
        trace = None
        if not self._always_seen and _is_plain_call() and _describe((args, named), key, tensors):
            trace = self._trace(tuple(key), args, named)
        if trace is None:
            args, named = self.told((args, named))
            return self._traced(*args, **named)
        inputs = [tensors[index] for index in trace.order]
        # Arrays become tensors at each call, since a program may have changed what is in them.
        inputs = [x if type(x) is EagerTensor else tf2.constant(x) for x in inputs]
        with tf2.profiler.experimental.Trace(self._name), trace.errors:
            results = context.context().call_function(
                trace.function.name, inputs + trace.captures, trace.outputs
            )
        return trace.function.function_type.pack_output(results)

    def _trace(
        self, key: tuple[Any, ...], args: tuple[Any, ...], named: dict[str, Any]
    ) -> Optional[_Trace]:
        """Returns the trace of a call, or None if the call is left to tf.function."""
        known = self._traces.get(key, _NEW)
        if known is _NEW:
            # Keys hold shapes of all that a program was ever called with; a long run has many.
            if len(self._traces) >= _MOST_TRACES:
                self._traces.clear()
            self._traces[key] = _SEEN
            self._to_be_seen = _SEEN_CALLS
            return None
        if self._to_be_seen:
            self._to_be_seen -= 1
            return None
        if known is _SEEN:
            try:
                known = _find_trace(self._traced, *self.told((args, named)))
            except AttributeError:  # a part of TensorFlow that is not public has another name
                known = None
            self._traces[key] = known
        return known


def _is_plain_call() -> bool:
    """Returns whether nothing but the arguments decides what a call does."""
    return (
        tf2.executing_eagerly()
        and not tf2.config.functions_run_eagerly()
        and not record.could_possibly_record()
        and not tf2.distribute.has_strategy()
    )


def _describe(value: Any, key: list[Any], tensors: list[Any]) -> bool:
    """Describes an argument as tf.function tells arguments apart, or finer.

    Args:
      value: the argument.
      key: to which the description is appended.
      tensors: to which the tensors and arrays within the argument are appended.

    Returns:
      Whether the argument is of a kind that is known here.
    """
    kind = type(value)
    if kind is EagerTensor:
        key.append((kind, value.dtype, value.shape))
        tensors.append(value)
        return value.dtype not in _OPAQUE
    if kind is np.ndarray:
        key.append((kind, value.dtype, value.shape))
        tensors.append(value)
        return value.dtype.kind in "biufc"
    if kind is dict:
        if not all(type(name) is str for name in value):
            return False
        names = sorted(value)
        key.append((kind, tuple(names)))
        return all(_describe(value[name], key, tensors) for name in names)
    if kind is tuple or kind is list:
        key.append((kind, len(value)))
        return all(_describe(part, key, tensors) for part in value)
    if kind is not ToldApart and kind not in _LITERALS:
        return False
    key.append(value.key if kind is ToldApart else value_key(value))
    return True


def _find_trace(traced: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Optional[_Trace]:
    """Returns the trace by which a tf.function does a call, or None if only it can do such calls.

    Args:
      traced: the tf.function.
      args: the arguments by position, all of which _describe knows, told apart.
      named: the arguments by name.
    """
    # Tensors that are all different objects tell in which order the trace takes them.
    args, named = tf2.nest.map_structure(_distinct, (args, named))
    tensors: list[Any] = []
    _describe((args, named), [], tensors)
    concrete = traced.get_concrete_function(*args, **named)
    function = getattr(concrete, "_inference_function", None)
    graph = concrete.graph
    if function is None or graph.deferred_external_captures or graph.function_captures.control:
        return None
    bound = inspect.signature(traced.python_function).bind(*args, **named)
    bound.apply_defaults()
    with_defaults: list[Any] = []
    if not _describe((bound.args, bound.kwargs), [], with_defaults):
        return None
    if len(with_defaults) > len(tensors) or any(o.dtype in _OPAQUE for o in concrete.outputs):
        return None
    taken = function.function_type.unpack_inputs(
        concrete.function_type.bind(*bound.args, **bound.kwargs)
    )
    indices = {id(tensor): index for index, tensor in enumerate(tensors)}
    return _Trace(
        function=function,
        errors=InterpolateRuntimeError(function),
        order=[indices[id(tensor)] for tensor in taken],
        captures=list(concrete.captured_inputs),
        outputs=len(function.function_type.flat_outputs),
    )


def _distinct(value: Any) -> Any:
    """Returns a new tensor for a tensor or an array, and other values themselves."""
    if isinstance(value, np.ndarray):
        return tf2.constant(value)
    return tf2.identity(value) if tf2.is_tensor(value) else value
