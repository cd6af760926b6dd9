"""T5-small of Hugging Face's transformers, for t5_small.py. Needs torch, and not TensorFlow."""

from collections.abc import Callable
from typing import Any

import torch
from t5_small import BEAMS, LEARNING_RATE, SIZES, TARGETS, ids
from talking import serve
from transformers import T5Config, T5ForConditionalGeneration


def make(folder: str) -> None:
    """Writes a model with random weights to a folder."""
    torch.manual_seed(0)
    config = T5Config(decoder_start_token_id=0, dropout_rate=0.0, **SIZES)
    T5ForConditionalGeneration(config).save_pretrained(folder)


def prepare(task: str, folder: str) -> tuple[Callable[[], Any], dict[str, Any]]:
    """Returns what is timed, and the outcome that other systems must have too."""
    inputs, targets = (torch.tensor(x).long() for x in ids())
    model = T5ForConditionalGeneration.from_pretrained(folder)
    if task != "train":
        model.eval()
        beams = BEAMS if task == "beam" else 1

        def decode() -> Any:
            with torch.no_grad():
                return model.generate(
                    inputs, max_new_tokens=TARGETS, do_sample=False, num_beams=beams
                )

        return decode, {"outcome": decode()[:, 1:].tolist()}
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=inputs, labels=targets).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    losses = [step() for _ in range(3)]
    return step, {"outcome": losses[-1]}


def work(task: str, folder: str, threads: int) -> None:
    """Makes a model, or serves."""
    torch.set_num_threads(threads)
    if task == "make":
        serve(lambda: (lambda: None, {"made": make(folder)}))
    else:
        serve(lambda: prepare(task, folder))
