"""What decoding, evaluation and export by transformer.utils write."""

import contextlib
import functools
import json
import os
import pathlib

import gin
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.oracle import utils_runs as runs
from helpers.oracle.utils_cases import Numbers
from helpers.paths import FIXTURES

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import dataset, metrics, utils

MODELS = json.loads((FIXTURES / "utils.json").read_text())["models"]
runs.register(dataset)


pytestmark = pytest.mark.usefixtures("parsed_flags")


@pytest.fixture
def call(tmp_path):
    """Runs a mode in a directory with a checkpoint of seeded weights."""

    def run(model_type, mode, further=""):
        if not tf.train.latest_checkpoint(str(tmp_path)):
            runs.write_checkpoint(str(tmp_path), MODELS[model_type]["variables"])
        return runs.call(utils.run, str(tmp_path), model_type, mode, further)

    return run


def read(path):
    return pathlib.Path(path).read_text().splitlines()


def decoded_targets(ids):
    return [" ".join(str(i) for i in row if i) for row in ids.tolist()]


@pytest.mark.slow
def test_evaluation_of_decodes_and_scores(call, tmp_path):
    call("bitransformer", "eval")
    directory = tmp_path / "validation_eval"
    targets, predictions = runs.STATE["metric"]
    examples = runs._examples(("inputs", "targets"), 5, 1)
    assert targets == decoded_targets(examples["targets"]) == read(directory / "task_targets")
    assert read(directory / "task_inputs") == decoded_targets(examples["inputs"])
    assert predictions == read(directory / f"task_{runs.STEP}_predictions")
    assert runs.summaries(str(directory)) == {"eval/task/same": 0.0}
    call("bitransformer", "score_eval", 'run.eval_dir_suffix = "more"\n')
    _, scores = runs.STATE["metric"]
    again = call("bitransformer", "score_from_dataset")
    np.testing.assert_allclose(scores, again, rtol=1e-6)
    assert len(scores) == 5 and (tmp_path / "validation_eval_more").is_dir()


@pytest.mark.parametrize(
    ("returned", "refused"),
    [
        ([1, 2, 3, 4, 5], None),
        ([1, 2, 3, 4, 5, 0], None),
        (([1, 2, 3, 4, 5], ["inputs"], ["targets"]), None),
        (None, "returned None, and metrics need the scores of all"),
        ([1, 2, 3, 4], "returned 4 scores for 5 examples; return one for each"),
    ],
)
def test_each_task_is_evaluated_on_its_own_outputs(tmp_path, returned, refused):
    runs.write_checkpoint(str(tmp_path), MODELS["lm"]["variables"])
    found = {}

    # The parameters of the classic, which says nothing of what is done with scores.
    def score(estimator, input_fn, eval_checkpoint_step, model_dir, vocabulary, num_examples):
        assert num_examples == 5
        return returned

    def tasks(**kwargs):
        return [
            dataset.EvalDataset(
                name,
                lambda ids=ids: tf.data.Dataset.from_tensor_slices({"targets": ids}),
                lambda text, **kwargs: text,
                [
                    lambda targets, scores, name=name: (
                        found.setdefault(name, (targets, scores)) and {}
                    )
                ],
            )
            for name, ids in {"first": [[5], [6]], "second": [[7], [8], [9]]}.items()
        ]

    with pytest.raises(ValueError, match=refused) if refused else contextlib.nullcontext():
        utils.eval_model(
            None, Numbers(), 8, 2, "validation", str(tmp_path), tasks, None, runs.STEP,
            eval_with_score=True, score_with_estimator_fn=score,
        )  # fmt: skip
    assert refused or found == {
        "first": (["5", "6"], [1, 2]),
        "second": (["7", "8", "9"], [3, 4, 5]),
    }


class _Echo:
    """An estimator whose outputs and scores are made of its inputs, and which counts its rows."""

    def __init__(self, **lengths):
        self.lengths, self.shapes = lengths, []

    def predict(self, input_fn, checkpoint_path):
        with tf.Graph().as_default(), tf.Session() as session:
            batch = tf.data.make_one_shot_iterator(input_fn({})).get_next()
            with contextlib.suppress(tf.errors.OutOfRangeError):
                while True:
                    rows = session.run(batch)
                    self.shapes.append(rows["inputs"].shape)
                    for ids in rows["inputs"]:
                        yield {"inputs": ids, "outputs": ids, "targets": ids, "scores": -ids.sum()}


