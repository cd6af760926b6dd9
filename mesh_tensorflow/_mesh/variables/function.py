"""mtf.function: traced programs that keep their variables, and their quick calls.

A trace is found by its arguments. TensorFlow takes Python values for the same argument if they are
equal; 1, True and 1.0 are, and 0.0 and -0.0, and programs do different things with them, so that
the keys here tell them apart.

A quick call passes by what tf.function does at each call: it hashes the types of all that the trace
captured: of a program, a handle for each slice of each variable.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
import tensorflow as tf2

from mesh_tensorflow._core.layout import storing
from mesh_tensorflow._mesh.variables.store import VariableStore
from mesh_tensorflow._watching import (
    NodeNames,
    collecting,
    hand_over,
    names_in_current_graph,
    raise_for_user,
    watch_key,
)

_SAME_IF_EQUAL = (str, bytes, type(None))


def value_key(value: Any) -> Optional[Hashable]:
    """Returns a key that only equal values of one type share, or None for tensors and objects.

    Args:
      value: a number, a string, None, or a frozen dataclass of these.
    """
    kind = type(value)
    if isinstance(value, (*_SAME_IF_EQUAL, int, range)):
        return kind, value
    # Before floats, of which np.float64 is one: tf.function makes tensors of NumPy's numbers.
    if isinstance(value, np.generic):
        return None
    if isinstance(value, float):
        return kind, value.hex()  # which tells 0.0 and -0.0 apart, and finds a NaN again
    if isinstance(value, complex):
        return kind, value.real.hex(), value.imag.hex()
    if dataclasses.is_dataclass(kind) and _has_value(kind):
        keys = [value_key(getattr(value, field.name)) for field in dataclasses.fields(value)]
        return None if None in keys else (kind, *keys)
    return None


def _has_value(kind: type) -> bool:
    """Returns whether objects of a dataclass are equal if their fields are, and stay it."""
    parameters = getattr(kind, "__dataclass_params__", None)
    return bool(parameters and parameters.frozen and parameters.eq)


@dataclasses.dataclass(frozen=True, eq=False)
class KeyedArgument:
    """An argument of a tf.function that is the same only if its key is."""

    key: Hashable
    value: Any

    def __tf_tracing_type__(self, context: Any) -> _KeyType:
        return _KeyType(self.key, self.value)


class _KeyType(tf2.types.experimental.TraceType):
    """The type of a KeyedArgument: tf.function passes its value to the function that it traces."""

    def __init__(self, key: Hashable, value: Any):
        self._key, self._value = key, value

    def is_subtype_of(self, other: Any) -> bool:
        return bool(self == other)

    def most_specific_common_supertype(self, others: Sequence[Any]) -> Optional[_KeyType]:
        # No value stands for two others, so each has a trace of its own.
        return self if all(self == other for other in others) else None

    def placeholder_value(self, placeholder_context: Any) -> Any:
        return self._value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _KeyType) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return repr(self._value)


def told_apart(value: Any) -> Any:
    """Returns arguments with their numbers told apart by type; in containers, too."""

    def leaf(x: Any) -> Any:
        if isinstance(x, _SAME_IF_EQUAL) and type(x) in _SAME_IF_EQUAL:
            return x
        key = value_key(x)
        return x if key is None else KeyedArgument(key, x)

    return _mapped(leaf, value)


def original(value: Any) -> Any:
    """Returns arguments as they were before `told_apart`."""
    return _mapped(lambda x: x.value if type(x) is KeyedArgument else x, value)


def _mapped(fn: Callable[[Any], Any], value: Any) -> Any:
    kind = type(value)
    if kind is list or kind is tuple:
        return kind(_mapped(fn, x) for x in value)
    if kind is dict or kind is collections.OrderedDict:
        return kind((name, _mapped(fn, x)) for name, x in value.items())
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return kind(*(_mapped(fn, x) for x in value))
    return fn(value)


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
            # The call that is left to tf.function makes the trace, which a later one can look up.
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
        # A gradient tape hears only of calls that TensorFlow itself makes.
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
        # Dictionaries with the same entries are one argument, in whatever order they were made.
        names = sorted(value)
        key.append((kind, tuple(names)))
        return all(_describe(value[name], key, tensors) for name in names)
    if kind is tuple or kind is list:
        # With the size, before the parts: no two structures of the same leaves have one key.
        key.append((kind, len(value)))
        return all(_describe(part, key, tensors) for part in value)
    if kind is not KeyedArgument and kind not in _LITERALS:
        return False
    key.append(value.key if kind is KeyedArgument else value_key(value))
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
    # A deferred capture has another value at each call, and `captures` is taken once.
    if function is None or graph.deferred_external_captures or graph.function_captures.control:
        return None
    bound = inspect.signature(traced.python_function).bind(*args, **named)
    bound.apply_defaults()
    with_defaults: list[Any] = []
    if not _describe((bound.args, bound.kwargs), [], with_defaults):
        return None
    # A tensor that is a default is none of the call's, so that `order` could not name it.
    if len(with_defaults) > len(tensors) or any(o.dtype in _OPAQUE for o in concrete.outputs):
        return None
    taken = function.function_type.unpack_inputs(
        concrete.function_type.bind(*bound.args, **bound.kwargs)
    )
    # By identity, as eager tensors are not hashable and equal ones may be different arguments.
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


_STORED = ("variable_layout", "zero", "zero_axis")


def function(fn: Optional[Callable[..., Any]] = None, **kwargs: Any) -> Any:
    """Compiles a function that builds and lowers mtf programs, as tf.function does.

    The first call creates the variables of the programs. They are kept in `.store`, a
    VariableStore. Unlike tf.function, it traces anew for 1, True and 1.0, which Python equates.

    >>> import tensorflow as tf
    >>> import mesh_tensorflow as mtf
    >>> @mtf.function
    ... def product(data):
    ...     mesh = mtf.Mesh(mtf.Graph(), "mesh")
    ...     x = mtf.import_tf_tensor(mesh, data, "batch:2,d_in:3")
    ...     w = mtf.get_variable(mesh, "w", mtf.Shape([("d_in", 3)]))
    ...     impl = mtf.placement_mesh_impl.PlacementMeshImpl("rows:2", "batch:rows", ["cpu:0"] * 2)
    ...     y = x @ w
    ...     return mtf.Lowering(mesh.graph, {mesh: impl}).export_to_tf_tensor(y)
    >>> product(tf.ones([2, 3])).shape, product.store.names
    (TensorShape([2]), ['w'])

    Args:
      fn: a function of eager tensors; None to use `function` as a decorator with arguments.
      **kwargs: arguments of tf.function; `autograph` is False by default. And `zero`, `zero_axis`
        and `variable_layout`, which say how the mesh implementations that `fn` makes store
        variables, as their own arguments of these names do.

    Returns:
      A function with the arguments and the result of `fn`. Its attributes `store` and
      `tf_function` are the VariableStore and the tf.function.
    """
    if fn is None:
        return functools.partial(function, **kwargs)
    # One for all traces of the function, so that a trace for other shapes has the same weights.
    store = VariableStore()
    tables: list[NodeNames] = []  # of the traces, by which errors of steps are told
    # Programs are built by Python code, which autograph would rewrite, and take longer to trace.
    kwargs.setdefault("autograph", False)
    stored = {name: kwargs.pop(name) for name in _STORED if name in kwargs}

    @functools.wraps(fn)
    def within_store(*args: object, **named: object) -> Any:
        args, named = original((args, named))  # as they come where functions run eagerly
        with store.scope(), storing(**stored):
            result = fn(*args, **named)
        tables.extend(names_in_current_graph())
        return result

    traced = tf2.function(within_store, **kwargs)
    # tf.function itself looks at all captured slices at each call, which takes longer than a small
    # step.
    calls = QuickCalls(traced, kwargs)
    watched: dict[Any, Any] = {}  # the same, with checks and further results; see mtf.debug

    @functools.wraps(fn)
    def call(*args: object, **named: object) -> Any:
        key = watch_key()
        try:
            if key is None:
                return calls(args, named)
            if key not in watched:
                watched[key] = tf2.function(collecting(within_store), **kwargs)
            args, named = calls.told((args, named))
            result, collected = watched[key](*args, **named)
        except tf2.errors.OpError as e:
            raise_for_user(e, tables or None)
        hand_over(collected)
        return result

    call.store = store  # type: ignore[attr-defined]
    call.tf_function = traced  # type: ignore[attr-defined]
    return call
