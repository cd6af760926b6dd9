"""The toy model of a TPUEstimator: its loss falls, it resumes, and says what is wrong."""

import pathlib
import re

import pytest
from helpers import noise, processes

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "examples" / "toy_model_tpu.py"


def run(*flags, code=0):
    done = processes.run(SCRIPT, *flags)
    assert done.returncode == code, done.stderr
    noise.check(done)
    return done


def losses(text):
    """Returns the losses by step."""
    found = re.findall(r"^loss = ([\d.e-]+), step = (\d+)", text, re.M)
    return {int(step): float(loss) for loss, step in found}


@pytest.mark.slow
def test_the_loss_falls_and_training_resumes(tmp_path):
    flags = ["--iterations=50", "--steps_per_checkpoint=60", f"--log_file={tmp_path / 'log'}"]
    whole = run("--train_steps=200", f"--model_dir={tmp_path / 'whole'}", *flags)
    found = losses(whole.stderr)
    assert list(found) == [1, 51, 101, 151]
    assert found[151] < found[1] / 4
    assert losses((tmp_path / "log").read_text()) == found
    parts = f"--model_dir={tmp_path / 'parts'}"
    run("--train_steps=100", parts, *flags)
    # On another mesh, in another layout.
    again = run(
        "--train_steps=200",
        parts,
        "--mesh_shape=rows:2;cols:2",
        "--layout=batch:rows;io:cols",
        *flags,
    )
    assert losses(again.stderr)[151] == pytest.approx(found[151], rel=1e-3)
    tests = [re.match(r"step 200  test loss ([\d.]+)\n", r.stdout)[1] for r in (whole, again)]
    assert "the same command, with more steps, goes on from there" in whole.stdout
    assert float(tests[0]) == pytest.approx(float(tests[1]), rel=1e-3)


@pytest.mark.slow
def test_bfloat16_and_a_nan():
    done = run(
        "--train_steps=20",
        "--step_with_nan=5",
        "--slice_dtype=bfloat16",
        "--activation_dtype=bfloat16",
        "--num_hidden_layers=2",
        code=1,
    )
    assert "error: the loss is NaN in step 5. The variables after it were saved" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "flag, text",
    [
        ("--slice_dtype=int8", "error: --slice_dtype is 'int8': choose one of float32, bfloat16"),
        (["--layout=auto", "--tpu=mine"], "error: --layout=auto with --tpu: layouts are tried on"),
        ("--batch_size=0", "error: --batch_size is 0: it has to be 1 or more"),
    ],
)
def test_mistakes(flag, text):
    assert text in run(*([flag] if isinstance(flag, str) else flag), code=2).stderr


@pytest.mark.slow
def test_one_program_on_all_processors_computes_the_same():
    flags = [
        "--mesh_shape=rows:2;cols:2",
        "--layout=batch:rows;hidden:cols",
        "--iterations=20",
        "--train_steps=60",
    ]
    placed, simd = (losses(run(*flags, *more).stderr) for more in ([], ["--use_tpu"]))
    assert len(placed) == 3
    assert simd == pytest.approx(placed, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--use_tpu"]])
def test_the_layout_that_is_the_fastest_computes_the_same(more, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = ["--mesh_shape=rows:2;cols:2", "--iterations=20", "--train_steps=60", *more]
    auto, given = (run(*flags, layout) for layout in ("--layout=auto", "--layout=batch:rows"))
    assert re.search(r"^layout .*: the fastest of \d that were tried$", auto.stderr, re.M)
    assert losses(auto.stderr) == pytest.approx(losses(given.stderr), rel=1e-4)
