"""Decoding of files: of inputs that are none, and when it is killed."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import gin
import pytest
import tensorflow.compat.v1 as tf
from helpers.oracle import utils_runs as runs
from helpers.oracle.utils_cases import Numbers
from helpers.paths import FIXTURES, TESTS

from mesh_tensorflow.transformer import dataset, utils

SHAPES = json.loads((FIXTURES / "utils.json").read_text())["models"]["lm"]["variables"]
LENGTHS = {"inputs": 8, "targets": 8}


def read(path):
    return pathlib.Path(path).read_text().splitlines()


class Dying:
    """An estimator that doubles its inputs, and dies after some examples."""

    def __init__(self, model_dir, lives):
        self.model_dir, self.lives, self.asked = str(model_dir), lives, []

    def latest_checkpoint(self):
        return f"{self.model_dir}/model.ckpt-3"

    def predict(self, input_fn, checkpoint_path=None):
        with tf.Graph().as_default(), tf.Session() as session:
            features = tf.data.make_one_shot_iterator(input_fn({})).get_next()
            while True:
                try:
                    batch = session.run(features)["inputs"]
                except tf.errors.OutOfRangeError:
                    return
                for row in batch:
                    if not self.lives:
                        raise KeyboardInterrupt
                    self.lives -= 1
                    self.asked.append(row[0])
                    yield {"inputs": row, "outputs": row * 2}


def test_decoding_that_is_killed_goes_on_where_it_was(tmp_path):
    numbers = list(range(2, 49)) * 4
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("".join(f"{n}\n" for n in numbers))
    arguments = (Numbers(), "lm", 8, 4, None, str(source), str(target))
    with pytest.raises(KeyboardInterrupt):
        utils.decode_from_file(Dying(tmp_path, 150), *arguments)
    assert not pathlib.Path(f"{target}-3").exists()
    second = Dying(tmp_path, 1000)
    utils.decode_from_file(second, *arguments)
    assert read(f"{target}-3") == [str(2 * n) for n in numbers]
    assert second.asked[:60] == numbers[128:188]  # two parts of 64 were there
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out-3"]
    # Other inputs are decoded from their beginning.
    source.write_text("7\n8\n")
    utils.decode_from_file(Dying(tmp_path, 1000), *arguments, 1, 2)
    assert read(f"{target}-3") == ["14", "14", "16", "16"]


def finished_parts(tmp_path):
    [directory] = tmp_path.glob("out-3.parts-*")
    return sorted(p.name for p in directory.iterdir()), directory


@pytest.fixture
def decode(tmp_path):
    """Decodes 200 lines with an estimator that dies after some, and returns it."""
    source = tmp_path / "in"
    source.write_text("".join(f"{n % 40 + 2}\n" for n in range(200)))

    def run(lives):
        estimator = Dying(tmp_path, lives)
        utils.decode_from_file(
            estimator, Numbers(), "lm", 8, 4, None, str(source), str(tmp_path / "out")
        )
        assert read(tmp_path / "out-3") == [str(2 * (n % 40 + 2)) for n in range(200)]
        return estimator

    return run


def test_a_part_that_was_not_written_to_its_end_is_computed_again(tmp_path, decode):
    with pytest.raises(KeyboardInterrupt):
        decode(150)
    names, directory = finished_parts(tmp_path)
    assert names == ["000000000", "000000064"]
    text = (directory / names[1]).read_text()
    (directory / names[1]).write_text(text[:50])
    (directory / f"{names[0]}.tmp").write_text("left by a process that was killed")
    assert len(decode(1000).asked) == 200 - 64


def test_slow_outputs_are_kept_batch_by_batch(tmp_path, decode, monkeypatch):
    monkeypatch.setattr("mesh_tensorflow.transformer.utils._decode._MOST_SECONDS", 0)
    with pytest.raises(KeyboardInterrupt):
        decode(21)
    assert finished_parts(tmp_path)[0] == ["000000000", "000000008"]
    assert len(decode(1000).asked) == 200 - 16


@pytest.mark.parametrize("function", ["rename", "rmtree"])
def test_killed_while_parts_are_removed(tmp_path, decode, monkeypatch, function):
    original = getattr(tf.io.gfile, function)

    def dies(*args, **kwargs):
        if str(args[0]).endswith(".tmp"):
            return original(*args, **kwargs)
        if function == "rmtree":
            next(pathlib.Path(args[0]).iterdir()).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tf.io.gfile, function, dies)
        decode(1000)
    assert not decode(0).asked
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out-3"]


def test_other_weights_or_parameters_begin_anew(tmp_path, decode):
    index = tmp_path / "model.ckpt-3.index"
    index.write_text("weights")
    for lives in (100, 100):
        with pytest.raises(KeyboardInterrupt):
            decode(lives)
        index.write_text("others")
    assert len(list(tmp_path.glob("out-3.parts-*"))) == 2
    gin.bind_parameter("Unitransformer.sample_autoregressive.temperature", 0.5)
    assert len(decode(1000).asked) == 200


def test_what_is_finished_of_several_checkpoints_is_kept(tmp_path):
    (tmp_path / "in").write_text("5\n" * 100)
    gin.bind_parameter("decode_from_file.input_filename", str(tmp_path / "in"))
    gin.bind_parameter("decode_from_file.output_filename", str(tmp_path / "out"))
    paths = [str(tmp_path / f"model.ckpt-{step}") for step in (3, 5)]
    arguments = (Numbers(), 4, 8, "lm", str(tmp_path), None, paths)
    with pytest.raises(KeyboardInterrupt):
        utils.infer_model(Dying(tmp_path, 180), *arguments)
    assert read(tmp_path / "out-3") == ["10"] * 100
    second = Dying(tmp_path, 1000)
    utils.infer_model(second, *arguments)
    assert len(second.asked) == 100 - 64
    assert read(tmp_path / "out-5") == ["10"] * 100
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out-3", "out-5"]


def test_a_decode_that_waits_for_checkpoints_leaves_no_parts_of_finished_files(tmp_path):
    def saved(step):
        path = tmp_path / "model" / f"model.ckpt-{step}"
        path.parent.mkdir(exist_ok=True)
        path.with_name(f"{path.name}.index").write_text("weights")
        tf.train.update_checkpoint_state(str(path.parent), str(path))

    def decode_fn(estimator, checkpoint_path, **kwargs):
        arguments = (Numbers(), "lm", 8, 4, checkpoint_path, str(tmp_path / "in"))
        utils.decode_from_file(estimator, *arguments, str(tmp_path / "out"))
        found.append(sorted(p.name for p in tmp_path.iterdir()))
        saved(5)
        if len(found) == 2:
            raise KeyboardInterrupt

    (tmp_path / "in").write_text("5\n" * 100)
    saved(3)
    found = []
    arguments = (Numbers(), 4, 8, "lm", str(tmp_path / "model"), None)
    with pytest.raises(KeyboardInterrupt):
        utils.infer_model(Dying(tmp_path, 1000), *arguments, decode_fn=decode_fn)
    assert found == [["in", "model", "out-3"], ["in", "model", "out-3", "out-5"]]


@pytest.mark.slow
def test_a_decode_of_data_sets_goes_on_where_it_was(tmp_path):
    def examples(sequence_length):
        rows = [[n % 40 + 2, 1] for n in range(100)]
        return tf.data.Dataset.from_tensor_slices({"inputs": rows, "targets": rows})

    def text(text, example, is_target):
        return text

    tasks = [dataset.EvalDataset(name, examples, text, []) for name in ("a", "b", "none")]
    tasks[2] = dataset.EvalDataset("none", lambda: examples(0).take(0), text, [])
    arguments = (
        Numbers(),
        "bitransformer",
        8,
        LENGTHS,
        None,
        lambda **kwargs: tasks,
        "validation",
        str(tmp_path / "out"),
    )
    with pytest.raises(KeyboardInterrupt):
        utils.decode_from_dataset(Dying(tmp_path, 170), *arguments)
    second = Dying(tmp_path, 1000)
    utils.decode_from_dataset(second, *arguments)
    # The last batch of 100 is filled up.
    assert 36 <= len(second.asked) <= 40 and second.asked[:36] == [
        n % 40 + 2 for n in range(64, 100)
    ]
    names = [f"{name}_{what}" for name in "ab" for what in ("3_predictions", "inputs", "targets")]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == names
    for name in "ab":
        found = read(tmp_path / "out" / f"{name}_3_predictions")
        assert found == [f"{2 * (n % 40 + 2)} 2" for n in range(100)]
        assert len(read(tmp_path / "out" / f"{name}_inputs")) == 100


@pytest.mark.parametrize(("text", "error"), [
    ("", "there are no lines in .*in"),
    ("5\n\n6\n", "in: line 2 is empty"),
    ("5\nsix\n7\n", "in: line 2 cannot be encoded: 'six'"),
    ("5\n\xff\n7\n", "in: line 2 is no UTF-8 text"),
])  # fmt: skip
def test_inputs_are_looked_at_before_the_model(tmp_path, text, error):
    source, targets = tmp_path / "in", tmp_path / "targets"
    source.write_bytes(text.encode("latin-1"))
    targets.write_text("5\n6\n7\n")
    with pytest.raises(ValueError, match=error):
        utils.decode_from_file(None, Numbers(), "lm", 8, 4, None, str(source), "out", repeats=3)
    if text:
        for files in ((source, targets), (targets, source)):
            for model_type in ("lm", "delimited_lm", "bitransformer"):
                with pytest.raises(ValueError, match=error):
                    utils.score_from_strings(
                        None, Numbers(), model_type, 8, LENGTHS, "", None, *map(str, files), len
                    )


def test_too_few_outputs(tmp_path):
    class Short(Dying):
        def predict(self, input_fn, checkpoint_path=None):
            yield {"outputs": [5, 6]}

    (tmp_path / "in").write_text("5\n6\n")
    with pytest.raises(RuntimeError, match="there were no outputs for the last 1 inputs"):
        utils.decode_from_file(
            Short(tmp_path, 9),
            Numbers(),
            "lm",
            8,
            4,
            None,
            str(tmp_path / "in"),
            str(tmp_path / "out"),
        )
    assert not (tmp_path / "out-3").exists()


MODULE = """
from helpers.oracle import utils_cases
from helpers.oracle import utils_runs
from mesh_tensorflow.transformer import dataset
utils_runs.register(dataset)
encode, decode = utils_cases.Numbers.encode, utils_cases.Numbers.decode


