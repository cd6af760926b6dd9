"""The parts of a plan's time and memory."""

from __future__ import annotations

from mesh_tensorflow._core.operation import Operation
from mesh_tensorflow.auto_mtf._time.seconds import CostModel
from mesh_tensorflow.auto_mtf.plans.choice import Choice
from mesh_tensorflow.auto_mtf.plans.result import Plan
from mesh_tensorflow.auto_mtf.step_time import Estimate, StepEstimator
from mesh_tensorflow.layers import PipelineSchedule
from mesh_tensorflow.ops._variables.variable import Variable

__all__ = ["plan_of"]

_NAMES = {"allconcat": "allgather", "reduce_scatter": "reduce-scatter", "alltoall": "all-to-all"}
STAGES = "stages"  # the dimension of a pipeline's stages


def plan_of(choice: Choice, estimator: StepEstimator, estimate: Estimate) -> Plan:
    """Returns the Plan of a choice with a layout.

    Args:
      choice: a Choice.
      estimator: the StepEstimator of the program that it builds.
      estimate: an Estimate of that.
    """
    rules = estimate.layout
    communication: dict[str, float] = {}
    for sent in estimator.times.sent(rules):
        one = sent.collective
        over = ", ".join(estimator.mesh_shape[axis].name for axis in one.mesh_axes)
        name = f"{_NAMES.get(one.kind, one.kind)} over {over}"
        communication[name] = communication.get(name, 0.0) + sent.seconds
    schedule = PipelineSchedule(choice.stages, choice.microbatches, choice.repeats)
    in_stages = recomputed = 0.0
    impl = CostModel(estimator.mesh_shape, estimator.hardware).impl(rules)
    model = CostModel(estimator.mesh_shape, estimator.hardware)
    updates = estimator.parts.updates.weight_of
    for op in estimator.parts.graph.operations:
        staged = choice.stages > 1 and op not in updates and _is_staged(op)
        again = op.original is not None
        if staged or again:
            seconds = model.operation(op, impl).compute
            in_stages += staged * seconds
            recomputed += again * seconds
    return Plan(
        choice,
        estimator.mesh_shape,
        estimate,
        estimator.peak_by_kind(rules),
        dict(sorted(communication.items(), key=lambda pair: -pair[1])),
        schedule.bubble,
        in_stages * schedule.bubble,
        recomputed,
    )


def _is_staged(op: Operation) -> bool:
    return not isinstance(op, Variable) and any(
        STAGES in y.shape.dimension_names for y in op.outputs
    )
