"""Weights are read in the slices that processors store, and no more of them at once."""

import itertools
import json
import pathlib
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import mesh_tensorflow as mtf
from mesh_tensorflow._huggingface import Folder
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
