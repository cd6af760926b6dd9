"""Weights are read in the slices that processors store; fields of config.json as they are meant."""

import contextlib
import itertools
import json
import pathlib
import resource
import shutil
import tempfile

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers import processes
from helpers.pretrained import two_processes
from safetensors.numpy import load_file, save_file

import mesh_tensorflow as mtf
from mesh_tensorflow import _progress
from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._units import bytes_text
from mesh_tensorflow.models import Config, _lora
from mesh_tensorflow.models._decoder import rotary_of
from mesh_tensorflow.models._weights import Weights, names_of, turned

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
ENCODERS = pathlib.Path(__file__).parent / "encoders"
NAMES = sorted(path.name for path in FIXTURES.iterdir())


def ranges_of(size):
    """All of a dimension, one index of it, and a range that begins and ends within it."""
    found = {(0, size), (size // 2, size // 2 + 1), (size // 3, max(1, size - 1))}
    return [slice(*ends) for ends in sorted(found)]


@pytest.mark.parametrize("name", NAMES)
def test_parts_are_those_of_the_whole(name):
    """Of axes that are turned, joined, in one tensor with others, or in one for each expert."""
    weights = mtf.models.from_pretrained(FIXTURES / name).weights
    stored = load_file(FIXTURES / name / "model.safetensors")
    for weight in weights.form.weights:
        tensors = [stored[n] for n in names_of(weight, weights.form.sizes)]
        whole, part = turned(weight, tensors, weights.form.sizes), weights.parts(weight.ours)
        assert whole.shape == weights.shape(weight.ours)
        for index in itertools.product(*map(ranges_of, whole.shape)):
            np.testing.assert_array_equal(part(index), whole[index])


def launched(runtime, tmp_path):
    """Returns what each of two processes has written."""
    program = ["--show_all", "--runtime", runtime, two_processes.__file__, runtime]
    processes.launch(2, *program, FIXTURES / "llama", tmp_path / "out")
    return [json.loads((tmp_path / f"out.{i}").read_text()) for i in range(2)]


@pytest.mark.slow
def test_two_processes_of_jax(tmp_path):
    """Both have the values of one device."""
    ids = np.arange(4 * 24).reshape(4, 24).astype(np.int32) % 90
    model = mtf.models.from_pretrained(FIXTURES / "llama")
    alone = mtf.train.fit(
        model.loss, ids, steps=2, dims="batch:4,length:24", progress=False, seed=0,
        optimizer=mtf.optimize.SgdOptimizer(0.1), init_checkpoint=model.weights,
    )  # fmt: skip
    for found in launched("pjrt", tmp_path):
        np.testing.assert_allclose(found["logits"], model.logits(ids).numpy(), atol=1e-3)
        assert found["ids"] == model.generate([[5, 9, 0], [7]], 8)
        np.testing.assert_allclose(found["log_probs"], model.log_probs([[5, 9, 0]]), atol=1e-4)
        np.testing.assert_allclose(found["losses"], alone.losses, rtol=1e-5)


@pytest.mark.slow
def test_two_processes(tmp_path):
    """With ZeRO 3, each reads its slices; the numbers are those of one device."""
    model, alone = two_processes.train(FIXTURES / "llama")
    numbers = sum(value.size for value in model.weights.values())
    model.assign(alone.variables)
    for found in launched("tensorflow", tmp_path):
        np.testing.assert_allclose(found["losses"], alone.losses, rtol=1e-5)
        for name in model.weights:
            norm = np.abs(alone.variables[name]).sum()
            np.testing.assert_allclose(found["norms"][name], norm, rtol=1e-4)
        # Weights that the processors do not divide are read by one of them.
        assert numbers / 4 < found["read"] < numbers * 3 / 4
        assert found["ids"] == model.generate([[5, 9, 0]], 8)


JAX = {"mesh_shape": "x:2,y:2", "mesh_impl": "pjrt"}
ON_JAX = {
    "tensor": {**JAX, "layout": "batch:x,vocab:y,d_ff:y,heads:y"},
    "fully_sharded": {**JAX, "layout": "batch:x", "zero": 3, "zero_axis": "x+y"},
}


@pytest.mark.slow
@pytest.mark.parametrize("place", ON_JAX)
def test_devices_of_jax(place, eight_devices):
    """All calls, with the numbers of one device."""
    wanted = np.load(FIXTURES / "llama" / "expected.npz")
    model = mtf.models.from_pretrained(FIXTURES / "llama", **ON_JAX[place])
    logits = model.logits(wanted["ids"])
    tolerance = 1e-4 * np.abs(wanted["logits"]).max()
    np.testing.assert_allclose(logits.numpy(), wanted["logits"], rtol=0, atol=tolerance)
    alone = mtf.models.from_pretrained(FIXTURES / "llama")
    prompts = [[5, 9, 0, 33], [7], [1, 80, 81]]
    drawn = {"temperature": 0.8, "top_p": 0.9, "seed": 3}
    penalty = {"repetition_penalty": 1.3}
    for arguments in ({}, drawn, {"num_beams": 2}, penalty, {"num_beams": 3, **penalty}):
        found = model.generate(prompts, 8, **arguments)
        assert found == alone.generate(prompts, 8, **arguments), arguments
    for found, expected in zip(model.log_probs(prompts), alone.log_probs(prompts)):
        np.testing.assert_allclose(found, expected, atol=1e-4)
    model.assign({name: 2 * value for name, value in model.weights.items()})
    assert np.abs(model.logits(wanted["ids"]).numpy() - logits.numpy()).max() > 0.1


USES = {
    "simd": {"mesh_shape": "x:4", "layout": "d_ff:x,vocab:x", "simd": True},
    "2x2": {"mesh_shape": "x:2,y:2", "layout": "batch:x,vocab:y,d_ff:y,heads:y"},
    "zero": {"mesh_shape": "x:4", "layout": "batch:x?", "zero": 3, "simd": True},
    "one": {},
    "pjrt": ON_JAX["tensor"],
}


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("place", USES)
def test_uses_read_slices(place, eight_devices_for_pjrt, monkeypatch):
    """Evaluations and predictions do, and write no file."""

    def loss(mesh, ids):
        return model.loss(mesh, ids, training=False)

    def logits(mesh, ids):
        return model.model.call_simple(
            ids, None, compute_loss=False, mode="eval", variable_dtype=mtf.VariableDType(tf.float32)
        )[0]

    def no_file(*_, **__):
        raise AssertionError("a file is written")

    read, parts = [], Weights.parts

    def counted(self, name):
        part = parts(self, name)

        def noted(index):
            found = part(index)
            read.append(found.size)
            return found

        return noted

    model = mtf.models.from_pretrained(FIXTURES / "llama")
    expected = np.load(FIXTURES / "llama" / "expected.npz")
    ids = np.tile(expected["ids"], [3, 1])[:5].astype(np.int32)  # of which the last row is left
    monkeypatch.setattr(tempfile, "TemporaryDirectory", no_file)
    monkeypatch.setattr(checkpoint_files, "write_parts", no_file)
    monkeypatch.setattr(Weights, "parts", counted)
    monkeypatch.setattr(Weights, "__getitem__", no_file)  # the whole of a weight
    dims = f"batch:4,length:{ids.shape[1]}"
    given = {"directory": model.weights, "dims": dims, **USES[place]}
    largest = max(np.prod(model.weights.shape(name)) for name in model.weights)
    found = mtf.train.predict(logits, ids, **given)
    wanted = np.tile(expected["logits"], [3, 1, 1])[:5]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())
    # Elsewhere, masters have whole values.
    assert max(read) <= (largest / 2 if place in ("simd", "zero") else largest)
    found = mtf.train.evaluate(loss, ids, **given)
    rows, targets = wanted[:, :-1].astype(np.float64), ids[:, 1:, None]
    losses = np.log(np.exp(rows).sum(-1)) - np.take_along_axis(rows, targets, -1)[..., 0]
    assert found["loss"] == pytest.approx(losses.mean(), rel=1e-5)


@pytest.mark.slow
def test_adapters_are_trained_on_devices_of_jax(eight_devices):
    pairs = [{"ids": [10, 12, 14, 16, 18], "weights": [0, 0, 1, 1, 1]}] * 8
    losses = []
    for place in ({}, ON_JAX["tensor"]):
        model = mtf.models.from_pretrained(FIXTURES / "llama", **place)
        arguments = {"length": 8, "lora": "all:4", "progress": False, "seed": 0, "shuffle": False}
        losses.append(mtf.models.finetune(model, pairs, 3, **arguments).losses)
    np.testing.assert_allclose(*losses, rtol=1e-4)


def test_what_devices_of_jax_cannot(eight_devices, monkeypatch):
    model = mtf.models.from_pretrained(FIXTURES / "llama", **ON_JAX["tensor"])
    with pytest.raises(ValueError, match=r"stream: mesh_impl='pjrt' .* Stop at ids, or leave"):
        model.stream([1, 2])
    with pytest.raises(ValueError, match="mesh_impl='tpu' is none of 'placement', 'simd', 'pjrt'"):
        mtf.models.from_pretrained(FIXTURES / "llama", mesh_impl="tpu")
    with pytest.raises(ValueError, match="devices are those of TensorFlow, but mesh_impl='pjrt'"):
        mtf.models.from_pretrained(FIXTURES / "llama", mesh_impl="pjrt", devices=["cpu:0"])
    monkeypatch.setenv("TF_CONFIG", json.dumps(TWO))
    with pytest.raises(ValueError, match=r"there are 2 processes, .* set MTF_RUNTIME=pjrt in each"):
        mtf.models.from_pretrained(FIXTURES / "llama", mesh_impl="pjrt")


def test_devices_of_other_processes():
    for devices in (["/job:worker/task:1/device:CPU:0"], ["cpu:0", "/job:worker/task:0/cpu:0"]):
        with pytest.raises(ValueError, match=r"devices has '/job:worker/task.* --runtime pjrt"):
            mtf.models.from_pretrained(
                FIXTURES / "llama", mesh_shape=f"x:{len(devices)}", devices=devices
            )
    own = ["/job:localhost/task:0/device:CPU:0"] * 2
    ids = np.array([[5, 9]])
    model = mtf.models.from_pretrained(
        FIXTURES / "llama", mesh_shape="x:2", layout="vocab:x", devices=own
    )
    alone = mtf.models.from_pretrained(FIXTURES / "llama")
    np.testing.assert_allclose(model.logits(ids), alone.logits(ids), atol=1e-4)


TWO = {
    "cluster": {"worker": ["localhost:1", "localhost:2"]},
    "task": {"type": "worker", "index": 0},
}


def test_an_encoder_on_devices_of_jax(eight_devices):
    wanted = np.load(ENCODERS / "bert" / "expected.npz")
    model = mtf.models.from_pretrained(
        ENCODERS / "bert", **{**JAX, "layout": "batch:x,vocab:y,intermediate:y,num_heads:y"}
    )
    found = model.encode(wanted["ids"], wanted["mask"], wanted["types"]).numpy()
    tokens = wanted["mask"].astype(bool)
    np.testing.assert_allclose(found[tokens], wanted["hidden"][tokens], atol=1e-3)


def a_copy(tmp_path, **fields):
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / "llama", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return folder


def in_shards(folder):
    """Writes the tensors to two files, with an index."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    names = sorted(tensors)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for shard, own in shards.items():
        save_file({name: tensors[name] for name in own}, folder / shard)
    file.unlink()
    weight_map = {name: shard for shard, own in shards.items() for name in own}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return index, weight_map


def a_missing_shard(folder):
    in_shards(folder)
    (folder / "two.safetensors").unlink()


def a_tensor_in_the_other_shard(folder):
    index, weight_map = in_shards(folder)
    weight_map["model.norm.weight"] = "one.safetensors"
    weight_map["model.embed_tokens.weight"] = "two.safetensors"
    index.write_text(json.dumps({"weight_map": weight_map}))


def a_file_outside(name):
    def make(folder):
        index, weight_map = in_shards(folder)
        weight_map["model.norm.weight"] = name
        index.write_text(json.dumps({"weight_map": weight_map}))

    return make


def an_index_without_a_map(folder):
    index, _ = in_shards(folder)
    index.write_text(json.dumps({"weight_map": []}))


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def a_header_of(size):
    def make(folder):
        file = folder / "model.safetensors"
        file.write_bytes(size.to_bytes(8, "little") + file.read_bytes()[8:])

    return make


def of_pytorch(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def of_another_shape(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = np.ones([25], np.float32)
    save_file(tensors, folder / "model.safetensors")


def of_integers(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = np.ones([24], np.int32)
    save_file(tensors, folder / "model.safetensors")


def no_json(folder):
    (folder / "config.json").write_text("{")


def another_copy(dtype=np.float32, rows=96):
    def make(folder):
        tensors = load_file(folder / "model.safetensors")
        table = 2 * tensors["model.embed_tokens.weight"][:rows]
        save_file({**tensors, "lm_head.weight": table.astype(dtype)}, folder / "model.safetensors")

    return make


def no_config(folder):
    (folder / "config.json").unlink()


def not_fetched(name):
    def make(folder):
        (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")

    return make


def a_link_to_nothing(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../../blobs/0123")


# What is done to a folder: the text of the error.
BAD_FOLDERS = {
    "missing_shard": (a_missing_shard, r"two\.safetensors: there is no such file, but the model's"),
    "wrong_shard": (a_tensor_in_the_other_shard, r"safetensors has no model\..*which the model's"),
    "outside": (a_file_outside("../two.safetensors"), "'../two.safetensors' for model.norm.weight"),
    "absolute": (a_file_outside("/etc/passwd"), "'/etc/passwd' for model.norm.weight, no file n"),
    "no_map": (an_index_without_a_map, "it has no weight_map of names to files"),
    "cut": (cut, "model.safetensors is no whole safetensors file"),
    "large_header": (a_header_of(2**62), "model.safetensors is no whole safetensors file"),
    "short_header": (a_header_of(3), "model.safetensors is no whole safetensors file"),
    "pytorch": (of_pytorch, r"pytorch_model\.bin, a pickle .* python -c .import transformers"),
    "shape": (of_another_shape, r"model\.norm\.weight has shape \[25\] instead of \[d_model=24\]"),
    "integers": (of_integers, r"model\.norm\.weight is of dtype I32, but weights are of F64"),
    "json": (no_json, "config.json is damaged, it is no JSON"),
    "not_fetched": (not_fetched("model.safetensors"), "model.safetensors is not the file .*lfs pu"),
    "config_not_fetched": (
        not_fetched("config.json"),
        "config.json is not the file .*git lfs pull",
    ),
    "tokenizer_not_fetched": (not_fetched("tokenizer.json"), "tokenizer.json is not .*git lfs pul"),
    "link": (a_link_to_nothing, r"is a link to '\.\./\.\./blobs/0123', where there is no file"),
    "no_config": (no_config, "there is no config.json in .*model', or nothing in it"),
    "copy": (
        another_copy(),
        r"lm_head\.weight is not the same as model\.embed_tokens\.weight\. Set t",
    ),
    "short_copy": (
        another_copy(rows=5),
        "by config.json logits are those of the embedding, but lm_h",
    ),
    "copy_of_dtype": (
        another_copy(np.float16),
        "lm_head.weight is not the same as model.embed_tok",
    ),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_a_folder_that_is_damaged(name, tmp_path):
    folder = a_copy(tmp_path)
    spoil, text = BAD_FOLDERS[name]
    spoil(folder)
    with pytest.raises(ValueError, match=text):
        mtf.models.from_pretrained(folder)


def test_an_embedding_that_is_there_twice(tmp_path):
    folder = a_copy(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][0, 0] = np.nan  # not equal to itself
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, folder / "model.safetensors")
    assert "transformer/logits/kernel" not in mtf.models.from_pretrained(folder).weights


def test_a_folder_that_is_not_there():
    with pytest.raises(ValueError, match=r"there is no folder 'nowhere'\. Models are read from"):
        mtf.models.from_pretrained("nowhere")


def test_shards_are_read(tmp_path):
    folder = a_copy(tmp_path)
    in_shards(folder)
    model, whole = (mtf.models.from_pretrained(f) for f in (folder, FIXTURES / "llama"))
    assert all(np.array_equal(model.weights[n], whole.weights[n]) for n in whole.weights)


@pytest.mark.parametrize(
    "name, prefix",
    [
        ("llama", "model."),
        ("gemma2", "model."),
        ("gpt2", "transformer."),
        ("gpt_neox_serial", "gpt_neox."),
        ("opt_350m", "model."),
    ],
)
def test_a_folder_of_a_model_without_logits(name, prefix, tmp_path):
    """Its names are shorter; those of adapters are of the whole model, as PEFT has them."""
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / name, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({n.removeprefix(prefix): x for n, x in tensors.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    model, whole = (mtf.models.from_pretrained(f) for f in (folder, FIXTURES / name))
    assert all(np.array_equal(model.weights[n], whole.weights[n]) for n in whole.weights)
    model.save_pretrained(tmp_path / "same")
    before, same = (f / "model.safetensors" for f in (folder, tmp_path / "same"))
    assert before.read_bytes() == same.read_bytes()
    mtf.models.finetune(
        model, [{"ids": [1, 2, 3]}], 1, lora="o,wo:2", length=4, batch_size=1, learning_rate=0.1,
        save_adapters=tmp_path / "adapters", progress=False,
    )  # fmt: skip
    adapters = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert all(n.startswith(f"base_model.model.{prefix}") for n in adapters)
    whole.merge(tmp_path / "adapters")
    other = mtf.models.from_pretrained(folder)
    other.merge(tmp_path / "adapters")
    for n, value in model.weights.items():
        np.testing.assert_array_equal(whole.weights[n], value)
        np.testing.assert_array_equal(other.weights[n], value)


def test_only_a_model_with_tied_logits_may_lack_them(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / "mistral", folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(
        {n.removeprefix("model."): x for n, x in tensors.items()}, folder / "model.safetensors"
    )
    with pytest.raises(ValueError, match=r"config.json describes. missing: lm_head.weight$"):
        mtf.models.from_pretrained(folder)


@contextlib.contextmanager
def no_room_for(size):
    """Context in which a file that becomes larger than this is an error of the system."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_fails_half_way_leaves_folders_as_they_were(tmp_path):
    model = mtf.models.from_pretrained(FIXTURES / "llama")
    options = {"lora": "q:2", "length": 4, "batch_size": 1, "progress": False}
    mtf.models.finetune(
        model, [{"ids": [1, 2, 3]}], 1, save_adapters=tmp_path / "adapters", **options
    )
    before = contents(tmp_path / "adapters")
    lora, values = _lora.read(model._form, tmp_path / "adapters")
    with no_room_for(1000), pytest.raises(Exception, match="too large"):
        lora.save(model._form, {n: 2 * x for n, x in values.items()}, tmp_path / "adapters")
    assert contents(tmp_path / "adapters") == before
    with no_room_for(1000), pytest.raises(Exception, match="too large"):
        model.save_pretrained(tmp_path / "model")
    assert contents(tmp_path / "model") == {}
    model.save_pretrained(tmp_path / "model")  # nothing is in its way
    assert set(contents(tmp_path / "model")) == {"config.json", "model.safetensors"}


def test_a_model_in_shards_is_not_written_over(tmp_path):
    folder = a_copy(tmp_path)
    in_shards(folder)
    before = contents(folder)
    with pytest.raises(ValueError, match=r"index.json exists already; choose another directory"):
        mtf.models.from_pretrained(folder).save_pretrained(folder)
    assert contents(folder) == before


def test_progress(monkeypatch, capsys):
    """It is shown once reading takes a while, and not if the user says so."""
    monkeypatch.setattr(_progress, "_SILENT_SECONDS", 0.0)
    mtf.models.from_pretrained(FIXTURES / "llama").logits([[1]])
    lines = capsys.readouterr().err
    size = sum(
        value.nbytes for value in load_file(FIXTURES / "llama" / "model.safetensors").values()
    )
    # The first line comes before the first weight is read, and says nothing of the time left.
    assert f"read weights: 0 B/{bytes_text(size)}\n" in lines
    mtf.models.from_pretrained(FIXTURES / "llama", progress=False).logits([[1]])
    assert "read weights" not in capsys.readouterr().err


# -- fields of config.json

NOTHING = {  # what says nothing of a computation, as files have it
    "architectures": ["SomeForCausalLM"], "transformers_version": "4.41.0", "torch_dtype": "bfloat16",
    "use_cache": True, "initializer_range": 0.02, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": [2, 3], "pad_token_id": 0, "id2label": {"0": "LABEL_0"}, "_name_or_path": "there",
    "task_specific_params": {"text-generation": {"do_sample": True}}, "output_past": True,
    "gradient_checkpointing": False, "is_encoder_decoder": False, "unsloth_version": "2024.9",
    "transformers.js_config": {"kv_cache_dtype": "float16"},
}  # fmt: skip
USUAL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 128, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
GPT = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 96, "n_inner": None,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_ctx": 128, "summary_type": "mean",
    "attn_pdrop": 0.1, "scale_attn_weights": True,
}  # fmt: skip
BERT = {
    **{n: USUAL[n] for n in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")},
    "num_attention_heads": 4, "max_position_embeddings": 128, "type_vocab_size": 2,
    "hidden_act": "gelu", "layer_norm_eps": 1e-12, "hidden_dropout_prob": 0.1, "classifier_dropout": None,
    "position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False,
}  # fmt: skip
LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
    "original_max_position_embeddings": 64,
}  # fmt: skip
QWEN = {
    "rope_theta": 1e6,
    "sliding_window": 64,
    "max_window_layers": 2,
    "use_sliding_window": False,
}
OF_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001, "output_router_logits": False, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
OF_GEMMA = {
    **USUAL, "head_dim": 8, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False, "tie_word_embeddings": True, "cache_implementation": "hybrid",
    "query_pre_attn_scalar": 8, "sliding_window": 16,
}  # fmt: skip
# As releases 4 and 5 of transformers, and those who trained the models, write them.
REAL = {
    "llama_2": {"model_type": "llama", **USUAL, "pretraining_tp": 1, "rope_scaling": None},
    "llama_3": {
        "model_type": "llama", **USUAL, "attention_bias": False, "mlp_bias": False,
        "rope_theta": 5e5, "rope_scaling": LLAMA3,
    },
    "smollm": {"model_type": "llama", **USUAL, "is_llama_config": True, "rope_interleaved": False},
    "mistral": {"model_type": "mistral", **USUAL, "rope_theta": 1e6, "sliding_window": None, "head_dim": 8},
    "mixtral": {
        "model_type": "mixtral", **USUAL, "num_local_experts": 4, "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.02, "router_jitter_noise": 0.0, "sliding_window": None,
        "output_router_logits": False, "rope_theta": 1e6,
    },
    "qwen2": {"model_type": "qwen2", **USUAL, **QWEN},
    "qwen2_5": {"model_type": "qwen2", **USUAL, **QWEN, "layer_types": ["full_attention"] * 4},
    "qwen3": {"model_type": "qwen3", **USUAL, **QWEN, "head_dim": 8, "attention_bias": False},
    "qwen2_moe": {
        "model_type": "qwen2_moe", **USUAL, **QWEN, **OF_EXPERTS, "qkv_bias": True,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", **USUAL, **QWEN, **OF_EXPERTS, "head_dim": 8},
    "gemma": {
        "model_type": "gemma", **{n: x for n, x in OF_GEMMA.items() if n not in ("query_pre_attn_scalar", "sliding_window")},
        "hidden_act": "gelu", "hidden_activation": None,
    },
    "gemma2": {
        "model_type": "gemma2", **OF_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "gemma3": {
        "model_type": "gemma3_text", **OF_GEMMA, "rope_local_base_freq": 1e4, "rope_theta": 1e6,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window_pattern": 6,
        "use_bidirectional_attention": False,
    },
    "phi3": {
        "model_type": "phi3", **USUAL, "auto_map": {"AutoConfig": "there"}, "embd_pdrop": 0.0,
        "resid_pdrop": 0.0, "original_max_position_embeddings": 64, "attention_bias": False,
        "sliding_window": 64, "rope_theta": 1e4, "rope_scaling": {
            "type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
        },
    },
    "phi4_mini": {
        "model_type": "phi3", **USUAL, "partial_rotary_factor": 0.75, "full_attn_mod": 1,
        "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
    },
    "olmo2": {"model_type": "olmo2", **USUAL, "attention_bias": False, "rope_theta": 5e5},
    "gpt2": {"model_type": "gpt2", **GPT, "reorder_and_upcast_attn": False},
    "gptj": {"model_type": "gptj", **GPT, "rotary": True, "rotary_dim": 4, "tie_word_embeddings": False},
    "gpt_neo": {
        "model_type": "gpt_neo", "hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 96,
        "attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"],
        "max_position_embeddings": 128, "window_size": 16, "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5, "intermediate_size": None, "resid_dropout": 0, "embed_dropout": 0,
    },
    "pythia": {
        "model_type": "gpt_neox", **{n: x for n, x in BERT.items() if n in USUAL}, "rotary_pct": 0.25,
        "rotary_emb_base": 10000, "use_parallel_residual": True, "layer_norm_eps": 1e-5,
    },
    "opt": {
        "model_type": "opt", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "ffn_dim": 64, "word_embed_proj_dim": 32, "vocab_size": 96, "max_position_embeddings": 128,
        "do_layer_norm_before": True, "_remove_final_layer_norm": False, "activation_function": "relu",
        "layerdrop": 0.0, "init_std": 0.02, "prefix": "</s>",
    },
    "opt_350m": {
        "model_type": "opt", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "ffn_dim": 64, "word_embed_proj_dim": 16, "vocab_size": 96, "max_position_embeddings": 128,
        "do_layer_norm_before": False, "_remove_final_layer_norm": False, "activation_function": "relu",
    },
    "bert": {"model_type": "bert", **BERT, "directionality": "bidi", "pooler_type": "first_token_transform"},
    "roberta": {"model_type": "roberta", **BERT, "type_vocab_size": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_fields_of_a_config(name):
    """What changes nothing is read over; what is not known, or known with one value, is named."""
    config = {**NOTHING, **REAL[name]}
    kind = config["model_type"]
    with mtf.strict():
        model = mtf.models.from_config(config)
    for field, value in NOTHING.items():
        assert model.config[field] == config[field] == (REAL[name].get(field, value))
    for field, value in [("residual_multiplier", 0.22), ("use_norms", False), ("logit_scale", 16)]:
        text = (
            rf"config.json has {field}={value}, which the family '{kind}' does not know and ignores"
        )
        with pytest.warns(mtf.MeshTensorFlowWarning, match=text):
            mtf.models.from_config({**config, field: value})
        with mtf.strict(), pytest.raises(ValueError, match=text):
            mtf.models.from_config({**config, field: value})
        with mtf.strict():
            mtf.models.from_config({**config, field: None})  # as if it was not there
    with pytest.raises(ValueError, match=r"add_cross_attention=True, .* only .*=False is"):
        mtf.models.from_config({**config, "add_cross_attention": True})
    every = {**config, "residual_multiplier": 0.22, "logit_scale": 16}
    with pytest.warns(
        mtf.MeshTensorFlowWarning, match=r"has residual_multiplier=0\.22, logit_scale=16, which the"
    ):
        mtf.models.from_config(every)


@pytest.mark.parametrize(
    "older, newer",
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, {"rope_theta": 5e5, **LLAMA3}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        ),
        ({"partial_rotary_factor": 0.5}, {"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        # What was added to a folder of release 5 for longer texts.
        (
            {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 3e5, "rope_scaling": LLAMA3},
            {"rope_theta": 3e5, **LLAMA3},
        ),
        (
            {
                "rope_parameters": {"rope_theta": 5e5},
                "rope_scaling": {"type": "linear", "factor": 2},
            },
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        ),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {}}, {"rope_theta": 5e5}),
    ],
)
def test_fields_of_rotary_positions(older, newer):
    """Releases 4 and 5 of transformers say the same."""
    config = {"model_type": "phi3", **USUAL}
    ids, found = [[5, 9, 17, 3, 80]], []
    for fields in (older, {"rope_parameters": newer}):
        model = mtf.models.from_config({**config, **fields})
        rng = np.random.RandomState(0)
        sizes = model._form.sizes
        model.assign({
            w.ours: rng.normal(size=[sizes[d] for d in w.dims.split()]).astype("f") for w in model._form.weights
        })  # fmt: skip
        found.append(model.logits(ids).numpy())
    np.testing.assert_array_equal(*found)
    plain = mtf.models.from_config(config)
    plain.assign(model.weights)
    assert np.abs(plain.logits(ids) - found[0]).max() > 1e-3


@pytest.mark.parametrize(
    "name, fields, text",
    [
        ("llama_2", {"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5', no positive number"),
        ("llama_2", {"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes', neither true nor"),
        ("llama_2", {"rope_interleaved": True}, "rope_interleaved=True, .* only .*=False is"),
        ("qwen3", {"layer_types": ["linear_attention"] * 4}, "each 'sliding_attention' or 'full_"),
        ("gemma2", {"attn_logit_softcapping": -1}, "attn_logit_softcapping=-1, no positive number"),
        ("gemma", {"hidden_act": "tanh"}, "the activation 'tanh', which is none of"),
        ("opt", {"layer_norm_elementwise_affine": False}, "wise_affine=False, .* only .*=True is"),
        (
            "opt",
            {"word_embed_proj_dim": 16, "tie_word_embeddings": False},
            "tie_word_embeddings=False, .* only .*=True is",
        ),
        ("bert", {"layer_norm_eps": 0}, "layer_norm_eps=0, no positive number"),
        ("mixtral", {"quantization_config": {"bits": 4}}, "quantization_config=.* only .*=None"),
        ("mixtral", {"router_aux_loss_coef": float("nan")}, "coef=nan, no number of 0 or more"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok=5, of num_local_experts=4$"),
        ("qwen3_moe", {"num_experts_per_tok": 10**9}, "num_experts_per_tok=10+, of num_experts=4$"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0, .* only"),
        ("mixtral", {"num_local_experts": 10**9}, "num_local_experts=10+, and no model has more"),
        ("llama_2", {"num_hidden_layers": 10**9}, "num_hidden_layers=10+, and no model has more"),
        ("llama_2", {"hidden_act": []}, r"the activation \[\], which is none of"),
        ("llama_2", {"model_type": []}, r"model_type=\[\], which is none of"),
        ("llama_2", {"rope_theta": 0}, "base=0 must be a number larger than 1$"),
        ("llama_2", {"rope_theta": float("nan")}, "base=nan must be a number larger than 1$"),
        ("llama_2", {"rope_scaling": 2.0}, "rotary positions. rope_scaling=2.0 is no object, such"),
        ("phi3", {"partial_rotary_factor": "1"}, "fraction='1' must be a number above 0 and at"),
    ],
)
def test_values_of_fields_that_are_refused(name, fields, text):
    with pytest.raises(ValueError, match=f"from_config: config.json has .*{text}"):
        mtf.models.from_config({**REAL[name], **fields})


def test_rotary_positions_of_each_type_of_layers():
    """Gemma 3's layers that see all positions have the scaling, those with a window do not."""
    of = {"sliding_attention": {"rope_theta": 10.0}, "full_attention": {"rope_theta": 1e3}}
    further = {"rope_parameters": of, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    read = Config("folder", {"max_position_embeddings": 64, **further})
    assert rotary_of(read, 8, window=4).scaling_type is None
    whole = rotary_of(read, 8)
    assert (whole.base, whole.scaling_type, whole.scaling) == (1e3, "linear", {"factor": 8.0})


def test_what_a_scaling_says_besides_its_numbers():
    """Of YaRN: that the model was trained with it; and what follows from the two lengths."""
    yarn = {"type": "yarn", "original_max_position_embeddings": 16}
    for further in ({"factor": 4.0, "finetuned": True}, {}, {"factor": None}):
        fields = {"max_position_embeddings": 64, "rope_scaling": {**yarn, **further}}
        found = rotary_of(Config("folder", fields), 8)
        assert found.scaling_type == "yarn"
        assert found.scaling == {"factor": 4.0, "original_max_position_embeddings": 16}


def test_missing_fields():
    """They mean what they mean in transformers."""

    def built(name, *missing):
        config = {n: x for n, x in REAL[name].items() if n not in missing}
        return mtf.models.from_config(config).model

    def attention(model):
        return model.layer_stack._layers[0]

    assert attention(built("mistral")).__class__.__name__ == "SelfAttention"
    assert attention(built("mistral", "sliding_window")).radius == 4096
    assert attention(built("mixtral", "rope_theta")).rotary.base == 1e6
    assert built("gemma2", "final_logit_softcapping").logits_soft_cap == 30.0
