"""Training by transformer.utils: what it trains, from where it starts, and how it goes on."""

import json
import os
import re

import gin
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers import processes
from helpers.oracle import utils_runs as runs
from helpers.oracle.utils_cases import Numbers
from helpers.paths import FIXTURES

from mesh_tensorflow import optimize
from mesh_tensorflow.transformer import dataset, utils

SHAPES = json.loads((FIXTURES / "utils.json").read_text())["models"]["lm"]["variables"]
SMALL = "run.train_steps = 2\nrun.save_checkpoints_steps = 1\n"
RATES = []


runs.register(dataset)


pytestmark = pytest.mark.usefixtures("parsed_flags")


@pytest.fixture
def train(tmp_path):
    def train(further="", name="model"):
        runs.call(utils.run, str(tmp_path / name), "lm", "train", SMALL + further)
        return str(tmp_path / name)

    return train


def values(directory, step=None):
    path = (
        tf.train.latest_checkpoint(directory) if step is None else f"{directory}/model.ckpt-{step}"
    )
    reader = tf.train.load_checkpoint(path)
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


@pytest.mark.slow
def test_only_chosen_variables_are_trained(train):
    directory = train('run.variable_filter = "wi|logits"\n')
    before, after = values(directory, 0), values(directory)
    changed = {n for n in after if not np.array_equal(before[n], after[n])}
    trained = {n for n in changed if "slot" not in n} - {"global_step"}
    assert trained == {
        "transformer/logits/kernel",
        "transformer/block_000/layer_001/DenseReluDense/wi/kernel",
    }
    slots = {n.split("_slot")[0] for n in after if "slot" in n}
    assert slots == trained


def test_a_filter_that_leaves_nothing(train):
    with pytest.raises(ValueError, match="variable_filter='nothing' leaves no variable to train"):
        train('run.variable_filter = "nothing"\n')


@pytest.mark.slow
def test_an_ensemble_with_inputs_of_their_own(train):
    directory = train("run.ensemble_inputs = 2\nUnitransformer.ensemble = 2\n")
    after = values(directory)
    assert after["transformer/embedding"].shape == (2, 128, 16)
    assert np.isfinite(runs.summaries(directory)["loss"])


