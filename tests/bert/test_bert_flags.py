"""Flags of BERT's programs, and what is wrong with some."""

import pytest
from absl.testing import flagsaver
from helpers import processes
from helpers.bert import bert_data

from mesh_tensorflow.bert import run_classifier, run_pretraining, run_squad, tokenization

PROGRAMS = {"classifier": run_classifier, "squad": run_squad, "pretraining": run_pretraining}


pytestmark = pytest.mark.usefixtures("parsed_flags")


@pytest.fixture
def common(tmp_path):
    bert_data.write_model(tmp_path)
    return {
        "bert_config_file": str(tmp_path / "config.json"),
        "vocab_file": str(tmp_path / "vocab.txt"),
        "output_dir": str(tmp_path / "out"),
        "data_dir": str(tmp_path),
        "task_name": "cola",
        "max_seq_length": 16,
        "max_query_length": 8,
        "mesh_shape": "batch:1",
    }


ERRORS = {
    "no_directory": (
        "classifier",
        {"output_dir": None},
        "run_classifier: --output_dir must be given",
    ),
    "nothing_to_do": ("classifier", {}, "At least one of `do_train`.*pass --do_train"),
    "task": ("classifier", {"do_train": True, "task_name": "x"}, "Task not found: x; .*cola, mnli"),
    "no_data": ("classifier", {"do_train": True}, "ColaProcessor: there is no file .*train.tsv"),
    "no_vocabulary": ("classifier", {"do_train": True, "vocab_file": "/none"}, "no file /none"),
    "no_config": ("classifier", {"do_eval": True, "bert_config_file": "/none"}, "no file /none"),
    "long": (
        "classifier",
        {"do_eval": True, "max_seq_length": 64},
        "Cannot use sequence length 64.*32",
    ),
    "case": (
        "classifier",
        {"do_eval": True, "init_checkpoint": "cased_L-12_H-768_A-12/bert_model.ckpt"},
        "trained with text as it is: pass --do_lower_case=False",
    ),
    "squad_nothing": ("squad", {}, "At least one of `do_train` or `do_predict`"),
    "squad_file": ("squad", {"do_train": True}, "If `do_train` is True, then `train_file` must be"),
    "squad_predict": ("squad", {"do_predict": True}, "then `predict_file` must be specified"),
    "squad_query": (
        "squad",
        {"do_predict": True, "predict_file": "x", "max_query_length": 13},
        r"max_seq_length \(16\) must be greater than max_query_length \(13\)",
    ),
    "squad_no_file": (
        "squad",
        {"do_train": True, "train_file": "/none.json"},
        "no file /none.json",
    ),
    "squad_long": (
        "squad",
        {"do_predict": True, "predict_file": "x", "max_seq_length": 64},
        "Cannot use sequence length 64",
    ),
    "mode": ("pretraining", {"mode": "infer"}, "Unknown mode: 'infer'; .*train_and_eval, train"),
    "steps": ("pretraining", {"steps_per_eval": 0}, "--steps_per_eval=0 should be 1 or more; use"),
    "no_records": (
        "pretraining",
        {"input_train_files": "/none*"},
        "no file matches --input_train_files",
    ),
    "no_records_flag": ("pretraining", {"mode": "eval"}, "--input_eval_files must be given"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(common, name):
    program, options, message = ERRORS[name]
    with flagsaver.flagsaver(**{**common, **options}), pytest.raises(ValueError, match=message):
        PROGRAMS[program].main(None)


def test_too_few_examples(common, tmp_path):
    bert_data.write_cola(tmp_path, train=3)
    with flagsaver.flagsaver(**common, do_train=True, num_train_epochs=1.0):
        with pytest.raises(ValueError, match=r"no step: 3 examples, --train_batch_size=32"):
            run_classifier.main(None)


def test_a_layout_that_does_not_divide(common, tmp_path):
    bert_data.write_cola(tmp_path)
    wrong = {"mesh_shape": "model:3", "layout": "num_heads:model", "train_batch_size": 4}
    with flagsaver.flagsaver(**{**common, **wrong}, do_train=True):
        with pytest.raises(ValueError, match="num_heads=2"):
            run_classifier.main(None)


def test_tables_that_cannot_be_read(tmp_path):
    (tmp_path / "train.tsv").write_text("a\t1\t\tgood\nb\t2\t\tbad\n")
    with pytest.raises(ValueError, match=r"line 2 of .*train.tsv.* the label is '2'"):
        run_classifier.ColaProcessor().get_train_examples(str(tmp_path))
    (tmp_path / "train.tsv").write_text("a\n")
    with pytest.raises(ValueError, match=r"line 1 of .*has 1 columns"):
        run_classifier.ColaProcessor().get_train_examples(str(tmp_path))


def test_questions_that_cannot_be_read(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"version": 1}')
    with pytest.raises(ValueError, match=r"not of SQuAD's form.*KeyError 'data'"):
        run_squad.read_squad_examples(str(path), True)


def test_a_label_that_is_not_known():
    example = run_classifier.InputExample("e", "a", label="2")
    with pytest.raises(ValueError, match=r"example e has the label '2', which is none of \['0'\]"):
        run_classifier.convert_single_example(0, example, ["0"], 8, None)


def test_unknown_tokens():
    with pytest.raises(KeyError, match="the vocabulary of 1 entries lacks 'b'"):
        tokenization.convert_tokens_to_ids({"a": 1}, ["a", "b"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "order", ["run_squad run_classifier run_pretraining", "run_pretraining run_squad"]
)
def test_programs_in_one_process(order):
    """In any order, also with the transformer's; the first one's defaults are in force."""
    lines = [f"from mesh_tensorflow.bert import {name}" for name in order.split()]
    program = "\n".join(
        [
            *lines,
            "from mesh_tensorflow.transformer import main",
            "from absl import flags",
            "flags.FLAGS(['x', '--mode=eval', '--tpu_zone=z'])",
            "print(flags.FLAGS.mode, flags.FLAGS.max_seq_length, flags.FLAGS.tpu_zone)",
        ]
    )
    found = processes.run("-c", program)
    assert found.returncode == 0, found.stderr[-500:]
    length = "384" if order.startswith("run_squad") else "128"
    assert found.stdout.split() == ["eval", length, "z"]
