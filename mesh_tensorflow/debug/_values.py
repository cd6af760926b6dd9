"""Intermediate values of programs, by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import WrongTypeError
from mesh_tensorflow._core.tensor import Tensor, check_tensors
from mesh_tensorflow._lowering.lowering import Lowering
from mesh_tensorflow._lowering.watched import values_by_name
from mesh_tensorflow._watching import CollectedValues, Collector, use_collector

__all__ = ["collect", "inspect", "patterns_of", "values"]


def patterns_of(what: str, patterns: Union[str, Sequence[str]]) -> tuple[str, ...]:
    """Returns patterns of names as a tuple.

    Raises:
      WrongTypeError: they are neither a string nor strings.
    """
    found = (patterns,) if isinstance(patterns, str) else patterns
    if not isinstance(found, (list, tuple)) or not all(isinstance(p, str) for p in found):
        raise WrongTypeError(
            f'{what}: patterns of names are a string such as "encoder/*", or a list of strings, '
            f"not {patterns!r}"
        )
    return tuple(found)


def inspect(x: Tensor, name: str) -> Tensor:
    """Gives a tensor a name by which `mtf.debug.collect` returns its value.

    It adds nothing to the program, which runs as it would without.

    Args:
      x: a Tensor of any shape and dtype. Values inside of loops are not collected.
      name: a string; under the variable scope, and made unique by _1, _2, ...

    Returns:
      `x`.

    Raises:
      WrongTypeError: `x` is not a Tensor.

    >>> import tensorflow as tf
    >>> import mesh_tensorflow as mtf
    >>> mesh = mtf.Mesh(mtf.Graph(), "mesh")
    >>> x = mtf.import_tf_tensor(mesh, tf.constant([1.0, -2.0]), [mtf.Dimension("a", 2)])
    >>> y = mtf.reduce_sum(mtf.inspect(mtf.relu(x), "positive"))
    >>> impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:2", "a:all", ["cpu:0"] * 2)
    >>> with mtf.debug.collect() as values:
    ...     lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    >>> values["positive"].numpy()
    array([1., 0.], dtype=float32)
    """
    check_tensors("inspect", [x])
    scope = tf.get_variable_scope().name
    unique = name = f"{scope}/{name}" if scope else name
    known, count = x.graph.inspected, 0
    while unique in known and known[unique] is not x:
        count += 1
        unique = f"{name}_{count}"
    known[unique] = x
    return x


@contextlib.contextmanager
def collect(
    names: Union[str, Sequence[str]] = (), processor: Optional[int] = None
) -> Iterator[CollectedValues]:
    """Collects values of the programs that are lowered within, by their names.

    In eager code these are values; in a tf graph tensors to run, as `session.run(dict(values))`. An
    `mtf.function` is traced once more when it is called within, and values are there after each
    call. Around `replicate` they are tensors of the calling graph. A plain `tf.function` has to
    return those of a `collect` inside of it.

    Args:
      names: a pattern, or several, of names of operations, such as "encoder/*/softmax"; those that
        were given to `mtf.inspect` are always collected. The second output of an operation is
        "name:1".
      processor: the number of a processor, whose slices are collected; None for whole values.

    Yields:
      A dictionary from names to values, filled when a program is lowered or called. Looking up a
      name that it lacks says which ones it has.

    >>> import tensorflow as tf
    >>> import mesh_tensorflow as mtf
    >>> mesh = mtf.Mesh(mtf.Graph(), "mesh")
    >>> x = mtf.import_tf_tensor(mesh, tf.constant([1.0, -2.0]), [mtf.Dimension("a", 2)])
    >>> y = mtf.reduce_sum(mtf.relu(x))
    >>> impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:2", "a:all", ["cpu:0"] * 2)
    >>> with mtf.debug.collect("re*", processor=1) as values:
    ...     lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    >>> {name: value.numpy().tolist() for name, value in values.items()}
    {'relu': [0.0], 'reduce': 1.0}
    """
    collector = Collector(patterns_of("collect", names), processor)
    with use_collector(collector):
        yield collector.values


def values(
    lowering: Lowering, names: Union[str, Sequence[str]] = "*", processor: Optional[int] = None
) -> CollectedValues:
    """Returns values of a Lowering by name; see `collect`.

    Args:
      lowering: a Lowering.
      names: a pattern, or several, of names of operations.
      processor: the number of a processor, whose slices are returned; None for whole values.

    Returns:
      A dictionary from names to tf.Tensors; in eager code they have values.

    Raises:
      ValueError: the mesh has no such processor.

    >>> import tensorflow as tf
    >>> import mesh_tensorflow as mtf
    >>> mesh = mtf.Mesh(mtf.Graph(), "mesh")
    >>> x = mtf.import_tf_tensor(mesh, tf.constant([1.0, -2.0]), [mtf.Dimension("a", 2)])
    >>> y = mtf.relu(x, name="positive")
    >>> impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:2", "a:all", ["cpu:0"] * 2)
    >>> lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    >>> mtf.debug.values(lowering, "pos*")["positive"].numpy()
    array([1., 0.], dtype=float32)
    """
    return CollectedValues(values_by_name(lowering, patterns_of("values", names), processor))
