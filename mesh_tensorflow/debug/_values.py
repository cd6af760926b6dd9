"""Values of a program by name, checks for NaNs, and the errors of a step in words."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import WrongTypeError
from mesh_tensorflow._core.tensor import Tensor, check_tensors
from mesh_tensorflow._lowering.lowering import Lowering
from mesh_tensorflow._lowering.watched import values_by_name
from mesh_tensorflow._watching import (
    CollectedValues,
    Collector,
    NanChecks,
    explain_run_error,
    told_to_user,
    use_collector,
    use_nan_checks,
)


def explain(error: BaseException, lowering: Optional[Lowering] = None) -> str:
    """Returns which operation an error at run time comes from, and the user's line that made it.

    TensorFlow's errors name a node. Its operation is looked up in the Lowerings that are in use.

    Args:
      error: a `tf.errors.OpError`, from `session.run` or from a call of a function.
      lowering: the Lowering that was run; if None, all that are in use are looked through.

    Returns:
      Lines of text: the operation with the shapes of its inputs and outputs, and the file, the
      line and the source as in a traceback; or that no operation was found.

    >>> import tensorflow.compat.v1 as tf
    >>> import mesh_tensorflow as mtf
    >>> with tf.Graph().as_default(), tf.Session() as session:
    ...     mesh = mtf.Mesh(mtf.Graph(), "mesh")
    ...     x = mtf.import_tf_tensor(mesh, tf.constant([2, 0]), [mtf.Dimension("a", 2)])
    ...     y = 8 // x
    ...     impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:1", "", ["cpu:0"])
    ...     lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    ...     try:
    ...         session.run(lowering.export_to_tf_tensor(y))
    ...     except tf.errors.OpError as error:
    ...         print(mtf.debug.explain(error).splitlines()[1])
      made here:
    """
    text = explain_run_error(error, None if lowering is None else [lowering.node_names])
    if text is None:
        return f"no mtf operation was found for {type(error).__name__}: {error}"
    return text


@contextlib.contextmanager
def user_errors(lowering: Optional[Lowering] = None) -> Iterator[None]:
    """Adds the operation and the user's line that made it to errors of steps run within.

    `mtf.function`, estimators and `Processes.run` do so themselves; this is for `session.run`.

    Args:
      lowering: the Lowering that is run; if None, all that are in use are looked through.

    Yields:
      None.

    Raises:
      NonFiniteError: `nan_checks` found a NaN or an infinite value.
      tf.errors.OpError: the error of the step otherwise, with a longer message.

    >>> import tensorflow.compat.v1 as tf
    >>> import mesh_tensorflow as mtf
    >>> with tf.Graph().as_default(), tf.Session() as session:
    ...     mesh = mtf.Mesh(mtf.Graph(), "mesh")
    ...     x = mtf.import_tf_tensor(mesh, tf.constant([2, 1]), [mtf.Dimension("a", 2)])
    ...     impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:1", "", ["cpu:0"])
    ...     lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    ...     with mtf.debug.user_errors(lowering):
    ...         session.run(lowering.export_to_tf_tensor(x))
    array([2, 1], dtype=int32)
    """
    with told_to_user(None if lowering is None else [lowering.node_names]):
        yield


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
    # The same tensor under the same name again is no other value.
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


@contextlib.contextmanager
def nan_checks(
    enabled: bool = True, infinities: bool = True, operations: Union[str, Sequence[str]] = "*"
) -> Iterator[None]:
    """Makes programs that are lowered within fail at the first operation that gives a NaN or Inf.

    Each processor checks its own slice of each floating output. The error says which operation,
    which processor and range of its slice, how many NaNs and infinities, how the inputs were, and
    which line of the program made the operation. Checks are part of a step: with sessions, the
    Lowering is made within; an `mtf.function` is traced once more, with checks, when it is called
    within. The environment variable MTF_DEBUG_NANS=1 checks in all of a program. A step with checks
    takes some times as long; results are the same.

    A step that fails leaves variables as they were: a Lowering assigns only once its checks have
    passed, but for those of what is computed of assigned values, which come after the assignments.
    Lowerings know nothing of each other: where a step has several, one may have assigned before
    another finds a NaN. Programs in one Graph have one Lowering.

    Args:
      enabled: False for no checks within, whatever is outside.
      infinities: whether infinite values are errors, besides NaNs.
      operations: a pattern, or several, of names of the operations to check, as "encoder/*".

    Yields:
      None.

    Raises:
      NonFiniteError: a value is NaN or infinite. It is a `tf.errors.InvalidArgumentError`; steps
        that are run by `session.run` outside of this context and of `user_errors` raise that,
        with the operation, the processor and the slice in its text.

    >>> import tensorflow as tf
    >>> import mesh_tensorflow as mtf
    >>> batch = mtf.Dimension("batch", 4)
    >>> @mtf.function
    ... def logs(data):
    ...     mesh = mtf.Mesh(mtf.Graph(), "mesh")
    ...     y = mtf.log(mtf.import_tf_tensor(mesh, data, [batch]))
    ...     impl = mtf.placement_mesh_impl.PlacementMeshImpl("rows:2", "batch:rows", ["cpu:0"] * 2)
    ...     return mtf.Lowering(mesh.graph, {mesh: impl}).export_to_tf_tensor(y)
    >>> try:
    ...     with mtf.debug.nan_checks():
    ...         logs(tf.constant([1.0, 2.0, 0.0, 4.0]))
    ... except mtf.debug.NonFiniteError as error:
    ...     print(error.message.splitlines()[1])
      its slice: 1 Inf of 2 elements
    """
    checks = NanChecks(infinities, patterns_of("nan_checks", operations)) if enabled else None
    # A failed check is an error of TensorFlow's, of which user_errors makes a NonFiniteError.
    with use_nan_checks(checks), user_errors():
        yield
