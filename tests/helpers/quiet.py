"""Imports TensorFlow without its messages about the machine."""

import importlib.util
import os

__all__ = ["import_tensorflow"]


def import_tensorflow():
    """Imports TensorFlow quietly; what does so is loaded without the package, which imports it too."""
    package = importlib.util.find_spec("mesh_tensorflow")
    path = os.path.join(package.submodule_search_locations[0], "_quiet.py")
    spec = importlib.util.spec_from_file_location("quiet", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.import_tensorflow()
