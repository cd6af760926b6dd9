"""Command-line flags of the BERT programs, which share most of them."""

from __future__ import annotations

from absl import flags

from mesh_tensorflow._flags import FLAGS, Flag, define

__all__ = ["FLAGS", "MESH_FLAGS", "TEXT_FLAGS", "TRAINING_FLAGS", "Flag", "define"]

MESH_FLAGS: tuple[Flag, ...] = (
    (flags.DEFINE_string, "mesh_shape", "batch:8", "Mesh, such as batch:2;model:2."),
    (
        flags.DEFINE_string,
        "layout",
        "batch:batch,vocab:model,intermediate:model,num_heads:model,experts:batch",
        "Layout: which mesh dimension splits which dimension.",
    ),
    (
        flags.DEFINE_bool,
        "use_tpu",
        False,
        "Whether each processor of the mesh runs a program of its own, as TPU cores do.",
    ),
    (flags.DEFINE_string, "tpu_name", None, "Name or grpc address of a TPU."),
    (flags.DEFINE_string, "tpu_zone", None, "The TPU's zone."),
    (flags.DEFINE_string, "gcp_project", None, "The TPU's project."),
    (flags.DEFINE_string, "master", None, "The session's target; this process if empty."),
)

TRAINING_FLAGS: tuple[Flag, ...] = (
    (flags.DEFINE_string, "bert_config_file", None, "Configuration of the model, as JSON."),
    (flags.DEFINE_string, "output_dir", None, "Directory of checkpoints and results."),
    (flags.DEFINE_string, "init_checkpoint", None, "Checkpoint that training begins with."),
    (flags.DEFINE_float, "learning_rate", 5e-5, "The highest learning rate."),
    (flags.DEFINE_string, "optimizer", "adam", "adam or adafactor."),
    (flags.DEFINE_bool, "clip_gradients", True, "Whether gradients are clipped to a norm of 1."),
    (flags.DEFINE_integer, "train_batch_size", 32, "Sequences of a batch in training."),
    (
        flags.DEFINE_integer,
        "save_checkpoints_steps",
        1000,
        "Steps from one checkpoint to the next.",
    ),
    (
        flags.DEFINE_integer,
        "iterations_per_loop",
        1000,
        "For TPUs: steps from one return to the host to the next.",
    ),
)

TEXT_FLAGS: tuple[Flag, ...] = (
    (flags.DEFINE_string, "vocab_file", None, "The vocabulary: a token per line."),
    (
        flags.DEFINE_bool,
        "do_lower_case",
        True,
        "Whether text is lowered: for uncased models, and not for cased.",
    ),
    (flags.DEFINE_bool, "do_train", False, "Whether to train."),
    (flags.DEFINE_bool, "do_predict", False, "Whether to write predictions."),
    (flags.DEFINE_integer, "predict_batch_size", 8, "Sequences of a batch in prediction."),
    (flags.DEFINE_float, "num_train_epochs", 3.0, "How often training sees each example."),
    (
        flags.DEFINE_float,
        "warmup_proportion",
        0.1,
        "The share of training in which the learning rate grows.",
    ),
    (
        flags.DEFINE_float,
        "max_optimized_variable_size",
        1e7,
        "Variables with more elements are not trained.",
    ),
    (
        flags.DEFINE_string,
        "cached_train_file",
        None,
        "Where training examples are kept as records, to be used again if they are there; in "
        "output_dir, and made anew, if None.",
    ),
)
