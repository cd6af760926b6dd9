"""Hardware profiles, and how long operations and collectives take on such hardware.

Profiles have the compute rate, memory and bandwidth of processors. Times are by a roofline model,
and by models of rings and trees.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

from mesh_tensorflow._core.layout import LayoutRules, StoredLayout
from mesh_tensorflow._core.operation import Collective, Cost, Operation, Tensor
from mesh_tensorflow._core.placement import cost_of
from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._mesh.devices import cores
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._mesh.slice_functions import SMALL_BYTES
from mesh_tensorflow._units import ms_text
from mesh_tensorflow.auto_mtf._space import Storing, Weight
from mesh_tensorflow.ops._contractions.conv import ConvNdOperation
from mesh_tensorflow.signal._fft import FourierOperation

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
      busy: the part of the latency that is left of it where several collectives are sent beside
        each other: what processors do for a message, rather than wait.
    """

    bandwidth: float
    latency: float
    kind: str = "switch"
    busy: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ("ring", "switch") or self.bandwidth <= 0 or self.latency < 0:
            raise ValueError(
                f'{self}: kind is "ring" or "switch", bandwidth more than 0, and latency 0 or more'
            )
        if not 0 <= self.busy <= 1:
            raise ValueError(f"{self}: busy is a part of the latency, from 0 to 1")


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
      cores: how many slices are computed at a time in one memory domain, by a core each: fewer
        slices leave cores idle.
      sharing_seconds: what it takes to share one operation out among all cores.
      vector_bytes: the bytes of a vector, in which convolutions compute the channels of what they
        make; parts of one take as long as all of it. They leave out the padding of whole images.
        0 if neither counts.
      compiled: whether XLA compiles a step for CPUs, with what it then keeps in memory, and its
        convolutions in place of TensorFlow's.
      folded_bytes: the largest slices of which TensorFlow computes what is made of constants once,
        before the first step; 0 if it does not.
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
    cores: int = 1
    sharing_seconds: float = 0.0
    vector_bytes: int = 0
    compiled: bool = False
    folded_bytes: int = 0
    axis_links: Mapping[str, Link] = dataclasses.field(default_factory=dict)
    source: str = ""

    def __post_init__(self) -> None:
        if "float32" not in self.flops:
            raise ValueError(f"{self.name}: flops lacks float32: {dict(self.flops)}")
        rates = [*self.flops.values(), self.memory_bandwidth, self.memory_bytes, self.product_share]
        if min(rates) <= 0 or min(self.node_size, self.cores) < 1 or self.operation_seconds < 0:
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
        levels = [(within, self.node_link), (dim.size // within, self.link)]
        return [(size, link) for size, link in levels if size > 1]

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
        ("h200", 989, 495, 4800, 141, 450, 50,
         "H200 SXM data sheet; DGX H200; shares of the peak measured"),
    ]
]  # fmt: skip
# What differs from the other GPUs. Volta's tensor cores do not support bfloat16. Of the H100 and
# the H200, by benchmarks/on_accelerator.py on one of each: XLA joins what lies between products, so
# that an operation costs less than the start of a kernel. Links were not measured.
_DIFFERENT: dict[str, dict[str, Any]] = {
    "v100": {"flops": {"float32": 15.7 * TERA, "float16": 125 * TERA}},
    "h100": {"memory_bandwidth": 2660 * GB, "operation_seconds": 2e-6, "product_share": 0.77},
    "h200": {"memory_bandwidth": 3540 * GB, "operation_seconds": 2e-6, "product_share": 0.77},
}

PROFILES: dict[str, Hardware] = {
    h.name: h.replace(**_DIFFERENT.get(h.name, {})) for h in [*_TPUS, *_GPUS]
}
DEFAULT = "tpu_v3"


def named_like(kind: str) -> Optional[Hardware]:
    """Returns the profile of devices whose maker calls them so; None if there is none.

    Args:
      kind: such as "NVIDIA H100 80GB HBM3" or "TPU v4".
    """
    words = kind.lower()
    return next((h for name, h in PROFILES.items() if name.replace("_", " ") in words), None)


# Shares of the rate of products, by the class of an operation. On two cores of a server, a core
# made 1.7e8 normal numbers a second, and transforms of 48 points along three dimensions took 14 to
# 17 flops a nanosecond, where products take 90.
_SLOW = {"FourierOperation": 0.16, "RandomOperation": 0.0019}
# TensorFlow's kernels on a core there: 8 flops a nanosecond of softmax, 2 of a choice, and so on.
_SLOW_KERNELS = {
    "CrossEntropyGradientOperation": 0.03,
    "GatherGradientOperation": 0.007,
    "GatherOperation": 0.016,
    "NormalizeGradOperation": 0.08,
    "NormalizeOperation": 0.1,
    "SelectOperation": 0.022,
    "SoftmaxOperation": 0.09,
}

