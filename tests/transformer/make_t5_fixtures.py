"""Writes small T5 models of Hugging Face's transformers, and their logits, to t5_fixtures/.

    pip install torch transformers
    python make_t5_fixtures.py

`test_convert.py` converts them and compares logits; it needs neither of the packages.
"""

import os

import numpy as np
import torch
from transformers import T5Config, T5ForConditionalGeneration

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "t5_fixtures")
SIZES = {"vocab_size": 128, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2,
         "num_decoder_layers": 3, "num_heads": 2, "relative_attention_num_buckets": 8}
MODELS = {
    "t5": {"feed_forward_proj": "relu", "tie_word_embeddings": True},
    "t5_1_1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
INPUTS = np.array([[5, 6, 7, 8, 9, 10, 11, 1], [99, 98, 97, 1, 0, 0, 0, 0]])
TARGETS = np.array([[20, 21, 22, 23, 24, 1], [31, 32, 33, 34, 35, 1]])


def main():
    for name, kwargs in MODELS.items():
        torch.manual_seed(0)
        model = T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **SIZES, **kwargs))
        model.eval()
        if not kwargs["tie_word_embeddings"]:
            # Of its own: transformers 5 ties it to the embedding whatever the configuration says.
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
            inputs = torch.tensor(INPUTS)
            logits = model(
                input_ids=inputs, attention_mask=(inputs != 0).long(),
                labels=torch.tensor(TARGETS)).logits
        folder = os.path.join(FOLDER, name)
        model.save_pretrained(folder)
        os.remove(os.path.join(folder, "generation_config.json"))
        np.savez_compressed(
            os.path.join(folder, "logits.npz"), inputs=INPUTS, targets=TARGETS,
            logits=logits.numpy())
        print(name, logits.shape, float(logits.std()))


if __name__ == "__main__":
    main()
