"""transformer.utils as one program of all processors: of its own, and of a TPUEstimator."""

import json
import pathlib

import gin
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from absl.testing import flagsaver
from helpers import processes
from helpers.oracle import utils_runs as runs
from helpers.oracle.utils_cases import Numbers
from helpers.paths import FIXTURES

import mesh_tensorflow as mtf
from mesh_tensorflow import optimize
from mesh_tensorflow.estimator.tpu import TPUContext
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl
from mesh_tensorflow.transformer import dataset, utils
from mesh_tensorflow.transformer.utils import _program

MODELS = json.loads((FIXTURES / "utils.json").read_text())["models"]
LENGTHS = {"inputs": 8, "targets": 8}
TILING = [["rows", [1, 2]], ["cols", [2, 1]]]
SUMMARIES = "tpu_estimator_model_fn.tpu_summaries = True\n"
runs.register(dataset)


@gin.configurable(module="test_utils_programs")
def sublayer_noted(x, layer_stack, context):
    mtf.scalar_summary("noted", mtf.reduce_mean(mtf.square(x)))
    return x


NOTED = (
    "LayerStack.sublayers_final = [@test_utils_programs.sublayer_noted, "
    "@transformer.sublayer_rms_norm]\n"
)


pytestmark = pytest.mark.usefixtures("parsed_flags")


def written(directory):
    """Returns the values of all scalar summaries, by tag and step."""
    found = {}
    for path in pathlib.Path(directory).glob("events*"):
        for event in tf.train.summary_iterator(str(path)):
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found[value.tag, event.step] = value.simple_value
                elif value.metadata.plugin_data.plugin_name == "scalars":
                    found[value.tag, event.step] = float(tf.make_ndarray(value.tensor))
    return found


@pytest.fixture
def estimator(tmp_path):
    """Makes an estimator that begins with seeded weights."""
    path = runs.write_checkpoint(str(tmp_path), MODELS["bitransformer"]["variables"])

    def make(use_tpu, further="", score=False):
        runs.call(lambda **kwargs: None, "", "bitransformer", "train", further)
        return utils.get_estimator(
            "bitransformer",
            Numbers(),
            "rows:2,cols:2",
            "batch:rows,d_ff:cols,heads:cols",
            str(tmp_path / str(use_tpu)),
            4,
            LENGTHS,
            True,
            0.01,
            None,
            100,
            optimize.AdafactorOptimizer,
            None,
            None,
            None,
            use_tpu,
            None,
            100,
            None,
            init_checkpoint=path,
            score_in_predict_mode=score,
        )

    return make


