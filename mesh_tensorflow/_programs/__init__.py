"""How programs run once TensorFlow is imported: their log, their errors, and those of gin files."""

from mesh_tensorflow._programs.running import mistakes_told, run_with_flags, run_with_parser

__all__ = ["mistakes_told", "run_with_flags", "run_with_parser"]
