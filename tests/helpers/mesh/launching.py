"""Ways to start programs of several processes, and to tell a process which one it is."""

import json
import subprocess
import sys

from helpers.paths import WORKERS, environment


def run_script(directory, count, *arguments, extra=(), script="simd_worker.py", timeout=240):
    """Launches a worker script; returns the finished process."""
    command = [
        sys.executable,
        "-m",
        "mesh_tensorflow.launch",
        "--processes",
        str(count),
        *extra,
        str(WORKERS / script),
        *map(str, arguments),
    ]
    return subprocess.run(
        command,
        env=environment(TF_CPP_MIN_LOG_LEVEL="3"),
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=directory,
    )


def tf_config(cluster, kind, index):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}