def _tasks_of_examples(asked, found):
    """Returns data sets as T5's are: whole examples, or padded to a length that is asked for."""

    def dataset_fn(sequence_length=None):
        asked.append(sequence_length)
        ids = tf.ragged.constant([[5, 6], [7, 8, 9], [4]])
        examples = tf.data.Dataset.from_tensor_slices({"inputs": ids, "targets": ids})
        # The ids of an example, as a tensor of its own length.
        examples = examples.map(lambda e: {key: x + 0 for key, x in e.items()})
        return (
            dataset.trim_and_pad_dataset(examples, sequence_length) if sequence_length else examples
        )

    def of_example(value, example, is_target=False):
        return value, len(example["inputs"]), is_target

    def histogram(targets, predictions):
        found.append((targets, predictions))
        return tf.Summary(value=[tf.Summary.Value(tag="own", simple_value=len(predictions))])

    return [("task", dataset_fn, of_example, [histogram]), ("no metrics", dataset_fn, None, [])]


@pytest.mark.parametrize("scores", [False, True])
def test_evaluation_of_whole_examples(tmp_path, scores):
    """By the length of the longest, with a function that makes the estimator."""
    runs.write_checkpoint(str(tmp_path), MODELS["lm"]["variables"])
    asked, found, made = [], [], []

    def estimator(sequence_length):
        made.append(_Echo(**sequence_length))
        return made[-1]

    def evaluate(estimator, length):
        utils.eval_model(
            estimator, Numbers(), length, 2, "validation", str(tmp_path),
            lambda **kwargs: _tasks_of_examples(asked, found), None, runs.STEP,
            eval_with_score=scores,
        )  # fmt: skip

    evaluate(estimator, None)
    longest = {"inputs": 3, "targets": 3}
    assert made[0].lengths == longest and made[0].shapes == [(2, 3), (2, 3)]
    assert asked == [None, longest]
    outputs = [-11.0, -24.0, -4.0] if scores else ["5 6", "7 8 9", "4"]
    assert found == [
        (
            [("5 6", 2, True), ("7 8 9", 3, True), ("4", 1, True)],
            [(output, n, False) for output, n in zip(outputs, (2, 3, 1))],
        )
    ]
    # Whose metrics are a summary of its own.
    directory = tmp_path / "validation_eval"
    assert runs.summaries(str(directory)) == {"own": 3.0}
    assert len(read(directory / f"task_{runs.STEP}_predictions")) == 3
    asked.clear()
    given = _Echo()
    evaluate(given, 5)
    assert asked == [None, 5] and given.shapes == [(2, 5), (2, 5)]
    with pytest.raises(ValueError, match="that of the longest example is used: give a function"):
        evaluate(given, None)


def test_data_sets_without_metrics_are_left_out(tmp_path, caplog):
    tf.get_logger().propagate = True
    made = []
    utils.eval_model(
        made.append, Numbers(), 8, 2, "validation", str(tmp_path),
        lambda **kwargs: [("a", None, None, []), ("b", None, None, None)], None, runs.STEP,
    )  # fmt: skip
    tf.get_logger().propagate = False
    assert "Not evaluated, as they have no metric_fns: a, b" in caplog.text
    assert not made and not (tmp_path / "validation_eval").exists()


@pytest.mark.slow
def test_evaluation_in_the_length_of_the_examples(call, tmp_path):
    call("bitransformer", "eval")
    _, predictions = runs.STATE["metric"]
    call("bitransformer", "eval", "run.sequence_length = None\n")
    assert runs.STATE["metric"][1] == predictions
    with pytest.raises(
        ValueError, match=r"sequence_length is None: bind utils\.run\.sequence_length"
    ):
        call("bitransformer", "infer", "run.sequence_length = None\n")


@pytest.mark.slow
def test_perplexity_of_the_data_trained_on(call, tmp_path):
    call("lm", "perplexity_eval", "run.eval_dataset_fn = None\n")
    [directory] = tmp_path.glob("eval_eval_*")
    assert directory.name == "eval_eval_validation_8"
    assert runs.summaries(str(directory))["num_eval_tokens"] == 56


@pytest.mark.slow
def test_decoding_a_data_set(call, tmp_path):
    call(
        "bitransformer",
        "infer",
        (
            "infer_model.decode_fn = @decode_from_dataset\n"
            "decode_from_dataset.infer_dataset_fn = @utils_runs.evaluation_data\n"
            f'decode_from_dataset.decode_output_dir = "{tmp_path}/out"\n'
        ),
    )
    call("bitransformer", "eval")
    predictions = read(tmp_path / "out" / f"task_{runs.STEP}_predictions")
    assert predictions == runs.STATE["metric"][1]
    assert len(read(tmp_path / "out" / "task_inputs")) == 5


