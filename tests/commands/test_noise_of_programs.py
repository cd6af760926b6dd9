"""The package's programs and the benchmarks write what serves their users, in pipes and terminals."""

import re

import pytest
from helpers import noise, processes
from helpers.bert import bert_data
from helpers.paths import TESTS

T5 = TESTS / "transformer" / "t5_fixtures" / "t5"
BENCHMARKS = TESTS.parent / "benchmarks"
BERT = [
    "--bert_config_file=config.json", "--output_dir=out", "--mesh_shape=batch:2",
    "--train_batch_size=4",
]  # fmt: skip
# What the trainers say for their users.
SERVED = [
    r"^(mesh|layout|parameters|per processor|communication|checkpoints) +\S",
    r"^ {10,}\S",  # further lines of the communication
    r"^warning: no gradient for variable ",
    r"^loss = \S+, step = \d+",
    r"^Loss for final step: ",
    r"^(Training|Predicting) on? ?\d|^Writing predictions ",
    r"^(Evaluated|Saving dict for global step) ",
    r"^  [\w/]+ = ",
    r"^measuring |^measured ",
    r"^usage: |^  ",
]
REPORT = [
    "--gin_file=models/lm_base.gin", "--gin_param=utils.run.model_type = 'lm'",
    "--gin_param=utils.run.sequence_length = {'targets': 16}",
    "--gin_param=Unitransformer.max_length = 16", "--gin_param=num_layers = 1",
    "--gin_param=d_model = 16", "--gin_param=d_ff = 32", "--gin_param=utils.run.batch_size = 8",
    "--vocab_size=128", "--mesh_shape=rows:2,cols:2", "--layout=batch:rows,d_ff:cols",
    "--output=report.html",
]  # fmt: skip
# By program: its arguments, in a directory of small data, and a line that it writes.
ROWS = {
    "mesh_tensorflow.bert.run_pretraining": (
        [*BERT, "--input_train_files=hidden*.tfrecord", "--input_eval_files=hidden*.tfrecord",
         "--max_seq_length=12", "--max_predictions_per_seq=3", "--eval_batch_size=4",
         "--num_train_steps=2", "--num_warmup_steps=1", "--max_eval_steps=2", "--steps_per_eval=2",
         "--mode=train_and_eval"],
        r"^  next_sentence_loss = ",
    ),
    "mesh_tensorflow.bert.run_squad": (
        [*BERT, "--vocab_file=vocab.txt", "--max_seq_length=24", "--max_query_length=8",
         "--doc_stride=8", "--predict_batch_size=4", "--num_train_epochs=1", "--n_best_size=3",
         "--max_answer_length=4", "--do_train", "--do_predict", "--train_file=squad.json",
         "--predict_file=squad.json"],
        r"^Writing predictions to out/predictions.json",
    ),
    "mesh_tensorflow.auto_mtf.measure": (
        ["--output=machine.json", "--runs=1", "--processors=2", "--placement=shared"],
        r"--hardware=machine\.json",
    ),
    "mesh_tensorflow.launch": (["--processes=2", "member.py"], r"^member 0 of 2"),
    "mesh_tensorflow.testing.conformance": (
        ["mesh_tensorflow.testing.conformance:placement", "--only=relu", "--layouts=1"],
        r"passed|conform",
    ),
    "mesh_tensorflow.report": (REPORT, r"^report +report\.html"),
    "mesh_tensorflow.transformer.convert": (["from-huggingface", str(T5), "converted"], r"the result is in converted$"),
}  # fmt: skip
MEMBER = """
from mesh_tensorflow import launch

cluster = launch.processes()
print(f"member {cluster.index} of {cluster.count}", flush=True)
"""
IN_TERMINALS = {
    "mesh_tensorflow.bert.run_pretraining",
    "mesh_tensorflow.auto_mtf.measure",
    "mesh_tensorflow.report",
}
SHORT = {("mesh_tensorflow.launch", False)}


# By benchmark: the arguments with which it is short, and a line that it writes.
BENCHMARK_ROWS = {
    "masks": ([], r"^a mask of 512 x 1024: "),
    "front_ends": (["--rounds=1", "--steps=2"], r"ratio|mtf\.function"),
}


@pytest.fixture
def data(tmp_path):
    bert_data.write_model(tmp_path)
    bert_data.write_squad(tmp_path)
    bert_data.write_hidden_tokens(tmp_path)
    (tmp_path / "member.py").write_text(MEMBER)
    return tmp_path


@pytest.mark.slow("mesh_tensorflow.launch*")
@pytest.mark.parametrize(
    "program, terminal",
    [
        pytest.param(name, terminal, marks=[] if (name, terminal) in SHORT else [pytest.mark.slow])
        for name in ROWS
        for terminal in (False, True)
        if not terminal or name in IN_TERMINALS
    ],
)
def test_programs(program, terminal, data):
    arguments, wanted = ROWS[program]
    lines = noise.run("-m", program, *arguments, terminal=terminal, cwd=data, served=SERVED)
    assert any(re.search(wanted, line) for line in lines), lines


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARK_ROWS)
def test_benchmarks(name, tmp_path):
    arguments, wanted = BENCHMARK_ROWS[name]
    lines = noise.run(BENCHMARKS / f"{name}.py", *arguments, cwd=tmp_path, most=0)
    assert any(re.search(wanted, line) for line in lines), lines


# Those that other programs start, or that run in the classic's environment.
PARTS = {"auto_mtf_classic"}
PROGRAMS = sorted(
    path.stem
    for path in BENCHMARKS.glob("*.py")
    if '__name__ == "__main__"' in path.read_text() and path.stem not in PARTS
)
HELP = """
import runpy, sys
sys.argv = [sys.argv[1], "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as ended:
    assert not ended.code, ended.code
assert "tensorflow" not in sys.modules
"""


@pytest.mark.slow_but(13)
@pytest.mark.parametrize("name", PROGRAMS)
def test_help_of_benchmarks_needs_no_tensorflow(name):
    path = BENCHMARKS / f"{name}.py"
    program = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n{HELP}"
    done = processes.python("-c", program, path)
    assert done.stdout.startswith("usage: ") and not done.stderr


@pytest.mark.slow
def test_tests_start_without_news_of_tensorflow(tmp_path):
    """Those of pytest-xdist too, whose first process does not capture what it writes."""
    done = processes.python(
        "-m", "pytest", "-q", "-s", "--collect-only", "-p", "no:cacheprovider",
        TESTS / "test_security.py", cwd=TESTS.parent, without=["TF_CPP_MIN_LOG_LEVEL"],
    )  # fmt: skip
    assert not noise.noise_in((done.stdout + done.stderr).splitlines())
