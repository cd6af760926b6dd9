"""Runs whose layout is chosen: by steps that are run, and with the results of any layout."""

import json
import re

import gin
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from absl.testing import flagsaver
from helpers import processes
from helpers.oracle import utils_runs as runs
from helpers.paths import FIXTURES
from helpers.transformer import chosen_in_utils

import mesh_tensorflow as mtf
from mesh_tensorflow._processes.processes import variables_for
from mesh_tensorflow.transformer import dataset, main, utils
from mesh_tensorflow.transformer.utils import _auto_layout

VARIABLES = json.loads((FIXTURES / "utils.json").read_text())["models"]["bitransformer"][
    "variables"
]
runs.register(dataset)
pytestmark = pytest.mark.usefixtures("parsed_flags")

AUTO = """
import mesh_tensorflow.transformer.utils
run.mesh_shape = "rows:2,cols:2"
run.layout_rules = "auto"
auto_mtf.Auto.seconds = 600
auto_mtf.Auto.profile = False
auto_mtf.Auto.candidates = 2
auto_mtf.Auto.cache = "{cache}"
"""
NAMED = f"run.mesh_devices = {[f'/device:CPU:{i}' for i in range(4)]}\n"


def further(tmp_path, *more):
    return AUTO.replace("{cache}", str(tmp_path / "cache.json")) + "\n".join(more)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["placement", "simd"])
def test_the_run_is_that_of_any_layout(impl, tmp_path, capsys):
    path = runs.write_checkpoint(str(tmp_path), VARIABLES)
    steps = f'run.init_checkpoint = "{path}"\nrun.train_steps = {runs.STEP + 3}\n'
    whole, chosen = str(tmp_path / "whole"), str(tmp_path / "chosen")
    runs.call(utils.run, whole, "bitransformer", "train", steps)
    more = f'run.mesh_impl = "{impl}"', NAMED, steps
    runs.call(utils.run, chosen, "bitransformer", "train", further(tmp_path, *more))
    shown = capsys.readouterr().err
    assert re.search("the fastest of [23] that were tried", shown), shown[-800:]
    np.testing.assert_allclose(*(runs.summaries(p)["loss"] for p in (chosen, whole)), rtol=1e-5)
    a, b = (tf.train.load_checkpoint(name) for name in (chosen, whole))
    assert a.get_tensor("global_step") == runs.STEP + 3
    for name in b.get_variable_to_shape_map():
        np.testing.assert_allclose(
            a.get_tensor(name), b.get_tensor(name), rtol=1e-4, atol=1e-5, err_msg=name
        )
    # Nothing is left to train, so nothing is tried.
    runs.call(utils.run, chosen, "bitransformer", "train", further(tmp_path, *more))
    assert "the fastest of" not in capsys.readouterr().err


@pytest.mark.slow
def test_the_flags_say_layout_and_mesh(tmp_path, monkeypatch, capsys):
    """As a user would: `python -m mesh_tensorflow.transformer.main --layout=auto ...`."""
    monkeypatch.setitem(runs.STATE, "keys", ("inputs", "targets"))
    monkeypatch.chdir(tmp_path)
    gin.clear_config()
    # One device for all processors, where no layout splits anything.
    own = "\n".join(line for line in further(tmp_path).splitlines() if "run." not in line)
    text = runs.CONFIG.replace('run.mesh_shape = ""\n', "").replace("run.layout_rules = ", "x = ")
    text = "\n".join(line for line in text.splitlines() if not line.startswith("x = "))
    (tmp_path / "my.gin").write_text(text + own)
    asked = {"layout": "auto", "mesh_shape": "rows:2,cols:2", "model_dir": str(tmp_path / "model")}
    with flagsaver.flagsaver(gin_file=["my.gin"], gin_param=[]), flagsaver.as_parsed(**asked):
        main.main([])
    assert "layout no splits: the fastest of 1" in capsys.readouterr().err
    assert np.isfinite(runs.summaries(asked["model_dir"])["loss"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "runtime, impl", [("tensorflow", "placement"), ("tensorflow", "simd"), ("pjrt", "pjrt")]
)
def test_in_two_processes_the_first_one_chooses(runtime, impl, tmp_path):
    program = ["--runtime", runtime, chosen_in_utils.__file__]
    done = processes.launch(2, *program, tmp_path, impl)
    assert done.stderr.count(": the fastest of ") == 1
    assert tf.train.load_checkpoint(str(tmp_path)).get_tensor("global_step") == 2


def test_a_layout_that_cannot_be_chosen(tmp_path):
    def fails(message, mode="train", more=""):
        with pytest.raises(ValueError, match=message):
            runs.call(utils.run, str(tmp_path), "lm", mode, further(tmp_path, more))

    fails("chooses a layout by steps of training, but mode is 'perplexity_eval'", "perplexity_eval")
    per_replica = 'run.batch_size = ("tokens_per_replica", 64)'
    fails('such as \\("tokens_per_batch", 64\\)', more=per_replica)


def test_an_object_says_how(tmp_path):
    """`get_estimator` takes an Auto, which has its own budget and cache."""
    auto = mtf.auto_mtf.Auto(seconds=5, cache=str(tmp_path / "own.json"))
    assert _auto_layout.auto_of(auto) is auto and _auto_layout.auto_of("batch:rows") is None
    gin.clear_config()
    gin.parse_config("auto_mtf.Auto.seconds = 7")
    assert _auto_layout.auto_of("auto").seconds == 7


def test_an_estimator_without_a_lowering_has_no_layout(tmp_path):
    def model_fn(features, mode):
        step = tf.assign_add(tf.train.get_global_step(), 1)
        return mtf.estimator.EstimatorSpec(mode, loss=tf.reduce_mean(features), train_op=step)

    def estimator_of(layout):
        return mtf.estimator.Estimator(model_fn, str(tmp_path))

    def data():
        return tf.data.Dataset.from_tensors(np.ones(4, np.float32)).repeat()

    with pytest.raises(ValueError, match="model_fn makes no mtf\\.Lowering in training"):
        mtf.auto_mtf.layout_of_estimator(estimator_of, data, "all:2")


def test_each_process_would_choose_a_layout_of_its_own(monkeypatch):
    """An error before any server is started, which would wait for the other."""
    for name, value in variables_for(["127.0.0.1:1", "127.0.0.1:2"], 0, "tensorflow").items():
        monkeypatch.setenv(name, value)
    text = "layout_of_estimator: there are 2 processes, and each would choose .*run_cluster runs"
    with pytest.raises(ValueError, match=text):
        mtf.auto_mtf.layout_of_estimator(lambda layout: None, lambda: None, "all:2")
