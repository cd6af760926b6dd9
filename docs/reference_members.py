"""What the reference pages show of a module, in which order, and under which name.

mkdocstrings reads the package with griffe, which loads this extension. It

* names functions and classes as programs do (`mtf.einsum`), wherever they are defined;
* puts what users call before the classes of operations, which are their results;
* hides the methods by which operations lower and differentiate themselves, except in `Operation`.
"""

from __future__ import annotations

from typing import Any

import griffe

PACKAGE = "mesh_tensorflow"
OPERATION = f"{PACKAGE}._core.operation.Operation"
# Programs reach these by attributes of the package; later ones do not rename earlier ones.
PUBLIC_MODULES = (
    "",
    "layers",
    "optimize",
    "schedules",
    "signal",
    "train",
    "visualize",
    "debug",
    "auto_mtf",
    "checkpoint",
    "utils",
    "placement_mesh_impl",
    "simd_mesh_impl",
    "tpu_variables",
    "beam_search",
)
# Beside what `Operation` declares: the protocol of families of operations.
PROTOCOL = {"cost_key", "has_gradient", "may_begin_sum", "takes_memory"}


class ReferenceMembers(griffe.Extension):
    """Names, orders and hides members."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Called when all modules of a package have been read."""
        if pkg.name != PACKAGE:
            return
        name_as_programs_do(pkg)
        hidden = {*pkg[OPERATION.removeprefix(PACKAGE + ".")].members, *PROTOCOL} - {"__init__"}
        for module in modules_of(pkg):
            classes = [c for c in module.classes.values() if not c.is_alias and is_operation(c)]
            for operation in classes:
                for name, member in operation.members.items():
                    if name in hidden:
                        member.public = False
            put_last(module, {c.name for c in classes})


def modules_of(module: griffe.Module) -> list[griffe.Module]:
    """Returns a module and all that are in it."""
    inner = [m for m in module.members.values() if not m.is_alias and m.is_module]
    return [module, *(found for m in inner for found in modules_of(m))]


def is_operation(cls: griffe.Class) -> bool:
    """Whether a class derives from `Operation`, and is not `Operation` itself."""
    if cls.path == OPERATION:
        return False
    pending, seen = [cls], set()
    while pending:
        current = pending.pop()
        if current.path == OPERATION:
            return True
        if current.path not in seen:
            seen.add(current.path)
            pending += [base for base in current.resolved_bases if base.is_class]
    return False


def put_last(module: griffe.Module, names: set[str]) -> None:
    """Sorts `__all__`: in order of source, and some names at the end."""
    if not module.exports:
        return
    exported = [str(name) for name in module.exports]

    def place(name: str) -> tuple[bool, int]:
        member = module.members.get(name)
        line = getattr(member, "alias_lineno", None) or getattr(member, "lineno", None) or 0
        return name in names, line

    module.exports = sorted(exported, key=place)


def name_as_programs_do(pkg: griffe.Module) -> None:
    """Notes "mtf.einsum" in the `extra` of functions and classes, where the templates find it."""
    for inner in PUBLIC_MODULES:
        if inner and inner not in pkg.members:
            continue
        module, prefix = (pkg[inner], f"mtf.{inner}.") if inner else (pkg, "mtf.")
        for name, member in module.members.items():
            if name.startswith("_"):
                continue
            try:
                target = member.final_target if member.is_alias else member
            except griffe.AliasResolutionError:  # a module of TensorFlow or of Python
                continue
            if target.path.startswith(PACKAGE) and (target.is_function or target.is_class):
                target.extra["reference"].setdefault("name", prefix + name)