def logged(self, ids):
    with open("decoded", "a") as f:
        f.write("x")
    return decode(self, ids)


utils_cases.Numbers.decode = logged
"""
GIN = """
run.model_type = "lm"
run.mode = "infer"
run.dataset_split = "validation"
decode_from_file.input_filename = "in"
decode_from_file.output_filename = "out"
Unitransformer.sample_autoregressive.temperature = 0.0
num_layers = 1
d_model = 16
d_ff = 32
d_kv = 8
num_heads = 2
dropout_rate = 0.0
"""


@pytest.fixture
def main(tmp_path):
    """Starts the program, which decodes 4000 lines in batches of 4."""
    runs.write_checkpoint(str(tmp_path), SHAPES)
    (tmp_path / "counting.py").write_text(MODULE)
    (tmp_path / "my.gin").write_text(runs.CONFIG + GIN)
    (tmp_path / "in").write_text("".join(f"{n % 50 + 2} {n % 7 + 2}\n" for n in range(4000)))
    command = [
        sys.executable,
        "-m",
        "mesh_tensorflow.transformer.main",
        "--tpu=",
        "--model_dir=.",
        "--gin_file=my.gin",
        "--module_import=counting",
    ]
    paths = os.pathsep.join([*sys.path, str(TESTS), str(tmp_path)])

    def start():
        with open(tmp_path / "log", "w") as log:
            return subprocess.Popen(
                command,
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": paths},
                stdout=log,
                stderr=log,
            )

    return start


@pytest.mark.slow
def test_a_decode_that_sigkill_ended_goes_on(main, tmp_path):
    process = main()
    while not list(tmp_path.glob("out-7.parts-*/*[0-9]")):
        assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "out-7").exists()
    [directory] = tmp_path.glob("out-7.parts-*")
    parts = sorted(directory.glob("*[0-9]"))
    kept = [line for part in parts for line in json.loads(part.read_text())]
    assert 64 <= len(kept) < 4000
    (tmp_path / "decoded").unlink()
    assert main().wait(120) == 0, (tmp_path / "log").read_text()[-3000:]
    found = read(tmp_path / "out-7")
    assert len(found) == 4000 and found[: len(kept)] == kept
    # The first lines of a run are also decoded to be logged with their inputs.
    again = len((tmp_path / "decoded").read_text())
    assert 4000 - len(kept) <= again <= 4000 - len(kept) + 5
    assert not list(tmp_path.glob("out-7?*"))
    (tmp_path / "out-7").unlink()
    assert main().wait(120) == 0
    assert read(tmp_path / "out-7") == found and len(set(found)) > 10
