"""Flags of a run."""

from __future__ import annotations

from absl import flags

from mesh_tensorflow._flags import FLAGS, Flag, define

__all__ = ["FLAGS"]

_DEFINITIONS: tuple[Flag, ...] = (
    (
        flags.DEFINE_bool,
        "use_tpu",
        True,
        "Whether all processors run one program: on a TPU, or on CPUs or GPUs if there is none. "
        "Otherwise operations are placed on CPUs or GPUs one by one.",
    ),
    (flags.DEFINE_bool, "on_gcp", False, "Whether --master is the name of a Cloud TPU."),
    (flags.DEFINE_string, "master", "", "Address of the session's master."),
    (
        flags.DEFINE_string,
        "checkpoint_dir",
        "",
        "Directory of checkpoints, from which training goes on.",
    ),
    (
        flags.DEFINE_string,
        "pred_output_dir",
        "",
        "Directory of predictions; none are written without.",
    ),
    (
        flags.DEFINE_string,
        "summary_dir",
        "",
        "Directory of summaries; --checkpoint_dir if it is empty.",
    ),
    (flags.DEFINE_bool, "write_summary", True, "Whether to write summaries."),
    (
        flags.DEFINE_integer,
        "num_train_iterations_per_loop",
        500,
        "Training steps between evaluations.",
    ),
    (flags.DEFINE_integer, "num_eval_iterations_per_loop", 2, "Batches of an evaluation."),
    (flags.DEFINE_integer, "num_training_loops", 1000, "How many times to train and evaluate."),
    (
        flags.DEFINE_integer,
        "save_checkpoints_steps",
        500,
        "Steps between checkpoints; also before evaluations.",
    ),
    (
        flags.DEFINE_float,
        "lr",
        0.003,
        "Learning rate at the beginning, relative to the size of weights.",
    ),
    (flags.DEFINE_float, "lr_drop_steps", 20000.0, "Steps between drops of the learning rate."),
    (flags.DEFINE_float, "lr_drop_rate", 0.3, "What a drop multiplies the learning rate by."),
    (flags.DEFINE_string, "mesh_shape", "rows:4, columns:4, cores:2", "Shape of the mesh."),
)

define(_DEFINITIONS)