# For a convolution on CPUs, XLA copies the windows of an image, in vectors of channels. Each
# number takes as long as so many flops, by the spatial dimensions and whether a filter is computed:
# on a core of a server 0.65 and 0.7 ns in two dimensions, and 3.3 and 8 ns in three.
_WINDOW_FLOPS = {(2, False): 58, (2, True): 63, (3, False): 300, (3, True): 720}
_WINDOW_LANES = 8

# Of constants in TensorFlow's own optimizer of the graph of a device.
FOLDED_BYTES = 10 * 2**20

# gRPC, by which TensorFlow's servers send slices. By sums over two processes of one machine: 0.9 ms
# of 1 KB, 1.8 ms of 256 KB, 33 ms of 16 MB. Twelve sums of 1 KB took 0.46 to 0.67 times as long
# side by side as one after the other, and such of 1 MB as long.
_BETWEEN_PROCESSES = Link(0.5 * GB, 450e-6, busy=0.55)


@functools.cache
def _vector_bytes() -> int:
    """Returns the bytes of the widest vectors that this machine computes with."""
    flags = ""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            flags = f.read()
    widths = {"avx512f": 64, "avx2": 32}
    # What any 64-bit processor has.
    return next((width for flag, width in widths.items() if flag in flags), 16)


def local_machine(
    processors: int,
    one_memory: bool,
    processes: int = 1,
    machines: int = 1,
    compiled: bool = False,
) -> Hardware:
    """Returns a rough profile of logical CPUs of this machine, which was not measured.

    Args:
      processors: how many there are.
      one_memory: whether they share slices; otherwise each has its share of the machine.
      processes: the number of processes, each of which has as many, in a memory of its own.
      machines: the number of machines that the processes are on, all like this one.
      compiled: whether XLA compiles the program of each processor.
    """
    number, share = cores(), 1 if one_memory else processors / machines
    rate = 0.09 * TERA * number / share
    # By operations of language models on two cores of a server, whose slices are in caches; XLA
    # computes several at once. What processors of one memory read of each other is nearly as near
    # as what they have; others wait for each other's threads.
    bandwidth = (10 if compiled else 50) * GB * number / share
    sent, latency = (25, 10e-6) if one_memory else (10, 40e-6)
    within = Link(sent * GB * number / share, latency)
    # What gRPC does is done by cores: with more processes than these, each message waits for one.
    free = min(1.0, number * machines / processes)
    sends = _BETWEEN_PROCESSES
    between = dataclasses.replace(
        sends, bandwidth=sends.bandwidth * free, latency=sends.latency / free
    )
    slow = _SLOW if compiled else {**_SLOW, **_SLOW_KERNELS}
    return Hardware(
        "logical CPUs",
        {"float32": rate, **{kind: part * rate for kind, part in slow.items()}},
        bandwidth,
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / share,
        between if processes > 1 else within,
        within if processes > 1 else None,
        processors // processes if processes > 1 else 1,
        operation_seconds=4e-6,
        one_memory=one_memory,
        cores=number if one_memory else 1,
        sharing_seconds=60e-6,
        vector_bytes=_vector_bytes(),
        compiled=compiled,
        folded_bytes=0 if compiled else FOLDED_BYTES,
        source="a guess for any machine; python -m mesh_tensorflow.auto_mtf.measure measures one",
    )


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


class Seconds(NamedTuple):
    """Seconds of computation and of communication."""

    compute: float
    communication: float

    @property
    def total(self) -> float:
        """The sum of both; no overlap is assumed."""
        return self.compute + self.communication

    def __add__(self, other: Any) -> Seconds:
        return Seconds(self[0] + other[0], self[1] + other[1])

    def __radd__(self, other: Any) -> Seconds:
        return self if other == 0 else self + other

    def __str__(self) -> str:
        compute, communication = ms_text(self.compute), ms_text(self.communication)
        return f"{ms_text(self.total)} ms: compute {compute}, communication {communication}"

    def times(self, count: float) -> Seconds:
        """Returns the time multiplied by a count."""
        return Seconds(self.compute * count, self.communication * count)


ZERO = Seconds(0.0, 0.0)


