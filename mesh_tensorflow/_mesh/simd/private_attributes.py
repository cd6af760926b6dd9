"""The attributes of TensorFlow that SIMD programs use although it does not document them.

`TABLE` has all of them. They are looked up before a program is traced, so that nothing is left
half-built where one is missing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Optional

import tensorflow as tf2
import tensorflow.compat.v1 as tf

__all__ = [
    "TABLE",
    "PrivateAttribute",
    "check_programs_can_run",
    "device_functions",
    "missing_for",
    "warn_of_no_sharing",
]


class PrivateAttribute(NamedTuple):
    """An attribute that a release of TensorFlow may lack, or have with another signature.

    Attributes:
      needed_by: "programs", all of them; "sharing", programs in one memory; or "extras", which
        have a substitute where they are used.
      owner: what has it: a key of the table of owners.
      name: its name.
      used_for: what it is needed for.
      parameters: what it is called with; None if it is a value.
    """

    needed_by: str
    owner: str
    name: str
    used_for: str
    parameters: Optional[tuple[str, ...]] = None


_TRANSFER = ("tensor_name", "send_device", "send_device_incarnation", "recv_device")

TABLE = (
    PrivateAttribute(
        "programs", "ConcreteFunction", "captured_inputs", "what a program uses from outside"
    ),
    PrivateAttribute("programs", "ConcreteFunction", "inputs", "how a program uses it"),
    PrivateAttribute("programs", "ConcreteFunction", "outputs", "what a program returns"),
    PrivateAttribute("sharing", "ConcreteFunction", "function_def", "the nodes of a program"),
    PrivateAttribute(
        "sharing", "ConcreteFunction", "add_to_graph", "functions that its loops call", ("g",)
    ),
    PrivateAttribute(
        "sharing",
        "raw_ops",
        "Send",
        "the node that hands a value over",
        ("tensor", *_TRANSFER, "client_terminated"),
    ),
    PrivateAttribute(
        "sharing",
        "raw_ops",
        "Recv",
        "the node that takes it",
        ("tensor_type", *_TRANSFER, "client_terminated"),
    ),
    # Without it: tf.raw_ops.StatefulPartitionedCall.
    PrivateAttribute(
        "extras", "AtomicFunction", "call_flat", "a call with chosen captures", ("args",)
    ),
    # Without it: no functions, in an attribute that only informs.
    PrivateAttribute(
        "extras", "Graph", "_device_functions_outer_to_inner", "graph_device_function_stacks"
    ),
)


def _implementation(documented: type) -> type:
    """Returns the class that implements a documented abstract class of tf.types."""
    return next(iter(documented.__subclasses__()), documented)


_OWNERS: Mapping[str, Callable[[], object]] = {
    "ConcreteFunction": lambda: _implementation(tf2.types.experimental.ConcreteFunction),
    "AtomicFunction": lambda: _implementation(tf2.types.experimental.AtomicFunction),
    "raw_ops": lambda: tf.raw_ops,
    "Graph": lambda: tf.Graph,
}


def missing_for(needed_by: str) -> list[str]:
    """Returns which private attributes are missing or have another signature.

    Args:
      needed_by: "programs" or "sharing".

    Returns:
      For each a text such as "raw_ops.Send (the node that hands a value over)".
    """
    return [
        f"{a.owner}.{a.name} ({a.used_for})"
        for a in TABLE
        if a.needed_by == needed_by and not _is_as_expected(a)
    ]


def _is_as_expected(attribute: PrivateAttribute) -> bool:
    try:
        found = inspect.getattr_static(_OWNERS[attribute.owner](), attribute.name)
    except AttributeError:
        return False
    if attribute.parameters is None:
        return not inspect.isroutine(found)
    return callable(found) and _takes(found, attribute.parameters)


def _takes(function: Callable, parameters: Iterable[str]) -> bool:
    """Returns whether a function has these parameters and requires no others."""
    has = inspect.signature(function).parameters
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = {
        name
        for name, parameter in has.items()
        if parameter.default is parameter.empty and parameter.kind not in optional
    }
    return set(parameters) <= set(has) and required <= {"self", *parameters}


def check_programs_can_run() -> None:
    """Raises RuntimeError if TensorFlow lacks what every program needs."""
    missing = missing_for("programs")
    if missing:
        raise RuntimeError(
            f"replicate: TensorFlow {tf.__version__} lacks {', '.join(missing)}, or has it with "
            "another signature; no program of SimdMeshImpl can run on CPUs and GPUs with it. "
            "Use TensorFlow 2.21, or mtf.placement_mesh_impl.PlacementMeshImpl, which does not "
            "need it"
        )


def device_functions(graph: tf.Graph) -> list[Callable]:
    """Returns the device functions in force in a graph, outer ones first.

    TensorFlow has no public name for them; where the private one is missing there are none.
    """
    return list(getattr(graph, "_device_functions_outer_to_inner", ()))


@functools.cache
def warn_of_no_sharing(reason: str) -> None:
    """Warns, once for each reason, that processors of one memory share nothing."""
    tf.logging.warning(
        "replicate: processors of one memory do not share what is equal on them, as TensorFlow %s "
        "%s. They communicate by TensorFlow's collectives: results are the same, steps may take "
        "longer.",
        tf.__version__,
        reason,
    )
