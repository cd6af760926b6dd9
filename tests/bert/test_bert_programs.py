"""BERT's programs, from files to files: on one processor, on a mesh, and as a SIMD program."""

import json
import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from absl.testing import flagsaver
from helpers.bert import bert_data

from mesh_tensorflow.bert import bert, run_classifier, run_pretraining, run_squad

ONE = {"mesh_shape": "batch:1"}
MESH = {"mesh_shape": "batch:2;model:2"}
SIMD = {**MESH, "use_tpu": True}
CLASSIFIER = {
    "task_name": "CoLA",
    "max_seq_length": 12,
    "train_batch_size": 4,
    "eval_batch_size": 4,
    "predict_batch_size": 4,
    "learning_rate": 0.01,
    "num_train_epochs": 12.0,
    "save_checkpoints_steps": 100,
}
SQUAD = {
    "max_seq_length": 24,
    "max_query_length": 8,
    "doc_stride": 8,
    "train_batch_size": 4,
    "predict_batch_size": 4,
    "learning_rate": 0.01,
    "num_train_epochs": 60.0,
    "n_best_size": 3,
    "max_answer_length": 4,
    "save_checkpoints_steps": 1000,
}
PRETRAINING = {
    "max_seq_length": 12,
    "max_predictions_per_seq": 3,
    "train_batch_size": 8,
    "eval_batch_size": 4,
    "num_train_steps": 30,
    "num_warmup_steps": 3,
    "steps_per_eval": 20,
    "max_eval_steps": 5,
    "learning_rate": 0.02,
    "save_checkpoints_steps": 100,
    "mode": "train_and_eval",
}


pytestmark = pytest.mark.usefixtures("parsed_flags")


@pytest.fixture
def data(tmp_path):
    bert_data.write_model(tmp_path)
    return tmp_path


def run(program, data, name, options, **more):
    """Runs a program; returns its output directory."""
    output = str(data / name)
    common = {"bert_config_file": str(data / "config.json"), "output_dir": output}
    if program is not run_pretraining:
        common["vocab_file"] = str(data / "vocab.txt")
    with flagsaver.flagsaver(**{**common, **options, **more}):
        program.main(None)
    return output


def results(directory, name="eval_results.txt"):
    with open(os.path.join(directory, name)) as f:
        return {key: float(value) for key, value in (line.split(" = ") for line in f)}


def classify(data, name, *args, **more):
    more = {"do_train": True, "do_eval": True, "do_predict": True, "data_dir": str(data), **more}
    options = {**CLASSIFIER, **more}
    for further in args:
        options.update(further)
    output = run(run_classifier, data, name, options)
    probabilities = os.path.join(output, "test_results.tsv")
    return output, np.loadtxt(probabilities) if os.path.exists(probabilities) else None


@pytest.mark.slow
def test_classifier(data):
    labels = bert_data.write_cola(data)
    output, probabilities = classify(data, "mesh", MESH)
    assert probabilities.shape == (len(labels), 2)
    np.testing.assert_allclose(probabilities.sum(1), 1.0, rtol=1e-5)
    assert probabilities.argmax(1).tolist() == labels
    found = results(output)
    assert found["eval_accuracy"] == 1.0 and found["global_step"] == 48
    for name, options in (("one", ONE), ("simd", SIMD)):
        other, same = classify(data, name, options)
        np.testing.assert_allclose(same, probabilities, rtol=2e-3, atol=1e-5)
        assert results(other) == pytest.approx(found, rel=1e-2)


@pytest.mark.every
def test_classifier_goes_on_from_records_and_checkpoint(data):
    bert_data.write_cola(data)
    cached = str(data / "cached.tf_record")
    whole, _ = classify(data, "out", ONE, cached_train_file=cached, do_eval=False, do_predict=False)
    assert os.path.exists(cached) and not os.path.exists(os.path.join(whole, "eval_results.txt"))
    first = os.path.getmtime(cached)
    step = results(classify(data, "out", ONE, do_train=False)[0])["global_step"]
    assert step == 48
    # Another training begins with its variables, but not with its step.
    begun, _ = classify(
        data,
        "begun",
        ONE,
        cached_train_file=cached,
        num_train_epochs=1.0,
        learning_rate=0.0,
        init_checkpoint=os.path.join(whole, "model.ckpt-48"),
    )
    assert os.path.getmtime(cached) == first
    before, after = results(whole), results(begun)
    assert after.pop("global_step") == 4
    assert after == pytest.approx({k: v for k, v in before.items() if k in after})


