"""Settings of a run."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

from mesh_tensorflow.experimental._flags import define

__all__ = ["FLAGS"]

_DEFINITIONS: tuple[tuple[str, type, Any, str], ...] = (
    ("use_tpu", bool, True,
     "Whether all processors run one program: on a TPU, or on CPUs or GPUs if there is none. "
     "Otherwise operations are placed on CPUs or GPUs one by one."),
    ("on_gcp", bool, False, "Whether --master is the name of a Cloud TPU."),
    ("master", str, "", "Address of the session's master."),
    ("checkpoint_dir", str, "", "Directory of checkpoints, from which training goes on."),
    ("pred_output_dir", str, "", "Directory of predictions; none are written without."),
    ("summary_dir", str, "", "Directory of summaries; --checkpoint_dir if it is empty."),
    ("write_summary", bool, True, "Whether to write summaries."),
    ("num_train_iterations_per_loop", int, 500, "Training steps between evaluations."),
    ("num_eval_iterations_per_loop", int, 2, "Batches of an evaluation."),
    ("num_training_loops", int, 1000, "How many times to train and evaluate."),
    ("save_checkpoints_steps", int, 500, "Steps between checkpoints; also before evaluations."),
    ("lr", float, 0.003, "Learning rate at the beginning, relative to the size of weights."),
    ("lr_drop_steps", float, 20000.0, "Steps between drops of the learning rate."),
    ("lr_drop_rate", float, 0.3, "What a drop multiplies the learning rate by."),
    ("mesh_shape", str, "rows:4, columns:4, cores:2", "Shape of the mesh."),
)

define(_DEFINITIONS)

# This form reads the command line by itself when a flag is first asked for.
FLAGS = tf.flags.FLAGS
