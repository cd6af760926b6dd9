"""Whole runs of transformer.utils on devices of JAX, against the classic."""

import json

import gin
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.oracle import utils_runs as runs
from helpers.paths import FIXTURES

from mesh_tensorflow.transformer import dataset, utils
from mesh_tensorflow.transformer.utils._run import _mesh_impl

MODELS = json.loads((FIXTURES / "utils.json").read_text())["models"]
MESH = 'run.mesh_shape = "rows:2,cols:2"\nrun.mesh_impl = "pjrt"\n'
runs.register(dataset)


pytestmark = pytest.mark.usefixtures("parsed_flags")


@pytest.mark.slow("lm*")
@pytest.mark.parametrize(
    "model_type", ["lm", pytest.param("bitransformer", marks=pytest.mark.slow)]
)
def test_trains_evaluates_scores_and_decodes(model_type, tmp_path):
    expected = MODELS[model_type]
    given, trained = str(tmp_path / "given"), str(tmp_path / "trained")
    tf.io.gfile.makedirs(given)
    path = runs.write_checkpoint(given, expected["variables"])

    runs.call(utils.run, given, model_type, "perplexity_eval", MESH)
    found = runs.summaries(f"{given}/eval_task_validation_8")
    assert found == pytest.approx(expected["perplexity"], rel=1e-4)

    further = f'run.init_checkpoint = "{path}"\nrun.train_steps = {runs.STEP + 1}\n'
    runs.call(utils.run, trained, model_type, "train", further + MESH)
    loss = runs.summaries(trained)["loss"]
    np.testing.assert_allclose(loss, expected["loss"], rtol=1e-4)
    assert dict(tf.train.list_variables(trained)) == expected["variables"]

    scores = runs.call(utils.run, given, model_type, "score_from_strings", MESH)
    np.testing.assert_allclose(scores, expected["scores"], rtol=1e-4)
    assert runs.decoded_file(given, utils.run, model_type, MESH) == expected["decoded"]


@pytest.mark.slow
def test_a_training_goes_on_with_another_implementation(tmp_path):
    """The weights and slots after three steps, the second of them on placed devices."""

    def values(name, *meshes):
        directory = str(tmp_path / name)
        for i, mesh in enumerate(meshes):
            further = f"run.train_steps = {i + 1}\nrun.save_checkpoints_steps = 1\n"
            runs.call(utils.run, directory, "lm", "train", further + mesh)
            gin.clear_config()
        reader = tf.train.load_checkpoint(directory)
        return {n: reader.get_tensor(n) for n in reader.get_variable_to_shape_map()}

    expected = values("placed", "", "", "")
    found = values("mixed", MESH, "", MESH)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


def test_a_tpu_of_tensorflow():
    with pytest.raises(ValueError, match="'pjrt' and use_tpu='local' exclude each other"):
        _mesh_impl("pjrt", "local")


def test_named_devices(tmp_path):
    with pytest.raises(ValueError, match=r"names devices of TensorFlow.*Leave mesh_devices out"):
        further = MESH + 'run.mesh_devices = ["/cpu:0", "/cpu:0", "/cpu:0", "/cpu:0"]\n'
        runs.call(utils.run, str(tmp_path), "lm", "train", further)
