"""T5's weights to Hugging Face's transformers and from there, against that package itself."""

import importlib.util
import json
import os
import subprocess
import sys
import types

import numpy as np
import pytest
from helpers.paths import TESTS
from helpers.transformer import t5_models

from mesh_tensorflow.transformer import convert

# They are not imported here, but in a process of their own.
MISSING = [
    n for n in ("safetensors", "torch", "transformers") if importlib.util.find_spec(n) is None
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; pip install '.[test-t5]'"
    ),
]


ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
    "HF_HUB_OFFLINE": "1",
}
# Heads that do not fill the model, a vocabulary that is padded here, more encoder than decoder.
SIZES = {
    "vocab_size": 100,
    "d_model": 24,
    "d_kv": 6,
    "d_ff": 40,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 3,
}
GATED = {**SIZES, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
MODELS = {
    "t5": {**SIZES, "own_softmax": False, "feed_forward_proj": "relu", "tie_word_embeddings": True},
    "t5_1_1": {**GATED, "own_softmax": True},
    # As transformers 5 makes it: the embedding is the softmax's, and outputs are not scaled.
    "t5_1_1_as_made": {**GATED, "own_softmax": False},
}
# Longer than the distances that have buckets of their own, and than those that have any.
INPUTS = np.random.RandomState(0).randint(2, SIZES["vocab_size"], [3, 150])
INPUTS[:, -1] = 1
INPUTS[1, 20:] = 0
TARGETS = np.random.RandomState(1).randint(2, SIZES["vocab_size"], [3, 40])
DECODED = 12


def run(arguments, job=None):
    subprocess.run(
        [sys.executable, *arguments],
        input=json.dumps(job),
        text=True,
        check=True,
        timeout=250,
        env=ENVIRONMENT,
    )


def run_transformers(make=None, read=()):
    """Returns what models do in transformers, by their folder: logits, and what they decode."""
    folders = [*(make or {}), *read]
    run(
        [str(TESTS / "helpers" / "transformer" / "t5_of_transformers.py")],
        {
            "make": make or {},
            "read": list(read),
            "inputs": INPUTS.tolist(),
            "targets": TARGETS.tolist(),
            "length": DECODED,
        },
    )
    return {folder: np.load(os.path.join(folder, "outcome.npz")) for folder in folders}


@pytest.fixture(scope="module")
def conversions(tmp_path_factory):
    """All models: in transformers, as a checkpoint of this package, and in transformers again."""
    root = tmp_path_factory.mktemp("t5")
    models = {
        name: types.SimpleNamespace(
            theirs=str(root / name / "theirs"),
            ours=str(root / name / "ours"),
            again=str(root / name / "again"),
        )
        for name in MODELS
    }
    made = run_transformers(
        {models[n].theirs: {"seed": 1, **kwargs} for n, kwargs in MODELS.items()}
    )
    for model in models.values():
        run(
            [
                "-m",
                "mesh_tensorflow.transformer.convert",
                "from-huggingface",
                model.theirs,
                model.ours,
                "--step",
                "5",
            ]
        )
        convert.main(
            ["to-huggingface", model.ours, model.again, "--vocab_size", str(SIZES["vocab_size"])]
        )
    read = run_transformers(read=[model.again for model in models.values()])
    for model in models.values():
        model.outcome, model.outcome_again = made[model.theirs], read[model.again]
    return models


@pytest.fixture(params=MODELS)
def model(request, conversions):
    found = conversions[request.param]
    found.model = t5_models.bitransformer("1_1" in request.param, **SIZES)
    found.checkpoint = os.path.join(found.ours, "model.ckpt-5")
    return found


def test_logits(model):
    expected = model.outcome["logits"]
    found = t5_models.logits(model.checkpoint, model.model, INPUTS, TARGETS)
    assert found.shape == (*TARGETS.shape, 128)
    np.testing.assert_allclose(
        found[..., : SIZES["vocab_size"]], expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max()
    )
    assert expected.std() > 0.1


def test_greedy_decoding(model):
    """Position by position, until each sequence has its EOS."""
    expected = model.outcome["decoded"]
    found = t5_models.restored(
        model.checkpoint,
        lambda imported: model.model.decode(imported(INPUTS), max_decode_length=DECODED),
    )
    np.testing.assert_array_equal(found, expected)
    assert len(np.unique(expected)) > 3


def test_the_way_back(model):
    """Transformers reads what is written, and the model does what it did before."""
    for key, value in model.outcome.items():
        np.testing.assert_array_equal(model.outcome_again[key], value, err_msg=key)
    before, after = (convert.read_huggingface(d)[1] for d in (model.theirs, model.again))
    differ = {key for key in after if key in before and after[key] != before[key]}
    assert differ <= {"tie_word_embeddings"}