class Sent(NamedTuple):
    """A collective of a step.

    Attributes:
      collective: a Collective.
      times: the number of times that it occurs in a step.
      seconds: how long all of these take.
    """

    collective: Collective
    times: float
    seconds: float


def in_vectors(channels: int, lanes: int) -> float:
    """Returns how many channels a convolution computes for each that it makes: whole vectors.

    Args:
      channels: the number of channels of a slice.
      lanes: how many of them a vector has.
    """
    return math.ceil(channels / lanes) * lanes / channels


class CostModel:
    """Converts costs of operations to seconds.

    The time of an operation is that of its arithmetic or of its memory traffic, whichever is
    longer (a roofline model). The time of a step is the sum over its operations and collectives.

    Attributes:
      mesh_shape: a Shape.
      hardware: a Hardware.
      shares_out: whether each operation is shared out among all cores of one memory domain, if that
        is faster.
      share: the part of operations that is computed; less than 1 where nothing reads the results
        of some processors, which TensorFlow leaves out.
      storing: a Storing, how variables are stored.
      recorded: what is Sent, to which each Collective that moves something is added; nothing is if
        None.
    """

    def __init__(
        self,
        mesh_shape: Shape,
        hardware: Hardware,
        stored_layout: Optional[StoredLayout] = None,
        shares_out: bool = False,
        share: float = 1.0,
    ):
        """Creates a CostModel.

        Args:
          mesh_shape: a Shape.
          hardware: a Hardware.
          stored_layout: how variables are stored, if not as they are computed with; or None.
          shares_out: see CostModel.
          share: see CostModel.
        """
        self.mesh_shape = mesh_shape
        self.shares_out, self.share = shares_out, share
        self.hardware = hardware
        self.storing = Storing(mesh_shape, stored_layout)
        self.recorded: Optional[list[Sent]] = None
        self._impls: dict[frozenset, MeshImpl] = {}

    def impl(self, layout: Mapping[str, str]) -> MeshImpl:
        """Returns an abstract MeshImpl with a layout.

        Args:
          layout: a dictionary from dimension names to mesh dimension names.
        """
        key = frozenset(layout.items())
        if key not in self._impls:
            self._impls[key] = MeshImpl(self.mesh_shape, LayoutRules(key))
        return self._impls[key]

    def in_parts(self, weight: Optional[Weight], impl: MeshImpl) -> MeshImpl:
        """Returns the MeshImpl that splits a weight, and its update, as they are stored.

        Args:
          weight: the dimensions of a weight; or None, of what is not stored in parts.
          impl: a MeshImpl with the layout of the weight's dimensions.
        """
        if weight is None or self.storing.layout is None:
            return impl
        own = dict(impl.layout_rules.pairs)
        rules = self.storing.rules(weight, own)
        return self.impl({**own, **rules}) if rules else impl

    def operation(self, op: Operation, impl: MeshImpl) -> Seconds:
        """Returns the time of an operation, without the allreduces of pending sums of its inputs.

        Args:
          op: an Operation.
          impl: a MeshImpl.
        """
        return self._of_all(op, impl).times(self.share)

    def _of_all(self, op: Operation, impl: MeshImpl) -> Seconds:
        """Returns the time of an operation on all processors."""
        # Measured profiles have rates of their own for convolutions, by the class of the operation.
        rate, tensors = type(op).__name__, [*op.outputs, *op.inputs]
        if rate not in self.hardware.flops:
            rate = tensors[0].dtype.name if tensors else ""
        if isinstance(op, FourierOperation):
            # Its input and its output are split one after the other, and not both at a time.
            tensors = max(op.inputs, op.outputs, key=lambda some: self._parts(impl, some))
        cost = cost_of(op, impl)
        if isinstance(op, ConvNdOperation):
            cost = dataclasses.replace(cost, flops=int(cost.flops * self._computed(op, impl)))
        return self._roofline(cost, rate, tensors, impl)

    def _computed(self, op: ConvNdOperation, impl: MeshImpl) -> float:
        """Returns how many flops take as long as each one of a convolution."""
        y = op.outputs[0]  # with its channels last
        channels = impl.slice_shape(y.shape)[-1]
        if self.hardware.compiled:
            copied = _WINDOW_FLOPS[op.rank, op.channels_read is None] / (2.0 * channels)
            if op.channels_read is not None:
                [read] = impl.slice_shape(Shape([op.channels_read]))
                copied *= in_vectors(read, _WINDOW_LANES)
            return max(1.0, copied)
        if not self.hardware.vector_bytes:
            return 1.0
        lanes = self.hardware.vector_bytes // y.dtype.size
        return op.share_inside(impl) * in_vectors(channels, lanes)

    def folded_share(self, made_of: Iterable[Operation], impl: MeshImpl) -> float:
        """Returns which part of an operation on constants is computed once, before the first step.

        Args:
          made_of: Operations in order, those that its inputs are made of and itself.
          impl: a MeshImpl.
        """
        # By result: the mesh axes along which only the first processors know all that theirs is
        # made of; none if all know all of it, which a device computes again if it is small.
        of_first: dict[Tensor, frozenset[int]] = {}
        everywhere: set[Tensor] = set()
        for op in made_of:
            tensors = [*op.inputs, *op.outputs]
            # One program for all processors takes its part by a number that it does not know
            # before.
            if not self.hardware.one_memory and self._parts(impl, tensors) > 1:
                return 0.0
            sizes = (impl.laid_out_size(x.shape) * x.dtype.size / impl.size for x in tensors)
            largest = max(sizes, default=0)
            if largest >= self.hardware.folded_bytes or cost_of(op, impl).collectives:
                return 0.0
            split = {axis for x in tensors for axis in impl.splitting_axes(x.shape)}
            # Equal slices are on the first processor that has one, from where others read them.
            far = [split.difference(impl.splitting_axes(x.shape))
                   for x in op.inputs if x not in everywhere]  # fmt: skip
            axes = frozenset().union(*far, *(of_first[x] for x in op.inputs))
            of_first.update(dict.fromkeys(op.outputs, axes))
            if largest <= SMALL_BYTES and everywhere.issuperset(op.inputs):
                everywhere.update(op.outputs)
        return 1.0 / self._processors(axes)

    def beside(self, op: Operation, impl: MeshImpl) -> float:
        """Returns which part of its time an operation adds that is computed beside an equal one.

        Args:
          op: an Operation, which has as many slices as the other one.
          impl: a MeshImpl.
        """
        count = self.hardware.cores
        slices = self._parts(impl, [*op.outputs, *op.inputs])
        if self.shares_out or slices >= count:
            return 1.0
        # The other one leaves cores idle, which this one has. In a traced step of a language model
        # whose `d_ff` is not split, the two gradients of a product of one slice ran on two cores
        # for 0.65 and 0.69 ms at the same time, and the product itself alone for 0.65 ms.
        return max(0.0, 2.0 * slices / count - 1.0)

    def seconds(self, cost: Cost, rate: str, tensors: Sequence[Tensor], impl: MeshImpl) -> Seconds:
        """Returns the time of a cost that is no operation's, such as a gather's.

        Args:
          cost: a Cost.
          rate: a dtype or operation class in `Hardware.flops`.
          tensors: the Tensors that are read and created.
          impl: a MeshImpl.
        """
        return self._roofline(cost, rate, tensors, impl)

    def _roofline(
        self, cost: Cost, rate: str, tensors: Sequence[Tensor], impl: MeshImpl
    ) -> Seconds:
        hardware, size = self.hardware, impl.size
        # A Cost is the sum over all processors, which have equal shares of it.
        calls, flops, moved = 1, cost.flops / size, cost.bytes / size
        if hardware.one_memory:
            # Equal slices of one memory are computed once, so work grows with the parts and not
            # with the processors.
            calls = self._parts(impl, tensors)
            flops, moved = flops * calls, moved * calls
        arithmetic = flops / hardware.product_flops(rate)
        compute = max(arithmetic, moved / hardware.memory_bandwidth)
        # What only passes a value on, as a reshape that moves nothing, takes no time.
        if cost.flops or cost.bytes:
            compute += calls * hardware.operation_seconds / hardware.cores
        if hardware.one_memory:
            # Rates are those of all cores together, of which each slice has one.
            by_slices = compute * hardware.cores / min(calls, hardware.cores)
            shared = compute + hardware.sharing_seconds if self.shares_out else by_slices
            compute = min(by_slices, shared)
        communication = sum(
            self.collective(c, self._results(c, calls, tensors, impl)) for c in cost.collectives
        )
        return Seconds(compute, communication)

    def _results(
        self, collective: Collective, parts: int, tensors: Sequence[Tensor], impl: MeshImpl
    ) -> int:
        """Returns how many distinct results a collective has in one memory domain.

        Args:
          collective: a Collective of an operation.
          parts: the number of distinct slices of the operation's tensors.
          tensors: these.
          impl: a MeshImpl.
        """
        # A gathered slice, or a sum, is that of all processors along its axes, and is made once.
        if not self.hardware.one_memory or collective.kind not in ("allconcat", "allreduce"):
            return parts
        split = {axis for x in tensors for axis in impl.splitting_axes(x.shape)}
        return parts // self._processors(split.intersection(collective.mesh_axes))

    def pending_sum(
        self, x: Tensor, collective: Collective, impl: MeshImpl, times: float, beside: bool = False
    ) -> float:
        """Returns the seconds of the allreduces of a Tensor.

        Args:
          x: a Tensor.
          collective: its Collective.
          impl: a MeshImpl.
          times: how often it is summed, as in the iterations of a loop.
          beside: whether other sums are sent beside it, as nothing waits for it but an update.
        """
        # By the slices of the sum: in one memory, processors that have the same slice share one.
        return self.collective(collective, self._parts(impl, [x]), times, beside)

    def _parts(self, impl: MeshImpl, tensors: Iterable[Tensor]) -> int:
        """Returns the number of distinct slices of tensors."""
        return self._processors({axis for x in tensors for axis in impl.splitting_axes(x.shape)})

    def _processors(self, axes: Iterable[int]) -> int:
        """Returns the number of processors along some axes of the mesh together."""
        return math.prod(self.mesh_shape[axis].size for axis in axes)

    def collective(
        self, collective: Collective, parts: int = 1, times: float = 1.0, beside: bool = False
    ) -> float:
        """Returns the seconds of a collective.

        Args:
          collective: a Collective.
          parts: the number of distinct slices; used only in one memory domain.
          times: how often it occurs.
          beside: see `pending_sum`.
        """
        moved = collective.bytes / self.mesh_shape.size
        count = self._processors(collective.mesh_axes)
        if self.hardware.one_memory:
            seconds = self._in_one_memory(collective.kind, moved, parts, count)
        else:
            seconds = 0.0
            links = [self.hardware.links(self.mesh_shape, axis) for axis in collective.mesh_axes]
            # Reducing over fast links first leaves less data for the slow ones.
            levels = sorted(itertools.chain(*links), key=lambda level: -level[1].bandwidth)
            for size, link in levels:
                if size == 1:
                    continue
                if beside:
                    link = dataclasses.replace(link, latency=link.latency * link.busy)
                seconds += _COLLECTIVES[collective.kind](moved, size, link)
                # Slow links come last in a reduction and first in a gather: both send parts over
                # them.
                if collective.kind in ("allreduce", "reduce_scatter", "allconcat"):
                    moved /= size
        seconds *= times
        if self.recorded is not None and count > 1:
            self.recorded.append(Sent(collective, times, seconds))
        return seconds

    def _in_one_memory(self, kind: str, moved: float, parts: int, count: int) -> float:
        """Returns the seconds in one memory domain.

        Processors read each other's slices, and equal slices are computed once.
        """
        if count == 1:
            return 0.0
        link, read, copies = self.hardware.link, moved * parts, parts
        if kind in ("allreduce", "reduce_scatter"):
            # A sum reads `count` slices and writes one.
            read, copies = read * (count + 1), copies * count
        return read / link.bandwidth + copies * link.latency


