"""Summarizes the results of workers: medians, ratios, tables and verdicts."""

import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import groups
import workloads
from groups import Group

CHECKED_STEPS = 10
LOSS_TOLERANCE = 1e-3
DROPOUT_TOLERANCE = 0.25  # other random numbers: only a sanity check

# Metric to heading and format.
METRICS: dict[str, Any] = {
    "step_ms": ("step ms", "{:.2f}"),
    "gflops": ("GFLOP/s", "{:.0f}"),
    "cpu_ms": ("CPU ms", "{:.1f}"),
    "peak_mb": ("peak MB", "{:.0f}"),
    "nodes": ("nodes", "{:.0f}"),
    "graph_s": ("graph s", "{:.3f}"),
    "lowering_s": ("lower s", "{:.3f}"),
    "build_s": ("build s", "{:.3f}"),
    "init_s": ("init s", "{:.2f}"),
    "first_s": ("first s", "{:.2f}"),
    "start_s": ("start s", "{:.2f}"),
}


def machine_facts() -> dict[str, Any]:
    """Cores and versions; read without importing TensorFlow."""
    version = ""
    for name in ("tensorflow", "tensorflow-cpu"):
        try:
            version = version or metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "tensorflow": version,
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


def product_rate() -> float:
    """GFLOP/s of a large product in plain TensorFlow, measured in a process of its own."""
    command = [sys.executable, str(Path(__file__).parent / "product_rate.py")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(run.stdout.splitlines()[-1])


def measures(result: dict[str, Any]) -> dict[str, float]:
    """The metrics of one process."""
    seconds, step = result["seconds"], statistics.median(result["times"])
    return {
        "step_ms": 1e3 * step,
        "gflops": workloads.train_flops(workloads.WORKLOADS[result["workload"]]) / step / 1e9,
        "cpu_ms": 1e3 * result["cpu"] / len(result["times"]),
        "peak_mb": result["peak_mb"],
        "nodes": result["nodes"],
        "graph_s": seconds["build"],
        "lowering_s": seconds["lowering"],
        "build_s": seconds["build"] + seconds["lowering"],
        "init_s": result["init_seconds"],
        "first_s": result["first_step_seconds"],
        "start_s": sum(seconds[key] for key in ("build", "lowering"))
        + result["init_seconds"]
        + result["first_step_seconds"],
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def loss_difference(result: dict[str, Any], reference: dict[str, Any]) -> float:
    """The largest relative difference among the losses of the first steps."""
    pairs = zip(result["losses"][:CHECKED_STEPS], reference["losses"][:CHECKED_STEPS])
    differences = [abs(x - y) / abs(y) for x, y in pairs]
    return float("inf") if any(map(math.isnan, differences)) else max(differences)


def _row(
    config: groups.Config, rounds: list[dict[str, Any]], reference: str | None
) -> dict[str, Any]:
    """The summary of one configuration."""
    results = [r[config.label] for r in rounds if config.label in r]
    row: dict[str, Any] = {
        "label": config.label,
        "system": config.system,
        "workload": config.workload,
        "placement": config.placement,
        "mesh": config.mesh,
        "rounds": len(results),
        "tf_version": results[0]["tf_version"],
        "metrics": {key: spread([measures(r)[key] for r in results]) for key in METRICS},
        "phases": {
            key: statistics.median(r["seconds"][key] for r in results)
            for key in results[0]["seconds"]
        },
        "last_checked_loss": results[0]["losses"][CHECKED_STEPS - 1],
    }
    references = [r[reference] for r in rounds if config.label in r and reference in r]
    if references:
        row["loss_difference"] = max(map(loss_difference, results, references))
        dropout = config.workload.endswith(groups.DROPOUT)
        tolerance = DROPOUT_TOLERANCE if dropout else LOSS_TOLERANCE
        row["loss_agrees"] = row["loss_difference"] <= tolerance
    return row


def summarize(group: Group, rounds: list[dict[str, Any]], errors: dict[str, str]) -> dict[str, Any]:
    """Rows, ratios and verdicts of a group."""
    # Plain TensorFlow, or else the classic, or JAX, says what the losses have to be.
    references = {
        c.workload: c.label
        for system in ("jax_named", "classic", "tf")
        for c in group.configs
        if c.system == system
    }
    ran = [c for c in group.configs if any(c.label in r for r in rounds)]
    rows = [_row(c, rounds, references.get(c.workload)) for c in ran]
    agrees = {row["label"]: row.get("loss_agrees") for row in rows}
    ratios = []
    for comparison in group.comparisons:
        a, b = comparison.config, comparison.against
        both = [
            (measures(r[a.label]), measures(r[b.label]))
            for r in rounds
            if a.label in r and b.label in r
        ]
        if not both:
            continue
        ratios.append(
            {
                "label": a.label,
                "against": b.label,
                "system": a.system,
                "against_system": b.system,
                "placement": a.placement,
                "counts": bool(agrees[a.label]),
                "metrics": {
                    key: spread([x[key] / y[key] for x, y in both])
                    for key in METRICS
                    if all(y[key] for _, y in both)
                },
            }
        )
    workload, _, mesh = group.name.partition("@")
    verdicts = [v for t in groups.targets(workload, mesh) for v in _verdicts(t, ratios)]
    return {
        "name": group.name,
        "title": group.title,
        "rows": rows,
        "ratios": ratios,
        "verdicts": verdicts,
        "errors": errors,
    }


def _verdicts(target: groups.Target, ratios: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compares a target with its ratios."""
    result = []
    for ratio in ratios:
        fits = (
            ratio["system"] == "mtf"
            and ratio["against_system"] == target.against
            and target.placement in (None, ratio["placement"])
        )
        if fits and target.metric in ratio["metrics"]:
            value = ratio["metrics"][target.metric]["median"]
            result.append(
                {
                    "metric": target.metric,
                    "against": target.against,
                    "limit": target.limit,
                    "placement": ratio["placement"],
                    "ratio": value,
                    "met": value <= target.limit and ratio["counts"],
                }
            )
    return result


def _table(rows: list[list[str]]) -> str:
    """Columns, the first aligned to the left and the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def format_header(header: dict[str, Any]) -> str:
    """One line about the machine."""
    return (
        "{cores} cores ({machine}), TensorFlow {tensorflow}, Python {python}, load "
        "{load_average:.1f}; {rounds} rounds of {steps} steps; a large product {rate:.0f} GFLOP/s"
    ).format(**header)


def _loss_cell(row: dict[str, Any]) -> str:
    """How far the losses are from those of plain TensorFlow."""
    if "loss_difference" not in row:
        return "-"
    return "{:.0e}{}".format(row["loss_difference"], "" if row["loss_agrees"] else " DIFFERS")


def format_group(group: dict[str, Any], rate: float) -> str:
    """The tables of a group: medians, then ratios with their range.

    Args:
      group: a summary.
      rate: the GFLOP/s of a large product, of which each row has a share.
    """
    head = [""] + [title for title, _ in METRICS.values()] + ["loss diff"]
    head.insert(1 + list(METRICS).index("gflops") + 1, "share")
    rows = []
    for row in group["rows"]:
        cells = [row["label"]]
        for key, (_, form) in METRICS.items():
            value = row["metrics"][key]["median"]
            cells.append(form.format(value))
            if key == "gflops":
                cells.append(f"{value / rate:.0%}")
        rows.append([*cells, _loss_cell(row)])
    parts = ["", "== {name}: {title} ({seconds:.0f} s)".format(**group), _table([head] + rows)]
    keys = ["step_ms", "cpu_ms", "peak_mb", "nodes", "build_s", "first_s", "start_s"]
    lines = [["ratio of medians a round"] + [METRICS[key][0] for key in keys]]
    for ratio in group["ratios"]:
        cells = []
        for key in keys:
            value = ratio["metrics"].get(key)
            text = "{median:.2f}" if key == "nodes" else "{median:.2f} ({min:.2f}-{max:.2f})"
            cells.append(text.format(**value) if value else "-")
        mark = "" if ratio["counts"] else " [loss differs]"
        lines.append([f"{ratio['label']} / {ratio['against']}{mark}"] + cells)
    if len(lines) > 1:
        parts.append(_table(lines))
    parts += [f"failed: {label}: {error}" for label, error in group["errors"].items()]
    return "\n".join(parts)


def format_targets(all_groups: list[dict[str, Any]]) -> str:
    """A table of every target and the measured value."""
    lines = [["target", "placement", "limit", "measured", ""]]
    for group in all_groups:
        for verdict in group["verdicts"]:
            lines.append(
                [
                    "{}: {} / {}".format(
                        group["name"], METRICS[verdict["metric"]][0], verdict["against"]
                    ),
                    verdict["placement"],
                    "{:.2f}".format(verdict["limit"]),
                    "{:.2f}".format(verdict["ratio"]),
                    "met" if verdict["met"] else "NOT MET",
                ]
            )
    return "\n" + _table(lines) if len(lines) > 1 else "\nno targets measured"


def format_determinism(results: list[dict[str, Any]]) -> str:
    """Whether runs gave identical results."""
    lines = ["", "== determinism: three runs end at the same loss to the bit"]
    for result in results:
        verdict = result["error"] or ("yes" if result["same"] else "no")
        lines.append("{workload}@{mesh} {placement}: ".format(**result) + verdict)
    return "\n".join(lines)