@pytest.mark.every
def test_a_program_of_a_tpu_estimator(estimator, tmp_path, monkeypatch):
    """Training, evaluation, scores and decodes are those of a placed mesh."""
    orders = []

    class Noting(SimdMeshImpl):
        def __init__(self, *args, **kwargs):
            orders.append(kwargs["logical_to_physical"])
            super().__init__(*args, **kwargs)

    class TwoByTwo(TPUContext):
        def __init__(self, num_replicas):
            super().__init__(num_replicas)
            topology = self.device_assignment.topology._replace(mesh_shape=(2, 2, 1, 1))
            self.device_assignment = self.device_assignment._replace(topology=topology)

    monkeypatch.setattr(_program, "SimdMeshImpl", Noting)
    monkeypatch.setattr("mesh_tensorflow.estimator.tpu.TPUContext", TwoByTwo)
    tiled = f"tpu_estimator_model_fn.hierarchical_tiling_spec = {TILING}\n"
    found = {}
    for use_tpu in (None, True):
        further = tiled + NOTED + SUMMARIES
        runs.STATE["keys"] = ("inputs", "targets")
        est = estimator(use_tpu, further)
        data = gin.query_parameter("run.train_dataset_fn").scoped_configurable_fn
        utils.train_model(est, Numbers(), LENGTHS, 4, data, runs.STEP + 2, None)

        def input_fn(params):
            return tf.data.Dataset.from_tensor_slices(
                runs._examples(("inputs", "targets"), 4, 1)
            ).batch(4)

        metrics = est.evaluate(input_fn, steps=1)
        scores = utils.compute_log_likelihoods(estimator(use_tpu, score=True), input_fn)
        decodes = list(utils.decode(estimator(use_tpu), input_fn, Numbers()))
        found[use_tpu] = metrics, scores, decodes, written(tmp_path / str(use_tpu))
    placed, simd = found[None], found[True]
    assert simd[0].keys() == placed[0].keys() and "neg_log_perplexity" in simd[0]
    for name, value in placed[0].items():
        np.testing.assert_allclose(simd[0][name], value, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(simd[1], placed[1], rtol=1e-4)
    assert simd[2] == placed[2] and len(simd[2]) == 4
    # Training and evaluation are tiled: rows of the mesh are columns of chips.
    assert orders == [[0, 2, 1, 3]] * 2 + [[0, 1, 2, 3]] * 2
    tags = {tag for tag, _ in simd[3]} - {"global_step/sec"}
    assert tags >= {"decoder/noted", "encoder/noted", "learning_rate", "loss"}
    for tag in tags:
        step = min(step for name, step in simd[3] if name == tag)
        np.testing.assert_allclose(simd[3][tag, step], placed[3][tag, step], rtol=1e-4, err_msg=tag)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    ["", 'run.mesh_shape = "rows:2"\n', 'run.mesh_shape = "rows:2"\nrun.mesh_impl = "simd"\n'],
)
def test_summaries_of_layers(tmp_path, mesh):
    found = {}
    for name, more in (("without", ""), ("with", SUMMARIES)):
        runs.call(utils.run, str(tmp_path / name), "lm", "train", mesh + NOTED + more)
        found[name] = {tag for tag, _ in written(tmp_path / name)}
    assert found["with"] - found["without"] == {"transformer/noted"}
    assert found["without"] >= {"loss", "learning_rate"}


@pytest.mark.slow
def test_summaries_in_microbatches(tmp_path):
    """A mean over positions is that of the whole batch."""
    found = {}
    for name, more in (("whole", ""), ("parts", runs.MICROBATCHES)):
        runs.call(utils.run, str(tmp_path / name), "lm", "train", NOTED + SUMMARIES + more)
        values = written(tmp_path / name)
        found[name] = {step: v for (tag, step), v in values.items() if tag == "transformer/noted"}
    assert found["whole"] and found["parts"] == pytest.approx(found["whole"], rel=1e-5)


def test_a_tiling_that_makes_another_mesh(tmp_path):
    for spec, text in (
        (
            [["rows", [2]], ["cols", [2]]],
            "makes the mesh rows=2, cols=2, but mesh_shape is "
            "rows=4: bind utils.run.mesh_shape to what utils.tpu_mesh_shape makes",
        ),
        ([["rows", [3]]], "product of spec must be num_processors"),
    ):
        with pytest.raises(ValueError, match=text):
            runs.call(
                utils.run,
                str(tmp_path),
                "lm",
                "train",
                'run.mesh_shape = "rows:4"\n'
                f"tpu_estimator_model_fn.hierarchical_tiling_spec = {spec}\n",
            )


@pytest.mark.slow
def test_a_checkpoint_to_decay_to_is_warned_of(tmp_path, caplog):
    tf.get_logger().propagate = True
    runs.call(
        utils.run,
        str(tmp_path),
        "lm",
        "train",
        'tpu_estimator_model_fn.weight_decay_checkpoint = "/nowhere"\n',
    )
    tf.get_logger().propagate = False
    assert "weight_decay_checkpoint has no effect" in caplog.text


MODULE = """
import os
from helpers.oracle import utils_runs
from mesh_tensorflow.transformer import dataset
utils_runs.register(dataset)
utils_runs.STATE["keys"] = ("targets",)
print("process", os.getpid())
"""


