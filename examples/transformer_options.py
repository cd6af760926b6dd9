"""Flags of the transformer examples."""

from __future__ import annotations

import dataclasses

from command_line import option

# The options of layers that name a dimension, so that --layout may split it.
NAMED_BY = {
    "residual_length": ("LayerStack.sequence_parallel", True),
    "attention_heads": ("SelfAttention.attention_func", "all_to_all"),
}
# The tensor dimensions that --layout may split.
DIMENSIONS = (
    "batch", "heads", "d_ff", "vocab", "d_model", "length", "memory_length", "stages", *NAMED_BY
)  # fmt: skip
MESH_IMPLS = ("placement", "simd", "pjrt")
AUTO = "auto"
LAYOUT = "batch:rows;heads:cols;d_ff:cols;vocab:cols"
PIPELINE_LAYOUT = "batch:rows;stages:cols;vocab:cols"
RING_LAYOUT = "batch:rows;length:cols;memory_length:cols"


@dataclasses.dataclass(frozen=True)
class Options:
    """Command-line options; every field is a flag."""

    mesh_shape: str = option("rows:2;cols:2", "Dimensions of the mesh and their sizes.")
    layout: str = option(
        LAYOUT,
        f"Which tensor dimension is split over which mesh dimension: {', '.join(DIMENSIONS)}. "
        "Or auto, to try those that a cost model prefers, and train with the fastest.",
    )
    zero: int = option(
        0,
        "Stage of ZeRO: 1 stores the optimizer's slots in parts over the mesh dimension that "
        "splits the batch, 2 sums gradients to parts, 3 stores weights in parts too; 0 for none.",
    )
    ring: bool = option(
        False,
        "Attention in a ring: keys and values are passed around the processors that have parts of "
        "each sequence. The default layout is then "
        f"{RING_LAYOUT!r}.",
    )
    pipeline: int = option(
        0,
        "Stages of a pipeline, each with an equal part of the layers; 0 for none. The default "
        f"layout is then {PIPELINE_LAYOUT!r}.",
    )
    mesh_impl: str = option(
        "placement",
        "placement for one graph of all processors, simd for one program on each, pjrt for "
        "devices of JAX.",
    )
    model_dir: str = option("", "Directory of checkpoints, to resume from; or none.")
    batch_size: int = option(0, "Sequences in a step, over all processors; 0 for the usual.")
    train_steps: int = option(0, "Steps in all, with those in --model_dir; 0 for the usual.")
    steps_per_checkpoint: int = option(
        0, "Steps from checkpoint to checkpoint, each of which is tested; 0 for the usual."
    )
    seed: int = option(0, "Seed of the order of examples.")
    quick: bool = option(False, "Fewer steps, in about half a minute, and a worse model.")

    @property
    def rules(self) -> str:
        """The layout: that of rings with `ring`, of a pipeline, unless another one is given."""
        if self.layout != LAYOUT:
            return self.layout
        return RING_LAYOUT if self.ring else PIPELINE_LAYOUT if self.pipeline else LAYOUT