@pytest.mark.slow
def test_outer_batch_and_microbatches_train_alike(train, tmp_path):
    path = runs.write_checkpoint(str(tmp_path), SHAPES)
    common = f'run.init_checkpoint = "{path}"\nrun.train_steps = {runs.STEP + 2}\n'
    further = (
        'run.mesh_shape = "outer:2,rows:2"\ntpu_estimator_model_fn.outer_batch_size = 2\n'
        'run.layout_rules = "outer_batch:outer,batch:rows"\n'
    )
    found = [
        values(train(common + more, name))
        for name, more in (("a", ""), ("b", further), ("c", runs.MICROBATCHES))
    ]
    for other in found[1:]:
        for name, value in found[0].items():
            np.testing.assert_allclose(other[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_an_initial_checkpoint_by_filter_and_mapping(train, tmp_path):
    path = runs.write_checkpoint(str(tmp_path), SHAPES)
    saved = values(str(tmp_path))
    directory = train(
        f'run.init_checkpoint = "{path}"\nrun.train_steps = {runs.STEP + 1}\n'
        'tpu_estimator_model_fn.init_variable_filter = "SelfAttention|global_step"\n'
    )
    begun = values(directory, runs.STEP)
    assert begun["global_step"] == runs.STEP
    for name, value in saved.items():
        if name != "global_step" and "slot" not in name:
            same = np.array_equal(begun[name], value)
            assert same == ("SelfAttention" in name), name


def test_an_initial_checkpoint_of_another_size(train, tmp_path):
    path = runs.write_checkpoint(str(tmp_path), SHAPES)
    with pytest.raises(ValueError, match=r"has shape \[.*16.*\], but .* in the model has \[.*8"):
        train(f'run.init_checkpoint = "{path}"\nUnitransformer.d_model = 8\n')


@pytest.mark.slow
@pytest.mark.parametrize("mesh_impl", ["placement", "simd"])
def test_an_initial_checkpoint_of_a_smaller_vocabulary(train, tmp_path, mesh_impl):
    """Slots of what has grown begin anew, and those of other weights are loaded."""
    path = runs.write_checkpoint(str(tmp_path), SHAPES)
    saved = values(str(tmp_path))
    further = (
        f'run.init_checkpoint = "{path}"\nrun.train_steps = {runs.STEP + 1}\n'
        f'run.mesh_impl = "{mesh_impl}"\nUnitransformer.vocab_divisor = 160\n'
    )
    with pytest.raises(
        ValueError, match=r"has \[160, 16\].*by tpu_.*_resize and init_checkpoint_sh"
    ):
        train(further, "refused")
    resize = 'tpu_estimator_model_fn.init_checkpoint_resize = "vocab"\n'
    begun = values(train(further + resize), runs.STEP)
    grown = {name for name, value in saved.items() if 128 in value.shape}
    assert {n for n in grown if "_slot_" not in n} == {
        "transformer/embedding",
        "transformer/logits/kernel",
    }
    for name, value in saved.items():
        if name not in grown:
            np.testing.assert_array_equal(begun[name], value)
        elif "_slot_" in name:
            assert not np.array_equal(begun[name][tuple(slice(n) for n in value.shape)], value)
        else:
            np.testing.assert_array_equal(begun[name][tuple(slice(n) for n in value.shape)], value)
            assert begun[name].shape != value.shape and np.std(begun[name]) > 0


@pytest.mark.slow
def test_an_initial_checkpoint_that_has_other_weights(train, tmp_path):
    """None in common is an error; what is on one side only, if gin says so."""
    path = runs.write_checkpoint(str(tmp_path), SHAPES)
    common = f'run.init_checkpoint = "{path}"\nrun.train_steps = {runs.STEP + 1}\n'
    strict = "tpu_estimator_model_fn.init_checkpoint_strict = True\n"
    chosen = 'tpu_estimator_model_fn.init_variable_filter = "SelfAttention|global_step"\n'
    with pytest.raises(ValueError, match=r"strict asks for the same[\s\S]*In the checkpoint only"):
        train(common + strict + chosen, "one side")
    train(common + strict, "the same")
    only_step = 'tpu_estimator_model_fn.init_variable_filter = "global_step"\n'
    with pytest.raises(ValueError, match="none of the model's weights is there"):
        train(common + only_step, "none")


@pytest.mark.slow
@pytest.mark.parametrize(
    "further",
    [
        "run.skip_seen_data = True\n",
        "run.checkpoint_input_pipeline = True\n",
        "run.skip_seen_data = True\nrun.checkpoint_input_pipeline = True\n",
    ],
    ids=["skipped", "kept", "both"],
)
def test_a_training_that_goes_on_sees_the_data_that_it_would_have(train, further):
    whole = train(f"{further}run.train_steps = 3\n", "whole")
    train(f"{further}run.train_steps = 1\n", "parts")
    parts = train(f"{further}run.train_steps = 3\n", "parts")
    a, b = values(whole), values(parts)
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_input_pipelines_are_kept_as_long_as_checkpoints(train):
    further = "run.checkpoint_input_pipeline = True\nrun.keep_checkpoint_max = 2\n"
    directory = train(f"{further}run.train_steps = 4\nrun.save_checkpoints_steps = 1\n")
    kept = {name: set() for name in ("model", "input")}
    for file in os.listdir(directory):
        found = re.fullmatch(r"(model|input)\.ckpt-(\d+)\.(index|meta|data.*)", file)
        if found:
            kept[found[1]].add(int(found[2]))
    assert kept["input"] == kept["model"] and len(kept["model"]) == 2


def test_ids_that_the_vocabulary_does_not_have(train, monkeypatch):
    monkeypatch.setattr(Numbers, "vocab_size", 10)
    with pytest.raises(tf.errors.InvalidArgumentError, match="too small, with vocab_size 10"):
        train()


def test_a_sequence_longer_than_the_positions(train):
    with pytest.raises(ValueError, match=r"length 8 .* is longer than the 4 positions"):
        train("Unitransformer.max_length = 4\n")


@pytest.mark.parametrize(("further", "text"), [
    ("run.mode = 'fly'\n", "unknown mode 'fly' - must be one of 'train', 'eval'"),
    ("run.vocabulary = None\n", "vocabulary is None: bind utils.run.vocabulary"),
    ("run.dataset_split = 'test'\n", "training is on the split 'train'"),
    ("run.optimizer = None\n", "training needs an optimizer"),
    ("run.batch_size = True\n", "batch_size is True; it should be a number or a pair"),
    ("run.train_steps = True\n", "train_steps is True; it should be a number of steps"),
    ("run.train_dataset_fn = None\n", "bind utils.run.train_dataset_fn"),
    ("run.mesh_impl = 'magic'\n", "mesh_impl='magic' is none of"),
    ("tpu_estimator_model_fn.outer_batch_size = 3\n", "batch_size=4 is not divisible by"),
    ("run.sequence_length = {'targets': 6}\n", r"shape \[4, 8\], but should be .* of length 6"),
])  # fmt: skip
def test_errors(train, further, text):
    with pytest.raises(ValueError, match=text):
        train(further)


def test_a_tpu_that_is_named():
    runs.call(lambda **kwargs: None, "", "lm", "train")
    with pytest.raises(RuntimeError, match="tpu='mine', but estimators run on CPUs and GPUs"):
        utils.run(None, "mine", None, None, "model")


def schedule(step, total_train_steps):
    RATES.append((step, total_train_steps))
    return 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("given", "total"), [(schedule, 2), ([schedule, 0.5], 2), (0.25, None)])
def test_learning_rates_without_run(tmp_path, given, total):
    """As by T5, whose schedules are not told how long training is."""
    del RATES[:]
    runs.call(lambda **kwargs: None, "", "lm", "train")
    estimator = utils.get_estimator(
        "lm",
        Numbers(),
        "",
        "",
        str(tmp_path),
        4,
        8,
        True,
        given,
        None,
        1,
        optimize.AdafactorOptimizer,
        None,
        None,
        None,
        None,
        None,
        100,
        None,
    )
    data = gin.query_parameter("run.train_dataset_fn").scoped_configurable_fn
    utils.train_model(estimator, Numbers(), 8, 4, data, 2, None)
    assert [n for _, n in RATES] == ([total] if total else [])
    expected = {0.25} if total is None else {0.5} if callable(given) else {0.25}
    assert runs.summaries(str(tmp_path))["learning_rate"] in expected


MODULE = """
import tensorflow.compat.v1 as tf
from mesh_tensorflow.transformer import dataset
from helpers.oracle import utils_runs
utils_runs.register(dataset)
"""


@pytest.mark.slow
def test_main(tmp_path):
    (tmp_path / "my_data.py").write_text(MODULE)
    (tmp_path / "my.gin").write_text(
        f"{runs.CONFIG}\nrun.model_type = 'bitransformer'\nnum_layers = 1\nd_model = 16\n"
        "d_ff = 16\nd_kv = 8\nnum_heads = 2\ndropout_rate = 0.0\n"
    )
    processes.python(
        "-m",
        "mesh_tensorflow.transformer.main",
        "--tpu=",
        "--model_dir=model",
        "--gin_file=my.gin",
        "--gin_param=utils.run.train_steps = 2",
        "--module_import=my_data",
        cwd=tmp_path,
    )
    assert "utils.run.train_steps = 2" in (tmp_path / "model" / "command").read_text()
    assert tf.train.latest_checkpoint(str(tmp_path / "model")).endswith("model.ckpt-2")
    assert (
        "run.model_type = 'bitransformer'"
        in (tmp_path / "model" / "operative_config.gin").read_text()
    )


@pytest.mark.slow
def test_distillation_from_a_teacher(tmp_path):
    """The teacher comes from its checkpoint and stays as it is; the student learns, and scores."""
    shapes = json.loads((FIXTURES / "utils.json").read_text())["models"]["bitransformer"][
        "variables"
    ]
    path = runs.write_checkpoint(str(tmp_path), shapes)
    taught = values(str(tmp_path))
    further = (
        f'StudentTeacher.teacher_checkpoint = "{path}"\nStudentTeacher.temperature = 1.0\n'
        "StudentTeacher.fraction_soft = 0.5\nstudent/Unitransformer.d_model = 16\n"
        'run.variable_filter = "^student"\n'
    )
    directory = str(tmp_path / "student")
    runs.MODELS["bi_student_teacher"] = (True, "")
    layers = (
        "@transformer_layers.SelfAttention, @transformer_layers.EncDecAttention, "
        "@transformer_layers.DenseReluDense"
    )
    for scope in ("student", "teacher"):
        further += f"{scope}/decoder/make_layer_stack.layers = [{layers}]\n"
    runs.call(utils.run, directory, "bi_student_teacher", "train", SMALL + further)
    before, after = values(directory, 0), values(directory)
    moved = {n for n in after if not np.array_equal(before[n], after[n])} - {"global_step"}
    assert {n.split("/")[0] for n in moved} == {"student"}
    for name, value in taught.items():
        if name != "global_step" and "slot" not in name:
            np.testing.assert_array_equal(after[f"teacher/{name}"], value)
    steps = "run.eval_checkpoint_step = 2\n"
    scores = runs.call(
        utils.run, directory, "bi_student_teacher", "score_from_strings", further + steps
    )
    assert len(scores) == len(runs.TARGETS) and np.isfinite(scores).all()
