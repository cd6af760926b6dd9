"""Chooses the layout of a program, and the shape of its mesh, by integer programming."""

from mesh_tensorflow.auto_mtf import (
    api,
    explanation,
    graph_interface,
    hardware,
    layout_optimizer,
    memory_estimator,
    objective,
    print_cp_model_solution,
    profiles,
    scheduler,
    step_time,
    valid_layouts,
)
from mesh_tensorflow.auto_mtf.api import layout, layout_and_mesh_shape, layout_and_stored_layout
from mesh_tensorflow.auto_mtf.explanation import explain
from mesh_tensorflow.auto_mtf.measured import Auto, layout_of_estimator
from mesh_tensorflow.auto_mtf.plans import Choice, choices, plan
from mesh_tensorflow.auto_mtf.profiles import Profile

__all__ = [
    "Auto",
    "Choice",
    "Profile",
    "api",
    "choices",
    "explain",
    "explanation",
    "graph_interface",
    "hardware",
    "layout",
    "layout_and_mesh_shape",
    "layout_and_stored_layout",
    "layout_of_estimator",
    "layout_optimizer",
    "memory_estimator",
    "objective",
    "plan",
    "print_cp_model_solution",
    "profiles",
    "scheduler",
    "step_time",
    "valid_layouts",
]
