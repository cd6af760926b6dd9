"""Hardware profiles: compute rate, memory and bandwidth of processors."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from typing import Any, Optional, Union

from mesh_tensorflow._core.shape import Shape

__all__ = ["PROFILES", "Hardware", "Link", "hardware_profile"]

GB, GIB, TERA = 1e9, 2**30, 1e12


@dataclasses.dataclass(frozen=True)
class Link:
    """The interconnect along a mesh dimension.

    Attributes:
      bandwidth: bytes per second that a processor sends, both directions of a ring together.
      latency: seconds from one processor to the next.
      kind: "ring", where each processor is connected to two neighbors; or "switch", where each
        reaches all others.
    """

    bandwidth: float
    latency: float
    kind: str = "switch"

    def __post_init__(self) -> None:
        if self.kind not in ("ring", "switch") or self.bandwidth <= 0 or self.latency < 0:
            raise ValueError(
                f'{self}: kind is "ring" or "switch", bandwidth more than 0, and latency 0 or more'
            )


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The profile of a processor and its interconnect.

    Attributes:
      name: a string.
      flops: a dictionary from dtype names to floating-point operations per second in matrix
        products and convolutions; "float32" stands for dtypes that are not in it.
      memory_bandwidth: bytes per second.
      memory_bytes: bytes of memory per processor.
      link: the interconnect along a mesh dimension.
      node_link: the interconnect within a node, whose processors have consecutive numbers; or
        None.
      node_size: the number of processors per node.
      operation_seconds: the overhead of each operation on each processor.
      product_share: the fraction of `flops` that products achieve.
      one_memory: whether all processors are in one memory domain, like the logical CPUs of a
        process. Rates are then those of the whole machine, and equal slices are computed once.
      axis_links: a dictionary from mesh dimension names to Links, which override those above.
      source: the source of the numbers.
    """

    name: str
    flops: Mapping[str, float]
    memory_bandwidth: float
    memory_bytes: float
    link: Link
    node_link: Optional[Link] = None
    node_size: int = 1
    operation_seconds: float = 0.0
    product_share: float = 1.0
    one_memory: bool = False
    axis_links: Mapping[str, Link] = dataclasses.field(default_factory=dict)
    source: str = ""

    def __post_init__(self) -> None:
        if "float32" not in self.flops:
            raise ValueError(f"{self.name}: flops lacks float32: {dict(self.flops)}")
        rates = [*self.flops.values(), self.memory_bandwidth, self.memory_bytes, self.product_share]
        if min(rates) <= 0 or self.node_size < 1 or self.operation_seconds < 0:
            raise ValueError(f"{self.name}: rates and sizes must be more than 0: {self}")

    def product_flops(self, dtype: str) -> float:
        """Returns the floating-point operations per second of matrix products of a dtype."""
        return self.flops.get(dtype, self.flops["float32"]) * self.product_share

    def links(self, mesh_shape: Shape, mesh_axis: int) -> list[tuple[int, Link]]:
        """Returns the pairs (processors, Link) that make up a mesh dimension.

        There are two pairs if the dimension extends beyond a node: within nodes and between them.

        Args:
          mesh_shape: a Shape.
          mesh_axis: one of its axes.
        """
        dim = mesh_shape[mesh_axis]
        if dim.name in self.axis_links:
            return [(dim.size, self.axis_links[dim.name])]
        if self.node_link is None:
            return [(dim.size, self.link)]
        # Processors are numbered along the last axis first, so neighbors on this one are `stride`
        # apart.
        stride = math.prod(mesh_shape.to_integer_list[mesh_axis + 1 :])
        # A node has node_size // stride of them in a row.
        # A common divisor: of 6 in a row and nodes of 4, no node cuts groups of 2.
        within = math.gcd(dim.size, max(1, self.node_size // stride))
        parts = [(within, self.node_link), (dim.size // within, self.link)]
        return [(size, link) for size, link in parts if size > 1]

    def replace(self, **changes: Any) -> Hardware:
        """Returns a copy with some attributes changed."""
        return dataclasses.replace(self, **changes)

    def save(self, path: str) -> None:
        """Writes the profile to a JSON file, which `hardware_profile` reads."""
        with open(path, "w", encoding="utf-8") as f:
            json.dump(dataclasses.asdict(self), f, indent=2)
            f.write("\n")


def _from_json(path: str) -> Hardware:
    try:
        with open(path, encoding="utf-8") as f:
            values = json.load(f)
        for name in ("link", "node_link"):
            values[name] = values[name] and Link(**values[name])
        values["axis_links"] = {k: Link(**v) for k, v in values["axis_links"].items()}
        return Hardware(**values)
    # A ValueError is that of what is no JSON, or no text.
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        raise ValueError(
            f"{path} is no hardware profile: {e!r}. python -m mesh_tensorflow.auto_mtf.measure "
            "writes one"
        ) from e


# Tera operations per second, bandwidth and size of the memory, and bytes per second over the links
# of a mesh axis. A processor of the first two is a core, which is half of a chip. A mesh axis lies
# along one axis of the torus, so it uses two of the links of a chip.
_CACM = "Jouppi et al., A domain-specific supercomputer for training deep neural networks, 2020"
_ISCA = "Jouppi et al., TPU v4: an optically reconfigurable supercomputer, 2023"
_TPUS = [
    Hardware(
        name,
        {"float32": tera * TERA},
        bandwidth * GB,
        size * GIB,
        Link(links * GB, 1e-6, "ring"),
        operation_seconds=1e-6,
        product_share=0.6,
        source=source,
    )
    for name, tera, bandwidth, size, links, source in [
        ("tpu_v2", 23, 350, 8, 62, _CACM),
        ("tpu_v3", 61.5, 450, 16, 82, _CACM),
        ("tpu_v4", 275, 1200, 32, 100, _ISCA),
    ]
]
# Tera operations per second in half and in single precision, bandwidth and size of the memory, and
# bytes per second that a GPU sends over NVLink and over its share of the node's InfiniBand.
_GPUS = [
    Hardware(
        name,
        {"float32": single * TERA, "bfloat16": half * TERA, "float16": half * TERA},
        bandwidth * GB,
        size * GB,
        Link(infiniband * GB, 10e-6),
        node_link=Link(nvlink * GB, 3e-6),
        node_size=8,
        operation_seconds=5e-6,
        product_share=0.6,
        source=f"NVIDIA: {source}",
    )
    for name, half, single, bandwidth, size, nvlink, infiniband, source in [
        ("v100", 125, 15.7, 900, 32, 150, 6.25, "Tesla V100 SXM2 data sheet; DGX-1"),
        ("a100", 312, 156, 2039, 80, 300, 25, "A100 80GB SXM data sheet; DGX A100"),
        ("h100", 989, 495, 3350, 80, 450, 50,
         "H100 SXM data sheet; DGX H100; shares of the peak and overheads measured"),
    ]
]  # fmt: skip
# What differs from the other GPUs. Volta's tensor cores do not support bfloat16. Of the H100, by
# benchmarks/on_accelerator.py on one H100 SXM: XLA joins what lies between products, so that an
# operation costs less than the start of a kernel. Links were not measured.
_DIFFERENT: dict[str, dict[str, Any]] = {
    "v100": {"flops": {"float32": 15.7 * TERA, "float16": 125 * TERA}},
    "h100": {"memory_bandwidth": 2660 * GB, "operation_seconds": 2e-6, "product_share": 0.77},
}

PROFILES: dict[str, Hardware] = {
    h.name: h.replace(**_DIFFERENT.get(h.name, {})) for h in [*_TPUS, *_GPUS]
}
DEFAULT = "tpu_v3"


def hardware_profile(hardware: Union[str, Hardware, None] = None) -> Hardware:
    """Looks up or loads a hardware profile.

    Args:
      hardware: a Hardware; a name in `PROFILES`; the path of a JSON file written by
        `Hardware.save` or `python -m mesh_tensorflow.auto_mtf.measure`; or None, for "tpu_v3".

    Raises:
      ValueError: there is no profile or file of that name, or the file is not a profile.
    """
    if isinstance(hardware, Hardware):
        return hardware
    name = DEFAULT if hardware is None else hardware
    # Before files, so that a name means the same in each folder.
    if name in PROFILES:
        return PROFILES[name]
    if isinstance(name, str) and os.path.isfile(name):
        return _from_json(name)
    raise ValueError(
        f"unknown hardware {name!r}: it is one of {', '.join(PROFILES)}, the path of a file that "
        "python -m mesh_tensorflow.auto_mtf.measure wrote, or an auto_mtf.hardware.Hardware"
    )