def test_evaluation_without_data(call):
    with pytest.raises(ValueError, match=r"bind utils\.run\.eval_dataset_fn"):
        call("lm", "eval", "run.eval_dataset_fn = None\n")
    with pytest.raises(ValueError, match="mode=infer model_type=lm should have feature inputs"):
        call("lm", "eval")


@pytest.mark.slow
def test_beams(call, monkeypatch):
    """Beam search finds texts that are as likely as those of greedy decoding, or likelier."""
    monkeypatch.setattr(Numbers, "vocab_size", 128)  # the model's, which is not trained
    further = "Bitransformer.decode.max_decode_length = 8\n"
    call("bitransformer", "eval", further)
    greedy = list(runs.STATE["metric"][1])
    call(
        "bitransformer",
        "eval",
        (f"{further}Bitransformer.decode.beam_size = 4\nBitransformer.decode.alpha = 0.0\n"),
    )
    beams = list(runs.STATE["metric"][1])
    inputs = decoded_targets(runs._examples(("inputs",), 5, 1)["inputs"])
    inputs = [line.rsplit(" ", 1)[0] for line in inputs]

    def scores(texts):
        texts = [text.removesuffix(" 1") for text in texts]
        return call(
            "bitransformer",
            "score_from_strings",
            (
                f"score_from_strings.inputs = {inputs}\nscore_from_strings.targets = {texts}\n"
                "score_from_strings.score_eos = False\n"
            ),
        )

    assert beams != greedy
    assert np.sum(scores(beams)) > np.sum(scores(greedy))


def served(path, texts):
    """Returns what an exported model answers."""
    with tf.Graph().as_default(), tf.Session() as session:
        meta = tf.saved_model.loader.load(session, ["serve"], path)
        signature = meta.signature_def["serving_default"]
        return session.run(
            {name: x.name for name, x in signature.outputs.items()},
            {signature.inputs[name].name: lines for name, lines in texts.items()},
        )


def test_a_prediction_of_ones_own(tmp_path):
    def doubled(model, features, variable_dtype):
        assert isinstance(variable_dtype, mtf.VariableDType) and hasattr(model, "call_simple")
        return features["inputs"] * 2

    runs.write_checkpoint(str(tmp_path), MODELS["lm"]["variables"])
    runs.call(lambda **kwargs: None, "", "lm", "infer")
    estimator = utils.get_estimator(
        "lm",
        Numbers(),
        "",
        "",
        str(tmp_path),
        2,
        8,
        True,
        None,
        None,
        1,
        None,
        doubled,
        None,
        None,
        None,
        None,
        100,
        None,
    )
    (tmp_path / "in").write_text("5 6\n7\n")
    utils.decode_from_file(
        estimator,
        Numbers(),
        "lm",
        2,
        {"inputs": 8, "targets": 8},
        None,
        str(tmp_path / "in"),
        str(tmp_path / "out"),
    )
    assert read(tmp_path / f"out-{runs.STEP}") == ["10 12", "14"]

    def tasks(**kwargs):
        def dataset_fn(sequence_length=None):
            ids = {"inputs": [[5, 6], [7, 8]], "targets": [[10, 12], [14, 9]]}
            return dataset.trim_and_pad_dataset(tf.data.Dataset.from_tensor_slices(ids), 8)

        functions = [metrics.exact_match, metrics.f1]
        return [dataset.EvalDataset("doubled", dataset_fn, None, functions)]

    utils.eval_model(
        estimator, Numbers(), 8, 2, "validation", str(tmp_path), tasks, None, runs.STEP
    )
    found = runs.summaries(str(tmp_path / "validation_eval"))
    assert found == {"eval/doubled/exact_match": 50.0, "eval/doubled/f1": 75.0}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["export_infer", "export_score"])
