"""Chooses how a SIMD program is called on its processors: sharing one memory, or by collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh_tensorflow._mesh.simd.execution.by_collectives import CollectivesStrategy
from mesh_tensorflow._mesh.simd.execution.in_one_memory import (
    OneMemoryStrategy,
    addresses_in_one_memory,
)
from mesh_tensorflow._mesh.simd.execution.strategy import ExecutionStrategy
from mesh_tensorflow._mesh.simd.private_attributes import (
    check_programs_can_run,
    missing_for,
    warn_of_no_sharing,
)

if TYPE_CHECKING:
    from mesh_tensorflow._mesh.simd.program import SimdProgram

__all__ = ["choose_strategies"]


def choose_strategies(program: SimdProgram, share_memory: bool) -> list[ExecutionStrategy]:
    """Returns the strategies to try for a program, before it is traced.

    Args:
      program: the SimdProgram.
      share_memory: whether processors of one memory may share what is equal on them.

    Returns:
      Strategies, the preferred one first; the last one runs every program.

    Raises:
      RuntimeError: TensorFlow lacks what every program needs.
    """
    check_programs_can_run()
    collectives: list[ExecutionStrategy] = [CollectivesStrategy()]
    addresses = addresses_in_one_memory(program) if share_memory else None
    if addresses is None:
        return collectives
    missing = missing_for("sharing")
    if missing:
        warn_of_no_sharing(f"lacks {', '.join(missing)}, or has it with another signature")
        return collectives
    # Collectives last: whether the first can run a program is known only when it has been traced.
    return [OneMemoryStrategy(addresses), *collectives]