@pytest.mark.slow
def test_squad(data):
    answers = bert_data.write_squad(data)
    squad = str(data / "squad.json")
    files = {"train_file": squad, "predict_file": squad, "do_train": True, "do_predict": True}
    found = {}
    for name, options in (("mesh", MESH), ("one", ONE), ("simd", SIMD)):
        output = run(run_squad, data, name, {**SQUAD, **files}, **options)
        with open(os.path.join(output, "predictions.json")) as f:
            predictions = json.load(f)
        assert predictions == answers  # an exact match of all
        with open(os.path.join(output, "nbest_predictions.json")) as f:
            found[name] = json.load(f)
        assert not os.path.exists(os.path.join(output, "null_odds.json"))
    for question, best in found["mesh"].items():
        assert 1 <= len(best) <= 3 and sum(a["probability"] for a in best) == pytest.approx(1.0)
        assert best[0]["text"] == answers[question]
        for name in ("one", "simd"):
            other = found[name][question]
            assert other[0]["text"] == best[0]["text"]
            # Adam magnifies the rounding of another order of sums, step by step.
            assert other[0]["start_logit"] == pytest.approx(best[0]["start_logit"], rel=0.25)


@pytest.mark.slow
def test_squad_with_questions_without_answer(data):
    bert_data.write_squad(data)
    squad = str(data / "squad.json")
    output = run(
        run_squad,
        data,
        "out",
        SQUAD,
        do_train=True,
        train_file=squad,
        do_predict=True,
        predict_file=squad,
        version_2_with_negative=True,
        num_train_epochs=2.0,
        null_score_diff_threshold=-1e9,
        **MESH,
    )
    with open(os.path.join(output, "predictions.json")) as f:
        assert set(json.load(f).values()) == {""}
    with open(os.path.join(output, "null_odds.json")) as f:
        assert len(json.load(f)) == 4


@pytest.mark.slow
def test_pretraining(data):
    files = bert_data.write_hidden_tokens(data)
    options = {**PRETRAINING, "input_train_files": files, "input_eval_files": files}
    found = {}
    for name, mesh in (("mesh", MESH), ("one", ONE)):
        output = run(run_pretraining, data, name, options, **mesh)
        found[name] = results(output, "eval_results_30.txt")
    names = ["masked_lm_accuracy", "masked_lm_loss", "next_sentence_accuracy", "next_sentence_loss"]
    assert set(found["mesh"]) == {*names, "loss", "global_step"}
    assert found["mesh"]["global_step"] == 30
    # Of 22 tokens, so that the loss would be 3.1 if all were as likely.
    assert found["mesh"]["masked_lm_loss"] < 2.7
    assert found["one"] == pytest.approx(found["mesh"], rel=1e-2)
    again = run(run_pretraining, data, "mesh", {**options, "mode": "eval"}, **SIMD)
    assert results(again, "eval_results_30.txt") == pytest.approx(found["mesh"], rel=1e-4)


@pytest.mark.every
def test_mixture_of_experts_and_adafactor(data):
    """Pre-training of what the classic cannot build."""
    bert_data.write_model(
        data,
        block_layers=["attention", "moe"],
        moe_num_experts=4,
        moe_intermediate_size=16,
        residual_structure="direct",
        position_signal="relative_attention_bias",
        use_bias=False,
        initializer_range=None,
    )
    files = bert_data.write_hidden_tokens(data)
    options = {
        **PRETRAINING,
        "optimizer": "adafactor",
        "steps_per_eval": 30,
        "learning_rate": 0.1,
        "input_train_files": files,
        "input_eval_files": files,
    }
    output = run(run_pretraining, data, "out", options, **MESH)
    assert results(output, "eval_results_30.txt")["masked_lm_loss"] < 3.0
    names = {name for name, _ in tf.train.list_variables(tf.train.latest_checkpoint(output))}
    assert "bert/encoder/block_0/moe/wi/kernel" in names
    assert "bert/encoder/relative_attention_bias" in names


class HParams:
    """Parameters as attributes."""

    def __init__(self, **values):
        self.__dict__.update(values)


PARAMS = [
    None,
    {},
    {"use_tpu": True, "batch_size": 4},
    HParams(),
    HParams(use_tpu=True, context=None),
]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eval", "infer"])
def test_model_functions_with_parameters_of_others(mode):
    """Parameters that are not of an estimator have no `context`, whether for a TPU or not."""
    config = bert.BertConfig.from_dict(bert_data.CONFIG)
    found = []
    for params in PARAMS:
        model_fn = run_classifier.model_fn_builder(
            config, 2, None, 0.1, None, None, use_tpu=params is not None
        )
        with tf.Graph().as_default(), flagsaver.flagsaver(**ONE):
            ids = tf.constant([[2, 5, 6, 3], [2, 7, 3, 0]])
            features = {
                "input_ids": ids,
                "input_mask": tf.sign(ids),
                "segment_ids": 0 * ids,
                "label_ids": tf.constant([0, 1]),
                "is_real_example": tf.constant([1, 1]),
            }
            spec = model_fn(features, None, mode, params)
            fetched = spec.loss if mode == "eval" else spec.predictions["probabilities"]
            hooks = spec.evaluation_hooks if mode == "eval" else spec.prediction_hooks
            with tf.train.SingularMonitoredSession(hooks=hooks) as session:
                found.append(session.run(fetched))
    assert np.shape(found) == (len(PARAMS),) + (() if mode == "eval" else (2, 2))
    assert np.isfinite(found).all()
    if mode == "infer":
        np.testing.assert_allclose(np.sum(found, -1), 1, rtol=1e-5)
