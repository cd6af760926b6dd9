"""Plans for the largest language model of the Mesh TensorFlow paper, or for models of today.

    python benchmarks/parallelism_plans.py
    python benchmarks/parallelism_plans.py --today

Tables are in Markdown. Nothing is computed: programs are built, and their layouts searched by
estimated time, for 8, 64 and 512 processors with 16 and 80 GB each. The model has 4.9e9 weights
(Shazeer et al., "Mesh-TensorFlow: deep learning for supercomputers", 2018: d_model 1024, six
layers, 256 heads, d_ff 262144). With --today: Llama 3 8B and 70B and Mixtral 8x7B, made of what
their config.json says, on 8, 64 and 256 H100 and TPU v4.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import quiet

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
}  # fmt: skip
# Fields of config.json, the ids of a row, and rows of a step by the number of processors.
TODAY: dict[str, tuple[dict[str, Any], int, dict[int, int]]] = {
    "Llama 3 8B": (
        {
            **LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
        8192,
        {8: 128, 64: 128, 256: 512},
    ),
    "Llama 3 70B": (
        {
            **LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
            "num_attention_heads": 64,
        },
        8192,
        {8: 128, 64: 128, 256: 512},
    ),
    "Mixtral 8x7B": (
        {
            "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096,
            "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
            "rope_theta": 1000000.0, "max_position_embeddings": 32768,
        },
        4096,
        {8: 256, 64: 256, 256: 1024},
    ),
}  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processors", type=int, nargs="+", default=None)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[16, 80])
    parser.add_argument("--optimizer", default="adam", choices=["adam", "adafactor"])
    parser.add_argument("--batch", type=int, default=256, help="sequences of 256 tokens")
    parser.add_argument("--explain", action="store_true", help="print all that is known of a plan")
    parser.add_argument("--today", action="store_true", help="models of today instead")
    parser.add_argument(
        "--models", nargs="+", default=list(TODAY), choices=list(TODAY), help="of --today"
    )
    parser.add_argument("--hardware", nargs="+", default=["h100", "tpu_v4"], help="of --today")
    arguments = parser.parse_args()
    if arguments.processors is None:
        arguments.processors = [8, 64, 256 if arguments.today else 512]
    return arguments


if __name__ == "__main__":
    ARGUMENTS = parse_arguments()  # before the seconds of the next line
    quiet.import_tensorflow()

import tensorflow.compat.v1 as tf
from planned_language_model import planned_language_model

import mesh_tensorflow as mtf
from mesh_tensorflow.auto_mtf import Choice
from mesh_tensorflow.auto_mtf.hardware import hardware_profile
from mesh_tensorflow.auto_mtf.plans import Lost, Plans
from mesh_tensorflow.auto_mtf.step_time import ProgramParts

MODEL: dict[str, Any] = {
    "length": 256, "vocab": 32000, "d_model": 1024, "layers": 6, "heads": 256, "d_kv": 256,
    "d_ff": 262144, "dtype": "bfloat16",
}  # fmt: skip
CANDIDATES = [
    Choice(),
    Choice(recompute=True),
    Choice(recompute=True, sequence_parallel=True),
    Choice(recompute=True, attention="ring"),
    Choice(stages=2, microbatches=8, recompute=True),
    Choice(stages=2, microbatches=8, repeats=3, recompute=True),
]
MESHES = {
    8: ["a:8", "a:4,b:2"],
    64: ["a:64", "a:16,b:4", "a:8,b:8", "a:8,b:4,c:2"],
    512: ["a:512", "a:64,b:8", "a:32,b:16", "a:32,b:8,c:2"],
}
HARDWARE = "tpu_v3"


@functools.cache
def build(choice: Choice) -> ProgramParts:
    """Returns a program, which is the same for all numbers of processors."""
    program = planned_language_model(
        choice, batch=ARGUMENTS.batch, optimizer=ARGUMENTS.optimizer, **MODEL
    )
    return ProgramParts(program.graph, program.outputs)


def meshes(processors: int) -> list[Any]:
    """Returns the mesh shapes to choose from."""
    return MESHES.get(processors) or mtf.auto_mtf.api.all_mesh_shapes(processors, 2)


def picked(processors: int, gigabytes: float) -> Any:
    """Returns the Plans; or the error, if nothing fits."""
    try:
        return mtf.auto_mtf.plan(
            build, processors, CANDIDATES, memory_limit_bytes=gigabytes * 1e9, hardware=HARDWARE,
            mesh_shapes=meshes(processors),
        )  # fmt: skip
    except mtf.auto_mtf.step_time.MemoryLimitError as e:
        return e


def row(processors: int, gigabytes: float, plans: Any) -> str:
    """Returns the row of a pick."""
    if not isinstance(plans, Plans):
        return f"| {processors} | {gigabytes:g} | none fits: {str(plans).splitlines()[0]} | | | | |"
    best = plans.best
    seconds, held = best.seconds, best.memory
    known = sum(held.get(kind, 0) for kind in ("weights", "slots"))
    cells = [
        f"{processors}",
        f"{gigabytes:g}",
        f"{best.choice}; {best.estimate.text.replace(';', ', ')}; "
        f"{best.stored_layout or 'variables as computed with'}",
        f"{', '.join(f'{d.name}={d.size}' for d in best.mesh_shape)}",
        f"{seconds.total * 1e3:,.0f} ms: {seconds.communication / seconds.total:.1%}, "
        f"{best.recomputed_seconds / seconds.total:.0%}, {best.bubble_seconds / seconds.total:.0%}",
        f"{best.estimate.peak_bytes / 1e9:.1f}: {known / 1e9:.1f}, "
        f"{held.get('gradients', 0) / 1e9:.1f}, "
        f"{(best.estimate.peak_bytes - known - held.get('gradients', 0)) / 1e9:.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


def why(lost: Lost) -> str:
    """Returns one cell: how much longer, or how much too large."""
    if lost.best is None:
        return f"{lost.missing_bytes / 1e9:.1f} GB too many" if lost.missing_bytes else lost.why
    return lost.why.partition(" times as long")[0]


def operations_of_a_token(config: dict[str, Any], length: int) -> float:
    """Returns the operations that a model takes for a token of a training, without repetitions.

    6 for each weight that a token meets, of embeddings none, and 6 for each channel of attention
    and position: half of 12, as a token sees those before it.
    """
    d_model, blocks, heads = (
        config[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    d_kv, experts = d_model // heads, config.get("num_experts_per_tok", 1)
    attention = 2 * d_model * d_kv * (heads + config["num_key_value_heads"])
    weights = attention + 3 * experts * d_model * config["intermediate_size"]
    weights += d_model * config.get("num_local_experts", 0)
    logits = d_model * config["vocab_size"]
    return 6.0 * (blocks * weights + logits + blocks * d_model * length)


@functools.lru_cache(maxsize=1)  # one holds several programs of some thousand operations
def training_step(name: str, batch: int) -> Callable[[Choice], ProgramParts]:
    """Returns the function that builds the step of a model of today, for all of its rows."""
    config, length, _ = TODAY[name]
    return mtf.models.layouts.training_step(config, batch, length)


def candidates_of_today(name: str, processors: int) -> list[Choice]:
    """Returns the programs to choose from."""
    large, small = name == "Llama 3 70B", name == "Llama 3 8B"
    often = (16, 32) if processors <= 8 else (4, 16) if large else (1, 4)
    return [
        Choice(microbatches=parts, recompute=again, sequence_parallel=large)
        for again in ([False, True] if small else [True])
        for parts in often
    ]


def row_of_today(name: str, hardware: str, processors: int) -> str:
    """Returns the row of a model of today."""
    config, length, batches = TODAY[name]
    batch = batches.get(processors, 2 * processors)
    start = f"| {name} | {processors} {hardware} | {batch} x {length} "
    profile = hardware_profile(hardware)
    try:
        plans = mtf.auto_mtf.plan(
            training_step(name, batch), processors, candidates_of_today(name, processors), zero=[3],
            memory_limit_bytes=profile.memory_bytes, hardware=profile, within=1,
            joint="num_local_experts" in config,
        )  # fmt: skip
    except mtf.auto_mtf.step_time.MemoryLimitError as e:
        first = str(e).splitlines()[0]
        nearest = first.partition("which takes ")[2].partition(", ")[0]
        return f"{start}| none fits: the nearest takes {nearest} | | | | | |"
    if ARGUMENTS.explain:
        print(plans, flush=True)
    best = plans.best
    tokens = batch * length / best.seconds.total / processors
    used = tokens * operations_of_a_token(config, length)
    used /= profile.flops.get("bfloat16", profile.flops["float32"])
    sizes = {d.name: d.size for d in best.mesh_shape}
    rules = best.estimate.text.replace(";", ", ")
    stored = best.stored_layout
    cells = [
        f"{best.choice}",
        f"{', '.join(f'{n}={size}' for n, size in sizes.items())}",
        f"{rules}; {stored or 'zero=0'}",
        f"{best.seconds.total:,.1f} s: {best.seconds.communication / best.seconds.total:.0%}",
        f"{tokens:,.0f}; {used:.0%}",
        f"{best.estimate.peak_bytes / 1e9:.0f} GB",
    ]
    return f"{start}| {' | '.join(cells)} |"


def today() -> None:
    """Prints the table of models of today."""
    parts = "rows x ids | program | mesh | layout | step: communication | tokens/s; MFU | memory"
    print(f"| model | processors | {parts} |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in ARGUMENTS.models:
        # By the number of processors first: rows of one batch share their programs.
        for processors in ARGUMENTS.processors:
            for hardware in ARGUMENTS.hardware:
                start = time.perf_counter()
                print(row_of_today(name, hardware, processors), flush=True)
                print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)


def main() -> None:
    """Prints the tables."""
    if ARGUMENTS.today:
        today()
        return
    start, found = time.perf_counter(), {}
    for processors in ARGUMENTS.processors:
        for gigabytes in ARGUMENTS.gigabytes:
            found[processors, gigabytes] = plans = picked(processors, gigabytes)
            if ARGUMENTS.explain:
                print(plans, flush=True)
            seconds = time.perf_counter() - start
            print(f"{processors}, {gigabytes:g}: {seconds:.0f} s", file=sys.stderr, flush=True)
    weights = sum(v.size for v in build(CANDIDATES[0]).graph.trainable_variables)
    print(f"\n{weights:,} weights, {ARGUMENTS.batch} sequences, {ARGUMENTS.optimizer}\n")
    parts = "step: communication, recomputed, bubble | GB at the peak: variables, gradients, rest"
    print(f"| processors | GB | pick | mesh | {parts} |")
    print("|---|---|---|---|---|---|")
    for key, plans in found.items():
        print(row(*key, plans))
    print("\n| program | zero | " + " | ".join(f"{n} of {g:g} GB" for n, g in found) + " |")
    print("|---|---|" + "---|" * len(found))
    for choice in CANDIDATES:
        for zero in (0, 2, 3):
            cells = []
            for plans in found.values():
                lost = plans.lost if isinstance(plans, Plans) else []
                cells += [why(x) for x in lost if (x.choice, x.zero) == (choice, zero)] or ["**1**"]
            print(f"| {choice} | {zero} | {' | '.join(cells)} |")


if __name__ == "__main__":
    tf.disable_v2_behavior()
    main()
