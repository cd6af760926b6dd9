"""Generation by Hugging Face's transformers, for generation.py. Needs torch, not TensorFlow."""

from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM


def generator(system: str, folder: str, threads: int) -> Callable[..., list[list[int]]]:
    """Returns a function of prompts and a number that continues them by so many ids."""
    torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    # No row ends early, whatever the folder says.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        ids = torch.tensor(prompts, device=device)
        with torch.no_grad():
            found = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False
            )
        return found[:, ids.shape[1] :].tolist()

    return generate
