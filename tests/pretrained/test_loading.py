"""Weights are read in the slices that processors store, and no more of them at once."""

import itertools
import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
from helpers.paths import environment
from helpers.pretrained import two_processes
from safetensors.numpy import load_file, save_file

import mesh_tensorflow as mtf
from mesh_tensorflow import _progress
from mesh_tensorflow.models._weights import names_of, turned

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
    command = [sys.executable, "-m", "mesh_tensorflow.launch", "--processes", "2", "--show_all"]
    command += ["--runtime", runtime, two_processes.__file__, runtime]
    done = subprocess.run(
        [*command, str(FIXTURES / "llama"), str(tmp_path / "out")],
        env=environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
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
    for arguments in ({}, drawn, {"num_beams": 2}, {"repetition_penalty": 1.3}):
        found = model.generate(prompts, 8, **arguments)
        assert found == alone.generate(prompts, 8, **arguments), arguments
    for found, expected in zip(model.log_probs(prompts), alone.log_probs(prompts)):
        np.testing.assert_allclose(found, expected, atol=1e-4)
    model.assign({name: 2 * value for name, value in model.weights.items()})
    assert np.abs(model.logits(wanted["ids"]).numpy() - logits.numpy()).max() > 0.1


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
    with pytest.raises(ValueError, match=r"mesh_impl='simd' is none of 'placement', 'pjrt'\. Tr"):
        mtf.models.from_pretrained(FIXTURES / "llama", mesh_impl="simd")
    with pytest.raises(ValueError, match="devices are those of TensorFlow, but mesh_impl='pjrt'"):
        mtf.models.from_pretrained(FIXTURES / "llama", mesh_impl="pjrt", devices=["cpu:0"])
    monkeypatch.setenv("TF_CONFIG", json.dumps(TWO))
    with pytest.raises(ValueError, match=r"there are 2 processes, .* set MTF_RUNTIME=pjrt in each"):
        mtf.models.from_pretrained(FIXTURES / "llama", mesh_impl="pjrt")


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
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_a_folder_that_is_damaged(name, tmp_path):
    folder = a_copy(tmp_path)
    spoil, text = BAD_FOLDERS[name]
    spoil(folder)
    with pytest.raises(ValueError, match=text):
        mtf.models.from_pretrained(folder)


def test_a_folder_that_is_not_there():
    with pytest.raises(ValueError, match=r"there is no folder 'nowhere'\. Models are read from"):
        mtf.models.from_pretrained("nowhere")


def test_shards_are_read(tmp_path):
    folder = a_copy(tmp_path)
    in_shards(folder)
    model, whole = (mtf.models.from_pretrained(f) for f in (folder, FIXTURES / "llama"))
    assert all(np.array_equal(model.weights[n], whole.weights[n]) for n in whole.weights)


def test_progress(monkeypatch, capsys):
    """It is shown once reading takes a while, and not if the user says so."""
    monkeypatch.setattr(_progress, "_SILENT_SECONDS", 0.0)
    mtf.models.from_pretrained(FIXTURES / "llama").logits([[1]])
    assert "read weights: 1/20 weights" in capsys.readouterr().err
    mtf.models.from_pretrained(FIXTURES / "llama", progress=False).logits([[1]])
    assert "read weights" not in capsys.readouterr().err
