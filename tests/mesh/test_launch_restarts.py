"""The launcher starts processes again when one is lost, and passes on what asks it to end."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import tensorflow.compat.v1 as tf
from helpers import processes
from helpers.paths import environment
from helpers.train import linear, preempted, restarted

from mesh_tensorflow import launch

# Notes each start, and fails in the first ones, by a signal to the second process.
FAILS = """
import json, os, signal, sys, time
config = json.loads(os.environ["TF_CONFIG"])
count = len(config["cluster"]["worker"]) + 1
name = config["task"]["type"] + str(config["task"]["index"])
open("starts", "a").write(f"{name} {count}\\n")
failing = int(sys.argv[1])
starts = open("starts").read().count(f"{name} ")
if starts <= failing and name == "worker0":
    os.kill(os.getpid(), signal.SIGKILL)
if starts <= failing:
    time.sleep(60)
"""


def run(directory, monkeypatch, failing, **options):
    """Returns the exit code, and how many processes were started each time."""
    monkeypatch.chdir(directory)
    code = launch.run([sys.executable, "-c", FAILS, str(failing)], launch.Options(**options))
    lines = (directory / "starts").read_text().splitlines()
    return code, [int(line.split()[1]) for line in lines if line.startswith("worker0 ")]


def test_processes_are_started_again(tmp_path, monkeypatch, capfd):
    code, counts = run(tmp_path, monkeypatch, failing=2, processes=4, restarts=3, min_processes=2)
    assert (code, counts) == (0, [4, 4, 2])
    text = capfd.readouterr().err
    assert (
        len(re.findall(r"process 1 \(worker 0, .*\) was killed by SIGKILL\nEnding the o", text))
        == 2
    )
    assert "Starting all 4 again: restart 1 of 3." in text
    assert "Starting 2 processes in place of 4: restart 2 of 3." in text


def test_a_mistake_is_not_tried_forever(tmp_path, monkeypatch, capfd):
    code, counts = run(tmp_path, monkeypatch, failing=9, processes=2, restarts=1)
    assert (code, counts) == (1, [2, 2])
    assert capfd.readouterr().err.endswith("launch: No restart is left of 1.\n")


def test_options_that_make_no_sense(capsys):
    for given, text in {
        "--restarts -1": "--restarts must be at least 0, got -1",
        "--restarts 1 --min_processes 5": "--min_processes must be 1 to 4, the number of processes",
        "--min_processes 2": "--min_processes has no effect without --restarts",
    }.items():
        with pytest.raises(SystemExit):
            launch.main(["--processes", "4", *given.split(), "script.py"])
        assert text in capsys.readouterr().err


SAVES = """
import json, os, signal, sys, time

def save(number, frame):
    for _ in range(10):
        time.sleep(0.1)
    open(f"saved-{os.getpid()}", "w").write(signal.Signals(number).name)
    sys.exit(128 + number)

signal.signal(signal.SIGINT, save)
signal.signal(signal.SIGTERM, save)
open(f"ready-{os.getpid()}", "w").close()
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "times", "passed_on", "code"),
    [
        ("SIGTERM", 1, "SIGTERM", 143),
        ("SIGHUP", 1, "SIGTERM", 143),
        ("SIGINT", 1, "SIGINT", 130),
        ("SIGTERM", 2, None, 143),
    ],
)
def test_what_asks_the_launcher_to_end_is_passed_on_once(name, times, passed_on, code, tmp_path):
    """Also Ctrl-C in a terminal, which goes to all processes of the launcher's group."""
    (tmp_path / "saves.py").write_text(SAVES)
    command = [
        sys.executable,
        "-m",
        "mesh_tensorflow.launch",
        "--processes",
        "2",
        "--restarts",
        "9",
    ]
    started = subprocess.Popen(
        [*command, "saves.py"],
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 90
    while len(list(tmp_path.glob("ready-*"))) < 2:
        assert time.monotonic() < deadline and started.poll() is None
        time.sleep(0.05)
    for _ in range(times):
        os.killpg(started.pid, getattr(signal, name))
        time.sleep(0.3)
    assert started.wait(60) == code
    saved = [path.read_text() for path in tmp_path.glob("saved-*")]
    assert saved == [passed_on] * 2 if passed_on else not saved
    assert (
        f"{passed_on or name} is passed on to all processes, which have 60 s"
        in started.stderr.read()
    )


@pytest.mark.slow
def test_a_training_saves_when_the_launcher_is_asked_to_end(tmp_path):
    command = [
        sys.executable,
        "-m",
        "mesh_tensorflow.launch",
        "--processes",
        "2",
        "--restarts",
        "2",
    ]
    with open(tmp_path / "errors", "w") as errors:
        started = subprocess.Popen(
            [*command, preempted.__file__, str(tmp_path), "simd"], env=environment(), stderr=errors
        )
    steps = tmp_path / "steps"
    deadline = time.monotonic() + 200
    while not steps.exists() or len(steps.read_text().splitlines()) < 3:
        assert time.monotonic() < deadline and started.poll() is None
        time.sleep(0.05)
    started.terminate()
    assert started.wait(60) == 143
    done = len(steps.read_text().splitlines())
    text = (tmp_path / "errors").read_text()
    assert f"SIGTERM: stopped at step {done} of 1000000, saved as" in text and "again:" not in text
    assert tf.train.latest_checkpoint(str(tmp_path / "model")).endswith(f"model.ckpt-{done}")


@pytest.mark.slow
def test_a_training_goes_on_with_fewer_processes(tmp_path):
    """Twice the second process is killed, at a step of its own; the numbers are those of one run."""
    options = ["--restarts", "2", "--min_processes", "1"]
    done = processes.launch(2, *options, restarted.__file__, tmp_path, timeout=500)
    assert done.stderr.count("process 1 (worker 0, 127.0.0.1:") == 2
    assert "Starting 1 process in place of 2: restart 2 of 2." in done.stderr
    assert json.loads((tmp_path / "model" / "best.json").read_text())["min loss"][-1][0] == 12
    losses = restarted.losses(tmp_path)
    expected = linear.fit(restarted.STEPS).losses
    assert losses == pytest.approx(expected, rel=1e-4) and len(losses) == restarted.STEPS
