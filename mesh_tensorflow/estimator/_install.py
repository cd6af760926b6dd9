"""Installs this package as tf.estimator, which TensorFlow has removed."""

from __future__ import annotations

import sys
import types
from typing import Any

import tensorflow
import tensorflow.compat.v1
import tensorflow.compat.v2

__all__ = ["install", "uninstall"]

# Modules that programs import as `tf`.
_ROOTS = (
    "tensorflow",
    "tensorflow.compat.v1",
    "tensorflow.compat.v2",
    "tensorflow._api.v2.v2",
    "tensorflow._api.v2.compat.v1",
    "tensorflow._api.v2.compat.v2",
)
_PARTS = ("experimental", "export", "inputs", "tpu")
# Modules of the package `tensorflow_estimator`, and of its predecessor
# `tensorflow.python.estimator`, that programs import; by the part of this package.
_OLD_PACKAGE = "tensorflow_estimator"
_OLDER_PACKAGE = "tensorflow.python.estimator"
_OLD_MODULES = {
    "early_stopping": "experimental",
    "estimator": "",
    "estimator_lib": "",
    "export.export": "export",
    "export.export_lib": "export",
    "export.export_output": "export",
    "exporter": "",
    "hooks.basic_session_run_hooks": "",
    "hooks.hooks": "experimental",
    "hooks.session_run_hook": "",
    "inputs.inputs": "inputs",
    "inputs.numpy_io": "inputs",
    "mode_keys": "",
    "model_fn": "",
    "run_config": "",
    "tpu.tpu_config": "tpu",
    "tpu.tpu_context": "tpu",
    "tpu.tpu_estimator": "tpu",
    "training": "",
    "util": "",
}
_TPU_PACKAGE = "tensorflow.python.tpu"
_TPU_MODULES = ("tpu_config", "tpu_context", "tpu_estimator")

_MISSING = object()
# Previous values: (object or None for sys.modules, name, value or _MISSING), in order.
_before: list[tuple[Any, str, Any]] = []


def _set_attribute(owner: types.ModuleType, name: str, value: object) -> None:
    _before.append((owner, name, getattr(owner, name, _MISSING)))
    setattr(owner, name, value)


def _set_module(name: str, module: types.ModuleType) -> None:
    _before.append((None, name, sys.modules.get(name, _MISSING)))
    sys.modules[name] = module


def _part(name: str) -> types.ModuleType:
    return sys.modules["mesh_tensorflow.estimator" + (f".{name}" if name else "")]


def install() -> None:
    """Installs this package as `tf.estimator`, for programs that cannot be changed.

    It becomes `tf.estimator` of `tensorflow` and of `tensorflow.compat.v1`, the module
    `tensorflow_estimator`, and `tensorflow.python.tpu.tpu_estimator`, `tpu_config` and
    `tpu_context`, so that `import gin.tf` works too. Call it before such a program is imported; a
    second call does nothing.
    """
    if _before:
        return
    roots: dict[int, Any] = {}
    for name in _ROOTS:
        if name in sys.modules:
            # By id, since one module may have several of these names.
            roots[id(sys.modules[name])] = sys.modules[name]
            _set_module(f"{name}.estimator", _part(""))
            for part in _PARTS:
                _set_module(f"{name}.estimator.{part}", _part(part))
    for root in [tensorflow, *roots.values()]:  # each has its own modules for the versions
        for version in [root.compat.v1, root.compat.v2]:
            roots[id(version)] = version
    for root in roots.values():
        _set_attribute(root, "estimator", _part(""))
    import tensorflow.python.tpu as tpu_package

    for name in _TPU_MODULES:
        _set_module(f"{_TPU_PACKAGE}.{name}", _part("tpu"))
        _set_attribute(tpu_package, name, _part("tpu"))
    _install_old_packages()


def _install_old_packages() -> None:
    """Creates the package `tensorflow_estimator` and its predecessor, unless they exist."""
    whole = {f"{_OLD_PACKAGE}.{name}": "" for name in ("estimator", "compat.v1.estimator")}
    for root, modules in [
        (_OLD_PACKAGE, whole),
        (
            _OLD_PACKAGE,
            {f"{_OLD_PACKAGE}.python.estimator.{n}": p for n, p in _OLD_MODULES.items()},
        ),
        (_OLDER_PACKAGE, {f"{_OLDER_PACKAGE}.{n}": p for n, p in _OLD_MODULES.items()}),
    ]:
        # What is installed stays as it is; what was made a moment ago gets the rest.
        if root not in sys.modules or root in _installed_modules():
            for name, part in modules.items():
                _install_old_module(name, part)


def _installed_modules() -> set[str]:
    """Returns the names of the modules that `install` has added so far."""
    return {name for owner, name, _ in _before if owner is None}


def _package(name: str) -> types.ModuleType:
    """Returns a package; creates it and its parents if it does not exist."""
    if name not in sys.modules:
        module = types.ModuleType(name, "Stands in for a package of TensorFlow.")
        module.__path__ = []
        _set_module(name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            _set_attribute(_package(parent), last, module)
    return sys.modules[name]


def _install_old_module(name: str, part: str) -> None:
    parent, _, last = name.rpartition(".")
    _set_attribute(_package(parent), last, _part(part))
    _set_module(name, _part(part))


def uninstall() -> None:
    """Undoes `install`."""
    while _before:
        # The last change first: a name that was changed twice ends with its first value.
        owner, name, value = _before.pop()
        if owner is not None and value is _MISSING:
            delattr(owner, name)
        elif owner is not None:
            setattr(owner, name, value)
        elif value is _MISSING:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = value
