"""T5 models of Hugging Face's transformers. Needs the extra [test-t5], and not TensorFlow.

    python t5_of_transformers.py < JOB

reads a job in JSON, {"make": {FOLDER: arguments of random_model}, "read": [FOLDER...], "inputs": ids,
"targets": ids, "length": how many ids to decode}, writes the models that it makes to their folders,
and to each of the folders `outcome.npz`: the logits of its model, and what it decodes.

Tests run it in a process of its own: torch and TensorFlow do not always get on in one.
"""

import json
import os
import sys

import numpy as np
import torch
from transformers import T5Config, T5ForConditionalGeneration


def random_model(seed, own_softmax, **config):
    """Returns a model with random weights.

    Args:
      seed: an integer.
      own_softmax: a boolean, whether it has weights for the softmax: transformers 5 ties them to
        the embedding whatever the configuration says.
      **config: arguments of T5Config.
    """
    torch.manual_seed(seed)
    model = T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **config))
    model.eval()
    if own_softmax:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def logits(model, inputs, targets):
    """Returns its logits, an array [batch, length, vocab]; inputs are 0 at padding."""
    inputs = torch.tensor(inputs)
    with torch.no_grad():
        found = model(
            input_ids=inputs, attention_mask=(inputs != 0).long(), labels=torch.tensor(targets)
        )
    return found.logits.numpy()


def decoded(model, inputs, length):
    """Returns what greedy decoding gives, an array [batch, length], 0 after EOS."""
    inputs = torch.tensor(inputs)
    with torch.no_grad():
        found = model.generate(
            inputs,
            attention_mask=(inputs != 0).long(),
            max_new_tokens=length,
            do_sample=False,
            num_beams=1,
        )
    found = found[:, 1:].numpy()
    return np.pad(found, [[0, 0], [0, length - found.shape[1]]])


def main():
    job = json.load(sys.stdin)
    models = {}
    for folder, arguments in job["make"].items():
        models[folder] = random_model(**arguments)
        models[folder].save_pretrained(folder)
    for folder in job["read"]:
        models[folder] = T5ForConditionalGeneration.from_pretrained(folder)
        models[folder].eval()
    for folder, model in models.items():
        np.savez(
            os.path.join(folder, "outcome.npz"),
            logits=logits(model, job["inputs"], job["targets"]),
            decoded=decoded(model, job["inputs"], job["length"]),
        )


if __name__ == "__main__":
    main()
