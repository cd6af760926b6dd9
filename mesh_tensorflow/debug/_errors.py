"""Errors at run time, told by the line of the user's program that made the operation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Optional

from mesh_tensorflow._lowering.lowering import Lowering
from mesh_tensorflow._watching import explain_run_error, told_to_user

__all__ = ["explain", "user_errors"]


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
