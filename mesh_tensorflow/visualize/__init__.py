"""Shows what a program is and does: variables, tiles, communication, memory, a report of all."""

from mesh_tensorflow.visualize._report import print_training_report, report, training_report
from mesh_tensorflow.visualize._sharding import Sharding, Tile, visualize_sharding
from mesh_tensorflow.visualize._step import Communication, Memory, communication, memory
from mesh_tensorflow.visualize._summary import Summary, VariableRow, summary

__all__ = [
    "Communication",
    "Memory",
    "Sharding",
    "Summary",
    "Tile",
    "VariableRow",
    "communication",
    "memory",
    "print_training_report",
    "report",
    "summary",
    "training_report",
    "visualize_sharding",
]
