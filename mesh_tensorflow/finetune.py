r"""Fine-tunes a language model of a Hugging Face folder on texts, split over a mesh.

python -m mesh_tensorflow.finetune --model=SmolLM2-135M --train_file=train.jsonl --epochs=3 \
        --lora=q,v:8 --output=tuned
python -m mesh_tensorflow.finetune --model=SmolLM2-135M --train_file=train.jsonl --steps=1000 \
        --ways=zero3:2,tensor:2 --directory=checkpoints --output=tuned
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Optional

from mesh_tensorflow import models
from mesh_tensorflow._huggingface import has_model
from mesh_tensorflow._mesh.variables.checkpoint_files import check_writable
from mesh_tensorflow._processes.processes import processes
from mesh_tensorflow._programs import run_with_parser
from mesh_tensorflow.models import _flags

__all__ = ["main"]

# The arguments of `mtf.models.finetune` and `mtf.train.fit` that are flags.
_TRAINING: _flags.Arguments = {
    "steps": (int, None, "number of steps"),
    "epochs": (float, None, "in place of it, how often all examples are seen"),
    "length": (int, 512, "ids of a row"),
    "batch_size": (int, 8, "rows of a batch"),
    "learning_rate": (float, 1e-4, "of AdamW, at its largest"),
    "schedule": (str, None, "linear or cosine: the rate falls to 0 at the last step"),
    "warmup_steps": (int, 0, "steps in which the rate rises from 0"),
    "clip_norm": (float, 1.0, "gradients above this norm are scaled down to it"),
    "microbatches": (int, 1, "parts of a batch that are computed one after another"),
    "lora": (str, None, 'low-rank adapters, such as "q,v:8", or a folder of some to go on with'),
    "save_adapters": (str, None, "a folder to write adapters to, as the package PEFT has them"),
    "freeze": (str, None, "a regular expression of names of weights that are not trained"),
    "directory": (str, None, "where checkpoints are saved, and gone on from"),
    "save_every": (int, 1000, "steps between checkpoints"),
    "eval_every": (int, None, "steps between evaluations; there is one at the end"),
    "logdir": (str, None, "where logs for TensorBoard are written"),
    "seed": (int, 0, "of the order of rows, and of adapters"),
}
# Arguments of `from_pretrained` that only trainings have a use for.
_PIPELINE: _flags.Arguments = {
    "num_stages": (int, None, "stages of a pipeline; as many as --layout splits stages over"),
    "num_microbatches": (int, None, "parts of a batch in the pipeline; as many as stages"),
    "num_repeats": (int, 1, "parts of the layers that each stage has"),
}


def _options(arguments: Optional[Sequence[str]]) -> argparse.Namespace:
    """Returns what the command line says."""
    parser = _flags.parser_of(
        "finetune",
        "Fine-tunes a language model of a Hugging Face folder or GGUF file on texts.",
    )
    parser.add_argument(
        "--train_file",
        required=True,
        help='JSONL: {"text": ...}, {"prompt": ..., "completion": ...} or {"messages": [...]}',
    )
    parser.add_argument("--eval_file", help="examples to evaluate, in the same form")
    parser.add_argument("--output", help="the folder that the model is written to")
    parser.add_argument("--exact_match", action="store_true", help="continue prompts of eval_file")
    parser.add_argument("--no_pack", action="store_true", help="each row has one example")
    parser.add_argument("--recompute", action="store_true", help="store no activations of layers")
    _flags.add_arguments(parser, {**_PIPELINE, **_TRAINING})
    options = parser.parse_args(arguments)
    if not options.output and not options.save_adapters:
        parser.error("give --output, a folder for the model, or --save_adapters")
    if (options.steps is None) == (options.epochs is None):
        parser.error("give --steps or --epochs, one of them")
    # Found before the training, not behind it.
    if options.output and has_model(options.output):
        parser.error(f"--output={options.output} has a model already; choose another folder")
    if options.output:
        check_writable(options.output, "--output")
    return options


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Runs the command.

    Args:
      arguments: the command-line arguments; `sys.argv[1:]` if None.

    Returns:
      0.
    """
    options = _options(arguments)
    training = {name: getattr(options, name) for name in _TRAINING}
    model = _flags.opened(options, **{name: getattr(options, name) for name in _PIPELINE})
    result = models.finetune(
        model,
        options.train_file,
        pack=not options.no_pack,
        eval_examples=options.eval_file,
        exact_match=options.exact_match,
        recompute=options.recompute,
        **training,
    )
    values = {name: value for name, value in result.final.items() if "per_second" not in name}
    # A percent sign, as other programs give the same number as a fraction, or without one.
    texts = {n: f"{x:.1%}" if n.endswith("exact_match") else f"{x:.4g}" for n, x in values.items()}
    print(", ".join(f"{name} {text}" for name, text in texts.items()))
    # Of several processes, all of which have the same weights, one writes them.
    if options.output and processes().is_chief:
        model.save_pretrained(options.output)
        print(f"The model is in {options.output}")
    return 0


if __name__ == "__main__":
    run_with_parser(main, "mesh_tensorflow.finetune", eager=True)
