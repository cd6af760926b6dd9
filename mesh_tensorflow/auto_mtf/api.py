"""Search for the layout, and the mesh shape, that minimize the memory or time of a program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional, Union

from mesh_tensorflow._core.errors import check_choice
from mesh_tensorflow._core.graph import Graph
from mesh_tensorflow._core.layout import LayoutRules, StoredLayout
from mesh_tensorflow._core.operation import Tensor
from mesh_tensorflow._core.shape import Shape, convert_to_shape
from mesh_tensorflow._units import bytes_text
from mesh_tensorflow.auto_mtf import layout_optimizer, memory_estimator
from mesh_tensorflow.auto_mtf._space import layout_text, stored_layouts
from mesh_tensorflow.auto_mtf.hardware import Hardware, hardware_profile
from mesh_tensorflow.auto_mtf.profiles import Profile, estimator_for
from mesh_tensorflow.auto_mtf.step_time import (
    MemoryLimitError,
    ProgramParts,
    check_memory_limit,
    fastest,
)

__all__ = ["all_mesh_shapes", "layout", "layout_and_mesh_shape", "layout_and_stored_layout"]


def layout(
    mtf_graph: Graph,
    mesh_shape: Any,
    mtf_outputs: Iterable[Tensor] = (),
    objective: str = "memory",
    memory_limit_bytes: Optional[float] = None,
    hardware: Union[str, Hardware, None] = None,
    joint: bool = False,
    profile: Union[bool, Profile] = False,
) -> LayoutRules:
    """Returns the layout that minimizes the memory or the time of a program.

    The program is the graph at the time of the call: to choose a layout for training, call it
    after creating gradients and updates.

    >>> x = mtf.ones(mesh, "batch:8,d_in:4")
    >>> y = mtf.layers.dense(x, [mtf.Dimension("d_out", 16)], x.shape.dims[1:])
    >>> print(mtf.auto_mtf.layout(graph, "rows:2,cols:2", [y]))
    LayoutRules{batch:rows, d_out:cols}

    Args:
      mtf_graph: an mtf.Graph.
      mesh_shape: a Shape, or what converts to one.
      mtf_outputs: Tensors that stay in memory until the end.
      objective: "memory", the peak memory of live tensors on one processor, as in the classic
        release; or "time", the estimated time of a step.
      memory_limit_bytes: the memory that the program may use on one processor. With "time",
        variables and optimizer slots count throughout.
      hardware: for "time": a name in `hardware.PROFILES`, the path of a measured profile, or a
        Hardware; TPU v3 if None.
      joint: whether a layout may split one dimension over several mesh dimensions together, as
        "batch:rows+cols" does. There are more layouts to choose from then, and the search takes
        longer.
      profile: for "time": True, or a Profile, times the operations of the program on the processors
        of this machine, and chooses by these times; what is not timed is estimated by `hardware`.

    Raises:
      ValueError: `objective` or `hardware` is unknown, or there is a profile for "memory".
      auto_mtf.step_time.MemoryLimitError: no layout fits in `memory_limit_bytes`.
      auto_mtf.layout_optimizer.SolverError: the solver did not find an optimum.
    """
    shapes, limit = [convert_to_shape(mesh_shape) or Shape([])], memory_limit_bytes
    return _best(shapes, mtf_graph, mtf_outputs, objective, limit, hardware, joint, profile)[0]


def layout_and_stored_layout(
    mtf_graph: Graph,
    mesh_shape: Any,
    mtf_outputs: Iterable[Tensor] = (),
    memory_limit_bytes: Optional[float] = None,
    hardware: Union[str, Hardware, None] = None,
    zero: Sequence[int] = (0, 1, 2, 3),
    joint: bool = False,
    profile: Union[bool, Profile] = False,
) -> tuple[LayoutRules, Optional[StoredLayout]]:
    """Returns the layout, and how to store variables, that minimize the time of a step.

    >>> x = mtf.ones(mesh, "batch:8,d_in:4")
    >>> y = mtf.layers.dense(x, [mtf.Dimension("d_out", 16)], x.shape.dims[1:])
    >>> layout, stored = mtf.auto_mtf.layout_and_stored_layout(graph, "rows:2,cols:2", [y])
    >>> print(stored)
    None

    Args:
      mtf_graph: an mtf.Graph.
      mesh_shape: a Shape, or what converts to one.
      mtf_outputs: Tensors that stay in memory until the end.
      memory_limit_bytes: the memory that a step may use on one processor, or None.
      hardware: see `layout`.
      zero: the stages of ZeRO to choose from, each over any mesh dimension; 1 and 2
        are one but in microbatches, and only 2 is tried then.
      joint: see `layout`; variables, too, may be stored over several mesh dimensions together.
      profile: see `layout`.

    Returns:
      A tuple (LayoutRules, StoredLayout or None). Of the second, `stage` and `mesh_dim` are the
      arguments `zero` and `zero_axis` of mesh implementations. Of equally fast ones, the first
      stage of `zero` is chosen.

    Raises:
      ValueError: `hardware` or a stage is unknown.
      auto_mtf.step_time.MemoryLimitError: no layout fits in `memory_limit_bytes`.
      auto_mtf.layout_optimizer.SolverError: the solver did not find an optimum.
    """
    shapes, limit = [convert_to_shape(mesh_shape) or Shape([])], memory_limit_bytes
    rules, _, stored = _best(
        shapes, mtf_graph, mtf_outputs, "time", limit, hardware, joint, profile, zero
    )
    return rules, stored


def layout_and_mesh_shape(
    mtf_graph: Graph,
    num_machines: int,
    mtf_outputs: Iterable[Tensor] = (),
    max_mesh_shape_dimensions: int = 2,
    objective: str = "memory",
    memory_limit_bytes: Optional[float] = None,
    hardware: Union[str, Hardware, None] = None,
    joint: bool = False,
) -> tuple[LayoutRules, Shape]:
    """Returns the layout and the mesh shape that minimize the memory or the time of a program.

    >>> x = mtf.ones(mesh, "batch:8,d_in:4")
    >>> y = mtf.layers.dense(x, [mtf.Dimension("d_out", 16)], x.shape.dims[1:])
    >>> layout, mesh_shape = mtf.auto_mtf.layout_and_mesh_shape(graph, 4, [y])
    >>> print(mesh_shape)
    Shape[mesh_0=4]

    Args:
      mtf_graph: an mtf.Graph.
      num_machines: the number of processors.
      mtf_outputs: Tensors that stay in memory until the end.
      max_mesh_shape_dimensions: the maximum number of mesh dimensions.
      objective: "memory" or "time"; see `layout`.
      memory_limit_bytes: the memory that the program may use on one processor; see `layout`.
      hardware: for "time"; see `layout`.
      joint: see `layout`.

    Returns:
      A tuple (LayoutRules, Shape); the mesh dimensions are named mesh_0, mesh_1, and so on.

    Raises:
      ValueError: `num_machines` or `max_mesh_shape_dimensions` is less than 1, or `objective` or
        `hardware` is unknown.
      auto_mtf.step_time.MemoryLimitError: no layout fits in `memory_limit_bytes`.
      auto_mtf.layout_optimizer.SolverError: the solver did not find an optimum.
    """
    shapes = all_mesh_shapes(num_machines, max_mesh_shape_dimensions)
    limit = memory_limit_bytes
    return _best(shapes, mtf_graph, mtf_outputs, objective, limit, hardware, joint)[:2]


_OBJECTIVES = ("memory", "time")


def _best(
    shapes: Sequence[Shape],
    graph: Graph,
    outputs: Iterable[Tensor],
    objective: str,
    limit: Optional[float],
    hardware: Union[str, Hardware, None],
    joint: bool,
    profile: Union[bool, Profile] = False,
    zero: Sequence[int] = (0,),
) -> tuple[LayoutRules, Shape, Optional[StoredLayout]]:
    """Returns the best layout on the best of some meshes; of equally good ones, the first."""
    check_choice("layout", "objective", objective, _OBJECTIVES)
    check_memory_limit(limit)
    if profile and objective != "time":
        raise ValueError(
            f"objective {objective!r} has no use for a profile, which is of times: leave it out, "
            'or give objective="time"'
        )
    # Looked up also for "memory", so that an unknown name is an error with each objective.
    hardware_profile(hardware)
    parts = ProgramParts(graph, outputs)
    if objective == "time":
        estimators = [
            estimator_for(parts, shape, hardware, stored, profile, joint=joint)
            for shape in shapes
            for stored in stored_layouts(shape, parts.stages(zero), joint)
        ]
        fitting = fastest(estimators, limit)
        if fitting is None:  # as there is a limit
            errors = [estimator.does_not_fit(limit or 0) for estimator in estimators]
            raise min(errors, key=lambda e: e.missing_bytes)
        estimator, best = fitting
        return LayoutRules(best.layout.items()), estimator.mesh_shape, best.stored_layout
    smallest: list[tuple[float, Mapping[str, str], Shape]] = []
    for shape in shapes:
        # The order of operations is that of the classic here, and slots do not count throughout.
        program = memory_estimator.MemoryEstimator(graph, shape, parts.outputs)
        optimizer = layout_optimizer.LayoutOptimizer(program, joint=joint)
        rules = optimizer.least_memory()
        # Evaluated anew: amounts in the integer program may be rounded to a common unit.
        smallest.append((optimizer.evaluate_layout(rules), rules, shape))
    peak, rules, shape = min(smallest, key=lambda one: one[0])
    if limit is not None and peak > limit:
        text = layout_text(rules) or "no splits"
        raise MemoryLimitError(
            f"no layout fits in {bytes_text(limit)}: {text!r}, which needs the least, takes "
            f"{bytes_text(peak)}, {bytes_text(peak - limit)} too many. "
            "mtf.auto_mtf.explain shows what is in memory; a larger mesh, a smaller batch, "
            "mtf.recompute_grad and bfloat16 help",
            peak - limit,
        )
    return LayoutRules(rules.items()), shape, None


def all_mesh_shapes(num_machines: int, max_mesh_shape_dimensions: int) -> list[Shape]:
    """Returns the shapes of all meshes with a number of processors, largest dimensions first.

    >>> print(*mtf.auto_mtf.api.all_mesh_shapes(8, 2))
    Shape[mesh_0=8] Shape[mesh_0=4, mesh_1=2]

    Args:
      num_machines: the number of processors.
      max_mesh_shape_dimensions: the maximum number of mesh dimensions.

    Raises:
      ValueError: a number is less than 1.
    """
    if num_machines < 1 or max_mesh_shape_dimensions < 1:
        raise ValueError(
            f"num_machines={num_machines} and "
            f"max_mesh_shape_dimensions={max_mesh_shape_dimensions} must be 1 or more"
        )
    return [
        Shape([(f"mesh_{i}", size) for i, size in enumerate(sizes)])
        for sizes in _mesh_shape_iterator(num_machines, max_mesh_shape_dimensions)
    ]


def _mesh_shape_iterator(
    num_machines: int,
    max_mesh_shape_dimensions: Optional[int] = None,
    largest: Optional[int] = None,
) -> Iterator[list[int]]:
    """Yields the sizes of all meshes with a number of processors, largest dimensions first.

    Args:
      num_machines: the number of processors.
      max_mesh_shape_dimensions: the maximum number of mesh dimensions; unlimited if None.
      largest: the largest size; unlimited if None.
    """
    # A mesh has a dimension at least, and the product of no sizes would have none.
    if num_machines == 1:
        yield [1]
    if max_mesh_shape_dimensions == 0:
        return
    most = None if max_mesh_shape_dimensions is None else max_mesh_shape_dimensions - 1
    # Sizes that do not rise: otherwise each mesh would come once in every order of its dimensions.
    for size in range(min(num_machines, largest or num_machines), 1, -1):
        if size == num_machines:
            yield [size]
        elif num_machines % size == 0:
            rest = _mesh_shape_iterator(num_machines // size, most, size)
            yield from ([size, *tail] for tail in rest)
