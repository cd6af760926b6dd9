"""Weights are read in the slices that processors store, and no more of them at once."""

import itertools
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from helpers.paths import environment
from helpers.pretrained import two_processes
from safetensors.numpy import load_file

import mesh_tensorflow as mtf
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


def test_what_devices_of_jax_cannot(eight_devices, monkeypatch):
    model = mtf.models.from_pretrained(FIXTURES / "llama", **ON_JAX["tensor"])
    with pytest.raises(ValueError, match=r"stream: mesh_impl='pjrt' .* Stop at ids, or leave"):
        model.stream([1, 2])
    with pytest.raises(ValueError, match="mesh_impl='simd' is none of 'placement', 'pjrt'. Trai"):
        mtf.models.from_pretrained(FIXTURES / "llama", mesh_impl="simd")
    with pytest.raises(ValueError, match="devices are those of TensorFlow, but mesh_impl='pjrt'"):
        mtf.models.from_pretrained(FIXTURES / "llama", mesh_impl="pjrt", devices=["cpu:0"])
    monkeypatch.setenv("TF_CONFIG", json.dumps(TWO))
    with pytest.raises(ValueError, match="there are 2 processes, .* set MTF_RUNTIME=pjrt in each"):
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
