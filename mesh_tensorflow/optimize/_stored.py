"""Values of variables as they are stored, not rounded to the dtype of activations."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.interfaces import LoweringLike

__all__ = ["StoredValue", "stored_value"]


class StoredValue(mtf.ReadVariable):
    """The value of a variable in the dtype of its slices.

    It is that of the beginning of the step; or, if operations are given, that after them.
    """

    def __init__(self, var: mtf.Variable, after: Sequence[mtf.Operation] = ()):
        """Creates the operation.

        Args:
          var: a Variable.
          after: operations that it waits for.
        """
        super().__init__(var, name="stored_value")
        self._after = list(after)
        self._outputs = [mtf.Tensor(self, var.shape, var.slice_dtype)]

    def lower(self, lowering: LoweringLike) -> None:
        """Reads the slices, or takes the values that were read at the beginning of the step."""
        laid_out = lowering.variables[self._var]
        if not self._after:
            lowering.set_tensor_lowering(self.outputs[0], laid_out.laid_out_tensor)
            return
        mesh_impl = lowering.mesh_impl(self)
        if not mesh_impl.supports_control_dependencies:
            raise ValueError(
                f"{self.name}: {type(mesh_impl).__name__} does not support control dependencies, "
                "so the value after an update cannot be read in the same step; leave `after` out"
            )
        waits = [lowering.lowered_operation(op) for op in self._after]
        with tf.control_dependencies([w for w in waits if w is not None]):
            value = laid_out.read()
        lowering.set_tensor_lowering(self.outputs[0], value)


def stored_value(var: mtf.Variable, after: Sequence[mtf.Operation] = ()) -> mtf.Tensor:
    """Returns the value of a variable in float32, not rounded to the dtype of activations.

    Args:
      var: a Variable.
      after: operations that it waits for; if there are none, it is the value of the beginning of
        the step.
    """
    if not after and var.slice_dtype == var.activation_dtype:
        return mtf.to_float(var.value)
    return mtf.to_float(StoredValue(var, after).outputs[0])
