"""What the trainers of transformers and of BERT write: what runs, losses, results, and no more."""

import os
import pathlib
import re
import signal
import time

import pytest
from helpers import noise, processes
from helpers.bert import bert_data

MAIN = "mesh_tensorflow.transformer.main"
DATA = """
import gin
import tensorflow.compat.v1 as tf
from mesh_tensorflow.transformer import dataset

TEXTS = {"inputs": ["ab", "bc", "cd", "de"], "targets": ["b", "c", "d", "e"]}


def rows(sequence_length, vocabulary):
    ds = dataset.encode_all_features(tf.data.Dataset.from_tensor_slices(TEXTS), vocabulary)
    return dataset.pack_or_pad(ds, sequence_length, pack=False)


@gin.configurable
def training_data(sequence_length, vocabulary, dataset_split):
    return rows(sequence_length, vocabulary)


def same(targets, predictions):
    assert targets == TEXTS["targets"]
    return {"same": sum(t == p for t, p in zip(targets, predictions))}


@gin.configurable
def evaluation_data(sequence_length, vocabulary, dataset_split):
    return [dataset.EvalDataset("letters", lambda: rows(sequence_length, vocabulary), None, [same])]
"""
GIN = """
import letters

utils.run.model_type = "bitransformer"
utils.run.vocabulary = @vocabulary.ByteVocabulary()
utils.run.sequence_length = {"inputs": 8, "targets": 8}
Bitransformer.decode.beam_size = 1
num_layers = 1
d_model = 8
d_ff = 8
num_heads = 2
d_kv = 4
utils.get_variable_dtype.master_dtype = "float32"
utils.get_variable_dtype.activation_dtype = "float32"
utils.run.mesh_shape = "rows:2"
utils.run.layout_rules = "batch:rows"
utils.run.train_dataset_fn = @training_data
utils.run.eval_dataset_fn = @evaluation_data
utils.run.batch_size = 4
utils.run.train_steps = 2
utils.run.eval_checkpoint_step = -1
utils.run.learning_rate_schedule = 0.01
utils.score_from_strings.inputs = ["ab", "bc"]
utils.score_from_strings.targets = ["b", "c"]
"""
# What a trainer says for its user on stderr, log lines included.
SERVED = [
    r"^(mesh|layout|parameters|per processor|communication|checkpoints) +\S",
    r"^ {10,}\S",  # further lines of the communication
    r"^loss = \S+, step = \d+",
    r"^Loss for final step: ",
    r"^(Training|Evaluating|Predicting) ",
    r"^(Evaluated|Saving dict for global step) ",
    r"^  eval_\w+ = |^  (loss|global_step) = ",
    r"^eval/letters/same at step 2: ",
    r"^letters has no postprocess_fn",
    r"^Scores are in ",
    r"^decoded ",
]


def transformer(directory, mode):
    split = "train" if mode == "train" else "validation"
    return processes.run(
        "-m", MAIN, f"--model_dir={directory}/model", "--gin_file=letters.gin",
        f"--gin_param=utils.run.mode = '{mode}'",
        f"--gin_param=utils.run.dataset_split = '{split}'", cwd=directory,
    )  # fmt: skip


@pytest.mark.slow
def test_transformer(tmp_path):
    (tmp_path / "letters.py").write_text(DATA)
    (tmp_path / "letters.gin").write_text(GIN)
    trained = noise.check(transformer(tmp_path, "train"), SERVED, most=0)
    assert trained.returncode == 0, trained.stderr
    for start in ("mesh ", "layout ", "parameters ", "per processor ", "communication "):
        assert re.search(f"^{start}", trained.stderr, re.MULTILINE), start
    assert f"{tmp_path}/model" in trained.stderr
    assert re.search(r"^loss = [\d.]+, step = 1$", trained.stderr, re.MULTILINE)
    last = trained.stderr.splitlines()[-1]
    curves = f"{tmp_path}/model, to step 2; its curves: tensorboard --logdir {tmp_path}/model"
    assert last.split(maxsplit=1) == ["checkpoints", curves]

    evaluated = noise.check(transformer(tmp_path, "eval"), SERVED, most=0)
    assert evaluated.returncode == 0, evaluated.stderr
    assert "letters has no postprocess_fn: its metrics compare texts" in evaluated.stderr
    assert re.search(r"^eval/letters/same at step 2: \d", evaluated.stderr, re.MULTILINE)

    scored = noise.check(transformer(tmp_path, "score_from_strings"), SERVED, most=0)
    assert scored.returncode == 0, scored.stderr
    lines = [line.split("\t") for line in scored.stdout.splitlines()]
    assert [target for _, target in lines] == ["b", "c"]
    written = (tmp_path / "model" / "scores_2.scores").read_text().split()
    assert [float(score) for score, _ in lines] == pytest.approx([float(w) for w in written])
    assert (tmp_path / "model" / "scores_2.targets").read_text().split() == ["b", "c"]


