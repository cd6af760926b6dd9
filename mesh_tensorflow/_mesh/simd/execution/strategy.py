"""ExecutionStrategy: how a traced program is called on each processor."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Optional, TypeAlias

import tensorflow.compat.v1 as tf

if TYPE_CHECKING:
    from tensorflow.types.experimental import ConcreteFunction

    from mesh_tensorflow._mesh.simd.program import SimdProgram

__all__ = ["CallProcessors", "ExecutionStrategy"]

# (arguments of each processor's call, operations that the calls wait for) -> outputs of each call.
CallProcessors: TypeAlias = Callable[
    [Sequence[Sequence[tf.Tensor]], Sequence[tf.Operation]], list[list[tf.Tensor]]
]


class ExecutionStrategy(abc.ABC):
    """A way to call a traced program on each processor that this process runs.

    Tracing does not depend on the strategy, nor does anything but the calls: whichever is used,
    a program has the same results and counters.

    Attributes:
      one_memory: whether it runs programs whose processors store equal slices in one variable.
    """

    one_memory = False

    @abc.abstractmethod
    def prepare(self, program: SimdProgram, function: ConcreteFunction) -> Optional[CallProcessors]:
        """Prepares the calls of a program. Adds nothing to the calling graph.

        Args:
          program: the SimdProgram.
          function: its concrete function; the first argument is the processor's number, the last
            ones are what it captures.

        Returns:
          A function that adds the calls to the default graph; None if this strategy cannot run
          the program.
        """
