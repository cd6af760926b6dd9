"""Writes small T5 models of Hugging Face's transformers, and their logits, to t5_fixtures/.

    pip install ".[test-t5]"
    cd tests && python -m transformer.make_t5_fixtures

`test_convert.py` converts them and compares logits; it needs neither torch nor transformers.
`test_convert_live.py` makes further models, where these are installed.
"""

import os

import numpy as np
from helpers.transformer.t5_of_transformers import logits, random_model

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "t5_fixtures")
SIZES = {
    "vocab_size": 128,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
}
MODELS = {
    "t5": {"feed_forward_proj": "relu", "tie_word_embeddings": True},
    "t5_1_1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
INPUTS = np.array([[5, 6, 7, 8, 9, 10, 11, 1], [99, 98, 97, 1, 0, 0, 0, 0]])
TARGETS = np.array([[20, 21, 22, 23, 24, 1], [31, 32, 33, 34, 35, 1]])


def main():
    for name, kwargs in MODELS.items():
        model = random_model(0, not kwargs["tie_word_embeddings"], **SIZES, **kwargs)
        found = logits(model, INPUTS, TARGETS)
        folder = os.path.join(FOLDER, name)
        model.save_pretrained(folder)
        os.remove(os.path.join(folder, "generation_config.json"))
        np.savez_compressed(
            os.path.join(folder, "logits.npz"), inputs=INPUTS, targets=TARGETS, logits=found
        )
        print(name, found.shape, float(found.std()))


if __name__ == "__main__":
    main()
