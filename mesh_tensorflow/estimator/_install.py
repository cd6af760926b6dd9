"""Putting this package where programs look for tf.estimator, which TensorFlow no longer has."""

from __future__ import annotations

import sys
import types
from typing import Any

import tensorflow
import tensorflow.compat.v1
import tensorflow.compat.v2

__all__ = ["install", "uninstall"]

# What is a module `tf` to some program.
_ROOTS = (
    "tensorflow", "tensorflow.compat.v1", "tensorflow.compat.v2", "tensorflow._api.v2.v2",
    "tensorflow._api.v2.compat.v1", "tensorflow._api.v2.compat.v2",
)
_PARTS = ("experimental", "export", "tpu")
# Modules of the package `tensorflow_estimator` that programs import from, by their part here.
_OLD_PACKAGE = "tensorflow_estimator"
_OLD_MODULES = {
    "estimator": "",
    "python.estimator.estimator": "",
    "python.estimator.estimator_lib": "",
    "python.estimator.exporter": "",
    "python.estimator.model_fn": "",
    "python.estimator.run_config": "",
    "python.estimator.training": "",
    "python.estimator.export.export": "export",
    "python.estimator.export.export_output": "export",
    "python.estimator.tpu.tpu_config": "tpu",
    "python.estimator.tpu.tpu_estimator": "tpu",
}
_TPU_PACKAGE = "tensorflow.python.tpu"
_TPU_MODULES = ("tpu_config", "tpu_estimator")

_MISSING = object()
# What was there before: (object or None for sys.modules, name, value or _MISSING), in order.
_before: list[tuple[Any, str, Any]] = []


def _set_attribute(owner: Any, name: str, value: Any) -> None:
    _before.append((owner, name, getattr(owner, name, _MISSING)))
    setattr(owner, name, value)


def _set_module(name: str, module: types.ModuleType) -> None:
    _before.append((None, name, sys.modules.get(name, _MISSING)))
    sys.modules[name] = module


def _part(name: str) -> types.ModuleType:
    return sys.modules["mesh_tensorflow.estimator" + (f".{name}" if name else "")]


def install() -> None:
    """Puts this package at `tf.estimator`, for programs that cannot be changed.

    It is then found as `tf.estimator` of `tensorflow` and of `tensorflow.compat.v1`, as the module
    `tensorflow_estimator`, and as `tensorflow.python.tpu.tpu_estimator` and `tpu_config`. So
    `import gin.tf` works too. Call it before such a program is imported; a second call does
    nothing.
    """
    if _before:
        return
    roots: dict[int, Any] = {}
    for name in _ROOTS:
        if name in sys.modules:
            roots[id(sys.modules[name])] = sys.modules[name]
            _set_module(f"{name}.estimator", _part(""))
            for part in _PARTS:
                _set_module(f"{name}.estimator.{part}", _part(part))
    for root in [tensorflow.compat.v1, tensorflow.compat.v2]:
        roots[id(root)] = root
    for root in roots.values():
        _set_attribute(root, "estimator", _part(""))
    import tensorflow.python.tpu as tpu_package

    for name in _TPU_MODULES:
        _set_module(f"{_TPU_PACKAGE}.{name}", _part("tpu"))
        _set_attribute(tpu_package, name, _part("tpu"))
    _install_old_package()


def _install_old_package() -> None:
    """Makes the package `tensorflow_estimator`, unless there is one."""
    if _OLD_PACKAGE in sys.modules:
        return
    made: dict[str, types.ModuleType] = {}

    def package(name: str) -> types.ModuleType:
        if name not in made:
            made[name] = types.ModuleType(name, "Stands in for a package of TensorFlow.")
            made[name].__path__ = []
            _set_module(name, made[name])
            if "." in name:
                parent, _, last = name.rpartition(".")
                setattr(package(parent), last, made[name])
        return made[name]

    for name, part in _OLD_MODULES.items():
        parent, _, last = f"{_OLD_PACKAGE}.{name}".rpartition(".")
        setattr(package(parent), last, _part(part))
        _set_module(f"{parent}.{last}", _part(part))


def uninstall() -> None:
    """Undoes `install`."""
    while _before:
        owner, name, value = _before.pop()
        if owner is not None and value is _MISSING:
            delattr(owner, name)
        elif owner is not None:
            setattr(owner, name, value)
        elif value is _MISSING:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = value
