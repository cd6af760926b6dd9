"""Chooses the layout of a program, and the shape of its mesh, by an integer program."""

from mesh_tensorflow.auto_mtf import (
    api,
    graph_interface,
    layout_optimizer,
    memory_estimator,
    objective,
    print_cp_model_solution,
    scheduler,
    valid_layouts,
)
from mesh_tensorflow.auto_mtf.api import layout, layout_and_mesh_shape

__all__ = [
    "api",
    "graph_interface",
    "layout",
    "layout_and_mesh_shape",
    "layout_optimizer",
    "memory_estimator",
    "objective",
    "print_cp_model_solution",
    "scheduler",
    "valid_layouts",
]
