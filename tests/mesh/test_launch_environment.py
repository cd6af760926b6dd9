"""What processes are told of each other: by TF_CONFIG, by SLURM and by a command line."""

import os

import pytest
from helpers.mesh.launching import tf_config

from mesh_tensorflow import launch
from mesh_tensorflow._processes import processes


@pytest.mark.parametrize(
    "environment, addresses, index",
    [
        ({}, ("localhost:0",), 0),
        (tf_config({"worker": ["a:1", "b:2"]}, "worker", 1), ("a:1", "b:2"), 1),
        (
            tf_config({"chief": ["c:1"], "worker": ["a:1", "b:2"]}, "worker", 1),
            ("c:1", "a:1", "b:2"),
            2,
        ),
        (tf_config({"chief": ["c:1"], "worker": ["a:1"]}, "chief", 0), ("c:1", "a:1"), 0),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, ("localhost:0",), 0),
        (
            {
                "SLURM_NTASKS": "5",
                "SLURM_PROCID": "4",
                "SLURM_STEP_NODELIST": "gpu[08-09],big",
                "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
            },
            ("gpu08:8476", "gpu08:8477", "gpu09:8476", "gpu09:8477", "big:8476"),
            4,
        ),
        (
            {
                "SLURM_NTASKS": "5",
                "SLURM_PROCID": "3",
                "SLURM_STEP_NODELIST": "a,b",
                "SLURM_STEP_TASKS_PER_NODE": "3,2",
                "SLURM_DISTRIBUTION": "cyclic:block",
                "SLURM_NODEID": "1",
                "SLURM_LOCALID": "1",
            },
            ("a:8476", "b:8476", "a:8477", "b:8477", "a:8478"),
            3,
        ),
    ],
)
def test_processes_are_read_from_the_environment(environment, addresses, index):
    found = launch.processes(environment)
    assert (found.addresses, found.index) == (addresses, index)
    assert found.is_chief == (index == 0)


