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


@pytest.mark.slow
def test_two_processes(tmp_path):
    """With ZeRO 3, each reads its slices; the numbers are those of one device."""
    command = [sys.executable, "-m", "mesh_tensorflow.launch", "--processes", "2", "--show_all"]
    command += [two_processes.__file__, str(FIXTURES / "llama"), str(tmp_path / "out")]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    model, alone = two_processes.train(FIXTURES / "llama")
    numbers = sum(value.size for value in model.weights.values())
    model.assign(alone.variables)
    for i in range(2):
        found = json.loads((tmp_path / f"out.{i}").read_text())
        np.testing.assert_allclose(found["losses"], alone.losses, rtol=1e-5)
        for name in model.weights:
            norm = np.abs(alone.variables[name]).sum()
            np.testing.assert_allclose(found["norms"][name], norm, rtol=1e-4)
        # Weights that the processors do not divide are read by one of them.
        assert numbers / 4 < found["read"] < numbers * 3 / 4
        assert found["ids"] == model.generate([[5, 9, 0]], 8)
