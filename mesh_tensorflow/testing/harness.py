"""Test harness: lowers one program in many layouts, and compares values and communication."""

from __future__ import annotations

import collections
import contextlib
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
import numpy.typing as npt
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import placement_mesh_impl
from mesh_tensorflow._core.operation import Cost, with_inner_operations
from mesh_tensorflow._core.placement import walk
from mesh_tensorflow._core.shape import JointAxis, single_axes
from mesh_tensorflow._mesh.devices import separate_memories
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate

__all__ = [
    "CPUS",
    "LARGE",
    "MESHES",
    "MOST_LAYOUTS",
    "OTHER_MESHES",
    "WHOLE",
    "Lowered",
    "Placing",
    "as_list",
    "assert_close",
    "chosen_layouts",
    "collectives_of",
    "counted_and_predicted",
    "is_legal",
    "layout_text",
    "legal_layouts",
    "lower",
    "lower_with",
    "mesh_axis_names",
    "placings",
    "random_layout",
    "separate_memories",
    "session",
    "splittable",
    "values_of",
]

MESHES = ["x:2", "x:2,y:2"]
OTHER_MESHES = [
    "x:1",
    "x:3",
    "x:4",
    "x:2,y:3",
    "x:2,y:4",
    "x:8",
]  # a program is tried in one of them
MOST_LAYOUTS = 4  # of each of MESHES, besides those that cover what can be split
# Programs with more operations take long: they are tried in MESHES only, in layouts that cover what
# can be split.
LARGE = 30
CPUS = 8
# Operations that need the indexed dimension and those of the indices on different mesh axes.
_LOOKS_UP = (mtf.GatherOperation, mtf.GatherGradientOperation)


def _mesh_shape(mesh: str) -> mtf.Shape:
    shape = mtf.convert_to_shape(mesh)
    assert shape is not None
    return shape


