"""Memory of ZeRO, bubbles of pipelines, and communication, as programs have them; in Markdown.

    python benchmarks/parallelism_study.py

Nothing is computed. The programs are built, and lowered for small models; the numbers are those of
`mtf.summary`, of `mtf.layers.PipelineSchedule` and of the collectives that the Lowering counts.
They stand beside the formulas of the papers.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import quiet

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processors", type=int, default=64, help="of the table of ZeRO")
    return parser.parse_args()


if __name__ == "__main__":
    ARGUMENTS = parse_arguments()  # before the seconds of the next line
    quiet.import_tensorflow()

import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.auto_mtf import models
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl

# 7.5e9 weights, as in the paper; the program's own biases and norms are few.
LARGE: dict[str, Any] = {
    "layers": 36, "d_model": 4096, "heads": 32, "d_kv": 128, "d_ff": 16384, "vocab": 32768,
    "length": 1024, "dtype": "bfloat16", "optimizer": "adam",
}  # fmt: skip
SMALL: dict[str, Any] = {
    "layers": 4, "d_model": 64, "heads": 4, "d_kv": 16, "d_ff": 256, "vocab": 128, "length": 16,
    "batch": 8, "optimizer": "adam",
}  # fmt: skip
# Bytes of a weight beside those that are stored. What is gathered or reduce-scattered is the
# difference between the stages: rows are (name, rule, parts of the gathered weights, of gradients).
FLOAT32 = [("0", 0, 0, 1), ("1", 1, 0, 1), ("2", 2, 0, None), ("3", 3, 0, None)]
MIXED = [("0", 0, 1, 1), ("1", 3, 1, 1), ("2", 3, 1, None), ("3", 3, None, None)]
PAPER = {"0": "120", "1": "31.4", "2": "16.6", "3": "1.9"}
PIPELINES = [(2, 4, 1), (4, 4, 1), (4, 8, 1), (4, 32, 1), (8, 32, 1), (4, 8, 2), (8, 32, 4)]


def implementation(layout: str, processors: int, **stored: Any) -> PlacementMeshImpl:
    """Returns a mesh of a row of processors on one device."""
    return PlacementMeshImpl(f"all:{processors}", layout, [""] * processors, **stored)


def zero_memory(processors: int) -> None:
    """Prints what each processor holds at the stages of ZeRO."""
    with tf.Graph().as_default():
        program = models.language_model(**LARGE, batch=processors)
    summaries = {
        stage: mtf.summary(program.graph, implementation("batch:all", processors, zero=stage))
        for stage in (0, 1, 2, 3)
    }
    count = summaries[0].parameters("weights")
    print(f"{count:,} weights on {processors} processors, Adam; GB on each processor")
    for title, size, stages in (("float32", 4, FLOAT32), ("mixed precision", 2, MIXED)):
        print(f"\n| {title}: stage | rule | weights | slots | computed with | gradients | in all |")
        print("|---|---|---|---|---|---|---|")
        for name, rule, whole, gradients in stages:
            summary = summaries[rule]
            held = [
                summary.bytes_per_processor("weights"),
                summary.bytes_per_processor("slots"),
                count * size * (1 / processors if whole is None else whole),
                count * size * (1 / processors if gradients is None else gradients),
            ]
            cells = " | ".join(f"{x / 1e9:.1f}" for x in (*held, sum(held)))
            paper = f" (paper: {PAPER[name]})" if title != "float32" else ""
            print(f"| {name} | zero={rule} | {cells}{paper} |")


def lowered(layout: str, mesh: str, recompute: bool = False, **stored: Any) -> mtf.Lowering:
    """Returns the Lowering of the small model."""
    with tf.Graph().as_default():
        program = models.language_model(**SMALL, recompute=recompute)
        shape = mtf.convert_to_shape(mesh)
        impl = PlacementMeshImpl(shape, layout, [""] * shape.size, **stored)
        return mtf.Lowering(program.graph, {program.mesh: impl})


def volumes(lowering: mtf.Lowering, kinds: dict[str, float]) -> float:
    """Returns elements that each processor sends, for factors of kinds of collectives."""
    size = next(iter(lowering.mesh_to_impl.values())).size
    return sum(c.elements * kinds[c.kind] for _, _, c in lowering.collectives) / size


def zero_communication() -> None:
    """Prints the volumes of ZeRO in elements for each weight: an allreduce counts twice."""
    kinds = {"allreduce": 2.0, "reduce_scatter": 1.0, "allconcat": 1.0}
    print("\n| rule | elements for each weight | of data parallelism |")
    print("|---|---|---|")
    first = 0.0
    for name, stored, recompute in (
        ("data parallelism", {}, False),
        ("zero=1, zero=2", {"zero": 2}, False),
        ("zero=3", {"zero": 3}, False),
        ("zero=3, layers recomputed", {"zero": 3}, True),
    ):
        lowering = lowered("batch:all", "all:4", recompute, **stored)
        count = sum(v.size for v in lowering.graph.trainable_variables)
        sent = volumes(lowering, kinds) / count
        first = first or sent
        print(f"| {name} | {sent:.2f} | {sent / first:.2f} |")


def tensor_communication() -> None:
    """Prints the allreduces of a Megatron layout in each layer."""
    lowering = lowered("batch:rows,heads:cols,d_ff:cols", "rows:2,cols:2")
    impl = next(iter(lowering.mesh_to_impl.values()))
    over = [c for _, _, c in lowering.collectives if c.mesh_axes == (1,)]
    one = SMALL["batch"] * SMALL["length"] * SMALL["d_model"] * impl.shape[1].size
    print(
        f"\nbatch:rows, heads:cols, d_ff:cols, {SMALL['layers']} layers: "
        f"{sum(c.elements for c in over) / one / SMALL['layers']:.2f} allreduces of "
        "[batch, length, d_model] in each layer (Megatron: 4)"
    )


def bubbles() -> None:
    """Prints the idle parts of pipelines."""
    print("\n| stages K | microbatches M | repeats R | ticks | idle | (K-1)/(MR+K-1) |")
    print("|---|---|---|---|---|---|")
    for stages, microbatches, repeats in PIPELINES:
        schedule = mtf.layers.PipelineSchedule(stages, microbatches, repeats)
        formula = (stages - 1) / (microbatches * repeats + stages - 1)
        print(
            f"| {stages} | {microbatches} | {repeats} | {schedule.ticks} | "
            f"{schedule.bubble:.3f} | {formula:.3f} |"
        )


def main() -> None:
    """Prints the tables."""
    zero_memory(ARGUMENTS.processors)
    zero_communication()
    tensor_communication()
    bubbles()


if __name__ == "__main__":
    main()
