"""Whole runs of transformer.utils: against the classic, on meshes, and what they write."""

import json

import gin
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.oracle import utils_runs as runs
from helpers.paths import FIXTURES

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import dataset, utils

MODELS = json.loads((FIXTURES / "utils.json").read_text())["models"]
MESHES = {
    "one": "",
    "mesh": 'run.mesh_shape = "rows:2,cols:2"\n',
    "simd": 'run.mesh_shape = "rows:2,cols:2"\nrun.mesh_impl = "simd"\n',
}
runs.register(dataset)


pytestmark = pytest.mark.usefixtures("parsed_flags")


@pytest.fixture
def call(tmp_path):
    """Runs a mode in a directory with a checkpoint of seeded weights, but for training."""
    directory = str(tmp_path / "model")

    def run(model_type, mode, further="", packed=False):
        if not tf.io.gfile.exists(directory):
            tf.io.gfile.makedirs(directory)
            run.path = runs.write_checkpoint(directory, MODELS[model_type]["variables"])
        where = directory
        if mode == "train":
            where = str(tmp_path / "trained")
            further = f'run.init_checkpoint = "{run.path}"\n{further}'
        return runs.call(utils.run, where, model_type, mode, further, packed)

    run.directory, run.trained = directory, str(tmp_path / "trained")
    run.path = str(tmp_path / "model" / f"model.ckpt-{runs.STEP}")
    return run


@pytest.mark.slow("*-one-*", "bitransformer*", "delimited*", "lm-simd-*")
@pytest.mark.parametrize(
    ("model_type", "mesh", "further"),
    [
        *((model_type, "one", "") for model_type in MODELS),
        ("bitransformer", "mesh", ""),
        ("delimited_lm", "mesh", runs.MICROBATCHES),
        ("lm", "simd", ""),
    ],
)
def test_training(call, model_type, mesh, further):
    further += MESHES[mesh]
    call(model_type, "perplexity_eval", MESHES[mesh])
    call(model_type, "train", f"run.train_steps = {runs.STEP + 1}\n{further}")
    loss = runs.summaries(call.trained)["loss"]
    np.testing.assert_allclose(loss, MODELS[model_type]["loss"], rtol=1e-4)
    saved = dict(tf.train.list_variables(call.trained))
    assert saved == MODELS[model_type]["variables"]
    found = runs.summaries(f"{call.directory}/eval_task_validation_8")
    assert found == pytest.approx(MODELS[model_type]["perplexity"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "mesh"),
    [
        ("lm", "one"),
        ("delimited_lm", "one"),
        ("bitransformer", "one"),
        ("bitransformer", "mesh"),
    ],
)
def test_scores_and_decoding(call, model_type, mesh):
    found = call(model_type, "score_from_strings", MESHES[mesh])
    np.testing.assert_allclose(found, MODELS[model_type]["scores"], rtol=1e-4)
    lines = runs.decoded_file(call.directory, utils.run, model_type, MESHES[mesh])
    assert lines == MODELS[model_type]["decoded"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["lm", "delimited_lm", "bitransformer"])
def test_training_on_packed_rows(call, model_type):
    call(model_type, "perplexity_eval")
    mesh = MESHES["mesh"] + runs.MICROBATCHES
    call(model_type, "train", f"run.train_steps = {runs.STEP + 1}\n{mesh}", packed=True)
    loss = runs.summaries(call.trained)["loss"]
    np.testing.assert_allclose(loss, MODELS[model_type]["loss_packed"], rtol=1e-4)
    assert abs(loss - MODELS[model_type]["loss"]) > 1e-3


@pytest.mark.slow
def test_as_t5_calls(call, tmp_path):
    """The names of arguments, and what is unpacked, are those of T5's MtfModel."""
    call("bitransformer", "perplexity_eval")
    with gin.unlock_config():
        gin.bind_parameter("utils.get_variable_dtype.slice_dtype", "float32")
        gin.bind_parameter("utils.decode_from_file.input_filename", str(tmp_path / "in"))
        gin.bind_parameter("utils.decode_from_file.output_filename", str(tmp_path / "out"))
    (tmp_path / "in").write_text("\n".join(runs.INPUTS))
    vocabulary, lengths = (runs.Numbers(), runs.Numbers()), {"inputs": 8, "targets": 8}

    def estimator(score):
        return utils.get_estimator(
            model_type="bitransformer",
            vocabulary=vocabulary,
            layout_rules=mtf.convert_to_layout_rules("batch:batch"),
            mesh_shape=mtf.Shape([]),
            mesh_devices=None,
            model_dir=call.directory,
            batch_size=2,
            sequence_length=lengths,
            autostack=True,
            learning_rate_schedule=None,
            keep_checkpoint_max=None,
            save_checkpoints_steps=5000,
            optimizer=None,
            predict_fn=None,
            variable_filter=None,
            ensemble_inputs=None,
            use_tpu=None,
            tpu_job_name=None,
            iterations_per_loop=100,
            cluster=None,
            init_checkpoint=None,
            score_in_predict_mode=score,
        )

    def input_fn(params):
        assert params["batch_size"] == 2
        features = runs._examples(("inputs", "targets"), 4, 1)
        return tf.data.Dataset.from_tensor_slices(features).batch(2)

    scores, texts = utils.score_with_estimator(
        estimator(True), input_fn, runs.STEP, call.directory, vocabulary
    )
    assert len(scores) == len(texts) == 4
    assert scores == utils.compute_log_likelihoods(estimator(True), input_fn)
    utils.infer_model(
        estimator(False), vocabulary, lengths, 2, "bitransformer", call.directory, runs.STEP
    )
    lines = (tmp_path / f"out-{runs.STEP}").read_text().splitlines()
    assert lines == MODELS["bitransformer"]["decoded"]
    outputs = list(utils.decode(estimator(False), input_fn, vocabulary, call.path))
    assert len(outputs) == 4 and all(isinstance(text, str) for text in outputs)
    path = utils.export_model(
        estimator(False),
        str(tmp_path / "exported"),
        vocabulary,
        lengths,
        "bitransformer",
        batch_size=2,
        checkpoint_path=call.path,
        eval_with_score=False,
    )
    assert tf.saved_model.contains_saved_model(path.decode())