@pytest.mark.slow
def test_misspelled_rule(tmp_path):
    """Attention is split by any name that the layout has, which the program then seems to know."""
    (tmp_path / "letters.py").write_text(DATA)
    (tmp_path / "letters.gin").write_text(GIN.replace("batch:rows", "batc:rows"))
    done = transformer(tmp_path, "train")
    assert done.returncode == 2
    assert "layout rule batc:rows splits attention alone" in done.stderr
    assert "'batc'. They have batch, " in done.stderr and "did you mean batch?" in done.stderr


def test_waiting_for_a_checkpoint(tmp_path):
    """It says for what, and where, and Ctrl-C ends it without a traceback."""
    (tmp_path / "letters.py").write_text(DATA)
    gin = GIN.replace("eval_checkpoint_step = -1", "eval_checkpoint_step = None")
    (tmp_path / "letters.gin").write_text(gin)
    (tmp_path / "inputs").write_text("ab\n")
    with processes.started(
        "-m", MAIN, f"--model_dir={tmp_path}/model", "--gin_file=letters.gin",
        "--gin_param=utils.run.mode = 'infer'",
        f"--gin_param=decode_from_file.input_filename = '{tmp_path}/inputs'",
        f"--gin_param=decode_from_file.output_filename = '{tmp_path}/outputs'", cwd=tmp_path,
    ) as running:  # fmt: skip
        deadline = time.monotonic() + 120
        while "Ctrl-C ends this" not in running.texts()[1] and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(running.process.pid, signal.SIGINT)
        done = running.end(60)
    assert done.returncode == 130, done.stderr
    waiting, stopped = done.stderr.splitlines()
    assert waiting.startswith(f"Waiting for the first checkpoint in {tmp_path}/model: ")
    assert stopped == f"{MAIN}: stopped by Ctrl-C"


@pytest.mark.slow
def test_classifier(tmp_path):
    bert_data.write_model(tmp_path)
    bert_data.write_cola(tmp_path)
    done = processes.run(
        "-m", "mesh_tensorflow.bert.run_classifier", "--do_train", "--do_eval", "--task_name=CoLA",
        f"--data_dir={tmp_path}", f"--vocab_file={tmp_path}/vocab.txt",
        f"--bert_config_file={tmp_path}/config.json", f"--output_dir={tmp_path}/out",
        "--mesh_shape=batch:2", "--max_seq_length=12", "--train_batch_size=4",
        "--eval_batch_size=4", "--num_train_epochs=1", cwd=tmp_path,
    )  # fmt: skip
    noise.check(done, SERVED, most=0)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^loss = [\d.]+, step = 1$", done.stderr, re.MULTILINE)
    assert re.search(r"^mesh +batch=2", done.stderr, re.MULTILINE)
    assert "eval_accuracy" in done.stderr
    assert "eval_accuracy" in pathlib.Path(tmp_path, "out", "eval_results.txt").read_text()


@pytest.mark.slow
def test_transformer_in_a_terminal(tmp_path):
    """The progress line does not run into other lines."""
    (tmp_path / "letters.py").write_text(DATA)
    (tmp_path / "letters.gin").write_text(GIN)
    lines = noise.run(
        "-m", MAIN, f"--model_dir={tmp_path}/model", "--gin_file=letters.gin",
        "--gin_param=utils.run.train_steps = 200", cwd=tmp_path, terminal=True, served=SERVED,
    )  # fmt: skip
    assert any(re.match(r"train: 200/200 steps in .*loss", line) for line in lines), lines
