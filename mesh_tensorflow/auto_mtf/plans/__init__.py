"""Plans: how to build a program, split it and store its variables, so that a step takes least."""

from mesh_tensorflow.auto_mtf.plans.search import Choice, Lost, Plan, Plans, choices, plan

__all__ = ["Choice", "Lost", "Plan", "Plans", "choices", "plan"]