class Placing(NamedTuple):
    """A mesh shape, a layout, and the devices of the processors.

    Attributes:
      mesh: the mesh shape.
      layout: the layout.
      apart: whether each processor is a logical CPU that counts as a separate memory domain; else
        all processors share one memory domain.
      merge: which processors are executed as one, as for PlacementMeshImpl.
      pairs: whether pairs of consecutive processors are on one device.
      simd: whether to use SimdMeshImpl.
      pjrt: whether to use GspmdMeshImpl, on devices of JAX.
      zero: the stage of ZeRO; None stores variables as the layout says.
      zero_axis: its mesh dimension.
    """

    mesh: str
    layout: str
    apart: bool = False
    merge: str = "none"
    pairs: bool = False
    simd: bool = False
    pjrt: bool = False
    zero: Optional[int] = None
    zero_axis: Optional[str] = None

    @property
    def cpus(self) -> list[str]:
        """The names of logical CPUs, one for each processor."""
        return [f"/cpu:{i}" for i in range(_mesh_shape(self.mesh).size)]

    @property
    def devices(self) -> list[str]:
        """The devices of PlacementMeshImpl."""
        n = _mesh_shape(self.mesh).size
        places = [i // 2 if self.pairs else i for i in range(n)]
        return [f"cpu:{i}" if self.apart else "" for i in places]

    def impl(self) -> mtf.MeshImpl:
        """Creates the MeshImpl; for SIMD and JAX within a program that `run` runs."""
        stored: dict[str, Any] = {}
        if self.zero is not None:
            stored = {"zero": self.zero, "zero_axis": self.zero_axis}
        if self.pjrt:
            return mtf.GspmdMeshImpl(self.mesh, self.layout, **stored)
        if self.simd:
            return SimdMeshImpl(self.mesh, self.layout, **stored)
        return placement_mesh_impl.PlacementMeshImpl(
            self.mesh, self.layout, self.devices, merge=self.merge, **stored
        )

    def run(self, program: Callable[..., Any], inputs: Sequence[tf.Tensor] = ()) -> Any:
        """Returns what a program of sessions makes of its inputs, on the processors.

        Args:
          program: a function of the inputs that makes a Lowering.
          inputs: tf.Tensors.
        """
        if self.pjrt:
            pjrt: Any = mtf.pjrt  # imported when it is used
            return pjrt.in_session(program, inputs)
        if self.simd:
            return replicate(program, inputs, devices=self.cpus)
        return program(*inputs)

    def around(self) -> contextlib.AbstractContextManager:
        """Returns the context in which the program is built."""
        return separate_memories() if self.apart else contextlib.nullcontext()


WHOLE = Placing("", "")


def session() -> tf.Session:
    """Returns a session with eight logical CPUs and without graph rewrites, to save time."""
    config = tf.ConfigProto(device_count={"CPU": CPUS})
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return tf.Session(config=config)


# -- layouts


def splittable(operations: Sequence[mtf.Operation], whole: Iterable[str] = ()) -> list[str]:
    """Returns the dimension names that a layout may split, without those that are to be whole."""
    names = {n for op in operations for n in op._dimension_names()} - set(whole)
    # No layout splits anonymous dimensions, by which operations ask for whole values.
    return sorted(n for n in names if not n.startswith("_anonymous_"))


def _together(operations: Iterable[mtf.Operation]) -> set[tuple]:
    """Returns tuples of dimensions of which a mesh axis may split one: those of each tensor."""
    together = {tuple(t.shape) for op in operations for t in op.inputs + op.outputs}
    for op in operations:
        if isinstance(op, _LOOKS_UP):
            together.add(tuple(dict.fromkeys(d for t in op.inputs + op.outputs for d in t.shape)))
    return together


def is_legal(
    rules: dict[str, int], shapes: Iterable[tuple], mesh_shape: mtf.Shape, uneven: bool = False
) -> bool:
    """Returns whether a layout fits all shapes.

    It does not if a mesh axis splits two dimensions of a tensor, or, unless it is uneven, does not
    divide a size.
    """
    for dims in shapes:
        axes = [(rules[d.name], d.size) for d in dims if d.name in rules]
        single = single_axes(axis for axis, _ in axes)
        if len(set(single)) < len(single):
            return False
        if not uneven and any(size % mesh_shape[axis].size for axis, size in axes):
            return False
    return True


def legal_layouts(
    graph: mtf.Graph,
    mesh: str,
    whole: Iterable[str] = (),
    limit: int = 4000,
    alike: Sequence[Sequence[str]] = (),
    joint: bool = False,
    uneven: bool = False,
) -> list[dict[str, int]]:
    """Returns the legal layouts of a program, as dictionaries from dimension name to mesh axis.

    Args:
      graph: an mtf.Graph.
      mesh: the mesh shape.
      whole: names of dimensions that are not split.
      limit: how many layouts are tried; of more, some are drawn.
      alike: groups of names of dimensions, of which all are split alike.
      joint: whether two mesh axes may split one dimension together, in either order.
      uneven: whether sizes need not be divisible.
    """
    operations = list(with_inner_operations(graph.operations))
    names = splittable(operations, whole)
    shapes = _together(operations)
    mesh_shape = _mesh_shape(mesh)
    choices: list[Optional[int]] = [None, *range(len(mesh_shape))]
    choices += _pairs_of_axes(mesh_shape) if joint else []
    # What is illegal by itself is left out first, since combinations grow exponentially.
    alone = {
        n: [a for a in choices if a is None or is_legal({n: a}, shapes, mesh_shape, uneven)]
        for n in names
    }
    names = [n for n in names if len(alone[n]) > 1]
    # A product of floats, as of many dimensions it is beyond the integers of NumPy.
    total = int(np.prod([len(alone[n]) for n in names], dtype=float))
    picks: Iterable[Sequence[Optional[int]]]
    if total <= limit:
        picks = itertools.product(*(alone[n] for n in names))
    else:
        # With one seed always, so that a failure can be repeated.
        rng = random.Random(0)
        picks = ([rng.choice(alone[n]) for n in names] for _ in range(limit))
    layouts = [{n: a for n, a in zip(names, pick) if a is not None} for pick in picks]
    # A sample may lack some: each mesh axis is to split each dimension that it can.
    layouts += [{n: a} for n in names for a in alone[n] if a is not None]
    layouts = [r for r in layouts if all(len({r.get(n) for n in names}) == 1 for names in alike)]
    unique = {tuple(sorted(rules.items())): rules for rules in layouts}
    return [rules for rules in unique.values() if is_legal(rules, shapes, mesh_shape, uneven)]


def _pairs_of_axes(mesh_shape: mtf.Shape) -> list[JointAxis]:
    return list(map(JointAxis, itertools.permutations(range(len(mesh_shape)), 2)))


def mesh_axis_names(mesh: str) -> list[str]:
    """Returns the names of a mesh's dimensions, and of pairs of them, joined in either order."""
    mesh_shape = _mesh_shape(mesh)
    axes: list[int] = [*range(len(mesh_shape)), *_pairs_of_axes(mesh_shape)]
    return [mesh_shape[axis].name for axis in axes]


def random_layout(graph: mtf.Graph, mesh: str, seed: int) -> str:
    """Returns a random legal layout as text; of two, one may split sizes unevenly."""
    operations = list(with_inner_operations(graph.operations))
    shapes = _together(operations)
    mesh_shape = _mesh_shape(mesh)
    rng = random.Random(seed)
    names = splittable(operations)
    # Otherwise the first names would take the mesh axes in each layout.
    rng.shuffle(names)
    uneven = rng.random() < 0.5
    rules: dict[str, int] = {}
    for name in names:
        axis: int = rng.randrange(len(mesh_shape))
        if len(mesh_shape) > 1 and rng.random() < 0.3:
            axis = rng.choice(_pairs_of_axes(mesh_shape))
        more = {**rules, name: axis}
        if mesh_shape[axis].size > 1 and is_legal(more, shapes, mesh_shape, uneven):
            rules = more
    return layout_text(rules, mesh, uneven)


def chosen_layouts(layouts: Sequence[dict], extra: int, seed: int) -> list[dict]:
    """Selects layouts that cover every pair of a dimension and a mesh axis, and a few more."""
    rng = random.Random(seed)
    rest = list(layouts)
    rng.shuffle(rest)
    open_pairs = {pair for rules in rest for pair in rules.items()}
    chosen = []
    # A greedy set cover: the fewest layouts that cover all pairs would be hard to find.
    while open_pairs:
        best = max(rest, key=lambda rules: len(open_pairs & set(rules.items())))
        chosen.append(best)
        rest.remove(best)
        open_pairs -= set(best.items())
    return chosen + rest[:extra]


def layout_text(rules: dict[str, int], mesh: str, uneven: bool = False) -> str:
    """Returns a layout as text, such as "a:x,b:y", or, if it is uneven, "a:x?,b:y?"."""
    mesh_shape, end = _mesh_shape(mesh), "?" if uneven else ""
    return ",".join(f"{name}:{mesh_shape[axis].name}{end}" for name, axis in sorted(rules.items()))


def placings(
    graph: mtf.Graph,
    whole: Iterable[str] = (),
    thorough: bool = False,
    seed: int = 0,
    alike: Sequence[Sequence[str]] = (),
) -> list[Placing]:
    """Returns the placings in which to try a program.

    Most have all processors in one memory domain; a few have separate memory domains, merged
    processors, SIMD, a dimension that two mesh axes split, or sizes that the mesh does not divide.

    Args:
      graph: an mtf.Graph.
      whole: names of dimensions that are not split.
      thorough: whether to include layouts of two small meshes, all of them up to a limit, and
        selected layouts of another mesh; fewer if the program is large. Else only a few layouts of
        one mesh.
      seed: an integer.
      alike: groups of names of dimensions, of which all are split over one mesh dimension or none.
    """
    plain = []
    small = len(graph.operations) <= LARGE
    others = [OTHER_MESHES[seed % len(OTHER_MESHES)]] if small else []
    for mesh in [*MESHES, *others] if thorough else ["x:2,y:2"]:
        layouts = legal_layouts(graph, mesh, whole, alike=alike)
        chosen = chosen_layouts(layouts, 1, seed)
        if thorough and mesh in MESHES and small:
            chosen += [rules for rules in layouts if rules not in chosen][:MOST_LAYOUTS]
        plain += [Placing(mesh, layout_text(rules, mesh)) for rules in chosen]
    kinds = _kinds(plain)
    special = _joint(graph, whole, alike, seed) + _uneven(graph, whole, alike, seed)
    if thorough:
        return plain + kinds + special
    # By the seed, so that programs with other seeds try the other kinds.
    kind = [kinds[seed % len(kinds)]] if kinds else []
    return plain[:1] + ([special[seed % len(special)]] if special else plain[1:2]) + kind


def _joint(
    graph: mtf.Graph, whole: Iterable[str], alike: Sequence[Sequence[str]], seed: int
) -> list[Placing]:
    """Returns placings in which two mesh axes split a dimension together."""
    joint = []
    small = len(graph.operations) <= LARGE
    for mesh in ["x:2,y:2", "x:2,y:2,z:2"] if small else ["x:2,y:2"]:
        layouts = [
            rules
            for rules in legal_layouts(graph, mesh, whole, 600, alike, joint=True)
            if any(isinstance(axis, JointAxis) for axis in rules.values())
        ]
        joint += _splitting_most(layouts, mesh, seed)
    return _with_kinds(joint, joint[:2], joint[1:2])


def _uneven(
    graph: mtf.Graph, whole: Iterable[str], alike: Sequence[Sequence[str]], seed: int
) -> list[Placing]:
    """Returns placings on meshes that do not divide some of the sizes that they split."""
    uneven = []
    sizes = {
        d for op in with_inner_operations(graph.operations) for t in op.outputs for d in t.shape
    }
    for mesh in ["x:3", "x:2,y:3"]:
        mesh_shape = _mesh_shape(mesh)
        layouts = [
            rules
            for rules in legal_layouts(graph, mesh, whole, 600, alike, joint=True, uneven=True)
            if any(d.size % mesh_shape[rules[d.name]].size for d in sizes if d.name in rules)
        ]
        uneven += _splitting_most(layouts, mesh, seed, uneven=True)
    return _with_kinds(uneven, uneven[1:3], uneven[:1])


def _splitting_most(
    layouts: list[dict], mesh: str, seed: int, uneven: bool = False
) -> list[Placing]:
    """Returns placings in two of the layouts that split the most dimensions."""
    random.Random(seed).shuffle(layouts)
    most = sorted(layouts, key=len, reverse=True)[:2]
    return [Placing(mesh, layout_text(rules, mesh, uneven)) for rules in most]


def _with_kinds(
    placings: list[Placing], simd: Sequence[Placing], apart: Sequence[Placing]
) -> list[Placing]:
    """Returns placings, and some of them by SIMD, in separate memories, and merged."""
    kinds = [p._replace(simd=True) for p in simd] + [p._replace(apart=True) for p in apart]
    kinds += [p._replace(apart=True, merge="device", pairs=True) for p in placings[-1:]]
    return placings + kinds


def _kinds(placings: Sequence[Placing]) -> list[Placing]:
    """Returns placings without a single memory domain, for the layouts that split the most."""
    split = [p for p in placings if p.layout]
    most = sorted(split, key=lambda p: (p.layout.count(":"), p.mesh in ("x:4", "x:2,y:2")))
    two_axes = [p for p in most if "y:" in p.mesh]
    kinds = [p._replace(apart=True) for p in most[-2:]]
    kinds += [p._replace(merge="memory") for p in most[-1:]]
    kinds += [p._replace(apart=True, merge="device", pairs=True) for p in two_axes[-1:]]
    # Another one than is merged above, where there are several. Both may be the same placing.
    simd = dict.fromkeys([*two_axes[-2:-1], *most[-1:]])
    return kinds + [p._replace(simd=True) for p in simd]


# -- lowering


class Lowered(NamedTuple):
    """A program lowered in one placing.

    Attributes:
      placing: the Placing.
      lowering: the Lowering.
      exports: the exported targets.
      counted: the collectives that the Lowering counted, a multiset.
      predicted: the collectives that the cost model predicts, a multiset.
    """

    placing: Placing
    lowering: mtf.Lowering
    exports: list[tf.Tensor]
    counted: collections.Counter
    predicted: collections.Counter


def collectives_of(costs: Iterable[tuple[object, Cost]]) -> collections.Counter:
    """Returns the collectives of pairs (operation, Cost) as a multiset."""
    return collections.Counter(
        (c.kind, tuple(c.mesh_axes), c.elements, c.bytes)
        for _, cost in costs
        for c in cost.collectives
    )


def counted_and_predicted(
    lowering: mtf.Lowering, targets: Sequence[mtf.Tensor] = ()
) -> tuple[collections.Counter, collections.Counter]:
    """Returns the collectives that a Lowering has made, and those that its program's costs list.

    Args:
      lowering: a Lowering to one mesh, of which all targets are exported.
      targets: the Tensors whose values are needed at the end, so that no sum is pending.

    Returns:
      Two multisets, which are equal unless the cost of an operation is wrong.
    """
    counted = collectives_of((kind, Cost(collectives=(c,))) for kind, _, c in lowering.collectives)
    [impl] = lowering.mesh_to_impl.values()
    return counted, collectives_of(walk(lowering.graph.operations, impl, targets).costs)


def lower(
    graph: mtf.Graph, mesh: mtf.Mesh, placing: Placing, targets: Sequence[mtf.Tensor]
) -> Lowered:
    """Lowers a program and exports tensors; may be called several times in one tf graph."""
    with placing.around():
        return lower_with(graph, mesh, targets, placing.impl, placing, placing.run)


def lower_with(
    graph: mtf.Graph,
    mesh: mtf.Mesh,
    targets: Sequence[mtf.Tensor],
    make_impl: Callable[[], mtf.MeshImpl],
    placing: Placing,
    run: Callable[[Callable], Any],
) -> Lowered:
    """Lowers a program through a mesh implementation, and exports tensors.

    Args:
      graph: an mtf.Graph.
      mesh: its Mesh.
      targets: the Tensors to export.
      make_impl: a function that returns the MeshImpl.
      placing: the Placing to store in the result.
      run: a function that runs its argument as the program of all processors.
    """
    lowerings = []

    def program() -> list[tf.Tensor]:
        lowerings.append(mtf.Lowering(graph, {mesh: make_impl()}, autostack=False))
        return [lowerings[0].export_to_tf_tensor(t) for t in targets]

    # Several lowerings share a tf graph: the slices that each one makes need names of their own.
    with tf.variable_scope(f"placing_{len(tf.get_default_graph().get_operations())}"):
        exports = run(program)
    [lowering] = lowerings
    return Lowered(placing, lowering, exports, *counted_and_predicted(lowering, targets))


def values_of(
    session: tf.Session, lowered: Iterable[Lowered], feed: Mapping[Any, Any]
) -> list[list[np.ndarray]]:
    """Returns the values of what lowered programs export, with initial values of variables.

    Args:
      session: a tf.Session.
      lowered: lowered programs, in one tf graph.
      feed: a dictionary from placeholders to arrays.
    """
    lowered = list(lowered)
    session.run(tf.global_variables_initializer())
    session.run([low.lowering.copy_masters_to_slices() for low in lowered])
    return session.run([low.exports for low in lowered], feed)


# -- comparing


def as_list(value: object) -> list:
    """Converts a tuple to a list, and wraps anything that is not a list."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def assert_close(
    actual: npt.ArrayLike, expected: npt.ArrayLike, tolerance: float, what: str = ""
) -> None:
    """Compares floats relative to the largest element; integers and booleans exactly."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, f"{what}: {actual.shape} instead of {expected.shape}"
    if actual.dtype == bool or np.issubdtype(actual.dtype, np.integer):
        np.testing.assert_array_equal(actual, expected, err_msg=what)
        return
    is_complex = np.iscomplexobj(actual) or np.iscomplexobj(expected)
    wide: type = np.complex128 if is_complex else np.float64
    actual, expected = actual.astype(wide), expected.astype(wide)
    # An element near 0 may be a sum of large terms, and then has the rounding error of those.
    scale = np.max(np.abs(expected), initial=0.0)
    np.testing.assert_allclose(
        actual, expected, rtol=tolerance, atol=tolerance * max(scale, 1e-3), err_msg=what
    )
