"""Groups of configurations to compare, with their comparisons and targets."""

import dataclasses

import workloads

DROPOUT = "_dropout"


@dataclasses.dataclass(frozen=True)
class Config:
    """One kind of worker process."""

    system: str
    workload: str
    mesh: str = "1"
    placement: str = "one"

    @property
    def label(self) -> str:
        """A short name inside a group."""
        name = self.system
        if self.system in ("mtf", "classic"):
            name += f" {self.placement}"
        return name + (" +dropout" if self.workload.endswith(DROPOUT) else "")

    def arguments(self) -> list[str]:
        """The command line of its worker."""
        return [
            "--system",
            self.system,
            "--workload",
            self.workload,
            "--mesh",
            self.mesh,
            "--placement",
            self.placement,
        ]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One configuration measured against another of its group."""

    config: Config
    against: Config


@dataclasses.dataclass(frozen=True)
class Group:
    """Configurations that take turns."""

    name: str
    title: str
    configs: tuple[Config, ...]
    comparisons: tuple[Comparison, ...]
    step_factor: int = 1


@dataclasses.dataclass(frozen=True)
class Target:
    """An upper limit for a ratio of `mtf` to another system."""

    metric: str  # a key of report.METRICS
    against: str  # a system
    limit: float
    placement: str | None = None  # None: all that are compared


def _placed(metric: str, against: str, one: float, logical: float) -> list[Target]:
    """Targets for both placements of operations one by one."""
    return [Target(metric, against, one, "one"), Target(metric, against, logical, "logical")]


def targets(workload: str, mesh: str) -> list[Target]:
    """The targets for a workload; there are some on the 2x2 mesh only."""
    if mesh != "2x2" or workload.endswith(DROPOUT):
        return []
    steps = {
        "a": [
            *_placed("step_ms", "tf", 0.95, 0.95),
            Target("step_ms", "classic", 0.90),
            Target("step_ms", "mtf", 1.05, "simd"),
        ],
        "b4": _placed("step_ms", "tf", 1.00, 0.95),
        "b12": [*_placed("step_ms", "tf", 1.00, 0.95), Target("step_ms", "mtf", 1.05, "simd")],
        "b_small": [
            Target("step_ms", "classic", 0.70),
            Target("step_ms", "tf", 0.85, "xla"),
            Target("step_ms", "jax", 1.05, "xla"),
        ],
        "t12": [Target("step_ms", "classic", 0.90)],
        "t12_adafactor": [Target("step_ms", "classic", 0.90)],
        "t6x6": [Target("step_ms", "classic", 0.90)],
    }
    return steps.get(workload, []) + [
        Target("build_s", "classic", 0.50),
        Target("nodes", "classic", 0.25, "one"),
        Target("nodes", "classic", 0.65, "logical"),
    ]


def _mesh_configs(
    workload: str, mesh: str, systems: list[str], placements: list[str]
) -> list[Config]:
    """Ours and the classic one on a mesh."""
    w = workloads.WORKLOADS[workload]
    return [
        Config(system, workload, mesh, placement)
        for system in ("mtf", "classic")
        if system in systems
        for placement in placements
        if system == "mtf" or placement in ("one", "logical")
        if placement != "xla" or w.kind in ("ff", "transformer")
    ]


def group(workload: str, mesh: str, systems: list[str], placements: list[str]) -> Group:
    """All systems on one workload."""
    w = workloads.WORKLOADS[workload]
    peers = [Config(s, workload) for s in ("tf", "tf_xla") if s in systems and not w.uses_package]
    if w.kind in ("ff", "transformer") and not w.dropout:
        partitioned = ("jax", "jax_named", "pjrt", "dtensor")
        peers += [Config(s, workload, mesh) for s in partitioned if s in systems]
    ours = _mesh_configs(workload, mesh, systems, placements)
    comparisons = [Comparison(c, peer) for c in ours for peer in peers]
    comparisons += [
        Comparison(c, d)
        for c in ours
        for d in ours
        if ((c.system, d.system) == ("mtf", "classic") and c.placement == d.placement)
        or (c.label, d.label) == ("mtf simd", "mtf logical")
    ]
    comparisons += [
        Comparison(c, d)
        for c in peers
        for d in peers
        if (c.label, d.label) == ("pjrt", "jax_named")
    ]
    return Group(
        f"{workload}@{mesh}",
        f"{w.title}; mesh {mesh}",
        tuple(peers + ours),
        tuple(comparisons),
        step_factor=5 if workload == "b_small" else 1,
    )


def dropout_group(workload: str, mesh: str, systems: list[str], placements: list[str]) -> Group:
    """Each system with dropout against itself without, and against plain TensorFlow."""
    w = workloads.WORKLOADS[workload + DROPOUT]
    plain = [Config("tf", workload)] if "tf" in systems else []
    plain += _mesh_configs(workload, mesh, systems, placements)
    wet = [dataclasses.replace(c, workload=workload + DROPOUT) for c in plain]
    comparisons = [Comparison(c, d) for c, d in zip(wet, plain)]
    comparisons += [Comparison(c, wet[0]) for c in wet[1:] if wet[0].system == "tf"]
    return Group(
        f"dropout_{workload}@{mesh}",
        f"{w.title}; mesh {mesh}",
        tuple(plain + wet),
        tuple(comparisons),
        step_factor=5 if workload == "b_small" else 1,
    )


def all_groups(systems: list[str], placements: list[str], quick: bool) -> list[Group]:
    """Every group, most important first."""
    names = ["a", "b4", "b12", "b_small", "c"]
    of_package = ["t12", "t12_adafactor", "t6x6"]
    result = [group(name, "2x2", systems, placements) for name in names + of_package]
    result += [dropout_group(name, "2x2", systems, placements) for name in ("b4", "b_small")]
    if not quick:
        result += [
            group(name, mesh, systems, placements)
            for mesh in ("1", "2", "4", "8")
            for name in names
        ]
    return result


def determinism_configs(placements: list[str]) -> list[Config]:
    """Returns the configurations whose results must be reproducible."""
    return [
        Config("mtf", name, "2x2", placement)
        for name in ("b_small", "b_small_dropout", "c")
        for placement in placements
    ]


def wanted(name: str, only: str) -> bool:
    """Whether a group is named by --only: whole name, workload, mesh or "dropout"."""
    items = [item for item in only.split(",") if item]
    workload, _, mesh = name.partition("@")
    parts = {name, workload, mesh, workload.partition("_")[0] if "dropout" in name else workload}
    return not items or any(item in parts for item in items)