def _allreduce(moved: float, count: int, link: Link) -> float:
    # A reduce-scatter and an allgather of count - 1 steps each, of one part of `count` in a step.
    ring = 2 * (count - 1) * (moved / count / link.bandwidth + link.latency)
    # Up a binary tree and down again: more bytes than a ring, but fewer messages, for small sums.
    steps = math.ceil(math.log2(count))
    return min(ring, 2 * steps * (moved / link.bandwidth + link.latency))


def _allconcat(moved: float, count: int, link: Link) -> float:
    # Each part of the result passes through all other processors, one step at a time.
    return (count - 1) * (moved / count / link.bandwidth + link.latency)


def _alltoall(moved: float, count: int, link: Link) -> float:
    if link.kind == "ring":  # a part travels count / 4 steps on average
        return moved * count / 4 / link.bandwidth + count // 2 * link.latency
    return (count - 1) * (moved / count / link.bandwidth + link.latency)


def _shift(moved: float, count: int, link: Link) -> float:
    # A bandwidth of a ring counts both of its directions.
    directions = 2 if link.kind == "ring" else 1  # only one of the two is used
    return moved * directions / link.bandwidth + link.latency


# Seconds by the bytes per processor (of an allconcat, those of the result) among `count` of them:
# rings of Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
# workstations", 2009; for short sums a tree.
_COLLECTIVES = {
    "allreduce": _allreduce,
    "reduce_scatter": _allconcat,  # the same parts travel around the ring
    "allconcat": _allconcat,
    "alltoall": _alltoall,
    "shift": _shift,
}
