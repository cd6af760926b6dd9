"""The command lines of the programs in `mesh_tensorflow.bert`."""

from __future__ import annotations

from absl import flags

from mesh_tensorflow._command_lines.flag_table import Flag, FlagProgram

__all__ = [
    "PRETRAINING_MODES",
    "RUN_CLASSIFIER",
    "RUN_PRETRAINING",
    "RUN_SQUAD",
    "TOKENIZER_FLAGS",
]

_MESH_FLAGS: tuple[Flag, ...] = (
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

_TRAINING_FLAGS: tuple[Flag, ...] = (
    (flags.DEFINE_string, "bert_config_file", None, "Configuration of the model, as JSON."),
    (flags.DEFINE_string, "output_dir", None, "Directory of checkpoints and results."),
    (flags.DEFINE_string, "init_checkpoint", None, "Checkpoint that training begins with."),
    (
        flags.DEFINE_bool,
        "init_checkpoint_strict",
        False,
        "Whether that checkpoint has to have exactly the weights of the model.",
    ),
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

_TEXT_FLAGS: tuple[Flag, ...] = (
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

TOKENIZER_FLAGS: tuple[Flag, ...] = (
    (
        flags.DEFINE_bool,
        "preserve_unused_tokens",
        False,
        "Whether [unused1] and its kin in a text stay whole.",
    ),
)

PRETRAINING_MODES = ("train_and_eval", "train", "eval")
_OPTIMIZERS = ("adam", "adafactor")

RUN_CLASSIFIER = FlagProgram(
    name="mesh_tensorflow.bert.run_classifier",
    description="Fine-tunes BERT to classify sentences or sentence pairs, and predicts with it.",
    examples=(
        "--task_name=cola --data_dir=CoLA \\\n"
        "      --vocab_file=vocab.txt --bert_config_file=base.json --output_dir=OUT \\\n"
        '      --do_train --do_eval --mesh_shape="batch:2;model:2"',
    ),
    required=("data_dir", "task_name", "vocab_file", "bert_config_file", "output_dir"),
    choices={"task_name": ("cola", "mnli", "mrpc", "xnli"), "optimizer": _OPTIMIZERS},
    one_of=("do_train", "do_eval", "do_predict"),
    table=(
        *_MESH_FLAGS,
        *_TRAINING_FLAGS,
        *_TEXT_FLAGS,
        (flags.DEFINE_string, "data_dir", None, "Directory of the data, with .tsv files."),
        (flags.DEFINE_string, "task_name", None, "cola, mnli, mrpc or xnli."),
        (
            flags.DEFINE_integer,
            "max_seq_length",
            128,
            "Length of sequences: longer ones are cut, others padded.",
        ),
        (flags.DEFINE_bool, "do_eval", False, "Whether to evaluate on the dev set."),
        (flags.DEFINE_integer, "eval_batch_size", 32, "Sequences of a batch in evaluation."),
        *TOKENIZER_FLAGS,
    ),
)

RUN_PRETRAINING = FlagProgram(
    name="mesh_tensorflow.bert.run_pretraining",
    description="Trains BERT to predict hidden tokens and whether two texts follow each other.",
    examples=(
        '--input_train_files="train-*.tfrecord" \\\n'
        "      --bert_config_file=base.json --output_dir=OUT \\\n"
        '      --mode=train --mesh_shape="batch:2;model:2"',
    ),
    required=("bert_config_file", "output_dir"),
    choices={"mode": PRETRAINING_MODES, "optimizer": _OPTIMIZERS},
    table=(
        *_MESH_FLAGS,
        *_TRAINING_FLAGS,
        (
            flags.DEFINE_string,
            "input_train_files",
            None,
            "Patterns of the names of files to train on, with commas.",
        ),
        (
            flags.DEFINE_string,
            "input_eval_files",
            None,
            "Patterns of the names of files to evaluate on.",
        ),
        (flags.DEFINE_integer, "max_seq_length", 128, "Length of the sequences in the records."),
        (
            flags.DEFINE_integer,
            "max_predictions_per_seq",
            20,
            "How many hidden tokens a sequence of the records has.",
        ),
        (flags.DEFINE_string, "mode", "train_and_eval", "train_and_eval, train or eval."),
        (flags.DEFINE_integer, "eval_batch_size", 8, "Sequences of a batch in evaluation."),
        (flags.DEFINE_integer, "num_train_steps", 100000, "The step to train to."),
        (
            flags.DEFINE_integer,
            "num_warmup_steps",
            10000,
            "In how many steps the learning rate grows.",
        ),
        (flags.DEFINE_integer, "steps_per_eval", 5000, "Steps from one evaluation to the next."),
        (flags.DEFINE_integer, "max_eval_steps", 100, "How many batches are evaluated."),
    ),
)

RUN_SQUAD = FlagProgram(
    name="mesh_tensorflow.bert.run_squad",
    description="Fine-tunes BERT to answer questions about texts, and answers them.",
    examples=(
        "--train_file=train.json --predict_file=dev.json \\\n"
        "      --vocab_file=vocab.txt --bert_config_file=base.json --output_dir=OUT \\\n"
        "      --do_train --do_predict",
    ),
    required=("vocab_file", "bert_config_file", "output_dir"),
    choices={"optimizer": _OPTIMIZERS},
    one_of=("do_train", "do_predict"),
    table=(
        *_MESH_FLAGS,
        *_TRAINING_FLAGS,
        *_TEXT_FLAGS,
        (flags.DEFINE_string, "train_file", None, "JSON file of questions to train on."),
        (flags.DEFINE_string, "predict_file", None, "JSON file of questions to answer."),
        (
            flags.DEFINE_integer,
            "max_seq_length",
            384,
            "Length of sequences: paragraphs are read in pieces of it.",
        ),
        (
            flags.DEFINE_integer,
            "doc_stride",
            128,
            "Tokens from one piece of a paragraph to the next.",
        ),
        (flags.DEFINE_integer, "max_query_length", 64, "How many tokens of a question are kept."),
        (flags.DEFINE_integer, "n_best_size", 20, "How many answers to a question are written."),
        (flags.DEFINE_integer, "max_answer_length", 30, "How many tokens an answer may have."),
        (
            flags.DEFINE_bool,
            "verbose_logging",
            False,
            "Whether to log answers that are not found in the text.",
        ),
        (
            flags.DEFINE_bool,
            "version_2_with_negative",
            False,
            "Whether questions may have no answer, as in SQuAD 2.0.",
        ),
        (
            flags.DEFINE_float,
            "null_score_diff_threshold",
            0.0,
            "There is no answer if that much more speaks for none than for the best.",
        ),
        *TOKENIZER_FLAGS,
    ),
)
