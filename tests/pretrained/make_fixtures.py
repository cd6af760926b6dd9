"""Writes small random models of Hugging Face's transformers, and what they compute, to fixtures/.

    pip install torch transformers
    python tests/pretrained/make_fixtures.py

`test_pretrained.py` compares with them; it needs neither torch nor transformers.
"""

import os
import pathlib
import sys

import numpy as np
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent / "fixtures"
SIZES = {
    "vocab_size": 96, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
MODELS = {
    "llama": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama_heads": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 4, "rope_parameters": YARN}),
    "llama_one": ("Llama", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10, "rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 5}),
    "llama_biased": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True}),
    "qwen2": ("Qwen2", {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "phi3": ("Phi3", {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}),
    "gpt2": ("GPT2", {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "gpt_neo": ("GPTNeo", {
        "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 5,
    }),
    "qwen3": ("Qwen3", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}),
}  # fmt: skip
LENGTH, NEW = 24, 32
PROMPTS = [[5, 9, 0, 33], [7], [1, 80, 81, 82, 83, 84, 85, 86, 87, 88, 89]]


def main(names):
    ids = np.random.RandomState(0).randint(0, SIZES["vocab_size"], [2, LENGTH])
    for name in names or MODELS:
        family, kwargs = MODELS[name]
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**SIZES, **kwargs)
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for p in model.parameters():
                # Larger than initial weights, for logits that tell ids apart.
                p.normal_(std=0.25) if p.ndim > 1 else p.normal_(mean=1.0, std=0.2)  # also biases
        tensor = torch.tensor(ids)
        out = model(tensor, labels=tensor)
        out.loss.backward()
        grads = {n: p.grad.numpy() for n, p in model.named_parameters()}
        with torch.no_grad():
            found = [
                model.generate(torch.tensor([p]), max_new_tokens=NEW, do_sample=False)[
                    0, len(p) :
                ].tolist()
                for p in PROMPTS
            ]
        model.save_pretrained(FOLDER / name)
        (FOLDER / name / "generation_config.json").unlink()
        padded = np.array([row + [-1] * (NEW - len(row)) for row in found])
        np.savez_compressed(
            FOLDER / name / "expected.npz", ids=ids, logits=out.logits.detach().numpy(),
            loss=out.loss.item(), generated=padded,
            **{f"gradient/{n}": g for n, g in grads.items()},
        )  # fmt: skip
        print(name, float(out.loss), [len(row) for row in found], os.listdir(FOLDER / name))


if __name__ == "__main__":
    main(sys.argv[1:])
