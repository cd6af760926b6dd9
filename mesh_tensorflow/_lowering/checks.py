"""What is checked before a Lowering begins: its arguments, and layout rules that split nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from mesh_tensorflow._core.errors import did_you_mean, slip
from mesh_tensorflow._core.graph import Mesh
from mesh_tensorflow._core.layout import LayoutRules
from mesh_tensorflow._core.operation import Operation, is_of_package, with_inner_operations
from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._mesh.stored_layout import plain_shape
from mesh_tensorflow._watching import tell_lowering_error
from mesh_tensorflow.ops._variables.variable import Variable

_SHOWN = 16


def dimension_names(operations: Iterable[Operation]) -> set[str]:
    """Returns the names of the dimensions of all tensors, including those within loops."""
    return {
        name
        for op in with_inner_operations(operations)
        for x in op.inputs + op.outputs
        for name in x.shape.dimension_names
    }


def rules_that_apply(
    rules: LayoutRules,
    operations: Iterable[Operation],
    mesh_shape: Shape,
    usual_dims: Collection[str],
    usual_mesh_dims: Collection[str],
) -> LayoutRules:
    """Returns layout rules without those that are expected to split nothing in this program.

    One layout is used for many models and meshes. The remaining rules can be checked for slips.

    Args:
      rules: LayoutRules.
      operations: all operations of the program.
      mesh_shape: a Shape.
      usual_dims: dimension names of other models, which the program may lack.
      usual_mesh_dims: dimension names of other meshes, which the mesh may lack.
    """
    of_program, of_mesh = dimension_names(operations), mesh_shape.dimension_names
    return LayoutRules(
        (d, m)
        for d, m in rules.pairs
        if (d in of_program or d not in usual_dims) and (m in of_mesh or m not in usual_mesh_dims)
    )


def check_rules_apply(
    operations: Iterable[Operation],
    mesh_to_impl: Mapping[Mesh, MeshImpl],
    slip: Callable[..., None] = slip,
) -> None:
    """Reports a slip if the program or the meshes lack the dimension of a layout rule.

    A rule that several meshes share needs to match one of them. On a mesh without dimensions, of
    one processor, no rule is reported.

    Args:
      operations: all operations of the program.
      mesh_to_impl: a dictionary from Mesh to MeshImpl, which has the layout rules.
      slip: what reports: it takes a message, and a key of those that are given once.

    Raises:
      ValueError: within `mtf.strict()`, unless `slip` is given.
    """
    # A user-defined MeshImpl may have layout rules of another class.
    impls = [
        impl
        for impl in mesh_to_impl.values()
        if isinstance(getattr(impl, "layout_rules", None), LayoutRules)
    ]
    rules = sorted({rule for impl in impls for rule in impl.layout_rules.pairs})
    of_program = sorted(dimension_names(operations)) if rules else []
    of_meshes = list(dict.fromkeys(d for impl in impls for d in impl.shape.dimension_names))
    for rule in rules if of_program and of_meshes else ():  # otherwise there is nothing to split
        for fault in _faults(rule, of_program, of_meshes):
            slip(
                f"layout rule {':'.join(rule)} splits nothing: {fault}",
                # Only the beginning, which names the side of the rule: the rest lists dimensions,
                # and would repeat the warning for each program.
                key=f"rule/{rule}/{fault[:16]}",
            )
    for impl in impls:
        _check_stored(operations, impl, slip)


def _check_stored(
    operations: Iterable[Operation], mesh_impl: MeshImpl, slip: Callable[..., None]
) -> None:
    """Reports a slip if no variable has the dimension of a rule for how variables are stored."""
    stored = mesh_impl.stored_layout
    shapes = [op.shape for op in operations if isinstance(op, Variable)] if stored else []
    # A graph that was lowered before has stored names by now, and rules have the plain ones.
    known = sorted({name for shape in shapes for name in plain_shape(shape).dimension_names})
    for rule in stored.rules.pairs if stored and known else ():
        if rule[0] not in known:
            slip(
                f"variable_layout rule {':'.join(rule)} stores nothing in parts: no variable has "
                f"{rule[0]!r}. Variables have {_shown(known)}{did_you_mean(rule[0], known)} "
                "Correct the rule or leave it out",
                key=f"variable_layout/{rule}",
            )


def _faults(
    rule: tuple[str, str], of_program: Sequence[str], of_meshes: Sequence[str]
) -> Iterator[str]:
    """Yields the problems of a layout rule, with fixes."""
    tensor_dim, mesh_dim = rule
    # A rule with its sides exchanged would otherwise give two reports, neither of which says so.
    if tensor_dim in of_meshes and tensor_dim not in of_program and mesh_dim in of_program:
        yield (
            f"{tensor_dim!r} is a dimension of the mesh, and {mesh_dim!r} one of the program. A "
            f"rule names the program's first; did you mean {mesh_dim}:{tensor_dim}?"
        )
        return
    for name, whose, known in zip(rule, ("program", "mesh"), (of_program, of_meshes)):
        if name not in known:
            yield (
                f"{name!r} is not there. The {whose} has {_shown(known) or 'no dimensions'}"
                f"{did_you_mean(name, known)} Correct the rule or leave it out"
            )


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def all_of_package(operations: Iterable[Operation]) -> bool:
    """Returns whether all operations, including inner ones, are of classes of this package.

    Other classes may rely on a slice for each processor, so processors are not merged then.
    """
    return all(is_of_package(type(op)) for op in with_inner_operations(operations))


def check_impls(mesh_to_impl: object) -> None:
    """Checks the argument `mesh_to_impl` of a Lowering; a slip if processors are missing.

    Raises:
      TypeError: it is not a dictionary, or a value in it is not a MeshImpl.
    """
    impls = mesh_to_impl.values() if isinstance(mesh_to_impl, Mapping) else [None]
    for impl in impls:
        # Only what surely is none: a mesh implementation of the user's own need not be a MeshImpl.
        if impl is None or isinstance(impl, str):
            found = repr(mesh_to_impl if impl is None else impl)
            raise TypeError(
                "Lowering: mesh_to_impl must be a dictionary from mtf.Mesh to a MeshImpl, as "
                '{mesh: mtf.placement_mesh_impl.PlacementMeshImpl("all:1", "", [""])}, and not '
                f"{found}"
            )
    for impl in impls:
        if isinstance(impl, MeshImpl):
            impl.check_processors()


def check_layouts(operations: Iterable[Operation], mesh_to_impl: Mapping[Mesh, MeshImpl]) -> None:
    """Checks that each operation, including inner ones, can be lowered in the layout of its mesh.

    Raises:
      ValueError: one cannot; the message names it.
    """
    for op in with_inner_operations(operations):
        try:
            op.check_layout(mesh_to_impl)
        except Exception as e:
            tell_lowering_error(e, op)
            raise
