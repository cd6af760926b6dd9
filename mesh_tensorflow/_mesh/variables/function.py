"""mtf.function: a tf.function that builds and lowers mtf programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Optional

import tensorflow as tf2

from mesh_tensorflow._mesh.stored_layout import storing
from mesh_tensorflow._mesh.variables.argument_keys import original
from mesh_tensorflow._mesh.variables.quick_calls import QuickCalls
from mesh_tensorflow._mesh.variables.store import VariableStore
from mesh_tensorflow._watching.node_names import NodeNames, names_in_current_graph, raise_for_user
from mesh_tensorflow._watching.requests import collecting, hand_over, watch_key

__all__ = ["function"]


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