@pytest.fixture
def launched(tmp_path):
    """Runs the program in two processes of this machine."""
    (tmp_path / "my_data.py").write_text(MODULE)

    def run(*parameters):
        done = processes.launch(
            2,
            "-m",
            "mesh_tensorflow.transformer.main",
            "--model_dir=model",
            "--gin_file=my.gin",
            "--module_import=my_data",
            *(f"--gin_param={p}" for p in parameters),
            cwd=tmp_path,
            timeout=400,
        )
        # What is seen is the chief's.
        assert done.stdout.count("process") == 1 and "serves" not in done.stderr

    return run


INFER = ("run.mode = 'infer'", "run.dataset_split = 'validation'")


@pytest.mark.slow
def test_two_processes(launched, tmp_path, monkeypatch):
    """A language model that two processes train, and decode with, is the one of a placed mesh."""
    monkeypatch.chdir(tmp_path)
    path = runs.write_checkpoint(str(tmp_path), MODELS["lm"]["variables"])
    (tmp_path / "in").write_text("5 6\n7\n8 9 10\n")
    (tmp_path / "my.gin").write_text(
        f"{runs.CONFIG}\nrun.model_type = 'lm'\nrun.mesh_shape = 'rows:2,cols:2'\n"
        f"run.init_checkpoint = '{path}'\nrun.train_steps = {runs.STEP + 3}\n"
        "num_layers = 1\nd_model = 16\nd_ff = 32\nd_kv = 8\nnum_heads = 2\ndropout_rate = 0.0\n"
        "decode_from_file.input_filename = 'in'\ndecode_from_file.output_filename = 'out'\n"
        "Unitransformer.sample_autoregressive.temperature = 0.0\n"
    )
    launched("run.mesh_impl = 'simd'")
    launched("run.mesh_impl = 'simd'", *INFER)
    assert sorted(p.name for p in tmp_path.glob("model/command*")) == ["command", "command.1"]
    decoded = (tmp_path / f"out-{runs.STEP + 3}").read_text()
    (tmp_path / f"out-{runs.STEP + 3}").unlink()
    monkeypatch.setitem(runs.STATE, "keys", ("targets",))
    for parameters in ((), INFER):
        gin.clear_config()
        with flagsaver.flagsaver(gin_file=["my.gin"], gin_param=list(parameters)):
            utils.parse_gin_defaults_and_flags()
        utils.run(None, None, None, None, "placed")
    assert (tmp_path / f"out-{runs.STEP + 3}").read_text() == decoded
    simd, placed = (runs.summaries(name) for name in ("model", "placed"))
    np.testing.assert_allclose(simd["loss"], placed["loss"], rtol=1e-5)
    a, b = (tf.train.load_checkpoint(name) for name in ("model", "placed"))
    assert a.get_variable_to_shape_map() == b.get_variable_to_shape_map()
    assert a.get_tensor("global_step") == runs.STEP + 3
    for name in a.get_variable_to_shape_map():
        np.testing.assert_allclose(
            a.get_tensor(name), b.get_tensor(name), rtol=1e-4, atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize("mesh_impl", ["simd", "placement"])
def test_processes_that_cannot_share_the_mesh(tmp_path, monkeypatch, mesh_impl):
    addresses = [f"127.0.0.1:{port}" for port in (1, 2, 3)]
    monkeypatch.setenv(
        "TF_CONFIG",
        json.dumps(
            {
                "cluster": {"chief": addresses[:1], "worker": addresses[1:]},
                "task": {"type": "worker", "index": 0},
            }
        ),
    )
    with pytest.raises(ValueError, match="num_shards is 4, which 3 processes cannot share equally"):
        runs.call(
            utils.run,
            str(tmp_path),
            "lm",
            "train",
            (f"run.mesh_shape = 'rows:4'\nrun.mesh_impl = '{mesh_impl}'\n"),
        )
