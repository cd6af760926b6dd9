"""nan_checks: the first NaN or infinite value of a program is an error that says where it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Union

from mesh_tensorflow._watching import NanChecks, use_nan_checks
from mesh_tensorflow.debug._errors import user_errors
from mesh_tensorflow.debug._values import patterns_of

__all__ = ["nan_checks"]


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
    with use_nan_checks(checks), user_errors():
        yield