def test_slurm_says_which_nodes_there_are(tmp_path, monkeypatch):
    """Its command knows more forms than TensorFlow; here a script stands for it."""
    command = tmp_path / "scontrol"
    command.write_text(
        '#!/bin/sh\n[ "$*" = "show hostnames r[1-2]n[1-2]" ] && printf "r1n1\\nr1n2\\nr2n1\\nr2n2\\n"\n'
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = launch.processes(
        {
            "SLURM_NTASKS": "4",
            "SLURM_PROCID": "2",
            "SLURM_STEP_NODELIST": "r[1-2]n[1-2]",
            "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
        }
    )
    assert found.addresses == ("r1n1:8476", "r1n2:8476", "r2n1:8476", "r2n2:8476")
    assert found.index == 2


def test_devices():
    mine = launch.Processes(("a:1", "b:2"), 1)
    assert mine.devices(per_process=2)[1:3] == [
        "/job:worker/replica:0/task:0/device:CPU:1",
        "/job:worker/replica:0/task:1/device:CPU:0",
    ]
    assert mine.local(2) == [2, 3]
    assert mine.devices("GPU") == [f"/job:worker/replica:0/task:{i}/device:GPU:0" for i in (0, 1)]


@pytest.mark.parametrize(
    "environment, text",
    [
        ({"TF_CONFIG": "{"}, "TF_CONFIG is not JSON .* Unset it for a run of one process"),
        ({"TF_CONFIG": "[1]"}, "TF_CONFIG should be a JSON object"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, "TF_CONFIG must be JSON such as"),
        (
            tf_config({"worker": ["a:1", "b"]}, "worker", 0),
            "the address 'b' should be \"host:port\"",
        ),
        (tf_config({"worker": ["a:port"]}, "worker", 0), "the address 'a:port' should be"),
        (tf_config({"worker": ["a:1", 7]}, "worker", 0), "the address 7 should be"),
        (tf_config({"worker": ["a:1", "b:0"]}, "worker", 0), "the address 'b:0' should be"),
        (
            tf_config({"worker": ["a:1"], "ps": ["b:1"]}, "ps", 0),
            "this task is ps 0, but all processes",
        ),
        (
            tf_config({"worker": ["a:1"]}, "evaluator", 0),
            "this task is evaluator 0, .* make it a worker",
        ),
        (
            {
                "SLURM_NTASKS": "4",
                "SLURM_PROCID": "1",
                "SLURM_STEP_NODELIST": "a,b",
                "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
                "SLURM_NODEID": "1",
                "SLURM_LOCALID": "0",
            },
            "task 1 is number 0 of node 1, but with the distribution block .* --distribution=block",
        ),
        (
            {"SLURM_NTASKS": "two", "SLURM_PROCID": "0"},
            "SLURM_NTASKS should be a number, .* is 'two'",
        ),
        (
            {"SLURM_NTASKS": "2", "SLURM_PROCID": "-1"},
            "SLURM_PROCID should be a number, .* is '-1'",
        ),
        (tf_config({"worker": ["a:1"]}, "worker", 3), "is not one of the 1 in the cluster"),
        (tf_config({"chief": ["a:1"], "worker": ["b:1"]}, "chief", 1), "is not one of the 2"),
        *[
            (
                tf_config({"chief": ["a:1"], "worker": ["b:1"]}, "worker", index),
                f'the "index" of "task" is {index!r}; it should be a whole number',
            )
            for index in (-1, 0.5, True, None, "-1", "0.5")
        ],
        (
            tf_config({"worker": ["a:1", "b:1", "a:1"]}, "worker", 0),
            "a:1 is the address of several tasks, .* a port of its own; .* a:1, b:1, a:1",
        ),
        (
            tf_config({"chief": ["a:1"], "worker": ["a:1"]}, "worker", 0),
            "a:1 is the address of several tasks",
        ),
        (
            {
                "SLURM_NTASKS": "2",
                "SLURM_PROCID": "5",
                "SLURM_STEP_NODELIST": "a,b",
                "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
            },
            "SLURM_PROCID is 5, but SLURM_NTASKS says that there are 2 tasks, counted from 0",
        ),
        (
            {
                "SLURM_NTASKS": "3",
                "SLURM_PROCID": "0",
                "SLURM_STEP_NODELIST": "a,b",
                "SLURM_STEP_TASKS_PER_NODE": "2",
            },
            r"3 tasks, but the nodes are \['a', 'b'\] with \[2\]",
        ),
        (
            {
                "SLURM_NTASKS": "2",
                "SLURM_PROCID": "0",
                "SLURM_STEP_NODELIST": "a,b",
                "SLURM_STEP_TASKS_PER_NODE": "two",
            },
            "SLURM_STEP_TASKS_PER_NODE should be .* but is 'two'",
        ),
        (
            {
                "SLURM_NTASKS": "4",
                "SLURM_PROCID": "0",
                "SLURM_STEP_NODELIST": "r[1-2]n[1-2]",
                "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
            },
            r"cannot tell which nodes 'r\[1-2\]n\[1-2\]' are: 'scontrol show hostnames'",
        ),
    ],
)
def test_a_wrong_environment(environment, text, monkeypatch):
    monkeypatch.setenv("PATH", "")  # where SLURM's commands would be
    with pytest.raises(ValueError, match=text):
        launch.processes(environment)


@pytest.mark.parametrize(
    "environment, text",
    [
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "fit: OMPI_COMM_WORLD_SIZE=2 says that there are 2"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE should be a number, as a launcher sets it, but is"),
        ({"PMI_SIZE": "-1"}, "PMI_SIZE should be a number"),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "2"}, "SLURM_PROCID is 2, but"),
    ],
)
def test_processes_that_do_not_know_each_other(environment, text):
    with pytest.raises(ValueError, match=text):
        processes.check_described(environment)
    processes.check_described({"WORLD_SIZE": "1", "PMI_SIZE": ""})


def test_a_runtime_that_is_none(monkeypatch):
    monkeypatch.setenv("MTF_RUNTIME", "jax")
    with pytest.raises(ValueError, match="MTF_RUNTIME is 'jax'; it should be \"tensorflow\" or"):
        processes.is_pjrt()


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--processes", "2", "nowhere.py"], "there is no script nowhere.py"),
        (["--processes", "0", __file__], "--processes must be at least 1, got 0"),
        (["--processes", "1"], "name a script, or a module by -m"),
        (["--processes", "1", "-m"], "name a script, or a module by -m"),
    ],
)
def test_a_wrong_command_line(arguments, text, capsys):
    with pytest.raises(SystemExit):
        launch.main(arguments)
    assert text in capsys.readouterr().err
