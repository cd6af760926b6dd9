"""The lowered form of a program, and the collectives that XLA has put into it.

The partitioner puts them in, so nothing in mtf's own graph tells what is communicated: they are
read from the text of the compiled program. Nothing is run.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mesh_tensorflow._core.layout import pnum_to_processor_coordinates
from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow.pjrt._devices import all_dtypes


@dataclasses.dataclass(frozen=True)
class Collectives:
    """Collectives of one kind over the same mesh dimensions.

    Attributes:
      kind: as XLA calls it: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or
        "collective-permute".
      mesh_dims: the names of the mesh dimensions along which devices communicate.
      count: how many there are.
      bytes: the bytes of their results on one device; for "reduce-scatter", of what is summed.
    """

    kind: str
    mesh_dims: tuple[str, ...]
    count: int
    bytes: int


_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
# An asynchronous collective counts where it starts; a line with `-done` does not match.
_LINE = re.compile(rf"= (?P<type>.*?) (?P<kind>{_KINDS})(?P<start>-start)?\((?P<rest>.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
# XLA writes groups as {{0,1},{2,3}}, as [2,2]<=[4] with a transposition, or as axes of a mesh.
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}")
_RANGE = re.compile(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_AXES = re.compile(
    r"replica_groups=mesh\[(?P<mesh>[^\]]*)\](?:, device_ids=\((?P<order>[^()]*(?:\([\d,]+\))?)\))?"
    r" \{(?P<axes>[^}]*)\}"
)
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _bits(dtype: str) -> int:
    return 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])


def _bytes(types: str) -> list[int]:
    """Returns the bytes of each array in the text of a type."""
    return [
        # In whole bytes: a dtype such as s4 has fewer bits.
        (_bits(dtype) * int(np.prod(_numbers(sizes), dtype=np.int64)) + 7) // 8
        for dtype, sizes in _ARRAY.findall(types)
    ]


def _elements(types: str) -> list[str]:
    """Returns the elements of a tuple in the text of a type; one of several arrays is a tuple."""
    found, depth = [""], 0
    for character in types.strip()[1:-1]:
        # Sizes, layouts and inner tuples have commas of their own.
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return found


def _order(text: str) -> np.ndarray:
    """Returns the devices of "[2,3]T(1,0)": those of a 2 x 3 mesh, transposed, in a row."""
    sizes, _, transposed = text.partition("T")
    devices = np.arange(np.prod(_numbers(sizes))).reshape(_numbers(sizes))
    return (devices.transpose(_numbers(transposed)) if transposed else devices).reshape(-1)


def _groups_along(found: re.Match[str]) -> list[list[int]]:
    """Returns the groups along axes of a mesh, or along parts 'axis':(before)size of axes."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found["mesh"])}
    chosen = {name: part for name, *part in _AXIS.findall(found["axes"])}
    split: list[int] = []
    along: list[int] = []
    for name, size in sizes.items():
        before, own = chosen.get(name, ["", ""])
        first, middle = (int(before), int(own)) if own else (1, size)
        if name in chosen:
            along.append(len(split) + 1)
        # Each axis becomes three, (before, own, after); `along` has the `own` of those chosen.
        split += [first, middle, size // (first * middle)]
    text = found["order"]
    order = _order(text) if text else np.arange(np.prod(list(sizes.values())))
    others = [axis for axis in range(len(split)) if axis not in along]
    # With the chosen axes last, each row is a group.
    members = int(np.prod([split[axis] for axis in along]))
    return order.reshape(split).transpose(others + along).reshape(-1, members).tolist()


def _groups(rest: str, devices: int) -> list[list[int]]:
    """Returns the groups of devices that communicate, from the attributes of an instruction."""
    if found := _RANGE.search(rest):
        # The devices in their order, cut into rows: [2,3]<=[6] is the groups {0,1,2} and {3,4,5}.
        return _order(found[2]).reshape(_numbers(found[1])).tolist()
    if found := _AXES.search(rest):
        return _groups_along(found)
    if found := _LISTED.search(rest):
        return [_numbers(group) for group in found[1].split("}")[:-1]]
    # Without groups, or with empty ones, all devices communicate.
    return [list(range(devices))]


def _mesh_dims(groups: Sequence[Sequence[int]], mesh_shape: Shape) -> tuple[str, ...]:
    """Returns the names of the dimensions in which the members of a group differ."""
    names = mesh_shape.dimension_names
    differ = set()
    for group in groups:
        places = [pnum_to_processor_coordinates(mesh_shape, pnum) for pnum in group]
        differ |= {axis for axis in range(len(names)) if len({p[axis] for p in places}) > 1}
    return tuple(names[axis] for axis in sorted(differ))


def collectives_of(text: str, mesh_shape: Shape) -> list[Collectives]:
    """Returns the collectives of a compiled program, by kind and mesh dimensions.

    Args:
      text: a program of one device, in XLA's notation.
      mesh_shape: the Shape of the mesh; devices are numbered in row-major order.
    """
    counts: collections.Counter[tuple] = collections.Counter()
    sizes: collections.Counter[tuple] = collections.Counter()
    for line in text.splitlines():
        found = _LINE.search(line)
        if not found:
            continue
        groups = _groups(found["rest"], mesh_shape.size)
        key = found["kind"], _mesh_dims(groups, mesh_shape)
        result = found["type"]
        # The type of a start has operands, too, but that of a sum, whose results are like them.
        if found["start"] and found["kind"] != "all-reduce":
            result = [*_elements(result), "", ""][1]
        total = sum(_bytes(result))
        # The text has the type of the result, which is the part that one device keeps.
        if found["kind"] == "reduce-scatter":
            total *= len(groups[0])
        counts[key] += 1
        sizes[key] += total
    return [
        Collectives(kind, dims, counts[kind, dims], sizes[kind, dims])
        for kind, dims in sorted(counts)
    ]


class Lowered:
    """A program for arguments of certain shapes, on a mesh of devices."""

    def __init__(self, lowered: jax.stages.Lowered, mesh_shape: Shape):
        """Creates a Lowered.

        Args:
          lowered: what JAX made of the program.
          mesh_shape: the Shape of the mesh.
        """
        self._lowered, self._mesh_shape = lowered, mesh_shape

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The program of one device, as XLA compiled it."""
        with all_dtypes():
            return self._lowered.compile()

    @property
    def stablehlo(self) -> str:
        """The program of whole tensors with annotations, as StableHLO."""
        return self._lowered.as_text()

    @property
    def compiled_text(self) -> str:
        """The program of one device, in XLA's notation."""
        return self.compiled.as_text() or ""

    def collectives(self) -> list[Collectives]:
        """Returns the communication that XLA put in, with what is in a loop counted once."""
        return collectives_of(self.compiled_text, self._mesh_shape)

    def memory(self) -> Any:
        """Returns what XLA knows of the memory on one device, such as `temp_size_in_bytes`."""
        return self.compiled.memory_analysis()

    def cost(self) -> dict[str, float]:
        """Returns what XLA knows of the cost on one device, such as "flops"."""
        found = self.compiled.cost_analysis()
        # Older releases of JAX return a list with the one dictionary.
        return dict(found[0] if isinstance(found, list) else found or {})
