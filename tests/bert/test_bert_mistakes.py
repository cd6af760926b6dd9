"""Mistakes in the data of BERT's programs end them with one message and exit code 2."""

import pytest
import tensorflow as tf
from helpers import processes
from helpers.bert import bert_data

COMMON = ["--bert_config_file=config.json", "--output_dir=out"]
PRETRAINING = [
    "mesh_tensorflow.bert.run_pretraining", *COMMON, "--max_seq_length=12",
    "--max_predictions_per_seq=3", "--mode=train", "--num_train_steps=2",
]  # fmt: skip
SQUAD = ["mesh_tensorflow.bert.run_squad", *COMMON, "--vocab_file=vocab.txt", "--do_train",
         "--max_seq_length=24", "--max_query_length=8", "--doc_stride=8"]  # fmt: skip
CLASSIFIER = [
    "mesh_tensorflow.bert.run_classifier", *COMMON, "--vocab_file=vocab.txt", "--task_name=CoLA",
    "--do_train", "--max_seq_length=12",
]  # fmt: skip
FILES = {
    "garbage.tfrecord": "this is no record, but a line of text\n",
    "open.json": '{"data": [',
    "other.json": '{"dat": []}',
    "wrong/train.tsv": "x\t2\t\ta sentence\n",
}
# By name: the command, and what is said.
MISTAKES = {
    "no_records": (
        [*PRETRAINING, "--input_train_files=none*"], "no file matches --input_train_files=none*",
    ),
    "garbage": (
        [*PRETRAINING, "--input_train_files=garbage.tfrecord"],
        "garbage.tfrecord is no file of TFRecords, or is damaged: corrupted record at 0",
    ),
    "length": (
        [*PRETRAINING, "--input_train_files=hidden0.tfrecord", "--max_seq_length=13"],
        "hidden0.tfrecord: input_ids of its first record has 12 integers; 13 are expected, by "
        "--max_seq_length=13",
    ),
    "predictions": (
        [*PRETRAINING, "--input_train_files=hidden0.tfrecord", "--max_predictions_per_seq=4"],
        "masked_lm_positions of its first record has 3 integers; 4 are expected, by "
        "--max_predictions_per_seq=4",
    ),
    "features": (
        [*PRETRAINING, "--input_train_files=numbers.tfrecord"],
        "numbers.tfrecord: its records have no feature input_ids; they have numbers",
    ),
    "no_questions": ([*SQUAD, "--train_file=none.json"], "there is no file none.json"),
    "open_json": ([*SQUAD, "--train_file=open.json"], "open.json is not of SQuAD's form"),
    "other_json": ([*SQUAD, "--train_file=other.json"], "KeyError 'data'"),
    "no_sentences": (
        [*CLASSIFIER, "--data_dir=nowhere"],
        "there is no file nowhere/train.tsv; --data_dir should be the directory of the data",
    ),
    "label": (
        [*CLASSIFIER, "--data_dir=wrong"],
        "line 1 of wrong/train.tsv has 4 columns, ['x', '2', '', 'a sentence'], and cannot be "
        "read: the label is '2', not one of ['0', '1']",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    bert_data.write_model(directory)
    bert_data.write_hidden_tokens(directory)
    (directory / "wrong").mkdir()
    for name, text in FILES.items():
        (directory / name).write_text(text)
    numbers = tf.train.Feature(int64_list=tf.train.Int64List(value=[1, 2]))
    example = tf.train.Example(features=tf.train.Features(feature={"numbers": numbers}))
    with tf.io.TFRecordWriter(str(directory / "numbers.tfrecord")) as writer:
        writer.write(example.SerializeToString())
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_one_message(name, data):
    command, said = MISTAKES[name]
    done = processes.run("-m", *command, cwd=data)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