@pytest.mark.parametrize("model_type", ["bitransformer", "lm"])
@pytest.mark.parametrize("any_batch", [False, True])
@pytest.mark.slips
def test_exported_models_take_texts(call, tmp_path, model_type, mode, any_batch):
    further = f'run.export_path = "{tmp_path}/exported"\nrun.mesh_impl = "simd"\n'
    further += f"run.export_any_batch = {any_batch}\n"
    [path] = call(model_type, mode, f'{further}run.mesh_shape = "rows:2"\n')
    texts = {"inputs": runs.INPUTS[:3]}
    if mode == "export_score":
        texts["targets"] = runs.TARGETS[:3]
    found = served(path.decode(), texts)
    if mode == "export_score":
        np.testing.assert_allclose(found["scores"], MODELS[model_type]["scores"][:3], rtol=1e-4)
    else:
        lines = [text.decode().split(" 0")[0] for text in found["outputs"]]
        assert lines == MODELS[model_type]["decoded"][:3]
    twice = {name: lines * 2 for name, lines in texts.items()}
    if any_batch:
        for name, x in served(path.decode(), twice).items():
            same = (
                np.testing.assert_allclose if x.dtype.kind == "f" else np.testing.assert_array_equal
            )
            same(x, np.concatenate([found[name]] * 2))
        return
    with pytest.raises(tf.errors.InvalidArgumentError, match="exported for 4 texts at a time"):
        served(path.decode(), twice)


@gin.configurable(module="functions_of_ones_own")
def number_of_targets(model, features, variable_dtype):
    """A scoring function: as many as a row has targets."""
    assert isinstance(variable_dtype, mtf.VariableDType) and hasattr(model, "call_simple")
    there = mtf.cast(mtf.greater(features["targets"], 0), tf.float32)
    return mtf.reduce_sum(there, reduced_dim=features["targets"].shape.dims[-1])


TRAINED = {}


@gin.configurable(module="functions_of_ones_own")
def train_by_position(own, words, lengths, rows, data, steps, members, **more):
    """A training function whose arguments have other names."""
    TRAINED.update(more, rows=rows, steps=steps, members=members, lengths=lengths)


@pytest.mark.parametrize("mesh_shape", ["", "rows:2"])
def test_scores_of_ones_own(tmp_path, mesh_shape):
    """In the modes that score, the given function makes scores, not ids."""
    runs.write_checkpoint(str(tmp_path), MODELS["lm"]["variables"])
    found = runs.call(
        utils.run, str(tmp_path), "lm", "score_from_strings",
        "run.predict_fn = @number_of_targets\n"
        f'run.mesh_shape = "{mesh_shape}"\n',
    )  # fmt: skip
    assert found == [len(line.split()) for line in runs.TARGETS]


@pytest.mark.slow
def test_scores_of_a_language_model_with_inputs(call, tmp_path):
    """They are one sequence, whose inputs have scores too."""
    model = "lm"
    [examples] = [runs._examples(("inputs", "targets"), 5, 1)]
    texts = [
        " ".join(str(i) for i in (*inputs, *targets) if i)
        for inputs, targets in zip(examples["inputs"], examples["targets"])
    ]
    expected = call(
        model, "score_from_strings",
        f"score_from_strings.inputs = None\nscore_from_strings.targets = {texts}\n"
        "run.sequence_length = 16\n",
    )  # fmt: skip
    runs.MODELS["lm"], before = (True, ""), runs.MODELS["lm"]
    try:
        found = call(model, "score_from_dataset")
    finally:
        runs.MODELS["lm"] = before
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_a_function_of_ones_own_trains(tmp_path):
    """Called as the classic calls it: by position, whatever the names of its arguments."""
    runs.call(utils.run, str(tmp_path), "lm", "train", "run.train_model_fn = @train_by_position\n")
    assert TRAINED == {
        "rows": 4, "steps": 1, "members": None, "lengths": {"inputs": 8, "targets": 8},
        "skip_seen_data": False, "seen_data_init_step": 0, "checkpoint_input_pipeline": False,
    }  # fmt: skip


def test_checkpoints_to_come(tmp_path):
    """With `None` each checkpoint is decoded as it comes."""
    runs.write_checkpoint(str(tmp_path), MODELS["lm"]["variables"])
    found = []
    decode = functools.partial(
        lambda seen, estimator, **kwargs: seen.append(kwargs["checkpoint_path"]), found
    )
    gin.bind_parameter("get_checkpoint_iterator.stop_after", runs.STEP)
    utils.infer_model(None, Numbers(), 8, 4, "lm", str(tmp_path), None, decode_fn=decode)
    assert found == [os.path.join(str(tmp_path), f"model.ckpt-{runs.STEP}")]
    utils.infer_model(None, Numbers(), 8, 4, "lm", str(tmp_path), None, ["a", "b"], decode)
    assert found[1:] == ["a", "b"]
