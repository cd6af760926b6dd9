"""CollectivesStrategy: every processor runs the traced function; collectives connect them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.simd.execution.strategy import CallProcessors, ExecutionStrategy

if TYPE_CHECKING:
    from tensorflow.types.experimental import ConcreteFunction

    from mesh_tensorflow._mesh.simd.program import SimdProgram

__all__ = ["CollectivesStrategy"]


class CollectivesStrategy(ExecutionStrategy):
    """Calls the traced function itself on each processor: the default, which runs every program."""

    def prepare(self, program: SimdProgram, function: ConcreteFunction) -> CallProcessors:
        """Prepares the calls of a program; see `ExecutionStrategy`."""

        def call(
            arguments: Sequence[Sequence[tf.Tensor]], before: Sequence[tf.Operation]
        ) -> list[list[tf.Tensor]]:
            calls = []
            for pnum, taken in zip(program.local, arguments):
                with tf.device(program.devices[pnum]), tf.control_dependencies(before):
                    calls.append(_call(function, taken))
            return calls

        return call


def _call(function: ConcreteFunction, arguments: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Calls a function with arguments in place of what it captures."""
    call_flat = getattr(getattr(function, "inference_fn", None), "call_flat", None)
    if call_flat is not None:
        return list(call_flat(*arguments))
    # The same call, with nothing but documented names. It lacks hints for the optimizer.
    outputs = tf.raw_ops.StatefulPartitionedCall(
        args=arguments, Tout=[x.dtype for x in function.outputs], f=function
    )
    return list(outputs)
