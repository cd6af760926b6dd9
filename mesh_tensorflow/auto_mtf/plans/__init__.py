"""Plans: how to build a program, split it and store its variables, so that a step takes least."""

from mesh_tensorflow.auto_mtf.plans.choice import Choice, choices
from mesh_tensorflow.auto_mtf.plans.result import Lost, Plan, Plans
from mesh_tensorflow.auto_mtf.plans.search import plan

__all__ = ["Choice", "Lost", "Plan", "Plans", "choices", "plan"]
