"""The language model's example: what it learns, how it resumes, what it refuses."""

import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from helpers import noise, processes
from helpers.paths import EXAMPLES

sys.path.append(str(EXAMPLES))

import transformer_lm

SCRIPT = EXAMPLES / "transformer_lm.py"
SMALL = [
    "--gin_param=d_model = 16",
    "--gin_param=d_ff = 32",
    "--gin_param=num_layers = 1",
    "--gin_param=utils.run.sequence_length = {'targets': 32}",
    "--batch_size=4",
]


def run(*flags, code=0):
    done = processes.run(SCRIPT, *flags)
    assert done.returncode == code, done.stderr
    # All of the message of a mistake serves the user.
    noise.check(done, served=[""] if code else ())
    return done.stdout if code == 0 else done.stderr


def held_out(text, by):
    return float(re.search(rf"^held out, by the {by}: ([\d.]+) bits per byte", text, re.M)[1])


def steps(text):
    """Returns the held-out bits per byte by step."""
    found = re.findall(r"^step (\d+)/\d+  held out ([\d.]+) bits", text, re.M)
    return {int(step): float(bits) for step, bits in found}


@pytest.mark.slow
def test_quick_form_learns_more_than_the_frequencies_of_pairs():
    text = run("--quick")
    assert re.search(r"data  \d+ files .*: \d{7} bytes to train on, \d{6} held out", text)
    assert held_out(text, "model") < min(
        transformer_lm.QUICK_BITS, held_out(text, "byte before alone")
    )
    samples = re.findall(r"^--- .* goes on:\n([^-]+)", text, re.M)
    assert len(samples) == len(transformer_lm.PROMPTS)
    assert all(s.startswith(p) for s, p in zip(samples, transformer_lm.PROMPTS))


@pytest.mark.slow
def test_resumes_after_ctrl_c_in_simd_as_if_it_had_not_stopped(tmp_path):
    more = [*SMALL, "--train_steps=60", "--steps_per_checkpoint=20"]
    whole = steps(run(*more, f"--model_dir={tmp_path / 'whole'}"))
    assert list(whole) == [20, 40, 60]
    directory = f"--model_dir={tmp_path / 'parts'}"
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *more, directory],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        if line.startswith("step 20/60"):
            process.send_signal(signal.SIGINT)
            break
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert re.search(r"^stopped: .*checkpoint", errors, re.M) and "Traceback" not in errors
    again = run(
        *more,
        directory,
        "--mesh_impl=simd",
        "--mesh_shape=all:2",
        "--layout=batch:all",
        "--prompt=def f(",
    )
    assert steps(again)[60] == pytest.approx(whole[60], abs=2e-3)
    assert "--- 'def f(' goes on:\ndef f(" in again
    done = run(*more, directory)
    assert f"{tmp_path / 'parts'} has been trained for 60 steps already" in done
    assert held_out(done, "model") == whole[60]
    other = run(*SMALL, directory, "--gin_param=d_model = 32", code=2)
    assert "error: checkpoint" in other and "is not of this program" in other


AUTO = ("seconds = 15", "cache = ''")


@pytest.mark.slow
def test_rings_and_stored_layouts_give_the_same_results():
    few = [*SMALL, "--train_steps=10", "--steps_per_checkpoint=10"]
    alone, *others = (
        steps(run(*few, *flags))
        for flags in (
            ["--mesh_shape=", "--layout="],
            ["--ring"],
            ["--zero=3"],
            ["--layout=batch:rows;length:cols;attention_heads:cols"],
            ["--layout=batch:rows;heads:cols;d_ff:cols;residual_length:cols"],
            ["--layout=auto", *(f"--gin_param=auto_mtf.Auto.{value}" for value in AUTO)],
        )
    )
    for found in others:
        assert found == pytest.approx(alone, abs=2e-3)


@pytest.mark.slow
def test_pipeline(tmp_path):
    """It is trained in stages, and goes on with layers in a row, from the same checkpoint."""
    few = [*SMALL, "--gin_param=num_layers = 2", "--steps_per_checkpoint=10"]
    where = f"--model_dir={tmp_path}"
    found = run(
        *few, where, "--train_steps=10", "--pipeline=2", "--prompt=def f(", "--batch_size=8"
    )
    assert list(steps(found)) == [10] and "--- 'def f(' goes on:\ndef f(" in found
    more = run(*few, where, "--train_steps=20", "--mesh_shape=", "--layout=", "--batch_size=8")
    assert steps(more)[20] < steps(found)[10]


@pytest.mark.slow
def test_pipelines_give_the_same_results():
    few = [*SMALL, "--gin_param=num_layers = 2", "--train_steps=10", "--steps_per_checkpoint=10"]
    alone = steps(run(*few, "--mesh_shape=", "--layout="))
    pipeline = ["--pipeline=2", "--gin_param=PipelinedLayerStack.num_microbatches = 2"]
    for flags in (pipeline, [*pipeline, "--mesh_impl=simd"]):
        assert steps(run(*few, *flags)) == pytest.approx(alone, abs=2e-3)


@pytest.mark.parametrize(
    "flag, text",
    [
        (
            {"layout": "bacth:rows"},
            "--layout splits 'bacth' over 'rows', but the model has no dimension",
        ),
        (
            {"mesh_shape": "all:2"},
            "--layout splits dimensions over 'cols', but --mesh_shape has no such",
        ),
        ({"mesh_impl": "tpu"}, "--mesh_impl is 'tpu': choose one of placement, simd"),
        ({"batch_size": -1}, "--batch_size is -1: it has to be 0 or more"),
        ({"zero": 4}, "--zero is 4: a stage is 1, 2 or 3, and 0 is for none"),
        ({"pipeline": -1}, "--pipeline is -1: it has to be 0 or more"),
        ({"layout": "auto", "zero": 3}, "--layout=auto with --zero: it is a layout that says"),
        ({"layout": "auto", "pipeline": 2}, "--layout=auto with --pipeline: it is a layout that"),
        (
            {"pipeline": 2, "layout": "batch:rows"},
            "by the rule stages:NAME, which --layout=batch:rows lacks: add it",
        ),
        ({"layout": "stages:cols"}, "splits stages, but the model has none: add --pipeline=2"),
        (
            {"zero": 2, "layout": "heads:cols"},
            "--layout=heads:cols does not split it: add batch:NAME",
        ),
        ({"text": "/none/*.txt"}, "/none/*.txt names 0 files, but two are needed at least"),
    ],
)
def test_mistakes(flag, text):
    with pytest.raises(ValueError) as raised:
        transformer_lm.run(transformer_lm.Options(**flag))
    assert text in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flag, text",
    [
        (
            "--batch_size=3",
            "error: Tensor dimension size not divisible by mesh dimension size: batch=3",
        ),
        ("--gin_param=d_model = = 3", "error: --gin_param: Unable to parse value."),
        ("--gin_param=Unitransformer.d_modell = 3", "The nearest names are d_model."),
    ],
)
def test_mistakes_have_no_traceback(flag, text):
    errors = run(flag, code=2)
    assert text in errors and "Traceback" not in errors and "configurable 'run'" not in errors


def test_the_corpus_is_the_same_each_time_and_no_file_is_in_both_parts(tmp_path):
    for i in range(20):
        (tmp_path / f"{i:02d}.txt").write_bytes(bytes([i]) * 10)
    corpus = transformer_lm.load(f"{tmp_path}/*.txt")
    assert set(corpus.held_out) == {9, 19} and set(corpus.train) == set(range(20)) - {9, 19}
    library = transformer_lm.load("")
    assert np.array_equal(library.train, transformer_lm.load("").train)
    rows = list(transformer_lm.test_rows(library.held_out, 128, 256))
    assert rows == list(transformer_lm.test_rows(library.held_out, 128, 256))
    assert len(rows) == 256 and {len(row) for row in rows} == {128}
    with pytest.raises(ValueError, match="have 20 bytes held out, but 64 are needed"):
        transformer_lm.check_sizes(corpus, 32, 2)


def test_bits_by_pairs_of_bytes():
    even = np.frombuffer(b"ab" * 4000, np.uint8)
    corpus = transformer_lm.Corpus("", even, even)
    # 4000 of 4256 counts, with one added to each of 256.
    assert transformer_lm.pair_bits(corpus) == pytest.approx(np.log2(4256 / 4001), rel=1e-3)
